"""Profiles that are timed between runs: every part once, spread over the runs, with the runs' decoders, and resumable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.commands import run_command
from calibrate.loading import load_models
from calibrate.measured_runs import interleaved_profiles, run_plan
from calibrate.measured_runs.interleaved_profiles import MeasurementSession, Passes
from calibrate.timing import process_times, profile_from_timings, read_times
from calibrate.timing.single_pass import Effort, Point
from calibrate.timing.timing_grid import TimingGrid
from model.base.checks import ParameterError
from model.hardware import profile_files
from model.logs import measured_runs
from tests.support.fake_clocks import few_parts

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")

PASSES = Passes(widths=(1, 3), contexts=(0, 8), rounds=2, repeats=2)
NAMES = {"target": "family:medium", "draft": "family:draft"}


@pytest.fixture(scope="module")
def decoders() -> dict[str, Any]:
    return {role: each.decoder for role, each in load_models.models(NAMES, "cpu", "float32").items()}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace timing by a list of the parts in order."""
    found: list[Any] = []

    def point(model: Any, what: Any, *_: Any) -> dict[str, Any]:
        found.append((model.architecture.name, what))
        times = {name: [1.0, 1.0, 1.0] for name in ("whole_us", "head_us", "embedding_us")}
        return {"kind": "point", **vars(what), "repeats": 1, **times}

    def rest(begun: Any, number: int, kinds: tuple[str, ...]) -> None:
        found.append((begun.built.architecture.name, number, *kinds))

    monkeypatch.setattr(interleaved_profiles, "measure", point)
    monkeypatch.setattr(profile_from_timings, "time_besides_passes", rest)
    return found


def opened(decoders: dict[str, Any], folder: Path, passes: Passes = PASSES, seed: int = 0) -> MeasurementSession:
    return MeasurementSession(decoders, NAMES, passes, folder, device="cpu", dtype="float32", seed=seed)


