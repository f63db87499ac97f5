// The sum of a cut tile's pieces, taken by whoever arrives last; of many pieces in two rounds.
//
// A block that adds P pieces draws P tiles through one SM while the others idle. Above ALONE pieces these are therefore
// added in runs of about sqrt(P): who arrives last of a run adds it to the slot of its first piece, and who arrives last
// of those adds the runs. Runs hang on the number of pieces alone, and both rounds add in order: the same bits in every
// launch. A run has a counter of its own, behind those of the tiles: that of its first piece's slot.
#pragma once

#include "tile_output.cuh"

namespace tilewave {

constexpr int PIECES_AT_ONCE = 8;  // loads on their way, of which none waits for another

// Pieces of a run: a power of two, at least the square root of all.
__device__ __forceinline__ int run_of(int pieces) {
    int run = 4;
    while (run * run < pieces) run *= 2;
    return run;
}

__device__ __forceinline__ Index counters_of_tiles(const Decomposition& cut) {
    return cut.walkers != 0 ? cut.walkers : cut.tiles - cut.whole_tiles;
}

// Pieces begin, begin + step, ... below end.
struct Pieces {
    int begin, end, step;
};

// Called by all threads of a block with the sums of its piece. `publish(slot)` stores the block's sums to a slot,
// `add(pieces, own)` replaces them by the sums of the slots of these; where `own` is not -1, the sums that the block has
// are those of that piece, come first in the order, and lie in no slot. True in the block whose sums are then those of
// the tile. With KEEPS_OWN a block whose sums come first asks whether it is the last before it stores them.
template <int ALONE, bool KEEPS_OWN, typename Publish, typename Add>
__device__ __forceinline__ bool add_pieces(const GemmArgs& args, const WorkItem& work, int* flag, Publish publish,
                                           Add add) {
    const int pieces = static_cast<int>(work.pieces), piece = static_cast<int>(work.piece);
    const int run = pieces > ALONE ? run_of(pieces) : pieces, in_run = run == pieces ? 0 : piece & -run;
    // Sums are added in the order of the pieces; of two pieces the order makes no difference.
    const bool first_in_order = KEEPS_OWN && run == pieces && (piece == 0 || pieces == 2);
    // An int, like what the loop below runs by: of a bool, half a register, ptxas would keep the other half's old value.
    const int keeps_own = first_in_order && others_arrived(args.tickets, work, flag);
    // First the piece's run, if that is not all of them, then the runs.
    WorkItem arrival;
    Index slot = work.slot;
#pragma unroll 1
    for (int of_runs = run == pieces;; of_runs = 1) {
        const Pieces added = {of_runs ? 0 : in_run, of_runs ? pieces : min(in_run + run, pieces),
                              of_runs && run < pieces ? run : 1};
        if (!keeps_own) {
            publish(slot);
            slot = slot_of(args.cut, work, in_run);
            arrival.pieces = (added.end - added.begin + added.step - 1) / added.step;
            arrival.ticket = of_runs ? work.ticket : counters_of_tiles(args.cut) + slot;
            if (!arrives_last(args.tickets, arrival, flag)) return false;
        }
        add(added, keeps_own ? piece : -1);
        if (of_runs) return true;
    }
}

// As load_partial() where `wanted`, else 0: left undefined, ptxas would reserve its registers through the loop over K.
__device__ __forceinline__ float4 load_partial_if(bool wanted, const char* source) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.s32 wanted, %5, 0;\n"
        "@wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
        : "l"(source), "r"(static_cast<int>(wanted))
        : "memory");
    return v;
}

// The sum of four neighbouring partial sums, `offset` floats into their slots of SLOT floats, over pieces; AT_ONCE loads
// are on their way.
template <int SLOT, int AT_ONCE = PIECES_AT_ONCE>
__device__ __forceinline__ float4 sum_of_pieces(const GemmArgs& args, const WorkItem& work, Pieces pieces, int offset) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // As slot_of() has it: pieces lie evenly apart, but a walk's first.
    const bool walk = args.cut.walkers != 0;
    const Index apart = (walk ? 2 : 1) * SLOT * sizeof(float);
    const char* at = reinterpret_cast<const char*>(args.partials + offset) +
                     (walk ? 2 * work.ticket * SLOT * sizeof(float) : work.ticket * work.pieces * apart) +
                     pieces.begin * apart;
    const Index step = pieces.step * apart;
    int left = pieces.begin < pieces.end ? (pieces.end - pieces.begin + pieces.step - 1) / pieces.step : 0;
    Index before = walk && pieces.begin == 0 ? SLOT * sizeof(float) : 0;
#pragma unroll 1
    for (; left > 0; left -= AT_ONCE) {
        float4 values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            values[i] = load_partial_if(i < left, at + before);
            at += step;
            before = 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i < left) total = total + values[i];
    }
    return total;
}

}  // namespace tilewave
