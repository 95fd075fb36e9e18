"""Training of draft heads: losses and agreement by draft position, files that belong to one model, and the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decoders.transformers_adapter import Decoder, decoder_of
from calibrate.family import draft_head_training, head_files, model_directory, training
from calibrate.family.draft_head_training import EAGLE, KINDS, MEDUSA, DraftHeadSettings
from calibrate.family.model_directory import Loaded
from model.architectures import draft_heads, shape_configs
from model.base.checks import ParameterError
from tests.support import family

FEW = DraftHeadSettings(epochs=1, batch=4, length=32, draft_length=3)
POSITIONS = FEW.draft_length

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.train_model(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return model_directory.load(folder)


@pytest.fixture(scope="module")
def target(loaded: Loaded) -> Decoder:
    found = decoder_of(loaded.model, loaded.name)
    found.checksum = loaded.checksum
    return found


@pytest.fixture(scope="module")
def trained(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("heads")
    for kind in KINDS:
        draft_head_training.train(loaded, family.text(), kind, FEW, where / draft_head_training.file_name(kind))
    return {kind: where / draft_head_training.file_name(kind) for kind in KINDS}


def untrained(target: Decoder, kind: str, seed: int = 1) -> Any:
    """Heads with random weights, Medusa's too."""
    modules = draft_head_training.new_modules(target, kind, replace(FEW, seed=seed))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return modules


@pytest.mark.parametrize("kind", KINDS)
def test_training_improves_heads_and_keeps_the_model(
    kind: str, loaded: Loaded, target: Decoder, trained: dict[str, Path]
) -> None:
    held_out = loaded.tokens(family.text().held_out)
    before = draft_head_training.evaluate(target, draft_head_training.new_modules(target, kind, FEW), kind, FEW, held_out)
    after = draft_head_training.about(trained[kind])["results"]
    for first, last in zip(before, after, strict=True):
        assert last["loss"] < first["loss"] - 0.02
    fresh = model_directory.load(loaded.folder).model
    for name, value in loaded.model.named_parameters():
        assert torch.equal(value, fresh.get_parameter(name))
        assert value.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_file_describes_itself(kind: str, loaded: Loaded, target: Decoder, trained: dict[str, Path]) -> None:
    said = draft_head_training.about(trained[kind])
    log = model_directory.log_of(loaded.folder)
    tensors = load_file(trained[kind])
    assert said == {
        "schema": "decodesim.draft-heads/1", "source": "measured", "kind": kind, "model": loaded.checksum, "name": "tiny",
        "hidden": 32, "vocabulary": 300, "settings": asdict(FEW), "corpus": log["corpus"], "command": "",
        "parameters": sum(each.numel() for each in tensors.values()), "versions": model_directory.versions(),
        "results": said["results"], "seconds": said["seconds"],
    }  # fmt: skip
    assert {each.dtype for each in tensors.values()} == {torch.float16}
    modules = draft_head_training.new_modules(target, kind, FEW)
    modules.load_state_dict({name: each.float() for name, each in tensors.items()})
    held_out = loaded.tokens(family.text().held_out)
    assert said["results"] == draft_head_training.evaluate(target, modules, kind, FEW, held_out)


def test_weights_are_as_many_as_those_of_the_shapes_that_are_priced(loaded: Loaded, trained: dict[str, Path]) -> None:
    """`eagle:TARGET` and `medusa:TARGET`; Medusa's shape has five heads."""
    shape = shape_configs.from_config(loaded.model.config.to_dict(), "float32")
    found = {kind: draft_head_training.about(trained[kind])["parameters"] for kind in KINDS}
    assert found[EAGLE] == draft_heads.head_of("eagle", shape).parameters
    assert found[MEDUSA] * draft_heads.MEDUSA_HEADS == draft_heads.head_of("medusa", shape).parameters * POSITIONS


def test_medusa_heads_start_as_the_models_own_head(target: Decoder) -> None:
    """Before training all of them give the logits of the token after the state that they read."""
    tokens = torch.arange(40).reshape(2, 20)
    states, own = draft_head_training.of_target(target, tokens)
    modules = draft_head_training.new_modules(target, MEDUSA, FEW)
    with torch.no_grad():
        for index, logits in enumerate(draft_head_training.positions(target, modules, MEDUSA, tokens, states, POSITIONS)):
            assert torch.allclose(logits[:, 1:], own[:, : 20 - index - 1], atol=1e-5)


