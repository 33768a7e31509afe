// Few tokens: a whole MXFP4 or INT4 MoE layer in one launch, or one INT4 projection, from the checkpoint's bytes.
//
//   H[r, i]   = bf16(activate(w13[gate(i)] . x[r / k] + bias, w13[up(i)] . x[r / k] + bias))   r = token * k + slot
//   Y[r, n]   = (w2[n] . H[r] + bias) * router[r]                                              fp32
//   out[t, n] = Y[t, 0, n] + Y[t, 1, n] + ...   in slot order, one rounding to bf16; with PER_ROUTE out[r, n] = Y[r, n]
//
// Launch contract (one module a shape; macros MXK_* and their defaults in decode.cuh)
//   kernel      moe_decode(const __grid_constant__ Decode); with MXK_PROJECT instead decode_project, out[r] = W[expert of r] . x
//               for rows that routes, a caller's sorted list or counts of an expert name; others are not written
//   grid        the multiprocessors of the device, one block each, all resident at once: launch cooperatively
//   block       decode_threads, dynamic shared memory decode_shared bytes: device constants of the module, to be read back
//   maps        tensor maps of the weights (kernels/cuda/maps.py), with boxes of the sizes that the module names
//   workspace   h: T * k * I bf16, y: T * k * K fp32 (not with PER_ROUTE), both 16-byte aligned, any content
//               counters: COUNTER_BYTES, zero before their first use and left alone between launches; launches that may
//               overlap need their own
//   limits      T * k <= MXK_MAX_ROUTES; K, I multiples of 32. MXK_ALIGNED=1: weight rows on 16-byte boundaries, scale
//               rows dense and every expert's scales on a 16-byte boundary. MXK_X_ALIGNED=1: rows of x on 16-byte boundaries. Otherwise 0: same results, slow copies. INT4: scales and
//               zero points as of MXK_ALIGNED=1, the same kind in both weights
//   ids         any integer type; outside [experts_min, experts_min + E) adds nothing, duplicates add; nothing is read
//               by the host
//
// Schedule. Bytes should bind, so everything serves the stream of weights. A block owns a contiguous, balanced range of the
// rows of all touched experts, in tiles of 64 rows, and goes through it. One warp brings tiles into a ring of
// slots, a part of the columns each; when its gate/up rows are issued it goes on with its down rows, while the others wait
// for the grid-wide barrier between the projections. Where few experts are touched there are two ranges, one in each half of
// them: gate/up of both, then down of both, so that the rows of H of the first are there before anybody wants them, and
// those of the second on their way while the first's are multiplied. SHARES warpgroups of consumers share the columns of every
// slot: a warp has 16 rows, turns codes into FP8 in registers, multiplies them by the activations in shared memory, a group of
// 32 columns a WGMMA, elsewhere an mma.sync, and scales the group's sums (decode_multiply.cuh). Activations become FP8 digits
// once a block and expert (decode_digits.cuh, docs/adr/0010-fp8-digits.md), by the consumers; where shared memory has room for
// two experts', the next one's ahead of time by three warps; those of few tokens once for all experts. Four warps add the
// consumers' sums in fixed order, apply bias, activation or router weight, and store. When all blocks have, each adds up the
// slots of its share of the result.
// Gate row i and up row i meet in one lane: the activation needs no exchange.
//
// INT4 keeps the blocks, their shares, the ring and the ends; what differs is in decode_int4.cuh. Its products are `mma.sync`
// of a warp by itself: a tile is MXK_UNITS units, every warp of the consumers has a share of the columns of all of them,
// and activations stay bf16: each warp holds those of its columns in registers, and brings them by itself when an expert
// begins. 112 registers a thread hold 8 rows of K = 7168 or 24 of 2048, and shared memory is the ring's, or holds 8 more.
// What binds: docs/performance/h200.md.
#include "decode_finish.cuh"
#if MXK_FORMAT
#include "decode_int4.cuh"
#else
#include "decode_digits.cuh"
#include "decode_multiply.cuh"
#endif

