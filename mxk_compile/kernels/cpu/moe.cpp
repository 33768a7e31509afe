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
#include <cstring>
#include <initializer_list>

#include "matrix.h"
#include "threads.h"

namespace {

constexpr int64_t kSlabRoutes = 4096;

thread_local Arena arena;
std::atomic<const Isa*> selected{nullptr};
std::atomic<int64_t> matrix_rows{0};

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
    for (int64_t slot = 0; slot < c.top_k; ++slot) {
      const int64_t place = s.position[t * c.top_k + slot];
      local |= place >= 0 && !(s.unit && on_unit(s, expert_at(s.start, c.experts, place)));
    }
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
    if (on_unit(s, step.expert)) {
      gate_up_on_unit(s, scratch, activation, step.expert, step.pair, step.tile);
      step = next;
      continue;
    }
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
  for (int64_t r; (r = s.claimed[2].fetch_add(1)) < s.routes;) {
    const int64_t expert = s.unit ? expert_at(s.start, c.experts, r) : 0;
    if (!on_unit(s, expert))
      s.isa->prepare(s.h_row[r], true, c.intermediate, coding, s.h_row[r], &s.h[r]);
    else if ((r - s.start[expert]) % kStripRoutes == 0)
      look_at_strip(s, expert, r);
  }
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
  const int64_t tiles = (c.hidden + kTileRows - 1) / kTileRows, items = (tiles + s.down_tiles - 1) / s.down_tiles;
  struct Step {
    int64_t item, a, tile;  // expert s.experts[a], tiles from `tile` on
    int count;
    Tile pair[2];
  };
  const auto rows_of = [&](int64_t tile) {
    return int((tile + 1) * kTileRows <= c.hidden ? kTileRows : c.hidden - tile * kTileRows);
  };
  const auto end_of = [&](int64_t item) { return std::min(tiles, (item + 1) * s.down_tiles); };
  const auto load = [&](Step& step) {
    step.count = int(std::min<int64_t>(end_of(step.item) - step.tile, 2));
    for (int i = 0; i < step.count; ++i)
      step.pair[i] = make_tile(c, kDown, s.experts[step.a], (step.tile + i) * kTileRows, rows_of(step.tile + i));
  };
  const auto claim = [&](Step& step) {
    step.item = s.claimed[3].fetch_add(1), step.a = 0, step.tile = step.item * s.down_tiles;
    if (step.item < items && s.active) load(step);
    return step.item < items;
  };
  Step step, next;
  bool more = claim(step);
  while (more) {
    next = step;
    next.tile += step.count;
    bool last = s.active == 0;
    if (!last && next.tile == end_of(step.item)) next.tile = step.item * s.down_tiles, last = ++next.a == s.active;
    if (last)
      more = claim(next);
    else
      load(next);
    const int64_t place = step.tile - step.item * s.down_tiles;
    if (s.active) {
      const int64_t expert = s.experts[step.a], end = s.start[expert + 1];
      for (int i = 0; i < step.count; ++i) step.pair[i].next = !more ? nullptr : &next.pair[i < next.count ? i : 0];
      if (on_unit(s, expert)) {
        down_on_unit(s, scratch, expert, step.pair, step.count, scratch.partial + place);
      } else {
        for (int64_t r = s.start[expert]; r < end; r += kTileTokens) {
          float(*const out[2])[16] = {scratch.partial[place] + r, scratch.partial[place + (step.count > 1)] + r};
          s.isa->tiles(step.pair, step.count, s.h_of + r, int(end - r < kTileTokens ? end - r : kTileTokens), scratch.tile, out);
        }
      }
    }
    for (int64_t tile = step.item * s.down_tiles; last && tile < end_of(step.item); ++tile)
      combine(s, scratch.partial[tile - step.item * s.down_tiles], tile * kTileRows, rows_of(tile));
    step = next;
  }
}

void thread_body(void* data, int thread) {
  Slab& s = *static_cast<Slab*>(data);
  const IeeeMode ieee;
  const ThreadScratch& scratch = s.scratch[thread];
  if (s.unit) {
    s.unit->begin();
    pack_tokens(s);
  }
  prepare_tokens(s);
  thread_barrier();
  gate_up(s, scratch);
  thread_barrier();
  prepare_intermediate(s);
  thread_barrier();
  down(s, scratch);
  if (s.unit) s.unit->end();
}

