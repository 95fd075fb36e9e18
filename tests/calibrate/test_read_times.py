"""Times of decoding besides whole passes (`calibrate.timing.read_times`), on a clock that the test advances at every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from calibrate.decoders.transformers_adapter import Decoder
from calibrate.interpreters.in_one_process import ProcessState, Real
from calibrate.timing import read_times, single_pass
from model.hardware.profile import READS
from model.logs import forced_outcomes
from model.methods.ppd import algorithm as ppd
from model.steps import Forward, Read
from tests.support import real_models
from tests.support.fake_clocks import FakeTime

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = real_models.DEPTHS["target"]
CALL, EMBEDDING, COPY = 5.0, 4.0, 7.0
READ = {kind: 2.0 + 3 * number for number, kind in enumerate(READS)}


def layer_us(layer: int, tokens: int) -> float:
    """Return the time of a layer of a pass over `tokens` tokens [us]."""
    return 10 + layer + tokens / 2


def mean(*values: float) -> float:
    return sum(values) / len(values)


class Costs:
    """Times of steps [us], with the number of samples and the requests.

    Layers are launched, as on a GPU: their time passes when the caller waits for the device.
    """

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock
        self.copies = 0
        self.asked: list[Read] = []
        self.passes: list[Forward] = []
        self.idle = 0.0
        """Share of the time since the last pass by which the next one takes longer."""
        self.ended = clock.now
        self.launched = 0.0
        """Remaining time of launched layers [us]."""
        self.samples: list[int] = []
        """Number of samples of each mean."""

    def spend(self, microseconds: float) -> None:
        self.clock.spend(microseconds / 1e6)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    clock = FakeTime(1e-8)
    clock.install(monkeypatch)
    found = Costs(clock)
    layer, embedded, logits, make, look, copy = (
        Decoder._layer, Decoder._embedded, Decoder.logits, Real._make_pass, Real._evaluate, ProcessState.copy
    )  # fmt: skip

    def of_layer(self: Any, index: int, hidden: Any, place: Any, rows: Any) -> Any:
        tokens = hidden.shape[0] * hidden.shape[1]
        found.launched += layer_us(index, tokens)
        if rows.at is not None:  # several hypotheses: more time per hypothesis, and by context in steps of two
            found.launched += 2 * tokens + (int(place.positions[0, 0]) + 1) // 2
        return layer(self, index, hidden, place, rows)

    def of_embedding(self: Any, *given: Any) -> Any:
        found.spend(EMBEDDING)
        return embedded(self, *given)

    def of_head(self: Any, states: Any, behind: int) -> Any:
        found.spend(30 + len(states))
        return logits(self, states, behind)

    def of_pass(self: Any, cache: Any, step: Forward) -> Any:
        found.passes.append(step)
        found.spend(CALL + 1e6 * found.idle * (clock.now - found.ended))
        return make(self, cache, step)

    def of_read(self: Any, step: Read) -> Any:
        found.asked.append(step)
        settle(self)
        found.spend(READ[step.kind] + len(step.hypotheses or ()))
        return look(self, step)

    def settle(_: Any) -> None:
        found.spend(found.launched)
        found.launched, found.ended = 0.0, clock.now

    def of_copy(self: Any) -> Any:
        found.copies += 1
        found.spend(COPY)
        return copy(self)

    for owner, name, instead in (
        (Decoder, "_layer", of_layer), (Decoder, "_embedded", of_embedding), (Decoder, "logits", of_head),
        (Real, "_make_pass", of_pass), (Real, "_evaluate", of_read), (ProcessState, "copy", of_copy), (Decoder, "settle", settle),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, instead)
    monkeypatch.setattr(read_times, "means", lambda times: found.samples.append(len(times)) or single_pass.means(times))
    monkeypatch.setattr(read_times, "PROCESS_PROMPT", 6)
    return found


def near(expected: dict[str, float]) -> dict[str, Any]:
    """Match quartiles and mean of equal times [us]."""
    return {name: pytest.approx([each] * 3, abs=0.03) for name, each in expected.items()}


def test_times_of_all_parts_follow_from_their_steps(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer i over n tokens takes 10 + i + n/2 us, a call 5, the embedding 4, a head 30 plus one per position."""
    decoder = real_models.decoders("llama", dtype="float32")["target"]
    monkeypatch.setattr(read_times, "WARM_UPS", 1)
    found = read_times.time_reads(decoder, 12, 2)
    assert found["repeats"] == 2
    early = {"early_head": 31.0, "early_softmax": READ["confidence"], "early_state": READ["saturation"]}
    assert found["reads_us"] == near({kind: READ[kind] for kind in READS if kind != "beams"} | early)
    behind = range(1, LAYERS)
    assert found["kv_rows_us"] == near({
        str(n): (CALL + sum(layer_us(layer, n) for layer in behind)) / (LAYERS - 1) for n in (1, 2, 4, 8)
    })  # fmt: skip
    # Layer by layer, each layer after the first also takes its call; within a whole pass it does not.
    again = CALL + mean(*(layer_us(layer, 1) for layer in behind)) - mean(*(layer_us(layer, 1) for layer in range(LAYERS)))
    assert found["resumed_step_us"] == near({"": again})[""]
    counts, contexts = (1, 2, 4, 8, 16), (36, 12, 4)
    assert found["tree_us"] == near({f"{n} {at}": LAYERS * (2 * n + at / 2) for at in contexts for n in counts})
    assert found["beams_us"] == near({str(n): READ["beams"] + n for n in counts})
    assert [*found["tree_us"]] == [f"{n} {at}" for at in contexts for n in counts]
    # Two samples each; forks always have at least two.
    assert {*costs.samples} == {2}
    at_12 = [each for each in costs.asked if each.output.step.at == 12 and len(each.output.step.tokens) == 1]
    asked = {each.kind: each for each in at_12}
    # One read before three timed ones; layer by layer and after whole passes, at position 12 in turns 1 and 3.
    often = dict.fromkeys(READS, 3) | {"next": 3 * 4 + 2 * 3, "beams": 2}
    often |= dict.fromkeys(("confidence", "saturation"), 3 + 2 * LAYERS)
    assert Counter(each.kind for each in at_12) == often
    assert Counter(len(step.tokens) for step in costs.passes if step.layers.kv_only) == dict.fromkeys((1, 2, 4, 8), 3)
    assert {each.kind for each in costs.asked} == {*READS}
    assert {kind: each.token for kind, each in asked.items() if each.token is not None} == {"probability": 7, "distance": 7}
    assert [kind for kind, each in asked.items() if each.against is not None] == ["residual", "residual_mass"]
    assert Counter(each.kind for each in costs.asked if each.against is not None) == {"residual": 3, "residual_mass": 3}
    assert (asked["top"].width, asked["next"].width) == (3, 1)
    assert {each.offset for each in costs.asked} == {-1}
    # Layer by layer twice, then whole: never at the previous token's position, and always after the same context.
    alone = [step.at for step in costs.passes if step.compared and step.layers.last == step.layers.first + 1]
    assert alone == [12 + turn % 2 for turn in range(3) for _ in range(2 * LAYERS)]
    whole = [
        step
        for step in costs.passes
        if (step.tokens, step.layers.first, step.layers.last, step.compared) == ((5,), 0, LAYERS, False)
    ]
    assert [(step.at, step.heads) for step in whole if step.at >= 12] == [(12 + turn % 2, 1) for turn in range(3)]
    for count in ("1", "3"):  # without plain decoding's own overhead
        births = []
        for turn in range(2):
            parameters = ppd.Parameters(LAYERS, 3, int(count))
            costs.copies = 0
            world = forced_outcomes.world(parameters, 6, 6, {"match_rate": 0.6}, seed=turn)
            Real({"target": decoder}, answers=world).run(ppd.decode(parameters, tuple(range(6)), 6), 6)
            births.append(COPY * costs.copies / 6)
        assert found["fork_us"][count][1] == pytest.approx(mean(*births), abs=0.2) != 0
        assert (found["fork_us"][count][0] == found["fork_us"][count][2]) == (births[0] == births[1])


