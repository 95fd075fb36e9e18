"""A hidden true text and coins by position: what a model would answer, for interpreters that have none.

The true token at cache position t is the integer t, and a wrong one is negative, so that methods compare tokens as they would
compare real ones. What is read after a wrong token is wrong, so the last token of a pass tells whether all before it were right.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.steps import Forward, Read

Token = int


Output = tuple[Token, int, int]
"""What a pass leaves behind: the last token it saw, at which position, and up to which layer it has come."""


def output(step: Forward) -> Output:
    """The output of a pass."""
    return step.tokens[-1], step.at + len(step.tokens) - 1, step.last


class World:
    """Answers reads: `matches[j]` says which of the early candidates for the j-th output token is the true one.

    They count from 1; 0 (or False) is none of them, and True the first. Beyond the last of `matches` nothing matches. Which one it
    is matters only where sub-processes wait for units.
    """

    def __init__(self, prompt: int, layers: int, matches: Sequence[int]) -> None:
        self.prompt = prompt
        self.layers = layers
        self.matches = matches

    def read(self, step: Read) -> Token | list[Token]:
        """The answer to a read of an output of the target model."""
        if step.offset != -1:
            raise ValueError(f"this world remembers the last token of a pass only, and was asked about offset {step.offset}")
        output: Output = step.output
        token, at, layer = output
        after = at + 1
        right = token == at
        if step.kind == "next":
            return after if right and layer == self.layers else -after
        # Wrong candidates differ from each other, and from the -after that a wrong prediction is.
        wrong = -after - 1
        candidates = [*range(wrong, wrong - step.width, -1)]
        place = after - self.prompt
        if right and place < len(self.matches) and self.matches[place]:
            candidates[self.matches[place] - 1] = after
        return candidates
