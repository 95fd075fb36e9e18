"""Work of decodings: counted by the interpreters, predicted by closed forms, and converted to operations and bytes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Account, FlopsAndBytes, Kind, Totals, Work, context_of, flops_and_bytes, kind_of
from model.interpret.interpreter import count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.adaptive import algorithm as policies
from model.methods.adaptive import theory as adaptive
from model.methods.autoregressive import algorithm as plain
from model.methods.autoregressive import theory as autoregressive
from model.methods.beam import algorithm as search
from model.methods.beam import theory as beam
from model.methods.hierarchical import algorithm as nested
from model.methods.hierarchical import theory as hierarchical
from model.methods.ppd import algorithm as pipelined
from model.methods.ppd import theory as ppd
from model.methods.rounds.round_laws import Rounds
from model.methods.rounds.round_starts import starts
from model.methods.speculative import algorithm as drafting
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import ByPosition, Iid, Replay
from model.steps import Batch, Forward, LayerSpan
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.exact import near

BITS = st.lists(st.booleans(), min_size=1, max_size=20)


# --- Passes ---


def test_positions_attended_to_and_read_by_a_pass() -> None:
    """A token attends to itself and all before it; a pass reads a row once, but separately for each sequence of a batch."""
    assert context_of(Forward("target", (7,), 0, LayerSpan(0, 4))) == (1, 1)
    assert context_of(Forward("target", (7, 8, 9), 5, LayerSpan(0, 4))) == (6 + 7 + 8, 8)
    tree = Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), tree=(-1, -1, 0))
    assert context_of(tree) == (6 + 6 + 7, 8)
    assert context_of(Forward("target", (7, 8), 5, LayerSpan(0, 4), batch=Batch.uniform((0, 3), 5))) == (6 + 6, 6 + 6)
    assert context_of(Forward("target", (7, 8), 5, LayerSpan(0, 4), batch=Batch.uniform((3,), 5, 2))) == (6 + 7, 7)


def test_sequences_of_a_uniform_batch_share_their_positions() -> None:
    step = Forward("target", (7, 8), 5, LayerSpan(0, 4), batch=Batch.uniform((0, 3), 5))
    assert ([*step.positions], step.end) == ([5, 5], 6)
    alone = Forward("target", (7, 8), 5, LayerSpan(0, 4), batch=Batch.uniform((3,), 5, 2))
    assert ([*alone.positions], alone.end) == ([5, 6], 7)


def test_totals_of_an_account() -> None:
    account = Account()
    account.add(Forward("target", (7, 8), 5, LayerSpan(0, 24, gaps=((1, 17),)), heads=1))
    account.add(Forward("target", (9,), 7, LayerSpan(0, 24), heads=1))
    account.add(Forward("target", (9, 9, 9), 5, LayerSpan(20, 24, kv_only=True)))
    account.add(Forward("draft", (9,), 7, LayerSpan(0, 6)))
    account.adoptions, account.adopted_rows, account.moves = 2, 30, 1
    found = account.totals()
    assert found.by_model["target"] == Totals(3, 8 + 24, 16 + 24, 8 * 13 + 24 * 8, 8 * 7 + 24 * 8, 4, 12, 2, 2)
    assert found.by_model["draft"] == Totals(1, 6, 6, 48, 48, 0, 0, 0, 0)
    assert (found.adoptions, found.adopted_rows) == (2, 30)
    assert (account.passes, account.layer_passes, account.heads) == (4, 46, 2)
    assert account.passes_of == {"target": 3, "draft": 1}
    assert account.roles == ["target", "draft"]
    twice = Account()
    twice.include(account)
    twice.include(account)
    assert twice.totals().by_model["target"] == Totals(*(2 * value for value in found.by_model["target"]))
    assert (twice.adoptions, twice.adopted_rows, twice.moves) == (4, 60, 2)


PASSES = st.builds(
    lambda width, at, heads, more: Forward("target", (7,) * width, at, LayerSpan(0, 4), heads=min(heads, width), **more(width, at)),
    st.integers(1, 4), st.integers(0, 9), st.integers(0, 4),
    st.sampled_from([
        lambda width, at: {}, lambda width, at: {"tree": (-1,) * width}, lambda width, at: {"context_budget": 3},
        lambda width, at: {"compared": width}, lambda width, at: {"batch": Batch.uniform(tuple(range(width)), at)},
    ]),
)  # fmt: skip


@given(st.lists(PASSES, max_size=8))
def test_an_account_counts_passes_by_kind_with_their_contexts(passes: list[Forward]) -> None:
    account, expected = Account(), dict[Kind, list[int]]()
    for step in passes:
        account.add(step)
        counts = expected.get(kind_of(step), [0, 0, 0])
        expected[kind_of(step)] = [one + more for one, more in zip(counts, (1, *context_of(step)), strict=True)]
    assert account.passes_by_kind == expected


def test_kind_of_a_pass_ignores_position_and_tokens() -> None:
    step = Forward("target", (7, 8), 5, LayerSpan(1, 4, gaps=((2, 3),), kv_only=True), "state", heads=2, unit=0, compared=1)
    assert kind_of(step) == Kind("target", 2, LayerSpan(1, 4, ((2, 3),), True), 2, 1)
    assert kind_of(step) == kind_of(step._replace(tokens=(1, 2), at=9, state=None, unit=3))


# --- Bills ---


def test_bill_by_hand() -> None:
    """llama-2-13b: 40 layers of 317 M weights, hidden size 5120, 40 heads of 128, vocabulary of 32,000."""
    model = preset("llama-2-13b")
    layer, head, row, making = model.layer_weights, 5120 * 32_000, 2 * 40 * 128, 5120 * 2 * 40 * 128
    own = Totals(3, 7, 11, 13, 17, 19, 23, 2, 5)
    found = flops_and_bytes(Work({"target": own}, 2, 30), {"target": model}, bytes_each=4)
    assert found.flops == 2 * (layer * 11 + head * 5 + making * 23) + 4 * 40 * 128 * 13
    assert found.weight_bytes == 4 * (layer * 7 + head * 2 + making * 19)
    assert (found.kv_read_bytes, found.kv_written_bytes) == (4 * row * 17, 4 * row * (11 + 23))
    assert (found.head_passes, found.transferred_bytes) == (5, 4 * row * 30 + 4 * 5120 * 2)
    assert found.intensity == found.flops / (found.weight_bytes + found.kv_read_bytes + found.kv_written_bytes)
    target = Work({"target": own})
    assert flops_and_bytes(target, {"target": model}) == flops_and_bytes(target, {"target": model}, bytes_each=2)
    assert flops_and_bytes(target, {"target": model}).transferred_bytes == 0
    both = flops_and_bytes(Work({"target": own, "draft": own}), {"target": model, "draft": model}, bytes_each=4)
    assert both[:5] == tuple(2 * value for value in found[:5])
    assert np.isnan(FlopsAndBytes(0, 0, 0, 0, 0, 0).intensity)


def test_operations_of_a_pass_equal_those_of_its_shape() -> None:
    account, model = Account(), preset("opt-1.3b")
    account.add(Forward("target", (7, 8, 9), 5, LayerSpan(0, 24), heads=2))
    assert account.flops_and_bytes({"target": model}).flops == model.operations(3, 5, heads=2)
    for more in ({}, {"bytes_each": 1}):
        assert account.flops_and_bytes({"target": model}, **more) == flops_and_bytes(account.totals(), {"target": model}, **more)


def test_bill_needs_the_shape_of_every_model() -> None:
    account = Account()
    account.add(Forward("draft", (7,), 0, LayerSpan(0, 6)))
    with pytest.raises(ParameterError, match="shapes must have one for the draft model, got those of target"):
        account.flops_and_bytes({"target": preset("t5-large")})
    with pytest.raises(ParameterError, match="got those of none"):
        account.flops_and_bytes({})
    with pytest.raises(ParameterError, match="bytes_each must be"):
        account.flops_and_bytes({"draft": preset("t5-small")}, bytes_each=0)
    with pytest.raises(ParameterError, match="bytes_each must be at least 1, got 0"):
        flops_and_bytes(Work({}), {}, bytes_each=0)


# --- Closed forms ---


@given(st.integers(1, 30), st.integers(1, 6))
def test_plain_decoding_counted_equals_closed_form(tokens: int, layers: int) -> None:
    parameters = plain.Parameters(layers)
    found = count(plain.decode(parameters, [0], tokens), World(1, layers), tokens).account.totals()
    want = autoregressive.work(parameters, tokens, None)
    assert near(found.by_model["target"], want.by_model["target"])
    assert found[1:] == want[1:] == (0, 0)


@given(BITS, st.integers(1, 8), st.integers(0, 4), st.integers(1, 3), st.sampled_from(("literal", "flat")), st.booleans())
def test_predictive_pipelined_decoding(
    matches: list[bool], layers: int, early: int, candidates: int, form: str, batched: bool
) -> None:
    parameters = pipelined.Parameters(layers, max(-(-layers // 2), layers - early), candidates, form, batched=batched)
    tokens = len(matches)
    steps, world = pipelined.decode(parameters, [0], tokens), World(1, layers, matches)
    run = simulate(steps, tokens, Cluster(candidates + 1), UnitCost(layers), world)
    want = ppd.work(parameters, tokens, ByPosition(np.array(matches, float)))
    assert want is not None
    found = run.account.totals()
    assert near(found.by_model["target"], want.by_model["target"])
    assert near(found[1:], want[1:])
    assert near(want.by_model["target"].layer_runs if batched else want.by_model["target"].layer_passes, run.busy)


def test_forms_that_stop_processes_have_no_closed_form() -> None:
    for exit_layer, form in ((4, "eager"), (4, "nested"), (3, "flat")):
        assert ppd.work(pipelined.Parameters(8, exit_layer, 2, form), 5, Iid(0.5)) is None


@given(BITS, st.integers(0, 5))
def test_speculative_decoding(accept: list[bool], draft_length: int) -> None:
    tokens, parameters = len(accept), drafting.Parameters(3, draft_length, draft_layers=2)
    law = ByPosition(np.array(accept, float))
    (survivors,) = law.survivors(iter([np.full((tokens, 1), 0.5)]), draft_length).T.tolist()
    world = World(1, 3, drafts={"draft": DraftOutcomes("target", survivors)})
    found = count(drafting.decode(parameters, [0], tokens), world, tokens).account.totals()
    want = speculative.work(parameters, tokens, law)
    assert want is not None
    assert found.by_model.keys() == want.by_model.keys()
    for role, totals in found.by_model.items():
        assert near(totals, want.by_model[role]), role


def test_expected_work_follows_the_law() -> None:
    """Half of all first drafts (one token) are accepted: then the bonus token completes the output in a single round."""
    found = speculative.work(drafting.Parameters(3, 1), 2, Iid(0.5))
    assert found is not None
    assert (found.by_model["target"].passes, found.by_model["draft"].passes) == (1.5, 1.0)
    assert speculative.work(drafting.Parameters(3, 1), 2, Replay([[True, True]])) is None
    rounds = starts(2, 6, Rounds([0.5, 0.25]))
    assert near(rounds.mass[:4], [1, 0.5, 0.25 + 0.25, 0.25 + 0.5 * 0.25 + 0.5 * 0.5])
    assert near(rounds.after_full_draft[:4], [0, 0, 0, 0.25])
    assert not starts(0, 4, Iid(0.5)).after_full_draft.any()  # rounds without a draft follow no fully accepted one


@pytest.mark.parametrize("stop", [Account.passes, Account.layer_passes, Account.heads])
def test_empty_account_has_no_work(stop: Any) -> None:
    assert stop.fget(Account()) == 0
    assert Account().totals() == Work({})
    assert set(Totals()) == {0}


def assert_same_where_predicted(found: Work, want: Work, heads: tuple[str, ...] = ()) -> None:
    """Every predicted total is right; passes and layers are predicted for all models, logits for those in `heads`."""
    assert found.by_model.keys() == want.by_model.keys()
    assert all(not np.isnan(want.by_model[role].heads) for role in heads if role in want.by_model)
    assert not np.isnan(want.by_model["target"].layer_passes)
    for role, totals in found.by_model.items():
        known = [name for name, value in zip(Totals._fields, want.by_model[role], strict=True) if not np.isnan(value)]
        assert {"passes", "layer_runs", "head_runs"} <= {*known}
        for name in known:
            assert near(getattr(totals, name), getattr(want.by_model[role], name)), (role, name)


def world_of(module: Any, parameters: Any, layers: int, random_draws: dict[str, list[bool]]) -> World:
    longest = parameters.longest_draft
    lengths = {
        name: ByPosition(np.array(row, float)).survivors(iter([np.full((len(row), 1), 0.5)]), longest)[:, 0].tolist()
        for name, row in random_draws.items()
    }
    return World(1, layers, drafts={role: DraftOutcomes(of, lengths[name]) for role, (of, name) in parameters.IMITATES.items()})


@given(BITS, st.sampled_from((1, 3)))
def test_drafts_of_adaptive_length(accept: list[bool], first: int) -> None:
    parameters, tokens = policies.Parameters(3, "heuristic", 5, first, draft_layers=2), len(accept)
    found = count(policies.decode(parameters, [0], tokens), world_of(policies, parameters, 3, {"accept": accept}), tokens)
    want = adaptive.work(parameters, tokens, ByPosition(np.array(accept, float)))
    assert want is not None
    assert_same_where_predicted(found.account.totals(), want, ("target", "draft"))
    assert adaptive.work(policies.Parameters(3, "optimum", believed_cost_ratio=0.1), 4, Iid(0.5)) is None


@given(BITS, st.integers(0, 2**20 - 1), st.sampled_from(("literal", "reuse", "bonus", "recursive")), st.integers(1, 3))
def test_three_models(accept: list[bool], bits: int, reading: str, draft_length: int) -> None:
    tokens, medium = len(accept), [bool(bits >> place & 1) for place in range(len(accept))]
    inner = 1 if reading == "recursive" else None
    parameters = nested.Parameters(3, draft_length, reading, inner, draft_layers=2, medium_layers=2)
    world = world_of(nested, parameters, 3, {"accept": accept, "medium_accept": medium})
    found = count(nested.decode(parameters, [0], tokens), world, tokens)
    laws = {"accept": ByPosition(np.array(accept, float)), "medium_accept": ByPosition(np.array(medium, float))}
    assert_same_where_predicted(found.account.totals(), hierarchical.work(parameters, tokens, laws), ("target",))


@given(BITS, st.sampled_from(("sequential", "parallel", "batched")), st.integers(1, 3))
def test_searches_with_beams(accept: list[bool], arrangement: str, draft_length: int) -> None:
    tokens = len(accept)
    parameters = search.Parameters(3, draft_length, beams=2, rule="per-beam", arrangement=arrangement, draft_layers=2)
    world = world_of(search, parameters, 3, {"accept": accept})
    found = count(search.decode(parameters, [0], tokens), world, 10**6)  # it ends by itself
    assert_same_where_predicted(found.account.totals(), beam.work(parameters, tokens, ByPosition(np.array(accept, float))))
