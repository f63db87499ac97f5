// Rung 14: asynchronous copies, four stages of depth 8.
//
// Idea: the same shared memory as four shallower stages: three groups of copies travel while one slice is
// multiplied, in case one does not hide the wait.
//
// What it should change: twice the barriers and waits for the same copies. With depth 8 two threads of a
// warp copy one row of A, so the transposed copies meet half as often in a bank.
//
// What the article saw (GB10): about 5 % slower than rung 13.

constexpr int BM = 128, BN = 128, BK = 8;   // the block's tile of C, and the depth of a slice
constexpr int STAGES = 4;                   // slices in shared memory
constexpr int WM = 32, WN = 64;             // the warp's tile of C
constexpr int TM = 8, TN = 8;               // the thread's patch of C
constexpr int THREADS = 256;                // 4 x 2 warps of 4 x 8 patches

// Start a copy of `bytes` (4 or 16) from global to shared memory; of zeros if `inside` is false.
template <int bytes>
__device__ void copy_async(float* to, const float* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned shared = (unsigned)__cvta_generic_to_shared(to);
  const int read = inside ? bytes : 0;
  if (bytes == 16)  // only 16-byte copies can go past the L1 cache, which would not be used again
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared), "l"(from), "r"(read) : "memory");
#else  // Turing has no cp.async: copy at once
  for (int i = 0; i < bytes / 4; ++i) to[i] = inside ? from[i] : 0.0f;
#endif
}

// End the group of copies started since the last call.
__device__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `pending` of this thread's youngest groups are still travelling.
template <int pending>
__device__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
#endif
}

// Copy four floats row[col] to row[col + 3] of a row of `cols` to four places in shared memory.
template <bool kVectors>
__device__ void copy4(float* to, const float* row, int col, int cols, bool row_inside) {
  if (kVectors)
    copy_async<16>(to, row + col, row_inside && col < cols);
  else
    for (int i = 0; i < 4; ++i) copy_async<4>(to + i, row + col + i, row_inside && col + i < cols);
}

// The patch's rows (of BM) and columns (of BN): two groups of four, half a warp tile apart.
__device__ int patch_row(int wy, int ly, int i) { return wy * WM + i / 4 * (WM / 2) + ly * 4 + i % 4; }
__device__ int patch_col(int wx, int lx, int j) { return wx * WN + j / 4 * (WN / 2) + lx * 4 + j % 4; }

template <bool kVectors>
__global__ void __launch_bounds__(THREADS, 2)
sgemm_14_four_stages(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ __align__(16) float As[STAGES][BK][BM];
  __shared__ __align__(16) float Bs[STAGES][BK][BN];
  const int tid = threadIdx.x;
  const int warp = tid / 32, lane = tid % 32;
  const int wx = warp % (BN / WN), wy = warp / (BN / WN);  // the warp's place in the block
  const int lx = lane % (WN / TN), ly = lane / (WN / TN);  // the thread's place in the warp
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;

  // Start the copies of the slices at k0 into a stage; beyond the edges, zeros.
  const auto copy = [&](int stage, int k0) {
#pragma unroll
    for (int i = tid; i < BM * BK; i += THREADS) {  // four neighbours copy four floats of a row, and so on
      const int r = i / 4 % BM, c = i / (4 * BM) * 4 + i % 4;
      copy_async<4>(&As[stage][c][r], A + (size_t)(row0 + r) * K + (k0 + c), row0 + r < M && k0 + c < K);
    }
#pragma unroll
    for (int i = tid; i < BK * BN / 4; i += THREADS) {
      const int r = i / (BN / 4), c = i % (BN / 4) * 4;
      copy4<kVectors>(&Bs[stage][r][c], B + (size_t)(k0 + r) * N, col0 + c, N, k0 + r < K);
    }
    commit_copies();
  };

  for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage, stage * BK);

  float sum[TM][TN] = {};
  for (int k0 = 0, stage = 0; k0 < K; k0 += BK, stage = (stage + 1) % STAGES) {
    // The slices of this stage have arrived, for all threads; and all are done with the stage before it.
    wait_copies<STAGES - 2>();
    __syncthreads();
    copy((stage + STAGES - 1) % STAGES, k0 + (STAGES - 1) * BK);

    // Multiply the slices: each step is the outer product of eight values of A and eight of B.
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int j = 0; j < TN; ++j) b[j] = Bs[stage][k][patch_col(wx, lx, j)];
      for (int i = 0; i < TM; ++i) a[i] = As[stage][k][patch_row(wy, ly, i)];
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
    }
  }

  for (int i = 0; i < TM; ++i) {
    const int row = row0 + patch_row(wy, ly, i);
    if (row < M)
      for (int j = 0; j < TN; ++j) {
        const int col = col0 + patch_col(wx, lx, j);
        if (col < N) C[(size_t)row * N + col] = sum[i][j];
      }
  }
}
