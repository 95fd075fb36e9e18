"""Bundled profiles: complete, physically possible, sourced, and equal to their sources; and errors of layers that are
composed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from calibrate.fits import small_kernels
from calibrate.importers import aiconfigurator, bundled_profiles, vidur
from model.architectures import transformer
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.hardware import composed_layers, devices, profile, profile_files
from model.hardware.cost_models import pass_time
from model.hardware.profile import Profile, Source
from model.hardware.profile_costs import ProfileCosts

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "gpu").is_dir(), reason="the folder of public measurements is absent: DECODESIM_DATA names it"
)
pytestmark = pytest.mark.usefixtures("read_once")
NAMES = [name for name in profile_files.names() if name.split("-")[0] in ("a100", "a40", "h100", "l40s", "rtx")]
OPERATIONS = ("a100-operations", "h100-operations", "l40s-operations")
MODELS = [name for name in NAMES if name not in OPERATIONS]
PUBLISHERS = {
    "microsoft/vidur": "MIT",
    "NetX-lab/Frontier": "MIT",
    "ai-dynamo/aiconfigurator": "Apache-2.0",
    "casys-kaist/LLMServingSim": "MIT",
}
FOLDER = Path(profile.__file__).parent.parent / "profiles"


def shape_of(made: Profile) -> Shape:
    return Shape(**made.shape)


def test_models_and_devices_of_the_papers_are_bundled() -> None:
    measured = {f"{gpu}-{model}" for gpu in ("a100", "a40", "h100") for model in ("llama-2-7b", "llama-2-70b", "codellama-34b")}
    composed = {f"{gpu}-{model}" for gpu in ("a100", "h100", "l40s") for model in ("llama-2-13b", "llama-3.1-8b")}
    assert {*NAMES} == measured | composed | {*OPERATIONS, "rtx-4090-llama-3.1-8b"}


@pytest.mark.parametrize("name", NAMES)
def test_bundled_profiles_are_complete_small_and_sourced(name: str) -> None:
    made = profile_files.load(name)
    assert made.name == name
    assert name.startswith(made.device)
    most = 400e3 if name in OPERATIONS else 150e3
    assert sum((FOLDER / f"{name}.{kind}").stat().st_size for kind in ("json", "parquet")) < most
    for source in made.sources:
        assert PUBLISHERS[source.repository] == source.licence
        assert len(source.commit) == 12
        assert len(source.sha256) == 64
        assert source.parts
    # Parts of a composed model have the error of their operation.
    made_of = {part: part for part in profile.AXES} | {"gemm": "dense", "decode": "attention"}
    sourced = {made_of.get(part, part) if made.kind == "model" else part for source in made.sources for part in source.parts}
    assumed = {"embedding", "head"} if made.provenance == "composed" else set()
    assert {*made.parts} - sourced <= assumed
    assert {"dense", "gemm"} & {*made.errors}


@pytest.mark.parametrize("name", NAMES)
def test_device_and_model_of_a_profile_agree_with_its_name(name: str) -> None:
    made = profile_files.load(name)
    peaks = devices.device(made.device)
    assert (made.bandwidth, made.rate, made.cache_bytes) == (peaks.bandwidth, peaks.rate(made.dtype), peaks.cache_bytes)
    if made.kind == "model":
        assert shape_of(made) == transformer.preset(made.model)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_beats_its_memory_or_compute_bound(name: str) -> None:
    """A pass goes through all layers, so that no layer's weights or keys remain in the cache."""
    made = profile_files.load(name)
    for tensor_parallel in made.tensor_parallel:
        part = shape_of(made).shard(tensor_parallel)
        rows = made.rows("dense", tensor_parallel)
        tokens, seconds = rows["tokens"].to_numpy(), rows["time_s"].to_numpy()
        assert (seconds + 2.5e-6 >= part.layer_weight_bytes / made.bandwidth).all()
        assert (seconds * 1.1 >= 2.0 * part.layer_weights * tokens / made.rate).all()
        heads = made.rows("head", tensor_parallel)
        assert (heads["time_s"].to_numpy() >= part.head_weights * 2 / made.bandwidth).all()
        rows = made.rows("attention", tensor_parallel)
        width, context, batch = (rows[axis].to_numpy() for axis in ("width", "context", "batch"))
        read = 2 * batch * (context + width) * part.kv_heads * part.head_dim * 2
        # A measured time may include data from the cache.
        held = made.cache_bytes if name in ("rtx-4090-llama-3.1-8b", "a100-llama-2-7b", "a100-llama-2-70b") else 0
        assert (rows["time_s"].to_numpy() >= 0.999 * (read - held) / made.bandwidth).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_beats_the_bytes_beyond_the_cache(name: str) -> None:
    made = profile_files.load(name)
    rows = made.rows("gemm")
    m, n, k, seconds = (rows[column].to_numpy().astype(float) for column in ("m", "n", "k", "time_s"))
    assert (seconds >= (2 * n * k - made.cache_bytes) / made.bandwidth).all()
    assert (seconds >= 2 * m * n * k / made.rate).all()
    rows = made.rows("decode")
    context, batch, heads, head_dim, seconds = (
        rows[column].to_numpy().astype(float) for column in ("context", "batch", "kv_heads", "head_dim", "time_s")
    )
    assert (seconds >= (4 * batch * (context + 1) * heads * head_dim - made.cache_bytes) / made.bandwidth).all()


