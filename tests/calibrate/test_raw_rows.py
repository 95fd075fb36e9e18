"""From raw rows to the tables of profiles: each number worked out by hand, from made-up times [us]."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.fits import cpu_step
from calibrate.timing import process_times, profile_from_timings, read_times, timing_grid
from model.architectures.transformer import preset
from model.base.checks import ParameterError
from model.hardware import physical_limits, profile
from model.hardware.profile import AXES, PROCESS_PROMPT
from model.hardware.profile_files import save
from model.logs.spans import Span
from tests.support.tiers import examples

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


def by_place(table: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], tuple[float, ...]]:
    """Return low, time, high [us] and repeats, by part, busy and the axes of the part; each point occurs once."""
    found = {}
    for row in table:
        axes = [row[name] for name in AXES[row["part"]]]
        place = (row["part"], row["busy"], *axes)
        assert place not in found
        assert {*row} == {"part", "busy", *AXES[row["part"]], "low_s", "time_s", "high_s", "repeats"}
        found[place] = (*(round(1e6 * row[name], 6) for name in ("low_s", "time_s", "high_s")), row["repeats"])
    return found


# --- reads, key and value rows alone, hypotheses, sub-processes ---


def reading(middle: float, *, busy: int = 0, repeats: int = 4, **more: Any) -> dict[str, Any]:
    """Return a round in which all times are similar."""
    times = [middle - 1, middle, middle + 2]
    return {
        "kind": "reads", "busy": busy, "repeats": repeats, "reads_us": {"next": times, "top": [2 * each for each in times]},
        "resumed_step_us": times, "fork_us": {"3": times}, "beams_us": {"4": times}, "tree_us": {"2 64": times},
        "kv_rows_us": {"8": times},
    } | more  # fmt: skip


def test_reads_are_medians_over_rounds() -> None:
    rounds = [reading(20.0), reading(50.0, repeats=6), reading(10.0)]
    found = by_place(read_times.part_rows([*rounds, reading(7.0, busy=2)], {0: 12e-6, 2: 4e-6}, 5))
    # Three rounds of busy 0 with 4 + 6 + 4 repeats, one of busy 2; key and value rows without their share of the call, a quarter.
    assert found == {
        ("next", 0, 1): (19, 20, 22, 14), ("top", 0, 1): (38, 40, 44, 14), ("resumed_step", 0, 1): (19, 20, 22, 14),
        ("fork", 0, 3): (19, 20, 22, 14), ("beams", 0, 4): (19, 20, 22, 14), ("tree", 0, 2, 64): (19, 20, 22, 14),
        ("kv_rows", 0, 8): (16, 17, 19, 14),
        ("next", 2, 1): (6, 7, 9, 4), ("top", 2, 1): (12, 14, 18, 4), ("resumed_step", 2, 1): (6, 7, 9, 4),
        ("fork", 2, 3): (6, 7, 9, 4),
        ("beams", 2, 4): (6, 7, 9, 4), ("tree", 2, 2, 64): (6, 7, 9, 4), ("kv_rows", 2, 8): (5, 6, 8, 4),
    }  # fmt: skip


def test_negative_differences_are_zero_and_means_bound_their_quartiles() -> None:
    row = reading(
        3.0, resumed_step_us=[-9, -1, 1], tree_us={"2 64": [-9, 2, 1]}, kv_rows_us={"8": [1, 2, 5]}, beams_us={"4": [5, 4, 3]}
    )
    found = by_place(read_times.part_rows([row], {0: 12e-6}, 4))
    assert found["resumed_step", 0, 1] == (0, 0, 1, 4)
    assert found["tree", 0, 2, 64] == (0, 2, 2, 4)
    assert found["beams", 0, 4] == (4, 4, 4, 4)
    assert found["kv_rows", 0, 8] == (0.001, 0.001, 1, 4)  # minus a third of 12 us, and positive
    without = {name: value for name, value in reading(3.0).items() if name != "fork_us"}
    assert ("fork", 0, 3) not in by_place(read_times.part_rows([without], {}, 1))
    assert by_place(read_times.part_rows([without], {}, 1))["kv_rows", 0, 8] == (
        2,
        3,
        5,
        4,
    )  # without the call
    assert by_place(read_times.part_rows([without], {0: 1e-6}, 1))["kv_rows", 0, 8] == (1, 2, 4, 4)  # a single layer


# --- after pauses ---


def pausing(middle: float, **more: Any) -> dict[str, Any]:
    times = {"after_gap_us": {"0": [middle - 1, middle, middle + 1], "500": [2 * middle] * 3}, "repeats": 8}
    wide = {"4 1000": [middle + 5, middle + 6, middle + 7]}
    return times | {"short_us": {"2": [7, 8, 10], "5": [9, 10, 14]}, "wide_us": wide} | more


def test_passes_after_pauses_and_of_few_layers() -> None:
    """5 layers of 10 us in a whole pass. In passes over 2 layers, a layer takes 8 us and runs again 3 layers, 30 us, sooner."""
    found = by_place(read_times.rows_after_pauses([pausing(60.0), pausing(90.0), pausing(50.0)], 5))
    assert found == {
        ("after_gap", 0, 0): (59, 60, 61, 24), ("after_gap", 0, 500): (120, 120, 120, 24), ("after_gap", 0, -30): (45, 50, 60, 24),
        ("wide_after_gap", 0, 4, 1000): (65, 66, 67, 24),
    }  # fmt: skip
    assert read_times.rows_after_pauses([], 5) == []
    older = {name: value for name, value in pausing(60.0).items() if name not in ("short_us", "wide_us")}
    assert {*by_place(read_times.rows_after_pauses([older], 5))} == {("after_gap", 0, 0), ("after_gap", 0, 500)}
    # Noise cannot make a pass negative.
    rows = read_times.rows_after_pauses([pausing(1.0, short_us={"2": [0, 0, 0], "5": [9, 10, 14]})], 5)
    assert by_place(rows)["after_gap", 0, -30][1] == 0.001


# --- processes ---


def apart(**more: Any) -> dict[str, Any]:
    """Return decodings over one and two sub-processes; 3 of 5 layers are before the exit."""
    empty: dict[str, Any] = {
        f"{part}_us": {} for part in (*process_times.OVERHEADS, *process_times.MAIN_PASSES, process_times.SUBPROCESS_PASS)
    }
    return empty | {"repeats": 16, "exit_layer": 3} | more


def test_parts_of_runs_over_processes() -> None:
    rounds = [
        apart(wake_us={"1": [4, 5, 9], "2": [1, 2, 3]}, main_alone_us={"1": [64, 70, 100]}, main_concurrent_us={"1": [41, 45, 51]},
              subprocess_step_us={"1": [50, 60, 70], "2": [8, 9, 10]}),
        apart(wake_us={"1": [6, 7, 11]}, main_alone_us={"1": [64, 70, 100]}, main_concurrent_us={"1": [41, 45, 51]},
              subprocess_step_us={"1": [50, 60, 70]}),
    ]  # fmt: skip
    found = by_place(process_times.process_rows(rounds, {"main_alone": 10e-6, "main_concurrent": 5e-6}, 5))
    assert found == {
        ("wake", 0, 1): (5, 6, 10, 32), ("wake", 0, 2): (1, 2, 3, 16),  # the median of the rounds that have it
        # 3 layers minus 10 us, 2 layers minus 5 us
        ("main_alone", 0, 1): (18, 20, 30, 32), ("main_concurrent", 0, 1): (18, 20, 23, 32),
        # minus the two concurrent layers, if known
        ("subprocess_step", 0, 1): (10, 20, 30, 32), ("subprocess_step", 0, 2): (8, 9, 10, 16),
    }  # fmt: skip
    assert process_times.process_rows([], {"main_alone": 0.0, "main_concurrent": 0.0}, 5) == []


def test_times_over_processes_follow_from_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the main process count if they run alone in the first layers, or concurrently with others in the later layers."""
    settled: list[int] = []

    def span(unit: int, start: float, end: float, what: str = "forward", first: int = 0, width: int = 1) -> Span:
        return Span(unit, start, end, what, 0, 0, first, 5, "kept", width=width)

    spans = [
        span(0, 0, 10), span(0, 10, 11, "dispatch"), span(-1, 10, 12, "link"), span(1, 12, 31), span(0, 12, 32, first=3),
        span(-1, 32, 33, "promotion"), span(0, 33, 35, "head"), span(0, 35, 36, "head"), span(0, 36, 38, "wait"),
        span(0, 40, 50), span(1, 45, 50),  # half of it concurrent: neither
        span(0, 50, 60, first=3), span(0, 60, 70, width=2),  # alone in the later layers; a multi-token pass
        span(0, 70, 80, first=3), span(1, 70, 75),  # in the later layers, half of it concurrent
    ]  # fmt: skip
    made: list[Any] = []

    class Ran:
        def __init__(self, over: Any, *, answers: Any, record: bool) -> None:
            made.append((over, record))
            self.spans, self.seconds = spans, seconds

        def run(self, steps: Any, tokens: int) -> None:
            made.append(tokens)

    from calibrate.workers import over_processes

    monkeypatch.setattr(over_processes, "Parallel", Ran)
    decoder = SimpleNamespace(layers=5, settle=lambda: settled.append(1))
    pool: Any = SimpleNamespace(decoder=decoder, units=2)
    seconds = 92.0
    found = process_times.over_processes(pool, 3)
    assert made == [(pool, True), 2 * PROCESS_PROMPT]
    assert settled == [1]
    # The main process worked or waited for 77 of 92 s: the rest, divided by its two reads.
    assert found == {1: {
        "dispatch": [1], "wake": [2], "promotion": [1], "scheduling": [7.5], "main_alone": [10], "main_concurrent": [20],
        "subprocess_step": [19, 5, 5],
    }}  # fmt: skip
    for whole, turn in ((78.0, 0.5), (77.0, 0.0), (60.0, 0.0)):  # never negative, even if clocks differ
        seconds = whole
        assert process_times.over_processes(pool, 3)[1]["scheduling"] == [turn]


