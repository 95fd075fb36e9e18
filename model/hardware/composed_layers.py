"""A model's layer out of the times of its operations: products of matrices, attention, and what lies between them.

Tables of operations (profiles of kind `operations`) hold products by m, n, k and the attention of one new token for each text.
A layer is four or five products, one attention and a few passes over its states. Shapes between those measured are interpolated
by their efficiency: the time over what arithmetic and bandwidth allow, on top of what launching the shortest product takes.

How far that may be off is found by leaving each measured time out in turn (`gemm_left_out`, `attention_left_out`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import BYTES, Shape
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import isotonic, profile
from model.hardware.interpolation import Floats, Surface, parallelograms, residuals
from model.hardware.profile import Profile

SHAPES_NEAR = ((0, 1), (0, -1), (0, 2), (0, -2), (1, 0), (-1, 0))
"""Steps along n and k to the shapes that behave like one: four along k, two along n. These and `M_NEAR` are the best of 72 choices
on the tables of the H100 and the A100; those of the L40S had no say."""
M_NEAR = (1, -1, 2, -2)
"""Steps along m to the times that such shapes are compared at."""
OFF = 0.05
"""Relative error of a composed layer: layers of three models that Vidur measured on two GPUs are off by less in the median, up to
64 tokens, composed of products that others measured."""
TILE = 64
"""Rows that kernels of products take at a time: beyond one tile, a product of rows between those measured costs what a whole number
of tiles does. The least biased of 1, 16, 32, 64, 128 and 256 on layers of the A40 that were thinned to coarse rows (-0.5 % where
interpolation is off by -6.6 %, at 257 to 512 tokens); those of the H100 and the A100 had no say, and gain as much."""
SMALL_SHARE, SMALL_LANE = 0.66, 15.6e9
"""Share of the bandwidth that norms, rotations and activations reach over many tokens [-], and what one of their blocks, which has
a token to itself, moves [bytes/s]. Fitted to layers of Llama-2-7B and phi-2 on three GPUs (`calibrate.fits.small_kernels`); no
other model had a say."""
LAYER_ERRORS = "layer_errors"
"""In `facts`: how far layers composed of a table were off from measured ones, as rows of tensor_parallel, most tokens and relative
error."""
SHORTEST = "shortest_gemm_s"
"""In `facts`: the shortest product of a table that was thinned since."""
ROPE = "rope"
"""In `facts["decode_includes"]`: the table's attention rotates positions itself."""


class LeaveOneOutErrors(NamedTuple):
    """Relative errors of times predicted without themselves, and where: m of a product, or the context of attention."""

    at: Floats
    error: Floats

    def median(self, low: float = 0, high: float = np.inf) -> float:
        """The median size of the errors between two coordinates, both included; nan where there are none [-]."""
        within = np.abs(self.error[(self.at >= low) & (self.at <= high)])
        return float(np.median(within)) if within.size else float("nan")

    def percentile(self, share: float) -> float:
        """The size that a share of the errors [%] does not pass [-]."""
        return float(np.percentile(np.abs(self.error), share))


def _of_operations(operations: Profile) -> None:
    if operations.kind != "operations":
        raise ParameterError(
            f"profile {operations.name} is one of kind {operations.kind}; a layer is composed of one of operations"
        )


# --- products ---


