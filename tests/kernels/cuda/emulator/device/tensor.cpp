// Tensor memory of sm_100: 128 lanes of 512 columns a block, products of bf16 that one thread begins (PTX ISA, "TensorCore 5th
// Generation Family Instructions").
//
// Stores are there, and loaded registers hold values, when their thread has waited. Products end later, in order; what they
// still read or write is nobody else's: that fails, and so does what a fence was to order.
#include "fibers.h"

namespace emu {

namespace {

constexpr u32 COLUMNS = 512, UNDER_WAY = 0x7FC0DEAD;  // a NaN

u32 lane_of(u32 address) { return address >> 16; }
u32 column_of(u32 address) { return address & 0xFFFF; }

Cell& cell(Tensor& tensor, u32 lane, u32 column) {
  if (lane >= 128 || column < tensor.first || column >= tensor.first + tensor.columns)
    fail("tensor memory at lane %u, column %u; allocated are columns %u to %u", lane, column, tensor.first, tensor.first + tensor.columns);
  return tensor.cells[lane * COLUMNS + column];
}

void check_ordered(const char* what) {
  if (!self().tensor_ordered) fail("%s without tcgen05.fence::after_thread_sync since this thread's last barrier", what);
}

// Where register `index` of a lane lies: shapes .16x128b (2 registers a repetition) and .16x256b (4).
u32 place(u32 address, bool wide, u32 index) {
  const u32 lane = self().lane, row = lane / 4 + 8 * (wide ? index / 2 % 2 : index % 2);
  const u32 column = wide ? index % 2 + 2 * (lane % 4) + 8 * (index / 4) : lane % 4 + 4 * (index / 2);
  return address + (row << 16) + column;
}

void check_address(const char* what, u32 address) {
  const u64* all = exchange(what, ~0u, address);
  for (u32 lane = 0; lane < 32; ++lane)
    if (all[lane] != address) fail("%s at different addresses in a warp", what);
  const u32 first = self().index / 32 % 4 * 32, lane = lane_of(address);
  if (lane != first && lane != first + 16) fail("%s from lane %u; a warp has lanes %u and %u", what, lane, first, first + 16);
}

void run_product(Fiber& fiber, u32 d, u32 a, u64 b, u32 n, bool add) {
  Thread* const before = current;
  current = &fiber;
  Block& block = *fiber.owner;
  Tensor& tensor = block.tensor;
  std::vector<u8> rows(n * 32);
  for (u32 column = 0; column < n; ++column) read_row(block, b, static_cast<int>(column), &rows[column * 32]);
  for (u32 row = 0; row < 128; ++row) {
    float weights[16];
    for (u32 k = 0; k < 16; ++k) {
      const u32 word = cell(tensor, row, column_of(a) + k / 2).value;
      const u32 bits = k % 2 ? word & 0xFFFF0000u : word << 16;
      memcpy(&weights[k], &bits, 4);
    }
    for (u32 column = 0; column < n; ++column) {
      Cell& target = cell(tensor, row, column_of(d) + column);
      float sum = 0;
      if (add) memcpy(&sum, &target.value, 4);
      for (u32 k = 0; k < 16; ++k) {
        u16 half;
        memcpy(&half, &rows[column * 32 + 2 * k], 2);
        const u32 bits = static_cast<u32>(half) << 16;
        float value;
        memcpy(&value, &bits, 4);
        sum += weights[k] * value;
      }
      memcpy(&target.value, &sum, 4);
      --target.written;
    }
    for (u32 word = 0; word < 8; ++word) --cell(tensor, row, column_of(a) + word).read;
  }
  --tensor.under_way;
  current = before;
}

}  // namespace

void tensor_allocate(u32 result, u32 columns) {
  exchange("tcgen05.alloc", ~0u, columns);
  EMU_CALLER;
  if (self().lane != 0) return;
  Tensor& tensor = self().owner->tensor;
  if (columns < 32 || columns > COLUMNS || (columns & (columns - 1))) fail("tcgen05.alloc of %u columns", columns);
  if (tensor.columns || tensor.relinquished) fail("a second tcgen05.alloc, which is not emulated, or one after relinquish_alloc_permit");
  tensor.first = COLUMNS - columns, tensor.columns = columns;
  tensor.cells.assign(128 * COLUMNS, Cell{UNDER_WAY});
  memcpy(shared(result, 4, 4), &tensor.first, 4);
}

void tensor_relinquish() {
  exchange("tcgen05.relinquish_alloc_permit", ~0u, 0);
  self().owner->tensor.relinquished = true;
}

void tensor_free(u32 address, u32 columns) {
  exchange("tcgen05.dealloc", ~0u, address);
  EMU_CALLER;
  if (self().lane != 0) return;
  Tensor& tensor = self().owner->tensor;
  if (address != tensor.first || columns != tensor.columns) fail("tcgen05.dealloc of %u columns from %x", columns, address);
  if (tensor.under_way) fail("tcgen05.dealloc with %d products or commits under way", tensor.under_way);
  tensor.columns = 0;
}

void tensor_store(u32 address, bool wide, const u32* values, int count) {
  check_address("tcgen05.st", address);
  EMU_CALLER;
  check_ordered("tcgen05.st");
  Fiber& fiber = self();
  for (int i = 0; i < count; ++i) {
    const u32 at = place(address, wide, i);
    Cell& target = cell(fiber.owner->tensor, lane_of(at), column_of(at));
    if (target.read || target.written) fail("tcgen05.st where a product is under way");
    target.value = UNDER_WAY, target.writer = 1 + fiber.index;
    fiber.stores.push_back({at, values[i]});
  }
}

void tensor_load(u32 address, bool wide, void* const* targets, int count) {
  check_address("tcgen05.ld", address);
  EMU_CALLER;
  check_ordered("tcgen05.ld");
  Fiber& fiber = self();
  for (int i = 0; i < count; ++i) {
    const u32 at = place(address, wide, i);
    if (cell(fiber.owner->tensor, lane_of(at), column_of(at)).written) fail("tcgen05.ld of sums of a product under way");
    memcpy(targets[i], &UNDER_WAY, 4);
    fiber.loads.push_back({at, targets[i]});
  }
}

void tensor_wait_stored() {
  exchange("tcgen05.wait::st", ~0u, 0);
  Fiber& fiber = self();
  for (const auto& [at, value] : fiber.stores) cell(fiber.owner->tensor, lane_of(at), column_of(at)).value = value, fiber.stored.push_back(at);
  fiber.stores.clear();
}

void tensor_wait_loaded() {
  exchange("tcgen05.wait::ld", ~0u, 0);
  Fiber& fiber = self();
  for (const auto& [at, target] : fiber.loads) memcpy(target, &cell(fiber.owner->tensor, lane_of(at), column_of(at)).value, 4);
  fiber.loads.clear();
}

void tensor_fence_before() {
  Fiber& fiber = self();
  for (const u32 at : fiber.stored) cell(fiber.owner->tensor, lane_of(at), column_of(at)).writer = 0;
  fiber.stored.clear();
}

void tensor_fence_after() { self().tensor_ordered = true; }

void tensor_multiply(u32 d, u32 a, u64 b, u32 instruction, bool add) {
  Fiber& fiber = self();
  EMU_CALLER;
  check_ordered("tcgen05.mma");
  Tensor& tensor = fiber.owner->tensor;
  const u32 n = (instruction >> 17 & 63) * 8, m = (instruction >> 24 & 31) * 16;
  if ((instruction & 0x8001FFFF) != 0x490 || m != 128 || n % 16 || n < 16 || n > 256)
    fail("tcgen05.mma with instruction descriptor %x, of which only fp32 = bf16 * bf16, M = 128 is emulated", instruction);
  if ((b >> 46 & 3) != 1 || lane_of(d) || lane_of(a)) fail("tcgen05.mma with descriptor %llx, D at %x, A at %x", b, d, a);
  for (u32 row = 0; row < 128; ++row) {
    for (u32 word = 0; word < 8; ++word) {
      Cell& of_a = cell(tensor, row, column_of(a) + word);
      if (of_a.writer) fail("tcgen05.mma reads what thread %u stored without wait::st and fence::before_thread_sync", of_a.writer - 1);
      ++of_a.read;
    }
    for (u32 column = 0; column < n; ++column) ++cell(tensor, row, column_of(d) + column).written;
  }
  ++tensor.under_way;
  start_transfer(true, [&fiber, d, a, b, n, add] { run_product(fiber, d, a, b, n, add); });
}

void tensor_commit(u32 barrier) {
  Fiber& fiber = self();
  EMU_CALLER;
  mbarrier_at(*fiber.owner, barrier);
  ++fiber.owner->tensor.under_way;
  start_transfer(true, [&fiber, barrier] {
    Mbarrier& to = mbarrier_at(*fiber.owner, barrier);
    if (to.pending == 0) fail("more arrivals at the mbarrier at %u than the %u it counts", barrier, to.count);
    --to.pending;
    --fiber.owner->tensor.under_way;
    mbarrier_progress(to);
  });
}

}  // namespace emu