__device__ __forceinline__ void start_barriers(const Decode& p, u32 barriers) {
  if (threadIdx.x == 64 && MXK_ALIGNED && p.maps == nullptr) {
    if (!PROJECT) prefetch_map(p.w13_map);
    prefetch_map(p.w2_map);
    if (!PROJECT && GateUp::PADDED) prefetch_map(p.s13_map);
    if (Down::PADDED) prefetch_map(p.s2_map);
  }
  if (threadIdx.x == 32) {
    for (int i = 0; i < STAGES; ++i)
      barrier_init(barriers + AT_SLOT_FULL + 8 * i, 1), barrier_init(barriers + AT_SLOT_EMPTY + 8 * i, CONSUMERS);
    for (int i = 0; i < SCALE_STAGES; ++i) barrier_init(barriers + AT_SCALES_EMPTY + 8 * i, CONSUMERS);
    for (int i = 0; DIGIT_WARPS > 0 && i < BUFFERS; ++i)
      barrier_init(barriers + AT_DIGITS_FULL + 8 * i, DIGIT_WARPS), barrier_init(barriers + AT_DIGITS_EMPTY + 8 * i, CONSUMERS);
    for (int i = 0; i < SUM_STAGES; ++i)
      barrier_init(barriers + AT_SUMS_FULL + 8 * i, CONSUMERS), barrier_init(barriers + AT_SUMS_EMPTY + 8 * i, EPILOGUE);
    barrier_init_fence();
  }
}

// The rows of x that a launch will want, towards the L2, while the routes are sorted: each thread a line.
__device__ __forceinline__ void fetch_activations(const Decode& p) {
  constexpr u32 LINE = 128, LINES = (PROJECT ? I : K) * 2 / LINE;
  const u32 rows = PROJECT ? p.rows / p.x_rows : p.tokens;
  if (IS_MXFP4 || PROJECT == MASKED) return;  // of masked rows most are not wanted
  for (u32 at = blockIdx.x * THREADS + threadIdx.x; at < rows * LINES; at += gridDim.x * THREADS)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.x + (at / LINES * p.x_stride * 2 + at % LINES * LINE)));
}

#if MXK_PROJECT
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_project(const __grid_constant__ Decode p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 shared = shared_address(memory);
  let_later_kernels_start();
  start_barriers(p, shared + AT_BARRIERS);
  wait_for_earlier_kernels();
  const RowsReady ready(p.counters, shared);  // there is only one phase
  fetch_activations(p);
  const Routes routes = sort_routes(p, memory);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  if (warp < HELPERS) {
    give_registers<HELPER_REGISTERS>();
    Turn turn, scales;
    if (warp == 0) copy_rows<Down>(p, routes, shared, turn, scales, evict_first());
    else finish_rows<Down>(p, routes, ready, warp - 1, shared, turn);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    ConsumerTurns turn;
    multiply_rows<Down>(p, routes, ready, warp - HELPERS, shared, turn);
  }
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_decode(const __grid_constant__ Decode p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 shared = shared_address(memory);
  let_later_kernels_start();
  start_barriers(p, shared + AT_BARRIERS);
  wait_for_earlier_kernels();
  fetch_activations(p);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const RowsReady ready(p.counters, shared);
  if (warp == 1) ready.read_before();
#if !MXK_FORMAT
  if (warp >= HELPERS && few_tokens(p)) make_digits_of_tokens(p, threadIdx.x - HELPERS * 32, shared);
#endif
  const Routes routes = sort_routes(p, memory);
  if (warp < HELPERS) {
    give_registers<HELPER_REGISTERS>();
    if (warp == 0) {
      Turn turn, scales;
      const u64 policy = evict_first();
      copy_rows<GateUp>(p, routes, shared, turn, scales, policy);
      copy_rows<Down>(p, routes, shared, turn, scales, policy);
#if !MXK_FORMAT
    } else if (warp <= DIGIT_WARPS) {
      Turn turn;
      const u32 thread = threadIdx.x - 32;
      make_more_digits<GateUp>(p, routes, ready, thread, shared, turn);
      make_more_digits<Down>(p, routes, ready, thread, shared, turn);
#endif
    } else {
      Turn turn;
      const u32 unit = warp - 1 - DIGIT_WARPS;
      load_router(p, memory, threadIdx.x - (1 + DIGIT_WARPS) * 32);
      finish_rows<GateUp>(p, routes, ready, unit, shared, turn);
      finish_rows<Down>(p, routes, ready, unit, shared, turn);
      if (!MXK_PER_ROUTE) add_slots(p, routes, ready);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const u32 thread = threadIdx.x - HELPERS * 32;
    ConsumerTurns turn;
    if (MXK_PER_ROUTE) clear_absent(p, routes, thread, CONSUMERS * 32);
#if MXK_FORMAT
    multiply_rows<GateUp>(p, routes, ready, warp - HELPERS, shared, turn);
    multiply_rows<Down>(p, routes, ready, warp - HELPERS, shared, turn);
#else
    const int share = (warp - HELPERS) / 4;
    multiply_rows<GateUp>(p, routes, ready, share, warp % 4, shared, turn);
    multiply_rows<Down>(p, routes, ready, share, warp % 4, shared, turn);
#endif
    if (!MXK_PER_ROUTE) add_slots(p, routes, ready);
  }
}
#endif
