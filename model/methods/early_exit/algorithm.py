"""Early exit: a token leaves the model at the first layer with enough confidence; a batch waits for all its sequences.

[Schuster2022]. After each layer from `first_check` on, the confidence is compared with a threshold that falls with the position
(`decayed_threshold`). Keys and values of skipped layers are computed from the state at the exit: for each token immediately
(`propagate`), or when a later token first reaches the layer (`backfill`, CALM-DEC in Section 4.4 of [DelCorro2023]). With an
`exit_layer` all tokens leave there without a check. The method is lossy.

[Schuster2022] T. Schuster et al. Confident Adaptive Language Modeling. NeurIPS 2022, arXiv:2207.07061.
[t5x] google-research/t5x, t5x/contrib/calm; its threshold decays differently from the paper.
[DelCorro2023] L. Del Corro et al. SkipDecode. arXiv:2307.02628.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.methods import batching
from model.methods.claim_bounds import ClaimRule
from model.methods.method_parameters import STATIC
from model.methods.proposals import Known, Proposal, Proposals, needs_lossy
from model.steps import Batch, Commit, Forward, LayerSpan, Read, Step, Steps

FORMS = ("paper", "code")
MEASURES = ("softmax", "state")

FILLS = ("propagate", "backfill")
SURE = 0.5
"""Default threshold, for simulated confidences of 0 or 1."""


@dataclass(frozen=True)
class Parameters(batching.StaticBatching):
    """Parameters of early exit.

    Parameters
    ----------
    layers
        Layers of the model.
    measure
        Measure of confidence after a layer. `softmax`: the largest probability, which needs logits after the layer. `state`: the
        similarity of the states before and after the layer.
    first_check
        First layer after which a token may leave.
    threshold
        Confidence at which a token leaves (lambda). Left out if outcomes are hazards.
    temperature, decay, longest
        Decay of the threshold with the position: temperature (tau), form (`paper` or `code`) and longest sequence (N). All three
        or none.
    fill
        Keys and values of skipped layers: `propagate` or `backfill`.
    exit_layer
        One exit layer for all tokens, without checks.
    sequences
        Sequences of a full batch.
    batching
        `static` or `lockstep` with several sequences.
    lengths
        Tokens of each sequence of static batches, if they differ; the largest equals the scenario's `tokens`.
    """

    layers: int
    measure: str = "softmax"
    first_check: int = 1
    threshold: float | None = None
    temperature: float | None = None
    decay: str | None = None
    longest: int | None = None
    fill: str = "propagate"
    exit_layer: int | None = None

    LABEL = "early exit"
    OUTCOMES = ("exit",)
    COSTS = ("early_head", "propagation", "state_check", "verify_cost")
    EXACT = False
    CLAIMS = ClaimRule(
        terms=("layers", "mean_layers", "exit_layer"), needs=(("mean_layers", "exit_layer"),), required=("layers",),
        source="layers that run: Schuster et al., NeurIPS 2022, arXiv:2207.07061",
        names={"calm": "", "layerskip early exit": ""},
    )

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """All tokens leave after a half, or three quarters, of the layers."""
        exits = (known.layers * part // 4 for part in (2, 3))
        made = (Proposal({"layers": known.layers, "exit_layer": each}, setting=f"layer {each}") for each in exits)
        return Proposals(tuple(made) if known.lossy else (), needs_lossy(known))

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.one_of("measure", self.measure, MEASURES)
        checks.whole("first_check", self.first_check, 1, self.layers, "layers")
        checks.one_of("fill", self.fill, FILLS)
        self.check_batching()
        if self.fill == "backfill" and self.batching == STATIC and self.sequences > 1:
            raise checks.ParameterError(
                f"sequences must be 1 with fill='backfill' and batching='static', got {self.sequences}, because sequences of a"
                " batch lack different rows; choose fill='propagate'"
            )
        if self.exit_layer is not None:
            self._check_fixed()
        self._check_threshold()

    def _check_fixed(self) -> None:
        checks.whole("exit_layer", self.exit_layer, 1, self.layers, "layers")
        plain_choice = {"measure": "softmax", "first_check": 1, "threshold": None, "fill": "propagate"}
        for name, plain in (plain_choice | dict.fromkeys(("temperature", "decay", "longest"))).items():
            if getattr(self, name) != plain:
                raise checks.ParameterError(
                    f"{name} has no effect with an exit_layer, where all tokens leave, got {checks.shown(getattr(self, name))};"
                    " leave it out"
                )

    def _check_threshold(self) -> None:
        if self.threshold is not None:
            checks.number("threshold", self.threshold, 0, 1)
        if self.temperature is not None:
            checks.number("temperature", self.temperature, 0)
        if self.decay is not None:
            checks.one_of("decay", self.decay, FORMS)
        if self.longest is not None:
            checks.whole("longest", self.longest, 1, checks.MAX_TOKENS)
        falling = {name: getattr(self, name) for name in ("temperature", "decay", "longest")}
        given = [name for name, value in falling.items() if value is not None]
        missing = [name for name, value in falling.items() if value is None]
        if given and self.threshold is None:
            raise checks.ParameterError(f"threshold is required with {given[0]}, which sets its decay")
        if given and missing:
            raise checks.ParameterError(
                f"{missing[0]} is required with {given[0]}: the decay of the threshold needs {', '.join(falling)}; give all three,"
                " or none"
            )

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters; a fixed exit layer needs no checks or propagation."""
        fixed = table.get("exit_layer") is not None
        alone = table.get("lengths") is None and table.get("fill") != "backfill"
        unless = {"propagation": fixed, "state_check": fixed or table.get("measure") != "state", "verify_cost": alone}
        return tuple(name for name in cls.COSTS if not unless.get(name))

    @classmethod
    def outcomes_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Outcomes that the method reads with these parameters: none with a fixed exit layer."""
        return cls.OUTCOMES if table.get("exit_layer") is None else ()

    @property
    def handover_layer(self) -> int:
        """Layer that the early head reads, if it is the same for all tokens; 0: none."""
        return self.exit_layer or 0

    @property
    def reads_early(self) -> bool:
        """True: tokens are predicted from layers below the last."""
        return True

    @property
    def decides_by_threshold(self) -> bool:
        """True if a threshold is set."""
        return self.threshold is not None

    def check_thresholds(self) -> None:
        """Raise ParameterError if neither a threshold nor a fixed exit layer is set."""
        if self.threshold is None and self.exit_layer is None:
            raise checks.ParameterError(
                "threshold or exit_layer is required: the confidence at which a token leaves, or one layer for all tokens; set one"
                " of the two"
            )

    @property
    def counts_layers(self) -> bool:
        """True: operations are counted by the layers that run."""
        return True

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass that runs layers."""
        return self.concurrent_sequences

    def check_tokens(self, tokens: int) -> None:
        """Raise ParameterError for more tokens than `longest`, or lengths that contradict `tokens`."""
        if self.longest is not None and tokens > self.longest:
            raise checks.ParameterError(
                f"longest must be at least tokens={tokens}, over which the threshold decays, got {self.longest}"
            )
        super().check_tokens(tokens)

    def largest_pass_of(self, tokens: int) -> int:
        """Largest number of tokens in any pass: `backfill` may compute the rows of all earlier positions at once."""
        return max(self.largest_pass, tokens - 1) if self.fill == "backfill" else self.largest_pass

    def exit_threshold(self, column: int) -> float:
        """Confidence at which the token at this output position, from 0, leaves."""
        if self.threshold is None:
            return SURE
        if self.decay is None or self.longest is None or self.temperature is None:
            return self.threshold
        return float(decayed_threshold(self.threshold, column, self.longest, self.temperature, form=self.decay))


