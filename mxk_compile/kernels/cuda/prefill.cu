// Many tokens: the two expert GEMMs as tensor-core products from the packed bytes, for rows sorted by expert.
//
//   gate_up   H[r, i] = bf16(activate(w13[gate(i)] . X[r] + bias, w13[up(i)] . X[r] + bias))
//   down      Y[r, n] = w2[n] . H[r] + bias                                   (fp32; routing.cu sums it in slot order)
//
// Operands. Weights as in ops/moe.py: rows of K / 2 bytes and K / 32 scale bytes, any row and expert stride. X and H
// are bf16 in blocks of 64 columns: [block][row][128 bytes], so that a tile of one block is one contiguous piece, which
// a bulk copy brings to shared memory as WGMMA's 128-byte-swizzled operand: 16-byte chunk c of a row lies at
// c ^ (row % 8). Inside a block, columns are permuted: position 16s + 8h + 2q + b holds column
// 16q + 8(s / 2) + 2(s % 2) + h + 4b. This is the order in which lane q of four finds its 16 columns in the packed words
// (pairs are nibbles j and j + 4 of a word), so a weight is unpacked into the A register that multiplies it: no shuffle, and
// no bf16 weight in shared memory. Both writers of blocks (routing.cu for X, the epilogue below for H) write that order.
//
// Schedule. Weights are the M side, so 64 rows meet up to 128 tokens: a block of 3 warpgroups owns 256 weight rows x up to
// TOKENS tokens; a launch for each of a few sizes takes the tiles of that size (routing.cu). The first warpgroup brings
// activations by bulk copies and packed rows by 16-byte copies into a ring of shared-memory stages of one block of columns;
// the two others hold 2 x 64 rows each, unpack step s + 1 while the tensor cores run step s, and drift apart by the depth of
// the ring, which hides their epilogues. Unpacking is 2.4 instructions a value, amortised over the tokens of the tile; with
// 256 rows a tile, L2 feeds 24 bytes a clock and multiprocessor at the full rate, and a gate row and its up row are rows g
// and g + 8 of one fragment, so the activation needs no exchange. A persistent grid walks (token tile, row tile), row tiles
// fastest: the tiles of one expert run together, and a launch takes its weights from device memory once.
//
// Limits: K and I multiples of 32 (a scale a group of 32), weight rows on 16 bytes.
#include "call.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"

constexpr int BLOCK = 64;                 // columns of a block: 128 bytes of bf16, the swizzle's span
constexpr int BLOCK_BYTES = 2 * BLOCK;    // of a row
#ifndef MXK_TOKENS
#define MXK_TOKENS 128
#endif
constexpr int TOKENS = MXK_TOKENS;        // of a tile: wgmma's N, 16..128 in steps of 16
constexpr int ROWS = 256;                 // weight rows of a tile
constexpr int PACKED_BYTES = BLOCK / 2;   // of a block of one weight row
constexpr int WEIGHTS = TOKENS * BLOCK_BYTES;  // where they lie in a stage
constexpr int STAGE_BYTES = WEIGHTS + ROWS * PACKED_BYTES;
// Few tokens leave registers for a second block, whose unpacking fills the first's waits.
constexpr int BLOCKS = TOKENS <= 32 ? 2 : 1;  // of a multiprocessor
constexpr int RING_BYTES = 208 * 1024 / BLOCKS;
constexpr int STAGES = RING_BYTES / STAGE_BYTES < 16 ? RING_BYTES / STAGE_BYTES : 16;
constexpr int PRODUCERS = 128;
constexpr int THREADS = PRODUCERS + 256;  // and two warpgroups of consumers
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCER_REGISTERS = BLOCKS == 2 ? 32 : 56;  // 56 * 128 + 224 * 256 <= 65536, the register file
constexpr int CONSUMER_REGISTERS = BLOCKS == 2 ? 104 : 224;

struct Gemm {
  Operand weight, scale, bias;
  const u8* rows;      // activations, in blocks
  u8* out;             // gate_up: H in blocks; down: Y [rows][outputs] fp32
  const int4* tiles;   // {expert, first row, rows, -}, rows <= TOKENS a multiple of 16
  const i32* num_tiles;
  i32 total_rows;      // of the blocked buffers
  i32 blocks;          // of the input columns, rounded up
  i32 groups;          // of 32 input columns
  i32 outputs;         // gate_up: I; down: K
  i32 row_step, gate_row, up_row, up_expert;  // row of output i: gate i * row_step + gate_row, up of expert + up_expert
  i32 bias_dtype, activation;
  float alpha, limit;
  i32 chained;  // whether the launch before is the same product for other tiles, which this one need not wait for
};

__device__ __forceinline__ u64 operand_descriptor(u32 address) {  // K-major, 128-byte swizzle, 8 rows = 1024 bytes
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(1) << 16) |
         ((address & 0x3FFFF) >> 4);
}

