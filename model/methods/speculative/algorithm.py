"""Speculative decoding: a small model drafts, the large one checks all drafted tokens in one pass.

Algorithm 1 of [Leviathan2023] (Algorithm 2 of [Chen2023] is the same with other letters). Greedy, a drafted token is kept if it is
the target's own; sampled, with chance min(1, p/q), and the first that is not is replaced by one from norm(max(0, p - q)), so that
the output has the target's law exactly. A round gives one token more than it accepts. Drafts are cut to what remains to be decoded.

Sequences of a batch draft together and are verified in one pass; each takes what it accepts, so that their positions differ. A
round drafts as many tokens for all as for the sequence that can use the most, and what is beyond the end of a sequence is not
looked at. Those that have ended leave the batch; the next one begins when all have. So a static batch is decoded; of one that is
kept full one sequence is, whose drafts are never cut (`model/methods/batching.py`).

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Chen2023] C. Chen et al. Accelerating Large Language Model Decoding with Speculative Sampling. arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from model.base import checks
from model.methods import batching
from model.methods.draft_model import MAX_DRAFT, DraftModel
from model.methods.formula_check import FormulaCheck
from model.methods.method_parameters import BATCHING, CONTINUOUS
from model.steps import GREEDY, SAMPLED, Batch, Commit, Forward, LayerSpan, Read, Step, Steps, ended


@dataclass(frozen=True)
class Parameters(batching.StaticBatching, DraftModel):
    """A choice of speculative decoding: gamma = `draft_length`, whether tokens are `sampled`, and whether the draft model is on a
    unit of its own (`placement` separate).

    `draft_layers` is the depth of the draft model; its time is the scenario's `cost_ratio`, whatever its depth. `sequences` are
    decoded together, by default in continuous batching; `lengths` are those of all sequences of static batches.
    """

    layers: int
    draft_length: int
    sampled: bool = False

    LABEL = "speculative decoding"
    SHORT_LABEL = "speculative"
    OUTCOMES = ("accept",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    EXACT = True
    FORMULA_CHECK = FormulaCheck("verify", swept="draft_length")
    BATCHINGS = BATCHING
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 0, MAX_DRAFT)
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_batching()

    @property
    def longest_draft(self) -> int:
        """The most tokens that a round drafts."""
        return self.draft_length

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the target, of all sequences that are played together."""
        return self.concurrent_sequences * (self.longest_draft + 1)

    @property
    def overrun(self) -> int:
        """How many positions after the end of the longest sequence a pass may reach: sequences draft along with others."""
        return self.longest_draft if self.concurrent_sequences > 1 or not self.cut else 0

    @property
    def cut(self) -> bool:
        """Whether the last drafts of a sequence are cut to what remains to be decoded: an engine that keeps its batch full drafts
        as many tokens for every sequence in each step.
        """
        return self.sequences == 1 or self.batching != CONTINUOUS


class Guess(NamedTuple):
    """A drafted token, and the output, at a position of it, that it was read from: the law that it was drawn from, if it was."""

    token: int
    output: Any
    offset: int = -1


@dataclass
class RunningSequence:
    """A sequence that is decoded: its tokens so far and where it ends, how many positions of it the draft model's cache holds, and
    its number in a batch.
    """

    tokens: list[int]
    end: int
    rows: int
    number: int | None = None

    @property
    def room(self) -> int:
        """How many drafted tokens it can use: the target gives one more."""
        return self.end - len(self.tokens) - 1


