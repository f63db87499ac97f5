"""Examples: each runs as a script, and what it computes is right for other sizes than its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tilewave.runtime.driver import probe

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "torch_drop_in": "torch",
    "torch_training": "torch",
    "torch_reference_check": "torch",
    "cupy_drop_in": "cupy",
}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
F = np.float32


def load(name: str) -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_checks_itself(name: str) -> None:
    library = NEEDS.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "cupy" and not probe().usable:
        pytest.skip("CuPy needs a GPU")
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert library is not None or not done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_its_text_says_how_to_run_it_and_main_checks_the_answer(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in text
    assert "\n    assert " in text or name == "read_a_plan"
    assert len(text.splitlines()) < 80


def test_covariances_and_the_eigenpair(rng: np.random.Generator) -> None:
    example = load("numpy_drop_in")
    samples = rng.standard_normal((2, 3, 61, 7), dtype=F)[0]
    expected = [np.cov(group.astype(float), rowvar=False, bias=True) for group in samples]
    np.testing.assert_allclose(example.covariances(samples), expected, atol=1e-5)
    matrix = np.diag(np.array([1, 2, 9, 3], F))
    value, vector = example.leading_eigenpair(matrix)
    assert value == pytest.approx(9, rel=1e-5)
    assert np.abs(vector).argmax() == 2


def test_nearest_neighbours_are_those_of_a_full_sort(rng: np.random.Generator) -> None:
    points, queries = rng.standard_normal((203, 5), dtype=F), rng.standard_normal((37, 5), dtype=F)
    found = load("nearest_neighbours").nearest(queries, points, 4, block=16)
    distances = ((queries[:, None].astype(float) - points[None]) ** 2).sum(axis=2)
    # By distance, not by index: two points may be equally near as far as float32 can tell.
    np.testing.assert_allclose(
        np.take_along_axis(distances, found, axis=1), np.sort(distances, axis=1)[:, :4], atol=1e-4
    )
    assert all(len(set(row)) == 4 for row in found.tolist())


def test_principal_components_are_the_singular_vectors(rng: np.random.Generator) -> None:
    data = (rng.standard_normal((999, 9)) * np.arange(1, 10) + 5).astype(F)
    variances, directions = load("principal_components").principal_components(data, 3)
    centred = data.astype(float) - data.mean(axis=0, dtype=float)
    _, singular, expected = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(variances, singular[:3] ** 2 / 998, rtol=1e-4)
    np.testing.assert_allclose(np.abs((directions * expected[:3]).sum(axis=1)), 1, atol=1e-4)


def test_rotations_keep_lengths_and_turn_by_the_angle(rng: np.random.Generator) -> None:
    example = load("tiny_products")
    points, angles = rng.standard_normal((4, 33, 3), dtype=F), rng.uniform(-3, 3, (33,))
    turned = example.rotated(example.rotations(angles), points)
    assert turned.shape == points.shape
    before, after = (p[..., 0] + 1j * p[..., 1] for p in (points, turned))
    np.testing.assert_allclose(after, before * np.exp(1j * angles), atol=1e-5)
    np.testing.assert_array_equal(turned[..., 2], points[..., 2])


def test_padding_gain_compares_with_the_next_multiple() -> None:
    gain = load("read_a_plan").padding_gain
    assert gain(2048, 64, "H200") == 1
    assert gain(2049, 4, "H200") != 1


@pytest.mark.usefixtures("gpu")
def test_layers_of_tensors(rng: np.random.Generator) -> None:
    """With a stand-in for PyTorch, whose tensors lie on a stand-in for a GPU."""
    tensor: Any = sys.modules["torch"].Tensor
    x, bias = rng.standard_normal((17, 30), dtype=F), rng.standard_normal(19, dtype=F)
    layers = [
        (rng.standard_normal((19, 30), dtype=F), bias),
        (rng.standard_normal((5, 19), dtype=F), bias[:5]),
    ]
    made = load("torch_drop_in").mlp(tensor(x), [(tensor(w), tensor(b)) for w, b in layers]).host
    hidden = x.astype(float) @ layers[0][0].T + bias
    erf = np.vectorize(__import__("math").erf)
    hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
    np.testing.assert_allclose(made, hidden @ layers[1][0].T + bias[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("gpu")
def test_columns_become_orthonormal(rng: np.random.Generator) -> None:
    """With a stand-in for CuPy; the nearest orthonormal matrix is U V^T."""
    array: Any = sys.modules["cupy"].ndarray
    x = rng.standard_normal((60, 9), dtype=F)
    x /= np.linalg.norm(x, 2)
    kept = x.copy()
    made = load("cupy_drop_in").orthonormalised(array(x)).host
    u, _, vt = np.linalg.svd(kept.astype(float), full_matrices=False)
    np.testing.assert_allclose(made, u @ vt, atol=1e-4)
    np.testing.assert_array_equal(x, kept)
