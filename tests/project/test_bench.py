"""Each benchmark runs, and its two sides do the same work. How long they take is not a test's business."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.outcomes import random_streams
from tests.bench import events, formula, grids, history, paths, peers, speculative, steps
from tests.bench.__main__ import THEMES, main, select
from tests.bench.measure import FEWEST, Benchmark, Result, compare, peak_rss

TINY = [benchmark for theme in THEMES for benchmark in theme.benchmarks(tiny=True)]
MATCHES = st.lists(st.booleans(), min_size=1, max_size=12)


SLOW = {"cli-run": [pytest.mark.slow], "cli-advise": [pytest.mark.slow]}


@pytest.mark.parametrize("benchmark", [pytest.param(one, id=one.name, marks=SLOW.get(one.name, [])) for one in TINY])
def test_every_benchmark_runs(benchmark: Benchmark) -> None:
    if benchmark.missing:
        pytest.skip(benchmark.missing)
    (result,) = compare([benchmark], repeats=2)
    assert len(result.ratios) == (1 if benchmark.once else 2)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in result.ratios)
    assert (result.met is None) == (benchmark.target is None)


@given(MATCHES)
def test_simpy_by_hand_takes_the_same_time(matches: list[bool]) -> None:
    time = events.LAYERS * len(matches) - (events.LAYERS - events.EXIT_LAYER) * sum(matches[:-1])
    assert events.ours(matches) == events.ours(matches, per_layer=True) == time
    assert events.minimal(matches) == events.with_units(matches) == time


@given(MATCHES)
def test_events_are_counted_one_by_one(matches: list[bool]) -> None:
    late, subs = events.LAYERS - events.EXIT_LAYER, events.CANDIDATES
    # Passes that nothing else can begin or end before need no event, and sub-processes with a pass meanwhile are made together.
    assert events.counted(lambda: events.ours(matches)) == 0
    # A promoted process is at its exit layer already: a head alone, one event, instead of the layers before it.
    layers = len(matches) * (events.LAYERS + subs * late) - sum(matches[:-1]) * (events.EXIT_LAYER - 1)
    assert events.counted(lambda: events.ours(matches, per_layer=True)) == layers


@given(MATCHES)
def test_by_hand_and_bare_loops_take_the_simulated_time(matches: list[bool]) -> None:
    for name, pair in steps.pairs(2, len(matches)).items():
        for each in pair.inputs:
            time = pair.ours(each)
            assert pair.by_hand(each) == pytest.approx(time, rel=1e-12), name
            assert steps.bare_loop(pair.times(each)) == pytest.approx(time, rel=1e-12), name


def test_paths_read_every_random_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    tiles = random_streams.tiles

    def spy(*arguments: Any) -> object:
        asked.append(arguments)
        return tiles(*arguments)

    monkeypatch.setattr(random_streams, "tiles", spy)
    paths.draw(tokens=40, block=3)
    paths.walk(paths.LITERAL, tokens=40, block=3)
    paths.walk(paths.FLAT, tokens=40, block=3)
    assert asked == [(0, "match", 3, 39)] * 3


def test_the_benchmarked_path_is_the_simulated_one() -> None:
    time, _ = paths.walk(paths.LITERAL, tokens=20, block=0)
    matches = np.concatenate([tile < events.MATCH_RATE for tile in random_streams.tiles(0, "match", 0, 19)])[:, :50]
    assert time[:50].tolist() == [events.ours([*sequence, False]) for sequence in matches.T.tolist()]


def test_streaming_sums_are_those_of_the_blocks_together() -> None:
    time, busy = (np.concatenate(both) for both in zip(*(paths.walk(paths.FLAT, 9, block) for block in (0, 1)), strict=True))
    streamed = paths.stream(paths.FLAT, tokens=9, sequences=random_streams.BLOCK + 1)
    direct = [values.mean() for values in (time, busy, time**2, busy**2, time * busy, busy / time)]
    assert streamed == pytest.approx(direct, rel=1e-12)


def test_peak_memory_is_the_fresh_process_own() -> None:
    ballast = np.ones(50_000_000)  # 400 MB that are ours, and none of the child's
    assert 80 < peak_rss("b'x' * 80_000_000") < 160
    assert ballast[-1] == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_the_bare_expressions_are_the_formulas(rates: list[float]) -> None:
    p = np.array(rates)
    np.testing.assert_allclose(formula.latency(p), formula.bare_latency(p), rtol=1e-12)
    np.testing.assert_allclose(formula.compute(p), formula.bare_compute(p), rtol=1e-12)


def test_the_document_holds_every_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--json", "--only", "formula-latency", "--repeats", "3"])
    speed, memory = json.loads(capsys.readouterr().out)["benchmarks"]
    assert (speed["name"], len(speed["ours"]), speed["target"]) == ("formula-latency", 3, {"at_least": 0.5})
    assert (memory["name"], len(memory["ours"]), memory["target"]) == ("formula-latency-memory", 1, {"at_most": 3})


def test_the_table_says_whether_targets_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--only", "formula-compute-memory", "--repeats", "1"])
    out = capsys.readouterr().out
    assert "formula-compute-memory" in out
    assert "≤ 3" in out
    assert "yes" in out


def test_a_missing_benchmark_is_neither_met_nor_missed() -> None:
    absent = Benchmark("absent", "s", lambda: 1 / 0, lambda: 1 / 0, "nothing", 1, missing="not available")
    assert [result.met for result in compare([absent], 1)] == [None]
    assert Result(absent, [], []).ratios == []


@pytest.mark.parametrize(("words", "named"), [("paths", 4), ("events-by-hand", 2), ("formula-latency-memory", 1)])
def test_names_select(words: str, named: int) -> None:
    assert len(select(TINY, [words])) == named


def test_an_unknown_name_is_told_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny", "--only", "evnts-pass"])
    assert "did you mean events-pass?" in capsys.readouterr().err


def test_real_sides_write_the_same() -> None:
    pytest.importorskip("transformers")
    from tests.bench import real

    for name in ("plain", "speculative", "tree"):
        assert real.as_library(name, 24)[0, real.PROMPT :].tolist() == real.ours(name, 24), name
    log = real.log(6, 2)
    assert log["token"].to_list() == real.library(6, 2)[:, real.PROMPT :].flatten().tolist()


def test_only_the_sides_with_a_draft_make_passes_of_it() -> None:
    pytest.importorskip("transformers")
    from tests.bench import real

    passes = list[object]()
    draft = real._models()["draft"]
    hook = draft.modules[0].register_forward_hook(lambda *_: passes.append(_))
    try:
        for name in real.SETTINGS:
            for side in (real.ours, real.as_library):
                passes.clear()
                side(name, 6)
                assert bool(passes) == ("plain" not in name), (name, side)
    finally:
        hook.remove()


def test_sampled_real_sides_draw_anew_in_each_run() -> None:
    pytest.importorskip("transformers")
    from tests.bench import real

    for name in ("plain-sampled", "speculative-sampled"):
        for side in (real.ours, lambda *run: real.as_library(*run)[0, real.PROMPT :].tolist()):
            first, again, other = side(name, 16, 1), side(name, 16, 1), side(name, 16, 2)
            assert first == again != other
            assert len(first) == 16


def test_own_time_of_a_real_decoding_is_a_part_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by a second per call: passes and reads take a second each, as does what is between them."""
    pytest.importorskip("transformers")
    from tests.bench import real
    from tests.support.fake_clocks import SteppedClock

    monkeypatch.setattr(real, "thread_time", SteppedClock(step=1.0).perf_counter)
    timed = real.OwnTime("plain", 3)
    calls = 1 + 3 + 3  # the prompt, a pass and a read for each token
    for first, second in ((timed.own, timed.whole), (timed.whole, timed.own)):
        assert {first(), second()} == {1e3 * (calls + 1), 1e3 * (2 * calls + 1)}


