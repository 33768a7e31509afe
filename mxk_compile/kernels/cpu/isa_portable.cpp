// Any machine: every vector takes the plain fp32 path.
#include "exact.h"

namespace {

void prepare(const void* raw, bool wide, int64_t, const Coding&, void*, Vector* out) { *out = {raw, wide, 0, nullptr}; }

void tiles(const Tile* tiles, int num_tiles, const Vector* const* vectors, int count, const TileScratch& scratch,
           float (*const* out)[16]) {
  for (int i = 0; i < num_tiles; ++i) exact_tile(tiles[i], vectors, count, 0, scratch, out[i]);
}

constexpr Isa kIsa = {"portable", prepare, tiles, activate_rows};

}  // namespace

const Isa* isa_portable() { return &kIsa; }
