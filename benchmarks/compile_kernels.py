"""Fill the program cache for the GPU here, with all cores, so that what is measured later compiles nothing.

    PYTHONPATH=src python3 benchmarks/compile_kernels.py [--budget SECONDS] [--arch sm_90]

Compiles every kernel of the library, and puts what may have a new loop through the register-file pass. Each
kernel is in the cache as soon as it is compiled: a run that is cut off has not worked in vain.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

from tilewave.compiler import choose_arch, compiler_version
from tilewave.kernels import fp16x3
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal, outcome_for
from tilewave.kernels.ship import every_kernel


def wanted(arch: str) -> list[tuple[Instance, str]]:
    """Kernels with what each is compiled for, those that take longest first."""
    pairs = [(instance, arch) for instance in every_kernel()]
    if arch.startswith("sm_90"):
        pairs += [(instance, fp16x3.ARCHITECTURE) for instance in fp16x3.every_fp16x3_instance()]
    return sorted(pairs, key=lambda pair: pair[0].family not in (fp16x3.FAMILY, large_tile.name))


def compile_one(instance: Instance, arch: str) -> str:
    """Compile a kernel, and make its new loop where it may have one; what failed in words, else nothing."""
    try:
        program, kernel = compile_instance(instance, arch)
        if arch == "sm_90" and instance_refusal(instance) is None:
            outcome_for(instance, program, kernel)
    except Exception as error:  # the others are compiled all the same
        return f"{instance}: {type(error).__name__}: {error}"
    return ""


def compile_all(pairs: Iterable[tuple[Instance, str]], jobs: int, end: float) -> tuple[int, list[str]]:
    """How many were compiled by then, and what failed; none is begun when the time is over."""
    done, failures = 0, []
    # Spawned: NVRTC is loaded in every process, and none inherits threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, *pair) for pair in pairs]
        for future in as_completed(futures):
            failure = future.result()
            done += not failure
            if failure:
                failures.append(failure)
                print(failure, flush=True)
            if done % 25 == 0:
                print(f"{done} kernels", flush=True)
            if time.monotonic() > end:
                for waiting in futures:
                    waiting.cancel()
                break
    return done, failures


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--arch", help="what to compile for; the GPU's own by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    options = parser.parse_args()
    begun = time.monotonic()
    arch = options.arch
    if arch is None:
        from tilewave.device import query_device

        arch = choose_arch(query_device().compute_capability).arch
    pairs = [pair for pair in wanted(arch) if options.only in pair[0].name]
    done, failures = compile_all(pairs, options.jobs, begun + options.budget)
    print(
        f"{done} of {len(pairs)} kernels for {arch} by {compiler_version()} in "
        f"{time.monotonic() - begun:.0f} s"
    )
    return int(bool(failures) or done < len(pairs))


if __name__ == "__main__":
    sys.exit(main())
