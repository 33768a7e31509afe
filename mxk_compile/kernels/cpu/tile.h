// What the scheduler (moe.cpp) asks of an instruction set: prepare vectors, multiply one tile, activate.
//
// Activations are held as block fixed point: every 32 values of a vector share a power of two and become integers of
// 2 (16 bit) or 3 (23 bit) signed base-256 digits, so that byte dot products multiply them with the weight codes
// exactly, in int32. A vector takes 3 digits when 2 would leave more than 2^-10 of its typical magnitude behind, or, a
// token's, would drown a group beside its largest value; vectors that 3 would drown, or that hold inf, NaN, or a largest
// magnitude outside 2^+-90, take 0 digits: plain fp32 arithmetic (exact.h), as do weight rows with scales that need IEEE
// special cases. The intermediate is kept in fp32 until it becomes digits: a rounding to
// bf16 would alone cost as much accuracy (1.7e-3) as the one that the result cannot avoid.
// A result depends on its token and row only, never on T, routing or threads; with a matrix unit (below) also on whether its
// expert has enough rows to take it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>

#include "abi.h"

constexpr int kTileRows = 16;    // output rows of a tile: the int32 lanes of a 512-bit register
constexpr int kGroup = 32;       // values that share an activation exponent; the unit of all scales
constexpr int kTileTokens = 64;  // vectors of one tile call: 16 KiB of sums stay in the first cache

constexpr int kSmallest = 127 - 90, kLargest = 127 + 90;  // biased exponents of largest values that digits are made of

// A prepared vector. Its digits stand in chunks of 4 groups, with the layout
//   int8   [digit, most significant first][plane][4 groups][16]   plane 0: values 0 2 4 ..., plane 1: 1 3 5 ... of a group
//   fp32   [4 groups]   value of one unit of the integers
//   int32  [4 groups]   minus the sum of the integers times Coding::offset; as fp32 with zero points
// since 16 packed bytes hold a group's even values in their low and its odd ones in their high nibbles.
struct Vector {
  const void* raw;  // the values themselves: bf16, or fp32 if `wide`; fp32 values give way to their chunks
  bool wide;
  int num_digits;  // 0: use raw; -1: raw too, but a matrix unit takes it; 1: int16 [4 groups][32] (isa_baseline.cpp)
  const uint8_t* chunks;
};

inline int64_t groups_of(int64_t n) { return (n + kGroup - 1) / kGroup; }
inline int64_t chunks_of(int64_t n) { return (n + 4 * kGroup - 1) / (4 * kGroup); }
constexpr int kPlane = 4 * kGroup / 2, kDigit = 2 * kPlane;  // bytes
constexpr int chunk_bytes(int digits) { return (digits == 1 ? 2 : digits) * kDigit + 32; }
// Memory of the chunks of n values, or of n fp32 values, whichever is more: an odd number of cache lines, so that
// vectors do not share cache sets.
inline int64_t vector_bytes(int64_t n) { return (chunks_of(n) * 4 * kGroup * 4) | 64; }

// How codes become unsigned bytes for the dot product: value = (byte - offset) * unit * scale, so that the offset needs
// one correction per group. With zero points the byte is the code and the correction is multiplied by the zero point.
struct Coding {
  int32_t offset;
  float unit;
  bool zero_points;
};
inline Coding coding_of(int64_t format, bool zero_points) {
  if (format == MXK_MXFP4) return {12, 0.5f, false};  // twice the E2M1 values, -12 .. 12
  return {zero_points ? 1 : 8, 1.0f, zero_points};
}

// Up to 16 output rows of one packed matrix. Not transposed: `weight` is the first row's line and *_step lead from row to
// row. Transposed (pack_dim "output"): `weight`, `scale`, `zero` are line 0 of the matrix and *_step lead from line to
// line; the tile's rows are the columns column0, column0 + column_step, ...
struct Tile {
  const uint8_t* weight;
  const uint8_t* scale;
  const uint8_t* zero;  // null: none
  const uint8_t* bias;  // of the first row; null: none
  int64_t weight_step, scale_step, zero_step, bias_step;  // bytes
  int64_t scale_dtype, zero_dtype, bias_dtype;
  int64_t format;
  int64_t columns;  // values of a row: the reduced dimension
  int64_t group;    // values that share a scale: a multiple of 32, or >= columns
  int64_t column0, column_step;
  bool transposed;
  int rows;
  const Tile* next;  // its place in the next call's tiles; null: unknown
};

