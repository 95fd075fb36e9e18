"""Comparison of measured runs with predictions: each run is simulated again, with times from profiles or from a step law only.

The recorded answers of the models are replayed (`model.logs.replay`), and the times of passes come from the profile of the machine
(`model.costs.replayed_seconds`) or from an engine's step law (`sim.comparison.step_law_times`). A prediction uses no measured time
of the runs: scrambling these changes only the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.base import checks
from model.base.checks import ParameterError
from model.costs.replayed_seconds import ReplayedSeconds
from model.engines.step_law import StepLaw
from model.hardware import physical_limits
from model.hardware.profile import PROCESS_PROMPT, Profile
from model.hardware.profile_costs import ProfileCosts, shape_of
from model.logs.measured_runs import ROLES, MeasuredRuns, TimedDecoding
from model.logs.prediction_error import PARTS
from model.logs.replay import Replayed, UnloggedError, changed_settings, steps_of
from sim.comparison import step_law_times

if TYPE_CHECKING:
    import polars as pl

    from model.architectures.transformer import Shape
    from model.logs.recorded_decoding import Decoding
    from sim.engine.events import Run

SAME = ("name", "threads", "cores")
"""Facts of a machine that a profile and runs must share, in addition to the libraries' versions."""

Times = Mapping[str, Profile] | StepLaw
"""Source of the times of passes: the profile of each model by its role, or a step law."""


@dataclass(frozen=True)
class Predicted:
    """Predicted times of a decoding [s]."""

    total: float
    first: float
    """Time until the first commit."""
    parts: Mapping[str, float]
    """Busy time of units by part: layers, heads, embeddings, calls and reads of each role."""
    scheduled: float
    """Scheduling overhead of the main process after its reads."""
    run: Run

    def passes(self, role: str) -> float:
        """Time of a model's passes without the heads, which are computed with the reads."""
        return sum(self.parts.get(f"{role} {name}", 0.0) for name in ("layers", "embedding", "step", "cooling"))

    @property
    def reads(self) -> float:
        """Time of heads and of reading their outputs."""
        return sum(seconds for name, seconds in self.parts.items() if name.endswith((" head", " reads")))

    @property
    def after_first(self) -> float:
        """Time from the first commit to the last token."""
        return self.total - self.first


def predict(decoding: Decoding, cost: ReplayedSeconds, units: int = 1, *, record: bool = False) -> Predicted:
    """Simulate a recorded decoding on `units` units."""
    from sim.engine.cluster import Cluster
    from sim.engine.events import simulate

    cost.begin()
    world, tokens = Replayed(decoding.reads), len(decoding.tokens)
    try:
        run = simulate(steps_of(decoding), tokens, Cluster(units), cost, world, record=record)
    except UnloggedError as error:
        raise _other_way(decoding, str(error)) from None
    if tuple(run.tokens) != decoding.tokens:
        raise _other_way(decoding, "other tokens are generated")
    return Predicted(run.latency, run.commits[0][0], cost.spent, cost.scheduled, run)


def _other_way(decoding: Decoding, why: str) -> ParameterError:
    """Error for a decoding whose reads depend on the times of passes, so that it cannot be replayed."""
    choice = f"{decoding.method} ({changed_settings(decoding)})"
    bound = f"runs must be of methods whose reads do not depend on the times of passes; those of {choice} do"
    return ParameterError(f"{bound}: {why}; leave it out")


def compare(runs: MeasuredRuns, times: Times, *, allow_mismatch: bool = False) -> pl.DataFrame:
    """Table with one row per measured decoding: predicted and measured time, error, and measurement noise.

    Parameters
    ----------
    times
        Profile of each model, by its role, measured on the machine of the runs; or the step law of an engine, which leaves out
        decodings over several units and those with a medium model.
    allow_mismatch
        Accept a profile of another machine, model, dtype or mode, or a law of another model; every row then names the mismatch.
    """
    if isinstance(times, StepLaw):
        return _by_law(runs, times, allow_mismatch=allow_mismatch)[0]
    return _by_profiles(runs, times, allow_mismatch=allow_mismatch)


