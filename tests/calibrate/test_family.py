"""The family: corpus, tokens, resumable training, and directories of models with checks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.family import corpus, make_model, model_directory, training, vocabulary
from calibrate.family.training import FAMILY, Recipe, Size
from model.base import whole_files
from model.base.checks import ParameterError
from tests.support import family

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def read() -> corpus.Corpus:
    return family.text()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained model; tests that change it take a copy."""
    return family.train_model(tmp_path_factory.mktemp("family"))


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "tiny"))


def test_cut_corpus_is_the_beginning_of_the_whole(read: corpus.Corpus) -> None:
    whole = corpus.standard_library()
    assert read.characters == 12_000
    for part, all_of_it in ((read.training, whole.training), (read.held_out, whole.held_out)):
        assert all(all_of_it[path].startswith(text) for path, text in part.items())
    assert read.checksum != whole.checksum


# Tokens


def test_decoded_tokens_are_the_text(kept: Path, read: corpus.Corpus) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(kept.parent / make_model.TOKENIZER))
    theirs = AutoTokenizer.from_pretrained(kept)
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (vocabulary.END, 0, 300)
    assert theirs.model_max_length == 32
    samples = [*read.training.values(), *read.held_out.values(), " a  b\t\r\n\n  ", "ß日本 🦊\x00", "don 't , stop ."]
    for text in samples:
        numbers = ours.encode(text, add_special_tokens=False).ids
        assert theirs(text)["input_ids"] == numbers
        assert theirs.decode(numbers) == text


def test_tokens_of_each_module_end_with_the_end_token(read: corpus.Corpus) -> None:
    tokenizer, numbers, _ = family.tokens(read)
    assert (numbers == 0).sum() == len(read.training)
    assert numbers[-1] == 0
    parts = np.split(numbers, np.flatnonzero(numbers == 0)[:-1] + 1)
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == [*read.training.values()]


def test_directory_has_one_tokenizer_and_one_corpus(tmp_path: Path, read: corpus.Corpus) -> None:
    first = make_model.tokenizer_of(tmp_path, read, 300)
    again = make_model.tokenizer_of(tmp_path, read, 300)
    assert first.get_vocab() == again.get_vocab()
    assert model_directory.table(tmp_path / make_model.CORPUS) == read.about() | {"vocabulary": 300}
    with pytest.raises(ParameterError, match="must be of the same text: checksum is"):
        make_model.tokenizer_of(tmp_path, corpus.standard_library().cut(13_000), 300)
    with pytest.raises(ParameterError, match="vocabulary is 301, and was 300"):
        make_model.tokenizer_of(tmp_path, read, 301)
    (tmp_path / make_model.CORPUS).unlink()
    with pytest.raises(ParameterError, match="vocabulary is 300, and was not recorded; take another directory, or remove both"):
        make_model.tokenizer_of(tmp_path, read, 300)
    (tmp_path / make_model.CORPUS).write_text(json.dumps(read.about() | {"vocabulary": 300}))
    (tmp_path / make_model.TOKENIZER).write_text("{")
    with pytest.raises(ParameterError, match=r"tokenizer\.json of .* cannot be read"):
        make_model.tokenizer_of(tmp_path, read, 300)


# Training


def test_windows_of_an_epoch_cover_the_text_once() -> None:
    recipe, numbers = Recipe(batch=2, length=5), np.arange(52)
    seen = np.concatenate([recipe.windows(numbers, step) for step in range(5)])
    assert (np.diff(seen) == 1).all()
    assert np.unique(seen[:, :-1]).size == 50, "ten windows of five that do not overlap"
    others = np.concatenate([recipe.windows(numbers, step) for step in range(5, 10)])
    assert seen[:, 0].tolist() != others[:, 0].tolist()
    assert np.array_equal(recipe.windows(numbers, 3), recipe.windows(numbers, 3))


class InterruptedTrainingError(Exception):
    """An interruption of the training."""


