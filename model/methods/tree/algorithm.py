"""Tree drafts: the draft offers several candidates at each position, and the target verifies the whole tree in one pass.

A round drafts a tree of tokens after the text and verifies it in one pass, in which each node sees the text and its own ancestors
(`Forward.tree`). From the root on, the target's token decides which child is accepted; the round ends where it is none of them, and
emits the target's own token there. So a round emits one token more than it accepts, as with a chain, but a position is lost only if
the target's token is none of several candidates.

Greedy decoding accepts the child that is the target's own choice. Sampling has two exact rules:

* `candidates = "likeliest"`: the draft's likeliest tokens, which are no random choice. The target's own draw decides: if it is a
  child, that child is accepted.
* `candidates = "distinct"`: tokens drawn from the draft without replacement, tried one after another. Each is accepted with
  probability min(1, p/q); a rejection turns p into norm(max(0, p - q)) and removes the token from q. This is multi-step
  speculative sampling [Miao2024] with draws without replacement, Algorithm 2 of [Chen2024].

What drafts is the `drafter`:

* `model`: a draft model, one pass per depth over all nodes that have children [Miao2024].
* `heads`: a draft head that reads the target's states, in passes by depth as well [Li2024b].
* `parallel`: one pass gives candidates for all depths, so that all nodes at one depth have the same candidates, as with Medusa's
  heads [Cai2024]. The tree is a part of their Cartesian product.

The `shape` of the tree:

* `chain`: one candidate per position; speculative decoding.
* `full`: each node has `width` children, down to `draft_depth`.
* `listed`: `parents`, as in Medusa's tuned trees.
* `sequoia`: the tree of `nodes` nodes that accepts most tokens at `rank_rates` [Chen2024].
* `eagle-2`: grows by the draft's confidence in each round [Li2024b]: the `width` likeliest nodes of each depth get `width`
  children each, down to `draft_depth`; then the `nodes` likeliest of all are verified.

[Cai2024] T. Cai et al. Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads. ICML 2024,
arXiv:2401.10774.
[Chen2024] Z. Chen et al. Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding. arXiv:2402.12374.
[Li2024b] Y. Li et al. EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees. EMNLP 2024, arXiv:2406.16858.
[Miao2024] X. Miao et al. SpecInfer: Accelerating LLM Serving with Tree-based Speculative Inference and Verification. ASPLOS 2024,
arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from model.base import checks
from model.methods.claim_bounds import ClaimRule
from model.methods.draft_model import COLOCATED, BudgetedDraft, DraftModel
from model.methods.method_parameters import CONTINUOUS, LOCKSTEP
from model.methods.proposals import Known, Proposal, Proposals
from model.methods.speculative.algorithm import DRAFTERS, HEADS, MODEL, PARALLEL, Model, read_with_states, start
from model.methods.tree import draft_trees
from model.methods.tree.draft_plans import draft_plan
from model.methods.tree.draft_trees import ROOT, DraftTree, likeliest
from model.steps import (
    DISTINCT,
    GREEDY,
    LIKELIEST,
    MASK,
    SAMPLED,
    Commit,
    DraftLevels,
    DraftLimit,
    Features,
    Forward,
    Read,
    ReadEach,
    Step,
    Steps,
    ended,
)

CHAIN, FULL, LISTED, SEQUOIA, EAGLE_2 = SHAPES = ("chain", "full", "listed", "sequoia", "eagle-2")
NEEDS = MappingProxyType({
    CHAIN: ("draft_depth",), FULL: ("draft_depth", "width"), LISTED: ("parents",),
    SEQUOIA: ("nodes", "draft_depth", "rank_rates"), EAGLE_2: ("nodes", "draft_depth", "width"),
})  # fmt: skip
"""Parameters that each shape needs."""
MAY_HAVE = MappingProxyType({SEQUOIA: ("width",), EAGLE_2: ("rank_rates",)})
"""Parameters that it may have besides."""
LIKELIEST_TOKENS, DISTINCT_TOKENS = CANDIDATES = ("likeliest", "distinct")
PROPOSED_NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes of the trees that are proposed for advice."""


