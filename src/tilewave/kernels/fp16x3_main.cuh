// The product of two packed operands on Hopper's tensor cores, with float32 accuracy.
//
// CLUSTER blocks, 1 or 2, work on neighbouring tiles of a row of tiles: each copies its share of the rows of A to all
// of them. A block is three warpgroups: one whose first thread feeds shared memory with bulk copies, and two that
// multiply. They
// walk through tiles of C, block after block. Each multiplying warpgroup holds HALVES x 64 rows by 128 columns of
// float32 sums in registers, and one further set of 64 in which the tensor core sums the products of INTERVAL elements
// of K: low * high, high * low, high * high, the first overwriting what was there. The tensor core truncates where it
// accumulates, so that each such sum is added to the float32 sums with rounding to nearest (a *promotion*).
#pragma once

#define TILEWAVE_SEPARATE_BIAS  // the epilogue rounds after alpha * sum, whatever the compiler knows of the arguments
#include "epilogue.cuh"
#include "fp16x3_hopper.cuh"
#include "tile_output.cuh"

namespace tilewave {

constexpr int TILE_N = 128;
constexpr int GROUP_THREADS = 128;                       // of a warpgroup
constexpr int MULTIPLIERS = 2;                           // warpgroups that multiply
constexpr int MAIN_THREADS = (1 + MULTIPLIERS) * GROUP_THREADS;
constexpr int OUT_ROWS = 8;                              // rows of C that a warp brings to memory at once
constexpr int OUT_FLOATS = OUT_ROWS * TILE_N;

// The tile that a block is at; 32-bit arithmetic, the host sees to the range.
struct MainTile {
    int item, row, column;  // of the batch; first row and column of C
};

template <int TILE_M, int CLUSTER>
__device__ __forceinline__ MainTile main_tile(const GemmArgs& args, int tile, int rank) {
    // Along a row of tiles, those of a cluster are one.
    int tiles_m = static_cast<int>(args.tiles_m), tiles_n = (static_cast<int>(args.tiles_n) + CLUSTER - 1) / CLUSTER;
    int band = static_cast<int>(args.band), per_item = tiles_m * tiles_n;
    int item = tile / per_item, within = tile - item * per_item;
    int first = within / (band * tiles_n) * band;
    int offset = within - first * tiles_n;
    int rows = min(band, tiles_m - first);
    int column = offset / rows;
    return {item, (first + offset - column * rows) * TILE_M, (column * CLUSTER + rank) * TILE_N};
}

// Where a warp keeps element (row, column) of what it brings to memory: rows are turned so that neither the pairs that
// a multiplication leaves nor vectors along a row collide in a bank.
__device__ __forceinline__ int out_place(int row, int column) { return row * TILE_N + (column ^ row << 3); }

// The sum without the scales of its operands, rounded once. Two factors, since no float32 holds every power of two.
__device__ __forceinline__ float unscaled(float sum, int shifts) {
    int exponent = max(-252, min(254, -shifts));
    int first = exponent / 2, second = exponent - first;
    return sum * __int_as_float((first + 127) << 23) * __int_as_float((second + 127) << 23);
}

// Columns of C that a lane finishes: their shifts and guards.
constexpr int PER_LANE = TILE_N / 32;

struct LaneColumns {
    int first, step;  // within the tile
    int shifts[PER_LANE], guards[PER_LANE];
    unsigned inside;  // a bit each

    // The columns of a row that are finished here, a bit each; `recompute` tells whether any is left to the kernel that
    // recomputes.
    __device__ __forceinline__ unsigned finished(int guard, int k, bool& recompute) const {
        unsigned found = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) found |= static_cast<unsigned>(must_recompute(guard, guards[j], k)) << j;
        found &= inside;
        recompute = recompute || found != 0;
        return inside & ~found;
    }
};

