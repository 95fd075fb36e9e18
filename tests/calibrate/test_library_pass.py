"""Passes of the library's models: logits, parts, graphs and sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from calibrate.devices import machine
from calibrate.loading.architectures import architecture
from calibrate.timing import library_pass
from calibrate.timing.single_pass import prepare
from model.architectures import published_shapes, transformer
from model.base.checks import ParameterError
from tests.support.tiny_configurations import TINY, build_library_model

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


def test_measured_models_have_weights_in_the_type_they_run_in(config: Callable[..., str]) -> None:
    """Random weights of no format, also where the model is published in one or its file names one."""
    path = config("llama", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16})
    for model in ("gpt-oss-20b", "deepseek-r1", path):
        assert published_shapes.named_shape(model).weights is not None
        assert architecture(model).shape.weights is None


# --- passes ---


@pytest.mark.parametrize("mode", ["eager", "cuda-graph"])
@pytest.mark.parametrize("kind", TINY)
def test_pass_on_a_cache_equals_the_end_of_the_whole_sequence(
    kind: str, mode: str, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled in chunks, cropped and run again, a pass gives the logits of the model without a cache."""
    model = build_library_model(config(kind))
    if kind == "mistral" and mode == "cuda-graph":  # its window is 6
        with pytest.raises(ParameterError, match=r"supports at most the sliding window of 6 positions, got 4 \+ 3"):
            prepare(model, 3, 4, 1, mode)
        return
    monkeypatch.setattr(library_pass, "CHUNK", 4)
    context, width = 10, 3
    text = torch.randint(0, 101, (2, context + width))
    given = 0

    def tokens(batch: int, size: int) -> torch.Tensor:
        nonlocal given
        given += size
        return text[:batch, given - size : given]

    monkeypatch.setattr(model, "tokens", tokens)
    with torch.inference_mode():
        work = prepare(model, width, context, 2, mode)
        ours = work.logits()
        assert work.length() == context + width
        work.roll_back()
        work.check()
        again = work.logits()
        if work.encoded:
            states = (work.encoded["encoder_hidden_states"],)
            whole = model.full(decoder_input_ids=text, encoder_outputs=states, use_cache=False).logits
        else:
            whole = model.full(input_ids=text, use_cache=False).logits
    assert given == context + width
    torch.testing.assert_close(ours, whole[:, context:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(again, ours, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in TINY if kind != "mistral"])
def test_graph_pass_reads_no_tensor_value(
    kind: str, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capturing on a GPU fails if the CPU waits for a value: this test finds it without a GPU."""
    model = build_library_model(config(kind))
    with torch.inference_mode():
        work = prepare(model, 3, 10, 2, "cuda-graph")
        work.logits()  # the first use may read values
        work.roll_back()
        asked: list[str] = []

        def heard(name: str, whole: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
            def ask(tensor: torch.Tensor) -> Any:
                asked.append(name)
                return whole(tensor)

            return ask

        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__"):
            monkeypatch.setattr(torch.Tensor, name, heard(name, getattr(torch.Tensor, name)))
        # The library reads fewer values while it is captured, which it detects on a GPU.
        monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
        work.logits()
        found = list(asked)
        assert work.length() == 13
    assert found == []
    assert asked  # the check does read a value: the spy works


def test_graph_is_captured_once_plain_and_once_with_marks(config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of GPU operations, with graphs that record nothing."""
    replayed: list[Any] = []

    class Graph:
        def replay(self) -> None:
            replayed.append(self)

    class Stream:
        def wait_stream(self, other: Any) -> None:
            """Nothing to wait for."""

    for name, stand_in in (
        ("CUDAGraph", Graph), ("Stream", Stream), ("current_stream", Stream),
        ("stream", lambda _: nullcontext()), ("graph", lambda _: nullcontext()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    model = build_library_model(config())
    marks: list[tuple[str, int, int]] = []
    with torch.inference_mode():
        work = prepare(model, 3, 10, 2, "cuda-graph")
        for _ in range(4):
            work.run()
            work.roll_back()
            work.check()
            work.run_marked(lambda *mark: marks.append(mark))
            work.roll_back()
            work.check()
    assert len(set(map(id, replayed))) == 2
    assert replayed == replayed[:2] * 4
    assert len(marks) == len(set(marks)) == 2 * len(model.parts)


@pytest.mark.parametrize("kind", TINY)
def test_parts_of_a_pass_are_marked_in_order(kind: str, config: Callable[..., str]) -> None:
    model = build_library_model(config(kind))
    marks: list[tuple[str, int, int]] = []
    with torch.inference_mode():
        work = prepare(model, 2, 5, 1)
        work.run_marked(lambda *mark: marks.append(mark))
        work.roll_back()
        work.run()  # no longer watched
    order = [("embedding", 0), *(("layer", index) for index in range(3)), ("norm", 0), ("head", 0)]
    assert marks == [(name, index, edge) for name, index in order for edge in (0, 1)]


def in_library(shape: transformer.Shape) -> int:
    """Return the number of parameters in the library, where an encoder-decoder always shares its two tables."""
    return shape.parameters - (shape.head_parameters if shape.encoder_layers else 0)


@pytest.mark.parametrize("kind", TINY)
def test_built_model_has_the_parameters_of_its_shape(kind: str, config: Callable[..., str]) -> None:
    model = build_library_model(config(kind))
    assert sum(each.numel() for each in model.full.parameters()) == in_library(model.architecture.shape)


@pytest.mark.parametrize("name", published_shapes.PRESETS)
def test_every_preset_can_be_built(name: str) -> None:
    known = architecture(name)
    kind: Any
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if known.crossing else AutoModelForCausalLM
    with torch.device("meta"):
        full = kind.from_config(known.config)
    assert sum(each.numel() for each in full.parameters()) == in_library(known.shape)


def test_pass_that_was_not_cropped_is_refused(config: Callable[..., str]) -> None:
    with torch.inference_mode():
        work = prepare(build_library_model(config()), 2, 5, 1)
        work.run()
        with pytest.raises(RuntimeError, match="should hold 5 positions, it holds 7"):
            work.check()


def test_learned_positions_are_a_bound(config: Callable[..., str]) -> None:
    model = build_library_model(config("opt"))
    with torch.inference_mode():
        prepare(model, 4, 60, 1).run()
        with pytest.raises(ParameterError, match=r"learned 64 positions, and width \+ context must be at most that, got 5 \+ 60"):
            prepare(model, 5, 60, 1)


def test_model_larger_than_the_memory_is_refused(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory", lambda device: 1000)
    with pytest.raises(ParameterError, match=r"needs 0\.0 GB for its weights, and device cpu has 0\.0 GB"):
        build_library_model(config())