def test_times_over_processes_are_means_by_number_of_processes() -> None:
    names = (*process_times.OVERHEADS, *process_times.MAIN_PASSES, process_times.SUBPROCESS_PASS)

    def text(*seconds: float) -> process_times.DecodingTimes:
        return {1: {name: [*seconds] for name in names}, 2: {name: [1e-6] if name == "wake" else [] for name in names}}

    found = process_times.raw_row([text(1e-6, 2e-6), text(3e-6, 10e-6)], 5)
    assert {name: found[f"{name}_us"]["1"] for name in names} == {name: [1.75, 4.0, 4.75] for name in names}
    assert [name for name in names if "2" in found[f"{name}_us"]] == ["wake"]
    assert found["wake_us"]["2"] == [1.0] * 3
    assert found["exit_layer"] == 3  # half of five layers, rounded up
    assert process_times.raw_row([text(1e-6)], 6)["exit_layer"] == 3


# --- whole passes ---


def passed(mode: str = "interpreter", width: int = 1, batch: int = 1, **more: Any) -> dict[str, Any]:
    """Return a pass of 100 us over 4 layers of 15 us: 20 us head, 6 us embedding, 10 us of the call, 4 us of the read."""
    place = {"mode": mode, "width": width, "context": 8, "batch": batch, "busy": 0, "round": 0}
    times = {"whole_us": [98, 100, 104], "sum_us": [56, 60, 72], "head_us": [19, 20, 23], "embedding_us": [5, 6, 8]}
    return {"kind": "point", **place, "repeats": 3, **times, "rest_us": [9, 10, 15], "first_read_us": [7, 8, 9]} | more


