// Rung 02: neighbouring threads, neighbouring columns.
//
// Idea: exchange the two thread indices. Now threadIdx.x runs along the COLUMNS of C, so a warp reads one
// element of A (the same for all its threads) and 32 consecutive elements of B, and writes 32 consecutive
// elements of C.
//
// What it should change: sectors per warp and step of K fall from 33 to 5 (one of A, four of B). The number
// of load instructions stays the same.

constexpr int TILE = 32;  // a block computes TILE x TILE elements of C

extern "C" __global__ void sgemm_02_coalesced(const float* A, const float* B, float* C, int M, int N, int K) {
  const int row = blockIdx.y * TILE + threadIdx.y;
  const int col = blockIdx.x * TILE + threadIdx.x;
  if (row >= M || col >= N) return;

  float sum = 0.0f;
  for (int k = 0; k < K; ++k) sum += A[(size_t)row * K + k] * B[(size_t)k * N + col];
  C[(size_t)row * N + col] = sum;
}
