// What `tilewave bench` does on the GPU beside the products: random data, and checks of results too large for
// the host.

typedef unsigned long long u64;

// Sebastiano Vigna's splitmix64: a counter in, 64 well mixed bits out.
__device__ __forceinline__ u64 mixed(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// N(0,1) by Box and Muller, two values a pair of uniform ones.
extern "C" __global__ void fill_normal(float* out, u64 count, u64 seed) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 pair = (u64)blockIdx.x * blockDim.x + threadIdx.x; 2 * pair < count; pair += step) {
    const u64 bits = mixed(mixed(seed) + pair);
    const float u = ((unsigned)(bits >> 40) + 1) * 0x1p-24f;  // (0, 1]: its logarithm is finite
    const float v = (unsigned)(bits & 0xffffff) * 0x1p-24f;
    const float radius = sqrtf(-2.0f * logf(u));
    float s, c;
    sincospif(2.0f * v, &s, &c);
    out[2 * pair] = radius * c;
    if (2 * pair + 1 < count) out[2 * pair + 1] = radius * s;
  }
}

// How many elements still hold the poison that they were filled with.
extern "C" __global__ void count_poison(const unsigned* data, u64 count, unsigned poison, u64* found) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  u64 mine = 0;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) mine += data[i] == poison;
  for (int lane = 16; lane > 0; lane /= 2) mine += __shfl_down_sync(0xffffffff, mine, lane);
  if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(found, mine);
}

// y[item][i] = sum over j of X[item][i][j] * v[j] in float64, and squares[item][i] = sum of X^2: a warp a row.
// Strides are in elements. Each item has a v of its own vector_stride elements on, 0 for one of all. Without v
// (null) it is a vector of random signs, drawn from the seed, the same for all items.
extern "C" __global__ void times_vector(const float* x, u64 rows, u64 columns, u64 row_stride,
                                        u64 column_stride, u64 item_stride, u64 items, const double* v,
                                        u64 vector_stride, u64 seed, double* y, double* squares) {
  const unsigned lane = threadIdx.x % 32;
  const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
  for (u64 task = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; task < rows * items; task += warps) {
    const u64 item = task / rows, row = task % rows;
    const float* line = x + item * item_stride + row * row_stride;
    double sum = 0, square = 0;
    for (u64 j = lane; j < columns; j += 32) {
      const double value = line[j * column_stride];
      const double weight = v ? v[item * vector_stride + j] : (mixed(mixed(seed) + j) & 1 ? 1.0 : -1.0);
      sum += value * weight;
      square += value * value;
    }
    for (int other = 16; other > 0; other /= 2) {
      sum += __shfl_down_sync(0xffffffff, sum, other);
      square += __shfl_down_sync(0xffffffff, square, other);
    }
    if (lane == 0) {
      y[task] = sum;
      squares[task] = square;
    }
  }
}

// The largest |c r - a (b r)| of a row in units of factor * |row of A| * |B of the item| (Euclid's norms, given
// squared). NaN counts as infinite. A shared B has one b_squares.
extern "C" __global__ void worst_row(const double* cr, const double* abr, const double* a_squares, u64 rows,
                                     u64 items, const double* b_squares, u64 b_items, double factor,
                                     double* worst) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  double mine = 0;
  for (u64 task = (u64)blockIdx.x * blockDim.x + threadIdx.x; task < rows * items; task += step) {
    const double b = b_squares[b_items == 1 ? 0 : task / rows];
    const double off = fabs(cr[task] - abr[task]);
    double ratio = off == 0 ? 0 : off / (factor * sqrt(a_squares[task] * b));
    if (!(ratio < 1e300)) ratio = 1e300;
    mine = fmax(mine, ratio);
  }
  for (int lane = 16; lane > 0; lane /= 2) mine = fmax(mine, __shfl_down_sync(0xffffffff, mine, lane));
  // Non-negative doubles are in the order of their bits.
  if (threadIdx.x % 32 == 0) atomicMax((u64*)worst, (u64)__double_as_longlong(mine));
}

// sums[item] = sum of the item's values: a warp an item.
extern "C" __global__ void sum_items(const double* values, u64 count, u64 items, double* sums) {
  const unsigned lane = threadIdx.x % 32;
  const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
  for (u64 item = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < items; item += warps) {
    double sum = 0;
    for (u64 j = lane; j < count; j += 32) sum += values[item * count + j];
    for (int other = 16; other > 0; other /= 2) sum += __shfl_down_sync(0xffffffff, sum, other);
    if (lane == 0) sums[item] = sum;
  }
}

// Every element of chosen rows of C against float64, a warp an element. Rows are counted over all items; without
// a list (null) they are the first `count`. totals[0] gets the largest |c - ref| in units of
// gamma * sum |a||b| + tiny, [1] the sum of (c - ref)^2, [2] the sum of (a b)^2 over all k: what ref^2 is expected
// to be for random data, without the luck of a sum that nearly vanishes. NaN counts as infinite.
extern "C" __global__ void compare_rows(const float* a, const float* b, const float* c, const u64* rows, u64 count,
                                        u64 m, u64 n, u64 k, u64 a_row, u64 a_column, u64 a_item, u64 b_row,
                                        u64 b_column, u64 b_item, double gamma, double tiny, double* totals) {
  const unsigned lane = threadIdx.x % 32;
  const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
  double worst = 0, errors = 0, references = 0;
  for (u64 task = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; task < count * n; task += warps) {
    const u64 row = rows ? rows[task / n] : task / n, column = task % n;
    const float* left = a + (row / m) * a_item + (row % m) * a_row;
    const float* right = b + (row / m) * b_item + column * b_column;
    double sum = 0, magnitude = 0, square = 0;
    for (u64 p = lane; p < k; p += 32) {
      const double product = (double)left[p * a_column] * (double)right[p * b_row];
      sum += product;
      magnitude += fabs(product);
      square += product * product;
    }
    for (int other = 16; other > 0; other /= 2) {
      sum += __shfl_down_sync(0xffffffff, sum, other);
      magnitude += __shfl_down_sync(0xffffffff, magnitude, other);
      square += __shfl_down_sync(0xffffffff, square, other);
    }
    if (lane == 0) {
      const double off = fabs((double)c[row * n + column] - sum);
      double ratio = off / (gamma * magnitude + tiny);
      if (!(ratio < 1e300)) ratio = 1e300;
      worst = fmax(worst, ratio);
      errors += off * off;
      references += square;
    }
  }
  if (lane == 0) {
    // Non-negative doubles are in the order of their bits.
    atomicMax((u64*)totals, (u64)__double_as_longlong(worst));
    atomicAdd(totals + 1, errors);
    atomicAdd(totals + 2, references);
  }
}

// Does nothing: what a launch itself takes.
extern "C" __global__ void nothing() {}
