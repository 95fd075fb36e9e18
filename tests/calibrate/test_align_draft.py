"""Alignment: the draft learns the target's greedy generations, and its agreement with them is measured."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.family import align_draft, make_model, model_directory, training, vocabulary
from calibrate.family.align_draft import AlignmentSettings
from calibrate.family.model_directory import Loaded
from calibrate.family.training import Size
from model.base.checks import ParameterError
from tests.support import family

FEW = AlignmentSettings(prompts=24, prompt=8, tokens=16, held_out=8, epochs=2, batch=4, rate=6e-3, warm_up=2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("family")
    recipe = replace(family.RECIPE, epochs=0.3)
    return family.train_model(place, "large"), family.train_model(place, "small", Size(1, 32, 32), recipe)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> Loaded:
    return model_directory.load(folders[0])


@pytest.fixture(scope="module")
def aligned(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("aligned") / "new" / "deeper" / "aligned"  # made with its parents
    align_draft.align(model_directory.load(folders[0]), model_directory.load(folders[1]), family.text(), FEW, place)
    return place


def test_prompts_do_not_overlap() -> None:
    text = np.arange(1003)
    found = align_draft.prompts(text, 100, 10, 0)
    assert (np.diff(found) == 1).all()
    assert np.unique(found).size == 1000
    assert found[:, 0].tolist() != sorted(found[:, 0])
    assert np.array_equal(found[:30], align_draft.prompts(text, 30, 10, 0))
    with pytest.raises(ParameterError, match=r"prompts must be between 1 and the 100 pieces of 10 tokens .*, got 101"):
        align_draft.prompts(text, 101, 10, 0)


def test_training_prompts_are_not_from_held_out_text(target: Loaded, folders: tuple[Path, Path], tmp_path: Path) -> None:
    seen: list[Any] = []
    modes: list[Any] = []
    cut, draft = align_draft.prompts, model_directory.load(folders[1])
    draft.model.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align_draft, "prompts", lambda tokens, *more: seen.append(tokens) or cut(tokens, *more))
        patch.setattr(training, "SAVE_EVERY", 0.0)
        told: list[Any] = []
        more = {"report": lambda *said: told.append(said)}
        align_draft.align(target, draft, family.text(), replace(FEW, epochs=0.4), tmp_path / "out", **more)
    assert [each[:2] for each in told] == [(24, 24), (1, 2), (2, 2)]
    assert told[0][2] == "large generates"
    assert told[2][2].startswith("loss ")
    learnt = [place for place, mode in enumerate(modes) if mode == (True, True)]
    assert len(learnt) == replace(FEW, epochs=0.4).steps == 2
    assert {*modes} == {(True, True), (False, False)}  # updates run in training mode, and evaluations in evaluation mode
    read = family.text()
    assert seen[0].tolist() == target.tokens(read.training).tolist()
    assert seen[1].tolist() == target.tokens(read.held_out).tolist()


def test_outputs_equal_those_of_the_library(target: Loaded) -> None:
    inputs = np.random.default_rng(0).integers(1, 300, (3, 6))
    ours = align_draft.outputs(target, inputs, 10)
    assert np.array_equal(ours[:, :6], inputs)
    theirs = target.model.generate(
        torch.from_numpy(inputs), attention_mask=torch.ones(3, 6, dtype=torch.long), do_sample=False, max_new_tokens=10,
        min_new_tokens=10, pad_token_id=1, eos_token_id=None,
    )  # fmt: skip
    assert ours.tolist() == theirs.tolist()


def test_outputs_do_not_depend_on_the_batch_size(target: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = np.random.default_rng(1).integers(1, 300, (5, 6))
    together = align_draft.outputs(target, inputs, 8)
    monkeypatch.setattr(align_draft, "AT_ONCE", 2)
    assert np.array_equal(align_draft.outputs(target, inputs, 8), together)


def test_model_agrees_with_itself_and_not_with_random_tokens(target: Loaded) -> None:
    texts = align_draft.outputs(target, align_draft.prompts(target.tokens(family.text().held_out), 8, 8, 0), 16)
    found = align_draft.agreement(target, texts, 8)
    assert found["hits"].tolist() == found["positions"].tolist()
    texts[:, 8:] = (texts[:, 8:] + 1) % 299 + 1  # never the end token, and never the draft's own token except at the first position
    assert align_draft.agreement(target, texts, 8)["hits"].sum() < found["hits"].sum() / 2


def test_tokens_after_the_end_are_ignored(target: Loaded) -> None:
    texts = np.array([[5, 0, 7, 8, 0, 9, 0], [5, 6, 7, 8, 9, 9, 9]])
    ignored = align_draft.IGNORED
    assert align_draft._labels(texts, 2, target).tolist() == [[7, 8, 0, ignored, ignored], [7, 8, 9, 9, 9]]
    assert align_draft.agreement(target, texts, 2)["positions"].tolist() == [3, 5]


def test_each_epoch_reads_every_sequence_once() -> None:
    rows = [align_draft._rows(step, FEW) for step in range(12)]
    first, second = np.ravel(rows[:6]).tolist(), np.ravel(rows[6:]).tolist()
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_standard_errors_are_over_sequences() -> None:
    """Sequences that agree entirely or not at all are one Bernoulli draw each, of any length."""
    positions = np.full(100, 50)
    hits = np.where(np.arange(100) < 36, 50, 0)
    found = align_draft._compared({"hits": 0 * hits, "positions": positions}, {"hits": hits})
    assert (found["before"], found["after"], found["gain"]) == (0, 0.36, 0.36)
    assert found["after_error"] == pytest.approx(math.sqrt(0.36 * 0.64 / 100), abs=1e-5)
    assert (found["prompts"], found["positions"]) == (100, 5000)


def test_aligned_draft_agrees_more(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The target has large random weights, so that its generations cannot be learnt from a text."""
    loud = make_model.untrained_model(family.TINY, 300, family.RECIPE)
    with torch.no_grad():
        for name, parameter in loud.named_parameters():
            if parameter.ndim == 2 and ".layers." in name:
                parameter *= 3
    model_directory.save(loud, model_directory.load(folders[1]).tokenizer, {}, tmp_path / "loud")
    more = replace(FEW, prompts=128, held_out=24, epochs=5)
    found = align_draft.align(
        model_directory.load(tmp_path / "loud"), model_directory.load(folders[1]), family.text(), more, tmp_path / "out"
    )["agreement"]
    assert found["gain"] > 0.1 + 3 * found["gain_error"]


