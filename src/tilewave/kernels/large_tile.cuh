// Tiles of warps of 64 x 64 outputs, for products that fill the GPU with them: 16 x 8 outputs a thread, slices eight
// deep, two stages.
//
// The steady loop is written for the register-file pass and for ptxas alike: it is one basic block without predicates.
// Everything irregular stands outside of it:
//
// * a tile at the edge of C is moved inside, so that no copy needs a check, and stores only what is its own (so m >= BM
//   and n >= BN);
// * the last slice of a walk is multiplied in a rolled loop, as deep as K is; a ragged one is also copied there;
// * pointers step by 64-bit arguments, and the two stages lie a power of two apart, so that one exclusive or moves from
//   one to the other;
// * nothing behind the loop needs the pointers: a ragged slice's are worked out anew, so the loop may keep them where
//   it likes.
//
// A thread's sums are plain chains of fused multiply-adds in the order of k.
#pragma once

#include "copy.cuh"
#include "combining.cuh"
#include "tile_task.cuh"

namespace tilewave {

// From one stage to the other: a power of two that holds a slice behind the kilobyte that the system may keep.
constexpr __host__ __device__ int large_stage_bytes(int slice_bytes) {
    int bytes = 1024;
    while (bytes < 1024 + slice_bytes) bytes *= 2;
    return bytes;
}

// Steps a pointer. Written out, because the compiler would make every step of a chain a product of its own.
__device__ __forceinline__ const char* step_by(const char* pointer, Index bytes) {
    asm("add.s64 %0, %0, %1;" : "+l"(pointer) : "l"(bytes));
    return pointer;
}

// Where a thread's outputs begin in its tile. Lanes are placed so that each shares A's address with lane ^ 2 and B's
// with lane ^ 1: then half a warp's loads of 16 bytes are served at once.
struct LargePlace {
    int row, column;  // of the first of the groups of four rows, and of four columns

    __device__ __forceinline__ explicit LargePlace(int warps_n) {
        const int tid = thread_index(), lane = tid % 32, warp = tid / 32;
        row = warp / warps_n * 64 + ((lane & 1) | (lane >> 2 & 2)) * 4;
        column = warp % warps_n * 64 + ((lane >> 1 & 3) | (lane >> 2 & 4)) * 4;
    }
};

// Where a tile of SIZE rows or columns begins once it is moved inside the extent. Computed anew at every call, like
// thread_index().
template <int SIZE>
__device__ __forceinline__ Index inside(Index begin, Index extent) {
    Index size;
    asm volatile("mov.s64 %0, %1;" : "=l"(size) : "n"(SIZE));
    return smaller(begin, extent - size);
}

// One operand's part of a slice, which lies as [BK][PITCH] in shared memory: X rows of A or columns of B.
//
// Along K, vectors of 16 bytes are loaded to registers and stored transposed (a pitch of 4 more than a multiple of 32
// puts a warp's stores into different banks), and single elements are copied to their transposed place; either asks L2
// for the whole line of 128 bytes, which the next slices read. Along the other axis, whose neighbours must lie side by
// side, either is copied as it comes.
template <int X, int BK, int THREADS, bool ALONG_K, int WIDTH>
struct LargeOperand {
    static constexpr bool BY_REGISTERS = ALONG_K && WIDTH > 4;
    static constexpr int VECTOR = WIDTH / 4;
    static constexpr int PITCH = ALONG_K ? X + 4 : X;
    static constexpr int BYTES = 4 * BK * PITCH;
    // Threads share a line (a row of A along K, a depth of it along M): PER_LINE of them, each IN_LINE vectors. Along K
    // a thread takes a whole row if there are rows enough, for a row's vectors need one pointer.
    static constexpr int ROW_THREADS = BY_REGISTERS && X >= THREADS ? 1 : BK / VECTOR;
    static constexpr int PER_LINE = ALONG_K ? ROW_THREADS : WIDTH == 4 ? 32 : THREADS / BK;
    static constexpr int LINE_STEP = THREADS / PER_LINE;
    static constexpr int LINES = (ALONG_K ? X : BK) / LINE_STEP;                   // a thread
    static constexpr int IN_LINE = (ALONG_K ? BK : X) / VECTOR / PER_LINE;         // vectors a thread and line
    static constexpr int VECTOR_STEP = (ALONG_K ? 1 : PER_LINE) * VECTOR;          // from one of them to the next
    static_assert(LINES * LINE_STEP == (ALONG_K ? X : BK), "threads share the lines evenly");

