// The pre-pass of "fp16x3": float32 operands become packed ones (fp16x3_args.cuh).
//
// What a packed row's elements lie apart in memory decides how it is read. Where elements along K are neighbours (or
// nothing is), a few warps take a row each, find its largest magnitude, and read it again out of the cache. Where
// packed rows are neighbours, fp16x3_columns.cuh packs them, unless K is too long for that: then fp16x3_scan finds the
// largest magnitudes of strips of rows, one chunk of K a block, and fp16x3_pack, after it, combines the chunks' and
// splits. All work on two operands at once.
#pragma once

#include "fp16x3_split.cuh"

namespace tilewave {

constexpr int PACK_THREADS = 256;
constexpr int PACK_WARPS = PACK_THREADS / 32;
constexpr int SCAN_ROWS = 128;  // of a strip: a warp reads 512 bytes at a time
constexpr int PACK_ROWS = 32;   // of a strip that is split: a warp reads 4 times 128 bytes, and writes 64 by 64

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
            if (row + c < operand.rows) largest[c] = larger(largest[c], __ldcg(found + c));
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