// Output tiles of an item of the last phase: two, so that threads finish together; more, as long as each thread has some items:
// for few routes, whose sums take little memory, because longer stretches of an expert's rows are read faster; on a matrix
// unit where the intermediate, which every item reads, is larger than half of a usual second-level cache of 2 MiB.
int64_t down_tiles(const Slab& s, int64_t routes) {
  constexpr int64_t kFewRoutes = 128, kFewTiles = 6;
  const int64_t tiles = (s.call->hidden + kTileRows - 1) / kTileRows;
  const bool large = s.unit && routes * vector_bytes(s.call->intermediate) > (1 << 20);
  if (!large && routes > kFewRoutes) return 2;
  const int64_t most = large ? kMostDownTiles : kFewTiles, items = large ? 6 : 12;
  return std::max<int64_t>(2, std::min<int64_t>(most, tiles / (items * s.threads) / 2 * 2));
}

// Lays the slab out in the arena.
bool lay_out(Slab& s, int64_t tokens) {
  const MxkMoe& c = *s.call;
  const int64_t routes = tokens * c.top_k, widest = c.hidden > c.intermediate ? c.hidden : c.intermediate;
  const int64_t x_bytes = vector_bytes(c.hidden), h_bytes = vector_bytes(c.intermediate);
  s.unit = c.output_packed ? nullptr : s.isa->matrix;
  const int64_t asked = matrix_rows;
  s.least_rows = asked > 0 ? asked : s.unit ? s.unit->least_rows[c.format] : 1;
  if (routes < s.least_rows) s.unit = nullptr;
  s.down_tiles = down_tiles(s, routes);
  // Experts that may take the unit, and what their last strips may waste.
  const int64_t on_unit = s.unit ? std::min(c.experts, routes / s.least_rows) : 0;
  const int64_t h_rows = routes + on_unit * (kStripRoutes - 1), x_strips = s.unit ? routes / kStripTokens + on_unit : 0;
  const int64_t unit_routes = s.unit ? routes : 0;
  const int64_t row_scales = s.unit && c.format != MXK_MXFP4 ? (groups_of(widest) + 15) / 16 * 16 : 0;
  const size_t per_unit = !s.unit ? 0
                                  : Arena::bytes_for<uint8_t>(kMatrixTileBytes) +
                                        Arena::bytes_for<float>(2 * kMatrixStrips * 256) + Arena::bytes_for<float>(widest) +
                                        2 * Arena::bytes_for<float>(2 * 16 * row_scales);
  const size_t per_thread = 2 * Arena::bytes_for<float>(kTileTokens * 16) +
                            size_t(s.down_tiles) * Arena::bytes_for<float>(routes * 16) +
                            Arena::bytes_for<float>(2 * scales_capacity(widest) * 16) +
                            Arena::bytes_for<uint8_t>(2 * scales_capacity(widest) * 16) + Arena::bytes_for<float>(widest) +
                            Arena::bytes_for<float>(2 * kTileTokens * 64) + per_unit;
  const size_t shared = 2 * Arena::bytes_for<int64_t>(routes) + Arena::bytes_for<float>(routes) +
                        4 * Arena::bytes_for<int64_t>(c.experts + 1) + Arena::bytes_for<Vector>(tokens) +
                        Arena::bytes_for<Vector>(routes) + 3 * Arena::bytes_for<void*>(routes) +
                        Arena::bytes_for<char>(tokens * x_bytes) + Arena::bytes_for<char>(h_rows * h_bytes) +
                        Arena::bytes_for<uint8_t>(c.experts) + Arena::bytes_for<uint16_t>(h_rows) +
                        Arena::bytes_for<uint16_t>(x_strips) + Arena::bytes_for<Vector>(unit_routes) +
                        Arena::bytes_for<void*>(unit_routes) +
                        Arena::bytes_for<uint8_t>(x_strips * strip_bytes(c.hidden)) +
                        Arena::bytes_for<ThreadScratch>(s.threads);
  if (!arena.reserve(shared + size_t(s.threads) * per_thread)) return false;
  s.position = arena.take<int64_t>(routes), s.token = arena.take<int64_t>(routes);
  s.weight = arena.take<float>(routes);
  s.start = arena.take<int64_t>(c.experts + 1), s.experts = arena.take<int64_t>(c.experts + 1);
  s.h_first = arena.take<int64_t>(c.experts + 1), s.x_first = arena.take<int64_t>(c.experts + 1);
  s.h_first[0] = s.x_first[0] = 0;
  s.x = arena.take<Vector>(tokens), s.h = arena.take<Vector>(routes);
  s.x_of = arena.take<const Vector*>(routes), s.h_of = arena.take<const Vector*>(routes);
  s.h_row = arena.take<float*>(routes);
  s.x_memory = arena.take<char>(tokens * x_bytes), s.h_memory = arena.take<char>(h_rows * h_bytes);
  s.by_unit = arena.take<uint8_t>(c.experts), s.h_exact = arena.take<uint16_t>(h_rows);
  s.x_exact = arena.take<uint16_t>(x_strips);
  s.raw = arena.take<Vector>(unit_routes), s.raw_of = arena.take<const Vector*>(unit_routes);
  s.x_strips = arena.take<uint8_t>(x_strips * strip_bytes(c.hidden));
  s.scratch = arena.take<ThreadScratch>(s.threads);
  for (int64_t t = 0; t < s.threads; ++t) {
    ThreadScratch& scratch = s.scratch[t];
    scratch.gate = reinterpret_cast<float(*)[16]>(arena.take<float>(kTileTokens * 16));
    scratch.up = reinterpret_cast<float(*)[16]>(arena.take<float>(kTileTokens * 16));
    for (int64_t i = 0; i < s.down_tiles; ++i)
      scratch.partial[i] = reinterpret_cast<float(*)[16]>(arena.take<float>(routes * 16));
    scratch.tile.scales = arena.take<float>(2 * scales_capacity(widest) * 16);
    scratch.tile.zeros = arena.take<uint8_t>(2 * scales_capacity(widest) * 16);
    scratch.tile.row = arena.take<float>(widest);
    scratch.tile.sums = arena.take<float>(2 * kTileTokens * 64);
    if (s.unit == nullptr) continue;
    MatrixScratch& matrix = scratch.matrix;
    matrix.tiles = arena.take<uint8_t>(kMatrixTileBytes), matrix.sums = arena.take<float>(2 * kMatrixStrips * 256);
    matrix.scales = arena.take<float>(2 * 16 * row_scales);
    matrix.zeros = arena.take<float>(2 * 16 * row_scales);
    matrix.row_scales = row_scales, matrix.row = scratch.tile.row, matrix.column = arena.take<float>(widest);
  }
  return true;
}

