"""Largest number of sequences that fit the memory of the devices which a step law is of."""

from __future__ import annotations

from model.architectures import draft_heads, published_shapes
from model.architectures.transformer import Shape
from model.hardware import cost_models, devices
from model.hardware.cost_models import DeviceMemory

MOST_SEQUENCES = 65_536


def memory_of(
    shape: Shape, device: devices.Device, *, context: int, sequences: int, tensor_parallel: int, draft: Shape | None = None,
    draft_budget: int | None = None,
) -> DeviceMemory:  # fmt: skip
    """Memory of one of `tensor_parallel` devices that hold the model, its draft, and `sequences` sequences of `context`
    positions, of which the draft keeps at most `draft_budget`."""
    # Engines split draft heads as their targets, and run draft models whole.
    also = () if draft is None else (draft.shard(1 if draft.draft is None else tensor_parallel),)
    return cost_models.memory(
        shape, device.memory_bytes, context=context, batch=sequences, tensor_parallel=tensor_parallel, also=also,
        draft_budget=draft_budget,
    )  # fmt: skip


def largest_batch(
    shape: Shape, device: devices.Device, *, context: int, tensor_parallel: int, draft: Shape | None = None,
    draft_budget: int | None = None,
) -> int:  # fmt: skip
    """Largest number of sequences whose weights and cache fit; 0 if the weights alone do not.

    A draft whose passes read at most `draft_budget` cached positions of a sequence keeps no others.

    Llama-3.1-8B in bfloat16 on an H100:

    >>> from model.architectures.published_shapes import preset
    >>> largest_batch(preset("llama-3.1-8b"), devices.device("h100"), context=1024, tensor_parallel=1)
    520

    Llama-3.2-1B drafts for it at long contexts, and reads 512 positions of them:

    >>> of = {"context": 32_000, "tensor_parallel": 1, "draft": preset("llama-3.2-1b")}
    >>> [largest_batch(preset("llama-3.1-8b"), devices.device("h100"), **of, draft_budget=each) for each in (None, 512)]
    [12, 15]
    """
    low, high = 0, MOST_SEQUENCES
    while low < high:
        middle = (low + high + 1) // 2
        room = memory_of(
            shape, device, context=context, sequences=middle, tensor_parallel=tensor_parallel, draft=draft,
            draft_budget=draft_budget,
        )  # fmt: skip
        low, high = (middle, high) if room.share <= 1 else (low, middle - 1)
    return low


def draft_shape(name: str | None, dtype: str | None = None) -> Shape | None:
    """Shape of a draft by name, or None."""
    return None if name is None else published_shapes.named_shape(name, dtype)


def of_target(draft: str, model: str) -> str:
    """Name of a draft for a model: a kind of draft head alone, such as `eagle3`, is that of the model.

    >>> of_target("EAGLE-3", "llama-3.1-8b"), of_target("llama-68m", "llama-2-7b")
    ('eagle3:llama-3.1-8b', 'llama-68m')
    """
    head = {"eagle-3": "eagle3", "eagle-2": "eagle", "eagle2": "eagle"}.get(draft.lower(), draft.lower())
    return f"{head}:{model}" if head in draft_heads.ABOUT else draft
