"""Plans for sizes and for arrays, their notes and prose, and what prepare takes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from host_gpu import CupyArray, FakeGpu

import tilewave
from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.planner.gemm import GemmPlan

Rng = np.random.Generator
F = np.float32


def test_equal_arguments_give_equal_plans_and_they_print(rng: Rng) -> None:
    for _ in range(20):
        m, n, k = (int(2 ** rng.uniform(0, 12)) for _ in range(3))
        first = tilewave.plan(m, n, k, device="H200")
        assert first == tilewave.plan(m, n, k, device=get_spec("h200"))
        for words in ("H200", "tiles", "predicted", "waves", first.instance.name):
            assert words in str(first)


def test_sizes_are_those_of_matmul_in_every_layout() -> None:
    for layouts, batch in itertools.product(("NN", "NT", "TN", "TT"), (1, 5, (2, 3))):
        plan = tilewave.plan(100, 60, 80, layouts=layouts, batch=batch, device="H200")
        assert plan.problem.multiply_adds == 100 * 60 * 80 * int(np.prod(batch))
        assert (plan.problem.a.column == 1) == (layouts[0] == "N")
        assert (plan.problem.b.column == 1) == (layouts[1] == "N")


def test_the_epilogue_and_alignment_are_part_of_the_problem() -> None:
    plan = tilewave.plan(
        100,
        60,
        80,
        device="H200",
        beta=1.0,
        bias_axis=-2,
        activation="gelu",
        return_preactivation=True,
        alignment=4,
    )
    problem = plan.problem
    assert problem.c is not None
    assert problem.preactivation is not None
    assert problem.bias is not None
    assert (problem.bias.row, problem.bias.column) == (1, 0)
    assert problem.activation.name == "GELU"
    assert problem.a.alignment == problem.out.alignment == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"m": -1}, "m is -1"),
        ({"k": 2.5}, "k is 2.5"),
        ({"batch": (2, -3)}, "batch is -3"),
        ({"layouts": "CN"}, "layouts is 'CN'; accepted are NN, NT, TN, TT"),
        ({"alignment": 2}, "accepted are 16, 8 and 4"),
        ({"bias_axis": 1}, "bias_axis is 1"),
        ({"device": "H2000"}, "unknown device 'H2000'"),
        ({"device": 1.5}, "device is 1.5"),
        ({"device": None}, "no usable GPU; name one"),
        ({"precision": "double"}, "accepted is 'ieee'"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
    ],
)
def test_bad_arguments_are_named(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("tilewave.planning.gpu_for_host_operands", lambda: None)
    with pytest.raises(UsageError, match=words):
        tilewave.plan(**({"m": 8, "n": 8, "k": 8, "device": "H200"} | arguments))


def test_plans_of_arrays_name_all_that_is_done(gpu: FakeGpu, rng: Rng) -> None:
    storage = CupyArray(rng.standard_normal((60, 40), dtype=F))
    a, b = CupyArray(storage.host[:40, :40]), CupyArray(rng.standard_normal((40, 40), dtype=F))
    plain = tilewave.plan_for(a, b, device="H200")
    assert len(plain) == 1
    product, copy = tilewave.plan_for(a, b, out=CupyArray(storage.host[20:]), device="H200")
    assert any("out shares memory with a" in note and "6,400 bytes" in note for note in product.notes)
    assert any("copy" in note for note in copy.notes)
    assert not copy.problem.product
    assert gpu.run.submissions == []  # nothing is run


def test_plans_of_arrays_are_those_that_gemm_follows(gpu: FakeGpu, rng: Rng) -> None:
    storage = np.zeros((3, 40, 44), F)
    a = CupyArray(storage[:, 1:, 3:])
    b, c = CupyArray(np.zeros((41, 30), F)), CupyArray(np.zeros((39, 1), F))
    (plan,) = tilewave.plan_for(a, b, c, beta=1.0, activation="relu", device="H200")
    tilewave.gemm(a, b, c, beta=1.0, activation="relu")
    (submission,) = gpu.run.submissions
    ours = submission.problem
    # A result that is allocated lies aligned; the stand-in's may not.
    assert (plan.problem.a, plan.problem.b, plan.problem.c) == (ours.a, ours.b, ours.c)
    assert (plan.problem.out.row, plan.problem.out.column) == (ours.out.row, ours.out.column)


def test_host_arrays_are_planned_as_they_are_staged(rng: Rng) -> None:
    a = rng.standard_normal((50, 300), dtype=F)[::-1]
    b = np.broadcast_to(rng.standard_normal((300, 1), dtype=F), (4, 300, 40))
    (plan,) = tilewave.plan_for(a, b, device="H200")
    (note,) = (note for note in plan.notes if "pinned" in note)
    # The column that repeats travels once; 4 x 50 x 40 results come back.
    assert f"{4 * (50 * 300 + 300):,} bytes" in note
    assert f"{4 * 4 * 50 * 40:,} bytes of result" in note


def test_many_batch_axes_are_said_to_be_looped_over(gpu: FakeGpu) -> None:
    a = CupyArray(np.zeros((3, 4, 3, 4, 9, 11), F)[:2, :3, :2, :3, :8, :10])
    b = CupyArray(np.zeros((3, 4, 3, 4, 11, 7), F)[:2, :3, :2, :3, :10, :6])
    (plan,) = tilewave.plan_for(a, b, device="H200")
    assert any("launched 2 times" in note for note in plan.notes)
    tilewave.matmul(a, b)
    assert len(gpu.run.submissions) == 2


def test_empty_results_have_no_plan() -> None:
    assert tilewave.plan_for(np.empty((0, 3), F), np.empty((3, 4), F), device="H200") == ()


def test_explain_takes_sizes_and_plans() -> None:
    plan = tilewave.plan(4096, 4096, 128, device="H200")
    text = tilewave.explain(plan)
    assert text == tilewave.explain(4096, 4096, 128, device="H200") == tilewave.explain((plan,))
    for words in ("H200", plan.instance.name, "Predicted", "Turned down"):
        assert words in text
    for wrong in ((), ("x",), (plan, 3)):
        with pytest.raises((UsageError, TypeError)):
            tilewave.explain(*wrong)


def test_prepare_takes_plans_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[GemmPlan] = []
    monkeypatch.setattr(
        "tilewave.runtime.execute.prepare_plan", lambda plan, **arguments: prepared.append(plan)
    )
    monkeypatch.setattr("tilewave.planning.device_spec", lambda device: get_spec("H200"))
    one = tilewave.plan(10, 20, 30, device="H200")
    a, b = np.zeros((5, 6), F), np.zeros((6, 7), F)
    many = tilewave.plan_for(a, b, device="H200")
    found = tilewave.prepare([one, (64, 64, 64), many], schedule="data_parallel")
    assert found == tuple(prepared)
    assert found[0] == one
    assert (found[1].problem.m, found[1].schedule.kind) == (64, "data_parallel")
    with pytest.raises(UsageError, match="cannot prepare"):
        tilewave.prepare([(1, 2)])
