// Few tokens: a whole MXFP4 MoE layer in one launch, from the checkpoint's bytes.
//
//   H[r, i]   = bf16(activate(w13[gate(i)] . x[r / k] + bias, w13[up(i)] . x[r / k] + bias))   r = token * k + slot
//   Y[r, n]   = (w2[n] . H[r] + bias) * router[r]                                              fp32
//   out[t, n] = Y[t, 0, n] + Y[t, 1, n] + ...   in slot order, one rounding to bf16; with PER_ROUTE out[r, n] = Y[r, n]
//
// Launch contract (one module a shape, macros MXK_*, defaults below)
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
// Schedule. Bytes bind, so everything serves the stream of weights. A block owns a contiguous, byte-balanced range of
// the rows of all touched experts. One warp brings rows by bulk copies into a ring of about 200 KB; when its gate/up rows
// are issued it goes on with its down rows, while the others wait for the grid-wide barrier between the projections:
// the memory pipe does not idle. WARPS consumer warps split the columns: each keeps its part of the activations in
// registers (the n side of m16n8k16, 8 rows of an expert), unpacks 16 weight rows (the m side) and multiplies. Three more
// warps add the partial sums in fixed order, apply bias, activation or router weight, and store.
// A lane reads 16 bytes = 32 codes = one scale group of a row; both operands use the same permutation of k, so nothing
// is shuffled. Gate row i and up row i sit at rows g and g + 8 of one fragment: the activation needs no exchange.
// Unpacking is 13 instructions and 4 multiplies for 8 weights: ALU and FMA pipes are busy for about 70 % of the time that
// the bytes take.
#include "call.cuh"

// ---- parameters of the module

#ifndef MXK_HIDDEN
#define MXK_HIDDEN 2880
#endif
#ifndef MXK_INTER
#define MXK_INTER 2880
#endif
#ifndef MXK_EXPERTS
#define MXK_EXPERTS 128
#endif
#ifndef MXK_TOP_K
#define MXK_TOP_K 4
#endif
#ifndef MXK_MAX_ROUTES
#define MXK_MAX_ROUTES 256  // multiple of 8
#endif
#ifndef MXK_WARPS
#define MXK_WARPS 4  // that split the columns of a slot
#endif
#ifndef MXK_GROUPS
#define MXK_GROUPS 2  // of such warps, which take slots in turn
#endif
#ifndef MXK_STAGES
#define MXK_STAGES 4  // slots of the ring
#endif
#ifndef MXK_TILES13
#define MXK_TILES13 1  // 16-row tiles a slot, gate and up
#endif
#ifndef MXK_TILES2
#define MXK_TILES2 1  // 16-row tiles a slot, down
#endif
#ifndef MXK_COLUMN_TILES
#define MXK_COLUMN_TILES 1  // rows of an expert taken at once, in eights
#endif
#ifndef MXK_INTERLEAVED
#define MXK_INTERLEAVED 1  // row 2i is gate i, row 2i + 1 up i; otherwise gate_row + i and up_row + i
#endif
#ifndef MXK_SCALES_SMALL
#define MXK_SCALES_SMALL 0  // 1: no scale byte of w13 and w2 is above 128, which was checked once a weight
#endif
#ifndef MXK_PER_ROUTE
#define MXK_PER_ROUTE 0
#endif
#ifndef MXK_ALIGNED
#define MXK_ALIGNED 1
#endif
#ifndef MXK_X_ALIGNED
#define MXK_X_ALIGNED 1
#endif
#ifndef MXK_FEW
#define MXK_FEW 0  // 1: T * k <= 8 * MXK_COLUMN_TILES, all routes are columns of one product; not with PER_ROUTE
#endif
#ifndef MXK_BLOCKS
#define MXK_BLOCKS 132  // of the grid; only MXK_FEW counts on it
#endif
#ifndef MXK_PROBE
#define MXK_PROBE 0  // to see what binds: 1 no arithmetic, 2 no copies, 3 neither
#endif

struct Decode {
  const u8* x;  // bf16 [T, K], dense rows
  const u8* ids;
  const u8* router;
  Operand w13, s13, b13;  // with row_step 1 and separate stacks: up rows are expert + up_expert
  Operand w2, s2, b2;
  u8* out;  // bf16, contiguous
  u8* h;
  u8* y;
  u32* counters;
  i64 x_stride;                             // elements
  i64 ids_stride[2], router_stride[2];      // elements
  i64 experts_min;
  i32 tokens;
  i32 ids_bytes, ids_signed;                // 1, 2, 4 or 8
  i32 router_dtype, b13_dtype, b2_dtype;    // Dtype
  i32 activation;                           // Activation
  i32 gate_row, up_row, up_expert;          // not interleaved
  float alpha, limit;
};

