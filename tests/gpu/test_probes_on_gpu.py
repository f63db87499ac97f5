"""Probes on a real GPU: their products are right, they are timed, the profiler counts what is predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tilewave.device import DeviceSpec, get_spec
from tilewave.device.catalog import find_spec
from tilewave.errors import ToolchainError, UsageError
from tilewave.lab import ncu
from tilewave.lab.ladder import Gpu
from tilewave.lab.probe import compile_variant, prepare_variant, run_probes
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_profile import Launch, profile_launches
from tilewave.lab.probe_records import Probe, Variant
from tilewave.lab.register_file import MEASURED_ON
from tilewave.lab.registry import get_rung
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device, DeviceArray, Stream

pytestmark = pytest.mark.gpu


def test_the_register_file_keeps_its_rules(spec: DeviceSpec, tmp_path: Path) -> None:
    """Where the rules were read: all of them hold. Elsewhere the sequences run, and there is a reading.

    In a process of its own: one that a GPU stops in cannot use the GPU again.
    """
    path = tmp_path / "probe.json"
    command = [sys.executable, "-m", "tilewave", "probe", "register-file", "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    findings = json.loads(path.read_text())["register_file"]
    if not findings["sequences"]:
        pytest.skip(findings["words"][0])
    assert [(one["name"], one["faults"]) for one in findings["sequences"] if one["faults"]] == []
    assert all(one["measured"] is not None for one in findings["sequences"])
    assert result.returncode == 0, result.stdout
    if find_spec(spec.name) == get_spec(MEASURED_ON):  # the driver calls it by a longer name
        off = [one for one in findings["sequences"] if one["holds"] is False]
        assert off == []


CHANGED = [(p, v) for p in PROBES.values() for v in p.variants if v.rung.edits]
every_changed_kernel = pytest.mark.parametrize(
    ("probe", "variant"), CHANGED, ids=[f"{probe.name}-{variant.key}" for probe, variant in CHANGED]
)


class Product:
    """Operands on the GPU, all-positive in part, so that not everything cancels."""

    def __init__(self, device: Device, rng: np.random.Generator, m: int, n: int, k: int) -> None:
        self.a = rng.standard_normal((m, k), np.float32)
        self.b = rng.random((k, n), np.float32)
        self.left, self.right = (DeviceArray.from_numpy(device, matrix) for matrix in (self.a, self.b))
        self.out = DeviceArray.empty(device, (m, n))
        self.out.poison()


@every_changed_kernel
@pytest.mark.parametrize("shape", [(300, 516, 260), (257, 515, 131)], ids=["wide", "ragged"])
def test_what_a_changed_kernel_computes(
    probe: Probe,
    variant: Variant,
    shape: tuple[int, int, int],
    device: Device,
    spec: DeviceSpec,
    stream: Stream,
    arch: str,
    rng: np.random.Generator,
) -> None:
    """A product, or, where it is marked as none, something else than a product."""
    m, n, k = shape
    product = Product(device, rng, m, n, k)
    program = compile_variant(variant, arch)
    operands = product.left, product.right, product.out
    prepare_variant(variant, program, spec, device, stream, *operands)()
    error = error_in_bounds(product.out.to_numpy(), product.a, product.b)
    assert (error <= variant.rung.tolerance) is variant.rung.product


def test_the_first_slice_again_and_again(
    device: Device, spec: DeviceSpec, stream: Stream, arch: str, rng: np.random.Generator
) -> None:
    """The three kernels that copy too little work on the first slice's numbers, once for every slice."""
    depth, slices = get_rung(12).tile.bk, 9
    product = Product(device, rng, 200, 264, depth * slices)
    repeated = np.tile(product.a[:, :depth], slices), np.tile(product.b[:depth], (slices, 1))
    for name in ("no-loads", "stores-only", "same-slice"):
        variant = PROBES[name].variant(name)
        operands = product.left, product.right, product.out
        prepare_variant(variant, compile_variant(variant, arch), spec, device, stream, *operands)()
        assert error_in_bounds(product.out.to_numpy(), *repeated) <= variant.rung.tolerance, name


def test_probes_are_timed(device: Device, spec: DeviceSpec) -> None:
    probes = [PROBES["no-loads"], PROBES["resident-blocks"], PROBES["l2-reuse"]]
    found = run_probes(probes, spec, gpu=Gpu(device, None), sizes=[512], profile=False)
    for probe, findings in zip(probes, found, strict=True):
        (at,) = findings.sizes
        assert at.timed.keys() == {variant.key for variant in probe.variants}
        for variant in probe.variants:
            timed = at.timed[variant.key]
            assert timed.speed is not None
            assert 0 < timed.speed.tflops <= spec.peak_fp32_tflops * 1.1
            assert (timed.check is not None) is variant.rung.product
            assert timed.check is None or timed.check.holds
            assert (timed.ratio is None) is (probe.against(variant) is None)
        assert at.words
        assert "only a GPU can tell" not in " ".join(at.words)
        for judged in findings.judged:
            assert judged.holds(judged.emulated), judged


def test_the_profiler_counts_what_is_predicted(device: Device, spec: DeviceSpec) -> None:
    """The same predictions that the emulator meets, where this machine lets Nsight Compute read counters."""
    names = ("no-loads", "stores-only", "half-warps", "l2-reuse")
    probes = [PROBES[name] for name in names]
    try:
        ncu.find_ncu()
        profile_launches([Launch("l2-reuse", "rung-15", 256)], None)
    except ToolchainError as error:
        pytest.skip(str(error))
    found = run_probes(probes, spec, gpu=Gpu(device, None), sizes=[256], profile=True)
    judged = [one for findings in found for one in findings.judged]
    with_hardware = [one for one in judged if one.hardware is not None]
    assert len(with_hardware) >= 8
    for one in with_hardware:
        assert one.holds(one.hardware), one


def test_misaligned_operands_are_refused_and_the_gpu_lives_on(
    device: Device, spec: DeviceSpec, stream: Stream, arch: str, rng: np.random.Generator
) -> None:
    variant = PROBES["padding"].variant("padding")
    program = compile_variant(variant, arch)
    product = Product(device, rng, 64, 64, 64)
    room = DeviceArray.empty(device, (64 * 64 + 4,))
    shifted = room.view(1, (64, 64))
    with pytest.raises(UsageError, match=r"A starts at address .*, 4 bytes past a multiple of 16"):
        prepare_variant(variant, program, spec, device, stream, shifted, product.right, product.out)
    prepare_variant(variant, program, spec, device, stream, product.left, product.right, product.out)()
    assert error_in_bounds(product.out.to_numpy(), product.a, product.b) <= 1


def test_the_command_writes_times(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tilewave", "probe", "stores-only", "--size", "256", "--no-profile"]
    answer = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    data = json.loads(path.read_text())
    assert data["emulated"] is False
    assert data["environment"]["gpu"] == device.name
    (entry,) = data["probes"]
    (at,) = entry["sizes"]
    assert at["timed"]["stores-only"]["speed"]["tflops"] > 0
    assert "not a product" in answer.stdout
