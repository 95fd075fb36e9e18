"""Every kind of file that is read, spoiled five hundred times: numbers or one line, in bounded time and memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
import tomllib
from functools import lru_cache
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import figures
from calibrate.commands.calibrate_app import app as calibrate
from calibrate.family import corpus
from calibrate.fits import engine_run
from calibrate.importers import bundled_profiles
from calibrate.loading import prompts
from calibrate.measured_runs import run_plan
from calibrate.validation import served_loads, validation_page
from figures.common import drawn_points, subject
from figures.common.style import canvas
from model.architectures import shape_configs
from model.base.checks import ParameterError
from model.engines import step_law
from model.hardware import devices, profile_files
from model.logs import acceptance_record, measured_runs, position_log, read_log
from model.logs.acceptance_record import AcceptanceRecord, dumps, with_intervals
from model.logs.engine_logs import engine_log
from sim.commands.sim_app import app as sim
from sim.comparison import comparison_report, run_comparison
from sim.reporting import embedded_svg, html_page
from sim.reporting.report_document import ReportDocument, Section
from tests.calibrate import test_served_loads
from tests.calibrate.test_prompts import NESTED, ROWS
from tests.calibrate.test_validation import STAMPS, without_room, write_run
from tests.support import engine_outputs as writers
from tests.support import pages
from tests.support.comparisons import example_runs, profiles, record_decoding, synthetic_runs
from tests.support.foreign_tables import TABLES
from tests.support.fuzzing import (
    bytes_of,
    call_reader,
    folder,
    fuzz_settings,
    json_of,
    lines_of,
    rows_of,
    run_command,
    table_of,
    to_json,
    write_mutated_pair,
)

pytestmark = pytest.mark.slow


# --- scenarios ---

BASE = """[scenario]
name = "x"
tokens = 8
replications = 4
seed = 1
views = ["formula", "paths"]

[[method]]
name = "ppd"
layers = 8
exit_layer = 4
candidates = 2

[[method]]
name = "speculative"
layers = 8
draft_length = 3
[method.cost]
cost_ratio = 0.1
verify_cost = [[1, 1.0], [4, 1.2]]

[outcomes.match]
kind = "iid"
match_rate = 0.5
trials = 100

[outcomes.accept]
kind = "iid"
acceptance_rate = 0.6
source = "measured"

[cost]
final_head = 0.5
early_head = 0.1

[cluster]
units = 4

