// Copies a table of segments on a CUDA device, in one launch: as many blocks as the device holds at once share the
// tiles of all segments, one warp to a tile, so that thousands of small segments and a few huge ones load it alike.

#include "segments.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
// 64 registers for each of the 1024 threads that are then on a multiprocessor: enough for what a thread has in flight.
constexpr int kLeastBlocks = 4;
// What a thread loads before it stores the first of it, at most: 64 KB on a multiprocessor.
constexpr int kBytesInFlight = 64;
// Neighbouring tiles that a warp takes at a time, so that the search for their segment is paid once.
constexpr int64_t kMostTilesAtATime = 8;
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline int lane() { return threadIdx.x % kWarp; }

// What is copied is not read again here: the hints keep it from displacing what is. `One` copies what is left of a row
// where no whole vector is.
template <typename Word>
struct Same {
    using One = Same<unsigned char>;
    static constexpr int kSourceBytes = sizeof(Word), kDestinationBytes = sizeof(Word);
    Word word;

    __device__ void load(const char* source) { word = __ldcs(reinterpret_cast<const Word*>(source)); }
    __device__ void store(char* destination) const { __stcs(reinterpret_cast<Word*>(destination), word); }
};

__device__ inline unsigned rounded(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// kElements of fp32 become as many of bf16.
template <int kElements>
struct Cast;

template <>
struct Cast<1> {
    using One = Cast<1>;
    static constexpr int kSourceBytes = 4, kDestinationBytes = 2;
    float value;

    __device__ void load(const char* source) { value = __ldcs(reinterpret_cast<const float*>(source)); }
    __device__ void store(char* destination) const {
        __stcs(reinterpret_cast<unsigned short*>(destination), __bfloat16_as_ushort(__float2bfloat16_rn(value)));
    }
};

template <>
struct Cast<2> {
    using One = Cast<1>;
    static constexpr int kSourceBytes = 8, kDestinationBytes = 4;
    float2 values;

    __device__ void load(const char* source) { values = __ldcs(reinterpret_cast<const float2*>(source)); }
    __device__ void store(char* destination) const {
        __stcs(reinterpret_cast<unsigned*>(destination), rounded(values.x, values.y));
    }
};

template <>
struct Cast<4> {
    using One = Cast<1>;
    static constexpr int kSourceBytes = 16, kDestinationBytes = 8;
    float4 values;

    __device__ void load(const char* source) { values = __ldcs(reinterpret_cast<const float4*>(source)); }
    __device__ void store(char* destination) const {
        __stcs(reinterpret_cast<uint2*>(destination),
               make_uint2(rounded(values.x, values.y), rounded(values.z, values.w)));
    }
};

template <>
struct Cast<8> {
    using One = Cast<1>;
    static constexpr int kSourceBytes = 32, kDestinationBytes = 16;
    float4 first, second;

    __device__ void load(const char* source) {
        first = __ldcs(reinterpret_cast<const float4*>(source));
        second = __ldcs(reinterpret_cast<const float4*>(source) + 1);
    }
    __device__ void store(char* destination) const {
        __stcs(reinterpret_cast<uint4*>(destination),
               make_uint4(rounded(first.x, first.y), rounded(first.z, first.w), rounded(second.x, second.y),
                          rounded(second.z, second.w)));
    }
};

// Some elements of a box, counted along its rows. Where they go on past the end of a row, `wrap` leads from there to the
// beginning of the next one.
struct Part {
    const char* source;
    char* destination;
    int64_t source_wrap, destination_wrap;
    // In bytes of the destination: a whole row, what is left of the first one, and all elements.
    int64_t row, left;
    int bytes;
    // In bytes of the destination: what can be copied at once.
    int vector;
    bool cast;
};

// Longer than any part.
constexpr int64_t kEndless = 1 << 30;

// The low bits of an address and, where there are several rows, of how far apart and how long they are: a power of two
// up to 16 that divides the result divides them all.
__device__ inline int alignment_of(const void* data, int64_t stride, int64_t row, int64_t rows) {
    const int64_t all = reinterpret_cast<int64_t>(data) | (rows == 1 ? 0 : stride | row);
    return static_cast<int>(all & 15) | 16;
}

// The largest of 16, 8, 4, 2 and 1 bytes of the destination that keeps its accesses and those of the source, which are
// up to 16 bytes wide, at multiples of their width.
__device__ inline int vector_of(const Box& box) {
    const int source = alignment_of(box.source, box.source_stride, box.columns * box.source_item, box.rows);
    const int destination =
        alignment_of(box.destination, box.destination_stride, box.columns * box.destination_item, box.rows);
    const int widest = (source | destination) & -(source | destination);
    if (box.source_item == box.destination_item) {
        return widest;
    }
    const int narrow = source & -source, wide = destination & -destination;
    return min(wide, narrow == 16 ? 16 : narrow / 2);
}

// Elements [first, first + count) of a box; `first` is a multiple of all vectors.
__device__ Part part_of(const Box& box, int64_t first, int64_t count) {
    const int64_t row = box.rows == 1 ? 0 : first / box.columns;
    const int64_t column = first - row * box.columns;
    Part part;
    part.source = box.source + row * box.source_stride + column * box.source_item;
    part.destination = box.destination + row * box.destination_stride + column * box.destination_item;
    part.source_wrap = box.source_stride - box.columns * box.source_item;
    part.destination_wrap = box.destination_stride - box.columns * box.destination_item;
    part.row = box.rows == 1 ? kEndless : box.columns * box.destination_item;
    part.left = box.rows == 1 ? kEndless : (box.columns - column) * box.destination_item;
    part.bytes = static_cast<int>(count * box.destination_item);
    part.vector = vector_of(box);
    part.cast = box.source_item != box.destination_item;
    return part;
}

// Where a lane stands in a part. The lanes of a warp stand on neighbouring vectors and walk on by a warp's width. Only at
// first do they divide to find their row; after that a step is one addition, and another where a row ends.
template <typename Vector>
struct Walk {
    static constexpr int kFrom = Vector::kSourceBytes, kTo = Vector::kDestinationBytes;

    const char* source;
    char* destination;
    // Vectors of a row, and from here to the end of this one.
    int columns, left;
    int64_t source_wrap, destination_wrap;
    int64_t source_step, destination_step;
    int left_step;

    __device__ explicit Walk(const Part& part)
        : columns(static_cast<int>(min(part.row / kTo, kEndless))),
          left(static_cast<int>(min(part.left / kTo, kEndless))),
          source_wrap(part.source_wrap),
          destination_wrap(part.destination_wrap) {
        const int row_ends = lane() < left ? 0 : 1 + (lane() - left) / columns;
        source = part.source + lane() * kFrom + row_ends * source_wrap;
        destination = part.destination + lane() * kTo + row_ends * destination_wrap;
        left += row_ends * columns - lane();
        const int rows = kWarp / columns;
        source_step = kWarp * kFrom + rows * source_wrap;
        destination_step = kWarp * kTo + rows * destination_wrap;
        left_step = rows * columns - kWarp;
    }

    __device__ void step() {
        left += left_step;
        source += source_step;
        destination += destination_step;
        if (left <= 0) {
            left += columns;
            source += source_wrap;
            destination += destination_wrap;
        }
    }
};

template <typename Vector>
__device__ void copy_part(const Part& part) {
    constexpr int kUnroll = Vector::kSourceBytes > 16 ? kBytesInFlight / Vector::kSourceBytes : 4;
    constexpr int kRound = kUnroll * kWarp;
    const int count = part.bytes / Vector::kDestinationBytes;
    Walk<Vector> walk(part);
#pragma unroll 1
    for (int round = count / kRound; round > 0; --round) {
        Vector vectors[kUnroll];
        char* destinations[kUnroll];
#pragma unroll
        for (int number = 0; number < kUnroll; ++number) {
            vectors[number].load(walk.source);
            destinations[number] = walk.destination;
            walk.step();
        }
#pragma unroll
        for (int number = 0; number < kUnroll; ++number) {
            vectors[number].store(destinations[number]);
        }
    }
#pragma unroll 1
    for (int next = count / kRound * kRound + lane(); next < count; next += kWarp) {
        Vector vector;
        vector.load(walk.source);
        vector.store(walk.destination);
        walk.step();
    }
    using One = typename Vector::One;
    const int copied = count * Vector::kDestinationBytes;
    if (lane() < (part.bytes - copied) / One::kDestinationBytes) {
        One one;
        one.load(part.source + count * Vector::kSourceBytes + lane() * One::kSourceBytes);
        one.store(part.destination + copied + lane() * One::kDestinationBytes);
    }
}

// All lanes of a warp take the same way.
__device__ void copy(const Part& part) {
    if (part.cast) {
        switch (part.vector) {
            case 16: return copy_part<Cast<8>>(part);
            case 8: return copy_part<Cast<4>>(part);
            case 4: return copy_part<Cast<2>>(part);
            default: return copy_part<Cast<1>>(part);
        }
    }
    switch (part.vector) {
        case 16: return copy_part<Same<uint4>>(part);
        case 8: return copy_part<Same<uint2>>(part);
        case 4: return copy_part<Same<unsigned>>(part);
        case 2: return copy_part<Same<unsigned short>>(part);
        default: return copy_part<Same<unsigned char>>(part);
    }
}

// The segment of a tile: the last one that starts at or before it. Every lane probes one place, so that four rounds
// search a million segments.
__device__ int64_t segment_of(const int64_t* starts, int64_t num_segments, int64_t tile) {
    int64_t low = 0, high = num_segments;
    while (high - low > 1) {
        const int64_t step = (high - low + kWarp - 1) / kWarp;
        const int64_t probe = low + (lane() + 1) * step;
        const bool starts_before = probe < high && starts[probe] <= tile;
        low += step * __popc(__ballot_sync(kAllLanes, starts_before));
        high = min(high, low + step);
    }
    return low;
}

__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    copy_tiles(const Operand* sources, const Operand* destinations, const Segment* segments, const int64_t* starts,
               int64_t num_segments, int64_t tile_bytes) {
    // In shared memory, because the lanes of a warp hold it in common.
    __shared__ Part parts[kThreads / kWarp];
    Part& part = parts[threadIdx.x / kWarp];
    const int64_t num_tiles = starts[num_segments];
    const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
    const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
    const int64_t at_a_time = max(min(num_tiles / num_warps, kMostTilesAtATime), static_cast<int64_t>(1));
    for (int64_t first = warp * at_a_time; first < num_tiles; first += num_warps * at_a_time) {
        int64_t number = segment_of(starts, num_segments, first);
        const int64_t last = min(first + at_a_time, num_tiles);
#pragma unroll 1
        for (int64_t tile = first; tile < last; ++tile) {
            while (starts[number + 1] <= tile) {
                ++number;
            }
            if (lane() == 0) {
                const Segment segment = segments[number];
                const Box box = box_of(segment, sources[segment.source], destinations[segment.destination]);
                const int64_t per_tile = tile_bytes / box.destination_item;
                const int64_t element = (tile - starts[number]) * per_tile;
                part = part_of(box, element, min(box.rows * box.columns - element, per_tile));
            }
            __syncwarp();
            copy(part);
            __syncwarp();
        }
    }
}

// As many blocks as fit on the device at once.
cudaError_t fill_device(int device, int* num_blocks) {
    int multiprocessors = 0, blocks = 0;
    cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, copy_tiles, kThreads, 0);
    }
    *num_blocks = multiprocessors * blocks;
    return error;
}

}  // namespace

extern "C" {

int rlmegatron_segments_interface() { return kSegmentsInterface; }

int rlmegatron_copy_segments_cuda(const Operand* sources, const Operand* destinations, const Segment* segments,
                                  const int64_t* starts, int64_t num_segments, int64_t tile_bytes, int device,
                                  void* stream) {
    // The caller's current device is left as it was.
    int current = 0, num_blocks = 0;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && current != device) {
        error = cudaSetDevice(device);
    }
    if (error == cudaSuccess) {
        error = fill_device(device, &num_blocks);
    }
    if (error == cudaSuccess) {
        void* arguments[] = {&sources, &destinations, &segments, &starts, &num_segments, &tile_bytes};
        error = cudaLaunchKernel(copy_tiles, num_blocks, kThreads, arguments, 0, static_cast<cudaStream_t>(stream));
    }
    if (current != device) {
        const cudaError_t restored = cudaSetDevice(current);
        error = error == cudaSuccess ? restored : error;
    }
    return static_cast<int>(error);
}

const char* rlmegatron_segments_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
