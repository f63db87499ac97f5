"""New loops on a GPU that they are for: they are the default, and give the bits of the compiler's loop."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu.products_on_gpu import PlacedOnGpu
from tests.gpu.test_instances_on_gpu import SMS, draw
from tests.kernels.products import plan_of

import tilewave
from tilewave.compiler import Kernel, Program, cache_directory
from tilewave.compiler.register_pass import KNOWN_ARCHITECTURES, OFF_SWITCH, pass_outcome
from tilewave.compiler.sass.flow import steady_loop
from tilewave.compiler.sass.patch import with_words
from tilewave.device import DeviceSpec
from tilewave.emulator.sass import Cubin, decode_function
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, split_k
from tilewave.runtime import driver, loop_choice
from tilewave.runtime.driver import Device, Stream
from tilewave.runtime.kernels import GpuState, gpu_state
from tilewave.runtime.loop_choice import check_on_gpu

pytestmark = pytest.mark.gpu

INSTANCES = large_tile.instances()
DEFAULT = [instance for instance in INSTANCES if instance_refusal(instance) is None]


@pytest.fixture
def state(device: Device, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GpuState]:
    """The GPU's state, with large tiles yet to be loaded and nothing known of them."""
    if arch not in KNOWN_ARCHITECTURES:
        pytest.skip(f"the register file of {arch} was not measured")
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    for program in cache_directory().glob(
        "*.program"
    ):  # compiled, but neither put through the pass nor checked
        try:
            os.link(program, tmp_path / program.name)
        except OSError:
            shutil.copyfile(program, tmp_path / program.name)
    monkeypatch.setenv("TILEWAVE_CACHE_DIR", str(tmp_path))
    found = gpu_state(device.ordinal)
    unload(found)
    yield found
    unload(found)


def unload(state: GpuState) -> None:
    """Forget large tiles, so that they are loaded again."""
    for instance in INSTANCES:
        state._kernels.pop(instance.name, None)
        state._loops.pop(instance.name, None)


def made(instance: Instance, arch: str) -> tuple[Program, Kernel, bytes]:
    program, kernel = compile_instance(instance, arch)
    outcome = pass_outcome(program, kernel.symbol)
    if outcome.cubin is None:
        pytest.skip(str(outcome.reason))
    return program, kernel, outcome.cubin


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_the_check_passes(
    instance: Instance, state: GpuState, arch: str, spec: DeviceSpec, rng: np.random.Generator
) -> None:
    """Every large tile, narrow ones too, at three draws of the check's products."""
    program, kernel, new = made(instance, arch)
    for seed in rng.integers(2**32, size=3):
        verdict = check_on_gpu(instance, program.cubin, new, kernel, spec, state.handle, int(seed))
        assert verdict.same, verdict.words


@pytest.mark.parametrize("instance", DEFAULT, ids=str)
def test_the_new_loop_is_the_default(
    instance: Instance,
    state: GpuState,
    device: Device,
    stream: Stream,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the library's own launcher, epilogues and layouts included: the bits of the switch at 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.kernel(instance, 0)
    loop = state.loop_of(instance.name)
    assert loop is not None
    assert loop.new, loop.why
    for schedule in (DATA_PARALLEL, split_k(2), STREAM_K_WALK):
        product = draw(rng, instance, cut=True)
        plan = plan_of(instance, product.problem, schedule, SMS)
        seen = []
        for switch in ("0", "1"):
            placed = PlacedOnGpu(product, device)  # anew, so that what one of them left unwritten shows
            monkeypatch.setenv(OFF_SWITCH, switch)
            unload(state)
            placed.launch(plan, stream.handle)
            stream.synchronize()
            used = state.loop_of(instance.name)
            assert used is not None
            assert used.new == (switch == "1"), used.why
            seen.append({name: np.ascontiguousarray(out).tobytes() for name, out in placed.fetch().items()})
        assert seen[0] == seen[1]


def test_a_verdict_is_remembered(state: GpuState, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = DEFAULT[0]
    state.kernel(instance, 0)
    unload(state)

    def again(*arguments: Any) -> None:
        raise AssertionError("it was checked again")

    monkeypatch.setattr(loop_choice, "check_on_gpu", again)
    state.kernel(instance, 0)
    loop = state.loop_of(instance.name)
    assert loop is not None
    assert loop.new, loop.why


def test_a_spoiled_loop_is_found(
    state: GpuState, arch: str, spec: DeviceSpec, rng: np.random.Generator
) -> None:
    """One multiply-add of the loop is skipped: the check on this GPU sees it."""
    instance = DEFAULT[int(rng.integers(len(DEFAULT)))]
    program, kernel, new = made(instance, arch)
    code = decode_function(Cubin(new).function(kernel.symbol), 90)
    found = steady_loop(code, instance.tm * instance.tn * instance.bk)
    assert not isinstance(found, str)
    multiply_adds = [i for i in range(found[0], found[1]) if code[i].opcode == "FFMA"]
    at = int(rng.choice(multiply_adds))
    word = code[at].word & ~(0xF << 12) | 0xF << 12  # @!PT: it never happens
    spoiled = with_words(Cubin(new), kernel.symbol, at, [word], 0).image
    verdict = check_on_gpu(instance, program.cubin, spoiled, kernel, spec, state.handle, 1)
    assert not verdict.same
    assert "differ from the compiler's" in verdict.words


def test_a_capture_elsewhere_goes_on(
    state: GpuState, arch: str, spec: DeviceSpec, device: Device, stream: Stream
) -> None:
    """A thread captures in the strictest mode while another one checks."""
    instance = DEFAULT[0]
    program, kernel, new = made(instance, arch)
    verdicts = []

    def check() -> None:
        with state.primary_context():
            verdicts.append(check_on_gpu(instance, program.cubin, new, kernel, spec, state.handle, 1))

    device.activate()
    mode = driver._bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver._call("cuStreamBeginCapture", stream.handle, mode)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    graph = driver._call("cuStreamEndCapture", stream.handle)  # fails where the capture was broken
    driver._call("cuGraphDestroy", graph)
    assert [verdict.same for verdict in verdicts] == [True]


def test_explain_tells_which_loop_runs(state: GpuState) -> None:
    plan = tilewave.plan(4096, 4096, 4096, device=state.ordinal)
    if plan.instance not in DEFAULT:
        pytest.skip(f"{plan.instance} is planned for it")
    tilewave.prepare([plan], device=state.ordinal)
    assert "The kernel's steady loop is the register-file pass's" in tilewave.explain(plan)
