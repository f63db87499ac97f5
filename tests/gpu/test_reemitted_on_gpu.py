"""The register-file pass on a GPU that it is for: every large tile gives the bits of the compiler's loop."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.products_on_gpu import PlacedOnGpu
from tests.gpu.test_instances_on_gpu import SMS, draw
from tests.kernels.products import plan_of

from tilewave.compiler.sass import OFF_SWITCH, image_to_load, reemit
from tilewave.compiler.sass.reemit import KNOWN_ARCHITECTURES
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, split_k
from tilewave.runtime.driver import Device, Stream
from tilewave.runtime.kernels import gpu_state

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("instance", large_tile.instances(), ids=str)
def test_same_bits(
    instance: Instance,
    device: Device,
    stream: Stream,
    arch: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if arch not in KNOWN_ARCHITECTURES:
        pytest.skip(f"the register file of {arch} was not measured")
    program, kernel = compile_instance(instance, arch)
    outcome = reemit(program, kernel.symbol)
    if outcome.cubin is None:
        pytest.skip(str(outcome.reason))
    kernels = gpu_state(device.ordinal)._kernels
    for schedule in (DATA_PARALLEL, split_k(2), STREAM_K_WALK):
        product = draw(rng, instance, cut=True)
        if rng.integers(2):
            values = product.operands["a"]
            values[tuple(int(rng.integers(n)) for n in values.shape)] = rng.choice([np.nan, np.inf, -np.inf])
        plan = plan_of(instance, product.problem, schedule, SMS)
        placed = PlacedOnGpu(product, device)
        seen = []
        for switch in ("0", "1"):
            monkeypatch.setenv(OFF_SWITCH, switch)
            loaded = image_to_load(program, kernel.symbol)
            assert (loaded == program.cubin) == (switch == "0")
            kernels.pop(instance.name, None)  # so that it is loaded again
            placed.launch(plan, stream.handle)
            stream.synchronize()
            seen.append({name: np.ascontiguousarray(out).tobytes() for name, out in placed.fetch().items()})
        assert seen[0] == seen[1]
    kernels.pop(instance.name, None)
