"""`calibrate decode`, `run` and `ranks` with draft trees: outputs, logs, tables, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.family.draft_head_training import EAGLE, MEDUSA
from calibrate.loading import load_models
from model.logs import measured_runs, rank_log
from tests.calibrate import test_draft_heads_decoded
from tests.calibrate.test_draft_heads_decoded import COUNT
from tests.calibrate.test_real_decoding import numbers
from tests.support import family, real_models
from tests.support.commands import call

pytestmark = pytest.mark.usefixtures("one_thread")
tiny = test_draft_heads_decoded.tiny
DRAFTS = {"model": "draft", "heads": f"{EAGLE}.safetensors", "parallel": f"{MEDUSA}.safetensors"}
SHAPE = {"shape": "listed", "parents": "[-1,-1,0,0,1]"}


def asked(folder: Path, drafter: str, *more: str, draft: str = "", **settings: Any) -> list[str]:
    chosen = {"drafter": drafter} | (settings or SHAPE)
    models = ["--model", str(folder / "target"), "--draft", str(folder / (draft or DRAFTS[drafter]))]
    sets = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    return ["tree", *models, *sets, "--device", "cpu", "--threads", "1", *more]


@pytest.mark.parametrize("drafter", DRAFTS)
def test_decode_verifies_trees(drafter: str, tiny: Path, tmp_path: Path) -> None:
    words = ["--prompt", "hello", "--tokens", "20", "--dtype", "float64", "--plain", "--json"]
    words += ["--log", str(tmp_path / "own.parquet")]
    said = json.loads(call("decode", *asked(tiny, drafter, *words)).stdout)
    assert said["exact"]
    (text,) = said["sequences"]
    full = load_models.model(str(tiny / "target"), dtype="float64").decoder.full
    assert text["written"] == real_models.reference_tokens(full, numbers("hello"), 20)
    assert text["plain"]["first_differences"] == [None]
    assert text["passes"]["target"] == 1 + len(text["commits"])
    assert {each["drafted"] for each in text["commits"]} >= {5}
    shown = call("rates", str(tmp_path / "own.json")).stdout
    assert "Acceptance by draft position (measured; tree" in shown
    assert "a position is accepted if any of its candidates is; a scenario takes rates by rank: see calibrate ranks" in shown
    assert "as [outcomes]" not in shown


def test_sampled_trees_repeat_with_the_seed(tiny: Path) -> None:
    words = ["--prompt", "hello", "--tokens", "12", "--sample", "--seed", "3", "--json"]
    given = asked(tiny, "heads", *words, shape="full", draft_depth=2, width=2, candidates="distinct")
    first, again = (json.loads(call("decode", *given).stdout) for _ in range(2))
    assert first["sequences"][0]["written"] == again["sequences"][0]["written"]
    assert first["settings"]["sampled"]


def test_runs_of_trees_are_timed_and_rated_by_position(tiny: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    (tmp_path / "prompts.txt").write_text("hello\nworld\n")
    plan.write_text(
        f'[run]\nmodel = "{tiny / "target"}"\ndraft = "{tiny / "eagle.safetensors"}"\ntokens = 12\nrepeats = 2\nprompts = 2\n'
        f'file = "{tmp_path / "prompts.txt"}"\n\n[[method]]\nname = "tree"\ndrafter = "heads"\nshape = "eagle-2"\nnodes = 4\n'
        "draft_depth = 2\nwidth = 2\n\n[[method]]\nname = 'tree'\ndrafter = 'heads'\nshape = 'listed'\nparents = [-1, -1, 0]\n"
    )
    call("run", "--plan", str(plan), "-o", str(tmp_path / "runs.json"), "-q", "--device", "cpu", "--threads", "1")
    runs = measured_runs.load(tmp_path / "runs.json")
    assert [len(each.tokens) for each in runs.log.decodings] == [12] * 4
    assert {each.decoding.settings["shape"] for each in runs.timed.values()} == {"eagle-2", "listed"}
    tables = json.loads(call("rates", str(tmp_path / "runs.json"), "--json").stdout)
    assert [len(table["rows"]) for table in tables[::2]] == [2, 2]  # two positions each, of four and three nodes
    for table in tables[1::2]:
        assert table["rows"][0]["predicted"] == pytest.approx(table["rows"][0]["tokens_per_round"], rel=0.5)


def test_ranks_are_recorded_by_the_command(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hello\nworld\nabout\nthese\n")
    for drafter, draft in DRAFTS.items():
        out = tmp_path / f"{drafter}.json"
        given = ["--target", str(tiny / "target"), "--draft", str(tiny / draft), "--prompts", str(tmp_path / "prompts.txt")]
        call("ranks", *given, "--tokens", "20", "--depth", "2", "--top", "5", "-o", str(out), "-q", "--device", "cpu")
        log = rank_log.load(out)
        assert (log.sequences, log.depth, log.top) == (4, 2, 5)
        assert log.header["prompts"]
        shown = call("rates", str(out), "--nodes", "3").stdout
        assert "Rank rates by depth (measured; " in shown
        assert "Tokens per round of draft trees (measured; " in shown


def test_wrong_trees_are_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        return family.error_of("decode", *words, "--prompt", "a")

    listed = {"shape": "listed"}
    assert "parents[1] must be between -1 (the root) and 0, got 1: that is a cycle" in refused(
        *asked(tiny, "heads", **listed, parents="[-1,1]")
    )
    assert "parents[1] must be between -1 (the root) and 0, got -2: that is no node" in refused(
        *asked(tiny, "heads", **listed, parents="[-1,-2]")
    )
    assert "nodes are in breadth-first order" in refused(*asked(tiny, "heads", **listed, parents="[-1,0,-1]"))
    assert "parents must be a list" in refused(*asked(tiny, "heads", **listed, parents="3"))
    assert "parents[0] must be a whole number" in refused(*asked(tiny, "heads", **listed, parents="[0.5]"))
    assert "unknown shape" in refused(*asked(tiny, "heads", shape="star"))
    assert "draft_depth is required with shape='full'" in refused(*asked(tiny, "heads", shape="full", width=2))
    assert "rank_rates is required with shape='sequoia'" in refused(*asked(tiny, "model", shape="sequoia", nodes=4, draft_depth=2))
    assert "rank_rates[0] must sum to at most 1" in refused(
        *asked(tiny, "model", shape="sequoia", nodes=4, draft_depth=2, rank_rates="[0.9,0.9]")
    )
    assert "candidates must be 'likeliest' in greedy decoding" in refused(
        *asked(tiny, "heads", shape="full", draft_depth=2, width=2, candidates="distinct")
    )
    deep = f"the depth of the tree must be at most {COUNT}, the heads of medusa.safetensors of target, got {COUNT + 1}"
    assert deep in refused(*asked(tiny, "parallel", shape="full", draft_depth=COUNT + 1, width=2))
    assert "draft must be a file of draft heads" in refused(*asked(tiny, "heads", draft="draft"))
    assert "--processes is not for draft heads" in refused(*asked(tiny, "heads", "--processes"))
    ranks = ["ranks", "--target", str(tiny / "target"), "-o", str(tmp_path / "ranks.json")]
    heads = ["--draft", str(tiny / "medusa.safetensors")]
    assert f"depth must be at most {COUNT}, the heads of medusa.safetensors" in family.error_of(*ranks, *heads, "--depth", "9")
    assert "method ranks needs a draft model and has none" in family.error_of(*ranks)
    assert "out must end in .json" in family.error_of(*ranks[:-1], "ranks.txt", *heads)