// Finishes and stores rows `row` to row + OUT_ROWS of C, from column `column` on, whose sums lie in `own`, as a warp.
// Elements that are to be recomputed are not touched, because C may be needed for that; says whether there are any.
__device__ __forceinline__ bool finish_rows(const GemmArgs& args, const Item& item, const PackedOperands& packed,
                                            PackedItems items, float* own, Index row, Index column, int lane) {
    const int rows = static_cast<int>(smaller(OUT_ROWS, args.m - row)), k = static_cast<int>(args.k);
    // Read past the L1 cache: the kernel before wrote them while this one may have been on its SM already.
    const int* shifts_a = packed.shifts_a + items.a * args.m + row;
    const int* guards_a = packed.guards_a + items.a * args.m + row;
    const bool plain = is_plain(args), vectors = plain && (args.flags & OUT_VECTORS) != 0 && column + TILE_N <= args.n;
    bool recompute = false;
    LaneColumns own_columns;
    own_columns.first = vectors ? PER_LANE * lane : lane;  // neighbours where vectors are stored, else every 32nd
    own_columns.step = vectors ? 1 : 32;
    own_columns.inside = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        Index at = column + own_columns.first + j * own_columns.step;
        bool inside = at < args.n;
        own_columns.inside |= static_cast<unsigned>(inside) << j;
        own_columns.shifts[j] = inside ? __ldcg(packed.shifts_b + items.b * args.n + at) : 0;
        own_columns.guards[j] = inside ? __ldcg(packed.guards_b + items.b * args.n + at) : 0;
    }
    if (plain) {
#pragma unroll 2
        for (int r = 0; r < rows; ++r) {
            const int shift = __ldcg(shifts_a + r);
            const unsigned finished = own_columns.finished(__ldcg(guards_a + r), k, recompute);
            float v[PER_LANE];
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                v[j] = args.alpha * unscaled(own[out_place(r, own_columns.first + j * own_columns.step)],
                                             shift + own_columns.shifts[j]);
            float* target = item.out + (row + r) * args.out.row;
            if (vectors && finished == (1u << PER_LANE) - 1) {
                store_vector(target + column + own_columns.first, v[0], v[1], v[2], v[3]);
            } else {
#pragma unroll
                for (int j = 0; j < PER_LANE; ++j)
                    if ((finished >> j & 1) != 0)
                        target[(column + own_columns.first + j * own_columns.step) * args.out.column] = v[j];
            }
        }
        return recompute;
    }
    // What is added is loaded for several elements at once; the activations, which are long, follow one by one.
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
        const int shift = __ldcg(shifts_a + r);
        const unsigned finished = own_columns.finished(__ldcg(guards_a + r), k, recompute);
        Addends addends[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            addends[j] = {0.0f, 0.0f};
            if ((finished >> j & 1) != 0)
                addends[j] = load_addends(args, item, row + r, column + own_columns.first + j * own_columns.step);
        }
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            float* sum = own + out_place(r, own_columns.first + j * own_columns.step);
            *sum = before_activation(args, addends[j], unscaled(*sum, shift + own_columns.shifts[j]));
        }
#pragma unroll 1
        for (int j = 0; j < PER_LANE; ++j) {
            if ((finished >> j & 1) == 0) continue;
            const int within = own_columns.first + j * own_columns.step;
            const float value = own[out_place(r, within)];
            store_preactivation(args, item, row + r, column + within, value);
            item.out[(row + r) * args.out.row + (column + within) * args.out.column] =
                activate(args.activation, value);
        }
    }
    return recompute;
}

