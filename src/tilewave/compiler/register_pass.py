"""The register-file pass as the library uses it: done once a kernel, and kept.

The outcome for a kernel is looked for in the archive that came with the package, then in the program cache;
only then does `compiler.sass` make it, which takes about a second and the decoder of the emulator. It is
kept under the machine code that went in and the source text of the pass itself, so that neither a new
compiler nor a new version of the pass ever meets an old outcome.

``TILEWAVE_SASS_PASS=0`` switches the pass off.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tilewave.compiler import cache, shipped
from tilewave.compiler.records import Program

OFF_SWITCH = "TILEWAVE_SASS_PASS"
"""Environment variable: 0 leaves every kernel as the compiler made it; unset, empty and 1 mean on."""

KNOWN_COMPILERS = ("NVRTC 13.0.88", "NVRTC 13.5.37")
"""Compilers whose output the tests put through the pass."""
KNOWN_ARCHITECTURES = ("sm_90", "sm_90a")
"""Architectures whose register file was measured."""
KNOWN_KERNELS = {"_ZN8tilewave10large_tileI": 1024, "_ZN8tilewave9wide_tileI": 1536}
"""How symbols of kernels begin that are written for the pass, and the multiply-adds of their steady loop."""

_SUFFIX = ".loop"
_PACKAGE = Path(__file__).parent.parent
_SOURCES = (_PACKAGE / "compiler" / "sass", _PACKAGE / "emulator" / "sass")
"""What decides the outcome: the pass, and the decoder that it reads machine code with."""


@dataclass(frozen=True)
class PassOutcome:
    """A cubin with the new loop, or the reason why there is none; ``summary``: what the model predicts."""

    cubin: bytes | None = field(repr=False)
    reason: str | None
    summary: str = ""


def refusal(program: Program, symbol: str) -> str | None:
    """Why the pass does not even look at a kernel, or None."""
    if (reason := switched_off() or architecture_refusal(program.arch)) is not None:
        return reason
    if program.compiler not in KNOWN_COMPILERS:
        known = " and ".join(KNOWN_COMPILERS)
        return f"the pass was not tested with {program.compiler}, only with {known}"
    if not symbol.startswith(tuple(KNOWN_KERNELS)):
        return "the kernel is not written for the register-file pass"
    return None


def switched_off() -> str | None:
    """In words, that the pass is switched off; None where it is on.

    Whatever is neither 1 nor nothing is taken for off: who sets the variable to "no" does not want the pass.
    """
    value = os.environ.get("TILEWAVE_SASS_PASS", "")
    return None if value in ("", "1") else f"the register-file pass is switched off by {OFF_SWITCH}={value}"


def architecture_refusal(arch: str) -> str | None:
    """Why no kernel of an architecture is taken, or None."""
    if arch in KNOWN_ARCHITECTURES:
        return None
    return f"the register file of {arch} was not measured, only that of {' and '.join(KNOWN_ARCHITECTURES)}"


def pass_outcome(program: Program, symbol: str) -> PassOutcome:
    """What the pass makes of a kernel: shipped, kept from an earlier process, or made now.

    Nothing is raised for a kernel that the pass cannot take, whatever goes wrong in it: the outcome's
    ``reason`` says what did. Safe to call from any thread.
    """
    reason = refusal(program, symbol)
    if reason is not None:
        return PassOutcome(None, reason)
    key = outcome_key(program.cubin, symbol)
    with _guard:
        outcome = _outcomes.get((program.cubin, symbol))
        if outcome is None:
            outcome = _outcomes[program.cubin, symbol] = _looked_up(program, symbol, key)
        return outcome


def _looked_up(program: Program, symbol: str, key: str | None) -> PassOutcome:
    outcome = None
    if key is not None:
        outcome = shipped.load_entry(key, program.arch, decode) or cache.load_entry(key, decode)
    if outcome is None:
        try:
            outcome = made_outcome(program, symbol)
        except Exception as error:  # an assertion of the pass that does not hold costs speed, never a product
            return PassOutcome(None, f"the pass failed ({type(error).__name__}: {error})")
        if key is not None:
            cache.store_entry(key, encode(outcome))
    return outcome


def made_outcome(program: Program, symbol: str) -> PassOutcome:
    """What the pass makes of a kernel that `refusal` lets through, made now, whatever was kept."""
    from tilewave.compiler.sass import reemit  # needs the decoder of the emulator

    made = reemit(program, symbol)
    return PassOutcome(made.cubin, made.reason, "" if made.report is None else str(made.report))


def outcome_key(cubin: bytes, symbol: str) -> str | None:
    """What an outcome is kept under, in the cache and in a shipped archive; None: it cannot be kept."""
    of_pass = _pass_digest()
    if of_pass is None:
        return None
    parts = [cache.FORMAT_VERSION, of_pass, hashlib.sha256(cubin).hexdigest(), symbol]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() + _SUFFIX


def encode(outcome: PassOutcome) -> bytes:
    """An outcome as an entry of the cache or of an archive."""
    header = {"kind": "loop", "reason": outcome.reason, "summary": outcome.summary}
    return cache.seal(header, [outcome.cubin or b""])


def decode(data: bytes) -> PassOutcome | None:
    """The outcome in an entry; None if the entry is damaged or holds something else."""
    opened = cache.unseal(data)
    if opened is None:
        return None
    header, parts = opened
    reason, summary = header.get("reason"), header.get("summary")
    if header.get("kind") != "loop" or len(parts) != 1 or not isinstance(summary, str):
        return None
    if isinstance(reason, str) and not parts[0]:
        return PassOutcome(None, reason, summary)
    return PassOutcome(parts[0], None, summary) if reason is None and parts[0] else None


@functools.cache
def _pass_digest() -> str | None:
    """A digest of the pass's own source text; None where it cannot be read."""
    digest = hashlib.sha256()
    for directory in _SOURCES:
        try:
            texts = [(path.name, path.read_bytes()) for path in sorted(directory.glob("*.py"))]
        except OSError:
            return None
        if not texts:
            return None
        for name, text in texts:
            digest.update(f"{name} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()


_outcomes: dict[tuple[bytes, str], PassOutcome] = {}
_guard = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
