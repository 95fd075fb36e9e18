"""Interpreter of algorithms on real models: a pass runs layers, a read evaluates their output.

It drives the same generators of steps as the simulator and the counter. Sub-processes run one after another. Every pass checks the
KV cache rows of each layer against those that the algorithm expects (`model.interpret.interpreter.Cache`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from calibrate.decoders.kv_rows import KvRows, join_rows
from calibrate.decoders.transformers_adapter import Decoder
from model.base import checks
from model.base.checks import ParameterError
from model.interpret.interpreter import Cache, CountedWork, Interpreter, Task
from model.interpret.simulated_answers import Answers
from model.logs.recorded_decoding import AnsweredRead, question
from model.steps import (
    GREEDY,
    LIKELIEST,
    MASK,
    Batch,
    CacheError,
    Commit,
    Continuation,
    DraftChain,
    DraftedChain,
    DraftedLevels,
    DraftLevels,
    Features,
    Forward,
    Lookup,
    NextTokens,
    Read,
    ReadEach,
    Steps,
)

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """Sampling distribution of tokens: the model's at a `temperature`, cut to the `top_k` likeliest tokens (0: all) and to the
    nucleus of probability `top_p`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0)
        if not self.temperature > 0:
            raise ParameterError("temperature must be above 0, got 0; for greedy decoding, leave sampling out")
        checks.whole("top_k", self.top_k, 0)
        checks.number("top_p", self.top_p, 0, 1)

    def probabilities(self, logits: Floats) -> Floats:
        """Return the probabilities of all tokens, shape (vocabulary,), from their logits.

        >>> Sampling(top_k=2).probabilities(np.log([0.5, 0.3, 0.2])).round(3).tolist()
        [0.625, 0.375, 0.0]
        >>> Sampling(top_p=0.4).probabilities(np.log([0.5, 0.5])).tolist()
        [1.0, 0.0]
        """
        found = softmax(logits / self.temperature)
        if 0 < self.top_k < found.size:
            order = np.argsort(-found, kind="stable")  # ties keep the first
            found[order[self.top_k :]] = 0
        if self.top_p < 1:
            order = np.argsort(-found, kind="stable")
            before = np.cumsum(found[order]) - found[order]
            found[order[before >= self.top_p * found.sum()][max(0, int(self.top_p == 0)) :]] = 0
        return np.asarray(found / found.sum())


def softmax(logits: Floats) -> Floats:
    """Return probabilities from logits, shape (vocabulary,)."""
    found = np.exp(logits - logits.max())
    return np.asarray(found / found.sum())


def token_at(probabilities: Floats, uniform: float) -> int:
    """Return the token at quantile `uniform` in [0, 1) of a distribution, which need not be normalised.

    >>> [token_at(np.array([0.0, 0.2, 0.2]), uniform) for uniform in (0.0, 0.49, 0.5)]
    [1, 1, 2]
    """
    reached = np.cumsum(probabilities)
    return min(int(np.searchsorted(reached, uniform * reached[-1], side="right")), int(np.flatnonzero(probabilities)[-1]))


def without(probabilities: Floats, tokens: Sequence[int]) -> Floats:
    """Return a distribution without these tokens, divided by its sum.

    >>> without(np.array([0.5, 0.25, 0.25]), [0]).tolist()
    [0.0, 0.5, 0.5]
    """
    if not len(tokens):
        return probabilities
    left = probabilities.copy()
    left[list(tokens)] = 0.0
    return np.asarray(left / left.sum())


class RandomDraws:
    """Random draws by purpose and position: a separate stream per purpose, keyed by seed and replication.

    Repeated draws at a position, after a draft was rejected there, give new numbers.
    """

    def __init__(self, seed: int = 0, replication: int = 0) -> None:
        checks.whole("seed", seed, 0)
        checks.whole("replication", replication, 0)
        self.key = seed, replication
        self.times: Counter[tuple[str, int, int]] = Counter()

    def draw(self, purpose: str, position: int, sequence: int = 0) -> float:
        """Draw a number in [0, 1)."""
        self.times[purpose, position, sequence] += 1
        again = self.times[purpose, position, sequence]
        words = [*self.key, position, sequence, again, *purpose.encode()]
        return float(np.random.Generator(np.random.Philox(np.random.SeedSequence(words))).random())


