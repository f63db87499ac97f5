// What the fp16 split cannot hold: elements of C for which must_recompute(), because of an infinity, a NaN or too wide a
// spread of exponents. They are computed as "ieee" does, a chain of float32 fused multiply-adds in the order of k, and
// nothing else of C is touched. The warpgroup that found them in its part of a tile does it, before it goes on.
#pragma once

#include "epilogue.cuh"
#include "fp16x3_hopper.cuh"

namespace tilewave {

constexpr int RECOMPUTE_TILE = 64;  // rows and columns of C at a time
constexpr int RECOMPUTE_DEPTH = 16;
constexpr int RECOMPUTE_FLOATS = RECOMPUTE_TILE * RECOMPUTE_TILE;  // of shared memory
static_assert(2 * RECOMPUTE_DEPTH * (RECOMPUTE_TILE + 1) + 1 <= RECOMPUTE_FLOATS, "parts of A and B, and a flag");

// The part of C whose first element is (row, column), as the GROUP_THREADS threads that meet at `barrier`.
__device__ __forceinline__ void recompute_tile(const GemmArgs& args, const Item& item, const PackedOperands& packed,
                                               PackedItems items, Index row, Index column, float* shared, int barrier) {
    constexpr int TILE = RECOMPUTE_TILE, DEPTH = RECOMPUTE_DEPTH, ACROSS = 16, DOWN = GROUP_THREADS / ACROSS;
    constexpr int ROWS = TILE / DOWN, COLUMNS = TILE / ACROSS;  // of a thread
    float(*rows_of_a)[TILE + 1] = reinterpret_cast<float(*)[TILE + 1]>(shared);
    float(*columns_of_b)[TILE + 1] = rows_of_a + DEPTH;
    int* found = reinterpret_cast<int*>(columns_of_b + DEPTH);
    const int thread = threadIdx.x % GROUP_THREADS, x = thread % ACROSS, y = thread / ACROSS;
    unsigned wanted = 0;  // a bit for each of the thread's elements
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Index at_row = row + y + i * DOWN, at_column = column + x + j * ACROSS;
            if (at_row < args.m && at_column < args.n &&
                must_recompute(__ldcg(packed.guards_a + items.a * args.m + at_row),
                               __ldcg(packed.guards_b + items.b * args.n + at_column), static_cast<int>(args.k)))
                wanted |= 1u << (i * COLUMNS + j);
        }
    group_barrier(barrier);  // all are done with the shared memory
    if (thread == 0) *found = 0;
    group_barrier(barrier);
    if (wanted != 0) *found = 1;
    group_barrier(barrier);
    if (*found == 0) return;

    float sums[ROWS][COLUMNS] = {};
    for (Index begin = 0; begin < args.k; begin += DEPTH) {
        const int depth = static_cast<int>(smaller(DEPTH, args.k - begin));
        group_barrier(barrier);
        for (int i = thread; i < TILE * DEPTH; i += GROUP_THREADS) {
            const int k = i % DEPTH, of = i / DEPTH;
            const bool inside = k < depth;
            rows_of_a[k][of] =
                inside && row + of < args.m ? item.a[(row + of) * args.a.row + (begin + k) * args.a.column] : 0.0f;
            columns_of_b[k][of] = inside && column + of < args.n
                                      ? item.b[(begin + k) * args.b.row + (column + of) * args.b.column]
                                      : 0.0f;
        }
        group_barrier(barrier);
        for (int k = 0; k < depth; ++k) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    sums[i][j] =
                        __fmaf_rn(rows_of_a[k][y + i * DOWN], columns_of_b[k][x + j * ACROSS], sums[i][j]);
        }
    }
    // One after the other out of shared memory, so that the epilogue, which is long, stands here once.
    group_barrier(barrier);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) shared[(i * COLUMNS + j) * GROUP_THREADS + thread] = sums[i][j];
#pragma unroll 1
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        if ((wanted >> i & 1) != 0)
            store(args, item, row + y + i / COLUMNS * DOWN, column + x + i % COLUMNS * ACROSS,
                  shared[i * GROUP_THREADS + thread]);
    }
}

}  // namespace tilewave
