"""What theorems on drafting and verifying are tried on: decodings with luck by position, and small models given as tables.

The fields of a decoding are told in `draws`. A pair of models has `target` and `draft`, lists of weights of the tokens; which of
its lists a model uses hangs on every token before. `tokens` is how many are decoded, `stop` the token that ends the text, if any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from model.methods.draft_model import PLACEMENTS
from model.methods.rounds import ReplayRounds, Rounds, Tally
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import paths as sampler
from model.outcomes.random_streams import BLOCK
from model.steps import Steps
from sim.engine.cluster import LINKS, STOPS
from sim.engine.events import Run
from sim.theorems import pipelined_examples
from sim.theorems.output_law import Model, Texts, law_of_text, own_law
from sim.theorems.pipelined_examples import amounts, bits, chances, choice, cost, laws, paths, play, rates, size, survivors
from sim.theorems.theorem import Example, drawn, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

PROMPT = (0,)


# --- Playing an example ---


def walked(x: Example) -> Tally:
    """Many times the same decoding by the vectorised paths."""
    coins = iter([np.zeros((size(x), BLOCK))])
    return sampler.walk(choice(x), size(x), cost(x), ReplayRounds([survivors(x)]).drafts(coins))


def always(values: Sequence[bool]) -> Iterator[Any]:
    """These outcomes by position, the same in every replication of a block, wherever a draft starts."""
    rows = [np.full(BLOCK, value) for value in values]
    return iter([lambda _, row=row: row for row in rows])


def rounds(run: Any) -> int:
    """Rounds of a run, or of the counter's work."""
    return int(run.rounds.total())


def drafted(run: Any) -> int:
    """Tokens drafted in them."""
    return sum(count * times for (_, count), times in run.rounds.items())


def accepted(run: Any) -> int:
    """Drafted tokens accepted in them."""
    return sum(count * times for (count, _), times in run.rounds.items())


def starts(run: Run) -> list[int]:
    """How many tokens were out when each round began."""
    return list(itertools.accumulate((count for *_, count in run.commits[:-1]), initial=0))


def law_of(x: Example) -> Any:
    """The law of acceptances that an example names."""
    return Rounds(x["law"]["survival"]) if "survival" in x["law"] else pipelined_examples.law(x["law"])


def all_runs(x: Example, tokens: int) -> Iterator[tuple[float, Run]]:
    """Every decoding that the law of an example allows, by the simulator, with its chance. The last token is never tested."""
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
    """The mean of what `of` says of a run, over every decoding that the law allows."""
    return math.fsum(chance * of(run) for chance, run in all_runs(x, tokens))


def model(rows: list[list[int]]) -> Model:
    """A model that answers from one of these rows of weights. Their number is odd: then another token is another state."""
    table = [tuple(Fraction(weight, sum(row)) for weight in row) for row in rows]

    def says(text: tuple[int, ...]) -> tuple[Fraction, ...]:
        state = 0
        for token in text:
            state = (2 * state + token + 1) % len(table)
        return table[state]

    return says


def models(x: Example) -> dict[str, Model]:
    """The models of an example, by role."""
    return {role: model(x[role]) for role in ("target", "draft")}


def ends(x: Example) -> tuple[int, ...]:
    """The tokens that end an example's text: one, if any."""
    return () if x.get("stop") is None else (x["stop"],)


def decoder(x: Example) -> Callable[[], Steps]:
    """Starts the decoding of an example on its models."""
    parameters = speculative.Parameters(1, x["draft_length"], x.get("sampled", True))
    return lambda: speculative.decode(parameters, PROMPT, x["tokens"], ends(x))


def text_law(x: Example, steps: Callable[[], Steps] | None = None) -> Texts:
    """The law of the text that an example's decoding puts out, or other steps on its models."""
    return law_of_text(steps or decoder(x), models(x), PROMPT, x["tokens"])


def target_law(x: Example) -> Texts:
    """The law of the target's own text."""
    return own_law(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))


# --- Search strategies; hypothesis is imported only when one is built ---


