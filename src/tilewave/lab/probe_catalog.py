"""The probes: of each its kernels (rungs with edits), what is expected of them, what the outcome means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewave.device import DeviceSpec
from tilewave.lab import probe_words as words
from tilewave.lab.probe_edits import Edit, EditedRung, edited, lane_map_edits
from tilewave.lab.probe_records import Expectation, Probe, Variant
from tilewave.lab.probe_search import search
from tilewave.lab.registry import get_rung


def _at(*sizes: int) -> Callable[[DeviceSpec], tuple[int, ...]]:
    return lambda spec: sizes


# -- What copying costs (rung 12) ---------------------------------------------------------------------------

_NO_LOAD_IN_LOOP = Edit("no loads in the loop", "    if (more) load(k0 + BK);\n", "")
_NO_STORE_IN_LOOP = Edit("no stores in the loop", "    if (more) store(buffer ^ 1);\n", "")
_NO_MORE = Edit("a flag that nobody needs", "    const bool more = k0 + BK < K;\n", "")
_FILL_BOTH = Edit(
    "the first slice goes into both buffers",
    "  store(0);\n  __syncthreads();\n",
    "  store(0);\n  store(1);\n  __syncthreads();\n",
)


def _masked_slice(name: str, mask: str) -> Edit:
    return Edit(
        name,
        "    if (more) load(k0 + BK);\n",
        f"""\
    if (more) {{
      int from;
      asm("and.b32 %0, %1, {mask};" : "=r"(from) : "r"(k0 + BK));
      load(from);
    }}