@pytest.mark.parametrize("labels", ["model", "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_mean_over_draft_positions(kind: str, labels: str, target: Decoder) -> None:
    """Position j counts `decay`^j, and each token once."""
    settings = replace(FEW, labels=labels)
    windows = np.random.default_rng(0).integers(0, 300, (3, 17))
    modules, tokens = untrained(target, kind), torch.from_numpy(windows)
    states, own = draft_head_training.of_target(target, tokens[:, :-1])
    expected = 0.0
    with torch.no_grad():
        whole = [*draft_head_training.positions(target, modules, kind, tokens[:, :-1], states, POSITIONS)]
    for index, logits in enumerate(whole):
        chances = logits.double().log_softmax(-1)
        if labels == "text":
            each = -chances.gather(-1, tokens[:, index + 1 :, None])
        else:
            each = -(own[:, index:].double().softmax(-1) * chances).sum(-1)
        expected += 0.8**index * float(each.mean())
    assert float(draft_head_training.learn(target, modules, kind, settings, windows)) == pytest.approx(
        expected / (1 + 0.8 + 0.64), rel=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_grouping_of_a_batch(
    kind: str, target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = np.random.default_rng(0).integers(0, 300, (5, 9))
    found = []
    for at_once in (10**8, 1):
        monkeypatch.setattr(draft_head_training, "AT_ONCE", at_once)
        modules = untrained(target, kind)
        loss = draft_head_training.learn(target, modules, kind, FEW, windows)
        found.append([loss, *(each.grad for each in modules.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_pass_of_eagle_sees_what_it_will_find_in_decoding(target: Decoder) -> None:
    """In pass j a token reads target's states up to j tokens before: later ones change nothing, and that one does."""
    tokens, modules = torch.arange(30)[None], untrained(target, EAGLE)
    states, _ = draft_head_training.of_target(target, tokens)

    def logits(states: Any) -> list[Any]:
        with torch.no_grad():
            return [*draft_head_training.positions(target, modules, EAGLE, tokens, states, POSITIONS)]

    whole, place = logits(states), 20
    for index in range(POSITIONS):
        base = place - index  # the last token whose state before it is the target's
        later, there = states.clone(), states.clone()
        later[:, base:] += 1.0
        there[:, base - 1] += 1.0
        assert torch.allclose(logits(later)[index][0, base], whole[index][0, base], atol=1e-6)
        assert not torch.allclose(logits(there)[index][0, base], whole[index][0, base], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_are_those_of_drafts_counted_one_by_one(
    kind: str, loaded: Loaded, target: Decoder, trained: dict[str, Path]
) -> None:
    tokens = loaded.tokens(family.text().held_out)[:65]
    modules = draft_head_training.new_modules(target, kind, FEW)
    modules.load_state_dict({name: each.float() for name, each in load_file(trained[kind]).items()})
    hits, trials = [0] * POSITIONS, [0] * POSITIONS
    for start in (0, 32):
        window = torch.from_numpy(tokens[start : start + 32])[None]
        states, own = draft_head_training.of_target(target, window)
        with torch.no_grad():
            whole = [each[0].argmax(-1) for each in draft_head_training.positions(target, modules, kind, window, states, POSITIONS)]
        greedy = own[0].argmax(-1)
        for first in range(32):
            for index in range(min(POSITIONS, 32 - first)):
                trials[index] += 1
                if whole[index][first] != greedy[first + index]:
                    break
                hits[index] += 1
    rows = draft_head_training.evaluate(target, modules, kind, FEW, tokens)
    assert [row["tokens"] for row in rows] == trials
    assert [row["rate"] for row in rows] == [pytest.approx(a / max(b, 1), abs=1e-5) for a, b in zip(hits, trials, strict=True)]
    assert all(row["low"] <= row["rate"] <= row["high"] for row in rows)


def test_resumed_training_ends_with_the_same_heads(
    loaded: Loaded, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    path = tmp_path / "heads"

    def pull(step: int, *_: object) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draft_head_training.train(loaded, family.text(), EAGLE, FEW, path, report=pull)
    assert not path.exists()
    with pytest.raises(ParameterError, match="--resume continues it"):
        draft_head_training.train(loaded, family.text(), EAGLE, FEW, path)
    draft_head_training.train(loaded, family.text(), EAGLE, FEW, path, resume=True)
    one, other = load_file(path), load_file(trained[EAGLE])
    assert all(torch.equal(one[name], other[name]) for name in other)
    with pytest.raises(ParameterError, match="made with kind 'eagle', now asked for 'medusa'"):
        draft_head_training.train(loaded, family.text(), MEDUSA, FEW, path, resume=True)


# --- Files ---

Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def _changed(path: Path, change: Change) -> None:
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()["about"])
    tensors = load_file(path)
    change(tensors, said)
    head_files.write(path, tensors, said)


BROKEN: dict[str, tuple[Change, str]] = {
    "nan": (lambda tensors, _: tensors["fc.bias"].fill_(float("nan")), r"fc\.bias of eagle\.safetensors must be finite"),
    "shape": (lambda tensors, _: tensors.update({"fc.bias": torch.zeros(3)}), r"fc\.bias .* shape \(32,\), got \(3,\)"),
    "lacks": (lambda tensors, _: tensors.pop("fc.bias"), r"eagle\.safetensors lacks fc\.bias of eagle heads"),
    "more": (lambda tensors, _: tensors.update(x=torch.zeros(3)), "must hold tensors of fc, layer, got 'x'"),
    "kind": (lambda _, said: said.update(kind="tree"), r"unknown kind of eagle\.safetensors 'tree'"),
    "count": (lambda _, said: said.update(settings={"draft_length": "two"}), "must be a whole number, got 'two'"),
    "settings": (lambda _, said: said.pop("settings"), "draft_length of .* must be a whole number"),
    "schema": (lambda _, said: said.update(schema="decodesim.heads/1"), "of schema decodesim.draft-heads/1"),
    "model": (lambda _, said: said.update(model="0" * 64), r"model with checksum 0{12} \(tiny\), and this one has"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_and_foreign_heads_are_refused_in_one_line(
    case: str, target: Decoder, trained: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(trained[EAGLE], tmp_path))
    draft_head_training.load(path, target)
    change, message = BROKEN[case]
    _changed(path, change)
    with pytest.raises(ParameterError, match=message) as caught:
        draft_head_training.load(path, target)
    assert "\n" not in str(caught.value)


def test_no_file_of_draft_heads_is_refused(target: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"there are no heads at .*; train them: calibrate heads --model .* --kind eagle"):
        draft_head_training.load(tmp_path / "none.safetensors", target)
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ParameterError, match="make one with calibrate heads --kind eagle"):
        draft_head_training.load(tmp_path / "other.safetensors", target)


# --- The command ---


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {number} of a text" for number in range(3000)))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_command_trains_draft_heads(kind: str, folder: Path, text: Path, tmp_path: Path) -> None:
    short = ["--quick", "--epochs", "0.05", "--device", "cpu"]
    common = ["heads", "--model", str(folder), "--kind", kind, "--text", str(text), *short]
    path = tmp_path / "mine.safetensors"
    done = CliRunner().invoke(app, [*common, "-o", str(path), "--draft-length", "2"])
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    said = draft_head_training.about(path)
    assert lines[0].startswith(f"{kind} heads of tiny, {said['parameters']} parameters; measured along")
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"]
    assert str(tmp_path) not in said["command"]
    assert f"--kind {kind} --epochs 0.05 --draft-length 2 --text text.txt --quick" in said["command"]
    assert "is there already" in family.error_of(*common, "-o", str(path))
    again = CliRunner().invoke(app, [*common, "-o", str(path), "--draft-length", "2", "--resume", "--json"])
    assert json.loads(again.stdout) == said | {"file": str(path)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kind trees", "unknown kind 'trees'; known: eagle, exits, medusa"),
        ("--kind eagle --layers 2", "--layers is used only with exit heads, got --kind eagle"),
        ("--kind eagle --settings paper", "--settings is used only with exit heads, got --kind eagle"),
        ("--kind medusa --loss averaged", "--loss is used only with exit heads, got --kind medusa"),
        ("--draft-length 3", "--draft-length is used only with --kind eagle or medusa, got --kind exits"),
        ("--kind eagle --draft-length 0", "draft_length must be between 1 and"),
        ("--kind medusa --length 4", "length must be above draft_length=4, got 4"),
        ("--kind medusa --labels words", "unknown labels 'words'"),
    ],
)
def test_command_refuses_wrong_options_and_leaves_nothing(
    words: str, message: str, folder: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "heads"
    given = [*words.split(), "--text", str(text), "-o", str(out), "--device", "cpu"]
    assert message in family.error_of("heads", "--model", str(folder), *given)
    assert not out.parent.exists()
