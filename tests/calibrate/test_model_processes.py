"""A process per model: the same decoding as in one process, concurrent passes of two models, and reported failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.interpreters.in_one_process import RandomDraws, Real, RunTimes, Sampling
from calibrate.loading.replicas import Replica
from calibrate.workers.model_processes import DistantModel, ModelProcesses, OverModels, ProcessError, started
from model.base.checks import ParameterError
from model.logs import measured_runs
from model.logs.recorded_decoding import AnsweredRead
from model.methods.amusd import algorithm as amusd
from model.methods.beam import algorithm as beam
from model.methods.dsi import algorithm as dsi
from model.methods.pearl import algorithm as pearl
from model.methods.ppd import algorithm as ppd
from model.methods.speculative import algorithm as speculative
from model.methods.ssd import algorithm as ssd
from model.steps import Batch, CacheError, Commit, Fork, Forward, Join, LayerSpan, Read, Steps
from tests.support import real_models
from tests.support.real_models import DEPTHS
from tests.support.workers import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are killed by their numbers")
LAYERS, SMALL = DEPTHS["target"], {"draft_layers": DEPTHS["draft"]}
PROMPT = [3, 4, 5, 6, 17]
WARM = Sampling(1.5)


def replica(role: str) -> Replica:
    """Return the model of a role, which any process can load."""
    return Replica(real_models.config("llama", DEPTHS[role]).to_json_string(), dtype="float64", random=0, spread=3.0)


@pytest.fixture(scope="module")
def decoders() -> dict[str, Any]:
    return {role: replica(role).load() for role in ("target", "draft")}


@pytest.fixture(scope="module")
def models() -> Iterator[ModelProcesses]:
    with started({role: replica(role) for role in ("target", "draft")}, patience=PATIENCE) as found:
        yield found


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        *((pearl, pearl.Parameters(LAYERS, gamma, sampled=sampled, **SMALL)) for gamma in (1, 3, 8) for sampled in (False, True)),
        *((pearl, pearl.Parameters(LAYERS, 8, sampled=sampled, **SMALL, draft_stop="rejection")) for sampled in (False, True)),
        *(
            (amusd, amusd.Parameters(LAYERS, 8, sampled=sampled, draft_stop=stop, **SMALL))
            for stop in amusd.DRAFT_STOPS for sampled in (False, True)
        ),
        (speculative, speculative.Parameters(LAYERS, 3, placement="separate", **SMALL)),
        *(
            (ssd, ssd.Parameters(LAYERS, 3, (3, 1, 2, 2), backup, sampled, **SMALL))
            for backup in ssd.BACKUPS for sampled in (False, True)
        ),
        (pearl, pearl.Parameters(LAYERS, 3, sampled=True, context_budget=4, **SMALL)),
        (amusd, amusd.Parameters(LAYERS, 8, sampled=True, context_budget=4, **SMALL)),
        (ssd, ssd.Parameters(LAYERS, 3, (3, 1, 2, 2), sampled=True, context_budget=4, **SMALL)),
    ],
    ids=[
        *(f"pearl-{gamma}-{how}" for gamma in (1, 3, 8, "stopped") for how in ("greedy", "sampled")),
        *(f"amusd-{stop}-{how}" for stop in amusd.DRAFT_STOPS for how in ("greedy", "sampled")), "speculative",
        *(f"ssd-{backup}-{how}" for backup in ssd.BACKUPS for how in ("greedy", "sampled")),
        "pearl-within", "amusd-within", "ssd-within",
    ],
)
def test_decoding_equals_that_of_one_process(module: Any, parameters: Any, models: ModelProcesses, decoders: Any) -> None:
    for prompt, tokens in ((PROMPT, 24), ([7], 1)):
        logs: list[list[AnsweredRead]] = [[], []]
        apart = OverModels(models, random_draws=RandomDraws(5), log=logs[0], record=True, sampling=WARM)
        alone = Real(decoders, random_draws=RandomDraws(5), log=logs[1], sampling=WARM)
        found, want = (each.run(module.decode(parameters, prompt, tokens), tokens) for each in (apart, alone))
        assert found.tokens == want.tokens
        assert logs[0] == logs[1]
        assert found.account == want.account
        assert found.rounds == want.rounds
        if not parameters.sampled:
            assert found.tokens == [*real_models.reference_tokens(decoders["target"].full, prompt, tokens)]
        assert len(apart.spans) == found.account.passes
        assert {(span.unit, span.role) for span in apart.spans} <= {(0, "target"), (1, "draft")}


@pytest.fixture(scope="module")
def three() -> Iterator[ModelProcesses]:
    """The draft model and two replicas of the target."""
    with started({role: replica(role) for role in ("target", "draft")}, patience=PATIENCE, copies={"target": 2}) as found:
        yield found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("lookahead", "verifiers"), [(1, 2), (3, 2), (2, 1)])
def test_replicas_of_the_target_verify_as_one_process_does(
    lookahead: int, verifiers: int, sampled: bool, three: ModelProcesses, decoders: Any
) -> None:
    """The same reads and answers: a replica reads again what another one has read, and its rows are the same."""
    parameters = dsi.Parameters(LAYERS, lookahead, verifiers, sampled=sampled, **SMALL)
    for prompt, tokens in ((PROMPT, 24), ([7], 1), ([7], 9)):
        logs: list[list[AnsweredRead]] = [[], []]
        apart = OverModels(three, random_draws=RandomDraws(5), log=logs[0], record=True, sampling=WARM)
        alone = Real(decoders, random_draws=RandomDraws(5), log=logs[1], sampling=WARM)
        found, want = (each.run(dsi.decode(parameters, prompt, tokens), tokens) for each in (apart, alone))
        assert found.tokens == want.tokens
        assert [each.question for each in logs[0]] == [each.question for each in logs[1]]
        assert [each.answer for each in logs[0]] == pytest.approx([each.answer for each in logs[1]], rel=1e-9)
        assert found.account == want.account
        assert found.rounds == want.rounds
        if not sampled:
            assert found.tokens == [*real_models.reference_tokens(decoders["target"].full, prompt, tokens)]
        used = {span.unit for span in apart.spans if span.role == "target"}
        assert {span.unit for span in apart.spans if span.role == "draft"} <= {len(used)}  # without idle replicas
        assert used == ({0, 1} if verifiers == 2 and tokens > 9 else {0}) or tokens == 9
        assert (apart.reread > 0) == (verifiers == 2 and tokens > 1)


def test_passes_of_replicas_are_requested_while_others_work(three: ModelProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any speed: both replicas have a request before the first result is read, and drafting goes on meanwhile."""
    seen: list[str] = []
    ask, take = DistantModel.ask, DistantModel.take

    def asking(model: DistantModel, *what: Any) -> None:
        if what[0] == "pass":
            seen.append(f"{model.role} {model.unit} asked")
        ask(model, *what)

    def taking(model: DistantModel) -> Any:
        seen.append(f"{model.role} {model.unit} taken")
        return take(model)

    monkeypatch.setattr(DistantModel, "ask", asking)
    monkeypatch.setattr(DistantModel, "take", taking)
    OverModels(three).run(dsi.decode(dsi.Parameters(LAYERS, 1, 2, **SMALL), [7], 12), 12)
    begun = seen[seen.index("target 0 asked") :]
    begun = begun[: begun.index("target 0 taken")]
    assert begun[:2] == ["target 0 asked", "draft 2 asked"]
    assert "target 1 asked" in begun
    assert begun.count("draft 2 asked") >= 2


