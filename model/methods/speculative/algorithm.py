"""Speculative decoding: a small draft model proposes tokens, the target model verifies all of them in one pass.

Algorithm 1 of [Leviathan2023] (Algorithm 2 of [Chen2023] is the same in other notation). In greedy decoding a drafted token is
accepted if it is the target's own choice. In sampling it is accepted with probability min(1, p/q); the first rejected token is
replaced by a sample from norm(max(0, p - q)), which keeps the target's distribution exactly. A round emits one token more than it
accepts. The last drafts are cut to the remaining tokens.

Static batches: all sequences draft together and are verified in one pass. They accept different numbers of tokens, so their
positions differ. A round drafts the same number of tokens for all sequences, limited by the sequence with the most remaining
tokens; drafted tokens after the end of a sequence are ignored. Ended sequences leave the batch; the next batch begins when all have
ended. In continuous batching one sequence is decoded, and its drafts are never cut (`model/methods/batching.py`).

What drafts is the `drafter`:

* `model`: a smaller model of its own, one pass per drafted token.
* `heads`: a draft head such as EAGLE's [Li2024] or an MTP module [DeepSeek2024], one pass per drafted token. A pass of the head
  over a token reads the target's state at the position before it, so the first pass of a round waits for the verification: it
  reads the accepted tokens and the target's own with the states of the verification, `accepted + 1` tokens. The other passes read
  the head's own states. Their cache rows are discarded, and the accepted tokens are read again with the target's states. Engines
  read all K + 1 verified positions in a pass of fixed shape (vLLM's padded drafter batch, SGLang's draft extend under CUDA
  graphs), where the rows of rejected tokens are work without effect. The algorithm reads only what was accepted: its output is the
  same, and its work is the least that the head needs.
* `parallel`: all tokens in one pass, as by P-EAGLE [Hui2026], Medusa's heads as a chain [Cai2024] or a block diffusion model. The
  pass reads the accepted tokens with the target's states, as the first pass of `heads`, and a mask for each drafted token but the
  first, K + accepted tokens in all. Drafted tokens do not depend on each other, so fewer are accepted.

How sampled drafts are accepted is the `verification`:

* `token`: token by token, as above.
* `block`: the longest block of drafted tokens that passes a joint test, Algorithm 2 of [Sun2024]. The output keeps the target's
  distribution, and P(at least i accepted | first i drafted tokens) is never smaller than token by token, for any i. This is a
  statement in law: with the same random numbers a single round may accept fewer tokens. How often i tokens are accepted depends on
  the distributions of both models and not only on an acceptance rate (`model/methods/speculative/block_verification.py`).

Heads and parallel drafts share the target's unit, because they read its states, and decode one sequence (or a batch that is kept
full).

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Li2024] Y. Li et al. EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty. ICML 2024, arXiv:2401.15077.
[DeepSeek2024] DeepSeek-AI. DeepSeek-V3 Technical Report. arXiv:2412.19437, Section 2.2.
[Hui2026] vLLM blog, 2026-03-13: P-EAGLE, parallel drafting.
[Cai2024] T. Cai et al. Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads. ICML 2024,
arXiv:2401.10774.
[Chen2023] C. Chen et al. Accelerating Large Language Model Decoding with Speculative Sampling. arXiv:2302.01318.
[Sun2024] Z. Sun et al. Block Verification Accelerates Speculative Decoding. ICLR 2025, arXiv:2403.10444.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from model.base import checks
from model.methods import batching
from model.methods.claim_bounds import NO_DRAFT, ClaimRule
from model.methods.draft_model import COLOCATED, MAX_DRAFT, BudgetedDraft, DraftModel
from model.methods.formula_check import FormulaCheck
from model.methods.method_parameters import BATCHING, CONTINUOUS, STATIC
from model.methods.proposals import Known, Proposal, Proposals
from model.outcomes.outcome_laws import Chain
from model.steps import (
    GREEDY,
    MASK,
    SAMPLED,
    Batch,
    Commit,
    DraftChain,
    DraftLimit,
    DraftRounds,
    Features,
    Forward,
    LayerSpan,
    Read,
    ReadEach,
    Step,
    Steps,
    ended,
)

MODEL, HEADS, PARALLEL = DRAFTERS = ("model", "heads", "parallel")
TOKEN, BLOCK = VERIFICATIONS = ("token", "block")


@dataclass(frozen=True)
class Parameters(batching.StaticBatching, BudgetedDraft, DraftModel):
    """Parameters of speculative decoding.

    Parameters
    ----------
    layers
        Layers of the target model.
    draft_length
        Drafted tokens per round (gamma).
    sampled
        Sample tokens instead of greedy decoding.
    drafter
        `model`: a draft model. `heads`: a draft head that reads the target's states, one pass per drafted token. `parallel`: a
        draft that reads them and drafts all tokens in one pass.
    verification
        `token`: each drafted token is accepted or rejected by a test of its own. `block`: the drafted tokens are accepted jointly;
        needs `sampled`, and acceptance by draft position that was measured or computed with it.
    placement
        `colocated`: draft and target share a unit; `separate`: each has its own unit.
    draft_layers
        Layers of the draft model. Its time is set by the scenario's `cost_ratio`, not by its depth.
    sequences
        Sequences of a full batch.
    batching
        `continuous`, `static` or `lockstep`.
    lengths
        Tokens of each sequence of static batches, if they differ; the largest equals the scenario's `tokens`.
    context_budget
        Largest number of cached positions of each sequence that a pass of the draft model reads; None: all.
    """

    layers: int
    draft_length: int
    sampled: bool = False
    drafter: str = MODEL
    verification: str = TOKEN

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
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length", "draft_passes", "cost_ratio"),
        needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"), ("cost_ratio",)),
        source="Theorem 3.8 of Leviathan et al., ICML 2023, arXiv:2211.17192",
        names={
            "speculative sampling": "", "draft model": "", "sd": "", "vanilla sd": "", "eagle": "eagle", "eagle-1": "eagle",
            "eagle-2": "eagle", "eagle-3": "eagle3", "p-eagle": "p-eagle", "hass": "eagle", "mtp": "mtp", "nextn": "mtp",
            "multi-token prediction": "mtp", "medusa": "medusa", "medusa-1": "medusa", "medusa-2": "medusa", "hydra": "",
            "redrafter": "", "kangaroo": "", "assisted generation": "",
            "lookahead": NO_DRAFT, "lookahead decoding": NO_DRAFT,
        },
        fixed_drafts=True, readings={"acceptance_rate": "draft_acceptance_rate"},
    )

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Block verification with every draft length for which its acceptance is known; advice itself is about drafts by token."""
        if known.block_rates is None:
            return Proposals(missing="its block verification: acceptance by draft position measured with it, --block-acceptance")
        rates = known.block_rates
        drafter = MODEL if known.independent_draft else PARALLEL if known.parallel_draft else HEADS
        common = {"layers": known.layers, "sampled": True, "verification": BLOCK, "drafter": drafter}
        return Proposals(tuple(
            Proposal(
                common | {"draft_length": length}, {"kind": "by-draft-position", "acceptance_rates": [*rates[:length]]},
                setting=f"K = {length}", variant="block verification",
            )
            for length in known.draft_lengths if length <= len(rates)
        ))  # fmt: skip

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 0, MAX_DRAFT)
        checks.flag("sampled", self.sampled)
        checks.one_of("drafter", self.drafter, DRAFTERS)
        checks.one_of("verification", self.verification, VERIFICATIONS)
        if self.verification == BLOCK and not self.sampled:
            raise checks.ParameterError(
                f"verification must be '{TOKEN}' with sampled=false, got '{BLOCK}': a greedy draft is accepted where it is the"
                " target's own choice; set sampled = true, or leave verification out"
            )
        self.check_models()
        self.check_batching()
        self.check_budgets()
        self._check_drafter()

    def _check_drafter(self) -> None:
        if self.drafter == MODEL:
            return
        if self.placement != COLOCATED:
            raise checks.ParameterError(
                f"placement must be '{COLOCATED}' with drafter='{self.drafter}', which reads the target's states, got"
                f" {self.placement!r}; set placement, or drafter = '{MODEL}'"
            )
        if self.sequences > 1 and self.batching == STATIC:
            raise checks.ParameterError(
                f"batching must be 'continuous' or 'lockstep' with drafter='{self.drafter}' and sequences={self.sequences}, got"
                f" '{STATIC}': the states of sequences that accept different numbers of tokens are not batched; set batching"
            )

    def check_law(self, outcome: str, law: Any) -> None:
        """Reject laws of single tokens with block verification, whose accepted length they do not determine."""
        if self.joint_verification and isinstance(law, Chain):
            raise checks.ParameterError(
                f"outcomes of {outcome} must be by position within the draft with verification='{BLOCK}', got outcomes of single"
                " tokens: the rate at which tokens are accepted one by one does not determine how many are accepted jointly, only a"
                " lower bound of it; choose kind 'by-draft-position', 'levels', 'curve' or 'rounds', measured with block"
                f" verification, or 'distributions'; or set verification = '{TOKEN}', whose speed-up is the lower bound"
            )

    @property
    def joint_verification(self) -> bool:
        """True with block verification."""
        return self.verification == BLOCK

    @property
    def reads_states(self) -> bool:
        """True if the draft reads the target's states."""
        return self.drafter != MODEL

    @property
    def drafts_in_one_pass(self) -> bool:
        """True if one pass of the draft drafts all tokens of a round."""
        return self.drafter == PARALLEL

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens in a round."""
        return self.draft_length

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target, over all sequences that are decoded together."""
        return self.concurrent_sequences * (self.longest_draft + 1)

    @property
    def predicts_lengths_together(self) -> bool:
        """True if closed forms take several numbers of tokens together: those of a sequence, or of a batch of equal ones."""
        return self.decoded_sequences == 1 or (self.lengths is None and self.sequences <= batching.MOST_ALIKE)

    @property
    def overrun(self) -> int:
        """Positions after the end of the longest sequence that a pass may reach, because drafts of a batch have equal length."""
        return self.longest_draft if self.concurrent_sequences > 1 or not self.cut else 0

    @property
    def cut(self) -> bool:
        """True if the last drafts of a sequence are cut to its remaining tokens.

        False in continuous batching: an engine drafts the same number of tokens for every sequence in each step.
        """
        return self.sequences == 1 or self.batching != CONTINUOUS


