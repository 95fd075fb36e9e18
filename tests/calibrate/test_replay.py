"""The simulator plays a recorded decoding of real models again: the same commits, the same passes, the same reads."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.decode import real_decoding
from calibrate.interpreters.in_one_process import RandomDraws, Sampling
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.interpreter import count
from model.logs import read_log, replay
from model.logs.read_log import ReadLog
from model.logs.recorded_decoding import AnsweredRead, Decoding, drafting, question
from model.logs.replay import Replayed, UnloggedError
from model.methods import registry
from model.steps import Batch, Commit, Forward, LayerSpan, Read
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support import real_models
from tests.support.real_models import DEPTHS, KINDS, VOCABULARY
from tests.support.tiers import cross_rows, examples

LAYERS = DEPTHS["target"]
COST = UnitCost(LAYERS, cost_ratio=0.2, medium_cost_ratio=0.5)


def record(
    kind: str, method: str, table: dict[str, Any], prompt: list[int], tokens: int, *, seed: int = 0, **more: Any
) -> Decoding:
    """A decoding on tiny models, with its log. Drafts of the target's own first weights are often right, others seldom."""
    same = more.pop("same", seed % 2 == 0)
    models = real_models.decoders(kind, *real_decoding.roles(method, table)[1:], seed=seed, same=same)
    return real_decoding.decode(method, models, prompt, tokens, table, log=True, **more)


def played(found: Decoding, world: Replayed | None = None, cost: UnitCost = COST) -> Run:
    """The same run, simulated."""
    parameters = replay.parameters_of(found)
    world = Replayed(found.reads) if world is None else world
    return simulate(replay.steps_of(found), len(found.tokens), Cluster(parameters.units), cost, world)


BY_THE_CLOCK = {"amusd", "dsi", "ssd"}
"""Methods whose passes read what has arrived by then, or are stopped by then: a log is played again on the clock of its run only,
that of the counter."""


def by_the_clock(found: Decoding) -> bool:
    """True if what a run reads depends on times: also if a rejection stops the drafts of PEARL."""
    return found.method in BY_THE_CLOCK or found.settings.get("draft_stop") == "rejection"


def same(found: Decoding, cost: UnitCost = COST) -> None:
    """The simulator does what was recorded, and asks all that was asked and nothing else; so does the counter."""
    if not by_the_clock(found):
        same_in_simulation(found, cost)
    # On the counter's clock layers alone take time.
    work = count(replay.steps_of(found), Replayed(found.reads), len(found.tokens))
    assert tuple(work.committed) == found.commits
    assert work.account.passes_by_kind == found.account.passes_by_kind


def same_in_simulation(found: Decoding, cost: UnitCost) -> None:
    world = Replayed(found.reads)
    run = played(found, world, cost)
    assert tuple(run.tokens) == found.tokens
    assert [each[1:] for each in run.commits] == [(commit.kind, len(commit.tokens)) for commit in found.commits]
    assert run.rounds == found.rounds
    assert run.account.passes_by_kind == found.account.passes_by_kind
    assert (run.account.adoptions, run.account.adopted_rows) == (found.account.adoptions, found.account.adopted_rows)
    assert world.remaining == 0


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)
seeds, lengths = st.integers(0, 5), st.integers(1, 12)
stops = st.lists(st.integers(0, VOCABULARY - 1), max_size=2).map(tuple)
whole = st.integers


def some(method: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(method), st.fixed_dictionaries(fields))


