"""Tree drafts on real models: one pass verifies a tree, each node sees its own path, and the output is the target's own."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

from calibrate.decoders.kv_rows import KvRows
from calibrate.decoders.transformers_adapter import decoder_of
from calibrate.family.draft_head_training import EAGLE, MEDUSA
from calibrate.interpreters.in_one_process import RandomDraws, Real, Sampling
from model.logs import read_log
from model.logs.replay import Replayed
from model.methods.speculative import algorithm as speculative
from model.methods.tree import algorithm as tree
from model.steps import Forward, LayerSpan, Read
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY
from tests.support.tiers import cross_rows
from tests.support.trained_heads import COUNT, KINDS, exact_law, heads, law_of_text

LAYERS = DEPTHS["target"]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"draft_depth": COUNT},
    "full": {"draft_depth": COUNT, "width": 2},
    "listed": {"parents": (-1, -1, -1, 0, 0, 1, 3)},
    "sequoia": {"draft_depth": COUNT, "nodes": 7, "rank_rates": (0.4, 0.2, 0.15)},
    "eagle-2": {"draft_depth": COUNT, "nodes": 6, "width": 3},
}
HEADS = {"heads": EAGLE, "parallel": MEDUSA}
DRAFTERS = ("model", *HEADS)
CHOICES = {
    f"{shape} {drafter}": (shape, drafter)
    for drafter in DRAFTERS for shape in SHAPES if (shape, drafter) != ("eagle-2", "parallel")
}
FEW = ("full model", "listed heads", "eagle-2 heads", "sequoia parallel")
"""Choices that the quick tier runs on every architecture."""
PROMPTS = ([7], [3, 4], [5, 6, 7, 8, 9])

pytestmark = pytest.mark.usefixtures("one_thread")


@lru_cache(maxsize=32)
def near(architecture: str) -> Any:
    """The target with other weights nearby, which drafts some of its tokens."""
    full = copy.deepcopy(real_models.model(architecture, LAYERS))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in full.parameters():
            parameter += 0.2 * parameter.std() * torch.randn_like(parameter)
    return full


def decoders_of(architecture: str, drafter: str) -> dict[str, Any]:
    """The target, and a draft of which some tokens are accepted."""
    if drafter == "model":
        found = real_models.decoders(architecture)
        found["draft"] = decoder_of(near(architecture), "draft")
        if architecture in real_models.ENCODER_DECODERS:
            found["draft"].read_source(real_models.SOURCE)
        return found
    return {**real_models.decoders(architecture), "draft": heads(architecture, HEADS[drafter])}


def parameters(shape: str, drafter: str, **more: Any) -> tree.Parameters:
    layers = LAYERS if drafter == "model" else 1
    return tree.Parameters(LAYERS, shape, drafter=drafter, draft_layers=layers, **SHAPES[shape] | more)


@pytest.mark.parametrize(("name", "architecture"), cross_rows(CHOICES, KINDS, FEW))
def test_greedy_output_is_that_of_the_target(name: str, architecture: str) -> None:
    shape, drafter = CHOICES[name]
    decoders, seen = decoders_of(architecture, drafter), set[int]()
    for prompt in PROMPTS:
        work = Real(decoders).run(tree.decode(parameters(shape, drafter), prompt, 20), 20)
        assert work.tokens == real_models.reference_tokens(decoders["target"].full, prompt, 20)
        seen |= {accepted for accepted, drafted in work.rounds if drafted}
    assert max(seen) > 0
    assert len(seen) > 1, seen


def test_greedy_output_is_that_of_generate() -> None:
    """`generate` of the library, with its own cache."""
    decoders, prompt = decoders_of("qwen3", "heads"), [5, 6, 7]
    work = Real(decoders).run(tree.decode(parameters("sequoia", "heads"), prompt, 40), 40)
    ids = torch.tensor([prompt])
    made = decoders["target"].full.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    assert [*prompt, *work.tokens] == made[0].tolist()


@pytest.mark.parametrize("architecture", real_models.ENCODER_DECODERS)
def test_decoders_that_attend_to_an_encoder_verify_trees(architecture: str) -> None:
    decoders = decoders_of(architecture, "model")
    work = Real(decoders).run(tree.decode(parameters("listed", "model"), [0], 16), 16)
    assert work.tokens == real_models.reference_tokens(decoders["target"].full, [0], 16)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_round_verifies_in_one_pass_of_the_target(drafter: str) -> None:
    """Of the target one pass per round besides that over the prompt; of the draft one per depth, or a single one."""
    prompt, tokens = [5, 6, 7], 24
    work = Real(decoders_of("llama", drafter)).run(tree.decode(parameters("full", drafter), prompt, tokens), tokens)
    passes = work.account.passes_of
    assert passes["target"] == 1 + len(work.committed)
    levels = [0 if not each.drafted else {2: 1, 6: 2, 14: 3}[each.drafted] for each in work.committed]
    per_round = levels if drafter != "parallel" else [1 for each in levels if each]
    assert passes["draft"] == 1 + sum(per_round)


# --- What each node sees ---


class Compared(Real):
    """Compares the logits of every token of every pass over a tree with those of its path, computed from scratch."""

    def __init__(self, decoders: Any, prompt: list[int]) -> None:
        super().__init__(decoders)
        self.prompt, self.compared = prompt, 0

    def forward(self, cache: Any, step: Forward) -> Any:
        made = super().forward(cache, step)
        text = [*self.prompt, *self.work.tokens]
        if step.role == "target" and step.heads:
            for index, path in enumerate(paths_of(step, text)):
                expected = real_models.logits(self.decoders["target"].full, path)
                assert torch.allclose(made.logits[index], expected, atol=1e-9), (index, path)
                self.compared += 1
        return made


def paths_of(step: Forward, text: list[int]) -> list[list[int]]:
    """The whole text up to each token of a pass of the target, which begins with the text's last token."""
    assert step.at == len(text) - 1
    assert step.tokens[0] == text[-1]
    paths: list[list[int]] = []
    for index, token in enumerate(step.tokens):
        before = step.tree[index] if step.tree else index - 1
        paths.append([*(text[:-1] if index == 0 else paths[before]), token])
    return paths


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("shape", ["full", "listed", "eagle-2"])
def test_every_node_has_the_logits_of_its_own_path(architecture: str, shape: str) -> None:
    """Rejected nodes too: the rows of earlier rounds that it sees are those of the accepted paths."""
    prompt = [5, 6, 7]
    real = Compared(decoders_of(architecture, "heads"), prompt)
    work = real.run(tree.decode(parameters(shape, "heads"), prompt, 20), 20)
    assert real.compared == sum(1 + (each.drafted or 0) for each in work.committed) > 40


