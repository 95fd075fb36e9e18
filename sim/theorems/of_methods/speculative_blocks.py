"""Theorems on speculative decoding, 43: block verification, in law and not path by path.

Models are tables over two or three words, and all random choices are enumerated in fractions (`output_law`). p is the target's
distribution of the next token, q the draft model's, r_j = p / q of the j-th drafted token, and
w_i = min(1, r_i, r_i r_(i-1), ..., r_i ... r_1) the weight of the first i drafted tokens.

[Sun2024] Z. Sun et al. Block Verification Accelerates Speculative Decoding. ICLR 2025, arXiv:2403.10444.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from model.methods.draft_model import COLOCATED
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import block_verification as blocks
from model.methods.speculative.algorithm import BLOCK, TOKEN, DraftedToken
from model.steps import Commit, Forward, LayerSpan, Read, Steps
from sim.theorems.drafting_examples import (
    PROMPT,
    decoder,
    digits,
    drafted,
    drafting,
    models,
    pairs,
    rounds,
    starts,
    target_law,
    text_law,
)
from sim.theorems.of_methods.speculative_laws import same_texts
from sim.theorems.output_law import Model, possible_decodings
from sim.theorems.pipelined_examples import CLOSE, play
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

theorem = TheoremCollection("speculative")
_PROOF = "[Sun2024], by induction from the last drafted token: the mean of w_(i+1) given x_1 ... x_i is w_i less the residual mass"


# --- Examples ---


def _blocks() -> SearchStrategy[Example]:
    """Draw pairs of models with block verification, of every kind of draft."""
    return pairs(tokens=4, verification=st.just(BLOCK), drafter=st.sampled_from(speculative.DRAFTERS)) | _weighted()


def _weighted() -> SearchStrategy[Example]:
    """Draw pairs in which the weight of an accepted block matters: of two words only one can replace a rejected token."""
    rows = _tables(words=3, by_last=False).filter(lambda x: x["draft_length"] == 2)
    return rows.map(lambda x: {**x, "tokens": 3, "verification": BLOCK})


@drawn
def _tables(draw: DrawFn, most: int = 3, words: int = 2, *, by_last: bool | None = None) -> Example:
    """Draw models of `words` to three words, with one distribution or one for each last token, and a draft length."""
    count, several = draw(st.integers(words, 3)), draw(st.booleans()) if by_last is None else by_last
    rows = {role: [digits(draw, count, 3, least=1) for _ in range(count if several else 1)] for role in ("target", "draft")}
    return {"draft_length": draw(st.integers(1, most)), **rows}


@drawn
def _coupled(draw: DrawFn) -> Example:
    """Draw models, a draft, and a random number in eighths for each of its tokens."""
    x = draw(_tables())
    words = st.integers(0, len(x["target"][0]) - 1)
    x["words"] = draw(st.lists(words, min_size=x["draft_length"], max_size=x["draft_length"]))
    return x | {"eighths": [draw(st.integers(0, 7)) for _ in x["words"]]}


def _paths() -> SearchStrategy[Example]:
    """Draw decodings by number of accepted tokens, with every kind of draft on the target's unit."""
    fields = {"sampled": st.just(True), "placement": st.just(COLOCATED), "drafter": st.sampled_from(speculative.DRAFTERS)}
    return drafting(outcomes="survive", costs="whole").flatmap(
        lambda x: st.fixed_dictionaries({**{name: st.just(value) for name, value in x.items()}, **fields})
    )


# --- 43a to 43d: what block verification keeps ---


@theorem("43a", "The sampled text has exactly the target's distribution with block verification, for any draft and stop token.",
         source="[Sun2024], Theorem 1", given=_blocks)
def right_law(x: Example) -> None:
    same_texts(text_law(x), target_law(x))


@theorem("43b", "At least i tokens are accepted with probability w_i, given the first i drafted tokens.", source=_PROOF,
         given=_tables)
def closed_form_by_draft(x: Example) -> None:
    for prefix, chance in _accepted_at_least(x, BLOCK):
        ratios = [_ratio(x, prefix, index) for index in range(len(prefix))]
        want = min([Fraction(1), *(math.prod(ratios[first:], start=Fraction(1)) for first in range(len(ratios)))])
        equal(f"probability that at least {len(prefix)} tokens of {prefix} are accepted", chance, want)
        equal("closed form", float(blocks.weights([float(ratio) for ratio in ratios])[-1]), float(want), CLOSE)


@theorem("43c", "P(at least i accepted | first i drafted tokens) is never smaller than token by token.",
         source="[Sun2024], Theorem 2: w_i is at least the product of min(1, r_j)", given=_tables)
