// What surrounds the expert GEMMs of prefill.cu: rows sorted by expert before them, routes summed per token after.
//
//   prefill_sort     routes -> row of each route, tiles of each tile size
//   prefill_gather   x[token] -> X[row], in prefill.cu's panels of 64 permuted columns
//   prefill_sum      out[t] = sum over slots, in order, of topk_weights[t, slot] * Y[row of the route]    (or per route)
//
// Sorting is a counting sort in one block: the counts of the experts are in shared memory, and nothing goes to the host.
// The order of rows inside an expert depends on the run; no result does, as each row is a column of its own in the
// products.
#include "rows.cuh"

constexpr int MOST_EXPERTS = 1024;  // one a thread
constexpr int SUM_THREADS = 256;
constexpr int MOST_TOP_K = 64;

struct Routing {
  const u8* ids;
  const u8* weights;
  const u8* x;
  const float* y;       // [total_rows][hidden]
  u8* rows;             // X in panels
  u8* out;              // bf16 [tokens, hidden] or [tokens, top_k, hidden]
  i32* row_of_route;    // -1: not here
  int4* tiles;          // [sizes][most_tiles]
  i32* num_tiles;       // [sizes]
  i32* target;          // route of each row that has one; null where nobody asks
  i64 ids_stride[2], weights_stride[2];  // elements
  i64 x_stride;                          // elements
  i64 experts_min;
  i32 tokens, top_k, experts, hidden;
  i32 total_rows, most_tiles;
  i32 sizes[MOST_SIZES];  // ascending, 0 = none
  i32 id_bytes, id_signed, weights_dtype, x_aligned, per_route;
  i32 routes_a_row;  // of x
};

__device__ __forceinline__ i64 load_id(const u8* ids, i64 index, i32 bytes, i32 is_signed) {
  switch (bytes) {
    case 1: return is_signed ? static_cast<i64>(reinterpret_cast<const signed char*>(ids)[index]) : ids[index];
    case 2: {
      const u16 value = reinterpret_cast<const u16*>(ids)[index];
      return is_signed ? static_cast<i64>(static_cast<short>(value)) : value;
    }
    case 4: {
      const u32 value = reinterpret_cast<const u32*>(ids)[index];
      return is_signed ? static_cast<i64>(static_cast<i32>(value)) : value;
    }
    default: return reinterpret_cast<const i64*>(ids)[index];  // unsigned beyond 2^63 turns negative: not here either
  }
}

__device__ __forceinline__ int local_expert(const Routing& p, int route) {
  const int token = route / p.top_k, slot = route - token * p.top_k;
  const i64 id = load_id(p.ids, token * p.ids_stride[0] + slot * p.ids_stride[1], p.id_bytes, p.id_signed);
  const i64 expert = id - p.experts_min;
  return expert >= 0 && expert < p.experts ? static_cast<int>(expert) : -1;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS) prefill_sort(const __grid_constant__ Routing p) {
  __shared__ int counts[MOST_EXPERTS], of_warps[SORT_THREADS / 32], lists[MOST_SIZES];
  wait_for_earlier_kernels();
  counts[threadIdx.x] = 0;
  if (threadIdx.x < MOST_SIZES) lists[threadIdx.x] = 0;
  __syncthreads();
  const int routes = p.tokens * p.top_k;
#pragma unroll 4
  for (int route = threadIdx.x; route < routes; route += SORT_THREADS) {
    const int expert = local_expert(p, route);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int count = counts[threadIdx.x];
  const int first = exclusive_sum((count + ROW_STEP - 1) / ROW_STEP * ROW_STEP, of_warps);
  if (count > 0) make_tiles(p.tiles, lists, p.sizes, p.most_tiles, threadIdx.x, first, count);
  counts[threadIdx.x] = first;  // from here on the next free row
  __syncthreads();
  if (threadIdx.x < MOST_SIZES) p.num_tiles[threadIdx.x] = lists[threadIdx.x];
#pragma unroll 4
  for (int route = threadIdx.x; route < routes; route += SORT_THREADS) {
    const int expert = local_expert(p, route);
    const int row = expert >= 0 ? atomicAdd(&counts[expert], 1) : -1;
    p.row_of_route[route] = row;
    if (row >= 0 && p.target != nullptr) p.target[row] = route;
  }
  let_later_kernels_start();
}

extern "C" __global__ void __launch_bounds__(32 * GATHER_WARPS) prefill_gather(const __grid_constant__ Routing p) {
  __shared__ Exchange exchange[GATHER_WARPS];
  const int warp = threadIdx.x / 32;
  const int segments = (p.hidden + SEGMENT - 1) / SEGMENT, work = blockIdx.x * GATHER_WARPS + warp;
  const int route = work / segments;
  wait_for_earlier_kernels();
  if (route >= p.tokens * p.top_k) return;
  const int row = p.row_of_route[route];
  if (row < 0) return;
  const u16* x = reinterpret_cast<const u16*>(p.x) + static_cast<i64>(route / p.routes_a_row) * p.x_stride;
  copy_row(x, p.x_aligned, p.hidden, p.rows, p.total_rows, row, work % segments, exchange[warp]);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) prefill_sum(const __grid_constant__ Routing p) {
  __shared__ int rows[MOST_TOP_K];
  __shared__ float weights[MOST_TOP_K];
  const int token = blockIdx.x;
  wait_for_earlier_kernels();
  for (int slot = threadIdx.x; slot < p.top_k; slot += SUM_THREADS) {
    rows[slot] = p.row_of_route[token * p.top_k + slot];
    weights[slot] =
        load_float(p.weights, token * p.weights_stride[0] + slot * p.weights_stride[1], p.weights_dtype);
  }
  __syncthreads();
  for (int at = 4 * threadIdx.x; at < p.hidden; at += 4 * SUM_THREADS) {
    float sum[4] = {};
    for (int slot = 0; slot < p.top_k; ++slot) {
      float part[4] = {};
      if (rows[slot] >= 0) {
        const float4 y = *reinterpret_cast<const float4*>(p.y + static_cast<i64>(rows[slot]) * p.hidden + at);
        const float weight = weights[slot];
        part[0] = y.x * weight, part[1] = y.y * weight, part[2] = y.z * weight, part[3] = y.w * weight;
      }
      if (p.per_route) {
        *reinterpret_cast<uint2*>(p.out + 2 * ((static_cast<i64>(token) * p.top_k + slot) * p.hidden + at)) =
            make_uint2(pack_bf16x2(part[0], part[1]), pack_bf16x2(part[2], part[3]));
      } else if (rows[slot] >= 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
      }
    }
    if (!p.per_route)
      *reinterpret_cast<uint2*>(p.out + 2 * (static_cast<i64>(token) * p.hidden + at)) =
          make_uint2(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]));
  }
}