// Scales of one block of a lane's four weight rows: both units, gate and up or rows g and g + 8.
struct Scales {
  u32 byte[2][2];
};

struct ScaleRows {  // where the lane reads them
  const u8* first[2];
  i32 unit;       // from the first unit's to the second's
  i32 groups[2];  // valid ones of a unit, none for a row beyond the matrix

  __device__ __forceinline__ void load(Scales& scales, int block, int quarter) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool valid = 2 * block + quarter / 2 < groups[u];
#pragma unroll
      for (int half = 0; half < 2; ++half) scales.byte[u][half] = valid ? __ldg(first[half] + u * unit + 2 * block) : 0;
    }
  }
};

struct Ring {
  u32 data, full, empty;  // shared addresses
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void multiply_block(float (&sum)[2][TOKENS / 2], u32 (&fragment)[2][2][4],
                                               const Scales& scales, Ring& ring, u32 at, u32& used, bool leader) {
  const u32 stage = ring.data + ring.stage * STAGE_BYTES;
  barrier_wait(ring.full + 8 * ring.stage, ring.parity);
  uint2 words[2][2];
  u32 factor[2][2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[unit][half] = load_shared_8(stage + at + (2 * unit + half) * 32 * PACKED_BYTES);
      factor[unit][half] = scale_pair(scales.byte[unit][half]);
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
        target[half] = step & 1 ? weights<2>(word, factor[unit][half]) : weights<0>(word, factor[unit][half]);
        target[half + 2] = step & 1 ? weights<3>(word, factor[unit][half]) : weights<1>(word, factor[unit][half]);
      }
    }
    wgmma_fence();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) Wgmma<TOKENS>::run(sum[unit], fragment[step & 1][unit], descriptor + 2 * step);
    wgmma_commit();
  }
  used = ring.empty + 8 * ring.stage;
  ring.next();
}

__device__ __forceinline__ void multiply(float (&sum)[2][TOKENS / 2], const Gemm& p, const ScaleRows& rows, int quarter,
                                         Ring& ring, u32 at, bool leader) {
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
  for (int block = 0;;) {
    multiply_block(sum, fragment, even, ring, at, used, leader);
    rows.load(even, block + 2, quarter);
    if (++block == p.blocks) break;
    multiply_block(sum, fragment, odd, ring, at, used, leader);
    rows.load(odd, block + 2, quarter);
    if (++block == p.blocks) break;
  }
  wgmma_wait<0>();
  if (leader) barrier_arrive(used);
}

// Output, in its block of 64, of fragment row g (gate) and g + 8 (up) of a warp in `unit`; see the permutation above.
__device__ __forceinline__ int output_of(int unit, int warp, int g) {
  return 16 * (g / 2) + 4 * (g % 2) + 8 * unit + warp;
}

template <bool GATE_UP>
struct Tile {
  static constexpr int OUTPUTS = GATE_UP ? ROWS / 2 : ROWS;

  __device__ static int rows_of(const Gemm& p) { return (p.outputs + OUTPUTS - 1) / OUTPUTS; }
  // Output of row g of a warp in `unit` of a warpgroup.
  __device__ static int output(int row_tile, int group, int unit, int warp, int g) {
    return row_tile * OUTPUTS + group * (OUTPUTS / 2) + (GATE_UP ? output_of(unit, warp, g) : 64 * unit + 16 * warp + g);
  }
  __device__ static i64 row(const Gemm& p, int output, int half) {
    if (!GATE_UP) return output + 8 * half;
    return static_cast<i64>(output) * p.row_step + (half ? p.up_row : p.gate_row);
  }
  __device__ static int expert(const Gemm& p, int expert, int half) {
    return GATE_UP && half ? expert + p.up_expert : expert;
  }
  __device__ static int unit_rows(const Gemm& p) { return GATE_UP ? 8 * p.row_step : 64; }       // to the second unit's
  __device__ static int group_rows(const Gemm& p) { return GATE_UP ? 64 * p.row_step : 128; }    // to the second group's
};

