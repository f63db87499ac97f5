// Tiny products by the million, and tall ones of few columns: all that a tile needs is in shared memory at once.
//
// A block computes a BM x BN patch of ITEMS consecutive items of the batch, whose K is at most BK. Rows of A and
// columns of B lie in shared memory as lines of K, filled up to whole vectors; an operand that all items share is there
// once.
// Sizes are run-time values. A thread computes a TM x TN patch of one item, four k at a time, as plain chains of fused
// multiply-adds in the order of k. The sums then lie in shared memory in the order of out: where the tile's part of out
// is one run of memory, it is written by 16 bytes wherever it begins.
#pragma once

#include "staging.cuh"
#include "tile_output.cuh"

namespace tilewave {

// How a rows x columns part of each of `items` items fills a run of memory, row by row or column by column, item after
// item: one of the distances is 1. False when there is a gap or an overlap.
__device__ __forceinline__ bool fills_run(const GemmArgs& args, const Matrix& matrix, int rows, int columns, int items,
                                          int& row, int& column) {
    if (items > 1 && !(one_batch_axis(args) && matrix.batch[BATCH_LEVELS - 1] == rows * columns)) return false;
    row = columns, column = 1;
    if ((columns == 1 || matrix.column == 1) && (rows == 1 || matrix.row == columns)) return true;
    row = 1, column = rows;
    return (rows == 1 || matrix.row == 1) && (columns == 1 || matrix.column == rows);
}

constexpr __host__ __device__ int tiny_threads(int bm, int bn, int tm, int tn, int items) {
    return items * (bm / tm) * (bn / tn);
}

// Blocks that an SM should hold: loads of some must travel while others compute and store.
constexpr __host__ __device__ int tiny_blocks(int threads, int sums) { return sums > 16 ? 1 : threads == 256 ? 4 : 6; }

template <int BM, int BN, int BK, int TM, int TN, int ITEMS>
__global__ void __launch_bounds__(tiny_threads(BM, BN, TM, TN, ITEMS),
                                  tiny_blocks(tiny_threads(BM, BN, TM, TN, ITEMS), TM* TN))
    tiny(const __grid_constant__ GemmArgs args) {
    static_assert(BM % TM == 0 && BN % TN == 0 && BK % 4 == 0, "threads share a patch evenly");
    constexpr int THREADS = tiny_threads(BM, BN, TM, TN, ITEMS), PITCH = line_pitch(BK);
    extern __shared__ __align__(128) float shared[];
    float* const b_lines = shared + ITEMS * BM * PITCH;
    __shared__ Offsets many_offsets[ITEMS];
    __shared__ PatchWalk<BM, BN, ITEMS> walk;
    Offsets* const table = ITEMS > 1 ? many_offsets : &walk.offsets;  // by item
    for (bool first = true; walk.next(args, first); first = false) {
        const Patch& patch = walk.patch;
        const int depth = args.k;
        if constexpr (ITEMS > 1) {
            for (int i = threadIdx.x; i < patch.items; i += THREADS) table[i] = offsets_of(args, patch.item + i);
            __syncthreads();
        }
        const bool one_a = shared_by_items(args, args.a), one_b = shared_by_items(args, args.b);
        const float* const a_first = args.a.data + patch.row * args.a.row;
        const float* const b_first = args.b.data + patch.column * args.b.column;
        start_lines<THREADS, PITCH>(shared, lines_of_vectors(args, args.a, depth, args.a.row, args.a.column),
                                    one_a ? 1 : patch.items, patch.rows, depth, args.a.row, args.a.column, A_FILLER,
                                    [&](int item) { return a_first + table[item].a; });
        start_lines<THREADS, PITCH>(b_lines, lines_of_vectors(args, args.b, depth, args.b.column, args.b.row),
                                    one_b ? 1 : patch.items, patch.columns, depth, args.b.column, args.b.row, B_FILLER,
                                    [&](int item) { return b_first + table[item].b; });
        finish_copies();
        __syncthreads();

        // Each thread's rows and columns are as far apart as there are threads along them: neighbours read neighbours.
        const int row_threads = (patch.rows + TM - 1) / TM, column_threads = (patch.columns + TN - 1) / TN;
        const int item = Divisor(row_threads * column_threads).quotient(threadIdx.x);
        const int within = threadIdx.x - item * row_threads * column_threads;
        const int row = Divisor(column_threads).quotient(within), column = within - row * column_threads;
        float sum[TM][TN] = {};
        if (item < patch.items) {
            // Rows and columns that the patch does not have read whatever lies there; their sums are not stored.
            const float *a_at[TM], *b_at[TN];
            const float* const a_item = shared + ((one_a ? 0 : item * patch.rows) + row) * PITCH;
            const float* const b_item = b_lines + ((one_b ? 0 : item * patch.columns) + column) * PITCH;
#pragma unroll
            for (int i = 0; i < TM; ++i) a_at[i] = a_item + i * row_threads * PITCH;
#pragma unroll
            for (int j = 0; j < TN; ++j) b_at[j] = b_item + j * column_threads * PITCH;
#pragma unroll 1
            for (int k = 0; k < depth; k += 4) {
                float4 of_a[TM], of_b[TN];
#pragma unroll
                for (int i = 0; i < TM; ++i) of_a[i] = *reinterpret_cast<const float4*>(a_at[i] + k);
#pragma unroll
                for (int j = 0; j < TN; ++j) of_b[j] = *reinterpret_cast<const float4*>(b_at[j] + k);
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) {
                        sum[i][j] = __fmaf_rn(of_a[i].x, of_b[j].x, sum[i][j]);
                        sum[i][j] = __fmaf_rn(of_a[i].y, of_b[j].y, sum[i][j]);
                        sum[i][j] = __fmaf_rn(of_a[i].z, of_b[j].z, sum[i][j]);
                        sum[i][j] = __fmaf_rn(of_a[i].w, of_b[j].w, sum[i][j]);
                    }
            }
        }

        // The sums take the operands' place, in the order of out.
        const int size = patch.rows * patch.columns;
        float* const target = args.out.data + table[0].out + patch.row * args.out.row + patch.column * args.out.column;
        int out_row, out_column;
        const bool flat = fills_run(args, args.out, patch.rows, patch.columns, patch.items, out_row, out_column) &&
                          is_plain(args);
        if (!flat) out_row = patch.columns, out_column = 1;
        const int begin = flat ? misalignment(target) : 0;
        __syncthreads();
        if (item < patch.items) {
            float* const sums = shared + begin + item * size;
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    const int r = row + i * row_threads, c = column + j * column_threads;
                    if (r < patch.rows && c < patch.columns) sums[r * out_row + c * out_column] = sum[i][j];
                }
        }
        __syncthreads();
        if (flat) {
            const float* source = shared + begin;
            const float alpha = args.alpha;
            deal_run<THREADS>(
                begin, patch.items * size,
                [=](int i) {
                    float4 v = *reinterpret_cast<const float4*>(source + i);
                    store_vector(target + i, alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w);
                },
                [=](int i) { target[i] = alpha * source[i]; });
        } else {
            const Divisor by_item(size), by_row(patch.columns);
            for (int element = threadIdx.x; element < patch.items * size; element += THREADS) {
                const int of = by_item.quotient(element), rest = element - of * size;
                const int r = by_row.quotient(rest), c = rest - r * patch.columns;
                store(args, item_at(args, table[of]), patch.row + r, patch.column + c, shared[element]);
            }
        }
    }
}

}  // namespace tilewave
