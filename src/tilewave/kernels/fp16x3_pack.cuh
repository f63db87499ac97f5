// The pre-pass of "fp16x3": float32 operands become packed ones (fp16x3_args.cuh).
//
// What a packed row's elements lie apart in memory decides how it is read. Where elements along K are neighbours (or
// nothing is), a few warps take a row each, find its largest magnitude, and read it again out of the cache. Where
// packed rows are neighbours, fp16x3_scan finds the largest magnitudes of strips of rows, one chunk of K a block, and
// fp16x3_pack, after it, combines the chunks' and splits. Both kernels work on two operands at once.
#pragma once

#include "fp16x3_args.cuh"

namespace tilewave {

constexpr int PACK_THREADS = 256;
constexpr int PACK_WARPS = PACK_THREADS / 32;
constexpr int SCAN_ROWS = 128;  // of a strip: a warp reads 512 bytes at a time
constexpr int PACK_ROWS = 32;   // of a strip that is split: a warp reads 4 times 128 bytes, and writes 64 by 64

// One operand to be packed. Strides are in elements.
struct Unpacked {
    const float* data;
    Index row, column;           // to the next packed row, and along K
    Index batch[BATCH_LEVELS];   // to the next item
    Index extent[BATCH_LEVELS];  // items along each batch axis; 1 where the operand repeats
    Index rows, k, intervals;    // packed rows of an item, elements of each, intervals of K with the padding
    unsigned char* packed;
    int* shifts;
    int* guards;
    unsigned* largest;  // chunk by chunk, the largest magnitude of each packed row: only where rows are neighbours
    Index scan_blocks, pack_blocks;  // of each kernel; a kernel that has nothing to do is not launched
    int strips;   // whether packed rows are neighbours, so that strips of them are scanned and packed
    int vectors;  // whether four neighbours may be read at once
    int warps;    // that share a row, where there are no strips: 1, 2, 4 or 8
    int chunk;    // elements of K that a block scans, a multiple of 8
};

struct PackArgs {
    Unpacked operands[2];
};

constexpr int GUARD_ZERO = 1 << 28;            // of a row of zeros
constexpr int GUARD_NONFINITE = 1 - (1 << 29);  // of a row with NaN or an infinity
constexpr unsigned NONFINITE = 0x80000000u;     // marks a largest magnitude: there are others that are not finite

// The larger of two largest finite magnitudes, with the mark of both. Bits of magnitudes compare as they do.
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return max(a & ~NONFINITE, b & ~NONFINITE) | ((a | b) & NONFINITE);
}

__device__ __forceinline__ unsigned magnitude(float x) {
    unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : NONFINITE;
}

// 14 - the exponent of the largest finite magnitude; 0 for a row of zeros.
__device__ __forceinline__ int shift_of(unsigned largest) {
    largest &= ~NONFINITE;
    if (largest == 0) return 0;
    int exponent = largest >= 0x00800000u ? static_cast<int>(largest >> 23) - 127 : -118 - __clz(largest);
    return 14 - exponent;
}

// 2^shift as two factors: the power itself need not be a float32.
struct Scale {
    float first, second;

    __device__ __forceinline__ explicit Scale(int shift) {
        int half = shift / 2;
        first = __int_as_float((half + 127) << 23);
        second = __int_as_float((shift - half + 127) << 23);
    }
};

// Counts of a row's elements that its guard is made of.
struct Counts {
    int large, small;

    __device__ __forceinline__ int weight() const { return 2 * (large - 4 * small); }
};

__device__ __forceinline__ int guard_of(Counts counts, unsigned largest) {
    if (largest >= NONFINITE) return GUARD_NONFINITE;
    return largest == 0 ? GUARD_ZERO : counts.weight() + (counts.small > 0);
}

__device__ __forceinline__ unsigned pair_of_halves(float low, float high) {
    unsigned pair;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.f16.f32 low, %1;\n"
        "cvt.rn.f16.f32 high, %2;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(pair)
        : "f"(low), "f"(high));
    return pair;
}

__device__ __forceinline__ float2 floats_of(unsigned pair) {
    float2 v;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(pair));
    return v;
}

