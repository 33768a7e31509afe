// The tile instructions of isa_amx.cpp: eight registers of 16 rows of 64 bytes. With MXK_AMX_EMULATED the same in plain
// C++, for tests of the very same kernels on machines without the unit. Included by isa_amx.cpp alone.
//
// Written as assembly: compilers' intrinsics of some versions do not say that they read memory.
#pragma once
#include <cstdint>
#include <cstring>

constexpr int kTileBytes = 16 * 64;

#if defined(MXK_AMX_EMULATED)
namespace {

struct TileRegister {
  uint8_t row[16][64];
};
thread_local TileRegister tile_registers[8];

inline float flushed(float value) {  // denormals count as zero, whatever the state of the caller
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float bf16_at(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

inline bool tiles_available() { return true; }
inline void tiles_begin() {}
inline void tiles_end() {}
template <int T>
void tile_zero() { std::memset(&tile_registers[T], 0, kTileBytes); }
template <int T>
void tile_load(const void* at) { std::memcpy(&tile_registers[T], at, kTileBytes); }
template <int T>
void tile_store(void* at) { std::memcpy(at, &tile_registers[T], kTileBytes); }

// As Intel's instruction reference has it: one sum over the 32 products, each step flushed, added to the register.
template <int C, int A, int B>
void tile_multiply() {
  float b[16][2][16];
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 16; ++n)
      for (int i = 0; i < 2; ++i) b[k][i][n] = bf16_at(tile_registers[B].row[k] + 4 * n + 2 * i);
  for (int m = 0; m < 16; ++m) {
    float sum[16] = {}, old[16];
    for (int k = 0; k < 16; ++k)
      for (int i = 0; i < 2; ++i) {
        const float a = bf16_at(tile_registers[A].row[m] + 4 * k + 2 * i);
        for (int n = 0; n < 16; ++n) sum[n] = flushed(__builtin_fmaf(a, b[k][i][n], sum[n]));
      }
    std::memcpy(old, tile_registers[C].row[m], 64);
    for (int n = 0; n < 16; ++n) old[n] = flushed(old[n] + sum[n]);
    std::memcpy(tile_registers[C].row[m], old, 64);
  }
}

}  // namespace
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Whether processor and system have the unit, and the system lets this process use it: asked for once, since Linux
// enlarges the saved state of its threads then.
inline bool tiles_available() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 24 & 1) || !(d >> 22 & 1)) return false;  // AMX-TILE, AMX-BF16
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return false;  // tile configuration and data are saved
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// All eight registers full size: 16 rows of 64 bytes.
inline void tiles_begin() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  static_assert(sizeof config == 64, "the operand of ldtilecfg");
  asm volatile("ldtilecfg %0" ::"m"(config));
}
// Back to the initial state: what a thread holds in tiles is saved in each context switch.
inline void tiles_end() { asm volatile("tilerelease"); }

// What loads and stores touch is said byte for byte: with "memory" in its place, all that unpacking holds would be read anew
// after each of them.
using TileBytes = uint8_t[kTileBytes];
template <int T>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
inline void tile_load(const void* at) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(64L), "i"(T), "m"(*static_cast<const TileBytes*>(at)));
}
template <int T>
inline void tile_store(void* at) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*static_cast<TileBytes*>(at)) : "r"(at), "r"(64L), "i"(T));
}
// C[16][16] fp32 += A[16][32] bf16 x B[16 pairs][16][2] bf16.
template <int C, int A, int B>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace
#endif
