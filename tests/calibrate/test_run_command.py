"""`calibrate run`: its options, its calls and its output, for made-up runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from calibrate.commands import common_options, run_command
from calibrate.commands.calibrate_app import app
from calibrate.loading.replicas import Replica
from calibrate.measured_runs import interleaved_profiles, measure_runs, run_plan
from calibrate.measured_runs.interleaved_profiles import Passes
from calibrate.untested_on_gpu import cuda_graphs, gpu_ordering
from calibrate.untested_on_gpu import over_streams as streams_of
from calibrate.workers import model_processes as apart
from calibrate.workers import worker_pool as pool_of
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.logs.recorded_decoding import Decoding
from model.steps import Commit
from tests.support import real_models

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = {"layers": 5, "exit_layer": 3, "candidates": 2}


def timed(tokens: tuple[int, ...], first: int, disturbed: bool) -> Any:
    """A decoding with `first` tokens in its first commit; median 0.25 s, of which 0.2 s after that commit."""
    commits = (Commit("token", tokens[:first]), Commit("token", tokens[first:]))
    decoding = Decoding("ppd", SETTINGS, (1, 2), len(tokens), commits, Account(), seconds=1.0)
    return SimpleNamespace(
        decoding=decoding, repeats=7, disturbed=disturbed, noise=lambda: 0.0123,
        median=lambda prompt=False: 0.25 if prompt else 0.2,
    )  # fmt: skip


def made_up(mode: str = "eager", **about: Any) -> Any:
    return SimpleNamespace(
        timed={0: timed((3, 4, 5, 6, 7), 1, False), 2: timed((3, 4), 2, True)}, mode=mode, warnings=("too few",),
        about={"machine": {"name": "a chip"}, "device": "cpu", "dtype": "float16", **about},
        log=SimpleNamespace(names=("one", "none", "a prompt whose name is far too long")),
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the measurement; return the list of requests."""
    found: list[Any] = []

    def measured(*given: Any, **more: Any) -> Any:
        found.append((*given, more))
        more["warn"]("and odd")
        return made_up()

    monkeypatch.setattr(run_command, "measure_plan", measured)
    monkeypatch.setattr(common_options, "_bar", lambda *how: contextlib.nullcontext(how))
    return found


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments), "--device", "cpu", "--threads", "1"])


def test_medians_are_printed_as_a_table(asked: list[Any], tmp_path: Path) -> None:
    """0.2 s after the first commit: per token for four of five tokens, and for at least one token."""
    out = tmp_path / "some.json"
    done = invoke("ppd", "--set", "exit_layer=6", "--set", "candidates=2", "-o", out)
    assert done.exit_code == 0, done.output
    title, head, *lines, last = done.stdout.splitlines()
    assert title == "a chip, float16: medians of repeats (measured); noise: median relative deviation"
    assert head.split("  ")[0] == "method"
    assert [*filter(None, head.split("  "))][-1].strip() == "disturbed"
    cells = [[each.strip() for each in line.split("  ") if each.strip()] for line in lines]
    assert [each for each in cells if not {*each[0]} <= {"-"}] == [
        ["ppd", "exit_layer=3, candidates=2", "one", "5", "7", "250.0", "50.000", "1.2%"],
        ["ppd", "exit_layer=3, candidates=2", "a prompt whose name is f", "2", "7", "250.0", "200.000", "1.2%", "yes"],
    ]
    assert last == str(out)
    assert done.stderr.splitlines()[-2:] == ["warning: too few", "warning: and odd"]
    said = invoke("ppd", "--set", "exit_layer=6", "--set", "candidates=2", "-o", out, "--json", "-q")
    row = {"method": "ppd", "repeats": 7, "seconds": 0.25, "seconds_behind_first_commit": 0.2, "noise": 0.0123}
    row |= {"source": "measured"}
    assert json.loads(said.stdout) == {
        "runs": [row | {"settings": SETTINGS, "prompt": "one", "tokens": 5, "disturbed": False},
                 row | {"settings": SETTINGS, "prompt": "a prompt whose name is far too long", "tokens": 2, "disturbed": True}],
        "file": str(out), "warnings": ["too few", "and odd"], "about": made_up().about,
    }  # fmt: skip
    assert said.stderr == ""
    assert [each[-1]["report"] for each in asked] == [(False, "runs"), (True, "runs")]
    assert next(run_command._lines(made_up("cuda-graph", machine={}))).startswith("cpu, float16, cuda-graph: medians")


