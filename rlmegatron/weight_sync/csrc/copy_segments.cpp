// Copies a table of segments on CPUs: every thread takes an equal run of tiles, wherever in a segment it begins.

#include "segments.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// The wheel runs on any x86-64; the cast gains from the wider vectors of the machine it happens to run on.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FOR_WIDER_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_WIDER_VECTORS
#endif

namespace {

// Below this a thread costs more than it saves.
constexpr int64_t kLeastBytesPerThread = 1 << 20;

// Rounds to nearest even; every NaN becomes the one that torch's vectorised conversion makes of it.
inline uint16_t to_bf16(uint32_t bits) {
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0xffff : rounded);
}

inline void cast_one(const char* source, char* destination) {
    uint32_t bits;
    std::memcpy(&bits, source, 4);
    const uint16_t rounded = to_bf16(bits);
    std::memcpy(destination, &rounded, 2);
}

// `next_row` is how many bytes on the next row of the source lies, 0 where there is none. Processors foresee what is
// read along a row, but not the jump to the next one, nor what is written there.
FOR_WIDER_VECTORS
void cast_row(const char* __restrict source, char* __restrict destination, int64_t columns, int64_t next_row) {
    constexpr int64_t kBlock = 32;
    int64_t column = 0;
    for (; next_row && column + kBlock <= columns; column += kBlock) {
        __builtin_prefetch(source + 4 * column + next_row);
        __builtin_prefetch(source + 4 * column + next_row + 64);
        __builtin_prefetch(destination + 2 * column + 1024, 1);
        for (int64_t next = column; next < column + kBlock; ++next) {
            cast_one(source + 4 * next, destination + 2 * next);
        }
    }
    for (; column < columns; ++column) {
        cast_one(source + 4 * column, destination + 2 * column);
    }
}

// Rows of at least this are written past the caches, as one large memcpy would: nobody reads weights soon, and the lines
// need not be read before they are written.
constexpr int64_t kLeastStreamedBytes = 1024;

void copy_row(const char* __restrict source, char* __restrict destination, int64_t bytes) {
#if defined(__x86_64__)
    if (bytes >= kLeastStreamedBytes) {
        const int64_t head = -reinterpret_cast<uintptr_t>(destination) & 15;
        std::memcpy(destination, source, 16);
        int64_t done = head;
        for (; done + 64 <= bytes; done += 64) {
            const __m128i* from = reinterpret_cast<const __m128i*>(source + done);
            __m128i* to = reinterpret_cast<__m128i*>(destination + done);
            const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
        std::memcpy(destination + done, source + done, bytes - done);
        return;
    }
#endif
    std::memcpy(destination, source, bytes);
}

// Others may read only after this what was written past the caches.
void end_of_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// One element a row: a call for each would cost more than the element.
template <typename CopyOne>
void copy_column(const Box& box, int64_t first, int64_t last, CopyOne copy_one) {
    for (int64_t row = first; row < last; ++row) {
        copy_one(box.source + row * box.source_stride, box.destination + row * box.destination_stride);
    }
}

void copy_column(const Box& box, int64_t first, int64_t last) {
    if (box.source_item != box.destination_item) {
        return copy_column(box, first, last, cast_one);
    }
    switch (box.destination_item) {
        case 1: return copy_column(box, first, last, [](const char* from, char* to) { std::memcpy(to, from, 1); });
        case 2: return copy_column(box, first, last, [](const char* from, char* to) { std::memcpy(to, from, 2); });
        case 4: return copy_column(box, first, last, [](const char* from, char* to) { std::memcpy(to, from, 4); });
        default: return copy_column(box, first, last, [](const char* from, char* to) { std::memcpy(to, from, 8); });
    }
}

// Copies elements [first, last) of a box, counted along its rows.
void copy_part(const Box& box, int64_t first, int64_t last) {
    if (box.columns == 1) {
        return copy_column(box, first, last);
    }
    int64_t row = first / box.columns, column = first % box.columns;
    while (first < last) {
        const int64_t columns = std::min(box.columns - column, last - first);
        const char* source = box.source + row * box.source_stride + column * box.source_item;
        char* destination = box.destination + row * box.destination_stride + column * box.destination_item;
        if (box.source_item != box.destination_item) {
            cast_row(source, destination, columns, box.rows == 1 ? 0 : box.source_stride);
        } else {
            copy_row(source, destination, columns * box.destination_item);
        }
        first += columns;
        column = 0;
        ++row;
    }
}

struct Table {
    const Operand* sources;
    const Operand* destinations;
    const Segment* segments;
    const int64_t* starts;
    int64_t num_segments;
    int64_t tile_bytes;
};

// Copies tiles [first, last) of the table.
void copy_tiles(const Table& table, int64_t first, int64_t last) {
    const int64_t* end = table.starts + table.num_segments + 1;
    int64_t number = std::upper_bound(table.starts, end, first) - table.starts - 1;
    for (; first < last; first = table.starts[++number]) {
        const Segment& segment = table.segments[number];
        const Box box = box_of(segment, table.sources[segment.source], table.destinations[segment.destination]);
        const int64_t per_tile = table.tile_bytes / box.destination_item;
        const int64_t begin = table.starts[number], stop = std::min(last, table.starts[number + 1]);
        if (first < stop) {
            copy_part(box, (first - begin) * per_tile, std::min((stop - begin) * per_tile, box.rows * box.columns));
        }
    }
    end_of_streaming();
}

}  // namespace

extern "C" {

int rlmegatron_segments_interface() { return kSegmentsInterface; }

void rlmegatron_copy_segments_cpu(const Operand* sources, const Operand* destinations, const Segment* segments,
                                  const int64_t* starts, int64_t num_segments, int64_t tile_bytes, int num_threads) {
    const Table table{sources, destinations, segments, starts, num_segments, tile_bytes};
    const int64_t num_tiles = starts[num_segments];
    const int64_t worth = num_tiles * tile_bytes / kLeastBytesPerThread;
    const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(num_threads, worth));
    std::vector<std::thread> threads;
    threads.reserve(shares);
    int64_t share = 0;
    try {
        for (; share + 1 < shares; ++share) {
            threads.emplace_back(copy_tiles, std::cref(table), num_tiles * share / shares,
                                 num_tiles * (share + 1) / shares);
        }
    } catch (const std::system_error&) {
        // No more threads are to be had: what they would have copied is left to this one.
    }
    copy_tiles(table, num_tiles * share / shares, num_tiles);
    for (std::thread& thread : threads) {
        thread.join();
    }
}

}  // extern "C"