flags = st.booleans()
placements = st.sampled_from(["colocated", "separate"])
thresholds = st.sampled_from([0.0, 0.05, 0.1, 0.2, 1.0])
CHOICES = st.one_of(
    some("autoregressive", sampled=flags),
    some(
        "ppd", form=st.sampled_from(["literal", "eager"]), exit_layer=whole(3, 4), candidates=whole(1, 4), sampled=flags,
        batched=flags,
    ),
    some("ppd", form=st.just("literal"), exit_layer=st.just(LAYERS), candidates=whole(1, 4), batched=flags),
    some("ppd", form=st.just("eager"), exit_layer=st.just(LAYERS), candidates=whole(1, 4), sampled=flags, batched=flags),
    some("ppd", form=st.just("nested"), exit_layer=whole(2, LAYERS), candidates=whole(1, 3), sampled=flags),
    some("ppd", form=st.just("nested"), exit_layer=st.just(1), candidates=whole(1, 2)),
    some("ppd", form=st.just("flat"), exit_layer=whole(1, LAYERS), candidates=whole(1, 4), sampled=flags, batched=flags),
    some("speculative", draft_length=whole(0, 7), sampled=flags, placement=placements),
    some("pearl", draft_length=whole(1, 9), sampled=flags, draft_stop=st.sampled_from(["round", "rejection"])),
    some("ssd", draft_length=whole(1, 4), fan_out=whole(1, 4), backup=st.sampled_from(["draft", "none"]), sampled=flags),
    some("tree", shape=st.just("full"), draft_depth=whole(1, 3), width=whole(1, 3)),
    some("tree", shape=st.just("eagle-2"), draft_depth=whole(1, 3), width=whole(2, 3), nodes=whole(3, 3)),
    some("adaptive", policy=st.just("heuristic"), max_draft_length=whole(5, 9), sampled=flags, placement=placements),
    some("adaptive", policy=st.just("confidence"), confidence_threshold=st.floats(0.01, 1), sampled=flags),
    some("adaptive", policy=st.sampled_from(["gradient", "optimum"]), believed_cost_ratio=st.floats(0.01, 1)),
    some(
        "hierarchical", draft_length=whole(1, 5), reading=st.sampled_from(["literal", "reuse", "bonus"]), sampled=flags,
        placement=placements,
    ),
    some(
        "hierarchical", draft_length=whole(1, 5), reading=st.just("recursive"), inner_draft_length=whole(0, 4), sampled=flags,
    ),
    some("beam", draft_length=whole(0, 4), beams=whole(1, 4), draft_beams=whole(4, 6)),
    some(
        "beam", draft_length=whole(0, 4), beams=whole(1, 4), rule=st.just("per-beam"),
        arrangement=st.sampled_from(["batched", "sequential", "parallel"]),
    ),
    some(
        "bild", max_draft_length=whole(1, 6), fallback_threshold=thresholds, variant=st.sampled_from(["paper", "code"]),
        rollback_threshold=st.sampled_from([0.0, 2.0, 3.0, 5.0, float("inf")]), placement=placements,
    ),
    some(
        "bild", max_draft_length=whole(1, 6), fallback_threshold=thresholds, rollback_threshold=st.floats(0, 6),
        exit_layer=whole(1, 4),
    ),
    some("skipdecode", min_layers=whole(1, 3), max_layers=whole(3, 5), prompt=st.just(1), sequence_length=whole(20, 40)),
    some(
        "early_exit", measure=st.sampled_from(["softmax", "state"]), threshold=st.floats(0, 1), first_check=whole(1, LAYERS),
        fill=st.sampled_from(["propagate", "backfill"]),
    ),
    some("early_exit", exit_layer=whole(1, LAYERS)),
)  # fmt: skip


