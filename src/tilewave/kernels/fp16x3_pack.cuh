// The pre-pass of "fp16x3" in two steps: float32 operands become packed ones (fp16x3_args.cuh).
//
// Rows along K are packed in the first one (fp16x3_rows.cuh). Where packed rows are neighbours, and K is too long for
// fp16x3_columns.cuh, fp16x3_scan finds the largest magnitudes of strips of rows, one chunk of K a block, and
// fp16x3_pack, after it, combines the chunks' and splits. All work on two operands at once.
#pragma once

#include "fp16x3_rows.cuh"

namespace tilewave {

constexpr int SCAN_ROWS = 128;  // of a strip: a warp reads 512 bytes at a time
constexpr int PACK_ROWS = 32;   // of a strip that is split: a warp reads 4 times 128 bytes, and writes 64 by 64

__device__ __forceinline__ Index chunks_of(const Unpacked& operand) {
    return (operand.k + operand.chunk - 1) / operand.chunk;
}

// The largest magnitudes of SCAN_ROWS rows within a chunk of K.
__device__ __forceinline__ void scan_strip(const Unpacked& operand, int block, unsigned* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = static_cast<int>(operand.rows);
    const int chunks = static_cast<int>(chunks_of(operand)), strips = (rows + SCAN_ROWS - 1) / SCAN_ROWS;
    const int rest = block / chunks, chunk = block - rest * chunks;
    const int item = rest < strips ? 0 : rest / strips, strip = rest - item * strips;
    const int row = strip * SCAN_ROWS + 4 * lane, present = rows - row;
    const int end = min(static_cast<int>(operand.k), (chunk + 1) * operand.chunk);
    const float* source = item_data(operand, item) + row * operand.row;

    unsigned largest[4] = {0, 0, 0, 0};
    const auto take = [&](float4 v) {
        largest[0] = larger(largest[0], magnitude(v.x));
        largest[1] = larger(largest[1], magnitude(v.y));
        largest[2] = larger(largest[2], magnitude(v.z));
        largest[3] = larger(largest[3], magnitude(v.w));
    };
    int k = chunk * operand.chunk + warp;
    if (operand.vectors && present >= 4) {
#pragma unroll 4
        for (; k < end; k += PACK_WARPS) take(load_vector(source + k * operand.column));
    } else {
        const auto load = [&](int c) { return c < present ? source[k * operand.column + c * operand.row] : 0.0f; };
#pragma unroll 1
        for (; k < end; k += PACK_WARPS) take(make_float4(load(0), load(1), load(2), load(3)));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[warp * SCAN_ROWS + i * 32 + lane] = largest[i];
    __syncthreads();
    if (threadIdx.x >= SCAN_ROWS) return;
    const int at = threadIdx.x % 4 * 32 + threadIdx.x / 4;  // row threadIdx.x is element x % 4 of lane x / 4
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < PACK_WARPS; ++i) all = larger(all, shared[i * SCAN_ROWS + at]);
    const int own = strip * SCAN_ROWS + threadIdx.x;
    if (own >= rows) return;
    operand.largest[(static_cast<Index>(chunk) * operand.items() + item) * operand.rows + own] = all;
    if (chunk == 0) operand.guards[item * operand.rows + own] = 0;  // which the next kernel adds to
}

struct PackMemory {
    unsigned counts[PACK_WARPS][PACK_ROWS], largest[PACK_ROWS];
    int first, present, part;  // the strip's first packed row, how many there are; kept here, since registers are full
};

// Splits PACK_ROWS rows by PACK_WARPS * BLOCK_K of K.
__device__ __forceinline__ void pack_strip(const Unpacked& operand, int block, PackMemory& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = static_cast<int>(operand.rows);
    const int padded = static_cast<int>(operand.intervals) * INTERVAL;
    const int parts = (padded + PACK_WARPS * BLOCK_K - 1) / (PACK_WARPS * BLOCK_K);
    const int strips = (rows + PACK_ROWS - 1) / PACK_ROWS;
    const int rest = block / parts, part = block - rest * parts;
    const int item = rest < strips ? 0 : rest / strips, strip = rest - item * strips;
    const int row = strip * PACK_ROWS + lane % 8 * 4, k = (part * PACK_WARPS + warp) * BLOCK_K + lane / 8 * 8;
    if (threadIdx.x == 0) {
        shared.first = item * rows + strip * PACK_ROWS;
        shared.present = rows - strip * PACK_ROWS;
        shared.part = part;
    }
    unsigned largest[4] = {0, 0, 0, 0};
    const int chunks = static_cast<int>(chunks_of(operand));
    for (int chunk = lane / 8; chunk < chunks; chunk += 4) {
        const unsigned* found =
            operand.largest + (static_cast<Index>(chunk) * operand.items() + item) * operand.rows + row;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (row + c < rows) largest[c] = larger(largest[c], __ldcg(found + c));
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        largest[c] = larger(largest[c], __shfl_xor_sync(0xffffffffu, largest[c], 8));
        largest[c] = larger(largest[c], __shfl_xor_sync(0xffffffffu, largest[c], 16));
        if (warp == 0 && lane < 8) shared.largest[lane * 4 + c] = largest[c];
    }
    __syncthreads();
    const int present = k < padded ? rows - row : 0;  // rows to split
    unsigned char* const target = operand.packed + (item * operand.rows + row) * row_bytes(operand) + place_in_row(k);
    float x[4][8];
    load_strip(operand, item_data(operand, item), row, k, x);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const unsigned of_row = shared.largest[lane % 8 * 4 + c];
        Counts counts = {0, 0};
        if (of_row >= NONFINITE) keep_finite(x[c]);
        if (c < present) store_split(target + c * row_bytes(operand), x[c], Scale(shift_of(of_row)), counts);
        unsigned word = counts.word();
#pragma unroll
        for (int distance = 8; distance < 32; distance *= 2) word += __shfl_xor_sync(0xffffffffu, word, distance);
        if (lane < 8) shared.counts[warp][lane * 4 + c] = word;
    }
    __syncthreads();
    const int own = threadIdx.x, packed_row = shared.first + own;
    if (own >= PACK_ROWS || own >= shared.present) return;
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < PACK_WARPS; ++i) sum += shared.counts[i][own];
    const Counts counts = Counts::of(sum);
    const unsigned all = shared.largest[own];
    const bool is_first = shared.part == 0;
    if (is_first) operand.shifts[packed_row] = shift_of(all);
    if (all == 0 || all >= NONFINITE) {
        if (is_first) operand.guards[packed_row] = guard_of(counts, all);
    } else {  // the parts of a row add up: weights are even, and the last bit is anyone's
        if (counts.weight() != 0) atomicAdd(operand.guards + packed_row, counts.weight());
        if (counts.small > 0) atomicOr(operand.guards + packed_row, 1);
    }
}