SHORT = replace(family.RECIPE, epochs=0.3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model from a short training without interruption."""
    return family.train_model(tmp_path_factory.mktemp("whole"), recipe=SHORT)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resumed_training_ends_with_the_same_weights(
    stop: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    recipe = SHORT

    def pull(step: int, steps: int, at: str) -> None:
        assert steps > 8
        if step == stop + 1:
            raise InterruptedTrainingError

    with pytest.raises(InterruptedTrainingError):
        family.train_model(tmp_path / "parts", recipe=recipe, report=pull)
    assert not (tmp_path / "parts" / "tiny").exists()
    with pytest.raises(ParameterError, match="interrupted training; --resume continues it"):
        family.train_model(tmp_path / "parts", recipe=recipe)
    seen: list[int] = []
    parts = family.train_model(tmp_path / "parts", recipe=recipe, resume=True, report=lambda step, *_: seen.append(step))
    assert seen[0] == stop + 1, "what was done is not done again"
    assert parts.joinpath(model_directory.WEIGHTS).read_bytes() == whole.joinpath(model_directory.WEIGHTS).read_bytes()
    assert model_directory.log_of(parts)["held_out_loss"] == model_directory.log_of(whole)["held_out_loss"]
    assert not list((tmp_path / "parts").glob("*.kept*"))


def test_seconds_of_resumed_training_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by one at each reading."""
    clock = iter(range(10_000))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)

    def pull(step: int, *_: object) -> None:
        if step == 9:
            raise InterruptedTrainingError

    recipe = replace(family.RECIPE, epochs=0.3)
    with pytest.raises(InterruptedTrainingError):
        family.train_model(tmp_path, recipe=recipe, report=pull)
    with safe_open(tmp_path / "tiny.kept", framework="np") as file:
        said = file.metadata()
    assert (said["step"], float(said["seconds"]) > 20) == ("8", True)
    left = recipe.steps(family.tokens(family.text())[1].size) - 8
    seconds = model_directory.log_of(family.train_model(tmp_path, recipe=recipe, resume=True))["seconds"]
    assert float(said["seconds"]) < seconds < float(said["seconds"]) + 4 * left + 2


def test_saved_state_of_another_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    recipe = replace(family.RECIPE, epochs=0.2)
    modes, begun = list[Any](), make_model.untrained_model

    def watched(*given: Any) -> Any:
        model = begun(*given)
        model.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
        return model

    def pull(step: int, *_: object) -> None:
        if step == 2:
            raise InterruptedTrainingError

    windows, loss_of = list[Any](), training.loss_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_model, "untrained_model", watched)
        patch.setattr(training, "loss_of", lambda *given: windows.append(given[-1]) or loss_of(*given))
        with pytest.raises(InterruptedTrainingError):
            family.train_model(tmp_path, recipe=recipe, report=pull)
    # Steps run in training mode, held-out losses in evaluation mode.
    assert modes[0] == modes[-1] == (True, True)
    assert modes[1:-1] == [(False, False)] * (len(modes) - 2)
    assert windows == [64]  # few windows of the held-out text during training
    with pytest.raises(ParameterError, match="is from a training with other settings"):
        family.train_model(tmp_path, recipe=replace(recipe, seed=1), resume=True)
    with pytest.raises(ParameterError, match=r"is from another model: .* must have shape \(300, 64\), got \(300, 32\)"):
        family.train_model(tmp_path, recipe=recipe, size=Size(3, 64, 64), resume=True)
    place = tmp_path / "tiny.kept"
    place.write_bytes(place.read_bytes()[:1000])
    with pytest.raises(ParameterError, match="cannot be read"):
        family.train_model(tmp_path, recipe=recipe, resume=True)
    assert not (tmp_path / "tiny").exists()


def test_training_learns_and_logs_the_loss_of_the_saved_weights(kept: Path, read: corpus.Corpus) -> None:
    log = model_directory.log_of(kept)
    _, numbers, held_out = family.tokens(read)
    assert log["corpus"] == read.about() | {"tokens": numbers.size, "held_out_tokens": held_out.size}
    fresh = make_model.untrained_model(family.TINY, 300, family.RECIPE)
    before = training.loss_of(fresh, held_out, 32)
    assert before == pytest.approx(math.log(300), abs=0.1), "weights that know nothing"
    loaded = model_directory.load(kept)
    after = training.loss_of(loaded.model, held_out, 32)
    assert after == pytest.approx(log["held_out_loss"], abs=1e-5)
    assert after < before - 0.5
    assert log["parameters"] == sum(each.numel() for each in loaded.model.parameters())
    assert log["source"] == "measured"
    sample = {"windows": 16, "length": 32, "loss": round(training.loss_of(loaded.model, held_out, 32, windows=16), 5)}
    said = "mean cross-entropy [nats per token], in the end of the weights as saved on all windows"
    assert log == {
        "schema": "decodesim.model/1", "role": "tiny", "command": "", "source": "measured", "loss": said,
        "parameters": log["parameters"], "versions": model_directory.versions(), "device": "cpu", "threads": 1,
        "size": {"layers": 3, "hidden": 32, "ffn": 64}, "recipe": asdict(family.RECIPE), "corpus": log["corpus"],
        "held_out_loss": log["held_out_loss"], "held_out_sample": sample,
        "while_training": {"losses": log["while_training"]["losses"], "held_out": []}, "seconds": log["seconds"],
    }  # fmt: skip
    assert log["while_training"]["losses"][-1][0] == family.RECIPE.steps(numbers.size)
    assert loaded.tokens(read.held_out).tolist() == held_out.tolist()


def test_mean_loss_is_that_over_all_tokens(read: corpus.Corpus) -> None:
    model = make_model.untrained_model(family.TINY, 300, family.RECIPE).eval()
    numbers = np.arange(100, 231) % 300
    alone = []
    for start in range(0, 128, 32):
        row = torch.from_numpy(numbers[start : start + 33])[None]
        with torch.no_grad():
            chances = model(row[:, :-1]).logits.double().log_softmax(-1)[0]
        alone += [-float(chances[place, row[0, place + 1]]) for place in range(32)]
    assert training.loss_of(model, numbers, 32) == pytest.approx(np.mean(alone), rel=1e-6)


