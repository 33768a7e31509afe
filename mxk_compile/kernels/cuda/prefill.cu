// Many tokens: expert GEMMs as tensor-core products from the packed bytes, for rows sorted by expert.
//
//   gate_up   H[r, i] = bf16(activate(w13[gate(i)] . X[r] + bias, w13[up(i)] . X[r] + bias))
//   down      Y[r, n] = w2[n] . H[r] + bias                                   (fp32; routing.cu sums it in slot order)
//   project   out[target(r), n] = bf16(w[n] . X[r])                           (one GEMM by itself, MXK_PROJECT)
//
// Operands. Weights as in ops/moe.py: rows of K / 2 bytes and scales of a format of formats.cuh, any row and expert
// stride. X and H are bf16 in blocks of 64 columns: [block][row][128 bytes], so that a tile of one block is one contiguous
// piece, which a bulk copy brings to shared memory as WGMMA's 128-byte-swizzled operand: 16-byte chunk c of a row lies at
// c ^ (row % 8). Inside a block, columns are permuted: position 16s + 8h + 2q + b holds column
// 16q + 8(s / 2) + 2(s % 2) + h + 4b. This is the order in which lane q of four finds its 16 columns in the packed words
// (pairs are nibbles j and j + 4 of a word), so a weight is unpacked into the A register that multiplies it: no shuffle, and
// no bf16 weight in shared memory. Both writers of blocks (routing.cu for X, the epilogue below for H) write that order.
//
// Schedule. Weights are the M side, so 64 rows meet up to TOKENS tokens: a block of 3 warpgroups owns 256 weight rows x up
// to TOKENS tokens; a launch for each of a few sizes takes the tiles of that size (rows.cuh). The first warpgroup fills a
// ring of stages of SPAN blocks of columns: activations by bulk copies, packed rows by 16-byte copies, and scales beside
// them, as loads by the consumers took a third of their time. The two others hold 2 x 64 rows each, unpack the next steps
// while the tensor cores run the last ones, and drift apart by the depth of the ring, which hides their epilogues. A gate
// row and its up row are rows g and g + 8 of one fragment, so the activation needs no exchange. A persistent grid walks
// (token tile, row tile), row tiles fastest: the tiles of one expert run together, and a launch takes its weights from
// device memory once. Producers look a tile ahead, and hand on what its consumers want to know at the end (List).
//
// Limits: K and I multiples of 32, weight rows on 16 bytes.
#include "formats.cuh"
#include "wgmma.cuh"

constexpr int BLOCK = 64;                 // columns of a block: 128 bytes of bf16, the swizzle's span
constexpr int BLOCK_BYTES = 2 * BLOCK;    // of a row
#ifndef MXK_TOKENS
#define MXK_TOKENS 128
#endif
#ifndef MXK_SCALE_ALIGNMENT
#define MXK_SCALE_ALIGNMENT 1  // of rows of scales, in bytes
#endif
#ifndef MXK_PROJECT
#define MXK_PROJECT 0
#endif
constexpr int TOKENS = MXK_TOKENS;        // of a tile: wgmma's N, 16..176 in steps of 16
constexpr int ROWS = 256;                 // weight rows of a tile
constexpr int PACKED_BYTES = BLOCK / 2;   // of a block of one weight row
// Blocks of a stage: 128 bytes of a row, a line of L2, where bytes bind; 64 where activations need the room.
constexpr int SPAN = TOKENS <= 64 ? 4 : 2;
// Steps of 16 columns whose products are started at once: fewer waits, but more registers for fragments.
constexpr int GROUP_STEPS = TOKENS <= 128 ? 2 : 1;
constexpr int SPAN_BYTES = SPAN * PACKED_BYTES;
constexpr int TOKEN_BYTES = TOKENS * BLOCK_BYTES;  // of one block
constexpr int WEIGHTS = SPAN * TOKEN_BYTES;        // where they lie in a stage
// Scales of groups of 32 that fit pass through shared memory; the others are read where they are used.
constexpr bool STAGED = GROUP_LOG == 5 && SCALE_BYTES <= 2 && !MXK_ZEROS;
constexpr int SCALES = WEIGHTS + ROWS * SPAN_BYTES;
constexpr int ROW_SCALES = STAGED ? 2 * SPAN * SCALE_BYTES : 0;  // bytes of a row and stage: 4 to 16
constexpr int STAGE_BYTES = (SCALES + ROWS * ROW_SCALES + 1023) / 1024 * 1024;
// Few tokens leave registers for a second block, whose unpacking fills the first's waits.
constexpr int BLOCKS = STAGED && TOKENS <= 32 ? 2 : 1;  // of a multiprocessor
constexpr int RING_BYTES = 222 * 1024 / BLOCKS - 1024;
constexpr int STAGES = RING_BYTES / STAGE_BYTES < 8 ? RING_BYTES / STAGE_BYTES : 8;
constexpr int COPIERS = 64;               // threads that copy weights
constexpr int SCALERS = STAGED ? 32 : 0;  // threads that copy scales
// Tiles whose lists are in use: the producers may be a tile a stage ahead, and both warpgroups at the end of one.
constexpr int LISTS = STAGES + 2;
constexpr int PRODUCERS = 128;
constexpr int THREADS = PRODUCERS + 256;  // and two warpgroups of consumers
constexpr int CONSUMER_WARPS = 8;
// Together at most what a block starts with, THREADS times 80 or 168, or setmaxnreg waits for ever.
constexpr int PRODUCER_REGISTERS = BLOCKS == 2 ? 48 : TOKENS <= 144 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = BLOCKS == 2 ? 96 : TOKENS <= 144 ? 224 : 232;
static_assert(PRODUCER_REGISTERS * PRODUCERS + CONSUMER_REGISTERS * 256 <= (BLOCKS == 2 ? 80 : 168) * THREADS);