class Products:
    """Times of products of an m by k and a k by n matrix, for any m, n and k.

    Parameters
    ----------
    operations
        A profile of operations.
    """

    def __init__(self, operations: Profile) -> None:
        _of_operations(operations)
        rows = operations.rows("gemm")
        self._operations = operations
        self._bytes = BYTES[operations.dtype]
        self.m, n, k, seconds = (rows[name].to_numpy().astype(np.float64) for name in ("m", "n", "k", "time_s"))
        self.launch = float(operations.facts.get(SHORTEST, seconds.min()))
        """The shortest product that was measured: about what launching one takes [s]."""
        self.tokens: Floats = np.unique(self.m)
        self._efficiency = Surface({"m": self.m, "n": n, "k": k}, seconds / self._least(self.m, n, k))

    def _least(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """What arithmetic and bandwidth allow, on top of a launch [s]."""
        m_, n_, k_ = (np.asarray(each, dtype=np.float64) for each in (m, n, k))
        moved = self._bytes * (n_ * k_ + m_ * (n_ + k_)) / self._operations.bandwidth
        return np.asarray(np.maximum(moved, 2 * m_ * n_ * k_ / self._operations.rate) + self.launch)

    def __call__(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Time of a product [s]; a measured one is what was measured, rows between those measured fill their last tile."""
        rows = self._filled(m)
        return self._efficiency(rows, n, k).seconds * self._least(rows, n, k)

    def _filled(self, m: ArrayLike) -> Floats:
        """Rows that a kernel computes: whole tiles beyond the first, and no more than the next that were measured."""
        rows = np.asarray(m, dtype=np.float64)
        after = np.append(self.tokens, np.inf)[np.searchsorted(self.tokens, rows)]
        return np.where(rows <= TILE, rows, np.minimum(np.ceil(rows / TILE) * TILE, after))

    def steps(self, most: float) -> Floats:
        """Rows up to so many between which times are smooth: those measured, and each tile's last and the next one's first."""
        last = min(most, float(self.tokens[-1]))
        tiles = np.arange(2 * TILE, last + 1, TILE)
        every = np.unique(np.concatenate([self.tokens, tiles, tiles + 1, [TILE + 1.0]]))
        return every[every <= last]

    def left_out(self) -> list[Floats]:
        """Relative errors of each measured efficiency, predicted from its neighbours along m, n and k: arrays over (m, n, k)."""
        return self._efficiency.left_out()

    def cold(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Time of a product whose weights come from memory [s].

        A product that is timed again and again may find them in the device's cache; in a pass all other layers have been there
        since.
        """
        read = np.asarray(n, dtype=np.float64) * np.asarray(k) * self._bytes / self._operations.bandwidth
        return np.asarray(np.maximum(self(m, n, k), read))


def gemm_left_out(operations: Profile, near: Sequence[tuple[int, int]] = SHAPES_NEAR) -> LeaveOneOutErrors:
    """Relative error of each product's time, predicted from the shapes next to it, and from how its times and theirs compare at
    the nearest other m.

    Steps in which kernels are chosen are nearly the same for shapes next to it, four along k and two along n: steps `near`. What
    one of them takes at this m, times the ratio of the two at another m, is a prediction; the median of all of them counts
    (`model.hardware.interpolation.parallelograms`). Without any, `near` empty, its neighbours in m are interpolated in logarithms.
    The ends of lines are left out either way. `at` is m, both of shape (products,).
    """
    _of_operations(operations)
    rows = operations.rows("gemm")
    axes, places = zip(*(np.unique(rows[name].to_numpy(), return_inverse=True) for name in ("n", "k", "m")), strict=True)
    logs: Floats = np.full(tuple(axis.size for axis in axes), np.nan)
    logs[tuple(place.reshape(-1) for place in places)] = np.log(rows["time_s"].to_numpy())
    alone = residuals(logs, np.log(axes[2].astype(np.float64)))
    missed = logs - parallelograms(logs, near, M_NEAR)
    return _left_out(np.where(np.isnan(alone) | np.isnan(missed), alone, missed), axes[2])


def shapes_left_out(operations: Profile) -> LeaveOneOutErrors:
    """Relative error of each product's time, predicted as that of a shape that was not measured: from those next to it in n, and
    again in k.

    That is what `Products` does between shapes, by their efficiency, at an m that was measured; the ends of lines are left out.
    `at` is m, both of shape (predictions,).
    """
    products = Products(operations)
    along_m, *along = products.left_out()
    del along_m
    at = np.broadcast_to(products.tokens[:, None, None], along[0].shape)
    known = [~np.isnan(each) for each in along]
    return LeaveOneOutErrors(
        np.concatenate([at[each] for each in known]), np.concatenate([each[one] for each, one in zip(along, known, strict=True)])
    )


def attention_left_out(operations: Profile, *, alike: bool = True) -> LeaveOneOutErrors:
    """Relative error of each attention's time, predicted from its neighbours in context, corrected by what those miss where as
    many bytes are read.

    Shapes read as many bytes, in as many kernels, where batch and kv_heads multiply to the same and head_dim is the same; without
    `alike` the interpolation stands alone. `at` is the context, both of shape (times,).
    """
    _of_operations(operations)
    rows = operations.rows("decode")
    if not rows.height:
        raise ParameterError(f"profile {operations.name} has no rows of part decode; import its attention too")
    names = ("heads", "kv_heads", "head_dim", "batch", "context")
    heads, kv_heads, head_dim, batch, context = (rows[name].to_numpy() for name in names)
    shapes, line = np.unique(np.stack([heads, kv_heads, batch, head_dim], axis=1), axis=0, return_inverse=True)
    contexts, column = np.unique(context, return_inverse=True)
    logs: Floats = np.full((len(shapes), contexts.size), np.nan)
    logs[line.reshape(-1), column] = np.log(rows["time_s"].to_numpy())
    missed = residuals(logs, np.log1p(contexts.astype(np.float64)))
    read = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 3]], axis=1)
    expected: Floats = np.zeros(missed.shape)
    for size in np.unique(read, axis=0) if alike else ():
        places = np.flatnonzero((read == size).all(axis=1))
        if places.size < 2:
            continue
        for place in places:
            others = missed[places[places != place]]
            known = ~np.isnan(others).all(axis=0)
            expected[place, known] = _medians(others[:, known])
    return _left_out(missed - expected, contexts)


