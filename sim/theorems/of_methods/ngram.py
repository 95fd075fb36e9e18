"""Theorems on n-gram drafts: exactness of the text, lookups, when drafts pay, agreement of all views.

An example of the formulas has a hit rate, an acceptance rate, a draft length, and times of passes over more tokens. One of a
decoding has the outcomes of lookups by output position: [drafted, accepted] after a round that accepted none, and after one that
accepted some. One of a text has a model as a table of weights (`drafting_examples.model`), a prompt and lengths of matches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret import interpreter, text_lookup
from model.interpret.simulated_answers import World
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.ngram import algorithm
from model.methods.ngram import paths as sampler
from model.methods.ngram import theory as ngram
from model.methods.speculative import theory as speculative
from model.methods.speculative.algorithm import Model, commit, verification_pass
from model.methods.speculative.algorithm import Parameters as Speculative
from model.outcomes.lookup_laws import LookupDraft, LookupOutcome, Lookups
from model.outcomes.outcome_laws import Iid
from model.outcomes.random_streams import BLOCK
from model.steps import SAMPLED, Forward, Read, Steps, declining
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import digits, drafted, model, rounds, stop_tokens
from sim.theorems.output_law import TextLaw, distance, greedy_text, law_of_model, law_of_text, possible_decodings, residual
from sim.theorems.pipelined_examples import CLOSE, integers, rates, same_run
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

theorem = TheoremCollection("ngram")
_MOST = 8
"""Longest draft of the formulas."""


# --- Examples ---


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    """Draw rates, a draft length, and times of passes over up to nine tokens, in quarters of a plain pass, which never fall."""
    steps = st.lists(integers(0, 3), min_size=_MOST, max_size=_MOST)
    widths = steps.map(lambda more: [[1 + at, 1 + sum(more[:at]) / 4] for at in range(_MOST + 1)])
    given = {"hit_rate": rates(), "acceptance_rate": rates(), "draft_length": integers(1, _MOST), "verify_cost": widths}
    return st.fixed_dictionaries({**given, **fields})


def _free(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    return _laws(**fields).map(lambda x: {**x, "verify_cost": [[1, 1.0], [_MOST + 1, 1.0]]})


@drawn
def _decodings(
    draw: DrawFn, /, costs: str = "quarters", tokens: int = 9, most: int = 4, least: int = 1, **fields: SearchStrategy[Any]
) -> Example:
    """Draw decodings with any outcomes of lookups at each position, on passes whose time depends on their tokens."""
    length = draw(integers(1, most))
    one = st.tuples(integers(0, length), integers(0, length)).map(lambda pair: [max(pair), min(pair)])
    lookups = draw(st.lists(st.tuples(one, one).map(list), min_size=least, max_size=tokens))
    example = {
        "layers": draw(integers(1, 3)), "draft_length": length, "sampled": draw(st.booleans()),
        "sequences": draw(st.sampled_from((1, 2))), "lookups": lookups,
        "verify_cost": _widths(draw, length, costs),
    }  # fmt: skip
    return example | {name: draw(strategy) for name, strategy in fields.items()}


def _first_is_rejected(x: Example) -> bool:
    """Tell if the first lookup drafts tokens, none of which is accepted, and the second accepts some."""
    (drafted, accepted), _ = x["lookups"][0]
    return bool(drafted and not accepted and x["lookups"][1][0][1])


def _widths(draw: DrawFn, length: int, costs: str) -> list[list[float]]:
    """Times of passes by their tokens, in quarters or tenths of a plain pass."""
    parts = 4 if costs == "quarters" else 10
    more = np.cumsum(digits(draw, length, 4)).tolist()
    return [[1, 1.0], *[[2 + at, 1 + each / parts] for at, each in enumerate(more)]]


@drawn
def _short(draw: DrawFn, /, tokens: int = 4, **fields: SearchStrategy[Any]) -> Example:
    """Draw a law of lookups with one or two kinds of matches, and few tokens."""
    kinds = draw(integers(1, 2))
    lengths = [draw(integers(1, 2)) for _ in range(kinds)]
    shares = [[draw(rates()) / kinds for _ in range(kinds)] for _ in range(2)]
    longest = max(lengths)
    example = {
        "layers": draw(integers(1, 3)), "draft_length": longest, "sequences": draw(st.sampled_from((1, 2))),
        "tokens": draw(integers(1, tokens)), "chances": shares, "drafted": lengths,
        "rates": [[draw(rates()) for _ in range(length)] for length in lengths],
        "verify_cost": _widths(draw, longest, draw(st.sampled_from(("quarters", "tenths")))),
    }  # fmt: skip
    return example | {name: draw(strategy) for name, strategy in fields.items()}


@drawn
def _texts(draw: DrawFn, /, tokens: int = 5, *, sampled: bool = False, stops: bool = True) -> Example:
    """Draw a model over two or three words, a prompt, and what is looked up."""
    words = draw(integers(2, 3))
    largest = draw(integers(1, 3))
    example: Example = {
        "draft_length": draw(integers(1, 4)), "max_match": largest, "min_match": draw(integers(1, largest)), "sampled": sampled,
        "tokens": draw(integers(1, tokens - (sampled and words > 2))),
        "prompt": draw(st.lists(integers(0, words - 1), min_size=1, max_size=6)),
        "target": [digits(draw, words, 3, least=1) for _ in range(draw(st.sampled_from((1, 3))))],
        "length_factor": draw(st.sampled_from((None, 1.0, 1.5))),
    }  # fmt: skip
    if stops and draw(st.booleans()):
        example["stop"] = draw(integers(0, words - 1))
    return example


def _word_lists() -> SearchStrategy[Example]:
    words = st.lists(integers(0, 2), min_size=1, max_size=14)
    matches = st.tuples(integers(1, 4), integers(1, 4)).map(sorted)
    return st.builds(lambda text, ends: {"text": text, "min_match": ends[0], "max_match": ends[1]}, words, matches)


# --- 14: exactness of the text ---


@theorem("14a", "The sampled text has exactly the target's distribution.",
         source="a drafted token is accepted where the target's own draw is that token", given=lambda: _texts(sampled=True))
def right_law(x: Example) -> None:
    want, law = _target_law(x), _law_of_text(x)
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


@theorem("14b", "The greedy text is that of the target.", source="[Saxena2023]", given=lambda: _texts(9))
def right_text(x: Example) -> None:
    equal("generated text", [*_law_of_text(x)], [greedy_text(model(x["target"]), x["prompt"], x["tokens"], x.get("stop"))])


@theorem("14c", "The sampled text also has this distribution if a rejected token is replaced by another draw of the target.",
         source="false: that draw must not be the rejected token", given=lambda: _texts(sampled=True), expect="fails")
def drawn_again(x: Example) -> None:
    found = law_of_text(lambda: _drawing_again(x), {"target": model(x["target"])}, x["prompt"], x["tokens"])
    equal("distribution of the text", found, _target_law(x))


@theorem("14d", "To accept x with probability p(x), and else to draw from p without x, is one draw from p.",
         source="Theorem 1 of [Leviathan2023] with a draft that is certain", given=lambda: _texts(sampled=True))
def a_certain_draft(x: Example) -> None:
    law = model(x["target"])(tuple(x["prompt"]))
    for word, chance in enumerate(law):
        certain = tuple(type(chance)(other == word) for other in range(len(law)))
        rest = residual(law, certain) if chance < 1 else law
        equal("law", tuple(chance * one + (1 - chance) * other for one, other in zip(certain, rest, strict=True)), law)


# --- 24: when drafts of lookups pay ---


@theorem("24a", "Drafts are faster than plain decoding exactly if A > v - 1: it does not matter how often there is a match.",
         source="(1 + h A) / (1 + h (v - 1))", given=_laws)
def what_pays(x: Example) -> None:
    faster = _speed(x) > 1 + CLOSE
    pays = bool(ngram.pays(x["acceptance_rate"], x["draft_length"], verify_cost=_curve(x)))
    gain = float(ngram.accepted_tokens(x["acceptance_rate"], x["draft_length"])) - (_wide(x) - 1)
    if abs(gain) > CLOSE:
        equal("pays", pays, gain > 0)
        equal("faster", faster, gain > 0 and x["hit_rate"] > 0)


@theorem("24b", "Where passes take the same time for any number of tokens, drafts are never slower than plain decoding.",
         source="A >= 0", given=_free)
def free_drafts_never_lose(x: Example) -> None:
    at_most("plain decoding", 1.0, _speed(x), CLOSE)
    law = Lookups.of_rates(x["hit_rate"], x["acceptance_rate"], x["draft_length"])
    found = ngram.predict(algorithm.Parameters(2, x["draft_length"]), 20, law, UnitCost(2))
    at_most("latency", float(found.latency), float(found.plain_latency), CLOSE)


@theorem("24c", "Drafts that cost no pass are never slower than plain decoding.", source="false: verifying takes longer",
         given=_laws, expect="fails")
def drafts_never_lose(x: Example) -> None:
    at_most("plain decoding", 1.0, _speed(x), CLOSE)


@theorem("24d", "More matches bring the speed-up nearer to (1 + A) / v, that of drafts in every round.",
         source="monotone in h", given=lambda: _laws(more=rates()))
def more_matches(x: Example) -> None:
    low, high = sorted((x["hit_rate"], x["more"]))
    some, more, every = (_speed({**x, "hit_rate": each}) for each in (low, high, 1.0))
    limit = float(speculative.expected_tokens(x["acceptance_rate"], x["draft_length"])) / _wide(x)
    equal("speed-up with a match in every round", every, limit, CLOSE)
    at_most("distance to it", abs(every - more), abs(every - some), 1e-6)


@theorem("24e", "The formula gives the mean and variance of the time, and mean rounds, drafted tokens and work.",
         source="enumeration of all outcomes", given=_short)
def moments_over_all_outcomes(x: Example) -> None:
    found = [*_all_runs(x)]

    def mean(of: Callable[[Run], float]) -> float:
        return math.fsum(chance * of(run) for chance, run in found)

    equal("probability", math.fsum(chance for chance, _ in found), 1.0, CLOSE)
    prediction = ngram.predict(parameters_of(x), x["tokens"], law_of(x), cost(x))
    time = mean(lambda run: run.latency)
    equal("latency", float(prediction.latency), time, CLOSE)
    equal("mean square", float(prediction.latency_variance) + time**2, mean(lambda run: run.latency**2), CLOSE)
    equal("compute", float(prediction.busy), mean(lambda run: run.busy), CLOSE)
    assert prediction.rounds is not None and prediction.drafted is not None  # noqa: PT018
    equal("rounds", float(prediction.rounds), mean(rounds), CLOSE)
    equal("drafted tokens", float(prediction.drafted), mean(drafted), CLOSE)
    counted = ngram.work(parameters_of(x), x["tokens"], law_of(x))
    assert counted is not None
    for name, value in counted.by_model["target"]._asdict().items():
        of_runs = mean(lambda run, name=name: float(getattr(run.account.totals().by_model["target"], name)))  # type: ignore[misc]
        equal(name, float(value), of_runs, CLOSE)


@theorem("24f", "Without a match decoding is plain decoding: the same passes and the same time.", source="no drafts",
         given=_decodings)
def without_matches(x: Example) -> None:
    n = len(x["lookups"])
    run = play({**x, "lookups": [[[0, 0], [0, 0]]] * n})
    plain = simulate(
        autoregressive.decode(autoregressive.Parameters(x["layers"]), (0,), n), n, Cluster(1), cost(x), World(1, x["layers"])
    )
    equal("latency", run.latency, plain.latency)
    equal("passes", run.account.totals(), plain.account.totals())
    law = Lookups.of_rates(0.0, 1.0, x["draft_length"])
    equal("formula", float(ngram.predict(parameters_of(x), n, law, cost(x)).latency), plain.latency, CLOSE)


@theorem("24g", "Lookups are a draft model that costs nothing and drafts as many tokens as they do on average.",
         source="false: the number drafted is random", given=lambda: _free(of=integers(1, _MOST)), expect="fails")
def a_free_chain(x: Example) -> None:
    mean, hits = _mean_length(x)
    chain = float(speculative.speedup(x["acceptance_rate"], mean, 0.0))
    equal("speed-up", _speed({**x, "hit_rate": hits}), chain, CLOSE)


@theorem("24h", "Such a draft model accepts at least as many tokens per round.",
         source="the first tokens of a draft are the likeliest to survive: concavity", given=lambda: _free(of=integers(1, _MOST)))
def a_free_chain_accepts_more(x: Example) -> None:
    mean, hits = _mean_length(x)
    at_most("speed-up", _speed({**x, "hit_rate": hits}), float(speculative.speedup(x["acceptance_rate"], mean, 0.0)), CLOSE)


@theorem("24i", "With a match in every round the decoding is that of a draft model whose passes take no time.",
         source="the same rounds", given=lambda: _short(acceptance_rate=rates()))
def a_match_in_every_round(x: Example) -> None:
    length, n = x["draft_length"], 3 * x["tokens"]
    law = Lookups.of_rates(1.0, x["acceptance_rate"], length)
    found = ngram.predict(parameters_of(x), n, law, cost(x))
    model_ = speculative_parameters(x)
    other = speculative.predict(model_, n, Iid(x["acceptance_rate"]), UnitCost(x["layers"], verify_cost=_curve(x), cost_ratio=0.0))
    for name in ("latency", "rounds", "drafted"):
        equal(name, float(getattr(found, name)), float(getattr(other, name)), CLOSE)
    equal("variance", float(found.latency_variance) + float(found.latency) ** 2,
          float(other.latency_variance) + float(other.latency) ** 2, CLOSE)  # fmt: skip


@theorem("24j", "For many tokens the speed-up tends to the formula of one round, also where matches come in stretches.",
         source="renewal", given=lambda: _laws(after=rates()))
def many_tokens(x: Example) -> None:
    # Far from stretches that never end or never begin: a long text then visits both.
    hits = [0.1 + 0.8 * x["hit_rate"], 0.1 + 0.8 * x["after"]]
    law, n = Lookups.of_rates(hits, 0.1 + 0.8 * x["acceptance_rate"], x["draft_length"]), 600
    means = ngram.round_means(law, verify_cost=_curve(x))
    found = ngram.predict(algorithm.Parameters(1, x["draft_length"]), n, law, UnitCost(1, verify_cost=_curve(x)))
    at_most("difference to the limit", abs(float(found.plain_latency / found.latency) / means.speedup - 1), 60 / n)
    alike = ngram.round_means(Lookups.of_rates(x["hit_rate"], x["acceptance_rate"], x["draft_length"]), verify_cost=_curve(x))
    equal("speed-up without stretches", alike.speedup, _speed(x), CLOSE)


@theorem("24k", "Stretches matter to the mean only through the share of rounds that match.",
         source="one kind of match: every draft has the same mean", given=lambda: _laws(after=rates()))
def stretches(x: Example) -> None:
    law = Lookups.of_rates([x["hit_rate"], x["after"]], x["acceptance_rate"], x["draft_length"])
    means = ngram.round_means(law, verify_cost=_curve(x))
    share = means.drafted / x["draft_length"]
    equal("speed-up", means.speedup, _speed({**x, "hit_rate": min(share, 1.0)}), CLOSE)


@theorem("24l", "Longer matches that draft more tokens are worth as many short ones with the same mean draft.",
         source="false: tokens late in a draft survive rarely", given=lambda: _free(of=integers(1, _MOST)), expect="fails")
def a_mixture_of_lengths(x: Example) -> None:
    longer = x["draft_length"] + x["of"]
    mixed = _mixed(x, [x["draft_length"], longer])
    mean = Lookups.of_rates(x["hit_rate"], x["acceptance_rate"], 1)
    scale = mixed.drafted / max(x["hit_rate"], 1e-9)
    equal("tokens per round", mixed.tokens - 1, (ngram.round_means(mean).tokens - 1) * scale, CLOSE)


# --- 28: agreement of the views ---


@theorem("28d", "Events and paths agree exactly on every path, with costs in quarters of a layer.", source="no contention",
         given=lambda: _decodings("quarters"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["lookups"])
    rows = np.broadcast_to(np.array(_packed(x))[:, None], (n, BLOCK))
    tally = sampler.walk(parameters_of(x), n, cost(x), iter([rows[: n // 2], rows[n // 2 :]]))
    equal("latency", float(tally.time[0]), run.latency, CLOSE)
    equal("compute", float(tally.busy[0]), run.busy, CLOSE)
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))
    lengths = [0] * (x["draft_length"] + 1)
    for (accepted, _), count in run.rounds.items():
        lengths[accepted] += count
    equal("accepted lengths", (tally.accepted / BLOCK).tolist(), lengths)
    equal("arithmetic", float(tally.operations[0]), ngram.operations(parameters_of(x), cost(x), run.rounds, run.account))


@theorem("28h", "Events and counter generate the text of plain decoding, with equal passes.", source="exactness",
         given=lambda: _decodings("tenths"))
def plain_text(x: Example) -> None:
    run, n = play(x), len(x["lookups"])
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("text of the counter", work.tokens, run.tokens)
    equal("passes", run.account.totals(), work.account.totals())
    equal("rounds", run.rounds, work.rounds)


@theorem("28k", "A round is one pass over its drafted tokens and one more; only in a full batch does it go beyond the end.",
         source="the number drafted is known before the pass", given=_decodings)
def one_pass_per_round(x: Example) -> None:
    run = play(x)
    total = run.account.totals().by_model["target"]
    equal("passes", total.passes, rounds(run))
    equal("tokens of all passes", total.layer_passes, x["layers"] * (rounds(run) + drafted(run)))
    if x["sequences"] == 1:
        at_most("drafted tokens", drafted(run), len(x["lookups"]) * (x["draft_length"] + 1) - rounds(run))
        at, n = 0, len(run.tokens)
        for _, _, count in run.commits:
            at += count
        equal("tokens", at, n)
    wide = dict(_curve(x))
    time = math.fsum(count * wide[1 + number] * x["layers"] for (_, number), count in run.rounds.items())
    equal("time of the rounds", time, run.latency, CLOSE)


@theorem("28l", "One event per pass and one event per layer give the same run, to rounding.", source="layers run in turn",
         given=lambda: _decodings("tenths"))
def layer_by_layer(x: Example) -> None:
    whole, each = play(x), play(x, per_layer=True)
    equal("latency", each.latency, whole.latency, CLOSE)
    equal("tokens", each.tokens, whole.tokens)


@theorem("28n", "Steps that are answered together give the same run as each by itself.", source="they stand for the other steps",
         given=lambda: _decodings("tenths"))
def offers_change_nothing(x: Example) -> None:
    same_run(play(x, offers=True), play(x))


# --- 29: lookups in a text ---


@theorem("29a", "A lookup finds the longest match that there is, and of several the first.", source="search of all places",
         given=_word_lists)
def longest_and_first(x: Example) -> None:
    text, found = x["text"], text_lookup.longest_match(x["text"], x["min_match"], x["max_match"])
    for length in range(x["max_match"], x["min_match"] - 1, -1):
        places = [at for at in range(len(text) - length) if text[at : at + length] == text[len(text) - length :]]
        if places:
            equal("match", found, (length, places[0] + length))
            return
    equal("match", found, (0, len(text)))


@theorem("29b", "Lookups along a finished text give the rounds of the decoding that wrote it.",
         source="a lookup depends on nothing but the text before it", given=lambda: _texts(12, stops=False))
def rounds_of_a_text(x: Example) -> None:
    (decoding,) = possible_decodings(lambda: steps(x), {"target": model(x["target"])}, x["prompt"], x["tokens"])
    rule = x["min_match"], x["max_match"], x["draft_length"], x["length_factor"]
    found = text_lookup.along(x["prompt"], decoding.text, *rule)
    at = 0
    for each in decoding.commits:
        left = x["tokens"] - 1 - at
        drafts = min(int(found.drafted[at]), left), min(int(found.accepted[at]), left)
        equal("drafted and accepted", drafts, (each.drafted, len(each.tokens) - 1))
        at += len(each.tokens)


@theorem("29c", "A draft that is accepted completely never increases the rounds.",
         source="false: it decides where the next lookup is made, and what that finds",
         given=lambda: _decodings(least=5, most=2).filter(_first_is_rejected), expect="fails")
def a_whole_draft_accepted(x: Example) -> None:
    first, *others = x["lookups"]
    better = [[[count, count] for count, _ in first], *others]
    at_most("rounds with that draft accepted", rounds(play({**x, "lookups": better})), rounds(play(x)))


@theorem("29d", "A match drafts no more than the draft length, and no more than its length allows.", source="suffix decoding",
         given=lambda: _texts(12, stops=False))
def drafted_at_most(x: Example) -> None:
    rule = x["min_match"], x["max_match"], x["draft_length"], x["length_factor"]
    (decoding,) = possible_decodings(lambda: steps(x), {"target": model(x["target"])}, x["prompt"], x["tokens"])
    found = text_lookup.along(x["prompt"], decoding.text, *rule)
    method = parameters_of(x)
    for match, count in zip(found.match.tolist(), found.drafted.tolist(), strict=True):
        at_most("drafted tokens", count, method.drafted_after(match))
        if x["length_factor"] is not None:
            at_most("drafted tokens after this match", count, match * x["length_factor"])


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding."""
    names = ("draft_length", "min_match", "max_match", "length_factor", "sampled", "sequences")
    return algorithm.Parameters(x.get("layers", 1), **{name: x[name] for name in names if name in x})