def test_mean_over_some_windows_uses_evenly_spaced_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 windows of 3 tokens have equal weights in any grouping; five are the first, the last and three between."""
    asked: list[int] = []

    def loss(model: Any, windows: torch.Tensor) -> torch.Tensor:
        assert windows.shape[1] == 4
        asked.extend(int(first) // 3 for first in windows[:, 0])
        return (windows[:, 0].double() ** 2).mean()

    monkeypatch.setattr(training, "_loss", loss)
    model: Any = SimpleNamespace(eval=lambda: None)
    whole = np.mean((3.0 * np.arange(40)) ** 2)
    for windows in (None, 40, 41):
        assert training.loss_of(model, np.arange(122), 3, windows=windows) == pytest.approx(whole)
        assert asked == [*range(40)]
        asked.clear()
    chosen = [0, 9, 19, 29, 39]
    assert training.loss_of(model, np.arange(121), 3, windows=5) == pytest.approx(np.mean((3.0 * np.array(chosen)) ** 2))
    assert asked == chosen


def test_updates_follow_the_rate_and_clipped_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient descent on a weight with gradient 4, or 1 if clipped; losses are means over 50 steps, and over the rest."""
    clock = iter(range(10_000))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(training, "SAVE_EVERY", 99.5)
    for clip, slope in ((1.0, 1.0), (None, 4.0)):
        weight = torch.nn.Parameter(torch.zeros(1))

        def learn(step: int, weight: Any = weight) -> torch.Tensor:
            (4 * weight).sum().backward()
            return torch.tensor(float(step))

        told: list[Any] = []
        (tmp_path / "kept").write_bytes(b"of another time")  # resume is not set
        module = torch.nn.ParameterList([weight])
        optimizers = [torch.optim.SGD(module.parameters(), lr=9.0)]
        work = training.TrainingJob(module, optimizers, learn, lambda: 0.12345, lambda step: step + 1.0, 120, "these", clip)
        log = work.done(tmp_path / "kept", report=lambda *said, told=told: told.append(said))  # type: ignore[misc]
        assert float(weight.detach()) == pytest.approx(-slope * 120 * 121 / 2, rel=1e-5)
        assert log["losses"] == [[50, 24.5], [100, 74.5], [120, 109.5]]
        # The clock advances by one at each reading: the state is saved after a hundred steps, not after twenty more.
        assert log["held_out"] == [[100, 0.1235]]
        assert told[0] == (1, 120, "")
        assert told[49] == (50, 120, "loss 24.500")
        assert [each[0] for each in told] == [*range(1, 121)]
        assert log["seconds"] == 123.0
        assert not [*tmp_path.iterdir()]
    assert Recipe() == Recipe(3.0, 8, 512, 6e-3, 100, 0.1, 0)
    assert training.TrainingJob.clip == 1.0


def test_matrices_within_layers_have_a_separate_optimizer() -> None:
    model = make_model.untrained_model(family.TINY, 300, family.RECIPE)
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    muon, adam = training.optimizers_of(model, Recipe(weight_decay=0.25))
    names = {id(each): name for name, each in model.named_parameters()}
    inner, outer = ([names[id(each)] for group in optimizer.param_groups for each in group["params"]] for optimizer in (muon, adam))
    assert inner
    assert all(".layers." in name and name.endswith(("proj.weight",)) for name in inner)
    assert {name for name in outer if ".layers." in name} == {name for name in names.values() if "layernorm" in name}
    assert {*inner, *outer, names[id(frozen)]} == {*names.values()}
    assert (type(muon).__name__, type(adam).__name__) == ("Muon", "AdamW")
    [group] = muon.param_groups
    assert (group["lr"], group["weight_decay"], group["adjust_lr_fn"]) == (0.0, 0.25, "match_rms_adamw")
    [group] = adam.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.0, (0.9, 0.95), 0.0)
    [alone] = training.optimizers_of(torch.nn.Linear(3, 2), Recipe())
    assert type(alone).__name__ == "AdamW"


