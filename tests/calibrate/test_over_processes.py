"""Decoding over processes generates the plain decoder's tokens, with the expected rows, and reports the end of a process.

Processes are slow to start: one set of them serves all sequences and models, and few are broken on purpose.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.interpreters.in_one_process import RandomDraws, Real, Sampling
from calibrate.loading import prompts
from calibrate.loading.replicas import Replica
from calibrate.measured_runs import measure_runs
from calibrate.timing import process_times
from calibrate.workers import over_processes, worker_loop
from calibrate.workers import worker_pool as pool_of
from calibrate.workers.over_processes import UNKNOWN_ROWS, Parallel, Pool, ProcessError, started
from model.base.checks import ParameterError
from model.logs import forced_outcomes
from model.logs.recorded_decoding import AnsweredRead
from model.logs.spans import Span, main_process_seconds
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.beam import algorithm as beam
from model.methods.ppd import algorithm as ppd
from model.methods.speculative import algorithm as speculative
from model.steps import CacheError, Commit, Fork, Forward, Join, LayerSpan, Read, Steps, Stop
from tests.support import real_models, workers
from tests.support.real_models import DEPTHS, SOURCE
from tests.support.workers import PATIENCE, one_pass_forever, tiny_replica

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
LAYERS = DEPTHS["target"]
CHOICES = [
    ppd.Parameters(LAYERS, layer, k, form)
    for form, layers in (("literal", (3, 4, 5)), ("eager", (3, 5)), ("flat", (1, 2, 3))) for layer in layers for k in (1, 2, 3)
]  # fmt: skip
BATCHED = [
    ppd.Parameters(LAYERS, layer, k, form, batched=True)
    for form, layer, k in (("literal", 3, 3), ("literal", 5, 2), ("eager", 3, 4), ("flat", 1, 3), ("flat", 2, 2))
]
NESTED = [ppd.Parameters(LAYERS, layer, k, "nested") for layer, k in ((3, 1), (3, 3), (4, 2), (2, 1))]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with started(tiny_replica("llama"), 4, 96, patience=PATIENCE) as found:
        yield found


def use(pool: Pool, replica: Replica, capacity: int = 96, source: tuple[int, ...] = ()) -> None:
    """Load the model, unless it is loaded."""
    if pool.replica != replica:
        pool.load(replica, capacity, source)


def both(pool: Pool, parameters: Any, prompt: list[int], tokens: int, **more: Any) -> tuple[Parallel, Real]:
    """Return the same decoding over processes and in one process."""
    parallel, alone = Parallel(pool, record=True, **more), Real({"target": pool.decoder}, **more)
    for each in (parallel, alone):
        each.run(ppd.decode(parameters, prompt, tokens), tokens)
    as_believed(pool)
    return parallel, alone


def as_believed(pool: Pool) -> None:
    """Check that all rows are those that the scheduler expects, and that copies of a pass's rows are equal."""
    memory, known = pool.memory, pool.tags != UNKNOWN_ROWS
    assert (memory.tags[known] == pool.tags[known]).all()
    first = pool.tags[0]
    for unit in range(1, pool.units):
        layers, places = np.nonzero((pool.tags[unit] == first) & (first > 0))
        ours, theirs = memory.rows[0][layers, ..., places, :], memory.rows[unit][layers, ..., places, :]
        assert ours.equal(theirs)


FEW = [CHOICES[1], CHOICES[11], CHOICES[15], NESTED[0], BATCHED[0], BATCHED[3]]
"""One choice of each form, and of two of them batched."""
SPREAD = [*CHOICES[::4], *CHOICES[2::9], *NESTED[::2], *BATCHED[:4]]
"""Each form with each number of candidates and each exit layer; not all combinations."""


