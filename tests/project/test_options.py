"""Options of the commands: what each is given reaches the code that does the work; and every option has a test of its effect.

Commands on real models take minutes of work, so what does the work is replaced here by a record of how it was called. That the work
heeds its arguments is tested where it is, and `EFFECTS` says by which test each option of each command is seen to matter.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import typer
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app as calibrate_app
from calibrate.decode.position_logging import LogSeconds
from calibrate.family import training as family
from calibrate.interpreters.in_one_process import Sampling
from calibrate.loading.load_models import TokenizedPrompt
from calibrate.loading.prompts import Prompt
from calibrate.timing.single_pass import Effort
from model.base.checks import ParameterError
from sim.commands.sim_app import app as sim_app
from sim.runs import sweep
from tests.support.recorded_calls import APPS, ReachedError, Record, no_progress_bar, run_until_work

TESTS = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}


MODELS = {"decoder": SimpleNamespace(layers=8, vocabulary=99, heads={}), "name": "made", "checksum": "0", "has_encoder": False}
CORPUS = SimpleNamespace(name="notes", cut=lambda characters: SimpleNamespace(name="a little", characters=characters))
BEGUN = TokenizedPrompt((1, 2, 3, 4, 5, 6), ())
PROMPTS = [SimpleNamespace(id="one", text="a text")]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Record:
    """What commands on real models call before and around their work."""
    monkeypatch.chdir(tmp_path)
    found = Record(monkeypatch)
    found.replace("calibrate.commands.common_options.prepare_device", "there")
    found.replace("calibrate.commands.common_options._bar", lambda quiet, what: no_progress_bar())
    found.replace("calibrate.loading.load_models.models", lambda named, **_: {role: SimpleNamespace(**MODELS) for role in named})
    found.replace("calibrate.loading.load_models.use_heads", (3, 5))
    found.replace("calibrate.loading.load_models.use_heads_of", "heads read")
    found.replace("calibrate.loading.load_models.tokenize", BEGUN)
    found.replace("calibrate.loading.load_models.heads_path", Path("nowhere"))
    found.replace("calibrate.decode.real_decoding.check_prompt", None)
    found.replace("calibrate.loading.prompts.load", PROMPTS)
    found.replace("calibrate.workers.model_processes.started", contextlib.nullcontext("the processes"))
    found.replace("calibrate.family.corpus.corpus_of_files", CORPUS)
    found.replace(
        "calibrate.family.model_directory.load", lambda **given: SimpleNamespace(name=given["model"], folder=Path(given["model"]))
    )
    found.replace("calibrate.family.make_model.tokenizer_of", "the tokenizer")
    return found


TRAIN = "--epochs 2.5 --batch 3 --rate 0.01 --seed 9 --text notes --device cuda:1 --threads 3 --resume -q"
REAL = "--dtype float64 --device cuda:1 --threads 3 --seed 9 -q"
CASES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    # Command, its words, and what they are to be where they go.
    "calibrate train": (
        f"-o out --role tiny --layers 2 --hidden 64 --ffn 172 --length 48 --vocabulary 300 {TRAIN}",
        "calibrate.family.make_model.make",
        {
            "calibrate.family.make_model.make": {
                "role": "tiny", "size": (2, 64, 172), "recipe": {"epochs": 2.5, "batch": 3, "length": 48, "rate": 0.01, "seed": 9},
                "corpus": CORPUS, "folder": Path("out"), "device": "there", "resume": True, "report": "a bar",
            },
            "calibrate.family.make_model.tokenizer_of": {"folder": Path("out"), "size": 300},
            "calibrate.family.corpus.corpus_of_files": {"path": Path("notes")},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
        },
    ),
    "calibrate heads": (
        f"--model big -o some.heads --settings paper --layers 2,4 --length 48 --labels model {TRAIN}",
        "calibrate.family.exit_heads.train",
        {
            "calibrate.family.exit_heads.train": {
                "settings": {"epochs": 2.5, "batch": 3, "length": 48, "rate": 0.01, "seed": 9, "labels": "model"},
                "corpus": CORPUS, "path": Path("some.heads"), "layers": (2, 4), "resume": True, "report": "a bar",
            },
            "calibrate.family.model_directory.load": {"model": "big"},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
        },
    ),
    "calibrate align": (
        f"--target big --draft small -o out --prompts 90 --prompt 7 --tokens 11 --held-out 13 {TRAIN}",
        "calibrate.family.align_draft.align",
        {
            "calibrate.family.align_draft.align": {
                "settings": {
                    "prompts": 90, "prompt": 7, "tokens": 11, "held_out": 13, "epochs": 2.5, "batch": 3, "rate": 0.01, "seed": 9,
                },
                "target": {"name": "big"}, "draft": {"name": "small"}, "corpus": CORPUS, "resume": True, "report": "a bar",
            },
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
        },
    ),
    "calibrate decode": (
        "hierarchical --model big --draft small --medium middle --set draft_length=3 --prompts notes --template squad --limit 4"
        f" --tokens 12 --sample --temperature 0.5 --top-k 6 --top-p 0.75 --log log.parquet --plain --processes {REAL}",
        "calibrate.commands.decode_command._follow",
        {
            "calibrate.loading.load_models.models": {
                "named": {"target": "big", "draft": "small", "medium": "middle"}, "device": "there", "dtype": "float64",
            },
            "calibrate.loading.prompts.load": {"where": "notes", "template": "squad", "limit": 4},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.workers.model_processes.started": {
                "replicas": {
                    "target": {"model": "big", "device": "there", "dtype": "float64"}, "draft": {"model": "small"},
                    "medium": {"model": "middle"},
                },
            },
            "calibrate.commands.decode_command._follow": {
                "head": {"processes": True},
                "run": {
                    "pool": "the processes", "method": "hierarchical", "settings": {"draft_length": 3, "sampled": True},
                    "tokens": 12, "seed": 9,
                    "sampling": {"temperature": 0.5, "top_k": 6, "top_p": 0.75}, "plain": True, "log": True,
                },
                "asked": PROMPTS, "log": Path("log.parquet"), "quiet": True,
            },
        },
    ),
    "calibrate log": (
        "--target big --draft small --heads some.heads --prompts notes --template squad --limit 4 --prompt-tokens 2 --tokens 12"
        f" --sample --temperature 0.5 --top-k 6 --top-p 0.75 --resume -o log.json {REAL}",
        "calibrate.decode.position_logging.write_log",
        {
            "calibrate.loading.load_models.models": {"named": {"target": "big", "draft": "small"}, "device": "there",
                "dtype": "float64"},
            "calibrate.loading.load_models.use_heads": {"path": Path("some.heads")},
            "calibrate.loading.prompts.load": {"where": "notes", "template": "squad", "limit": 4, "seed": 9},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
            "calibrate.decode.position_logging.write_log": {
                "out": Path("log.json"), "prompts": [[5, 6]], "tokens": 12, "seed": 9, "resume": True, "report": "a bar",
                "sampling": {"temperature": 0.5, "top_k": 6, "top_p": 0.75}, "draft": MODELS["decoder"],
            },
        },
    ),
    "calibrate quality": (
        "bild --model big --draft small --heads some.heads --set max_draft_length=5 --set fallback_threshold=0.5"
        " --sweep rollback_threshold=1,2 --prompts notes --template squad --limit 4 --prompt-tokens 2 --tokens 12 --resume"
        f" -o rows.csv {REAL}",
        "calibrate.decode.output_quality.measure",
        {
            "calibrate.loading.load_models.models": {"named": {"target": "big", "draft": "small"}, "device": "there",
                "dtype": "float64"},
            "calibrate.loading.load_models.use_heads_of": {"where": "big", "heads": "some.heads"},
            "calibrate.loading.prompts.load": {"where": "notes", "template": "squad", "limit": 4, "seed": 9},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
            "calibrate.decode.output_quality.measure": {
                "out": Path("rows.csv"), "prompts": [(5, 6)], "tokens": 12, "resume": True, "report": "a bar", "method": "bild",
                "settings": [{"max_draft_length": 5, "fallback_threshold": 0.5, "rollback_threshold": each} for each in (1, 2)],
            },
        },
    ),
    "calibrate replace": (
        "--model big --draft small --thresholds 0,0.5 --prompts notes --template squad --limit 4 --prompt-tokens 2 --tokens 12"
        f" -o rows.csv {REAL}",
        "calibrate.decode.replaced_tokens.measure",
        {
            "calibrate.loading.load_models.models": {"named": {"target": "big", "draft": "small"}, "device": "there",
                "dtype": "float64"},
            "calibrate.loading.prompts.load": {"where": "notes", "template": "squad", "limit": 4, "seed": 9},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
            "calibrate.decode.replaced_tokens.measure": {
                "prompts": [(5, 6)], "tokens": 12, "thresholds": (0.0, 0.5), "scores": None, "sources": None, "report": "a bar",
            },
        },
    ),
    "calibrate loss": (
        f"--model big --heads some.heads --layers 2,5 --prompts notes --limit 4 --tokens 2 -o rows.csv {REAL}",
        "calibrate.decode.loss_by_position.measure",
        {
            "calibrate.loading.load_models.models": {"named": {"target": "big"}, "device": "there", "dtype": "float64"},
            "calibrate.loading.load_models.use_heads_of": {"where": "big", "heads": "some.heads"},
            "calibrate.loading.prompts.load": {"where": "notes", "limit": 4, "seed": 9},
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
            "calibrate.decode.loss_by_position.measure": {"sequences": [[5, 6]], "layers": (2, 5), "report": "a bar"},
        },
    ),
    "calibrate run": (
        "hierarchical --model big --draft small --medium middle --heads some.heads --set draft_length=3 --sweep reading=bonus"
        " --forced acceptance_rate=0.3,0.7 --unit-kind processes --prompts notes --limit 4 --prompt-tokens 2 --tokens 12 --repeats"
        " 5"
        f" --mode cuda-graph --gpus cuda:1,cuda:2 --resume -o runs.json {REAL}",
        "calibrate.commands.run_command.measure_plan",
        {
            "calibrate.commands.common_options.prepare_device": {"device": "cuda:1", "threads": 3},
            "calibrate.commands.common_options._bar": {"quiet": True},
            "calibrate.commands.run_command.measure_plan": {
                "written": {
                    "run": {
                        "model": "big", "draft": "small", "medium": "middle", "heads": "some.heads", "tokens": 12, "repeats": 5,
                        "prompts": 4, "file": "notes", "prompt_tokens": 2, "seed": 9, "dtype": "float64", "mode": "cuda-graph",
                    },
                    "choices": [
                        {
                            "method": "hierarchical", "settings": {"draft_length": 3, "reading": "bonus"},
                            "rates": {"acceptance_rate": each}, "unit_kind": "processes",
                        }
                        for each in (0.3, 0.7)
                    ],
                },
                "out": Path("runs.json"), "device": "there", "gpus": ["cuda:1", "cuda:2"], "resume": True, "report": "a bar",
            },
        },
    ),
    "calibrate layers": (
        "--model llama-68m -o out --device cuda:1 --dtype float64 --mode eager,interpreter --widths 1,5 --contexts 6,7 --batches 2"
        " --busy 0,3 --rounds 4 --source 99 --minutes 1.5 --target 0.01 --threads 3 --resume --name mine -q",
        "calibrate.timing.profile_from_timings.time_layers",
        {
            "calibrate.timing.profile_from_timings.time_layers": {
                "model": "llama-68m", "out": Path("out"), "device": "cuda:1", "dtype": "float64", "threads": 3, "source": 99,
                "minutes": 1.5, "quick": False, "resume": True, "name": "mine", "progress": "a bar", "effort": {"target": 0.01},
                "grid": {
                    "widths": (1, 5), "contexts": (6, 7), "batches": (2,), "busy": (0, 3), "modes": ("eager", "interpreter"),
                    "rounds": 4,
                },
            },
            "calibrate.commands.common_options._bar": {"quiet": True},
        },
    ),
    "calibrate links": (
        "-o out --link gloo,nccl --sizes 8,16 --repeats 6 --name mine -q",
        "calibrate.timing.transfers.time_links",
        {
            "calibrate.timing.transfers.time_links": {
                "out": Path("out"), "links": ("gloo", "nccl"), "sizes": (8, 16), "repeats": 6, "name": "mine",
            },
            "calibrate.commands.common_options._bar": {"quiet": True},
        },
    ),
    "calibrate bundle": (
        "data -o out", "calibrate.importers.bundled_profiles.write",
        {"calibrate.importers.bundled_profiles.write": {"data": Path("data"), "folder": Path("out")}},
    ),
}  # fmt: skip
LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    # The words that a command must have, and what it takes without any others.
    "calibrate train": (
        "-o out --text notes --role draft",
        {
            "resume": False, "folder": Path("out"), "role": "draft", "size": family.FAMILY["draft"], "corpus": CORPUS,
            "recipe": {"epochs": 3, "batch": 8, "length": 512, "rate": 0.006, "seed": 0, "warm_up": family.Recipe().warm_up},
            "command": "calibrate train -o family --role draft --epochs 3 --batch 8 --length 512 --rate 0.006 --seed 0 "
            "--text notes",
        },
    ),
    "calibrate heads": (
        "--model big --text notes -o heads",
        {
            "resume": False, "layers": None, "command": "calibrate heads --model big --settings own --text notes",
            "settings": {"epochs": 1, "batch": 16, "length": 512, "rate": 0.001, "seed": 0, "labels": "text"}, "corpus": CORPUS,
        },
    ),
    "calibrate align": (
        "--target big --draft small -o out --text notes",
        {
            "resume": False, "command": "calibrate align --target big --draft small -o out --text notes", "corpus": CORPUS,
            "settings": {
                "prompts": 4096, "prompt": 64, "tokens": 128, "held_out": 256, "epochs": 2, "batch": 16, "rate": 0.002, "seed": 0,
            },
        },
    ),
    "calibrate decode": ("autoregressive --model big --prompt hello", {"run": {"plain": False, "log": False, "sampling": None}}),
    "calibrate log": (
        "--target big --prompts notes -o log.json",
        {
            "out": Path("log.json"), "resume": False, "sampling": None, "draft": None, "seed": 0, "tokens": 64,
            "prompts": [[1, 2, 3, 4, 5, 6]],
        },
    ),
    "calibrate quality": (
        "early_exit --model big --prompts notes --set threshold=0.5 -o rows.csv",
        {"out": Path("rows.csv"), "resume": False, "tokens": 48, "settings": [{"threshold": 0.5}], "prompts": [(1, 2, 3, 4, 5, 6)]},
    ),
    "calibrate replace": (
        "--model big --draft small --prompts notes -o rows.csv",
        {"tokens": 48, "prompts": [(1, 2, 3, 4, 5, 6)], "thresholds": (0.0, 0.01, 0.03, 0.1, 0.3, 1.1), "scores": None},
    ),
    "calibrate loss": ("--model big --prompts notes -o rows.csv", {"sequences": [[1, 2, 3, 4, 5, 6]], "layers": (8,)}),
    "calibrate run": ("autoregressive -o runs.json", {"resume": False, "gpus": []}),
    "calibrate layers": (
        "--model llama-68m -o out",
        {
            "resume": False, "quick": False, "device": None, "dtype": None, "source": 512, "name": None, "minutes": 8.0,
            "threads": None, "effort": {"target": 0.005, "least": Effort().least, "most": Effort().most},
            "grid": {
                "widths": (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32), "contexts": (128, 512, 1024, 2048), "batches": (1,),
                "busy": (0,), "modes": ("eager",), "rounds": 1,
            },
        },
    ),
    "calibrate links": (
        "-o out",
        {"out": Path("out"), "links": None, "repeats": 50, "name": "links", "sizes": tuple(1024 * 4**each for each in range(9))},
    ),
}  # fmt: skip
BARS = {
    "log": "sequences", "quality": "settings", "replace": "thresholds", "loss": "sequences", "layers": "points", "links": "links",
    "train": "draft", "heads": "heads", "align": "align",
}  # fmt: skip
"""What the bar of a command counts."""


def has(given: Any, expected: Any) -> bool:
    """Whether what was given is what was expected: of objects and mappings, those of their fields that are named."""
    if isinstance(expected, Mapping):
        of = given if isinstance(given, Mapping) else {key: getattr(given, key) for key in expected}
        return all(has(of[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(given) == len(expected) and all(has(one, other) for one, other in zip(given, expected, strict=True))
    if isinstance(expected, tuple) and hasattr(given, "ffn"):
        return (given.layers, given.hidden, given.ffn) == expected
    return bool(given == expected)


@pytest.mark.parametrize("command", CASES)
def test_options_reach_the_work(command: str, record: Record) -> None:
    words, work, expected = CASES[command]
    record.replace(work)
    run_until_work(command, words)
    for function, arguments in expected.items():
        for name, value in arguments.items():
            assert has(record.calls[function][name], value), (function, name, record.calls[function][name])


@pytest.mark.parametrize("command", LEFT_OUT)
def test_flags_are_off_by_default(command: str, record: Record) -> None:
    words, expected = LEFT_OUT[command]
    work = CASES[command][1]
    record.replace(work)
    run_until_work(command, words)
    for name, value in expected.items():
        assert has(record.calls[work][name], value), (name, record.calls[work][name])
    for function in record.calls:
        if function.endswith("._bar"):
            assert record.calls[function]["quiet"] is False
            assert record.calls[function]["what"] == BARS.get(command.split()[1], record.calls[function]["what"])
        if function == "calibrate.loading.load_models.models":
            assert record.calls[function].get("dtype") == "float32"
        if function == "calibrate.loading.prompts.load":
            few = {"calibrate log": 200, "calibrate quality": 20, "calibrate replace": 20, "calibrate loss": 100}
            assert record.calls[function].get("limit") == few.get(command, record.calls[function].get("limit"))
            assert not record.calls[function].get("seed")
        if function.endswith(".placed"):
            assert record.calls[function] == {"device": None, "threads": None}


def test_options_of_a_run_reach_it(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    record.replace("sim.commands.sim_app._progress", lambda quiet, what="shards": no_progress_bar())
    record.replace("sim.runs.sweep.run")
    run_until_work(
        "sim run", "s.toml -o out -j 3 --resume --yes -q --view formula,events --replications 5 --seed 7 --set a=1 --set b=2"
        " --sweep c=1,2",
    )  # fmt: skip
    given = {"out": Path("out"), "jobs": 3, "scheduler": None, "resume": True, "yes": True, "progress": "a bar"}
    overrides = {"set": ["a=1", "b=2"], "sweep": ["c=1,2"], "views": ["formula", "events"], "replications": 5, "seed": 7}
    assert record.calls["sim.runs.sweep.run"] == {"source": "s.toml", **given, "overrides": overrides}
    assert has(record.calls["sim.commands.sim_app._progress"], {"quiet": True})
    run_until_work("sim run")
    given = dict.fromkeys(("out", "jobs", "scheduler"), None) | {"resume": False, "yes": False, "progress": "a bar", "source": None}
    overrides = {"set": [], "sweep": [], "views": None, "replications": None, "seed": None}
    assert record.calls["sim.runs.sweep.run"] == {**given, "overrides": overrides}
    assert has(record.calls["sim.commands.sim_app._progress"], {"quiet": False})


class Terminal:
    """Standard error where that is a terminal."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_that_did_not_ask_for_quiet(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import calibrate.commands.common_options
    import sim.commands.sim_app

    if terminal:
        monkeypatch.setattr("sys.stderr", Terminal())
    bars: list[Callable[[bool], Any]] = [
        sim.commands.sim_app._progress,
        lambda quiet: calibrate.commands.common_options.progress(quiet, "points"),
    ]
    for bar in bars:
        with bar(True) as shown:
            assert shown is None
    with bars[1](False) as shown:
        assert (shown is not None) == terminal


