"""Theorems on speculative decoding, 28 and 29: all views agree, and random draws are indexed by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model.methods.draft_model import COLOCATED
from model.methods.rounds.round_laws import ReplayRounds
from model.methods.speculative import paths as sampler
from model.methods.speculative.algorithm import HEADS, MODEL
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Iid
from sim.theorems import engine_invariants
from sim.theorems.drafting_examples import digits, drafted, drafting, law_of, rounds, starts, survival, walk_paths
from sim.theorems.pipelined_examples import cost, count_work, integers, laws, parameters_of, play, rates, rounding, size
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_SOME = 8  # replications compared of a block
_MOST = 4  # largest draft length


theorem = TheoremCollection("speculative")


# --- Examples ---


def _clusters() -> SearchStrategy[Example]:
    return drafting(outcomes="survive", costs="tenths", cluster=True)


def _drafters() -> SearchStrategy[Example]:
    """Draw decodings with a draft model or with draft heads, which are on the target's unit."""
    each = drafting(outcomes="survive", costs="tenths", drafter=st.sampled_from((MODEL, HEADS)))
    return each.map(lambda x: x if x["drafter"] == MODEL else {**x, "placement": COLOCATED})


@drawn
def _random_draws(draw: DrawFn) -> Example:
    tokens = draw(integers(1, 40))
    kind = draw(st.sampled_from(("survival", "law", "records")))
    if kind == "records":
        law = {"records": [digits(draw, tokens, _MOST) for _ in range(draw(integers(1, 2)))]}
    else:
        law = draw(laws(tokens) if kind == "law" else survival(_MOST))
    return {"draft_length": draw(integers(0, _MOST)), "tokens": tokens, "seed": draw(integers(0, 2**32)), "law": law}


def _rare_survivors() -> SearchStrategy[Example]:
    """Draw an accepted first draft and later drafts accepted in part, so that the end of a round affects the next."""
    survive = st.lists(st.sampled_from((0, 2)), min_size=5, max_size=7).map(lambda rest: [3, *rest])
    return st.fixed_dictionaries({"draft_length": integers(1, 2), "survive": survive, "more": st.just(0)})


# --- 28: conservation, and agreement of the views ---


