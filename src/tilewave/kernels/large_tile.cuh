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
#include "register_sums.cuh"

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

// Both operands of a tile on their way through the two stages, and where a thread reads them. Dynamic shared memory,
// all that there is, begins at address 0, or at 1024 where the system keeps the first kilobyte. The task lies behind
// the stages.
template <typename Sums, typename A, typename B>
struct LargeSlices {
    static constexpr int STAGE_BYTES = large_stage_bytes(A::BYTES + B::BYTES);
    static_assert(Sums::PART_BYTES <= 2 * STAGE_BYTES, "what finish_tile() puts there fits into the stages");

    A a;
    B b;
    unsigned a_read, b_read;

    // At the begin of the task's walk, whose first slice goes to the stage at this address.
    __device__ __forceinline__ LargeSlices(const GemmArgs& args, const Task& task, unsigned stage) {
        a.place(stage);
        b.place(stage + A::BYTES);
        seek(args, task, task.work.k_begin);
        const Sums own;
        a_read = stage + 4 * own.row;
        b_read = stage + A::BYTES + 4 * own.column;
    }

    // Points to the slice at depth k.
    __device__ __forceinline__ void seek(const GemmArgs& args, const Task& task, Index k) {
        const Item item = item_of(args, task.place.batch);
        a.seek(item.a, inside<Sums::BM>(task.place.row * Sums::BM, args.m), k, args.a.row, args.a.column);
        b.seek(item.b, inside<Sums::BN>(task.place.column * Sums::BN, args.n), k, args.b.column, args.b.row);
    }

    // Starts bringing the first `depth` depths of a slice.
    __device__ __forceinline__ void load_checked(int depth) {
        a.template load<true>(depth);
        b.template load<true>(depth);
    }

    // Behind the first slice: the next one goes to the other stage than that which is read.
    __device__ __forceinline__ void aim_at_other_stage() {
        a.target ^= STAGE_BYTES;
        b.target ^= STAGE_BYTES;
    }

    __device__ __forceinline__ void other_stage() {
        asm volatile("xor.b32 %0, %0, %4; xor.b32 %1, %1, %4; xor.b32 %2, %2, %4; xor.b32 %3, %3, %4;"
                     : "+r"(a_read), "+r"(b_read), "+r"(a.target), "+r"(b.target)
                     : "n"(STAGE_BYTES));
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
    constexpr int TM = 16, TN = 8, BK = 8;
    using Sums = RegisterSums<TM, TN, 4, WARPS_M, WARPS_N>;
    constexpr int BM = Sums::BM, BN = Sums::BN, THREADS = Sums::THREADS;
    using A = LargeOperand<BM, BK, THREADS, A_ALONG_K, A_WIDTH>;
    using B = LargeOperand<BN, BK, THREADS, B_ALONG_K, B_WIDTH>;
    constexpr bool COPIES = !A::BY_REGISTERS || !B::BY_REGISTERS;  // whether any are asynchronous
    using Slices = LargeSlices<Sums, A, B>;
    extern __shared__ float4 shared_vectors[];
    float* const shared = reinterpret_cast<float*>(shared_vectors);
    Task* const task = reinterpret_cast<Task*>(shared + 2 * Slices::STAGE_BYTES / 4);
    const unsigned stage = shared_address(shared);

#pragma unroll 1
    for (bool first = true; next_task(args, task, first); first = false) {
        Index left = task->work.k_end - task->work.k_begin;  // depth that is not multiplied yet
        Slices slices(args, *task, stage);
        A& a = slices.a;
        B& b = slices.b;

        float sum[TM][TN];
        set_all(sum, 0.0f);

        float a_values[2][TM], b_values[2][TN];
        const auto read = [&](int k, int to) {
#pragma unroll
            for (int i = 0; i < TM; i += 4) load_fragment(&a_values[to][i], slices.a_read + 4 * (k * A::PITCH + i * 4));
#pragma unroll
            for (int j = 0; j < TN; j += 4) load_fragment(&b_values[to][j], slices.b_read + 4 * (k * B::PITCH + j * 8));
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
        slices.load_checked(static_cast<int>(smaller(BK, left)));
        commit();
        arrive();
        slices.aim_at_other_stage();

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
                        slices.other_stage();
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
                slices.seek(args, *task, task->work.k_end - left);
                slices.load_checked(static_cast<int>(left));
                commit();
            }
            unsigned a_at = slices.a_read, b_at = slices.b_read;
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
                slices.other_stage();
            }
        }

        finish_tile<Sums>(args, *task, shared, sum);
        __syncthreads();  // before the next tile's first slice takes the place of what is read here
    }
}

}  // namespace tilewave