def never_fewer_in_law(x: Example) -> None:
    by_token = dict(_accepted_at_least(x, TOKEN))
    for prefix, chance in _accepted_at_least(x, BLOCK):
        what = f"probability that at least {len(prefix)} of {prefix} are accepted, by token"
        at_most(what, float(by_token[prefix]), float(chance), CLOSE)


@theorem("43d", "With drafts of one token every decoding is the same as token by token, with the same probability.",
         source="w_1 is min(1, r_1), and the weight of no token is 1", given=lambda: pairs(most=1))
def same_for_one_token(x: Example) -> None:
    def decodings(verification: str) -> list[tuple[Fraction, list[Commit]]]:
        given = decoder({**x, "verification": verification})
        return [(each.chance, each.commits) for each in possible_decodings(given, models(x), PROMPT, x["tokens"])]

    equal("decodings and their probabilities", decodings(BLOCK), decodings(TOKEN))


# --- 43e and 43f: the law of the accepted length ---


@theorem("43e", "The law of the accepted length of given distributions is that of the algorithm, for both verifications.",
         source="enumeration of drafts and of random numbers", given=_tables)
def law_of_accepted_length(x: Example) -> None:
    for verification in (BLOCK, TOKEN):
        found = _survival(x, verification)
        for index, chance in enumerate(_mean_at_least(x, verification)):
            equal(f"probability of at least {index + 1} accepted, {verification}", float(found[index]), float(chance), CLOSE)


@theorem("43f", "With one distribution each, s_i is between alpha^i and alpha, and at most sum min(P, Q) over drafts of i tokens.",
         source="w_i is at most min(1, r_i) and at most the ratio of the whole draft's probabilities",
         given=lambda: _tables(by_last=False))
def bounds_of_law(x: Example) -> None:
    found, (low, high) = _survival(x, BLOCK), blocks.survival_bounds(float(_mean_at_least(x, TOKEN)[0]), x["draft_length"])
    before = 1.0
    for index, chance in enumerate(found.tolist()):
        at_most(f"alpha^{index + 1}", float(low[index]), chance, CLOSE)
        at_most("probability of one token more", chance, min(before, float(high[index])), CLOSE)
        both = sum(min(_chance(x, "target", words), _chance(x, "draft", words)) for words in _drafts(x, index + 1))
        at_most(f"probability of at least {index + 1} accepted", chance, float(both), CLOSE)
        before = chance


# --- 43g to 43i: what does not hold ---


@theorem("43g", "On the same draft with the same random numbers, at least as many tokens are accepted as token by token.",
         source="false: the test of a block has another bound than those of its tokens; only the law is never worse",
         given=_coupled, expect="fails")
def never_fewer_on_a_path(x: Example) -> None:
    at_most("tokens accepted token by token", _accepted(x, TOKEN), _accepted(x, BLOCK))


@theorem("43h", "P(at least i accepted | the whole draft) is never smaller than token by token.",
         source="false: a good continuation of a draft takes probability from one that is worse", given=_tables, expect="fails")
def never_fewer_by_whole_draft(x: Example) -> None:
    by_token = {each.words: each.at_least for each in _drafted(x, TOKEN)}
    for each in _drafted(x, BLOCK):
        for index, chance in enumerate(each.at_least):
            what = f"probability that at least {index + 1} of {each.words} are accepted, by token"
            at_most(what, float(by_token[each.words][index]), float(chance), CLOSE)


@theorem("43i", "The text has the target's distribution if the token after the accepted block is drawn from norm(max(0, p - q)).",
         source="false: after an accepted block p has the weight of the block", given=_weighted, expect="fails")
def residual_without_weight(x: Example) -> None:
    same_texts(text_law(x, lambda: _unweighted(decoder(x)())), target_law(x))


# --- 43j: time ---


@theorem("43j", "On the same accepted lengths, rounds, latency and compute are those of token-wise verification, on every path.",
         source="verification by block needs no further pass", given=_paths)
def same_time_on_a_path(x: Example) -> None:
    one, other = (play(x, verification=verification) for verification in (TOKEN, BLOCK))
    for what, of in (("rounds", rounds), ("drafted tokens", drafted), ("starts of rounds", starts)):
        equal(what, of(other), of(one))
    equal("latency and compute", (other.latency, other.busy), (one.latency, one.busy))


# --- Helpers ---


class _Drafted(NamedTuple):
    """A draft, its probability, and the probabilities that at least 1, 2, ... of its tokens are accepted."""

    words: tuple[int, ...]
    chance: Fraction
    at_least: list[Fraction]


def _of_last(rows: list[list[int]]) -> Model:
    table = [tuple(Fraction(weight, sum(row)) for weight in row) for row in rows]
    return lambda text: table[text[-1] % len(table)]


