"""tilewave for PyTorch: operators that differentiate, compile and batch, and existing code made to use them.

`tilewave.matmul` and `tilewave.gemm` take tensors as they are: with gradients, under ``torch.compile``,
``torch.vmap`` and ``torch.func``. Here are beside them:

* `override`: ``with tilewave.torch.override():`` sends the float32 products of existing code through tilewave
* `Linear` and `functional.linear`: in place of those of ``torch.nn``

It is loaded when it is first used, and needs PyTorch 2.11 or newer.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("tilewave.torch needs PyTorch, which is not installed: pip install torch") from error

from tilewave.torch import batching, functional, gradients, operators
from tilewave.torch.modules import Linear
from tilewave.torch.overriding import override

operators.define()
gradients.define(operators.LIBRARY)
batching.define(operators.LIBRARY)

__all__ = ["Linear", "functional", "override"]
