"""The steps of decoding algorithms: forward passes, reads of their outputs, sub-processes and committed tokens.

An algorithm is a generator: it yields a step and receives the step's answer. It holds no clock and no tensor, so that the same
code runs in three kinds of interpreters: the simulator (`sim.engine.events`) answers with times, the counter
(`model.interpret.interpreter`) with counts, a real model (`calibrate`) with hidden states.

Four rules hold in every interpreter:

* A `Forward` at position `at` discards the KV cache rows from `at` on, so there is no separate rollback. A gap is an error.
* A sub-process starts with its parent's cache and sees the rows that the parent is still writing, layer by layer.
* Only a task that has returned can be adopted. Adopting a running or stopped task is an error.
* Only `Commit` generates output. Decoding ends when all requested tokens are committed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, Protocol

Steps = Generator["Step", Any, Any]
"""An algorithm or a sub-process: yields steps, receives their answers, and may return a value to the process that started it."""


MASK: Final = -(1 << 62)
"""Token of a position that is not known yet: a parallel draft reads it in place of the tokens that it drafts. It is always among
the last of a pass, and no simulated or real token has this number."""


def ended(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Tokens up to and including the first stop token, or all tokens if there is none.

    >>> ended([7, 2, 9, 2], (9, 3))
    [7, 2, 9]
    """
    if not stop:
        return tokens
    return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in stop), tokens)


ATTENTION_SINKS: Final = 4
"""First positions of the cache that a pass with a context budget reads; needed for quality (Section 3.2 of [Xiao2024])."""


def visible_positions(cached: int, context_budget: int | None) -> tuple[range, range]:
    """Positions of a cache of `cached` positions that a pass with this budget reads: the first few, and the latest.

    The budget counts both. The latest position is always among them. The rule is that of StreamingLLM [Xiao2024], but tokens keep
    the positions that they have in the text.

    [Xiao2024] G. Xiao et al. Efficient Streaming Language Models with Attention Sinks. ICLR 2024, arXiv:2309.17453.

    >>> visible_positions(100, 10), visible_positions(100, 2), visible_positions(8, 10)
    ((range(0, 4), range(94, 100)), (range(0, 1), range(99, 100)), (range(0, 0), range(0, 8)))
    """
    if context_budget is None or cached <= context_budget:
        return range(0), range(cached)
    sinks = min(ATTENTION_SINKS, context_budget - 1)
    return range(sinks), range(cached - context_budget + sinks, cached)


