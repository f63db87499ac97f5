// Products of little depth: much of C from a K of a few, bound by writing it.
//
// A block computes BM x (4 * LANES) outputs, for a K up to DEPTH. Operands come as `staging.cuh` brings them. A thread
// keeps four columns of B in registers and walks down the rows, ROWS at a time: each element of A is read once for four
// outputs. Its columns are neighbours where out is written by 16 bytes, else LANES apart, so that neighbouring threads
// store neighbours whatever the alignment. Sums are plain chains of fused multiply-adds in the order of k.
#pragma once

#include "staging.cuh"
#include "tile_output.cuh"

namespace tilewave {

constexpr int SMALL_K_COLUMNS = 4, SMALL_K_ROWS = 2;

// Adds the products of ROWS rows of A, `apart` floats from one to the next, with a thread's columns of B. WIDE: rows are
// read by 16 bytes, filled up to whole vectors.
template <bool WIDE, int DEPTH>
__device__ __forceinline__ void add_rows(float (&sum)[SMALL_K_ROWS][SMALL_K_COLUMNS], const float* row, int apart,
                                         int step, const float (&of_b)[DEPTH][SMALL_K_COLUMNS], int depth) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 4) {
        if (k >= depth) break;
        if constexpr (WIDE) {
#pragma unroll
            for (int i = 0; i < SMALL_K_ROWS; ++i) {
                const float4 v = *reinterpret_cast<const float4*>(row + i * apart + k);
#pragma unroll
                for (int j = 0; j < SMALL_K_COLUMNS; ++j) {
                    sum[i][j] = __fmaf_rn(v.x, of_b[k][j], sum[i][j]);
                    sum[i][j] = __fmaf_rn(v.y, of_b[k + 1][j], sum[i][j]);
                    sum[i][j] = __fmaf_rn(v.z, of_b[k + 2][j], sum[i][j]);
                    sum[i][j] = __fmaf_rn(v.w, of_b[k + 3][j], sum[i][j]);
                }
            }
        } else {
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
                for (int i = 0; i < SMALL_K_ROWS; ++i) {
                    const float of_a = k + kk < depth ? row[i * apart] : A_FILLER;
#pragma unroll
                    for (int j = 0; j < SMALL_K_COLUMNS; ++j)
                        sum[i][j] = __fmaf_rn(of_a, of_b[k + kk][j], sum[i][j]);
                }
                row += step;
            }
        }
    }
}

template <int BM, int LANES, int DEPTH>
__global__ void __launch_bounds__(256, DEPTH == 4 ? 3 : 2)
    small_k(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = 256, COLUMNS = SMALL_K_COLUMNS, BN = COLUMNS * LANES, GROUPS = THREADS / LANES;
    constexpr int ROWS = SMALL_K_ROWS, PITCH = line_pitch(DEPTH);
    static_assert(BM % (GROUPS * ROWS) == 0, "groups of threads share the rows evenly");
    __shared__ __align__(128) float a_shared[part_floats(BM, DEPTH)];
    __shared__ __align__(128) float b_shared[part_floats(BN, DEPTH)];
    __shared__ typename PatchWalk<BM, BN, 1>::Shared walk_shared;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    PatchWalk<BM, BN, 1> walk(walk_shared);
    for (bool first = true; walk.next(args, first); first = false) {
        const Patch patch = walk.patch;
        const int depth = args.k;
        const Offsets offsets = offsets_of(args, patch.item);
        const float* const a_first = args.a.data + offsets.a + patch.row * args.a.row;
        const float* const b_first = args.b.data + offsets.b + patch.column * args.b.column;
        const Part a = start_part<THREADS, PITCH>(a_shared, args, args.a, 1, patch.rows, depth, args.a.row,
                                                  args.a.column, A_FILLER, [=](int) { return a_first; });
        const Part b = start_part<THREADS, PITCH>(b_shared, args, args.b, 1, patch.columns, depth, args.b.column,
                                                  args.b.row, B_FILLER, [=](int) { return b_first; });
        finish_copies();
        __syncthreads();

        const Patch& where = walk_shared.patch;  // read anew: it occupies no registers meanwhile
        const bool plain = is_plain(args) && args.out.column == 1;
        const bool vectors = plain && (args.flags & OUT_VECTORS) != 0 && where.columns % 4 == 0;
        const int column = vectors ? COLUMNS * lane : lane, near = vectors ? 1 : LANES;
        float* const out = args.out.data + offsets_of(args, where.item).out + where.row * args.out.row + where.column +
                           column;
        const int row_end = where.rows, columns = where.columns - column;
        // Columns and rows that the tile does not have read whatever lies there; their sums are not stored.
        float of_b[DEPTH][COLUMNS];
#pragma unroll
        for (int k = 0; k < DEPTH; ++k)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                of_b[k][j] = k < depth ? b.data[(column + j * near) * b.line_step + k * b.step] : B_FILLER;
#pragma unroll 1
        for (int row = group; row < row_end; row += ROWS * GROUPS) {
            float sum[ROWS][COLUMNS] = {};
            const float* const of_a = a.data + row * a.line_step;
            if (a.along_k() && a.vectors)
                add_rows<true, DEPTH>(sum, of_a, GROUPS * a.line_step, 1, of_b, depth);
            else
                add_rows<false, DEPTH>(sum, of_a, GROUPS * a.line_step, a.step, of_b, depth);
            if (plain) {
                const float alpha = args.alpha;
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (row + i * GROUPS >= row_end) break;
                    float* const target = out + (row + i * GROUPS) * args.out.row;
                    if (vectors) {
                        if (columns > 0)
                            store_vector(target, alpha * sum[i][0], alpha * sum[i][1], alpha * sum[i][2],
                                         alpha * sum[i][3]);
                    } else {
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j)
                            if (j * LANES < columns) target[j * LANES] = alpha * sum[i][j];
                    }
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
                    if (row + i * GROUPS < row_end && j * near < columns)
                        store(args, item_at(args, offsets_of(args, where.item)), where.row + row + i * GROUPS,
                              where.column + column + j * near, value);
                }
            }
        }
    }
}

}  // namespace tilewave
