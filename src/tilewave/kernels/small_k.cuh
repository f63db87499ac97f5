// Products of little depth: much of C from a K of a few, bound by writing it.
//
// A block computes BM x (4 * LANES) outputs, for a K up to DEPTH. Rows of A and columns of B lie in shared memory as
// lines of K, filled up to whole vectors. A thread keeps four columns of B, LANES apart, in registers and walks down
// the rows, ROWS at a time: each element of A is read once for four outputs, and neighbouring threads store neighbours
// whatever the alignment. Sums are plain chains of fused multiply-adds in the order of k.
#pragma once

#include "epilogue.cuh"
#include "staging.cuh"

namespace tilewave {

// Blocks that an SM should hold. On sm_75 and sm_80 the registers of three are too few for a depth of 8: ptxas spills.
constexpr __host__ __device__ int small_k_blocks(int depth) {
#if __CUDA_ARCH__ <= 800
    return depth == 4 ? 4 : 2;
#else
    return depth == 4 ? 4 : depth == 8 ? 3 : 2;
#endif
}

template <int BM, int LANES, int DEPTH>
__global__ void __launch_bounds__(256, small_k_blocks(DEPTH))
    small_k(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = 256, COLUMNS = 4, BN = COLUMNS * LANES, GROUPS = THREADS / LANES, ROWS = 4;
    constexpr int PITCH = line_pitch(DEPTH);
    static_assert(BM % (GROUPS * ROWS) == 0, "groups of threads share the rows evenly");
    __shared__ __align__(128) float a_lines[BM * PITCH];
    __shared__ __align__(128) float b_lines[BN * PITCH];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    __shared__ typename PatchWalk<BM, BN, 1>::Shared walk_shared;
    PatchWalk<BM, BN, 1> walk(walk_shared);
    for (bool first = true; walk.next(args, first); first = false) {
        __syncthreads();
        const Patch& patch = walk_shared.patch;  // there, so that it occupies no registers
        const int depth = args.k;
        const bool one_axis = one_batch_axis(args);
        constexpr int INNER = BATCH_LEVELS - 1;
        const Index a_offset = one_axis ? patch.item * args.a.batch[INNER] : walk_shared.offsets.a;
        const Index b_offset = one_axis ? patch.item * args.b.batch[INNER] : walk_shared.offsets.b;
        const float* const a_first = args.a.data + a_offset + patch.row * args.a.row;
        const float* const b_first = args.b.data + b_offset + patch.column * args.b.column;
        start_lines<THREADS, PITCH>(a_lines, lines_of_vectors(args, args.a, depth, args.a.row, args.a.column), 1,
                                    patch.rows, depth, args.a.row, args.a.column, A_FILLER,
                                    [=](int) { return a_first; });
        start_lines<THREADS, PITCH>(b_lines, lines_of_vectors(args, args.b, depth, args.b.column, args.b.row), 1,
                                    patch.columns, depth, args.b.column, args.b.row, B_FILLER,
                                    [=](int) { return b_first; });
        finish_copies();
        __syncthreads();
        const bool plain = is_plain(args) && args.out.column == 1;
        const Index out_offset = one_axis ? patch.item * args.out.batch[INNER] : walk_shared.offsets.out;

        // Columns and rows that the tile does not have read whatever lies there; their sums are not stored.
        float4 of_b[DEPTH / 4][COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const float* line = b_lines + (lane + j * LANES) * PITCH;
#pragma unroll
            for (int k = 0; k < DEPTH; k += 4)
                if (k < depth) of_b[k / 4][j] = *reinterpret_cast<const float4*>(line + k);
        }
#pragma unroll 1
        for (int row = group; row < patch.rows; row += ROWS * GROUPS) {
            float sum[ROWS][COLUMNS] = {};
#pragma unroll
            for (int k = 0; k < DEPTH; k += 4) {
                if (k >= depth) break;
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const float4 of_a = *reinterpret_cast<const float4*>(a_lines + (row + i * GROUPS) * PITCH + k);
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) {
                        sum[i][j] = __fmaf_rn(of_a.x, of_b[k / 4][j].x, sum[i][j]);
                        sum[i][j] = __fmaf_rn(of_a.y, of_b[k / 4][j].y, sum[i][j]);
                        sum[i][j] = __fmaf_rn(of_a.z, of_b[k / 4][j].z, sum[i][j]);
                        sum[i][j] = __fmaf_rn(of_a.w, of_b[k / 4][j].w, sum[i][j]);
                    }
                }
            }
            if (plain) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (row + i * GROUPS >= patch.rows) break;
                    float* target = args.out.data + out_offset +
                                    (patch.row + row + i * GROUPS) * args.out.row + patch.column + lane;
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                        if (lane + j * LANES < patch.columns) target[j * LANES] = args.alpha * sum[i][j];
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
                        store(args, item_at(args, offsets_of(args, patch.item)), patch.row + row + i * GROUPS,
                              patch.column + lane + j * LANES, value);
                }
            }
        }
    }
}

}  // namespace tilewave