// An element scaled; 0 for one that is not finite.
__device__ __forceinline__ float scaled(float x, Scale scale) {
    return magnitude(x) < NONFINITE ? x * scale.first * scale.second : 0.0f;
}

// Counts a finite element that was split in `high` and `low`.
__device__ __forceinline__ void count(Counts& counts, float x, float scaled, float rest, float low) {
    float size = fabsf(scaled);
    counts.large += size >= 16.0f;
    counts.small += magnitude(x) - 1 < NONFINITE - 1 && size < 0.25f && (size < 0x1p-14f || rest != low);
}

// Splits eight elements along K, from a multiple of 8 on, stores both halves, and counts.
__device__ __forceinline__ void store_split(unsigned char* packed_row, Index k, const float (&x)[8], Scale scale,
                                            Counts& counts) {
    unsigned high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float first = scaled(x[2 * i], scale), second = scaled(x[2 * i + 1], scale);
        high[i] = pair_of_halves(first, second);
        float2 rounded = floats_of(high[i]);
        float first_rest = first - rounded.x, second_rest = second - rounded.y;
        low[i] = pair_of_halves(first_rest, second_rest);
        float2 kept = floats_of(low[i]);
        count(counts, x[2 * i], first, first_rest, kept.x);
        count(counts, x[2 * i + 1], second, second_rest, kept.y);
    }
    unsigned char* target = packed_row + k / BLOCK_K * BLOCK_BYTES + k % BLOCK_K * 2;
    *reinterpret_cast<uint4*>(target) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(target + BLOCK_BYTES / 2) = make_uint4(low[0], low[1], low[2], low[3]);
}

__device__ __forceinline__ const float* item_data(const Unpacked& operand, Index item) {
    Index rest = item / operand.extent[2], inner = item - rest * operand.extent[2];
    Index outer = rest / operand.extent[1], middle = rest - outer * operand.extent[1];
    return operand.data + outer * operand.batch[0] + middle * operand.batch[1] + inner * operand.batch[2];
}

// Bytes of a packed row.
__device__ __forceinline__ Index row_bytes(const Unpacked& operand) {
    return operand.intervals * (INTERVAL / BLOCK_K) * BLOCK_BYTES;
}

