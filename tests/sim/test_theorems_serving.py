"""Theorems on servers: expected verdicts, kept counterexamples worked by hand, and faults that refute each theorem."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from simpy.events import Event

from model.serving import decodings
from model.serving.closed_form import ClosedForm
from model.serving.records import recorder
from model.serving.scheduler import Scheduler, ServerSettings
from model.serving.server import Server
from sim.engine import serving
from sim.theorems import replay, select
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import (
    Fault,
    assert_fails_on_small_example,
    assert_fault_shows,
    verdict_tests,
    with_fault,
)

OWN = select("serving")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Counterexamples that are kept ---


PLAIN = {
    "per": 4, "seqs": 3, "batched": 16, "block": 1, "spare": None, "lookahead": 0, "clients": None, "method": "autoregressive",
    "draft_length": 0, "outcomes": [0],
}  # fmt: skip


def test_a_slower_step_may_catch_an_arrival() -> None:
    """The second request arrives at 1.25 s: with steps of 1 s it begins at 2, with steps of 1.25 s at once."""
    x = {**PLAIN, "requests": [[0, 2, 4], [5, 2, 1]], "prices": {"step": 4}, "slower": {"step": 1}}
    assert replay("57d", x, "serving").error == "end of request 1 with the faster passes: got 3.0, expected at most 2.5"


def test_a_token_more_may_delay_another_request() -> None:
    """With its draft accepted the second request ends with the first, in step 2; then both other prompts are read together.

    By hand, in quarters of a second: 5, 1, 3 (the end of the third request), 3, against 5, 1, 5.
    """
    x = {**PLAIN, "seqs": 2, "method": "model", "draft_length": 1, "accepts": [False], "at": 0,
         "requests": [[0, 2, 2], [0, 2, 3], [0, 2, 1], [0, 2, 1]], "prices": {"step": 1, "prompt_token": 1}}  # fmt: skip
    verdict = replay("57g", x, "serving")
    assert verdict.error == "end of request 2 with one more accepted token: got 2.75, expected at most 2.25"


def test_a_long_context_may_raise_the_best_draft_length_with_the_load() -> None:
    """Half of the drafts are accepted; a step takes 1 s, a draft pass 1 s, and reading the cache of each sequence 1 s.

    By hand, in seconds per token: one sequence 2 with a draft or without; eight 9 / 8 without, 10 / 12 with one.
    """
    x = {"survival": [8], "running": [1, 8], "per": 16, "context": 15, "prices": {"step": 16, "position": 1, "drafting": 16}}
    verdict = replay("57k", x, "serving")
    assert verdict.error == "fastest draft length of 8 running sequences, against 1: got 1, expected at most 0"
    # The same with a cache that takes no time to read, or with draft passes that do not share theirs.
    for name in ("position", "drafting"):
        assert replay("57j", {**x, "prices": {**x["prices"], name: 0, "drafting_each": 8}}, "serving").holds


# --- Faults ---


def longer(right: Any, own: Any, request: int, prompt: int, output: int) -> None:
    """Serve a token more than is wanted."""
    right(own, request, prompt, output + 1)


def block_lost(right: Any, own: Scheduler, finished: Any) -> None:
    right(own, finished)
    own.free -= bool(finished.size)


def drafts_without_blocks(right: Any, own: Any, decoding: Any, limits: Any) -> Any:
    """Give blocks to no drafted token."""
    kept, _, preempted = right(own, decoding, np.zeros_like(limits))
    return kept, limits[: kept.size], preempted


def later_end(right: Any, own: Any) -> Any:
    """Let each step take .25 s that no pass takes."""
    seconds = right(own)
    return None if seconds is None else seconds + 0.25


def own_tokens_kept(right: Any, own: Scheduler) -> int:
    """Read the prompt of a preempted sequence again, and not its last token."""
    number: int = right(own)
    first = own.waiting[0]
    own.waiting[0] = first._replace(prompt=first.prompt - 1 if first.done and first.prompt > 2 else first.prompt)
    return number


def one_kept(right: Any, own: Any, each: Any, drafted: Any) -> Any:
    """Keep at most one token of a draft."""
    return np.minimum(right(own, each, drafted), 2)


def last_come_first(right: Any, own: Scheduler, *args: Any) -> None:
    right(own, *args)
    own.waiting.rotate(1)


def preempted_last(right: Any, own: Scheduler) -> int:
    """Let a preempted sequence wait after all others."""
    number: int = right(own)
    own.waiting.rotate(-1)
    return number


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Send requests by the running sequences alone."""
    patch.setattr(Server, "load", property(lambda own: own.scheduler.running))