""",
    )


# One constant apart: for K below 2^30 the first mask leaves 0 and the second changes nothing. The compiler
# does not look into the instruction, so both kernels have the registers and spills of the rung itself.
_SAME_SLICE = _masked_slice("the first slice again", "0x40000000")
_EVERY_SLICE = _masked_slice("a mask that changes nothing", "0x3fffffff")
_DEPTH = get_rung(12).tile.bk


def _slices(size: int) -> int:
    return -(-size // _DEPTH)


_RUNG_12 = Variant("rung-12", "rung 12 as it is", edited(12), reported="about 15.7 TFLOP/s")

NO_LOADS = Probe(
    "no-loads",
    "What does rung 12 gain without its global loads?",
    (
        _RUNG_12,
        Variant(
            "no-loads",
            "no copies after the first slice",
            edited(12, _NO_LOAD_IN_LOOP, _NO_STORE_IN_LOOP, _NO_MORE, _FILL_BOTH, product=False),
            reported="20.2 TFLOP/s",
            reported_ratio=20.2 / 15.7,
        ),
    ),
    _at(4096),
    words.no_loads,
    (
        Expectation("no-loads", "global_loads", "only the first slice is loaded", lambda n: 1 / _slices(n)),
        Expectation(
            "no-loads", "shared_stores", "it is stored twice, and that is all", lambda n: 2 / _slices(n)
        ),
        Expectation("no-loads", "shared_loads", "the multiplication is untouched", 1.0),
        Expectation("no-loads", "thread_fma", "the multiplication is untouched", 1.0),
    ),
    about="Both buffers hold the first slice, so the multiplication works on real numbers.",
)

STORES_ONLY = Probe(
    "stores-only",
    "And if only the stores into shared memory come back?",
    (
        _RUNG_12,
        Variant(
            "stores-only",
            "stores, but no loads",
            edited(12, _NO_LOAD_IN_LOOP, product=False),
            reported="18.7 TFLOP/s",
            reported_ratio=18.7 / 15.7,
        ),
    ),
    _at(4096),
    words.stores_only,
    (
        Expectation(
            "stores-only", "global_loads", "only the first slice is loaded", lambda n: 1 / _slices(n)
        ),
        Expectation("stores-only", "shared_stores", "every slice's stores remain", 1.0),
        Expectation("stores-only", "shared_store_passes", "to the same places", 1.0),
    ),
    about="The first slice stays in registers and is stored again for every slice.",
)

SAME_SLICE = Probe(
    "same-slice",
    "Does rung 12 wait for global memory, or does it pay for issuing the copies?",
    (
        _RUNG_12,
        Variant("masked", "rung 12 with the mask, every slice", edited(12, _EVERY_SLICE)),
        Variant(
            "same-slice",
            "the first slice, again and again",
            edited(12, _SAME_SLICE, product=False),
            against="masked",
            reported="15.7 TFLOP/s",
            reported_ratio=1.0,
        ),
    ),
    _at(4096),
    words.same_slice,
    (
        Expectation("masked", "global_loads", "the mask takes nothing away", 1.0),
        Expectation("same-slice", "global_loads", "all copies are still issued", 1.0),
        Expectation("same-slice", "shared_stores", "all copies are still issued", 1.0),
        Expectation("same-slice", "registers", "a constant is all that differs", 1.0),
    ),
    about="All loads and stores are issued, but the data is always in a cache. Both kernels mask the slice's "
    "number, by constants that let nothing or everything through, so the compiler treats them alike.",
)

# -- The transpose and the wide loads apart (rungs 06 to 08) -------------------------------------------------

_SHARED_TRANSPOSED = Edit(
    "A's slice is transposed",
    "  __shared__ float As[BM][BK];\n  __shared__ float Bs[BK][BN];\n",
    "  __shared__ __align__(16) float As[BK][BM];\n  __shared__ __align__(16) float Bs[BK][BN];\n",
)
_STORE_TRANSPOSED = Edit("A is stored transposed", "      As[r][c] = ", "      As[c][r] = ")
_READ_TRANSPOSED = Edit("A is read transposed", "a[i] = As[ty * TM + i][k]", "a[i] = As[k][ty * TM + i]")
_FOUR_NEIGHBOURS = Edit(
    "four neighbours copy four floats of a row of A",
    "      const int r = i / BK, c = i % BK;\n",
    "      const int r = i / 4 % BM, c = i / (4 * BM) * 4 + i % 4;\n",
)

TRANSPOSE = Probe(
    "transpose-and-wide-loads",
    "Of rung 08's two changes, which one pays: the transpose or the wide loads?",
    (
        Variant("rung-06", "rung 06: neither", edited(6)),
        Variant(
            "transpose",
            "the transpose alone",
            edited(6, _SHARED_TRANSPOSED, _STORE_TRANSPOSED, _READ_TRANSPOSED),
            reported="no gain",
        ),
        Variant(
            "transpose-4",
            "the transpose alone, four threads a row",
            edited(6, _SHARED_TRANSPOSED, _STORE_TRANSPOSED, _READ_TRANSPOSED, _FOUR_NEIGHBOURS),
            reported="no gain",
        ),
        Variant("wide", "rung 07: the wide loads alone", edited(7), reported="the gain", reported_ratio=1.21),
        Variant("both", "rung 08: both", edited(8), reported="+21 %", reported_ratio=1.21),
    ),
    _at(2048),
    words.transpose,
    (
        Expectation("transpose", "global_loads", "the loads stay narrow", 1.0),
        Expectation("transpose", "shared_loads", "the compiler had combined four steps before", 1.0),
        Expectation(
            "transpose",
            "shared_store_passes",
            "a warp stores 32 floats of a row of A into one bank; "
            "B's stores, the other half, stay at one pass",
            (32 + 1) / 2,
        ),
        Expectation(
            "transpose-4", "shared_store_passes", "four floats of a row meet in one bank", (4 + 1) / 2
        ),
        Expectation("wide", "global_loads", "16 bytes instead of 4", 0.25),
        Expectation("wide", "shared_loads", "the multiplication is untouched", 1.0),
    ),
    about="The article does not say how its transposing copy was dealt to threads; two ways are tried.",
)

# -- The transpose taken out of rung 15 ----------------------------------------------------------------------

_PLAIN_SHARED = Edit("A's slice is not transposed", "float As[STAGES][BK][BM];", "float As[STAGES][BM][BK];")
_PLAIN_COPY = Edit(
    "A is copied as it comes", "copy_async<4>(&As[stage][c][r], ", "copy_async<4>(&As[stage][r][c], "
)
_PLAIN_READ = Edit(
    "A is read as it lies", "As[stage][k][patch_row(wy, ly, i)]", "As[stage][patch_row(wy, ly, i)][k]"
)
_WIDE_COPY = Edit(
    "A is copied four floats at a time",
    "    for (int i = tid; i < BM * BK; i += THREADS) {  "
    "// four neighbours copy four floats of a row, and so on\n"
    """\
      const int r = i / 4 % BM, c = i / (4 * BM) * 4 + i % 4;
      copy_async<4>(&As[stage][c][r], A + (size_t)(row0 + r) * K + (k0 + c), row0 + r < M && k0 + c < K);
