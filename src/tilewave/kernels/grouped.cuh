// Products of differing sizes, layouts and epilogues in one launch, each by the tiles of small_tile.cuh.
//
// A table holds an entry a product, and forms: a GemmArgs for all entries that are alike but for sizes, scalars and
// addresses. Work items (tiles, or pieces of tiles that are cut along K) are numbered product after product; a block
// finds the product of its item in the table, puts the GemmArgs together in shared memory and does the item as a launch
// of that product alone would. A product's bits depend on nothing but itself and the pieces that its tiles are cut into.
#pragma once

#define TILEWAVE_SEPARATE_BIAS  // the epilogue has the bits of the other kernels'
#include "small_tile.cuh"

namespace tilewave {

// A product of a group; the host fills it in (tilewave/kernels/group_table.py, same fields in the same order).
struct GroupEntry {
    Index first;  // number of its first work item
    int form;     // which GemmArgs of the table it goes by
    int pieces;   // that each of its tiles is cut into along K
    int slot;     // of the workspace: the first that is its own; its tickets begin at twice the number
    int band;     // of the raster, see place_of()
    float alpha, beta;
    float* data[6];  // a, b, c, bias, out, preactivation; null where absent
    Index m, n, k;
};

// Bits of GroupForm::access.
constexpr int GROUP_A_ALONG_K = 1, GROUP_B_ALONG_K = 2, GROUP_VECTORS = 4;

// What entries share: strides, batch, activation and flags; what an entry has of its own is 0 here.
struct GroupForm {
    GemmArgs args;
    Index access;  // without GROUP_VECTORS elements are read one by one, and the other bits mean nothing
};

constexpr int GROUP_TABLE_WORDS = 504;

// The one argument of a grouped kernel. The table is `entries` GroupEntries, the forms behind them.
struct GroupArgs {
    const Index* table;  // null where the table is below
    Index entries;
    Index items;  // work items of all products
    float* partials;
    unsigned* tickets;
    Index words[GROUP_TABLE_WORDS];  // of a table that is small enough
};

static_assert(sizeof(GroupEntry) % 8 == 0 && sizeof(GroupForm) % 8 == 0, "tables are made of words");
static_assert(sizeof(GroupArgs) <= 4096, "what every launch may take");

__device__ __forceinline__ Index group_word(const GroupArgs& group, Index at) {
    return group.table != nullptr ? group.table[at] : group.words[at];
}

// The entry that work item `item` belongs to. All threads of the block search together, so that each round leaves a
// THREADS-th of the entries. A barrier before and after each use of `found`.
template <int THREADS>
__device__ __forceinline__ Index group_entry_of(const GroupArgs& group, Index item, Index* found) {
    constexpr Index WORDS = sizeof(GroupEntry) / 8;
    Index low = 0, count = group.entries;
#pragma unroll 1
    while (count > 1) {
        const Index step = (count - 1) / THREADS + 1, mine = threadIdx.x * step;
        const bool holds = mine < count && group_word(group, (low + mine) * WORDS) <= item &&
                           (mine + step >= count || group_word(group, (low + mine + step) * WORDS) > item);
        __syncthreads();
        if (holds) *found = low + mine;
        __syncthreads();
        count = smaller(step, low + count - *found);
        low = *found;
    }
    return low;
}

// One operand's part of a slice, as SmallOperand of small_tile.cuh has it for elements that are copied one by one and
// lie as [BK][X + 4]; but along which axis neighbouring threads copy neighbours, the strides decide at run time.
template <int X, int BK, int THREADS>
struct AnyOperand {
    using Reader = SmallOperand<X, BK, THREADS, true, 4>;
    static constexpr bool READ_ALONG_K = false;
    static constexpr int PITCH = Reader::PITCH, FLOATS = Reader::FLOATS, COPIES = X * BK / THREADS;
    static constexpr int PER_LINE = THREADS < X ? X / THREADS : 1;  // copies of a thread before it turns to the next k
    static_assert(X * BK % THREADS == 0 && (X % THREADS == 0 || THREADS % X == 0), "threads share a slice evenly");