def speculative_parameters(x: Example) -> Any:
    """Return parameters of speculative decoding with drafts of the same length."""
    return Speculative(x["layers"], x["draft_length"], sequences=x["sequences"])


def law_of(x: Example) -> Lookups:
    """Return the law of lookups of an example."""
    return Lookups(x["chances"], x["drafted"], [np.cumprod(each) for each in x["rates"]])


def cost(x: Example) -> UnitCost:
    """Return the cost model of an example."""
    return UnitCost(x["layers"], verify_cost=_curve(x))


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    count = len(x["lookups"]) if "lookups" in x else x["tokens"]
    return algorithm.decode(parameters_of(x), x.get("prompt", (0,)), count, stop_tokens(x))


def world(x: Example) -> World:
    """Return the simulated answers in an example's decoding."""
    return World(1, x["layers"], lookups=_packed(x))


def play(x: Example, *, per_layer: bool = False, offers: bool = False) -> Run:
    """Simulate an example's decoding, each step by itself; with `offers`, several may be answered together (28n)."""
    own = steps(x) if offers else declining(steps(x))
    return simulate(own, len(x["lookups"]), Cluster(1), cost(x), world(x), per_layer=per_layer)


def _packed(x: Example) -> list[int]:
    return [LookupOutcome(LookupDraft(*usual), LookupDraft(*repeating)).packed for usual, repeating in x["lookups"]]


