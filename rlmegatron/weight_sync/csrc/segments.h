// The interface of the two libraries that copy tables of segments: plain C, so that Python loads them without torch's
// headers and a build takes seconds.
//
// A segment is a box of `rows` x `columns` elements in a source and one of the same size in a destination. All numbers
// count elements, from the first of the tensor's own. `starts` [num_segments + 1] divides the work: it counts tiles, of
// `tile_bytes` bytes of a destination (the last one of a segment may be smaller), before each segment, and in all.
//
// Nothing is checked here. The caller has made sure that every box lies inside its tensors, that no destination element
// is in two boxes, that elements lie at multiples of their size and that a source and a destination with elements of
// 4 and 2 bytes are fp32 and bf16; in all other pairs both sizes are equal (1, 2, 4 or 8).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RLMEGATRON_BOTH __host__ __device__
#else
#define RLMEGATRON_BOTH
#endif

// Raised with each change of what is declared here; segments.py loads no library of another number.
constexpr int kSegmentsInterface = 1;

struct Operand {
    char* data;
    int64_t item_bytes;
};

struct Segment {
    int64_t source;
    int64_t source_offset;
    int64_t source_stride;
    int64_t destination;
    int64_t destination_offset;
    int64_t destination_stride;
    int64_t rows;
    int64_t columns;
};

// One segment in bytes, as it lies in memory.
struct Box {
    const char* source;
    char* destination;
    int64_t source_item;
    int64_t destination_item;
    int64_t source_stride;
    int64_t destination_stride;
    int64_t rows;
    int64_t columns;
};

// Rows that follow each other without a gap on both sides are one long row.
RLMEGATRON_BOTH inline Box box_of(const Segment& segment, const Operand& source, const Operand& destination) {
    Box box;
    box.source = source.data + segment.source_offset * source.item_bytes;
    box.destination = destination.data + segment.destination_offset * destination.item_bytes;
    box.source_item = source.item_bytes;
    box.destination_item = destination.item_bytes;
    box.source_stride = segment.source_stride * source.item_bytes;
    box.destination_stride = segment.destination_stride * destination.item_bytes;
    box.rows = segment.rows;
    box.columns = segment.columns;
    if (segment.source_stride == segment.columns && segment.destination_stride == segment.columns) {
        box.columns *= box.rows;
        box.rows = 1;
    }
    return box;
}

extern "C" {

int rlmegatron_segments_interface();

// Copies with up to `num_threads` threads, the calling one among them.
void rlmegatron_copy_segments_cpu(const Operand* sources, const Operand* destinations, const Segment* segments,
                                  const int64_t* starts, int64_t num_segments, int64_t tile_bytes, int num_threads);

// Enqueues one kernel on `stream` of `device`; all arrays are in memory of that device, and sources in memory that it
// can read. `tile_bytes` is a multiple of 16. Returns 0 or an error's number.
int rlmegatron_copy_segments_cuda(const Operand* sources, const Operand* destinations, const Segment* segments,
                                  const int64_t* starts, int64_t num_segments, int64_t tile_bytes, int device,
                                  void* stream);

// What an error's number means.
const char* rlmegatron_segments_error(int error);

}  // extern "C"
