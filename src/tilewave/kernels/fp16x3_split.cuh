// What the kernels share that turn float32 operands into packed ones for "fp16x3" (fp16x3_args.cuh): the argument, the
// arithmetic of scaling, splitting and guarding, which is that of tilewave/precision/fp16x3.py, and the loads.
#pragma once

#include "fp16x3_args.cuh"

namespace tilewave {

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
    int cluster;  // blocks that share a strip, where it is packed in one pass
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

// Four neighbouring packed rows at one k, zeros for those that do not exist.
__device__ __forceinline__ float4 load_across_rows(const Unpacked& operand, const float* data, Index row, Index k) {
    const float* source = data + row * operand.row + k * operand.column;
    if (operand.vectors && row + 4 <= operand.rows) {
        float4 v;  // whose neighbours another block is about to read: L2 fetches them together
        asm volatile("ld.global.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "l"(source));
        return v;
    }
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < operand.rows) v.x = source[0];
    if (row + 1 < operand.rows) v.y = source[operand.row];
    if (row + 2 < operand.rows) v.z = source[2 * operand.row];
    if (row + 3 < operand.rows) v.w = source[3 * operand.row];
    return v;
}

}  // namespace tilewave
