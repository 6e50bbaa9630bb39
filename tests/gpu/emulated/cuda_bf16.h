// CUDA's bfloat16: the upper half of a float32, rounded to the nearest, to the even one between two.
#pragma once
struct __nv_bfloat16_raw { unsigned short x; };
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(const __nv_bfloat16_raw& raw) : bits(raw.x) {}
    __nv_bfloat16(float value) {
        unsigned whole;
        memcpy(&whole, &value, 4);
        bits = std::isnan(value) ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    explicit __nv_bfloat16(double value) : __nv_bfloat16((float)value) {}
    operator float() const { unsigned whole = (unsigned)bits << 16; float value; memcpy(&value, &whole, 4); return value; }
    operator __nv_bfloat16_raw() const { return {bits}; }
};
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
inline bool __hisnan(__nv_bfloat16 x) { return std::isnan((float)x); }
inline bool __hisinf(__nv_bfloat16 x) { return std::isinf((float)x); }
