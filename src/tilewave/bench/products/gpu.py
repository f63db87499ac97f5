"""The GPU side of a measurement: operands with random data, poisoned results, and their checks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.bench.gpu import EventStopwatch
from tilewave.bench.suite import SuiteProduct
from tilewave.bench.timing import Contender, interleave
from tilewave.compiler import Source, choose_arch, compile_source
from tilewave.device import DeviceSpec, driver_cuda_version
from tilewave.precision.bounds import SMALLEST_SUBNORMAL, gamma
from tilewave.runtime.driver import NAN_PATTERN, Device, DeviceArray, Function, Module, Stream

SOURCE = "bench/products/products.cu"
ENTRIES = ("fill_normal", "count_poison", "times_vector", "worst_row", "sum_items", "compare_rows", "nothing")
THREADS = 256
ALIGNMENT = 256
"""Bytes; as allocators of frameworks align."""

CERTAINTY = 8.0
"""Deviations in Hoeffding's bound on a sum of random signs: exceeded by chance once in 4e13 rows."""
ROUNDING = 6.0
"""Deviations in the bound on rounding errors: exceeded by chance once in 3e7 operations times 1/K."""


@dataclass(frozen=True)
class Buffers:
    """One set of operands: contiguous memory of A, B and C, each (items, rows, columns) as stored."""

    a: DeviceArray
    b: DeviceArray
    out: DeviceArray


