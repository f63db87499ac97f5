"""Negative strides: where loads stay wide, where they do not, and that the account says so."""

from __future__ import annotations

import numpy as np
import pytest

import tilewave
from tilewave.call import collect
from tilewave.device import get_spec
from tilewave.on_device import normalised_problem
from tilewave.planner.gemm import GemmPlan, plan_gemm

F = np.float32


def plan_of(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> GemmPlan:
    call = collect(a, b, out=out)
    assert call.out is not None
    normalised = normalised_problem(call, call.out)
    assert normalised is not None
    return plan_gemm(normalised.problem, get_spec("H200"))


def aligned(rows: int, columns: int) -> np.ndarray:
    memory = np.zeros(rows * columns + 4, F)
    first = -memory.ctypes.data % 16 // 4
    return memory[first : first + rows * columns].reshape(rows, columns)


@pytest.mark.parametrize("size", [512, 4096])
@pytest.mark.parametrize("turned", ["a", "b", "out"])
@pytest.mark.parametrize("transposed", [False, True])
def test_lines_in_reverse_order_are_read_as_wide_as_others(size: int, turned: str, transposed: bool) -> None:
    """The direction in which elements are neighbours runs forwards; the other one does not matter."""
    operands = {name: aligned(size, size) for name in ("a", "b", "out")}
    if transposed:
        operands[turned] = operands[turned].T
    plain = plan_of(**operands)
    operands[turned] = operands[turned][:, ::-1] if transposed else operands[turned][::-1]
    plan = plan_of(**operands)
    assert plan.instance == plain.instance
    assert plan.estimate == plain.estimate
    for access in (plan.instance.a, plan.instance.b):
        assert access is not None
        assert access.width == 16


@pytest.mark.parametrize("turned", ["a", "b"])
@pytest.mark.parametrize("transposed", [False, True])
def test_lines_that_run_backwards_are_read_by_4_bytes_and_explained(turned: str, transposed: bool) -> None:
    operands = {name: aligned(512, 512) for name in ("a", "b", "out")}
    operands[turned] = operands[turned].T[::-1] if transposed else operands[turned][:, ::-1]
    plan = plan_of(**operands)
    assert plan.instance.a is not None
    assert plan.instance.a.width == 4
    line = "columns" if transposed else "rows"
    assert f"{turned.upper()}'s {line} run backwards (a step of -1)" in tilewave.explain(plan)
