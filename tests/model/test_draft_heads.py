"""Draft heads: parameters of published heads, what is shared with the target, and prices like those of any draft."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim
from model.architectures import draft_heads, published_shapes
from model.architectures.draft_heads import ABOUT, head_of, is_head, parts
from model.architectures.layer_parts import DRAFT_KINDS, FORMATS
from model.architectures.published_shapes import PRESETS, named_shape, preset
from model.architectures.shape_configs import from_config
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.engines import kernel_times, law_fit, step_law
from model.engines.kernel_times import KernelSource
from model.hardware import composed_layers, physical_limits, profile_files
from model.hardware.cost_models import memory, pass_time
from model.hardware.devices import DEVICES
from model.hardware.profile_costs import PEAKS, ProfileCosts
from model.hardware.roofline import Roofline
from model.interpret.account import Totals, Work, flops_and_bytes
from sim.scenarios.grid import Grid
from sim.scenarios.hardware_cost import HardwareCost, PointCosts

TINY = Shape(3, 8, 4, 2, 2, 12, True, 100, False)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("eagle:llama-2-7b", 0.24), ("eagle:llama-2-13b", 0.37), ("eagle:llama-2-70b", 0.99), ("eagle:llama-3-8b", 0.25)],
)
def test_eagle_heads_have_the_parameters_of_their_table(name: str, billions: float) -> None:
    """SafeAILab/EAGLE, README, weights: 0.24B, 0.37B, 0.99B and 0.25B; without the embedding, which they copy from the target."""
    assert round(named_shape(name).parameters / 1e9, 2) == billions


def test_parameters_of_published_heads() -> None:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: 850 MB in 16 bits; FasterDecoding/medusa-vicuna-7b-v1.3: 1.48 GB, five heads."""
    assert named_shape("eagle3:llama-3.1-8b").weight_bytes / 1e6 == pytest.approx(850, abs=1)
    assert named_shape("medusa:vicuna-7b").weight_bytes / 1e9 == pytest.approx(1.48, abs=0.005)


def test_deepseek_with_its_module_has_the_size_of_its_checkpoint() -> None:
    """685B: the model, the module with copies of embedding and head, a correction per expert, scales of 128 x 128 blocks."""
    whole, module = preset("deepseek-v3"), named_shape("mtp:deepseek-v3")
    corrections, copies = 59 * 256, 2 * 129_280 * 7168
    products = [(count, each) for shape in (whole, module) for count, kind in shape.kinds for each in kind.products]
    quantised = sum(count * each.weights for count, each in products if each.part != "router")
    total = whole.parameters + module.parameters + corrections + copies + quantised / 128**2
    assert round(total / 1e9) == 685
    # Its documentation of weights: 11.5B of its own and the joining product of 0.1B.
    assert (module.parameters - 2 * 7168**2) / 1e9 == pytest.approx(11.5, abs=0.05)


def test_deepseek_takes_the_bytes_of_its_published_files() -> None:
    """688,586,727,753 bytes of files (deepseek-ai/DeepSeek-V3), with copies of embedding and head for the module; the rest are the
    files' headers, of two tensors for each of 3 x 256 matrices of 59 layers. A wrong type of the module's first product is seen."""
    whole, module = preset("deepseek-v3"), named_shape("mtp:deepseek-v3")
    ours = whole.weight_bytes + module.weight_bytes + 2 * 2 * 129_280 * 7168
    headers = 150 * 2 * 3 * 256 * 59
    assert 0 < 688_586_727_753 - ours < headers < 2 * 7168**2
    assert named_shape("mtp:deepseek-r1").weights == FORMATS["float8"]


def test_heads_by_hand() -> None:
    attention, ffn = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 12
    eagle, eagle3, mtp, medusa = (head_of(kind, TINY) for kind in ("eagle", "eagle3", "mtp", "medusa"))
    assert eagle.parameters == 16 * 8 + 8 + attention + ffn + 8  # a product with a bias, and one norm
    assert eagle3.parameters == 24 * 8 + (2 * (8 * 8 + 2 * 8 * 4) + 8 * 8) + ffn + 4 * 8 + 800
    assert mtp.parameters == 16 * 8 + attention + ffn + 5 * 8
    assert medusa.parameters == 5 * (8 * 8 + 8 + 800)
    several = head_of("p-eagle", TINY)
    assert several.layers == 4
    assert several.parameters == eagle3.parameters + 3 * (attention + ffn + 2 * 8)
    assert [shape.cache_bytes() for shape in (eagle, eagle3, mtp, medusa, several)] == [16, 16, 16, 0, 64]