def test_options_go_into_the_plan(asked: list[Any], tmp_path: Path) -> None:
    """With a method on the command line, and replacing values of a plan."""
    out = tmp_path / "some.json"
    options = {"model": "m", "draft": "d", "medium": "e", "heads": "none", "tokens": 5, "repeats": 3, "seed": 4, "dtype": "float64",
               "mode": "cuda-graph", "prompt_tokens": 6}  # fmt: skip
    given = [each for name, value in options.items() for each in (f"--{name.replace('_', '-')}", value)]
    given += ["--prompts", "file.txt", "--limit", 2]
    method = ["ppd", "--set", "exit_layer=3", "--sweep", "candidates=1,2", "--unit-kind", "processes"]
    done = invoke(*method, "--forced", "match_rate=0.5", *given, "-o", out, "--gpus", "cuda:0, cuda:1", "--resume", "-q")
    assert done.exit_code == 0, done.output
    path = tmp_path / "plan.toml"
    path.write_text("[run]\ntokens = 9\nwarm_ups = 2\n[[method]]\nname = 'autoregressive'\n")
    assert invoke("--plan", path, *given, "-o", out, "-q").exit_code == 0
    assert invoke("autoregressive", "--forced", "none", "-o", out, "-q").exit_code == 0
    changed = options | {"file": "file.txt", "prompts": 2}
    (first, *where), (second, *_), (third, *_) = asked
    assert first.run == run_plan.RunSettings(**changed)
    assert [(each.method, each.settings, each.rates, each.unit_kind) for each in first.choices] == [
        ("ppd", {"exit_layer": 3, "candidates": count}, {"match_rate": 0.5}, "processes") for count in (1, 2)
    ]
    assert where[:2] == [out, "cpu"]
    assert (where[2]["gpus"], where[2]["resume"]) == (["cuda:0", "cuda:1"], True)
    assert second.run == run_plan.RunSettings(**changed, warm_ups=2)
    assert second.choices == [run_plan.MethodSetting("autoregressive", {})]
    assert (asked[1][-1]["gpus"], asked[1][-1]["resume"]) == ([], False)
    assert third.choices == [run_plan.MethodSetting("autoregressive", {}, {})]
    assert third.run == run_plan.RunSettings()
    for name, value in (("set", "a=1"), ("sweep", "a=1,2"), ("forced", "none"), ("unit-kind", "streams")):
        done = invoke("--plan", path, f"--{name}", value, "-o", out)
        assert (done.exit_code, done.stderr) == (2, f"error: --{name} is used only with METHOD; set it in [[method]] of the plan\n")


def test_an_interrupt_prints_how_to_resume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "measure_plan", interrupted)
    done = invoke("autoregressive", "-o", tmp_path / "some.json")
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr.endswith(
        "interrupted; timed repeats are kept next to some.json; resume with the same command and --resume\n"
    )  # fmt: skip


# --- arguments of the measurement ---


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the timing; return the list of its arguments."""
    found: list[Any] = []

    def measure(out: Path, plan: Any, models: Any, **more: Any) -> Any:
        found.append((out, plan, models, more))
        return "runs"

    monkeypatch.setattr(measure_runs, "measure", measure)
    return found


def plan(*methods: dict[str, Any], **run: Any) -> run_plan.WrittenPlan:
    settings = {"model": "llama-68m", "tokens": 6, "prompt_tokens": 4, "seed": 3, **run}
    return run_plan.from_tables({"run": settings, "method": [*methods]})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the models by a tiny one on the processor; a checksum marks trained weights."""
    decoder = real_models.decoders("llama")["target"]
    monkeypatch.setattr(run_command, "_models", lambda *_: ({"target": decoder}, {}))
    decoder.name = "tiny"
    return decoder


FORCED = {"name": "ppd", "exit_layer": 3, "candidates": 2, "forced": {"match_rate": 0.5}}