def test_parts_of_an_interpreter_pass() -> None:
    """The read is the remainder of the whole pass, 4 us, and the layers keep their 15 us."""
    table, notes = profile_from_timings.part_rows([passed()], "interpreter", 4)
    assert by_place(table) == {
        ("layer", 0, 1, 8, 1): (14, 15, 18, 3), ("head", 0, 1): (19, 20, 23, 3), ("embedding", 0, 1): (5, 6, 8, 3),
        ("step", 0, 1): (10, 10, 10, 3), ("first_read", 0, 1): (4, 4, 4, 3),
    }  # fmt: skip
    assert notes == ["times are means over the repeats of a round, because runs add them up, and medians over rounds"]
    # With a read of at most 3 us, the layers take the rest: 0.25 us more each.
    found = by_place(profile_from_timings.part_rows([passed(first_read_us=[2, 3, 4])], "interpreter", 4)[0])
    assert found["first_read", 0, 1] == (3, 3, 3, 3)
    assert found["layer", 0, 1, 8, 1] == (14.25, 15.25, 18.25, 3)
    # Neither a read nor a call is negative.
    found = by_place(profile_from_timings.part_rows([passed(rest_us=[20, 30, 40])], "interpreter", 4)[0])
    assert (found["first_read", 0, 1][1], found["step", 0, 1][1], found["layer", 0, 1, 8, 1][1]) == (0, 30, 11)
    table, notes = profile_from_timings.part_rows([passed(rest_us=[-4, -2, 0])], "interpreter", 4)
    assert by_place(table)["step", 0, 1] == (0, 0, 0, 3)
    assert notes[-1] == "the whole pass took less than the sum of its parts at 1 of 1 points: overhead set to 0"


