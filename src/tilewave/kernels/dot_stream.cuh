// A few rows of C from an operand whose K is contiguous: dot products, lanes along K.
//
// A block computes FEW x (LINES * LINE_WARPS) outputs, or, MIRRORED, as many columns by rows. A warp holds LINES lines
// of the long operand against all FEW lines of the short one; its lanes take four k each of every 128. DEPTH_WARPS
// warps share K in turns of 128. Both operands are read by 16 bytes with VECTORS, else element by element with any
// stride. Every output is a tree of sums whose shape depends on nothing but the range of K.
#pragma once

#include "streams.cuh"

namespace tilewave {

constexpr int DOT_STEP = 128;  // k that a warp takes at once: four a lane

// Sums each of COUNT (a power of 2) values over the warp's lanes; half of the values go to either half of the lanes,
// then of those again, so that no lane adds what another one adds. Lane l ends with the sums of the values
// dot_value<COUNT>(l) + i for i < max(1, COUNT / 32) in values[i].
template <int COUNT>
__device__ __forceinline__ void sum_over_lanes(float (&values)[COUNT]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mask = 16, count = COUNT; mask > 0; mask /= 2) {
        if (count == 1) {
            values[0] += __shfl_xor_sync(0xffffffffu, values[0], mask);
            continue;
        }
        count /= 2;
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            if (i >= count) break;
            float sent = upper ? values[i] : values[i + count];
            float kept = upper ? values[i + count] : values[i];
            values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
        }
    }
}

// The first value whose sum a lane holds after sum_over_lanes, or -1 where a lower lane holds it too.
template <int COUNT>
__device__ __forceinline__ int dot_value(int lane) {
    if constexpr (COUNT >= 32)
        return lane * (COUNT / 32);
    else
        return lane % (32 / COUNT) == 0 ? lane / (32 / COUNT) : -1;
}

// The lane's four elements of one line: neighbours in memory, or 32 elements apart in k.
template <bool VECTORS, bool ONCE>
__device__ __forceinline__ float4 dot_load(const float* at, Index along) {
    if constexpr (VECTORS) {
        const float4* vector = reinterpret_cast<const float4*>(at);
        return ONCE ? __ldcs(vector) : __ldg(vector);
    } else {
        const Index far = 32 * along;
        return make_float4(__ldg(at), __ldg(at + far), __ldg(at + 2 * far), __ldg(at + 3 * far));
    }
}

// The same where k ends: elements from `left` on (counted from the lane's first) are not read.
template <bool VECTORS>
__device__ __forceinline__ float4 dot_load_tail(const float* at, Index along, int left) {
    const int apart = VECTORS ? 1 : 32;
    const Index far = apart * along;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (left > 0) value.x = __ldg(at);
    if (left > apart) value.y = __ldg(at + far);
    if (left > 2 * apart) value.z = __ldg(at + 2 * far);
    if (left > 3 * apart) value.w = __ldg(at + 3 * far);
    return value;
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

template <int FEW, int LINES, int LINE_WARPS, int DEPTH_WARPS, bool VECTORS, bool MIRRORED>
__global__ void __launch_bounds__(32 * LINE_WARPS * DEPTH_WARPS, 2) dot_stream(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = 32 * LINE_WARPS * DEPTH_WARPS, MANY = LINES * LINE_WARPS, OUTPUTS = FEW * MANY;
    constexpr int UNROLL = FEW * LINES > 16 ? 1 : 2;
    __shared__ float sums[DEPTH_WARPS * OUTPUTS];
    __shared__ float scratch[THREADS];
    __shared__ int flag;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int line_warp = warp / DEPTH_WARPS, depth_warp = warp % DEPTH_WARPS;
    for (Position position(args), begin = position; ; begin = position) {
        WorkItem work;
        if (!position.next(args, work)) break;
        const Streams<FEW, MANY, MIRRORED> streams(args, work.tile);
        const Lines &few = streams.few, &many = streams.many;
        const Index few_along = VECTORS ? 1 : few.along, many_along = VECTORS ? 1 : many.along;

        // Lines beyond the tile read its last one; their sums are not stored.
        const Index start = work.k_begin + depth_warp * DOT_STEP + (VECTORS ? 4 * lane : lane);
        const float *few_at = few.first + start * few_along, *many_at[LINES];
#pragma unroll
        for (int l = 0; l < LINES; ++l)
            many_at[l] = many.first + min(line_warp * LINES + l, many.count - 1) * many.line + start * many_along;

        float values[FEW * LINES] = {};
        Index left = work.k_end - work.k_begin - depth_warp * DOT_STEP;  // of the warp's next step on
        const Index few_step = DEPTH_WARPS * DOT_STEP * few_along, many_step = DEPTH_WARPS * DOT_STEP * many_along;
#pragma unroll UNROLL
        for (; left >= DOT_STEP; left -= DEPTH_WARPS * DOT_STEP) {
            float4 of_many[LINES];
#pragma unroll
            for (int l = 0; l < LINES; ++l) {
                of_many[l] = dot_load<VECTORS, true>(many_at[l], many_along);
                many_at[l] += many_step;
            }
            const float* at = few_at;
#pragma unroll
            for (int f = 0; f < FEW; ++f) {
                float4 of_few = dot_load<VECTORS, false>(at, few_along);
                if (f + 1 < few.count) at += few.line;
#pragma unroll
                for (int l = 0; l < LINES; ++l)
                    values[f * LINES + l] = dot4(of_few, of_many[l], values[f * LINES + l]);
            }
            few_at += few_step;
        }
        if (left > 0) {
            const int lane_left = static_cast<int>(left) - (VECTORS ? 4 * lane : lane);
            float4 of_many[LINES];
#pragma unroll
            for (int l = 0; l < LINES; ++l) of_many[l] = dot_load_tail<VECTORS>(many_at[l], many_along, lane_left);
#pragma unroll
            for (int f = 0; f < FEW; ++f) {
                float4 of_few = dot_load_tail<VECTORS>(few_at, few_along, lane_left);
                if (f + 1 < few.count) few_at += few.line;
#pragma unroll
                for (int l = 0; l < LINES; ++l)
                    values[f * LINES + l] = dot4(of_few, of_many[l], values[f * LINES + l]);
            }
        }

        sum_over_lanes(values);
        __syncthreads();  // the walker's last tile is done with the sums
        const int first = dot_value<FEW * LINES>(lane);
        if (first >= 0)
#pragma unroll
            for (int i = 0; i < (FEW * LINES + 31) / 32; ++i) {
                const int f = (first + i) / LINES, l = (first + i) % LINES;
                sums[depth_warp * OUTPUTS + f * MANY + line_warp * LINES + l] = values[i];
            }
        __syncthreads();
        if constexpr (DEPTH_WARPS > 1) {
            for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
                float sum = sums[i];
                for (int other = 1; other < DEPTH_WARPS; ++other) sum += sums[other * OUTPUTS + i];
                sums[i] = sum;
            }
            __syncthreads();
        }
        work = begin.again(args);
        if (combine<OUTPUTS, THREADS>(args, work, sums, scratch, &flag))
            store_tile<FEW, MANY, MIRRORED, THREADS>(args, work.tile, sums);
    }
}

}  // namespace tilewave