def test_incomplete_optimizer_state_is_refused(tmp_path: Path) -> None:
    """Each tensor of the state is checked by name, type and shape."""
    from safetensors.torch import save_file

    model = make_model.untrained_model(family.TINY, 300, family.RECIPE)
    recipe = Recipe(batch=1, length=8)
    optimizers = training.optimizers_of(model, recipe)
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    path = tmp_path / "tiny.kept"
    training._keep(path, model, optimizers, "these", 3, 1.5, {"losses": [[3, 1.0]], "held_out": []})
    fresh = make_model.untrained_model(family.TINY, 300, replace(family.RECIPE, seed=1))
    step, seconds, log = training._restore(path, fresh, training.optimizers_of(fresh, recipe), "these")
    assert (step, seconds, log) == (3, 1.5, {"losses": [[3, 1.0]], "held_out": []})
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = "optimizer.0.0.momentum_buffer"
    shape = tuple(tensors[name].shape)
    for wrong, got in ((None, "none"), (tensors[name][:1], rf"torch.float32 of shape \(1, {shape[1]}\)"),
                       (tensors[name].long(), rf"torch.int64 of shape \({shape[0]}, {shape[1]}\)")):  # fmt: skip
        kept = {key: value for key, value in tensors.items() if key != name} | ({} if wrong is None else {name: wrong.contiguous()})
        save_file(kept, path, about)
        bound = rf"tiny.kept: {name} must be numbers of shape \({shape[0]}, {shape[1]}\), got {got}; remove it and start again"
        with pytest.raises(ParameterError, match=bound):
            training._restore(path, fresh, training.optimizers_of(fresh, recipe), "these")
    for key, value, said in (("step", "0", "step must be"), ("seconds", "-1", "seconds must be"), ("log", "3", "log must be")):
        save_file(tensors, path, about | {key: value})
        with pytest.raises(ParameterError, match=f"tiny.kept cannot be read for --resume: {said}"):
            training._restore(path, fresh, training.optimizers_of(fresh, recipe), "these")
    save_file(tensors, path, {"settings": "these"})
    with pytest.raises(ParameterError, match=r"tiny\.kept is no saved state of a training; remove it and start again"):
        training._restore(path, fresh, training.optimizers_of(fresh, recipe), "these")


def test_diverging_training_is_reported_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="take a lower rate"):
        family.train_model(tmp_path, recipe=replace(family.RECIPE, rate=1e30, epochs=0.2))
    assert not (tmp_path / "tiny").exists()


def test_too_short_text_is_refused(read: corpus.Corpus) -> None:
    model = make_model.untrained_model(family.TINY, 300, family.RECIPE)
    some, none = np.zeros(500, np.int64), np.zeros(32, np.int64)
    with pytest.raises(ParameterError, match="at least batch\\*length\\+1=129 tokens, got 128"):
        training.train(model, some[:128], some, family.RECIPE, Path("unused"))
    with pytest.raises(ParameterError, match="held-out text must have at least length\\+1=33 tokens, got 32"):
        training.train(model, some, none, family.RECIPE, Path("unused"))


def test_trained_model_is_in_evaluation_mode(tmp_path: Path) -> None:
    model = make_model.untrained_model(Size(1, 32, 32), 300, family.RECIPE)
    numbers = np.arange(200) % 300
    log = training.train(model, numbers, numbers[:40], replace(family.RECIPE, epochs=0.2, batch=1), tmp_path / "kept")
    assert not model.training
    assert [step for step, _ in log["losses"]] == [1]


def test_too_short_text_leaves_no_files(tmp_path: Path, read: corpus.Corpus) -> None:
    with pytest.raises(ParameterError, match="a text must have at least batch"):
        make_model.tokenizer_of(tmp_path / "new", read, 300, replace(family.RECIPE, batch=10**6))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ParameterError, match="epochs must be between 0 and 1000"):
        replace(family.RECIPE, epochs=1e300)


def test_family_models_are_small() -> None:
    """In half precision, with heads for every layer of the target but the last, they take less than 24 MB."""
    numbers = 0
    for role, size in (*FAMILY.items(), ("aligned", FAMILY["draft"])):
        with torch.device("meta"):
            from transformers import LlamaForCausalLM

            numbers += sum(each.numel() for each in LlamaForCausalLM(size.config(vocabulary.SIZE, 512)).parameters())
        if role == "target":
            numbers += (size.layers - 1) * vocabulary.SIZE * size.hidden
    assert 2 * numbers < 24e6


# Directories


def test_loaded_weights_are_the_saved_ones_in_half_precision(kept: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model.untrained_model(family.TINY, 300, family.RECIPE)
    model_directory.save(model, model_directory.load(kept).tokenizer, {"role": "none"}, tmp_path / "one")
    assert all(value.dtype is torch.float16 for value in family.tensors_of(tmp_path / "one").values())
    back = model_directory.load(tmp_path / "one").model
    for name, value in model.named_parameters():
        assert torch.equal(back.get_parameter(name), value.half().float())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert theirs.dtype is torch.float16
    model_directory.round_to_half(model)
    line = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(line).logits, back(line).logits)


def test_existing_files_are_kept_and_no_partial_ones_written(kept: Path, tmp_path: Path) -> None:
    loaded = model_directory.load(kept)
    with pytest.raises(ParameterError, match="is there already"):
        model_directory.save(loaded.model, loaded.tokenizer, {}, kept)
    with torch.no_grad():
        next(loaded.model.parameters())[0, 0] = 1e6  # too large for half precision
    with pytest.raises(ParameterError, match=r"embed_tokens.weight of big in half precision must be finite, and 1 of its 9600"):
        model_directory.save(loaded.model, loaded.tokenizer, {}, tmp_path / "big")
    assert not list(tmp_path.iterdir())

    class Bad:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        model_directory.save(model_directory.load(kept).model, Bad(), {}, tmp_path / "half")
    assert not list(tmp_path.iterdir())