// Eight elements along K from k on, zeros past its end.
__device__ __forceinline__ void load_along_k(const Unpacked& operand, const float* row, Index k, float (&x)[8]) {
    if (operand.vectors && k + 8 <= operand.k) {
        float4 first = *reinterpret_cast<const float4*>(row + k), second = *reinterpret_cast<const float4*>(row + k + 4);
        x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
        x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = k + i < operand.k ? row[(k + i) * operand.column] : 0.0f;
}

// Packs rows whole: `warps` warps a row.
__device__ __forceinline__ void pack_rows(const Unpacked& operand, Index block, unsigned* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = operand.warps * 32;
    const int of_block = PACK_WARPS / operand.warps, own = warp / operand.warps;
    const int position = threadIdx.x - own * threads;
    const Index packed_row = block * of_block + own, items = operand.extent[0] * operand.extent[1] * operand.extent[2];
    const bool exists = packed_row < items * operand.rows;
    const Index item = exists ? packed_row / operand.rows : 0;
    const float* row = item_data(operand, item) + (exists ? packed_row - item * operand.rows : 0) * operand.row;

    const Index end = exists ? operand.k : 0, padded_end = exists ? operand.intervals * INTERVAL : 0;

    unsigned largest = 0;
#pragma unroll 2
    for (Index k = 8 * position; k < end; k += 8 * threads) {
        float x[8];
        load_along_k(operand, row, k, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = larger(largest, magnitude(x[i]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    if (lane == 0) shared[warp] = largest;
    __syncthreads();
    for (int i = 0; i < operand.warps; ++i) largest = larger(largest, shared[own * operand.warps + i]);

    const int shift = shift_of(largest);
    const Scale scale(shift);
    unsigned char* target = operand.packed + packed_row * row_bytes(operand);
    Counts counts = {0, 0};
#pragma unroll 2
    for (Index k = 8 * position; k < padded_end; k += 8 * threads) {
        float x[8];
        load_along_k(operand, row, k, x);
        store_split(target, k, x, scale, counts);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        counts.large += __shfl_xor_sync(0xffffffffu, counts.large, distance);
        counts.small += __shfl_xor_sync(0xffffffffu, counts.small, distance);
    }
    if (lane == 0) {
        shared[PACK_WARPS + 2 * warp] = counts.large;
        shared[PACK_WARPS + 2 * warp + 1] = counts.small;
    }
    __syncthreads();
    if (position != 0 || !exists) return;
    counts = {0, 0};
    for (int i = 0; i < operand.warps; ++i) {
        counts.large += shared[PACK_WARPS + 2 * (own * operand.warps + i)];
        counts.small += shared[PACK_WARPS + 2 * (own * operand.warps + i) + 1];
    }
    operand.shifts[packed_row] = shift;
    operand.guards[packed_row] = guard_of(counts, largest);
}

// Four neighbouring packed rows at one k, zeros for those that do not exist.
__device__ __forceinline__ float4 load_across_rows(const Unpacked& operand, const float* data, Index row, Index k) {
    const float* source = data + row * operand.row + k * operand.column;
    if (operand.vectors && row + 4 <= operand.rows) return *reinterpret_cast<const float4*>(source);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < operand.rows) v.x = source[0];
    if (row + 1 < operand.rows) v.y = source[operand.row];
    if (row + 2 < operand.rows) v.z = source[2 * operand.row];
    if (row + 3 < operand.rows) v.w = source[3 * operand.row];
    return v;
}

__device__ __forceinline__ Index chunks_of(const Unpacked& operand) {
    return (operand.k + operand.chunk - 1) / operand.chunk;
}

// The largest magnitudes of SCAN_ROWS rows within a chunk of K.
__device__ __forceinline__ void scan_strip(const Unpacked& operand, Index block, unsigned* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Index chunks = chunks_of(operand), strips = (operand.rows + SCAN_ROWS - 1) / SCAN_ROWS;
    const Index rest = block / chunks, chunk = block - rest * chunks;
    const Index item = rest / strips, strip = rest - item * strips;
    const Index row = strip * SCAN_ROWS + 4 * lane;
    const Index end = smaller(operand.k, (chunk + 1) * operand.chunk);
    const float* data = item_data(operand, item);

    unsigned largest[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (Index k = chunk * operand.chunk + warp; k < end; k += PACK_WARPS) {
        float4 v = load_across_rows(operand, data, row, k);
        largest[0] = larger(largest[0], magnitude(v.x));
        largest[1] = larger(largest[1], magnitude(v.y));
        largest[2] = larger(largest[2], magnitude(v.z));
        largest[3] = larger(largest[3], magnitude(v.w));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[warp * SCAN_ROWS + i * 32 + lane] = largest[i];
    __syncthreads();
    if (threadIdx.x >= SCAN_ROWS) return;
    const int at = threadIdx.x % 4 * 32 + threadIdx.x / 4;  // row threadIdx.x is element x % 4 of lane x / 4
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < PACK_WARPS; ++i) all = larger(all, shared[i * SCAN_ROWS + at]);
    const Index own = strip * SCAN_ROWS + threadIdx.x, items = operand.extent[0] * operand.extent[1] * operand.extent[2];
    if (own >= operand.rows) return;
    operand.largest[(chunk * items + item) * operand.rows + own] = all;
    if (chunk == 0) operand.guards[item * operand.rows + own] = 0;  // which the next kernel adds to
}

// Splits PACK_ROWS rows by PACK_WARPS * BLOCK_K of K.
__device__ __forceinline__ void pack_strip(const Unpacked& operand, Index block, unsigned* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Index parts = (operand.intervals * INTERVAL + PACK_WARPS * BLOCK_K - 1) / (PACK_WARPS * BLOCK_K);
    const Index strips = (operand.rows + PACK_ROWS - 1) / PACK_ROWS;
    const Index rest = block / parts, part = block - rest * parts;
    const Index item = rest / strips, strip = rest - item * strips;
    const Index row = strip * PACK_ROWS + lane % 8 * 4, k = (part * PACK_WARPS + warp) * BLOCK_K + lane / 8 * 8;
    const Index chunks = chunks_of(operand), items = operand.extent[0] * operand.extent[1] * operand.extent[2];
    const float* data = item_data(operand, item);

    float x[4][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k + i < operand.k) v = load_across_rows(operand, data, row, k + i);
        x[0][i] = v.x, x[1][i] = v.y, x[2][i] = v.z, x[3][i] = v.w;
    }
    unsigned largest[4] = {0, 0, 0, 0};
    for (Index chunk = lane / 8; chunk < chunks; chunk += 4) {
        const unsigned* found = operand.largest + (chunk * items + item) * operand.rows + row;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (row + c < operand.rows) largest[c] = larger(largest[c], found[c]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        largest[c] = larger(largest[c], __shfl_xor_sync(0xffffffffu, largest[c], 8));
        largest[c] = larger(largest[c], __shfl_xor_sync(0xffffffffu, largest[c], 16));
        Counts counts = {0, 0};
        const Index packed_row = item * operand.rows + row + c;
        if (row + c < operand.rows && k < operand.intervals * INTERVAL)
            store_split(operand.packed + packed_row * row_bytes(operand), k, x[c], Scale(shift_of(largest[c])), counts);
#pragma unroll
        for (int distance = 8; distance < 32; distance *= 2) {
            counts.large += __shfl_xor_sync(0xffffffffu, counts.large, distance);
            counts.small += __shfl_xor_sync(0xffffffffu, counts.small, distance);
        }
        if (lane < 8) {
            shared[(warp * PACK_ROWS + lane * 4 + c) * 2] = counts.large;
            shared[(warp * PACK_ROWS + lane * 4 + c) * 2 + 1] = counts.small;
        }
        if (warp == 0 && lane < 8) shared[PACK_WARPS * PACK_ROWS * 2 + lane * 4 + c] = largest[c];
    }
    __syncthreads();
    const Index own = strip * PACK_ROWS + threadIdx.x;
    if (threadIdx.x >= PACK_ROWS || own >= operand.rows) return;
    Counts counts = {0, 0};
#pragma unroll
    for (int i = 0; i < PACK_WARPS; ++i) {
        counts.large += shared[(i * PACK_ROWS + threadIdx.x) * 2];
        counts.small += shared[(i * PACK_ROWS + threadIdx.x) * 2 + 1];
    }
    const unsigned all = shared[PACK_WARPS * PACK_ROWS * 2 + threadIdx.x];
    const Index packed_row = item * operand.rows + own;
    if (part == 0) operand.shifts[packed_row] = shift_of(all);
    if (all == 0 || all >= NONFINITE) {
        if (part == 0) operand.guards[packed_row] = guard_of(counts, all);
    } else {  // the parts of a row add up: weights are even, and the last bit is anyone's
        if (counts.weight() != 0) atomicAdd(operand.guards + packed_row, counts.weight());
        if (counts.small > 0) atomicOr(operand.guards + packed_row, 1);
    }
}

// First step: rows along K are packed, strips of neighbouring rows are scanned.
__global__ void __launch_bounds__(PACK_THREADS) fp16x3_scan(const __grid_constant__ PackArgs args) {
    __shared__ unsigned shared[PACK_WARPS * SCAN_ROWS];
    allow_next_kernel();
    const bool second = blockIdx.x >= args.operands[0].scan_blocks;
    const Unpacked& operand = args.operands[second];
    const Index block = blockIdx.x - (second ? args.operands[0].scan_blocks : 0);
    if (operand.strips) {
        scan_strip(operand, block, shared);
    } else {
        pack_rows(operand, block, shared);
    }
}

// Second step: scanned strips are packed.
__global__ void __launch_bounds__(PACK_THREADS) fp16x3_pack(const __grid_constant__ PackArgs args) {
    __shared__ unsigned shared[(2 * PACK_WARPS + 1) * PACK_ROWS];
    wait_for_previous_kernel();
    allow_next_kernel();
    const Index index = gridDim.x - 1 - blockIdx.x;  // what was scanned last may still be in the L2 cache: it goes first
    const bool second = index >= args.operands[0].pack_blocks;
    pack_strip(args.operands[second], index - (second ? args.operands[0].pack_blocks : 0), shared);
}

}  // namespace tilewave
