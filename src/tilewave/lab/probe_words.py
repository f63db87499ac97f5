"""What the outcome of a probe means, in words; and the tables of lane maps."""

from __future__ import annotations

from tilewave.lab.probe_records import Reading
from tilewave.lab.probe_search import (
    PATCHES,
    READINGS,
    LaneMapCost,
    arrangements,
    attained,
    reading,
    search,
)
from tilewave.lab.registry import get_rung

NOISE = 0.015
"""A ratio this close to 1 is no difference: about three times the spread of five rounds on a quiet GPU."""

COMBINING = 0.03
"""A time per tile this much longer is no loss of reuse yet: walkers also store and combine partial sums."""

LOST_HITS = 5.0
"""A drop of the L2 hit rate, in points, that counts as one: two readings of a kernel differ by less."""

L2_HIT_RATE = "lts__t_sector_hit_rate.pct"
_NOT_TIMED = "Nothing was timed: what the difference is worth, only a GPU can tell."


def change(ratio: float) -> str:
    """A ratio of throughputs for people: "12 % faster", "no faster or slower"."""
    if abs(ratio - 1) <= NOISE:
        return "as fast (within noise)"
    return f"{abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'}".replace("%", " %")


def no_loads(at: Reading) -> list[str]:
    """Words for ``no-loads``."""
    ratio = at.ratio("no-loads")
    if ratio is None:
        return [_NOT_TIMED]
    lines = [f"Without loads and stores the kernel is {change(ratio)}."]
    if ratio > 1 + NOISE:
        lines.append(
            f"Copying, that is issuing the instructions and waiting for them, takes at most "
            f"{100 - 100 / ratio:.0f} % of rung 12's time here; stores-only and same-slice tell them apart."
        )
    else:
        lines.append("Copying costs rung 12 nothing that could be saved here.")
    return lines


def stores_only(at: Reading) -> list[str]:
    """Words for ``stores-only``."""
    ratio = at.ratio("stores-only")
    if ratio is None:
        return [_NOT_TIMED]
    return [
        f"With the stores but without the loads the kernel is {change(ratio)} than rung 12."
        if abs(ratio - 1) > NOISE
        else "With the stores but without the loads it is as fast as rung 12: the loads are free here.",
        "What is missing to the result of no-loads is the price of storing into shared memory.",
    ]


def same_slice(at: Reading) -> list[str]:
    """Words for ``same-slice``."""
    ratio = at.ratio("same-slice")
    lines = []
    own, base = at.build("same-slice"), at.build("masked")
    if own is not None and base is not None:
        figures = [f"{b.registers} registers and {b.spill_store_bytes} bytes of spills" for b in (own, base)]
        lines.append(
            f"Both masked kernels have {figures[0]}: what differs is where their data comes from."
            if figures[0] == figures[1]
            else f"The compiler gave the same slice {figures[0]}, every slice {figures[1]}: part of the "
            "difference may be its doing."
        )
    if ratio is None:
        return [*lines, _NOT_TIMED]
    if abs(ratio - 1) <= NOISE:
        lines.append(
            "Copies from a cache are no faster than copies from global memory: rung 12 does not wait for "
            "global memory. What copying costs is the issue of its instructions, so copies that start "
            "earlier cannot help."
        )
    elif ratio > 1:
        lines.append(
            f"With its data in a cache the kernel is {change(ratio)}: here rung 12 does wait for global "
            "memory, and copies that start earlier could help."
        )
    else:
        lines.append(
            f"The same slice makes the kernel {change(ratio)}: what all blocks ask for at once is no "
            "faster to get. Waiting for global memory is not what is seen."
        )
    return lines


def transpose(at: Reading) -> list[str]:
    """Words for ``transpose-and-wide-loads``."""
    ratios = {key: at.ratio(key) for key in ("transpose", "transpose-4", "wide", "both")}
    if ratios["wide"] is None or ratios["both"] is None:
        return [_NOT_TIMED]
    told = [f"{_name(key)} {change(r)}" for key, r in ratios.items() if r is not None]
    lines = [f"Against rung 06: {', '.join(told)}."]
    lines.append(
        "The wide loads carry the gain, as the article found."
        if ratios["wide"] - 1 > (ratios["both"] - 1) / 2 and ratios["wide"] > 1 + NOISE
        else "The gain does not come from the wide loads alone, unlike in the article."
    )
    if ratios["transpose"] is not None and ratios["transpose"] < 1 - NOISE:
        lines.append(
            "A transposing store of single floats puts a warp's 32 floats into one bank: its passes outweigh "
            "whatever the transpose saves."
        )
    if ratios["transpose-4"] is not None and ratios["transpose-4"] > 1 + NOISE:
        lines.append(
            "Where only four floats meet in a bank the transpose pays by itself, unlike in the article: how "
            "the copy is dealt to threads decides."
        )
    return lines


