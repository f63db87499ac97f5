// Prints the cases of occupancy_cases.json: random kernels, and what NVIDIA's own cuda_occupancy.h says of them.
// To make the table again, with the header of a CUDA toolkit:
//   g++ -I/usr/local/cuda/include tests/compiler/data/occupancy_oracle.cpp -o oracle
//   ./oracle > tests/compiler/data/occupancy_cases.json
#include <cuda_occupancy.h>

#include <cstdio>
#include <random>

struct Architecture { int major, minor, threads, shared_per_sm, shared_per_block, reserved; };

int main() {
    const Architecture architectures[] = {
        {7, 5, 1024, 65536, 65536, 0},      {8, 0, 2048, 167936, 166912, 1024},
        {8, 6, 1536, 102400, 101376, 1024}, {8, 9, 1536, 102400, 101376, 1024},
        {9, 0, 2048, 233472, 232448, 1024}, {10, 0, 2048, 233472, 232448, 1024},
        {12, 0, 1536, 102400, 101376, 1024}, {12, 1, 1536, 102400, 101376, 1024}};
    std::mt19937 random(20261130);
    const char* separator = "";
    std::printf("[");
    for (const Architecture& a : architectures) {
        cudaOccDeviceProp device;
        device.computeMajor = a.major;
        device.computeMinor = a.minor;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = a.threads;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 49152;
        device.sharedMemPerMultiprocessor = a.shared_per_sm;
        device.numSms = 1;
        device.sharedMemPerBlockOptin = a.shared_per_block;
        device.reservedSharedMemPerBlock = a.reserved;
        for (int i = 0; i < 100; ++i) {
            const int registers = 16 + random() % 240;
            const int threads = 1 + random() % 1024;
            const int fixed = random() % 2 ? random() % 49153 : random() % 2049;
            const int dynamic = random() % 2 ? random() % (a.shared_per_block - fixed + 2048) : 0;
            const int barriers = random() % 17;
            cudaOccFuncAttributes kernel;
            kernel.maxThreadsPerBlock = 1024;
            kernel.numRegs = registers;
            kernel.sharedSizeBytes = fixed;
            kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
            kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
            kernel.maxDynamicSharedSizeBytes = a.shared_per_block;
            kernel.numBlockBarriers = barriers;
            cudaOccDeviceState state;
            state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
            cudaOccResult result;
            if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, dynamic))
                return 1;
            std::printf("%s\n[\"%d.%d\", %d, %d, %d, %d, %d, %d]", separator, a.major, a.minor, registers, threads,
                        fixed, dynamic, barriers, result.activeBlocksPerMultiprocessor);
            separator = ",";
        }
    }
    std::printf("\n]\n");
}