enum Product { GATE_UP, DOWN, PROJECT };

struct Gemm {
  Operand weight, scale, zero, bias;
  const u8* rows;      // activations, in blocks
  u8* out;             // gate_up: H in blocks; down: Y [rows][outputs] fp32; project: bf16, rows out_stride apart
  const int4* tiles;   // {expert, first row, rows, -}, rows <= TOKENS a multiple of 16
  const i32* num_tiles;
  const i32* target;   // project: row of out for each row, -1 for none
  i64 out_stride;      // elements
  i32 total_rows;      // of the blocked buffers
  i32 blocks;          // of the input columns, rounded up
  i32 columns;         // K, or I
  i32 outputs;         // gate_up: I; down: K; project: N
  i32 row_step, gate_row, up_row, up_expert;  // row of output i: gate i * row_step + gate_row, up of expert + up_expert
  i32 bias_dtype, activation;
  float alpha, limit;
  i32 chained;  // whether the launch before is the same product for other tiles, which this one need not wait for
  i32 wide;     // project: whether out takes 16-byte stores
};

// What the consumers of a tile want to know at its end, from the producers.
struct List {
  int4 tile;
  i32 target[TOKENS];
};

__device__ __forceinline__ u64 operand_descriptor(u32 address) {  // K-major, 128-byte swizzle, 8 rows = 1024 bytes
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(1) << 16) |
         ((address & 0x3FFFF) >> 4);
}

// Scales of one block of a lane's four weight rows: both units, and rows g and g + 8 (gate and up) of a fragment.
struct Scales {
  Scale of[2][2];
};

struct ScaleRows {  // where the lane reads those that are not staged
  const u8* first[2];
  const u8* zeros[2];
  i32 unit, zero_unit;  // from the first unit's to the second's, bytes
  i32 columns[2];       // of a unit, none for a row beyond the matrix

  __device__ __forceinline__ void load(Scales& scales, int block, int quarter) const {
    if constexpr (STAGED) return;
    const int column = BLOCK * block + 16 * quarter;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales.of[u][half] = load_scale(first[half] + u * unit, zeros[half] + u * zero_unit,
                                        GROUP_LOG == 31 ? 0 : column >> GROUP_LOG, column < columns[u]);
    }
  }
};

