"""The tests of this folder need PyTorch; without it, this one says that they are not run."""

from __future__ import annotations

import pytest


def test_torch_is_installed_and_new_enough() -> None:
    torch = pytest.importorskip(
        "torch",
        reason="tests of tilewave.torch need PyTorch: pip install --no-deps -r requirements-torch.lock "
        "--extra-index-url https://download.pytorch.org/whl/cpu",
    )
    assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