@pytest.mark.parametrize(("kind", "choices"), [
    pytest.param("llama", SPREAD, id="llama"),
    *(pytest.param(kind, FEW[-3:], id=kind) for kind in ("gpt2", "opt", "gpt_neox")),
    pytest.param("llama", [*CHOICES, *NESTED, *BATCHED], id="llama all", marks=pytest.mark.slow),
    *(pytest.param(kind, FEW, id=f"{kind} more", marks=pytest.mark.slow) for kind in ("gpt2", "opt", "gpt_neox")),
])  # fmt: skip
def test_tokens_are_those_of_the_plain_decoder(pool: Pool, kind: str, choices: list[ppd.Parameters]) -> None:
    use(pool, tiny_replica(kind))
    prompt = [3, 4, 5, 6, 17]
    expected = real_models.reference_tokens(real_models.model(kind, LAYERS), prompt, 16)
    for parameters in choices:
        parallel, alone = both(pool, parameters, prompt, 16)
        assert parallel.work.tokens == alone.work.tokens == expected, parameters
        assert parallel.work.commits == alone.work.commits, parameters
        # The progress of stopped passes depends on the real clock; even the last ones may have begun.
        if parameters.form != "nested" and not (parameters.form == "eager" and parameters.exit_layer == LAYERS):
            assert parallel.work.account == alone.work.account, parameters
            assert parallel.work.forks == alone.work.forks


def test_decoder_with_an_encoder(pool: Pool) -> None:
    use(pool, tiny_replica("t5"), source=SOURCE)
    expected = real_models.reference_tokens(real_models.model("t5", LAYERS), [0], 12)
    for parameters in (*CHOICES[:2], BATCHED[0]):
        assert both(pool, parameters, [0], 12)[0].work.tokens == expected
    pool.read_source((9, 3))
    parallel, alone = both(pool, CHOICES[0], [0], 12)
    fresh: Any = tiny_replica("t5").load()
    fresh.read_source((9, 3))
    again = Real({"target": fresh}).run(ppd.decode(CHOICES[0], [0], 12), 12)
    assert parallel.work.tokens == alone.work.tokens == again.tokens != expected
    with pytest.raises(ParameterError, match="has an encoder, and source is empty; give what it reads"):
        pool.load(tiny_replica("t5"))


class Late:
    """An end of a pipe whose first poll finds nothing, although an answer comes before the next."""

    def __init__(self, end: Any) -> None:
        self.end, self.looked = end, False

    def poll(self, timeout: float = 0.0) -> bool:
        there: bool = self.end.poll(timeout if self.looked else PATIENCE)
        was, self.looked = self.looked, True
        return was and there

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)


def test_answer_between_two_polls_is_no_failure(pool: Pool) -> None:
    posts, late = dict(pool.posts), pool.posts[1].end
    try:
        pool.posts[1] = dataclasses.replace(posts[1], end=Late(late))
        pool.load(tiny_replica("llama", 2), 96)
        assert not pool.broken
    finally:
        pool.posts[1] = posts[1]


def test_processes_serve_several_sequences(pool: Pool) -> None:
    use(pool, tiny_replica("llama", 1))
    for length in (1, 40, 3):
        prompt = [(7 * place) % 29 for place in range(length)]
        for parameters in (CHOICES[1], BATCHED[0], NESTED[0]):
            parallel, alone = both(pool, parameters, prompt, 9)
            assert parallel.work.tokens == alone.work.tokens


def test_sampling_reads_and_ends_equal_those_of_one_process(pool: Pool) -> None:
    use(pool, tiny_replica("llama"))
    parameters = ppd.Parameters(LAYERS, 3, 2, "literal", sampled=True)
    logs: list[list[AnsweredRead]] = [[], []]
    texts = []
    for log, kind in zip(logs, ("processes", "one"), strict=True):
        more: dict[str, Any] = {"sampling": Sampling(1.5), "random_draws": RandomDraws(3), "log": log}
        each: Any = Parallel(pool, **more) if kind == "processes" else Real({"target": pool.decoder}, **more)
        texts.append(each.run(ppd.decode(parameters, [3, 4], 14), 14).tokens)
    assert texts[0] == texts[1]
    assert logs[0] == logs[1]
    whole = real_models.reference_tokens(real_models.model("llama", LAYERS), [3, 4, 5], 16)
    stop = next(token for place, token in enumerate(whole) if place > 3 and token not in whole[:place])
    for parameters in (CHOICES[0], CHOICES[9]):
        work = Parallel(pool).run(ppd.decode(parameters, [3, 4, 5], 16, (stop,)), 16)
        assert work.tokens == whole[: whole.index(stop) + 1]


