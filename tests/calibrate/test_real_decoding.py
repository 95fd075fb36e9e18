"""`calibrate decode`: decoding with real models by any method from the command line, and its reports."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from calibrate.commands import decode_command, log_command
from calibrate.commands.calibrate_app import app
from calibrate.decode import decode_report, real_decoding
from calibrate.decoders import transformers_adapter
from calibrate.family import exit_heads, head_files, model_directory
from calibrate.interpreters.in_one_process import RandomDraws, Sampling
from calibrate.loading import load_models
from model.base.checks import ParameterError
from model.logs import read_log
from model.methods import registry
from tests.calibrate import test_replay
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY

LAYERS = DEPTHS["target"]
LETTERS = [*string.ascii_lowercase, " ", "<unk>", "</s>"]
"""Tokens of the tiny tokenizer, one for each row of the tiny models' embeddings."""
SEEDS = {"target": 4, "draft": 1, "medium": 2}
"""Seeds of weights for which outputs are not a single repeated token, and some drafts are accepted."""
CHOICES: dict[str, list[str]] = {
    "autoregressive": [], "ppd": ["exit_layer=3", "candidates=3"], "speculative": ["draft_length=3"],
    "pearl": ["draft_length=3"], "amusd": ["draft_length=6"], "dsi": ["lookahead=2", "verifiers=2"],
    "ssd": ["draft_length=3", "fan_out=2"],
    "tree": ["shape=full", "draft_depth=2", "width=2"],
    "adaptive": ["policy=heuristic"], "hierarchical": ["draft_length=3", "reading=bonus"], "beam": ["draft_length=2", "beams=2"],
    "bild": ["fallback_threshold=0.1", "rollback_threshold=3"], "skipdecode": ["min_layers=2", "max_layers=5"],
    "early_exit": ["threshold=0.1"], "self_speculative": ["exit_layer=2", "draft_length=3"],
    "ngram": ["draft_length=3"],
}  # fmt: skip


def tokenizer(letters: list[str]) -> Any:
    """A tokenizer with a token for each letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    found.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>", eos_token="</s>")


def numbers(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def put(
    folder: Path, role: str, *, kind: str = "llama", seed: int = 0, letters: list[str] = LETTERS, end: int | None = None
) -> Path:
    """Save a tiny model with its tokenizer, and return its folder."""
    full = real_models.model(kind, DEPTHS[role], seed, "float32")
    full.save_pretrained(folder / role)
    path = folder / role / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": end}))
    tokenizer(letters).save_pretrained(folder / role)
    return folder / role


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for role, seed in SEEDS.items():
        put(folder, role, seed=seed)
    return folder


def call(*arguments: str, code: int = 0, env: dict[str, str] | None = None) -> tuple[str, str]:
    usual = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "300"}
    done = CliRunner().invoke(app, ["decode", *arguments], env=usual | (env or {}))
    assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr, done.exception)
    return done.stdout, done.stderr


def models(folder: Path, method: str, *names: str) -> list[str]:
    """Return the options that name a method's models."""
    found = ["--model", str(folder / "target")]
    settings = dict(each.split("=") for each in names)
    for role in real_decoding.roles(method, settings)[1:]:
        found += [f"--{role}", str(folder / role)]
    return found


def asked(folder: Path, method: str, *more: str, choices: list[str] | None = None) -> list[str]:
    chosen = CHOICES[method] if choices is None else choices
    sets = [word for choice in chosen for word in ("--set", choice)]
    return [method, *models(folder, method, *chosen), *sets, "--device", "cpu", "--threads", "1", *more]


def said(folder: Path, method: str, *more: str, **choices: Any) -> dict[str, Any]:
    stdout, stderr = call(*asked(folder, method, "--json", *more, **choices))
    assert stderr == ""
    document: dict[str, Any] = json.loads(stdout)
    return document


def test_processes_give_the_same_results_except_times(tiny: Path) -> None:
    """Plain decoding of --plain runs in the processes too."""
    here, apart = (said(tiny, "pearl", "--prompt", "hello", "--tokens", "14", "--plain", *more) for more in ([], ["--processes"]))
    assert (here["processes"], apart["processes"]) == (False, True)
    (found,), (want,) = apart["sequences"], here["sequences"]
    same = {key for key in want if found[key] == want[key]}
    assert {"text", "written", "produced_by", "passes", "work"} <= same
    message = refused(*asked(tiny, "ppd", "--prompt", "hello", "--processes"))
    assert "each pass through all of them, got [0, 3)" in message


@pytest.mark.parametrize(("fan_out", "message"), [
    ("29", "fan_out after 0 accepted tokens must be at most 28 with a vocabulary of 29 tokens, got 29; prepare fewer drafts"),
    ("[28,28,28,30]", "fan_out after 3 accepted tokens must be at most 29 with a vocabulary of 29 tokens, got 30"),
    ("0", "fan_out must be between 1 and"), ("[1,1]", "fan_out must have draft_length + 1 = 4 numbers"),
])  # fmt: skip
def test_fan_outs_beyond_the_vocabulary_are_refused(tiny: Path, fan_out: str, message: str) -> None:
    choices = ["draft_length=3", f"fan_out={fan_out}"]
    assert message in refused(*asked(tiny, "ssd", "--prompt", "hello", choices=choices))


