"""Models and devices from files: a config.json and a .toml stand wherever a name does; what is wrong in one is said in a line."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import sim
from calibrate.importers import aiconfigurator, llmservingsim, vidur
from model.architectures import published_shapes
from model.architectures.published_shapes import PRESETS
from model.architectures.transformer import BYTES, Shape
from model.base import bounded_files
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.devices import DEVICES, Device
from sim.commands.sim_app import app
from sim.scenarios import scenario_file
from tests.support.foreign_tables import copy_tables


def config_of(name: str, shape: Shape) -> dict[str, Any]:
    """A preset as the transformers library writes it, by hand: the keys of its type that say anything."""
    llamas = ("llama", "codellama", "vicuna")
    kind = name.partition("-")[0]
    said: dict[str, Any] = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied_head, "torch_dtype": "bfloat16"}
    usual = {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn, "architectures": ["Anything"], "rope_theta": 5e5,
    }  # fmt: skip
    if kind in ("t5", "mt5"):
        return said | {
            "model_type": kind, "num_layers": shape.encoder_layers, "num_decoder_layers": shape.layers, "d_model": shape.hidden,
            "num_heads": shape.heads, "d_ff": shape.ffn, "d_kv": shape.head_dim, "relative_attention_num_buckets": shape.buckets,
            "feed_forward_proj": "gated-gelu" if shape.gated else "relu", "is_encoder_decoder": True,
        }  # fmt: skip
    if kind == "gpt2":
        sizes = {"n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "n_positions": shape.positions}
        return said | sizes | {"model_type": "gpt2", "n_inner": None}
    if kind == "opt":
        return said | usual | {"model_type": "opt", "ffn_dim": shape.ffn, "max_position_embeddings": shape.positions - 2}
    if kind == "pythia":
        return said | usual | {"model_type": "gpt_neox"}
    grouped = usual | {"num_key_value_heads": shape.kv_heads}
    if shape.latent is not None or shape.experts is not None or shape.window is not None:
        return said | grouped | special(kind, shape)
    types = {"phi": "phi3" if name.startswith("phi-4") else "phi", "qwen2.5": "qwen2"} | dict.fromkeys(llamas, "llama")
    own_width = {"head_dim": shape.head_dim} if kind == "qwen3" else {}
    return said | grouped | own_width | {"model_type": types.get(kind, kind)}


def special(kind: str, shape: Shape) -> dict[str, Any]:
    """The keys of types with experts, latent attention or windows."""
    experts, latent, window = shape.experts, shape.latent, shape.window
    keys: dict[str, Any] = {"head_dim": shape.head_dim, "attention_bias": False}
    if window is not None:
        each = ["sliding_attention"] * window.layers + ["full_attention"] * (shape.layers - window.layers)
        keys |= {"sliding_window": window.size, "layer_types": each}
    if experts is None:
        return keys | {"model_type": "gemma3_text"}
    keys |= {"num_experts_per_tok": experts.active}
    if latent is None:
        count = "num_experts" if kind == "qwen3" else "num_local_experts"
        keys |= {count: experts.count} | ({"moe_intermediate_size": shape.ffn, "intermediate_size": 9} if kind == "qwen3" else {})
        if shape.weights is not None:
            keys |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}}
            return keys | {"model_type": "gpt_oss", "attention_bias": True}
        return keys | {"model_type": {"qwen3": "qwen3_moe"}.get(kind, kind)}
    stored = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return keys | {
        "model_type": "deepseek_v3", "quantization_config": stored, "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared // shape.ffn,
        "moe_intermediate_size": shape.ffn, "intermediate_size": experts.dense_ffn, "moe_layer_freq": 1,
        "first_k_dense_replace": experts.dense_layers, "kv_lora_rank": latent.rank, "q_lora_rank": latent.query_rank,
        "qk_rope_head_dim": latent.rope, "qk_nope_head_dim": latent.nope, "v_head_dim": shape.head_dim,
    }  # fmt: skip


def written(folder_: Path, name: str, called: str = "", **more: Any) -> Path:
    """A model's folder with its config.json."""
    at = folder_ / (called or f"{name}-files")
    at.mkdir(exist_ok=True)
    path = at / "config.json"
    path.write_text(json.dumps(config_of(name, PRESETS[name]) | more))
    return path


def device_file(folder_: Path, like: str, **more: Any) -> Path:
    """A known device's file, with some of it changed."""
    path = folder_ / f"{like}-file.toml"
    path.write_text(devices.toml_text(replace(DEVICES[like], **more)))
    return path


