"""`calibrate layers`: profiles from timings, resumed and failed measurements, and one-line errors."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch

from calibrate.devices import machine
from calibrate.loading.architectures import architecture
from calibrate.timing import profile_from_timings, single_pass, timing_grid
from calibrate.timing.busy_neighbours import Spec
from calibrate.timing.library_pass import LibraryModel
from calibrate.timing.single_pass import Effort, Point
from calibrate.timing.timing_grid import TimingGrid
from model.base.checks import ParameterError
from model.hardware import physical_limits, profile_files
from sim.scenarios.hardware_cost import HardwareCost
from tests.support import real_models
from tests.support.commands import call
from tests.support.fake_clocks import FakeTime, Machine, PassClock
from tests.support.tiny_configurations import TINY

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")
ROOT = Path(__file__).resolve().parents[2]


def test_model_larger_than_the_memory_leaves_no_rows(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"))
    with monkeypatch.context() as small:
        small.setattr(machine, "memory", lambda device: 1000)
        for _ in range(2):
            assert "take a smaller model" in call(*arguments, code=2).stderr
            assert [*(tmp_path / "out").iterdir()] == []
    call(*arguments)


# --- the command ---


QUICK = ("--device", "cpu", "--threads", "1", "--quick", "--widths", "1,2", "--contexts", "4,8")


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_profile_is_written_with_its_facts(kind: str, config: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = call("layers", "--model", config(kind), *QUICK, "-o", str(out)).stdout
    found = profile_files.load(out / f"cpu-tiny-{kind}.json")
    assert found.parts == ("layer", "head", "embedding", "step")
    assert found.provenance == "measured"
    assert found.shape["layers"] == 3
    assert found.rows("layer").select("width", "context").rows() == [(1, 4), (2, 4), (1, 8), (2, 8)]
    assert found.facts["threads"] == 1
    assert found.facts["peaks"] == "measured"
    assert found.facts["torch"] == torch.__version__
    [source] = found.sources
    assert source.file == f"cpu-tiny-{kind}.jsonl"
    assert "layer at width 2, context 8, batch 1" in said
    assert "GB/s" in said
    assert str(out / source.file) in said


def test_json_output_equals_the_profile(config: Callable[..., str], tmp_path: Path) -> None:
    document = json.loads(call("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"), "--json").stdout)
    assert document["points"] == 4
    assert document["failed"] == []
    assert set(document["profiles"]) == {"eager"}


def test_interrupted_run_resumes(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = single_pass.measure
    timed: list[Point] = []

    def measure(model: LibraryModel, point: Point, *more: Any) -> dict[str, Any]:
        if len(timed) == 2:
            raise KeyboardInterrupt
        timed.append(point)
        return whole(model, point, *more)

    monkeypatch.setattr(timing_grid, "measure", measure)
    arguments = ("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"))
    assert "same command and --resume" in call(*arguments, code=130).stderr
    rows = tmp_path / "out" / "cpu-tiny-llama.jsonl"
    before = rows.read_text()
    assert before.count("\n") == 3
    with rows.open("a") as file:  # killed in the middle of a line
        file.write('{"kind": "point", "mode": "ea')
    assert "is there already; --resume continues it" in call(*arguments, code=2).stderr
    timed.clear()
    call(*arguments, "--resume")
    assert [(point.width, point.context) for point in timed] == [(1, 8), (2, 8)]
    assert rows.read_text().startswith(before)
    assert profile_files.load(rows.with_suffix(".json")).rows("layer").height == 4


def test_rows_of_another_machine_are_not_resumed(config: Callable[..., str], tmp_path: Path) -> None:
    arguments = ("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"))
    call(*arguments)
    done = call(*arguments, "--resume", "--dtype", "bfloat16", code=2)
    assert "was timed with dtype float32, and this is bfloat16" in done.stderr


def failing(monkeypatch: pytest.MonkeyPatch, width: int, error: Exception) -> None:
    """Let passes of a width fail at their beginning."""
    begin = single_pass.prepare

    def fails(model: LibraryModel, asked: int, *more: Any) -> Any:
        if asked == width:
            raise error
        return begin(model, asked, *more)

    monkeypatch.setattr(single_pass, "prepare", fails)


def test_point_without_memory_fails_alone(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ("layers", "--model", config(), *QUICK, "-o", str(out))
    with monkeypatch.context() as patched:
        failing(patched, 2, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
        done = call(*arguments, code=1)
    assert "failed: eager width 2 context 8 batch 1: out of memory: CUDA out of memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert profile_files.load(out / "cpu-tiny-llama.json").rows("layer")["width"].to_list() == [1, 1]
    call(*arguments, "--resume")  # failed points are tried again
    assert profile_files.load(out / "cpu-tiny-llama.json").rows("layer").height == 4


def test_lost_device_ends_the_run_and_keeps_the_rows(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 2, RuntimeError("CUDA error: device-side assert triggered\nmore"))
    done = call("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"), code=1)
    assert done.stderr.count("failed:") == 3  # the second of four points
    assert done.stderr.count("not reached, because the device was lost") == 2
    assert profile_files.load(tmp_path / "out" / "cpu-tiny-llama.json").rows("layer").height == 1


def test_points_after_the_last_minute_are_reported(config: Callable[..., str], tmp_path: Path) -> None:
    done = call("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"), "--minutes", "0", code=1)
    assert done.stderr.count("not reached within the minutes; --resume with more --minutes") == 4
    assert not (tmp_path / "out" / "cpu-tiny-llama.json").exists()


def test_negative_times_write_no_profile(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: PassClock(layer=1e-3))
    called_h100(monkeypatch)
    model, out = config(intermediate_size=4096), str(tmp_path / "out")
    done = call("layers", "--model", model, *QUICK, "--dtype", "bfloat16", "--widths", "1,16", "-o", out, code=1)
    assert "no profile of mode eager was written: layer at width" in done.stderr
    assert re.search(r"would be [\d.e+]+ FLOP/s, and h100 reaches [\d.e+]+ at most \(arithmetic\); check the clock", done.stderr)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "cpu-tiny-llama.json").exists()
    assert (tmp_path / "out" / "cpu-tiny-llama.jsonl").exists()


def called_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this CPU the name of a device with published peaks."""
    whole = machine.facts
    monkeypatch.setattr(machine, "facts", lambda name: whole(name) | {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85e9})


