// What the streaming kernels share: which operand is long, and the sum of a tile's pieces.
//
// They compute a few rows of C (or, MIRRORED, a few columns): one operand has few lines along C's short axis, the other
// one many along the long axis and is read from memory once, straight into registers.
#pragma once

#include "epilogue.cuh"
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

    // Goes to the first or the next item; false when there is none. A barrier before and after it.
    __device__ __forceinline__ bool next(const GemmArgs& args, bool first) {
        __syncthreads();  // nobody needs the last one, nor anything else that it had in shared memory
        if (threadIdx.x == 0) {
            Walk walk(args.cut, blockIdx.x);
            if (!first) walk.position = position;
            WorkItem item_of_walk;
            found = walk.next(item_of_walk);
            if (found) {
                work = item_of_walk;
                position = walk.position;
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

// Combines the sums of a cut tile's pieces. Called by all THREADS threads with the OUTPUTS sums of this piece in shared
// memory, after a barrier; true in the block that must store the tile, whose `sums` are then those of all pieces and
// may be read by every thread. The pieces are summed in order, where threads are left over in as many runs as groups
// of OUTPUTS threads, and the runs' sums in order: the same bits in every launch. `scratch` holds THREADS floats.
template <int OUTPUTS, int THREADS>
__device__ __forceinline__ bool combine(const GemmArgs& args, const WorkItem& work, float* sums, float* scratch,
                                        int* flag) {
    if (work.pieces == 1) return true;
    float* slot = args.partials + work.slot * OUTPUTS;
    for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) slot[i] = sums[i];
    if (!arrives_last(args.tickets, work, flag)) return false;
    constexpr int GROUPS = OUTPUTS < THREADS ? THREADS / OUTPUTS : 1;
    const int group = GROUPS == 1 ? 0 : threadIdx.x / OUTPUTS;
    const int pieces = work.pieces;
    const int base = pieces / GROUPS, longer = pieces - base * GROUPS;
    const int begin = group * base + min(group, longer), end = begin + base + (group < longer);
    if (group < GROUPS)
        for (int i = GROUPS == 1 ? threadIdx.x : threadIdx.x - group * OUTPUTS; i < OUTPUTS; i += THREADS) {
            float sum = 0.0f;
#pragma unroll 8
            for (int piece = begin; piece < end; ++piece)
                sum += __ldcg(args.partials + slot_of(args.cut, work, piece) * OUTPUTS + i);
            if constexpr (GROUPS == 1)
                sums[i] = sum;
            else
                scratch[group * OUTPUTS + i] = sum;
        }
    __syncthreads();
    if constexpr (GROUPS > 1) {
        for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
            float sum = scratch[i];
            for (int other = 1; other < GROUPS; ++other) sum += scratch[other * OUTPUTS + i];
            sums[i] = sum;
        }
        __syncthreads();
    }
    return true;
}

}  // namespace tilewave
