// Which outputs a tile holds, clipped to the product, and a block's walk over its tiles.
#pragma once

#include "gemm_args.cuh"

namespace tilewave {

// A block's share of C: `rows` x `columns` elements of `items` consecutive items of the batch.
struct Patch {
    Index row, column, item;  // of the first element
    int rows, columns, items;
};

template <int BM, int BN, int ITEMS>
__device__ __forceinline__ Patch patch_of(const GemmArgs& args, Index tile) {
    TilePlace place = {0, 0, 0};
    if (args.tiles_m * args.tiles_n == 1)
        place.batch = tile;
    else if (args.tiles_n == 1 && tile < args.tiles_m)
        place.row = tile;
    else
        place = place_of(tile, args.tiles_m, args.tiles_n, args.band);  // divisions that the others are spared
    Patch patch;
    patch.row = place.row * BM;
    patch.column = place.column * BN;
    patch.item = place.batch * ITEMS;
    patch.rows = smaller(BM, args.m - patch.row);
    patch.columns = smaller(BN, args.n - patch.column);
    patch.items = ITEMS == 1 ? 1 : smaller(ITEMS, args.batch[0] * args.batch[1] * args.batch[2] - patch.item);
    return patch;
}

// Where the matrices of an item begin, as distances from those of the first item. A block keeps these in shared memory
// rather than addresses: the compiler knows that an address made from an argument is one of global memory, and would
// not know it of one that was loaded.
struct Offsets {
    Index a, b, c, bias, out, preactivation;
};

// Whether the batch has one axis, as nearly always: an item's offsets are then its number times their strides.
__device__ __forceinline__ bool one_batch_axis(const GemmArgs& args) {
    return args.batch[0] == 1 && args.batch[1] == 1;
}

__device__ __forceinline__ Offsets offsets_of(const GemmArgs& args, Index index) {
    Offsets offsets;
    if (one_batch_axis(args)) {
        constexpr int INNER = BATCH_LEVELS - 1;
        offsets.a = index * args.a.batch[INNER];
        offsets.b = index * args.b.batch[INNER];
        offsets.c = index * args.c.batch[INNER];
        offsets.bias = index * args.bias.batch[INNER];
        offsets.out = index * args.out.batch[INNER];
        offsets.preactivation = index * args.preactivation.batch[INNER];
        return offsets;
    }
    Item item = item_of(args, index);
    offsets.a = item.a - args.a.data;
    offsets.b = item.b - args.b.data;
    offsets.c = item.c - args.c.data;
    offsets.bias = item.bias - args.bias.data;
    offsets.out = item.out - args.out.data;
    offsets.preactivation = item.preactivation - args.preactivation.data;
    return offsets;
}

__device__ __forceinline__ Item item_at(const GemmArgs& args, const Offsets& offsets) {
    Item item;
    item.a = args.a.data + offsets.a;
    item.b = args.b.data + offsets.b;
    item.c = args.c.data + offsets.c;
    item.bias = args.bias.data ? args.bias.data + offsets.bias : nullptr;
    item.out = args.out.data + offsets.out;
    item.preactivation = args.preactivation.data ? args.preactivation.data + offsets.preactivation : nullptr;
    return item;
}

// Which outputs the block's own tile holds where every block has one: the tile of the block's number. In 32 bits, which
// hold any number of blocks; divisions only where a grid has tiles in both directions.
template <int BM, int BN, int ITEMS>
__device__ __forceinline__ Patch own_patch(const GemmArgs& args) {
    const unsigned tiles_m = static_cast<unsigned>(args.tiles_m), tiles_n = static_cast<unsigned>(args.tiles_n);
    const unsigned per_item = tiles_m * tiles_n;
    unsigned within = blockIdx.x, item = 0, row = 0, column = 0;
    if (within >= per_item) {
        item = per_item == 1 ? within : within / per_item;
        within -= item * per_item;
    }
    if (tiles_n == 1) {
        row = within;
    } else if (tiles_m == 1) {
        column = within;
    } else {  // as place_of() has it
        const unsigned band = static_cast<unsigned>(args.band);
        const unsigned first_row = within / (band * tiles_n) * band, offset = within - first_row * tiles_n;
        const unsigned rows = min(band, tiles_m - first_row);
        column = offset / rows;
        row = first_row + offset - column * rows;
    }
    Patch patch;
    patch.row = static_cast<Index>(row) * BM;
    patch.column = static_cast<Index>(column) * BN;
    patch.item = static_cast<Index>(item) * ITEMS;
    patch.rows = smaller(BM, args.m - patch.row);
    patch.columns = smaller(BN, args.n - patch.column);
    patch.items = ITEMS == 1 ? 1 : smaller(ITEMS, args.batch[0] * args.batch[1] * args.batch[2] - patch.item);
    return patch;
}

// A block's walk over whole tiles. A block that has one tile, of a batch of one axis, finds it by itself, all threads
// alike; anything else is worked out by one thread in shared memory.
template <int BM, int BN, int ITEMS>
struct PatchWalk {
    struct Shared {
        Patch patch;
        Offsets offsets;  // of the tile's first item, where the batch has more than one axis
        Index position;   // of the walk, behind this tile
        int found;
    };

    Shared& shared;
    Patch patch;

    __device__ __forceinline__ explicit PatchWalk(Shared& memory) : shared(memory) {}

    // Goes to the first or the next tile; false when there is none. Between two tiles there is a barrier.
    __device__ __forceinline__ bool next(const GemmArgs& args, bool first) {
        if (__builtin_expect(args.cut.walkers == 0 && one_batch_axis(args), 1)) {
            if (first) {
                patch = own_patch<BM, BN, ITEMS>(args);
                if (threadIdx.x == 0) shared.patch = patch;  // for those who read it behind their next barrier
            }
            return first;
        }
        __syncthreads();  // nobody needs the last one, nor anything else that it had in shared memory
        if (threadIdx.x == 0) {
            Walk walk(args.cut, blockIdx.x);
            if (!first) walk.position = shared.position;
            WorkItem work;
            shared.found = walk.next(work);
            shared.position = walk.position;
            if (shared.found) {
                shared.patch = patch_of<BM, BN, ITEMS>(args, work.tile);
                if (!one_batch_axis(args)) shared.offsets = offsets_of(args, shared.patch.item);
            }
        }
        __syncthreads();
        patch = shared.patch;
        return shared.found;
    }
};

}  // namespace tilewave