class DraftedToken(NamedTuple):
    """A drafted token, and the draft model's output and offset that it was read from (its distribution, if sampled).

    Without an output no model drafted it: its distribution is the token itself.
    """

    token: int
    output: Any
    offset: int = -1


@dataclass
class RunningSequence:
    """A sequence during decoding.

    Parameters
    ----------
    tokens
        Prompt and output so far.
    end
        Length of prompt and output together.
    rows
        Positions in the draft model's KV cache.
    number
        Index in the batch; None if it is decoded alone.
    """

    tokens: list[int]
    end: int
    rows: int
    number: int | None = None

    @property
    def room(self) -> int:
        """Drafted tokens that it can use; the target emits the last token."""
        return self.end - len(self.tokens) - 1


def decode(
    parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = (), prompts: Sequence[Sequence[int]] = ()
) -> Steps:
    """Decode `tokens` tokens, or `lengths` of each sequence, after a prompt of at least one token.

    A sequence also ends with a token of `stop`. All sequences have the same prompt, or separate `prompts`. In continuous batching
    and in lockstep one sequence is decoded.
    """
    parameters.check_tokens(tokens)
    if parameters.decoded_sequences > 1:
        yield from _in_batches(parameters, prompt, tokens, stop, prompts)
        return
    prompt = prompts[0] if prompts else prompt
    if parameters.reads_states:
        yield from _with_states(parameters, prompt, tokens, stop)
        return
    sequence, end = list(prompt), len(prompt) + tokens
    drafter, target = (yield from start(parameters, sequence)), Model("target", parameters.layers, 0)
    if not (stop or parameters.sampled):
        first = draft_pass(drafter, tuple(sequence[drafter.rows :]))
        verify_none = verification_pass(target, sequence, ())
        if (yield DraftRounds(first, verify_none, parameters.draft_length, tokens, parameters.cut, ("round",) * 3)) is not None:
            return
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        room = end - len(sequence) - 1
        length = yield DraftLimit(min(parameters.draft_length, room) if parameters.cut else parameters.draft_length)
        guesses = yield from draft(drafter, sequence, length)
        kept, token = yield from verify(target, sequence, guesses, parameters.sampled, room, parameters.verification)
        yield from commit(sequence, guesses, kept, token, stop)
        drafter.rows = min(drafter.rows, len(sequence) - 1)


