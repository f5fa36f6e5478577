// As much of CUDA's runtime as the kernel uses, on threads of the CPU: a thread for each lane, the blocks one after the
// other. An access that a GPU would refuse, at no multiple of its width, ends the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __noinline__
#define __launch_bounds__(...)
// One block runs at a time, so that its threads alone share what is static.
#define __shared__ static

using std::max;
using std::min;

struct dim3 {
    unsigned x = 1;
    dim3(unsigned x) : x(x) {}
};

inline thread_local dim3 threadIdx{0}, blockIdx{0}, gridDim{0};

struct Warp {
    std::barrier<> barrier{32};
    std::atomic<unsigned> ballot{0};
};
inline thread_local Warp* the_warp = nullptr;

inline void __syncwarp() { the_warp->barrier.arrive_and_wait(); }

inline unsigned __ballot_sync(unsigned, bool vote) {
    the_warp->ballot.fetch_or(unsigned{vote} << (threadIdx.x % 32));
    __syncwarp();
    const unsigned result = the_warp->ballot;
    __syncwarp();
    the_warp->ballot = 0;
    __syncwarp();
    return result;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline void check_address(const void* address, size_t width) {
    if (reinterpret_cast<uintptr_t>(address) % width) {
        std::fprintf(stderr, "%p is no multiple of %zu bytes\n", address, width);
        std::abort();
    }
}

template <typename Word>
Word __ldcs(const Word* address) {
    check_address(address, sizeof(Word));
    return *address;
}

template <typename Word>
void __stcs(Word* address, Word word) {
    check_address(address, sizeof(Word));
    *address = word;
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return error ? "invalid device ordinal" : "no error"; }

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    return *blocks = 1, cudaSuccess;
}

template <typename Argument>
const Argument& argument_of(void* pointer) {
    return *static_cast<Argument*>(pointer);
}

template <typename... Arguments, size_t... kNumbers>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<kNumbers...>) {
    kernel(argument_of<Arguments>(arguments[kNumbers])...);
}

template <typename... Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments...), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
    for (unsigned number = 0; number < grid.x; ++number) {
        std::vector<std::unique_ptr<Warp>> warps(block.x / 32);
        std::vector<std::thread> threads;
        for (unsigned thread = 0; thread < block.x; ++thread) {
            if (thread % 32 == 0) {
                warps[thread / 32] = std::make_unique<Warp>();
            }
            threads.emplace_back([=, warp = warps[thread / 32].get()] {
                threadIdx = thread, blockIdx = number, gridDim = grid, the_warp = warp;
                call(kernel, arguments, std::index_sequence_for<Arguments...>{});
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
    return cudaSuccess;
}
