// Tiles of any shape up to 128 x 128 for products that large tiles do not suit: small, narrow, of few tiles.
//
// A block computes a BM x BN tile in slices BK deep, of which STAGES are in shared memory, all but one of them still
// travelling. GROUPS thread groups take a share of each slice's depth and are summed in order at the end. A thread's
// TM x TN sums are chains of fused multiply-adds in the order of k; beyond the end of K nothing is added, so with one
// group the bits are those of the plain chain.
//
// Rows, columns and depths beyond the operands are neither read nor used. Where a tile and a slice are whole, copies
// go without any check.
#pragma once

#include "combining.cuh"
#include "copy.cuh"
#include "tile_task.cuh"

namespace tilewave {

// One operand's part of a slice: X rows of A or columns of B, BK deep.
//
// Elements or vectors of WIDTH bytes (4 or 16) run along K or along the other axis. In shared memory a K-contiguous operand is kept as it
// comes, [X][BK + 4], and read four depths at a time; others lie as [BK][X + pad] and are read four rows at a time.
// Copies of 4 bytes along K transpose on their way: a warp brings eight depths of four rows, which with a pad of 4 fall
// into different banks.
template <int X, int BK, int THREADS, bool ALONG_K, int WIDTH>
struct SmallOperand {
    static constexpr bool READ_ALONG_K = ALONG_K && WIDTH == 16;
    static constexpr bool TRANSPOSES = ALONG_K && WIDTH == 4;
    static constexpr int PITCH = READ_ALONG_K ? BK + 4 : TRANSPOSES ? X + 4 : X;
    static constexpr int FLOATS = READ_ALONG_K ? X * PITCH : BK * PITCH;
    static constexpr int VECTOR = WIDTH / 4;
    static constexpr int PER_LINE = (ALONG_K ? BK : X) / VECTOR;
    static constexpr int VECTORS = X * BK / VECTOR;
    static constexpr int COPIES = (VECTORS + THREADS - 1) / THREADS;
    static constexpr int LINE_STEP = TRANSPOSES ? THREADS / BK : THREADS / PER_LINE;  // lines from copy to copy
    static_assert(TRANSPOSES ? THREADS % (4 * BK) == 0 : THREADS % PER_LINE == 0, "a thread's copies are in one column");

    const char* source;  // of the first copy of the next slice
    Index line_bytes;    // from copy to copy
    int x, k;            // the first copy's place in the slice
    int x_left;          // rows or columns of the operand from the tile's first on, at most X
    int target;          // bytes from the operand's place in a stage

    __device__ __forceinline__ void start(const float* data, Index x0, Index k0, Index extent, Index x_stride,
                                          Index k_stride) {
        const int tid = thread_index();
        if constexpr (TRANSPOSES) {
            k = tid % 8 + tid / 32 % (BK / 8) * 8;
            x = tid % 32 / 8 + tid / (4 * BK) * 4;
        } else if constexpr (ALONG_K) {
            k = tid % PER_LINE * VECTOR;
            x = tid / PER_LINE;
        } else {
            k = tid / PER_LINE;
            x = tid % PER_LINE * VECTOR;
        }
        x_left = static_cast<int>(smaller(X, extent - x0));
        source = reinterpret_cast<const char*>(data + (x0 + x) * x_stride + (k0 + k) * k_stride);
        line_bytes = 4 * LINE_STEP * (ALONG_K ? x_stride : k_stride);
        target = 4 * (READ_ALONG_K ? x * PITCH + k : k * PITCH + x);
    }

