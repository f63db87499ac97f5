// Rung 05: the course kernel, where the article starts.
//
// Idea: an 8 x 8 patch of sums for each thread, in registers. 16 values read from shared memory feed 64
// multiply-adds. 256 threads compute a 128 x 128 tile of C in slices of depth 32; global loads take one
// float at a time, and A lies in shared memory as it does in global memory (rows of 32).
//
// What it should change: shared-memory reads per multiply-add fall to a sixth of rung 04's: per step two
// 16-byte reads of B and, because the compiler combines the A values of four steps, two of A: 128 for each
// thread and slice. A warp covers 16 full-width rows of the tile, hence 16 + 128 = 144 distinct values per
// step. Its reads of B meet each bank twice, so that a read takes five passes on average.
//
// What the article saw (GB10): 168 registers per thread, so that one block fits on an SM, not two; about 60
// % of cuBLAS.

constexpr int BM = 128, BN = 128, BK = 32;  // the block's tile of C, and the depth of a slice
constexpr int TM = 8, TN = 8;               // the thread's patch of C
constexpr int THREADS = 256;                // 16 x 16 patches

extern "C" __global__ void
sgemm_05_course(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float As[BM][BK];
  __shared__ float Bs[BK][BN];
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int tid = ty * (BN / TN) + tx;
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;

  float sum[TM][TN] = {};
  for (int k0 = 0; k0 < K; k0 += BK) {
    // Copy a slice of A and one of B into shared memory; beyond the edges, zeros.
#pragma unroll
    for (int i = tid; i < BM * BK; i += THREADS) {
      const int r = i / BK, c = i % BK;
      As[r][c] = (row0 + r < M && k0 + c < K) ? A[(size_t)(row0 + r) * K + (k0 + c)] : 0.0f;
    }
#pragma unroll
    for (int i = tid; i < BK * BN; i += THREADS) {
      const int r = i / BN, c = i % BN;
      Bs[r][c] = (k0 + r < K && col0 + c < N) ? B[(size_t)(k0 + r) * N + (col0 + c)] : 0.0f;
    }
    __syncthreads();

    // Multiply the slices: each step is the outer product of eight values of A and eight of B.
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int j = 0; j < TN; ++j) b[j] = Bs[k][tx * TN + j];
      for (int i = 0; i < TM; ++i) a[i] = As[ty * TM + i][k];
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
    }
    __syncthreads();
  }

  for (int i = 0; i < TM; ++i) {
    const int row = row0 + ty * TM + i;
    if (row < M)
      for (int j = 0; j < TN; ++j) {
        const int col = col0 + tx * TN + j;
        if (col < N) C[(size_t)row * N + col] = sum[i][j];
      }
  }
}
