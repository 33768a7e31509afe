// The schedule of one mxk::moe call, the same for every instruction set.
//
//   routes of a slab of tokens, counting sort by local expert
//   1. tokens -> digits                                                    | claimed by token
//   2. per (expert, 16 gate rows + 16 up rows): two tiles, activation -> fp32 h   | claimed in blocks of row tiles
//   3. h rows -> digits, in place                                          | claimed by route
//   4. per 32 output rows: two tiles per expert, then the weighted fp32 sum of each token in slot order -> bf16
//
// Work is cut along output rows and claimed dynamically, so threads finish together for any routing. Every output
// element is computed by one thread from start to end, and tiles do not depend on their neighbours: results are equal
// bit by bit for any number of threads. A slab bounds the scratch whatever T is.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "operands.h"
#include "scratch.h"
#include "threads.h"

namespace {

constexpr int64_t kSlabRoutes = 4096;

thread_local Arena arena;
std::atomic<const Isa*> selected{nullptr};

struct ThreadScratch {
  TileScratch tile;
  float (*gate)[16];
  float (*up)[16];
  float (*partial[2])[16];  // [routes of the slab][16] of two tiles
};

struct Slab {
  const MxkMoe* call;
  const Isa* isa;
  int64_t first, tokens, routes, active, block, threads;
  int64_t* position;  // [tokens * k]: place in expert order, or -1
  float* weight;      // [tokens * k]
  int64_t* start;     // [experts + 1]
  int64_t* experts;   // [active]
  int64_t* token;     // [routes], expert order
  Vector* x;          // [tokens]
  Vector* h;          // [routes]
  const Vector** x_of;  // [routes]
  const Vector** h_of;  // [routes]
  float** h_row;      // [routes]
  char* x_memory;
  char* h_memory;     // [routes] rows of vector_bytes(I): h, then its chunks
  ThreadScratch* scratch;
  std::atomic<int64_t> claimed[4];
};

void sort_routes(Slab& s) {
  const MxkMoe& c = *s.call;
  std::memset(s.start, 0, size_t(c.experts + 1) * sizeof *s.start);
  for (int64_t t = 0; t < s.tokens; ++t)
    for (int64_t slot = 0; slot < c.top_k; ++slot) {
      const int64_t expert = local_expert(c, s.first + t, slot);
      s.position[t * c.top_k + slot] = expert;
      if (expert >= 0) ++s.start[expert + 1];
    }
  s.active = 0;
  for (int64_t e = 0; e < c.experts; ++e) {
    if (s.start[e + 1]) s.experts[s.active++] = e;
    s.start[e + 1] += s.start[e];
  }
  s.routes = s.start[c.experts];
  for (int64_t i = s.tokens * c.top_k; i--;) {  // from the end: start[e + 1] counts down to start[e]
    const int64_t expert = s.position[i];
    if (expert < 0) continue;
    s.position[i] = --s.start[expert + 1];
    s.token[s.position[i]] = i / c.top_k;
    s.weight[i] = router_weight(c, s.first + i / c.top_k, i % c.top_k);
  }
  for (int64_t e = 0; e < c.experts; ++e) s.start[e] = s.start[e + 1];
  s.start[c.experts] = s.routes;
}

void prepare_tokens(Slab& s) {
  const MxkMoe& c = *s.call;
  const Coding coding = coding_of(c.format, c.w13.zero != nullptr);
  const int64_t size = vector_bytes(c.hidden);
  for (int64_t t; (t = s.claimed[0].fetch_add(1)) < s.tokens;) {
    bool local = false;
    for (int64_t slot = 0; slot < c.top_k; ++slot) local |= s.position[t * c.top_k + slot] >= 0;
    if (!local) continue;
    const uint8_t* row = bytes(c.x) + (s.first + t) * c.x_line;
    s.isa->prepare(row, false, c.hidden, coding, s.x_memory + t * size, &s.x[t]);
  }
}

void gate_up(Slab& s, const ThreadScratch& scratch) {
  const MxkMoe& c = *s.call;
  const Activation activation = {c.activation, float(c.alpha), float(c.limit)};
  const int64_t tiles = (c.intermediate + kTileRows - 1) / kTileRows, blocks = (tiles + s.block - 1) / s.block;
  struct Step {
    int64_t expert, tile, end;
    Tile pair[2];  // gate, up
  };
  const auto load = [&](Step& step) {
    const int rows = int(step.tile * kTileRows + kTileRows <= c.intermediate ? kTileRows : c.intermediate - step.tile * kTileRows);
    step.pair[0] = make_tile(c, kGate, step.expert, step.tile * kTileRows, rows);
    step.pair[1] = make_tile(c, kUp, step.expert, step.tile * kTileRows, rows);
  };
  const auto claim = [&](Step& step) {
    const int64_t item = s.claimed[1].fetch_add(1);
    if (item >= s.active * blocks) return false;
    step.expert = s.experts[item / blocks];
    step.tile = item % blocks * s.block;
    step.end = step.tile + s.block < tiles ? step.tile + s.block : tiles;
    load(step);
    return true;
  };
  Step step, next;
  bool more = claim(step);
  while (more) {
    next = step;
    if (++next.tile < next.end)
      load(next);
    else
      more = claim(next);
    for (int i = 0; i < 2; ++i) step.pair[i].next = more ? &next.pair[i] : nullptr;
    const int64_t end = s.start[step.expert + 1];
    for (int64_t r = s.start[step.expert]; r < end; r += kTileTokens) {
      const int count = int(end - r < kTileTokens ? end - r : kTileTokens);
      float(*const out[2])[16] = {scratch.gate, scratch.up};
      s.isa->tiles(step.pair, 2, s.x_of + r, count, scratch.tile, out);
      float* rows[kTileTokens];
      for (int t = 0; t < count; ++t) rows[t] = s.h_row[r + t] + step.tile * kTileRows;
      s.isa->activate(activation, scratch.gate, scratch.up, count, step.pair[0].rows, rows);
    }
    step = next;
  }
}

void prepare_intermediate(Slab& s) {
  const MxkMoe& c = *s.call;
  const Coding coding = coding_of(c.format, c.w2.zero != nullptr);
  for (int64_t r; (r = s.claimed[2].fetch_add(1)) < s.routes;)
    s.isa->prepare(s.h_row[r], true, c.intermediate, coding, s.h_row[r], &s.h[r]);
}

void combine(const Slab& s, const float (*partial)[16], int64_t row, int rows) {
  const MxkMoe& c = *s.call;
  uint16_t* out = static_cast<uint16_t*>(c.out);
  for (int64_t t = 0; t < s.tokens; ++t) {
    float sum[16] = {};
    for (int64_t slot = 0; slot < c.top_k; ++slot) {
      const int64_t i = t * c.top_k + slot, place = s.position[i];
      if (c.per_route) std::memset(sum, 0, sizeof sum);
      if (place >= 0)
        for (int r = 0; r < 16; ++r) sum[r] += partial[place][r] * s.weight[i];
      if (c.per_route) {
        uint16_t* to = out + ((s.first + t) * c.top_k + slot) * c.hidden + row;
        for (int r = 0; r < rows; ++r) to[r] = round_bf16(sum[r]);
      }
    }
    if (!c.per_route) {
      uint16_t* to = out + (s.first + t) * c.hidden + row;
      for (int r = 0; r < rows; ++r) to[r] = round_bf16(sum[r]);
    }
  }
}

void down(Slab& s, const ThreadScratch& scratch) {
  const MxkMoe& c = *s.call;
  const int64_t items = (c.hidden + 2 * kTileRows - 1) / (2 * kTileRows);
  struct Step {
    Tile pair[2];
    int count;
  };
  const auto rows_of = [&](int64_t row) { return int(row + kTileRows <= c.hidden ? kTileRows : c.hidden - row); };
  const auto load = [&](int64_t item, int64_t a, Step& step) {
    step.count = 0;
    for (int64_t row = item * 2 * kTileRows; step.count < 2 && row < c.hidden; row += kTileRows)
      step.pair[step.count++] = make_tile(c, kDown, s.experts[a], row, rows_of(row));
  };
  int64_t item = s.claimed[3].fetch_add(1);
  while (item < items) {
    const int64_t next_item = s.claimed[3].fetch_add(1);
    Step step, next;
    for (int64_t a = 0; a < s.active; ++a) {
      load(item, a, step);
      const bool same = a + 1 < s.active, more = same || next_item < items;
      if (more) load(same ? item : next_item, same ? a + 1 : 0, next);
      for (int i = 0; i < 2; ++i) step.pair[i].next = !more ? nullptr : i < next.count ? &next.pair[i] : &next.pair[0];
      const int64_t end = s.start[s.experts[a] + 1];
      for (int64_t r = s.start[s.experts[a]]; r < end; r += kTileTokens) {
        float(*const out[2])[16] = {scratch.partial[0] + r, scratch.partial[1] + r};
        s.isa->tiles(step.pair, step.count, s.h_of + r, int(end - r < kTileTokens ? end - r : kTileTokens), scratch.tile, out);
      }
    }
    for (int64_t i = 0, row = item * 2 * kTileRows; i < 2 && row < c.hidden; ++i, row += kTileRows)
      combine(s, scratch.partial[i], row, rows_of(row));
    item = next_item;
  }
}

void thread_body(void* data, int thread) {
  Slab& s = *static_cast<Slab*>(data);
  const IeeeMode ieee;
  const ThreadScratch& scratch = s.scratch[thread];
  prepare_tokens(s);
  thread_barrier();
  gate_up(s, scratch);
  thread_barrier();
  prepare_intermediate(s);
  thread_barrier();
  down(s, scratch);
}

// Lays the slab out in the arena.
bool lay_out(Slab& s, int64_t tokens) {
  const MxkMoe& c = *s.call;
  const int64_t routes = tokens * c.top_k, widest = c.hidden > c.intermediate ? c.hidden : c.intermediate;
  const int64_t x_bytes = vector_bytes(c.hidden), h_bytes = vector_bytes(c.intermediate);
  const size_t per_thread = 2 * Arena::bytes_for<float>(kTileTokens * 16) + 2 * Arena::bytes_for<float>(routes * 16) +
                            Arena::bytes_for<float>(2 * scales_capacity(widest) * 16) +
                            Arena::bytes_for<uint8_t>(2 * scales_capacity(widest) * 16) + Arena::bytes_for<float>(widest) +
                            Arena::bytes_for<float>(2 * kTileTokens * 64);
  const size_t shared = 2 * Arena::bytes_for<int64_t>(routes) + Arena::bytes_for<float>(routes) +
                        2 * Arena::bytes_for<int64_t>(c.experts + 1) + Arena::bytes_for<Vector>(tokens) +
                        Arena::bytes_for<Vector>(routes) + 3 * Arena::bytes_for<void*>(routes) +
                        Arena::bytes_for<char>(tokens * x_bytes) + Arena::bytes_for<char>(routes * h_bytes) +
                        Arena::bytes_for<ThreadScratch>(s.threads);
  if (!arena.reserve(shared + size_t(s.threads) * per_thread)) return false;
  s.position = arena.take<int64_t>(routes), s.token = arena.take<int64_t>(routes);
  s.weight = arena.take<float>(routes);
  s.start = arena.take<int64_t>(c.experts + 1), s.experts = arena.take<int64_t>(c.experts + 1);
  s.x = arena.take<Vector>(tokens), s.h = arena.take<Vector>(routes);
  s.x_of = arena.take<const Vector*>(routes), s.h_of = arena.take<const Vector*>(routes);
  s.h_row = arena.take<float*>(routes);
  s.x_memory = arena.take<char>(tokens * x_bytes), s.h_memory = arena.take<char>(routes * h_bytes);
  s.scratch = arena.take<ThreadScratch>(s.threads);
  for (int64_t t = 0; t < s.threads; ++t) {
    ThreadScratch& scratch = s.scratch[t];
    scratch.gate = reinterpret_cast<float(*)[16]>(arena.take<float>(kTileTokens * 16));
    scratch.up = reinterpret_cast<float(*)[16]>(arena.take<float>(kTileTokens * 16));
    for (auto& partial : scratch.partial) partial = reinterpret_cast<float(*)[16]>(arena.take<float>(routes * 16));
    scratch.tile.scales = arena.take<float>(2 * scales_capacity(widest) * 16);
    scratch.tile.zeros = arena.take<uint8_t>(2 * scales_capacity(widest) * 16);
    scratch.tile.row = arena.take<float>(widest);
    scratch.tile.sums = arena.take<float>(2 * kTileTokens * 64);
  }
  for (int64_t r = 0; r < routes; ++r) s.h_of[r] = &s.h[r], s.h_row[r] = reinterpret_cast<float*>(s.h_memory + r * h_bytes);
  return true;
}

const Isa* best() {
  for (const Isa* isa : {isa_avx512(), isa_avx2()})
    if (isa) return isa;
  return isa_portable();
}

}  // namespace