def _by_role(x: Example) -> dict[str, Model]:
    return {role: _of_last(x[role]) for role in ("target", "draft")}


def _drafts(x: Example, length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(len(x["target"][0])), repeat=length)


def _chance(x: Example, role: str, words: tuple[int, ...]) -> Fraction:
    model = _by_role(x)[role]
    return math.prod((model((*PROMPT, *words[:index]))[word] for index, word in enumerate(words)), start=Fraction(1))


def _ratio(x: Example, words: tuple[int, ...], index: int) -> Fraction:
    p, q = (_by_role(x)[role]((*PROMPT, *words[:index]))[words[index]] for role in ("target", "draft"))
    return p / q


def _drafted(x: Example, verification: str) -> Iterator[_Drafted]:
    """Yield all drafts of positive probability, whose tests are enumerated."""
    for words in _drafts(x, x["draft_length"]):
        chance = _chance(x, "draft", words)
        if chance:
            decodings = list(possible_decodings(lambda words=words: _round(words, verification), _by_role(x), PROMPT, 1))  # type: ignore[misc]
            accepted = [(each.chance, len(each.text) - 1) for each in decodings]
            tails = [sum((share for share, kept in accepted if kept > index), Fraction(0)) for index in range(len(words))]
            yield _Drafted(words, chance, tails)


def _round(words: tuple[int, ...], verification: str) -> Steps:
    """One round with a given draft."""
    layers, guesses = LayerSpan(0, 1), []
    text: tuple[int, ...] = PROMPT
    for word in words:
        out = yield Forward("draft", text[-1:], len(text) - 1, layers, heads=1)
        guesses.append(DraftedToken(word, out))
        text = (*text, word)
    target = speculative.Model("target", 1, 0)
    kept, token = yield from speculative.verify(target, PROMPT, guesses, True, None, verification)
    yield Commit("round", (*words[:kept], token), len(words))


def _accepted_at_least(x: Example, verification: str) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Yield the first i drafted tokens and the probability that at least i are accepted, given these."""
    everything = list(_drafted(x, verification))
    for index in range(x["draft_length"]):
        of_prefix: dict[tuple[int, ...], list[_Drafted]] = {}
        for each in everything:
            of_prefix.setdefault(each.words[: index + 1], []).append(each)
        for prefix, group in of_prefix.items():
            whole = sum((each.chance for each in group), Fraction(0))
            yield prefix, sum((each.chance * each.at_least[index] for each in group), Fraction(0)) / whole


def _mean_at_least(x: Example, verification: str) -> list[Fraction]:
    """Return the probabilities that at least 1, 2, ... tokens are accepted, over all drafts."""
    everything = list(_drafted(x, verification))
    return [sum((each.chance * each.at_least[index] for each in everything), Fraction(0)) for index in range(x["draft_length"])]


def _survival(x: Example, verification: str) -> blocks.Floats:
    p, q = ([[weight / sum(row) for weight in row] for row in x[role]] for role in ("target", "draft"))
    if len(p) == 1:
        return blocks.survival(p[0], q[0], x["draft_length"], verification)
    return blocks.survival(p, q, x["draft_length"], verification, start=[float(word == PROMPT[-1]) for word in range(len(p))])


def _accepted(x: Example, verification: str) -> int:
    """Return the accepted length of the given draft with the given random numbers; no length if the draft is impossible."""
    words, by_role = tuple(x["words"]), _by_role(x)
    if not _chance(x, "draft", words):
        return 0

    def law(output: str, offset: int) -> tuple[Fraction, ...]:
        return by_role[output]((*PROMPT, *words[: len(words) + 1 + offset]))

    guesses = [DraftedToken(word, "draft", index - len(words) - 1) for index, word in enumerate(words)]
    steps, answer = speculative.accept_or_reject("target", guesses, True, None, verification), None
    while True:
        try:
            step: Any = steps.send(answer)
        except StopIteration as stop:
            return int(stop.value[0])
        match step.kind:
            case "probability":
                answer = law(step.output, step.offset)[step.token]
            case "uniform":
                answer = Fraction(x["eighths"][step.offset + len(words) + 1], 8)
            case "residual_mass":
                p, q = law(step.output, step.offset), law(step.against, step.against_offset)
                answer = sum((max(Fraction(0), step.weight * one - other) for one, other in zip(p, q, strict=True)), Fraction(0))
            case _:
                answer = 0


def _unweighted(steps: Steps) -> Steps:
    """Yield the same steps, but draw the token after the accepted block as after a rejected token."""
    answer = None
    while True:
        try:
            step: Any = steps.send(answer)
        except StopIteration:
            return
        unweighted = isinstance(step, Read) and step.kind == "residual"
        answer = yield step._replace(weight=1) if unweighted else step


THEOREMS = theorem.all()