@given(choice=CHOICES, prompt=prompts, tokens=lengths, seed=seeds, stop=stops)
@settings(max_examples=examples(40, 250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_run_is_played_again(
    choice: tuple[str, dict[str, Any]], prompt: list[int], tokens: int, seed: int, stop: tuple[int, ...]
) -> None:
    method, table = choice
    draws = RandomDraws(seed)
    same(record("llama", method, table, prompt, tokens, seed=seed, sampling=Sampling(0.5), random_draws=draws, stop=stop))


ALL = {
    "autoregressive": {}, "ppd": {"exit_layer": 3, "candidates": 3}, "speculative": {"draft_length": 3, "sampled": True},
    "pearl": {"draft_length": 3, "sampled": True}, "amusd": {"draft_length": 6, "sampled": True},
    "dsi": {"lookahead": 2, "verifiers": 2, "sampled": True}, "ssd": {"draft_length": 3, "fan_out": (2, 1, 2, 1), "sampled": True},
    "tree": {"shape": "full", "draft_depth": 2, "width": 2, "sampled": True, "candidates": "distinct"},
    "adaptive": {"policy": "heuristic"}, "hierarchical": {"draft_length": 3}, "beam": {"draft_length": 2, "beams": 3},
    "bild": {"fallback_threshold": 0.1, "rollback_threshold": 3.0},
    "skipdecode": {"min_layers": 2, "max_layers": 5, "prompt": 3, "sequence_length": 20}, "early_exit": {"threshold": 0.08},
    "self_speculative": {"exit_layer": 3, "draft_length": 3, "sampled": True}, "ngram": {"draft_length": 3},
}  # fmt: skip


def test_every_method_is_among_them() -> None:
    assert {*ALL} == {*registry.names()}


@pytest.mark.parametrize(
    ("method", "kind"),
    # An encoder-decoder refuses to draft several outcomes in one pass, as `test_in_one_process` states.
    [each for each in cross_rows(ALL, KINDS, ("ppd", "early_exit"))
     if each.values[0] != "ssd" or each.values[1] not in real_models.ENCODER_DECODERS],
)  # fmt: skip
def test_every_method_on_every_architecture(method: str, kind: str) -> None:
    same(record(kind, method, ALL[method], [0] if kind in real_models.ENCODER_DECODERS else [3, 4, 5], 12, seed=1))


@pytest.mark.parametrize("method", [method for method in ALL if method not in BY_THE_CLOCK])
def test_costs_move_the_clock_and_nothing_else(method: str) -> None:
    """Heads and multi-token passes take time: other latencies, the same passes."""
    found = record("llama", method, ALL[method], [3, 4, 5], 10, seed=2)
    dear = replace(COST, final_head=1.0, verify_cost=((1, 1.0), (64, 3.0)))
    assert played(found, cost=dear).latency > played(found).latency
    same(found, dear)


def test_plain_decoding_takes_what_the_theorem_says() -> None:
    """A replayed run has the clock of the cost model: d layers a token, and d for all of the prompt but its last token."""
    found = record("llama", "autoregressive", {}, [3, 4, 5], 9)
    assert played(found).latency == LAYERS * (9 + 1)
    assert found.account.layer_passes == LAYERS * (9 + 2)


def test_predictions_that_match_save_what_theorem_4_1_says() -> None:
    """d l - (d - d') matches, after the prompt's pass."""
    found = record("llama", "ppd", {"exit_layer": 3, "candidates": 2}, [3, 4, 5], 20, seed=1)
    # The last token's match comes too late to save anything.
    saved = sum(commit.kind == "match" for commit in found.commits[:-1])
    assert 0 < saved < 19
    assert played(found).latency == LAYERS * (20 + 1) - (LAYERS - 3) * saved


def test_the_nested_form_asks_more_of_a_clock_on_which_its_processes_come_further() -> None:
    """How far a process has come that is stopped, what anything takes decides: heads hold up the main process alone here."""
    found = record("llama", "ppd", {"exit_layer": 2, "candidates": 3, "form": "nested"}, [3, 4, 5], 12)
    same(found)
    with pytest.raises(UnloggedError, match="the log has no further read top of the target after layer 2 at position"):
        played(found, cost=UnitCost(LAYERS, final_head=9.0))


def test_a_process_that_is_stopped_before_it_starts_makes_no_pass() -> None:
    """Eager, exit after the last layer: the main process already knows what its sub-processes would find."""
    found = record("llama", "ppd", {"exit_layer": LAYERS, "candidates": 2, "form": "eager"}, [3, 4, 5], 8)
    same(found)
    matches = sum(commit.kind == "match" for commit in found.commits[:-1])
    assert matches
    # The prompt's, one a token, those of sub-processes that were right, which are then the next token's, and heads alone.
    assert found.account.layer_passes == LAYERS * (2 + 8)


# --- what must be seen to fail ---


def test_missing_reads_are_named() -> None:
    found = record("llama", "speculative", {"draft_length": 3}, [3, 4, 5], 10)
    for number, left_out in itertools.islice(enumerate(found.reads), 5):
        rest = [*found.reads[:number], *found.reads[number + 1 :]]
        asked = left_out.question
        with pytest.raises(UnloggedError, match=rf"no further read .* of the {asked.role} after layer {asked.layer} at"):
            played(found, Replayed(rest))


def test_another_method_than_the_recorded_one_is_found_out() -> None:
    found = record("llama", "speculative", {"draft_length": 3}, [3, 4, 5], 10)
    other = Decoding(found.method, {**found.settings, "draft_length": 4}, found.prompt, 10, found.commits, found.account)
    with pytest.raises(UnloggedError, match="the log has no further read"):
        played(other, Replayed(found.reads))


def test_another_answer_is_another_run() -> None:
    found = record("llama", "autoregressive", {}, [3, 4, 5], 6)
    last = found.reads[-1]
    changed = [*found.reads[:-1], last._replace(answer=last.answer + 1)]
    assert tuple(played(found, Replayed(changed)).tokens) == (*found.tokens[:-1], found.tokens[-1] + 1)


def test_answers_to_one_question_come_in_the_order_that_they_were_given() -> None:
    step = Forward("draft", (7, 8), 4, LayerSpan(0, 2), heads=1)
    read = Read("uniform", step)
    world = Replayed([AnsweredRead(question(read, step), each) for each in (0.25, 0.5)])
    assert [world.read(read), world.read(read)] == [0.25, 0.5]
    with pytest.raises(UnloggedError, match="the log has no further read"):
        world.read(read)


def test_questions_differ_by_all_that_is_asked() -> None:
    """Each of these changes makes it another question; a question and its answer have the same fields."""
    step = Forward("target", (7, 8, 9), 4, LayerSpan(0, 5), heads=3)
    one = question(Read("probability", step, -2, token=3), step)
    assert one.tail == (7, 8, 9)
    others = [
        question(Read("uniform", step, -2, token=3), step), question(Read("probability", step, -1, token=3), step),
        question(Read("probability", step, -2, token=4), step),
        question(Read("probability", step, -2, token=3), step._replace(role="draft")),
        question(Read("probability", step, -2, token=3), step._replace(at=5)),
        question(Read("probability", step, -2, token=3), step._replace(layers=LayerSpan(0, 4))),
        question(Read("probability", step, -2, token=3), step._replace(tokens=(1, 8, 9))),
        question(Read("top", step, -2, 3), step), question(Read("top", step, -2, 4), step),
        question(Read("beams", step, hypotheses=((0, -1.0),)), step), question(Read("beams", step, hypotheses=((0, -2.0),)), step),
        question(Read("probability", step, -2, token=3), step._replace(batch=Batch.uniform((2,), 4, 3, 3))),
    ]  # fmt: skip
    assert len({one, *others}) == len(others) + 1


# --- logs on disk ---


def saved(found: Decoding, folder: Path) -> ReadLog:
    """What a log says once it has been written and read."""
    log = ReadLog((found,), ("one",), {"target": {"name": "tiny", "checksum": "0", "layers": LAYERS}}, {"temperature": 0.5}, 3)
    return read_log.load(read_log.save(log, folder / "own.parquet"))


@given(choice=CHOICES, prompt=prompts, tokens=lengths, seed=seeds, stop=stops)
@settings(max_examples=examples(20, 250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_log_says_all_that_a_run_did(
    choice: tuple[str, dict[str, Any]], prompt: list[int], tokens: int, seed: int, stop: tuple[int, ...]
) -> None:
    """Every read to the last bit, and enough for the simulator to play it from the files alone."""
    method, table = choice
    found = record("llama", method, table, prompt, tokens, seed=seed, stop=stop)
    with tempfile.TemporaryDirectory() as folder:
        (again,) = saved(found, Path(folder)).decodings
    for name in ("method", "settings", "prompt", "max_tokens", "commits", "stop", "seconds", "reads", "tokens"):
        assert getattr(again, name) == getattr(found, name), name
    assert again.account == found.account
    same(again)


def test_log_of_several_sequences_keeps_them_separate(tmp_path: Path) -> None:
    decodings = tuple(record("llama", "speculative", {"draft_length": 3}, [prompt], 6) for prompt in (3, 4, 5))
    log = ReadLog(decodings, ("a", "b", "c"), {}, None, 0, "2026-01-01", {"torch": "2"})
    again = read_log.load(read_log.save(log, tmp_path / "own.json"))
    assert [each.reads for each in again.decodings] == [each.reads for each in decodings]
    assert (again.names, again.date, again.versions) == (log.names, log.date, log.versions)
    assert again.table().equals(log.table())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 9}, "own.json: schema_version must be 2, got 9; decode it again"),
        ({"part": "others"}, "own.json: unknown part 'others'; known: own"),
        ({"seeds": 1}, "own.json: unknown key seeds; did you mean seed?"),
        ({"rows": 1}, "own.json: columns must be decoding, order, kind"),
        ({"sha256": "0"}, "own.json: its table own.parquet is not the one that it was written with"),
        ({"seed": -1}, "own.json: seed must be at least 0, got -1"),
        ({"decodings": [3]}, "own.json: decodings[0] must be a table of keys, got 3"),
        ({"decodings": []}, "own.json: a log must have at least one decoding, got none"),
        ({"decodings": [{}]}, "own.json: decodings[0].adopted_rows is missing"),
    ],
)
def test_damaged_logs_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(record("llama", "autoregressive", {}, [3], 4), tmp_path)
    path = tmp_path / "own.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ParameterError) as caught:
        read_log.load(path)
    assert str(caught.value).startswith(said)


