"""Expected work of methods that draft and verify concurrently, of several laws together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from model.interpret.account import Totals, Work


class ModelPasses(NamedTuple):
    """Expected passes of one model, in one layer: numbers, or arrays of equal shape.

    Parameters
    ----------
    passes, tokens
        Passes, and the tokens that they read.
    attended
        Pairs of a token and a position that it attends to.
    read
        Cached positions read, once per pass.
    heads
        Tokens whose logits are computed.
    """

    passes: Any
    tokens: Any
    attended: Any
    read: Any
    heads: Any

    @classmethod
    def single(cls, passes: Any, read: Any) -> ModelPasses:
        """Passes over one token each, which attends to all positions that its pass reads."""
        return cls(passes, passes, read, read, passes)

    def totals(self, layers: int) -> Totals:
        """Totals over all layers of the model.

        >>> ModelPasses(2, 5, 9, 6, heads=4).totals(10).layer_passes
        50
        """
        passes, tokens, attended, read, heads = self
        runs, by_token = layers * passes, layers * tokens
        return Totals(passes, runs, by_token, layers * attended, layers * read, head_runs=passes, heads=heads)


def expected_work(
    layers: int, draft_layers: int, parts: Sequence[Sequence[Any]],
    passes_of: Callable[[list[Any]], tuple[ModelPasses, ModelPasses]],
) -> Work:  # fmt: skip
    """Work of target and draft model under several laws, as arrays; a draft model that makes no pass is left out, as in an account.

    Parameters
    ----------
    layers, draft_layers
        Layers of target and draft model.
    parts
        Equally likely parts of each law, such as the chains of records; all are evaluated together.
    passes_of
        Passes of both models under each of a list of parts; of several costs with a leading axis of these.

    >>> def passes_of(rates):
    ...     passes = 1 / np.array(rates)
    ...     return ModelPasses(*[passes] * 5), ModelPasses.single(0 * passes, 0 * passes)
    >>> expected_work(2, 1, [[0.5, 0.25], [0.5]], passes_of).by_model["target"].layer_runs.tolist()
    [6.0, 4.0]
    """
    sizes = np.array([len(each) for each in parts])
    begins = np.cumsum(sizes) - sizes
    target, draft = (
        ModelPasses(*(np.add.reduceat(values, begins, axis=-1) / sizes for values in model))
        for model in passes_of([part for each in parts for part in each])
    )
    by_model = {"target": target.totals(layers)}
    return Work(by_model | ({"draft": draft.totals(draft_layers)} if draft.passes.any() else {}))
