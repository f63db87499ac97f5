"""How PTX's Hopper instructions become calls of `HopperLanes`."""

from __future__ import annotations

from tilewave.emulator import memory_opcodes
from tilewave.emulator.codegen import Emitter
from tilewave.emulator.handlers import Handlers
from tilewave.emulator.hopper.accumulators import fragments
from tilewave.emulator.hopper.matrix import BF16, F16, TF32
from tilewave.emulator.memory_opcodes import address_source
from tilewave.emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    TensorAddress,
    Vector,
)

opcode = Handlers()
"""The opcodes of this file."""

_SCOPES = frozenset(["cta", "cluster", "gpu", "sys", "release", "acquire", "relaxed"])
_SHARED = frozenset(["shared", "shared::cta", "shared::cluster"])


def shared_address(e: Emitter, operand: Operand, spaces: set[str]) -> tuple[str, bool]:
    """Expression for shared addresses as one a lane, and whether they are generic."""
    if not isinstance(operand, Address):
        raise e.unknown("expected an address")
    generic = not spaces & _SHARED
    return f"x.spread({address_source(e, operand)})", generic


def unknown_modifiers(e: Emitter, i: Instruction, known: frozenset[str] | set[str]) -> None:
    """Refuse modifiers that mean something else."""
    strange = [m for m in i.modifiers if m not in known]
    if strange:
        raise e.unknown(f"modifier .{strange[0]} is not emulated")


# -- mbarriers ----------------------------------------------------------------------------------------------

_MBARRIER = frozenset(
    [
        "init",
        "inval",
        "arrive",
        "arrive_drop",
        "expect_tx",
        "complete_tx",
        "noComplete",
        "try_wait",
        "test_wait",
        "parity",
        "b64",
    ]
)


@opcode("mbarrier")
def _mbarrier(e: Emitter, i: Instruction) -> None:
    unknown_modifiers(e, i, _MBARRIER | _SCOPES | _SHARED)
    kind, spaces = i.modifiers[0], set(i.modifiers)
    if "noComplete" in spaces:
        raise e.unknown()
    me = e.constant(i)
    if kind in ("arrive", "arrive_drop"):
        _arrive(e, i, kind == "arrive_drop")
    elif kind in ("try_wait", "test_wait"):
        address, generic = shared_address(e, i.operands[1], spaces)
        parity = "parity" in spaces
        state = e.source(i.operands[2], "u4" if parity else "u8")
        done = e.temporary("b1")
        relaxed = "relaxed" in spaces
        e.line(
            f"x.mbarrier_wait({me}, {address}, {generic}, {state}, {parity}, {done}, {e.guard}, {relaxed})"
        )
        e.assign(e.destination(i.operands[0], "b1"), done)
    else:
        address, generic = shared_address(e, i.operands[0], spaces)
        if kind == "init":
            e.line(f"x.mbarrier_init({me}, {address}, {generic}, {e.source(i.operands[1], 'u4')}, {e.guard})")
        elif kind == "inval":
            e.line(f"x.mbarrier_inval({me}, {address}, {generic}, {e.guard})")
        elif kind in ("expect_tx", "complete_tx"):
            size = e.source(i.operands[1], "u4")
            e.line(f"x.mbarrier_bytes({me}, {address}, {generic}, {size}, {e.guard}, {kind == 'expect_tx'})")
        else:
            raise e.unknown()


def _arrive(e: Emitter, i: Instruction, drop: bool) -> None:
    spaces = set(i.modifiers)
    has_token = not isinstance(i.operands[0], Address)
    operands = i.operands[1:] if has_token else i.operands
    address, generic = shared_address(e, operands[0], spaces)
    expects = "expect_tx" in spaces
    last = e.source(operands[1] if len(operands) > 1 else Immediate(1), "u4")
    count, size = (e.source(Immediate(1), "u4"), last) if expects else (last, "None")
    tokens = e.temporary("u8")
    relaxed = "relaxed" in spaces
    arguments = f"{address}, {generic}, {count}, {size}, {tokens}, {e.guard}, {drop}, {relaxed}"
    e.line(f"x.mbarrier_arrive({e.constant(i)}, {arguments})")
    if has_token and not isinstance(i.operands[0], Sink):
        e.assign(e.destination(i.operands[0], "u8"), tokens)


