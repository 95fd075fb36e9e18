"""Theorems on speculative decoding, 13 to 15: exactness of the output, and estimates of alpha from logs.

Models are tables over two or three words, and all random choices are enumerated in fractions (`output_law`). p is the target's
distribution of the next token, q the draft model's; other symbols as in `speculative`.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Chen2023] C. Chen et al. Accelerating Large Language Model Decoding with Speculative Sampling. arXiv:2302.01318.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from model.methods.speculative import theory as formulas
from model.steps import Read, Steps
from sim.theorems.drafting_examples import (
    PROMPT,
    accepted,
    decoder,
    drafted,
    mean,
    models,
    pairs,
    short_decodings,
    target_law,
    text_law,
)
from sim.theorems.output_law import Law, TextLaw, distance, greedy_text, possible_decodings
from sim.theorems.pipelined_examples import CLOSE, integers, rates
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


theorem = TheoremCollection("speculative")


# --- Examples ---


def _rates() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"draft_length": integers(1, 8), "acceptance_rate": rates()})


def _lenient() -> SearchStrategy[Example]:
    return pairs(stops=False, lenience=integers(1, 20).map(lambda twentieths: twentieths / 20))


# --- 13: one token ---


@theorem("13a", "A drafted token is accepted with probability sum min(p, q) = 1 - TV >= sum p q, and more often with lenience < 1.",
         source="[Leviathan2023], Theorem 3.5 and A.5", given=_lenient)
def overlap(x: Example) -> None:
    p, q = _laws(x)
    least = sum(map(min, p, q))
    tv = sum((abs(target - draft) for target, draft in zip(p, q, strict=True)), Fraction(0)) / 2
    equal("1 - TV", 1 - tv, least)
    floats = [float(chance) for chance in p], [float(chance) for chance in q]
    beta = float(formulas.acceptance_rate(*floats))
    equal("acceptance rate", beta, float(least), CLOSE)
    same = float(sum(target * draft for target, draft in zip(p, q, strict=True)))
    at_most("probability that both draw the same token", same, beta, CLOSE)
    strict, lax = (float(formulas.lenient_acceptance_rate(*floats, lenience)) for lenience in (1.0, x["lenience"]))
    equal("without lenience", strict, beta)
    at_most("acceptance rate without lenience", strict, lax, CLOSE)
    more = float(formulas.lenient_acceptance_rate(*floats, x["lenience"] / 2))
    at_most("acceptance rate at half the lenience", lax, more, CLOSE)
    share = Fraction(x["lenience"]).limit_denominator(100)
    want = sum(min(target / share, draft) for target, draft in zip(p, q, strict=True))
    equal("with lenience", lax, float(min(want, Fraction(1))), CLOSE)


@theorem("13b", "The first drafted token is accepted with probability sum min(p, q), and the first token has the distribution p.",
         source="[Leviathan2023], A.1", given=lambda: pairs(stops=False))
def first_test(x: Example) -> None:
    x = {**x, "draft_length": 1, "tokens": 2}
    p, q = _laws(x)
    decodings = list(possible_decodings(decoder(x), models(x), PROMPT, 2))
    accepted_first = sum((each.chance for each in decodings if len(each.commits[0].tokens) == 2), Fraction(0))
    equal("probability that the first drafted token is accepted", accepted_first, sum(map(min, p, q)))
    law = [sum((each.chance for each in decodings if each.text[0] == token), Fraction(0)) for token in range(len(p))]
    equal("distribution of the first token", law, list(p))


# --- 14: exactness of the text ---


@theorem("14a", "The sampled text has exactly the target's distribution, for any draft model, draft length and stop token.",
         source="[Chen2023], Theorem 1", given=pairs)
def right_law(x: Example) -> None:
    same_texts(text_law(x), target_law(x))


@theorem("14b", "The greedy text is that of the target.", source="token by token",
         given=lambda: pairs(tokens=6))
def greedy_text_is_the_targets(x: Example) -> None:
    want = greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))
    same_texts(text_law({**x, "sampled": False}), {want: Fraction(1)})


@theorem("14c", "No round exceeds its limits of drafted and generated tokens; a text ends at its last token or at the stop token.",
         source="a round gives one more token than it accepts", given=pairs)
def within_bounds(x: Example) -> None:
    for decoding in possible_decodings(decoder(x), models(x), PROMPT, x["tokens"]):
        out = 0
        for commit in decoding.commits:
            left = x["tokens"] - out
            equal("drafted tokens", commit.drafted, min(x["draft_length"], left - 1))
            at_most("tokens of a round", len(commit.tokens), (commit.drafted or 0) + 1)
            out += len(commit.tokens)
        ended = x.get("stop") in decoding.text
        equal("missing tokens", x["tokens"] - out, 0 if not ended else x["tokens"] - 1 - decoding.text.index(x["stop"]))


@theorem("14d", "The text has the target's distribution if a rejected token is replaced by a draw from p.",
         source="false: tokens that the draft favours are too frequent; norm(max(0, p - q)) is needed", given=pairs,
         expect="fails")
def correction_from_p(x: Example) -> None:
    same_texts(text_law(x, lambda: _with_samples(decoder(x)())), target_law(x))


# --- 15: estimates from logs ---


@theorem("15a", "E[accepted] = alpha E[tested] for any number of tokens.", source="Wald",
         given=short_decodings)
def accepted_of_tested(x: Example) -> None:
    n, alpha = x["tokens"], x["law"]["match_rate"]
    tests = mean(x, n, lambda run: sum(min(kept + 1, count) * times for (kept, count), times in run.rounds.items()))
    equal("mean accepted tokens", mean(x, n, accepted), alpha * tests, CLOSE)


@theorem("15b", "The share of drafted tokens that a round accepts has the mean (alpha + ... + alpha^gamma) / gamma.",
         source="[Leviathan2023], Eq. 1", given=short_decodings)
def accepted_of_drafted(x: Example) -> None:
    gamma, alpha = max(x["draft_length"], 1), x["law"]["match_rate"]
    whole = {**x, "draft_length": gamma}
    share = mean(whole, gamma + 1, lambda run: run.commits[0][2] - 1) / gamma
    equal("accepted share of a whole draft", float(formulas.drafted_from_acceptance(alpha, gamma)), share, CLOSE)


@theorem("15c", "The accepted share of drafted tokens is at most alpha and falls with gamma.", source="powers of alpha fall",
         given=_rates)
def falls_with_length(x: Example) -> None:
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    shorter, longer = (float(formulas.drafted_from_acceptance(alpha, length)) for length in (gamma, gamma + 1))
    at_most("accepted share of a longer draft", longer, shorter, CLOSE)
    at_most("accepted share", shorter, alpha, CLOSE)
    if 0 < alpha < 1 and not longer < shorter:
        raise AssertionError(f"the accepted share does not fall: {shorter} at {gamma}, {longer} at {gamma + 1}")


@theorem("15d", "alpha is recovered from the figures that engines print: accepted share of drafted tokens, or tokens per round.",
         source="[Leviathan2023], Eq. 1, inverted", given=_rates)
def recovered_from_logs(x: Example) -> None:
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    share, length = float(formulas.drafted_from_acceptance(alpha, gamma)), float(formulas.expected_tokens(alpha, gamma))
    equal("alpha from the accepted share", float(formulas.acceptance_from_drafted(share, gamma)), alpha, 1e-9)
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


@theorem("15e", "E[accepted] = alpha E[drafted].", source="false: tokens after a rejection are drafted and never tested",
         given=short_decodings, expect="fails")
def accepted_of_drafted_is_alpha(x: Example) -> None:
    equal("mean accepted tokens", mean(x, x["tokens"], accepted), x["law"]["match_rate"] * mean(x, x["tokens"], drafted), CLOSE)


# --- Helpers ---


def _laws(x: Example) -> tuple[Law, Law]:
    by_role = models(x)
    return by_role["target"](PROMPT), by_role["draft"](PROMPT)


def same_texts(law: TextLaw, want: TextLaw) -> None:
    """Require equal distributions of the generated text; an error names the first one whose probability differs."""
    if law != want:
        text = min({*law, *want}, key=lambda text: (law.get(text, 0) == want.get(text, 0), text))
        got, right = (str(which.get(text, 0)) for which in (law, want))
        raise AssertionError(f"probability of {text}: got {got}, expected {right}; total variation distance {distance(law, want)}")


def _with_samples(steps: Steps) -> Steps:
    """Yield the same steps, but draw replacements of rejected tokens from p."""
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
