// Reading the operands of a call: expert ids, router weights, and the tiles of its packed matrices. Included by moe.cpp alone.
#pragma once
#include <cmath>
#include <cstring>

#include "tile.h"

namespace {

const uint8_t* bytes(const void* p) { return static_cast<const uint8_t*>(p); }

template <class T>
T read(const void* base, int64_t offset) {
  T value;
  std::memcpy(&value, bytes(base) + offset, sizeof value);
  return value;
}

// Local expert of an id, or -1; compared in 64 bits and without overflow.
int64_t local_expert(const MxkMoe& c, int64_t t, int64_t slot) {
  const int64_t at = t * c.ids_line + slot * c.ids_step;
  int64_t id = 0;
  switch (c.ids_dtype) {
    case MXK_U8: id = read<uint8_t>(c.ids, at); break;
    case MXK_I8: id = read<int8_t>(c.ids, at); break;
    case MXK_I16: id = read<int16_t>(c.ids, at); break;
    case MXK_U16: id = read<uint16_t>(c.ids, at); break;
    case MXK_I32: id = read<int32_t>(c.ids, at); break;
    case MXK_U32: id = read<uint32_t>(c.ids, at); break;
    case MXK_U64:
      if (read<uint64_t>(c.ids, at) > uint64_t(INT64_MAX)) return -1;
      [[fallthrough]];
    default: id = read<int64_t>(c.ids, at);
  }
  // As unsigned differences: no sum that could wrap.
  const uint64_t distance = uint64_t(id) - uint64_t(c.experts_min);
  return id >= c.experts_min && distance < uint64_t(c.experts) ? int64_t(distance) : -1;
}

float half_to_float(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                          : std::ldexp(float(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

float router_weight(const MxkMoe& c, int64_t t, int64_t slot) {
  const int64_t at = t * c.weights_line + slot * c.weights_step;
  switch (c.weights_dtype) {
    case MXK_BF16: {
      const uint32_t bits = uint32_t(read<uint16_t>(c.weights, at)) << 16;
      return read<float>(&bits, 0);
    }
    case MXK_F16: return half_to_float(read<uint16_t>(c.weights, at));
    case MXK_F64: return float(read<double>(c.weights, at));
    default: return read<float>(c.weights, at);
  }
}

uint16_t round_bf16(float value) {
  const uint32_t bits = read<uint32_t>(&value, 0);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

const uint8_t* expert_base(const MxkMoe& c, const void* base, int64_t stride, int64_t index) {
  if (base == nullptr) return nullptr;
  return c.lists ? bytes(static_cast<const void* const*>(base)[index]) : bytes(base) + index * stride;
}

enum Role { kGate, kUp, kDown };

// Rows [row, row + rows) of one expert's gate, up or down projection.
Tile make_tile(const MxkMoe& c, Role role, int64_t expert, int64_t row, int rows) {
  const MxkProjection& p = role == kDown ? c.w2 : c.w13;
  int64_t index = expert, first = row, step = 1;
  if (role != kDown) {
    if (c.row_order == MXK_SEPARATE) index = role == kUp ? expert + c.experts : expert;
    if (c.row_order == MXK_INTERLEAVED) first = 2 * row + (role == kUp), step = 2;
    if (c.row_order == MXK_GATE_UP) first += role == kUp ? c.intermediate : 0;
    if (c.row_order == MXK_UP_GATE) first += role == kGate ? c.intermediate : 0;
  }
  Tile tile = {};
  tile.weight = expert_base(c, p.weight, p.weight_expert, index);
  tile.scale = expert_base(c, p.scale, p.scale_expert, index);
  tile.zero = expert_base(c, p.zero, p.zero_expert, index);
  tile.bias = expert_base(c, p.bias, p.bias_expert, index);
  tile.weight_step = p.weight_line, tile.scale_step = p.scale_line, tile.zero_step = p.zero_line;
  tile.bias_step = (p.bias_dtype == MXK_F32 ? 4 : 2);
  if (tile.bias) tile.bias += first * tile.bias_step, tile.bias_step *= step;
  if (c.output_packed) {
    tile.column0 = first, tile.column_step = step;
  } else {
    tile.weight += first * p.weight_line, tile.scale += first * p.scale_line;
    if (tile.zero) tile.zero += first * p.zero_line;
    tile.weight_step *= step, tile.scale_step *= step, tile.zero_step *= step;
  }
  tile.scale_dtype = p.scale_dtype, tile.zero_dtype = p.zero_dtype, tile.bias_dtype = p.bias_dtype;
  tile.format = c.format;
  tile.columns = role == kDown ? c.intermediate : c.hidden;
  tile.group = p.group;
  tile.transposed = c.output_packed;
  tile.rows = rows;
  return tile;
}

}  // namespace
