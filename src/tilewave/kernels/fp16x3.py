"""The kernels of precision ``fp16x3``: what they are, how an operand is packed for them, and their arguments.

Float32 operands become scaled fp16 pairs: by the kernel *columns* (`kernels/fp16x3_columns.cuh`) where packed
rows are neighbours in memory, and by *scan* and *pack* (`kernels/fp16x3_pack.cuh`) where K is too long for
that, or elements along K are neighbours in both operands. *main* multiplies on tensor cores
(`kernels/fp16x3_main.cuh`), and makes the few elements that the split cannot hold another way
(`kernels/fp16x3_recompute.cuh`). All need what only sm_90a has. No GPU library is imported.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tilewave.errors import UsageError
from tilewave.kernels.instances import Instance
from tilewave.problem import BATCH_LEVELS, GemmProblem, MatrixLayout

FAMILY = "fp16x3"

ARCHITECTURE = "sm_90a"
"""What the kernels are compiled for: code for it runs on compute capability 9.0 and nowhere else."""

INTERVAL = 64
"""Elements of K after which the tensor core's sum is added to a float32 sum; K is padded to a multiple."""

FINE_INTERVAL = 16
"""The same in a kernel whose sums are fine."""

BLOCK_K = 32
"""Elements of K in 128 bytes of a packed row: their high halves, then their low halves."""

K_LIMIT = 1 << 24
"""K must be less, as the mode's definition says."""

_INDEX_LIMIT = 1 << 31
"""Packed rows, tiles and coordinates of copies are 32-bit integers in the kernels."""

_MOST_BLOCKS = 4096
"""That a launch of the main kernel may have; no GPU has as many SMs."""

_PACK_THREADS, _PACK_WARPS = 512, 16
_SCAN_ROWS, _PACK_ROWS = 128, 32
_COLUMNS_ROWS, _COLUMNS_WARP_K = 16, 64
_COLUMNS_K = _PACK_WARPS * _COLUMNS_WARP_K
_WARP_HOLDS = 1024
"""Elements of a row along K that a warp holds in registers."""

LARGEST_CLUSTER = 8
"""Blocks of a cluster that every GPU of the architecture can hold."""
_MOST_CHUNKS, _LEAST_CHUNK = 32, 256
PACKED_ALIGNMENT = 256
"""Packed operands, and what is within them, begin at multiples of so many bytes."""


def _main(halves: int, stages: int, cluster: int, reason: str, fine: bool = False) -> Instance:
    rows, columns = 128 * halves, 128
    out_bytes = 2 * 4 * 8 * columns * 4  # eight warps bring eight rows each to memory
    scale_bytes = 4 * (256 + columns + 4)  # of the rows of the largest tile, of the columns, and a flag
    return Instance(
        name=f"fp16x3_{rows}x{columns}" + ("_pairs" if cluster > 1 else ""),
        family=FAMILY,
        header="kernels/fp16x3_main.cuh",
        entry=f"tilewave::fp16x3_main<{halves}, {stages}, {cluster}, {str(fine).lower()}>",
        bm=rows,
        bn=columns,
        bk=INTERVAL,
        tm=8 * halves,
        tn=8,
        threads=384,
        shared_bytes=sum(
            (
                stages * (rows + columns) * 4 * BLOCK_K,
                out_bytes,
                scale_bytes,
                16 * (stages + 1),  # two barriers each of a stage and of the scales
                1024,  # which aligning to as much may take
            )
        ),
        a=None,
        b=None,
        reason=reason,
        sequential=False,
        cuttable=False,
    )


def _helper(header: str, kernel: str, reason: str) -> Instance:
    return Instance(
        name=kernel,
        family=FAMILY,
        header=f"kernels/{header}.cuh",
        entry=f"tilewave::{kernel}",
        bm=0,
        bn=0,
        bk=0,
        tm=0,
        tn=0,
        threads=_PACK_THREADS,
        shared_bytes=0,
        a=None,
        b=None,
        reason=reason,
        sequential=False,
        cuttable=False,
    )


