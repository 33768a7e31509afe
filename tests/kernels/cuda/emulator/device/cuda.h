// CUDA C++ as the kernels use it, for a CPU: qualifiers, vectors, built-in variables and functions. Come before a translated
// source, whose asm statements have become calls of ptx.h. A kernel that needs another function gets it here.
#pragma once
#include "runtime.h"

#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

#define threadIdx (emu::current->thread)
#define blockIdx (emu::current->block)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)
#define warpSize 32

#define EMU_VECTORS(T, NAME)                                                                                 \
  struct alignas(2 * sizeof(T)) NAME##2 {                                                                    \
    T x, y;                                                                                                  \
  };                                                                                                         \
  struct NAME##3 {                                                                                           \
    T x, y, z;                                                                                               \
  };                                                                                                         \
  struct alignas(4 * sizeof(T)) NAME##4 {                                                                    \
    T x, y, z, w;                                                                                            \
  };                                                                                                         \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                                 \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                                         \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned int, uint)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(float, float)
#undef EMU_VECTORS

template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- bits

template <class To, class From>
To emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned code = selector >> (4 * i) & 15;
    unsigned byte = both >> (8 * (code & 7)) & 255;
    if (code & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> (8 * i)) * static_cast<signed char>(b >> (8 * i));
  return c;
}

// ---- floats (the build contracts nothing)

inline float __fadd_rn(float a, float b) { return a + b; }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }

// ---- memory

template <class T>
T __ldg(const T* pointer) { return *pointer; }
template <class T>
T __ldcs(const T* pointer) { return *pointer; }
template <class T>
void __stcs(T* pointer, T value) { *pointer = value; }
inline void __threadfence_block() {}
inline unsigned long long __cvta_generic_to_shared(const void* pointer) { return emu::shared_address_of(pointer); }

template <class T>
T atomicAdd(T* pointer, T value) {
  const T before = *pointer;
  *pointer = before + value;
  return before;
}
template <class T>
T atomicMax(T* pointer, T value) {
  const T before = *pointer;
  *pointer = before < value ? value : before;
  return before;
}

// ---- threads that meet

inline void __syncthreads() { emu::syncthreads(); }
inline void __syncwarp(unsigned mask = ~0u) { emu::exchange("__syncwarp", mask, 0); }

namespace emu {
template <class T>
u64 pack(T value) {
  static_assert(sizeof(T) <= 8);
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T unpack_bits(u64 bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T shuffle(const char* what, u32 mask, T value, int from, int width, bool inside) {
  const u64* values = exchange(what, mask, pack(value));
  const int first = static_cast<int>(current->lane) / width * width;
  return inside ? unpack_bits<T>(values[first + from]) : value;
}
inline int lane_of(int width) { return static_cast<int>(current->lane) % width; }
}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return emu::shuffle("__shfl_sync", mask, value, from & (width - 1), width, true);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int from = emu::lane_of(width) ^ bits;
  return emu::shuffle("__shfl_xor_sync", mask, value, from, width, from < width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int from = emu::lane_of(width) - static_cast<int>(by);
  return emu::shuffle("__shfl_up_sync", mask, value, from, width, from >= 0);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int from = emu::lane_of(width) + static_cast<int>(by);
  return emu::shuffle("__shfl_down_sync", mask, value, from, width, from < width);
}
template <class F>
auto emu_reduce(const char* what, unsigned mask, unsigned long long value, F with) {
  const emu::u64* values = emu::exchange(what, mask, value);
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) with(lane, values[lane]);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned votes = 0;
  emu_reduce("__ballot_sync", mask, predicate != 0, [&](int lane, emu::u64 vote) { votes |= static_cast<unsigned>(vote) << lane; });
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) {
  bool any = false;
  emu_reduce("__any_sync", mask, predicate != 0, [&](int, emu::u64 vote) { any = any || vote; });
  return any;
}
inline int __all_sync(unsigned mask, int predicate) {
  bool all = true;
  emu_reduce("__all_sync", mask, predicate != 0, [&](int, emu::u64 vote) { all = all && vote; });
  return all;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  unsigned same = 0;
  emu_reduce("__match_any_sync", mask, emu::pack(value), [&](int lane, emu::u64 other) {
    if (other == emu::pack(value)) same |= 1u << lane;
  });
  return same;
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  emu_reduce("__reduce_max_sync", mask, emu::pack(value), [&](int, emu::u64 other) { value = max(value, emu::unpack_bits<T>(other)); });
  return value;
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  emu_reduce("__reduce_min_sync", mask, emu::pack(value), [&](int, emu::u64 other) { value = min(value, emu::unpack_bits<T>(other)); });
  return value;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  T sum = 0;
  emu_reduce("__reduce_add_sync", mask, emu::pack(value), [&](int, emu::u64 other) { sum += emu::unpack_bits<T>(other); });
  return sum;
}