def test_parts_depend_on_tokens_positions_and_sequences() -> None:
    """Heads and embeddings depend on the tokens of all sequences, calls on the sequences: medians over all such points."""
    rows = [
        passed("eager", 4, 1, sum_us=[52, 60, 80], head_us=[9, 10, 11]), passed("eager", 2, 2, head_us=[29, 30, 31], repeats=5),
        passed("eager", 1, 4, whole_us=[90, 99, 100]),
    ]  # fmt: skip
    found = by_place(profile_from_timings.part_rows(rows, "eager", 4)[0])
    assert found["head", 0, 4] == (19, 20, 23, 11)
    assert found["embedding", 0, 4] == (5, 6, 8, 11)
    # The interpreter's marks give the call: 10 us here too.
    assert [found["step", 0, batch] for batch in (1, 2, 4)] == [(10, 10, 10, 3), (10, 10, 10, 5), (10, 10, 10, 3)]
    assert found["layer", 0, 4, 8, 1] == (13, 15, 20, 3)
    assert found["layer", 0, 2, 8, 2][-1] == 5


def test_steps_are_medians_over_points() -> None:
    rows = [passed("eager", width, rest_us=[0, rest, 99]) for width, rest in ((1, 1), (2, 5), (4, 2), (8, 3), (16, 9))]
    assert by_place(profile_from_timings.part_rows(rows, "eager", 4)[0])["step", 0, 1] == (2, 3, 5, 15)


def test_times_besides_whole_passes_join_the_table() -> None:
    """Key and value rows without their share of the call; processes without call and embedding, or without a resumed call."""
    rows: list[dict[str, Any]] = [
        passed(), reading(20.0, kv_rows_us={"8": [20, 22, 24]}), {"kind": "after", **pausing(60.0, short_us={"4": [14, 15, 16]})},
        {"kind": "processes", **apart(main_alone_us={"1": [60, 61, 70]}, main_concurrent_us={"1": [40, 60, 80]})},
    ]  # fmt: skip
    found = by_place(profile_from_timings.part_rows(rows, "interpreter", 4)[0])
    assert found["kv_rows", 0, 8] == (pytest.approx(20 - 10 / 3), pytest.approx(22 - 10 / 3), pytest.approx(24 - 10 / 3), 4)
    assert found["main_alone", 0, 1] == (pytest.approx(44 / 3), 15, 18, 16)  # minus 16 us of call and embedding, over three layers
    assert found["main_concurrent", 0, 1] == (20, 40, 60, 16)  # minus 20 us of a resumed call, over the one layer after them
    assert found["resumed_step", 0, 1] == (19, 20, 22, 4)
    assert {place[0] for place in found} >= {"after_gap", "wide_after_gap", "tree", "fork", "beams", "next", "top", "first_read"}
    rows[0] = passed(width=2)  # no pass of one token, so its embedding is unknown
    found = by_place(profile_from_timings.part_rows(rows, "interpreter", 4)[0])
    assert found["main_alone", 0, 1][1] == pytest.approx(51 / 3)


