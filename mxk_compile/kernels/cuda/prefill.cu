// Many tokens: expert GEMMs as tensor-core products from the packed bytes, for rows sorted by expert.
//
//   gate_up   H[r, i] = bf16(activate(w13[gate(i)] . X[r] + bias, w13[up(i)] . X[r] + bias))
//   down      Y[r, n] = w2[n] . H[r] + bias                                   (fp32; routing.cu sums it in slot order)
//   project   out[target(r), n] = bf16(w[n] . X[r])                           (one GEMM by itself, MXK_PROJECT)
//
// Operands. Weights as in ops/moe.py: rows of K / 2 bytes and scales of a format of formats.cuh, any row and expert
// stride. X and H are bf16 in panels of 64 columns: [panel][row][128 bytes], so that a tile of one panel is one contiguous
// piece, which a bulk copy brings to shared memory as WGMMA's 128-byte-swizzled operand: 16-byte chunk c of a row lies at
// c ^ (row % 8). Inside a panel, columns are permuted: position 16s + 8h + 2q + b holds column
// 16q + 8(s / 2) + 2(s % 2) + h + 4b. This is the order in which lane q of four finds its 16 columns in the packed words
// (pairs are nibbles j and j + 4 of a word), so a weight is unpacked into the A register that multiplies it: no shuffle, and
// no bf16 weight in shared memory. Both writers of panels (routing.cu for X, the epilogue below for H) write that order.
// A projection may also read rows of X where the caller has them (MXK_ROWS): a box of a tensor map, or 16-byte copies of rows
// that a list names, lie in shared memory as panels do, with columns in their natural order. Then lane q takes byte q of each
// packed word, 5 instructions more for 8 codes, and both scales of a panel.
//
// Schedule. Weights are the M side, so 64 rows meet up to TOKENS tokens: a block owns 256 weight rows x up
// to TOKENS tokens; a launch for each of a few sizes takes the tiles of that size (rows.cuh). The first warpgroup fills a
// ring of stages of SPAN panels of columns: activations by bulk copies, packed rows by 16-byte copies, and scales beside
// them, as loads by the consumers took a third of their time. The two others hold 2 x 64 rows each, or, with few
// tokens, four others 64 each; they unpack the next steps while the tensor cores run the last ones, and drift apart by the
// depth of the ring, which hides their epilogues. A gate
// row and its up row are rows g and g + 8 of one fragment, so the activation needs no exchange. A persistent grid walks
// (token tile, row tile), row tiles fastest: the tiles of one expert run together, and a launch takes its weights from
// device memory once. Producers look a tile ahead, and hand on what its consumers want to know at the end (List).
//
// Said of Hopper, where it was measured. Blackwell has other products behind the same interface (prefill_mma.cuh,
// prefill_tcgen05.cuh) and was not measured.
//
// Limits: K and I multiples of 32, weight rows on 16 bytes.
#include "prefill_feed.cuh"
#include "prefill_multiply.cuh"