    // Starts the copies of the next slice, of which `depth` are inside K, to `stage`; the one after it is `step` bytes on.
    __device__ __forceinline__ void copy(unsigned stage, int depth, Index step) {
        constexpr int STEP_BYTES = 4 * LINE_STEP * (ALONG_K && TRANSPOSES ? 1 : PITCH);
        const char* from = source;
        unsigned to = stage + target;
        if (x_left == X && depth == BK) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                if (VECTORS % THREADS == 0 || thread_index() < VECTORS - i * THREADS)
                    copy_async<WIDTH>(to + i * STEP_BYTES, from);
                from += line_bytes;
            }
        } else {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                bool inside = ALONG_K ? x + i * LINE_STEP < x_left && k < depth
                                      : x < x_left && k + i * LINE_STEP < depth;
                if (VECTORS % THREADS == 0 || thread_index() < VECTORS - i * THREADS)
                    copy_async<WIDTH>(to + i * STEP_BYTES, from, inside);
                from += line_bytes;
            }
        }
        source += step;
    }

    // A thread's T rows or columns: place `i` of thread `thread` out of X / T.
    template <int T>
    static __device__ __forceinline__ int place(int thread, int i) {
        return READ_ALONG_K || T % 4 != 0 ? thread + i * (X / T) : i / 4 * (4 * (X / T)) + thread * 4 + i % 4;
    }

    // The thread's values at depths k to k + 3, k a multiple of 4.
    template <int T>
    static __device__ __forceinline__ void read4(const float* slice, int thread, int k, float (&values)[4][T]) {
        if constexpr (READ_ALONG_K) {
#pragma unroll
            for (int i = 0; i < T; ++i) {
                float4 v = *reinterpret_cast<const float4*>(slice + place<T>(thread, i) * PITCH + k);
                values[0][i] = v.x, values[1][i] = v.y, values[2][i] = v.z, values[3][i] = v.w;
            }
        } else {
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) read1<T>(slice, thread, k + kk, values[kk]);
        }
    }

    template <int T>
    static __device__ __forceinline__ void read1(const float* slice, int thread, int k, float (&values)[T]) {
        if constexpr (!READ_ALONG_K && T % 4 == 0) {
#pragma unroll
            for (int i = 0; i < T; i += 4) {
                float4 v = *reinterpret_cast<const float4*>(slice + k * PITCH + place<T>(thread, i));
                values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < T; ++i)
                values[i] = slice[READ_ALONG_K ? place<T>(thread, i) * PITCH + k : k * PITCH + place<T>(thread, i)];
        }
    }
};

// A thread's group, and its place among the ROWS x COLUMNS threads of the group. In a warp of 4 x 8 lanes, bits 0 and 3 of the lane
// choose the row and the others the column: then a lane shares one operand's address with lane ^ 1 and the other's with
// lane ^ 2, so that the loads of 16 bytes of two quarter-warps are served together.
template <int ROWS, int COLUMNS>
struct SmallPlace {
    static constexpr int WARP_COLUMNS = ROWS >= 4 && COLUMNS >= 8 ? 8 : 4;
    static constexpr int WARP_ROWS = 32 / WARP_COLUMNS;
    static_assert(ROWS % WARP_ROWS == 0 && COLUMNS % WARP_COLUMNS == 0, "groups are of whole warps of 4 x 8 or 8 x 4");

    int group, row, column;

    __device__ __forceinline__ SmallPlace() {
        const int tid = thread_index(), lane = tid % 32, warp = tid % (ROWS * COLUMNS) / 32;
        const int two_bits = (lane & 1) | (lane >> 2 & 2), three_bits = (lane >> 1 & 3) | (lane >> 2 & 4);
        group = tid / (ROWS * COLUMNS);
        row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS + (WARP_ROWS == 4 ? two_bits : three_bits);
        column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS + (WARP_ROWS == 4 ? three_bits : two_bits);
    }
};