class LayerSpan(NamedTuple):
    """Layers [first, last) of a model, as run by one pass.

    `gaps` are half-open ranges of layers that the pass skips: they leave the hidden state unchanged and write no KV cache rows.
    With `kv_only` the layers only compute keys and values; the hidden state does not change. A span without layers runs only the
    head.
    """

    first: int
    last: int
    gaps: tuple[tuple[int, int], ...] = ()
    kv_only: bool = False

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Layers that are run, as half-open ranges.

        >>> LayerSpan(0, 24, gaps=((1, 17),)).ranges, LayerSpan(0, 24).ranges, LayerSpan(8, 8).ranges
        ([(0, 1), (17, 24)], [(0, 24)], [])
        """
        if not self.gaps:
            return [(self.first, self.last)] if self.first < self.last else []
        bounds = [self.first, *[bound for gap in self.gaps for bound in gap], self.last]
        return [span for span in zip(bounds[::2], bounds[1::2], strict=True) if span[0] < span[1]]

    @property
    def size(self) -> int:
        """Number of layers that are run (gaps excluded).

        >>> LayerSpan(0, 24, gaps=((1, 17),)).size
        8
        """
        return self.last - self.first - sum(last - first for first, last in self.gaps)


@dataclass(frozen=True)
class Batch:
    """The sequences of one pass: entry i has number `sequences[i]` and `widths[i]` tokens from position `positions[i]` on.

    The tokens of the pass are ordered by sequence; logits are computed for the last `heads[i]` tokens of entry i. Each sequence has
    a separate KV cache. Finished sequences are left out.
    """

    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    widths: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def uniform(cls, sequences: tuple[int, ...], positions: int | tuple[int, ...], width: int = 1, heads: int = 0) -> Batch:
        """Batch with the same `width` and `heads` for all sequences; `positions` is one position for all or one per sequence.

        >>> Batch.uniform((3, 1), 5, width=2, heads=1)
        Batch(sequences=(3, 1), positions=(5, 5), widths=(2, 2), heads=(1, 1))
        """
        count = len(sequences)
        return cls(sequences, (positions,) * count if isinstance(positions, int) else positions, (width,) * count, (heads,) * count)

    @property
    def aligned(self) -> bool:
        """True if all sequences have the same width and the same first position."""
        return len({*self.positions}) == len({*self.widths}) == 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index in the pass of the first token of each sequence."""
        return tuple(accumulate(self.widths[:-1], initial=0))

    @cached_property
    def head_starts(self) -> tuple[int, ...]:
        """Index of the first logits of each sequence among all logits of the pass."""
        return tuple(accumulate(self.heads[:-1], initial=0))

    @property
    def end(self) -> int:
        """The position after the last token of the longest sequence."""
        return max([at + width for at, width in zip(self.positions, self.widths, strict=True)])

    def locate(self, index: int) -> tuple[int, int]:
        """Locate a token of the pass: (index of its sequence in the batch, index of the token within that sequence).

        >>> [Batch((3, 1), (6, 5), (1, 2), (1, 1)).locate(index) for index in range(3)]
        [(0, 0), (1, 0), (1, 1)]
        """
        entry = bisect_right(self.starts, index) - 1
        return entry, index - self.starts[entry]

    def require(self, step: Forward) -> None:
        """Raise `CacheError` unless the tokens, position and heads of the pass agree with its sequences."""
        count, tokens = len(self.sequences), len(step.tokens)
        positions, widths, heads = self.positions, self.widths, self.heads
        wrong = None
        if len({*self.sequences}) < count or not count:
            wrong = f"sequences must be distinct, at least one, got {self.sequences}"
        elif len(positions) != count or len(widths) != count or len(heads) != count:
            wrong = f"positions, widths and heads must have {count} entries, one per sequence, got {positions}, {widths}, {heads}"
        elif min(widths) < 1 or sum(widths) != tokens:
            wrong = f"widths must be at least 1 and sum to {tokens}, the tokens of the pass, got {widths}"
        elif any(not 0 <= projected <= width for projected, width in zip(heads, widths, strict=True)):
            wrong = f"heads must be between 0 and widths={widths}, got {heads}"
        elif sum(heads) != step.heads:
            wrong = f"heads must sum to {step.heads}, the heads of the pass, got {heads}"
        elif min(positions) != step.at:
            wrong = f"the smallest of positions must be {step.at}, the position of the pass, got {positions}"
        elif step.compared not in (0, tokens):
            wrong = f"compared must be 0 or all {tokens} tokens, got {step.compared}"
        elif step.tree and count > 1:
            wrong = f"a pass over a tree of hypotheses must have one sequence, got {self.sequences}"
        if wrong is not None:
            raise CacheError(f"batched pass of the {step.role}: {wrong}")