def test_progress_is_lines_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sim.commands.sim_app

    clock = iter([0.0, 5.0, 11.0, 12.0, 30.0])
    monkeypatch.setattr("sim.commands.sim_app.time.monotonic", lambda: next(clock))
    with sim.commands.sim_app._progress(False) as report:
        assert report is not None
        for done in range(1, 5):
            report(done, 4)
    assert capsys.readouterr().err == "2 of 4 shards, about 11 s left\n"


# --- options with an effect that is seen at once ----------------------------------------------------------------------------


def test_options_of_a_check_decide_what_is_tried(record: Record) -> None:
    record.replace("sim.theorems.check", iter)
    words = "check --method ppd --examples 12 --seed 3 --theorem 21a --theorem 26b"
    done = CliRunner().invoke(sim_app, words.split(" "))
    assert done.exception is not None
    expected = {"method": "ppd", "examples": 12, "seed": 3, "only": ["21a", "26b"], "database": None}
    assert record.calls["sim.theorems.check"] == expected
    CliRunner().invoke(sim_app, ["check"])
    expected = {"method": None, "examples": 200, "seed": 0, "only": None, "database": None}
    assert record.calls["sim.theorems.check"] == expected


def test_figures_are_drawn_unless_they_are_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import figures

    drawn: list[Path] = []
    monkeypatch.setattr(figures, "of_run", lambda out, frame: drawn.append(out) or [out / "figures" / "one.png"])
    words = ["run", "--view", "formula", "-o", str(tmp_path / "out")]
    choices = [], ["--resume", "--no-figures"], ["--resume", "--figures"]
    shown = [CliRunner().invoke(sim_app, [*words, *more]).stdout for more in choices]
    assert drawn == [tmp_path / "out"] * 2
    assert ["one.png" in each for each in shown] == [True, False, True]