def test_log_of_an_alignment_describes_the_saved_weights(aligned: Path, folders: tuple[Path, Path], target: Loaded) -> None:
    log = model_directory.log_of(aligned)
    found = log["agreement"]
    assert found["gain"] == pytest.approx(found["after"] - found["before"], abs=2e-5)
    texts = align_draft.outputs(target, align_draft.prompts(target.tokens(family.text().held_out), 8, 8, 0), 16)
    for place, when in ((folders[1], "before"), (aligned, "after")):
        counts = align_draft.agreement(model_directory.load(place), texts, 8)
        assert counts["hits"].sum() / counts["positions"].sum() == pytest.approx(found[when], abs=1e-5)
    loss = training.loss_of(model_directory.load(aligned).model, target.tokens(family.text().held_out), FEW.length)
    assert loss == pytest.approx(log["held_out_loss"], abs=7e-6)
    assert log["target"]["checksum"] == model_directory.checksum(folders[0])
    assert log["draft"]["checksum"] == model_directory.checksum(folders[1])
    assert log["role"] == "aligned"
    read, draft = family.text(), model_directory.load(folders[1])
    inputs = align_draft.prompts(target.tokens(read.training), 24, 8, 0)
    whole = make_model.about(draft.model, "aligned", "") | {
        "schema": model_directory.SCHEMA, "settings": asdict(FEW),
        "target": {"name": "large", "checksum": model_directory.checksum(folders[0])},
        "draft": {"name": "small", "checksum": model_directory.checksum(folders[1])},
        "corpus": read.about() | {name: int(target.tokens(part).size) for name, part in (
            ("tokens", read.training), ("held_out_tokens", read.held_out))},
        **make_model.held_out_losses(model_directory.load(aligned).model, target.tokens(read.held_out), FEW.length),
        "held_out_loss_before": round(training.loss_of(draft.model, target.tokens(read.held_out), FEW.length), 5),
        "written_tokens": int(
            (align_draft._labels(align_draft.outputs(target, inputs, 16), 8, draft) != align_draft.IGNORED).sum()
        ),
    }  # fmt: skip
    assert log == whole | {name: log[name] for name in ("agreement", "while_training", "seconds")}
    assert log["agreement"] == align_draft._compared(
        *(align_draft.agreement(each, texts, 8) for each in (draft, model_directory.load(aligned)))
    )
    assert log["while_training"]["held_out"] == []
    assert [step for step, _ in log["while_training"]["losses"]] == [12]
    assert model_directory.load(aligned).tokens({"": "a b"}).tolist() == target.tokens({"": "a b"}).tolist()
    assert sorted(each.name for each in aligned.parent.iterdir()) == ["aligned"]