class Features(NamedTuple):
    """Hidden states that a draft head reads: those of a pass of the target, or of the head itself, after `length` tokens of it.

    Parameters
    ----------
    output
        Output of that pass, with the states after its last layer; None if there is no position before the head's pass.
    first
        Index of the first of these tokens in that pass. -1: the state before the sequence's first token, which is zero; those
        after it are of the pass's first tokens.
    length
        Number of states: one for each token of the head's pass that is not `MASK`, that of the position before the token.
    indices
        Indices of the states in that pass, where they are chosen one by one: in a pass over several hypotheses the state of a token
        is that of the token that it follows.
    """

    output: Any
    first: int
    length: int
    indices: tuple[int, ...] = ()

    @classmethod
    def of_indices(cls, output: Any, indices: tuple[int, ...]) -> Features:
        """States at these indices of a pass.

        >>> Features.of_indices(None, (0, 3))
        Features(output=None, first=0, length=2, indices=(0, 3))
        """
        return cls(output, indices[0], len(indices), indices)

    def require(self, step: Forward) -> None:
        """Raise `CacheError` unless these are the states before the tokens of the pass `step`."""
        known = len(step.tokens)
        while known and step.tokens[known - 1] == MASK:
            known -= 1
        held: Sequence[int] = () if self.output is None else self.output.positions
        if self.indices:
            self._require_each(step, known, held)
            return
        wrong = None
        if self.length != known:
            wrong = f"length must be {known}, the tokens of the pass without masks, got {self.length}"
        elif self.first < -1 or self.first + self.length > len(held):
            wrong = f"states {self.first} to {self.first + self.length - 1} are read of a pass over {len(held)} tokens"
        elif (held[self.first] if self.first >= 0 else -1) != step.at - 1:
            before = held[self.first] if self.first >= 0 else "the start"
            wrong = f"the first state must be that of position {step.at - 1}, before the pass, got that of {before}"
        elif self.first < 0 < len(held) and held[0] != 0:
            wrong = f"states from before the first token on must be of a pass at position 0, got {held[0]}"
        elif step.batch is not None or step.tree or step.layers.first:
            wrong = "only a pass over one sequence, from the first layer on, reads states"
        if wrong is not None:
            raise CacheError(f"features of the {step.role} at position {step.at}: {wrong}")

    def _require_each(self, step: Forward, known: int, held: Sequence[int]) -> None:
        """`require` for states that are chosen one by one."""
        wrong = None
        if len(self.indices) != known:
            wrong = f"indices must be {known}, one for each token of the pass without masks, got {len(self.indices)}"
        elif not all(0 <= index < len(held) for index in self.indices):
            wrong = f"indices must be those of a pass over {len(held)} tokens, got {self.indices}"
        elif any(held[index] != position - 1 for index, position in zip(self.indices, step.positions, strict=False)):
            positions = [held[index] for index in self.indices]
            wrong = f"each state must be that of the position before its token, got those of positions {positions}"
        elif step.batch is not None or step.layers.first:
            wrong = "only a pass over one sequence, from the first layer on, reads states"
        if wrong is not None:
            raise CacheError(f"features of the {step.role} at position {step.at}: {wrong}")