template <int HALVES, int STAGES, int CLUSTER>
__global__ void __launch_bounds__(MAIN_THREADS, 1)
    fp16x3_main(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                const __grid_constant__ GemmArgs args, const __grid_constant__ PackedOperands packed) {
    constexpr int TILE_M = MULTIPLIERS * HALVES * 64;
    constexpr int A_BYTES = TILE_M * BLOCK_BYTES, STAGE_BYTES = A_BYTES + TILE_N * BLOCK_BYTES;
    constexpr int PER_INTERVAL = INTERVAL / BLOCK_K;
    extern __shared__ unsigned char dynamic_shared[];
    const unsigned stages = (shared_address(dynamic_shared) + 1023) & ~1023u;  // the swizzle's pattern is of 1024 bytes
    const unsigned filled = stages + STAGES * STAGE_BYTES + MULTIPLIERS * 4 * OUT_FLOATS * sizeof(float);
    const unsigned emptied = filled + 8 * STAGES;
    // The tiles of a cluster's blocks are one here: host and kernel count them so.
    const int tiles = static_cast<int>(args.cut.tiles), first_tile = blockIdx.x / CLUSTER;
    const int clusters = gridDim.x / CLUSTER, rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int blocks = static_cast<int>(packed.intervals) * PER_INTERVAL;
    // Alike in all threads of a warpgroup, which the compiler is told, so that descriptors need no vector registers.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / GROUP_THREADS, 0);

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(filled + 8 * s, 1);
            barrier_init(emptied + 8 * s, CLUSTER * MULTIPLIERS * 4);  // a lane of each multiplying warp of the cluster
        }
        barriers_ready();
    }
    if constexpr (CLUSTER > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    wait_for_previous_kernel();
    allow_next_kernel();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            int stage = 0, parity = 1;  // a fresh barrier lets a wait for the phase before its first one through
            for (int tile = first_tile; tile < tiles; tile += clusters) {
                MainTile at = main_tile<TILE_M, CLUSTER>(args, tile, rank);
                PackedItems items = packed_items(args, packed, at.item);
                int row = items.a * static_cast<int>(args.m) + at.row;
                int column = items.b * static_cast<int>(args.n) + at.column;
                for (int block = 0; block < blocks; ++block) {
                    unsigned target = stages + stage * STAGE_BYTES, barrier = filled + 8 * stage;
                    barrier_wait(emptied + 8 * stage, parity);
                    barrier_expect(barrier, STAGE_BYTES);
                    if constexpr (CLUSTER > 1) {
                        copy_box_to_blocks(target + rank * (A_BYTES / CLUSTER), &map_a, block * 2 * BLOCK_K,
                                           row + rank * (TILE_M / CLUSTER), barrier, (1 << CLUSTER) - 1);
                    } else {
                        copy_box(target, &map_a, block * 2 * BLOCK_K, row, barrier);
                    }
                    copy_box(target + A_BYTES, &map_b, block * 2 * BLOCK_K, column, barrier);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int multiplier = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        int stage = 0, parity = 0;
        for (int tile = first_tile; tile < tiles; tile += clusters) {
            float sums[HALVES][64];
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int i = 0; i < 64; ++i) sums[h][i] = 0.0f;

            for (int interval = 0; interval < packed.intervals; ++interval) {
                unsigned a[PER_INTERVAL], b[PER_INTERVAL], done[PER_INTERVAL];
#pragma unroll
                for (int s = 0; s < PER_INTERVAL; ++s) {
                    unsigned base = stages + stage * STAGE_BYTES;
                    a[s] = descriptor_of(base + multiplier * HALVES * 64 * BLOCK_BYTES);
                    b[s] = descriptor_of(base + A_BYTES);
                    done[s] = emptied + 8 * stage;
                    barrier_wait(filled + 8 * stage, parity);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    float part[64];
                    products_fence();
#pragma unroll
                    for (int product = 0; product < 3; ++product)  // low * high, high * low, high * high
#pragma unroll
                        for (int s = 0; s < PER_INTERVAL; ++s)
#pragma unroll
                            for (int step = 0; step < BLOCK_K / 16; ++step) {
                                // In units of 16 bytes: 16 of K are 2, the low halves lie 4 behind, 64 rows are 512.
                                unsigned from_a = a[s] + h * 512 + (product == 0 ? 4 : 0) + 2 * step;
                                unsigned from_b = b[s] + (product == 1 ? 4 : 0) + 2 * step;
                                multiply(part, from_a, from_b, (product | s | step) != 0);
                            }
                    products_commit();
                    products_wait();
                    if (h == HALVES - 1 && lane < CLUSTER) {
#pragma unroll
                        for (int s = 0; s < PER_INTERVAL; ++s) {
                            if constexpr (CLUSTER > 1) {
                                barrier_arrive_in_block(done[s], lane);
                            } else {
                                barrier_arrive(done[s]);
                            }
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 64; ++i) sums[h][i] += part[i];
                }
            }

            // Eight rows at a time through shared memory that belongs to the warp, so that rows of C are stored whole and
            // the code of the epilogue exists once.
            MainTile at = main_tile<TILE_M, CLUSTER>(args, tile, rank);
            PackedItems items = packed_items(args, packed, at.item);
            Item item = item_of(args, at.item);
            bool recompute = false;
            float* own = reinterpret_cast<float*>(dynamic_shared + (stages - shared_address(dynamic_shared)) +
                                                  STAGES * STAGE_BYTES) +
                         (multiplier * 4 + warp) * OUT_FLOATS;
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    __syncwarp();
#pragma unroll
                    for (int j = 0; j < TILE_N / 8; ++j)
                        *reinterpret_cast<float2*>(own + out_place(lane / 4, j * 8 + lane % 4 * 2)) =
                            make_float2(sums[h][4 * j + 2 * upper], sums[h][4 * j + 2 * upper + 1]);
                    __syncwarp();
                    int row = at.row + (multiplier * HALVES + h) * 64 + warp * 16 + upper * 8;
                    recompute |= finish_rows(args, item, packed, items, own, row, at.column, lane);
                }
            if (recompute) *packed.flag = 1;
        }
    }
    // A block's shared memory must be there as long as others of its cluster copy to it and arrive at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();  // the copying thread's warp comes together again
        cluster_barrier();
    }
}

}  // namespace tilewave