def _by_law(runs: MeasuredRuns, law: StepLaw, *, allow_mismatch: bool) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Table of the decodings that a step law can price, and facts about the law with notes on the others."""
    import polars as pl

    wrong = step_law_times.mismatches(runs, law)
    if wrong and not allow_mismatch:
        raise ParameterError(f"{wrong[0]}; use a law of that model, or --allow-mismatch, which marks every row")
    cost, (kept, left) = replayed_seconds(runs, law), step_law_times.split(runs, law)
    target, mark, rows = cost.hardware("target"), "; ".join([step_law_times.mark(law), *wrong]), []
    for number, timed in kept.items():
        lacking = ", ".join(step_law_times.missing(timed, target))
        row = _row(runs, number, timed, predict(timed.decoding, cost))
        rows.append(row | {"contention_s": 0.0, "mismatch": mark, "missing": lacking, "step_law": law.name})
    facts = {"name": law.name, "unit": law.unit, "provenance": target.provenance}
    return pl.DataFrame(rows, infer_schema_length=None), facts | {"notes": [*left, *step_law_times.notes(law, kept)]}


def _by_profiles(runs: MeasuredRuns, profiles: Mapping[str, Profile], *, allow_mismatch: bool) -> pl.DataFrame:
    """Table of all decodings, with times from the profile of each model."""
    import polars as pl

    wrong = mismatches(runs, profiles)
    if wrong and not allow_mismatch:
        raise ParameterError(f"{wrong[0]}; use a profile measured there, or --allow-mismatch, which marks every row")
    of = {role: ProfileCosts(each) for role, each in profiles.items()}
    alone, rows = ReplayedSeconds(of), []
    _refuse_slow(runs, profiles, {role: shape_of(each) for role, each in profiles.items()})
    for number, timed in runs.timed.items():
        row: dict[str, Any] = {"contention_s": 0.0}
        if timed.units == 1:
            predicted = predict(timed.decoding, alone)
        else:
            predicted = predict(timed.decoding, over_units(of, timed), timed.units, record=True)
            free = predict(timed.decoding, over_units(of, timed, contention=False), timed.units)
            row["contention_s"] = predicted.total - free.total
        lacking = ", ".join(missing(of, timed))
        row |= {"mismatch": "; ".join(wrong), "missing": lacking, "step_law": ""}
        rows.append(_row(runs, number, timed, predicted) | row)
    return pl.DataFrame(rows, infer_schema_length=None)


def _refuse_slow(runs: MeasuredRuns, profiles: Mapping[str, Profile], shapes: Mapping[str, Shape]) -> None:
    """Raise an error for a run whose time is too long for its passes on this machine; the row is counted from 1."""
    seconds, decodings = runs.table["seconds"].to_list(), runs.table["decoding"].to_list()
    most = {number: physical_limits.longest_run(timed.decoding, profiles, shapes) for number, timed in runs.timed.items()}
    for row, (taken, number) in enumerate(zip(seconds, decodings, strict=True), 1):
        if taken > most[number]:
            why = f"a hundredth of the device's peaks and {physical_limits.LAUNCH_S:g} s an operation"
            bound = f"must be at most {most[number]:.3g}, {why}"
            raise ParameterError(f"row {row}, column seconds: {bound}, got {taken:.4g}; check the unit")


Named = tuple[str, "pl.DataFrame", dict[str, Any]]
"""Name of a file of runs, table with one row per run, and facts about all runs."""


def of_file(path: Path, profiles: Sequence[str] = (), *, allow_mismatch: bool = False, law: StepLaw | None = None) -> Named:
    """Compare the runs of a file, with times from these profiles (default: those of its measurement session), or from a step law.

    With a law, the facts about all runs have its name, unit, provenance and notes under `step_law`.
    """
    from model.logs import measured_runs as files

    found = files.load(path)
    if law is not None:
        by_law, facts = _by_law(found, law, allow_mismatch=allow_mismatch)
        return path.stem, by_law, dict(found.about) | {"step_law": facts}
    table = compare(found, profiles_of(profiles, found, path.parent), allow_mismatch=allow_mismatch)
    return path.stem, table, dict(found.about)


def pair_of_file(path: Path, profiles: Sequence[str] = ()) -> tuple[pl.DataFrame, pl.DataFrame] | None:
    """Return `measured_and_simulated_spans` of a file's first decoding over processes with recorded spans, or None."""
    from model.logs import measured_runs as files

    found = files.load(path)
    number = next((each for each, timed in found.timed.items() if timed.units > 1 and timed.spans(timed.median_repeat)), None)
    return None if number is None else measured_and_simulated_spans(found, profiles_of(profiles, found, path.parent), number)


