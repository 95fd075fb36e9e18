"""Values of `batching`: all views and the figure of the largest batch agree."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from figures.of_theory import largest_batch
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.hardware.cost_models import memory, pass_time, step_time
from model.methods import registry
from model.methods.speculative import static_batches
from model.methods.speculative import theory as speculative
from model.methods.speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Iid
from sim.commands.sim_app import app
from sim.runs import trace
from sim.scenarios.hardware_cost import HardwareCost
from tests.support.exact import mean, near, recursion
from tests.support.position_costs import growing

ROOFLINE = {"kind": "roofline", "device": "h100", "shape": "llama-2-7b", "draft_shape": "llama-68m", "prompt": 496}
CURVE = [[1, 1.0], [2, 1.0], [4, 1.25], [8, 1.5], [32, 4.5]]
ALONE = {key: value for key, value in ROOFLINE.items() if key != "draft_shape"}
DRAFTING = {"name": "speculative", "layers": 32, "draft_length": 3}
PLAIN = {"name": "autoregressive", "layers": 32}
PPD = {"name": "ppd", "layers": 32, "exit_layer": 16, "candidates": 1}
OUTCOMES = {"accept": {"kind": "iid", "acceptance_rate": 0.6}, "match": {"kind": "iid", "match_rate": 0.5}}


def rows(*chosen: dict[str, Any], cost: dict[str, Any] = ROOFLINE, tokens: int = 32, **settings: Any) -> list[dict[str, Any]]:
    said = {"name": "batching", "tokens": tokens, "views": ["formula"], "replications": 64, "event_replications": 8, **settings}
    asked = {name for each in chosen for name in registry.algorithm(each["name"]).Parameters.OUTCOMES}
    tables = {"scenario": said, "method": [*chosen], "cost": cost, "outcomes": {name: OUTCOMES[name] for name in sorted(asked)}}
    return sim.run({key: value for key, value in tables.items() if value}, out=None).to_dicts()


def speedup(*chosen: dict[str, Any], **more: Any) -> float:
    (row,) = rows(*chosen, **more)
    return float(row["speedup"])


# --- A batch that is kept full -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences", [2, 8])
@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(3, 5), Fraction(1)])
@pytest.mark.parametrize(("gamma", "tokens"), [(0, 5), (3, 1), (3, 9)])
def test_formula_equals_a_recursion_over_full_rounds(sequences: int, alpha: Fraction, gamma: int, tokens: int) -> None:
    """Exact fractions: all rounds of a sequence, also the last, cost as much as rounds of the full batch."""
    at = {width: _on_curve(width) for width in (sequences, sequences * (gamma + 1))}
    price = gamma * Fraction(1, 4) * at[sequences] + at[sequences * (gamma + 1)]
    exact = recursion(alpha, gamma, tokens, lambda _: price)
    cost = UnitCost(4, cost_ratio=0.25, verify_cost=tuple((width, time) for width, time in CURVE))
    found = speculative.predict(
        Parameters(4, gamma, sequences=sequences), tokens, Iid(float(alpha)), cost.of_batch(sequences, gamma + 1)
    )
    assert near(found.latency, 4 * float(exact), 1e-12)
    assert near(found.plain_latency, 4 * tokens * float(at[sequences]), 1e-12)
    assert near(found.drafted, gamma * float(found.rounds), 1e-12)


def _on_curve(width: int) -> Fraction:
    below = max(pair for pair in CURVE if pair[0] <= width)
    above = min(pair for pair in CURVE if pair[0] >= width)
    low, high = Fraction(below[1]), Fraction(above[1])
    return low if above == below else low + (high - low) * Fraction(width - int(below[0]), int(above[0]) - int(below[0]))


@pytest.mark.parametrize("method", [DRAFTING, DRAFTING | {"placement": "separate"}], ids=["colocated", "separate"])
@pytest.mark.parametrize("batching", ["continuous", "lockstep", "static"])
def test_the_views_agree(method: dict[str, Any], batching: str) -> None:
    """Events and paths agree to the last bit (times are multiples of 1/8); the formula within five standard errors.

    The run itself compares rounds and drafted tokens of formula and paths and would warn, which is an error here; its false alarm
    rate is one in a million runs. In a batch that is kept full every round takes the same time.
    """
    cost = {"cost_ratio": 0.25, "verify_cost": CURVE, "operations_ratio": 0.5} | ({"link": 0.5} if "placement" in method else {})
    own = method | {"sequences": 8, "batching": batching}
    formula, paths, events = rows(own, cost=cost, views=["formula", "paths", "events"], replications=4096)
    assert events["paths_difference"] == 0
    if batching == "continuous":
        round_time = formula["latency_layers"] * formula["tokens_per_round"]
        assert paths["latency_layers"] * paths["tokens_per_round"] == pytest.approx(round_time, rel=1e-12)
        drafted = formula["operations_per_token"] * formula["tokens_per_round"]
        assert paths["operations_per_token"] * paths["tokens_per_round"] == pytest.approx(drafted, rel=1e-12)
    error = paths["latency_sd_layers"] / 4096**0.5
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], abs=5 * error)


def test_figure_of_largest_batch_is_the_limit_of_long_runs() -> None:
    """The run's speed-up is the figure's times l / (R(l) E[N]), with R(l) rounds for l tokens, at every batch.

    Contexts differ slightly: the figure is evaluated at mid-context.
    """
    alpha, gamma, tokens, batches = 0.6, 3, 32, np.array([2, 8, 64])
    cost = HardwareCost(**ROOFLINE)
    target, draft = cost.of("target"), cost.of("draft")
    assert target is not None
    assert draft is not None
    drawn = largest_batch.speedups(target, draft, alpha, gamma, (496 + tokens // 2,), batches)[:, 0]
    runs = float(speculative.target_runs(tokens, alpha, gamma))
    share = tokens / (runs * float(mean(Fraction(3, 5), gamma)))
    assert 1 - gamma / tokens < share < 1
    for batch, ends in zip(batches.tolist(), drawn, strict=True):
        assert near(speedup(DRAFTING | {"sequences": batch}), ends * share, 1e-4)
    assert drawn[0] > drawn[1] > drawn[2]


@pytest.mark.parametrize("cost", [UnitCost(40, cost_ratio=0.1), growing(40, draft=0.3)])
def test_nothing_is_lost_where_no_sequence_waits(cost: StepCosts) -> None:
    """Exactly, also where sums over rounds are rounded; a loss that is no rounding stays."""
    static = Parameters(40, 0, sequences=7, batching="static")
    found = static_batches.expected(static, 23, Iid(0.5), cost)
    times = found.time * np.array([1, 1 - 1e-14, 1 + 1e-14, 1 + 1e-10])
    lost = static_batches.straggler_loss(static, cost, found.rounds, times, 23)
    np.testing.assert_array_equal(lost[:3], 0.0)
    assert lost[3] == pytest.approx(1e-10, rel=1e-3)
    assert static_batches.straggler_loss(static, cost, found.rounds, float(times[2]), 23) == 0


def test_static_batch_is_slower_by_its_straggler_loss() -> None:
    """Its speed-up is that of continuous batching times (1 - straggler loss), in expectation and in simulated totals."""
    own = {"sequences": 8}
    full = speedup(DRAFTING | own)
    formula, paths, events = rows(DRAFTING | own | {"batching": "static"}, views=["formula", "paths", "events"])
    assert near(formula["speedup"], full * (1 - formula["straggler_loss"]), 1e-4)  # at contexts that differ a little
    assert 0.02 < formula["straggler_loss"] < 0.3
    for row in (paths, events):
        rounds = 8 * 32 / row["tokens_per_round"]
        assert near(row["straggler_loss"], 1 - rounds * _full_round() / 8 / row["latency_s"], 1e-6)
    for other in (own, {}, own | {"batching": "lockstep"}, {"batching": "static"}):
        assert rows(DRAFTING | other)[0].get("straggler_loss") is None


def _full_round() -> float:
    """Mean time of a round of eight sequences on this hardware, summed over its passes [s]."""
    cost = HardwareCost(**ROOFLINE)
    target, draft = cost.of("target"), cost.of("draft")
    assert target is not None
    assert draft is not None
    start = 496 + np.arange(32)
    drafts = sum(step_time(draft, start + place, 8).seconds for place in range(3))
    return float((pass_time(target, 4, start, 8).seconds + drafts).mean())


# --- Properties of all values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [DRAFTING, PLAIN], ids=["drafting", "plain"])
def test_batching_has_no_effect_on_one_sequence(method: dict[str, Any]) -> None:
    cost = ROOFLINE if method is DRAFTING else ALONE
    each = ("continuous", "static", "lockstep")
    found = [rows(method | {"batching": batching}, cost=cost, views=["formula", "paths"]) for batching in each]
    for other in found[1:]:
        for row, alike in zip(found[0], other, strict=True):
            assert {**row, "batching": None} == {**alike, "batching": None}


def test_plain_decoding_takes_one_batch_step_per_token() -> None:
    target = HardwareCost(**ALONE).of("target")
    assert target is not None
    for batching in ("continuous", "static", "lockstep"):
        at = np.arange(32)
        at = (at + 15 * 16) / 16 if batching == "continuous" else at  # the other sequences are at mid-length on average
        total = float(step_time(target, 496 + at, 16).seconds.sum())
        for row in rows(PLAIN | {"sequences": 16, "batching": batching}, cost=ALONE, views=["formula", "paths", "events"]):
            assert (row["latency_s"], row["speedup"]) == (pytest.approx(total), pytest.approx(1))


def test_weights_are_read_once_for_all_sequences_of_a_batch() -> None:
    alone, many = (rows(PLAIN | {"sequences": count}, cost=ALONE)[0] for count in (1, 16))
    assert many["weight_bytes_per_token"] == pytest.approx(alone["weight_bytes_per_token"] / 16)
    assert many["plain_weight_bytes_per_token"] == pytest.approx(many["weight_bytes_per_token"])
    for name in ("flops_per_token", "kv_read_bytes_per_token"):
        assert many[name] == alone[name]
    assert many["arithmetic_intensity"] > alone["arithmetic_intensity"]


def test_verify_cost_is_read_at_all_tokens_of_the_batch() -> None:
    """A plain step of eight sequences costs verify_cost at width 8, in continuous batching and in lockstep."""
    curve = {"verify_cost": CURVE, "cost_ratio": 0.25}
    for batching in ("continuous", "lockstep"):
        (row,) = rows(DRAFTING | {"sequences": 8, "draft_length": 0, "batching": batching}, cost=curve)
        assert row["latency_layers"] == pytest.approx(32 * 32 * 1.5)
    with pytest.raises(ParameterError, match=r"must reach width 64, .* got 32; .* or draft less or take fewer sequences"):
        rows(DRAFTING | {"sequences": 16}, cost=curve)


def test_full_batch_without_drafts_is_plain_decoding() -> None:
    assert speedup(DRAFTING | {"draft_length": 0, "sequences": 8}) == pytest.approx(1)


# --- The keys --------------------------------------------------------------------------------------------------------------


def test_batchings_of_every_method() -> None:
    ways = {name: registry.algorithm(name).Parameters.BATCHINGS for name in registry.names()}
    every = {"continuous", "static", "lockstep"}
    assert {name for name, own in ways.items() if {*own} == every} == {"autoregressive", "speculative"}
    assert {name for name, own in ways.items() if {*own} == {"static", "lockstep"}} == {"early_exit", "skipdecode"}
    assert all("lockstep" in own for own in ways.values())


@pytest.mark.parametrize("name", registry.names())
def test_ls_methods_explains_each_batching(name: str) -> None:
    done = CliRunner().invoke(app, ["ls", "methods", name])
    assert done.exit_code == 0
    listed = done.stdout.partition("batching of several sequences\n")[2].splitlines()
    ways = registry.algorithm(name).Parameters.BATCHINGS
    assert [line.split()[0] for line in listed[: len(ways)]] == [*ways]
    assert all(len(line.split()) > 5 for line in listed[: len(ways)])


def test_set_a_key_for_all_methods_or_for_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(
        '[scenario]\nname = "several"\ntokens = 16\nviews = ["formula"]\n'
        '[[method]]\nname = "autoregressive"\nlayers = 32\n'
        '[[method]]\nname = "ppd"\nlayers = 32\nexit_layer = 16\ncandidates = 1\n'
        '[[method]]\nname = "speculative"\nlayers = 32\ndraft_length = 3\n'
        "[outcomes.match]\nkind = \"iid\"\nmatch_rate = 0.5\n[outcomes.accept]\nkind = \"iid\"\nacceptance_rate = 0.6\n"
        '[cost]\nkind = "roofline"\ndevice = "h100"\nshape = "llama-2-7b"\ndraft_shape = "llama-68m"\n'
    )
    run = ["run", "s.toml", "--no-figures", "--set", "method.sequences=8"]
    refused = CliRunner().invoke(app, run)
    assert refused.exit_code == 2
    assert "batching must be 'lockstep' with sequences=8, got 'continuous'" in refused.stderr
    done = CliRunner().invoke(app, [*run, "--set", "method.ppd.batching=lockstep", "-o", "out"])
    assert done.exit_code == 0, done.output
    found = pl.read_parquet(tmp_path / "out" / "results.parquet")
    assert found.select("method", "sequences", "batching").rows() == [
        ("autoregressive", 8, "continuous"), ("ppd", 8, "lockstep"), ("speculative", 8, "continuous")
    ]  # fmt: skip


# --- A draft is not split, and has the layers of its shape ----------------------------------------------------------------


def test_a_draft_has_the_layers_of_its_shape() -> None:
    assert rows(DRAFTING)[0]["draft_layers"] == preset("llama-68m").layers
    shapes = {"cost_ratio": 0.1, "shape": "llama-2-7b", "draft_shape": "llama-68m"}
    assert rows(DRAFTING, cost=shapes)[0]["draft_layers"] == preset("llama-68m").layers
    assert rows(DRAFTING, cost={"cost_ratio": 0.1})[0]["draft_layers"] == 1
    for cost in (ROOFLINE | {"draft_shape": "llama-2-13b"}, shapes | {"draft_shape": "llama-2-13b"}):
        with pytest.raises(ParameterError, match=r"draft_layers must be 40, .* got 1; set it, or leave"):
            rows(DRAFTING | {"draft_layers": 1}, cost=cost)
    tables = {
        "scenario": {"name": "deep", "tokens": 4}, "method": [DRAFTING], "outcomes": {"accept": OUTCOMES["accept"]},
        "cost": ROOFLINE | {"draft_shape": "llama-3.2-1b"},
    }  # fmt: skip
    assert {each.last for each in trace.record(tables).intervals if each.role == "draft"} == {16}


def test_a_draft_is_not_split() -> None:
    """Twelve heads cannot be split over eight devices; the whole draft is stored next to the target's share."""
    (row,) = rows(DRAFTING | {"sequences": 2}, cost=ROOFLINE | {"tensor_parallel": 8}, tokens=16)
    room = memory(preset("llama-2-7b"), 80 * 2**30, context=512, batch=2, tensor_parallel=8)
    small = preset("llama-68m")
    more = small.parameters * 2 + small.cache_bytes() * 512 * 2
    assert row["memory_share"] == pytest.approx((room.required + more) / (80 * 2**30))
