"""Theorems on tree drafts: expected verdicts, and faults that refute each theorem."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.methods.tree import algorithm, draft_trees, theory, tree_rounds
from model.methods.tree.draft_trees import ROOT, DraftTree, OptimalTrees
from model.methods.tree.tree_rounds import Endings
from model.outcomes.rank_laws import RankRates
from model.serving.decodings import Generators
from model.serving.scheduler import CACHED, Scheduler
from model.serving.tree_drafts import ServedTree, TreeArrays
from model.steps import Read
from sim.theorems import select
from sim.theorems.of_methods import tree as statements
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import Fault, assert_fails_on_small_example, assert_fault_shows, verdict_tests, with_fault

OWN = select("tree")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Faults ---


def first_child(right: Any, drafted: Any, below: Any, token: int) -> Any:
    """Accept the first child unread."""
    return below[0] if below else None


def only_first_child(right: Any, drafted: Any, below: Any, token: int) -> Any:
    """Compare the target's token with the first child only."""
    return right(drafted, below[:1], token)


def never_accepts(right: Any, drafted: Any, below: Any, token: int) -> Any:
    return None


def no_memory(right: Any, *args: Any) -> Any:
    """Forget the rejected tokens in all reads."""
    return (yield from changed_reads(right(*args), lambda step: step._replace(rejected=())))


def all_rejected(right: Any, *args: Any) -> Any:
    """Draw from the target's distribution where all candidates were rejected."""
    return (yield from changed_reads(
        right(*args), lambda step: Read("sample", step.output, step.offset) if step.kind == "residual" else step
    ))  # fmt: skip


def draft_unchanged(right: Any, *args: Any) -> Any:
    """Test against the draft's whole distribution."""
    return (yield from changed_reads(
        right(*args), lambda step: step if step.against is not None else step._replace(rejected=())
    ))  # fmt: skip


def changed_reads(steps: Any, change: Any) -> Any:
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield change(step) if isinstance(step, Read) else step


def one_pass_less(right: Any, parameters: Any, cost: Any, tokens: int) -> Any:
    found = right(parameters, cost, tokens)
    less = 0.25 * (found.levels > 0)[:, None]
    return found._replace(time=found.time - less, busy=found.busy - less)


def never_cut(right: Any, parameters: Any, tokens: int) -> Any:
    return np.full(tokens, parameters.levels)


def stops_at_leaf(right: Any, self: Any, ranks: Any) -> Any:
    """End one level early."""
    return right(self, ranks[..., :-1, :]) if ranks.shape[-2] > 1 else right(self, ranks)


def equal_shares(right: Any, self: Any, rates: Any) -> Any:
    found = right(self, rates)
    return np.full(len(found), 1 / len(found))


def large_trees_fail(right: Any, self: Any, rates: Any) -> Any:
    found = right(self, rates)
    return found if self.tree.nodes < 3 else np.eye(len(found))[0]


def one_deeper(right: Any, parameters: Any, law: Any, levels: int) -> Any:
    return right(parameters, law, levels) + 1


def last_depth_fails(right: Any, self: Any, table: Any, *args: Any) -> Any:
    found = right(self, table, *args)
    found[-1] = 0
    return found


def one_node_less(right: Any, rates: Any, nodes: int, depth: int, width: int) -> Any:
    return right(rates, max(nodes - 1, 1), depth, width)


def more_nodes(right: Any, rates: Any, nodes: int, depth: int, width: int) -> Any:
    return right(rates, nodes + 2, depth, width)


def smaller(right: Any, self: Any, nodes: int) -> Any:
    return right(self, max(nodes - 1, 1))


def squared(right: Any, self: Any, *args: Any) -> None:
    right(self, *args)
    self.accepted = self.accepted**2


