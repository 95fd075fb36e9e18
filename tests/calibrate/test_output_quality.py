"""Output quality of lossy methods on real models: unchanged at their exact limits, otherwise compared with counts by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decode import output_quality, real_decoding
from model.base.checks import ParameterError
from model.methods.skipdecode import algorithm as skipdecode
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY

LAYERS, TOKENS = DEPTHS["target"], 10
PROMPTS = [[int(token) for token in np.random.default_rng(number).integers(0, VOCABULARY, 3 + number)] for number in range(3)]
SAID = {"target_name": "tiny", "source": "measured"}


def measured(folder: Path, method: str, settings: list[dict[str, Any]], *roles: str, **more: Any) -> list[dict[str, Any]]:
    """Measure rows on tiny models in double precision."""
    models = real_models.decoders("llama", *roles, seed=2)
    table = output_quality.measure(folder / "rows.parquet", SAID, method, models, PROMPTS, TOKENS, settings, **more)
    return table.to_dicts()


EXACT = [
    ("bild", {"fallback_threshold": 1.0, "rollback_threshold": 0.0}, ("draft",)),
    ("bild", {"fallback_threshold": 0.0, "rollback_threshold": 0.0}, ("draft",)),  # every uncertain token is rolled back
    ("bild", {"fallback_threshold": 1.0, "rollback_threshold": 0.0, "exit_layer": 2}, ()),
    ("bild", {"fallback_threshold": 1.0, "rollback_threshold": math.inf, "variant": "code"}, ("draft",)),
    ("bild", {"fallback_threshold": 0.0, "rollback_threshold": 0.0, "variant": "code"}, ("draft",)),
    ("early_exit", {"threshold": 1.0}, ()),
    ("early_exit", {"threshold": 1.0, "measure": "state", "fill": "backfill"}, ()),
    ("early_exit", {"exit_layer": LAYERS}, ()),
    ("skipdecode", {"min_layers": LAYERS, "max_layers": LAYERS}, ()),
    ("skipdecode", {"min_layers": LAYERS, "max_layers": LAYERS, "decay_prompt": True}, ()),
]


@pytest.mark.parametrize(("method", "table", "roles"), EXACT)
def test_exact_limits_give_the_output_of_plain_decoding(
    method: str, table: dict[str, Any], roles: tuple[str, ...], tmp_path: Path
) -> None:
    (row,) = measured(tmp_path, method, [table], *roles)
    assert row["agreement"] == row["plain_texts"] == 1.0
    assert row["common_prefix"] == TOKENS
    assert row["tokens"] == len(PROMPTS) * TOKENS
    assert row["log_likelihood"] == pytest.approx(row["plain_log_likelihood"])
    if method != "bild":
        assert row["layer_passes_over_plain"] == pytest.approx(1)
        assert row["mean_layers"] == pytest.approx(LAYERS)
    if method == "skipdecode" or (method == "early_exit" and "exit_layer" in table):
        assert row["flops_over_plain"] == row["weight_bytes_over_plain"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("method", "table", "roles"),
    [
        ("bild", {"fallback_threshold": 0.06, "rollback_threshold": 3.3}, ("draft",)),
        ("bild", {"fallback_threshold": 0.06, "rollback_threshold": 3.3, "variant": "code"}, ("draft",)),
        ("bild", {"fallback_threshold": 0.0, "rollback_threshold": 3.3, "exit_layer": 3}, ()),
        ("early_exit", {"threshold": 0.06}, ()),
        ("early_exit", {"exit_layer": 3}, ()),
        ("skipdecode", {"min_layers": 2, "max_layers": LAYERS}, ()),
    ],
)
def test_rows_equal_counts_by_hand(
    method: str, table: dict[str, Any], roles: tuple[str, ...], tmp_path: Path
) -> None:
    """Agreement and likelihood token by token, from the library's model without a cache."""
    import torch

    (row,) = measured(tmp_path, method, [table], *roles)
    models = real_models.decoders("llama", *roles, seed=2)
    full = models["target"].full
    table = dict(table)
    found = [real_decoding.decode(method, models, prompt, TOKENS, table, log=True) for prompt in PROMPTS]
    agrees, likely, prefixes = [], [], []
    for prompt, each in zip(PROMPTS, found, strict=True):
        for index, token in enumerate(each.tokens):
            logits = real_models.logits(full, [*prompt, *each.tokens[:index]])
            agrees.append(int(logits.argmax()) == token)
            likely.append(float(torch.log_softmax(logits, -1)[token]))
        plain = real_models.reference_tokens(full, prompt, TOKENS)
        prefixes.append(next((index for index in range(TOKENS) if plain[index] != each.tokens[index]), TOKENS))
    assert row["agreement"] == pytest.approx(np.mean(agrees))
    assert row["agreement"] < 1  # otherwise the test compares nothing
    assert row["log_likelihood"] == pytest.approx(np.mean(likely))
    assert row["common_prefix"] == pytest.approx(np.mean(prefixes))
    passes = sum(each.account.layer_passes for each in found)
    assert row["layer_passes_over_plain"] == pytest.approx(
        passes / sum(LAYERS * (len(prompt) - 1 + TOKENS) for prompt in PROMPTS)
    )
    if method == "bild":
        commits = [commit for each in found for commit in each.commits]
        assert {kind: row[f"commits_{kind}"] for kind in output_quality.ENDINGS} == {
            kind: sum(commit.kind == kind for commit in commits) for kind in output_quality.ENDINGS
        }
        reads = [read for each in found for read in each.reads]
        proposed = [read.answer for read in reads if read.question.kind == "confidence"]
        assert row["fallback_rate"] == pytest.approx(np.mean([answer < table["fallback_threshold"] for answer in proposed]))
        judged = sum(read.question.kind == "distance" for read in reads)
        assert row["rollback_rate"] == pytest.approx(sum(commit.kind == "rollback" for commit in commits) / judged)
    elif method == "early_exit":
        left = [read.question.layer for each in found for read in each.reads if read.question.kind == "next"]
        assert row["mean_layers"] == pytest.approx(np.mean(left))
    else:
        known = [skipdecode.Parameters(LAYERS, **real_decoding.scheduled(method, table, len(prompt), TOKENS)) for prompt in PROMPTS]
        assert row["mean_layers"] == pytest.approx(np.mean([skipdecode.schedule(each, TOKENS) for each in known]))
        assert row["prompt"] is None  # prompts differ in length