def _with_states(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int]) -> Steps:
    """Decode with a draft that reads the target's states: draft heads, or a parallel draft."""
    sequence, end = list(prompt), len(prompt) + tokens
    target = Model("target", parameters.layers, 0)
    head = Model("draft", parameters.draft_layers, 0, len(sequence) - 1, parameters.sampled)
    states = yield from read_with_states(target, head, sequence)
    draft_by = draft_in_one_pass if parameters.drafter == PARALLEL else draft_by_head
    if draft_by is draft_by_head and not (stop or parameters.sampled):
        first = Forward(head.role, tuple(sequence[head.rows :]), head.rows, head.span, states, 1, head.unit)
        verify_none = verification_pass(target, sequence, ())
        if (yield DraftRounds(first, verify_none, parameters.draft_length, tokens, parameters.cut, ("round",) * 3)) is not None:
            return
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        room = end - len(sequence) - 1
        longest = min(parameters.draft_length, room) if parameters.cut else parameters.draft_length
        length = yield DraftLimit(longest)
        if longest and not length:  # the draft keeps in step with the target, whose states it could not read later
            yield Forward(head.role, tuple(sequence[head.rows :]), head.rows, head.span, states, unit=head.unit)
        guesses = yield from draft_by(head, sequence, states, length)
        out = yield verification_pass(target, sequence, guesses)
        how = parameters.sampled, -len(guesses) - 1, parameters.verification
        kept, token = yield from accept_or_reject(out, guesses[:room], *how)
        # The draft's rows of drafted tokens do not come from the target's states: all new tokens are read (again).
        head.rows, states = len(sequence), Features(out, 0, kept + 1)
        yield from commit(sequence, guesses, kept, token, stop)


