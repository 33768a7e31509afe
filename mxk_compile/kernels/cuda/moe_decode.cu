// Few tokens: a whole MXFP4 MoE layer in one launch, from the checkpoint's bytes.
//
//   H[r, i]   = bf16(activate(w13[gate(i)] . x[r / k] + bias, w13[up(i)] . x[r / k] + bias))   r = token * k + slot
//   Y[r, n]   = (w2[n] . H[r] + bias) * router[r]                                              fp32
//   out[t, n] = Y[t, 0, n] + Y[t, 1, n] + ...   in slot order, one rounding to bf16; with PER_ROUTE out[r, n] = Y[r, n]
//
// Launch contract (one module a shape; macros MXK_* and their defaults in decode.cuh)
//   kernel      moe_decode(const __grid_constant__ Decode)
//   grid        the multiprocessors of the device, one block each, all resident at once: launch cooperatively
//   block       decode_threads, dynamic shared memory decode_shared bytes: device constants of the module, to be read back
//   workspace   h: T * k * I bf16, y: T * k * K fp32 (not with PER_ROUTE), both 16-byte aligned, any content
//               counters: 256 bytes, zero before their first use and left alone between launches; launches that may
//               overlap need their own
//   limits      T * k <= MXK_MAX_ROUTES; K, I multiples of 32. MXK_ALIGNED=1: weight rows on 16-byte boundaries, scale
//               rows dense and every expert's scales on a 16-byte boundary. MXK_X_ALIGNED=1: rows of x on 16-byte
//               boundaries. Otherwise 0: same results, slow copies.
//   ids         any integer type; outside [experts_min, experts_min + E) adds nothing, duplicates add; nothing is read
//               by the host
//
// Schedule. Bytes should bind, so everything serves the stream of weights. A block owns a contiguous, byte-balanced range
// of the rows of all touched experts. One warp brings rows by bulk copies into a ring of slots, 16 rows each; when its
// gate/up rows are issued it goes on with its down rows, while the others wait for the grid-wide barrier between the
// projections. Groups of WARPS consumer warps take slots in turn, so that one group's waits lie under the other's
// arithmetic; the warps of a group split the columns: each keeps its part of the activations in registers (the n side of
// m16n8k16, 8 rows of an expert), unpacks 16 weight rows (the m side) and multiplies. Three more warps add the partial
// sums in fixed order, apply bias, activation or router weight, and store.
// A lane reads 16 bytes = 32 codes = one scale group of a row; both operands use the same permutation of k, so nothing
// is shuffled. Gate row i and up row i sit at rows g and g + 8 of one fragment: the activation needs no exchange.
// What binds (docs/performance/h200.md): not the bytes but the unpacking, 13 instructions and 4 multiplies for 8 weights on
// two pipes that take an instruction every other cycle.
#include "decode_finish.cuh"
#include "decode_multiply.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_decode(const __grid_constant__ Decode p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + AT_BARRIERS, empty = full + 8 * STAGES;
  const u32 sums_full = empty + 8 * STAGES, sums_empty = sums_full + 8 * PARTIALS;
  let_later_kernels_start();
  if (threadIdx.x == 32) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, W);
    for (int i = 0; i < PARTIALS; ++i) barrier_init(sums_full + 8 * i, W), barrier_init(sums_empty + 8 * i, 1);
    barrier_init_fence();
  }
  wait_for_earlier_kernels();
  GridBarrier rows_ready(p.counters), routes_ready(p.counters + 32);
  const Routes routes = sort_routes(p, memory);
  const int warp = threadIdx.x >> 5;
  if (warp < HELPERS) {
    give_registers<HELPER_REGISTERS>();
    if (warp == 0) {
      Turn turn;
      const u64 policy = evict_first();
      copy_rows<GateUp>(p, routes, shared, full, empty, turn, policy);
      copy_rows<Down>(p, routes, shared, full, empty, turn, policy);
    } else {
      Turn sums;
      u32 turn = 0;
      const auto all_done = [] {
        __threadfence();
        asm volatile("bar.sync 1, %0;" ::"n"(EPILOGUE * 32) : "memory");
      };
      finish_rows<GateUp>(p, routes, warp - 1, shared, sums_full, sums_empty, sums, turn);
      all_done();
      if (threadIdx.x == 32) rows_ready.arrive();
      finish_rows<Down>(p, routes, warp - 1, shared, sums_full, sums_empty, sums, turn);
      all_done();
      if (!MXK_PER_ROUTE && threadIdx.x == 32) routes_ready.arrive();
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Turn turn, sums;
    const int group = (warp - HELPERS) / W, part = (warp - HELPERS) % W;
    const u32 thread = threadIdx.x - HELPERS * 32;
    int next_group = 0;
    if (MXK_PER_ROUTE) clear_absent(p, routes, thread, CONSUMERS * 32);
    multiply_rows<GateUp>(p, routes, group, part, shared, full, empty, sums_full, sums_empty, turn, sums, next_group);
    rows_ready.wait();
    multiply_rows<Down>(p, routes, group, part, shared, full, empty, sums_full, sums_empty, turn, sums, next_group);
    if (!MXK_PER_ROUTE) {
      routes_ready.wait();
      sum_slots(p, routes, thread, CONSUMERS * 32);
    }
  }
}
