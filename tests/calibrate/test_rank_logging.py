"""Rank logs: ranks are those of drafts made one by one, decide the rounds of every tree, and become rates of a scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.decode import rank_logging, rank_tables
from calibrate.decoders.kv_rows import KvRows
from calibrate.family.draft_head_training import EAGLE
from calibrate.interpreters.in_one_process import Real
from model.base.checks import ParameterError
from model.interpret.interpreter import count
from model.interpret.simulated_answers import Ranked
from model.logs import rank_log
from model.logs.rank_log import RankLog, counted
from model.methods.tree import algorithm as tree
from model.outcomes.rank_laws import RankRates
from model.steps import MASK, LayerSpan
from sim.scenarios.outcomes import rank_outcomes
from tests.calibrate.test_tree_drafts import DRAFTERS, HEADS, LAYERS, SHAPES, decoders_of, parameters
from tests.support.commands import call
from tests.support.trained_heads import COUNT

pytestmark = pytest.mark.usefixtures("one_thread")
HEADER: dict[str, Any] = {
    "target": {"name": "big", "checksum": "1", "layers": 4}, "draft": {"name": "small", "checksum": "2", "layers": 1},
    "prompts": [], "max_tokens": 8, "seed": 0, "dtype": "float32", "versions": {}, "date": "2026-01-01",
}  # fmt: skip
TOP = 4


def logged(drafter: str, prompts: list[list[int]], tokens: int, depth: int = COUNT) -> RankLog:
    decoders = decoders_of("llama", drafter)
    return rank_logging.log_ranks(decoders["target"], decoders["draft"], prompts, tokens, depth, TOP, HEADER)


def logits_alone(decoders: dict[str, Any], drafter: str, text: list[int], path: list[int]) -> Any:
    """Logits of a draft after a text of which it reads the target's states, if any, and after `path` of its own tokens."""
    target, draft = decoders["target"], decoders["draft"]
    if drafter == "model":
        whole = LayerSpan(0, draft.layers)
        return draft.logits(draft.run((*text, *path), 0, whole, KvRows(draft.layers)), draft.layers)[-1]
    states = target.run(tuple(text[:-1]), 0, LayerSpan(0, target.layers), KvRows(target.layers))
    rows = KvRows(1)
    if HEADS[drafter] != EAGLE:
        masked = draft.run((*text, *[MASK] * len(path)), 0, LayerSpan(0, 1), rows, states)
        return draft.logits(masked[-1 - len(path) :], 1)[-1]
    state = draft.run(tuple(text), 0, LayerSpan(0, 1), rows, states)
    for at, token in enumerate(path, len(text)):
        state = draft.run((token,), at, LayerSpan(0, 1), rows, state[-1:])
    return draft.logits(state, 1)[-1]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ranks_are_those_of_drafts_made_one_by_one(drafter: str) -> None:
    decoders, prompts, tokens = decoders_of("llama", drafter), [[5, 6, 7], [8, 4, 2]], 9
    log = logged(drafter, prompts, tokens)
    for prompt, ranks in zip(prompts, log.ranks, strict=True):
        text = [*prompt, *Real(decoders).run(tree.decode(parameters("chain", drafter), prompt, tokens), tokens).tokens]
        for start in range(tokens):
            for level in range(COUNT):
                expected = 0
                if start + level < tokens:
                    at = len(prompt) + start
                    logits = logits_alone(decoders, drafter, text[:at], text[at : at + level])
                    expected = 1 + int((logits > logits[text[at + level]]).sum())
                assert ranks[start, level] == (expected if expected <= TOP else 0), (start, level)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "eagle-2"])