@pytest.mark.parametrize("name", MODELS)
def test_profiles_cover_the_range_of_decoding(name: str) -> None:
    made = profile_files.load(name)
    assert {"dense", "attention", "head", "embedding"} <= {*made.parts}
    assert made.tensor_parallel == ((1,) if name.startswith("rtx") else (1, 2, 4, 8))
    for tensor_parallel in made.tensor_parallel:
        tokens = made.rows("dense", tensor_parallel)["tokens"]
        assert (tokens.min(), tokens.max()) == (1, 2048 if name.startswith("rtx") else 4096)
        rows = made.rows("attention", tensor_parallel)
        alone = rows.filter((rows["width"] == 1) & (rows["batch"] == 1))["context"]
        assert alone.min() <= 32
        assert alone.max() >= 4032
        if tensor_parallel > 1 and made.device != "a40":
            assert made.rows("all_reduce", tensor_parallel).height >= 10
    if made.device in ("a100", "h100", "a40"):
        assert made.rows("send").height >= 20


def test_a_llama_3_token_on_rtx_4090_agrees_with_llmservingsim() -> None:
    """16.8 ms at batch 1 after 1,024 tokens, against 15.9 ms for reading its weights."""
    made = profile_files.load("rtx-4090-llama-3.1-8b")
    attention = made.rows("attention")
    at = attention.filter((attention["width"] == 1) & (attention["context"] == 1024) & (attention["batch"] == 1))["time_s"].item()
    one = made.rows("dense").row(0, named=True)["time_s"]
    whole = made.shape["layers"] * (one + at) + made.rows("head").row(0, named=True)["time_s"]
    assert round(whole * 1e3, 1) == 16.8
    shape = shape_of(made)
    read = shape.layers * shape.layer_weight_bytes + shape.head_weights * 2
    assert read / made.bandwidth < whole


@pytest.mark.parametrize(
    "name", [name for name in MODELS if profile_files.load(name).model in bundled_profiles.COMPOSED and name[:3] != "rtx"]
)
def test_any_model_can_be_composed_from_bundled_operations(name: str) -> None:
    """Bundled operations are thinned and in single precision; the results are those of the complete tables."""
    made = profile_files.load(name)
    again = composed_layers.layer(profile_files.load(f"{made.device}-operations"), shape_of(made), made.tensor_parallel)
    for tensor_parallel in made.tensor_parallel:
        for part, axis in (("dense", "tokens"), ("head", "positions")):
            ours, theirs = again.rows(part, tensor_parallel), made.rows(part, tensor_parallel)
            assert ours[axis].to_list() == theirs[axis].to_list()
            assert ours["time_s"].to_numpy() == pytest.approx(theirs["time_s"].to_numpy(), rel=1e-4)
        ours, theirs = (each.rows("attention", tensor_parallel) for each in (again, made))
        both = ours.join(theirs, on=["context", "batch"], suffix="_theirs")
        assert both.height >= 0.9 * theirs.filter(theirs["batch"] <= 64).height
        assert both["time_s"].to_numpy() == pytest.approx(both["time_s_theirs"].to_numpy(), rel=1e-3)


def test_notes_state_assumed_and_composed_parts() -> None:
    for name in MODELS:
        notes = " ".join(profile_files.load(name).notes)
        if name.startswith("rtx"):
            assert profile_files.load(name).provenance == "measured"
        else:
            assert profile_files.load(name).provenance == "composed"
            assert "composed" in notes
    assert "head: composed at the efficiency of a100: assumed" in profile_files.load("a40-llama-2-7b").notes
    assert profile_files.load("a40-llama-2-7b").errors["attention"] > 0.1
    assert any("found their weights" in note for note in profile_files.load("l40s-operations").notes)


