// The pre-pass of "fp16x3" in one step, with one reading and one writing of device memory. Rows along K are packed as
// fp16x3_rows.cuh does it. Where packed rows are neighbours and K is not too long for a cluster, its blocks share K:
// each holds its part of a strip of rows in registers, tells the others the largest magnitudes, and splits when it knows
// those of the whole rows. Where K is short, blocks have fewer threads, so that none has nothing to do.
#pragma once

#include "fp16x3_hopper.cuh"
#include "fp16x3_rows.cuh"

namespace tilewave {

constexpr int COLUMNS_ROWS = 16;                 // packed rows of a strip: 64 bytes at a time
constexpr int ACROSS = COLUMNS_ROWS / 4;         // lanes that read beside each other
constexpr int WARP_K = 64;                       // of K that a warp holds, 8 a lane
constexpr int COLUMNS_K = PACK_WARPS * WARP_K;   // of K that a block holds
constexpr int LARGEST_CLUSTER = 8;               // that every GPU of the architecture can hold

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

// Four values of each lane, combined over the lanes that hold the same four rows: in the end each lane has one of the
// four, that of row owned_row(lane), in half of the exchanges that four sums would take.
template <typename Combine>
__device__ __forceinline__ unsigned combined(const unsigned (&v)[4], int lane, Combine combine) {
    const bool upper = (lane & ACROSS) != 0, odd = (lane & 2 * ACROSS) != 0;
    const unsigned first =
        combine(upper ? v[2] : v[0], __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], ACROSS));
    const unsigned second =
        combine(upper ? v[3] : v[1], __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], ACROSS));
    const unsigned own =
        combine(odd ? second : first, __shfl_xor_sync(0xffffffffu, odd ? first : second, 2 * ACROSS));
    return combine(own, __shfl_xor_sync(0xffffffffu, own, 4 * ACROSS));
}

__device__ __forceinline__ int owned_row(int lane) {
    return lane % ACROSS * 4 + ((lane & ACROSS) != 0 ? 2 : 0) + ((lane & 2 * ACROSS) != 0 ? 1 : 0);
}

struct StripMemory {
    unsigned of_warps[PACK_WARPS][COLUMNS_ROWS];         // largest magnitudes, then counts
    unsigned of_blocks[LARGEST_CLUSTER][COLUMNS_ROWS];   // largest magnitudes
    unsigned counts[LARGEST_CLUSTER][COLUMNS_ROWS];      // of the cluster's first block: those of all blocks
    unsigned largest[COLUMNS_ROWS];
    int item, first_row;  // kept here, since registers are full in between
};

static_assert(LARGEST_CLUSTER * COLUMNS_K < 1 << 16, "counts of a row fit in a word");

// Packs a strip of neighbouring rows: block `rank` of a cluster does its part of K.
__device__ __forceinline__ void pack_columns(const Unpacked& operand, int index, StripMemory& shared) {
    cluster_arrive();
    const int rank = cluster_rank(), cluster = operand.cluster, rows = static_cast<int>(operand.rows);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int strips = (rows + COLUMNS_ROWS - 1) / COLUMNS_ROWS, item = index < strips ? 0 : index / strips;
    const int first_row = (index - item * strips) * COLUMNS_ROWS, row = first_row + lane % ACROSS * 4;
    const int k = rank * COLUMNS_K + warp * WARP_K + lane / ACROSS * 8;

    if (threadIdx.x == 0) shared.item = item, shared.first_row = first_row;
    const int present = k < static_cast<int>(operand.intervals) * INTERVAL ? rows - row : 0;  // rows to split
    unsigned char* const target = operand.packed + (item * operand.rows + row) * row_bytes(operand) + place_in_row(k);

    float x[4][8];
    load_strip(operand, item_data(operand, item), row, k, x);
    unsigned found[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) found[c] = largest_of(x[c]);
    const unsigned of_warp = combined(found, lane, [](unsigned a, unsigned b) { return larger(a, b); });
    if (lane < COLUMNS_ROWS) shared.of_warps[warp][owned_row(lane)] = of_warp;
    __syncthreads();
    cluster_wait();  // only what has begun has shared memory to store to
    if (threadIdx.x < COLUMNS_ROWS) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < PACK_WARPS; ++i)
            if (i < warps) largest = larger(largest, shared.of_warps[i][threadIdx.x]);
        for (int block = 0; block < cluster; ++block)
            store_in_block(&shared.of_blocks[rank][threadIdx.x], block, largest);
    }
    cluster_barrier();
    if (threadIdx.x < COLUMNS_ROWS) {
        unsigned largest = 0;
        for (int block = 0; block < cluster; ++block) largest = larger(largest, shared.of_blocks[block][threadIdx.x]);
        shared.largest[threadIdx.x] = largest;
    }
    __syncthreads();

    unsigned counted[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        Counts counts = {0, 0};
        const unsigned largest = shared.largest[lane % ACROSS * 4 + c];
        if (largest >= NONFINITE) keep_finite(x[c]);
        if (c < present)
            store_split(target + c * row_bytes(operand), x[c], Scale(shift_of(largest)), counts);
        counted[c] = counts.word();
    }
    const unsigned counts_of_warp = combined(counted, lane, [](unsigned a, unsigned b) { return a + b; });
    if (lane < COLUMNS_ROWS) shared.of_warps[warp][owned_row(lane)] = counts_of_warp;
    __syncthreads();
    if (threadIdx.x < COLUMNS_ROWS) {
        unsigned sum = 0;
#pragma unroll
        for (int i = 0; i < PACK_WARPS; ++i)
            if (i < warps) sum += shared.of_warps[i][threadIdx.x];
        store_in_block(&shared.counts[rank][threadIdx.x], 0, sum);
    }
    cluster_barrier();
    const int own_row = shared.first_row + threadIdx.x;
    if (rank == 0 && threadIdx.x < COLUMNS_ROWS && own_row < static_cast<int>(operand.rows)) {
        unsigned sum = 0;
        for (int block = 0; block < cluster; ++block) sum += shared.counts[block][threadIdx.x];
        const unsigned largest = shared.largest[threadIdx.x];
        operand.shifts[shared.item * operand.rows + own_row] = shift_of(largest);
        operand.guards[shared.item * operand.rows + own_row] = guard_of(Counts::of(sum), largest);
    }
}

// Blocks of a cluster have one operand.
__global__ void __launch_bounds__(PACK_THREADS, 2) fp16x3_columns(const __grid_constant__ PackArgs args) {
    __shared__ StripMemory strip;
    __shared__ unsigned of_rows[3 * PACK_WARPS];
    wait_for_previous_kernel();
    allow_next_kernel();
    const bool second = blockIdx.x >= args.operands[0].pack_blocks;
    const Unpacked& operand = args.operands[second];
    const int block = static_cast<int>(blockIdx.x - (second ? args.operands[0].pack_blocks : 0));
    if (operand.strips) {
        pack_columns(operand, block / operand.cluster, strip);
    } else {
        pack_rows(operand, block, of_rows);
    }
}

}  // namespace tilewave
