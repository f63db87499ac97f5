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

    __device__ __forceinline__ int items() const { return static_cast<int>(extent[0] * extent[1] * extent[2]); }
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

// The largest magnitude of eight elements, marked as above.
__device__ __forceinline__ unsigned largest_of(const float (&x)[8]) {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) found = max(found, __float_as_uint(x[i]) & 0x7fffffffu);
    if (found < 0x7f800000u) return found;
    found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) found = larger(found, magnitude(x[i]));
    return found;
}

// 14 - the exponent of the largest finite magnitude; 0 for a row of zeros.
__device__ __forceinline__ int shift_of(unsigned largest) {
    largest &= ~NONFINITE;
    if (largest == 0) return 0;
    int exponent = largest >= 0x00800000u ? static_cast<int>(largest >> 23) - 127 : -118 - __clz(largest);
    return 14 - exponent;
}

// The smallest float32 magnitude that is not below 2^exponent.
__device__ __forceinline__ float power_or_more(int exponent) {
    if (exponent >= -126) return __int_as_float((exponent + 127) << 23);
    return __int_as_float(1 << max(0, exponent + 149));
}

// 2^shift as two factors: the power itself need not be a float32. What is large when scaled is at least `large`, and
// what is small is less than `small`.
struct Scale {
    float first, second, large, small;

    __device__ __forceinline__ explicit Scale(int shift) {
        int half = shift / 2;
        first = __int_as_float((half + 127) << 23);
        second = __int_as_float((shift - half + 127) << 23);
        large = power_or_more(4 - shift), small = power_or_more(-2 - shift);
    }

    __device__ __forceinline__ float operator()(float x) const { return x * first * second; }
};

// Counts of a row's elements that its guard is made of.
struct Counts {
    int large, small;

    __device__ __forceinline__ int weight() const { return 2 * (large - 4 * small); }

    // Both in one word, where they are less than 2^16: words add up as they do.
    __device__ __forceinline__ unsigned word() const { return large | small << 16; }
    __device__ __forceinline__ static Counts of(unsigned word) {
        return {static_cast<int>(word & 0xffff), static_cast<int>(word >> 16)};
    }
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

// Makes 0 of what is not finite.
__device__ __forceinline__ void keep_finite(float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = magnitude(x[i]) < NONFINITE ? x[i] : 0.0f;
}

// Whether an element whose scaled magnitude is below 2^-2 counts as small.
__device__ __forceinline__ bool is_small(float x, const Scale& scale) {
    const float v = scale(x), rest = v - floats_of(pair_of_halves(v, 0.0f)).x;
    return x != 0.0f && (fabsf(v) < 0x1p-14f || rest != floats_of(pair_of_halves(rest, 0.0f)).x);
}

// Where in a packed row the high halves of eight elements from k on lie, k being a multiple of 8.
__device__ __forceinline__ int place_in_row(int k) { return k / BLOCK_K * BLOCK_BYTES + k % BLOCK_K * 2; }

// Splits eight finite elements along K, stores both halves, and counts.
__device__ __forceinline__ void store_split(unsigned char* target, const float (&x)[8], const Scale& scale,
                                            Counts& counts) {
    float smallest = fabsf(x[0]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        counts.large += fabsf(x[i]) >= scale.large;
        smallest = fminf(smallest, fabsf(x[i]));
    }
    if (smallest < scale.small) {  // rare, but where there are zeros
#pragma unroll
        for (int i = 0; i < 8; ++i) counts.small += fabsf(x[i]) < scale.small && is_small(x[i], scale);
    }
    unsigned high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float first = scale(x[2 * i]), second = scale(x[2 * i + 1]);
        high[i] = pair_of_halves(first, second);
        const float2 rounded = floats_of(high[i]);
        low[i] = pair_of_halves(first - rounded.x, second - rounded.y);
    }
    *reinterpret_cast<uint4*>(target) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(target + BLOCK_BYTES / 2) = make_uint4(low[0], low[1], low[2], low[3]);
}

// Counts of items, rows and blocks are 32-bit integers: the host sees to it.
__device__ __forceinline__ const float* item_data(const Unpacked& operand, int item) {
    if (item == 0) return operand.data;  // spares the divisions
    int inner_extent = static_cast<int>(operand.extent[2]), middle_extent = static_cast<int>(operand.extent[1]);
    int rest = item / inner_extent, inner = item - rest * inner_extent;
    int outer = rest / middle_extent, middle = rest - outer * middle_extent;
    return operand.data + outer * operand.batch[0] + middle * operand.batch[1] + inner * operand.batch[2];
}

// Bytes of a packed row, less than 2^27 because K is below 2^24.
__device__ __forceinline__ int row_bytes(const Unpacked& operand) {
    return static_cast<int>(operand.intervals) * (INTERVAL / BLOCK_K) * BLOCK_BYTES;
}

// Four neighbours at once, which are followed by what another block is about to read: L2 fetches both together.
__device__ __forceinline__ float4 load_vector(const float* source) {
    float4 v;
    asm volatile("ld.global.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(source));
    return v;
}

// Four neighbouring packed rows at eight neighbouring k, zeros for those that do not exist.
__device__ __forceinline__ void load_strip(const Unpacked& operand, const float* data, int row, int k,
                                           float (&x)[4][8]) {
    const int rows = static_cast<int>(operand.rows) - row, depth = static_cast<int>(operand.k) - k;
    const float* source = data + row * operand.row + k * operand.column;
    if (operand.vectors && rows >= 4) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < depth) v = load_vector(source + i * operand.column);
            x[0][i] = v.x, x[1][i] = v.y, x[2][i] = v.z, x[3][i] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                x[c][i] = i < depth && c < rows ? source[i * operand.column + c * operand.row] : 0.0f;
    }
}

}  // namespace tilewave
