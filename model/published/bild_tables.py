"""Notes on the tables of the Big Little Decoder paper and on their inconsistencies; the numbers are in CSV files."""

from __future__ import annotations

from model.published.table_notes import TableNotes

PAPER = "Kim et al., 'Speculative Decoding with Big Little Decoder', NeurIPS 2023, arXiv:2302.07863"

FIGURE_8 = {"memory_factor": 1 / 5, "intensity_factor": 5.0, "speedup": 1.85}
"""Section 7.3.1 on Figure 8, relative to the large model alone, on CNN/DailyMail: memory operations reduced by a factor of about 5,
arithmetic intensity about 5 times higher, and the speed-up of Table 1. About FLOPs it only says that they are slightly higher."""

_MEANS = (
    "The means of the four speed-ups of a row are 1.49, 1.695, 1.61 and 1.85; the text says 1.50 for the first. The best, "
    "1.71, 2.05, 1.85 and 2.12, are all those of CNN/DailyMail."
)
_MACHINE = (
    "Section 4.1 and the abstract time on a T4; the conclusion speaks of a Titan Xp, of 1.52 and 1.76 in the mean and up to "
    "2.18 and 2.38, and of language modelling, which the paper does not evaluate."
)
_LAYER_RATIO = (
    "1.85 on CNN/DailyMail requires that a pass of the small model takes .386 to .408 of a pass of the large one, at the rates of "
    "Figure 8; the ratio of layers (6 of 24) is .25 and that of weights .063, which would give speed-ups of 2.5 and 4.5."
)
_HEADS = (
    "Embeddings and heads are left out. With them the sizes of mT5-small and mT5-large are not 1:20 but 1:4.3, as the head for "
    "250,000 tokens is five times as large as the decoder of mT5-small."
)
_SIZE = "The text says that the sizes differ 'by approximately a factor of 20', elsewhere of 10; the table's differ by 16."
_COUNTS = (
    "Parameters are those of the decoder: 8 dim^2 + 2 dim ffn a layer for T5, with attention narrower than dim in mT5-small (6"
    " heads of 64) and gated feed-forward layers, 3 dim ffn, in mT5: 402.7M, 25.2M, 408.9M and 25.2M."
)

_DERIVED = (
    "Section 4.2 prints speculative sampling and differences from it: +.61 BLEU at similar speed, +.21 at similar quality, up to"
    " +.30 ROUGE-L and up to +.22. The rows of BiLD are these sums: bounds, not points of one setting. Window sizes are 3 to 10."
)
_ABOVE = (
    "Speculative sampling has the law of the large model, and its scores differ from those of vanilla inference (40.32, 35.08) by"
    " .39 and .08, which the differences of BiLD include."
)
_FASTER = (
    "1.49 and 1.47 against Table 1: unaligned BiLD has 1.43 at 40.33 and 1.58 at 39.44 on IWSLT, and 1.48 at 35.12 on XSUM,"
    " which is more than the 1.47 of the text at a better score."
)

TABLES = {
    "bild-comparison": TableNotes(
        "Section 4.2", "BiLD without alignment and speculative sampling", "T4, batch 1; BLEU (iwslt) or ROUGE-L (xsum)",
        ("data_set", "method"), (_DERIVED, _ABOVE, _FASTER),
    ),
    "bild-table-1": TableNotes(
        "Table 1", "Quality and speed-up, without loss and within one point", "T4, batch 1; BLEU (iwslt, wmt) or ROUGE-L",
        ("data_set", "alignment", "loss"), (_MEANS, _MACHINE, _LAYER_RATIO),
    ),
    "bild-table-2": TableNotes(
        "Table 2", "Sizes of the models", "decoders, without embeddings", ("model",), (_COUNTS, _SIZE, _HEADS),
    ),
}  # fmt: skip
