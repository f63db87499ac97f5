// Bringing a tile's part of an operand into shared memory, whatever its layout.
//
// A part is `lines` lines (rows of A, columns of B) of `depth` elements of some items. Where the lines begin on 16
// bytes and are whole vectors, they come as such, staggered over the banks where a line has more than one. A part that
// is one run of memory is copied as it is, by 16 bytes wherever it begins. Else neighbouring threads copy neighbours of
// whichever axis has them.
#pragma once

#include "division.cuh"
#include "flat.cuh"
#include "patch.cuh"

namespace tilewave {

// Floats from one line to the next where a line holds `depth` k: a multiple of 4 for reads by 16 bytes, staggered over
// the banks, so that eight lanes that read eight lines do not clash.
constexpr __host__ __device__ int line_pitch(int depth) { return depth == 4 ? 4 : depth + 4; }

// Floats that hold a part of that many lines in any form: a run may begin seven elements past a sector's begin.
constexpr __host__ __device__ int part_floats(int lines, int depth) {
    return lines * line_pitch(depth) + SECTOR_FLOATS;
}

// What fills the lines of A and of B up to a multiple of 4 k. The product is -0, which leaves any sum as it is, also in
// the sign of 0.
constexpr float A_FILLER = -0.0f, B_FILLER = 0.0f;

// Whether all items have the same matrix.
__device__ __forceinline__ bool shared_by_items(const GemmArgs& args, const Matrix& matrix) {
    bool shared = true;
    for (int level = 0; level < BATCH_LEVELS; ++level) shared &= args.batch[level] == 1 || matrix.batch[level] == 0;
    return shared;
}

// Whether every line of every item begins on 16 bytes and is whole vectors of 16 bytes. `length` is a line's, `line`
// and `along` are the distances of lines and along them.
__device__ __forceinline__ bool lines_of_vectors(const GemmArgs& args, const Matrix& matrix, int length, Index line,
                                                 Index along) {
    // The lowest bits of every distance that is taken.
    int odd = length | static_cast<int>(line) | misalignment(matrix.data);
    for (int level = 0; level < BATCH_LEVELS; ++level)
        odd |= args.batch[level] == 1 ? 0 : static_cast<int>(matrix.batch[level]);
    return along == 1 && (odd & 3) == 0;
}

// How a part of a matrix fills a run of memory: from one line to the next, and from one element of it to the next.
struct Run {
    bool found;  // false when there is a gap or an overlap
    int line, along;
};

// How lines of `length` elements of each of `items` items fill a run, line by line or across lines, item after item.
__device__ __forceinline__ Run run_of(const GemmArgs& args, const Matrix& matrix, int items, int lines, int length,
                                      Index line, Index along) {
    if (items > 1 && !(one_batch_axis(args) && matrix.batch[BATCH_LEVELS - 1] == lines * length)) return {};
    if ((length == 1 || along == 1) && (lines == 1 || line == length)) return {true, length, 1};
    if ((lines == 1 || line == 1) && (length == 1 || along == lines)) return {true, 1, lines};
    return {};
}

// Starts copying `lines` lines of `depth` elements of each of `items` items as lines of K: element (item, l, k) to
// target[(item * lines + l) * PITCH + k]. `address(item)` is where an item's first line begins; `vectors` says that
// lines_of_vectors() holds. At most 65,536 elements.
template <int THREADS, int PITCH, typename Address>
__device__ __forceinline__ void start_lines(float* target, bool vectors, int items, int lines, int depth, Index line,
                                            Index along, float filler, Address address) {
    if (vectors || along == 1 || line != 1) {
        // Neighbouring threads copy neighbours of a line.
        const int width = vectors ? 4 : 1, pieces = vectors ? depth / 4 : depth;
        const Divisor by_line(pieces), by_item(lines);
#pragma unroll 1
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
#pragma unroll 1
        for (int i = threadIdx.x; i < items * lines * depth; i += THREADS) {
            const int row = by_lines.quotient(i), l = i - row * lines;
            const int item = items == 1 ? 0 : by_item.quotient(row), k = row - item * depth;
            start_copy<4>(target + (item * lines + l) * PITCH + k, address(item) + l + k * along);
        }
    }
    const int last = (depth + 3) & ~3;
    if (depth < last)
#pragma unroll 1
        for (int row = threadIdx.x; row < items * lines; row += THREADS)
            for (int k = depth; k < last; ++k) target[row * PITCH + k] = filler;
}

// How a part lies in its shared memory: element (item, line, k) begin + item * item_step + line * line_step + k * step
// behind its first, where step or line_step is 1. A number and no pointer, of which the compiler would not see that it
// points to shared memory.
struct Part {
    int begin, item_step, line_step, step;
    bool vectors;  // along whichever axis has neighbours, four of them are a vector of 16 bytes

    __device__ __forceinline__ bool along_k() const { return step == 1; }
};

// Starts copying `items` x `lines` x `depth` elements to `target`, which has part_floats(). `address(item)` is where an
// item's first line begins. At most 65,536 elements.
template <int THREADS, int PITCH, typename Address>
__device__ __forceinline__ Part start_part(float* target, const GemmArgs& args, const Matrix& matrix, int items,
                                           int lines, int depth, Index line, Index along, float filler,
                                           Address address) {
    const bool vectors = lines_of_vectors(args, matrix, depth, line, along);
    const Run run = run_of(args, matrix, items, lines, depth, line, along);
    if (run.found && (!vectors || depth == PITCH)) {
        const float* const source = address(0);
        const int begin = misalignment(source), count = items * lines * depth;
        float* const data = target + begin;
        deal_run<THREADS>(
            begin, count, [=](int i) { start_copy<16>(data + i, source + i); },
            [=](int i) { start_copy<4>(data + i, source + i); });
        return {begin, lines * depth, run.line, run.along, ((begin | (run.along == 1 ? depth : lines)) & 3) == 0};
    }
    if (vectors || along == 1 || line != 1) {
        start_lines<THREADS, PITCH>(target, vectors, items, lines, depth, line, along, filler, address);
        return {0, lines * PITCH, PITCH, 1, true};
    }
    // Neighbouring threads copy the same k of neighbouring lines, which stay neighbours.
    const bool across = lines_of_vectors(args, matrix, lines, along, line);
    const int width = across ? 4 : 1, pieces = across ? lines / 4 : lines;
    const Divisor by_k(pieces), by_item(depth);
#pragma unroll 2
    for (int i = threadIdx.x; i < items * depth * pieces; i += THREADS) {
        const int row = by_k.quotient(i), l = (i - row * pieces) * width;
        const int item = items == 1 ? 0 : by_item.quotient(row);
        const float* source = address(item) + (row - item * depth) * along + l;
        if (across)
            start_copy<16>(target + row * lines + l, source);
        else
            start_copy<4>(target + row * lines + l, source);
    }
    return {0, lines * depth, 1, lines, (lines & 3) == 0};
}

}  // namespace tilewave