# --- predictions at other contexts ---


def test_passes_at_other_contexts_are_predicted_from_parts() -> None:
    """4 layers of 15 us, 20 us head, 6 us embedding and 10 us besides are 96 us at any context; measured were 80 us."""
    behind = [passed("eager", width, context=context, busy=busy) for width in (1, 2, 4) for context in cpu_step.CONTEXTS
              for busy in (0, 1)]  # fmt: skip
    other = [passed("eager", width, context=200, whole_us=[1, whole, 99]) for width, whole in ((2, 90.0), (2, 80.0), (4, 80.0))]
    found = cpu_step.held_out([*behind, *other, passed("eager", context=200, busy=1)], 4)
    assert [tuple(each)[:4] for each in found] == [(2, 200, 1, 0), (4, 200, 1, 0), (1, 200, 1, 1)]
    assert [each.predicted for each in found] == pytest.approx([96e-6] * 3)
    assert [each.measured for each in found] == pytest.approx([80e-6, 80e-6, 100e-6])  # the round with the shortest pass
    assert found[0].error == pytest.approx(0.2)
    # Parts at width 1 predict the other widths; the step takes 10 us here, 30 us there.
    for row in behind:
        row["rest_us"] = [10, 10, 10] if row["width"] == 1 else [30, 30, 30]
    found = cpu_step.held_out([*behind, *other], 4, (1,), overhead_alone=True)
    assert [each[0] for each in found] == [2, 4]
    assert [each.predicted for each in found] == pytest.approx([96e-6] * 2)


def test_parts_of_batched_passes_depend_on_all_tokens() -> None:
    """5 us of the head and 3 us of the embedding per token, 7 us of the call per sequence, and 15 us per layer."""
    def at(width: int, batch: int, context: int) -> dict[str, Any]:
        count = width * batch
        more = {"head_us": [0, 5 * count, 99], "embedding_us": [0, 3 * count, 99], "rest_us": [7 * batch] * 3}
        return passed("eager", width, batch, context=context, **more)

    rows = [at(width, batch, context) for width in (1, 2, 4) for batch in (1, 2, 4) for context in cpu_step.CONTEXTS]
    [found] = cpu_step.held_out([*rows, at(2, 2, 200)], 4)
    assert tuple(found)[:4] == (2, 200, 2, 0)
    assert found.predicted == pytest.approx(60e-6 + 4 * 8e-6 + 14e-6)


def test_slowdown_by_a_neighbour_from_quietest_or_median_rounds() -> None:
    def rounds(busy: int, *wholes: float, **more: Any) -> list[dict[str, Any]]:
        return [passed("eager", busy=busy, round=turn, whole_us=[0, whole, 999], **more) for turn, whole in enumerate(wholes)]

    rows = [*rounds(0, 100, 120, 180), *rounds(1, 160, 150, 300), *rounds(2, 500), *rounds(1, 400, width=2)]
    assert cpu_step.slowdowns(rows) == {(1, 8, 1): 1.5}  # width 2 was not measured without neighbours
    assert cpu_step.slowdowns(rows, typical=True) == {(1, 8, 1): pytest.approx(160 / 120)}
    assert cpu_step.slowdowns(rows, "interpreter") == {}
    found = cpu_step.unselected_rows([*rounds(0, *range(1, 6)), {"kind": "reads"}])
    assert [row["round"] for row in found if "round" in row] == [0, 1, 2]


# --- the profile ---

HEADER = {
    "kind": "machine", "model": "llama-68m", "device": "cpu", "dtype": "float32", "source": 512, "name": "Some CPU",
    "memory_bytes": 2**34, "cache_bytes": 2**25, "transformers": "5.15", "date": "2026-01-02", "weights": "random",
    "shape": asdict(preset("llama-68m")), "copy_bytes_per_s": 1e10, "read_bytes_per_s": 3e10, "flop_per_s": 5e10,
}  # fmt: skip
DEPTH = preset("llama-68m").layers