def test_family_models_generate_the_same_in_float32(pool: Pool) -> None:
    use(pool, Replica("family:target"), 128)
    decoder = pool.decoder
    tokenizer = decoder.tokenizer
    prompt = tokenizer(prompts.held_out(40, 1, 2, tokenizer=tokenizer.backend_tokenizer)[0].text)["input_ids"]
    plain = autoregressive.Parameters(decoder.layers)
    expected = Real({"target": decoder}).run(autoregressive.decode(plain, prompt, 24), 24).tokens
    for form, layer, k in (("literal", 6, 1), ("literal", 9, 3), ("eager", 8, 2), ("flat", 3, 2)):
        work = Parallel(pool).run(ppd.decode(ppd.Parameters(decoder.layers, layer, k, form), prompt, 24), 24)
        assert work.tokens == expected
        assert 0 < work.commits.count("match") < 24  # both ways occur
    as_believed(pool)


def test_spans_are_complete_and_in_order(pool: Pool) -> None:
    use(pool, tiny_replica("llama"))
    run, _ = both(pool, ppd.Parameters(LAYERS, 3, 3, "eager"), [3, 4, 5], 12)
    spans, commits = run.spans, run.work.commits
    passes = [span for span in spans if span.what == "forward"]
    for unit in range(4):
        of = sorted(span for span in passes if span.unit == unit)
        assert all(one.end <= other.start for one, other in itertools.pairwise(of))  # a unit makes one pass at a time
    assert all(run.run_start <= span.start <= span.end <= run.run_start + run.seconds for span in spans if span.fate == "kept")
    without_layers = sum(counts[0] for kind, counts in run.work.account.passes_by_kind.items() if kind.layers.size == 0)
    assert len(passes) == run.work.account.passes - without_layers
    kept = [span for span in passes if span.unit and span.fate == "kept"]
    assert len(kept) == commits[:-1].count("match") == sum(span.what == "promotion" for span in spans)
    assert {span.fate for span in passes if span.unit} >= {"kept"}
    assert all(span.unit == 0 for span in spans if span.what in ("dispatch", "wait", "head"))
    run, _ = both(pool, BATCHED[0], [3, 4, 5], 12)
    wide = [span for span in run.spans if span.unit == 1]
    assert {(span.width, span.position - span.earliest) for span in wide} == {(3, 0)}  # hypotheses of one position
    without = Parallel(pool)
    without.run(ppd.decode(CHOICES[0], [3, 4, 5], 12), 12)
    assert without.spans == []


def test_timed_run_records_the_main_process(pool: Pool) -> None:
    use(pool, tiny_replica("llama"))
    asked = measure_runs.PlannedDecoding("ppd", {"exit_layer": 3, "candidates": 3, "form": "eager"}, (3, 4, 5), "one", units=4)
    row = measure_runs.timed(asked, {"target": pool.decoder}, 12, 0, pool)
    spans = [Span(**each) for each in row["spans"]]
    whole = main_process_seconds(spans)
    assert {"forward", "head", "dispatch", "promotion"} <= set(whole)
    assert min(whole.values()) > 0
    assert sum(whole.values()) <= row["seconds"] * 1.001 + 1e-6  # each moment counts once, and none after the last token
    alone = measure_runs.timed(dataclasses.replace(asked, units=1), {"target": pool.decoder}, 12, 0)
    assert alone["spans"] == []