# -- bulk copies --------------------------------------------------------------------------------------------

_BULK = frozenset(
    [
        "async",
        "bulk",
        "tensor",
        "tile",
        "global",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "bulk_group",
        "L2::cache_hint",
        "1d",
        "2d",
        "3d",
        "4d",
        "5d",
    ]
)


@opcode("cp")
def _cp(e: Emitter, i: Instruction) -> None:
    if i.modifiers[:3] == ("async", "mbarrier", "arrive"):
        spaces = set(i.modifiers[3:])
        if spaces - {"noinc", "shared", "shared::cta", "b64"}:
            raise e.unknown()
        address, generic = shared_address(e, i.operands[0], spaces)
        e.line(
            f"x.arrive_after_copies({e.constant(i)}, {address}, {generic}, {'noinc' in spaces}, {e.guard})"
        )
        return
    if i.modifiers[:2] != ("async", "bulk"):
        memory_opcodes.opcode["cp"](e, i)
        return
    modifiers = i.modifiers[2:]
    if modifiers == ("commit_group",):
        e.line(f"x.commit_bulk({e.constant(i)}, {e.guard})")
        return
    if modifiers[:1] == ("wait_group",):
        if len(i.operands) != 1 or not isinstance(i.operands[0], Immediate):
            raise e.unknown()
        e.line(f"x.wait_bulk({e.constant(i)}, {i.operands[0].value}, {'read' in modifiers[1:]}, {e.guard})")
        return
    if modifiers[:1] == ("prefetch",):
        return
    unknown_modifiers(e, i, _BULK | _SHARED)
    direction = [m for m in modifiers if m in _SHARED or m == "global"]
    if len(direction) != 2 or "global" not in direction:
        raise e.unknown("a bulk copy between shared memories is not emulated")
    operands = i.operands[:-1] if "L2::cache_hint" in modifiers else i.operands
    if direction[0] == "global":
        _bulk_store(e, i, operands)
    else:
        _bulk_load(e, i, operands)


def _tile(e: Emitter, i: Instruction, operand: Operand, size: Operand | None) -> str:
    """Expression that makes one lane's tile: x.box(...) or x.run(...)."""
    if isinstance(operand, TensorAddress):
        rank = next((int(m[0]) for m in i.modifiers if m in ("1d", "2d", "3d", "4d", "5d")), 0)
        items = operand.coordinates.items
        if len(items) != rank:
            raise e.unknown(f"expected {rank} coordinates")
        space = "generic"
        if isinstance(operand.map.base, Symbol) and operand.map.base.name in e.layout.parameters:
            space = "param"
        coordinates = ", ".join(f"x.spread({e.source(item, 'i4')})" for item in items)
        address = f"x.spread({address_source(e, operand.map)})"
        return f"x.boxes({e.constant(i)}, {address}, {space!r}, [{coordinates}], {e.guard})"
    if not isinstance(operand, Address) or size is None:
        raise e.unknown()
    address = f"x.spread({address_source(e, operand)})"
    return f"x.runs({e.constant(i)}, {address}, x.spread({e.source(size, 'u4')}), {e.guard})"


def _bulk_load(e: Emitter, i: Instruction, operands: tuple[Operand, ...]) -> None:
    tensor = "tensor" in i.modifiers
    if "mbarrier::complete_tx::bytes" not in i.modifiers:
        raise e.unknown("a load without an mbarrier")
    target, source = operands[0], operands[1]
    size = None if tensor else operands[2]
    rest = operands[2 if tensor else 3 :]
    masks = "None"
    if "multicast::cluster" in i.modifiers:
        masks = f"x.spread({e.source(rest[1], 'u2')})"
    elif len(rest) != 1:
        raise e.unknown()
    if not isinstance(target, Address) or not isinstance(rest[0], Address):
        raise e.unknown()
    where, barrier = (f"x.spread({address_source(e, a)})" for a in (target, rest[0]))
    tiles = _tile(e, i, source, size)
    e.line(f"x.bulk_load({e.constant(i)}, {where}, {tiles}, {barrier}, {masks}, {e.guard})")


