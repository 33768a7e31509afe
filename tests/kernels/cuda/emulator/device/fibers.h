// Threads of a launch as fibres of one CPU thread: who runs next, and who waits for what.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"

namespace emu {

struct Fiber;
using Fibers = std::vector<Fiber*>;

struct Meeting {  // of the lanes of a mask
  u32 arrived = 0, generation = 0;
  const char* what = nullptr;
  u64 values[2][32];
  Fibers waiting;
};
struct Warp {
  u32 present = 0;
  std::map<u32, Meeting> meetings;
};
struct Barrier {  // of bar.sync
  u32 arrived = 0, expected = 0;
  Fibers waiting;
};
struct Mbarrier {
  u32 count = 0, pending = 0, phase = 0;
  i64 bytes = 0;
  Fibers waiting;
};
struct Multiplication {  // a WGMMA of a warpgroup, between issue and wait
  Product product;
  int issued = 0, collected = 0;
  bool done = false;
  i64 chained = -1;               // index of the one whose result it adds to
  std::vector<u32> a;             // [128][4]
  std::vector<u32> values;        // [128][accumulators], before and after
  std::vector<void*> targets;     // [128][accumulators]
};
struct Warpgroup {
  std::deque<Multiplication> running;
  i64 first = 0;  // index of running[0]
  Fibers waiting;
};
struct Copy {
  u32 target, bytes, valid;
  const u8* source;
};
struct Cell {  // of tensor memory
  u32 value, writer = 0;         // 1 + thread, until its fence
  u16 read = 0, written = 0;     // by how many products under way
};
struct Tensor {
  u32 first = 0, columns = 0;  // allocated
  int under_way = 0;           // products and commits
  bool relinquished = false;
  std::vector<Cell> cells;
};
struct Block {
  u32 index, live;
  u8* memory;  // SHARED_BYTES
  u32 dynamic_bytes, used;
  std::map<const void*, u32> statics;
  std::vector<Warp> warps;
  std::vector<Warpgroup> groups;
  Barrier barriers[16];
  std::map<u32, Mbarrier> mbarriers;
  std::vector<u16> writers;  // of each byte, 1 + thread, until its fence
  std::vector<std::pair<u32, u32>> copied;  // shared memory by cp.async since the last proxy fence of any thread
  u32 free_registers = 0;
  Fibers want_registers;
  bool grid_waited = false;
  u32 transfers = 0;  // under way
  Tensor tensor;
};

struct Fiber : Thread {
  jmp_buf context;
  ucontext_t start;
  u8* stack;
  bool fresh = true, done = false;
  Block* owner;
  Warp* warp;
  Warpgroup* group;
  u32 index;  // in its block
  // what it waits for, to be reported
  const char* why;
  u64 why_value;
  const void* caller;
  // of the instructions
  u32 registers;
  const void* polled;
  u64 polled_value;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<std::pair<u32, u32>> written;  // shared memory since the last proxy fence
  i64 products = 0, collected = 0;           // WGMMAs that it issued, and waited for
  std::deque<i64> committed;                 // `products` at each commit
  bool fenced = false;
  std::vector<std::pair<u32, u32>> stores;   // to tensor memory, until wait::st
  std::vector<u32> stored;                   // until fence::before_thread_sync
  std::vector<std::pair<u32, void*>> loads;  // until wait::ld
  bool tensor_ordered = false;               // fence::after_thread_sync since the last barrier
};

constexpr u32 SHARED_BASE = 1024, SHARED_BYTES = 232448;  // shared addresses begin there, as on the device
constexpr u8 POISON = 0xFF;                              // NaN as bf16, fp32, E4M3 and E8M0

inline Fiber& self() { return *static_cast<Fiber*>(current); }
#define EMU_CALLER (emu::self().caller = __builtin_return_address(0))

inline constexpr char MBARRIER[] = "mbarrier";  // with 2 * address + parity
void wait(const char* why, u64 value = 0);    // until somebody wakes this fibre
void wake(Fibers& waiting);                 // all of them
void maybe_pause();                         // in random order, now and then
u32 random_below(u32 limit);

// `end` runs at some later moment; those of one thread that are `ordered` run in order.
void start_transfer(bool ordered, std::function<void()> end);

void poison(u8* memory, u64 bytes);
u8* locate(u32 address, u32 bytes, u32 alignment);  // `shared`, which notes no caller
Mbarrier& mbarrier_at(Block& block, u32 address);
void mbarrier_progress(Mbarrier& barrier);
void read_row(Block& block, u64 descriptor, int row, u8* to);  // 32 bytes of a product's operand
void run_copies(Block& block, u32 thread, const std::vector<Copy>& copies);

}  // namespace emu
