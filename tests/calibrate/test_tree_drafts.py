"""Tree drafts on real models: one pass verifies a tree, each node sees its own path, and the output is the target's own."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from calibrate.decode import decoded_rounds, real_decoding
from calibrate.decoders import eagle_and_medusa
from calibrate.decoders.kv_rows import KvRows
from calibrate.decoders.transformers_adapter import decoder_of
from calibrate.family import draft_head_training, model_directory
from calibrate.family.draft_head_training import EAGLE, MEDUSA, DraftHeadSettings
from calibrate.interpreters.in_one_process import RandomDraws, Real, Sampling
from calibrate.loading import load_models
from model.base.checks import ParameterError
from model.logs import read_log
from model.logs.replay import Replayed
from model.methods.speculative import algorithm as speculative
from model.methods.tree import algorithm as tree
from model.methods.tree import ranks_from_logs
from model.methods.tree.draft_trees import ROOT
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
        assert [each._replace(ranks=(), candidates=()) for each in ours.committed] == theirs.committed
        assert ours.account.passes_by_kind == theirs.account.passes_by_kind


# --- Sampling: the law of the text ---

SAMPLED = {
    "distinct full model": ("full", "model", "distinct", 3),
    "distinct full heads": ("full", "heads", "distinct", 3),
    "distinct full parallel": ("full", "parallel", "distinct", 3),
    "distinct deep heads": ("deep", "heads", "distinct", 2),
    "distinct deep parallel": ("deep", "parallel", "distinct", 2),
    "likeliest deep parallel": ("deep", "parallel", "likeliest", 2),
    "distinct wider than the distribution": ("wide", "heads", "distinct", 2),
    "likeliest full heads": ("full", "heads", "likeliest", 3),
    "likeliest full model": ("full", "model", "likeliest", 3),
    "likeliest eagle-2 heads": ("eagle-2", "heads", "likeliest", 3),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_text_has_the_law_of_the_target(name: str) -> None:
    """Every choice is followed: tokens drawn without replacement, tests, replacements after several rejections, bonus tokens."""
    shape, drafter, candidates, top_k = SAMPLED[name]
    sampling, prompt, tokens = Sampling(temperature=2.0, top_k=top_k), [3, 4], 3 if shape == "deep" else 2
    decoders = decoders_of("llama", drafter)
    depths = {"full": (1, 2), "wide": (1, 4), "deep": (2, 2)}
    full = {name: {"shape": "full", "draft_depth": depth, "width": width} for name, (depth, width) in depths.items()}
    small = full.get(shape, {"shape": shape, "draft_depth": 1, "nodes": 2, "width": 2})
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


# --- The bundled models ---


@lru_cache(maxsize=1)
def bundled_heads() -> tuple[Any, dict[str, Any]]:
    """The bundled target in double precision, with its EAGLE head, and with Medusa heads trained on its own text for a moment."""
    models = load_models.models({"target": "family:target", "draft": "family:eagle"}, "cpu", "float64")
    target = models["target"].decoder
    settings = DraftHeadSettings(draft_length=COUNT)
    modules = draft_head_training.new_modules(target, MEDUSA, settings).double()
    ids = torch.tensor([TEXT])
    own = target.full.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)
    for _ in range(10):
        draft_head_training.learn(target, modules, MEDUSA, settings, own.numpy())
        optimizer.step()
        optimizer.zero_grad()
    return target, {"heads": models["draft"].decoder, "parallel": eagle_and_medusa.HEADS[MEDUSA](target, modules)}


TEXT = [5, 17, 40]


@pytest.mark.skipif(not model_directory.names(), reason="no models are bundled")
@pytest.mark.parametrize(("shape", "drafter"), [(*each,) for each in CHOICES.values() if each[1] != "model"])
def test_bundled_target_with_heads_decodes_as_generate(shape: str, drafter: str) -> None:
    target, drafts = bundled_heads()
    choice = tree.Parameters(target.layers, shape, drafter=drafter, draft_layers=1, **SHAPES[shape])
    work = Real({"target": target, "draft": drafts[drafter]}).run(tree.decode(choice, TEXT, 40), 40)
    ids = torch.tensor([TEXT])
    made = target.full.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert [*TEXT, *work.tokens] == made[0].tolist()
    assert len(work.committed) < 40, "no drafted token was accepted"


# --- Ranks ---


@pytest.mark.parametrize("shape", ["full", "listed", "sequoia"])
def test_commits_hold_the_ranks_that_the_draft_gives_along_the_text(shape: str) -> None:
    """The draft model reads the text up to each token from scratch, and its likeliest tokens there are ranked."""
    prompt, tokens = [5, 6, 7], 30
    decoders = decoders_of("llama", "model")
    choice = parameters(shape, "model")
    work = Real(decoders).run(tree.decode(choice, prompt, tokens), tokens)
    text, seen = [*prompt], set[int]()
    for commit in work.committed:
        node, room = ROOT, len(prompt) + tokens - len(text) - 1
        for depth, (token, rank, candidates) in enumerate(zip(commit.tokens, commit.ranks, commit.candidates, strict=True)):
            children = choice.trees[0].cut(room).children.get(node, ()) if room else ()
            assert candidates == (len(children) if depth < room else 0)
            best = real_models.logits(decoders["draft"].full, text).topk(max(candidates, 1)).indices.tolist()[:candidates]
            assert rank == (best.index(token) + 1 if token in best else 0)
            node = children[rank - 1] if rank else node
            text.append(token)
            seen.add(rank)
    assert seen >= {0, 1, 2}


def test_commits_without_ranks_are_refused_where_ranks_are_needed(tmp_path: Any) -> None:
    decoding = real_decoding.decode("tree", decoders_of("llama", "heads"), [5, 6], 8, {
        "shape": "full", "drafter": "heads", "draft_depth": 2, "width": 2,
    })  # fmt: skip
    path = read_log.save(read_log.ReadLog((decoding,), ("prompt",), {}), tmp_path / "log.json")
    (first, *_) = decoded_rounds.tables(read_log.load(path).decodings)
    assert first.columns == ("depth", "rank", "rate", "low", "high", "trials")
    bare = replace(decoding, commits=tuple(each._replace(ranks=(), candidates=()) for each in decoding.commits))
    with pytest.raises(ParameterError, match="must hold the ranks of their tokens among the draft's candidates, and this record"):
        [*decoded_rounds.tables([bare])]
    with pytest.raises(ParameterError, match="this record has none"):
        ranks_from_logs.of_commits(bare.commits)


@pytest.mark.parametrize(("changed", "error"), [
    ({"ranks": [1] * 9}, "ranks of a commit must be one for each of"),
    ({"candidates": []}, "candidates of a commit must be one for"),
    ({"ranks": [9, 0], "candidates": [2, 2], "tokens": [1, 2]}, "ranks of a commit must be at most 2, the candidates, got 9"),
    ({"ranks": [-1, 0], "candidates": [2, 2], "tokens": [1, 2]}, "ranks of a commit must be at least 0, got -1"),
    ({"ranks": "12"}, "ranks"),
])  # fmt: skip
def test_impossible_ranks_in_a_log_are_refused(changed: dict[str, Any], error: str, tmp_path: Any) -> None:
    decoding = real_decoding.decode("tree", decoders_of("llama", "heads"), [5, 6], 8, {
        "shape": "full", "drafter": "heads", "draft_depth": 2, "width": 2,
    })  # fmt: skip
    path = read_log.save(read_log.ReadLog((decoding,), ("prompt",), {}), tmp_path / "log.json")
    content = json.loads(path.read_text())
    content["decodings"][0]["commits"][0] |= changed
    path.write_text(json.dumps(content))
    with pytest.raises(ParameterError, match=error):
        read_log.load(path)


def test_medusa_trees_may_have_more_nodes_than_heads() -> None:
    """The heads limit the depth."""
    decoders = decoders_of("llama", "parallel")
    settings = {"shape": "full", "width": 3, "drafter": "parallel"}
    real_decoding.decode("tree", decoders, [5, 6], 8, {**settings, "draft_depth": COUNT})
    with pytest.raises(ParameterError, match=f"draft_depth must be at most {COUNT}, the heads of .*, got {COUNT + 1}"):
        real_decoding.decode("tree", decoders, [5, 6], 8, {**settings, "draft_depth": COUNT + 1})
