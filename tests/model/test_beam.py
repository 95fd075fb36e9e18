"""Speculative beam search: published numbers, both rules on a table language model, three views on the same outcomes, and errors.

The table language model answers steps as a real model would: its cache holds sequences, and a pass reads only the cache.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Account
from model.interpret.interpreter import Cache, count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.beam import paths as twin
from model.methods.beam import theory as beam
from model.methods.beam.algorithm import Hypothesis, Parameters, decode, token_lists
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import theory as speculative
from model.methods.speculative.theory import acceptance_from_drafted, finite_speedup
from model.outcomes.outcome_laws import Iid, Markov, Replay
from model.outcomes.random_streams import BLOCK
from model.steps import CacheError, Commit, Continuation, Fork, Forward, Join, LayerSpan, Read, Steps
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.views import evaluation, formula_view, point_columns

DECK = 0.75 / 6.39
"""Cost ratio of the slides: milliseconds per pass of the small model over those of the large model."""
FORMS = (("exact", "batched"), ("per-beam", "batched"), ("per-beam", "sequential"), ("per-beam", "parallel"))


def choose(form: tuple[str, str], beams: int, draft_length: int, draft_beams: int | None = None, **more: Any) -> Parameters:
    """Parameters of a rule and an arrangement; `draft_beams` only for rules that take it."""
    rule, arrangement = form
    wide = draft_beams if rule == "exact" else None
    layers = more.pop("layers", 3)
    return Parameters(layers, draft_length, beams, rule, wide, arrangement, **more)


# --- Published numbers and general properties -------------------------------------------------------------------------


def test_speeds_of_the_slides_are_theorem_3_8_over_the_number_of_beams() -> None:
    """They report .79 with 3 beams (alpha = .79) and .45 with 5 (alpha = .75), relative to one greedy sequence."""
    as_deck: Any = {"rule": "per-beam", "arrangement": "sequential"}
    for beams, share, literal, reread in ((3, 0.79, 0.717, 0.831), (5, 0.75, 0.404, 0.481)):
        rate = float(acceptance_from_drafted(share, 3))
        assert round(float(beam.speedup(share, 3, DECK, beams, **as_deck)), 3) == literal
        assert round(float(beam.speedup(rate, 3, DECK, beams, **as_deck)), 3) == reread
        for each in (share, rate):
            one = float(speculative.speedup(each, 3, DECK))
            assert float(beam.speedup(each, 3, DECK, beams, **as_deck)) == pytest.approx(one / beams, rel=1e-15)


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 7, 128])
def test_sequential_beams_take_k_times_as_long(beams: int, tokens: int) -> None:
    curve = ((1, 2.0), (2, 2.5), (9, 3.0))
    cost = UnitCost(3, cost_ratio=DECK, final_head=0.5, verify_cost=curve)
    found = beam.predict(choose(FORMS[2], beams, 3), tokens, Iid(0.79), cost)
    expected = finite_speedup(tokens, 0.79, 3, DECK, verify_cost=curve) / beams
    assert float(found.plain_latency / found.latency) == pytest.approx(float(expected), rel=1e-12)
    assert float(found.plain_latency) == pytest.approx(3.5 * tokens, rel=1e-15)
    assert (float(found.busy), float(found.units), float(found.units_ratio)) == (float(found.latency), 1, 1)


def test_widths_of_a_pass_by_hand() -> None:
    curve = [(1, 1.0), (20, 20.0)]  # time proportional to the number of tokens
    # Two drafted tokens with alpha = 1: three steps per round. 2 beams, 5 draft beams.
    for form, round_time in zip(FORMS, (2 + 5 * 2, 2 * 3, 2 * 3, 3), strict=True):
        rule, arrangement = form
        more: Any = {"rule": rule, "arrangement": arrangement, "draft_beams": 5 if rule == "exact" else None, "verify_cost": curve}
        assert float(beam.speedup(1, 2, 0, 2, **more)) == pytest.approx(3 / round_time, rel=1e-15)
        turns = 2 if arrangement == "sequential" else 1
        assert float(beam.speedup(1, 2, 0.25, 2, **more)) == pytest.approx(3 / (round_time + turns * 0.5), rel=1e-15)


RATES, LENGTHS, COSTS, WIDTHS = st.floats(0, 1), st.integers(0, 8), st.floats(0, 2), st.integers(1, 8)


@given(RATES, LENGTHS, COSTS, WIDTHS, st.sampled_from(FORMS))
def test_more_beams_are_never_faster(
    alpha: float, gamma: int, c: float, beams: int, form: tuple[str, str]
) -> None:
    rule, arrangement = form
    curve = [(1, 1.0), (4, 1.5), (1000, 40.0)]
    speeds = [
        float(beam.speedup(alpha, gamma, c, k, rule=rule, arrangement=arrangement, verify_cost=curve)) for k in (beams, beams + 1)
    ]
    assert speeds[1] <= speeds[0] * (1 + 1e-12)
    assert (speeds[1] == speeds[0]) == (arrangement == "parallel")
    one = float(beam.speedup(alpha, gamma, c, 1, rule=rule, arrangement=arrangement, verify_cost=curve))
    assert one == pytest.approx(float(speculative.speedup(alpha, gamma, c, verify_cost=curve)), rel=1e-12)


def test_at_free_width_only_sequential_beams_are_slower_than_one() -> None:
    for rule, arrangement in FORMS:
        found = float(beam.speedup(0.8, 4, 0.1, 6, rule=rule, arrangement=arrangement))
        turns = 6 if arrangement == "sequential" else 1
        assert found == pytest.approx(float(speculative.speedup(0.8, 4, 0.1)) / turns, rel=1e-15)


def test_more_draft_beams_must_be_accepted_more_often() -> None:
    curve = [(1, 1.0), (100, 10.9)]  # a tenth more per token
    speed = [float(beam.speedup(0.7, 3, 0.1, 2, draft_beams=u, verify_cost=curve)) for u in (2, 3, 4)]
    times = [0.3 + 1 + 0.1 * (2 + 3 * u - 1) for u in (2, 3, 4)]
    assert speed == pytest.approx([float(beam.expected_steps(0.7, 3)) / time for time in times], rel=1e-12)
    assert float(beam.speedup(0.7, 3, 0.1, 2, verify_cost=curve)) == speed[0]  # u = k by default


# --- A table language model, and plain beam search on it ---------------------------------------------------------------

VOCABULARY = 4
Text = tuple[tuple[int, ...], float]
"""Tokens, and the logarithm of their probability."""


class Table:
    """A language model that depends on the last two tokens; its draft is a mixture of it and another model."""

    def __init__(self, seed: int, agreement: float = 0.7, sharpness: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        target, other = rng.dirichlet(np.full(VOCABULARY, sharpness), (2, VOCABULARY + 1, VOCABULARY + 1))
        self.chances = {"target": target, "draft": agreement * target + (1 - agreement) * other}

    def log_chances(self, role: str, text: Sequence[int]) -> NDArray[np.float64]:
        first, second = ([VOCABULARY, *text])[-2:]
        return np.asarray(np.log(self.chances[role][first, second]))

    def best(self, role: str, hypotheses: Sequence[Text], width: int) -> list[Text]:
        """The most likely sequences of one token more, by enumeration."""
        found = [
            ((*text, token), score + float(log))
            for text, score in hypotheses
            for token, log in enumerate(self.log_chances(role, text))
        ]
        return sorted(found, key=lambda each: each[1], reverse=True)[:width]


def plain_search(table: Table, prompt: Sequence[int], tokens: int, width: int) -> list[list[Text]]:
    """Beam search with the target alone: the hypotheses after each step."""
    steps: list[list[Text]] = [[(tuple(prompt), 0.0)]]
    for _ in range(tokens):
        steps.append(table.best("target", steps[-1], width))
    return steps[1:]


def rounds_of_a_4(table: Table, prompt: Sequence[int], tokens: int, choice: Parameters) -> list[int]:
    """Steps of each round by Appendix A.4, literally: drafts, and the target's best, on complete sequences."""
    kept: list[Text] = [(tuple(prompt), 0.0)]
    made, found = 0, []
    while made < tokens:
        ahead, steps = kept, 0
        for _ in range(min(choice.draft_length, tokens - made - 1)):
            ahead = table.best("draft", ahead, choice.draft_width)
            kept = table.best("target", kept, choice.beams)
            steps += 1
            if not {text for text, _ in kept} <= {text for text, _ in ahead}:
                break
        else:
            kept = table.best("target", kept, choice.beams)
            steps += 1
        made += steps
        found.append(steps)
    return found