def test_process_times_are_measured_by_number_of_processes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_times, "PROCESS_PROMPT", 8)
    use(pool, tiny_replica("llama"))
    seeds, whole = [], forced_outcomes.world
    monkeypatch.setattr(forced_outcomes, "world", lambda *args, seed, **more: seeds.append(seed) or whole(*args, seed=seed, **more))
    raw = process_times.raw_row([process_times.over_processes(pool, seed) for seed in range(2)], LAYERS)
    assert seeds == [0, 0, 0, 1, 1, 1]  # each sequence has separate outcomes
    assert raw["exit_layer"] == 3
    for part in process_times.OVERHEADS:
        assert [*raw[f"{part}_us"]] == ["1", "2", "3"]
        assert all(middle > 0 for _, middle, _ in raw[f"{part}_us"].values())
    rows = process_times.process_rows([raw], {"main_alone": 0.0, "main_concurrent": 0.0}, LAYERS)
    assert {row["part"] for row in rows} >= {*process_times.OVERHEADS}


def test_layers_of_the_main_process_share_the_rest_of_its_passes() -> None:
    """12 layers, the first 8 alone: 0.1 ms of call and 0.2 ms per layer there, 0.05 ms and 0.3 ms after; medians of three rounds.
    """
    rounds = [
        {
            "main_alone_us": {"1": [100 + 8 * each] * 3},
            "main_concurrent_us": {"1": [50 + 4 * (each + 100)] * 3},
            "exit_layer": 8,
            "repeats": 5,
        }
        for each in (190, 200, 900)
    ]
    empty = {f"{part}_us": {} for part in process_times.OVERHEADS}
    empty |= {"subprocess_step_us": {"1": [1230.0] * 3}}  # 4 layers of 0.3 ms, as in the main process at that time, and 0.03 ms
    found = process_times.process_rows([each | empty for each in rounds], {"main_alone": 1e-4, "main_concurrent": 5e-5}, 12)
    assert {row["part"]: row["time_s"] for row in found} == pytest.approx(
        {"main_alone": 2e-4, "main_concurrent": 3e-4, "subprocess_step": 3e-5}
    )
    assert {(row["processes"], row["repeats"]) for row in found} == {(1, 15)}


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(ParameterError, match="heads are trained for a model's weights"):
        Replica("{}", random=1, heads="heads.safetensors")
    with pytest.raises(ParameterError, match="spread is used only with random weights"):
        Replica("family:target", spread=2.0)
    for said in ("{", '{"model_type": "none"}', '{"layers": 3}'):
        with pytest.raises(ParameterError, match="model must be a configuration that transformers accepts"):
            Replica(said, random=0).load()


def wide(after: tuple[int, ...], *, forked: bool) -> Steps:
    """Make a pass over two hypotheses, in a sub-process or in the main process."""
    yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
    step = Forward("target", (5, 6), 2, LayerSpan(0, LAYERS), tree=after)
    yield Join((yield Fork((step,), (1,)))) if forked else step


@pytest.mark.parametrize(
    ("units", "steps", "said"),
    [
        (2, wide((-1, 0), forked=True), "supports only plain passes of one sequence; the algorithm uses others"),
        (1, wide((-1, -1), forked=False), "supports only plain passes of one sequence; the algorithm uses others"),
        (2, ppd.decode(ppd.Parameters(LAYERS, 3, 3, batched=True), [3] * 14, 2), "the capacity=16, got at least 17 positions"),
        (2, ppd.decode(ppd.Parameters(LAYERS, 3, 2), [3, 4], 8), "units must be at least 3, as .*, got 2"),
        (2, ppd.decode(ppd.Parameters(LAYERS, 3, 1), [3] * 14, 8), "must fit the capacity=16, got at least 17 positions"),
        (2, ppd.decode(ppd.Parameters(6, 3, 1), [3], 8), "layers of the target must be 5, as random llama has, got at least 6"),
        (1, speculative.decode(speculative.Parameters(LAYERS, 2, draft_layers=2), [3], 8), "only the target, .* uses the draft"),
        (1, beam.decode(beam.Parameters(LAYERS, 0, 2, draft_layers=2), [3], 8), "a run over processes"),
    ],
)  # fmt: skip
def test_unsupported_runs_are_refused(units: int, steps: Any, said: str) -> None:
    with started(tiny_replica("llama"), units, 16) as pool:
        with pytest.raises(ParameterError, match=said):
            Parallel(pool).run(steps, 8)
        with pytest.raises(ProcessError, match="are broken by an earlier error; start them again"):
            Parallel(pool).run(steps, 8)


