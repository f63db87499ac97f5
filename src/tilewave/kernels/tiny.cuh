// Tiny products by the million, and tall ones of few columns: all that a tile needs is in shared memory at once.
//
// A block computes a BM x BN patch of ITEMS consecutive items of the batch, whose K is at most BK. Operands whose
// part of the tile is one run of memory, row by row or column by column, item after item, come by flat copies of 16
// bytes wherever it begins; others come element by element. An operand that all items share is read once. Sizes are
// run-time values. A thread computes a TM x TN patch of one item as plain chains of fused multiply-adds in the order
// of k; the sums then lie in shared memory in the order of out, and leave as the operands came.
#pragma once

#include "staging.cuh"
#include "tile_output.cuh"

namespace tilewave {

template <int BM, int BN, int BK, int TM, int TN, int ITEMS>
__global__ void __launch_bounds__(ITEMS*(BM / TM) * (BN / TN)) tiny(const __grid_constant__ GemmArgs args) {
    static_assert(BM % TM == 0 && BN % TN == 0, "threads share a patch evenly");
    constexpr int THREADS = ITEMS * (BM / TM) * (BN / TN);
    constexpr int A_FLOATS = flat_floats(ITEMS * BM * BK);
    extern __shared__ __align__(128) float shared[];
    __shared__ Offsets table[ITEMS];
    Walk walk(args.cut, blockIdx.x);
    WorkItem work;
    while (walk.next(work)) {
        const Patch patch = patch_of<BM, BN, ITEMS>(args, work.tile);
        const int depth = args.k;
        __syncthreads();  // the walker's last tile is done with shared memory
        for (int i = threadIdx.x; i < patch.items; i += THREADS) table[i] = offsets_of(args, patch.item + i);
        __syncthreads();

        const Staged a = start_part<THREADS>(shared, args, args.a, patch.rows, depth, patch.items, [&](int item) {
            return args.a.data + table[item].a + patch.row * args.a.row;
        });
        float* const b_region = shared + A_FLOATS;
        const Staged b = start_part<THREADS>(b_region, args, args.b, depth, patch.columns, patch.items, [&](int item) {
            return args.b.data + table[item].b + patch.column * args.b.column;
        });
        finish_copies();
        __syncthreads();

        // Each thread's rows and columns are as far apart as there are threads along them: neighbours read neighbours.
        const int row_threads = (patch.rows + TM - 1) / TM, column_threads = (patch.columns + TN - 1) / TN;
        const int item = Divisor(row_threads * column_threads).quotient(threadIdx.x);
        const int within = threadIdx.x - item * row_threads * column_threads;
        const int row = Divisor(column_threads).quotient(within), column = within - row * column_threads;
        float sum[TM][TN] = {};
        if (item < patch.items) {
            // Rows and columns beyond the patch read its last one; their sums are not stored.
            int a_at[TM], b_at[TN];
            const int a_first = a.first + item * a.item, b_first = A_FLOATS + b.first + item * b.item;
            for (int i = 0; i < TM; ++i) a_at[i] = a_first + min(row + i * row_threads, patch.rows - 1) * a.row;
            for (int j = 0; j < TN; ++j)
                b_at[j] = b_first + min(column + j * column_threads, patch.columns - 1) * b.column;
#pragma unroll 4
            for (int k = 0; k < depth; ++k) {
                float a_values[TM], b_values[TN];
                for (int i = 0; i < TM; ++i) a_values[i] = shared[a_at[i] + k * a.column];
                for (int j = 0; j < TN; ++j) b_values[j] = shared[b_at[j] + k * b.row];
                for (int i = 0; i < TM; ++i)
                    for (int j = 0; j < TN; ++j) sum[i][j] = __fmaf_rn(a_values[i], b_values[j], sum[i][j]);
            }
        }

        // The sums take the operands' place, in the order of out.
        Staged out;
        const int size = patch.rows * patch.columns;
        float* const target = args.out.data + table[0].out + patch.row * args.out.row + patch.column * args.out.column;
        const bool flat = fills_run(args, args.out, patch.rows, patch.columns, patch.items, out) && is_plain(args);
        if (!flat) out = {0, size, patch.columns, 1};
        out.first = flat ? misalignment(target) : 0;
        __syncthreads();
        if (item < patch.items)
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j) {
                    int r = row + i * row_threads, c = column + j * column_threads;
                    if (r < patch.rows && c < patch.columns)
                        shared[out.first + item * size + r * out.row + c * out.column] = sum[i][j];
                }
        __syncthreads();
        if (flat) {
            const float* source = shared + out.first;
            const float alpha = args.alpha;
            deal_run<THREADS>(
                out.first, patch.items * size,
                [=](int i) {
                    float4 v = *reinterpret_cast<const float4*>(source + i);
                    store_vector(target + i, alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w);
                },
                [=](int i) { target[i] = alpha * source[i]; });
        } else {
            Divisor by_item(size), by_row(patch.columns);
            for (int element = threadIdx.x; element < patch.items * size; element += THREADS) {
                int of = by_item.quotient(element), rest = element - of * size;
                int r = by_row.quotient(rest), c = rest - r * patch.columns;
                store(args, item_at(args, table[of]), patch.row + r, patch.column + c, shared[element]);
            }
        }
    }
}

}  // namespace tilewave
