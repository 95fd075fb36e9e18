"""Figures of real models' logs, tested on small synthetic logs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import figures
from figures import save
from figures.of_logs import acceptance_by_position, accepted_lengths, agreement_over_cost, match_rates, tokens_by_source
from figures.of_runs import accepted_tokens
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.logs.position_log import PositionLog
from model.logs.recorded_decoding import Decoding
from model.methods.speculative import rates_from_logs
from model.steps import Commit, Forward, LayerSpan
from tests.figures.test_figures_speculative import inside, xy
from tests.figures.test_figures_tradeoff import lines, words
from tests.support import figure_checks

LAYERS, SEQUENCES, TOKENS = 6, 12, 20


def log(*, trained: bool = True, drafted: bool = True, sampling: Any = None) -> PositionLog:
    """A log whose ranks fall with the layer, and whose draft is right two times in three."""
    rng = np.random.default_rng(4)
    count = SEQUENCES * TOKENS
    common = np.stack([rng.geometric(0.1 + 0.14 * layer, count) for layer in range(LAYERS)], axis=1)
    common[:, -1] = 1
    better = np.maximum(common // 2, 1)
    better[:, 1] = 0  # no head at layer 2
    agrees = rng.random((SEQUENCES, TOKENS)) < 2 / 3
    run = np.zeros((SEQUENCES, TOKENS + 1), dtype=int)
    for at in reversed(range(TOKENS)):
        run[:, at] = np.where(agrees[:, at], run[:, at + 1] + 1, 0)
    columns: dict[str, Any] = {
        "prompt": np.repeat(np.arange(SEQUENCES), TOKENS), "position": np.tile(np.arange(TOKENS), SEQUENCES),
        "token": np.zeros(count, int),
        "rank_common": common, "rank_trained": better if trained else np.zeros_like(common),
        "confidence": rng.random((count, LAYERS)), "saturation": rng.random((count, LAYERS)),
    }  # fmt: skip
    if drafted:
        columns["draft_token"] = np.zeros(count, int)
        names = ("q_token", "p_token", "q_draft", "p_draft", "overlap", "draft_confidence", "distance")
        columns |= {name: rng.random(count) for name in names} | {"accepted": run[:, :TOKENS].ravel()}
    said = {"target": {"name": "large"}, "draft": {"name": "small"} if drafted else None, "sampling": sampling}
    return PositionLog(pl.DataFrame(columns), said)


def dashes(line: Any) -> Any:
    """Dash pattern of a line."""
    return line._unscaled_dash_pattern


def lengths() -> list[Any]:
    return [each + 1 for each in log().column("accepted")]


# --- Match rates --------------------------------------------------------------------------------------------------------


def test_match_rates_are_drawn_at_their_layers() -> None:
    record = log()
    figure = match_rates.draw(record, [1, 3])
    drawn = lines(figure.axes[0])
    for head, count in itertools.product(("common", "trained"), (1, 3)):
        x, y = xy(drawn[f"k={count} {match_rates.HEADS[head]}"])
        expected = [layer for layer in range(1, LAYERS) if head == "common" or layer != 2]
        assert x.tolist() == expected
        assert y.tolist() == pytest.approx([np.concatenate(record.matches(layer, count, head)).mean() for layer in expected])
    assert set(drawn) == {"k=1 N", "k=1 Y", "k=3 N", "k=3 Y"}
    assert inside(figure)
    assert "12 greedy sequences, 240 positions (measured)" in words(figure)


def test_bands_of_match_rates_are_wilsons() -> None:
    figure = match_rates.draw(log(), [1])
    bands = {str(each.get_label()): each for each in figure.axes[0].collections}
    (path,) = bands["k=1 N band"].get_paths()
    found = match_rates.by_layer(log(), [1]).filter(head="common")
    assert {round(float(y), 9) for _, y in path.vertices} == {
        round(value, 9) for name in ("low", "high") for value in found[name]
    }
    for row in found.iter_rows(named=True):
        assert row["low"] < row["match_rate"] < row["high"]


def test_heads_differ_without_colour() -> None:
    drawn = lines(match_rates.draw(log(), [1, 3]).axes[0])
    assert dashes(drawn["k=1 N"]) != dashes(drawn["k=1 Y"])
    assert drawn["k=1 N"].get_markerfacecolor() != drawn["k=1 Y"].get_markerfacecolor()
    assert drawn["k=1 N"].get_color() == drawn["k=1 Y"].get_color() != drawn["k=3 Y"].get_color()
    assert drawn["k=1 Y"].get_marker() != drawn["k=3 Y"].get_marker()


def test_default_candidates_are_1_3_and_5() -> None:
    usual, named = (match_rates.draw(*given).axes[0] for given in ((log(),), (log(), [1, 3, 5])))
    assert [*lines(usual)] == [*lines(named)]
    for one, other in zip(usual.lines, named.lines, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())


def test_a_log_without_trained_heads_has_only_the_models_head() -> None:
    assert set(lines(match_rates.draw(log(trained=False), [1]).axes[0])) == {"k=1 N"}


def test_match_rates_by_position_are_means_over_ranges() -> None:
    record = log()
    figure = match_rates.draw_by_position(record, [1, 2], layers=[1, 4], head="common", bins=4)
    assert len(figure.axes) == 2
    for axes, count in zip(figure.axes, (1, 2), strict=True):
        for layer in (1, 4):
            x, y = xy(lines(axes)[f"layer {layer}"])
            assert x.tolist() == [3, 8, 13, 18]  # the middles of 1 to 5, 6 to 10, ...
            kept = np.array(record.matches(layer, count))
            assert y.tolist() == pytest.approx([kept[:, low : low + 5].mean() for low in range(0, TOKENS, 5)])
    assert inside(figure)
    assert inside(match_rates.draw_by_position(record, [1, 3, 5]))


def test_too_many_lines_are_refused() -> None:
    with pytest.raises(ParameterError, match="at most 4 different ones, got 5"):
        match_rates.draw(log(), [1, 2, 3, 4, 5])
    with pytest.raises(ParameterError, match="layers must be 1 to 5, got 6"):
        match_rates.draw_by_position(log(), [1], layers=[1, 1, 1, 1, 1, 1])
    with pytest.raises(ParameterError, match="layer 2 has no trained head"):
        match_rates.draw_by_position(log(), [1], layers=[2], head="trained")


# --- Acceptance ---------------------------------------------------------------------------------------------------------


def test_acceptance_is_drawn_at_its_positions_with_the_overall_rate() -> None:
    figure = acceptance_by_position.draw(lengths(), 4, "small for large (measured)", bins=4)
    played = rates_from_logs.replay(lengths(), 4)
    left, right = figure.axes
    x, y = xy(lines(right)["accepted"])
    assert x.tolist() == [1, 2, 3, 4]
    assert y.tolist() == pytest.approx(rates_from_logs.by_draft_position(played).rate.tolist())
    x, y = xy(lines(left)["accepted"])
    assert x.tolist() == [3, 8, 13, 18]
    assert y.tolist() == pytest.approx(rates_from_logs.by_output_position(played, [0, 5, 10, 15, 20]).rate.tolist())
    alpha = float(rates_from_logs.accepted_of_tested(played).rate)
    for axes in (left, right):
        assert set(xy(lines(axes)["alpha"])[1].tolist()) == {alpha}
    assert f"α = {alpha:.3f}" in words(figure)
    assert inside(figure)


def test_independent_acceptances_agree_with_the_overall_rate() -> None:
    """Of sixteen bands of 95 % one or two miss; of 99.9 % all hold, which a correct program passes 98 times in 100."""
    found = rates_from_logs.by_draft_position(rates_from_logs.replay(lengths(), 4))
    alpha = float(rates_from_logs.accepted_of_tested(rates_from_logs.replay(lengths(), 4)).rate)
    width = 3.3 * np.sqrt(alpha * (1 - alpha) / found.trials)
    assert np.all(np.abs(found.rate - alpha) < width)


def test_sequences_without_tested_tokens_are_refused() -> None:
    with pytest.raises(ParameterError, match="one token each"):
        acceptance_by_position.draw([[1], [1]], 3, "nothing")


def test_accepted_lengths_and_their_law_use_the_same_rounds() -> None:
    figure = accepted_lengths.draw(lengths(), [2, 5], "small for large (measured)")
    for axes, gamma in zip(figure.axes, (2, 5), strict=True):
        played = rates_from_logs.replay(lengths(), gamma)
        whole = played.accepted[played.drafted == gamma]
        heights = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
        assert heights == pytest.approx([float((whole == count).mean()) for count in range(gamma + 1)])
        _, law = xy(lines(axes)["law"])
        alpha = whole.sum() / np.minimum(whole + 1, gamma).sum()
        assert law.tolist() == pytest.approx(accepted_tokens.law(float(alpha), gamma).tolist())
        assert law.sum() == pytest.approx(1)
        assert f"γ = {gamma}, α = {alpha:.3f}: {whole.size} rounds" in axes.get_title(loc="left")
        # The fit: accepted over tested tokens are equal for the law and the rounds.
        counts = np.arange(gamma + 1)
        assert (law * counts).sum() / (law * np.minimum(counts + 1, gamma)).sum() == pytest.approx(alpha)
    assert inside(figure)
    with pytest.raises(ParameterError, match="short enough for a whole draft"):
        accepted_lengths.draw(lengths(), [TOKENS], "too long")


# --- Agreement ----------------------------------------------------------------------------------------------------------


def quality() -> pl.DataFrame:
    """Synthetic rows of `calibrate quality`."""
    shared = {"sequences": 8, "tokens": 320, "plain_log_likelihood": -1.0, "target_name": "large", "source": "measured"}
    rows = []
    for index, (low, high) in enumerate(itertools.product((0.1, 0.5, 0.9), (2.0, float("inf")))):
        rows.append({
            "method": "bild", "fallback_threshold": low, "rollback_threshold": high, "agreement": 0.7 + 0.05 * index,
            "agreement_low": 0.65 + 0.05 * index, "agreement_high": 0.75 + 0.04 * index, "log_likelihood": -1.5 + 0.08 * index,
            "weight_bytes_over_plain": 0.4 + 0.1 * index,
        })  # fmt: skip
    for value in (0.6, 0.9):
        found = {"agreement": value, "log_likelihood": -2 + value, "weight_bytes_over_plain": value}
        rows.append({"method": "early_exit", "threshold": value, **found})
    for layers in (3, 5):
        found = {"agreement": layers / 6, "log_likelihood": -2 + layers / 6, "weight_bytes_over_plain": 0.5 + layers / 12}
        rows.append({"method": "skipdecode", "min_layers": layers, "max_layers": 6, **found})
    return pl.DataFrame([{**shared, **row} for row in rows], infer_schema_length=None)


@pytest.mark.parametrize("name", ["agreement", "log_likelihood"])
def test_every_row_is_drawn_at_its_cost(name: str) -> None:
    rows = quality()
    figure = agreement_over_cost.draw(rows, quality=name)
    whole = figure.axes[-1]
    drawn = {label: line for label, line in lines(whole).items() if label.partition(",")[0] in ("BiLD", "early exit", "SkipDecode")}
    assert set(drawn) == {"BiLD, rollback 2", "BiLD, no rollback", "early exit", "SkipDecode"}
    points = {(float(x), float(y)) for line in drawn.values() for x, y in zip(*xy(line), strict=True)}
    assert points == set(rows.select("weight_bytes_over_plain", name).rows())
    at = xy(lines(whole)["target alone"])
    assert (float(at[0][0]), float(at[1][0])) == (1.0, 1.0 if name == "agreement" else -1.0)
    assert inside(figure)
    assert "target: large; 8 sequences per point, measured; dotted: the target alone" in words(figure)


def test_bild_is_also_drawn_over_its_thresholds() -> None:
    figure = agreement_over_cost.draw(quality())
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["fallback threshold", "threshold"]
    x, y = xy(lines(figure.axes[0])["BiLD, rollback 2"])
    assert (x.tolist(), y.tolist()) == ([0.1, 0.5, 0.9], pytest.approx([0.7, 0.8, 0.9]))
    spans = [each for each in figure.axes[0].collections if isinstance(each, LineCollection)]
    ends = {(round(float(a[1]), 6), round(float(b[1]), 6)) for each in spans for a, b in each.get_segments()}
    rows = quality().filter(method="bild").select("agreement_low", "agreement_high").rows()
    assert ends == {(round(low, 6), round(high, 6)) for low, high in rows}


def test_lines_run_along_the_swept_column_and_are_named_by_the_others() -> None:
    def found(**columns: Any) -> list[tuple[str, str, int]]:
        return [(each.name, each.along, each.rows.height) for each in agreement_over_cost.series(pl.DataFrame(columns))]

    exits = {"method": "early_exit", "threshold": [0.5, 0.5, 0.5], "exit_layer": [6, 4, 4], "measure": ["state", None, "softmax"]}
    assert found(**exits) == [
        ("early exit, state", "exit_layer", 1), ("early exit", "exit_layer", 1), ("early exit, softmax", "exit_layer", 1),
    ]  # fmt: skip
    assert found(**exits | {"threshold": [0.9, 0.5, 0.1], "measure": None}) == [
        ("early exit, exit 6", "threshold", 1), ("early exit, exit 4", "threshold", 2),
    ]  # fmt: skip
    ordered = agreement_over_cost.series(pl.DataFrame(exits | {"threshold": [0.9, 0.5, 0.1], "exit_layer": 4, "measure": None}))
    assert ordered[0].rows["threshold"].to_list() == [0.1, 0.5, 0.9]
    assert found(method=["mine", "skipdecode"], min_layers=[None, 3], max_layers=[None, 8]) == [
        ("mine", "", 1), ("SkipDecode", "min_layers", 1),
    ]  # fmt: skip
    two = {"method": "bild", "fallback_threshold": 0.5, "rollback_threshold": [2.0, float("inf")], "variant": ["paper", "code"],
           "max_draft_length": [4.0, 8.0], "temperature": [None, 0.5]}  # fmt: skip
    assert found(**two) == [
        ("BiLD, paper, drafts to 4, rollback 2", "fallback_threshold", 1),
        ("BiLD, code, drafts to 8, no rollback, τ = 0.5", "fallback_threshold", 1),
    ]  # fmt: skip


def test_series_differ_without_colour() -> None:
    drawn = lines(agreement_over_cost.draw(quality()).axes[-1])
    names = ("BiLD, rollback 2", "BiLD, no rollback", "early exit", "SkipDecode")
    assert len({drawn[name].get_marker() for name in names}) == 4


def test_rows_of_quality_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(ParameterError, match="needs at least one row"):
        agreement_over_cost.draw(quality().clear())
    with pytest.raises(ParameterError, match="unknown quality 'agreemnt'; did you mean agreement"):
        agreement_over_cost.draw(quality(), quality="agreemnt")
    with pytest.raises(ParameterError, match="needs values of flops_over_plain"):
        agreement_over_cost.draw(quality(), "flops_over_plain")
    many = pl.concat([quality().head(1).with_columns(rollback_threshold=pl.lit(float(value))) for value in range(9)])
    with pytest.raises(ParameterError, match="room for at most 8 lines, got 9"):
        agreement_over_cost.draw(many)
    assert not agreement_over_cost.fits(many)


# --- Sources of tokens -------------------------------------------------------------------------------------------------------


def decoded() -> tuple[Decoding, list[str]]:
    account = Account()
    account.add(Forward("target", (7,), 0, LayerSpan(0, 4), heads=1))
    commits = (Commit("round", (1, 2, 3), 4), Commit("round", (4,), 4), Commit("round", (5, 6), 1))
    settings = {"layers": 4, "draft_length": 4, "placement": "colocated", "draft_layers": 1, "sampled": False}
    made = Decoding("speculative", settings, (9,), 6, commits, account)
    return made, ["def ", "f$x$(", "):\n", "\treturn", " x", "\n"]


def boxes(figure: Figure) -> dict[int, list[Rectangle]]:
    found: dict[int, list[Rectangle]] = {}
    for patch in figure.axes[0].patches:
        if str(patch.get_label()).startswith("token "):
            assert isinstance(patch, Rectangle)
            found.setdefault(int(str(patch.get_label())[6:]), []).append(patch)
    return found


def test_tokens_have_the_colour_and_line_of_their_source() -> None:
    made, shown = decoded()
    figure = tokens_by_source.draw(made, shown)
    assert made.producers == ("draft", "draft", "target", "target", "draft", "target")
    found = boxes(figure)
    assert sorted(found) == [*range(6)]
    faces = {number: parts[0].get_facecolor() for number, parts in found.items()}
    assert len(set(faces.values())) == 2
    assert faces[0] == faces[1] == faces[4] != faces[2]
    under = [(line.get_color(), str(dashes(line))) for line in figure.axes[0].lines]
    assert len(set(under)) == len({colour for colour, _ in under}) == len({line for _, line in under}) == 2
    said = words(figure)
    assert "the draft, accepted: 3 of 6 tokens" in said
    assert "the target, after a draft: 3 of 6 tokens" in said
    assert "f$x$(" in said  # not parsed as a formula
    assert inside(figure)


def test_lines_break_at_newlines_and_where_they_are_full() -> None:
    made, shown = decoded()
    placed = tokens_by_source.pieces(shown, 88)
    assert [(piece.line, piece.column) for piece in placed] == [(0, 0), (0, 4), (0, 9), (1, 0), (1, 10), (1, 12)]
    assert placed[2].text == "):↵"
    narrow = tokens_by_source.pieces(["x" * 25], 10)
    assert ["".join(piece.text for piece in narrow), len(narrow)] == ["x" * 25, 3]
    tight = tokens_by_source.draw(made, shown, columns=60)
    assert boxes(tight)
    assert inside(tight)
    with pytest.raises(ParameterError, match="words must be one string per token, 6, got 1"):
        tokens_by_source.draw(made, ["a"])
    with pytest.raises(ParameterError, match="at most 60 lines"):
        tokens_by_source.draw(made, ["\n" * 20] * 6)


def test_a_prompt_precedes_the_text_without_a_colour() -> None:
    made, shown = decoded()
    figure = tokens_by_source.draw(made, shown, prompt=["# go\n"])
    assert sorted(boxes(figure)) == [*range(6)]
    assert "# go↵" in words(figure)
    assert min(box.get_y() for parts in boxes(figure).values() for box in parts) > 1


# --- All of them --------------------------------------------------------------------------------------------------------


def test_figures_of_a_log_are_written(tmp_path: Path) -> None:
    paths = figures.of_log(log(), tmp_path / "pictures", [1, 3], [1, 3, 5])
    names = {"match_rate", "match_rate_by_position", "acceptance_by_position", "accepted_lengths"}
    assert {path.name for path in paths} == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    assert all(path.is_file() for path in paths)


@pytest.mark.usefixtures("unrendered")
def test_a_log_without_a_greedy_draft_has_only_match_rates(tmp_path: Path) -> None:
    alone = figures.of_log(log(drafted=False), tmp_path / "alone", [1], [1, 3])
    assert {path.stem for path in alone} == {"match_rate", "match_rate_by_position"}
    drawn = figures.of_log(log(sampling={"temperature": 1.0}), tmp_path / "drawn", [1], [3])
    assert {path.stem for path in drawn} == {"match_rate", "match_rate_by_position"}


def test_user_settings_change_nothing() -> None:
    """The other figures are tested in `test_figures_shown`."""
    with matplotlib.rc_context({"font.size": 20}):
        figure = tokens_by_source.draw(*decoded())
    assert max(text.get_fontsize() for text, _ in figure_checks.words(figure)) < 16


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    made, shown = decoded()
    several = {
        "m": match_rates.draw(log()), "a": acceptance_by_position.draw(lengths(), 3, "x"),
        "l": accepted_lengths.draw(lengths(), [3], "x"),
        "g": agreement_over_cost.draw(quality()), "w": tokens_by_source.draw(made, shown),
    }  # fmt: skip
    for name, figure in several.items():
        save(figure, tmp_path / f"{name}.a")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True}):
        for name, figure in several.items():
            for again in save(figure, tmp_path / f"{name}.b"):
                assert again.read_bytes() == (tmp_path / again.name.replace(".b.", ".a.")).read_bytes()


# --- By hand ---------------------------------------------------------------------------------------------------------------

TWO_SEQUENCES: list[Any] = [[4, 3, 2, 1, 4, 3, 2, 1], [1] * 8]
"""Drafts of three: the first sequence accepts both whole, the second none; seven rounds have room for a whole draft."""


def test_acceptance_by_hand() -> None:
    figure = acceptance_by_position.draw(TWO_SEQUENCES, 3, "by hand", bins=4)
    drawn = figure_checks.shown(figure)
    alpha = 6 / 13  # of tokens tested
    assert drawn.texts == [
        "Does the acceptance rate depend on the position?", "by hand; numbers: tested tokens",
    ]  # fmt: skip
    assert drawn.legends == [("", [
        "accepted / tested, band of 95 % (Wilson)", "overall rate: α = 0.462", "its 95 % band over sequences",
    ])]  # fmt: skip
    left, right = drawn.panels
    assert (left.title, left.x, left.y) == ("Along the sequence", "output position", "acceptance rate  [accepted / tested tokens]")
    assert (right.title, right.x, right.y) == ("Along drafts of 3", "position in the draft", "")
    assert left.line("accepted") == [(1.5, 2 / 4), (3.5, pytest.approx(1 / 3)), (5.5, 2 / 4), (7.5, 1 / 2)]
    assert right.line("accepted") == [(1, pytest.approx(2 / 9)), (2, 1), (3, 1)]
    assert (left.texts, right.texts) == (["4", "3", "4", "2"], ["9", "2", "2"])
    assert [text.xy for text in figure.axes[1].texts] == [(1, 0), (2, 0), (3, 0)]  # type: ignore[attr-defined]
    ends = rates_from_logs.ratio_interval([6, 0], [6, 7])
    for axes, panel, limits, counts in zip(figure.axes, (left, right), ((0.5, 8.5), (0.5, 3.5)), (
        ([2, 1, 2, 1], [4, 3, 4, 2]), ([2, 2, 2], [9, 2, 2])), strict=True):  # fmt: skip
        assert {y for _, y in panel.line("alpha")} == {alpha}
        assert (axes.get_xlim(), axes.get_ylim()) == (limits, (0, 1.02))
        found = rates_from_logs.rates(*counts)
        assert {round(y, 9) for _, y in dict(panel.bands)["band"]} == {round(float(y), 9) for y in (*found.low, *found.high)}
        [span] = [patch for patch in axes.patches if patch.get_label() == "alpha interval"]
        assert isinstance(span, Rectangle)
        assert (span.get_y(), span.get_y() + span.get_height()) == pytest.approx(ends)
    assert right.ticks[0] == ["1", "2", "3"]
    assert not any(right.ticks[1])
    assert "20%" in left.ticks[1]
    assert not figure_checks.odd_dashes(figure)
    # One sequence gives no interval; positions without tested tokens have no point.
    alone = figure_checks.shown(acceptance_by_position.draw([[1, 3, 2, 1]], 3, "alone"))
    assert len(alone.legends[0][1]) == 2
    assert alone.panels[1].line("accepted") == [(1, 0.5), (2, 1)]
    assert alone.panels[0].line("accepted") == [(1, 0), (2, 1), (3, 1)]  # fewer bins than requested for a short sequence
    assert acceptance_by_position.draw(TWO_SEQUENCES, 33, "").axes[1].get_xticks().tolist() == [*range(1, 34, 3)]
    edges = acceptance_by_position.draw([np.arange(32, 0, -1)], 40, "").axes[0]
    assert [x for x, _ in zip(*xy(lines(edges)["accepted"]), strict=True)] == [2.5 + 4 * each for each in range(8)]
    with pytest.raises(ParameterError, match="one token each"):
        acceptance_by_position.draw([[1]], 1, "")


def test_accepted_lengths_by_hand() -> None:
    figure = accepted_lengths.draw(TWO_SEQUENCES, [3, 1], "by hand")
    drawn = figure_checks.shown(figure)
    assert drawn.texts == [
        "Accepted draft tokens per round", "by hand;\neach round generates one more token, from the target",
    ]  # fmt: skip
    assert drawn.legends == [("", ["measured, interval of 95 % (Wilson)", "geometric law of α (i.i.d. acceptances)"])]
    panel = drawn.panels[0]
    alpha = 6 / 11  # of the tested tokens in rounds with room for a whole draft
    expected = 1 + alpha + alpha**2 + alpha**3
    (error,) = rates_from_logs.dependence(TWO_SEQUENCES, [3], 0.7, 2, np.random.default_rng(9))
    assert panel.title.split("\n") == [
        "γ = 3, α = 0.545: 7 rounds", f"tokens per round: 1.86 measured, {expected:.2f} by law",
        f"error with the α of positions, {error.acceptance_rate:.3f}: {error.error:+.1%}",
    ]  # fmt: skip
    shares = [5 / 7, 0, 0, 2 / 7]
    [bars] = [boxes for label, boxes in panel.bars if label == "measured"]
    assert np.array(bars) == pytest.approx(np.array([(place - 0.4, 0, 0.8, share) for place, share in enumerate(shares)]))
    law = [*((1 - alpha) * alpha**place for place in range(3)), alpha**3]
    assert panel.line("law") == [(pytest.approx(place + 0.2), pytest.approx(share)) for place, share in enumerate(law)]
    found = rates_from_logs.rates([5, 0, 0, 2], [7] * 4)
    [ends] = [pairs for _, pairs in panel.segments if pairs]
    both = enumerate(zip(found.low, found.high, strict=True))
    wanted = [[(place - 0.15, low), (place - 0.15, high)] for place, (low, high) in both]
    assert np.array(ends) == pytest.approx(np.array(wanted))
    assert (panel.x, panel.y) == ("accepted draft tokens per round", "share of rounds")
    assert (drawn.panels[1].x, drawn.panels[1].y) == ("accepted draft tokens per round", "")
    assert panel.ticks[0] == ["0", "1", "2", "3"]
    assert {axes.get_ylim()[0] for axes in figure.axes} == {0}
    assert panel.grid == "y"
    long = [np.arange(23, 0, -1)]
    assert accepted_lengths.draw(long, [9, 10, 19, 20], "").axes[1].get_xticks().tolist() == [0, 2, 4, 6, 8, 10]
    assert accepted_lengths.draw(long, [9], "").axes[0].get_xticks().tolist() == [*range(10)]
    for count in ([], [1, 2, 3, 4, 5]):
        with pytest.raises(ParameterError, match=f"draft_lengths must be 1 to 4, got {len(count)}"):
            accepted_lengths.draw(long, count, "")


def test_a_text_and_its_sources_by_hand() -> None:
    """Tabs, returns, unprintable characters, empty tokens and full lines, letter by letter."""
    assert [tuple(each) for each in tokens_by_source.pieces(["ab", "\tc", "d\r\n", "", "\x07\n", "xyz"], 5, first=-1)] == [
        (-1, 0, 0, "ab"), (0, 0, 2, "   "), (0, 1, 0, " c"), (1, 1, 2, "d↵"), (2, 2, 0, "␀"), (3, 2, 1, "·↵"), (4, 3, 0, "xyz"),
    ]  # fmt: skip
    assert [tuple(each) for each in tokens_by_source.pieces(["abcd", "\n", "e"], 4)] == [
        (0, 0, 0, "abcd"), (1, 1, 0, "↵"), (2, 2, 0, "e"),
    ]  # fmt: skip
    assert tokens_by_source.pieces([], 5) == []
    assert tokens_by_source.WORDS == {
        "draft": "the draft, accepted", "target": "the target, after a draft", "match": "early candidates: a match",
        "miss": "early candidates: a miss", "fallback": "the target, after a fallback", "again": "the target, in one more pass",
        "rollback": "the target, after a rollback", "cap": "the target, after a full draft", "token": "the target",
        "column": "the target",
    }  # fmt: skip
    account = Account()
    for role in ("target", "target", "draft"):
        account.add(Forward(role, (7,), 0, LayerSpan(0, 4), heads=1))
    kinds = ("mine", "token", "match")
    made = Decoding("ppd", {"k": 3, "left": None, "on": False}, (9,), 3,
                    tuple(Commit(kind, (number,), 4) for number, kind in enumerate(kinds)), account)  # fmt: skip
    assert made.producers == kinds
    figure = tokens_by_source.draw(made, ["one", " two", "$x$"], prompt=["go", " on"], columns=24)
    drawn = figure_checks.shown(figure)
    assert drawn.texts == [
        "Source of each token: ppd", "k 3, on False;", "3 tokens, passes: 2 of", "the target, 1 of the", "draft",
    ]  # fmt: skip
    # Known sources in the order of `WORDS`, then the others.
    assert drawn.legends == [("", [
        "early candidates: a match: 1 of 3 tokens", "the target: 1 of 3 tokens", "mine: 1 of 3 tokens",
    ])]  # fmt: skip
    [panel] = drawn.panels
    assert panel.texts == ["go", " on", "one", " two", "$x$"]
    axes = figure.axes[0]
    assert [text.get_position() for text in axes.texts] == [(at, 0.5) for at in (0, 2, 5, 8, 12)]
    assert [text.get_parse_math() for text in axes.texts] == [False] * 5  # type: ignore[attr-defined]
    assert (axes.get_xlim(), axes.get_ylim(), axes.axison) == ((0, 24), (1, 0), False)
    size, cell, line = figure.get_size_inches(), 0.602 * 9.5 / 72, 1.75 * 9.5 / 72
    assert size.tolist() == pytest.approx([0.6 + 24 * cell, 0.47 + 4 * 0.17 + 3 * 0.215 + 0.25 + line + 0.2])
    frame = axes.get_position()
    assert (frame.width * size[0], frame.height * size[1]) == pytest.approx((24 * cell, line))
    assert (frame.x0 * size[0], frame.y0 * size[1]) == pytest.approx((0.3, 0.2))
    for number, (left, length) in enumerate(((5, 3), (8, 4), (12, 3))):
        [box] = boxes(figure)[number]
        assert box.get_bbox().bounds == pytest.approx((left + 0.06, 0.1, length - 0.12, 0.72))
        assert np.array(panel.lines[number][1]) == pytest.approx(np.array([(left + 0.12, 0.88), (left + length - 0.12, 0.88)]))
    handles: list[Any] = figure.legends[0].legend_handles
    colours = {kind: handle.get_color() for kind, handle in zip(("match", "token", "mine"), handles, strict=True)}
    assert [line.get_color() for line in axes.lines] == [colours[kind] for kind in kinds]
    # A mix of white and .22 of the colour of the line.
    for kind, number in zip(kinds, range(3), strict=True):
        pale = [1 - 0.22 * (1 - part) for part in to_rgb(colours[kind])]
        assert boxes(figure)[number][0].get_facecolor()[:3] == pytest.approx(pale)
    assert not figure_checks.odd_dashes(figure)
    assert figure_checks.shown(tokens_by_source.draw(made, ["a", "b", "c"], title="mine")).texts[0] == "mine"
    assert tokens_by_source.draw(made, ["a", "b", "c"]).axes[0].get_xlim() == (0, 88)
    assert tokens_by_source.draw(made, ["\n" * 58, "\n", "c"], columns=400).axes[0].get_ylim() == (60, 0)
    with pytest.raises(ParameterError, match="must have at most 60 lines here, got 61"):
        tokens_by_source.draw(made, ["\n" * 59, "\n", "c"], columns=20)
    for columns in (19, 401):
        with pytest.raises(ParameterError, match="columns must be between 20 and 400"):
            tokens_by_source.draw(made, ["a", "b", "c"], columns=columns)