struct Ring {
  u32 data, full, empty;  // shared addresses
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(u32 count) {
    stage += count;
    parity ^= stage / STAGES & 1;
    stage %= STAGES;
  }
  __device__ __forceinline__ u32 here() const { return data + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 filled() const { return full + 8 * stage; }
  __device__ __forceinline__ u32 emptied() const { return empty + 8 * stage; }
};

// A stage's pieces of a row, one a block, are turned so that eight rows at once hit no bank twice.
__device__ __forceinline__ u32 turn_of(int slot) { return SPAN == 4 ? slot % 4 : slot / 2 % 2; }

// Where a lane reads in a stage.
struct Lane {
  u32 weights, scales, selector;
  __device__ __forceinline__ Lane(int slot, int quarter) {
    weights = WEIGHTS + slot * SPAN_BYTES + turn_of(slot) * PACKED_BYTES + 8 * quarter;
    scales = SCALES + slot * ROW_SCALES;
    selector = quarter < 2 ? IS_MXFP4 ? 0x4440 : 0x1010 : IS_MXFP4 ? 0x4441 : 0x3232;
  }
};

using Fragment = u32[GROUP_STEPS][2][4];  // of each step and unit

// BLOCK_OF_STAGE: 0 to SPAN - 1. Slots of units and halves are 32 rows apart.
template <int BLOCK_OF_STAGE>
__device__ __forceinline__ void multiply_block(float (&sum)[2][TOKENS / 2], Fragment (&fragment)[2],
                                               const Scales& scales, u32 stage, const Lane& lane, u32 used, bool leader,
                                               const Constants& constants) {
  uint2 words[2][2];
  Scale ready[2][2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rows = (2 * unit + half) * 32;
      words[unit][half] = load_shared_8(((stage + lane.weights) ^ (BLOCK_OF_STAGE * PACKED_BYTES)) + rows * SPAN_BYTES);
      if constexpr (STAGED) {
        const u32 at = stage + lane.scales + rows * ROW_SCALES + 2 * SCALE_BYTES * BLOCK_OF_STAGE;
        if constexpr (IS_MXFP4) {
          ready[unit][half].bits = scale_pair(__byte_perm(load_shared_2(at), 0, lane.selector));
        } else {
          ready[unit][half].bits = __byte_perm(load_shared_4(at), 0, lane.selector);
        }
        if constexpr (!IS_MXFP4 && MXK_SCALES == FP16)
          ready[unit][half] = make_ready(Scale{ready[unit][half].bits & 0xFFFF, 0});
      } else {
        ready[unit][half] = make_ready(scales.of[unit][half]);
      }
    }
  }
  const u64 descriptor = operand_descriptor(stage + BLOCK_OF_STAGE * TOKEN_BYTES);
#pragma unroll
  for (int first = 0; first < 4; first += GROUP_STEPS) {
    wgmma_wait<1>();  // of the products that read the fragments written next, all but the group before
    if (BLOCK_OF_STAGE == 0 && first == GROUP_STEPS && leader && used != ~0u) barrier_arrive(used);
    Fragment& group = fragment[first / GROUP_STEPS & 1];
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
      const int step = first + i;
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 word = step < 2 ? words[unit][half].x : words[unit][half].y;
          const Scale& scale = ready[unit][half];
          group[i][unit][half] = step & 1 ? unpack<2>(word, scale, constants) : unpack<0>(word, scale, constants);
          group[i][unit][half + 2] = step & 1 ? unpack<3>(word, scale, constants) : unpack<1>(word, scale, constants);
        }
      }
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit)
        Wgmma<TOKENS>::run(sum[unit], group[i][unit], descriptor + 2 * (first + i));
    }
    wgmma_commit();
  }
}

__device__ __forceinline__ void multiply(float (&sum)[2][TOKENS / 2], const Gemm& p, const ScaleRows& rows, int quarter,
                                         Ring ring, int slot, bool leader) {
  const Constants constants;
  const Lane lane(slot, quarter);
  Fragment fragment[2];
  Scales scales[2];
  rows.load(scales[0], 0, quarter);
  rows.load(scales[1], 1, quarter);
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sum[unit][i] = 0.0f;
  }
  u32 used = ~0u;  // empty-barrier of the stage before, still read by the tensor cores
#pragma unroll 1
  for (int block = 0; block < p.blocks; block += SPAN) {
    const u32 stage = ring.here();
    barrier_wait(ring.filled(), ring.parity);
    multiply_block<0>(sum, fragment, scales[0], stage, lane, used, leader, constants);
    rows.load(scales[0], block + 2, quarter);
    if (block + 1 < p.blocks) multiply_block<1>(sum, fragment, scales[1], stage, lane, used, leader, constants);
    rows.load(scales[1], block + 3, quarter);
    if constexpr (SPAN == 4) {
      if (block + 2 < p.blocks) multiply_block<2>(sum, fragment, scales[0], stage, lane, used, leader, constants);
      rows.load(scales[0], block + 4, quarter);
      if (block + 3 < p.blocks) multiply_block<3>(sum, fragment, scales[1], stage, lane, used, leader, constants);
      rows.load(scales[1], block + 5, quarter);
    }
    used = ring.emptied();
    ring.next();
  }
  wgmma_wait<0>();
  if (leader) barrier_arrive(used);
}

