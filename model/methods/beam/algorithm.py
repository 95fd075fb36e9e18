"""Speculative decoding for beam search: several hypotheses are decoded at once, and drafts save passes of the target.

Rule `exact` is Appendix A.4 of [Leviathan2023]. The draft model runs its own beam search with u >= k hypotheses for gamma steps;
the target scores all k + u gamma tokens in one pass. A step is accepted if the target's k best hypotheses are among the draft's u;
the first rejected step is replaced by the target's own. The output is that of a beam search with the target alone.

Rule `per-beam` is that of the slides on speculative decoding: every hypothesis makes a separate greedy speculative step, is then
extended by its k most likely tokens, and the k most likely of all extended hypotheses are kept. It is not exact: the hypotheses
differ in length, and longer sequences are less likely, so shorter ones win.

Both rules are greedy, as beam search is. A sequence ends with the last requested token or with a stop token. Sequences of different
length are compared by their log-probability, not divided by their length. Rule `exact` keeps the ended sequences in addition to the
k that grow, as `generate(num_beams=k, length_penalty=0, early_stopping="never")` of transformers does: one that is among the k best
of its step ends, and the k best others go on. Decoding ends when an ended sequence is the best, because sequences only become less
likely. In rule `per-beam` a complete sequence remains one of the k. Drafts contain no stop token: only the target ends a sequence.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.claim_bounds import ClaimRule
from model.methods.draft_model import MAX_DRAFT
from model.methods.method_parameters import MethodParameters
from model.methods.peak_demand import Demand
from model.steps import Commit, Continuation, Fork, Forward, Join, LayerSpan, Read, Step, Steps

RULES = ("exact", "per-beam")
ARRANGEMENTS = ("batched", "sequential", "parallel")
MAX_BEAMS = 1000


@dataclass(frozen=True)
class Parameters(MethodParameters):
    """Parameters of speculative beam search.

    Speed-ups are relative to greedy decoding of one sequence. Beam search without drafts is draft_length = 0.

    Parameters
    ----------
    layers
        Layers of the target model.
    draft_length
        Drafted steps per round (gamma).
    beams
        Number of hypotheses (k).
    rule
        `exact` or `per-beam`.
    draft_beams
        Hypotheses of the draft model (u), for rule `exact`. Left out: k.
    arrangement
        `batched`: the hypotheses share the passes of one unit. `sequential`: they have separate passes, one after another, on one
        unit. `parallel`: each hypothesis has its own unit with both models. Rule `exact` compares hypotheses at every step and
        needs `batched`.
    draft_layers
        Layers of the draft model. Its time is set by the scenario's `cost_ratio`, not by its depth.
    sequences
        Sequences of a full batch.
    batching
        `lockstep` with several sequences.
    """

    layers: int
    draft_length: int
    beams: int
    rule: str = "exact"
    draft_beams: int | None = None
    arrangement: str = "batched"
    draft_layers: int = 1

    LABEL = "beam search"
    SHORT_LABEL = "beams"
    OUTCOMES = ("accept",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "dispatch", "dispatch_per_process", "dispatch_law", "link")
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length", "num_beams": "beams"})
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length", "cost_ratio"),
        needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"), ("cost_ratio",)),
        source="Theorem 3.8 of Leviathan et al., ICML 2023, arXiv:2211.17192, with the acceptance of a step of all beams",
        fixed_drafts=True, readings={"acceptance_rate": "draft_acceptance_rate"},
    )
    EXACT = True

    def __post_init__(self) -> None:
        self.check_batching()
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("draft_layers", self.draft_layers, 1, checks.MAX_LAYERS)
        checks.whole("draft_length", self.draft_length, 0, MAX_DRAFT)
        checks.whole("beams", self.beams, 1, MAX_BEAMS)
        checks.one_of("rule", self.rule, RULES)
        checks.one_of("arrangement", self.arrangement, ARRANGEMENTS)
        if self.rule == "exact" and self.arrangement != "batched":
            raise checks.ParameterError(
                f"arrangement must be 'batched' for rule 'exact', which scores all hypotheses in one pass, got"
                f" {self.arrangement!r}; use rule 'per-beam' for other arrangements"
            )
        if self.rule != "exact" and self.draft_beams is not None:
            given = checks.shown(self.draft_beams)
            raise checks.ParameterError(f"draft_beams must be left out for rule 'per-beam', got {given}; only 'exact' uses it")
        if self.draft_beams is not None:
            checks.whole("draft_beams", self.draft_beams, 1, MAX_BEAMS)
            if self.draft_beams < self.beams:
                raise checks.ParameterError(
                    f"draft_beams must be at least beams={self.beams}, got {self.draft_beams}; a narrower draft is never accepted"
                )

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters; the arrangement `batched` starts no sub-processes."""
        arrangement = table.get("arrangement", "batched")
        return cls.COSTS[: {"batched": 1, "sequential": 4}.get(str(arrangement), 5)]

    @property
    def exact(self) -> bool:
        """True if the output is that of a beam search with the target alone."""
        return self.rule == "exact"

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens of a hypothesis in a round."""
        return self.draft_length

    @property
    def draft_width(self) -> int:
        """Hypotheses of the draft model."""
        return self.beams if self.draft_beams is None else self.draft_beams

    @property
    def several_hypotheses(self) -> bool:
        """True if passes cover several hypotheses."""
        drafted = self.draft_width > 1 and self.draft_length > 0
        return self.arrangement == "batched" and (self.beams > 1 or drafted)

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target."""
        if self.rule == "exact":
            return self.beams + self.draft_width * self.draft_length
        return (self.draft_length + 1) * (self.beams if self.arrangement == "batched" else 1)

    @property
    def units(self) -> int:
        """Compute units that are reserved."""
        return self.beams if self.arrangement == "parallel" else 1

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand: all hypotheses may move between units at the same time."""
        return Demand(self.units, self.units if cost.link else 1)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token; return the final hypotheses, best first.

    Hypotheses also end with a token of `stop`, and decoding ends when the best one has ended.

    The committed output is always that of the currently best hypothesis. With `stop` it is what all hypotheses begin with, until
    the best one has ended: another may end earlier, and the output is never longer than the one in the end.
    """
    first = len(prompt) - 1
    target = BeamModel("target", parameters.layers, first, parameters.several_hypotheses)
    models = target, BeamModel("draft", parameters.draft_layers, first, parameters.several_hypotheses)
    if first:
        for model in models:
            yield Forward(model.role, tuple(prompt[:-1]), 0, LayerSpan(0, model.layers))
    # All hypotheses start as copies of the prompt; only the first has nonzero probability, which avoids duplicates.
    scores = (0.0, *[-math.inf] * (parameters.beams - 1))
    beams = [Hypothesis(Node(prompt[-1], None, first), score) for score in scores]
    search = _exact if parameters.rule == "exact" else _per_beam
    return (yield from search(parameters, models, beams, first + tokens, stop))


