// The decode kernel's stream of weights: bulk copies into a ring of shared memory, and the barrier of the whole grid.
#pragma once
#include "decode_routes.cuh"

__device__ __forceinline__ void copy_streamed(u32 target, const u8* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// A box of a matrix: `words` and `row` are those of its first element.
__device__ __forceinline__ void copy_box(u32 target, const u8* map, i32 words, i32 row, i32 expert, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
      "[%5], %6;" ::"r"(target),
      "l"(map), "r"(words), "r"(row), "r"(expert), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map.bytes) : "memory");
}
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// H and Y were written by other blocks of this launch: they are read in the L2.
__device__ __forceinline__ uint4 load_l2(const u8* pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_eight(const u8* from, bool aligned) {
  if (aligned) return load_l2(from);
  const u16* e = reinterpret_cast<const u16*>(from);
  return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}
// The row that a route's products are of.
template <class P>
__device__ __forceinline__ const u8* activations(const Decode& p, int route) {
  if (PROJECT) return p.x + (route / p.x_rows * p.x_stride + route % p.x_rows * p.x_inner) * 2;
  return P::PAIRS ? p.x + static_cast<i64>(route / TOP_K) * p.x_stride * 2 : p.h + static_cast<i64>(route) * (I * 2);
}

// Of which parts all blocks have stored their rows of H, and then whether they have stored those of Y: a grid-wide barrier each.
// The top bit of its word flips when all blocks have arrived, so the word serves the next launch as it is.
struct RowsReady {
  static constexpr int WORDS_APART = 32;  // a cache line
  static constexpr int OF_Y = PARTS, BARRIERS_OF_GRID = PARTS + 1;
  u32* words;
  u32 before;  // address in shared memory of the words' values, read before this block arrives
  static_assert(BARRIERS_OF_GRID * WORDS_APART * 4 <= COUNTER_BYTES && 4 + 4 * BARRIERS_OF_GRID <= 16, "places");

  __device__ RowsReady(u32* counters, u32 shared) : words(counters), before(shared + AT_END + 4) {}
  __device__ void read_before() const {  // by a warp, before a barrier of the block
    const u32 lane = threadIdx.x & 31;
    if (lane >= BARRIERS_OF_GRID) return;
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(words + lane * WORDS_APART) : "memory");
    store_shared_4(before + lane * 4, value);
  }
  __device__ void arrive(int part) const {
    const u32 add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(words + part * WORDS_APART), "r"(add) : "memory");
  }
  // By a team of warps: its first thread asks.
  template <int BARRIER, int THREADS_>
  __device__ void wait(int part, u32 thread) const {
    if (thread == 0) {
      const u32 old = load_shared_4(before + part * 4);
      u32 now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(words + part * WORDS_APART) : "memory");
      } while (((now ^ old) & 0x80000000u) == 0);
    }
    team_sync<BARRIER, THREADS_>();
  }
};

// ---- producer

// Where the rows of an expert lie.
template <class P>
struct Source {
  const u8 *low_map, *high_map, *low_scale_map, *high_scale_map;  // of half 0 and 1
  const u8 *low_weights, *high_weights, *low_scales, *high_scales, *low_zeros, *high_zeros;
  i64 row_stride, scale_stride;
  i32 low_first, high_first, low_expert, high_expert;  // rows; coordinates in the maps

  __device__ Source(const Decode& p, int expert) {
    const Operand &weight = P::PAIRS ? p.w13 : p.w2, &scale = P::PAIRS ? p.s13 : p.s2, &zero = P::PAIRS ? p.z13 : p.z2;
    const int second = P::SEPARATE ? expert + p.up_expert : expert;
    low_weights = weight.expert(expert), high_weights = weight.expert(second);
    low_scales = scale.expert(expert), high_scales = scale.expert(second);
    if (MXK_ZEROS) low_zeros = zero.expert(expert), high_zeros = zero.expert(second);
    row_stride = weight.row_stride, scale_stride = scale.row_stride;
    low_first = P::SEPARATE ? p.gate_row : 0;
    high_first = P::SEPARATE ? p.up_row : P::PAIRED ? 1 : 8;
    low_map = high_map = (P::PAIRS ? p.w13_map : p.w2_map).bytes;
    low_scale_map = high_scale_map = (P::PAIRS ? p.s13_map : p.s2_map).bytes;
    low_expert = expert, high_expert = second;
    if (p.maps != nullptr) {
      low_expert = high_expert = 0;
      low_map = p.maps + (expert * 4 + (P::PAIRS ? 0 : 2)) * 128, low_scale_map = low_map + 128;
      high_map = p.maps + (second * 4 + (P::PAIRS ? 0 : 2)) * 128, high_scale_map = high_map + 128;
    }
  }
  __device__ const u8* weights(int half) const { return half ? high_weights : low_weights; }
  __device__ const u8* scales(int half) const { return half ? high_scales : low_scales; }
  __device__ const u8* zeros(int half) const { return half ? high_zeros : low_zeros; }
  // Of fragment row g + 8 * half of unit `unit` of the expert, if slot rows were in fragment order.
  __device__ i64 row(int unit, int g, int half) const {
    return (half ? high_first : low_first) + (P::PAIRED ? 16 * unit + 2 * g : P::SEPARATE ? 8 * unit + g : 16 * unit + g);
  }
};

