"""tilewave: single-precision matrix multiply for NVIDIA GPUs.

The public names are loaded when they are first used, so that importing the package costs next to nothing.
Where NumPy is there already, as it is with any library of arrays, what a product needs is loaded at once: the
first product is then not the one to wait for it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewave import errors as errors
    from tilewave import torch as torch
    from tilewave.api import gemm as gemm
    from tilewave.api import grouped_gemm as grouped_gemm
    from tilewave.api import matmul as matmul
    from tilewave.checking import check as check
    from tilewave.group_planning import plan_grouped as plan_grouped
    from tilewave.packed import prepack as prepack
    from tilewave.planning import explain as explain
    from tilewave.planning import plan as plan
    from tilewave.planning import plan_for as plan_for
    from tilewave.planning import prepare as prepare
    from tilewave.recording import record as record

    __version__: str

_HOMES = {
    "check": "tilewave.checking",
    "explain": "tilewave.planning",
    "gemm": "tilewave.api",
    "grouped_gemm": "tilewave.api",
    "matmul": "tilewave.api",
    "plan": "tilewave.planning",
    "plan_for": "tilewave.planning",
    "plan_grouped": "tilewave.group_planning",
    "prepack": "tilewave.packed",
    "prepare": "tilewave.planning",
    "record": "tilewave.recording",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in ("errors", "torch"):
        return import_module(f"tilewave.{name}")  # which makes it an attribute
    if name == "__version__":
        from tilewave.bench.environment import tilewave_version

        value: Any = tilewave_version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'tilewave' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "errors", "torch", "__version__"})


if "numpy" in sys.modules:
    import_module("tilewave.api")
