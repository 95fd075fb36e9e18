"""Times of decoding besides whole passes: reads of every kind, key and value rows alone, hypotheses, pauses, forks.

Raw rows of `calibrate layers --mode interpreter`, and the rows of a profile's table that are derived from them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.interpreters.in_one_process import PassOutput, ProcessState, Real
from calibrate.timing.interpreter_pass import marked_parts
from calibrate.timing.single_pass import means, table_times
from calibrate.untested_on_gpu.cuda_graphs import Graphs
from model.hardware.profile import EARLY_EXIT_READS, PROCESS_PROMPT, READS
from model.steps import DISTINCT, LIKELIEST, Commit, Forward, LayerSpan, Read, Steps

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from model.methods.method_parameters import MethodParameters

SEVERAL = (LIKELIEST, DISTINCT)
"""Kinds of reads that are timed with several candidates."""
REPEATS = 12
"""Repeats of each read in a round."""
WARM_UPS = 3
"""Untimed repeats before those."""
CONTEXT = 64
"""Positions before the timed passes."""
ROOM = CONTEXT + 16
"""Largest number of positions of such a pass."""
HYPOTHESES = (1, 2, 4, 8, 16)
"""Numbers of hypotheses in a pass, and in the read of the tokens that follow them."""
KV_ONLY_TOKENS = (1, 2, 4, 8)
"""Numbers of tokens whose key and value rows alone are computed."""
FORKED_TOGETHER = (1, 3)
"""Numbers of sub-processes that start together."""


def time_reads(decoder: Decoder, context: int = CONTEXT, repeats: int = REPEATS) -> dict[str, Any]:
    """Time every kind of read, key and value rows alone, layers one by one, and sub-processes within one process.

    Returns a raw row without its point: means between quartiles [us].
    """
    import torch

    found: dict[str, list[float]] = {}
    rows: dict[str, list[float]] = {}
    with torch.inference_mode():
        real = Real({"target": decoder})
        held = real.new_cache()
        tokens = tuple(range(2, 2 + context))
        real.forward(held, Forward("target", tokens, 0, LayerSpan(0, decoder.layers)))
        step = Forward("target", (5,), context, LayerSpan(0, decoder.layers), heads=1, compared=1)
        for kind in READS:
            if kind == "beams":
                continue
            times, read_count = [], 3 if kind == "next" else 1
            for turn in range(repeats + WARM_UPS):
                # New outputs, of which only the head is computed: it belongs to the pass.
                first, second = (_projected(real.forward(held, step)) for _ in range(2))
                token = 7 if kind in ("probability", "distance") else None
                asked = Read(kind, first, -1, 3 if kind in SEVERAL else 1, token, second if kind == "residual" else None)  # type: ignore[arg-type]
                if kind == "next":
                    real.read(asked)  # the first read of a pass is in `first_read`; further ones follow each other directly
                begun = _now(decoder)
                for _ in range(read_count):
                    real.read(asked)
                if turn >= WARM_UPS:
                    times.append((_now(decoder) - begun) / read_count)
            found[kind] = means(times)
        for count in KV_ONLY_TOKENS:
            times = []
            only = Forward("target", tokens[:count], context, LayerSpan(1, decoder.layers, kv_only=True))
            whole = real.forward(held, Forward("target", tokens[:count], context, LayerSpan(0, 1)))
            for _ in range(repeats + WARM_UPS):
                begun = _now(decoder)
                real.forward(held, only._replace(state=whole))
                times.append((_now(decoder) - begun) / max(decoder.layers - 1, 1))
            rows[str(count)] = means(times[WARM_UPS:])
        several = not isinstance(decoder, Graphs)  # graphs support neither hypotheses nor sub-processes
        trees, beams = _trees(real, held, tokens, repeats) if several else ({}, {})
        again, early = _one_by_one(decoder, tokens, repeats)
        forks = _forks(decoder, repeats) if several else {}
    return {
        "resumed_step_us": again, "reads_us": found | early, "kv_rows_us": rows, "tree_us": trees, "beams_us": beams,
        "fork_us": forks,
        "repeats": repeats,
    }  # fmt: skip


def _now(decoder: Decoder) -> float:
    """Return the time when the device is idle [s]: a GPU's passes are only launched, and the first read would wait for all."""
    decoder.settle()
    return time.perf_counter()


