// Tiny products by the million, and tall ones of few columns: all that a tile needs is in shared memory at once.
//
// A block computes a BM x BN patch of ITEMS consecutive items of the batch, whose K is at most BK; sizes are run-time
// values. Operands come as `staging.cuh` brings them; one that all items share is there once. A thread computes a
// TM x TN patch of one item as plain chains of fused multiply-adds in the order of k, and reads by 16 bytes where
// both operands lie so. The sums then lie in shared memory in the order of out: where the tile's part of out is one run
// of memory, it is written by 16 bytes wherever it begins.
#pragma once

#include "staging.cuh"
#include "tile_output.cuh"

namespace tilewave {

constexpr __host__ __device__ int tiny_threads(int bm, int bn, int tm, int tn, int items) {
    return items * (bm / tm) * (bn / tn);
}

// Blocks that an SM should hold: loads of some must travel while others compute and store.
constexpr __host__ __device__ int tiny_blocks(int threads, int sums) {
    if (sums > 16) return (sums > 32 ? 256 : 512) / threads;
    return threads > 192 ? 3 : threads > 128 ? 5 : 6;
}

// The COUNT lines of a part that a thread multiplies. Where K is along memory, neighbouring threads have neighbouring
// lines; where the lines are, a thread has groups of neighbours.
template <int COUNT>
struct Own {
    static constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    static_assert(COUNT % GROUP == 0, "whole groups");
    int first;  // line
    int near;   // from one line to the next of a group
    int far;    // from a group to the next

    __device__ __forceinline__ Own(bool along_k, int index, int threads)
        : first(along_k ? index : GROUP * index), near(along_k ? threads : 1), far(GROUP * threads) {}

    __device__ __forceinline__ int line(int i) const { return first + i % GROUP * near + i / GROUP * far; }
};

// A thread's lines of one item of a part, read K by K, WIDTH (1 or 4) at a time.
template <int COUNT, bool ALONG_K, int WIDTH>
struct Reader {
    static constexpr int GROUP = Own<COUNT>::GROUP;
    static constexpr int GROUPS = COUNT / GROUP, POINTERS = ALONG_K ? COUNT : GROUPS;
    const float* data;  // in shared memory
    int at[POINTERS];
    int step;

    __device__ __forceinline__ Reader(const float* data, const Part& part, int item, const Own<COUNT>& own)
        : data(data), step(part.step) {
        const int begin = part.begin + item * part.item_step;
#pragma unroll
        for (int i = 0; i < POINTERS; ++i) at[i] = begin + own.line(ALONG_K ? i : i * GROUP) * part.line_step;
    }

    // values[k][line] of the next WIDTH k.
    __device__ __forceinline__ void read(float (&values)[WIDTH][COUNT]) {
        if constexpr (ALONG_K) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if constexpr (WIDTH == 4) {
                    const float4 v = *reinterpret_cast<const float4*>(data + at[i]);
                    values[0][i] = v.x, values[1][i] = v.y, values[2][i] = v.z, values[3][i] = v.w;
                } else {
                    values[0][i] = data[at[i]];
                }
                at[i] += WIDTH;
            }
        } else {
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
                    if constexpr (WIDTH == 4 && GROUP == 4) {
                        const float4 v = *reinterpret_cast<const float4*>(data + at[i]);
                        values[k][4 * i] = v.x, values[k][4 * i + 1] = v.y;
                        values[k][4 * i + 2] = v.z, values[k][4 * i + 3] = v.w;
                    } else {
#pragma unroll
                        for (int j = 0; j < GROUP; ++j) values[k][GROUP * i + j] = data[at[i] + j];
                    }
                    at[i] += step;
                }
            }
        }
    }
};

template <int TM, int TN, bool A_ALONG_K, bool B_ALONG_K, int WIDTH>
__device__ __forceinline__ void add_steps(float (&sum)[TM][TN], Reader<TM, A_ALONG_K, WIDTH> a,
                                          Reader<TN, B_ALONG_K, WIDTH> b, int depth) {
    constexpr int AT_ONCE = 4 / WIDTH;
#pragma unroll AT_ONCE
    for (int k = 0; k < depth; k += WIDTH) {
        float of_a[WIDTH][TM], of_b[WIDTH][TN];
        a.read(of_a);
        b.read(of_b);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j)
#pragma unroll
                for (int kk = 0; kk < WIDTH; ++kk) sum[i][j] = __fmaf_rn(of_a[kk][i], of_b[kk][j], sum[i][j]);
    }
}

