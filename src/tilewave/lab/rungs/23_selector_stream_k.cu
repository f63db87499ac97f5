// Rung 23: the selector with stream-K: as rung 22, and the large tile may also have its incomplete wave cut.
//
// Idea: three more candidates, rung 21 with two, three and four pieces, and in their estimate an allowance for
// combining. The least estimate runs. Whole tiles, split-K and stream-K are one kernel here: the first `whole_tiles`
// blocks do a tile each, and the other tiles are cut into `pieces`.
//
// What it should change: sizes with many tiles whose last wave is nearly empty, such as N = 2049.
//
// What the article saw (GB10): stream-K is 11 % faster than the 128x256 kernel at N = 2049, 4 % at N = 2048.

constexpr int BM = 128, BK = 16;  // the rows of the block's tile of C, and the depth of a slice
constexpr int STAGES = 2;         // slices in shared memory
constexpr int WM = 64, WN = 64;   // the warp's tile of C
constexpr int TM = 16, TN = 8;    // the thread's patch of C

// Start a copy of `bytes` (4 or 16) from global to shared memory; of zeros if `inside` is false.
template <int bytes>
__device__ void copy_async(float* to, const float* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned shared = (unsigned)__cvta_generic_to_shared(to);
  const int read = inside ? bytes : 0;
  if (bytes == 16)  // only 16-byte copies can go past the L1 cache, which would not be used again
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(shared), "l"(from), "r"(read) : "memory");
#else  // Turing has no cp.async: copy at once
  for (int i = 0; i < bytes / 4; ++i) to[i] = inside ? from[i] : 0.0f;
#endif
}

// End the group of copies started since the last call.
__device__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `pending` of this thread's youngest groups are still travelling.
template <int pending>
__device__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
#endif
}

// Copy four floats row[col] to row[col + 3] of a row of `cols` to four places in shared memory.
template <bool kVectors>
__device__ void copy4(float* to, const float* row, int col, int cols, bool row_inside) {
  if (kVectors)
    copy_async<16>(to, row + col, row_inside && col < cols);
  else
    for (int i = 0; i < 4; ++i) copy_async<4>(to + i, row + col + i, row_inside && col + i < cols);
}

// The patch's rows (of BM), as in rungs 15 and 17: four groups of four, or every fourth. Its columns (of BN): two
// groups of four, half a warp tile apart.
template <bool kLarge>
__device__ int patch_row(int wy, int ly, int i) {
  return wy * WM + (kLarge ? i / 4 * (WM / 4) + ly * 4 + i % 4 : i * (WM / TM) + ly);
}
__device__ int patch_col(int wx, int lx, int j) { return wx * WN + j / 4 * (WN / 2) + lx * 4 + j % 4; }

