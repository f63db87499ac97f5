// Copies between global and shared memory, and runs of memory without gaps that move by 16 bytes wherever they begin.
//
// In shared memory a run begins as many elements past a multiple of 32 bytes, a sector of global memory, as in global
// memory. So everything but up to seven elements at either end moves by 16 bytes, and eight lanes, which are served
// together, share no sector with others.
#pragma once

#include "copy.cuh"

namespace tilewave {

constexpr int SECTOR_FLOATS = 8;

// Elements from a multiple of 32 bytes to an address.
__device__ __forceinline__ int misalignment(const void* address) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(address) >> 2) & (SECTOR_FLOATS - 1);
}

// Starts copying BYTES bytes.
template <int BYTES>
__device__ __forceinline__ void start_copy(float* target, const float* source) {
    copy_async<BYTES>(shared_address(target), reinterpret_cast<const char*>(source));
}

// Waits for all copies that this thread started; a barrier must follow before other threads read them.
__device__ __forceinline__ void finish_copies() {
    commit_copies();
    wait_for_copies<0>();
}

// A run of `count` elements that begins `first` elements past a multiple of 32 bytes, dealt to THREADS threads as
// `vectors(i)` for every i at which four elements start on 16 bytes and `single(i)` for up to seven at either end.
template <int THREADS, typename Vectors, typename Single>
__device__ __forceinline__ void deal_run(int first, int count, Vectors vectors, Single single) {
    int head = min((SECTOR_FLOATS - first) & (SECTOR_FLOATS - 1), count);
    int body = (count - head) / 4;
    for (int i = threadIdx.x; i < body; i += THREADS) vectors(head + 4 * i);
    int tail = head + 4 * body;
    if (threadIdx.x < head) single(threadIdx.x);
    if (threadIdx.x < count - tail) single(tail + threadIdx.x);
}

}  // namespace tilewave