def decode(
    parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = (), prompts: Sequence[Sequence[int]] = ()
) -> Steps:
    """Decode `tokens` tokens, or `lengths` of each sequence, after a prompt of at least one token.

    A sequence also ends with a token of `stop`. All sequences have the same prompt, or separate `prompts` of the same length.
    """
    parameters.check_tokens(tokens)
    start, whole = len(prompt) - 1, LayerSpan(0, parameters.exit_layer or parameters.layers)
    if start and not prompts:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    for batch in parameters.batches(tokens):
        yield from batching.read_prompts(parameters.layers, prompt, prompts, tuple(batch))
        last = dict(zip(batch, batching.last_words(prompt, prompts, tuple(batch)), strict=True))
        owed = None
        if parameters.fill == "backfill":
            owed = BackfillState(parameters.layers, start, tuple(batch) if parameters.decoded_sequences > 1 else ())
        for column in range(max(batch.values())):
            live = tuple([each for each, length in batch.items() if length > column and (last[each] not in stop or not column)])
            if not live:
                break
            words, at = tuple([last[each] for each in live]), start + column
            together = Batch.uniform(live, at, heads=1) if parameters.decoded_sequences > 1 else None
            step = Forward("target", words, at, whole, heads=len(live), batch=together)
            if parameters.exit_layer is not None:
                out = yield step
            else:
                out = yield from _leave_early(parameters, step, parameters.exit_threshold(column), owed)
            for index, each in enumerate(live):
                last[each] = yield Read("next", out, index - len(live))
            yield Commit("column", tuple([last[each] for each in live]))


