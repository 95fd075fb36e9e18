"""Position logs: they hold the predictions of models, and the simulator that replays them reproduces real runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decode import position_logging as logging
from calibrate.decode import rate_tables, titled_table
from calibrate.interpreters.in_one_process import RandomDraws, Real, Sampling
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import DraftOutcomes, World
from model.logs import position_log
from model.logs.position_log import PositionLog
from model.methods.adaptive import algorithm as adaptive
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.ngram import algorithm as ngram
from model.methods.ppd import algorithm as ppd
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import rates_from_logs
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from sim.scenarios.outcomes import exit_outcomes
from tests.support import real_models
from tests.support.real_models import DEPTHS, VOCABULARY
from tests.support.tiers import examples

LAYERS, TOKENS = DEPTHS["target"], 12
SAID = {
    "target": {"name": "target", "checksum": "0", "layers": DEPTHS["target"]}, "heads": None, "prompts": [], "max_tokens": TOKENS,
    "draft": {"name": "draft", "checksum": "0", "layers": DEPTHS["draft"]}, "sampling": None,
    "seed": 0, "dtype": "float64", "versions": {}, "date": "2026-01-01",
}  # fmt: skip
PROMPTS = {number: [int(token) for token in np.random.default_rng(number).integers(0, VOCABULARY, 5)] for number in range(6)}


def kin(seed: int = 0) -> dict[str, Any]:
    """A target, and a draft model of the target's first layers, some of whose drafts are accepted."""
    from calibrate.decoders.transformers_adapter import decoder_of

    decoders = real_models.decoders("llama", "draft", seed=seed)
    full, small = real_models.model("llama", LAYERS, seed), real_models.model("llama", DEPTHS["draft"], seed + 1000)
    state = {name: value for name, value in full.state_dict().items() if name in small.state_dict()}
    small.load_state_dict(state)
    return decoders | {"draft": decoder_of(small, "draft")}


def made(seed: int = 0, **more: Any) -> PositionLog:
    """A log of six short sequences."""
    decoders = kin(seed)
    table = logging.log_rows(decoders["target"], PROMPTS, TOKENS, draft=decoders["draft"], **more)
    sampling = more.get("sampling")
    return PositionLog(table, SAID | {"sampling": None if sampling is None else vars(sampling)})


def test_sequences_are_those_of_the_target() -> None:
    log = made()
    for number, tokens in enumerate(log.by_sequence(log.table["token"].to_numpy())):
        assert tokens.tolist() == real_models.reference_tokens(real_models.model("llama", LAYERS), PROMPTS[number], TOKENS)