@pytest.mark.parametrize("shape", ["full", "eagle-2"])
def test_nodes_read_the_states_of_their_own_path(shape: str) -> None:
    """An EAGLE head drafts each node as it would if its path were the only one, with the target's states of the text."""
    prompt, tokens = [5, 6, 7], 20
    decoders = decoders_of("llama", "heads")
    target, head = decoders["target"], decoders["draft"]
    compared: list[int] = []

    class Seen(Real):
        known: tuple[list[int], Any]
        paths: list[tuple[int, ...]]

        def forward(self, cache: Any, step: Forward) -> Any:
            made = super().forward(cache, step)
            if step.role == "draft" and step.heads:
                text = [*prompt, *self.work.tokens]
                if step.at < len(text):  # the text's new tokens; the last of them is the root
                    self.last, paths = (), [()]
                else:
                    before = [self.paths[-1 - each] for each in step.tree]
                    paths = [(*path, token) for path, token in zip(before, step.tokens, strict=True)]
                for index, path in enumerate(paths, -len(paths)):
                    assert torch.allclose(made.logits[index], alone(text, path), atol=1e-9), path
                    compared.append(len(path))
                self.paths = paths
            return made

    def alone(text: list[int], path: tuple[int, ...]) -> Any:
        whole = LayerSpan(0, target.layers)
        states = target.run(tuple(text[:-1]), 0, whole, KvRows(target.layers))
        rows = KvRows(1)
        state = head.run(tuple(text), 0, LayerSpan(0, 1), rows, states)
        for at, token in enumerate(path, len(text)):
            state = head.run((token,), at, LayerSpan(0, 1), rows, state[-1:])
        return head.logits(state, 1)[-1]

    Seen(decoders).run(tree.decode(parameters(shape, "heads"), prompt, tokens), tokens)
    assert min(compared.count(depth) for depth in range(COUNT)) >= 5, compared