def arrives_when_admitted(right: Any, own: recorder.Recorder, admitted: Any, now: float) -> None:
    """Record the time at which a request is admitted as its arrival."""
    right(own, admitted, now)
    own.arrival[admitted] = now


def decoding_only(right: Any, own: Any, record: Any, *rest: Any) -> None:
    """Count the sequences that decode as running."""
    right(own, record._replace(running=record.sequences), *rest)


def admitted_again(right: Any, own: recorder.Recorder, admitted: Any, now: float) -> None:
    """Record the first token's step as the admission."""
    right(own, admitted, now + 0.25)


def from_the_start(right: Any, *args: Any) -> Any:
    return [each._replace(before=0) for each in right(*args)]


def one_more_sequence(right: Any, own: Scheduler, budget: int, chunks: Any) -> Any:
    """Admit by tokens alone, up to one sequence more than max_num_seqs."""
    settings, own.settings = own.settings, ServerSettings(own.settings.max_num_seqs + 1, 16, own.settings.block_size)
    found = right(own, budget, chunks)
    own.settings = settings
    return found


def a_token_left(right: Any, own: Scheduler, budget: int, chunks: Any) -> Any:
    """Admit only where two tokens of the pass are left, or nothing runs: a server that never admits would never end."""
    return right(own, budget if budget > 1 or not own.running else 0, chunks)


def by_the_first_chunk(right: Any, own: Scheduler, budget: int, chunks: Any) -> Any:
    """Admit where the first chunk has room, under all settings."""
    settings, own.settings = own.settings, replace(own.settings, scheduler_reserve_full_isl=False)
    found = right(own, budget, chunks)
    own.settings = settings
    return found


def begun_again(right: Any, own: decodings.Generators, request: Any, row: int) -> None:
    """Begin a preempted request's algorithm anew."""
    own._of.pop(request.number, None)
    right(own, request, row)


def one_drafted_less(right: Any, own: Any, each: Any, limits: Any) -> Any:
    return right(own, each, np.maximum(limits - 1, 0))


def in_turn(right: Any, own: Any, event: Event, delay: float) -> None:
    """Let arrivals and wakened servers wait for events of the same time that were planned before."""
    event._ok, event._value = True, None
    own.env.schedule(event, delay=delay)


def wakes_late(right: Any, own: Any) -> None:
    """Let a server that sleeps begin after all ends of steps of the same time."""
    for index in sorted(own.asleep):
        if own.servers[index].load:
            own.asleep.pop(index).succeed()


def steps_of_the_first(right: Any, own: Any) -> None:
    """Record every step as one of the first server."""
    step = own.recorder.step
    own.recorder.step = lambda *args: step(*args[:-1], 0)
    right(own)


def prompt_of_one(right: Any, own: ClosedForm, running: float) -> float:
    """Let a request meet its own prompt alone."""
    found: float = right(own, running)
    return found / running


def one_round_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClosedForm, "rounds", property(lambda own: own.workload.output / own.acceptance_length))


def shared_tokens(right: Any, own: ClosedForm, running: int) -> float:
    """Let all sequences share the time of the tokens of one."""
    found: float = right(own, running)
    return found - own.prices.token * (running - 1) * (own.draft_length + 1)  # type: ignore[attr-defined]