# --- Against the source data ---


@pytest.fixture(scope="module")
def derived() -> dict[str, Profile]:
    return {made.name: made for made in bundled_profiles.profiles(DATA)}


@needs_data
def test_every_profile_follows_from_its_sources(derived: dict[str, Profile]) -> None:
    assert {*derived} == {*NAMES}
    for name, made in derived.items():
        kept = profile_files.load(name)
        assert kept.table.equals(made.table), name
        assert all(getattr(kept, each.name) == getattr(made, each.name) for each in fields(made) if each.name != "table"), name


def test_origins_are_parsed_from_sources_md(tmp_path: Path) -> None:
    """A row of four cells with a checksum of 16 digits is a file of the repository in the last heading."""
    path, at = tmp_path / "SOURCES.md", "## owner/one · MIT"
    rows = [
        "# Files", at, "|file|commit|path there|sha256|", "|---|---|---|---|",
        "| gpu/a.csv | abc | data/a.csv | 01234567890abcde |",
        "| gpu/b.csv | abc | data/b.csv | 01234567 |", "| gpu/c.csv | data/c.csv | 01234567890abcde |", "", "## two · LGPL",
        "| gpu/d.csv | def | d.csv | fedcba9876543210 |",
    ]  # fmt: skip
    path.write_text("\n".join(rows), encoding="utf-8")
    assert bundled_profiles.origins(tmp_path) == {
        "gpu/a.csv": Source("owner/one", "data/a.csv", "abc", "MIT", "01234567890abcde"),
        "gpu/d.csv": Source("two", "d.csv", "def", "LGPL", "fedcba9876543210"),
    }
    path.write_text("\n".join(rows).replace("two ·", "two"), encoding="utf-8")
    with pytest.raises(ParameterError, match=r"^SOURCES.md, line 9: it must be ## repository · licence, got '## two LGPL'$"):
        bundled_profiles.origins(tmp_path)
    path.write_bytes(b"abc\xff")
    with pytest.raises(ParameterError, match=r"^SOURCES.md: it is not UTF-8 \(byte 4\); restore it$"):
        bundled_profiles.origins(tmp_path)
    with pytest.raises(ParameterError, match=f"must hold gpu and SOURCES.md, got {tmp_path.name}; name it, or set DECODESIM_DATA"):
        bundled_profiles.folder_of(tmp_path)
    (tmp_path / "gpu").mkdir()
    assert bundled_profiles.folder_of(tmp_path) == tmp_path


def test_default_differences_use_passes_of_up_to_64_tokens() -> None:
    """A row at 65 tokens with a large error changes nothing; the result is the median of the others."""
    table, was = profile_files.load("a100-operations"), profile_files.load("a100-llama-2-7b")

    def of(gpu: str, *times: float) -> Profile:
        points = zip((1, 64, 65), times, strict=True)
        rows = [{"part": "dense", "tokens": tokens, "time_s": time, "tensor_parallel": 1} for tokens, time in points]
        peaks = devices.device(gpu)
        return replace(was, device=gpu, bandwidth=peaks.bandwidth, table=profile.table_of(rows))

    one, other = of("a100", 3e-4, 4e-4, 5e-4), of("a40", 8e-4, 9e-4, 1.0)
    assert bundled_profiles.differences(table, one).at.tolist() == [1, 64]
    assert bundled_profiles.differences(table, one, most=65).at.tolist() == [1, 64, 65]
    launch = 4 * composed_layers.Products(table).launch
    least = [shape_of(was).layer_weight_bytes / each.bandwidth + launch for each in (one, other)]
    off = [abs(ours / theirs * least[1] / least[0] - 1) for ours, theirs in ((3e-4, 8e-4), (4e-4, 9e-4))]
    assert bundled_profiles.product_transfer_error(table, one, other) == pytest.approx(np.median(off))
    assert bundled_profiles.layer_errors(table, []) == []


def test_all_profiles_are_derived_before_the_first_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [profile_files.load(name) for name in ("a40-llama-2-7b", "rtx-4090-llama-3.1-8b")]

    def derived(data: str) -> Iterator[Profile]:
        assert data == "data"
        for each in made:
            yield each
            assert not [*tmp_path.iterdir()]

    monkeypatch.setattr(bundled_profiles, "profiles", derived)
    assert bundled_profiles.write("data", tmp_path) == [tmp_path / f"{each.name}.json" for each in made]
    for each in made:
        assert profile_files.load(tmp_path / f"{each.name}.json").table.equals(each.table)


