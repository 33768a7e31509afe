// PTX instructions, a function each, named as the instruction with _ for . and ::, without qualifiers of the L2 cache
// (translate.py). Outputs come first, as references; [address] is a value; the members of {vectors} follow one another.
//
// To add one, write its function here, from the PTX ISA's text. Memory is sequentially consistent: what orders it only
// (.acquire, .release, fences between threads) has no effect and cannot be found missing, but fence.proxy.async can.
#pragma once
#include "cuda.h"

#define PTX inline __attribute__((always_inline))  // so that what is said of a place names its callers

namespace ptx {

using emu::u16;
using emu::u32;
using emu::u64;
using emu::u8;
using emu::i32;
inline int sink;  // the operand _

template <class T>
PTX T emu_load(u32 address, u32 count = 1) {  // whole vectors are aligned
  T value;
  __builtin_memcpy(&value, emu::shared(address, sizeof(T) * count, sizeof(T) * count), sizeof value);
  return value;
}
template <class... T>
PTX void emu_store(u32 address, T... values) {
  constexpr u32 bytes = (sizeof(T) + ...);
  u8* to = emu::shared(address, bytes, bytes);
  ((__builtin_memcpy(to, &values, sizeof values), to += sizeof values), ...);
  emu::wrote_shared(address, bytes);
}

// ---- shared memory
PTX void ld_shared_u8(auto& d, u32 at) { d = emu_load<u8>(at); }
PTX void ld_shared_u16(auto& d, u32 at) { d = emu_load<u16>(at); }
PTX void ld_shared_u32(auto& d, u32 at) { d = emu_load<u32>(at); }
PTX void ld_shared_b32(auto& d, u32 at) { d = emu_load<u32>(at); }
PTX void ld_shared_s32(auto& d, u32 at) { d = emu_load<i32>(at); }
PTX void ld_shared_u64(auto& d, u32 at) { d = emu_load<u64>(at); }
PTX void ld_shared_f32(auto& d, u32 at) { d = emu_load<float>(at); }
PTX void ld_shared_v2_u32(auto& a, auto& b, u32 at) {
  a = emu_load<u32>(at, 2), b = emu_load<u32>(at + 4);
}
PTX void ld_shared_v2_f32(auto& a, auto& b, u32 at) {
  a = emu_load<float>(at, 2), b = emu_load<float>(at + 4);
}
PTX void ld_shared_v4_u32(auto& a, auto& b, auto& c, auto& d, u32 at) {
  a = emu_load<u32>(at, 4), b = emu_load<u32>(at + 4), c = emu_load<u32>(at + 8), d = emu_load<u32>(at + 12);
}
PTX void st_shared_u8(u32 at, u32 value) { emu_store(at, static_cast<u8>(value)); }
PTX void st_shared_u16(u32 at, u32 value) { emu_store(at, static_cast<u16>(value)); }
PTX void st_shared_u32(u32 at, u32 value) { emu_store(at, value); }
PTX void st_shared_b32(u32 at, u32 value) { emu_store(at, value); }
PTX void st_shared_u64(u32 at, u64 value) { emu_store(at, value); }
PTX void st_shared_f32(u32 at, float value) { emu_store(at, value); }
PTX void st_shared_v2_u32(u32 at, u32 a, u32 b) { emu_store(at, a, b); }
PTX void st_shared_v2_f32(u32 at, float a, float b) { emu_store(at, a, b); }
PTX void st_shared_v4_u32(u32 at, u32 a, u32 b, u32 c, u32 d) { emu_store(at, a, b, c, d); }
PTX void red_shared_max_u32(u32 at, u32 value) { emu_store(at, max(emu_load<u32>(at), value)); }
PTX void red_shared_add_u32(u32 at, u32 value) { emu_store(at, emu_load<u32>(at) + value); }
PTX void atom_shared_add_u32(auto& d, u32 at, u32 value) {
  d = emu_load<u32>(at);
  emu_store(at, d + value);
}

// ---- device memory
template <class T>
T& emu_at(u64 address) {
  if (address % sizeof(T)) emu::fail("device memory at %llx; its instruction wants a multiple of %u", address, unsigned{sizeof(T)});
  return *reinterpret_cast<T*>(address);
}
PTX void ld_global_cg_u16(auto& d, u64 at) { d = emu_at<u16>(at); }
PTX void ld_global_cg_u32(auto& d, u64 at) { d = emu_at<u32>(at); }
PTX void ld_global_cg_v2_u32(auto& a, auto& b, u64 at) {
  const uint2& v = emu_at<uint2>(at);
  a = v.x, b = v.y;
}
PTX void ld_global_cg_v4_u32(auto& a, auto& b, auto& c, auto& d, u64 at) {
  const uint4& v = emu_at<uint4>(at);
  a = v.x, b = v.y, c = v.z, d = v.w;
}
PTX void ld_global_nc_v4_u32(auto& a, auto& b, auto& c, auto& d, u64 at) { ld_global_cg_v4_u32(a, b, c, d, at); }
PTX void ld_relaxed_gpu_global_u32(auto& d, u64 at) {
  emu::poll(reinterpret_cast<const void*>(at), emu_at<u32>(at));
  d = emu_at<u32>(at);
}
PTX void ld_acquire_gpu_global_u32(auto& d, u64 at) { ld_relaxed_gpu_global_u32(d, at); }
PTX void ld_volatile_global_u32(auto& d, u64 at) { ld_relaxed_gpu_global_u32(d, at); }
PTX void st_relaxed_gpu_global_u32(u64 at, u32 value) { emu_at<u32>(at) = value; }
PTX void st_release_gpu_global_u32(u64 at, u32 value) { emu_at<u32>(at) = value; }
PTX void red_release_gpu_global_add_u32(u64 at, u32 value) { emu_at<u32>(at) += value; }
PTX void red_relaxed_gpu_global_add_u32(u64 at, u32 value) { emu_at<u32>(at) += value; }
PTX void atom_acq_rel_gpu_global_add_u32(auto& d, u64 at, u32 value) {
  d = emu_at<u32>(at);
  emu_at<u32>(at) += value;
}
PTX void atom_relaxed_gpu_global_add_u32(auto& d, u64 at, u32 value) { atom_acq_rel_gpu_global_add_u32(d, at, value); }
PTX void fence_acq_rel_gpu() {}
PTX void fence_acq_rel_cta() {}

// ---- numbers
PTX u32 emu_pair(u32 low, u32 high) { return low | high << 16; }
inline double emu_low(u32 pair) { return __uint_as_float(pair << 16); }  // doubles: sums and products are exact but for one rounding
inline double emu_high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
inline float emu_flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
PTX void mul_rn_bf16x2(auto& d, u32 a, u32 b) {
  d = emu_pair(emu::to_bf16(emu_low(a) * emu_low(b)), emu::to_bf16(emu_high(a) * emu_high(b)));
}
PTX void add_rn_bf16x2(auto& d, u32 a, u32 b) {
  d = emu_pair(emu::to_bf16(emu_low(a) + emu_low(b)), emu::to_bf16(emu_high(a) + emu_high(b)));
}
PTX void sub_rn_bf16x2(auto& d, u32 a, u32 b) {
  d = emu_pair(emu::to_bf16(emu_low(a) - emu_low(b)), emu::to_bf16(emu_high(a) - emu_high(b)));
}
PTX void max_u16x2(auto& d, u32 a, u32 b) { d = emu_pair(max(a & 0xFFFF, b & 0xFFFF), max(a >> 16, b >> 16)); }
PTX void cvt_rn_bf16x2_f32(auto& d, float high, float low) { d = emu_pair(emu::to_bf16(low), emu::to_bf16(high)); }
PTX void cvt_rn_f16x2_f32(auto& d, float high, float low) { d = emu_pair(emu::to_f16(low), emu::to_f16(high)); }
PTX void cvt_rn_satfinite_e4m3x2_f32(auto& d, float high, float low) {
  d = static_cast<u16>(emu::to_e4m3(low) | emu::to_e4m3(high) << 8);
}
PTX void cvt_f32_f16(auto& d, u16 bits) { d = emu::from_f16(bits); }
PTX void cvt_f32_bf16(auto& d, u16 bits) { d = __uint_as_float(static_cast<u32>(bits) << 16); }
PTX void cvt_rni_s32_f32(auto& d, float x) { d = static_cast<i32>(__builtin_rintf(x)); }
PTX void cvt_rni_sat_s8_f32(auto& d, float x) { d = static_cast<i32>(__builtin_fminf(__builtin_fmaxf(__builtin_rintf(x), -128.0f), 127.0f)); }
PTX void ex2_approx_ftz_f32(auto& d, float x) { d = emu_flush(__builtin_exp2f(emu_flush(x))); }
PTX void rcp_approx_ftz_f32(auto& d, float x) { d = emu_flush(1.0f / emu_flush(x)); }
PTX void mov_b32(auto& d, auto value) { d = value; }
PTX void mov_u32(auto& d, u32 value) { d = value; }
PTX void mov_b64(auto& d, u64 value) { d = value; }
PTX void mov_b64(auto& d, u32 low, u32 high) { d = static_cast<u64>(high) << 32 | low; }
PTX void prmt_b32(auto& d, u32 a, u32 b, u32 selector) { d = __byte_perm(a, b, selector); }
PTX void lop3_b32(auto& d, u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (u32 row = 0; row < 8; ++row)
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  d = result;
}
PTX void setp_ne_b32(bool& p, u32 a, u32 b) { p = a != b; }
PTX void setp_eq_b32(bool& p, u32 a, u32 b) { p = a == b; }
PTX void dp4a_s32_s32(auto& d, u32 a, u32 b, u32 c) { d = __dp4a(a, b, c); }
PTX void dp4a_s32_u32(auto& d, u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; ++i) c += static_cast<u32>(static_cast<signed char>(a >> (8 * i)) * static_cast<int>(b >> (8 * i) & 255));
  d = c;
}