HALF = (*QUICK, "--dtype", "float16")


def test_slow_layout_of_operands_is_no_ceiling(
    config: Callable[..., str], fake_time: FakeTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If row-major products take 20 times as long as those of layers, the layers are not too fast for their device."""
    with Machine(fake_time, rate=2.2e10, slow=1.1e9, bandwidth=1e15):
        done = call("layers", "--model", config(), *HALF, "-o", str(tmp_path / "out"))
    assert done.stderr == ""
    found = profile_files.load(tmp_path / "out" / "cpu-tiny-llama.json")
    assert found.rate == pytest.approx(2.2e10, rel=0.05)  # plus the clock readings
    assert found.facts["peaks"] == "measured"
    assert "warnings" not in found.facts
    implied = physical_limits.implied_rates(found, profile_from_timings.shape_of(found))
    layer = next(each for each in implied if each.part == "layer")
    assert (layer.rate() > 2 * 1.1e9).all()  # faster than the slow layout, which is no ceiling


def test_small_products_may_set_the_ceiling(fake_time: FakeTime) -> None:
    """Products in a cache are faster here than all larger ones: the fastest of them, in any layout, is the ceiling."""
    with Machine(fake_time, rate=1e9, slow=1e8, inner=machine.SMALL_SIDE, best=1e10, bandwidth=1e15):
        found = machine.Ceilings("cpu", "float16", quick=True)
    assert found.best["flop_per_s"] == pytest.approx(1e10, rel=0.05)


@pytest.mark.parametrize(("device", "warmups"), [("cpu", 5), ("cuda:0", 20)])
def test_gpu_gets_more_warm_up_passes(device: str, warmups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock rises with its load, so more untimed passes precede the timed ones by default."""
    seen: list[Effort] = []
    begun = SimpleNamespace(
        spec=SimpleNamespace(device=device), built=None, rows=SimpleNamespace(header={}, rows=[]),
        ceilings=SimpleNamespace(measure_if_due=None),
    )  # fmt: skip
    monkeypatch.setattr(profile_from_timings, "open_model", lambda *_, **__: begun)
    monkeypatch.setattr(profile_from_timings, "time_grid", lambda *_, effort, **__: seen.append(effort))
    monkeypatch.setattr(profile_from_timings, "write", lambda *_: ({}, {}))
    monkeypatch.setattr(profile_from_timings, "ceilings_of", lambda *_: {})
    for asked in (None, Effort(warmups=3)):
        profile_from_timings.time_layers("any", TimingGrid((1,), (4,)), tmp_path, effort=asked)
    assert [each.warmups for each in seen] == [warmups, 3]


def test_profiles_are_named_by_device_model_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {"cuda:1": "NVIDIA H100 80GB HBM3"}.get(device, "a card"))
    monkeypatch.setattr(machine, "memory", lambda device: 85e9)
    assert profile_from_timings.stem_of("llama-68m", "cpu") == "cpu-llama-68m"
    assert profile_from_timings.stem_of("llama-68m", "cuda:1") == "h100-llama-68m"
    assert profile_from_timings.stem_of("llama-68m", "cuda:1", "cuda-graph") == "h100-llama-68m-graph"
    assert profile_from_timings.stem_of("llama-68m", "cuda:0") == "cuda-llama-68m"
    modes = {"eager": "mine", "cuda-graph": "mine-graph", "interpreter": "mine-interpreter"}
    assert {mode: profile_from_timings.profile_name("mine", mode) for mode in modes} == modes


