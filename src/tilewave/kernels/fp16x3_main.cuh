// The product of two packed operands on Hopper's tensor cores, with float32 accuracy.
//
// CLUSTER blocks, 1 or 2, work on neighbouring tiles of a row of tiles: each copies its share of the rows of A to all
// of them. A block is three warpgroups: one whose first thread feeds shared memory with bulk copies, while its second
// warp brings the scales of rows and columns, and two that multiply. They walk through tiles of C, block after block.
// Each multiplying warpgroup holds HALVES x 64 rows by 128 columns of
// float32 sums in registers, and one further set of 64 in which the tensor core sums the products of INTERVAL elements
// of K: low * high, high * low, high * high, the first overwriting what was there. The tensor core truncates where it
// accumulates, so that each such sum is added to the float32 sums with rounding to nearest (a *promotion*).
// A FINE kernel promotes every FINE_INTERVAL elements, into sums of a run of FINE_RUN elements or more, which are then
// added to the others: what it computes is closer to the exact product, and takes another 64 registers.
#pragma once

#define TILEWAVE_SEPARATE_BIAS  // the epilogue rounds after alpha * sum, whatever the compiler knows of the arguments
#include "epilogue.cuh"
#include "fp16x3_hopper.cuh"
#include "fp16x3_recompute.cuh"
#include "tile_output.cuh"

namespace tilewave {

constexpr int TILE_N = 128;
constexpr int MULTIPLIERS = 2;                           // warpgroups that multiply
constexpr int MAIN_THREADS = (1 + MULTIPLIERS) * GROUP_THREADS;
constexpr int OUT_ROWS = 8;                              // rows of C that a warp brings to memory at once
constexpr int OUT_FLOATS = OUT_ROWS * TILE_N;
static_assert(RECOMPUTE_FLOATS <= GROUP_THREADS / 32 * OUT_FLOATS, "a warpgroup recomputes in its own memory");

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

// What undoes the scales of a tile. Where it is `simple`, no element has to be recomputed, and a sum times its row's
// factor and its column's is what unscaled() gives: the first of the two products is exact, because a sum is 0 or
// between 2^-48 and 2^54.
struct TileScales {
    float rows[2 * 2 * 64], columns[TILE_N];
    int simple;
};
constexpr int SIMPLE_ROW = 60, SIMPLE_COLUMN = 126;  // the largest shifts, up or down, of a simple tile

// Of the rows or columns of a tile: what decides whether it is simple.
struct TileGuards {
    // The least guard >> 1 of all, and of those whose bit 0 is set. What stands for none is so far above all of them that
    // its sum with any is not below K.
    int least = 1 << 29, least_inexact = 1 << 29;
    bool small_shifts = true;

    // Takes one packed row in, and writes the factor that undoes its scale.
    __device__ __forceinline__ void take(float* scale, const int* shift, const int* guard, bool exists, int most) {
        // Read past the L1 cache: the kernel before wrote them while this one may have been on its SM already.
        const int found = exists ? __ldcg(shift) : 0, kept = exists ? __ldcg(guard) : 1 << 30;
        *scale = __int_as_float((127 - max(-most, min(most, found))) << 23);
        small_shifts &= abs(found) <= most;
        least = min(least, kept >> 1);
        if ((kept & 1) != 0) least_inexact = min(least_inexact, kept >> 1);
    }

    // Puts together what the lanes of a warp took in.
    __device__ __forceinline__ void combine() {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            least = min(least, __shfl_xor_sync(0xffffffffu, least, distance));
            least_inexact = min(least_inexact, __shfl_xor_sync(0xffffffffu, least_inexact, distance));
        }
        small_shifts = __all_sync(0xffffffffu, small_shifts);
    }
};

// Fills the scales of a tile, as a warp.
template <int TILE_M>
__device__ __forceinline__ void load_scales(TileScales* scales, const GemmArgs& args, const PackedOperands& packed,
                                            PackedItems items, const MainTile& at, int lane) {
    const int m = static_cast<int>(args.m), n = static_cast<int>(args.n), k = static_cast<int>(args.k);
    const Index first_row = items.a * args.m + at.row, first_column = items.b * args.n + at.column;
    TileGuards rows, columns;
#pragma unroll
    for (int i = lane; i < TILE_M; i += 32)
        rows.take(scales->rows + i, packed.shifts_a + first_row + i, packed.guards_a + first_row + i, at.row + i < m,
                  SIMPLE_ROW);
#pragma unroll
    for (int i = lane; i < TILE_N; i += 32)
        columns.take(scales->columns + i, packed.shifts_b + first_column + i, packed.guards_b + first_column + i,
                     at.column + i < n, SIMPLE_COLUMN);
    rows.combine();
    columns.combine();
    // must_recompute() of some row and column of the tile. Most tiles have an element that was split inexactly, and
    // hardly any has one to recompute, so that both halves of that rule count.
    const bool recompute = rows.least_inexact + columns.least < k || rows.least + columns.least_inexact < k;
    if (lane == 0) scales->simple = rows.small_shifts && columns.small_shifts && !recompute;
}