def decode(
    parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = (), prompts: Sequence[Sequence[int]] = ()
) -> Steps:
    """The process: decode `tokens` tokens, or as many as `lengths` says of each sequence, after a prompt of at least one.

    A sequence ends with a token of `stop` too. All have the same prompt, or one of `prompts` each. Of a batch that is kept full
    it is one sequence, and so of one in lockstep.
    """
    parameters.check_tokens(tokens)
    if parameters.decoded_sequences > 1:
        yield from _in_batches(parameters, prompt, tokens, stop, prompts)
        return
    prompt = prompts[0] if prompts else prompt
    text, end = list(prompt), len(prompt) + tokens
    drafter, target = (yield from start(parameters, text, parameters.sampled)), Model("target", parameters.layers, 0)
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        room = end - len(text) - 1
        guesses = yield from draft(drafter, text, min(parameters.draft_length, room) if parameters.cut else parameters.draft_length)
        kept, token = yield from verify(target, text, guesses, parameters.sampled, room)
        yield from commit(text, guesses, kept, token, stop)
        drafter.rows = min(drafter.rows, len(text) - 1)


def _in_batches(
    parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int], prompts: Sequence[Sequence[int]]
) -> Steps:
    """The same of several sequences: all that are left draft together, then are verified together."""
    target, gamma = Model("target", parameters.layers, 0), parameters.draft_length
    drafter = yield from start(parameters, [0] if prompts else prompt, parameters.sampled)
    for batch in parameters.batches(tokens):
        live: list[RunningSequence] = []
        for number, length in batch.items():
            own = prompts[number] if prompts else prompt
            live.append(RunningSequence([*own], len(own) + length, len(own) - 1, number))
            if prompts:
                yield from read(parameters, drafter, live[-1])
        while live:
            drafted = yield from draft_together(drafter, live, min(gamma, max(each.room for each in live)))
            yield from _take(target, live, drafted, parameters.sampled, stop)
            live = [each for each in live if each.room >= 0 and each.tokens[-1] not in stop]


def _take(
    target: Model, live: Sequence[RunningSequence], drafted: Sequence[Sequence[Guess]], sampled: bool, stop: Collection[int]
) -> Steps:
    """Check the drafted tokens of all sequences in one pass, and commit what each keeps."""
    width = len(drafted[0]) + 1
    words = [(each.tokens[-1], *[guess.token for guess in guesses]) for each, guesses in zip(live, drafted, strict=True)]
    out = yield _over(target, live, words, [len(each.tokens) - 1 for each in live], width)
    for index, (each, guesses) in enumerate(zip(live, drafted, strict=True), -len(live)):
        own = guesses[: each.room]
        kept, token = yield from judge(out, own, sampled, index * width)
        yield from commit(each.tokens, own, kept, token, stop, each.number)
        each.rows = min(each.rows, len(each.tokens) - 1)


@dataclass
class Model:
    """A model of the decoder's, the unit it runs on, and how many positions of the sequence its cache holds."""

    role: str
    layers: int
    unit: int
    rows: int = 0
    sampled: bool = False
    span: LayerSpan = field(init=False)
    """All its layers: what each of its passes runs."""

    def __post_init__(self) -> None:
        self.span = LayerSpan(0, self.layers)


def start(parameters: DraftModel, text: Sequence[int], sampled: bool = False) -> Generator[Step, Any, Model]:
    """Let both models read the prompt but for its last token; the draft model."""
    rows = len(text) - 1
    drafter = Model("draft", parameters.draft_layers, parameters.units - 1, rows, sampled)
    yield from read(parameters, drafter, RunningSequence([*text], 0, rows))
    return drafter


def read(parameters: Any, drafter: Model, sequence: RunningSequence) -> Steps:
    """Let both models read a sequence but for its last token."""
    words, batch = tuple(sequence.tokens[:-1]), None
    if words:
        if sequence.number is not None:
            batch = Batch.uniform((sequence.number,), 0, len(words))
        yield Forward("target", words, 0, LayerSpan(0, parameters.layers), batch=batch)
        yield Forward("draft", words, 0, drafter.span, unit=drafter.unit, batch=batch)


def draft(model: Model, text: Sequence[int], length: int) -> Generator[Step, Any, list[Guess]]:
    """Have so many tokens drafted after the text, one after another."""
    one = RunningSequence([*text], 0, model.rows)
    found = yield from draft_together(model, [one], length)
    model.rows = one.rows
    return found[0]