@needs_data
def test_a_file_with_another_checksum_is_refused(derived: dict[str, Profile]) -> None:
    made = vidur.read(DATA / "gpu/vidur/compute/h100/meta-llama/Llama-2-7b-hf", model="llama-2-7b", gpu="h100")
    known = {name: source for name, source in bundled_profiles.origins(DATA).items() if "mlp.csv" not in name}
    with pytest.raises(ParameterError, match=r"mlp.csv: its sha256 b1a2def08857d10e is not in SOURCES.md"):
        bundled_profiles._sourced(made, DATA, known)


ENGINES = [
    ("h100", "h100_sxm", "trtllm/1.2.0rc5"),
    ("h100", "h100_sxm", "trtllm/1.3.0rc20"),
    ("h100", "h100_sxm", "vllm/0.14.0"),
    ("h100", "h100_sxm", "vllm/0.19.0"),
    ("a100", "a100_sxm", "trtllm/1.0.0"),
    ("a100", "a100_sxm", "vllm/0.14.0"),
    ("l40s", "l40s", "trtllm/1.0.0"),
    ("l40s", "l40s", "trtllm/1.3.0rc20"),
    ("l40s", "l40s", "vllm/0.14.0"),
]
DENSE_GRIDS = ("trtllm/1.2.0rc5", "trtllm/1.3.0rc20", "vllm/0.19.0")
"""Tables with every m up to 17."""
KEYS_ALONE = ("trtllm/1.0.0", "trtllm/1.2.0rc5")
"""Tables whose attention reads half of the cache."""


@needs_data
@pytest.mark.parametrize(("gpu", "folder", "engine"), ENGINES)
def test_leave_one_out_errors_of_all_product_tables(gpu: str, folder: str, engine: str) -> None:
    made = aiconfigurator.read(DATA / "gpu/aiconfigurator" / folder, gpu=gpu, engine=engine, attention="none")
    found = composed_layers.gemm_left_out(made)
    assert found.median() <= (0.022 if gpu == "h100" else 0.03)
    assert found.percentile(90) <= 0.17
    if engine in DENSE_GRIDS:
        assert found.median(high=32) <= 0.01
    assert made.errors["gemm"] == round(composed_layers.gemm_left_out(made, ()).median(), 4)  # a lookup uses its own line only


@needs_data
@pytest.mark.parametrize(("gpu", "folder", "engine"), ENGINES)
def test_leave_one_out_errors_of_all_attention_tables(gpu: str, folder: str, engine: str) -> None:
    root = DATA / "gpu/aiconfigurator" / folder
    if engine in KEYS_ALONE:
        with pytest.raises(
            ParameterError, match=r"generation_attention_perf.parquet: row \d+, column latency: .* of the memory of"
        ):
            aiconfigurator.read(root, gpu=gpu, engine=engine)
        return
    made = aiconfigurator.read(root, gpu=gpu, engine=engine)
    found = composed_layers.attention_left_out(made)
    assert made.errors["decode"] == round(composed_layers.attention_left_out(made, alike=False).median(), 4)
    assert found.median() <= 0.03
    assert found.percentile(90) <= 0.17


@needs_data
@pytest.mark.parametrize("model", bundled_profiles.VIDUR)
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_composed_layers_agree_with_measured_ones(gpu: str, model: str, operations: dict[str, Profile]) -> None:
    """Up to 64 tokens, on the same GPU, by another engine of another year, for tensor_parallel 1 to 8."""
    measured = vidur.read(DATA / "gpu/vidur/compute" / gpu / bundled_profiles.VIDUR[model], model=model, gpu=gpu)
    for tensor_parallel in bundled_profiles.TENSOR_PARALLEL:
        assert bundled_profiles.differences(operations[gpu], measured, (tensor_parallel,)).median() <= 0.06
        found = bundled_profiles.differences(operations[gpu], measured, (tensor_parallel,), most=4096)
        assert found.median() <= 0.25


