"""Which loop is loaded: the pass's where a check on the GPU says that its bits are the compiler's."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.computing_gpu import ComputingGpu, Floats, OutOfMemory, refusing
from tests.runtime.verdict_worker import ask

import tilewave
from tilewave.compiler import CacheWarning, Program, cache, register_pass
from tilewave.compiler.records import Kernel
from tilewave.compiler.register_pass import OFF_SWITCH, pass_outcome
from tilewave.device import DeviceSpec, get_spec
from tilewave.errors import CaptureError
from tilewave.kernels import new_loops
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal
from tilewave.planner.gemm import GemmPlan, PlanOptions, select
from tilewave.problem import Precision
from tilewave.runtime import driver, fp16x3, kernels, loop_check, loop_choice, loop_launcher
from tilewave.runtime.execute import prepare_plan, with_its_loops
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.loop_check import Verdict, compare, remembered_verdict, verdict_key
from tilewave.runtime.loop_choice import RegisterFileWarning
from tilewave.runtime.loop_products import Numbers, loop_products

INSTANCE = next(one for one in large_tile.instances() if one.name == "large_tile_64x64_nn_16")
ARCH = "sm_90"


@dataclass
class Kernels:
    """The kernel of `INSTANCE` in both versions, on a fake GPU."""

    gpu: ComputingGpu
    program: Program
    kernel: Kernel
    new: bytes
    cache: Path

    def load(self) -> kernels.Loop:
        """Load it as a new process would; which loop it runs."""
        kernels._states.clear()
        gpu_state(0).kernel(INSTANCE, 0)
        loop = gpu_state(0).loop_of(INSTANCE.name)
        assert loop is not None
        assert self.gpu.loaded_now[-1] == (self.new if loop.new else self.program.cubin)
        assert not self.gpu.memory, "the check left memory behind"
        assert self.gpu.capture_mode == "global"
        return loop


def small_gpu(ordinal: int = 0) -> DeviceSpec:
    return replace(get_spec("H200"), sms=2)


@pytest.fixture
def fake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Kernels]:
    program, kernel = compile_instance(INSTANCE, ARCH)
    new = pass_outcome(program, kernel.symbol).cubin
    assert new is not None
    gpu = getattr(request, "param", ComputingGpu)()
    gpu.compilers = {program.cubin}
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    monkeypatch.setenv("TILEWAVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(driver, "_bindings", lambda: gpu)
    monkeypatch.setattr(loop_launcher, "bindings", lambda: gpu)
    monkeypatch.setattr(driver.ProcessState, "initialised", False)
    monkeypatch.setattr(driver.ProcessState, "forked", False)
    monkeypatch.setattr(kernels, "query_device", small_gpu)
    monkeypatch.setattr(kernels, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(kernels, "_states", {})
    monkeypatch.setattr(loop_choice, "driver_named", lambda: "580.1")
    driver.probe.cache_clear()
    yield Kernels(gpu, program, kernel, new, tmp_path / "cache")
    driver.probe.cache_clear()


def until(true: Callable[[], bool]) -> None:
    """Wait for another process."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def one_bit(out: Floats, launch: int) -> None:
    out.view(np.uint32)[-1, -1] ^= 1


# What is chosen.


def refusing_gpu(monkeypatch: pytest.MonkeyPatch, place: int) -> tuple[DeviceSpec, loop_choice.Loop]:
    """A GPU of which nobody else makes plans and that refuses every new loop, and what it says."""
    spec = replace(get_spec("H200"), clock_mhz=get_spec("H200").clock_mhz - place)
    monkeypatch.setattr(kernels, "query_device", lambda ordinal: spec)
    refused = loop_choice.Loop(False, "the new loop failed the check on this GPU: of purpose")
    monkeypatch.setattr(kernels, "choose_loop", lambda *args: refused)
    return spec, refused