def test_a_shared_head_is_read_but_not_kept() -> None:
    for kind, shared in (("eagle", True), ("mtp", True), ("eagle3", False), ("medusa", False)):
        made = head_of(kind, TINY)
        assert made.head_bytes(3) == 2 * 800 * made.copies  # a pass reads all of Medusa's heads
        assert made.head_parameters == (0 if shared else 800)
        assert made.embedding_parameters == 0
        both = memory(TINY, 1e9, context=10, also=(made,))
        assert both.weights == 2 * (TINY.parameters + made.parameters)


def test_vocabulary_of_a_head() -> None:
    assert {named_shape(f"eagle3:{name}").vocabulary for name in ("llama-3.1-8b", "llama-2-7b", "gpt2-xl")} == {32_000}
    assert head_of("eagle3", TINY).vocabulary == 100  # at most the target's
    larger = named_shape("eagle3:llama-3.1-8b:64000")
    assert larger.parameters - named_shape("eagle3:llama-3.1-8b").parameters == 32_000 * 4096


@pytest.mark.parametrize(("target", "ffn"), [("gpt-oss-120b", 17_280), ("qwen3-235b-a22b", 24_576), ("llama-3.3-70b", 28_672)])
def test_inner_width_of_published_eagle3_heads(target: str, ffn: int) -> None:
    """lmsys/EAGLE3-gpt-oss-120b-bf16, lmsys/Qwen3-235B-A22B-EAGLE3, yuhuili/EAGLE3-LLaMA3.3-Instruct-70B: intermediate_size."""
    assert named_shape(f"eagle3:{target}").ffn == ffn


@pytest.mark.parametrize("kind", ABOUT)
def test_every_decoder_has_heads(kind: str) -> None:
    for target, whole in PRESETS.items():
        if whole.encoder_layers:
            continue
        if whole.latent is not None and kind not in ("mtp", "medusa"):
            with pytest.raises(ParameterError, match=f"^{kind}:{target}: an EAGLE head of a target with latent attention has no"):
                named_shape(f"{kind}:{target}")
            continue
        made = named_shape(f"{kind}:{target}", "float16")
        assert made.draft is not None
        assert (made.hidden, made.dtype, made.draft.kind) == (whole.hidden, "float16", kind)
        # One copy is no larger than the target, or not much: a small model is mostly its vocabulary.
        assert 0 < made.parameters / made.draft.copies < 1.5 * whole.parameters
        assert published_shapes.label(f"{kind}:{target}") == f"{kind}-{target}"


def test_kinds_are_those_of_shapes() -> None:
    assert sorted(ABOUT) == sorted(DRAFT_KINDS)
    assert not is_head("eagle3")
    assert not is_head("llama-3.1-8b")
    assert parts("mtp:a/b.json") == ("mtp", "a/b.json", None)


def test_a_head_of_a_file(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 101}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    assert named_shape(f"eagle3:{path}:50") == head_of("eagle3", named_shape(str(path)), 50)
    assert published_shapes.label(f"eagle3:{path}:50") == f"eagle3-{tmp_path.name}-50"
    # The configuration of a published head says what it is by its class.
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
        "draft_vocab_size": 32_000, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    assert from_config(config) == named_shape("eagle3:llama-3.1-8b")
    with pytest.raises(ParameterError, match=r"^target_hidden_size must be hidden_size=4096, got 5120"):
        from_config(config | {"target_hidden_size": 5120})


# --- Prices ---


@given(st.sampled_from(["eagle", "eagle3", "mtp", "medusa", "p-eagle"]), st.integers(1, 8), st.integers(0, 50), st.integers(1, 4))
def test_a_pass_reads_its_weights_and_the_head(kind: str, width: int, context: int, batch: int) -> None:
    """Bound by memory: all matrices, activations, the cache, the head and a row of the embedding per token."""
    made = head_of(kind, TINY)
    bound = Roofline(made, 1e6, 1e30, PEAKS)
    tokens = width * batch
    moved = 2 * tokens * sum(count * (each.inputs + each.outputs) for count, part in made.kinds for each in part.products)
    weights = sum(count * 2 * made.copies * each.weights for count, part in made.kinds for each in part.products)
    cache = batch * (context + width) * made.cache_bytes()
    expected = weights + moved + cache + 2 * 8 * made.vocabulary * made.copies + 2 * 8 * tokens
    assert float(pass_time(bound, width, context, batch).seconds) == pytest.approx(expected / 1e6, rel=1e-9)


