"""Speculative decoding for beam search: several hypotheses are followed at once, and drafts save passes of the target.

Rule `exact` is Appendix A.4 of [Leviathan2023]. The draft model makes a beam search of its own, of u >= k hypotheses, for gamma
steps; the target scores all k + u gamma of them in one pass. A step is accepted if the target's k best are among the draft's u;
the first that is not is the target's own all the same. The output is that of a beam search with the target alone.

Rule `per-beam` is that of the deck on speculative decoding: every hypothesis makes a speculative step of its own, as in greedy
decoding; each of them is then gone on from by its k likeliest tokens, and of all these the k likeliest are kept. It is not exact:
what comes of a step differs in length, and a longer text is less likely than a shorter one, so the shorter ones win.

Both are greedy, as beam search is. A text ends with the last token asked for; there is no token that ends it before.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.draft_model import MAX_DRAFT
from model.methods.method_parameters import MethodParameters
from model.methods.peak_demand import Demand
from model.steps import Commit, Continuation, Fork, Forward, Join, LayerSpan, Read, Step, Steps

RULES = ("exact", "per-beam")
ARRANGEMENTS = ("batched", "sequential", "parallel")
MAX_BEAMS = 1000


@dataclass(frozen=True)
class Parameters(MethodParameters):
    """A beam search of k = `beams` hypotheses with drafts of gamma = `draft_length` tokens.

    `draft_beams` is u, how many hypotheses the draft follows (rule `exact` alone; without it k). `arrangement`: the hypotheses
    share the passes of one unit (`batched`), have passes of their own on it, one after another (`sequential`), or each a unit of
    its own with both models (`parallel`). The exact rule compares hypotheses at every step, so there passes are shared.

    Plain decoding, which speed-ups are over, is greedy, of one text; beam search without drafts is draft_length = 0.
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
                f"arrangement must be 'batched' for rule 'exact', which scores them all in one pass, got {self.arrangement!r};"
                " rule 'per-beam' takes the others"
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
        """Of COSTS those that it looks at with these parameters: one pass over all hypotheses starts no sub-process."""
        arrangement = table.get("arrangement", "batched")
        return cls.COSTS[: {"batched": 1, "sequential": 4}.get(str(arrangement), 5)]

    @property
    def exact(self) -> bool:
        """Whether the output is that of a beam search with the target alone: the rule decides."""
        return self.rule == "exact"

    @property
    def longest_draft(self) -> int:
        """The most tokens that a round drafts for a hypothesis."""
        return self.draft_length

    @property
    def draft_width(self) -> int:
        """Hypotheses that the draft follows."""
        return self.beams if self.draft_beams is None else self.draft_beams

    @property
    def several(self) -> bool:
        """Whether models follow several hypotheses in the same passes."""
        drafted = self.draft_width > 1 and self.draft_length > 0
        return self.arrangement == "batched" and (self.beams > 1 or drafted)

    @property
    def widest(self) -> int:
        """Tokens of the widest pass of the target that a measured cost must know."""
        if self.rule == "exact":
            return self.beams + self.draft_width * self.draft_length
        return (self.draft_length + 1) * (self.beams if self.arrangement == "batched" else 1)

    @property
    def units(self) -> int:
        """Compute units that it reserves."""
        return self.beams if self.arrangement == "parallel" else 1

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """What it may want at once: hypotheses on units of their own change places, all of them at the same time."""
        return Demand(self.units, self.units if cost.link else 1)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one. It returns the hypotheses kept last, best first.

    The text put out is that of the best hypothesis so far.
    """
    first = len(prompt) - 1
    target = BeamModel("target", parameters.layers, first, parameters.several)
    models = target, BeamModel("draft", parameters.draft_layers, first, parameters.several)
    if first:
        for model in models:
            yield Forward(model.role, tuple(prompt[:-1]), 0, LayerSpan(0, model.layers))
    # All hypotheses start as copies of the prompt; only the first has any probability, so that no text is found twice.
    scores = (0.0, *[-math.inf] * (parameters.beams - 1))
    beams = [Hypothesis(Node(prompt[-1], None, first), score) for score in scores]
    search = _exact if parameters.rule == "exact" else _per_beam
    return (yield from search(parameters, models, beams, first + tokens))


# --- Hypotheses, and models that have read some of them ------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A token of a text, with the text before it: None is the prompt up to its last token."""

    token: int
    before: Node | None
    position: int


class Hypothesis(NamedTuple):
    """A text by its last token, and the logarithm of its probability."""

    end: Node
    score: float