[sweep]
"outcomes.match.match_rate" = [0.1, 0.9]
"""


LAW = "vllm-llama-3.1-8b-eagle3-h100"
ADVISED = with_intervals(AcceptanceRecord("vllm", ("v1",), (), draft_length=2, drafts=400, survival=(0.8, 0.6)))


@given(data=st.one_of(lines_of(BASE).map(str.encode), bytes_of(BASE.encode())))
@fuzz_settings
def test_scenarios(data: bytes) -> None:
    with folder() as here:
        path = here / "s.toml"
        path.write_bytes(data)
        read_in = CliRunner().invoke(sim, ["lint", str(path)])
        if read_in.exit_code == 1:  # some points would fail, and it says which
            return
        if run_command(sim, "lint", path) == 0:
            said = tomllib.loads(data.decode("utf-8-sig"))["scenario"]
            small = said.get("tokens", 8) <= 1000 and said.get("replications", 1) <= 1000
            if small:
                run_command(sim, "run", path, "--view", "formula", "--no-figures", "-q", "-j", "1", "-o", here / "run")


# --- recorded outcomes that a scenario names ---

PLAYED = """scenario = {{ name = "x", tokens = 4, replications = 4, seed = 1, views = ["formula", "paths"] }}
method = {{ {method} }}
outcomes = {{ {outcomes} }}
{costs}"""
DRAFTED = 'name = "speculative", layers = 4, draft_length = 2'
DECIDED = 'name = "bild", fallback_threshold = 0.5, rollback_threshold = 1.0'
LENGTHS = [[2, 1, 3, 1, 1, 2], [1, 2, 1, 1, 3, 1], [3, 2, 1, 2]]
DECISIONS = {"confidence": [0.9, 0.2, 0.7, 0.4], "distance": [0.1, 3.0, 0.5, 2.0], "agrees": [True, False, True, False]}
SURE = {"confidence": [[0.2, 0.6, 0.9, 1.0], [0.5, 0.5, 0.6, 1.0]], "agrees": [[False, True, True, True], [True, True, True, True]]}
MATCHES = [[True, False, True, True], [False, False, True, True]]
STEPS = [writers.Steps(3, (0, 1, 2, 3, 3)), writers.Steps(3, (2, 0, 1))]
RECORDS = {
    "rounds.json": (DRAFTED, "rounds", LENGTHS), "accepted.json": (DRAFTED, "replay", MATCHES),
    "matches.json": ('name = "ppd", layers = 4, exit_layer = 2, candidates = 1', "replay", MATCHES),
    "decisions.json": (f"{DECIDED}, layers = 4", "thresholds", DECISIONS),
    "sequences.json": (f"{DECIDED}, layers = 4", "replay", {name: [column, column[::-1]] for name, column in DECISIONS.items()}),
    "sure.json": ('name = "early_exit", layers = 4, threshold = 0.55', "confidences", SURE),
}  # fmt: skip
PUBLIC = [
    json.dumps({
        "id": number, "prompt_token_ids": [1, 2], "generated_token_ids": [*range(sum(each))], "acc_eagle": {"acc_len": each},
    })
    for number, each in enumerate(LENGTHS)
]  # fmt: skip


def played(here: Path, name: str, method: str, outcomes: str, key: str = "file") -> None:
    """A scenario of one point on a record; where nothing can be made of it, that is said of the point."""
    costs = "" if "ppd" in method or "early" in method else "cost = { cost_ratio = 0.1 }"
    (here / "s.toml").write_text(PLAYED.format(method=method, outcomes=f'{outcomes}, {key} = "{name}"', costs=costs))
    run_command(sim, "run", here / "s.toml", "--no-figures", "-q", "-j", "1", "-o", here / "run", failing=True)


@given(data=st.data(), name=st.sampled_from([*RECORDS]))
@fuzz_settings
def test_recorded_outcomes(data: st.DataObject, name: str) -> None:
    method, kind, said = RECORDS[name]
    with folder() as here:
        spoiled_ = st.one_of(json_of(said).map(to_json).map(str.encode), bytes_of(json.dumps(said).encode()))
        (here / name).write_bytes(data.draw(spoiled_))
        played(here, name, method, f'kind = "{kind}"')


LOGS = {
    "v1.log": "\n".join(writers.vllm_v1(each, range(7)) for each in STEPS),
    "v0.log": "\n".join(writers.vllm_v0(each, each.total, range(6)) for each in STEPS),
    "bench.txt": writers.vllm_bench(STEPS[0]), "metrics.txt": writers.counters(STEPS[0], "vllm"),
    "lmdeploy.log": writers.lmdeploy_log(STEPS[0], range(5)), "report.txt": writers.trtllm_report(STEPS),
    "sglang.log": writers.sglang_line(2.5, 2, 100.0, 10, accept_rate="accept rate: 0.50, "),
    "llama.log": f"{writers.llama_request(STEPS[0], 1)}\n{writers.llama_statistics(STEPS[0], 3.0)}",
    "eval.log": f"{writers.llama_request(STEPS[0], 1)}\n       eval time =  2296.72 ms /   256 tokens (  8.97 ms per token)",
    "serving.txt": "Backend: sglang\nMax request concurrency: 4\nMean TPOT (ms): 5.0\nAccept length: 2.5",
    "settings.log": f"speculative_algorithm=None, speculative_config=None\n{writers.sglang_line(0, 2, 100.0, 10)}",
    "speculative.txt": "n_draft = 8\nn_drafted = 112\nn_accept  = 36\naccept    = 32.143%", "mlx.txt": "from_draft: 61.5%",
}  # fmt: skip
DOCUMENTS = {
    "bench.json": writers.vllm_bench_json(STEPS[0]), "request.json": writers.vllm_response(STEPS[0]),
    "meta.json": writers.sglang_response(STEPS[0]), "iterations.json": writers.trtllm_rows(STEPS[0]),
    "timings.json": {"timings": {"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 9}},
    "answers.json": json.loads(writers.eagle_line(STEPS, True)), "tokens.json": [{"from_draft": True}, {"from_draft": False}],
    "serving.json": {"accept_length": 2.5, "output_throughput": 70.0, "mean_tpot_ms": 7.0, "concurrency": 2.5, "completed": 4},
    "report.json": {
        "request_info": {"num_requests": 2, "avg_output_length": 30.0, "avg_num_concurrent_requests": 2.0},
        "decoding_stats": {
            "acceptance_length_percentiles": {"average": 2.5}, "num_accepted_draft_tokens_percentiles": {"average": 18.0},
        },
    },
}  # fmt: skip


@given(data=st.data(), name=st.sampled_from([*LOGS, *DOCUMENTS]), draft_length=st.sampled_from((None, 0, 3)))
@fuzz_settings
def test_engine_logs(data: st.DataObject, name: str, draft_length: int | None) -> None:
    with folder() as here:
        if name in LOGS:
            mark = data.draw(st.sampled_from((":", "=", ",")))
            found = st.one_of(lines_of(LOGS[name], mark).map(str.encode), bytes_of(LOGS[name].encode()))
        else:
            found = st.one_of(json_of(DOCUMENTS[name]).map(to_json).map(str.encode), bytes_of(to_json(DOCUMENTS[name]).encode()))
        (here / name).write_bytes(data.draw(found))
        more = [] if draft_length is None else ["--draft-length", str(draft_length)]
        done = run_command(calibrate, "import", "engine-log", here / name, "-o", here / "made", *more)
        assert (here / "made.json").exists() == (done == 0)
        if done == 0:
            acceptance_record.load(here / "made.json")


@given(data=st.data())
@fuzz_settings
def test_acceptance_records(data: st.DataObject) -> None:
    with folder() as here:
        (here / "v1.log").write_text(LOGS["v1.log"])
        said = json.loads(acceptance_record.dumps(engine_log.read([here / "v1.log"])))
        spoiled_ = st.one_of(json_of(said).map(to_json).map(str.encode), bytes_of(json.dumps(said).encode()))
        (here / "made.json").write_bytes(data.draw(spoiled_))
        played(here, "made.json", DRAFTED, 'kind = "engine-log"')
        times = ("--plain-tpot", "8ms", "--tpot", "6ms", "--engine-law", "vllm-llama-3.1-8b-eagle3-h100")
        run_command(sim, "explain", "--log", here / "made.json", *times)


TRACES = {
    "t.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,37,4\n2023-11-16 18:15:50.9951690,39,10\n",
    "t.jsonl": '{"timestamp": 0, "input_length": 37, "output_length": 4}\n'
        '{"timestamp": 12, "input_length": 7, "output_length": 4}\n',
}


@given(data=st.data(), name=st.sampled_from([*TRACES]))
@fuzz_settings
def test_traces_of_requests(data: st.DataObject, name: str) -> None:
    with folder() as here:
        mark = "," if name == "t.csv" else data.draw(st.sampled_from((":", ",")))
        found = st.one_of(lines_of(TRACES[name], mark).map(str.encode), bytes_of(TRACES[name].encode()))
        (here / name).write_bytes(data.draw(found))
        law = ("--engine-law", "vllm-llama-3.1-8b-eagle3-h100", "--policy", "off", "--replications", "0", "--requests", "20")
        run_command(sim, "serve", "--trace", here / name, *law)


SERVED = """[scenario]
name = "mine"
replications = 1
[system]
engine_law = "vllm-llama-3.1-8b-eagle3-h100"
[load]
concurrency = [1, 2]
requests = 20
prompt = 16.0
output = 4.0
[server]
policies = ["off", "static:2"]
max_num_seqs = 4
[sweep]
"server.block_size" = [8, 16]
"""


@given(data=st.one_of(lines_of(SERVED, "=").map(str.encode), bytes_of(SERVED.encode())))
@fuzz_settings
def test_scenarios_of_servers(data: bytes) -> None:
    with folder() as here:
        (here / "s.toml").write_bytes(data)
        if run_command(sim, "lint", here / "s.toml") == 0:
            text = data.decode("utf-8-sig")
            said = tomllib.loads(text).get("load", {})
            if "load" in tomllib.loads(text) and said.get("requests", 20) == 20 and said.get("output", 4.0) == 4.0:
                run_command(sim, "run", here / "s.toml", "--dry-run")


@lru_cache(maxsize=1)
def served() -> dict[str, bytes]:
    """The files of a finished run of a server."""
    with folder() as here:
        (here / "s.toml").write_text(SERVED)
        assert run_command(sim, "run", here / "s.toml", "-q", "-j", "1", "-o", here / "run") == 0
        files = [path for path in (here / "run").rglob("*") if path.is_file() and path.parent.name != "figures"]
        return {str(path.relative_to(here / "run")): path.read_bytes() for path in files}


@given(more=st.data())
@fuzz_settings
def test_results_of_servers(more: st.DataObject) -> None:
    """Figures are drawn of all accepted results, but not written."""
    held = served()["serving.json"]
    text = more.draw(st.one_of(bytes_of(held), json_of(json.loads(held)).map(to_json).map(str.encode)))
    with folder() as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda *_, **__: [])
        (here / "serving.json").write_bytes(text)
        run_command(sim, "plot", here)
        run_command(sim, "report", here, "-o", here / "r.html")
        document = json.loads(held)["points"][0]
        (here / "one.json").write_text(to_json(more.draw(json_of(document))))
        run_command(sim, "report", here / "one.json", "-o", here / "r.md")


@given(more=st.data())
@fuzz_settings
def test_served_runs_that_were_broken_off(more: st.DataObject) -> None:
    held = served()
    name = more.draw(st.sampled_from(sorted(held)))
    with folder() as above:
        here = above / "run"
        (here / "shards").mkdir(parents=True)
        for each, content in held.items():
            (here / each).write_bytes(content)
        (here / name).write_bytes(more.draw(st.one_of(bytes_of(held[name]), st.sampled_from([b"", b"{}", b"null"]))))
        (above / "s.toml").write_text(SERVED)
        if run_command(sim, "run", above / "s.toml", "-q", "-j", "1", "--resume", "--no-figures", "-o", here) == 0:
            assert (here / "results.csv").read_bytes() == held["results.csv"]


TABLE = "\n".join([",".join(DECISIONS), *(",".join(map(str, row)) for row in zip(*DECISIONS.values(), strict=True))])


@given(data=st.one_of(lines_of(TABLE, ",").map(str.encode), bytes_of(TABLE.encode())))
@fuzz_settings
def test_tables_of_decisions(data: bytes) -> None:
    with folder() as here:
        (here / "decisions.csv").write_bytes(data)
        played(here, "decisions.csv", f"{DECIDED}, layers = 4", 'kind = "thresholds"')


@given(data=rows_of(PUBLIC))
@fuzz_settings
def test_public_logs_of_rounds(data: bytes) -> None:
    with folder() as here:
        (here / "public.jsonl").write_bytes(data)
        run_command(calibrate, "rates", here / "public.jsonl", "--drafter", "eagle", "--lengths", "2,3")
        played(here, "public.jsonl", DRAFTED, 'kind = "rounds", drafter = "eagle"')


# --- measured runs, and logs of decisions ---


@lru_cache(maxsize=1)
def measured() -> tuple[dict[str, bytes], pl.DataFrame, pl.DataFrame]:
    """The files of measured runs with their profiles; their two tables."""
    clock = profiles(head=2e-3, wake=1e-3, scheduling=1e-4)
    made = [
        record_decoding("autoregressive", 5, {}), record_decoding("speculative", 5, {"acceptance_rate": 0.7}, draft_length=2),
        record_decoding("ppd", 5, {"match_rate": 0.6}, exit_layer=8, candidates=1),
    ]  # fmt: skip
    found = synthetic_runs(made, clock, units=[1, 1, 2])
    with folder() as here:
        named = {role: profile_files.save(clock[role], here).name for role in found.log.models}
        measured_runs.save(
            measured_runs.MeasuredRuns(found.log, found.table, dict(found.about) | {"profiles": named}), here / "own.json"
        )
        return {path.name: path.read_bytes() for path in here.iterdir()}, found.table, found.log.table()


@given(data=st.data())
@fuzz_settings
def test_measured_runs(data: st.DataObject) -> None:
    held, table, _ = measured()
    with folder() as here:
        write_mutated_pair(data, held, "own", table, here)
        run_command(sim, "compare", here / "own.json", *data.draw(st.sampled_from(((), ("--json",)))))


@given(data=st.data())
@fuzz_settings
def test_logs_of_decisions(data: st.DataObject) -> None:
    held, _, reads = measured()
    with folder() as here:
        write_mutated_pair(data, held, "own.reads", reads, here)
        path = here / "own.json"
        digest = hashlib.sha256((here / "own.reads.json").read_bytes()).hexdigest()
        path.write_text(to_json(json.loads(held["own.json"]) | {"reads_sha256": digest}))
        call_reader(read_log.load, here / "own.reads.json")
        run_command(sim, "compare", path)
        for log in (path, here / "own.reads.json"):
            run_command(calibrate, "rates", log)


# --- profiles ---

LAYERED = """[scenario]
name = "x"
tokens = 8
[[method]]
name = "autoregressive"
layers = {}
[cost]
kind = "profile"
profile = "mine.json"
"""


@lru_cache(maxsize=3)
def profiled(name: str) -> tuple[dict[str, bytes], pl.DataFrame]:
    found = profile_files.load(name)
    table = found.table.gather_every(max(1, found.table.height // 300))
    with folder() as here:
        profile_files.save(dataclasses.replace(found, name="mine", table=table), here)
        return {path.name: path.read_bytes() for path in here.iterdir()}, table


@given(data=st.data(), name=st.sampled_from(("a100-llama-2-7b", "cpu-llama-68m", "h100-operations")))
@fuzz_settings
def test_profiles(data: st.DataObject, name: str) -> None:
    held, table = profiled(name)
    with folder() as here:
        write_mutated_pair(data, held, "mine", table, here)
        (here / "s.toml").write_text(LAYERED.format(32 if "7b" in name else 2))
        if run_command(sim, "ls", "profiles", here / "mine.json") == 0:
            run_command(sim, "run", here / "s.toml", "--view", "formula", "--no-figures", "-q", "-j", "1", "-o", here / "run")


# --- position logs ---


@lru_cache(maxsize=1)
def logged() -> tuple[dict[str, bytes], pl.DataFrame]:
    log = position_log.bundled()
    table = log.table.filter(pl.col("prompt") < 3)
    with folder() as here:
        position_log.save(position_log.PositionLog(table, {**log.header, "prompts": log.header["prompts"][:3]}), here / "log.json")
        return {path.name: path.read_bytes() for path in here.iterdir()}, table


@given(data=st.data())
@fuzz_settings
def test_position_logs(data: st.DataObject) -> None:
    held, table = logged()
    with folder() as here:
        write_mutated_pair(data, held, "log", table, here)
        if data.draw(st.booleans()):
            run_command(calibrate, "rates", here / "log.json", *data.draw(st.sampled_from(((), ("--json",)))))
            return
        method, kind = data.draw(st.sampled_from((
            ('name = "ppd", layers = 12, exit_layer = 6, candidates = 1', 'kind = "replay", head = "common"'),
            ('name = "speculative", layers = 12, draft_length = 2', 'kind = "replay"'),
            (f"{DECIDED}, layers = 12", 'kind = "thresholds"'), (f"{DECIDED}, layers = 12", 'kind = "replay"'),
            ('name = "early_exit", layers = 12, threshold = 0.55', 'kind = "confidences"'),
        )))  # fmt: skip
        played(here, "log.json", method, kind, "log")


# --- tables of other projects ---

IMPORTS = {
    "vidur": (["vidur", "--model", "llama-2-7b", "--gpu", "a100", "--network", "vidur/network"], "vidur"),
    "llmservingsim": (["llmservingsim", "--model", "llama-3.1-8b", "--gpu", "rtx-4090"], "llmservingsim/tp1"),
    "aiconfigurator": (["aiconfigurator", "--gpu", "h100", "--engine", "vllm/1.0"], "aiconfigurator"),
}  # fmt: skip


@given(data=st.data(), source=st.sampled_from([*IMPORTS]))
@fuzz_settings
def test_tables_of_other_projects(data: st.DataObject, source: str) -> None:
    (kind, *more), where = IMPORTS[source]
    with folder() as here:
        shutil.copytree(TABLES / source, here / source)
        files = sorted(path for path in (here / source).rglob("*.*") if path.suffix in (".csv", ".yaml"))
        path = data.draw(st.sampled_from(files))
        if source == "aiconfigurator":
            frames = {each: pl.read_csv(each.read_bytes()) for each in files}
            frames[path] = data.draw(table_of(frames[path]))
            for each, frame in frames.items():
                frame.write_parquet(each.with_suffix(".parquet"))
            if data.draw(st.booleans()):
                there = path.with_suffix(".parquet")
                there.write_bytes(data.draw(bytes_of(there.read_bytes())))
        else:
            text = path.read_text()
            path.write_bytes(data.draw(st.one_of(lines_of(text, ",").map(str.encode), bytes_of(text.encode()))))
        more = [str(here / each) if "/network" in each else each for each in more]
        run_command(calibrate, "import", kind, here / where, *more, "-o", here / "out")


ORIGINS = """# Sources