def test_interpreter_rounds_time_the_work_besides_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per round of the grid, for all modes, unless that round is timed already; not for other modes."""
    from calibrate.timing import read_times

    added, read = list[Any](), list[Any]()
    rows = SimpleNamespace(header={}, rows=[{"kind": "reads", "round": 1}, {"kind": "point", "round": 0}], add=added.append)
    built = SimpleNamespace(decoder="a decoder", read_source=lambda: read.append(1))
    begun: Any = SimpleNamespace(
        spec=SimpleNamespace(device="cpu"), built=built, rows=rows, ceilings=SimpleNamespace(measure_if_due="between"),
    )  # fmt: skip
    asked = list[Any]()
    monkeypatch.setattr(profile_from_timings, "open_model", lambda *args, **more: asked.append((args, more)) or begun)
    monkeypatch.setattr(profile_from_timings, "time_grid", lambda *args, **more: asked.append((args, more)) or "outcome")
    monkeypatch.setattr(profile_from_timings, "write", lambda *args: ({"eager": Path("a.json")}, {"interpreter": "why"}))
    monkeypatch.setattr(profile_from_timings, "ceilings_of", lambda *_: {"flop_per_s": 1.0})
    monkeypatch.setattr(read_times, "time_reads", lambda decoder: {"reads_of": decoder})
    monkeypatch.setattr(read_times, "time_after_pauses", lambda decoder: {"after_of": decoder})
    wanted = TimingGrid((1,), (4,), modes=("eager", "interpreter"), rounds=2)
    found = profile_from_timings.time_layers("any", wanted, tmp_path)
    assert added == [
        {"kind": "reads", "round": 0, "busy": 0, "reads_of": "a decoder"}, {"kind": "after", "round": 0, "after_of": "a decoder"},
        {"kind": "after", "round": 1, "after_of": "a decoder"},
    ]  # fmt: skip
    assert len(read) == 2
    assert (found.profiles, found.refused, found.outcome) == ({"eager": Path("a.json")}, {"interpreter": "why"}, "outcome")
    more = {"device": None, "dtype": None, "source": 512, "quick": False, "resume": False, "name": None}
    assert asked[0] == (("any", wanted, tmp_path), more)
    assert asked[1] == (
        (built, wanted, rows, begun.spec), {"effort": Effort(warmups=5), "minutes": 8.0, "progress": None, "between": "between"},
    )  # fmt: skip
    added.clear()
    profile_from_timings.time_layers("any", TimingGrid((1,), (4,), rounds=2), tmp_path)
    assert added == []
    for wrong, said in (({"minutes": -1.0}, "minutes must be"), ({"threads": 0}, "threads must be between 1 and 4096, got 0"),
                        ({"threads": 4097}, "threads must be between 1 and 4096, got 4097")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            profile_from_timings.time_layers("any", wanted, tmp_path, **wrong)


def test_incomplete_rows_refuse_only_their_mode(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two modes lacks a time: the other is written. A mode that was not timed is neither written nor refused."""
    of = profile_from_timings.profile_of

    def made(header: Any, rows: Any, mode: str, *more: Any) -> Any:
        if mode == "cuda-graph":
            raise KeyError("whole_us")
        return of(header, rows, mode, *more)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(profile_from_timings, "write", lambda begun, modes, out: asked.append(begun) or ({}, {}))
        asked = list[Any]()
        profile_from_timings.time_layers(
            config(), TimingGrid((1,), (4,)), out, device="cpu", quick=True, effort=Effort(least=3, most=3, warmups=2)
        )
    [begun] = asked
    [point] = [row for row in begun.rows.rows if row["kind"] == "point"]
    begun.rows.rows.append(point | {"mode": "cuda-graph"})
    monkeypatch.setattr(profile_from_timings, "profile_of", made)
    written, refused = profile_from_timings.write(begun, ("eager", "cuda-graph", "interpreter"), out)
    assert written == {"eager": out / "cpu-tiny-llama.json"}
    assert refused == {
        "cuda-graph": "its raw rows in cpu-tiny-llama.jsonl make no profile (KeyError('whole_us')); start again with "
        "another -o"
    }
    assert begun.rows.rows[-1]["kind"] == "ceilings"
    found = profile_files.load(written["eager"])
    assert found.notes[0] == (
        "weights are random; a layer's time is the median over layers of the medians of repeats, with their quartiles"
    )
    assert (found.mode, found.kind, found.engine) == ("eager", "model", f"transformers {begun.rows.header['transformers']}")
    assert found.date == begun.rows.header["date"]
    [source] = found.sources
    assert (source.repository, source.licence, source.file) == ("decodesim", "MIT", "cpu-tiny-llama.jsonl")
    assert source.parts == ("layer", "head", "embedding", "step")


