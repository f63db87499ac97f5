// Rung 08: A transposed in shared memory.
//
// Idea: the eight values of A that a thread needs in one step lie in a column of the slice, 32 floats
// apart. Stored transposed they are neighbours, and two 16-byte reads fetch them.
//
// What it should change: nothing, as it turns out. Without the transpose the compiler already combines the
// A values of four steps into 16-byte reads, so both kernels issue 128 wide reads per thread and slice. But
// now each thread stores four single floats of A, and the eight threads that copy one row of A meet in one
// bank: a store takes eight passes.
//
// What the article saw (GB10): no change: 16.8 million shared-memory reads at N = 2048 before and after. It
// kept the transpose because removing it from a later, larger kernel cost 2 to 4 %.

constexpr int BM = 128, BN = 128, BK = 32;  // the block's tile of C, and the depth of a slice
constexpr int TM = 8, TN = 8;               // the thread's patch of C
constexpr int THREADS = 256;                // 16 x 16 patches

// The four floats at row[col] to row[col + 3] of a row of `cols`; zeros outside the matrix.
template <bool kVectors>
__device__ float4 load4(const float* row, int col, int cols, bool row_inside) {
  if (kVectors)
    return (row_inside && col < cols) ? *(const float4*)(row + col) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return make_float4(row_inside && col < cols ? row[col] : 0.0f,
                     row_inside && col + 1 < cols ? row[col + 1] : 0.0f,
                     row_inside && col + 2 < cols ? row[col + 2] : 0.0f,
                     row_inside && col + 3 < cols ? row[col + 3] : 0.0f);
}

template <bool kVectors>
__global__ void __launch_bounds__(THREADS, 2)
sgemm_08_transposed_a(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ __align__(16) float As[BK][BM];
  __shared__ __align__(16) float Bs[BK][BN];
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int tid = ty * (BN / TN) + tx;
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;

  float sum[TM][TN] = {};
  for (int k0 = 0; k0 < K; k0 += BK) {
    // Copy a slice of A and one of B into shared memory; beyond the edges, zeros.
#pragma unroll
    for (int i = tid; i < BM * BK / 4; i += THREADS) {
      const int r = i / (BK / 4), c = i % (BK / 4) * 4;
      const float4 v = load4<kVectors>(A + (size_t)(row0 + r) * K, k0 + c, K, row0 + r < M);
      As[c][r] = v.x, As[c + 1][r] = v.y, As[c + 2][r] = v.z, As[c + 3][r] = v.w;
    }
#pragma unroll
    for (int i = tid; i < BK * BN / 4; i += THREADS) {
      const int r = i / (BN / 4), c = i % (BN / 4) * 4;
      *(float4*)&Bs[r][c] = load4<kVectors>(B + (size_t)(k0 + r) * N, col0 + c, N, k0 + r < K);
    }
    __syncthreads();

    // Multiply the slices: each step is the outer product of eight values of A and eight of B.
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int j = 0; j < TN; ++j) b[j] = Bs[k][tx * TN + j];
      for (int i = 0; i < TM; ++i) a[i] = As[k][ty * TM + i];
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
