// Bringing a tile's part of an operand into shared memory as lines of K, whatever its layout.
#pragma once

#include "division.cuh"
#include "flat.cuh"
#include "patch.cuh"

namespace tilewave {

// Floats from one line to the next where a line holds `depth` k: a multiple of 4 for reads by 16 bytes, staggered over
// the banks, so that eight lanes that read eight lines do not clash.
constexpr __host__ __device__ int line_pitch(int depth) { return depth == 4 ? 4 : depth + 4; }

// What fills the lines of A and of B up to a multiple of 4 k. The product is -0, which leaves any sum as it is, also in
// the sign of 0.
constexpr float A_FILLER = -0.0f, B_FILLER = 0.0f;

__device__ __forceinline__ bool one_batch_axis(const GemmArgs& args) { return args.batch[0] * args.batch[1] == 1; }

// Whether all items have the same matrix.
__device__ __forceinline__ bool shared_by_items(const GemmArgs& args, const Matrix& matrix) {
    bool shared = true;
    for (int level = 0; level < BATCH_LEVELS; ++level) shared &= args.batch[level] == 1 || matrix.batch[level] == 0;
    return shared;
}

// Whether every line of every item begins on 16 bytes and is whole vectors of 16 bytes. `line` and `along` are the
// distances of lines and along them.
__device__ __forceinline__ bool lines_of_vectors(const GemmArgs& args, const Matrix& matrix, int depth, Index line,
                                                 Index along) {
    Index odd = depth | line | (misalignment(matrix.data) & 3);
    for (int level = 0; level < BATCH_LEVELS; ++level) odd |= args.batch[level] == 1 ? 0 : matrix.batch[level];
    return along == 1 && (odd & 3) == 0;
}

// Starts copying `lines` lines of `depth` elements of each of `items` items: element (item, l, k) to
// target[(item * lines + l) * PITCH + k]. `address(item)` is where an item's first line begins. At most 65,536
// elements.
template <int THREADS, int PITCH, typename Address>
__device__ __forceinline__ void start_lines(float* target, bool vectors, int items, int lines, int depth, Index line,
                                            Index along, float filler, Address address) {
    if (vectors || along == 1 || line != 1) {
        // Neighbouring threads copy neighbours of a line.
        const int width = vectors ? 4 : 1, pieces = depth / width;
        const Divisor by_line(pieces), by_item(lines);
        for (int i = threadIdx.x; i < items * lines * pieces; i += THREADS) {
            const int row = by_line.quotient(i), k = (i - row * pieces) * width;
            const int item = items == 1 ? 0 : by_item.quotient(row);
            const float* source = address(item) + (row - item * lines) * line;
            if (vectors)
                start_copy<16>(target + row * PITCH + k, source + k);
            else
                start_copy<4>(target + row * PITCH + k, source + k * along);
        }
    } else {
        // Neighbouring threads copy the same k of neighbouring lines.
        const Divisor by_lines(lines), by_item(depth);
        for (int i = threadIdx.x; i < items * lines * depth; i += THREADS) {
            const int row = by_lines.quotient(i), l = i - row * lines;
            const int item = items == 1 ? 0 : by_item.quotient(row), k = row - item * depth;
            start_copy<4>(target + (item * lines + l) * PITCH + k, address(item) + l + k * along);
        }
    }
    const int last = (depth + 3) & ~3;
    if (depth < last)
        for (int row = threadIdx.x; row < items * lines; row += THREADS)
            for (int k = depth; k < last; ++k) target[row * PITCH + k] = filler;
}

}  // namespace tilewave
