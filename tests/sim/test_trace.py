"""The Chrome trace has the run's times, follows the format, and has no overlaps on a track."""

import gzip
import itertools
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Account
from model.interpret.simulated_answers import World
from model.logs.spans import Span
from model.methods.ppd import algorithm as ppd
from sim.commands.sim_app import app
from sim.engine.events import Cluster, Run, simulate
from sim.runs.trace import chrome_trace, described, record, write

MATCHES = [True, False, True, True, False, True]
PLAIN, OVERHEADS = UnitCost(40), UnitCost(40, early_head=0.3, final_head=0.7, dispatch=0.1, link=1 / 3, promotion=0.9)


def simulated(form: str = "literal", exit_layer: int = 20, cost: UnitCost = PLAIN, units: int | None = None) -> Run:
    choice = ppd.Parameters(40, exit_layer, 3, form)
    steps = ppd.decode(choice, [0], len(MATCHES))
    return simulate(steps, len(MATCHES), Cluster(units or choice.units), cost, World(1, 40, MATCHES), record=True)


TINY = {"layers": 4, "exit_layer": 2, "candidates": 1}
RUNS = {
    "literal": simulated(),
    "eager": simulated("eager", 25, OVERHEADS),
    "nested": simulated("nested", 15),
    "flat": simulated("flat", 10, OVERHEADS),
    "short of units": simulated("eager", 20, OVERHEADS, units=2),
}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


def events(run: Run, phase: str) -> list[dict[str, Any]]:
    found = chrome_trace(run.intervals, run.commits, "test")["traceEvents"]
    return [event for event in found if event["ph"] == phase]


def names(run: Run) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events(run, "M") if event["name"] == "thread_name"}


def test_events_have_the_required_fields(run: Run) -> None:
    trace = chrome_trace(run.intervals, run.commits, "test")
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXiC"
        assert event["pid"] == 1
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["tid"] in names(run)
            assert event["args"]["fate"] in ("kept", "discarded", "cancelled")
    assert trace["otherData"]["name"] == "test"
    assert "1 ms" in trace["otherData"]["time"]


def test_every_interval_appears_once(run: Run) -> None:
    drawn = sorted((event["args"]["start"], event["args"]["end"], event["args"]["process"]) for event in events(run, "X"))
    assert drawn == sorted((row.start, row.end, row.process) for row in run.intervals)


def test_one_layer_time_is_a_millisecond(run: Run) -> None:
    for event in events(run, "X"):
        start, end = event["args"]["start"], event["args"]["end"]
        assert event["ts"] == pytest.approx(1000 * start, abs=1e-3)  # [us], rounded to 1 ns
        assert event["dur"] == pytest.approx(1000 * (end - start), abs=2e-3)


def test_events_of_one_track_never_overlap(run: Run) -> None:
    """Viewers compare whole nanoseconds, and drop events that overlap without nesting."""
    tracks = defaultdict(list)
    for event in events(run, "X"):
        start = round(event["ts"] * 1000)
        tracks[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for spans in tracks.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(spans)))


def test_durations_on_units_sum_to_the_busy_time(run: Run) -> None:
    on_units = [event for event in events(run, "X") if names(run)[event["tid"]].startswith("unit")]
    assert math.fsum(event["args"]["end"] - event["args"]["start"] for event in on_units) == pytest.approx(run.busy, rel=1e-12)
    assert math.fsum(event["dur"] for event in on_units) / 1000 == pytest.approx(run.busy, abs=1e-6 * len(on_units))


def test_counter_of_busy_units_matches_busy_time_and_peak(run: Run) -> None:
    changes = [(event["ts"], event["args"]["units"]) for event in events(run, "C") if event["name"] == "busy units"]
    area = math.fsum(units * (later - at) for (at, units), (later, _) in itertools.pairwise(changes))
    assert area / 1000 == pytest.approx(run.busy, abs=1e-4)
    assert max(units for _, units in changes) == run.peak_units
    assert changes[-1] == (pytest.approx(1000 * run.latency, abs=1e-3), 0)


def test_commits_are_instants_and_count_up(run: Run) -> None:
    instants = [(event["args"]["time"], event["args"]["kind"], event["args"]["tokens"]) for event in events(run, "i")]
    assert instants == run.commits
    counted = [event for event in events(run, "C") if event["name"] == "tokens generated"]
    counts = [event["args"]["tokens"] for event in counted]
    assert counts == [*itertools.accumulate(tokens for _, _, tokens in run.commits)]
    assert counts[-1] == len(MATCHES)
    assert [event["name"].split(": ")[1] for event in events(run, "i")] == [f"{count} generated" for count in counts]
    for event, (time, *_) in zip([*events(run, "i"), *counted], 2 * run.commits, strict=True):
        assert event["ts"] == pytest.approx(1000 * time, abs=1e-3)