class PassOutput:
    """Output of a pass: states after its last layer, and logits, computed at the first read."""

    __slots__ = ("_best", "_logits", "_positions", "_probabilities", "before", "decoder", "states", "step")

    def __init__(self, step: Forward, decoder: Decoder, states: Tensor | None, before: Tensor | None) -> None:
        self.step, self.decoder, self.states, self.before = step, decoder, states, before
        self._positions: Sequence[int] | None = None
        self._logits: Tensor | None = None
        self._best: list[int] | None = None
        self._probabilities: dict[int, Floats] | None = None

    @property
    def positions(self) -> Sequence[int]:
        """Cache position of each token."""
        if self._positions is None:
            self._positions = self.step.positions
        return self._positions

    def alone(self, hypothesis: int) -> PassOutput:
        """Return the output of a single hypothesis of a pass over several, one token each."""
        states = None if self.states is None else self.states[hypothesis : hypothesis + 1]
        return PassOutput(self.step.alone(hypothesis), self.decoder, states, None)

    @property
    def logits(self) -> Tensor:
        """Logits of the projected positions, (heads, vocabulary): the last of each sequence, or all of several hypotheses."""
        if self._logits is None:
            step = self.step
            if not step.heads or self.states is None:
                raise CacheError(f"{step.role}: a pass at position {step.at} is read, but projects no position")
            states = self.states if step.tree else self.states[-step.heads :]
            batch = step.batch
            if batch is not None and batch.heads != batch.widths and step.batch_size > 1:
                if len({*zip(batch.widths, batch.heads, strict=True)}) == 1:
                    states = self.states.view(step.batch_size, step.width, -1)[:, -batch.heads[0] :].flatten(0, 1)
                else:
                    states = self.states[projected(batch)]
            self._logits = self.decoder.logits(states, step.layers.last)
        return self._logits

    def row(self, offset: int) -> int:
        """Return the row of the logits for a read with this offset."""
        step = self.step
        batch = step.batch
        if batch is not None and not step.tree:
            index, token = batch.locate(offset % len(step.tokens))
            row = token - (batch.widths[index] - batch.heads[index])
            if row < 0:
                read = f"token {token} of sequence {batch.sequences[index]}"
                raise CacheError(f"{step.role}: {read} is read, but only its last {batch.heads[index]} are projected")
            return batch.head_starts[index] + row
        return offset + len(self.logits) - (0 if offset < 0 else len(step.tokens))

    def best(self, offset: int) -> int:
        """Return the likeliest token; ties go to the first."""
        if self._best is None:
            self._best = self.logits.argmax(dim=-1).tolist()
        return self._best[self.row(offset)]

    def scores(self, offset: int) -> Floats:
        """Return the logits of a position, shape (vocabulary,)."""
        return np.asarray(self.logits[self.row(offset)].double().cpu().numpy())

    def probabilities(self, offset: int, sampling: Sampling | None) -> Floats:
        """Return the probabilities of all tokens: of the model, or of the sampling distribution."""
        row = self.row(offset) if sampling is None else -1 - self.row(offset)
        if self._probabilities is None:
            self._probabilities = {}
        if row not in self._probabilities:
            scores = self.scores(offset)
            self._probabilities[row] = softmax(scores) if sampling is None else sampling.probabilities(scores)
        return self._probabilities[row]


def projected(batch: Batch) -> list[int]:
    """Indices of the projected tokens of a batch among the tokens of the pass.

    >>> projected(Batch((3, 1), (6, 5), (1, 3), (1, 2)))
    [0, 2, 3]
    """
    ends = zip(batch.starts, batch.widths, batch.heads, strict=True)
    return [index for start, width, heads in ends for index in range(start + width - heads, start + width)]