def test_profile_records_model_machine_and_peaks(tmp_path: Path) -> None:
    raw = tmp_path / "some.jsonl"
    raw.write_text("raw rows\n")
    better = {"kind": "ceilings", "copy_bytes_per_s": 2e10, "read_bytes_per_s": 1e10, "flop_per_s": 9e10}
    rows = [better, *(passed("eager", width, sum_us=[50, 60 + width, 90]) for width in (1, 2, 4))]
    made = profile_from_timings.profile_of({**HEADER}, rows, "eager", "some", raw, folder="kept/")
    assert (made.bandwidth, made.rate, made.facts["peaks"]) == (3e10, 9e10, "measured")  # the best of all attempts
    assert (made.mode, made.engine, made.device, made.model) == ("eager", "transformers 5.15", "cpu", "llama-68m")
    assert (made.dtype, made.date, made.cache_bytes, made.provenance) == ("float32", "2026-01-02", 2**25, "measured")
    assert made.notes[0].startswith("weights are random; a layer's time is the median over layers")
    [source] = made.sources
    assert (source.file, source.parts) == ("kept/some.jsonl", ("layer", "head", "embedding", "step", "first_read"))
    assert source.sha256 == hashlib.sha256(raw.read_bytes()).hexdigest()
    assert {*made.errors} == {"layer", "head"}  # three points each
    assert not {"kind", "shape", "model", "dtype"} & {*made.facts}
    few = profile_from_timings.profile_of({**HEADER}, rows[:3], "eager", "some", raw)
    assert few.errors == {}
    told = profile_from_timings.profile_of(
        {**HEADER, "passes": "cuda-graph", "weights": "its own"}, [passed()], "interpreter", "some", raw
    )
    assert (told.mode, told.engine) == ("cuda-graph", "decodesim on transformers 5.15")
    assert told.notes[0].startswith("weights are its own; times are means")
    # A known GPU has published peaks, which take precedence over measured ones.
    known = {**HEADER, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "dtype": "bfloat16", "device": "cuda:0"}
    made = profile_from_timings.profile_of(known, rows, "eager", "some", raw)
    assert made.facts["peaks"] == "published"
    assert made.bandwidth > 1e12
    assert made.device.startswith("h100")


def test_command_prints_the_values_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "some.jsonl"
    raw.write_text("raw rows\n")
    rows = [passed("eager", width, whole_us=[1, 8000, 9000], sum_us=[2000, 2400 * width, 9900], head_us=[4000, 4100, 4200],
                   rest_us=[70, 80, 90]) for width in (1, 2)]  # fmt: skip
    header = {**HEADER, "torch": "2.6"}
    made = profile_from_timings.profile_of(header, rows, "eager", "some", raw)
    path = save(made, tmp_path)
    ceilings = {"read_bytes_per_s": 3e10, "copy_bytes_per_s": 1e10, "flop_per_s": 5e10}
    outcome = timing_grid.TimedGrid(
        header, [*rows, {"kind": "failed"}], [(timing_grid.Point("eager", 9, 8, 1, 0), "too wide")], raw
    )
    timed = profile_from_timings.TimedProfiles({"eager": path}, outcome, {"interpreter": "beats its peaks"}, ceilings)
    monkeypatch.setattr(profile_from_timings, "time_layers", lambda *_, **__: timed)
    words = ["layers", "--model", "llama-68m", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "llama-68m in float32 on Some CPU, torch 2.6, transformers 5.15",
        "measured ceilings: 30.0 GB/s read, 10.0 GB/s copied, 0.050 TFLOP/s", "",
    ]  # fmt: skip
    said = physical_limits.limit(made, profile_from_timings.shape_of(made))
    assert lines[3] == f"eager, peaks (measured): 30 GB/s, 0.05 TFLOP/s; limits: {said}"
    found = [line for line in lines if line.startswith("layer ")]
    assert [line.split(" us")[0].split()[-1] for line in found] == ["1200.0", "2400.0"]
    for line, each in zip(found, [1.2e-3, 2.4e-3], strict=True):
        speed, share, rate, of_peak = line.split(" us")[1].split()
        implied = physical_limits.implied_rates(made, profile_from_timings.shape_of(made))
        reached = next(rates for rates in implied if rates.part == "layer")
        row = [*reached.seconds].index(pytest.approx(each))
        assert (speed, share) == (f"{reached.bandwidth()[row] / 1e9:.1f}", f"{reached.bandwidth()[row] / 3e10:.0%}")
        assert (rate, of_peak) == (f"{reached.rate()[row] / 1e12:.3f}", f"{reached.rate()[row] / 5e10:.0%}")
    others = [line.split() for line in lines if line.startswith(("embedding", "step"))]
    assert others == [["embedding", "at", "tokens", "1", "6.0", "us"], ["embedding", "at", "tokens", "2", "6.0", "us"],
                      ["step", "at", "batch", "1", "80.0", "us"]]  # fmt: skip
    assert [line for line in lines if line.startswith("note: ")] == [f"note: {each}" for each in made.notes]
    assert lines[-2:] == [str(path), str(raw)]
    assert "too wide" in done.stderr
    assert "beats its peaks" in done.stderr
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (told["points"], told["profiles"], told["rows"]) == (2, {"eager": str(path)}, str(raw))
    assert told["failed"] == [{"point": "eager width 9 context 8 batch 1", "error": "too wide"}]
    assert (told["refused"], told["ceilings"]) == ({"interpreter": "beats its peaks"}, ceilings)