def inverse(right: Any, own: Any) -> Any:
    """Let a step take the inverse of its time."""
    seconds = right(own)
    return None if seconds is None else 4 / seconds


def faster_with_a_queue(right: Any, own: Server) -> Any:
    waiting = len(own.scheduler.waiting)
    seconds = right(own)
    return None if seconds is None else seconds / (1 + waiting)


def two_are_none(right: Any, own: Any, each: Any, drafted: Any) -> Any:
    """Keep nothing but the target's own token where exactly two are accepted."""
    found = right(own, each, drafted)
    return np.where(found == 3, 1, found)


def one_transfer(right: Any, own: Server) -> Any:
    """Send drafted tokens back in no time."""
    seconds = right(own)
    if seconds is not None and own._busy[1]:
        own._seconds = seconds = seconds - own.prices.link
    return seconds


def transfers_in_turn(right: Any, own: Server, transfers: int = 2) -> Any:
    """Draft before the target's pass, with this number of transfers, also where drafts are made during it."""
    seconds = right(own)
    if seconds is not None and own._busy[1]:
        own._seconds = seconds = sum(own._busy) + transfers * own.prices.link
    return seconds


def waits_for_ever(right: Any, own: Any, each: Any, limits: Any, accepted: Any) -> Any:
    """Let tokens wait that were drafted after a rejected one."""
    found = right(own, each, limits, accepted)
    own._waiting[each.rows] = np.maximum(own._waiting[each.rows], np.minimum(limits - 1, 1))
    return found


def draft_on_the_target(right: Any, own: Server) -> Any:
    """Count the passes of a draft on a device of its own as the target's."""
    seconds = right(own)
    own._busy = sum(own._busy), 0.0
    return seconds


def on_one_unit(patch: pytest.MonkeyPatch) -> None:
    """Take the passes of all units as the target's."""
    patch.setattr(decodings._RunningDecoding, "apart", property(lambda own: False))