def _name(key: str) -> str:
    return {
        "transpose": "the transpose alone",
        "transpose-4": "the transpose with four threads a row",
        "wide": "the wide loads alone",
        "both": "both together",
    }[key]


def untransposed(at: Reading) -> list[str]:
    """Words for ``untransposed``."""
    plain, wide = at.ratio("untransposed"), at.ratio("untransposed-wide")
    if plain is None:
        return [_NOT_TIMED]
    lines = [f"Without the transpose rung 15 is {change(plain)} (the article: 2 to 4 % slower)."]
    if plain < 1 - NOISE:
        counted, base = at.counted("untransposed"), at.counted("rung-15")
        if counted is not None and base is not None and base.shared_load_passes:
            more = counted.shared_load_passes / base.shared_load_passes
            lines.append(f"Its reads of shared memory need x {more:.2f} as many passes.")
    if wide is not None:
        lines.append(
            "But only without the transpose can A be copied four floats at a time, and then the kernel is "
            f"{change(wide)}" + (": one makes up for the other." if abs(wide - 1) <= NOISE else ".")
        )
    return lines


def padding(at: Reading) -> list[str]:
    """Words for ``padding``."""
    padded, split = at.ratio("padding"), at.ratio("splitting")
    counted = at.counted("padding")
    lines = []
    if counted is not None and counted.shared_load_conflicts == 0:
        lines.append("Padding removes every conflict of the reads, as splitting does, for 2 KiB a block.")
    if padded is None or split is None:
        return [*lines, _NOT_TIMED]
    lines.append(f"Padding makes rung 08 {change(padded)}, splitting {change(split)}.")
    if split - padded > NOISE:
        lines.append("Splitting does more: it spends no memory on gaps and no instructions on skipping them.")
    elif padded - split > NOISE:
        lines.append("Padding does more, for its memory.")
    else:
        lines.append("So padding would do, for its memory.")
    return lines


