// A few rows of C from an operand whose other axis is contiguous: a thread owns columns and walks K.
//
// A block computes FEW x (LANES * WIDTH) outputs, or, MIRRORED, as many columns by rows. LANES neighbouring threads own
// WIDTH neighbouring lines of the long operand each: by 16 bytes with WIDTH 4, else element by element with any stride.
// The block's THREADS / LANES groups of such threads take turns along K. What a thread reads of the long operand it
// copies to a ring of its own in shared memory, AHEAD steps before it is needed: that many reads are on their way, and
// no register waits for them. The short operand lies in shared memory, two slabs of K by turns. A group's sums are
// chains in the order of its k; the groups' are added in a fixed order.
#pragma once

#include "flat.cuh"
#include "streams.cuh"

namespace tilewave {

constexpr int COLUMN_THREADS = 256;
constexpr int COLUMN_AHEAD = 10;  // 36 KB on their way: a block saturates its SM's share of the memory

// Floats from one k of a slab of the short operand to the next: a multiple of 4 for wide reads, and staggered over the
// banks.
template <int FEW>
constexpr __host__ __device__ int column_pitch() {
    return FEW <= 4 ? FEW : FEW + 4;
}

// k of a slab: as many turns of the block's groups as 10 KB hold, from 4 to 32.
template <int FEW>
constexpr __host__ __device__ int column_slab(int groups) {
    int turns = 32;
    while (turns > 4 && turns * groups * column_pitch<FEW>() > 2560) turns /= 2;
    return turns * groups;
}

// Starts copying a slab: element (line, k) of `lines`, k from `begin` to `end`, to slab[(k - begin) * pitch + line].
template <int FEW, int SLAB>
__device__ __forceinline__ void start_slab(float* slab, const Lines& lines, Index begin, Index end) {
    constexpr int PITCH = column_pitch<FEW>();
    const int count = smaller(SLAB, end - begin);
    // Neighbouring threads read neighbours.
    const bool along_k = lines.along == 1;
    constexpr int K_THREADS = SLAB < COLUMN_THREADS ? SLAB : COLUMN_THREADS;
    const int line_threads = along_k ? COLUMN_THREADS / K_THREADS : FEW;
    const int k_threads = along_k ? K_THREADS : COLUMN_THREADS / FEW;
    const int first_line = along_k ? threadIdx.x / K_THREADS : threadIdx.x % FEW;
    const int first_k = along_k ? threadIdx.x % K_THREADS : threadIdx.x / FEW;
    for (int line = first_line; line < lines.count; line += line_threads) {
        const float* source = lines.first + line * lines.line + (begin + first_k) * lines.along;
        for (int k = first_k; k < count; k += k_threads, source += k_threads * lines.along)
            start_copy<4>(slab + k * PITCH + line, source);
    }
}

template <int COUNT>
__device__ __forceinline__ void read_shared(float (&values)[COUNT], const float* source) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 vector = *reinterpret_cast<const float4*>(source + i);
            values[i] = vector.x, values[i + 1] = vector.y, values[i + 2] = vector.z, values[i + 3] = vector.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = source[i];
    }
}

// A thread's share of the long operand: every `step`-th k of WIDTH lines.
template <int WIDTH>
struct Ring {
    float* slots;       // of this thread; the next slot is COLUMN_THREADS * WIDTH floats further
    const float* at;    // what is copied next
    Index line, step;   // distances between lines and between the thread's k
    int lines;          // of WIDTH that the tile has; the other elements are not read
    Index left;         // k that are still to be copied
    int slot;           // that is filled next

    // Where the oldest k in the ring lies, AHEAD - 1 turns after it was started.
    __device__ __forceinline__ const float* oldest() const {
        return slots + (slot + 1 == COLUMN_AHEAD ? 0 : slot + 1) * (COLUMN_THREADS * WIDTH);
    }

    // Starts copying the next k, if there is one; always ends a group of copies.
    __device__ __forceinline__ void start() {
        if (left > 0) {
            float* target = slots + slot * (COLUMN_THREADS * WIDTH);
            if (WIDTH == 4 && lines == WIDTH)
                start_copy<4 * WIDTH>(target, at);
            else
#pragma unroll
                for (int w = 0; w < WIDTH; ++w)
                    if (w < lines) start_copy<4>(target + w, at + w * line);
            at += step;
            --left;
        }
        commit_copies();
        slot = slot + 1 == COLUMN_AHEAD ? 0 : slot + 1;
    }
};

