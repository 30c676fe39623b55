"""The small transforms as machine code, each a single pass that stays in cache. Importing this imports numba.

A kernel is told by a *job*, a record of addresses and sizes, what to do. It knows nothing of plans, which
:mod:`torchcaps.ops.compiled` translates for it.

Kernels run on the threads of torch's own OpenMP runtime. A thread pool of numba's would fight with it for the cores,
because OpenMP's threads wait actively for the next piece of work. Every thread has a fixed share of the work and
nothing is added up across threads: results do not depend on timing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from torchcaps.ops.bilinear import POINTS

LANES = 8  # numbers in a vector, of which channel counts must be multiples

# What a kernel needs to know of one phase of a transform. Addresses: of the matrices for each tile, of the first sample
# of each tile, of the row of an item that each sample is (-1 for padding), of where each point's values begin and how
# many numbers lie between two of its rows.
PHASE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("rows", "cols", "row_starts", "col_starts", "positions", "offsets", "leads"),
            *("row_tiles", "row_points", "row_terms", "row_samples"),
            *("col_tiles", "col_points", "col_terms", "col_samples"),
        )
    ]
)
# A transform of ``items`` of an array (items, row_count, channels), or (items, channels, row_count) if channels come
# first. Addresses: phases, array, values (at the points), and, or zero, signs (of the array) and bias. ``values``
# have room for ``all_items``; these come after ``before`` others. ``room`` is for the largest phase.
TRANSFORM = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("phases", "phase_count", "array", "values", "signs", "bias"),
            *("items", "before", "all_items", "row_count", "channels", "width", "room", "channels_first", "rectify"),
        )
    ]
    + [("slope", np.float32)],
    align=True,
)
PATCHES = np.dtype(
    [
        (name, np.int64)
        for name in ("source", "target", "images", "channels", "rows", "cols", "window", "down", "across")
    ]
)
SQUASH = np.dtype([(name, np.int64) for name in ("totals", "poses", "lengths", "result", "count", "size")])
Job = np.ndarray[Any, Any]

# Whatever runtime torch was linked with is found through torch. A library without these functions raises
# AttributeError, and the caller does without compiled kernels.
_torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
_run_in_parallel = _torch.GOMP_parallel
_run_in_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
_run_in_parallel.restype = None
for _name in ("omp_get_thread_num", "omp_get_num_threads"):
    binding.add_symbol(f"torchcaps_{_name}", ctypes.cast(getattr(_torch, _name), ctypes.c_void_p).value)
_thread_number = types.ExternalFunction("torchcaps_omp_get_thread_num", types.int32())
_thread_count = types.ExternalFunction("torchcaps_omp_get_num_threads", types.int32())


def run(kernel: Any, job: Job) -> None:
    """Run a kernel on as many threads as torch uses; all that ``job`` points to must live until it returns."""
    _run_in_parallel(kernel.address, job.ctypes.data, torch.get_num_threads(), 0)


def kernel(job: np.dtype[Any]) -> Callable[[Callable[[Any], None]], Any]:
    """Compile a function of a ``job``, into numba's cache if it has a directory to write to."""
    signature = types.void(types.CPointer(numba.from_dtype(job)))

    def compiled(function: Callable[[Any], None]) -> Any:
        try:
            return numba.cfunc(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:  # no place for a cache
            return numba.cfunc(signature, error_model="numpy")(function)

    return compiled


def inlined(function: Callable[..., Any]) -> Any:
    """For the parts of kernels. Multiplications and additions may be fused; nothing else is reordered."""
    return numba.njit(error_model="numpy", fastmath={"contract"})(function)


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An address as a pointer, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@inlined
def floats(address, size):
    return numba.carray(_pointer(address), size, np.float32)


@inlined
def _integers(address, size):
    return numba.carray(_pointer(address), size, np.int64)


class _Vectors:
    """Writes loops over memory in vectors, so that it is not left to the compiler whether they are."""

    index = ir.IntType(64)
    numbers = ir.VectorType(ir.FloatType(), LANES)
    bytes = ir.VectorType(ir.IntType(8), LANES)

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def loop(self, length: Any, body: Callable[[Any], None]) -> None:
        """``body(i)`` for every vector below ``length``, a multiple of LANES; four at a time while there are four."""
        builder, start = self.builder, self.index(0)
        for vectors in (4, 1):
            step = self.index(vectors * LANES)
            stop = builder.sub(length, builder.urem(length, step))
            with cgutils.for_range_slice(builder, start, stop, step, inc=True) as (first, _):
                for v in range(vectors):
                    body(builder.add(first, self.index(LANES * v)))
            start = stop

    def load(self, address: Any, i: Any, kind: Any = numbers) -> Any:
        return self.builder.load(self._at(address, i, kind), align=1)

    def store(self, value: Any, address: Any, i: Any, *, past_cache: bool = False) -> None:
        """``past_cache`` wants an address that is a multiple of a vector's size, and a fence before others read it."""
        stored = self.builder.store(value, self._at(address, i, value.type), align=4 * LANES if past_cache else 1)
        if past_cache:
            stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.IntType(32)(1)]))

    def _at(self, address: Any, i: Any, kind: Any) -> Any:
        base = self.builder.inttoptr(address, kind.element.as_pointer())
        return self.builder.bitcast(self.builder.gep(base, [i]), kind.as_pointer())

    def in_all_lanes(self, number: Any) -> Any:
        empty = ir.Constant(self.numbers, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        single = self.builder.insert_element(empty, number, ir.IntType(32)(0))
        return self.builder.shuffle_vector(single, empty, lanes)

    def add_product(self, factor: Any, value: Any, total: Any) -> Any:
        product = self.builder.fmul(factor, value, flags=("contract",))
        return product if total is None else self.builder.fadd(product, total, flags=("contract",))


def _weighted_sum(*, add: bool = False, past_cache: bool = False) -> Any:
    """target[i] = or += Σ_r weights[r] * source[r * stride + i], for i below a length that is a multiple of LANES.

    There is a loop for every number of terms: it holds all weights in registers, loads each number once and stores
    each sum once.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        terms, *rest = arguments
        end = builder.append_basic_block("end")
        cases = builder.switch(terms, end)
        for count in range(1, len(POINTS) + 1):
            case = builder.append_basic_block(f"terms{count}")
            cases.add_case(ir.IntType(64)(count), case)
            builder.position_at_end(case)
            write_loop(_Vectors(builder), count, *rest)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def write_loop(to: _Vectors, terms: int, weights: Any, source: Any, stride: Any, target: Any, length: Any) -> None:
        builder, index = to.builder, to.index
        step = builder.mul(stride, index(4))
        rows = [builder.add(source, builder.mul(step, index(r))) for r in range(terms)]
        first = builder.inttoptr(weights, ir.FloatType().as_pointer())
        factors = [to.in_all_lanes(builder.load(builder.gep(first, [index(r)]))) for r in range(terms)]

        def body(i: Any) -> None:
            total = to.load(target, i) if add else None
            for row, factor in zip(rows, factors):
                total = to.add_product(factor, to.load(row, i), total)
            to.store(total, target, i, past_cache=past_cache)

        to.loop(length, body)

    @intrinsic
    def typed(context: Any, terms: Any, weights: Any, source: Any, stride: Any, target: Any, length: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return inlined(
        lambda terms, weights, source, stride, target, length: typed(terms, weights, source, stride, target, length)
    )


_set_to_sum = _weighted_sum()
_add_sum = _weighted_sum(add=True)
_send_sum = _weighted_sum(past_cache=True)


@inlined
def _put_sum(alone, terms, weights, source, stride, target, length):
    """Set the target if no other sum goes there, or add to it."""
    if alone:
        _set_to_sum(terms, weights, source, stride, target, length)
    else:
        _add_sum(terms, weights, source, stride, target, length)


@intrinsic
def _fence(context: Any) -> Any:
    """Wait until what was stored past the cache can be read by others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _elementwise(body: Callable[..., Any]) -> Any:
    """target[i] = body(source[i], other[i], factor): ``source``, ``target`` and ``other`` are addresses.

    ``other`` is read only if ``body`` asks for it, by calling what it is given.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = _Vectors(builder)
        source, target, other, factor, length = arguments
        factor = to.in_all_lanes(factor)

        def one_vector(i: Any) -> None:
            to.store(body(to, lambda: to.load(source, i), lambda kind: to.load(other, i, kind), factor), target, i)

        to.loop(length, one_vector)
        return context.get_dummy_value()

    @intrinsic
    def typed(context: Any, source: Any, target: Any, other: Any, factor: Any, length: Any) -> Any:
        addresses = [types.int64] * 3
        return types.void(*addresses, types.float32, types.int64), generate

    return typed


def _leaky(to: _Vectors, value: Any, positive: Any, factor: Any) -> Any:
    return to.builder.select(positive, value, to.builder.fmul(factor, value))


def _is_positive(to: _Vectors, value: Any) -> Any:
    return to.builder.fcmp_ordered(">", value, ir.Constant(to.numbers, [0.0] * LANES))


_copy = _elementwise(lambda to, source, other, factor: source())
_clear = _elementwise(lambda to, source, other, factor: ir.Constant(to.numbers, [0.0] * LANES))
_add = _elementwise(lambda to, source, other, factor: to.builder.fadd(source(), other(to.numbers)))
_rectify = _elementwise(lambda to, source, other, factor: _leaky(to, source(), _is_positive(to, source()), factor))
_signs = _elementwise(lambda to, source, other, factor: to.builder.zext(_is_positive(to, source()), to.bytes))
_rectify_by_signs = _elementwise(
    lambda to, source, other, factor: _leaky(
        to, source(), to.builder.trunc(other(to.bytes), ir.VectorType(ir.IntType(1), LANES)), factor
    )
)


@inlined
def share(units):
    """The units of work, from and to, of the thread that asks."""
    number, count = np.int64(_thread_number()), np.int64(_thread_count())
    return units * number // count, units * (number + 1) // count


@inlined
def keep(memory):
    """For when an array's address is no longer used: numba frees an array after the last line that names it."""


@inlined
def _channels_first(do, item, first):
    """One item's numbers (width, row_count) of an array whose channels come first."""
    return floats(do.array + 4 * (item * do.channels + first) * do.row_count, do.width * do.row_count)


@inlined
def _load(do, phase, block, item, first):
    """One item's samples of a phase into the block, through a leaky ReLU if that is asked for."""
    width, rows, channels, slope, signs = do.width, do.row_count, do.channels, do.slope, do.signs
    places = phase.row_samples * phase.col_samples
    positions = _integers(phase.positions, places)
    if do.channels_first:
        numbers, samples = _channels_first(do, item, first), floats(block, places * width)
        for channel in range(width):
            for place in range(places):
                samples[place * width + channel] = numbers[channel * rows + positions[place]]
        return
    for place in range(places):
        target, position = block + 4 * place * width, positions[place]
        start = (item * rows + position) * channels + first
        if position < 0:
            _clear(0, target, 0, slope, width)
        elif do.rectify:
            _rectify(do.array + 4 * start, target, 0, slope, width)
            if signs:
                _signs(do.array + 4 * start, signs + start, 0, slope, width)
        else:
            _copy(do.array + 4 * start, target, 0, slope, width)


@inlined
def _store(do, phase, block, item, first):
    """The transpose of ``_load``, or an addition of the bias."""
    width, rows, channels, slope = do.width, do.row_count, do.channels, do.slope
    places = phase.row_samples * phase.col_samples
    positions = _integers(phase.positions, places)
    if do.channels_first:
        numbers, samples = _channels_first(do, item, first), floats(block, places * width)
        for channel in range(width):
            for place in range(places):
                numbers[channel * rows + positions[place]] = samples[place * width + channel]
        return
    for place in range(places):
        source, position = block + 4 * place * width, positions[place]
        if position < 0:
            continue
        start = (item * rows + position) * channels + first
        if do.signs:
            _rectify_by_signs(source, do.array + 4 * start, do.signs + start, slope, width)
        elif do.bias:
            _add(source, do.array + 4 * start, do.bias + 4 * first, slope, width)
        else:
            _copy(source, do.array + 4 * start, 0, slope, width)


@inlined
def _copy_few(source, target, length):
    """Copy any number of numbers: the last whole vector may copy some a second time."""
    if length < LANES:
        numbers, result = floats(source, length), floats(target, length)
        for i in range(length):
            result[i] = numbers[i]
    else:
        rest = 4 * (length - LANES)
        _copy(source, target, 0, np.float32(0), length - length % LANES)
        _copy(source + rest, target + rest, 0, np.float32(0), LANES)


@inlined
def _scaled_square(totals, size):
    """A scale of at most 1 with which no square overflows, and the square of the length then."""
    peak, square = np.float32(1), np.float32(0)
    for i in range(size):
        square += totals[i] * totals[i]
    if square < np.float32(2.0**100):
        return peak, square
    for i in range(size):
        peak = max(peak, abs(totals[i]))
    scale, square = np.float32(1) / min(peak, np.float32(2.0**100)), np.float32(0)
    for i in range(size):
        square += (totals[i] * scale) * (totals[i] * scale)
    return scale, square


@kernel(TRANSFORM)
def spread(job):
    """From arrays to values at points: the rows of each item, transformed for all points of all tiles and phases."""
    do = numba.carray(job, 1)[0]
    phases = numba.carray(_pointer(do.phases), do.phase_count, PHASE)
    blocks = do.channels // do.width
    scratch = np.empty(2 * do.room * do.width, np.float32)
    block = scratch.ctypes.data
    half = block + 4 * do.room * do.width
    start, stop = share(do.items * blocks)
    for unit in range(start, stop):
        item, first = unit // blocks, unit % blocks * do.width
        for phase in phases:
            _load(do, phase, block, item, first)
            line = phase.col_samples * do.width
            offsets = _integers(phase.offsets, phase.row_points * phase.col_points)
            leads = _integers(phase.leads, phase.row_points * phase.col_points)
            row_starts, col_starts = (
                _integers(phase.row_starts, phase.row_tiles),
                _integers(phase.col_starts, phase.col_tiles),
            )
            for t in range(phase.row_tiles):
                samples = block + 4 * row_starts[t] * line
                for column in range(0, line, do.width):  # what all points of a column read stays in the first cache
                    for x in range(phase.row_points):
                        weights = phase.rows + 4 * (t * phase.row_points + x) * phase.row_terms
                        target = half + 4 * (x * line + column)
                        _set_to_sum(phase.row_terms, weights, samples + 4 * column, line, target, do.width)
                for u in range(phase.col_tiles):
                    row = (t * phase.col_tiles + u) * do.all_items + do.before + item
                    for x in range(phase.row_points):
                        samples = half + 4 * (x * line + col_starts[u] * do.width)
                        for y in range(phase.col_points):
                            weights = phase.cols + 4 * (u * phase.col_points + y) * phase.col_terms
                            point = x * phase.col_points + y
                            target = do.values + 4 * (offsets[point] + row * leads[point] + first)
                            _send_sum(phase.col_terms, weights, samples, do.width, target, do.width)
    _fence()
    keep(scratch)


@kernel(TRANSFORM)
def collect(job):
    """The transpose of ``spread``: from values at points to the rows of each item."""
    do = numba.carray(job, 1)[0]
    phases = numba.carray(_pointer(do.phases), do.phase_count, PHASE)
    blocks = do.channels // do.width
    scratch = np.empty(3 * do.room * do.width, np.float32)
    block = scratch.ctypes.data
    half = block + 4 * do.room * do.width
    points = half + 4 * do.room * do.width
    start, stop = share(do.items * blocks)
    for unit in range(start, stop):
        item, first = unit // blocks, unit % blocks * do.width
        for phase in phases:
            line = phase.col_samples * do.width
            offsets = _integers(phase.offsets, phase.row_points * phase.col_points)
            leads = _integers(phase.leads, phase.row_points * phase.col_points)
            row_starts, col_starts = (
                _integers(phase.row_starts, phase.row_tiles),
                _integers(phase.col_starts, phase.col_tiles),
            )
            if phase.row_tiles > 1:
                _clear(0, block, 0, do.slope, phase.row_samples * line)
            for t in range(phase.row_tiles):
                if phase.col_tiles > 1:
                    _clear(0, half, 0, do.slope, phase.row_points * line)
                for u in range(phase.col_tiles):
                    row = (t * phase.col_tiles + u) * do.all_items + do.before + item
                    for point in range(phase.row_points * phase.col_points):
                        source = do.values + 4 * (offsets[point] + row * leads[point] + first)
                        _copy(source, points + 4 * point * do.width, 0, do.slope, do.width)
                    for x in range(phase.row_points):
                        values = points + 4 * x * phase.col_points * do.width
                        for s in range(phase.col_terms):
                            weights = phase.cols + 4 * (u * phase.col_terms + s) * phase.col_points
                            target = half + 4 * (x * line + (col_starts[u] + s) * do.width)
                            _put_sum(
                                phase.col_tiles == 1, phase.col_points, weights, values, do.width, target, do.width
                            )
                for column in range(0, line, do.width):
                    for r in range(phase.row_terms):
                        weights = phase.rows + 4 * (t * phase.row_terms + r) * phase.row_points
                        target = block + 4 * ((row_starts[t] + r) * line + column)
                        source = half + 4 * column
                        _put_sum(phase.row_tiles == 1, phase.row_points, weights, source, line, target, do.width)
            _store(do, phase, block, item, first)
    keep(scratch)


@kernel(PATCHES)
def patches(job):
    """The patches of images under a square window at the first places ``down`` and ``across``, each with a one after
    it: (B, C, rows, cols) -> (B, down, across, C * window**2 + 1)."""
    do = numba.carray(job, 1)[0]
    places, taps = do.across, do.channels * do.window * do.window + 1
    start, stop = share(do.images * do.down)
    for unit in range(start, stop):
        image, line = unit // do.down, unit % do.down
        source = do.source + 4 * image * do.channels * do.rows * do.cols
        for place in range(places):
            target = do.target + 4 * (unit * places + place) * taps
            for channel in range(do.channels):
                for row in range(do.window):
                    here = source + 4 * ((channel * do.rows + line + row) * do.cols + place)
                    _copy_few(here, target + 4 * (channel * do.window + row) * do.window, do.window)
            floats(target, taps)[taps - 1] = 1


@kernel(SQUASH)
def squash(job):
    """Vectors ``totals`` to squashed ``poses`` and their ``lengths``, as in ``functional.capsules_from_totals``."""
    do = numba.carray(job, 1)[0]
    size = do.size
    start, stop = share(do.count)
    lengths = floats(do.lengths, do.count)
    for capsule in range(start, stop):
        totals, poses = floats(do.totals + 4 * capsule * size, size), floats(do.poses + 4 * capsule * size, size)
        scale, square = _scaled_square(totals, size)
        shrink = np.sqrt(square) / (scale * scale + square)
        for i in range(size):
            poses[i] = totals[i] * scale * shrink
        lengths[capsule] = np.sqrt(square) * shrink


@kernel(SQUASH)
def squash_gradient(job):
    """The gradient of totals, the ``result``, from those of poses and lengths. Of a zero vector it is zero."""
    do = numba.carray(job, 1)[0]
    size = do.size
    start, stop = share(do.count)
    of_lengths = floats(do.lengths, do.count)
    for capsule in range(start, stop):
        totals, of_poses = floats(do.totals + 4 * capsule * size, size), floats(do.poses + 4 * capsule * size, size)
        result = floats(do.result + 4 * capsule * size, size)
        scale, square = _scaled_square(totals, size)
        along = np.float32(0)
        for i in range(size):
            along += totals[i] * scale * of_poses[i]
        denominator = scale * scale + square
        norm = np.sqrt(square)
        # With u = scale * totals: derivatives of u |u| / denominator and of |u|^2 / denominator
        across = norm * scale / denominator
        inward = np.float32(0)
        if square > 0:
            of_length = np.float32(2) * scale * scale * of_lengths[capsule]
            inward = scale * (along * (scale * scale - square) / norm + of_length) / (denominator * denominator)
        for i in range(size):
            result[i] = across * of_poses[i] + inward * totals[i] * scale
