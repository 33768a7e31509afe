// The decode kernel's work: routes sorted by expert in every block, and each block's share of the rows.
#pragma once
#include "decode.cuh"

__device__ __forceinline__ u32 load_shared_byte(u32 address) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared_8(u32 address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(low), "f"(high) : "memory");
}
__device__ __forceinline__ void store_shared_16(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared_byte(u32 address, u32 value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void max_shared(u32 address, u32 value) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void add_shared(u32 address, u32 value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
template <int BARRIER, int THREADS_>
__device__ __forceinline__ void team_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS_) : "memory");
}

// ---- the routes, by expert

// Few tokens: in gate/up a column of the product is a token, and not a position in the column block's list, so that all
// experts take the same activations, which can be made before the routes are known.
__device__ __forceinline__ bool few_tokens(const Decode& p) {
  return !MXK_FORMAT && !PROJECT && p.tokens <= ROWS && p.tokens * TOP_K <= 32;
}

// A column block: up to ROWS routes of one expert. route[first .. first + count) are its routes.
struct Routes {
  const u16 *expert, *first, *count, *route;  // of column block, of column block, of column block, of position
  const u16* expert_of;                       // of route; NOT_HERE
  const float* weight;                        // of route
  int blocks;
  bool together;                              // as `few_tokens` says

  __device__ int at(int position) const { return PROJECT == MASKED ? position : route[position]; }
};
constexpr u32 NOT_HERE = 0xFFFF;

__device__ __forceinline__ u32 local_expert(const Decode& p, int route) {
  const i64 at = route / TOP_K * p.ids_stride[0] + route % TOP_K * p.ids_stride[1];
  i64 id;
  switch (p.ids_bytes) {
    case 1: id = p.ids_signed ? reinterpret_cast<const signed char*>(p.ids)[at] : p.ids[at]; break;
    case 2:
      id = p.ids_signed ? reinterpret_cast<const short*>(p.ids)[at] : reinterpret_cast<const u16*>(p.ids)[at];
      break;
    case 4:
      id = p.ids_signed ? reinterpret_cast<const i32*>(p.ids)[at] : reinterpret_cast<const u32*>(p.ids)[at];
      break;
    default:
      id = reinterpret_cast<const i64*>(p.ids)[at];
      if (!p.ids_signed && id < 0) return NOT_HERE;
  }
  const u64 index = static_cast<u64>(id) - static_cast<u64>(p.experts_min);  // wraps to a large number below the range
  return index < E ? static_cast<u32>(index) : NOT_HERE;
}

// expert_of for the rows of a caller's blocks of `block_size` places.
__device__ __forceinline__ void read_sorted(const Decode& p, u16* expert_of) {
  const i32* sorted = reinterpret_cast<const i32*>(p.ids);
  for (int row = threadIdx.x; row < p.rows; row += THREADS) expert_of[row] = NOT_HERE;
  __syncthreads();
  const int used = min(min(p.places, max(0, *p.places_used)), p.blocks * p.block_size);
  for (int place = threadIdx.x; place < used; place += THREADS) {
    const int row = sorted[place], expert = p.expert_of_block[place / p.block_size];
    if (row >= 0 && row < p.rows) expert_of[row] = expert >= 0 && expert < E ? static_cast<u16>(expert) : NOT_HERE;
  }
}

// As `sort_routes`, of up to 32 routes, by one warp: a route a lane.
__device__ __forceinline__ int sort_few(const Decode& p, int routes, u16* expert, u16* first, u16* count, u16* route, u16* expert_of) {
  const int lane = threadIdx.x & 31;
  const u32 e = lane < routes ? local_expert(p, lane) : NOT_HERE;
  int at = 0;
  u32 same = 0;
  for (int i = 0; i < routes; ++i) {
    const u32 other = __shfl_sync(~0u, e, i);
    at += other < e;
    same |= (other == e ? 1u : 0u) << i;
  }
  const int earlier = __popc(same & ((1u << lane) - 1));
  at += earlier;
  const bool starts = e != NOT_HERE && earlier % ROWS == 0;  // a column block
  const u32 starters = __ballot_sync(~0u, starts);
  int block = 0;
  for (u32 left = starters; left != 0; left &= left - 1) block += __shfl_sync(~0u, at, __ffs(left) - 1) < at;
  if (lane < routes) expert_of[lane] = static_cast<u16>(e);
  if (e != NOT_HERE) route[at] = static_cast<u16>(lane);
  if (starts) {
    expert[block] = static_cast<u16>(e);
    first[block] = static_cast<u16>(at);
    count[block] = static_cast<u16>(min(__popc(same) - earlier, ROWS));
  }
  return __popc(starters);
}

