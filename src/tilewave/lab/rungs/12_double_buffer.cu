// Rung 12: double buffering through registers.
//
// Idea: start loading the next slice before multiplying the current one. The loads land in registers; after
// the multiplication the threads store them into a second shared-memory buffer, and the buffers swap roles.
//
// What it should change: one barrier per slice instead of two, and time for the loads to arrive. Shared
// memory per block doubles, back to 32 KB.
//
// What the article saw (GB10): about 2 % more throughput; the second resident block already hid most of the
// wait.

constexpr int BM = 128, BN = 128, BK = 16;  // the block's tile of C, and the depth of a slice
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
sgemm_12_double_buffer(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ __align__(16) float As[2][BK][BM];
  __shared__ __align__(16) float Bs[2][BK][BN];
  const int tid = threadIdx.x;
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int warp = tid / 32, lane = tid % 32;
  const int wx = warp % (BN / WN), wy = warp / (BN / WN);  // the warp's place in the block
  const int lx = lane % (WN / TN), ly = lane / (WN / TN);  // the thread's place in the warp
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;

  float4 next_a[BM * BK / 4 / THREADS], next_b[BK * BN / 4 / THREADS];  // a slice on its way to shared memory
  const auto load = [&](int k0) {
#pragma unroll
    for (int s = 0; s < BM * BK / 4 / THREADS; ++s) {
      const int i = s * THREADS + tid, r = i / (BK / 4), c = i % (BK / 4) * 4;
      next_a[s] = load4<kVectors>(A + (size_t)(row0 + r) * K, k0 + c, K, row0 + r < M);
    }
#pragma unroll
    for (int s = 0; s < BK * BN / 4 / THREADS; ++s) {
      const int i = s * THREADS + tid, r = i / (BN / 4), c = i % (BN / 4) * 4;
      next_b[s] = load4<kVectors>(B + (size_t)(k0 + r) * N, col0 + c, N, k0 + r < K);
    }
  };
  const auto store = [&](int buffer) {
#pragma unroll
    for (int s = 0; s < BM * BK / 4 / THREADS; ++s) {
      const int i = s * THREADS + tid, r = i / (BK / 4), c = i % (BK / 4) * 4;
      const float4 v = next_a[s];
      As[buffer][c][r] = v.x, As[buffer][c + 1][r] = v.y;
      As[buffer][c + 2][r] = v.z, As[buffer][c + 3][r] = v.w;
    }
#pragma unroll
    for (int s = 0; s < BK * BN / 4 / THREADS; ++s) {
      const int i = s * THREADS + tid, r = i / (BN / 4), c = i % (BN / 4) * 4;
      *(float4*)&Bs[buffer][r][c] = next_b[s];
    }
  };

  load(0);
  store(0);
  __syncthreads();

  float sum[TM][TN] = {};
  for (int k0 = 0, buffer = 0; k0 < K; k0 += BK, buffer ^= 1) {
    const bool more = k0 + BK < K;
    if (more) load(k0 + BK);

    // Multiply the slices: each step is the outer product of eight values of A and eight of B.
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int j = 0; j < TN; ++j) b[j] = Bs[buffer][k][patch_col(wx, lx, j)];
      for (int i = 0; i < TM; ++i) a[i] = As[buffer][k][patch_row(wy, ly, i)];
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
    }

    // The other buffer was last read before the previous barrier, so it may be overwritten now.
    if (more) store(buffer ^ 1);
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
