// WGMMA: products run when the first thread must have them, so that operands that are written too early show.
//
// Accumulators of a product under way hold poison; results come to a thread when it has waited for them.
#include "fibers.h"

namespace emu {

namespace {

constexpr u32 UNDER_WAY = 0x7FC0DEAD;  // a NaN
constexpr int ROWS = 64, STEP_BYTES = 32;  // of A; columns of a product, in bytes

float value_of(Kind kind, const u8* bytes, int column) {
  if (kind == E4M3) return from_e4m3(bytes[column]);
  if (kind == S8) return static_cast<signed char>(bytes[column]);
  u16 bits;
  memcpy(&bits, bytes + 2 * column, 2);
  if (kind == F16) return from_f16(bits);
  const u32 word = static_cast<u32>(bits) << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

template <class T>
void multiply(Block& block, Multiplication& m) {
  const Product& p = m.product;
  const int columns = p.kind == BF16 || p.kind == F16 ? 16 : 32;
  u8 bytes[STEP_BYTES];
  std::vector<T> b(columns * p.n), sum(p.n);
  for (int n = 0; n < p.n; ++n) {
    read_row(block, p.b_descriptor, n, bytes);
    for (int k = 0; k < columns; ++k) b[k * p.n + n] = static_cast<T>(p.sign_b * value_of(p.kind, bytes, k));
  }
  for (int row = 0; row < ROWS; ++row) {
    const int thread = row / 16 * 32 + row % 8 * 4, half = row % 16 / 8;  // the first of four
    if (p.a != nullptr) {
      for (int q = 0; q < 4; ++q)
        for (int part = 0; part < 2; ++part) memcpy(bytes + 16 * part + 4 * q, &m.a[(thread + q) * 4 + 2 * part + half], 4);
    } else {
      read_row(block, p.a_descriptor, row, bytes);
    }
    const auto place = [&](int n) { return &m.values[(thread + n % 8 / 2) * p.accumulators + n / 8 * 4 + 2 * half + n % 2]; };
    for (int n = 0; n < p.n; ++n) {
      sum[n] = 0;
      if (p.add) memcpy(&sum[n], place(n), 4);
    }
    for (int k = 0; k < columns; ++k) {
      const T a = static_cast<T>(p.sign_a * value_of(p.kind, bytes, k));
      const T* of_k = &b[k * p.n];
      for (int n = 0; n < p.n; ++n) sum[n] += a * of_k[n];
    }
    for (int n = 0; n < p.n; ++n) memcpy(place(n), &sum[n], 4);
  }
}

Multiplication& running(Warpgroup& group, i64 index) { return group.running[index - group.first]; }

}  // namespace

// STEP_BYTES of a row of a K-major operand in shared memory, by its descriptor (PTX ISA, "Matrix Descriptor Format").
void read_row(Block& block, u64 descriptor, int row, u8* to) {
  const u32 layout = descriptor >> 62, start = (descriptor & 0x3FFF) << 4;
  const u32 along_k = (descriptor >> 16 & 0x3FFF) << 4, along_n = (descriptor >> 32 & 0x3FFF) << 4;
  if (descriptor >> 49 & 7) fail("a descriptor with a base offset, which is not emulated");
  for (int chunk = 0; chunk < STEP_BYTES / 16; ++chunk) {
    u32 address = start + row / 8 * along_n;
    if (layout == 0) {
      address += row % 8 * 16 + chunk * along_k;
    } else {
      const u32 bits = 4 - layout;  // 1: 128 bytes, 2: 64, 3: 32
      address += row % 8 * (16u << bits) + chunk * 16;
      address ^= (address >> 7 & ((1u << bits) - 1)) << 4;
    }
    const u8* from = locate(address, 16, 16);
    for (int i = 0; i < 16; ++i)
      if (const u32 writer = block.writers[address - SHARED_BASE + i])
        fail("a product reads shared memory at %u, which thread %u wrote without a fence.proxy.async", address + i, writer - 1);
    memcpy(to + 16 * chunk, from, 16);
  }
}

void wgmma_fence() { self().fenced = true; }

void wgmma(const Product& product) {
  Fiber& fiber = self();
  EMU_CALLER;
  Warpgroup& group = *fiber.group;
  const int thread = fiber.index % 128;
  if (product.a != nullptr && !fiber.fenced) fail("WGMMA without a wgmma.fence since the last wait, though A is in registers");
  const i64 index = fiber.products++;
  if (index == group.first + static_cast<i64>(group.running.size())) {
    Multiplication& fresh = group.running.emplace_back();
    fresh.product = product;
    fresh.a.resize(128 * 4);
    fresh.values.resize(128 * product.accumulators);
    fresh.targets.resize(128 * product.accumulators);
  }
  Multiplication& m = running(group, index);
  const Product& p = m.product;
  if (p.kind != product.kind || p.n != product.n || p.b_descriptor != product.b_descriptor || p.add != product.add ||
      (p.a == nullptr) != (product.a == nullptr) || p.a_descriptor != product.a_descriptor)
    fail("WGMMA by thread %d of a warpgroup differs from the others' (descriptor %llx, theirs %llx)", thread,
         product.b_descriptor, p.b_descriptor);
  if (product.a != nullptr) memcpy(&m.a[thread * 4], product.a, 16);
  void** targets = &m.targets[thread * p.accumulators];
  memcpy(targets, product.d, p.accumulators * sizeof(void*));
  if (product.add) {
    i64 chained = -1;
    for (i64 i = fiber.collected; i < index; ++i)
      if (running(group, i).targets[thread * running(group, i).product.accumulators] == targets[0]) chained = i;
    if (m.issued != 0 && m.chained != chained) fail("accumulators of a warpgroup's threads under way in different products");
    m.chained = chained;
    if (chained < 0)
      for (int i = 0; i < p.accumulators; ++i) memcpy(&m.values[thread * p.accumulators + i], targets[i], 4);
  }
  for (int i = 0; i < p.accumulators; ++i) memcpy(targets[i], &UNDER_WAY, 4);
  if (++m.issued == 128) wake(group.waiting);
}

void wgmma_commit() { self().committed.push_back(self().products); }

void wgmma_wait(u32 pending) {
  Fiber& fiber = self();
  EMU_CALLER;
  Warpgroup& group = *fiber.group;
  const int thread = fiber.index % 128;
  fiber.fenced = false;
  while (fiber.committed.size() > pending) {
    const i64 end = fiber.committed.front();
    fiber.committed.pop_front();
    for (; fiber.collected < end; ++fiber.collected) {
      const i64 index = fiber.collected;
      while (running(group, index).issued < 128) {
        group.waiting.push_back(&fiber);
        wait("the other threads' WGMMA", index);
      }
      Multiplication& m = running(group, index);
      const int count = m.product.accumulators;
      if (!m.done) {
        if (m.chained >= 0) m.values = running(group, m.chained).values;
        m.product.kind == S8 ? multiply<i32>(*fiber.owner, m) : multiply<float>(*fiber.owner, m);
        m.done = true;
      }
      void** targets = &m.targets[thread * count];
      bool latest = true;  // else the accumulators are under way again
      for (i64 i = index + 1; i < fiber.products && latest; ++i)
        latest = running(group, i).targets[thread * running(group, i).product.accumulators] != targets[0];
      for (int i = 0; i < count && latest; ++i) memcpy(targets[i], &m.values[thread * count + i], 4);
      ++m.collected;
    }
  }
  while (!group.running.empty() && group.running.front().collected == 128) {
    for (Multiplication& later : group.running)
      if (later.chained == group.first && !later.done) later.values = group.running.front().values, later.chained = -1;
    group.running.pop_front();
    ++group.first;
  }
}

}  // namespace emu