class BackfillState:
    """State of `backfill`: rows that each layer holds, and the tokens and exit states of all positions."""

    def __init__(self, layers: int, start: int, sequences: tuple[int, ...]) -> None:
        self.sequences = sequences
        self.computed_rows = [start] * layers
        self.start = start
        self.tokens: list[int] = []
        self.states: list[Any] = []


def _leave_early(parameters: Parameters, step: Forward, threshold: float, owed: BackfillState | None) -> Generator[Step, Any, Any]:
    """Run layers until all sequences are confident; return the output that the tokens are read from."""
    layers, width = parameters.layers, len(step.tokens)
    softmax = parameters.measure == "softmax"
    out, depth = None, 0
    while depth < layers:
        until = parameters.first_check if not depth else depth + 1
        if owed is not None:
            yield from _backfill(owed, step.at, depth, until)
        heads = width if softmax or until == layers else 0
        compared = 0 if softmax or until == layers else width
        out = yield _replaced(step, LayerSpan(depth, until), out, heads, compared)
        depth = until
        if depth < layers and (yield from _sure(out, "confidence" if softmax else "saturation", width, threshold)):
            break
    if depth < layers and not softmax:
        state, out = out, (yield _replaced(step, LayerSpan(depth, depth), out, width))
    else:
        state = out
    if owed is not None:
        owed.computed_rows[:depth] = [step.at + 1] * depth
        owed.tokens += step.tokens
        owed.states.append(state)
    elif depth < layers:
        yield _replaced(step, LayerSpan(depth, layers, kv_only=True), state)
    return out


def _replaced(step: Forward, layers: LayerSpan, state: Any, heads: int = 0, compared: int = 0) -> Forward:
    """The same tokens in the given layers."""
    batch = step.batch and Batch.uniform(step.batch.sequences, step.at, heads=int(heads > 0))
    return step._replace(layers=layers, state=state, heads=heads, batch=batch, compared=compared)


def _sure(out: Any, measure: Literal["confidence", "saturation"], width: int, threshold: float) -> Generator[Step, Any, bool]:
    for index in range(width):
        if (yield Read(measure, out, index - width)) < threshold:
            return False
    return True


def _backfill(owed: BackfillState, until: int, first: int, last: int) -> Steps:
    """Compute the rows of positions before `until` that layers [first, last) lack."""
    for layer in range(first, last):
        lacking = owed.computed_rows[layer] - owed.start
        tokens = tuple(owed.tokens[lacking:])
        if tokens:
            states = tuple(owed.states[lacking:])
            at = owed.computed_rows[layer]
            batch = Batch.uniform(owed.sequences, at, len(tokens)) if owed.sequences else None
            yield Forward("target", tokens, at, LayerSpan(layer, layer + 1, kv_only=True), states, batch=batch)
            owed.computed_rows[layer] = until


def decayed_threshold(
    threshold: ArrayLike, position: ArrayLike, longest: ArrayLike, temperature: ArrayLike, *, form: str = "paper"
) -> NDArray[np.float64]:
    """Confidence at which the token at `position` leaves; higher for early tokens, because their errors propagate.

    paper: clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1), [Schuster2022]; code: lambda (0.9 + 0.1 exp(-tau t / N)), [t5x].
    They are equal only at lambda = 1; the paper's starts above lambda, the code's at lambda. Clipping is never needed.

    >>> [round(float(decayed_threshold(0.8, t, 100, 4, form=form)), 3) for form in FORMS for t in (0, 50, 100)]
    [0.82, 0.734, 0.722, 0.8, 0.731, 0.721]
    """
    checks.one_of("form", form, FORMS)
    level = checks.array("threshold", threshold, 0, 1)
    place, most = checks.array("position", position, 0), checks.whole_array("longest", longest, 1)
    falling = 0.1 * np.exp(-checks.array("temperature", temperature, 0) * place / most)
    if form == "code":
        return np.asarray(level * (0.9 + falling))
    return np.asarray(0.9 * level + falling)