// Which weight rows a fragment's rows g and g + 8 (half 0 and 1) of a warp in `unit` are.
//   gate_up   of a block of 64 outputs those whose permuted places are neighbours (see above); halves are gate and up
//   down      16 neighbouring rows a fragment
//   project   so that a lane of four ends up with 8 neighbouring outputs of a token: 16 bytes
template <Product PRODUCT>
struct Tile {
  static constexpr int OUTPUTS = PRODUCT == GATE_UP ? ROWS / 2 : ROWS;
  static constexpr int GROUP = OUTPUTS / 2;  // of a warpgroup
  static constexpr int UNIT = PRODUCT == GATE_UP ? 8 : PRODUCT == DOWN ? 64 : 4;
  static constexpr int WARP = PRODUCT == GATE_UP ? 1 : PRODUCT == DOWN ? 16 : 32;
  static constexpr int HALF = PRODUCT == DOWN ? 8 : 2;

  __device__ static int rows_of(const Gemm& p) { return (p.outputs + OUTPUTS - 1) / OUTPUTS; }
  // From the output of row g in the first warp, unit and warpgroup.
  __device__ static constexpr int distance(int group, int unit, int warp) {
    return GROUP * group + UNIT * unit + WARP * warp;
  }
  __device__ static int first_output(int row_tile, int g) {
    return row_tile * OUTPUTS +
           (PRODUCT == GATE_UP ? 16 * (g / 2) + 4 * (g % 2) : PRODUCT == DOWN ? g : 8 * (g / 2) + g % 2);
  }
  __device__ static i64 row(const Gemm& p, int output, int half) {
    if (PRODUCT != GATE_UP) return output + HALF * half;
    return static_cast<i64>(output) * p.row_step + (half ? p.up_row : p.gate_row);
  }
  __device__ static int expert(const Gemm& p, int expert, int half) {
    return PRODUCT == GATE_UP && half ? expert + p.up_expert : expert;
  }
  __device__ static int row_step(const Gemm& p) { return PRODUCT == GATE_UP ? p.row_step : 1; }
};

