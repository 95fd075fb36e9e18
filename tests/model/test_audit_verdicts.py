"""Verdicts on claims: what is simulated or measured is never called impossible, what exceeds a bound always is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from model.architectures.draft_heads import head_of
from model.architectures.published_shapes import preset
from model.audit.claims import SpeedupClaim, of_rows
from model.audit.peak_times import PeakTimes, bytes_read
from model.audit.verdicts import CONTRADICTORY, IMPOSSIBLE, KINDS, NEEDS, NOT_DECIDABLE, PLAUSIBLE, ClaimVerdict, audit
from model.engines import law_tables
from model.hardware.devices import device
from model.methods import registry
from model.methods.claim_bounds import TERMS
from model.published import table_claims

few = settings(max_examples=40, deadline=None)
SEVERITY = (PLAUSIBLE, NEEDS, IMPOSSIBLE)
EAGLE = {"method": "EAGLE-3", "model": "llama-3.1-8b", "gpu": "h100"}


def verdict(**columns: Any) -> ClaimVerdict:
    [found] = audit(of_rows([columns]))
    return found


def exact(value: float) -> str:
    """A number with all its digits: its rounding does not matter."""
    return f"{value:.15f}"


@st.composite
def claims(draw: st.DrawFn) -> dict[str, Any]:
    """Claims of any method with some of its terms, with and without model, GPU and plain time."""
    name = draw(st.sampled_from([name for name in registry.names() if name != registry.PLAIN]))
    rule = registry.parameters(name).CLAIMS
    assert rule is not None
    found: dict[str, Any] = {"method": name}
    for term in rule.terms:
        if term in rule.required or draw(st.booleans()):
            low, high = TERMS[term].low, min(TERMS[term].high, 6.0)
            whole = term in ("draft_length", "draft_passes", "layers", "exit_layer")
            found[term] = {"layers": 32}.get(term, draw(st.integers(1, 6))) if whole else exact(draw(st.floats(low, high)))
    if draw(st.booleans()):
        found |= {"model": "llama-3.1-8b", "gpu": "h100", "batch": draw(st.sampled_from([1, 64, 512]))}
        if draw(st.booleans()):
            found["plain_tpot_ms"] = draw(st.sampled_from([5.5, 12, 40]))
    return found


# --- Order ---


@given(claim=claims(), first=st.floats(0.5, 8), more=st.floats(0, 8))
@few
def test_verdict_is_monotone_in_the_speed_up(claim: dict[str, Any], first: float, more: float) -> None:
    low, high = (verdict(**claim, speedup=exact(each)) for each in (first, first + more))
    if {NOT_DECIDABLE, CONTRADICTORY} & {low.kind, high.kind}:
        assert low.kind == high.kind
        return
    assert SEVERITY.index(low.kind) <= SEVERITY.index(high.kind)
    for name in ("needed_acceptance", "needed_plain_tpot_ms"):
        values = [getattr(each, name) for each in (low, high)]
        if None not in values:
            assert values[0] <= values[1] * (1 + 1e-6)
    for name in ("bound_free", "bound_draft", "bound_batch", "bound"):
        assert getattr(low, name) == getattr(high, name), "bounds do not depend on the claimed speed-up"


@given(claim=claims(), excess=st.floats(1e-3, 3))
@few
def test_a_claim_above_the_bound_is_always_impossible(claim: dict[str, Any], excess: float) -> None:
    bound = verdict(**claim, speedup=exact(1.5)).bound
    if bound is None:
        return
    for factor, possible in ((1 + excess, False), (1 / (1 + excess), True)):
        if 1e-3 <= bound * factor <= 1e4:
            found = verdict(**claim, speedup=exact(bound * factor))
            contradicts = found.kind == CONTRADICTORY or "plain TPOT" in (found.decided_by or "")
            assert (found.kind != IMPOSSIBLE) == possible or contradicts, found
            assert possible or found.inequality
            assert found.kind != IMPOSSIBLE or found.verdict == IMPOSSIBLE


@given(claim=claims())
@few
def test_bounds_fall_from_free_drafts_to_the_stated_batch(claim: dict[str, Any]) -> None:
    found = verdict(**claim, speedup=2)
    values = [each for each in (found.bound_free, found.bound_draft, found.bound_batch) if each is not None]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(values))


@given(claim=claims(), speedup=st.floats(0.5, 9))
@few
def test_the_bound_that_decides_is_in_the_sentence_and_on_the_side_of_the_verdict(claim: dict[str, Any], speedup: float) -> None:
    found = verdict(**claim, speedup=exact(speedup))
    if found.kind == NOT_DECIDABLE:
        return
    assert found.decided_by
    if found.deciding_bound is None:
        assert found.kind in (NEEDS, PLAUSIBLE)
        assert found.bound is None
        return
    if "[ms]" not in found.decided_by:
        assert f"{found.deciding_bound:.4g}, the {found.decided_by}" in found.sentence
    if found.kind == PLAUSIBLE:
        assert speedup <= found.deciding_bound * (1 + 1e-6)
        assert found.bound is None or found.deciding_bound <= found.bound * (1 + 1e-6)
    if found.kind == IMPOSSIBLE and "[ms]" not in found.decided_by:
        assert found.deciding_bound == found.bound < speedup


def test_each_bound_decides_where_it_should() -> None:
    draft = {"method": "speculative", "model": "llama-3.1-70b", "draft": "llama-3.1-8b", "AL": exact(3.5), "K": 4}
    by_bytes = bytes_read(preset("llama-3.1-8b")) / bytes_read(preset("llama-3.1-70b"))
    bound = 3.5 / (1 + 4 * by_bytes)
    for speedup, kind, name, value in (
        (bound - 0.01, PLAUSIBLE, "draft's bytes at full bandwidth", bound), (bound + 0.01, NEEDS, "draft's bytes at full", bound),
        (3.6, IMPOSSIBLE, "largest possible with free drafts", 3.5),
    ):  # fmt: skip
        found = verdict(**draft, speedup=exact(speedup))
        assert found.kind == kind
        assert name in str(found.decided_by)
        assert found.deciding_bound == pytest.approx(value, rel=1e-6)
    assert verdict(**draft, speedup=exact(bound + 0.01)).needs == "cost_ratio"
    at_peaks = verdict(**EAGLE, AL=exact(4), K=5, batch=256, speedup="2.0")
    assert (at_peaks.needs, at_peaks.decided_by) == ("plain_tpot_ms", "formula at GPU's peaks, batch 256")
    assert at_peaks.deciding_bound == pytest.approx(at_peaks.bound_batch)
    unstated = verdict(method="speculative", K=4, speedup=2)
    assert (unstated.deciding_bound, unstated.decided_by) == (5, "formula with free drafts, acceptance 1")
    at_gpu = verdict(method="speculative", model="llama-3.1-8b", gpu="h100", AL=exact(3), speedup=2)
    assert (at_gpu.needs, at_gpu.decided_by) == ("cost_ratio", "formula at GPU's peaks, batch 1, free drafts")
    rounded = verdict(method="n-gram", AL="1.8", speedup="2.0")
    assert "by rounding alone" in str(rounded.decided_by)


def test_a_head_that_drafts_in_one_pass_reads_its_bytes_once() -> None:
    claim = {"model": "llama-3.1-8b", "AL": exact(3), "K": 6, "speedup": exact(1.5)}
    ratio = bytes_read(head_of("p-eagle", preset("llama-3.1-8b"))) / bytes_read(preset("llama-3.1-8b"))
    assert verdict(method="P-EAGLE", **claim).bound_draft == pytest.approx(3 / (1 + ratio))
    assert verdict(method="P-EAGLE", **claim, draft_passes=2).bound_draft == pytest.approx(3 / (1 + 2 * ratio))


@pytest.mark.parametrize("method", ["DFlash", None])
def test_methods_that_are_not_known_keep_to_the_tokens_of_a_pass(method: str | None) -> None:
    at = {"method": method, "c": "0.5", "AL": "3.20"}
    assert verdict(**at, speedup="3.40").kind == IMPOSSIBLE
    possible = verdict(**at, speedup="3.1")
    assert (possible.kind, possible.deciding_bound) == (PLAUSIBLE, pytest.approx(3.21))
    assert "cost ratio not used" in possible.sentence
    assert "without a known method" in possible.sentence
    assert verdict(method=method, K=4, speedup="5.2").kind == IMPOSSIBLE
    assert verdict(method=method, alpha="0.5", speedup="2.2").kind == IMPOSSIBLE
    assert verdict(method=method, K=4, AL="5.3").kind == CONTRADICTORY
    assert verdict(method=method, match_rate="0.5", speedup=2).kind == NOT_DECIDABLE
    batch = {"model": "llama-3.1-8b", "gpu": "h100", "batch": 256, "AL": 4, "K": 5}
    assert verdict(method=method, **batch, speedup=2).needs == "plain_tpot_ms"


# --- What a claim needs ---


@given(claim=claims(), speedup=st.floats(1.05, 4))
@few
def test_the_needed_term_reproduces_the_speed_up(claim: dict[str, Any], speedup: float) -> None:
    """A claim with the needed value is possible, and one with a slightly worse value is not without another need.

    Needs are computed from the numbers as they are printed, verdicts in favour of rounded ones: here all are exact.
    """
    if "plain_tpot_ms" in claim:
        claim = claim | {"plain_tpot_ms": exact(float(claim["plain_tpot_ms"]))}
    found = verdict(**claim, speedup=exact(speedup))
    if found.kind != NEEDS or found.needs in (None, "plain_tpot_ms", "draft_length", "exit_layer"):
        return
    assert found.needed is not None
    term = TERMS[found.needs]
    if not term.low + 1e-6 < found.needed < term.high * (1 - 1e-3):
        return
    group = next(group for group in registry.parameters(claim["method"]).CLAIMS.needs if found.needs in group)
    others = {name: value for name, value in claim.items() if name not in group}
    better, worse = (
        verdict(**others, **{found.needs: exact(found.needed * (1 + sign * term.better * 1e-4))}, speedup=exact(speedup))
        for sign in (1, -1)
    )
    assert better.needs != found.needs, better
    assert worse.kind != PLAUSIBLE, worse
    at_it = verdict(**others, **{found.needs: exact(found.needed)}, speedup=exact(speedup))
    if "plain_tpot_ms" not in claim and at_it.bound_free is not None and "cost_ratio" not in others and found.needs != "cost_ratio":
        assert at_it.bound_free == pytest.approx(speedup, rel=1e-4)


@given(rate=st.floats(0.3, 0.9), length=st.integers(1, 8), speedup=st.floats(1.05, 6))
@few
def test_needed_acceptance_and_cost_ratio_solve_theorem_3_8(rate: float, length: int, speedup: float) -> None:
    from model.methods.speculative import theory

    found = verdict(method="speculative", acceptance_rate=exact(rate), draft_length=length, speedup=exact(speedup))
    if found.needed_acceptance is not None:
        assert float(theory.speedup(found.needed_acceptance, length, 0.0)) == pytest.approx(speedup, rel=1e-6)
    else:
        assert speedup > length + 1
    if found.needed_cost_ratio is not None:
        assert float(theory.speedup(rate, length, found.needed_cost_ratio)) == pytest.approx(speedup, rel=1e-5)
    else:
        assert speedup > float(theory.expected_tokens(rate, length)) * (1 - 1e-6)


@given(batch=st.integers(1, 512), speedup=st.floats(1.2, 3.5), length=st.integers(4, 8))
@few
def test_the_needed_baseline_makes_the_claim_just_possible(batch: int, speedup: float, length: int) -> None:
    claim = EAGLE | {"AL": exact(4), "K": length, "batch": batch, "speedup": exact(speedup)}
    found = verdict(**claim)
    if found.needs != "plain_tpot_ms":
        assert found.kind == PLAUSIBLE
        assert found.bound_batch >= speedup * (1 - 1e-9)
        return
    needed, limit = found.needed, found.plain_tpot_limit_ms
    assert needed > limit
    assert verdict(**claim, plain_tpot_ms=exact(needed * 1.001)).kind == PLAUSIBLE
    assert verdict(**claim, plain_tpot_ms=exact(max(needed * 0.999, limit))).kind != PLAUSIBLE


# --- Never impossible: what the project simulates, and what engines were measured to do ---


@pytest.mark.parametrize("kind", ["profile", "roofline"])
def test_simulated_speed_ups_on_a_gpu_are_never_impossible(kind: str) -> None:
    own = {"cost.device": "h100", "cost.shape": "llama-3.1-8b"} if kind == "roofline" else {}
    sweep: dict[str, Any] = {
        "method.sequences": [1, 64, 512], "method.draft_length": [1, 5], "outcomes.acceptance_rate": [0.3, 0.9],
        "cost.prompt": [512],
    }  # fmt: skip
    cost = {"cost.kind": kind, "cost.draft_shape": "llama-3.2-1b"}
    if kind == "profile":
        cost |= {"cost.profile": "h100-llama-3.1-8b", "cost.draft_profile": "h100-operations"}
    tables = {
        "scenario": {"name": "audited", "tokens": 128}, "method": [{"name": "speculative", "draft_length": 3}],
        "outcomes": {"kind": "iid", "acceptance_rate": 0.7},
    }  # fmt: skip
    frame = sim.run(tables, set={**cost, **own}, sweep=sweep, views=["formula"])
    assert frame.height == 12
    for row in frame.iter_rows(named=True):
        claim = {
            "method": "speculative", "model": "llama-3.1-8b", "gpu": "h100", "draft": "llama-3.2-1b", "batch": row["sequences"],
            "context": 512, "acceptance_rate": exact(row["acceptance_rate"]), "draft_length": row["draft_length"],
            "speedup": exact(row["speedup"]),
        }  # fmt: skip
        for plain in ({}, {"plain_tpot_ms": exact(row["tpot_ms"] * row["speedup"])}):
            assert verdict(**claim, **plain).kind != IMPOSSIBLE, row


@pytest.mark.parametrize(
    "scenario",
    ["compare", "compare-lossy", "pearl", "ssd", "bild", "early-exit", "ppd-forms", "speculative-adaptive", "hardware-compare"],
)
def test_speed_ups_of_bundled_scenarios_are_never_impossible(scenario: str) -> None:
    claimed = []
    for row in sim.run(scenario, set={"scenario.tokens": 64}, views=["formula"]).iter_rows(named=True):
        rule = registry.parameters(row["method"]).CLAIMS
        assert rule is not None
        terms = {name: exact(row[name]) if isinstance(row[name], float) else row[name] for name in rule.terms if name in row}
        if row["speedup"] is not None:
            claimed.append({"method": row["method"], "speedup": exact(row["speedup"]), **terms})
    assert claimed
    found = sim.audit(claimed)
    assert {*found["kind"]} <= {PLAUSIBLE, NEEDS}, found.filter(found["kind"] == IMPOSSIBLE)["sentence"].to_list()


def test_measured_cells_of_engines_are_never_impossible() -> None:
    """Published tables of vLLM, SGLang and TensorRT-LLM: their speed-ups over plain decoding of the same batch."""
    audited = decided = 0
    for name in law_tables.names():
        table = law_tables.table(name)
        cells = table.cells
        tokens = np.where(np.isnan(cells.mean_acceptance_length), 1.0, cells.mean_acceptance_length)
        seconds = cells.step_seconds(tokens) / tokens
        plain = {float(b): s for b, s, k in zip(cells.sequences, seconds, cells.draft_length, strict=True) if k == 0}
        for row in range(cells.size):
            batch = float(cells.sequences[row])
            if cells.draft_length[row] == 0 or batch not in plain:
                continue
            claim: dict[str, Any] = {"method": "speculative", "draft_length": int(cells.draft_length[row]), "batch": int(batch)}
            known = not math.isnan(cells.mean_acceptance_length[row])
            if known:
                claim["mean_acceptance_length"] = f"{cells.mean_acceptance_length[row]:.2f}"
            if table.kernels is not None:
                claim |= {"model": table.kernels.model, "gpu": table.kernels.gpu, "plain_tpot_ms": exact(1e3 * plain[batch])}
            found = verdict(**claim, speedup=exact(plain[batch] / seconds[row]))
            assert found.kind != IMPOSSIBLE, (name, found)
            audited, decided = audited + 1, decided + known
    assert audited >= 20
    assert decided >= 6


# --- Published tables ---


def test_impossible_rows_of_the_slides_are_found() -> None:
    kinds = {table: [each.kind for each in audit(of_rows(table_claims.claims(table)))] for table in table_claims.TABLES}
    assert kinds["deck-table-2"] == [NEEDS, IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE]
    assert kinds["deck-adaptive"] == [PLAUSIBLE, IMPOSSIBLE]
    assert {*kinds["deck-beam"]} == {PLAUSIBLE}
    assert IMPOSSIBLE not in kinds["ppd-table-3"] + kinds["bild-table-1"] + kinds["deck-hierarchy"]
    first, second = (found for found in audit(of_rows(table_claims.claims("deck-table-2")))
                     if found.source in ("Deck Table 2, EnDe, gamma 3", "Deck Table 2, EnDe, gamma 7"))  # fmt: skip
    assert first.verdict == "needs cost ratio <= 0.029"
    assert second.bound_free == pytest.approx(2.204, abs=5e-4)
    assert "possible if 0.55 is the draft acceptance rate" in second.sentence


def test_labels_of_skipdecode_are_impossible_beyond_rounding() -> None:
    rows = table_claims.claims("skipdecode-table-4")
    assert len(rows) == 24, "baselines are no claims"
    for row, found in zip(rows, audit(of_rows(rows)), strict=True):
        layers = preset(row["model"]).layers
        most = layers / (row["mean_layers"] - 0.1)  # one unit of the last digit
        assert (found.kind == IMPOSSIBLE) == (row["speedup"] - 0.1 > most * (1 + 1e-9)), row
    found = [each.kind for each in audit(of_rows(rows))]
    assert found.count(IMPOSSIBLE) >= 20


def test_rates_of_bild_give_the_cost_ratio_that_its_speed_up_needs() -> None:
    """The notes on the paper's tables say .386 to .408 for 1.85x at the rates of Figure 8."""
    needed = [verdict(method="bild", fallback_rate="0.11", rollback_rate=rate, draft_length=10, speedup="1.85").needed
              for rate in ("0.01", "0.0")]  # fmt: skip
    assert needed == pytest.approx([0.386, 0.408], abs=5e-4)