def test_a_log_decides_the_rounds_of_every_tree(shape: str, drafter: str) -> None:
    """The real decoding and the simulated one on the recorded ranks commit equally many tokens, round by round."""
    prompt, tokens = [5, 6, 7], 30
    choice = parameters(shape, drafter)
    work = Real(decoders_of("llama", drafter)).run(tree.decode(choice, prompt, tokens), tokens)
    (ranks,) = logged(drafter, [prompt], tokens, choice.levels).ranks
    outcomes = [[0] * tokens, *ranks.T.tolist()]
    simulated = count(tree.decode(choice, [0] * len(prompt), tokens), Ranked(len(prompt), LAYERS, outcomes), tokens)
    sizes = [[(len(each.tokens), each.drafted) for each in found.committed] for found in (work, simulated)]
    assert sizes[0] == sizes[1]
    assert work.account.passes_by_kind == simulated.account.passes_by_kind
    assert len({accepted for accepted, _ in sizes[0]}) > 1


# --- Rates ---

RANKS = st.integers(1, 3).flatmap(
    lambda depth: st.lists(
        st.lists(st.lists(st.integers(0, 3), min_size=depth, max_size=depth), min_size=1, max_size=6).map(
            lambda rows: np.array([[rank if place + level < len(rows) else 0 for level, rank in enumerate(row)]
                                   for place, row in enumerate(rows)])
        ),
        min_size=1, max_size=3,
    )
)  # fmt: skip


