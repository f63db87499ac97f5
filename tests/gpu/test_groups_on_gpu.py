"""Groups of products on a real GPU: right, the bits of gemm, in graphs, far apart in memory, on streams."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.device import DeviceSpec
from tilewave.kernels.families import grouped
from tilewave.planner.gemm.group import GroupPlanner
from tilewave.runtime import group as runtime_group
from tilewave.runtime.driver import Device

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

SIZES = [(1, 1, 1), (5, 6, 7), (300, 20, 900), (64, 64, 64)]
SIZES += [(0, 4, 4), (4, 4, 0), (129, 257, 33), (512, 512, 512)]


def draw(m: int, n: int, k: int, *, transposed: bool = False) -> tuple[Any, Any]:
    a = torch.randn(k, m, device="cuda").T if transposed else torch.randn(m, k, device="cuda")
    return a, torch.randn(k, n, device="cuda")


def error(result: Any, a: Any, b: Any) -> float:
    found = tilewave.check(a, b, result)
    return 0.0 if found.rounding else float("inf")


def same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)))


@pytest.mark.parametrize("instance", grouped.instances(), ids=str)
def test_every_tile_has_the_bits_of_gemm(
    instance: Any, device: Device, spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, layouts, alignments, scalars and epilogues side by side, in an argument and in a table."""
    monkeypatch.setattr(grouped, "instances", lambda: (instance,))
    planner = GroupPlanner(spec)
    used = []

    def plan(problems: Any, of: DeviceSpec, options: Any) -> Any:
        used.append(planner.plan(problems, options))
        return used[-1]

    monkeypatch.setattr(runtime_group, "plan_group", plan)
    group: list[dict[str, Any]] = []
    for turn in range(6):
        for i, sizes in enumerate(SIZES):
            a, b = draw(*sizes, transposed=(turn + i) % 2 == 1)
            one: dict[str, Any] = {"a": a, "b": b, "alpha": [1.0, -0.7][turn % 2]}
            if turn == 2:
                one["a"] = torch.randn(sizes[0] + 1, sizes[2] + 3, device="cuda")[1:, 3:]
            if turn == 3:
                one |= {"bias": torch.randn(sizes[1], device="cuda"), "activation": "gelu"}
            if turn == 4:
                one |= {"c": torch.randn(sizes[0], sizes[1], device="cuda"), "beta": 0.5}
            group.append(one)
    for part in (group[:8], group):
        results = tilewave.grouped_gemm(part, batch_invariant=True)
        assert used[-1].instance is instance
        for one, result in zip(part, results, strict=True):
            assert same(result, tilewave.gemm(**one, batch_invariant=True))
    assert used[-1].table_launches > 0
    results = tilewave.grouped_gemm(group, schedule="split_k:3")
    again = tilewave.grouped_gemm(group, schedule="split_k:3")
    for one, result, other in zip(group, results, again, strict=True):
        assert same(result, other)
        expected = tilewave.gemm(**one)
        assert torch.allclose(result, expected, rtol=1e-4, atol=1e-3)


def test_a_long_table_comes_in_large_parts(device: Device, spec: DeviceSpec) -> None:
    """Thousands of tiny products: arguments of 32 KB bring the table, as drivers take from CUDA 12.1 on."""
    rng = np.random.default_rng()
    pairs = [draw(*map(int, rng.integers(1, 17, 3))) for _ in range(5000)]
    results = tilewave.grouped_gemm(pairs)
    for (a, b), result in zip(pairs, results, strict=True):
        assert torch.allclose(result, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)


def test_a_captured_group_replays(device: Device) -> None:
    pairs = [draw(40 + i, 50, 60) for i in range(60)]
    outs = [torch.empty(a.shape[0], b.shape[1], device="cuda") for a, b in pairs]
    given = [{"a": a, "b": b, "out": out} for (a, b), out in zip(pairs, outs, strict=True)]
    plans = tilewave.plan_grouped(given)
    assert plans[0].table_launches > 0
    tilewave.prepare(plans)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilewave.grouped_gemm(given)
    for _ in range(3):
        for a, b in pairs:
            a.normal_()
            b.normal_()
        tilewave.grouped_gemm(pairs)  # what runs beside the graph shares nothing with it
        graph.replay()
        torch.cuda.synchronize()
        for (a, b), out in zip(pairs, outs, strict=True):
            assert error(out, a, b) <= 1


def test_offsets_past_two_to_the_31(device: Device) -> None:
    """Operands whose rows lie billions of elements apart, and outs behind them, in one launch."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    rows, pitch = 5, 2**31 // 4 + 12
    memory = torch.empty(rows * pitch, device="cuda")
    far = memory.as_strided((rows, 32), (pitch, 1))
    out = memory.as_strided((rows, 48), (pitch, 1), 64)
    far.normal_()
    b, (c, d) = torch.randn(32, 48, device="cuda"), draw(70, 80, 90)
    first, second = tilewave.grouped_gemm([{"a": far, "b": b, "out": out}, (c, d)])
    assert error(first.contiguous(), far.contiguous(), b) <= 1
    assert error(second, c, d) <= 1


def test_eight_threads_with_streams_of_their_own(device: Device) -> None:
    wrong: list[str] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(10):
                pairs = [draw(30 + turn, 40, 50 + i) for i in range(40)]
                results = tilewave.grouped_gemm(pairs, schedule="split_k:2" if turn % 2 else None)
                for (a, b), result in zip(pairs, results, strict=True):
                    if not torch.allclose(result, (a.double() @ b.double()).float(), atol=1e-3):
                        wrong.append(f"turn {turn}")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_on_one_stream(device: Device) -> None:
    """Their tables are written by launches that those of others must not come between."""
    wrong: list[str] = []

    def work(first: int) -> None:
        for turn in range(20):
            pairs = [draw(first + turn, 40, 50 + i) for i in range(60)]
            for (a, b), result in zip(pairs, tilewave.grouped_gemm(pairs), strict=True):
                if not torch.allclose(result, (a.double() @ b.double()).float(), atol=1e-3):
                    wrong.append(f"turn {turn}")

    threads = [threading.Thread(target=work, args=(10 * i + 1,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_host_arrays(device: Device) -> None:
    rng = np.random.default_rng()
    pairs = [
        (rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32))
        for m, n, k in SIZES
    ]
    out = np.full((300, 40), np.nan, np.float32)[:, ::2]
    given: list[Any] = list(pairs)
    given[2] = {"a": pairs[2][0], "b": pairs[2][1], "out": out}
    for (a, b), result in zip(pairs, tilewave.grouped_gemm(given), strict=True):
        assert np.allclose(result, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-3)
