"""Draft heads on real models: they read the states that the algorithm names, keep their rows, and leave the output exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from calibrate.family import draft_head_training
from calibrate.family.draft_head_training import EAGLE, MEDUSA
from calibrate.interpreters.in_one_process import Real, Sampling
from model.methods.speculative import algorithm as speculative
from model.methods.tree import algorithm as tree
from model.steps import MASK, declining
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY
from tests.support.trained_heads import COUNT, KINDS, exact_law, heads, law_of_text, modules_of

LAYERS = DEPTHS["target"]
DRAFTERS = {EAGLE: "heads", MEDUSA: "parallel"}

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("shape", [(-1,), (-1, 0, 1), (-1, -1, 0, 0, 1, 3)])
@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_levels_of_a_tree_that_are_drafted_together_change_nothing(tokens: int, shape: tuple[int, ...]) -> None:
    chosen = tree.Parameters(LAYERS, "listed", parents=shape, drafter="heads", draft_layers=1)
    decoders = {**real_models.decoders("llama"), "draft": heads("llama", EAGLE)}
    together, alone = (
        Real(decoders).run(each(tree.decode(chosen, [3, 4, 5], tokens)), tokens) for each in (lambda steps: steps, declining)
    )
    assert together == alone
    assert together.tokens == real_models.reference_tokens(decoders["target"].full, [3, 4, 5], tokens)
    assert together.account.passes > 2 or tokens == 1


# --- Sampling: the law of the text ---


@pytest.mark.parametrize("kind", DRAFTERS)
def test_sampled_text_has_the_law_of_the_target(kind: str) -> None:
    """Every choice is followed: drafted tokens, tests, replacements and bonus tokens."""
    sampling, prompt, tokens = Sampling(temperature=2.0, top_k=2), [3, 4], 3
    decoders = {**real_models.decoders("llama"), "draft": heads("llama", kind)}
    exact = exact_law(decoders["target"].full, prompt, tokens, sampling)
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


def test_a_head_encodes_positions_in_its_own_way() -> None:
    """Not as a target with another base of its rotary encoding, of which the head takes the parts that they share."""
    import transformers

    from calibrate.decoders.eagle_and_medusa import EagleHead, eagle_modules, eagle_size
    from calibrate.decoders.transformers_adapter import decoder_of

    config = real_models.config("llama", 2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    target = decoder_of(transformers.LlamaForCausalLM(config), "target")
    theirs = target._consecutive(0, 6)[1]
    head = EagleHead(target, eagle_modules(eagle_size(target)))
    found, expected = head._consecutive(0, 6)[1], head._extras(torch.arange(6)[None], 6)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(found, theirs, strict=True))


def test_masks_are_no_tokens_of_the_vocabulary() -> None:
    """Forced tokens are positions, mapped into the vocabulary; a mask stays one, or a parallel draft would read a token there."""
    real = Real(real_models.decoders("llama"))
    assert real.to_vocabulary("target", (VOCABULARY + 1, -1, MASK)) == (1, VOCABULARY - 1, MASK)