class ProcessState:
    """State of a process: its KV cache rows, and the number of rows that each layer should hold."""

    def __init__(self, decoders: Mapping[str, Decoder]) -> None:
        self.decoders = decoders
        self.expected_rows = Cache()
        self.rows = {role: decoder.rows() for role, decoder in decoders.items()}
        self.sequences: dict[tuple[str, int], tuple[tuple[int, ...], KvRows]] = {}
        """For each sequence of a batch: the sequences stored together with it, and their rows."""

    def copy(self) -> ProcessState:
        """Return the state that a sub-process starts with."""
        other = ProcessState.__new__(ProcessState)
        other.decoders = self.decoders
        other.expected_rows = self.expected_rows.copy()
        other.rows = {role: rows.copy() for role, rows in self.rows.items()}
        blocks = {id(rows): rows.copy() for _, rows in self.sequences.values()}
        other.sequences = {key: (numbers, blocks[id(rows)]) for key, (numbers, rows) in self.sequences.items()}
        return other

    def rows_of(self, role: str, numbers: tuple[int, ...]) -> KvRows:
        """Return the rows of these sequences, stored together; without numbers, those of the process."""
        if not numbers:
            return self.rows[role]
        found = self.sequences.get((role, numbers[0]))
        if found is not None and found[0] == numbers:
            return found[1]
        if len(numbers) > 1 and self.rows[role].cross_attention is not None:
            name = self.decoders[role].name
            raise ParameterError(f"batch must be 1 with an encoder-decoder such as {name}, got {len(numbers)}")
        if found is not None and {*numbers} <= {*found[0]}:
            rows = found[1].select([found[0].index(number) for number in numbers])
        else:
            parts = [self._alone(role, number) for number in numbers]
            rows = parts[0] if len(parts) == 1 else join_rows(parts)
        for number in numbers:
            self.sequences[role, number] = numbers, rows
        return rows

    def _alone(self, role: str, number: int) -> KvRows:
        found = self.sequences.get((role, number))
        if found is None:
            return self.rows[role].copy()
        return found[1] if len(found[0]) == 1 else found[1].select([found[0].index(number)])

    def check(self, step: Forward, rows: KvRows) -> None:
        """Raise an error if a layer holds another number of rows than the algorithm expects, for any sequence."""
        layers, batch = step.layers, step.batch
        if batch is not None and not batch.aligned:
            caches = [self.expected_rows.sequences[number].rows[step.role] for number in batch.sequences]
            for layer in range(layers.first, layers.last):
                expected, ends = tuple([cache[layer] for cache in caches]), rows.layers[layer].ends
                if ends != expected:
                    raise CacheError(f"{step.role}: layer {layer} should hold {expected} positions, it holds {ends}")
            return
        cache = self.expected_rows if batch is None else self.expected_rows.sequences.get(batch.sequences[0], self.expected_rows)
        lengths = cache.rows[step.role]
        for low, high in layers.ranges:
            held = [layer.length for layer in rows.layers[low:high]]
            if rows.at is not None:  # rows in order of arrival: their number is not that of positions
                positions = {length: max(rows.at[:length]) + 1 for length in {*held}}
                held = [positions[length] for length in held]
            if held != lengths[low:high]:
                layer = next(layer for layer in range(low, high) if held[layer - low] != lengths[layer])
                found = f"should hold {lengths[layer]} positions, it holds {held[layer - low]}"
                raise CacheError(f"{step.role}: layer {layer} {found}")


