"""Terms of a step law: seconds of an engine's step as a sum of parts, each with one coefficient and a prior.

A step with R running sequences and K drafted tokens each is one pass of the target over n = R (K + 1) tokens, after some passes of
the draft. Without a model of the kernels, the target's pass is

    cbrt((weights + experts U)^3 + (active n / ridge_tokens)^3),    active = weights + experts k / E,

reading the weights, and the share U of all experts that some token needs, or the arithmetic, whichever is longer (cubes: both
overlap, but not fully, as in `model.hardware.roofline`). With a model of the kernels it is `kernels` times their seconds. Added are
`step` (once), `sequence` R, `token` n, `kv_position` R context, `draft_pass` per draft pass (and the draft's kernels, if they are
known), and `round` if anything is drafted.

*Prompts.* An engine that serves requests processes their prompts between its steps: each generated token brings its share of a
prompt with it. That takes `prompt` for each token that any sequence generates, and so does not shrink with the number of steps:
drafts do not make it faster. Only throughput and time per token contain it (`prompt_seconds`), a step does not.

*Experts.* A token reads k of E experts. If all tokens chose independently, t tokens would read the share 1 - (1 - k/E)^t. Two
numbers say how they depend on each other. Tokens of one sequence in one step choose alike: of K further tokens only K (1 -
expert_correlation) count. Tokens of all sequences prefer some experts (`expert_skew`, the intra-class correlation of a beta
distribution of popularity).

*Priors* are normal distributions of logarithms (of logits for `expert_correlation` and the acceptance rate). Without measured
cells they are all that is known. They are wide, and are set by physics and documents, not fitted to tables of engines: see
`PRIORS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from model.base import checks
from model.base.checks import ParameterError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """Prior of a coefficient: normal in its logarithm (or logit), with this median and standard deviation."""

    median: float
    sd: float
    unit: str
    """`s` for seconds given relative to the reference time of the law; else the unit of the coefficient itself."""
    meaning: str
    why: str


PRIORS: Mapping[str, Prior] = {
    "weights": Prior(1.0, 1.5, "s", "reading the weights that every step reads", "relative to the median step of the cells"),
    "experts": Prior(2.0, 1.2, "s", "reading all experts", "experts of published mixtures hold 2 to 30 times the other weights"),
    "expert_correlation": Prior(0.38, 1.2, "-", "share of a sequence's further tokens that read no other experts",
                                "between independent (0) and the same experts (1)"),
    "expert_skew": Prior(0.02, 1.0, "-", "correlation of routing between any two tokens",
                         "popularity of experts varies by a factor of about 1.5 in balanced mixtures"),
    "ridge_tokens": Prior(250.0, 0.5, "tokens", "tokens at which arithmetic takes as long as reading the weights",
                          "rate / (2 bandwidth) x bytes per weight of 12 devices is 150 to 420 tokens (vendors' documents)"),
    "kernels": Prior(1.0, 0.15, "-", "measured over predicted time of the kernels", "the error that profiles and rooflines state"),
    "step": Prior(0.3, 1.0, "s", "fixed time of a step: scheduling, launches, sampling, one reduction per layer",
                  "0 to 3 ms in steps of 5 to 30 ms"),
    "sequence": Prior(0.003, 1.2, "s", "time per running sequence: sampling, block tables, detokenisation",
                      "10 to 100 us in steps of 5 to 30 ms"),
    "token": Prior(0.002, 1.2, "s", "time per token of the target's pass that overlaps with nothing",
                   "activations of a token are about a thousandth of the weights"),
    "kv_position": Prior(4e-6, 1.2, "s", "reading keys and values of a cached position",
                         "2 to 8 millionths of the weights for models of 8B to 70B parameters"),
    "draft_pass": Prior(0.05, 0.8, "s", "one pass of the draft", "one layer and a head of 16 to 80 layers, and its launches"),
    "round": Prior(0.03, 1.0, "s", "time per step that verifies a draft: rejection sampling, bookkeeping",
                   "an engine with drafting machinery on and nothing drafted is 8 % slower (vllm#49548)"),
    "prompt": Prior(0.003, 1.5, "s", "processing prompts, per token that any sequence generates",
                    "a prompt's token takes a 150th to a 400th of the weights' time, and there are .1 to 10 per generated token"),
    "acceptance_rate": Prior(0.7, 1.0, "-", "probability that the first drafted token is accepted", ".4 to .9 in published tables"),
    "acceptance_trend": Prior(0.0, 0.15, "-", "change of the logit of the acceptance rate per draft position",
                              "conditional rates rise with position for some drafts and fall for others"),
    "noise": Prior(0.015, 0.6, "-", "relative error of a measured cell", "repeated benchmarks differ by 1 to 3 %"),
}  # fmt: skip
"""Priors by coefficient. Seconds are relative to the reference: the coefficient `weights`, or the kernels' time of one token."""
LOGITS = ("expert_correlation", "acceptance_rate")
PLAIN = ("acceptance_trend",)
"""Coefficients that are not transformed."""
TARGET = ("weights", "kernels")
"""Coefficients that give the time of the target's kernels: one of them, which is not zero."""
LEAST = 1e-300
"""Least value of a coefficient of `TARGET`, and what a zero counts as where logarithms are asked."""
_EDGE = 1e-6
"""Rates closer than this to 0 or 1 count as this close: a saved draw of five digits may have reached them."""


