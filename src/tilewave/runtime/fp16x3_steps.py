"""A product in precision ``fp16x3`` as a sequence of launches, the same on a GPU and in the emulator.

Workspace: the packed operands, each with scratch memory behind. No GPU library is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewave.kernels import fp16x3
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.arguments import pack_arguments as gemm_arguments
from tilewave.kernels.fp16x3 import PackedAddresses, UnpackedOperand
from tilewave.kernels.instances import Instance
from tilewave.planner.gemm.records import GemmPlan
from tilewave.tensor_map import TensorMap

Encoder = Callable[[TensorMap], bytes]


@dataclass(frozen=True, slots=True)
class Step:
    """A launch: ``arguments`` are the bytes of each parameter, ``early`` whether it may start while the one
    before it still runs, which it waits for by itself; ``cluster`` blocks of ``threads`` threads form a
    cluster."""

    instance: Instance
    blocks: int
    arguments: tuple[bytes, ...]
    early: bool
    threads: int
    cluster: int = 1


def tensor_map(operand: UnpackedOperand, address: int, rows: int) -> TensorMap:
    """The map of a packed operand: boxes of ``rows`` packed rows by one block of 128 bytes."""
    return TensorMap(
        "float16",
        address,
        (operand.row_bytes // 2, operand.packed_rows),
        (operand.row_bytes,),
        (2 * fp16x3.BLOCK_K, rows),
        swizzle=128,
        l2_promotion=256,
    )


def steps(
    plan: GemmPlan,
    pointers: Pointers,
    alpha: float,
    beta: float,
    *,
    memory: int,
    encode: Encoder,
    kept_a: int | None = None,
    kept_b: int | None = None,
) -> list[Step]:
    """The launches of a plan, in order.

    ``memory`` is the address of its workspace, of `kernels.fp16x3.workspace_bytes`; ``kept_a`` and ``kept_b``
    are those of operands that were packed ahead. ``encode`` makes the 128 bytes of a tensor map.
    """
    operands = fp16x3.operands_of(plan.problem)
    kept = (kept_a, kept_b)
    position = fp16x3.aligned(memory)
    to_pack, packed = [], []
    for operand, given, source in zip(operands, kept, (pointers.a, pointers.b), strict=True):
        target = PackedAddresses.at(position if given is None else given, operand)
        packed.append(target)
        if given is None:
            to_pack.append((operand, source, target, position + operand.packed_bytes))
            position += operand.packed_bytes + operand.scratch_bytes
    arguments = (
        gemm_arguments(plan.problem, plan.cut, plan.raster, pointers, alpha, beta),
        fp16x3.packed_operands_argument(operands, (packed[0], packed[1])),
    )
    cluster = fp16x3.cluster_of(plan.instance)
    boxes = plan.instance.bm // cluster, plan.instance.bn
    maps = tuple(
        encode(tensor_map(operand, target.rows, rows))
        for operand, target, rows in zip(operands, packed, boxes, strict=True)
    )
    return [
        *packing_steps(to_pack),
        Step(
            plan.instance,
            plan.blocks,
            (*maps, *arguments),
            early=bool(to_pack),
            threads=plan.instance.threads,
            cluster=cluster,
        ),
    ]


def packing_steps(operands: list[tuple[UnpackedOperand, int, PackedAddresses, int]]) -> list[Step]:
    """The launches that pack operands, given as `kernels.fp16x3.pack_arguments` takes them."""
    if not operands:
        return []
    arguments, scan_blocks, pack_blocks = fp16x3.pack_arguments(operands)
    found = []
    if scan_blocks:
        found.append(Step(fp16x3.SCAN, scan_blocks, (arguments,), early=False, threads=fp16x3.SCAN.threads))
    if pack_blocks:
        in_one_pass = [operand for operand, *_ in operands if operand.in_one_pass]
        if in_one_pass:
            instance, cluster, threads = (
                fp16x3.COLUMNS,
                in_one_pass[0].cluster,
                in_one_pass[0].columns_threads,
            )
        else:
            instance, cluster, threads = fp16x3.PACK, 1, fp16x3.PACK.threads
        found.append(
            Step(instance, pack_blocks, (arguments,), early=bool(found), threads=threads, cluster=cluster)
        )
    return found
