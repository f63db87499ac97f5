// From the sums of a tile to memory: partial sums of a cut tile, and the outputs of a whole one.
#pragma once

#include "epilogue.cuh"

namespace tilewave {

// The part of C that a tile must write: elements (row, column) with first <= row < end, likewise the column.
struct Window {
    Index row, row_end, column, column_end;
};

// The thread's index, read anew at every call: what is made of it is not kept in registers through the loop over K.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// Written out, because the compiler takes a float4 of computed elements apart into four stores.
__device__ __forceinline__ void store_vector(float* target, float x, float y, float z, float w) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Read past the L1 cache and the read-only cache, which may hold what another block has overwritten.
__device__ __forceinline__ float4 load_partial(const float* source) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(source)
                 : "memory");
    return v;
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Whether the outputs of a tile whose first column is `column` may be stored by 16 bytes without an epilogue.
__device__ __forceinline__ bool stores_vectors(const GemmArgs& args, const Window& window, Index column, int columns) {
    bool whole_vectors = (column & 3) == 0 && ((window.column_end & 3) == 0 || column + columns <= window.column_end);
    return is_plain(args) && (args.flags & OUT_VECTORS) != 0 && whole_vectors;
}

// ROWS rows of a tile's sums that lie in shared memory row by row: in C, RUN of them follow each other, and from the first
// of a run to that of the next it is APART rows.
template <int ROWS, int RUN, int APART>
struct SumRows {
    static_assert(ROWS % RUN == 0, "runs are whole");

    Index first;  // the first one's row in C

    __device__ __forceinline__ Index operator()(int r) const { return first + r / RUN * APART + r % RUN; }
};

// Stores alpha times the sums, UNIT columns (1 or 4) at a time, as all THREADS of the block. A thread stays in its columns
// and steps from row to row, so that an output takes a load, a product, a comparison, a store and the step.
template <int UNIT, int COLUMNS, int THREADS, int ROWS, int RUN, int APART>
__device__ __forceinline__ void store_plain(const GemmArgs& args, const Item& item, const Window& window, Index column,
                                            const float* sums, const SumRows<ROWS, RUN, APART>& rows) {
    constexpr int PER_ROW = COLUMNS / UNIT;
    constexpr int AT_ONCE = THREADS > PER_ROW ? THREADS / PER_ROW : 1;  // rows
    constexpr int PARTS = THREADS > PER_ROW ? 1 : PER_ROW / THREADS;    // of a row
    static_assert(AT_ONCE * PER_ROW == PARTS * THREADS && RUN % AT_ONCE == 0, "threads share the rows evenly");
    const int place = thread_index() % PER_ROW * UNIT, begin = thread_index() / PER_ROW;
    const Index row = rows.first + begin;
    // Counted from the thread's first, the tile's own rows are `kept` from `skipped` on, which may be below 0.
    const int skipped = static_cast<int>(window.row - row);
    const unsigned kept = static_cast<unsigned>(smaller(window.row_end - window.row, 1 << 30));
    const Index step = AT_ONCE * args.out.row;
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
        const int in_row = place + part * THREADS * UNIT;
        const Index at = column + in_row;
        if (at < window.column || at >= window.column_end) continue;
        float* out = item.out + row * args.out.row + at * args.out.column;
        const float* from = sums + begin * COLUMNS + in_row;
#pragma unroll 1
        for (int run = 0; run < ROWS / RUN; ++run) {
            float* to = out;
#pragma unroll 8
            for (int i = 0; i < RUN; i += AT_ONCE) {
                const bool own = static_cast<unsigned>(run * APART + i - skipped) < kept;
                if constexpr (UNIT == 4) {
                    const float4 v = *reinterpret_cast<const float4*>(from + i * COLUMNS);
                    const float x = args.alpha * v.x, y = args.alpha * v.y, z = args.alpha * v.z, w = args.alpha * v.w;
                    if (own) store_vector(to, x, y, z, w);
                } else {
                    const float value = args.alpha * from[i * COLUMNS];
                    if (own) *to = value;
                }
                to += step;
            }
            out += APART * args.out.row;
            from += RUN * COLUMNS;
        }
    }
}

// Finishes and stores the sums of a tile, or of some rows of it, that lie in shared memory row by row, as all THREADS of
// the block. Their columns follow each other from `column` on.
template <int COLUMNS, int THREADS, int ROWS, int RUN, int APART>
__device__ __forceinline__ void store_sums(const GemmArgs& args, const Item& item, const Window& window, Index column,
                                           float* sums, const SumRows<ROWS, RUN, APART>& rows) {
    const auto inside = [&](Index row, Index at) {
        return row >= window.row && row < window.row_end && at >= window.column && at < window.column_end;
    };
    if (stores_vectors(args, window, column, COLUMNS)) {
        store_plain<4, COLUMNS, THREADS>(args, item, window, column, sums, rows);
    } else if (is_plain(args)) {
        store_plain<1, COLUMNS, THREADS>(args, item, window, column, sums, rows);
    } else {
        // A thread loads what it adds to several elements at once; the activations, which are long, follow one by one.
        constexpr int AT_ONCE = 4;
        static_assert(ROWS * COLUMNS % (AT_ONCE * THREADS) == 0, "threads share the sums evenly");
#pragma unroll 1
        for (int first = thread_index(); first < ROWS * COLUMNS; first += AT_ONCE * THREADS) {
            Addends addends[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                int i = first + u * THREADS;
                Index row = rows(i / COLUMNS), at = column + i % COLUMNS;
                addends[u] = {0.0f, 0.0f};
                if (inside(row, at)) addends[u] = load_addends(args, item, row, at);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                int i = first + u * THREADS;
                sums[i] = before_activation(args, addends[u], sums[i]);
            }
        }
#pragma unroll 1
        for (int i = thread_index(); i < ROWS * COLUMNS; i += THREADS) {
            Index row = rows(i / COLUMNS), at = column + i % COLUMNS;
            if (!inside(row, at)) continue;
            float value = sums[i];
            store_preactivation(args, item, row, at, value);
            item.out[row * args.out.row + at * args.out.column] = activate(args.activation, value);
        }
    }
}

}  // namespace tilewave