# --- Hypotheses, and models with the hypotheses in their caches ----------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A token of a sequence, with the node before it: None stands for the prompt without its last token."""

    token: int
    before: Node | None
    position: int


class Hypothesis(NamedTuple):
    """A sequence, as the node of its last token, and the logarithm of its probability."""

    end: Node
    score: float


def token_lists(beams: Sequence[Hypothesis]) -> list[list[int]]:
    """Tokens of the hypotheses after the prompt."""
    return [[node.token for node in _path(beam.end)[1:]] for beam in beams]


def _path(end: Node, at: int = 0) -> list[Node]:
    """Nodes of a sequence from position `at` on."""
    found = []
    node: Node | None = end
    while node is not None and node.position >= at:
        found.append(node)
        node = node.before
    return found[::-1]


@dataclass
class BeamModel:
    """A model and the content of its KV cache after the prompt: the nodes at each position, with their index there."""

    role: str
    layers: int
    first: int
    several_hypotheses: bool
    """True if it decodes several hypotheses and its passes are trees; else each token follows the one before."""
    cached_nodes: list[dict[Node | None, int]] = field(default_factory=list)

    def copy(self) -> BeamModel:
        """Copy for a sub-process."""
        return BeamModel(self.role, self.layers, self.first, self.several_hypotheses, self.cached_nodes[:])

    def read(self, ends: Sequence[Node]) -> Generator[Step, Any, tuple[Any, list[int]]]:
        """Run one pass over the sequences that end with these nodes; return its output and the index of each end in it."""
        at = min(self._lacking_from(end) for end in ends)
        place: dict[Node | None, int] = {}
        nodes: list[Node] = []
        for end in ends:
            for node in _path(end, at):
                if node not in place:
                    place[node] = len(nodes)
                    nodes.append(node)
        before: dict[Node | None, int] = self.cached_nodes[at - self.first - 1] if at > self.first else {None: 0}
        tree = tuple([place[node.before] if node.position > at else -1 - before[node.before] for node in nodes])
        del self.cached_nodes[at - self.first :]
        for node in sorted(nodes, key=lambda node: node.position):
            if node.position - self.first == len(self.cached_nodes):
                self.cached_nodes.append({})
            self.cached_nodes[-1][node] = len(self.cached_nodes[-1])
        tokens = tuple([node.token for node in nodes])
        layers = LayerSpan(0, self.layers)
        out = yield Forward(self.role, tokens, at, layers, heads=len(ends), tree=tree if self.several_hypotheses else ())
        return out, [place[end] for end in ends]

    def _lacking_from(self, end: Node) -> int:
        """First position of a sequence that the cache lacks; the last token is always read."""
        at, node = end.position, end.before
        while node is not None and not self._holds(node):
            at, node = node.position, node.before
        return at

    def _holds(self, node: Node) -> bool:
        level = node.position - self.first
        return level < len(self.cached_nodes) and node in self.cached_nodes[level]


