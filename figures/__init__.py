"""Figures of stored rows: one module per figure, each with one function `draw`; `save` writes what it returns.

Nothing here simulates or keeps state: a figure is a function of its rows, and the same rows give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.base import bounded_files, checks, renamed_keys, typed_values, whole_files

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox
    from numpy.typing import ArrayLike

    from model.logs.position_log import PositionLog

FORMATS = ("png", "svg")


def save(figure: Figure, path: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure to `path`.png and `path`.svg (or only the given `formats`), and return the paths.

    The page grows where a label reaches beyond it, so nothing is cut off. The files hold no date, version or random name, and each
    is written whole or not at all. An SVG file holds the caption and a text alternative (`figures.common.caption`).
    """
    for name in formats:
        checks.one_of("figure format", name, FORMATS)
    paths, bounds = [], _page_of(figure)
    with ThreadPoolExecutor(max_workers=1) as other:
        # The pixels of the PNG file are compressed, a sixth of its time, while the SVG file is drawn.
        contents = [other.submit(_drawn(figure, name, bounds)) for name in formats]
    for name, content in zip(formats, contents, strict=True):
        target = Path(f"{path}.{name}")
        try:
            paths.append(whole_files.write_bytes(target, content.result()))
        except OSError as error:
            raise checks.ParameterError(f"cannot write {target}: {error.strerror}") from None
    return paths


def svg(figure: Figure) -> str:
    """SVG text of a figure, as `save` writes it: with its caption and text alternative."""
    return _drawn(figure, "svg", _page_of(figure))().decode("utf-8")


def _page_of(figure: Figure) -> Bbox:
    """Page of a figure in all formats; to find it takes a third of the time of drawing."""
    from figures.common.style import page, styled

    with styled():
        return page(figure)


class _Pixels(io.BytesIO):
    """A file to which matplotlib writes the pixels of a figure, an array of shape (height, width, 4)."""

    def write(self, pixels: Any) -> int:
        """Keep the size and a copy: matplotlib draws the next figure into the same memory."""
        self.height, self.width, _ = pixels.shape
        return super().write(pixels)

    def png(self) -> bytes:
        """Content of a PNG file, without the opacity, which is the same everywhere."""
        from PIL import Image

        from figures.common.style import DENSITY

        buffer, image = io.BytesIO(), Image.frombuffer("RGBA", (self.width, self.height), self.getvalue())
        # Level 3 takes three quarters of the time of the default, 6, and the files are about as small.
        image.convert("RGB").save(buffer, "png", dpi=(DENSITY, DENSITY), compress_level=3)
        return buffer.getvalue()


def _drawn(figure: Figure, name: str, bounds: Bbox) -> Callable[[], bytes]:
    """Draw a figure in one of `FORMATS`; the function that is returned makes the content of the file of it."""
    from figures.common import caption
    from figures.common.style import DENSITY, styled

    found = caption.of_figure(figure)
    said = {"Title": found.title, "Description": found.description}
    about = {"Date": None, "Creator": None} | {key: words for key, words in said.items() if words}
    pixels, text = _Pixels(), io.StringIO()
    with styled():
        if name == "png":
            figure.savefig(pixels, format="rgba", dpi=DENSITY, bbox_inches=bounds)
            return pixels.png
        figure.savefig(text, format=name, dpi=DENSITY, bbox_inches=bounds, metadata=about)
    return text.getvalue().encode


ROUNDING = 1e-9
"""Relative difference of times that are equal but for the order in which their parts were added [-]."""
MOST_POINTS = 2000
"""Number of points above which the figures with one mark per point are not drawn."""

Drawn = Iterator[tuple[str, "Figure"]]
"""Pairs of file name and figure."""


