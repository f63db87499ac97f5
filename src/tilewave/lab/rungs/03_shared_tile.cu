// Rung 03: share the inputs within the block.
//
// Idea: the 32 x 32 threads of a block need only 32 rows of A and 32 columns of B between them. Walk K in
// slices of 32: the block copies one 32 x 32 slice of A and one of B into shared memory, each thread one
// element of each, and every element is then read by 32 threads.
//
// What it should change: global sectors fall twentyfold (8 per warp and 32 steps of K, instead of 5 per
// step). The reads move to shared memory, where there are now more than one for every multiply-add.
//
// Elements beyond the edge of A or B are stored as zeros, so the multiply-adds need no test.

constexpr int TILE = 32;  // a block computes TILE x TILE elements of C, in slices of depth TILE

extern "C" __global__ void
sgemm_03_shared_tile(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float As[TILE][TILE];
  __shared__ float Bs[TILE][TILE];
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int row = blockIdx.y * TILE + ty;
  const int col = blockIdx.x * TILE + tx;

  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE) {
    As[ty][tx] = (row < M && k0 + tx < K) ? A[(size_t)row * K + (k0 + tx)] : 0.0f;
    Bs[ty][tx] = (k0 + ty < K && col < N) ? B[(size_t)(k0 + ty) * N + col] : 0.0f;
    __syncthreads();

#pragma unroll
    for (int k = 0; k < TILE; ++k) sum += As[ty][k] * Bs[k][tx];
    __syncthreads();
  }

  if (row < M && col < N) C[(size_t)row * N + col] = sum;
}