// Boxes: a unit's rows each, or 8 where gate and up rows are apart.
template <class P>
__device__ __forceinline__ void copy_units(const Source<P>& from, bool scales, int first, int units, int words, u32 to,
                                           u32 stride, u32 barrier, u64 policy) {
  constexpr int BOXES = P::SEPARATE ? 2 : 1;
  const int lane = threadIdx.x & 31;
  if (lane >= units * BOXES) return;
  const int unit = lane / BOXES, half = lane % BOXES;
  const u8* map = scales ? (half ? from.high_scale_map : from.low_scale_map) : (half ? from.high_map : from.low_map);
  copy_box(to + (UNIT * unit + 8 * half) * stride, map, words, static_cast<i32>(from.row(first + unit, 0, half)),
           half ? from.high_expert : from.low_expert, barrier, policy);
}

// Rows of `row` bytes from row `first` on as they lie in memory; half the rows where gate and up rows are apart.
template <class P>
__device__ __forceinline__ u32 whole_bytes(int units, u32 row, u32 skew) {
  return round_up(skew + units * (P::SEPARATE ? 8 : UNIT) * row, 16);
}
template <class P>
__device__ __forceinline__ void copy_scales(const Source<P>& from, int first, int units, u32 to, u32 barrier, u64 policy) {
  const int lane = threadIdx.x & 31;
  if constexpr (P::PADDED) {
    copy_units<P>(from, true, first, units, 0, to, P::SCALE_STRIDE, barrier, policy);
  } else if (lane < (P::SEPARATE ? 2 : 1)) {
    const u32 skew = P::skew(first);
    copy_streamed(to + lane * P::HALF_SCALES, from.scales(lane) + from.row(first, 0, lane) * P::SCALE_ROW - skew,
                  whole_bytes<P>(units, P::SCALE_ROW, skew), barrier, policy);
  }
  if constexpr (MXK_ZEROS) {
    const u32 skew = P::zero_skew(first);
    if (lane < (P::SEPARATE ? 2 : 1))
      copy_streamed(to + P::ZEROS + lane * P::HALF_ZEROS, from.zeros(lane) + from.row(first, 0, lane) * P::ROW_SCALES - skew,
                    whole_bytes<P>(units, P::ROW_SCALES, skew), barrier, policy);
  }
}
template <class P>
__device__ __forceinline__ u32 scale_bytes(int first, int units) {
  constexpr int HALVES = P::SEPARATE ? 2 : 1;
  u32 bytes = P::PADDED ? units * UNIT * P::SCALE_STRIDE : HALVES * whole_bytes<P>(units, P::SCALE_ROW, P::skew(first));
  if constexpr (MXK_ZEROS) bytes += HALVES * whole_bytes<P>(units, P::ROW_SCALES, P::zero_skew(first));
  return bytes;
}

// Without bulk copies: a byte a lane.
template <class P>
__device__ __forceinline__ void copy_slowly(const Source<P>& from, int first, int units, int chunk, int groups, u32 slot,
                                            u32 scales) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < units * UNIT; ++i) {
    const int unit = i / UNIT, g = i % UNIT / 2, half = i % 2;
    const i64 row = from.row(first + unit, g, half);
    const int slot_row = P::slot_row(g, P::PAIRED ? half ^ g >> 2 : half);
    const u8* source = from.weights(half) + row * from.row_stride + chunk * P::CHUNK_GROUPS * 16;
    for (int at = lane; at < groups * 16; at += 32)
      store_shared_byte(slot + (UNIT * unit + slot_row) * P::STRIDE + at, source[at]);
    source = from.scales(half) + row * from.scale_stride;
    for (int at = lane; chunk == 0 && at < P::GROUPS; at += 32)
      store_shared_byte(scales + P::scale_at(unit, g, P::PAIRED ? half ^ g >> 2 : half) + at, source[at]);
  }
}

template <class P>
__device__ __forceinline__ void copy_rows(const Decode& p, const Routes& routes, u32 shared, Turn& turn, Turn& scale_turn,
                                          u64 policy) {
  const int lane = threadIdx.x & 31;
  const u32 barriers = shared + AT_BARRIERS;
  for (Walk<P> walk(routes.blocks); walk.next(); scale_turn.advance(SCALE_STAGES)) {
    const Source<P> from(p, routes.expert[walk.block]);
    const u32 scales = shared + AT_SCALES + scale_turn.slot * SCALES;
    barrier_wait(barriers + AT_SCALES_EMPTY + 8 * scale_turn.slot, scale_turn.parity ^ 1);
    for (int chunk = 0; chunk < P::CHUNKS; ++chunk, turn.advance(STAGES)) {
      const u32 slot = shared + turn.slot * SLOT, full = barriers + AT_SLOT_FULL + 8 * turn.slot;
      const int groups = min(P::CHUNK_GROUPS, P::GROUPS - chunk * P::CHUNK_GROUPS);
      barrier_wait(barriers + AT_SLOT_EMPTY + 8 * turn.slot, turn.parity ^ 1);
      if constexpr (MXK_ALIGNED) {
        if (lane == 0)
          barrier_arrive_expect(full, walk.count * UNIT * P::STRIDE + (chunk == 0 ? scale_bytes<P>(walk.first, walk.count) : 0));
        __syncwarp();
        if (chunk == 0) copy_scales<P>(from, walk.first, walk.count, scales, full, policy);
        copy_units<P>(from, false, walk.first, walk.count, chunk * P::CHUNK_GROUPS * (16 / P::WORD), slot, P::STRIDE, full, policy);
      } else {
        copy_slowly<P>(from, walk.first, walk.count, chunk, groups, slot, scales);
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
      }
    }
  }
}