def test_more_units_than_replicas_are_refused(three: ModelProcesses, models: ModelProcesses) -> None:
    words = "replicas of the target model must be as many as the units of its passes, got 2; start more processes"
    for held, why in ((three, words), (models, "or with a replica for each unit of its passes")):
        with pytest.raises(ParameterError) as error:
            OverModels(held).run(dsi.decode(dsi.Parameters(LAYERS, 1, 3, **SMALL), PROMPT, 12), 12)
        assert why in str(error.value)
        held.broken = False


def test_commits_are_timed_from_the_first_request(models: ModelProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are renewed before; a late renewal is no part of the time of a run, nor of its commits."""
    renew = ModelProcesses.renew
    monkeypatch.setattr(ModelProcesses, "renew", lambda self: (renew(self), time.sleep(0.05)))
    times = RunTimes()
    times.start = time.perf_counter()
    apart = OverModels(models, times=times)
    apart.run(pearl.decode(pearl.Parameters(LAYERS, 3, **SMALL), PROMPT, 12), 12)
    assert times.start == apart.run_start
    assert 0 < times.commits[0] <= times.commits[-1] <= apart.seconds + 1e-3
    assert set(times.passes) >= {"target", "draft"}


def test_methods_with_two_models_are_timed_over_processes(tmp_path: Path) -> None:
    """Each model in a process: the output is that of one process, and every pass has a span on the unit of its model."""
    runs = {}
    for kind in ((), ("--unit-kind", "processes")):
        out = tmp_path / f"runs{len(kind)}.json"
        given_ = ["pearl", "--model", "family", "--set", "draft_length=2", *kind, "--limit", 1, "--tokens", 4, "--repeats", 2]
        result = CliRunner().invoke(app, ["run", *map(str, given_), "--threads", "1", "--device", "cpu", "-o", str(out), "-q"])
        assert result.exit_code == 0, result.output
        runs[bool(kind)] = measured_runs.load(out).timed[0]
    assert runs[True].decoding.tokens == runs[False].decoding.tokens
    assert runs[True].decoding.account == runs[False].decoding.account
    assert (runs[True].units, runs[True].separate_models, runs[False].separate_models) == (2, True, False)
    assert {(span.unit, span.role) for span in runs[True].spans(0)} == {(0, "target"), (1, "draft")}
    assert len(runs[True].spans(0)) == runs[True].decoding.account.passes


def test_copies_are_checked() -> None:
    with pytest.raises(ParameterError, match="copies of the target model must be between 1"), started({}, copies={"target": 0}):
        pass


def test_more_processes_than_cores_can_run_are_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(ModelProcesses, "__init__", lambda *_, **__: pytest.fail("a process was started"))
    replicas = {"target": Replica("family:target"), "draft": Replica("family:draft")}
    words = (
        r"processes must be at most 8, 4 for each of 2 cores, got 9: 8 of the target model and 1 of the draft model; use fewer,"
        " or decode in one process"
    )
    with pytest.raises(ParameterError, match=words), started(replicas, copies={"target": 8}):
        pass
    with pytest.raises(pytest.fail.Exception), started(replicas, copies={"target": 7}):  # as many as are allowed
        pass


def test_drafts_are_accepted_and_rejected(models: ModelProcesses) -> None:
    """The comparison above needs both. At a high temperature any two models agree now and then."""
    parameters = pearl.Parameters(LAYERS, 3, sampled=True, **SMALL)
    work = OverModels(models, random_draws=RandomDraws(5), sampling=WARM).run(pearl.decode(parameters, PROMPT, 48), 48)
    assert sum(accepted * times for (accepted, _), times in work.rounds.items())
    assert sum(times for (accepted, drafted), times in work.rounds.items() if accepted < drafted)


def test_draft_passes_are_requested_while_the_target_works(models: ModelProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any speed: all drafts of a round are requested between the target's pass and its read."""
    seen: list[str] = []
    ask, take = DistantModel.ask, DistantModel.take

    def asking(model: DistantModel, *what: Any) -> None:
        if what[0] == "pass":
            seen.append(f"{model.role} asked")
        ask(model, *what)

    def taking(model: DistantModel) -> Any:
        seen.append(f"{model.role} taken")
        return take(model)

    monkeypatch.setattr(DistantModel, "ask", asking)
    monkeypatch.setattr(DistantModel, "take", taking)
    OverModels(models).run(pearl.decode(pearl.Parameters(LAYERS, 2, **SMALL), [7], 12), 12)
    first = seen.index("target asked")
    assert seen[first : first + 6] == ["target asked", *["draft asked", "draft taken"] * 2, "target taken"]


def test_branches_are_drafted_while_the_target_works(models: ModelProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole preparation of a round is requested between the target's pass and its read."""
    seen: list[str] = []
    ask, take = DistantModel.ask, DistantModel.take

    def asking(model: DistantModel, *what: Any) -> None:
        if what[0] == "pass":
            seen.append(f"{model.role} {len(what[1])}")
        ask(model, *what)

    def taking(model: DistantModel) -> Any:
        seen.append(f"{model.role} taken")
        return take(model)

    monkeypatch.setattr(DistantModel, "ask", asking)
    monkeypatch.setattr(DistantModel, "take", taking)
    OverModels(models).run(ssd.decode(ssd.Parameters(LAYERS, 1, (3, 2), **SMALL), [7], 12), 12)
    first = seen.index("target 2")
    assert seen[first : first + 6] == ["target 2", "draft 2", "draft taken", "draft 5", "draft taken", "target taken"]


def headless() -> Steps:
    out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS))
    yield Commit("token", ((yield Read("next", out)),))


