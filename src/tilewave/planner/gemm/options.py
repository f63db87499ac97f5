"""What a caller may ask of the planner."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral

from tilewave.errors import UsageError
from tilewave.messages import shown
from tilewave.planner.schedules import PIECE_BOUNDS, Schedule, ScheduleKind

WORKSPACE_LIMIT_BYTES = 256 * 2**20
"""Assumed: more than this for partial sums never pays; a plan that needs more is turned down."""

OFFERED = (
    ScheduleKind.DATA_PARALLEL,
    ScheduleKind.SPLIT_K,
    ScheduleKind.STREAM_K,
    ScheduleKind.STREAM_K_WALK,
)
"""The kinds of schedule that may be asked for by name; the lab's second attempt at stream-K by `Schedule`."""

_SPELLING = re.compile(r"([a-z_]+)(?::(\d+))?")


MOST_COUNTED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan must keep to.

    ``schedule``: a `Schedule`, or the name of a kind (``"split_k"``: any number of pieces;
    ``"split_k:8"``: eight). ``batch_invariant``: a row's bits depend neither on m nor on the batch, so
    only kernels that sum in the order of k, uncut, are used. ``max_sms``: at most so many SMs are in
    use, by launching at most so many blocks. ``workspace_limit``: most bytes of workspace.
    ``deterministic``: the same bits in every run; every plan keeps to that, and False allows nothing
    more yet.
    """

    schedule: Schedule | str | None = None
    deterministic: bool = True
    batch_invariant: bool = False
    max_sms: int | None = None
    workspace_limit: int = WORKSPACE_LIMIT_BYTES

    def __post_init__(self) -> None:
        for name in ("deterministic", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        for name, least in (("max_sms", 1), ("workspace_limit", 0)):
            value = getattr(self, name)
            if name == "max_sms" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
                raise UsageError(f"{name} must be an integer of at least {least}, not {shown(value)}")
            # NumPy's integers become Python's; a limit beyond what 64 bits can count is none.
            object.__setattr__(self, name, min(int(value), MOST_COUNTED))
        kind = self.wanted[0]
        if self.batch_invariant and kind not in (None, ScheduleKind.DATA_PARALLEL):
            raise UsageError(
                f"batch_invariant needs uncut tiles, so schedule may be 'data_parallel' or None, not "
                f"{self.schedule!s}"
            )

    @property
    def wanted(self) -> tuple[ScheduleKind | None, int | None]:
        """The kind of schedule asked for, and the pieces; None where any will do."""
        schedule = self.schedule
        if schedule is None:
            return None, None
        if isinstance(schedule, Schedule):
            return schedule.kind, schedule.pieces
        match = _SPELLING.fullmatch(schedule) if isinstance(schedule, str) else None
        if match is None or match[1] not in tuple(OFFERED):
            raise UsageError(
                f"schedule must be None, a Schedule or one of {', '.join(OFFERED)}, with a number of pieces "
                f"behind a colon if wanted ('split_k:8'); not {shown(schedule)}"
            )
        kind = ScheduleKind(match[1])
        if match[2] is None:
            least, most = PIECE_BOUNDS[kind]
            return kind, least if least == most else None
        return kind, Schedule(kind, int(match[2])).pieces