def test_unwritable_path_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first existing parent decides; an empty folder counts as missing."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    asked: list[Any] = []
    model_directory.refuse_existing(tmp_path / "empty")
    model_directory.refuse_existing(tmp_path / "new" / "deeper")
    with pytest.raises(ParameterError, match=r"file is there already; remove it, or choose another place with --log$"):
        model_directory.refuse_existing(tmp_path / "file", "--log")
    with pytest.raises(ParameterError, match=rf"^{tmp_path}/file/a/b cannot be made, because {tmp_path}/file is no folder; .* -o$"):
        model_directory.refuse_existing(tmp_path / "file" / "a" / "b")
    monkeypatch.setattr(model_directory.os, "access", lambda *what: asked.append(what))
    with pytest.raises(ParameterError, match=rf"because {tmp_path} cannot be written to; choose another place with --out$"):
        model_directory.refuse_existing(tmp_path / "new" / "deeper", "--out")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    (tmp_path / "empty" / "one").touch()
    with pytest.raises(ParameterError, match=r"empty is there already; remove it, or choose another place with -o$"):
        model_directory.refuse_existing(tmp_path / "empty")


def test_library_is_quiet_only_within_the_block() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        for bars in (True, False):
            logging.set_verbosity_info()
            logging.enable_progress_bar() if bars else logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            quiet = model_directory.quiet()
            quiet.__enter__()
            assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
            assert not quiet.__exit__(InterruptedTrainingError, InterruptedTrainingError(), None)
            assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, bars)
    finally:
        logging.set_verbosity(before[0])
        logging.enable_progress_bar() if before[1] else logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def test_checksum_covers_only_the_weights(kept: Path, copied: Path) -> None:
    assert model_directory.checksum(kept) == hashlib.sha256((kept / model_directory.WEIGHTS).read_bytes()).hexdigest()
    (copied / model_directory.LOG).unlink()
    assert model_directory.checksum(copied) == model_directory.checksum(kept)
    family.change_tensor(copied, "model.norm.weight", lambda value: value + 0.5)
    assert model_directory.checksum(copied) != model_directory.checksum(kept)


def test_weights_in_several_files_are_read_too(kept: Path, copied: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.rmtree(copied)
    AutoModelForCausalLM.from_pretrained(kept).save_pretrained(copied, max_shard_size="40KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(kept / name, copied)
    files = model_directory.weights(copied)
    assert len(files) > 1
    one, other = model_directory.load(kept).model.state_dict(), model_directory.load(copied).model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    files[0].unlink()
    with pytest.raises(ParameterError, match="which must be a safetensors file in its folder"):
        model_directory.load(copied)


def _bare(folder: Path, shapes: dict[str, Any], **config: Any) -> Path:
    """Return a folder with only a configuration and the header of the weights."""
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}).encode()
    (folder / model_directory.WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / model_directory.CONFIG).write_text(json.dumps({"model_type": "llama"} | config))
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_configuration_must_match_the_size_of_the_weights(tmp_path: Path, nested: bool) -> None:
    """With two layers of 64 numbers each, a third layer is refused, and any size that times 8 exceeds twice the numbers."""
    shapes: dict[str, Any] = {"layers.0.w.weight": [8, 8], "layers.1.w.weight": [4, 16], "other": 3, "__metadata__": [99]}
    widths = ("hidden_size", "n_embd", "d_model")

    def said(shapes: dict[str, Any], **config: Any) -> str:
        _bare(tmp_path, shapes, **({"text_config": config} if nested else config))
        try:
            model_directory._check_files(tmp_path, "tiny", [tmp_path / model_directory.WEIGHTS])
        except ParameterError as error:
            return str(error)
        return ""

    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        bound = f"{key} of model tiny must match its weights, which have"
        assert said(shapes, **{key: 2}) == ""
        assert said(shapes, **{key: 3}) == f"{bound} 2 layers, got 3; fetch or make it again"
        assert said({"w.weight": [8, 8]}, **{key: 1}) == f"{bound} 0 layers, got 1; fetch or make it again"
        assert said({}, **{key: 3}) == ""  # the library's error about an unreadable header is better
    for key in (*widths, "vocab_size", "intermediate_size", "ffn_dim", "n_inner", "d_ff"):
        wide, most = ({}, 16) if key in widths else ({"hidden_size": 8}, 32)  # 16 * 16 are twice 128, and so are 8 * 32
        assert said(shapes, **wide, **{key: most}) == ""
        asks = f"{key}={most + 1} of model tiny asks for more than its weights hold, 128 numbers in all; fetch or make it again"
        assert said(shapes, **wide, **{key: most + 1}) == asks


