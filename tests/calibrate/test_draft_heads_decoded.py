"""`calibrate decode` and `calibrate run` with files of draft heads: outputs, logs, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decode import real_decoding
from calibrate.decoders.transformers_adapter import decoder_of
from calibrate.family import draft_head_training, head_files, model_directory
from calibrate.family.draft_head_training import EAGLE, KINDS, MEDUSA, DraftHeadSettings
from calibrate.loading import load_models
from calibrate.loading.architectures import architecture
from calibrate.timing import read_times
from calibrate.timing.interpreter_pass import InterpretedPass
from calibrate.timing.library_pass import LibraryModel
from calibrate.untested_on_gpu import cuda_graphs
from model.architectures import draft_heads
from model.base import strict_json
from model.base.checks import ParameterError
from model.logs import measured_runs, read_log
from tests.calibrate.test_eagle_and_medusa import DRAFTERS
from tests.calibrate.test_real_decoding import numbers, put
from tests.support import family, real_models

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft model, and a file of each kind of draft heads, with random weights."""
    folder = tmp_path_factory.mktemp("models")
    for role, seed in (("target", 4), ("draft", 1)):
        put(folder, role, seed=seed)
    loaded = model_directory.load(folder / "target")
    target = decoder_of(loaded.model, loaded.name)
    for kind in KINDS:
        settings = DraftHeadSettings(draft_length=COUNT)
        tensors = draft_head_training.new_modules(target, kind, settings).state_dict()
        about = {"schema": draft_head_training.SCHEMA, "kind": kind, "model": loaded.checksum, "name": "target"}
        head_files.write(folder / f"{kind}.safetensors", tensors, about | {"settings": asdict(settings)})
    return folder


