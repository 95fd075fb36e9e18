"""Times between the passes of several processes, or of streams of one GPU, and of passes that run concurrently.

Raw rows of runs over processes, and the rows of a profile's table that are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibrate.timing.single_pass import means, table_times
from model.hardware.profile import PROCESS_PROMPT
from model.interpret.simulated_answers import Answers
from model.logs.spans import main_process_seconds, overlap_with_other_units

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.untested_on_gpu.over_streams import Lanes
    from calibrate.workers.worker_pool import Pool

OVERHEADS = ("dispatch", "wake", "promotion", "scheduling")
"""Work between the passes of processes."""
MAIN_PASSES = ("main_alone", "main_concurrent")
"""Passes of the main process, while the others wait and while they run."""
SUBPROCESS_PASS = "subprocess_step"
"""Passes of the other processes."""
DECODINGS = 12
"""Decodings over processes that are timed in each round."""
DecodingTimes = dict[int, dict[str, list[float]]]
"""Times of one decoding by number of sub-processes and part [s]."""


def over_processes(pool: Pool, seed: int) -> DecodingTimes:
    """Time what several processes add to decoding, and the passes of the main process.

    The former is to start sub-processes on other units, to wake them, to promote one, and to schedule in the main process after
    each read. The latter are passes up to the exit layer, while the others wait, and after it, while they run. Measured on a
    decoding with forced outcomes that belongs to no run.
    """
    from calibrate.workers.over_processes import Parallel

    return _decoding_times(lambda world: Parallel(pool, answers=world, record=True), pool.decoder, pool.units, seed)


def over_streams(lanes: Lanes, seed: int) -> DecodingTimes:
    """Time the same over streams of one GPU, by the GPU's clock: launching passes is part of the scheduling time after a read."""
    from calibrate.untested_on_gpu.over_streams import Streams

    return _decoding_times(lambda world: Streams(lanes, answers=world, record=True), lanes.decoder, lanes.units, seed)


def _decoding_times(interpreter: Callable[[Answers], Any], decoder: Decoder, units: int, seed: int) -> DecodingTimes:
    from model.logs import forced_outcomes
    from model.methods.ppd import algorithm as ppd

    layers, found = decoder.layers, {}
    for candidates in range(1, units):
        parameters = ppd.Parameters(layers, _exit_layer(layers), candidates)
        seconds: dict[str, list[float]] = {name: [] for name in (*OVERHEADS, *MAIN_PASSES, SUBPROCESS_PASS)}
        world = forced_outcomes.world(parameters, PROCESS_PROMPT, 2 * PROCESS_PROMPT, {"match_rate": 0.6}, seed=seed)
        over = interpreter(world)
        over.run(ppd.decode(parameters, tuple(range(PROCESS_PROMPT)), 2 * PROCESS_PROMPT), 2 * PROCESS_PROMPT)
        decoder.settle()  # the spans of a GPU are complete when it is idle
        spans = over.spans
        for span in spans:
            if span.what in seconds or span.what == "link":
                seconds["wake" if span.what == "link" else span.what].append(span.seconds)
            elif span.what == "forward" and span.unit > 0:
                seconds[SUBPROCESS_PASS].append(span.seconds)
            elif span.what == "forward" and span.width == 1:
                share = overlap_with_other_units(spans, span) / span.seconds
                if span.first == 0 and share < 0.05:
                    seconds["main_alone"].append(span.seconds)
                elif span.first and share > 0.9:
                    seconds["main_concurrent"].append(span.seconds)
        read_count = sum(span.what == "head" for span in spans)
        seconds["scheduling"].append(max(over.seconds - sum(main_process_seconds(spans).values()), 0.0) / read_count)
        found[candidates] = seconds
    return found


def _exit_layer(layers: int) -> int:
    return -(-layers // 2)


def raw_row(decodings: Sequence[DecodingTimes], layers: int) -> dict[str, Any]:
    """Return a raw row without its point, from decodings over processes: means between quartiles [us].

    They are means because runs add them up, and some take much longer than most.
    """
    found: dict[str, dict[str, list[float]]] = {f"{part}_us": {} for part in (*OVERHEADS, *MAIN_PASSES, SUBPROCESS_PASS)}
    for candidates in decodings[0]:
        for part in (*OVERHEADS, *MAIN_PASSES, SUBPROCESS_PASS):
            times = [seconds for decoding in decodings for seconds in decoding[candidates][part]]
            if times:
                found[f"{part}_us"][str(candidates)] = means(times)
    return {**found, "repeats": 2 * PROCESS_PROMPT, "exit_layer": _exit_layer(layers)}


def process_rows(rows: list[dict[str, Any]], calls: Mapping[str, float], layers: int) -> list[dict[str, Any]]:
    """Return rows of a profile's table from raw rows of `raw_row`: medians over rounds.

    `calls` are the overheads of a pass besides its layers, alone and concurrent [s]; the remainder is divided by the layers.
    """
    table: list[dict[str, Any]] = []
    main_concurrent_us: dict[str, float] = {}
    for part in (*OVERHEADS, *MAIN_PASSES, SUBPROCESS_PASS):
        for count in rows[0].get(f"{part}_us", ()) if rows else ():
            own = [row for row in rows if count in row[f"{part}_us"]]
            rounds = [row[f"{part}_us"][count] for row in own]
            later = layers - own[0]["exit_layer"]
            if part in MAIN_PASSES:
                run = own[0]["exit_layer"] if part == "main_alone" else later
                rounds = [[max(each - 1e6 * calls[part], 1e-3) / run for each in times] for times in rounds]
            if part == SUBPROCESS_PASS:  # sub-processes run as many layers as the main process at the same time
                rounds = [[max(each - later * main_concurrent_us.get(count, 0.0), 1e-3) for each in times] for times in rounds]
            times = table_times(rounds, sum(row["repeats"] for row in own))
            if part == "main_concurrent":
                main_concurrent_us[count] = 1e6 * times["time_s"]
            table.append({"part": part, "busy": 0, "processes": int(count)} | times)
    return table
