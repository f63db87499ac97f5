"""Modes other than ieee at the front door: asked for by name only, through their models on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_gpu import CupyArray, FakeGpu

import tilewave
from tilewave.errors import NotBuiltError, UsageError
from tilewave.precision import dispatch, fp16x3, ieee_bound, tf32
from tilewave.problem import Precision

Rng = np.random.Generator
F = np.float32


def normal(rng: Rng, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape, F)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewave.host.gpu_for_host_operands", lambda: None)
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)
    monkeypatch.setattr("tilewave.precision.dispatch.gpu_for_host_operands", lambda: None)


def test_no_mode_engages_unless_asked_for(
    no_gpu: None, rng: Rng, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:
    def engaged(*_: object) -> None:
        raise AssertionError("a mode engaged")

    monkeypatch.setattr(dispatch, "run_in_mode", engaged)
    monkeypatch.setattr(dispatch, "product_of_model", engaged)
    for name in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION"):
        monkeypatch.setenv(name, "1")
    a, b = normal(rng, 9, 300), normal(rng, 300, 8)
    for asked in ({}, {"precision": "ieee"}, {"precision": Precision.IEEE}):
        assert np.array_equal(tilewave.matmul(a, b, **asked), a @ b)
        assert np.array_equal(tilewave.gemm(a, b, **asked), a @ b)
        (grouped,) = tilewave.grouped_gemm([(a, b)], **asked)
        assert np.array_equal(grouped, a @ b)
        before = len(gpu.run.submissions)
        tilewave.matmul(CupyArray(a), CupyArray(b), **asked)
        assert len(gpu.run.submissions) == before + 1
        assert gpu.run.submissions[-1].problem.precision is Precision.IEEE
    with pytest.raises(AssertionError, match="a mode engaged"):
        tilewave.matmul(a, b, precision="fp16x3")


@pytest.mark.parametrize("mode", ["fp16x3", "tf32"])
def test_host_arrays_run_through_the_model(no_gpu: None, rng: Rng, mode: str) -> None:
    a, b = normal(rng, 2, 7, 130), normal(rng, 130, 5)
    model = fp16x3.multiply(a, b).values if mode == "fp16x3" else tf32.multiply(a, b)
    assert not np.array_equal(model, a @ b)
    out = np.full((2, 7, 10), np.nan, F)
    for given in (mode, Precision(mode)):
        assert np.array_equal(tilewave.matmul(a, b, precision=given), model)
    assert tilewave.matmul(a, b, precision=mode, out=out[..., ::2]) is not None
    assert np.array_equal(out[..., ::2], model)
    assert np.isnan(out[..., 1::2]).all()
    turned = tilewave.gemm(a.swapaxes(1, 2), b.T, transpose_a=True, transpose_b=True, precision=mode)
    assert np.array_equal(turned, model)
    vector = tilewave.matmul(a[0, 0], b, precision=mode)
    assert np.array_equal(vector, model[0, 0])


def test_the_epilogue_follows_the_product(no_gpu: None, rng: Rng) -> None:
    a, b, c, bias = normal(rng, 7, 90), normal(rng, 90, 5), normal(rng, 7, 5), normal(rng, 5)
    model = fp16x3.multiply(a, b).values
    result, before = tilewave.gemm(
        a,
        b,
        c,
        alpha=0.5,
        beta=-2.0,
        bias=bias,
        activation="relu",
        return_preactivation=True,
        precision="fp16x3",
    )
    expected = F(0.5) * model + F(-2) * c + bias
    assert np.array_equal(before, expected)
    assert np.array_equal(result, np.maximum(expected, 0))


def test_nothing_is_read_where_there_is_no_product(rng: Rng) -> None:
    a = np.full((3, 4), np.nan, F)
    for mode in ("fp16x3", "tf32"):
        c = normal(rng, 3, 5)
        assert np.array_equal(
            tilewave.gemm(a, np.full((4, 5), np.nan, F), c, alpha=0, beta=1, precision=mode), c
        )
        assert not tilewave.matmul(a[:, :0], np.ones((0, 5), F), precision=mode).any()
        assert tilewave.matmul(a[:0], np.ones((4, 5), F), precision=mode).shape == (0, 5)


def test_small_integers_are_exact(no_gpu: None, rng: Rng) -> None:
    for n in (16, 24, 40, 56, 72):
        a = rng.integers(-8, 9, (64, 128)).astype(F)
        b = rng.integers(-8, 9, (128, n)).astype(F)
        for mode in ("fp16x3", "tf32"):
            assert np.array_equal(
                tilewave.matmul(a, b, precision=mode), a.astype(np.int64) @ b.astype(np.int64)
            )


def test_nan_and_infinities_are_those_of_ieee(no_gpu: None, rng: Rng) -> None:
    a, b = normal(rng, 5, 40), normal(rng, 40, 6)
    a[2, 7], b[3, 1], b[9, 4] = np.inf, np.nan, -np.inf
    a[0], b[7, 5] = 0, 0
    with np.errstate(invalid="ignore"):
        plain = a @ b
    for mode in ("fp16x3", "tf32"):
        found = tilewave.matmul(a, b, precision=mode)
        wrong = ~np.isfinite(plain)
        assert np.array_equal(found[wrong], plain[wrong], equal_nan=True)
        assert np.isfinite(found[~wrong]).all()


def test_operands_out_of_range_are_never_silently_bad(no_gpu: None, rng: Rng) -> None:
    exponents = rng.integers(0, 60, 50)
    a = np.ldexp(normal(rng, 8, 50), exponents)
    b = np.ldexp(normal(rng, 50, 8), -exponents[:, np.newaxis])
    error = np.abs(tilewave.matmul(a, b, precision="fp16x3") - a.astype(float) @ b)
    assert (error <= ieee_bound(a, b)).all()


def test_on_a_gpu_the_mode_goes_to_its_hook_and_nowhere_else(
    gpu: FakeGpu, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def hook(call: Any, options: Any, workspace: Any) -> str:
        asked.append(call.precision)
        return "the mode's"

    monkeypatch.setattr(dispatch, "run_on_gpu", hook)
    a, b = CupyArray(normal(rng, 4, 70)), CupyArray(normal(rng, 70, 4))
    before = len(gpu.run.submissions)
    for _ in range(2):  # the second call may go a shorter way
        assert tilewave.matmul(a, b, precision="fp16x3") == "the mode's"
        assert tilewave.gemm(a, b, precision="tf32") == "the mode's"
    assert asked == [Precision.FP16X3, Precision.TF32] * 2
    assert len(gpu.run.submissions) == before


def test_a_mode_without_kernels_raises_on_a_gpu(gpu: FakeGpu, rng: Rng) -> None:
    a, b = CupyArray(normal(rng, 4, 70)), CupyArray(normal(rng, 70, 4))
    out = CupyArray(np.full((4, 4), np.nan, F))
    with pytest.raises(
        NotBuiltError, match="precision 'tf32' has no kernels yet; accepted on a GPU is 'ieee'"
    ):
        tilewave.matmul(a, b, precision="tf32", out=out)
    assert np.isnan(out.host).all()


def test_plans_of_modes_say_that_they_are_not_built() -> None:
    with pytest.raises(NotBuiltError, match="plans of precision 'tf32' are not built yet"):
        tilewave.plan(64, 64, 64, device="H200", precision="tf32")
    with pytest.raises(NotBuiltError, match="plans of precision 'tf32' are not built yet"):
        tilewave.plan_for(np.ones((2, 2), F), np.ones((2, 2), F), device="H200", precision="tf32")


def test_workspace_of_host_operands_is_refused(no_gpu: None) -> None:
    with pytest.raises(UsageError, match="the operands are on the host"):
        tilewave.gemm(np.ones((2, 2), F), np.ones((2, 2), F), precision="fp16x3", workspace=np.ones(4, F))