## owner/project · MIT
| file | commit | path | sha256 |
|---|---|---|---|
| gpu/vidur/mlp.csv | abc1234 | data/mlp.csv | 0123456789abcdef |

## owner/other · Apache-2.0
| gpu/other.csv | def5678 | other.csv | fedcba9876543210 |
"""


@given(data=st.one_of(lines_of(ORIGINS, "|").map(str.encode), lines_of(ORIGINS, "·").map(str.encode), bytes_of(ORIGINS.encode())))
@fuzz_settings
def test_lists_of_sources(data: bytes) -> None:
    with folder() as here:
        (here / "SOURCES.md").write_bytes(data)
        call_reader(bundled_profiles.origins, here)


# --- engines that ran ---

CELLS = """sequences,draft_length,mean_acceptance_length,tpot_ms,context
1,0,1,7.07,500
8,3,2.79,4.09,
16,2,2.36,,1000
"""



@given(data=st.data())
@fuzz_settings
def test_runs_of_engines(data: st.DataObject) -> None:
    with folder() as here:
        write_run(here)
        if data.draw(st.booleans()):
            without_room(here, STAMPS, {})
        name = data.draw(st.sampled_from(("timeseries.csv", "requests.jsonl", "meta.json")))
        text = (here / name).read_text()
        kinds = [bytes_of(text.encode())]
        if name == "timeseries.csv":
            kinds.append(lines_of(text, ",").map(str.encode))
        elif name == "meta.json":
            kinds.append(json_of(json.loads(text)).map(to_json).map(str.encode))
        else:
            kinds.append(rows_of(text.splitlines()))
        (here / name).write_bytes(data.draw(st.one_of(kinds)))
        call_reader(engine_run.read, here)


RECORDED_REQUESTS = test_served_loads.rows()


@given(data=st.data())
@fuzz_settings
def test_requests_of_runs(data: st.DataObject) -> None:
    with folder() as here:
        test_served_loads.written(here, RECORDED_REQUESTS, test_served_loads.document())
        name = data.draw(st.sampled_from(("requests.jsonl", "meta.json")))
        text = (here / name).read_text()
        others = rows_of(text.splitlines()) if name == "requests.jsonl" else json_of(json.loads(text)).map(to_json).map(str.encode)
        (here / name).write_bytes(data.draw(st.one_of(bytes_of(text.encode()), others)))
        call_reader(served_loads.read_run, here)


@given(data=st.one_of(bytes_of(dumps(ADVISED).encode()), json_of(json.loads(dumps(ADVISED))).map(to_json).map(str.encode)))
@settings(fuzz_settings, max_examples=60)
def test_logs_for_advice(data: bytes) -> None:
    with folder() as here:
        (here / "record.json").write_bytes(data)
        run_command(
            sim, "advise", "--engine-law", LAW, "--batch", "1", "--draft-length", "1", "--log", here / "record.json", "--json"
        )


@given(data=st.one_of(bytes_of(CELLS.encode()), lines_of(CELLS, ",").map(str.encode)))
@fuzz_settings
def test_cells_of_engines(data: bytes) -> None:
    with folder() as here:
        (here / "cells.csv").write_bytes(data)
        run_command(calibrate, "engine", "predict", LAW, here / "cells.csv", "--json")


CLAIMS = (
    "method,model,gpu,draft,alpha,AL,K,c,batch,context,tp,speedup,plain_tpot_ms,dtype\n"
    "speculative,llama-3.1-8b,h100,llama-3.2-1b,79%,,3,0.1,8,100,1,2.1x,,fp8\nEAGLE-3,qwen3-8b,l40s,,,2.5,4,,64,,2,1.9,30,\n"
)


@given(data=st.one_of(bytes_of(CLAIMS.encode()), lines_of(CLAIMS, ",").map(str.encode)))
@fuzz_settings
def test_claims_of_speedups(data: bytes) -> None:
    with folder() as here:
        (here / "claims.csv").write_bytes(data)
        run_command(sim, "audit", here / "claims.csv", "--json")


@given(data=st.data())
@fuzz_settings
def test_step_laws(data: st.DataObject) -> None:
    text = step_law.text(step_law.load(LAW))
    with folder() as here:
        kinds = bytes_of(text.encode()), json_of(json.loads(text)).map(to_json).map(str.encode)
        (here / "law.json").write_bytes(data.draw(st.one_of(kinds)))
        (here / "cells.csv").write_text(CELLS)
        run_command(calibrate, "engine", "predict", here / "law.json", here / "cells.csv", "--json")
        run_command(sim, "ls", "laws", here / "law.json")


# --- configurations, devices, plans, prompts ---

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "head_dim": 16,
}  # fmt: skip
CONFIGS = [CONFIG, *(
    CONFIG | more for more in (
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"],
         "quantization_config": {"quant_method": "mxfp4"}},
        {"model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 4, "v_head_dim": 4, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"model_type": "gemma3", "text_config": CONFIG | {"model_type": "gemma3_text", "sliding_window": 8}},
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100,
         "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
            "a": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}, "input_activations": {}}}}},
    )
)]  # fmt: skip


@given(data=st.data())
@fuzz_settings
def test_configurations(data: st.DataObject) -> None:
    with folder() as here:
        config = data.draw(st.sampled_from(CONFIGS))
        text = to_json(data.draw(json_of(config))).encode() if data.draw(st.booleans()) else data.draw(
            bytes_of(json.dumps(config).encode())
        )  # fmt: skip
        (here / "config.json").write_bytes(text)
        call_reader(shape_configs.from_config, here / "config.json")
        run_command(sim, "ls", "shapes", here / "config.json")


PLAN = """[run]
model = "family"
tokens = 8
repeats = 2
prompts = 1
mode = "eager"