def test_long_context_of_hypotheses_is_timed_if_positions_suffice(
    costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 positions: three times 26 and 18 hypotheses just fit."""
    decoder = real_models.decoders("llama", dtype="float32")["target"]
    for name, value in (("WARM_UPS", 0), ("KV_ONLY_TOKENS", ()), ("FORKED_TOGETHER", ()), ("READS", ())):
        monkeypatch.setattr(read_times, name, value)
    for most, contexts in ((18, ["78", "26", "8"]), (19, ["26", "8"])):
        monkeypatch.setattr(read_times, "HYPOTHESES", (most,))
        assert [*read_times.time_reads(decoder, 26, 1)["tree_us"]] == [f"{most} {at}" for at in contexts]
    one = real_models.decoders("llama", "draft")["draft"]
    one.layers = 1  # no layer after an exit, so nothing could be forked there
    monkeypatch.setattr(read_times, "FORKED_TOGETHER", (1,))
    assert read_times._forks(one, 1) == {}


def test_times_after_pauses_and_of_few_layers(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes longer by a tenth of the pause before it."""
    decoder = real_models.decoders("llama", dtype="float32")["target"]
    monkeypatch.setattr(read_times, "STEADY_AFTER", 2)
    costs.clock.tick, costs.idle = 1e-6, 0.1
    found = read_times.time_after_pauses(decoder, 12, 4)
    assert found["repeats"] == 4

    def whole(tokens: int, gap: int) -> float:
        return CALL + EMBEDDING + sum(layer_us(layer, tokens) for layer in range(LAYERS)) + gap / 10

    def about(expected: dict[str, float]) -> dict[str, Any]:
        return {name: pytest.approx([each] * 3, abs=4.0) for name, each in expected.items()}  # clock readings

    assert found["after_gap_us"] == about({str(gap): whole(1, gap) for gap in (0, 500, 1000, 2000, 4000, 8000)})
    assert found["wide_us"] == about({f"{n} {gap}": whole(n, gap) for n in (4, 9) for gap in (0, 1000, 4000)})
    # A layer is marked by clock readings, one of which is within.
    assert found["short_us"] == {str(few): pytest.approx([mean(*(1 + layer_us(layer, 1) for layer in range(few)))] * 3, abs=0.01)
                                 for few in (1, 2, 4, 5)}  # fmt: skip
    assert costs.samples == [4] * 6 + [2] * 6 + [4] * 4
    single = [step.at for step in costs.passes[1:] if len(step.tokens) == 1 and step.layers.last == LAYERS]
    assert single == [12, 13] * (len(single) // 2)  # never at the position of the previous pass
    assert {step.heads for step in costs.passes[1:] if step.layers.last == LAYERS} == {0, 1}
    whole_only = costs.passes[1 : 1 + 6 * 6 + 6 * 4]
    assert {(step.heads, len(step.tokens)) for step in whole_only} == {(1, 1), (1, 4), (1, 9)}
    for name, value in (("GAPS", ()), ("WIDTHS_AFTER_PAUSES", ()), ("SHORT_PASSES", (1, LAYERS, LAYERS + 1))):
        monkeypatch.setattr(read_times, name, value)
    costs.samples.clear()
    assert [*read_times.time_after_pauses(decoder, 12, 1)["short_us"]] == ["1", str(LAYERS)]
    assert costs.samples == [1, 1]  # each layer once
