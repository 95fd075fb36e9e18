"""Layer times composed from the times of operations: matrix products, attention, and elementwise kernels between them.

Tables of operations (profiles of kind `operations`) hold products by m, n, k, and attention of one new token per sequence.
A layer is four or five products, one attention and a few elementwise kernels. Between measured shapes the efficiency is
interpolated: the time divided by its lower bound from arithmetic and bandwidth plus the launch time of the shortest product.

Leave-one-out errors of the tables estimate how accurate that is (`gemm_left_out`, `attention_left_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import BYTES, Shape, described
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import isotonic, profile
from model.hardware.interpolation import Floats, Surface, parallelograms, residuals
from model.hardware.profile import Profile

SHAPES_NEAR = ((0, 1), (0, -1), (0, 2), (0, -2), (1, 0), (-1, 0))
"""Steps along n and k to neighbouring shapes that predict a shape: four along k, two along n. These and `M_NEAR` are the best of
72 choices on the tables of the H100 and the A100; the L40S was held out."""
M_NEAR = (1, -1, 2, -2)
"""Steps along m to the times at which neighbouring shapes are compared."""
DEFAULT_LAYER_ERROR = 0.05
"""Default relative error of a composed layer [-]. The median error is smaller for layers of three models that Vidur measured on
two GPUs, up to 64 tokens, composed of products from another source."""
TILE = 64
"""Rows per tile of product kernels: beyond one tile, rows between measured points cost as much as a whole number of tiles. The
least biased of 1, 16, 32, 64, 128 and 256 on layers of the A40 thinned to coarse rows (-0.5 %, interpolation -6.6 %, at 257 to
512 tokens); the H100 and the A100 were held out and gain as much."""
SMALL_SHARE, SMALL_LANE = 0.66, 15.6e9
"""Share of the bandwidth that norms, rotations and activations reach over many tokens [-], and throughput of one of their blocks,
which processes one token [bytes/s]. Fitted to layers of Llama-2-7B and phi-2, on three GPUs (`calibrate.fits.small_kernels`)."""
LAYER_ERRORS = "layer_errors"
"""Key of `facts`: relative errors of layers composed from the table against measured ones, as rows (tensor_parallel, largest number
of tokens, error)."""
SHORTEST = "shortest_gemm_s"
"""Key of `facts`: the shortest product of the table before it was thinned [s]."""
ROPE = "rope"
"""Entry of `facts["decode_includes"]`: the table's attention includes the rotary embedding."""


class LeaveOneOutErrors(NamedTuple):
    """Relative errors of times predicted from the others, and their coordinate: m of a product, or context of attention."""

    at: Floats
    error: Floats

    def median(self, low: float = 0, high: float = np.inf) -> float:
        """Median absolute error between two coordinates, both included; nan without any [-]."""
        within = np.abs(self.error[(self.at >= low) & (self.at <= high)])
        return float(np.median(within)) if within.size else float("nan")

    def percentile(self, share: float) -> float:
        """Percentile `share` [%] of the absolute errors [-]."""
        return float(np.percentile(np.abs(self.error), share))


def _of_operations(operations: Profile) -> None:
    if operations.kind != "operations":
        raise ParameterError(
            f"profile {operations.name} must be of kind operations to compose a layer, got kind {operations.kind}"
        )


# --- products ---


