// Bringing a tile's part of an operand into shared memory, whatever its layout.
#pragma once

#include "division.cuh"
#include "flat.cuh"
#include "patch.cuh"

namespace tilewave {

// Where an operand's part of the tile lies in shared memory: distances in elements.
struct Staged {
    int first, item, row, column;
};

// Distance from one item to the next, when it is the same for all of the batch.
__device__ __forceinline__ bool one_batch_axis(const GemmArgs& args) { return args.batch[0] * args.batch[1] == 1; }

__device__ __forceinline__ bool shared_by_items(const GemmArgs& args, const Matrix& matrix) {
    bool shared = true;
    for (int level = 0; level < BATCH_LEVELS; ++level) shared &= args.batch[level] == 1 || matrix.batch[level] == 0;
    return shared;
}

// The order in which a rows x columns part of each of `items` items fills a run of memory: one distance is 1, the
// other the length of a row or column. False when there is a gap or an overlap.
__device__ __forceinline__ bool fills_run(const GemmArgs& args, const Matrix& matrix, int rows, int columns, int items,
                                          Staged& staged) {
    int size = rows * columns;
    if (items > 1 && !(one_batch_axis(args) && matrix.batch[BATCH_LEVELS - 1] == size)) return false;
    staged.item = size;
    staged.row = columns;
    staged.column = 1;
    if ((columns == 1 || matrix.column == 1) && (rows == 1 || matrix.row == columns)) return true;
    staged.row = 1;
    staged.column = rows;
    return (rows == 1 || matrix.row == 1) && (columns == 1 || matrix.column == rows);
}

// Starts bringing a part of an operand into the region; `address(i)` is where that of item i begins.
template <int THREADS, typename Address>
__device__ __forceinline__ Staged start_part(float* region, const GemmArgs& args, const Matrix& matrix, int rows,
                                             int columns, int items, Address address) {
    bool shared = shared_by_items(args, matrix);
    if (shared) items = 1;
    Staged staged;
    if (fills_run(args, matrix, rows, columns, items, staged)) {
        staged.first = start_run<THREADS>(region, address(0), items * rows * columns);
    } else {
        // Neighbouring threads read neighbouring elements, along whichever axis has them.
        bool by_column = matrix.row == 1 && matrix.column != 1;
        int length = by_column ? rows : columns, size = rows * columns;
        staged.first = 0;
        staged.row = by_column ? 1 : columns;
        staged.column = by_column ? rows : 1;
        Divisor by_item(size), by_line(length);
        for (int element = threadIdx.x; element < items * size; element += THREADS) {
            int item = by_item.quotient(element), within = element - item * size;
            int line = by_line.quotient(within), along = within - line * length;
            Index row = by_column ? along : line, column = by_column ? line : along;
            start_copy<4>(region + element, address(item) + row * matrix.row + column * matrix.column);
        }
    }
    staged.item = shared ? 0 : rows * columns;
    return staged;
}

}  // namespace tilewave