// Eight rows of a warp's sums, times `scale`, go to the memory that belongs to the warp.
__device__ __forceinline__ void bring_rows(float* own, const float (&sums)[64], int upper, float scale, int lane) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j)
        *reinterpret_cast<float2*>(own + out_place(lane / 4, j * 8 + lane % 4 * 2)) =
            make_float2(sums[4 * j + 2 * upper] * scale, sums[4 * j + 2 * upper + 1] * scale);
    __syncwarp();
}

// Columns of C that a lane finishes.
constexpr int PER_LANE = TILE_N / 32;

// Finishes and stores rows `row` to row + OUT_ROWS of C, from column `column` on, out = alpha * sum, of a simple tile:
// as a warp, from `own`, where the sums lie without their rows' scales. `scales` are those of the columns.
__device__ __forceinline__ void store_rows(const GemmArgs& args, const Item& item, const float* own,
                                           const float* scales, Index row, Index column, int lane) {
    const int rows = static_cast<int>(smaller(OUT_ROWS, args.m - row));
    const float alpha = args.alpha;
    float* target = item.out + row * args.out.row + column * args.out.column;
    if ((args.flags & OUT_VECTORS) != 0 && column + TILE_N <= args.n) {
        const float4 scale = *reinterpret_cast<const float4*>(scales + PER_LANE * lane);
        target += PER_LANE * lane;
#pragma unroll 4
        for (int r = 0; r < OUT_ROWS; ++r) {
            if (r >= rows) break;
            const float4 v = *reinterpret_cast<const float4*>(own + out_place(r, PER_LANE * lane));
            store_vector(target + r * args.out.row, alpha * (v.x * scale.x), alpha * (v.y * scale.y),
                         alpha * (v.z * scale.z), alpha * (v.w * scale.w));
        }
        return;
    }
#pragma unroll 1
    for (int r = 0; r < rows; ++r, target += args.out.row) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int within = lane + 32 * j;
            if (column + within < args.n)
                target[within * args.out.column] = alpha * (own[out_place(r, within)] * scales[within]);
        }
    }
}

// Activates and stores an element of C.
__device__ __forceinline__ void finish_element(const GemmArgs& args, const Item& item, Index row, Index column,
                                               float value) {
    store_preactivation(args, item, row, column, value);
    item.out[row * args.out.row + column * args.out.column] = activate(args.activation, value);
}

constexpr int ROWS_AT_ONCE = 2;  // of those below
static_assert(OUT_ROWS % ROWS_AT_ONCE == 0, "whole parts");

// The same of any tile and with all of the epilogue. The sums of a tile that is not simple still have both scales, and
// its elements that are to be recomputed are not touched, because C may be needed for that.
__device__ __forceinline__ void finish_rows(const GemmArgs& args, const Item& item, const PackedOperands& packed,
                                            PackedItems items, float* own, const TileScales& scales, Index row,
                                            Index column, int lane) {
    const int rows = static_cast<int>(smaller(OUT_ROWS, args.m - row)), k = static_cast<int>(args.k);
    const bool simple = scales.simple != 0;
    const Index packed_row = items.a * args.m + row, packed_column = items.b * args.n + column + lane;
    // What is added is loaded for several elements at once; activations that are long follow one by one.
    const bool short_activation = args.activation <= RELU;
#pragma unroll 1
    for (int first = 0; first < rows; first += ROWS_AT_ONCE) {
        unsigned finished = 0;  // a bit for each element
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE * PER_LANE; ++i) {
            const bool inside = first + i / PER_LANE < rows && column + lane + i % PER_LANE * 32 < args.n;
            finished |= static_cast<unsigned>(inside) << i;
        }
        int row_shifts[ROWS_AT_ONCE] = {}, column_shifts[PER_LANE] = {};
        if (!simple) {
            int row_guards[ROWS_AT_ONCE], column_guards[PER_LANE];
#pragma unroll
            for (int u = 0; u < ROWS_AT_ONCE; ++u) {
                const bool exists = first + u < rows;
                row_shifts[u] = exists ? __ldcg(packed.shifts_a + packed_row + first + u) : 0;
                row_guards[u] = exists ? __ldcg(packed.guards_a + packed_row + first + u) : 0;
            }
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const bool exists = column + lane + 32 * j < args.n;
                column_shifts[j] = exists ? __ldcg(packed.shifts_b + packed_column + 32 * j) : 0;
                column_guards[j] = exists ? __ldcg(packed.guards_b + packed_column + 32 * j) : 0;
            }
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE * PER_LANE; ++i)
                if (must_recompute(row_guards[i / PER_LANE], column_guards[i % PER_LANE], k)) finished &= ~(1u << i);
        }
        Addends addends[ROWS_AT_ONCE][PER_LANE];
