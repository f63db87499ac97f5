// What the streaming kernels share: which operand is long, and the sum of a tile's pieces.
//
// They compute a few rows of C (or, MIRRORED, a few columns): one operand has few lines along C's short axis, the other
// one many along the long axis and is read from memory once, straight into registers.
#pragma once

#include "combining.cuh"
#include "patch.cuh"

namespace tilewave {

// An operand as lines that run along K.
struct Lines {
    const float* first;  // element k = 0 of the tile's first line
    Index line;          // distance to the next line
    Index along;         // distance to the next k
    int count;           // lines of the tile, at least 1
};

// What a block is doing: an item of its walk, with that tile's two operands. It lies in shared memory and is computed
// by one thread, so that neither addresses nor the walk occupy registers while K is walked. A tile has at most FEW
// lines of `few` and MANY of `many`.
template <int FEW, int MANY, bool MIRRORED>
struct Task {
    WorkItem work;
    Lines few, many;
    Index position;  // of the walk, behind this item
    int found;

    // Goes to the first or the next item; false when there is none. A barrier before and after one that follows another.
    __device__ __forceinline__ bool next(const GemmArgs& args, bool first) {
        if (!first) {
            if (args.cut.walkers == 0) return false;  // only walkers have more than one
            __syncthreads();  // nobody needs the last one, nor anything else that it had in shared memory
        }
        if (threadIdx.x == 0) {
            if (__builtin_expect(args.cut.walkers == 0, 1)) {
                own_item(args.cut);
            } else {
                Walk walk(args.cut, blockIdx.x);
                if (!first) walk.position = position;
                WorkItem item_of_walk;
                found = walk.next(item_of_walk);
                if (found) work = item_of_walk;
                position = walk.position;
            }
            if (found) {
                const Patch patch = patch_of<MIRRORED ? MANY : FEW, MIRRORED ? FEW : MANY, 1>(args, work.tile);
                const Item item = item_of(args, patch.item);
                const Lines rows = {item.a + patch.row * args.a.row, args.a.row, args.a.column, patch.rows};
                const Lines columns = {item.b + patch.column * args.b.column, args.b.column, args.b.row,
                                       patch.columns};
                few = MIRRORED ? columns : rows;
                many = MIRRORED ? rows : columns;
            }
        }
        __syncthreads();
        return found;
    }

    // The one item of a block that does not walk, as Walk has it; which tile and piece, in 32 bits, which hold any
    // number of blocks.
    __device__ __forceinline__ void own_item(const Decomposition& cut) {
        const unsigned whole_tiles = static_cast<unsigned>(cut.whole_tiles);
        found = true;
        work.tile = blockIdx.x, work.k_begin = 0, work.k_end = cut.k;
        work.piece = 0, work.pieces = 1, work.slot = -1, work.ticket = -1;
        if (blockIdx.x < whole_tiles) return;
        const unsigned cut_tiles = static_cast<unsigned>(cut.tiles) - whole_tiles, index = blockIdx.x - whole_tiles;
        const unsigned piece = cut_tiles == 1 ? index : index / cut_tiles, of_tile = index - piece * cut_tiles;
        work.tile = whole_tiles + of_tile;
        if (cut.pieces == 1) return;
        const Index slices = slices_of(cut);
        work.k_begin = smaller(even_begin(slices, cut.pieces, piece) * cut.depth, cut.k);
        work.k_end = smaller(even_begin(slices, cut.pieces, piece + 1) * cut.depth, cut.k);
        work.piece = piece, work.pieces = cut.pieces;
        work.slot = of_tile * cut.pieces + piece, work.ticket = of_tile;
    }
};

// Finishes and stores a tile's outputs: sums[f * MANY + l] is that of line f of the few and line l of the many.
template <int FEW, int MANY, bool MIRRORED, int THREADS>
__device__ __forceinline__ void store_tile(const GemmArgs& args, Index tile, const float* sums) {
    const Patch patch = patch_of<MIRRORED ? MANY : FEW, MIRRORED ? FEW : MANY, 1>(args, tile);
    const Item item = item_of(args, patch.item);
    for (int i = threadIdx.x; i < FEW * MANY; i += THREADS) {
        // Neighbouring threads store neighbours of a row.
        const int f = MIRRORED ? i % FEW : i / MANY, l = MIRRORED ? i / FEW : i % MANY;
        const int row = MIRRORED ? l : f, column = MIRRORED ? f : l;
        if (row < patch.rows && column < patch.columns)
            store(args, item, patch.row + row, patch.column + column, sums[f * MANY + l]);
    }
}

// Groups of threads that share a tile's pieces when they are added, four neighbouring sums a thread.
template <int OUTPUTS, int THREADS>
constexpr int ADDING_GROUPS = 4 * THREADS >= 32 * OUTPUTS ? 32 : 4 * THREADS >= OUTPUTS ? 4 * THREADS / OUTPUTS : 1;

// Combines the sums of a cut tile's pieces. Called by all THREADS threads with the OUTPUTS sums of this piece in shared
// memory, after a barrier; true in the block that must store the tile, whose `sums` are then those of all pieces and
// may be read by every thread. The pieces of a round are summed in order, where threads are left over in as many runs as
// groups of threads, and the runs' sums in order: the same bits in every launch. `scratch` holds 4 * THREADS floats.
template <int OUTPUTS, int THREADS>
__device__ __forceinline__ bool combine(const GemmArgs& args, const WorkItem& work, float* sums, float* scratch,
                                        int* flag) {
    if (work.pieces == 1) return true;
    static_assert(OUTPUTS % 4 == 0, "sums move by 16 bytes");
    constexpr int GROUPS = ADDING_GROUPS<OUTPUTS, THREADS>, VECTORS = OUTPUTS / 4;
    const auto publish = [&](Index slot) {
#pragma unroll 1
        for (int i = 4 * threadIdx.x; i < OUTPUTS; i += 4 * THREADS)
            *reinterpret_cast<float4*>(args.partials + slot * OUTPUTS + i) = *reinterpret_cast<const float4*>(sums + i);
    };
    const auto add = [&](Pieces all, int) {
        const int group = GROUPS == 1 ? 0 : threadIdx.x / VECTORS;
        const int count = (all.end - all.begin + all.step - 1) / all.step;
        const int base = count / GROUPS, longer = count - base * GROUPS;
        const int first = group * base + min(group, longer), last = first + base + (group < longer);
        const Pieces own = {all.begin + first * all.step, min(all.begin + last * all.step, all.end), all.step};
        float* const target = GROUPS == 1 ? sums : scratch + group * OUTPUTS;
        if (group < GROUPS)
            for (int i = 4 * (GROUPS == 1 ? threadIdx.x : threadIdx.x % VECTORS); i < OUTPUTS; i += 4 * THREADS)
                *reinterpret_cast<float4*>(target + i) = sum_of_pieces<OUTPUTS>(args, work, own, i);
        __syncthreads();
        if constexpr (GROUPS > 1) {
            for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
                float sum = scratch[i];
#pragma unroll
                for (int other = 1; other < GROUPS; ++other) sum += scratch[other * OUTPUTS + i];
                sums[i] = sum;
            }
            __syncthreads();
        }
    };
    return add_pieces<16 * GROUPS, false>(args, work, flag, publish, add);
}

}  // namespace tilewave