def search_with_ends(table: Table, prompt: Sequence[int], tokens: int, width: int, stop: int) -> list[list[Text]]:
    """The leading sequence and its rivals after each step of a beam search whose sequences end with `stop`, by enumeration."""
    growing: list[Text] = [(tuple(prompt), 0.0)]
    ended: list[Text] = []
    steps: list[list[Text]] = []
    for _ in range(tokens):
        found = table.best("target", growing, len(growing) * VOCABULARY)
        ended += [each for each in found[:width] if each[0][-1] == stop]
        growing = [each for each in found if each[0][-1] != stop][:width]
        steps.append(sorted([*ended, *growing], key=lambda each: each[1], reverse=True)[:width])
        if steps[-1][0] in ended:
            break
    return steps


def search_per_beam(
    table: Table, prompt: Sequence[int], tokens: int, choice: Parameters, stop: int | None = None
) -> list[Text]:
    """Rule `per-beam` on complete sequences, without caches."""
    kept: list[Text] = [(tuple(prompt), 0.0)]
    end = len(prompt) + tokens

    def complete(text: tuple[int, ...]) -> bool:
        return len(text) == end or (len(text) > len(prompt) and text[-1] == stop)

    while not complete(kept[0][0]):
        found: list[Text] = [each for each in kept if complete(each[0])]
        for text, score in kept:
            if complete(text):
                continue
            for _ in range(min(choice.draft_length, end - len(text) - 1)):
                [(guess, _)], [(own, likely)] = table.best("draft", [(text, 0.0)], 1), table.best("target", [(text, score)], 1)
                if guess != own or own[-1] == stop:
                    break
                text, score = own, likely
            found += table.best("target", [(text, score)], choice.beams)
        kept = sorted(found, key=lambda each: each[1], reverse=True)[: choice.beams]
    return kept


@dataclass
class Player:
    """Interpreter of steps with the table; its cache holds the sequences that end at each position, by model."""

    table: Table
    output: list[int] = field(default_factory=list)
    shown: list[list[int]] = field(default_factory=list)
    """Committed output after each round."""
    gains: list[int] = field(default_factory=list)
    widths: Counter[tuple[str, int]] = field(default_factory=Counter)

    def play(self, steps: Steps, cache: dict[str, list[list[tuple[int, ...]]]]) -> Any:
        answer: Any = None
        while True:
            try:
                step: Any = steps.send(answer)
            except StopIteration as end:
                return end.value
            match step:
                case Forward():
                    answer = step.role, self.forward(step, cache)
                case Read():
                    answer = self.best(step)
                case Fork():
                    heirs = step.heirs_of or (None,) * len(step.bodies)
                    answer = [self.fork(body, heir[1] if heir else cache) for body, heir in zip(step.bodies, heirs, strict=True)]
                case Join():
                    answer = [value for value, _ in step.tasks]
                case Commit():
                    self.output[len(self.output) - step.back :] = step.tokens
                    self.shown.append(self.output[:])
                    self.gains.append(len(step.tokens) - step.back)
                    answer = None

    def fork(self, body: Any, cache: dict[str, list[list[tuple[int, ...]]]]) -> Any:
        own = {role: levels[:] for role, levels in cache.items()}
        return self.play(body, own), own

    def forward(self, step: Forward, cache: dict[str, list[list[tuple[int, ...]]]]) -> list[tuple[int, ...]]:
        levels = cache.setdefault(step.role, [])
        assert step.at <= len(levels)
        del levels[step.at :]
        seen: list[tuple[int, ...]] = []
        held = levels[-1] if levels else [()]
        for token, follows in zip(step.tokens, step.tree or range(-1, len(step.tokens) - 1), strict=True):
            seen.append((*(seen[follows] if follows >= 0 else held[-1 - follows]), token))
        for text in seen:
            levels += [[]] * (len(text) - len(levels))
            levels[len(text) - 1] = [*levels[len(text) - 1], text]
        self.widths[step.role, len(seen)] += 1
        return seen

    def best(self, step: Read) -> list[Any]:
        assert step.kind == "beams"
        role, seen = step.output
        of = [(seen[index], score) for index, score in step.hypotheses]
        # By index, because two sequences may have the same tokens.
        found = [
            (token, index, score + float(log))
            for (text, score), (index, _) in zip(of, step.hypotheses, strict=True)
            for token, log in enumerate(self.table.log_chances(role, text))
        ]
        return [Continuation(*each) for each in sorted(found, key=lambda each: each[2], reverse=True)[: step.width]]