def test_only_weights_may_be_large_files(tmp_path: Path) -> None:
    """The files are sparse, and take no space on the disk."""
    _bare(tmp_path, {})
    with (tmp_path / model_directory.WEIGHTS).open("r+b") as file:
        file.truncate(model_directory.MOST_BYTES + 1)
    files = [tmp_path / model_directory.WEIGHTS]
    model_directory._check_files(tmp_path, "tiny", files)
    beside = tmp_path / "vocab.json"
    for size, refused in ((model_directory.MOST_BYTES, False), (model_directory.MOST_BYTES + 1, True)):
        with beside.open("wb") as file:
            file.truncate(size)
        if refused:
            with pytest.raises(ParameterError, match=r"^vocab\.json "):
                model_directory._check_files(tmp_path, "tiny", files)
        else:
            model_directory._check_files(tmp_path, "tiny", files)
    for name in (model_directory.INDEX, model_directory.CONFIG):  # the index of many files may be longer than a configuration
        (tmp_path / name).write_text("{}" + " " * (model_directory.MOST_TOML - 1))
    assert model_directory.table(tmp_path / model_directory.INDEX) == {}
    with pytest.raises(ParameterError, match=r"config\.json"):
        model_directory.table(tmp_path / model_directory.CONFIG)


def test_index_names_safetensors_in_its_folder(tmp_path: Path) -> None:
    """Each once, sorted by name; without safetensors the error names the other weights."""
    for name in ("b.safetensors", "a.safetensors", "c.bin", "d.pt"):
        (tmp_path / name).write_bytes(name.encode())
    with pytest.raises(ParameterError, match=r"and only c\.bin, d\.pt, which are not read; only safetensors"):
        model_directory.weights(tmp_path)
    index = tmp_path / model_directory.INDEX
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    assert [each.name for each in model_directory.weights(tmp_path)] == ["a.safetensors", "b.safetensors"]
    assert model_directory.checksum(tmp_path) == hashlib.sha256(b"a.safetensorsb.safetensors").hexdigest()
    for mapping in (["a.safetensors"], {"x": 3}, {"x": "a.safetensors", "y": None}, None):
        index.write_text(json.dumps({"weight_map": mapping}))
        with pytest.raises(ParameterError, match="must have a weight_map of files by tensor; fetch the model again"):
            model_directory.weights(tmp_path)
    (tmp_path.parent / "e.safetensors").touch()
    for wrong in ("../e.safetensors", "c.bin", "f.safetensors"):
        index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": wrong}}))
        with pytest.raises(ParameterError, match=f"names {Path(wrong).name}, which must be a safetensors file in its folder"):
            model_directory.weights(tmp_path)
    (tmp_path / model_directory.WEIGHTS).touch()  # a single file takes precedence over an index
    assert model_directory.weights(tmp_path) == [tmp_path / model_directory.WEIGHTS]


def _pickle(folder: Path) -> None:
    torch.save(family.tensors_of(folder), folder / "pytorch_model.bin")
    (folder / model_directory.WEIGHTS).unlink()