int64_t mxk_cpu_abi() { return int64_t(sizeof(MxkMoe)); }

int mxk_cpu_select(const char* name) {
  const Isa* isa = std::strcmp(name, "auto") == 0 ? best() : nullptr;
  for (const Isa* known : {isa_portable(), isa_avx2(), isa_avx512()})
    if (known && std::strcmp(name, known->name) == 0) isa = known;
  if (isa == nullptr) return 1;
  selected = isa;
  return 0;
}

const char* mxk_cpu_isa() {
  const Isa* isa = selected;
  return (isa ? isa : best())->name;
}

const char* mxk_cpu_threads() { return thread_runtime(); }

int64_t mxk_cpu_scratch_bytes() { return arena.size(); }

int mxk_cpu_moe(const MxkMoe* call) {
  const MxkMoe& c = *call;
  if (c.tokens == 0 || c.hidden == 0) return 0;
  const Isa* isa = selected;
  if (isa == nullptr) isa = best();
  const int64_t top_k = c.top_k > 0 ? c.top_k : 1;
  const int64_t slab_tokens = kSlabRoutes / top_k > 0 ? kSlabRoutes / top_k : 1;
  for (int64_t first = 0; first < c.tokens; first += slab_tokens) {
    Slab s = {};
    s.call = call, s.isa = isa, s.first = first;
    s.tokens = c.tokens - first < slab_tokens ? c.tokens - first : slab_tokens;
    s.threads = c.threads > 1 ? c.threads : 1;
    if (!lay_out(s, s.tokens)) return 1;
    sort_routes(s);
    for (int64_t r = 0; r < s.routes; ++r) s.x_of[r] = &s.x[s.token[r]];
    const int64_t tiles = (c.intermediate + kTileRows - 1) / kTileRows * (s.active ? s.active : 1);
    // Small enough that threads finish together; 8 transposed tiles share the cache lines of their rows.
    s.block = tiles / (s.threads * 64);
    s.block = c.output_packed ? 8 : s.block < 1 ? 1 : s.block > 4 ? 4 : s.block;
    run_threads(int(s.threads), thread_body, &s);
  }
  return 0;
}
