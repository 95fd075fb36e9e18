"""Fine-tuning for exits: weights of the losses, gradients against autograd on truncated models, and what training changes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.family import exit_heads, exit_tuning, model_directory, training
from calibrate.family.exit_heads import HeadTrainingSettings
from calibrate.family.model_directory import Loaded
from model.base.checks import ParameterError
from tests.support import family

FEW = HeadTrainingSettings(epochs=1, rate=3e-3, batch=4, length=32)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.train_model(tmp_path_factory.mktemp("family"))


@pytest.fixture
def loaded(folder: Path) -> Loaded:
    return model_directory.load(folder)


def test_weights_of_the_papers() -> None:
    for last in range(2, 12):
        assert exit_tuning.exit_weights("averaged", (1, last)) == {1: 0.5, last: 0.5}
        found = exit_tuning.exit_weights("by-depth", range(1, last + 1))
        assert found == {layer: float(Fraction(2 * layer, last * (last + 1))) for layer in range(1, last + 1)}
    with pytest.raises(ParameterError, match="unknown loss 'mean'"):
        exit_tuning.exit_weights("mean", (1, 2))


@pytest.mark.parametrize("loss", exit_tuning.LOSSES)
def test_loss_and_gradients_are_those_of_models_cut_at_the_exits(folder: Path, loaded: Loaded, loss: str) -> None:
    """The weighted sum over separate models of 1, 2 and 3 layers; their gradients add up to those of the shared weights."""
    windows = np.random.default_rng(3).integers(0, 300, (3, 9))
    weights = exit_tuning.exit_weights(loss, (1, 2, 3))
    total = exit_tuning.learn(loaded, weights, windows)
    sums = {name: torch.zeros_like(value) for name, value in loaded.model.named_parameters()}
    expected = 0.0
    for layer, weight in weights.items():
        short = model_directory.load(folder).model
        short.model.layers = short.model.layers[:layer]
        rows = torch.from_numpy(windows)
        logits = short(rows[:, :-1], use_cache=False).logits
        part = weight * torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        part.backward()
        expected += float(part.detach())
        for name, value in short.named_parameters():
            sums[name] += value.grad
    assert float(total) == pytest.approx(expected, rel=1e-5)
    for name, value in loaded.model.named_parameters():
        torch.testing.assert_close(value.grad, sums[name], rtol=1e-4, atol=1e-6)


def test_a_model_tuned_for_an_exit_is_better_there(folder: Path, loaded: Loaded, tmp_path: Path) -> None:
    about = exit_tuning.tune(loaded, family.text(), FEW, "averaged", tmp_path / "exits", layers=[1])
    rows = {(row["head"], row["layer"]): row for row in about["results"]}
    assert set(rows) == {(when, layer) for when in ("before", "after") for layer in (1, 3)}
    assert rows["after", 1]["loss"] < rows["before", 1]["loss"] - 0.05
    assert about["loss_weights"] == {"1": 0.5, "3": 0.5}
    new = model_directory.load(tmp_path / "exits")
    held_out = new.tokens(family.text().held_out)
    common = {"after": exit_heads.initial_heads(new, [1])}
    assert exit_heads.evaluate_heads(new, common, held_out, 32) == [rows["after", 1]]
    assert rows["after", 3]["loss"] == pytest.approx(training.loss_of(new.model, held_out, 32), abs=1e-4)
    before = model_directory.load(folder)
    assert rows["before", 3]["loss"] == pytest.approx(training.loss_of(before.model, held_out, 32), abs=1e-4)
    changed = [name for name, value in before.model.named_parameters() if not torch.equal(value, new.model.get_parameter(name))]
    assert len(changed) == len([*before.model.named_parameters()])
    again = exit_tuning.tune(loaded, family.text(), FEW, "averaged", tmp_path / "exits", layers=[1], resume=True)
    assert again == about
    with pytest.raises(ParameterError, match="loss 'averaged', now asked for 'by-depth'"):
        exit_tuning.tune(before, family.text(), FEW, "by-depth", tmp_path / "exits", layers=[1], resume=True)


def test_at_rate_zero_nothing_changes(folder: Path, loaded: Loaded, tmp_path: Path) -> None:
    exit_tuning.tune(loaded, family.text(), replace(FEW, rate=0.0, epochs=0.2), "by-depth", tmp_path / "none")
    for name, value in family.tensors_of(folder).items():
        assert torch.equal(value, family.tensors_of(tmp_path / "none")[name])


def test_the_command_and_its_errors(folder: Path, tmp_path: Path) -> None:
    asked = ["heads", "--model", str(folder), "--quick", "--length", "16", "--text"]
    text = tmp_path / "text.py"
    text.write_text("\n".join(family.text().training.values())[:9000])
    done = CliRunner().invoke(app, [*asked, str(text), "--loss", "averaged", "--layers", "1", "-o", str(tmp_path / "new")])
    assert done.exit_code == 0, done.stderr
    assert "before" in done.stdout
    assert "after, loss averaged" in done.stdout
    assert model_directory.log_of(tmp_path / "new")["command"].startswith("calibrate heads --model tiny --loss averaged")
    assert "-o must name a new directory with --loss averaged" in family.error_of(*asked, str(text), "--loss", "averaged")
    out = ["-o", str(tmp_path / "other")]
    assert "unknown loss 'mean'" in family.error_of(*asked, str(text), "--loss", "mean", *out)
    words = family.error_of(*asked, str(text), "--loss", "averaged", "--labels", "model", *out)
    assert "labels must be text with loss=averaged" in words
    words = family.error_of(*asked, str(text), "--loss", "averaged", "--layers", "3", *out)
    assert "layer must be between 1 and layers-1=2" in words
