// The instructions of sm_90a that the main kernel of "fp16x3" is made of: barriers in shared memory, bulk tensor copies,
// warpgroup matrix products. Written as PTX, so that no toolkit header is needed.
#pragma once

#include "copy.cuh"
#include "fp16x3_args.cuh"

namespace tilewave {

constexpr int GROUP_THREADS = 128;  // of a warpgroup

// Waits for the other threads of a warpgroup, which come to the same one of the block's barriers, 1 to 15.
__device__ __forceinline__ void group_barrier(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(GROUP_THREADS) : "memory");
}

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only when `bytes` more bytes were copied.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives at the barrier in the same place of another block of the cluster. Without a scope of its own, which would
// make a fence of each arrival.
__device__ __forceinline__ void barrier_arrive_in_block(unsigned barrier, int block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}

// Copies the box of a map that begins at element (x, y) to shared memory, and tells `barrier`. What lies outside the
// tensor arrives as zeros.
__device__ __forceinline__ void copy_box(unsigned target, const TensorMap* map, int x, int y, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// The same into the same place of all blocks of the cluster that `blocks` has a bit for, telling each one's barrier.
__device__ __forceinline__ void copy_box_to_blocks(unsigned target, const TensorMap* map, int x, int y,
                                                   unsigned barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}

// The descriptor of a matrix in shared memory whose rows of 128 bytes lie K-major with the 128-byte swizzle: groups of
// 8 rows, 1024 bytes apart. This is its low word, in which adding n moves by 16 n bytes; the high word is always the
// same.
constexpr unsigned DESCRIPTOR_HIGH = 64u | 1u << 30;

__device__ __forceinline__ unsigned descriptor_of(unsigned address) { return (address & 0x3ffff) >> 4 | 1u << 16; }

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// sum = a b (+ sum where `accumulate`): 64 rows of A by 128 columns of B by 16 of K, fp16 in shared memory.
__device__ __forceinline__ void multiply(float (&sum)[64], unsigned a, unsigned b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %66, 0;\n"
        "mov.b64 a, {%64, %67};\n"
        "mov.b64 b, {%65, %67};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, 0, 0;\n"
        "}"
        :
          "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]),
          "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
          "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31]),
          "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]), "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]),
          "+f"(sum[40]), "+f"(sum[41]), "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47]),
          "+f"(sum[48]), "+f"(sum[49]), "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]), "+f"(sum[54]), "+f"(sum[55]),
          "+f"(sum[56]), "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]), "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63])
        : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "r"(DESCRIPTOR_HIGH));
}

}  // namespace tilewave
