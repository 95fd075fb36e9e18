"""Measured runs with CUDA graphs: chosen by name, recorded in every file, and never compared with times without graphs.

`tests.support.fake_cuda_graphs` stands in for the device, so no test says anything about real times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from calibrate.commands import run_command
from calibrate.commands.calibrate_app import app
from calibrate.decode import real_decoding
from calibrate.loading.architectures import architecture
from calibrate.measured_runs import interleaved_profiles, measure_runs, run_plan
from calibrate.measured_runs.measure_runs import MeasurementPlan, PlannedDecoding
from calibrate.timing import interpreter_pass, library_pass, profile_from_timings, read_times, single_pass
from calibrate.timing.timing_grid import TimingGrid
from calibrate.untested_on_gpu import cuda_graphs
from calibrate.untested_on_gpu.cuda_graphs import Graphs
from calibrate.untested_on_gpu.over_streams import Lanes
from model.base.checks import ParameterError
from model.hardware import profile_files
from model.logs import measured_runs
from model.steps import LayerSpan
from sim.comparison import comparison_report, run_comparison
from tests.support import fake_cuda_graphs, real_models
from tests.support.fake_clocks import few_parts, install_fake_time
from tests.support.fake_cuda_graphs import Cuda

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")

TEXT = tuple(range(3, 9))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Graphs on the CPU, where a disturbed pass may seem to leave its layers no time."""
    monkeypatch.setattr(profile_from_timings, "check", lambda _: None)
    return fake_cuda_graphs.install(monkeypatch)


def shapes(folder: Path, **layers_of: int) -> dict[str, str]:
    """Return configurations of tiny models, by role."""
    found = {}
    for role, depth in layers_of.items():
        said = real_models.config("llama", depth).to_dict() | {"vocab_size": 128, "max_position_embeddings": 256}
        found[role] = str(folder / role / "config.json")
        (folder / role).mkdir()
        Path(found[role]).write_text(json.dumps(said))
    return found


def plan_of(folder: Path, **more: Any) -> run_plan.WrittenPlan:
    names = shapes(folder, model=4, draft=2)
    return run_plan.from_tables({
        "run": {**names, "tokens": 6, "repeats": 2, "prompt_tokens": 5, "mode": "cuda-graph"},
        "profile": {"widths": [1, 3], "contexts": [0, 8], "batches": [1, 2], "rounds": 1, "repeats": 2},
        "method": [
            {"name": "autoregressive", "forced": {}},
            {"name": "speculative", "draft_length": 2, "forced": {"acceptance_rate": 0.5}},
            {"name": "skipdecode", "min_layers": 2, "max_layers": 4, "sequences": 3, "batching": "static", "forced": {}},
        ],
        **more,
    })  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, measured_runs.MeasuredRuns, Cuda]:
    """Make runs with graphs and the profiles of their session once; return their folder, the runs and the device."""
    folder = tmp_path_factory.mktemp("made")
    out = folder / "out" / "runs.json"
    with pytest.MonkeyPatch.context() as patch:
        install_fake_time(patch)
        few_parts(patch, read_times.CONTEXT)
        patch.setattr(profile_from_timings, "check", lambda _: None)
        device = fake_cuda_graphs.install(patch)
        return out, run_command.measure_plan(plan_of(folder), out, "cpu"), device


def test_runs_record_the_mode_of_their_passes(made: tuple[Path, measured_runs.MeasuredRuns, Cuda]) -> None:
    out, found, cuda = made
    assert found.mode == measured_runs.load(out).mode == "cuda-graph"
    assert found.about["room"] == 128  # room for everything that the session times
    assert [*found.about["profiles"].values()] == [f"cpu-{name}-graph-interpreter.json" for name in ("model", "draft")]
    timed = {role: profile_files.load(out.parent / name) for role, name in found.about["profiles"].items()}
    assert all(each.mode == "cuda-graph" for each in timed.values())
    assert not {"tree", "beams", "fork"} & {*timed["target"].parts}
    _, table, about = run_comparison.of_file(out)
    assert set(table["mismatch"]) == {""}
    assert comparison_report.setup_of(about).endswith("float32, cuda-graph")
    assert any("float32, cuda-graph: medians" in line for line in run_command._lines(found))
    assert cuda.graphs


def test_profiles_of_another_mode_are_refused(made: tuple[Path, measured_runs.MeasuredRuns, Cuda]) -> None:
    out, found, _ = made
    timed = {role: profile_files.load(out.parent / name) for role, name in found.about["profiles"].items()}
    eager = measured_runs.MeasuredRuns(found.log, found.table, {key: value for key, value in found.about.items() if key != "mode"})
    assert eager.mode == "eager"  # as in older files without the mode
    wrong = run_comparison.mismatches(eager, timed)
    assert len(wrong) == 2
    assert wrong[0].startswith("mode must be eager, as in the runs, got cuda-graph in cpu-model-graph-interpreter")
    with pytest.raises(ParameterError, match="mode must be eager, as in the runs"):
        run_comparison.compare(eager, timed)
    with pytest.raises(ParameterError, match="unknown mode 'quick'"):
        measured_runs.MeasuredRuns(found.log, found.table, found.about | {"mode": "quick"})


