"""Draft heads of tiny models, trained for a moment; and the law of a sampled text, by following every choice."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from calibrate.decoders import eagle_and_medusa
from calibrate.decoders.eagle_and_medusa import DraftHead
from calibrate.family import draft_head_training
from calibrate.family.draft_head_training import DraftHeadSettings
from calibrate.interpreters.in_one_process import Real, Sampling
from tests.support import real_models
from tests.support.real_models import VOCABULARY

KINDS = [kind for kind in real_models.KINDS if kind not in (*real_models.ENCODER_DECODERS, "opt")]
"""The tiny OPT projects its embedding and last state, which no draft head here reads."""
COUNT = 3
"""Medusa heads."""


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


def exact_law(full: Any, prompt: list[int], tokens: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each text of this length that the model generates after a prompt, from scratch."""
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        following = {text: sampling.probabilities(real_models.logits(full, [*prompt, *text]).numpy()) for text in exact}
        exact = {
            (*text, int(token)): chance * float(following[text][token])
            for text, chance in exact.items() for token in np.flatnonzero(following[text])
        }  # fmt: skip
    return exact