def test_all_outcomes_prepared(tiny: Path) -> None:
    """With a draft for every token of the vocabulary nothing is ever drafted just in time."""
    choices, more = ["draft_length=1", "fan_out=[28,29]"], ("--prompt", "hello", "--tokens", "12", "--plain")
    one, other = (said(tiny, "ssd", *more, choices=[*choices, *each])["sequences"][0] for each in ([], ["backup=none"]))
    assert one["text"] == other["text"]
    rounds = sum(each["count"] for each in one["rounds"])
    assert one["passes"]["draft"] <= 1 + 2 * rounds


def test_choices_cover_every_method() -> None:
    assert {*CHOICES} == {*registry.names()}


@pytest.mark.parametrize("method", CHOICES)
def test_every_method_decodes_and_reports(method: str, tiny: Path) -> None:
    """The document agrees with the same decoding in Python."""
    found = said(tiny, method, "--prompt", "hello", "--tokens", "14")
    (shown,) = found["sequences"]
    decoders = {role: load_models.model(str(tiny / role)).decoder for role in found["models"]}
    settings = {key: value for key, value in shown["settings"].items() if value is not None}
    again = real_decoding.decode(method, decoders, numbers("hello"), 14, settings)
    assert shown["written"] == [*again.tokens]
    # Special tokens are not part of the text.
    assert shown["text"] == "".join(shown["pieces"]) == "".join(LETTERS[token] for token in again.tokens if token < 27)
    assert shown["produced_by"] == [*again.producers]
    assert shown["passes"] == dict(again.account.passes_of)
    assert sum(each["passes"] for each in shown["work"]) == again.account.passes
    assert sum(shown["layer_passes"].values()) == again.account.layer_passes
    assert shown["plain_layer_passes"] == LAYERS * (4 + 14)
    assert {(each["accepted"], each["drafted"]): each["count"] for each in shown["rounds"]} == again.rounds
    assert shown["seconds"] > 0
    assert shown["tokens_per_s"] == pytest.approx(14 / shown["seconds"])
    assert found["provenance"] == "measured"
    assert {role: each["layers"] for role, each in found["models"].items()} == {role: DEPTHS[role] for role in found["models"]}
    assert all(re.fullmatch("[0-9a-f]{64}", each["checksum"]) for each in found["models"].values())


@pytest.mark.parametrize("method", [name for name in CHOICES if name not in ("bild", "skipdecode", "early_exit", "beam")])
def test_exact_methods_generate_the_tokens_of_the_oracle(method: str, tiny: Path) -> None:
    found = said(tiny, method, "--prompt", "hello", "--tokens", "20", "--dtype", "float64", "--plain")
    assert found["exact"]
    full = load_models.model(str(tiny / "target"), dtype="float64").decoder.full
    assert found["sequences"][0]["written"] == real_models.reference_tokens(full, numbers("hello"), 20)
    assert found["sequences"][0]["plain"]["same_sequences"] == 1
    assert found["sequences"][0]["plain"]["first_differences"] == [None]