// ---- warps and blocks
PTX void movmatrix_sync_aligned_m8n8_trans_b16(auto& d, u32 a) {
  const u64* rows = emu::exchange("movmatrix", ~0u, a);
  const u32 row = emu::current->lane / 4, column = emu::current->lane % 4 * 2;  // of the result
  const auto element = [&](u32 r, u32 c) { return static_cast<u32>(rows[4 * r + c / 2]) >> (16 * (c % 2)) & 0xFFFF; };
  d = emu_pair(element(column, row), element(column + 1, row));
}
inline void emu_gather(u32 (&to)[32], u32 value) {  // of all lanes
  const u64* rows = emu::exchange("mma.sync or ldmatrix", ~0u, value);
  for (u32 lane = 0; lane < 32; ++lane) to[lane] = static_cast<u32>(rows[lane]);
}
// D = A B + C in fp32, in the order of the COLUMNS; fragments as the PTX ISA has them. `multiply` takes a word of each and
// the element in it.
template <u32 COLUMNS>
void emu_mma(auto multiply, auto& d0, auto& d1, auto& d2, auto& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0,
             float c1, float c2, float c3) {
  u32 a[4][32], b[2][32];
  emu_gather(a[0], a0), emu_gather(a[1], a1), emu_gather(a[2], a2), emu_gather(a[3], a3), emu_gather(b[0], b0), emu_gather(b[1], b1);
  const u32 g = emu::current->lane / 4, q = emu::current->lane % 4;
  constexpr u32 IN_WORD = COLUMNS / 8;
  const auto product = [&](u32 half, u32 column, float sum) {
    for (u32 k = 0; k < COLUMNS; ++k) {
      const u32 word = k / IN_WORD % 4, upper = k / (COLUMNS / 2);
      sum += multiply(a[upper * 2 + half][4 * g + word], b[upper][4 * column + word], k % IN_WORD);
    }
    return sum;
  };
  const float r0 = product(0, 2 * q, c0), r1 = product(0, 2 * q + 1, c1), r2 = product(1, 2 * q, c2), r3 = product(1, 2 * q + 1, c3);
  d0 = r0, d1 = r1, d2 = r2, d3 = r3;
}
PTX void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(auto& d0, auto& d1, auto& d2, auto& d3, u32 a0, u32 a1, u32 a2,
                                                                 u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
  const auto multiply = [](u32 a, u32 b, u32 i) {
    return __uint_as_float(a >> 16 * i << 16) * __uint_as_float(b >> 16 * i << 16);
  };
  emu_mma<16>(multiply, d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3);
}
PTX void mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(auto& d0, auto& d1, auto& d2, auto& d3, u32 a0, u32 a1, u32 a2,
                                                                 u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
  const auto multiply = [](u32 a, u32 b, u32 i) {
    return emu::from_e4m3(static_cast<u8>(a >> 8 * i)) * emu::from_e4m3(static_cast<u8>(b >> 8 * i));
  };
  emu_mma<32>(multiply, d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3);
}
PTX void ldmatrix_sync_aligned_m8n8_x4_shared_b16(auto& d0, auto& d1, auto& d2, auto& d3, u32 at) {
  u32 rows[32], d[4];
  emu_gather(rows, at);
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = rows[8 * i + emu::current->lane / 4];
    emu::shared(row, 16, 16);
    d[i] = emu_load<u32>(row + emu::current->lane % 4 * 4);
  }
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
PTX void elect_sync(auto&, bool& elected, u32 mask) {
  emu::exchange("elect.sync", mask, 0);
  elected = emu::current->lane == static_cast<u32>(__builtin_ctz(mask));
}
PTX void bar_sync(u32 barrier, u32 threads) { emu::bar_sync(barrier, threads); }
PTX void bar_arrive(u32 barrier, u32 threads) { emu::bar_arrive(barrier, threads); }
PTX void setmaxnreg_dec_sync_aligned_u32(u32 registers) { emu::set_registers(registers); }
PTX void setmaxnreg_inc_sync_aligned_u32(u32 registers) { emu::set_registers(registers); }
PTX void griddepcontrol_wait() { emu::grid_waited(); }
PTX void griddepcontrol_launch_dependents() {}