def test_rates_of_layers_are_printed_next_to_the_peaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All lines of a made-up result: a bundled profile, its rates from times and bytes, and the paths of the files."""
    from calibrate.commands import layers_command

    found = profile_files.load("cpu-llama-68m")
    path = profile_files.save(found, tmp_path)
    header = {"model": "llama-68m", "dtype": "float32", "name": "a machine", "torch": "9.9", "transformers": "8.8"}
    ceilings = {"read_bytes_per_s": 12.34e9, "copy_bytes_per_s": 5.67e9, "flop_per_s": 0.1234e12}
    outcome = SimpleNamespace(header=header, path=tmp_path / "raw.jsonl", rows=[{"kind": "point"}, {"kind": "ceilings"}], failed=[])
    result: Any = SimpleNamespace(outcome=outcome, profiles={"eager": path}, refused={}, ceilings=ceilings)
    first, second, blank, third, names, *lines = [*layers_command._lines(result)]
    assert first == "llama-68m in float32 on a machine, torch 9.9, transformers 8.8"
    assert second == "measured ceilings: 12.3 GB/s read, 5.7 GB/s copied, 0.123 TFLOP/s"
    assert blank == ""
    shape = profile_from_timings.shape_of(found)
    peaks = f"peaks (measured): {found.bandwidth / 1e9:.0f} GB/s, {found.rate / 1e12:.2f} TFLOP/s"
    assert third == f"eager, {peaks}; limits: {physical_limits.limit(found, shape)}"
    assert names.split() == ["measured", "time", "GB/s", "of", "peak", "TFLOP/s", "of", "peak"]
    reached = [(each, row) for each in physical_limits.implied_rates(found, shape) for row in range(each.seconds.size)]
    for line, (each, row) in zip(lines, reached, strict=False):
        place, seconds = each.row_name(row), each.seconds[row]
        assert line.startswith(f"{place:44}{seconds * 1e6:9.1f} us")
        speed, rate = float(each.bandwidth()[row]), float(each.rate()[row])
        expected = [f"{speed / 1e9:.1f}", f"{speed / found.bandwidth:.0%}", f"{rate / 1e12:.3f}", f"{rate / found.rate:.0%}"]
        assert line[len(place.ljust(44)) + 12 :].split() == expected
    others = lines[len(reached) : -len(found.notes) - 2]
    expected = []
    for part, axis in (("embedding", "tokens"), ("step", "batch")):
        for busy in (0, 1):
            for row in found.rows(part, busy=busy).to_dicts():
                name = f"{part} at {axis} {row[axis]}" + (", busy 1" if busy else "")
                expected.append(f"{name:44}{row['time_s'] * 1e6:9.1f} us")
    assert others == expected
    assert lines[-len(found.notes) - 2 :] == [*(f"note: {each}" for each in found.notes), str(path), str(tmp_path / "raw.jsonl")]
    monkeypatch.setattr(profile_from_timings, "time_layers", lambda *_, **__: result)
    asked = ("layers", "--model", "llama-68m", "-o", str(tmp_path))
    document = json.loads(call(*asked, "--json").stdout)
    assert document == {
        "profiles": {"eager": str(path)}, "rows": str(tmp_path / "raw.jsonl"), "machine": header, "points": 1, "failed": [],
        "refused": {}, "ceilings": ceilings, "warnings": {"eager": []},
    }  # fmt: skip
    result.outcome.failed, result.refused = [("width 3", "no room")], {"interpreter": "too fast"}
    done = call(*asked, code=1)
    assert done.stderr == "failed: width 3: no room\nerror: no profile of mode interpreter was written: too fast\n"
    assert json.loads(call(*asked, "--json", code=1).stdout)["failed"] == [{"point": "width 3", "error": "no room"}]
    result.outcome.failed, result.refused, result.profiles = [], {}, {}
    assert call(*asked, code=1).stderr == ""


def test_errors_of_the_library_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from calibrate.loading import architectures

    path = tmp_path / "mine" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(real_models.config("llama", 3).to_dict()))
    assert architectures.architecture(str(path)).name == architectures.architecture(str(path.parent)).name == "mine"
    other = path.rename(path.with_name("tiny.json"))
    assert architectures.architecture(str(other)).name == "tiny"

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"one\n  two {'x' * 300}")

    monkeypatch.setattr(architectures.transformer, "from_config", refused)
    with pytest.raises(ParameterError) as caught:
        architectures.architecture(str(other))
    assert str(caught.value) == f"tiny.json: transformers does not accept it: one two {'x' * 292}"


def test_grid_beyond_learned_positions_is_refused_first(tmp_path: Path) -> None:
    grid_ = ("--widths", "1,5", "--contexts", "8,2046")
    asked = ("layers", "--model", "opt-125m", "--device", "cpu", *grid_, "-o", str(tmp_path / "out"))
    said = call(*asked, code=2).stderr
    assert said == "error: opt-125m has learned 2048 positions, and width + context must be at most that, got 5 + 2046\n"
    assert not (tmp_path / "out").exists()


def test_closed_pipe_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from calibrate.commands.common_options import guarded

    def ends(error: Exception) -> tuple[int, str]:
        said = io.StringIO()
        monkeypatch.setattr("sys.stderr", said)

        @guarded
        def command() -> None:
            raise error

        with pytest.raises(SystemExit) as left:
            command()
        return left.value.code, "closed" if said.closed else said.getvalue()

    assert ends(BrokenPipeError()) == (0, "closed")
    assert ends(OSError(28, "No room", "a.json")) == (2, "error: No room (a.json)\n")
    assert ends(OSError("some trouble")) == (2, "error: some trouble\n")
    lacks = "error: this command works with real models and needs torch, which"
    assert ends(ModuleNotFoundError(name="torch.nn")) == (2, f"{lacks} is not installed: pip install 'decodesim[torch]'\n")
    for words, first in (("bad library\nmore", "bad library"), ("", "it cannot be imported")):
        assert ends(ImportError(words, name="torch")) == (2, f"{lacks} cannot be used: {first}; pip install 'decodesim[torch]'\n")
    for name in ("other", None):

        @guarded
        def command(name: str | None = name) -> None:
            raise ImportError("no", name=name)

        with pytest.raises(ImportError):
            command()


def test_times_above_a_measured_ceiling_are_kept_with_a_warning(
    config: Callable[..., str], fake_time: FakeTime, tmp_path: Path
) -> None:
    """Layers may use a kernel that no try used: their times are kept, and a warning is given."""
    out = tmp_path / "out"
    with Machine(fake_time, rate=1e9, inner=32, best=1e11, bandwidth=1e15):  # the width of the model, which no product has
        done = call("layers", "--model", config(), *QUICK, "-o", str(out))
    found = profile_files.load(out / "cpu-tiny-llama.json")
    [layer, _] = found.facts["warnings"]
    assert re.match(r"layer at width 2, .* would be .* FLOP/s, and cpu was measured to reach 1e\+09 \(arithmetic\): ", layer)
    assert done.stderr.splitlines() == [f"warning: mode eager: {line}" for line in found.facts["warnings"]]
    with pytest.warns(UserWarning, match="was measured to reach") as said:
        assert HardwareCost("profile", profile=str(out / "cpu-tiny-llama.json")).of("target") is not None
    assert [str(each.message) for each in said] == [f"cpu-tiny-llama.json: {line}" for line in found.facts["warnings"]]
    # A hundred times faster is no kernel, but a wrong unit.
    table = found.table.with_columns(pl.col("time_s", "low_s", "high_s") / 100)
    profile_files.save(replace(found, name="wrong", table=table), out)
    with pytest.raises(ParameterError, match=r"wrong\.json: layer at width 2, .*: more than 100 times that is a mistake; check"):
        HardwareCost("profile", profile=str(out / "wrong.json"))


def test_ceiling_is_the_best_of_all_tries(
    config: Callable[..., str], fake_time: FakeTime, tmp_path: Path
) -> None:
    """A machine may be slow only for a while, so tries between the points count too."""
    device = Machine(fake_time, rate=1e9, bandwidth=1e12)
    timed = 0

    def quicker(done: int, *_: Any) -> None:
        nonlocal timed
        timed = done
        fake_time.spend(1e4)  # tries take a negligible share of the time
        device.rate = 1e10 if done == 2 else 1e9

    with device:
        found = profile_from_timings.time_layers(
            config(), TimingGrid((1, 2), (4, 8)), tmp_path / "out", device="cpu", quick=True, minutes=1e6,
            effort=Effort(least=3, most=3), progress=quicker,
        )  # fmt: skip
    assert timed == 4
    assert found.outcome.header["flop_per_s"] == pytest.approx(1e9, rel=0.05)
    assert found.ceilings["flop_per_s"] == pytest.approx(1e10, rel=0.05)
    assert profile_files.load(found.profiles["eager"]).rate == found.ceilings["flop_per_s"]


@pytest.mark.slow  # companions within this process have fast tests: tests.calibrate.test_busy_neighbours
def test_busy_neighbours_run_the_same_pass(config: Callable[..., str], tmp_path: Path) -> None:
    call("layers", "--model", config(), *QUICK, "--contexts", "4", "--busy", "0,1", "-o", str(tmp_path / "out"))
    _, rows = timing_grid.read(tmp_path / "out" / "cpu-tiny-llama.jsonl")
    points = [row for row in rows if row["kind"] == "point"]
    assert [(row["busy"], row["width"]) for row in points] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for row in points[2:]:
        assert len(row["companion_passes"]) == 1
        assert row["companion_passes"][0] >= 1
    found = profile_files.load(tmp_path / "out" / "cpu-tiny-llama.json")
    assert found.rows("layer", busy=1).height == found.rows("layer").height == 2


def test_companion_reports_that_it_cannot_build_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from calibrate.timing import busy_neighbours
    from calibrate.timing.busy_neighbours import Companions

    class Here:
        """A process that runs at once in this one."""

        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self.start = lambda: target(*args)

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Here)
    monkeypatch.setattr(busy_neighbours.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(busy_neighbours.signal, "signal", lambda *_: None)
    with pytest.raises(RuntimeError, match="a companion process failed: ParameterError: model must be a preset"):
        Companions(1, Spec(str(tmp_path / "gone.json"), "cpu", "float32", 7, 1))


# --- bad input ---


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--model", "llama-2-13c"), "unknown model 'llama-2-13c'; did you mean llama-2-13b?"),
        (("--model", "gone.json"), "there is no file gone.json"),
        (("--dtype", "float12"), "unknown dtype 'float12'; did you mean float"),
        (("--widths", "a,b"), "widths must be comma-separated whole numbers, such as 1,4,9, got 'a,b'"),
        (("--widths", "-1"), "widths must be between 1 and 1000000, got -1"),
        (("--widths", "0"), "widths must be between 1 and 1000000, got 0"),
        (("--widths", "1,1"), "widths must be different numbers, got [1, 1]"),
        (("--contexts", "-4"), "contexts must be between 0 and 1000000, got -4"),
        (("--batches", ""), "batches must be comma-separated whole numbers"),
        (("--busy", "-1"), "busy must be between 0 and 1000000, got -1"),
        (("--mode", "eagre"), "unknown mode 'eagre'; did you mean eager?"),
        (("--mode", "cuda-graph"), "mode cuda-graph needs a GPU, and the device is cpu"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--device", "cuda:x"), "device must be cpu, cuda or cuda:NUMBER"),
        (("--threads", "0"), "threads must be between 1 and 4096, got 0"),
        (("--rounds", "0"), "rounds must be between 1 and 1000, got 0"),
        (("--minutes", "-1"), "minutes must be at least 0, got -1.0"),
        (("--minutes", "nan"), "minutes must be finite and at least 0"),
        (("--source", "0"), "source must be between 1"),
        (("--name", "../x"), "name must be letters, digits, dots and dashes"),
        (("--target", "-1"), "target must be at least 0, got -1.0"),
        (("--target", "-1", "--quick"), "target must be at least 0, got -1.0"),
    ],
)
def test_wrong_options_are_one_line_errors(more: tuple[str, ...], said: str, config: Callable[..., str], tmp_path: Path) -> None:
    arguments = ["layers", "--model", config(), "--device", "cpu", "-o", str(tmp_path / "out"), *more]
    done = call(*arguments, code=2)
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_made_is_refused(config: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = call("layers", "--model", config(), *QUICK, "-o", str(tmp_path / "out"), code=2)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(config: Callable[..., str], tmp_path: Path) -> None:
    done = call("layers", "--model", config(), "--device", "cuda", "-o", str(tmp_path), code=2)
    assert "device must be one of 0 GPUs that torch sees, got cuda; take --device cpu" in done.stderr


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"model_type": "mamba"}', "unknown model_type 'mamba'"),
        ('{"vocab_size": 3}', "model_type"),
        ("{", "tiny.json cannot be read as JSON"),
        ("[1]", "model_type"),
        (json.dumps({key: value for key, value in TINY["llama"].items() if key != "hidden_size"}), "hidden_size is missing"),
        (json.dumps(TINY["llama"] | {"num_attention_heads": 5, "num_key_value_heads": 5}), "5"),
    ],
)
def test_wrong_config_is_refused(written: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(written)
    done = call("layers", "--model", str(path), *QUICK, "-o", str(tmp_path / "out"), code=2)
    assert said in done.stderr
    assert done.stderr.startswith("error: tiny.json")


def test_only_names_of_the_hub_access_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(*arguments: str) -> str:
        asked.append(arguments)
        raise OSError("no network\nmore")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    architecture("gpt2")
    with pytest.raises(ParameterError, match="unknown model"):
        architecture("nobody")
    assert asked == []
    with pytest.raises(ParameterError, match=r"owner/nothing could not be loaded from the hub: no network; give its config\.json"):
        architecture("owner/nothing")
    assert asked == [("owner/nothing", "config.json")]


@pytest.mark.parametrize(
    "probe",
    [
        "import calibrate",
        "import calibrate.commands.calibrate_app",
        "CliRunner().invoke(calibrate.commands.calibrate_app.app, ['--help'])",
    ],
)
def test_help_loads_nothing_heavy(probe: str) -> None:
    heavy = ("torch", "transformers", "polars", "numpy", "scipy", "matplotlib")
    code = f"import sys; from typer.testing import CliRunner; import calibrate.commands.calibrate_app; {probe}"
    code += f"; print(*{set(heavy)!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
