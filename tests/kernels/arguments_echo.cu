// Writes what kernels read of their argument block and what the epilogue makes of a sum: for the tests.
#include "kernels/epilogue.cuh"

using namespace tilewave;

__device__ int put(long long* to, const Matrix& matrix) {
    int count = 0;
    to[count++] = reinterpret_cast<long long>(matrix.data);
    to[count++] = matrix.row;
    to[count++] = matrix.column;
    for (int level = 0; level < BATCH_LEVELS; ++level) to[count++] = matrix.batch[level];
    return count;
}

// Every field in the order of its declaration, one thread. The scalars follow as their bits.
extern "C" __global__ void echo(const __grid_constant__ GemmArgs args, long long* to) {
    to += put(to, args.a);
    to += put(to, args.b);
    to += put(to, args.c);
    to += put(to, args.bias);
    to += put(to, args.out);
    to += put(to, args.preactivation);
    *to++ = args.m;
    *to++ = args.n;
    *to++ = args.k;
    for (int level = 0; level < BATCH_LEVELS; ++level) *to++ = args.batch[level];
    *to++ = args.cut.tiles;
    *to++ = args.cut.k;
    *to++ = args.cut.depth;
    *to++ = args.cut.whole_tiles;
    *to++ = args.cut.pieces;
    *to++ = args.cut.walkers;
    *to++ = args.tiles_m;
    *to++ = args.tiles_n;
    *to++ = args.band;
    *to++ = reinterpret_cast<long long>(args.partials);
    *to++ = reinterpret_cast<long long>(args.tickets);
    *to++ = args.a_step;
    *to++ = args.b_step;
    *to++ = __float_as_int(args.alpha);
    *to++ = __float_as_int(args.beta);
    *to++ = args.activation;
    *to++ = args.flags;
    *to++ = sizeof(GemmArgs);
}

// The addresses of items first, first + 1, ...: a thread each.
extern "C" __global__ void items(const __grid_constant__ GemmArgs args, long long first, long long* to) {
    Item item = item_of(args, first + threadIdx.x);
    to += 6 * threadIdx.x;
    to[0] = reinterpret_cast<long long>(item.a);
    to[1] = reinterpret_cast<long long>(item.b);
    to[2] = reinterpret_cast<long long>(item.c);
    to[3] = reinterpret_cast<long long>(item.bias);
    to[4] = reinterpret_cast<long long>(item.out);
    to[5] = reinterpret_cast<long long>(item.preactivation);
}

// Stores sums[row, column] of an m x n matrix, a thread a column of a block's row; `plain` is what is_plain() says.
extern "C" __global__ void store_all(const __grid_constant__ GemmArgs args, const float* sums, int* plain) {
    *plain = is_plain(args);
    if (threadIdx.x < args.n)
        store(args, item_of(args, 0), blockIdx.x, threadIdx.x, sums[blockIdx.x * args.n + threadIdx.x]);
}