# --- Single verdicts ---


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"speedup": 2}, "not decidable: method missing"),
        ({"method": "ppd"}, "not decidable: speedup missing"),
        ({"method": "skipdecode", "mean_layers": 12, "speedup": 2}, "not decidable: layers missing"),
        ({"method": "speculative", "speedup": 2}, "needs acceptance >= 0.500"),
        ({"method": "speculative", "speedup": "0.9"}, "plausible"),
        ({"method": "ngram", "alpha": "0.8", "speedup": 3}, "plausible"),
        ({"method": "speculative", "alpha": "0.8", "K": 3, "speedup": 2}, "needs cost ratio <= 0.159"),
        ({"method": "speculative", "alpha": "0.5", "K": 3, "c": 0, "speedup": "1.95"}, "needs acceptance >= 0.526"),
        ({"method": "speculative", "AL": "4.2", "K": 3, "speedup": 2}, "contradictory"),
        ({"method": "speculative", "AL": "4.1", "K": 3, "speedup": 2}, "needs cost ratio <= 0.334"),
        ({"method": "ppd", "match_rate": "60%", "layers": 40, "exit_layer": 20, "speedup": "1.50"}, "impossible"),
        ({"method": "ppd", "layers": 40, "exit_layer": 20, "speedup": "1.5"}, "needs match rate >= 0.666"),
        ({"method": "early exit", "layers": 32, "exit_layer": 16, "speedup": "2.2"}, "impossible"),
        ({"method": "early exit", "layers": 32, "speedup": "2.0"}, "needs mean layers <= 16.0"),
        ({"method": "autoregressive", "speedup": "1.2"}, "impossible"),
        (EAGLE | {"AL": "3", "K": 3, "plain_tpot_ms": "2.0", "speedup": "1.5"}, "impossible"),
    ],
)
def test_verdicts_by_hand(columns: dict[str, Any], expected: str) -> None:
    found = verdict(**columns)
    assert found.verdict == expected
    assert found.kind in KINDS
    assert found.verdict.startswith(found.kind)
    assert found.sentence
    assert (found.missing is None) == (found.kind != NOT_DECIDABLE)
    assert (found.needed is None) == (found.kind != NEEDS)


