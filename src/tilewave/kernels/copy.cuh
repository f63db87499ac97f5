// Asynchronous copies from global to shared memory. On sm_75, which has none, they are copies made at once.
#pragma once

namespace tilewave {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

#if __CUDA_ARCH__ < 800
template <int BYTES>
__device__ __forceinline__ void copy_at_once(unsigned target, const char* source, bool inside) {
    if constexpr (BYTES == 16) {
        float4 v = inside ? *reinterpret_cast<const float4*>(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                     : "memory");
    } else {
        float v = inside ? *reinterpret_cast<const float*>(source) : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"(v) : "memory");
    }
}
#endif

// Starts copying BYTES (4 or 16), aligned to as much on both sides. Copies of 16 bytes pass the L1 cache by. With
// WHOLE_LINES, L2 is asked to fetch the line of 128 bytes.
template <int BYTES, bool WHOLE_LINES = false>
__device__ __forceinline__ void copy_async(unsigned target, const char* source) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
    else if constexpr (WHOLE_LINES)
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(BYTES)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(BYTES) : "memory");
#else
    copy_at_once<BYTES>(target, source, true);
#endif
}

// Likewise, but writes zeros and reads nothing where `inside` is false.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned target, const char* source, bool inside) {
#if __CUDA_ARCH__ >= 800
    int read = inside ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(read) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(BYTES), "r"(read)
                     : "memory");
#else
    copy_at_once<BYTES>(target, source, inside);
#endif
}

// Ends the group of copies that this thread started since the last call.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's youngest groups are still travelling. A barrier must follow before
// other threads read what was copied.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

}  // namespace tilewave
