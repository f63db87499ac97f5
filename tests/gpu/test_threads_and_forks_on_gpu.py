"""Many threads with a stream each, and processes that fork, on a real GPU (cases H062 and H063)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from guarded import program_of

from tilewave.lab.registry import get_rung
from tilewave.runtime.driver import Device, DeviceArray, Function, Graph, Module, Stream

pytestmark = pytest.mark.gpu

THREADS, CALLS = 8, 500
RUNG = get_rung(3)


@pytest.fixture(scope="module")
def product(device: Device, arch: str) -> Function:
    """One kernel handle, which all threads share."""
    program = program_of(RUNG, arch)
    return Module(device, program.cubin).function(program.kernels[RUNG.entry].symbol)


class Chain:
    """A thread's own stream and matrices; call i permutes the columns of what call i - 1 left.

    The product with a permutation matrix is exact, so the end is known to the bit, and a call that is lost,
    doubled, out of order or computed with another thread's matrices changes it.
    """

    def __init__(self, device: Device, product: Function, rng: np.random.Generator, m: int, n: int) -> None:
        self.stream = Stream(device)
        self.product = product
        self.shape = m, n
        self.order = rng.permutation(n)
        self.start = rng.standard_normal((m, n), np.float32)
        matrix = np.zeros((n, n), np.float32)
        matrix[self.order, np.arange(n)] = 1
        self.matrix = DeviceArray.from_numpy(device, matrix)
        self.halves = [DeviceArray.from_numpy(device, self.start), DeviceArray.empty(device, (m, n))]
        self.halves[1].poison()

    def call(self, index: int) -> None:
        """Prepare and submit one product on this thread's stream, through the shared handle."""
        m, n = self.shape
        source, target = self.halves[index % 2], self.halves[1 - index % 2]
        arguments = [source, self.matrix, target, m, n, n]
        self.product.prepare(RUNG.grid(m, n), RUNG.block, arguments, self.stream)()

    def after(self, calls: int) -> np.ndarray:
        """What should be there after so many calls."""
        columns = np.arange(self.shape[1])
        for _ in range(calls):
            columns = columns[self.order]
        return self.start[:, columns]

    def result(self, calls: int) -> np.ndarray:
        self.stream.synchronize()
        return self.halves[calls % 2].to_numpy()


def in_threads(work: Callable[[int], object]) -> list[object]:
    """Run `work` in `THREADS` threads that all begin at once."""
    gate = threading.Barrier(THREADS)

    def begin(number: int) -> object:
        gate.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS), timeout=120))


@pytest.fixture
def chains(device: Device, product: Function, rng: np.random.Generator) -> list[Chain]:
    sizes = rng.integers(33, 97, (THREADS, 2))
    return [Chain(device, product, rng, int(m), int(n)) for m, n in sizes]


def test_threads_with_their_own_streams_do_not_mix(device: Device, chains: list[Chain]) -> None:
    """H062: 8 threads, each with its stream and matrices, 500 calls of one shared kernel: all right."""

    def work(number: int) -> None:
        device.activate()
        for index in range(CALLS):
            chains[number].call(index)

    in_threads(work)
    for chain in chains:
        np.testing.assert_array_equal(chain.result(CALLS), chain.after(CALLS))


def test_no_call_lands_on_another_threads_stream(device: Device, chains: list[Chain]) -> None:
    """H062: what a stream was given, recorded: replaying one thread's graph does its calls and no other's."""
    calls = CALLS - 1  # odd, so that the result lies where nothing was before

    def record(number: int) -> Graph:
        device.activate()

        def submit() -> None:
            for index in range(calls):
                chains[number].call(index)

        return chains[number].stream.capture(submit)

    graphs = in_threads(record)
    device.synchronize()
    assert all(np.isnan(chain.halves[1].to_numpy()).all() for chain in chains)  # recorded, not run
    for number, (graph, chain) in enumerate(zip(graphs, chains, strict=True)):
        assert isinstance(graph, Graph)
        graph.launch()
        np.testing.assert_array_equal(chain.result(calls), chain.after(calls))
        for other in chains[number + 1 :]:
            assert np.isnan(other.halves[1].to_numpy()).all()


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


USE = """
import os, sys, threading
import numpy as np
import tilewave.lab.measure, tilewave.lab.selftest, tilewave.runtime.driver as driver
from tilewave.errors import DeviceError

def use():
    device = driver.Device()
    values = np.random.default_rng().standard_normal(1000).astype(np.float32)
    array = driver.DeviceArray.from_numpy(device, values)
    assert np.array_equal(array.to_numpy(), values)
    return device, array

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.usefixtures("device")
def test_a_parent_that_only_imported_leaves_the_gpu_to_its_children() -> None:
    """H063, first half: import, fork, use the GPU in two children and then in the parent."""
    output = run_python(
        USE
        + """
def work():
    use()
    print("child works", flush=True)

in_child(work)
in_child(work)
use()
print("parent works")
"""
    )
    assert output.splitlines() == ["child works", "child works", "parent works"]


@pytest.mark.usefixtures("device")
def test_a_child_of_a_parent_that_used_the_gpu_fails_at_once_with_a_clear_message() -> None:
    """H063, second half: use, fork, call in the child: every kind of call says what to do, and none hangs."""
    output = run_python(
        USE
        + """
from tilewave.compiler import choose_arch, compile_source
from tilewave.device import query_device
from tilewave.lab.registry import get_rung

device, array = use()
rung = get_rung(1)
program = compile_source(rung.source(), rung.entries, choose_arch(query_device().compute_capability).arch)
stream, module = driver.Stream(device), driver.Module(device, program.cubin)
launch = module.function(rung.entry).prepare((1, 1, 1), rung.block, [array, array, array, 1, 1, 1], stream)
launch()
stream.synchronize()
calls = [
    use,
    launch,
    stream.synchronize,
    array.to_numpy,
    lambda: driver.Module(device, program.cubin),
    lambda: driver.DeviceArray.empty(device, (8,)),
    driver.require_gpu,
    query_device,
]
for call in calls:
    in_child(call)
launch()
stream.synchronize()
print("parent works")
"""
    )
    *children, parent = output.splitlines()
    assert parent == "parent works"
    assert len(children) == 8
    for line in children:
        assert line.startswith("DeviceError this process was forked from one that had already used CUDA")
        assert "spawn" in line


@pytest.mark.usefixtures("device")
def test_a_forked_worker_pool_is_told_too() -> None:
    output = run_python(
        USE
        + """
import multiprocessing
device, array = use()
def report(queue):
    try:
        use()
        queue.put("no error")
    except DeviceError as error:
        queue.put(str(error))
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=report, args=(queue,))
process.start()
print(queue.get(timeout=30))
process.join(30)
print(process.exitcode)
"""
    )
    message, code = output.splitlines()
    assert "forkserver" in message
    assert code == "0"


@pytest.mark.usefixtures("device")
def test_a_fork_after_another_use_of_the_driver_is_told() -> None:
    output = run_python(
        USE
        + """
from tilewave.device import query_device
query_device()
in_child(use)
"""
    )
    assert output.splitlines()[0].startswith("DeviceError this process was forked")
    output = run_python(
        USE
        + """
import cuda.bindings.driver as bindings
assert int(bindings.cuInit(0)[0]) == 0  # as another library does it
in_child(use)
"""
    )
    assert "CUDA_ERROR_NOT_INITIALIZED" in output
    assert "probably this process was forked" in output
