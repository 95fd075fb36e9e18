"""Notes on the speed-ups of MagicDec and their prediction by a roofline; the numbers are in CSV files.

A draft reads at most a budget of cached positions of each sequence. The paper's Table 2 has no acceptance rates. The authors'
project page has one rate for each context, of Llama-3.1-8B that drafts for itself with a budget of 512. Table 2 has a budget of
256, which reads less and is therefore expected to be accepted less often: predictions of Table 2 at these rates are too fast.
"""

from __future__ import annotations

from model.published.table_notes import TableNotes

PAPER = (
    "R. Sadhukhan et al., 'MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative"
    " Decoding', ICLR 2025, arXiv:2408.11049; infini-ai-lab.github.io/MagicDec"
)
DEVICES = 8
"""Devices that the layers are split over."""
_DTYPE = "The numeric type is not printed; bfloat16 is assumed."

_LENGTHS = (
    "Draft lengths of 3 for the self-drafts at batch 32 and 64 are from the project page, which repeats these rows; all others are"
    " printed in Table 2."
)
_NO_RATES = "Acceptance rates of these rows are not published; those of magicdec-acceptance are for a budget of 512."
_LONGER = "At a fixed context every printed speed-up rises with the batch, and at a fixed batch with the context."

TABLES = {
    "magicdec-table-2": TableNotes(
        "Table 2", "Speed-up at the best draft length, by context and batch", "8 x A100, tensor parallel, PG-19",
        ("model", "draft_model", "prompt", "sequences"), (_LENGTHS, _NO_RATES, _LONGER, _DTYPE),
    ),
    "magicdec-h100": TableNotes(
        "project page, H100", "Speed-up at the best draft length, by context and batch", "8 x H100 SXM, tensor parallel, PG-19",
        ("model", "draft_model", "prompt", "sequences"), (_NO_RATES, "The budgets are not printed.", _DTYPE),
    ),
    "magicdec-acceptance": TableNotes(
        "project page, acceptance", "Acceptance rate by context", "Llama-3.1-8B drafts for itself, StreamingLLM, PG-19",
        ("prompt",), ("The numbers of tested tokens are not printed.",),
    ),
}  # fmt: skip