def in_coordinates_of_prior(name: str, values: ArrayLike) -> Floats:
    """Values of a coefficient on the scale on which its prior is normal: logarithms, logits, or the values themselves.

    >>> float(in_coordinates_of_prior("acceptance_rate", 0.5)), float(in_coordinates_of_prior("step", 1.0))
    (0.0, 0.0)
    """
    given = np.asarray(values, dtype=np.float64)
    if name in PLAIN:
        return given
    return np.asarray(special.logit(np.clip(given, _EDGE, 1 - _EDGE)) if name in LOGITS else logarithms(given))


def logarithms(values: ArrayLike) -> Floats:
    """Logarithms of numbers of at least 0.

    >>> logarithms([1.0, 0.0]).round(3).tolist()
    [0.0, -690.776]
    """
    return np.asarray(np.log(np.maximum(values, LEAST)))


@dataclass(frozen=True)
class RoutedExperts:
    """Experts of a mixture: E of which a token reads k."""

    number: int
    active: int

    def __post_init__(self) -> None:
        checks.whole("experts", self.number, 2, 100_000)
        checks.whole("active_experts", self.active, 1, self.number, "experts")


@dataclass(frozen=True, eq=False)
class StepShape:
    """What steps are over; arrays that broadcast, of shape (cells,) in the end.

    Parameters
    ----------
    sequences, draft_length, draft_passes, context
        As in `model.engines.cells.Cells`; `context` without unknown values.
    kernels, draft_kernels
        Seconds of the target's pass over `draft_length + 1` tokens per sequence by a kernel model, and of one draft pass [s]; None
        without a kernel model.
    bound
        Seconds that reading the weights takes at the peak bandwidth: no step is faster [s].
    prompt_tokens, prompts
        Tokens of prompts that the same pass reads, and sequences that they belong to; `kernels` then include them [tokens], [-].
    """

    sequences: Floats
    draft_length: Floats
    draft_passes: Floats
    context: Floats
    kernels: Floats | None = None
    draft_kernels: Floats | None = None
    bound: Floats | None = None
    prompt_tokens: Floats | float = 0.0
    prompts: Floats | float = 0.0

    @property
    def tokens(self) -> Floats:
        """Tokens of the target's pass."""
        return self.decoded_tokens + self.prompt_tokens

    @property
    def decoded_tokens(self) -> Floats:
        """Tokens of the target's pass without prompts."""
        return self.sequences * (self.draft_length + 1)


def expert_share_read(
    experts: RoutedExperts, sequences: ArrayLike, draft_length: ArrayLike, correlation: ArrayLike, skew: ArrayLike,
    prompt_tokens: ArrayLike = 0.0,
) -> Floats:  # fmt: skip
    """Expected share of all experts that a pass reads [-]; tokens of prompts select theirs independently.

    Independent tokens, 8 of 256 experts: 22 % at 8 tokens, 64 % at 32.

    >>> print(expert_share_read(RoutedExperts(256, 8), [8, 32], 0, 0.0, 0.0).round(2))
    [0.22 0.64]
    """
    share = experts.active / experts.number
    tokens = np.asarray(sequences) * (1 + np.asarray(draft_length) * (1 - np.asarray(correlation))) + np.asarray(prompt_tokens)
    alike = np.maximum(np.asarray(skew, dtype=np.float64), 1e-9)
    a, b = share * (1 / alike - 1), (1 - share) * (1 / alike - 1)
    # Mean of (1 - p)^t over popularities p ~ Beta(a, b): B(a, b + t) / B(a, b).
    unread = special.gammaln(b + tokens) - special.gammaln(b) + special.gammaln(a + b) - special.gammaln(a + b + tokens)
    return np.asarray(np.where(alike > 1e-8, -np.expm1(unread), -np.expm1(tokens * np.log1p(-min(share, 1 - 1e-12)))))


