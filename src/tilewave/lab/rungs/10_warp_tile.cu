// Rung 10: a compact tile for each warp.
//
// Idea: a warp used to own 16 full-width rows of the block's tile. Now it owns 32 x 64 elements, 4 x 8
// patches of 8 x 8, so it needs 32 + 64 = 96 distinct values per step instead of 16 + 128 = 144. A patch
// still has two groups of rows and two of columns, now half a warp tile apart.
//
// What it should change: the distinct values, and nothing else. A value that several threads ask for was
// already served once, so the passes stay at three per read.
//
// What the article saw (GB10): about 50 million passes for either kernel at N = 2048, and no gain in run
// time.

constexpr int BM = 128, BN = 128, BK = 32;  // the block's tile of C, and the depth of a slice
constexpr int WM = 32, WN = 64;             // the warp's tile of C
constexpr int TM = 8, TN = 8;               // the thread's patch of C
constexpr int THREADS = 256;                // 4 x 2 warps of 4 x 8 patches

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

// The patch's rows (of BM) and columns (of BN): two groups of four, half a warp tile apart.
__device__ int patch_row(int wy, int ly, int i) { return wy * WM + i / 4 * (WM / 2) + ly * 4 + i % 4; }
__device__ int patch_col(int wx, int lx, int j) { return wx * WN + j / 4 * (WN / 2) + lx * 4 + j % 4; }

template <bool kVectors>
__global__ void __launch_bounds__(THREADS, 2)
sgemm_10_warp_tile(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ __align__(16) float As[BK][BM];
  __shared__ __align__(16) float Bs[BK][BN];
  const int tid = threadIdx.x;
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int warp = tid / 32, lane = tid % 32;
  const int wx = warp % (BN / WN), wy = warp / (BN / WN);  // the warp's place in the block
  const int lx = lane % (WN / TN), ly = lane / (WN / TN);  // the thread's place in the warp
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
      for (int j = 0; j < TN; ++j) b[j] = Bs[k][patch_col(wx, lx, j)];
      for (int i = 0; i < TM; ++i) a[i] = As[k][patch_row(wy, ly, i)];
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
    }
    __syncthreads();
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
