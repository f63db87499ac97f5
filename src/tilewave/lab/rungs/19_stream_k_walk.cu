// Rung 19: stream-K, first attempt. One block an SM; each walks one long run of slices, across tiles.
//
// Idea: lay the slices of all tiles of rung 15 end to end and give every SM an even share. There is no last wave any
// more: whatever the size, all SMs work until the end. Where a share ends within a tile, the tile's pieces are
// combined as in rung 18, and nobody waits.
//
// What it should change: nobody is idle. At N = 2048 on 48 SMs every SM multiplies 341 or 342 slices instead of 384.
// But the blocks stand at different depths of their tiles: they no longer read the same slices at the same time.
//
// What the article saw (GB10): the SMs lost each other's data in the L2 cache; +40 % time per tile.

constexpr int BM = 128, BN = 256, BK = 16;  // the block's tile of C, and the depth of a slice
constexpr int STAGES = 2;                   // slices in shared memory
constexpr int WM = 64, WN = 64;             // the warp's tile of C
constexpr int TM = 16, TN = 8;              // the thread's patch of C
constexpr int THREADS = 256;                // 2 x 4 warps of 4 x 8 patches

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

// The patch's rows (of BM) and columns (of BN): groups of four, a quarter and half a warp tile apart.
__device__ int patch_row(int wy, int ly, int i) { return wy * WM + i / 4 * (WM / 4) + ly * 4 + i % 4; }
__device__ int patch_col(int wx, int lx, int j) { return wx * WN + j / 4 * (WN / 2) + lx * 4 + j % 4; }

template <bool kVectors>
__global__ void __launch_bounds__(THREADS, 1)
sgemm_19_stream_k_walk(const float* A, const float* B, float* C, int M, int N, int K,
    float* partials, unsigned* tickets) {
  __shared__ __align__(16) float As[STAGES][BK][BM];
  __shared__ __align__(16) float Bs[STAGES][BK][BN];
  const int tid = threadIdx.x;
  const int warp = tid / 32, lane = tid % 32;
  const int wx = warp % (BN / WN), wy = warp / (BN / WN);  // the warp's place in the block
  const int lx = lane % (WN / TN), ly = lane / (WN / TN);  // the thread's place in the warp
  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies
  const int columns = (N - 1) / BN + 1, tiles = ((M - 1) / BM + 1) * columns;
  const int slices = (K - 1) / BK + 1;

  // Runs of slices are even, the longer ones first.
  const long long total = (long long)tiles * slices, base = total / gridDim.x, longer = total % gridDim.x;
  const auto run_begin = [&](long long block) { return block * base + min(block, longer); };
  const auto block_of = [&](long long position) {
    const long long in_longer = longer * (base + 1);
    return (int)(position < in_longer ? position / (base + 1) : longer + (position - in_longer) / base);
  };

  // Start the copies of the slices at k0 into a stage; beyond the edges and the piece's end, zeros.
  const auto copy = [&](int stage, int row0, int col0, int k0, int k_end) {
#pragma unroll
    for (int i = tid; i < BM * BK; i += THREADS) {  // four neighbours copy four floats of a row, and so on
      const int r = i / 4 % BM, c = i / (4 * BM) * 4 + i % 4;
      copy_async<4>(&As[stage][c][r], A + (size_t)(row0 + r) * K + (k0 + c), row0 + r < M && k0 + c < k_end);
    }
#pragma unroll
    for (int i = tid; i < BK * BN / 4; i += THREADS) {
      const int r = i / (BN / 4), c = i % (BN / 4) * 4;
      copy4<kVectors>(&Bs[stage][r][c], B + (size_t)(k0 + r) * N, col0 + c, N, k0 + r < k_end);
    }
    commit_copies();
  };

  const long long run_end = run_begin(blockIdx.x + 1);
  for (long long position = run_begin(blockIdx.x); position < run_end;) {
    const int tile = position / slices, row0 = tile / columns * BM, col0 = tile % columns * BN;
    const long long tile_begin = (long long)tile * slices;
    const int first = position - tile_begin, end = min(run_end - tile_begin, (long long)slices);
    const int k_begin = first * BK, k_end = min(K, end * BK);
    position = tile_begin + end;

    wait_copies<0>();
    __syncthreads();  // nothing reads or writes the slices of the tile before any more
    for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage, row0, col0, k_begin + stage * BK, k_end);

    float sum[TM][TN] = {};
    for (int k0 = k_begin, stage = 0; k0 < k_end; k0 += BK, stage = (stage + 1) % STAGES) {
      // The slices of this stage have arrived, for all threads; and all are done with the stage before it.
      wait_copies<STAGES - 2>();
      __syncthreads();
      copy((stage + STAGES - 1) % STAGES, row0, col0, k0 + (STAGES - 1) * BK, k_end);

      // Multiply the slices: each step is the outer product of 16 values of A and eight of B.
#pragma unroll
      for (int k = 0; k < BK; ++k) {
        float a[TM], b[TN];
        for (int j = 0; j < TN; ++j) b[j] = Bs[stage][k][patch_col(wx, lx, j)];
        for (int i = 0; i < TM; ++i) a[i] = As[stage][k][patch_row(wy, ly, i)];
        for (int j = 0; j < TN; ++j)
          for (int i = 0; i < TM; ++i) sum[i][j] += a[i] * b[j];
      }
    }

    // A tile's pieces belong to neighbouring blocks. The first piece is its block's last item, the others are their
    // blocks' first: two slots a block suffice, and the first block's number serves as the tile's ticket.
    if (first > 0 || end < slices) {
      // Store this piece's sums in its slot, in the order of the threads: neighbours store neighbours.
      const int owner = block_of(tile_begin), pieces = block_of(tile_begin + slices - 1) - owner + 1;
      const auto slot = [&](int piece) {
        return partials + (size_t)(2 * owner + (piece == 0 ? 1 : 2 * piece)) * BM * BN + tid;
      };
      float* own = slot(blockIdx.x - owner);
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) own[(i * TN + j) * THREADS] = sum[i][j];
      __threadfence();  // the sums are visible before the ticket is taken
      wait_copies<0>();
      __syncthreads();  // now nothing reads or writes As any more: its first word tells all threads the outcome
      int* last = (int*)As;
      if (tid == 0) *last = atomicInc(tickets + owner, pieces - 1) == pieces - 1;  // wraps to 0 for the next launch
      __syncthreads();
      if (!*last) continue;
      __threadfence();  // no sum is read before the ticket was taken
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] = __ldcg(slot(0) + (i * TN + j) * THREADS);
      for (int p = 1; p < pieces; ++p)
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
          for (int j = 0; j < TN; ++j) sum[i][j] += __ldcg(slot(p) + (i * TN + j) * THREADS);
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
}