def test_only_generated_tokens_are_learnt(folders: tuple[Path, Path], target: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients equal those of a loss over the generated tokens only."""
    draft = model_directory.load(folders[1])
    texts = align_draft.outputs(target, np.random.default_rng(2).integers(1, 300, (4, 8)), 16)
    seen: list[float] = []

    class StopError(Exception):
        pass

    class Once(training.TrainingJob):
        def done(self, *_: Any, **__: Any) -> dict[str, Any]:
            seen.append(float(self.learn(0)))
            raise StopError

    monkeypatch.setattr(training, "TrainingJob", Once)
    with pytest.raises(StopError):
        align_draft._train(draft, texts, texts.ravel(), replace(FEW, prompts=4), Path("unused"), "", False, None)
    labels = align_draft._labels(texts, 8, draft)
    with torch.no_grad():
        chances = draft.model(torch.from_numpy(texts)).logits.double().log_softmax(-1)
    losses = [
        -float(chances[row, 7 + place, label]) for (row, place), label in np.ndenumerate(labels) if label != align_draft.IGNORED
    ]
    assert seen == [pytest.approx(np.mean(losses), rel=1e-5)]


@pytest.mark.parametrize("stop", [1, 2, 3, 10])
def test_resumed_alignment_ends_with_the_same_draft(
    stop: int, aligned: Path, folders: tuple[Path, Path], target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(align_draft, "AT_ONCE", 8)
    calls: list[int] = []

    def pull(step: int, *_: object) -> None:
        calls.append(step)
        if len(calls) == stop:
            raise KeyboardInterrupt

    out = tmp_path / "aligned"
    with pytest.raises(KeyboardInterrupt):
        align_draft.align(target, model_directory.load(folders[1]), family.text(), FEW, out, report=pull)
    assert not out.exists()
    if stop > 1:  # nothing is saved before the second batch
        with pytest.raises(ParameterError, match="is from an interrupted alignment") as caught:
            align_draft.align(target, model_directory.load(folders[1]), family.text(), FEW, out)
        assert Path(str(caught.value).partition(" is from")[0]).is_file()  # the error names the file
        with pytest.raises(ParameterError, match="is from another alignment"):
            align_draft.align(target, model_directory.load(folders[1]), family.text(), replace(FEW, rate=1e-4), out, resume=True)

    def tidied(*_: object) -> None:
        """Remove the generations while the draft is trained on them."""
        (tmp_path / "aligned.written").unlink(missing_ok=True)

    report = tidied if stop == 1 else None
    align_draft.align(target, model_directory.load(folders[1]), family.text(), FEW, out, resume=True, report=report)
    assert model_directory.checksum(out) == model_directory.checksum(aligned)
    assert [each.name for each in tmp_path.iterdir()] == ["aligned"]
    again = align_draft.align(target, model_directory.load(folders[1]), family.text(), FEW, out, resume=True)
    assert again == model_directory.log_of(out)


def test_saved_sequences_are_checked(tmp_path: Path) -> None:
    """Their number, length and tokens are accepted at their bounds, and refused beyond each."""
    from safetensors.numpy import save_file

    path = tmp_path / "texts"

    def kept(texts: Any, settings: str = "these", name: str = "texts") -> Any:
        save_file({name: np.asarray(texts)}, path, {"settings": settings})
        return align_draft.saved_sequences(path, "these", count=2, length=3, vocabulary=9)

    assert kept([[0, 8, 1], [2, 3, 4]]).tolist() == [[0, 8, 1], [2, 3, 4]]
    assert kept([[0, 8, 1]]).tolist() == [[0, 8, 1]]
    bound = "texts must hold at most 2 sequences of 3 whole numbers below the vocabulary=9, got"
    for wrong, got in (([[1, 2, 3]] * 3, r"I64 of shape \(3, 3\)"), ([[1, 2]], r"I64 of shape \(1, 2\)"),
                       ([[1, 2, 9]], r"I64 of shape \(1, 3\)"), ([[-1, 2, 3]], r"I64 of shape \(1, 3\)"),
                       ([1, 2, 3], r"I64 of shape \(3,\)"), ([[1.0, 2, 3]], r"F64 of shape \(1, 3\)")):  # fmt: skip
        with pytest.raises(ParameterError, match=f"^{bound} {got}; remove it and start again$"):
            kept(wrong)
    with pytest.raises(ParameterError, match="texts is from another alignment; give the same settings, or remove it"):
        kept([[1, 2, 3]], "others")
    with pytest.raises(ParameterError, match=r"texts cannot be read for --resume: .*; remove it"):
        kept([[1, 2, 3]], name="other")
    path.unlink()
    path.mkdir()
    with pytest.raises(ParameterError, match=r"^texts is a folder, and must be a file$"):
        align_draft.saved_sequences(path, "these", count=2, length=3, vocabulary=9)


def test_sequences_of_an_update_depend_on_the_seed_only() -> None:
    """Epoch 0 of a seed orders the prompts; each training epoch uses the next order."""
    settings = replace(FEW, prompts=6, batch=4, seed=3)
    read = [number for step in range(3) for number in align_draft._rows(step, settings)]
    assert read == [int(each) for epoch in (1, 2) for each in training.order_of(3, epoch, 6, 0)[0]]


def test_agreement_is_by_token_and_its_error_by_sequence() -> None:
    """In sequences of 4, 4 and 2 tokens, 2, 1 and 0 agree before, and 3, 4 and 2 after: of ten tokens 3, 9 and a gain of 6."""
    positions = np.array([4, 4, 2])
    found = align_draft._compared({"hits": np.array([2, 1, 0]), "positions": positions}, {"hits": np.array([3, 4, 2])})
    assert found == {
        "prompts": 3, "positions": 10, "before": 0.3, "before_error": round(math.sqrt(0.8**2 + 0.2**2 + 0.6**2) / 10, 5),
        "after": 0.9, "after_error": round(math.sqrt(0.6**2 + 0.4**2 + 0.2**2) / 10, 5),
        "gain": 0.6, "gain_error": round(math.sqrt(1.4**2 + 0.6**2 + 0.8**2) / 10, 5),
    }  # fmt: skip
    one = align_draft._compared({"hits": np.array([1]), "positions": np.array([3])}, {"hits": np.array([2])})
    assert (one["before"], one["gain"]) == (0.33333, 0.33333)
    assert all(math.isnan(one[f"{name}_error"]) for name in ("before", "after", "gain"))


# Errors


def test_models_with_different_tokenizers_are_refused(target: Loaded, folders: tuple[Path, Path], tmp_path: Path) -> None:
    read = family.text()
    other = Path(shutil.copytree(folders[1], tmp_path / "other"))
    shuffled = replace(read, training=dict(list(read.training.items())[2:]))
    vocabulary.wrap_tokenizer(vocabulary.train_tokenizer(shuffled, 300), 32).save_pretrained(other)
    with pytest.raises(ParameterError, match=r"models large and other must have the same tokenizer: '.*' is .* and .*; take two"):
        align_draft.align(target, model_directory.load(other), read, FEW, tmp_path / "out")
    wider = make_model.untrained_model(family.TINY, 320, family.RECIPE)
    model_directory.save(wider, target.tokenizer, {}, tmp_path / "wider")
    with pytest.raises(ParameterError, match="vocabularies are of 300 and 320 tokens"):
        align_draft.align(target, model_directory.load(tmp_path / "wider"), read, FEW, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sequences_longer_than_the_models_are_refused(target: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"prompt \+ tokens must be at most the 32 positions of model large, got 8 \+ 25"):
        align_draft.align(target, target, family.text(), replace(FEW, tokens=25), tmp_path / "out")


def test_align_is_a_command(folders: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number} of a text" for number in range(3000)))
    out = tmp_path / "aligned"
    common = ["align", "--target", str(folders[0]), "--draft", str(folders[1]), "-o", str(out), "--text", str(text), "--quick"]
    done = CliRunner().invoke(app, [*common, "--device", "cpu", "--threads", "1"])
    assert done.exit_code == 0, done.stderr
    assert "measured on" in done.stdout
    log = model_directory.log_of(out)
    assert str(tmp_path) not in log["command"]
    assert f"{log['agreement']['after']:.4f} after" in done.stdout
    assert "is there already" in family.error_of(*common)
    again = CliRunner().invoke(app, [*common, "--resume", "--json"])
    assert json.loads(again.stdout) == log | {"folder": str(out)}
    assert "made with prompts 16, now asked for 17" in family.error_of(*common, "--resume", "--prompts", "17")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--target ./no-such", "model must be a directory"),
        ("--prompts 0", "prompts must be between 1"),
        ("--batch 17", "batch must be between 1 and prompts=16, got 17"),
        ("--epochs -1", "epochs must be between 0 and 1000"),
        ("--prompt 30", "prompt + tokens must be at most the 32 positions"),
        ("--text no-such", "text must be a file or a folder"),
    ],
)
def test_align_refuses_wrong_options_leaving_nothing(words: str, message: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 2000)
    given = ["--target", str(folders[0]), "--draft", str(folders[1]), "--text", str(text), "--device", "cpu", "--quick"]
    assert message in family.error_of("align", "-o", str(tmp_path / "out" / "aligned"), *given, *words.split())
    assert not (tmp_path / "out").exists()


def test_help_has_examples_and_current_defaults() -> None:
    said = " ".join(CliRunner().invoke(app, ["align", "--help"], terminal_width=200).stdout.split())
    assert "calibrate align --target target --draft draft" in said
    for name in ("prompts", "prompt", "tokens", "held_out", "epochs", "batch", "rate", "seed"):
        assert f"Default: {getattr(AlignmentSettings(), name):g}." in said, name
