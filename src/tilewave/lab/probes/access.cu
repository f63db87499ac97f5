// Probes of single memory accesses: what does one warp-wide access of a given lane map cost?
//
// Each block is one warp. Block b repeats one access repeats[b] times: lane l accesses the byte offset
// offsets[32 b + l], if bit l of active[b] is set, and is predicated off otherwise (by a predicate on the access
// itself, not by a branch). So the profiler's counters of a launch are sums over the blocks of
// repeats[b] x (figure of map b): with repeats 1, 64, 64^2 the figures of three maps are the digits, base 64, of
// one counter. The tables themselves cost each block three loads of global memory (offsets 4 sectors, active and
// repeats 1 sector each; for copies also sources, 4 sectors) and one store (the sum of what was read, 4 sectors).

typedef unsigned int u32;

constexpr int kSharedBytes = 16384;

static __device__ __forceinline__ u32 shared_address(const void* pointer) {
    u32 address;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(pointer));
    return address;
}

// `step` is 0, which the compiler cannot know: the addresses of two rounds might differ, so none is saved.
#define PROBE(name, access)                                                                                     \
    extern "C" __global__ void __launch_bounds__(32)                                                            \
        probe_##name(const u32* offsets, const u32* sources, const u32* active, const u32* repeats, char* data, \
                     u32* sums, u32 step) {                                                                     \
        __shared__ __align__(128) char words[kSharedBytes];                                                     \
        const u32 lane = threadIdx.x, map = blockIdx.x;                                                         \
        const u32 on = active[map] >> lane & 1, rounds = repeats[map];                                          \
        u32 shared = shared_address(words) + offsets[32 * map + lane];                                          \
        char *global = data + offsets[32 * map + lane], *source = data + sources[32 * map + lane];              \
        u32 x = lane, y = x, z = x, w = x;                                                                      \
        _Pragma("unroll 1") for (u32 i = 0; i < rounds; ++i) {                                                  \
            access;                                                                                             \
            shared += step, global += step, source += step;                                                     \
        }                                                                                                       \
        sums[32 * map + lane] = x ^ y ^ z ^ w;                                                                  \
    }

// One access of each width: `at` is the register constraint of the address, "r" (shared) or "l" (global).
#define LOAD_1_WORD(space, at, address)                                                                         \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld." space ".u32 %0, [%1]; }"                        \
                 : "+r"(x) : at(address), "r"(on) : "memory")
#define LOAD_2_WORDS(space, at, address)                                                                        \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld." space ".v2.u32 {%0, %1}, [%2]; }"               \
                 : "+r"(x), "+r"(y) : at(address), "r"(on) : "memory")
#define LOAD_4_WORDS(space, at, address)                                                                        \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld." space ".v4.u32 {%0, %1, %2, %3}, [%4]; }"       \
                 : "+r"(x), "+r"(y), "+r"(z), "+r"(w) : at(address), "r"(on) : "memory")
#define STORE_1_WORD(space, at, address)                                                                        \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st." space ".u32 [%1], %0; }"                        \
                 : : "r"(x), at(address), "r"(on) : "memory")
#define STORE_2_WORDS(space, at, address)                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st." space ".v2.u32 [%2], {%0, %1}; }"               \
                 : : "r"(x), "r"(y), at(address), "r"(on) : "memory")
#define STORE_4_WORDS(space, at, address)                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st." space ".v4.u32 [%4], {%0, %1, %2, %3}; }"       \
                 : : "r"(x), "r"(y), "r"(z), "r"(w), at(address), "r"(on) : "memory")
// The copy is waited for, so that two of them never overlap.
#define COPY(kind, bytes)                                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async." kind ".shared.global [%0], [%1], " #bytes \
                 "; cp.async.commit_group; cp.async.wait_group 0; }"                                            \
                 : : "r"(shared), "l"(source), "r"(on) : "memory")
// All lanes take part; those that are not on read nothing and write zeros.
#define COPY_OR_ZERO(kind, bytes)                                                                               \
    asm volatile("{ .reg .u32 n; mul.lo.u32 n, %2, " #bytes "; cp.async." kind                                  \
                 ".shared.global [%0], [%1], " #bytes ", n; cp.async.commit_group; cp.async.wait_group 0; }"    \
                 : : "r"(shared), "l"(source), "r"(on) : "memory")

PROBE(shared_load_4, LOAD_1_WORD("shared", "r", shared))
PROBE(shared_load_8, LOAD_2_WORDS("shared", "r", shared))
PROBE(shared_load_16, LOAD_4_WORDS("shared", "r", shared))
PROBE(shared_store_4, STORE_1_WORD("shared", "r", shared))
PROBE(shared_store_8, STORE_2_WORDS("shared", "r", shared))
PROBE(shared_store_16, STORE_4_WORDS("shared", "r", shared))
PROBE(global_load_4, LOAD_1_WORD("global", "l", global))
PROBE(global_load_8, LOAD_2_WORDS("global", "l", global))
PROBE(global_load_16, LOAD_4_WORDS("global", "l", global))
PROBE(global_store_4, STORE_1_WORD("global", "l", global))
PROBE(global_store_8, STORE_2_WORDS("global", "l", global))
PROBE(global_store_16, STORE_4_WORDS("global", "l", global))
PROBE(copy_ca_4, COPY("ca", 4))
PROBE(copy_ca_8, COPY("ca", 8))
PROBE(copy_ca_16, COPY("ca", 16))
PROBE(copy_cg_16, COPY("cg", 16))
PROBE(copy_zfill_ca_4, COPY_OR_ZERO("ca", 4))
PROBE(copy_zfill_cg_16, COPY_OR_ZERO("cg", 16))