PAIRS = _main(2, 4, 2, "large products: two blocks share what they read of A")
LARGE = _main(2, 4, 1, "large products whose tiles do not come in pairs")
SMALL = _main(1, 6, 1, "small outputs, and bits that must not depend on sizes: finer sums", fine=True)
MAIN_INSTANCES = (PAIRS, LARGE, SMALL)
SCAN = _helper("fp16x3_pack", "fp16x3_scan", "packs rows along K, scans strips of neighbouring rows")
PACK = _helper("fp16x3_pack", "fp16x3_pack", "packs strips that were scanned")
COLUMNS = _helper("fp16x3_columns", "fp16x3_columns", "packs rows along K, and strips of rows in one pass")


def cluster_of(instance: Instance) -> int:
    """Blocks of a main kernel that form a cluster, side by side along N."""
    return 2 if instance is PAIRS else 1


def interval_of(instance: Instance) -> int:
    """Elements of K after which a main kernel adds the tensor core's sum to a float32 sum."""
    return FINE_INTERVAL if instance is SMALL else INTERVAL


def every_fp16x3_instance() -> tuple[Instance, ...]:
    """All kernels of the mode; they are compiled for `ARCHITECTURE` alone."""
    return (*MAIN_INSTANCES, SCAN, PACK, COLUMNS)