def played(
    choice: Parameters, table: Table, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()
) -> tuple[Player, list[Hypothesis]]:
    player = Player(table)
    found: list[Hypothesis] = player.play(decode(choice, prompt, tokens, stop), {})
    return player, found


def generated(prompt: Sequence[int], hypotheses: Sequence[Text]) -> list[list[int]]:
    return [list(text[len(prompt) :]) for text, _ in hypotheses]


PROMPTS = ((0,), (2, 1), (3, 0, 2))


@pytest.mark.parametrize("beams", [1, 2, 3, 4])
@pytest.mark.parametrize("wider", [0, 1, 3])
@pytest.mark.parametrize("draft_length", [0, 1, 2, 4])
def test_the_exact_rule_equals_beam_search_step_by_step(beams: int, wider: int, draft_length: int) -> None:
    for seed, prompt in itertools.product(range(6), PROMPTS):
        table, choice = Table(seed), Parameters(3, draft_length, beams, draft_beams=beams + wider)
        plain = plain_search(table, prompt, 8, beams)
        for tokens in (1, 2, 3, 8):
            player, found = played(choice, table, prompt, tokens)
            assert token_lists(found) == generated(prompt, plain[tokens - 1])
            assert [beam.score for beam in found] == pytest.approx([score for _, score in plain[tokens - 1]], rel=1e-12)
            assert player.output == generated(prompt, plain[tokens - 1])[0]
            for shown in player.shown:
                assert shown == generated(prompt, plain[len(shown) - 1])[0]
            assert player.gains == rounds_of_a_4(table, prompt, tokens, choice)


@pytest.mark.parametrize(("beams", "wider"), [(1, 0), (2, 0), (2, 2), (3, 1), (4, 0)])
@pytest.mark.parametrize("draft_length", [0, 1, 2, 4])
def test_sequences_that_end_with_a_stop_token_step_by_step(beams: int, wider: int, draft_length: int) -> None:
    lengths = set()
    for seed, prompt, stop in itertools.product(range(12), PROMPTS, range(VOCABULARY)):
        table, choice = Table(seed), Parameters(3, draft_length, beams, draft_beams=beams + wider)
        plain = search_with_ends(table, prompt, 8, beams, stop)
        player, found = played(choice, table, prompt, 8, (stop,))
        assert token_lists(found) == generated(prompt, plain[-1])
        assert [beam.score for beam in found] == pytest.approx([score for _, score in plain[-1]], rel=1e-12)
        assert player.output == generated(prompt, plain[-1])[0]
        # Tokens are committed once they are certain, so the output reaches its length with the last round.
        assert min(player.gains) >= 0
        assert all(len(shown) < len(player.output) for shown in player.shown[:-1])
        assert all(shown == player.output[: len(shown)] for shown in player.shown)
        if draft_length == 0:
            assert len(player.shown) == len(plain)  # a round is a step, so decoding ends at the same step
            begun = [[zip(*generated(prompt, step), strict=False)] for step in plain[:-1]]
            common = [len([*itertools.takewhile(lambda column: len({*column}) == 1, *each)]) for each in begun]
            assert all(len(shown) <= count for shown, count in zip(player.shown, common, strict=False))
        lengths.add(len(player.output))
    assert len(lengths) > 3


def test_a_stop_token_of_the_prompt_or_of_no_sequence_changes_nothing() -> None:
    for seed, form, beams in itertools.product(range(6), FORMS, (1, 2, 3)):
        choice, table = choose(form, beams, 2), Table(seed)
        assert played(choice, table, (0,), 6, (VOCABULARY + 3,))[1][0].score == played(choice, table, (0,), 6)[1][0].score
        assert played(choice, table, (1,), 6, (1,))[0].output  # a text may begin with it
        both = [played(choice, table, (0,), 6, stop)[0].output for stop in ((1, 2), (2, 1))]
        assert both[0] == both[1]
        assert not {*both[0][:-1]} & {1, 2}


@pytest.mark.parametrize("draft_length", [0, 1, 3])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_per_beam_sequences_end_with_a_stop_token_in_all_arrangements(beams: int, draft_length: int) -> None:
    lengths = set()
    for seed, prompt, stop in itertools.product(range(8), PROMPTS, range(VOCABULARY)):
        whole = search_per_beam(Table(seed), prompt, 7, choose(FORMS[1], beams, draft_length), stop)
        for form in FORMS[1:]:
            player, found = played(choose(form, beams, draft_length), Table(seed), prompt, 7, (stop,))
            assert token_lists(found) == generated(prompt, whole)
            assert [beam.score for beam in found] == pytest.approx([score for _, score in whole], rel=1e-12)
            assert all(len(shown) < len(player.output) for shown in player.shown[:-1])
        lengths.add(len(player.output))
    assert len(lengths) > 3


def test_the_sample_has_rejections_and_changes_of_the_best_hypothesis() -> None:
    """The sample of the test above has accepted and rejected drafts, changing best hypotheses, and trees."""
    backs = gains = wide = 0
    for seed in range(12):
        player, _ = played(Parameters(3, 3, 3, draft_beams=4), Table(seed, sharpness=3.0), (1,), 12)
        backs += sum(later[: len(earlier)] != earlier for earlier, later in itertools.pairwise(player.shown))
        gains += len({*player.gains} - {1})
        wide += player.widths["target", 3 + 4 * 3]
    assert min(backs, gains, wide) > 5


def test_plain_beam_search_of_full_width_finds_the_most_likely_sequences() -> None:
    """The reference itself is compared with an enumeration of all sequences."""
    for seed in range(5):
        table = Table(seed)
        chances = {
            text: sum(float(table.log_chances("target", (0, *text[:n]))[text[n]]) for n in range(3))
            for text in itertools.product(range(VOCABULARY), repeat=3)
        }
        (last, *_) = plain_search(table, (0,), 3, VOCABULARY**2)[-1]
        assert last[0][1:] == max(chances, key=chances.__getitem__)
        player, _ = played(Parameters(3, 2, VOCABULARY**2), table, (0,), 3)
        assert player.output == list(last[0][1:])