def half_the_budget(right: Any, own: Any, *passes: Any) -> Any:
    """Read half the positions of the budget."""
    found = right(own, *passes)
    return found if found.context_budget is None else found._replace(context_budget=found.context_budget // 2)


def less_memory(right: Any, own: ServerSettings, blocks: Any) -> Any:
    """Keep no position of a draft that has a budget."""
    found = right(own, blocks)
    return found if own.draft_context_budget is None else found - (found * own.draft_cache_share).astype(int)


def reads_what_is_hidden(right: Any, own: Server, sequences: int, total: int, visible: int, *rest: Any) -> Any:
    return right(own, sequences, total, total - visible, *rest)


STEP_LATE = with_fault(later_end, Server, "begin")
LAST_COME = with_fault(last_come_first, Scheduler, "enqueue")
FAULTS: list[tuple[str, str, Fault]] = [
    ("50a", "a token more", with_fault(longer, Scheduler, "enqueue")),
    ("50a", "a block is lost", with_fault(block_lost, Scheduler, "remove")),
    ("50b", "drafts without blocks", with_fault(drafts_without_blocks, Scheduler, "_reserve")),
    ("50b", "less memory", with_fault(less_memory, ServerSettings, "units_of")),
    ("50b", "a block too much", with_fault(lambda right, *args: right(*args) + 1, ServerSettings, "blocks_for")),
    ("50c", "steps end late", STEP_LATE),
    ("50d", "last token not read again", with_fault(own_tokens_kept, Scheduler, "_preempt")),
    ("50d", "one kept", with_fault(one_kept, decodings.Arrays, "verify")),
    ("50c", "one transfer", with_fault(one_transfer, Server, "begin")),
    ("50e", "one transfer", with_fault(one_transfer, Server, "begin")),
    ("50e", "draft on the target", with_fault(draft_on_the_target, Server, "begin")),
    ("50f", "in turn", with_fault(transfers_in_turn, Server, "begin")),
    ("50f", "draft on the target", with_fault(draft_on_the_target, Server, "begin")),
    ("50g", "a transfer more", with_fault(partial(transfers_in_turn, transfers=3), Server, "begin")),
    ("51a", "queue not counted", without_waiting),
    ("51a", "arrival at admission", with_fault(arrives_when_admitted, recorder.Recorder, "began")),
    ("51b", "decoding only", with_fault(decoding_only, recorder.Recorder, "step")),
    ("51b", "admitted late", with_fault(admitted_again, recorder.Recorder, "began")),
    ("51c", "last come, first served", LAST_COME),
    ("51c", "preempted requests last", with_fault(preempted_last, Scheduler, "_preempt")),
    ("52a", "drafts beyond the pass", with_fault(lambda right, *args: 99, Scheduler, "_room")),
    ("52a", "a sequence more", with_fault(one_more_sequence, Scheduler, "_admit")),
    ("52b", "every chunk is the first", with_fault(from_the_start, Scheduler, "_prompts")),
    ("52c", "a token left", with_fault(a_token_left, Scheduler, "_admit")),
    ("52c", "a token of a prompt left", with_fault(lambda right, own, budget, preempted: right(own, budget - 1, preempted),
                                                   Scheduler, "_prompts")),
    ("52d", "room for the first chunk", with_fault(by_the_first_chunk, Scheduler, "_admit")),
    ("53a", "begun again", with_fault(begun_again, decodings.Generators, "start")),
    ("53b", "a token less is drafted", with_fault(one_drafted_less, decodings.Generators, "draft")),
    ("53c", "steps end late", STEP_LATE),
    ("53c", "one transfer", with_fault(one_transfer, Server, "begin")),
    ("53c", "on one unit", on_one_unit),
    ("54b", "on one unit", on_one_unit),
    ("54a", "arrivals in turn", with_fault(in_turn, serving._Service, "_soon")),
    ("54a", "wakes late", with_fault(wakes_late, serving._Service, "wake")),
    ("54a", "steps of the first server", with_fault(steps_of_the_first, serving._Service, "run")),
    ("54b", "budget of arrays alone", with_fault(half_the_budget, decodings.Arrays, "_by_the_draft")),
    ("54b", "one kept", with_fault(one_kept, decodings.Arrays, "verify")),
    ("54b", "rejected tokens wait", with_fault(waits_for_ever, decodings.Arrays, "_during_verification")),
    ("54c", "half the budget", with_fault(half_the_budget, decodings.Arrays, "_by_the_draft")),
    ("54c", "less memory", with_fault(less_memory, ServerSettings, "units_of")),
    ("55a", "a round more", one_round_more),
    ("55a", "own prompt alone", with_fault(prompt_of_one, ClosedForm, "prompt_seconds")),
    ("55b", "a round more", one_round_more),
    ("55b", "own prompt alone", with_fault(prompt_of_one, ClosedForm, "prompt_seconds")),
    ("55b", "steps end late", STEP_LATE),
    ("56a", "last come, first served", LAST_COME),
    ("56a", "steps end late", STEP_LATE),
    ("56b", "steps end late", STEP_LATE),
    ("56b", "admitted late", with_fault(admitted_again, recorder.Recorder, "began")),
    ("57a", "last come, first served", LAST_COME),
    ("57c", "inverse", with_fault(inverse, Server, "begin")),
    ("57e", "steps end late", STEP_LATE),
    ("57f", "two are none", with_fault(two_are_none, decodings.Arrays, "verify")),
    ("57h", "faster with a queue", with_fault(faster_with_a_queue, Server, "begin")),
    ("57m", "what is hidden", with_fault(reads_what_is_hidden, Server, "_drafting")),
    ("57j", "shared tokens", with_fault(shared_tokens, ClosedForm, "_round")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("serving", number, fault, monkeypatch)
