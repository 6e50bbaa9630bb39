// CUDA's floats of 16 bits, rounded by the host's compiler.
#pragma once
struct __half_raw { unsigned short x; };
struct __half {
    _Float16 value;
    __half() = default;
    __half(const __half_raw& raw) { memcpy(&value, &raw, 2); }
    __half(float x) : value((_Float16)x) {}
    __half(double x) : value((_Float16)x) {}
    template <class T, class = std::enable_if_t<std::is_integral_v<T>>> __half(T x) : value((_Float16)(float)x) {}
    operator float() const { return (float)value; }
    operator __half_raw() const { __half_raw raw; memcpy(&raw, &value, 2); return raw; }
};
typedef __half half;
inline unsigned short __half_as_ushort(__half x) { return __half_raw(x).x; }
inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }
