"""The bundled family of real models: losses, exact decoding, and bundled logs."""

from __future__ import annotations

import itertools
import json
import keyword
import re
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calibrate
from calibrate.family import align_draft, make_model, model_directory, training
from calibrate.family import exit_heads as trained
from calibrate.interpreters.in_one_process import Real
from calibrate.loading import load_models, prompts
from model.logs import position_log
from model.methods.adaptive import algorithm as adaptive
from model.methods.amusd import algorithm as amusd
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.beam import algorithm as beam
from model.methods.bild import algorithm as bild
from model.methods.early_exit import algorithm as early_exit
from model.methods.hierarchical import algorithm as hierarchical
from model.methods.pearl import algorithm as pearl
from model.methods.ppd import algorithm as ppd
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.speculative import algorithm as speculative
from model.methods.ssd import algorithm as ssd
from tests.support import real_models
from tests.support.tiers import cross_rows

pytestmark = pytest.mark.skipif(not model_directory.names(), reason="no models are bundled")

ROLES = ("target", "draft", "medium")
LAYERS, DRAFT, MEDIUM = 12, 2, 5
SMALL = {"draft_layers": DRAFT}
ACCEPTANCE_BY_BUDGET = Path(calibrate.__file__).parent / "measurements" / "cpu-budgets" / "acceptance.json"
THREE = SMALL | {"medium_layers": MEDIUM}
EXACT: dict[str, tuple[Any, Any]] = {
    "plain": (autoregressive, autoregressive.Parameters(LAYERS)),
    "ppd literal": (ppd, ppd.Parameters(LAYERS, 8, 3)),
    "ppd eager": (ppd, ppd.Parameters(LAYERS, 6, 1, "eager")),
    "ppd flat": (ppd, ppd.Parameters(LAYERS, 4, 2, "flat")),
    "ppd batched": (ppd, ppd.Parameters(LAYERS, 6, 3, batched=True)),
    "ppd flat batched": (ppd, ppd.Parameters(LAYERS, 4, 3, "flat", batched=True)),
    "ppd nested": (ppd, ppd.Parameters(LAYERS, 6, 2, "nested")),
    "speculative": (speculative, speculative.Parameters(LAYERS, 4, **SMALL)),
    "pearl": (pearl, pearl.Parameters(LAYERS, 3, **SMALL)),
    "amusd": (amusd, amusd.Parameters(LAYERS, 8, **SMALL)),
    "ssd": (ssd, ssd.Parameters(LAYERS, 4, (4, 3, 2, 2, 3), **SMALL)),
    "adaptive heuristic": (adaptive, adaptive.Parameters(LAYERS, "heuristic", **SMALL)),
    "adaptive confidence": (adaptive, adaptive.Parameters(LAYERS, "confidence", **SMALL)),
    **{
        f"hierarchical {reading}": (
            hierarchical, hierarchical.Parameters(LAYERS, 4, reading, 2 if reading == "recursive" else None, **THREE),
        )
        for reading in hierarchical.READINGS
    },
    "one beam": (beam, beam.Parameters(LAYERS, 3, 1, **SMALL)),
    "bild at its limit": (bild, bild.Parameters(LAYERS, 4, fallback_threshold=1.0, rollback_threshold=0.0, **SMALL)),
    "skipdecode of all layers": (skipdecode, skipdecode.Parameters(LAYERS, LAYERS, LAYERS, 1, 256)),
    "early exit never": (early_exit, early_exit.Parameters(LAYERS, threshold=1.0)),
    "self-speculative": (self_speculative, self_speculative.Parameters(LAYERS, 6, 3)),
    "self-speculative again": (self_speculative, self_speculative.Parameters(LAYERS, 8, 3, reuse=False)),
    "self-speculative skipping": (self_speculative, self_speculative.Parameters(LAYERS, LAYERS, 3, reuse=False, skipped_layers=3)),
    "speculative within a budget": (speculative, speculative.Parameters(LAYERS, 4, context_budget=8, **SMALL)),
    "self-speculative within a budget": (
        self_speculative, self_speculative.Parameters(LAYERS, LAYERS, 3, reuse=False, context_budget=8),
    ),
}  # fmt: skip


@lru_cache(maxsize=2)
def models(dtype: str = "float32") -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {
        role: each.decoder for role, each in load_models.models({role: f"family:{role}" for role in ROLES}, dtype=dtype).items()
    }


