"""Bad input to Big Little Decoder, SkipDecode and early exit: one readable message, exit code 2, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.commands.sim_app import app
from tests.project.test_bad_input import one_line, put, refused

SCENARIO = '[scenario]\nname = "small"\ntokens = 8\nreplications = 16\n\n'
BILD = '[[method]]\nname = "bild"\nlayers = 8\nmax_draft_length = 3\n\n'
THRESHOLDS = BILD.rstrip() + "\nfallback_threshold = 0.5\nrollback_threshold = 2.0\n\n"
SKIP = '[[method]]\nname = "skipdecode"\nbatching = "static"\n'
SKIP += 'layers = 8\nmin_layers = 3\nmax_layers = 6\nprompt = 4\nsequence_length = 20\n\n'
EXIT = '[[method]]\nname = "early_exit"\nbatching = "static"\nlayers = 4\nmeasure = "state"\n\n'
FIXED = '[[method]]\nname = "early_exit"\nlayers = 4\nexit_layer = 2\n\n'
PLAIN = '[[method]]\nname = "autoregressive"\nlayers = 8\n\n'
PPD = '[[method]]\nname = "ppd"\nlayers = 8\nexit_layer = 4\ncandidates = 1\n\n'
RATES = '[outcomes]\nkind = "rates"\nfallback_rate = 0.2\nrollback_rate = 0.1\n\n'
HAZARDS = '[outcomes]\nkind = "hazards"\nhazards = [0.2, 0.3, 0.5, 1.0]\n\n'
MATCH = '[outcomes]\nkind = "iid"\nmatch_rate = 0.5\n\n'
COST = "[cost]\ncost_ratio = 0.25\n\n"

LITTLE = SCENARIO + BILD + RATES + COST
LATE = SCENARIO + SKIP
EARLY = SCENARIO + EXIT + HAZARDS


def told(folder: Path, patch: pytest.MonkeyPatch, text: str, more: Sequence[str] = (), **files: str | bytes) -> str:
    """Error line of `sim run` for a scenario and its files; `sim lint` prints the same where no value is overridden."""
    held: dict[str, str | bytes] = {"s.toml": text, **{name.replace("_", "."): content for name, content in files.items()}}
    line = one_line(refused(folder, patch, ["run", "s.toml", "--no-figures", *more], held))
    if not more:
        assert one_line(refused(folder, patch, ["lint", "s.toml"], held)) == line
    return line


def names(line: str, fragments: Sequence[str]) -> None:
    for fragment in fragments:
        assert fragment in line, line


def runs(folder: Path, patch: pytest.MonkeyPatch, text: str, more: Sequence[str] = (), **files: str | bytes) -> dict[str, Any]:
    """JSON document of a run that must succeed."""
    put(folder, {"s.toml": text, **{name.replace("_", "."): content for name, content in files.items()}})
    patch.chdir(folder)
    done = CliRunner().invoke(app, ["run", "s.toml", "--no-figures", "--json", *more])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- Values that are set -------------------------------------------------------------------------------------------------

# The invalid value, and what the error must name: the key, the bound, the value, the remedy.
SET: list[tuple[str, str, list[str]]] = [
    (LITTLE, "outcomes.fallback_rate=1.5", ["fallback_rate", "between 0 and 1", "got 1.5"]),
    (LITTLE, "outcomes.fallback_rate=nan", ["fallback_rate", "between 0 and 1", "got nan"]),
    (LITTLE, "outcomes.rollback_rate=-0.1", ["rollback_rate", "between 0 and 1", "got -0.1"]),
    (LITTLE, "outcomes.rollback_rate=half", ["rollback_rate", "a number", "got 'half'"]),
    (LITTLE, "outcomes.rollback_rate=[0.1]", ["rollback_rate", "a number", "got [0.1]"]),
    (LITTLE, "outcomes.trials=0", ["trials", "at least 1", "got 0"]),
    (LITTLE, "outcomes.source=guess", ["unknown source 'guess'", "assumed, measured, published"]),
    (LITTLE, "outcomes.falback_rate=0.1", ["unknown key outcomes.falback_rate", "did you mean fallback_rate?"]),
    (LITTLE, "outcomes.kind=threshold", ["unknown outcomes.kind 'threshold'", "did you mean thresholds?"]),
    (LITTLE, "outcomes.kind=hazards", ["unknown outcomes.kind 'hazards'", "by-position, rates, replay, thresholds"]),
    (LITTLE, "outcomes.kind=by-position", ["fallback_rates", "rollback_rates", "of outcomes.kind 'by-position'"]),
    (LITTLE, "method.max_draft_length=0", ["max_draft_length", "between 1 and 250", "got 0"]),
    (LITTLE, "method.max_draft_length=251", ["max_draft_length", "between 1 and 250", "got 251"]),
    (LITTLE, "method.max_draft_length=2.5", ["max_draft_length", "whole number", "got 2.5"]),
    (LITTLE, "method.max_draft=3", ["bild takes no max_draft", "did you mean max_draft_length?"]),
    (LITTLE, "method.fallback_threshold=0.5", ["fallback_threshold", "no effect with outcomes.kind 'rates'", "leave it out"]),
    (LITTLE, "method.rollback_threshold=inf", ["rollback_threshold", "no effect with outcomes.kind 'rates'", "a record"]),
    (LITTLE, "method.fallback_threshold=1.5", ["fallback_threshold", "between 0 and 1", "got 1.5"]),
    (LITTLE, "method.rollback_threshold=-1", ["rollback_threshold", "at least 0", "got -1"]),
    (LITTLE, "method.rollback_threshold=nan", ["rollback_threshold", "at least 0", "got nan"]),
    (LITTLE, "method.rollback_threshold=far", ["rollback_threshold", "a number", "got 'far'"]),
    (LITTLE, "method.variant=codee", ["unknown variant 'codee'", "did you mean code?"]),
    (LITTLE, "method.placement=aparrt", ["unknown placement 'aparrt'", "did you mean separate?"]),
    (LITTLE, "method.draft_layers=0", ["draft_layers", "between 1 and", "got 0"]),
    (LITTLE, "method.exit_layer=4", ["cost.cost_ratio", "used by no method", "leave it out"]),
    (LITTLE, "cost.cost_ratio=-1", ["cost_ratio", "between 0 and", "got -1"]),
    (LITTLE, "cost.propagation=0.1", ["cost.propagation", "used by no method", "leave it out"]),
    (LITTLE, "cost.state_check=0.1", ["cost.state_check", "used by no method", "leave it out"]),
    (LITTLE, "cost.verify_cost=[[1, 1.0], [3, 1.2]]", ["cost.verify_cost", "reach width 4", "bild", "got 3", "draft less"]),
    (LITTLE, "cost.shape=t5-larg", ["unknown shape 't5-larg'", "did you mean t5-large?"]),
    (LITTLE, "cost.shape=t5-large", ["method.layers", "must be 24", "cost.shape 't5-large'", "got 8", "leave out shapes"]),
    (LITTLE, "cost.medium_shape=t5-small", ["cost.medium_shape", "used by no method", "leave it out"]),
    (LATE, "method.min_layers=7", ["min_layers", "between 1 and max_layers=6", "got 7"]),
    (LATE, "method.min_layers=0", ["min_layers", "between 1 and max_layers=6", "got 0"]),
    (LATE, "method.max_layers=9", ["max_layers", "between 1 and layers=8", "got 9"]),
    (LATE, "method.warm_up=4", ["warm_up", "between 0 and min_layers=3", "got 4"]),
    (LATE, "method.warm_up=-1", ["warm_up", "between 0 and min_layers=3", "got -1"]),
    (LATE, "method.prompt=20", ["prompt", "between 0 and sequence_length-1=19", "got 20"]),
    (LATE, "method.prompt=21", ["prompt", "between 0 and sequence_length-1=19", "got 21"]),
    (LATE, "method.sequence_length=0", ["sequence_length", "between 1 and", "got 0"]),
    (LATE, "scenario.tokens=17", ["tokens", "at most sequence_length-prompt=16", "got 17", "larger sequence_length or fewer"]),
    (LATE, "method.rounding=up", ["unknown rounding 'up'", "ceil, floor, half-even, half-up"]),
    (LATE, "method.power=-1", ["power", "at least 0", "got -1"]),
    (LATE, "method.sequences=0", ["sequences", "between 1 and 100000", "got 0"]),
    (LATE, "method.sequences=4097", ["sequences", "between 1 and 4096", "got 4097"]),
    (LATE, "method.batch=4", ["takes no batch", "it is now sequences", "'static'", "'continuous'"]),
    (LATE, "method.batching=continuos", ["unknown batching 'continuos'", "did you mean continuous?"]),
    (SCENARIO + PLAIN, "method.lengths=[8]", ["takes no lengths"]),
    (LATE.replace("static", "lockstep"), "method.lengths=[8, 2]", ["lengths", "left out", "batching='lockstep'", "'static'"]),
    (LATE.replace("static", "continuous"), "method.sequences=4", ["batching", "'static' or 'lockstep'", "sequences=4", "same"]),
    (SCENARIO + PPD + MATCH, "method.sequences=4", ["must be 'lockstep'", "sequences=4", "got 'continuous'", "set batching"]),
    (LATE, "method.lengths=[]", ["lengths", "at least one length", "got []"]),
    (LATE, "method.lengths=8", ["lengths", "list", "got 8"]),
    (LATE, "method.lengths=[8, 0]", ["lengths[1]", "between 1 and", "got 0"]),
    (LATE, "method.lengths=[8.0]", ["lengths[0]", "whole number", "got 8.0"]),
    (LATE, "method.lengths=[3, 9]", ["lengths", "must equal tokens=8", "got 9", "set tokens to that"]),
    (LATE, "method.lengths=[7]", ["lengths", "must equal tokens=8", "got 7", "set tokens to that"]),
    (LATE, "cost.cost_ratio=0.5", ["cost.cost_ratio", "used by no method", "leave it out"]),
    (LATE, "cost.propagation=0.1", ["cost.propagation", "used by no method", "leave it out"]),
    (LATE, "cost.state_check=0.1", ["cost.state_check", "used by no method", "leave it out"]),
    (LATE, "cost.draft_shape=t5-small", ["cost.draft_shape", "used by no method", "leave it out"]),
    (LATE, "outcomes.kind=rates", ["[outcomes]", "no method", "leave it out"]),
    (LATE, "method.outcomes.kind=rates", ["[method.outcomes]", "skipdecode", "leave it out"]),
    (LATE, "outcomes.decision.kind=rates", ["[outcomes.decision]", "no method", "leave it out"]),
    (EARLY, "method.measure=soft", ["unknown measure 'soft'", "did you mean softmax?"]),
    (EARLY, "method.first_check=0", ["first_check", "between 1 and layers=4", "got 0"]),
    (EARLY, "method.first_check=5", ["first_check", "between 1 and layers=4", "got 5"]),
    (EARLY, "method.first_check=2", ["hazards", "0 before first_check=2", "got 0.2 after layer 1"]),
    (EARLY, "method.threshold=0.5", ["threshold", "no effect with outcomes.kind 'hazards'", "leave it out"]),
    (EARLY, "method.threshold=1.5", ["threshold", "between 0 and 1", "got 1.5"]),
    (EARLY, "method.temperature=4", ["threshold is required with temperature"]),
    (EARLY, "method.decay=paper", ["threshold is required with decay"]),
    (EARLY, "method.longest=8", ["threshold is required with longest"]),
    (EARLY, "method.temperature=-1", ["temperature", "at least 0", "got -1"]),
    (EARLY, "method.longest=0", ["longest", "between 1 and", "got 0"]),
    (EARLY, "method.decay=papr", ["unknown decay 'papr'", "did you mean paper?"]),
    (EARLY, "method.fill=back", ["unknown fill 'back'", "did you mean backfill?"]),
    (EARLY, "method.exit_layer=2", ["[outcomes]", "no method", "leave it out"]),
    (SCENARIO + EXIT, "method.exit_layer=2", ["measure", "no effect with an exit_layer", "got 'state'", "leave it out"]),
    (SCENARIO + FIXED, "method.exit_layer=5", ["exit_layer", "between 1 and layers=4", "got 5"]),
    (SCENARIO + FIXED, "method.first_check=2", ["first_check", "no effect with an exit_layer", "got 2", "leave it out"]),
    (SCENARIO + FIXED, "method.threshold=0.4", ["threshold", "no effect with an exit_layer", "got 0.4", "leave it out"]),
    (SCENARIO + FIXED, "method.fill=backfill", ["fill", "no effect with an exit_layer", "got 'backfill'", "leave it out"]),
    (SCENARIO + FIXED, "method.decay=paper", ["decay", "no effect with an exit_layer", "got 'paper'", "leave it out"]),
    (SCENARIO + FIXED, "method.longest=8", ["longest", "no effect with an exit_layer", "got 8", "leave it out"]),
    (EARLY, "outcomes.hazards=[0.1]", ["hazards", "one probability for each of layers=4", "got 1"]),
    (EARLY, "outcomes.hazards=[0.1, 0.1, 0.1, 0.1, 1]", ["hazards", "one probability for each of layers=4", "got 5"]),
    (EARLY, "outcomes.hazards=[]", ["hazards", "a probability for each layer", "got []"]),
    (EARLY, "outcomes.hazards=0.1", ["hazards", "a probability for each layer", "got 0.1"]),
    (EARLY, "outcomes.hazards=[0.1, 0.2, 1.5, 1]", ["hazards[2]", "between 0 and 1", "got 1.5"]),
    (EARLY, "outcomes.hazards=[0.1, nan, 0.5, 1]", ["hazards[1]", "between 0 and 1", "got nan"]),
    (EARLY, 'outcomes.hazards=["a", 0.2, 0.3, 1]', ["hazards[0]", "a number", "got 'a'"]),
    (EARLY, "outcomes.trials=3", ["unknown key outcomes.trials", "hazards, source", "of outcomes.kind 'hazards'"]),
    (EARLY, "outcomes.kind=confidences", ["unknown key outcomes.hazards", "file, log, source", "of outcomes.kind 'confidences'"]),
    (EARLY, "cost.propagation=-1", ["propagation", "between 0 and", "got -1"]),
    (EARLY, "cost.state_check=nan", ["state_check", "between 0 and", "got nan"]),
    (EARLY, "cost.cost_ratio=0.1", ["cost.cost_ratio", "used by no method", "leave it out"]),
    (EARLY, "cost.shape=gpt2", ["method.layers", "must be 12", "cost.shape 'gpt2'", "got 4", "leave out shapes"]),
    (EARLY, "method.lengths=[2]", ["lengths", "must equal tokens=8", "got 2", "set tokens to that"]),
]


@pytest.mark.parametrize(("base", "setting", "fragments"), SET, ids=[f"{index}-{each[1]}" for index, each in enumerate(SET)])
def test_invalid_value(base: str, setting: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names(told(tmp_path, monkeypatch, base, ["--set", setting]), fragments)


NARROW = "cost.verify_cost=[[1, 1.0], [3, 1.2]]"
TOGETHER: list[tuple[str, list[str], list[str]]] = [
    (LITTLE.replace(COST, ""), ["method.exit_layer=0"], ["exit_layer", "between 1 and layers-1=7", "got 0"]),
    (LITTLE.replace(COST, ""), ["method.exit_layer=8"], ["exit_layer", "between 1 and layers-1=7", "got 8"]),
    (LITTLE.replace(COST, ""), ["method.exit_layer=4", "method.variant=code"], ["variant", "'paper'", "exit_layer", "got 'code'"]),
    (LITTLE.replace(COST, ""), ["method.exit_layer=4", "method.placement=separate"],
     ["placement", "'colocated'", "got 'separate'"]),
    (LITTLE.replace(COST, ""), ["method.exit_layer=4", "method.draft_layers=2"], ["draft_layers", "exit_layer", "got 2"]),
    (LITTLE, ["method.layers=24", "cost.shape=t5-large"], ["cost.draft_shape is required", "together with cost.shape", "or none"]),
    (
        LITTLE, ["method.layers=24", "method.draft_layers=3", "cost.shape=t5-large", "cost.draft_shape=t5-small"],
        ["method.draft_layers", "must be 6", "cost.draft_shape 't5-small'", "got 3"],
    ),
    (
        LITTLE, ["method.draft_layers=6", "cost.draft_shape=t5-small"],
        ["cost.shape is required by method bild together with cost.draft_shape", "or none"],
    ),
    (LATE, ["method.sequences=4", NARROW], ["reach width 4", "skipdecode", "got 3", "fewer sequences"]),
    (EARLY, ["method.sequences=4", NARROW], ["reach width 4", "early_exit", "got 3", "fewer sequences"]),
    (EARLY, ["method.fill=backfill", "cost.verify_cost=[[1, 1.0], [6, 1.2]]"], ["reach width 7", "got 6", "fewer tokens"]),
    (EARLY, ["method.fill=backfill", "method.sequences=2"], ["sequences", "must be 1", "fill='backfill'", "got 2", "'propagate'"]),
    (EARLY, ["method.threshold=0.5", "method.decay=paper"], ["temperature is required with decay", "all three, or none"]),
    (
        EARLY, ["method.threshold=0.5", "method.decay=code", "method.temperature=4"],
        ["longest is required with temperature", "all three, or none"],
    ),
    (
        EARLY, ["method.threshold=0.5", "method.decay=code", "method.temperature=4", "method.longest=7"],
        ["longest", "at least tokens=8", "got 7"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("base", "settings", "fragments"), TOGETHER, ids=range(len(TOGETHER)))
def test_inconsistent_values(
    base: str, settings: list[str], fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(told(tmp_path, monkeypatch, base, [word for setting in settings for word in ("--set", setting)]), fragments)


SWEEPS: list[tuple[str, str, list[str]]] = [
    (LITTLE, "outcomes.fallback_rate=0.1,1.5", ["fallback_rate", "between 0 and 1", "got 1.5"]),
    (LITTLE, "outcomes.rollback_rate=0.1,nan", ["rollback_rate", "between 0 and 1", "got nan"]),
    (LITTLE, "outcomes.rollback_rate=0:2:900", ["rollback_rate", "between 0 and 1", "got 2"]),
    (LITTLE, "method.max_draft_length=0:3:4", ["max_draft_length", "between 1 and 250", "got 0"]),
    (LATE, "scenario.tokens=8,17", ["tokens", "at most sequence_length-prompt=16", "got 17"]),
    (LATE, "method.min_layers=3,7", ["min_layers", "between 1 and max_layers=6", "got 7"]),
    (LATE, "method.sequences=1,0", ["sequences", "between 1 and 100000", "got 0"]),
    (LATE, "method.lengths=[[8, 2], [9]]", ["lengths", "must equal tokens=8", "got 9"]),
    (EARLY, "outcomes.hazards=[[0.1, 0.2, 0.3, 1], [0.1]]", ["hazards", "layers=4", "got 1"]),
    (EARLY, "outcomes.hazards=0.1,0.2,0.3,1", ["hazards", "a list", "got 0.1"]),
    (EARLY, "method.first_check=1,5", ["first_check", "between 1 and layers=4", "got 5"]),
]


@pytest.mark.parametrize(("base", "axis", "fragments"), SWEEPS, ids=[f"{index}-{each[1]}" for index, each in enumerate(SWEEPS)])
def test_invalid_axis(base: str, axis: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names(told(tmp_path, monkeypatch, base, ["--sweep", axis]), fragments)


@pytest.mark.parametrize("key", ["min_layers", "max_layers", "prompt", "sequence_length"])
def test_invalid_schedule(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names(told(tmp_path, monkeypatch, LATE.replace(f"\n{key} =", f"\n# {key} =")), [f"method.{key} is required", "no default"])


# --- Scenario files ------------------------------------------------------------------------------------------------------


def little(law: str, method: str = BILD) -> str:
    """Big Little Decoder with other [outcomes]."""
    return SCENARIO + method + COST + "[outcomes]\n" + law


DECIDED = '[outcomes.decision]\nkind = "rates"\nfallback_rate = 0.1\nrollback_rate = 0.1\n'
TOML: list[tuple[str, list[str]]] = [
    (SCENARIO + BILD + COST, ["bild needs [outcomes] (decision)", "`sim ls outcomes`"]),
    (SCENARIO + EXIT, ["early_exit needs [outcomes] (exit)", "`sim ls outcomes`"]),
    (SCENARIO + BILD + RATES, ["cost.cost_ratio is required by method bild", "no default"]),
    (little("fallback_rate = 0.1\nrollback_rate = 0.1"), ["outcomes.kind is required", "by-position, rates, replay, thresholds"]),
    (little('kind = "rates"\nfallback_rate = 0.1'), ["outcomes.rollback_rate is required", "no default"]),
    (little('kind = "by-position"\nfallback_rates = [0.1, 0.1]'), ["outcomes.rollback_rates is required", "no default"]),
    (little('kind = "by-position"\nfallback_rates = 0.1\nrollback_rates = 0.1'), ["fallback_rates", "a list of rates", "got 0.1"]),
    (little('kind = "by-position"\nfallback_rates = []\nrollback_rates = []'), ["fallback_rates", "a list of rates", "got []"]),
    (little('kind = "by-position"\nfallback_rates = [0.1, 2]\nrollback_rates = [0, 0]'), ["fallback_rates[1]", "0 and 1", "got 2"]),
    (little('kind = "by-position"\nfallback_rates = [0.1]\nrollback_rates = [nan]'), ["rollback_rates[0]", "0 and 1", "got nan"]),
    (little('kind = "by-position"\nfallback_rates = [0.1, 0.1]\nrollback_rates = [0]'), ["as many as fallback_rates, 2", "got 1"]),
    (
        little(f'kind = "by-position"\nfallback_rates = {[0.1] * 7}\nrollback_rates = {[0.1] * 7}'),
        ["fallback_rates", "each of 8 output positions", "got 7", "fewer tokens"],
    ),
    (
        little(f'kind = "by-position"\nfallback_rates = {[0.1] * 8}\nrollback_rates = {[0.1] * 8}', THRESHOLDS),
        ["fallback_threshold", "no effect with outcomes.kind 'by-position'", "leave it out"],
    ),
    (SCENARIO + THRESHOLDS + RATES + COST, ["fallback_threshold", "no effect with outcomes.kind 'rates'", "leave it out"]),
    (little('kind = "thresholds"\nsureness = 3'), ["fallback_threshold is required", "[[method]]"]),
    (
        little('kind = "thresholds"\nsureness = 3', THRESHOLDS.replace("rollback_threshold = 2.0\n", "")),
        ["rollback_threshold is required", "[[method]]"],
    ),
    (little('kind = "thresholds"', THRESHOLDS), ["a file, a log or sureness", "one of the three"]),
    (little('kind = "thresholds"\nfile = "d.json"\nsureness = 3', THRESHOLDS), ["a file, a log or sureness", "one of the three"]),
    (little('kind = "thresholds"\nsureness = -1', THRESHOLDS), ["sureness", "at least 0", "got -1"]),
    (little('kind = "thresholds"\nsureness = nan', THRESHOLDS), ["sureness", "at least 0", "got nan"]),
    (little('kind = "thresholds"\nsureness = "much"', THRESHOLDS), ["sureness", "a number", "got 'much'"]),
    (little('kind = "thresholds"\nsureness = 3\nsource = "measured"', THRESHOLDS), ["source", "assumed", "got 'measured'"]),
    (little('kind = "thresholds"\nfile = 3', THRESHOLDS), ["file must be a path in quotes", "got 3"]),
    (little('kind = "thresholds"\nfile = "no.json"', THRESHOLDS), ["'no.json' cannot be read", "No such file", "JSON or CSV file"]),
    (little('kind = "thresholds"\nfile = "no.csv"', THRESHOLDS), ["'no.csv' cannot be read", "No such file", "JSON or CSV file"]),
    (little('kind = "thresholds"\nfile = "."', THRESHOLDS), ["cannot be read", "it is a folder", "JSON or CSV file"]),
    (little('kind = "replay"', THRESHOLDS), ["outcomes must come from a file or from a log"]),
    (little('kind = "replay"\nfile = 3', THRESHOLDS), ["file must be a path in quotes", "got 3"]),
    (little('kind = "replay"\nfile = "no.json"', THRESHOLDS), ["'no.json' cannot be read", "No such file"]),
    # Unused keys, and missing keys with several methods.
    (LATE + RATES, ["[outcomes] is used by no method", "leave it out"]),
    (SCENARIO + FIXED + HAZARDS, ["[outcomes] is used by no method", "leave it out"]),
    (SCENARIO + PLAIN + '[outcomes]\nkind = "iid"\nmatch_rate = 7', ["[outcomes] is used by no method", "leave it out"]),
    (SCENARIO + FIXED + '[method.outcomes]\nkind = "hazards"\nhazards = [9]', ["[method.outcomes]", "early_exit", "leave it out"]),
    (little("").replace("[outcomes]\n", DECIDED) + '[outcomes.exit]\nkind = "hazards"', ["[outcomes.exit]", "leave it out"]),
    (SCENARIO + BILD + EXIT + COST + DECIDED, ["early_exit needs [outcomes.exit]", "missing"]),
    (SCENARIO + BILD + EXIT + COST + RATES, ["unknown outcomes.kind 'rates'", "confidences, hazards"]),
    (SCENARIO + BILD + COST + DECIDED.replace("decision", "decison"), ["outcomes.decison", "did you mean decision?"]),
    (SCENARIO + BILD + COST + "[outcomes]\ndecision = 3", ["[outcomes.decision] must be a table", "got 3"]),
    (SCENARIO + BILD + COST + DECIDED.replace('kind = "rates"\n', ""), ["outcomes.decision.kind is required", "rates"]),
    (SCENARIO + BILD + "[method.cost]\ncost_ratio = 0.1\npropagation = 1\n" + RATES, ["method.cost.propagation", "leave"]),
    (SCENARIO + EXIT + "[method.cost]\ncost_ratio = 0.1\n" + HAZARDS, ["method.cost.cost_ratio", "no method", "leave it out"]),
    (SCENARIO + PLAIN + "[cost]\nverify_cost = [[1, 1.0], [2, 1.1]]", ["cost.verify_cost", "no method", "leave it out"]),
    (
        SCENARIO + PPD + '[outcomes]\nkind = "iid"\nmatch_rate = 0.5\n[cost]\nstate_check = 0.1',
        ["cost.state_check", "no method", "leave it out"],
    ),
    (SCENARIO + BILD + SKIP + RATES + COST + "propagation = 1", ["cost.propagation", "no method", "leave it out"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fragments"), TOML, ids=range(len(TOML)))
def test_invalid_scenario_file(text: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names(told(tmp_path, monkeypatch, text), fragments)


# --- Decision records ----------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "confidence": [0.9, 0.4, 0.8, 0.7], "distance": [0.1, 3.0, 2.5, 0.2], "agrees": [True, False, False, True],
}  # fmt: skip
HUGE = "1" + "0" * 5000


def but(**columns: Any) -> str:
    """The valid record with columns replaced; a column that is None is left out."""
    return json.dumps({name: values for name, values in {**GOOD, **columns}.items() if values is not None})


JSON: dict[str, tuple[str | bytes, list[str]]] = {
    "missing column": (but(distance=None), ["column distance is missing", "confidence, distance, agrees", "'d.json'"]),
    "no columns": ("{}", ["column confidence is missing", "got []"]),
    "unknown column": (but(agree=[1, 1, 1, 1]), ["unknown column 'agree'", "did you mean agrees?", "'d.json'"]),
    "unknown column over two lines": (but(**{"a\nb": [1, 1, 1, 1]}), ["unknown column", "'d.json'"]),
    "nan": (but(confidence=[0.9, float("nan"), 0.8, 0.7]), ["confidence", "between 0 and 1", "got nan in row 2", "'d.json'"]),
    "above 1": (but(confidence=[0.9, 0.4, 0.8, 1.5]), ["confidence", "between 0 and 1", "got 1.5 in row 4"]),
    "negative": (but(distance=[0.1, 3.0, -2.5, 0.2]), ["distance", "at least 0", "got -2.5 in row 3"]),
    "infinite": (but(distance=[float("inf"), 3.0, 2.5, 0.2]), ["distance", "finite", "got inf in row 1"]),
    "half an answer": (but(agrees=[1, 0, 0.5, 1]), ["agrees must be true or false", "got 0.5 in row 3"]),
    "unequal": (but(distance=[0.1, 3.0, 2.5]), ["confidence 4, distance 3, agrees 4", "distance has none in row 4", "'d.json'"]),
    "empty columns": (but(confidence=[], distance=[], agrees=[]), ["at least one", "got confidence 0, distance 0, agrees 0"]),
    "word": (but(confidence=[0.9, "sure", 0.8, 0.7]), ["confidence must be a list of numbers", "got 'sure' in row 2"]),
    "quoted number": (but(confidence=["0.9", 0.4, 0.8, 0.7]), ["confidence must be a list of numbers", "got '0.9' in row 1"]),
    "null": (but(distance=[0.1, None, 2.5, 0.2]), ["distance must be a list of numbers", "got None in row 2"]),
    "true for a number": (but(confidence=[0.9, 0.4, True, 0.7]), ["confidence must be a list of numbers", "got True in row 3"]),
    "list for a number": (but(confidence=[0.9, [0.4], 0.8, 0.7]), ["confidence must be a list of numbers", "got [0.4] in row 2"]),
    "list first": (but(confidence=[[0.9], 0.4, 0.8, 0.7]), ["a list for each sequence in every column", "none in confidence"]),
    "nested column": (but(confidence=[[0.9, 0.4], [0.8, 0.7]]), ["a list for each sequence in every column", "none in distance"]),
    "sequences of unequal lengths": (
        json.dumps({"confidence": [[0.9, 0.4], [0.8]], "distance": [[0.1], [0.2, 0.3]], "agrees": [[1, 1], [1]]}),
        ["confidence 2, distance 1, agrees 2", "distance has none in row 2", "sequence 1"],
    ),
    "no list": (but(confidence=0.5), ["'d.json' must hold an object of lists", "confidence, distance, agrees"]),
    "no object": ("[1, 2]", ["'d.json' must hold an object of lists", "confidence, distance, agrees"]),
    "empty": ("", ["'d.json' cannot be read", "not JSON", "line 1 column 1", "JSON or CSV file"]),
    "cut off": ('{"confidence": [0.9', ["'d.json' cannot be read", "not JSON", "line 1", "JSON or CSV file"]),
    "too deep": ("[" * 100_000, ["'d.json' cannot be read", "nested too deeply"]),
    "too many digits": (f'{{"confidence": [{HUGE}]}}', ["'d.json' cannot be read", "too many digits"]),
    "too large": (but(confidence=[10**400, 1, 1, 1]), ["confidence must be a list of numbers", "about 401 digits"]),
    "no text": (b"\xff\xfe\x00", ["'d.json' cannot be read", "not UTF-8 text"]),
}  # fmt: skip


@pytest.mark.parametrize("case", JSON)
def test_invalid_decision_record_in_json(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, fragments = JSON[case]
    text = little('kind = "thresholds"\nfile = "d.json"', THRESHOLDS)
    names(told(tmp_path, monkeypatch, text, d_json=content), fragments)


HEAD = "confidence,distance,agrees\n"
CSV: dict[str, tuple[str, list[str]]] = {
    "short row": (HEAD + "0.9,0.1,true\n0.4,3\n", ["'d.csv' must have 3 values in each row", "got 2 in row 2"]),
    "long row": (HEAD + "0.9,0.1,true,1\n", ["'d.csv' must have 3 values in each row", "got 4 in row 1"]),
    "empty": ("", ["'d.csv' cannot be read", "empty", "confidence, distance, agrees"]),
    "only blank lines": ("\n\n", ["'d.csv' cannot be read", "empty", "confidence, distance, agrees"]),
    "head alone": (HEAD, ["at least one", "got confidence 0, distance 0, agrees 0", "'d.csv'"]),
    "word": (HEAD + "0.9,0.1,true\nsure,1,false\n", ["confidence must be a list of numbers", "got 'sure' in row 2", "'d.csv'"]),
    "empty cell": (HEAD + "0.9,,true\n", ["distance must be a list of numbers", "got '' in row 1"]),
    "other answer": (HEAD + "0.9,0.1,yes\n", ["agrees must be a list of numbers", "got 'yes' in row 1"]),
    "true for a number": (HEAD + "true,0.1,true\n", ["confidence must be a list of numbers", "got True in row 1"]),
    "nan": (HEAD + "0.9,0.1,true\nnan,1,false\n", ["confidence", "between 0 and 1", "got nan in row 2"]),
    "above 1": (HEAD + "0.9,0.1,true\n2,1,false\n", ["confidence", "between 0 and 1", "got 2 in row 2"]),
    "missing column": ("confidence,distance\n0.9,1\n", ["column agrees is missing", "got ['confidence', 'distance']", "'d.csv'"]),
    "unknown column": ("confidence,distance,agrees,id\n0.9,1,true,7\n", ["unknown column 'id'", "known: agrees, confidence"]),
    "column twice": ("confidence,confidence,distance,agrees\n0.9,0.8,1,true\n", ["each column once", "'confidence' a second time"]),
    "no head": ("0.9,0.1,true\n0.4,3,false\n", ["column confidence is missing", "got ['0.9', '0.1', 'true']"]),
    "semicolons": ("confidence;distance;agrees\n0.9;0.1;true\n", ["column confidence is missing", "'confidence;distance;agrees'"]),
    "endless field": (HEAD + "0.9,0.1," + "x" * 200_000 + "\n", ["'d.csv' cannot be read", "field larger than"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CSV)
def test_invalid_decision_record_in_csv(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, fragments = CSV[case]
    text = little('kind = "thresholds"\nfile = "d.csv"', THRESHOLDS)
    names(told(tmp_path, monkeypatch, text, d_csv=content), fragments)


def nested(*lengths: int, **columns: Any) -> str:
    """Recorded sequences of these lengths, in every column one list per sequence."""
    texts = {name: [[values[place % 4] for place in range(length)] for length in lengths] for name, values in GOOD.items()}
    return json.dumps({name: values for name, values in {**texts, **columns}.items() if values is not None})


TEXTS: dict[str, tuple[str, list[str]]] = {
    "too short": (nested(6, 9), ["tokens-1=7 positions", "got 6 in the shortest", "or leave out short sequences"]),
    "empty text": (nested(9, 0), ["at least one", "sequence 2 of the decision record"]),
    "no sequences": (nested(), ["a list for each sequence in every column", "none in confidence"]),
    "no columns": ("{}", ["a list for each sequence in every column", "got no column"]),
    "flat": (but(), ["a list for each sequence in every column", "none in confidence", "kind 'thresholds'"]),
    "one column flat": (nested(8, 8, agrees=GOOD["agrees"]), ["a list for each sequence in every column", "none in agrees"]),
    "one text flat": (nested(8, 8, agrees=[[True] * 8, True]), ["a list for each sequence in every column", "none in agrees"]),
    "fewer sequences": (nested(8, 8, agrees=[[True] * 8]), ["sequences in every column", "confidence 2, distance 2, agrees 1"]),
    "missing column": (nested(8, 8, agrees=None), ["column agrees is missing", "confidence, distance, agrees"]),
    "unknown column": (nested(8, 8, surprise=[[1] * 8] * 2), ["unknown column 'surprise'", "known: agrees"]),
    "above 1": (nested(8, 8, confidence=[[0.5] * 8, [0.5] * 3 + [1.5] * 5]), ["between 0 and 1", "got 1.5 in row 4", "sequence 2"]),
    "unequal": (nested(8, 8, distance=[[0.5] * 8, [0.5] * 5]), ["confidence 8, distance 5", "none in row 6", "sequence 2"]),
    "cut off": ('{"confidence": [[0.9', ["'r.json' cannot be read", "not JSON", "line 1"]),
    "no object": ("3", ["'r.json' must hold an object of lists", "confidence, distance, agrees"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_invalid_sequences_to_replay(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, fragments = TEXTS[case]
    text = little('kind = "replay"\nfile = "r.json"', THRESHOLDS)
    names(told(tmp_path, monkeypatch, text, r_json=content), fragments)


def test_sequences_to_replay_are_not_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = little('kind = "replay"\nfile = "r.csv"', THRESHOLDS)
    names(told(tmp_path, monkeypatch, text, r_csv=HEAD + "0.9,0.1,true\n"), ["a list for each sequence", "for kind 'thresholds'"])


def test_files_on_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = little('kind = "thresholds"\nfile = "d.json"', THRESHOLDS)
    line = told(tmp_path, monkeypatch, text, ["--sweep", "outcomes.file=d.json,no.json"], d_json=but())
    names(line, ["'no.json' cannot be read", "No such file"])


# --- Records of confidences ----------------------------------------------------------------------------------------------

SURE = [[0.2, 0.6, 0.9, 1.0], [0.9, 0.1, 0.2, 0.4]]
RIGHT = [[False, False, True, True], [True, True, False, True]]
CONFIDENCES = SCENARIO + EXIT.rstrip() + '\nthreshold = 0.5\n\n[outcomes]\nkind = "confidences"\nfile = "c.json"\n'

LAYERS: dict[str, tuple[Any, list[str]]] = {
    "ragged": ({"confidence": [SURE[0], SURE[1][:3]]}, ["confidence", "4 of them", "got 3 in row 2", "'c.json'"]),
    "another depth": ({"confidence": [[0.1, 0.2, 0.3]]}, ["confidence", "each of layers=4", "got 3"]),
    "above 1": ({"confidence": [SURE[0], [0.1, 1.5, 0, 0]]}, ["confidence", "between 0 and 1", "got 1.5 in row 2", "'c.json'"]),
    "negative": ({"confidence": [[-0.1, 1, 0, 0]]}, ["confidence", "between 0 and 1", "got -0.1 in row 1"]),
    "nan": ('{"confidence": [[0.1, NaN, 0.2, 0.3]]}', ["confidence", "between 0 and 1", "got nan in row 1"]),
    "infinite": ('{"confidence": [[0.1, Infinity, 0.2, 0.3]]}', ["confidence", "between 0 and 1", "got inf in row 1"]),
    "word": ({"confidence": [["a", 0.1, 0.2, 0.3]]}, ["confidence", "between 0 and 1", "got 'a' in row 1"]),
    "null": ({"confidence": [[None, 0.1, 0.2, 0.3]]}, ["confidence", "between 0 and 1", "got None in row 1"]),
    "true for a number": ({"confidence": [[True, 0.1, 0.2, 0.3]]}, ["confidence", "got True in row 1"]),
    "flat": ({"confidence": SURE[0]}, ["confidence", "a list for each token of one number for each layer", "got [0.2, 0.6"]),
    "empty": ({"confidence": []}, ["confidence", "a list for each token", "got []"]),
    "empty row": ({"confidence": [[]]}, ["confidence", "a list for each token", "got [[]]"]),
    "no list": ({"confidence": 0.5}, ["confidence", "a list for each token", "got 0.5"]),
    "no object": (SURE, ["column confidence is missing in 'c.json'", "an object with confidence"]),
    "missing column": ({"agrees": RIGHT}, ["column confidence is missing in 'c.json'", "optionally, agrees"]),
    "unknown column": ({"confidence": SURE, "agree": RIGHT}, ["unknown column 'agree'", "did you mean agrees?", "'c.json'"]),
    "half an answer": (
        {"confidence": SURE, "agrees": [[0.5, 0, 1, 1], RIGHT[1]]}, ["agrees must be true or false", "got 0.5 in row 1"],
    ),
    "fewer answers": ({"confidence": SURE, "agrees": RIGHT[:1]}, ["agrees", "2 by 4", "got 1 by 4", "'c.json'"]),
    "answers of fewer layers": ({"confidence": SURE, "agrees": [[0, 0, 1]] * 2}, ["agrees", "2 by 4", "got 2 by 3"]),
    "the last layer against itself": (
        {"confidence": SURE, "agrees": [RIGHT[0], [True, True, False, False]]}, ["agrees", "last layer", "got false in row 2"],
    ),
    "empty file": ("", ["'c.json' cannot be read", "not JSON", "line 1 column 1", "JSON file of confidences"]),
    "cut off": ('{"confidence": [[', ["'c.json' cannot be read", "not JSON", "JSON file of confidences"]),
    "no text": (b"\xff\xff", ["'c.json' cannot be read", "not UTF-8 text"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_invalid_record_of_confidences(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, fragments = LAYERS[case]
    content = given if isinstance(given, str | bytes) else json.dumps(given)
    names(told(tmp_path, monkeypatch, CONFIDENCES, c_json=content), fragments)


CHOICES: list[tuple[str, list[str]]] = [
    (CONFIDENCES.replace("threshold = 0.5\n", ""), ["threshold is required where outcomes are confidences", "[[method]]"]),
    (CONFIDENCES.replace('"c.json"', '"no.json"'), ["'no.json' cannot be read", "No such file", "JSON file of confidences"]),
    (CONFIDENCES.replace('"c.json"', "3"), ["file must be a path in quotes", "got 3"]),
    (CONFIDENCES.replace('file = "c.json"\n', ""), ["outcomes must come from a file or from a log"]),
    (CONFIDENCES + "sureness = 3\n", ["unknown key outcomes.sureness", "file, log, source"]),
    (CONFIDENCES + 'source = "me"\n', ["unknown source 'me'", "assumed, measured, published"]),
]


@pytest.mark.parametrize(("text", "fragments"), CHOICES, ids=range(len(CHOICES)))
def test_confidences_with_missing_keys(
    text: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(told(tmp_path, monkeypatch, text, c_json=json.dumps({"confidence": SURE})), fragments)


# --- What is not bad -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.csv", HEAD + "0.9,0.1,TRUE\n0.4,3,False\n0.8,2.5,0\n0.7,0.2,1\n"),
        ("d.CSV", "confidence, distance, agrees\r\n0.9, 0.1, true\r\n\r\n0.4, 3, false\r\n0.8, 2.5, false\r\n0.7, 0.2, true\r\n"),
        ("d.csv", "\ufeffagrees,distance,confidence\n1,0.1,0.9\n0,3,0.4\n0,2.5,0.8\n1,0.2,0.7"),
        ("d.json", "\ufeff" + but()),
        ("d.json", but(agrees=[1, 0, 0.0, 1.0])),
        ("d.json", json.dumps({key: [values[:1], values[1:]] for key, values in GOOD.items()})),
    ],
    ids=["answers", "spaces and blank lines", "byte-order mark", "json with byte-order mark", "numbers", "sequences"],
)  # fmt: skip
def test_same_record_in_json_and_csv(name: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = little(f'kind = "thresholds"\nfile = "{name}"', THRESHOLDS)
    (tmp_path / name).write_text(content, newline="")
    [row, *_] = runs(tmp_path, monkeypatch, text)["results"]
    # One of four is below .5; of the other three one is farther than 2.
    assert (row["fallback_rate"], row["rollback_rate"]) == (0.25, pytest.approx(1 / 3))
    assert row["fallback_rate_trials"] == 4


def test_curve_must_reach_the_width_of_backfill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens may leave seven rows to backfill; a curve up to six rows is not enough, one up to seven is."""
    more = ["--set", "method.fill=backfill", "--set", "cost.propagation=0.5", "--set", "cost.verify_cost=[[1, 1.0], [7, 1.2]]"]
    found = runs(tmp_path, monkeypatch, EARLY, more)
    assert [row["view"] for row in found["results"]] == ["formula", "paths", "events"]
    assert found["failed"] == []


def test_outcomes_used_by_one_of_several_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One law is used by some methods, next to methods that use none."""
    found = runs(tmp_path, monkeypatch, SCENARIO + PLAIN + SKIP + BILD + RATES + COST, ["--view", "formula"])
    assert [row["method"] for row in found["results"]] == ["autoregressive", "skipdecode", "bild"]
    assert [row["fallback_rate"] for row in found["results"]] == [None, None, 0.2]
