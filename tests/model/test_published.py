"""The published tables are consistent in themselves, with each other and with the rounding of their last digit."""

import itertools
from typing import Any

import numpy as np
import pytest

import sim
from model import published
from model.base.checks import ParameterError
from model.published import ppd_figure_3, ppd_tables

DATA_SETS = {"squad": "ppd-table-6", "wmt": "ppd-table-7", "cnn_dm": "ppd-table-8"}
LAYERS = (10, 20, 30, 35, 37)
CANDIDATES = (1, 3, 5)
HEADS = ("final", "trained")
ROWS = list(itertools.product(DATA_SETS, LAYERS, CANDIDATES, HEADS))
HALF_DIGIT = 0.005  # percent: largest error of rounding to two decimals


def cells(name: str) -> dict[tuple[Any, ...], float]:
    """Match percentages of Tables 2 and 6 to 8, by key."""
    table = published.table(name)
    return {tuple(row[key] for key in table.keys): row["match_percent"] for row in table.rows}


@pytest.mark.parametrize(
    ("name", "count"),
    [("ppd-table-2", 90), ("ppd-table-3", 6), ("ppd-table-5", 6)] + [(name, 30 * 9) for name in DATA_SETS.values()],
)
def test_every_cell_exists_once(name: str, count: int) -> None:
    table = published.table(name)
    assert len(table.rows) == count
    assert len({tuple(row[key] for key in table.keys) for row in table.rows}) == count


def test_names_lists_all_tables() -> None:
    assert [published.table(name).name for name in published.names()] == list(published.names())
    for name in ppd_tables.TABLES:
        table = published.table(name)
        assert "arXiv:2307.05908" in table.source
        assert f"Table {name[-1]}:" in table.source


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_bins_tile_the_positions(data_set: str) -> None:
    tokens = ppd_tables.TOKENS[data_set]
    width = tokens // 8
    spans = {(first, last) for *_, first, last in cells(DATA_SETS[data_set])}
    assert spans == {(first, first + width - 1) for first in range(1, tokens, width)} | {(1, tokens)}


@pytest.mark.parametrize(("data_set", "layer", "candidates", "head"), ROWS)
def test_total_is_the_mean_of_its_bins_and_the_cell_of_table_2(
    data_set: str, layer: int, candidates: int, head: str
) -> None:
    """Bins of equal width have equal weights; the mean of eight rounded bins and the rounded total are off by up to 0.005 each."""
    last = ppd_tables.TOKENS[data_set]
    keys = (data_set, layer, candidates, head)
    row = {key[4:]: value for key, value in cells(DATA_SETS[data_set]).items() if key[:4] == keys}
    total = row.pop((1, last))
    assert len(row) == 8
    assert abs(sum(row.values()) / 8 - total) <= 2 * HALF_DIGIT + 1e-9
    assert total == cells("ppd-table-2")[keys]


@pytest.mark.parametrize("name", ["ppd-table-2", *DATA_SETS.values()])
def test_match_rate_increases_with_candidates_head_and_layer(name: str) -> None:
    """Necessary for candidates (top-3 contains top-1), empirical for heads and layers; no printed cell is an exception."""
    percent = cells(name)
    for (data_set, layer, candidates, head, *span), value in percent.items():
        if candidates < 5:
            assert value < percent[data_set, layer, candidates + 2, head, *span]
        if head == "final":
            assert value < percent[data_set, layer, candidates, "trained", *span]
        if layer < 37:
            assert value < percent[data_set, LAYERS[LAYERS.index(layer) + 1], candidates, head, *span]


def test_throughput_is_tokens_over_latency() -> None:
    """All six cells are possible given a latency rounded to 0.001 s; only one is not 128 / the printed latency."""
    off = []
    for row in published.table("ppd-table-3").rows:
        latency, throughput = row["latency_s"], row["throughput_tokens_per_s"]
        assert 128 / (latency + 0.0005) - 0.0005 <= throughput <= 128 / (latency - 0.0005) + 0.0005
        if round(128 / latency, 3) != throughput:
            off.append((row["data_set"], row["candidates"], throughput, round(128 / latency, 3)))
    assert off == [("cnn_dm", 3, 7.671, 7.672)]


def test_greedy_runs_without_early_prediction_have_no_match_rate() -> None:
    greedy = published.table("ppd-table-3").lookup(data_set="squad", method="greedy")
    assert greedy["candidates"] is None
    assert greedy["match_percent"] is None
    with pytest.raises(ParameterError, match=r"squad, greedy has no match rate.*ask for method='ppd'"):
        published.match_rate("ppd-table-3", data_set="squad", method="greedy")