def of_run(folder: str | Path, table: pl.DataFrame | None = None, target: str | Path | None = None) -> list[Path]:
    """Draw the figures of a run from its stored tables (or from the rows of `table`) into `target`.

    The default target is its subfolder `figures`. Of a run of more than 2,000 points about as many are drawn, evenly spaced on each
    axis of its scenario; only their rows are read. A line above each figure names the scenario, with the models, devices, batch and
    context of its costs, and the number of points where a part is drawn.
    """
    import polars as pl

    from figures.common import drawn_points

    folder = Path(folder)
    if table is not None:
        return _of_rows(folder, drawn_points.read(table.lazy(), folder, MOST_POINTS, MOST_ROWS), target)
    stored = folder / "results.parquet"
    rows = _stored(stored, {"point": int, "view": str, "method": str}, folder)
    if (old := renamed_keys.old_column(rows.columns)) is not None:
        raise checks.ParameterError(f"{stored}: {old}; run the scenario again")
    try:
        return _of_rows(folder, rows, target)
    except (pl.exceptions.PolarsError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, checks.ParameterError):
            raise
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise checks.ParameterError(f"{stored} is not a table that a run has written ({why}); run the scenario again") from None


def _of_rows(folder: Path, rows: pl.DataFrame, target: str | Path | None) -> list[Path]:
    from figures.common import drawn_points, subject
    from figures.common.style import with_subject_line

    about = ", ".join(filter(None, (subject.of_run(folder), drawn_points.note(rows, folder, MOST_POINTS))))
    drawn = folder / "figures" if target is None else Path(target)
    drawn.mkdir(exist_ok=True)
    return [path for name, figure in _of_run(folder, rows) for path in save(with_subject_line(figure, about), drawn / name)]


def _of_run(folder: Path, rows: pl.DataFrame) -> Drawn:
    import polars as pl

    from figures.of_runs import latency_distribution, method_comparison, speedup_by_device, tradeoff

    if "no_value_because" in rows.columns:  # rows without a value are not drawn
        rows = rows.filter(pl.col("no_value_because").is_null() | (pl.col("view") == "events"))
    few = rows["point"].n_unique() <= MOST_POINTS
    drafting = rows.filter(pl.col("draft_length").is_not_null()) if "draft_length" in rows.columns else rows.clear()
    # Methods that draft do not belong among the trade-off curves of early prediction: they have a separate figure. Those that
    # choose the length at run time have no draft_length, but they all have an acceptance rate.
    drafts = [pl.col(name).is_not_null() for name in ("draft_length", "acceptance_rate") if name in rows.columns]
    others = rows.filter(~pl.any_horizontal(drafts).any().over("point")) if drafts else rows
    # The same holds for lossy methods, though some of them also have an exit_layer.
    lossy = rows.filter(~pl.col("exact")) if "exact" in rows.columns else rows.clear()
    others = others.join(lossy, "point", how="anti", maintain_order="left")
    # And for units of several devices, which share the work of each layer.
    others = others.filter(pl.col("tensor_parallel").fill_null(1) == 1) if "tensor_parallel" in others.columns else others
    if "exit_layer" in rows.columns and few and others["exit_layer"].count():
        for x in tradeoff.AXES:
            yield f"tradeoff_{x}", tradeoff.draw(others, x=x)
    if few:
        yield from _of_table_3(rows)
        yield from _of_devices(rows)
    if (drafting.height or lossy.height) and few:
        yield from _of_drafting(drafting, on_devices=speedup_by_device.device_column(rows) is not None)
        if method_comparison.fits(rows):
            yield "methods", method_comparison.draw(rows)
    if lossy.height and few:
        yield from _of_lossy(rows)
    if (spread := folder / "distribution.parquet").exists():
        timed = _columns_of_times(spread)
        latencies = _stored(spread, {"point": int, "view": str} | (dict.fromkeys(timed, float) if len(timed) == 1 else {}))
        # The first point whose latency varies by more than rounding: decodings that all take equally long have no distribution.
        time = pl.coalesce(timed)
        points = latencies.filter((time.max() - time.min() > ROUNDING * time.max()).over("point"))
        first = points.filter(pl.col("point").eq_missing(points["point"].min()))
        if "paths" in first["view"]:
            first = first.filter(pl.col("view") != "events")  # the same decodings, but fewer
        if first.height:
            named = latency_distribution.with_point_names(first, rows)
            yield f"distribution_point_{first['point'][0]}", latency_distribution.draw(named)
    if (lengths := folder / "accepted.parquet").exists():
        yield from _of_accepted(_stored(lengths, {"point": int, "view": str}), drafting, rows)


