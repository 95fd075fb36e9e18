"""Tree drafts under load by `sim serve`: chains, expected tokens, what a larger tree costs in a batch, and refusals in one line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from model.base.checks import ParameterError
from model.serving.loads import TracedLoad, TracedRequests
from model.serving.step_prices import RaggedPass
from sim.commands.sim_app import app
from sim.serving import load_scenario, policies, study, study_results
from sim.serving.served_methods import DraftTrees

LAW = "sglang-qwen3-235b-a22b"
ROW = [0.6, 0.2, 0.1]


def policy(shape: str = "full", rates: Any = ROW, **more: Any) -> str:
    return "tree:" + json.dumps({"shape": shape, "rank_rates": rates, **more})


def served(*names: str, load: dict[str, Any] | None = None, acceptance: Any = None, **server: Any) -> study_results.Study:
    of = {"engine_law": LAW} if acceptance is None else {"engine_law": LAW, "acceptance_by_position": acceptance}
    return study.serve(load_scenario.inputs_of({
        "scenario": {"name": "trees", "replications": 2}, "system": of,
        "load": load or {"concurrency": [1, 6], "requests": 40, "prompt": 64.0, "output": 48.0},
        "server": {"policies": [*names], **server},
    }))  # fmt: skip


@pytest.mark.parametrize("load", [None, {"rate": [20.0], "requests": 60, "prompt": 32.0, "output": 24.0}])
def test_chains_are_static_drafts_of_the_same_random_numbers(load: Any) -> None:
    """With the same rates and the same drafter, all figures of all runs are equal."""
    found = served("static:3", policy("chain", [[0.7], [0.6], [0.5]], draft_depth=3), load=load, acceptance=[0.7, 0.6, 0.5])
    for each in found.loads:
        chain, tree = found.at(each)
        assert tree.figures == chain.figures
        assert tree.speeds[0] == chain.speeds[0]


def test_tokens_per_step_are_expected_tokens() -> None:
    """One client, long outputs: the mean of about 2000 rounds is within 5 standard errors (a round has at most 3 tokens)."""
    name = policy(draft_depth=2, width=2)
    found = served(name, load={"concurrency": [1], "requests": 20, "prompt": 16.0, "output": 257.0})
    expected = DraftTrees(tuple(ROW), "full", 2, 2).expected_tokens
    assert expected == pytest.approx(1 + 0.8 + 0.8**2)
    (point,) = found.points
    assert point.figures["tokens_per_step"] == pytest.approx(expected, abs=5 * 1 / 2000**0.5)
    assert point.figures["mean_draft_length"] == pytest.approx(6)


def test_passes_hold_whole_levels_within_their_budget() -> None:
    """Six sequences and 24 tokens of a pass: the tree of six nodes is cut to its first level of two."""
    found = served(policy(draft_depth=2, width=2), load={"concurrency": [6], "requests": 40, "prompt": 1.0, "output": 24.0},
                   max_num_batched_tokens=24)  # fmt: skip
    assert 2 <= found.points[0].figures["mean_draft_length"] < 4


def test_larger_trees_win_alone_and_lose_in_a_batch() -> None:
    """More nodes accept more tokens, and take more arithmetic."""
    small, large = policy("sequoia", draft_depth=3, nodes=4), policy("sequoia", draft_depth=6, nodes=60)
    found = served(small, large, load={"concurrency": [1, 128], "requests": 256, "prompt": 16.0, "output": 32.0})
    (few, more), (few_in_batch, more_in_batch) = (found.at(each) for each in found.loads)
    assert more.figures["tokens_per_step"] > few.figures["tokens_per_step"]
    assert more_in_batch.figures["output_tokens_per_s"] < few_in_batch.figures["output_tokens_per_s"]


def test_acceptance_of_chains_is_not_needed_and_rank_rates_are_assumed() -> None:
    found = served("off", policy(draft_depth=2, width=2))
    (about,) = [each for each in found.rests_on if each.input == "rank rates"]
    assert (about.kind, about.value) == ("assumed", "2.44 tokens per draft of 6 nodes")
    assert "bound of policies" not in str(found)
    assert policies.uses_draft(found.points[1].policy)


def test_draft_passes_over_nodes_are_priced_by_their_tokens() -> None:
    """With a draft model that reads w nodes at a depth, its pass is over w tokens of each sequence."""
    seen: list[int] = []

    class Prices:
        link = 0.0

        def target(self, over: RaggedPass) -> float:
            return 1.0

        def draft(self, sequences: int, positions: int, read: int | None = None) -> float:
            seen.append(sequences)
            return 0.1

    named = policies.named(policy("listed", [[0.6, 0.2]] * 3, parents=[-1, -1, 0, 1, 2]))
    load = TracedLoad(TracedRequests(np.zeros(1), np.full(1, 8), np.full(1, 8)), concurrency=1)
    (server,) = study.servers_of(
        study.ServerSettings(), named, Prices(), load, None, study.decodings.HEADS, 1, 0, 0  # type: ignore[arg-type]
    )
    server.submit(0)
    while server.begin() is not None:
        server.end()
    assert seen[:3] == [1, 2, 1]  # the root, both nodes of the first level, and one of the second


@pytest.mark.parametrize(("name", "error"), [
    ("tree", "policy tree must have its settings as JSON"),
    ("tree:{}", r"tree\.rank_rates is required and has no default"),
    (policy(), "draft_depth is required with shape='full'"),
    (policy(draft_depth=2, width=4), "rank_rates\\[0\\] must have a rate for each of 4 ranks, got 3"),
    (policy(rates=[0.9, 0.2], draft_depth=2, width=2), "must sum to at most 1, got 1.1"),
    (policy("listed", parents=[0]), r"parents\[0\] must be between -1 \(the root\) and -1, got 0: that is a cycle"),
    (policy("listed", parents=[-1, -1, 1, 0]), "parents"),
    (policy("eagle-2", draft_depth=2, width=2, nodes=4), "shape must be chain, full, listed or sequoia under load, got 'eagle-2'"),
    (policy(draft_depth=5, width=3), r"tree\.nodes must be between 1 and 250, got 363"),
    (policy("bush"), "unknown shape 'bush'"), (policy(sampled=True, draft_depth=2, width=2), r"unknown key tree\.sampled"),
    (policy(rates=[[0.6, 0.2]], draft_depth=2, width=2), "rank_rates must have the rates of all ranks for each of 2 depths, got 1"),
])  # fmt: skip
def test_impossible_trees_are_refused(name: str, error: str) -> None:
    with pytest.raises(ParameterError, match=error):
        served(name)


def test_the_command_refuses_in_one_line() -> None:
    found = CliRunner().invoke(app, ["serve", "--law", LAW, "--policy", "tree:{}", "--concurrency", "1"])
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1)
