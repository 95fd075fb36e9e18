"""The scheduler of a serving engine: which sequences run, how many tokens of each a step takes, and the blocks of the cache.

The rules are those of vLLM's engine V1 with first come, first served: decoding sequences take their tokens first; prompts take
what they leave of `max_num_batched_tokens`, in chunks, in the order of admission; then waiting requests are admitted. Where the
blocks of the cache do not suffice, the sequence that was admitted last is preempted: it gives its blocks back, waits at the front
of the queue, and reads its prompt and its own tokens again.

Sequences are columns of arrays, in the order of admission, so that a step of many sequences costs a few operations of numpy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.checks import ParameterError

Integers = NDArray[np.int64]

REQUEST, LEFT, CACHED, HELD, DONE, WANTED, ROW = range(7)
"""Rows of the table of running sequences: number of the request, prompt tokens that are not read yet, cached positions, memory
held (blocks, or units of `ServerSettings.units_of`), tokens generated and wanted, and a number below `max_num_seqs` that no other
running sequence has."""
UNITS = 1024
"""Units of memory of a block, where blocks take different memory."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, with the names that vLLM gives them.

    Parameters
    ----------
    max_num_seqs
        Largest number of running sequences.
    max_num_batched_tokens
        Largest number of tokens in a pass of the target.
    block_size, num_blocks
        Positions of a block of the cache, and blocks; None: as many as are needed.
    enable_chunked_prefill
        False: a prompt is read in one pass, which must fit `max_num_batched_tokens`.
    lookahead
        Cached positions beyond those of a verified draft that each decoding sequence needs per drafted token: 1 if the drafter has
        cache slots of its own there (draft models and heads in vLLM), else 0.
    max_model_len
        Most tokens of a request, its prompt and its output together; None: any number.
    scheduler_reserve_full_isl
        True: a request is admitted only where the free blocks hold all that it has to read, its whole prompt; False: where they
        hold the first chunk of it, so that more requests start and more of them are preempted.
    draft_context_budget, draft_cache_share
        Positions of each sequence that a draft keeps, the first few and the latest, None: all; and the share of a block's bytes
        that is the draft's. A block beyond the budget takes only the rest of them.

    >>> ServerSettings(max_num_seqs=0)
    Traceback (most recent call last):
    model.base.checks.ParameterError: max_num_seqs must be between 1 and 65536, got 0
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_blocks: int | None = None
    enable_chunked_prefill: bool = True
    lookahead: int = 0
    max_model_len: int | None = None
    scheduler_reserve_full_isl: bool = True
    draft_context_budget: int | None = None
    draft_cache_share: float = 0.0

    def __post_init__(self) -> None:
        checks.whole("max_num_seqs", self.max_num_seqs, 1, 65_536)
        checks.whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24)
        checks.whole("block_size", self.block_size, 1, 65_536)
        checks.flag("enable_chunked_prefill", self.enable_chunked_prefill)
        checks.whole("lookahead", self.lookahead, 0, 1)
        checks.flag("scheduler_reserve_full_isl", self.scheduler_reserve_full_isl)
        if self.num_blocks is not None:
            checks.whole("num_blocks", self.num_blocks, 1, 2**40)
        if self.max_model_len is not None:
            checks.whole("max_model_len", self.max_model_len, 2, checks.MAX_TOKENS)
        if self.draft_context_budget is not None:
            checks.whole("draft_context_budget", self.draft_context_budget, 1, checks.MAX_TOKENS)
        checks.number("draft_cache_share", self.draft_cache_share, 0, 1)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the settings."""
        return tuple(each.name for each in fields(cls))

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions.

        >>> ServerSettings(block_size=16).blocks_for(17)
        2
        """
        return -(-positions // self.block_size)

    @property
    def block_units(self) -> int:
        """Units of memory that a block takes in which the draft keeps its positions too: 1 if it keeps all of them."""
        return 1 if self.draft_context_budget is None else UNITS

    def units_of(self, blocks: Integers) -> Integers:
        """Units of memory that these numbers of blocks, each of a sequence, take.

        A draft that has a quarter of each block keeps 512 positions, 32 blocks: those beyond take three quarters.

        >>> ServerSettings(draft_context_budget=512, draft_cache_share=0.25).units_of(np.array([32, 40])) / UNITS
        array([32., 38.])
        """
        if self.draft_context_budget is None:
            return blocks
        beyond = np.maximum(blocks - self.blocks_for(self.draft_context_budget), 0)
        return np.asarray(blocks * UNITS - beyond * round(UNITS * self.draft_cache_share))

    def units_for(self, positions: int) -> int:
        """Units of memory of a sequence with this many positions."""
        blocks = self.blocks_for(positions)
        return blocks if self.draft_context_budget is None else int(self.units_of(np.array(blocks)))

    def memory_of(self, positions: float) -> float:
        """Positions of a cache that keeps all of them, in the memory that this many positions of a sequence take.

        >>> ServerSettings(draft_context_budget=512, draft_cache_share=0.25).memory_of(640)
        608.0
        """
        if self.draft_context_budget is None:
            return positions
        kept = min(positions, self.draft_context_budget)
        return kept + (positions - kept) * (1 - self.draft_cache_share)

    def check_request(self, prompt: int, output: int, longest_draft: int) -> None:
        """Raise ParameterError for a request that could never be served.

        >>> ServerSettings(max_model_len=4096).check_request(4000, 128, 0)
        Traceback (most recent call last):
        model.base.checks.ParameterError: max_model_len must be at least 4128, a prompt of 4000 with its output of 128 tokens,
        got 4096; raise it if the engine stretches the model's context, or leave the request out
        """
        if self.max_model_len is not None and prompt + output > self.max_model_len:
            raise ParameterError(
                f"max_model_len must be at least {prompt + output}, a prompt of {prompt} with its output of {output} tokens, got"
                f" {self.max_model_len}; raise it if the engine stretches the model's context, or leave the request out"
            )
        if not self.enable_chunked_prefill and prompt + output > self.max_num_batched_tokens:
            raise ParameterError(
                f"max_num_batched_tokens must be at least {prompt + output}, a prompt with its output (which is read again after a"
                f" preemption), got {self.max_num_batched_tokens}; enable chunked prefill, or raise it"
            )
        if self.num_blocks is not None:
            positions = prompt + output + (1 + self.lookahead) * longest_draft
            needed = -(-self.units_for(positions) // self.block_units)
            if needed > self.num_blocks:
                raise ParameterError(
                    f"num_blocks must be at least {needed} of {self.block_size} positions, for a prompt of {prompt} with its output"
                    f" of {output} tokens, got {self.num_blocks}; give the cache more memory, or leave the request out"
                )


class Waiting(NamedTuple):
    """A request in the queue."""

    request: int
    prompt: int
    """Tokens to read: the prompt, and after a preemption the tokens generated before."""
    done: int
    wanted: int


class Chunk(NamedTuple):
    """Tokens of a prompt that a step reads."""

    column: int
    """Column of the sequence."""
    tokens: int
    before: int
    """Cached positions before it."""
    last: bool
    """True if the prompt ends with it: the step then gives the sequence's next token."""


class Plan(NamedTuple):
    """What a step does."""

    decoding: Integers
    """Columns of the sequences that decode."""
    limits: Integers
    """Tokens that each of them may draft."""
    chunks: list[Chunk]
    preempted: list[int]
    """Requests that were preempted."""
    admitted: list[int]
    """Requests that were admitted."""


class Scheduler:
    """Running and waiting sequences of one server.

    >>> each = Scheduler(ServerSettings(max_num_batched_tokens=64))
    >>> each.enqueue(0, prompt=100, output=8)
    >>> plan = each.plan(3)
    >>> plan.chunks, each.complete(plan, np.zeros(0, int)).tolist()
    ([Chunk(column=0, tokens=64, before=0, last=False)], [])
    >>> plan = each.plan(3)
    >>> plan.chunks, each.complete(plan, np.zeros(0, int)).tolist(), each.plan(3).limits.tolist()
    ([Chunk(column=0, tokens=36, before=64, last=True)], [], [3])
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.table: Integers = np.zeros((7, settings.max_num_seqs), dtype=np.int64)
        self.running = 0
        self.waiting: deque[Waiting] = deque()
        self.free_rows = [*range(settings.max_num_seqs)][::-1]
        self._all = self.free = 2**62 if settings.num_blocks is None else settings.num_blocks * settings.block_units
        """Units of memory, of all blocks and of those that are free (`ServerSettings.units_of`)."""
        self.preemptions = 0
        self.reading = 0
        """Running sequences whose prompts are not read completely."""

    def enqueue(self, request: int, prompt: int, output: int) -> None:
        """Let a request wait; a prompt of one token needs no pass of its own."""
        self.waiting.append(Waiting(request, prompt if prompt > 1 else 0, 0, output))

    @property
    def decoding(self) -> Integers:
        """Columns of the running sequences whose prompts are read."""
        if not self.reading:
            return np.arange(self.running)
        return np.flatnonzero(self.table[LEFT, : self.running] == 0)

    @property
    def held(self) -> int:
        """Blocks in use, or whole blocks that take as much memory."""
        return -((self.free - self._all) // self.settings.block_units)

    # --- A step ---

    def plan(self, limit: int | Integers) -> Plan:
        """Choose what the next step does; `limit` is the number of tokens to draft, for all or by decoding sequence."""
        decoding = self.decoding
        most = self._room(decoding.size)
        limits = np.minimum(limit, most) if isinstance(limit, np.ndarray) else np.full(decoding.size, min(limit, most))
        budget = self.settings.max_num_batched_tokens
        if decoding.size > budget:
            decoding, limits = decoding[:budget], limits[:budget]
        decoding, limits, preempted = self._reserve(decoding, limits)
        budget -= decoding.size + int(limits.sum())
        chunks = self._prompts(budget, preempted) if self.reading else []
        if preempted and decoding.size:  # a prompt may have preempted sequences that decode
            kept = decoding < self.running
            decoding, limits = decoding[kept], limits[kept]
        budget -= sum(each.tokens for each in chunks)
        admitted = [] if preempted else self._admit(budget, chunks)
        return Plan(decoding, limits, chunks, preempted, admitted)

    def _room(self, sequences: int) -> int:
        """Drafted tokens that each of these sequences may have in a pass."""
        return max(self.settings.max_num_batched_tokens // sequences - 1, 0) if sequences else 0

    def _reserve(self, decoding: Integers, limits: Integers) -> tuple[Integers, Integers, list[int]]:
        """Give the decoding sequences their blocks; preempt the sequences admitted last until they suffice."""
        preempted: list[int] = []
        block, ahead = self.settings.block_size, 1 + self.settings.lookahead
        while True:
            of = slice(0, self.running) if decoding.size == self.running else decoding
            need = self.settings.units_of(-(-(self.table[CACHED, of] + 1 + ahead * limits) // block)) - self.table[HELD, of]
            more = int(np.maximum(need, 0, out=need).sum())
            if more <= self.free:
                break
            preempted.append(self._preempt())
            kept = decoding < self.running
            decoding, limits = decoding[kept], limits[kept]
        if more:
            self.table[HELD, of] += need
            self.free -= more
        return decoding, limits, preempted

    def _prompts(self, budget: int, preempted: list[int]) -> list[Chunk]:
        """Chunks of the prompts that are being read, in the order of admission."""
        chunks: list[Chunk] = []
        for index in np.flatnonzero(self.table[LEFT, : self.running]).tolist():
            if index >= self.running or budget <= 0:
                break
            left, before = int(self.table[LEFT, index]), int(self.table[CACHED, index])
            tokens = min(left, budget)
            need = self.settings.units_for(before + tokens) - int(self.table[HELD, index])
            while need > self.free and index < self.running - 1:
                preempted.append(self._preempt())
            if need > self.free:
                break
            self._hold(index, need)
            chunks.append(Chunk(index, tokens, before, tokens == left))
            budget -= tokens
        return chunks

    def _admit(self, budget: int, chunks: list[Chunk]) -> list[int]:
        """Admit waiting requests, each with the first chunk of its prompt."""
        admitted: list[int] = []
        while self.waiting and self.running < self.settings.max_num_seqs:
            each = self.waiting[0]
            tokens = min(each.prompt, budget)
            if each.prompt and (tokens <= 0 or (tokens < each.prompt and not self.settings.enable_chunked_prefill)):
                break
            room = each.prompt if self.settings.scheduler_reserve_full_isl else tokens
            if self.settings.units_for(max(room, 1)) > self.free:
                break
            self.waiting.popleft()
            index, self.running = self.running, self.running + 1
            self.table[:, index] = each.request, each.prompt, 0, 0, each.done, each.wanted, self.free_rows.pop()
            self._hold(index, self.settings.units_for(max(tokens, 1)))
            if each.prompt:
                self.reading += 1
                chunks.append(Chunk(index, tokens, 0, tokens == each.prompt))
                budget -= tokens
            admitted.append(each.request)
        return admitted

    def _hold(self, index: int, need: int) -> None:
        if need > 0:
            self.table[HELD, index] += need
            self.free -= need

    def _preempt(self) -> int:
        """Preempt the sequence that was admitted last; return its request."""
        self.running -= 1
        request, left, cached, held, done, wanted, row = map(int, self.table[:, self.running])
        self.reading -= left > 0
        self.free += held
        self.free_rows.append(row)
        # Prompt and output so far: all of it is known, and the pass over it gives the next token.
        read = left + cached if left else cached + 1
        self.waiting.appendleft(Waiting(request, read if read > 1 else 0, done, wanted))
        self.preemptions += 1
        return request

    def complete(self, plan: Plan, emitted: Integers) -> Integers:
        """Account for a step that has ended; return the columns of the sequences that are finished, which `remove` drops.

        `emitted` are the tokens of each decoding sequence. A prompt that ends gives one token.
        """
        table, decoding = self.table, plan.decoding
        if decoding.size == self.running:
            table[CACHED, : self.running] += emitted
            table[DONE, : self.running] += emitted
        elif decoding.size:
            table[CACHED, decoding] += emitted
            table[DONE, decoding] += emitted
        for index, tokens, _, last in plan.chunks:
            table[LEFT, index] -= tokens
            table[CACHED, index] += tokens
            if last:
                table[DONE, index] += 1
                self.reading -= 1
        running = self.running
        return np.flatnonzero(table[DONE, :running] == table[WANTED, :running])

    def remove(self, finished: Integers) -> None:
        """Drop finished sequences and free their blocks."""
        self.free += int(self.table[HELD, finished].sum())
        self.free_rows += self.table[ROW, finished].tolist()
        keep = np.ones(self.running, dtype=bool)
        keep[finished] = False
        kept = self.table[:, : self.running][:, keep]
        self.running = kept.shape[1]
        self.table[:, : self.running] = kept
