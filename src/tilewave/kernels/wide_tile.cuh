// Tiles of four warps whose threads have 12 x 16 or 16 x 12 outputs each, in slices eight deep, two stages: fewer loads
// from shared memory a multiply-add than large_tile.cuh, whose rules for the steady loop hold here too.
//
// 192 sums leave registers for little else, so the loop is written for the register-file pass alone: ptxas's own order
// of it is slow, and the planner leaves these kernels out where the pass does not run.
//
// * The side with 16 values of a depth is held: a quad of it is renewed as soon as its products are done, in place. Only
//   the other side has two sets of registers.
// * An operand along K comes to registers a vector at a time, each stored before the next is loaded. Two such operands
//   (layout NT) would not fit.
#pragma once

#include "large_tile.cuh"

namespace tilewave {

// As LargeOperand, by 16 bytes; what comes by registers can also be brought a vector at a time.
template <int X, int BK, int THREADS, bool ALONG_K>
struct WideOperand : LargeOperand<X, BK, THREADS, ALONG_K, 16> {
    using Whole = LargeOperand<X, BK, THREADS, ALONG_K, 16>;
    static constexpr int VECTORS = ALONG_K ? Whole::LINES * Whole::IN_LINE : 0;  // a thread and slice, by registers
    static_assert(!ALONG_K || Whole::LINES == 1, "a thread's vectors lie in one line");

    // Gives up what the registers hold, so that they are free for others before.
    __device__ __forceinline__ void clear() {
        for (float& value : this->registers) value = 0.0f;
    }

    // Starts bringing a vector of the next slice, a whole one.
    __device__ __forceinline__ void load_vector(int vector) {
        float* const to = this->registers + vector * 4;
        asm volatile("ld.global.nc.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                     : "l"(this->source + 4 * vector * Whole::VECTOR_STEP));
    }

    // Stores what load_vector() brought.
    __device__ __forceinline__ void store_vector(int vector) {
#pragma unroll
        for (int e = vector * 4; e < vector * 4 + 4; ++e)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(this->target + 4 * e * Whole::PITCH), "f"(this->registers[e])
                         : "memory");
    }
};

// Where a thread's outputs begin in its tile: as LargePlace, with eight groups of rows and four of columns, or with four
// and eight, whatever the size of a warp's tile.
template <int ROWS, int COLUMNS, int ROW_LANES>
struct WidePlace {
    int row, column;  // of the first of the groups of four rows, and of four columns