def test_a_pass_of_medusa_reads_all_heads_and_each_position_uses_one() -> None:
    """Counted of a decoding, and as bounds of measured times: 3 passes over 4 positions each, blocks of 8 x 8, heads of 800."""
    made = head_of("medusa", TINY)
    found = flops_and_bytes(Work({"draft": Totals(3, 3, 12, head_runs=3, heads=12)}), {"draft": made})
    assert found.weight_bytes == 3 * 5 * 2 * (64 + 800)
    assert found.flops == 12 * 2 * (64 + 800)
    assert physical_limits.used_weights(made) == 64
    assert physical_limits.least_bytes(made) == 5 * 2 * 64


def test_heads_are_composed_from_operations() -> None:
    """As other drafts: the products of the layer at their measured times."""
    operations = profile_files.load("h100-operations")
    for kind in ("eagle", "eagle3", "p-eagle", "medusa"):
        shape = named_shape(f"{kind}:llama-3.1-8b")
        made = ProfileCosts(composed_layers.layer(operations, shape, most=64))
        assert made.shape == shape
        seconds, bound = (pass_time(each, 1, 500, heads=1).seconds for each in (made, Roofline(shape, 3.35e12, 989e12, PEAKS)))
        assert bound < seconds < 2.5 * bound
    with pytest.raises(ParameterError, match="has no times of sparse experts"):
        composed_layers.layer(operations, named_shape("mtp:qwen3-235b-a22b"))


def scenario(**cost: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "head", "tokens": 32, "replications": 32}, "cost": {"kind": "roofline", **cost},
        "method": [{"name": "speculative", "draft_length": 3}], "outcomes": {"accept": {"kind": "iid", "acceptance_rate": 0.7}},
    }  # fmt: skip


def test_a_scenario_prices_a_head_like_any_draft() -> None:
    cost = {"device": "h100", "shape": "llama-3.1-8b", "draft_shape": "eagle3:llama-3.1-8b", "prompt": 500}
    row, *_ = sim.run(scenario(**cost), out=None).to_dicts()
    prices = [Roofline(named_shape(cost[key]), 3.35e12, 989.4e12, link=450e9) for key in ("draft_shape", "shape")]  # type: ignore[arg-type]
    draft, target = (pass_time(each, 1, 516, heads=1).seconds for each in prices)
    assert row["cost_ratio"] == pytest.approx(float(draft / target))
    assert 1.5 < row["speedup"] < 2.5


def test_a_sparse_scenario_with_quantised_weights() -> None:
    """Qwen3-235B on eight H200: times between all active weights at full bandwidth and a few tens of milliseconds."""
    cost = {"device": "h200", "shape": "qwen3-235b-a22b", "tensor_parallel": 8, "draft_shape": "eagle3:qwen3-235b-a22b"}
    rows = {}
    for key, more in {"plain": {}, "float8": {"weights": "float8"}, "alike": {"expert_correlation": 0.9}}.items():
        rows[key], *_ = sim.run(scenario(**cost, **more), out=None).to_dicts()
        assert rows[key]["latency_s"] / 32 < 0.03
    whole = preset("qwen3-235b-a22b")
    plain = rows["plain"]
    assert plain["latency_s"] * plain["speedup"] / 32 > 2 * whole.active_parameters / 8 / 4.8e12
    assert rows["float8"]["latency_s"] < plain["latency_s"]
    assert rows["alike"]["latency_s"] < plain["latency_s"]
    assert rows["float8"]["memory_share"] < 0.55 * plain["memory_share"]
    head = named_shape("eagle3:qwen3-235b-a22b")
    parts = whole.shard(8), head.shard(8)  # the head is split as the target is
    cache = sum(each.cache_bytes() for each in parts) * (512 + 32)
    assert plain["memory_share"] == pytest.approx((2 * sum(each.parameters for each in parts) + cache) / (141 * 2**30))