// Every block sorts the routes for itself: its first warp counts, places and lists them, in route order. The first warp may
// use the mbarriers afterwards; the others are not waited for where routes are few. INT4, whose calls have more: all
// warps, 32 routes at a time, whose experts' counts a table keeps.
__device__ __forceinline__ Routes sort_routes(const Decode& p, u8* shared) {
  int* counts = reinterpret_cast<int*>(shared + AT_COUNTS);
  int* offsets = reinterpret_cast<int*>(shared + AT_OFFSETS);
  u16* lists = reinterpret_cast<u16*>(shared + AT_LISTS);
  u16 *expert = lists, *first = lists + MAX_ROUTES, *count = lists + 2 * MAX_ROUTES, *route = lists + 3 * MAX_ROUTES;
  u16 *expert_of = lists + 4 * MAX_ROUTES, *rank = lists + 5 * MAX_ROUTES;
  int* blocks = reinterpret_cast<int*>(shared + AT_END);
  float* weight = reinterpret_cast<float*>(shared + AT_ROUTER);
  const int routes = PROJECT >= SORTED ? p.rows : p.tokens * TOP_K, lane = threadIdx.x;
  if (!PROJECT && routes <= 32) {
    if (threadIdx.x < 32) {
      const int found = sort_few(p, routes, expert, first, count, route, expert_of);
      if (lane == 0) *blocks = found;
      team_sync<4, 64>();  // the second warp made the mbarriers
      asm volatile("bar.arrive %0, %1;" ::"n"(5), "n"(THREADS) : "memory");
    } else {
      if (threadIdx.x < 64) team_sync<4, 64>();
      team_sync<5, THREADS>();
    }
    return {expert, first, count, route, expert_of, weight, *blocks, few_tokens(p)};
  }
  constexpr bool BY_ALL = COUNT_BYTES > 0;
  u8* counts_of = shared + AT_COUNTS_OF;  // [32 routes][expert]
  if (BY_ALL) {
    for (int e = threadIdx.x; e < E; e += THREADS) counts[e] = 0;
    for (int i = threadIdx.x; i < COUNT_BYTES / 4; i += THREADS) reinterpret_cast<u32*>(counts_of)[i] = 0;
  }
  if (PROJECT != MASKED) {
    if (PROJECT == SORTED) {
      read_sorted(p, expert_of);
    } else {
      for (int r = threadIdx.x; r < routes; r += THREADS) expert_of[r] = static_cast<u16>(local_expert(p, r));
    }
    __syncthreads();
  }
  if (BY_ALL) {
    for (int base = threadIdx.x / 32 * 32; base < routes; base += THREADS) {
      const int r = base + threadIdx.x % 32;
      const u32 e = r < routes ? expert_of[r] : NOT_HERE, same = __match_any_sync(~0u, e);
      const u32 earlier = same & ((1u << threadIdx.x % 32) - 1);
      if (e == NOT_HERE) continue;
      rank[r] = static_cast<u16>(__popc(earlier));
      if (earlier != 0) continue;
      counts_of[base / 32 * E + e] = static_cast<u8>(__popc(same));
      add_shared(shared_address(shared) + AT_COUNTS + e * 4, __popc(same));
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    for (int e = lane; !BY_ALL && e < E; e += 32)
      counts[e] = PROJECT == MASKED ? min(max(reinterpret_cast<const i32*>(p.ids)[e], 0), p.block_size) : 0;
    __syncwarp();
    for (int base = 0; !BY_ALL && PROJECT != MASKED && base < routes; base += 32) {
      const u32 e = base + lane < routes ? expert_of[base + lane] : NOT_HERE;
      const u32 same = __match_any_sync(~0u, e);
      const u32 earlier = same & ((1u << lane) - 1);
      const int before = e != NOT_HERE ? counts[e] : 0;
      __syncwarp();
      if (e != NOT_HERE) {
        rank[base + lane] = static_cast<u16>(before + __popc(earlier));
        if (earlier == 0) counts[e] = before + __popc(same);
      }
      __syncwarp();
    }
    constexpr int EACH = (E + 31) / 32;
    int mine[EACH], sum = 0;  // rows in the low half, column blocks in the high half
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int e = lane * EACH + i;
      mine[i] = e < E ? counts[e] : 0;
      sum += mine[i] + ((mine[i] + ROWS - 1) / ROWS << 16);
    }
    int before = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, before, d);
      if (lane >= d) before += other;
    }
    if (lane == 31) *blocks = before >> 16;
    before -= sum;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int e = lane * EACH + i;
      if (mine[i] == 0) continue;
      int row = PROJECT == MASKED ? e * p.block_size : before & 0xFFFF, block = before >> 16;
      offsets[e] = row;
      for (int left = mine[i]; left > 0; left -= ROWS, row += ROWS, ++block) {
        expert[block] = static_cast<u16>(e);
        first[block] = static_cast<u16>(row);
        count[block] = static_cast<u16>(left < ROWS ? left : ROWS);
      }
      before = (block << 16) + (before & 0xFFFF) + mine[i];
    }
    __syncwarp();
    for (int r = lane; !BY_ALL && PROJECT != MASKED && r < routes; r += 32) {
      const u32 e = expert_of[r];
      if (e != NOT_HERE) route[offsets[e] + rank[r]] = static_cast<u16>(r);
    }
  }
  __syncthreads();
  if (BY_ALL) {
    for (int r = threadIdx.x; r < routes; r += THREADS)
      if (const u32 e = expert_of[r]; e != NOT_HERE) {
        u32 at = offsets[e] + rank[r];
        for (int before = 0; before < r / 32; ++before) at += counts_of[before * E + e];
        route[at] = static_cast<u16>(r);
      }
    __syncthreads();
  }
  return {expert, first, count, route, expert_of, weight, *blocks, false};
}