def read_with_states(target: Model, head: Model, sequence: Sequence[int]) -> Generator[Step, Any, Features]:
    """Prefill the target and a draft that reads its states with a sequence without its last token.

    Returns the state that the draft reads together with the last token.
    """
    words, out = tuple(sequence[:-1]), None
    if words:
        out = yield Forward(target.role, words, 0, target.span)
        yield Forward(head.role, words, 0, head.span, Features(out, -1, len(words)), unit=head.unit)
    return Features(out, len(words) - 1, 1)


def draft_by_head(
    head: Model, sequence: Sequence[int], states: Features, length: int
) -> Generator[Step, Any, list[DraftedToken]]:
    """Draft `length` tokens, one per pass; the first pass reads the unread tokens with `states`, the others the head's own."""
    guesses: list[DraftedToken] = []
    words, at = tuple(sequence[head.rows :]), head.rows
    for _ in range(length):
        out = yield Forward(head.role, words, at, head.span, states, 1, head.unit)
        guesses.append(DraftedToken((yield Read(SAMPLED if head.sampled else GREEDY, out)), out))
        words, at, states = (guesses[-1].token,), at + len(words), Features(out, len(words) - 1, 1)
    return guesses


def draft_in_one_pass(
    head: Model, sequence: Sequence[int], states: Features, length: int
) -> Generator[Step, Any, list[DraftedToken]]:
    """Draft `length` tokens in one pass over the unread tokens, with `states`, and `length` - 1 masks."""
    if not length:
        return []
    words = (*sequence[head.rows :], *[MASK] * (length - 1))
    out = yield Forward(head.role, words, head.rows, head.span, states, length, head.unit)
    guesses = []
    for offset in range(-length, 0):
        guesses.append(DraftedToken((yield Read(SAMPLED if head.sampled else GREEDY, out, offset)), out, offset))
    return guesses