def draft_together(model: Model, live: Sequence[RunningSequence], length: int) -> Generator[Step, Any, list[list[Guess]]]:
    """Have so many tokens drafted after each sequence, one after another, in passes over all of them."""
    guesses: list[list[Guess]] = [[] for _ in live]
    ahead = [[*each.tokens] for each in live]
    for _ in range(length):
        # After a round whose drafts were all kept a sequence has two tokens to read: the last of them, and the target's own. All
        # sequences of the batch read two then, the others one of them again.
        width = max(len(own) - each.rows for each, own in zip(live, ahead, strict=True))
        out = yield _over(model, live, [own[-width:] for own in ahead], [len(own) - width for own in ahead], 1)
        for index, (each, own) in enumerate(zip(live, ahead, strict=True)):
            each.rows, offset = len(own), (index + 1 - len(live)) * width - 1
            guesses[index].append(Guess((yield Read(SAMPLED if model.sampled else GREEDY, out, offset)), out, offset))
            own.append(guesses[index][-1].token)
    return guesses


def _over(
    model: Model, live: Sequence[RunningSequence], words: Sequence[Sequence[int]], positions: Sequence[int], heads: int
) -> Forward:
    """One pass over `words` of each sequence, as many of each, from `positions` on: the last `heads` of each are projected."""
    if live[0].number is None:
        return Forward(model.role, tuple(words[0]), positions[0], model.span, None, heads, model.unit)
    tokens = tuple([word for own in words for word in own])
    numbers = tuple([each.number for each in live if each.number is not None])
    batch = Batch.uniform(numbers, tuple(positions), len(words[0]), heads)
    return Forward(model.role, tokens, min(positions), model.span, None, heads * len(live), model.unit, batch=batch)


def verify(
    model: Model, text: Sequence[int], guesses: Sequence[Guess], sampled: bool, room: int | None = None
) -> Generator[Step, Any, tuple[int, int]]:
    """Check the drafted tokens in one pass: how many are kept, of at most `room`, and the model's own token that follows them."""
    out = yield look(model, text, guesses)
    return (yield from judge(out, guesses[:room], sampled, -len(guesses) - 1))


def look(model: Model, text: Sequence[int], guesses: Sequence[Guess], unread: int = 1) -> Forward:
    """The pass over the drafted tokens, and over so many of the text's last that the model has not read."""
    width = (*text[-unread:], *[guess.token for guess in guesses])
    return Forward(model.role, width, len(text) - unread, model.span, None, len(guesses) + 1, model.unit)


def judge(
    out: Any, guesses: Sequence[Guess], sampled: bool, first: int | None = None
) -> Generator[Step, Any, tuple[int, int]]:
    """What a pass over drafted tokens says of them: how many are kept, and the model's own token that follows them.

    The first of them is judged by the position of the pass whose index, from its end, is `first`; in a pass over nothing but one
    text there is one for each and one more.
    """
    count = len(guesses)
    begin = -count - 1 if first is None else first
    for index, guess in enumerate(guesses):
        offset = begin + index
        if not sampled:
            own = yield Read("next", out, offset)
            if own != guess.token:
                return index, own
            continue
        p = yield Read("probability", out, offset, token=guess.token)
        q = yield Read("probability", guess.output, guess.offset, token=guess.token)
        if not (yield Read("uniform", out, offset)) < p / q:
            return index, (yield Read("residual", out, offset, against=guess.output, against_offset=guess.offset))
    return count, (yield Read(SAMPLED if sampled else GREEDY, out, begin + count))


def commit(
    text: list[int], guesses: Sequence[Guess], kept: int, token: int, stop: Collection[int] = (), number: int | None = None
) -> Steps:
    """Commit what a round gave: the drafted tokens that were kept and one more, up to one that ends sequences, of `stop`."""
    new = [*[guess.token for guess in guesses[:kept]], token]
    new = ended(new, stop)
    text += new
    yield Commit("round", tuple(new), len(guesses), sequence=number)
