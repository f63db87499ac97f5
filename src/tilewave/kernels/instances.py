"""Kernel instances of the product: what each one is, in plain data. No GPU library is imported.

A *family* is one template (a `.cuh` file beside this one) and a Python module that lists its instances and
says which problems they take. An *instance* is the template with its parameters filled in: one entry of one
cubin. Every kernel takes one argument, GemmArgs (`gemm_args.cuh`), and runs on a one-dimensional grid of
`cut.blocks` blocks, so that planner and launcher treat all families alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tilewave.problem import GemmProblem


class Contiguous(StrEnum):
    """The axis along which an operand's elements are neighbours in memory, as a kernel wants to read it."""

    K = "k"
    OTHER = "mn"  # m for A, n for B


@dataclass(frozen=True, slots=True)
class Access:
    """How a kernel reads an operand: vectors of ``width`` bytes along an axis.

    At 4 bytes any stride along either axis is fine, and ``contiguous`` only tells which neighbours are read
    together. At 8 and 16 the stride along that axis is 1, and every other stride and the address are
    multiples of the width.
    """

    contiguous: Contiguous
    width: int


@dataclass(frozen=True, slots=True)
class Instance:
    """One compiled kernel.

    A block computes ``bm`` x ``bn`` outputs (of ``items`` consecutive batch items) in slices ``bk`` deep; a
    problem has ceil(m / bm) * ceil(n / bn) * ceil(batches / items) tiles. ``k_groups`` thread groups of a
    block share a slice and are summed in order. ``sequential``: an uncut tile's sum is one chain of fused
    multiply-adds in the order of k, from 0, so that all such instances give the same bits. ``cuttable``: a
    tile may be cut along K; ``keeps_own``: the block that completes a cut tile with its first piece adds the
    others' to the sums that it holds; ``alone``: the most pieces that one block adds, more are added in runs
    first. ``needs_new_loop``: the compiler's loop is so slow that the kernel is only chosen where it runs
    with the register-file pass's. ``a`` and ``b`` are None where the kernel reads any layout. ``reason``
    says what the instance is there for.
    """

    name: str
    family: str
    header: str
    entry: str
    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    threads: int
    shared_bytes: int
    a: Access | None
    b: Access | None
    reason: str
    items: int = 1
    k_groups: int = 1
    sequential: bool = True
    cuttable: bool = True
    keeps_own: bool = False
    alone: int = 16
    needs_new_loop: bool = False

    def __str__(self) -> str:
        return self.name

    def tiles(self, problem: GemmProblem) -> tuple[int, int, int]:
        """Tile rows, tile columns and groups of batch items that cover a problem."""
        return (
            -(-problem.m // self.bm),
            -(-problem.n // self.bn),
            -(-problem.batches // self.items),
        )


class Family(Protocol):
    """What a module of `kernels/families` offers to the planner."""

    name: str

    def instances(self) -> tuple[Instance, ...]:
        """Every instance, the same ones on every architecture; at most about 200 over all families."""
        ...

    def matching(self, problem: GemmProblem) -> tuple[Instance, ...]:
        """The instances worth weighing for a problem, without those of other layouts or widths; cheap."""
        ...

    def refuses(self, instance: Instance, problem: GemmProblem) -> str | None:
        """Why the instance cannot compute the problem, or None."""
        ...