template <Product PRODUCT>
__device__ __forceinline__ void compute_tile(const Gemm& p, const List& list, int row_tile, const Ring& ring) {
  using Rows = Tile<PRODUCT>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = (threadIdx.x - PRODUCERS) / 128;
  const int quarter = lane % 4, g = lane / 4;
  const int output_base = row_tile * Rows::OUTPUTS + group * Rows::GROUP;
  if (output_base >= p.outputs) {  // nothing here for this warpgroup: let the ring pass
    Ring passing = ring;
    for (int block = 0; block < p.blocks; block += SPAN) {
      barrier_wait(passing.filled(), passing.parity);
      if (lane == 0) barrier_arrive(passing.emptied());
      passing.next();
    }
    return;
  }
  barrier_wait(ring.filled(), ring.parity);  // the list is there too
  const int4 tile = list.tile;
  const int expert = tile.x, first_row = tile.y;
  ScaleRows rows;
  int output[2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    output[unit] = Rows::first_output(row_tile, g) + Rows::distance(group, unit, 0) + Rows::WARP * warp;
    rows.columns[unit] = output[unit] < p.outputs ? p.columns : 0;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of = Rows::expert(p, expert, half);
    const i64 row = Rows::row(p, output[0], half);
    rows.first[half] = p.scale.expert(of) + row * p.scale.row_stride;
    rows.zeros[half] = MXK_ZEROS ? p.zero.expert(of) + row * p.zero.row_stride : nullptr;
  }
  rows.unit = Rows::UNIT * Rows::row_step(p) * static_cast<i32>(p.scale.row_stride);
  rows.zero_unit = MXK_ZEROS ? Rows::UNIT * Rows::row_step(p) * static_cast<i32>(p.zero.row_stride) : 0;
  float sum[2][TOKENS / 2];
  multiply(sum, p, rows, quarter, ring, 128 * group + 8 * warp + g, lane == 0);

  float bias[2][2] = {};
  if (PRODUCT != PROJECT && p.bias.present()) {
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (output[unit] >= p.outputs) continue;
        bias[unit][half] = load_float(p.bias.expert(Rows::expert(p, expert, half)),
                                      Rows::row(p, output[unit], half), p.bias_dtype);
      }
    }
  }
  if constexpr (PRODUCT == GATE_UP) {
    u8* block = p.out + static_cast<i64>(output_base / BLOCK) * p.total_rows * BLOCK_BYTES;
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        if (8 * j >= tile.z) break;  // the next expert's rows, or nobody's
        const float* d = sum[unit] + 4 * j;
        const float low = activate(d[0] + bias[unit][0], d[2] + bias[unit][1], p.activation, p.alpha, p.limit);
        const float high = activate(d[1] + bias[unit][0], d[3] + bias[unit][1], p.activation, p.alpha, p.limit);
        const u32 pair = transpose_8x8(pack_bf16x2(low, high));  // token lane / 4, outputs 2q and 2q + 1 of the chunk
        const int row = first_row + 8 * j + g, chunk = 4 * unit + warp;
        *reinterpret_cast<u32*>(block + static_cast<i64>(row) * BLOCK_BYTES + (chunk ^ (row & 7)) * 16 + quarter * 4) =
            pair;
      }
    }
  } else if constexpr (PRODUCT == DOWN) {
    float* out = reinterpret_cast<float*>(p.out);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      if (output[unit] >= p.outputs) continue;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        if (8 * j >= tile.z) break;  // the next expert's rows, or nobody's
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i64 row = first_row + 8 * j + 2 * quarter + i % 2;
          out[row * p.outputs + output[unit] + i / 2 * 8] = sum[unit][4 * j + i] + bias[unit][i / 2];
        }
      }
    }
  } else {
    const int at = output_base + 32 * warp + 8 * quarter;
    u16* out = reinterpret_cast<u16*>(p.out) + at;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      if (8 * j >= tile.z) break;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = transpose_8x8(pack_bf16x2(sum[i / 2][4 * j + i % 2 * 2], sum[i / 2][4 * j + i % 2 * 2 + 1]));
      const int row = list.target[8 * j + g];
      if (row < 0) continue;
      u16* to = out + row * p.out_stride;
      if (p.wide && at + 8 <= p.outputs) {
        *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (at + i < p.outputs) to[i] = static_cast<u16>(pairs[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

// Activations of a tile, by one thread.
__device__ __forceinline__ void feed_tokens(const Gemm& p, const int4& tile, Ring ring) {
  const u8* from = p.rows + static_cast<i64>(tile.y) * BLOCK_BYTES;
  const i64 step = static_cast<i64>(p.total_rows) * BLOCK_BYTES;
  for (int block = 0; block < p.blocks; block += SPAN) {
    const int count = min(SPAN, p.blocks - block);
    barrier_wait(ring.emptied(), ring.parity);
    barrier_arrive_expect(ring.filled(), count * TOKEN_BYTES);
    for (int i = 0; i < count; ++i, from += step)
      bulk_copy(ring.here() + i * TOKEN_BYTES, from, TOKEN_BYTES, ring.filled());
    ring.next();
  }
}

// Targets of a tile's rows, by a warp, which asks for them a tile ahead.
struct Targets {
  static constexpr int EACH = (TOKENS + 31) / 32;
  i32 of[EACH];

  __device__ __forceinline__ void load(const Gemm& p, const int4& tile, int lane) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) of[i] = 32 * i + lane < tile.z ? p.target[tile.y + 32 * i + lane] : -1;
  }
  __device__ __forceinline__ void store(List& list, int lane) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (32 * i + lane < TOKENS) list.target[32 * i + lane] = of[i];
  }
};

// Packed rows of a tile, by COPIERS threads: 2 * SPAN of them copy what a stage has of a row.
template <Product PRODUCT>
__device__ __forceinline__ void feed_weights(const Gemm& p, const int4& tile, int row_tile, int t, Ring ring) {
  using Rows = Tile<PRODUCT>;
  constexpr int CHUNKS = 2 * SPAN, HALVES = COPIERS / 8 / CHUNKS;  // of a row; halves that are copied at once
  const int chunk = t % CHUNKS, g = t / CHUNKS % 8, half = t / (8 * CHUNKS);
  const int output = Rows::first_output(row_tile, g);
  const i64 stride = p.weight.row_stride * Rows::row_step(p);
  const u8* from[2 / HALVES];
#pragma unroll
  for (int i = 0; i < 2 / HALVES; ++i) {
    const int h = HALVES == 2 ? half : i;
    from[i] = p.weight.expert(Rows::expert(p, tile.x, h)) + Rows::row(p, output, h) * p.weight.row_stride + 16 * chunk;
  }
  const int rest = p.outputs - output;
  const u32 to = WEIGHTS + (32 * half + g) * SPAN_BYTES + ((chunk / 2) ^ turn_of(g)) * PACKED_BYTES + chunk % 2 * 16;
  int columns = p.columns - 32 * chunk;
  for (int block = 0; block < p.blocks; block += SPAN) {
    barrier_wait(ring.emptied(), ring.parity);
    const u32 target = ring.here() + to;
    const int limit = columns > 0 ? rest : 0;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
#pragma unroll 1
      for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
        for (int i = 0; i < 2 / HALVES; ++i) {
          const u8* row = from[i] + Rows::distance(group, 0, 0) * stride;
          if (unit) row += Rows::UNIT * stride;
#pragma unroll
          for (int warp = 0; warp < 4; ++warp, row += Rows::WARP * stride)
            copy_16(target + (128 * group + 64 * unit + 32 * i + 8 * warp) * SPAN_BYTES, row,
                    Rows::distance(group, 0, warp) + Rows::UNIT * unit < limit ? 16 : 0);
        }
      }
    }
    barrier_arrive_after_copies(ring.filled());
#pragma unroll
    for (int i = 0; i < 2 / HALVES; ++i) from[i] += SPAN_BYTES;
    columns -= SPAN * BLOCK;
    ring.next();
  }
}