def test_weight_bytes_are_those_of_the_executed_layers(tmp_path: Path) -> None:
    """Prompts use all layers, each token three of five and the head; counted from the tensors of the library's model."""
    (row,) = measured(tmp_path, "skipdecode", [{"min_layers": 3, "max_layers": 3}])
    full = real_models.decoders("llama", seed=2)["target"].full
    layer = sum(each.numel() for each in full.model.layers[0].parameters() if each.ndim > 1)
    head = full.lm_head.weight.numel()
    count = len(PROMPTS)
    expected = count * LAYERS * layer + count * TOKENS * (3 * layer + head)
    plain = count * LAYERS * layer + count * TOKENS * (LAYERS * layer + head)
    assert row["weight_bytes_over_plain"] == pytest.approx(expected / plain)
    assert expected / plain < row["flops_over_plain"] < 1  # prompts are multi-token passes of the same weights


def test_work_is_compared_per_token_if_lengths_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five layers per generated token, for any number of tokens; prompts use all layers."""
    full = real_models.decoders("llama", seed=2)["target"].full
    plain = [real_models.reference_tokens(full, prompt, TOKENS) for prompt in PROMPTS]
    monkeypatch.setattr(full.generation_config, "eos_token_id", plain[0][2])
    (row,) = measured(tmp_path, "early_exit", [{"exit_layer": 3}])
    ended = [real_models.reference_tokens(full, prompt, TOKENS, stop=plain[0][2]) for prompt in PROMPTS]
    before = sum(map(len, ended))
    assert row["tokens"] != before, "equal numbers of tokens: choose another end token"
    prompts = sum(LAYERS * (len(prompt) - 1) for prompt in PROMPTS)
    work, other = prompts + 3 * row["tokens"], prompts + LAYERS * before
    assert row["layer_passes_over_plain"] == pytest.approx((work / row["tokens"]) / (other / before))


def test_a_draft_that_always_falls_back_costs_its_passes(tmp_path: Path) -> None:
    """The draft reads the prompt and makes a pass for each token but the last, and none of its tokens is used."""
    (row,) = measured(tmp_path, "bild", [{"fallback_threshold": 1.0, "rollback_threshold": 0.0}], "draft")
    assert (row["fallback_rate"], row["rollback_rate"], row["commits_rollback"]) == (1.0, None, 0)
    assert row["draft_passes_per_token"] == pytest.approx((1 + TOKENS - 1) / TOKENS)
    assert row["commits_fallback"] == len(PROMPTS) * (TOKENS - 1)
    assert row["weight_bytes_over_plain"] > 1


def test_a_draft_that_never_falls_back_generates_almost_all(tmp_path: Path) -> None:
    """Without fallback and rollback, all tokens but the last are the draft's, and the target makes one pass for them."""
    (row,) = measured(tmp_path, "bild", [{"fallback_threshold": 0.0, "rollback_threshold": math.inf}], "draft")
    assert (row["fallback_rate"], row["rollback_rate"], row["commits_cap"]) == (0, 0, len(PROMPTS))
    assert row["rollback_threshold"] == math.inf
    # This includes the prompt, which is read with the first tokens.
    assert row["target_passes_per_token"] <= 2 / TOKENS
    assert row["agreement"] < 1