def test_unexpected_rows_are_refused() -> None:
    decoder = tiny_replica("llama").load()
    memory = worker_loop.SharedState.allocate(decoder, 2, 16)
    one, other = worker_loop.Unit(0, decoder, memory), worker_loop.Unit(1, decoder, memory)
    believed = worker_loop.tags_checksum(b"")
    one.make(worker_loop.Command(7, (3, 4), 0, 0, 5, 0, None, (), believed))
    believed = worker_loop.tags_checksum(np.full((5, 2), 7).tobytes())
    step = worker_loop.Command(8, (9,), 2, 0, 5, 0, None, (worker_loop.MissingRows(0, 0, 5, 0, 2),), believed)
    expected = one.make(step._replace(pieces=()))
    assert other.make(step).equal(expected)
    with pytest.raises(CacheError, match="unit 1: pass 9 at position 2 saw other rows than it should have"):
        other.make(step._replace(serial=9, tags_checksum=believed + 1))
    memory.tags[1, 3, 1] = 8  # one row of one layer was made by another pass
    with pytest.raises(CacheError, match="saw other rows"):
        other.make(step._replace(serial=10, pieces=()))
    with pytest.raises(CacheError, match="unit 1 is to go on from pass 3, but made 8 last"):
        other.make(step._replace(serial=11, first=2, state=3))
    with pytest.raises(CacheError, match="rows up to position 17 do not fit"):
        other.make(worker_loop.Command(12, (3,) * 17, 0, 0, 5, 0, None, (), 0))