// Adds a thread's products over all of K. Lines that the patch does not have read whatever lies there; their sums are
// not stored.
template <bool A_ALONG_K, bool B_ALONG_K, int TM, int TN>
__device__ __forceinline__ void add_products(float (&sum)[TM][TN], const float* a, const Part& part_a, int item_a,
                                             const Own<TM>& rows, const float* b, const Part& part_b, int item_b,
                                             const Own<TN>& columns, int depth) {
    constexpr bool WIDE = (A_ALONG_K || TM % 4 == 0) && (B_ALONG_K || TN % 4 == 0);
    // Lines along K are filled up to vectors; others end with K.
    if (WIDE && part_a.vectors && part_b.vectors && ((A_ALONG_K && B_ALONG_K) || depth % 4 == 0)) {
        if constexpr (WIDE)
            add_steps<TM, TN, A_ALONG_K, B_ALONG_K, 4>(sum, {a, part_a, item_a, rows},
                                                       {b, part_b, item_b, columns}, depth);
    } else {
        add_steps<TM, TN, A_ALONG_K, B_ALONG_K, 1>(sum, {a, part_a, item_a, rows},
                                                   {b, part_b, item_b, columns}, depth);
    }
}

// Puts a thread's values of one row in their places, `step` apart, by 16 bytes where its groups of columns are
// `vectors`.
template <int TN, typename Step>
__device__ __forceinline__ void put_line(float* line, Step step, const float (&values)[TN], const Own<TN>& own,
                                         int columns, bool vectors) {
#pragma unroll
    for (int j = 0; j < TN; j += Own<TN>::GROUP) {
        if constexpr (Own<TN>::GROUP == 4)
            if (vectors && own.line(j) + 3 < columns) {
                *reinterpret_cast<float4*>(line + own.line(j)) =
                    make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
                continue;
            }
#pragma unroll
        for (int i = j; i < j + Own<TN>::GROUP; ++i)
            if (own.line(i) < columns) line[own.line(i) * step] = values[i];
    }
}