def test_a_log_lies_as_it_was_named() -> None:
    with pytest.raises(ParameterError, match=r"a log must be named FILE.parquet, got 'own.csv'"):
        read_log.json_of("own.csv")


# --- the record itself ---


@given(choice=CHOICES, prompt=prompts, tokens=lengths, seed=seeds)
@settings(max_examples=examples(20, 250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_decoding_says_who_wrote_what(choice: tuple[str, dict[str, Any]], prompt: list[int], tokens: int, seed: int) -> None:
    """As many producers as tokens; the draft's are the accepted ones; without a draft there is none."""
    method, table = choice
    found = record("llama", method, table, prompt, tokens, seed=seed)
    assert len(found.producers) == len(found.tokens) == tokens
    own = drafting(found.rounds)
    if method != "beam":  # whose hypotheses replace each other
        assert found.producers.count("draft") == own.accepted
    if own.rounds and method not in ("beam", "bild"):
        assert own.rounds * own.mean_acceptance_length == pytest.approx(tokens)
    assert 0 <= own.accepted <= own.tested <= own.drafted or method == "beam"


def test_replaced_tokens_are_gone() -> None:
    commits = (Commit("round", (4, 5, 6), 2), Commit("round", (7, 8), 3, back=1), Commit("again", (9,), 0))
    found = Decoding("beam", {}, (1,), 9, commits, record("llama", "autoregressive", {}, [1], 1).account)
    assert found.tokens == (4, 5, 7, 8, 9)
    assert found.producers == ("draft", "draft", "draft", "target", "again")
    assert found.rounds == {(2, 2): 1, (0, 3): 1, (0, 0): 1}
