"""Rates of real decodings by draft position: counted from commits, and what the closed form and the simulator make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import calibrate
import sim
from calibrate.commands.calibrate_app import app
from calibrate.decode import decoded_rounds, real_decoding
from calibrate.family import model_directory
from calibrate.loading import load_models, prompts
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.logs import read_log
from model.logs.recorded_decoding import AnsweredRead, Decoding, question
from model.methods.speculative import rates_from_logs
from model.steps import Commit, Forward, LayerSpan, Read
from tests.support import family, real_models

pytestmark = pytest.mark.usefixtures("one_thread")
bundled = pytest.mark.skipif(not model_directory.names(), reason="no models are bundled")
STOP = 9


def decoding(rounds: list[tuple[int, int]], stop: tuple[int, ...] = (), last: int = 1) -> Decoding:
    """A decoding of rounds, each (accepted, drafted); the last token is `last`."""
    commits = [Commit("round", (1,) * (accepted + 1), drafted) for accepted, drafted in rounds]
    commits[-1] = commits[-1]._replace(tokens=(*commits[-1].tokens[:-1], last))
    return Decoding("speculative", {"layers": 2, "draft_length": 4}, (1,), 99, tuple(commits), Account(), stop)


ROUNDS = st.lists(st.integers(0, 4).flatmap(lambda drafted: st.tuples(st.integers(0, drafted), st.just(drafted))), min_size=1)


@given(st.lists(ROUNDS, min_size=1, max_size=4))
def test_rates_count_the_tokens_whose_predecessors_were_accepted(sequences: list[list[tuple[int, int]]]) -> None:
    played = decoded_rounds.rounds_of([decoding(rounds) for rounds in sequences])
    found = rates_from_logs.by_draft_position(played)
    every = [each for rounds in sequences for each in rounds]
    for index in range(played.draft_length):
        reached = [accepted for accepted, drafted in every if accepted >= index and drafted > index]
        assert found.trials[index] == len(reached)
        if reached:
            assert found.rate[index] == sum(accepted > index for accepted in reached) / len(reached)
    assert played.start.tolist() == [
        start for rounds in sequences for start in np.cumsum([0, *[accepted + 1 for accepted, _ in rounds[:-1]]])
    ]


def test_what_a_stop_token_hides_is_no_rejection() -> None:
    """A draft that the end token cut may have been accepted further: the token after it was not tested."""
    for stop, tested in (((), [3, 2]), ((STOP,), [3, 1])):
        played = decoded_rounds.rounds_of([decoding([(2, 4), (1, 4)], stop, STOP)])
        assert played.tested.tolist() == tested
    # A stop token that ends no round is none: other tokens count as before.
    assert decoded_rounds.rounds_of([decoding([(2, 4), (1, 4)], (STOP,), 1)]).tested.tolist() == [3, 2]


def test_sequences_are_predicted_from_the_others() -> None:
    """Two kinds of sequences: each half predicts its own rates for the other."""
    always, never = decoding([(4, 4)] * 6), decoding([(0, 4)] * 30)
    [rates, table] = decoded_rounds.tables([always, never] * 3)
    assert rates.rows[0][1] == pytest.approx(18 / (18 + 90))
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["odd"]["tokens_per_round"] == 5
    assert np.isnan(rows["odd"]["predicted"])  # after a rejection of every first token nothing is known of the others
    assert rows["even"]["tokens_per_round"] == 1
    assert rows["even"]["predicted"] == pytest.approx(5)
    assert rows["even"]["error"] == pytest.approx(4)
    assert rows["all"]["sequences"] == 6


def test_prediction_is_the_exact_mean_of_cut_rounds() -> None:
    """By hand for two tokens and rates (r, s): one round if the first draft is accepted, else two; drafts are cut to one."""
    found = [decoding([(1, 1)]), decoding([(0, 1), (0, 0)]), decoding([(1, 1)]), decoding([(1, 1)])]
    table = [*decoded_rounds.tables(found)][1]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["tokens_per_round"] == pytest.approx(8 / 5)
    assert row["predicted"] == pytest.approx(2 / (0.75 + 2 * 0.25))


def test_decodings_without_drafts_have_no_rates() -> None:
    with pytest.raises(ParameterError, match="decodings must have drafted tokens for rates by draft position"):
        [*decoded_rounds.tables([decoding([(0, 0)])])]


# --- Both verifications of the same drafts ---


def with_reads(rounds: list[tuple[int, list[float]]]) -> Decoding:
    """A decoding of rounds (accepted, p / q of each drafted token), with the probabilities that were read."""
    at, reads, commits = 1, list[AnsweredRead](), list[Commit]()
    for accepted, ratios in rounds:
        words = tuple(range(len(ratios)))
        verified = Forward("target", (0, *words), at, LayerSpan(0, 2), heads=len(ratios) + 1)
        for index, ratio in enumerate(ratios):
            drafted = Forward("draft", (0,), at + index, LayerSpan(0, 1), heads=1)
            p = Read("probability", None, index - len(ratios) - 1, token=index)
            reads.append(AnsweredRead(question(p, verified), 0.5 * ratio))
            reads.append(AnsweredRead(question(p._replace(offset=-1), drafted), 0.5))
        commits.append(Commit("round", (1,) * (accepted + 1), len(ratios)))
        at += accepted + 1
    settings = {"layers": 2, "draft_length": 4, "sampled": True, "verification": "block"}
    return Decoding("speculative", settings, (1,), 99, tuple(commits), Account(), reads=tuple(reads))


def test_both_verifications_of_logged_drafts() -> None:
    made = [with_reads([(1, [0.5, 2.0]), (0, [2.0, 0.25])]), with_reads([(2, [1.0, 0.5]), (0, [])])]
    table = [*decoded_rounds.tables(made)][-1]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    # Weights by token: (.5, .5), (1, .25), (1, .5); by block the first draft has (.5, 1).
    assert [(row["what"], row["rounds"]) for row in rows] == [
        ("at least 1 accepted", 3), ("at least 2 accepted", 3), ("tokens per round", 3),
    ]  # fmt: skip
    assert [row["token"] for row in rows] == pytest.approx([2.5 / 3, 1.25 / 3, 1 + 3.75 / 3])
    assert [row["block"] for row in rows] == pytest.approx([2.5 / 3, 1.75 / 3, 1 + 4.25 / 3])
    assert all(row["low"] <= row["block_over_token"] <= row["high"] for row in rows)
    assert 'acceptance_rates = [0.8333, 0.7]; source = "measured"' in table.notes[-1]


def test_logs_without_all_probabilities_compare_nothing() -> None:
    """Token-wise verification stops reading at the first rejected token."""
    made = with_reads([(1, [0.5, 2.0])])
    for reads in (made.reads[:2], (), made.reads[1:3]):
        assert len([*decoded_rounds.tables([replace(made, reads=reads)])]) == 2


# --- From files ---


def log_of(decodings: tuple[Decoding, ...], path: Path) -> Path:
    models: Any = {"target": {"name": "target", "checksum": "", "layers": 2}}
    return read_log.save(read_log.ReadLog(decodings, tuple(str(each) for each in range(len(decodings))), models), path)


def test_command_prints_what_a_scenario_takes(tmp_path: Path) -> None:
    path = log_of((decoding([(2, 4), (4, 4), (3, 4)]), decoding([(0, 4), (1, 4)])), tmp_path / "own.json")
    done = CliRunner().invoke(app, ["rates", str(path)])
    assert done.exit_code == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("as [outcomes]: ")]
    assert line == (
        'as [outcomes]: kind = "by-draft-position"; acceptance_rates = [0.8, 0.75, 0.6667, 0.5]; source = "measured"'
    )
    made = json.loads(CliRunner().invoke(app, ["rates", str(path), "--json"]).stdout)
    assert [row["rate"] for row in made[0]["rows"]] == pytest.approx([0.8, 0.75, 2 / 3, 0.5])
    assert "matches is used only with logs of calibrate log" in family.error_of("rates", str(path), "--matches", "1,3")
    (tmp_path / "other.json").write_text("[1]")
    assert "it is not a decision log" in family.error_of("rates", str(tmp_path / "other.json"))


def test_a_row_for_each_value_of_a_setting(tmp_path: Path) -> None:
    """By hand: 3 of 5 and 7 of 8 tested tokens are accepted, in sequences that differ in one setting, and 1 of 2 in another."""
    made = []
    for budget, drafts, rounds in (
        (None, 4, [(2, 4), (1, 4)]), (8, 4, [(4, 4), (3, 4)]), (None, 4, [(0, 0)]), (None, 2, [(1, 2)]),
    ):  # fmt: skip
        settings = {"layers": 2, "draft_length": drafts, "context_budget": budget}
        made.append(replace(decoding(rounds), settings=settings))
    path = log_of(tuple(made), tmp_path / "own.json")
    found = json.loads(CliRunner().invoke(app, ["rates", str(path), "--by", "context_budget", "--json"]).stdout)
    assert [(row["settings"], row["context_budget"], row["sequences"], row["rate"], row["trials"]) for row in found["rows"]] == [
        ("draft_length=4", None, 1, 3 / 5, 5), ("draft_length=4", 8, 1, 7 / 8, 8), ("draft_length=2", None, 1, 1 / 2, 2),
    ]  # fmt: skip
    assert [row["tokens_per_round"] for row in found["rows"]] == [5 / 2, 9 / 2, 2]
    shown = CliRunner().invoke(app, ["rates", str(path), "--by", "context_budget"]).stdout
    assert shown.startswith("Acceptance by context_budget (measured)\n")
    assert "measured on" not in shown  # a log has no device
    assert "did you mean context_budget?" in family.error_of("rates", str(path), "--by", "contextbudget")
    assert "--by is for decodings" in family.error_of("rates", "family", "--by", "context_budget")
    assert "--drafter is not used with --by" in family.error_of("rates", str(path), "--by", "draft_length", "--drafter", "eagle")


def test_rows_of_measured_runs_name_device_models_and_date() -> None:
    runs = Path(calibrate.__file__).parent / "measurements" / "cpu-family" / "cpu-family.json"
    table = decoded_rounds.by_setting(str(runs), "draft_length")
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    drafts = [row for row in rows if row["method"] == "speculative"]
    assert [row["draft_length"] for row in drafts] == sorted(row["draft_length"] for row in drafts)
    assert all(row["low"] <= row["rate"] <= row["high"] for row in drafts)
    header = json.loads(runs.read_text(encoding="utf-8"))["about"]
    for each in (header["machine"]["name"], header["date"], header["versions"]["torch"], "24 prompt and 48 generated tokens"):
        assert each in table.notes[-1]


# --- The bundled head ---


@bundled
def test_measured_rates_predict_the_decodings_of_other_prompts() -> None:
    """An EAGLE head on the real target: exact output, and its rates in the simulator give its tokens per round."""
    models = {
        role: each.decoder for role, each in load_models.models({"target": "family:target", "draft": "family:eagle"}).items()
    }
    tokenizer = models["target"].tokenizer
    asked = [tokenizer(each.text)["input_ids"] for each in prompts.held_out(24, 24, 1, tokenizer=tokenizer.backend_tokenizer)]
    settings = {"draft_length": 4, "drafter": "heads"}
    made = [real_decoding.decode("speculative", models, prompt, 48, settings) for prompt in asked]
    plain = {"target": models["target"]}
    for each in made[:4]:
        expected = real_decoding.decode("autoregressive", plain, each.prompt, 48).tokens
        assert not real_models.differs_from_reference(models["target"].full, each.prompt, each.tokens, expected)
    [table, loop] = decoded_rounds.tables(made)
    rates = [row[1] for row in table.rows]
    assert min(rates) > 0.5  # it is no stand-in: the bundled draft model has 0.45 on its first position
    rows = {row[0]: dict(zip(loop.columns, row, strict=True)) for row in loop.rows}
    # What predicts has an interval too, that of the other half.
    widths = [(rows[name]["high"] - rows[name]["low"]) / 2 for name in ("odd", "even")]
    for name in ("odd", "even"):
        assert abs(rows[name]["predicted"] - rows[name]["tokens_per_round"]) < np.hypot(*widths)
    run = sim.run({
        "scenario": {"name": "measured", "tokens": 48, "views": ["formula"]},
        "method": [{"name": "speculative", "layers": 12, **settings}], "cost": {"cost_ratio": 0.1},
        "outcomes": {"kind": "by-draft-position", "acceptance_rates": rates, "source": "measured"},
    })  # fmt: skip
    assert run["tokens_per_round"][0] == pytest.approx(rows["all"]["predicted"], rel=1e-9)
    low, high = rows["all"]["low"], rows["all"]["high"]
    assert low <= run["tokens_per_round"][0] <= high