// What a block does. `task` is shared memory; `next(&task, first)` moves on to the next work item, as next_task() does.
// A and B say how the operands come: SmallOperand, or what has its members.
template <int BM, int BN, int BK, int TM, int TN, int GROUPS, int STAGES, typename A, typename B, typename Next>
__device__ __forceinline__ void small_tile_block(const GemmArgs& args, Task& task, Next next) {
    constexpr int ROWS = BM / TM, COLUMNS = BN / TN, GROUP = ROWS * COLUMNS, THREADS = GROUP * GROUPS;
    constexpr int SHARE = BK / GROUPS;  // of a slice's depth
    static_assert(SHARE % 4 == 0, "groups read four depths at a time");
    constexpr int STAGE = A::FLOATS + B::FLOATS;
    extern __shared__ float4 shared_vectors[];
    float* const shared = reinterpret_cast<float*>(shared_vectors);
    const unsigned shared_begin = shared_address(shared);

#pragma unroll 1
    for (bool first = true; next(&task, first); first = false) {
        const Index depth = task.work.k_end - task.work.k_begin;
        A a;
        B b;
        {
            const Item item = item_of(args, task.place.batch);
            const Index k_begin = task.work.k_begin;
            a.start(item.a, task.place.row * BM, k_begin, args.m, args.a.row, args.a.column);
            b.start(item.b, task.place.column * BN, k_begin, args.n, args.b.column, args.b.row);
        }

        // Copies the slice that begins `left` before the end of the walk, if there is one.
        const auto copy_slice = [&](int stage, Index left) {
            if (left > 0) {
                const int inside = static_cast<int>(smaller(BK, left));
                const unsigned begin = shared_begin + stage * (4 * STAGE);
                a.copy(begin, inside, args.a_step);
                b.copy(begin + 4 * A::FLOATS, inside, args.b_step);
            }
            commit_copies();  // an empty group where nothing is left, so that the count of groups stays right
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) copy_slice(stage, depth - stage * BK);

        const SmallPlace<ROWS, COLUMNS> place;
        float sum[TM][TN] = {};
        const auto multiply4 = [&](const float* slice, int k) {
            float a_values[4][TM], b_values[4][TN];
            A::template read4<TM>(slice, place.row, k, a_values);
            B::template read4<TN>(slice + A::FLOATS, place.column, k, b_values);
#pragma unroll
            for (int kk = 0; kk < 4; ++kk)
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) {
                        const int at = i % 2 ? TN - 1 - j : j;  // back and forth: neighbours share an operand
                        sum[i][at] = __fmaf_rn(a_values[kk][i], b_values[kk][at], sum[i][at]);
                    }
        };
        int stage = 0;
#pragma unroll 1
        for (Index left = depth; left > 0; left -= BK) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the slice is here for all threads, and all are done with the one before it
            copy_slice(stage == 0 ? STAGES - 1 : stage - 1, left - (STAGES - 1) * BK);
            const float* slice = shared + stage * STAGE;
            const int begin = place.group * SHARE;
            if (left >= BK) {
#pragma unroll
                for (int k = 0; k < SHARE; k += 4) multiply4(slice, begin + k);
            } else {
                const int end = min(begin + SHARE, static_cast<int>(left));
                int k = begin;
#pragma unroll 1
                for (; k + 4 <= end; k += 4) multiply4(slice, k);
#pragma unroll 1
                for (; k < end; ++k) {
                    float a_values[TM], b_values[TN];
                    A::template read1<TM>(slice, place.row, k, a_values);
                    B::template read1<TN>(slice + A::FLOATS, place.column, k, b_values);
#pragma unroll
                    for (int i = 0; i < TM; ++i)
#pragma unroll
                        for (int j = 0; j < TN; ++j) sum[i][j] = __fmaf_rn(a_values[i], b_values[j], sum[i][j]);
                }
            }
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }

        // The groups' sums, a BM x BN tile each, take the slices' place and are added in order.
        wait_for_copies<0>();
        __syncthreads();
        const SmallPlace<ROWS, COLUMNS> own;
        float* const mine = shared + own.group * (BM * BN);
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            float* const line = mine + A::template place<TM>(own.row, i) * BN;
            if constexpr (!B::READ_ALONG_K && TN % 4 == 0) {
#pragma unroll
                for (int j = 0; j < TN; j += 4)
                    *reinterpret_cast<float4*>(line + B::template place<TN>(own.column, j)) =
                        make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
            } else {
#pragma unroll
                for (int j = 0; j < TN; ++j) line[B::template place<TN>(own.column, j)] = sum[i][j];
            }
        }
        __syncthreads();
        constexpr int TILE = BM * BN;
        const WorkItem work = task.work;
        const bool shared_tile = work.slot >= 0;
        bool finishes = true;
        if constexpr (GROUPS > 1)
            for (int i = 4 * thread_index(); i < TILE; i += 4 * THREADS) {
                float4 total = *reinterpret_cast<const float4*>(shared + i);
#pragma unroll
                for (int g = 1; g < GROUPS; ++g)
                    total = total + *reinterpret_cast<const float4*>(shared + g * TILE + i);
                *reinterpret_cast<float4*>(shared + i) = total;
            }
        if (shared_tile) {
            const auto publish = [&](Index slot) {
                for (int i = 4 * thread_index(); i < TILE; i += 4 * THREADS) {
                    const float4 v = *reinterpret_cast<const float4*>(shared + i);
                    store_vector(args.partials + slot * TILE + i, v.x, v.y, v.z, v.w);
                }
            };
            // Where three blocks of 256 threads share an SM, their registers hold no more.
            constexpr int AT_ONCE = TILE <= 4 * THREADS ? PIECES_AT_ONCE / 2 : PIECES_AT_ONCE;
            const auto add = [&](Pieces pieces, int) {
                for (int i = 4 * thread_index(); i < TILE; i += 4 * THREADS)
                    *reinterpret_cast<float4*>(shared + i) = sum_of_pieces<TILE, AT_ONCE>(args, work, pieces, i);
            };
            finishes = add_pieces<16, false>(args, work, &task.last, publish, add);
        }
        if (GROUPS > 1 || shared_tile) __syncthreads();
        if (finishes) {
            const Item item = item_of(args, task.place.batch);
            const Index row0 = task.place.row * BM, column0 = task.place.column * BN;
            const Window window = {row0, args.m, column0, args.n};
            store_sums<BN, THREADS>(args, item, window, column0, shared, SumRows<BM, BM, BM>{row0});
        }
        __syncthreads();  // before the next tile's slices take the sums' place
    }
}

