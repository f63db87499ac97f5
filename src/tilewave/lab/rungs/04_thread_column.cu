// Rung 04: a column of eight sums for each thread.
//
// Idea: a thread that computes eight elements of one column of C reads an element of B once and uses it
// eight times, from a register. 512 threads compute a 64 x 64 tile of C, in slices of depth 8.
//
// What it should change: shared-memory reads per multiply-add fall to about a third (one of B and eight of
// A, which the compiler reads four steps at a time, for eight multiply-adds). A thread now has eight
// independent multiply-adds for each step, so that one need not wait for the one before.

constexpr int BM = 64, BN = 64, BK = 8;  // the block's tile of C, and the depth of a slice
constexpr int TM = 8;                    // rows of C for each thread
constexpr int THREADS = 512;             // 8 rows of 64 columns of sums

extern "C" __global__ void
sgemm_04_thread_column(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float As[BM][BK];
  __shared__ float Bs[BK][BN];
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int tid = ty * BN + tx;
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;

  float sum[TM] = {};
  for (int k0 = 0; k0 < K; k0 += BK) {
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

#pragma unroll
    for (int k = 0; k < BK; ++k) {
      const float b = Bs[k][tx];
      for (int i = 0; i < TM; ++i) sum[i] += As[ty * TM + i][k] * b;
    }
    __syncthreads();
  }

  const int col = col0 + tx;
  for (int i = 0; i < TM; ++i) {
    const int row = row0 + ty * TM + i;
    if (row < M && col < N) C[(size_t)row * N + col] = sum[i];
  }
}
