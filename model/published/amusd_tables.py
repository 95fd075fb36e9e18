"""Notes on the results of AMUSD and on what they imply; the numbers are in a CSV file.

Llama-3.2-1B-Instruct drafts for Llama-3.1-8B-Instruct, greedily. Speculative decoding drafts 5 tokens per round (default of the
repository's benchmark).
"""

from __future__ import annotations

from model.published.table_notes import TableNotes

PAPER = "McDanel, 'AMUSD: Asynchronous Multi-Device Speculative Decoding', 2024, arXiv:2410.17375; github.com/BradMcDanel/AMUSD"

DRAFT_LENGTH = 5
"""Drafted tokens per round of speculative decoding."""
COST_RATIO = 0.0114 / 0.0221
"""Time of a draft pass over a pass of the target: the usual times of the repository's HumanEval sample [s]."""

_ONE_RATE = (
    "With the draft's share of 0.516 in the times of a stored HumanEval sample, and passes that take the same for any number of"
    " tokens, speculative decoding has the printed speed-ups at acceptance rates 0.88, 0.81 and 0.94. At these, AMUSD without"
    " link time reaches 1.54, 1.38 and 1.71: the printed speed-ups differ by +2 %, -5 % and +14 %."
)
_DRAFT_BOUND = (
    "No decoding is faster than its draft model: 1.96 needs a draft pass of at most 0.51 passes of the target. On RefactorChat the"
    " target is slower than on the others (27.42 ms), which makes the same draft model relatively faster."
)
_MEAN = "The mean of the three speed-ups over speculative decoding is 1.29, the 29 % of the abstract."

TABLES = {
    "amusd-results": TableNotes(
        "Results", "Time per token and speed-up over plain decoding", "Llama-3.1-8B, drafts of Llama-3.2-1B",
        ("data_set", "method"), (_ONE_RATE, _DRAFT_BOUND, _MEAN),
    ),
}  # fmt: skip
