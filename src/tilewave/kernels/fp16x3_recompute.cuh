// What the fp16 split cannot hold: elements of C for which must_recompute(), because of an infinity, a NaN or too wide a
// spread of exponents. They are computed as "ieee" does, a chain of float32 fused multiply-adds in the order of k, and
// nothing else of C is touched. Where the main kernel found none the blocks return at once.
#pragma once

#define TILEWAVE_SEPARATE_BIAS  // the epilogue rounds after alpha * sum, whatever the compiler knows of the arguments
#include "epilogue.cuh"
#include "fp16x3_args.cuh"

namespace tilewave {

constexpr int RECOMPUTE_TILE = 64;
constexpr int RECOMPUTE_DEPTH = 16;
constexpr int RECOMPUTE_THREADS = 256;

__global__ void __launch_bounds__(RECOMPUTE_THREADS)
    fp16x3_recompute(const __grid_constant__ GemmArgs args, const __grid_constant__ PackedOperands packed) {
    constexpr int TILE = RECOMPUTE_TILE, DEPTH = RECOMPUTE_DEPTH, PER_THREAD = 4, ACROSS = TILE / PER_THREAD;
    __shared__ float rows_of_a[DEPTH][TILE + 1], columns_of_b[DEPTH][TILE + 1];
    __shared__ int found;
    wait_for_previous_kernel();
    if (__ldcg(packed.flag) == 0) return;

    const Index tiles_m = (args.m + TILE - 1) / TILE, tiles_n = (args.n + TILE - 1) / TILE;
    const Index tiles = tiles_m * tiles_n * args.batch[0] * args.batch[1] * args.batch[2];
    const int x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    for (Index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TilePlace place = place_of(tile, tiles_m, tiles_n, 1);
        const PackedItems items = packed_items(args, packed, static_cast<int>(place.batch));
        const Item item = item_of(args, place.batch);
        const Index row = place.row * TILE, column = place.column * TILE;
        unsigned wanted = 0;  // a bit for each of the thread's elements
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j) {
                const Index at_row = row + y + i * ACROSS, at_column = column + x + j * ACROSS;
                if (at_row < args.m && at_column < args.n &&
                    must_recompute(__ldcg(packed.guards_a + items.a * args.m + at_row),
                                   __ldcg(packed.guards_b + items.b * args.n + at_column),
                                   static_cast<int>(args.k)))
                    wanted |= 1u << (i * PER_THREAD + j);
            }
        __syncthreads();  // all are done with the tile before
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        if (wanted != 0) found = 1;
        __syncthreads();
        if (found == 0) continue;

        float sums[PER_THREAD][PER_THREAD] = {};
        for (Index begin = 0; begin < args.k; begin += DEPTH) {
            const int depth = static_cast<int>(smaller(DEPTH, args.k - begin));
            __syncthreads();
            for (int i = threadIdx.x; i < TILE * DEPTH; i += RECOMPUTE_THREADS) {
                const int k = i % DEPTH, of = i / DEPTH;
                const bool inside = k < depth;
                rows_of_a[k][of] =
                    inside && row + of < args.m ? item.a[(row + of) * args.a.row + (begin + k) * args.a.column] : 0.0f;
                columns_of_b[k][of] = inside && column + of < args.n
                                          ? item.b[(begin + k) * args.b.row + (column + of) * args.b.column]
                                          : 0.0f;
            }
            __syncthreads();
            for (int k = 0; k < depth; ++k) {
#pragma unroll
                for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
                    for (int j = 0; j < PER_THREAD; ++j)
                        sums[i][j] = __fmaf_rn(rows_of_a[k][y + i * ACROSS], columns_of_b[k][x + j * ACROSS],
                                               sums[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j) {
                if ((wanted >> (i * PER_THREAD + j) & 1) != 0)
                    store(args, item, row + y + i * ACROSS, column + x + j * ACROSS, sums[i][j]);
            }
    }
    // The last block to finish leaves the flag as the next product must find it; all have read it by then.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(packed.ticket, gridDim.x - 1) == gridDim.x - 1) *packed.flag = 0;
    }
}

}  // namespace tilewave