@lru_cache(maxsize=4096)  # trees of different depths of the same rates ask for the same trees of fewer levels
def _made(make: Callable[..., DraftTree], *arguments: Any) -> DraftTree:
    return make(*arguments)


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of tree drafts.

    Parameters
    ----------
    layers
        Layers of the target model.
    shape
        `chain`, `full`, `listed`, `sequoia` or `eagle-2`.
    draft_depth
        Largest depth: tokens on the longest path of the tree (not for `listed`).
    width
        Candidates per node: `full`, `eagle-2`, and the largest number for `sequoia`.
    nodes
        Nodes of the tree, which are verified together with the last token of the text: `sequoia` and `eagle-2`.
    parents
        For `listed`: parent of each node, -1 for children of the root, in breadth-first order. The first child of a node is the
        draft's first candidate, the second its second.
    rank_rates
        Probabilities by which the tree is made: `rank_rates[i][r]` that the target's token at depth i + 1 is the draft's candidate
        r + 1, if the tokens before are right. A single list of rates holds at every depth. For `eagle-2` a list of such tables or
        lists, one for each class of the outcomes: they are the draft's confidences in a simulation, and real models need none.
    drafter
        `model`: a draft model, one pass per depth. `heads`: a draft head that reads the target's states, one pass per depth.
        `parallel`: a draft that reads them and gives the candidates of all depths in one pass.
    candidates
        `likeliest`: the draft's likeliest tokens. `distinct`: drawn without replacement, in sampling.
    sampled
        Sample tokens instead of greedy decoding.
    placement
        `colocated`: draft and target share a unit; `separate`: each has its own unit.
    draft_layers
        Layers of the draft model. Its time is set by the scenario's `cost_ratio`, not by its depth.
    sequences
        Sequences of a full batch.
    batching
        `continuous` or `lockstep`.
    context_budget
        Largest number of cached positions of each sequence that a pass of the draft model reads besides its own tokens;
        None: all.
    """

    layers: int
    shape: str
    draft_depth: int | None = None
    width: int | None = None
    nodes: int | None = None
    parents: tuple[int, ...] | None = None
    rank_rates: tuple[Any, ...] | None = None
    drafter: str = MODEL
    candidates: str = LIKELIEST_TOKENS
    sampled: bool = False

    LABEL = "tree drafts"
    SHORT_LABEL = "trees"
    OUTCOMES = ("rank",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    EXACT = True
    BATCHINGS = (CONTINUOUS, LOCKSTEP)
    REFUSAL_REASON = "static batches, whose sequences follow different paths of their trees, are not implemented"
    ALIASES = MappingProxyType({"speculative_num_steps": "draft_depth", "speculative_eagle_topk": "width", "top_k": "width"})
    CLAIMS = ClaimRule(
        terms=("mean_acceptance_length",), needs=(("mean_acceptance_length",),),
        source="tokens per pass of the target, with drafts that cost no time: Section 3.1 of Chen et al., arXiv:2402.12374",
        names={"specinfer": "", "sequoia": "", "token tree verification": "", "tree speculation": ""},
    )  # fmt: skip

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """The trees of `PROPOSED_NODES` nodes that accept most tokens at the rank rates, for each depth up to the longest draft."""
        if known.rank_rates is None:
            return Proposals(missing="acceptance by rank and depth of the draft's candidates: --rank-rates")
        rates = known.rank_rates
        drafter = MODEL if known.independent_draft else PARALLEL if known.parallel_draft else HEADS
        depths = range(1, min(len(rates), max(known.draft_lengths)) + 1)
        return Proposals(tuple(
            Proposal(
                {
                    "layers": known.layers, "shape": SEQUOIA, "nodes": nodes, "draft_depth": depth, "drafter": drafter,
                    "rank_rates": rates[:depth],
                },
                {"kind": "by-depth", "rank_rates": rates[:depth]},
                "a pass of the draft takes the same time for any number of candidates", f"{nodes} nodes, depth {depth}",
            )
            for depth in depths for nodes in PROPOSED_NODES if nodes > depth
        ))  # fmt: skip

    def __post_init__(self) -> None:
        checks.one_of("shape", self.shape, SHAPES)
        checks.one_of("drafter", self.drafter, DRAFTERS)
        checks.one_of("candidates", self.candidates, CANDIDATES)
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_budgets()
        self.check_batching()
        self._check_shape()
        if self.drafter != MODEL and self.placement != COLOCATED:
            raise checks.ParameterError(
                f"placement must be '{COLOCATED}' with drafter='{self.drafter}', which reads the target's states, got"
                f" {self.placement!r}; set placement, or drafter = '{MODEL}'"
            )
        if self.candidates == DISTINCT_TOKENS and not self.sampled:
            raise checks.ParameterError(
                f"candidates must be '{LIKELIEST_TOKENS}' in greedy decoding, got '{DISTINCT_TOKENS}': tokens are drawn without"
                " replacement to sample exactly; set sampled = true, or leave candidates out"
            )
        if self.shape == EAGLE_2 and (self.candidates == DISTINCT_TOKENS or self.drafter == PARALLEL):
            name, wrong = ("candidates", self.candidates) if self.candidates == DISTINCT_TOKENS else ("drafter", self.drafter)
            raise checks.ParameterError(
                f"{name} must be {'likeliest' if name == 'candidates' else 'model or heads'} with shape='{EAGLE_2}', whose nodes"
                f" are chosen by their confidence, got {wrong!r}; set {name}, or another shape"
            )
        self.trees  # noqa: B018  building the trees checks them

    def _check_shape(self) -> None:
        needed, may = NEEDS[self.shape], MAY_HAVE.get(self.shape, ())
        for name in ("draft_depth", "width", "nodes", "parents", "rank_rates"):
            given = vars(self)[name]
            if given is None and name in needed:
                raise checks.ParameterError(f"{name} is required with shape='{self.shape}'; add it, or choose another shape")
            if given is not None and name not in (*needed, *may):
                known = ", ".join((*needed, *may))
                raise checks.ParameterError(
                    f"{name} must be left out with shape='{self.shape}', which is made of {known}, got {checks.shown(given)}"
                )
        limits = {"draft_depth": draft_trees.MAX_DEPTH, "width": draft_trees.MAX_WIDTH, "nodes": draft_trees.MAX_NODES}
        for name, most in limits.items():
            if vars(self)[name] is not None:
                checks.whole(name, vars(self)[name], 1, most)

    @cached_property
    def trees(self) -> tuple[DraftTree, ...]:
        """The tree of a round; for `eagle-2` by class of confidence, none without `rank_rates`."""
        depth, width, nodes, rates = self.draft_depth or 0, self.width, self.nodes or 0, self.rank_rates
        if self.shape == LISTED:
            return (DraftTree(self.parents or ()),)
        if self.shape == CHAIN:
            return (draft_trees.chain(depth),)
        if self.shape == FULL:
            return (draft_trees.full(width or 0, depth),)
        if self.shape == SEQUOIA:
            rates = draft_trees.by_depth(rates, depth)
            draft_trees.require_rates("rank_rates", rates, depth)
            return (draft_trees.optimal(rates or (), nodes, depth, width),)
        return tuple(self.tree_of_class(index, depth) for index in range(len(self.classes)))

    @cached_property
    def classes(self) -> tuple[draft_trees.Rates, ...]:
        """Tables of `rank_rates` by class of confidence, for `eagle-2`; none if the tree does not depend on confidence."""
        if self.shape != EAGLE_2 or self.rank_rates is None:
            return ()
        depth, width = self.draft_depth or 0, self.width or 0
        found = []
        given: Any = draft_trees.by_depth(self.rank_rates, 1)  # a single row is that of the only class
        if not isinstance(given, tuple) or not given:
            raise checks.ParameterError(f"rank_rates must be a list of tables, one for each class, got {checks.shown(given)}")
        for index, table in enumerate(given):
            rates = draft_trees.by_depth(table, depth)
            found.append(rates)
            draft_trees.require_rates(f"rank_rates[{index}]", rates, depth, (width,) * depth)
            draft_trees.require_falling(f"rank_rates[{index}]", rates)
        return tuple(found)

    @property
    def ranks_by_depth(self) -> Sequence[int]:
        """Largest rank of a candidate at each depth."""
        return (self.width or 0,) * self.levels if self.shape == EAGLE_2 else self.trees[0].widest_by_depth

    @property
    def draft_confidences(self) -> Sequence[Any]:
        """Confidences of the draft in its candidates, for each class of the outcomes by depth and rank; empty if it needs none."""
        return self.classes

    def check_law(self, outcome: str, law: Any) -> None:
        """Raise ParameterError for ranks of fewer depths than the tree's, or of other classes than `rank_rates`."""
        if law.depth < self.levels:
            raise checks.ParameterError(
                f"ranks must be known for each of {self.levels} depths of the tree, got {law.depth}; give more, or draft less deep"
            )
        if self.shape == EAGLE_2 and law.classes != len(self.classes):
            raise checks.ParameterError(
                f"rank_rates must have a table for each of {law.classes} classes of the outcomes with shape='{EAGLE_2}', got"
                f" {len(self.classes)}: the tree grows by the draft's confidence; add the draft's confidences"
            )

    def tree_of_class(self, index: int, levels: int) -> DraftTree:
        """Tree of a round in this class of confidence (0 where there are none) that drafts this number of levels, at least 1."""
        if self.shape != EAGLE_2:
            return self.trees[0].cut(levels)
        depth = min(levels, self.draft_depth or 0)
        return _made(draft_trees.confident, self.classes[index][:depth], self.nodes or 0, depth, self.width or 0)

    @property
    def reads_states(self) -> bool:
        """True if the draft reads the target's states."""
        return self.drafter != MODEL

    @property
    def drafts_in_one_pass(self) -> bool:
        """True if one pass of the draft drafts all tokens of a round."""
        return self.drafter == PARALLEL

    @property
    def candidates_read(self) -> Literal["top", "distinct"]:
        """Kind of read that gives candidates."""
        return DISTINCT if self.candidates == DISTINCT_TOKENS else LIKELIEST

    @property
    def levels(self) -> int:
        """Levels that a round drafts: the depth of the tree, which may be less than `draft_depth`, or that of its growth."""
        return self.draft_depth or 0 if self.shape == EAGLE_2 else self.trees[0].depth

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of a round, by the levels that it drafts."""
        if self.shape == EAGLE_2:
            nodes, width = self.nodes or 0, self.width or 0
            return (0, *[min(nodes, width + (levels - 1) * width**2) for levels in range(1, self.levels + 1)])
        return (0, *[self.trees[0].cut(levels).nodes for levels in range(1, self.levels + 1)])

    @cached_property
    def several_hypotheses(self) -> bool:
        """True if passes follow several hypotheses; a chain makes the passes of speculative decoding."""
        return self.shape == EAGLE_2 or not self.trees[0].is_chain

    @property
    def joint_verification(self) -> bool:
        """True if a position has several candidates, so that accepted over drafted tokens is no acceptance rate of a token."""
        return self.several_hypotheses

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens in a round."""
        return self.nodes or 0 if self.shape == EAGLE_2 else self.trees[0].nodes

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target."""
        return self.longest_draft + 1

    @property
    def overrun(self) -> int:
        """Positions after the end that a pass may reach."""
        return 0 if self.cut else self.levels

    @property
    def cut(self) -> bool:
        """True if the last trees are cut to the remaining tokens; False in continuous batching, as in speculative decoding."""
        return self.sequences == 1 or self.batching != CONTINUOUS


class Drafted(NamedTuple):
    """The drafted tree of a round.

    Parameters
    ----------
    tree
        Its shape; None: nothing was drafted.
    tokens
        Token of each node.
    outputs
        Output of the draft that the nodes at depth 1, 2, ... were read from; none if the tree grew by confidence.
    offsets
        Offset of each node there.
    places
        Index of each node in the pass of the draft that has read it; None if there is none.
    """

    tree: DraftTree | None = None
    tokens: Sequence[int] = ()
    outputs: Sequence[Any] = ()
    offsets: Sequence[int] = ()
    places: Sequence[int | None] = ()

    @property
    def children(self) -> Mapping[int, tuple[int, ...]]:
        """Children of each node that has some, best first, the root's under `ROOT`."""
        return {} if self.tree is None else self.tree.children