def test_the_measurement_gets_the_plan_and_its_models(handed: list[Any], tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    for forced, name in (({}, "forced 0"), ({"match_rate": 0.5}, "forced 0")):
        written = plan(FORCED | {"forced": forced or {"match_rate": 1.0}}, repeats=5, warm_ups=2)
        assert run_command.measure_plan(written, out, "cpu", resume=True, report=print) == "runs"  # type: ignore[comparison-overlap]
        at, made, models, more = handed.pop()
        assert at == out
        [each] = made.decodings
        rates = forced or {"match_rate": 1.0}
        assert each == measure_runs.PlannedDecoding("ppd", {"exit_layer": 3, "candidates": 2}, (0, 1, 2, 3), name, rates)
        assert (made.tokens, made.repeats, made.warm_ups, made.seed) == (6, 5, 2, 3)
        assert made.facts == {"prompts": "none: outcomes were forced after 4 positions", "profiles": {}}
        assert models == {"target": tiny}
        assert more == {"resume": True, "report": print, "session": None, "pool": None, "lanes": None}


def test_processes_are_started_with_replicas_of_the_target(
    handed: list[Any], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights by the seed of the plan, or the loaded model with the heads in its folder; on GPUs one process each."""
    out, begun = tmp_path / "some.json", list[Any]()
    monkeypatch.setattr(pool_of, "started", lambda *given, **more: begun.append((given, more)))
    monkeypatch.setattr(gpu_ordering, "check", begun.append)
    over = FORCED | {"unit_kind": "processes"}
    run_command.measure_plan(plan(over), out, "cpu")
    _, made, _, more = handed.pop()
    assert (made.decodings[0].units, made.decodings[0].unit_kind) == (3, "processes")
    assert made.facts["devices"] == ["cpu"] * 3
    assert more["lanes"] is None
    more["pool"]()
    assert begun.pop() == ((Replica("llama-68m", "cpu", "float32", 3), 3, 4 + 6 + 8), {"devices": []})
    assert begun == []
    tiny.checksum, tiny.heads = "abc", {3: None}
    for said, heads in ((None, "folder/heads.safetensors"), ("own.safetensors", "own.safetensors")):
        written = plan(over, model="somewhere", heads=said, dtype="float64")
        with monkeypatch.context() as patch:
            patch.setattr(
                "calibrate.loading.load_models.heads_path", lambda name: Path({"somewhere": "folder/heads.safetensors"}[name])
            )
            run_command.measure_plan(written, out, "cuda", gpus=["cuda:0", "cuda:1", "cuda:0"])
            *_, more = handed.pop()
            more["pool"]()
        devices = ["cuda:0", "cuda:1", "cuda:0"]
        assert begun.pop() == ((Replica("somewhere", "cuda:0", "float64", heads=heads), 3, 18), {"devices": devices})
        assert begun.pop() == devices  # the GPUs were checked
    with pytest.raises(
        ParameterError, match="gpus are for methods that run over processes, and none does; leave them out, or set unit_kind"
    ):
        run_command.measure_plan(plan(FORCED), out, "cuda", gpus=["cuda:0"])
    with pytest.raises(ParameterError, match="unit_kind is for methods that use several units, and autoregressive uses one with"):
        run_command.measure_plan(plan({"name": "autoregressive", "forced": {}, "unit_kind": "processes"}), out, "cpu")


def test_methods_with_several_models_have_a_process_for_each(
    handed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many replicas of the target as a method of the plan uses; plans are of one kind, on the CPU, with few processes."""
    out, begun = tmp_path / "some.json", list[Any]()
    decoders = real_models.decoders("llama", "draft")
    monkeypatch.setattr(run_command, "_models", lambda *_: ({role: decoders[role] for role in ("target", "draft")}, {}))
    monkeypatch.setattr(apart, "started", lambda *given, **more: begun.append((given, more)))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    forced = {"forced": {"acceptance_rate": 0.5}, "unit_kind": "processes"}
    pearl = {"name": "pearl", "draft_length": 2} | forced
    dsi = {"name": "dsi", "lookahead": 1, "verifiers": 3} | forced
    over = {"model": "llama-68m", "draft": "llama-68m", "dtype": "float64"}
    replica = Replica("llama-68m", "cpu", "float64", None if decoders["target"].checksum else 3)
    plain = {"name": "autoregressive", "forced": {}}
    for methods, units, copies in (([pearl], [2], 1), ([pearl, dsi], [2, 4], 3), ([dsi, plain], [4, 1], 3)):
        run_command.measure_plan(plan(*methods, **over), out, "cpu")
        _, made, models, more = handed.pop()
        assert [each.units for each in made.decodings] == units
        assert {*models} == {"target", "draft"}
        more["pool"]()
        assert begun.pop() == (({"target": replica, "draft": replica},), {"copies": {"target": copies, "draft": 1}})
    for methods, device, said in (
        ([pearl, FORCED | {"unit_kind": "processes"}], "cpu", "must be of one kind in a plan, got ppd, whose processes have"),
        ([pearl], "cuda", "device must be cpu for pearl over processes, which have a model each, got 'cuda'; leave unit_kind out"),
        ([dsi | {"verifiers": 8}], "cpu", "processes must be at most 8, 4 for each of 2 cores, got 9: 8 of the target model and 1"),
        ([FORCED | {"candidates": 9, "unit_kind": "processes"}], "cpu", "at most 8, 4 for each of 2 cores, got 10: one for each"),
    ):
        with pytest.raises(ParameterError, match=said):
            run_command.measure_plan(plan(*methods, **over), out, device)
    assert not handed
    assert not begun


def test_streams_graphs_and_profiles_reach_the_measurement(
    handed: list[Any], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sessions = tmp_path / "some.json", list[Any]()
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a chip")
    monkeypatch.setattr("calibrate.devices.machine.memory", lambda _: 8)
    monkeypatch.setattr(streams_of, "Lanes", lambda *given: ("lanes", *given))

    def session_(*given: Any, **more: Any) -> Any:
        sessions.append((given, more))
        return SimpleNamespace(warnings={"target": ["too fast", "far too fast"], "draft": []}, refused={})

    monkeypatch.setattr(interleaved_profiles, "MeasurementSession", session_)
    profile = {"widths": [1, 3], "contexts": [0, 200], "batches": [1, 2]}
    written = run_plan.from_tables({
        "run": {"model": "llama-68m", "tokens": 6, "prompt_tokens": 4, "dtype": "bfloat16", "seed": 2},
        "method": [FORCED | {"unit_kind": "streams"}], "profile": profile,
    })  # fmt: skip
    heard: list[str] = []
    run_command.measure_plan(written, out, "cuda:1", warn=heard.append)
    *_, made, _, more = handed.pop()
    assert more["lanes"] == ("lanes", tiny, 3)
    assert more["pool"] is None
    assert "devices" not in made.facts
    assert made.facts["profiles"] == {"target": "cuda-llama-68m-interpreter.json"}
    [(given, how)] = sessions
    assert given == ({"target": tiny}, {"target": "llama-68m"}, Passes((1, 3), (0, 200), (1, 2)), tmp_path)
    assert how == {"device": "cuda:1", "dtype": "bfloat16", "seed": 2, "processes": False, "lanes": more["lanes"]}
    assert heard == ["profile of the target: too fast", "profile of the target: far too fast"]
    run_command.measure_plan(written, out, "cuda:1")  # without a receiver of warnings
    assert handed.pop()[3]["session"].refused == {}
    monkeypatch.setattr(
        interleaved_profiles, "MeasurementSession", lambda *_, **__: SimpleNamespace(warnings={}, refused={"target": "too fast"})
    )
    with pytest.raises(ParameterError, match=r"some\.json is written, but there is no profile of the target: too fast"):
        run_command.measure_plan(written, out, "cuda:1")
    # Graphs also have room for the passes timed between the runs.
    built: list[Any] = []
    monkeypatch.setattr(cuda_graphs, "cuda_of", lambda _: "cuda")
    monkeypatch.setattr(measure_runs, "by_graphs", lambda *given: built.append(given) or {"target": tiny})
    for profiled, room in ((None, (0, 1)), (Passes((1, 3), (0, 200), (1, 2)), (204, 2))):
        now = run_plan.WrittenPlan(plan(FORCED, mode="cuda-graph").run, plan(FORCED).choices, profiled)
        with contextlib.suppress(ParameterError):  # the profile is refused
            run_command.measure_plan(now, out, "cpu")
        wanted, given_models, tokens, *also = built.pop()
        assert (len(wanted), given_models, tokens, tuple(also)) == (1, {"target": tiny}, 6, room)


def test_graphs_have_room_for_the_longest_sequence_and_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(cuda_graphs, "Graphs", lambda *given: made.append(given))
    models: Any = real_models.decoders("llama", "draft")

    def wanted(length: int, **settings: Any) -> measure_runs.PlannedDecoding:
        return measure_runs.PlannedDecoding("speculative", settings | {"draft_length": 1}, tuple(range(length)), "one", {})

    both = [wanted(40), wanted(70, sequences=3, batching="static")]
    for more, room, texts in (((), 128, 3), ((129, 1), 192, 3), ((128, 5), 128, 5)):
        assert [*measure_runs.by_graphs(both, models, 20, *more)] == ["target", "draft"]
        assert made == [(each, room, texts) for each in models.values()]
        made.clear()
    measure_runs.by_graphs(both[:1], models, 24)
    assert made[0] == (models["target"], 64, 1)