def raw_last(full: Any, before: Any) -> Any:
    """States after the last layer, before the final norm that the library applies to its output."""
    import torch

    kept: list[Any] = []
    with torch.inference_mode():
        handle = full.model.layers[-1].register_forward_hook(lambda module, given, made: kept.append(made))
        positions = torch.arange(before.shape[1])[None]
        rotation = full.model.rotary_emb(before, positions)
        mask = torch.full((1, 1, before.shape[1], before.shape[1]), -torch.inf, dtype=before.dtype).triu(1)
        full.model.layers[-1](before, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        handle.remove()
    made = kept[0]
    return (made[0] if isinstance(made, tuple) else made)[0]


def test_every_column_equals_the_library_on_the_whole_sequence() -> None:
    """Ranks, confidences and probabilities from one pass of the library's model over prompt and output, with its own cache."""
    import torch

    decoders, log = kin(), made()
    full, small = decoders["target"].full, decoders["draft"].full
    for number, rows in enumerate(log.table.partition_by("prompt", maintain_order=True)):
        tokens = rows["token"].to_list()
        ids = torch.tensor([PROMPTS[number] + tokens[:-1]])
        with torch.inference_mode():
            passed = full(ids, output_hidden_states=True)
            raw = passed.hidden_states
            q = torch.softmax(small(ids).logits[0, -TOKENS:], -1)
            after_each = [states[0, -TOKENS:] for states in passed.hidden_states[1:]]
            said = [full.lm_head(states if states is after_each[-1] else full.model.norm(states)) for states in after_each]
        p = torch.softmax(passed.logits[0, -TOKENS:], -1)
        for layer, logits in enumerate(said, start=1):
            logit = logits.gather(1, torch.tensor(tokens)[:, None])
            ranks = (logits > logit).sum(-1) + 1
            assert rows["rank_common"].to_numpy()[:, layer - 1].tolist() == ranks.tolist()
            assert rows["confidence"].to_numpy()[:, layer - 1] == pytest.approx(logits.softmax(-1).amax(-1).numpy(), rel=1e-5)
            before = passed.hidden_states[layer - 1][0, -TOKENS:]
            after = raw[layer][0] if layer < LAYERS else raw_last(full, passed.hidden_states[LAYERS - 1])
            alike = torch.cosine_similarity(before, after[-TOKENS:], dim=-1)
            assert rows["saturation"].to_numpy()[:, layer - 1] == pytest.approx(alike.numpy(), rel=1e-4)
        best = q.argmax(-1)
        assert rows["draft_token"].to_list() == best.tolist()
        assert rows["overlap"].to_numpy() == pytest.approx(torch.minimum(p, q).sum(-1).numpy(), rel=1e-5)
        index = torch.arange(TOKENS)
        assert rows["q_token"].to_numpy() == pytest.approx(q[index, torch.tensor(tokens)].numpy(), rel=1e-5)
        assert rows["p_draft"].to_numpy() == pytest.approx(p[index, best].numpy(), rel=1e-5)
        assert rows["p_token"].to_numpy() == pytest.approx(p[index, torch.tensor(tokens)].numpy(), rel=1e-5)
        assert rows["q_draft"].to_numpy() == pytest.approx(q[index, best].numpy(), rel=1e-5)
        assert rows["draft_confidence"].to_numpy() == pytest.approx(q.amax(-1).numpy(), rel=1e-5)
        assert rows["distance"].to_numpy() == pytest.approx(-p[index, best].log().numpy(), rel=1e-5)


def test_accepted_lengths_are_those_of_drafts_that_start_there() -> None:
    """A speculative run after the sequence up to a position accepts this number of tokens in its first round."""
    decoders, log = kin(), made()
    for number, lengths in enumerate(log.column("accepted")):
        tokens = PROMPTS[number] + log.by_sequence(log.table["token"].to_numpy())[number].tolist()
        for position in range(0, TOKENS - 1, 3):
            room = TOKENS - position
            steps = speculative.decode(speculative.Parameters(LAYERS, room - 1, draft_layers=2), tokens[: 5 + position], room)
            first = Real(decoders).run(steps, room).committed[0]
            assert len(first.tokens) - 1 == min(lengths[position], room - 1)


def test_ranks_are_those_of_the_draft_along_the_text() -> None:
    """Against the library, from scratch; a rank of 1 is an accepted greedy draft."""
    log, decoders = made(), kin()
    ranks = log.draft_ranks()
    for number, (prompt, own) in enumerate(zip(PROMPTS.values(), ranks, strict=True)):
        text = [*prompt, *log.by_sequence(log.table["token"].to_numpy())[number].tolist()]
        for position, rank in enumerate(own.tolist()):
            scores = real_models.logits(decoders["draft"].full, text[: len(prompt) + position])
            order = scores.argsort(descending=True, stable=True).tolist()
            assert rank == order.index(text[len(prompt) + position]) + 1
    assert [(each == 1).tolist() for each in ranks] == [(each > 0).tolist() for each in log.column("accepted")]
    assert len({*np.concatenate(ranks).tolist()}) > 2


def test_groups_and_order_do_not_matter() -> None:
    decoders = kin()
    whole = logging.log_rows(decoders["target"], PROMPTS, TOKENS, draft=decoders["draft"])
    for number, prompt in PROMPTS.items():
        alone = logging.log_rows(decoders["target"], {number: prompt}, TOKENS, draft=decoders["draft"])
        same = whole.filter(pl.col("prompt") == number)
        for name in ("token", "rank_common", "draft_token", "accepted"):
            assert alone[name].to_list() == same[name].to_list()


# --- the replay reproduces the run ---


def replayed(
    log: PositionLog, number: int, module: Any, parameters: Any, layer: int | None = None, k: int = 1, form: str = "literal"
) -> tuple[Any, Any]:
    """The real run of a prompt, and the simulation with the outcomes of the log."""
    prompt = PROMPTS[number]
    real = Real(kin()).run(module.decode(parameters, prompt, TOKENS), TOKENS)
    matches = [] if layer is None else log.matches(layer, k, form=form)[number].tolist()
    survivors = log.column("accepted")[number].tolist()
    world = World(len(prompt), LAYERS, matches, {"draft": DraftOutcomes("target", survivors)})
    # In the simulation a token is its position; the prompt has the same length.
    steps = module.decode(parameters, [*range(len(prompt))], TOKENS)
    return real, simulate(steps, TOKENS, Cluster(parameters.units), UnitCost(LAYERS, cost_ratio=0.1), world)


def agree(real: Any, run: Any) -> None:
    """Assert the same commits with equal numbers of tokens, and the same passes."""
    assert [(step.kind, len(step.tokens)) for step in real.committed] == [(kind, count) for _, kind, count in run.commits]
    assert real.rounds == run.rounds
    assert real.account.passes_by_kind == run.account.passes_by_kind


@given(number=st.sampled_from([*PROMPTS]), form=st.sampled_from(ppd.FORMS), k=st.integers(1, 3), data=st.data())
@settings(max_examples=examples(16, 250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_replay_reproduces_ppd(number: int, form: str, k: int, data: Any) -> None:
    least = {"literal": 3, "eager": 3, "nested": 1 if k < 3 else 2, "flat": 1}[form]
    layer = data.draw(st.integers(least, LAYERS - 1))
    batched = form != "nested" and data.draw(st.booleans())
    agree(*replayed(made(), number, ppd, ppd.Parameters(LAYERS, layer, k, form, batched=batched), layer, k, form))


@given(number=st.sampled_from([*PROMPTS]), gamma=st.integers(0, 8))
@settings(max_examples=examples(16, 250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_replay_reproduces_speculative_decoding(number: int, gamma: int) -> None:
    agree(*replayed(made(), number, speculative, speculative.Parameters(LAYERS, gamma, draft_layers=2)))


@pytest.mark.parametrize("policy", ["heuristic", "gradient", "optimum"])
@pytest.mark.parametrize("number", PROMPTS)
def test_replay_reproduces_adaptive_drafting(policy: str, number: int) -> None:
    more = {} if policy == "heuristic" else {"believed_cost_ratio": 0.1}
    agree(*replayed(made(), number, adaptive, adaptive.Parameters(LAYERS, policy, max_draft_length=6, draft_layers=2, **more)))


def test_replay_reproduces_plain_decoding() -> None:
    agree(*replayed(made(), 0, autoregressive, autoregressive.Parameters(LAYERS)))


def test_some_drafts_and_candidates_are_right_and_some_are_not() -> None:
    """Otherwise the tests above would compare nothing."""
    log = made()
    assert 0.05 < np.concatenate(log.agreements()).mean() < 0.95
    assert 0.05 < np.concatenate(log.matches(3, 1)).mean() < 0.98


# --- sampled sequences ---


def test_sampled_drafts_are_accepted_at_the_rate_of_the_log() -> None:
    """Accepted / tested of sampled runs equals the mean of sum min(p, q) within 3.3 standard errors, which a correct program passes
    999 times in 1000."""
    sampling = Sampling(top_k=6)
    decoders = kin()
    prompts = dict.fromkeys(range(12), PROMPTS[0])
    table = logging.log_rows(decoders["target"], prompts, 4, draft=decoders["draft"], sampling=sampling, seed=3)
    first = table.filter(pl.col("position") == 0)["overlap"].to_numpy()
    assert np.ptp(first) < 1e-6  # the same prompt has the same distributions
    accepted = [
        Real(decoders, sampling=sampling, random_draws=RandomDraws(5, number))
        .run(speculative.decode(speculative.Parameters(LAYERS, 1, sampled=True, draft_layers=2), PROMPTS[0], 2), 2)
        .committed[0]
        .tokens
        for number in range(400)
    ]
    rate, beta = np.mean([len(tokens) == 2 for tokens in accepted]), float(first[0])
    assert abs(rate - beta) < 3.3 * np.sqrt(beta * (1 - beta) / 400)


def test_sampled_sequences_equal_plain_decoding_with_the_same_draws() -> None:
    sampling = Sampling(temperature=0.8, top_k=9)
    sequences = made(sampling=sampling).table.partition_by("prompt", maintain_order=True)
    for number, rows in enumerate(sequences):
        real = Real(kin(), sampling=sampling, random_draws=RandomDraws(0, number))
        steps = autoregressive.decode(autoregressive.Parameters(LAYERS, sampled=True), PROMPTS[number], TOKENS)
        assert real.run(steps, TOKENS).tokens == rows["token"].to_list()


def test_acceptance_given_the_token_has_the_mean_of_the_overlap() -> None:
    log = made(sampling=Sampling(), seed=1)
    chances, overlap = np.concatenate(log.acceptance_probabilities()), np.concatenate(log.column("overlap"))
    difference = chances - overlap  # of mean zero at each position, given the tokens before it
    assert abs(difference.mean()) < 3.3 * difference.std(ddof=1) / np.sqrt(difference.size)


# --- files and commands ---


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = made()
    path = position_log.save(log, tmp_path / "log.json")
    again = position_log.load(path)
    assert again.table.equals(log.table)
    assert again.header == log.header


def test_truncated_and_other_files_are_refused(tmp_path: Path) -> None:
    path = position_log.save(made(), tmp_path / "log.json")
    said, table = path.read_text(), path.with_suffix(".parquet").read_bytes()

    def refused(match: str, about: str = said, content: bytes = table) -> None:
        path.write_text(about)
        path.with_suffix(".parquet").write_bytes(content)
        with pytest.raises(ParameterError, match=match):
            position_log.load(path)

    refused(r"log\.json: its table log\.parquet is not the one", content=table[: len(table) // 2])
    refused("cannot be read as JSON", said[: len(said) // 2])
    refused("schema_version must be 2, got 99", json.dumps(json.loads(said) | {"schema_version": 99}))
    refused("part must be 'positions'.*got 'own'", json.dumps(json.loads(said) | {"part": "own"}))
    refused(
        "part must be 'positions'.*got 'own'", '{"schema_version": 2, "part": "own", "decodings": []}'
    )  # a log of calibrate decode
    for content in (b"", b"XXXX" + table[4:-4] + b"XXXX", table[:500]):
        own = json.dumps(json.loads(said) | {"sha256": hashlib.sha256(content).hexdigest()})
        refused(r"log\.json: its table log\.parquet:? (it )?cannot be read as Parquet: .*; log it again", own, content)
    refused("not a decision log", "{}")
    path.with_suffix(".parquet").unlink()
    path.write_text(said)
    with pytest.raises(ParameterError, match="is missing from the same folder"):
        position_log.load(path)
    with pytest.raises(ParameterError, match="unknown log 'famly'"):
        position_log.load("famly")


def _by_layer(value: int, layers: int = LAYERS) -> pl.Series:
    return pl.Series([[value] * layers] * (len(PROMPTS) * TOKENS), dtype=pl.Array(pl.Int32, layers))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("foo", pl.lit(1), "unknown column foo"),
        ("accepted", pl.col("accepted").cast(pl.String), "column accepted must be whole numbers, none missing, got String"),
        ("accepted", pl.lit(None, dtype=pl.Int32), "column accepted must be whole numbers, none missing"),
        ("accepted", pl.lit(-1, dtype=pl.Int32), "column accepted must be at least 0, got -1"),
        ("accepted", pl.lit(99, dtype=pl.Int32), "column accepted must be at most the remaining tokens"),
        ("overlap", pl.lit(7.0), r"column overlap must be between 0 and 1, got 7\.0"),
        ("overlap", pl.lit(float("nan")), "column overlap must be between 0 and 1, got nan"),
        ("rank_common", pl.lit("x"), "column rank_common must be whole numbers, one for each layer"),
        ("rank_common", _by_layer(0), "column rank_common must be at least 1, got 0"),
        ("rank_trained", _by_layer(1, 3), "column rank_trained must be whole numbers, one for each layer"),
        ("position", pl.col("position").reverse(), "rows must be ordered by prompt"),
        ("prompt", pl.col("prompt").reverse(), "rows must be ordered by prompt"),
        ("token", pl.lit(2**63, dtype=pl.UInt64), f"column token must be between 0 and {2**31 - 1}, got {2**63}"),
    ],
)
def test_impossible_columns_are_refused(column: str, value: Any, message: str) -> None:
    log = made()
    with pytest.raises(ParameterError, match=message):
        PositionLog(log.table.with_columns(value.alias(column)), log.header)


@pytest.mark.parametrize("token", [2**63, 10**400, -1], ids=["64 bits", "400 digits", "negative"])
def test_a_token_that_no_vocabulary_has_is_refused(token: int, tmp_path: Path) -> None:
    log = made()
    prompts = [{"tokens": [3]}, {"tokens": [3, 4]}]
    path = position_log.save(PositionLog(log.table, {**log.header, "prompts": prompts}), tmp_path / "log.json")
    said = json.loads(path.read_text())
    assert position_log.load(path).header["prompts"] == said["prompts"]
    said["prompts"][1]["tokens"][1] = token
    path.write_text(json.dumps(said))
    with pytest.raises(ParameterError, match=rf"log\.json: prompts\[1\]\.tokens\[1\] must be between 0 and {2**31 - 1}, got "):
        position_log.load(path)


def test_header_must_agree_with_the_columns() -> None:
    log = made()
    with pytest.raises(ParameterError, match="must name its draft, got none"):
        PositionLog(log.table, {**log.header, "draft": None})
    with pytest.raises(ParameterError, match="column rank_common must be whole numbers, one for each layer"):
        PositionLog(log.table, {**log.header, "target": {"name": "target", "layers": LAYERS + 1}})


def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    decoders, prompts = kin(), [*PROMPTS.values()]
    said = SAID
    target, draft = decoders["target"], decoders["draft"]
    whole, _ = logging.write_log(tmp_path / "whole.json", said, target, prompts, TOKENS, draft=draft, group=2)

    def stop(done: int, total: int, at: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    out = tmp_path / "log.json"
    with pytest.raises(KeyboardInterrupt):
        logging.write_log(out, said, decoders["target"], prompts, TOKENS, draft=decoders["draft"], group=2, report=stop)
    assert not out.exists()
    with pytest.raises(ParameterError, match="interrupted log; resume with --resume"):
        logging.write_log(out, said, decoders["target"], prompts, TOKENS, draft=decoders["draft"], group=2)
    with pytest.raises(ParameterError, match="parts of another log: seed differs"):
        logging.write_log(out, said | {"seed": 1}, decoders["target"], prompts, TOKENS, group=2, resume=True)
    part = next(out.with_suffix(".parts").glob("*.parquet"))
    content = part.read_bytes()
    part.write_bytes(content[:100])
    with pytest.raises(ParameterError, match=r"log\.parts/00000\.json: .*sha256.*; remove log\.parts/00000\.json, and --resume"):
        logging.write_log(out, said, decoders["target"], prompts, TOKENS, group=2, resume=True)
    part.write_bytes(content)
    own = part.with_suffix(".json")
    kept = own.read_text()
    own.write_text(json.dumps(json.loads(kept) | {"schema_version": 99}))
    with pytest.raises(ParameterError, match=r"00000\.json: schema_version must be \d+, got 99; log it again; remove log\.parts/0"):
        logging.write_log(out, said, decoders["target"], prompts, TOKENS, group=2, resume=True)
    own.write_text(kept)
    tomorrow = said | {"date": "2026-01-02"}
    again, spent = logging.write_log(out, tomorrow, target, prompts, TOKENS, draft=draft, group=2, resume=True)
    assert again.header["date"] == "2026-01-02"
    assert again.table.equals(whole.table)
    assert spent.total > 0
    assert not out.with_suffix(".parts").exists()


def test_invalid_logs_are_refused_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders, prompts = kin(), [*PROMPTS.values()]
    monkeypatch.setattr(logging, "log_rows", lambda *_, **__: pytest.fail("prompts were decoded"))

    def refused(match: str, out: Path, tokens: int = TOKENS, **more: Any) -> None:
        with pytest.raises(ParameterError, match=match):
            logging.write_log(out, SAID, decoders["target"], prompts, tokens, **more)

    refused(r"must fit the 96 positions of model llama target \(target\), got 5 and 600 tokens", tmp_path / "log.json", 600)
    short = kin()["draft"]
    short.max_positions = 9
    refused(r"must fit the 9 positions of model draft \(draft\), got 5 and 12 tokens", tmp_path / "log.json", draft=short)
    (tmp_path / "log.parquet").write_text("another file")
    refused("out must be a new file, and log.parquet is there", tmp_path / "log.json")
    refused("log.parquet is no folder; choose another place with -o", tmp_path / "log.parquet" / "a" / "log.json")
    monkeypatch.setattr("os.access", lambda *_: False)
    refused("cannot be written to; choose another place with -o", tmp_path / "more" / "log.json")
    assert [path.name for path in tmp_path.iterdir()] == ["log.parquet"]
    assert (tmp_path / "log.parquet").read_text() == "another file"


def test_match_rates_have_a_row_for_each_head_of_a_layer() -> None:
    """Only layers 2 and 3 have trained heads, whose ranks are better by one."""
    log = made()
    common = log.table["rank_common"].to_numpy()
    ranks = np.maximum(common - 1, 1) * np.isin(np.arange(1, LAYERS + 1), (2, 3))
    table = log.table.with_columns(pl.Series("rank_trained", ranks, log.table.schema["rank_trained"]))
    found = PositionLog(table, log.header | {"heads": {"name": "heads", "checksum": "0"}})
    rows = {row[:3]: row[3] for row in rate_tables.matches(found, [1, 2], position_log.HEADS).rows}
    heads = [(layer, "N") for layer in range(1, LAYERS)] + [(2, "Y"), (3, "Y")]
    assert {*rows} == {(*each, k) for each in heads for k in (1, 2)}
    for (layer, head, k), rate in rows.items():
        assert rate == pytest.approx((common[:, layer - 1] <= k + (head == "Y")).mean())
    by_position = next(each for each in rate_tables.tables(found, [1], [1], 0.1) if "by output position" in each.title)
    assert [row[0] for row in by_position.rows] == [2, 3]
    assert "trained head" in by_position.title


def test_rate_tables_count_the_rows_of_the_log() -> None:
    log = made()
    found = {table.title: table for table in rate_tables.tables(log, [1, 2], [1, 3], 0.1)}
    matches = next(table for title, table in found.items() if title.startswith("Match rates (measured)"))
    for layer, head, count, rate, low, high, trials in matches.rows:
        assert head == "N"
        assert rate == pytest.approx(np.concatenate(log.matches(layer, count)).mean())
        assert trials == len(PROMPTS) * TOKENS
        assert low <= rate <= high
    assert all("\n".join(table.lines()) and json.dumps(table.document()) for table in found.values())


def test_tables_by_position_and_of_independence_are_plain_counts() -> None:
    """Cell by cell from the columns of a log. Ranges cover every position once; positions in a draft are those of the longest."""
    log = made()
    found = [*rate_tables.tables(log, [2], [2, 3], 0.1)]

    def table(title: str) -> titled_table.RateTable:
        return next(each for each in found if each.title.startswith(title))

    position, common = log.table["position"].to_numpy(), log.table["rank_common"].to_numpy()
    matched = table("Match rates at k=2 by output position")
    ranges = [tuple(map(int, name.split("-"))) for name in matched.columns[1:]]
    assert len(ranges) == min(rate_tables.BINS, TOKENS)
    assert [each for low, high in ranges for each in range(low, high + 1)] == [*range(1, TOKENS + 1)]
    for layer, *cells in matched.rows:
        inside = [(position + 1 >= low) & (position + 1 <= high) for low, high in ranges]
        assert cells == pytest.approx([(common[each, layer - 1] <= 2).mean() for each in inside])
    for layer, k, rate, *_, spread in table("Are matches independent?").rows:
        sums = np.array([each.sum() for each in np.split(common[:, layer - 1] <= k, len(PROMPTS))])
        mean = sums.sum() / (len(PROMPTS) * TOKENS)
        assert rate == pytest.approx(mean)
        expected = np.sqrt(((sums - TOKENS * mean) ** 2).mean() / (TOKENS * mean * (1 - mean))) if 0 < mean < 1 else np.nan
        assert spread == pytest.approx(expected, nan_ok=True)
    lengths = [each + 1 for each in log.column("accepted")]
    played = rates_from_logs.replay(lengths, 3)
    rows = {row[0]: row for row in table("Acceptance (measured").rows}
    assert rows["mean_acceptance_length"][1:3] == (3, pytest.approx(played.accepted.mean() + 1))
    assert rows["mean_acceptance_length"][5] == played.accepted.size
    assert rows["tested"][6] <= rows["tested"][2] <= rows["tested"][7]
    assert [row[0] for row in table("Acceptance by position in a draft").rows] == [1, 2, 3]
    assert sum(row[4] for row in table("Acceptance by output position").rows) == rows["tested"][5]
    at = [tuple(map(int, row[0].split("-"))) for row in table("Acceptance by output position").rows]
    assert [each for low, high in at for each in range(low, high + 1)] == [*range(1, TOKENS + 1)]


TITLES = {
    "Match rates (measured): the target's token is among the k early candidates":
        ("layer", "head", "k", "match_rate", "low", "high", "trials"),
    "Match rates at k=1 by output position (measured; common head)": ("layer", "1-3", "4-6", "7-9", "10-12"),
    "Are matches independent? (measured; common head)":
        ("layer", "k", "match_rate", "lag_1", "p_value", "runs_z", "p_value_", "spread"),
    "Acceptance (measured; draft, 6 sequences): alpha is accepted / tested; text_low and text_high: interval over sequences":
        ("accepted over", "gamma", "rate", "low", "high", "trials", "text_low", "text_high"),
    "Tokens per round (measured, with the target's token): mean over rounds, and mean over sequences":
        ("gamma", "over_rounds", "low", "high", "over_sequences", "sequences_low", "sequences_high", "rounds",
         "half_of_rounds_from"),
    "Acceptance by position in a draft of 3 (measured)": ("place", "rate", "low", "high", "trials"),
    "Acceptance by output position, drafts of 3 (measured)": ("positions", "rate", "low", "high", "trials"),
    "Are acceptances independent (measured)?": ("test", "gamma", "statistic", "p_value"),
    "Error of the i.i.d. prediction from alpha over positions, at cost_ratio=0.2 (assumed)":
        ("gamma", "alpha", "tokens predicted", "tokens seen", "error", "low", "high", "speed-up predicted", "speed-up seen"),
    "Ranks of the target's token by depth (measured; draft, 6 sequences; drafts from every position)":
        ("depth", "rank", "rate", "low", "high", "trials"),
}  # fmt: skip


def test_all_tables_of_a_log_cell_by_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Title, columns and numbers, computed with `model.methods.speculative.rates_from_logs` only; a public log has the same tables
    without matches."""
    monkeypatch.setattr(rate_tables, "DRAWS", 10)
    log = made()
    path = position_log.save(log, tmp_path / "log.json")
    ours = {table.title: table for table in rate_tables.tables_of_file(str(path), [1], [2, 3], 0.2)}
    assert {title: table.columns for title, table in ours.items()} == TITLES
    lengths = [each + 1 for each in log.column("accepted")]
    text = {"prompt_token_ids": [1], "generated_token_ids": [3] * TOKENS}
    rows = [{"id": f"q{number}", **text, "acc_mine": {"acc_len": each.tolist()}} for number, each in enumerate(lengths)]
    (tmp_path / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    public = {table.title: table for table in rate_tables.tables_of_file(str(tmp_path / "public.jsonl"), [1], [2, 3], 0.2, "mine")}
    none, *others = [*public]
    assert none == "Requests with lengths of another output: none of 6"
    assert (public[none].rows, public[none].notes) == ((), ())
    assert [title.replace("mine, 6 requests", "draft, 6 sequences") for title in others] == [*TITLES][3:-1]
    assert [public[title].rows == ours[own].rows for title, own in zip(others, [*TITLES][3:-1], strict=True)].count(False) <= 1

    def rate(hits: float, trials: float) -> tuple[Any, ...]:
        found = rates_from_logs.rates(int(hits), int(trials))
        return (*map(pytest.approx, (float(found.rate), float(found.low), float(found.high))), int(trials))

    tables = [ours[title] for title in TITLES]
    common = log.table["rank_common"].to_numpy()
    size = len(common)
    assert tables[0].rows == tuple((layer, "N", 1, *rate((common[:, layer - 1] <= 1).sum(), size)) for layer in range(1, LAYERS))
    for layer, k, found, lag, p, z, p_z, _ in tables[2].rows:
        matched = log.matches(layer, k, "common")
        runs, correlation = rates_from_logs.runs_test(matched), rates_from_logs.lag_correlation(matched)
        assert found == pytest.approx((common[:, layer - 1] <= k).mean())
        assert (lag, p, z, p_z) == pytest.approx((correlation.correlation, correlation.p_value, runs.z, runs.p_value), nan_ok=True)
    played = {gamma: rates_from_logs.replay(lengths, gamma) for gamma in (2, 3)}
    flat = tables[3].rows[0]
    assert flat[:6] == ("positions", "-", *map(float, rates_from_logs.accepted_of_positions(lengths)))
    assert np.isnan(flat[6:]).all()
    for gamma, (tested, drafted, mean) in zip((2, 3), (tables[3].rows[1:4], tables[3].rows[4:7]), strict=True):
        hits, low_high = played[gamma].accepted, rates_from_logs.ratio_interval(*played[gamma].of_requests())
        assert tested[:2] == ("tested", gamma)
        assert tested[2:6] == tuple(map(float, rates_from_logs.accepted_of_tested(played[gamma])))
        assert tested[6:] == pytest.approx(low_high)
        assert drafted[:6] == ("drafted", gamma, *map(float, rates_from_logs.accepted_of_drafted(played[gamma])))
        assert mean[:3] == ("mean_acceptance_length", gamma, pytest.approx(hits.mean() + 1))
        assert mean[5] == hits.size
        assert np.isnan([*drafted[6:], *mean[3:5], *mean[6:]]).all()
        means = rates_from_logs.means(played[gamma])
        [row] = [row for row in tables[4].rows if row[0] == gamma]
        assert row == (*means[:8], means.sequences_with_half)
    assert len(tables[4].notes) == 1
    place, position = rates_from_logs.by_draft_position(played[3]), rates_from_logs.by_output_position(played[3], [0, 3, 6, 9, 12])
    names = ("1-3", "4-6", "7-9", "10-12")
    for table, by, first in ((tables[5], place, (1, 2, 3)), (tables[6], position, names)):
        expected = [
            (name, *map(float, each), int(count))
            for name, *each, count in zip(first, by.rate, by.low, by.high, by.trials, strict=True)
        ]
        assert [*table.rows] == expected
    accepted = rates_from_logs.first_token_outcomes(lengths)
    correlation, runs = rates_from_logs.lag_correlation(accepted), rates_from_logs.runs_test(accepted)
    tests = [rates_from_logs.geometric_test(played[gamma]) for gamma in (2, 3)]
    assert tables[7].rows == (
        ("correlation of neighbours", "-", correlation.correlation, correlation.p_value),
        ("runs test, z", "-", runs.z, runs.p_value),
        *(("accepted lengths, chi-square", gamma, each.statistic, each.p_value) for gamma, each in zip((2, 3), tests, strict=True)),
    )  # fmt: skip
    again = rates_from_logs.dependence(lengths, [2, 3], 0.2, 10, np.random.default_rng(0))
    assert [*tables[8].rows] == [tuple(each) for each in again]


def test_a_table_is_printed_with_aligned_columns() -> None:
    """Numbers have four decimals, large ones two; values that are not finite are a dash, and null in JSON."""
    rows = (("a", 0.12345, 7), ("long", -12.345, 123), ("b", float("nan"), 1), ("c", 10.0, 2), ("d", -9.99999, 3))
    table = titled_table.RateTable("A title", ("name", "value", "n"), rows, ("A note.",))
    assert [*table.lines()] == [
        "A title", "name     value    n", "   a    0.1235    7", "long    -12.35  123", "   b         -    1",
        "   c     10.00    2", "   d  -10.0000    3", "A note.",
    ]  # fmt: skip
    document = table.document()
    assert document["rows"][2] == {"name": "b", "value": None, "n": 1}
    assert (document["title"], document["notes"], [*document]) == ("A title", ["A note."], ["title", "rows", "notes"])
    empty = titled_table.RateTable("None", ("name",), ())
    assert ([*empty.lines()], empty.document()) == (["None"], {"title": "None", "rows": []})


def test_acceptance_of_sampled_drafts_is_the_mean_of_two_columns() -> None:
    log = made(sampling=Sampling(temperature=2.0))
    (drawn,) = (each for each in rate_tables.tables(log, [1], [1], 0.1) if each.title.startswith("Acceptance of sampled"))
    for (_, rate, error, count), column in zip(drawn.rows, (log.column("overlap"), log.acceptance_probabilities()), strict=True):
        values = np.concatenate(column)
        assert (rate, count) == (pytest.approx(values.mean()), values.size)
        assert error == pytest.approx(np.sqrt(((values - values.mean()) ** 2).sum() / (values.size - 1) / values.size))


@pytest.mark.usefixtures("unrendered")
def test_figures_of_position_logs_and_public_logs(tmp_path: Path) -> None:
    position_log.save(made(), tmp_path / "log.json")
    done = CliRunner().invoke(app, ["rates", str(tmp_path / "log.json"), "--lengths", "2,4", "--figures", str(tmp_path / "ours")])
    assert (done.exit_code, done.stderr) == (0, "")
    drawn = {"match_rate", "match_rate_by_position", "acceptance_by_position", "accepted_lengths"}
    assert {path.stem for path in (tmp_path / "ours").iterdir()} == drawn
    assert all(str(path) in done.stdout for path in (tmp_path / "ours").iterdir())
    lengths = [2, 1, 3, 2, 1, 1], [1, 4, 3, 2, 1, 1]
    text = {"prompt_token_ids": [1, 2], "generated_token_ids": [3] * 6}
    rows = [{"id": str(number), **text, "acc_mine": {"acc_len": each}} for number, each in enumerate(lengths)]
    (tmp_path / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    there = ["rates", str(tmp_path / "public.jsonl"), "--drafter", "mine", "--lengths", "2", "--figures", str(tmp_path / "theirs")]
    done = CliRunner().invoke(app, there)
    assert (done.exit_code, done.stderr) == (0, "")
    assert {path.stem for path in (tmp_path / "theirs").iterdir()} == {"acceptance_by_position", "accepted_lengths"}


def test_rates_list_requests_of_other_outputs_and_long_ones(tmp_path: Path) -> None:
    """Of ten requests, two have lengths of another output, and one long request has most of the rounds."""
    lengths = [[2, 1, 3, 2, 1, 1]] * 9 + [[1] * 80]
    rows = [
        {"id": f"q{number}", "prompt_token_ids": [1], "generated_token_ids": [3] * (len(each) + (number in (2, 5))),
         "acc_mine": {"acc_len": each}}
        for number, each in enumerate(lengths)
    ]  # fmt: skip
    (tmp_path / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["rates", str(tmp_path / "public.jsonl"), "--drafter", "mine", "--lengths", "1,3"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    other, means, error = (
        next(table for table in json.loads(done.stdout) if table["title"].startswith(title))
        for title in ("Requests with lengths", "Tokens per round", "Error of the i.i.d.")
    )
    assert other["title"] == "Requests with lengths of another output: 2 of 10 (20%)"
    assert other["rows"] == [{"id": "q2", "lengths": 6, "output_tokens": 7}, {"id": "q5", "lengths": 6, "output_tokens": 7}]
    row = means["rows"][1]
    assert (row["gamma"], row["rounds"], row["half_of_rounds_from"]) == (3, 9 * 3 + 80, 1)
    assert row["over_rounds"] == pytest.approx((9 * 6 + 80) / (9 * 3 + 80))
    assert row["over_sequences"] == pytest.approx((9 * 2 + 1) / 10)
    assert row["low"] < row["over_rounds"] < row["high"]
    assert means["notes"] == [
        "gamma=1: half of the rounds belong to 1 of 10 sequences: a few long ones dominate the mean over rounds"
    ]
    found = rates_from_logs.dependence(lengths, (1, 3), 0.0, 1, np.random.default_rng(0))
    assert [row["error"] for row in error["rows"]] == [row.error for row in found]
    printed = CliRunner().invoke(app, arguments).stdout
    assert "q2" in printed
    assert means["notes"][0] in printed


def test_matches_of_rates_are_those_that_are_looked_up(tmp_path: Path) -> None:
    """Accepted tokens are those of real decoding with these lengths: with one token of each round they sum to the log's."""
    log, path = made(), str(tmp_path / "log.json")
    tokens = [{"id": str(number), "tokens": prompt} for number, prompt in PROMPTS.items()]
    position_log.save(PositionLog(log.table, {**SAID, "prompts": tokens}), path)
    for matches in ((2, 2), (1, 4)):
        done = CliRunner().invoke(app, ["rates", path, "--lengths", "3", "--matches", "{},{}".format(*matches), "--json"])
        assert (done.exit_code, done.stderr) == (0, "")
        (table,) = (each for each in json.loads(done.stdout) if each["title"].startswith("Lookups in prompt and output"))
        *matched, none = table["rows"]
        assert none["match"] == "none"
        assert all(matches[0] <= row["match"] <= matches[1] for row in matched)
        parameters = ngram.Parameters(LAYERS, 3, *matches)
        target = kin()["target"]
        works = [Real({"target": target}).run(ngram.decode(parameters, prompt, TOKENS), TOKENS) for prompt in PROMPTS.values()]
        rounds = [kind for work in works for kind in work.commits if kind == "round"]
        # A last round of one token drafts none: it is not counted where there would be a match.
        assert 0 <= len(rounds) - sum(row["rounds"] for row in table["rows"]) <= len(PROMPTS)
        accepted = sum(row["rounds"] * row["accepted"] for row in matched)
        assert accepted + len(rounds) == pytest.approx(TOKENS * len(PROMPTS))


@pytest.mark.parametrize(("given_", "message"), [
    ("3,1", "min_match must be at most max_match=1, got 3"), ("0,2", "min_match must be between 1 and 1000, got 0"),
    ("2", "matches must be"), ("a,b", "matches must be"),
])  # fmt: skip
def test_impossible_matches_are_refused(given_: str, message: str) -> None:
    done = CliRunner().invoke(app, ["rates", "family", "--matches", given_])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_predicted_speed_ups_use_the_cost_ratio(tmp_path: Path) -> None:
    rows = [{"id": str(number), "prompt_token_ids": [1], "generated_token_ids": [3] * 6, "acc_mine": {"acc_len": each}}
            for number, each in enumerate(([2, 1, 3, 2, 1, 1], [1, 4, 3, 2, 1, 1]))]  # fmt: skip
    (tmp_path / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["rates", str(tmp_path / "public.jsonl"), "--drafter", "mine", "--lengths", "3", "--json"]
    lengths = [row["acc_mine"]["acc_len"] for row in rows]
    for more, ratio in (([], 0.1), (["--cost-ratio", "0.4"], 0.4)):
        done = CliRunner().invoke(app, [*arguments, *more])
        assert (done.exit_code, done.stderr) == (0, "")
        (error,) = (table for table in json.loads(done.stdout) if table["title"].startswith("Error of the i.i.d."))
        assert error["title"].endswith(f"at cost_ratio={ratio:g} (assumed)")
        (expected,) = rates_from_logs.dependence(lengths, [3], ratio, 400, np.random.default_rng(0))
        (row,) = error["rows"]
        assert [*row.values()] == pytest.approx([*expected])


def test_candidates_and_lengths_are_those_of_the_options(tmp_path: Path) -> None:
    position_log.save(made(), tmp_path / "log.json")
    done = CliRunner().invoke(app, ["rates", str(tmp_path / "log.json"), "--candidates", "2,4", "--lengths", "6", "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    rows = [row for table in json.loads(done.stdout) for row in table["rows"]]
    assert {row["k"] for row in rows if "k" in row} == {2, 4}
    assert {row["gamma"] for row in rows if "gamma" in row} - {"-"} == {6}


def test_the_last_layer_always_agrees_with_the_output(tmp_path: Path) -> None:
    """Also for sampled tokens, which are not always the likeliest of the last layer."""
    log = made(sampling=Sampling(temperature=3.0))
    position_log.save(log, tmp_path / "log.json")
    drawn = log.table["rank_common"].to_numpy() == 1
    assert not drawn[:, -1].all()
    agrees = exit_outcomes.RecordedConfidences(log=str(tmp_path / "log.json")).record("softmax")["agrees"]
    assert agrees[:, -1].all()
    assert (agrees[:, :-1] == drawn[:, :-1]).all()


def test_long_lists_are_cut_only_when_printed() -> None:
    rows = tuple((f"q{number}", 1, 2) for number in range(8))
    table = titled_table.RateTable("Answers", ("id", "lengths", "output_tokens"), rows, most=5)
    assert [*table.lines()][-1] == "... and 3 more (--json lists all)"
    assert len([*table.lines()]) == 1 + 1 + 5 + 1
    assert len(table.document()["rows"]) == 8
    whole = titled_table.RateTable("Answers", ("id", "lengths", "output_tokens"), rows[:5], most=5)
    assert "more" not in "".join(whole.lines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["log", "--target", "nowhere", "-o", "x.json"], "model must be a directory"),
        (["log", "--target", "target", "-o", "x.json", "--temperature", "2"], "temperature is used only with --sample"),
        (["log", "--target", "target", "-o", "x.json", "--template", "squad"], "--template is used only with --prompts"),
        (["rates", "nowhere.json"], "there is no such file"),
        (["rates", "famly"], "unknown log"),
        (["rates", "nowhere.json", "--candidates", "0"], "candidates must be"),
    ],
)
def test_user_errors_of_log_and_rates_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


# --- scenarios ---


SCENARIO = """
[scenario]
name = "logged"
tokens = 8
replications = 40
views = ["paths", "events"]

"""
CHOICES = {
    "ppd": 'name = "ppd"\nexit_layer = 3\ncandidates = 2\noutcomes = { kind = "replay", log = "log.json", head = "common" }\n',
    "flat": 'name = "ppd"\nexit_layer = 1\ncandidates = 1\nform = "flat"\n'
    'outcomes = { kind = "replay", log = "log.json", head = "common" }\n',
    "speculative": 'name = "speculative"\ndraft_length = 2\ncost = { cost_ratio = 0.2 }\n'
    'outcomes = { kind = "replay", log = "log.json" }\n',
    "bild": 'name = "bild"\nfallback_threshold = 0.06\nrollback_threshold = 3.0\ncost = { cost_ratio = 0.2 }\n'
    'outcomes = { kind = "replay", log = "log.json" }\n',
    "bild, rates": 'name = "bild"\nfallback_threshold = 0.06\nrollback_threshold = 3.0\ncost = { cost_ratio = 0.2 }\n'
    'outcomes = { kind = "thresholds", log = "log.json" }\n',
    "early_exit": 'name = "early_exit"\nthreshold = 0.06\noutcomes = { kind = "confidences", log = "log.json" }\n',
    "early_exit, states": 'name = "early_exit"\nmeasure = "state"\nthreshold = 0.9\n'
    'outcomes = { kind = "confidences", log = "log.json" }\n',
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_scenarios_use_a_position_log(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.commands.sim_app import app as sim

    monkeypatch.chdir(tmp_path)
    position_log.save(made(), "log.json")
    Path("s.toml").write_text(f"{SCENARIO}[[method]]\nlayers = {LAYERS}\n{CHOICES[name]}")
    result = CliRunner().invoke(sim, ["run", "s.toml", "--no-figures", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["view"]: row for row in json.loads(result.stdout)["results"]}
    assert rows["events"]["latency_layers"] == pytest.approx(rows["paths"]["latency_layers"])


@pytest.mark.parametrize("name", ["ppd", "flat", "speculative"])
def test_a_log_of_a_target_of_another_depth_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.commands.sim_app import app as sim

    monkeypatch.chdir(tmp_path)
    position_log.save(made(), "log.json")
    Path("s.toml").write_text(f"{SCENARIO}[[method]]\nlayers = {LAYERS + 1}\n{CHOICES[name]}")
    result = CliRunner().invoke(sim, ["run", "s.toml", "--no-figures", "--json"])
    assert result.exit_code == 2
    assert f"method.layers must be {LAYERS}, as in the log's target, got {LAYERS + 1}" in result.stderr


def test_rates_of_a_scenario_are_those_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.scenarios.outcomes import acceptance_outcomes, match_outcomes

    monkeypatch.chdir(tmp_path)
    log = made()
    position_log.save(log, "log.json")
    found = match_outcomes.RecordedMatches(log="log.json", head="common").outcome(ppd.Parameters(LAYERS, 3, 2), 8)
    assert found.rate == pytest.approx(np.stack(log.matches(3, 2))[:, :8].mean())
    assert found.source == "measured: 6 of 6 sequences of log.json"
    drafts = acceptance_outcomes.RecordedAcceptance(log="log.json").outcome(speculative.Parameters(LAYERS, 2), 8)
    assert drafts.rate == pytest.approx(np.stack(log.agreements())[:, :8].mean())


@pytest.mark.parametrize("kind", ["thresholds", "replay"])
def test_lossy_drafts_need_a_log_of_a_draft(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.commands.sim_app import app as sim

    monkeypatch.chdir(tmp_path)
    log = made()
    position_log.save(PositionLog(log.table.select([*position_log.TARGET]), {**log.header, "draft": None}), "log.json")
    method = 'name = "bild"\ndraft_layers = 2\nfallback_threshold = 0.5\nrollback_threshold = 2.0\n'
    law = f'[outcomes]\nkind = "{kind}"\nlog = "log.json"\n[cost]\ncost_ratio = 0.2\n'
    Path("s.toml").write_text(f'[scenario]\nname = "logged"\ntokens = 8\n[[method]]\nlayers = {LAYERS}\n{method}{law}')
    result = CliRunner().invoke(sim, ["run", "s.toml", "--no-figures"])
    assert result.exit_code == 2
    assert "this log was made without a draft; make one with --draft" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("layers = 5", "layers = 6"), "method.layers must be 5, as in the log's target, got 6"),
        (('head = "common"', 'head = "trained"'), "layer 3 has no trained head"),
        ((', head = "common"', ""), "head is required with a log"),
        (("log.json", "lag.json"), "lag.json: there is no such file"),
        (("log.json", "family2"), "unknown log 'family2'"),
        (("tokens = 8", "tokens = 80"), "tokens must be at most 12"),
    ],
)
def test_a_log_that_does_not_fit_is_refused(
    change: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sim.commands.sim_app import app as sim

    monkeypatch.chdir(tmp_path)
    position_log.save(made(), "log.json")
    text = f"{SCENARIO}[[method]]\nlayers = {LAYERS}\n{CHOICES['ppd']}"
    assert change[0] in text
    Path("s.toml").write_text(text.replace(*change))
    result = CliRunner().invoke(sim, ["run", "s.toml", "--no-figures"])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@given(data=st.data(), rows=st.integers(1, 4), vocabulary=st.integers(1, 20), largest=st.sampled_from([1, 30]))
def test_a_rank_is_the_place_in_the_order_by_logit_and_token(data: st.DataObject, rows: int, vocabulary: int, largest: int) -> None:
    """Few different logits, so that examples have ties, many or only one; the same on the host and on another device."""
    import torch

    values = st.lists(st.integers(0, largest), min_size=vocabulary, max_size=vocabulary)
    logits = data.draw(st.lists(values, min_size=rows, max_size=rows))
    tokens = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=rows, max_size=rows))
    expected = [
        1 + sorted(range(vocabulary), key=lambda each, row=row: (-row[each], each)).index(token)
        for row, token in zip(logits, tokens, strict=True)
    ]
    given_ = torch.tensor(logits, dtype=torch.float32), torch.tensor(tokens)
    for ranks in (logging.ranks_of, logging._ranks_on_device):
        assert ranks(*given_).tolist() == expected
        assert ranks(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([1])).tolist() == [2]  # a single tie


def test_the_greedy_token_ranks_first_among_ties() -> None:
    """A head of zeros gives equal logits, of which the first ranks first, as in argmax."""
    import copy

    from calibrate.decoders.transformers_adapter import decoder_of

    full = copy.deepcopy(real_models.model("llama", LAYERS))
    full.lm_head.weight.data.zero_()
    table = logging.log_rows(decoder_of(full, "ties"), PROMPTS, TOKENS)
    assert ({*table["token"]}, {*table["rank_common"].to_numpy().flatten().tolist()}) == ({0}, {1})


def test_a_sampled_token_ranks_after_ties_with_smaller_ids() -> None:
    """All logits are equal, so the rank of a token is its id + 1, at every layer and in every piece of positions."""
    import copy

    from calibrate.decoders.transformers_adapter import decoder_of

    full = copy.deepcopy(real_models.model("llama", LAYERS))
    full.lm_head.weight.data.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "PIECE", 5)
        table = logging.log_rows(decoder_of(full, "ties"), PROMPTS, TOKENS, sampling=Sampling(), seed=1)
    tokens = table["token"].to_numpy()
    assert np.unique(tokens).size > 10
    assert (table["rank_common"].to_numpy() == tokens[:, None] + 1).all()
    assert table["confidence"].to_numpy() == pytest.approx(np.full((tokens.size, LAYERS), 1 / VOCABULARY))


def test_trained_ranks_use_trained_heads_and_the_models_head_last() -> None:
    import torch

    target = kin()["target"]
    target.heads = {2: torch.as_tensor(np.random.default_rng(1).normal(size=(VOCABULARY, 16)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "PIECE", 5)
        table = logging.log_rows(target, PROMPTS, TOKENS)
    ranks = table["rank_trained"].to_numpy()
    for number, rows in enumerate(table.partition_by("prompt", maintain_order=True)):
        ids = torch.tensor([PROMPTS[number] + rows["token"].to_list()[:-1]])
        with torch.inference_mode():
            states = target.full(ids, output_hidden_states=True).hidden_states[2][0, -TOKENS:]
            logits = target.full.model.norm(states) @ target.heads[2].T
        logit = logits.gather(1, torch.tensor(rows["token"].to_list())[:, None])
        assert rows["rank_trained"].to_numpy()[:, 1].tolist() == ((logits > logit).sum(-1) + 1).tolist()
    assert (ranks[:, -1] == table["rank_common"].to_numpy()[:, -1]).all()
    assert not ranks[:, [0, 2, 3]].any()
    assert not logging.log_rows(kin()["target"], PROMPTS, TOKENS)["rank_trained"].to_numpy().any()


def test_sequences_are_generated_until_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no pass beyond the longest sequence, and a sequence is cut after its end token."""
    target = kin()["target"]
    outputs = [real_models.reference_tokens(target.full, prompt, TOKENS) for prompt in PROMPTS.values()]
    ends = sorted({output[3] for output in outputs})  # each output has one of these among its first four tokens
    lengths = [min(output.index(end) for end in ends if end in output) + 1 for output in outputs]
    monkeypatch.setattr(target.full.generation_config, "eos_token_id", ends)
    run, passes = target.run, list[Any]()
    monkeypatch.setattr(target, "run", lambda *args, **more: passes.append(args) or run(*args, **more))
    draft = kin()["draft"]
    table = logging.log_rows(target, PROMPTS, TOKENS, draft=draft)
    assert [part.height for part in table.partition_by("prompt", maintain_order=True)] == lengths
    assert len(passes) == 1 + max(lengths) <= 5  # the first reads the prompts without their last tokens
    assert [part["token"].to_list() for part in table.partition_by("prompt", maintain_order=True)] == [
        output[:length] for output, length in zip(outputs, lengths, strict=True)
    ]
    assert [part["position"].to_list() for part in table.partition_by("prompt", maintain_order=True)] == [
        [*range(length)] for length in lengths
    ]
    # The draft predicts along each sequence, and its accepted lengths stop at the end.
    for number, part in enumerate(table.partition_by("prompt", maintain_order=True)):
        before = [PROMPTS[number] + outputs[number][:position] for position in range(part.height)]
        predicted = [int(real_models.logits(draft.full, each).argmax()) for each in before]
        assert part["draft_token"].to_list() == predicted
        agrees = [token == other for token, other in zip(predicted, outputs[number], strict=False)]
        positions = range(part.height)
        runs = [next((size for size, yes in enumerate(agrees[at:]) if not yes), part.height - at) for at in positions]
        assert part["accepted"].to_list() == runs


def test_other_vocabularies_and_empty_prompts_are_refused(tmp_path: Path) -> None:
    decoders = kin()
    draft = decoders["draft"]
    draft.vocabulary = VOCABULARY + 1
    with pytest.raises(ParameterError, match=f"same vocabulary, got target {VOCABULARY}, draft {VOCABULARY + 1} tokens; use a"):
        logging.log_rows(decoders["target"], PROMPTS, TOKENS, draft=draft)
    for prompts in ([], [[1], []]):
        with pytest.raises(ParameterError, match="prompts must hold at least one prompt, and each at least one token"):
            logging.write_log(tmp_path / "log.json", SAID, decoders["target"], prompts, TOKENS)
    with pytest.raises(ParameterError, match=r"out must end in \.json \(the table goes to \.parquet\), got log\.parquet"):
        logging.write_log(tmp_path / "log.parquet", SAID, decoders["target"], [[1]], TOKENS)
    assert not [*tmp_path.iterdir()]


def test_prompts_of_one_length_form_batches_and_progress_is_reported(tmp_path: Path) -> None:
    prompts = [[1, 2], [3], [4, 5], [6, 7], [8]]
    assert logging.groups(prompts, 2) == [[0, 2], [3], [1, 4]]
    assert logging.groups([[1]] * 51) == [[*range(50)], [50]]
    reported: list[Any] = []
    target = kin()["target"]
    log, spent = logging.write_log(tmp_path / "log.json", SAID | {"draft": None}, target, prompts, 2, group=2,
                              report=lambda *said: reported.append(said))  # fmt: skip
    assert reported == [(2, 5, ""), (3, 5, ""), (5, 5, "")]
    assert log.table.select("prompt", "position").rows() == [(prompt, position) for prompt in range(5) for position in range(2)]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["log.json", "log.parquet"]
    assert spent.writing > 0 < spent.heads
    assert (spent.trained_heads, spent.draft) == (0, 0)


def test_an_end_token_in_the_prompt_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    target = kin()["target"]
    outputs = [real_models.reference_tokens(target.full, prompt, TOKENS) for prompt in PROMPTS.values()]
    unused = next(token for token in range(VOCABULARY) if not any(token in output for output in outputs))
    monkeypatch.setattr(target.full.generation_config, "eos_token_id", unused)
    prompts = {number: [*prompt[:-1], unused, prompt[-1]] for number, prompt in PROMPTS.items()}
    expected = [real_models.reference_tokens(target.full, prompt, TOKENS, stop=unused) for prompt in prompts.values()]
    table = logging.log_rows(target, prompts, TOKENS)
    assert [part["token"].to_list() for part in table.partition_by("prompt", maintain_order=True)] == expected
    assert min(map(len, expected)) > 1
