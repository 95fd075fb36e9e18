"""Result of a simulated decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from model.interpret.account import Account
from model.logs.spans import Span


@dataclass
class Run:
    """Result of a simulated decoding; times in the unit of the cost model."""

    latency: float = 0.0
    busy: float = 0.0
    peak_units: int = 0
    account: Account = field(default_factory=Account)
    """Passes by kind, and transfers."""
    tokens: list[int] = field(default_factory=list)
    sequences: dict[int, list[int]] = field(default_factory=dict)
    """Generated tokens of each sequence of a batch, where sequences commit separately."""
    commits: list[tuple[float, str, int]] = field(default_factory=list)  # time, kind, number of tokens
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of rounds by (accepted, drafted) tokens."""
    intervals: list[Span] = field(default_factory=list)
    draft_time: float = 0.0
    """Busy time of passes of models other than the target, without overheads of engine steps."""
    target_time: float = 0.0
    """The same for the target."""
    waiting_time: float = 0.0
    """Waiting time of processes for units and of transfers for links, summed."""

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return self.account.passes

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        return self.account.passes_of