class Products:
    """Times of products of an m by k and a k by n matrix, interpolated to any m, n and k.

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
        """Shortest measured product: about the launch time [s]."""
        self.tokens: Floats = np.unique(self.m)
        self._efficiency = Surface({"m": self.m, "n": n, "k": k}, seconds / self._least(self.m, n, k))

    def _least(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Lower bound of a product from arithmetic and bandwidth, plus a launch [s]."""
        m_, n_, k_ = (np.asarray(each, dtype=np.float64) for each in (m, n, k))
        moved = self._bytes * (n_ * k_ + m_ * (n_ + k_)) / self._operations.bandwidth
        return np.asarray(np.maximum(moved, 2 * m_ * n_ * k_ / self._operations.rate) + self.launch)

    def __call__(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Time of a product [s]. Measured points are returned as they are; rows between them are padded to whole tiles."""
        rows = self._filled(m)
        return self._efficiency(rows, n, k).seconds * self._least(rows, n, k)

    def _filled(self, m: ArrayLike) -> Floats:
        """Rows that a kernel computes: padded to whole tiles beyond the first tile, but not past the next measured point."""
        rows = np.asarray(m, dtype=np.float64)
        after = np.append(self.tokens, np.inf)[np.searchsorted(self.tokens, rows)]
        return np.where(rows <= TILE, rows, np.minimum(np.ceil(rows / TILE) * TILE, after))

    def steps(self, most: float) -> Floats:
        """Rows up to `most` between which times are smooth: measured points, and the last and first row of adjacent tiles."""
        last = min(most, float(self.tokens[-1]))
        tiles = np.arange(2 * TILE, last + 1, TILE)
        every = np.unique(np.concatenate([self.tokens, tiles, tiles + 1, [TILE + 1.0]]))
        return every[every <= last]

    def left_out(self) -> list[Floats]:
        """Leave-one-out relative errors of the measured efficiencies along m, n and k: three arrays over (m, n, k)."""
        return self._efficiency.left_out()

    def cold(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Time of a product whose weights come from memory [s].

        A product that is timed repeatedly may find its weights in the device's cache. In a pass the other layers have evicted them.
        """
        read = np.asarray(n, dtype=np.float64) * np.asarray(k) * self._bytes / self._operations.bandwidth
        return np.asarray(np.maximum(self(m, n, k), read))


def gemm_left_out(operations: Profile, near: Sequence[tuple[int, int]] = SHAPES_NEAR) -> LeaveOneOutErrors:
    """Leave-one-out relative error of each product's time, predicted from neighbouring shapes (steps `near` along n and k).

    Neighbouring shapes switch kernels at nearly the same m. The time of a neighbour at this m, times the ratio of the two shapes at
    another m, is one prediction; the median of all predictions is used (`model.hardware.interpolation.parallelograms`). If `near`
    is empty, the neighbours in m are interpolated in logarithms instead. Ends of lines are left out. `at` is m; both fields have
    shape (products,).
    """
    _of_operations(operations)
    rows = operations.rows("gemm")
    axes, indices = zip(*(np.unique(rows[name].to_numpy(), return_inverse=True) for name in ("n", "k", "m")), strict=True)
    logs: Floats = np.full(tuple(axis.size for axis in axes), np.nan)
    logs[tuple(index.reshape(-1) for index in indices)] = np.log(rows["time_s"].to_numpy())
    along_m = residuals(logs, np.log(axes[2].astype(np.float64)))
    from_shapes = logs - parallelograms(logs, near, M_NEAR)
    return _left_out(np.where(np.isnan(along_m) | np.isnan(from_shapes), along_m, from_shapes), axes[2])


def shapes_left_out(operations: Profile) -> LeaveOneOutErrors:
    """Relative error of each product's time, predicted as if its shape were not measured: from its neighbours in n, then in k.

    `Products` interpolates between shapes in the same way, at a measured m. Ends of lines are left out. `at` is m; both fields have
    shape (predictions,).
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
    """Leave-one-out relative error of each attention time, interpolated between its neighbours in context.

    With `alike`, the prediction is corrected by the median error of shapes that read equally many bytes: those with the same
    batch times kv_heads and the same head_dim. `at` is the context; both fields have shape (times,).
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
        lines = np.flatnonzero((read == size).all(axis=1))
        if lines.size < 2:
            continue
        for index in lines:
            others = missed[lines[lines != index]]
            known = ~np.isnan(others).all(axis=0)
            expected[index, known] = _medians(others[:, known])
    return _left_out(missed - expected, contexts)


def _medians(values: Floats) -> Floats:
    """Median of each column without nan; much faster than `np.nanmedian` for few rows."""
    ordered, count = np.sort(values, axis=0), (~np.isnan(values)).sum(axis=0)  # nan is sorted last
    column = np.arange(count.size)
    return np.asarray((ordered[(count - 1) // 2, column] + ordered[count // 2, column]) / 2)


def with_errors(operations: Profile) -> Profile:
    """Return the profile of operations with the median leave-one-out errors of its parts.

    Each time is predicted from its own line only. A lookup between measured points has no more: neighbouring shapes were not
    measured at that m or context either.
    """
    errors = {"gemm": gemm_left_out(operations, ())}
    if "decode" in operations.parts:
        errors["decode"] = attention_left_out(operations, alike=False)
    return replace(operations, errors={part: round(each.median(), 4) for part, each in errors.items() if each.error.size})


def _left_out(missed: Floats, axis: Floats) -> LeaveOneOutErrors:
    """Relative errors from errors in logarithms, with the coordinate of each on the last axis."""
    known = ~np.isnan(missed)
    at = np.broadcast_to(axis.astype(np.float64), missed.shape)
    return LeaveOneOutErrors(at[known], np.expm1(-missed[known]))


# --- attention ---


class AttentionTimes:
    """Times of attention of one new token per sequence, for a number of heads that may not have been measured.

    Measured combinations of heads and kv_heads use their own times. Others use the measured group size (heads over kv_heads) that
    is nearest, at an equal size of the cache read: a batch of 4 with 8 kv_heads reads as much as one sequence with 32.

    Parameters
    ----------
    operations
        A profile of operations.
    heads, kv_heads, head_dim
        Attention heads on one device.
    """

    def __init__(self, operations: Profile, heads: int, kv_heads: int, head_dim: int) -> None:
        _of_operations(operations)
        rows = operations.rows("decode")
        measured = sorted({int(value) for value in rows["head_dim"]})
        if head_dim not in measured:
            listed = ", ".join(map(str, measured)) or "none"
            raise ParameterError(
                f"head_dim must be one of {listed}, the sizes for which profile {operations.name} has attention, got {head_dim}"
            )
        rows = rows.filter(rows["head_dim"] == head_dim)
        own = rows.filter((rows["heads"] == heads) & (rows["kv_heads"] == kv_heads))
        self.measured = bool(own.height)
        """True if exactly these heads were measured."""
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
        """Seconds that reading the keys and values takes at the device's bandwidth [s]."""
        return np.asarray(np.asarray(read, dtype=np.float64) * (np.asarray(context) + 1) * self._each)

    def cold(self, context: ArrayLike, batch: ArrayLike) -> Floats:
        """Time of the attention of one layer that reads keys and values from memory, as in a pass, not from a cache [s]."""
        return np.asarray(np.maximum(self(context, batch), self._least(context, np.asarray(batch) * self._kv_heads)))

    def near(self, context: int, batch: int) -> bool:
        """Return True if the context was measured, with at least as many bytes read as at this point."""
        read = batch * self._kv_heads
        return any((context, int(each)) in self._known for each in self.read if each >= read)


# --- a layer ---


def elementwise_kernels(
    operations: Profile, part: Shape, tokens: ArrayLike, launch: float, *, share: float = SMALL_SHARE, lane: float = SMALL_LANE
) -> Floats:
    """Seconds of the elementwise kernels of a layer over `tokens` tokens: norms, rotary embedding and activation [s].

    Each kernel is launched, and reads and writes hidden states. A norm is fused with the addition before it: it reads two states
    and writes two.
    """
    if not part.attends:  # a Medusa head: an activation
        return elementwise_kernel(operations, tokens, 2 * part.hidden, launch, share=share, lane=lane)
    states = part.layer_norms * 4 * part.hidden + (3 if part.gated else 2) * part.ffn
    kernels = part.layer_norms + 1
    rotated = not part.positions and not part.buckets
    if rotated and ROPE not in operations.facts.get("decode_includes", ()):
        kernels += 1
        states += 2 * (part.heads + part.kv_heads) * part.head_dim
    return elementwise_kernel(operations, tokens, states, kernels * launch, share=share, lane=lane)


def elementwise_kernel(
    operations: Profile, tokens: ArrayLike, states: float, launch: float, *, share: float = SMALL_SHARE, lane: float = SMALL_LANE
) -> Floats:
    """Seconds of elementwise kernels that read and write `states` numbers per token, after launches of `launch` seconds [s].

    A block processes one token at the throughput `lane`; all blocks together reach at most `share` of the device's bandwidth.
    Few tokens therefore take as long as one.
    """
    row = states * BYTES[operations.dtype]
    together = np.asarray(tokens, dtype=np.float64) * row / (share * operations.bandwidth)
    return np.asarray(np.maximum(together, row / lane) + launch)


def layer_products(products: Products, part: Shape, tokens: ArrayLike) -> Floats:
    """Seconds of the matrix products of a layer, fused as in engines: query, key and value in one, gate and up in one [s]."""
    return np.asarray(sum(_product_of_copies(products, part, tokens, outputs, inputs) for inputs, outputs in part.matrices))


def _product_of_copies(products: Products, part: Shape, tokens: ArrayLike, outputs: int, inputs: int) -> Floats:
    """Seconds of a product [s]; of Medusa's heads each has a product over its own positions."""
    if part.copies == 1:
        return products.cold(tokens, outputs, inputs)
    return part.copies * products.cold(np.maximum(np.asarray(tokens) / part.copies, 1.0), outputs, inputs)


def head_rows(
    operations: Profile, products: Products, part: Shape, tokens: Floats, tensor_parallel: int = 1
) -> list[dict[str, Any]]:
    """Profile rows of the part head: the projection onto a device's share of the vocabulary, and the norm before it."""
    seconds = _product_of_copies(products, part, tokens, part.vocabulary, part.hidden) + elementwise_kernel(
        operations, tokens, 4 * part.hidden, products.launch
    )
    return [
        {"part": "head", "positions": int(at), "tensor_parallel": tensor_parallel, "time_s": float(each)}
        for at, each in zip(tokens, seconds, strict=True)
    ]


def with_quartiles(rows: list[dict[str, Any]], error: ArrayLike) -> list[dict[str, Any]]:
    """Return the rows with quartiles at a relative error, a number or one per row: composed times have no measured quartiles."""
    each = np.broadcast_to(np.asarray(error, dtype=np.float64), (len(rows),))
    return [
        row | {"low_s": row["time_s"] * (1 - float(share)), "high_s": row["time_s"] * (1 + float(share))}
        for row, share in zip(rows, each, strict=True)
    ]


def layer_error(operations: Profile, tokens: ArrayLike, tensor_parallel: int, default_error: float | None = None) -> Floats:
    """Relative error of a composed layer over `tokens` tokens: `off`, or the table's `LAYER_ERRORS` at the nearest entry [-]."""
    at = np.asarray(tokens, dtype=np.float64)
    known = [] if default_error is not None else operations.facts.get(LAYER_ERRORS, [])
    if not known:
        return np.full(at.shape, DEFAULT_LAYER_ERROR if default_error is None else default_error)
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
    default_error: float | None = None,
) -> Profile:
    """Compose the profile of a model from measured times of its operations.

    With tensor parallelism each device has its share of the heads, the inner width and the vocabulary (`Shape.shard`).

    Parameters
    ----------
    operations
        A profile of operations.
    shape
        The model.
    tensor_parallel
        Number of devices that each layer is split over, or several such numbers.
    model, name
        Names of the model and of the profile.
    most
        Largest number of tokens of a pass.
    off
        Relative error of a composed layer, at least that of its products [-]. Default: by tensor_parallel and tokens, from layers
        of other models on the same GPU (`LAYER_ERRORS` in `facts`), else `DEFAULT_LAYER_ERROR`.

    >>> from model.architectures.published_shapes import preset
    >>> from model.hardware import profile_files
    >>> made = layer(profile_files.load("h100-operations"), preset("llama-2-13b"), [1, 2])
    >>> {size: round(float(made.rows("dense", size)["time_s"][0]) * 1e6) for size in made.tensor_parallel}  # 189 us to read it
    {1: 256, 2: 141}
    """
    _of_operations(operations)
    if default_error is not None:
        checks.number("off", default_error, 0, 1)
    if shape.encoder_layers:
        raise ParameterError(f"encoder_layers must be 0, got {shape.encoder_layers}; no table has attention to an encoder")
    refuse_unmeasured(operations, shape)
    splits = tuple(dict.fromkeys([tensor_parallel] if isinstance(tensor_parallel, int) else tensor_parallel))
    products = Products(operations)
    tokens = products.steps(most)
    wanted = {"head": "gemm", "attention": "decode", "all_reduce": "all_reduce"}
    errors = {part: operations.errors[source] for part, source in wanted.items() if source in operations.errors}
    least = errors.get("head", 0.0)
    errors["dense"] = max(least, float(layer_error(operations, 1, splits[0], default_error)))
    rows: list[dict[str, Any]] = []
    stood_in = []
    for many in splits:
        part = shape.shard(many)
        dense = over_kinds(part, lambda kind: (
            layer_products(products, kind, tokens) + elementwise_kernels(operations, kind, tokens, products.launch)
        ))  # fmt: skip
        embedding = elementwise_kernel(operations, tokens, 2 * shape.hidden, products.launch)
        for what, seconds in (("dense", dense), ("embedding", embedding)):
            points = zip(tokens, seconds, strict=True)
            found = [{"part": what, "tokens": int(at), "tensor_parallel": many, "time_s": float(each)} for at, each in points]
            rows += with_quartiles(found, np.maximum(layer_error(operations, tokens, many, default_error), least))
        rows += with_quartiles(head_rows(operations, products, part, tokens, many), layer_error(operations, tokens, many, least))
        if "decode" in operations.parts and part.attends:
            attention = AttentionTimes(operations, part.heads, part.kv_heads, part.head_dim)
            if not attention.measured:
                stood_in.append(many)
            found = attention_rows(attention, many)
            rows += found if attention.measured else with_quartiles(found, errors.get("attention", 0.0))
    rows += reductions(operations, splits)
    notes = [
        f"composed: products measured by {operations.engine}",
        f"assumed: norms, rotation, activation and embedding move their bytes at {SMALL_SHARE:.0%} of the device's bandwidth, plus"
        f" {products.launch * 1e6:.1f} us each",
        "times are at least bytes over bandwidth: a repeated measurement may find its data in the device's cache, a pass does not",
    ]
    if stood_in:
        split = ", ".join(map(str, stood_in))
        notes.append(
            f"attention at tensor_parallel {split}: these heads were not measured; the nearest group size at equal bytes is used"
        )
    return isotonic.isotonic_profile(replace(
        operations, name=name or f"{operations.device}-{model}", model=model, kind="model", provenance="composed",
        shape=described(shape), table=profile.table_of(rows), notes=(*notes, *operations.notes), errors=errors,
    ))  # fmt: skip


def refuse_unmeasured(operations: Profile, shape: Shape) -> None:
    """Raise ParameterError for a model whose layers need operations that no table of products and attention has.

    >>> from model.architectures.published_shapes import preset
    >>> from model.hardware import profile_files
    >>> refuse_unmeasured(profile_files.load("h100-operations"), preset("gpt-oss-20b"))
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: profile h100-operations has no times of sparse experts and a sliding window; ...
    """
    lacks = shape.special or ("quantised weights" if shape.weights is not None else "")
    if lacks:
        raise ParameterError(
            f"profile {operations.name} has no times of {lacks}; estimate the model with cost kind 'roofline'"
            f" (device = {operations.device!r})"
        )


def over_kinds(shape: Shape, seconds: Callable[[Shape], Floats]) -> Floats:
    """Mean over the layers of a model of the seconds of a layer of each kind [s]."""
    if len(shape.kinds) == 1:
        return seconds(shape)
    return np.asarray(sum(count * seconds(kind) for count, kind in shape.kinds) / shape.layers)


def reductions(operations: Profile, splits: Iterable[int]) -> list[dict[str, Any]]:
    """Profile rows of the part all_reduce, for these numbers of devices."""
    table = operations.table
    chosen = table.filter((table["part"] == "all_reduce") & table["tensor_parallel"].is_in([*splits]))
    return [{key: value for key, value in row.items() if value is not None} for row in chosen.to_dicts()]


def attention_rows(
    attention: AttentionTimes, tensor_parallel: int = 1, contexts: Iterable[int] | None = None
) -> list[dict[str, Any]]:
    """Profile rows of the part attention: one token per sequence, in batches of powers of two, at measured points."""
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
    """Relative errors of composed layers without attention against measured ones, at measured passes of up to `most` tokens."""
    ours, theirs = composed.rows("dense", tensor_parallel), measured.rows("dense", tensor_parallel)
    theirs = theirs.filter(theirs["tokens"] <= most)
    surface = Surface({"tokens": ours["tokens"].to_numpy()}, ours["time_s"].to_numpy())
    at = theirs["tokens"].to_numpy().astype(np.float64)
    return LeaveOneOutErrors(at, surface(at).seconds / theirs["time_s"].to_numpy() - 1)
