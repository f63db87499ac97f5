"""The emulator's tests of Hopper's instructions, run on a Hopper GPU: what they expect is what it does."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))  # the tests that are run again are there

import test_bulk_copies
import test_clusters
import test_halves
import test_mbarriers
import test_products
import test_random_pipelines
import test_warp_matrix
import test_warp_specialised

from tilewave.compiler import Program
from tilewave.device import DeviceSpec
from tilewave.emulator import parse_ptx
from tilewave.runtime.driver import Device, DeviceArray, Module, Stream
from tilewave.runtime.tensor_maps import encode_for_driver

pytestmark = pytest.mark.gpu

Rng = np.random.Generator
MODULES: list[Any] = [
    test_bulk_copies,
    test_clusters,
    test_halves,
    test_mbarriers,
    test_products,
    test_random_pipelines,
    test_warp_matrix,
    test_warp_specialised,
]


class GpuMemory:
    """Stands in for the emulator's memory."""

    device: Device

    def put(self, array: Any, name: str | None = None) -> DeviceArray:
        """Copy an array in."""
        return DeviceArray.from_numpy(self.device, np.ascontiguousarray(array))

    def empty(self, shape: Any, dtype: Any = np.float32, name: str | None = None) -> DeviceArray:
        """Memory full of the emulator's poison."""
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(extents)) * np.dtype(dtype).itemsize
        words = np.full(-(-nbytes // 4), 0x7FFF7FFF, np.uint32)
        return self.put(words.view(np.uint8)[:nbytes].view(dtype).reshape(extents))

    def get(self, buffer: DeviceArray) -> Any:
        """Copy an array out."""
        return buffer.to_numpy()


@pytest.fixture
def on_gpu(device: Device, stream: Stream, spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, launches and tensor maps of the emulator's tests are those of the GPU."""
    if spec.compute_capability != (9, 0):
        pytest.skip(f"these instructions are Hopper's; this is {spec.name}")

    class Here(GpuMemory):
        pass

    Here.device = device

    def submit(module: Module, symbol: str, grid: int, block: int, arguments: list[Any], shared: int) -> None:
        function = module.function(symbol)
        function.prepare((grid, 1, 1), (block, 1, 1), arguments, stream, shared)()
        stream.synchronize()

    def run(text: str, args: list[Any], memory: Any, block: int = 32, grid: int = 1, **options: Any) -> None:
        ptx = text.replace(".target sm_90\n", ".target sm_90a\n")
        if (cluster := options.get("cluster")) is not None:
            directive = f".explicitcluster\n.reqnctapercluster {cluster[0]}, 1, 1\n{{"
            ptx = ptx.replace("{", directive, 1)
        params = parse_ptx(text).entries["k"].params
        arguments = [as_bytes(arg, param.nbytes) for arg, param in zip(args, params, strict=True)]
        submit(Module(device, ptx.encode() + b"\0"), "k", grid, block, arguments, 0)

    def emulate(
        text: str,
        symbol: str,
        grid: tuple[int],
        block: tuple[int],
        args: list[Any],
        memory: Any,
        **options: Any,
    ) -> None:
        run(text, args, memory, block[0], grid[0], **options)

    def start(
        program: Program, name: str, grid: int, block: int, args: list[Any], memory: Any, **options: Any
    ) -> None:
        params = parse_ptx(program.ptx or "").entries[name].params
        arguments = [as_bytes(arg, param.nbytes) for arg, param in zip(args, params, strict=True)]
        shared = options.get("dynamic_shared_bytes", 0)
        submit(Module(device, program.cubin), program.kernels[name].symbol, grid, block, arguments, shared)

    replaced: dict[str, Callable[..., Any]] = {
        "Memory": Here,
        "run": run,
        "emulate": emulate,
        "start": start,
        "encode_for_emulator": encode_for_driver,
    }
    for module in MODULES:
        for name, replacement in replaced.items():
            own = name == "run" and module is test_warp_specialised
            own = own or (name == "start" and module is test_products)
            if hasattr(module, name) and not own:
                monkeypatch.setattr(module, name, replacement)


def as_bytes(argument: Any, nbytes: int) -> Any:
    """An argument as its parameter's bytes."""
    if isinstance(argument, DeviceArray):
        return argument
    data = argument if isinstance(argument, bytes) else int(argument).to_bytes(nbytes, "little", signed=False)
    return (ctypes.c_uint8 * nbytes).from_buffer_copy(data)


def integers(rng: Rng, *shape: int) -> Any:
    """Numbers whose sums are exact, whatever a tensor core cuts off."""
    return rng.integers(-8, 9, shape).astype(np.float64)


@pytest.mark.usefixtures("on_gpu")
class TestOnGpu:
    """Each method runs one of the emulator's tests."""

    @pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
    @pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
    def test_boxes_loaded(self, swizzle: int, rank: int, rng: Rng) -> None:
        for _ in range(5):
            test_bulk_copies.test_boxes_of_random_tensors_are_loaded(swizzle, rank, rng)

    @pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_boxes_stored(self, swizzle: int, rank: int, rng: Rng) -> None:
        for _ in range(5):
            test_bulk_copies.test_boxes_of_random_tensors_are_stored(swizzle, rank, None, rng)

    def test_runs(self, rng: Rng) -> None:
        test_bulk_copies.test_runs_of_bytes_go_both_ways(None, rng)

    @pytest.mark.parametrize("dtype", test_bulk_copies.FLOATS)
    def test_nan_outside(self, dtype: str, rng: Rng) -> None:
        test_bulk_copies.test_elements_outside_can_be_nan(dtype, rng)

    def test_phases(self) -> None:
        test_mbarriers.test_phases_tokens_and_parities()

    def test_mbarriers_between_warps(self, rng: Rng) -> None:
        test_mbarriers.test_one_warp_waits_for_the_other({}, rng)

    def test_polling(self) -> None:
        test_mbarriers.test_a_polling_thread_may_do_other_things()

    @pytest.mark.parametrize("name", test_mbarriers.ARRIVALS)
    def test_arrivals_after_copies(self, name: str) -> None:
        test_mbarriers.test_arrivals_when_copies_have_landed(name, {})

    @pytest.mark.parametrize("exact", [True, False])
    @pytest.mark.parametrize("layout_a", test_products.LAYOUTS)
    @pytest.mark.parametrize("layout_b", test_products.LAYOUTS)
    def test_layouts_of_products(
        self,
        layout_a: tuple[int, bool],
        layout_b: tuple[int, bool],
        exact: bool,
        rng: Rng,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if exact:
            monkeypatch.setattr(test_products, "draw", integers)
        test_products.test_all_layouts_in_shared_memory(layout_a, layout_b, rng)

    @pytest.mark.parametrize("exact", [True, False])
    @pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
    @pytest.mark.parametrize("columns", [8, 64, 128, 256])
    def test_a_from_registers(
        self, kind: str, columns: int, exact: bool, rng: Rng, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if exact:
            monkeypatch.setattr(test_products, "draw", integers)
        test_products.test_a_from_registers(kind, columns, rng)

    def test_chains(self, rng: Rng) -> None:
        test_products.test_a_chain_of_products_in_several_groups(None, rng)
        test_products.test_a_loop_that_waits_one_round_late_is_right(rng)

    @pytest.mark.parametrize("exact", [True, False])
    @pytest.mark.parametrize("shape", ["m16n8k16 f16", "m16n8k8 f16", "m16n8k16 bf16", "m16n8k8 tf32"])
    def test_products_of_warps(
        self, shape: str, exact: bool, rng: Rng, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if exact:
            monkeypatch.setattr(test_warp_matrix, "draw", integers)
        size, kind = shape.split()
        test_warp_matrix.test_products_of_warps(size, kind, rng)

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_matrices(self, count: int, transposed: bool, rng: Rng) -> None:
        test_warp_matrix.test_matrices_are_loaded_and_stored(count, transposed, {}, rng)

    def test_clusters(self, rng: Rng) -> None:
        test_clusters.test_named_barriers_hand_data_between_pairs_of_warps({})
        for mask in (0xFFFFFFFF, 0xFFFF0000, 0x00000008):
            test_clusters.test_an_election_is_won_by_the_first_of_the_named(mask)
        for store in (True, False):
            test_clusters.test_blocks_of_a_cluster_reach_each_others_shared_memory(store, {})
        test_clusters.test_where_a_block_is_in_its_cluster()
        test_clusters.test_a_copy_for_several_blocks_and_arrivals_from_afar({}, rng)

    @pytest.mark.parametrize("kind", ["f16", "bf16"])
    @pytest.mark.parametrize("operation", test_halves.OPERATIONS)
    def test_halves(self, operation: str, kind: str, rng: Rng) -> None:
        test_halves.test_results_are_rounded_once(operation, kind, True, rng)

    def test_random_pipelines(self, rng: Rng) -> None:
        for _ in range(5):
            test_random_pipelines.test_random_programs_are_right_under_every_schedule(False, rng)

    @pytest.mark.parametrize("signs", [True, False])
    def test_a_warp_specialised_product(self, signs: bool, rng: Rng) -> None:
        for _ in range(5):
            test_warp_specialised.test_every_bit_is_right(signs, {}, rng)