def step_seconds(coefficients: Mapping[str, Floats], shape: StepShape, experts: RoutedExperts | None) -> Floats:
    """Seconds of steps, by coefficients that broadcast against the shape's arrays [s].

    >>> at = StepShape(*map(np.array, ([1.0, 8.0], [0.0, 3.0], [0.0, 3.0], [0.0, 0.0])))
    >>> of = {"weights": 0.01, "ridge_tokens": 1e9, "step": 0.001, "sequence": 0.0001, "token": 0.0, "draft_pass": 0.0005}
    >>> print(step_seconds({name: np.array(value) for name, value in of.items()}, at, None))
    [0.0111 0.0133]
    """
    return target_seconds(coefficients, shape, experts) + shape.draft_passes * draft_seconds(coefficients, shape)


def draft_seconds(coefficients: Mapping[str, Floats], shape: StepShape) -> Floats:
    """Seconds of one pass of the draft [s]."""
    added = coefficients["draft_pass"]
    return np.asarray(added if shape.draft_kernels is None else added + coefficients["kernels"] * shape.draft_kernels)


def target_seconds(coefficients: Mapping[str, Floats], shape: StepShape, experts: RoutedExperts | None) -> Floats:
    """Seconds of steps without their draft passes; at least what reading the weights takes [s]."""

    def coefficient(name: str) -> Floats:
        return coefficients.get(name, np.zeros(1))

    if shape.kernels is not None:
        target = coefficient("kernels") * shape.kernels
    else:
        reading, active = coefficient("weights"), coefficient("weights")
        if experts is not None:
            dependence = coefficient("expert_correlation"), coefficient("expert_skew")
            share = expert_share_read(experts, shape.sequences, shape.draft_length, *dependence, shape.prompt_tokens)
            reading = reading + coefficient("experts") * share
            active = active + coefficient("experts") * (experts.active / experts.number)
        computing = active * shape.tokens / coefficient("ridge_tokens")
        target = np.cbrt(reading**3 + computing**3)
    running = shape.sequences + shape.prompts
    total = target + coefficient("step") + coefficient("sequence") * running
    # Fitted to decoding, where few tokens share a pass: those of a prompt are taken to overlap.
    total = total + coefficient("token") * shape.decoded_tokens
    total = total + coefficient("kv_position") * shape.sequences * shape.context + coefficient("round") * (shape.draft_length > 0)
    return np.asarray(total if shape.bound is None else np.maximum(total, shape.bound))


def prompt_seconds(coefficients: Mapping[str, Floats | float], served: ArrayLike) -> Floats:
    """Seconds of prompts per output token of a sequence, while requests of `served` sequences are processed [s].

    >>> float(prompt_seconds({"prompt": 2e-5}, 50))
    0.001
    """
    return np.asarray(coefficients.get("prompt", 0.0) * np.asarray(served, dtype=np.float64))


def acceptance_length(rate: ArrayLike, trend: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Tokens per step and sequence: 1 + sum over drafted tokens of the probability that it and all before it are accepted [-].

    The logit of the acceptance rate of the i-th drafted token is that of `rate` plus (i - 1) `trend`; a constant rate gives
    (1 - rate^(K + 1)) / (1 - rate) [Leviathan2023].

    >>> print(acceptance_length(0.8, 0.0, [0, 1, 4]).round(4))
    [1.     1.8    3.3616]
    """
    first, change, length = (np.asarray(each, dtype=np.float64) for each in (rate, trend, draft_length))
    logit, survive = special.logit(first), np.ones(first.shape)
    total = np.ones(np.broadcast_shapes(first.shape, change.shape, length.shape))
    for position in range(int(length.max(initial=0))):
        survive = survive * special.expit(logit + change * position)  # does not depend on the length
        total = total + np.where(length > position, survive, 0.0)
    return total


def length_by_position(rates: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Tokens per step and sequence from conditional acceptance rates by draft position [-].

    >>> print(length_by_position([0.79, 0.61, 0.46, 0.23], [1, 4]).round(2))
    [1.79 2.54]
    """
    each, length = checks.array("acceptance by position", rates, 0, 1), np.asarray(draft_length)
    if length.size and length.max() > each.size:
        raise ParameterError(
            f"draft_length must be at most {each.size}, the number of acceptance rates by draft position, got {length.max():g}"
        )
    lengths = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(each))])
    return np.asarray(lengths[length.astype(int)])
