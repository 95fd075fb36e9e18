"""What real models said, said again: a world that answers each read as it was answered during a recorded decoding.

The simulator on it plays the run again, pass by pass: the same commits, the same account of passes. What it adds is a clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from model.base import table_records
from model.logs.recorded_decoding import Answered, Decoding, Question, question
from model.methods import registry
from model.steps import Read, Steps


class UnloggedError(LookupError):
    """A read that nobody has logged: the algorithm that is replayed is not the one that was recorded, or went another way."""


class Replayed:
    """Answers reads with what was logged for the same question; the first one first where a question was asked several times.

    A question is known by its pass (model, layer, position, tokens) and by what it asks about, not by who asks it. So methods whose
    processes ask the same of different texts, which is Predictive Pipelined Decoding in its nested form, can be replayed on the
    clock of the recorded run alone (`model.interpret.interpreter.Interpreter`: layers take one each): there they ask in the same
    order.

    >>> from model.steps import Forward, LayerSpan
    >>> step = Forward("target", (7,), 0, LayerSpan(0, 4), heads=1)
    >>> world = Replayed([Answered(question(Read("next", None), step), 9)])
    >>> world.read(Read("next", step)), world.left
    (9, 0)
    >>> world.read(Read("next", step))
    Traceback (most recent call last):
        ...
    model.logs.replay.UnloggedError: nobody has logged a further next of the target behind layer 4 at position 1, of the pass over
    ...
    """

    def __init__(self, reads: Iterable[Answered]) -> None:
        self.answers: dict[Question, deque[Any]] = defaultdict(deque)
        for each in reads:
            self.answers[each.question].append(each.answer)
        self.written: Sequence[int] = ()
        """What has been put out so far; an interpreter puts its own list here."""
        self.generated: Mapping[int, Sequence[int]] = {}
        """The same of each sequence of a batch."""

    @property
    def left(self) -> int:
        """How many answers nobody has asked for yet."""
        return sum(map(len, self.answers.values()))

    def read(self, step: Read) -> Any:
        """The answer to a read of an output, which in worlds without tensors is the pass that made it."""
        asked = question(step, step.output)
        try:
            return self.answers[asked].popleft()
        except IndexError:
            raise UnloggedError(_said(asked)) from None


def _said(asked: Question) -> str:
    about = f" about token {asked.token}" if asked.token is not None else ""
    about += f", sequence {asked.sequence} of the batch" if asked.sequence else ""
    return (
        f"nobody has logged a further {asked.kind} of the {asked.role} behind layer {asked.layer} at position"
        f" {asked.position}{about}, of the pass over {[*asked.tail]} at {asked.at}"
    )


def parameters_of(decoding: Decoding) -> Any:
    """The method's parameters, checked again."""
    return table_records.build(registry.parameters(decoding.method), dict(decoding.settings), "settings")


def told(decoding: Decoding) -> str:
    """The parameters that are not as the method has them anyway, without the depths of the models: what tables call a choice."""
    usual = {field.name: field.default for field in fields(parameters_of(decoding))}
    own = {key: value for key, value in decoding.settings.items() if key not in _KNOWN and value != usual.get(key)}
    return ", ".join(f"{key}={value}" for key, value in own.items())


_KNOWN = ("layers", "draft_layers", "medium_layers", "prompt", "sequence_length")


def steps_of(decoding: Decoding) -> Steps:
    """The algorithm that was decoded with, at its beginning. Interpret it until as many tokens are out as there were."""
    module = registry.algorithm(decoding.method)
    more = {} if not decoding.stop else {"stop": decoding.stop}
    steps: Steps = module.decode(parameters_of(decoding), decoding.prompt, decoding.max_tokens, **more)
    return steps