@needs_data
def test_composed_attention_agrees_with_another_engine() -> None:
    """vLLM against FlashInfer on the A800, from 256 cached tokens: engines differ by more than tables."""
    table = bundled_profiles.operations(DATA, "a100")
    source = DATA / "gpu/frontier/compute/a800/meta-llama/Llama-2-7b-hf/attention.csv"
    folder = DATA / "gpu/vidur/compute/a100/meta-llama/Llama-2-7b-hf"
    rows = vidur.read(folder, model="llama-2-7b", gpu="a100", attention=source).rows("attention")
    rows = rows.filter((rows["width"] == 1) & (rows["context"] >= 256))
    ours = composed_layers.AttentionTimes(table, 32, 32, 128)(rows["context"].to_numpy(), rows["batch"].to_numpy())
    assert np.median(np.abs(ours / rows["time_s"].to_numpy() - 1)) <= 0.12


@needs_data
def test_unmeasured_heads_are_predicted_from_others() -> None:
    """Heads of Llama-2-7B and 13B on the H100, predicted without their own rows."""
    table = bundled_profiles.operations(DATA, "h100")
    for heads, bound in ((32, 0.02), (40, 0.10)):
        rows = table.rows("decode")
        own = (rows["heads"] == heads) & (rows["kv_heads"] == heads) & (rows["head_dim"] == 128)
        kept = own & (rows["context"] <= 8191) & (rows["batch"] <= 64)
        rows = rows.filter(kept)
        frame = table.table
        drop = ((frame["heads"] == heads) & (frame["kv_heads"] == heads)).fill_null(False)
        without = composed_layers.AttentionTimes(replace(table, table=frame.filter(~drop)), heads, heads, 128)
        assert not without.measured
        errors = without(rows["context"].to_numpy(), rows["batch"].to_numpy()) / rows["time_s"].to_numpy() - 1
        assert np.median(np.abs(errors)) <= bound


@pytest.fixture(scope="module")
def operations() -> dict[str, Profile]:
    return {gpu: bundled_profiles.operations(DATA, gpu) for gpu in ("h100", "a100")}


def of_vidur(gpu: str, model: str) -> Profile:
    return vidur.read(DATA / "gpu/vidur/compute" / gpu / bundled_profiles.VIDUR[model], model=model, gpu=gpu)


@needs_data
def test_composed_layers_state_their_error(derived: dict[str, Profile], operations: dict[str, Profile]) -> None:
    """The error of other models at the same tokens and tensor_parallel; larger where a time was adjusted."""
    for gpu, table in operations.items():
        off = bundled_profiles.layer_errors(table, [of_vidur(gpu, model) for model in bundled_profiles.VIDUR])
        assert [row[:2] for row in off] == [
            [tensor_parallel, most] for tensor_parallel in bundled_profiles.TENSOR_PARALLEL for most in bundled_profiles.RANGES
        ]
        made = derived[f"{gpu}-llama-2-13b"]
        for tensor_parallel, most, error in off:
            rows = made.rows("dense", int(tensor_parallel)).filter(pl.col("tokens") <= most)
            rows = rows.filter(pl.col("tokens") > ([0, *bundled_profiles.RANGES][bundled_profiles.RANGES.index(int(most))]))
            half = ((rows["high_s"] - rows["low_s"]) / 2 / rows["time_s"]).to_numpy()
            assert (half >= max(error, made.errors["head"]) - 1e-4).all()
            assert half.min() == pytest.approx(max(error, made.errors["head"]), rel=0.2)
        said = {tuple(row[:2]): row[2] for row in derived["l40s-operations"].facts[composed_layers.LAYER_ERRORS]}
        assert all(said[tensor_parallel, most] >= error for tensor_parallel, most, error in off)