// ---- the work of this block: units of all column blocks, a tile at a time, never of two column blocks

// What is shared out: whole tiles, since one costs the same however few units it has; INT4's, whose warps go through all units,
// costs what it has.
constexpr int STEP = MXK_FORMAT ? 1 : TILE_UNITS;
template <class P>
__device__ constexpr u32 steps_of() { return (P::UNITS + STEP - 1) / STEP; }  // of a column block

// Each part is divided evenly among the blocks. Those who get one step more are the next in turn, from part to part and from
// gate/up to down, so that in all nobody has more than one more.
template <class P>
struct Walk {
  int column_blocks, next_part = 0;
  u32 turn = 0;                         // who is next
  int left = 0;                         // steps of this block in the part
  int block = 0, first = 0, count = 0;  // of the tile: column block, first unit in its expert, units

  __device__ explicit Walk(int column_blocks) : column_blocks(column_blocks) {
    if constexpr (!P::PAIRS && !PROJECT) {
      for (int part = 0; part < PARTS; ++part) turn += (begin(part + 1) - begin(part)) * steps_of<GateUp>() % gridDim.x;
      turn %= gridDim.x;
    }
  }
  __device__ int part() const { return next_part - 1; }
  __device__ bool next() {
    first += count;
    if (first == P::UNITS) first = 0, ++block;
    while (left == 0) {
      if (next_part == PARTS) return false;
      const u32 total = (begin(next_part + 1) - begin(next_part)) * steps_of<P>();
      const u32 each = total / gridDim.x, more = total - each * gridDim.x;
      const u32 rank = blockIdx.x >= turn ? blockIdx.x - turn : blockIdx.x + gridDim.x - turn;
      const u32 step = rank * each + min(rank, more), in = step / steps_of<P>();
      left = each + (rank < more ? 1 : 0);
      block = begin(next_part) + in;
      first = (step - in * steps_of<P>()) * STEP;
      turn += more;
      if (turn >= gridDim.x) turn -= gridDim.x;
      ++next_part;
    }
    count = min(min(P::UNITS - first, TILE_UNITS), left * STEP);
    left -= (count + STEP - 1) / STEP;
    return true;
  }

 private:
  __device__ u32 begin(int part) const {
    if (PARTS > 1 && column_blocks > MOST_IN_PARTS) return part == 0 ? 0 : column_blocks;  // all in the first
    return static_cast<u32>(column_blocks * part) / PARTS;
  }
};

struct Turn {  // of a ring
  u32 slot = 0, parity = 0;
  __device__ void advance(u32 size) {
    if (++slot == size) {
      slot = 0;
      parity ^= 1;
    }
  }
};
