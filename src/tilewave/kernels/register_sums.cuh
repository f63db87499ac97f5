// From the sums of a tile that its threads hold in registers to memory: the one end of large and of wide tiles.
#pragma once

#include "combining.cuh"
#include "tile_task.cuh"

namespace tilewave {

// Where a tile of SIZE rows or columns begins once it is moved inside the extent. Computed anew at every call, like
// thread_index().
template <int SIZE>
__device__ __forceinline__ Index inside(Index begin, Index extent) {
    Index size;
    asm volatile("mov.s64 %0, %1;" : "=l"(size) : "n"(SIZE));
    return smaller(begin, extent - size);
}

// How a tile's sums lie in its threads: WARPS_M x WARPS_N warps of ROW_LANES x COLUMN_LANES lanes, each with TM x TN.
// A thread's rows come in groups of four, so do its columns; between two groups lie those of the other lanes. An object
// says where this thread's begin.
//
// Lanes are placed so that each shares A's address with lane ^ 2 and B's with lane ^ 1, or the other way round: then
// half a warp's loads of 16 bytes are served at once.
template <int TM_, int TN_, int ROW_LANES_, int WARPS_M, int WARPS_N>
struct RegisterSums {
    static constexpr int TM = TM_, TN = TN_, ROW_LANES = ROW_LANES_, COLUMN_LANES = 32 / ROW_LANES;
    static_assert(ROW_LANES == 4 || ROW_LANES == 8, "lanes stand 4 x 8 or 8 x 4");
    static constexpr int WARP_ROWS = TM * ROW_LANES, WARP_COLUMNS = TN * COLUMN_LANES;
    static constexpr int BM = WARPS_M * WARP_ROWS, BN = WARPS_N * WARP_COLUMNS, THREADS = WARPS_M * WARPS_N * 32;
    // A group of four rows of every thread: what goes through shared memory at a time, side by side as many of the
    // columns as the threads can share evenly.
    static constexpr int RUN = 4 * ROW_LANES, PART_ROWS = WARPS_M * RUN;
    static constexpr int PART_COLUMNS = BN % THREADS == 0 || THREADS % BN == 0 ? BN : THREADS / 2;
    static constexpr int PART_BYTES = 4 * PART_ROWS * BN;

    int row, column;  // of the first of the groups of four rows, and of four columns

    __device__ __forceinline__ RegisterSums() {
        const int tid = thread_index(), lane = tid % 32, warp = tid / 32;
        const int of_four = (lane & 1) | (lane >> 2 & 2), of_eight = (lane >> 1 & 3) | (lane >> 2 & 4);
        row = warp / WARPS_N * WARP_ROWS + (ROW_LANES == 8 ? of_eight : of_four) * 4;
        column = warp % WARPS_N * WARP_COLUMNS + (ROW_LANES == 8 ? of_four : of_eight) * 4;
    }
};

template <int TM, int TN>
__device__ __forceinline__ void set_all(float (&sum)[TM][TN], float value) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] = value;
}

// Called by all threads of a block with the sums of a piece of a cut tile: true in the block whose sums are then those
// of the tile. A slot holds the first four sums of every thread, then the next four, and so on.
template <int ALONE, int THREADS, int TM, int TN>
__device__ __forceinline__ bool add_pieces_to(float (&sum)[TM][TN], const GemmArgs& args, Task& task) {
    constexpr int TILE = TM * TN * THREADS;
    float* const slots = args.partials + 4 * thread_index();
    const auto publish = [&](Index slot) {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; j += 4)
                store_vector(slots + slot * TILE + (i * TN + j) * THREADS, sum[i][j], sum[i][j + 1], sum[i][j + 2],
                             sum[i][j + 3]);
    };
    const auto add = [&](Pieces pieces, int kept) {
        if (kept < 0) set_all(sum, -0.0f);  // added to anything it changes nothing
#pragma unroll 1
        for (int piece = pieces.begin; piece < pieces.end; piece += pieces.step) {
            if (piece == kept) continue;
            const float* const source = slots + slot_of(args.cut, task.work, piece) * TILE;
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; j += 4) {
                    const float4 v = load_partial(source + (i * TN + j) * THREADS);
                    sum[i][j] += v.x;
                    sum[i][j + 1] += v.y;
                    sum[i][j + 2] += v.z;
                    sum[i][j + 3] += v.w;
                }
        }
    };
    return add_pieces<ALONE, true>(args, task.work, &task.last, publish, add);
}

// Adds the pieces of a cut tile and stores what the tile has in C, as all threads of a block. `shared` holds
// Sums::PART_BYTES that nobody uses any more once all threads are here.
template <typename Sums>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, Task& task, float* shared,
                                            float (&sum)[Sums::TM][Sums::TN]) {
    constexpr int TM = Sums::TM, TN = Sums::TN, BM = Sums::BM, BN = Sums::BN;
    bool finishes = true;
    if (task.work.slot >= 0) finishes = add_pieces_to<16, Sums::THREADS>(sum, args, task);

    const Sums own;
    const Item item = item_of(args, task.place.batch);
    const Window window = {task.place.row * BM, args.m, task.place.column * BN, args.n};
    const Index row0 = inside<BM>(window.row, args.m), column0 = inside<BN>(window.column, args.n);
    if (!finishes) {
    } else if (stores_vectors(args, window, column0, BN)) {
        float* const out = item.out + (row0 + own.row) * args.out.row + column0 + own.column;
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            const int in_tile = i / 4 * Sums::RUN + i % 4;
            if (row0 + own.row + in_tile < window.row) continue;
#pragma unroll
            for (int j = 0; j < TN; j += 4)
                if (column0 + own.column + j * Sums::COLUMN_LANES >= window.column)
                    store_vector(out + in_tile * args.out.row + j * Sums::COLUMN_LANES, args.alpha * sum[i][j],
                                 args.alpha * sum[i][j + 1], args.alpha * sum[i][j + 2], args.alpha * sum[i][j + 3]);
        }
    } else {
        constexpr int RUN = Sums::RUN, ROWS = Sums::PART_ROWS, COLUMNS = Sums::PART_COLUMNS;
#pragma unroll 1
        for (int part = 0; part < TM / 4; ++part) {
            __syncthreads();
            const int line = own.row / Sums::WARP_ROWS * RUN + own.row % Sums::WARP_ROWS;
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                if (i / 4 != part) continue;
#pragma unroll
                for (int j = 0; j < TN; j += 4) {
                    const int column = own.column + j * Sums::COLUMN_LANES;
                    const int side = COLUMNS == BN ? 0 : column / COLUMNS;
                    float* const to = shared + (side * ROWS + line + i % 4) * COLUMNS + column - side * COLUMNS;
                    *reinterpret_cast<float4*>(to) =
                        make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
                }
            }
            __syncthreads();
#pragma unroll 1
            for (int side = 0; side < BN / COLUMNS; ++side)
                store_sums<COLUMNS, Sums::THREADS>(args, item, window, column0 + side * COLUMNS,
                                                   shared + side * ROWS * COLUMNS,
                                                   SumRows<ROWS, RUN, Sums::WARP_ROWS>{row0 + part * RUN});
        }
    }
}

}  // namespace tilewave