// Where each route's operands are, once the routes are sorted.
void place_routes(Slab& s) {
  const int64_t h_bytes = vector_bytes(s.call->intermediate);
  choose_experts(s);
  for (int64_t e = 0; e < s.call->experts; ++e)
    for (int64_t r = s.start[e]; r < s.start[e + 1]; ++r) {
      s.x_of[r] = &s.x[s.token[r]], s.h_of[r] = &s.h[r];
      if (s.unit) s.raw_of[r] = &s.raw[r];
      s.h_row[r] = reinterpret_cast<float*>(s.h_memory + (s.h_first[e] + r - s.start[e]) * h_bytes);
    }
}

const Isa* best() {
  for (const Isa* isa : {isa_amx(), isa_avx512(), isa_avx2()})
    if (isa) return isa;
  return isa_portable();
}

}  // namespace

int64_t mxk_cpu_abi() { return int64_t(sizeof(MxkMoe)) << 8 | kMxkRevision; }

int mxk_cpu_select(const char* name) {
  const Isa* isa = std::strcmp(name, "auto") == 0 ? best() : nullptr;
  for (const Isa* known : {isa_baseline(), isa_portable(), isa_avx2(), isa_avx512(), isa_amx()})
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

void mxk_cpu_matrix_rows(int64_t rows) { matrix_rows = rows; }

int64_t mxk_cpu_scratch_bytes() { return arena.size(); }

int mxk_cpu_moe(const MxkMoe* call) {
  const MxkMoe& c = *call;
  if (c.tokens == 0 || c.hidden == 0) return 0;
  const IeeeMode ieee;  // router weights become fp32 here; each thread has its own state besides
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
    place_routes(s);
    const int64_t tiles = (c.intermediate + kTileRows - 1) / kTileRows * (s.active ? s.active : 1);
    // Small enough that threads finish together; 8 transposed tiles share the cache lines of their rows.
    s.block = tiles / (s.threads * 64);
    s.block = c.output_packed ? 8 : s.block < 1 ? 1 : s.block > 4 ? 4 : s.block;
    run_threads(int(s.threads), thread_body, &s);
  }
  return 0;
}