@drawn
def drafting(
    draw: DrawFn,
    /,
    tokens: int = 7,
    most: int = 4,
    *,
    luck: str = "accept",
    costs: str = "plain",
    cluster: bool = False,
    **fields: SearchStrategy[Any],
) -> Example:
    """Decodings of at most so many tokens that draft at most `most` at a time.

    `luck`: outcomes by position (`accept`), or how many survive of a draft from there (`survive`). `costs`: `plain`, in `whole`
    numbers and quarters, or in `tenths`, which do not add up exactly. `cluster`: draw one, from a single unit to one more than
    reserved. `fields` are drawn beside.
    """
    example: Example = {"draft_length": draw(st.integers(0, most))}
    if luck == "accept":
        example["accept"] = bits(draw, tokens)
    else:
        example["survive"] = digits(draw, draw(st.integers(1, tokens)), most)
    _stage(draw, example, costs, cluster)
    return example | {name: draw(strategy) for name, strategy in fields.items()}


@drawn
def few(draw: DrawFn, tokens: int = 4, most: int = 3, *, costs: str = "plain", law: str = "one rate") -> Example:
    """Decodings of at most so many tokens, all luck of which can be tried, and a law: of `one rate`, or `any`."""
    some = laws(tokens + 1) | survival(most) if law == "any" else st.fixed_dictionaries({"match_rate": rates()})
    example: Example = {"draft_length": draw(st.integers(0, most)), "tokens": draw(st.integers(1, tokens)), "law": draw(some)}
    _stage(draw, example, costs, cluster=False)
    return example


def survival(most: int) -> SearchStrategy[Example]:
    """Laws of rounds: chances that at least 1, 2, ... tokens of a draft survive."""
    falling = st.lists(rates(), min_size=most, max_size=most).map(lambda values: sorted(values, reverse=True))
    return st.fixed_dictionaries({"survival": falling})


@drawn
def pairs(
    draw: DrawFn, /, tokens: int = 3, most: int = 3, words: int = 3, *, stops: bool = True, **fields: SearchStrategy[Any]
) -> Example:
    """Pairs of models over at most `words` words, a draft length, how many tokens to decode, and perhaps a token that ends them."""
    count = draw(st.integers(2, words))
    # Many ways to go with three words: shorter texts then.
    example: Example = {"draft_length": draw(st.integers(0, most)), "tokens": draw(st.integers(1, tokens - (count > 2)))}
    for role in ("target", "draft"):
        states = draw(st.sampled_from((1, 3)))
        example[role] = [digits(draw, count, 3, least=1) for _ in range(states)]
    if stops and draw(st.booleans()):
        example["stop"] = draw(st.integers(0, count - 1))
    return example | {name: draw(strategy) for name, strategy in fields.items()}


def _stage(draw: DrawFn, example: Example, costs: str, cluster: bool) -> None:
    """Add what does not change an example's luck."""
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
            "units": draw(st.integers(1, choice(example).units + 1)),
            "links": draw(st.sampled_from(LINKS)),
            "stop": draw(st.sampled_from(STOPS)),
        }


def _costs(draw: DrawFn, layers: int, draft_length: int, kind: str) -> Example:
    """Fields of `UnitCost`: a draft pass in quarters or tenths of the target's; links, heads, uneven layers and widths perhaps."""
    amount = amounts(kind)
    parts, first = (4, 4) if kind == "whole" else (10, 7)
    chosen = draw(st.integers(0, 15))
    given: Example = {"cost_ratio": draw(st.integers(0, 8)) / parts}
    given |= {name: draw(amount) for place, name in enumerate(("link", "final_head")) if chosen >> place & 1}
    if chosen & 4:
        given["layer_times"] = [*(draw(amount) for _ in range(layers - 1)), draw(amount) or 1]
    if chosen & 8:
        times = itertools.accumulate(digits(draw, draft_length, 4), initial=first)
        given["verify_cost"] = [[width, time] for width, time in enumerate(times, start=1)]
    return given


def digits(draw: DrawFn, count: int, most: int, least: int = 0) -> list[int]:
    """So many numbers from 0 to `most`, in one draw; not all of them zero if `least` is 1."""
    number = draw(st.integers(least, (most + 1) ** count - 1))
    return [number // (most + 1) ** place % (most + 1) for place in range(count)]