def test_a_chain_makes_the_passes_of_speculative_decoding() -> None:
    prompt, tokens, found = [5, 6, 7], 24, []
    for drafter in DRAFTERS:
        of_tree = parameters("chain", drafter)
        of_chain = speculative.Parameters(LAYERS, COUNT, drafter=drafter, draft_layers=of_tree.draft_layers)
        for module, choice in ((tree, of_tree), (speculative, of_chain)):
            found.append(Real(decoders_of("llama", drafter)).run(module.decode(choice, prompt, tokens), tokens))
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        assert ours.committed == theirs.committed
        assert ours.account.passes_by_kind == theirs.account.passes_by_kind


# --- Sampling: the law of the text ---

SAMPLED = {
    "distinct full model": ("full", "model", "distinct", 3),
    "distinct full heads": ("full", "heads", "distinct", 3),
    "distinct full parallel": ("full", "parallel", "distinct", 3),
    "distinct wider than the distribution": ("wide", "heads", "distinct", 2),
    "likeliest full heads": ("full", "heads", "likeliest", 3),
    "likeliest full model": ("full", "model", "likeliest", 3),
    "likeliest eagle-2 heads": ("eagle-2", "heads", "likeliest", 3),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_text_has_the_law_of_the_target(name: str) -> None:
    """Every choice is followed: tokens drawn without replacement, tests, replacements after several rejections, bonus tokens."""
    shape, drafter, candidates, top_k = SAMPLED[name]
    sampling, prompt, tokens = Sampling(temperature=2.0, top_k=top_k), [3, 4], 2
    decoders = decoders_of("llama", drafter)
    SMALL = {"full": {"shape": "full", "draft_depth": 1, "width": 2}, "wide": {"shape": "full", "draft_depth": 1, "width": 4}}
    small = SMALL.get(shape, {"shape": shape, "draft_depth": 1, "nodes": 2, "width": 2})
    layers = LAYERS if drafter == "model" else 1
    choice = tree.Parameters(LAYERS, drafter=drafter, draft_layers=layers, candidates=candidates, sampled=True, **small)
    exact = exact_law(decoders["target"].full, prompt, tokens, sampling)
    found = law_of_text(decoders, lambda: tree.decode(choice, prompt, tokens), sampling, tokens)
    assert {*found} == {*exact}
    for text, chance in exact.items():
        assert found[text] == pytest.approx(chance, abs=1e-9)


def test_distinct_tokens_are_drawn_without_replacement() -> None:
    decoders = real_models.decoders("llama")
    real = Real(decoders, sampling=Sampling(top_k=3))
    out = real.forward(real.new_cache(), Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), heads=1))
    drawn = [real.read(Read("distinct", out, width=5)) for _ in range(200)]
    likeliest = real.read(Read("top", out, width=3))
    assert all(sorted(each) == sorted(likeliest) for each in drawn)
    assert len({tuple(each) for each in drawn}) == 6  # the least likely order has a probability above .05: misses 1 in 30 000
    assert len(real.read(Read("top", out, width=VOCABULARY + 5))) == VOCABULARY


# --- Logs ---


@pytest.mark.parametrize(("shape", "candidates"), [("full", "likeliest"), ("full", "distinct"), ("eagle-2", "likeliest")])
def test_logged_reads_replay_the_decoding(shape: str, candidates: str, tmp_path: Any) -> None:
    """A log holds all that the algorithm has seen: with its answers the counter makes the same passes and commits."""
    from calibrate.decode import real_decoding
    from model.interpret.interpreter import count
    from model.logs import replay

    sampled = candidates == "distinct"
    settings = {"shape": shape, "drafter": "heads", "candidates": candidates, "sampled": sampled, **SHAPES[shape]}
    decoding = real_decoding.decode(
        "tree", decoders_of("llama", "heads"), [5, 6, 7], 16, settings, log=True, random_draws=RandomDraws(3)
    )  # fmt: skip
    log = read_log.ReadLog((decoding,), ("prompt",), {})
    back = read_log.load(read_log.save(log, tmp_path / "log.json")).decodings[0]
    assert back.reads == decoding.reads
    work = count(replay.steps_of(back), Replayed(back.reads), 16)  # type: ignore[arg-type]
    assert work.committed == [*decoding.commits]
    assert work.account.passes_by_kind == decoding.account.passes_by_kind
