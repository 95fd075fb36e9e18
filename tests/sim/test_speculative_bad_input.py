"""Bad input to speculative decoding: one readable message, exit code 2, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from model.base.checks import ParameterError
from model.methods.speculative import theory as speculative
from sim.commands.sim_app import app
from tests.project.test_bad_input import one_line, refused

SCENARIO = '[scenario]\nname = "small"\ntokens = 8\nreplications = 16\n\n'
METHOD = '[[method]]\nname = "speculative"\nlayers = 8\ndraft_length = 3\n\n'
LAW = '[outcomes]\nkind = "iid"\nacceptance_rate = 0.7\n\n'
COST = "[cost]\ncost_ratio = 0.1\n\n"
BASE = SCENARIO + METHOD + LAW + COST
PPD = '[[method]]\nname = "ppd"\nlayers = 8\nexit_layer = 4\ncandidates = 1\n\n'

# What is set to a bad value, and what the message must name: the key, the bound, the value, the remedy.
SET = [
    ("outcomes.acceptance_rate=1.5", "acceptance_rate", "between 0 and 1", "got 1.5"),
    ("outcomes.acceptance_rate=-0.1", "acceptance_rate", "between 0 and 1", "got -0.1"),
    ("outcomes.acceptance_rate=nan", "acceptance_rate", "between 0 and 1", "got nan"),
    ("outcomes.acceptance_rate=half", "acceptance_rate", "a number", "got 'half'"),
    ("outcomes.match_rate=0.5", "unknown key outcomes.match_rate", "acceptance_rate"),
    ("method.draft_length=-1", "draft_length", "between 0 and 250", "got -1"),
    ("method.draft_length=2.5", "draft_length", "whole number", "got 2.5"),
    ("method.draft_length=1000", "draft_length", "between 0 and 250", "got 1000"),
    ("method.draft_layers=0", "draft_layers", "between 1 and", "got 0"),
    ("method.sampled=yes", "sampled", "true or false", "got 'yes'"),
    ("method.placement=aparrt", "unknown placement 'aparrt'", "did you mean separate?"),
    ("method.draft_lenght=3", "takes no draft_lenght", "did you mean draft_length?"),
    ("cost.cost_ratio=-0.1", "cost_ratio", "between 0 and", "got -0.1"),
    ("cost.cost_ratio=nan", "cost_ratio", "between 0 and", "got nan"),
    ("cost.cost_ratio=cheap", "cost_ratio", "a number", "got 'cheap'"),
    ("cost.operations_ratio=-1", "operations_ratio", "got -1"),
    ("cost.medium_cost_ratio=0.5", "cost.medium_cost_ratio", "used by no method", "leave it out"),
    ("cost.verify_cost=[[2, 1.0]]", "verify_cost", "start at width 1", "got 2"),
    ("cost.verify_cost=[[1, 1.0], [3, -1.0]]", "verify_cost", "got -1"),
    ("cost.verify_cost=[[1, 0.0], [3, 1.0]]", "verify_cost", "got 0"),
    ("cost.verify_cost=[[1, 1.0], [3, nan]]", "verify_cost", "got nan"),
    ("cost.verify_cost=[[1, 1.0], [3, 1.2], [2, 1.3]]", "verify_cost", "widths"),
    ("cost.verify_cost=[[1, 1.0], [2.5, 1.2]]", "verify_cost", "2.5"),
    ("cost.verify_cost=[]", "verify_cost"),
    ("cost.verify_cost=3", "verify_cost", "got 3"),
    ("cost.verify_cost=[1, 2]", "verify_cost"),
    ('cost.verify_cost="fast"', "verify_cost", "got 'fast'"),
    ("cost.verify_cost=[[1, 1.0], [3, 1.2]]", "cost.verify_cost must reach width 4", "got 3", "draft less"),
    ("cost.kind=published", "task", "published"),
    ("cost.task=ende", "task", "published"),
    ("cluster.units=0", "units", "between 1 and", "got 0"),
]


@pytest.mark.parametrize(("setting", "fragments"), [(first, rest) for first, *rest in SET], ids=[first[0] for first in SET])
def test_invalid_value(setting: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures", "--set", setting], {"s.toml": BASE}))
    for fragment in fragments:
        assert fragment in message, message


def test_decreasing_verify_cost_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(BASE + "verify_cost = [[1, 1.0], [2, 1.2], [4, 1.1]]\n")
    done = CliRunner().invoke(app, ["run", "s.toml", "--no-figures"])
    assert done.exit_code == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: verify_cost should not fall with the width, got 1.1 at width 4 after 1.2")


def test_decreasing_profile_times_do_not_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU 16 tokens take less time than 12, and a policy uses the time of each width; verify_cost is not set by the user."""
    monkeypatch.chdir(tmp_path)
    method = '[[method]]\nname = "adaptive"\nlayers = 2\nmax_draft_length = 15\npolicy = "optimum"\n\n'
    cost = '[cost]\nkind = "profile"\nprofile = "cpu-llama-68m"\ndraft_profile = "cpu-llama-68m"\nprompt = 64\n'
    (tmp_path / "s.toml").write_text(SCENARIO + method + LAW + cost)
    done = CliRunner().invoke(app, ["run", "s.toml", "--no-figures"])
    assert done.exit_code == 0, done.stderr
    assert "warning" not in done.stderr


