// The pre-pass of "fp16x3" where elements along K are neighbours in memory, or nothing is: a few warps take a packed row
// each. They hold its first elements in registers, which is all of them unless K is very long; what is behind is read
// again out of the cache.
#pragma once

#include "fp16x3_split.cuh"

namespace tilewave {

constexpr int PACK_THREADS = 512;
constexpr int PACK_WARPS = PACK_THREADS / 32;
constexpr int HELD = 4;  // times eight elements that a thread holds

// Eight elements along K from k on, zeros past its end.
__device__ __forceinline__ void load_along_k(const Unpacked& operand, const float* row, int k, float (&x)[8]) {
    const int depth = static_cast<int>(operand.k) - k;
    if (operand.vectors && operand.k % 4 == 0) {
        float4 first = make_float4(0.0f, 0.0f, 0.0f, 0.0f), second = first;
        if (depth > 0) first = *reinterpret_cast<const float4*>(row + k);
        if (depth > 4) second = *reinterpret_cast<const float4*>(row + k + 4);
        x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
        x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i < depth ? row[(k + i) * operand.column] : 0.0f;
}

// Packs rows whole: `warps` warps a row. `shared` holds three words a warp.
__device__ __forceinline__ void pack_rows(const Unpacked& operand, int block, unsigned* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = operand.warps * 32;
    const int own = warp / operand.warps, position = threadIdx.x - own * threads;
    const int rows_of_block = static_cast<int>(blockDim.x) / 32 / operand.warps;
    const int rows = static_cast<int>(operand.rows), packed_row = block * rows_of_block + own;
    const bool exists = packed_row < operand.items() * rows;
    const int item = exists && packed_row >= rows ? packed_row / rows : 0;
    const float* row = item_data(operand, item) + (exists ? packed_row - item * rows : 0) * operand.row;
    const int end = static_cast<int>(operand.k);
    const int padded_end = exists ? static_cast<int>(operand.intervals) * INTERVAL : 0, first = 8 * position;

    float held[HELD][8];
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        load_along_k(operand, row, exists ? first + j * 8 * threads : end, held[j]);
#pragma unroll
    for (int j = 0; j < HELD; ++j) largest = larger(largest, largest_of(held[j]));
#pragma unroll 1
    for (int k = first + HELD * 8 * threads; k < padded_end; k += 8 * threads) {
        float x[8];
        load_along_k(operand, row, k, x);
        largest = larger(largest, largest_of(x));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    if (lane == 0) shared[warp] = largest;
    __syncthreads();
    const auto largest_of_row = [&]() {
        unsigned found = 0;
        for (int i = 0; i < operand.warps; ++i) found = larger(found, shared[own * operand.warps + i]);
        return found;
    };
    largest = largest_of_row();

    const Scale scale(shift_of(largest));
    const bool finite = largest < NONFINITE;
    unsigned char* target = operand.packed + static_cast<Index>(packed_row) * row_bytes(operand) + place_in_row(first);
    Counts counts = {0, 0};
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        if (first + j * 8 * threads >= padded_end) break;
        if (!finite) keep_finite(held[j]);
        store_split(target + j * place_in_row(8 * threads), held[j], scale, counts);
    }
#pragma unroll 1
    for (int k = first + HELD * 8 * threads; k < padded_end; k += 8 * threads) {
        float x[8];
        load_along_k(operand, row, k, x);
        if (!finite) keep_finite(x);
        store_split(target + place_in_row(k - first), x, scale, counts);
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
    largest = largest_of_row();
    operand.shifts[packed_row] = shift_of(largest);
    operand.guards[packed_row] = guard_of(counts, largest);
}

}  // namespace tilewave
