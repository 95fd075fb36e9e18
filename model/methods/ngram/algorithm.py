"""N-gram drafts: tokens that followed the last ones earlier in prompt and output are verified in one pass.

Before each pass the last tokens of the text are looked up in it (`model.interpret.text_lookup`). Where they occurred before, what
followed there is drafted and verified as in speculative decoding; where they did not, the pass is a plain one. Drafting costs no
pass of a model, and the number of drafted tokens is known before the pass. The draft is no random choice: in sampling a drafted
token is accepted with its probability in the target, where the target's own draw equals it. So the output has exactly the target's
distribution, and with the same random numbers it is the target's own text.

Known as prompt lookup decoding [Saxena2023], n-gram speculation in vLLM and SGLang, `prompt_lookup_num_tokens` in transformers.
Suffix decoding [Oliaro2024] lets a longer match draft more tokens, at most `length_factor` for each matching token; it looks up
other requests' outputs too, which is not modelled here: a law of lookups can contain them.

[Saxena2023] A. Saxena. Prompt Lookup Decoding. https://github.com/apoorvumang/prompt-lookup-decoding, 2023.
[Oliaro2024] G. Oliaro et al. SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications. arXiv:2411.04975.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.methods.claim_bounds import NO_DRAFT, ClaimRule
from model.methods.draft_model import MAX_DRAFT
from model.methods.method_parameters import CONTINUOUS, LOCKSTEP, MethodParameters
from model.methods.proposals import Known, Proposals
from model.methods.speculative.algorithm import DraftedToken, Model, commit, verification_pass, verify
from model.steps import DraftLimit, DraftRounds, Forward, Lookup, Step, Steps

MAX_MATCH = 1000
"""Largest number of tokens that are looked up."""


@dataclass(frozen=True)
class Parameters(MethodParameters):
    """Parameters of n-gram drafts.

    Parameters
    ----------
    layers
        Layers of the target.
    draft_length
        Largest number of drafted tokens of a round.
    min_match, max_match
        Smallest and largest number of last tokens that are looked up; the longest match is taken.
    length_factor
        Largest number of drafted tokens per matching token, as in suffix decoding; None: no such limit.
    sampled
        Sample tokens instead of greedy decoding.
    sequences
        Sequences of a full batch.
    batching
        `continuous` or `lockstep`. A pass costs as much as if all sequences drafted as many tokens. Where its time grows linearly
        with its tokens, the mean time of steps whose sequences draft different numbers is the same; where it grows faster, less.
    """

    layers: int
    draft_length: int
    min_match: int = 1
    max_match: int = 2
    length_factor: float | None = None
    sampled: bool = False

    LABEL = "n-gram drafts"
    SHORT_LABEL = "n-gram"
    OUTCOMES = ("lookup",)
    COSTS = ("verify_cost",)
    EXACT = True
    BATCHINGS = (CONTINUOUS, LOCKSTEP)
    REFUSAL_REASON = "static batches, whose sequences draft different numbers of tokens in one pass, are not implemented"
    REMOVED_KEYS = MappingProxyType({
        **MethodParameters.REMOVED_KEYS,
        "context_budget": "drafts are looked up in the text, without passes that read a cache; leave it out",
    })
    ALIASES = MappingProxyType({
        "num_speculative_tokens": "draft_length", "prompt_lookup_num_tokens": "draft_length", "prompt_lookup_min": "min_match",
        "prompt_lookup_max": "max_match", "max_matching_ngram_size": "max_match",
        "suffix_decoding_max_spec_factor": "length_factor",
    })  # fmt: skip
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length"),
        needs=(("mean_acceptance_length", "draft_acceptance_rate", "acceptance_rate"),),
        source="tokens per pass of the target, which verifies drafts that cost no pass: Leviathan et al., ICML 2023, with c = 0",
        names={
            "n-gram": NO_DRAFT, "ngram speculation": NO_DRAFT, "prompt lookup": NO_DRAFT, "prompt lookup decoding": NO_DRAFT,
            "pld": NO_DRAFT, "suffix decoding": NO_DRAFT, "rest": NO_DRAFT,
        },
        readings={"acceptance_rate": "draft_acceptance_rate"},
    )  # fmt: skip

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Nothing: how often a text repeats itself is not known from the acceptance of a draft model."""
        return Proposals(missing="how often outputs repeat earlier text: `calibrate rates` counts it, `sim run ngram` takes it")

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("draft_length", self.draft_length, 1, MAX_DRAFT)
        checks.whole("min_match", self.min_match, 1, MAX_MATCH)
        checks.whole("max_match", self.max_match, 1, MAX_MATCH)
        if self.min_match > self.max_match:
            raise checks.ParameterError(
                f"min_match must be at most max_match={self.max_match}, got {self.min_match}; the longest match is taken"
            )
        if self.length_factor is not None:
            checks.number("length_factor", self.length_factor, 0, MAX_DRAFT)
            if self.length_factor * self.max_match < 1:
                raise checks.ParameterError(
                    f"length_factor must be at least 1/max_match={1 / self.max_match:.4g}, got {self.length_factor:g}; else no"
                    " match drafts a token"
                )
        checks.flag("sampled", self.sampled)
        self.check_batching()

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens in a round."""
        return self.draft_length

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target."""
        return self.draft_length + 1

    @property
    def overrun(self) -> int:
        """Positions after the end that a pass may reach."""
        return 0 if self.cut else self.draft_length

    @property
    def cut(self) -> bool:
        """True if the last drafts are cut to the remaining tokens; False in continuous batching, as in speculative decoding."""
        return self.sequences == 1 or self.batching != CONTINUOUS

    def drafted_after(self, match: int) -> int:
        """Drafted tokens after a match of this length, where the text goes on for long enough; 0 below `min_match`.

        >>> [Parameters(32, 5, min_match=2, max_match=4, length_factor=1.5).drafted_after(match) for match in (0, 1, 2, 3, 4)]
        [0, 0, 3, 4, 5]
        """
        return self.lookup((), self.draft_length).most(match) if match >= self.min_match else 0

    def lookup(self, tokens: Sequence[int], longest: int) -> Lookup:
        """Lookup of the last tokens of a text."""
        return Lookup(tokens, self.min_match, self.max_match, longest, self.length_factor)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    sequence, end, target = list(prompt), len(prompt) + tokens, Model("target", parameters.layers, 0)
    if len(sequence) > 1:
        yield Forward("target", tuple(sequence[:-1]), 0, target.span)
    if not (stop or parameters.sampled):
        first, verify_none = parameters.lookup(sequence, parameters.draft_length), verification_pass(target, sequence, ())
        if (yield DraftRounds(first, verify_none, parameters.draft_length, tokens, parameters.cut, ("round",) * 3)) is not None:
            return
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        room = end - len(sequence) - 1
        guesses = yield from draft(parameters, sequence, room, stop)
        kept, token = yield from verify(target, sequence, guesses, parameters.sampled, room)
        yield from commit(sequence, guesses, kept, token, stop)


def draft(
    parameters: Parameters, sequence: Sequence[int], room: int, stop: Collection[int]
) -> Generator[Step, Any, list[DraftedToken]]:
    """Draft what followed the last tokens earlier in the text, up to a token that ends a text: the target decides on the end."""
    longest = yield DraftLimit(min(parameters.draft_length, room) if parameters.cut else parameters.draft_length)
    if not longest:
        return []
    found = yield parameters.lookup(sequence, longest)
    if stop:
        found = takewhile(lambda token: token not in stop, found)
    return [DraftedToken(token, None) for token in found]
