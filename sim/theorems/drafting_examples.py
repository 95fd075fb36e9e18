"""Examples for theorems on drafting and verifying: decodings with outcomes by position, and small models given as tables.

The fields of a decoding are described in `pipelined_examples`. A pair of models has `target` and `draft`, lists of token weights;
all preceding tokens determine which list a model uses. `tokens` is the number of tokens to decode, `stop` an optional stop token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from model.interpret.account import Totals, Work
from model.methods.draft_model import PLACEMENTS
from model.methods.rounds.round_laws import ReplayRounds, Rounds
from model.methods.rounds.round_walks import Tally
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import paths as sampler
from model.outcomes.random_streams import BLOCK
from model.steps import Steps
from sim.engine.cluster import LINKS, STOPS
from sim.engine.events import Run
from sim.theorems import pipelined_examples
from sim.theorems.output_law import Model, TextLaw, law_of_model, law_of_text
from sim.theorems.pipelined_examples import (
    amounts,
    bits,
    chances,
    cost,
    law,
    laws,
    parameters_of,
    paths,
    play,
    rates,
    size,
    survivors,
)
from sim.theorems.theorem import Example, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

PROMPT = (0,)


# --- Playing an example ---


def walk_paths(x: Example) -> Tally:
    """Walk the same decoding in every replication of the vectorised paths."""
    draws = iter([np.zeros((size(x), BLOCK))])
    return sampler.walk(parameters_of(x), size(x), cost(x), ReplayRounds([survivors(x)]).drafts(draws))


def repeated_outcomes(values: Sequence[bool]) -> Iterator[Any]:
    """Return these outcomes by position for every replication of a block, independent of where drafts start."""
    rows = [np.full(BLOCK, value) for value in values]
    return iter([lambda _, row=row: row for row in rows])


def rounds(run: Any) -> int:
    """Return the rounds of a run, or of counted work."""
    return int(run.rounds.total())


def drafted(run: Any) -> int:
    """Return the drafted tokens of a run, or of counted work."""
    return sum(count * times for (_, count), times in run.rounds.items())


def untied(x: Example) -> Example:
    """Make draft passes and links longer by amounts with which no sum of them is that of passes of the target.

    Which of two unrelated passes that end at the same time ends first decides whether a further one begins, which no formula has.
    """
    given = dict(x["cost"])
    given |= {name: given[name] * longer for name, longer in (("cost_ratio", 1.00731), ("link", 1.00297)) if name in given}
    return {**x, "cost": given}


def all_decodings(x: Example, play: Callable[[Example], Run]) -> tuple[list[float], list[Run]]:
    """Return the probabilities of all outcomes under the law of an example, and the decodings that have them."""
    outcomes = paths(x["tokens"] - 1)
    mass: list[float] = chances(law(x["law"]), outcomes).tolist()
    return mass, [play({**x, "accept": [*row, False]}) for row in outcomes.T.tolist()]


def equal_work(expected: Work, chances: Sequence[float], runs: Sequence[Run], within: float) -> None:
    """Require that a closed form has the mean totals of the passes of these runs."""
    counted = [run.account.totals().by_model for run in runs]
    equal("models", [*expected.by_model], [role for role in ("target", "draft") if any(role in each for each in counted)])
    for role, totals in expected.by_model.items():
        for name, value in totals._asdict().items():
            mean = math.fsum(
                chance * getattr(each.get(role, Totals()), name) for chance, each in zip(chances, counted, strict=True)
            )
            equal(f"{name} of the {role}", float(value), mean, within)


def accepted(run: Any) -> int:
    """Return the accepted tokens of a run, or of counted work."""
    return sum(count * times for (count, _), times in run.rounds.items())


def starts(run: Run) -> list[int]:
    """Return the number of generated tokens at the start of each round."""
    return list(itertools.accumulate((count for *_, count in run.commits[:-1]), initial=0))


def law_of(x: Example) -> Any:
    """Return the law of acceptances of an example."""
    return Rounds(x["law"]["survival"]) if "survival" in x["law"] else pipelined_examples.law(x["law"])


def all_runs(x: Example, tokens: int) -> Iterator[tuple[float, Run]]:
    """Simulate every decoding that the law of an example allows; yield its probability and run. The last token is never tested."""
    law = law_of(x)
    if isinstance(law, Rounds):
        ends = np.append(law.survival[: x["draft_length"]], 0.0)
        mass = np.append(1.0, ends[:-1]) - ends
        for lengths in itertools.product(range(len(mass)), repeat=tokens - 1):
            yield math.prod(mass[list(lengths)].tolist()), play(x, survive=[*lengths, 0])
        return
    outcomes = paths(tokens - 1)
    for chance, accept in zip(chances(law, outcomes).tolist(), outcomes.T.tolist(), strict=True):
        yield chance, play(x, accept=[*accept, False])


def mean(x: Example, tokens: int, of: Callable[[Run], float]) -> float:
    """Return the mean of the quantity `of` over every decoding that the law allows."""
    return math.fsum(chance * of(run) for chance, run in all_runs(x, tokens))


def model(rows: list[list[int]]) -> Model:
    """Return a model that uses one of these rows of weights; their number is odd, so that different tokens give different rows."""
    table = [tuple(Fraction(weight, sum(row)) for weight in row) for row in rows]

    def next_token_law(text: tuple[int, ...]) -> tuple[Fraction, ...]:
        state = 0
        for token in text:
            state = (2 * state + token + 1) % len(table)
        return table[state]

    return next_token_law


def models(x: Example) -> dict[str, Model]:
    """Return the models of an example by role."""
    return {role: model(x[role]) for role in ("target", "draft")}


def stop_tokens(x: Example) -> tuple[int, ...]:
    """Return the stop tokens of an example: at most one."""
    return () if x.get("stop") is None else (x["stop"],)


def decoder(x: Example) -> Callable[[], Steps]:
    """Return a function that starts the decoding of an example."""
    how = {name: x[name] for name in ("drafter", "verification") if name in x}
    parameters = speculative.Parameters(1, x["draft_length"], x.get("sampled", True), **how)
    return lambda: speculative.decode(parameters, PROMPT, x["tokens"], stop_tokens(x))


def text_law(x: Example, steps: Callable[[], Steps] | None = None) -> TextLaw:
    """Return the distribution of the text that an example's decoding generates, or that other `steps` generate on its models."""
    return law_of_text(steps or decoder(x), models(x), PROMPT, x["tokens"])


