"""The report of `calibrate decode` for decodings made by hand, and its output on a terminal; without models."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from calibrate.commands import common_options, decode_command
from calibrate.decode.decode_report import Printer, Result, compared, document, summary
from model.interpret.account import Account
from model.logs.recorded_decoding import Decoding
from model.steps import Commit, Forward, LayerSpan

LAYERS = 5


def decoded(
    method: str = "speculative", seconds: float | None = 2.0, tokens: tuple[int, ...] = (3, 4, 5, 6), **more: Any
) -> Decoding:
    """After a prompt of three tokens: a round that accepts two of three drafted tokens, and one that accepts none of one."""
    account = Account()
    account.add(Forward("target", (1, 2, 9), 0, LayerSpan(0, LAYERS), heads=1))
    commits = (Commit("token", tokens),)
    if method == "speculative":
        for width in (4, 2):
            account.add(Forward("target", (7,) * width, 3, LayerSpan(0, LAYERS), heads=width))
            account.add(Forward("draft", (7,), 3, LayerSpan(0, 2), heads=1))
        commits = (Commit("round", tokens[:3], 3), Commit("round", tokens[3:], 1))
        more = {"layers": LAYERS, "draft_length": 3, **more}
    return Decoding(method, more, (1, 2, 9), 4, commits, account, seconds=seconds)


def shown(results: list[Result], capsys: pytest.CaptureFixture[str], **more: Any) -> list[str]:
    Printer(LAYERS, **{"sampled": False, "exact": True, **more}).numbers(results)
    return capsys.readouterr().out.splitlines()


def of(decoding: Decoding, plain: Decoding | None = None, name: str = "one") -> Result:
    return Result(name, "a file", decoding, [*"abcd"], plain)


def test_summary_follows_from_rounds_and_passes() -> None:
    found = summary([decoded(), decoded(seconds=6.0)], LAYERS)
    assert (found["tokens"], found["producers"]) == (8, {"draft": 4, "target": 4})
    assert found["rounds"] == [{"accepted": 0, "drafted": 1, "count": 2}, {"accepted": 2, "drafted": 3, "count": 2}]
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"], found["acceptance_rate"]) == (2.0, 0.5, 0.5)
    assert found["passes"] == {"target": 6, "draft": 4}
    assert found["layer_passes"] == {"target": 2 * 9 * LAYERS, "draft": 2 * 2 * 2}
    assert found["plain_layer_passes"] == 2 * 6 * LAYERS
    assert found["target_layer_passes_over_plain"] == 1.5
    assert (found["seconds"], found["tokens_per_s"]) == (8.0, 1.0)
    plain = summary([decoded("autoregressive", None)], LAYERS)
    assert plain["acceptance_rate"] is plain["mean_acceptance_length"] is plain["tokens_per_s"] is None
    assert plain["producers"] == {"token": 4}


@pytest.mark.parametrize(("tokens", "index"), [
    ((3, 4, 5, 6), None), ((3, 4, 7, 6), 2), ((2, 4, 5, 6), 0), ((3, 4, 5, 6, 7), 4), ((3, 4, 5), 3),
])  # fmt: skip
def test_first_difference_is_the_first_differing_token(tokens: tuple[int, ...], index: int | None) -> None:
    result = of(decoded(), decoded("autoregressive", 6.0, tokens))
    assert result.first_difference == index
    assert of(decoded()).first_difference is None


def test_plain_decoding_is_compared_per_prompt() -> None:
    same, other = of(decoded(), decoded("autoregressive", 6.0)), of(decoded(), decoded("autoregressive", 2.0, (3, 4, 5, 7)))
    assert compared([of(decoded())], LAYERS) is None
    found = compared([same, other], LAYERS)
    assert found == {
        "same_sequences": 1, "sequences": 2, "first_differences": [None, 3], "seconds": 8.0, "tokens_per_s": 1.0, "speedup": 2.0,
    }  # fmt: skip
    without = compared([of(decoded(seconds=None), decoded("autoregressive", 6.0))], LAYERS)
    assert without is not None
    assert without["speedup"] is None
    report = document([same, other], {"method": "speculative"}, LAYERS)
    assert report["provenance"] == "measured"
    assert [each["plain"]["speedup"] for each in report["sequences"]] == [3.0, 1.0]
    assert report["totals"]["plain"] == found
    first = report["sequences"][0]
    assert (first["prompt"], first["text"], first["written"], first["pieces"]) == ("one", "abcd", [3, 4, 5, 6], [*"abcd"])
    assert first["produced_by"] == ["draft", "draft", "target", "target"]
    assert [each["drafted"] for each in first["commits"]] == [3, 1]
    assert {(each["role"], each["width"], each["passes"]) for each in first["work"]} == {
        ("target", 3, 1), ("target", 4, 1), ("target", 2, 1), ("draft", 1, 2),
    }  # fmt: skip
    assert document([], {}, LAYERS)["totals"] is None


def test_printed_lines_after_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown([of(decoded(), decoded("autoregressive", 6.0))], capsys)
    assert lines[0] == "tokens by source: draft, accepted [draft] 2, target [target] 2"
    assert lines[1] == "accepted tokens per round (at most 3 drafted), and number of rounds (measured):"
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "1"], ["1", "0"], ["2", "1"]]
    assert lines[5] == ("4 tokens in 2 rounds; mean acceptance length 2.000 (with the target's token), draft acceptance rate"
                        " 0.500 (accepted / drafted), acceptance rate 0.500 (accepted / tested)")  # fmt: skip
    assert lines[6] == ("passes: target 3, draft 2; layer-passes (layers x tokens): target 1.500 times the 30 of plain decoding,"
                        " draft 4 (counted)")  # fmt: skip
    assert lines[7] == "2.000 s, 2.0 tok/s (measured, prompts included)"
    assert lines[8:] == ["plain decoding: the same output; 6.000 s, 0.7 tok/s; speed-up 3.000 (measured)"]
    lines = shown([of(decoded("autoregressive"))], capsys)
    assert lines == [
        "tokens by source: target [token] 4", "4 tokens",
        "passes: target 1; layer-passes (layers x tokens): target 0.500 times the 30 of plain decoding (counted)",
        "2.000 s, 2.0 tok/s (measured, prompts included)",
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{"sampled": True, "verification": "block"}, {"sampled": True}, {}])
def test_joint_verification_has_no_acceptance_rate(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Of blocks and trees, accepted / tested is no probability of a token: it is neither printed nor in the document."""
    joint = "verification" in settings
    lines = shown([of(decoded(**settings))], capsys)
    end = "acceptance rate 0.500 (accepted / tested)"
    end = "no acceptance rate of single tokens, which are verified jointly" if joint else end
    assert lines[5].endswith(f"draft acceptance rate 0.500 (accepted / drafted), {end}")
    found = summary([decoded(**settings)], LAYERS)
    assert (found["joint_verification"], found["acceptance_rate"]) == (joint, None if joint else 0.5)
    tree = replace(decoded(), method="tree", settings={"layers": LAYERS, "shape": "full", "draft_depth": 2, "width": 2})
    chain = replace(tree, settings={"layers": LAYERS, "shape": "chain", "draft_depth": 2})
    assert [summary([each], LAYERS)["joint_verification"] for each in (tree, chain)] == [True, False]


