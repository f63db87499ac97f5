// Copies between global and shared memory of runs without gaps, by 16 bytes wherever the run's address allows it.
//
// A run may begin at any element: in shared memory it begins as many elements past a multiple of 32 bytes, a sector of
// global memory, as in global memory. So everything but up to seven elements at either end moves by 16 bytes, and eight
// lanes, which are served together, share no sector with others. A region for a run of at most `count` elements begins
// on 32 bytes and holds flat_floats(count).
#pragma once

#include "copy.cuh"

namespace tilewave {

constexpr int SECTOR_FLOATS = 8;

constexpr __host__ __device__ int flat_floats(int count) {
    return (count + 2 * (SECTOR_FLOATS - 1)) / SECTOR_FLOATS * SECTOR_FLOATS;
}

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

// Starts copying a run into the region, which begins on 32 bytes; gives the place of its first element.
template <int THREADS>
__device__ __forceinline__ int start_run(float* region, const float* source, int count) {
    int first = misalignment(source);
    float* target = region + first;
    deal_run<THREADS>(
        first, count, [=](int i) { start_copy<16>(target + i, source + i); },
        [=](int i) { start_copy<4>(target + i, source + i); });
    return first;
}

}  // namespace tilewave
