"""Notes on the tables of the Predictive Pipelined Decoding paper and on their inconsistencies; the numbers are in CSV files."""

from __future__ import annotations

from model.published.table_notes import TableNotes

PAPER = (
    'Yang, Lee, Cho, Papailiopoulos, Lee, "Predictive Pipelined Decoding: A Compute-Latency Trade-off for '
    'Exact LLM Decoding", TMLR 2024, arXiv:2307.05908'
)

# Section 4.3: test pairs, and tokens generated for each of them.
PAIRS = {"squad": 10_570, "wmt": 1_500, "cnn_dm": 11_487}
TOKENS = {"squad": 16, "wmt": 128, "cnn_dm": 128}

_VICUNA = "Vicuna-13B, 40 layers, greedy decoding"
_LLAMA = "LLaMA-2-13B, 40 layers"

_LAYERS = (
    "Section 4.3 says that layers 15, 20, 30, 35 and 37 were probed; the tables print layer 10 in place of 15. "
    "The tables agree with each other, so the sentence is probably the slip, but the paper does not settle it."
)
_TWO_GREEDY_RATES = (
    "Tables 3 and 5 both give a match rate for LLaMA-2-13B, greedy, 3 candidates, and do not agree: SQuAD 47.24% "
    "against 50.77%, CNN/DM 41.99% against 40.84%. With 100 examples of 128 tokens for each, these gaps are "
    "5.7 and 1.9 standard errors (SQuAD 2.7 if Table 5 used 16-token answers). Table 3 states "
    "neither its head nor its layer, and says only 'several examples'; Table 5 states no layer and no token count."
)
_NO_EARLY_LAYER = (
    "The early layer of the Table 3 runs is never stated. Plain greedy decoding took 142 ms a token on CNN/DM and "
    "117 ms on SQuAD, slow for a 13B model, so savings in seconds do not carry over to a tuned server."
)
_THROUGHPUT = (
    "Throughput is 128 / latency. CNN/DM with 3 candidates prints 7.671 for 16.685 s, and 128 / 16.685 rounds to "
    "7.672; the printed value is still possible for an unrounded latency just above 16.685 s."
)
_FIRST_BIN_SQUAD = (
    "Layer 10, positions 1-2: the first candidate of the trained head matches in 3.06%, the first three in 13.52%, a "
    "ratio 0.34 times that of the totals of the two rows. The same row pair in other bins, and every other pair of "
    "1 and 3 candidates in Tables 6-8 but one (see Table 8), stays above 0.86."
)
_FIRST_BIN_CNN_DM = (
    "Layer 10, 1 candidate, final head, positions 1-16 prints 0.85%, where the other bins of that row have 7.42% to "
    "8.71% and 3 candidates reach 12.75% in the same bin: the ratio of 1 to 3 candidates is 0.12 times that of the "
    "totals. It does enter the printed total (7.23%), so it is no misprint of this cell alone. Do not fit a curve "
    "over positions through it."
)
_POSITION_KEYS = ("data_set", "layer", "candidates", "head", "first", "last")
_POSITION_SETTING = _VICUNA + ", matches by output position, both ends included; the full span is the printed total"

TABLES = {
    "ppd-table-2": TableNotes(
        "Table 2", "Match rate by data set, layer, candidates and head", _VICUNA,
        ("data_set", "layer", "candidates", "head"), (_LAYERS,),
    ),
    "ppd-table-3": TableNotes(
        "Table 3", "Measured latency and throughput of 128 tokens", _LLAMA + ", greedy decoding with and without PPD",
        ("data_set", "method", "candidates"), (_TWO_GREEDY_RATES, _NO_EARLY_LAYER, _THROUGHPUT),
    ),
    "ppd-table-5": TableNotes(
        "Table 5", "Match rate under greedy, top-k and top-p decoding",
        _LLAMA + ", 3 candidates, final head, 100 examples, top-k with k = 3, top-p with p = 0.95",
        ("data_set", "sampling"), (_TWO_GREEDY_RATES,),
    ),
    "ppd-table-6": TableNotes(
        "Table 6", "Match rate by output position, SQuAD 1.1", _POSITION_SETTING, _POSITION_KEYS, (_LAYERS, _FIRST_BIN_SQUAD)
    ),
    "ppd-table-7": TableNotes(
        "Table 7", "Match rate by output position, WMT15 EN-FR", _POSITION_SETTING, _POSITION_KEYS, (_LAYERS,)
    ),
    "ppd-table-8": TableNotes(
        "Table 8", "Match rate by output position, CNN/DM", _POSITION_SETTING, _POSITION_KEYS, (_LAYERS, _FIRST_BIN_CNN_DM)
    ),
}