@needs_data
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_stated_errors_cover_a_held_out_model(gpu: str, operations: dict[str, Profile]) -> None:
    """The error is the largest of the other models' medians, for layers of 1 to 4,096 tokens and all tensor_parallel.

    Of the layers of held-out models at least half are within it, and 85 % within twice the error; not all, or the error would be
    uninformative. This holds for all models together. For single models the shares are at least a third and 60 %: Llama-2-7B, the
    worst of the three, has .42 and .83 (H100), .36 and .66 (A100).
    """

    def shares(within: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        weight, ratio = (np.concatenate(each) for each in zip(*within, strict=True))
        return [float(np.average(ratio <= times, weights=weight)) for times in (1, 2)]

    models, every = {model: of_vidur(gpu, model) for model in bundled_profiles.VIDUR}, []
    for model, one in models.items():
        off = bundled_profiles.layer_errors(operations[gpu], [other for name, other in models.items() if name != model])
        stated = replace(operations[gpu], facts={composed_layers.LAYER_ERRORS: off})
        within = []
        for tensor_parallel in bundled_profiles.TENSOR_PARALLEL:
            found = bundled_profiles.differences(operations[gpu], one, (tensor_parallel,), most=4096)
            weight = np.gradient(np.log(found.at))  # passes of many tokens are measured more densely
            within.append((weight, np.abs(found.error) / composed_layers.layer_error(stated, found.at, tensor_parallel)))
        once, twice = shares(within)
        assert once >= 1 / 3, (model, once)
        assert twice >= 0.6, (model, twice)
        every += within
    once, twice = shares(every)
    assert 0.5 <= once <= 0.95
    assert twice >= 0.85


@needs_data
def test_elementwise_kernels_fit_two_models_and_hold_for_others() -> None:
    """The bundled numbers are those of the fit; on GPUs with tables of products the errors of the other two are below 20 %."""
    share, lane = small_kernels.fit(small_kernels.measured(DATA, small_kernels.FITTED))
    assert (round(share, 2), round(lane / 1e9, 1)) == (composed_layers.SMALL_SHARE, composed_layers.SMALL_LANE / 1e9)
    for one in small_kernels.measured(DATA, small_kernels.HELD_OUT):
        if one.profile.device != "a40":  # kernels reach a larger share of the bandwidth of GDDR than of HBM
            assert np.median(np.abs(one.predicted() / one.seconds - 1)) < 0.25


# --- Monotonic times ---


@pytest.mark.parametrize("name", MODELS)
def test_passes_over_more_never_take_less(name: str) -> None:
    """More tokens per sequence, sequences or context: on any grid, between the points of a profile and beyond them.

    Up to 5 parts in 10,000, less than the spread of any source: below the first context the efficiency is constant, not the time.
    """
    made = profile_files.load(name)
    width = np.array([*range(1, 17), 24, 31, 33, 64, 100, 257, 700, 1500, 4096])
    batch = np.array([1, 2, 3, 4, 6, 8, 13, 16, 24, 32, 48, 64, 100, 128, 256, 300])
    context = np.array([0, 1, 7, 31, 32, 100, 128, 500, 1024, 1100, 2047, 2048, 3000, 4000, 6000, 9000])
    for tensor_parallel in made.tensor_parallel:
        taken = pass_time(
            ProfileCosts(made, tensor_parallel=tensor_parallel), width[:, None, None], context[:, None], batch
        ).seconds
        for axis in range(3):
            fall = -np.diff(taken, axis=axis) / np.take(taken, range(taken.shape[axis] - 1), axis=axis)
            assert fall.max() < 5e-4, (tensor_parallel, axis)


def test_falls_in_the_cpu_profile_lie_within_its_quartiles() -> None:
    """The bundled profile measured by this project: its products change their algorithm with the width."""
    rows = profile_files.load("cpu-llama-68m").rows("layer")
    for context in rows["context"].unique():
        own = rows.filter(rows["context"] == context).sort("width")
        low, high = own["low_s"].to_numpy(), own["high_s"].to_numpy()
        falls = np.diff(own["time_s"].to_numpy()) < 0
        assert (high[1:] < low[:-1])[falls].all()


@pytest.mark.parametrize("name", [name for name in MODELS if "all_reduce" in profile_files.load(name).parts])
def test_reductions_are_smooth_and_have_quartiles_over_libraries(name: str) -> None:
    """From a size to one at most twice as large the time grows at most 2.5-fold (a library may switch its algorithm),
    or threefold between eight cards without direct links. Half the range of the quartiles is stated."""
    made = profile_files.load(name)
    for tensor_parallel in (2, 4, 8):
        rows = made.rows("all_reduce", tensor_parallel).sort("size")
        size, time = (rows[column].to_numpy().astype(float) for column in ("size", "time_s"))
        near = size[1:] <= 2 * size[:-1]
        assert (time[1:] / time[:-1])[near].max() < (3.5 if made.device == "l40s" else 2.5)
        found = ProfileCosts(made, tensor_parallel=tensor_parallel).part("all_reduce", size)
        assert found is not None
        half = (rows["high_s"] - rows["low_s"]).to_numpy() / 2 / time
        assert (found.error >= half - 1e-9).all()
        assert np.median(found.error[size < 1e6]) > (0.15 if made.device == "h100" else 0.01)


def test_reductions_are_equal_in_all_profiles_of_a_gpu() -> None:
    for gpu in ("a100", "h100", "l40s"):
        tables = [profile_files.load(name) for name in MODELS if name.startswith(gpu)]
        first, *others = (each.rows("all_reduce", 2) for each in tables)
        assert first.height > 10
        assert all(each.equals(first) for each in others)