# --- models ---


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_gives_the_shape_of_its_preset(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    found = published_shapes.named_shape(str(path))
    assert found == PRESETS[name] == published_shapes.named_shape(f"{path.parent}/") == published_shapes.named_shape(name)
    assert found.parameters == PRESETS[name].parameters
    eight = replace(found, dtype="float8")
    assert published_shapes.named_shape(str(path), "float8") == published_shapes.named_shape(name, "float8") == eight
    assert published_shapes.label(str(path)) == published_shapes.label(str(path.parent)) == f"{name}-files"


def test_a_type_that_neither_says_is_of_16_bits(tmp_path: Path) -> None:
    path = written(tmp_path, "opt-1.3b", torch_dtype=None)
    assert published_shapes.named_shape(str(path)).dtype == "bfloat16"
    written(tmp_path, "opt-1.3b", torch_dtype="float32")
    assert published_shapes.named_shape(str(path)).dtype == "float32"  # a file that was written again is read again


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "rwkv6"}, "unknown model_type 'rwkv6'; known: deepseek_v3, gemma3_text, gpt2, gpt_neox, gpt_oss"),
        ({"model_type": None}, "unknown model_type None; "),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be between 1 and 1000, got 10000000"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number, got 'wide'"),
        ({"intermediate_size": 10**12}, "intermediate_size must be between 1 and 16777216, got 1000000000000"),
        ({"num_attention_heads": None}, "num_attention_heads is missing in a config of model_type llama"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method must be one of awq"),
        ({"torch_dtype": "float64"}, "unknown dtype 'float64'"),
    ],
)
def test_a_model_that_is_not_known_is_one_line(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, "llama-2-7b", **more)
    running = ["run", "hardware-compare", "--set", f"cost.shape={path}", "-o", str(tmp_path / "out")]
    for arguments in (["ls", "shapes", str(path)], running):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"{path}: {message}" in line
    assert not (tmp_path / "out").exists()


def test_what_is_no_config_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "large.json").write_text(" " * (bounded_files.MOST_TOML + 1))
    for name, message in {
        "none.json": "No such file", "list.json": "must be a table of keys, got [1]", "text.json": "must be JSON",
        "large.json": "must have at most", "": "No such file",
    }.items():  # fmt: skip
        done = CliRunner().invoke(app, ["ls", "shapes", f"{tmp_path}/{name}"])
        assert done.exit_code == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    for name in ("lama-2-7b", 5, None, ["gpt2"]):
        with pytest.raises(ParameterError, match=r"unknown draft_shape .*; or give the path of a config\.json"):
            published_shapes.named_shape(name, key="draft_shape")


# --- devices ---


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_read_as_it_is_listed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CliRunner().invoke(app, ["ls", "devices", name]).stdout)
    assert devices.device(str(path)) == DEVICES[name] == devices.device(name)
    assert devices.device(str(path)).origin == ("reported" if name in devices.REPORTED else "published")
    again = CliRunner().invoke(app, ["ls", "devices", str(path), "--json"])
    assert Device(**tomllib.loads(json.loads(again.stdout)[str(path)])) == DEVICES[name]


NUMBERS = {name: st.floats(*bounds) for name, bounds in devices.BETWEEN.items()}
RATES = st.dictionaries(st.sampled_from([*BYTES]), NUMBERS.pop("rates"), min_size=1)


@given(st.builds(Device, name=st.just("mine"), source=st.text(max_size=40).filter(str.isprintable), rates=RATES, **NUMBERS))
def test_written_devices_are_read_again(of: Device) -> None:
    found = Device(**tomllib.loads(devices.toml_text(of)))
    assert (found.name, found.source) == (of.name, of.source)
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(getattr(of, name), rel=1e-11)
    assert found.rates == pytest.approx(dict(of.rates), rel=1e-11)


def test_a_device_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "b200.toml"
    whole = tomllib.loads(devices.toml_text(DEVICES["h200"]))
    numbers = [f"{key} = {value}" for key, value in whole.items() if key not in ("name", "source", "rates")]
    path.write_text("\n".join([*numbers, "[rates]", "bfloat16 = 2e15"]))
    made = devices.device(str(path))
    assert (made.name, made.source, made.published) == ("b200", "given in b200.toml", False)
    assert made.rate("bfloat16") == 2e15


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth =", "bandwith =", "unknown key 'bandwith'; did you mean bandwidth?"),
        ("bandwidth =", "# bandwidth =", "bandwidth is missing; a device has name, memory_bytes, bandwidth, rates, link"),
        ("bandwidth = 3.35e+12", "bandwidth = 3350", "bandwidth must be between 1e+08 and 1e+17, got 3350"),
        ("bandwidth = 3.35e+12", 'bandwidth = "3 TB/s"', "bandwidth must be a number, got '3 TB/s'"),
        ("bandwidth = 3.35e+12", "bandwidth = nan", "bandwidth must be between 1e+08 and 1e+17, got nan"),
        ("memory_bytes = 85899345920.0", "memory_bytes = 80", "memory_bytes must be between 1e+06 and 1e+16, got 80"),
        ("float8 =", "fp8 =", "unknown dtype 'fp8'; "),
        ("float8 = 1.9789e+15", "float8 = 1978.9", "rates[float8] must be between 1e+08 and 1e+20, got 1978.9"),
        ("[rates]", "[[rates]]", "rates must be a table of rates by dtype"),
        ('name = "h100"', 'name = "../h100"', "name must be usable in the name of a file"),
        ('name = "h100"', "name = 100", "name must be a line of text, got 100"),
        ('name = "h100"', "name h100", "must be TOML: "),
    ],
)
def test_a_device_that_is_none_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = devices.toml_text(DEVICES["h100"])
    assert old in text
    path.write_text(text.replace(old, new, 1))
    running = ["run", "hardware-compare", "--set", f"cost.device={path}", "-o", str(tmp_path / "out")]
    for arguments in (["ls", "devices", str(path)], running):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert str(path) in line
        assert message in line