def test_the_per_beam_rule_differs_from_beam_search() -> None:
    """A counterexample: the rule of the slides finds a different and less likely sequence."""
    table, prompt, tokens, choice = Table(seed=4), (0,), 6, choose(FORMS[1], 2, 2)
    plain = plain_search(table, prompt, tokens, 2)[-1]
    player, found = played(choice, table, prompt, tokens)
    assert player.output != generated(prompt, plain)[0]
    likely = sum(float(table.log_chances("target", (0, *player.output[:n]))[player.output[n]]) for n in range(tokens))
    assert likely == pytest.approx(found[0].score, rel=1e-12)
    assert likely < plain[0][1] - 1
    same, _ = played(replace(choice, rule="exact"), table, prompt, tokens)
    assert same.output == generated(prompt, plain)[0]


def test_shorter_hypotheses_win_in_the_per_beam_rule() -> None:
    """Accepted tokens make a sequence longer and less likely, so one without accepted tokens may win.

    Hence more beams make less progress per round, which no law of the winner's acceptance by position describes.
    """
    gains = {beams: [played(choose(FORMS[1], beams, 3), Table(seed), (0,), 12)[0].gains for seed in range(40)] for beams in (1, 3)}
    rounds = {beams: sum(len(each) for each in found) for beams, found in gains.items()}
    assert rounds[3] > 1.2 * rounds[1]
    assert min(min(each) for each in gains[1]) == 1
    assert min(min(each) for each in gains[3]) < 0  # the new best hypothesis is shorter than the one before


@pytest.mark.parametrize("seed", range(20))
def test_arrangements_give_the_same_output(seed: int) -> None:
    """Sharing passes and inheriting caches do not change the output."""
    for prompt, beams, draft_length in itertools.product(PROMPTS, (1, 2, 3), (0, 1, 3)):
        found = [played(choose(form, beams, draft_length), Table(seed), prompt, 7) for form in FORMS[1:]]
        for player, hypotheses in found[1:]:
            assert player.shown == found[0][0].shown
            assert token_lists(hypotheses) == token_lists(found[0][1])
            assert [beam.score for beam in hypotheses] == [beam.score for beam in found[0][1]]
        whole = search_per_beam(Table(seed), prompt, 7, choose(FORMS[1], beams, draft_length))
        assert token_lists(found[0][1]) == generated(prompt, whole)
        assert [beam.score for beam in found[0][1]] == pytest.approx([score for _, score in whole], rel=1e-12)
        if draft_length == 0:  # all sequences have equal length, and the rule is plain beam search
            assert token_lists(found[0][1]) == generated(prompt, plain_search(Table(seed), prompt, 7, beams)[-1])
        if beams == 1:
            greedy = plain_search(Table(seed), prompt, 7, 1)[-1]
            assert token_lists(found[0][1]) == generated(prompt, greedy)


# --- Three views on the same outcomes -----------------------------------------------------------------------------------


def all_outcomes(tokens: int) -> list[tuple[bool, ...]]:
    return list(itertools.product((False, True), repeat=tokens))


def worlds(outcomes: Sequence[Sequence[bool]], longest: int) -> Iterator[World]:
    """Model answers for each sequence of outcomes by position."""
    for outcome in outcomes:
        survivors = [len(list(itertools.takewhile(bool, outcome[place:]))) for place in range(len(outcome))]
        yield World(1, 3, drafts={"draft": DraftOutcomes("target", [min(each, longest) for each in survivors])})


def walked(choice: Parameters, tokens: int, cost: UnitCost, outcomes: Sequence[Sequence[bool]]) -> Any:
    """The vectorised walk on these outcomes; at most a block of them."""
    rows = np.zeros((tokens - 1, BLOCK), dtype=np.bool_)
    rows[:, : len(outcomes)] = np.array([outcome[: tokens - 1] for outcome in outcomes]).reshape(len(outcomes), tokens - 1).T
    return twin.walk(choice, tokens, cost, iter([lambda _, row=row: row for row in rows]))


def by_rounds(choice: Parameters, tokens: int, outcome: Sequence[bool]) -> list[tuple[int, int]]:
    """(accepted, drafted) of each round."""
    made, found = 0, []
    while made < tokens:
        drafted = min(choice.draft_length, tokens - made - 1)
        accepted = len(list(itertools.takewhile(bool, outcome[made : made + drafted])))
        found.append((accepted, drafted))
        made += accepted + 1
    return found


def time_by_hand(choice: Parameters, rounds: Sequence[tuple[int, int]], c: float, curve: dict[int, float]) -> tuple[float, float]:
    """Time and unit-time in single-token passes, from the rounds."""
    time = busy = 0.0
    for _, drafted in rounds:
        if choice.rule == "exact":
            width = choice.beams + choice.draft_width * drafted
        else:
            width = (1 + drafted) * (choice.beams if choice.arrangement == "batched" else 1)
        passes = drafted * c + curve[width] / curve[1]
        time += passes * (choice.beams if choice.arrangement == "sequential" else 1)
        busy += passes * (1 if choice.arrangement == "batched" else choice.beams)
    return time, busy


CURVE = {width: 1 + 0.0625 * (width - 1) + (0.25 if width > 4 else 0.0) for width in range(1, 60)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(("beams", "draft_beams", "draft_length"), [(1, 1, 2), (2, 2, 1), (2, 4, 3), (3, 3, 2), (2, 3, 0)])
def test_events_and_paths_by_hand_for_all_outcomes(
    form: tuple[str, str], per_layer: bool, beams: int, draft_beams: int, draft_length: int
) -> None:
    choice = choose(form, beams, draft_length, draft_beams)
    for tokens in (1, 2, 5):
        cost = UnitCost(3, cost_ratio=0.125, final_head=1.0, verify_cost=tuple(CURVE.items()))
        outcomes = all_outcomes(tokens)
        tally = walked(choice, tokens, cost, outcomes)
        for index, (outcome, world) in enumerate(zip(outcomes, worlds(outcomes, draft_length), strict=True)):
            run = simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, world, per_layer=per_layer)
            rounds = by_rounds(choice, tokens, outcome)
            time, busy = (4 * each for each in time_by_hand(choice, rounds, 0.125, CURVE))
            assert run.tokens == list(range(1, tokens + 1))
            assert run.rounds == Counter(rounds)
            assert (run.latency, run.busy) == (pytest.approx(time, rel=1e-14), pytest.approx(busy, rel=1e-14))
            assert (tally.time[index], tally.busy[index]) == (pytest.approx(time, rel=1e-14), pytest.approx(busy, rel=1e-14))
            assert (tally.rounds[index], tally.drafted[index]) == (len(rounds), sum(drafted for _, drafted in rounds))
            assert run.peak_units == choice.units


