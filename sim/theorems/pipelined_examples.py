"""Examples of decodings for theorems: search strategies, and functions that play an example.

An example of pipelined decoding has the fields `form`, `layers`, `exit_layer`, `candidates` and `matches` (one per token; the last
must have no effect), and may have `right` (index of the correct candidate, if not the first), `cost` (fields of `UnitCost`) and
`cluster` (fields of `Cluster`). One of speculative decoding has `draft_length` instead, and outcomes by position: `accept`, whether
the drafted token is accepted, or `survive`, the number accepted of a draft that starts there (strategies: `drafting_examples`).
Most examples are small: defects that show only in large decodings are rare, and large counterexamples are hard to read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.interpreter import CountedWork
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.ppd import algorithm as ppd
from model.methods.speculative import algorithm as speculative
from model.outcomes.outcome_laws import ByPosition, Chain, Iid, Markov
from model.steps import Steps, declining
from sim.engine.cluster import LINKS, STOPS, Cluster
from sim.engine.events import Run, simulate
from sim.theorems.theorem import Example, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

Floats = NDArray[np.float64]

UPPER_HALF = ("literal", "eager")
OVERHEADS = ("early_head", "final_head", "dispatch", "link", "promotion")
CLOSE = 1e-12
"""Relative error allowed between two formulas that add the same terms in a different order."""


# --- Playing an example ---


def parameters_of(example: Example) -> Any:
    """Return the parameters of an example's decoding."""
    if "draft_length" in example:
        names = ("layers", "draft_length", "sampled", "placement", "draft_layers", "drafter", "verification")
        return speculative.Parameters(**{"layers": 1} | {name: example[name] for name in names if name in example})
    batched = example.get("batched", False)
    return ppd.Parameters(example["layers"], example["exit_layer"], example["candidates"], example["form"], batched=batched)


def cost(example: Example) -> UnitCost:
    """Return the cost model of an example; by default that of the papers, with a draft pass of a quarter of the target's."""
    given = dict(example.get("cost", {}))
    if given.get("layer_times") is not None:
        given["layer_times"] = tuple(given["layer_times"])  # JSON turns tuples into lists
    if given.get("verify_cost") is not None:
        given["verify_cost"] = tuple((width, time) for width, time in given["verify_cost"])
    if "draft_length" in example:
        given.setdefault("cost_ratio", 0.25)
    return UnitCost(parameters_of(example).layers, **given)


def in_quarters(x: Example) -> UnitCost:
    """Return a cost model in quarters, so that sums are exact; a pass costs the same for any number of tokens."""
    return UnitCost(x["layers"], **{name: quarters / 4 for name, quarters in x["cost"].items()})


def size(example: Example) -> int:
    """Return the number of tokens that an example decodes."""
    return len(next(example[name] for name in ("accept", "survive", "matches") if name in example))


def survivors(example: Example) -> list[int]:
    """Return the number of accepted tokens of a draft that starts at each position."""
    longest = example["draft_length"]
    if "survive" in example:
        return [min(count, longest) for count in example["survive"]]
    counts, ahead = [], 0
    for accepted in reversed(example["accept"]):
        ahead = ahead + 1 if accepted else 0
        counts.append(min(ahead, longest))
    return counts[::-1]


def world(example: Example) -> World:
    """Return the simulated answers of the models in an example's decoding."""
    if "draft_length" in example:
        return World(1, parameters_of(example).layers, drafts={"draft": DraftOutcomes("target", survivors(example))})
    right = example.get("right", 1)
    return World(1, example["layers"], [right * match for match in example["matches"]])


def steps(example: Example) -> Steps:
    """Return the steps of an example's decoding."""
    if "draft_length" in example:
        return speculative.decode(parameters_of(example), [0], size(example))
    return ppd.decode(parameters_of(example), [0], size(example))