def concatenate(named: Sequence[Named]) -> pl.DataFrame:
    """Concatenate the tables of several files, with a column for the file's name."""
    import polars as pl

    return pl.concat([table.with_columns(pl.lit(name).alias("runs")) for name, table, _ in named], how="vertical_relaxed")


def write(table: pl.DataFrame, out: Path) -> None:
    """Write a table as CSV or Parquet, completely or not at all."""
    from sim.runs.atomic_files import write_whole

    writers: dict[str, Callable[[Path], object]] = {".csv": table.write_csv, ".parquet": table.write_parquet}
    if out.suffix not in writers:
        raise ParameterError(f"out must end in {' or '.join(writers)}, got {out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, writers[out.suffix])


OVER_PROCESSES = ("dispatch", "wake", "promotion", "scheduling", "main_alone", "main_concurrent", "subprocess_step")
"""Parts of the time of runs over several processes."""
OVER_STREAMS = OVER_PROCESSES[2:]
"""Parts of the time of runs over streams of one GPU: no process is dispatched or woken, and launching is part of scheduling."""


def missing(of: Mapping[str, ProfileCosts], timed: TimedDecoding) -> list[str]:
    """Parts of a run that its profiles have not measured; they are assumed to take 0.

    `send` is for transfers between devices; transfers between processes are part of the times of their passes.
    """
    roles = dict.fromkeys(kind.role for kind in timed.decoding.account.passes_by_kind)
    found = [f"{part} of the {role}" for role in roles if role in of for part in of[role].missing if part != "send"]
    if timed.separate_models:
        slowdown = [CONCURRENT] if _next_to_busy(of["target"]) is None else []
        return [*found, *slowdown, MESSAGES]
    if timed.units > 1:
        profile = of["target"].profile
        wanted = OVER_PROCESSES if timed.unit_kind == "processes" else OVER_STREAMS
        found += [part for part in wanted if part not in profile.parts]
    return found


CONCURRENT, MESSAGES = "slowdown of concurrent processes", "messages between processes"
"""Parts of the time of runs with a process for each model. Profiles have the first if they were also timed next to busy processes,
and never the second."""


def over_units(of: Mapping[str, ProfileCosts], timed: TimedDecoding, *, contention: bool = True) -> ReplayedSeconds:
    """Costs of a run over several units; with `contention`, passes that run concurrently slow each other down."""
    if not timed.separate_models:
        return over_processes(of, timed, contention=contention)
    slowed = _next_to_busy(of["target"]) if contention else None
    return ReplayedSeconds(of, slowdowns=(1.0,) if slowed is None else (1.0, slowed), single_process=False)


def _next_to_busy(target: ProfileCosts) -> float | None:
    """Slowdown factor of the target's layers next to one busy process of the same host [-]; None if the profile lacks it."""
    if 1 not in target.profile.table["busy"]:
        return None
    alone, busy_time = (float(target.layer(1, 2 * PROCESS_PROMPT, busy=busy).seconds) for busy in (0, 1))
    return max(busy_time / alone, 1.0)


def over_processes(of: Mapping[str, ProfileCosts], timed: TimedDecoding, *, contention: bool = True) -> ReplayedSeconds:
    """Costs of a run over several processes, with dispatch and promotion, and, with `contention`, mutual slowdown of passes."""
    target, others = of["target"], timed.units - 1
    times = {part: target.part(part, others) for part in OVER_PROCESSES}
    seconds = (0.0 if each is None else float(each.seconds) for each in times.values())
    dispatch, link, promotion, scheduling, alone, concurrent, subprocess_step = seconds
    # The slowdown is measured on a layer in the middle of the sequence that processes were timed on.
    layer = float(target.layer(1, 2 * PROCESS_PROMPT).seconds)
    slower = [alone / layer if alone else 1.0]
    slower += [concurrent / layer] if concurrent and contention else []
    return ReplayedSeconds(
        of, slowdowns=tuple(slower), dispatch=dispatch, link=link, promotion=promotion, scheduling=scheduling, single_process=False,
        subprocess_step=subprocess_step * layer / concurrent if subprocess_step and concurrent else None,
    )  # fmt: skip


def measured_and_simulated_spans(
    runs: MeasuredRuns, profiles: Mapping[str, Profile], number: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Spans on each unit in a decoding over several processes: of its median repeat as measured, and as simulated [s]."""
    import polars as pl

    timed = runs.timed.get(number)
    if timed is None or timed.units < 2:
        over = [each for each, one in runs.timed.items() if one.units > 1]
        there = ", ".join(map(str, over[:10])) if over else "none of these runs is"
        raise ParameterError(f"decoding must be one over several processes ({there}), got {checks.shown(number)}")
    of = {role: ProfileCosts(each) for role, each in profiles.items()}
    played = predict(timed.decoding, over_units(of, timed), timed.units, record=True).run.intervals
    measured = [span._asdict() for span in timed.spans(timed.median_repeat)]
    frames = [pl.DataFrame(rows, infer_schema_length=None) for rows in (measured, [each._asdict() for each in played])]
    return frames[0], frames[1]


def mismatches(runs: MeasuredRuns, profiles: Mapping[str, Profile]) -> list[str]:
    """Differences in machine, model, dtype or mode between the profiles and the runs."""
    found = []
    about = runs.about
    for role in runs.log.models:
        if role not in profiles:
            raise ParameterError(f"profile of the {role} is required: the runs have this model, {runs.log.models[role]['name']}")
    for role, profile in profiles.items():
        if role not in runs.log.models:
            had = ", ".join(runs.log.models)
            raise ParameterError(f"profile {profile.name} is given for the {role}, which the runs do not have; they have {had}")
        for name in SAME:
            ours, theirs = profile.facts.get(name), about["machine"].get(name)
            if ours != theirs:
                what = f"{name} of the machine must be {checks.shown(theirs)}, as in the runs"
                found.append(f"{what}, got {checks.shown(ours)} in {profile.name}")
        for name, version in about["versions"].items():
            if profile.facts.get(name) != version:
                found.append(f"{name} must be {version}, as in the runs, got {profile.facts.get(name)} in {profile.name}")
        if profile.dtype != about["dtype"]:
            found.append(f"dtype must be {about['dtype']}, as in the runs, got {profile.dtype} in {profile.name}")
        if profile.mode != runs.mode:
            found.append(f"mode must be {runs.mode}, as in the runs, got {profile.mode} in {profile.name}")
        shape = about["shapes"].get(role)
        differing = [key for key, value in (shape or {}).items() if key != "dtype" and _listed(profile.shape.get(key)) != value]
        if shape is not None and differing:
            key = differing[0]
            what = f"{key} of the {role} must be {checks.shown(shape[key])}, as in the runs"
            found.append(f"{what}, got {checks.shown(profile.shape.get(key))} in {profile.name}")
    return found


def _listed(value: Any) -> Any:
    """Convert a tuple to a list, as in JSON."""
    return [*value] if isinstance(value, tuple) else value


def _row(runs: MeasuredRuns, number: int, timed: TimedDecoding, predicted: Predicted) -> dict[str, Any]:
    decoding = timed.decoding
    several = len(decoding.commits) > 1
    forced = runs.about["forced"]
    measured = timed.median(prompt=not several)
    expected = predicted.after_first if several else predicted.total
    noise = timed.noise(prompt=not several)
    return {
        "decoding": number, "method": decoding.method + (f"-{timed.unit_kind}" if timed.units > 1 else ""),
        "settings": changed_settings(decoding),
        "prompt": runs.log.names[number], "forced": "" if not forced or forced[number] is None else _said(forced[number]),
        "tokens": len(decoding.tokens), "units": timed.units, "predicted_s": expected, "measured_s": measured,
        "error": expected / measured - 1, "noise": noise, "repeats": int(timed.used_repeats.sum()), "disturbed": timed.disturbed,
        "predicted_total_s": predicted.total, "measured_total_s": timed.median(prompt=True),
        **_parts(timed, predicted), "source": "measured", "warnings": "; ".join(runs.warnings),
    }  # fmt: skip


def _parts(timed: TimedDecoding, predicted: Predicted) -> dict[str, float]:
    """Parts of the total time, predicted and measured (`model.logs.prediction_error.PARTS`)."""
    found = {f"{whose}_{name}_s": 0.0 for whose in ("predicted", "measured") for name in PARTS}
    if timed.separate_models:  # one process of the target, the mean of its replicas: it makes passes, or waits
        roles = {kind.role for kind in timed.decoding.account.passes_by_kind}
        replicas = timed.units - len(roles) + 1
        ours = (predicted.passes("target") + predicted.parts.get("target head", 0.0)) / replicas
        theirs = timed.column_median("pass_s", ROLES.index("target")) / replicas
        for whose, made, total in (("predicted", ours, predicted.total), ("measured", theirs, timed.median(prompt=True))):
            found |= {f"{whose}_target_s": made, f"{whose}_waiting_s": total - made}
        return found
    if timed.units > 1:
        for whose, spent in (("predicted", spent_by_main(predicted)), ("measured", timed.main_process_seconds())):
            for what, seconds in spent.items():
                found[f"{whose}_{MAIN[what]}_s"] += seconds
        found["predicted_target_s"] -= predicted.scheduled  # scheduling follows a read, and both are in one busy interval
        found["predicted_rest_s"] = predicted.scheduled
        found["predicted_waiting_s"] = predicted.total - sum(found[f"predicted_{name}_s"] for name in PARTS)
        found["measured_rest_s"] = timed.median(prompt=True) - sum(found[f"measured_{name}_s"] for name in PARTS)
        return found
    for index, role in enumerate(ROLES):
        found |= {f"predicted_{role}_s": predicted.passes(role), f"measured_{role}_s": timed.column_median("pass_s", index)}
    found |= {"predicted_reads_s": predicted.reads, "measured_reads_s": timed.column_median("read_s")}
    for whose, total in (("predicted", predicted.total), ("measured", timed.median(prompt=True))):
        known = sum(found[f"{whose}_{name}_s"] for name in (*ROLES, "reads"))
        found[f"{whose}_rest_s"] = total - known
    return found


MAIN = {
    "forward": "target", "head": "target", "read": "target", "dispatch": "transfers", "promotion": "transfers", "wait": "waiting",
}  # fmt: skip
"""Part of the total time for each activity of the main process; its reads are counted with its passes."""


def spent_by_main(predicted: Predicted) -> dict[str, float]:
    """Time of the main process in a recorded simulated run, by activity [s]."""
    found: dict[str, float] = {}
    for each in predicted.run.intervals:
        if each.unit == 0 or each.what == "promotion":
            found[each.what] = found.get(each.what, 0.0) + each.end - each.start
    return found


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def replayed_seconds(runs: MeasuredRuns, times: Times) -> ReplayedSeconds:
    """Costs of these runs on one unit.

    The overhead of a profile is that of a call of the library, so that a pass that is cut in two has it twice; the overhead of a
    step law is that of an engine's step.
    """
    if isinstance(times, StepLaw):
        return ReplayedSeconds(step_law_times.hardware(runs, times), overhead_per_call=False)
    return ReplayedSeconds({role: ProfileCosts(each) for role, each in times.items()})


def profiles_of(names: Sequence[str], runs: MeasuredRuns, folder: Path) -> dict[str, Profile]:
    """Profiles by role: given as ROLE=PROFILE (a name without a role is for the target), or those of the measurement session.

    The latter are in the folder of the runs.
    """
    from model.hardware import profile_files

    found: dict[str, Profile] = {}
    if not names:
        if not runs.about["profiles"]:
            raise ParameterError(
                "profile is required: the runs name none of their measurement session; give --profile ROLE=NAME for each model"
            )
        return {role: profile_files.load(str(folder / name)) for role, name in runs.about["profiles"].items()}
    for each in names:
        role, equals, name = each.partition("=")
        if not equals:
            role, name = "target", each
        if role not in ROLES:
            raise checks.unknown("role", role, ROLES)
        if role in found:
            raise ParameterError(f"profile of the {role} is given twice; give it once")
        found[role] = profile_files.load(name)
    return found
