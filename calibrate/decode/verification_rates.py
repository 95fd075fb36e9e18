"""Accepted tokens of the same sampled drafts by token-wise and by block verification, from the probabilities in a log.

Block verification reads both models' probabilities of every drafted token. They give the probability that at least i tokens are
accepted by either verification (`model.methods.speculative.block_verification.weights`), so that both are compared on the same
drafts, without the random numbers of their tests. Token-wise verification reads no further than the first rejected token: of its
logs this is known only where the whole drafts were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from calibrate.decode.titled_table import RateTable
from model.logs.recorded_decoding import Decoding
from model.methods.speculative.algorithm import BLOCK, TOKEN
from model.methods.speculative.block_verification import Floats, weights
from model.outcomes.intervals import LEVEL, half_width

_PER_ROUND = "tokens per round"


def ratios_of(decoding: Decoding) -> list[Floats] | None:
    """Return p / q of the drafted tokens of each round, (drafted,), rounds without a draft left out; None if not all were read."""
    found: list[list[float]] = []
    asked = [each for each in decoding.reads if each.question.kind == "probability"]
    last = None
    for one, other in zip(asked[::2], asked[1::2], strict=len(asked) % 2 == 0):
        verified = one.question.sequence, one.question.at
        if one.question.role != "target" or other.question.role == "target" or one.question.token != other.question.token:
            return None
        if verified != last:
            found.append([])
        found[-1].append(one.answer / other.answer)
        last = verified
    drafted = [commit.drafted for commit in decoding.commits if commit.drafted]
    return [np.array(ratios) for ratios in found] if drafted and [*map(len, found)] == drafted else None


def by_verification(decodings: Sequence[Decoding], about: str) -> RateTable | None:
    """Return the table of acceptance by draft position with either verification; None if a log lacks probabilities.

    Intervals take the sequences as independent. Tokens per round are those of whole drafts.
    """
    drafts = [ratios_of(each) for each in decodings]
    if not drafts or any(each is None for each in drafts):
        return None
    known = [each for each in drafts if each is not None]
    longest = max(len(ratios) for each in known for ratios in each)
    rows = []
    for position in range(longest):
        of_token, of_block, rounds = (np.zeros(len(known)) for _ in range(3))
        for number, each in enumerate(known):
            for ratios in each:
                if len(ratios) > position:
                    rounds[number] += 1
                    of_token[number] += weights(ratios, TOKEN)[position]
                    of_block[number] += weights(ratios, BLOCK)[position]
        rows.append((f"at least {position + 1} accepted", *_row(of_token, of_block, rounds)))
    whole = [[ratios for ratios in each if len(ratios) == longest] for each in known]
    tokens = [np.array([sum(1 + weights(ratios, how).sum() for ratios in each) for each in whole]) for how in (TOKEN, BLOCK)]
    rows.append((_PER_ROUND, *_row(tokens[0], tokens[1], np.array([len(each) for each in whole], dtype=np.float64))))
    survival = [row[2] for row in rows[:-1]]
    rates = [after / before if before else 0.0 for before, after in pairwise([1.0, *survival])]
    columns = ("what", "token", "block", "block_over_token", "low", "high", "rounds")
    notes = (
        "means over the same drafts of the probabilities given each draft; rounds start where those of the logged decoding did",
        f"low, high: {LEVEL:.0%} interval of block_over_token over {len(known)} sequences; tokens per round: of whole drafts",
        f'as [outcomes] with verification = "block": kind = "by-draft-position"; acceptance_rates = {np.round(rates, 4).tolist()};'
        ' source = "measured"',
    )
    return RateTable(f"Accepted by token-wise and by block verification (measured; {about})", columns, tuple(rows), notes)


def _row(of_token: Floats, of_block: Floats, rounds: Floats) -> tuple[float, float, float, float, float, int]:
    """Return both means over rounds, their ratio with its interval over sequences, and the number of rounds."""
    total = float(rounds.sum())
    token, block = float(of_token.sum()) / total, float(of_block.sum()) / total
    if not token:
        return token, block, float("nan"), float("nan"), float("nan"), int(total)
    ratio = block / token
    if rounds.size < 2:
        return token, block, ratio, float("nan"), float("nan"), int(total)
    # Ratio estimator, as in `rates_from_logs.ratio_interval`.
    deviation = np.sqrt(np.square(of_block - ratio * of_token).sum() / (rounds.size - 1)) / of_token.mean()
    half = float(half_width(deviation, rounds.size))
    return token, block, ratio, ratio - half, ratio + half, int(total)