    __device__ __forceinline__ explicit WidePlace(int warps_n) {
        const int tid = thread_index(), lane = tid % 32, warp = tid / 32;
        const int of_four = (lane & 1) | (lane >> 2 & 2), of_eight = (lane >> 1 & 3) | (lane >> 2 & 4);
        row = warp / warps_n * ROWS + (ROW_LANES == 8 ? of_eight : of_four) * 4;
        column = warp % warps_n * COLUMNS + (ROW_LANES == 8 ? of_four : of_eight) * 4;
    }
};

// 2 x 2 warps; TM x TN outputs a thread, the 16 of them on four lanes and the 12 on eight.
template <int TM, int TN, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(128, 2) wide_tile(const __grid_constant__ GemmArgs args) {
    static_assert((TM == 12 && TN == 16) || (TM == 16 && TN == 12), "one side is held, the other one is not");
    constexpr int BK = 8, WARPS_M = 2, WARPS_N = 2, THREADS = WARPS_M * WARPS_N * 32;
    constexpr int ROW_LANES = TM == 12 ? 8 : 4, COLUMN_LANES = 32 / ROW_LANES;
    constexpr int WARP_ROWS = TM * ROW_LANES, WARP_COLUMNS = TN * COLUMN_LANES;
    constexpr int BM = WARPS_M * WARP_ROWS, BN = WARPS_N * WARP_COLUMNS;
    using A = WideOperand<BM, BK, THREADS, A_ALONG_K>;
    using B = WideOperand<BN, BK, THREADS, B_ALONG_K>;
    using Place = WidePlace<WARP_ROWS, WARP_COLUMNS, ROW_LANES>;
    static_assert(!(A_ALONG_K && B_ALONG_K), "two operands by registers do not fit");
    constexpr int STAGE_BYTES = large_stage_bytes(A::BYTES + B::BYTES);
    extern __shared__ float4 shared_vectors[];
    float* const shared = reinterpret_cast<float*>(shared_vectors);
    Task* const task = reinterpret_cast<Task*>(shared + 2 * STAGE_BYTES / 4);
    const unsigned stage = shared_address(shared);

#pragma unroll 1
    for (bool first = true; next_task(args, task, first); first = false) {
        A a;
        B b;
        Index left = task->work.k_end - task->work.k_begin;  // depth that is not multiplied yet
        a.place(stage);
        b.place(stage + A::BYTES);
        const auto seek = [&](Index k) {
            const Item item = item_of(args, task->place.batch);
            a.seek(item.a, inside<BM>(task->place.row * BM, args.m), k, args.a.row, args.a.column);
            b.seek(item.b, inside<BN>(task->place.column * BN, args.n), k, args.b.column, args.b.row);
        };
        seek(task->work.k_begin);
        unsigned a_read, b_read;
        {
            const Place own(WARPS_N);
            a_read = stage + 4 * own.row;
            b_read = stage + A::BYTES + 4 * own.column;
        }

        float sum[TM][TN];
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) sum[i][j] = 0.0f;

        constexpr bool HOLDS_B = TN == 16;
        constexpr int HELD = 16, SWEPT = 12;
        float held[HELD], swept[2][SWEPT];
        const auto read_swept = [&](unsigned a_at, unsigned b_at, int to) {
#pragma unroll
            for (int i = 0; i < SWEPT; i += 4)
                load_fragment(&swept[to][i], HOLDS_B ? a_at + 4 * i * ROW_LANES : b_at + 4 * i * COLUMN_LANES);
        };
        const auto read_held = [&](unsigned a_at, unsigned b_at, int quad) {
            load_fragment(&held[4 * quad], HOLDS_B ? b_at + 16 * quad * COLUMN_LANES : a_at + 16 * quad * ROW_LANES);
        };
        const auto multiply = [&](int from, int quad) {
#pragma unroll
            for (int i = 0; i < SWEPT; ++i)
#pragma unroll
                for (int h = 4 * quad; h < 4 * quad + 4; ++h) {
                    float& total = HOLDS_B ? sum[i][h] : sum[h][i];
                    total = HOLDS_B ? __fmaf_rn(swept[from][i], held[h], total)
                                    : __fmaf_rn(held[h], swept[from][i], total);
                }
        };
        const auto other_stage = [&] {
            asm volatile("xor.b32 %0, %0, %4; xor.b32 %1, %1, %4; xor.b32 %2, %2, %4; xor.b32 %3, %3, %4;"
                         : "+r"(a_read), "+r"(b_read), "+r"(a.target), "+r"(b.target)
                         : "n"(STAGE_BYTES));
        };
        const auto arrive = [&] {
            wait_for_copies<0>();
            __syncthreads();
        };

        // The first slice, which may be the only one and ragged.
        a.template load<true>(static_cast<int>(smaller(BK, left)));
        b.template load<true>(static_cast<int>(smaller(BK, left)));
        commit_copies();
        a.store();
        b.store();
        arrive();
        a.target ^= STAGE_BYTES;
        b.target ^= STAGE_BYTES;

        // Steady: multiply a slice while the next, a whole one, is on its way.
        constexpr int PARTS = A::VECTORS + B::VECTORS, PART_DEPTH = PARTS > 0 ? BK / PARTS : BK;
        const auto load_part = [&](int part) {
            if constexpr (A::VECTORS > 0) a.load_vector(part);
            if constexpr (B::VECTORS > 0) b.load_vector(part);
        };
        const auto store_part = [&](int part) {
            if constexpr (A::VECTORS > 0) a.store_vector(part);
            if constexpr (B::VECTORS > 0) b.store_vector(part);
        };
        int steady = static_cast<int>(left / BK) - 1;
        if (steady > 0) {
            left -= static_cast<Index>(steady) * BK;
            read_swept(a_read, b_read, 0);
#pragma unroll
            for (int quad = 0; quad < HELD / 4; ++quad) read_held(a_read, b_read, quad);
#pragma unroll 1
            do {
                a.step(args.a_step);  // long after the loads before have read the pointers
                b.step(args.b_step);
                if constexpr (A::VECTORS == 0) a.template load<false>(BK);
                if constexpr (B::VECTORS == 0) b.template load<false>(BK);
                commit_copies();
                load_part(0);
#pragma unroll
                for (int k = 0; k < BK; ++k) {
                    const int next = (k + 1) % BK;
                    if (next == 0) {
                        store_part(PARTS - 1);
                        arrive();
                        other_stage();
                    } else if (k > 0 && k % PART_DEPTH == 0) {
                        store_part(k / PART_DEPTH - 1);
                        load_part(k / PART_DEPTH);
                    }
                    const unsigned a_at = a_read + 4 * next * A::PITCH, b_at = b_read + 4 * next * B::PITCH;
                    read_swept(a_at, b_at, next % 2);
#pragma unroll
                    for (int quad = 0; quad < HELD / 4; ++quad) {
                        multiply(k % 2, quad);
                        read_held(a_at, b_at, quad);
                    }
                }
            } while (--steady > 0);
        }

        // The last whole slice and a ragged one, or either alone.
#pragma unroll 1
        while (left > 0) {
            const int depth = static_cast<int>(smaller(BK, left));
            left -= depth;
            a.clear();
            b.clear();
            if (left > 0) {
                seek(task->work.k_end - left);
                a.template load<true>(static_cast<int>(left));
                b.template load<true>(static_cast<int>(left));
                commit_copies();
            }
            unsigned a_at = a_read, b_at = b_read;
#pragma unroll 1
            for (int k = 0; k < depth; ++k) {
                read_swept(a_at, b_at, 0);
#pragma unroll
                for (int quad = 0; quad < HELD / 4; ++quad) read_held(a_at, b_at, quad);
#pragma unroll
                for (int quad = 0; quad < HELD / 4; ++quad) multiply(0, quad);
                a_at += 4 * A::PITCH;
                b_at += 4 * B::PITCH;
            }
            if (left > 0) {
                a.store();
                b.store();
                arrive();
                other_stage();
            }
        }

        bool finishes = true;
        if (task->work.slot >= 0) {
            constexpr int TILE = BM * BN;
            float* const slots = args.partials + 4 * thread_index();
            const auto publish = [&](Index slot) {
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; j += 4)
                        store_vector(slots + slot * TILE + (i * TN + j) * THREADS, sum[i][j], sum[i][j + 1],
                                     sum[i][j + 2], sum[i][j + 3]);
            };
            const auto add = [&](Pieces pieces, int kept) {
                if (kept < 0) {
#pragma unroll
                    for (int i = 0; i < TM; ++i)
#pragma unroll
                        for (int j = 0; j < TN; ++j) sum[i][j] = -0.0f;  // added to anything it changes nothing
                }
#pragma unroll 1
                for (int piece = pieces.begin; piece < pieces.end; piece += pieces.step) {
                    if (piece == kept) continue;
                    const float* const source = slots + slot_of(args.cut, task->work, piece) * TILE;
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
            finishes = add_pieces<16, true>(args, task->work, &task->last, publish, add);
        }

        const Place own(WARPS_N);
        const Item item = item_of(args, task->place.batch);
        const Window window = {task->place.row * BM, args.m, task->place.column * BN, args.n};
        const Index row0 = inside<BM>(window.row, args.m), column0 = inside<BN>(window.column, args.n);
        if (!finishes) {
        } else if (stores_vectors(args, window, column0, BN)) {
            float* const out = item.out + (row0 + own.row) * args.out.row + column0 + own.column;
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                const int in_tile = i / 4 * (4 * ROW_LANES) + i % 4;
                if (row0 + own.row + in_tile < window.row) continue;
#pragma unroll
                for (int j = 0; j < TN; j += 4)
                    if (column0 + own.column + j * COLUMN_LANES >= window.column)
                        store_vector(out + in_tile * args.out.row + j * COLUMN_LANES, args.alpha * sum[i][j],
                                     args.alpha * sum[i][j + 1], args.alpha * sum[i][j + 2],
                                     args.alpha * sum[i][j + 3]);
            }
        } else {
            // A group of four rows of every thread at a time goes through shared memory, side by side as many of the
            // columns as threads can share evenly.
            constexpr int RUN = 4 * ROW_LANES, ROWS = WARPS_M * RUN, COLUMNS = BN % THREADS == 0 ? THREADS : THREADS / 2;
            static_assert(4 * ROWS * BN <= 2 * STAGE_BYTES, "a part fits into the stages");
#pragma unroll 1
            for (int part = 0; part < TM / 4; ++part) {
                __syncthreads();
                const int line = own.row / WARP_ROWS * RUN + own.row % WARP_ROWS;
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    if (i / 4 != part) continue;
#pragma unroll
                    for (int j = 0; j < TN; j += 4) {
                        const int column = own.column + j * COLUMN_LANES;
                        float* const to =
                            shared + (column / COLUMNS * ROWS + line + i % 4) * COLUMNS + column % COLUMNS;
                        *reinterpret_cast<float4*>(to) =
                            make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
                    }
                }
                __syncthreads();
#pragma unroll 1
                for (int side = 0; side < BN / COLUMNS; ++side)
                    store_sums<COLUMNS, THREADS>(args, item, window, column0 + side * COLUMNS,
                                                 shared + side * ROWS * COLUMNS,
                                                 SumRows<ROWS, RUN, WARP_ROWS>{row0 + part * RUN});
            }
        }
        __syncthreads();  // before the next tile's first slice takes the place of what is read here
    }
}

}  // namespace tilewave
