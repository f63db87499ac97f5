"""The tile kernels, instance by instance, against cuBLAS (through PyTorch).

    PYTHONPATH=src python3 benchmarks/tile_rates.py --out tile_rates.json --budget 300 [--only TEXT ...]

For each product every instance of `large_tile` and `small_tile` that takes it is timed under some schedules,
as `stream_rates.py` does it: graphs, operands beyond L2, contenders in turn with cuBLAS, answers checked on
random rows. The table shows the best of them, and the best of each tile. A later call with the same file
goes on where this one ended.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from stream_rates import line, measure
from tilewave.bench.environment import Environment
from tilewave.bench.suite import SuiteProduct
from tilewave.compiler import choose_arch, compiler_version
from tilewave.device import query_device
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.ship import compile_all, every_instance
from tilewave.planner.gemm import GemmPlanner
from tilewave.runtime.driver import Device

TILES = ("large_tile", "small_tile")
LARGE = 2e10
"""Operations from which only large tiles are timed."""
PRODUCTS = """
    4096 4096 4096 NN
    4096 4096 4096 NT
    4096 4096 4096 TN
    4096 4096 4096 TT
    8192 8192 8192 NN
    8192 8192 8192 TT
    4097 4097 4097 NN
    4097 4097 4097 TT
    2048 2048 2048 NN
    2049 2049 2049 NN
    3000 3000 3000 NN
    1024 1024 1024 NN
    1025 1025 1025 NN
    1536 1536 1536 NN
    512 512 512 NN
    513 513 513 NN
    256 256 256 NN
    321 614 953 NN
    192 240 1600 NN
    401408 64 147 NT
    100352 64 576 NT
    8457 35 1760 NN
    16 4096 4096 NN
    4096 16 4096 TT
    16 56 150352 TT
    64 64 1000000 NN
    128 4096 4096 NT
    1024 832 4096 NN
    2048 1024 479 NT
    5120 5120 16 NN
    256 256 256 NN 64
    64 64 64 NN 4096
"""


def products() -> list[SuiteProduct]:
    """The products: m, n, k, letters and a batch, one a line."""
    found = []
    for text in PRODUCTS.strip().split("\n"):
        m, n, k, letters, *rest = text.split()
        a, b = (letter == "T" for letter in letters)
        batch = int(rest[0]) if rest else 1
        found.append(SuiteProduct(" ".join(text.split()), "tiles", int(m), int(n), int(k), a, b, batch))
    return found


def best_of_each(row: dict[str, Any]) -> str:
    """TFLOP/s of the best schedule of each instance, the fastest first."""
    product = SuiteProduct(**row["product"])
    best: dict[str, tuple[float, str]] = {}
    for name, found in row["candidates"].items():
        instance, schedule = name.split(" ", 1)
        best[instance] = min(best.get(instance, (found["us"], schedule)), (found["us"], schedule))
    ranked = sorted(best.items(), key=lambda item: item[1])
    return "; ".join(
        f"{instance.split('_', 2)[2]} {product.flops / us * 1e-6:.1f} ({schedule})"
        for instance, (us, schedule) in ranked[:8]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="parts of names of products")
    options = parser.parse_args()
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)
    spec = query_device()
    arch = choose_arch(spec.compute_capability).arch
    ours = [instance for instance in every_instance() if instance.family in TILES]
    compiled = sum(1 for _ in compile_all(ours, [arch]))
    print(f"{compiled} kernels for {arch} after {time.monotonic() - started:.0f} s", flush=True)
    planner = GemmPlanner(spec, FAMILIES)
    record: dict[str, Any] = {"rows": []}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    record["command"] = "python3 benchmarks/tile_rates.py --out FILE --budget SECONDS"
    record["environment"] = Environment.capture(device=Device(), compiler=compiler_version()).to_json()
    done = {row["product"]["name"] for row in record["rows"]}
    for product in products():
        wanted = not options.only or any(part in product.name for part in options.only)
        if product.name in done or not wanted:
            continue
        if time.monotonic() - started > options.budget:
            print("budget spent")
            break
        families = TILES[:1] if product.flops > LARGE else TILES
        record["rows"].append(measure(product, planner, options.rounds, families))
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(line(record["rows"][-1]), flush=True)
    print("\nproduct, us, cuBLAS us, ratio, share of roofline, lost by prediction, best candidate")
    for row in record["rows"]:
        print(line(row))
        print(f"    TFLOP/s: {best_of_each(row)}")


if __name__ == "__main__":
    main()
