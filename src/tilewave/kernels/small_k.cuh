// Products of little depth: much of C from a K of a few, bound by writing it.
//
// A block computes BM x (4 * LANES) outputs, for a K up to DEPTH. Its parts of A and B are brought into shared memory
// once. A thread keeps four columns of B, LANES apart, in registers and walks down the rows, ROWS at a time: each
// element of A is read once for four outputs, and neighbouring threads store neighbours whatever the alignment. Sums
// are plain chains of fused multiply-adds in the order of k.
#pragma once

#include "epilogue.cuh"
#include "staging.cuh"

namespace tilewave {

template <int BM, int LANES, int DEPTH>
__global__ void __launch_bounds__(256, 2) small_k(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = 256, COLUMNS = 4, BN = COLUMNS * LANES, GROUPS = THREADS / LANES, ROWS = 4;
    constexpr int A_FLOATS = flat_floats(BM * DEPTH), B_FLOATS = flat_floats(DEPTH * BN);
    static_assert(BM % (GROUPS * ROWS) == 0, "groups of threads share the rows evenly");
    __shared__ __align__(128) float shared[A_FLOATS + B_FLOATS];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const bool plain = is_plain(args);
    for (Position position(args);;) {
        WorkItem work;
        if (!position.next(args, work)) break;
        const Patch patch = patch_of<BM, BN, 1>(args, work.tile);
        const Item item = item_of(args, patch.item);
        const int depth = args.k;
        __syncthreads();  // the walker's last tile is done with shared memory
        const Staged a = start_part<THREADS>(shared, args, args.a, patch.rows, depth, 1,
                                             [&](int) { return item.a + patch.row * args.a.row; });
        const Staged b = start_part<THREADS>(shared + A_FLOATS, args, args.b, depth, patch.columns, 1,
                                             [&](int) { return item.b + patch.column * args.b.column; });
        finish_copies();
        __syncthreads();

        // Columns and rows beyond the tile read its last one; their sums are not stored.
        float of_b[DEPTH][COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const float* at = shared + A_FLOATS + b.first + min(lane + j * LANES, patch.columns - 1) * b.column;
#pragma unroll
            for (int k = 0; k < DEPTH; ++k) of_b[k][j] = k < depth ? at[k * b.row] : 0.0f;
        }
        for (int row = group; row < patch.rows; row += ROWS * GROUPS) {
            int at[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) at[i] = a.first + min(row + i * GROUPS, patch.rows - 1) * a.row;
            float sum[ROWS][COLUMNS] = {};
#pragma unroll
            for (int k = 0; k < DEPTH; ++k)
                if (k < depth)
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
                        const float of_a = shared[at[i] + k * a.column];
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j) sum[i][j] = __fmaf_rn(of_a, of_b[k][j], sum[i][j]);
                    }
            if (plain) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (row + i * GROUPS >= patch.rows) break;
                    float* target = item.out + (patch.row + row + i * GROUPS) * args.out.row +
                                    (patch.column + lane) * args.out.column;
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                        if (lane + j * LANES < patch.columns)
                            target[j * LANES * args.out.column] = args.alpha * sum[i][j];
                }
            } else {
                // One copy of the epilogue's code: it is long, and a loop cannot index registers.
#pragma unroll 1
                for (int which = 0; which < ROWS * COLUMNS; ++which) {
                    const int i = which / COLUMNS, j = which % COLUMNS;
                    float value = 0.0f;
#pragma unroll
                    for (int other = 0; other < ROWS * COLUMNS; ++other)
                        if (other == which) value = sum[other / COLUMNS][other % COLUMNS];
                    if (row + i * GROUPS < patch.rows && lane + j * LANES < patch.columns)
                        store(args, item, patch.row + row + i * GROUPS, patch.column + lane + j * LANES, value);
                }
            }
        }
    }
}

}  // namespace tilewave
