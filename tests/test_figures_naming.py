"""What points are called in every figure."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from figures import naming

SAID: list[tuple[str, Any, str]] = [
    ("policy", "heuristic", "heuristic"), ("estimator", "drafted", "by drafted tokens"), ("reading", "recursive", "recursive"),
    ("rule", "per-beam", "per-beam"), ("arrangement", "nested", "nested"), ("form", "eager", "eager form"),
    ("variant", "paper", "variant paper"), ("measure", "state", "state"), ("fill", "copy", "copy"),
    ("placement", "apart", "draft apart"), ("sampled", True, "sampled"), ("beams", 4, "4 beams"), ("candidates", 3, "k = 3"),
    ("batched", True, "candidates batched"), ("draft_length", 5, "γ = 5"), ("max_draft_length", 20, "γ up to 20"),
    ("maximum_draft", 10, "drafts up to 10"), ("max_layers", 32, "32 layers at first"), ("min_layers", 8, "8 at last"),
    ("warm_up", 2, "2 to warm up"), ("power", 0.5, "power 0.5"), ("rounding", "down", "rounded down"),
    ("exit_layer", 20, "exit layer 20"), ("layers", 40, "40 layers"), ("draft_layers", 6, "draft of 6 layers"), ("ways", 4, "TP 4"),
    ("tensor_parallel", 2, "TP 2"), ("units", 3, "3 units"), ("sequences", 8, "batch of 8"), ("batch", 16, "batch of 16"),
    ("cost.device", "h100", "h100"), ("cost.profile", "mine", "mine"), ("cost.shape", "llama-68m", "llama-68m"),
    ("data_set", "xsum", "xsum"), ("head", "trained", "trained head"), ("tokens", 128, "128 tokens"),
    ("match_rate", 0.66666, "p = 0.667"), ("acceptance_rate", 0.8, "α = 0.8"), ("medium_acceptance_rate", 0.9, "medium α = 0.9"),
    ("fallback_threshold", 0.55, "fallback below 0.55"), ("rollback_threshold", 3.0, "rollback above 3"),
    ("fallback_rate", 0.12345, "f = 0.123"), ("rollback_rate", 0.01, "r = 0.01"),
    ("mean_exit_layer", 12.5, "12.5 layers on average"), ("cost_ratio", 0.05, "c = 0.05"),
    ("medium_cost_ratio", 0.25, "medium c = 0.25"), ("fitted_on", "table 3", "fitted on table 3"),
    ("batching", "static", "static"), ("outcomes.file", "mine.json", "file = mine.json"),
]  # fmt: skip


def test_every_column_that_has_words_is_here() -> None:
    assert {name for name, *_ in SAID} == {*naming.WORDS, "outcomes.file"}


@pytest.mark.parametrize(("name", "value", "said"), SAID, ids=[name for name, *_ in SAID])
def test_a_column_is_said_once_in_these_words(name: str, value: Any, said: str) -> None:
    assert naming.words({name: value}, [name]) == [said]
    assert naming.words({name: None}, [name]) == []


@pytest.mark.parametrize(("row", "said"), [
    ({"sequences": 1}, []), ({"batch": 1}, []), ({"ways": 1}, []), ({"tensor_parallel": 1}, []), ({"units": 1}, []),
    ({"placement": "together"}, []), ({"power": 1.0}, []), ({"estimator": "unbiased"}, []), ({"sampled": False}, []),
    ({"sequences": 1, "batching": "static"}, []), ({"sequences": 2, "batching": "static"}, ["batch of 2", "static"]),
])  # fmt: skip
def test_what_goes_without_saying_is_not_said(row: dict[str, Any], said: list[str]) -> None:
    assert naming.words(row, [*row]) == said


@pytest.mark.parametrize(("row", "said"), [
    ({"method": "autoregressive"}, "plain decoding"), ({"method": "autoregressive", "ways": 1}, "plain decoding"),
    ({"method": "autoregressive", "ways": 2}, "tensor parallelism"),
    ({"method": "autoregressive", "tensor_parallel": 4}, "tensor parallelism"),
    ({"method": "ppd", "ways": 2}, "Predictive Pipelined Decoding"), ({"method": "speculative"}, "speculative decoding"),
    ({"method": "adaptive"}, "adaptive drafts"),
    ({"method": "hierarchical"}, "three models"), ({"method": "beam"}, "beam search"), ({"method": "bild"}, "Big Little Decoder"),
    ({"method": "skipdecode"}, "SkipDecode"), ({"method": "early_exit"}, "early exit"), ({"method": "pearl"}, "PEARL"),
    ({"method": "mine"}, "mine"),
])  # fmt: skip
def test_methods_have_their_names(row: dict[str, Any], said: str) -> None:
    assert naming.method(row) == said


def test_the_fewest_columns_that_tell_points_apart_are_taken_in_their_order() -> None:
    rows = pl.DataFrame({
        "point": [0, 1, 2, 3], "method": ["ppd", "ppd", "speculative", "speculative"], "candidates": [1, 3, None, None],
        "draft_length": [None, None, 4, 4], "tokens": [64, 64, 64, 64], "cost.device": ["a", "a", "a", "b"],
    })  # fmt: skip
    assert naming.telling(rows) == ["candidates", "cost.device"]
    assert naming.telling(rows, ["draft_length"]) == []
    assert naming.telling(rows, ["cost.device"]) == ["cost.device"]
    assert naming.telling(rows.drop("method"), ["draft_length"]) == ["draft_length"]
    assert naming.names(rows) == {
        0: "Predictive Pipelined Decoding, k = 1, a", 1: "Predictive Pipelined Decoding, k = 3, a", 2: "speculative decoding, a",
        3: "speculative decoding, b",
    }  # fmt: skip
    assert naming.names(rows.head(2)) == {0: "k = 1", 1: "k = 3"}
    assert naming.names(rows.head(1)) == {0: "Predictive Pipelined Decoding"}
    assert naming.names(rows.head(1).drop("method")) == {0: "point 0"}
    assert naming.common(rows) == ["64 tokens"]
    assert naming.common(rows.head(2)) == ["Predictive Pipelined Decoding", "64 tokens"]
    assert naming.common(rows.head(2), ["tokens", "cost.device"]) == ["Predictive Pipelined Decoding", "a", "64 tokens"]


def test_of_several_rows_of_a_point_the_last_is_taken() -> None:
    rows = pl.DataFrame({"point": [0, 0, 1], "view": ["formula", "paths", "formula"]})
    assert naming.once(rows)["view"].to_list() == ["paths", "formula"]