def _in_batches(
    parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int], prompts: Sequence[Sequence[int]]
) -> Steps:
    """Decode static batches: all remaining sequences draft together, then are verified together."""
    target, gamma = Model("target", parameters.layers, 0), parameters.draft_length
    drafter = yield from start(parameters, [0] if prompts else prompt)
    for batch in parameters.batches(tokens):
        live: list[RunningSequence] = []
        for number, length in batch.items():
            own = prompts[number] if prompts else prompt
            live.append(RunningSequence([*own], len(own) + length, len(own) - 1, number))
            if prompts:
                yield from read(parameters, drafter, live[-1])
        while live:
            drafted = yield from draft_together(drafter, live, min(gamma, max(each.room for each in live)))
            yield from _take(parameters, target, live, drafted, stop)
            live = [each for each in live if each.room >= 0 and each.tokens[-1] not in stop]


def _take(
    parameters: Parameters, target: Model, live: Sequence[RunningSequence], drafted: Sequence[Sequence[DraftedToken]],
    stop: Collection[int],
) -> Steps:  # fmt: skip
    """Verify the drafted tokens of all sequences in one pass, and commit each sequence's tokens."""
    width = len(drafted[0]) + 1
    words = [(each.tokens[-1], *[guess.token for guess in guesses]) for each, guesses in zip(live, drafted, strict=True)]
    out = yield _over(target, live, words, [len(each.tokens) - 1 for each in live], width)
    for index, (each, guesses) in enumerate(zip(live, drafted, strict=True), -len(live)):
        own = guesses[: each.room]
        kept, token = yield from accept_or_reject(out, own, parameters.sampled, index * width, parameters.verification)
        yield from commit(each.tokens, own, kept, token, stop, each.number)
        each.rows = min(each.rows, len(each.tokens) - 1)


@dataclass
class Model:
    """A model, its compute unit, and the number of positions in its KV cache."""

    role: str
    layers: int
    unit: int
    rows: int = 0
    sampled: bool = False
    context_budget: int | None = None
    """Largest number of cached positions that a pass reads; None: all."""
    span: LayerSpan = field(init=False)
    """All layers of the model."""

    def __post_init__(self) -> None:
        self.span = LayerSpan(0, self.layers)


def draft_model(parameters: DraftModel, unit: int, rows: int = 0, role: str = "draft") -> Model:
    """The model that drafts with these parameters, on a unit, with `rows` positions in its cache."""
    layers = parameters.depth(role)
    assert layers is not None
    return Model(role, layers, unit, rows, parameters.sampled, parameters.draft_budgets.get(role))


def start(parameters: DraftModel, sequence: Sequence[int]) -> Generator[Step, Any, Model]:
    """Prefill both models with the prompt without its last token; return the draft model."""
    rows = len(sequence) - 1
    drafter = draft_model(parameters, parameters.units - 1, rows)
    yield from read(parameters, drafter, RunningSequence([*sequence], 0, rows))
    return drafter


def read(parameters: DraftModel, drafter: Model, sequence: RunningSequence) -> Steps:
    """Prefill both models with a sequence without its last token."""
    words, batch = tuple(sequence.tokens[:-1]), None
    if words:
        if sequence.number is not None:
            batch = Batch.uniform((sequence.number,), 0, len(words))
        yield Forward("target", words, 0, LayerSpan(0, parameters.layers), batch=batch)
        yield Forward("draft", words, 0, drafter.span, unit=drafter.unit, batch=batch)


