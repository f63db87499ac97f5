"""Finding cuBLAS, with frameworks that are missing, broken or faked."""

from __future__ import annotations

import sys
import types

import pytest

from tilewave.bench import baseline


def test_none_is_said_when_no_framework_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline.importlib.util, "find_spec", lambda name: None)
    found, note = baseline.find_baseline()
    assert found is None
    assert "neither torch nor cupy" in note
    assert "pip install" in note


def test_a_broken_framework_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> baseline.Baseline:
        raise OSError("libcudart.so.13: cannot open shared object file")

    class Works:
        name = "cuBLAS through cupy 14"

    monkeypatch.setattr(baseline.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(baseline, "_KNOWN", {"torch": broken, "cupy": Works})
    found, note = baseline.find_baseline()
    assert isinstance(found, Works)
    assert note == "cuBLAS through cupy 14"
    monkeypatch.setattr(baseline, "_KNOWN", {"torch": broken})
    found, note = baseline.find_baseline()
    assert found is None
    assert "libcudart.so.13" in note


@pytest.mark.parametrize("new_switch", [True, False])
def test_torch_is_told_to_leave_tf32_off(monkeypatch: pytest.MonkeyPatch, new_switch: bool) -> None:
    matmul = types.SimpleNamespace(allow_tf32=True)
    if new_switch:
        matmul.fp32_precision = "tf32"
    torch = types.ModuleType("torch")
    torch.__version__ = "2.11.0"  # type: ignore[attr-defined]
    torch.cuda = types.SimpleNamespace(is_available=lambda: True)  # type: ignore[attr-defined]
    torch.backends = types.SimpleNamespace(  # type: ignore[attr-defined]
        cuda=types.SimpleNamespace(matmul=matmul)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert baseline.TorchBaseline().name == "cuBLAS through torch 2.11.0"
    assert (matmul.fp32_precision == "ieee") if new_switch else (matmul.allow_tf32 is False)