// Scales of a tile, by SCALERS threads: eight rows each.
template <Product PRODUCT>
__device__ __forceinline__ void feed_scales(const Gemm& p, const int4& tile, int row_tile, int t, Ring ring) {
  using Rows = Tile<PRODUCT>;
  const int g = t % 8, warp = t / 8;
  const int output = Rows::first_output(row_tile, g) + Rows::WARP * warp;
  i32 stride = static_cast<i32>(p.scale.row_stride) * Rows::row_step(p);
  const u8* from[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    from[half] = p.scale.expert(Rows::expert(p, tile.x, half)) + Rows::row(p, output, half) * p.scale.row_stride;
  const int rest = p.outputs - output;
  const u32 to = SCALES + (8 * warp + g) * ROW_SCALES;
  int groups = (p.columns + 31) / 32;
  if constexpr (MXK_SCALE_ALIGNMENT >= 4) {
    constexpr int SIZE = MXK_SCALE_ALIGNMENT < ROW_SCALES ? MXK_SCALE_ALIGNMENT : STAGED ? ROW_SCALES : 4;
    for (int block = 0; block < p.blocks; block += SPAN) {
      barrier_wait(ring.emptied(), ring.parity);
      const u32 target = ring.here() + to;
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {  // group and unit
        const int away = Rows::GROUP * (j / 2) + Rows::UNIT * (j % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int at = 0; at < ROW_SCALES; at += SIZE) {
            const int left = groups * SCALE_BYTES - at;
            copy_small<SIZE>(target + (64 * j + 32 * half) * ROW_SCALES + at, from[half] + away * stride + at,
                             away < rest ? max(0, min(SIZE, left)) : 0);
          }
        }
      }
      barrier_arrive_after_copies(ring.filled());
      from[0] += ROW_SCALES, from[1] += ROW_SCALES, groups -= 2 * SPAN;
      ring.next();
    }
  } else {
    // Too narrow for copies: through registers, a stage ahead.
    constexpr int PART = MXK_SCALE_ALIGNMENT == 2 ? 2 : 1;
    u32 next[4][2][STAGED ? ROW_SCALES / 4 : 1];
    const auto load = [&] {
      asm volatile("" : "+r"(stride));  // else the compiler keeps all addresses, and spills them
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int away = Rows::distance(j / 2, j % 2, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int at = 0; at < ROW_SCALES; at += PART) {
            u32 value = 0;
            if (away < rest && at < groups * SCALE_BYTES) {
              const u8* source = from[half] + away * stride + at;
              value = PART == 2 ? __ldg(reinterpret_cast<const u16*>(source)) : __ldg(source);
            }
            u32& word = next[j][half][at / 4];
            word = at % 4 == 0 ? value : word | value << (8 * (at % 4));
          }
        }
      }
      from[0] += ROW_SCALES, from[1] += ROW_SCALES, groups -= 2 * SPAN;
    };
    load();
    for (int block = 0; block < p.blocks; block += SPAN) {
      barrier_wait(ring.emptied(), ring.parity);
      const u32 target = ring.here() + to;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int word = 0; word < ROW_SCALES / 4; ++word)
          store_shared_4(target + 32 * i * ROW_SCALES + 4 * word, next[i / 2][i % 2][word]);
      }
      barrier_arrive(ring.filled());
      load();
      ring.next();
    }
  }
}