    const char* source;  // of the first copy of the next slice
    Index copy_bytes;    // from copy to copy
    int x, k;            // the first copy's place in the slice
    int x_step, k_step;  // from copy to copy
    int lines;           // 1 where a thread copies PER_LINE elements of a k and turns to the next, else 0
    Index line_bytes;    // from the place behind a line's last copy to the next line's first
    int x_left;          // rows or columns of the operand from the tile's first on, at most X

    __device__ __forceinline__ void start(const float* data, Index x0, Index k0, Index extent, Index x_stride,
                                          Index k_stride) {
        const int tid = thread_index();
        const Index x_apart = x_stride < 0 ? -x_stride : x_stride, k_apart = k_stride < 0 ? -k_stride : k_stride;
        if (x_stride != 0 && extent > 1 && (x_apart < k_apart || k_stride == 0)) {
            k = tid / X;
            x = tid % X;
            x_step = THREADS < X ? THREADS : 0;
            k_step = THREADS < X ? 0 : THREADS / X;
            lines = 1;
        } else {
            k = tid % 8 + tid / 32 % (BK / 8) * 8;
            x = tid % 32 / 8 + tid / (4 * BK) * 4;
            x_step = THREADS / BK;
            k_step = 0;
            lines = 0;
        }
        x_left = static_cast<int>(smaller(X, extent - x0));
        source = reinterpret_cast<const char*>(data + (x0 + x) * x_stride + (k0 + k) * k_stride);
        copy_bytes = 4 * (x_step * x_stride + k_step * k_stride);
        line_bytes = 4 * lines * (k_stride - X * x_stride);
    }

    // Starts the copies of the next slice, of which `depth` are inside K, to `stage`; the one after it is `step` bytes on.
    __device__ __forceinline__ void copy(unsigned stage, int depth, Index step) {
        const char* from = source;
        unsigned to = stage + 4 * (k * PITCH + x);
        int at_x = x, at_k = k;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            copy_async<4>(to, from, at_x < x_left && at_k < depth);
            from += copy_bytes;
            to += 4 * (k_step * PITCH + x_step);
            at_x += x_step;
            at_k += k_step;
            if constexpr (PER_LINE > 1) {
                if (i % PER_LINE == PER_LINE - 1) {
                    from += line_bytes;
                    to += 4 * lines * (PITCH - X);
                    at_x -= lines * X;
                    at_k += lines;
                }
            }
        }
        source += step;
    }

    template <int T>
    static __device__ __forceinline__ int place(int thread, int i) {
        return Reader::template place<T>(thread, i);
    }
    template <int T>
    static __device__ __forceinline__ void read4(const float* slice, int thread, int k, float (&values)[4][T]) {
        Reader::template read4<T>(slice, thread, k, values);
    }
    template <int T>
    static __device__ __forceinline__ void read1(const float* slice, int thread, int k, float (&values)[T]) {
        Reader::template read1<T>(slice, thread, k, values);
    }
};

// One work item, its operands read as A and B say. (As a generic lambda, NVRTC 13.0 takes it for a host function.)
template <int BM, int BN, int BK, int TM, int TN, int STAGES>
struct GroupTile {
    template <class A, class B>
    static __device__ __forceinline__ void compute(const GemmArgs& args, Task& task) {
        small_tile_block<BM, BN, BK, TM, TN, 1, STAGES, A, B>(args, task, [](Task*, bool first) { return first; });
    }
};

