// Rung 06: the course kernel, two blocks on each SM.
//
// Idea: rung 05 needs 168 registers per thread, and an SM's 65,536 registers do not hold two blocks of 256
// such threads. __launch_bounds__(256, 2) caps the budget at 65,536 / (2 x 256) = 128 registers.
//
// What it should change: two resident blocks instead of one, so that one computes while the other waits.
// The price is that some values are spilled to local memory. No other counter moves.
//
// What the article saw (GB10): 72 bytes of spills per thread, and 19 % more throughput at N = 2048. The cap
// stays for all rungs up to 12.

constexpr int BM = 128, BN = 128, BK = 32;  // the block's tile of C, and the depth of a slice
constexpr int TM = 8, TN = 8;               // the thread's patch of C
constexpr int THREADS = 256;                // 16 x 16 patches

extern "C" __global__ void __launch_bounds__(THREADS, 2)
sgemm_06_two_blocks(const float* A, const float* B, float* C, int M, int N, int K) {
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
