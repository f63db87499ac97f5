"""Families of made-up kernels for the planner's tests, and random problems for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tilewave.kernels.instances import Access, Contiguous, Family, Instance
from tilewave.problem import Activation, GemmProblem, MatrixLayout

ALONG_K, ALONG_MN = Contiguous.K, Contiguous.OTHER


def allowed(access: Access, layout: MatrixLayout, along_k: int, along_other: int, k: int, other: int) -> bool:
    """Whether an operand may be read so, judged on its address, every stride and the length of its lines."""
    if access.width == 4:
        return True
    elements = access.width // 4
    near, far, length = (along_k, along_other, k)
    if access.contiguous is ALONG_MN:
        near, far, length = along_other, along_k, other
    return (
        near == 1
        and length % elements == 0
        and layout.alignment >= access.width
        and all(stride % elements == 0 for stride in (far, *layout.batch))
    )


def tile(
    bm: int, bn: int, bk: int, tm: int, tn: int, groups: int, a: Access | None, b: Access | None, **more: bool
) -> Instance:
    threads = bm // tm * (bn // tn) * groups
    access = "" if a is None or b is None else f"_{a.contiguous}{a.width}_{b.contiguous}{b.width}"
    return Instance(
        name=f"tile_{bm}x{bn}x{bk}_{groups}{access}",
        family="fake tiles",
        header="kernels/fake.cuh",
        entry="fake",
        bm=bm,
        bn=bn,
        bk=bk,
        tm=tm,
        tn=tn,
        threads=threads,
        shared_bytes=2 * (bm + bn) * bk * 4,
        a=a,
        b=b,
        reason="tests",
        k_groups=groups,
        sequential=groups == 1,
        **more,
    )


_SHAPES = (
    (128, 256, 8, 16, 8, 1),
    (128, 128, 8, 16, 8, 1),
    (64, 64, 16, 8, 4, 1),
    (32, 32, 32, 4, 4, 1),
    (32, 32, 32, 4, 4, 4),
    (16, 128, 32, 4, 4, 4),
)


@dataclass
class FakeTiles:
    """Tiles of several shapes for every way of reading the operands."""

    name: str = "fake tiles"
    widths: tuple[int, ...] = (16, 4)
    cuttable: bool = True
    all: tuple[Instance, ...] = field(init=False)

    def __post_init__(self) -> None:
        ways = [Access(along, width) for along in (ALONG_K, ALONG_MN) for width in self.widths]
        self.all = tuple(
            tile(*shape, a, b, cuttable=self.cuttable) for shape in _SHAPES for a in ways for b in ways
        )

    def instances(self) -> tuple[Instance, ...]:
        return self.all

    def matching(self, problem: GemmProblem) -> tuple[Instance, ...]:
        if not problem.product:
            return ()
        found = []
        for instance in self.all:
            assert instance.a is not None
            assert instance.b is not None
            if allowed(
                instance.a, problem.a, problem.a.column, problem.a.row, problem.k, problem.m
            ) and allowed(instance.b, problem.b, problem.b.row, problem.b.column, problem.k, problem.n):
                found.append(instance)
        # The widest of the ways that fit, as a family would offer them.
        widest = max((i.a.width + i.b.width for i in found if i.a and i.b), default=0)
        return tuple(i for i in found if i.a and i.b and i.a.width + i.b.width == widest)

    def refuses(self, instance: Instance, problem: GemmProblem) -> str | None:
        if instance.bm > 64 and problem.m < instance.bm:
            return f"its tiles have {instance.bm} rows, and m is {problem.m}"
        return None


@dataclass
class FakeNoProduct:
    """What is left where there is no product."""

    name: str = "fake elementwise"
    instance: Instance = field(default_factory=lambda: tile(32, 64, 1, 1, 8, 1, None, None, cuttable=False))

    def instances(self) -> tuple[Instance, ...]:
        return (self.instance,)

    def matching(self, problem: GemmProblem) -> tuple[Instance, ...]:
        return () if problem.product else (self.instance,)

    def refuses(self, instance: Instance, problem: GemmProblem) -> str | None:
        return "there is a product" if problem.product else None


FAKES: tuple[Family, ...] = (FakeTiles(), FakeNoProduct())


def product(
    m: int,
    n: int,
    k: int,
    batch: tuple[int, ...] = (),
    *,
    lda: int = 0,
    transpose_a: bool = False,
    alignment: int = 16,
) -> GemmProblem:
    """A product of contiguous operands; ``lda`` is A's leading dimension, its own length if 0."""
    items = [1]
    for extent in reversed(batch):
        items.insert(0, items[0] * extent)
    strides = tuple(items[1:])
    lead = lda or (m if transpose_a else k)
    a_size = lead * (k if transpose_a else m)
    a_row, a_column = (1, lead) if transpose_a else (lead, 1)
    return GemmProblem(
        m,
        n,
        k,
        batch,
        MatrixLayout(a_row, a_column, tuple(a_size * s for s in strides), alignment),
        MatrixLayout(n, 1, tuple(k * n * s for s in strides)),
        MatrixLayout(n, 1, tuple(m * n * s for s in strides)),
        product=k > 0,
    )


def random_problem(draw: random.Random, largest: int = 5000) -> GemmProblem:
    """Any sizes, layouts, batches and epilogue."""

    def size() -> int:
        return draw.choice((draw.randint(0, 70), draw.randint(1, largest), 2 ** draw.randint(0, 12)))

    m, n, k = size(), size(), size()
    batch = tuple(draw.choice((1, 2, 7, 300)) for _ in range(draw.choice((0, 0, 0, 1, 2, 3))))

    def layout(rows: int, columns: int) -> MatrixLayout:
        lead = columns + draw.choice((0, 0, 1, 4))
        row, column = lead, 1
        match draw.randrange(6):
            case 0 | 1:
                row, column = 1, rows + draw.choice((0, 1, 4))
            case 2:
                row, column = -row, column
            case 3:
                row, column = draw.choice(((0, 1), (1, 0), (2 * lead, 2)))
            case _:
                pass
        item = draw.choice((0, rows * lead, rows * lead + 1))
        return MatrixLayout(
            row, column, tuple(item * (i + 1) for i in range(len(batch))), draw.choice((16, 16, 8, 4))
        )

    out = MatrixLayout(n, 1, tuple(m * n for _ in batch), 16)
    return GemmProblem(
        m,
        n,
        k,
        batch,
        layout(m, k),
        layout(k, n),
        out,
        c=draw.choice((None, out)),
        bias=draw.choice((None, MatrixLayout(0, 1, (0,) * len(batch)))),
        preactivation=draw.choice((None, None, out)),
        activation=draw.choice(list(Activation)),
        product=k > 0 and draw.random() < 0.9,
    )