@pytest.mark.parametrize(
    ("method", "width"),
    [
        ('rule = "exact"', 12), ('rule = "exact"\ndraft_beams = 5', 18), ('rule = "per-beam"', 12),
        ('rule = "per-beam"\narrangement = "sequential"', 4),
    ],
)  # fmt: skip
def test_beam_search_error_names_the_pass_width(
    method: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run: a curve that is too short is invalid input, not a run in which every point fails."""
    text = BASE.replace('"speculative"', f'"beam"\nbeams = 3\n{method}')
    for last, enough in ((width - 1, False), (width, True)):
        files: dict[str, str | bytes] = {"s.toml": f"{text}verify_cost = [[1, 1.0], [{last}, 1.5]]\n"}
        if enough:
            (tmp_path / "s.toml").write_text(str(files["s.toml"]))
            assert CliRunner().invoke(app, ["run", "s.toml", "--no-figures", "-o", str(tmp_path / "out")]).exit_code == 0
        else:
            message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures"], files))
            assert f"cost.verify_cost must reach width {width}, the widest pass of method beam, got {last}" in message


@pytest.mark.parametrize("given", [3, 0.5, True, float("nan"), np.float32(1), object()], ids=lambda given: type(given).__name__)
def test_invalid_verify_cost(given: Any) -> None:
    for call in (speculative.speedup, speculative.optimal_draft_length):
        more = (0.7, 3, 0.1) if call is speculative.speedup else (0.7, 0.1)
        with pytest.raises(ParameterError, match="verify_cost must be pairs of a width and a time, got"):
            call(*more, verify_cost=given)  # type: ignore[operator]


@pytest.mark.parametrize("given", [np.array([]), np.array([1, 2]), np.array(["vllm"]), ["vllm"], None], ids=repr)
def test_invalid_engine(given: Any) -> None:
    with pytest.raises(ParameterError, match="unknown engine"):
        speculative.reported_acceptance(given, 5, rate=0.5)


def test_inner_draft_length_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BASE.replace('"speculative"', '"hierarchical"\nreading = "recursive"')
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures"], {"s.toml": text}))
    assert "inner_draft_length must be given for reading 'recursive'" in message


@pytest.mark.parametrize("lengths", [[[1] * 8, [2] * 8], [[10**30] * 8]], ids=["never tested", "without end"])
def test_extreme_rounds_give_no_array_warnings(
    lengths: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts no token is tested, and recorded rounds may be very long: neither gives a warning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(law(f'kind = "rounds"\nlengths = {lengths}'))
    for setting in ("scenario.tokens=1", "method.draft_length=0", "method.draft_length=3"):
        done = CliRunner().invoke(app, ["run", "s.toml", "--no-figures", "--json", "--set", setting])
        assert (done.exit_code, done.stderr) == (0, "")
        assert all(row["speedup"] >= 1 for row in json.loads(done.stdout)["results"] if "draft_length=3" not in setting)


def law(text: str) -> str:
    """The scenario with [outcomes] replaced."""
    return SCENARIO + METHOD + COST + "[outcomes]\n" + text


TOML = [
    (SCENARIO + METHOD + COST, "speculative needs [outcomes]", "accept"),
    (SCENARIO + METHOD + LAW, "cost.cost_ratio is required by method speculative", "no default"),
    (law("acceptance_rate = 0.5"), "outcomes.kind is required", "by-draft-position", "reported"),
    (law('kind = "idd"'), "unknown outcomes.kind 'idd'", "did you mean iid?"),
    (law('kind = "iid"'), "outcomes.acceptance_rate is required"),
    (law('kind = "markov"\nacceptance_rate = 0.2\ncorrelation = -0.5'), "correlation", "acceptance_rate=0.2", "got -0.5"),
    (law('kind = "by-draft-position"\nacceptance_rates = [0.5]'), "acceptance_rates", "3 drafted tokens", "got 1"),
    (law('kind = "by-draft-position"\nacceptance_rates = [0.5, 2, 0.1]'), "acceptance_rates[1]", "got 2"),
    (law('kind = "by-position"\nacceptance_rates = [0.5]'), "acceptance_rates must", "8 output positions", "got 1"),
    (law('kind = "shared-rate"\nacceptance_rate = 0.5\nconcentration = -1'), "concentration", "at least 0", "got -1"),
    (law('kind = "replay"\nrecords = [[true], [false, true]]'), "records[1] has length 2"),
    (law('kind = "rounds"'), "either lengths or file"),
    (law('kind = "rounds"\nlengths = [[1, 0, 2]]'), "lengths[0]", "at least 1"),
    (law('kind = "rounds"\nlengths = [[1, 2.5]]'), "lengths[0]", "whole numbers"),
    (law('kind = "rounds"\nlengths = [[1, 2]]'), "no record covers 8 output positions", "the longest has 2", "fewer tokens"),
    (law('kind = "rounds"\nlengths = []'), "lengths must be lists", "got []"),
    (law('kind = "rounds"\nlengths = [[2]]\ndrafter = "eagle"'), "drafter", "leave it out without a file"),
    (law('kind = "rounds"\nfile = "no.json"'), "no.json", "cannot be read"),
    (law('kind = "rounds"\nfile = "broken.json"'), "broken.json", "not JSON"),
    (law('kind = "rounds"\nfile = "log.jsonl"\ndrafter = "medusa"'), "line 1 of", "no acc_medusa.acc_len", "eagle, ngram"),
    (law('kind = "reported"\nengine = "tgi"\ndraft_length = 3\nrate = 0.5'), "unknown engine 'tgi'", "vllm"),
    (law('kind = "reported"\nengine = "vllm"\ndraft_length = 3'), "rate", "length", "or both"),
    (law('kind = "reported"\nengine = "vllm"\ndraft_length = 3\nrate = 0.5\nlength = 2'), "rate=0.5", "length=2", "2.5", "0.3333"),
    (law('kind = "reported"\nengine = "vllm"\ndraft_length = 3\nrate = [0.5]'), "rate must be a number"),
    (law('kind = "reported"\nengine = "sglang"\ndraft_length = 3\nrate = 0.5'), "field", "drafts", "with-bonus", "before-2025-10"),
    (law('kind = "reported"\nengine = "vllm"\ndraft_length = 3\nrate = 50'), "rate", "between 0 and 1", "got 50"),
    (law('kind = "reported"\nengine = "sglang"\ndraft_length = 3\nlength = 5'), "length", "between 1 and", "5"),
    (law('kind = "published"\ntask = "enfr"'), "unknown task 'enfr'", "cnndm, ende"),
    (law('kind = "published"\ntask = "ende"\nreading = "kind"'), "unknown reading 'kind'", "stated"),
    (law('kind = "published"\ntask = "ende"\ntable = "deck-table-1"'), "unknown table", "deck-table-2"),
    (SCENARIO + METHOD.replace("= 3", "= 5") + COST + '[outcomes]\nkind = "published"\ntask = "ende"', "draft_length", "5", "3, 7"),
    # One law each where several methods ask for different outcomes.
    (SCENARIO + METHOD + PPD + LAW + COST, "unknown key outcomes.acceptance_rate", "match_rate"),
    (SCENARIO + METHOD + COST + '[outcomes.match]\nkind = "iid"\nmatch_rate = 0.5', "[outcomes.match]", "no method", "leave it"),
    (SCENARIO + METHOD + PPD + COST + LAW.replace("[outcomes]", "[outcomes.accept]"), "ppd needs [outcomes.match]", "missing"),
    (SCENARIO + METHOD + COST + "[outcomes.accpet]\nkind = 'iid'\nacceptance_rate = 0.5", "accpet"),
    (SCENARIO + METHOD + COST + "[outcomes]\naccept = 3", "[outcomes.accept] must be a table", "got 3"),
    (SCENARIO + PPD + '[outcomes]\nkind = "iid"\nmatch_rate = 0.5\n' + COST, "cost.cost_ratio", "no method", "leave it out"),
    (BASE + '[[method]]\nname = "autoregressive"\nlayers = 8\n[method.cost]\ncost_ratio = 0.1', "method.cost.cost_ratio"),
    (SCENARIO + METHOD + "[method.outcomes]\nkind = 'iid'\n" + COST, "method.outcomes.acceptance_rate is required"),
    (SCENARIO + METHOD.rstrip() + "\nnum_speculative_tokens = 3\n" + LAW + COST, "another name of draft_length", "one of the two"),
    (BASE + '[sweep]\n"method.outcomes.acceptance_rate" = [0.5, 7]', "method.outcomes.kind is required"),
    (BASE + '[sweep]\n"outcomes.acceptance_rate" = [0.5, 7]', "acceptance_rate", "between 0 and 1", "got 7"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fragments"), [(first, rest) for first, *rest in TOML], ids=range(len(TOML)))
def test_invalid_scenario_file(text: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"acc_eagle": {"acc_len": [1, 2]}, "acc_ngram": {"acc_len": [1, 1]}})
    files: dict[str, str | bytes] = {"s.toml": text, "broken.json": "[[1, 2]", "log.jsonl": line}
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures"], files))
    for fragment in fragments:
        assert fragment in message, message
