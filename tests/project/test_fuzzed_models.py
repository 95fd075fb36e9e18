"""What is read of models and of work that was broken off, spoiled five hundred times: something, or one line, in bounded time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from calibrate.decode import output_quality
from calibrate.decode import position_logging as logging
from calibrate.decoders.transformers_adapter import decoder_of
from calibrate.family import align_draft, draft_head_training, exit_heads, model_directory, training
from calibrate.fits import cpu_step
from calibrate.loading import architectures
from calibrate.measured_runs import measure_runs
from calibrate.timing import profile_from_timings, timing_grid
from tests.support import family, real_models
from tests.support.fuzzing import (
    bytes_of,
    call_reader,
    folder,
    fuzz_settings,
    json_of,
    rows_of,
    tensors_of,
    to_json,
    write_mutated_pair,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "fake_time")]


def broken_off(work: Callable[..., Any], *arguments: Any, after: int, **more: Any) -> None:
    """Do some work until it has reported a number of times."""
    seen = iter(range(after))

    def report(*_: Any) -> None:
        if next(seen, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(*arguments, report=report, **more)


# --- models ---


@lru_cache(maxsize=1)
def model() -> dict[str, bytes]:
    """The files of a tiny model with heads."""
    with folder() as here:
        path = family.train_model(here, recipe=dataclasses.replace(family.RECIPE, epochs=0.1))
        exit_heads.train(
            model_directory.load(path),
            family.text(),
            exit_heads.HeadTrainingSettings(epochs=0.1, batch=4, length=32),
            path / model_directory.HEADS,
        )
        settings = draft_head_training.DraftHeadSettings(epochs=0.1, batch=4, length=32, draft_length=2)
        for kind in draft_head_training.KINDS:
            where = path / draft_head_training.file_name(kind)
            draft_head_training.train(model_directory.load(path), family.text(), kind, settings, where)
        return {each.name: each.read_bytes() for each in path.iterdir()}


@st.composite
def spoiled_file(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """A file of a model."""
    if name.endswith(".safetensors"):
        return draw(tensors_of(content))
    if name.endswith(".json") and len(content) < 10**5:
        return draw(st.one_of(json_of(json.loads(content)).map(to_json).map(str.encode), bytes_of(content)))
    return draw(bytes_of(content))


def put(files: dict[str, bytes], here: Path) -> Path:
    """The files in a folder."""
    for name, content in files.items():
        (here / name).write_bytes(content)
    return here


@given(data=st.data())
@fuzz_settings
def test_models(data: st.DataObject) -> None:
    held = model()
    name = data.draw(st.sampled_from([*held]))
    with folder() as here:
        put(held | {name: data.draw(spoiled_file(name, held[name]))}, here)
        call_reader(model_directory.load, here)
        call_reader(model_directory.log_of, here)


ARCHITECTURE = real_models.config("llama", 2).to_dict() | {"architectures": ["LlamaForCausalLM"]}


@given(data=st.data())
@fuzz_settings
def test_architectures(data: st.DataObject) -> None:
    """As `calibrate layers` reads them, which builds a model of one that it takes."""
    with folder() as here:
        content = st.one_of(json_of(ARCHITECTURE).map(to_json).map(str.encode), bytes_of(to_json(ARCHITECTURE).encode()))
        (here / "config.json").write_bytes(data.draw(content))
        call_reader(architectures.architecture, str(here / "config.json"))


@lru_cache(maxsize=1)
def loaded() -> model_directory.Loaded:
    """The model itself, whose files are gone."""
    with folder() as here:
        return model_directory.load(put(model(), here))


@given(data=st.data())
@fuzz_settings
def test_heads(data: st.DataObject) -> None:
    with folder() as here:
        path = here / model_directory.HEADS
        path.write_bytes(data.draw(tensors_of(model()[model_directory.HEADS])))
        call_reader(exit_heads.about, path)
        call_reader(exit_heads.heads_of, loaded(), path)
        kind = data.draw(st.sampled_from(draft_head_training.KINDS))
        other = here / draft_head_training.file_name(kind)
        other.write_bytes(data.draw(tensors_of(model()[other.name])))
        target = decoder_of(loaded().model, "tiny")
        target.checksum = loaded().checksum
        call_reader(draft_head_training.load, other, target)


# --- work that was broken off ---


def work_of_six_steps() -> training.TrainingJob:
    """A matrix on its way to nothing."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    optimizers = training.optimizers_of(module, family.RECIPE)

    def learn(_: int) -> Any:
        loss = module(torch.ones(1, 4)).square().mean()
        loss.backward()
        return loss.detach()

    return training.TrainingJob(module, optimizers, learn, lambda: 1.0, lambda _: 0.01, 6, '{"some": 1}')