@given(
    st.sampled_from(FORMS), st.integers(1, 4), st.integers(0, 3), st.integers(0, 4), st.integers(1, 12), st.floats(0, 3),
    st.tuples(*[st.sampled_from([0.0, 0.1, 0.7, 3.0])] * 4), st.sampled_from(["linear", "tree"]),
    st.lists(st.floats(0.5, 3), min_size=5, max_size=5), st.lists(st.booleans(), min_size=12, max_size=12),
)  # fmt: skip
def test_events_equal_paths_at_any_costs(
    form: tuple[str, str], beams: int, wider: int, draft_length: int, tokens: int, ratio: float, times: tuple[float, ...],
    dispatch_law: str, curve: list[float], outcome: list[bool],
) -> None:  # fmt: skip
    choice = choose(form, beams, draft_length, beams + wider)
    head, dispatch, each, link = times
    verify = tuple(zip((1, 2, 4, 9, 60), sorted(curve), strict=True))
    cost = UnitCost(
        3, layer_times=(1.0, 0.3, 2.0), final_head=head, dispatch=dispatch, dispatch_per_process=each, dispatch_law=dispatch_law,
        link=link, cost_ratio=ratio, verify_cost=verify,
    )  # fmt: skip
    (world,) = worlds([outcome], draft_length)
    run = simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, world)
    tally = walked(choice, tokens, cost, [outcome])
    assert run.latency == pytest.approx(tally.time[0], rel=1e-12)
    assert run.busy == pytest.approx(tally.busy[0], rel=1e-12)
    assert run.rounds == Counter(by_rounds(choice, tokens, outcome))


def test_dispatch_and_links_by_hand() -> None:
    """2 beams, 2 rounds: each takes the dispatch of two processes (.5 + 2 * .25) and the link to the second unit (8)."""
    cost = UnitCost(3, cost_ratio=1 / 3, dispatch=0.5, dispatch_per_process=0.25, link=8.0)
    for form, time, busy in ((FORMS[3], 1 + 8 + 4 + 1 + 8 + 3, 1 + 8 + 1 + 6), (FORMS[2], 1 + 8 + 1 + 6, 1 + 8 + 1 + 6)):
        (world,) = worlds([(False, False)], 1)
        choice = choose(form, 2, 1)
        run = simulate(decode(choice, [0], 2), 2, Cluster(choice.units), cost, world)
        assert (run.latency, run.busy) == (time, busy)
    alone = simulate(decode(choose(FORMS[3], 1, 0), [0], 2), 2, Cluster(1), cost, next(worlds([(False, False)], 1)))
    assert alone.latency == 2 * (0.75 + 3)  # a single beam stays on its unit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("law", [Iid(0.6), Markov(0.6, 0.3)])
def test_formula_is_the_mean_over_all_outcomes(form: tuple[str, str], law: Iid | Markov) -> None:
    choice, tokens = choose(form, 2, 2, 3), 6
    cost = UnitCost(3, cost_ratio=0.2, verify_cost=tuple(CURVE.items()), link=0.5, dispatch=0.25)
    low, high = law.probabilities(tokens)
    outcomes = all_outcomes(tokens)
    chances = np.array([
        np.prod([(rate if here else 1 - rate) for here, rate in zip(
            outcome, [low[0], *[(high if before else low)[1] for before in outcome[:-1]]], strict=True)])
        for outcome in outcomes
    ])  # fmt: skip
    runs = [
        simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, world) for world in worlds(outcomes, 2)
    ]
    latency, busy = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    found = beam.predict(choice, tokens, law, cost)
    assert float(found.latency) == pytest.approx(float(chances @ latency), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(chances @ (latency - chances @ latency) ** 2), rel=1e-9)
    assert float(found.busy) == pytest.approx(float(chances @ busy), rel=1e-12)
    assert float(found.rounds) == pytest.approx(float(chances @ [run.rounds.total() for run in runs]), rel=1e-12)
    assert float(found.units) == choice.units
    if form[1] != "parallel":
        assert float(found.units_ratio) == 1
    else:  # links make some rounds busier than others
        assert np.isnan(float(found.units_ratio))
        assert np.isnan(float(beam.predict(choice, tokens, law, replace(cost, link=1e-6, dispatch=0.0)).units_ratio))
        free = beam.predict(choice, tokens, law, replace(cost, link=0.0, dispatch=0.0))
        assert float(free.units_ratio) == pytest.approx(2, rel=1e-14)


def test_many_tokens_approach_the_closed_form() -> None:
    for form in FORMS:
        choice = choose(form, 2, 3, 4)
        rule, arrangement = form
        cost = UnitCost(3, cost_ratio=0.1, verify_cost=tuple(CURVE.items()))
        more: Any = {"rule": rule, "arrangement": arrangement, "draft_beams": choice.draft_beams, "verify_cost": CURVE}
        short, long = (float(beam.predict(choice, tokens, Iid(0.7), cost).latency) for tokens in (400, 800))
        # The difference of two lengths cancels the first and last rounds.
        assert 400 * 3 / (long - short) == pytest.approx(float(beam.speedup(0.7, 3, 0.1, 2, **more)), rel=1e-9)


# --- Counts of passes ----------------------------------------------------------------------------------------------------


