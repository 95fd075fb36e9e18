"""Choice of figures: which are drawn from which rows, in which order and under which names; drawing itself is replaced."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

import figures
from figures.common import style
from figures.of_comparisons import formula_limits, gantt_pair
from figures.of_hardware import layer_time
from figures.of_runs import accepted_tokens, operations_and_bytes, tradeoff
from figures.of_theory import hierarchical_regions
from model.base.checks import ParameterError
from model.hardware import profile_files
from model.methods.speculative import theory as speculative
from model.published import deck_analysis
from tests.support.album import DRAWING, Album


def asked(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> dict[str, list[Any]]:
    """Replace questions to modules by given answers, as in `method_comparison_fits=True`; return the rows they are called with."""
    seen: dict[str, list[Any]] = {}
    for each, answer in answers.items():
        name, _, question = each.rpartition("_fits") if each.endswith("_fits") else each.partition("__")
        module = next(module for module in DRAWING if module.__name__.rpartition(".")[2] == name)

        def answered(rows: Any, each: str = each, answer: Any = answer) -> Any:
            seen.setdefault(each, []).append(rows)
            return answer

        monkeypatch.setattr(module, question or "fits", answered)
    return seen


METHODS = ("ppd", "speculative", "adaptive", "early_exit", "ppd", "autoregressive", "bild", "hierarchical")


def table() -> pl.DataFrame:
    """One point of each kind: early prediction, fixed and adaptive drafts, early exit, split layers, plain, lossy drafts."""
    count = len(METHODS)
    rows = pl.DataFrame({
        "point": range(count), "method": METHODS, "exit_layer": [6, None, None, 6, 6, None, None, None],
        "draft_length": [None, 3, None, None, None, None, None, 2],
        "acceptance_rate": [None, 0.8, 0.7, None, None, None, None, 0.9],
        "exact": [True, True, True, False, True, True, False, True], "tensor_parallel": [1, 1, None, 1, 2, None, 1, None],
        "cost_ratio": [None, 0.1, 0.1, None, None, None, 0.3, 0.1], "tokens": [16] * count, "speedup": [1.5] * count,
        "medium_cost_ratio": [None] * 7 + [0.4], "medium_acceptance_rate": [None] * 7 + [0.6], "reading": [None] * 7 + ["reuse"],
        "published_speedup": [None] * 7 + [1.4], "outcomes_source": ["assumed"] * 7 + ["published: Deck, slide 9"],
        "no_value_because": [None] * 6 + ["no law"] + [None],
    }, infer_schema_length=None)  # fmt: skip
    return pl.concat([rows.with_columns(view=pl.lit(view)) for view in ("formula", "paths", "events")])


ALL: dict[str, Any] = {
    "method_comparison_fits": True, "ppd_table_3_times_fits": True, "speedup_by_device_fits": True, "reserved_devices_fits": True,
    "speedup_by_batch_fits": True, "bild_rates_fits": True, "bild_thresholds_fits": True,
    "skipdecode_schedule__of_run": (["one", "two"], {"layers": 9}),
    "speedup__swept": ["tokens", "cost_ratio"], "speedup_by_device__device_column": None, "bild_rates__of_run": "rates",
    "bild_thresholds__of_run": "thresholds", "speedup_by_batch__of_run": "batches",
}  # fmt: skip


def stored(folder: Path) -> None:
    """Store latencies and accepted lengths like a run: all latencies of point 0 are equal, and point 5 has no law."""
    latencies = [(0, view, 8.0) for view in ("formula", "paths", "events")]
    latencies += [(point, view, value) for point in (5, 1) for view in ("formula", "paths", "events") for value in (8.0, 9.0)]
    names = ["point", "view", "latency_layers"]
    pl.DataFrame(latencies, schema=names, orient="row").with_columns(probability=0.5).write_parquet(folder / "distribution.parquet")
    lengths = pl.DataFrame({"point": [5, 1, 1], "view": "paths", "accepted": [0, 0, 3], "rounds": [1, 2, 3]})
    lengths.write_parquet(folder / "accepted.parquet")


def test_a_run_with_all_kinds_of_rows_draws_every_figure(
    album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = asked(monkeypatch, **ALL)
    stored(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"scenario": {"scenario": {"name": "mine"}}}))
    rows = table()
    paths = figures.of_run(tmp_path, rows)
    assert [path.name for path in paths] == [*album.drawn] == [
        "tradeoff_mean_busy_units", "tradeoff_compute_per_token", "table_3", "speedup_by_device", "devices_held",
        "speedup_by_batch",
        "speedup_tokens", "speedup_cost_ratio", "hierarchical", "deck", "methods", "choices", "bild_rates", "bild_thresholds",
        "skipdecode_layers", "distribution_point_1", "accepted",
    ]  # fmt: skip
    assert album.folders == {tmp_path / "figures"}
    assert (tmp_path / "figures").is_dir()
    assert {about for *_, about in album.drawn.values()} == {"mine"}
    # Of a point without a value only the simulated rows are left.
    kept = rows.filter((pl.col("point") != 6) | (pl.col("view") == "events"))
    for name in ("table_3", "speedup_by_device", "devices_held", "methods", "choices"):
        assert album.drawn[name][1][0].equals(kept), name
        assert album.drawn[name][2] == {}
    for name in ("method_comparison_fits", "ppd_table_3_times_fits", "reserved_devices_fits", "bild_rates__of_run",
        "bild_thresholds__of_run"):
        assert [each.equals(kept) for each in seen[name]] == [True], name
    # Drafts, lossy methods and split layers are not in the trade-off.
    for x in tradeoff.AXES:
        assert album.points(f"tradeoff_{x}") == [0, 5]
        assert album.drawn[f"tradeoff_{x}"][2] == {"x": x}
    drafting = kept.filter(pl.col("draft_length").is_not_null())
    for name in ("speedup_by_batch_fits", "speedup__swept", "speedup_by_batch__of_run"):
        assert seen[name][0].equals(drafting), name
    assert album.drawn["speedup_by_batch"][1] == ("batches",)
    for x in ("tokens", "cost_ratio"):
        assert album.drawn[f"speedup_{x}"][1][0].equals(drafting)
        assert album.drawn[f"speedup_{x}"][1][1] == x
    wanted = ["cost_ratio", "medium_cost_ratio", "draft_length", "acceptance_rate", "medium_acceptance_rate", "reading"]
    assert album.drawn["hierarchical"][1][0].select(wanted).rows() == [(0.1, 0.4, 2, 0.9, 0.6, "reuse")]
    assert album.drawn["deck"][1] == (deck_analysis.rows(),)
    assert (album.drawn["bild_rates"][1], album.drawn["bild_thresholds"][1]) == (("rates",), ("thresholds",))
    assert seen["bild_rates_fits"] == ["rates"]
    assert seen["bild_thresholds_fits"] == ["thresholds"]
    assert album.drawn["skipdecode_layers"] == ("skipdecode_layers", (["one", "two"],), {"layers": 9}, "mine")
    latencies = album.drawn["distribution_point_1"][1][0]
    assert latencies.select("point", "view", "latency_layers").rows() == [
        (1, view, value) for view in ("formula", "paths") for value in (8.0, 9.0)
    ]
    assert set(latencies["name"]) == {"speculative decoding, γ = 3, 16 tokens, α = 0.8, c = 0.1"}
    lengths, about = album.drawn["accepted"][1][0], album.drawn["accepted"][2]
    assert lengths.select("point", "accepted", "rounds", "name").rows() == [
        (5, 0, 1, "plain decoding"), (1, 0, 2, "speculative decoding"), (1, 3, 3, "speculative decoding"),
    ]  # fmt: skip
    assert about == {"about": "16 tokens"}


def test_figures_that_do_not_fit_are_left_out(album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no = {name: False for name in ALL if name.endswith("_fits")}

    def names(rows: pl.DataFrame, **answers: Any) -> list[str]:
        album.drawn.clear()
        asked(monkeypatch, **{**ALL, **no, "skipdecode_schedule__of_run": None, "speedup__swept": [], **answers})
        figures.of_run(tmp_path, rows)
        return [*album.drawn]

    pair = ["tradeoff_mean_busy_units", "tradeoff_compute_per_token"]
    rows = table()
    assert names(rows) == [*pair, "speedup_acceptance_rate", "hierarchical", "deck", "choices"]
    # A cost ratio derived from devices is not an axis.
    both = {"speedup__swept": ["cost_ratio", "tokens"]}
    assert names(rows, speedup_by_device__device_column="cost.device", **both) == [
        *pair, "speedup_tokens", "hierarchical", "deck", "choices",
    ]  # fmt: skip
    # One schedule has a separate figure; several have a map.
    assert names(rows, skipdecode_schedule__of_run=([1], {"layers": 2}))[-1] == "skipdecode_layers"
    assert album.drawn["skipdecode_layers"] == ("skipdecode_schedule", ([1],), {"layers": 2}, "")
    # An axis without values, or without a column.
    for other in (rows.drop("tokens"), rows.with_columns(tokens=pl.lit(None, pl.Int64))):
        assert names(other) == [*pair, "hierarchical", "deck", "choices"]
    # Hierarchies: none without a column, of `recursive`, without a cost, and of more costs than there is room for.
    cost = pl.col("medium_cost_ratio")
    for other in (
        rows.drop("reading"), rows.with_columns(reading=pl.lit("recursive")),
        rows.with_columns(medium_cost_ratio=pl.lit(None, pl.Float64)),
        rows.with_columns(method=pl.when(method="hierarchical").then(pl.lit("adaptive")).otherwise("method")),
        pl.concat([rows.with_columns(cost * factor) for factor in range(1, hierarchical_regions.MOST_COSTS + 2)]),
    ):  # fmt: skip
        assert "hierarchical" not in names(other)
        assert "deck" in album.drawn
    most = [rows.with_columns(cost * factor) for factor in range(1, hierarchical_regions.MOST_COSTS + 1)]
    assert "hierarchical" in names(pl.concat(most))
    for other in (
        rows.drop("published_speedup"), rows.with_columns(published_speedup=pl.lit(None, pl.Float64)),
        rows.with_columns(outcomes_source=pl.lit("assumed")),
    ):  # fmt: skip
        assert "deck" not in names(other)
    # Without any lossy method, and without the column.
    exact = rows.filter(pl.col("exact"))
    assert names(exact) == [*pair, "speedup_acceptance_rate", "hierarchical", "deck"]
    assert names(rows.drop("exact")) == [*pair, "speedup_acceptance_rate", "hierarchical", "deck"]
    assert album.points(pair[0]) == [0, 3, 5, 6]
    # Without the columns for split layers, drafts and exit layers.
    assert names(rows.drop("tensor_parallel"))[:2] == pair
    assert album.points(pair[0]) == [0, 4, 5]
    assert names(rows.drop("draft_length", "acceptance_rate"), method_comparison_fits=True) == [*pair, "methods", "choices"]
    assert album.points(pair[0]) == [0, 1, 2, 5, 7]
    assert names(rows.drop("exit_layer"))[0] == "speedup_acceptance_rate"
    assert names(rows.filter(pl.col("point") != 0))[0] == "speedup_acceptance_rate"
    assert names(rows.filter(pl.col("point") == 6).with_columns(no_value_because=None)) == ["choices"]
    assert names(rows.filter(pl.col("point") == 6).with_columns(no_value_because=None, speedup=None)) == []
    assert names(rows.filter(pl.col("method") == "ppd"), method_comparison_fits=True) == pair
    # Exactly as many points as fit, and one more.
    monkeypatch.setattr(figures, "MOST_POINTS", 8)
    monkeypatch.setattr(operations_and_bytes, "MOST_POINTS", 8)
    assert {*pair, "choices"} <= {*names(rows)}
    monkeypatch.setattr(operations_and_bytes, "MOST_POINTS", 7)
    assert "choices" not in names(rows)
    monkeypatch.setattr(figures, "MOST_POINTS", 7)
    assert names(rows, **dict.fromkeys(no, True)) == []
    assert not (tmp_path / "figures" / "x").exists()


def test_law_of_accepted_tokens_is_drawn_only_for_rows_that_follow_it(
    album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the first points are drawn; latencies are those of the first point that has several."""
    rounds = 20 / float(speculative.target_runs(20, 0.5, 3))
    rows = pl.DataFrame({
        "point": range(5), "view": "formula", "method": ["speculative"] * 3 + ["adaptive", "speculative"], "draft_length": 3,
        "acceptance_rate": [0.5] * 5, "tokens": 20, "tokens_per_round": [rounds, rounds * (1 + 4e-6), rounds, rounds, rounds],
    }).with_columns(view=pl.when(point=2).then(pl.lit("paths")).otherwise("view"))  # fmt: skip
    lengths = pl.DataFrame({"point": [4, 3, 2, 1, 0], "view": "events", "accepted": 1, "rounds": 7})
    lengths.write_parquet(tmp_path / "accepted.parquet")
    events = pl.DataFrame({"point": [3, 3], "view": "events", "latency_layers": [1.0, 2.0], "probability": 0.5})
    events.write_parquet(tmp_path / "distribution.parquet")
    asked(monkeypatch, speedup__swept=[])
    figures.of_run(tmp_path, rows)
    shown = album.drawn["accepted"][1][0]
    assert [name for name in album.drawn if "point" in name] == ["distribution_point_3"]
    assert album.drawn["distribution_point_3"][1][0]["latency_layers"].to_list() == [1.0, 2.0]
    assert shown.select("point", "tokens", "acceptance_rate", "draft_length").rows() == [
        (4, 20, 0.5, 3), (3, None, None, None), (2, None, None, None), (1, None, None, None), (0, 20, 0.5, 3),
    ]  # fmt: skip
    assert album.drawn["accepted"][2] == {"about": "γ = 3, 20 tokens, α = 0.5"}
    monkeypatch.setattr(accepted_tokens, "MOST_POINTS", 2)
    figures.of_run(tmp_path, rows)
    assert album.points("accepted") == [1, 0]
    assert album.drawn["accepted"][2] == {"about": "speculative decoding, γ = 3, 20 tokens, α = 0.5"}
    for bare in (rows.drop("tokens_per_round"), rows.drop("tokens")):
        figures.of_run(tmp_path, bare)
        assert not {"acceptance_rate"} & {*album.drawn["accepted"][1][0].columns}