# --- Peers and grids ---


def at_rounds(survivors: list[int], tokens: int) -> Iterator[int]:
    """Accepted tokens of the drafts of one speculative decoding, in turn."""
    at = 0
    while at < tokens:
        yield survivors[at]
        at += min(survivors[at], speculative.DRAFT_LENGTH, tokens - at - 1) + 1


@given(st.lists(st.integers(0, speculative.DRAFT_LENGTH), min_size=1, max_size=20))
def test_loop_of_speculative_decoding_takes_the_simulated_time(survivors: list[int]) -> None:
    tokens = len(survivors)
    time = peers.speculative_loop(at_rounds(survivors, tokens), tokens, speculative.DRAFT_LENGTH, speculative.COST_RATIO)
    assert time * speculative.LAYERS == pytest.approx(speculative.minimal(survivors), rel=1e-12)


def test_loop_of_dsi_takes_the_time_of_its_paths() -> None:
    tokens = 30
    kept = np.concatenate([*speculative.LAW.sample(random_streams.tiles(0, "accept", 0, tokens - 1))])
    times = peers.dsi_walk(tokens, 0).time
    for number in range(100):
        rejected = np.flatnonzero(~kept[:, number]).tolist()
        runs = np.diff([-1, *rejected, tokens]) - 1
        time = peers.dsi_loop(iter(runs.tolist()), tokens, peers.COST_RATIO)
        assert time * peers.LAYERS == pytest.approx(times[number], rel=1e-12)