def test_passes_of_parents_publish_each_layer(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sub-processes may follow them; a single pass has none and publishes nothing."""
    use(pool, tiny_replica("llama"))
    made: list[worker_loop.Command] = []

    def command(*asked: Any) -> worker_loop.Command:
        made.append(worker_loop.Command(*asked))
        return made[-1]

    monkeypatch.setattr(over_processes, "Command", command)

    def process() -> Steps:
        yield Forward("target", (6,), 2, LayerSpan(0, LAYERS))

    def steps() -> Steps:
        yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS))
        yield Join((yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)), process()), (1, 2))))
        yield Commit("token", (1,))

    Parallel(pool).run(steps(), 1)
    assert {each.tokens: each.announces_layers for each in made} == {(3, 4): True, (5,): False, (6,): True}


@pytest.mark.parametrize(("kind", "longest", "capacity"), [("llama", 96, 96), ("t5", None, 2048), ("llama", 4096, 2048)])
def test_default_capacity_is_that_of_the_model_up_to_2048(kind: str, longest: int | None, capacity: int) -> None:
    replica = tiny_replica(kind)
    if longest is not None:
        replica = dataclasses.replace(replica, model=json.dumps(json.loads(replica.model) | {"max_position_embeddings": longest}))
    with started(replica, 1, source=SOURCE if kind == "t5" else ()) as pool:
        assert (pool.decoder.max_positions, pool.capacity) == (longest, capacity)


def test_replicas_share_only_equal_weights() -> None:
    one, same, other = tiny_replica("llama").load(), tiny_replica("llama").load(), tiny_replica("llama", 1).load()
    expected = one.run((3, 4), 0, LayerSpan(0, LAYERS), one.rows())
    flat = worker_loop.share_weights(one)
    worker_loop.share_weights(same, flat)
    assert same.run((3, 4), 0, LayerSpan(0, LAYERS), same.rows()).equal(expected)
    one.head.weight.data.zero_()
    assert not same.head.weight.any()  # one copy in memory
    with pytest.raises(ValueError, match="the replica has other weights"):
        worker_loop.share_weights(other, flat)
    assert worker_loop.fingerprint(other) != worker_loop.fingerprint(one)
    import torch

    longer = torch.zeros(len(flat) + 64, dtype=flat.dtype)
    with pytest.raises(ValueError, match="the replica has weights of another size"):
        worker_loop.share_weights(tiny_replica("llama").load(), longer)


@pytest.mark.parametrize("place", [0, -1])
def test_fingerprint_covers_both_ends_of_a_tensor(place: int) -> None:
    import torch

    decoder = tiny_replica("llama").load()
    before = worker_loop.fingerprint(decoder)
    assert before == worker_loop.fingerprint(tiny_replica("llama").load())
    with torch.inference_mode():
        next(iter(decoder.full.parameters())).flatten()[place] += 1
    assert worker_loop.fingerprint(decoder) != before


# --- ends of processes ---


def gone(pids: list[int]) -> bool:
    """Return whether none of these processes exists any more, after a wait."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def left(pids: list[int]) -> list[str]:
    """Return names of shared memory of these processes; that of other processes comes and goes."""
    names = [name for name in os.listdir("/dev/shm") if "loky" not in name and "joblib" not in name]
    return [name for name in names if {*re.findall(r"\d+", name)} & {*map(str, pids)}]


def interrupted() -> Steps:
    """Run the same, interrupted by the user while a sub-process works."""
    steps = one_pass_forever()
    answer = None
    for number in range(1000):
        step = steps.send(answer)
        if number == 6:
            signal.raise_signal(signal.SIGINT)
        answer = yield step


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("crash", "the process of unit 1 failed: IndexError: index out of range"),
        ("hang", "the process of unit 1 did not answer within 0.2 s; the run is over"),
        ("kill", "the process of unit 1 was killed by SIGKILL"),
        ("interrupt", ""),
    ],
)
def test_failed_process_ends_the_run_and_leaves_nothing(harm: str, said: str) -> None:
    affinity = os.sched_getaffinity(0)
    with started(tiny_replica("llama"), 2, 16, patience=PATIENCE, share=harm != "crash") as pool:
        pids = pool.pids
        run = Parallel(pool)
        run.run(one_pass_forever(), 2)
        if harm == "hang":
            os.kill(pids[0], signal.SIGSTOP)
            pool.patience = 0.2  # it never answers
        if harm == "kill":
            os.kill(pids[0], signal.SIGKILL)
        if harm == "interrupt":
            os.kill(pids[0], signal.SIGINT)  # a terminal interrupts all processes; the main process decides when workers end
            Parallel(pool).run(one_pass_forever(), 2)
            with pytest.raises(KeyboardInterrupt):
                Parallel(pool).run(interrupted(), 1_000_000)
        else:
            with pytest.raises(ProcessError, match=said):
                Parallel(pool).run(one_pass_forever(10**6 if harm == "crash" else 5), 1_000_000)
        with pytest.raises(ProcessError, match="broken by an earlier error"):
            Parallel(pool).run(one_pass_forever(), 2)
    assert gone(pids)
    assert left([os.getpid(), *pids]) == []
    assert os.sched_getaffinity(0) == affinity
    with pytest.raises(ProcessError, match="closed"):
        Parallel(pool).run(one_pass_forever(), 2)


@pytest.mark.slow  # uses the real clock, so it may fail on a busy machine
def test_idle_processes_take_no_cpu_time(pool: Pool) -> None:
    def ticks() -> int:
        said = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pool.pids]
        return sum(int(each[11]) + int(each[12]) for each in said)

    use(pool, tiny_replica("llama"))
    time.sleep(0.1)
    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 5  # hundredths of a second, of three processes