# --- the raw file ---


def test_raw_file_resumes_only_with_the_same_settings(tmp_path: Path) -> None:
    path, header = tmp_path / "raw.jsonl", {**HEADER, "threads": 2, "torch": "2"}
    rows = timing_grid.RawTimings(path, header, resume=False)
    rows.add(passed("eager", 2, round=1))
    rows.add({"kind": "failed", "mode": "eager", "width": 4, "context": 8, "batch": 1, "busy": 0, "round": 1})
    with path.open("a") as file:
        file.write('{"kind": "poi')  # cut off in the middle
    with pytest.raises(ParameterError, match=r"is there already; --resume continues it"):
        timing_grid.RawTimings(path, header, resume=False)
    for key, value in {"model": "other", "dtype": "bfloat16", "threads": 4, "torch": "3", "source": 9, "name": "Other"}.items():
        with pytest.raises(ParameterError, match=rf"timed with {key} .*, and this is {value}; start again"):
            timing_grid.RawTimings(path, header | {key: value}, resume=True)
    again = timing_grid.RawTimings(path, header | {"date": str(datetime.date(2027, 1, 1))}, resume=True)
    assert again.header["date"] == HEADER["date"]  # of the first measurement session
    assert again.done() == {timing_grid.Point("eager", 2, 8, 1, 0, 1)}  # failed points are tried again
    assert [row["kind"] for row in again.rows] == ["point", "failed"]
    again.add({"kind": "ceilings"})
    assert timing_grid.read(path) == (again.header, again.rows)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"kind": "poi', *lines[1:]]))
    with pytest.raises(ParameterError, match="line 2: it must be a raw row"):
        timing_grid.read(path)


def test_each_round_covers_the_whole_grid() -> None:
    each = timing_grid.TimingGrid(
        widths=(1, 2), contexts=(4, 8), batches=(1, 3), busy=(0, 1), modes=("eager", "interpreter"), rounds=2
    )
    assert len(each.points()) == len({*each.points()}) == 64
    assert [each.points()[index].width for index in range(4)] == [1, 2, 1, 2]
    assert [each.points()[index].context for index in range(4)] == [4, 4, 8, 8]
    assert [point.round for point in each.points()] == [0] * 32 + [1] * 32


def raw(width: int = 1, context: int = 8, batch: int = 1, busy: int = 0, turn: int = 0, **more: Any) -> dict[str, Any]:
    times = {"whole_us": [95, 100, 110], "layers_us": [[9, 10, 11], [18, 20, 22], [28, 30, 32]], "head_us": [19, 20, 21]}
    place = {"mode": "eager", "width": width, "context": context, "batch": batch, "busy": busy, "round": turn}
    return {"kind": "point", **place, "repeats": 5, "embedding_us": [4, 5, 6], **times} | more