def _columns_of_times(path: Path) -> list[str]:
    """Return the columns of a table of latencies that have times: points on hardware are in seconds, others in layer-times."""
    found = _stored(path, {"point": int, "view": str})
    known = [name for name in ("latency_layers", "latency_s") if name in found.columns and found[name].count()]
    complete = [name for name in known if not found[name].null_count()]
    return [*(complete[:1] or known or ["latency_layers"])]


MOST_ROWS = 1_000_000
"""Rows that are read of a stored table at most."""


def _stored(path: Path, kinds: dict[str, Any], run: Path | None = None) -> pl.DataFrame:
    """Return the first rows of a stored table, or of the results of `run` those of the points that are drawn.

    A table without the columns of `kinds`, or with lists, is refused.
    """
    import polars as pl

    from figures.common import drawn_points

    try:
        bounded_files.check_regular(path)
        found = pl.scan_parquet(path, glob=False)
        for name, kind in found.collect_schema().items():
            if kind.is_nested():
                raise checks.ParameterError(f"column {name} must hold one value in each row, got {kind}")
        rows = found.head(MOST_ROWS).collect() if run is None else drawn_points.read(found, run, MOST_POINTS, MOST_ROWS)
        typed_values.check_columns(rows, kinds)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException, checks.ParameterError) as error:
        why = getattr(error, "strerror", None) or (str(error).splitlines() or ["damaged"])[0]
        raise checks.ParameterError(f"{path} cannot be read: {why}; name the directory of a finished run") from None
    if not rows.height:
        raise checks.ParameterError(f"{path} has no rows; name the directory of a finished run")
    return rows


def _of_drafting(drafting: pl.DataFrame, *, on_devices: bool) -> Drawn:
    """Speed-ups over every swept axis, and figures that only some rows have; a cost ratio derived from devices is not an axis."""
    from figures.of_runs import speedup, speedup_by_batch

    if speedup_by_batch.fits(drafting):
        yield "speedup_by_batch", speedup_by_batch.draw(speedup_by_batch.of_run(drafting))
    known = [name for name in speedup.AXES if name in drafting.columns and drafting[name].drop_nulls().len()]
    if len(known) == len(speedup.AXES):
        for x in [x for x in speedup.swept(drafting) or ["acceptance_rate"] if not (on_devices and x == "cost_ratio")]:
            yield f"speedup_{x}", speedup.draw(drafting, x)
    yield from _of_hierarchies(drafting)
    yield from _of_the_deck(drafting)


def _of_lossy(rows: pl.DataFrame) -> Drawn:
    """Figures of lossy methods: cost of each choice, Big Little Decoder's rates and thresholds, SkipDecode's layers."""
    from figures.of_runs import bild_rates, bild_thresholds, operations_and_bytes
    from figures.of_theory import skipdecode_layers, skipdecode_schedule

    if rows["point"].n_unique() <= operations_and_bytes.MOST_POINTS and rows["speedup"].count():
        yield "choices", operations_and_bytes.draw(rows)
    if bild_rates.fits(rates := bild_rates.of_run(rows)):
        yield "bild_rates", bild_rates.draw(rates)
    if bild_thresholds.fits(thresholds := bild_thresholds.of_run(rows)):
        yield "bild_thresholds", bild_thresholds.draw(thresholds)
    if found := skipdecode_schedule.of_run(rows):
        schedules, bounds = found
        draw = skipdecode_layers.draw if len(schedules) > 1 else skipdecode_schedule.draw
        yield "skipdecode_layers", draw(schedules, **bounds)


