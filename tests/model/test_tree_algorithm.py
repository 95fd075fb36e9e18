"""Tree drafts: the passes of a round, the output in simulations, and its exact distribution on small models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.interpret.interpreter import count
from model.interpret.simulated_answers import Ranked
from model.methods.tree import algorithm
from model.methods.tree.algorithm import Parameters
from model.steps import Commit, Features, Forward, Read, Step, declining
from sim.theorems.drafting_examples import model
from sim.theorems.output_law import distance, greedy_text, law_of_model, law_of_text

SHAPES: tuple[dict[str, Any], ...] = (
    {"shape": "chain", "draft_depth": 3},
    {"shape": "full", "draft_depth": 2, "width": 2},
    {"shape": "listed", "parents": (-1, -1, 0, 0, 1, 2)},
    {"shape": "sequoia", "nodes": 5, "draft_depth": 3, "rank_rates": ((0.6, 0.3),) * 3},
    {"shape": "eagle-2", "nodes": 4, "draft_depth": 3, "width": 2, "rank_rates": (((0.6, 0.3),) * 3, ((0.8, 0.1),) * 3)},
)
MODELS = {"target": model([[1, 2, 3], [2, 1, 0], [1, 1, 4]]), "draft": model([[3, 2, 1], [1, 1, 1], [1, 0, 2]])}


def choices(**more: Any) -> Iterator[Parameters]:
    """Parameters of all shapes, drafters and rules that go together."""
    for shape in SHAPES:
        for drafter in ("model", "heads", "parallel"):
            for rule in ({}, {"sampled": True}, {"sampled": True, "candidates": "distinct"}):
                if shape["shape"] != "eagle-2" or (drafter != "parallel" and "candidates" not in rule):
                    yield Parameters(layers=4, drafter=drafter, **shape, **rule, **more)


CHOICES = [*choices()]


@given(st.data(), st.sampled_from([*CHOICES, *choices(sequences=2)]), st.integers(1, 3), st.integers(1, 9))
def test_output_is_the_targets_own(data: st.DataObject, parameters: Parameters, prompt: int, tokens: int) -> None:
    classes = data.draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
    ranks = [data.draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens)) for _ in range(3)]
    work = count(
        algorithm.decode(parameters, range(prompt), tokens), Ranked(prompt, 4, [classes, *ranks], parameters.classes), tokens
    )
    assert work.tokens[:tokens] == [*range(prompt, prompt + tokens)]


@pytest.mark.parametrize("parameters", CHOICES, ids=lambda each: f"{each.shape}-{each.drafter}-{each.sampled}-{each.candidates}")
def test_distribution_of_the_output(parameters: Parameters) -> None:
    tokens = 3

    def steps() -> Any:
        return algorithm.decode(parameters, [0], tokens)

    law = law_of_text(steps, MODELS, [0], tokens)
    if parameters.sampled:
        assert distance(law, law_of_model(MODELS["target"], [0], tokens)) == 0
    else:
        assert law == {greedy_text(MODELS["target"], [0], tokens): 1}


NARROW = model([[3, 2, 1], [0, 1, 1], [0, 0, 1]])
"""A draft that gives one, two or three tokens a positive probability."""


@pytest.mark.parametrize("drafter", ["model", "heads", "parallel"])
@pytest.mark.parametrize("rule", [{}, {"sampled": True}, {"sampled": True, "candidates": "distinct"}], ids=str)
@pytest.mark.parametrize("shape", [
    {"shape": "full", "draft_depth": 2, "width": 4}, {"shape": "listed", "parents": (-1, -1, -1, 0, 0, 1, 2, 2, 3, 5, 7)},
], ids=lambda shape: shape["shape"])  # fmt: skip
def test_drafts_of_fewer_candidates_than_the_shape(drafter: str, rule: dict[str, Any], shape: dict[str, Any]) -> None:
    """Nodes without a token, and all nodes after them, are left out."""
    tokens, models = 3, {**MODELS, "draft": NARROW}
    parameters = Parameters(layers=4, drafter=drafter, **shape, **rule)
    law = law_of_text(lambda: algorithm.decode(parameters, [0], tokens), models, [0], tokens)
    if parameters.sampled:
        assert distance(law, law_of_model(MODELS["target"], [0], tokens)) == 0
    else:
        assert law == {greedy_text(MODELS["target"], [0], tokens): 1}


def steps_of(parameters: Parameters, ranks: list[list[int]], tokens: int, prompt: int = 2) -> list[Step]:
    """Steps of one decoding."""
    world = Ranked(prompt, parameters.layers, ranks)
    written: list[int] = []
    world.written = written
    found: list[Step] = []
    steps, answer = declining(algorithm.decode(parameters, range(prompt), tokens)), None
    while len(written) < tokens:
        try:
            step = steps.send(answer)
        except StopIteration:
            break
        found.append(step)
        answer = step if isinstance(step, Forward) else world.read(step) if isinstance(step, Read) else None
        if isinstance(step, Commit):
            written += step.tokens
        elif answer is None:
            answer = step.longest  # type: ignore[union-attr]
    return found


def test_passes_of_a_round() -> None:
    """The draft reads the nodes with children, by depth; the target reads all nodes, each after its parent."""
    parameters = Parameters(4, "listed", parents=(-1, -1, 0, 0, 1))
    steps = steps_of(parameters, [[0] * 8, [2] * 8, [1] * 8], 6)
    passes = [step for step in steps if isinstance(step, Forward)][2:]  # after the prompt
    first, nodes, verification, again = passes[:4]
    assert (first.role, first.at, len(first.tokens), first.tree) == ("draft", 1, 1, (-1,))
    assert (nodes.role, nodes.at, len(nodes.tokens), nodes.tree) == ("draft", 2, 2, (-1, -1))
    assert (verification.role, verification.at, verification.tree) == ("target", 1, (-1, 0, 0, 1, 1, 2))
    # The accepted path is the second node and its only child, which the draft has not read: it reads it and the target's own.
    assert (again.at, again.tokens, again.tree) == (3, (3, 4), (-2, 0))
    # In the target's cache the last accepted node is the third of its depth.
    assert [step for step in passes if step.role == "target"][1].tree[0] == -3


def test_states_of_draft_heads() -> None:
    """The first pass of a round reads the states of the accepted nodes in the verification; others the head's own."""
    parameters = Parameters(4, "listed", parents=(-1, -1, 0, 0, 1), drafter="heads")
    steps = steps_of(parameters, [[0] * 8, [2] * 8, [1] * 8], 6)
    states = [step.state for step in steps if isinstance(step, Forward) and step.role == "draft"]
    assert all(isinstance(each, Features) for each in states)
    assert [each.indices for each in states][1:] == [(0,), (0, 0), (0, 2, 5), (2, 2)]


