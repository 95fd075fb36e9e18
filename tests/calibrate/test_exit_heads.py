"""Exit heads: they start as the common head, are trained for each layer separately, and belong to one model."""

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
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.family import align_draft, draft_head_training, exit_heads, model_directory, training
from calibrate.family.exit_heads import HeadTrainingSettings
from calibrate.family.model_directory import Loaded
from model.base.checks import ParameterError
from tests.support import family

FEW = HeadTrainingSettings(epochs=1, rate=5e-3, batch=4, length=32)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.train_model(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return model_directory.load(folder)


@pytest.fixture(scope="module")
def trained(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    exit_heads.train(loaded, family.text(), FEW, path)
    return path


def test_common_head_gives_the_logits_of_a_truncated_model(loaded: Loaded) -> None:
    """The logits of a model without the later layers: this defines the common head."""
    tokens = torch.arange(24).reshape(2, 12)
    common = exit_heads.initial_heads(loaded, (1, 2))
    seen, own = exit_heads.states(loaded, tokens, common)
    for layer in (1, 2):
        short = model_directory.load(loaded.folder).model
        short.model.layers = short.model.layers[:layer]
        with torch.no_grad():
            torch.testing.assert_close(seen[layer] @ common[layer].T, short(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(own, loaded.model(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5)


def test_training_at_rate_zero_leaves_the_common_head(loaded: Loaded, tmp_path: Path) -> None:
    about = exit_heads.train(loaded, family.text(), replace(FEW, rate=0.0, epochs=0.2), tmp_path / "new" / "deeper" / "none")
    own = loaded.model.get_output_embeddings().weight
    for head in exit_heads.heads_of(loaded, tmp_path / "new" / "deeper" / "none").values():
        assert torch.equal(head, own), "the weights of a model were in half precision, so nothing is lost"
    rows = {(row["head"], row["layer"]): row for row in about["results"]}
    for layer in (1, 2):
        assert rows["common", layer] | {"head": ""} == rows["trained", layer] | {"head": ""}


def test_training_improves_heads_and_keeps_the_model(loaded: Loaded, trained: Path) -> None:
    rows = {(row["head"], row["layer"]): row for row in exit_heads.about(trained)["results"]}
    assert set(rows) == {(kind, layer) for kind in ("common", "trained") for layer in (1, 2)}
    for layer in (1, 2):
        assert rows["trained", layer]["loss"] < rows["common", layer]["loss"] - 0.02
    for row in rows.values():
        assert 0 <= row["top_1"] <= row["top_3"] <= row["top_5"] <= 1
    fresh = model_directory.load(loaded.folder).model
    for name, value in loaded.model.named_parameters():
        assert torch.equal(value, fresh.get_parameter(name))
        assert value.grad is None


def test_file_of_heads_describes_itself(loaded: Loaded, trained: Path) -> None:
    said, read = exit_heads.about(trained), family.text()
    log = model_directory.log_of(loaded.folder)
    assert said == {
        "schema": "decodesim.heads/1", "source": "measured", "model": model_directory.checksum(loaded.folder), "name": "tiny",
        "layers": 3, "hidden": 32, "vocabulary": 300, "settings": asdict(FEW), "held_out_loss": pytest.approx(log["held_out_loss"]),
        "corpus": log["corpus"], "versions": model_directory.versions(), "command": "",
        "results": said["results"], "seconds": said["seconds"],
    }  # fmt: skip
    both = {"common": exit_heads.initial_heads(loaded, (1, 2)), "trained": exit_heads.heads_of(loaded, trained)}
    assert said["results"] == exit_heads.evaluate_heads(loaded, both, loaded.tokens(read.held_out), 32)
    tensors = load_file(trained)
    assert {(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()} == {
        (f"layer.{layer}", torch.float16, (300, 32)) for layer in (1, 2)
    }


def test_output_must_be_the_last_normed_state_times_the_matrix(loaded: Loaded, folder: Path) -> None:
    """To 0.001, absolute and relative; with as many states as layers, and the embedding."""
    other = model_directory.load(folder)
    forward, changes = other.model.forward, list[Any]()

    def changed(**given: Any) -> Any:
        passed = forward(**given)
        for change in changes:
            change(passed)
        return passed

    def off(share: float, largest: bool) -> Any:
        def change(passed: Any) -> None:
            size = passed.logits.abs()
            place = int(size.argmax() if largest else size.argmin())
            passed.logits.view(-1)[place] += share * 1e-3 * (1 + float(size.view(-1)[place]))

        return change

    def unnormed(passed: Any) -> None:
        passed.hidden_states = (*passed.hidden_states[:-1], passed.hidden_states[-1] * 2)
        passed.logits = passed.logits * 2

    def more(passed: Any) -> None:
        passed.hidden_states = (*passed.hidden_states[:1], *passed.hidden_states)

    other.model.forward = changed
    for chosen, refused in (([], False), ([unnormed], True), ([more], True), ([off(0.9, True)], False), ([off(1.1, True)], True),
                            ([off(0.9, False)], False), ([off(1.1, False)], True)):  # fmt: skip
        changes[:] = chosen
        if refused:
            with pytest.raises(ParameterError, match="the output of model tiny must be its output matrix times its last normed"):
                exit_heads.check(other)
        else:
            exit_heads.check(other)


def test_head_does_not_depend_on_the_others(loaded: Loaded, trained: Path, tmp_path: Path) -> None:
    exit_heads.train(loaded, family.text(), FEW, tmp_path / "two", layers=[2])
    alone = exit_heads.heads_of(loaded, tmp_path / "two")
    assert set(alone) == {2}
    assert torch.equal(alone[2], exit_heads.heads_of(loaded, trained)[2])


def test_gradients_do_not_depend_on_the_grouping_of_a_batch(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = np.random.default_rng(0).integers(0, 300, (5, 9))
    found = []
    for chunk in (10**6, 16):
        monkeypatch.setattr(exit_heads, "CHUNK", chunk)
        started = exit_heads.initial_heads(loaded, (1, 2))
        loss = exit_heads._learn(loaded, started, windows, "text")
        found.append([float(loss), *(head.grad for head in started.values())])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    # The loss is that of the text's next tokens.
    rows = torch.from_numpy(windows)
    seen, _ = exit_heads.states(loaded, rows[:, :-1], (1, 2))
    own = loaded.model.get_output_embeddings().weight.detach()
    chances = [(seen[layer] @ own.T).double().log_softmax(-1).gather(-1, rows[:, 1:, None]) for layer in (1, 2)]
    assert found[0][0] == pytest.approx(-float(torch.stack(chances).mean()), rel=1e-5)


def test_agreement_equals_a_count_with_topk(loaded: Loaded, trained: Path) -> None:
    """Candidate sets from topk, on two windows, against the counted ranks."""
    tokens = loaded.tokens(family.text().held_out)[:65]
    made = exit_heads.heads_of(loaded, trained)
    (row,) = exit_heads.evaluate_heads(loaded, {"trained": {2: made[2]}}, tokens, 32)
    hits = dict.fromkeys(exit_heads.TOP, 0)
    losses = []
    for start in (0, 32):
        seen, logits = exit_heads.states(loaded, torch.from_numpy(tokens[start : start + 32])[None], (2,))
        guesses = (seen[2] @ made[2].T)[0]
        text = torch.from_numpy(tokens[start + 1 : start + 33])
        losses += torch.nn.functional.cross_entropy(guesses, text, reduction="none").tolist()
        for place in range(32):
            for top in exit_heads.TOP:
                hits[top] += int(logits[0, place].argmax()) in guesses[place].topk(top).indices.tolist()
    assert row == {"head": "trained", "layer": 2, "loss": pytest.approx(np.mean(losses), abs=1e-4)} | {
        f"top_{top}": pytest.approx(hits[top] / 64, abs=1e-5) for top in exit_heads.TOP
    }


def test_resumed_training_ends_with_the_same_heads(
    loaded: Loaded, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    path = tmp_path / "heads"

    def pull(step: int, *_: object) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exit_heads.train(loaded, family.text(), FEW, path, report=pull)
    assert not path.exists()
    with pytest.raises(ParameterError, match="--resume continues it"):
        exit_heads.train(loaded, family.text(), FEW, path)
    with pytest.raises(ParameterError, match="is from a training with other settings"):
        exit_heads.train(loaded, family.text(), replace(FEW, rate=1e-4), path, resume=True)
    exit_heads.train(loaded, family.text(), FEW, path, resume=True)
    one, other = load_file(path), load_file(trained)
    assert set(one) == set(other) == {"layer.1", "layer.2"}
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [each.name for each in tmp_path.iterdir()] == ["heads"]


def test_head_can_learn_the_models_predictions(loaded: Loaded, tmp_path: Path) -> None:
    windows = np.random.default_rng(0).integers(0, 300, (2, 9))
    started = exit_heads.initial_heads(loaded, (1,))
    loss = exit_heads._learn(loaded, started, windows, "model")
    seen, own = exit_heads.states(loaded, torch.from_numpy(windows[:, :-1]), (1,))
    guesses = seen[1] @ started[1].detach().T
    wanted = guesses.double().log_softmax(-1).gather(-1, own.argmax(-1, keepdim=True))
    assert float(loss) == pytest.approx(-float(wanted.mean()), rel=1e-5)
    about = exit_heads.train(loaded, family.text(), replace(FEW, labels="model"), tmp_path / "heads")
    rows = {(row["head"], row["layer"]): row for row in about["results"]}
    assert rows["trained", 1]["top_1"] > rows["common", 1]["top_1"]


def test_paper_settings_are_those_of_table_4() -> None:
    paper = exit_heads.SETTINGS["paper"]
    assert (paper.epochs, paper.rate, paper.batch, paper.length, paper.warm_up, paper.weight_decay) == (3, 2e-5, 128, 2048, 0.04, 0)
    recipe, tokens = paper.recipe(200 * 128 * 2048 + 1), 200 * 128 * 2048 + 1
    steps = recipe.steps(tokens)
    assert steps == 600
    rates = [recipe.rate_at(step, steps) for step in range(steps)]
    assert max(rates) == rates[24 - 1] == 2e-5
    assert rates[:24] == sorted(rates[:24])
    assert rates[24:] == sorted(rates[24:], reverse=True)


def test_windows_fit_the_positions_of_the_model(loaded: Loaded, tmp_path: Path) -> None:
    about = exit_heads.train(loaded, family.text(), replace(FEW, length=2048, epochs=0.1), tmp_path / "heads")
    assert about["settings"]["length"] == loaded.positions == 32


# Errors


def test_held_out_text_without_a_window_is_refused_first(loaded: Loaded, tmp_path: Path) -> None:
    short = replace(family.text(), held_out={"a": "b"})
    for settings, path in ((FEW, tmp_path / "heads"), (replace(FEW, labels="model"), tmp_path / "others" / "heads")):
        with pytest.raises(ParameterError, match=r"^held-out text must have at least length\+1=33 tokens, got 2; give a longer"):
            exit_heads.train(loaded, short, settings, path)
    with pytest.raises(ParameterError, match=r"^held-out text must have at least length\+1=25 tokens, got 2; give a longer one$"):
        align_draft.align(loaded, loaded, short, align_draft.AlignmentSettings(8, 8, 16, 8, batch=4), tmp_path / "aligned")
    assert not [*tmp_path.iterdir()]


def _rewritten(path: Path, change: Any) -> None:
    tensors, said = load_file(path), {"about": json.dumps(exit_heads.about(path))}
    change(tensors, said)
    save_file(tensors, path, said)


def _nan(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["layer.1"][5, 5] = math.nan


def _last(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["layer.3"] = tensors["layer.1"].clone()


def _narrow(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["layer.2"] = tensors["layer.2"][:, :16].contiguous()


BAD = {
    "nan": (lambda path: _rewritten(path, _nan), r"layer\.1 of heads\.safetensors must be finite, and 1 of its 9600"),
    "last": (lambda path: _rewritten(path, _last), r"must hold tensors layer\.1 to layer\.2, got 'layer\.3'"),
    "shape": (lambda path: _rewritten(path, _narrow), r"layer\.2 of .* must have shape \(300, 32\), got \(300, 16\)"),
    "none": (lambda path: path.unlink(), "there are no heads at"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-50]), "cannot be read"),
    "no safetensors": (lambda path: path.write_bytes(b"no such format"), "cannot be read"),
    "no heads": (lambda path: _rewritten(path, lambda _, said: said.clear()), "must be a file of heads"),
    "words": (lambda path: _rewritten(path, lambda _, said: said.update(about="{")), "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_broken_heads_are_refused_in_one_line(case: str, loaded: Loaded, trained: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(trained, tmp_path))
    how, message = BAD[case]
    how(path)
    with pytest.raises(ParameterError, match=message) as caught:
        exit_heads.heads_of(loaded, path)
    assert "\n" not in str(caught.value)


def test_heads_of_another_model_are_refused(trained: Path, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    family.change_tensor(other, "model.norm.weight", lambda value: value + 0.5)
    with pytest.raises(ParameterError, match=r"belongs to the model with checksum .* \(tiny\), and this one has"):
        exit_heads.heads_of(model_directory.load(other), trained)


GPT2 = {"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 64}
PHI = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 64,
}  # fmt: skip


def _other(kind: str, settings: dict[str, Any], loaded: Loaded, folder: Path) -> Path:
    """Return a model of another architecture, with random weights and the same tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mistral"])
def test_common_heads_of_other_architectures(kind: str, loaded: Loaded, tmp_path: Path) -> None:
    settings = GPT2 if kind == "gpt2" else PHI | ({"num_key_value_heads": 2} if kind == "mistral" else {})
    other = model_directory.load(_other(kind, settings, loaded, tmp_path / kind))
    exit_heads.check(other)
    about = exit_heads.train(other, family.text(), replace(FEW, epochs=0.05), tmp_path / "heads")
    assert {row["layer"] for row in about["results"]} == {1, 2}


def test_output_with_more_than_a_matrix_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    other = model_directory.load(_other("phi", PHI, loaded, tmp_path / "phi"))
    with pytest.raises(ParameterError, match="the output of model phi must be its output matrix times its last normed state"):
        exit_heads.train(other, family.text(), FEW, tmp_path / "heads")
    assert not (tmp_path / "heads").exists()


def test_model_of_one_layer_has_no_exits(loaded: Loaded, tmp_path: Path) -> None:
    other = model_directory.load(_other("gpt2", GPT2 | {"n_layer": 1}, loaded, tmp_path / "gpt2"))
    with pytest.raises(ParameterError, match="layers must be at least 2 for a head before the last"):
        exit_heads.train(other, family.text(), FEW, tmp_path / "heads")


# The command


def test_heads_command_trains_heads(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number} of a text" for number in range(3000)))
    common = ["heads", "--model", str(folder), "--text", str(text), "--quick", "--epochs", "0.1", "--device", "cpu"]
    path = tmp_path / "some.safetensors"
    done = CliRunner().invoke(app, [*common, "-o", str(path), "--layers", "2"])
    assert done.exit_code == 0, done.stderr
    assert "measured on" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line[:5].strip().isdecimal()] == ["2"]
    assert str(tmp_path) not in exit_heads.about(path)["command"]
    assert "is there already" in family.error_of(*common, "-o", str(path))
    again = CliRunner().invoke(app, [*common, "-o", str(path), "--layers", "2", "--resume", "--json"])
    assert json.loads(again.stdout) == exit_heads.about(path) | {"file": str(path)}
    assert "made with heads of layers [2], now asked for [1, 2]" in family.error_of(*common, "-o", str(path), "--resume")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--settings papers", "unknown settings 'papers'; did you mean paper?"),
        ("--layers 3", "layer must be between 1 and layers-1=2, got 3"),
        ("--labels textual", "unknown labels 'textual'; did you mean text?"),
        ("--layers 1,b", "layers must be comma-separated whole numbers"),
        ("--rate -1", "rate must be at least 0, got -1"),
        ("--seed 99999999999999999999", "seed must be between 0 and 9223372036854775807, got 99999999999999999999"),
        ("--batch 0", "batch must be at least 1"),
        ("--text no-such", "text must be a file or a folder"),
        ("--settings paper --batch 4096", "a text must have at least batch*length+1=131073 tokens"),
    ],
)
def test_heads_command_refuses_wrong_options_and_leaves_nothing(words: str, message: str, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line\n" * 2000)
    given = words.split() if "--text" in words else [*words.split(), "--text", str(text)]
    out = tmp_path / "out" / "heads"
    assert message in family.error_of("heads", "--model", str(folder), "-o", str(out), "--device", "cpu", *given)
    assert not out.parent.exists()


def test_model_of_another_corpus_requires_a_text(loaded: Loaded, tmp_path: Path) -> None:
    other = _other("gpt2", GPT2, loaded, tmp_path / "gpt2")
    assert "text must be given for model gpt2" in family.error_of("heads", "--model", str(other), "--device", "cpu")


def test_model_of_a_cut_library_requires_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    from calibrate.commands import family_commands
    from calibrate.family import corpus

    library = corpus.standard_library()
    little = library.cut(family_commands._QUICK_TEXT)
    (tmp_path / model_directory.LOG).write_text("{}")
    loaded: Any = SimpleNamespace(name="mine", folder=tmp_path)

    def noted(checksum: str, quick: bool) -> str:
        monkeypatch.setattr(model_directory, "log_of", lambda _: {"corpus": {"name": library.name, "checksum": checksum}})
        assert family_commands._text(loaded, None, quick).checksum == (little if quick else library).checksum
        return capsys.readouterr().err

    assert noted(little.checksum, True) == noted(library.checksum, True) == noted(library.checksum, False) == ""
    assert "mine was trained with --quick, on a small part of the text" in noted(little.checksum, False)
    assert "mine was not trained on the library" in noted("of another Python", True)


def test_every_command_refuses_a_missing_model(tmp_path: Path) -> None:
    assert "model must be a directory" in family.error_of("heads", "--model", "./no-such", "--device", "cpu")


def test_help_has_examples_and_current_defaults() -> None:
    said = " ".join(CliRunner().invoke(app, ["heads", "--help"], terminal_width=200).stdout.split())
    assert "calibrate heads --model target" in said
    for name in ("epochs", "batch", "length", "rate"):
        own, paper = (getattr(exit_heads.SETTINGS[each], name) for each in ("own", "paper"))
        draft = getattr(draft_head_training.DraftHeadSettings(), name)
        assert f"Default: {own:g}; paper: {paper:g}; draft heads: {draft:g}." in said, name