def play(example: Example, *, record: bool = False, per_layer: bool = False, offers: bool = False, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`; default cluster: the units that it reserves.

    The algorithm makes all its steps itself; with `offers`, several may be answered together (28n).
    """
    example = {**example, **changes}
    cluster = Cluster(**example["cluster"]) if "cluster" in example else Cluster(parameters_of(example).units)
    answers, tokens = world(example), size(example)
    own = steps(example) if offers else declining(steps(example))
    return simulate(own, tokens, cluster, cost(example), answers, per_layer=per_layer, record=record)


def same_run(got: Run, want: Run) -> None:
    """Require that two runs are equal to the last bit."""
    for field in fields(Run):
        equal(field.name, getattr(got, field.name), getattr(want, field.name))


def count_work(example: Example) -> CountedWork:
    """Count the work of an example's decoding."""
    return interpreter.count(steps(example), world(example), size(example))


def numbers(example: Example) -> tuple[int, int, int, int, int]:
    """Return d, d', k, l and the number of matches before the last position."""
    matches = example["matches"]
    return example["layers"], example["exit_layer"], example["candidates"], len(matches), sum(matches[:-1])


def rounding(example: Example) -> float:
    """Bound on the relative rounding error of a decoding's times: 0 for quarters, else one unit in the last place per term."""
    given = example.get("cost", {})
    values = [value for value in given.values() if isinstance(value, float)] + list(given.get("layer_times") or ())
    curve = given.get("verify_cost") or [[1, 1]]
    values += [time / curve[0][1] for _, time in curve]
    if all((4 * float(value)).is_integer() for value in values) and given.get("dispatch_law") != "tree":
        return 0.0
    terms = int(parameters_of(example).layers + example.get("draft_length", 0) + 8) * size(example)
    return terms * sys.float_info.epsilon


def paths(positions: int) -> NDArray[np.bool_]:
    """Return all sequences of outcomes as columns: shape (positions, 2**positions)."""
    return np.asarray((np.arange(2**positions) >> np.arange(positions)[:, None]) % 2 == 1)


def chances(law: Chain, outcomes: NDArray[np.bool_]) -> Floats:
    """Return the probability of each column of outcomes."""
    after_failure, after_success = law.probabilities(len(outcomes))
    total, last = np.ones(outcomes.shape[1]), np.zeros(outcomes.shape[1], dtype=np.bool_)
    for outcome, low, high in zip(outcomes, after_failure, after_success, strict=True):
        success = np.where(last, high, low)
        total, last = total * np.where(outcome, success, 1 - success), outcome
    return total


def law(example: Example) -> Chain:
    """Return the law of an example: by position, Markov, or i.i.d."""
    if "match_rates" in example:
        return ByPosition(example["match_rates"])
    if "correlation" in example:
        return Markov(example["match_rate"], example["correlation"])
    return Iid(example["match_rate"])


def gaps(x: Example) -> list[float]:
    """Return the times between tokens, the first from the start."""
    return [later - sooner for sooner, later in pairwise([0.0, *(time for time, *_ in play(x).commits)])]


def simulate_all(x: Example, match_rate: float) -> tuple[Floats, Floats, Floats]:
    """Simulate every sequence of outcomes; return latencies, compute and probabilities."""
    outcomes = paths(len(x["matches"]) - 1)
    played = [play(x, matches=[*path, False]) for path in outcomes.T.tolist()]
    mass = chances(Iid(match_rate), outcomes)
    return np.array([run.latency for run in played]), np.array([run.busy for run in played]), mass


# --- Search strategies; hypothesis is imported only when one is built ---


@drawn
def decodings(
    draw: DrawFn,
    /,
    forms: Sequence[str] = ppd.FORMS,
    *,
    tokens: int = 6,
    many: int = 40,
    half: str = "any",
    costs: str = "plain",
    cluster: bool = False,
    **fields: SearchStrategy[Any],
) -> Example:
    """Draw a decoding in one of `forms`, usually of at most `tokens` tokens, sometimes of at most `many`.

    `half`: all exit layers that the form allows (`any`), or only those `below` layers/2. `costs`: `plain`, overheads in `whole`
    layer-times, or in `tenths`, whose sums are rounded; the nested form always has plain costs. `cluster`: draw a cluster of one
    unit up to one more than the form reserves. `fields` are further fields to draw.
    """
    form = draw(st.sampled_from(list(forms)))
    large = form != "nested" and draw(st.integers(0, 19)) == 19
    layers = draw(st.integers(3 if half == "below" else 1, 40 if large else 8))
    first = -(-layers // 2) if form in UPPER_HALF else 1
    exit_layer = draw(st.integers(first, (layers - 1) // 2 if half == "below" else layers))
    # The tree of processes grows fast: keep it below 16 processes.
    generations = -(-layers // exit_layer) if form == "nested" else 1
    example: Example = {
        "form": form,
        "layers": layers,
        "exit_layer": exit_layer,
        "candidates": draw(st.integers(1, 3 if generations < 4 else 2 if generations < 5 else 1)),
        "matches": draw(st.lists(st.booleans(), min_size=1, max_size=many)) if large else bits(draw, tokens),
    }
    if (count := parameters_of(example).candidates) > 1:
        example["right"] = draw(st.integers(1, count))
    if costs != "plain" and form != "nested":
        example["cost"] = draw(_costs(layers, costs))
    if cluster:
        example["cluster"] = {
            "units": draw(st.integers(1, parameters_of(example).units + 1)),
            "links": draw(st.sampled_from(LINKS)),
            "stop": draw(st.sampled_from(STOPS)),
        }
    return example | {name: draw(strategy) for name, strategy in fields.items()}


def bits(draw: DrawFn, most: int) -> list[bool]:
    """Draw 1 to `most` booleans with two draws; a list would take two per element, and drawing dominates the search time."""
    count = draw(st.integers(1, most))
    number = draw(st.integers(0, 2**count - 1))
    return [bool(number >> bit & 1) for bit in range(count)]


def short_decodings(forms: tuple[str, ...], tokens: int = 4, **more: Any) -> SearchStrategy[Example]:
    """Draw decodings short enough to enumerate all outcomes, with a match rate."""
    return decodings(forms, tokens=tokens, many=tokens, **{"match_rate": rates()} | more)


def integers(low: int, high: int) -> SearchStrategy[int]:
    """Draw whole numbers from `low` to `high`."""
    return st.integers(low, high)


def overheads(kind: str = "whole") -> SearchStrategy[Example]:
    """Draw all overheads of the theory, in `whole` layer-times or in `tenths`."""
    return st.fixed_dictionaries(dict.fromkeys(OVERHEADS, amounts(kind)))


def quarters() -> SearchStrategy[Example]:
    """Draw costs of heads, propagated rows and state comparisons, in quarters of layer-times."""
    head = integers(0, 6)
    return st.fixed_dictionaries({
        "early_head": head, "final_head": head, "propagation": integers(0, 4), "state_check": integers(0, 2),
    })  # fmt: skip


def rates() -> SearchStrategy[float]:
    """Draw match rates in twentieths, 0 and 1 included; they print short."""
    return st.integers(0, 20).map(lambda twentieths: twentieths / 20)


def laws(positions: int = 40) -> SearchStrategy[Example]:
    """Draw laws of matches as fields for `law`: i.i.d., Markov, or with a rate per position."""
    one = st.fixed_dictionaries({"match_rate": rates()})
    return one | markov() | st.fixed_dictionaries({"match_rates": st.lists(rates(), min_size=positions, max_size=positions)})


def markov() -> SearchStrategy[Example]:
    """Draw a match rate and a valid correlation between neighbouring positions."""
    def allowed(pair: Example) -> bool:
        p, rho = pair["match_rate"], pair["correlation"]
        return bool(p * (1 - rho) <= 1 and p + rho * (1 - p) >= 0)

    some = st.integers(-20, 20).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({"match_rate": rates(), "correlation": some}).filter(allowed)


def amounts(kind: str) -> SearchStrategy[float]:
    return st.integers(0, 6) if kind == "whole" else st.integers(0, 80).map(lambda tenths: tenths / 10)


@drawn
def _costs(draw: DrawFn, layers: int, kind: str) -> Example:
    """Draw fields of `UnitCost`; overheads may be missing, layers may be unequal."""
    amount = amounts(kind)
    names = (*OVERHEADS, "dispatch_per_process")
    chosen = draw(st.integers(0, 2 ** (len(names) + 2) - 1))
    given: Example = {name: draw(amount) for bit, name in enumerate(names) if chosen >> bit & 1}
    if chosen >> len(names) & 1 and layers <= 8:
        # The last layer always takes time: a model without run time has no mean number of busy units.
        given["layer_times"] = [*(draw(amount) for _ in range(layers - 1)), draw(amount) or 1]
    if chosen >> (len(names) + 1) & 1 and kind != "whole":  # the depth of a tree is a logarithm
        given["dispatch_law"] = "tree"
    return given
