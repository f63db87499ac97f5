// What the kernels of precision "fp16x3" share: packed operands, their shifts, and the host's argument blocks
// (tilewave/kernels/fp16x3.py packs them, same fields in the same order).
//
// A *packed row* is a row of A or a column of B, scaled by a power of two, 2^shift, so that its largest magnitude lies
// in [2^14, 2^15), and split in two fp16 numbers: high = fp16(x), low = fp16(x - high). K is padded with zeros to a
// multiple of INTERVAL. In memory a packed row is a sequence of blocks of 128 bytes: 32 high halves, then the 32 low
// halves of the same k, so that one bulk copy with the 128-byte swizzle brings both.
#pragma once

#include "gemm_args.cuh"

namespace tilewave {

constexpr int BLOCK_K = 32;       // elements of K in a block of a packed row
constexpr int BLOCK_BYTES = 128;  // of a packed row
constexpr int INTERVAL = 64;      // of K, after which the tensor core's sum is added to a float32 sum
constexpr int FINE_INTERVAL = 16;  // the same where sums are fine
constexpr int FINE_RUN = 256;      // of K, at least, after which what these were added to is itself added to a sum

// A tensor map of the driver: 128 opaque bytes, aligned to 64.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// Where the packed operands of a product are, beside their tensor maps.
struct PackedOperands {
    const int* shifts_a;  // one per packed row, and so are guards
    const int* guards_a;
    const int* shifts_b;
    const int* guards_b;
    Index items_a[BATCH_LEVELS];  // packed items from one index of a batch axis to the next; 0 where A repeats
    Index items_b[BATCH_LEVELS];
    Index intervals;  // of K
};

// Whether the element of a row and a column with these guards is left to the float32 kernel: one of them holds
// elements that lost accuracy when they were split, and the two have too few large ones to outweigh them. The
// arithmetic of tilewave/precision/fp16x3.py; nothing overflows where k is below 2^24.
__device__ __forceinline__ bool must_recompute(int guard_a, int guard_b, int k) {
    return ((guard_a | guard_b) & 1) != 0 && (guard_a >> 1) + (guard_b >> 1) < k;
}

// The packed items that an item of the batch multiplies.
struct PackedItems {
    int a, b;
};

__device__ __forceinline__ PackedItems packed_items(const GemmArgs& args, const PackedOperands& packed, int index) {
    int inner_extent = static_cast<int>(args.batch[2]), middle_extent = static_cast<int>(args.batch[1]);
    int rest = index / inner_extent, inner = index - rest * inner_extent;
    int outer = rest / middle_extent, middle = rest - outer * middle_extent;
    PackedItems items;
    items.a = static_cast<int>(outer * packed.items_a[0] + middle * packed.items_a[1] + inner * packed.items_a[2]);
    items.b = static_cast<int>(outer * packed.items_b[0] + middle * packed.items_b[1] + inner * packed.items_b[2]);
    return items;
}

// Waits until the kernel before this one in the stream has finished, where the launch let this one start early; and
// lets the next one start early. Without the launch attribute both do nothing.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace tilewave