class Forward(NamedTuple):
    """Run `layers` of the model `role` on `tokens`, the first of them at cache position `at`. Answer: an output.

    Parameters
    ----------
    role
        The model: `target`, `draft`, ...
    tokens
        Input tokens. In a batch, those of all sequences, sequence after sequence.
    at
        KV cache position of the first token; in a batch, the smallest position of its sequences.
    layers
        The layers to run.
    state
        The output to continue from if the first layer is above 0, or a tuple of outputs of several passes whose tokens are
        consecutive. For a draft head, which runs from its first layer on: the `Features` that it reads.
    heads
        Number of positions, counted from the last, whose logits are computed at the end of this pass; in a batch, the sum over its
        sequences.
    unit
        Unit that runs the pass; None: the unit of the process's previous pass. Moving the state to another unit takes a link time.
    tree
        For a pass over several hypotheses: token i follows token `tree[i]` of this pass or, if `tree[i]` equals -1-j, cached token
        j at position at - 1. Without a tree each token follows the token before it, and the first follows cached token 0.
    batch
        The sequences of a batched pass, or of a pass over a single numbered sequence.
    compared
        Number of positions at which the hidden state is compared with that of the previous layer.
    within_step
        True for a pass that is part of the engine step of a later one, as a draft by the model's own layers: the engine prepares
        one step for the round, and the verification pays its overhead.
    context_budget
        Largest number of cached positions of each sequence that the pass reads, besides its own tokens (`visible_positions`); None:
        all.
    """

    role: str
    tokens: tuple[int, ...]
    at: int
    layers: LayerSpan
    state: Any = None
    heads: int = 0
    unit: int | None = None
    tree: tuple[int, ...] = ()
    batch: Batch | None = None
    compared: int = 0
    within_step: bool = False
    context_budget: int | None = None

    @property
    def joins(self) -> bool:
        """True if the pass continues from the outputs of several finished passes."""
        return type(self.state) is tuple  # not isinstance: an output may be a Forward, which is a named tuple

    @property
    def positions(self) -> Sequence[int]:
        """Cache position of each token.

        >>> Forward("target", (7, 8, 9, 6), 5, LayerSpan(0, 4), tree=(-1, -2, 0, 2)).positions
        [5, 5, 6, 7]
        >>> Forward("target", (7, 8, 7), 5, LayerSpan(0, 4), batch=Batch((0, 1), (6, 5), (1, 2), (0, 0))).positions
        [6, 5, 6]
        """
        if self.tree:
            positions: list[int] = []
            for parent in self.tree:
                positions.append(self.at if parent < 0 else positions[parent] + 1)
            return positions
        batch = self.batch
        if batch is None:
            return range(self.at, self.at + len(self.tokens))
        return [at + index for at, width in zip(batch.positions, batch.widths, strict=True) for index in range(width)]

    @property
    def end(self) -> int:
        """The position after the last token; in a tree or batch, of the longest hypothesis or sequence."""
        if self.tree:
            return max(self.positions) + 1
        return self.at + len(self.tokens) if self.batch is None else self.batch.end

    def below(
        self, depth: int, tokens: tuple[int, ...], before: Any, parents: Sequence[int], tree: tuple[int, ...]
    ) -> Forward:
        """Return the pass over the drafted `tokens` at one depth of a tree whose draft begins with this pass.

        At depth 0 they are at the position after this pass, and at each further depth one position later. If this pass reads
        `Features`, the returned one reads the states of the `parents` of its tokens in the pass `before`.

        >>> Forward("draft", (7, 8), 5, LayerSpan(0, 1), heads=1).below(1, (9, 6), None, (0, 0), (-1, -1)).positions
        [8, 8]
        """
        states = None
        if self.state is not None:
            states = Features.of_indices(before, tuple(parents)) if tree else Features(before, parents[0], len(parents))
        own = self.at + len(self.tokens) + depth, self.layers, states, len(tokens), self.unit, tree
        return Forward(self.role, tokens, *own, context_budget=self.context_budget)

    @property
    def width(self) -> int:
        """Number of tokens per sequence; in a ragged batch, of the widest sequence."""
        return len(self.tokens) if self.batch is None else max(self.batch.widths)

    @property
    def batch_size(self) -> int:
        """Number of sequences; 1 without a batch."""
        return 1 if self.batch is None else len(self.batch.sequences)

    def sequence_of(self, offset: int) -> int:
        """Number of the sequence that a token belongs to; 0 without a batch. `offset` is a list index of the token.

        >>> step = Forward("target", (7, 8, 7), 5, LayerSpan(0, 4), batch=Batch((3, 1), (6, 5), (1, 2), (0, 0)))
        >>> [step.sequence_of(offset) for offset in (0, 1, -2, -1)]
        [3, 1, 1, 1]
        """
        batch = self.batch
        return 0 if batch is None else batch.sequences[batch.locate(offset % len(self.tokens))[0]]

    def part(self, index: int) -> Forward:
        """The pass restricted to one sequence, given by its index in the batch.

        >>> step = Forward("target", (7, 8, 7), 5, LayerSpan(0, 4), heads=2, batch=Batch((3, 1), (6, 5), (1, 2), (1, 1)))
        >>> step.part(1)
        Forward(role='target', tokens=(8, 7), at=5, layers=LayerSpan(...), state=None, heads=1, ...)
        """
        batch = self.batch
        assert batch is not None
        start, width = batch.starts[index], batch.widths[index]
        compared = width if self.compared else 0
        tokens, at, heads = self.tokens[start : start + width], batch.positions[index], batch.heads[index]
        return Forward(
            self.role, tokens, at, self.layers, self.state, heads, self.unit, self.tree, None, compared, self.within_step,
            self.context_budget,
        )  # fmt: skip

    def alone(self, hypothesis: int) -> Forward:
        """The pass restricted to one of its hypotheses; every hypothesis must be a single token.

        >>> step = Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), tree=(-1, -1, -1)).alone(1)
        >>> step.tokens, step.at, step.tree
        ((8,), 5, ())
        """
        return self._replace(tokens=(self.tokens[hypothesis],), at=self.positions[hypothesis], tree=())


