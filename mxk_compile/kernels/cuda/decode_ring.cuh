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
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_shared_byte(u32 address) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
// H and Y were written by other blocks of this launch: they are read in the L2.
__device__ __forceinline__ uint4 load_l2(const u8* pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pick_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Grid-wide barrier: the top bit flips when all blocks have arrived, so the word serves the next launch as it is.
struct GridBarrier {
  u32* word;
  u32 before;  // top bit, read before this block arrives

  __device__ explicit GridBarrier(u32* counter) : word(counter) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(counter) : "memory");
  }
  __device__ void arrive() const {
    const u32 add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(add) : "memory");
  }
  __device__ void wait() const {  // by the consumers: one thread asks
    if (threadIdx.x == HELPERS * 32) {
      u32 now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
      } while (((now ^ before) & 0x80000000u) == 0);
    }
    asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS * 32) : "memory");
  }
};

// ---- producer

template <class P>
__device__ __forceinline__ void copy_rows(const Decode& p, const Routes& routes, u32 ring, u32 full, u32 empty, Turn& turn,
                                          u64 policy) {
  const int lane = threadIdx.x & 31;
  const Operand &weight = P::PAIRS ? p.w13 : p.w2, &scale = P::PAIRS ? p.s13 : p.s2;
  for (Walk<P> walk(routes.blocks); walk.next(); turn.advance(STAGES)) {
    const int expert = routes.expert[walk.block];
    const u32 slot = ring + turn.slot * SLOT, done = full + 8 * turn.slot;
    const int second_expert = P::PAIRS && !MXK_INTERLEAVED ? expert + p.up_expert : expert;
    const u8 *w = weight.expert(expert), *w_up = weight.expert(second_expert);
    const u8 *s = scale.expert(expert), *s_up = scale.expert(second_expert);
    const int rows = walk.count * (P::PAIRS ? 2 : 1);
    // Row of the matrix for row `half` of unit `u`, in the projection's own terms.
    const int gate_row = MXK_INTERLEAVED || !P::PAIRS ? 0 : p.gate_row, up_row = MXK_INTERLEAVED ? 1 : p.up_row;
    constexpr int STEP = P::PAIRS && MXK_INTERLEAVED ? 2 : 1;
    barrier_wait(empty + 8 * turn.slot, turn.parity ^ 1);
    if constexpr (MXK_ALIGNED) {
      const u32 skew = ScalePlace<P>::skew(walk.first);
      constexpr bool TWO = ScalePlace<P>::TWO;
      const u32 scale_bytes = round_up(skew + (TWO ? walk.count : rows) * P::GROUPS, 16);
      if (lane == 0) barrier_arrive_expect(done, rows * P::BYTES + scale_bytes * (TWO ? 2 : 1));
      __syncwarp();
      if (P::WHOLE) {
        if (lane == 1) copy_streamed(slot, w + static_cast<i64>(walk.first) * STEP * P::BYTES, rows * P::BYTES, done, policy);
      } else
      for (int i = lane; i < rows; i += 32) {
        const int unit = P::PAIRS ? i >> 1 : i, half = P::PAIRS ? i & 1 : 0;
        const int target = P::PAIRS ? P::slot_row(unit >> 3, unit & 7, half) : unit;
        const i64 row = (half ? up_row : gate_row) + static_cast<i64>(walk.first + unit) * STEP;
        copy_streamed(slot + target * P::STRIDE, (half ? w_up : w) + row * weight.row_stride, P::BYTES, done, policy);
      }
      if (lane < (TWO ? 2 : 1)) {
        const i64 row = (lane ? up_row : gate_row) + static_cast<i64>(walk.first) * STEP;
        copy_streamed(slot + ScalePlace<P>::AREA + lane * P::SCALES, (lane ? s_up : s) + row * P::GROUPS - skew, scale_bytes,
                      done, policy);
      }
    } else {
      for (int i = 0; i < rows; ++i) {
        const int unit = P::PAIRS ? i >> 1 : i, half = P::PAIRS ? i & 1 : 0;
        const int target = P::PAIRS ? P::slot_row(unit >> 3, unit & 7, half) : unit;
        const i64 row = (half ? up_row : gate_row) + static_cast<i64>(walk.first + unit) * STEP;
        const u8* from = (half ? w_up : w) + row * weight.row_stride;
        for (int at = lane; at < P::BYTES; at += 32)
          asm volatile("st.shared.u8 [%0], %1;" ::"r"(slot + target * P::STRIDE + at), "r"(static_cast<u32>(from[at])) : "memory");
        from = (half ? s_up : s) + row * scale.row_stride;
        const u32 place = slot + ScalePlace<P>::at(P::PAIRS ? unit >> 3 : unit >> 4, unit & 7, P::PAIRS ? half : unit >> 3 & 1);
        for (int at = lane; at < P::GROUPS; at += 32)
          asm volatile("st.shared.u8 [%0], %1;" ::"r"(place + at), "r"(static_cast<u32>(from[at])) : "memory");
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(done);
    }
  }
}