[profile]
widths = [1, 2]
contexts = [0, 32]

[[method]]
name = "ppd"
exit_layer = 6
sweep = { candidates = [1, 3] }
forced = { match_rate = [0.3, 0.7] }
unit_kind = "processes"

[[method]]
name = "speculative"
draft_length = 2
"""


@given(data=st.one_of(lines_of(PLAN).map(str.encode), bytes_of(PLAN.encode())))
@fuzz_settings
def test_plans(data: bytes) -> None:
    with folder() as here:
        (here / "plan.toml").write_bytes(data)
        call_reader(run_plan.read, here / "plan.toml")


TEXTS = {
    "x.txt": "def main(\n\nimport os\\nimport sys\n<|endoftext|>\nclass A:\n", "x.md": "One.\nTwo.\n\nThree.\n",
    "x.raw": " = Title = \n \n A heap is a tree . \n", "x.json": json.dumps(NESTED), "y.json": json.dumps(["one", {"text": "two"}]),
    "x.jsonl": "\n".join(json.dumps(row | {"id": number}) for number, (row, *_) in enumerate(ROWS[:1] * 3)),
    "y.jsonl": "\n".join(json.dumps({"question_id": number, "turns": ["one", "two"]}) for number in range(3)),
}  # fmt: skip


@given(data=st.data(), name=st.sampled_from([*TEXTS]))
@fuzz_settings
def test_prompts(data: st.DataObject, name: str) -> None:
    text = TEXTS[name]
    kinds = [bytes_of(text.encode())]
    if name.endswith(".json"):
        kinds.append(json_of(json.loads(text)).map(to_json).map(str.encode))
    if name.endswith(".jsonl"):
        kinds.append(rows_of(text.splitlines()))
    with folder() as here:
        (here / name).write_bytes(data.draw(st.one_of(kinds)))
        template = data.draw(st.sampled_from((None, "none", "squad", "wmt", "cnn-dm")))
        seed = data.draw(st.sampled_from((None, 1)))
        call_reader(functools.partial(prompts.load, template=template, limit=5, seed=seed), here / name)


@given(data=st.data())
@fuzz_settings
def test_training_text(data: st.DataObject) -> None:
    with folder() as here:
        for name in ("a.txt", "b.py"):
            (here / name).write_bytes(b"one line\nanother line\n" * 20)
        (here / "a.txt").write_bytes(data.draw(bytes_of(b"one line\nanother line\r\n" * 3)))
        for where in (here, here / "a.txt"):
            call_reader(corpus.corpus_of_files, where)


DEVICE = """name = "mine"
memory_bytes = 8e10
bandwidth = 2e12
link = 3e11
host_link = 3e10
cache_bytes = 4e7
source = "my own"

