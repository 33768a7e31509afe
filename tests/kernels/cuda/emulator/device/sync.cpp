// Shared memory and the meeting points of threads: bar.sync, lanes of a warp, mbarrier, registers.
#include "fibers.h"

namespace emu {

void poison(u8* memory, u64 bytes) { memset(memory, POISON, bytes); }

// ---- shared memory

u8* shared(u32 address, u32 bytes, u32 alignment) {
  EMU_CALLER;
  return locate(address, bytes, alignment);
}

u8* locate(u32 address, u32 bytes, u32 alignment) {
  Block& block = *self().owner;
  if (address < SHARED_BASE || address - SHARED_BASE + bytes > block.used)
    fail("shared memory at %u, %u bytes; the block has %u to %u", address, bytes, SHARED_BASE, SHARED_BASE + block.used);
  if (address % alignment) fail("shared memory at %u; its instruction wants a multiple of %u", address, alignment);
  return block.memory + (address - SHARED_BASE);
}

void wrote_shared(u32 address, u32 bytes) {
  Fiber& fiber = self();
  u16* writers = fiber.owner->writers.data() + (address - SHARED_BASE);
  for (u32 i = 0; i < bytes; ++i) writers[i] = static_cast<u16>(1 + fiber.index);
  fiber.written.push_back({address - SHARED_BASE, bytes});
}

void fence_proxy_async() {
  Fiber& fiber = self();
  for (const auto& [at, bytes] : fiber.written)
    for (u32 i = at; i < at + bytes; ++i)
      if (fiber.owner->writers[i] == 1 + fiber.index) fiber.owner->writers[i] = 0;
  fiber.written.clear();
  // Copies belong to no thread's order of things: who has seen them arrive may fence them.
  for (const auto& [at, bytes] : fiber.owner->copied) memset(fiber.owner->writers.data() + at, 0, bytes * sizeof(u16));
  fiber.owner->copied.clear();
}

u32 shared_address_of(const void* pointer) {
  EMU_CALLER;
  const i64 offset = static_cast<const u8*>(pointer) - self().owner->memory;
  if (offset < 0 || offset >= SHARED_BYTES) fail("%p is not in the block's shared memory", pointer);
  return SHARED_BASE + static_cast<u32>(offset);
}

void* dynamic_shared() { return self().owner->memory; }

void* static_shared(const void* site, u64 bytes, u64 alignment) {
  Block& block = *self().owner;
  EMU_CALLER;
  auto [found, added] = block.statics.try_emplace(site, 0);
  if (added) {
    found->second = static_cast<u32>((block.used + alignment - 1) / alignment * alignment);
    block.used = static_cast<u32>(found->second + bytes);
    if (block.used > SHARED_BYTES) fail("%u bytes of shared memory; a block has %u", block.used, SHARED_BYTES);
  }
  return block.memory + found->second;
}

// ---- whole warps and blocks

void bar_sync(u32 number, u32 threads) {
  Fiber& fiber = self();
  EMU_CALLER;
  if (number > 15 || threads % 32 || threads == 0) fail("bar.sync %u, %u; allowed: 0 to 15, multiples of 32", number, threads);
  Barrier& barrier = fiber.owner->barriers[number];
  fiber.tensor_ordered = false;
  if (barrier.arrived && barrier.expected != threads)
    fail("bar.sync %u for %u threads, where others wait for %u", number, threads, barrier.expected);
  barrier.expected = threads;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    wake(barrier.waiting);
    maybe_pause();
  } else {
    barrier.waiting.push_back(&fiber);
    wait("bar.sync", number);
  }
}

void bar_arrive(u32 number, u32 threads) {
  EMU_CALLER;
  Barrier& barrier = self().owner->barriers[number];
  if (barrier.arrived && barrier.expected != threads) fail("bar.arrive %u for %u threads, not %u", number, threads, barrier.expected);
  barrier.expected = threads;
  if (++barrier.arrived == threads) barrier.arrived = 0, wake(barrier.waiting);
}