// Blocks that an SM should hold. Away from sm_80 to sm_90 the registers of three blocks are too few for the tile of 32 x
// 32 with four groups: ptxas spills.
template <int BM, int BN, int GROUPS, int MIN_BLOCKS>
constexpr __host__ __device__ int small_tile_blocks() {
#if __CUDA_ARCH__ == 750 || __CUDA_ARCH__ >= 1000
    return BM == 32 && BN == 32 && GROUPS == 4 && MIN_BLOCKS > 2 ? 2 : MIN_BLOCKS;
#else
    return MIN_BLOCKS;
#endif
}

template <int BM, int BN, int BK, int TM, int TN, int GROUPS, int STAGES, int MIN_BLOCKS, bool A_ALONG_K, int A_WIDTH,
          bool B_ALONG_K, int B_WIDTH>
__global__ void __launch_bounds__((BM / TM) * (BN / TN) * GROUPS, small_tile_blocks<BM, BN, GROUPS, MIN_BLOCKS>())
    small_tile(const __grid_constant__ GemmArgs args) {
    __shared__ __align__(8) unsigned char task_bytes[sizeof(Task)];  // a Task has no default constructor
    Task& task = *reinterpret_cast<Task*>(task_bytes);
    constexpr int THREADS = (BM / TM) * (BN / TN) * GROUPS;
    small_tile_block<BM, BN, BK, TM, TN, GROUPS, STAGES, SmallOperand<BM, BK, THREADS, A_ALONG_K, A_WIDTH>,
                     SmallOperand<BN, BK, THREADS, B_ALONG_K, B_WIDTH>>(
        args, task, [&](Task* at, bool first) { return next_task(args, at, first); });
}

}  // namespace tilewave