@pytest.mark.parametrize(("more", "results", "start"), [
    ({}, 1, "plain decoding: another output from token 4 on; "),
    ({"sampled": True}, 1, "plain decoding: outputs are other random draws; "),
    ({"beams": 3}, 1, "plain decoding: another output than 3 beams, which is no error; "),
    ({"beams": 1}, 2, "plain decoding: the same output for 1 of 2 prompts; "),
])  # fmt: skip
def test_difference_to_plain_decoding_is_explained(
    more: dict[str, Any], results: int, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    beams = {name: more.pop(name) for name in ["beams"] if name in more}
    beams |= {"method": "beam"} if beams else {}
    other = of(decoded(**beams), decoded("autoregressive", 6.0, (3, 4, 5, 7)))
    same = of(decoded(**beams), decoded("autoregressive", 6.0))
    assert shown([other, same][:results], capsys, **more)[-1].startswith(start)
    assert shown([same], capsys, **more)[-1].startswith("plain decoding: the same output; ")


def test_last_line_of_a_lossy_method_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([of(decoded())], capsys, exact=False)[-1] == "speculative is lossy: its output can differ from the target's"


@pytest.mark.parametrize("columns", ["20", "80"])
def test_no_line_is_wrapped_or_cut(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines can be copied from a terminal as they were written; brackets are no markup."""
    monkeypatch.setenv("COLUMNS", columns)
    printer = Printer(5, sampled=False, exact=True)
    words = "a line of [many] words " * 9
    printer.line(words)
    decoding: Any = SimpleNamespace(producers=["draft", "target", "unknown"])
    result: Any = SimpleNamespace(decoding=decoding, pieces=[words, "[red]x", "\x1b"])
    printer.text(result)
    assert capsys.readouterr().out == f"{words}\n{words}[red]x\\x1b\n"


def test_characters_outside_the_encoding_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    printer = Printer(5, sampled=False, exact=True)
    printer.line("caf\u00e9 \u65e5")
    assert raw.getvalue() == b"caf\\xe9 \\u65e5\n"
    assert printer.solid == "#"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert Printer(5, sampled=False, exact=True).solid == "\u2588"


@pytest.mark.parametrize(("prompts", "quiet", "styled", "as_json", "bar"), [
    (2, False, False, False, True), (2, True, False, False, False), (1, False, False, False, False),
    (2, False, True, False, False), (2, False, True, True, True), (2, False, False, True, True),
])  # fmt: skip
def test_bar_is_shown_unless_results_show_the_progress(
    prompts: int, quiet: bool, styled: bool, as_json: bool, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[bool, str]] = []

    @contextlib.contextmanager
    def progress(quiet: bool, what: str) -> Iterator[None]:
        shown.append((not quiet, what))
        yield

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common_options, "progress", progress)
    monkeypatch.setattr(Printer, "styled", styled)
    decoder = SimpleNamespace(layers=3)
    run: Any = SimpleNamespace(target=SimpleNamespace(decoder=decoder), sampling=None, exact=True, warm=interrupted)
    with pytest.raises(typer.Exit) as end:
        decode_command._follow(run, ["a"] * prompts, [], {}, None, as_json, quiet)
    assert end.value.exit_code == 130
    assert shown == [(bar, "prompts")]
