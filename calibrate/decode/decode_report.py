"""Report of `calibrate decode`: tokens by source, accepted lengths, acceptance rates, passes and seconds; as text or JSON."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.interpret.account import Account
from model.logs import read_log
from model.logs.recorded_decoding import Decoding, drafting, plain_layer_passes, rounds_and_passes
from model.logs.replay import parameters_of

TOKEN_SOURCES: Mapping[str, tuple[str, str]] = {
    "draft": ("draft, accepted", "green"), "target": ("target", "bold cyan"), "token": ("target", "bold cyan"),
    "match": ("predicted early", "green"), "miss": ("not predicted", "underline yellow"), "column": ("target", "bold cyan"),
    "fallback": ("target, after a fallback", "underline yellow"), "cap": ("target, draft at its longest", "bold cyan"),
    "rollback": ("target, after a rollback", "bold red"), "again": ("target, once more after a rollback", "italic magenta"),
}  # fmt: skip
"""Sources of tokens: description, and style on a terminal. Bold, italic and underline distinguish them without colours."""
_RATES = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_rate")
BAR = 40
"""Length of the longest bar [characters]."""


@dataclass(frozen=True, eq=False)
class Result:
    """A decoding, the text of each token, and plain decoding of the same prompt if wanted."""

    name: str
    source: str
    decoding: Decoding
    pieces: Sequence[str]
    plain: Decoding | None = None

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs from plain decoding; None if all are the same."""
        if self.plain is None or self.plain.tokens == self.decoding.tokens:
            return None
        both = zip(self.plain.tokens, self.decoding.tokens, strict=False)
        shorter = min(len(self.plain.tokens), len(self.decoding.tokens))
        return next((index for index, (token, other) in enumerate(both) if token != other), shorter)


def visible(text: str) -> str:
    """Escape control characters, so that a text cannot control the terminal.

    >>> visible("a\\x1b[31m\\tb")
    'a\\\\x1b[31m\\tb'
    """
    return "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in text)


# --- for programs ---


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def summary(decodings: Sequence[Decoding], layers: int) -> dict[str, Any]:
    """Totals of decodings: tokens, rounds, rates, passes and seconds (measured). `layers` is the depth of the target.

    `acceptance_rate` is None where tokens are not tested one after another: in block verification, and in trees.
    """
    rounds, account = rounds_and_passes(decodings)
    acceptance = drafting(rounds)
    joint = any(parameters_of(each).joint_verification for each in decodings if each.rounds)
    rates = {name: _number(getattr(acceptance, name)) for name in _RATES} | ({"acceptance_rate": None} if joint else {})
    tokens = sum(len(each.tokens) for each in decodings)
    seconds = math.fsum(each.seconds or 0.0 for each in decodings)
    by_role = {role: account.of(role).layer_passes for role in account.roles}
    plainly = sum(plain_layer_passes(layers, len(each.prompt), len(each.tokens)) for each in decodings)
    return {
        "tokens": tokens, "producers": dict(Counter(who for each in decodings for who in each.producers)),
        "rounds": [{"accepted": a, "drafted": d, "count": count} for (a, d), count in sorted(rounds.items())],
        **rates, "joint_verification": joint, "passes": dict(account.passes_of), "layer_passes": by_role,
        "plain_layer_passes": plainly, "target_layer_passes_over_plain": by_role.get("target", 0) / plainly,
        "seconds": seconds, "tokens_per_s": tokens / seconds if seconds else None,
    }  # fmt: skip


def compared(results: Sequence[Result], layers: int) -> dict[str, Any] | None:
    """Comparison with plain decoding: same outputs, seconds and speed-up; None without plain decodings."""
    plain = [each.plain for each in results if each.plain is not None]
    if not plain:
        return None
    own, other = (summary(each, layers) for each in ([result.decoding for result in results], plain))
    pace, plain_pace = own["tokens_per_s"], other["tokens_per_s"]
    return {
        "same_sequences": sum(each.first_difference is None for each in results), "sequences": len(results),
        "first_differences": [each.first_difference for each in results], "seconds": other["seconds"],
        "tokens_per_s": plain_pace, "speedup": pace / plain_pace if pace and plain_pace else None,
    }  # fmt: skip