// ---- mbarrier
PTX void mbarrier_init_shared_cta_b64(u32 barrier, u32 count) { emu::mbarrier_init(barrier, count); }
PTX void mbarrier_arrive_shared_cta_b64(auto&, u32 barrier, u32 count = 1) { emu::mbarrier_arrive(barrier, count); }
PTX void mbarrier_arrive_expect_tx_shared_cta_b64(auto&, u32 barrier, u32 bytes) {
  emu::mbarrier_expect(barrier, bytes);
  emu::mbarrier_arrive(barrier, 1);
}
PTX void mbarrier_expect_tx_relaxed_cta_shared_cta_b64(u32 barrier, u32 bytes) { emu::mbarrier_expect(barrier, bytes); }
PTX void mbarrier_try_wait_parity_shared_cta_b64(bool& done, u32 barrier, u32 parity) { done = emu::mbarrier_wait(barrier, parity); }
PTX void mbarrier_test_wait_parity_shared_cta_b64(bool& done, u32 barrier, u32 parity) { done = emu::mbarrier_test(barrier, parity); }
PTX void fence_mbarrier_init_release_cluster() {}
PTX void fence_proxy_async_shared_cta() { emu::fence_proxy_async(); }
PTX void fence_proxy_async() { emu::fence_proxy_async(); }