template <int FEW, int LANES, int WIDTH, bool MIRRORED>
__global__ void __launch_bounds__(COLUMN_THREADS, 2) column_stream(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = COLUMN_THREADS, GROUPS = THREADS / LANES, WARPS = THREADS / 32, AHEAD = COLUMN_AHEAD;
    constexpr int MANY = LANES * WIDTH, OUTPUTS = FEW * MANY;
    constexpr int SLAB = column_slab<FEW>(GROUPS), PITCH = column_pitch<FEW>(), TURNS = SLAB / GROUPS;
    // Few rows at a time go through shared memory when the warps' sums are added.
    constexpr int ROUND = FEW < 4 ? FEW : 4;
    // Shared memory holds the ring and two slabs, later the outputs and the warps' sums (or what combine() needs). The
    // host asks for the larger: `_shared_bytes` of families/column_stream.py.
    constexpr int RING_FLOATS = AHEAD * THREADS * WIDTH;
    static_assert(LANES <= 32 && 32 % LANES == 0, "a warp holds whole groups");
    extern __shared__ __align__(128) float shared[];
    __shared__ Task<FEW, MANY, MIRRORED> task;
    __shared__ int flag;
    float* const slabs = shared + RING_FLOATS;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, warp = threadIdx.x / 32;
    for (bool first = true; task.next(args, first); first = false) {
        const Lines& many = task.many;
        const Index k_begin = task.work.k_begin, k_end = task.work.k_end;
        Ring<WIDTH> ring;
        ring.slots = shared + threadIdx.x * WIDTH;
        ring.line = WIDTH == 4 ? 1 : many.line;
        ring.step = GROUPS * many.along;
        ring.at = many.first + lane * WIDTH * ring.line + (k_begin + group) * many.along;
        ring.lines = max(0, min(WIDTH, many.count - lane * WIDTH));
        ring.left = ring.lines > 0 ? (k_end - k_begin - group + GROUPS - 1) / GROUPS : 0;
        ring.slot = 0;

        float sums[FEW][WIDTH] = {};
        start_slab<FEW, SLAB>(slabs, task.few, k_begin, k_end);
        commit_copies();
        for (int i = 0; i < AHEAD - 1; ++i) ring.start();
        float* slab = slabs;
        for (Index k = k_begin; k < k_end; k += SLAB) {
            // A slab's copies belong to the group of the first turn that was started with the slab before it.
            wait_for_copies<(TURNS < AHEAD ? TURNS : AHEAD) - 1>();
            __syncthreads();  // everybody's copies are there, and all are done with the other slab
            float* const other = slabs + (slabs + SLAB * PITCH - slab);
            if (k + SLAB < k_end) start_slab<FEW, SLAB>(other, task.few, k + SLAB, k_end);
            const int count = smaller(SLAB, k_end - k);
            const float* few_at = slab + group * PITCH;
            for (int turn = group; turn < count; turn += GROUPS) {
                wait_for_copies<AHEAD - 2>();
                float of_many[WIDTH], of_few[FEW];
                read_shared(of_many, ring.oldest());
                read_shared(of_few, few_at);
                few_at += GROUPS * PITCH;
                ring.start();
#pragma unroll
                for (int f = 0; f < FEW; ++f)
#pragma unroll
                    for (int w = 0; w < WIDTH; ++w) sums[f][w] = __fmaf_rn(of_few[f], of_many[w], sums[f][w]);
            }
            slab = other;
        }
        // First the groups of a warp, then the warps.
#pragma unroll
        for (int mask = LANES; mask < 32; mask *= 2)
#pragma unroll
            for (int f = 0; f < FEW; ++f)
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) sums[f][w] += __shfl_xor_sync(0xffffffffu, sums[f][w], mask);
        float *const outputs = shared, *const round_sums = shared + OUTPUTS;
#pragma unroll
        for (int round = 0; round < FEW; round += ROUND) {
            __syncthreads();
            if (threadIdx.x % 32 < LANES)
#pragma unroll
                for (int f = 0; f < ROUND; ++f)
#pragma unroll
                    for (int w = 0; w < WIDTH; ++w)
                        round_sums[(warp * ROUND + f) * MANY + lane * WIDTH + w] = sums[round + f][w];
            __syncthreads();
            for (int i = threadIdx.x; i < ROUND * MANY; i += THREADS) {
                float sum = round_sums[i];
#pragma unroll
                for (int other = 1; other < WARPS; ++other) sum += round_sums[other * ROUND * MANY + i];
                outputs[round * MANY + i] = sum;
            }
        }
        __syncthreads();
        if (combine<OUTPUTS, THREADS>(args, task.work, outputs, round_sums, &flag))
            store_tile<FEW, MANY, MIRRORED, THREADS>(args, task.work.tile, outputs);
    }
}

}  // namespace tilewave