inline int64_t scales_capacity(int64_t columns) { return (groups_of(columns) + 31) / 32 * 32; }

// Scratch of one thread.
struct TileScratch {
  float* scales;   // [2 tiles][scales_capacity(columns)][16]
  uint8_t* zeros;  // the same
  float* row;      // one dequantised row
  float* sums;     // [2 tiles][kTileTokens][4][16]
};

// Per call constants of the activation.
struct Activation {
  int64_t kind;
  float alpha, limit;
};

// ---- a matrix unit: many vectors at once, the columns of bf16 tiles ------------------------------------------------------
//
// A strip is 16 columns of all groups: bf16 [groups][16 pairs][16 columns][2], pair 4 l + w of a group: its values 8 w + l
// and 8 w + 4 + l. A token is a column. A route's intermediate is two columns, 8 apart, whose sum it is: the upper 8
// significant bits, and the next 8.
constexpr int kStripTokens = 16, kStripRoutes = 8;
inline int64_t strip_bytes(int64_t n) { return groups_of(n) * 1024; }
constexpr int kMatrixStrips = 12;  // strips of one call: 24 KiB of sums

struct MatrixScratch {  // of one thread
  uint8_t* tiles;         // [kMatrixTileBytes]: unpacked weights
  float* sums;            // [tiles][strips][16 rows][16 columns]
  float *scales, *zeros;  // [2 tiles][16][row_scales]: INT4
  int64_t row_scales;
  float *row, *column;    // one dequantised row, one intermediate
};
constexpr int kMatrixTileBytes = 32 * 1024;

struct MatrixCall {
  const Tile* tiles;  // 1 or 2
  int num_tiles;
  const uint8_t* strips;
  int num_strips;
  int columns;           // vectors in the strips
  const Vector* const* tokens;  // the vectors themselves; null: an intermediate, two columns a vector
  const uint16_t* exact;        // [strips]: bit mask of vectors that take exact.h
};

struct MatrixUnit {
  int64_t least_rows[3];  // by MxkFormat: experts with as many routes take the unit
  void (*begin)();        // on each thread, around its work
  void (*end)();
  // Tokens to a strip; returns the mask of those with which the unit does not compute as exact.h does.
  uint16_t (*pack)(const uint8_t* const* tokens, int count, int64_t n, uint8_t* strip);
  void (*multiply)(const MatrixCall&, const MatrixScratch&);
  // From the sums of a gate and an up tile, rows 16 `step` ..., to the strips of the intermediate; `end`: its last rows.
  void (*activate)(const Activation&, const MatrixCall&, int64_t step, bool end, int64_t n, uint8_t* strips,
                   const MatrixScratch&);
  uint16_t (*tiny)(const uint8_t* strip, int64_t n);  // mask of an intermediate's vectors that the unit would flush
  void (*join)(const MatrixCall&, int tile, const MatrixScratch&, float (*out)[16]);  // sums + bias to out[vector][16]
};

struct Isa {
  const char* name;
  // Writes the chunks of n values (bf16, or fp32 if `wide`) to `memory`, which may be where they stand.
  void (*prepare)(const void* raw, bool wide, int64_t n, const Coding& coding, void* memory, Vector* out);
  // out[i][vector][16] = vectors x rows + bias of tiles[i], count <= kTileTokens; num_tiles 1 or 2, of equal shape.
  void (*tiles)(const Tile* tiles, int num_tiles, const Vector* const* vectors, int count, const TileScratch& scratch,
                float (*const* out)[16]);
  // h[token][0..rows) = activation(gate, up).
  void (*activate)(const Activation&, const float (*gate)[16], const float (*up)[16], int count, int rows, float* const* h);
  const MatrixUnit* matrix;  // null: none
};

const Isa* isa_baseline();
const Isa* isa_portable();  // isa_baseline() where this machine has no 128-bit byte shuffle
const Isa* isa_avx2();    // null when this build or machine lacks it
const Isa* isa_avx512();  // null when this build or machine lacks it
const Isa* isa_amx();     // null when this build, machine or system lacks it; else avx512 and a matrix unit