@pytest.mark.parametrize(("data_set", "layer", "candidates", "head"), ROWS)
def test_rates_are_the_floats_nearest_to_the_printed_digits(
    data_set: str, layer: int, candidates: int, head: str
) -> None:
    keys: dict[str, Any] = {"data_set": data_set, "layer": layer, "candidates": candidates, "head": head}
    rate = published.match_rate("ppd-table-2", **keys)
    percent = published.table("ppd-table-2").lookup(**keys)["match_percent"]
    assert rate.rate == float(f"{round(percent * 100)}e-4")
    assert rate.trials == {"squad": 10_570 * 16, "wmt": 1_500 * 128, "cnn_dm": 11_487 * 128}[data_set]
    total = published.match_rate(DATA_SETS[data_set], **keys)
    assert (total.rate, total.trials) == (rate.rate, rate.trials)


def test_bins_share_the_trials_of_their_total() -> None:
    keys: dict[str, Any] = {"data_set": "wmt", "layer": 20, "candidates": 3, "head": "final"}
    bins = [published.match_rate("ppd-table-7", **keys, first=first, last=first + 15) for first in range(1, 128, 16)]
    assert [rate.trials for rate in bins] == [1_500 * 16] * 8
    assert published.match_rate("ppd-table-7", **keys).trials == 1_500 * 128


def test_tables_3_and_5_have_no_trials() -> None:
    assert published.match_rate("ppd-table-3", data_set="squad", candidates=3).trials is None
    assert published.match_rate("ppd-table-5", data_set="squad", sampling="greedy").trials is None


@pytest.mark.parametrize(("data_set", "layer", "candidates", "head"), ROWS)
def test_rates_by_position_repeat_each_bin_over_its_positions(
    data_set: str, layer: int, candidates: int, head: str
) -> None:
    tokens = ppd_tables.TOKENS[data_set]
    keys: dict[str, Any] = {"data_set": data_set, "layer": layer, "candidates": candidates, "head": head}
    rates, source = published.match_rates_by_position(
        data_set=data_set, layer=layer, candidates=candidates, head=head, tokens=tokens
    )
    total = published.match_rate("ppd-table-2", **keys)
    assert rates.shape == (tokens,)
    assert abs(rates.mean() - total.rate) <= 2 * HALF_DIGIT / 100 + 1e-9
    assert source.startswith(f"PPD Table {DATA_SETS[data_set][-1]}, {data_set}, layer {layer}, k={candidates}, {head}")
    width = tokens // 8
    for first in range(1, tokens, width):
        rate = published.match_rate(DATA_SETS[data_set], **keys, first=first, last=first + width - 1).rate
        assert np.array_equal(rates[first - 1 : first - 1 + width], np.full(width, rate))


def test_rates_by_position_are_copies() -> None:
    keys: dict[str, Any] = {"data_set": "cnn_dm", "layer": 20, "candidates": 1, "head": "final"}
    rates, _ = published.match_rates_by_position(**keys, tokens=17)
    assert rates.tolist() == [0.3334] * 16 + [0.3367]
    rates[:] = 0.0
    again, _ = published.match_rates_by_position(**keys, tokens=17)
    assert again[0] == 0.3334


def test_tables_are_read_only() -> None:
    row = published.table("ppd-table-5").lookup(data_set="squad", sampling="top-k")
    row["match_percent"] = 0.0
    assert published.table("ppd-table-5").lookup(data_set="squad", sampling="top-k")["match_percent"] == 43.78
    with pytest.raises(TypeError, match="does not support item assignment"):
        published.table("ppd-table-5").rows[0]["match_percent"] = 0.0  # type: ignore[index]


