"""Timing of one draft without end, at constant times of passes: for long decodings, where `draft_clock` takes too long.

Times are those of `draft_clock`, added in the same order: theorem 22b compares them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from model.methods.amusd.algorithm import Parameters


def decision_times(parameters: Parameters, positions: int, cost_ratio: float, link: float = 0.0) -> list[float]:
    """Time until each position is decided on, from the order to draft; in passes of the target.

    If a token is wrong, the next draft begins when the message has arrived and, unless it stops passes, the draft pass in progress
    has ended: that delay is included.

    >>> decision_times(Parameters(1, 4), 5, 0.2, 0.1)  # the target waits for two tokens before each pass
    [1.6, 1.6, 1.6, 3.0, 3.0]
    """
    most, least = parameters.draft_length, parameters.min_waiting
    begun: list[float] = []
    done: list[float] = []
    arrived: list[float] = []
    times: list[float] = []
    free, begin = 0.0, link
    while len(times) < positions:
        start = len(times)
        begin, allowed = max(begin, free + link), start + most
        for _ in range(allowed - len(done)):
            begun.append(begin)
            begin += cost_ratio
            done.append(begin)
            arrived.append(begin + link)
        if least and arrived[start + least - 1] >= free:
            passing, waiting = arrived[start + least - 1], least
        else:
            passing, waiting = free, min(bisect_left(arrived, free, start, allowed) - start, most - 1)
        passed = passing + 1
        free = max(passed, arrived[start + waiting])
        times += [passed] * waiting + [free]
        if not parameters.stops_passes:
            for place in range(start, start + waiting + 1):
                message = times[place] + link
                running = bisect_right(begun, message, place + 1, allowed) - 1
                times[place] += max(done[running] - message, 0.0) if running > place else 0.0
    return times[:positions]