""",
    """    for (int i = tid; i < BM * BK / 4; i += THREADS) {
      const int r = i / (BK / 4), c = i % (BK / 4) * 4;
      copy4<kVectors>(&As[stage][r][c], A + (size_t)(row0 + r) * K, k0 + c, K, row0 + r < M);
""",
)

_RUNG_15 = Variant("rung-15", "rung 15 as it is", edited(15))

UNTRANSPOSED = Probe(
    "untransposed",
    "What does the transpose do for the large patch of rung 15?",
    (
        _RUNG_15,
        Variant(
            "untransposed",
            "A untransposed, copied as before",
            edited(15, _PLAIN_SHARED, _PLAIN_COPY, _PLAIN_READ),
            reported="-2 to -4 %",
            reported_ratio=0.97,
        ),
        Variant(
            "untransposed-wide",
            "A untransposed, 16-byte copies",
            edited(15, _PLAIN_SHARED, _WIDE_COPY, _PLAIN_READ),
        ),
    ),
    _at(2048, 4096),
    words.untransposed,
    (
        Expectation("untransposed", "shared_loads", "A is read four steps at a time instead", 1.0),
        Expectation("untransposed", "copies", "still float by float", 1.0),
        Expectation(
            "untransposed",
            "shared_load_passes",
            "the rows of a warp's lanes lie 64 floats apart, in one "
            "bank: 4 passes for A instead of 2, 4 for B in both",
            (4 * 4 + 2 * 4) / (4 * 2 + 2 * 4),
        ),
        Expectation("untransposed-wide", "copies", "2 + 4 for each thread and slice instead of 8 + 4", 0.5),
    ),
)

# -- Padding instead of splitting ----------------------------------------------------------------------------

_PADDED_PLACE = Edit(
    "where a column lies in a padded row",
    "template <bool kVectors>\n__global__ void",
    "// Where a column of B's slice lies: four floats follow every 32, so the next 32 begin four banks on.\n"
    "__device__ int padded(int col) { return col + col / 32 * 4; }\n\n"
    "template <bool kVectors>\n__global__ void",
)
_PADDED_SHARED = Edit("B's rows are padded", "float Bs[BK][BN];", "float Bs[BK][BN + BN / 32 * 4];")
_PADDED_STORE = Edit("B is stored past the gaps", "*(float4*)&Bs[r][c] = ", "*(float4*)&Bs[r][padded(c)] = ")
_PADDED_READ = Edit(
    "B is read past the gaps", "b[j] = Bs[k][tx * TN + j]", "b[j] = Bs[k][padded(tx * TN) + j]"
)

PADDING = Probe(
    "padding",
    "Would padding B's slice do what splitting the columns does?",
    (
        Variant("rung-08", "rung 08: conflicts", edited(8)),
        Variant(
            "padding",
            "rung 08, four floats of padding after every 32",
            edited(8, _PADDED_PLACE, _PADDED_SHARED, _PADDED_STORE, _PADDED_READ),
        ),
        Variant("splitting", "rung 09: split groups", edited(9), reported="+3 %", reported_ratio=1.03),
    ),
    _at(2048, 4096),
    words.padding,
    (
        Expectation("padding", "shared_load_conflicts", "columns 32 apart lie four banks apart", value=0),
        Expectation("padding", "shared_load_passes", "3 passes for an average read instead of 5", 0.6),
        Expectation("padding", "shared_loads", "the same reads", 1.0),
        Expectation("padding", "static_shared_bytes", "4 floats more for every 32 of B", (32 + 36) / 64),
        Expectation("splitting", "shared_load_passes", "3 passes for an average read instead of 5", 0.6),
    ),
)

# -- One and two resident blocks -----------------------------------------------------------------------------


def resident_sizes(spec: DeviceSpec) -> tuple[int, ...]:
    """The article's N = 1025, and the first such N whose tiles outnumber the GPU's SMs."""
    tile = get_rung(6).tile.bm
    side = 1
    while side * side <= spec.sms:
        side += 1
    return tuple(sorted({1025, (side - 1) * tile + 1}))


RESIDENT = Probe(
    "resident-blocks",
    "Where a GPU has a few more tiles than SMs, does a second resident block help?",
    (
        Variant("one", "rung 06, held to one block an SM", edited(6), hold_to=1),
        Variant("two", "rung 06, two blocks an SM", edited(6), reported="no gain", reported_ratio=1.0),
    ),
    resident_sizes,
    words.resident,
    (
        Expectation("one", "blocks_per_sm", "dynamic shared memory leaves no room for a second", value=1),
        Expectation("two", "blocks_per_sm", "as the launch bounds ask for", value=2),
        Expectation("two", "thread_fma", "the same kernel", 1.0),
    ),
)

# -- L2 reuse of the walk ------------------------------------------------------------------------------------

L2_REUSE = Probe(
    "l2-reuse",
    "Do the walkers of rung 19 lose the L2 reuse that rung 15 has?",
    (
        _RUNG_15,
        Variant("walk", "rung 19: each SM walks its run", edited(19), reported="+40 % time per tile"),
    ),
    _at(2048, 4096, 8192),
    words.l2_reuse,
    (Expectation("walk", "thread_fma", "the same slices, dealt differently", 1.0),),
    profile=True,
)

# -- Lane maps -----------------------------------------------------------------------------------------------


_OWN_MAP = ((3, 4), (0, 1, 2))
_ONE_TABLE = (
    "Every map comes from a table in constant memory, the rung's own too: these kernels differ in 32 bytes "
    "of data and in nothing that the compiler sees."
)


def _mapped(number: int, bits: tuple[Sequence[int], Sequence[int]]) -> EditedRung:
    return edited(number, *lane_map_edits(*bits))


def _best_map(tm: int, tn: int) -> tuple[Sequence[int], Sequence[int]]:
    """The cheapest lane map that keeps the warp of 4 x 8 lanes which the rungs have."""
    best = next(
        cost
        for cost in search(tm, tn)
        if len(cost.row_bits) == 2 and cost.row_group == cost.column_group == 4
    )
    return best.row_bits, best.column_bits


def _passes(number: float) -> str:
    return f"{number:g} passes a step by the rule, {'as' if number == 16 else 'instead of 16'} in rung 15"


HALF_WARPS = Probe(
    "half-warps",
    "A half-warp of two rows of eight lanes, or a 4 x 4 square: how many passes?",
    (
        _RUNG_15,
        Variant("rows", "two rows of eight, as in rung 15", _mapped(15, _OWN_MAP), reported="four passes"),
        Variant(
            "square",
            "4 x 4 square, row by row",
            _mapped(15, ((2, 3), (0, 1, 4))),
            against="rows",
            reported="about five passes, no change in speed",
            reported_ratio=1.0,
        ),
        Variant(
            "square-z",
            "4 x 4 square, in Z order",
            _mapped(15, ((1, 3), (0, 2, 4))),
            against="rows",
            reported="about five passes, no change in speed",
            reported_ratio=1.0,
        ),
    ),
    _at(2048, 4096),
    words.half_warps,
    (
        Expectation("rows", "passes_per_read", "A 2, B 4: an average read", value=16 / 6),
        Expectation("rows", "shared_load_passes", "the same map", 1.0),
        Expectation("square", "shared_load_passes", _passes(16), 1.0),
        Expectation("square", "registers", "only data differs", 1.0),
        Expectation("square-z", "shared_load_passes", _passes(12), 0.75),
        Expectation("square-z", "registers", "only data differs", 1.0),
    ),
    about=_ONE_TABLE,
    tables=words.arrangement_tables,
)

LANE_MAPS = Probe(
    "lane-maps",
    "Which lane map needs the fewest passes, and is it worth anything?",
    (
        _RUNG_12,
        Variant("own-8x8", "rung 12, own lane map in a table", _mapped(12, _OWN_MAP)),
        Variant(
            "best-8x8",
            "rung 12, cheapest lane map in a table",
            _mapped(12, _best_map(8, 8)),
            against="own-8x8",
        ),
        Variant("rung-15", "rung 15 as it is", edited(15), alone=True),
        Variant("own-16x8", "rung 15, own lane map in a table", _mapped(15, _OWN_MAP), against="rung-15"),
        Variant(
            "best-16x8",
            "rung 15, cheapest lane map in a table",
            _mapped(15, _best_map(16, 8)),
            against="own-16x8",
        ),
    ),
    _at(2048, 4096),
    words.lane_maps,
    (
        Expectation("own-8x8", "shared_load_passes", "the same map", 1.0),
        Expectation("best-8x8", "shared_load_passes", "8 passes a step by the rule, instead of 12", 8 / 12),
        Expectation("best-8x8", "registers", "only data differs", 1.0),
        Expectation("own-16x8", "shared_load_passes", "the same map", 1.0),
        Expectation(
            "best-16x8", "shared_load_passes", "12 passes a step by the rule, instead of 16", 12 / 16
        ),
        Expectation("best-16x8", "shared_loads", "the same reads", 1.0),
        Expectation("best-16x8", "registers", "only data differs", 1.0),
    ),
    about=_ONE_TABLE,
    tables=words.search_tables,
)

PROBES = {
    probe.name: probe
    for probe in (
        NO_LOADS,
        STORES_ONLY,
        SAME_SLICE,
        TRANSPOSE,
        UNTRANSPOSED,
        PADDING,
        RESIDENT,
        L2_REUSE,
        HALF_WARPS,
        LANE_MAPS,
    )
}
"""All probes by name, in the order of the ladder."""
