// One row of C from an operand whose K is contiguous: dot products with a vector, lanes along K.
//
// A block computes 1 x (LINES * WARPS) outputs, or, MIRRORED, as many by one. Every warp has LINES lines of the long
// operand to itself; its lanes take four k each of every 128 and read them by 16 bytes, AHEAD turns before their use.
// The vector is read where it lies: all warps need the same of it at about the same time, so L1 serves them, and no
// barrier stands between a warp and its next lines. Every output is a tree of sums whose shape depends on nothing but
// the range of K.
#pragma once

#include "dot_stream.cuh"

namespace tilewave {

// A lane's four elements of the vector, at `at` and as far apart as `along` says; `vectors`: they can be read by 16
// bytes. Where k ends, those from `left` on (counted from the warp's first k) are 0 and not read.
__device__ __forceinline__ float4 vector_load(const float* at, Index along, bool vectors, Index left) {
    if (vectors && left >= DOT_STEP) return __ldg(reinterpret_cast<const float4*>(at));
    const int first = 4 * (threadIdx.x % 32);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first < left) value.x = __ldg(at);
    if (first + 1 < left) value.y = __ldg(at + along);
    if (first + 2 < left) value.z = __ldg(at + 2 * along);
    if (first + 3 < left) value.w = __ldg(at + 3 * along);
    return value;
}

template <int LINES, int WARPS, int AHEAD, bool MIRRORED>
__global__ void __launch_bounds__(32 * WARPS, 2) dot_vector(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = 32 * WARPS, MANY = LINES * WARPS;
    __shared__ __align__(16) float sums[MANY + 4 * THREADS];
    __shared__ Task<1, MANY, MIRRORED> task;
    __shared__ int flag;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (bool first = true; task.next(args, first); first = false) {
        const Lines& many = task.many;
        const Index start = task.work.k_begin + 4 * lane, along = task.few.along;
        // Lines beyond the tile read its last one; their sums are not stored.
        const float* at[LINES];
#pragma unroll
        for (int l = 0; l < LINES; ++l)
            at[l] = many.first + min(warp * LINES + l, many.count - 1) * many.line + start;
        const float* vector = task.few.first + start * along;
        const bool vectors = along == 1 && (misalignment(task.few.first) & 3) == 0;
        // From the warp's first k of a turn on; none where the warp has no line.
        Index left = warp * LINES < many.count ? task.work.k_end - task.work.k_begin : 0;
        float4 next[AHEAD][LINES];
#pragma unroll
        for (int turn = 0; turn < AHEAD; ++turn)
#pragma unroll
            for (int l = 0; l < LINES; ++l)
                next[turn][l] = dot_load<true>(at[l] + turn * DOT_STEP, 1, left - turn * DOT_STEP);

        float values[LINES] = {};
        while (left > 0) {
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) {
                const float4 of_vector = vector_load(vector, along, vectors, left);
#pragma unroll
                for (int l = 0; l < LINES; ++l) {
                    values[l] = dot4(of_vector, next[turn][l], values[l]);
                    next[turn][l] = dot_load<true>(at[l] + AHEAD * DOT_STEP, 1, left - AHEAD * DOT_STEP);
                    at[l] += DOT_STEP;
                }
                vector += DOT_STEP * along;
                left -= DOT_STEP;
            }
        }

        sum_over_lanes(values);
        const int held = dot_value<LINES>(lane);
        if (held >= 0) sums[warp * LINES + held] = values[0];
        __syncthreads();
        if (combine<MANY, THREADS>(args, task.work, sums, sums + MANY, &flag))
            store_tile<1, MANY, MIRRORED, THREADS>(args, task.work.tile, sums);
    }
}

}  // namespace tilewave
