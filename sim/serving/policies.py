"""Policies of draft length by the names that users give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.methods import registry
from model.methods.draft_model import MAX_DRAFT
from model.serving import draft_policies
from model.serving.draft_policies import DraftPolicy
from model.serving.step_prices import StepPrices
from sim.advice.engine_settings import Range
from sim.serving import served_methods
from sim.serving.served_methods import MethodSettings

Floats = NDArray[np.float64]

KINDS = {
    "off": "one of: off, plain decoding", "static": "static:K, the same draft length at every load",
    "vllm": "vllm:[[1,64,3],[65,512,0]], a draft length by running sequences",
    "sglang": 'sglang, or sglang:{"1":[1,3],"32":[0,1]}: its adaptive rule',
    "goodput": "goodput, or goodput:K at most: the most expected tokens per second (SmartSpec)",
    "schedule": "schedule, the best draft lengths by running sequences in closed form, as `--settings` prints them",
    "dspark": "dspark, or dspark:K at most: drafted tokens are admitted by their survival",
    "oracle": "oracle, or oracle:K at most: knows what will be accepted; no engine can",
    "pearl": "pearl:K, K tokens drafted during each pass of the target, with --placement separate",
    **{kind: f"{text}" for kind, text in served_methods.EXAMPLES.items()},
}  # fmt: skip
_DIGITS = re.compile("[0-9]{1,9}")
OF_ANY_CHAIN = ("vllm", "sglang", "goodput", "oracle")
"""Policies of any chain, also of one that the draft of the server does not draft."""
OF_ENGINES = ("off", "static", "vllm", "sglang")
"""Policies that engines have, over which a printed schedule gains."""
OWN = "schedule"
"""The policy that follows the schedule in closed form."""
CONCURRENT = "pearl"
"""The policy that drafts during the target's passes."""
MOST = 8
"""Largest draft length of policies that choose, unless they are given one, or acceptance is known for fewer."""


Make = Callable[["Surroundings"], DraftPolicy]
_Policy = TypeVar("_Policy", bound=DraftPolicy)


@dataclass(frozen=True)
class PolicyName:
    """A policy as it was named; `longest` is its largest draft length."""

    text: str
    longest: int
    make: Make
    method: MethodSettings | None = None
    """Settings of a method of its own; None: a chain from the draft."""
    concurrent: bool = False
    """True if tokens are drafted during the target's pass."""

    @property
    def kind(self) -> str:
        """The name without its settings."""
        return self.text.partition(":")[0]


class Surroundings(NamedTuple):
    """What policies are made from."""

    prices: StepPrices
    draft_passes: Callable[[int], int]
    most: int
    """Largest number of running sequences."""
    rates: Floats
    """Conditional acceptance rates by draft position, which a calibrated draft's confidences show."""
    ranges: Sequence[Range] = ()
    """The schedule in closed form."""


def uses_draft(text: str) -> bool:
    """True if a policy needs the draft.

    >>> [uses_draft(text) for text in ("off", "static:3", 'early-exit:{"exit_layer":8}', 'tree:{"shape":"chain"}')]
    [False, True, False, True]
    """
    return uses_acceptance(text) or text.partition(":")[0] in served_methods.BY_THE_DRAFT


def uses_acceptance(text: str) -> bool:
    """True if a policy drafts chains, whose acceptance must be known; other methods have outcomes of their own.

    >>> [uses_acceptance(text) for text in ("off", "static:3", 'early-exit:{"exit_layer":8}', 'tree:{"shape":"chain"}')]
    [False, True, False, False]
    """
    kind = text.partition(":")[0]
    return kind != "off" and kind not in served_methods.KINDS