def _medians(values: Floats) -> Floats:
    """The median of what is known in each column: of few rows much faster than `np.nanmedian`."""
    ordered, count = np.sort(values, axis=0), (~np.isnan(values)).sum(axis=0)  # what is nan comes last
    column = np.arange(count.size)
    return np.asarray((ordered[(count - 1) // 2, column] + ordered[count // 2, column]) / 2)


def with_errors(operations: Profile) -> Profile:
    """The same profile of operations with the median errors of its parts, by leaving each time out where that can be done.

    Each is predicted from its own line alone. That is all a lookup between measured points has: nothing beside it was measured at
    that m or context either.
    """
    found = {"gemm": gemm_left_out(operations, ())}
    if "decode" in operations.parts:
        found["decode"] = attention_left_out(operations, alike=False)
    return replace(operations, errors={part: round(each.median(), 4) for part, each in found.items() if each.error.size})


def _left_out(missed: Floats, axis: Floats) -> LeaveOneOutErrors:
    """What was missed in logarithms, as relative errors of the prediction, and the place on the last axis of each."""
    known = ~np.isnan(missed)
    at = np.broadcast_to(axis.astype(np.float64), missed.shape)
    return LeaveOneOutErrors(at[known], np.expm1(-missed[known]))


# --- attention ---


class AttentionTimes:
    """Times of the attention of one new token for each text, for a number of heads that may not have been measured.

    Where heads and kv_heads were measured, their own times stand. Elsewhere the groups nearest in size (heads over kv_heads)
    stand in, by the cache that is read: a batch of 4 with 8 kv_heads reads what one text with 32 does.

    Parameters
    ----------
    operations
        A profile of operations.
    heads, kv_heads, head_dim
        Of one device.
    """

    def __init__(self, operations: Profile, heads: int, kv_heads: int, head_dim: int) -> None:
        _of_operations(operations)
        rows = operations.rows("decode")
        known = sorted({int(each) for each in rows["head_dim"]})
        if head_dim not in known:
            said = ", ".join(map(str, known)) or "none"
            raise ParameterError(
                f"head_dim must be one of {said}, those that profile {operations.name} has attention of, got {head_dim}"
            )
        rows = rows.filter(rows["head_dim"] == head_dim)
        own = rows.filter((rows["heads"] == heads) & (rows["kv_heads"] == kv_heads))
        self.measured = bool(own.height)
        """Whether these very heads were measured."""
        if not self.measured:
            grouped = np.log(rows["heads"].to_numpy() / rows["kv_heads"].to_numpy())
            far = np.abs(grouped - np.log(heads / kv_heads))
            own = rows.filter(far <= far.min() + 1e-9)
        read = own["kv_heads"].to_numpy() * own["batch"].to_numpy()
        points, place = np.unique(np.stack([own["context"].to_numpy(), read], axis=1), axis=0, return_inverse=True)
        times = own["time_s"].to_numpy()
        seconds = np.array([np.median(times[place.reshape(-1) == each]) for each in range(len(points))])
        self.contexts: Floats = np.unique(points[:, 0]).astype(np.float64)
        self.read: Floats = np.unique(points[:, 1]).astype(np.float64)
        self._kv_heads = kv_heads
        self._each = 2 * head_dim * BYTES[operations.dtype] / operations.bandwidth
        self._surface = Surface({"context": points[:, 0], "read": points[:, 1]}, seconds, bound=self._least)
        self._known = {(int(context), int(many)) for context, many in points}

    def __call__(self, context: ArrayLike, batch: ArrayLike) -> Floats:
        """Time of the attention of one layer [s]."""
        return self._surface(context, np.asarray(batch) * self._kv_heads).seconds

    def _least(self, context: ArrayLike, read: ArrayLike) -> Floats:
        """What reading keys and values takes at the bandwidth of the device [s]."""
        return np.asarray(np.asarray(read, dtype=np.float64) * (np.asarray(context) + 1) * self._each)

    def cold(self, context: ArrayLike, batch: ArrayLike) -> Floats:
        """The same where keys and values come from memory, as in a pass, whatever a repeated measurement finds in the cache [s]."""
        return np.asarray(np.maximum(self(context, batch), self._least(context, np.asarray(batch) * self._kv_heads)))

    def near(self, context: int, batch: int) -> bool:
        """Whether a point lies among those measured: on a measured context, its cache between measured ones of it."""
        read = batch * self._kv_heads
        return any((context, int(each)) in self._known for each in self.read if each >= read)


# --- a layer ---


def between(
    operations: Profile, part: Shape, tokens: ArrayLike, launch: float, *, share: float = SMALL_SHARE, lane: float = SMALL_LANE
) -> Floats:
    """What a layer runs besides its products and its attention, over so many tokens [s].

    Norms, the rotation of positions and the activation read and write states, each behind a launch. A norm is fused with the sum
    before it; it reads two states and writes two.
    """
    states = part.norms * 4 * part.hidden + (3 if part.gated else 2) * part.ffn
    kernels = part.norms + 1
    rotated = not part.positions and not part.buckets
    if rotated and ROPE not in operations.facts.get("decode_includes", ()):
        kernels += 1
        states += 2 * (part.heads + part.kv_heads) * part.head_dim
    return passed_over(operations, tokens, states, kernels * launch, share=share, lane=lane)


def passed_over(
    operations: Profile, tokens: ArrayLike, states: float, launch: float, *, share: float = SMALL_SHARE, lane: float = SMALL_LANE
) -> Floats:
    """Reading and writing so many numbers for each token, behind launches [s].

    A block has a token to itself, and all at once no more than a share of the device's bandwidth: few tokens take what one does.
    """
    row = states * BYTES[operations.dtype]
    together = np.asarray(tokens, dtype=np.float64) * row / (share * operations.bandwidth)
    return np.asarray(np.maximum(together, row / lane) + launch)


def layer_products(products: Products, part: Shape, tokens: ArrayLike) -> Floats:
    """The products of a layer: query, key and value in one, and gate and up in one, as engines fuse them [s]."""
    inner = part.heads * part.head_dim
    total = products.cold(tokens, inner + 2 * part.kv_heads * part.head_dim, part.hidden)
    total = total + products.cold(tokens, part.hidden, inner)
    total = total + products.cold(tokens, (2 if part.gated else 1) * part.ffn, part.hidden)
    return total + products.cold(tokens, part.hidden, part.ffn)


def head_rows(
    operations: Profile, products: Products, part: Shape, tokens: Floats, tensor_parallel: int = 1
) -> list[dict[str, Any]]:
    """Rows of a model's profile: its projection onto the vocabulary, or a device's share of it, and the norm before it."""
    seconds = products.cold(tokens, part.vocabulary, part.hidden) + passed_over(
        operations, tokens, 4 * part.hidden, products.launch
    )
    return [
        {"part": "head", "positions": int(at), "tensor_parallel": tensor_parallel, "time_s": float(each)}
        for at, each in zip(tokens, seconds, strict=True)
    ]


def spread(rows: list[dict[str, Any]], error: ArrayLike) -> list[dict[str, Any]]:
    """The same rows with an error for their quartiles, one for all or one for each: a composed time is none that was measured."""
    each = np.broadcast_to(np.asarray(error, dtype=np.float64), (len(rows),))
    return [
        row | {"low_s": row["time_s"] * (1 - float(share)), "high_s": row["time_s"] * (1 + float(share))}
        for row, share in zip(rows, each, strict=True)
    ]


def layer_error(operations: Profile, tokens: ArrayLike, tensor_parallel: int, off: float | None = None) -> Floats:
    """Relative error of a composed layer over so many tokens, split so many ways: `off`, or what the table's facts say [-].

    Beyond the tokens and tensor_parallel that facts have, the last of them.
    """
    at = np.asarray(tokens, dtype=np.float64)
    known = [] if off is not None else operations.facts.get(LAYER_ERRORS, [])
    if not known:
        return np.full(at.shape, OFF if off is None else off)
    near = min({row[0] for row in known}, key=lambda each: (abs(each - tensor_parallel), -each))
    own = sorted((most, error) for split, most, error in known if split == near)
    bounds, errors = (np.asarray(each, dtype=np.float64) for each in zip(*own, strict=True))
    return np.asarray(errors[np.minimum(np.searchsorted(bounds, at), bounds.size - 1)])


def layer(
    operations: Profile,
    shape: Shape,
    tensor_parallel: int | Iterable[int] = 1,
    *,
    model: str = "",
    name: str = "",
    most: int = 4096,
    off: float | None = None,
) -> Profile:
    """A profile of a model, composed of times measured for its operations.

    Split `tensor_parallel`, each device has its share of heads, of the inner width and of the vocabulary, as `Shape.shard` has it.

    Parameters
    ----------
    operations
        A profile of operations.
    shape
        The model.
    tensor_parallel
        Over how many devices layers are split, or several such numbers.
    model, name
        What the profile is of, and what it is called.
    most
        Most tokens of a pass.
    off
        Relative error of a composed layer, at least that of its products [-]. Where left out it is by tensor_parallel and tokens,
        as layers of other models on the same GPU were off (`LAYER_ERRORS` in `facts`), or else `OFF`.

    >>> from model.architectures.transformer import preset
    >>> from model.hardware import profile_files
    >>> made = layer(profile_files.load("h100-operations"), preset("llama-2-13b"), [1, 2])
    >>> {size: round(float(made.rows("dense", size)["time_s"][0]) * 1e6) for size in made.tensor_parallel}  # 189 us to read it
    {1: 256, 2: 141}
    """
    _of_operations(operations)
    if off is not None:
        checks.number("off", off, 0, 1)
    if shape.encoder_layers:
        raise ParameterError(f"encoder_layers must be 0, got {shape.encoder_layers}; attention to an encoder is in no table")
    splits = tuple(dict.fromkeys([tensor_parallel] if isinstance(tensor_parallel, int) else tensor_parallel))
    products = Products(operations)
    tokens = products.steps(most)
    wanted = {"head": "gemm", "attention": "decode", "all_reduce": "all_reduce"}
    errors = {part: operations.errors[source] for part, source in wanted.items() if source in operations.errors}
    least = errors.get("head", 0.0)
    errors["dense"] = max(least, float(layer_error(operations, 1, splits[0], off)))
    rows: list[dict[str, Any]] = []
    stood_in = []
    for many in splits:
        part = shape.shard(many)
        dense = layer_products(products, part, tokens) + between(operations, part, tokens, products.launch)
        embedding = passed_over(operations, tokens, 2 * shape.hidden, products.launch)
        for what, seconds in (("dense", dense), ("embedding", embedding)):
            points = zip(tokens, seconds, strict=True)
            found = [{"part": what, "tokens": int(at), "tensor_parallel": many, "time_s": float(each)} for at, each in points]
            rows += spread(found, np.maximum(layer_error(operations, tokens, many, off), least))
        rows += spread(head_rows(operations, products, part, tokens, many), layer_error(operations, tokens, many, least))
        if "decode" in operations.parts:
            attention = AttentionTimes(operations, part.heads, part.kv_heads, part.head_dim)
            if not attention.measured:
                stood_in.append(many)
            found = attention_rows(attention, many)
            rows += found if attention.measured else spread(found, errors.get("attention", 0.0))
    rows += reductions(operations, splits)
    notes = [
        f"composed: products measured by {operations.engine}",
        f"assumed: norms, rotation, activation and embedding take their bytes at {SMALL_SHARE:.0%} of the device's bandwidth, and"
        f" {products.launch * 1e6:.1f} us each",
        "what a repeated measurement found in the device's cache is held to its bandwidth: in a pass it comes from memory",
    ]
    if stood_in:
        split = ", ".join(map(str, stood_in))
        notes.append(
            f"attention split {split} ways: these heads were not measured; the nearest groups that read as many bytes stand in"
        )
    return isotonic.profile(replace(
        operations, name=name or f"{operations.device}-{model}", model=model, kind="model", provenance="composed",
        shape=asdict(shape), table=profile.table_of(rows), notes=(*notes, *operations.notes), errors=errors,
    ))  # fmt: skip


def reductions(operations: Profile, splits: Iterable[int]) -> list[dict[str, Any]]:
    """The rows of the part all_reduce between so many devices."""
    table = operations.table
    chosen = table.filter((table["part"] == "all_reduce") & table["tensor_parallel"].is_in([*splits]))
    return [{key: value for key, value in row.items() if value is not None} for row in chosen.to_dicts()]


def attention_rows(
    attention: AttentionTimes, tensor_parallel: int = 1, contexts: Iterable[int] | None = None
) -> list[dict[str, Any]]:
    """Rows of a model's profile: attention of passes of one token for each text, in batches of powers of two, where it was
    measured."""
    points = [
        (int(context), int(batch)) for context in (attention.contexts if contexts is None else contexts)
        for batch in 2 ** np.arange(9) if attention.near(int(context), int(batch))
    ]  # fmt: skip
    times = attention.cold(*np.array(points).T).tolist() if points else []
    return [
        {"part": "attention", "time_s": seconds, "width": 1, "context": context, "batch": batch, "tensor_parallel": tensor_parallel}
        for (context, batch), seconds in zip(points, times, strict=True)
    ]


def differences(composed: Profile, measured: Profile, *, tensor_parallel: int = 1, most: int = 64) -> LeaveOneOutErrors:
    """Relative error of composed layers (but for attention) against measured ones, at the measured passes of up to `most`
    tokens."""
    ours, theirs = composed.rows("dense", tensor_parallel), measured.rows("dense", tensor_parallel)
    theirs = theirs.filter(theirs["tokens"] <= most)
    surface = Surface({"tokens": ours["tokens"].to_numpy()}, ours["time_s"].to_numpy())
    at = theirs["tokens"].to_numpy().astype(np.float64)
    return LeaveOneOutErrors(at, surface(at).seconds / theirs["time_s"].to_numpy() - 1)
