"""Passes that the simulator makes without events: one alone, or those of an offer with their reads and commits.

They are made while no event is due and no process waits or starts. Then no process holds a unit, and none can stop these passes.
The run is the same to the last bit as with an event for each pass: times are added one by one, in the order in which passes end.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from typing import Any

from model.costs.step_costs import StepCosts, position_of
from model.interpret.account import Account
from model.interpret.interpreter import Cache
from model.interpret.simulated_answers import Answers
from model.steps import DraftChain, DraftedChain, DraftRounds, EarlyRounds, Features, Forward, LayerSpan, NextTokens
from sim.engine.cluster import Cluster
from sim.engine.known_passes import KnownPass, PassKey, key_of
from sim.engine.simulated_clock import SimulatedClock
from sim.engine.simulated_run import Run


class PassesAlone:
    """The clock of a simulation, its passes with their times and counts, and those that are made without events."""

    def __init__(self, cluster: Cluster, cost: StepCosts, world: Answers, tokens: int) -> None:
        self.cluster, self.cost, self.world, self.wanted = cluster, cost, world, tokens
        self.by_position, self.tabulated, self.draft_devices = not cost.uniform, cost.tabulated, cost.draft_devices
        self.dispatch_times: dict[int, float] = {}
        self.known: dict[PassKey, KnownPass] = {}
        self.tables: dict[tuple[Any, ...], list[float]] = {}  # of passes by position, where they depend on it
        self.env = SimulatedClock()
        self.done = False
        self.peak = 0
        self.account = Account()
        self.busy = self.draft_time = self.target_time = 0.0
        self.result = Run()

    def dispatching(self, processes: int) -> float:
        """Time of starting this number of sub-processes."""
        if processes not in self.dispatch_times:
            self.dispatch_times[processes] = self.cost.dispatching(processes)
        return self.dispatch_times[processes]

    def known_pass(self, step: Forward) -> KnownPass:
        """Return what is known of passes of this kind, with the time of this one."""
        key = key_of(step)
        known = self.known.get(key)
        if known is None:
            self.known[key] = known = KnownPass(self.cost, step, key)
        if self.by_position:
            known.seconds = self.seconds_of(step, key)
        return known

    def seconds_of(self, step: Forward, key: PassKey) -> float:
        """Time of a pass at its position, from a table of all positions if there can be one."""
        return self.table(step, key, position_of(step))[position_of(step)] if self.tabulated else self.cost.forward(step)

    def table(self, step: Forward, key: PassKey, last: int) -> list[float]:
        """Times of passes like this one at positions 0, 1, ..., at least up to `last`."""
        batch = step.batch
        more = key, step.joins, bool(step.tree), step.context_budget, None if batch is None else batch.heads
        times = self.tables.get(more)
        if times is None or last >= len(times):
            self.tables[more] = times = self.cost.times_by_position(step, max(2 * last, self.wanted) + 1)
        return times

    def pass_alone(self, step: Forward) -> None:
        """Make a pass."""
        known = self.known_pass(step)
        self.add_each((known,), (self.env.go_on(known.seconds),))
        self.peak = self.peak or 1
        known.count(step)

    def chain_alone(self, cache: Cache, step: DraftChain) -> DraftedChain | None:
        """Make a chain of passes as `pass_alone` does, if its reads can be answered together."""
        drafted = self.world.chain(step)
        if drafted is None:
            return None
        first, tokens = step.first, drafted.tokens
        rest = len(tokens) + drafted.unsure - 1  # passes after the first, each over the token that the one before predicted
        if not self.tabulated or first.context_budget is not None or first.layers.gaps:
            cache.write(first)
            self.pass_alone(first)
            for word in _later_passes(first, tokens[:rest]):
                cache.write(word)
                self.pass_alone(word)
        elif len(first.tokens) == 1:
            known, times = self.count_alike(cache, first, rest + 1)
            self.passes_alone([known] * len(times), times)
        else:
            cache.write(first)
            self.pass_alone(first)
            if rest:
                known, times = self.count_alike(cache, next(_later_passes(first, tokens)), rest)
                self.passes_alone([known] * rest, times)
        return drafted

    def rounds_alone(self, cache: Cache, step: DraftRounds) -> Sequence[int] | None:
        """Make rounds as `pass_alone` makes their passes, if their reads can be answered together."""
        verify, result = step.verify, self.result
        first = step.first if isinstance(step.first, Forward) else None  # a lookup makes no passes
        usual = self.tabulated and (first is None or (first.context_budget is None and not first.layers.gaps))
        rounds = self.world.draft_rounds(step) if usual and step.tokens == self.wanted - len(result.tokens) else None
        if rounds is None:
            return None
        last = verify.at + step.tokens + step.length
        drafts = checks = _AlikePasses(self, verify, last, verified=True)
        at, read, again = verify.at, 0, False  # positions of the last token, and of the first that the next draft reads
        if first is not None:
            cache.write(first)
            drafts, read, again = _AlikePasses(self, first, last), first.at, type(first.state) is Features
        cache.write(verify)
        made: list[KnownPass] = []
        seconds: list[float] = []
        ends = []  # number of passes up to the end of each round
        for drafted, accepted, unsure in rounds:
            passes = 0 if first is None else drafted + unsure
            if passes:
                known, times = drafts.begun_at(at + 1 - read, read)
                made.append(known)
                seconds.append(times[read])
                if passes > 1:
                    known, times = drafts.begun_at(1, at + 1, passes - 1)
                    made += [known] * (passes - 1)
                    seconds += times[at + 1 : at + passes]
                read = at + passes
            known, times = checks.begun_at(drafted + 1, at)
            made.append(known)
            seconds.append(times[at])
            ends.append(len(made))
            at += accepted + 1
            read = at - accepted if again else min(read, at)
        clock = self.passes_alone(made, seconds)
        rejected, doubted, otherwise = step.kinds
        for end, (drafted, accepted, unsure) in zip(ends, rounds, strict=True):
            kind = rejected if accepted < drafted else doubted if unsure else otherwise
            result.commits.append((clock[end], kind, accepted + 1))
        result.rounds.update(Counter([(accepted, drafted) for drafted, accepted, _ in rounds]))
        tokens = range(verify.at + 1, at + 1)
        result.tokens += tokens
        self.done = True
        return tokens

    def tokens_alone(self, cache: Cache, step: NextTokens) -> Sequence[int] | None:
        """Make passes as `pass_alone` does, with the commit after each, if their reads can be answered together."""
        tokens = self.world.next_tokens(step) if self.tabulated else None
        if tokens is None:
            return None
        first, result, at = step.first, self.result, step.first.at
        tokens = tokens[: self.wanted - len(result.tokens)]
        made: list[KnownPass] = []
        seconds: list[float] = []
        for span, alike in groupby(step.layers[: len(tokens)]):
            word = Forward(first.role, (0,), at + len(made), span, None, first.heads, first.unit) if made else first
            known, times = self.count_alike(cache, word, len([*alike]))
            made += [known] * len(times)
            seconds += times
        result.commits += zip(self.passes_alone(made, seconds)[1:], repeat(step.kind), repeat(1))
        result.tokens += tokens
        self.done = len(result.tokens) >= self.wanted
        return tokens

    def rounds_ahead_alone(self, place: int, cache: Cache, step: EarlyRounds) -> Sequence[int] | None:
        """Make rounds without events, if the passes of each round's sub-processes begin at once, each on a unit of its own."""
        first, barrier, result = step.first, step.barrier, self.result
        count, last = len(step.units), first.at + step.tokens - 1
        usual = self.tabulated and step.tokens == self.wanted - len(result.tokens) and (barrier or self.cluster.stop == "now")
        several = count == len({place, *step.units}) - 1 and min(step.units) >= 0 and max(step.units) < self.cluster.units
        if not (usual and several) or self.cost.link or self.cost.promotion or self.dispatching(count):
            return None
        matches, stages = self.world.early_matches(step), _RoundsAhead.by_depth(self, step)
        if matches is None or any(min(stage.rest_times) <= 0 for stage in stages.values()):
            return None  # the main process would end before the others begin
        cache.write(first)
        cache.write(stages[0].rest)
        made: list[KnownPass] = []
        took: list[float] = []
        depth, now = 0, self.env.now
        for at, match in enumerate(matches, first.at):
            stage = stages[depth]
            stage.rounds.append(at)
            start = now + stage.before_times[at]
            own_end, end = start + stage.rest_times[at], start + stage.ahead_times[at + 1]
            # Those with a wrong candidate end with the main process, unless it waits for them.
            others = [(end if barrier else min(end, own_end)) - start] * count
            right = match and at < last
            if right:
                others[-1] = end - start
            if end < own_end:
                made += stage.ahead_first
                took += (start - now, *others, own_end - start)
            else:
                made += stage.rest_first
                took += (start - now, own_end - start, *others)
            depth = stage.ahead.layers.last if right else 0
            now = max(own_end, end) if barrier or right else own_end
            result.commits.append((now if barrier else own_end, step.kinds[not match], 1))
        self.env.go_to(now)
        self.add_each(made, took)
        for stage in stages.values():
            stage.count(count)
        self.account.adoptions += sum(matches[:-1])
        self.account.adopted_rows += sum([len(stage.rounds) * depth for depth, stage in stages.items()])
        self.peak = max(self.peak, count + 1)
        self.done = True
        tokens = range(first.at + 1, last + 2)
        result.tokens += tokens
        return tokens

    def add_each(self, made: Iterable[KnownPass], took: Iterable[float]) -> None:
        """Add the times of passes, one by one, so that sums are rounded as those of passes with events."""
        busy, draft_time, target_time, share = self.busy, self.draft_time, self.target_time, self.draft_devices
        for known, time in zip(made, took, strict=True):
            if known.is_target:
                target_time += time - known.overhead
                busy += time
            else:
                draft_time += time - known.overhead
                busy += time * share
        self.busy, self.draft_time, self.target_time = busy, draft_time, target_time

    def known_times(self, step: Forward, last: int) -> tuple[KnownPass, Sequence[float]]:
        """Return what is known of passes like this one, and their times by position, at least up to `last`."""
        known = self.known_pass(step)
        return known, self.table(step, key_of(step), last) if self.by_position else [known.seconds] * (last + 1)

    def count_alike(self, cache: Cache, step: Forward, count: int) -> tuple[KnownPass, Sequence[float]]:
        """Count `count` passes over one token each, which differ in nothing but the position, and record their rows.

        Return what is known of them, and their times.
        """
        cache.write(step, count)
        known, at = self.known_pass(step), step.at
        known.count_several(1, count, count * at + count * (count - 1) // 2)
        return known, self.table(step, key_of(step), at + count)[at : at + count] if self.by_position else [known.seconds] * count

    def passes_alone(self, made: Iterable[KnownPass], seconds: Iterable[float]) -> list[float]:
        """Make passes that take these times as `pass_alone` does, but for counting them.

        Return the time before the first pass, and the times at which the passes end.
        """
        times = self.env.go_on_each(seconds)
        self.add_each(made, map(operator.sub, times[1:], times))
        self.peak = self.peak or 1
        return times


class _AlikePasses:
    """Passes over one sequence that differ in nothing but position and number of tokens.

    Logits are computed of all their tokens if `verified`, else of as many as in `first`. Times are known up to position `last`.
    """

    def __init__(self, engine: PassesAlone, first: Forward, last: int, *, verified: bool = False) -> None:
        self.engine, self.first, self.last, self.verified = engine, first, last, verified
        self.known: dict[int, tuple[KnownPass, Sequence[float]]] = {}

    def begun_at(self, width: int, at: int, count: int = 1) -> tuple[KnownPass, Sequence[float]]:
        """Count passes over `width` tokens from position `at` on; several begin one position after another.

        Return what is known of them, and their times by position.
        """
        found = self.known.get(width)
        if found is None:
            engine, heads = self.engine, width if self.verified else self.first.heads
            step = self.first._replace(tokens=(0,) * width, heads=heads)
            self.known[width] = found = engine.known_times(step, self.last)
        found[0].count_several(width, count, count * at + count * (count - 1) // 2)
        return found


class _RoundsAhead:
    """Rounds of `EarlyRounds` that begin at the same layer, and what is known of their passes."""

    @classmethod
    def by_depth(cls, engine: PassesAlone, step: EarlyRounds) -> dict[int, _RoundsAhead]:
        """Rounds by the number of layers that their token has already run: 0, and after a match those of the sub-process."""
        found: dict[int, _RoundsAhead] = {}
        depth = 0
        while depth not in found:
            found[depth] = made = cls(engine, step, depth)
            depth = made.ahead.layers.last
        return found

    def __init__(self, engine: PassesAlone, step: EarlyRounds, depth: int) -> None:
        first, alone = step.first, len(step.units) == step.candidates
        gap, end = max(first.layers.last, depth), first.at + step.tokens
        words, tree = ((0,), ()) if alone else ((0,) * step.candidates, (-1,) * step.candidates)
        self.rest = first._replace(layers=LayerSpan(gap, step.layers))
        self.ahead = Forward(first.role, words, first.at + 1, LayerSpan(0, step.layers - gap if step.barrier else gap), tree=tree)
        self.before, self.before_times = engine.known_times(first._replace(layers=LayerSpan(depth, gap)), end)
        self.known_rest, self.rest_times = engine.known_times(self.rest, end)
        self.known_ahead, self.ahead_times = engine.known_times(self.ahead, end)
        others = [self.known_ahead] * len(step.units)
        self.ahead_first = [self.before, *others, self.known_rest]
        """Passes in the order of their ends, where those of the sub-processes end before the main process."""
        self.rest_first = [self.before, self.known_rest, *others]
        """The same where they do not."""
        self.rounds: list[int] = []
        """Positions of the rounds that were made."""

    def count(self, units: int) -> None:
        """Count the passes of the rounds."""
        rounds, positions, width = len(self.rounds), sum(self.rounds), len(self.ahead.tokens)
        for known in (self.before, self.known_rest):
            known.count_several(1, rounds, positions)
        self.known_ahead.count_several(width, units * rounds, units * (positions + rounds), tree=width > 1)


def _later_passes(first: Forward, tokens: Sequence[int]) -> Iterator[Forward]:
    """Passes over these tokens, one after another, after the first pass of a chain."""
    role, words, at, layers, _, heads, unit, _, _, _, within_step, budget = first
    for position, token in enumerate(tokens, at + len(words)):
        yield Forward(role, (token,), position, layers, None, heads, unit, (), None, 0, within_step, budget)