def spied(steps: Steps, seen: list[Forward]) -> Steps:
    """The same algorithm; records its passes."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Forward):
            seen.append(step)
        if isinstance(step, Fork):
            step = step._replace(bodies=tuple(spied(body, seen) for body in step.bodies if not isinstance(body, Forward)))
        answer = yield step


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", [[0], [0, 1, 2]])
def test_passes_widths_and_heads_equal_the_theory(form: tuple[str, str], prompt: list[int]) -> None:
    tokens, beams, draft_beams, draft_length = 6, 2, 3, 2
    choice = choose(form, beams, draft_length, draft_beams, draft_layers=2)
    apart = 1 if choice.arrangement == "batched" else beams
    outcomes = all_outcomes(tokens)
    for outcome, world in zip(outcomes, worlds(outcomes, draft_length), strict=True):
        world.prompt, seen = len(prompt), list[Forward]()
        work = count(spied(decode(choice, prompt, tokens), seen), world, 1000)  # the process ends by itself
        rounds = by_rounds(choice, tokens, outcome)
        assert work.tokens == list(range(len(prompt), len(prompt) + tokens))
        assert work.commits == ["round"] * len(rounds)
        assert work.rounds == Counter(rounds)
        read = 2 * (len(prompt) > 1)
        assert work.passes_of["target"] == apart * len(rounds) + read / 2
        assert work.passes_of["draft"] == apart * sum(drafted for _, drafted in rounds) + read / 2
        assert work.forks == (0 if apart == 1 else apart * len(rounds))
        passes = seen[read:]
        tested = [step for step in passes if step.role == "target"]
        drafted = [int(drafted) for _, drafted in rounds for _ in range(apart)]
        widths = beam.pass_width(drafted, beams, choice.draft_width, choice.rule, choice.arrangement)
        assert [len(step.tokens) for step in tested] == widths.tolist() == [step.heads for step in tested]
        assert {(step.layers.first, step.layers.last) for step in tested} == {(0, 3)}
        of_draft = [step for step in passes if step.role == "draft"]
        assert all((step.layers.first, step.layers.last) == (0, 2) for step in of_draft)
        followed = [
            (beams if place == 0 or choice.rule != "exact" else draft_beams) if apart == 1 else 1
            for _, drafted in rounds for _ in range(apart) for place in range(drafted)
        ]  # fmt: skip
        assert [step.heads for step in of_draft] == followed
        assert all(step.heads <= len(step.tokens) for step in of_draft)
        if apart > 1:  # each sub-process has a single sequence
            assert all(step.tree == () for step in passes)
        for step in seen[:read]:
            assert (step.tokens, step.at, step.heads) == (tuple(prompt[:-1]), 0, 0)


def test_the_draft_model_reads_no_token_twice() -> None:
    """After a completely accepted round it reads one position more: the parent of the kept hypotheses."""
    seen = list[Forward]()
    (world,) = worlds([(True,) * 9], 2)
    count(spied(decode(choose(FORMS[0], 2, 2, 3), [0], 9), seen), world, 9)
    drafts = [(step.at, len(step.tokens)) for step in seen if step.role == "draft"]
    # Both kept hypotheses have the same parent, so it is one token more.
    assert drafts == [(0, 2), (1, 3), (2, 3), (4, 3), (5, 3), (7, 3)]
    assert [(step.at, len(step.tokens)) for step in seen if step.role == "target"] == [(0, 8), (3, 8), (6, 8)]


# --- Steps over several hypotheses ------------------------------------------------------------------------------------------


def test_positions_of_a_tree() -> None:
    tree = Forward("target", (7, 8, 9, 6, 5), 5, LayerSpan(0, 4), tree=(-1, -2, 0, 2, 1))
    assert list(tree.positions) == [5, 5, 6, 7, 6]
    assert tree.end == 8
    line = Forward("target", (7, 8, 9), 5, LayerSpan(0, 4))
    assert (list(line.positions), line.end) == ([5, 6, 7], 8)


def test_the_cache_checks_the_parents_in_a_tree() -> None:
    cache = Cache()
    cache.write(Forward("target", (0, 1, 2), 0, LayerSpan(0, 2)))
    cache.write(Forward("target", (7, 8, 9), 3, LayerSpan(0, 2), tree=(-1, -1, 1)))
    assert cache.rows == {"target": [5, 5]}
    assert cache.breadths == {"target": [1, 1, 1, 2, 1]}
    other = cache.copy()
    other.write(Forward("target", (5, 5), 4, LayerSpan(0, 2), tree=(-2, -1)))
    assert (other.breadths["target"], cache.breadths["target"]) == ([1, 1, 1, 2, 2], [1, 1, 1, 2, 1])
    other.write(Forward("target", (5, 5), 3, LayerSpan(0, 2)))  # a single sequence cuts the tree
    assert (other.breadths["target"], other.rows) == ([1, 1, 1, 1, 1], {"target": [5, 5]})
    for at, after in ((4, (-3, -1)), (5, (-2, -1)), (4, (0, -1)), (4, (-1, 1)), (4, (-1, 2)), (4, (-1,)), (4, (-1, -1, -1))):
        with pytest.raises(CacheError, match="target"):
            cache.write(Forward("target", (5, 5), at, LayerSpan(0, 2), tree=after))
    with pytest.raises(CacheError, match=r"token 1 at position 0 follows -2, but there are 1 tokens before it"):
        Cache().write(Forward("target", (5, 5), 0, LayerSpan(0, 2), tree=(-1, -2)))
    Cache().write(Forward("target", (5, 5), 0, LayerSpan(0, 2), tree=(-1, -1)))
    with pytest.raises(CacheError, match="target"):  # after its last row
        cache.write(Forward("target", (5, 5), 6, LayerSpan(0, 2), tree=(-1, -1)))


def test_upper_layers_need_all_rows_of_a_tree() -> None:
    cache = Cache()
    cache.write(Forward("target", (7, 8), 0, LayerSpan(0, 2), tree=(-1, -1)))
    cache.write(Forward("target", (7, 8), 0, LayerSpan(2, 3), tree=(-1, -1)))
    assert cache.rows == {"target": [1, 1, 1]}
    with pytest.raises(CacheError, match="target: layers"):
        cache.write(Forward("target", (7, 8), 0, LayerSpan(2, 3), tree=(-1, 0)))


def rewinding() -> Steps:
    yield Commit("round", (1, 2, 3), 2)
    yield Commit("round", (7, 8, 9, 6), 5, 2)
    yield Commit("token", (5,))


def inherits() -> Steps:
    """A sub-process continues from the cache of an ended one, another from its starter's."""

    def reads(*places: int) -> Steps:
        for at in places:
            yield Forward("target", (0,), at, LayerSpan(0, 2))
        return places

    first = yield Fork((reads(0, 1), reads(0)), (0, 1))
    found = yield Join(first)
    assert list(found) == [(0, 1), (0,)]
    second = yield Fork((reads(2), reads(0)), (0, 1), (first[0], None))
    assert list((yield Join(second))) == [(2,), (0,)]
    assert list((yield Join(second))) == [(2,), (0,)]  # tasks that ended before can be joined
    yield Commit("token", (1,))


def disowned() -> Steps:
    """The same, but from the empty cache of its starter."""

    def reads(at: int) -> Steps:
        yield Forward("target", (0,), at, LayerSpan(0, 2))

    tasks = yield Fork((reads(0),), (0,))
    yield Join(tasks)
    yield Join((yield Fork((reads(1),), (0,))))
    yield Commit("token", (1,))


def simulated(steps: Steps, tokens: int, cost: UnitCost, units: int = 2) -> Run:
    return simulate(steps, tokens, Cluster(units), cost, World(1, 2))