@pytest.mark.parametrize(("device", "weights", "rate"), [
    ("h100", "float8", 1978.9e12), ("a100", "float8", None), ("h100", "int4", None), ("b200", "nvfp4", 9000e12),
    ("h100", "nvfp4", None), ("b200", "mxfp4", None), ("b200", "none", None),
])  # fmt: skip
def test_products_are_computed_in_the_type_that_format_and_device_have(device: str, weights: str, rate: float | None) -> None:
    found = HardwareCost("roofline", device=device, shape="llama-3.1-8b", weights=weights).of("target")
    assert isinstance(found, Roofline)
    assert found.product_rate == rate
    assert found.shape.weights == (None if weights == "none" else FORMATS[weights])


@pytest.mark.parametrize(("device", "computed"), [("h100", True), ("h20", True), ("a100", False), ("mi300x", True)])
def test_published_type_is_the_default_and_its_arithmetic_is_stated(device: str, computed: bool) -> None:
    """As `weights` = its name; without a rate for it, products are in 16 bits, and the source of the costs says so."""
    cost = HardwareCost("roofline", device=device, shape="deepseek-r1", tensor_parallel=16)
    found, named, none = (replace(cost, weights=weights).of("target", 16) for weights in (None, "float8", "none"))
    assert isinstance(found, Roofline)
    assert found == named
    assert (found.product_rate is not None) == computed
    assert found.provenance.endswith("float8 weights are computed in bfloat16") != computed
    assert none is not None
    assert none.shape == replace(preset("deepseek-r1"), weights=None)
    assert none.shape.weight_bytes == 2 * preset("deepseek-r1").parameters
    half = replace(cost, dtype="float16").of("target", 16)
    assert half is not None
    assert (half.shape.dtype, half.shape.weights) == ("float16", FORMATS["float8"])


def test_weights_of_a_law_count_in_memory(tmp_path: Path) -> None:
    law = law_fit.fit(None, "none", unit="tpot_ms", kernels=KernelSource("llama-3.1-70b", "h200", weights="int4"))
    cost = HardwareCost("engine", law=str(step_law.write(law, tmp_path / "law.json")))
    found = cost.of("target")
    assert found is not None
    assert found.shape == replace(preset("llama-3.1-70b"), weights=FORMATS["int4"])


def test_a_profile_has_the_type_that_was_measured(tmp_path: Path) -> None:
    """A quantised checkpoint of a measured model, as its file says: its times are those of the profile, in 16 bits."""
    keys = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 128_256, "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    found = HardwareCost("profile", profile="h100-llama-3.1-8b", shape=str(path)).of("target")
    assert found is not None
    assert found.shape == preset("llama-3.1-8b")


# --- Heads and their targets ---

DECODERS = [name for name, made in PRESETS.items() if not made.encoder_layers]


@given(st.sampled_from(DECODERS), st.sampled_from(DECODERS), st.sampled_from(["mtp", "medusa"]))
def test_a_head_is_of_its_target(target: str, other: str, kind: str) -> None:
    """Models of one shape share heads; heads of all others are refused, also of the same widths."""
    sizes = [(made.layers, made.hidden, made.vocabulary) for made in (preset(target), preset(other))]
    cost = {"kind": "roofline", "device": "h200", "dtype": "float16", "shape": target, "draft_shape": f"{kind}:{other}"}
    if sizes[0] == sizes[1]:
        HardwareCost(**cost)  # type: ignore[arg-type]
        KernelSource(target, "h200", draft=f"{kind}:{other}").drafting  # noqa: B018
        return
    message = (
        f"must be a head of {re.escape(target)}, got {kind}:{re.escape(other)}: (layers|hidden|vocabulary) (are|is) [0-9]+, not"
    )
    with pytest.raises(ParameterError, match=f"^draft_shape {message}"):
        HardwareCost(**cost)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=f"^draft {message}"):
        kernel_times.hardware(KernelSource(target, "h200", dtype="float16", draft=f"{kind}:{other}"))


def test_a_head_of_another_model_is_refused_with_profiles_and_from_files(tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match=r"^draft_shape must be a head of llama-2-13b, got eagle:llama-2-7b: layers are 32, not 40"
    ):
        HardwareCost("profile", profile="h100-llama-2-13b", draft_shape="eagle:llama-2-7b")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
        "draft_vocab_size": 32_000, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    HardwareCost("roofline", device="h100", shape="llama-3.1-8b", draft_shape=str(path))
    with pytest.raises(ParameterError, match=r"^draft_shape must be a head of llama-3.1-70b, got .*: hidden is 4096, not 8192"):
        HardwareCost("roofline", device="h100", shape="llama-3.1-70b", draft_shape=str(path))