// kLarge: rung 15's 128 x 256 tile by 256 threads, A transposed; otherwise rung 17's 128 x 128 tile by 128 threads.
template <bool kLarge, bool kVectors>
__global__ void __launch_bounds__(kLarge ? 256 : 128, 1)
sgemm_23_selector_stream_k(const float* A, const float* B, float* C, int M, int N, int K,
    float* partials, unsigned* tickets, int whole_tiles, int pieces) {
  constexpr int BN = kLarge ? 256 : 128, THREADS = BN;  // as many threads as columns
  __shared__ __align__(16) float As[STAGES][kLarge ? BK : BM][kLarge ? BM : BK];
  __shared__ __align__(16) float Bs[STAGES][BK][BN];
  const int tid = threadIdx.x;
  const int warp = tid / 32, lane = tid % 32;
  const int wx = warp % (BN / WN), wy = warp / (BN / WN);  // the warp's place in the block
  const int lx = lane % (WN / TN), ly = lane / (WN / TN);  // the thread's place in the warp
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies

  // Its tile and piece: the first blocks do whole tiles; behind them come all first pieces of the other tiles, then
  // all second ones, and so on.
  const int columns = (N - 1) / BN + 1, tiles = ((M - 1) / BM + 1) * columns;
  int tile = blockIdx.x, piece = 0, cut = 0;
  if (tile < whole_tiles) {
    pieces = 1;
  } else {
    cut = (tile - whole_tiles) % (tiles - whole_tiles);
    piece = (tile - whole_tiles) / (tiles - whole_tiles);
    tile = whole_tiles + cut;
  }
  const int row0 = tile / columns * BM, col0 = tile % columns * BN;

  // Its slices: pieces are even, the longer ones first.
  const int slices = (K - 1) / BK + 1, base = slices / pieces, longer = slices % pieces;
  const int k_begin = (piece * base + min(piece, longer)) * BK;
  const int k_end = min(K, k_begin + (base + (piece < longer)) * BK);

  // Start the copies of the slices at k0 into a stage; beyond the edges and the piece's end, zeros.
  const auto copy = [&](int stage, int k0) {
    if constexpr (kLarge) {
#pragma unroll
      for (int i = tid; i < BM * BK; i += THREADS) {  // four neighbours copy four floats of a row, and so on
        const int r = i / 4 % BM, c = i / (4 * BM) * 4 + i % 4;
        copy_async<4>(&As[stage][c][r], A + (size_t)(row0 + r) * K + (k0 + c), row0 + r < M && k0 + c < k_end);
      }
    } else {
#pragma unroll
      for (int i = tid; i < BM * BK / 4; i += THREADS) {
        const int r = i / (BK / 4), c = i % (BK / 4) * 4;
        copy4<kVectors>(&As[stage][r][c], A + (size_t)(row0 + r) * K, k0 + c, k_end, row0 + r < M);
      }
    }
#pragma unroll
    for (int i = tid; i < BK * BN / 4; i += THREADS) {
      const int r = i / (BN / 4), c = i % (BN / 4) * 4;
      copy4<kVectors>(&Bs[stage][r][c], B + (size_t)(k0 + r) * N, col0 + c, N, k0 + r < k_end);
    }
    commit_copies();
  };

  for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage, k_begin + stage * BK);

  float sum[TM][TN] = {};
  for (int k0 = k_begin, stage = 0; k0 < k_end; k0 += BK, stage = (stage + 1) % STAGES) {
    // The slices of this stage have arrived, for all threads; and all are done with the stage before it.
    wait_copies<STAGES - 2>();
    __syncthreads();
    copy((stage + STAGES - 1) % STAGES, k0 + (STAGES - 1) * BK);

    // Multiply the slices: each step is the outer product of 16 values of A and eight of B.
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int j = 0; j < TN; ++j) b[j] = Bs[stage][k][patch_col(wx, lx, j)];
      for (int i = 0; i < TM; ++i) {
        const int r = patch_row<kLarge>(wy, ly, i);
        a[i] = kLarge ? As[stage][k][r] : As[stage][r][k];
      }
      for (int j = 0; j < TN; ++j)
        for (int i = 0; i < TM; ++i) sum[i][j] += a[i] * b[j];
    }
  }

  if (pieces > 1) {
    // Store this piece's sums in its slot, in the order of the threads: neighbours store neighbours.
    float* slots = partials + (size_t)cut * pieces * BM * BN + tid;
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) slots[(size_t)piece * BM * BN + (i * TN + j) * THREADS] = sum[i][j];
    __threadfence();  // the sums are visible before the ticket is taken
    wait_copies<0>();
    __syncthreads();  // now nothing reads or writes As any more: its first word tells all threads the outcome
    int* last = (int*)As;
    if (tid == 0) *last = atomicInc(tickets + cut, pieces - 1) == pieces - 1;  // wraps to 0 for the next launch
    __syncthreads();
    if (!*last) return;
    __threadfence();  // no sum is read before the ticket was taken
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) sum[i][j] = __ldcg(slots + (i * TN + j) * THREADS);
    for (int p = 1; p < pieces; ++p)
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += __ldcg(slots + (size_t)p * BM * BN + (i * TN + j) * THREADS);
  }

  for (int i = 0; i < TM; ++i) {
    const int row = row0 + patch_row<kLarge>(wy, ly, i);
    if (row < M)
      for (int j = 0; j < TN; ++j) {
        const int col = col0 + patch_col(wx, lx, j);
        if (col < N) C[(size_t)row * N + col] = sum[i][j];
      }
  }
}