def test_rates_follow_their_definitions(tiny: Path) -> None:
    """Compute each rate from the commits, round by round."""
    (text,) = said(tiny, "speculative", "--prompt", "hello", "--tokens", "40")["sequences"]
    accepted = [len(each["tokens"]) - 1 for each in text["commits"]]
    drafted = [each["drafted"] for each in text["commits"]]
    tested = [min(kept + 1, there) for kept, there in zip(accepted, drafted, strict=True)]
    assert text["mean_acceptance_length"] == pytest.approx(40 / len(accepted))
    assert text["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(drafted))
    assert text["acceptance_rate"] == pytest.approx(sum(accepted) / sum(tested))
    assert text["produced_by"].count("draft") == sum(accepted)
    assert 0 < text["draft_acceptance_rate"] < text["acceptance_rate"] < 1
    assert text["passes"]["target"] == len(accepted) + 1  # and the prompt


def test_a_draft_equal_to_the_target_is_always_accepted(tiny: Path) -> None:
    stdout, _ = call(
        "speculative", "--model", str(tiny / "target"), "--draft", str(tiny / "target"), "--set", "num_speculative_tokens=4",
        "--prompt", "hello", "--tokens", "20", "--json", "--dtype", "float64",
    )  # fmt: skip
    (text,) = json.loads(stdout)["sequences"]
    assert text["acceptance_rate"] == text["draft_acceptance_rate"] == 1
    assert text["mean_acceptance_length"] == 5


def test_lossy_methods_say_so(tiny: Path) -> None:
    stdout, _ = call(*asked(tiny, "bild", "--prompt", "hello", "--tokens", "20"))
    assert "bild is lossy" in stdout
    assert "lossy" not in call(*asked(tiny, "speculative", "--prompt", "hello", "--tokens", "5"))[0]


# --- printed report ---


def test_report_begins_with_the_output_and_counts_every_round(tiny: Path) -> None:
    arguments = asked(tiny, "speculative", "--prompt", "hello", "--tokens", "30")
    (text,) = json.loads(call(*arguments, "--json")[0])["sequences"]
    stdout, stderr = call(*arguments)
    assert stderr == ""
    assert "\x1b" not in stdout
    lines = stdout.splitlines()
    assert lines[0] == text["text"]
    assert lines[2].startswith("tokens by source: ")
    counted = {int(a): int(b) for a, b in re.findall(r"^ {0,3}(\d+) +(\d+) [█#]*$", stdout, re.MULTILINE)}
    expected: dict[int, int] = {}
    for each in text["rounds"]:
        expected[each["accepted"]] = expected.get(each["accepted"], 0) + each["count"]
    assert {key: value for key, value in counted.items() if value} == expected
    assert f"{30} tokens in {len(text['commits'])} rounds; mean acceptance length {text['mean_acceptance_length']:.3f}" in stdout
    assert "tok/s (measured" in stdout


def test_lengths_of_bars_follow_the_counts() -> None:
    found = {
        "rounds": [{"accepted": 0, "drafted": 3, "count": 5}, {"accepted": 2, "drafted": 3, "count": 20}], "tokens": 65,
        "mean_acceptance_length": 2.6, "draft_acceptance_rate": None, "acceptance_rate": 0.5, "passes": {"target": 25},
        "layer_passes": {"target": 5}, "plain_layer_passes": 10, "target_layer_passes_over_plain": 0.5, "seconds": 2.0,
        "tokens_per_s": 32.5, "joint_verification": False,
    }  # fmt: skip
    lines = [*decode_report._lines(found, "#")]
    assert [line.count("#") for line in lines[1:4]] == [10, 0, 40]
    assert lines[1:3] == [f"   0     5 {'#' * 10}", "   1     0"]
    assert "draft acceptance rate none" in lines[4]


def test_a_terminal_styles_tokens_by_source(tiny: Path) -> None:
    """Colours and attributes; with NO_COLOR only attributes; no styles if stdout is not a terminal."""
    arguments = asked(tiny, "hierarchical", "--prompt", "hello", "--tokens", "20")
    coloured, _ = call(*arguments, env={"FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert "\x1b[1;36m" in coloured  # tokens of the target
    bare, _ = call(*arguments, env={"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "\x1b[1m" in bare
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", bare)
    assert "\x1b" not in call(*arguments)[0]
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()[0] == call(*arguments)[0].splitlines()[0]


def test_outputs_cannot_control_the_terminal(tiny: Path, tmp_path: Path) -> None:
    letters = ["\x1b", *LETTERS[1:]]
    folder = put(tmp_path, "target", letters=letters)
    stdout, _ = call("autoregressive", "--model", str(folder), "--prompt", "bbb", "--tokens", "40")
    (text,) = json.loads(call("autoregressive", "--model", str(folder), "--prompt", "bbb", "--tokens", "40", "--json")[0])[
        "sequences"
    ]
    assert "\x1b" not in stdout
    assert stdout.splitlines()[0] == text["text"].replace("\x1b", "\\x1b")


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    class Bytes:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode(errors="replace")

    text = "aé€b".encode()
    assert load_models.pieces(Bytes(), [*b"x"], [*text]) == ["a", "", "é", "", "", "€", "b"]
    assert load_models.pieces(Bytes(), [*b"x"], [*text[:2]]) == ["a", "\ufffd"]


# --- end tokens, empty prompts, encoders, heads, sampling ---


def test_decoding_stops_at_the_end_token(tiny: Path, tmp_path: Path) -> None:
    (text,) = said(tiny, "autoregressive", "--prompt", "ending", "--tokens", "20")["sequences"]
    whole = text["written"]
    end = next(token for index, token in enumerate(whole) if index > 1 and token not in whole[:index])
    for role, seed in SEEDS.items():
        put(tmp_path, role, seed=seed, end=end)
    for method in ("autoregressive", "speculative", "ppd"):
        (text,) = said(tmp_path, method, "--prompt", "ending", "--tokens", "20")["sequences"]
        assert text["written"] == whole[: whole.index(end) + 1]
    path = tmp_path / "target" / "generation_config.json"
    other = next(token for token in range(VOCABULARY) if token not in whole)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [other, end]}))  # any of several end tokens stops
    (text,) = said(tmp_path, "speculative", "--prompt", "ending", "--tokens", "20")["sequences"]
    assert text["written"] == whole[: whole.index(end) + 1]
    assert text["stop"] == [other, end]
    assert said(tmp_path, "beam", "--prompt", "hello", "--tokens", "20")["sequences"][0]["stop"] == [other, end]


def test_end_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for end, said in ((99999, "got 99999"), (-1, "got -1"), ("stop", "must be a whole number, got 'stop'")):
        folder = put(tmp_path / str(end), "target")
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": end}))
        words = refused("autoregressive", "--model", str(folder), "--prompt", "a")
        assert "eos_token_id of model target must be" in words
        assert said in words
    folder = put(tmp_path, "target")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": []}))
    call("autoregressive", "--model", str(folder), "--prompt", "a", "--tokens", "2", "--device", "cpu")


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0, "layer_types": []}))
    words = refused("autoregressive", "--model", str(folder), "--prompt", "a")
    assert "config.json of model target: num_hidden_layers must be between 1 and 1000, got 0" in words


def test_an_empty_prompt_begins_with_the_start_token(tiny: Path) -> None:
    (text,) = said(tiny, "autoregressive", "--prompt", "", "--tokens", "8")["sequences"]
    assert text["prompt_tokens"] == [1]  # bos of LLaMA
    full = load_models.model(str(tiny / "target")).decoder.full
    assert text["written"] == real_models.reference_tokens(full, [1], 8)


def test_template_chat_uses_the_models_chat_template(tmp_path: Path) -> None:
    folder = put(tmp_path, "target", seed=SEEDS["target"])
    ask = ("autoregressive", "--model", str(folder), "--json", "--tokens", "8")
    assert "model target has none; leave it out" in refused(*ask, "--prompt", "a", "--template", "chat")
    own = load_models.model(str(folder)).tokenizer
    own.chat_template = "{% for each in messages %}u {{ each.content }} {% endfor %}{% if add_generation_prompt %}b {% endif %}"
    own.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text('"hello"\n')
    for given in (("--prompt", "hello"), ("--prompts", str(folder / "prompts.jsonl"))):
        (text,) = json.loads(call(*ask, *given, "--template", "chat")[0])["sequences"]
        assert text["prompt_tokens"] == numbers("u hello b ")
    # Other prompts are cut to their last tokens; a chat stays whole.
    for template, ids in ((None, numbers("llo")), ("chat", numbers("u hello b "))):
        found = log_command.tokenized_prompts(str(folder / "prompts.jsonl"), template, 1, 3, 0, load_models.model(str(folder)))
        assert [tokens for _, tokens in found] == [ids]
    assert json.loads(call(*ask, "--prompt", "u hello b ")[0])["sequences"][0]["written"] == text["written"]
    own.chat_template = "{{ raise_exception('users must wait') }}"
    own.save_pretrained(folder)
    assert "the chat template of model target fails: users must wait" in refused(*ask, "--prompt", "a", "--template", "chat")


def test_an_encoder_reads_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts one after another, each with the encoder's output for it."""
    for number, role in enumerate(DEPTHS):
        put(tmp_path, role, kind="t5", seed=7 + number)
    (tmp_path / "prompts.txt").write_text("hello\nzq x\n")
    found = said(tmp_path, "speculative", "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "12", "--dtype", "float64")
    full = load_models.model(str(tmp_path / "target"), dtype="float64").decoder.full
    for words, text in zip(("hello", "zq x"), found["sequences"], strict=True):
        monkeypatch.setattr(real_models, "SOURCE", tuple(numbers(words)))
        assert text["prompt_tokens"] == [0]
        assert text["written"] == real_models.reference_tokens(full, [0], 12)
    assert found["sequences"][0]["written"] != found["sequences"][1]["written"]


def test_trained_heads_are_used(tiny: Path, tmp_path: Path) -> None:
    """The model's own head changes nothing; a head with rows shifted by one predicts the next token id."""
    target = load_models.model(str(tiny / "target"))
    weight = target.decoder.head.weight.detach()
    written = {}
    arguments = asked(tiny, "early_exit", "--prompt", "hello", "--tokens", "1", "--json", choices=["exit_layer=3"])
    written["none"] = json.loads(call(*arguments)[0])["sequences"][0]["written"]
    for name, head in (("same", weight), ("shifted", weight.roll(1, dims=0))):
        path = tmp_path / f"{name}.safetensors"
        head_files.write(path, {"layer.3": head}, {"schema": exit_heads.SCHEMA, "model": target.checksum, "name": "tiny"})
        found = json.loads(call(*arguments, "--heads", str(path))[0])
        assert found["heads"] == [3]
        written[name] = found["sequences"][0]["written"]
    assert written["same"] == written["none"]
    assert written["shifted"] == [(written["none"][0] + 1) % VOCABULARY]
    assert "--heads is not used by method speculative" in refused(
        *asked(tiny, "speculative", "--prompt", "a", "--heads", str(tmp_path / "same.safetensors"))
    )


def test_sampled_tokens_follow_the_seed(tiny: Path) -> None:
    def written(*more: str, method: str = "speculative") -> list[int]:
        drawing = ("--prompt", "hello", "--tokens", "20", "--sample", *more)
        tokens: list[int] = said(tiny, method, *drawing)["sequences"][0]["written"]
        return tokens

    assert written("--seed", "1") == written("--seed", "1") != written("--seed", "2")
    greedy = said(tiny, "speculative", "--prompt", "hello", "--tokens", "20")["sequences"][0]["written"]
    assert written("--top-k", "1") == greedy == written("--temperature", "0.0001") == written("--top-p", "0.0001")
    # For any early predictions, PPD samples the tokens of plain sampling: Appendix B of the paper.
    assert written("--top-k", "4", method="ppd") == written("--top-k", "4", method="autoregressive")


# --- several prompts, logs, interruption ---


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("hello\nworld\nand so on\n")
    return path


def test_several_prompts_and_their_totals(tiny: Path, prompts: Path) -> None:
    found = said(tiny, "speculative", "--prompts", str(prompts), "--tokens", "12", "--plain")
    assert [each["prompt_tokens"] for each in found["sequences"]] == [numbers(text) for text in ("hello", "world", "and so on")]
    for key in ("tokens", "seconds", "plain_layer_passes"):
        assert found["totals"][key] == pytest.approx(sum(each[key] for each in found["sequences"]))
    assert found["totals"]["plain"]["sequences"] == 3
    alone = said(tiny, "speculative", "--prompts", str(prompts), "--limit", "1", "--tokens", "12")
    assert alone["sequences"][0]["written"] == found["sequences"][0]["written"]
    stdout, _ = call(*asked(tiny, "speculative", "--prompts", str(prompts), "--tokens", "12", "--plain"))
    assert stdout.count("--- ") == 4
    assert "--- all 3 prompts ---" in stdout
    assert "plain decoding: the same output for " in stdout


@pytest.mark.parametrize("method", CHOICES)
def test_the_simulator_replays_logs_of_all_methods(method: str, tiny: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    _, stderr = call(*asked(tiny, method, "--prompts", str(prompts), "--tokens", "12", "--log", str(path), "-q"))
    assert "own.parquet" in stderr
    log = read_log.load(path)
    assert log.models["target"]["layers"] == LAYERS
    assert len(log.decodings) == len(log.names) == 3
    assert log.table().height > 0
    for each in log.decodings:
        assert each.method == method
        test_replay.same(each)


def test_an_interrupt_keeps_finished_prompts(tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = real_decoding.decode, iter(range(10))

    def interrupted(*arguments: Any, **more: Any) -> Any:
        if next(calls) % 3 == 2:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    monkeypatch.setattr(real_decoding, "decode", interrupted)
    log = tmp_path / "own.parquet"
    arguments = asked(tiny, "autoregressive", "--prompts", str(prompts), "--tokens", "6")
    stdout, stderr = call(*arguments, "--log", str(log), code=130)
    assert "interrupted after 2 of 3 prompts; what was decoded is kept" in stderr
    assert "--- all 2 prompts ---" in stdout
    assert len(read_log.load(log).decodings) == 2
    document = json.loads(call(*arguments, "--json", code=130)[0])
    assert document["interrupted"]
    assert len(document["sequences"]) == 2


# --- the family ---


@pytest.fixture
def family(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_directory, "MODELS", tiny)
    return tiny


def test_model_family_loads_a_model_for_every_role(family: Path) -> None:
    stdout, _ = call("hierarchical", "--model", "family", "--set", "draft_length=2", "--prompt", "a", "--tokens", "4", "--json")
    assert {role: each["name"] for role, each in json.loads(stdout)["models"].items()} == {
        role: f"family:{role}" for role in ("target", "draft", "medium")
    }
    stdout, _ = call("autoregressive", "--model", "family:medium", "--prompt", "a", "--tokens", "4", "--json")
    assert json.loads(stdout)["models"]["target"]["layers"] == DEPTHS["medium"]
    assert "unknown model of the family 'big'" in refused("autoregressive", "--model", "family:big", "--prompt", "a")


# --- refused input: one line, exit code 2, nothing on stdout ---


def refused(*arguments: str) -> str:
    stdout, stderr = call(*arguments, code=2)
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    return stderr


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("speculativ", [], "unknown method 'speculativ'; did you mean speculative?"),
        ("os.path", [], "method 'os.path' is a module without Parameters"),
        ("speculative", ["--set", "draft_lenth=3"], "unknown key method.draft_lenth; did you mean draft_length?"),
        ("speculative", ["--set", "draft_length"], "--set must be KEY=VALUE, such as max_draft_length=8, got 'draft_length'"),
        ("speculative", ["--set", "draft_length=2", "--set", "draft_length=3"], "--set draft_length is given twice"),
        ("speculative", ["--set", "draft_length=2", "--set", "num_speculative_tokens=3"], "is another name of draft_length"),
        ("speculative", [], "method.draft_length is required and has no default; give it with --set draft_length=VALUE"),
        ("speculative", ["--set", "draft_length=two"], "draft_length must be a whole number, got 'two'"),
        ("speculative", ["--set", "draft_length=2", "--set", "layers=9"], "layers must be 5, as target has, got 9; leave it out"),
        ("ppd", ["--set", "exit_layer=9", "--set", "candidates=1"], "exit_layer must be between 1 and layers=5, got 9"),
        ("autoregressive", ["--tokens", "0"], "tokens must be between 1 and"),
        ("autoregressive", ["--tokens", "97"], "must fit the 96 positions of model target (target), got 1 and 97 tokens"),
        ("autoregressive", ["--top-k", "3"], "--top-k is used only with --sample"),
        ("autoregressive", ["--seed", "3"], "--seed is used only with --sample"),
        ("bild", ["--sample"], "--sample is not used by method bild"),
        ("autoregressive", ["--sample", "--temperature", "0"], "temperature must be above 0"),
        ("autoregressive", ["--sample", "--seed", "-1"], "seed must be at least 0, got -1"),
        ("autoregressive", ["--sample", "--set", "sampled=false"], "contradict each other"),
        ("autoregressive", ["--dtype", "float8"], "unknown dtype 'float8'"),
        ("autoregressive", ["--device", "tpu"], "unknown device 'tpu'"),
        ("autoregressive", ["--threads", "0"], "threads must be between 1 and 4096, got 0"),
        ("autoregressive", ["--threads", "99999999999999"], "threads must be between 1 and 4096, got 99999999999999"),
        ("autoregressive", ["--log", "own.csv"], "a log must be named FILE.parquet, got 'own.csv'"),
        ("autoregressive", ["--prompts", "prompts.txt"], "one of --prompt TEXT and --prompts FILE must be given, got both"),
        ("autoregressive", ["--limit", "2"], "--limit is used only with --prompts"),
        ("autoregressive", ["--template", "wmt"], "--template wmt is used only with --prompts; take chat, or leave it out"),
        ("autoregressive", ["--template", "chats"], "unknown template 'chats'; did you mean chat?"),
        ("early_exit", ["--set", "batch=4"], "unknown key method.batch; it is now sequences"),
        (
            "early_exit", ["--set", "sequences=4", "--set", "batching=static"],
            "sequences must be 1, as real models decode one at a time, got 4 sequences; leave out sequences and lengths",
        ),
        (
            "autoregressive", ["--set", "sequences=4"],
            "sequences must be 1, as method autoregressive decodes real sequences one at a time, got sequences=4 with",
        ),
        (
            "speculative", ["--set", "draft_length=2", "--set", "sequences=4"],
            "real batches are static: all sequences of a batch are decoded, got sequences=4 with batching='continuous'; leave out",
        ),
        ("early_exit", ["--heads", "nothing.safetensors"], "there are no heads at nothing.safetensors"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(method: str, more: list[str], words: str, tiny: Path) -> None:
    known = method in registry.names()
    chosen = models(tiny, method) if known else ["--model", str(tiny / "target")]
    assert words in refused(method, *chosen, "--prompt", "a", "--device", "cpu", *more)


def test_incompatible_models_are_refused(tiny: Path, tmp_path: Path) -> None:
    target, draft = (["--model", str(tiny / "target")], ["--draft", str(tiny / "draft")])
    text = ["--prompt", "a"]
    assert "method speculative needs a draft model and has none; give one with --draft" in refused("speculative", *target, *text)
    assert "--draft is not used by method ppd, which has no draft model" in refused("ppd", *target, *draft, *text)
    exits = ["bild", *target, *draft, *text, "--set", "exit_layer=2"]
    assert "--draft is not used by method bild" in refused(*exits)
    assert "model must be a directory, one of the family" in refused("autoregressive", "--model", "nowhere", *text)
    assert "OWNER/NAME of the hub, and '' is none" in refused("autoregressive", "--model", "", *text)
    assert "one of --prompt TEXT and --prompts FILE must be given, got neither" in refused("autoregressive", *target)
    other = put(tmp_path, "draft", letters=[*LETTERS[1:26], "a", *LETTERS[26:]])
    arguments = ["speculative", *target, "--draft", str(other), *text, "--set", "draft_length=2"]
    both = "'a' is token 0 to target and token 25 to the draft draft"
    assert f"models must have the same tokenizer, and {both}" in refused(*arguments)
    whole = put(tmp_path, "medium", kind="t5")
    arguments = ["speculative", *target, "--draft", str(whole), *text, "--set", "draft_length=2"]
    assert "models must be of the same kind, and target has no encoder and medium has an encoder" in refused(*arguments)
    (other / "tokenizer.json").unlink()
    (other / "tokenizer_config.json").unlink()
    assert "model draft has no tokenizer that can be loaded" in refused("autoregressive", "--model", str(other), *text)
    (other / "model.safetensors").write_bytes(b"no weights")
    assert "model draft cannot be loaded" in refused("autoregressive", "--model", str(other), *text)


def test_all_prompts_are_checked_before_decoding(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("short\n" + "long" * 30 + "\n")
    words = refused(*asked(tiny, "autoregressive", "--prompts", str(path)))
    assert re.search(r"prompt \S+: prompt and tokens must fit the 96 positions of model target \(target\), got 120 and 64", words)
    folder = put(tmp_path, "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": None}))
    words = refused("autoregressive", "--model", str(folder), "--prompt", "")
    assert "prompt is empty, and model target has no start token; give a text" in words
    assert "there is no such file" in refused(*asked(tiny, "autoregressive", "--prompts", str(tmp_path / "none.txt")))


def test_logs_are_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text("{}")
    arguments = asked(tiny, "autoregressive", "--prompt", "a", "--log", str(tmp_path / "own.parquet"))
    assert "own.json is there already; remove it" in refused(*arguments)
    assert (tmp_path / "own.json").read_text() == "{}"


def test_an_unwritable_log_is_refused_before_decoding(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = refused(*asked(tiny, "autoregressive", "--prompt", "a", "--log", str(tmp_path / "file" / "own.parquet")))
    assert "file is no folder; choose another place with --log" in words


# --- the Python interface ---


def test_decode_refuses_invalid_models_and_prompts() -> None:
    decoders = real_models.decoders("llama", "draft")
    with pytest.raises(ParameterError, match="--draft is not used by method autoregressive, which drafts with no other model"):
        real_decoding.decode("autoregressive", decoders, [3], 4)
    with pytest.raises(ParameterError, match="prompt must have at least one token"):
        real_decoding.decode("speculative", decoders, [], 4, {"draft_length": 2})
    with pytest.raises(ParameterError, match="tokens between 0 and 28, the vocabulary of model llama target, got 29"):
        real_decoding.decode("speculative", decoders, [3, 29], 4, {"draft_length": 2})


def test_a_sequence_may_fill_the_last_position() -> None:
    """No pass reads the last token: 90 prompt tokens leave room for 7."""
    alone = {"target": real_models.decoders("llama")["target"]}
    assert len(real_decoding.decode("autoregressive", alone, [3] * 90, 7).tokens) == 7
    with pytest.raises(ParameterError, match="must fit the 96 positions"):
        real_decoding.decode("autoregressive", alone, [3] * 90, 8)


def test_reads_are_kept_only_for_a_log() -> None:
    alone = {"target": real_models.decoders("llama")["target"]}
    assert real_decoding.decode("autoregressive", alone, [3], 4).reads == ()
    assert len(real_decoding.decode("autoregressive", alone, [3], 4, log=True).reads) == 4


# --- complete reports, with tiny models instead of loaded ones ---


class Spelling:
    """A tokenizer with a letter per token."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) - ord("a") for each in text]}

    def decode(self, tokens: list[int], **how: bool) -> str:
        assert how == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace loading by tiny models; return the list of requests."""
    asked_: list[Any] = []
    found = {
        role: load_models.LoadedModel(f"a {role}", decoder, Spelling(), f"sum of {role}")
        for role, decoder in real_models.decoders("llama", "draft").items()
    }

    def models_(named: dict[str, str], *how: str) -> dict[str, load_models.LoadedModel]:
        asked_.append((named, *how))
        return {role: found[role] for role in named}

    monkeypatch.setattr(load_models, "models", models_)
    return asked_


SPOKEN = ("speculative", "--model", "big", "--draft", "small", "--set", "draft_length=2", "--tokens", "6")
VERSIONS = {"python": "3.x", "torch": "2.x"}


def on_processor(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["decode", *arguments, "--device", "cpu", "--threads", "1", "-q"])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_document_has_all_options_and_results(
    at_hand: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.x")
    monkeypatch.setattr("calibrate.devices.machine.versions", lambda: {"torch": "2.x"})
    said = json.loads(on_processor(*SPOKEN, "--prompt", "def", "--plain", "--json", "--dtype", "float64").stdout)
    decoders = real_models.decoders("llama", "draft")
    alone = real_decoding.decode("autoregressive", {"target": decoders["target"]}, [3, 4, 5], 6)
    [text], totals = said.pop("sequences"), said.pop("totals")
    about = {"layers": 5, "vocabulary": VOCABULARY}
    assert said == {
        "method": "speculative", "exact": True, "settings": {"draft_length": 2}, "tokens": 6, "seed": 0, "sampling": None,
        "heads": [], "processes": False, "device": "cpu", "dtype": "float64", "versions": VERSIONS, "interrupted": False,
        "provenance": "measured",
        "models": {"target": {"name": "a target", "checksum": "sum of target"} | about,
                   "draft": {"name": "a draft", "checksum": "sum of draft"} | about | {"layers": DEPTHS["draft"]}},
    }  # fmt: skip
    assert at_hand == [({"target": "big", "draft": "small"}, "cpu", "float64")]
    assert (text["prompt"], text["source"], text["prompt_tokens"]) == ("prompt", "the command line", [3, 4, 5])
    assert text["written"] == [*alone.tokens]
    assert text["text"] == Spelling().decode([*alone.tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text["plain"]["first_differences"] == [None]
    assert totals["plain"]["same_sequences"] == 1
    # Sampled with the given parameters and seed, also by plain decoding; each prompt has separate draws.
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "abc"}\n')
    law = ("--sample", "--temperature", "1.5", "--top-k", "7", "--top-p", "0.9", "--seed", "4")
    log = tmp_path / "log.parquet"
    done = on_processor("autoregressive", "--model", "big", "--tokens", "9", "--prompts", str(path), *law, "--plain", "--json",
                        "--log", str(log))  # fmt: skip
    said = json.loads(done.stdout)
    assert (said["seed"], said["sampling"]) == (4, {"temperature": 1.5, "top_k": 7, "top_p": 0.9})
    assert said["settings"] == {"sampled": True}
    first, second = (each["written"] for each in said["sequences"])
    assert first != second
    assert said["totals"]["plain"]["same_sequences"] == 2  # plain decoding uses the same draws
    assert done.stderr == f"log: {log} and log.json\n"
    kept = read_log.load(tmp_path / "log.json")
    assert [[*each.tokens] for each in kept.decodings] == [first, second]
    assert (kept.seed, kept.sampling, kept.versions) == (4, said["sampling"], VERSIONS)
    assert kept.names == tuple(each["prompt"] for each in said["sequences"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept.date)
    law_of = {"sampling": Sampling(1.5, 7, 0.9), "random_draws": RandomDraws(4, 1)}
    again = real_decoding.decode("autoregressive", {"target": decoders["target"]}, [0, 1, 2], 9, {"sampled": True}, **law_of)
    assert [*again.tokens] == second
    lines = on_processor("autoregressive", "--model", "big", "--tokens", "2", "--prompts", str(path)).stdout
    assert lines.count("--- all 2 prompts ---") == 1
    assert "--- all" not in on_processor("autoregressive", "--model", "big", "--tokens", "2", "--prompt", "ab").stdout


def test_parameters_are_parsed_and_checked_before_loading() -> None:
    """Other names and spaces around names are accepted."""
    given = [" num_speculative_tokens = 3 ", "sampled=true"]
    assert decode_command._settings("speculative", given, False) == {"draft_length": 3, "sampled": True}
    assert decode_command._settings("speculative", ["draft_length=3"], True) == {"draft_length": 3, "sampled": True}
    assert decode_command._settings("speculative", [], False) == {}
    for pairs, sample, said in (
        (["draft_length=2", " draft_length =3"], False, "--set draft_length is given twice; give it once"),
        (["draft_length"], False, "KEY=VALUE, such as max_draft_length=8, got 'draft_length'"), (["=3"], False, "got '=3'"),
        ([" =3"], False, "got ' =3'"), (["sampled=false"], True, "--sample and --set sampled=false contradict each other"),
        (["draft_lenght=3"], False, "did you mean .*draft_length"),
    ):
        with pytest.raises(ParameterError, match=said):
            decode_command._settings("speculative", pairs, sample)
    with pytest.raises(ParameterError, match="--sample is not used by method beam, which is greedy; leave it out"):
        decode_command._settings("beam", [], True)
    sampling = decode_command._sampling
    assert sampling(True, None, None, None, None) == Sampling()
    assert sampling(True, 0.5, 3, 0.25, 7) == Sampling(0.5, 3, 0.25)
    assert sampling(False, None, None, None, None) is None
    options = {"--temperature": (1.0, None, None, None), "--top-k": (None, 1, None, None), "--top-p": (None, None, 1.0, None),
               "--seed": (None, None, None, 0)}  # fmt: skip
    for option, law in options.items():
        with pytest.raises(ParameterError, match=f"^{option} is used only with --sample; add that, or leave it out"):
            sampling(False, *law)
    with pytest.raises(ParameterError, match="seed must be at least 0"):
        sampling(True, None, None, None, -1)
    prompts = decode_command._prompts
    for asked_, said in (
        ((None, None, None, None), "must be given, got neither"), (("a", "b", None, None), "must be given, got both"),
        (("a", None, None, 2), "--limit is used only with --prompts; leave it out"),
        (("a", None, "non", None), "unknown template 'non'"),
        (("a", None, "none", None), "--template none is used only with --prompts"),
        (("a", None, "squad", None), "--template squad is used only with --prompts; take chat, or leave it out"),
        (("\ud800", None, None, None), "--prompt must be text in UTF-8, got other bytes"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            prompts(*asked_)
    assert prompts("a", None, "chat", None) == prompts("a", None, None, None) == ["a"]


def test_too_little_memory_is_a_user_error_and_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"target": real_models.decoders("llama")["target"]}
    happens: list[RuntimeError] = [torch.OutOfMemoryError("CUDA out of memory. Tried to"), RuntimeError("a defect")]

    def run(*_: Any) -> None:
        raise happens.pop(0)

    monkeypatch.setattr(real_decoding.Real, "run", run)
    with pytest.raises(ParameterError, match="the device has too little memory for a prompt of 2 tokens and 4 more; take few"):
        real_decoding.decode("autoregressive", alone, [3, 4], 4)
    with pytest.raises(RuntimeError, match="a defect"):
        real_decoding.decode("autoregressive", alone, [3, 4], 4)


def test_too_few_units_name_streams_or_processes() -> None:
    from calibrate.untested_on_gpu.over_streams import Lanes

    alone = {"target": real_models.decoders("llama")["target"]}
    lanes: Any = Lanes.__new__(Lanes)
    for units, words in ((lanes, "streams"), (Units(), "processes")):
        units.units = 2
        given: Any = {"lanes" if units is lanes else "pool": units}
        with pytest.raises(ParameterError, match=f"units must be at least 3, which the method reserves, got 2 {words}"):
            real_decoding.decode("ppd", alone, [3], 4, {"exit_layer": 3, "candidates": 2}, **given)


class Units:
    """Stand-in for a pool of processes."""

    units = 0


def test_vocabularies_must_agree_and_encoders_need_text() -> None:
    both = real_models.decoders("llama", "draft")
    found = {role: load_models.LoadedModel(role, decoder, Spelling(), "") for role, decoder in both.items()}
    found["draft"].decoder.vocabulary = 28
    said = "models must have the same vocabulary, and target has 29 tokens and the draft draft 28; use a draft with the same"
    with pytest.raises(ParameterError, match=said):
        load_models.check(found)
    own = real_models.model.__wrapped__("t5", DEPTHS["target"])  # uncached, because it is changed
    encoding = load_models.LoadedModel("both", transformers_adapter.decoder_of(own, "both"), Spelling(), "")
    assert load_models.tokenize(encoding, "abc") == ((0,), (0, 1, 2))
    with pytest.raises(ParameterError, match="prompt 7 is empty, and the encoder of model both has nothing to read; give a text"):
        load_models.tokenize(encoding, "", "prompt 7")
    with pytest.raises(ParameterError, match="template chat needs a chat template, and model both has none; leave it out"):
        load_models.tokenize(encoding, "abc", chat=True)
    encoding.decoder.config.decoder_start_token_id = encoding.decoder.config.bos_token_id = None
    encoding.decoder.full.generation_config.eos_token_id = None
    with pytest.raises(ParameterError, match="prompt cannot be decoded, and model both has no start token; t"):
        load_models.tokenize(encoding, "abc")
    encoding.decoder.full.generation_config.eos_token_id = [4, 5]
    assert load_models.tokenize(encoding, "abc") == ((4,), (0, 1, 2))  # an end token as start token


def test_each_token_adds_its_piece_of_the_text() -> None:
    """Tokens are decoded after eight prompt tokens; the last of the tokens of a character adds it."""
    seen: list[list[int]] = []

    class Bytes:
        def decode(self, tokens: list[int], **_: bool) -> str:
            seen.append([*tokens])
            return bytes(tokens).decode(errors="replace")

    text = "aé€b".encode()
    assert load_models.pieces(Bytes(), [*b"0123456789"], [*text]) == ["a", "", "é", "", "", "€", "b"]
    assert seen[0] == [*b"23456789"]
    assert load_models.pieces(Bytes(), [*b"01"], [*text[:2]]) == ["a", "\ufffd"]  # an incomplete character stays
    assert load_models.pieces(Bytes(), [], []) == []