def _of_hierarchies(drafting: pl.DataFrame) -> Drawn:
    """Regions where three models pay at the costs of these rows; none for `recursive`, nor for swept costs."""
    import polars as pl

    from figures.of_theory import hierarchical_regions

    costs = ["cost_ratio", "medium_cost_ratio", "draft_length"]
    wanted = [*costs, "acceptance_rate", "medium_acceptance_rate", "reading"]
    if not all(name in drafting.columns for name in wanted):
        return
    own = drafting.filter(pl.col("method") == "hierarchical", pl.col("reading").is_in(list(hierarchical_regions.READINGS)))
    own = own.drop_nulls(costs).select(wanted).unique(maintain_order=True)
    if own.height and own.select(costs).n_unique() <= hierarchical_regions.MOST_COSTS:
        yield "hierarchical", hierarchical_regions.draw(own)


def _of_the_deck(drafting: pl.DataFrame) -> Drawn:
    """Figure of the slides' printed speed-ups, where the run compares with them."""
    import polars as pl

    from figures.of_papers import slides_speedups
    from model.published import deck_analysis

    if not all(name in drafting.columns for name in ("published_speedup", "outcomes_source")):
        return
    printed = drafting.drop_nulls("published_speedup").filter(pl.col("outcomes_source").str.starts_with("published: Deck"))
    if printed.height:
        yield "deck", slides_speedups.draw(deck_analysis.rows())


def _of_table_3(rows: pl.DataFrame) -> Drawn:
    """Published times of pipelined decoding, where points of the run replay them."""
    from figures.of_papers import ppd_table_3_times

    if ppd_table_3_times.fits(rows):
        yield "table_3", ppd_table_3_times.draw(rows)


def _of_devices(rows: pl.DataFrame) -> Drawn:
    """Speed-ups by device, if several were swept; by reserved devices, if tensor parallelism and replicas are compared."""
    from figures.of_runs import reserved_devices, speedup_by_device

    if speedup_by_device.fits(rows):
        yield "speedup_by_device", speedup_by_device.draw(rows)
    if reserved_devices.fits(rows):
        yield "devices_held", reserved_devices.draw(rows)


def of_profiles(names: Sequence[str], folder: str | Path) -> list[Path]:
    """Draw measured profiles of devices into a folder: the roofline, the cost of multi-token passes, and the time of a layer.

    `names` are bundled profiles or paths of profile .json files; at most three.
    """
    from figures.of_hardware import layer_time, pass_cost, reached_peaks
    from model.hardware import profile_files
    from model.hardware.profile_costs import ProfileCosts

    if not 1 <= len(names) <= layer_time.MOST_PROFILES:
        raise checks.ParameterError(f"profiles must be 1 to {layer_time.MOST_PROFILES}, got {len(names)}; draw the others apart")
    found = [profile_files.load(name) for name in names]
    twice = [each.name for index, each in enumerate(found) if each.name in {other.name for other in found[:index]}]
    if twice:
        raise checks.ParameterError(f"profiles must differ in their names, got {twice[0]} twice; leave one out")
    drawn = {
        "roofline": reached_peaks.draw(found),
        "verify_cost": pass_cost.draw({each.name: ProfileCosts(each) for each in found}),
        "layer_time": layer_time.draw(found),
    }
    target = _folder(folder)
    return [path for name, figure in drawn.items() for path in save(figure, target / name)]