# --- scenarios ---

SPEC = {"name": "speculative", "layers": 24, "draft_length": 3}
LAW = {"kind": "iid", "acceptance_rate": 0.8}
COST = {"kind": "roofline", "device": "a100", "shape": "opt-1.3b", "draft_shape": "opt-125m", "prompt": 64}


def tables(cost: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"scenario": {"name": "own", "tokens": 16, "views": ["formula"]}, "method": [SPEC], "outcomes": LAW, "cost": cost} | more


def row_of(said: dict[str, Any]) -> dict[str, Any]:
    (row,) = sim.run(said, out=None).to_dicts()
    return row


def test_files_give_what_names_give(tmp_path: Path) -> None:
    paths = {
        "device": str(device_file(tmp_path, "a100")), "shape": str(written(tmp_path, "opt-1.3b")),
        "draft_shape": str(written(tmp_path, "opt-125m").parent),
    }  # fmt: skip
    wanted = row_of(tables(COST))
    assert row_of(tables(COST | paths)) == wanted
    own = row_of(
        tables(COST | {"device": str(device_file(tmp_path, "a100", name="mine", bandwidth=2 * DEVICES["a100"].bandwidth))})
    )
    assert own["cost_source"] == "assumed efficiencies of the peaks given of mine"
    assert own["latency_s"] < wanted["latency_s"]
    like = row_of(tables(COST | {"device": str(device_file(tmp_path, "a100", bandwidth=1e12))}))
    assert like["cost_source"] == "assumed efficiencies of the peaks given of a100"
    composed = {"kind": "profile", "profile": "h100-operations", "draft_profile": "h100-operations", "prompt": 64}
    names = {"shape": "llama-2-7b", "draft_shape": "llama-68m"}
    in_16_bits = {key: str(written(tmp_path, name, torch_dtype="float16")) for key, name in names.items()}
    # Of one profile, whose rows are of products, either gives the same seconds: a type of as many bytes is that of the table.
    big = {"method": [SPEC | {"layers": 32}]}
    found = [row_of(tables(composed | each, **big)) for each in (names, in_16_bits)]
    assert found[0]["latency_s"] == found[1]["latency_s"]
    assert found[0] == found[1]
    counted = {"cost_ratio": 0.1, "operations_ratio": 0.1, "shape": "opt-1.3b", "draft_shape": "opt-125m"}
    unit = [row_of(tables(each, method=[SPEC | {"draft_layers": 12}])) for each in (counted, counted | {"shape": paths["shape"]})]
    assert unit[0] == unit[1]
    assert unit[0]["flops_per_token"] > 0


def test_a_small_device_holds_what_its_file_says(tmp_path: Path) -> None:
    small = device_file(tmp_path, "a100", name="small", memory_bytes=2e9)
    with pytest.raises(ParameterError, match=r"must be at most the 2\.0 GB of small"):
        sim.run(tables(COST | {"device": str(small)}), out=None)
    wrong = device_file(tmp_path, "a100", name="wrong", rates={"int8": 1e14})
    with pytest.raises(ParameterError, match="dtype must be one of int8, given for wrong, got 'bfloat16'"):
        sim.run(tables(COST | {"device": str(wrong)}), out=None)
    other = {"kind": "profile", "profile": "h100-llama-2-7b", "shape": str(written(tmp_path, "opt-6.7b"))}
    with pytest.raises(ParameterError, match="is of llama-2-7b, not of"):
        sim.run(tables(other | {"draft_shape": "llama-68m"}, method=[SPEC | {"layers": 32}]), out=None)