def draft(model: Model, sequence: Sequence[int], length: int) -> Generator[Step, Any, list[DraftedToken]]:
    """Draft `length` tokens after the sequence, one per pass.

    After a completely accepted draft the first pass reads two tokens: the last drafted one and the target's own.
    """
    guesses: list[DraftedToken] = []
    words = tuple(sequence[model.rows :])
    says: Literal["next", "sample"] = SAMPLED if model.sampled else GREEDY
    if length > 1:
        chain = yield DraftChain(draft_pass(model, words), length, None, says)
        if chain is not None:
            model.rows += len(words) + length - 1
            return [*map(DraftedToken, chain.tokens, chain.outputs or repeat(None))]
    for _ in range(length):
        out = yield draft_pass(model, words)
        token = yield Read(says, out)
        guesses.append(DraftedToken(token, out))
        model.rows += len(words)
        words = (token,)
    return guesses


def draft_pass(model: Model, words: tuple[int, ...]) -> Forward:
    """Pass of a draft model over `words`, from its first unread position on, with the logits of the last."""
    return Forward(model.role, words, model.rows, model.span, None, 1, model.unit, context_budget=model.context_budget)


def draft_together(model: Model, live: Sequence[RunningSequence], length: int) -> Generator[Step, Any, list[list[DraftedToken]]]:
    """Draft `length` tokens after each sequence; each pass covers all sequences."""
    guesses: list[list[DraftedToken]] = [[] for _ in live]
    ahead = [[*each.tokens] for each in live]
    for _ in range(length):
        # After a completely accepted draft the draft model reads two tokens: the last drafted one and the target's own. Then all
        # sequences of the batch read two tokens; the other sequences read one of them again.
        width = max(len(own) - each.rows for each, own in zip(live, ahead, strict=True))
        out = yield _over(model, live, [own[-width:] for own in ahead], [len(own) - width for own in ahead], 1)
        for index, (each, own) in enumerate(zip(live, ahead, strict=True)):
            each.rows, offset = len(own), (index + 1 - len(live)) * width - 1
            guesses[index].append(DraftedToken((yield Read(SAMPLED if model.sampled else GREEDY, out, offset)), out, offset))
            own.append(guesses[index][-1].token)
    return guesses


def _over(
    model: Model, live: Sequence[RunningSequence], words: Sequence[Sequence[int]], positions: Sequence[int], heads: int
) -> Forward:
    """One pass over `words` of each sequence (equal numbers) from `positions` on; logits for the last `heads` of each."""
    if live[0].number is None:
        alone = tuple(words[0]), positions[0], model.span, None, heads, model.unit
        return Forward(model.role, *alone, context_budget=model.context_budget)
    tokens = tuple([word for own in words for word in own])
    numbers = tuple([each.number for each in live if each.number is not None])
    batch = Batch.uniform(numbers, tuple(positions), len(words[0]), heads)
    every = tokens, min(positions), model.span, None, heads * len(live), model.unit
    return Forward(model.role, *every, batch=batch, context_budget=model.context_budget)


def verify(
    model: Model, sequence: Sequence[int], guesses: Sequence[DraftedToken], sampled: bool, room: int | None = None,
    verification: str = TOKEN,
) -> Generator[Step, Any, tuple[int, int]]:  # fmt: skip
    """Verify drafted tokens in one pass; return the accepted length (at most `room`) and the model's own next token."""
    out = yield verification_pass(model, sequence, guesses)
    return (yield from accept_or_reject(out, guesses[:room], sampled, -len(guesses) - 1, verification))


def verification_pass(model: Model, sequence: Sequence[int], guesses: Sequence[DraftedToken], unread: int = 1) -> Forward:
    """Pass over the last `unread` tokens of the sequence and the drafted tokens."""
    width = (*sequence[-unread:], *[guess.token for guess in guesses])
    begin = len(sequence) - unread
    return Forward(model.role, width, begin, model.span, None, len(guesses) + 1, model.unit, context_budget=model.context_budget)


