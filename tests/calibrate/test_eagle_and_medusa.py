"""Draft heads on real models: they read the states that the algorithm names, keep their rows, and leave the output exact."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoders import eagle_and_medusa
from calibrate.decoders.eagle_and_medusa import DraftHead
from calibrate.family import draft_head_training
from calibrate.family.draft_head_training import EAGLE, MEDUSA, DraftHeadSettings
from calibrate.interpreters.in_one_process import Real, Sampling
from model.methods.speculative import algorithm as speculative
from model.steps import MASK
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY

LAYERS = DEPTHS["target"]
KINDS = [kind for kind in real_models.KINDS if kind not in (*real_models.ENCODER_DECODERS, "opt")]
"""The tiny OPT projects its embedding and last state, which no draft head here reads."""
DRAFTERS = {EAGLE: "heads", MEDUSA: "parallel"}
COUNT = 3
"""Medusa heads."""

pytestmark = pytest.mark.usefixtures("one_thread")


def own_text(full: Any, tokens: int) -> np.ndarray[Any, Any]:
    """Text that the target generates greedily, from several first tokens."""
    ids = torch.arange(VOCABULARY)[:, None]
    made = full.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return np.asarray(made.numpy())


@lru_cache(maxsize=32)
def modules_of(architecture: str, kind: str, steps: int = 30) -> Any:
    """Draft heads of a tiny model, trained on its own text for a moment, so that some of their tokens are accepted."""
    target = real_models.decoders(architecture)["target"]
    settings = DraftHeadSettings(draft_length=COUNT)
    modules = draft_head_training.new_modules(target, kind, settings).double()
    windows = own_text(target.full, 16)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    for _ in range(steps):
        draft_head_training.learn(target, modules, kind, settings, windows)
        optimizer.step()
        optimizer.zero_grad()
    return modules


def heads(architecture: str, kind: str) -> DraftHead:
    return eagle_and_medusa.HEADS[kind](real_models.decoders(architecture)["target"], modules_of(architecture, kind))


def parameters(kind: str, draft_length: int = COUNT, **more: Any) -> Any:
    return speculative.Parameters(LAYERS, draft_length, drafter=DRAFTERS[kind], draft_layers=1, **more)


def decoded(architecture: str, kind: str, prompt: list[int], tokens: int, draft_length: int = COUNT, **more: Any) -> Any:
    decoders = {**real_models.decoders(architecture), "draft": heads(architecture, kind)}
    steps = speculative.decode(parameters(kind, draft_length, **more.pop("settings", {})), prompt, tokens)
    return Real(decoders, **more).run(steps, tokens)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("architecture", KINDS)
def test_greedy_output_is_that_of_the_target(architecture: str, kind: str) -> None:
    full = real_models.decoders(architecture)["target"].full
    seen = set[tuple[int, int]]()
    for prompt in ([7], [3, 4], [5, 6, 7, 8, 9]):
        work = decoded(architecture, kind, prompt, 24)
        assert work.tokens == real_models.reference_tokens(full, prompt, 24)
        seen |= {*work.rounds}
    assert {accepted for accepted, drafted in seen if drafted == COUNT} >= {0, 1}, seen


# --- Sampling: the law of the text ---


class Followed(Real):
    """Takes given choices instead of random ones, the first of those that are not given; `chance` is their probability."""

    def __init__(self, decoders: Any, sampling: Sampling, given: tuple[int, ...]) -> None:
        super().__init__(decoders, sampling=sampling)
        self.given, self.options, self.chance = given, list[int](), 1.0
        self.ratio = [1.0, 1.0]

    def choose(self, options: list[tuple[Any, float]]) -> Any:
        """Take one of several values with their probabilities."""
        options = [each for each in options if each[1] > 1e-15]
        index = self.given[len(self.options)] if len(self.options) < len(self.given) else 0
        self.options.append(len(options))
        self.chance *= options[index][1]
        return options[index][0]

    def _evaluate(self, step: Any) -> Any:
        if step.kind == "uniform":
            accepted = min(self.ratio[0] / self.ratio[1], 1.0)
            return self.choose([(0.0, accepted), (1.0, 1 - accepted)])
        found = super()._evaluate(step)
        if step.kind == "probability":
            self.ratio = [self.ratio[1], found]
        return found

    def _token_at(self, probabilities: Any, *_: Any) -> int:
        law = probabilities / probabilities.sum()
        return int(self.choose([(token, float(law[token])) for token in np.flatnonzero(law)]))


def law_of_text(decoders: Any, steps: Any, sampling: Sampling, tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of each output of a decoding, by following every choice."""
    law: dict[tuple[int, ...], float] = {}
    left: list[tuple[int, ...]] = [()]
    while left:
        given = left.pop()
        run = Followed(decoders, sampling, given)
        text = tuple(run.run(steps(), tokens).tokens)
        law[text] = law.get(text, 0.0) + run.chance
        for place in range(len(given), len(run.options)):
            rest = (0,) * (place - len(given))
            left += [(*given, *rest, option) for option in range(1, run.options[place])]
    return law


