"""What `calibrate decode` says of decodings: the text by who wrote it, accepted lengths, rates, passes, seconds; or all as JSON."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.interpret.account import Account
from model.logs import read_log
from model.logs.recorded_decoding import Decoding, drafting, plain_layer_passes, together

PRODUCERS: Mapping[str, tuple[str, str]] = {
    "draft": ("draft, accepted", "green"), "target": ("target", "bold cyan"), "token": ("target", "bold cyan"),
    "match": ("predicted early", "green"), "miss": ("not predicted", "underline yellow"), "column": ("target", "bold cyan"),
    "fallback": ("target, the draft was unsure", "underline yellow"), "cap": ("target, the draft was at its longest", "bold cyan"),
    "rollback": ("target, a draft was taken back", "bold red"), "again": ("target, once more behind that", "italic magenta"),
}  # fmt: skip
"""Who writes tokens: in words, and how a terminal shows it; attributes tell them apart where colours are not wanted."""
_RATES = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_rate")
BAR = 40
"""Signs of the longest bar."""


@dataclass(frozen=True, eq=False)
class Result:
    """A decoding with its text piece by piece, and the plain decoding of the same prompt where it was asked for."""

    name: str
    source: str
    decoding: Decoding
    pieces: Sequence[str]
    plain: Decoding | None = None

    @property
    def first_difference(self) -> int | None:
        """The place of the first token that plain decoding writes otherwise, from 0; None if there is none."""
        if self.plain is None or self.plain.tokens == self.decoding.tokens:
            return None
        both = zip(self.plain.tokens, self.decoding.tokens, strict=False)
        shorter = min(len(self.plain.tokens), len(self.decoding.tokens))
        return next((place for place, (own, other) in enumerate(both) if own != other), shorter)


def visible(text: str) -> str:
    """A text without what would steer a terminal: control characters are shown by their numbers.

    >>> visible("a\\x1b[31m\\tb")
    'a\\\\x1b[31m\\tb'
    """
    return "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in text)


# --- for programs ---


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def summary(decodings: Sequence[Decoding], layers: int) -> dict[str, Any]:
    """What decodings come to together; all measured. `layers` are the target's."""
    rounds, account = together(decodings)
    own = drafting(rounds)
    tokens = sum(len(each.tokens) for each in decodings)
    seconds = math.fsum(each.seconds or 0.0 for each in decodings)
    by_role = {role: account.of(role).layer_passes for role in account.roles}
    plainly = sum(plain_layer_passes(layers, len(each.prompt), len(each.tokens)) for each in decodings)
    return {
        "tokens": tokens, "producers": dict(Counter(who for each in decodings for who in each.producers)),
        "rounds": [{"accepted": a, "drafted": d, "count": count} for (a, d), count in sorted(rounds.items())],
        **{name: _number(getattr(own, name)) for name in _RATES}, "passes": dict(account.passes_of), "layer_passes": by_role,
        "plain_layer_passes": plainly, "target_layer_passes_over_plain": by_role.get("target", 0) / plainly,
        "seconds": seconds, "tokens_per_s": tokens / seconds if seconds else None,
    }  # fmt: skip


def compared(results: Sequence[Result], layers: int) -> dict[str, Any] | None:
    """What plain decoding took, and how far the texts are the same; None where nobody decoded plainly."""
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
    """All of it, as one JSON document."""
    texts = []
    for each in results:
        found = each.decoding
        texts.append(
            {
                "prompt": each.name, "source": each.source, "prompt_tokens": [*found.prompt], "text": "".join(each.pieces),
                "written": [*found.tokens], "produced_by": [*found.producers], "pieces": [*each.pieces],
                "settings": read_log.plain(found.settings), "stop": found.stop,
                "commits": [commit._asdict() for commit in found.commits], "work": _work(found.account),
                **summary([found], layers), "plain": compared([each], layers),
            }
        )
    totals = None if not results else summary([each.decoding for each in results], layers) | {"plain": compared(results, layers)}
    return {**head, "provenance": "measured", "sequences": texts, "totals": totals}


def _work(account: Account) -> list[dict[str, Any]]:
    names = ("passes", "attended", "read")
    return [kind.row() | dict(zip(names, counts, strict=True)) for kind, counts in account.passes_by_kind.items()]


# --- for readers ---


