// The pre-pass of "fp16x3" where packed rows are neighbours in memory and K is not too long for a cluster: one reading
// and one writing of device memory. The blocks of a cluster share K. Each holds its part of a strip of rows in
// registers, tells the others the largest magnitudes, and splits when it knows those of the whole rows.
#pragma once

#include "fp16x3_hopper.cuh"
#include "fp16x3_split.cuh"

namespace tilewave {

constexpr int COLUMNS_THREADS = 512;
constexpr int COLUMNS_WARPS = COLUMNS_THREADS / 32;
constexpr int COLUMNS_ROWS = 16;                                   // packed rows of a strip: 64 bytes at a time
constexpr int WARP_K = 64;                                         // of K that a warp holds, 8 a lane
constexpr int COLUMNS_K = COLUMNS_WARPS * WARP_K;                  // of K that a block holds
constexpr int LARGEST_CLUSTER = 8;                                 // that every GPU of the architecture can hold

// Stores to the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ void store_in_block(const void* place, int block, unsigned value) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.u32 [there], %2;\n"
        "}" ::"r"(shared_address(place)),
        "r"(block), "r"(value)
        : "memory");
}

__global__ void __launch_bounds__(COLUMNS_THREADS, 2) fp16x3_columns(const __grid_constant__ PackArgs args) {
    __shared__ unsigned of_warps[COLUMNS_WARPS][COLUMNS_ROWS][2];           // largest magnitudes, then counts
    __shared__ unsigned of_blocks[LARGEST_CLUSTER][COLUMNS_ROWS];           // largest magnitudes
    __shared__ unsigned counts_of_blocks[LARGEST_CLUSTER][COLUMNS_ROWS][2]; // of the cluster's first block: all counts
    __shared__ unsigned largest_of_rows[COLUMNS_ROWS];
    allow_next_kernel();
    cluster_arrive();
    const bool second = blockIdx.x >= args.operands[0].pack_blocks;
    const Unpacked& operand = args.operands[second];
    const int rank = cluster_rank(), cluster = operand.cluster;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % (COLUMNS_ROWS / 4);
    const Index index = (blockIdx.x - (second ? args.operands[0].pack_blocks : 0)) / cluster;
    const Index strips = (operand.rows + COLUMNS_ROWS - 1) / COLUMNS_ROWS;
    const Index item = index / strips, first_row = (index - item * strips) * COLUMNS_ROWS, row = first_row + 4 * quad;
    const Index k = rank * COLUMNS_K + warp * WARP_K + lane / (COLUMNS_ROWS / 4) * 8;
    const float* data = item_data(operand, item);

    float x[4][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k + i < operand.k) v = load_across_rows(operand, data, row, k + i);
        x[0][i] = v.x, x[1][i] = v.y, x[2][i] = v.z, x[3][i] = v.w;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = larger(largest, magnitude(x[c][i]));
#pragma unroll
        for (int distance = COLUMNS_ROWS / 4; distance < 32; distance *= 2)
            largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        if (lane < COLUMNS_ROWS / 4) of_warps[warp][quad * 4 + c][0] = largest;
    }
    __syncthreads();
    cluster_wait();  // only what has begun has shared memory to store to
    if (threadIdx.x < COLUMNS_ROWS) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < COLUMNS_WARPS; ++i) largest = larger(largest, of_warps[i][threadIdx.x][0]);
        for (int block = 0; block < cluster; ++block) store_in_block(&of_blocks[rank][threadIdx.x], block, largest);
    }
    cluster_barrier();
    if (threadIdx.x < COLUMNS_ROWS) {
        unsigned largest = 0;
        for (int block = 0; block < cluster; ++block) largest = larger(largest, of_blocks[block][threadIdx.x]);
        largest_of_rows[threadIdx.x] = largest;
    }
    __syncthreads();

#pragma unroll
    for (int c = 0; c < 4; ++c) {
        Counts counts = {0, 0};
        const Index packed_row = item * operand.rows + row + c;
        if (row + c < operand.rows && k < operand.intervals * INTERVAL)
            store_split(operand.packed + packed_row * row_bytes(operand), k, x[c],
                        Scale(shift_of(largest_of_rows[quad * 4 + c])), counts);
#pragma unroll
        for (int distance = COLUMNS_ROWS / 4; distance < 32; distance *= 2) {
            counts.large += __shfl_xor_sync(0xffffffffu, counts.large, distance);
            counts.small += __shfl_xor_sync(0xffffffffu, counts.small, distance);
        }
        if (lane < COLUMNS_ROWS / 4) {
            of_warps[warp][quad * 4 + c][0] = counts.large;
            of_warps[warp][quad * 4 + c][1] = counts.small;
        }
    }
    __syncthreads();
    if (threadIdx.x < 2 * COLUMNS_ROWS) {
        unsigned sum = 0;
        const int own = threadIdx.x / 2, which = threadIdx.x % 2;
#pragma unroll
        for (int i = 0; i < COLUMNS_WARPS; ++i) sum += of_warps[i][own][which];
        store_in_block(&counts_of_blocks[rank][own][which], 0, sum);
    }
    cluster_barrier();
    const Index own_row = first_row + threadIdx.x;
    if (rank == 0 && threadIdx.x < COLUMNS_ROWS && own_row < operand.rows) {
        Counts counts = {0, 0};
        for (int block = 0; block < cluster; ++block) {
            counts.large += counts_of_blocks[block][threadIdx.x][0];
            counts.small += counts_of_blocks[block][threadIdx.x][1];
        }
        const unsigned largest = largest_of_rows[threadIdx.x];
        operand.shifts[item * operand.rows + own_row] = shift_of(largest);
        operand.guards[item * operand.rows + own_row] = guard_of(counts, largest);
    }
    // Nothing here needs the kernel before this one, which may pack the other operand; but whoever waits for this one
    // relies on both.
    wait_for_previous_kernel();
}

}  // namespace tilewave
