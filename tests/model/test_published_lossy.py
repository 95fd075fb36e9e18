"""The tables of Big Little Decoder and SkipDecode and the numbers in their notes, recomputed."""

import itertools

import numpy as np
import pytest

from model import published
from model.methods.bild import theory as bild
from model.methods.skipdecode import theory as skipdecode
from model.published import skipdecode_tables as paper

SIZES = published.table("bild-table-2")
SCHEDULES = published.table("skipdecode-table-2")
RESULTS = published.table("skipdecode-table-4")


def test_means_of_the_speed_ups() -> None:
    rows = published.table("bild-table-1").rows
    found = []
    for alignment, loss in itertools.product(("unaligned", "aligned"), ("none", "one-point")):
        speeds = [row["speedup"] for row in rows if (row["alignment"], row["loss"]) == (alignment, loss)]
        assert len(speeds) == 4
        assert max(speeds) == published.table("bild-table-1").lookup(data_set="cnn_dm", alignment=alignment, loss=loss)["speedup"]
        found.append(round(float(np.mean(speeds)), 3))
    assert found == [1.49, 1.695, 1.61, 1.85]
    plain = {row["data_set"]: row["quality"] for row in rows if row["alignment"] is None}
    for row in (row for row in rows if row["loss"]):
        assert abs(row["quality"] - plain[row["data_set"]]) < (0.15 if row["loss"] == "none" else 1.3)


def test_comparison_with_speculative_sampling_against_table_1() -> None:
    """The sums of Section 4.2, and the row of Table 1 that is faster and better than the text says."""
    found = published.table("bild-comparison")
    table_1 = published.table("bild-table-1")
    for data_set, quality, speed in (("iwslt", 0.61, 0.21), ("xsum", 0.30, 0.22)):
        rows = [row for row in found.rows if row["data_set"] == data_set]
        sampled = found.lookup(data_set=data_set, method="speculative sampling")
        assert max(row["quality"] for row in rows) - sampled["quality"] == pytest.approx(quality)
        assert max(row["speedup"] for row in rows) - sampled["speedup"] == pytest.approx(speed)
        plain = table_1.lookup(data_set=data_set, alignment=None, loss=None)["quality"]
        assert round(plain - sampled["quality"], 2) == {"iwslt": 0.39, "xsum": 0.08}[data_set]
    own = table_1.lookup(data_set="xsum", alignment="unaligned", loss="none")
    assert own["quality"] > 35.0
    assert own["speedup"] > 1.47
    ends = [table_1.lookup(data_set="iwslt", alignment="unaligned", loss=loss)["speedup"] for loss in ("none", "one-point")]
    assert ends[0] < 1.49 < ends[1]


def decoder_parameters(model: str) -> int:
    """Parameters of self-attention, cross-attention and feed-forward layers.

    The feed-forward layers of mT5 are gated, and the attention of mT5-small is narrower than the model.
    """
    row = SIZES.lookup(model=model)
    inner = 6 * 64 if model == "mt5-small" else row["dim"]
    matrices = 3 if model.startswith("mt5") else 2
    return int(row["layers"] * (8 * row["dim"] * inner + matrices * row["dim"] * row["ffn_dim"]))


def test_sizes_follow_from_the_shapes() -> None:
    assert {row["model"]: round(decoder_parameters(row["model"]) / 1e6, 1) for row in SIZES.rows} == {
        "mt5-large": 408.9, "mt5-small": 25.2, "t5-large": 402.7, "t5-small": 25.2,
    }  # fmt: skip
    for row in SIZES.rows:
        assert abs(decoder_parameters(row["model"]) / 1e6 - row["parameters_m"]) < 1
    ratios = [decoder_parameters(f"{name}-large") / decoder_parameters(f"{name}-small") for name in ("t5", "mt5")]
    assert [round(ratio, 1) for ratio in ratios] == [16.0, 16.2]


def test_speed_up_with_cost_ratios_of_layers_and_of_weights() -> None:
    ratio = decoder_parameters("t5-small") / decoder_parameters("t5-large")
    for c, about in ((6 / 24, 2.5), (ratio, 4.5)):
        assert float(bild.speedup(0.11, 0.01, 10, c)) == pytest.approx(about, abs=0.05)


def test_targets_and_bases() -> None:
    for row in SCHEDULES.rows:
        middle = (row["min_layers"] + row["max_layers"]) / 2
        assert (middle == row["target_layers"]) is ((row["model"], row["target_speedup"]) != ("opt-6.7b", 2))
    labels = {(row["model"], row["target_speedup"]): row["layers"] / row["target_layers"] for row in SCHEDULES.rows}
    off = {key: round(value, 2) for key, value in labels.items() if value != key[1]}
    assert off == {("opt-6.7b", 3): 2.91, ("opt-6.7b", 5): 4.92, ("opt-1.3b", 5): 4.8}
    assert RESULTS.lookup(data_set="e2e", model="opt-6.7b", target_speedup=1)["mean_layers"] == 30


def test_realised_ratios_of_layers_at_the_label_2x() -> None:
    base = {row["model"]: row["mean_layers"] for row in RESULTS.rows if row["target_speedup"] == 1}
    rows = [row for row in RESULTS.rows if row["target_speedup"] == 2]
    found = [float(skipdecode.layer_speedup(base[row["model"]], row["mean_layers"])) for row in rows]
    assert (round(min(found), 2), round(max(found), 2)) == (1.41, 1.63)


@pytest.mark.parametrize(("model", "common"), [("opt-1.3b", {34}), ("opt-6.7b", set())])
def test_response_lengths_that_explain_the_layers_on_e2e(model: str, common: set[int]) -> None:
    lengths = []
    for row in SCHEDULES.rows:
        if row["model"] == model:
            mean = RESULTS.lookup(data_set="e2e", model=model, target_speedup=row["target_speedup"])["mean_layers"]
            bounds = row["min_layers"], row["max_layers"], paper.PROMPT, paper.SEQUENCE
            lengths.append(set(skipdecode.generated_of_mean(mean, *bounds, rounding="half-up")))
    assert set.intersection(*lengths) == common