def _bulk_store(e: Emitter, i: Instruction, operands: tuple[Operand, ...]) -> None:
    if "bulk_group" not in i.modifiers:
        raise e.unknown("a store without a bulk group")
    size = None if "tensor" in i.modifiers else operands[2]
    source = operands[1]
    if not isinstance(source, Address):
        raise e.unknown()
    where = f"x.spread({address_source(e, source)})"
    e.line(f"x.bulk_store({e.constant(i)}, {where}, {_tile(e, i, operands[0], size)}, {e.guard})")


# -- products -----------------------------------------------------------------------------------------------

_INPUTS = {"f16": F16, "bf16": BF16, "tf32": TF32}


@opcode("wgmma")
def _wgmma(e: Emitter, i: Instruction) -> None:
    kind = i.modifiers[0]
    if e.guard is not None:
        raise e.unknown("a guarded wgmma instruction")
    me = e.constant(i)
    if kind == "fence":
        e.line(f"x.whole_warpgroups({me})")
    elif kind == "commit_group":
        e.line(f"x.commit_products({me})")
    elif kind == "wait_group":
        count = i.operands[0]
        if not isinstance(count, Immediate):
            raise e.unknown()
        e.line(f"x.wait_products({me}, {count.value})")
    elif kind == "mma_async":
        _product(e, i)
    else:
        raise e.unknown()


def _product(e: Emitter, i: Instruction) -> None:
    shape = i.modifiers[3] if len(i.modifiers) == 7 else ""
    types = i.modifiers[4:]
    if i.modifiers[1:3] != ("sync", "aligned") or types[0] != "f32" or types[1] != types[2]:
        raise e.unknown()
    if types[1] not in _INPUTS:
        raise e.unknown(f"products of .{types[1]} are not emulated")
    depth = 8 if types[1] == "tf32" else 16
    if not shape.startswith("m64n") or not shape.endswith(f"k{depth}"):
        raise e.unknown(f"the shape .{shape} does not exist")
    columns = int(shape[4 : -len(f"k{depth}")])
    accumulators, a, b, scale, *immediates = i.operands
    if columns % 8 or not 8 <= columns <= 256 or not isinstance(accumulators, Vector):
        raise e.unknown(f"the shape .{shape} does not exist")
    in_registers = isinstance(a, Vector)
    transposes = 0 if depth == 8 else 1 if in_registers else 2
    values = [item.value for item in immediates if isinstance(item, Immediate)]
    if len(values) != len(immediates) or len(values) != 2 + transposes:
        raise e.unknown(f"expected {2 + transposes} immediates")
    if not set(values[:2]) <= {1, -1} or not set(values[2:]) <= {0, 1}:
        raise e.unknown("an immediate out of range")
    transposed = [False, False]
    if transposes:
        transposed[1] = bool(values[-1])
        transposed[0] = bool(values[2]) if transposes == 2 else False
    if len(accumulators.items) != columns // 2:
        raise e.unknown(f"expected {columns // 2} accumulators")
    rows = [_register_row(e, item, "f4") for item in accumulators.items]
    if in_registers:
        assert isinstance(a, Vector)
        if len(a.items) != 4:
            raise e.unknown("expected 4 registers of A")
        source = f"[{', '.join(_register_row(e, item, 'u4') for item in a.items)}]"
    else:
        source = e.source(a, "u8")
    adds = f"x.spread({e.source(scale, 'b1')})"
    form = e.constant(_INPUTS[types[1]])
    facts = f"{form}, {columns}, {tuple(transposed)}, {tuple(v < 0 for v in values[:2])}"
    registers = e.constant(frozenset(fragments(i)))
    arguments = f"[{', '.join(rows)}], {source}, {e.source(b, 'u8')}, {adds}, {facts}, {registers}"
    e.line(f"x.product({e.constant(i)}, {arguments})")