def test_passes_have_their_arguments(run: Run) -> None:
    """Layers are half-open ranges; fates and roles are those of the run."""
    rows = {(row.start, row.end, row.process, row.unit + 1): row for row in run.intervals if row.what == "forward"}
    passes = [event for event in events(run, "X") if event["cat"].startswith("forward,")]
    assert len(passes) == len(rows)
    for event in passes:
        said = event["args"]
        row = rows[said["start"], said["end"], said["process"], event["tid"]]
        assert (said["position"], said["role"], said["tokens"]) == (row.position, row.role, row.width)
        assert (said["layers"], said["fate"]) == (f"[{row.first}, {row.last})", row.fate)
        assert event["cat"] == f"forward,{row.fate}"
    starts = [event["ts"] for event in events(run, "X")]
    assert starts == sorted(starts)


@pytest.mark.parametrize(("more", "label"), [
    ({}, "token 7 · layers 2–4"),
    ({"role": "draft"}, "draft: token 7 · layers 2–4"),
    ({"width": 3}, "tokens 5–7 · layers 2–4"),
    ({"width": 6, "depth": 3}, "tokens 5–7 (6 in all) · layers 2–4"),
    ({"gaps": ((2, 3),)}, "token 7 · layers 3–4"),
    ({"first": 0, "gaps": ((1, 3),)}, "token 7 · layers 0–1, 3–4"),
    ({"kv_only": True}, "token 7 · keys and values of layers 2–4"),
    ({"first": 4}, "token 7 · head"),
])  # fmt: skip
def test_a_pass_is_named_by_its_tokens_and_layers(more: dict[str, Any], label: str) -> None:
    row = Span(0, 0.0, 1.0, "forward", 0, 7, 2, 4, "kept")._replace(**more)
    names = [event["name"] for event in chrome_trace([row], [], "test")["traceEvents"] if event["ph"] == "X"]
    assert names == [label]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=12))
def test_links_have_one_track_per_concurrent_transfer(transfers: list[tuple[int, int]]) -> None:
    """A transfer that starts when another ends uses its track."""
    rows = [Span(-1, float(start), float(start + length), "link", number, 0, 0, 0, "kept")
            for number, (start, length) in enumerate(transfers)]  # fmt: skip
    found = chrome_trace(rows, [], "test")["traceEvents"]
    on = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            on[event["tid"]].append((event["args"]["start"], event["args"]["end"]))
    at_once = max(sum(start <= at < start + length for start, length in transfers) for at in range(20))
    assert sorted(on) == [1 + lane for lane in range(at_once)]
    for spans in on.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(spans)))


def test_tracks_are_named() -> None:
    assert list(names(RUNS["literal"]).values()) == ["unit 0 (main)", "unit 1", "unit 2", "unit 3"]
    assert {"link 0", "link 1", "link 2"} <= set(names(RUNS["eager"]).values())  # three sub-processes travel at once
    assert names(RUNS["nested"])[1] == "unit 0"  # promoted processes stay on their units
    assert 0 not in names(RUNS["literal"])  # viewers keep it for the idle task


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_written_trace_is_read_back_and_reproducible(tmp_path: Path, suffix: str) -> None:
    run = RUNS["eager"]
    one, other = (write(tmp_path / f"{name}{suffix}", run, "test") for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
    text = gzip.decompress(one.read_bytes()) if suffix == ".json.gz" else one.read_bytes()
    if suffix == ".json.gz":
        assert one.read_bytes()[4:8] == bytes(4)  # no time stamp of writing, which would change the bytes
    assert json.loads(text) == chrome_trace(run.intervals, run.commits, "test")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([one.name, other.name])


def test_unwritable_traces_are_refused(tmp_path: Path) -> None:
    run = RUNS["literal"]
    with pytest.raises(ParameterError, match=r"\.json, \.json\.gz, \.png, \.svg, got 'run.txt'"):
        write(tmp_path / "run.txt", run, "test")
    with pytest.raises(ParameterError, match="record=True"):
        write(tmp_path / "run.json", Run(), "test")
    assert Run() == Run(0.0, 0.0, 0, Account(), [], {}, [], Counter(), [], 0.0), "a run of nothing has none of anything"
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ParameterError, match=r"cannot write .*folder\.json"):
        write(tmp_path / "folder.json", run, "test")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]  # no partial file is left
    with pytest.raises(ParameterError, match=r"cannot write .*run\.json"):
        write(write(tmp_path / "file.json", run, "test") / "run.json", run, "test")
    assert write(tmp_path / "made" / "run.json", run, "test").is_file()  # folders are made, as by all commands


