"""Tiles, the kernel variants built on them, and whether a GPU can run one."""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.compiler.occupancy import occupancy
from tilewave.compiler.resources import Resources
from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Tile:
    """A block's tile of C and how its threads share it.

    ``bm`` x ``bn`` outputs a block, slices ``bk`` deep in ``stages`` shared-memory buffers, ``tm`` x ``tn``
    outputs a thread, so (bm / tm) * (bn / tn) threads.
    """

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("bm", "bn", "bk", "tm", "tn", "stages"):
            if getattr(self, name) < 1:
                raise UsageError(f"tile {self}: {name} must be at least 1, not {getattr(self, name)}")
        if self.bm % self.tm or self.bn % self.tn:
            raise UsageError(
                f"tile {self} is not a whole number of {self.tm}x{self.tn} patches: bm must be a multiple of "
                "tm and bn of tn"
            )

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}"

    @property
    def threads(self) -> int:
        """Threads a block."""
        return (self.bm // self.tm) * (self.bn // self.tn)

    @property
    def outputs(self) -> int:
        """Elements of C a block, and of one workspace slot."""
        return self.bm * self.bn

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block, without padding."""
        return self.stages * (self.bm + self.bn) * self.bk * FLOAT_BYTES

    def count(self, m: int, n: int) -> tuple[int, int]:
        """Tile rows and tile columns that cover an m x n product."""
        return -(-m // self.bm), -(-n // self.bn)


@dataclass(frozen=True)
class Variant:
    """A kernel that the planner can choose: a tile and what its code needs.

    ``registers`` a thread; ``least_capability`` is the oldest compute capability whose instructions it uses;
    ``about`` says in a few words what sets it apart.
    """

    name: str
    tile: Tile
    registers: int
    least_capability: tuple[int, int]
    about: str

    def __str__(self) -> str:
        return self.name

    def blocks_per_sm(self, spec: DeviceSpec) -> int:
        """Blocks that an SM of ``spec`` holds at once; 0 when it cannot hold one."""
        resources = Resources(self.registers, 0, 0, 0, self.tile.shared_bytes)
        return occupancy(resources, self.tile.threads, spec).blocks_per_sm

    def why_illegal(self, spec: DeviceSpec) -> str | None:
        """Why ``spec`` cannot run this variant, or None when it can."""
        tile = self.tile
        if spec.compute_capability < self.least_capability:
            need, have = (".".join(map(str, c)) for c in (self.least_capability, spec.compute_capability))
            return f"needs compute capability {need}, {spec.name} has {have}"
        if tile.threads > spec.threads_per_block:
            return f"{tile.threads} threads a block, {spec.name} allows {spec.threads_per_block}"
        if tile.threads % spec.warp_size:
            return f"{tile.threads} threads are not a whole number of warps of {spec.warp_size}"
        if self.registers > spec.registers_per_thread:
            return f"{self.registers} registers a thread, {spec.name} allows {spec.registers_per_thread}"
        if tile.shared_bytes > spec.shared_per_block:
            return f"{tile.shared_bytes} bytes of shared memory, {spec.name} allows {spec.shared_per_block}"
        if self.blocks_per_sm(spec) == 0:
            return f"{tile.threads} threads of {self.registers} registers do not fit an SM of {spec.name}"
        return None


# cp.async, which all variants of the second half of the article use, came with compute capability 8.0.
_CP_ASYNC = (8, 0)
# Registers: the article's figure for 128x256; for the others the most that any architecture takes, from
# docs/resources.md (rungs 16 and 17).
_REGISTERS_LARGE, _REGISTERS_OTHERS = 237, 255

LARGE = Variant(
    "128x256", Tile(128, 256, 16, 16, 8, 2), _REGISTERS_LARGE, _CP_ASYNC, "the big tile, A transposed"
)
TALL = Variant(
    "256x128",
    Tile(256, 128, 16, 16, 8, 2),
    _REGISTERS_OTHERS,
    _CP_ASYNC,
    "the alternative with twice the rows of A to copy",
)
SMALL = Variant(
    "128x128",
    Tile(128, 128, 16, 16, 8, 2),
    _REGISTERS_OTHERS,
    _CP_ASYNC,
    "128 threads, A untransposed, 16-byte copies",
)
DOUBLE_BUFFERED = Variant(
    "128x128 double-buffered",
    Tile(128, 128, 16, 8, 8, 2),
    128,  # the cap that __launch_bounds__(256, 2) sets
    (7, 5),
    "256 threads, 8x8 outputs a thread, no cp.async",
)
VARIANTS = {variant.name: variant for variant in (LARGE, TALL, SMALL, DOUBLE_BUFFERED)}