def last_ones(right: Any, scored: Any, count: int) -> Any:
    """The later half of the candidates, with all of their ancestors."""
    kept = right(scored, count)
    return kept[: max(len(kept) // 2, 1)]


def own_rate_only(right: Any, self: Any, rates: Any) -> Any:
    """Forget the rates of the ancestors."""
    return np.array([rates[depth - 1][rank - 1] for depth, rank in zip(self.depths, self.ranks, strict=True)])


def slower_by_nodes(right: Any, tree: Any, *args: Any, **named: Any) -> float:
    return float(right(tree, *args, **named)) * (1 + tree.nodes)


def nine_tenths(right: Any, *args: Any, **named: Any) -> Any:
    return 0.9 * right(*args, **named)


def by_depth_only(right: Any, tree: Any, rates: Any) -> float:
    return 1.0 + sum(rates[level][0] for level in range(tree.depth))


def unchanged(right: Any, p: Any, q: Any, rejected: Any) -> Any:
    return p, q


def in_order(right: Any, q: Any, tokens: Any) -> Any:
    return tuple(sorted(right(q, tokens)))


def same_target(right: Any, p: Any, q: Any) -> Any:
    return p


def no_rank(right: Any, p: Any, q: Any, candidates: int) -> Any:
    """Lose the probability of a second acceptance, and raise that of none."""
    found = right(p, q, candidates)
    return [found[0] + Fraction(1, 2) * (candidates > 1), *found[1:]]


def to_the_root(right: Any, parameters: Any, *args: Any) -> Any:
    """Let every verified node follow the text's last token."""
    step = right(parameters, *args)
    return step._replace(tree=(step.tree[0], *[0] * (len(step.tree) - 1))) if step.tree else step


def all_read(self: DraftTree) -> frozenset[int]:
    return frozenset(range(self.nodes))


def as_text(right: Any, drafted: Any, path: Any) -> Any:
    """Take the accepted node for the first of its depth."""
    return 0


def first_ranks(right: Any, drafted: Any, path: Any, room: int) -> Any:
    """Take every accepted node for the first candidate."""
    ranks, candidates = right(drafted, path, room)
    return tuple([min(rank, 1) for rank in ranks]), candidates


def whole_room(right: Any, drafted: Any, path: Any, room: int) -> Any:
    """Count candidates that could not be verified."""
    return right(drafted, path, room + 1)


def pass_less(right: Any, *args: Any) -> Any:
    found = right(*args)
    return found._replace(drafts=found.drafts[:-1])


def no_nodes(right: Any, self: Any, each: Any, limits: Any) -> Any:
    """Count sequences where the draft reads several nodes of each."""
    found = right(self, each, limits)
    return found._replace(drafts=[min(count, limits.size) for count in found.drafts])


def level_more(right: Any, self: Any, limits: Any) -> Any:
    """Draft a level that has more nodes than allowed."""
    return np.minimum(right(self, limits) + 1, len(self.sizes) - 1)


def nodes_stay(right: Any, self: Any, plan: Any, emitted: Any) -> Any:
    """Keep the positions of rejected nodes."""
    self.table[CACHED, plan.decoding] += plan.limits
    return right(self, plan, emitted)


def blocks_of_one(right: Any, self: Any, decoding: Any, limits: Any) -> Any:
    """Give a request blocks for one node."""
    kept, _, preempted = right(self, decoding, np.minimum(limits, 1))
    return kept, limits[: kept.size], preempted


def never_accepts_arrays(right: Any, self: Any, each: Any, drafted: Any) -> Any:
    return np.minimum(right(self, each, drafted), 1)


FAULTS: list[tuple[str, str, Fault]] = [
    ("43a", "one pass less", with_fault(one_pass_less, tree_rounds, "prices")),
    ("43a", "never cut", with_fault(never_cut, tree_rounds, "levels_of")),
    ("43a", "a level early", with_fault(stops_at_leaf, Endings, "of_ranks")),
    ("43a", "only the first child", with_fault(only_first_child, algorithm, "_child_with")),
    ("43b", "one pass less", with_fault(one_pass_less, tree_rounds, "prices")),
    ("43c", "equal shares", with_fault(equal_shares, Endings, "ends_among")),
    ("43c", "never cut", with_fault(never_cut, tree_rounds, "levels_of")),
    ("43d", "one deeper", with_fault(one_deeper, theory, "_sum_of_depths")),
    ("43d", "all read", lambda patch: patch.setattr(DraftTree, "passed", property(all_read))),
    ("43e", "first child", with_fault(first_child, algorithm, "_child_with")),
    ("43e", "all follow the root", with_fault(to_the_root, algorithm, "verification_pass")),
    ("43f", "slow layers", with_fault(lambda right, *args: [2 * each for each in right(*args)], UnitCost, "layer_times_of")),
    ("43g", "last depth fails", with_fault(last_depth_fails, RankRates, "_ranks")),
    ("43g", "one pass less", with_fault(one_pass_less, tree_rounds, "prices")),
    ("43h", "never accepts", with_fault(never_accepts, algorithm, "_child_with")),
    ("43i", "one node less", with_fault(one_node_less, draft_trees, "confident")),
    ("43i", "all follow the root", with_fault(to_the_root, algorithm, "verification_pass")),
    ("43j", "first ranks", with_fault(first_ranks, algorithm, "ranks_of")),
    ("43j", "candidates after the end", with_fault(whole_room, algorithm, "ranks_of")),
    ("43j", "only the first child", with_fault(only_first_child, algorithm, "_child_with")),
    ("47a", "a pass less", with_fault(pass_less, TreeArrays, "draft")),
    ("47a", "a level more", with_fault(level_more, ServedTree, "levels")),
    ("47a", "passes count sequences", with_fault(no_nodes, Generators, "draft")),
    ("47b", "first child", with_fault(first_child, algorithm, "_child_with")),
    ("47c", "rejected nodes stay", with_fault(nodes_stay, Scheduler, "complete")),
    ("47c", "blocks of one node", with_fault(blocks_of_one, Scheduler, "_reserve")),
    ("47d", "never accepts", with_fault(never_accepts_arrays, TreeArrays, "verify")),
    ("47d", "a pass less", with_fault(pass_less, TreeArrays, "draft")),
    ("47e", "a pass less", with_fault(pass_less, Generators, "draft")),
    ("44a", "no memory", with_fault(no_memory, algorithm, "_by_rejections")),
    ("44a", "the whole draft", with_fault(draft_unchanged, algorithm, "_by_rejections")),
    ("44a", "no residual", with_fault(all_rejected, algorithm, "_by_rejections")),
    ("44a", "first child", with_fault(first_child, algorithm, "_child_with")),
    ("44a", "another node's cache", with_fault(as_text, algorithm, "_place_of_last")),
    ("44b", "first child", with_fault(first_child, algorithm, "_child_with")),
    ("44c", "all follow the root", with_fault(to_the_root, algorithm, "verification_pass")),
    ("44d", "target unchanged", with_fault(unchanged, statements, "after_rejections")),
    ("44e", "in order", with_fault(in_order, statements, "without")),
    ("44e", "none accepted", with_fault(no_rank, statements, "_rank_law")),
    ("44g", "target unchanged", with_fault(same_target, statements, "residual")),
    ("45a", "own rate only", with_fault(own_rate_only, DraftTree, "chances")),
    ("45b", "smaller", with_fault(smaller, OptimalTrees, "tree")),
    ("45c", "squared", with_fault(squared, OptimalTrees, "__init__")),
    ("45e", "fewer read", with_fault(last_ones, draft_trees, "likeliest")),
    ("45f", "more nodes", with_fault(more_nodes, draft_trees, "confident")),
    ("45h", "fewer read", with_fault(last_ones, draft_trees, "likeliest")),
    ("45i", "large trees fail", with_fault(large_trees_fail, Endings, "ends_among")),
    ("46a", "slower by nodes", with_fault(slower_by_nodes, theory, "round_time")),
    ("46b", "slower by nodes", with_fault(slower_by_nodes, theory, "round_time")),
    ("46d", "nine tenths", with_fault(nine_tenths, theory, "speedup")),
    ("46d", "equal shares", with_fault(equal_shares, Endings, "ends_among")),
    ("46e", "depth only", with_fault(by_depth_only, theory, "expected_tokens")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert ROOT == -1
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("tree", number, fault, monkeypatch)
