// A few rows of C from an operand whose K is contiguous: dot products, lanes along K.
//
// A block computes FEW x (LINES * LINE_WARPS) outputs, or, MIRRORED, as many columns by rows. A warp holds LINES lines
// of the long operand against all FEW lines of the short one; its lanes take four k each of every 128. DEPTH_WARPS
// warps share K in turns of 128. The long operand is read by 16 bytes with VECTORS, else element by element with any
// stride, a step ahead of its use; the short one, of any layout, lies in shared memory, two slabs of K by turns. Every
// output is a tree of sums whose shape depends on nothing but the range of K.
#pragma once

#include "flat.cuh"
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

// A lane's four elements of one line of the long operand: neighbours in memory, or 32 elements apart in k. Where k
// ends, those from `left` on (counted from the warp's first k) are 0 and not read.
template <bool VECTORS>
__device__ __forceinline__ float4 dot_load(const float* at, Index along, Index left) {
    const int lane = threadIdx.x % 32, first = VECTORS ? 4 * lane : lane, apart = VECTORS ? 1 : 32;
    const Index far = apart * along;
    if (left >= DOT_STEP) {
        if constexpr (VECTORS)
            return __ldcs(reinterpret_cast<const float4*>(at));
        else
            return make_float4(__ldcs(at), __ldcs(at + far), __ldcs(at + 2 * far), __ldcs(at + 3 * far));
    }
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first < left) value.x = __ldcs(at);
    if (first + apart < left) value.y = __ldcs(at + far);
    if (first + 2 * apart < left) value.z = __ldcs(at + 2 * far);
    if (first + 3 * apart < left) value.w = __ldcs(at + 3 * far);
    return value;
}

// The lane's elements of one line of the short operand, from shared memory, for the same k.
template <bool VECTORS>
__device__ __forceinline__ float4 dot_read(const float* warp_line) {
    const int lane = threadIdx.x % 32;
    if constexpr (VECTORS) return *reinterpret_cast<const float4*>(warp_line + 4 * lane);
    return make_float4(warp_line[lane], warp_line[lane + 32], warp_line[lane + 64], warp_line[lane + 96]);
}