def with_a_gap() -> Steps:
    yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, 1)
    yield Forward("target", (5,), 3, LayerSpan(0, LAYERS), None, 1)


def two_chains() -> Steps:
    """Two sub-processes that continue the same rows, one after the other, and a third that continues the first."""
    yield Forward("draft", (3, 4), 0, LayerSpan(0, DEPTHS["draft"]))
    tasks = yield Fork((one_more(5, 2), one_more(6, 2)), (None, None))
    yield Join(tuple(tasks))
    yield Join(tuple((yield Fork((one_more(7, 3),), (None,), (tasks[0],)))))


def two_batches() -> Steps:
    """Two sub-processes whose batches of two sequences continue the same rows, pass by pass in turn."""
    yield Forward("draft", (3, 4), 0, LayerSpan(0, DEPTHS["draft"]))
    tasks = yield Fork((batched(2), batched(2)), (None, None))
    yield Join(tuple(tasks))


def batch_of_old_rows() -> Steps:
    """A batch of a sub-process that began before the main process went on."""
    yield Forward("draft", (3, 4), 0, LayerSpan(0, DEPTHS["draft"]))
    (task,) = yield Fork((one_more(5, 2),), (None,))
    yield Join((task,))
    yield Forward("draft", (6,), 2, LayerSpan(0, DEPTHS["draft"]))
    yield Join(tuple((yield Fork((batched(3),), (None,), (task,)))))