def test_steps_of_several_hypotheses_in_both_interpreters() -> None:
    cost = UnitCost(2)
    for found in (count(rewinding(), World(1, 2), 99), simulated(rewinding(), 6, cost)):
        assert found.tokens == [1, 7, 8, 9, 6, 5]
        assert found.rounds == {(2, 2): 1, (1, 5): 1}
    assert count(inherits(), World(1, 2), 1).tokens == simulated(inherits(), 1, cost).tokens == [1]
    for run in (lambda: count(disowned(), World(1, 2), 1), lambda: simulated(disowned(), 1, cost)):
        with pytest.raises(CacheError, match=r"target: layers \[0, 2\) at position 1, but the layers hold \[\]"):
            run()


def test_a_cache_on_the_same_unit_needs_no_link() -> None:
    # The starter is on unit 0, where the first sub-process makes its passes (2 each), while the second takes the link (10).
    assert simulated(inherits(), 1, UnitCost(2, link=10.0)).latency == (10 + 2) + (10 + 2)
    shared = simulate(inherits(), 1, Cluster(2, links="shared"), UnitCost(2, link=10.0), World(1, 2))
    assert shared.latency == (10 + 2) + (10 + 2)  # the first one needs no link, so there is no wait

    def crossing() -> Steps:
        def reads(at: int) -> Steps:
            yield Forward("target", (0,), at, LayerSpan(0, 2))

        tasks = yield Fork((reads(0), reads(0)), (0, 1))
        yield Join(tasks)
        yield Join((yield Fork((reads(1), reads(1)), (0, 1), (tasks[1], tasks[1]))))
        yield Commit("token", (1,))

    found = simulate(crossing(), 1, Cluster(2), UnitCost(2, link=10.0), World(1, 2), record=True)
    fates = [(row.unit, row.fate) for row in found.intervals if row.what == "forward" and row.start < 12]
    assert fates == [(0, "discarded"), (1, "kept")]
    assert [row.start for row in found.intervals if row.what == "link"] == [0, 12]  # the link leads to unit 0 now, not to unit 1
    assert sorted(row.unit for row in found.intervals if row.start == 12 and row.what == "forward") == [1]


def test_simulated_answers_of_beams() -> None:
    world = World(2, 3, drafts={"draft": DraftOutcomes("target", [1, 0, 0, 0])})

    def best(role: str, width: int, *hypotheses: tuple[int, float], tokens: tuple[int, ...] = (-5, 1), at: int = 1) -> Any:
        output = Forward(role, tokens, at, LayerSpan(0, 3), tree=(-1,) * len(tokens))
        return world.read(Read("beams", output, width=width, hypotheses=hypotheses))

    target, draft = best("target", 3, (0, -1.0), (1, -2.0)), best("draft", 3, (0, -1.0), (1, -2.0))
    assert [each.token for each in target] == [each.token for each in draft][::-1] == [2, -4, -5]
    assert {each.follows for each in (*target, *draft)} == {1}
    assert [each.score for each in target] == [each.score for each in draft] == [-2, -2 - 1 / 3, -2 - 2 / 3]
    world.written = [2]
    target, draft = (best(role, 2, (0, 0.0), tokens=(2,), at=2) for role in ("target", "draft"))
    assert target[0].token == 3
    assert {each.token for each in draft} & {each.token for each in target} == {target[1].token}
    wrong = best("target", 2, (0, 0.0))
    assert all(each.token < 0 and each.follows == 0 for each in wrong)
    assert [each.score for each in wrong] == [-1, -1.5]  # below the worst score of a right hypothesis
    other = best("draft", 9, (0, 0.0))
    assert len({each.token for each in other}) == 9
    # Of equal copies the first is continued.
    assert {each.follows for each in best("target", 2, (0, 0.0), (1, -9.0), tokens=(1, 1))} == {0}
    tree = Forward("target", (1, 2, -9), 1, LayerSpan(0, 3), tree=(-1, 0, 0))
    assert [world.read(Read("next", tree, offset)) for offset in (-3, -2)] == [2, 3]


# --- Scenarios ----------------------------------------------------------------------------------------------------------------


def tables(**cost: Any) -> scenario_file.Tables:
    methods = [
        {"name": "beam", "layers": 3, "num_speculative_tokens": 2, "num_beams": 2, "rule": rule, "arrangement": arrangement}
        for rule, arrangement in FORMS
    ]
    return {
        "scenario": {"name": "beams", "tokens": 9, "replications": 40},
        "method": methods,
        "outcomes": {"kind": "iid", "acceptance_rate": 0.7},
        "cost": {"cost_ratio": 0.25, **cost},
    }


def test_a_scenario_with_all_three_views() -> None:
    for cost, limit in (({}, 0.0), ({"link": 0.3, "dispatch": 0.7, "final_head": 0.1, "verify_cost": [[1, 1.0], [9, 1.7]]}, 1e-12)):
        grid = Grid(tables(**cost))
        for point in range(grid.points):
            case = grid.case(point)
            row = evaluation.events_row(case, 0, 40)
            assert not case.contended
            assert row["paths_difference"] <= limit * row["latency"]
            formula = formula_view.formula_row(case)
            assert formula["reserved_units"] == case.reserved_units == (2 if case.parameters.arrangement == "parallel" else 1)
            assert point_columns.described(grid, point, case)["exact"] is (case.parameters.rule == "exact")
            paths = evaluation.paths_row(case, 0, 40)
            assert paths["rounds"] == row["rounds"]
            assert paths["drafted"] == row["drafted"]


def test_the_beam_table_of_the_slides_as_a_scenario() -> None:
    """128 tokens: slightly below Theorem 3.8 over k, because the last rounds are cut."""
    grid = Grid(scenario_file.load("beam-deck"))
    found = [formula_view.formula_row(grid.case(point)) for point in range(grid.points)]
    for row, beams, rate in zip(found, (3, 5), (0.79, 0.75), strict=False):
        assert row["speedup"] == pytest.approx(float(finite_speedup(128, rate, 3, DECK)) / beams, rel=1e-12)
    assert [row["speedup"] for row in found[2:]] == [pytest.approx(3 * found[0]["speedup"], rel=1e-12)] * 2
    assert [row["reserved_units"] for row in found] == [1, 1, 3, 1]
    for point in range(grid.points):
        row = evaluation.events_row(grid.case(point), 0, 4)
        assert row["paths_difference"] <= 1e-12 * row["latency"]


