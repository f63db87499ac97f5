"""precision="fp16x3" from the front door to the kernels in the emulator, and operands packed ahead."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_gpu import CupyArray, FakeGpu, matrix_at

import tilewave
from tilewave import packed
from tilewave.device import get_spec
from tilewave.errors import OperandTypeError, UsageError
from tilewave.kernels import fp16x3 as kernels
from tilewave.kernels.arguments import Pointers
from tilewave.planner.fp16x3 import plan_on
from tilewave.planner.gemm import PlanOptions
from tilewave.precision import fp16x3
from tilewave.problem import GemmProblem, Precision
from tilewave.runtime.fp16x3_emulated import emulate_fp16x3

Rng = np.random.Generator
F = np.float32
STORAGE = 1 << 20


@dataclass
class ModeExecutor:
    """Runs problems of the mode in the emulator, if asked to; notes which operands came packed."""

    runs: bool = True
    kept: list[tuple[int | None, int | None]] = field(default_factory=list)
    problems: list[GemmProblem] = field(default_factory=list)

    def __call__(
        self,
        problem: GemmProblem,
        pointers: Pointers,
        alpha: float,
        beta: float,
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
        packed: tuple[packed.Packed, ...] = (),
    ) -> None:
        self.problems.append(problem)
        assert problem.precision is Precision.FP16X3
        a, b = kernels.operands_of(problem)

        def kept(operand: kernels.UnpackedOperand, source: int) -> int | None:
            found = [address for one in packed if (address := one.address_for(operand, source)) is not None]
            return found[0] if found else None

        self.kept.append((kept(a, pointers.a), kept(b, pointers.b)))
        if not self.runs:
            return
        operands = {}
        for role, shape in (("a", (problem.m, problem.k)), ("b", (problem.k, problem.n))):
            operands[role] = matrix_at(getattr(pointers, role), getattr(problem, role), *shape, problem.batch)
        for role in ("out", "c", "bias", "preactivation"):
            if (layout := getattr(problem, role)) is not None:
                shape = (problem.m, problem.n)
                operands[role] = matrix_at(getattr(pointers, role), layout, *shape, problem.batch)
        plan = plan_on(problem, kernels.SMALL, get_spec("H200"), 2)
        addresses = {role: getattr(pointers, role) for role in operands}
        # The emulator lays operands out anew, so what it is told of alignment must be what they have there.
        misaligned = replace(
            problem, **{role: replace(getattr(problem, role), alignment=4) for role in ("a", "b", "out")}
        )
        assert all(addresses.values())
        emulate_fp16x3(
            replace(plan, problem=misaligned),
            operands,
            alpha=alpha,
            beta=beta,
            misalignment=1,
            exact_fma=True,
        )


@pytest.fixture
def executor(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> ModeExecutor:
    found = ModeExecutor()
    monkeypatch.setattr("tilewave.on_device.executor", lambda: found)
    return found


def test_a_batched_product_with_an_epilogue(executor: ModeExecutor, rng: Rng) -> None:
    a, b = rng.standard_normal((2, 70, 20), F), rng.standard_normal((70, 30), F)
    c, bias = rng.standard_normal((2, 20, 30), F), rng.standard_normal(30, F)
    out = np.full((2, 20, 60), np.nan, F)
    tilewave.gemm(
        CupyArray(a),
        CupyArray(b),
        CupyArray(c),
        alpha=0.5,
        beta=2.0,
        bias=CupyArray(bias),
        activation="relu",
        transpose_a=True,
        out=CupyArray(out[..., ::2]),
        precision="fp16x3",
    )
    product = fp16x3.multiply(np.ascontiguousarray(a.swapaxes(1, 2)), b).values
    expected = np.maximum(
        (F(0.5) * product + F(2) * c.astype(np.float64)).astype(F) + bias, F(0)
    )  # 2 c is exact, so that one rounding is that of the fused multiply-add
    assert np.array_equal(out[..., ::2], expected)
    assert np.isnan(out[..., 1::2]).all()


def test_the_order_of_low_and_high_does_not_depend_on_m(executor: ModeExecutor, rng: Rng) -> None:
    """low * high of a transposed product is high * low, and either is added first: other bits, seldom."""
    executor.runs = False
    k = int(rng.integers(1, 70))
    for m, n in ((1, 1), (5, 1), (1, 4), (5, 4)):
        a, b = CupyArray(rng.standard_normal((m, k), F)), CupyArray(rng.standard_normal((k, n), F))
        for out in (None, CupyArray(np.empty((n, m), F).T)):
            tilewave.gemm(a, b, out=out, precision="fp16x3", batch_invariant=True)
            assert (executor.problems[-1].m, executor.problems[-1].n) == (m, n)
            (plan,) = tilewave.plan_for(
                a, b, out=out, precision="fp16x3", batch_invariant=True, device="H200"
            )
            assert (plan.problem.m, plan.problem.n) == (m, n)
    tilewave.gemm(a, b, out=out, precision="fp16x3")
    assert (executor.problems[-1].m, executor.problems[-1].n) == (n, m)  # out lies column by column


def test_no_product_no_mode(gpu: FakeGpu, rng: Rng) -> None:
    c = CupyArray(rng.standard_normal((3, 4), F))
    empty = CupyArray(np.zeros((3, 0), F)), CupyArray(np.zeros((0, 4), F))
    found = tilewave.gemm(*empty, c, beta=1.0, precision="fp16x3")
    assert np.array_equal(found.host, c.host)
    assert gpu.run.submissions[-1].problem.precision is Precision.IEEE


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> list[kernels.UnpackedOperand]:
    """What was packed, in memory that is none."""
    made: list[kernels.UnpackedOperand] = []

    def pack(view: Any, operand: kernels.UnpackedOperand, stream: int) -> SimpleNamespace:
        made.append(operand)
        return SimpleNamespace(address=STORAGE - 1)

    monkeypatch.setattr(packed, "_packed_on_gpu", pack)
    return made


def test_packed_operands_are_used_where_they_fit(
    executor: ModeExecutor, storage: list[kernels.UnpackedOperand], rng: Rng
) -> None:
    executor.runs = False

    def array(*shape: int) -> CupyArray:
        return CupyArray(rng.standard_normal(shape, F))

    w, x = array(70, 30), array(20, 70)
    kept = tilewave.prepack(w)
    assert kept.nbytes == storage[0].packed_bytes
    assert "on GPU 0" in repr(kept)
    tilewave.matmul(x, kept, precision="fp16x3")
    tilewave.matmul(array(5, 4, 70), kept, precision="fp16x3")  # more rows
    assert executor.kept == [(None, STORAGE)] * 2
    turned = CupyArray(np.full((30, 20), np.nan, F).T)
    tilewave.matmul(x, kept, out=turned, precision="fp16x3")  # the transposed product is computed
    assert executor.kept[-1] == (STORAGE, None)
    tilewave.gemm(x, tilewave.prepack(array(30, 70), transpose=True), transpose_b=True, precision="fp16x3")
    tilewave.matmul(tilewave.prepack(x, operand="a"), w, precision="fp16x3")
    tilewave.matmul(tilewave.prepack(array(2, 3, 9, 8), operand="a"), array(2, 3, 8, 7), precision="fp16x3")
    assert executor.kept[-3:] == [(None, STORAGE), (STORAGE, None), (STORAGE, None)]
    tilewave.gemm(array(20, 30), kept, transpose_b=True, precision="fp16x3")  # rows where columns were packed
    tilewave.matmul(x, w, precision="fp16x3")
    assert executor.kept[-2:] == [(None, None)] * 2


def test_packed_operands_are_their_arrays_elsewhere(
    gpu: FakeGpu, storage: list[kernels.UnpackedOperand], rng: Rng
) -> None:
    a, b = rng.standard_normal((3, 8), F), rng.standard_normal((8, 5), F)
    found = tilewave.matmul(CupyArray(a), tilewave.prepack(CupyArray(b)))
    np.testing.assert_allclose(found.host, a @ b, rtol=1e-5, atol=1e-6)
    assert gpu.run.submissions[-1].problem.precision is Precision.IEEE


def test_arrays_of_the_host_are_not_packed(monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    for module in ("host", "api", "precision.dispatch"):
        monkeypatch.setattr(f"tilewave.{module}.gpu_for_host_operands", lambda: None)
    a, b = rng.standard_normal((3, 80), F), rng.standard_normal((80, 5), F)
    kept = tilewave.prepack(b)
    assert kept.nbytes == 0
    assert "nothing packed" in repr(kept)
    assert np.array_equal(tilewave.matmul(a, kept, precision="fp16x3"), fp16x3.multiply(a, b).values)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.zeros(3, F),), {}, r"array of shape \(3,\) .* has 1 axes; accepted are matrices"),
        ((np.zeros((3, 3), F),), {"operand": "c"}, "operand is 'c'; accepted are 'a' and 'b'"),
        ((np.zeros((3, 3), F),), {"transpose": 1}, "transpose must be True or False"),
        ((np.broadcast_to(F(0), (1 << 24, 1)),), {}, r"K is 16777216; accepted .* less than 2\^24"),
        ((np.zeros((3, 5, 7, 9, 2, 2), F)[:, ::2, ::3, ::2],), {}, "make 4 that do not follow"),
    ],
)
def test_what_cannot_be_packed_says_so(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tilewave.prepack(*arguments, **options)
    with pytest.raises(OperandTypeError, match="array is"):
        tilewave.prepack(np.zeros((3, 3)))
    with pytest.raises(UsageError, match="packed already"):
        tilewave.prepack(tilewave.prepack(np.zeros((2, 2), F)))