@dataclass
class Cached:
    """A model, and the place of the text's last token in its cache among the tokens that it holds at that position."""

    model: Model
    place: int = 0


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    target, states = Cached(Model("target", parameters.layers, 0)), None
    if parameters.reads_states:
        drafter = Cached(Model("draft", parameters.draft_layers, 0, len(sequence) - 1))
        states = yield from read_with_states(target.model, drafter.model, sequence)
    else:
        drafter = Cached((yield from start(parameters, sequence)))
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        room, known = end - len(sequence) - 1, len(sequence)
        longest = min(parameters.levels, room) if parameters.cut else parameters.levels
        levels = yield DraftLimit(longest, parameters.sizes)
        if states is not None and longest and not levels:
            yield _first_pass(parameters, drafter, sequence, states, 0)  # it keeps in step with the target, whose states it reads
        drafted = yield from _drafted(parameters, drafter, sequence, states, levels)
        out = yield verification_pass(parameters, target, sequence, drafted)
        path, token = yield from accept_path(parameters, out, drafted, room)
        new = ended([*[drafted.tokens[node] for node in path], token], stop)
        sequence += new
        ranks, candidates = ranks_of(drafted, path, room)
        yield Commit("round", tuple(new), len(drafted.tokens), ranks=ranks[: len(new)], candidates=candidates[: len(new)])
        target.place = _place_of_last(drafted, path)
        if states is not None:
            # The draft's rows of drafted tokens do not come from the target's states: all new tokens are read (again).
            drafter.model.rows, states = known, _states(parameters, out, [0, *[node + 1 for node in path]])
        elif levels:
            read = [place for node in path if (place := drafted.places[node]) is not None]
            drafter.model.rows, drafter.place = known + len(read), read[-1] if read else 0