#pragma unroll
        for (int u = 0; u < ROWS_AT_ONCE; ++u) {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                addends[u][j] = {0.0f, 0.0f};
                if ((finished >> (u * PER_LANE + j) & 1) != 0)
                    addends[u][j] = load_addends(args, item, row + first + u, column + lane + 32 * j);
            }
        }
#pragma unroll
        for (int u = 0; u < ROWS_AT_ONCE; ++u) {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                float* sum = own + out_place(first + u, lane + 32 * j);
                const float scaled = simple ? *sum * scales.columns[lane + 32 * j]
                                            : unscaled(*sum, row_shifts[u] + column_shifts[j]);
                const float value = before_activation(args, addends[u][j], scaled);
                if (!short_activation) {
                    *sum = value;
                } else if ((finished >> (u * PER_LANE + j) & 1) != 0) {
                    finish_element(args, item, row + first + u, column + lane + 32 * j, value);
                }
            }
        }
        if (short_activation) continue;
#pragma unroll 1
        for (int i = 0; i < ROWS_AT_ONCE * PER_LANE; ++i) {
            if ((finished >> i & 1) == 0) continue;
            const int r = first + i / PER_LANE, within = lane + i % PER_LANE * 32;
            finish_element(args, item, row + r, column + within, own[out_place(r, within)]);
        }
    }
}

// Blocks of K of a run, of `blocks` in all: there are about as many runs as promotions in each.
__device__ __forceinline__ int blocks_of_run(int blocks) {
    int run = FINE_RUN / BLOCK_K;
    while (run * run * (BLOCK_K / FINE_INTERVAL) < blocks) run *= 2;
    return run;
}

// Tells block `block` of the cluster that a multiplying warp is done with a stage.
template <int CLUSTER>
__device__ __forceinline__ void release(unsigned emptied, int block) {
    if constexpr (CLUSTER > 1) {
        barrier_arrive_in_block(emptied, block);
    } else {
        barrier_arrive(emptied);
    }
}

