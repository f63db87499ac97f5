"""The register-file pass: gives the steady loop of a compiled kernel an order that the register file likes.

`reemit` takes a program that NVRTC made and returns its cubin with that loop emitted anew, or the reason why
it stays as the compiler left it. Results are the same, bit for bit: every new loop is proved by a verifier
that knows nothing of the emitter. `compiler.register_pass` is how the library uses it;
docs/register-file.md tells how and why.
"""

from tilewave.compiler.sass.emit import Spacing
from tilewave.compiler.sass.reemit import Reemitted, Report, reemit

__all__ = ["Reemitted", "Report", "Spacing", "reemit"]