# --- Drafting ---------------------------------------------------------------------------------------------------------


def _drafted(
    parameters: Parameters, drafter: Cached, sequence: Sequence[int], states: Features | None, levels: int
) -> Generator[Step, Any, Drafted]:
    """Draft the tree of a round with this number of levels."""
    if not levels:
        return Drafted()
    if parameters.drafts_in_one_pass:
        out = yield _first_pass(parameters, drafter, sequence, states, levels)
        return (yield from _product(parameters, out, levels))
    first = _first_pass(parameters, drafter, sequence, states, 1)
    return (yield from (_by_confidence if parameters.shape == EAGLE_2 else _of_shape)(parameters, first, levels))


def _first_pass(
    parameters: Parameters, drafter: Cached, sequence: Sequence[int], states: Features | None, heads: int
) -> Forward:
    """First pass of a round of the draft: tokens that it has not read; a parallel draft also reads masks."""
    model, parallel = drafter.model, parameters.drafts_in_one_pass
    words = tuple(sequence[model.rows :])
    tree: tuple[int, ...] = ()
    if parameters.several_hypotheses and not parallel and (states is None or states.output is not None):
        tree = (-1 - drafter.place, *range(len(words) - 1))
        if states is not None and not states.indices:
            states = Features.of_indices(states.output, tuple(range(states.first, states.first + states.length)))
    if parallel:
        words = (*words, *[MASK] * (heads - 1))
    own = model.rows, model.span, states, heads, model.unit, tree
    return Forward(model.role, words, *own, context_budget=model.context_budget)