template <int HALVES, int STAGES, int CLUSTER, bool FINE>
__global__ void __launch_bounds__(MAIN_THREADS, 1)
    fp16x3_main(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                const __grid_constant__ GemmArgs args, const __grid_constant__ PackedOperands packed) {
    constexpr int TILE_M = MULTIPLIERS * HALVES * 64;
    constexpr int A_BYTES = TILE_M * BLOCK_BYTES, STAGE_BYTES = A_BYTES + TILE_N * BLOCK_BYTES;
    constexpr int PER_INTERVAL = INTERVAL / BLOCK_K;
    static_assert(!FINE || HALVES == 1, "three sets of sums and a part of two halves are more than a thread's registers");
    extern __shared__ unsigned char dynamic_shared[];
    const unsigned stages = (shared_address(dynamic_shared) + 1023) & ~1023u;  // the swizzle's pattern is of 1024 bytes
    const unsigned filled = stages + STAGES * STAGE_BYTES + MULTIPLIERS * 4 * OUT_FLOATS * sizeof(float);
    const unsigned emptied = filled + 8 * STAGES, scales_known = emptied + 8 * STAGES, scales_used = scales_known + 8;
    // As pointers: what does not go through the copy engine.
    unsigned char* behind = dynamic_shared + (stages - shared_address(dynamic_shared)) + STAGES * STAGE_BYTES;
    float* const out = reinterpret_cast<float*>(behind);
    TileScales* const scales = reinterpret_cast<TileScales*>(behind + (scales_used + 8 - stages - STAGES * STAGE_BYTES));
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
        barrier_init(scales_known, 1);
        barrier_init(scales_used, MULTIPLIERS * 4);
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
        } else if (threadIdx.x / 32 == 1) {
            int parity = 1;
            for (int tile = first_tile; tile < tiles; tile += clusters, parity ^= 1) {
                const MainTile at = main_tile<TILE_M, CLUSTER>(args, tile, rank);
                barrier_wait(scales_used, parity);
                load_scales<TILE_M>(scales, args, packed, packed_items(args, packed, at.item), at, threadIdx.x % 32);
                __syncwarp();
                if (threadIdx.x % 32 == 0) barrier_arrive(scales_known);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int multiplier = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        int stage = 0, parity = 0, tile_parity = 0, run_blocks = 1;
        if constexpr (FINE) run_blocks = blocks_of_run(blocks);
        for (int tile = first_tile; tile < tiles; tile += clusters, tile_parity ^= 1) {
            float sums[HALVES][64];
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int i = 0; i < 64; ++i) sums[h][i] = 0.0f;

            if constexpr (FINE) {
                for (int first = 0; first < blocks; first += run_blocks) {
                    float run[64];
#pragma unroll
                    for (int i = 0; i < 64; ++i) run[i] = 0.0f;
                    const int end = min(first + run_blocks, blocks);
                    for (int block = first; block < end; ++block) {
                        const unsigned base = stages + stage * STAGE_BYTES;
                        const unsigned a = descriptor_of(base + multiplier * 64 * BLOCK_BYTES);
                        const unsigned b = descriptor_of(base + A_BYTES), done = emptied + 8 * stage;
                        barrier_wait(filled + 8 * stage, parity);
                        if (++stage == STAGES) {
                            stage = 0;
                            parity ^= 1;
                        }
#pragma unroll
                        for (int step = 0; step < BLOCK_K / FINE_INTERVAL; ++step) {
                            float part[64];
                            products_fence();
#pragma unroll
                            for (int product = 0; product < 3; ++product)  // as below
                                multiply(part, a + (product == 0 ? 4 : 0) + 2 * step,
                                         b + (product == 1 ? 4 : 0) + 2 * step, product != 0);
                            products_commit();
                            products_wait();
                            if (step == BLOCK_K / FINE_INTERVAL - 1 && lane < CLUSTER) release<CLUSTER>(done, lane);
#pragma unroll
                            for (int i = 0; i < 64; ++i) run[i] += part[i];
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 64; ++i) sums[0][i] += run[i];
                }
            } else {
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
                            for (int s = 0; s < PER_INTERVAL; ++s) release<CLUSTER>(done[s], lane);
                        }
#pragma unroll
                        for (int i = 0; i < 64; ++i) sums[h][i] += part[i];
                    }
                }
            }

            // Eight rows at a time through shared memory that belongs to the warp, so that rows of C are stored whole.
            MainTile at = main_tile<TILE_M, CLUSTER>(args, tile, rank);
            PackedItems items = packed_items(args, packed, at.item);
            Item item = item_of(args, at.item);
            float* const own = out + (multiplier * 4 + warp) * OUT_FLOATS;
            const int first_row = multiplier * HALVES * 64;
            barrier_wait(scales_known, tile_parity);
            const bool simple = scales->simple != 0, plain = simple && is_plain(args);
            if (plain) {
#pragma unroll
                for (int group = 0; group < 2 * HALVES; ++group) {
                    const int within = first_row + group / 2 * 64 + warp * 16 + group % 2 * OUT_ROWS;
                    bring_rows(own, sums[group / 2], group % 2, scales->rows[within + lane / 4], lane);
                    store_rows(args, item, own, scales->columns, at.row + within, at.column, lane);
                }
            } else {
#pragma unroll 1  // so that this code, which is long, stands here once
                for (int group = 0; group < 2 * HALVES; ++group) {
                    const int within = first_row + group / 2 * 64 + warp * 16 + group % 2 * OUT_ROWS;
                    const float scale = simple ? scales->rows[within + lane / 4] : 1.0f;
#pragma unroll
                    for (int g = 0; g < 2 * HALVES; ++g)
                        if (g == group) bring_rows(own, sums[g / 2], g % 2, scale, lane);
                    finish_rows(args, item, packed, items, own, *scales, at.row + within, at.column, lane);
                }
            }
            if (!simple) {
#pragma unroll 1
                for (int part = 0; part < 2 * HALVES; ++part)
                    recompute_tile(args, item, packed, items, at.row + first_row + part / 2 * RECOMPUTE_TILE,
                                   at.column + part % 2 * RECOMPUTE_TILE, out + multiplier * 4 * OUT_FLOATS,
                                   1 + multiplier);
                group_barrier(1 + multiplier);  // the memory is the warps' own again
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(scales_used);
        }
    }
    // A block's shared memory must be there as long as others of its cluster copy to it and arrive at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();  // the copying thread's warp comes together again
        cluster_barrier();
    }
}

}  // namespace tilewave
