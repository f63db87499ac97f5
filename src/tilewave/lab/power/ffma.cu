// Multiply-adds on registers alone: what the FP32 units can do when nothing else is in their way.
//
// Each thread turns PAIRS points of the plane, x += s y, then y -= s x: a rotation, so that the values neither
// grow nor settle and their bits keep changing, as those of a product of random matrices do. The pairs are
// independent of each other. One multiply-add reads two registers beside s, which never changes. `sink` is
// written only if the sum is one that it cannot be: the compiler must keep the work, and no memory is touched.
#define PAIRS 8
#define UNROLL 32

extern "C" __global__ void __launch_bounds__(256) ffma_loop(float* sink, float s, int loops) {
  float x[PAIRS], y[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    x[i] = 1.0f + 0.001f * (threadIdx.x + 37 * i);
    y[i] = 0.5f - 0.002f * (blockIdx.x % 64 + 11 * i);
  }
  for (int loop = 0; loop < loops; ++loop) {
#pragma unroll
    for (int step = 0; step < UNROLL; ++step) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) x[i] = fmaf(s, y[i], x[i]);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) y[i] = fmaf(-s, x[i], y[i]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) sum += x[i] + y[i];
  if (sum == 1.0e30f) *sink = sum;
}
