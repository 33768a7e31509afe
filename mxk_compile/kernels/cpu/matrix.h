// The part of the schedule that experts on a matrix unit take (tile.h). Included by moe.cpp alone.
//
// An expert takes the unit if it has MatrixUnit::least_rows routes in the slab: results depend on whether it has. Vectors and weight rows that the unit would
// flush or overflow take plain fp32 arithmetic (exact.h), alone.
#pragma once
#include "slab.h"

namespace {

// The expert that has place `at` in an ascending array of starts.
int64_t expert_at(const int64_t* start, int64_t experts, int64_t at) {
  return std::upper_bound(start, start + experts + 1, at) - start - 1;
}

int64_t strips_of(int64_t rows, int in_strip) { return (rows + in_strip - 1) / in_strip; }

bool on_unit(const Slab& s, int64_t expert) { return s.unit && s.by_unit[expert]; }

uint8_t* intermediate_strips(const Slab& s, int64_t expert) {
  return reinterpret_cast<uint8_t*>(s.h_memory + s.h_first[expert] * vector_bytes(s.call->intermediate));
}

// Experts that may take the unit, and where their strips begin.
void choose_experts(Slab& s) {
  const MxkMoe& c = *s.call;
  bool any = false;
  for (int64_t e = 0; e < c.experts; ++e) {
    const int64_t rows = s.start[e + 1] - s.start[e];
    const bool unit = s.unit && rows >= s.least_rows;
    any |= unit;
    s.by_unit[e] = unit;
    s.h_first[e + 1] = s.h_first[e] + (unit ? strips_of(rows, kStripRoutes) * kStripRoutes : rows);
    s.x_first[e + 1] = s.x_first[e] + (unit ? strips_of(rows, kStripTokens) : 0);
  }
  if (!any) s.unit = nullptr;
}

void pack_tokens(Slab& s) {
  const MxkMoe& c = *s.call;
  for (int64_t i; (i = s.claimed[4].fetch_add(1)) < s.x_first[c.experts];) {
    const int64_t e = expert_at(s.x_first, c.experts, i);
    const int64_t first = s.start[e] + (i - s.x_first[e]) * kStripTokens, left = s.start[e + 1] - first;
    const int count = int(left < kStripTokens ? left : kStripTokens);
    const uint8_t* tokens[kStripTokens];
    for (int t = 0; t < count; ++t) tokens[t] = bytes(c.x) + (s.first + s.token[first + t]) * c.x_line;
    s.x_exact[i] = s.unit->pack(tokens, count, c.hidden, s.x_strips + i * strip_bytes(c.hidden));
    for (int t = 0; t < count; ++t) s.raw[first + t] = {tokens[t], false, s.x_exact[i] >> t & 1 ? 0 : -1, nullptr};
  }
}

// A gate and an up tile, from row 16 `step` on.
void gate_up_on_unit(Slab& s, const ThreadScratch& scratch, const Activation& activation, int64_t expert, const Tile* pair,
                     int64_t step) {
  const MxkMoe& c = *s.call;
  const int64_t rows = s.start[expert + 1] - s.start[expert], strips = strips_of(rows, kStripTokens);
  for (int64_t first = 0; first < strips; first += kMatrixStrips) {
    const int64_t count = strips - first < kMatrixStrips ? strips - first : kMatrixStrips;
    const int64_t left = rows - first * kStripTokens, most = count * kStripTokens;
    const uint8_t* x = s.x_strips + (s.x_first[expert] + first) * strip_bytes(c.hidden);
    const MatrixCall call = {pair, 2, x, int(count), int(left < most ? left : most),
                             s.raw_of + s.start[expert] + first * kStripTokens, s.x_exact + s.x_first[expert] + first};
    s.unit->multiply(call, scratch.matrix);
    uint8_t* h = intermediate_strips(s, expert) + first * (kStripTokens / kStripRoutes) * strip_bytes(c.intermediate);
    const bool end = (step + 1) * kTileRows >= c.intermediate;
    s.unit->activate(activation, call, step, end, c.intermediate, h, scratch.matrix);
  }
}

// The strip that route r is the first of: what the unit would flush in it.
void look_at_strip(Slab& s, int64_t expert, int64_t r) {
  const int64_t strip = (r - s.start[expert]) / kStripRoutes;
  s.h_exact[s.h_first[expert] + strip] = s.unit->tiny(
      intermediate_strips(s, expert) + strip * strip_bytes(s.call->intermediate), s.call->intermediate);
}

void down_on_unit(const Slab& s, const ThreadScratch& scratch, int64_t expert, const Tile* tiles, int num_tiles,
                  float (*const* partial)[16]) {
  const MxkMoe& c = *s.call;
  const int64_t rows = s.start[expert + 1] - s.start[expert], strips = strips_of(rows, kStripRoutes);
  for (int64_t first = 0; first < strips; first += kMatrixStrips) {
    const int64_t count = strips - first < kMatrixStrips ? strips - first : kMatrixStrips;
    const int64_t left = rows - first * kStripRoutes, most = count * kStripRoutes;
    const uint8_t* h = intermediate_strips(s, expert) + first * strip_bytes(c.intermediate);
    const MatrixCall call = {tiles, num_tiles, h, int(count), int(left < most ? left : most), nullptr,
                             s.h_exact + s.h_first[expert] + first};
    s.unit->multiply(call, scratch.matrix);
    for (int i = 0; i < num_tiles; ++i)
      s.unit->join(call, i, scratch.matrix, partial[i] + s.start[expert] + first * kStripRoutes);
  }
}

}  // namespace