template <int BM, int BN, int BK, int TM, int TN, int ITEMS>
__global__ void __launch_bounds__(tiny_threads(BM, BN, TM, TN, ITEMS),
                                  tiny_blocks(tiny_threads(BM, BN, TM, TN, ITEMS), TM* TN))
    tiny(const __grid_constant__ GemmArgs args) {
    static_assert(BM % TM == 0 && BN % TN == 0 && BK % 4 == 0, "threads share a patch evenly");
    constexpr int THREADS = tiny_threads(BM, BN, TM, TN, ITEMS), PITCH = line_pitch(BK);
    extern __shared__ __align__(128) float shared[];
    float* const b_shared = shared + part_floats(ITEMS * BM, BK);
    __shared__ Offsets table[ITEMS];  // by item, where the batch has more than one axis
    __shared__ typename PatchWalk<BM, BN, ITEMS>::Shared walk_shared;
    PatchWalk<BM, BN, ITEMS> walk(walk_shared);
    const bool one_axis = one_batch_axis(args);
    for (bool first = true; walk.next(args, first); first = false) {
        const int depth = args.k;
        const Patch patch = walk.patch;
        if (__builtin_expect(!one_axis, 0)) {
#pragma unroll 1
            for (int i = threadIdx.x; i < patch.items; i += THREADS) table[i] = offsets_of(args, patch.item + i);
            __syncthreads();
        }
        // Where an item's matrix begins, as a distance from that of the batch's first.
        constexpr int INNER = BATCH_LEVELS - 1;
        const bool one_a = shared_by_items(args, args.a), one_b = shared_by_items(args, args.b);
        const float* const a_first = args.a.data + patch.row * args.a.row;
        const float* const b_first = args.b.data + patch.column * args.b.column;
        const Part part_a = start_part<THREADS, PITCH>(
            shared, args, args.a, one_a ? 1 : patch.items, patch.rows, depth, args.a.row, args.a.column, A_FILLER,
            [&](int item) { return a_first + (one_axis ? (patch.item + item) * args.a.batch[INNER] : table[item].a); });
        const Part part_b = start_part<THREADS, PITCH>(
            b_shared, args, args.b, one_b ? 1 : patch.items, patch.columns, depth, args.b.column, args.b.row, B_FILLER,
            [&](int item) { return b_first + (one_axis ? (patch.item + item) * args.b.batch[INNER] : table[item].b); });

        const int row_threads = (patch.rows + TM - 1) / TM, column_threads = (patch.columns + TN - 1) / TN;
        const int item = Divisor(row_threads * column_threads).quotient(threadIdx.x);
        const int within = threadIdx.x - item * row_threads * column_threads;
        const int row = Divisor(column_threads).quotient(within), column = within - row * column_threads;
        const Own<TM> rows(part_a.along_k(), row, row_threads);
        const Own<TN> columns(part_b.along_k(), column, column_threads);
        finish_copies();
        __syncthreads();
        float sum[TM][TN] = {};
        if (item < patch.items) {
            const int item_a = one_a ? 0 : item, item_b = one_b ? 0 : item;
            if (part_a.along_k()) {
                if (part_b.along_k())
                    add_products<true, true>(sum, shared, part_a, item_a, rows, b_shared, part_b, item_b, columns,
                                             depth);
                else
                    add_products<true, false>(sum, shared, part_a, item_a, rows, b_shared, part_b, item_b, columns,
                                              depth);
            } else if (part_b.along_k()) {
                add_products<false, true>(sum, shared, part_a, item_a, rows, b_shared, part_b, item_b, columns,
                                          depth);
            } else {
                add_products<false, false>(sum, shared, part_a, item_a, rows, b_shared, part_b, item_b, columns,
                                           depth);
            }
        }

        // The sums take the operands' place, in the order of out.
        const Patch& where = walk_shared.patch;  // read anew: it occupies no registers meanwhile
        const int size = where.rows * where.columns;
        const bool plain = is_plain(args);
        float* const target = args.out.data +
                              (one_axis ? where.item * args.out.batch[INNER] : table[0].out) +
                              where.row * args.out.row + where.column * args.out.column;
        Run run = run_of(args, args.out, where.items, where.rows, where.columns, args.out.row, args.out.column);
        const bool flat = run.found && plain;
        if (!flat) run.line = where.columns, run.along = 1;
        const int begin = flat ? misalignment(target) : 0;
        const float alpha = args.alpha;
        if (plain && !flat) {
            if (item < where.items) {
                float* const out = target + (one_axis ? item * args.out.batch[INNER] : table[item].out - table[0].out);
                const bool vectors = TN % 4 == 0 && columns.near == 1 && (args.flags & OUT_VECTORS) != 0;
#pragma unroll
                for (int i = 0; i < TM; ++i) {
#pragma unroll
                    for (int j = 0; j < TN; ++j) sum[i][j] *= alpha;
                    if (rows.line(i) < where.rows)
                        put_line(out + rows.line(i) * args.out.row, args.out.column, sum[i], columns, where.columns,
                                 vectors);
                }
            }
            continue;
        }
        __syncthreads();
        if (item < where.items) {
            float* const sums = shared + begin + item * size;
            // Whole vectors of every row, of every item, where its columns are neighbours.
            const bool vectors =
                TN % 4 == 0 && columns.near == 1 && run.along == 1 && ((begin | where.columns) & 3) == 0;
#pragma unroll
            for (int i = 0; i < TM; ++i)
                if (rows.line(i) < where.rows)
                    put_line(sums + rows.line(i) * run.line, run.along, sum[i], columns, where.columns, vectors);
        }
        __syncthreads();
        if (flat) {
            const float* source = shared + begin;
            deal_run<THREADS>(
                begin, where.items * size,
                [=](int i) {
                    float4 v = *reinterpret_cast<const float4*>(source + i);
                    store_vector(target + i, alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w);
                },
                [=](int i) { target[i] = alpha * source[i]; });
            continue;
        }
        const Divisor by_item(size), by_row(where.columns);
#pragma unroll 1
        for (int element = threadIdx.x; element < where.items * size; element += THREADS) {
            const int of = by_item.quotient(element), rest = element - of * size;
            const int r = by_row.quotient(rest), c = rest - r * where.columns;
            const Offsets offsets = one_axis ? offsets_of(args, where.item + of) : table[of];
            store(args, item_at(args, offsets), where.row + r, where.column + c, shared[element]);
        }
    }
}

}  // namespace tilewave
