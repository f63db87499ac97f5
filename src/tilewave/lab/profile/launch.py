"""What the profiler watches: ``python -m tilewave.lab.profile.launch SIZE RUNG...``.

Each rung is launched once on fresh N(0,1) data, in the order of the arguments, then the library once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Launch the rungs of these numbers, then the library, on the first GPU."""
    import numpy as np

    from tilewave.compiler import choose_arch
    from tilewave.lab import emulate
    from tilewave.lab.command import open_gpu
    from tilewave.lab.measure import Candidate, prepare
    from tilewave.lab.registry import get_rung
    from tilewave.runtime.driver import DeviceArray, Stream

    size = int(arguments[0])
    gpu, spec, _ = open_gpu()
    stream, arch = Stream(gpu.device), choose_arch(spec.compute_capability).arch
    rng = np.random.default_rng()
    a, b = (
        DeviceArray.from_numpy(gpu.device, rng.standard_normal((size, size), dtype=np.float32))
        for _ in range(2)
    )
    out = DeviceArray.empty(gpu.device, (size, size))
    for rung in map(get_rung, arguments[1:]):
        program, kernel, _ = emulate.build(rung, spec, arch, size)
        prepare(Candidate(rung, program, kernel, spec), gpu.device, stream, a, b, out)()
        stream.synchronize()
    if gpu.baseline is not None:
        gpu.baseline.prepare(a, b, out, stream)()
        stream.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