def test_raw_rows_resume_only_in_the_same_mode(cuda: Cuda, tmp_path: Path) -> None:
    config = shapes(tmp_path, model=4)["model"]
    own = library_pass.LibraryModel(architecture(config), "cpu", "float32").decoder
    grid = TimingGrid((1,), (4,), modes=("interpreter",))
    folder = tmp_path / "new" / "deeper"  # made with its parents
    begun = profile_from_timings.open_model(config, grid, folder, device="cpu", quick=True, decoder=own, name="same")
    assert begun.stem == "same"
    assert begun.rows.path.parent == folder
    with pytest.raises(ParameterError, match="timed with passes None, and this is cuda-graph"):
        profile_from_timings.open_model(
            config, grid, folder, device="cpu", quick=True, decoder=Graphs(own, 64), name="same", resume=True
        )
    assert (
        profile_from_timings.open_model(config, grid, tmp_path, device="cpu", quick=True, decoder=Graphs(own, 64)).stem
        == "cpu-model-graph"
    )


def test_graphs_are_refused_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    asked = ["run", "autoregressive", "--model", "llama-68m", "--forced", "none", "--device", "cpu", "-o", str(out)]
    found = CliRunner().invoke(app, [*asked, "--mode", "cuda-graph"])
    assert found.exit_code == 2
    assert found.output.strip() == "error: mode cuda-graph needs a GPU, and the device is cpu; take --mode eager"
    found = CliRunner().invoke(app, [*asked, "--mode", "graph"])
    assert found.exit_code == 2
    assert "unknown mode 'graph'; did you mean cuda-graph? known: cuda-graph, eager" in found.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("method", "table", "has"),
    [
        ("ppd", {"exit_layer": 3, "candidates": 2}, "has sub-processes"),
        ("beam", {"draft_length": 2, "beams": 2}, "follows several hypotheses"),
    ],
)  # fmt: skip
def test_methods_that_cannot_be_captured_are_refused_first(
    method: str, table: dict[str, Any], has: str, cuda: Cuda, tmp_path: Path
) -> None:
    own = real_models.decoders("llama", *real_decoding.roles(method, table)[1:])
    rates = {"match_rate": 0.5} if method == "ppd" else {"acceptance_rate": 0.5}
    wanted = [PlannedDecoding(method, table, TEXT, "text", rates)]
    models = measure_runs.by_graphs(wanted, own, 6)
    refused = f"mode must be eager for method {method}, which {has} with these parameters, got cuda-graph"
    with pytest.raises(ParameterError, match=refused):
        measure_runs.measure(tmp_path / "runs.json", MeasurementPlan(wanted, 6, 1), models)
    assert not [*tmp_path.iterdir()]
    measure_runs.measure(tmp_path / "runs.json", MeasurementPlan(wanted, 6, 1), own)  # allowed without graphs
    real_decoding.decode("autoregressive", {"target": models["target"]}, TEXT, 6)  # other methods are allowed with graphs


def test_unequal_positions_are_refused_first(cuda: Cuda, tmp_path: Path) -> None:
    method = {"name": "speculative", "draft_length": 2, "sequences": 3, "batching": "static", "forced": {"acceptance_rate": 0.5}}
    out = tmp_path / "runs.json"
    with pytest.raises(ParameterError, match=r"mode must be eager if sequences .* are at unequal positions, .* batch = 1"):
        run_command.measure_plan(plan_of(tmp_path, method=[method]), out, "cpu")
    assert not [*tmp_path.glob("runs*")]


def test_runs_over_several_units_are_refused(cuda: Cuda) -> None:
    settings = {"exit_layer": 3, "candidates": 1}
    wanted = [PlannedDecoding("ppd", settings, TEXT, "text", {"match_rate": 0.5}, units=2, unit_kind="streams")]
    models = measure_runs.by_graphs(wanted, real_models.decoders("llama"), 6)
    with pytest.raises(ParameterError, match="mode must be eager for runs over streams, got cuda-graph"):
        measure_runs.check(MeasurementPlan(wanted, 6), models)
    with pytest.raises(ParameterError, match="mode must be eager for runs over streams, got cuda-graph"):
        Lanes(models["target"], 2)


