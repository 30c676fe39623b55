"""Sums over votes as machine code. Importing this imports numba.

The poses u, the weights W, coefficients c and output capsules s of a batch make one sum,

    Σ_bij c_bij s_bj · W_ij u_bi,

and all that a routing asks of votes, forward and backward, are its derivatives. Input capsules lie side by side in
vectors of LANES. The poses (B, D, LANES) and weights (J, E, D, LANES) of such a block stay in cache together, and every
weight that is loaded serves a group of images. Votes are made in registers and are never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from torchcaps.ops.blocked_votes import LANES
from torchcaps.ops.native import floats, inlined, keep, kernel, run, share

__all__ = ["VOTES", "agreement", "gradients", "run", "weighted_sum"]

GROUP = 4  # images that share a weight, and accumulators that the processor works on at the same time
PAIR = 2  # components that are worked on together: each number that is loaded serves both
IN_HAND = 32  # images whose sums are in cache, one for each lane
ROOM = 2**17  # numbers that these sums may be
LINE = 64  # bytes; a vector that begins elsewhere is read twice

# Addresses: poses (blocks, B, D, LANES) and weights (blocks, J, E, D, LANES) with their gradients, coefficients
# (J, B, I), output capsules (B, J, E), and the result, which is like one of these two, or zero for none.
VOTES = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("poses", "weights", "grad_poses", "grad_weights", "coefficients", "outputs", "result"),
            *("blocks", "images", "input_size", "output_count", "output_size"),
        )
    ]
)


class _Part:
    """Writes code for a group of images, one block of input capsules and one output capsule.

    Numbers of the machine, by name: the addresses of all arrays, at the first image; D and E; and how many numbers lie
    between two images of ``coefficients``, ``outputs`` and ``result``.
    """

    index = ir.IntType(64)
    vector = ir.VectorType(ir.FloatType(), LANES)
    names = (
        *("poses", "weights", "grad_poses", "grad_weights", "coefficients", "outputs", "result"),
        *("input_size", "output_size", "coefficient_step", "output_step", "result_step"),
    )

    def __init__(self, builder: Any, images: int, arguments: tuple[Any, ...]) -> None:
        self.builder = builder
        self.images = range(images)
        self.machine = dict(zip(self.names, arguments))

    def loop(self, count: str, body: Callable[[Any], None], step: int = 1) -> None:
        bounds = self.index(0), self.machine[count], self.index(step)
        with cgutils.for_range_slice(self.builder, *bounds, inc=True) as (i, _):
            body(i)

    def sum(self, *terms: Any) -> Any:
        """A sum of products of names, numbers and numbers of the machine, each product a tuple."""
        total = self.index(0)
        for term in terms:
            product = self.index(1)
            for factor in term if isinstance(term, tuple) else (term,):
                number = self.machine[factor] if isinstance(factor, str) else factor
                product = self.builder.mul(product, self.index(number) if isinstance(number, int) else number)
            total = self.builder.add(total, product)
        return total

    def _at(self, array: str, place: tuple[Any, ...], kind: Any) -> Any:
        first = self.builder.inttoptr(self.machine[array], ir.FloatType().as_pointer())
        return self.builder.bitcast(self.builder.gep(first, [self.sum(*place)]), kind.as_pointer())

    def load(self, array: str, *place: Any) -> Any:
        return self.builder.load(self._at(array, place, self.vector), align=4)

    def store(self, value: Any, array: str, *place: Any) -> None:
        self.builder.store(value, self._at(array, place, self.vector), align=4)

    def load_to_all_lanes(self, array: str, *place: Any) -> Any:
        empty = ir.Constant(self.vector, ir.Undefined)
        number = self.builder.load(self._at(array, place, ir.FloatType()))
        single = self.builder.insert_element(empty, number, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(single, empty, lanes)

    def accumulators(self) -> list[Any]:
        """A register for each image, which :meth:`set`, :meth:`get` and :meth:`add_product` work on."""
        return [cgutils.alloca_once(self.builder, self.vector) for _ in self.images]

    def clear(self, registers: list[Any]) -> None:
        for register in registers:
            self.set(register, ir.Constant(self.vector, [0.0] * LANES))

    def set(self, register: Any, value: Any) -> None:
        self.builder.store(value, register)

    def get(self, register: Any) -> Any:
        return self.builder.load(register)

    def product(self, one: Any, other: Any, plus: Any = None) -> Any:
        product = self.builder.fmul(one, other, flags=("contract",))
        return product if plus is None else self.builder.fadd(product, plus, flags=("contract",))

    def add_product(self, register: Any, one: Any, other: Any) -> None:
        self.set(register, self.product(one, other, plus=self.get(register)))


def _agreement(to: _Part, *, gradients: bool = False) -> None:
    """s · W u of each input capsule; with coefficients c also c W's, the gradients of u, and of W, c s u's."""
    agreement, pulled = to.accumulators(), [to.accumulators() for _ in range(PAIR)]
    coefficients = [to.load("coefficients", (b, "coefficient_step")) for b in to.images] if gradients else []
    to.clear(agreement)

    def for_input_components(first: Any) -> None:
        components = [to.sum(first, t) for t in range(PAIR)]
        places = [[((b, "input_size", LANES), (d, LANES)) for b in to.images] for d in components]
        poses = [[to.load("poses", *place) for place in row] for row in places]
        weighted = [[to.product(c, pose) for c, pose in zip(coefficients, row)] for row in poses]
        for registers in pulled:
            to.clear(registers)  # for Σ_e W_ed s_e

        def for_output_component(e: Any) -> None:
            matrix = [((e, "input_size", LANES), (d, LANES)) for d in components]
            weights = [to.load("weights", *place) for place in matrix]
            sums = [to.load("grad_weights", *place) for place in matrix] if gradients else []
            for b in to.images:
                output = to.load_to_all_lanes("outputs", (b, "output_step"), e)
                for t in range(PAIR):
                    to.add_product(pulled[t][b], weights[t], output)
                sums = [to.product(row[b], output, plus=total) for row, total in zip(weighted, sums)]
            for total, place in zip(sums, matrix):
                to.store(total, "grad_weights", *place)

        to.loop("output_size", for_output_component)
        for t in range(PAIR):
            for b in to.images:
                pull = to.get(pulled[t][b])
                to.add_product(agreement[b], poses[t][b], pull)
                if gradients:
                    before = to.load("grad_poses", *places[t][b])
                    to.store(to.product(coefficients[b], pull, plus=before), "grad_poses", *places[t][b])

    to.loop("input_size", for_input_components, PAIR)
    with to.builder.if_then(to.builder.icmp_unsigned("!=", to.machine["result"], to.index(0))):
        for b in to.images:
            to.store(to.get(agreement[b]), "result", (b, "result_step"))


def _weighted_sum(to: _Part) -> None:
    """c W u of each input capsule, added to the result (E, LANES) of each image. Room for c u is at ``grad_poses``."""
    coefficients = [to.load("coefficients", (b, "coefficient_step")) for b in to.images]
    sums = [to.accumulators() for _ in range(PAIR)]

    def weight_poses(d: Any) -> None:
        for b in to.images:
            place = ((b, "input_size", LANES), (d, LANES))
            to.store(to.product(coefficients[b], to.load("poses", *place)), "grad_poses", *place)

    def for_output_components(first: Any) -> None:
        components = [to.sum(first, t) for t in range(PAIR)]
        places = [[((b, "result_step"), (e, LANES)) for b in to.images] for e in components]
        for t in range(PAIR):
            for b in to.images:
                to.set(sums[t][b], to.load("result", *places[t][b]))

        def for_input_component(d: Any) -> None:
            weights = [to.load("weights", (e, "input_size", LANES), (d, LANES)) for e in components]
            for b in to.images:
                weighted = to.load("grad_poses", (b, "input_size", LANES), (d, LANES))
                for t in range(PAIR):
                    to.add_product(sums[t][b], weights[t], weighted)

        to.loop("input_size", for_input_component)
        for t in range(PAIR):
            for b in to.images:
                to.store(to.get(sums[t][b]), "result", *places[t][b])

    to.loop("input_size", weight_poses)
    to.loop("output_size", for_output_components, PAIR)


def _for_images(write: Callable[[_Part], None]) -> Any:
    """A function that does what ``write`` writes for a stretch of images, first in groups, then one by one."""

    def typed(images: int) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write(_Part(builder, images, arguments))
            return context.get_dummy_value()

        @intrinsic
        def part(context, u, w, grad_u, grad_w, c, s, result, D, E, c_step, s_step, result_step):
            return types.void(*[types.int64] * len(_Part.names)), generate

        return part

    group, single = typed(GROUP), typed(1)

    @inlined
    def for_images(do, block, j, first, stop, result, result_step, grad_poses, grad_step):
        B, D, J, E, I = do.images, do.input_size, do.output_count, do.output_size, do.blocks * LANES
        matrix = 4 * (block * J + j) * E * D * LANES
        w, grad_w = do.weights + matrix, do.grad_weights + matrix
        image = first
        while image < stop:
            u = do.poses + 4 * (block * B + image) * D * LANES
            c = do.coefficients + 4 * ((j * B + image) * I + block * LANES)
            s = do.outputs + 4 * (image * J + j) * E
            grad_u, to = grad_poses + 4 * (image - first) * grad_step, result + 4 * (image - first) * result_step
            if stop - image >= GROUP:
                group(u, w, grad_u, grad_w, c, s, to, D, E, I, J * E, result_step)
                image += GROUP
            else:
                single(u, w, grad_u, grad_w, c, s, to, D, E, I, J * E, result_step)
                image += 1

    return for_images


_agreement_of = _for_images(_agreement)
_gradients_of = _for_images(lambda to: _agreement(to, gradients=True))
_weighted_sum_of = _for_images(_weighted_sum)


@inlined
def _line(memory):
    """Where the first whole line of memory begins."""
    return (memory.ctypes.data + LINE - 1) // LINE * LINE


@inlined
def _like_coefficients(do, block, j):
    """The address of the result for one block and output capsule, and how many numbers lie between two images."""
    inputs = do.blocks * LANES
    return do.result + 4 * (j * do.images * inputs + block * LANES), inputs


@kernel(VOTES)
def agreement(job):
    """s_bj · W_ij u_bi, like coefficients."""
    do = numba.carray(job, 1)[0]
    start, stop = share(do.blocks)
    for block in range(start, stop):
        for j in range(do.output_count):
            result, step = _like_coefficients(do, block, j)
            _agreement_of(do, block, j, 0, do.images, result, step, 0, 0)


@kernel(VOTES)
def gradients(job):
    """Σ_j c_bij s_bj W_ij and Σ_b c_bij s_bj u_bi, like poses and weights; and agreement, if there is a result."""
    do = numba.carray(job, 1)[0]
    start, stop = share(do.blocks)
    pose_step, matrices = do.input_size * LANES, do.output_count * do.output_size * do.input_size * LANES
    for block in range(start, stop):
        poses = do.grad_poses + 4 * block * do.images * pose_step
        floats(poses, do.images * pose_step)[:] = 0
        floats(do.grad_weights + 4 * block * matrices, matrices)[:] = 0
        for j in range(do.output_count):
            result, step = _like_coefficients(do, block, j)
            if not do.result:
                result, step = 0, 0
            _gradients_of(do, block, j, 0, do.images, result, step, poses, pose_step)


@kernel(VOTES)
def weighted_sum(job):
    """Σ_i c_bij W_ij u_bi, like output capsules. Every thread has images of its own."""
    do = numba.carray(job, 1)[0]
    start, stop = share(do.images)
    J, E = do.output_count, do.output_size
    width = max(1, min(J, ROOM // (IN_HAND * E * LANES)))  # output capsules at a time
    sums = np.empty((IN_HAND * width * E + 1) * LANES, np.float32)
    weighted = np.empty((GROUP * do.input_size + 1) * LANES, np.float32)
    in_hand, room = _line(sums), _line(weighted)
    lanes = floats(in_hand, IN_HAND * width * E * LANES)
    for first in range(start, stop, IN_HAND):
        last = min(first + IN_HAND, stop)
        for lowest in range(0, J, width):
            outputs = min(width, J - lowest)
            step = outputs * E
            lanes[:] = 0
            for block in range(do.blocks):
                for j in range(outputs):
                    result = in_hand + 4 * j * E * LANES
                    _weighted_sum_of(do, block, lowest + j, first, last, result, step * LANES, room, 0)
            for image in range(first, last):
                totals = floats(do.result + 4 * (image * J + lowest) * E, step)
                for i in range(step):
                    total = np.float32(0)
                    for lane in range(LANES):
                        total += lanes[((image - first) * step + i) * LANES + lane]
                    totals[i] = total
    keep(sums)
    keep(weighted)