def batched(at: int) -> Steps:
    for position in (at, at + 1):
        batch = Batch.uniform((0, 1), (position, position), 1, 1)
        out = yield Forward("draft", (5, 6), position, LayerSpan(0, DEPTHS["draft"]), None, 2, batch=batch)
        yield Read("next", out)


def one_more(token: int, at: int) -> Steps:
    yield Forward("draft", (token,), at, LayerSpan(0, DEPTHS["draft"]))


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        (lambda: ppd.decode(ppd.Parameters(LAYERS, 3, 1), PROMPT, 4), ParameterError,
         r"layers of the target must be 5, as random llama has, each pass through all of them, got \[0, 3\)"),
        (lambda: beam.decode(beam.Parameters(LAYERS, 2, 2, **SMALL), PROMPT, 6), ParameterError, "plain passes of one sequence"),
        (two_chains, ParameterError, "two processes continue those of the draft model; run this"),
        (two_batches, ParameterError, "two processes continue those of the draft model; run this"),
        (batch_of_old_rows, ParameterError, "two processes continue those of the draft model; run this"),
        (with_a_gap, CacheError, "at position 3"),
        (headless, CacheError, "projects no position"),
    ],
    ids=["parts of a pass", "several hypotheses", "two chains", "two batches", "a batch of old rows", "a gap", "no head"],
)  # fmt: skip
def test_unsupported_steps_are_refused(steps: Any, error: Any, words: str, models: ModelProcesses) -> None:
    """The processes are then marked as broken; here they are not, and the mark is removed."""
    with pytest.raises(error, match=words):
        OverModels(models).run(steps(), 4)
    with pytest.raises(ProcessError, match="broken by an earlier error; start them again"):
        models.renew()
    models.broken = False


def test_unsupported_models_are_refused() -> None:
    on_gpu, unknown = Replica("family:draft", device="cuda"), Replica('{"model_type": "nothing"}', random=0)
    message = r"^device of the draft model must be 'cpu' .*, got 'cuda'$"
    with pytest.raises(ParameterError, match=message), started({"draft": on_gpu}):
        pass
    message = r"^the process of the target model failed: ParameterError: "
    with pytest.raises(ProcessError, match=message), started({"target": unknown}, patience=PATIENCE):
        pass


def test_missing_model_is_named(models: ModelProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "replicas", {"target": models.replicas["target"]})
    with pytest.raises(ParameterError, match=r"must have one of role draft, which the algorithm uses, got target$"):
        OverModels(models).run(pearl.decode(pearl.Parameters(LAYERS, 2, **SMALL), PROMPT, 6), 6)
    models.broken = False


def test_killed_process_ends_the_run(models: ModelProcesses) -> None:
    """Must be the last of these tests: all processes are gone afterwards."""
    processes = [model.process for model in models.models.values()]
    os.kill(models.models["draft"].process.pid, signal.SIGKILL)
    with pytest.raises(ProcessError, match=r"^the process of the draft model is gone"):
        OverModels(models).run(pearl.decode(pearl.Parameters(LAYERS, 2, **SMALL), PROMPT, 6), 6)
    models.close()
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(ProcessError, match="are closed"):
        models.renew()