def test_one_unit_of_the_last_digit_is_granted_and_no_more() -> None:
    terms = {"method": "ngram", "AL": "2.50"}
    assert verdict(**terms, speedup="2.52").kind == PLAUSIBLE  # 2.51 <= 2.51
    assert verdict(**terms, speedup="2.53").kind == IMPOSSIBLE
    assert verdict(method="ngram", AL="2.5", speedup="2.7").kind == PLAUSIBLE
    assert verdict(method="ngram", AL="3", speedup="4").kind == IMPOSSIBLE  # whole numbers count as printed to one decimal
    assert verdict(method="ngram", alpha="0.5", speedup="2.05").kind == PLAUSIBLE  # and rates to two: 2.04 <= 1/(1 - 0.51)
    assert verdict(method="ngram", alpha="0.5", speedup="2.06").kind == IMPOSSIBLE


def test_one_parallel_pass_drafts_all_tokens_at_the_price_of_one() -> None:
    terms = {"method": "speculative", "AL": exact(3), "K": 4, "c": exact(0.5), "speedup": 1.5}
    assert verdict(**terms).bound_draft == pytest.approx(3 / 3)
    assert verdict(**terms, draft_passes=1).bound_draft == pytest.approx(3 / 1.5)


def test_bounds_at_the_peaks_by_hand() -> None:
    """AL = 4 at K = 5 and batch 256: reading 15 GB of weights, arithmetic of 1536 tokens, five passes of a head of .9 GB."""
    target, draft, gpu = preset("llama-3.1-8b"), head_of("eagle3", preset("llama-3.1-8b")), device("h100")

    def reading(read: float) -> float:
        return (read - gpu.cache_bytes) / gpu.bandwidth

    plain = reading(bytes_read(target, 1, 256))
    arithmetic = 256 * 6 * 2 * (32 * target.layer_weights + target.head_weights) / gpu.rates["bfloat16"]
    drafting = 5 * max(reading(bytes_read(draft, 1, 256)), 256 * 2 * (draft.layer_weights + draft.head_weights) / 989.4e12)
    assert plain < arithmetic
    claim = EAGLE | {"AL": 4, "K": 5, "batch": 256, "speedup": "2.0"}
    found = verdict(**claim)
    assert found.bound_free == 4
    assert found.bound_draft == pytest.approx(4 / (1 + 5 * reading(bytes_read(draft, 1, 256)) / plain), rel=1e-6)
    assert found.bound_batch == pytest.approx(4 * plain / (arithmetic + drafting), rel=1e-6)
    assert found.plain_tpot_limit_ms == pytest.approx(1e3 * plain)
    assert found.needed_plain_tpot_ms == pytest.approx(2e3 * (arithmetic + drafting) / 4, rel=1e-6)
    assert verdict(**claim | {"speedup": "3.5"}, plain_tpot_ms="12.0").kind == IMPOSSIBLE


