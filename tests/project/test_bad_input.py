"""Bad input: one readable message, exit code 2, and nothing written. Wrong only in places: exit code 1, the others kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model.base.checks import ParameterError
from sim.commands.sim_app import app
from sim.scenarios import cases
from sim.scenarios.outcomes import match_outcomes

ROOT = Path(__file__).resolve().parents[2]

SCENARIO = """[scenario]
name = "small"
tokens = 8
replications = 16

"""
METHOD = """[[method]]
name = "ppd"
layers = 40
exit_layer = 20
candidates = 1

"""
OUTCOMES = """[outcomes]
kind = "iid"
match_rate = 0.5

"""
BASE = SCENARIO + METHOD + OUTCOMES
PLAIN = '[[method]]\nname = "autoregressive"\nlayers = 40\n\n'

Files = dict[str, "str | bytes"]


def put(folder: Path, files: Files) -> None:
    """Write files below a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def held(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], files: Files) -> str:
    """Call the command where it must refuse; its message, after checking that it is one, and that nothing was written."""
    put(folder, files)
    before = held(folder)
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert held(folder) == before
    return done.stderr


def one_line(message: str) -> str:
    [line] = message.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 500
    return line


# What is set to a bad value, and what the message must name: the key, the bound, the value, the remedy.
SET = [
    ("method.exit_layer=0", "exit_layer", "between 1 and layers=40", "got 0"),
    ("method.exit_layer=41", "exit_layer", "between 1 and layers=40", "got 41"),
    ("method.exit_layer=-1", "between 1 and layers=40", "got -1"),
    ("method.exit_layer=20.5", "exit_layer", "whole number", "got 20.5"),
    ('method.exit_layer="20"', "exit_layer", "whole number", "got '20'"),
    ("method.exit_layer=true", "exit_layer", "whole number", "got True"),
    ("method.exit_layer=nan", "exit_layer", "whole number", "got nan"),
    ("method.exit_layer=[20]", "exit_layer", "whole number", "got [20]"),
    ("method.exit_layer=", "exit_layer", "whole number", "got ''"),
    ("method.exit_layer=19", "at least layers/2=20", "literal form", "got 19", "form='nested'", "form='flat'"),
    ("outcomes.match_rate=-0.1", "match_rate", "between 0 and 1", "got -0.1"),
    ("outcomes.match_rate=1.5", "match_rate", "between 0 and 1", "got 1.5"),
    ("outcomes.match_rate=nan", "match_rate", "between 0 and 1", "got nan"),
    ("outcomes.match_rate=inf", "match_rate", "between 0 and 1", "got inf"),
    ('outcomes.match_rate="0.5"', "match_rate", "must be a number", "got '0.5'"),
    ("outcomes.match_rate=half", "match_rate", "must be a number", "got 'half'"),
    ("outcomes.match_rate=[0.5]", "match_rate", "must be a number", "got [0.5]"),
    ("outcomes.match_rate=1" + "0" * 400, "match_rate", "between 0 and 1", "about 401 digits"),
    ("outcomes.trials=0", "trials", "at least 1", "got 0"),
    ("outcomes.source=guessed", "unknown source 'guessed'", "assumed, measured, published"),
    ("method.candidates=0", "candidates", "between 1 and 1000", "got 0"),
    ("method.candidates=100000000", "candidates", "between 1 and 1000", "got 100000000"),
    ("method.candidates=0x" + "f" * 6000, "candidates", "between 1 and 1000", "about 7225 digits"),
    ("method.candidates=" + "9" * 6000, "candidates", "whole number", "9..."),
    ("method.layers=" + "1" + "0" * 30, "layers", "between 1 and 10000", "got 1" + "0" * 30),
    ("scenario.tokens=0", "tokens", "between 1 and 1000000", "got 0"),
    ("scenario.tokens=1" + "0" * 30, "tokens", "between 1 and 1000000", "got 1" + "0" * 30),
    ("scenario.tokens=8.0", "tokens", "whole number", "got 8.0"),
    ("scenario.replications=0", "replications", "between 1 and 1000000000", "got 0"),
    ("scenario.event_replications=0", "event_replications", "between 1 and", "got 0"),
    ("scenario.seed=-1", "seed", "between 0 and 9223372036854775807", "got -1"),
    ("scenario.views=formula", "views", "list", "formula, paths, events", "got 'formula'"),
    ("scenario.notes=deck-table-2", "notes", "list", "ppd-figure-3", "got 'deck-table-2'"),
    ('scenario.notes=["deck-table-3"]', "unknown note 'deck-table-3'", "did you mean deck-table-2", "skipdecode-table-2"),
    ('scenario.views=["formulas"]', "unknown view 'formulas'", "did you mean formula?"),
    ("scenario.views=[]", "views", "at least one", "got []"),
    ('scenario.views=["paths", "paths"]', "views", "once", "got ['paths', 'paths']"),
    ("scenario.name=a/b", "name", "folder", "no slash", "got 'a/b'"),
    ("scenario.name=..", "name", "no leading dot"),
    ("scenario.name=", "name", "1 to 100 characters"),
    (r'scenario.name="a\u0000b"', "name", "folder"),
    ("scenario.name=" + "x" * 300, "name", "1 to 100 characters"),
    ("scenario.name=" + "[" * 3000, "name", "[[["),
    ("scenario.description=3", "description", "string in quotes", "got 3"),
    ("scenario.token=8", "unknown key scenario.token", "did you mean tokens?"),
    ("method.kandidates=3", "ppd takes no kandidates", "did you mean candidates?"),
    ("method.batched=1", "batched", "true or false", "got 1"),
    ("method.form=litteral", "unknown form 'litteral'", "did you mean literal?"),
    ("method.name=pdd", "unknown method 'pdd'", "did you mean ppd?"),
    ("method.name=no.such.module", "'no.such.module' is not one", "add --methods no.such.module", "known: ", "autoregressive, "),
    ("method.name=..", "'..' is not one of the project's", "known: ", "autoregressive, "),
    ("outcomes.kind=idd", "unknown outcomes.kind 'idd'", "did you mean iid?"),
    ("outcomes.kind=markov", "outcomes.correlation is required", "add it under [outcomes]"),
    ("outcomes.matchrate=0.3", "unknown key outcomes.matchrate", "did you mean match_rate?"),
    ("cost.early_heads=1", "unknown key cost.early_heads", "did you mean early_head?"),
    ("cost.early_head=-1", "early_head", "between 0 and", "got -1"),
    ("cost.early_head=x", "early_head", "must be a number", "got 'x'"),
    ("cost.early_head=inf", "early_head", "between 0 and", "got inf"),
    ("cost.early_head=1e308", "early_head", "between 0 and", "got 1e+308"),
    ("cost.dispatch=-0.5", "dispatch", "between 0 and", "got -0.5"),
    ("cost.layer_times=[1, 2]", "layer_times", "one time for each of layers=40", "got 2"),
    ("cost.layer_times=3", "layer_times", "list", "got 3"),
    ("cost.layer_times=[]", "layer_times", "got an empty list", "leave it out"),
    ('cost.layer_times=[1, 2, "x"]', "layer_times[2]", "must be a number", "got 'x'"),
    ("cost.layer_times=[1, -2]", "layer_times[1]", "got -2"),
    (f"cost.layer_times={[0] * 40}", "layer_times", "above 0"),
    ("cost.dispatch_law=log", "unknown dispatch_law 'log'", "linear, tree"),
    ("cost.seconds_per_layer=-1", "seconds_per_layer", "got -1"),
    ("cluster.unit=3", "unknown key cluster.unit", "did you mean units?"),
    ("cluster.units=0", "units", "between 1 and 100000", "got 0"),
    ("cluster.links=mesh", "unknown links 'mesh'", "point-to-point, shared"),
    ("cluster.stop=passes", "unknown stop 'passes'", "did you mean pass?"),
    ("outcomes.match_rate", "--set must be PATH=VALUE", "for example --set"),
    ("methods.layers=3", "unknown path 'methods.layers'", "did you mean method.KEY?"),
    ("layers=3", "unknown path 'layers'", "method.KEY"),
    ("method=3", "unknown path 'method'", "did you mean method.KEY?"),
    ("=3", "unknown path ''"),
]