class Printer:
    """Prints to stdout: with colours on a terminal that wants them, plain text elsewhere."""

    def __init__(self, layers: int, *, sampled: bool, exact: bool) -> None:
        """`layers` are the target's; whether tokens are `sampled`, and whether the method is `exact`, decides what is said."""
        self.layers, self.sampled, self.exact = layers, sampled, exact
        from rich.console import Console

        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a text may hold what the terminal cannot show
        self.console = Console(highlight=False, soft_wrap=True)
        self.solid = "█" if self.console.encoding.startswith("utf") else "#"

    @property
    def styled(self) -> bool:
        """Whether a terminal is there to show who wrote what."""
        return self.console.is_terminal

    def line(self, text: str = "") -> None:
        """A line as it is."""
        from rich.text import Text

        self.console.print(Text(text))

    def text(self, result: Result) -> None:
        """A text, each token in the style of who wrote it."""
        from rich.text import Text

        shown = Text()
        for who, piece in zip(result.decoding.producers, result.pieces, strict=True):
            shown.append(visible(piece), PRODUCERS.get(who, (who, ""))[1] if self.styled else "")
        self.console.print(shown)

    def result(self, result: Result, *, several: bool) -> None:
        """One decoding."""
        if several:
            self.line(f"--- {visible(result.name)} ({visible(result.source)}) ---")
        self.text(result)
        self.line()
        self.numbers([result])

    def numbers(self, results: Sequence[Result]) -> None:
        """What one or several decodings come to."""
        from rich.text import Text

        found = summary([each.decoding for each in results], self.layers)
        legend = Text("written by: ")
        for index, (who, count) in enumerate(sorted(found["producers"].items(), key=lambda each: -each[1])):
            words, style = PRODUCERS.get(who, (who, ""))
            legend.append(", " if index else "").append(f"{words} [{who}] {count}", style if self.styled else "")
        self.console.print(legend)
        for line in _lines(found, self.solid):
            self.line(line)
        versus = compared(results, self.layers)
        if versus is not None:
            beams = max(each.decoding.settings.get("beams", 1) for each in results)
            self.line(_versus(versus, self.sampled, beams))
        if not self.exact:
            self.line(f"{results[0].decoding.method} is lossy: the target alone need not have written this")


def _lines(found: Mapping[str, Any], solid: str) -> Iterator[str]:
    rounds = found["rounds"]
    if any(each["drafted"] for each in rounds):
        most = max(each["drafted"] for each in rounds)
        yield f"accepted tokens of a round, of at most {most} drafted, and in how many rounds (measured):"
        counts: Counter[int] = Counter()
        for each in rounds:
            counts[each["accepted"]] += each["count"]
        for accepted in range(max(counts) + 1):
            bar = solid * math.ceil(BAR * counts[accepted] / max(counts.values()))
            yield f"{accepted:>4}{counts[accepted]:>6} {bar}".rstrip()
        total = sum(counts.values())
        length, of_drafted, of_tested = (_rate(found[name]) for name in _RATES)
        yield (
            f"{found['tokens']} tokens in {total} rounds; mean acceptance length {length} (the target's own token counted), draft"
            f" acceptance rate {of_drafted} (of those drafted), acceptance rate {of_tested} (of those tested)"
        )
    else:
        yield f"{found['tokens']} tokens"
    passes = ", ".join(f"{role} {count}" for role, count in found["passes"].items())
    more = "".join(f", {role} {count} besides" for role, count in found["layer_passes"].items() if role != "target")
    over = f"{found['target_layer_passes_over_plain']:.3f} of plain decoding's {found['plain_layer_passes']}"
    yield f"passes: {passes}; layers run, once for each token: target {over}{more} (counted)"
    pace = f", {found['tokens_per_s']:.1f} tok/s" if found["tokens_per_s"] else ""
    yield f"{found['seconds']:.3f} s{pace} (measured, prompts included)"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _versus(versus: Mapping[str, Any], sampled: bool, beams: int = 1) -> str:
    """Against plain decoding. Several beams look for a likelier text than the one whose every token is the likeliest."""
    pace = f"{versus['seconds']:.3f} s, {versus['tokens_per_s']:.1f} tok/s; speed-up {versus['speedup']:.3f} (measured)"
    if sampled and versus["same_sequences"] < versus["sequences"]:
        return f"plain decoding: texts are other draws; {pace}"
    if beams > 1 and versus["same_sequences"] < versus["sequences"]:
        return f"plain decoding writes another text than {beams} beams, as it may; {pace}"
    if versus["sequences"] == 1:
        (place,) = versus["first_differences"]
        same = "the same text" if place is None else f"another text from token {place + 1} on"
    else:
        same = f"the same text of {versus['same_sequences']} of {versus['sequences']} prompts"
    return f"plain decoding: {same}; {pace}"
