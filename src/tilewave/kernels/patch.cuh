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

__device__ __forceinline__ Offsets offsets_of(const GemmArgs& args, Index index) {
    Offsets offsets;
    if (args.batch[0] * args.batch[1] == 1) {  // one axis, as nearly always
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

// A block's walk in shared memory, one thread of which computes it: no part of it occupies registers meanwhile.
template <int BM, int BN, int ITEMS>
struct PatchWalk {
    Patch patch;
    Offsets offsets;  // of the tile's first item
    Index position;  // of the walk, behind this tile
    int found;

    // Goes to the first or the next tile; false when there is none. A barrier before and after it.
    __device__ __forceinline__ bool next(const GemmArgs& args, bool first) {
        __syncthreads();  // nobody needs the last one, nor anything else that it had in shared memory
        if (threadIdx.x == 0) {
            Walk walk(args.cut, blockIdx.x);
            if (!first) walk.position = position;
            WorkItem work;
            found = walk.next(work);
            position = walk.position;
            if (found) {
                patch = patch_of<BM, BN, ITEMS>(args, work.tile);
                offsets = offsets_of(args, patch.item);
            }
        }
        __syncthreads();
        return found;
    }
};

}  // namespace tilewave
