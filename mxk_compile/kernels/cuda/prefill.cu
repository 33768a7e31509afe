// Many tokens: the two expert GEMMs as tensor-core products from the packed bytes, for rows sorted by expert.
//
//   gate_up   H[r, i] = bf16(activate(w13[gate(i)] . X[r] + bias, w13[up(i)] . X[r] + bias))
//   down      Y[r, n] = w2[n] . H[r] + bias                                   (fp32; routing.cu sums it in slot order)
//
// Operands. Weights as in ops/moe.py: rows of K / 2 bytes and K / 32 scale bytes, any row and expert stride. X and H
// are bf16 in blocks of 64 columns: [block][row][128 bytes], so that a tile of one block is one contiguous piece, which
// a bulk copy brings to shared memory as WGMMA's 128-byte-swizzled operand: 16-byte chunk c of a row lies at
// c ^ (row % 8). Inside a block, columns are permuted: position 16s + 8h + 2q + b holds column
// 16q + 8(s / 2) + 2(s % 2) + h + 4b. This is the order in which lane q of four finds its 16 columns in the packed
// words (pairs are nibbles j and j + 4 of a word), so weights go from global memory to WGMMA's A registers without a
// shuffle and without shared memory. Both producers of blocks (routing.cu for X, the epilogue below for H) write that order.
//
// Schedule. Weights are the M side, so 64 rows meet up to 128 tokens: a block of 3 warpgroups owns 256 weight rows x
// n <= 128 tokens, n a multiple of 16 chosen so that an expert's rows divide evenly (routing.cu). One warp of the first
// warpgroup brings activations through a ring of shared-memory stages; the two others hold 2 x 64 rows each, unpack step
// s + 1 while the tensor cores run step s, and drift apart by the depth of the ring, which hides their epilogues.
// Unpacking is 2.4 instructions a value, amortised over n tokens; with 256 rows a tile, L2 feeds 24 bytes a clock and
// multiprocessor at the full rate, and the 8 (gate, up) rows of a warp sit in one accumulator fragment, so the
// activation needs no exchange. A persistent grid walks (token tile, row tile), row tiles fastest: the tiles of one
// expert run together and its weights come from device memory once.
//
// Limits: K and I multiples of 32 (one scale a 32-group, 8-byte loads); weights 8-byte aligned.
#include "call.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"

constexpr int BLOCK = 64;                 // columns of a block: 128 bytes of bf16, the swizzle's span
constexpr int BLOCK_BYTES = 2 * BLOCK;    // of a row
#ifndef MXK_TOKENS
#define MXK_TOKENS 128
#endif
constexpr int TOKENS = MXK_TOKENS;        // of a tile: wgmma's N, 16..128 in steps of 16
constexpr int STAGES = 8;
constexpr int STAGE_BYTES = TOKENS * BLOCK_BYTES;
constexpr int THREADS = 384;              // producer warpgroup, two consumers
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCER_REGISTERS = 40;    // 40 * 128 + 232 * 256 <= 65536
constexpr int CONSUMER_REGISTERS = 232;

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

// Two weight rows (gate and up, or g and g + 8) of a warpgroup's first 64-row unit, where lane q reads them, and how far
// the second unit's are.
struct Rows {
  const u8* weight[2];
  const u8* scale[2];
  i32 weight_unit, scale_unit;
  i32 groups[2];  // valid ones of a unit, none for a row beyond the matrix
};

struct Packed {  // of one block
  uint2 word[2][2];
  u32 scale[2][2];
};

__device__ __forceinline__ void load(Packed& packed, const Rows& rows, int block, int quarter) {
  const int group = 2 * block + quarter / 2;
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    const bool valid = group < rows.groups[unit];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed.word[unit][half] = valid ? load_weights(rows.weight[half] + unit * rows.weight_unit + block * 32) : make_uint2(0, 0);
      packed.scale[unit][half] = valid ? __ldg(rows.scale[half] + unit * rows.scale_unit + 2 * block) : 127;
    }
  }
}

struct Ring {
  u32 data, full, empty;  // shared addresses
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void multiply_block(float (&sum)[2][TOKENS / 2], u32 (&fragment)[2][2][4], const Packed& packed,
                                               Ring& ring, u32& used, bool leader) {
  u32 factor[2][2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[unit][half] = scale_pair(packed.scale[unit][half]);
  }
  const u64 descriptor = operand_descriptor(ring.data + ring.stage * STAGE_BYTES);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_wait<1>();  // of the products that read the fragments written next, one step ago all but the last
    if (step == 1 && leader && used != ~0u) barrier_arrive(used);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 words = packed.word[unit][half];
        const u32 word = step < 2 ? words.x : words.y;
        u32(&target)[4] = fragment[step & 1][unit];
        target[half] = step & 1 ? weights<2>(word, factor[unit][half]) : weights<0>(word, factor[unit][half]);
        target[half + 2] = step & 1 ? weights<3>(word, factor[unit][half]) : weights<1>(word, factor[unit][half]);
      }
    }
    if (step == 0) barrier_wait(ring.full + 8 * ring.stage, ring.parity);
    wgmma_fence();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) Wgmma<TOKENS>::run(sum[unit], fragment[step & 1][unit], descriptor + 2 * step);
    wgmma_commit();
  }
  used = ring.empty + 8 * ring.stage;
  ring.next();
}

