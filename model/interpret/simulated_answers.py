"""A hidden true text and luck by position: what models would answer, for interpreters that have none.

The target's token at cache position t is the integer t, and a wrong one is negative, so that methods compare tokens as they would
compare real ones. What is read after a wrong token is wrong, so one token tells whether all before it were right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from model.steps import Continuation, Forward, Read

Token = int


class Answers(Protocol):
    """Answers to reads without models: `World`, or a record of what real models said (`model.logs.replay.Replayed`)."""

    written: Sequence[Token]
    """What has been put out so far: an interpreter puts its own list here."""
    generated: Mapping[int, Sequence[Token]]
    """Tokens that each sequence of a batch has generated, where they commit separately."""

    def read(self, step: Read) -> Any:
        """The answer to a read of an output, which is then the pass that made it."""


class DraftOutcomes(NamedTuple):
    """A model that imitates the model of role `of`.

    `survivors[j]` is how many of its tokens survive if a draft starts at output place j. One that imitates the target starts behind
    the text that has been put out; one that imitates another draft may start anywhere, so there its outcomes must go by position.
    """

    of: str
    survivors: Sequence[int]


class World:
    """Answers reads.

    `matches[j]` says which of the early candidates for the j-th output token is the true one; `drafts` are models by role.
    Candidates count from 1; 0 (or False) is none of them, and True the first. Beyond the last of `matches` nothing matches. Which
    one it is matters only where sub-processes wait for units. `doubts[j]` says of which tokens drafted for output place j the draft
    is unsure: 1 if of wrong ones, 2 if of the right one, 3 if of both, as in `model.outcomes.outcome_laws.TwoClass`.
    """

    def __init__(
        self, prompt: int, layers: int, matches: Sequence[int] = (), drafts: Mapping[str, DraftOutcomes] | None = None,
        doubts: Sequence[int] = (),
    ) -> None:
        self.prompt = prompt
        self.layers = layers
        self.matches = matches
        self.drafts = {} if drafts is None else drafts
        self.doubts = doubts
        self.ranks = {role: rank for rank, role in enumerate(self.drafts)}
        self.written: Sequence[Token] = ()
        """What has been put out so far; an interpreter puts its own list here."""
        self.generated: Mapping[int, Sequence[Token]] = {}
        """Tokens that each sequence of a batch has generated, where they commit separately."""

    def read(self, step: Read) -> Token | list[Token] | list[Continuation] | float:
        """The answer to a read of an output, which in worlds without tensors is the pass that made it."""
        kind, output = step.kind, step.output
        if kind == "beams":
            return self._beams(step, output)
        after, right = self._place(step)
        if kind == "top":
            return self._candidates(after, right, step.width)
        role = output.role
        if role == "target" and output.layers.last != self.layers:
            return -after  # an early layer says nothing but its candidates
        if kind == "confidence":
            return 0.0 if self.doubts[after - self.prompt] & (2 if step.token == after else 1) else 1.0
        if kind == "uniform":
            return 0.5  # between the chances that this world knows
        token = self._says(role, after, right)
        return float(token == step.token) if kind == "probability" else token

    def _place(self, step: Read) -> tuple[int, bool]:
        """The position that a read is about, and whether all that the output has seen before it is right."""
        output: Forward = step.output
        tokens, offset = output.tokens, step.offset
        plain = not output.tree and output.batch is None
        after = (output.at + len(tokens) + offset if plain else output.positions[offset]) + 1
        return after, tokens[offset] == after - 1

    def _says(self, role: str, after: int, right: bool) -> Token:
        """What a model puts at position `after`; where it differs from the one it imitates, its token is its own."""
        if role == "target":
            return after if right else -after
        of, survivors = self.drafts[role]
        place = after - self.prompt
        start = len(self.written) if of == "target" else place
        if place < len(survivors) and place - start < survivors[start]:
            return self._says(of, after, right)
        return -after - 1 - self.ranks[role]

    def _beams(self, step: Read, output: Forward) -> list[Continuation]:
        """The best continuations are all of the right hypothesis, the first if there are several; without one, of the first.

        The true token is the target's best; its next ones are wrong, but a draft that is right knows them too. It has them in
        another order, so that nobody can rely on it, and where it is wrong it lacks the true one.
        """
        tokens, positions = output.tokens, output.positions
        rights = [(index, score) for index, score in step.hypotheses if tokens[index] == positions[index]]
        index, score = (rights or step.hypotheses)[0]
        after = positions[index] + 1
        first = -after - 1 - len(self.drafts)  # no model's wrong token is below it
        found = [self._says(output.role, after, bool(rights)), *range(first, first - step.width + 1, -1)]
        if output.role != "target":
            found.reverse()
        # The worst of a right hypothesis is better than the best of a wrong one that comes of the same.
        best = score - (not rights)
        return [Continuation(token, index, best - place / step.width) for place, token in enumerate(found)]

    def _candidates(self, after: int, right: bool, width: int) -> list[Token]:
        # Wrong candidates differ from each other, and from the -after that a wrong prediction is.
        wrong = -after - 1
        candidates = [*range(wrong, wrong - width, -1)]
        place = after - self.prompt
        if right and place < len(self.matches) and self.matches[place]:
            candidates[self.matches[place] - 1] = after
        return candidates


class BatchWorld(World):
    """Answers reads of a batch whose sequences have each a separate world: whatever the batch, a sequence is what it is alone.

    >>> from model.steps import Batch, LayerSpan
    >>> world = BatchWorld([World(1, 4, drafts={"draft": DraftOutcomes("target", survivors)}) for survivors in ([1, 0], [0, 0])])
    >>> step = Forward("draft", (0, 0), 0, LayerSpan(0, 1), heads=2, batch=Batch.uniform((0, 1), 0, heads=1))
    >>> [world.read(Read("next", step, offset)) for offset in (-2, -1)]  # the second sequence's draft is wrong
    [1, -2]
    """

    def __init__(self, worlds: Sequence[World]) -> None:
        super().__init__(worlds[0].prompt, worlds[0].layers)
        self.worlds = worlds

    def read(self, step: Read) -> Token | list[Token] | list[Continuation] | float:
        """The answer to a read of an output."""
        output: Forward = step.output
        batch = output.batch
        assert batch is not None
        index, place = batch.locate(step.offset % len(output.tokens))
        number = batch.sequences[index]
        world = self.worlds[number]
        world.written = self.generated.get(number, ())
        return world.read(step._replace(output=output.part(index), offset=place - batch.widths[index]))


def together(worlds: Sequence[World]) -> World:
    """The world of a decoding of so many sequences: of one alone, its own."""
    return BatchWorld(worlds) if len(worlds) > 1 else worlds[0]


STAYS, UNSURE, UNLIKELY = 0, 1, 2
"""What becomes of the small model's token: the large one lets it stand; it is not written; it is written, and taken back."""


class Lossy(World):
    """Answers reads of methods whose text is not the target's: the true text is what they write.

    `decisions[j]` is what becomes of a small model's token at output place j, `depths[i][j]` the layers that sequence i of a batch
    needs for it. Confidences are 0 or 1, distances 0 or infinite: whatever the thresholds, they decide alike.
    """

    def __init__(
        self, prompt: int, layers: int, decisions: Sequence[int] = (), depths: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__(prompt, layers)
        self.decisions = decisions
        self.depths = depths

    def read(self, step: Read) -> Token | list[Token] | list[Continuation] | float:
        """The answer to a read of an output."""
        after, right = self._place(step)
        output: Forward = step.output
        if step.kind == "distance":
            return 0.0 if step.token == after else float("inf")
        last = output.layers.last
        whole = output.role == "target" and last == self.layers
        place = after - self.prompt
        if not self.decisions:
            if step.kind in ("confidence", "saturation"):
                return float(last >= self.depths[output.sequence_of(step.offset)][place])
            return after if right else -after
        decision = STAYS if whole else self.decisions[place]
        if step.kind == "confidence":
            return float(decision != UNSURE)
        return after if right and decision != UNLIKELY else -after
