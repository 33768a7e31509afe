// Asynchronous copies: what they write is poison from their start to a later moment, when what they read arrives.
#include "fibers.h"
#include "tensor_map.h"

namespace emu {

namespace {

u8* at(Block& block, u32 address) { return block.memory + (address - SHARED_BASE); }

void arrived(Block& block, u32 target, u32 bytes) {
  for (u32 i = 0; i < bytes; ++i) block.writers[target - SHARED_BASE + i] = 0;  // the asynchronous proxy's own writes
}

void complete(Block& block, u32 barrier, u32 bytes) {
  Mbarrier& found = mbarrier_at(block, barrier);
  found.bytes -= bytes;
  mbarrier_progress(found);
}

}  // namespace

void run_copies(Block& block, u32 thread, const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    u8* target = at(block, copy.target);
    memset(target, 0, copy.bytes);
    memcpy(target, copy.source, copy.valid);
    for (u32 i = 0; i < copy.bytes; ++i) block.writers[copy.target - SHARED_BASE + i] = static_cast<u16>(1 + thread);
    block.copied.push_back({copy.target - SHARED_BASE, copy.bytes});
  }
}

void copy_async(u32 target, const void* source, u32 bytes, u32 valid) {
  EMU_CALLER;
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of %u bytes; allowed: 4, 8, 16", bytes);
  if (valid > bytes) fail("cp.async of %u bytes reads %u", bytes, valid);
  if (reinterpret_cast<u64>(source) % bytes) fail("cp.async from %p; allowed: multiples of its %u bytes", source, bytes);
  poison(locate(target, bytes, bytes), bytes);
  self().copies.push_back({target, bytes, valid, static_cast<const u8*>(source)});
}

void copies_arrive(u32 barrier, bool counted) {
  Fiber& fiber = self();
  EMU_CALLER;
  Block& block = *fiber.owner;
  Mbarrier& found = mbarrier_at(block, barrier);
  if (!counted) ++found.pending;
  start_transfer(true, [&block, thread = fiber.index, barrier, copies = std::move(fiber.copies)] {
    run_copies(block, thread, copies);
    Mbarrier& full = mbarrier_at(block, barrier);
    if (full.pending == 0) fail("more arrivals at the mbarrier at %u than the %u it counts", barrier, full.count);
    --full.pending;
    mbarrier_progress(full);
  });
  fiber.copies.clear();
  maybe_pause();
}

void copies_commit() {
  Fiber& fiber = self();
  fiber.copy_groups.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}

void copies_wait(u32 pending) {
  Fiber& fiber = self();
  while (fiber.copy_groups.size() > pending) {
    run_copies(*fiber.owner, fiber.index, fiber.copy_groups.front());
    fiber.copy_groups.pop_front();
  }
}

void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
  EMU_CALLER;
  Block& block = *self().owner;
  if (bytes % 16 || reinterpret_cast<u64>(source) % 16)
    fail("cp.async.bulk of %u bytes from %p; allowed: multiples of 16", bytes, source);
  poison(locate(target, bytes, 16), bytes);
  mbarrier_at(block, barrier);
  start_transfer(false, [&block, target, source, bytes, barrier] {
    memcpy(at(block, target), source, bytes);
    arrived(block, target, bytes);
    complete(block, barrier, bytes);
  });
  maybe_pause();
}

void tensor_load(u32 target, const void* pointer, const i32* coordinates, int rank, u32 barrier) {
  EMU_CALLER;
  Block& block = *self().owner;
  if (reinterpret_cast<u64>(pointer) % 64) fail("a tensor map at %p; allowed: multiples of 64", pointer);
  TensorMap map;
  memcpy(&map, pointer, sizeof map);
  if (memcmp(map.magic, "EMULATED", 8) != 0) fail("what lies at %p is no tensor map", pointer);
  if (map.rank != rank) fail("a copy of %d dimensions by a map of %d", rank, map.rank);
  u32 bytes = map.element_bytes;
  for (int i = 0; i < rank; ++i) bytes *= map.box[i];
  poison(locate(target, bytes, 128), bytes);
  mbarrier_at(block, barrier);
  std::vector<i32> first(coordinates, coordinates + rank);
  start_transfer(false, [&block, map, target, first, rank, bytes, barrier] {
    const u32 row = map.box[0] * map.element_bytes;
    u8* to = at(block, target);
    for (u32 index = 0; index < bytes / row; ++index) {
      const u8* from = map.address;
      bool inside = true;
      u32 left = index;
      for (int d = 1; d < rank; ++d) {
        const i64 at_d = first[d] + static_cast<i64>(left % map.box[d]);
        left /= map.box[d];
        inside = inside && at_d >= 0 && at_d < static_cast<i64>(map.size[d]);
        from += at_d * static_cast<i64>(map.stride[d - 1]);
      }
      for (u32 byte = 0; byte < row; ++byte) {
        const i64 element = first[0] + static_cast<i64>(byte / map.element_bytes);
        const bool here = inside && element >= 0 && element < static_cast<i64>(map.size[0]);
        u32 offset = target + index * row + byte;  // swizzles exchange address bits
        if (map.swizzle) offset ^= (offset >> 7 & ((1u << map.swizzle) - 1)) << 4;
        to[offset - target] = here ? from[first[0] * static_cast<i64>(map.element_bytes) + byte] : 0;
      }
    }
    arrived(block, target, bytes);
    complete(block, barrier, bytes);
  });
  maybe_pause();
}

}  // namespace emu