def test_timed_runs_capture_no_graph(cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are captured in an untimed decoding; a run that needs another graph is repeated."""
    named = ("speculative", {"draft_length": 2}), ("autoregressive", dict[str, int]())
    wanted = [PlannedDecoding(method, settings, TEXT, "text") for method, settings in named]
    models = measure_runs.by_graphs(wanted, real_models.decoders("llama", "draft"), 9)
    counts: list[tuple[int, int]] = []
    whole = measure_runs.timed
    surprise = iter((True, False, False, False, False))

    def timed(each: PlannedDecoding, *more: Any) -> Any:
        before = cuda_graphs.captured(models.values())
        if next(surprise):  # a near tie was resolved differently
            target = models["target"]
            target.run((1, 2, 3, 4, 5), 0, LayerSpan(0, 2), target.rows())
        found = whole(each, *more)
        counts.append((before, cuda_graphs.captured(models.values())))
        return found

    monkeypatch.setattr(measure_runs, "timed", timed)
    found = measure_runs.measure(tmp_path / "runs.json", MeasurementPlan(wanted, 9, 2, 0), models)
    assert [before == behind for before, behind in counts] == [False, True, True, True, True]
    assert found.table.height == 4


def test_interrupted_runs_resume_in_the_same_mode(cuda: Cuda) -> None:
    own = real_models.decoders("llama")
    plan = MeasurementPlan([PlannedDecoding("autoregressive", {}, TEXT, "text")], 6)
    asked = [measure_runs._asked(plan, models)["mode"] for models in (own, measure_runs.by_graphs(plan.decodings, own, 6))]
    assert asked == ["eager", "cuda-graph"]


def test_buffers_fit_all_runs(cuda: Cuda) -> None:
    own = real_models.decoders("llama")
    wanted = [
        PlannedDecoding("autoregressive", {}, TEXT, "text", {}),
        PlannedDecoding(
            "skipdecode", {"min_layers": 2, "max_layers": 5, "sequences": 3, "batching": "static"}, TEXT * 10, "text", {}
        ),
    ]
    for room, texts, expected in ((0, 1, (128, 3)), (200, 7, (256, 7))):
        [made] = measure_runs.by_graphs(wanted, own, 5, room, texts).values()
        assert isinstance(made, Graphs)
        assert (made.room, made.sequences) == expected
    assert interleaved_profiles.Passes((1, 4, 900), (0, 100)).room == 105  # prompts are no graphs
    assert interleaved_profiles.Passes((1,), (0,)).room >= 64 + 9 + 1


# --- times of a pass ---


def test_layers_of_a_graph_are_timed_by_a_shorter_replay() -> None:
    """The read is the time without marks: neither the pass nor the shorter one."""
    launch, layer, head, look, rest = 5.0, 3.0, 7.0, 2.0, 11.0
    few, depth = 2, 6
    replays = [launch + count * layer for count in (depth, few)]
    aside = rest + replays[1]
    marked = aside + rest + replays[0] + head + look
    found: dict[tuple[str, int], float] = {
        ("embedding", 0): 0.0, ("layer", 0): replays[0], ("head", 0): head, ("call", 0): rest + replays[0],
        ("short", few): replays[1], ("aside", 0): aside,
    }  # fmt: skip
    clean = [single_pass._Repeat(0.0, marked, found)]
    said = single_pass._called(clean, {key: [each] for key, each in found.items()}, lambda values: [float(values[0])], depth)
    assert said == {"sum_us": [depth * layer], "rest_us": [rest + launch], "first_read_us": [look]}


class Marked:
    """Times of marks, on a clock that advances by one with every replay."""

    def __init__(self) -> None:
        self.at: dict[tuple[str, int, int], int] = {}
        self.replays = 0

    def mark(self, name: str, index: int, edge: int) -> None:
        self.at[name, index, edge] = self.replays

    def span(self, name: str, index: int) -> int:
        return self.at[name, index, 1] - self.at[name, index, 0]


@pytest.mark.parametrize(("width", "batch", "context"), [(1, 1, 0), (3, 1, 8), (1, 2, 4), (40, 1, 0)])
def test_replays_are_marked(
    width: int, batch: int, context: int, cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shapes(tmp_path, model=4)["model"]
    known = architecture(config)
    own = library_pass.LibraryModel(known, "cpu", "float32")
    model = library_pass.LibraryModel(known, "cpu", "float32", decoder=Graphs(own.decoder, 64, 2))
    clock, replay = Marked(), fake_cuda_graphs.CUDAGraph.replay

    def counted(graph: Any) -> None:
        clock.replays += 1
        replay(graph)

    with torch.inference_mode():
        work = interpreter_pass.InterpretedPass(model, width, context, batch)
        monkeypatch.setattr(fake_cuda_graphs.CUDAGraph, "replay", counted)
        spans = []
        for _ in range(2):  # at either position
            work.run_marked(clock.mark)
            spans.append([clock.span(*part) for part in work.parts])
        before = clock.replays
        work.run()
        whole = clock.replays - before
        work.check()
    names = [name for name, _ in work.parts]
    if width > cuda_graphs.WIDEST:
        assert names.count("layer") == 4
        assert whole == 0
        return
    assert names == ["embedding", "layer", "head", "call", "short", "aside"]
    # A new position, the layers, and the head; for the short pass the layers, and the whole.
    assert spans == 2 * [[0, 1, 1, 2, 1, 2]]
    assert work.parts[-2] == ("short", 2)
    assert whole == 3