def test_finished_settings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [{"threshold": value} for value in (0.2, 0.5, 1.0)]
    whole = measured(tmp_path / "whole", "early_exit", settings)

    def stop(done: int, total: int, at: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, "early_exit", settings, report=stop)
    assert not (tmp_path / "rows.parquet").exists()
    with pytest.raises(ParameterError, match="interrupted run; resume with --resume"):
        measured(tmp_path, "early_exit", settings)
    with pytest.raises(ParameterError, match="settings of another run: settings differs"):
        measured(tmp_path, "early_exit", settings[1:], resume=True)
    made: list[Any] = []
    row = output_quality.row

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return row(*arguments)

    monkeypatch.setattr(output_quality, "row", counted)
    again = measured(tmp_path, "early_exit", settings, resume=True)
    assert len(made) == 1
    assert not (tmp_path / "rows.parts").exists()
    same = [name for name in whole[0] if "seconds" not in name]
    assert [[row[name] for name in same] for row in again] == [[row[name] for name in same] for row in whole]


def test_a_table_is_the_same_in_both_formats(tmp_path: Path) -> None:
    rows = measured(tmp_path, "early_exit", [{"exit_layer": layer} for layer in (3, LAYERS)])
    models = real_models.decoders("llama", seed=2)
    path = tmp_path / "rows.csv"
    output_quality.measure(path, SAID, "early_exit", models, PROMPTS, TOKENS, [{"exit_layer": layer} for layer in (3, LAYERS)])
    read = pl.read_csv(path)
    assert read["agreement"].to_list() == pytest.approx([row["agreement"] for row in rows])
    assert read["exit_layer"].to_list() == [3, LAYERS]


@pytest.mark.parametrize(
    ("method", "table", "roles", "said"),
    [
        ("speculative", {"draft_length": 3}, ("draft",), "must be lossy, one of bild, early_exit, skipdecode, got speculative"),
        ("bild", {"fallback_threshold": 0.5}, ("draft",), "rollback_threshold is required"),
        ("bild", {"fallback_threshold": 1.5, "rollback_threshold": 1.0}, ("draft",), "fallback_threshold must be between 0 and 1"),
        ("bild", {"fallback_threshold": 0.5, "rollback_threshold": 1.0}, (), "method bild needs a draft model"),
        ("early_exit", {}, (), "threshold or exit_layer is required"),
        ("early_exit", {"treshold": 0.5}, (), "did you mean threshold"),
        (
            "skipdecode",
            {"min_layers": 2, "max_layers": 5, "sequence_length": 12},
            (),
            "tokens must be at most sequence_length-prompt=7",
        ),
        ("early_exit", {"threshold": 0.5, "sequences": 2, "batching": "static"}, (), "sequences must be 1"),
    ],
)
def test_invalid_settings_are_refused_before_decoding(
    method: str, table: dict[str, Any], roles: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=said):
        measured(tmp_path, method, [table], *roles)
    assert not [*tmp_path.iterdir()]


