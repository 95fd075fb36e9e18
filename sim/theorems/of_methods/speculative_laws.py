"""The theorems on speculative decoding, 13 to 15: that its output has the target's law, exactly, and what its logs tell of alpha.

Models are tables over two or three words, and every choice is followed in fractions: `exactness`. p is the target's law of the next
token and q the draft's; the rest as in `speculative`.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Chen2023] C. Chen et al. Accelerating Large Language Model Decoding with Speculative Sampling. arXiv:2302.01318.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from model.methods.speculative import theory as formulas
from model.steps import Read, Steps
from sim.theorems.drafting_examples import PROMPT, accepted, decoder, drafted, few, mean, models, pairs, target_law, text_law
from sim.theorems.output_law import Law, Texts, distance, endings, likeliest_text
from sim.theorems.pipelined_examples import CLOSE, rates, whole
from sim.theorems.theorem import Collected, Example, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


theorem = Collected("speculative")


# --- What they are tried on ---


def _rates() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"draft_length": whole(1, 8), "acceptance_rate": rates()})


def _lenient() -> SearchStrategy[Example]:
    return pairs(stops=False, lenience=whole(1, 20).map(lambda twentieths: twentieths / 20))


# --- 13: one token ---


@theorem("13a", "A drafted token is accepted with chance sum min(p, q) = 1 - TV, at least sum p q, more where l < 1 is lenient.",
         source="[Leviathan2023], Theorem 3.5 and A.5", given=_lenient)
def overlap(x: Example) -> None:
    p, q = _laws(x)
    least = sum(map(min, p, q))
    tv = sum((abs(own - drafted) for own, drafted in zip(p, q, strict=True)), Fraction(0)) / 2
    equal("1 - TV", 1 - tv, least)
    floats = [float(chance) for chance in p], [float(chance) for chance in q]
    beta = float(formulas.acceptance_rate(*floats))
    equal("acceptance rate", beta, float(least), CLOSE)
    at_most("chance that both draw the same", float(sum(own * other for own, other in zip(p, q, strict=True))), beta, CLOSE)
    strict, lax = (float(formulas.lenient_acceptance_rate(*floats, lenience)) for lenience in (1.0, x["lenience"]))
    equal("without lenience", strict, beta)
    at_most("acceptance rate without lenience", strict, lax, CLOSE)
    more = float(formulas.lenient_acceptance_rate(*floats, x["lenience"] / 2))
    at_most("acceptance rate of half the lenience's bound", lax, more, CLOSE)
    share = Fraction(x["lenience"]).limit_denominator(100)
    want = sum(min(own / share, other) for own, other in zip(p, q, strict=True))
    equal("with lenience", lax, float(min(want, Fraction(1))), CLOSE)


@theorem("13b", "The algorithm accepts its first drafted token with that chance, and puts out a token of the law p, exactly.",
         source="[Leviathan2023], A.1", given=lambda: pairs(stops=False))
def first_test(x: Example) -> None:
    x = {**x, "draft_length": 1, "tokens": 2}
    p, q = _laws(x)
    ways = list(endings(decoder(x), models(x), PROMPT, 2))
    kept = sum((way.chance for way in ways if len(way.commits[0].tokens) == 2), Fraction(0))
    equal("chance that the first drafted token is accepted", kept, sum(map(min, p, q)))
    law = [sum((way.chance for way in ways if way.text[0] == token), Fraction(0)) for token in range(len(p))]
    equal("law of the first token", law, list(p))


# --- 14: whole texts ---


@theorem("14a", "The text that is put out has the target's own law, exactly, whatever the draft, its length and the end.",
         source="[Chen2023], Theorem 1", given=pairs)
def right_law(x: Example) -> None:
    _same(text_law(x), target_law(x))


@theorem("14b", "Greedy, the text is the target's own greedy text, with certainty.", source="token by token",
         given=lambda: pairs(tokens=6))
def greedy_text(x: Example) -> None:
    want = likeliest_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))
    _same(text_law({**x, "sampled": False}), {want: Fraction(1)})


@theorem("14c", "However luck goes, no round drafts or gives too much, and a text ends with its last token or at the stop.",
         source="a round gives one token more than it accepts", given=pairs)
def within_bounds(x: Example) -> None:
    for way in endings(decoder(x), models(x), PROMPT, x["tokens"]):
        out = 0
        for commit in way.commits:
            left = x["tokens"] - out
            equal("drafted tokens", commit.drafted, min(x["draft_length"], left - 1))
            at_most("tokens of a round", len(commit.tokens), (commit.drafted or 0) + 1)
            out += len(commit.tokens)
        ended = x.get("stop") in way.text
        equal("tokens that are missing", x["tokens"] - out, 0 if not ended else x["tokens"] - 1 - way.text.index(x["stop"]))


@theorem("14d", "The text has the target's law where a rejected token is replaced by one drawn from p.",
         source="false: what a draft favours then comes too often; only norm(max(0, p - q)) makes up for it", given=pairs,
         expect="fails")
def correction_from_p(x: Example) -> None:
    _same(text_law(x, lambda: _with_samples(decoder(x)())), target_law(x))


# --- 15: what logs tell ---


@theorem("15a", "Of the tested tokens alpha are accepted: E[accepted] = alpha E[tested], for any number of tokens.", source="Wald",
         given=few)
def accepted_of_tested(x: Example) -> None:
    n, alpha = x["tokens"], x["law"]["match_rate"]
    tests = mean(x, n, lambda run: sum(min(kept + 1, count) * times for (kept, count), times in run.rounds.items()))
    equal("mean accepted tokens", mean(x, n, accepted), alpha * tests, CLOSE)


@theorem("15b", "Of the drafted tokens of a round (alpha + ... + alpha^gamma) / gamma are accepted.",
         source="[Leviathan2023], Eq. 1", given=few)
def accepted_of_drafted(x: Example) -> None:
    gamma, alpha = max(x["draft_length"], 1), x["law"]["match_rate"]
    whole = {**x, "draft_length": gamma}
    share = mean(whole, gamma + 1, lambda run: run.commits[0][2] - 1) / gamma
    equal("accepted of those that a whole draft drafts", float(formulas.drafted_from_acceptance(alpha, gamma)), share, CLOSE)


@theorem("15c", "That share is at most alpha and falls as drafts grow.", source="powers of alpha fall", given=_rates)
def falls_with_length(x: Example) -> None:
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    one, more = (float(formulas.drafted_from_acceptance(alpha, length)) for length in (gamma, gamma + 1))
    at_most("accepted of drafted in a longer draft", more, one, CLOSE)
    at_most("accepted of drafted", one, alpha, CLOSE)
    if 0 < alpha < 1 and not more < one:
        raise AssertionError(f"accepted of drafted does not fall: {one} at {gamma}, {more} at {gamma + 1}")


@theorem("15d", "alpha is found again from what engines print: accepted of drafted, or tokens of a round.",
         source="[Leviathan2023], Eq. 1, inverted", given=_rates)
def found_again(x: Example) -> None:
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    share, length = float(formulas.drafted_from_acceptance(alpha, gamma)), float(formulas.expected_tokens(alpha, gamma))
    equal("alpha from accepted of drafted", float(formulas.acceptance_from_drafted(share, gamma)), alpha, 1e-9)
    equal("alpha from tokens of a round", float(formulas.acceptance_from_length(length, gamma)), alpha, 1e-9)
    emitted = length / (gamma + 1)
    printed: list[tuple[str, dict[str, Any]]] = [
        *((engine, figure) for engine in ("vllm", "trtllm", "transformers", "llama.cpp")
          for figure in ({"rate": share}, {"length": length})),
        ("vllm", {"rate": emitted, "field": "system-efficiency"}), ("trtllm", {"length": length - 1, "field": "forced"}),
        ("sglang", {"rate": share, "field": "drafts"}), ("sglang", {"rate": emitted, "field": "with-bonus"}),
        ("sglang", {"length": length}), ("mlx-lm", {"rate": (length - 1) / length}),
    ]  # fmt: skip
    for engine, figure in printed:
        equal(f"alpha from {figure} of {engine}", _reported(engine, gamma, **figure), alpha, 1e-9)
    equal("alpha from itself", _reported("alpha", gamma, rate=alpha), alpha)


@theorem("15e", "Of the drafted tokens alpha are accepted.", source="false: those behind a rejection were drafted and never tested",
         given=few, expect="fails")
def accepted_of_drafted_is_alpha(x: Example) -> None:
    equal("mean accepted tokens", mean(x, x["tokens"], accepted), x["law"]["match_rate"] * mean(x, x["tokens"], drafted), CLOSE)


# --- Helpers ---


def _laws(x: Example) -> tuple[Law, Law]:
    found = models(x)
    return found["target"](PROMPT), found["draft"](PROMPT)


def _same(law: Texts, want: Texts) -> None:
    if law != want:
        text = min({*law, *want}, key=lambda text: (law.get(text, 0) == want.get(text, 0), text))
        got, right = (str(which.get(text, 0)) for which in (law, want))
        raise AssertionError(f"chance of {text}: got {got}, expected {right}; distance of the laws {distance(law, want)}")


def _with_samples(steps: Steps) -> Steps:
    """The same process, but that a correction is drawn from p itself."""
    answer = None
    while True:
        try:
            step: Any = steps.send(answer)
        except StopIteration:
            return
        residual = isinstance(step, Read) and step.kind == "residual"
        answer = yield step._replace(kind="sample", against=None) if residual else step


def _reported(engine: str, gamma: int, **figure: Any) -> float:
    return float(formulas.reported_acceptance(engine, gamma, **figure))


THEOREMS = theorem.all()