def _states(parameters: Parameters, output: Any, indices: Sequence[int]) -> Features:
    """States at these indices of a pass; those of a chain are consecutive."""
    if parameters.several_hypotheses:
        return Features.of_indices(output, tuple(indices))
    return Features(output, indices[0], len(indices))


def _of_shape(parameters: Parameters, first: Forward, levels: int) -> Generator[Step, Any, Drafted]:
    """Draft a tree of a fixed shape, one pass per depth over the nodes that have children."""
    plan = draft_plan(parameters.trees[0].cut(levels), parameters.several_hypotheses)
    offer = DraftLevels(first, plan.levels, parameters.candidates_read)
    drafted = yield offer
    if drafted is not None:
        return Drafted(plan.tree, drafted.tokens, drafted.outputs, plan.offsets, plan.places)
    tokens, outputs = list[int](), []
    following = first
    for level in range(levels):
        out = yield following
        outputs.append(out)
        numbers = []
        for offset, width in plan.levels[level].reads:
            found = yield Read(offer.read, out, offset, width)
            numbers.append(len(found))
            tokens += found
        if len(tokens) < plan.tree.nodes_to[level + 1]:  # the draft has fewer candidates than the shape
            tree = plan.tree.limited(dict(zip(plan.read_at(level), numbers, strict=True)))
            plan = draft_plan(tree, parameters.several_hypotheses)
            offer = offer._replace(levels=plan.levels)
        if not plan.levels[level].nodes:
            break
        following = offer.pass_over(level, tokens, out)
    return Drafted(plan.tree, tokens, outputs, plan.offsets, plan.places)