constexpr int K = MXK_HIDDEN, I = MXK_INTER, E = MXK_EXPERTS, TOP_K = MXK_TOP_K, MAX_ROUTES = MXK_MAX_ROUTES;
constexpr int W = MXK_WARPS, GROUPS = MXK_GROUPS, NT = MXK_COLUMN_TILES, STAGES = MXK_STAGES;
constexpr int HELPERS = 4;  // warp 0 copies, 1..3 are the epilogue: a warpgroup, as register counts are set by warpgroup
constexpr int EPILOGUE = HELPERS - 1;
constexpr bool DIGITS = MXK_SCALES_SMALL;      // activations as integers of two digits, otherwise bf16
constexpr int COLUMNS = (DIGITS ? 4 : 8) * NT;  // rows of an expert taken at once
constexpr int CONSUMERS = GROUPS * W;
constexpr int THREADS = (CONSUMERS + HELPERS) * 32;
// Buffers between consumers and epilogue. A wait tells uses of a barrier apart by one bit, so whoever waits for a use
// must know that the use before it has ended: every buffer and slot is always the same warps' turn.
constexpr int PARTIALS = GROUPS == 2 ? 6 : 3;
constexpr int HELPER_REGISTERS = 72;
// Of what the launch gives every thread: asking for more than the helpers gave back would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8 < 248 ? 65536 / THREADS / 8 * 8 : 248;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - HELPERS * 32 * HELPER_REGISTERS) / (CONSUMERS * 32) / 8 * 8;
constexpr int SHARED_LIMIT = 232448;  // of a block
static_assert(K % 32 == 0 && I % 32 == 0 && MAX_ROUTES % 8 == 0 && CONSUMERS % 4 == 0, "limits");
static_assert(!(MXK_FEW && MXK_PER_ROUTE), "MXK_FEW sums routes");
static_assert(GROUPS <= 2 && STAGES % GROUPS == 0 && PARTIALS % GROUPS == 0 && PARTIALS % EPILOGUE == 0, "turns");

__host__ __device__ constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

// One projection: COLUMNS of the dot product, `TILES` 16-row tiles a slot, `PAIRS` if units of work are (gate, up) rows.
template <int LENGTH, int TILES_, bool PAIRS_, int UNITS_>
struct Projection {
  static constexpr int TILES = TILES_, UNITS = UNITS_;  // UNITS of an expert
  static constexpr bool PAIRS = PAIRS_;
  static constexpr int UNITS_A_SLOT = (PAIRS ? 8 : 16) * TILES;
  static constexpr int BYTES = LENGTH / 2, GROUPS = LENGTH / 32;
  // A step is what a warp multiplies at once: a group, or with bf16 128 columns, a group a lane of four.
  static constexpr int STEPS = DIGITS ? GROUPS : (LENGTH + 127) / 128;
  static constexpr int STEPS_A_WARP = (STEPS + W - 1) / W;
  // Rows of a slot lie so that the lanes' reads hit no bank twice. Digits: four bytes of eight rows, an odd multiple of 16
  // bytes apart. bf16: 16 bytes of two rows a quarter warp, 64 modulo 128 bytes apart; where rows as they are do that two
  // rows apart, slot row 2g + half is fragment row g + 8 * half, and the slot is copied in one piece.
  static constexpr bool WHOLE = !DIGITS && MXK_ALIGNED && BYTES % 64 == 32 && (MXK_INTERLEAVED || !PAIRS);
  static constexpr int STRIDE = DIGITS  ? BYTES / 16 % 2 ? BYTES : BYTES + 16
                                : WHOLE ? BYTES
                                        : BYTES / 128 * 128 + (BYTES % 128 <= 64 ? 64 : 192);
  // Scale rows of a multiple of 16 bytes are copied one by one, to an odd multiple.
  static constexpr bool SCALE_ROWS = DIGITS && MXK_ALIGNED && GROUPS % 16 == 0;
  static constexpr int SCALE_STRIDE = SCALE_ROWS ? GROUPS / 16 % 2 ? GROUPS : GROUPS + 16 : GROUPS;
  __device__ static constexpr int slot_row(int tile, int g, int half) { return 16 * tile + (WHOLE ? 2 * g + half : g + 8 * half); }
  // Down: the output row of a fragment row, from the slot's first.
  __device__ static constexpr int unit(int tile, int g, int half) { return PAIRS ? 8 * tile + g : slot_row(tile, g, half); }
  // Scales of half the rows of a slot; copies start and end on 16 bytes.
  static constexpr int SCALES = round_up(8 * TILES * SCALE_STRIDE, 16) + 32;
  static constexpr int SLOT = round_up(16 * TILES * STRIDE + 2 * SCALES, 128);
};
using GateUp = Projection<K, MXK_TILES13, true, I>;
using Down = Projection<I, MXK_TILES2, false, K>;

constexpr int H_BYTES = DIGITS ? 4 : 2;  // of an element of h: fp32 or bf16
constexpr int TILES = GateUp::TILES > Down::TILES ? GateUp::TILES : Down::TILES;
constexpr int SLOT = GateUp::SLOT > Down::SLOT ? GateUp::SLOT : Down::SLOT;
constexpr int PARTIAL_LANE = DIGITS ? 8 : 16;         // bytes
constexpr int PARTIAL = W * 32 * PARTIAL_LANE;        // of 16 rows and a column tile
constexpr int PARTIAL_SET = TILES * NT * PARTIAL;     // of a slot
constexpr int AT_PARTIALS = STAGES * SLOT;
constexpr int AT_BARRIERS = AT_PARTIALS + PARTIALS * PARTIAL_SET;
constexpr int AT_COUNTS = AT_BARRIERS + round_up(16 * (STAGES + PARTIALS), 16);
constexpr int AT_OFFSETS = AT_COUNTS + round_up(4 * E, 16);
constexpr int AT_LISTS = AT_OFFSETS + round_up(4 * E, 16);
constexpr int AT_ROUTER = AT_LISTS + 6 * 2 * MAX_ROUTES;  // fp32
constexpr int AT_ROWS = AT_ROUTER + 4 * MAX_ROUTES;  // MXK_FEW: Y of this block's rows
constexpr int OWN_ROWS = round_up((K + MXK_BLOCKS - 1) / MXK_BLOCKS, 4);
constexpr int AT_END = AT_ROWS + (MXK_FEW ? COLUMNS * OWN_ROWS * 4 : 0);
constexpr int SHARED = round_up(AT_END + 16, 128);
static_assert(SHARED <= SHARED_LIMIT, "shared memory of a block");