@dataclass(frozen=True, slots=True)
class UnpackedOperand:
    """A float32 operand as the pre-pass sees it: packed rows are rows of A or columns of B.

    ``row`` and ``column`` are strides, in elements, to the next packed row and along K; ``batch`` strides and
    ``extents`` of three batch axes, where an axis along which the operand repeats has extent 1.
    """

    rows: int
    k: int
    row: int
    column: int
    batch: tuple[int, int, int]
    extents: tuple[int, int, int]
    alignment: int

    @property
    def items(self) -> int:
        """Matrices that are packed."""
        return math.prod(self.extents)

    @property
    def packed_rows(self) -> int:
        """Packed rows of all items."""
        return self.items * self.rows

    @property
    def intervals(self) -> int:
        """Intervals of K, the last one padded with zeros."""
        return -(-self.k // INTERVAL)

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row: two halves for each element of K."""
        return self.intervals * INTERVAL * 4

    @property
    def along_k(self) -> bool:
        """Whether a packed row is read along K: where its elements are neighbours, or no packed rows are."""
        return self.column == 1 or self.row != 1 or self.k == 1

    @property
    def vectors(self) -> bool:
        """Whether four neighbours may be read at once, wherever a multiple of four of them begins."""
        contiguous, across = (self.column, self.row) if self.along_k else (self.row, self.column)
        steps = (across, *self.batch)
        return contiguous == 1 and self.alignment >= 16 and all(step % 4 == 0 for step in steps)

    @property
    def in_one_pass(self) -> bool:
        """Whether neighbouring packed rows are read once, by a cluster that holds all of K."""
        return not self.along_k and self.intervals * INTERVAL <= LARGEST_CLUSTER * _COLUMNS_K

    @property
    def cluster(self) -> int:
        """Blocks that share K where it is packed in one pass."""
        return -(-self.intervals * INTERVAL // _COLUMNS_K)

    @property
    def columns_threads(self) -> int:
        """Threads of a block that packs in one pass: a short K needs few, and more blocks fit."""
        warps = -(-self.intervals * INTERVAL // _COLUMNS_WARP_K)
        return 32 * min(_PACK_WARPS, 1 << (warps - 1).bit_length())

    @property
    def readings(self) -> int:
        """How often packing reads the operand out of device memory."""
        return 1 if self.along_k or self.in_one_pass else 2

    @property
    def warps(self) -> int:
        """Warps that share a row: enough to hold it in registers, as far as a block has them."""
        return min(_PACK_WARPS, 1 << (-(-self.k // _WARP_HOLDS) - 1).bit_length())

    @property
    def chunk(self) -> int:
        """Elements of K that a block scans."""
        return max(_LEAST_CHUNK, -(-self.k // _MOST_CHUNKS) + 7 & ~7)

    @property
    def chunks(self) -> int:
        """Chunks of K: as many largest magnitudes are kept of each packed row."""
        return -(-self.k // self.chunk)

    @property
    def scan_blocks(self) -> int:
        """Blocks that pack whole rows or scan strips."""
        if self.along_k:
            return -(-self.packed_rows // (_PACK_WARPS // self.warps))
        if self.in_one_pass:
            return 0
        return self.items * -(-self.rows // _SCAN_ROWS) * self.chunks

    @property
    def pack_blocks(self) -> int:
        """Blocks that pack strips, in one pass or after a scan."""
        if self.along_k:
            return 0
        if self.in_one_pass:
            return self.items * -(-self.rows // _COLUMNS_ROWS) * self.cluster
        return (
            self.items
            * -(-self.rows // _PACK_ROWS)
            * -(-self.intervals * INTERVAL // (_PACK_WARPS * BLOCK_K))
        )

    @property
    def packed_bytes(self) -> int:
        """Memory that the packed operand takes: the split rows, then a shift and a guard a row."""
        return self.guards_offset + aligned(4 * self.packed_rows)

    @property
    def shifts_offset(self) -> int:
        """Where in the packed operand the shifts begin."""
        return aligned(self.packed_rows * self.row_bytes)

    @property
    def guards_offset(self) -> int:
        """Where in the packed operand the guards begin."""
        return self.shifts_offset + aligned(4 * self.packed_rows)

    def packs_as(self, other: UnpackedOperand) -> bool:
        """Whether two operands at one address give the same packed one."""

        def read(operand: UnpackedOperand) -> tuple[object, ...]:
            axes = zip(*merged_axes(operand.batch, operand.extents), strict=True)
            return (
                operand.rows,
                operand.k,
                operand.row,
                operand.column,
                [axis for axis in axes if axis[1] > 1],
            )

        return read(self) == read(other)

    @property
    def scratch_bytes(self) -> int:
        """Memory that packing takes beside."""
        return 0 if self.along_k or self.in_one_pass else aligned(4 * self.packed_rows * self.chunks)


def aligned(nbytes: int) -> int:
    """The next multiple of `PACKED_ALIGNMENT`."""
    return -(-nbytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT


def unpacked_operand(
    rows: int, k: int, row: int, column: int, batch: Sequence[int], extents: Sequence[int], alignment: int
) -> UnpackedOperand:
    """An operand from its strides and batch axes, outermost first; axes of stride 0 repeat it."""
    kept = [(stride, extent if stride else 1) for stride, extent in zip(batch, extents, strict=True)]
    kept = [(0, 1)] * (BATCH_LEVELS - len(kept)) + [(s if e > 1 else 0, e) for s, e in kept]
    strides, counts = zip(*kept, strict=True)
    return UnpackedOperand(
        rows, k, row if rows > 1 else 0, column if k > 1 else 0, strides, counts, alignment
    )


def merged_axes(strides: Sequence[int], extents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Batch axes, outermost first, with those that go on where the next one ends made one; at least one.

    Raises ``UsageError`` where more are left than kernels walk.
    """
    found: list[tuple[int, int]] = []
    for stride, extent in zip(strides, extents, strict=True):
        if extent == 1:
            continue
        if found and found[-1][0] == stride * extent:
            found[-1] = (stride, found[-1][1] * extent)
        else:
            found.append((stride, extent))
    if len(found) > BATCH_LEVELS:
        raise UsageError(
            f"batch axes of extents {tuple(extents)} and strides {tuple(strides)} make {len(found)} that do "
            f"not follow one another; accepted are {BATCH_LEVELS}"
        )
    found = found or [(0, 1)]
    return [stride for stride, _ in found], [extent for _, extent in found]


@functools.lru_cache(maxsize=1024)
def operands_of(problem: GemmProblem) -> tuple[UnpackedOperand, UnpackedOperand]:
    """The two operands of a problem, as they are packed."""

    def operand(layout: MatrixLayout, rows: int, row: int, column: int) -> UnpackedOperand:
        return unpacked_operand(rows, problem.k, row, column, layout.batch, problem.batch, layout.alignment)

    return (
        operand(problem.a, problem.m, problem.a.row, problem.a.column),
        operand(problem.b, problem.n, problem.b.column, problem.b.row),
    )


def refusal(problem: GemmProblem) -> str | None:
    """Why the mode's kernels cannot compute a problem, or None."""
    if not problem.product:
        return "there is no product to compute"
    if problem.k >= K_LIMIT:
        return f"K is {problem.k}, and the mode takes less than 2^24"
    a, b = operands_of(problem)
    tiles = problem.batches * -(-problem.m // SMALL.bm) * -(-problem.n // SMALL.bn)
    # A block looks for its next tile as many on as there are blocks.
    tiles += _MOST_BLOCKS
    most = max(a.packed_rows + LARGE.bm, b.packed_rows + LARGE.bn, tiles, a.scan_blocks + b.scan_blocks)
    if (
        max(most, a.pack_blocks + b.pack_blocks, a.packed_rows + b.packed_rows + LARGEST_CLUSTER)
        >= _INDEX_LIMIT
    ):
        return "it has more rows, columns or tiles than a 32-bit index holds"
    return None


def workspace_bytes(problem: GemmProblem, kept_a: bool = False, kept_b: bool = False) -> int:
    """Memory that a product takes: what is packed, but for operands that are kept packed."""
    kept = (kept_a, kept_b)
    parts = zip(operands_of(problem), kept, strict=True)
    return PACKED_ALIGNMENT + sum(
        one.packed_bytes + one.scratch_bytes for one, is_kept in parts if not is_kept
    )


@dataclass(frozen=True, slots=True)
class PackedAddresses:
    """Where a packed operand lies: split rows, shifts and guards."""

    rows: int
    shifts: int
    guards: int

    @classmethod
    def at(cls, address: int, operand: UnpackedOperand) -> PackedAddresses:
        """The parts of a packed operand that begins at ``address``, a multiple of 256."""
        return cls(address, address + operand.shifts_offset, address + operand.guards_offset)


_UNPACKED = struct.Struct("<Q2q3q3q3qQQQQ2q6i")
_OPERANDS = struct.Struct("<4Q3q3qq")
PACKED_OPERANDS_BYTES = _OPERANDS.size
PACK_ARGS_BYTES = 2 * _UNPACKED.size


def pack_arguments(
    operands: Sequence[tuple[UnpackedOperand, int, PackedAddresses, int]],
) -> tuple[bytes, int, int]:
    """The bytes of PackArgs, and the blocks of the scan and of the pack kernel or of the one for columns.

    ``operands`` holds at most two operands, each with the address of its element (0, 0), where it is packed
    to, and the address of its scratch memory.
    """
    block, scan_blocks, pack_blocks = b"", 0, 0
    # Operands of one product have one K, so that either all columns or none are packed in one pass.
    clusters = [operand.cluster for operand, *_ in operands if operand.in_one_pass]
    for operand, address, target, scratch in operands:
        scan, pack = operand.scan_blocks, operand.pack_blocks
        if clusters and operand.along_k:  # packed beside the columns, in whole clusters of that kernel
            rows = operand.columns_threads // 32 // operand.warps
            scan, pack = 0, -(-operand.packed_rows // (rows * clusters[0])) * clusters[0]
        block += _UNPACKED.pack(
            address,
            operand.row,
            operand.column,
            *operand.batch,
            *operand.extents,
            operand.rows,
            operand.k,
            operand.intervals,
            target.rows,
            target.shifts,
            target.guards,
            scratch,
            scan,
            pack,
            int(not operand.along_k),
            int(operand.vectors),
            operand.warps,
            operand.cluster,
            operand.chunk,
            0,
        )
        scan_blocks += scan
        pack_blocks += pack
    return block.ljust(PACK_ARGS_BYTES, b"\0"), scan_blocks, pack_blocks


def packed_operands_argument(
    operands: tuple[UnpackedOperand, UnpackedOperand],
    addresses: tuple[PackedAddresses, PackedAddresses],
) -> bytes:
    """The bytes of PackedOperands."""
    (a, b), (at_a, at_b) = operands, addresses
    return _OPERANDS.pack(
        at_a.shifts,
        at_a.guards,
        at_b.shifts,
        at_b.guards,
        *_item_steps(a),
        *_item_steps(b),
        a.intervals,
    )


def _item_steps(operand: UnpackedOperand) -> tuple[int, int, int]:
    """Packed items from one index of a batch axis to the next; 0 along an axis where the operand repeats."""
    outer, middle, inner = operand.extents
    return (
        middle * inner if outer > 1 else 0,
        inner if middle > 1 else 0,
        1 if inner > 1 else 0,
    )
