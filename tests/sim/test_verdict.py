"""The verdict on tables written by hand: the fastest choice under each condition, its speed-up and uncertainty."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import sim
from sim.commands.sim_app import app
from sim.runs import sweep, verdict

SPEC = {"name": "speculative", "layers": 40, "draft_length": 3}
PLAIN = {"name": "autoregressive", "layers": 40}
LENGTHS = {"method.draft_length": [1, 2, 3]}
ON_HARDWARE = {"cost_source": "measured", "cost_missing": "step, draft_step"}


def tables(*methods: dict[str, Any], **sweep_: Any) -> dict[str, Any]:
    return {"scenario": {"name": "made", "tokens": 8}, "method": [*methods], "sweep": sweep_}


def row(point: int, speedup: float | None, view: str = "formula", **more: Any) -> dict[str, Any]:
    said = {
        "point": point,
        "view": view,
        "method": "speculative",
        "speedup": speedup,
        "exact": True,
        "reserved_units": 1.0,
        "tensor_parallel": 1,
    }
    time = None if speedup is None else 10.0 / speedup
    return said | {"tpot_layers": time, "contended": False, "cost_source": None, "cost_missing": None, "agreement": None} | more


def of(rows: list[dict[str, Any]], said: dict[str, Any]) -> verdict.Verdict:
    return verdict.of(pl.DataFrame(rows, infer_schema_length=None), said)


def spread(low: float, high: float, kind: str = "") -> dict[str, float]:
    return {f"speedup_{kind}low": low, f"speedup_{kind}high": high}


def test_fastest_choice_is_named_with_its_interval() -> None:
    rows = [row(at, speed, "paths", **spread(speed - 0.01, speed + 0.01)) for at, speed in enumerate((1.21, 1.15, 0.92))]
    found = of(rows, tables(SPEC, **LENGTHS))
    assert found.text == (
        "Fastest: speculative, draft_length 1: 1.21x (95 % interval 1.20 to 1.22) over plain decoding on the same devices;"
        " costs are in layer-times"
    )
    document = found.document()
    assert document["best"] == "speculative, draft_length 1"
    assert (document["speedup"], document["low"], document["high"]) == pytest.approx((1.21, 1.20, 1.22))
    assert (document["over"], document["kernels_only"]) == ("plain decoding on the same devices", None)


def test_interval_that_ends_at_one_is_a_tie() -> None:
    def said(low: float, high: float) -> str:
        return of([row(0, (low + high) / 2, "paths", **spread(low, high))], tables(SPEC)).text

    assert said(0.9, 1.0).startswith("About as fast as plain decoding")
    assert said(1.0, 1.1).startswith("About as fast as plain decoding")
    assert said(0.9, 0.999).startswith("Plain decoding is fastest")
    assert said(1.001, 1.1).startswith("Fastest")


def test_choice_without_a_speed_up_is_ignored() -> None:
    """A speed-up of 0, nan or infinity gives no time."""
    none = [row(1, None), {**row(2, 1.0), "speedup": 0.0}, {**row(3, 1.0), "speedup": float("nan")}]
    found = of([row(0, 1.1), *none], tables(SPEC, **{"method.draft_length": [1, 2, 3, 4]}))
    assert found.text.startswith("Fastest: speculative, draft_length 1: 1.10x")
    assert of(none, tables(SPEC, **{"method.draft_length": [1, 2, 3, 4]})).text.startswith("No verdict")


def test_plain_decoding_may_be_fastest_or_tied() -> None:
    slower = of([row(0, 0.85), row(1, 0.92, **spread(0.9, 0.97, "input_")), row(2, 0.6)], tables(SPEC, **LENGTHS))
    assert slower.text.startswith(
        "Plain decoding is fastest: best other choice speculative, draft_length 2: 0.92x (input uncertainty 0.90 to 0.97)"
    )
    found = slower.document()
    assert (found["best"], found["speedup"], found["low"]) == ("plain decoding", 1.0, None)
    assert found["conditions"][0]["next"] == {"best": "speculative, draft_length 2", "speedup": 0.92}
    same = of([row(0, 1.01, **spread(0.97, 1.05, "input_")), row(1, 0.9), row(2, 0.8)], tables(SPEC, **LENGTHS))
    assert same.text.startswith("About as fast as plain decoding on the same devices: speculative, draft_length 1: 1.01x (")
    assert same.document()["conditions"][0]["tied_with_plain"]
    below = of([row(0, 0.99, **spread(0.97, 1.02, "input_"))], tables(SPEC))
    assert below.answers[0].wins == "speculative, draft_length 3 or plain decoding"
    assert below.text.startswith("About as fast as plain decoding")
    assert not slower.document()["conditions"][0]["tied_with_plain"]
    alone = of([row(0, 1.0, method="autoregressive")], tables(PLAIN))
    assert alone.text == "Only plain decoding was run: there is nothing to compare"


def test_ties_are_listed() -> None:
    wide = [row(at, speed, **spread(0.96 * speed, 1.04 * speed, "input_")) for at, speed in enumerate((1.21, 1.20, 1.10))]
    found = of(wide, tables(SPEC, **LENGTHS))
    assert "; tied with it within the uncertainty: speculative, draft_length 2 (1.20x);" in found.text
    assert found.document()["conditions"][0]["ties"] == ["speculative, draft_length 2"]
    for count in (4, 5, 6):
        alike = [row(at, 1.2) for at in range(count + 1)]
        told = ", ".join(f"speculative, draft_length {at} (1.20x)" for at in range(2, 6))
        more = f", {count - 4} more" if count > 4 else ""
        said = of(alike, tables(SPEC, **{"method.draft_length": [*range(1, count + 2)]})).text
        assert f"; tied with it within the uncertainty: {told}{more};" in said
    # Each must lie within the other's bounds.
    one_sided = [row(0, 1.21, **spread(1.0, 1.4, "input_")), row(1, 1.15, **spread(1.14, 1.16, "input_")), row(2, 0.5)]
    assert of(one_sided, tables(SPEC, **LENGTHS)).document()["conditions"][0]["ties"] == []
    # Sampling intervals do not apply to a closed form; without bounds only equal values are ties.
    sharp = [row(at, speed, **spread(0.5, 2.0)) for at, speed in enumerate((1.21, 1.21, 1.2099))]
    assert of(sharp, tables(SPEC, **LENGTHS)).document()["conditions"][0]["ties"] == ["speculative, draft_length 2"]


def test_verdict_uses_the_first_view_with_a_valid_value() -> None:
    rows = [row(0, 1.5, "formula"), row(0, 1.4, "paths"), row(0, 1.3, "events")]
    assert of(rows, tables(SPEC)).answers[0].best.speedup == 1.5
    assert of([row(0, None), *rows[1:]], tables(SPEC)).answers[0].best.speedup == 1.4
    assert of([each | {"contended": True} for each in rows], tables(SPEC)).answers[0].best.speedup == 1.3
    blind = of([each | {"contended": True} for each in rows[:2]], tables(SPEC))
    assert blind.text.startswith("No verdict: ")
    assert blind.document()["best"] is None
    assert of([row(0, float("nan")), row(0, float("inf"), "paths")], tables(SPEC)).answers == ()


def test_verdict_is_given_by_condition() -> None:
    said = tables(SPEC, **{"method.sequences": [1, 8, 32], **LENGTHS})
    speeds = {1: (1.4, 1.5, 1.6), 8: (1.2, 1.25, 1.3), 32: (1.21, 1.1, 0.9)}
    rows = [row(at, speed) for at, speed in enumerate(speed for own in speeds.values() for speed in own)]
    found = of(rows, said)
    assert found.text == (
        "Fastest by sequences, over plain decoding on the same devices: 1 to 8: speculative, draft_length 3 (1.30x to 1.60x);"
        " 32: speculative, draft_length 1 (1.21x); costs are in layer-times"
    )
    assert found.document()["best"] is None
    assert [each["at"] for each in found.document()["conditions"]] == [{"sequences": 1}, {"sequences": 8}, {"sequences": 32}]
    assert [each["speedup"] for each in found.document()["conditions"]] == [1.6, 1.3, 1.21]
    order = [32, 1, 8]
    unsorted = [row(at, speed) for at, speed in enumerate(speed for size in order for speed in speeds[size])]
    assert of(unsorted, tables(SPEC, **{"method.sequences": order, **LENGTHS})).text == found.text
    # With two axes of conditions the winners are counted; values that are names are grouped by winner.
    both = tables(SPEC, **{"method.sequences": [1, 8, 32], "outcomes.acceptance_rate": [0.6, 0.8, 0.9]})
    assert of([row(at, 1.5 - 0.1 * at) for at in range(9)], both).text == (
        "Fastest in 9 conditions (sequences x acceptance_rate), over plain decoding on the same devices: speculative, draft_length"
        " 3 (1.10x to 1.50x) in 5, plain decoding (best other choice 0.70x to 0.90x) in 3, speculative, draft_length 3 or plain"
        " decoding (1.00x) in 1; costs are in layer-times"
    )
    alike = of([row(at, 1.5 - 0.01 * at) for at in range(9)], both).text
    assert "Fastest in all 9 conditions (sequences x acceptance_rate), over plain decoding on the same devices: spec" in alike
    assert "draft_length 3 (1.42x to 1.50x); costs" in alike
    named = of([row(at, speed) for at, speed in enumerate((2.0, 0.5, 1.5))], tables(SPEC, **{"cost.device": ["a", "b", "c"]}))
    assert "by device, over plain decoding on the same devices: a, c: speculative, draft_length 3 (1.50x to 2.00x); b: plain" in (
        named.text
    )


CONDITIONS = [
    "outcomes.acceptance_rate", "outcomes.accept.acceptance_rate", "method.outcomes.acceptance_rate", "cost.prompt",
    "cost.device", "cost.step_s", "method.sequences", "method.layers", "method.draft_layers", "method.cost.cost_ratio",
    "scenario.tokens", "scenario.seed", "cluster.links", "method.speculative.sequences",
]  # fmt: skip
CHOICES = [
    "method.draft_length",
    "method.placement",
    "method.speculative.draft_length",
    "cost.tensor_parallel",
    "cluster.units",
    "method.cost.tensor_parallel",
]


@pytest.mark.parametrize("path", CONDITIONS)
def test_load_lengths_rates_and_hardware_are_conditions(path: str) -> None:
    assert len(of([row(0, 1.5), row(1, 1.2)], tables(SPEC, **{path: [1, 2]})).answers) == 2


@pytest.mark.parametrize("path", CHOICES)
def test_method_parameters_and_number_of_devices_are_choices(path: str) -> None:
    rows = [row(0, 1.5, reserved_units=1.0), row(1, 1.2, reserved_units=2.0)]
    (answer,) = of(rows, tables(SPEC, **{path: [1, 2]})).answers
    assert answer.best is not None
    assert answer.best.speedup == 1.5
    assert answer.best.label.endswith(" on 1 unit")


def test_methods_are_choices_but_their_load_is_a_condition() -> None:
    other = {"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 2}
    rows = [row(0, 1.5), row(1, 1.6, method="ppd", reserved_units=3.0)]
    (answer,) = of(rows, tables(SPEC, other)).answers
    assert answer.best is not None
    assert answer.best.label == "ppd, exit_layer 20, candidates 2 on 3 units"
    loads = of([*rows[:1], row(1, 1.2)], tables(SPEC, SPEC | {"sequences": 8}))
    assert [(dict(each.at), each.wins) for each in loads.answers] == [
        ({"sequences": 1}, "speculative, draft_length 3"), ({"sequences": 8}, "speculative, draft_length 3"),
    ]  # fmt: skip
    tasks = [SPEC | {"outcomes": {"kind": "published", "task": task}} for task in ("ende", "xsum")]
    assert [dict(each.at) for each in of([*rows[:1], row(1, 1.2)], tables(*tasks)).answers] == [{"task": "ende"}, {"task": "xsum"}]
    laws = [SPEC | {"outcomes": {"kind": "iid", "acceptance_rate": rate}} for rate in (0.5, 0.9)]
    (answer,) = of([row(0, 1.2), row(1, 1.5)], tables(*laws)).answers
    assert answer.best is not None
    assert answer.best.label == "speculative, draft_length 3 (method 2)"


def test_choices_on_more_devices_are_compared_by_time() -> None:
    """A speed-up is over plain decoding on the same devices: on more devices a smaller speed-up may take less time."""
    times = {1: 40.0, 4: 15.0}
    rows = [
        row(0, 1.9, tensor_parallel=1, reserved_units=1.0, tpot_ms=times[1] / 1.9, **ON_HARDWARE),
        row(1, 1.6, tensor_parallel=4, reserved_units=4.0, tpot_ms=times[4] / 1.6, **ON_HARDWARE),
    ]
    found = of(rows, tables(SPEC, **{"cost.tensor_parallel": [1, 4]}))
    assert found.text.startswith("Fastest: speculative, draft_length 3 on 4 devices: 1.60x over plain decoding on 4 devices;")
    lost = of([rows[0], rows[1] | {"speedup": 0.8, "tpot_ms": times[4] / 0.8}], tables(SPEC, **{"cost.tensor_parallel": [1, 4]}))
    # 40 / 1.9 = 21 ms, and 15 / 0.8 = 19 ms: both more than 15 ms.
    assert lost.text.startswith(
        "Plain decoding on 4 devices is fastest: best other choice speculative, draft_length 3 on 4 devices"
    )
    assert (lost.document()["over"], found.document()["over"]) == ("the fastest plain decoding",) * 2
    # If the time of plain decoding differs between rows, their time units differ, and ratios are compared.
    own = of([row(0, 1.9, tpot_layers=5.0), row(1, 1.6, tpot_layers=1.0)], tables(SPEC, SPEC | {"draft_length": 5}))
    assert own.answers[0].best is not None
    assert own.answers[0].best.speedup == 1.9


def test_lossy_winner_is_marked_with_the_fastest_exact_method() -> None:
    lossy = {"name": "bild", "layers": 40}
    rows = [row(0, 1.4), row(1, 2.0, method="bild", exact=False, agreement=0.873)]
    text = of(rows, tables(SPEC, lossy)).text
    assert "; not exact, its output differs from the target's (87.3% of the tokens are equal); fastest exact method: spec" in text
    assert "draft_length 3 (1.40x)" in text
    unknown = of([rows[1] | {"point": 0, "agreement": None}], tables(lossy)).text
    assert "; not exact, its output differs from the target's (token agreement is not measured); costs" in unknown
    swept = tables(lossy, **{"outcomes.fallback_rate": [0.1, 0.2]})
    assert "; not exact, output differs from the target's: bild;" in of([rows[1] | {"point": at} for at in (0, 1)], swept).text
    assert "the target's" not in of([rows[0], rows[1] | {"speedup": 1.1}], tables(SPEC, lossy)).text


@pytest.mark.parametrize(
    ("missing", "kernels", "ending"),
    [
        ("step, draft_step", True, "; kernels only: the engine's overhead is not included"),
        ("embedding, step", True, "; kernels only: the engine's overhead is not included"),
        ("draft_step", False, "; the engine's overhead of draft passes is not included"),
        ("embedding", False, "over plain decoding on the same devices"),
        (None, False, "over plain decoding on the same devices"),
    ],
)
def test_missing_engine_overhead_is_mentioned(missing: str | None, kernels: bool, ending: str) -> None:
    found = of([row(0, 1.5, cost_source="measured", cost_missing=missing)], tables(SPEC))
    assert found.text.endswith(ending)
    assert found.document()["kernels_only"] is kernels


def test_number_of_sequences_is_mentioned() -> None:
    assert "; sequences = 32; costs" in of([row(0, 1.5)], tables(SPEC | {"sequences": 32})).text
    assert "; sequences = 4; costs" in of([row(0, 1.5)], tables(SPEC, **{"method.sequences": [4]})).text
    assert "sequences" not in of([row(0, 1.5)], tables(SPEC)).text
    some = {"method.sequences": [4, 8]}  # only one point has a value
    assert "; sequences = " not in of([row(0, 1.5)], tables(SPEC, **some)).text
    counted = {"method.sequences": {"from": 4, "to": 8, "count": 2}}
    assert "; sequences = " not in of([row(0, 1.5)], tables(SPEC, **counted)).text


SPEEDS = st.lists(st.floats(0.1, 9.0), min_size=12, max_size=12)
GRID = tables(SPEC, **{"method.sequences": [1, 8], "method.draft_length": [1, 2, 3]})


@given(SPEEDS, st.integers(0, 10**6), st.floats(0.01, 100))
def test_verdict_ignores_row_order_and_time_unit(speeds: list[float], seed: int, unit: float) -> None:
    """Also by brute force: for each condition the largest speed-up, or plain decoding."""
    rows = [row(at, speeds[at], view) for at in range(6) for view in ("formula", "paths")]
    found = of(rows, GRID)
    random.Random(seed).shuffle(rows)
    scaled = [each | {"tpot_layers": each["tpot_layers"] * unit} for each in rows]
    assert of(rows, GRID) == of(scaled, GRID) == found
    for answer, own in zip(found.answers, (speeds[:3], speeds[3:6]), strict=True):
        assert answer.best is not None
        assert answer.best.speedup == max(own)
        assert answer.best.label == f"speculative, draft_length {1 + own.index(max(own))}"
        assert answer.document()["speedup"] == max(1.0, *own)
        assert (answer.wins == "plain decoding") == (max(own) < 1)
    assert "\n" not in found.text
    json.dumps(found.document(), allow_nan=False)


OWN = """
scenario = { name = "own", tokens = 32, views = ["formula"] }
method = { name = "speculative", layers = 24 }
outcomes = { kind = "iid", acceptance_rate = 0.8 }
cost = { kind = "roofline", device = "a100", shape = "opt-1.3b", draft_shape = "opt-125m" }
sweep = { "method.draft_length" = [1, 3] }
"""


def test_verdict_is_first_in_every_output(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    said = ["run", str(path), "--no-figures", "-o", str(tmp_path / "run")]
    first = CliRunner().invoke(app, said).stdout.splitlines()[0]
    assert first.startswith("Fastest: speculative, draft_length 3: ")
    assert " over plain decoding on the same devices; " in first
    assert first.endswith("; kernels only: the engine's overhead is not included")
    assert (tmp_path / "run" / "summary.txt").read_text().splitlines()[0] == first
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"]
    assert kept["text"] == first
    table = pl.read_parquet(tmp_path / "run" / "results.parquet")
    assert kept["speedup"] == table["speedup"].max()
    shown = CliRunner().invoke(app, [*said, "--resume", "--json"])
    assert json.loads(shown.stdout)["verdict"] == kept


def test_every_bundled_scenario_has_a_verdict() -> None:
    """For a single condition the sentence names the row with the shortest time."""
    for name in ("compare", "compare-lossy", "hardware-compare"):
        said = sweep.resolve(name, views=["formula"])
        table = sim.run(said)
        found = verdict.of(table, said)
        times = table["tpot_ms"] if "tpot_ms" in table.columns else table["tpot_layers"]
        assert found.answers
        if name != "hardware-compare":  # of a single condition
            assert found.answers[0].best.speedup == pytest.approx(table["speedup"][times.arg_min()])


def test_bounds_are_scaled_with_the_speed_up() -> None:
    """The time of plain decoding depends on the devices: speed-ups and bounds are over the fastest plain decoding."""
    rows = [
        row(0, 1.2, tensor_parallel=1, reserved_units=1.0, tpot_ms=20 / 1.2, **ON_HARDWARE, **spread(1.1, 1.3, "input_")),
        row(1, 1.5, tensor_parallel=4, reserved_units=4.0, tpot_ms=8 / 1.5, **ON_HARDWARE, **spread(1.4, 1.7, "input_")),
    ]
    assert bounds(rows) == pytest.approx((1.5, 1.4, 1.7))
    slow = [rows[0] | {"tpot_ms": 8 / 1.2}, rows[1] | {"tpot_ms": 16 / 1.5, "speedup_input_high": 1.7}]
    assert bounds(slow) == pytest.approx((1.2, 1.1, 1.3))
    slow[0] |= {"tpot_ms": 8 / 0.1, "speedup": 0.1}
    slow[1] |= {"tpot_ms": 16 / 6, "speedup": 6.0, "speedup_input_high": 7.0}
    assert bounds(slow) == pytest.approx((3.0, 0.7, 3.5))


def test_condition_names_only_keys_that_differ() -> None:
    """The batching is not named if it follows from the number of sequences; it is named if these numbers are equal."""
    static = SPEC | {"sequences": 8, "batching": "static"}
    assert conditions(SPEC, static) == [{"sequences": 1}, {"sequences": 8}]
    assert conditions(SPEC | {"sequences": 8}, static) == [{"batching": "continuous"}, {"batching": "static"}]
    assert conditions(SPEC, SPEC | {"sequences": 8}, static) == [
        {"sequences": 1, "batching": "continuous"}, {"sequences": 8, "batching": "continuous"},
        {"sequences": 8, "batching": "static"},
    ]  # fmt: skip
    assert conditions(SPEC, SPEC | {"sequences": 1, "batching": "static", "draft_length": 2}) == [{}], "of one there is one way"
    two = SPEC | {"sequences": 2}
    assert conditions(two, two | {"batching": "static"}) == [{"batching": "continuous"}, {"batching": "static"}]


def conditions(*methods: dict[str, Any]) -> list[dict[str, Any]]:
    found = of([row(number, 1.5) for number in range(len(methods))], tables(*methods))
    return [dict(answer.at) for answer in found.answers]


def bounds(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Speed-up and bounds of the fastest on one device or four."""
    (condition,) = of(rows, tables(SPEC, **{"cost.tensor_parallel": [1, 4]})).answers
    assert condition.best is not None
    return condition.best.speedup, condition.best.low, condition.best.high