def of_served(content: Mapping[str, Any], base: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a document of `sim serve` to `base`_NAME.svg and .png: throughput against time per token, where drafts pay, and the
    server over time.
    """
    base = Path(base)
    drawn = [(base.with_name(f"{base.name}_{name}"), figure) for name, figure in served_figures(content)]
    return [path for target, figure in drawn for path in save(figure, target, formats)]


MOST_SERVED = 12
"""Combinations of axes of a run of a server that are drawn."""
SERVED = "serving.json"
"""File with the results of a run of a server."""


def of_served_run(folder: str | Path) -> list[Path]:
    """Draw the results of a run of a server into its subfolder `figures`, those of each of its first combinations of axes."""
    stored = Path(folder) / SERVED
    try:
        points = bounded_files.json_of(bounded_files.read_bytes(stored))["points"]
        target = _folder(stored.parent / "figures")
        return [
            path for index, each in enumerate(points[:MOST_SERVED])
            for path in of_served(each, target / ("server" if len(points) == 1 else f"point_{index}"))
        ]
    except (OSError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, checks.ParameterError):
            raise
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise checks.ParameterError(f"{stored} is not what a run of a server has written ({why}); run it again") from None


def served_figures(content: Mapping[str, Any]) -> Drawn:
    """Figures of a document of `sim serve`, by name; the time series of the highest load that some policy keeps up with."""
    from figures.of_load import server_over_time, switch_off_map, throughput_frontier

    several = content["tensor_parallel"] > 1
    devices = (f"{content['tensor_parallel']} x " if several else "") + (content["gpu"] or "GPU")
    title = content["model"] or "the model of the step law"
    title += f" on {devices}" if several or content["gpu"] else ""  # a law may not say on which device it was measured
    title += f", {content['replicas']} replicas" if content["replicas"] > 1 else ""
    curves = throughput_frontier.curves_of(content["table"])
    if 1 <= len(curves) <= throughput_frontier.MOST_CURVES:
        yield "frontier", throughput_frontier.draw(curves, title=title)
    if cells := switch_off_map.cells_of(content["by_context"][: switch_off_map.MOST_CELLS]):
        yield "switch_off", switch_off_map.draw(cells, title=title)
    loads = [(row["rate"], row["concurrency"]) for row in content["table"] if row["stable"]]
    if loads := loads or [(row["rate"], row["concurrency"]) for row in content["series"]]:
        rate, concurrency = max(loads, key=lambda load: max(load[0] or 0, load[1] or 0))
        series = server_over_time.series_of(content["series"], rate, concurrency)
        if 1 <= len(series) <= throughput_frontier.MOST_CURVES:
            load = f"{concurrency} clients" if rate is None else f"{rate:.4g} requests/s"
            yield "over_time", server_over_time.draw(series, title=f"{title}, {load}")


def of_log(log: PositionLog, folder: str | Path, candidates: Sequence[int], draft_lengths: Sequence[int]) -> list[Path]:
    """Draw a decision log into a folder: match rates by layer and position and, for a greedy draft, its acceptance."""
    from figures.of_logs import match_rates

    target = _folder(folder)
    paths = save(match_rates.draw(log, candidates), target / "match_rate")
    paths += save(match_rates.draw_by_position(log, candidates), target / "match_rate_by_position")
    if not log.drafted or log.header.get("sampling") is not None:
        return paths
    about = f"{log.header['draft']['name']} for {log.header['target']['name']}, {len(log.starts) - 1} sequences (measured)"
    return paths + of_lengths([each + 1 for each in log.column("accepted")], target, draft_lengths, about)


def of_lengths(lengths: Sequence[ArrayLike], folder: str | Path, draft_lengths: Sequence[int], about: str) -> list[Path]:
    """Draw the acceptance of drafts into a folder: rate by position, and distribution of accepted tokens per round.

    `lengths` are those of `model.methods.speculative.rates_from_logs`; `about` names the data and says whether they were measured.
    Of several draft lengths the last three are drawn, and by position only the longest; a draft length of 1 fits any rate.
    """
    from figures.of_logs import acceptance_by_position, accepted_lengths

    target = _folder(folder)
    few = [each for each in dict.fromkeys(draft_lengths) if each > 1][-3:] or [*draft_lengths]
    paths = save(acceptance_by_position.draw(lengths, max(draft_lengths), about), target / "acceptance_by_position")
    return paths + save(accepted_lengths.draw(lengths, few, about), target / "accepted_lengths")


def of_quality(rows: pl.DataFrame, folder: str | Path) -> list[Path]:
    """Draw the results of `calibrate quality` into a folder: each quality that they have, over thresholds and cost."""
    from figures.of_logs import agreement_over_cost

    target = _folder(folder)
    if not agreement_over_cost.fits(rows):
        return []
    return [
        path for name in agreement_over_cost.QUALITIES if name in rows.columns
        for path in save(agreement_over_cost.draw(rows, quality=name), target / name)
    ]


def of_replacement(rows: pl.DataFrame, about: str, folder: str | Path) -> list[Path]:
    """Draw the results of `calibrate replace` into a folder: each quality that they have; `about` names the models."""
    from figures.of_logs import agreement_over_cost, quality_over_replacement

    target = _folder(folder)
    names = [name for name in agreement_over_cost.QUALITIES if name in rows.columns]
    return [
        path for name in names for path in save(quality_over_replacement.draw(rows, name, about), target / f"replaced_{name}")
    ]


def of_loss(rows: pl.DataFrame, about: str, folder: str | Path) -> list[Path]:
    """Draw the results of `calibrate loss` into a folder; `about` names the model and its data."""
    from figures.of_logs import position_losses

    return save(position_losses.draw(rows, about), _folder(folder) / "loss_by_position")


def _folder(folder: str | Path) -> Path:
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise checks.ParameterError(f"cannot write {target}: {error.strerror}; name another folder") from None
    return target


def _of_accepted(lengths: pl.DataFrame, drafting: pl.DataFrame, rows: pl.DataFrame) -> Drawn:
    """Accepted lengths of the first points; the theoretical law covers i.i.d. acceptances, fixed draft length and one sequence."""
    import numpy as np
    import polars as pl

    from figures.common import point_names
    from figures.of_runs import accepted_tokens
    from model.methods.speculative import theory as speculative

    wanted = ["tokens", "acceptance_rate", "draft_length"]
    if all(name in drafting.columns for name in (*wanted, "tokens_per_round")):
        plain = drafting.filter(method="speculative", view="formula").drop_nulls([*wanted, "tokens_per_round"])
        # Rows with another law have another expected number of tokens per round.
        runs = speculative.target_runs(*(plain[name].to_numpy() for name in wanted))
        plain = plain.filter(np.isclose(plain["tokens_per_round"].to_numpy(), plain["tokens"].to_numpy() / runs, rtol=1e-6))
        lengths = lengths.join(plain.select("point", *wanted), on="point", how="left", maintain_order="left")
    first = lengths["point"].unique().sort().head(accepted_tokens.MOST_POINTS)
    shown = lengths.filter(pl.col("point").is_in(first.implode()))
    if shown.height:
        named = point_names.names(rows.join(shown.select("point").unique(), "point", how="semi", maintain_order="left"))
        said = pl.col("point").replace_strict(named, return_dtype=pl.String)
        same = ", ".join(point_names.common(rows.filter(pl.col("point").is_in(first.implode()))))
        yield "accepted", accepted_tokens.draw(shown.with_columns(name=said), about=same)


def of_comparison(
    table: pl.DataFrame, folder: str | Path, limits: pl.DataFrame | None = None,
    pair: tuple[pl.DataFrame, pl.DataFrame] | None = None,
) -> list[Path]:
    """Draw the results of `sim compare` into a folder: predicted against measured times, errors by method, parts of the time.

    `limits` are rows of `sim.comparison.formula_validity`, one figure per claim; of too many series some are drawn. `pair` is one
    run as measured and as simulated: the intervals in which each unit was busy.
    """
    from figures.of_comparisons import error_by_method, formula_limits, gantt_pair, predicted_measured, time_parts

    target = _folder(folder)
    drawn = {"predicted_measured": predicted_measured.draw(table), "error_by_method": error_by_method.draw(table)}
    drawn["time_parts"] = time_parts.draw(table)
    if pair is not None:
        drawn["gantt_pair"] = gantt_pair.draw(*pair, between=gantt_pair.rounds(*pair))
    claims = {} if limits is None else dict(limits.group_by("claim", maintain_order=True))
    for claim in sorted((claim for (claim,) in claims), key=formula_limits.figure_index):
        drawn[f"limits_{claim}"] = formula_limits.draw(formula_limits.limit_series(claims[claim,]))
    return [path for name, figure in drawn.items() for path in save(figure, target / name)]
