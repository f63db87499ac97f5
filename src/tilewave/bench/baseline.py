"""cuBLAS, reached through whichever framework is installed, as the contender to compare with."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from tilewave.runtime.driver import DeviceArray, Stream


class Baseline(Protocol):
    """A library's FP32 matrix product on our device memory and our stream."""

    @property
    def name(self) -> str:
        """What it is, with its version: "cuBLAS through torch 2.11.0"."""
        ...

    def prepare(self, a: DeviceArray, b: DeviceArray, c: DeviceArray, stream: Stream) -> Callable[[], None]:
        """What submits ``c = a @ b`` to ``stream`` once, in plain FP32."""
        ...


class TorchBaseline:
    """``torch.matmul`` with TF32 switched off (for the whole process: PyTorch has no narrower switch)."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise RuntimeError("this build of torch has no CUDA")
        matmul = self._torch.backends.cuda.matmul
        if hasattr(matmul, "fp32_precision"):  # PyTorch 2.9 and later
            matmul.fp32_precision = "ieee"
        else:
            matmul.allow_tf32 = False
        self.name = f"cuBLAS through torch {self._torch.__version__}"

    def prepare(self, a: DeviceArray, b: DeviceArray, c: DeviceArray, stream: Stream) -> Callable[[], None]:
        """What submits ``c = a @ b`` to ``stream`` once, in plain FP32."""
        torch = self._torch
        device = f"cuda:{stream.device.ordinal}"
        left, right, out = (torch.as_tensor(array, device=device) for array in (a, b, c))
        if out.data_ptr() != c.address:
            raise RuntimeError("torch copied the output instead of sharing it")
        external = torch.cuda.ExternalStream(stream.handle, device=device)

        def work() -> None:
            with torch.cuda.stream(external):
                torch.matmul(left, right, out=out)

        return work


class CupyBaseline:
    """``cupy.matmul``; CuPy uses TF32 only when the variable CUPY_TF32 asks for it."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._cupy.cuda.runtime.getDeviceCount()
        self.name = f"cuBLAS through cupy {self._cupy.__version__}"

    def prepare(self, a: DeviceArray, b: DeviceArray, c: DeviceArray, stream: Stream) -> Callable[[], None]:
        """What submits ``c = a @ b`` to ``stream`` once, in plain FP32."""
        cupy = self._cupy
        left, right, out = (cupy.asarray(array) for array in (a, b, c))
        if out.data.ptr != c.address:
            raise RuntimeError("cupy copied the output instead of sharing it")
        external = cupy.cuda.ExternalStream(stream.handle, stream.device.ordinal)

        def work() -> None:
            with external:
                cupy.matmul(left, right, out=out)

        return work


_KNOWN: dict[str, Callable[[], Baseline]] = {"torch": TorchBaseline, "cupy": CupyBaseline}


def find_baseline() -> tuple[Baseline | None, str]:
    """The first framework that reaches cuBLAS on this GPU, and a sentence on what was found.

    torch is preferred to cupy. Without either the baseline is None and the sentence says what to install.
    """
    failures = []
    for name, make in _KNOWN.items():
        if importlib.util.find_spec(name) is None:
            continue
        try:
            baseline = make()
        except Exception as error:  # a broken framework is one more reason to look at the next
            failures.append(f"{name} is installed but unusable ({error})")
            continue
        return baseline, baseline.name
    found = "; ".join(failures) or "neither torch nor cupy is installed"
    return None, f"no cuBLAS to compare with: {found}; pip install torch, or cupy-cuda13x"