def test_impossible_kept_outputs_are_refused(tmp_path: Path) -> None:
    """Outputs of plain decoding are kept with the rows: each has 1 to 10 tokens of the vocabulary, and a time."""
    def stop(done: int, total: int, at: str) -> None:
        raise KeyboardInterrupt

    settings = [{"threshold": 1.0}]
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, "early_exit", settings, report=stop)
    path = tmp_path / "rows.parts" / "plain.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    first, *others = said["found"]
    bound = f"up to {TOKENS} tokens below the vocabulary={VOCABULARY} and a time above 0 for each of 3 prompts"
    many: list[Any] = [[], [1] * (TOKENS + 1), [-1], [VOCABULARY]]
    wrong: list[Any] = [*({"tokens": each} for each in many), {"seconds": 0.0}]
    for found in [*([first | each, *others] for each in wrong), [*others], [*others, first | wrong[0]], [first, *said["found"]]]:
        path.write_text(json.dumps(said | {"found": found}), encoding="utf-8")
        with pytest.raises(ParameterError, match=f"^rows.parts/plain.json must hold {bound}; remove it and resume$"):
            measured(tmp_path, "early_exit", settings, resume=True)
    for broken in ("{", "[]", "{}", json.dumps(said | {"found": 3}), json.dumps(said | {"asked": 3})):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(ParameterError, match=r"^rows.parts holds plain.json, which cannot be read; remove it and resume$"):
            measured(tmp_path, "early_exit", settings, resume=True)
    # Accepted at the bounds: a single token, the last of the vocabulary.
    found = [first | {"tokens": [VOCABULARY - 1], "seconds": 1e-9}, *others]
    path.write_text(json.dumps(said | {"found": found}), encoding="utf-8")
    (row,) = measured(tmp_path, "early_exit", settings, resume=True)
    assert row["plain_texts"] == pytest.approx(2 / 3)


def test_work_ratios_are_none_for_unsupported_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ParameterError("no such type")

    monkeypatch.setattr(output_quality.shape_configs, "from_config", refused)
    (row,) = measured(tmp_path, "early_exit", [{"threshold": 1.0}])
    assert (row["flops_over_plain"], row["weight_bytes_over_plain"]) == (None, None)
    assert row["layer_passes_over_plain"] == pytest.approx(1)


