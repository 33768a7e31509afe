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
// to TOKENS tokens; a launch for each of a few sizes takes the tiles of that size (routing.cu). The first warpgroup brings
// activations by bulk copies and packed rows by 16-byte copies, 128 bytes of a row at a time, which is a line of L2, into
// two rings; the two others hold 2 x 64 rows each, unpack step s + 1 while the tensor cores run step s, and drift apart by
// the depth of the rings, which hides their epilogues. A gate row and its up row are rows g and g + 8 of one fragment, so
// the activation needs no exchange. A persistent grid walks (token tile, row tile), row tiles fastest: the tiles of one
// expert run together, and a launch takes its weights from device memory once.
//
// Limits: K and I multiples of 32, weight rows on 16 bytes.
#include "formats.cuh"
#include "wgmma.cuh"

constexpr int BLOCK = 64;                 // columns of a block: 128 bytes of bf16, the swizzle's span
constexpr int BLOCK_BYTES = 2 * BLOCK;    // of a row
#ifndef MXK_TOKENS
#define MXK_TOKENS 128
#endif
#ifndef MXK_PROJECT
#define MXK_PROJECT 0
#endif
constexpr int TOKENS = MXK_TOKENS;        // of a tile: wgmma's N, 16..176 in steps of 16
constexpr int ROWS = 256;                 // weight rows of a tile
constexpr int PACKED_BYTES = BLOCK / 2;   // of a block of one weight row
constexpr int STAGE_BYTES = TOKENS * BLOCK_BYTES;
constexpr int SPAN = 4;                   // blocks of a stage of weights: 128 bytes of a row
constexpr int SPAN_BYTES = SPAN * PACKED_BYTES;
constexpr int WEIGHT_STAGE_BYTES = ROWS * SPAN_BYTES;
// Few tokens leave registers for a second block, whose unpacking fills the first's waits.
constexpr int BLOCKS = TOKENS <= 32 ? 2 : 1;  // of a multiprocessor
constexpr int RING_BYTES = 226 * 1024 / BLOCKS - 512;
constexpr int WEIGHT_STAGES = BLOCKS == 2 ? 2 : TOKENS <= 64 ? 4 : 3;
constexpr int FREE_STAGES = (RING_BYTES - WEIGHT_STAGES * WEIGHT_STAGE_BYTES) / STAGE_BYTES;
constexpr int STAGES = FREE_STAGES < 12 ? FREE_STAGES : 12;
constexpr int COPIERS = 64;               // threads that copy weights
constexpr int PRODUCERS = 128;
constexpr int THREADS = PRODUCERS + 256;  // and two warpgroups of consumers
constexpr int CONSUMER_WARPS = 8;
// Together at most what a block starts with, THREADS times 80 or 168, or setmaxnreg waits for ever.
constexpr int PRODUCER_REGISTERS = BLOCKS == 2 ? 48 : 40;
constexpr int CONSUMER_REGISTERS = BLOCKS == 2 ? 96 : 232;
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

__device__ __forceinline__ u64 operand_descriptor(u32 address) {  // K-major, 128-byte swizzle, 8 rows = 1024 bytes
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(1) << 16) |
         ((address & 0x3FFFF) >> 4);
}

// Scales of one block of a lane's four weight rows: both units, and rows g and g + 8 (gate and up) of a fragment.
struct Scales {
  Scale of[2][2];
};

struct ScaleRows {  // where the lane reads them
  const u8* first[2];
  const u8* zeros[2];
  i32 unit, zero_unit;  // from the first unit's to the second's, bytes
  i32 columns[2];       // of a unit, none for a row beyond the matrix

