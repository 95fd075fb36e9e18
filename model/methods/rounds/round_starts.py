"""Where rounds start: probabilities by position, by a forward recursion over (start position of a round, outcome before it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from model.methods.rounds.round_laws import AcceptanceLaw, Rounds
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Chain, Floats, Iid


class RoundDecoding(NamedTuple):
    """A decoding without the prices of its rounds."""

    draft_length: int
    tokens: int
    law: AcceptanceLaw
    cut: bool = True

    @property
    def survival(self) -> Floats | None:
        """`survival_of` its law alone, of shape (draft_length,)."""
        found = survival_of([self.law], self.draft_length)
        return None if found is None else found[0]


def survival_of(laws: Sequence[AcceptanceLaw], longest: int) -> Floats | None:
    """Probability that at least 1, 2, ..., `longest` drafted tokens are accepted, by law; shape (laws, longest).

    None unless rounds are independent and alike under all laws.

    >>> survival_of([Iid(0.5), Rounds([0.75, 0.25])], 2).tolist()
    [[0.5, 0.25], [0.75, 0.25]]
    """
    place = np.arange(1, longest + 1)
    if all(type(law) is Iid for law in laws):
        return np.array([[law.rate] for law in laws], dtype=np.float64) ** place  # type: ignore[union-attr]
    found = []
    for law in laws:
        if not isinstance(law, Iid | Rounds):
            return None
        found.append(law.first(longest) if isinstance(law, Rounds) else float(law.rate) ** place)
    return np.stack(found)


class Starts(NamedTuple):
    """Probabilities that a round starts at each position, in all and after a completely accepted draft of at least one token."""

    mass: Floats
    after_full_draft: Floats


def starts(draft_length: int, tokens: int, law: Chain | Rounds) -> Starts:
    """Distribution of the start positions of the rounds of `fixed`.

    >>> from model.outcomes.outcome_laws import ByPosition
    >>> [each.tolist() for each in starts(2, 5, ByPosition([1, 1, 0, 0, 1]))]
    [[1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0]]
    """
    steps = RoundSteps([(draft_length, tokens, law)])
    mass = steps.forward(np.zeros((tokens, 1))).mass
    count, after_whole = steps.count[:, 0], np.zeros(tokens + 1)
    np.add.at(after_whole, np.arange(tokens) + 1 + count, (mass * steps.whole).sum(axis=1)[:, 0] * (count > 0))
    return Starts(mass.sum(axis=1)[:, 0], after_whole[:tokens])


def starts_of_laws(draft_length: int, tokens: int, laws: Sequence[Chain | Rounds]) -> Starts:
    """`starts` of several laws; arrays of shape (tokens, laws)."""
    reached = survival_of(laws, draft_length)
    if reached is None:
        each = [starts(draft_length, tokens, law) for law in laws]
        return Starts(*(np.stack(column, axis=1) for column in zip(*each, strict=True)))
    mass = round_counts.start_masses(round_counts.chain_ends(draft_length, tokens, reached))
    after_full = np.zeros((tokens, len(laws)))
    place = np.arange(tokens)
    count = np.minimum(draft_length, tokens - 1 - place)
    whole = np.concatenate([np.ones((1, len(laws))), reached.T])[count] * mass
    follows = (count > 0) & (place + 1 + count < tokens)
    after_full[(place + 1 + count)[follows]] = whole[follows]
    return Starts(mass, after_full)


def starts_by_accepted(draft_length: int, tokens: int, laws: Sequence[Chain | Rounds]) -> Floats:
    """Probability that a round starts at each position after one that accepted 0, 1, ... tokens, under several laws.

    The first round follows none. Shape (laws, tokens, longest + 1).

    >>> from model.outcomes.outcome_laws import ByPosition
    >>> starts_by_accepted(2, 5, [ByPosition([1, 1, 0, 0, 1])])[0].tolist()[3:]
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    reached = survival_of(laws, draft_length)
    if reached is None:
        return np.stack([_starts_by_accepted(draft_length, tokens, law) for law in laws])
    ends = round_counts.chain_ends(draft_length, tokens + draft_length, reached)  # of the first rounds: not cut
    mass = round_counts.start_masses(ends[draft_length:])
    found = np.zeros((len(laws), tokens, draft_length + 1))
    for accepted in range(min(draft_length + 1, tokens)):  # a draft that is cut there ends the decoding
        found[:, accepted + 1 :, accepted] = (ends[0].chance[accepted] * mass[: tokens - accepted - 1]).T
    return found


def _starts_by_accepted(draft_length: int, tokens: int, law: Chain | Rounds) -> Floats:
    """`starts_by_accepted` of one law, position by position."""
    steps, found = RoundSteps([(draft_length, tokens, law)]), np.zeros((tokens, draft_length + 1))
    ends = steps.ended(steps.forward(np.zeros((tokens, 1))).mass)[..., 0]
    for accepted in range(min(draft_length + 1, tokens)):
        found[accepted + 1 :, accepted] = ends[: tokens - accepted - 1, accepted]
    return found


