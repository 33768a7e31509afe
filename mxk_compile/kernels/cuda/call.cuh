// What the host says about a call (operands.py packs the same bytes), and how its operands are read.
#pragma once
#include "ptx.cuh"

// One weight argument of mxk::moe: stacked (base, expert_stride) or one tensor an expert (table of addresses).
struct Operand {
  const u8* base;    // null and no table: absent
  const u8* const* table;
  i64 expert_stride;  // bytes
  i64 row_stride;     // bytes

  __device__ bool present() const { return base != nullptr || table != nullptr; }
  __device__ const u8* expert(int index) const {
    return table != nullptr ? table[index] : base + index * expert_stride;
  }
};

enum Dtype : i32 { BF16, FP16, FP32, FP64 };

__device__ __forceinline__ float load_float(const u8* base, i64 index, i32 dtype) {
  switch (dtype) {
    case BF16: return __uint_as_float(static_cast<u32>(reinterpret_cast<const u16*>(base)[index]) << 16);
    case FP16: {
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(reinterpret_cast<const u16*>(base)[index]));
      return value;
    }
    case FP32: return reinterpret_cast<const float*>(base)[index];
    default: return static_cast<float>(reinterpret_cast<const double*>(base)[index]);
  }
}

enum Activation : i32 { SILU, SWIGLU_CLAMP, SWIGLU_OAI };

// As ops/moe.py `activate`; limit is +inf for none. NaN of gate or up stays NaN, which fminf and fmaxf would drop.
__device__ __forceinline__ float activate(float gate, float up, i32 activation, float alpha, float limit) {
  constexpr float LOG2_E = 1.4426950408889634f;
  float slope = LOG2_E;
  if (activation != SILU) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    if (activation == SWIGLU_OAI) {
      slope *= alpha;
      up += 1.0f;
    }
  }
  return gate * reciprocal_approx(1.0f + exp2_approx(-slope * gate)) * up;
}