def test_one_condition_with_plain_decoding_fastest() -> None:
    found = of([row(0, 1.5), row(1, 0.9)], tables(SPEC, **{"method.sequences": [1, 8]}))
    assert "1: speculative, draft_length 3 (1.50x)" in found.text
    assert "8: plain decoding (best other choice 0.90x)" in found.text


def test_parameter_of_one_method_does_not_label_another() -> None:
    other = {"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 2}
    swept = {"method.speculative.draft_length": [1, 2]}
    rows = [row(at, speed, method=name) for at, (speed, name) in
            enumerate(((1.5, "speculative"), (1.2, "speculative"), (1.1, "ppd"), (1.1, "ppd")))]  # fmt: skip
    (answer,) = of(rows, tables(SPEC, other, **swept)).answers
    assert answer.best is not None
    assert answer.best.label == "speculative, draft_length 1"
    (answer,) = of([each | {"speedup": 2.0 - each["speedup"]} for each in rows], tables(SPEC, other, **swept)).answers
    assert answer.best is not None
    assert answer.best.label == "ppd, exit_layer 20, candidates 2"


def test_kernels_only_is_mentioned_if_a_condition_has_no_choice() -> None:
    """Only plain decoding has a value at the second load."""
    said = tables(PLAIN, SPEC, **{"method.sequences": [1, 8]})
    real = {"cost_source": "measured", "cost_missing": "step"}
    rows = [row(0, 1.0, method="autoregressive", **real), row(1, 1.0, method="autoregressive", **real), row(2, 1.5, **real)]
    found = of([*rows, row(3, None, **real)], said)
    assert [answer.best is None for answer in found.answers] == [False, True]
    assert found.text.endswith("; kernels only: the engine's overhead is not included")


def test_reserved_units_default_to_tensor_parallel() -> None:
    rows = [
        {name: value for name, value in row(at, 1.5 - at / 10, tensor_parallel=1 + at).items() if name != "reserved_units"}
        for at in (0, 1)
    ]
    (answer,) = of(rows, tables(SPEC, **{"cost.tensor_parallel": [1, 2]})).answers
    assert {each.label.partition(" on ")[2] for each in (answer.best, *answer.ties) if each} <= {"1 unit", "2 units"}
    assert answer.best is not None
    assert " on " in answer.best.label


def test_interval_has_enough_digits_to_differ() -> None:
    ends = {(1.20, 1.22): "1.20 to 1.22", (1.211, 1.2141): "1.211 to 1.214", (1.21111, 1.21131): "1.2111 to 1.2113",
            (1.211111, 1.211112): "1.21 to 1.21"}  # fmt: skip
    for (low, high), said in ends.items():
        assert f"(input uncertainty {said})" in of([row(0, (low + high) / 2, **spread(low, high, "input_"))], tables(SPEC)).text
    small = of([row(0, 0.0123, **spread(0.01231, 0.01229, "input_"))], tables(SPEC))
    assert "0.0123x (input uncertainty 0.01229 to 0.01231)" in small.text


def test_json_of_fastest_plain_decoding_has_no_bounds() -> None:
    (lost,) = of([row(0, 0.9, **spread(0.8, 0.95, "input_"))], tables(SPEC)).document()["conditions"]
    assert lost == {
        "at": {}, "best": "plain decoding", "speedup": 1.0, "low": None, "high": None, "tied_with_plain": False, "ties": [],
        "exact": True, "next": {"best": "speculative, draft_length 3", "speedup": 0.9},
    }  # fmt: skip
    (won,) = of([row(0, 1.2, exact=False, **spread(1.1, 1.3, "input_"))], tables(SPEC)).document()["conditions"]
    assert won == {
        "at": {}, "best": "speculative, draft_length 3", "speedup": 1.2, "low": 1.1, "high": 1.3, "tied_with_plain": False,
        "ties": [], "exact": False, "next": None,
    }  # fmt: skip
    (even,) = of([row(0, 1.0, **spread(0.9, 1.1, "input_"))], tables(SPEC)).document()["conditions"]
    assert (even["best"], even["tied_with_plain"], even["next"]) == ("speculative, draft_length 3", True, None)


def test_boolean_values_are_printed_as_yes_and_no() -> None:
    swept = tables({"name": "bild", "layers": 40}, **{"cost.busy": [True, False]})
    found = of([row(0, 1.5, method="bild"), row(1, 0.9, method="bild")], swept)
    assert "yes: bild" in found.text
    assert "no: plain decoding" in found.text


def test_rows_with_different_time_units_are_compared_by_ratio() -> None:
    """Plain decoding takes different times in two rows on one device, so times on four devices cannot be compared either."""
    said = tables(SPEC, SPEC | {"draft_length": 5}, **{"cost.tensor_parallel": [1, 4]})
    each = [(1.9, 1, 5.0), (1.2, 4, 0.1), (1.6, 1, 1.0), (1.1, 4, 0.1)]
    rows = [
        row(at, speed, tensor_parallel=tensor_parallel, reserved_units=tensor_parallel, tpot_layers=time)
        for at, (speed, tensor_parallel, time) in enumerate(each)
    ]
    (answer,) = of(rows, said).answers
    assert answer.best is not None
    assert (answer.best.label, answer.best.speedup, answer.plain) == (
        "speculative, draft_length 3 on 1 unit", 1.9, "plain decoding",
    )  # fmt: skip


def test_methods_without_a_value_are_named() -> None:
    """Policies that depend on the decoded sequence have no closed form: the fastest of the others may not be the fastest."""
    given = {
        "scenario": {"name": "some", "tokens": 8, "views": ["formula"]},
        "method": [
            {"name": "speculative", "layers": 4, "draft_length": 2}, {"name": "adaptive", "layers": 4, "policy": "gradient"},
        ],
        "outcomes": {"kind": "iid", "acceptance_rate": 0.9}, "cost": {"cost_ratio": 0.1},
    }  # fmt: skip
    text = verdict.of(sim.run(given), given).text
    assert "; some points have no value in these views and are not compared: adaptive; " in text