  __device__ __forceinline__ void load(Scales& scales, int block, int quarter) const {
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

template <int SIZE, int BYTES>
struct RingOf {
  u32 data, full, empty;  // shared addresses
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ u32 here() const { return data + stage * BYTES; }
  __device__ __forceinline__ u32 filled() const { return full + 8 * stage; }
  __device__ __forceinline__ u32 emptied() const { return empty + 8 * stage; }
};
using Ring = RingOf<STAGES, STAGE_BYTES>;
using WeightRing = RingOf<WEIGHT_STAGES, WEIGHT_STAGE_BYTES>;

__device__ __forceinline__ void multiply_block(float (&sum)[2][TOKENS / 2], u32 (&fragment)[2][2][4],
                                               const Scales& scales, Ring& ring, u32 weights_at, u32& used, bool leader,
                                               const Constants& constants) {
  const u32 stage = ring.here();
  barrier_wait(ring.filled(), ring.parity);
  uint2 words[2][2];
  Scale ready[2][2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[unit][half] = load_shared_8(weights_at + (2 * unit + half) * 32 * SPAN_BYTES);
      ready[unit][half] = make_ready(scales.of[unit][half]);
    }
  }
  const u64 descriptor = operand_descriptor(stage);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_wait<1>();  // of the products that read the fragments written next, one step ago all but the last
    if (step == 1 && leader && used != ~0u) barrier_arrive(used);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 word = step < 2 ? words[unit][half].x : words[unit][half].y;
        u32(&target)[4] = fragment[step & 1][unit];
        target[half] = step & 1 ? unpack<2>(word, ready[unit][half], constants) : unpack<0>(word, ready[unit][half], constants);
        target[half + 2] = step & 1 ? unpack<3>(word, ready[unit][half], constants) : unpack<1>(word, ready[unit][half], constants);
      }
    }
    wgmma_fence();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) Wgmma<TOKENS>::run(sum[unit], fragment[step & 1][unit], descriptor + 2 * step);
    wgmma_commit();
  }
  used = ring.emptied();
  ring.next();
}

__device__ __forceinline__ void multiply(float (&sum)[2][TOKENS / 2], const Gemm& p, const ScaleRows& rows, int quarter,
                                         Ring& ring, WeightRing& weight_ring, int slot, bool leader) {
  const Constants constants;
  u32 fragment[2][2][4];
  Scales even, odd;
  rows.load(even, 0, quarter);
  rows.load(odd, 1, quarter);
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sum[unit][i] = 0.0f;
  }
  u32 used = ~0u;  // empty-barrier of the stage before, still read by the tensor cores
  const u32 at = slot * SPAN_BYTES + 8 * quarter, turn = slot % SPAN;
  const auto step = [&](const Scales& scales, int block) {
    const u32 piece = block % SPAN;
    if (piece == 0) barrier_wait(weight_ring.filled(), weight_ring.parity);
    multiply_block(sum, fragment, scales, ring, weight_ring.here() + at + (piece ^ turn) * PACKED_BYTES, used, leader,
                   constants);
    if (piece == SPAN - 1 || block == p.blocks - 1) {
      __syncwarp();
      if (leader) barrier_arrive(weight_ring.emptied());
      weight_ring.next();
    }
  };
  for (int block = 0;;) {
    step(even, block);
    rows.load(even, block + 2, quarter);
    if (++block == p.blocks) break;
    step(odd, block);
    rows.load(odd, block + 2, quarter);
    if (++block == p.blocks) break;
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
__device__ __forceinline__ void compute_tile(const Gemm& p, const int4& tile, int row_tile, Ring& ring,
                                             WeightRing& weight_ring) {
  using Rows = Tile<PRODUCT>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = (threadIdx.x - PRODUCERS) / 128;
  const int quarter = lane % 4, g = lane / 4;
  const int expert = tile.x, first_row = tile.y;
  const int output_base = row_tile * Rows::OUTPUTS + group * Rows::GROUP;
  if (output_base >= p.outputs) {  // nothing here for this warpgroup: let the rings pass
    for (int block = 0; block < p.blocks; ++block) {
      barrier_wait(ring.filled(), ring.parity);
      if (lane == 0) barrier_arrive(ring.emptied());
      ring.next();
      if (block % SPAN == 0) {
        barrier_wait(weight_ring.filled(), weight_ring.parity);
        if (lane == 0) barrier_arrive(weight_ring.emptied());
        weight_ring.next();
      }
    }
    return;
  }
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
  multiply(sum, p, rows, quarter, ring, weight_ring, 128 * group + 8 * warp + g, lane == 0);

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
      const int row = p.target[first_row + 8 * j + g];
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
__device__ __forceinline__ void feed_tokens(const Gemm& p, const int4& tile, Ring& ring) {
  for (int block = 0; block < p.blocks; ++block) {
    barrier_wait(ring.emptied(), ring.parity);
    barrier_arrive_expect(ring.filled(), STAGE_BYTES);
    bulk_copy(ring.here(), p.rows + (static_cast<i64>(block) * p.total_rows + tile.y) * BLOCK_BYTES, STAGE_BYTES,
              ring.filled());
    ring.next();
  }
}

// Weights of a tile, by COPIERS threads: eight of them copy 128 bytes of a row. A row's pieces of a block are turned by its
// place among four, so that reads of eight rows at once hit no bank twice.
template <Product PRODUCT>
__device__ __forceinline__ void feed_weights(const Gemm& p, const int4& tile, int row_tile, int t, WeightRing& ring) {
  using Rows = Tile<PRODUCT>;
  const int chunk = t % 8, g = t / 8;
  const int output = Rows::first_output(row_tile, g);
  const i32 stride = static_cast<i32>(p.weight.row_stride) * Rows::row_step(p);
  const u8* source[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 row = Rows::row(p, output, half);
    source[half] = p.weight.expert(Rows::expert(p, tile.x, half)) + row * p.weight.row_stride + 16 * chunk;
    const u8* scales = p.scale.expert(Rows::expert(p, tile.x, half)) + row * p.scale.row_stride;
    const i32 scale_stride = static_cast<i32>(p.scale.row_stride) * Rows::row_step(p);
    const i32 bytes = (GROUP_LOG == 31 ? 1 : (p.columns + (1 << GROUP_LOG) - 1) >> GROUP_LOG) * SCALE_BYTES;
#pragma unroll 1
    for (int j = 0; j < 16; ++j) {
      const int away = Rows::distance(j / 8, j / 4 % 2, j % 4);
      if (output + away >= p.outputs) continue;
      for (int at = 32 * chunk; at < bytes; at += 256) prefetch_l2(scales + away * scale_stride + at);
    }
  }
  const u32 target = g * SPAN_BYTES + ((chunk / 2) ^ (g % SPAN)) * PACKED_BYTES + chunk % 2 * 16;
  for (int block = 0; block < p.blocks; block += SPAN) {
    barrier_wait(ring.emptied(), ring.parity);
    const bool there = BLOCK * block + 32 * chunk < p.columns;
    const u32 to = ring.here() + target;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u8* from = source[half] + block * PACKED_BYTES;
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {  // group and unit
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
          const int away = Rows::distance(j / 2, j % 2, warp);
          const bool valid = there && output + away < p.outputs;
          copy_16(to + (8 * j + 4 * half + warp) * 8 * SPAN_BYTES, from + away * stride, valid ? 16 : 0);
        }
      }
    }
    barrier_arrive_after_copies(ring.filled());
    ring.next();
  }
}

