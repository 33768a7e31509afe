// 128-bit vectors with a byte shuffle: x86 with SSSE3 (2006 and later) and every aarch64 (vector128.h).
//
// One output row at a time, in steps of 16 packed bytes, a group of 32 columns: the low nibbles are its even columns, the
// high ones its odd. A shuffle turns them into unsigned bytes; products with a vector's digits are summed by fours into
// int32, digits joined, made fp32 and added up, four lanes a group, to the sums of even and of odd groups. Unpacking is
// shared by up to kBatch vectors, whose sums stay in registers. Transposed weights take the plain path.
#include "digits.h"
#include "vector128.h"

#if defined(MXK_VECTOR128)

namespace {

constexpr int kBatch = 4;
constexpr int64_t kAhead = 2048;  // bytes: how far ahead a row is fetched, into the next rows; measured

struct Row {
  const uint8_t* weight;
  const float* scales;  // by group, padded with zeros to chunks
  const float* zeros;   // the same; null: none
};

// The sum of one group: codes times digits, less what offset or zero point added.
template <int Digits, bool Dot>
inline Floats group_sum(Bytes low, Bytes high, const uint8_t* digits, const uint8_t* correction, const float* zero) {
  Ints sum = no_ints();
  for (int d = 0; d < Digits; ++d) {
    const uint8_t* at = digits + d * kDigit;
    const Ints products = dot<Dot>(low, high, load_bytes(at), load_bytes(at + kPlane));
    sum = d ? add(times_256(sum), products) : products;
  }
  int32_t bits;
  std::memcpy(&bits, correction, 4);
  if (zero == nullptr) return to_floats(add(sum, first_lane(bits)));
  return add_times_lane<0>(to_floats(sum), as_floats(first_lane(bits)), load_floats(zero));
}

// sums[g & 1] += the 4 groups of chunk c.
template <int Digits, bool Dot>
inline void multiply_chunk(const Bytes (&low)[4], const Bytes (&high)[4], const uint8_t* chunk, const Row& row, int64_t c,
                           Floats (&sums)[2]) {
  const uint8_t* units = chunk + Digits * kDigit;
  const Floats scales = multiply(load_floats(units), load_floats(row.scales + 4 * c));
  Floats parts[4];
  for (int g = 0; g < 4; ++g)
    parts[g] = group_sum<Digits, Dot>(low[g], high[g], chunk + g * 16, units + 16 + g * 4, row.zeros ? row.zeros + 4 * c + g : nullptr);
  sums[0] = add_times_lane<0>(sums[0], parts[0], scales);
  sums[1] = add_times_lane<1>(sums[1], parts[1], scales);
  sums[0] = add_times_lane<2>(sums[0], parts[2], scales);
  sums[1] = add_times_lane<3>(sums[1], parts[3], scales);
}

class Codes {
 public:
  explicit Codes(int64_t format) {
    uint8_t codes[16];
    for (int code = 0; code < 16; ++code)
      codes[code] = uint8_t(format == MXK_MXFP4 ? kTwiceE2M1[code] + 12 : format == MXK_INT4 ? code ^ 8 : code);
    table_ = load_bytes(codes);
  }
  // 4 groups at `at`, of which `left` bytes are there.
  void unpack(const uint8_t* at, int64_t left, Bytes (&low)[4], Bytes (&high)[4]) const {
    uint8_t tail[64];
    if (left < 64) {
      std::memset(tail, 0, sizeof tail);
      std::memcpy(tail, at, size_t(left));
      at = tail;
    }
    for (int g = 0; g < 4; ++g) {
      const Bytes packed = load_bytes(at + g * 16);
      low[g] = look_up(table_, low_nibbles(packed)), high[g] = look_up(table_, high_nibbles(packed));
    }
  }