__device__ __forceinline__ void multiply(float (&sum)[2][TOKENS / 2], const Gemm& p, const Rows& rows, int quarter,
                                         Ring& ring, bool leader) {
  u32 fragment[2][2][4];
  Packed even, odd;
  load(even, rows, 0, quarter);
  if (p.blocks > 1) load(odd, rows, 1, quarter);
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sum[unit][i] = 0.0f;
  }
  u32 used = ~0u;  // empty-barrier of the stage before, still read by the tensor cores
  for (int block = 0;;) {
    multiply_block(sum, fragment, even, ring, used, leader);
    if (block + 2 < p.blocks) load(even, rows, block + 2, quarter);
    if (++block == p.blocks) break;
    multiply_block(sum, fragment, odd, ring, used, leader);
    if (block + 2 < p.blocks) load(odd, rows, block + 2, quarter);
    if (++block == p.blocks) break;
  }
  wgmma_wait<0>();
  if (leader) barrier_arrive(used);
}

// Row of a 64-block of outputs that this lane's gate (and up) rows hold in `unit`; see the permutation above.
__device__ __forceinline__ int output_of(int unit, int warp, int lane) {
  const int g = lane / 4;
  return 16 * (g / 2) + 4 * (g % 2) + 8 * unit + warp;
}

template <bool GATE_UP>
__device__ __forceinline__ i64 row_of(const Gemm& p, int output, int half) {
  if (!GATE_UP) return output + 8 * half;
  return static_cast<i64>(output) * p.row_step + (half ? p.up_row : p.gate_row);
}

template <bool GATE_UP>
__device__ __forceinline__ void compute_tile(const Gemm& p, const int4& tile, int row_tile, Ring& ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128 - 1;
  const int quarter = lane % 4, g = lane / 4;
  const int expert = tile.x, first_row = tile.y;
  const int output_base = GATE_UP ? row_tile * 128 + group * 64 : row_tile * 256 + group * 128;
  if (output_base >= p.outputs) {  // nothing here for this warpgroup: let the ring pass
    for (int block = 0; block < p.blocks; ++block) {
      barrier_wait(ring.full + 8 * ring.stage, ring.parity);
      if (lane == 0) barrier_arrive(ring.empty + 8 * ring.stage);
      ring.next();
    }
    return;
  }
  Rows rows;
  int output[2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    output[unit] = output_base + (GATE_UP ? output_of(unit, warp, lane) : 64 * unit + 16 * warp + g);
    rows.groups[unit] = output[unit] < p.outputs ? p.groups : 0;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int source = GATE_UP && half ? expert + p.up_expert : expert;
    const i64 row = row_of<GATE_UP>(p, output[0], half);
    rows.weight[half] = p.weight.expert(source) + row * p.weight.row_stride + 8 * quarter;
    rows.scale[half] = p.scale.expert(source) + row * p.scale.row_stride + quarter / 2;
  }
  const int unit_rows = GATE_UP ? 8 * p.row_step : 64;
  rows.weight_unit = unit_rows * static_cast<i32>(p.weight.row_stride);
  rows.scale_unit = unit_rows * static_cast<i32>(p.scale.row_stride);
  float sum[2][TOKENS / 2];
  multiply(sum, p, rows, quarter, ring, lane == 0);

  float bias[2][2] = {};
  if (p.bias.present()) {
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (output[unit] >= p.outputs) continue;
        bias[unit][half] = load_float(p.bias.expert(GATE_UP && half ? expert + p.up_expert : expert),
                                      row_of<GATE_UP>(p, output[unit], half), p.bias_dtype);
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

template <bool GATE_UP>
__device__ __forceinline__ void gemm(const Gemm& p) {
  extern __shared__ __align__(1024) u8 shared[];
  Ring ring{shared_address(shared), shared_address(shared + STAGES * STAGE_BYTES),
            shared_address(shared + STAGES * STAGE_BYTES + 8 * STAGES)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(ring.full + 8 * stage, 1);
      barrier_init(ring.empty + 8 * stage, CONSUMER_WARPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // A chained launch begins when the one before has waited, so its input is there; it waits at its end, so that what
  // comes after both waits for both.
  if (!p.chained) wait_for_earlier_kernels();
  let_later_kernels_start();
  const int tile_outputs = GATE_UP ? 128 : 256;
  const int row_tiles = (p.outputs + tile_outputs - 1) / tile_outputs;
  const int total = *p.num_tiles * row_tiles;

  if (threadIdx.x < 128) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      ring.parity = 1;  // empty at first
      for (int work = blockIdx.x; work < total; work += gridDim.x) {
        const int4 tile = p.tiles[work / row_tiles];
          for (int block = 0; block < p.blocks; ++block) {
          barrier_wait(ring.empty + 8 * ring.stage, ring.parity);
          barrier_arrive_expect(ring.full + 8 * ring.stage, TOKENS * BLOCK_BYTES);
          bulk_copy(ring.data + ring.stage * STAGE_BYTES,
                    p.rows + (static_cast<i64>(block) * p.total_rows + tile.y) * BLOCK_BYTES, TOKENS * BLOCK_BYTES,
                    ring.full + 8 * ring.stage);
          ring.next();
        }
      }
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    for (int work = blockIdx.x; work < total; work += gridDim.x) {
      const int4 tile = p.tiles[work / row_tiles];
      compute_tile<GATE_UP>(p, tile, work % row_tiles, ring);
    }
  }
  if (p.chained) wait_for_earlier_kernels();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_gate_up(const __grid_constant__ Gemm p) {
  gemm<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_down(const __grid_constant__ Gemm p) {
  gemm<false>(p);
}
