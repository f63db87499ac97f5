// Rung 01: one thread for each element of C.
//
// Idea: the definition, written down. Each thread walks K and reads everything from global memory. The
// thread's fastest index (threadIdx.x) runs along the ROWS of C, so the 32 threads of a warp read 32
// different rows of A: 32 sectors for 128 useful bytes, of which one sector would hold eight floats.
//
// What it should show: about 33 sectors per warp and step of K (32 of A, one of B), and two loads for every
// multiply-add. This is the floor of the ladder; the article starts at rung 05.

constexpr int TILE = 32;  // a block computes TILE x TILE elements of C

extern "C" __global__ void sgemm_01_naive(const float* A, const float* B, float* C, int M, int N, int K) {
  const int row = blockIdx.y * TILE + threadIdx.x;
  const int col = blockIdx.x * TILE + threadIdx.y;
  if (row >= M || col >= N) return;

  float sum = 0.0f;
  for (int k = 0; k < K; ++k) sum += A[(size_t)row * K + k] * B[(size_t)k * N + col];
  C[(size_t)row * N + col] = sum;
}