def _by_confidence(parameters: Parameters, first: Forward, levels: int) -> Generator[Step, Any, Drafted]:
    """Draft a tree that grows by confidence, and return its likeliest nodes: Section 4 of [Li2024b]."""
    width = parameters.width or 0
    tokens, parents, scores = list[int](), list[int](), list[float]()
    places: dict[int, int] = {}  # index in its pass of each node that the draft has read
    reading, root = [ROOT], len(first.tokens) - 1  # index of the text's last token in the first pass
    following = first
    for level in range(levels):
        out, begin = (yield following), len(tokens)
        for offset, of in enumerate(reading, -len(reading)):
            score = 0.0 if of == ROOT else scores[of]
            found = yield Read("beams", out, width=width, hypotheses=((offset, score),))
            tokens += [each.token for each in found]
            scores += [each.score for each in found]
            parents += [of] * len(found)
        if level == levels - 1:
            break
        reading = [node for _, node in likeliest([(scores[node], node) for node in range(begin, len(tokens))], width)]
        words, after = tuple([tokens[node] for node in reading]), [parents[node] for node in reading]
        tree = tuple([-1 - places.get(node, 0) for node in after])
        following = first.below(level, words, out, [places.get(node, root) for node in after], tree)
        places |= {node: place for place, node in enumerate(reading)}
    kept = [node for _, node in likeliest([(score, node) for node, score in enumerate(scores)], parameters.nodes or 0)]
    number = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
    shape = DraftTree(tuple([number[parents[node]] for node in kept]))
    return Drafted(shape, [tokens[node] for node in kept], places=[places.get(node) for node in kept])


