// Brings the table of a group (grouped.cuh) to a GPU by way of arguments: they are taken by value when the kernel is
// launched or captured into a graph, so that no memory of the host must live on, and nothing waits.
#pragma once

#include "gemm_args.cuh"

namespace tilewave {

template <int WORDS>
struct TablePart {
    Index* target;
    Index count;  // of words
    Index words[WORDS];
};

template <int WORDS, int THREADS>
__global__ void __launch_bounds__(THREADS) group_table(const __grid_constant__ TablePart<WORDS> part) {
    for (int i = threadIdx.x; i < part.count; i += THREADS) part.target[i] = part.words[i];
}

}  // namespace tilewave