@lru_cache(maxsize=2)
def held_out(count: int) -> list[list[int]]:
    """Return prompts of 24 tokens from held-out modules."""
    tokenizer = models()["target"].tokenizer
    found = prompts.held_out(24, count, 1, tokenizer=tokenizer.backend_tokenizer)
    return [tokenizer(each.text)["input_ids"] for each in found]


@lru_cache(maxsize=512)
def expected(number: int, tokens: int, dtype: str, count: int) -> tuple[int, ...]:
    """Decode greedily with the library's code, one token at a time, without a cache."""
    return tuple(real_models.reference_tokens(models(dtype)["target"].full, held_out(count)[number], tokens))


def differs(name: str, number: int, tokens: int, dtype: str, count: int = 3) -> bool:
    """Return whether a sequence differs from the reference, which is allowed only at a near tie."""
    module, parameters = EXACT[name]
    prompt = held_out(count)[number]
    found = Real(models(dtype)).run(module.decode(parameters, prompt, tokens), tokens).tokens
    return real_models.differs_from_reference(models(dtype)["target"].full, prompt, found, expected(number, tokens, dtype, count))


@pytest.mark.parametrize(("name", "dtype"), cross_rows(EXACT, ["float64", "float32"], ("ppd literal", "speculative")))
def test_exact_methods_generate_the_targets_tokens(name: str, dtype: str) -> None:
    if dtype == "float64":
        assert not differs(name, 0, 16, dtype)
    else:
        assert sum(differs(name, number, 16, dtype) for number in range(3)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EXACT)
def test_two_hundred_sequences_differ_only_at_near_ties(name: str, dtype: str) -> None:
    first = sum(differs(name, number, 64, dtype, 200) for number in range(200))
    print(f"{name} in {dtype}: {first} of {200 * 64} tokens differ first, at near ties")
    assert first <= 200 * 64 / real_models.FEWEST


def test_larger_models_have_lower_losses() -> None:
    size = sum(path.stat().st_size for path in model_directory.MODELS.rglob("*") if path.is_file())
    assert size < 24e6
    losses = {role: model_directory.log_of(model_directory.bundled(role))["held_out_loss"] for role in ROLES}
    assert losses["target"] < losses["draft"] - 0.1
    assert losses["target"] < losses["medium"] < losses["draft"]
    assert {models()[role].layers for role in ROLES} == {LAYERS, DRAFT, MEDIUM}


def test_target_generates_python_like_text() -> None:
    """Indented by fours, with Python's keywords, and without endless lines."""
    tokenizer, log = models()["target"].tokenizer, position_log.bundled()
    texts = [tokenizer.decode(text.tolist()) for text in log.by_sequence(log.table["token"].to_numpy())]
    lines = [line for text in texts for line in text.split("\n")[1:-1] if line.strip()]
    indents = np.array([len(line) - len(line.lstrip(" ")) for line in lines])
    assert (indents % 4 == 0).mean() > 0.75
    words = {*keyword.kwlist, "self"}
    assert np.mean([not words.isdisjoint(re.findall(r"\w+", text)) for text in texts]) > 0.75
    assert np.mean([len(line) < 100 for line in lines]) > 0.97


def test_trained_heads_predict_better_at_early_layers() -> None:
    folder = model_directory.bundled("target")
    heads = trained.load(
        folder / model_directory.HEADS,
        checksum=model_directory.checksum(folder),
        layers=LAYERS,
        hidden=160,
        vocabulary=models()["target"].vocabulary,
    )
    assert sorted(heads) == [*range(1, LAYERS)]
    log = position_log.bundled()
    gains = [float((log.ranks(layer, "trained") <= 1).mean() - (log.ranks(layer) <= 1).mean()) for layer in range(1, LAYERS)]
    assert gains[0] > 0.05
    assert sum(gain > 0 for gain in gains) >= len(gains) // 2