def test_every_part_is_timed_once_in_its_share(decoders: dict[str, Any], timed: list[Any], tmp_path: Path) -> None:
    session = opened(decoders, tmp_path)
    whole = 2 * 2 * (2 * 2 + 2)  # models, rounds, points and the rest
    for turn in range(3):
        begun = len(timed)
        session.begin(turn)
        for share, count in ((0.0, 0), (0.25, whole // 4), (0.25, whole // 4), (0.9, round(0.9 * whole)), (1.0, whole)):
            session.between(share)
            assert len(timed) - begun == count
    assert len(timed) == len(set(timed)) == 3 * whole
    rounds = {what[1].round if len(what) == 2 else what[1] for what in timed[:whole]}
    assert rounds == {0, 1}
    kinds = [len(what) for what in timed[:whole]]
    assert kinds != sorted(kinds)  # in random order


def test_order_depends_on_the_seed_only(decoders: dict[str, Any], timed: list[Any], tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        session = opened(decoders, tmp_path / str(number), seed=seed)
        session.begin(0)
        session.between(1.0)
        orders.append(timed.copy())
        timed.clear()
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[2]))


def test_finished_parts_are_not_timed_again(decoders: dict[str, Any], timed: list[Any], tmp_path: Path) -> None:
    first = opened(decoders, tmp_path)
    first.begin(0)
    first.between(0.5)
    done = [what for what in timed if len(what) == 2]
    timed.clear()
    second = opened(decoders, tmp_path)
    second.begin(0)
    second.between(1.0)
    left = [what for what in timed if len(what) == 2]
    assert not {*done} & {*left}
    assert len(done) + len(left) == 2 * 2 * 4


@pytest.mark.slow
def test_session_makes_profiles_of_the_runs_decoders(
    decoders: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_parts(monkeypatch)
    ran = 0
    run = decoders["draft"].run

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal ran
        ran += 1
        return run(*given, **more)

    monkeypatch.setitem(vars(decoders["draft"]), "run", counted)
    session = opened(decoders, tmp_path)
    session.begin(0)
    session.between(1.0)
    session.end()
    assert ran > 2 * 4 * 2
    for role, name in (("target", "cpu-family-medium"), ("draft", "cpu-family-draft")):
        found = profile_files.load(tmp_path / f"{name}-interpreter.json")
        assert found.notes[0].startswith("weights are its own; times are means over the repeats of a round")
        assert found.shape["layers"] == decoders[role].layers
        there = {
            "layer",
            "step",
            "first_read",
            "resumed_step",
            "early_head",
            "early_softmax",
            "early_state",
            "fork",
            "after_gap",
            "tree",
            "kv_rows",
        }
        assert there <= {*found.parts}
        assert found.rows("layer").height == 4
        assert found.rows("fork")["processes"].to_list() == [1, 3]


@pytest.mark.parametrize(("given", "said"), [
    ({"widths": ()}, "widths must have at least one number, got none"),
    ({"contexts": (-1,)}, "contexts must be between 0 and 1000000, got -1"),
    ({"rounds": 0}, "rounds must be between 1 and 1000, got 0"),
    ({"repeats": 0}, "repeats must be between 1 and 1000, got 0"),
    ({"busy": (1, 1)}, "busy must be different numbers"),
])  # fmt: skip
def test_wrong_grid_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Passes(**{"widths": (1,), "contexts": (0,), **given})


@pytest.mark.parametrize("kind", ["processes", "streams"])
def test_decodings_over_units_are_timed_between_runs(
    kind: str, decoders: dict[str, Any], timed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per repeat, with the processes of the runs, or their streams."""
    units, asked = object(), list[Any]()

    def text(given: Any, seed: int) -> Any:
        asked.append((given, seed))
        return {
            1: {
                name: [1e-6 * (1 + seed)]
                for name in (*process_times.OVERHEADS, *process_times.MAIN_PASSES, process_times.SUBPROCESS_PASS)
            }
        }

    monkeypatch.setattr(process_times, f"over_{kind}", text)
    given: Any = {"lanes": units} if kind == "streams" else {"processes": True}
    at: list[int] = []
    for turns in ((0, 1), (1, 2)):  # the second measurement session resumes the first
        session: Any = MeasurementSession(decoders, NAMES, PASSES, tmp_path, device="cpu", dtype="float32", **given)
        monkeypatch.setattr(profile_from_timings, "write", lambda *_: ({}, {}))
        for turn in turns:
            session.begin(turn)
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                session.between(share, units if kind == "processes" else None)
                at.append(len(asked))
            session.end()
    assert [seed for _, seed in asked] != sorted(seed for _, seed in asked)  # in random order
    assert sorted(seed for _, seed in asked) == [*range(3 * process_times.DECODINGS)]
    assert {given for given, _ in asked} == {units}
    assert at[0] == 0 < at[1] < at[2] < at[3] < at[4] == process_times.DECODINGS  # spread over the runs
    kept = {row["round"]: row for row in session.timed_models["target"].rows.rows if row["kind"] == "processes"}
    assert [*kept] == [0, 1, 2]
    assert kept[0]["wake_us"]["1"][1] == pytest.approx((1 + process_times.DECODINGS) / 2)  # the mean over its decodings


def test_negative_differences_count_as_zero() -> None:
    """A profile with a negative time is refused, which must not end a measurement session."""
    times = {"next": [1.0, 2.0, 3.0]}
    row = {
        "busy": 0, "repeats": 2, "reads_us": times, "resumed_step_us": [-5.0, -1.0, 2.0], "beams_us": {},
        "kv_rows_us": {"1": times["next"]},
        "tree_us": {"1 8": [-3.0, -2.0, 1.0]}, "fork_us": {"1": [0.0, 1.0, 2.0]},
    }  # fmt: skip
    table = read_times.part_rows([row], {0: 1e-3}, 5)
    assert {each["part"] for each in table} == {"next", "resumed_step", "kv_rows", "tree", "fork"}
    assert all(0 <= each["low_s"] <= each["time_s"] <= each["high_s"] for each in table)
    leading = {"kind": "processes", "repeats": 2, "exit_layer": 3, **{f"{part}_us": {} for part in process_times.OVERHEADS}}
    leading |= {f"{part}_us": {"1": [0.5, 1.0, 2.0]} for part in process_times.MAIN_PASSES}
    found = process_times.process_rows([leading], {"main_alone": 1e-3, "main_concurrent": 1e-3}, 5)
    assert all(0 < each["low_s"] <= each["time_s"] <= each["high_s"] for each in found)


def test_rounds_give_medians_and_sums_of_repeats() -> None:
    rounds = [
        {"width": 1, "whole_us": [1.0, whole, 9.0], "layers_us": [[1, each, 3]], "repeats": 4, "taken_anyway": taken}
        for whole, each, taken in ((5.0, 2, 0), (7.0, 1, 1), (6.0, 9, 0))
    ]
    found = profile_from_timings.median_of(rounds)
    assert (found["whole_us"], found["layers_us"]) == ([1.0, 6.0, 9.0], [[1, 2, 3]])
    assert (found["repeats"], found["taken_anyway"], found["width"]) == (12, 1, 1)


def test_parts_without_memory_are_left_out(
    decoders: dict[str, Any], timed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = interleaved_profiles.measure

    def failing(said: str) -> Any:
        def point(model: Any, what: Any, *given: Any) -> dict[str, Any]:
            if what.width == 3 and what.context == 8:
                raise RuntimeError(said)
            return whole(model, what, *given)

        return point

    monkeypatch.setattr(interleaved_profiles, "measure", failing("DefaultCPUAllocator: can't allocate memory"))
    session = opened(decoders, tmp_path)
    session.begin(0)
    session.between(1.0)
    failed = [row for row in session.timed_models["target"].rows.rows if row["kind"] == "failed"]
    assert [(row["width"], row["context"], row["round"]) for row in failed] == [(3, 8, row["round"]) for row in failed]
    assert {row["round"] for row in failed} == {0, 1}
    assert len(session.timed_models["target"].rows.done()) == 2 * 3
    monkeypatch.setattr(interleaved_profiles, "measure", failing("a defect of ours"))
    other = opened(decoders, tmp_path / "other")
    other.begin(0)
    with pytest.raises(RuntimeError, match="a defect of ours"):
        other.between(1.0)


def test_only_drafts_of_a_batch_are_at_unequal_positions(decoders: dict[str, Any], tmp_path: Path) -> None:
    """A pass of the target over one token per sequence belongs to a method with equal positions."""
    timed = opened(decoders, tmp_path).timed_models
    assert {role: each.built.unequal for role, each in timed.items()} == {"target": False, "draft": True}


def test_batched_passes_have_one_token_per_sequence() -> None:
    passes = Passes(widths=(1, 3), contexts=(0,), batches=(1, 4))
    assert [(each.width, each.batch) for each in passes.points] == [(1, 1), (3, 1), (1, 4)]
    wider = Passes(widths=(1, 3, 5), contexts=(0,), batches=(1, 4), batched_widths=(1, 3))
    assert [(each.width, each.batch) for each in wider.points if each.batch > 1] == [(1, 4), (3, 4)]
    for given in ({"widths": (2, 3), "batches": (1, 4)}, {"widths": (1,), "batches": (2, 4)}):
        with pytest.raises(ParameterError, match="widths and batches must include 1"):
            Passes(contexts=(0,), **given)


def test_refused_profile_keeps_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the runs may no longer be available."""
    monkeypatch.setattr(profile_from_timings, "time_besides_passes", lambda *_: None)
    monkeypatch.setattr(
        profile_from_timings,
        "write",
        lambda begun, *_: ({}, {interleaved_profiles.MODE: f"{begun.built.architecture.name} is too fast"}),
    )
    written = run_plan.from_tables({
        "run": {"model": "family", "tokens": 2, "repeats": 1, "prompts": 1}, "method": [{"name": "autoregressive"}],
        "profile": {"widths": [1], "contexts": [0], "rounds": 1, "repeats": 1},
    })  # fmt: skip
    with pytest.raises(ParameterError, match=r"runs\.json is written, but .* no profile of the target: family-target is too fast"):
        run_command.measure_plan(written, tmp_path / "runs.json", "cpu")
    assert measured_runs.load(tmp_path / "runs.json").table.height == 1
    assert (tmp_path / "cpu-family-target.jsonl").is_file()


# --- requests and results ---


class Begun:
    """Stands in for a model that is being timed."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.added: list[Any] = []
        self.rows = SimpleNamespace(rows=[], add=self.added.append, done=lambda: self.added)
        self.built = SimpleNamespace(unequal=None, device="cpu", decoder=SimpleNamespace(layers=6))
        self.spec = f"spec of the {role}"
        self.between = 0
        self.ceilings = SimpleNamespace(measure_if_due=self.tried)

    def tried(self) -> None:
        self.between += 1


@pytest.fixture
def open_(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def model(*given: Any, **more: Any) -> Begun:
        asked.append((given, more))
        return Begun(given[0])

    monkeypatch.setattr(profile_from_timings, "open_model", model)
    return asked


BUSY = Passes(widths=(1, 3), contexts=(0, 8), batches=(1, 2), busy=(0, 1, 2), rounds=2, repeats=5, batched_widths=(1, 3))


def test_target_is_timed_with_busy_neighbours_too(open_: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the runs of each repeat, with one token of one sequence; an error there ends the session."""
    went: list[Any] = []

    def time_grid(*given: Any, **more: Any) -> Any:
        went.append((given, more))
        return SimpleNamespace(failed=failed)

    failed: list[Any] = []
    monkeypatch.setattr(interleaved_profiles, "time_grid", time_grid)
    one: Any = {"target": "a decoder", "draft": "another"}
    session = MeasurementSession(one, {"target": "big", "draft": "small"}, BUSY, tmp_path, device="dev", dtype="kind", seed=3)
    alone, others = BUSY.grids
    assert alone == TimingGrid((1, 3), (0, 8), (1, 2), (0,), ("interpreter",), 1)
    assert others == TimingGrid((1,), (0, 8), (1,), (1, 2), ("interpreter",), 1)
    how = {"device": "dev", "dtype": "kind", "quick": True, "resume": True}
    assert open_ == [
        (("big", others, tmp_path), how | {"decoder": "a decoder"}), (("small", alone, tmp_path), how | {"decoder": "another"}),
    ]  # fmt: skip
    assert {role: timed.built.unequal for role, timed in session.timed_models.items()} == {"target": False, "draft": True}
    effort = Effort(target=0.0, least=5, most=5, warmups=3)
    assert session.effort == effort
    session.begin(1)
    target: Any = session.timed_models["target"]
    [((built, grid_, rows, spec), more)] = went
    assert (built, rows, spec) == (target.built, target.rows, "spec of the big")
    assert grid_ == TimingGrid((1,), (0, 8), (1,), (1, 2), ("interpreter",), 2)
    assert more == {"effort": effort, "minutes": 8.0}  # a minute for each of two contexts, two numbers of neighbours and two rounds
    assert len(session.pieces) == 2 * 2 * (2 * 2 * 2 + 2)
    assert {piece.round for piece in session.pieces} == {2, 3}
    assert (session.pieces_done, session.turn, session.decoding_times) == (0, 1, [])
    failed.append((Point("interpreter", 1, 8, 1, 2), "no room"))
    with pytest.raises(ParameterError, match="interpreter width 1 context 8 batch 1 busy 2 of the target could not be timed: no r"):
        session.begin(2)


def test_point_is_timed_and_saved_at_once(open_: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For at most a minute; errors of the device release its memory, and other errors end the run."""
    asked, happens = list[Any](), list[Any]()

    def measure(*given: Any) -> Any:
        asked.append(given)
        if happens:
            raise happens[0]
        return given[1]

    monkeypatch.setattr(interleaved_profiles, "measure", measure)
    monkeypatch.setattr(interleaved_profiles, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(interleaved_profiles, "release", happens.append)
    one: Any = {"target": None}
    session = MeasurementSession(one, {"target": "big"}, PASSES, tmp_path, device="cpu", dtype="float32")
    target: Any = session.timed_models["target"]
    point = Point("interpreter", 3, 8, 1, 0, 1)
    for _ in range(2):  # once
        session._time(interleaved_profiles.RoundPart("target", 1, point), None)
        assert asked == [(target.built, point, session.effort, 160.0)]
        assert (target.added, target.between) == ([point], 1)
    happens.append(MemoryError("9 GB"))
    assert session._point(target, point) == {"kind": "failed", **vars(point), "error": "out of memory: 9 GB"}
    assert happens.pop() == "cpu"
    for error in (RuntimeError("CUDA error: gone"), RuntimeError("of ours"), KeyError("of ours")):
        happens[:] = [error]
        with pytest.raises(type(error)):
            session._point(target, point)


def test_profiles_are_written_at_the_end_with_warnings(
    open_: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[Any] = []

    def write(begun: Any, modes: Any, folder: Path) -> Any:
        wrote.append((begun.role, modes, folder))
        return ({"a": "one", "b": "two"}, {}) if begun.role == "big" else ({}, {"a": "too fast", "b": "too slow"})

    facts: dict[str, dict[str, Any]] = {"one": {"warnings": ["odd", "odder"]}, "two": {}}
    monkeypatch.setattr(profile_from_timings, "write", write)
    monkeypatch.setattr(interleaved_profiles, "load", lambda path: SimpleNamespace(facts=facts[path]))
    monkeypatch.setattr(process_times, "raw_row", lambda decodings, depth: {"decodings": decodings, "layers": depth})
    both: Any = {"target": None, "draft": None}
    session = MeasurementSession(both, {"target": "big", "draft": "small"}, PASSES, tmp_path, device="cpu", dtype="float32")
    assert (session.refused, session.warnings) == ({}, {})
    session.end()
    target: Any = session.timed_models["target"]
    assert target.added == []
    session.turn, session.decoding_times = 4, ["a text"]  # type: ignore[list-item]
    for _ in range(2):
        session.end()
        assert session.refused == {"draft": "too fast; too slow"}
        assert session.warnings == {"target": ["odd", "odder"], "draft": []}
    assert wrote == [("big", ("interpreter",), tmp_path), ("small", ("interpreter",), tmp_path)] * 3
    assert target.added == [{"kind": "processes", "round": 4, "decodings": ["a text"], "layers": 6}] * 2


def test_buffers_fit_all_timed_passes() -> None:
    assert Passes((1, 3), (0, 200)).room == 204
    assert Passes((1, 33), (200,)).room == 202  # wider passes are not replayed
    assert Passes((1,), (0,)).room == read_times.ROOM == 80
    assert Passes((1, 32), (200,)).room == 233
    assert Passes((1,), (0,), busy=(0,)).grids == (TimingGrid((1,), (0,), modes=("interpreter",)),)
    for given, said in (
        ({"batched_widths": (1, 2)}, r"batched_widths must be some of widths=\[1, 3\], got \[1, 2\]"),
        (
            {"batched_widths": (3,)},
            r"batched_widths must be left out without batches, got \[3\]; or give batches",
        ),
        ({"batched_widths": (3,), "batches": (1, 2)}, r"batched_widths must include 1, the width of drafting, got \[3\]"),
    ):
        with pytest.raises(ParameterError, match=said):
            Passes(widths=(1, 3), contexts=(0,), **given)  # type: ignore[arg-type]