def test_a_head_of_another_model_is_refused_where_its_operations_are_counted() -> None:
    tables = scenario() | {"cost": {"cost_ratio": 0.1, "shape": "llama-3.1-70b", "draft_shape": "eagle3:llama-3.1-8b"}}
    tables["method"][0]["layers"] = 80
    with pytest.raises(
        ParameterError, match=r"cost.draft_shape must be a head of llama-3.1-70b, got eagle3:llama-3.1-8b: layers are"
    ):
        sim.run(tables, out=None)
    sim.run(tables | {"cost": tables["cost"] | {"draft_shape": "eagle3:llama-3.3-70b"}}, out=None)


SPLIT = {"device": "h200", "shape": "deepseek-r1", "draft_shape": "mtp:deepseek-r1", "tensor_parallel": 8}


def drafted(placement: str = "colocated", units: int = 1, **cost: Any) -> PointCosts:
    tables = scenario(**SPLIT | cost)
    tables["method"][0]["placement"] = placement
    made = Grid(tables | {"cluster": {"units": units}}).case(0).hardware
    assert made is not None
    return made


def test_a_head_is_split_as_its_target() -> None:
    """Memory and time are those of one part of eight; unsplit, or as a separate draft, they are of the whole head."""
    head, target = named_shape("mtp:deepseek-r1"), preset("deepseek-r1").shard(8)
    split, whole, apart = drafted(), drafted(draft_tensor_parallel=1), drafted("separate", 2)
    weights = [made.memory.weights for made in (split, whole, apart) if made.memory is not None]
    assert weights == pytest.approx([target.weight_bytes + more for more in (head.shard(8).weight_bytes, head.weight_bytes, 0)])
    for made, over in ((split, 8), (whole, 1), (apart, 1)):
        one = Roofline.on_device(head, DEVICES["h200"], tensor_parallel=over)
        expected = float(pass_time(one, 1, 512, heads=1).seconds)
        assert float(made.cost.hardware_models["draft"].layer(1, 512).seconds) == pytest.approx(float(one.layer(1, 512).seconds))
        assert expected > 0
    assert apart.cost.draft_devices == 1 / 8
    assert drafted(draft_tensor_parallel=8) == split
    small = drafted(shape="llama-3.1-70b", draft_shape="llama-3.2-1b")
    assert small.memory is not None
    assert small.memory.weights == preset("llama-3.1-70b").shard(8).weight_bytes + preset("llama-3.2-1b").weight_bytes


def test_a_draft_can_be_split_too() -> None:
    made = drafted(shape="llama-3.1-70b", draft_shape="llama-3.2-1b", draft_tensor_parallel=8)
    assert made.memory is not None
    assert made.memory.weights == sum(preset(name).shard(8).weight_bytes for name in ("llama-3.1-70b", "llama-3.2-1b"))


def test_a_head_with_a_profile_of_operations_is_split_where_it_has_times() -> None:
    cost = HardwareCost("profile", profile="h100-operations", shape="llama-3.1-70b", draft_profile="h100-operations",
                        draft_shape="eagle3:llama-3.1-70b", tensor_parallel=4)  # fmt: skip
    assert cost.tensor_parallel_of("draft") == 4
    assert cost.tensor_parallel_of("draft", separate=True) == 1


