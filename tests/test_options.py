"""Options of the commands: what each is given reaches the code that does the work; and every option has a test of its effect.

Commands on real models take minutes of work, so what does the work is replaced here by a record of how it was called. That the work
heeds its arguments is tested where it is, and `EFFECTS` says by which test each option of each command is seen to matter.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from calibrate.cli import app as calibrate_app
from sim.cli import app as sim_app

TESTS = Path(__file__).parent
APPS = {"sim": sim_app, "calibrate": calibrate_app}


class Reached(Exception):
    """The work itself, which is not done here."""


class Record:
    """Calls of functions by their dotted names, with the names of their arguments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.calls: dict[str, dict[str, Any]] = {}

    def replace(self, name: str, answer: Any = Reached) -> None:
        """Have a function record its arguments and give this answer: a function of them, a value, or an exception."""
        module, _, function = name.rpartition(".")
        owner = importlib.import_module(module)
        signature = inspect.signature(getattr(owner, function))

        def recorded(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls[name] = dict(bound.arguments)
            if answer is Reached:
                raise Reached
            return answer(**bound.arguments) if callable(answer) else answer

        self.patch.setattr(owner, function, recorded)


def ran(command: str, *words: str) -> None:
    """Run a command until it reaches the work."""
    program, *verbs = command.split()
    done = CliRunner().invoke(APPS[program], [*verbs, *words])
    assert isinstance(done.exception, Reached), (done.output, done.exception)


@contextlib.contextmanager
def no_bar() -> Iterator[str]:
    yield "a bar"


MODELS = {"decoder": SimpleNamespace(layers=8, vocabulary=99, heads={}), "name": "made", "checksum": "0", "has_encoder": False}
CORPUS = SimpleNamespace(name="notes", cut=lambda characters: SimpleNamespace(name="a little", characters=characters))
BEGUN = SimpleNamespace(prompt=[1, 2, 3, 4, 5, 6])
PROMPTS = [SimpleNamespace(id="one", text="a text")]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Record:
    """What commands on real models call before and around their work."""
    monkeypatch.chdir(tmp_path)
    found = Record(monkeypatch)
    for module in ("log", "quality", "run", "decode"):
        found.replace(f"calibrate.{module}_command.placed", "there")
    found.replace("calibrate.family_commands.placed", "there")
    for module in ("log_command", "quality_command", "run_command", "decode_command", "layers_command", "links_command",
                   "family_commands"):  # fmt: skip
        found.replace(f"calibrate.{module}.progress", lambda quiet, what: no_bar())
    found.replace("calibrate.loading.models", lambda named, **_: {role: SimpleNamespace(**MODELS) for role in named})
    found.replace("calibrate.loading.use_heads", (3, 5))
    found.replace("calibrate.loading.use_heads_of", "heads read")
    found.replace("calibrate.loading.begun", BEGUN)
    found.replace("calibrate.loading.heads_beside", Path("nowhere"))
    found.replace("calibrate.decoding.check_text", None)
    found.replace("calibrate.prompts.load", PROMPTS)
    found.replace("calibrate.family.corpus.own", CORPUS)
    found.replace("calibrate.family.store.load", lambda **given: SimpleNamespace(name=given["model"], folder=Path(given["model"])))
    found.replace("calibrate.family.making.tokenizer_of", "the tokenizer")
    return found


TRAIN = "--epochs 2.5 --batch 3 --rate 0.01 --seed 9 --text notes --device cuda:1 --threads 3 --resume -q"
REAL = "--dtype float64 --device cuda:1 --threads 3 --seed 9 -q"
CASES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    # Command, its words, and what they are to be where they go.
    "calibrate train": (
        f"-o out --role tiny --layers 2 --hidden 64 --ffn 172 --length 48 --vocabulary 300 {TRAIN}",
        "calibrate.family.making.make",
        {
            "calibrate.family.making.make": {
                "role": "tiny", "size": (2, 64, 172), "recipe": {"epochs": 2.5, "batch": 3, "length": 48, "rate": 0.01, "seed": 9},
                "corpus": CORPUS, "folder": Path("out"), "device": "there", "resume": True, "report": "a bar",
            },
            "calibrate.family.making.tokenizer_of": {"folder": Path("out"), "size": 300},
            "calibrate.family.corpus.own": {"path": Path("notes")},
            "calibrate.family_commands.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.family_commands.progress": {"quiet": True},
        },
    ),
    "calibrate heads": (
        f"--model big -o some.heads --settings paper --layers 2,4 --length 48 --labels model {TRAIN}",
        "calibrate.family.heads.train",
        {
            "calibrate.family.heads.train": {
                "settings": {"epochs": 2.5, "batch": 3, "length": 48, "rate": 0.01, "seed": 9, "labels": "model"},
                "corpus": CORPUS, "path": Path("some.heads"), "layers": (2, 4), "resume": True, "report": "a bar",
            },
            "calibrate.family.store.load": {"model": "big"},
            "calibrate.family_commands.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.family_commands.progress": {"quiet": True},
        },
    ),
    "calibrate align": (
        f"--target big --draft small -o out --prompts 90 --prompt 7 --tokens 11 --held-out 13 {TRAIN}",
        "calibrate.family.align.align",
        {
            "calibrate.family.align.align": {
                "settings": {
                    "prompts": 90, "prompt": 7, "tokens": 11, "held_out": 13, "epochs": 2.5, "batch": 3, "rate": 0.01, "seed": 9,
                },
                "target": {"name": "big"}, "draft": {"name": "small"}, "corpus": CORPUS, "resume": True, "report": "a bar",
            },
            "calibrate.family_commands.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.family_commands.progress": {"quiet": True},
        },
    ),
    "calibrate decode": (
        "hierarchical --model big --draft small --medium middle --set draft_length=3 --prompts texts --template squad --limit 4"
        f" --tokens 12 --sample --temperature 0.5 --top-k 6 --top-p 0.75 --log log.parquet --plain {REAL}",
        "calibrate.decode_command._follow",
        {
            "calibrate.loading.models": {
                "named": {"target": "big", "draft": "small", "medium": "middle"}, "device": "there", "dtype": "float64",
            },
            "calibrate.prompts.load": {"where": "texts", "template": "squad", "limit": 4},
            "calibrate.decode_command.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.decode_command._follow": {
                "run": {
                    "method": "hierarchical", "settings": {"draft_length": 3, "sampled": True}, "tokens": 12, "seed": 9,
                    "sampling": {"temperature": 0.5, "top_k": 6, "top_p": 0.75}, "plain": True, "log": True,
                },
                "asked": PROMPTS, "log": Path("log.parquet"), "quiet": True,
            },
        },
    ),
    "calibrate log": (
        "--target big --draft small --heads some.heads --prompts texts --template squad --limit 4 --prompt-tokens 2 --tokens 12"
        f" --sample --temperature 0.5 --top-k 6 --top-p 0.75 --resume -o log.json {REAL}",
        "calibrate.log.make",
        {
            "calibrate.loading.models": {"named": {"target": "big", "draft": "small"}, "device": "there", "dtype": "float64"},
            "calibrate.loading.use_heads": {"path": Path("some.heads")},
            "calibrate.prompts.load": {"where": "texts", "template": "squad", "limit": 4, "seed": 9},
            "calibrate.log_command.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.log_command.progress": {"quiet": True},
            "calibrate.log.make": {
                "out": Path("log.json"), "prompts": [[5, 6]], "tokens": 12, "seed": 9, "resume": True, "report": "a bar",
                "sampling": {"temperature": 0.5, "top_k": 6, "top_p": 0.75}, "draft": MODELS["decoder"],
            },
        },
    ),
    "calibrate quality": (
        "bild --model big --draft small --heads some.heads --set maximum_draft=5 --set fallback_threshold=0.5"
        " --sweep rollback_threshold=1,2 --prompts texts --template squad --limit 4 --prompt-tokens 2 --tokens 12 --resume"
        f" -o rows.csv {REAL}",
        "calibrate.quality.measure",
        {
            "calibrate.loading.models": {"named": {"target": "big", "draft": "small"}, "device": "there", "dtype": "float64"},
            "calibrate.loading.use_heads_of": {"where": "big", "heads": "some.heads"},
            "calibrate.prompts.load": {"where": "texts", "template": "squad", "limit": 4, "seed": 9},
            "calibrate.quality_command.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.quality_command.progress": {"quiet": True},
            "calibrate.quality.measure": {
                "out": Path("rows.csv"), "prompts": [[5, 6]], "tokens": 12, "resume": True, "report": "a bar", "method": "bild",
                "settings": [{"maximum_draft": 5, "fallback_threshold": 0.5, "rollback_threshold": each} for each in (1, 2)],
            },
        },
    ),
    "calibrate run": (
        "hierarchical --model big --draft small --medium middle --heads some.heads --set draft_length=3 --sweep reading=bonus"
        " --forced acceptance_rate=0.3,0.7 --apart processes --prompts texts --limit 4 --prompt-tokens 2 --tokens 12 --repeats 5"
        f" --mode cuda-graph --gpus cuda:1,cuda:2 --resume -o runs.json {REAL}",
        "calibrate.run_command.measured",
        {
            "calibrate.run_command.placed": {"device": "cuda:1", "threads": 3},
            "calibrate.run_command.progress": {"quiet": True},
            "calibrate.run_command.measured": {
                "written": {
                    "run": {
                        "model": "big", "draft": "small", "medium": "middle", "heads": "some.heads", "tokens": 12, "repeats": 5,
                        "prompts": 4, "file": "texts", "prompt_tokens": 2, "seed": 9, "dtype": "float64", "mode": "cuda-graph",
                    },
                    "choices": [
                        {
                            "method": "hierarchical", "settings": {"draft_length": 3, "reading": "bonus"},
                            "rates": {"acceptance_rate": each}, "apart": "processes",
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
        "calibrate.layers.time_layers",
        {
            "calibrate.layers.time_layers": {
                "model": "llama-68m", "out": Path("out"), "device": "cuda:1", "dtype": "float64", "threads": 3, "source": 99,
                "minutes": 1.5, "quick": False, "resume": True, "name": "mine", "progress": "a bar", "effort": {"target": 0.01},
                "grid": {
                    "widths": (1, 5), "contexts": (6, 7), "batches": (2,), "busy": (0, 3), "modes": ("eager", "interpreter"),
                    "rounds": 4,
                },
            },
            "calibrate.layers_command.progress": {"quiet": True},
        },
    ),
    "calibrate links": (
        "-o out --link gloo,nccl --sizes 8,16 --repeats 6 --name mine -q",
        "calibrate.links.time_links",
        {
            "calibrate.links.time_links": {
                "out": Path("out"), "links": ("gloo", "nccl"), "sizes": (8, 16), "repeats": 6, "name": "mine",
            },
            "calibrate.links_command.progress": {"quiet": True},
        },
    ),
    "calibrate bundle": (
        "data -o out", "calibrate.importers.bundle.write",
        {"calibrate.importers.bundle.write": {"data": Path("data"), "folder": Path("out")}},
    ),
}  # fmt: skip
LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    # The words that a command must have, and flags that nobody gave.
    "calibrate train": ("-o out --text notes --role draft", {"resume": False}),
    "calibrate heads": ("--model big --text notes -o heads", {"resume": False, "layers": None}),
    "calibrate align": ("--target big --draft small -o out --text notes", {"resume": False}),
    "calibrate decode": ("autoregressive --model big --prompt hello", {"run": {"plain": False, "log": False, "sampling": None}}),
    "calibrate log": ("--target big --prompts texts -o log.json", {"resume": False, "sampling": None, "draft": None}),
    "calibrate quality": ("early_exit --model big --prompts texts --set threshold=0.5 -o rows.csv", {"resume": False}),
    "calibrate run": ("autoregressive -o runs.json", {"resume": False, "gpus": []}),
    "calibrate layers": ("--model llama-68m -o out", {"resume": False, "quick": False}),
    "calibrate links": ("-o out", {"links": None}),
}


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
    ran(command, *words.split())
    for function, arguments in expected.items():
        for name, value in arguments.items():
            assert has(record.calls[function][name], value), (function, name, record.calls[function][name])


@pytest.mark.parametrize("command", LEFT_OUT)
def test_flags_that_nobody_gave_are_off(command: str, record: Record) -> None:
    words, expected = LEFT_OUT[command]
    work = CASES[command][1]
    record.replace(work)
    ran(command, *words.split())
    for name, value in expected.items():
        assert has(record.calls[work][name], value), (name, record.calls[work][name])
    for function in record.calls:
        if function.endswith(".progress"):
            assert record.calls[function]["quiet"] is False
        if function.endswith(".placed"):
            assert record.calls[function] == {"device": None, "threads": None}


def test_options_of_a_run_reach_it(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    record.replace("sim.cli._progress", lambda quiet: no_bar())
    record.replace("sim.sweep.run")
    ran("sim run", *"s.toml -o out -j 3 --resume --yes -q --view formula,events --replications 5 --seed 7".split(),
        *"--set a=1 --set b=2 --sweep c=1,2".split())  # fmt: skip
    given = {"out": Path("out"), "jobs": 3, "resume": True, "yes": True, "progress": "a bar"}
    overrides = {"set": ["a=1", "b=2"], "sweep": ["c=1,2"], "views": ["formula", "events"], "replications": 5, "seed": 7}
    assert record.calls["sim.sweep.run"] == {"source": "s.toml", **given, "overrides": overrides}
    assert record.calls["sim.cli._progress"] == {"quiet": True}
    ran("sim run")
    given = dict.fromkeys(("out", "jobs"), None) | {"resume": False, "yes": False, "progress": "a bar", "source": None}
    overrides = {"set": [], "sweep": [], "views": None, "replications": None, "seed": None}
    assert record.calls["sim.sweep.run"] == {**given, "overrides": overrides}
    assert record.calls["sim.cli._progress"] == {"quiet": False}


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
    import calibrate.command
    import sim.cli

    if terminal:
        monkeypatch.setattr("sys.stderr", Terminal())
    bars: list[Callable[[bool], Any]] = [sim.cli._progress, lambda quiet: calibrate.command.progress(quiet, "points")]
    for bar in bars:
        with bar(True) as shown:
            assert shown is None
        with bar(False) as shown:
            assert (shown is not None) == terminal
