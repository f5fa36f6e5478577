// The conversions of CUDA's header: to nearest even, and every NaN to 0x7fff.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(value != value ? 0x7fff : rounded)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
