"""Decoding by CUDA graphs gives the results of decoding without, for every sequence and every read, after any replays.

A stand-in for graphs (`tests.support.fake_cuda_graphs`) detects constant arguments in a capture, memory that others reuse, and
waits for the device, as a GPU would.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.interpreters.in_one_process import RandomDraws, Real
from calibrate.untested_on_gpu import cuda_graphs
from calibrate.untested_on_gpu.cuda_graphs import WIDEST, Graphs
from model.base.checks import ParameterError
from model.logs import forced_outcomes
from model.methods.adaptive import algorithm as adaptive
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.beam import algorithm as beam
from model.methods.bild import algorithm as bild
from model.methods.early_exit import algorithm as early_exit
from model.methods.hierarchical import algorithm as hierarchical
from model.methods.ppd import algorithm as ppd
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.speculative import algorithm as speculative
from model.steps import Batch, Forward, LayerSpan, Read
from tests.support import fake_cuda_graphs, real_models
from tests.support.fake_cuda_graphs import Cuda
from tests.support.real_models import DEPTHS
from tests.support.tiers import examples

KINDS = ("llama", "gpt2", "opt", "gpt_neox", "phi")
LAYERS = DEPTHS["target"]
SMALL = {"draft_layers": DEPTHS["draft"]}
THREE = SMALL | {"medium_layers": DEPTHS["medium"]}
ROOM = 64
PROMPTS = ([3, 4, 5, 6, 17], [7], [2, 9, 11, 3, 5, 8, 1, 20, 4])

CHOICES: dict[str, tuple[Any, Any]] = {
    "plain": (autoregressive, autoregressive.Parameters(LAYERS)),
    "speculative": (speculative, speculative.Parameters(LAYERS, 3, **SMALL)),
    "speculative, sampled": (speculative, speculative.Parameters(LAYERS, 3, sampled=True, **SMALL)),
    "adaptive": (adaptive, adaptive.Parameters(LAYERS, "heuristic", max_draft_length=6, **SMALL)),
    "adaptive, confidence": (
        adaptive, adaptive.Parameters(LAYERS, "confidence", max_draft_length=6, confidence_threshold=0.3, **SMALL)
    ),
    "hierarchical": (hierarchical, hierarchical.Parameters(LAYERS, 3, "recursive", 2, **THREE)),
    "bild": (bild, bild.Parameters(LAYERS, 4, 0.6, 1.0, **SMALL)),
    "bild in itself": (bild, bild.Parameters(LAYERS, 4, 0.9, 1.0, exit_layer=3)),
    "skipdecode": (skipdecode, skipdecode.Parameters(LAYERS, 2, LAYERS, 5, 60, rounding="half-up")),
    "exit at a layer": (early_exit, early_exit.Parameters(LAYERS, exit_layer=3)),
    "exit by confidence": (early_exit, early_exit.Parameters(LAYERS, threshold=0.5)),
    "exit by confidence, backfill": (early_exit, early_exit.Parameters(LAYERS, threshold=0.5, fill="backfill")),
    "exit by states": (early_exit, early_exit.Parameters(LAYERS, "state", first_check=2, threshold=0.8)),
    "exit by states, backfill": (early_exit, early_exit.Parameters(LAYERS, "state", threshold=0.9, fill="backfill")),
}  # fmt: skip
APART: dict[str, tuple[Any, Any]] = {
    "beams": (beam, beam.Parameters(LAYERS, 3, 2, **SMALL)),
    "beams of hypotheses": (beam, beam.Parameters(LAYERS, 3, 2, "per-beam", **SMALL)),
    "ppd": (ppd, ppd.Parameters(LAYERS, 3, 2)),
    "ppd, batched": (ppd, ppd.Parameters(LAYERS, 3, 3, batched=True)),
}


class Looking(Real):
    """Records every output that is read, at the time of the read."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.seen: list[Any] = []

    def read(self, step: Read) -> Any:
        """See `Real`."""
        for each in (step.output, step.against):
            if each is not None and each.step.heads:
                self.seen.append(each.logits.clone())
        return super().read(step)