def target_law(x: Example) -> TextLaw:
    """Return the distribution of the text that the target generates alone."""
    return law_of_model(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))


# --- Search strategies; hypothesis is imported only when one is built ---


@drawn
def drafting(
    draw: DrawFn,
    /,
    tokens: int = 7,
    most: int = 4,
    *,
    outcomes: str = "accept",
    costs: str = "plain",
    cluster: bool = False,
    **fields: SearchStrategy[Any],
) -> Example:
    """Draw decodings of at most `tokens` tokens with drafts of at most `most` tokens.

    `outcomes`: by position (`accept`), or numbers of accepted tokens of a draft that starts there (`survive`). `costs`: `plain`, in
    `whole` numbers and quarters, or in `tenths`, whose sums are rounded. `cluster`: draw a cluster of one unit up to one more than
    reserved. `fields` are further fields to draw.
    """
    example: Example = {"draft_length": draw(st.integers(0, most))}
    if outcomes == "accept":
        example["accept"] = bits(draw, tokens)
    else:
        example["survive"] = digits(draw, draw(st.integers(1, tokens)), most)
    _stage(draw, example, costs, cluster)
    return example | {name: draw(strategy) for name, strategy in fields.items()}


@drawn
def short_decodings(draw: DrawFn, tokens: int = 4, most: int = 3, *, costs: str = "plain", law: str = "one rate") -> Example:
    """Draw decodings short enough to enumerate all outcomes, and a law: i.i.d. (`one rate`), or `any`."""
    some = laws(tokens + 1) | survival(most) if law == "any" else st.fixed_dictionaries({"match_rate": rates()})
    example: Example = {"draft_length": draw(st.integers(0, most)), "tokens": draw(st.integers(1, tokens)), "law": draw(some)}
    _stage(draw, example, costs, cluster=False)
    return example


def survival(most: int) -> SearchStrategy[Example]:
    """Draw laws of rounds: probabilities that at least 1, 2, ... tokens of a draft are accepted."""
    falling = st.lists(rates(), min_size=most, max_size=most).map(lambda values: sorted(values, reverse=True))
    return st.fixed_dictionaries({"survival": falling})


@drawn
def pairs(
    draw: DrawFn, /, tokens: int = 3, most: int = 3, words: int = 3, *, stops: bool = True, **fields: SearchStrategy[Any]
) -> Example:
    """Draw pairs of models with a vocabulary of at most `words`, a draft length, a number of tokens, and perhaps a stop token."""
    count = draw(st.integers(2, words))
    # A vocabulary of three words has more outcomes, so decode fewer tokens.
    example: Example = {"draft_length": draw(st.integers(0, most)), "tokens": draw(st.integers(1, tokens - (count > 2)))}
    for role in ("target", "draft"):
        states = draw(st.sampled_from((1, 3)))
        example[role] = [digits(draw, count, 3, least=1) for _ in range(states)]
    if stops and draw(st.booleans()):
        example["stop"] = draw(st.integers(0, count - 1))
    return example | {name: draw(strategy) for name, strategy in fields.items()}


def _stage(draw: DrawFn, example: Example, costs: str, cluster: bool) -> None:
    """Add parameters, costs and a cluster, none of which changes the outcomes."""
    if costs != "plain":
        chosen = draw(st.integers(0, 23))
        example |= {
            "layers": 1 + chosen % 3,
            "sampled": bool(chosen // 3 % 2),
            "placement": PLACEMENTS[chosen // 6 % 2],
            "draft_layers": 1 + chosen // 12,
        }
        example["cost"] = _costs(draw, example["layers"], example["draft_length"], costs)
    if cluster:
        example["cluster"] = {
            "units": draw(st.integers(1, parameters_of(example).units + 1)),
            "links": draw(st.sampled_from(LINKS)),
            "stop": draw(st.sampled_from(STOPS)),
        }


def _costs(draw: DrawFn, layers: int, draft_length: int, kind: str) -> Example:
    """Draw fields of `UnitCost`: draft passes in quarters or tenths of the target's; optional link, head, layer and width costs."""
    amount = amounts(kind)
    parts, first = (4, 4) if kind == "whole" else (10, 7)
    chosen = draw(st.integers(0, 15))
    given: Example = {"cost_ratio": draw(st.integers(0, 8)) / parts}
    given |= {name: draw(amount) for bit, name in enumerate(("link", "final_head")) if chosen >> bit & 1}
    if chosen & 4:
        given["layer_times"] = [*(draw(amount) for _ in range(layers - 1)), draw(amount) or 1]
    if chosen & 8:
        times = itertools.accumulate(digits(draw, draft_length, 4), initial=first)
        given["verify_cost"] = [[width, time] for width, time in enumerate(times, start=1)]
    return given


def digits(draw: DrawFn, count: int, most: int, least: int = 0) -> list[int]:
    """Draw `count` numbers from 0 to `most` with one draw; not all zero if `least` is 1."""
    number = draw(st.integers(least, (most + 1) ** count - 1))
    return [number // (most + 1) ** index % (most + 1) for index in range(count)]