GOOD: dict[str, Any] = {"data_set": "squad", "layer": 20, "candidates": 3, "head": "trained"}


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("ppd-tabel-2", {}, r"unknown table 'ppd-tabel-2'; did you mean ppd-table-2\?"),
        ("ppd-table-4", {}, r"unknown table 'ppd-table-4'; did you mean ppd-table-\d\?"),
        ("ppd-table-2", {"canditates": 3}, r"unknown key of ppd-table-2 'canditates'; did you mean candidates\?"),
        ("ppd-table-2", {"first": 1}, r"unknown key of ppd-table-2 'first'; known: candidates, data_set, head, layer"),
        ("ppd-table-2", {"data_set": "SQUAD"}, r"data_set of ppd-table-2 'SQUAD'; did you mean squad\? known: cnn_dm, squad, wmt"),
        ("ppd-table-2", {"data_set": "cnndm"}, r"'cnndm'; did you mean cnn_dm\?"),
        ("ppd-table-2", {"layer": 15}, r"unknown layer of ppd-table-2 15; .*known: 10, 20, 30, 35, 37"),
        ("ppd-table-2", {"candidates": 4}, r"unknown candidates of ppd-table-2 4; known: 1, 3, 5"),
        ("ppd-table-2", {"head": "train"}, r"unknown head of ppd-table-2 'train'; did you mean trained\?"),
        ("ppd-table-6", {"data_set": "wmt"}, r"unknown data_set of ppd-table-6 'wmt'; known: squad"),
        ("ppd-table-6", {"first": 2, "last": 3}, r"unknown first of ppd-table-6 2; .*known: 1, 11, 13, 15, 3, 5, 7, 9"),
        ("ppd-table-6", {"first": 3, "last": 6}, r"unknown last of ppd-table-6 6; known: 4"),
        ("ppd-table-6", {"first": 1}, r"last must be given: 2 rows of ppd-table-6 fit; known: 2, 16"),
    ],
)
def test_bad_lookup_names_the_closest_value(table: str, change: dict[str, str | int], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        published.match_rate(table, **(GOOD | change))


def test_missing_key_is_named() -> None:
    with pytest.raises(ParameterError, match=r"layer must be given: 15 rows of ppd-table-2 fit; known: 10, 20,"):
        published.match_rate("ppd-table-2", data_set="squad", head="final")


def test_bad_positions_name_the_bound_and_the_remedy() -> None:
    with pytest.raises(ParameterError, match=r"tokens must be between 1 and 16.*got 17; ask for at most 16 tokens"):
        published.match_rates_by_position(**GOOD, tokens=17)
    with pytest.raises(ParameterError, match="tokens must be at least 1, got 0"):
        published.match_rates_by_position(**GOOD, tokens=0)
    with pytest.raises(ParameterError, match=r"unknown data_set 'squat'; did you mean squad\?"):
        published.match_rates_by_position(**(GOOD | {"data_set": "squat"}), tokens=4)
    with pytest.raises(ParameterError, match=r"unknown candidates of ppd-table-6 7; known: 1, 3, 5"):
        published.match_rates_by_position(**(GOOD | {"candidates": 7}), tokens=4)


def test_note_on_outliers_in_the_first_bin_of_layer_10() -> None:
    """Ratio of one to three candidates in a bin relative to that of the totals: exactly two cells are outliers."""
    extremes = {}
    for data_set, name in DATA_SETS.items():
        percent = cells(name)
        for (_, layer, candidates, head, first, last), value in percent.items():
            if candidates == 1:
                bin_ratio = value / percent[data_set, layer, 3, head, first, last]
                span = (1, ppd_tables.TOKENS[data_set])
                total_ratio = percent[data_set, layer, 1, head, *span] / percent[data_set, layer, 3, head, *span]
                if bin_ratio < 0.86 * total_ratio:
                    extremes[data_set, layer, head, first, last] = round(bin_ratio / total_ratio, 2)
    assert extremes == {("squad", 10, "trained", 1, 2): 0.34, ("cnn_dm", 10, "final", 1, 16): 0.12}
    assert "0.34" in published.table("ppd-table-6").notes[-1]
    assert "0.12" in published.table("ppd-table-8").notes[-1]


@pytest.mark.parametrize(
    ("name", "hundredths"),
    [
        ("ppd-table-2", 561_302),
        ("ppd-table-3", 14_592),
        ("ppd-table-5", 25_906),
        ("ppd-table-6", 1_840_702),
        ("ppd-table-7", 1_504_131),
        ("ppd-table-8", 1_706_889),
    ],
)
def test_digits_equal_those_of_the_paper(name: str, hundredths: int) -> None:
    """Sums were taken from the paper's text, not from our files; they detect errors smaller than the rounding of eight bins."""
    rows = published.table(name).rows
    assert sum(round(100 * row["match_percent"]) for row in rows if row["match_percent"] is not None) == hundredths


def test_note_on_two_greedy_rates_of_one_model() -> None:
    """Gap between Tables 3 and 5 in standard errors of a difference of two independent proportions."""

    def standard_errors(data_set: str, trials: int) -> float:
        first = published.match_rate("ppd-table-3", data_set=data_set, method="ppd", candidates=3).rate
        second = published.match_rate("ppd-table-5", data_set=data_set, sampling="greedy").rate
        variance = first * (1 - first) / 12_800 + second * (1 - second) / trials
        return round(float(abs(first - second) / np.sqrt(variance)), 1)

    gaps = [standard_errors("squad", 12_800), standard_errors("cnn_dm", 12_800), standard_errors("squad", 1_600)]
    note = published.table("ppd-table-5").notes[0]
    assert "{} and {} standard errors (SQuAD {} if".format(*gaps) in note
    assert note in published.table("ppd-table-3").notes
    for percent in ("47.24% against 50.77%", "41.99% against 40.84%"):
        assert percent in note


def test_default_run_notes_the_limits_of_the_paper() -> None:
    """Figure 3 of the paper: .629 and .892 are Eq. 3 for many tokens; the points of the run have 128 tokens."""
    rows = sim.run(views=["formula"])
    (said,) = ppd_figure_3.sentences(ppd_figure_3.replayed(rows.to_dicts()))
    assert "0.629 (squad, trained head, k = 5) to 0.892 (wmt, final head, k = 1), at 4.973 and 1.561 busy units" in said
    ends = rows["relative_latency"].min(), rows["relative_latency"].max()
    assert f"for 128 tokens Theorem 4.1 gives {ends[0]:.4f} and {ends[1]:.4f}" in said
    assert ppd_figure_3.replayed(rows.filter(data_set="squad").to_dicts()) == []