def texts(beams: Sequence[Hypothesis]) -> list[list[int]]:
    """What hypotheses say behind the prompt."""
    return [[node.token for node in _path(beam.end)[1:]] for beam in beams]


def _path(end: Node, at: int = 0) -> list[Node]:
    """The tokens of a text from position `at` on."""
    found = []
    node: Node | None = end
    while node is not None and node.position >= at:
        found.append(node)
        node = node.before
    return found[::-1]


@dataclass
class BeamModel:
    """A model, and what its cache holds behind the prompt: at each position some tokens, each with its place among them."""

    role: str
    layers: int
    first: int
    several: bool
    """Whether it follows several hypotheses, each pass then a tree; else a token always follows the one before it."""
    held: list[dict[Node | None, int]] = field(default_factory=list)

    def copy(self) -> BeamModel:
        """What a sub-process goes on from."""
        return BeamModel(self.role, self.layers, self.first, self.several, self.held[:])

    def read(self, ends: Sequence[Node]) -> Generator[Step, Any, tuple[Any, list[int]]]:
        """Read the texts that end with these tokens, all in one pass: its output, and where in it each of them stands."""
        at = min(self._lacking_from(end) for end in ends)
        place: dict[Node | None, int] = {}
        nodes: list[Node] = []
        for end in ends:
            for node in _path(end, at):
                if node not in place:
                    place[node] = len(nodes)
                    nodes.append(node)
        before: dict[Node | None, int] = self.held[at - self.first - 1] if at > self.first else {None: 0}
        tree = tuple([place[node.before] if node.position > at else -1 - before[node.before] for node in nodes])
        del self.held[at - self.first :]
        for node in sorted(nodes, key=lambda node: node.position):
            if node.position - self.first == len(self.held):
                self.held.append({})
            self.held[-1][node] = len(self.held[-1])
        tokens = tuple([node.token for node in nodes])
        layers = LayerSpan(0, self.layers)
        out = yield Forward(self.role, tokens, at, layers, heads=len(ends), tree=tree if self.several else ())
        return out, [place[end] for end in ends]

    def _lacking_from(self, end: Node) -> int:
        """The first position of a text that the cache does not hold; its last token is read in any case."""
        at, node = end.position, end.before
        while node is not None and not self._holds(node):
            at, node = node.position, node.before
        return at

    def _holds(self, node: Node) -> bool:
        level = node.position - self.first
        return level < len(self.held) and node in self.held[level]


# --- Appendix A.4: a draft that is itself a beam search ------------------------------------------------------------------


def _exact(parameters: Parameters, models: tuple[BeamModel, BeamModel], beams: list[Hypothesis], end: int) -> Steps:
    target, draft = models
    text: list[int] = []
    while beams[0].end.position < end:
        drafted: list[list[Hypothesis]] = []
        for _ in range(_draft_length(parameters, beams[0], end)):
            drafted.append((yield from _extended(draft, drafted[-1] if drafted else beams, parameters.draft_width)))
        beams = yield from _verified(target, beams, drafted)
        text = yield from _lead(text, beams[0], len(drafted))
    return beams


def _draft_length(parameters: Parameters, beam: Hypothesis, end: int) -> int:
    """As many tokens as wanted, and no more than leave the target one to give."""
    return min(parameters.draft_length, end - beam.end.position - 1)


def _extended(model: BeamModel, beams: list[Hypothesis], width: int) -> Generator[Step, Any, list[Hypothesis]]:
    """One step of a beam search: a pass over all hypotheses, and the `width` best of what goes on from them."""
    out, places = yield from model.read([beam.end for beam in beams])
    best = yield Read("beams", out, width=width, hypotheses=_scored(places, beams))
    ends = {place: beam.end for place, beam in zip(places, beams, strict=True)}
    return [_behind(ends[each.follows], each) for each in best]


def _scored(places: Sequence[int], beams: Sequence[Hypothesis]) -> tuple[tuple[int, float], ...]:
    return tuple([(place, beam.score) for place, beam in zip(places, beams, strict=True)])


def _behind(end: Node, found: Continuation) -> Hypothesis:
    return Hypothesis(Node(found.token, end, end.position + 1), found.score)