def accept_or_reject(
    output: Any, guesses: Sequence[DraftedToken], sampled: bool, first: int | None = None, verification: str = TOKEN
) -> Generator[Step, Any, tuple[int, int]]:
    """Accept or reject drafted tokens by the output of a pass; return the accepted length and the model's own next token.

    `first` is the index, from the end of the pass, of the output that predicts the first drafted token. By default the pass has one
    position per drafted token and one more. `verification` is how sampled tokens are accepted.
    """
    count = len(guesses)
    begin = -count - 1 if first is None else first
    if verification == BLOCK:
        return (yield from accept_block(output, guesses, begin))
    own: Any
    if not sampled and count:
        own = yield ReadEach(GREEDY, output, begin, count + 1)
        if own is not None:
            kept = 0
            while kept < count and own[kept] == guesses[kept].token:
                kept += 1
            return kept, own[kept]
    for index, guess in enumerate(guesses):
        offset = begin + index
        if not sampled or guess.output is None:
            # A token that no model drafted is accepted with its probability p: where the target's own draw is that token. If it
            # is not, the draw has the distribution of the others, which is what a rejection needs.
            own = yield Read(SAMPLED if sampled else GREEDY, output, offset)
            if own != guess.token:
                return index, own
            continue
        p = yield Read("probability", output, offset, token=guess.token)
        q = yield Read("probability", guess.output, guess.offset, token=guess.token)
        if not (yield Read("uniform", output, offset)) < p / q:
            return index, (yield Read("residual", output, offset, against=guess.output, against_offset=guess.offset))
    return count, (yield Read(SAMPLED if sampled else GREEDY, output, begin + count))


def accept_block(output: Any, guesses: Sequence[DraftedToken], begin: int) -> Generator[Step, Any, tuple[int, int]]:
    """Accept the longest block of sampled drafted tokens that passes its test; `begin` as `first` of `accept_or_reject`.

    Algorithm 2 of [Sun2024]. The weight of the first i tokens is w_i = min(w_(i-1) p(x_i) / q(x_i), 1) with w_0 = 1. The block of i
    tokens passes with probability h_i = r_i / (r_i + 1 - w_i), where r_i is the sum of max(0, w_i p - q) over the next token; all
    gamma tokens pass with w_gamma. The next token has the distribution norm(max(0, w_i p - q)). So at least i tokens are accepted
    with probability w_i. The paper tests the blocks from the shortest to the longest and keeps the last that passes; here the
    longest is tested first, with the same random numbers, and shorter ones only if it fails.
    """
    weights: list[Any] = [1]
    for offset, guess in enumerate(guesses, begin):
        p = yield Read("probability", output, offset, token=guess.token)
        q = yield Read("probability", guess.output, guess.offset, token=guess.token)
        weights.append(min(weights[-1] * p / q, 1))
    count, kept = len(guesses), len(guesses)
    while kept:
        passing = weights[kept]
        if kept < count:
            mass = yield _residual("residual_mass", output, begin + kept, guesses[kept], passing)
            # Without a residual nothing could replace the next drafted token; then longer blocks carry the whole probability.
            passing = mass / (mass + 1 - passing) if mass else 0
        if (yield Read("uniform", output, begin + kept - 1)) < passing:
            break
        kept -= 1
    if kept == count:
        return count, (yield Read(SAMPLED, output, begin + count))
    return kept, (yield _residual("residual", output, begin + kept, guesses[kept], weights[kept]))


def _residual(
    kind: Literal["residual", "residual_mass"], output: Any, offset: int, guess: DraftedToken, weight: Any
) -> Read:
    """Read of max(0, w p - q) at the position of a drafted token."""
    return Read(kind, output, offset, against=guess.output, against_offset=guess.offset, weight=weight)


def commit(
    sequence: list[int], guesses: Sequence[DraftedToken], accepted: int, token: int, stop: Collection[int] = (),
    number: int | None = None,
) -> Steps:  # fmt: skip
    """Commit the tokens of a round: the accepted drafted tokens and `token`, up to the first token of `stop`."""
    new = [*[guess.token for guess in guesses[:accepted]], token]
    new = ended(new, stop)
    sequence += new
    yield Commit("round", tuple(new), len(guesses), sequence=number)