def _register_row(e: Emitter, item: Operand, dtype: str) -> str:
    if not isinstance(item, Register) or item.bits != 32:
        raise e.unknown("expected a register of 32 bits")
    return e.row(item, dtype)


# -- barriers and fences ------------------------------------------------------------------------------------


@opcode("bar", "barrier")
def _bar(e: Emitter, i: Instruction) -> None:
    modifiers = [m for m in i.modifiers if m not in ("cta", "aligned")]
    if i.opcode == "barrier" and modifiers[:1] == ["cluster"]:
        _cluster_barrier(e, i, modifiers[1:])
    elif not e.asynchronous or modifiers == ["warp", "sync"]:
        memory_opcodes.opcode["bar"](e, i)
    elif modifiers not in (["sync"], ["arrive"]) or not 1 <= len(i.operands) <= 2:
        raise e.unknown()
    else:
        number, count = (e.source(operand, "u4") for operand in (*i.operands, Immediate(0))[:2])
        if modifiers == ["sync"]:
            e.line(f"x.at_barrier({e.constant(i)}, {number}, {count})")
        elif len(i.operands) != 2:
            raise e.unknown("bar.arrive needs a number of threads")
        else:
            e.line(f"x.arrive_at_barrier({e.constant(i)}, {number}, {count}, {e.guard})")


def _cluster_barrier(e: Emitter, i: Instruction, modifiers: list[str]) -> None:
    """`barrier.cluster.arrive` and `.wait`; the machine holds those who wait."""
    if modifiers[:1] == ["arrive"]:
        e.line(f"x.cluster_arrive({e.constant(i)}, {e.guard}, {'relaxed' in modifiers})")
    elif modifiers[:1] != ["wait"]:
        raise e.unknown()


@opcode("fence")
def _fence(e: Emitter, i: Instruction) -> None:
    proxies = {modifier.split("::")[0] for modifier in i.modifiers}
    if e.asynchronous and ("mbarrier_init" in proxies or {"proxy", "async"} <= proxies):
        e.line(f"x.proxy_fence({'mbarrier_init' in proxies}, {e.guard})")


# -- registers, warps, clusters -----------------------------------------------------------------------------


@opcode("setmaxnreg")
def _setmaxnreg(e: Emitter, i: Instruction) -> None:
    count = i.operands[0]
    if i.modifiers[0] not in ("inc", "dec") or not isinstance(count, Immediate) or e.guard is not None:
        raise e.unknown()
    e.line(f"x.set_registers({e.constant(i)}, {count.value}, {i.modifiers[0] == 'inc'})")


@opcode("elect")
def _elect(e: Emitter, i: Instruction) -> None:
    target = i.operands[0]
    if i.modifiers != ("sync",) or not isinstance(target, Pair) or e.guard is not None:
        raise e.unknown()
    leader, chosen = e.temporary("u4"), e.temporary("b1")
    e.line(f"x.elect({e.constant(i)}, {e.source(i.operands[1], 'u4')}, {leader}, {chosen})")
    for operand, name, dtype in ((target.first, leader, "u4"), (target.second, chosen, "b1")):
        if not isinstance(operand, Sink):
            e.assign(e.destination(operand, dtype), name)


@opcode("mapa")
def _mapa(e: Emitter, i: Instruction) -> None:
    dtype = {"u32": "u4", "u64": "u8"}.get(i.modifiers[-1], "")
    if not dtype:
        raise e.unknown()
    address, rank = e.source(i.operands[1], dtype), e.source(i.operands[2], "u4")
    result = e.temporary(dtype)
    e.line(f"x.map_address({e.constant(i)}, x.spread({address}), x.spread({rank}), {result}, {e.guard})")
    e.assign(e.destination(i.operands[0], dtype), result)