void syncthreads() {
  Fiber& fiber = self();
  EMU_CALLER;
  Barrier& barrier = fiber.owner->barriers[0];
  barrier.expected = fiber.owner->live;
  if (++barrier.arrived == fiber.owner->live) {
    barrier.arrived = 0;
    wake(barrier.waiting);
    maybe_pause();
  } else {
    barrier.waiting.push_back(&fiber);
    wait("__syncthreads", 0);
  }
}

const u64* exchange(const char* what, u32 mask, u64 value) {
  Fiber& fiber = self();
  EMU_CALLER;
  mask &= fiber.warp->present;
  if (!(mask >> fiber.lane & 1)) fail("%s by lane %u, which its mask %08x leaves out", what, fiber.lane, mask);
  Meeting& meeting = fiber.warp->meetings[mask];
  if (meeting.arrived == 0) meeting.what = what;
  else if (strcmp(meeting.what, what) != 0) fail("%s, while other lanes of the warp are at %s", what, meeting.what);
  u64* values = meeting.values[meeting.generation & 1];  // the others' of the next meeting go beside them
  values[fiber.lane] = value;
  meeting.arrived |= 1u << fiber.lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.generation;
    wake(meeting.waiting);
    maybe_pause();
  } else {
    meeting.waiting.push_back(&fiber);
    wait(what, mask);
  }
  return values;
}

void set_registers(u32 registers) {
  Fiber& fiber = self();
  EMU_CALLER;
  if (registers < 24 || registers > 256 || registers % 8) fail("setmaxnreg %u; allowed: 24 to 256 in eights", registers);
  Block& block = *fiber.owner;
  while (registers > fiber.registers + block.free_registers) {
    block.want_registers.push_back(&fiber);
    wait("setmaxnreg", registers);
  }
  block.free_registers += fiber.registers - registers;
  if (registers < fiber.registers) wake(block.want_registers);
  fiber.registers = registers;
}

// ---- mbarrier

Mbarrier& mbarrier_at(Block& block, u32 address) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("there is no mbarrier at %u", address);
  return found->second;
}

void mbarrier_progress(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  wake(barrier.waiting);
}

void mbarrier_init(u32 address, u32 count) {
  EMU_CALLER;
  if (count == 0 || count >= 1u << 20) fail("mbarrier.init for %u arrivals", count);
  locate(address, 8, 8);
  Mbarrier& barrier = self().owner->mbarriers[address];
  if (!barrier.waiting.empty()) fail("mbarrier.init at %u, where threads wait", address);
  barrier = Mbarrier{};
  barrier.count = barrier.pending = count;
}

void mbarrier_arrive(u32 address, u32 count) {
  EMU_CALLER;
  Mbarrier& barrier = mbarrier_at(*self().owner, address);
  if (count > barrier.pending) fail("more arrivals at the mbarrier at %u than the %u it counts", address, barrier.count);
  barrier.pending -= count;
  mbarrier_progress(barrier);
  maybe_pause();
}

void mbarrier_expect(u32 address, u32 bytes) {
  EMU_CALLER;
  mbarrier_at(*self().owner, address).bytes += bytes;
}

bool mbarrier_test(u32 address, u32 parity) {
  EMU_CALLER;
  const bool done = mbarrier_at(*self().owner, address).phase != (parity & 1);
  if (!done) pause();
  return done;
}

bool mbarrier_wait(u32 address, u32 parity) {
  Fiber& fiber = self();
  EMU_CALLER;
  if (parity > 1) fail("parity %u at the mbarrier at %u", parity, address);
  Mbarrier& barrier = mbarrier_at(*fiber.owner, address);
  fiber.tensor_ordered = false;
  while (barrier.phase == parity) {
    barrier.waiting.push_back(&fiber);
    wait(MBARRIER, static_cast<u64>(address) * 2 + parity);
  }
  return true;
}

}  // namespace emu