template <Product PRODUCT>
__device__ __forceinline__ void compute_tile(const Gemm& p, const List& list, int row_tile, const Ring& ring, Products& products) {
  using Rows = Tile<PRODUCT>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = (threadIdx.x - PRODUCERS) / 128;
  const int quarter = lane % 4, g = lane / 4, pair = UNITS * group / 2, first_unit = UNITS * group % 2;
  const int output_base = row_tile * Rows::OUTPUTS + Rows::distance(pair, first_unit, 0);
  if (output_base >= p.outputs) {  // nothing here for this warpgroup: let the ring pass
    Ring passing = ring;
    for (int panel = 0; panel < p.panels; panel += SPAN) {
      barrier_wait(passing.filled(), passing.parity);
      if (Products::leads(lane, warp)) barrier_arrive(passing.emptied());
      passing.next();
    }
    return;
  }
  barrier_wait(ring.filled(), ring.parity);  // the list is there too
  const int4 tile = list.tile;
  const int expert = tile.x, first_row = tile.y;
  ScaleRows rows;
  int output[UNITS];
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    output[unit] = Rows::first_output(row_tile, g) + Rows::distance(pair, first_unit + unit, 0) + Rows::WARP * warp;
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
  Sums sum;
  multiply(products, sum, p, rows, quarter, ring, 64 * UNITS * group + 8 * warp + g, Products::leads(lane, warp));

  float bias[UNITS][2] = {};
  if (PRODUCT != PROJECT && p.bias.present()) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (output[unit] >= p.outputs) continue;
        bias[unit][half] = load_float(p.bias.expert(Rows::expert(p, expert, half)),
                                      Rows::row(p, output[unit], half), p.bias_dtype);
      }
    }
  }
  if constexpr (PRODUCT == GATE_UP) {
    u8* panel = p.out + static_cast<i64>(output_base / PANEL) * p.total_rows * PANEL_BYTES;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        if (8 * j >= tile.z) break;  // the next expert's rows, or nobody's
        const float* d = sum[unit] + 4 * j;
        const float low = activate(d[0] + bias[unit][0], d[2] + bias[unit][1], p.activation, p.alpha, p.limit);
        const float high = activate(d[1] + bias[unit][0], d[3] + bias[unit][1], p.activation, p.alpha, p.limit);
        const u32 both = transpose_8x8(pack_bf16x2(low, high));  // token lane / 4, outputs 2q and 2q + 1 of the chunk
        const int row = first_row + 8 * j + g, chunk = 4 * (first_unit + unit) + warp;
        *reinterpret_cast<u32*>(panel + static_cast<i64>(row) * PANEL_BYTES + (chunk ^ (row & 7)) * 16 + quarter * 4) =
            both;
      }
    }
  } else if constexpr (PRODUCT == DOWN) {
    float* out = reinterpret_cast<float*>(p.out);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
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
    constexpr int EACH = 4 * UNITS;  // neighbouring outputs of a lane
    const int at = output_base + Rows::WARP * warp + EACH * quarter;
    u16* out = reinterpret_cast<u16*>(p.out) + at;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      if (8 * j >= tile.z) break;
      u32 pairs[2 * UNITS];
#pragma unroll
      for (int i = 0; i < 2 * UNITS; ++i)
        pairs[i] = transpose_8x8(pack_bf16x2(sum[i / 2][4 * j + i % 2 * 2], sum[i / 2][4 * j + i % 2 * 2 + 1]));
      const int row = list.target[8 * j + g];
      if (row < 0) continue;
      u16* to = out + row * p.out_stride;
      if (p.wide && at + EACH <= p.outputs) {
        if constexpr (UNITS == 2) *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        else *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
      } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
          if (at + i < p.outputs) to[i] = static_cast<u16>(pairs[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

template <Product PRODUCT>
__device__ __forceinline__ void gemm(const Gemm& p) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ List lists[LISTS];
  __shared__ Products::Shared of_products;
  u32 data = shared_address(shared);
  asm volatile("" : "+r"(data));  // else the compiler computes it anew for each stage
  const u32 barriers = data + STAGES * STAGE_BYTES;
  Ring ring{data, barriers, barriers + 8 * STAGES};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(ring.full + 8 * stage, COPIERS + SCALERS + (MXK_ROWS == LISTED ? 33 * TOKEN_WARPS : 1));
      barrier_init(ring.empty + 8 * stage, GROUPS * Products::ARRIVALS);
    }
    barrier_init_fence();
  }
  Products::prepare(of_products);
  __syncthreads();
  // A chained launch begins when the one before has waited, so its input is there; it waits at its end, so that what
  // comes after both waits for both.
  if (!p.chained) wait_for_earlier_kernels();
  let_later_kernels_start();
  const int row_tiles = Tile<PRODUCT>::rows_of(p);
  const int total = *p.num_tiles * row_tiles;

  const int stages = (p.panels + SPAN - 1) / SPAN;
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
    if (warp >= TOKEN_WARPS && warp < 3) {
      for (int work = blockIdx.x; work < total; next_tile(work)) {
        const int4 tile = following;
        following = look_up(work + gridDim.x);
        feed_weights<PRODUCT>(p, tile, work % row_tiles, threadIdx.x - 32 * TOKEN_WARPS, ring);
      }
    } else if (STAGED && warp == 3) {
      for (int work = blockIdx.x; work < total; next_tile(work)) {
        const int4 tile = following;
        following = look_up(work + gridDim.x);
        feed_scales<PRODUCT>(p, tile, work % row_tiles, threadIdx.x - 96, ring);
      }
    } else if (warp < TOKEN_WARPS) {
      const int lane = threadIdx.x % 32;
      Places coming;
      if constexpr (PRODUCT == PROJECT) coming.look_up(p, following, warp, lane);
      for (int work = blockIdx.x; work < total; next_tile(work)) {
        const int4 tile = following;
        following = look_up(work + gridDim.x);
        // The list is there for who sees the first stage's arrival, which the first lanes make.
        if (threadIdx.x == 0) lists[list].tile = tile;
        if constexpr (PRODUCT == PROJECT) {
          coming.store(p, tile, lists[list], warp, lane);
          coming.look_up(p, following, warp, lane);
        }
        __threadfence_block();
        __syncwarp();
#if MXK_ROWS == LISTED
        feed_rows(p, tile, lists[list], warp, lane, ring);
#else
        if (lane == 0) feed_tokens(p, tile, ring);
#endif
        __syncwarp();
      }
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Products products(of_products);
    for (int work = blockIdx.x; work < total; next_tile(work))
      compute_tile<PRODUCT>(p, lists[list], work % row_tiles, ring, products);
    products.end();
  }
  if (p.chained) wait_for_earlier_kernels();
}

__device__ __constant__ extern const int prefill_shared = STAGES * (STAGE_BYTES + 2 * 8);
__device__ __constant__ extern const int prefill_blocks = BLOCKS;
__device__ __constant__ extern const int prefill_threads = THREADS;

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