TEXT = """
scenario = { name = "own", tokens = 16, views = ["formula"] }
method = { name = "speculative", layers = 24, draft_length = 3 }
outcomes = { kind = "iid", acceptance_rate = 0.8 }
cost = { kind = "roofline", device = "a100-file.toml", shape = "opt-1.3b-files/config.json", draft_shape = "opt-125m" }
sweep = { "cost.device" = ["a100", "a100-file.toml", "a40-file.toml"] }
"""


def test_files_are_next_to_the_scenario_and_identify_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    model, gpu = written(there, "opt-1.3b"), device_file(there, "a100")
    device_file(there, "a40")
    (there / "own.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    found = sim.run("there/own.toml", out=tmp_path / "run")
    assert found["latency_s"].n_unique() == 2
    assert found["cost.device"].to_list() == ["a100", "there/a100-file.toml", "there/a40-file.toml"]
    marks = {scenario_file.fingerprint(scenario_file.load("there/own.toml"))}
    for change in (
        lambda: gpu.write_text(devices.toml_text(replace(DEVICES["a100"], bandwidth=1e12, name="other"))),
        lambda: device_file(there, "a40", bandwidth=5e11),
        lambda: written(there, "opt-1.3b", torch_dtype="float16"),
    ):
        change()
        marks.add(scenario_file.fingerprint(scenario_file.load("there/own.toml")))
    assert len(marks) == 4
    again = CliRunner().invoke(app, ["run", "there/own.toml", "-o", "run"])
    assert again.exit_code == 2
    assert "holds the run of another scenario" in again.stderr
    other = sim.run("there/own.toml", out=tmp_path / "other")
    assert other["latency_s"].n_unique() == 3
    model.unlink()
    gone = CliRunner().invoke(app, ["run", "there/own.toml", "-o", "gone"])
    assert gone.exit_code == 2
    assert "No such file" in gone.stderr


# --- importers ---


def test_importers_take_files_for_names(tmp_path: Path) -> None:
    folder = copy_tables(tmp_path)
    # Some rows are of a model by its name: that of the folder, in any case.
    model = str(written(tmp_path, "llama-2-7b", "Llama-2-7b-hf", torch_dtype="float32"))
    gpu = str(device_file(tmp_path, "a100", name="my-gpu"))
    by_name, by_file = (vidur.read(folder / "vidur", model=one, gpu=other) for one, other in (("llama-2-7b", "a100"), (model, gpu)))
    assert (by_file.name, by_file.device, by_file.model) == ("my-gpu-Llama-2-7b-hf", "my-gpu", "Llama-2-7b-hf")
    assert by_file.shape == by_name.shape
    assert by_file.bandwidth == by_name.bandwidth
    assert by_file.table.equals(by_name.table)
    # What it ran on is looked up among the known devices: of one from a file nothing is known to the contrary.
    (folder / "llmservingsim/meta.yaml").write_text("gpu: NVIDIA GeForce RTX 4090\n")
    card = str(device_file(tmp_path, "rtx-4090", name="my-card"))
    of_card = llmservingsim.read(folder / "llmservingsim/tp1", model=str(written(tmp_path, "llama-3.1-8b")), gpu=card)
    assert (of_card.name, of_card.device) == ("my-card-llama-3.1-8b-files", "my-card")
    operations = aiconfigurator.read(
        folder / "aiconfigurator", gpu=str(device_file(tmp_path, "h100", name="mine")), engine="vllm/1.0"
    )
    assert (operations.name, operations.device) == ("mine-operations", "mine")
    with pytest.raises(ParameterError, match=r"unknown model 'llama-9'; .*; or give the path of a config\.json"):
        vidur.read(folder / "vidur", model="llama-9", gpu="a100")


# --- Contents of files ---


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name, read in {"x.toml": devices.device, "x.json": published_shapes.named_shape}.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(ParameterError, match="must be a regular file"):
            read(str(tmp_path / name))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=3)


@pytest.mark.slow
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_model_and_any_device_is_one_or_is_refused_in_a_line(tmp_path: Path, data: st.DataObject) -> None:
    config = config_of("llama-2-7b", PRESETS["llama-2-7b"])
    for key in data.draw(st.lists(st.sampled_from([*config, "head_dim", "num_experts", "attention_bias", "dtype"]), max_size=3)):
        config[key] = data.draw(VALUES)
    model = data.draw(st.just(json.dumps(config).encode()) | st.binary(max_size=60))
    lines = devices.toml_text(DEVICES["h100"]).splitlines()
    lines[data.draw(st.integers(0, len(lines) - 1))] = data.draw(st.text(max_size=20))
    gpu = data.draw(st.just("\n".join(lines).encode(errors="replace")) | st.binary(max_size=60))
    for name, content, read in (("x.json", model, published_shapes.named_shape), ("x.toml", gpu, devices.device)):
        (tmp_path / name).write_bytes(content)
        try:
            assert read(str(tmp_path / name)) is not None
        except ParameterError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017