def test_a_chain_makes_no_passes_of_trees() -> None:
    for drafter in ("model", "heads", "parallel"):
        steps = steps_of(Parameters(4, "full", draft_depth=3, width=1, drafter=drafter), [[0] * 9, [1] * 9, [1] * 9, [0] * 9], 9)
        assert not any(step.tree for step in steps if isinstance(step, Forward))


@pytest.mark.parametrize(("wrong", "message"), [
    ({"shape": "listed", "parents": (-1, 2, 0)}, r"parents\[1\] must be between -1 .the root. and 0, got 2: that is a cycle"),
    ({"shape": "listed", "parents": (-1, 0, 5)}, r"parents\[2\] must be between -1 .the root. and 1, got 5: that is no node"),
    ({"shape": "listed", "parents": (0,)}, r"parents\[0\] must be between -1 .* got 0: that is a cycle"),
    ({"shape": "listed", "parents": (-1, -2)}, r"parents\[1\] .* got -2: that is no node"),
    ({"shape": "listed", "parents": (-1, 0, -1)}, r"parents\[2\] must be at least parents\[1\]=0, got -1: nodes are in breadth"),
    ({"shape": "listed", "parents": (-1, 0.5)}, r"parents\[1\] must be a whole number"),
    ({"shape": "listed", "parents": ()}, "parents must be a list of the parents of 1 to"),
    ({"shape": "listed", "parents": 3}, "parents must be a list"),
    ({"shape": "listed"}, "parents is required with shape='listed'"),
    ({"shape": "listed", "parents": (-1,), "draft_depth": 2}, "draft_depth must be left out with shape='listed'"),
    ({"shape": "full", "draft_depth": 30, "width": 8}, "a full tree must have at most 4096 nodes"),
    ({"shape": "bush"}, "unknown shape 'bush'"),
    ({"shape": "sequoia", "nodes": 4, "draft_depth": 1, "rank_rates": ((0.7, 0.4),)}, r"rank_rates\[0\] must sum to at most 1"),
    ({"shape": "sequoia", "nodes": 4, "draft_depth": 3, "rank_rates": ((0.7,), (0.5,))}, "for each of 3 depths, got 2"),
    ({"shape": "sequoia", "nodes": 4, "draft_depth": 1, "rank_rates": (0.7, (0.2,))}, r"rank_rates\[0\] must be a list"),
    ({"shape": "chain", "draft_depth": 2, "candidates": "distinct"}, "candidates must be 'likeliest' in greedy decoding"),
    ({"shape": "chain", "draft_depth": 2, "drafter": "heads", "placement": "separate"}, "placement must be 'colocated'"),
    ({"shape": "eagle-2", "draft_depth": 2, "width": 2, "nodes": 3, "drafter": "parallel"}, "drafter must be model or heads"),
    ({"shape": "chain", "draft_depth": 2, "sequences": 2, "batching": "static"}, "batching must be 'continuous' or 'lockstep'"),
])  # fmt: skip
def test_impossible_parameters(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Parameters(layers=4, **wrong)
