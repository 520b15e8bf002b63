// The first thing to compile and run on a new machine: one kernel whose result is known, apart from everything else.
// Prints one line about the device; exit code 1 and the reason when something is wrong.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

__global__ void triple_plus_one(const int* in, int* out, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) out[i] = 3 * in[i] + 1;
}

#define CHECK(call)                                                    \
    do {                                                               \
        const cudaError_t error = (call);                              \
        if (error != cudaSuccess) {                                    \
            std::printf("%s: %s\n", #call, cudaGetErrorString(error)); \
            return 1;                                                  \
        }                                                              \
    } while (false)

int main() {
    constexpr int kCount = 1 << 20;
    constexpr int kThreads = 256;
    cudaDeviceProp device;
    int driver = 0;
    int runtime = 0;
    CHECK(cudaGetDeviceProperties(&device, 0));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));

    std::vector<int> in(kCount);
    std::vector<int> out(kCount, -1);
    for (int i = 0; i < kCount; ++i) in[i] = i;
    int* device_in = nullptr;
    int* device_out = nullptr;
    CHECK(cudaMalloc(&device_in, kCount * sizeof(int)));
    CHECK(cudaMalloc(&device_out, kCount * sizeof(int)));
    CHECK(cudaMemcpy(device_in, in.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
    triple_plus_one<<<kCount / kThreads, kThreads>>>(device_in, device_out, kCount);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(out.data(), device_out, kCount * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < kCount; ++i) {
        if (out[i] != 3 * i + 1) {
            std::printf("element %d is %d, expected %d\n", i, out[i], 3 * i + 1);
            return 1;
        }
    }
    std::printf("%s, compute capability %d.%d, %zu MiB, driver for CUDA %d.%d, runtime %d.%d\n", device.name,
                device.major, device.minor, device.totalGlobalMem >> 20, driver / 1000, driver % 1000 / 10,
                runtime / 1000, runtime % 1000 / 10);
    return 0;
}