class RoundSteps:
    """Transition probabilities of rounds that start at each position, for several decodings at once.

    Arrays have axes (position, outcome before it, tokens of the round - 1, decoding), padded with zeros for decodings with fewer
    tokens or shorter drafts. If outcomes are independent, the axis of the outcome before has one entry.
    """

    def __init__(self, decodings: Sequence[tuple[int, int, Chain | Rounds]]) -> None:
        lengths, tokens = (np.array([each[axis] for each in decodings]) for axis in (0, 1))
        self.tokens, longest, size = int(tokens.max()), int(lengths.max()), len(decodings)
        low, high = np.zeros((2, self.tokens, longest + 1, size))
        for index, (length, count, law) in enumerate(decodings):
            low[:count, : length + 1, index], high[:count, : length + 1, index] = law.draft_probabilities(count, length)
        position, place, each = np.arange(self.tokens)[:, None, None], np.arange(longest)[None, :, None], np.arange(size)
        remaining = tokens - 1 - position[:, 0]
        self.count = np.clip(remaining, 0, lengths)  # drafted tokens that can be used; shape (position, decoding)
        drafted = place < self.count[:, None]
        along = high[np.minimum(position + place, self.tokens - 1), place, each]
        alike = np.array_equal(low, high)
        self.ends = np.zeros((self.tokens, 1 if alike else 2, longest + 1, size))
        self.goes_on = np.zeros_like(self.ends) if not alike else None
        self.whole = np.zeros((self.tokens, 1 if alike else 2, size))
        last = np.minimum(position[:, 0] + self.count, self.tokens - 1), self.count, each
        self.begun = begun = remaining >= 0
        for before in range(self.ends.shape[1]):
            rates = along.copy()
            if not before and longest:
                rates[:, 0] = low[:, 0]
            survival = np.cumprod(np.where(drafted, rates, 1.0), axis=1)
            self.whole[:, before] = survival[:, -1] * begun if longest else begun
            ends = self.ends[:, before]
            if longest:
                reached = np.concatenate([np.ones((self.tokens, 1, size)), survival[:, :-1]], axis=1)
                ends[:, :longest] = np.where(drafted, reached * (1 - rates), 0.0)
            if self.goes_on is None:
                ends[position[:, 0], self.count, each] += self.whole[:, before]
                continue
            # The token after a completely accepted draft has an outcome too: it precedes the next round.
            following = high[last] if before else np.where(self.count > 0, high[last], low[last])
            ends[position[:, 0], self.count, each] += self.whole[:, before] * (1 - following)
            self.goes_on[position[:, 0], before, self.count, each] = self.whole[:, before] * following

    def forward(self, times: Floats, onward: Floats | None = None) -> StartTimes:
        """Probability that a round starts at each position, by the outcome before it, and the mean time until then.

        `times` is the time of a round by its start position, shape (position, decoding), or (2, position, decoding) with index 1
        for rounds that follow a completely accepted draft. `onward` is additional time by the accepted tokens (`onward`).
        """
        _, before, most, size = self.ends.shape
        usual, more = (times, None) if times.ndim == 2 else (times[0], self.after_whole(times[1] - times[0]))
        state = np.zeros((self.tokens + most, 2, before, size))
        state[0, 0, 0] = 1.0
        begun = self.begun[:, None, None]  # no round starts after the last token
        found = np.empty((self.tokens, 2, before, size))
        each = np.arange(size)
        for start in range(self.tokens):
            found[start] = spent = state[start] * begun[start]
            spent = spent.copy()
            spent[1] += usual[start] * spent[0]
            ahead = state[start + 1 : start + 1 + most]
            ends, goes_on = self.ends[start], None if self.goes_on is None else self.goes_on[start]
            for outcome in range(before):
                ahead[:, :, 0] += spent[None, :, outcome] * ends[outcome][:, None]
                if goes_on is not None:
                    ahead[:, :, 1] += spent[None, :, outcome] * goes_on[outcome][:, None]
            for outcome in range(before if onward is not None else 0):
                assert onward is not None
                added = spent[0, outcome] * onward[start]
                ahead[:, 1, 0] += added * ends[outcome]
                if goes_on is not None:
                    ahead[:, 1, 1] += added * goes_on[outcome]
            if more is not None:  # the additional time of the next round is added at the end of this one
                added, count = spent[0] * more[start], self.count[start]
                on = np.zeros_like(added) if goes_on is None else goes_on[:, count, each]
                ahead[count, 1, 0, each] += (added * (self.whole[start] - on)).sum(axis=0)
                if goes_on is not None:
                    ahead[count, 1, 1, each] += (added * on).sum(axis=0)
        return StartTimes(found[:, 0], found[:, 1])

    def onward(self, reading: Floats) -> Floats:
        """Additional time of the round that follows a round from each position, by the accepted tokens of the latter.

        Both arrays have shape (position, accepted tokens, decoding); `reading` is by the position of the following round.
        """
        found = np.zeros_like(reading)
        for accepted in range(min(reading.shape[1], self.tokens - 1)):
            found[: -accepted - 1, accepted] = reading[accepted + 1 :, accepted]
        return found

    def ended(self, values: Floats) -> Floats:
        """Values of visits, by the accepted tokens of the round from there; shape (position, accepted tokens, decoding)."""
        ends = self.ends if self.goes_on is None else self.ends + self.goes_on
        return np.asarray((values[:, :, None] * ends).sum(axis=1))

    def after_whole(self, more: Floats) -> Floats:
        """Additional time of the round that follows a round from each position, if the draft of the latter is fully accepted."""
        following = np.arange(self.tokens)[:, None] + 1 + self.count
        inside, each = np.minimum(following, self.tokens - 1), np.arange(self.count.shape[1])
        follows = (following < self.tokens) & self.begun[inside, each] & (self.count > 0)
        return np.where(follows, more[inside, each], 0.0)

    def sums(self, values: Floats, visits: StartTimes) -> Floats:
        """Expected sum of `values` over all rounds; `values` has the shape of `times`."""
        mass = visits.mass.sum(axis=1)
        if values.ndim == 2:
            return np.asarray((mass * values).sum(axis=0))
        whole = (visits.mass * self.whole).sum(axis=1)
        return np.asarray((mass * values[0] + whole * self.after_whole(values[1] - values[0])).sum(axis=0))


class StartTimes(NamedTuple):
    """Start positions of rounds, by the outcome before: their probability, and the mean time until then times that probability."""

    mass: Floats
    first: Floats