def test_stopped_passes_end_early(pool: Pool) -> None:
    use(pool, tiny_replica("llama"))

    def stopping() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        for _ in range(20):  # more than a worker has slots
            yield Stop((yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (1,))))
        subs = yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (1,))
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))

    run = Parallel(pool, record=True)
    assert len(run.run(stopping(), 1).tokens) == 1
    as_believed(pool)
    fates = [span.fate for span in run.spans if span.what == "forward" and span.unit == 1]
    assert len(fates) == 21
    assert "cancelled" in fates
    assert fates[-1] == "discarded"


def test_last_sub_process_may_emit_the_rest(pool: Pool) -> None:
    """It is not joined, and emits tokens once its parent has ended."""
    use(pool, tiny_replica("llama"))

    def rest() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        yield Commit("token", ((yield Read("next", out)),))

    def first() -> Steps:
        yield Fork((rest(),), (1,))

    alone = Real({"target": pool.decoder}).run(rest(), 1)
    assert Parallel(pool).run(first(), 1).tokens == alone.tokens != []


def test_passes_that_run_at_the_last_token_are_cancelled(pool: Pool) -> None:
    use(pool, tiny_replica("llama"))

    def ending() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (1,))
        out = yield Forward("target", (4,), 1, LayerSpan(0, LAYERS), None, heads=1)
        yield Commit("token", ((yield Read("next", out)),))

    run = Parallel(pool, record=True)
    assert len(run.run(ending(), 1).tokens) == 1
    spans = run.spans
    assert [span.fate for span in spans if span.unit == 1] == ["cancelled"]
    assert [span.fate for span in spans if span.what == "link"] == ["cancelled"]
    assert {span.fate for span in spans if span.unit == 0} == {"kept"}


PARENT = """
    import signal

    from calibrate.workers import over_processes
    from tests.support import workers

    def main():
        with over_processes.started(workers.tiny_replica("llama"), 3, 16) as pool:
            print(*pool.pids, flush=True)
            over_processes.Parallel(pool).run(workers.one_pass_forever(), 1_000_000)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for tests in the background
        main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("signals", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_its_parent(tmp_path: Path, signals: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    root = Path(over_processes.__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert parent.stdout is not None
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.2)
        if signals == "SIGINT":
            os.killpg(parent.pid, signal.SIGINT)  # to all processes, as a terminal does
        else:
            os.kill(pids[1], signal.SIGSTOP)  # a suspended process, which cannot notice that its parent is gone
            parent.kill()
        error = parent.communicate(timeout=PATIENCE)[1]
    finally:
        parent.kill()  # it would run for hours
    if signals == "SIGINT":
        # An interrupted process does not end by the signal if it has imported torch's compiler, as transformers does.
        assert parent.returncode in (-signal.SIGINT, 1)
        assert error.rstrip().endswith("KeyboardInterrupt")
        assert error.count("Traceback") == 1  # the parent's; workers print none
    else:
        assert parent.returncode == -signal.SIGKILL
    assert gone(pids)
    assert left([parent.pid, *pids]) == []


def test_suspended_processes_end_with_their_parent() -> None:
    """A suspended process cannot notice its parent's end: its fork server ends with the parent, and the system then kills the
    process.
    """
    context = pool_of.context_of_workers()
    ours, theirs = context.Pipe()
    parent = context.Process(target=workers.parent_with_fork_server, args=(theirs,))
    parent.start()
    theirs.close()
    assert ours.poll(PATIENCE)
    pids = ours.recv()
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGSTOP)
    parent.kill()
    parent.join()
    assert gone(pids)
    assert left([parent.pid, *pids]) == []


def test_processes_notice_the_end_of_their_parent() -> None:
    """While they work, and while they are idle."""
    context = pool_of.context_of_workers()
    begun = []
    for busy in (True, False):
        ours, theirs = context.Pipe()
        parent = context.Process(target=workers.parent_process, args=(theirs, busy))
        parent.start()
        begun.append((parent, ours))
    for parent, ours in begun:
        assert ours.poll(PATIENCE)
        pids = ours.recv()
        time.sleep(0.1)
        parent.kill()
        parent.join()
        assert gone(pids)
