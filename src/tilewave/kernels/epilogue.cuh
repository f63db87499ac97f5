// From a sum of products to what is stored: out = activation(alpha * sum + beta * c + bias).
//
// One definition for every kernel, so that a product's bits do not depend on which kernel computed its sum.
#pragma once

#include "gemm_args.cuh"

namespace tilewave {

enum Activation { NONE = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4 };

// Comparisons rather than a switch, which would become a jump through a table.
__device__ __forceinline__ float activate(int activation, float x) {
    if (activation <= RELU) return activation == RELU && x < 0.0f ? 0.0f : x;  // keeps NaN
    if (activation >= SILU) return x / (1.0f + expf(-x));
    if (activation == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
    return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * (x + 0.044715f * x * x * x)));
}

// Whether out = alpha * sum is all there is to do.
__device__ __forceinline__ bool is_plain(const GemmArgs& args) {
    return args.beta == 0.0f && args.bias.data == nullptr && args.preactivation.data == nullptr &&
           args.activation == NONE;
}

// What the epilogue reads of an element: loaded apart from their use, so that loads of several elements can overlap.
struct Addends {
    float c, bias;
};

// c is not read where beta is 0.
__device__ __forceinline__ Addends load_addends(const GemmArgs& args, const Item& item, Index row, Index column) {
    Addends addends = {0.0f, 0.0f};
    if (args.beta != 0.0f) addends.c = item.c[row * args.c.row + column * args.c.column];
    if (item.bias != nullptr) addends.bias = item.bias[row * args.bias.row + column * args.bias.column];
    return addends;
}

// What the activation is applied to.
__device__ __forceinline__ float before_activation(const GemmArgs& args, Addends addends, float sum) {
    float value = args.alpha * sum;
    if (args.beta != 0.0f) value = __fmaf_rn(args.beta, addends.c, value);
#ifdef TILEWAVE_SEPARATE_BIAS
    // Where the arguments lie in shared memory, the compiler makes of alpha * sum + bias one operation, which rounds once.
    if (args.bias.data != nullptr) value = __fadd_rn(value, addends.bias);
#else
    if (args.bias.data != nullptr) value += addends.bias;
#endif
    return value;
}

__device__ __forceinline__ void store_preactivation(const GemmArgs& args, const Item& item, Index row, Index column,
                                                    float value) {
    if (item.preactivation != nullptr)
        item.preactivation[row * args.preactivation.row + column * args.preactivation.column] = value;
}

// Finishes and stores the element at (row, column), which must be inside the matrix.
__device__ __forceinline__ void store(const GemmArgs& args, const Item& item, Index row, Index column, float sum) {
    float value = before_activation(args, load_addends(args, item, row, column), sum);
    store_preactivation(args, item, row, column, value);
    item.out[row * args.out.row + column * args.out.column] = activate(args.activation, value);
}

}  // namespace tilewave