@given(RANKS, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_counts_follow_every_draft(sequences: list[Any], candidates: int) -> None:
    """Each draft is followed by itself, from its first position to the first token that is no candidate, or the end."""
    depth = sequences[0].shape[1]
    hits, trials = np.zeros((depth, candidates), int), np.zeros(depth, int)
    for ranks in sequences:
        for start in range(len(ranks)):
            for level in range(min(depth, len(ranks) - start)):
                trials[level] += 1
                rank = ranks[start, level]
                if not 1 <= rank <= candidates:
                    break
                hits[level, rank - 1] += 1
    found = counted(sequences, candidates)
    assert found.hits.tolist() == hits.tolist()
    assert found.trials.tolist() == trials.tolist()


def drawn(sequences: int, tokens: int) -> RankLog:
    """A log whose ranks have known rates at each depth, along one text: those of a draft model do not depend on the depth."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(sequences):
        own = rng.choice(4, size=tokens, p=[0.2, 0.5, 0.2, 0.1])
        found.append(np.array([[own[at + level] if at + level < tokens else 0 for level in range(3)] for at in range(tokens)]))
    return RankLog(tuple(found), 3, HEADER)


def test_tokens_per_round_are_predicted_where_positions_are_independent() -> None:
    """The closed form of the other half's rates is exact here: the interval contains it, and the error is below 5 %."""
    log = drawn(40, 120)
    (rates, rounds) = rank_tables.tables(log, (6, 12))
    for depth, rank, rate, low, high, *_ in rates.rows:
        assert low < (0.5, 0.2, 0.1)[rank - 1] < high or rate == pytest.approx((0.5, 0.2, 0.1)[rank - 1], abs=0.03), depth
    assert [(row[1], row[2]) for row in rounds.rows] == [("chain", 3), ("sequoia", 6), ("sequoia", 12)] * 2
    for row in rounds.rows:
        seen, low, high, predicted = row[4:8]
        assert low < seen < high
        assert predicted == pytest.approx(seen, rel=0.05)
    assert rounds.rows[0][7] < rounds.rows[1][7] < rounds.rows[2][7]  # trees accept more than a chain


# --- Files and commands ---


def test_a_log_is_read_as_it_was_written_and_by_a_scenario(tmp_path: Path) -> None:
    log = drawn(4, 12)
    log = RankLog(log.ranks, log.top, HEADER | {"prompts": ["a", "b", "c", "d"]})
    path = rank_log.save(log, tmp_path / "ranks.json")
    back = rank_log.load(path)
    assert [each.tolist() for each in back.ranks] == [each.tolist() for each in log.ranks]
    assert (back.top, back.header) == (log.top, log.header)
    outcome = rank_outcomes.RecordedRanks(str(path)).outcome(tree.Parameters(4, "full", 2, 2), 12)
    assert outcome.law.records[:, :, :].tolist() == [each[:, :2].T.tolist() for each in log.ranks]


def test_rates_are_printed_as_a_scenario_takes_them(tmp_path: Path) -> None:
    log = drawn(6, 40)
    path = rank_log.save(RankLog(log.ranks, log.top, HEADER | {"prompts": [*"abcdef"]}), tmp_path / "ranks.json")
    done = call("rates", str(path), "--nodes", "4,9", "--json")
    tables = json.loads(done.stdout)
    line = next(note for note in tables[0]["notes"] if note.startswith("as [outcomes]"))
    given = json.loads(line.partition("rank_rates = ")[2].partition(";")[0])
    law = rank_outcomes.RanksByDepth(tuple(map(tuple, given)), 240, "measured").outcome(tree.Parameters(4, "full", 3, 3), 12).law
    assert isinstance(law, RankRates)
    expected = counted(log.ranks, 3)
    assert np.array(given) == pytest.approx(expected.hits / expected.trials[:, None], abs=5e-5)
    assert {row["nodes"] for row in tables[1]["rows"]} == {3, 4, 9}


def changed(**more: Any) -> dict[str, Any]:
    found = {"schema_version": 1, "part": "ranks", **HEADER, "prompts": ["a"], "top": 3, "ranks": [[[1, 2], [3, 0]]]}
    return {key: value for key, value in (found | more).items() if value is not None}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": (changed(ranks=None), "tokens among a draft's candidates; record it with calibrate ranks -o FILE.json"),
    "another log": (changed(part="positions"), "has no ranks of the target's tokens"),
    "version": (changed(schema_version=2), "schema_version must be 1, got 2; record it with calibrate ranks"),
    "no draft": (changed(draft=None), "draft is missing"),
    "unknown key": (changed(rank=1), "unknown key rank"),
    "name": (changed(prompts=["a", "b"]), "prompts must have a name for each of 1 sequences, got 2"),
    "no sequence": (changed(ranks=[], prompts=[]), "ranks must have at least one sequence"),
    "no position": (changed(ranks=[[]]), r"ranks\[0\] must have ranks of the same depths at each position, got \[\]"),
    "no depth": (changed(ranks=[[[], []]]), r"ranks\[0\] must have a list of ranks at each position"),
    "depths": (changed(ranks=[[[1, 2], [3]]]), r"ranks\[0\] must have ranks of the same depths at each position, got \[1, 2\]"),
    "number": (changed(ranks=[[[1, 2], [3.5, 0]]]), r"ranks\[0\]\[1\]\[0\] must be a whole number"),
    "negative": (changed(ranks=[[[1, 2], [-1, 0]]]), r"ranks\[0\]\[1\]\[0\] must be between 0 and 256, got -1"),
    "above top": (changed(ranks=[[[1, 2], [4, 0]]]), r"ranks\[0\] must be between 0 and top=3, got 4"),
    "beyond the end": (changed(ranks=[[[1, 2], [3, 1]]]), r"ranks\[0\] must be 0 after the end, got others at depth 2"),
    "top": (changed(top=0), "top must be between 1 and 256, got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_logs_are_refused(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ParameterError, match=message):
        rank_log.load(path)


def test_a_log_without_ranks_is_refused_and_says_how_to_get_them(tmp_path: Path) -> None:
    done = call("rates", "family", "--nodes", "8", code=2)
    assert "nodes is used only with rank logs, and family has no ranks; record it with calibrate ranks" in done.stderr
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ParameterError, match="key ranks is missing"):
        rank_outcomes.RecordedRanks(str(path))


def test_drafts_that_cannot_be_recorded_are_refused() -> None:
    decoders = decoders_of("llama", "parallel")
    with pytest.raises(ParameterError, match=f"depth must be at most {COUNT}, the heads of .*, got {COUNT + 1}"):
        rank_logging.check_draft(decoders["target"], decoders["draft"], COUNT + 1)
    with pytest.raises(ParameterError, match="top must be between 1 and 29"):
        rank_logging.log_ranks(decoders["target"], decoders["draft"], [[1]], 4, 1, 30, HEADER)
    with pytest.raises(ParameterError, match="prompts must hold at least one prompt"):
        rank_logging.log_ranks(decoders["target"], decoders["draft"], [], 4, 1, 3, HEADER)