def _verified(
    model: BeamModel, beams: list[Hypothesis], drafted: Sequence[Sequence[Hypothesis]]
) -> Generator[Step, Any, list[Hypothesis]]:
    """Go on with the model's own best as long as all of them were drafted, and once more; one pass tells them all."""
    ends = [beam.end for step in (beams, *drafted) for beam in step]
    out, places = yield from model.read(ends)
    place, node = dict(zip(ends, places, strict=True)), dict(zip(places, ends, strict=True))
    for step in (*drafted, ()):
        known = {(place[beam.end.before], beam.end.token): beam.end for beam in step if beam.end.before is not None}
        hypotheses = _scored([place[beam.end] for beam in beams], beams)
        best = yield Read("beams", out, width=len(beams), hypotheses=hypotheses)
        if not all((each.follows, each.token) in known for each in best):
            break
        beams = [Hypothesis(known[each.follows, each.token], each.score) for each in best]
    return [_behind(node[each.follows], each) for each in best]


# --- The deck's rule: every hypothesis has a draft of its own ------------------------------------------------------------


class Branch(NamedTuple):
    """A hypothesis, the models that have read it, and the ended sub-process that has their caches, if any has."""

    beam: Hypothesis
    models: tuple[BeamModel, BeamModel]
    task: Any = None


def _per_beam(parameters: Parameters, models: tuple[BeamModel, BeamModel], beams: list[Hypothesis], end: int) -> Steps:
    branches = [Branch(beam, models) for beam in beams]
    text: list[int] = []
    # A text that has all its tokens waits until it is the best: then it stays so, as others only become less likely.
    while branches[0].beam.end.position < end:
        count = _draft_length(parameters, branches[0].beam, end)
        growing = [branch for branch in branches if branch.beam.end.position < end]
        if parameters.arrangement == "batched":
            grown = yield from _speculated(parameters, models, [branch.beam for branch in growing], end)
            found = [Branch(beam, models) for beam in grown]
        else:
            found = yield from _apart(parameters, growing, end)
        found += [branch for branch in branches if branch not in growing]
        branches = sorted(found, key=lambda branch: branch.beam.score, reverse=True)[: parameters.beams]
        text = yield from _lead(text, branches[0].beam, count)
    return [branch.beam for branch in branches]


def _apart(parameters: Parameters, branches: Sequence[Branch], end: int) -> Generator[Step, Any, list[Branch]]:
    """A sub-process for each hypothesis, which goes on from the caches of the one that found it."""
    bodies = tuple([_alone(parameters, branch, end) for branch in branches])
    units = tuple(range(len(branches))) if parameters.arrangement == "parallel" else (0,) * len(branches)
    tasks = yield Fork(bodies, units, tuple([branch.task for branch in branches]))
    values = yield Join(tuple(tasks))
    return [Branch(beam, models, task) for task, (models, beams) in zip(tasks, values, strict=True) for beam in beams]


def _alone(parameters: Parameters, branch: Branch, end: int) -> Steps:
    models = branch.models[0].copy(), branch.models[1].copy()
    return models, (yield from _speculated(parameters, models, [branch.beam], end))


def _speculated(
    parameters: Parameters, models: tuple[BeamModel, BeamModel], beams: Sequence[Hypothesis], end: int
) -> Generator[Step, Any, list[Hypothesis]]:
    """A speculative step of each hypothesis, all in the same passes: what goes on from what has been accepted of its draft."""
    target, draft = models
    counts = [_draft_length(parameters, beam, end) for beam in beams]
    lines = [[beam.end] for beam in beams]  # a hypothesis' last token, and what is drafted behind it
    for step in range(max(counts)):
        going = [(beam.score, line) for beam, line, count in zip(beams, lines, counts, strict=True) if step < count]
        out, places = yield from draft.read([line[-1] for _, line in going])
        for (score, line), place in zip(going, places, strict=True):
            # Its score changes nothing of which token is best, and tells the hypotheses of several processes apart.
            (best,) = yield Read("beams", out, hypotheses=((place, score),))
            line.append(_behind(line[-1], best).end)
    out, places = yield from target.read([node for line in lines for node in line])
    at, found = iter(places), []
    for beam, line in zip(beams, lines, strict=True):
        score = beam.score
        for node, place, guess in zip(line, [next(at) for _ in line], [*line[1:], None], strict=True):
            best = yield Read("beams", out, width=parameters.beams, hypotheses=((place, score),))
            if guess is None or best[0].token != guess.token:
                found += [_behind(node, each) for each in best]
                break
            score = best[0].score
    return found


def _lead(text: list[int], leader: Hypothesis, drafted: int) -> Generator[Step, Any, list[int]]:
    """Put out the text of the best hypothesis in the place of what led before."""
    (new,) = texts([leader])
    same = 0
    while same < min(len(text), len(new)) and text[same] == new[same]:
        same += 1
    yield Commit("round", tuple(new[same:]), drafted, len(text) - same)
    return new