template <Product PRODUCT>
__device__ __forceinline__ void gemm(const Gemm& p) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ List lists[LISTS];
  const u32 data = shared_address(shared), barriers = data + STAGES * STAGE_BYTES;
  Ring ring{data, barriers, barriers + 8 * STAGES};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(ring.full + 8 * stage, COPIERS + SCALERS + 1);
      barrier_init(ring.empty + 8 * stage, CONSUMER_WARPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // A chained launch begins when the one before has waited, so its input is there; it waits at its end, so that what
  // comes after both waits for both.
  if (!p.chained) wait_for_earlier_kernels();
  let_later_kernels_start();
  const int row_tiles = Tile<PRODUCT>::rows_of(p);
  const int total = *p.num_tiles * row_tiles;

  const int stages = (p.blocks + SPAN - 1) / SPAN;
  int list = 0;
  const auto next_tile = [&](int& work) {
    work += gridDim.x;
    ring.skip(stages);
    list = list + 1 == LISTS ? 0 : list + 1;
  };
  if (threadIdx.x < PRODUCERS) {
    give_registers<PRODUCER_REGISTERS>();
    ring.parity = 1;  // empty at first
    const int warp = threadIdx.x / 32;
    // Each tile is looked up while the one before is fed.
    const auto look_up = [&](int work) { return work < total ? p.tiles[work / row_tiles] : make_int4(0, 0, 0, 0); };
    int4 following = look_up(blockIdx.x);
    if (warp == 1 || warp == 2) {
      for (int work = blockIdx.x; work < total; next_tile(work)) {
        const int4 tile = following;
        following = look_up(work + gridDim.x);
        feed_weights<PRODUCT>(p, tile, work % row_tiles, threadIdx.x - 32, ring);
      }
    } else if (STAGED && warp == 3) {
      for (int work = blockIdx.x; work < total; next_tile(work)) {
        const int4 tile = following;
        following = look_up(work + gridDim.x);
        feed_scales<PRODUCT>(p, tile, work % row_tiles, threadIdx.x - 96, ring);
      }
    } else if (warp == 0) {
      const int lane = threadIdx.x;
      Targets coming;
      if constexpr (PRODUCT == PROJECT) coming.load(p, following, lane);
      for (int work = blockIdx.x; work < total; next_tile(work)) {
        const int4 tile = following;
        following = look_up(work + gridDim.x);
        // The list is there for who sees the first stage's arrival, which thread 0 makes.
        if (lane == 0) lists[list].tile = tile;
        if constexpr (PRODUCT == PROJECT) {
          coming.store(lists[list], lane);
          coming.load(p, following, lane);
        }
        __threadfence_block();
        __syncwarp();
        if (lane == 0) feed_tokens(p, tile, ring);
        __syncwarp();
      }
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    for (int work = blockIdx.x; work < total; next_tile(work))
      compute_tile<PRODUCT>(p, lists[list], work % row_tiles, ring);
  }
  if (p.chained) wait_for_earlier_kernels();
}

__device__ __constant__ extern const int prefill_shared = STAGES * (STAGE_BYTES + 2 * 8);
__device__ __constant__ extern const int prefill_blocks = BLOCKS;

#if MXK_PROJECT
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prefill_project(const __grid_constant__ Gemm p) {
  gemm<PROJECT>(p);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prefill_gate_up(const __grid_constant__ Gemm p) {
  gemm<GATE_UP>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prefill_down(const __grid_constant__ Gemm p) {
  gemm<DOWN>(p);
}
#endif