def test_logged_settings_match_the_logged_command() -> None:
    """Defaults, unless the command sets them; sizes are those of the family."""

    def asked(default: Any, command: str) -> dict[str, Any]:
        given = dict(itertools.pairwise(command.split()))
        before = asdict(default)
        return {name: type(value)(given.get(f"--{name.replace('_', '-')}", value)) for name, value in before.items()}

    for role, size in training.FAMILY.items():
        log = model_directory.log_of(model_directory.bundled(role))
        assert log["size"] == asdict(size)
        assert log["recipe"] == asked(training.Recipe(), log["command"])
        assert log["held_out_sample"]["windows"] == make_model.SAMPLE
    said = trained.about(model_directory.bundled("target") / model_directory.HEADS)
    assert said["settings"] == asked(trained.DEFAULT_SETTINGS, said["command"])
    assert trained.SETTINGS["own"] == trained.DEFAULT_SETTINGS == trained.HeadTrainingSettings()
    log = model_directory.log_of(model_directory.bundled("aligned"))
    assert log["settings"] == asked(align_draft.AlignmentSettings(), log["command"])


def test_aligned_draft_agrees_more() -> None:
    found = model_directory.log_of(model_directory.bundled("aligned"))["agreement"]
    assert found["after"] - found["before"] > 2 * found["gain_error"]


def test_bundled_log_belongs_to_these_models() -> None:
    from calibrate.decode.position_logging import log_rows

    log = position_log.bundled()
    for role in ("target", "draft"):
        assert log.header[role]["checksum"] == model_directory.checksum(
            model_directory.bundled(log.header[role]["name"].removeprefix("family:"))
        )
    target = models()["target"]
    numbers = [0, 7]
    again = log_rows(target, {number: log.header["prompts"][number]["tokens"] for number in numbers}, log.header["max_tokens"])
    for number, text in zip(numbers, again.partition_by("prompt", maintain_order=True), strict=True):
        before = log.by_sequence(log.table["token"].to_numpy())[number].tolist()
        after = text["token"].to_list()
        differing = [place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        assert min([*differing, len(before), len(after)]) >= 16  # other CPUs round differently; a near tie may come later


# --- Context budgets of drafts ---


def rounds_within(budget: int | None, module: Any, parameters: Any, tokens: int = 48) -> list[Any]:
    """Rounds of three prompts of 96 tokens, with drafts that read at most `budget` positions."""
    tokenizer = models()["target"].tokenizer
    found = []
    for each in prompts.held_out(96, 3, 1, tokenizer=tokenizer.backend_tokenizer):
        prompt = tokenizer(each.text)["input_ids"]
        work = Real(models()).run(module.decode(replace(parameters, context_budget=budget), prompt, tokens), tokens)
        found.append(work.committed)
    return found


def test_a_budget_of_the_whole_context_accepts_what_no_budget_accepts() -> None:
    drafts = speculative.Parameters(LAYERS, 4, **SMALL)
    assert rounds_within(96 + 48, speculative, drafts) == rounds_within(None, speculative, drafts)
    alone = self_speculative.Parameters(LAYERS, LAYERS, 4, reuse=False, context_budget=144)
    for committed in rounds_within(96 + 48, self_speculative, alone):  # the model drafts what it would say
        assert [len(each.tokens) - 1 for each in committed] == [each.drafted for each in committed]


def test_few_positions_have_fewer_accepted_tokens() -> None:
    alone = self_speculative.Parameters(LAYERS, LAYERS, 4, reuse=False, context_budget=1)
    rounds = [sum(map(len, rounds_within(budget, self_speculative, alone))) for budget in (1, 32)]
    assert rounds[0] > 2 * rounds[1]


def test_committed_acceptance_by_budget_belongs_to_these_models_and_keeps_the_laws() -> None:
    found = json.loads(ACCEPTANCE_BY_BUDGET.read_text(encoding="utf-8"))
    facts = found["notes"][-1]
    for role in ("target", "draft"):
        assert model_directory.checksum(model_directory.bundled(role))[:12] in facts
    rows = {(row["method"], row["context_budget"]): row for row in found["rows"]}
    same = ("rounds", "rate", "trials", "tokens_per_round")
    whole, without = rows["speculative", 384], rows["speculative", None]
    assert [whole[name] for name in same] == [without[name] for name in same]
    assert rows["self_speculative", 384]["rate"] == 1
    assert rows["self_speculative", 8]["high"] < rows["self_speculative", 64]["low"]
    assert len({(row["sequences"], row["settings"]) for row in found["rows"]}) == 2


def test_every_method_has_rejected_drafts() -> None:
    log = position_log.bundled()
    assert 0.2 < np.concatenate(log.agreements()).mean() < 0.95
    rates = [(log.ranks(layer) <= k).mean() for layer, k in itertools.product((4, 6, 8), (1, 3))]
    assert all(0.1 < rate < 0.999 for rate in rates)