def test_profile_rows_from_raw_rows() -> None:
    table, notes = profile_from_timings.part_rows([raw(), raw(width=2, context=4, head_us=[39, 40, 41])], "eager", layers=3)
    by = {(row["part"], row.get("width", row.get("positions", row.get("tokens", row.get("batch"))))): row for row in table}
    assert by["layer", 1] == {
        "part": "layer", "busy": 0, "width": 1, "context": 8, "batch": 1, "time_s": pytest.approx(20e-6),
        "low_s": pytest.approx(18e-6), "high_s": pytest.approx(22e-6), "repeats": 5,
    }  # fmt: skip
    assert by["head", 1]["time_s"] == pytest.approx(20e-6)
    assert by["head", 2]["time_s"] == pytest.approx(40e-6)
    assert by["embedding", 2]["time_s"] == pytest.approx(5e-6)
    # 100 - 3 * 20 - 20 - 5 = 15, and 100 - 3 * 20 - 40 - 5 = -5, which counts as 0: the median is between them.
    assert by["step", 1]["time_s"] == pytest.approx(7.5e-6)
    assert "less than the sum of its parts at 1 of 2 points" in notes[-1]
    assert profile.table_of(table).height == len(table) == 7


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(*[st.floats(5, 60)] * 3, st.floats(0, 30), st.floats(0, 30)), min_size=3, max_size=3), st.integers(1, 5)
)
def test_parts_of_interpreter_passes_add_up(times: list[tuple[float, ...]], layers_of: int) -> None:
    """They do for any marks and medians over other axes."""
    rows = []
    for (width, context), (layer, head, embedding, rest, look) in zip(((1, 4), (1, 8), (2, 8)), times, strict=True):
        whole = layers_of * layer + head + embedding + rest + look
        named = {
            "whole_us": whole,
            "sum_us": layers_of * layer * 1.02,
            "rest_us": rest * 1.3,
            "first_read_us": look * 2,
            "head_us": head,
        }
        given_ = {name: [each * 0.9, each, each * 1.1] for name, each in (named | {"embedding_us": embedding}).items()}
        rows.append(raw(width, context, mode="interpreter", **given_))
    table, _ = profile_from_timings.part_rows(rows, "interpreter", layers_of)

    def of(part: str, **axes: int) -> float:
        [found] = [row["time_s"] for row in table if row["part"] == part and {**row, **axes} == row]
        return float(found)

    for row in rows:
        width, context = row["width"], row["context"]
        others = of("head", positions=width) + of("embedding", tokens=width) + of("step", batch=1) + of("first_read", batch=1)
        added = layers_of * of("layer", width=width, context=context) + others
        assert added == pytest.approx(max(row["whole_us"][1] / 1e6, others), rel=1e-6, abs=2e-8)


def test_disturbed_round_does_not_change_a_point() -> None:
    rows = [raw(turn=0), raw(turn=1, whole_us=[1000, 2000, 3000], layers_us=[[900, 900, 900]] * 3), raw(turn=2)]
    table, _ = profile_from_timings.part_rows(rows, "eager", layers=3)
    clean, _ = profile_from_timings.part_rows([raw()], "eager", layers=3)
    assert table == clean


def test_rows_of_busy_hosts_are_separate() -> None:
    table, _ = profile_from_timings.part_rows([raw(), raw(busy=1, whole_us=[190, 200, 210])], "eager", layers=3)
    assert [(row["part"], row["busy"]) for row in table if row["part"] == "step"] == [("step", 0), ("step", 1)]
    assert {row["busy"]: row["time_s"] for row in table if row["part"] == "step"} == pytest.approx({0: 15e-6, 1: 115e-6})


# --- raw files ---


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "its first line must describe the machine"),
        ('{"kind": "ceilings"}\n', "its first line must describe the machine"),
        ('{"kind": "point"}\n', r"line 1: it must be a raw row of `calibrate layers`: row\.batch is missing"),
        ('{"kind": "machine"}\nxx\n{"kind": "point"}\n', "line 2: it must be a raw row"),
        ('{"kind": "machine"}\n[]\n{"kind": "point"}\n', "line 2: it must be a raw row"),
    ],
)
def test_damaged_raw_rows_are_refused(written: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(written)
    with pytest.raises(ParameterError, match=said):
        timing_grid.read(path)
