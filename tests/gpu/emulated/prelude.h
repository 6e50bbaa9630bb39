// What CUDA C++ gives a kernel, for the host's compiler.  The threads of a block run one after another; those of a
// kernel that has barriers are coroutines, each up to its next barrier.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include "vector_types.h"

#define __CUDACC_VER_MAJOR__ 13
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__

using std::isfinite, std::isinf, std::isnan, std::signbit, std::abs, std::sqrt, std::pow;
template <class A, class B> std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <class T> T __ldg(const T* at) { return *at; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
template <class T> T atomicCAS(T* at, T old, T next) { T before = *at; if (before == old) *at = next; return before; }
template <class T> T atomicAdd(T* at, T more) { T before = *at; *at = before + more; return before; }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
extern "C" long long emulated_clock();  // of runtime.cpp
inline long long clock64() { return emulated_clock(); }

static uint3 blockIdx, threadIdx;
static dim3 gridDim, blockDim;

namespace emulated {
struct Group { size_t live, arrived, turn; };  // threads that meet at a barrier
static Group groups[33];  // the block, and its warps
static ucontext_t threads[1024];
static ucontext_t launcher;
static size_t current;

inline void let_go(Group& group) { if (group.arrived == group.live) group.arrived = 0, group.turn++; }
inline void meet(Group& group) {
    const size_t own = current, turn = group.turn;
    group.arrived++, let_go(group);
    while (group.turn == turn) swapcontext(&threads[own], &launcher);
}
template <class Body> void block_with_barriers(Body body, size_t count) {
    static char stacks[1024 * 65536];
    static Body* given;
    static bool ended[1024];
    given = &body, std::fill_n(ended, count, false);
    const dim3 size = blockDim;
    for (auto& group : groups) group = {};
    for (size_t i = 0; i < count; i++) {
        groups[0].live++, groups[1 + i / 32].live++;
        getcontext(&threads[i]);
        threads[i].uc_stack.ss_sp = &stacks[i * 65536], threads[i].uc_stack.ss_size = 65536;
        threads[i].uc_link = &launcher;
        makecontext(&threads[i], +[] { (*given)(); ended[current] = true; }, 0);
    }
    while (groups[0].live)
        for (current = 0; current < count; current++) {
            if (ended[current]) continue;
            threadIdx = {unsigned(current % size.x), unsigned(current / size.x % size.y), unsigned(current / size.x / size.y)};
            swapcontext(&launcher, &threads[current]);
            if (ended[current]) for (size_t i : {size_t(0), 1 + current / 32}) groups[i].live--, let_go(groups[i]);
        }
}

template <bool has_barriers, class... Types, size_t... Numbers>
void launch(void (*kernel)(Types...), const unsigned* sizes, void** given, std::index_sequence<Numbers...>) {
    auto body = [&] { kernel(*(std::remove_reference_t<Types>*)given[Numbers]...); };
    gridDim = {sizes[0], sizes[1], sizes[2]}, blockDim = {sizes[3], sizes[4], sizes[5]};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
                if constexpr (has_barriers) block_with_barriers(body, size_t(blockDim.x) * blockDim.y * blockDim.z);
                else for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)
                    for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
                        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) body();
            }
}
template <bool has_barriers, class... Types>
void launch(void (*kernel)(Types...), const unsigned* sizes, void** given) {
    launch<has_barriers>(kernel, sizes, given, std::index_sequence_for<Types...>());
}
template <class... Types> const size_t* sizes_of(void (*)(Types...)) {
    static const size_t sizes[] = {sizeof(Types)..., 0};
    return sizes;
}
}  // namespace emulated

inline void __syncthreads() { emulated::meet(emulated::groups[0]); }
inline void __syncwarp() { emulated::meet(emulated::groups[1 + emulated::current / 32]); }
