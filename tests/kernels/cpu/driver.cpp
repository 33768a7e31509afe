// Drives the kernel library over shapes, layouts, routings and bytes drawn at random, for the sanitizers: every buffer is
// a heap block of exactly its size, so that one byte too far is an error. Prints "ok"; compares nothing but repetition.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "abi.h"

namespace {

thread_local uint64_t state = 88172645463325252ull;
uint64_t next(uint64_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state % below;
}

using Bytes = std::vector<uint8_t>;
Bytes random_bytes(int64_t size) {
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = uint8_t(next(256));
  return bytes;
}

struct Weights {
  std::vector<Bytes> blocks;
  std::vector<const void*> pointers;
};

// One tensor an expert, as in the list form.
const void* tensor(std::vector<std::unique_ptr<Weights>>& keep, int64_t count, int64_t bytes) {
  keep.push_back(std::make_unique<Weights>());
  for (int64_t i = 0; i < count; ++i) keep.back()->blocks.push_back(random_bytes(bytes));
  for (const Bytes& block : keep.back()->blocks) keep.back()->pointers.push_back(block.data());
  return keep.back()->pointers.data();
}

void projection(std::vector<std::unique_ptr<Weights>>& keep, MxkProjection& p, bool packed_out, int64_t format,
                int64_t experts, int64_t rows, int64_t columns) {
  const int64_t choices[] = {32, 64, columns};
  p.group = format == MXK_MXFP4 ? 32 : choices[next(3)];
  if (p.group != columns && columns % p.group) p.group = format == MXK_MXFP4 ? 32 : columns;
  const int64_t groups = (columns + p.group - 1) / p.group;
  p.scale_dtype = format == MXK_MXFP4 ? int64_t(MXK_U8) : int64_t(MXK_BF16 + next(3));
  const int64_t size = p.scale_dtype == MXK_U8 ? 1 : p.scale_dtype == MXK_F32 ? 4 : 2;
  p.bias_dtype = MXK_BF16 + next(3);
  const int64_t lines = packed_out ? columns : rows, scale_lines = packed_out ? groups : rows;
  p.weight_line = packed_out ? rows / 2 : (columns + 1) / 2;
  p.scale_line = (packed_out ? rows : groups) * size;
  p.weight = tensor(keep, experts, lines * p.weight_line);
  p.scale = tensor(keep, experts, scale_lines * p.scale_line);
  if (format == MXK_UINT4 && next(2)) {
    p.zero_dtype = packed_out && next(2) ? MXK_I32 : MXK_U8;
    p.zero_line = (packed_out ? rows : groups) / (p.zero_dtype == MXK_I32 ? 2 : 1);
    p.zero = tensor(keep, experts, scale_lines * p.zero_line);
  }
  if (next(2)) p.bias = tensor(keep, experts, rows * (p.bias_dtype == MXK_F32 ? 4 : 2));
}

bool once() {
  std::vector<std::unique_ptr<Weights>> keep;
  const int64_t sizes[] = {32, 64, 96, 130, 464, 720};
  MxkMoe c = {};
  c.lists = 1, c.threads = 1 + next(3);
  c.format = next(3), c.output_packed = c.format != MXK_MXFP4 && next(2);
  c.hidden = sizes[next(6)], c.intermediate = sizes[next(6)];
  if (c.output_packed) c.hidden = c.hidden / 8 * 8, c.intermediate = c.intermediate / 8 * 8;
  c.experts = 1 + next(4), c.tokens = next(4) ? next(12) : next(150), c.top_k = 1 + next(4);
  c.row_order = next(4), c.activation = next(3), c.per_route = next(2), c.alpha = 1.702, c.limit = 7.0;
  c.experts_min = next(2) * 3;
  const bool separate = c.row_order == MXK_SEPARATE;
  projection(keep, c.w13, c.output_packed, c.format, c.experts * (separate ? 2 : 1), c.intermediate * (separate ? 1 : 2), c.hidden);
  projection(keep, c.w2, c.output_packed, c.format, c.experts, c.hidden, c.intermediate);
  Bytes x = random_bytes(c.tokens * c.hidden * 2);
  if (next(2))  // ordinary numbers, so that the integer paths run
    for (size_t i = 1; i < x.size(); i += 2) x[i] = uint8_t(next(2) << 7 | (0x3c + next(4)));
  std::vector<int64_t> ids(c.tokens * c.top_k);
  for (int64_t& id : ids) id = next(8) ? int64_t(next(c.experts + 2)) + c.experts_min - 1 : int64_t(next(1ull << 63) * 2);
  std::vector<float> weights(ids.size(), 0.5f);
  c.x = x.data(), c.x_line = c.hidden * 2;
  c.ids = ids.data(), c.ids_dtype = MXK_I64, c.ids_line = c.top_k * 8, c.ids_step = 8;
  c.weights = weights.data(), c.weights_dtype = MXK_F32, c.weights_line = c.top_k * 4, c.weights_step = 4;
  std::vector<uint16_t> out[2];
  for (auto& o : out) {
    o.assign(c.tokens * c.hidden * (c.per_route ? c.top_k : 1), 0xffff);
    c.out = o.data();
    if (mxk_cpu_moe(&c)) return false;
    c.threads = 1;
  }
  return out[0] == out[1];
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  for (const char* isa : {"baseline", "portable", "avx2", "avx512", "amx"}) {
    if (mxk_cpu_select(isa)) continue;
    mxk_cpu_matrix_rows(1);
    for (int i = 0; i < rounds; ++i)
      if (!once()) return std::printf("%s: round %d differs\n", isa, i), 1;
  }
  mxk_cpu_select("auto"), mxk_cpu_matrix_rows(0);
  // Two callers at once: scratch is per thread.
  std::vector<std::thread> callers;
  bool good[2] = {};
  for (bool& result : good)
    callers.emplace_back([&result, rounds] {
      result = true;
      for (int i = 0; i < rounds; ++i) result &= once();
    });
  for (std::thread& caller : callers) caller.join();
  if (!good[0] || !good[1]) return std::puts("callers at once differ"), 1;
  std::puts("ok");
}