def _product(parameters: Parameters, out: Any, levels: int) -> Generator[Step, Any, Drafted]:
    """The tree of a parallel draft: all nodes at one depth have the same candidates."""
    tree, kind = parameters.trees[0].cut(levels), parameters.candidates_read
    candidates = []
    for level, width in enumerate(tree.widest_by_depth):
        candidates.append((yield Read(kind, out, level - levels, width)))
    if any(map(int.__lt__, map(len, candidates), tree.widest_by_depth)):  # the draft has fewer candidates than the shape
        tree = tree.limited({ROOT: len(candidates[0])} | {
            node: len(candidates[depth]) for node, depth in enumerate(tree.depths) if depth < levels
        })  # fmt: skip
    tokens = [candidates[depth - 1][rank - 1] for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
    offsets = [depth - 1 - levels for depth in tree.depths]
    return Drafted(tree, tokens, [out] * levels, offsets, [None] * len(tokens))


# --- Verification -----------------------------------------------------------------------------------------------------


def verification_pass(parameters: Parameters, target: Cached, sequence: Sequence[int], drafted: Drafted) -> Forward:
    """Pass of the target over the text's last token and the nodes, each of which sees the text and its own ancestors."""
    model, words = target.model, (sequence[-1], *drafted.tokens)
    tree: tuple[int, ...] = ()
    if parameters.several_hypotheses:
        tree = (-1 - target.place, *(() if drafted.tree is None else drafted.tree.parents_in_pass))
    return Forward(model.role, words, len(sequence) - 1, model.span, None, len(words), model.unit, tree)


def accept_path(
    parameters: Parameters, output: Any, drafted: Drafted, room: int
) -> Generator[Step, Any, tuple[list[int], int]]:  # fmt: skip
    """Return the accepted nodes, at most `room`, from the root on, and the target's own next token."""
    children, nodes = drafted.children, len(drafted.tokens)
    own = None
    if not parameters.sampled and nodes:
        own = yield ReadEach(GREEDY, output, -nodes - 1, nodes + 1)
    path: list[int] = []
    at: int | None = ROOT
    while at is not None:
        offset = at - nodes  # the root is the first token of the pass
        below = children.get(at, ()) if len(path) < room else ()
        if parameters.candidates == DISTINCT_TOKENS:
            at, token = yield from _by_rejections(output, offset, drafted, below)
        else:
            if own is not None:
                token = own[at + 1]
            else:
                token = yield Read(SAMPLED if parameters.sampled else GREEDY, output, offset)
            at = _child_with(drafted, below, token)
        if at is not None:
            path.append(at)
    return path, token


def _child_with(drafted: Drafted, below: Sequence[int], token: int) -> int | None:
    """The first of these nodes that is this token."""
    for child in below:
        if drafted.tokens[child] == token:
            return child
    return None


def _by_rejections(
    output: Any, offset: int, drafted: Drafted, below: Sequence[int]
) -> Generator[Step, Any, tuple[int | None, int]]:
    """Try children that were drawn without replacement, one after another; after the last, draw from what is left.

    Returns the accepted child, if any, and its token, or the drawn one.
    """
    if not below or drafted.tree is None:
        return None, (yield Read(SAMPLED, output, offset))
    source, place = drafted.outputs[drafted.tree.depths[below[0]] - 1], drafted.offsets[below[0]]
    rejected: tuple[int, ...] = ()
    for child in below:
        token, before = drafted.tokens[child], rejected
        p = yield Read("probability", output, offset, 1, token, source, place, (), before)
        q = yield Read("probability", source, place, 1, token, rejected=before)
        if (yield Read("uniform", output, offset)) < p / q:
            return child, token
        rejected = (*before, token)
    return None, (yield Read("residual", output, offset, 1, None, source, place, (), rejected[:-1]))


def ranks_of(drafted: Drafted, path: Sequence[int], room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks of the accepted nodes among the candidates at their depth, and 0 for the token after them; numbers of candidates.

    After `room` accepted nodes no candidates are verified.

    >>> drafted = Drafted(DraftTree((-1, -1, 1)), (7, 8, 9))
    >>> ranks_of(drafted, [1], 3), ranks_of(drafted, [1, 2], 3), ranks_of(drafted, [1], 1), ranks_of(Drafted(), [], 3)
    (((2, 0), (2, 1)), ((2, 1, 0), (2, 1, 0)), ((2, 0), (2, 0)), ((0,), (0,)))
    """
    children, tree = drafted.children, drafted.tree
    ranks = () if tree is None else tuple([tree.ranks[node] for node in path])
    below = [len(children.get(node, ())) if depth < room else 0 for depth, node in enumerate((ROOT, *path))]
    return (*ranks, 0), tuple(below)


def _place_of_last(drafted: Drafted, path: Sequence[int]) -> int:
    """Index of the last node of a path among those of its depth, and so among the target's cached tokens there."""
    return drafted.tree.places[path[-1]] if path and drafted.tree is not None else 0