def _one_by_one(decoder: Decoder, text: tuple[int, ...], repeats: int) -> tuple[list[float], dict[str, list[float]]]:
    """Time a call that resumes another at the same position, and heads and reads between such calls: means between quartiles [us].

    Timed as early exit makes them, layer by layer with a read after each, so that the head's weights have just been used.
    """
    calls: list[float] = []
    read_times: dict[str, list[float]] = {name: [] for name in ("early_head", *EARLY_EXIT_READS.values())}
    marks: list[tuple[str, int, float]] = []
    at, layers = len(text), decoder.layers
    half = layers // 2 if isinstance(decoder, Graphs) else 0
    """A graph cannot be marked inside: its layers' time is the difference between replays of all layers and of half of them."""

    def mark(name: str, _: int, edge: int) -> None:
        marks.append((name, edge, _now(decoder)))

    def steps() -> Steps:
        yield Forward("target", text, 0, LayerSpan(0, layers))
        for turn in range(repeats + WARM_UPS):
            seconds: dict[str, list[float]] = {name: [] for name in ("call", *read_times)}
            for kind, name in EARLY_EXIT_READS.items():
                out: Any = None
                for layer in range(layers):
                    begun = _now(decoder)
                    out = yield Forward("target", (5,), at + turn % 2, LayerSpan(layer, layer + 1), out, heads=1, compared=1)
                    made = _now(decoder)
                    if kind == "confidence":
                        _projected(out)
                        seconds["early_head"].append(_now(decoder) - made)
                    seen = time.perf_counter()
                    yield Read(kind, out, -1)  # type: ignore[arg-type]
                    seconds[name].append(time.perf_counter() - seen)
                    if layer:
                        seconds["call"].append(made - begun)
                yield Read("next", out, -1)
                yield Commit("token", (0,))
            took = []
            for last in (half, layers) if half else (layers,):
                marks.clear()
                with marked_parts(real, mark):
                    out = yield Forward("target", (5,), at + turn % 2, LayerSpan(0, last), heads=last == layers)
                took.append(_between(marks, "layer"))
            yield Read("next", out, -1)
            if turn >= WARM_UPS:
                whole = (took[1] - took[0]) / (layers - half) if half else took[0] / layers
                resumed = seconds.pop("call")
                calls.append(float(np.mean(resumed)) - whole if resumed else 0.0)  # nothing resumes a single layer
                for read, times in seconds.items():
                    read_times[read].append(float(np.mean(times)))
        yield Commit("last", (0,))

    real = Real({"target": decoder})
    real.run(steps(), 2 * len(EARLY_EXIT_READS) * (repeats + WARM_UPS))
    return means(calls), {name: means(times) for name, times in read_times.items()}


def _between(marks: Sequence[tuple[str, int, float]], part: str) -> float:
    """Return the total time of a part that may occur several times [s]."""
    return sum(when if edge else -when for name, edge, when in marks if name == part)