 private:
  Bytes table_;
};

// Totals of a row and Count vectors of equal digits.
template <int Digits, bool Dot, int Count>
void multiply_row(const Codes& codes, const Row& row, int64_t bytes, const Vector* const* vectors, float* totals) {
  Floats sums[Count][2];
  for (auto& sum : sums) sum[0] = sum[1] = no_floats();
  for (int64_t c = 0; c * 64 < bytes; ++c) {
    Bytes low[4], high[4];
    fetch(row.weight + c * 64 + kAhead);
    codes.unpack(row.weight + c * 64, bytes - c * 64, low, high);
    for (int t = 0; t < Count; ++t)
      multiply_chunk<Digits, Dot>(low, high, vectors[t]->chunks + c * chunk_bytes(Digits), row, c, sums[t]);
  }
  for (int t = 0; t < Count; ++t) totals[t] = total(add(sums[t][0], sums[t][1]));
}

// All vectors with Digits digits, a few at a time; totals in the order of `vectors`.
template <int Digits, bool Dot>
void multiply_all(const Codes& codes, const Row& row, int64_t bytes, const Vector* const* vectors, int count, float* totals) {
  const Vector* batch[kBatch];
  int places[kBatch], filled = 0;
  float found[kBatch];
  const auto flush = [&] {
    if (filled == kBatch) {
      multiply_row<Digits, Dot, kBatch>(codes, row, bytes, batch, found);
    } else {
      for (int t = 0; t < filled; ++t) multiply_row<Digits, Dot, 1>(codes, row, bytes, batch + t, found + t);
    }
    for (int t = 0; t < filled; ++t) totals[places[t]] = found[t];
    filled = 0;
  };
  for (int t = 0; t < count; ++t) {
    if (vectors[t]->num_digits != Digits) continue;
    batch[filled] = vectors[t], places[filled++] = t;
    if (filled == kBatch) flush();
  }
  flush();
}

// scales[groups], zeros beyond them up to a chunk; returns whether one is out of the ordinary: not finite, or (E8M0) so
// large that a product with some code is not, or the subnormal 2^-127.
bool load_scales(const Tile& tile, int r, int64_t groups, float* scales) {
  const uint8_t* line = tile.scale + r * tile.scale_step;
  if (tile.group == kGroup && tile.scale_dtype == MXK_U8) {
    uint32_t odd = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t bits = uint32_t(line[g]) << 23;
      odd |= line[g] - 1u > 251u;
      std::memcpy(scales + g, &bits, 4);
    }
    for (int64_t g = groups; g % 4; ++g) scales[g] = 0.0f;
    return odd;
  }
  if (tile.group == kGroup && tile.scale_dtype == MXK_BF16) {
    uint32_t odd = 0;
    for (int64_t g = 0; g < groups; ++g) {
      uint16_t half;
      std::memcpy(&half, line + 2 * g, 2);
      const uint32_t bits = uint32_t(half) << 16;
      odd |= (bits & 0x7f800000u) == 0x7f800000u;
      std::memcpy(scales + g, &bits, 4);
    }
    for (int64_t g = groups; g % 4; ++g) scales[g] = 0.0f;
    return odd;
  }
  bool special = false;
  int64_t g = 0;
  for (; g < groups; ++g) {
    scales[g] = scale_of(tile, r, g * kGroup / tile.group);
    const float size = scales[g] < 0 ? -scales[g] : scales[g];
    special |= tile.scale_dtype == MXK_U8 ? !(size >= 0x1p-126f && size < 0x1p126f) : !(size < __builtin_inff());
  }
  for (; g % 4; ++g) scales[g] = 0.0f;
  return special;
}

template <bool Dot>
void tile_rows(const Tile& tile, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  uint32_t special = tile.transposed ? 0xffff : 0;
  int twos = 0, threes = 0;
  for (int t = 0; t < count; ++t) twos += vectors[t]->num_digits == 2, threes += vectors[t]->num_digits == 3;
  const int64_t groups = groups_of(tile.columns), padded = chunks_of(tile.columns) * 4, bytes = (tile.columns + 1) / 2;
  float *scales = scratch.scales, *zeros = tile.zero ? scales + padded : nullptr;
  const Codes codes(tile.format);
  for (int r = 0; r < tile.rows && !tile.transposed && twos + threes; ++r) {
    if (load_scales(tile, r, groups, scales)) {
      special |= 1u << r;
      continue;
    }
    // One more than there are groups: four are read at once.
    for (int64_t g = 0; zeros && g < padded + 4; ++g) zeros[g] = g < groups ? zero_of(tile, r, g * kGroup / tile.group) : 0.0f;
    const Row row = {tile.weight + r * tile.weight_step, scales, zeros};
    if (twos) multiply_all<2, Dot>(codes, row, bytes, vectors, count, scratch.sums);
    if (threes) multiply_all<3, Dot>(codes, row, bytes, vectors, count, scratch.sums);
    for (int t = 0; t < count; ++t)
      if (vectors[t]->num_digits > 1) out[t][r] = scratch.sums[t] + bias_of(tile, r);
  }
  exact_tile(tile, vectors, count, special, scratch, out);
}

template <bool Dot>
void tiles(const Tile* tiles, int num_tiles, const Vector* const* vectors, int count, const TileScratch& scratch,
           float (*const* out)[16]) {
  for (int i = 0; i < num_tiles; ++i) tile_rows<Dot>(tiles[i], vectors, count, scratch, out[i]);
}

constexpr Isa kIsa = {"portable", prepare, tiles<false>, activate_rows, nullptr};
constexpr Isa kDotIsa = {"portable", prepare, tiles<true>, activate_rows, nullptr};

}  // namespace

const Isa* isa_portable() {
  static const Isa* const found = !has_vector128() ? isa_baseline() : has_dot() ? &kDotIsa : &kIsa;
  return found;
}
#else
const Isa* isa_portable() { return isa_baseline(); }
#endif