@theorem("28d", "Events and paths agree exactly on every path, with costs in quarters of a pass of the target.",
         source="no contention", given=lambda: drafting(outcomes="survive", costs="whole"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: drafting(outcomes="survive", costs="tenths"))
def events_are_paths(x: Example) -> None:
    run, tally = play(x), walk_paths(x)
    equal("latency", float(tally.time[0]), run.latency, rounding(x))
    equal("compute", float(tally.busy[0]), run.busy, rounding(x))


@theorem("28g", "The cost of the counted passes equals the busy time; with the links of separate units it equals the latency.",
         source="no contention", given=lambda: drafting(outcomes="survive", costs="tenths"))
def work_is_busy_time(x: Example) -> None:
    """Sum the costs of passes; on separate units add two links per round that drafts."""
    run, work, prices = play(x), count_work(x), cost(x)
    draft = prices.pass_time("draft") or 0.0
    verified = sum(times * prices.slowdown(count + 1) for (_, count), times in work.rounds.items())
    busy = draft * work.passes_of["draft"] + prices.target_pass * verified
    equal("compute", run.busy, busy, rounding(x))
    drafting_rounds = sum(times for (_, count), times in work.rounds.items() if count)
    links = 2 * prices.link * drafting_rounds if parameters_of(x).placement == "separate" else 0.0
    equal("latency", run.latency, busy + links, rounding(x))
    equal("passes", run.passes, work.passes)


# --- 29: random draws are indexed by position ---


@theorem("29a", "An acceptance in place of a rejection never increases rounds, drafted tokens or time.",
         source="the start of the next round is monotone in the start of this one and in every outcome",
         given=lambda: drafting(costs="whole", at=integers(0, 39)).filter(_flat))
def acceptance_in_place_of_a_rejection(x: Example) -> None:
    at = x["at"] % size(x)
    right = {**x, "accept": [*x["accept"][:at], True, *x["accept"][at + 1 :]]}
    fewer, run = play(right), play(x)
    at_most("rounds with one more acceptance", rounds(fewer), rounds(run))
    at_most("drafted tokens with one more acceptance", drafted(fewer), drafted(run))
    at_most("latency with one more acceptance", fewer.latency, run.latency)


@theorem("29b", "With the same random draws a higher acceptance rate never increases rounds, drafted tokens or time.", source="29a",
         given=lambda: drafting(tokens=24, seed=integers(0, 2**32), match_rate=rates(), other_rate=rates()))
def higher_rate_takes_no_more(x: Example) -> None:
    low, high = sorted((x["match_rate"], x["other_rate"]))
    worse, better = (_walked(x, Iid(rate)) for rate in (low, high))
    for what in ("rounds", "drafted", "time"):
        more = int((getattr(better, what) > getattr(worse, what)).sum())
        equal(f"replications of more {what} at a rate of {high} than at one of {low}", more, 0)


@theorem("29c", "On the same outcomes by position longer drafts never increase the rounds.", source="as 29a",
         given=lambda: drafting(more=integers(0, 3)))
@theorem("29d", "With any numbers of accepted tokens by position longer drafts never increase the rounds.",
         source="false: a round that ends later may start the next one at a position with fewer acceptances", given=_rare_survivors,
         expect="fails")
def longer_drafts_take_no_more_rounds(x: Example) -> None:
    short, long = (play(x, draft_length=x["draft_length"] + more) for more in (0, 1 + x["more"]))
    at_most("rounds of longer drafts", rounds(long), rounds(short))


@theorem("29e", "The first rounds of a longer sequence start where those of a shorter one do.",
         source="only the cut of drafts looks ahead",
         given=lambda: drafting(at=integers(0, 39)))
def longer_sequences_extend_shorter(x: Example) -> None:
    short = play(x, accept=x["accept"][: 1 + x["at"] % size(x)])
    equal("starts of rounds of the shorter sequence", starts(short), starts(play(x))[: len(starts(short))])


@theorem("29f", "With the same random draws, outcomes by position in the draft and numbers of accepted tokens give the same rounds"
         " under any law.", source="same law", given=_random_draws)
def outcomes_and_survivors(x: Example) -> None:
    law, gamma, n = _law(x), x["draft_length"], x["tokens"]
    tally = _walked(x, law)
    lengths = law.survivors(random_streams.tiles(x["seed"], "accept", 0, n), gamma)
    for replication in range(_SOME):
        run = play({"draft_length": gamma, "survive": lengths[:, replication].tolist()})
        counts = float(tally.rounds[replication]), float(tally.drafted[replication])
        equal("rounds and drafted tokens by the outcomes", counts, (rounds(run), drafted(run)))


# --- Helpers ---


def _law(x: Example) -> Any:
    return ReplayRounds(x["law"]["records"]) if "records" in x["law"] else law_of(x)


def _walked(x: Example, law: Any) -> Any:
    n = size(x) if "accept" in x else x["tokens"]
    outcomes = law.drafts(random_streams.tiles(x["seed"], "accept", 0, n - 1)) if n > 1 else iter(())
    return sampler.walk(parameters_of(x), n, cost(x), outcomes)


def _flat(x: Example) -> bool:
    """True if passes cost the same for any number of tokens; otherwise an accepted longer draft may cost time."""
    return "verify_cost" not in x["cost"]


theorem("28a", "Busy time is the sum of the intervals on units, and at most units x latency.", source="conservation",
        given=_clusters)(engine_invariants.busy_time)
theorem("28b", "Each unit runs one pass at a time; only units of the cluster are used, and none after the last token.",
        source="conservation", given=_clusters)(engine_invariants.one_at_a_time)
theorem("28c", "A shared link carries one transfer at a time.", source="conservation",
        given=_clusters)(engine_invariants.one_transfer_at_a_time)
theorem("28f", "One event per pass and one event per layer give the same run, to rounding.",
        source="the layers of a pass run in sequence", given=_clusters)(engine_invariants.layer_by_layer)
theorem("28h", "Events and counter generate the text of plain decoding, on any cluster and for any acceptances.",
        source="exactness", given=_clusters)(engine_invariants.plain_text)
theorem("28i", "Units beyond those reserved change nothing.", source="passes run in sequence",
        given=lambda: drafting(costs="tenths", spare=integers(1, 3)))(engine_invariants.spare_units)
theorem("28n", "Steps that are answered together give the same run as each by itself.", source="they stand for the other steps",
        given=_drafters)(engine_invariants.offers_change_nothing)
theorem("28j", "One more unit never makes a run longer.", source="false: a draft model on a separate unit needs a link",
        given=_clusters, expect="fails")(engine_invariants.fewer_units)

THEOREMS = theorem.all()
