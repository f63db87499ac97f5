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

// Finishes and stores ROWS x COLUMNS sums that lie in shared memory row by row, as all THREADS of the block.
// `row_of(r)` is the row of C of row r of them; columns follow each other from `column` on.
template <int ROWS, int COLUMNS, int THREADS, typename RowOf>
__device__ __forceinline__ void store_sums(const GemmArgs& args, const Item& item, const Window& window, Index column,
                                           float* sums, RowOf row_of) {
    const auto inside = [&](Index row, Index at) {
        return row >= window.row && row < window.row_end && at >= window.column && at < window.column_end;
    };
    if (stores_vectors(args, window, column, COLUMNS)) {
        constexpr int VECTORS = COLUMNS / 4;
#pragma unroll 2
        for (int i = thread_index(); i < ROWS * VECTORS; i += THREADS) {
            Index row = row_of(i / VECTORS), at = column + i % VECTORS * 4;
            if (!inside(row, at)) continue;
            float4 v = *reinterpret_cast<const float4*>(sums + 4 * i);
            float alpha = args.alpha;
            store_vector(item.out + row * args.out.row + at, alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w);
        }
    } else if (is_plain(args)) {
#pragma unroll 4
        for (int i = thread_index(); i < ROWS * COLUMNS; i += THREADS) {
            Index row = row_of(i / COLUMNS), at = column + i % COLUMNS;
            if (!inside(row, at)) continue;
            item.out[row * args.out.row + at * args.out.column] = args.alpha * sums[i];
        }
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
                Index row = row_of(i / COLUMNS), at = column + i % COLUMNS;
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
            Index row = row_of(i / COLUMNS), at = column + i % COLUMNS;
            if (!inside(row, at)) continue;
            float value = sums[i];
            store_preactivation(args, item, row, at, value);
            item.out[row * args.out.row + at * args.out.column] = activate(args.activation, value);
        }
    }
}

}  // namespace tilewave