@pytest.mark.parametrize("kind", DRAFTERS)
def test_sampled_text_has_the_law_of_the_target(kind: str) -> None:
    """Every choice is followed: drafted tokens, tests, replacements and bonus tokens."""
    sampling, prompt, tokens = Sampling(temperature=2.0, top_k=2), [3, 4], 3
    decoders = {**real_models.decoders("llama"), "draft": heads("llama", kind)}
    full = decoders["target"].full
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        following = {text: sampling.probabilities(real_models.logits(full, [*prompt, *text]).numpy()) for text in exact}
        exact = {
            (*text, int(token)): chance * float(following[text][token])
            for text, chance in exact.items() for token in np.flatnonzero(following[text])
        }  # fmt: skip
    choice = parameters(kind, 2, sampled=True)
    found = law_of_text(decoders, lambda: speculative.decode(choice, prompt, tokens), sampling, tokens)
    assert {*found} == {*exact}
    for text, chance in exact.items():
        assert found[text] == pytest.approx(chance, abs=1e-9)


# --- What heads read ---


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_are_those_of_one_pass_over_the_whole_text(kind: str, architecture: str) -> None:
    """The logits of draft position j, where all tokens before it are those of the text, equal the ones that training computes."""
    drafted: list[tuple[int, int, Any]] = []

    class Seen(Real):
        def read(self, step: Any) -> Any:
            output = step.output
            if output.step.role == "draft":
                place = output.positions[step.offset]
                # Position in the draft: tokens since the last one that the target's states are known for.
                index = place - self.known if kind == EAGLE else step.offset + output.step.heads
                drafted.append((place, index, output.logits[output.row(step.offset)].clone()))
            return super().read(step)

        def forward(self, cache: Any, step: Any) -> Any:
            if step.role == "draft" and step.state is not None and step.state.output.step.role == "target":
                self.known = step.at + step.state.length - 1
            return super().forward(cache, step)

        known = 0

    decoders = {**real_models.decoders(architecture), "draft": heads(architecture, kind)}
    prompt, tokens = [5, 6, 7], 30
    work = Seen(decoders).run(speculative.decode(parameters(kind), prompt, tokens), tokens)
    text = torch.tensor([[*prompt, *work.tokens]])
    states, _ = draft_head_training._of_target(decoders["target"], text)
    modules = modules_of(architecture, kind)
    with torch.no_grad():
        whole = [*draft_head_training.positions(decoders["target"], modules, kind, text, states, COUNT)]
    begins = [int(each) for each in np.cumsum([len(prompt), *[len(each.tokens) for each in work.committed]])]
    compared = [0] * COUNT
    for place, index, logits in drafted:
        accepted = len(work.committed[begins.index(place - index + 1)].tokens) - 1
        if index <= accepted:
            assert torch.allclose(logits, whole[index][0, place - index], atol=1e-9), (place, index)
            compared[index] += 1
    assert min(compared) >= 2, compared


def test_masks_are_no_tokens_of_the_vocabulary() -> None:
    """Forced tokens are positions, mapped into the vocabulary; a mask stays one, or a parallel draft would read a token there."""
    real = Real(real_models.decoders("llama"))
    assert real.to_vocabulary("target", (VOCABULARY + 1, -1, MASK)) == (1, VOCABULARY - 1, MASK)
