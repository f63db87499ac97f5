"""Every exception that a user of tilewave can meet."""

from __future__ import annotations


class TilewaveError(Exception):
    """Base of all errors raised by tilewave."""


class UsageError(TilewaveError, ValueError):
    """A request that makes no sense: an unknown name, a size out of range, an unwritable output."""


class OperandTypeError(TilewaveError, TypeError):
    """An operand that is no float32 array: the message names it and the cast to make."""


class NotBuiltError(TilewaveError, NotImplementedError):
    """Something that tilewave means to offer and does not offer yet."""


class ToolchainError(TilewaveError):
    """NVRTC or the driver is missing, too old, or does not know the device."""


class CompileError(ToolchainError):
    """A kernel's source does not compile; the message holds the compiler's log with file and line."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        """Travel between processes with the log (an exception keeps only its message by itself)."""
        return CompileError, (str(self), self.log)


class DeviceError(TilewaveError):
    """No usable GPU, or a call of the CUDA driver failed."""


class CaptureError(DeviceError):
    """Something that cannot be done while a stream is captured; `prepare` does it ahead."""


class EmulationError(TilewaveError):
    """The emulated kernel did something that is wrong or that the emulator does not know."""


class UnknownInstructionError(EmulationError):
    """PTX or machine code holds an instruction or a form of one that the emulator does not execute."""


class MemoryFault(EmulationError):
    """An access outside every buffer, outside shared memory, or misaligned.

    `lane` is the index of the first faulting thread among those executed together, `address` what it
    accessed.
    """

    def __init__(self, message: str, *, lane: int | None = None, address: int | None = None) -> None:
        super().__init__(message)
        self.lane = lane
        self.address = address


class BarrierError(EmulationError):
    """A barrier that not all threads of a block reach, or a deadlock."""


class RaceError(EmulationError):
    """Two warps touch one word of shared memory, one of them writing, without a barrier between them."""


class MeasurementError(TilewaveError):
    """A measurement that cannot be right: a rate above the peak, an output never written, a time of zero."""