// First step: rows along K are packed, strips of neighbouring rows are scanned.
__global__ void __launch_bounds__(PACK_THREADS, 2) fp16x3_scan(const __grid_constant__ PackArgs args) {
    __shared__ unsigned shared[PACK_WARPS * SCAN_ROWS];
    wait_for_previous_kernel();
    allow_next_kernel();
    const bool second = blockIdx.x >= args.operands[0].scan_blocks;
    const Unpacked& operand = args.operands[second];
    const int block = static_cast<int>(blockIdx.x - (second ? args.operands[0].scan_blocks : 0));
    if (operand.strips) {
        scan_strip(operand, block, shared);
    } else {
        pack_rows(operand, block, shared);
    }
}

// Second step: scanned strips are packed.
__global__ void __launch_bounds__(PACK_THREADS, 2) fp16x3_pack(const __grid_constant__ PackArgs args) {
    __shared__ PackMemory shared;
    wait_for_previous_kernel();
    allow_next_kernel();
    const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // what was scanned last may still be in the L2 cache: it goes first
    const bool second = index >= args.operands[0].pack_blocks;
    const int first = second ? static_cast<int>(args.operands[0].pack_blocks) : 0;
    pack_strip(args.operands[second], index - first, shared);
}

}  // namespace tilewave