# --- Appendix A.4: a draft that is itself a beam search ------------------------------------------------------------------


def _exact(
    parameters: Parameters, models: tuple[BeamModel, BeamModel], beams: list[Hypothesis], end: int, stop: Collection[int]
) -> Steps:
    target, draft = models
    sequence: list[int] = []
    search = Search(beams, [])
    while not search.complete and search.growing[0].end.position < end:
        drafted: list[list[Hypothesis]] = []
        for _ in range(_draft_length(parameters, search.growing[0], end)):
            drafted.append((yield from _extended(draft, drafted[-1] if drafted else search.growing, parameters.draft_width, stop)))
        search = yield from _verified(target, search, drafted, parameters.beams, stop)
        over = search.complete or search.growing[0].end.position >= end
        sequence = yield from _lead(sequence, search.best[:1] if over or not stop else search.best, len(drafted))
    return search.best[: parameters.beams]


class Search(NamedTuple):
    """State of a beam search: hypotheses that grow, and those that ended with a stop token, each best first."""

    growing: list[Hypothesis]
    ended: list[Hypothesis]

    @property
    def best(self) -> list[Hypothesis]:
        """All hypotheses, best first; of equal ones, ended ones first."""
        return sorted([*self.ended, *self.growing], key=lambda each: each.score, reverse=True)

    @property
    def complete(self) -> bool:
        """True if an ended hypothesis is the best: the others only become less likely."""
        return bool(self.ended) and self.best[0] is self.ended[0]

    def step(self, found: Sequence[Continuation], ends: Mapping[int, Node], width: int, stop: Collection[int]) -> Search:
        """The search after one step, given the best continuations: ended ones count only among the `width` best."""
        ended = [_continued(ends[each.follows], each) for each in found[:width] if each.token in stop]
        growing = [_continued(ends[each.follows], each) for each in found if each.token not in stop][:width]
        return Search(growing, Search(ended, self.ended).best[:width])


def _candidates(width: int, stop: Collection[int]) -> int:
    """Continuations to read so that `width` of them do not end: each hypothesis has one for each stop token."""
    return width * (1 + len(stop))


def _draft_length(parameters: Parameters, beam: Hypothesis, end: int) -> int:
    """Tokens to draft for a hypothesis: the target emits the last token itself."""
    return min(parameters.draft_length, end - beam.end.position - 1)


def _extended(
    model: BeamModel, beams: list[Hypothesis], width: int, stop: Collection[int]
) -> Generator[Step, Any, list[Hypothesis]]:
    """One step of a beam search: a pass over all hypotheses, and their `width` best continuations that do not end."""
    out, places = yield from model.read([beam.end for beam in beams])
    best = yield Read("beams", out, width=_candidates(width, stop), hypotheses=_scored(places, beams))
    ends = {place: beam.end for place, beam in zip(places, beams, strict=True)}
    return Search(beams, []).step(best, ends, width, stop).growing


def _scored(places: Sequence[int], beams: Sequence[Hypothesis]) -> tuple[tuple[int, float], ...]:
    return tuple([(place, beam.score) for place, beam in zip(places, beams, strict=True)])


def _continued(end: Node, found: Continuation) -> Hypothesis:
    return Hypothesis(Node(found.token, end, end.position + 1), found.score)


def _verified(
    model: BeamModel, search: Search, drafted: Sequence[Sequence[Hypothesis]], width: int, stop: Collection[int]
) -> Generator[Step, Any, Search]:
    """Accept steps as long as all of the model's best hypotheses were drafted, and add one more step; all from one pass."""
    ends = [beam.end for step in (search.growing, *drafted) for beam in step]
    out, places = yield from model.read(ends)
    place, node = dict(zip(ends, places, strict=True)), dict(zip(places, ends, strict=True))
    for step in (*drafted, ()):
        known = {(beam.end.before, beam.end.token): beam.end for beam in step}
        hypotheses = _scored([place[beam.end] for beam in search.growing], search.growing)
        best = yield Read("beams", out, width=_candidates(width, stop), hypotheses=hypotheses)
        search = search.step(best, node, width, stop)
        if search.complete or not all((beam.end.before, beam.end.token) in known for beam in search.growing):
            break
        search = Search([Hypothesis(known[end.before, end.token], score) for end, score in search.growing], search.ended)
    return search