def looked(decoders: Any, choice: tuple[Any, Any], prompt: list[int], tokens: int = 16, **more: Any) -> Looking:
    """Decode with as many roles as there are; return the recorded reads."""
    module, parameters = choice
    own = {name: more.pop(name) for name in ("answers",) if name in more}
    real = Looking(decoders, random_draws=RandomDraws(3), **own)
    real.run(module.decode(parameters, prompt, tokens, **more), parameters.total_tokens(tokens) if more or own else tokens)
    return real


def same(one: Looking, other: Looking) -> None:
    """Compare tokens, commits, passes and reads."""
    assert one.work.committed == other.work.committed
    assert one.work.account == other.work.account
    assert len(one.seen) == len(other.seen)
    for mine, theirs in zip(one.seen, other.seen, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def graphed(decoders: Any, texts: int = 1, room: int = ROOM) -> tuple[dict[str, Graphs], Cuda]:
    """Return the same decoders with graphs of one stand-in."""
    cuda = Cuda()
    return {role: Graphs(each, room, texts, cuda) for role, each in decoders.items()}, cuda


FEW = ("speculative", "skipdecode", "exit by states", "exit by confidence, backfill")


@pytest.mark.parametrize(("choices", "prompts", "tokens", "kind"), [
    pytest.param([*CHOICES], PROMPTS[:2], 9, KINDS[0], id=KINDS[0]),
    *(pytest.param(FEW, PROMPTS[:2], 8, kind, id=kind) for kind in KINDS[1:]),
    *(pytest.param([*CHOICES], PROMPTS, 12, kind, id=f"{kind} all", marks=pytest.mark.slow) for kind in KINDS),
])  # fmt: skip
def test_every_method_gives_the_same_with_graphs(
    choices: Sequence[str], prompts: Sequence[list[int]], tokens: int, kind: str
) -> None:
    """In sequence with the same graphs, after prompts of different lengths, and the first one again at the end."""
    plain = real_models.decoders(kind, "draft", "medium")
    by, cuda = graphed(plain)
    expected = {
        (name, place): looked(plain, CHOICES[name], prompt, tokens) for name in choices for place, prompt in enumerate(prompts)
    }
    for turn in range(2):
        for name in choices:
            for place, prompt in enumerate(prompts[turn:], turn):
                same(looked(by, CHOICES[name], prompt, tokens), expected[name, place])
                assert not cuda_graphs.launched_separately(by.values()), name
        if turn == 0:
            made, replayed = cuda_graphs.captured(by.values()), sum(each.replays for each in cuda.graphs)
            assert made == len(cuda.graphs)
    assert cuda_graphs.captured(by.values()) == made  # a repeated run captures nothing
    assert sum(each.replays for each in cuda.graphs) > replayed


@pytest.mark.parametrize("name", APART)
def test_passes_that_cannot_be_captured_use_the_same_rows(name: str) -> None:
    plain = real_models.decoders("llama", "draft")
    by, _ = graphed(plain)
    for prompt in PROMPTS[:2]:
        same(looked(by, APART[name], prompt, 8), looked(plain, APART[name], prompt, 8))
        same(looked(by, CHOICES["speculative"], prompt, 8), looked(plain, CHOICES["speculative"], prompt, 8))
    assert bool(cuda_graphs.launched_separately(by.values())) == (name != "ppd")


RAGGED: dict[str, Any] = {"lengths": (9, 4, 9, 6), "sequences": 3, "batching": "static"}
BATCHES: dict[str, tuple[Any, Any]] = {
    "skipdecode": (skipdecode, skipdecode.Parameters(LAYERS, 2, LAYERS, 5, 60, rounding="half-up", **RAGGED)),
    "exit at a layer": (early_exit, early_exit.Parameters(LAYERS, exit_layer=3, **RAGGED)),
    "exit by confidence": (early_exit, early_exit.Parameters(LAYERS, threshold=0.5, **RAGGED)),
    "backfill": (early_exit, early_exit.Parameters(LAYERS, threshold=0.6, fill="backfill", lengths=(9, 4), batching="static")),
}


@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_give_the_same_with_graphs(kind: str, name: str) -> None:
    """Real outcomes of several prompts, and forced ones: sequences end one by one, and another batch follows."""
    plain = real_models.decoders(kind)
    by, _ = graphed(plain, texts=3)
    choice = BATCHES[name]
    prompts = [[3, 4, 5, 6, each] for each in range(7, 11)][: choice[1].decoded_sequences]
    for _ in range(2):
        same(*[looked(each, choice, prompts[0], 9, prompts=prompts) for each in (by, plain)])
        rates = {} if name in ("skipdecode", "exit at a layer") else {"exit_rate": 0.3}
        forcing = [forced_outcomes.world(choice[1], 5, 9, rates, seed=4) for _ in range(2)]
        both = zip((by, plain), forcing, strict=True)
        same(*[looked(each, choice, [*range(5)], 9, answers=world) for each, world in both])
    assert not cuda_graphs.launched_separately(by.values())


def test_sequences_take_turns_in_the_buffers() -> None:
    """Rows of the others are in separate buffers, and are copied back at their turn."""
    plain = real_models.decoders("llama")
    by, _ = graphed(plain, texts=2)
    own: dict[str, Any] = {"plain": plain, "graphs": by, "plain 2": plain, "graphs 2": by}
    held = {name: (Real(each), Real(each).new_cache()) for name, each in own.items()}
    one: dict[str, list[Any]] = {name: [] for name in held}
    for at in range(12):
        for name, (real, cache) in held.items():
            token = (3 * at + 5 * name.endswith("2")) % real_models.VOCABULARY
            out = real.forward(cache, Forward("target", (token,), at, LayerSpan(0, LAYERS), heads=1))
            one[name].append(out.logits.clone())
    for mine, theirs in (("plain", "graphs"), ("plain 2", "graphs 2")):
        assert torch.allclose(torch.cat(one[mine]), torch.cat(one[theirs]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS[:2])
@settings(max_examples=examples(9))
@given(data=st.data())
def test_arbitrary_passes_give_the_same_with_graphs(kind: str, data: st.DataObject) -> None:
    """At any position up to the end, of any width, through any layers; forked, with both caches continued."""
    plain = real_models.decoders(kind)["target"]
    made = Graphs(plain, 24, cuda=Cuda())
    texts = [(plain.rows(), made.rows())]
    ends = [0]
    kept: list[tuple[Any, Any]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        if len(texts) < 3 and data.draw(st.integers(0, 5)) == 0:
            fork = data.draw(st.integers(0, len(texts) - 1))
            texts.append((texts[fork][0].copy(), texts[fork][1].copy()))
            ends.append(ends[fork])
        which = data.draw(st.integers(0, len(texts) - 1))
        at = data.draw(st.integers(0, min(ends[which], 20)))
        tokens = tuple(data.draw(st.lists(st.integers(0, 28), min_size=1, max_size=4)))
        cut = data.draw(st.integers(1, LAYERS))
        rows, states, compared = texts[which], [None, None], data.draw(st.booleans())
        for first, last in ((0, cut), (cut, LAYERS)) if cut < LAYERS else ((0, LAYERS),):
            before: tuple[list[Any], list[Any]] = [], []
            for number, decoder in enumerate((plain, made)):
                states[number] = decoder.run(
                    tokens, at, LayerSpan(first, last), rows[number], states[number], seen=before[number] if compared else None
                )  # type: ignore[call-overload]
            kept += [(states[0], states[1]), *zip(*before, strict=True)]
            assert len(before[1]) == compared * (last - first)
            kept.append((plain.logits(states[0], last), made.logits(states[1], last)))
        ends[which] = at + len(tokens)
    for mine, theirs in kept:
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_missing_rows_are_refused() -> None:
    """A pass after more positions than its layers have would see the rows of others."""
    made = Graphs(real_models.decoders("llama")["target"], ROOM, cuda=Cuda())
    rows = made.rows()
    state = made.run((1, 2), 0, LayerSpan(0, 2), rows)
    with pytest.raises(RuntimeError, match="layer 2 holds 0 rows"):
        made.run((1,), 1, LayerSpan(2, LAYERS), rows, state[-1:])


def test_prompts_are_launched_by_kernel_on_the_same_rows() -> None:
    plain = real_models.decoders("llama")["target"]
    made = Graphs(plain, 96, cuda=Cuda())
    rows, own = made.rows(), plain.rows()
    for at, width in ((0, cuda_graphs.WIDEST), (cuda_graphs.WIDEST, cuda_graphs.WIDEST + 1), (40, 1)):
        before = made.captured
        tokens = tuple(each % 29 for each in range(width))
        found = made.run(tokens, at, LayerSpan(0, LAYERS), rows)
        assert torch.allclose(found, plain.run(tokens, at, LayerSpan(0, LAYERS), own), rtol=1e-9, atol=1e-9)
        assert (made.captured == before) == (width > cuda_graphs.WIDEST)
        assert all(layer.fixed and layer.length == at + width for layer in rows.layers)
    assert not made.separate_launches


def test_passes_with_a_callback_are_launched_by_kernel() -> None:
    made = Graphs(real_models.decoders("llama")["target"], ROOM, cuda=Cuda())
    called: list[int] = []
    made.run((1,), 0, LayerSpan(0, LAYERS), made.rows(), between=called.append)
    assert called == [*range(LAYERS)]
    assert made.separate_launches == {"has a callback": 1}
    assert made.captured == 0


def test_rows_of_hypotheses_are_not_captured() -> None:
    """Their rows are in order of arrival, not by position: a plain pass after them is launched kernel by kernel too."""
    plain = real_models.decoders("llama")["target"]
    made, whole = Graphs(plain, ROOM, cuda=Cuda()), LayerSpan(0, LAYERS)
    found = []
    for decoder in (plain, made):
        rows = decoder.rows()
        decoder.run((1, 2, 3), 0, whole, rows)
        decoder.run((4, 5), 3, whole, rows, tree=(-1, -1))
        found.append(decoder.run((6,), 4, whole, rows))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-9)
    assert made.separate_launches == {"follows several hypotheses": 2}


def test_pass_is_run_on_a_side_stream_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """This makes what a library makes once, which a capture could not."""
    plain, cuda = real_models.decoders("llama")["target"], Cuda()
    current: list[str] = []
    monkeypatch.setattr(cuda_graphs.machine, "make_current", current.append)
    made, beside, layer, waits = Graphs(plain, ROOM, cuda=cuda), list[bool](), plain._layer, list[Any]()
    assert (current, made.side.device) == (["cpu"], plain.device)  # on the model's device

    def noted(*given: Any) -> Any:
        beside.append(cuda.current is made.side)
        waits.append(cuda.waits[-1])
        return layer(*given)

    monkeypatch.setitem(vars(plain), "_layer", noted)
    rows = made.rows()
    for at in range(3):
        made.run((1,), at, LayerSpan(0, 1), rows)
    assert beside == [True] * cuda_graphs.WARM_UPS + [False]
    assert cuda_graphs.WARM_UPS > 0
    # It begins after earlier work, and the capture begins after it.
    assert waits == [(made.side, cuda.current)] * cuda_graphs.WARM_UPS + [(cuda.current, made.side)]


def test_heads_are_captured_up_to_the_widest_pass_or_batch() -> None:
    """By number of states; for more states the decoder itself computes the logits."""
    plain = real_models.decoders("llama")["target"]
    for texts, most in ((1, WIDEST), (WIDEST + 3, WIDEST + 3)):
        made = Graphs(plain, 8, texts, Cuda())
        for count in (1, most, most, most + 1):
            states = torch.linspace(-1, 1, 16 * count, dtype=torch.float64).view(count, 16)
            assert torch.allclose(made.logits(states, LAYERS), plain.logits(states, LAYERS), rtol=1e-12)
        assert made.captured == 2


def test_inputs_are_copied_again_after_forget() -> None:
    """Positions are computed for a new position only, and tokens copied if they differ, until `forget`."""
    plain, cuda = real_models.decoders("llama")["target"], Cuda()
    made = Graphs(plain, ROOM, cuda=cuda)
    rows = made.rows()
    made.run((1, 2), 0, LayerSpan(0, 2), rows)
    [inputs] = made._all_inputs.values()
    graph, copied = inputs.graph.graph, []
    numbers, inputs.numbers = inputs.numbers, SimpleNamespace(copy_=lambda new, **_: copied.append(numbers.copy_(new).tolist()))  # type: ignore[assignment]
    before = graph.replays
    for tokens, at, replays, times in (((1, 2), 0, 0, 0), ((1, 3), 0, 0, 1), ((1, 3), 1, 1, 2), ((1, 3), 1, 1, 2)):
        made.run(tokens, at, LayerSpan(0, 2), rows)
        assert (graph.replays - before, len(copied)) == (replays, times)
    assert copied == [[1, 3, 0], [1, 3, 1]]
    made.forget()
    made.run((1, 3), 1, LayerSpan(0, 2), rows)
    assert (graph.replays - before, len(copied)) == (2, 3)


def test_trained_heads_have_separate_graphs() -> None:
    torch.manual_seed(1)
    plain = real_models.decoders("llama")["target"]
    plain.heads = {}
    made = Graphs(plain, ROOM, cuda=Cuda())
    states = torch.randn(2, 16, dtype=torch.float64)
    for _ in range(2):
        for layer in (2, LAYERS):
            assert torch.allclose(made.logits(states, layer), plain.logits(states, layer))
        plain.heads[2] = torch.randn(29, 16, dtype=torch.float64)
    del plain.heads[2]


def test_ended_sequences_are_released_without_a_collection() -> None:
    """Else the first pass of the next sequence would copy their rows, in the middle of a timed run."""
    by, _ = graphed(real_models.decoders("llama", "draft", "medium"))
    gc.collect()
    gc.disable()
    try:
        for choice in CHOICES.values():
            looked(by, choice, PROMPTS[0], 6)
            assert all(each._buffers.owner() is None for each in by.values())
    finally:
        gc.enable()


def test_copy_of_rows_is_separate() -> None:
    made = Graphs(real_models.decoders("llama")["target"], ROOM, cuda=Cuda())
    rows = made.rows()
    made.run((1, 2, 3), 0, LayerSpan(0, LAYERS), rows)
    other = rows.copy()
    was = [layer.keys[:, :, :3].clone() for layer in rows.layers]  # type: ignore[index]
    made.run((9,), 0, LayerSpan(0, LAYERS), rows)
    assert all(torch.equal(layer.keys[:, :, :3], each) for layer, each in zip(other.layers, was, strict=True))  # type: ignore[index]
    assert not any(layer.fixed for layer in other.layers)


@pytest.mark.parametrize("width", [2, WIDEST + 1])
def test_batched_passes_give_the_same_with_graphs(width: int) -> None:
    """Including those too wide for a graph; also with skipped layers and with states before each layer."""
    plain = real_models.decoders("llama")["target"]
    made = Graphs(plain, ROOM, sequences=2, cuda=Cuda())
    tokens = tuple((7 * place + 3) % real_models.VOCABULARY for place in range(2 * width))
    seen: dict[str, list[Any]] = {"with": [], "without": []}
    found = [
        by.run(
            tokens, 0, LayerSpan(0, LAYERS, ((1, 2),)), plain.rows(), batch=Batch.uniform((0, 1), 0, width), seen=seen[name]
        ).clone()
        for name, by in (("with", made), ("without", plain))
    ]
    torch.testing.assert_close(*found)
    assert len(seen["with"]) == len(seen["without"]) == LAYERS - 1
    for one, other in zip(*seen.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_passes_larger_than_the_buffers_are_refused() -> None:
    plain = real_models.decoders("llama")["target"]
    made = Graphs(plain, 8, sequences=2, cuda=Cuda())
    rows = made.rows()
    made.run((1,) * 8, 0, LayerSpan(0, LAYERS), rows)
    with pytest.raises(ParameterError, match=r"at most 8 positions together.*, got 9; make room for more"):
        made.run((1,), 8, LayerSpan(0, LAYERS), rows)
    with pytest.raises(ParameterError, match=r"batch must be at most 2.*, got 3"):
        made.run((1, 2, 3), 0, LayerSpan(0, LAYERS), made.rows(), batch=Batch.uniform((0, 1, 2), 0))
    far = Graphs(plain, 200, cuda=Cuda())
    with pytest.raises(ParameterError, match="at most 96 positions"):
        far.run((1, 2), 95, LayerSpan(0, LAYERS), far.rows())
    for name, value in (("room", 0), ("sequences", 0)):
        with pytest.raises(ParameterError, match=name):
            Graphs(plain, **{"room": 8, name: value}, cuda=Cuda())


def test_models_that_cannot_be_captured_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"mode cuda-graph needs a GPU, and the device is cpu; take --mode eager"):
        Graphs(real_models.decoders("llama")["target"], 8)
    with pytest.raises(ParameterError, match="mode must be eager with an encoder-decoder such as t5 target, got cuda-graph"):
        Graphs(real_models.decoders("t5")["target"], 8, cuda=Cuda())
    for kinds, growing in (("dynamic", "dynamic"), ({"near": "default", "far": "longrope"}, "longrope"), ("yarn", ""), ({}, "")):
        rotary = SimpleNamespace(rope_type=kinds)
        model: Any = SimpleNamespace(
            name="long", config=SimpleNamespace(is_encoder_decoder=False), body=SimpleNamespace(rotary_emb=rotary),
        )  # fmt: skip
        if growing:
            said = f"^mode must be eager with long, whose positions are of kind {growing}: they depend on the sequence"
            with pytest.raises(ParameterError, match=said):
                cuda_graphs.check(model)
        else:
            cuda_graphs.check(model)
    assert cuda_graphs.cuda_of("cuda:1") is cuda_graphs.cuda_of(torch.device("cuda")) is torch.cuda


# --- the stand-in ---


def captured(body: Any, pool: Any = None) -> tuple[Any, Any]:
    graph, cuda = fake_cuda_graphs.CUDAGraph(), Cuda()
    with cuda.graph(graph, pool=fake_cuda_graphs.Pool() if pool is None else pool):
        made = body()
    return graph, made


def test_replay_repeats_the_recorded_operations() -> None:
    number, total = torch.tensor([2.0]), torch.tensor([1.0])
    graph, made = captured(lambda: total.add_(number.view(1)) * 3)
    assert total.item() == 1  # recording runs nothing
    assert made.isnan().all()
    for value, expected in ((2.0, 3.0), (4.0, 7.0)):
        number.fill_(value)
        graph.replay()
        assert total.item() == expected
        assert made.item() == 3 * expected


def test_graphs_of_a_pool_overwrite_each_others_outputs() -> None:
    pool, number = fake_cuda_graphs.Pool(), torch.tensor([2.0])
    (first, one), (second, two) = (captured(lambda each=each: number * each, pool) for each in (2, 3))
    first.replay()
    assert one.item() == 4
    second.replay()
    assert two.item() == 6
    assert one.isnan().all()


@pytest.mark.parametrize(
    "asking",
    [
        lambda each: each.tolist(), lambda each: each.sum().item(), lambda each: bool(each[0] > 1), lambda each: each.nonzero(),
        lambda each: each + torch.tensor([1.0]), lambda each: each[each > 1], lambda each: each.cpu(), lambda each: int(each[0]),
        lambda each: each.numpy(),
    ],
)  # fmt: skip
def test_values_cannot_be_read_or_copied_in_a_capture(asking: Any) -> None:
    number = torch.ones(2)
    with pytest.raises(fake_cuda_graphs.CaptureError, match="not permitted when stream is capturing"):
        captured(lambda: asking(number))


def test_constant_tokens_in_a_capture_are_detected() -> None:
    """The plain decoder's pass cannot be captured as it is."""
    decoder = real_models.decoders("llama")["target"]
    with pytest.raises(fake_cuda_graphs.CaptureError, match="tensor"):
        captured(lambda: decoder.run((1, 2), 3, LayerSpan(0, LAYERS), decoder.rows()))