@pytest.mark.parametrize(("cost", "placement", "message"), [
    ({"draft_tensor_parallel": 2}, "colocated", "draft_tensor_parallel must be 1 or tensor_parallel=8, got 2"),
    ({"draft_tensor_parallel": 2, "tensor_parallel": 1}, "colocated", "draft_tensor_parallel must be 1, got 2"),
    ({"draft_tensor_parallel": 0}, "colocated", "draft_tensor_parallel must be between 1 and 1024, got 0"),
    ({"draft_tensor_parallel": 8}, "separate", "draft_tensor_parallel must be 1 with placement separate, .*, got 8"),
    ({"dtype": "int4"}, "colocated", "dtype is the type of activations and cannot be 'int4'; use weights = 'int4'"),
    ({"dtype": "int4-g64"}, "colocated", "dtype is the type of activations and cannot be 'int4-g64'; use weights = 'int4-g64'"),
    ({"dtype": "bf16"}, "colocated", "unknown dtype 'bf16'; did you mean bfloat16[?]"),
    ({"dtype": "float8", "device": "a100"}, "colocated", "dtype must be one of .*, got 'float8'; use weights for the weights"),
    ({"shape": "mtp:deepseek-r1"}, "colocated", "shape must be a whole model, got 'mtp:deepseek-r1', a draft head"),
    ({"draft_shape": "qwen2.5-0.5b", "draft_tensor_parallel": 8}, "colocated",
     "draft_tensor_parallel: tensor_parallel must divide heads=14, got 8"),
    ({"draft_shape": "eagle3:llama-3.1-8b:²"}, "colocated", "unknown target shape 'llama-3.1-8b:²'"),
    ({"weights": "int4-g7"}, "colocated", "weights must have groups of a power of two .*, got int4-g7"),
    ({"device": "v100"}, "colocated", "dtype must be one of float16, float32, published for v100, got 'bfloat16'; set dtype"),
    ({"tensor_parallel": 4}, "colocated", r"weights \(17.* GB of h200, got .*larger tensor_parallel, weights in fewer bits"),
])  # fmt: skip
def test_bad_types_and_splits_are_one_line(cost: dict[str, Any], placement: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        drafted(placement, 2, **cost)


def test_experts_of_gpt_oss_can_be_unquantised() -> None:
    found = HardwareCost("roofline", device="b200", shape="gpt-oss-20b", weights="none").of("target")
    assert found is not None
    assert found.shape == replace(preset("gpt-oss-20b"), weights=None)


@pytest.mark.parametrize(("cost", "message"), [
    ({"weights": "int3"}, "unknown weights 'int3'"),
    ({"draft_weights": "int3", "draft_shape": "llama-68m"}, "unknown draft_weights 'int3'"),
    ({"cache_dtype": "int4"}, "unknown cache_dtype 'int4'"),
    ({"expert_correlation": 0.5}, "expert_correlation is used only by a shape with sparse experts, got llama-3.1-8b"),
    ({"shape": "mixtral-8x7b", "expert_correlation": 2.0}, "expert_correlation must be between 0 and 1"),
    ({"draft_shape": "eagle3:llama-9"}, "eagle3:llama-9: unknown target shape 'llama-9'"),
    ({"kind": "profile", "profile": "h100-llama-2-13b", "shape": None, "device": None, "weights": "int4"},
     "weights is not used by kind 'profile'"),
])  # fmt: skip
def test_bad_costs_are_one_line(cost: dict[str, Any], message: str) -> None:
    given_cost = {"device": "h100", "shape": "llama-3.1-8b"} | cost
    tables = scenario(**{key: value for key, value in given_cost.items() if value is not None})
    with pytest.raises(ParameterError, match=message):
        sim.run(tables, out=None)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: head_of("eagle4", TINY), "unknown draft head 'eagle4'; did you mean eagle"),
    (lambda: head_of("mtp", TINY, 50), "a vocabulary is not used by draft head mtp"),
    (lambda: named_shape("mtp:eagle3:llama-3.1-8b"),
     "mtp:eagle3:llama-3.1-8b: the target must be a whole model, got a draft head of kind eagle3"),
    (lambda: head_of("eagle3", TINY, 101), "vocabulary must be between 1 and that of the target=100, got 101"),
    (lambda: named_shape("eagle:t5-small"), "eagle:t5-small: the target must be a decoder without encoder, got encoder_layers=6"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_heads_name_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()


def test_quantised_target_leaves_the_head_alone() -> None:
    assert head_of("eagle", replace(TINY, weights=FORMATS["int4"])).weights is None
    assert head_of("mtp", replace(TINY, weights=FORMATS["int4"])).weights == FORMATS["int4"]  # of the checkpoint itself
    medusa, heads = head_of("medusa", TINY), draft_heads.MEDUSA_HEADS
    assert medusa.weight_bytes == 2 * heads * (64 + 8 + 800)
    assert np.isclose(replace(medusa, weights=FORMATS["int8"]).weight_bytes, heads * (64 + 2 * (8 + 800)))