def test_rows_have_their_settings_and_the_seconds_of_all_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decoding takes a second more than the one before, plain decoding first: 1 + 2 + 3 s, then 4 + 5 + 6 s."""
    count, decode, reported = iter(range(1, 99)), real_decoding.decode, list[Any]()
    monkeypatch.setattr(real_decoding, "decode", lambda *args, **more: replace(decode(*args, **more), seconds=float(next(count))))
    rows = measured(tmp_path, "early_exit", [{"exit_layer": 3}, {"threshold": 1.0}], report=lambda *said: reported.append(said))
    assert reported == [(0, 2, "exit_layer=3"), (1, 2, "threshold=1.0")]
    assert [(row["plain_seconds"], row["seconds"]) for row in rows] == [(6, 15), (6, 24)]
    assert [row["seconds_over_plain"] for row in rows] == pytest.approx([15 / 6, 24 / 6])
    for row in rows:
        assert (row["method"], row["sequences"], row["tokens"], row["target_name"]) == ("early_exit", 3, 3 * TOKENS, "tiny")
        assert row["date"] == datetime.now(tz=UTC).date().isoformat()
        assert row["fallback_rate"] is row["rollback_rate"] is row["commits_fallback"] is row["commits_again"] is None
        assert row["agreement_low"] <= row["agreement"] <= row["agreement_high"]
    assert (rows[0]["exit_layer"], rows[0]["threshold"], rows[1]["exit_layer"], rows[1]["threshold"]) == (3, None, None, 1.0)


def test_settings_are_all_combinations() -> None:
    assert output_quality.settings_of({"a": 1}, {"b": [1, 2], "c": [3, 4]}) == [
        {"a": 1, "b": b, "c": c} for b in (1, 2) for c in (3, 4)
    ]
    with pytest.raises(ParameterError, match="a is both fixed and swept"):
        output_quality.settings_of({"a": 1}, {"a": [1, 2]})


def test_an_encoder_reads_the_source_of_each_prompt(tmp_path: Path) -> None:
    models: Any = real_models.decoders("t5", "draft", seed=2)
    sources, prompts = [(1, 2, 3), (5, 4), (6, 7, 8, 9)], [[0]] * 3
    settings = [{"fallback_threshold": 1.0, "rollback_threshold": 0.0}, {"fallback_threshold": 0.0, "rollback_threshold": math.inf}]
    out = tmp_path / "all.parquet"
    own = output_quality.measure(out, SAID, "bild", models, prompts, TOKENS, settings, sources=sources).to_dicts()
    assert own[0]["agreement"] == own[0]["plain_texts"] == 1.0
    assert own[1]["agreement"] < 1
    shares = []
    for number, source in enumerate(sources):  # each alone
        out = tmp_path / f"{number}.parquet"
        alone = output_quality.measure(out, SAID, "bild", models, [[0]], TOKENS, settings, sources=[source]).to_dicts()
        shares.append((alone[1]["agreement"], alone[1]["plain_log_likelihood"]))
    assert [own[1][name] for name in ("agreement", "plain_log_likelihood")] == pytest.approx(np.mean(shares, axis=0))
    assert len({each for _, each in shares}) == 3  # the sources matter


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.family import Size, train_model

    folder = tmp_path_factory.mktemp("family")
    train_model(folder, "target")
    train_model(folder, "draft", Size(1, 32, 64))
    return folder


@pytest.mark.usefixtures("unrendered")
def test_quality_command_writes_rows_and_figures(family: Path, tmp_path: Path) -> None:
    arguments = [
        "quality", "bild", "--model", str(family / "target"), "--draft", str(family / "draft"), "--sweep",
        "fallback_threshold=0.2,1", "--sweep", "rollback_threshold=0,inf", "--limit", "2", "--tokens", "6", "--prompt-tokens", "8",
        "--threads", "1", "-q", "-o", str(tmp_path / "rows.csv"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*arguments, "--json", "--figures", str(tmp_path / "pictures")])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    said = json.loads(done.stdout)
    assert [(row["fallback_threshold"], row["rollback_threshold"]) for row in said["rows"]] == [
        (0.2, 0.0), (0.2, "inf"), (1.0, 0.0), (1.0, "inf")
    ]  # fmt: skip
    assert {row["source"] for row in said["rows"]} == {"measured"}
    assert said["rows"][2]["agreement"] == 1.0
    assert pl.read_csv(tmp_path / "rows.csv").height == 4
    assert {path.suffix for path in (tmp_path / "pictures").iterdir()} == {".png", ".svg"}
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr == "error: out must be a new file, and rows.csv is there; give another, or remove it\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bidl"], "unknown method 'bidl'; did you mean bild?"),
        (["early_exit", "--model", "nowhere"], "model must be a directory"),
        (["bild", "--set", "fallback_threshold"], "--set must be KEY=VALUE"),
        (["bild", "--sweep", "=3"], "--sweep must be KEY=VALUES"),
        (["bild", "--set", "max_draft_length=1", "--sweep", "max_draft_length=1,2"], "max_draft_length is both fixed and swept"),
        (["bild", "--set", "fallback_treshold=1"], "did you mean fallback_threshold?"),
        (["bild", "--set", "max_draft_length=1", "--set", "max_draft_length=2"], "--set max_draft_length is given twice"),
        (["speculative"], "method must be lossy, one of bild, early_exit, skipdecode, got speculative"),
        (["bild", "--model", "."], "method bild needs a draft model"),
        (["early_exit", "--model", ".", "--draft", "."], "--draft is not used by method early_exit"),
    ],
)
def test_user_errors_are_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quality", *arguments, "-o", str(tmp_path / "rows.csv")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