def test_operations_count_all_beams() -> None:
    grid = Grid(tables(operations_ratio=0.125))
    for point in range(grid.points):
        case = grid.case(point)
        formula = formula_view.formula_row(case)
        paths, events = evaluation.paths_row(case, 0, 40), evaluation.events_row(case, 0, 40)
        assert paths["operations"] == events["operations"]
        rounds, drafted = paths["rounds"], paths["drafted"]
        assert paths["operations"] == 2 * (rounds + drafted * 1.125)  # two beams, drafted and tested
        per_round = formula["tokens_per_round"], formula["draft_acceptance_rate"], formula["operations_per_token"]
        rounds = 9 / per_round[0]
        assert per_round[2] == pytest.approx(2 * (rounds + (9 - rounds) / per_round[1] * 1.125) / 9, rel=1e-12)
    assert np.isnan(formula_view.formula_row(Grid(tables()).case(0))["operations_per_token"])


def test_a_wider_draft_starts_from_the_kept_beams() -> None:
    """k = 2, u = 5: the target reads 2, 7, 12 tokens, the draft model 2 and 5 more."""
    cost = UnitCost(3, cost_ratio=0.1, operations_ratio=0.5)
    choice = Parameters(3, 2, 2, draft_beams=5)
    prices = beam.beam_round_prices(choice, cost)
    assert prices.operations.tolist() == [2.0, 7.0 + 1.0, 12.0 + 3.5]
    rounds = Counter({(0, 2): 3, (1, 1): 2, (0, 0): 1})
    assert beam.operations(choice, cost, rounds, Account()) == 3 * 15.5 + 2 * 8 + 2
    assert beam.beam_round_prices(choice, replace(cost, operations_ratio=None)).operations[0] == 2


def test_beams_share_fewer_units() -> None:
    grid = Grid(tables() | {"cluster": {"units": 1}})
    apart, parallel = grid.case(2), grid.case(3)
    assert parallel.contended
    assert evaluation.events_row(parallel, 0, 20)["latency"] == evaluation.events_row(apart, 0, 20)["latency"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beams": 0}, "beams must be between 1 and 1000, got 0"),
        ({"beams": 1001}, "beams must be between 1 and 1000, got 1001"),
        ({"beams": 2.0}, "beams must be a whole number, got 2.0"),
        ({"layers": 0}, "layers must be between 1 and 10000, got 0"),
        ({"draft_layers": 0}, "draft_layers must be between 1 and 10000, got 0"),
        ({"draft_length": -1}, "draft_length must be between 0 and 250, got -1"),
        ({"draft_beams": 1}, "draft_beams must be at least beams=2, got 1; a narrower draft is never accepted"),
        ({"draft_beams": 1001}, "draft_beams must be between 1 and 1000, got 1001"),
        ({"draft_beams": True}, "draft_beams must be a whole number, got True"),
        ({"rule": "exakt"}, "unknown rule 'exakt'; did you mean exact? known: exact, per-beam"),
        ({"arrangement": "serial"}, "unknown arrangement 'serial'; did you mean sequential? known: batched, parallel, sequential"),
        ({"arrangement": "parallel"}, "arrangement must be 'batched' for rule 'exact', which scores all hypotheses in one pass,"
         " got 'parallel'; use rule 'per-beam' for other arrangements"),
        ({"rule": "per-beam", "draft_beams": 3}, "draft_beams must be left out for rule 'per-beam', got 3; only 'exact' uses it"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"layers": 3, "draft_length": 2, "beams": 2}
    with pytest.raises(ParameterError) as caught:
        Parameters(**good | wrong)
    assert str(caught.value) == message


def test_limits_of_the_parameters_are_accepted() -> None:
    assert Parameters(1, 0, 1, draft_beams=1).draft_width == 1
    assert Parameters(10_000, 250, 1000, draft_layers=10_000).draft_width == 1000
    assert Parameters(1, 0, 7, draft_beams=1000).draft_width == 1000
    widest = Parameters(1, 0, 1000, rule="per-beam", arrangement="parallel")
    assert (widest.units, widest.longest_draft, widest.exact) == (1000, 0, False)
    assert (Parameters(1, 3, 5).units, Parameters(1, 3, 5).longest_draft, Parameters(1, 3, 5).exact) == (1, 3, True)
    assert (Parameters(1, 3, 5).draft_layers, Parameters(1, 3, 5).draft_beams) == (1, None)


def test_invalid_arguments_of_closed_forms_are_refused() -> None:
    with pytest.raises(ParameterError, match="cost_ratio is required"):
        beam.beam_round_prices(Parameters(3, 2, 2), UnitCost(3))
    with pytest.raises(ParameterError, match="draft_beams must be at least beams=3, got 2"):
        beam.speedup(0.5, 2, 0.1, 3, draft_beams=2)
    with pytest.raises(ParameterError, match="width must be at most 4, the last width of verify_cost, got 6"):
        beam.speedup(0.5, 2, 0.1, 2, verify_cost=[(1, 1.0), (4, 2.0)])
    with pytest.raises(ParameterError, match="draft_length must be at least 0, got -1"):
        beam.speedup(0.5, -1, 0.1, 2)
    with pytest.raises(ParameterError, match=r"cost_ratio must be at least 0, got -0\.1"):
        beam.speedup(0.5, 1, -0.1, 2)
    with pytest.raises(ParameterError, match="tokens must be between 1 and 1000000, got 0"):
        beam.predict(Parameters(3, 2, 2), 0, Iid(0.5), UnitCost(3, cost_ratio=0.1))
    with pytest.raises(ParameterError, match="drafted must be at least 0, got -1"):
        beam.pass_width(-1, 2, 2, "exact", "batched")


def test_predictions_of_round_laws_and_records() -> None:
    cost, choice = UnitCost(3, cost_ratio=0.25), Parameters(3, 2, 2)
    by_place = beam.predict(choice, 12, Rounds.by_draft_position([0.7, 0.7]), cost)
    assert float(by_place.latency) == pytest.approx(float(beam.predict(choice, 12, Iid(0.7), cost).latency), rel=1e-12)
    (run,) = [simulate(decode(choice, [0], 3), 3, Cluster(1), cost, world) for world in worlds([(True, False, True)], 2)]
    assert float(beam.predict(choice, 3, Replay([[True, False, True]]), cost).latency) == run.latency == 2 * 0.75 + 2 * 3


def test_types_of_predictions_and_prices() -> None:
    choice = choose(("per-beam", "parallel"), 3, 4)
    cost = UnitCost(8, cost_ratio=0.25)
    found = beam.predict(choice, 9, Iid(0.5), cost)
    values = (found.latency, found.busy, found.units, found.plain_latency, found.rounds, found.drafted, found.operations)
    assert {value.dtype for value in values if value is not None} == {np.dtype(np.float64)}
    assert [len(prices) for prices in beam.beam_round_prices(choice, cost)] == [5, 5, 5]
