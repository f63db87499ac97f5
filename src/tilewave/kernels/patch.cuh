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

// Where a block is on its walk, in one number: the rest is computed from it when needed and occupies no registers
// meanwhile.
struct Position {
    Index value;

    __device__ __forceinline__ explicit Position(const GemmArgs& args) : value(Walk(args.cut, blockIdx.x).position) {}

    // The item that begins here, if there is one; moves on to the next.
    __device__ __forceinline__ bool next(const GemmArgs& args, WorkItem& work) {
        Walk walk(args.cut, blockIdx.x);
        walk.position = value;
        const bool found = walk.next(work);
        value = walk.position;
        return found;
    }
};

// Where the matrices of an item begin, as distances from those of the first item. A block keeps these in shared memory
// rather than addresses: the compiler knows that an address made from an argument is one of global memory, and would
// not know it of one that was loaded.
struct Offsets {
    Index a, b, c, bias, out, preactivation;
};

__device__ __forceinline__ Offsets offsets_of(const GemmArgs& args, Index index) {
    Item item = item_of(args, index);
    Offsets offsets;
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

}  // namespace tilewave