def test_times_are_milliseconds_where_seconds_are_known() -> None:
    law = {"kind": "iid", "match_rate": 0.5}
    given: dict[str, Any] = {"scenario": {"name": "timed", "tokens": 32}, "method": [{"name": "ppd", **TINY}], "outcomes": law}
    run, (plain, about, unit) = record(given), described(given)
    assert (plain, unit, about["scenario"]) == (run, "layer-times", "timed")
    assert [*run.commits] != [*described(given, replication=1).run.commits]
    timed, _, unit = described(given | {"cost": {"seconds_per_layer": 0.004}})
    assert unit == "ms"
    assert (timed.latency, timed.busy) == pytest.approx((4 * run.latency, 4 * run.busy))
    assert [time for time, *_ in timed.commits] == pytest.approx([4 * time for time, *_ in run.commits])
    assert [row[1:] for row in timed.commits] == [row[1:] for row in run.commits]
    for name in ("start", "end"):
        assert [getattr(row, name) for row in timed.intervals] == pytest.approx([4 * getattr(row, name) for row in run.intervals])
    assert chrome_trace(timed.intervals, timed.commits, "timed", unit)["otherData"]["time"] == "simulated"
    with pytest.raises(ParameterError, match="point must be"):
        record(given, point=1)


@pytest.mark.parametrize("rule", ["exact", "per-beam"])
def test_passes_over_hypotheses_have_valid_positions(rule: str) -> None:
    """With two hypotheses at three positions a pass has six tokens, but starts two positions before its last."""
    run = record({
        "scenario": {"name": "beams", "tokens": 6},
        "method": [{"name": "beam", "layers": 4, "draft_length": 2, "beams": 2, "rule": rule}],
        "outcomes": {"kind": "iid", "acceptance_rate": 1.0}, "cost": {"cost_ratio": 0.25},
    })  # fmt: skip
    passes = [row for row in run.intervals if row.role == "target"]
    assert [(row.earliest, row.position) for row in passes] == [(0, 2), (3, 5)]
    assert {row.width for row in passes} == {6}
    assert "tokens 0–2 (6 in all) · layers 0–4" in {event["name"] for event in events(run, "X")}
    assert all(row.earliest >= 0 for row in run.intervals)


# --- the command ----------------------------------------------------------------------------------------------------------


SMALL = """[scenario]
name = "small"
tokens = 8

[[method]]
name = "ppd"
layers = 4
exit_layer = 2
candidates = 1

[outcomes]
kind = "iid"
match_rate = 0.5
"""


@pytest.mark.parametrize(("words", "options"), [
    ([], {}),
    (["--replication", "3"], {"replication": 3}),
    (["--seed", "5"], {"seed": 5}),
    (["--tokens", "3"], {"tokens": 3}),
    (["--set", "method.exit_layer=3"], {"set": {"method.exit_layer": 3}}),
    (["--sweep", "method.layers=4,3", "--point", "1"], {"sweep": {"method.layers": [4, 3]}, "point": 1}),
])  # fmt: skip
def test_the_command_traces_the_decoding_that_is_asked_for(
    words: list[str], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SMALL)
    done = CliRunner().invoke(app, ["trace", "s.toml", "-o", "t.json", *words])
    assert (done.exit_code, done.stdout) == (0, "t.json\n"), done.output
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    times = [(each["args"]["time"], each["args"]["kind"]) for each in events if each["ph"] == "i"]
    run = record("s.toml", **options)
    assert times == [(time, kind) for time, kind, _ in run.commits]
    if words:
        assert times != [(time, kind) for time, kind, _ in record("s.toml").commits]


@pytest.mark.parametrize(("name", "point"), [("pearl", 32), ("amusd", 130), ("ssd", 11), ("dsi", 70)])
def test_drafts_that_came_back_are_kept(name: str, point: int) -> None:
    """What a sub-process returns is used, if only to be rejected. Others end with the decoding: preparations for its last round."""
    run = record(name, point=point, tokens=20, replication=1)
    drafts = [row for row in run.intervals if row.role == "draft"]
    last = max(row.start for row in run.intervals if row.role == "target" and row.what == "forward") if name == "ssd" else math.inf
    assert {row.fate for row in drafts if row.end <= last} == {"kept"}
    assert all(row.start >= last for row in drafts if row.fate != "kept")
    assert {row.fate for row in run.intervals if row.role == "target"} == {"kept"}
