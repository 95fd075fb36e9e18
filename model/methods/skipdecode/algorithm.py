"""SkipDecode: later tokens run fewer layers; all sequences of a batch use the same layers.

Sections 2.3 and 2.4 of [DelCorro2023]. The prompt runs all layers, or with `decay_prompt` follows the schedule too, which then
begins at its first token (future work in the paper). A token runs the number of layers that the schedule has for its position
(`exit_layers`): the first `warm_up` ones, then the topmost. The schedule never rises, so no layer that runs
lacks keys and values of earlier tokens (the cache would refuse such a pass). A batch begins when the one before has ended, because
its sequences must be at the same position; an ended sequence is not replaced. The method is lossy.

[DelCorro2023] L. Del Corro et al. SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference.
arXiv:2307.02628.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods import batching
from model.methods.claim_bounds import ClaimRule
from model.methods.formula_check import FormulaCheck
from model.methods.proposals import PROPOSED_TOKENS, Known, Proposal, Proposals, needs_lossy
from model.steps import Batch, Commit, Forward, LayerSpan, NextTokens, Read, Steps

Floats = NDArray[np.float64]

ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "half-up": lambda layers: np.floor(layers + 0.5),
    "half-even": np.round,
    "floor": np.floor,
    "ceil": np.ceil,
}
"""Rounding of the schedule to whole layers, after rounding to nine digits; the paper does not specify it.