@dataclass
class RunTimes:
    """Times of commits, passes and reads of one run [s].

    The first read of a pass includes the head. On a GPU, passes include only the launch, and reads wait for the rest.
    """

    start: float = field(default_factory=time.perf_counter)
    commits: list[float] = field(default_factory=list)
    """Times of the commits since the start."""
    passes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Total of the passes, by role."""
    reads: float = 0.0
    """Total of the reads."""


class Real(Interpreter):
    """Interprets an algorithm on real models.

    Parameters
    ----------
    decoders
        Models by role: target, draft, medium.
    sampling
        Distribution of sampled tokens. Default: that of the models.
    random_draws
        Random draws.
    log
        List that receives every read with its answer.
    answers
        Source of forced outcomes. Reads return its answers, while all passes, heads and reads are still executed and timed.
    times
        Receives the times of commits, passes and reads.
    """

    def __init__(
        self, decoders: Mapping[str, Decoder], *, sampling: Sampling | None = None, random_draws: RandomDraws | None = None,
        log: list[AnsweredRead] | None = None, answers: Answers | None = None, times: RunTimes | None = None,
    ) -> None:
        super().__init__()
        self.answers, self.times = answers, times
        if answers is not None:
            answers.written, answers.generated = self.work.tokens, self.work.sequences
        sizes = {role: decoder.vocabulary for role, decoder in decoders.items()}
        if len({*sizes.values()}) > 1:
            listed = ", ".join(f"{role} {size}" for role, size in sizes.items())
            raise ParameterError(f"models must have the same vocabulary, got {listed} tokens; use a draft with the same tokenizer")
        self.decoders = decoders
        self.sampling = Sampling() if sampling is None else sampling
        self.random_draws = RandomDraws() if random_draws is None else random_draws
        self.log = log
        self.between: Callable[[int], None] | None = None
        """Called before each layer of a pass, with the layer's index."""

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """See `Interpreter`."""
        import torch

        with torch.inference_mode():
            return super().run(steps, tokens)

    def new_cache(self) -> ProcessState:
        """Return a state without rows."""
        return ProcessState(self.decoders)

    def forward(self, cache: ProcessState, step: Forward) -> PassOutput:
        """Run the layers of a pass."""
        if self.times is None:
            return self._make_pass(cache, step)
        begun = time.perf_counter()
        found = self._make_pass(cache, step)
        self.times.passes[step.role] += time.perf_counter() - begun
        return found

    def commit(self, step: Commit) -> None:
        """Record generated tokens."""
        super().commit(step)
        if self.times is not None:
            self.times.commits.append(time.perf_counter() - self.times.start)

    def _make_pass(self, cache: ProcessState, step: Forward) -> PassOutput:
        output, rows = self._run_layers(cache, step)
        if rows is not None:
            cache.check(step, rows)
        return output

    def _run_layers(self, cache: ProcessState, step: Forward) -> tuple[PassOutput, KvRows | None]:
        """Run the layers of a pass; also return their rows, which are still to be checked, or None where no layer runs."""
        role, tokens, layers = step.role, step.tokens, step.layers
        decoder = self.decoders[role]
        if layers.last > decoder.layers:
            bound = f"{decoder.layers}, as {decoder.name} has"
            raise ParameterError(f"layers of the {role} must be {bound}, got at least {layers.last}")
        cache.expected_rows.write(step)
        states: Tensor | None = None
        state = step.state
        if isinstance(state, Features):
            states = _states_of(state)
        elif state is not None and layers.first:
            outputs: tuple[PassOutput, ...] = state if isinstance(state, tuple) else (state,)
            made = [each.states for each in outputs if each.states is not None]
            states = (made[0] if len(made) == 1 else _joined(made))[-len(tokens) :]
        if layers.first == layers.last:
            return PassOutput(step, decoder, states, None), None
        rows = cache.rows[role] if step.batch is None else cache.rows_of(role, step.batch.sequences)
        if self.answers is not None:
            tokens = self.to_vocabulary(role, tokens)
        seen: list[Tensor] | None = [] if step.compared else None
        states = decoder.run(
            tokens, step.at, layers, rows, states, batch=step.batch, tree=step.tree, seen=seen, between=self.between,
            context_budget=step.context_budget,
        )  # fmt: skip
        return PassOutput(step, decoder, states, seen[-1] if seen else None), rows

    def adopt(self, cache: ProcessState, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """Copy rows of a sub-process."""
        role = task.last.role
        cache.expected_rows.adopt(task.last, at, layers, hypothesis)
        cache.rows[role].adopt(task.cache.rows[role], at, layers, hypothesis)

    def read(self, step: Read) -> Any:
        """Evaluate a read of a pass."""
        if self.answers is None and self.times is None and self.log is None:
            return self._evaluate(step)
        begun = time.perf_counter()
        found = self._evaluate(step if self.answers is None else self._in_vocabulary(step))
        if self.answers is not None:
            found = self._forced(step)
        if self.times is not None:
            self.times.reads += time.perf_counter() - begun
        if self.log is not None:
            self.log.append(AnsweredRead(question(step, step.output.step), found))
        return found

    def take(self, task: Task, step: NextTokens | DraftChain | DraftLevels | ReadEach) -> Any:
        """Accept offers of single sequences, unless single passes or reads are timed, recorded, forced, or overridden.

        `DraftRounds` are declined: what is accepted and committed is up to the algorithm.
        """
        if type(self) is not Real or self.answers is not None or self.times is not None or self.log is not None:
            return None
        if isinstance(step, ReadEach):
            return self._read_each(step.output, step.first, step.width) if step.kind == GREEDY else None
        if isinstance(step, DraftLevels):
            return self._levels(task, step)
        first = step.first
        if not self._is_usual(first):
            return None
        if isinstance(step, DraftChain):
            if step.confidence is not None:
                return None
            tokens, outputs = self._chain(task, first, step.length, step.read)
            return DraftedChain(tokens, outputs=() if step.read == GREEDY else outputs)
        if len({*step.layers}) != 1:
            return None
        tokens, _ = self._chain(task, first, min(len(step.layers), self.wanted - len(self.work.tokens)), step.read)
        for token in tokens:
            self.commit(Commit(step.kind, (token,)))
        return tokens

    def _is_usual(self, step: Forward) -> bool:
        """Return whether a pass is one over a single sequence and its whole context, with the logits of the last token."""
        return step[4:] == (None, 1, step.unit, (), None, 0, False, None) and step.layers.last <= self.decoders[step.role].layers

    def _chain(
        self, task: Task, first: Forward, length: int, read: Literal["next", "sample"]
    ) -> tuple[list[int], list[PassOutput]]:
        """Make passes, each over the token that was read after the pass before; rows are checked, and work counted, after the last.

        Returns the tokens, and the outputs of the passes if tokens are sampled.
        """
        cache, (role, words, at, layers, *_) = task.cache, first
        decoder, rows, expected, tokens = self.decoders[role], cache.rows[role], cache.expected_rows, list[int]()
        expected.write(first)
        if length > 1:
            expected.write(Forward(role, words[-1:], at + len(words), layers), length - 1)
        outputs: list[PassOutput] = []
        for _ in range(length):
            step = Forward(role, words, at, layers, None, 1, first.unit)
            output = PassOutput(step, decoder, decoder.run(words, at, layers, rows), None)
            token = self._evaluate(Read(read, output))
            tokens.append(token)
            if read != GREEDY:
                outputs.append(output)
            at += len(words)
            words = (token,)
        cache.check(step, rows)
        self.work.account.add(first)
        if length > 1:
            self.work.account.add_each(step._replace(at=first.at + len(first.tokens)), length - 1)
        task.last = step
        return tokens, outputs

    def _levels(self, task: Task, step: DraftLevels) -> DraftedLevels | None:
        """Make the passes and reads of a draft of a tree; rows are checked after the last pass.

        None if the draft may have fewer candidates than the tree.
        """
        cache, following, rows = task.cache, step.first, None
        vocabulary = self.decoders[following.role].vocabulary
        if step.read != LIKELIEST or any(width > vocabulary for reads, *_ in step.levels for _, width in reads):
            return None
        tokens, outputs = list[int](), list[PassOutput]()
        for depth, (reads, nodes, *_) in enumerate(step.levels):
            output, rows = self._run_layers(cache, following)
            self.work.account.add(following)
            task.last = following
            outputs.append(output)
            for offset, width in reads:
                tokens += self._evaluate(Read(step.read, output, offset, width))
            if nodes:
                following = step.pass_over(depth, tokens, output)
        if rows is not None:
            cache.check(following, rows)
        return DraftedLevels(tokens, outputs)

    def _read_each(self, output: PassOutput, first: int, width: int) -> list[int]:
        """Evaluate reads of the likeliest tokens at consecutive positions."""
        return [output.best(offset) for offset in range(first, first + width)]

    def look_up(self, step: Lookup) -> tuple[int, ...]:
        """Look up the text; forced outcomes answer instead, because forced tokens never repeat."""
        return super().look_up(step) if self.answers is None else self.answers.look_up(step)

    def _evaluate(self, step: Read) -> Any:
        output, offset, token = step.output, step.offset, step.token
        match step.kind:
            case "next":
                return output.best(offset)
            case "top":
                row = output.logits[output.row(offset)]
                return row.topk(min(step.width, len(row))).indices.tolist()
            case "sample":
                return self._token_at(output.probabilities(offset, self.sampling), f"{output.step.role}: sample", output, offset)
            case "distinct":
                return self._distinct(step)
            case "probability":
                return float(self._after_rejections(step)[0][token])
            case "uniform":
                return self._random_number("test", output, offset)
            case "residual":
                rest = self._residual(step)
                # Equal distributions reject nothing, except by rounding.
                rest = rest if rest.sum() > 0 else output.probabilities(offset, self.sampling)
                return self._token_at(rest, "residual", output, offset)
            case "residual_mass":
                return float(self._residual(step).sum())
            case "confidence":
                probabilities = output.probabilities(offset, None)
                return float(probabilities.max() if token is None else probabilities[token])
            case "distance":
                scores = output.scores(offset)
                return float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[token])
            case "saturation":
                return _alike(output, offset)
            case "beams":
                return _continued(output, step.hypotheses, step.width)

    def _residual(self, step: Read) -> Floats:
        """Return max(0, w p - q) of a read, shape (vocabulary,)."""
        p, q = self._after_rejections(step)
        return np.asarray(np.maximum(step.weight * p - q, 0.0))

    def _after_rejections(self, step: Read) -> tuple[Floats, Floats]:
        """Distribution of a read and that of `against` after the `rejected` tokens of it; each of shape (vocabulary,)."""
        p = step.output.probabilities(step.offset, self.sampling)
        if step.against is None:
            return without(p, step.rejected), p
        q = step.against.probabilities(step.against_offset, self.sampling)
        for count in range(len(step.rejected)):
            rest = np.maximum(p - without(q, step.rejected[:count]), 0.0)
            p = rest / rest.sum() if rest.sum() > 0 else p  # equal distributions reject nothing, except by rounding
        return p, without(q, step.rejected)

    def _distinct(self, step: Read) -> list[int]:
        """Draw tokens one after another without replacement; fewer where the distribution has fewer."""
        output, offset = step.output, step.offset
        law, drawn = output.probabilities(offset, self.sampling), list[int]()
        for _ in range(min(step.width, int(np.count_nonzero(law)))):
            drawn.append(self._token_at(without(law, drawn), f"{output.step.role}: distinct", output, offset))
        return drawn

    def to_vocabulary(self, role: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Map forced tokens (positions of a sequence, negative if wrong) to tokens of the vocabulary; masks stay masks."""
        return tuple(token if token == MASK else token % self.decoders[role].vocabulary for token in tokens)

    def _in_vocabulary(self, step: Read) -> Read:
        """Map the token of a read to one of the vocabulary."""
        return step if step.token is None else step._replace(token=step.token % self.decoders[step.output.step.role].vocabulary)

    def _forced(self, step: Read) -> Any:
        """Return the forced answer, which depends on passes and not on their outputs."""
        assert self.answers is not None
        against = None if step.against is None else step.against.step
        return self.answers.read(step._replace(output=step.output.step, against=against))

    def _token_at(self, probabilities: Floats, purpose: str, output: PassOutput, offset: int) -> int:
        """Draw a token of a distribution, which need not be normalised."""
        return token_at(probabilities, self._random_number(purpose, output, offset))

    def _random_number(self, purpose: str, output: PassOutput, offset: int) -> float:
        return self.random_draws.draw(purpose, output.positions[offset] + 1, output.step.sequence_of(offset))


def _joined(states: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(states)


def _states_of(features: Features) -> Tensor | None:
    """Return the states of a pass that a draft head reads, (tokens, hidden); the one before the first token of all is left out."""
    output: PassOutput | None = features.output
    if output is None or output.states is None:
        return None
    if features.indices:
        return output.states[list(features.indices)]
    return output.states[max(features.first, 0) : features.first + features.length]


def _alike(output: PassOutput, offset: int) -> float:
    """Return the saturation [Schuster2022]: cosine of the states before and after the last layer, at least 0."""
    if output.before is None or output.states is None:
        where = f"{output.step.role}: a pass at position {output.step.at}"
        raise CacheError(f"{where} is read for saturation, but kept no earlier state")
    before, after = output.before[offset].double(), output.states[offset].double()
    return max(float((before @ after) / (before.norm() * after.norm())), 0.0)


def _continued(output: PassOutput, hypotheses: Sequence[tuple[int, float]], width: int) -> list[Continuation]:
    """Return the likeliest continuations of all hypotheses; ties go to the first."""
    import torch

    width_each = min(width, output.logits.shape[1])
    found: list[Continuation] = []
    for offset, score in hypotheses:
        row = output.row(offset)
        chances = torch.log_softmax(output.logits[row].double(), dim=-1)
        values, tokens = chances.topk(width_each)
        found += [
            Continuation(token, offset, score + value) for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
    return sorted(found, key=lambda each: -each.score)[:width]