def _forks(decoder: Decoder, repeats: int) -> dict[str, list[float]]:
    """Time the start of sub-processes within one process, with their ends and turns, by their number: means between quartiles [us].

    Measured as a forced decoding without its passes and reads, minus the same of plain decoding, which every read includes.
    """
    from calibrate.interpreters.in_one_process import RunTimes
    from model.logs import forced_outcomes
    from model.methods.autoregressive import algorithm as autoregressive
    from model.methods.ppd import algorithm as ppd

    def rest(parameters: MethodParameters, algorithm: Any, rates: Mapping[str, float], turn: int) -> float:
        """Return the time per token that is neither pass nor read [s]."""
        times = RunTimes()
        world = forced_outcomes.world(parameters, PROCESS_PROMPT, PROCESS_PROMPT, rates, seed=turn)
        begun = time.perf_counter()
        Real({"target": decoder}, answers=world, times=times).run(
            algorithm.decode(parameters, tuple(range(PROCESS_PROMPT)), PROCESS_PROMPT), PROCESS_PROMPT
        )
        return (time.perf_counter() - begun - sum(times.passes.values()) - times.reads) / PROCESS_PROMPT

    layers, found = decoder.layers, {}
    if layers < 2:
        return {}
    for candidates in FORKED_TOGETHER:
        times = []
        for turn in range(max(repeats // 4, 2)):
            plain = rest(autoregressive.Parameters(layers), autoregressive, {}, turn)
            forked = rest(ppd.Parameters(layers, -(-layers // 2), candidates), ppd, {"match_rate": 0.6}, turn)
            times.append(max(forked - plain, 0.0))
        found[str(candidates)] = means(times)
    return found


def _trees(
    real: Real, held: ProcessState, tokens: tuple[int, ...], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time a pass over several hypotheses minus one over as many tokens, by hypotheses and context, and a read of them."""
    decoder = real.decoders["target"]
    layers, length = decoder.layers, len(tokens)
    trees: dict[str, list[float]] = {}
    beams: dict[str, list[float]] = {}
    contexts = [length, length // 3]  # longest first: rolled back rows are gone
    if decoder.max_positions is None or 3 * length + max(HYPOTHESES) <= decoder.max_positions:
        contexts.insert(0, 3 * length)  # dropped hypotheses keep their rows: there are more rows than positions
        real.forward(held, Forward("target", tokens * 2, length, LayerSpan(0, layers)))
    for context in contexts:
        for count in HYPOTHESES:
            words = tuple([tokens[index % length] for index in range(count)])
            plain = Forward("target", words, context, LayerSpan(0, layers), heads=count)
            tree = plain._replace(tree=(-1,) * count)
            other, more, asked = held.copy(), [], []
            for turn in range(repeats + WARM_UPS):
                seconds = []
                at = context - turn % 2  # not the position of the previous pass, which would be known already
                for cache, step in ((held, plain), (other, tree)):
                    begun = _now(decoder)
                    out = real.forward(cache, step._replace(at=at))
                    seconds.append(_now(decoder) - begun)
                _projected(out)
                begun = _now(decoder)
                real.read(Read("beams", out, -1, count, hypotheses=tuple((index, 0.0) for index in range(count))))
                if turn >= WARM_UPS:
                    asked.append(time.perf_counter() - begun)
                    more.append(seconds[1] - seconds[0])
            trees[f"{count} {context}"], beams[str(count)] = means(more), means(asked)
    return trees, beams


def _projected(output: PassOutput) -> PassOutput:
    _ = output.logits
    return output


GAPS = (0, 500, 1000, 2000, 4000, 8000)
"""Pauses between two passes [us]: other processes share the caches, which lose what is not used for a while."""
WIDTHS_AFTER_PAUSES, GAPS_OF_WIDTHS = (4, 9), (0, 1000, 4000)
"""Tokens of wider passes that are timed after pauses too, and these pauses [us]: more work waits less for weights."""
SHORT_PASSES = (1, 2, 4, 6, 9)
"""Numbers of layers of passes that run only the first layers: their weights are used again sooner."""
STEADY_AFTER = 10
"""Untimed passes before the timed ones, enough for a steady state: a single pause cools the caches less."""


def time_after_pauses(decoder: Decoder, context: int = CONTEXT, repeats: int = REPEATS) -> dict[str, Any]:
    """Time passes over one and several tokens after pauses of each length, and a layer of passes over few layers.

    Returns a raw row without its point: means between quartiles [us].
    """
    import torch

    with torch.inference_mode():
        real = Real({"target": decoder})
        held = real.new_cache()
        real.forward(held, Forward("target", tuple(range(2, 2 + context)), 0, LayerSpan(0, decoder.layers)))
        one = {str(gap): _pass_after_pause(real, held, context, 1, gap, repeats) for gap in GAPS}
        wide = {
            f"{width} {gap}": _pass_after_pause(real, held, context, width, gap, repeats // 2)
            for width in WIDTHS_AFTER_PAUSES for gap in GAPS_OF_WIDTHS
        }  # fmt: skip
        few = () if isinstance(decoder, Graphs) else SHORT_PASSES  # the overhead of a graph would be attributed to its few layers
        layers = [*[each for each in few if each < decoder.layers], decoder.layers]
        short = {str(each): _layer_of_short_pass(real, held, context, each, repeats) for each in layers}
    return {"after_gap_us": one, "wide_us": wide, "short_us": short, "repeats": repeats}


def _pass_after_pause(real: Real, held: ProcessState, context: int, width: int, gap: int, repeats: int) -> list[float]:
    """Time a pass `gap` microseconds after the previous one."""
    decoder = real.decoders["target"]
    step = Forward("target", tuple(range(5, 5 + width)), context, LayerSpan(0, decoder.layers), heads=1)
    times = []
    for turn in range(repeats + STEADY_AFTER):
        end = _now(decoder) + gap / 1e6
        while time.perf_counter() < end:
            pass
        begun = time.perf_counter()
        real.forward(held, step._replace(at=context + turn % 2))
        ended = _now(decoder)
        if turn >= STEADY_AFTER:
            times.append(ended - begun)
    return means(times)


def _layer_of_short_pass(real: Real, held: ProcessState, context: int, layers: int, repeats: int) -> list[float]:
    """Time a layer of passes that run only the first `layers` layers."""
    at: dict[tuple[str, int, int], float] = {}
    decoder = real.decoders["target"]

    def mark(name: str, index: int, edge: int) -> None:
        at[name, index, edge] = _now(decoder)

    times = []
    with marked_parts(real, mark):
        for turn in range(repeats + STEADY_AFTER):
            real.forward(held, Forward("target", (5,), context + turn % 2, LayerSpan(0, layers)))
            if turn >= STEADY_AFTER:
                marked = [index for name, index, edge in at if name == "layer" and edge]  # a graph has one stretch
                times.append(sum(at["layer", index, 1] - at["layer", index, 0] for index in marked) / layers)
    return means(times)


def rows_after_pauses(rows: list[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    """Return rows of a profile's table from raw rows of `time_after_pauses`: medians over rounds.

    In a pass over few layers each layer runs again sooner, by the time of the missing layers. It gives the row of a whole pass with
    a negative gap, whose layers all take as long.
    """
    if not rows:
        return []
    repeats = sum(row["repeats"] for row in rows)
    once = {gap: table_times([row["after_gap_us"][gap] for row in rows], repeats) for gap in rows[0]["after_gap_us"]}
    table = [{"part": "after_gap", "busy": 0, "gap": int(gap)} | each for gap, each in once.items()]
    own = [row for row in rows if "short_us" in row]
    if own:
        short = {int(few): table_times([row["short_us"][few] for row in own], repeats) for few in own[0]["short_us"]}
        whole = short.pop(layers)["time_s"]
        for few, each in short.items():
            sooner = -round(1e6 * (layers - few) * whole)
            moved = {name: max(once["0"]["time_s"] + layers * (each[name] - whole), 1e-9) for name in ("time_s", "low_s", "high_s")}
            table.append({"part": "after_gap", "busy": 0, "gap": sooner, "repeats": repeats} | moved)
        for place in own[0]["wide_us"]:
            width, gap = map(int, place.split())
            times = table_times([row["wide_us"][place] for row in own], repeats)
            table.append({"part": "wide_after_gap", "busy": 0, "width": width, "gap": gap} | times)
    return table


def part_rows(rows: list[dict[str, Any]], steps: dict[int, float], layers: int) -> list[dict[str, Any]]:
    """Return rows of a profile's table from raw rows of `time_reads`: medians over rounds.

    Key and value rows were timed as passes: the overhead of a call (`steps` [s], by number of busy processes) is subtracted, shared
    among the layers.
    """
    table: list[dict[str, Any]] = []
    for busy in sorted({row["busy"] for row in rows}):
        own = [row for row in rows if row["busy"] == busy]
        repeats = sum(row["repeats"] for row in own)
        for kind in own[0]["reads_us"]:
            table.append(
                {"part": kind, "busy": busy, "positions": 1} | table_times([row["reads_us"][kind] for row in own], repeats)
            )
        again = [[max(each, 0.0) for each in row["resumed_step_us"]] for row in own]  # noise can make the difference negative
        table.append({"part": "resumed_step", "busy": busy, "batch": 1} | table_times(again, repeats))
        for count in own[0].get("fork_us", ()):
            rounds = [row["fork_us"][count] for row in own]
            table.append({"part": "fork", "busy": busy, "processes": int(count)} | table_times(rounds, repeats))
        for count in own[0]["beams_us"]:
            rounds = [row["beams_us"][count] for row in own]
            table.append({"part": "beams", "busy": busy, "positions": int(count)} | table_times(rounds, repeats))
        for place in own[0]["tree_us"]:
            count, context = map(int, place.split())
            rounds = [[max(each, 0.0) for each in row["tree_us"][place]] for row in own]
            table.append({"part": "tree", "busy": busy, "width": count, "context": context} | table_times(rounds, repeats))
        for count in own[0]["kv_rows_us"]:
            call = steps.get(busy, 0.0) / max(layers - 1, 1) * 1e6
            times = [[max(each - call, 1e-3) for each in row["kv_rows_us"][count]] for row in own]
            table.append({"part": "kv_rows", "busy": busy, "tokens": int(count)} | table_times(times, repeats))
    return table