// Starts copying a slab of the short operand: element (line, k), k from `begin` to `end` or as many as it holds, to
// slab[line * PITCH + (k - begin)], by 16 bytes where lines lie so. Behind the end of K the slab is filled with 0.
template <int FEW, int SLAB, int PITCH, int THREADS>
__device__ __forceinline__ void start_lines(float* slab, const Lines& lines, Index begin, Index end) {
    const int count = smaller(SLAB, end - begin);
    if (lines.along == 1) {
        const float* const source = lines.first + begin;
        const bool vectors = (misalignment(source) & 3) == 0 && (lines.line & 3) == 0;
        constexpr int ALONG = SLAB / 4 < THREADS ? SLAB / 4 : THREADS;
        const int whole = vectors ? count & ~3 : 0;
#pragma unroll 1
        for (int line = threadIdx.x / ALONG; line < lines.count; line += THREADS / ALONG) {
            const int first = threadIdx.x % ALONG;
#pragma unroll 1
            for (int k = 4 * first; k < whole; k += 4 * ALONG)
                start_copy<16>(slab + line * PITCH + k, source + line * lines.line + k);
#pragma unroll 1
            for (int k = whole + first; k < count; k += ALONG)
                start_copy<4>(slab + line * PITCH + k, source + line * lines.line + k);
        }
    } else if (const int line = threadIdx.x % FEW; line < lines.count) {
        // Neighbouring threads take neighbouring lines.
        const float* source = lines.first + line * lines.line + (begin + threadIdx.x / FEW) * lines.along;
#pragma unroll 1
        for (int k = threadIdx.x / FEW; k < count; k += THREADS / FEW, source += THREADS / FEW * lines.along)
            start_copy<4>(slab + line * PITCH + k, source);
    }
    if (count < SLAB)
#pragma unroll 1
        for (int line = 0; line < lines.count; ++line)
#pragma unroll 1
            for (int k = count + threadIdx.x; k < SLAB; k += THREADS) slab[line * PITCH + k] = 0.0f;
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

template <int FEW, int LINES, int LINE_WARPS, int DEPTH_WARPS, bool VECTORS, bool MIRRORED>
__global__ void __launch_bounds__(32 * LINE_WARPS * DEPTH_WARPS, 2) dot_stream(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = 32 * LINE_WARPS * DEPTH_WARPS, MANY = LINES * LINE_WARPS, OUTPUTS = FEW * MANY;
    // A slab lasts for some steps of all warps: a barrier at the end is worth it, and 16 KB hold it.
    constexpr int SPAN = DEPTH_WARPS * DOT_STEP, STEPS = FEW >= 16 ? 1 : FEW == 1 ? 8 : 16 / FEW;
    constexpr int SLAB = STEPS * SPAN, PITCH = SLAB + 4;  // staggered over the banks
    constexpr int SUM_FLOATS = DEPTH_WARPS * OUTPUTS;
    static_assert(SUM_FLOATS + 4 * THREADS <= 2 * FEW * PITCH, "the sums take the slabs' place");
    __shared__ __align__(16) float slabs[2 * FEW * PITCH];
    __shared__ Task<FEW, MANY, MIRRORED> task;
    __shared__ int flag;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int line_warp = warp / DEPTH_WARPS, depth_warp = warp % DEPTH_WARPS;
    for (bool first = true; task.next(args, first); first = false) {
        const Lines& many = task.many;
        const Index k_begin = task.work.k_begin, k_end = task.work.k_end, along = VECTORS ? 1 : many.along;
        start_lines<FEW, SLAB, PITCH, THREADS>(slabs, task.few, k_begin, k_end);
        commit_copies();

        // Lines beyond the tile read its last one; their sums are not stored.
        const float* at[LINES];
        const Index start = k_begin + depth_warp * DOT_STEP + (VECTORS ? 4 * lane : lane);
#pragma unroll
        for (int l = 0; l < LINES; ++l)
            at[l] = many.first + min(line_warp * LINES + l, many.count - 1) * many.line + start * along;
        Index left = k_end - k_begin - depth_warp * DOT_STEP;  // from the warp's first k of a step on
        float4 next[LINES];
#pragma unroll
        for (int l = 0; l < LINES; ++l) next[l] = dot_load<VECTORS>(at[l], along, left);

        float values[FEW * LINES] = {};
        float* slab = slabs;
        for (Index k = k_begin; k < k_end; k += SLAB) {
            wait_for_copies<0>();  // of this slab, started a slab ago
            __syncthreads();       // everybody's copies are there, and all are done with the other slab
            float* const other = slabs + (slabs + FEW * PITCH - slab);
            if (k + SLAB < k_end) start_lines<FEW, SLAB, PITCH, THREADS>(other, task.few, k + SLAB, k_end);
            commit_copies();
            const float* warp_slab = slab + depth_warp * DOT_STEP;
#pragma unroll 1
            for (int step = 0; step < STEPS && left > 0; ++step, warp_slab += SPAN) {
                float4 of_many[LINES];
#pragma unroll
                for (int l = 0; l < LINES; ++l) {
                    of_many[l] = next[l];
                    at[l] += SPAN * along;
                    next[l] = dot_load<VECTORS>(at[l], along, left - SPAN);
                }
#pragma unroll
                for (int f = 0; f < FEW; ++f) {
                    const float4 of_few = dot_read<VECTORS>(warp_slab + f * PITCH);
#pragma unroll
                    for (int l = 0; l < LINES; ++l)
                        values[f * LINES + l] = dot4(of_few, of_many[l], values[f * LINES + l]);
                }
                left -= SPAN;
            }
            slab = other;
        }

        sum_over_lanes(values);
        __syncthreads();  // all are done with the slabs
        float *const sums = slabs, *const scratch = slabs + SUM_FLOATS;
        const int held = dot_value<FEW * LINES>(lane);
        if (held >= 0)
#pragma unroll
            for (int i = 0; i < (FEW * LINES + 31) / 32; ++i) {
                const int f = (held + i) / LINES, l = (held + i) % LINES;
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
        if (combine<OUTPUTS, THREADS>(args, task.work, sums, scratch, &flag))
            store_tile<FEW, MANY, MIRRORED, THREADS>(args, task.work.tile, sums);
    }
}

}  // namespace tilewave