@given(st.floats(0.1, 0.95), st.integers(1, 40))
def test_loop_of_dsi_with_free_drafts_counts_rejections(rate: float, tokens: int) -> None:
    accepted = peers.accepted_lengths(rate, tokens)
    positions = np.cumsum(np.array(accepted) + 1)
    assert peers.dsi_loop(iter(accepted), tokens, 0.0) == np.count_nonzero(positions < tokens) + 1


@pytest.mark.parametrize("name", grids.GRIDS)
def test_grid_has_a_row_for_every_point(name: str) -> None:
    tables = grids.scenario(name, tiny=True)
    assert grids.run(tables) == 2 ** len(tables["sweep"])


# --- Time and history ---


@pytest.mark.parametrize(("seconds", "taken"), [(0.0, FEWEST), (8.0, 5), (100.0, 7)])
def test_a_benchmark_stops_when_its_time_is_spent(seconds: float, taken: int) -> None:
    now = iter(range(1000))
    one = Benchmark("a", "s", lambda: 1.0, lambda: 2.0, "two", None)
    [result] = compare([one], 7, seconds, lambda: 2.0 * next(now))  # each repeat takes 2 s by this clock
    assert len(result.ratios) == taken


NUMBERS = st.one_of(st.none(), st.floats(1e-6, 1e9).map(lambda value: float(f"{value:.4g}")))
WORDS = st.text("ab, 'é\"", max_size=5)
RECORDS = st.builds(
    history.Record, WORDS, WORDS, WORDS, WORDS, WORDS, WORDS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS,
    st.one_of(st.none(), st.integers(1, 9)), WORDS, WORDS, WORDS,
)  # fmt: skip


@given(st.lists(RECORDS, max_size=4))
def test_records_are_read_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, records: list[history.Record]) -> None:
    path = tmp_path_factory.mktemp("history") / "history.csv"
    history.write(records, path)
    assert history.read(path) == records


def test_a_record_replaces_only_that_of_its_version_day_and_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    a, b = (Benchmark(name, "s", lambda: 1.0, lambda: 1.0, "one", 1) for name in "ab")
    history.record([Result(a, [1.0], [2.0]), Result(b, [1.0], [4.0])], path, "2026-01-01")
    history.record([Result(a, [3.0], [2.0])], path, "2026-01-02")
    history.record([Result(a, [5.0], [2.0]), Result(b, [], [])], path, "2026-01-01")
    found = {(each.benchmark, each.date): each.ratio for each in history.read(path)}
    assert found == {("a", "2026-01-01"): 2.5, ("b", "2026-01-01"): 0.25, ("a", "2026-01-02"): 1.5}
    [machine] = {each.machine for each in history.read(path)}
    assert "cores" in machine


def test_committed_history_is_of_benchmarks_and_names_its_sources() -> None:
    names = {benchmark.name for benchmark in TINY}
    for each in history.read():
        assert each.benchmark in names
        assert each.source in (history.MEASURED, history.STATED)
        if each.source == history.STATED:
            assert (each.lower_quartile, each.repeats, each.machine) == (None, None, "")
            assert each.ours is not None or each.ratio is not None
        else:
            assert float(f"{each.lower_quartile}") <= float(f"{each.ratio}") <= float(f"{each.upper_quartile}")
            assert "" not in (each.machine, each.libraries)


def test_page_and_text_hold_every_record() -> None:
    records, page = history.read(), history.page()
    for each in records:
        assert history.cell(each) in page
        assert history.cell(each) in history.text(records)
    assert page.count("\n| ") == len(history.rows(records)) + len(history.columns(records)) + 4