template <Product PRODUCT>
__device__ __forceinline__ void gemm(const Gemm& p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 data = shared_address(shared), barriers = data + STAGES * STAGE_BYTES + WEIGHT_STAGES * WEIGHT_STAGE_BYTES;
  WeightRing weight_ring{data, barriers + 16 * STAGES, barriers + 16 * STAGES + 8 * WEIGHT_STAGES};
  Ring ring{data + WEIGHT_STAGES * WEIGHT_STAGE_BYTES, barriers, barriers + 8 * STAGES};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(ring.full + 8 * stage, 1);
      barrier_init(ring.empty + 8 * stage, CONSUMER_WARPS);
    }
    for (int stage = 0; stage < WEIGHT_STAGES; ++stage) {
      barrier_init(weight_ring.full + 8 * stage, COPIERS);
      barrier_init(weight_ring.empty + 8 * stage, CONSUMER_WARPS);
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

  if (threadIdx.x < PRODUCERS) {
    give_registers<PRODUCER_REGISTERS>();
    ring.parity = weight_ring.parity = 1;  // empty at first
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      for (int work = blockIdx.x; work < total; work += gridDim.x) feed_tokens(p, p.tiles[work / row_tiles], ring);
    } else if (warp == 1 || warp == 2) {
      for (int work = blockIdx.x; work < total; work += gridDim.x)
        feed_weights<PRODUCT>(p, p.tiles[work / row_tiles], work % row_tiles, threadIdx.x - 32, weight_ring);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    for (int work = blockIdx.x; work < total; work += gridDim.x)
      compute_tile<PRODUCT>(p, p.tiles[work / row_tiles], work % row_tiles, ring, weight_ring);
  }
  if (p.chained) wait_for_earlier_kernels();
}

__device__ __constant__ extern const int prefill_shared =
    STAGES * (STAGE_BYTES + 2 * 8) + WEIGHT_STAGES * (WEIGHT_STAGE_BYTES + 2 * 8);
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
