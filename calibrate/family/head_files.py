"""Files of trained heads: one safetensors file, whose metadata describes the training and names the model by its checksum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.family import model_directory
from model.base import bounded_files, checks, strict_json, whole_files
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

AGAIN = "train the heads again"


def about(path: Path, schema: str, option: str = "") -> dict[str, Any]:
    """Return the description in a file of heads of this schema; `option` of `calibrate heads` makes such a file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ParameterError(f"there are no heads at {path}; train them: calibrate heads --model {path.parent.name}{option}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("about", "{}")
        described = bounded_files.json_of(text) if len(text) <= bounded_files.MOST_TOML else None
    except (SafetensorError, OSError, ValueError) as error:
        raise ParameterError(f"{path.name} cannot be read: {model_directory.first_line(error)}; {AGAIN}") from None
    if not isinstance(described, dict) or described.get("schema") != schema:
        raise ParameterError(f"{path.name} must be a file of heads, of schema {schema}; make one with calibrate heads{option}")
    return described


def require_model(path: Path, described: Mapping[str, Any], checksum: str) -> None:
    """Refuse heads of another model than the one with this checksum."""
    if described.get("model") != checksum:
        whose = f"{path.name} belongs to the model with checksum {str(described.get('model'))[:12]} ({described.get('name')})"
        raise ParameterError(f"{whose}, and this one has {checksum[:12]}; train heads for it: calibrate heads --model ...")


def tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], names: str) -> dict[str, Tensor]:
    """Return the tensors of a file in float32. All must be of `shapes`, which `names` describes; some may be absent."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                if name not in shapes:
                    raise ParameterError(f"{path.name} must hold tensors {names}, got {checks.shown(name)}")
                shape = tuple(file.get_slice(name).get_shape())  # checked before the tensor is loaded
                if shape != shapes[name]:
                    raise ParameterError(f"{name} of {path.name} must have shape {shapes[name]}, got {shape}; {AGAIN}")
                found[name] = file.get_tensor(name).float()
    except (SafetensorError, OSError) as error:
        raise ParameterError(f"{path.name} cannot be read: {model_directory.first_line(error)}; {AGAIN}") from None
    model_directory.finite(path.name, iter(found.items()))
    return found


def write(path: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    """Write tensors with their description, completely or not at all."""
    from safetensors.torch import save_file

    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with whole_files.atomic_path(path) as part:
        save_file(held, part, {"about": strict_json.dumps(described)})