def _all_runs(x: Example) -> Iterator[tuple[float, Run]]:
    """Simulate every decoding that the law of an example allows: any outcome at each position where a round starts."""
    n, (counts, kept, chance) = x["tokens"], law_of(x).cells

    def follow(at: int, state: int, share: float, chosen: dict[int, list[int]]) -> Iterator[tuple[float, Run]]:
        if at >= n:
            yield share, play({**x, "lookups": [[chosen.get(place, [0, 0])] * 2 for place in range(n)]})
            return
        for cell, (number, accepted) in enumerate(zip(counts.tolist(), kept.tolist(), strict=True)):
            more = share * float(chance[state, cell])
            if more:
                yield from follow(at + 1 + accepted, int(accepted > 0), more, {**chosen, at: [number, accepted]})

    yield from follow(0, 0, 1.0, {})


def _target_law(x: Example) -> TextLaw:
    return law_of_model(model(x["target"]), x["prompt"], x["tokens"], x.get("stop"))


def _law_of_text(x: Example) -> TextLaw:
    return law_of_text(lambda: steps(x), {"target": model(x["target"])}, x["prompt"], x["tokens"])


def _drawing_again(x: Example) -> Steps:
    """Steps of a decoding in which the target draws once more where a drafted token is rejected."""
    given, text, stop, target = parameters_of(x), [*x["prompt"]], stop_tokens(x), Model("target", 1, 0)
    if len(text) > 1:
        yield Forward("target", tuple(text[:-1]), 0, target.span)
    end = len(text) + x["tokens"]
    while len(text) < end and (len(text) == len(x["prompt"]) or text[-1] not in stop):
        guesses = yield from algorithm.draft(given, text, end - len(text) - 1, stop)
        out = yield verification_pass(target, text, guesses)
        kept, token = 0, (yield Read(SAMPLED, out, -len(guesses) - 1))
        while kept < len(guesses) and token == guesses[kept].token:
            kept += 1
            token = yield Read(SAMPLED, out, kept - len(guesses) - 1)
        if kept < len(guesses):
            token = yield Read(SAMPLED, out, kept - len(guesses) - 1)
        yield from commit(text, guesses, kept, token, stop)


def _speed(x: Example) -> float:
    return float(ngram.speedup(x["hit_rate"], x["acceptance_rate"], x["draft_length"], verify_cost=_curve(x)))


def _wide(x: Example) -> float:
    """Time of a pass over a whole draft and one more token, in plain passes."""
    return dict(_curve(x)).get(x["draft_length"] + 1, 1.0)


def _mean_length(x: Example) -> tuple[int, float]:
    """A whole mean draft length of at most `draft_length`, and the rate of matches that gives it."""
    mean = 1 + (x["of"] - 1) % x["draft_length"]
    return mean, mean / x["draft_length"]


def _mixed(x: Example, lengths: Sequence[int]) -> ngram.RoundMeans:
    survival = [x["acceptance_rate"] ** np.arange(1.0, length + 1) for length in lengths]
    return ngram.round_means(Lookups([x["hit_rate"] / len(lengths)] * len(lengths), lengths, survival))


def _curve(x: Example) -> tuple[tuple[int, float], ...]:
    return tuple((int(width), float(time)) for width, time in x["verify_cost"])


THEOREMS = theorem.all()