def named(text: str, known: int | None = None) -> PolicyName:
    """Read the name of a policy; `known` is the largest draft length that acceptance is known for.

    >>> named("static:3").longest, named("vllm:[[1,64,3],[65,512,0]]").longest, named("goodput", 4).longest
    (3, 3, 4)
    """
    kind, colon, rest = text.partition(":")
    if kind in served_methods.KINDS:
        settings = served_methods.settings_of(kind, rest, text)
        return PolicyName(text, settings.longest, _of_method(kind, settings), settings)
    alone, needing = kind in ("off", OWN), kind in ("static", "vllm", CONCURRENT)
    if kind not in KINDS or (alone and colon) or (needing and not rest) or (colon and not rest):
        raise ParameterError(f"policy must be {'; '.join(KINDS.values())}; got {checks.shown(text)}{_about(kind)}")
    if kind == "off":
        found = PolicyName(text, 0, lambda *_: draft_policies.Static(0))
    elif kind == "static":
        length = _whole(rest, text)
        found = PolicyName(text, length, lambda *_: draft_policies.Static(length))
    elif kind == CONCURRENT:
        length = _whole(rest, text)
        checks.whole(f"draft length of policy {text}", length, 1, (MAX_DRAFT + 1) // 2)
        # The acceptance of the first drafted token holds at every position.
        return PolicyName(text, length, lambda *_: draft_policies.Static(length), concurrent=True)
    elif kind == "vllm":
        ranges: Any = _json(rest, text)
        policy = _made(text, lambda: draft_policies.BatchSchedule(ranges))
        found = PolicyName(text, policy.longest, lambda *_: draft_policies.BatchSchedule(ranges))
    elif kind == "sglang":
        slots = _slots(rest, text)
        longest = _made(text, lambda: draft_policies.Adaptive(slots)).longest
        found = PolicyName(text, longest, lambda *_: draft_policies.Adaptive(slots))
    else:
        longest = _whole(rest, text) if rest else min(MOST, MOST if known is None else known)
        found = PolicyName(text, longest, _CHOOSING[kind](longest))
    if known is not None and found.longest > known:
        raise ParameterError(
            f"policy {text} drafts up to {found.longest} tokens, and acceptance is known up to {known}; draft fewer"
        )
    return found


def _of_method(kind: str, settings: MethodSettings) -> Make:
    """Draft lengths of a method: those of the policy among its settings, or always the longest."""
    text = getattr(settings, "policy", None)
    if text is None:
        return lambda *_: draft_policies.Static(settings.longest)
    if not isinstance(text, str) or text.partition(":")[0] not in OF_ANY_CHAIN:
        known = "; ".join(KINDS[each] for each in OF_ANY_CHAIN)
        raise ParameterError(f"{kind}.policy must be {known}; got {checks.shown(text)}")
    if text in _CHOOSING:
        text = f"{text}:{settings.longest}"
    found = named(text)
    if found.longest > settings.longest:
        raise ParameterError(
            f"{kind}.policy must draft at most draft_length={settings.longest} tokens, got {checks.shown(text)}, which drafts up to"
            f" {found.longest}; raise draft_length, or draft fewer"
        )
    return found.make


def _about(kind: str) -> str:
    """What to say of the name of a method that is no policy.

    >>> _about("ppd"), _about("speculative"), _about("fast")
    (': servers do not decode it, `sim run ppd` decodes one request', ', which is policy static', '')
    """
    if kind in _SERVED_AS:
        return f", which is policy {_SERVED_AS[kind]}"
    return f": servers do not decode it, `sim run {kind}` decodes one request" if kind in registry.names() else ""


_SERVED_AS = {"autoregressive": "off", "speculative": "static", "self_speculative": "self-speculative", "early_exit": "early-exit"}
_CHOOSING: dict[str, Callable[[int], Make]] = {
    "schedule": lambda longest: lambda of: draft_policies.BatchSchedule([tuple(each) for each in of.ranges]),
    "goodput": lambda longest: lambda of: draft_policies.Goodput(longest, of.prices, of.draft_passes),
    "dspark": lambda longest: lambda of: draft_policies.AdmittedBySurvival(
        of.rates[:longest], of.prices, of.draft_passes, of.most
    ),
    "oracle": lambda longest: lambda of: draft_policies.Oracle(longest, of.prices, of.draft_passes),
}


def _made(policy: str, make: Callable[[], _Policy]) -> _Policy:
    """Make a policy; its errors get its name, as several may be given."""
    try:
        return make()
    except ParameterError as error:
        raise ParameterError(f"policy {checks.shown(policy)}: {error}") from None


def _whole(text: str, policy: str) -> int:
    if not _DIGITS.fullmatch(text) or int(text) < 1:
        raise ParameterError(f"policy {policy}: the draft length must be a whole number of at least 1, got {checks.shown(text)}")
    checks.whole(f"draft length of policy {policy}", int(text), 1, MAX_DRAFT)
    return int(text)


def _json(text: str, policy: str) -> object:
    try:
        return bounded_files.json_of(text)
    except ValueError:
        raise ParameterError(f"policy {policy}: it must be JSON after the colon, got {checks.shown(text)}") from None


def _slots(text: str, policy: str) -> dict[int, list[int]] | None:
    if not text:
        return None
    found = _json(text, policy)
    right = isinstance(found, dict) and all(isinstance(each, list) and _DIGITS.fullmatch(key) for key, each in found.items())
    if not isinstance(found, dict) or not right:
        example = '{"1":[1,3],"32":[0,1]}'
        raise ParameterError(f"policy {policy}: it must be an object of lists, such as {example}, got {checks.shown(found)}")
    return {int(key): each for key, each in found.items()}