GREEDY: Final = "next"
SAMPLED: Final = "sample"
"""Kinds of reads that give the next token: in greedy decoding and in sampling."""
LIKELIEST: Final = "top"
DISTINCT: Final = "distinct"
"""Kinds of reads that give several candidates of the next token: the likeliest ones, and ones drawn without replacement."""


class Read(NamedTuple):
    """Read the predicted distribution of the token after position `offset` of an output (a list index: negative from the end).

    The answer depends on `kind`:

    * `next`: the likeliest token; `top`: the `width` likeliest tokens, best first.
    * `sample`: a token drawn from the distribution; `probability`: the probability of `token`.
    * `distinct`: up to `width` different tokens, drawn one after another without replacement, in the order of the draws; fewer if
      no more tokens have a probability above 0.
    * `uniform`: a random number in [0, 1) for the acceptance test of the next token.
    * `confidence`: confidence in `token`, by default in the likeliest token; in [0, 1].
    * `saturation`: similarity of the hidden state before and after the last layer of the pass, in [0, 1]; needs `compared`.
    * `distance`: cross-entropy of the distribution with respect to `token` [nats].
    * `residual`: a token drawn from norm(max(0, w p - q)), where p is this distribution, q that of output `against` at
      `against_offset`, and w the `weight` of p, 1 by default; `residual_mass`: the sum of max(0, w p - q), a number in [0, w].
    * `beams`: the `width` likeliest continuations of all `hypotheses`, best first, as a sequence of `Continuation`. A hypothesis is
      (index of its last token in the pass, log-probability of the hypothesis).

    With `rejected` a `probability` or `residual` is that after these tokens were rejected, which were drawn one after another
    without replacement from a draft's distribution q. Without `against`, q itself: q without the rejected tokens, divided by its
    sum. With `against`, the output with q, it is the target's distribution p, of which every rejection makes norm(max(0, p - q))
    and then removes the rejected token from q. A `residual` is after one rejection more, from q without the `rejected` tokens.
    """

    kind: Literal[
        "next", "top", "sample", "distinct", "probability", "uniform", "residual", "residual_mass", "confidence", "saturation",
        "distance", "beams",
    ]
    output: Any
    offset: int = -1
    width: int = 1
    token: int | None = None
    against: Any = None
    against_offset: int = -1
    hypotheses: tuple[tuple[int, float], ...] = ()
    rejected: tuple[int, ...] = ()
    weight: float = 1.0


class Lookup(NamedTuple):
    """Look up the last tokens of a text earlier in it. Answer: the tokens that followed there, a tuple, empty without a match.

    The answer depends on nothing but the tokens, so that every interpreter of real tokens computes it
    (`model.interpret.text_lookup`). In a simulation tokens have no meaning, and the answer is a random outcome by position.

    Parameters
    ----------
    tokens
        The text: prompt and output so far.
    min_match, max_match
        Smallest and largest number of last tokens that are looked up. The longest match is taken, and of several the first.
    longest
        Largest number of tokens in the answer.
    per_match
        Largest number of tokens in the answer per matching token; None: no such limit.
    """

    tokens: Sequence[int]
    min_match: int
    max_match: int
    longest: int
    per_match: float | None = None

    def most(self, match: int) -> int:
        """Largest number of tokens in the answer after a match of this length.

        >>> [Lookup((), 1, 3, 4, per_match=1.5).most(match) for match in (1, 2, 3)]
        [1, 3, 4]
        """
        return self.longest if self.per_match is None else min(self.longest, int(self.per_match * match))


