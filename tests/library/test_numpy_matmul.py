"""NumPy's own tests of matmul, adapted to call tilewave's.

Source: numpy/_core/tests/test_multiarray.py of NumPy 2.4 (classes MatmulCommon, TestMatmul and
TestMatmulInplace), Copyright (c) 2005-2025, NumPy Developers, under the BSD 3-clause license
(https://github.com/numpy/numpy/blob/main/LICENSE.txt).

What was changed, and why: `types` is float32 alone, and every other type that NumPy's tests use must be
refused with a TypeError; `out` is a keyword; a @= b is matmul(a, b, out=a). Left out: objects, booleans and
fractions (refused here), `axes=` and the operator's override protocol (not offered).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal, assert_equal

import tilewave

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)


class TestMatmul:
    matmul = staticmethod(tilewave.matmul)
    types = "f"
    refused = "?bhilqBHILQedgFDGO"

    def test_exceptions(self) -> None:
        dims: list[tuple[Any, Any]] = [
            ((1,), (2,)),  # mismatched vector vector
            ((2, 1), (2,)),  # mismatched matrix vector
            ((2,), (1, 2)),  # mismatched vector matrix
            ((1, 2), (3, 1)),  # mismatched matrix matrix
            ((1,), ()),  # vector scalar
            ((), (1)),  # scalar vector
            ((1, 1), ()),  # matrix scalar
            ((), (1, 1)),  # scalar matrix
            ((2, 2, 1), (3, 1, 2)),  # cannot broadcast
        ]
        for dt, (dm1, dm2) in itertools.product(self.types, dims):
            a = np.ones(dm1, dtype=dt)
            b = np.ones(dm2, dtype=dt)
            with pytest.raises(ValueError, match=r"^(a|b) "):
                self.matmul(a, b)

    def test_shapes(self) -> None:
        dims = [
            ((1, 1), (2, 1, 1)),  # broadcast first argument
            ((2, 1, 1), (1, 1)),  # broadcast second argument
            ((2, 1, 1), (2, 1, 1)),  # matrix stack sizes match
        ]
        for dt, (dm1, dm2) in itertools.product(self.types, dims):
            a = np.ones(dm1, dtype=dt)
            b = np.ones(dm2, dtype=dt)
            res = self.matmul(a, b)
            assert res.shape == (2, 1, 1)

        # vector vector returns scalars.
        for dt in self.types:
            a = np.ones((2,), dtype=dt)
            b = np.ones((2,), dtype=dt)
            c = self.matmul(a, b)
            assert np.array(c).shape == ()

    def test_result_types(self) -> None:
        mat = np.ones((1, 1))
        vec = np.ones((1,))
        for dt in self.types:
            m = mat.astype(dt)
            v = vec.astype(dt)
            for arg in [(m, v), (v, m), (m, m)]:
                res = self.matmul(*arg)
                assert res.dtype == dt

            # vector vector returns scalars
            res = self.matmul(v, v)
            assert type(res) is np.dtype(dt).type

    @pytest.mark.parametrize("dt", list(refused))
    def test_other_types_are_refused(self, dt: str) -> None:
        m, v = np.ones((1, 1), dt), np.ones((1,), dt)
        for left, right in [(m, v), (v, m), (m, m), (v, v)]:
            for one, other in [
                (left, right),
                (np.ones(left.shape, "f"), right),
                (left, np.ones(right.shape, "f")),
            ]:
                with pytest.raises(TypeError):
                    self.matmul(one, other)

    def test_scalar_output(self) -> None:
        vec1 = np.array([2])
        vec2 = np.array([3, 4]).reshape(1, -1)
        tgt = np.array([6, 8])
        for dt in self.types:
            v1 = vec1.astype(dt)
            v2 = vec2.astype(dt)
            res = self.matmul(v1, v2)
            assert_equal(res, tgt)
            res = self.matmul(v2.T, v1)
            assert_equal(res, tgt)

    def test_vector_vector_values(self) -> None:
        vec1 = np.array([1, 2])
        vec2 = np.array([3, 4]).reshape(-1, 1)
        tgt1 = np.array([11])
        tgt2 = np.array([[3, 6], [4, 8]])
        for dt in self.types:
            v1 = vec1.astype(dt)
            v2 = vec2.astype(dt)
            res = self.matmul(v1, v2)
            assert_equal(res, tgt1)
            # no broadcast, we must make v1 into a 2d ndarray
            res = self.matmul(v2, v1.reshape(1, -1))
            assert_equal(res, tgt2)

    def test_vector_matrix_values(self) -> None:
        vec = np.array([1, 2])
        mat1 = np.array([[1, 2], [3, 4]])
        mat2 = np.stack([mat1] * 2, axis=0)
        tgt1 = np.array([7, 10])
        tgt2 = np.stack([tgt1] * 2, axis=0)
        for dt in self.types:
            v = vec.astype(dt)
            m1 = mat1.astype(dt)
            m2 = mat2.astype(dt)
            res = self.matmul(v, m1)
            assert_equal(res, tgt1)
            res = self.matmul(v, m2)
            assert_equal(res, tgt2)

    def test_matrix_vector_values(self) -> None:
        vec = np.array([1, 2])
        mat1 = np.array([[1, 2], [3, 4]])
        mat2 = np.stack([mat1] * 2, axis=0)
        tgt1 = np.array([5, 11])
        tgt2 = np.stack([tgt1] * 2, axis=0)
        for dt in self.types:
            v = vec.astype(dt)
            m1 = mat1.astype(dt)
            m2 = mat2.astype(dt)
            res = self.matmul(m1, v)
            assert_equal(res, tgt1)
            res = self.matmul(m2, v)
            assert_equal(res, tgt2)

    def test_matrix_matrix_values(self) -> None:
        mat1 = np.array([[1, 2], [3, 4]])
        mat2 = np.array([[1, 0], [1, 1]])
        mat12 = np.stack([mat1, mat2], axis=0)
        mat21 = np.stack([mat2, mat1], axis=0)
        tgt11 = np.array([[7, 10], [15, 22]])
        tgt12 = np.array([[3, 2], [7, 4]])
        tgt21 = np.array([[1, 2], [4, 6]])
        tgt12_21 = np.stack([tgt12, tgt21], axis=0)
        tgt11_12 = np.stack((tgt11, tgt12), axis=0)
        tgt11_21 = np.stack((tgt11, tgt21), axis=0)
        for dt in self.types:
            m1 = mat1.astype(dt)
            m2 = mat2.astype(dt)
            m12 = mat12.astype(dt)
            m21 = mat21.astype(dt)

            # matrix @ matrix
            res = self.matmul(m1, m2)
            assert_equal(res, tgt12)
            res = self.matmul(m2, m1)
            assert_equal(res, tgt21)

            # stacked @ matrix
            res = self.matmul(m12, m1)
            assert_equal(res, tgt11_21)

            # matrix @ stacked
            res = self.matmul(m1, m12)
            assert_equal(res, tgt11_12)

            # stacked @ stacked
            res = self.matmul(m12, m21)
            assert_equal(res, tgt12_21)

    def test_out_arg(self) -> None:
        a = np.ones((5, 2), dtype="f")
        b = np.array([[1, 3], [5, 7]], dtype="f")
        tgt = np.dot(a, b)

        # test as keyword argument
        out = np.zeros((5, 2), dtype="f")
        c = self.matmul(a, b, out=out)
        assert c is out
        assert_array_equal(out, tgt)

        # test out with other types: nothing is cast, not even upwards
        for dt in (np.int32, np.float64, np.complex128):
            out = np.zeros((5, 2), dtype=dt)
            with pytest.raises(TypeError, match="out is"):
                self.matmul(a, b, out=out)
            assert not out.any()

    def test_empty_out(self) -> None:
        # Check that the output cannot be broadcast, so that it cannot be
        # size zero when the outer dimensions (iterator size) has size zero.
        arr = np.ones((0, 1, 1), "f")
        out = np.ones((1, 1, 1), "f")
        assert self.matmul(arr, arr).shape == (0, 1, 1)

        with pytest.raises(ValueError, match=r"non-broadcastable"):
            self.matmul(arr, arr, out=out)

    def test_out_contiguous(self) -> None:
        a = np.ones((5, 2), dtype="f")
        b = np.array([[1, 3], [5, 7]], dtype="f")
        v = np.array([1, 3], dtype="f")
        tgt = np.dot(a, b)
        tgt_mv = np.dot(a, v)

        # test out non-contiguous
        out = np.ones((5, 2, 2), dtype="f")
        c = self.matmul(a, b, out=out[..., 0])
        assert c.base is out
        assert_array_equal(c, tgt)
        c = self.matmul(a, v, out=out[:, 0, 0])
        assert_array_equal(c, tgt_mv)
        c = self.matmul(v, a.T, out=out[:, 0, 0])
        assert_array_equal(c, tgt_mv)

        # test out contiguous in only last dim
        out = np.ones((10, 2), dtype="f")
        c = self.matmul(a, b, out=out[::2, :])
        assert_array_equal(c, tgt)

        # test transposes of out, args
        out = np.ones((5, 2), dtype="f")
        c = self.matmul(b.T, a.T, out=out.T)
        assert_array_equal(out, tgt)

    m1 = np.arange(15.0, dtype="f").reshape(5, 3)
    m2 = np.arange(21.0, dtype="f").reshape(3, 7)
    m3 = np.arange(30.0, dtype="f").reshape(5, 6)[:, ::2]  # non-contiguous
    vc = np.arange(10.0, dtype="f")
    vr = np.arange(6.0, dtype="f")
    m0 = np.zeros((3, 0), "f")

    @pytest.mark.parametrize(
        "args",
        [
            # matrix-matrix
            (m1, m2),
            (m2.T, m1.T),
            (m2.T.copy(), m1.T),
            (m2.T, m1.T.copy()),
            # matrix-matrix-transpose, contiguous and non
            (m1, m1.T),
            (m1.T, m1),
            (m1, m3.T),
            (m3, m1.T),
            (m3, m3.T),
            (m3.T, m3),
            # matrix-matrix non-contiguous
            (m3, m2),
            (m2.T, m3.T),
            (m2.T.copy(), m3.T),
            # vector-matrix, matrix-vector, contiguous
            (m1, vr[:3]),
            (vc[:5], m1),
            (m1.T, vc[:5]),
            (vr[:3], m1.T),
            # vector-matrix, matrix-vector, vector non-contiguous
            (m1, vr[::2]),
            (vc[::2], m1),
            (m1.T, vc[::2]),
            (vr[::2], m1.T),
            # vector-matrix, matrix-vector, matrix non-contiguous
            (m3, vr[:3]),
            (vc[:5], m3),
            (m3.T, vc[:5]),
            (vr[:3], m3.T),
            # vector-matrix, matrix-vector, both non-contiguous
            (m3, vr[::2]),
            (vc[::2], m3),
            (m3.T, vc[::2]),
            (vr[::2], m3.T),
            # size == 0
            (m0, m0.T),
            (m0.T, m0),
            (m1, m0),
            (m0.T, m1.T),
        ],
    )
    def test_dot_equivalent(self, args: tuple[Array, Array]) -> None:
        r1 = self.matmul(*args)
        r2 = np.dot(*args)
        assert_equal(r1, r2)

        r3 = self.matmul(args[0].copy(), args[1].copy())
        assert_equal(r1, r3)

    # NumPy's issue 29164 with extra checks
    def test_dot_equivalent_matrix_matrix(self) -> None:
        modes = list(itertools.product(["C", "F"], [True, False]))

        def apply_mode(m: Array, mode: tuple[Any, bool]) -> Array:
            order, is_contiguous = mode
            if is_contiguous:
                return m.copy() if order == "C" else m.T.copy().T

            retval = np.zeros((m.shape[0] * 2, m.shape[1] * 2), dtype=m.dtype, order=order)[::2, ::2]
            retval[...] = m
            return retval

        dot_res = np.dot(self.m1, self.m2)
        mo = np.zeros_like(dot_res)

        for mode in itertools.product(*[modes] * 3):
            m1_, m2_, mo_ = (apply_mode(*x) for x in zip([self.m1, self.m2, mo], mode, strict=True))
            assert_equal(self.matmul(m1_, m2_, out=mo_), dot_res)

    def test_matmul_empty(self) -> None:
        a = np.empty((3, 0), dtype="f")
        b = np.empty((0, 3), dtype="f")
        c = np.zeros((3, 3))
        assert_array_equal(self.matmul(a, b), c)

    def test_matmul_raises(self) -> None:
        for left, right in [
            (np.int8(5), np.int8(5)),
            (np.void(b"abc"), np.void(b"abc")),
            (np.arange(10), np.void(b"abc")),
        ]:
            with pytest.raises(TypeError):
                self.matmul(left, right)


class TestMatmulInplace:
    SHAPES = {  # noqa: RUF012  # as in NumPy
        "2d_large": ((10**5, 10), (10, 10)),
        "3d_large": ((10**4, 10, 10), (1, 10, 10)),
        "1d": ((3,), (3,)),
        "2d_1d": ((3, 3), (3,)),
        "1d_2d": ((3,), (3, 3)),
        "2d_broadcast": ((3, 3), (3, 1)),
        "2d_broadcast_reverse": ((1, 3), (3, 3)),
        "3d_broadcast1": ((3, 3, 3), (1, 3, 1)),
        "3d_broadcast2": ((3, 3, 3), (1, 3, 3)),
        "3d_broadcast3": ((3, 3, 3), (3, 3, 1)),
        "3d_broadcast_reverse1": ((1, 3, 3), (3, 3, 3)),
        "3d_broadcast_reverse2": ((3, 1, 3), (3, 3, 3)),
        "3d_broadcast_reverse3": ((1, 1, 3), (3, 3, 3)),
    }

    @pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES.values(), ids=SHAPES)
    def test_shapes(self, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
        a = np.arange(np.prod(a_shape)).reshape(a_shape).astype("f")
        b = np.arange(np.prod(b_shape)).reshape(b_shape).astype("f")

        ref = a @ b
        if ref.shape != a_shape:
            with pytest.raises(ValueError, match="out of shape"):
                tilewave.matmul(a, b, out=a)
            return
        tilewave.matmul(a, b, out=a)
        assert a.shape == a_shape
        np.testing.assert_allclose(a, ref)