def document(results: Sequence[Result], head: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return all results as one JSON document."""
    sequences = []
    for each in results:
        found = each.decoding
        sequences.append(
            {
                "prompt": each.name, "source": each.source, "prompt_tokens": [*found.prompt], "text": "".join(each.pieces),
                "written": [*found.tokens], "produced_by": [*found.producers], "pieces": [*each.pieces],
                "settings": read_log.plain(found.settings), "stop": found.stop,
                "commits": [commit._asdict() for commit in found.commits], "work": _work(found.account),
                **summary([found], layers), "plain": compared([each], layers),
            }
        )
    totals = None if not results else summary([each.decoding for each in results], layers) | {"plain": compared(results, layers)}
    return {**head, "provenance": "measured", "sequences": sequences, "totals": totals}


def _work(account: Account) -> list[dict[str, Any]]:
    names = ("passes", "attended", "read")
    return [kind.row() | dict(zip(names, counts, strict=True)) for kind, counts in account.passes_by_kind.items()]


# --- for readers ---


class Printer:
    """Prints results to stdout, with styles on a terminal."""

    def __init__(self, layers: int, *, sampled: bool, exact: bool) -> None:
        """`layers` is the depth of the target. Sampled decodings and lossy methods (not `exact`) get other remarks."""
        self.layers, self.sampled, self.exact = layers, sampled, exact
        from rich.console import Console

        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a character
        self.console = Console(highlight=False, soft_wrap=True)
        self.solid = "█" if self.console.encoding.startswith("utf") else "#"

    @property
    def styled(self) -> bool:
        """True if stdout is a terminal, which can style tokens by source."""
        return self.console.is_terminal

    def line(self, text: str = "") -> None:
        """Print a line without markup."""
        from rich.text import Text

        self.console.print(Text(text))

    def text(self, result: Result) -> None:
        """Print the output, each token in the style of its source."""
        from rich.text import Text

        shown = Text()
        for who, piece in zip(result.decoding.producers, result.pieces, strict=True):
            shown.append(visible(piece), TOKEN_SOURCES.get(who, (who, ""))[1] if self.styled else "")
        self.console.print(shown)

    def result(self, result: Result, *, several: bool) -> None:
        """Print one result."""
        if several:
            self.line(f"--- {visible(result.name)} ({visible(result.source)}) ---")
        self.text(result)
        self.line()
        self.numbers([result])

    def numbers(self, results: Sequence[Result]) -> None:
        """Print the numbers of one result, or the totals of several."""
        from rich.text import Text

        found = summary([each.decoding for each in results], self.layers)
        legend = Text("tokens by source: ")
        for index, (who, count) in enumerate(sorted(found["producers"].items(), key=lambda each: -each[1])):
            words, style = TOKEN_SOURCES.get(who, (who, ""))
            legend.append(", " if index else "").append(f"{words} [{who}] {count}", style if self.styled else "")
        self.console.print(legend)
        for line in _lines(found, self.solid):
            self.line(line)
        versus = compared(results, self.layers)
        if versus is not None:
            beams = max(each.decoding.settings.get("beams", 1) for each in results)
            self.line(_versus(versus, self.sampled, beams))
        if not self.exact:
            self.line(f"{results[0].decoding.method} is lossy: its output can differ from the target's")


def _lines(found: Mapping[str, Any], solid: str) -> Iterator[str]:
    rounds = found["rounds"]
    if any(each["drafted"] for each in rounds):
        most = max(each["drafted"] for each in rounds)
        yield f"accepted tokens per round (at most {most} drafted), and number of rounds (measured):"
        counts: Counter[int] = Counter()
        for each in rounds:
            counts[each["accepted"]] += each["count"]
        for accepted in range(max(counts) + 1):
            bar = solid * math.ceil(BAR * counts[accepted] / max(counts.values()))
            yield f"{accepted:>4}{counts[accepted]:>6} {bar}".rstrip()
        total = sum(counts.values())
        length, of_drafted, of_tested = (_rate(found[name]) for name in _RATES)
        tested = f"acceptance rate {of_tested} (accepted / tested)"
        if found["joint_verification"]:
            tested = "no acceptance rate of single tokens, which are verified jointly"
        yield (
            f"{found['tokens']} tokens in {total} rounds; mean acceptance length {length} (with the target's token), draft"
            f" acceptance rate {of_drafted} (accepted / drafted), {tested}"
        )
    else:
        yield f"{found['tokens']} tokens"
    passes = ", ".join(f"{role} {count}" for role, count in found["passes"].items())
    more = "".join(f", {role} {count}" for role, count in found["layer_passes"].items() if role != "target")
    over = f"{found['target_layer_passes_over_plain']:.3f} times the {found['plain_layer_passes']} of plain decoding"
    yield f"passes: {passes}; layer-passes (layers x tokens): target {over}{more} (counted)"
    pace = f", {found['tokens_per_s']:.1f} tok/s" if found["tokens_per_s"] else ""
    yield f"{found['seconds']:.3f} s{pace} (measured, prompts included)"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _versus(versus: Mapping[str, Any], sampled: bool, beams: int = 1) -> str:
    """Line of the comparison with plain decoding. Beam search may find a likelier output than greedy decoding."""
    pace = f"{versus['seconds']:.3f} s, {versus['tokens_per_s']:.1f} tok/s; speed-up {versus['speedup']:.3f} (measured)"
    if sampled and versus["same_sequences"] < versus["sequences"]:
        return f"plain decoding: outputs are other random draws; {pace}"
    if beams > 1 and versus["same_sequences"] < versus["sequences"]:
        return f"plain decoding: another output than {beams} beams, which is no error; {pace}"
    if versus["sequences"] == 1:
        (index,) = versus["first_differences"]
        same = "the same output" if index is None else f"another output from token {index + 1} on"
    else:
        same = f"the same output for {versus['same_sequences']} of {versus['sequences']} prompts"
    return f"plain decoding: {same}; {pace}"