    const char* source;  // of the thread's first line
    Index line_bytes;    // from one of its lines to the next
    float registers[BY_REGISTERS ? LINES * IN_LINE * VECTOR : 1];
    unsigned target;
    int k;  // depth of the thread's first element

    // Sets where this thread's share of a slice goes.
    __device__ __forceinline__ void place(unsigned stage) {
        const int tid = thread_index();
        const int along = tid % PER_LINE * VECTOR, line = tid / PER_LINE;
        target = stage + 4 * ((ALONG_K ? along : line) * PITCH + (ALONG_K ? line : along));
    }

    // Points to the slice at depth k0.
    __device__ __forceinline__ void seek(const float* data, Index x0, Index k0, Index x_stride, Index k_stride) {
        const int tid = thread_index();
        const int along = tid % PER_LINE * VECTOR, line = tid / PER_LINE;
        k = ALONG_K ? along : line;
        const int x = ALONG_K ? line : along;
        source = reinterpret_cast<const char*>(data + (x0 + x) * x_stride + (k0 + k) * k_stride);
        line_bytes = 4 * LINE_STEP * (ALONG_K ? x_stride : k_stride);
    }

    // Starts bringing this thread's share of the next slice, CHECKED: of its first `depth` depths.
    template <bool CHECKED>
    __device__ __forceinline__ void load(int depth) {
        if (CHECKED && BY_REGISTERS)  // so that no older value is kept for the threads that load nothing
            for (float& value : registers) value = 0.0f;
        const char* from = source;
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            if (i > 0) from = step_by(from, line_bytes);
#pragma unroll
            for (int v = 0; v < IN_LINE; ++v) {
                const int along = v * VECTOR_STEP;
                if (CHECKED && k + (ALONG_K ? along : i * LINE_STEP) >= depth) continue;
                if constexpr (BY_REGISTERS) {
                    float* const to = registers + (i * IN_LINE + v) * VECTOR;
                    asm volatile("ld.global.nc.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                                 : "l"(from + 4 * along));
                } else {
                    const int place = ALONG_K ? i * LINE_STEP : i * LINE_STEP * PITCH + along;
                    copy_async<WIDTH, ALONG_K>(target + 4 * place, from + 4 * along);
                }
            }
        }
    }

    __device__ __forceinline__ void step(Index bytes) { source += bytes; }

    // Stores what load() brought to registers.
    __device__ __forceinline__ void store() {
        if constexpr (BY_REGISTERS) {
#pragma unroll
            for (int i = 0; i < LINES; ++i)
#pragma unroll
                for (int e = 0; e < IN_LINE * VECTOR; ++e)
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(target + 4 * (e * PITCH + i * LINE_STEP)),
                                 "f"(registers[i * IN_LINE * VECTOR + e])
                                 : "memory");
        }
    }
};

__device__ __forceinline__ void load_fragment(float* values, unsigned address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(address));
}

