// A product of FP32 matrices by FP16 tensor cores, as small as such a kernel can be and still have everything:
// a splitting pass, a producer warp with bulk tensor copies (A for both blocks of a cluster), two consumer
// warpgroups that promote every block of K, and bulk stores of the result. C = A B^T, all row-major.
typedef unsigned long long u64;
typedef unsigned u32;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

constexpr int BLOCK_K = 32;         // of A and B: 32 upper halves, then 32 lower ones, 128 bytes
constexpr int ROWS = 128;           // of a tile, 64 a consumer
constexpr int COLUMNS = 32;         // of a tile
constexpr int STAGES = 3;
constexpr int A_BYTES = ROWS * 128, B_BYTES = COLUMNS * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int C_BYTES = 64 * COLUMNS * 4;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 2 * C_BYTES + 16 * STAGES;

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ void init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ void wait(u32 barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 far;\nmapa.shared::cluster.u32 far, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [far];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ void load(u32 target, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

__device__ void load_for_both(u32 target, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}

__device__ u64 descriptor(u32 address) {  // K-major, 128-byte swizzle, eights of rows 1024 bytes apart
  return (u64)((address & 0x3ffff) >> 4) | (u64)64 << 32 | (u64)1 << 62;
}

__device__ void multiply(float (&d)[16], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(add));
}

// Row r of `packed` holds, for each 32 columns of x, their halves' bits: x = upper + lower.
extern "C" __global__ void split(const float* x, unsigned short* packed, int rows, int k, int blocks) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * blocks * BLOCK_K; i += gridDim.x * blockDim.x) {
    int row = i / (blocks * BLOCK_K), column = i % (blocks * BLOCK_K);
    float value = column < k ? x[row * k + column] : 0.0f, back;
    unsigned short upper, lower;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(upper) : "f"(value));
    asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(upper));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(lower) : "f"(value - back));
    unsigned short* target = packed + (row * blocks + column / BLOCK_K) * 2 * BLOCK_K + column % BLOCK_K;
    target[0] = upper;
    target[BLOCK_K] = lower;
  }
}

extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(384, 1)
    product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
            const __grid_constant__ TensorMap c, int row_tiles, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 base = shared_address(memory), out = base + STAGES * STAGE_BYTES;
  u32 full = out + 2 * C_BYTES, empty = full + 8 * STAGES, rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  int row = blockIdx.x / 2 % row_tiles, column = blockIdx.x / 2 / row_tiles * 2 + rank;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      init(full + 8 * s, 1);
      init(empty + 8 * s, 4);  // two consumers of each block
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  int group = threadIdx.x / 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int k = 0; k < blocks; ++k) {
        int s = k % STAGES;
        u32 stage = base + s * STAGE_BYTES;
        wait(empty + 8 * s, (k / STAGES + 1) & 1);
        expect(full + 8 * s, STAGE_BYTES);
        load_for_both(stage + rank * A_BYTES / 2, &a, k * 64, row * ROWS + rank * ROWS / 2, full + 8 * s);
        load(stage + A_BYTES, &b, k * 64, column * COLUMNS, full + 8 * s);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int consumer = group - 1, thread = threadIdx.x % 128;
    float sum[16], part[16];
    for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
    for (int k = 0; k < blocks; ++k) {
      int s = k % STAGES;
      wait(full + 8 * s, k / STAGES & 1);
      u64 left = descriptor(base + s * STAGE_BYTES + consumer * A_BYTES / 2);
      u64 right = descriptor(base + s * STAGE_BYTES + A_BYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      multiply(part, left + 4, right, 0);  // lower halves are 64 bytes on, the next 16 of K 32
      multiply(part, left + 6, right + 2, 1);
      multiply(part, left, right + 4, 1);
      multiply(part, left + 2, right + 6, 1);
      multiply(part, left, right, 1);
      multiply(part, left + 2, right + 2, 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread < 2) arrive_at(empty + 8 * s, thread);
      for (int i = 0; i < 16; ++i) sum[i] += part[i];
    }
    float* tile = (float*)(memory + STAGES * STAGE_BYTES + consumer * C_BYTES);
    for (int i = 0; i < 16; ++i) {
      int r = thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
      tile[r * COLUMNS + n] = sum[i];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
    if (thread == 0) {
      asm volatile(
          "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
          "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::"l"(&c),
          "r"(column * COLUMNS), "r"(row * ROWS + consumer * 64), "r"(shared_address(tile))
          : "memory");
    }
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
