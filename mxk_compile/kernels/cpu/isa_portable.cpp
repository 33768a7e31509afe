// Any machine: every vector takes the plain fp32 path.
#include "exact.h"

namespace {

void prepare(const void* raw, bool wide, int64_t, const Coding&, void*, Vector* out) { *out = {raw, wide, 0, nullptr}; }

void tile(const Tile& t, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  exact_tile(t, vectors, count, 0, scratch, out);
}

constexpr Isa kIsa = {"portable", prepare, tile, activate_rows};

}  // namespace

const Isa* isa_portable() { return &kIsa; }