def test_a_kernel_without_the_loop_that_it_needs_is_not_chosen_again(
    fake: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the check fails, another kernel is loaded in its place, and plans leave it out from then on."""
    spec, refused = refusing_gpu(monkeypatch, 1)
    first = tilewave.plan(8192, 8192, 8192, device=spec)
    assert first.instance.needs_new_loop
    prepare_plan(first, device=0)
    second = tilewave.plan(8192, 8192, 8192, device=spec)
    assert not second.instance.needs_new_loop
    loaded = [one.name for one in (first.instance, second.instance) if gpu_state(0).loop_of(one.name)]
    assert loaded == [first.instance.name, second.instance.name]
    (said,) = {one.rejected for one in second.considered if one.instance == first.instance}
    assert said == f"it is fast only with the register-file pass's loop: {refused.why}"
    # The planner keeps what it knows of a limited number of GPUs; what is loaded stays loaded.
    monkeypatch.setattr(select, "_planners", OrderedDict())
    assert select.plan_gemm(first.covers, spec).instance == first.instance
    again = with_its_loops(first, 0, 0, PlanOptions())
    assert again.instance == second.instance == select.plan_gemm(first.covers, spec).instance


def test_a_mode_that_is_left_for_ieee_does_without_the_compilers_loop_too(
    fake: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16x3 with a schedule that it has not: the plan that it keeps is another one when the check fails."""
    spec, _ = refusing_gpu(monkeypatch, 2)
    monkeypatch.setattr(fp16x3, "_modes", {})
    launched: list[GemmPlan] = []
    monkeypatch.setattr(fp16x3, "launch_plan", lambda plan, *_, **__: launched.append(plan))
    problem = tilewave.plan(6144, 6144, 6144, device=spec, precision="fp16x3", schedule="stream_k").covers
    options = PlanOptions("stream_k")
    assert select.plan_gemm(problem, spec, options).instance.needs_new_loop
    for _ in range(2):
        asked = replace(problem, precision=Precision.FP16X3)
        fp16x3.run(asked, Pointers(0, 0, 0), 1.0, 0.0, device=0, stream=0, options=options)
    assert launched[0] is launched[1]
    assert not launched[0].instance.needs_new_loop
    assert "fp16x3 was asked for and ieee runs" in launched[0].notes[-1]


def test_the_new_loop_is_the_default(fake: Kernels) -> None:
    loop = fake.load()
    assert loop.new
    assert "predicted issue slots per FFMA" in loop.why
    assert "10 products have the compiler's bits" in loop.why
    assert fake.gpu.new_launches == 20
    assert fake.gpu.loaded_now == [fake.new], "what only the check needed is unloaded"
    # Another process finds the verdict, and launches nothing.
    assert fake.load().new
    assert fake.gpu.new_launches == 20


def test_the_switch(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "no", "off"):
        monkeypatch.setenv(OFF_SWITCH, value)
        loop = fake.load()
        assert not loop.new
        assert loop.why == f"the register-file pass is switched off by {OFF_SWITCH}={value}"
    assert fake.gpu.launches == []
    for value in ("1", ""):
        monkeypatch.setenv(OFF_SWITCH, value)
        assert fake.load().new


@pytest.mark.filterwarnings("ignore::tilewave.runtime.loop_choice.RegisterFileWarning")
@pytest.mark.parametrize(
    "fault",
    [
        one_bit,
        lambda out, launch: out.__setitem__((0, 0), np.float32(np.nan)),
        lambda out, launch: one_bit(out, launch) if launch == 1 else None,
        lambda out, launch: one_bit(out, launch) if launch == 20 else None,
        lambda out, launch: one_bit(out, launch) if np.isnan(out).any() else None,
        lambda out, launch: out.fill(np.float32(np.nan)),
    ],
    ids=["one bit", "a NaN", "once at first", "once at last", "special values only", "nothing written"],
)
def test_other_bits_keep_the_compilers_loop(fake: Kernels, fault: Callable[[Floats, int], None]) -> None:
    fake.gpu.fault = fault
    loop = fake.load()
    assert not loop.new
    assert "the new loop failed the check on this GPU" in loop.why
    assert "differ from the compiler's, first out[" in loop.why


def test_a_failure_is_warned_of_once_and_remembered(fake: Kernels) -> None:
    fake.gpu.fault = one_bit
    with pytest.warns(RegisterFileWarning, match="64x64_nn_16 runs with the compiler's loop.*SASS_PASS=0"):
        first = fake.load()
    launches = len(fake.gpu.launches)
    fake.gpu.fault = lambda out, launch: None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fake.load() == first
    assert len(fake.gpu.launches) == launches


def test_explain_tells(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(tilewave.plan(256, 256, 512, device=small_gpu()), instance=INSTANCE)
    before = tilewave.explain(plan)
    assert "loop is the register-file pass's, if the compiler is NVRTC 13.0.88 or NVRTC 13.5.37" in before
    fake.load()
    assert "loop is the register-file pass's (predicted issue slots" in tilewave.explain(plan)
    monkeypatch.setenv(OFF_SWITCH, "0")
    fake.load()
    assert "loop is the compiler's, because the register-file pass is switched off" in tilewave.explain(plan)
    elsewhere = replace(plan, device="A100")
    monkeypatch.delenv(OFF_SWITCH)
    assert "the register file of sm_80 was not measured" in tilewave.explain(elsewhere)
    unknown = replace(plan, device="a GPU of tomorrow")
    assert "if the compiler is" in tilewave.explain(unknown)
    other = replace(plan, instance=replace(INSTANCE, family="small_tile"))
    assert "steady loop" not in tilewave.explain(other)


def test_narrow_kernels_that_ran_are_among_the_large_tiles() -> None:
    assert {one.name for one in large_tile.instances()} >= new_loops._NARROW
    assert all(
        instance_refusal(one) is None for one in large_tile.instances() if one.name in new_loops._NARROW
    )


def test_other_narrow_kernels_keep_the_compilers_loop(fake: Kernels) -> None:
    narrow = next(one for one in large_tile.instances() if one.name == "large_tile_64x64_nn_4")
    gpu_state(0).kernel(narrow, 0)
    loop = gpu_state(0).loop_of(narrow.name)
    assert str(loop) == f"the compiler's, because {instance_refusal(narrow)}"
    assert "only kernels that read 16 bytes at once" in str(loop)
    assert fake.gpu.launches == []


def test_an_unknown_compiler(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels,
        "compile_instance",
        lambda *arguments, **options: (replace(fake.program, compiler="NVRTC 13.9.1"), fake.kernel),
    )
    assert "the pass was not tested with NVRTC 13.9.1" in fake.load().why


def test_another_gpu_driver_or_cubin_is_another_verdict(
    fake: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.load()
    checked = fake.gpu.new_launches
    monkeypatch.setattr(loop_choice, "driver_named", lambda: "580.2")
    fake.load()
    assert fake.gpu.new_launches == 2 * checked
    monkeypatch.setattr(kernels, "query_device", lambda ordinal: replace(small_gpu(), name="H201"))
    fake.load()
    assert fake.gpu.new_launches == 3 * checked
    keys = {verdict_key(*parts) for parts in (
        (b"a", b"b", "s", "g", "d"), (b"b", b"a", "s", "g", "d"), (b"a", b"c", "s", "g", "d"),
        (b"a", b"b", "t", "g", "d"), (b"a", b"b", "s", "h", "d"), (b"a", b"b", "s", "g", "e"),
    )}  # fmt: skip
    assert len(keys) == 6


# Captures.


def test_never_inside_a_capture(fake: Kernels) -> None:
    fake.gpu.capturing = {7: 1}
    with pytest.raises(CaptureError, match="prepare"):
        gpu_state(0).kernel(INSTANCE, 7)
    assert fake.gpu.launches == []
    fake.gpu.capturing = {}
    plan = replace(tilewave.plan(256, 256, 512, device=small_gpu()), instance=INSTANCE)
    prepare_plan(plan, device=0)
    checked = len(fake.gpu.launches)
    assert checked > 0
    fake.gpu.capturing = {7: 1}
    gpu_state(0).kernel(INSTANCE, 7)
    assert len(fake.gpu.launches) == checked


def test_a_capture_elsewhere_is_left_alone(fake: Kernels) -> None:
    """Another stream is being captured meanwhile: nothing of the check could be taken for a part of it."""
    fake.gpu.capturing = {7: 1}
    assert fake.load().new  # memory is allocated in relaxed mode only, or the fake would refuse
    names = [name for name, _ in fake.gpu.calls]
    assert names.count("cuThreadExchangeStreamCaptureMode") == 2
    (stream,) = {arguments[8] for name, arguments in fake.gpu.calls if name == "cuLaunchKernel"}
    waited = {arguments[0] for name, arguments in fake.gpu.calls if name == "cuStreamSynchronize"}
    assert waited == {stream}
    assert 0 != stream != 7
    assert fake.gpu.count("cuStreamDestroy") == fake.gpu.count("cuStreamCreate") == 1


# What goes wrong.


@pytest.mark.parametrize("fake", [OutOfMemory], indirect=True)
def test_a_full_gpu_proves_nothing(fake: Kernels) -> None:
    with pytest.warns(RegisterFileWarning, match="the check could not be made.*OUT_OF_MEMORY"):
        loop = fake.load()
    assert not loop.new
    assert list(fake.cache.glob("*.verdict")) == [], "nothing is remembered: there may be room next time"


@pytest.mark.filterwarnings("ignore::tilewave.runtime.loop_choice.RegisterFileWarning")
def test_a_kernel_that_fails_is_not_tried_again(fake: Kernels) -> None:
    def fault(out: Floats, launch: int) -> None:
        raise tilewave.errors.DeviceError("CUDA_ERROR_ILLEGAL_ADDRESS")

    fake.gpu.fault = fault
    assert "the check could not be made (CUDA_ERROR_ILLEGAL_ADDRESS)" in fake.load().why
    fake.gpu.fault = lambda out, launch: None
    launches = len(fake.gpu.launches)
    assert "it failed when it was tried: CUDA_ERROR_ILLEGAL_ADDRESS" in fake.load().why
    assert len(fake.gpu.launches) == launches


def test_an_interrupted_check_is_made_again(fake: Kernels) -> None:
    def fault(out: Floats, launch: int) -> None:
        raise KeyboardInterrupt

    fake.gpu.fault = fault
    with pytest.raises(KeyboardInterrupt):
        fake.load()
    fake.gpu.fault = lambda out, launch: None
    fake.gpu.images.clear()
    fake.gpu.memory.clear()
    assert fake.load().new


def test_a_cache_that_is_not_ours(fake: Kernels) -> None:
    """Every process checks, and says once that the cache cannot be used."""
    fake.load()
    checked = fake.gpu.new_launches
    with refusing(fake.cache), pytest.warns(CacheWarning, match="can be written by other users"):
        assert fake.load().new
    assert fake.gpu.new_launches == 2 * checked


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache(fake: Kernels) -> None:
    fake.cache.mkdir()
    fake.cache.chmod(0o500)
    with pytest.warns(CacheWarning):
        assert fake.load().new
    fake.cache.chmod(0o700)


@pytest.mark.parametrize("kind", ["verdict", "loop"])
@pytest.mark.parametrize("damage", ["cut", "garbled", "empty", "other", "directory", "link"])
@pytest.mark.filterwarnings("ignore::tilewave.compiler.cache.CacheWarning")
def test_damaged_entries(fake: Kernels, damage: str, kind: str, rng: np.random.Generator) -> None:
    """Whatever lies there, it is never taken for a verdict or a cubin; what is not ours alone is replaced."""
    register_pass._outcomes.clear()
    assert fake.load().new
    (path,) = fake.cache.glob(f"*.{kind}")
    (other,) = fake.cache.glob("*.loop" if kind == "verdict" else "*.verdict")
    good = path.read_bytes()
    bad = bytearray(good)
    bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
    path.unlink()
    match damage:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(other)
        case _:
            path.write_bytes(
                {"cut": good[: int(rng.integers(len(good)))], "garbled": bad, "empty": b"",
                 "other": other.read_bytes()}[damage]
            )  # fmt: skip
    launches = fake.gpu.new_launches
    register_pass._outcomes.clear()
    assert fake.load().new
    assert fake.gpu.new_launches == launches * (2 if kind == "verdict" else 1)
    if damage != "directory":
        assert not path.is_symlink()
        assert len(path.read_bytes()) > 60


def test_a_fault_of_the_pass_costs_no_product(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Program, symbol: str) -> None:
        raise AssertionError("a sum has moved")

    monkeypatch.setattr(register_pass, "made_outcome", broken)
    register_pass._outcomes.clear()
    assert "the pass failed (AssertionError: a sum has moved)" in fake.load().why
    assert list(fake.cache.glob("*.loop")) == []
    register_pass._outcomes.clear()


def test_a_package_without_its_source_text_keeps_nothing(
    fake: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(register_pass, "_SOURCES", (tmp_path / "nowhere",))
    register_pass._pass_digest.cache_clear()
    register_pass._outcomes.clear()
    assert fake.load().new
    assert list(fake.cache.glob("*.loop")) == []
    register_pass._pass_digest.cache_clear()


def test_another_pass_is_another_outcome(
    fake: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What an earlier version of the pass left behind is not met."""
    before = register_pass.outcome_key(fake.program.cubin, fake.kernel.symbol)
    (tmp_path / "emit.py").write_text("other text")
    monkeypatch.setattr(register_pass, "_SOURCES", (tmp_path,))
    register_pass._pass_digest.cache_clear()
    after = register_pass.outcome_key(fake.program.cubin, fake.kernel.symbol)
    register_pass._pass_digest.cache_clear()
    assert None is not before != after is not None


# Processes and threads.


def test_threads_share_a_check(fake: Kernels) -> None:
    checks, verdicts = [], []
    barrier = threading.Barrier(8)

    def check(about_to_run: Callable[[], None]) -> Verdict:
        about_to_run()
        checks.append(1)
        time.sleep(0.05)
        return Verdict(True, "right")

    def work() -> None:
        barrier.wait()
        verdicts.append(remembered_verdict("of-threads.verdict", check))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(checks) == 1
    assert sorted(found_now for _, found_now in verdicts) == [False] * 7 + [True]
    assert {verdict for verdict, _ in verdicts} == {Verdict(True, "right")}


def test_processes_share_a_check(tmp_path: Path) -> None:
    """Three start together and one checks; one that is killed in its check leaves it to the next."""
    context = multiprocessing.get_context("spawn")
    answers, log, directory = context.Queue(), tmp_path / "log", str(tmp_path / "cache")

    def start(key: str, seconds: float) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=ask, args=(directory, key, str(log), seconds, answers))
        process.start()
        return process

    together = [start("a.verdict", 0.5) for _ in range(3)]
    given = [answers.get(timeout=60) for _ in together]
    assert len({words for words, _ in given}) == 1
    assert sorted(found_now for _, found_now in given) == [False, False, True]
    lines = log.read_text().splitlines()
    assert len(lines) == 1
    for attempt in range(1, loop_check.ATTEMPTS + 1):
        doomed = start("b.verdict", 600)
        until(lambda wanted=1 + attempt: len(log.read_text().splitlines()) == wanted)
        doomed.kill()
        doomed.join()
    last = start("b.verdict", 0)
    words, _ = answers.get(timeout=60)
    assert words == f"{loop_check.ATTEMPTS} checks on this GPU never came to their end"
    for process in (*together, last):
        process.join()


def test_who_waits_too_long_goes_without(
    fake: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("spawn")
    log, answers = tmp_path / "log", context.Queue()
    process = context.Process(target=ask, args=(str(fake.cache), "other", str(log), 600, answers))
    process.start()
    until(log.exists)
    monkeypatch.setattr(loop_check, "PATIENCE_S", 0.1)
    loop = fake.load()
    process.kill()
    process.join()
    assert not loop.new
    assert "another process is checking" in loop.why
    assert fake.gpu.launches == []
    assert fake.load().new, "the lock went with the process that held it"


# The products.


@pytest.mark.parametrize(
    "instance", [one for one in large_tile.instances() if one.a and one.a.width == 16], ids=str
)
def test_products(instance: Instance, rng: np.random.Generator) -> None:
    """Every kind of numbers and schedule, ragged, taken by the instance, and one that fills the GPU."""
    resident = 132
    products = list(loop_products(instance, rng, sms=132, resident=resident))
    assert {product.numbers for product in products} == set(Numbers)
    for product in products:
        assert large_tile.refuses(instance, product.problem) is None
    assert len({str(product.schedule) for product in products}) == 3
    assert max(product.cut.tiles for product in products) >= resident
    assert min(product.problem.k for product in products) < instance.bk
    assert any(product.problem.k >= 16 * instance.bk for product in products)
    assert all(product.problem.m % instance.bm for product in products)
    special = [product for product in products if product.numbers is Numbers.INFINITE]
    assert all(np.isinf(product.a).any() and np.isinf(product.b).any() for product in special)


def test_a_compiler_that_computes_nothing_proves_nothing(rng: np.random.Generator) -> None:
    products = list(loop_products(INSTANCE, rng, sms=2, resident=0))
    nothing = np.full((3, 3), 0x7FFFFFFF, np.uint32)
    verdict = compare(products, lambda product: nothing, lambda product: nothing)
    assert not verdict.same
    assert "the compiler's own kernel left NaN" in verdict.words