def _cut(folder: Path) -> None:
    path = folder / model_directory.WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def _lack(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = family.tensors_of(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / model_directory.WEIGHTS, {"format": "pt"})


BAD = {
    "nan": (
        lambda path: family.change_tensor(path, "model.norm.weight", lambda value: value * math.nan), "model.norm.weight of tiny"
    ),
    "inf": (lambda path: family.change_tensor(path, "model.norm.weight", lambda value: value / 0), "32 of its 32 numbers are not"),
    "truncated": (_cut, "model tiny cannot be loaded from model.safetensors"),
    "lacking": (_lack, "lacks 1 tensors that its config.json requires, such as model.layers.1.mlp.up_proj.weight"),
    "sizes": (
        lambda path: family.change_config(path, hidden_size=64),
        r"must have shape \(300, 64\), as its config.json requires",
    ),
    "vocabulary": (
        lambda path: family.change_config(path, vocab_size=400),
        r"model.embed_tokens.weight of model tiny must have shape \(400, 32\), as its config.json requires, got \(300, 32\)",
    ),
    "deeper": (
        lambda path: family.change_config(path, num_hidden_layers=1),
        "num_hidden_layers of model tiny must match its weights, got 1 and model.layers.1.",
    ),
    "layers": (lambda path: family.change_config(path, num_hidden_layers="two"), "error for field 'num_hidden_layers': .*'two'"),
    "pickle": (_pickle, "only pytorch_model.bin, which are not read; only safetensors are loaded"),
    "no weights": (lambda path: (path / model_directory.WEIGHTS).unlink(), "tiny has no model.safetensors; only safetensors"),
    "no config": (lambda path: (path / "config.json").unlink(), "tiny has no config.json"),
    "config": (lambda path: (path / "config.json").write_text("{"), "config.json of tiny cannot be read as JSON"),
    "list": (lambda path: (path / "config.json").write_text("[]"), "must be a table of keys"),
    "type": (lambda path: family.change_config(path, model_type="llamma"), "must have a model_type of transformers, got 'llamma'"),
    "t5": (lambda path: family.change_config(path, model_type="t5", is_encoder_decoder=True), "must be decoder-only"),
    "code": (
        lambda path: family.change_config(path, model_type="mine", auto_map={"AutoModelForCausalLM": "evil.Mine"}),
        "would run its own code",
    ),
    "no tokenizer": (lambda path: [each.unlink() for each in path.glob("tokenizer*")], "has no tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_broken_models_are_refused_in_one_line(case: str, copied: Path) -> None:
    how, message = BAD[case]
    how(copied)
    with pytest.raises(ParameterError, match=message) as caught:
        model_directory.load(copied)
    assert "\n" not in str(caught.value)


def test_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ParameterError, match=r"^here has no config\.json"):
        model_directory.load(".")


def test_code_of_a_known_model_is_not_run(copied: Path) -> None:
    (copied / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').write_text('yes')\nclass Mine: pass\n")
    family.change_config(copied, auto_map={"AutoModelForCausalLM": "evil.Mine", "AutoConfig": "evil.Mine"})
    model_directory.load(copied)
    assert not (copied / "ran").exists()


def test_tokenizer_of_another_model_is_refused(copied: Path, tmp_path: Path, read: corpus.Corpus) -> None:
    vocabulary.wrap_tokenizer(vocabulary.train_tokenizer(read, 310), 32).save_pretrained(copied)
    with pytest.raises(ParameterError, match="must be at most its vocabulary=300, got a tokenizer of 310"):
        model_directory.load(copied)


@pytest.mark.parametrize("name", ["targt", "./no/such", "/no/such", "a/b/c", ""])
def test_missing_models_are_refused_without_network_access(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the network"))
    with pytest.raises(ParameterError, match="must be a directory, one of the family"):
        model_directory.load(name or "nothing")


def test_no_code_is_fetched_and_errors_of_the_hub_are_one_line(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    def fetched(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "owner/name"
        for file in ("modeling.py", "pytorch_model.bin", "original/model.safetensors", "model.pkl"):
            allowed = any(fnmatch.fnmatch(file, each) for each in allow_patterns)
            assert not allowed or any(fnmatch.fnmatch(file, each) for each in ignore_patterns), file
        return str(kept)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert model_directory.load("owner/name").name == "owner/name"

    def fails(*_: object, **__: object) -> str:
        raise OSError("no way\nthrough")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(ParameterError, match="model owner/name could not be fetched from the hub: no way; give a directory"):
        model_directory.load("owner/name")


def test_bundled_models_are_found_by_name(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    monkeypatch.setattr(model_directory, "MODELS", kept.parent)
    assert model_directory.names() == ["tiny"]
    assert model_directory.bundled("tiny") == kept
    assert model_directory.load("tiny").checksum == model_directory.checksum(kept)
    with pytest.raises(ParameterError, match="unknown model of the family 'tini'; did you mean tiny"):
        model_directory.bundled("tini")


@pytest.mark.parametrize("name", model_directory.names())
def test_bundled_models_have_their_logged_loss(name: str) -> None:
    """On a few windows of the held-out text, if this Python has the text on which they were trained."""
    log = model_directory.log_of(model_directory.bundled(name))
    assert log["corpus"]["name"] == corpus.standard_library().name  # else `calibrate quality` would require a text
    loaded = model_directory.load(name)
    assert log["parameters"] == sum(each.numel() for each in loaded.model.parameters())
    found = corpus.standard_library()
    if found.checksum != log["corpus"]["checksum"]:
        pytest.skip(f"this is the library of Python {found.python}, and {name} read that of {log['corpus']['python']}")
    held_out = loaded.tokens(found.held_out)
    assert held_out.size == log["corpus"]["held_out_tokens"]
    sample = log["held_out_sample"]
    loss = training.loss_of(loaded.model, held_out, sample["length"], windows=sample["windows"])
    assert loss == pytest.approx(sample["loss"], rel=1e-4)
    assert loss == pytest.approx(log["held_out_loss"], rel=0.3), "a few windows of many"


# The command


def test_train_command_writes_models_and_resumes(tmp_path: Path) -> None:
    common = ["train", "-o", str(tmp_path / "out"), "--role", "mine", "--layers", "1", "--hidden", "32", "--ffn", "32", "--quick",
              "--vocabulary", "300", "--epochs", "0.1", "--device", "cpu", "--threads", "1"]  # fmt: skip
    done = CliRunner().invoke(app, [*common, "--json"])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)["models"]["mine"]
    assert said["size"] == {"layers": 1, "hidden": 32, "ffn": 32}
    assert said["recipe"]["epochs"] == 0.1
    assert str(tmp_path) not in said["command"]
    assert said | {"folder": ""} == model_directory.log_of(tmp_path / "out" / "mine") | {"folder": ""}
    assert "is there already" in family.error_of(*common)
    again = CliRunner().invoke(app, [*common, "--resume"])
    assert again.exit_code == 0
    assert "held-out loss" in again.stdout
    assert "measured" in again.stdout
    assert "made with epochs 0.1, now asked for 0.2" in family.error_of(*common, "--resume", "--epochs", "0.2")
    # The logged command gives the same weights.
    words = said["command"].split()[1:]
    words[words.index("-o") + 1] = str(tmp_path / "again")
    assert CliRunner().invoke(app, [*words, "--device", "cpu"]).exit_code == 0
    assert model_directory.checksum(tmp_path / "again" / "mine") == model_directory.checksum(tmp_path / "out" / "mine")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--role targte", "unknown role 'targte'; did you mean target?"),
        ("--layers 3", "layers, hidden and ffn must be given together"),
        ("--role a,b --layers 1 --hidden 32 --ffn 32", "role must be one name"),
        ("--role ../a --layers 1 --hidden 32 --ffn 32", "role must be one name"),
        ("--role a --layers 1 --hidden 33 --ffn 32", "hidden must be a multiple of 32, the size of a head, got 33"),
        ("--role a --layers 0 --hidden 32 --ffn 32", "layers must be between 1"),
        ("--epochs nan", "epochs must be between 0 and 1000, got nan"),
        ("--batch 0", "batch must be at least 1, got 0"),
        ("--seed -1", "seed must be between 0 and 9223372036854775807, got -1"),
        ("--threads 0", "threads must be between 1 and 4096, got 0"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--text no-such-text", "text must be a file or a folder, and there is none at no-such-text"),
        ("--quick --vocabulary 256", "vocabulary must be between 257 and 65536, got 256"),
    ],
)
def test_train_refuses_wrong_options_and_leaves_nothing(words: str, message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert message in family.error_of("train", "-o", str(out), *words.split())
    assert not out.exists() or not list(out.iterdir())


def test_existing_model_is_trained_only_with_resume(kept: Path, tmp_path: Path) -> None:
    """Without `resume` neither a model nor a saved state is touched."""
    folder = tmp_path / "family"
    shutil.copytree(kept, folder / "tiny")
    asked = "tiny", family.TINY, family.RECIPE, family.text(), None
    with pytest.raises(ParameterError, match="tiny is there already; remove it"):
        make_model.make(*asked, folder)
    assert make_model.make(*asked, folder, resume=True) == model_directory.log_of(folder / "tiny")
    (folder / "tiny").rename(folder / "tiny.kept")
    with pytest.raises(ParameterError, match="from an interrupted training; --resume continues it, or remove it"):
        make_model.make(*asked, folder)


def test_interrupted_train_command_names_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_model, "make", interrupted)
    done = CliRunner().invoke(app, ["train", "-o", str(tmp_path), "--quick", "--role", "draft", "--device", "cpu"])
    assert done.exit_code == 130
    assert "--resume" in done.stderr


def test_text_other_than_the_bundled_familys_is_noted(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from calibrate.commands import family_commands

    found = family.text()
    assert family_commands._note(found) == "" or model_directory.names()
    shutil.copytree(kept, tmp_path / "target")
    monkeypatch.setattr(model_directory, "MODELS", tmp_path)
    assert family_commands._note(found) == "note: the text is that of the bundled family"
    assert "weights and losses will differ" in family_commands._note(corpus.standard_library())


def test_help_has_examples_and_current_defaults() -> None:
    said = " ".join(CliRunner().invoke(app, ["train", "--help"], terminal_width=200).stdout.split())
    assert "calibrate train -o family" in said
    recipe = Recipe()
    for name in ("epochs", "batch", "length", "rate", "seed"):
        assert f"Default: {getattr(recipe, name):g}." in said, name
    assert f"Default: {vocabulary.SIZE}." in said


def test_size_gives_its_configuration() -> None:
    """Heads of 32, each with separate keys and values; the embedding is the output matrix; token 0 begins, ends and pads."""
    for layers, hidden, ffn in ((2, 96, 256), (5, 128, 344)):
        found = Size(layers, hidden, ffn).config(1000, 64)
        assert (found.num_hidden_layers, found.hidden_size, found.intermediate_size) == (layers, hidden, ffn)
        assert found.num_attention_heads == found.num_key_value_heads == hidden // 32
        assert (found.vocab_size, found.max_position_embeddings, found.tie_word_embeddings) == (1000, 64, True)
        assert found.bos_token_id == found.eos_token_id == found.pad_token_id == 0


def test_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "file"
    with whole_files.atomic_path(path) as part:
        part.write_text("some")
        assert part.parent == path.parent
        assert not path.exists()
    assert path.read_text() == "some"

    def broken_off() -> None:
        with whole_files.atomic_path(path) as part:
            part.write_text("other")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert [each.read_text() for each in path.parent.iterdir()] == ["some"]
