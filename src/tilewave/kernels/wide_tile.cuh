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

// 2 x 2 warps; TM x TN outputs a thread, the 16 of them on four lanes and the 12 on eight.
template <int TM, int TN, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(128, 2) wide_tile(const __grid_constant__ GemmArgs args) {
    static_assert((TM == 12 && TN == 16) || (TM == 16 && TN == 12), "one side is held, the other one is not");
    constexpr int BK = 8, ROW_LANES = TM == 12 ? 8 : 4, COLUMN_LANES = 32 / ROW_LANES;
    using Sums = RegisterSums<TM, TN, ROW_LANES, 2, 2>;
    constexpr int BM = Sums::BM, BN = Sums::BN, THREADS = Sums::THREADS;
    using A = WideOperand<BM, BK, THREADS, A_ALONG_K>;
    using B = WideOperand<BN, BK, THREADS, B_ALONG_K>;
    static_assert(!(A_ALONG_K && B_ALONG_K), "two operands by registers do not fit");
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
        const auto arrive = [&] {
            wait_for_copies<0>();
            __syncthreads();
        };

        // The first slice, which may be the only one and ragged.
        slices.load_checked(static_cast<int>(smaller(BK, left)));
        commit_copies();
        a.store();
        b.store();
        arrive();
        slices.aim_at_other_stage();

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
            read_swept(slices.a_read, slices.b_read, 0);
#pragma unroll
            for (int quad = 0; quad < HELD / 4; ++quad) read_held(slices.a_read, slices.b_read, quad);
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
                        slices.other_stage();
                    } else if (k > 0 && k % PART_DEPTH == 0) {
                        store_part(k / PART_DEPTH - 1);
                        load_part(k / PART_DEPTH);
                    }
                    const unsigned a_at = slices.a_read + 4 * next * A::PITCH;
                    const unsigned b_at = slices.b_read + 4 * next * B::PITCH;
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
                slices.seek(args, *task, task->work.k_end - left);
                slices.load_checked(static_cast<int>(left));
                commit_copies();
            }
            unsigned a_at = slices.a_read, b_at = slices.b_read;
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
                slices.other_stage();
            }
        }

        finish_tile<Sums>(args, *task, shared, sum);
        __syncthreads();  // before the next tile's first slice takes the place of what is read here
    }
}

}  // namespace tilewave