class DraftLimit(NamedTuple):
    """Ask how many tokens to draft in the round that begins. Answer: a whole number from 0 to `longest`.

    An interpreter of one decoding answers `longest`; a server that decodes many sequences answers by its policy.

    Parameters
    ----------
    longest
        Largest answer.
    sizes
        Drafted tokens by answer, where they differ: the answer for a tree is its levels. They increase from 0.
    """

    longest: int
    sizes: tuple[int, ...] = ()

    def within(self, tokens: int) -> int:
        """Largest answer with at most this number of drafted tokens.

        >>> [DraftLimit(2).within(tokens) for tokens in (0, 1, 5)], [DraftLimit(2, (0, 2, 6)).within(each) for each in (1, 5, 9)]
        ([0, 1, 2], [0, 1, 2])
        """
        return min(bisect_right(self.sizes, tokens) - 1 if self.sizes else tokens, self.longest)


class DraftChain(NamedTuple):
    """An offer: passes over one sequence, each over the token that the pass before predicted, until `length` tokens are drafted.

    It stands for `first`, a `Read` of the token after it, a pass over that token, and so on. Answer: a `DraftedChain`, or None if
    it is declined.

    Parameters
    ----------
    first
        The first pass, from the first layer of the model on, with the logits of its last token; the later ones are like it.
    length
        Number of tokens to draft, at least 1.
    confidence
        The draft ends at a token whose `confidence` is below this, and does not contain it; None: no such reads are made.
    read
        Kind of the reads: of the likeliest token, or of a sampled one.
    """

    first: Forward
    length: int
    confidence: float | None = None
    read: Literal["next", "sample"] = GREEDY


class DraftedChain(NamedTuple):
    """Tokens of a `DraftChain`."""

    tokens: list[int]
    unsure: bool = False
    """True if the last pass predicted one more token, with too low a confidence."""
    outputs: Sequence[Any] = ()
    """Output of each pass, of a draft of sampled tokens: a verification reads their probabilities."""


class TreeLevel(NamedTuple):
    """One depth of a tree of drafted tokens: reads of the candidates there, and the pass over those that have children."""

    reads: tuple[tuple[int, int], ...]
    """Offset in the output of the pass before, and number of candidates, of each of its nodes."""
    nodes: tuple[int, ...]
    """Nodes of the pass, numbered in the order in which they are read; none at the last depth."""
    parents: tuple[int, ...]
    """Index of each one's parent in the pass before; the parent of those of the first level is the last token of the first pass."""
    tree: tuple[int, ...]
    """`Forward.tree` of the pass; none if each depth has one node."""


class DraftLevels(NamedTuple):
    """An offer: a draft of a tree of a fixed shape, one pass for each depth over the nodes that have children.

    It stands for `first`, a `Read` for each of the reads of the first level, the pass over its nodes (`Forward.below`), and so on.
    Answer: a `DraftedLevels`, or None if it is declined, as it is where a read may give fewer candidates than it asks for.

    Parameters
    ----------
    first
        The first pass, with the logits of its last token.
    levels
        The levels of the tree.
    read
        Kind of the reads: of the likeliest tokens, or of tokens drawn without replacement.
    """

    first: Forward
    levels: Sequence[TreeLevel]
    read: Literal["top", "distinct"] = LIKELIEST

    def pass_over(self, depth: int, drafted: Sequence[int], before: Any) -> Forward:
        """Pass over the nodes of `levels[depth]`, of all `drafted` tokens so far, after the pass `before`."""
        _, nodes, parents, tree = self.levels[depth]
        if not depth:
            parents = (len(self.first.tokens) - 1,) * len(nodes)
        return self.first.below(depth, tuple([drafted[node] for node in nodes]), before, parents, tree)


class DraftedLevels(NamedTuple):
    """Tokens of `DraftLevels`."""

    tokens: list[int]
    """Tokens of all nodes."""
    outputs: list[Any]
    """Output that each level was read from."""