def resident(at: Reading) -> list[str]:
    """Words for ``resident-blocks``."""
    rung, sms = get_rung(6), at.spec.sms
    tiles = (-(-at.at.size // rung.tile.bm)) ** 2
    lines = [f"N = {at.at.size}: {tiles} tiles for {sms} SMs."]
    if tiles <= sms:
        lines.append(
            "No SM gets a second block at all, so this size cannot show anything on this GPU; the article's "
            "GB10 has 48 SMs."
        )
    ratio = at.ratio("two")
    if ratio is None:
        return [*lines, _NOT_TIMED]
    lines.append(
        f"With two resident blocks it is {change(ratio)} than with one.".replace("noise) than", "noise) as")
    )
    if tiles > sms and abs(ratio - 1) <= NOISE:
        lines.append(
            "Two blocks that share an SM take as long as one after the other: its units are busy anyway."
        )
    elif tiles > sms and ratio > 1:
        lines.append("One block alone leaves the SM idle at times, and the second fills the gaps.")
    return lines


def l2_reuse(at: Reading) -> list[str]:
    """Words for ``l2-reuse``."""
    tile, size, sms = get_rung(15).tile, at.at.size, at.spec.sms
    tiles = -(-size // tile.bm) * -(-size // tile.bn)
    waves, share = -(-tiles // sms), tiles / sms
    lines = [
        f"N = {size}: {tiles} tiles for {sms} SMs. The busiest SM of rung 15 computes {waves}, each walker "
        f"of rung 19 {share:.2f}."
    ]
    plain, walk = at.milliseconds("rung-15"), at.milliseconds("walk")
    if plain is None or walk is None:
        return [*lines, _NOT_TIMED]
    per_plain, per_walk = 1e3 * plain / waves, 1e3 * walk / share
    lines.append(
        f"Time per tile: {per_plain:.0f} us in rung 15, {per_walk:.0f} us in rung 19: "
        f"{100 * per_walk / per_plain - 100:+.0f} % (the article: about +40 %)."
    )
    costs = per_walk / per_plain > 1 + COMBINING
    hits = [at.metric(key, L2_HIT_RATE) for key in ("rung-15", "walk")]
    if hits[0] is None or hits[1] is None:
        lines.append("The L2 hit rate was not read: it needs Nsight Compute's ncu.")
    else:
        lines.append(f"L2 hit rate: {hits[0]:.1f} % in rung 15, {hits[1]:.1f} % in rung 19.")
        lost = hits[0] - hits[1]
        if lost > LOST_HITS:
            lines.append(
                "The walkers do lose reuse, and pay for it."
                if costs
                else "The walkers do lose reuse, but this GPU's memory serves the misses in time."
            )
        elif costs:
            lines.append("The walkers lose no reuse; storing and combining partial sums costs the time.")
        operands = 3 * 4 * size**2
        if operands <= at.spec.l2_bytes:
            lines.append(
                f"A, B and C ({operands / 2**20:.0f} MiB) fit into this GPU's L2 "
                f"({at.spec.l2_bytes / 2**20:.0f} MiB): reuse cannot be lost."
            )
    return lines


def half_warps(at: Reading) -> list[str]:
    """Words for ``half-warps``."""
    names = {"rows": "two rows of eight", "square": "the square", "square-z": "the square in Z order"}
    told, passes = [], {}
    for key, name in names.items():
        counted = at.counted(key)
        if counted is not None and counted.passes_per_read is not None:
            passes[key] = counted.passes_per_read
            told.append(f"{name} {passes[key]:.2f}")
    lines = [f"Passes of an average read: {', '.join(told)}."] if told else []
    square, z_order = at.ratio("square"), at.ratio("square-z")
    if square is None or z_order is None:
        return [*lines, _NOT_TIMED]
    lines.append(
        f"Against two rows of eight the square is {change(square)}, the square in Z order {change(z_order)}."
    )
    if len(passes) == len(names) and passes["square-z"] < passes["rows"] and z_order <= 1 + NOISE:
        lines.append(
            "Fewer passes buy nothing here, as the article came to suspect: they do not limit rung 15."
        )
    return lines


def lane_maps(at: Reading) -> list[str]:
    """Words for ``lane-maps``."""
    small, large = at.ratio("best-8x8"), at.ratio("best-16x8")
    if small is None or large is None:
        return [_NOT_TIMED]
    lines = [f"With the cheapest lane map rung 12 is {change(small)}, rung 15 {change(large)}."]
    verdicts = {"rung 12": small > 1 + NOISE, "rung 15": large > 1 + NOISE}
    for limits, verb in ((True, "limit"), (False, "do not limit")):
        which = [name for name, verdict in verdicts.items() if verdict is limits]
        if which:
            lines.append(f"Passes of shared memory {verb} {' and '.join(which)} here.")
    return lines


def arrangement_tables() -> list[str]:
    """Which passes the two half-warp arrangements can need, and which give the article's figures."""
    found = arrangements()
    lines = [
        "Half-warps of a 16 x 8 patch, A transposed: every order of the lane's bits, every split of rows and "
        "columns. Passes that the rule gives, with the number of lane maps:"
    ]
    for name, costs in found.items():
        for which in READINGS:
            values = ", ".join(f"{value:g} ({number})" for value, number in attained(costs, which).items())
            lines.append(f"  {name}, {which}: {values}")
    claims = (
        ("two rows of eight", 4.0, 0.25, "four passes (measured)"),
        ("4 x 4 square", 3.0, 0.25, "three (hoped for)"),
        ("4 x 4 square", 5.0, 0.35, "about five (measured)"),
    )
    lines.append("Lane maps that give the article's figures, if they mean this load:")
    for name, wanted, within, said in claims:
        for which in READINGS:
            matching = [cost for cost in found[name] if abs(reading(cost, which) - wanted) <= within]
            lines.append(f"  {name}, {said}, for {which}: {_matching(matching, len(found[name]), which)}")
    lines.append(
        "The article names neither the order of its lanes nor the split behind these figures, nor whether "
        "they are those of one load or an average: they do not determine the mapping, and the rule is not "
        "bent to them."
    )
    return lines


def _matching(matching: list[LaneMapCost], total: int, which: str) -> str:
    if not matching:
        return "no lane map"
    exact = sorted({round(reading(cost, which), 2) for cost in matching})
    example = min(
        matching, key=lambda cost: (cost.row_group + cost.column_group, cost.row_bits, cost.column_bits)
    )
    values = " or ".join(f"{value:g}" for value in exact)
    return f"{len(matching)} of {total} lane maps need {values}, such as {example}"


def search_tables() -> list[str]:
    """The fewest passes possible for each patch."""
    lines = [
        "Fewest passes of a warp for one step of K, over every order of the lane's bits and every split of "
        "rows and columns:"
    ]
    for tm, tn in PATCHES:
        costs = search(tm, tn)
        least = costs[0]
        ties = sum(cost.passes == least.passes for cost in costs)
        loads = len(least.a_passes) + len(least.b_passes)
        lines.append(
            f"  {tm} x {tn}: {least.passes} passes for {loads} loads ({ties} of {len(costs)} maps; the worst "
            f"needs {costs[-1].passes}), such as {least}"
        )
    lines.append(
        "No 16-byte load of a full warp takes fewer than two passes by the rule, so these are optimal: A's "
        "lanes agree with lane^1 and B's with lane^2, or the other way round."
    )
    return lines