def asked(folder: Path, kind: str, *more: str, length: int = COUNT, draft: str = "", drafter: str = "") -> list[str]:
    named = ["--model", str(folder / "target"), "--draft", draft or str(folder / f"{kind}.safetensors")]
    sets = ["--set", f"drafter={drafter or DRAFTERS[kind]}", "--set", f"draft_length={length}"]
    return ["speculative", *named, *sets, "--device", "cpu", "--threads", "1", *more]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_runs_a_file_of_heads(kind: str, tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "own.parquet"
    words = ["--prompt", "hello", "--tokens", "20", "--dtype", "float64", "--plain", "--json", "--log", str(log)]
    done = CliRunner().invoke(app, ["decode", *asked(tiny, kind, *words)])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["exact"]
    (text,) = said["sequences"]
    full = load_models.model(str(tiny / "target"), dtype="float64").decoder.full
    assert text["written"] == real_models.reference_tokens(full, numbers("hello"), 20)
    assert text["plain"]["first_differences"] == [None]
    drafted = sum(each["drafted"] > 0 for each in text["commits"])
    # One pass over the prompt, then for each round that drafts as many passes as tokens, or one.
    passes = drafted if kind == MEDUSA else sum(each["drafted"] for each in text["commits"])
    assert text["passes"]["draft"] == passes + 1
    assert said["models"]["draft"]["name"] == f"{kind}.safetensors of target"
    assert said["models"]["draft"]["layers"] == 1
    assert said["models"]["draft"]["checksum"] != said["models"]["target"]["checksum"]
    kept = read_log.load(tmp_path / "own.json")
    assert [*kept.decodings[0].tokens] == text["written"]
    rates = CliRunner().invoke(app, ["rates", str(tmp_path / "own.json")])
    assert rates.exit_code == 0, rates.stderr
    assert "Acceptance by draft position (measured; speculative" in rates.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_sampled_with_the_seed(kind: str, tiny: Path) -> None:
    words = ["--prompt", "hello", "--tokens", "12", "--sample", "--seed", "3", "--json"]
    first, again = (json.loads(CliRunner().invoke(app, ["decode", *asked(tiny, kind, *words)]).stdout) for _ in range(2))
    assert first["sequences"][0]["written"] == again["sequences"][0]["written"]
    assert first["settings"]["sampled"]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_heads_are_timed(kind: str, tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nworld\n")
    words = ["--prompts", str(prompts), "--tokens", "12", "--repeats", "2", "-o", str(tmp_path / "runs.json"), "-q"]
    done = CliRunner().invoke(app, ["run", *asked(tiny, kind, *words)])
    assert done.exit_code == 0, done.stderr
    runs = measured_runs.load(tmp_path / "runs.json")
    assert [len(each.tokens) for each in runs.log.decodings] == [12, 12]
    assert {each.decoding.settings["drafter"] for each in runs.timed.values()} == {DRAFTERS[kind]}
    rates = CliRunner().invoke(app, ["rates", str(tmp_path / "runs.json"), "--json"])
    assert len(json.loads(rates.stdout)[0]["rows"]) == COUNT


def test_forced_outcomes_decode_with_heads_too(tiny: Path, tmp_path: Path) -> None:
    """Accepted lengths are drawn at a rate, while the heads make their passes; masks remain masks."""
    words = ["--forced", "acceptance_rate=0.9", "--tokens", "30", "--repeats", "1", "-o", str(tmp_path / "runs.json"), "-q"]
    done = CliRunner().invoke(app, ["run", *asked(tiny, MEDUSA, *words)])
    assert done.exit_code == 0, done.stderr
    (made,) = measured_runs.load(tmp_path / "runs.json").log.decodings
    assert sum(len(each.tokens) for each in made.commits) == 30
    assert max(len(each.tokens) for each in made.commits) == COUNT + 1


def test_wrong_drafts_are_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        return family.error_of("decode", *words, "--prompt", "a")

    model = str(tiny / "draft")
    assert "draft must be a file of draft heads for method speculative" in refused(*asked(tiny, EAGLE, draft=model))
    assert "draft must be a model for method speculative with these" in refused(*asked(tiny, EAGLE, drafter="model"))
    one = "drafter must be 'heads' with eagle.safetensors of target, which drafts one token per pass"
    assert one in refused(*asked(tiny, EAGLE, drafter="parallel"))
    every = "drafter must be 'parallel' with medusa.safetensors of target, which drafts all tokens in one pass"
    assert every in refused(*asked(tiny, MEDUSA, drafter="heads"))
    assert "draft_length must be at most 3, the heads of medusa.safetensors of target, got 4" in refused(
        *asked(tiny, MEDUSA, length=4)
    )
    assert "there are no heads at nothing.safetensors" in refused(*asked(tiny, EAGLE, draft="nothing.safetensors"))
    assert "--processes is not for draft heads" in refused(*asked(tiny, EAGLE, "--processes"))
    put(tmp_path, "target", seed=5)
    others = ["--model", str(tmp_path / "target"), *asked(tiny, EAGLE)[3:]]
    assert "eagle.safetensors belongs to the model with checksum" in refused("speculative", *others)
    pearl = ["pearl", "--model", str(tiny / "target"), "--draft", str(tiny / "eagle.safetensors"), "--set", "draft_length=2"]
    assert "draft must be a model for method pearl with these parameters, got eagle.safetensors of target" in refused(*pearl)
    chain = ["hierarchical", *pearl[1:3], "--draft", str(tiny / "draft"), "--medium", str(tiny / "eagle.safetensors")]
    chain += ["--set", "draft_length=2", "--set", "reading=bonus"]
    assert "medium must be a model for method hierarchical with these" in refused(*chain)
    log = ["log", *["--target", str(tiny / "target"), "--draft", str(tiny / "eagle.safetensors")], "-o", str(tmp_path / "log.json")]
    assert "draft must be a model, got eagle.safetensors of target, which reads" in family.error_of(*log)


def test_heads_of_the_family_have_names() -> None:
    path = load_models.draft_heads_path("family:eagle")
    assert path is not None
    assert path.is_file()
    assert path.stat().st_size < 1e6
    assert load_models.draft_heads_path("family:target") is None


def test_python_interface_checks_drafts(tiny: Path) -> None:
    models = {"target": str(tiny / "target"), "draft": str(tiny / "eagle.safetensors")}
    decoders = {role: each.decoder for role, each in load_models.models(models).items()}
    found = real_decoding.decode("speculative", decoders, numbers("hello"), 8, {"draft_length": 2, "drafter": "heads"})
    assert len(found.tokens) == 8
    assert found.settings["draft_layers"] == 1


# --- Times of passes ---


def test_passes_of_an_eagle_head_are_timed_part_by_part(tiny: Path) -> None:
    """Embedding with the product that joins the states, one layer, and the target's output matrix."""
    where = {"target": str(tiny / "target"), "draft": str(tiny / "eagle.safetensors")}
    head = load_models.models(where)["draft"].decoder
    known = architecture(f"eagle:{tiny / 'target'}")
    assert known.name == "eagle-target"
    assert known.shape == draft_heads.head_of("eagle", architecture(str(tiny / "target")).shape)
    assert (head.shape("float32").layers, head.shape("float32").draft) == (1, known.shape.draft)
    seen = Counter[str]()
    timed = InterpretedPass(LibraryModel(known, "cpu", "float32", decoder=head), 3, 5, 1)
    timed.run_marked(lambda name, _, edge: seen.update([f"{name} {edge}"]))
    assert seen == {f"{name} {edge}": 1 for name in ("embedding", "layer", "head", "call") for edge in (0, 1)}
    reads = read_times.time_reads(head, 12, 2)
    assert json.loads(strict_json.dumps(reads["resumed_step_us"])) == [0.0, 0.0, 0.0]


def test_medusa_counts_its_own_heads(tiny: Path) -> None:
    where = {"target": str(tiny / "target"), "draft": str(tiny / "medusa.safetensors")}
    shape = load_models.models(where)["draft"].decoder.shape("float32")
    assert shape.copies == COUNT
    assert shape.parameters == COUNT * (16 * 16 + 16 + 16 * real_models.VOCABULARY)


def test_what_cannot_be_timed_is_refused(tiny: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    method = f'name = "speculative"\ndrafter = "parallel"\ndraft_length = {COUNT}\n'
    models = f'model = "{tiny / "target"}"\ndraft = "{tiny / "medusa.safetensors"}"\ntokens = 4\nfile = "{tmp_path / "p.txt"}"\n'
    plan.write_text(f"[run]\n{models}[profile]\nwidths = [1]\ncontexts = [0]\n[[method]]\n{method}")
    (tmp_path / "p.txt").write_text("hello\n")
    said = family.error_of("run", "--plan", str(plan), "-o", str(tmp_path / "runs.json"), "--device", "cpu")
    assert "[profile] must be left out with medusa.safetensors of target" in said
    decoders = load_models.models({"target": str(tiny / "target"), "draft": str(tiny / "eagle.safetensors")})
    with pytest.raises(ParameterError, match=r"mode must be eager with draft heads such as eagle\.safetensors of target"):
        cuda_graphs.check(decoders["draft"].decoder)