@pytest.mark.parametrize(("setting", "fragments"), [(first, rest) for first, *rest in SET], ids=[first[0][:50] for first in SET])
def test_a_value_set(setting: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures", "--set", setting], {"s.toml": BASE}))
    for fragment in fragments:
        assert fragment in message


# What a scenario file says, and what the message must name.
TOML = [
    ("", "scenario.name is required"),
    (SCENARIO, "[[method]]", "sim ls methods"),
    (SCENARIO.replace("tokens = 8\n", "") + METHOD + OUTCOMES, "scenario.tokens is required"),
    (SCENARIO + METHOD, "ppd needs [outcomes]", "match"),
    (BASE.replace('kind = "iid"\n', ""), "outcomes.kind is required", "by-position, iid, markov, published, replay"),
    (BASE.replace('name = "ppd"\n', ""), "method.name is required", "known: ", "autoregressive, "),
    (BASE.replace("layers = 40\n", ""), "method.layers is required", "or give [cost] a shape or a profile, which know it"),
    (BASE.replace("layers = 40", "layers = " + "9" * 5000), "not TOML", "too many digits"),
    (BASE.replace("candidates", "kandidates"), "unknown key method.kandidates", "did you mean candidates?"),
    (BASE.replace("[outcomes]", "[outcoms]"), "unknown section [outcoms]", "did you mean outcomes?"),
    (BASE.replace('name = "ppd"', "name = 3"), "unknown method 3"),
    ("method = 3\n" + SCENARIO, "method must be a table", "got 3"),
    ('method = ["ppd"]\n' + SCENARIO, "method must be a table", "got 'ppd'"),
    ("method = []\n" + SCENARIO, "at least one [[method]]"),
    ("scenario = 3\n" + METHOD, "[scenario] must be a table", "got 3"),
    ("outcomes = 3\n" + SCENARIO + METHOD, "[outcomes] must be a table", "got 3"),
    ("cost = 3\n" + BASE, "[cost] must be a table", "got 3"),
    ("cluster = [1]\n" + BASE, "[cluster] must be a table", "got [1]"),
    ("sweep = 3\n" + BASE, "[sweep] must be a table", "got 3"),
    (BASE + "x = [1,\n", "not TOML", "line 16"),
    ("[scenario\n", "not TOML", "line 1", "column 10"),
    (SCENARIO + "tokens = 9\n" + METHOD, "not TOML", "line 6", "a second time"),
    ("a = 1\na = 2", "not TOML", "line 2", "a second time"),
    (BASE + "[outcomes]\n", "not TOML", "line 16", "a second time"),
    ("x = " + "[" * 3000, "not TOML", "too deep"),
    # Axes.
    (BASE + '[sweep]\n"method.candidates" = []', "sweep.method.candidates", "at least one value", "empty list"),
    (BASE + '[sweep]\n"method.candidates" = 3', "sweep.method.candidates", "list", "got 3", "[...]"),
    (BASE + '[sweep]\n"method.candidates" = "1,3"', "sweep.method.candidates", "list", "got '1,3'"),
    (BASE + '[sweep]\n"method.kandidates" = [1]', "takes no kandidates", "did you mean candidates?"),
    (BASE + '[sweep]\n"candidates" = [1]', "unknown path 'candidates'", "method.KEY"),
    (BASE + "[sweep]\nmethod.candidates = [1]", "sweep.method", 'in quotes: "method.candidates"'),
    (BASE + '[sweep]\n"method.candidates" = {from = 1, to = 3}', "from, to and count"),
    (BASE + '[sweep]\n"method.candidates" = {from = 1, to = 3, count = 0}', "count", "between 1 and", "got 0"),
    (BASE + '[sweep]\n"method.candidates" = {from = "1", to = 3, count = 2}', "from", "must be a number", "got '1'"),
    (BASE + '[sweep]\n"outcomes.match_rate" = {from = 0, to = inf, count = 2}', "to must be a finite number", "got inf"),
    (BASE + '[sweep]\n"outcomes.match_rate" = [0.5, nan]', "match_rate", "between 0 and 1", "got nan"),
    (BASE + '[sweep]\n"outcomes.match_rate" = {from = 0, to = 2, count = 900}', "match_rate", "between 0 and 1", "got 2"),
    (BASE + '[sweep]\n"scenario.replications" = [10, 20]', "scenario.replications cannot be swept", "scenario.tokens"),
    (BASE + '[sweep]\n"scenario.views" = [["formula"]]', "scenario.views cannot be swept"),
    (BASE + PLAIN + '[sweep]\n"method.candidates" = [1]', "autoregressive takes no candidates", "layers"),
    (SCENARIO + PLAIN + '[sweep]\n"method.exit_layer" = [1]', "autoregressive takes no exit_layer"),
    # Forms.
    (BASE.replace("exit_layer = 20", "exit_layer = 10"), "at least layers/2=20", "nested", "flat"),
    (
        BASE.replace("exit_layer = 20", 'form = "nested"\nexit_layer = 1').replace("candidates = 1", "candidates = 3"),
        "nested needs", "more than 100000", "fewer candidates or a later exit_layer",
    ),
    (
        BASE.replace("layers = 40\nexit_layer = 20\ncandidates = 1", 'form="nested"\nlayers=10000\nexit_layer=1\ncandidates=1000'),
        "nested needs a whole number of about 29998 digits", "candidates=1000",
    ),
    # Outcomes.
    (SCENARIO + METHOD + '[outcomes]\nkind = "by-position"\nmatch_rates = [0.5, 0.5]', "match_rates", "8", "got 2", "fewer tokens"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "by-position"\nmatch_rates = []', "match_rates", "list of rates", "got []"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "by-position"\nmatch_rates = 0.5', "match_rates", "list of rates", "got 0.5"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "by-position"\nmatch_rates = ["0.5"]', "match_rates[0]", "number", "got '0.5'"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "by-position"\nmatch_rates = [0.5, 1.5]', "match_rates[1]", "0 and 1", "got 1.5"),
    (
        SCENARIO + METHOD + '[outcomes]\nkind = "markov"\nmatch_rate = 0.2\ncorrelation = -0.5',
        "correlation", "between -0.25 and 1", "match_rate=0.2", "got -0.5",
    ),
    (SCENARIO + METHOD + '[outcomes]\nkind = "markov"\nmatch_rate = 0.2\ncorrelation = 2', "correlation", "1", "got 2"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "markov"\nmatch_rate = [0.2]\ncorrelation = 0', "match_rate must be a number"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"', "records, a file or a log"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = []', "records", "list of lists", "got []"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [[]]', "records[0]", "length 0"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = 3', "records", "list of lists", "got 3"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [true]', "records[0]", "True"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [["yes"]]', "records[0]", "true and false", "yes"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [[2]]', "records[0]", "true and false", "[2]"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [[true], [true, false]]', "records[1]", "length 2", "one length"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [[true, [true]]]', "records[0]", "true and false"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nrecords = [[true, false]]', "records", "8", "got 2", "fewer tokens"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nfile = "missing.json"', "'missing.json' cannot be read", "No such file"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nfile = 3', "file must be a path in quotes", "got 3"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nfile = "s.toml"', "'s.toml' cannot be read", "not JSON"),
    (SCENARIO + METHOD + '[outcomes]\nkind = "published"\ndata_set = "squad"', "outcomes.head is required", "final, trained"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "lint"])
@pytest.mark.parametrize(("text", "fragments"), [(first, rest) for first, *rest in TOML], ids=[str(rest[0]) for _, *rest in TOML])
def test_a_scenario_file(command: str, text: str, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = one_line(refused(tmp_path, monkeypatch, [command, "s.toml"], {"s.toml": text}))
    for fragment in fragments:
        assert fragment in message


# Other arguments, with the files that are there, and what the message must name. Typer's own messages come with a line of usage.
RUN = ["run", "--no-figures"]
ARGUMENTS: list[tuple[list[str], Files, list[str]]] = [
    ([*RUN, "missing.toml"], {}, ["'missing.toml' cannot be read", "No such file", "sim ls scenarios"]),
    ([*RUN, "ppd-form"], {}, ["'ppd-form'", "did you mean the bundled scenario ppd-forms?"]),
    (["lint", "missing.toml"], {}, ["'missing.toml' cannot be read"]),
    ([*RUN, "."], {}, ["'.' cannot be read", "it is a folder"]),
    ([*RUN, "binary"], {"binary": bytes(range(256))}, ["'binary' is not UTF-8 text"]),
    ([*RUN, "utf16.toml"], {"utf16.toml": BASE.encode("utf-16")}, ["'utf16.toml' is not UTF-8 text", "save it as UTF-8"]),
    ([*RUN, "a\0b"], {}, ["cannot be read", "null byte"]),
    ([*RUN, "x" * 300], {}, ["cannot be read", "too long"]),
    ([*RUN, "s.toml", "--sweep", "method.candidates"], {}, ["--sweep must be PATH=VALUES", "1,3,5"]),
    ([*RUN, "s.toml", "--sweep", "method.candidates="], {}, ["sweep.method.candidates", "empty list"]),
    ([*RUN, "s.toml", "--sweep", "method.candidates=1,x"], {}, ["candidates", "whole number", "got 'x'"]),
    ([*RUN, "s.toml", "--sweep", "method.nonsense=1"], {}, ["ppd takes no nonsense"]),
    ([*RUN, "s.toml", "--sweep", "nonsense=1"], {}, ["unknown path 'nonsense'", "method.KEY"]),
    ([*RUN, "s.toml", "--sweep", "outcomes.match_rate=0:1"], {}, ["from:to:count", "got '0:1'"]),
    ([*RUN, "s.toml", "--sweep", "outcomes.match_rate=0:1:x"], {}, ["from:to:count", "got '0:1:x'"]),
    ([*RUN, "s.toml", "--sweep", "outcomes.match_rate=0:1:0"], {}, ["count", "between 1 and", "got 0"]),
    ([*RUN, "s.toml", "--sweep", "outcomes.match_rate=0:1:2.5"], {}, ["count", "whole number", "got 2.5"]),
    ([*RUN, "s.toml", "--sweep", "outcomes.match_rate=0:1:20000000"], {}, ["20,000,000 points", "10,000,000", "--yes"]),
    (
        [*RUN, "s.toml", "--sweep", "outcomes.match_rate=0:1:4000", "--sweep", "scenario.tokens=1:4000:4000"], {},
        ["16,000,000 points", "10,000,000", "--yes"],
    ),
    (
        [*RUN, "lists.toml"],
        {"lists.toml": f'{BASE}[sweep]\n"scenario.tokens" = {[*range(1, 4001)]}\n"scenario.seed" = {[*range(4000)]}'},
        ["16,000,000 points", "10,000,000", "--yes"],
    ),
    ([*RUN, "s.toml", "--yes", "--sweep", "outcomes.match_rate=0:1:1000000000"], {}, ["at most 1,000,000 shards", "fewer points"]),
    (
        [*RUN, "s.toml", "--yes", "--sweep", "outcomes.match_rate=0:1:1000000000", "--sweep", "scenario.tokens=1:9999:9999"], {},
        ["at most 1,000,000,000,000 points", "shorten an axis"],
    ),
    ([*RUN, "s.toml", "--replications", "0"], {}, ["replications", "between 1 and", "got 0"]),
    ([*RUN, "s.toml", "--seed", "-1"], {}, ["seed", "between 0 and", "got -1"]),
    ([*RUN, "s.toml", "--seed", "99999999999999999999999"], {}, ["seed", "between 0 and", "got 99999999999999999999999"]),
    ([*RUN, "s.toml", "--view", "event"], {}, ["unknown view 'event'", "did you mean events?"]),
    ([*RUN, "s.toml", "--view", ""], {}, ["unknown view ''", "events, formula, paths"]),
    ([*RUN, "s.toml", "--view", "paths,paths"], {}, ["views", "once"]),
    ([*RUN, "s.toml", "-j", "0"], {}, ["jobs", "between 1 and 1024", "got 0"]),
    ([*RUN, "s.toml", "-j", "1000000"], {}, ["jobs", "between 1 and 1024", "got 1000000"]),
    ([*RUN, "s.toml", "--dry-run", "-j", "0"], {}, ["jobs", "got 0"]),
    ([*RUN, "s.toml", "--dry-run", "--set", "method.candidates=0"], {}, ["candidates", "got 0"]),
    (["ls", "nonsense"], {}, ["unknown list 'nonsense'", "methods, outcomes, profiles, published, scenarios"]),
    (["ls", "method"], {}, ["unknown list 'method'", "did you mean methods?"]),
    # Where the run should go.
    ([*RUN, "s.toml", "-o", "file"], {"file": "x"}, ["file", "not the directory of a run", "-o"]),
    ([*RUN, "s.toml", "-o", "file/below"], {"file": "x"}, ["file/below", "cannot be", "Not a directory", "-o"]),
    ([*RUN, "s.toml", "-o", "/proc/run"], {}, ["/proc/run cannot be written", "-o"]),
    ([*RUN, "s.toml", "-o", "x" * 300], {}, ["too long", "-o"]),
    ([*RUN, "s.toml"], {"runs": "a file"}, ["runs/small-", "cannot be", "Not a directory", "-o"]),
    ([*RUN, "s.toml", "-o", "mine"], {"mine/letter.txt": "x"}, ["mine", "not the directory of a run", "-o"]),
    ([*RUN, "s.toml", "-o", "mine"], {"mine/metadata.json": "[]"}, ["mine", "not the directory of a run", "-o"]),
    ([*RUN, "s.toml", "-o", "mine"], {"mine/metadata.json": '{"fingerprint": "0"}'}, ["mine", "another scenario", "-o"]),
    # Published tables.
    ([*RUN, "--set", "method.exit_layer=21"], {}, ["unknown layer of ppd-table-2 21", "10, 20, 30, 35, 37"]),
    ([*RUN, "--sweep", "method.exit_layer=20,21"], {}, ["unknown layer of ppd-table-2 21", "10, 20, 30, 35, 37"]),
    ([*RUN, "--set", "outcomes.data_set=squat"], {}, ["unknown data_set 'squat'", "did you mean squad?"]),
    ([*RUN, "--set", "outcomes.head=train"], {}, ["unknown head 'train'", "did you mean trained?"]),
    ([*RUN, "--set", "outcomes.table=ppd-table-4"], {}, ["unknown table 'ppd-table-4'", "did you mean ppd-table-"]),
    ([*RUN, "--set", "outcomes.table=ppd-table-3"], {}, ["outcomes.head is not a key of ppd-table-3", "data_set"]),
    ([*RUN, "--set", "outcomes.by_position=1"], {}, ["by_position must be true or false", "got 1"]),
    # Records in a file.
    ([*RUN, "r.toml"], {"r.json": b"\xff\x00"}, ["'r.json' cannot be read", "UTF-8"]),
    ([*RUN, "r.toml"], {"r.json": "["}, ["'r.json' cannot be read", "not JSON"]),
    ([*RUN, "r.toml"], {"r.json": "[" * 100_000}, ["'r.json' cannot be read", "not JSON"]),
    ([*RUN, "r.toml"], {"r.json": "null"}, ["records", "list of lists", "got None"]),
    ([*RUN, "r.toml"], {"r.json": '{"a": [true]}'}, ["records", "list of lists", "got {'a'"]),
    ([*RUN, "r.toml"], {"r.json": "[[true], [true, false]]"}, ["records[1]", "length 2"]),
    ([*RUN, "r.toml"], {"r.json": "[[null]]"}, ["records[0]", "true and false", "None"]),
]  # fmt: skip
REPLAY = SCENARIO + METHOD + '[outcomes]\nkind = "replay"\nfile = "r.json"\n'


@pytest.mark.parametrize(("arguments", "files", "fragments"), ARGUMENTS, ids=[" ".join(each[0][1:])[:60] for each in ARGUMENTS])
def test_other_arguments(
    arguments: list[str], files: Files, fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = one_line(refused(tmp_path, monkeypatch, arguments, {"s.toml": BASE, "r.toml": REPLAY, **files}))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["run", "--bogus"], ["No such option", "--bogus"]),
        (["run", "s.toml", "another"], ["unexpected extra argument", "another"]),
        (["run", "-j", "many"], ["--jobs must be a whole number or dask, got 'many'"]),
        (["run", "-jmany"], ["--jobs must be a whole number or dask, got 'many'"]),
        (["run", "-j", "0"], ["jobs must be between 1 and 1024, got 0"]),
        (["run", "-j", "2", "--scheduler", "tcp://10.0.0.1:8786"], ["--jobs is not used with --scheduler, got 2"]),
        (["run", "--scheduler", "10.0.0.1:8786"], ["--scheduler must be tcp://HOST:PORT, got '10.0.0.1:8786'"]),
        (["run", "--replications", "1.5"], ["--replications must be a whole number, got '1.5'"]),
        (["run", "--seed=first"], ["--seed must be a whole number, got 'first'"]),
        (["advise", "--context", "abc"], ["--context must be a whole number, got 'abc'"]),
        (["advise", "--printed-rate", "half"], ["--printed-rate must be a number, got 'half'"]),
        (["advise", "--gpus"], ["--gpus", "requires an argument"]),
        (["--bogus"], ["No such option: --bogus", "-h` prints what there is"]),
        (["lint"], ["Missing argument"]),
        (["nonsense"], ["No such command", "nonsense"]),
    ],
)
def test_arguments_that_are_none(
    arguments: list[str], fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = one_line(refused(tmp_path, monkeypatch, arguments, {"s.toml": BASE}))
    for fragment in fragments:
        assert fragment in message


# Below 512 points a grid is looked at whole, above it value by value: both must tell a bad value from a bad combination.
@pytest.mark.parametrize("more", [[], ["--sweep", "scenario.tokens=1:130:130"]], ids=["small", "large"])
def test_wrong_only_in_places(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, {"s.toml": BASE})
    axes = ["--sweep", "method.form=literal,flat", "--sweep", "method.exit_layer=10,20", *more]
    done = CliRunner().invoke(app, ["run", "s.toml", "--no-figures", "--json", "--view", "formula", "-o", "out", *axes])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    points = 520 if more else 4
    assert told["rows"] == points * 3 // 4
    assert len(told["failed"]) == points // 4
    for row in told["failed"]:
        assert (row["method.form"], row["method.exit_layer"]) == ("literal", "10")
        assert "at least layers/2=20" in row["error"]
    assert json.loads((tmp_path / "out/failed.json").read_text()) == told["failed"]

    if more:
        return
    shown = CliRunner().invoke(app, ["run", "s.toml", "--no-figures", "--view", "formula", "-o", "out", *axes])
    assert shown.exit_code == 1
    assert "failed: point 0, formula: method: exit_layer must be" in shown.stdout

    linted = CliRunner().invoke(app, ["lint", "ppd-forms"])
    assert linted.exit_code == 0, linted.output


def test_lint_lists_combinations_that_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, {"s.toml": BASE + '[sweep]\n"method.form" = ["literal", "flat"]\n"method.exit_layer" = [10, 20]\n'})
    done = CliRunner().invoke(app, ["lint", "s.toml"])
    assert done.exit_code == 1
    assert "point 0" in done.stdout
    assert "1 points would fail" in done.stdout