// WARPS_M x WARPS_N warps of 64 x 64 outputs.
template <int WARPS_M, int WARPS_N, int MIN_BLOCKS, bool A_ALONG_K, int A_WIDTH, bool B_ALONG_K, int B_WIDTH>
__global__ void __launch_bounds__(WARPS_M* WARPS_N * 32, MIN_BLOCKS) large_tile(const __grid_constant__ GemmArgs args) {
    constexpr int WARP = 64, TM = 16, TN = 8, BK = 8;
    constexpr int BM = WARPS_M * WARP, BN = WARPS_N * WARP, THREADS = WARPS_M * WARPS_N * 32;
    using A = LargeOperand<BM, BK, THREADS, A_ALONG_K, A_WIDTH>;
    using B = LargeOperand<BN, BK, THREADS, B_ALONG_K, B_WIDTH>;
    constexpr bool COPIES = !A::BY_REGISTERS || !B::BY_REGISTERS;  // whether any are asynchronous
    // Dynamic shared memory, all that there is, begins at address 0, or at 1024 where the system keeps the first
    // kilobyte. The task lies behind the stages.
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
            const LargePlace own(WARPS_N);
            a_read = stage + 4 * own.row;
            b_read = stage + A::BYTES + 4 * own.column;
        }

        float sum[TM][TN];
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) sum[i][j] = 0.0f;

        float a_values[2][TM], b_values[2][TN];
        const auto read = [&](int k, int to) {
#pragma unroll
            for (int i = 0; i < TM; i += 4) load_fragment(&a_values[to][i], a_read + 4 * (k * A::PITCH + i * 4));
#pragma unroll
            for (int j = 0; j < TN; j += 4) load_fragment(&b_values[to][j], b_read + 4 * (k * B::PITCH + j * 8));
        };
        const auto multiply = [&](int from) {
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    const int at = i % 2 ? TN - 1 - j : j;  // back and forth: neighbours share an operand
                    sum[i][at] = __fmaf_rn(a_values[from][i], b_values[from][at], sum[i][at]);
                }
        };
        const auto other_stage = [&] {
            asm volatile("xor.b32 %0, %0, %4; xor.b32 %1, %1, %4; xor.b32 %2, %2, %4; xor.b32 %3, %3, %4;"
                         : "+r"(a_read), "+r"(b_read), "+r"(a.target), "+r"(b.target)
                         : "n"(STAGE_BYTES));
        };
        const auto arrive = [&] {
            a.store();
            b.store();
            if (COPIES) wait_for_copies<0>();
            __syncthreads();
        };
        const auto commit = [&] {
            if (COPIES) commit_copies();
        };

        // The first slice, which may be the only one and ragged.
        a.template load<true>(static_cast<int>(smaller(BK, left)));
        b.template load<true>(static_cast<int>(smaller(BK, left)));
        commit();
        arrive();
        a.target ^= STAGE_BYTES;
        b.target ^= STAGE_BYTES;

        // Steady: multiply a slice while the next, a whole one, is on its way.
        int steady = static_cast<int>(left / BK) - 1;
        if (steady > 0) {
            left -= static_cast<Index>(steady) * BK;
            read(0, 0);
#pragma unroll 1
            do {
                a.step(args.a_step);  // long after the loads before have read the pointers
                b.step(args.b_step);
                a.template load<false>(BK);
                b.template load<false>(BK);
                commit();
#pragma unroll
                for (int k = 0; k < BK; ++k) {
                    if (k == BK - 1) {
                        arrive();
                        other_stage();
                        read(0, 0);
                    } else {
                        read(k + 1, (k + 1) % 2);
                    }
                    multiply(k % 2);
                }
            } while (--steady > 0);
        }

        // The last whole slice and a ragged one, or either alone.
#pragma unroll 1
        while (left > 0) {
            const int depth = static_cast<int>(smaller(BK, left));
            left -= depth;
            if (left > 0) {
                seek(task->work.k_end - left);
                a.template load<true>(static_cast<int>(left));
                b.template load<true>(static_cast<int>(left));
                commit();
            }
            unsigned a_at = a_read, b_at = b_read;
#pragma unroll 1
            for (int k = 0; k < depth; ++k) {
#pragma unroll
                for (int i = 0; i < TM; i += 4) load_fragment(&a_values[0][i], a_at + 16 * i);
#pragma unroll
                for (int j = 0; j < TN; j += 4) load_fragment(&b_values[0][j], b_at + 32 * j);
                multiply(0);
                a_at += 4 * A::PITCH;
                b_at += 4 * B::PITCH;
            }
            if (left > 0) {
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

        const LargePlace own(WARPS_N);
        const Item item = item_of(args, task->place.batch);
        const Window window = {task->place.row * BM, args.m, task->place.column * BN, args.n};
        const Index row0 = inside<BM>(window.row, args.m), column0 = inside<BN>(window.column, args.n);
        if (!finishes) {
        } else if (stores_vectors(args, window, column0, BN)) {
            float* const out = item.out + (row0 + own.row) * args.out.row + column0 + own.column;
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                const int in_tile = i / 4 * 16 + i % 4;
                if (row0 + own.row + in_tile < window.row) continue;
#pragma unroll
                for (int j = 0; j < TN; j += 4)
                    if (column0 + own.column + j * 8 >= window.column)
                        store_vector(out + in_tile * args.out.row + j * 8, args.alpha * sum[i][j],
                                     args.alpha * sum[i][j + 1], args.alpha * sum[i][j + 2],
                                     args.alpha * sum[i][j + 3]);
            }
        } else {
            // Every fourth group of four rows at a time goes through shared memory.
#pragma unroll 1
            for (int part = 0; part < TM / 4; ++part) {
                __syncthreads();
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    if (i / 4 != part) continue;
                    float* const line = shared + (own.row / WARP * 16 + own.row % WARP + i % 4) * BN + own.column;
#pragma unroll
                    for (int j = 0; j < TN; j += 4)
                        *reinterpret_cast<float4*>(line + j * 8) =
                            make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
                }
                __syncthreads();
                store_sums<BN, THREADS>(args, item, window, column0, shared,
                                        SumRows<WARPS_M * 16, 16, WARP>{row0 + part * 16});
            }
        }
        __syncthreads();  // before the next tile's first slice takes the place of what is read here
    }
}

}  // namespace tilewave