// ---- copies; a trailing operand is a cache policy
PTX void cp_async_ca_shared_global(u32 to, u64 from, u32 bytes, u32 valid) {
  emu::copy_async(to, reinterpret_cast<const void*>(from), bytes, valid);
}
PTX void cp_async_ca_shared_global(u32 to, u64 from, u32 bytes) { cp_async_ca_shared_global(to, from, bytes, bytes); }
PTX void cp_async_cg_shared_global(u32 to, u64 from, u32 bytes, u32 valid) { cp_async_ca_shared_global(to, from, bytes, valid); }
PTX void cp_async_cg_shared_global(u32 to, u64 from, u32 bytes) { cp_async_ca_shared_global(to, from, bytes, bytes); }
PTX void cp_async_mbarrier_arrive_noinc_shared_cta_b64(u32 barrier) { emu::copies_arrive(barrier, true); }
PTX void cp_async_mbarrier_arrive_shared_cta_b64(u32 barrier) { emu::copies_arrive(barrier, false); }
PTX void cp_async_commit_group() { emu::copies_commit(); }
PTX void cp_async_wait_group(u32 pending) { emu::copies_wait(pending); }
PTX void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 from, u32 bytes, u32 barrier, u64 = 0) {
  emu::bulk_load(to, reinterpret_cast<const void*>(from), bytes, barrier);
}
PTX void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, i32 x, i32 y, u32 barrier,
                                                                                      u64 = 0) {
  const i32 at[] = {x, y};
  emu::tensor_load(to, reinterpret_cast<const void*>(map), at, 2, barrier);
}
PTX void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, i32 x, i32 y, i32 z,
                                                                                      u32 barrier, u64 = 0) {
  const i32 at[] = {x, y, z};
  emu::tensor_load(to, reinterpret_cast<const void*>(map), at, 3, barrier);
}
PTX void prefetch_tensormap(u64) {}
PTX void prefetch_global_L2(u64) {}
PTX void createpolicy_fractional_b64(auto& d, float) { d = 0; }

