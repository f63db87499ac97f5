// Rung 07: four floats for each global load.
//
// Idea: a 16-byte load moves four floats with one instruction. The bytes stay the same; the instructions
// that bring them in are a quarter. Shared memory is written four floats at a time too.
//
// A 16-byte load needs an address that is a multiple of 16: all rows of A and B start on one when K and N
// are multiples of four (and A and B themselves do). Then the host picks kVectors = true, and four
// neighbours are inside the matrix all together or not at all. At other sizes kVectors = false loads them
// one by one.
//
// What it should change: global load instructions fall to a quarter. The shared-memory reads stay the same.
//
// What the article saw (GB10): together with the transpose of rung 08, 21 % more throughput at N = 2048,
// all of it from these wide loads.

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
sgemm_07_wide_loads(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ __align__(16) float As[BM][BK];
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
      *(float4*)&As[r][c] = load4<kVectors>(A + (size_t)(row0 + r) * K, k0 + c, K, row0 + r < M);
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