def test_sources_name_what_the_verdict_rests_on() -> None:
    found = verdict(**EAGLE, AL=3, K=4, speedup=2)
    assert [each.partition(":")[0] for each in found.sources[1:]] == ["shape of llama-3.1-8b", "peaks of h100"]
    assert found.sources[0].startswith("Theorem 3.8")
    assert "bfloat16, assumed" in found.sources[1]
    assert "assumed" not in verdict(**EAGLE, dtype="fp8", AL=3, K=4, speedup=2).sources[1]


# --- Times at the peaks ---


@given(name=st.sampled_from(["llama-3.1-8b", "qwen3-235b-a22b", "gpt-oss-20b", "deepseek-v3", "gemma-3-27b", "t5-large"]),
       batch=st.integers(1, 512), context=st.integers(0, 8192), width=st.floats(1, 9))  # fmt: skip
@few
def test_times_at_the_peaks_are_convex_and_never_fall_with_the_width(name: str, batch: int, context: int, width: float) -> None:
    times = PeakTimes(preset(name), device("h200"), batch, context)
    at, above = times.seconds(width), times.seconds(width + 1)
    assert 0 < at <= above
    assert 2 * times.seconds(width + 0.5) <= (at + above) * (1 + 1e-12)
    assert times.seconds(width) >= times.reading(width)
    assert PeakTimes(preset(name), device("h200"), batch, context, 4).seconds(1) <= times.seconds(1) / 4 * (1 + 1e-9)


def test_bytes_of_a_pass_are_weights_head_and_cache() -> None:
    shape = preset("llama-3.1-8b")
    weights = shape.layers * shape.layer_weight_bytes + shape.head_weights * 2
    assert bytes_read(shape, 1, 2, 10) == weights + 2 * 11 * shape.cache_bytes()
    one = PeakTimes(shape, device("h100"))
    assert one.moved(1) == bytes_read(shape) - device("h100").cache_bytes
    assert one.operations(3) == pytest.approx(3 * shape.operations(1, 0, heads=1), rel=1e-3)


def test_a_type_without_a_published_rate_is_granted_the_fastest() -> None:
    assert PeakTimes(preset("llama-3.1-8b"), device("t4")).rate == max(device("t4").rates.values())
    claim: SpeedupClaim = of_rows([{"model": "llama-3.1-8b", "dtype": "fp8", "gpu": "h100"}])[0]
    assert claim.shape is not None
    assert PeakTimes(claim.shape, device("h100")).rate == device("h100").rates["float8"]
