// Rows that the caller has sorted by expert (overloads "sorted", "contiguous" and "masked" of ops/project.py), brought to
// where prefill.cu wants them.
//
//   groups_plan     blocks of places -> first row of each block, tiles of each tile size
//   groups_gather   x[source(place)] -> X[row], in prefill.cu's panels of 64 permuted columns, and the target of each row
//
// A block is `block_size` places of one expert: of sorted_token_ids, of the 128 rows of a group, or the max_m rows of an
// expert. Places at its end that hold nothing are left out; consecutive full blocks of an expert are one run, so that
// tiles do not depend on the caller's block size. One block of threads plans: the counts are in shared memory, and
// nothing goes to the host. Limits: as many blocks as counts fit there, 24576 (grouped.py).
#include "rows.cuh"

enum Groups : i32 { SORTED, CONTIGUOUS, MASKED };

struct Rows {
  const i32* first;    // sorted_token_ids, m_indices or masked_m
  const i32* experts;  // sorted: expert_ids
  const i32* count;    // sorted: num_tokens_post_padded
  const u8* x;
  u8* rows;            // X in panels
  int2* of_block;      // first row, and places that have one; null: rows stay where they are, and no others are made
  i32* target;         // row of out of each row, -1 for none
  int4* tiles;         // [sizes][most_tiles]; with first places in place of first rows where rows stay
  i32* num_tiles;      // [sizes]
  i64 x_stride, x_outer;  // elements; masked: from expert to expert
  i32 kind;
  i32 places, block_size, blocks, num_experts;
  i32 num_rows, top_k;  // of out, and how many of them read a row of x
  i32 columns, total_rows, most_tiles;
  i32 sizes[MOST_SIZES];
  i32 x_aligned;
};

// Row of out at a place, -1 for none.
__device__ __forceinline__ int row_at(const Rows& p, int place) {
  const int value = p.first[place];
  if (p.kind == CONTIGUOUS) return value >= 0 && value < p.num_experts ? place : -1;
  return value >= 0 && value < p.num_rows ? value : -1;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS) groups_plan(const __grid_constant__ Rows p) {
  extern __shared__ int used[];  // places of a block up to its last that holds something
  __shared__ int lists[MOST_SIZES], next_row;
  wait_for_earlier_kernels();
  const int counting = p.kind == SORTED ? min(p.places, max(0, *p.count)) : p.places;
  if (threadIdx.x < MOST_SIZES) lists[threadIdx.x] = 0;
  if (threadIdx.x == 0) next_row = 0;
  const auto holds = [&](int place) { return row_at(p, place) >= 0; };
  // Most blocks are full, which their last place shows; the others are looked through by a warp each.
#pragma unroll 4
  for (int block = threadIdx.x; block < p.blocks; block += SORT_THREADS) {
    const int end = min((block + 1) * p.block_size, counting);
    if (p.kind == MASKED) used[block] = min(max(p.first[block], 0), p.block_size);
    else used[block] = end - block * p.block_size == p.block_size && holds(end - 1) ? p.block_size : -1;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int base = threadIdx.x - lane; base < p.blocks; base += SORT_THREADS) {
    for (u32 open = __ballot_sync(~0u, base + lane < p.blocks && used[base + lane] < 0); open != 0; open &= open - 1) {
      const int block = base + __ffs(open) - 1, begin = block * p.block_size, end = min(begin + p.block_size, counting);
      int last = 0;
#pragma unroll 4
      for (int place = begin + lane; place < end; place += 32)
        if (holds(place)) last = place - begin + 1;
      for (int step = 16; step > 0; step /= 2) last = max(last, __shfl_xor_sync(~0u, last, step));
      if (lane == 0) used[block] = last;
    }
  }
  __syncthreads();
  const auto expert_of = [&](int block) {
    if (p.kind == MASKED) return block;
    return p.kind == CONTIGUOUS ? p.first[block * p.block_size] : p.experts[block];
  };
#pragma unroll 4
  for (int block = threadIdx.x; block < p.blocks; block += SORT_THREADS) {
    const int expert = expert_of(block);
    if (expert < 0 || expert >= p.num_experts) used[block] = 0;
  }
  __syncthreads();
  // Whether a block belongs to the run of the one before: found by all threads at once, as experts are far away.
  constexpr int CONTINUES = 1 << 30;
  u32 continues = 0;
#pragma unroll 4
  for (int block = threadIdx.x, i = 0; block < p.blocks; block += SORT_THREADS, ++i) {
    const int before = max(block - 1, 0);
    const bool same = expert_of(block) == expert_of(before);
    if (same && block > 0 && used[block] > 0 && used[before] == p.block_size) continues |= 1u << i;
  }
  __syncthreads();
  for (int block = threadIdx.x, i = 0; block < p.blocks; block += SORT_THREADS, ++i)
    if (continues >> i & 1) used[block] |= CONTINUES;
  __syncthreads();
  for (int block = threadIdx.x; block < p.blocks; block += SORT_THREADS) {
    int rows = used[block], last = block + 1;
    if (rows == 0 && p.of_block != nullptr) p.of_block[block] = make_int2(0, 0);
    if (rows == 0 || rows & CONTINUES) continue;
    for (; last < p.blocks && used[last] & CONTINUES; ++last) rows += used[last] & ~CONTINUES;
    int first = block * p.block_size;
    if (p.of_block != nullptr) {
      // In panels, rows lie together. Which run comes first no result depends on.
      first = atomicAdd(&next_row, (rows + ROW_STEP - 1) / ROW_STEP * ROW_STEP);
      for (int i = block, at = first; i < last; ++i) {
        const int count = used[i] & ~CONTINUES;
        p.of_block[i] = make_int2(at, count);
        at += count;
      }
    }
    make_tiles(p.tiles, lists, p.sizes, p.most_tiles, expert_of(block), first, rows);
  }
  __syncthreads();
  if (threadIdx.x < MOST_SIZES) p.num_tiles[threadIdx.x] = lists[threadIdx.x];
  let_later_kernels_start();
}

// A warp a place and segment of columns.
extern "C" __global__ void __launch_bounds__(32 * GATHER_WARPS) groups_gather(const __grid_constant__ Rows p) {
  __shared__ Exchange exchange[GATHER_WARPS];
  const int warp = threadIdx.x / 32;
  const int segments = (p.columns + SEGMENT - 1) / SEGMENT, work = blockIdx.x * GATHER_WARPS + warp;
  const int place = work / segments;
  wait_for_earlier_kernels();
  if (place >= p.places || (p.kind == SORTED && place >= *p.count)) return;
  const int block = place / p.block_size, inside = place - block * p.block_size;
  if (block >= p.blocks) return;
  const int2 of_block = p.of_block[block];
  if (inside >= of_block.y) return;
  const int row = of_block.x + inside, target = p.kind == MASKED ? place : row_at(p, place);
  if (threadIdx.x % 32 == 0) p.target[row] = target;
  if (target < 0) return;
  const i64 at = p.kind == MASKED ? block * p.x_outer + inside * p.x_stride
                                  : static_cast<i64>(target / p.top_k) * p.x_stride;
  copy_row(reinterpret_cast<const u16*>(p.x) + at, p.x_aligned, p.columns, p.rows, p.total_rows, row,
           work % segments, exchange[warp]);
}