class DraftRounds(NamedTuple):
    """An offer: all rounds that are left, each a draft of one token after another, its verification in one pass, and a commit.

    A round stands for a `DraftLimit`, a `DraftChain` whose first pass reads the tokens that the draft lacks, or a `Lookup` without
    passes, a verification of the last token and the drafted ones, a `Read` of the likeliest token or of a distance after each of
    them, and the `Commit` of the accepted drafted tokens and the verifying model's own. Answer: the generated tokens, or None if it
    is declined.

    Parameters
    ----------
    first
        The first pass of the first draft, as in `DraftChain`. If it reads `Features` of the verifying model, so does that of each
        draft, over all tokens that the round before committed. Or the lookup of the first draft.
    verify
        The verification of a draft without tokens: a pass over the last token, with its logits.
    length
        Largest number of tokens of a draft.
    tokens
        Number of tokens to generate.
    cut
        A draft has at most one token less than remain to be generated; otherwise it may have more, which are verified in vain.
    kinds
        Origins of the tokens, as in `Commit`: of a round with a rejection, of another one whose draft was unsure, of all others.
    confidence
        As in `DraftChain`.
    distance
        A drafted token is accepted if its `distance` is not above this; None: if it is the likeliest token.
    """

    first: Forward | Lookup
    verify: Forward
    length: int
    tokens: int
    cut: bool
    kinds: tuple[str, str, str]
    confidence: float | None = None
    distance: float | None = None


class DraftedRound(NamedTuple):
    """Outcome of one of the rounds of `DraftRounds`."""

    drafted: int
    """Drafted tokens that were verified."""
    accepted: int
    unsure: bool = False
    """True if the last draft pass predicted one more token, with too low a confidence."""


class ReadEach(NamedTuple):
    """An offer: reads of one kind, `next` or `distance`, at consecutive positions of a pass over one sequence.

    It stands for `width` steps `Read(kind, output, first + i)`, about token `tokens[i]` if there are any. Answer: the sequence of
    their answers, or None if it is declined: an algorithm then reads one by one, and no more than it needs.
    """

    kind: Literal["next", "distance"]
    output: Any
    first: int
    width: int
    tokens: Sequence[int] = ()


class EarlyRounds(NamedTuple):
    """An offer: all rounds that are left, each a token decoded by one process while others decode the next one in advance.

    A round stands for a pass up to the exit layer, a `Read` of the likeliest candidates there, a `Fork` of passes over them at the
    next position, the pass through the layers that are left, a `Read` of the next token, a `Join` of the sub-processes or a `Stop`
    of those with another token, and the `Commit`. If a candidate is that token, its output is adopted, and the next round's pass
    goes on from there. Answer: the generated tokens, or None if it is declined.

    Parameters
    ----------
    first
        The first pass, over one token, up to the exit layer, with its logits; a process that has run more layers predicts after
        these.
    layers
        Layers of the model.
    candidates
        Number of candidates of a round.
    units
        Units of the sub-processes: one for each candidate, or one for a pass over all of them.
    tokens
        Number of tokens to generate.
    barrier
        Sub-processes run as many layers as the main process has left, which waits for all of them. Else they run up to the exit
        layer, the main process waits for the right one alone, and the others are stopped.
    kinds
        Origins of the tokens, as in `Commit`: one of the candidates, another one.
    """

    first: Forward
    layers: int
    candidates: int
    units: Sequence[int]
    tokens: int
    barrier: bool
    kinds: tuple[str, str]


class NextTokens(NamedTuple):
    """An offer: tokens of the output one after another, each from a pass over the token before.

    It stands for a pass, a `Read` of the token after it, and its `Commit`, for each of `layers`. Answer: the tokens, or None if it
    is declined.

    Parameters
    ----------
    first
        The first pass, over one token, with its logits; the later ones are like it.
    layers
        Layers of each pass, those of `first` included.
    kind
        Origin of the tokens, as in `Commit`.
    read
        Kind of the reads: of the likeliest token, or of a sampled one.
    """

    first: Forward
    layers: Sequence[LayerSpan]
    kind: str
    read: Literal["next", "sample"] = GREEDY