def test_a_directory_with_the_run_of_another_scenario_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, {"s.toml": BASE})
    command = ["run", "s.toml", "--no-figures", "--view", "formula", "-o", "out"]
    assert CliRunner().invoke(app, command).exit_code == 0
    for more in (["--seed", "1"], ["--set", "outcomes.match_rate=0.4"], ["--resume", "--seed", "1"]):
        message = one_line(refused(tmp_path, monkeypatch, [*command, *more], {}))
        assert "out holds the run of another scenario" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--set", "method.exit_layer=0"],
        ["run", "missing.toml"],
        ["lint", "broken.toml"],
        ["run", "-o", "broken.toml/below"],
        ["run", "--bogus"],
    ],
    ids=" ".join,
)
def test_in_a_process_of_its_own(arguments: list[str], tmp_path: Path) -> None:
    put(tmp_path, {"broken.toml": "[scenario\n"})
    before = held(tmp_path)
    command = [sys.executable, "-m", "sim", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert held(tmp_path) == before


@pytest.mark.parametrize("rate", [0.1, 0.7, 0.95])
def test_a_bound_that_is_said_is_the_bound(rate: float) -> None:
    """Beyond it a correlation is refused, and up to it taken."""
    with pytest.raises(ParameterError, match="correlation must be between") as caught:
        match_outcomes.CorrelatedMatches(rate, -1.0)
    low = float(str(caught.value).split("between ")[1].split(" and ")[0])
    assert match_outcomes.CorrelatedMatches(rate, low * (1 - 1e-4)).correlation > low
    with pytest.raises(ParameterError, match=r"and 1 at match_rate=0\.\d+, got -"):
        match_outcomes.CorrelatedMatches(rate, low * (1 + 1e-4))


def test_a_time_that_is_next_to_none_is_refused() -> None:
    with pytest.raises(ParameterError, match="early_head must be 0 or at least 1e-12, got 1e-13"):
        cases.Cost(early_head=1e-13)
    assert cases.Cost(early_head=1e-12).early_head == 1e-12