# --- Rule per-beam: every hypothesis has a separate draft ----------------------------------------------------------------


class Branch(NamedTuple):
    """A hypothesis, its models, and the ended sub-process that has their caches, if any."""

    beam: Hypothesis
    models: tuple[BeamModel, BeamModel]
    task: Any = None


def _per_beam(
    parameters: Parameters, models: tuple[BeamModel, BeamModel], beams: list[Hypothesis], end: int, stop: Collection[int]
) -> Steps:
    branches = [Branch(beam, models) for beam in beams]
    sequence: list[int] = []
    # A complete sequence waits until it is the best; then it remains the best, because others only become less likely.
    while _grows(branches[0].beam, end, stop):
        count = _draft_length(parameters, branches[0].beam, end)
        growing = [branch for branch in branches if _grows(branch.beam, end, stop)]
        if parameters.arrangement == "batched":
            grown = yield from _speculated(parameters, models, [branch.beam for branch in growing], end, stop)
            found = [Branch(beam, models) for beam in grown]
        else:
            found = yield from _apart(parameters, growing, end, stop)
        found += [branch for branch in branches if branch not in growing]
        branches = sorted(found, key=lambda branch: branch.beam.score, reverse=True)[: parameters.beams]
        beams = [branch.beam for branch in branches]
        sequence = yield from _lead(sequence, beams if stop and _grows(beams[0], end, stop) else beams[:1], count)
    return [branch.beam for branch in branches]


def _grows(beam: Hypothesis, end: int, stop: Collection[int]) -> bool:
    """True if a sequence is not complete; a stop token at the end of the prompt does not end it."""
    return beam.end.position < end and (beam.end.before is None or beam.end.token not in stop)


def _apart(
    parameters: Parameters, branches: Sequence[Branch], end: int, stop: Collection[int]
) -> Generator[Step, Any, list[Branch]]:
    """Extend each hypothesis in a sub-process that starts from the caches of the sub-process which generated it."""
    bodies = tuple([_alone(parameters, branch, end, stop) for branch in branches])
    units = tuple(range(len(branches))) if parameters.arrangement == "parallel" else (0,) * len(branches)
    tasks = yield Fork(bodies, units, tuple([branch.task for branch in branches]))
    values = yield Join(tuple(tasks))
    return [Branch(beam, models, task) for task, (models, beams) in zip(tasks, values, strict=True) for beam in beams]


def _alone(parameters: Parameters, branch: Branch, end: int, stop: Collection[int]) -> Steps:
    models = branch.models[0].copy(), branch.models[1].copy()
    return models, (yield from _speculated(parameters, models, [branch.beam], end, stop))


def _speculated(
    parameters: Parameters, models: tuple[BeamModel, BeamModel], beams: Sequence[Hypothesis], end: int, stop: Collection[int]
) -> Generator[Step, Any, list[Hypothesis]]:
    """Make a speculative step of each hypothesis, all in shared passes; return the continuations of the accepted tokens.

    A draft ends before a stop token, which is the target's to add.
    """
    target, draft = models
    counts = [_draft_length(parameters, beam, end) for beam in beams]
    lines = [[beam.end] for beam in beams]  # last token of each hypothesis and the tokens drafted after it
    for step in range(max(counts)):
        drafting = zip(beams, lines, counts, strict=True)
        going = [(beam.score, line) for beam, line, count in drafting if step < count and len(line) == step + 1]
        if not going:
            break
        out, places = yield from draft.read([line[-1] for _, line in going])
        for (score, line), place in zip(going, places, strict=True):
            # The score does not affect the best token; it distinguishes the hypotheses of several processes.
            (best,) = yield Read("beams", out, hypotheses=((place, score),))
            if best.token not in stop:
                line.append(_continued(line[-1], best).end)
    out, places = yield from target.read([node for line in lines for node in line])
    at, found = iter(places), []
    for beam, line in zip(beams, lines, strict=True):
        score = beam.score
        for node, place, guess in zip(line, [next(at) for _ in line], [*line[1:], None], strict=True):
            best = yield Read("beams", out, width=parameters.beams, hypotheses=((place, score),))
            if guess is None or best[0].token != guess.token:
                found += [_continued(node, each) for each in best]
                break
            score = best[0].score
    return found


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the beginning that two sequences share."""
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)


def _lead(sequence: list[int], beams: Sequence[Hypothesis], drafted: int) -> Generator[Step, Any, list[int]]:
    """Commit what all these sequences begin with, in place of the output so far: all of it for the best hypothesis alone."""
    whole = token_lists(beams)
    new = whole[0][: min(_common(whole[0], each) for each in whole)]
    same = _common(sequence, new)
    yield Commit("round", tuple(new[same:]), drafted, len(sequence) - same)
    return new