Table 4 supports `half-up` if the decay starts after 60 tokens, the longest prompt of E2E; if it starts after 38, the median,
`half-even` fits equally well."""


@dataclass(frozen=True)
class Parameters(batching.StaticBatching):
    """Parameters of SkipDecode.

    Parameters
    ----------
    layers
        Layers of the model.
    min_layers, max_layers
        Layers of a token at the end and at the start of the schedule.
    prompt
        Position where the schedule starts: the longest prompt.
    sequence_length
        Position where the schedule ends: the longest sequence, including its prompt.
    warm_up
        First layers that every token runs.
    rounding
        Rounding of the schedule to whole layers: `half-up`, `half-even`, `floor` or `ceil`.
    power
        Exponent of the schedule; 1 is linear.
    decay_prompt
        The schedule begins at position 0, so that the prompt skips layers too, and generated tokens begin further down.
    sequences
        Sequences of a full batch.
    batching
        `static` or `lockstep` with several sequences.
    lengths
        Tokens of each sequence of static batches, in their order, if they differ; the largest equals the scenario's `tokens` and is
        at most sequence_length - prompt.
    """

    layers: int
    min_layers: int
    max_layers: int
    prompt: int
    sequence_length: int
    warm_up: int = 1
    rounding: str = "half-up"
    power: float = 1.0
    decay_prompt: bool = False

    LABEL = "SkipDecode"
    OUTCOMES = ()
    COSTS = ("verify_cost",)
    EXACT = False
    CLAIMS = ClaimRule(
        terms=("layers", "mean_layers"), needs=(("mean_layers",),), required=("layers",),
        source="layers that run: Section 2.3 of Del Corro et al., arXiv:2307.02628",
    )
    FORMULA_CHECK = FormulaCheck("skipdecode", swept="min_layers", of_time=True)

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """From all layers down to half of them over the output."""
        table = {"layers": known.layers, "max_layers": known.layers, "min_layers": max(1, known.layers // 2)}
        setting = f"{known.layers} to {table['min_layers']} layers"
        made = Proposal({**table, "prompt": 0, "sequence_length": PROPOSED_TOKENS}, setting=setting)
        return Proposals((made,) if known.lossy else (), needs_lossy(known))

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("max_layers", self.max_layers, 1, self.layers, "layers")
        checks.whole("min_layers", self.min_layers, 1, self.max_layers, "max_layers")
        checks.whole("warm_up", self.warm_up, 0, self.min_layers, "min_layers")
        checks.whole("sequence_length", self.sequence_length, 1, checks.MAX_TOKENS)
        checks.whole("prompt", self.prompt, 0, self.sequence_length - 1, "sequence_length-1")
        checks.one_of("rounding", self.rounding, ROUNDINGS)
        checks.number("power", self.power, 0)
        checks.flag("decay_prompt", self.decay_prompt)
        self.check_batching()

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters; `verify_cost` only in a batch."""
        return () if table.get("sequences", 1) == 1 and table.get("lengths") is None else cls.COSTS

    @property
    def counts_layers(self) -> bool:
        """True: operations are counted by the layers that run."""
        return True

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass."""
        return self.concurrent_sequences

    def prompt_layer_passes(self, tokens: int) -> int:
        """Layers that are run over the first `tokens` tokens of a prompt, counted once per token."""
        return sum((last - first) * span.size for first, last, span in prompt_parts(self, tokens))

    @cached_property
    def _spans(self) -> dict[int, list[LayerSpan]]:
        return {}

    def spans(self, tokens: int) -> Sequence[LayerSpan]:
        """Layers of the first, second, ... generated token; computed once for all decodings of a run.

        >>> choice = Parameters(12, 4, 12, 4, 8)
        >>> [[span.size for span in choice.spans(tokens)] for tokens in (4, 2)]
        [[12, 10, 8, 6], [12, 10]]
        """
        if tokens not in self._spans:
            budgets = schedule(self, tokens)
            of_budget = {budget: LayerSpan(0, self.layers, skipped(self, budget)) for budget in set(budgets)}
            self._spans[tokens] = [of_budget[budget] for budget in budgets]
        return self._spans[tokens]

    def check_tokens(self, tokens: int) -> None:
        """Raise ParameterError for more tokens than the schedule has positions."""
        room = self.sequence_length - self.prompt
        if tokens > room:
            raise checks.ParameterError(
                f"tokens must be at most sequence_length-prompt={room}, the positions of the schedule, got {tokens};"
                " set a larger sequence_length or fewer tokens"
            )
        super().check_tokens(tokens)


def decode(
    parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = (), prompts: Sequence[Sequence[int]] = ()
) -> Steps:
    """Decode `tokens` tokens, or `lengths` of each sequence, after a prompt of at least one token.

    A sequence also ends with a token of `stop`. All sequences have the same prompt, or separate `prompts` of the same length.
    """
    parameters.check_tokens(tokens)
    layers, start, batched = parameters.layers, len(prompt) - 1, parameters.decoded_sequences > 1
    spans = parameters.spans(tokens)
    parts = prompt_parts(parameters, start)
    if not prompts:
        for first, last, span in parts:
            yield Forward("target", tuple(prompt[first:last]), first, span)
    for batch in parameters.batches(tokens):
        sequences, lengths = tuple(batch), {*batch.values()}
        yield from batching.read_prompts(layers, prompt, prompts, sequences, parts)
        words = batching.last_words(prompt, prompts, sequences)
        if not batched and not stop:
            one = Forward("target", words, start, spans[0], heads=1)
            if (yield NextTokens(one, spans[: max(lengths)], "column")) is not None:
                continue
        for column in range(max(lengths)):
            if column in lengths or (stop and any(word in stop for word in words)):  # some sequences have ended
                going = [word not in stop or not column for word in words]
                live = [index for index, number in enumerate(sequences) if batch[number] > column and going[index]]
                sequences, words = tuple([sequences[index] for index in live]), tuple([words[index] for index in live])
            if not sequences:
                break
            width, at = len(sequences), start + column
            together = Batch.uniform(sequences, at, heads=1) if batched else None
            out = yield Forward("target", words, at, spans[column], heads=width, batch=together)
            read = []
            for offset in range(-width, 0):
                read.append((yield Read("next", out, offset)))
            words = tuple(read)
            yield Commit("column", words)


def exit_layers(
    min_layers: int,
    max_layers: int,
    prompt: int,
    sequence_length: int,
    generated: int,
    *,
    rounding: str | None = None,
    power: float = 1.0,
) -> Floats:
    """Layers of the first, second, ..., last of `generated` tokens: min + (max - min) (1 - t)^power [layers].

    power = 1 is the paper's linear decay, "token_idx" in Section 2.3; other values are the power law that it leaves for future
    work. The last position of the longest sequence has t < 1, so min_layers is reached only by rounding.

    >>> exit_layers(8, 16, 60, 160, 4).tolist(), exit_layers(8, 16, 60, 160, 100, rounding="half-up")[[0, 6, 7, 99]].tolist()
    ([16.0, 15.92, 15.84, 15.76], [16.0, 16.0, 15.0, 8.0])
    """
    _check(min_layers, max_layers, prompt, sequence_length, generated)
    rising = _decayed(np.arange(float(generated)) / (sequence_length - prompt), power)
    return _rounded(np.asarray(min_layers + (max_layers - min_layers) * rising), rounding)


def schedule(parameters: Parameters, tokens: int) -> list[int]:
    """Whole layers of the first, second, ... generated token.

    >>> schedule(Parameters(12, 4, 12, 4, 8), 4), schedule(Parameters(12, 4, 12, 4, 8, decay_prompt=True), 4)
    ([12, 10, 8, 6], [8, 7, 6, 5])
    """
    if parameters.decay_prompt:
        return _whole_sequence(parameters)[parameters.prompt : parameters.prompt + tokens]
    bounds = parameters.min_layers, parameters.max_layers, parameters.prompt, parameters.sequence_length
    found: list[int] = exit_layers(*bounds, tokens, rounding=parameters.rounding, power=parameters.power).astype(np.int64).tolist()
    return found


def prompt_parts(parameters: Parameters, length: int) -> list[tuple[int, int, LayerSpan]]:
    """Passes over the first `length` tokens of a prompt, those before its last: (first token, token after the last, layers).

    Tokens with equal budgets share a pass. A prompt that is shorter than `prompt` ends where the longest one ends.

    >>> given = Parameters(12, 4, 12, 4, 8, decay_prompt=True)
    >>> [(first, last, span.size) for first, last, span in prompt_parts(given, 4)]
    [(0, 1, 12), (1, 2, 11), (2, 3, 10), (3, 4, 9)]
    """
    if not length:
        return []
    if not parameters.decay_prompt:
        return [(0, length, LayerSpan(0, parameters.layers))]
    offset = parameters.prompt - length
    if offset < 0:
        raise checks.ParameterError(
            f"prompt must be at least {length}, the tokens before a prompt's last one, with decay_prompt, got {parameters.prompt}"
        )
    parts, first = [], 0
    for budget, same in groupby(_whole_sequence(parameters)[offset : parameters.prompt]):
        last = first + len([*same])
        parts.append((first, last, LayerSpan(0, parameters.layers, skipped(parameters, budget))))
        first = last
    return parts


def _whole_sequence(parameters: Parameters) -> list[int]:
    """Whole layers of the tokens at positions 0, 1, ... of a schedule that begins with the prompt."""
    length = parameters.sequence_length
    layers = exit_layers(
        parameters.min_layers, parameters.max_layers, 0, length, length, rounding=parameters.rounding, power=parameters.power
    )
    return [int(each) for each in layers]


def skipped(parameters: Parameters, budget: int) -> tuple[tuple[int, int], ...]:
    """Layers that a token with this budget skips, as half-open ranges: those between the first `warm_up` and the topmost."""
    top = parameters.layers - (budget - parameters.warm_up)
    return ((parameters.warm_up, top),) if parameters.warm_up < top else ()


def _check(min_layers: int, max_layers: int, prompt: int, sequence_length: int, generated: int) -> None:
    checks.whole("max_layers", max_layers, 1, checks.MAX_LAYERS)
    checks.whole("min_layers", min_layers, 1, max_layers, "max_layers")
    checks.whole("sequence_length", sequence_length, 1, checks.MAX_TOKENS)
    checks.whole("prompt", prompt, 0, sequence_length - 1, "sequence_length-1")
    checks.whole("generated", generated, 1, sequence_length - prompt, "sequence_length-prompt")


def _decayed(t: Floats, power: float) -> Floats:
    checks.number("power", power, 0)
    return np.asarray((1 - t) ** power)


def _rounded(layers: Floats, rounding: str | None) -> Floats:
    if rounding is None:
        return layers
    checks.one_of("rounding", rounding, ROUNDINGS)
    # Rounding to nine digits first, so that a half with a floating-point error counts as a half.
    return np.asarray(ROUNDINGS[rounding](np.round(layers, 9)))