[rates]
bfloat16 = 3e14
float32 = 2e13
"""


@given(data=st.one_of(lines_of(DEVICE).map(str.encode), bytes_of(DEVICE.encode())))
@fuzz_settings
def test_devices(data: bytes) -> None:
    with folder() as here:
        path = here / "mine.toml"
        path.write_bytes(data)
        call_reader(devices.device, str(path))
        run_command(sim, "ls", "devices", path)


# --- pages ---

PAGE = "# Page\n\n| a | b |\n\n<!-- runs -->\n\nOf others.\n"


@given(data=bytes_of(PAGE.encode()))
@fuzz_settings
def test_pages(data: bytes) -> None:
    with folder() as here:
        (here / "page.md").write_bytes(data)
        call_reader(validation_page.stale, (), here / "page.md")
        call_reader(validation_page.stale_sections, (), here / "page.md")
        call_reader(validation_page.write, (), here / "page.md")


# --- what a run has left ---


FINISHED = {
    "ppd": """
scenario = { name = "x", tokens = 8, replications = 4, seed = 1, views = ["formula", "paths"] }
method = { name = "ppd", layers = 8, exit_layer = 4, candidates = 2 }
outcomes = { kind = "iid", match_rate = 0.5 }
""",
    "speculative": """
scenario = { name = "x", tokens = 8, replications = 4, seed = 1, views = ["formula", "paths"] }
method = { name = "speculative", layers = 8, draft_length = 3 }
outcomes = { kind = "iid", acceptance_rate = 0.6, trials = 100 }
cost = { cost_ratio = 0.1 }
""",
}
RUN = ("--no-figures", "-q", "-j", "1")


@lru_cache(maxsize=2)
def left(method: str) -> dict[str, bytes]:
    """What a run leaves in its directory but shards."""
    with folder() as here:
        (here / "s.toml").write_text(FINISHED[method])
        assert CliRunner().invoke(sim, ["run", str(here / "s.toml"), *RUN, "-o", str(here / "run")]).exit_code == 0
        return {path.name: path.read_bytes() for path in (here / "run").iterdir() if path.is_file()}


@given(data=st.data(), method=st.sampled_from([*FINISHED]))
@fuzz_settings
def test_results(data: st.DataObject, method: str) -> None:
    """Figures are drawn of all accepted files, but not written."""
    held = left(method)
    with folder() as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda *_, **__: [])
        for name, content in held.items():
            (here / name).write_bytes(content)
        name = data.draw(st.sampled_from([each for each in held if each.endswith(".parquet")]))
        if data.draw(st.booleans()):
            (here / name).write_bytes(data.draw(bytes_of(held[name])))
        else:
            data.draw(table_of(pl.read_parquet(held[name]))).write_parquet(here / name)
        run_command(sim, "plot", here)
        run_command(sim, "report", here, "-o", here / "r.html")


@given(data=st.one_of(st.sampled_from([b"", b"{}", b"[]", b"null"]), st.just(b"x")), more=st.data())
@fuzz_settings
def test_what_a_run_says_of_itself(data: bytes, more: st.DataObject) -> None:
    held = left("speculative")
    with folder() as above:
        here = above / "run"
        here.mkdir()
        for name, content in held.items():
            (here / name).write_bytes(content)
        said = json.loads(held["metadata.json"])
        text = data if more.draw(st.booleans()) else more.draw(
            st.one_of(bytes_of(held["metadata.json"]), json_of(said).map(to_json).map(str.encode))
        )  # fmt: skip
        (here / "metadata.json").write_bytes(text)
        assert isinstance(subject.of_run(here), str)
        assert min(drawn_points.grid_shape(here)) >= 0
        for name in ("failed.json", "disagreements.json", "summary.json"):
            (here / name).write_bytes(
                more.draw(st.one_of(st.just(held[name]), bytes_of(held[name]), st.sampled_from([b"[{}]", b"3"])))
            )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figures, "save", lambda *_, **__: [])
            run_command(sim, "report", here, "-o", above / "r.md")
            run_command(sim, "report", here / "summary.json", "-o", above / "r.html")
        (above / "s.toml").write_text(FINISHED["speculative"])
        run_command(sim, "run", above / "s.toml", *RUN, "--resume", "-o", here)


# --- documents of commands and figures, of which reports are made ---


@lru_cache(maxsize=1)
def comparison() -> bytes:
    """What `sim compare` writes for a report."""
    runs, profiles = example_runs()
    table = run_comparison.compare(runs, profiles)
    return comparison_report.document([("one", table, dict(runs.about))]).encode()


@given(data=st.data())
@fuzz_settings
def test_documents_of_commands(data: st.DataObject) -> None:
    """Figures are drawn of all accepted files, but not written."""
    held = comparison()
    text = data.draw(st.one_of(bytes_of(held), json_of(json.loads(held)).map(to_json).map(str.encode)))
    with folder() as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda *_, **__: [])
        (here / "comparison.json").write_bytes(text)
        run_command(sim, "report", here, "-o", here / "r.html")


@lru_cache(maxsize=1)
def advice() -> bytes:
    """What `sim advise` prints, for a report."""
    options = [
        "--engine-law", "vllm-llama-3.1-8b-eagle3-h100", "--acceptance", "0.6,0.8",
        "--batch", "1,8", "--draft-length", "1,3", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(sim, ["advise", *options])
    assert done.exit_code == 0, done.output
    return done.stdout.encode()


@given(data=st.data())
@fuzz_settings
def test_documents_of_advice(data: st.DataObject) -> None:
    held = advice()
    text = data.draw(st.one_of(bytes_of(held), json_of(json.loads(held)).map(to_json).map(str.encode)))
    with folder() as here:
        (here / "advice.json").write_bytes(text)
        run_command(sim, "report", here / "advice.json", "-o", here / "r.html")


@lru_cache(maxsize=1)
def drawn() -> bytes:
    """A small figure as it is written into files."""
    figure, axes = canvas(2, 2, (0.2, 0.2, 0.7, 0.7))
    axes.plot([1, 2], label="a")
    axes.set(title="t", xlabel="x")
    return figures.svg(figure).encode()


@given(data=st.data())
@fuzz_settings
def test_drawn_figures(data: st.DataObject) -> None:
    """A figure is refused, or embedded in a page that is well-formed and refers to nothing outside."""
    cut = data.draw(st.sampled_from((b"", b"<use", b"</g>", b"<defs>", b" id=", b"#", b"<path d=")))
    put = data.draw(
        st.sampled_from((b"<script>", b"<g onload='x'>", b"<!ENTITY a 'b'>", b"&#0;", b" xlink:href='http://e.vil/'", b"<a/>"))
    )
    text = drawn().replace(cut, cut + put, 1) if cut and data.draw(st.booleans()) else data.draw(bytes_of(drawn()))
    with folder() as here:
        (here / "figure.svg").write_bytes(text)
        call_reader(embedded_svg.load, here / "figure.svg")
        try:
            figure = embedded_svg.load(here / "figure.svg")
        except ParameterError:
            return
        pages.check(html_page.render(ReportDocument("t", "q", "v", [Section("s", [figure, figure])])))
