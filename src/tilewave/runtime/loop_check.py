"""Whether a kernel's new loop gives the bits of the compiler's loop on this GPU: run once, and remembered.

A *verdict* is kept in the program cache, under both machine codes, the GPU's model and the driver's version.
Before the new kernel runs for the first time a note of it is left there: should the process die in the
check, the next one finds the note, and after `ATTEMPTS` of them all keep to the compiler's loop. Processes
that start together wait for the first one's verdict.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import cache

CHECK_VERSION = 1
"""Part of every key; raise it when the check asks for more than before."""

PATIENCE_S = 60.0
"""How long a process waits for another one's check, which takes a second or so."""

ATTEMPTS = 2
"""Checks that may be begun: a process can be killed in one by chance, but hardly in two."""

_SUFFIX = ".verdict"
_LOCK = "verdicts.lock"

Bits = NDArray[np.uint32]


class Product(Protocol):
    """What is compared; ``finite``: no element of the result is NaN."""

    @property
    def finite(self) -> bool:
        """Whether no element of the result is NaN."""
        ...


_Product = TypeVar("_Product", bound=Product)


@dataclass(frozen=True)
class _Begun:
    """The note of checks that were begun."""

    attempts: int


@dataclass(frozen=True)
class Verdict:
    """Whether the new loop may be used; ``words`` say what was compared, or what differed."""

    same: bool
    words: str


def compare(
    products: Sequence[_Product],
    by_compiler: Callable[[_Product], Bits],
    by_pass: Callable[[_Product], Bits],
    about_to_run: Callable[[], None] = lambda: None,
) -> Verdict:
    """Compute all products by the compiler's kernel, then by the new one; the first other bit decides.

    Both functions return the bits of a matrix, and ``about_to_run`` is called between them.
    """
    start = time.perf_counter()
    expected = [by_compiler(product) for product in products]
    for product, bits in zip(products, expected, strict=True):
        # Nothing would be compared if neither kernel wrote anything.
        if product.finite and np.isnan(bits.view(np.float32)).any():
            return Verdict(False, f"the compiler's own kernel left NaN in {product}")
    about_to_run()
    for product, bits in zip(products, expected, strict=True):
        found = by_pass(product)
        wrong = np.argwhere(bits != found)
        if len(wrong):
            row, column = (int(index) for index in wrong[0])
            return Verdict(
                False,
                f"{len(wrong):,} of {bits.size:,} elements of {product} differ from the compiler's, first "
                f"out[{row}, {column}]: {found[row, column]:#010x}, not {bits[row, column]:#010x}",
            )
    seconds = time.perf_counter() - start
    return Verdict(True, f"{len(products)} products have the compiler's bits, compared in {seconds:.2f} s")


def verdict_key(compilers: bytes, new: bytes, symbol: str, gpu: str, driver: str) -> str:
    """What a verdict is kept under."""
    codes = [hashlib.sha256(image).hexdigest() for image in (compilers, new)]
    parts = [cache.FORMAT_VERSION, CHECK_VERSION, *codes, symbol, gpu, driver]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() + _SUFFIX


def remembered_verdict(
    key: str, check: Callable[[Callable[[], None]], Verdict]
) -> tuple[Verdict | None, bool]:
    """The verdict under ``key``, found out by ``check`` if it is not known, and whether it was found out now.

    None: another process is at it, and takes long. ``check`` calls its argument right before it runs the new
    kernel for the first time. An exception that it raises before leaves nothing behind; after one that it
    raises later no process tries the new kernel again; either is passed on. Safe to call from any thread and
    process.
    """
    if (verdict := _finished(cache.load_entry(key, _decode))) is not None:
        return verdict, False
    with _guard, cache.exclusive(_LOCK, PATIENCE_S) as ours:
        found = cache.load_entry(key, _decode)
        if (verdict := _finished(found)) is not None:
            return verdict, False
        if not ours:
            return None, False
        begun = found.attempts if isinstance(found, _Begun) else 0  # and nobody is at it any more
        if begun < ATTEMPTS:
            verdict = _made(key, check, begun + 1)
        else:
            verdict = Verdict(False, f"{begun} checks on this GPU never came to their end")
        cache.store_entry(key, _encode(verdict))
        return verdict, True


def _made(key: str, check: Callable[[Callable[[], None]], Verdict], attempt: int) -> Verdict:
    begun = False

    def about_to_run() -> None:
        nonlocal begun
        begun = True
        cache.store_entry(key, cache.seal({"kind": "begun", "attempts": attempt}, []))

    try:
        return check(about_to_run)
    except Exception as error:
        if begun:
            cache.store_entry(key, _encode(Verdict(False, f"it failed when it was tried: {error}")))
        raise
    except BaseException:  # the user interrupted it, which says nothing of the kernel
        if begun:
            cache.remove_entry(key)
        raise


def _finished(found: object) -> Verdict | None:
    return found if isinstance(found, Verdict) else None


def _encode(verdict: Verdict) -> bytes:
    return cache.seal({"kind": "verdict", "same": verdict.same, "words": verdict.words}, [])


def _decode(data: bytes) -> Verdict | _Begun | None:
    """The verdict in an entry, or the note of begun checks; None for anything else."""
    opened = cache.unseal(data)
    header = {} if opened is None else opened[0]
    same, words, attempts = (header.get(name) for name in ("same", "words", "attempts"))
    if header.get("kind") == "verdict" and isinstance(same, bool) and isinstance(words, str):
        return Verdict(same, words)
    return _Begun(attempts) if header.get("kind") == "begun" and isinstance(attempts, int) else None


_guard = threading.Lock()
"""The lock between processes does not keep threads apart."""


def _renew_lock() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