// ---- WGMMA; wgmma.mma_async itself is emu::wgmma, which translate.py writes
PTX void wgmma_fence_sync_aligned() { emu::wgmma_fence(); }
PTX void wgmma_commit_group_sync_aligned() { emu::wgmma_commit(); }
PTX void wgmma_wait_group_sync_aligned(u32 pending) { emu::wgmma_wait(pending); }

// ---- tensor memory
PTX void tcgen05_alloc_cta_group_1_sync_aligned_shared_cta_b32(u32 to, u32 columns) { emu::tensor_allocate(to, columns); }
PTX void tcgen05_relinquish_alloc_permit_cta_group_1_sync_aligned() { emu::tensor_relinquish(); }
PTX void tcgen05_dealloc_cta_group_1_sync_aligned_b32(u32 address, u32 columns) { emu::tensor_free(address, columns); }
PTX void tcgen05_st_sync_aligned_16x128b_x2_b32(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 values[] = {a, b, c, d};
  emu::tensor_store(to, false, values, 4);
}
PTX void tcgen05_ld_sync_aligned_16x256b_x2_b32(auto& a, auto& b, auto& c, auto& d, auto& e, auto& f, auto& g, auto& h, u32 from) {
  void* const targets[] = {&a, &b, &c, &d, &e, &f, &g, &h};
  emu::tensor_load(from, true, targets, 8);
}
PTX void tcgen05_wait_st_sync_aligned() { emu::tensor_wait_stored(); }
PTX void tcgen05_wait_ld_sync_aligned() { emu::tensor_wait_loaded(); }
PTX void tcgen05_fence_before_thread_sync() { emu::tensor_fence_before(); }
PTX void tcgen05_fence_after_thread_sync() { emu::tensor_fence_after(); }
PTX void tcgen05_mma_cta_group_1_kind_f16(u32 d, u32 a, u64 b, u32 instruction, bool add) {
  emu::tensor_multiply(d, a, b, instruction, add);
}
PTX void tcgen05_commit_cta_group_1_mbarrier_arrive_one_shared_cluster_b64(u32 barrier) { emu::tensor_commit(barrier); }

}  // namespace ptx
