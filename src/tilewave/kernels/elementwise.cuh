// out = activation(alpha * 0 + beta * c + bias): what is left of a product when k or alpha is 0. A and B are never
// read.
//
// A block covers a BM x BN patch of ITEMS consecutive items of the batch. Its elements are numbered row by row, item
// after item, and dealt to the threads in that order, so that neighbouring threads have neighbouring elements also
// where rows or items are only a few elements long.
#pragma once

#include "division.cuh"
#include "epilogue.cuh"
#include "patch.cuh"

namespace tilewave {

template <int BM, int BN, int ITEMS, int THREADS>
__global__ void __launch_bounds__(THREADS) elementwise(const __grid_constant__ GemmArgs args) {
    static_assert(BM * BN * ITEMS <= 65536, "a Divisor divides no larger numbers");
    __shared__ Offsets table[ITEMS];
    Walk walk(args.cut, blockIdx.x);
    WorkItem work;
    while (walk.next(work)) {
        if (work.k_begin != 0) continue;  // k may be anything where alpha is 0: a tile is its first piece's
        Patch patch = patch_of<BM, BN, ITEMS>(args, work.tile);
        __syncthreads();  // the walker's last tile is done with the table
        for (int i = threadIdx.x; i < patch.items; i += THREADS) table[i] = offsets_of(args, patch.item + i);
        __syncthreads();
        int size = patch.rows * patch.columns;
        Divisor by_item(size), by_row(patch.columns);
        for (int element = threadIdx.x; element < patch.items * size; element += THREADS) {
            int item = by_item.quotient(element), within = element - item * size;
            int row = by_row.quotient(within), column = within - row * patch.columns;
            store(args, item_at(args, table[item]), patch.row + row, patch.column + column, 0.0f);
        }
    }
}

}  // namespace tilewave