template <int BM, int BN, int BK, int TM, int TN, int STAGES, int MIN_BLOCKS>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), MIN_BLOCKS) grouped(const __grid_constant__ GroupArgs group) {
    constexpr int THREADS = (BM / TM) * (BN / TN);
    constexpr int ENTRY_WORDS = sizeof(GroupEntry) / 8, FORM_WORDS = sizeof(GroupForm) / 8;
    __shared__ __align__(8) unsigned char task_bytes[sizeof(Task)];  // a Task has no default constructor
    __shared__ Index form_words[FORM_WORDS], entry_words[ENTRY_WORDS], found;
    Task& task = *reinterpret_cast<Task*>(task_bytes);
    GroupForm& form = *reinterpret_cast<GroupForm*>(form_words);
    const GroupEntry& entry = *reinterpret_cast<const GroupEntry*>(entry_words);

#pragma unroll 1
    for (Index item = blockIdx.x; item < group.items; item += gridDim.x) {
        const Index at = group_entry_of<THREADS>(group, item, &found);
        for (int i = threadIdx.x; i < ENTRY_WORDS; i += THREADS) entry_words[i] = group_word(group, at * ENTRY_WORDS + i);
        __syncthreads();
        const Index form_at = group.entries * ENTRY_WORDS + entry.form * static_cast<Index>(FORM_WORDS);
        for (int i = threadIdx.x; i < FORM_WORDS; i += THREADS) form_words[i] = group_word(group, form_at + i);
        __syncthreads();
        if (threadIdx.x == 0) {
            GemmArgs& args = form.args;
            args.a.data = entry.data[0];
            args.b.data = entry.data[1];
            args.c.data = entry.data[2];
            args.bias.data = entry.data[3];
            args.out.data = entry.data[4];
            args.preactivation.data = entry.data[5];
            args.alpha = entry.alpha;
            args.beta = entry.beta;
            args.m = entry.m;
            args.n = entry.n;
            args.k = entry.k;
            args.tiles_m = (entry.m - 1) / BM + 1;
            args.tiles_n = (entry.n - 1) / BN + 1;
            args.band = entry.band;
            args.cut.tiles = args.tiles_m * args.tiles_n * args.batch[0] * args.batch[1] * args.batch[2];
            args.cut.k = entry.k;
            args.cut.depth = BK;
            args.cut.whole_tiles = entry.pieces == 1 ? args.cut.tiles : 0;
            args.cut.pieces = entry.pieces;
            args.cut.walkers = 0;
            args.partials = group.partials + static_cast<Index>(entry.slot) * (BM * BN);
            args.tickets = group.tickets + 2 * static_cast<Index>(entry.slot);  // a counter a tile, and one a slot
            Walk walk(args.cut, item - entry.first);
            walk.next(task.work);
            task.place = place_of(task.work.tile, args.tiles_m, args.tiles_n, args.band);
        }
        __syncthreads();
        const GemmArgs& args = form.args;
        using Tile = GroupTile<BM, BN, BK, TM, TN, STAGES>;
        using AnyA = AnyOperand<BM, BK, THREADS>;
        using AnyB = AnyOperand<BN, BK, THREADS>;
        using AlongM = SmallOperand<BM, BK, THREADS, false, 16>;
        using AlongN = SmallOperand<BN, BK, THREADS, false, 16>;
        using AOfK = SmallOperand<BM, BK, THREADS, true, 16>;
        using BOfK = SmallOperand<BN, BK, THREADS, true, 16>;
        switch (form.access) {
            case GROUP_VECTORS: Tile::template compute<AlongM, AlongN>(args, task); break;
            case GROUP_VECTORS | GROUP_A_ALONG_K: Tile::template compute<AOfK, AlongN>(args, task); break;
            case GROUP_VECTORS | GROUP_B_ALONG_K: Tile::template compute<AlongM, BOfK>(args, task); break;
            case GROUP_VECTORS | GROUP_A_ALONG_K | GROUP_B_ALONG_K: Tile::template compute<AOfK, BOfK>(args, task); break;
            default: Tile::template compute<AnyA, AnyB>(args, task);
        }
    }
}

}  // namespace tilewave