extern "C" {
__device__ __constant__ extern const int decode_threads = THREADS;
__device__ __constant__ extern const int decode_shared = SHARED;
}

// ---- what Hopper offers, besides hopper.cuh

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
__device__ __forceinline__ uint4 read_words(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 read_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 read_pair(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 read_byte(u32 address) {
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
// d = a * b + (start of columns 2q, 2q + 1, the same in both rows)
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int even, int odd) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %10, %11};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(even), "r"(odd));
}
__device__ __forceinline__ void add_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
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

// ---- E2M1 and E8M0

// Bytes of the four low codes: twice the element if its sign bit is clear, otherwise 0. The selector of a byte permutation
// is three bits that choose and one that asks for the byte's sign, eight times: the code itself.
__device__ __forceinline__ u32 elements(u32 codes) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(0x03020100u), "r"(0x0C080604u), "r"(codes));
  return d;
}
// Nibbles j and j + 4 of a word, j = 0..3, as bf16 pairs of value * 2^-126. One product places a nibble twice: exponent
// and mantissa at bits 8..6, the sign at 15.
__device__ __forceinline__ void unpack(u32 word, u32 (&pair)[4]) {
  const u32 upper = word >> 8;
  pair[0] = ((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
  pair[1] = ((word & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
  pair[2] = ((upper & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
  pair[3] = ((upper & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
}
// What `scaled` takes for an E8M0 byte, twice.
__device__ __forceinline__ u32 scale_pair(u32 byte) {
  if constexpr (MXK_SCALES_SMALL) return byte * 0x00800080u + 126u * 0x00800080u;  // 2^(byte - 1)
  const u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7;       // 2^(byte - 127), subnormal for 0
  return bits * 0x00010001u;
}
__device__ __forceinline__ u32 scaled(u32 pair, u32 scale) {
  if constexpr (MXK_SCALES_SMALL) return multiply_bf16x2(pair, scale);
  return multiply_bf16x2(multiply_bf16x2(pair, 0x7E807E80u), scale);  // 2^126: the element itself
}

// ---- the routes, by expert

// A column block: up to 8 * NT routes of one expert. route[first .. first + count) are its routes.
struct Routes {
  const u16 *expert, *first, *count, *route;  // of column block, of column block, of column block, of position
  const u16* expert_of;                       // of route; NOT_HERE
  const float* weight;                        // of route
  int blocks;
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

// Every block sorts the routes for itself: its first warp counts, places and lists them, in route order.
__device__ __forceinline__ Routes sort_routes(const Decode& p, u8* shared) {
  int* counts = reinterpret_cast<int*>(shared + AT_COUNTS);
  int* offsets = reinterpret_cast<int*>(shared + AT_OFFSETS);
  u16* lists = reinterpret_cast<u16*>(shared + AT_LISTS);
  u16 *expert = lists, *first = lists + MAX_ROUTES, *count = lists + 2 * MAX_ROUTES, *route = lists + 3 * MAX_ROUTES;
  u16 *expert_of = lists + 4 * MAX_ROUTES, *rank = lists + 5 * MAX_ROUTES;
  int* blocks = reinterpret_cast<int*>(shared + AT_END);
  float* weight = reinterpret_cast<float*>(shared + AT_ROUTER);
  const int routes = p.tokens * TOP_K, lane = threadIdx.x;
  for (int r = threadIdx.x - 32; r < routes; r += THREADS - 32)
    if (r >= 0) weight[r] = load_float(p.router, r / TOP_K * p.router_stride[0] + r % TOP_K * p.router_stride[1], p.router_dtype);
  if (routes > 32) {
    for (int r = threadIdx.x; r < routes; r += THREADS) expert_of[r] = static_cast<u16>(local_expert(p, r));
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    const u32 only = routes <= 32 && lane < routes ? local_expert(p, lane) : NOT_HERE;
    if (routes <= 32 && lane < routes) expert_of[lane] = static_cast<u16>(only);
    for (int e = lane; e < E; e += 32) counts[e] = 0;
    __syncwarp();
    for (int base = 0; base < routes; base += 32) {
      const u32 e = routes <= 32 ? only : base + lane < routes ? expert_of[base + lane] : NOT_HERE;
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
      sum += mine[i] + ((mine[i] + COLUMNS - 1) / COLUMNS << 16);
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
      int row = before & 0xFFFF, block = before >> 16;
      offsets[e] = row;
      for (int left = mine[i]; left > 0; left -= COLUMNS, row += COLUMNS, ++block) {
        expert[block] = static_cast<u16>(e);
        first[block] = static_cast<u16>(row);
        count[block] = static_cast<u16>(left < COLUMNS ? left : COLUMNS);
      }
      before = (block << 16) + (before & 0xFFFF) + mine[i];
    }
    __syncwarp();
    for (int r = lane; r < routes; r += 32) {
      const u32 e = expert_of[r];
      if (e != NOT_HERE) route[offsets[e] + rank[r]] = static_cast<u16>(r);
    }
  }
  __syncthreads();
  return {expert, first, count, route, expert_of, weight, *blocks};
}

// ---- the work of this block: units of all column blocks, a slot's worth at a time, never of two experts

template <class P>
struct Walk {
  static constexpr bool OWN = MXK_FEW && !P::PAIRS;  // the same rows of every expert, so that a block sums its routes itself
  int left, blocks;                                  // units of this block; with OWN: of one expert
  int block, first, count = 0;                       // of the slot: column block, first unit in its expert, units

  __device__ explicit Walk(int column_blocks) : blocks(column_blocks) {
    const u32 total = OWN ? P::UNITS : static_cast<u32>(column_blocks) * P::UNITS;
    const u32 each = total / gridDim.x, more = total % gridDim.x;
    const u32 unit = blockIdx.x * each + min(blockIdx.x, more);
    left = each + (blockIdx.x < more ? 1 : 0);
    block = OWN ? 0 : unit / P::UNITS;
    first = unit - block * P::UNITS;
    if (OWN) begin = first, rows = left;
  }
  __device__ bool next() {
    left -= count;
    first += count;
    if (OWN && left == 0 && rows > 0 && ++block < blocks) left = rows, first = begin;
    if (left <= 0 || (OWN && blocks == 0)) return false;
    if (first == P::UNITS) first = 0, ++block;
    count = min(min(P::UNITS - first, P::UNITS_A_SLOT), left);
    return true;
  }
  int begin, rows;  // with OWN
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

// Where scales lie in a slot, from the beginning of the first (half 0) or second half: interleaved rows are copied as
// they are, so a pair is two rows on.
template <class P>
struct ScalePlace {
  static constexpr bool PAIRED = P::PAIRS && MXK_INTERLEAVED, TWO = P::PAIRS && !MXK_INTERLEAVED;
  static constexpr int AREA = 16 * P::TILES * P::STRIDE;
  // Distance of the first copied byte from a 16-byte boundary.
  __device__ static u32 skew(int first) {
    return MXK_ALIGNED && !P::SCALE_ROWS ? (static_cast<u32>(first) * (PAIRED ? 2 : 1) * P::GROUPS) & 15 : 0;
  }
  // Row `g` (0..7) of tile `tile`, upper or lower 8 rows of the fragment.
  __device__ static u32 at(int tile, int g, int half) {
    if (TWO) return AREA + half * P::SCALES + (8 * tile + g) * P::SCALE_STRIDE;
    return AREA + (16 * tile + (PAIRED || P::WHOLE ? 2 * g + half : g + 8 * half)) * P::SCALE_STRIDE;
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
    if constexpr (MXK_PROBE >= 2) {
      if (lane == 0) barrier_arrive(done);
      continue;
    }
    if constexpr (MXK_ALIGNED) {
      const u32 skew = ScalePlace<P>::skew(walk.first);
      constexpr bool TWO = ScalePlace<P>::TWO;
      const u32 scale_bytes = round_up(skew + (TWO ? walk.count : rows) * P::GROUPS, 16);
      if (lane == 0)
        barrier_arrive_expect(done, rows * P::BYTES + (P::SCALE_ROWS ? rows * P::GROUPS : scale_bytes * (TWO ? 2 : 1)));
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
      if (P::SCALE_ROWS) {
        for (int i = lane; i < rows; i += 32) {
          const int unit = P::PAIRS ? i >> 1 : i, half = P::PAIRS ? i & 1 : 0;
          const i64 row = (half ? up_row : gate_row) + static_cast<i64>(walk.first + unit) * STEP;
          const u32 place = ScalePlace<P>::at(P::PAIRS ? unit >> 3 : unit >> 4, unit & 7, P::PAIRS ? half : unit >> 3 & 1);
          copy_streamed(slot + place, (half ? s_up : s) + row * P::GROUPS, P::GROUPS, done, policy);
        }
      } else if (lane < (TWO ? 2 : 1)) {
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

// ---- consumers

// The row that column `column` of a column block multiplies; null for none.
template <class P>
__device__ __forceinline__ const u8* activation_row(const Decode& p, const Routes& routes, int block, int column) {
  const int first = routes.first[block], count = routes.count[block];
  int route = column;
  if (MXK_FEW && !P::PAIRS) {
    if (column >= p.tokens * TOP_K || routes.expert_of[column] == NOT_HERE) return nullptr;
  } else {
    if (column >= count) return nullptr;
    route = routes.route[first + column];
  }
  return P::PAIRS ? p.x + static_cast<i64>(route / TOP_K) * p.x_stride * 2 : p.h + static_cast<i64>(route) * (I * H_BYTES);
}

__device__ __forceinline__ uint4 load_x(const u8* from) {  // 8 values
  if (MXK_X_ALIGNED) return load_l2(from);
  const u16* e = reinterpret_cast<const u16*>(from);
  return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}

// bf16: the activations as they are.
template <class P>
struct Exact {
  u32 b[P::STEPS_A_WARP][NT][16];

  __device__ void load(const Decode& p, const Routes& routes, int block, int warp) {
    const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const u8* row = activation_row<P>(p, routes, block, 8 * n + g);
#pragma unroll
      for (int s = 0; s < P::STEPS_A_WARP; ++s) {
        const int group = 4 * (s * W + warp) + q;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (row != nullptr && group < P::GROUPS) v = P::PAIRS ? load_x(row + group * 64 + j * 16) : load_l2(row + group * 64 + j * 16);
          b[s][n][4 * j] = pick_bytes(v.x, v.z, 0x5410);  // columns 0, 4 of the 8; then 1, 5; 2, 6; 3, 7: as `unpack`
          b[s][n][4 * j + 1] = pick_bytes(v.x, v.z, 0x7632);
          b[s][n][4 * j + 2] = pick_bytes(v.y, v.w, 0x5410);
          b[s][n][4 * j + 3] = pick_bytes(v.y, v.w, 0x7632);
        }
      }
    }
  }

  // 16 rows of a slot times this warp's columns, to the sums of lane, column tile and warp.
  __device__ void multiply_tile(u32 slot, int tile, u32 skew, int warp, float (&sum)[NT][4]) const {
    const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
    const u32 weights = slot + P::slot_row(tile, g, 0) * P::STRIDE + (4 * warp + q) * 16;
    const u32 low = slot + ScalePlace<P>::at(tile, g, 0) + skew + 4 * warp + q;
    const u32 high = slot + ScalePlace<P>::at(tile, g, 1) + skew + 4 * warp + q;
    constexpr int HALF = (P::WHOLE ? 1 : 8) * P::STRIDE;
    float c[NT][2][4] = {};
    uint4 words[2][2];
    u32 bytes[2][2];
    // Step s of this warp is s * W + warp of the row: only the last may lie past its end.
    const auto there = [&](int s) { return (s + 1) * W <= P::STEPS || s * W + warp < P::STEPS; };
    const auto fetch = [&](int s) {
      words[s & 1][0] = read_words(weights + s * W * 64);
      words[s & 1][1] = read_words(weights + s * W * 64 + HALF);
      bytes[s & 1][0] = read_byte(low + s * W * 4);
      bytes[s & 1][1] = read_byte(high + s * W * 4);
    };
    if (there(0)) fetch(0);
#pragma unroll
    for (int s = 0; s < P::STEPS_A_WARP; ++s) {
      if (!there(s)) continue;
      if (s + 1 < P::STEPS_A_WARP && there(s + 1)) fetch(s + 1);
      u32 scale_low = scale_pair(bytes[s & 1][0]), scale_high = scale_pair(bytes[s & 1][1]);
      // Past the end of the row: 0 times whatever is there, which `unpack` makes finite.
      if ((s + 1) * W * 4 > P::GROUPS && 4 * (s * W + warp) + q >= P::GROUPS) scale_low = scale_high = 0;
      const uint4 &l = words[s & 1][0], &h = words[s & 1][1];
      const u32 low_words[4] = {l.x, l.y, l.z, l.w}, high_words[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 low_pairs[4], high_pairs[4];
        unpack(low_words[j], low_pairs);
        unpack(high_words[j], high_pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 a[4] = {scaled(low_pairs[2 * i], scale_low), scaled(high_pairs[2 * i], scale_high),
                            scaled(low_pairs[2 * i + 1], scale_low), scaled(high_pairs[2 * i + 1], scale_high)};
#pragma unroll
          for (int n = 0; n < NT; ++n) ::multiply(c[n][i], a, b[s][n][4 * j + 2 * i], b[s][n][4 * j + 2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = c[n][0][i] + c[n][1][i];
  }
};

// Integers of two digits. A group of 32 values of a row is X * 2^(e - 13), |X| <= 2^13, e from its largest: X = 128 * high
// + low, a column of bytes each. Twice an E2M1 element is an integer up to 12: a byte permutation makes bytes of four
// codes, zero for the negative ones; with the sign bits inverted it makes those of the negative ones, which meet the
// negated digits. The product over a group is exact: below 2^22, so it fits the mantissa of a float whose bits the
// accumulation begins with. The scales of weight and activation group are one power of two, made by one multiply-add of
// exponent fields. 7 + 1 instructions for 8 weights, where bf16 takes 17 + 1.
template <class P>
struct TwoDigits {
  static constexpr int SPAN = 60;  // exponent field of the largest group: SPAN + 128 is a float, so is 1
  static constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: its bits plus n are those of ROUND + n
  static constexpr int ROUND_BITS = 0x4B400000;
  // Groups that are on their way from memory at once: all waits but one of a batch are hidden.
  static constexpr int BATCH = (CONSUMER_REGISTERS > 200 ? 12 : CONSUMER_REGISTERS > 120 ? 8 : 6) / (P::PAIRS ? 1 : 2) * (P::PAIRS && CONSUMER_REGISTERS > 200 ? 2 : 1);

  u32 b[P::STEPS_A_WARP][NT][4];   // digits of codes 0..3, 4..7 of this lane's word, then negated
  u32 exponent[P::STEPS_A_WARP][NT];  // of the group for this lane's sums, as float bits
  float factor[NT];                // of this lane's sums
  int even, odd;                   // 0 and ROUND_BITS, where integer sums begin; as constants they would be made anew each time

  __device__ static u32 negate_bytes(u32 v) { return ((~v & 0x7F7F7F7Fu) + 0x01010101u) ^ (~v & 0x80808080u); }

  __device__ void load(const Decode& p, const Routes& routes, int block, int warp) {
    const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
    const bool low = g & 1;
    even = p.tokens >> 31;
    odd = even + ROUND_BITS;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const u8* row = activation_row<P>(p, routes, block, 4 * n + (g >> 1));
      int largest = 0;
#pragma unroll
      for (int from = 0; from < P::STEPS_A_WARP; from += BATCH) {
        uint4 raw[BATCH][P::PAIRS ? 1 : 2];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const int group = (from + i) * W + warp;
          raw[i][0] = raw[i][P::PAIRS ? 0 : 1] = make_uint4(0, 0, 0, 0);
          if (from + i >= P::STEPS_A_WARP || row == nullptr || group >= P::GROUPS) continue;
          if (P::PAIRS) {
            raw[i][0] = load_x(row + group * 64 + q * 16);
          } else {
            raw[i][0] = load_l2(row + group * 128 + q * 32);
            raw[i][P::PAIRS ? 0 : 1] = load_l2(row + group * 128 + q * 32 + 16);
          }
        }
#pragma unroll
        for (int s = from; s < from + BATCH && s < P::STEPS_A_WARP; ++s) {
        const uint4 x = raw[s - from][0], y = raw[s - from][P::PAIRS ? 0 : 1];
        u32 v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};  // float bits
        if (P::PAIRS) {
          const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) v[2 * i] = pairs[i] << 16, v[2 * i + 1] = pairs[i] & 0xFFFF0000u;
        }
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, v[i] & 0x7FFFFFFFu);
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        const int e = max(static_cast<int>(most >> 23), 14);  // |v| < 2^(e - 126)
        largest = max(largest, e);
        exponent[s][n] = e;
        const float unit = __uint_as_float(static_cast<u32>(266 - e) << 23);  // 2^13 / 2^(e - 126)
        u32 digit[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // 64 more: low is -64..63 and the shift rounds high
          const u32 bits = __float_as_uint(fmaf(__uint_as_float(v[i]), unit, ROUND + 64.0f));
          digit[i] = low ? bits & 127 : bits >> 7;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 bytes = pick_bytes(pick_bytes(digit[4 * i], digit[4 * i + 1], 0x0040), pick_bytes(digit[4 * i + 2], digit[4 * i + 3], 0x0040), 0x5410);
          if (low) {  // minus 64: bit 7 is bit 6
            bytes ^= 0x40404040u;
            bytes |= (bytes & 0x40404040u) << 1;
          }
          b[s][n][i] = bytes;
          b[s][n][2 + i] = negate_bytes(bytes);
        }
        }
      }
      // From the lanes that loaded a row to those that hold its sums: row q of the column tile.
      largest = __shfl_sync(~0u, largest, 8 * q);
#pragma unroll
      for (int s = 0; s < P::STEPS_A_WARP; ++s) {
        const int e = __shfl_sync(~0u, static_cast<int>(exponent[s][n]), 8 * q) - largest + SPAN;
        exponent[s][n] = static_cast<u32>(max(e, 1)) << 23;  // below: nothing of it is left in the sum anyway
      }
      // 2^(largest - 126 - 13 - 1), without the 2^SPAN that multiply_tile takes off; NaN for a row with inf or NaN
      factor[n] = __uint_as_float(largest == 255 ? 0x7FC00000u : static_cast<u32>(largest - 13) << 23);
    }
  }

  __device__ void multiply_tile(u32 slot, int tile, u32 skew, int warp, float (&sum)[NT][4]) const {
    const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
    const u32 upper = slot + P::slot_row(tile, g, 0) * P::STRIDE + warp * 16 + q * 4;
    const u32 lower = slot + P::slot_row(tile, g, 1) * P::STRIDE + warp * 16 + q * 4;
    const u32 upper_scale = slot + ScalePlace<P>::at(tile, g, 0) + skew + warp;
    const u32 lower_scale = slot + ScalePlace<P>::at(tile, g, 1) + skew + warp;
    float c[NT][2] = {};
#pragma unroll
    for (int s = 0; s < P::STEPS_A_WARP; ++s) {
      if ((s + 1) * W > P::STEPS && s * W + warp >= P::STEPS) break;
      const u32 u = read_word(upper + s * W * 16), l = read_word(lower + s * W * 16);
      const u32 us = read_byte(upper_scale + s * W), ls = read_byte(lower_scale + s * W);
      const u32 plus[4] = {elements(u), elements(l), elements(u >> 16), elements(l >> 16)};
      const u32 nu = u ^ 0x88888888u, nl = l ^ 0x88888888u;
      const u32 minus[4] = {elements(nu), elements(nl), elements(nu >> 16), elements(nl >> 16)};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        int d[4];
        multiply_bytes(d, plus, b[s][n][0], b[s][n][1], even, odd);
        add_bytes(d, minus, b[s][n][2], b[s][n][3]);
        const float high = __int_as_float(d[0] * 128 + d[1]) - ROUND, low = __int_as_float(d[2] * 128 + d[3]) - ROUND;
        c[n][0] = fmaf(high, __uint_as_float(us * 0x00800000u + exponent[s][n]), c[n][0]);
        c[n][1] = fmaf(low, __uint_as_float(ls * 0x00800000u + exponent[s][n]), c[n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[n][i] = c[n][i] * (1.0f / (1ull << SPAN)) * factor[n];
  }
};

template <class P, bool>
struct Choose {
  using type = Exact<P>;
};
template <class P>
struct Choose<P, true> {
  using type = TwoDigits<P>;
};

template <class P>
__device__ __forceinline__ void multiply_rows(const Decode& p, const Routes& routes, int group, int warp, u32 shared, u32 full,
                                              u32 empty, u32 sums_full, u32 sums_empty, Turn& turn, Turn& sums, int& next_group) {
  const int lane = threadIdx.x & 31;
  typename Choose<P, DIGITS>::type activations;
  int block = -1, count = 0;
  for (Walk<P> walk(routes.blocks); walk.next(); turn.advance(STAGES), sums.advance(PARTIALS)) {
    if (GROUPS > 1) {
      const bool mine = next_group == group;
      next_group ^= 1;
      if (!mine) continue;
    }
    if (walk.block != block) {
      // One token is the same row for every expert, and with MXK_FEW all rows are columns at once.
      const bool same = P::PAIRS ? p.tokens == 1 && count == routes.count[walk.block] : MXK_FEW && block >= 0;
      block = walk.block, count = routes.count[block];
      if (!same) activations.load(p, routes, block, warp);
    }
    const u32 slot = shared + turn.slot * SLOT;
    const u32 to = shared + AT_PARTIALS + sums.slot * PARTIAL_SET + (warp * 32 + lane) * PARTIAL_LANE;
    barrier_wait(full + 8 * turn.slot, turn.parity);
#pragma unroll 1
    for (int tile = 0; tile < P::TILES; ++tile) {
      float sum[NT][4] = {};
      if (MXK_PROBE != 1 && MXK_PROBE != 3) activations.multiply_tile(slot, tile, ScalePlace<P>::skew(walk.first), warp, sum);
      if (tile == P::TILES - 1) {  // the slot is read
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * turn.slot);
      }
      if (tile == 0) barrier_wait(sums_empty + 8 * sums.slot, sums.parity ^ 1);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        if constexpr (DIGITS) {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (tile * NT + n) * PARTIAL), "f"(sum[n][0]), "f"(sum[n][1])
                       : "memory");
        } else {
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + (tile * NT + n) * PARTIAL), "f"(sum[n][0]),
                       "f"(sum[n][1]), "f"(sum[n][2]), "f"(sum[n][3])
                       : "memory");
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sums_full + 8 * sums.slot);
  }
}

// ---- epilogue

// The slots that are this epilogue warp's turn.
template <class P>
struct Finish {
  Walk<P> walk;
  Turn sums, at;  // at: of this slot
  u32 turn;
  float bias[P::TILES][2];

  __device__ Finish(const Routes& routes, Turn sums, u32 turn) : walk(routes.blocks), sums(sums), turn(turn) {}
  // The next one and its biases, whose way from memory is long.
  __device__ bool next(const Decode& p, const Routes& routes, u32 warp) {
    while (walk.next()) {
      at = sums;
      sums.advance(PARTIALS);
      const bool mine = turn == warp;
      turn = turn + 1 == EPILOGUE ? 0 : turn + 1;
      if (mine) {
        load(p, routes.expert[walk.block]);
        return true;
      }
    }
    return false;
  }
  __device__ void load(const Decode& p, int expert) {
    const Operand& from = P::PAIRS ? p.b13 : p.b2;
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = P::unit(tile, g, half), at = walk.first + unit;
        bias[tile][half] = 0.0f;
        if (!from.present() || unit >= walk.count) continue;
        if (!P::PAIRS) {
          bias[tile][half] = load_float(from.expert(expert), at, p.b2_dtype);
        } else {
          const int row = MXK_INTERLEAVED ? 2 * at + half : at + (half ? p.up_row : p.gate_row);
          bias[tile][half] = load_float(from.expert(expert + (half ? p.up_expert : 0)), row, p.b13_dtype);
        }
      }
  }
};

template <class P>
__device__ __forceinline__ void finish_slot(const Decode& p, const Routes& routes, const Finish<P>& slot, u32 shared) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const Walk<P>& walk = slot.walk;
  const int expert = routes.expert[walk.block], first = routes.first[walk.block], count = routes.count[walk.block];
#pragma unroll
  for (int tile = 0; tile < P::TILES; ++tile) {
    if (tile * (P::PAIRS ? 8 : 16) >= walk.count) break;
    const int unit[2] = {P::unit(tile, g, 0), P::unit(tile, g, 1)};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (n * (COLUMNS / NT) >= count && !(MXK_FEW && !P::PAIRS)) break;
      const u32 at = shared + AT_PARTIALS + slot.at.slot * PARTIAL_SET + (tile * NT + n) * PARTIAL + lane * PARTIAL_LANE;
      float c[2][2] = {};  // [row of the fragment][column of this lane]
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if constexpr (DIGITS) {
          const uint2 v = read_pair(at + w * 32 * PARTIAL_LANE);
          c[0][0] += __uint_as_float(v.x), c[1][0] += __uint_as_float(v.y);
        } else {
          const uint4 v = read_words(at + w * 32 * PARTIAL_LANE);
          c[0][0] += __uint_as_float(v.x), c[0][1] += __uint_as_float(v.y);
          c[1][0] += __uint_as_float(v.z), c[1][1] += __uint_as_float(v.w);
        }
      }
#pragma unroll
      for (int i = 0; i < (DIGITS ? 1 : 2); ++i) {
        const int column = DIGITS ? 4 * n + q : 8 * n + 2 * q + i;
        int route;
        if (MXK_FEW && !P::PAIRS) {
          route = column;
          if (column >= p.tokens * TOP_K || routes.expert_of[column] != expert) continue;
        } else {
          if (column >= count) break;
          route = routes.route[first + column];
        }
        const float low = c[0][i] + slot.bias[tile][0], high = c[1][i] + slot.bias[tile][1];
        if constexpr (P::PAIRS) {
          const i64 to = static_cast<i64>(route) * I + walk.first + unit[0];
          const float h = activate(low, high, p.activation, p.alpha, p.limit);
          if (unit[0] < walk.count) {
            if constexpr (DIGITS) {
              reinterpret_cast<float*>(p.h)[to] = h;
            } else {
              reinterpret_cast<u16*>(p.h)[to] = static_cast<u16>(pack_bf16x2(h, 0.0f));
            }
          }
        } else {
          const float weight = routes.weight[route];
          const i64 to = static_cast<i64>(route) * K + walk.first;
          if constexpr (MXK_FEW) {
            const u32 row = shared + AT_ROWS + (route * OWN_ROWS + walk.first - walk.begin) * 4;
            if (unit[0] < walk.count) asm volatile("st.shared.f32 [%0], %1;" ::"r"(row + unit[0] * 4), "f"(low * weight) : "memory");
            if (unit[1] < walk.count) asm volatile("st.shared.f32 [%0], %1;" ::"r"(row + unit[1] * 4), "f"(high * weight) : "memory");
          } else if constexpr (MXK_PER_ROUTE) {
            u16* out = reinterpret_cast<u16*>(p.out);
            if (unit[0] < walk.count) out[to + unit[0]] = static_cast<u16>(pack_bf16x2(low * weight, 0.0f));
            if (unit[1] < walk.count) out[to + unit[1]] = static_cast<u16>(pack_bf16x2(high * weight, 0.0f));
          } else {
            float* y = reinterpret_cast<float*>(p.y);
            if (unit[0] < walk.count) y[to + unit[0]] = low * weight;
            if (unit[1] < walk.count) y[to + unit[1]] = high * weight;
          }
        }
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void finish_rows(const Decode& p, const Routes& routes, u32 warp, u32 shared, u32 sums_full,
                                            u32 sums_empty, Turn& sums, u32& turn) {
  Finish<P> slot(routes, sums, turn);
  bool more = slot.next(p, routes, warp);
  while (more) {
    Finish<P> ahead = slot;
    more = ahead.next(p, routes, warp);
    barrier_wait(sums_full + 8 * slot.at.slot, slot.at.parity);
    finish_slot<P>(p, routes, slot, shared);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(sums_empty + 8 * slot.at.slot);
    slot = ahead;
  }
  sums = slot.sums;
  turn = slot.turn;
}

// ---- routes to tokens

// MXK_FEW: by the epilogue, of this block's rows.
__device__ __forceinline__ void sum_own(const Decode& p, const Routes& routes, const u8* memory, u32 thread, u32 threads) {
  const Walk<Down> walk(routes.blocks);
  const float* y = reinterpret_cast<const float*>(memory + AT_ROWS);
  for (u32 i = thread; i < p.tokens * OWN_ROWS; i += threads) {
    const int token = i / OWN_ROWS, row = i % OWN_ROWS;
    if (row >= walk.rows) continue;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < TOP_K; ++s)
      if (routes.expert_of[token * TOP_K + s] != NOT_HERE) sum += y[(token * TOP_K + s) * OWN_ROWS + row];
    reinterpret_cast<u16*>(p.out)[static_cast<i64>(token) * K + walk.begin + row] = static_cast<u16>(pack_bf16x2(sum, 0.0f));
  }
}

__device__ __forceinline__ void sum_slots(const Decode& p, const Routes& routes, u32 thread, u32 threads) {
  const u32 chunks = p.tokens * (K / 4);
  for (u32 i = blockIdx.x * threads + thread; i < chunks; i += gridDim.x * threads) {
    const int token = i / (K / 4), at = i % (K / 4) * 4;
    uint4 v[TOP_K];
#pragma unroll
    for (int s = 0; s < TOP_K; ++s) {
      const int route = token * TOP_K + s;
      v[s] = make_uint4(0, 0, 0, 0);
      if (routes.expert_of[route] != NOT_HERE) v[s] = load_l2(p.y + (static_cast<i64>(route) * K + at) * 4);
    }
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < TOP_K; ++s) {
      sum[0] += __uint_as_float(v[s].x), sum[1] += __uint_as_float(v[s].y);
      sum[2] += __uint_as_float(v[s].z), sum[3] += __uint_as_float(v[s].w);
    }
    reinterpret_cast<uint2*>(p.out)[i] = make_uint2(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]));
  }
}

// Rows of routes that go to no expert here.
__device__ __forceinline__ void clear_absent(const Decode& p, const Routes& routes, u32 thread, u32 threads) {
  for (int r = blockIdx.x; r < p.tokens * TOP_K; r += gridDim.x) {
    if (routes.expert_of[r] != NOT_HERE) continue;
    for (u32 i = thread; i < K / 4; i += threads)
      reinterpret_cast<uint2*>(p.out)[static_cast<i64>(r) * (K / 4) + i] = make_uint2(0, 0);
  }
}

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
  // Ahead of the stream of weights, which they would have to wait for.
  if (threadIdx.x >= HELPERS * 32 && p.tokens <= 8)
    for (int i = threadIdx.x - HELPERS * 32; i < p.tokens * (K / 64); i += CONSUMERS * 32)
      prefetch_l2(p.x + i / (K / 64) * p.x_stride * 2 + i % (K / 64) * 128);
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
      if (MXK_FEW) sum_own(p, routes, memory, threadIdx.x - 32, EPILOGUE * 32);
      if (!MXK_FEW && !MXK_PER_ROUTE && threadIdx.x == 32) routes_ready.arrive();
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
    if (!MXK_PER_ROUTE && !MXK_FEW) {
      routes_ready.wait();
      sum_slots(p, routes, thread, CONSUMERS * 32);
    }
  }
}