def test_a_large_grid_is_run_where_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"scenario": {"name": "many", "tokens": 2}, "method": {"name": "autoregressive", "layers": 4}}
    monkeypatch.setattr("sim.runs.sweep.ASK_BEYOND", 3)
    three = {"scenario.tokens": [2, 3, 4]}
    assert sweep.run(tables, sweep=three, views=["formula"], out=tmp_path / "three", jobs=1).rows == 3
    words = ["run", "--view", "formula", "--no-figures", "-o", str(tmp_path / "out"), "-q"]
    asked = CliRunner().invoke(sim_app, words)
    assert (asked.exit_code, "say --yes" in asked.stderr, (tmp_path / "out").exists()) == (2, True, False)
    assert CliRunner().invoke(sim_app, [*words, "--yes"]).exit_code == 0


def test_a_run_has_a_million_shards_at_most_and_says_how_long_more_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sim.runs.shard_plan import ShardPlan

    tables = {"scenario": {"name": "many", "tokens": 2, "views": ["formula"]}, "method": {"name": "autoregressive", "layers": 4}}
    monkeypatch.setattr(ShardPlan, "estimate", lambda self: 7200.0)
    monkeypatch.setattr(ShardPlan, "count", lambda self: 1_000_001)
    with pytest.raises(ValueError, match=r"1,000,000 shards, got 1,000,001 \(about 2 hours on one core\); take fewer points"):
        sweep.run(tables, out=tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(ShardPlan, "count", lambda self: 1_000_000)
    assert sweep.run(tables, out=tmp_path / "out", jobs=1).rows == 1


@pytest.mark.parametrize("command", ["sim run", "sim lint", "sim trace", "sim compare", "calibrate run"])
def test_methods_from_outside_hold_while_a_command_runs(command: str, record: Record) -> None:
    """What is allowed while the work is done is what was named, and nothing is afterwards."""
    from model.methods import registry

    seen: list[Any] = []
    places = {
        "sim run": ("sim.runs.sweep.run", "s.toml"), "sim lint": ("sim.runs.sweep.resolve", "s.toml"),
        "sim trace": ("sim.runs.trace.described", "s.toml"), "sim compare": ("sim.comparison.run_comparison.of_file", "runs.json"),
        "calibrate run": ("calibrate.commands.run_command.measure_plan", "autoregressive -o runs.json"),
    }  # fmt: skip
    place, words = places[command]

    def work(**_: Any) -> None:
        seen.append([*registry.allowed_modules()])
        raise ReachedError

    record.replace(place, work)
    run_until_work(command, f"{words} --methods model.methods.autoregressive.algorithm")
    run_until_work(command, words)
    assert seen == [["model.methods.autoregressive.algorithm"], []]


def test_an_example_is_tried_again() -> None:
    words = ["check", "--theorem", "21a", "--method", "ppd", "--example"]
    example = '{"form": "literal", "layers": 40, "exit_layer": 20, "candidates": 3, "matches": [true, false]}'
    done = CliRunner().invoke(sim_app, [*words, example, "--json"])
    assert done.exit_code == 0, done.output
    [verdict] = json.loads(done.stdout)
    assert (verdict["theorem"], verdict["tried"]) == ("21a", 1)
    for named in ([], ["--theorem", "21a", "--theorem", "26b"]):
        done = CliRunner().invoke(sim_app, ["check", *named, "--example", example])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == "error: --example needs one --theorem, the one that it belongs to\n"


QUICK: dict[str, dict[str, Any]] = {
    "calibrate layers": {
        "quick": True, "minutes": 1.0, "grid": {"widths": (1, 4, 9), "contexts": (128, 512)},
        "effort": {"target": 0.05, "most": 20},
    },
    "calibrate links": {"sizes": (1024, 65_536, 1_048_576), "repeats": 5},
    "calibrate train": {"recipe": {"epochs": 1.0, "batch": 4, "length": 64, "warm_up": 10}, "corpus": {"name": "a little"}},
    "calibrate heads": {"settings": {"epochs": 1.0, "batch": 4, "length": 64}, "corpus": {"name": "a little"}},
    "calibrate align": {
        "settings": {"prompts": 16, "prompt": 16, "tokens": 16, "held_out": 8, "batch": 4}, "corpus": {"name": "a little"},
    },
}  # fmt: skip


@pytest.mark.parametrize("command", QUICK)
def test_quick_is_a_little_of_the_work(command: str, record: Record) -> None:
    work = CASES[command][1]
    record.replace(work)
    run_until_work(command, f"{LEFT_OUT[command][0]} --quick")
    assert has(record.calls[work], QUICK[command]), record.calls[work]


def results(kind: str, count: int) -> list[dict[str, Any]]:
    """What heads are worth: made up, and different in every cell."""
    rows = [{"head": kind, "layer": layer} for layer in range(1, count + 1)]
    first = 0.1 if kind == "common" else 0.2
    return [
        row | {"loss": 2 + first * row["layer"], **{f"top_{top}": first + top / 50 + row["layer"] / 100 for top in (1, 3, 5)}}
        for row in rows
    ]


TRAINED = {
    "size": {"layers": 2, "hidden": 64}, "parameters": 123_456, "held_out_loss": 1.23456, "corpus": {"held_out_tokens": 789},
    "seconds": 61.6, "name": "big",
}  # fmt: skip
HEADS = {
    "name": "big", "corpus": {"held_out_tokens": 789}, "held_out_loss": 1.23456,
    "results": [*results("trained", 2), *results("common", 2)],
}  # fmt: skip
ALIGNED = {
    "target": {"name": "big"}, "held_out_loss_before": 1.5, "held_out_loss": 1.62346,
    "agreement": {"positions": 640, "prompts": 10, "before": 0.25, "after": 0.51236, "gain": 0.26236, "gain_error": 0.01234},
}  # fmt: skip
MEASURED = {
    "method": "early_exit", "target_name": "big", "sequences": 7, "decay": [0.5, None], "agreement": [0.25, 1.0],
    "common_prefix": [3.0, 12.5], "log_likelihood": [-1.5, -0.25], "fallback_rate": [None, None],
    "mean_layers": [3.25, float("inf")],
}  # fmt: skip
SENDS = [(1024, 2e-6), (4096, 4e-6)]
ANSWERS: dict[str, tuple[str, Any, list[str], dict[str, Any]]] = {
    # Of each command more words, the result of its work, what it prints of that, and its document.
    "calibrate train": (
        "", TRAINED,
        ["draft: 2 layers of 64, 123456 parameters; held-out loss 1.2346 nats per token (measured, 789 tokens), 62 s; out/draft"],
        {"note": "", "models": {"draft": TRAINED | {"folder": "out/draft"}}},
    ),
    "calibrate heads": (
        "", HEADS,
        [
            "big: loss [nats per token], and share of the model's tokens in the top 1, 3 and 5; measured on 789 held-out "
            "tokens",
            "                       model's own head                      trained head",
            "layer      loss   top 1   top 3   top 5      loss   top 1   top 3   top 5",
            "    1     2.100   0.130   0.170   0.210     2.200   0.230   0.270   0.310",
            "    2     2.200   0.140   0.180   0.220     2.400   0.240   0.280   0.320",
            "loss of the whole model: 1.235", "heads",
        ],
        HEADS | {"file": "heads"},
    ),
    "calibrate align": (
        "", ALIGNED,
        [
            "agreement with the greedy output of big: 0.2500 before, 0.5124 after, gained 0.2624 +- 0.0123 (measured on 640 tokens "
            "after 10 held-out prompts)",
            "loss on held-out text: 1.5000 before, 1.6235 nats per token after (measured); out",
        ],
        ALIGNED | {"folder": "out"},
    ),
    "calibrate log": (
        "", (SimpleNamespace(table=SimpleNamespace(height=7)), LogSeconds(1.0, 0.5, 0.0, 0.25)),
        [
            "log.json: 7 positions of 1 sequences",
            "  writing            1.00 s    57%   measured", "  heads              0.50 s    29%   measured",
            "  trained heads      0.00 s     0%   measured", "  draft              0.25 s    14%   measured",
        ],
        {
            "log": "log.json", "rows": 7, "sequences": 1,
            "seconds": {"writing": 1.0, "heads": 0.5, "trained_heads": 0.0, "draft": 0.25},
        },
    ),
    "calibrate quality": (
        "--sweep decay=0.5,none", MEASURED,
        [
            "early_exit on big: 7 sequences (measured; log-likelihoods in nats per token)",
            " decay  agreement  common_prefix  log_likelihood  mean_layers",
            "0.5000     0.2500         3.0000         -1.5000       3.2500",
            "     -     1.0000          12.50         -0.2500          inf",
            "agreement: share of tokens equal to the target's", "common_prefix: tokens before the first that differs", "rows.csv",
        ],
        {},
    ),
    "calibrate links": (
        "", SimpleNamespace(profiles={"gloo": Path("a.json")}, failed={}),
        [
            "an engine, best 1.02 GB/s", "        1024 bytes         2.0 us      0.51 GB/s",
            "        4096 bytes         4.0 us      1.02 GB/s",
            "a.json",
        ],
        {"profiles": {"gloo": "a.json"}, "failed": {}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", ANSWERS)
def test_what_was_found_is_printed_and_is_the_document(command: str, record: Record) -> None:
    more, answer, lines, document = ANSWERS[command]
    profiled = SimpleNamespace(engine="an engine", bandwidth=1.024e9)
    profiled.rows = lambda part: pl.DataFrame(SENDS, ["size", "time_s"], orient="row") if part == "send" else None
    record.replace("model.hardware.profile_files.load", profiled)
    record.replace(CASES[command][1], lambda **_: pl.DataFrame(answer) if answer is MEASURED else answer)
    words = [*command.split()[1:], *LEFT_OUT[command][0].split()]
    done = CliRunner().invoke(calibrate_app, [*words, *more.split()])
    assert (done.exit_code, done.stderr, done.stdout.splitlines()) == (0, "", lines), done.output
    if document:
        done = CliRunner().invoke(calibrate_app, [*words, "--json"])
        assert (done.exit_code, done.stderr, json.loads(done.stdout)) == (0, "", document), done.output


INTERRUPTED = {
    "calibrate train": "interrupted; progress until two minutes ago is kept; resume with the same command and --resume",
    "calibrate heads": "interrupted; progress until two minutes ago is kept; resume with the same command and --resume",
    "calibrate align": "interrupted; progress until two minutes ago is kept; resume with the same command and --resume",
    "calibrate log": "interrupted; logged sequences are kept next to log.json; resume with the same command and --resume",
    "calibrate quality": "interrupted; finished settings are kept next to rows.csv; resume with the same command and --resume",
    "calibrate layers": "interrupted; timed points are kept in out; resume with the same command and --resume",
    "calibrate links": "interrupted; finished links are written; run the others with --link",
}


@pytest.mark.parametrize("command", INTERRUPTED)
def test_who_interrupts_is_told_what_is_kept(command: str, record: Record) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    record.replace(CASES[command][1], interrupted)
    done = CliRunner().invoke(calibrate_app, [*command.split()[1:], *LEFT_OUT[command][0].split()])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", f"{INTERRUPTED[command]}\n")


def test_failed_links_are_listed_last(record: Record) -> None:
    record.replace(
        "calibrate.timing.transfers.time_links", SimpleNamespace(profiles={}, failed={"gloo": "no host", "nccl": "no GPU"})
    )
    for more in ([], ["--json"]):
        done = CliRunner().invoke(calibrate_app, ["links", "-o", "out", *more])
        assert (done.exit_code, done.stderr) == (1, "failed: gloo: no host\nfailed: nccl: no GPU\n")


def test_a_figure_that_has_no_room_is_told(record: Record) -> None:
    record.replace("calibrate.decode.output_quality.measure", pl.DataFrame(MEASURED))
    drawn: list[Path] = []
    record.replace("figures.of_quality", lambda **_: drawn)
    words = ["quality", *LEFT_OUT["calibrate quality"][0].split(), "--figures", "pictures"]
    done = CliRunner().invoke(calibrate_app, words)
    assert done.stderr == "note: these rows give more lines than fit in a figure; none was drawn\n"
    drawn.append(Path("pictures/one.png"))
    done = CliRunner().invoke(calibrate_app, words)
    assert (done.stderr, done.stdout.splitlines()[-2:]) == ("", ["rows.csv", "pictures/one.png"])


def test_what_a_table_is_of_is_said_in_its_rows(record: Record) -> None:
    """Names and checksums of the models, the heads that were read, prompts, type and seed: columns of `calibrate quality`."""
    record.replace("calibrate.decode.output_quality.measure")
    record.replace("calibrate.commands.log_command.chosen_prompts", [(Prompt("one", "a", "a file"), BEGUN)])
    for prompts, called in ((["--prompts", "a/notes.json"], "notes.json"), ([], "held-out standard library")):
        words = f"bild --model big --draft small --set fallback_threshold=1 --seed 3 -o a.csv {' '.join(prompts)}"
        run_until_work("calibrate quality", words)
        models = {f"{role}_{key}": value for role in ("target", "draft") for key, value in (("name", "made"), ("checksum", "0"))}
        assert record.calls["calibrate.decode.output_quality.measure"]["description"] == models | {
            "heads": "heads read", "dtype": "float32", "prompts": called, "seed": 3, "source": "measured",
        }  # fmt: skip
        asked = {"limit": 20, "length": 64, "seed": 3, "template": None}
        assert has(record.calls["calibrate.commands.log_command.chosen_prompts"], asked)


def test_what_a_log_is_of_is_said_in_it(record: Record) -> None:
    """Models with shapes and heads, prompts as tokens, and sampling; prompts of the family by default."""
    record.replace("calibrate.decode.position_logging.write_log")
    record.replace("calibrate.commands.log_command.tokenized_prompts", [("one", [1, 2, 3]), ("two", [4])])
    model = {"name": "made", "checksum": "0", "layers": 8, "vocabulary": 99}
    run_until_work("calibrate log", "--target big --draft small --heads a/some.heads --sample --top-k 4 -o a.json")
    said = record.calls["calibrate.decode.position_logging.write_log"]["description"]
    assert said | {"versions": 0, "date": 0} == {
        "dtype": "float32", "versions": 0, "date": 0, "target": model, "draft": model, "max_tokens": 64, "seed": 0,
        "heads": {"file": "some.heads", "layers": [3, 5]}, "sampling": vars(Sampling(top_k=4)),
        "prompts": [{"id": "one", "tokens": [1, 2, 3]}, {"id": "two", "tokens": [4]}],
    }  # fmt: skip
    assert said["date"] == datetime.now(tz=UTC).date().isoformat()
    asked = {"where": None, "limit": 200, "length": 64, "seed": 0, "template": None}
    assert has(record.calls["calibrate.commands.log_command.tokenized_prompts"], asked)
    run_until_work("calibrate log", "--target big -o a.json")
    said = record.calls["calibrate.decode.position_logging.write_log"]["description"]
    assert (said["heads"], said["draft"], said["sampling"]) == (None, None, None)
    run_until_work("calibrate log", "--target family -o a.json")  # the bundled family has its own draft
    assert record.calls["calibrate.loading.load_models.models"]["named"].keys() == {"target", "draft"}
    Path("nowhere").touch()  # heads next to the target are read too
    run_until_work("calibrate log", "--target big -o a.json")
    described = record.calls["calibrate.decode.position_logging.write_log"]["description"]
    assert described["heads"] == {"file": "nowhere", "layers": [3, 5]}


def test_prompts_keep_their_last_tokens_and_chats_all(record: Record) -> None:
    from calibrate.commands import log_command

    target: Any = SimpleNamespace(tokenizer=SimpleNamespace(backend_tokenizer="a tokenizer"))
    record.replace("calibrate.loading.prompts.held_out", PROMPTS)
    for where, template, ids in ((None, None, [5, 6]), ("notes", "none", [5, 6]), ("notes", "chat", [1, 2, 3, 4, 5, 6])):
        assert log_command.tokenized_prompts(where, template, 7, 2, 9, target) == [("one", ids)]
        assert record.calls["calibrate.loading.load_models.tokenize"] == {
            "target": target, "text": "a text", "name": "one", "chat": template == "chat",
        }  # fmt: skip
    assert record.calls["calibrate.loading.prompts.held_out"] == {
        "length": 2, "count": 7, "seed": 9, "tokenizer": "a tokenizer", "corpus": None,
    }  # fmt: skip
    assert record.calls["calibrate.loading.prompts.load"] == {"where": "notes", "template": "chat", "limit": 7, "seed": 9}
    for wrong, said in (((None, "squad", 7, 2, 9), "--template is used only with --prompts"),
                        (("notes", None, 0, 2, 9), "limit must be at least 1, got 0"),
                        (("notes", None, 7, 0, 9), "prompt_tokens must be at least 1, got 0")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            log_command.tokenized_prompts(*wrong, target)  # type: ignore[arg-type]


def test_bundled_profiles_are_named_as_they_are_written(record: Record) -> None:
    record.replace("calibrate.importers.bundled_profiles.write", [Path("out/a.json"), Path("out/b.json")])
    done = CliRunner().invoke(calibrate_app, ["bundle", "data", "-o", "out"])
    assert (done.exit_code, done.stdout) == (0, "out/a.json\nout/b.json\n")
    import model

    CliRunner().invoke(calibrate_app, ["bundle", "data"])
    assert record.calls["calibrate.importers.bundled_profiles.write"]["folder"] == Path(model.__file__).parent / "profiles"


def test_options_change_a_plan(record: Record) -> None:
    Path("plan.toml").write_text(
        '[run]\nmodel = "big"\ntokens = 5\nrepeats = 9\n[[method]]\nname = "speculative"\ndraft_length = 2\n', encoding="utf-8"
    )
    record.replace("calibrate.commands.run_command.measure_plan")
    run_until_work("calibrate run", "--plan plan.toml --tokens 6 --seed 3 -o runs.json")
    written = {
        "run": {"model": "big", "tokens": 6, "repeats": 9, "seed": 3},
        "choices": [{"method": "speculative", "settings": {"draft_length": 2}, "rates": None, "unit_kind": None}],
    }
    assert has(record.calls["calibrate.commands.run_command.measure_plan"]["written"], written)


def test_attention_of_another_engine(record: Record) -> None:
    record.replace("calibrate.importers.aiconfigurator.read")
    run_until_work("calibrate import aiconfigurator", "data --gpu h100 --engine a/1 --attention b/2 --name mine --unit us -o out")
    given = {"gpu": "h100", "engine": "a/1", "attention": "b/2", "name": "mine", "unit": "us", "commit": ""}
    assert record.calls["calibrate.importers.aiconfigurator.read"] == {"folder": Path("data"), **given}


# --- every option has a test ------------------------------------------------------------------------------------------------

REACH, OFF = "test_options.py::test_options_reach_the_work", "test_options.py::test_flags_are_off_by_default"
METHODS = "test_options.py::test_methods_from_outside_hold_while_a_command_runs"
TRACED = "test_trace.py::test_the_command_traces_the_decoding_that_is_asked_for"
COMPARED = "test_run_comparison.py::test_the_command_line_compares_writes_and_keeps_a_page"
LISTED = "test_outside_method.py::test_an_allowed_method_is_listed_and_is_in_the_schema"
IMPORTED = "test_import_command.py::test_the_command_writes_the_profile_of_the_function"
ELSEWHERE = "test_import_command.py::test_tables_of_vidur_may_be_in_other_folders"
SECONDS = "test_milliseconds_for_seconds.py::test_importers_refuse_milliseconds_labelled_as_seconds"
ENGINE = "test_engine_command.py::"
EFFECTS: dict[str, dict[str, str]] = {
    # Of each command, the tests that see an effect of its options.
    "sim run": {
        "test_options.py::test_options_of_a_run_reach_it":
            "--set --sweep --view --replications --seed --out --jobs --resume --quiet",
        "test_options.py::test_a_large_grid_is_run_where_that_is_said": "--yes",
        "test_options.py::test_figures_are_drawn_unless_they_are_declined": "--figures",
        "test_sim_app.py::test_a_dry_run_writes_nothing": "--dry-run --json",
        "test_run_report.py::test_columns_that_are_asked_for_are_printed": "--columns",
        METHODS: "--methods",
        "test_dask_runs.py::test_results_are_equal_to_those_of_local_processes": "--scheduler",
    },
    "sim explain": {
        "test_explain.py::test_options_reach_the_fit":
            "--context --draft --draft-passes --tensor-parallel --dtype --weights --engine --seed --draft-context-budget",
        "test_explain.py::test_mistakes_are_refused_in_one_line":
            "--model --gpu --draft-length --plain-tpot --tpot --batch",
        "test_explain.py::test_a_record_gives_acceptance_draft_length_and_times": "--log --json",
        "test_explain.py::test_an_acceptance_rate_gives_the_length": "--mean-acceptance-length --acceptance",
        "test_explain.py::test_static_batches_have_stragglers": "--static-tokens",
        "test_explain.py::test_a_step_law_of_cells_replaces_the_priors": "--engine-law",
        "test_explain.py::test_a_claim_is_divided_into_factors": "--claim",
        "test_explain.py::test_waterfall_has_the_extra_time_of_each_term": "--out",
    },
    "sim audit": {
        "test_audit_command.py::test_columns_that_are_asked_for_are_printed": "--columns",
        "test_audit_command.py::test_document_fits_its_schema_and_is_strict_json": "--json",
        "test_audit_command.py::test_methods_from_outside_have_no_bound_until_they_say_one": "--methods",
    },
    "calibrate engine fit": {
        ENGINE + "test_options_reach_the_fit":
            "--model --gpu --tensor-parallel --dtype --weights --draft --kernels --experts --active-experts --acceptance --seed",
        ENGINE + "test_fit_prints_coefficients_errors_and_what_is_not_known": "--out --engine",
        ENGINE + "test_fit_as_json_has_every_coefficient_with_its_interval": "--json",
    },
    "calibrate engine predict": {
        ENGINE + "test_prefill_share_matters_only_between_units": "--prefill-share",
        ENGINE + "test_predict_has_a_row_for_each_cell_with_its_interval": "--json",
    },
    "calibrate engine next": {
        ENGINE + "test_options_reach_the_fit":
            "--model --gpu --tensor-parallel --dtype --weights --draft --kernels --experts --active-experts --acceptance --seed",
        ENGINE + "test_next_names_a_cell_and_why": "--batch --draft-length --json",
    },
    "calibrate engine commands": {
        ENGINE + "test_options_of_commands_are_in_the_script":
            "--model --batch --draft-length --engine --draft --method --acceptance-length --prompt --tokens",
    },
    "sim plot": {"test_figures_hardware.py::test_a_command_draws_profiles": "--profile --out --json"},
    "sim trace": {
        TRACED: "--out --point --replication --tokens --set --sweep --seed",
        METHODS: "--methods",
    },
    "sim compare": {
        COMPARED: "--out --page --check --json",
        "test_compare_by_law.py::test_the_command_prints_writes_and_draws_by_a_law": "--law",
        "test_run_comparison.py::test_a_mismatch_is_accepted_on_request": "--allow-mismatch",
        "test_figures_comparison.py::test_a_comparison_is_drawn_by_the_command": "--profile --figures",
        METHODS: "--methods",
    },
    "sim report": {
        "test_report_command.py::test_formats_and_files": "--out --format",
        "test_outside_method.py::test_reports_name_the_module_of_a_method": "--methods",
    },
    "sim check": {
        "test_options.py::test_options_of_a_check_decide_what_is_tried": "--method --examples --seed --theorem",
        "test_theorems.py::test_undecided_statement_is_named_in_summary": "--json",
        "test_options.py::test_an_example_is_tried_again": "--example",
    },
    "sim lint": {METHODS: "--methods"},
    "sim ls": {LISTED: "--methods", "test_sim_app.py::test_lists_and_environment": "--json"},
    "sim schema": {LISTED: "--methods"},
    "sim advise": {
        "test_advise.py::test_every_option_changes_the_answer": "--model --gpu --tensor-parallel --gpus --draft --engine"
        " --engine-law --log --acceptance --acceptance-by-position --match-rate --batch"
        " --draft-length --context --slo-tpot --lossy --dtype --weights --kernels --seed --rate --prompt --output",
        "test_advise.py::test_draft_length_of_a_log_that_does_not_say_it": "--log-draft-length",
        "test_advise.py::test_figures_that_an_engine_prints_are_converted": "--printed-rate --printed-length",
        "test_advise.py::test_settings_are_printed_alone": "--settings",
        "test_method_map.py::test_every_option_of_the_map_changes_it": "--rank-rates --rank-drafts --block-acceptance --map"
        " --contexts",
        "test_draft_budget_served.py::test_advice_has_the_pass_and_the_sequences_that_fit": "--draft-context-budget",
        "test_advise.py::test_files_are_written_and_hold_the_same": "--out --json",
    },
    "sim serve": {
        "test_separate_drafts_under_load.py::test_placement_link_and_device_change_the_times_of_drafts": "--placement --link"
        " --draft-gpu",
        "test_draft_budget_served.py::test_a_smaller_budget_serves_long_contexts_faster": "--draft-context-budget",
        "test_serve_command.py::test_every_input_changes_the_answer": "--model --gpu --tensor-parallel --draft --engine"
        " --acceptance --dtype --weights --kernels --prompt --output --prompt-cv --output-cv --concurrency",
        "test_serve_command.py::test_acceptance_of_a_log_and_by_position": "--engine-law --log --log-draft-length"
        " --acceptance-by-position",
        "test_serve_command.py::test_rows_have_the_figures_of_each_load_and_policy": "--rate --policy --json",
        "test_serve_command.py::test_the_same_seed_gives_the_same_numbers_and_others_differ": "--seed",
        "test_serve_command.py::test_settings_reach_the_server": "--max-num-seqs --num-blocks --block-size"
        " --max-num-batched-tokens --replicas --router --slo-ttft --slo-tpot --reserve-prompts",
        "test_serve_command.py::test_the_engines_own_work_may_overlap_with_passes": "--async-scheduling",
        "test_serve_command.py::test_impossible_options_are_refused_in_one_line": "--chunked-prefill",
        "test_serve_command.py::test_requests_beyond_the_context_are_refused_before_any_runs": "--max-model-len",
        "test_serve_command.py::test_bursts_make_requests_wait": "--burstiness --requests --replications",
        "test_serve_command.py::test_the_schedule_is_printed_as_lines_of_an_engine": "--settings",
        "test_serve_command.py::test_a_trace_is_served_at_its_times_and_at_other_rates": "--trace",
        "test_serving_scenario.py::test_a_study_is_written_with_its_figures_and_reported": "--out --perfetto",
    },
    "sim env": {"test_sim_app.py::test_lists_and_environment": "--json"},
    "calibrate bundle": {REACH: "--out"},
    "calibrate engine prior": {
        "test_engine_prior_command.py::test_every_option_changes_the_law": "--engine --model --gpu --unit --tensor-parallel --dtype"
        " --weights --draft --kernels --acceptance --seed",
        "test_engine_prior_command.py::test_law_of_priors_is_written_and_described": "--out --json",
    },
    "calibrate engine bundle": {"test_engine_prior_command.py::test_bundle_writes_all_laws_into_a_folder": "--out"},
    "calibrate layers": {
        REACH: "--model --out --device --dtype --mode --widths --contexts --batches --busy --rounds --source --minutes --target"
               " --threads --resume --name --quiet",
        "test_options.py::test_quick_is_a_little_of_the_work": "--quick",
        "test_layers_command.py::test_json_output_equals_the_profile": "--json",
    },
    "calibrate links": {
        REACH: "--out --link --sizes --repeats --name --quiet", "test_options.py::test_quick_is_a_little_of_the_work": "--quick",
        "test_options.py::test_what_was_found_is_printed_and_is_the_document": "--json",
    },
    "calibrate report": {"test_validation.py::test_an_outdated_page_is_reported": "--check --out"},
    "calibrate train": {
        REACH: "--out --role --layers --hidden --ffn --epochs --batch --length --rate --seed --vocabulary --text --device --threads"
               " --resume --quiet",
        "test_options.py::test_quick_is_a_little_of_the_work": "--quick",
        "test_family.py::test_train_command_writes_models_and_resumes": "--json",
    },
    "calibrate heads": {
        REACH: "--model --out --settings --layers --epochs --batch --length --rate --labels --seed --text --device --threads"
               " --resume --quiet",
        "test_options.py::test_quick_is_a_little_of_the_work": "--quick",
        "test_exit_heads.py::test_heads_command_trains_heads": "--json",
        "test_exit_tuning.py::test_the_command_and_its_errors": "--loss",
        "test_draft_head_training.py::test_command_trains_draft_heads": "--kind --draft-length",
    },
    "calibrate align": {
        REACH: "--target --draft --out --prompts --prompt --tokens --held-out --epochs --batch --rate --seed --text --device"
               " --threads --resume --quiet",
        "test_options.py::test_quick_is_a_little_of_the_work": "--quick",
        "test_align_draft.py::test_align_is_a_command": "--json",
    },
    "calibrate decode": {
        REACH: "--model --draft --medium --set --prompts --template --limit --tokens --sample --temperature --top-k --top-p --seed"
               " --dtype --device --threads --log --plain --processes --quiet",
        "test_real_decoding.py::test_trained_heads_are_used": "--heads",
        "test_real_decoding.py::test_every_method_decodes_and_reports": "--prompt",
        "test_real_decoding.py::test_report_begins_with_the_output_and_counts_every_round": "--json",
    },
    "calibrate log": {
        REACH: "--target --out --draft --heads --prompts --template --limit --prompt-tokens --tokens --sample --temperature --top-k"
               " --top-p --seed --dtype --device --threads --resume --quiet",
        "test_options.py::test_what_was_found_is_printed_and_is_the_document": "--json",
    },
    "calibrate rates": {
        "test_position_logging.py::test_candidates_and_lengths_are_those_of_the_options": "--candidates --lengths --json",
        "test_decoded_rounds.py::test_a_row_for_each_value_of_a_setting": "--by",
        "test_position_logging.py::test_predicted_speed_ups_use_the_cost_ratio": "--cost-ratio",
        "test_position_logging.py::test_figures_of_position_logs_and_public_logs": "--drafter --figures",
        "test_position_logging.py::test_matches_of_rates_are_those_that_are_looked_up": "--matches",
    },
    "calibrate quality": {
        REACH: "--out --model --draft --heads --set --sweep --prompts --template --limit --prompt-tokens --tokens --seed --dtype"
               " --device --threads --resume --quiet",
        "test_output_quality.py::test_quality_command_writes_rows_and_figures": "--figures --json",
        "test_reference_scores.py::test_the_command_scores_outputs": "--score --cut-at",
    },
    "calibrate replace": {
        REACH: "--out --model --draft --thresholds --prompts --template --limit --prompt-tokens --tokens --seed --dtype --device"
               " --threads --quiet",
        "test_loss_by_position.py::test_commands_write_rows_and_figures": "--figures --json",
        "test_reference_scores.py::test_the_command_scores_outputs": "--score --cut-at",
    },
    "calibrate loss": {
        REACH: "--out --model --heads --layers --prompts --limit --tokens --seed --dtype --device --threads --quiet",
        "test_loss_by_position.py::test_commands_write_rows_and_figures": "--figures --json",
    },
    "calibrate run": {
        REACH: "--out --model --draft --medium --heads --set --sweep --forced --unit-kind --prompts --limit --prompt-tokens"
               " --tokens"
               " --repeats --seed --dtype --mode --device --gpus --threads --resume --quiet",
        "test_options.py::test_options_change_a_plan": "--plan",
        "test_measure_runs.py::test_the_command_line_times_a_method": "--json", METHODS: "--methods",
    },
    "calibrate import vidur": {
        IMPORTED: "--model --gpu --out --name --commit", ELSEWHERE: "--attention --overheads --network", SECONDS: "--unit",
    },
    "calibrate import aiconfigurator": {
        IMPORTED: "--gpu --out --name --commit",
        "test_import_command.py::test_the_command_composes_a_model": "--model --tensor-parallel",
        "test_options.py::test_attention_of_another_engine": "--engine --attention --unit",
    },
    "calibrate import llmservingsim": {IMPORTED: "--model --gpu --out --name --commit"},
    "calibrate import engine-log": {
        "test_engine_logs.py::test_record_and_cells_are_written": "--out --json",
        "test_engine_logs.py::test_options_of_the_command": "--engine --draft-length",
    },
    "calibrate fit roofline": {
        "test_validation.py::test_fit_to_one_layer_prints_scenario_keys": "--layer --product",
    },
}  # fmt: skip


def commands(of: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands below one, by their whole names."""
    if hasattr(of, "commands"):
        for verb, each in of.commands.items():
            yield from commands(each, f"{name} {verb}")
    else:
        yield name, of


ALL = {name: each for program, app in APPS.items() for name, each in commands(typer.main.get_command(app), program)}


@functools.cache
def functions_of(file: str) -> dict[str, str]:
    """The tests of a file by name, with their decorators; an empty text for those that are slow."""
    tree = ast.parse(TESTS[file].read_text(encoding="utf-8"))
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    return {each.name: "" if any("slow" in ast.unparse(mark) for mark in each.decorator_list) else ast.unparse(each)
            for each in functions}  # fmt: skip


def test_every_command_is_listed() -> None:
    assert {*EFFECTS} == {*ALL}


@pytest.mark.parametrize("command", ALL)
def test_every_option_has_a_test_that_sees_its_effect(command: str) -> None:
    parameters = [each for each in ALL[command].params if each.param_type_name == "option"]
    options = {max(each.opts, key=len): {*each.opts} for each in parameters}
    named = [option for words in EFFECTS[command].values() for option in words.split()]
    assert sorted(named) == sorted(options), "EFFECTS names the tests of options, each once; a new option needs one"
    for test, words in EFFECTS[command].items():
        file, _, function = test.partition("::")
        assert functions_of(file).get(function), f"{test} is no test of the quick tier"
        text = TESTS[file].read_text(encoding="utf-8")
        for option in words.split():
            assert any(each in text for each in options[option]), f"{file} does not say {option}"
    # Options that reach the work do so in words of this command.
    given = CASES[command][0].split() if REACH in EFFECTS[command] else []
    for option in EFFECTS[command].get(REACH, "").split():
        assert options[option] & {*given}, option
