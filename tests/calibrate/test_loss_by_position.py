"""Loss by position: against the library's models from scratch, intervals by hand, the command and its figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decode import loss_by_position
from figures.of_logs import position_losses
from model.base.checks import ParameterError
from model.steps import LayerSpan
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY

LAYERS = DEPTHS["target"]
TEXTS = [[int(token) for token in np.random.default_rng(number).integers(0, VOCABULARY, 5 + number)] for number in range(3)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "qwen3"])
def test_losses_are_those_of_the_model_from_scratch(kind: str) -> None:
    target: Any = real_models.decoders(kind)["target"]
    for text in TEXTS:
        found = loss_by_position.losses(target, text, [LAYERS])[0]
        for at in range(1, len(text)):
            chances = torch.log_softmax(real_models.logits(target.full, text[:at]).double(), -1)
            assert found[at - 1] == pytest.approx(-float(chances[text[at]]), abs=1e-9)


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_losses_after_a_layer_are_those_of_a_pass_that_ends_there(layer: int) -> None:
    target: Any = real_models.decoders("llama")["target"]
    target.heads = {2: torch.randn(VOCABULARY, target.config.hidden_size, dtype=torch.float64, generator=torch.manual_seed(0))}
    text = TEXTS[2]
    states = target.run(tuple(text[:-1]), 0, LayerSpan(0, layer), target.rows())
    chances = torch.log_softmax(target.logits(states, layer).double(), -1)
    want = [-float(chances[at, token]) for at, token in enumerate(text[1:])]
    assert loss_by_position.losses(target, text, [layer])[0] == pytest.approx(want, abs=1e-9)
    assert len(loss_by_position.losses(target, text, [layer, LAYERS])) == 2


def test_rows_are_means_over_the_sequences_that_reach_a_position() -> None:
    target: Any = real_models.decoders("llama")["target"]
    table = loss_by_position.measure(target, TEXTS, [LAYERS, 3])
    assert table["layer"].unique().sort().to_list() == [3, LAYERS]
    each = [loss_by_position.losses(target, text, [LAYERS])[0] for text in TEXTS]
    for row in table.filter(layer=LAYERS).to_dicts():
        values = [own[row["position"] - 1] for own in each if len(own) >= row["position"]]
        assert (row["sequences"], row["loss"]) == (len(values), pytest.approx(np.mean(values)))
        if len(values) == 1:
            assert row["low"] is row["high"] is None
        else:
            low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
            assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))
    assert table.filter(layer=3)["position"].to_list() == [*range(1, 7)]


@pytest.mark.parametrize(
    ("sequences", "layers", "said"),
    [
        ([[1]], [1], "sequence 1 must have at least 2 tokens"), (TEXTS, [], "at least one layer, got none"),
        (TEXTS, [LAYERS + 1], f"layers must be between 1 and the layers of target={LAYERS}"), (TEXTS, [0], "layers must be"),
        ([[1] * 5000], [1], "at most"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(sequences: list[list[int]], layers: list[int], said: str) -> None:
    target: Any = real_models.decoders("gpt2")["target"]
    with pytest.raises(ParameterError) as caught:
        loss_by_position.measure(target, sequences, layers)
    assert said.replace("target=", f"{target.name}=") in str(caught.value)


def test_figure_has_a_line_and_a_band_for_each_layer() -> None:
    rows = pl.DataFrame([
        {"layer": layer, "position": at, "loss": 4 / at + layer, "low": 3 / at + layer, "high": 5 / at + layer, "sequences": 9}
        for layer in (2, 4) for at in range(1, 201)
    ])  # fmt: skip
    (axes,) = position_losses.draw(rows, "mine").axes
    assert [line.get_label() for line in axes.lines] == ["layer 2", "layer 4"]
    assert len(axes.collections) == 2
    x, y = (np.array(each) for each in axes.lines[0].get_data())
    assert (x[0], y[0]) == (2.5, pytest.approx(np.mean([4 / at + 2 for at in range(1, 5)])))  # four neighbours
    with pytest.raises(ParameterError, match="room for at most 8 layers, got 9"):
        position_losses.draw(pl.concat([rows.with_columns(layer=pl.lit(each)) for each in range(9)]), "")


@pytest.mark.usefixtures("unrendered")
def test_commands_write_rows_and_figures(tmp_path: Path) -> None:
    common = ["--limit", "2", "--tokens", "6", "--threads", "1", "-q", "--figures", str(tmp_path / "pictures")]
    out = str(tmp_path / "loss.csv")
    done = CliRunner().invoke(app, ["loss", "--layers", "6,12", *common, "-o", out, "--json"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    said = json.loads(done.stdout)
    assert [(row["layer"], row["position"]) for row in said["rows"]] == [(layer, at) for layer in (6, 12) for at in range(1, 6)]
    assert pl.read_csv(out).height == 10
    words = ["replace", "--thresholds", "0,1.1", "--prompt-tokens", "8", *common, "-o", str(tmp_path / "r.csv")]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    rows = pl.read_csv(tmp_path / "r.csv").to_dicts()
    assert [row["engaged_share"] for row in rows] == [0, 1]
    assert rows[1]["agreement"] == 1
    names = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert names == {"loss_by_position", "replaced_agreement", "replaced_log_likelihood"}
    for words, message in (
        (["loss", "-o", out], "out must be a new file, and loss.csv is there"),
        (["loss", "--layers", "13", "-o", str(tmp_path / "l.csv")], "layers must be between 1 and the layers of family:target=12"),
        (["loss", "-o", str(tmp_path / "l.txt")], "out must end in .csv or .parquet"),
        (["replace", "--thresholds", "low", "-o", str(tmp_path / "l.csv")], "thresholds must be comma-separated numbers"),
        (["replace", "--thresholds=-1", "-o", str(tmp_path / "l.csv")], "threshold must be"),
        (["replace", "--model", "family:target", "-o", str(tmp_path / "l.csv")], "draft"),
    ):
        done = CliRunner().invoke(app, [*words, "--limit", "1"])
        assert (done.exit_code, done.stdout) == (2, ""), words
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