Offer = DraftChain | DraftLevels | DraftRounds | ReadEach | EarlyRounds | NextTokens
"""Steps that stand for several others. Every interpreter may decline one by the answer None; the algorithm then yields the others.

An interpreter that accepts must answer, count and time as if it had got the other steps: offers only save time.
"""


class Continuation(NamedTuple):
    """A token that continues a hypothesis."""

    token: int
    follows: int
    """Index in the pass of the last token of the hypothesis."""
    score: float
    """Log-probability of the hypothesis together with the token."""


class Fork(NamedTuple):
    """Start sub-processes together, number i on `units[i]` (None: on any free unit). Answer: a sequence of tasks.

    A sub-process is a generator of steps, or a single pass whose output is its value. All start in one dispatch, whose cost depends
    on their number.

    Sub-process i starts with the KV cache of the ended task `heirs_of[i]`; if that is None, or `heirs_of` is empty, with the cache
    of the process that starts it. Starting on the unit that holds this cache takes no link time.
    """

    bodies: tuple[Steps | Forward, ...]
    units: tuple[int | None, ...]
    heirs_of: tuple[Any, ...] = ()


class Join(NamedTuple):
    """Wait until these tasks have ended. Answer: their return values."""

    tasks: tuple[Any, ...]


class Stop(NamedTuple):
    """Stop these tasks and all their sub-processes now. Tasks that have already ended are unaffected."""

    tasks: tuple[Any, ...]


class Adopt(NamedTuple):
    """Adopt the output of an ended task and its KV cache rows of layers [0, layers) at position `at`. Answer: that output.

    If the task was a pass over several hypotheses, `hypothesis` is the index of the only token to adopt.
    """

    task: Any
    at: int
    layers: int
    hypothesis: int | None = None


class Commit(NamedTuple):
    """Emit `tokens` as output.

    Parameters
    ----------
    kind
        Origin of the tokens: match, miss, token, round, ...
    tokens
        The emitted tokens.
    drafted
        Number of drafted tokens that were verified; None if the method drafts none. If set, all of `tokens` but the last are
        accepted drafts.
    back
        Number of previously emitted tokens that `tokens` replace, when the best of several hypotheses changes. The sequence grows
        by `len(tokens) - back`.
    sequence
        Number of the sequence, if the sequences of a batch commit separately.
    ranks
        Rank of each of `tokens` among the draft's candidates for its position, from 1; 0: none of them. Only of methods that draft
        several candidates.
    candidates
        Number of these candidates, 0 where none were verified; as many as `ranks`.
    """

    kind: str
    tokens: tuple[int, ...]
    drafted: int | None = None
    back: int = 0
    sequence: int | None = None
    ranks: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()


Step = Forward | Read | Lookup | DraftLimit | Fork | Join | Stop | Adopt | Commit | Offer


def declining(steps: Steps) -> Steps:
    """The same algorithm, with all its offers declined, and those of its sub-processes.

    >>> def drafts() -> Steps:
    ...     return (yield DraftChain(Forward("draft", (0,), 0, LayerSpan(0, 1)), 2))
    >>> next(declining(drafts()))
    Traceback (most recent call last):
        ...
    StopIteration
    """
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Fork):
            bodies = tuple(body if isinstance(body, Forward) else declining(body) for body in step.bodies)
            step = step._replace(bodies=bodies)
        answer = None if isinstance(step, Offer) else (yield step)


class CacheError(RuntimeError):
    """Invalid use of a KV cache, such as a pass beyond its end or the adoption of a stopped task: a bug of the algorithm."""


class Ending(Protocol):
    """State of a task that every interpreter records: has it ended, and how."""

    ended: bool
    """True once the task has returned or was stopped."""
    stopped: bool
    """True if the task was stopped before it returned."""


def require_ended(task: Ending) -> None:
    """Raise `CacheError` unless the task has returned, so that its output and cache can be adopted."""
    if task.stopped:
        raise CacheError("a stopped task cannot be adopted; stop only the other tasks and let this one finish")
    if not task.ended:
        raise CacheError("a running task cannot be adopted; join it first")