@lru_cache(maxsize=1)
def half_trained() -> bytes:
    """What is kept of it after some steps."""
    with folder() as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SAVE_EVERY", 0.0)
        broken_off(work_of_six_steps().done, here / "some.kept", after=4)
        return (here / "some.kept").read_bytes()


@given(data=st.data())
@fuzz_settings
def test_trainings_that_were_broken_off(data: st.DataObject) -> None:
    with folder() as here:
        kept = here / "some.kept"
        kept.write_bytes(data.draw(tensors_of(half_trained())))
        call_reader(partial(work_of_six_steps().done, kept, resume=True))


@given(data=st.data())
@fuzz_settings
def test_sequences_of_an_interrupted_alignment(data: st.DataObject) -> None:
    with folder() as here:
        kept = here / "out.written"
        save_file({"texts": np.arange(12).reshape(3, 4)}, kept, {"settings": "{}"})
        kept.write_bytes(data.draw(tensors_of(kept.read_bytes())))
        call_reader(partial(align_draft.saved_sequences, kept, "{}", count=5, length=4, vocabulary=300))


SAID = {
    "target": {"name": "target", "checksum": "0", "layers": real_models.DEPTHS["target"]}, "draft": None, "heads": None,
    "prompts": [], "max_tokens": 3, "sampling": None, "seed": 0, "dtype": "float64", "versions": {}, "date": "2026-01-01",
}  # fmt: skip
PROMPTS = [(1, 2, 3), (4, 5, 6), (7, 8, 9, 10)]


@lru_cache(maxsize=4)
def left(kind: str) -> dict[str, bytes]:
    """Everything that some work leaves that was broken off before its end, by paths."""
    with folder() as here:
        broken_off(work_of(kind), here, after={"log": 2, "quality": 2, "runs": 5}[kind])
        return {path.relative_to(here).as_posix(): path.read_bytes() for path in here.rglob("*.*") if path.is_file()}


def work_of(kind: str) -> Callable[..., Any]:
    """What goes on with such work in a folder; all of it on a tiny model."""
    models = real_models.decoders("llama")
    if kind == "log":
        return lambda here, **more: logging.write_log(here / "log.json", SAID, models["target"], PROMPTS, 3, group=1, **more)
    if kind == "quality":
        settings = [{"exit_layer": 3}, {"exit_layer": 4}, {"exit_layer": 5}]
        told = {"target_name": "tiny", "source": "measured"}
        return lambda here, **more: output_quality.measure(
            here / "rows.csv", told, "early_exit", models, PROMPTS, 3, settings, **more
        )  # fmt: skip
    plan = measure_runs.MeasurementPlan(
        [measure_runs.PlannedDecoding("autoregressive", {}, prompt, str(prompt)) for prompt in PROMPTS], 3, 2
    )
    return lambda here, **more: measure_runs.measure(here / "runs.json", plan, models, **more)


@pytest.mark.parametrize("kind", ["log", "quality", "runs"])
@given(data=st.data())
@fuzz_settings
def test_work_that_was_broken_off(kind: str, data: st.DataObject) -> None:
    held = left(kind)
    name = data.draw(st.sampled_from([*held]))
    with folder() as here:
        for other, content in held.items():
            (here / other).parent.mkdir(exist_ok=True)
            (here / other).write_bytes(content)
        if name.endswith(".parquet"):
            said = (here / name).with_suffix(".json")
            pair = {each.name: each.read_bytes() for each in (said, here / name)}
            write_mutated_pair(data, pair, said.stem, pl.read_parquet(here / name), said.parent)
        elif name.endswith(".jsonl"):
            (here / name).write_bytes(data.draw(rows_of(held[name].decode().splitlines())))
        else:
            said_ = json_of(json.loads(held[name])).map(to_json).map(str.encode)
            (here / name).write_bytes(data.draw(st.one_of(said_, bytes_of(held[name]))))
        call_reader(partial(work_of(kind), here, resume=True))


@lru_cache(maxsize=1)
def raw() -> list[str]:
    """Some raw rows of each kind."""
    lines = cpu_step.path_of("cpu-processes/cpu-family-target").read_text().splitlines()
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(json.loads(line)["kind"], []).append(line)
    return [line for each in kinds.values() for line in each[:4]]


@given(data=st.data())
@fuzz_settings
def test_raw_rows(data: st.DataObject) -> None:
    said = json.loads(raw()[0])
    with folder() as here:
        (here / "x.jsonl").write_bytes(data.draw(rows_of(raw())))

        def gone_on() -> None:
            rows = timing_grid.RawTimings(here / "x.jsonl", said, resume=True)
            rows.done()
            best = SimpleNamespace(best={name: said[name] for name in profile_from_timings.CEILINGS})
            profile_from_timings.write(
                profile_from_timings.TimedModel(None, rows, None, "x", best), ["eager", "interpreter"], here / "out"
            )

        call_reader(gone_on)