def test_stored_tables_are_checked_before_drawing(
    album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "results.parquet"
    remedy = "; name the directory of a finished run"
    ppd = table().filter(method="ppd")
    ppd.write_parquet(path)
    assert [path.name for path in figures.of_run(tmp_path)] == ["tradeoff_mean_busy_units", "tradeoff_compute_per_token"]
    assert album.points("tradeoff_mean_busy_units") == [0]
    assert [path.name for path in figures.of_run(str(tmp_path))] == [*album.drawn]  # once more, into the same folder

    def refused(said: str) -> None:
        with pytest.raises(ParameterError) as caught:
            figures.of_run(tmp_path)
        assert str(caught.value) == said

    path.write_bytes(b"PAR1 is no table")
    with pytest.raises(ParameterError, match=rf"^{path} cannot be read: .+{remedy}$"):
        figures.of_run(tmp_path)
    ppd.clear().write_parquet(path)
    refused(f"{path} has no rows{remedy}")
    ppd.drop("view").write_parquet(path)
    with pytest.raises(ParameterError, match=f"^{path} cannot be read: column view is missing; .+{remedy}$"):
        figures.of_run(tmp_path)
    for name, kind in (("point", "whole numbers"), ("view", "strings"), ("method", "strings")):
        ppd.with_columns(pl.lit(0.5).alias(name)).write_parquet(path)
        refused(f"{path} cannot be read: column {name} must hold {kind}, got Float64{remedy}")
    ppd.with_columns(tokens=pl.lit([1, 2])).write_parquet(path)
    refused(f"{path} cannot be read: column tokens must hold one value in each row, got List(Int64){remedy}")
    path.unlink()
    refused(f"{path} cannot be read: No such file or directory{remedy}")
    path.mkdir()
    with pytest.raises(ParameterError, match=f"^{path} cannot be read: .+{remedy}$"):
        figures.of_run(tmp_path)
    path.rmdir()
    ppd.write_parquet(path)
    for error, said in (
        (KeyError("x" * 300), f"KeyError: '{'x' * 199}"), (ValueError(), "ValueError: "), (TypeError("one\ntwo"), "TypeError: one"),
    ):  # fmt: skip
        monkeypatch.setattr(tradeoff, "draw", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        refused(f"{path} is not a table that a run has written ({said}); run the scenario again")
    monkeypatch.setattr(tradeoff, "draw", lambda *_, **__: (_ for _ in ()).throw(ParameterError("as it is")))
    refused("as it is")
    for name, kinds in (("distribution", {"point": 1, "view": "paths"}), ("accepted", {"point": 1, "view": 3})):
        other = tmp_path / name
        other.mkdir()
        pl.DataFrame([kinds]).write_parquet(other / f"{name}.parquet")
        with pytest.raises(ParameterError, match=f"{name}.parquet cannot be read: column "):
            figures.of_run(other, table().filter(method="autoregressive"))
    # At most `MOST_ROWS` rows are read.
    monkeypatch.setattr(figures, "MOST_ROWS", 2)
    monkeypatch.setattr(tradeoff, "draw", lambda rows, x: ("tradeoff", (rows,), {"x": x}, ""))
    figures.of_run(tmp_path)
    assert album.drawn["tradeoff_mean_busy_units"][1][0].height == 2 - ppd["tensor_parallel"].head(2).to_list().count(2)


def test_brackets_in_a_folder_name_are_not_a_pattern(album: Album, tmp_path: Path) -> None:
    folder = tmp_path / "run[1]*"
    folder.mkdir()
    table().filter(method="ppd").write_parquet(folder / "results.parquet")
    figures.of_run(folder)
    assert album.folders == {folder / "figures"}


def test_each_profile_is_drawn_once(album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_files, "load", lambda name: SimpleNamespace(name=name.lower()))
    monkeypatch.setattr("model.hardware.profile_costs.ProfileCosts", lambda each: f"measured {each.name}")
    out = tmp_path / "new" / "folder"
    assert [path.name for path in figures.of_profiles(["A", "b"], out)] == ["roofline", "verify_cost", "layer_time"]
    assert album.folders == {out}
    assert out.is_dir()
    assert [each.name for each in album.drawn["roofline"][1][0]] == ["a", "b"]
    assert [each.name for each in album.drawn["layer_time"][1][0]] == ["a", "b"]
    assert album.drawn["verify_cost"][:2] == ("pass_cost", ({"a": "measured a", "b": "measured b"},))
    most = layer_time.MOST_PROFILES
    assert len(figures.of_profiles("abcdef"[:most], tmp_path)) == 3
    for count in (0, most + 1):
        with pytest.raises(ParameterError, match=f"^profiles must be 1 to {most}, got {count}; draw the others apart$"):
            figures.of_profiles("abcdef"[:count], tmp_path)
    with pytest.raises(ParameterError, match=r"^profiles must differ in their names, got b twice; leave one out$"):
        figures.of_profiles(["a", "b", "B"], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match=f"^cannot write {tmp_path / 'file'}: File exists; name another folder$"):
        figures.of_profiles(["a"], tmp_path / "file")


def test_figures_of_a_log_use_its_numbers(album: Album, tmp_path: Path) -> None:
    header: dict[str, Any] = {"target": {"name": "large"}, "draft": {"name": "small"}}
    columns = {"accepted": [np.array([0, 2])]}
    log: Any = SimpleNamespace(drafted=True, header=header, starts=[0, 4, 9], column=columns.__getitem__)
    both = ["match_rate", "match_rate_by_position"]
    found = figures.of_log(log, tmp_path, [1, 3], [2, 5])
    assert [path.name for path in found] == [*both, "acceptance_by_position", "accepted_lengths"]
    assert album.drawn["match_rate"][:2] == ("match_rates", (log, [1, 3]))
    assert album.drawn["match_rate_by_position"][:2] == ("by_position", (log, [1, 3]))
    (lengths,), about = album.drawn["accepted_lengths"][1][0], "small for large, 2 sequences (measured)"
    assert lengths.tolist() == [1, 3]
    assert album.drawn["accepted_lengths"][1][1:] == ([2, 5], about)
    assert album.drawn["acceptance_by_position"][1][1:] == (5, about)
    for changed in ({"drafted": False}, {"header": header | {"sampling": {"temperature": 1.0}}}):
        few: Any = SimpleNamespace(**(vars(log) | changed))
        assert [path.name for path in figures.of_log(few, tmp_path, [1], [2])] == both


@pytest.mark.parametrize(("lengths", "few", "longest"), [
    ([1, 2, 3, 4, 5], [3, 4, 5], 5), ([7, 2, 2, 1, 7, 3], [7, 2, 3], 7), ([1, 1], [1, 1], 1), ([2], [2], 2),
    ([9, 2, 3, 4], [2, 3, 4], 9),
])  # fmt: skip
def test_the_last_three_of_many_draft_lengths_are_drawn(
    album: Album, tmp_path: Path, lengths: list[int], few: list[int], longest: int
) -> None:
    paths = figures.of_lengths([[1, 2]], tmp_path / "out", lengths, "measured")
    assert paths == [tmp_path / "out" / name for name in ("acceptance_by_position", "accepted_lengths")]
    assert album.drawn["acceptance_by_position"][1] == ([[1, 2]], longest, "measured")
    assert album.drawn["accepted_lengths"][1] == ([[1, 2]], few, "measured")


def test_each_quality_has_a_figure_if_it_fits(album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked(monkeypatch, agreement_over_cost_fits=True)
    rows = pl.DataFrame(schema=["agreement", "log_likelihood"])
    assert [path.name for path in figures.of_quality(rows, tmp_path)] == ["agreement", "log_likelihood"]
    assert [each[2] for each in album.drawn.values()] == [{"quality": "agreement"}, {"quality": "log_likelihood"}]
    scored = pl.DataFrame(schema=["rouge_l", "agreement", "log_likelihood"])
    assert [path.name for path in figures.of_quality(scored, tmp_path)] == ["agreement", "log_likelihood", "rouge_l"]
    asked(monkeypatch, agreement_over_cost_fits=False)
    assert figures.of_quality(pl.DataFrame(), tmp_path / "none") == []
    assert (tmp_path / "none").is_dir()


def test_a_comparison_draws_its_figures_and_those_of_optional_input(
    album: Album, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(formula_limits, "limit_series", lambda rows: rows["x"].to_list())
    monkeypatch.setattr(gantt_pair, "rounds", lambda *pair: ("between", *pair))
    three = ["predicted_measured", "error_by_method", "time_parts"]
    assert [path.name for path in figures.of_comparison("table", tmp_path)] == three  # type: ignore[arg-type]
    assert [each[:2] for each in album.drawn.values()] == [(name, ("table",)) for name in three]
    limits = pl.DataFrame({"claim": ["b", "a", "b"], "x": [1, 2, 3]})
    found = figures.of_comparison("table", tmp_path, limits, ("one", "two"))  # type: ignore[arg-type]
    assert [path.name for path in found] == [*three, "gantt_pair", "limits_b", "limits_a"]
    assert album.drawn["gantt_pair"][1:3] == (("one", "two"), {"between": ("between", "one", "two")})
    assert (album.drawn["limits_b"][1], album.drawn["limits_a"][1]) == (([1, 3],), ([2],))


def test_files_are_whole_or_absent_and_hold_no_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure, _ = style.canvas(3, 2, (0.2, 0.2, 0.7, 0.7))
    assert figures.save(figure, tmp_path / "a") == [tmp_path / "a.png", tmp_path / "a.svg"]
    data = (tmp_path / "a.png").read_bytes()
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (450, 300)  # 150 dots an inch
    assert b"matplotlib" not in data.lower()
    assert zlib.crc32(data[12:29]) == int.from_bytes(data[29:33])
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "<dc:date>" not in text
    assert "<dc:creator>" not in text
    # The page grows to include what reaches beyond it.
    figure.text(1.2, 0.5, "outside")
    [wide] = figures.save(figure, tmp_path / "wide", ["png"])
    assert int.from_bytes(wide.read_bytes()[16:20]) > 540
    [text_only] = figures.save(figure, str(tmp_path / "b.c"), ["svg"])
    assert text_only == tmp_path / "b.c.svg"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ParameterError, match=f"^cannot write {tmp_path / 'late.png'}: No space left on device$"):
        figures.save(figure, tmp_path / "late")
    with pytest.raises(ParameterError, match=r"^unknown figure format 'jpg'"):
        figures.save(figure, tmp_path / "late", ["png", "jpg"])
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.svg", "wide.png", "b.c.svg"}
