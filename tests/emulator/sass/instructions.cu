// Kernels that make ptxas use the instructions around a matrix product: every result goes to its own word, so
// that the SASS interpreter and the PTX emulator can be compared bit for bit.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// 24 integer results per thread.
extern "C" __global__ void integers(const int *in, int *out, int count, int shift) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i >= count) return;
    const int *p = in + 8 * i;
    int *q = out + 24 * i;
    int a = p[0], b = p[1], c = p[2], d = p[3];
    u32 ua = a, ub = b;
    u64 wide = (u64)ua << 32 | ub, other = (u64)(u32)c << 32 | (u32)d;
    q[0] = __clz(a);
    q[1] = __popc(b);
    q[2] = (int)__brev(c);
    q[3] = (int)__byte_perm(a, b, 0x4321);
    q[4] = min(a, b) + max(ua, ub);
    q[5] = (a << shift) ^ (b >> shift) | (~c & d);
    q[6] = b ? a / b : 0;
    q[7] = b ? a % b : 0;
    q[8] = ub ? (int)(ua / ub) : 0;
    q[9] = a % 7 + (int)(ub / 10);
    q[10] = __mulhi(a, b);
    q[11] = (int)__umulhi(ua, ub);
    u64 product = wide * 3 + other;
    q[12] = (int)product;
    q[13] = (int)(product >> 32);
    u64 shifted = wide >> (shift & 63);
    q[14] = (int)shifted;
    q[15] = (int)(shifted >> 32);
    q[16] = (i64)wide < (i64)other ? 5 : (int)(wide >= other);
    q[17] = abs(a) + abs(b);
    q[18] = (int)__funnelshift_l(ua, ub, shift);
    q[19] = ((a < b && b < c) || c == d) ? a + b + c : a - b - c;
    q[20] = (int)(signed char)(c >> 3);
    u64 difference = wide - other;
    q[21] = (int)difference;
    q[22] = (int)(difference >> 32);
    q[23] = max(min(a + c, 1000000), -1000000);
}

// Division in 64 bits (a routine that is called) and by a parameter (which stays in the constant bank).
extern "C" __global__ void quotients(const i64 *in, i64 *out, int count, u32 divisor) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i >= count) return;
    i64 a = in[2 * i], b = in[2 * i + 1];
    if (b == 0) b = 3;
    i64 *q = out + 7 * i;
    q[0] = a / b;
    q[1] = a % b;
    q[2] = (i64)((u64)a / (u64)b);
    q[3] = (i64)((u64)a % (u64)b);
    q[4] = (u32)a / divisor;
    q[5] = (u32)b % divisor;
    q[6] = (int)a / (int)divisor - (int)b % (int)divisor;
}

// 16 results per thread.
extern "C" __global__ void floats(const float *in, float *out, int count, float alpha) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i >= count) return;
    float x = in[2 * i], y = in[2 * i + 1];
    float *q = out + 16 * i;
    q[0] = fmaxf(x, y) * alpha;
    q[1] = fminf(x, -y) + alpha * x;
    q[2] = x > y ? x : alpha;
    q[3] = fmaf(fabsf(x), y, -alpha);
    q[4] = fmaf(-x, y, 2.5f);
    q[5] = !(x < y) ? 1.f : x * 3.25f;
    q[6] = x - y;
    q[7] = x * y + alpha;
    q[8] = (float)(int)x;
    q[9] = (float)(u32)fabsf(y);
    q[10] = (float)__float2int_rn(y);
    q[11] = x == y ? 0.f : __int_as_float(__float_as_int(x) ^ 0x80000000);
    q[12] = x != y && x <= alpha ? -x : y;
    q[13] = (float)i * alpha + (float)(u32)(i * 7919);
    q[14] = fabsf(x + y);
    q[15] = floorf(x);
}

// Threads of one warp take different ways and different numbers of steps, and meet again.
extern "C" __global__ void diverging(const int *steps, float *out, int count) {
    __shared__ float tile[128];
    int i = threadIdx.x;
    float sum = 0;
    for (int k = 0; k < steps[i]; k++) {
        if (((i + k) & 3) == 0)
            sum += 1.5f * k;
        else if ((i & 7) == 1)
            sum -= out[count + i];
        else
            for (int j = 0; j < (i & 3); j++) sum = sum * 0.5f + j;
    }
    tile[i] = sum;
    __syncthreads();
    if (i < count) out[i] = tile[(i * 37) & 127] + tile[127 - i];
}

// An array with a run-time index lives in local memory.
extern "C" __global__ void __launch_bounds__(128) local_memory(const float *in, const int *index, float *out, int n) {
    float t[40];
    for (int i = 0; i < 40; i++) t[i] = in[40 * threadIdx.x + i];
    for (int i = 0; i < n; i++) t[index[i]] += t[index[i + 1]];
    for (int i = 0; i < 40; i++) out[40 * threadIdx.x + i] = t[i];
}

// Copies of 4, 8 and 16 bytes, some with fewer source bytes than they fill, two groups in flight.
extern "C" __global__ void __launch_bounds__(128) copies(const float *in, float *out, int n) {
    extern __shared__ float s[];
    int t = threadIdx.x;
    auto start = [&](int k) {
        float *stage = s + (k & 1) * 1024;
        int words = max(0, min(4, n * 4 - 3 - (k * 4)));
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(stage + t)),
                     "l"(in + k * 1024 + t), "r"(k < n - 1 ? 4 : 0) : "memory");
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(stage + 128 + 4 * t)),
                     "l"(in + k * 1024 + 128 + 4 * t), "r"(words * 4) : "memory");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(stage + 640 + 2 * t)),
                     "l"(in + k * 1024 + 640 + 2 * t) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    start(0);
    for (int k = 0; k < n; k++) {
        if (k + 1 < n) start(k + 1);
        else asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        float *stage = s + (k & 1) * 1024;
        for (int j = 0; j < 7; j++) out[k * 896 + j * 128 + t] = stage[(j * 128 + t) ^ 3];
        __syncthreads();
    }
}

// Votes and shuffles.
extern "C" __global__ void lanes(const float *in, float *out, int shift) {
    int t = threadIdx.x;
    float x = in[t];
    float *q = out + 6 * t;
    q[0] = __shfl_xor_sync(~0u, x, 4);
    q[1] = __shfl_sync(~0u, x, shift);
    q[2] = __shfl_down_sync(~0u, x, 3);
    q[3] = __shfl_up_sync(~0u, x, 5);
    q[4] = (float)__popc(__ballot_sync(~0u, x > 0));
    q[5] = __any_sync(~0u, x > 2.5f) ? 1.f : (__all_sync(~0u, x > -3.f) ? 2.f : 3.f);
}

// Narrow and wide accesses.
extern "C" __global__ void widths(const unsigned char *bytes, const short *halves, float *out) {
    __shared__ __align__(16) unsigned char s[1024];
    int t = threadIdx.x;
    s[t] = bytes[t];
    ((short *)(s + 128))[t] = halves[t];
    ((float2 *)(s + 512))[t & 63] = make_float2(t & 63, 1.f);
    __syncthreads();
    float4 v = *(float4 *)(s + 512 + 16 * (t & 31));
    out[2 * t] = (float)s[t ^ 1] + (float)((signed char *)s)[t ^ 2] * 0.5f + v.x + v.z;
    out[2 * t + 1] = (float)((short *)(s + 128))[t ^ 5] - (float)((unsigned short *)(s + 128))[t ^ 3] + v.y * v.w;
}
