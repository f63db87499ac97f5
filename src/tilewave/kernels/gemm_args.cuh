// The one argument of every kernel of the product, and the small functions that all of them share.
//
// The host fills it in (tilewave/kernels/arguments.py, same fields in the same order; a test reads them back in a
// kernel). Strides are in elements and may have any sign, 0 included.
#pragma once

#include "stream_k.cuh"

namespace tilewave {

constexpr int BATCH_LEVELS = 3;

// A batch of matrices in memory; `data` is null where the operand is absent.
struct Matrix {
    float* data;
    Index row;                  // distance to the element below
    Index column;               // distance to the element on the right
    Index batch[BATCH_LEVELS];  // distances to the next item along each batch axis, outermost first
};

// Bits of GemmArgs::flags.
constexpr int OUT_VECTORS = 1;  // out has column stride 1 and every row of every item starts at 16 bytes
constexpr int C_VECTORS = 2;    // likewise c

struct GemmArgs {
    Matrix a;              // m x k
    Matrix b;              // k x n
    Matrix c;              // m x n, read where beta is not 0
    Matrix bias;           // m x n, a vector has stride 0 along the other axis
    Matrix out;            // m x n
    Matrix preactivation;  // m x n, also written where not null
    Index m, n, k;
    Index batch[BATCH_LEVELS];  // extents of the batch axes, outermost first, 1 where there is none
    Decomposition cut;
    Index tiles_m, tiles_n, band;  // of the raster, see place_of()
    float* partials;               // workspace: slots of partial sums, 16-byte aligned
    unsigned* tickets;             // workspace: counters, 0 before and after every launch
    Index a_step, b_step;          // bytes from one slice of a kernel's depth to the next, along K
    float alpha, beta;
    int activation;  // the value of problem.Activation
    int flags;
};

// Where the matrices of one item of the batch begin.
struct Item {
    const float* a;
    const float* b;
    const float* c;
    const float* bias;
    float* out;
    float* preactivation;
};

__device__ __forceinline__ Index batch_offset(const Matrix& matrix, Index outer, Index middle, Index inner) {
    return outer * matrix.batch[0] + middle * matrix.batch[1] + inner * matrix.batch[2];
}

__device__ __forceinline__ Item item_of(const GemmArgs& args, Index index) {
    Index outer = 0, middle = 0, inner = index;
    if (args.batch[0] * args.batch[1] != 1) {  // spares the divisions where there is one axis
        Index rest = quotient(index, args.batch[2]);
        inner = index - rest * args.batch[2];
        outer = quotient(rest, args.batch[1]);
        middle = rest - outer * args.batch[1];
    }
    Item item;
    item.a = args.a.data + batch_offset(args.a, outer, middle, inner);
    item.b = args.b.data + batch_offset(args.b, outer, middle, inner);
    item.c = args.c.data ? args.c.data + batch_offset(args.c, outer, middle, inner) : nullptr;
    item.bias = args.bias.data ? args.bias.data + batch_offset(args.bias, outer, middle, inner) : nullptr;
    item.out = args.out.data + batch_offset(args.out, outer, middle, inner);
    item.preactivation = args.preactivation.data
                             ? args.preactivation.data + batch_offset(args.preactivation, outer, middle, inner)
                             : nullptr;
    return item;
}

}  // namespace tilewave