template <bool GATE_UP>
__device__ __forceinline__ void compute_tile(const Gemm& p, const int4& tile, int row_tile, Ring& ring) {
  using Rows = Tile<GATE_UP>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = (threadIdx.x - PRODUCERS) / 128;
  const int quarter = lane % 4, g = lane / 4;
  const int expert = tile.x, first_row = tile.y;
  const int output_base = row_tile * Rows::OUTPUTS + group * (Rows::OUTPUTS / 2);
  if (output_base >= p.outputs) {  // nothing here for this warpgroup: let the ring pass
    for (int block = 0; block < p.blocks; ++block) {
      barrier_wait(ring.full + 8 * ring.stage, ring.parity);
      if (lane == 0) barrier_arrive(ring.empty + 8 * ring.stage);
      ring.next();
    }
    return;
  }
  ScaleRows rows;
  int output[2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    output[unit] = Rows::output(row_tile, group, unit, warp, g);
    rows.groups[unit] = output[unit] < p.outputs ? p.groups : 0;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    rows.first[half] = p.scale.expert(Rows::expert(p, expert, half)) +
                       Rows::row(p, output[0], half) * p.scale.row_stride + quarter / 2;
  rows.unit = Rows::unit_rows(p) * static_cast<i32>(p.scale.row_stride);
  float sum[2][TOKENS / 2];
  multiply(sum, p, rows, quarter, ring, WEIGHTS + (128 * group + 8 * warp + g) * PACKED_BYTES + 8 * quarter, lane == 0);

  float bias[2][2] = {};
  if (p.bias.present()) {
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
  if constexpr (GATE_UP) {
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
  } else {
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
  }
}

// The producers' part of a tile. A thread copies the same half (one scale group) of a block of four weight rows.
template <bool GATE_UP>
__device__ __forceinline__ void feed_tile(const Gemm& p, const int4& tile, int row_tile, Ring& ring) {
  using Rows = Tile<GATE_UP>;
  const int t = threadIdx.x, group_half = t % 2;
  const int g = t / 2 % 8, warp = t / 16 % 4, half = t / 64;
  const int expert = Rows::expert(p, tile.x, half);
  const int output = Rows::output(row_tile, 0, 0, warp, g);
  const i64 row = Rows::row(p, output, half);
  const u8* source = p.weight.expert(expert) + row * p.weight.row_stride + 16 * group_half;
  const i64 unit = Rows::unit_rows(p) * p.weight.row_stride, group = Rows::group_rows(p) * p.weight.row_stride;
  const u32 target = ring.data + WEIGHTS + (t / 2) * PACKED_BYTES + 16 * group_half;
  i32 groups[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    groups[i] = Rows::output(row_tile, i / 2, i % 2, warp, g) < p.outputs ? p.groups : 0;
  const u8* scales = p.scale.expert(expert) + row * p.scale.row_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u8* of_row = scales + (i % 2 * Rows::unit_rows(p) + i / 2 * Rows::group_rows(p)) * p.scale.row_stride;
    for (int at = 32 * group_half; at < groups[i]; at += 64) prefetch_l2(of_row + at);
  }
  for (int block = 0; block < p.blocks; ++block) {
    const u32 full = ring.full + 8 * ring.stage;
    barrier_wait(ring.empty + 8 * ring.stage, ring.parity);
    if (t == 0) {
      barrier_arrive_expect(full, TOKENS * BLOCK_BYTES);
      bulk_copy(ring.data + ring.stage * STAGE_BYTES,
                p.rows + (static_cast<i64>(block) * p.total_rows + tile.y) * BLOCK_BYTES, TOKENS * BLOCK_BYTES, full);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      copy_16(target + ring.stage * STAGE_BYTES + i * 64 * PACKED_BYTES,
              source + i % 2 * unit + i / 2 * group + block * PACKED_BYTES, 2 * block + group_half < groups[i] ? 16 : 0);
    barrier_arrive_after_copies(full);
    ring.next();
  }
}

template <bool GATE_UP>
__device__ __forceinline__ void gemm(const Gemm& p) {
  extern __shared__ __align__(1024) u8 shared[];
  Ring ring{shared_address(shared), shared_address(shared + STAGES * STAGE_BYTES),
            shared_address(shared + STAGES * STAGE_BYTES + 8 * STAGES)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(ring.full + 8 * stage, PRODUCERS + 1);
      barrier_init(ring.empty + 8 * stage, CONSUMER_WARPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // A chained launch begins when the one before has waited, so its input is there; it waits at its end, so that what
  // comes after both waits for both.
  if (!p.chained) wait_for_earlier_kernels();
  let_later_kernels_start();
  const int row_tiles = Tile<GATE_UP>::rows_of(p);
  const int total = *p.num_tiles * row_tiles;

  if (threadIdx.x < PRODUCERS) {
    give_registers<PRODUCER_REGISTERS>();
    ring.parity = 1;  // empty at first
    for (int work = blockIdx.x; work < total; work += gridDim.x)
      feed_tile<GATE_UP>(p, p.tiles[work / row_tiles], work % row_tiles, ring);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    for (int work = blockIdx.x; work < total; work += gridDim.x)
      compute_tile<GATE_UP>(p, p.tiles[work / row_tiles], work % row_tiles, ring);
  }
  if (p.chained) wait_for_earlier_kernels();
}

__device__ __constant__ extern const int prefill_shared = STAGES * (STAGE_BYTES + 2 * 8);
__device__ __constant__ extern const int prefill_blocks = BLOCKS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prefill_gate_up(const __grid_constant__ Gemm p) {
  gemm<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prefill_down(const __grid_constant__ Gemm p) {
  gemm<false>(p);
}
