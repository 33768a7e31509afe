// One slab of tokens of a call: what its threads share. Included by moe.cpp alone.
#pragma once
#include <algorithm>
#include <atomic>

#include "operands.h"
#include "scratch.h"

namespace {

constexpr int kMostDownTiles = 16;

struct ThreadScratch {
  TileScratch tile;
  float (*gate)[16];
  float (*up)[16];
  float (*partial[kMostDownTiles])[16];  // [routes of the slab][16] of an item's tiles
  MatrixScratch matrix;
};

struct Slab {
  const MxkMoe* call;
  const Isa* isa;
  int64_t first, tokens, routes, active, block, threads;
  int64_t* position;  // [tokens * k]: place in expert order, or -1
  float* weight;      // [tokens * k]
  int64_t* start;     // [experts + 1]
  int64_t* experts;   // [active]
  int64_t* token;     // [routes], expert order
  Vector* x;          // [tokens]
  Vector* h;          // [routes]
  const Vector** x_of;  // [routes]
  const Vector** h_of;  // [routes]
  float** h_row;      // [routes]
  char* x_memory;
  char* h_memory;     // rows of vector_bytes(I): h, then its chunks; or the strips of an expert, from a row on
  // Of experts on a matrix unit (matrix.h); null: none.
  const MatrixUnit* unit;
  int64_t least_rows;  // routes that an expert on the unit has
  uint8_t* by_unit;   // [experts]
  int64_t* h_first;   // [experts + 1]: rows of h_memory before an expert's
  int64_t* x_first;   // [experts + 1]: strips of tokens before an expert's
  uint8_t* x_strips;
  uint16_t *x_exact, *h_exact;  // vectors of a strip that take exact.h; of h: an expert's from h_first on
  Vector* raw;        // [routes]: the tokens of experts on the unit
  const Vector** raw_of;  // [routes]
  int64_t down_tiles;  // output tiles of one item of the last phase
  ThreadScratch* scratch;
  std::atomic<int64_t> claimed[5];
};

}  // namespace