def stored_shapes(product: SuiteProduct) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of A, B and C in memory; a shared operand has one item, a transposed one its axes exchanged."""
    m, n, k = product.m, product.n, product.k
    return (
        (1 if product.shared_a else product.batch, *((k, m) if product.transposed_a else (m, k))),
        (1 if product.shared_b else product.batch, *((n, k) if product.transposed_b else (k, n))),
        (product.batch, m, n),
    )


class Workbench:
    """One GPU, one stream, and the helper kernels of `products.cu`."""

    def __init__(self, device: Device, spec: DeviceSpec) -> None:
        self.device, self.spec = device, spec
        self.stream = Stream(device)
        arch = choose_arch(spec.compute_capability, driver_cuda_version())
        program = compile_source(Source.packaged(SOURCE), ENTRIES, arch.arch)
        self._module = Module(device, arch.image_of(program))
        self._functions: dict[str, Function] = {
            name: self._module.function(program.kernels[name].symbol) for name in ENTRIES
        }

    def launch(self, name: str, work: int, arguments: Sequence[Any]) -> None:
        """Run a helper kernel on enough threads for ``work`` of them; waits for it."""
        blocks = max(1, min(-(-work // THREADS), 64 * self.spec.sms))
        self._functions[name].prepare((blocks, 1, 1), (THREADS, 1, 1), arguments, self.stream)()
        self.stream.synchronize()

    def launch_floor_us(self) -> float:
        """Microseconds that an empty kernel takes in a CUDA graph: no product can take less."""
        empty = self._functions["nothing"].prepare((1, 1, 1), (32, 1, 1), [], self.stream)
        watch = EventStopwatch(self.device, self.stream, graphs=True)
        empty()
        timing = interleave([Contender("nothing", empty)], watch, minimum_sample_ms=2.0, warm_up_ms=2.0)
        return 1e3 * min(timing["nothing"].rounds_ms)

    def operands(self, product: SuiteProduct, sets: int, rng: np.random.Generator) -> Operands:
        """``sets`` sets of fresh N(0,1) operands, with results of poison."""
        return Operands(self, product, sets, rng)


class Operands:
    """Sets of operands of one product, in one block of memory for A and B and one for C."""

    def __init__(self, bench: Workbench, product: SuiteProduct, sets: int, rng: np.random.Generator) -> None:
        self._bench, self.product = bench, product
        step = ALIGNMENT // 4
        shapes = stored_shapes(product)
        a, b, out = (math.prod(shape) for shape in shapes)
        a_room, b_room, out_room = (-(-size // step) * step for size in (a, b, out))
        self._inputs = DeviceArray.empty(bench.device, (sets * (a_room + b_room),))
        self._outputs = DeviceArray.empty(bench.device, (sets * out_room,))
        self.elements = sets * out
        self._padding = sets * (out_room - out)
        bench.launch(
            "fill_normal",
            self._inputs.shape[0] // 2,
            [self._inputs, ctypes.c_uint64(self._inputs.shape[0]), ctypes.c_uint64(int(rng.integers(2**63)))],
        )
        self.sets = []
        for place in range(sets):
            first = place * (a_room + b_room)
            self.sets.append(
                Buffers(
                    self._inputs.view(first, shapes[0]),
                    self._inputs.view(first + a_room, shapes[1]),
                    self._outputs.view(place * out_room, shapes[2]),
                )
            )

    def poison(self) -> None:
        """Fill all results with NaN of a payload of its own."""
        self._outputs.poison()

    def unwritten(self) -> int:
        """How many elements of the results still hold the poison."""
        found = DeviceArray.from_numpy(self._bench.device, np.zeros(1, np.uint64))
        count = self._outputs.shape[0]
        self._bench.launch(
            "count_poison",
            count // 8,
            [self._outputs, ctypes.c_uint64(count), ctypes.c_uint32(NAN_PATTERN), found],
        )
        return int(found.to_numpy()[0]) - self._padding

    def compare_rows(self, place: int, rows: NDArray[np.uint64] | None) -> tuple[float, float]:
        """Rows of one set's C against float64; all of them without a list. Rows count over all items.

        Returns the largest error in units of `tilewave.precision.ieee_bound`, and the root of the sum of
        squared errors over that of the sums of (a b)^2, which random data makes of an element's square.
        """
        product, one, bench = self.product, self.sets[place], self._bench
        m, n, k = product.m, product.n, product.k
        count = m * product.batch if rows is None else len(rows)
        listed = ctypes.c_uint64(0) if rows is None else DeviceArray.from_numpy(bench.device, rows)
        a_strides = (1, m) if product.transposed_a else (k, 1)
        b_strides = (1, k) if product.transposed_b else (n, 1)
        sizes = (
            count, m, n, k,
            *a_strides, 0 if product.shared_a else m * k,
            *b_strides, 0 if product.shared_b else k * n,
        )  # fmt: skip
        totals = DeviceArray.from_numpy(bench.device, np.zeros(3))
        bench.launch(
            "compare_rows",
            32 * count * n,
            [
                one.a,
                one.b,
                one.out,
                listed,
                *map(ctypes.c_uint64, sizes),
                ctypes.c_double(gamma(k)),
                ctypes.c_double(k * SMALLEST_SUBNORMAL / 2),
                totals,
            ],
        )
        worst, errors, references = totals.to_numpy()
        return float(worst), math.sqrt(errors / references) if references else math.inf

    def freivalds(self, place: int, seed: int) -> float:
        """Freivalds' test of all of one set: the largest |C r - A (B r)| of a row, 1 being what is allowed.

        r is a vector of random signs. The error of an element is a sum of K roundings, which for random data
        is at most `ROUNDING` sqrt(K) u |row of A| |column of B| (Higham and Mary, "A new approach to
        probabilistic rounding error analysis", 2019, with Cauchy's inequality), and their sum under
        random signs at most `CERTAINTY` times the root of the sum of their squares (Hoeffding).
        """
        product, one, bench = self.product, self.sets[place], self._bench
        m, n, k, items = product.m, product.n, product.k, product.batch
        b_items = 1 if product.shared_b else items

        def doubles(count: int) -> DeviceArray:
            return DeviceArray.empty(bench.device, (count,), np.float64)

        def times(
            x: DeviceArray, rows: int, columns: int, transposed: bool, shared: bool, count: int,
            vector: DeviceArray | None, stride: int,
        ) -> tuple[DeviceArray, DeviceArray]:  # fmt: skip
            y, squares = doubles(rows * count), doubles(rows * count)
            strides = (1, rows) if transposed else (columns, 1)
            sizes = (rows, columns, *strides, 0 if shared else rows * columns, count)
            bench.launch(
                "times_vector",
                32 * rows * count,
                [
                    x,
                    *map(ctypes.c_uint64, sizes),
                    ctypes.c_uint64(0) if vector is None else vector,
                    ctypes.c_uint64(stride),
                    ctypes.c_uint64(seed),
                    y,
                    squares,
                ],
            )
            return y, squares

        cr, _ = times(one.out, m, n, False, False, items, None, 0)
        br, b_rows = times(one.b, k, n, product.transposed_b, product.shared_b, b_items, None, 0)
        stride = 0 if product.shared_b else k
        abr, a_squares = times(one.a, m, k, product.transposed_a, product.shared_a, items, br, stride)
        b_squares = doubles(b_items)
        bench.launch(
            "sum_items", 32 * b_items, [b_rows, ctypes.c_uint64(k), ctypes.c_uint64(b_items), b_squares]
        )
        worst = DeviceArray.from_numpy(bench.device, np.zeros(1))
        factor = CERTAINTY * (1 + ROUNDING * math.sqrt(k)) * 2.0**-24
        bench.launch(
            "worst_row",
            m * items,
            [
                cr,
                abr,
                a_squares,
                ctypes.c_uint64(m),
                ctypes.c_uint64(items),
                b_squares,
                ctypes.c_uint64(b_items),
                ctypes.c_double(factor),
                worst,
            ],
        )
        return float(worst.to_numpy()[0])
