// Launches: blocks of fibres, the choice of who runs next, and what is said when nobody can.
#include "fibers.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>

namespace emu {

Thread* current;
Dim grid_size, block_size;

namespace {

constexpr u32 HELD_FOR = 4000;  // choices, on average, that a warp is behind
constexpr u64 STACK_BYTES = 128 * 1024, CANARY = 0x5A5AA5A5DEADBEEF;

struct Launch {
  u32 blocks, threads, dynamic_bytes, resident, overlap, registers;
  u64 seed;
  void (*run)(const void*);
  const u8* argument;
};
struct Transfer {
  Block* block;
  const Fiber* ordered;  // null: any
  std::function<void()> end;
};
Launch launch;
std::string error;
jmp_buf main_context;
std::vector<std::unique_ptr<Fiber>> pool;  // with stacks, for all launches
std::vector<std::unique_ptr<Block>> blocks;
std::deque<Fiber*> ready;
const Warp* held;
Fibers free_fibers, pollers;
std::deque<Transfer> transfers;
u32 started_blocks, live_fibers;
u64 random_state, progress, progress_of_poll;

Fiber* new_fiber() {
  auto fiber = std::make_unique<Fiber>();
  fiber->stack = static_cast<u8*>(
      mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (fiber->stack == MAP_FAILED) abort();
  pool.push_back(std::move(fiber));
  return pool.back().get();
}

void end_transfer() {
  auto chosen = transfers.begin() + (launch.seed ? random_below(transfers.size()) : 0);
  if (chosen->ordered)
    for (auto earlier = transfers.begin(); earlier != chosen; ++earlier)
      if (earlier->ordered == chosen->ordered) {
        chosen = earlier;
        break;
      }
  const auto end = std::move(chosen->end);
  --chosen->block->transfers;
  transfers.erase(chosen);
  ++progress;
  end();
}

// An address as Python finds its lines (build.py).
std::string place(const void* address) {
  Dl_info info{};
  if (!dladdr(address, &info) || !info.dli_fname) return "?";
  char text[600];
  snprintf(text, sizeof text, "<%s+0x%llx>", info.dli_fname,
           static_cast<u64>(static_cast<const u8*>(address) - static_cast<const u8*>(info.dli_fbase) - 1));
  return text;
}

// What fibres wait for and where, with the blocks, warps and lanes that do.
std::string who_waits() {
  std::map<std::string, std::map<u32, std::map<u32, u32>>> all;  // text -> block -> warp -> lanes
  for (const auto& fiber : pool) {
    if (fiber->done || fiber->owner == nullptr) continue;
    char what[160], text[700];
    snprintf(what, sizeof what, "%s %llu", fiber->why, fiber->why_value);
    const auto found = fiber->owner->mbarriers.find(static_cast<u32>(fiber->why_value >> 1));
    if (fiber->why == MBARRIER && found != fiber->owner->mbarriers.end())
      snprintf(what, sizeof what, "the mbarrier at %u, parity %llu (in phase %u, %u of %u arrivals and %lld bytes missing)",
               found->first, fiber->why_value & 1, found->second.phase, found->second.pending, found->second.count,
               found->second.bytes);
    snprintf(text, sizeof text, "\n  for %s at %s:", what, place(fiber->caller).c_str());
    all[text][fiber->owner->index][fiber->index / 32] |= 1u << fiber->lane;
  }
  std::string said;
  for (const auto& [text, blocks_that] : all) {
    said += text;
    std::map<std::string, std::string> of_warps;  // which warps -> which blocks
    for (const auto& [block, warps] : blocks_that) {
      std::string which;
      for (const auto& [warp, lanes] : warps) {
        char part[64];
        snprintf(part, sizeof part, lanes == ~0u ? " warp %u" : " warp %u lanes %08x", warp, lanes);
        which += part;
      }
      of_warps[which] += " " + std::to_string(block);
    }
    for (const auto& [warps, which] : of_warps) said += " block" + which + warps + ";";
    said.pop_back();
  }
  return said;
}

[[noreturn]] void leave(int status) { _longjmp(main_context, status); }

// Any thread may be next, but now and then one warp falls behind the others.
void shuffle() {
  const auto any = [] { return random_below(static_cast<u32>(ready.size())); };
  if (random_below(HELD_FOR) == 0) held = ready[any()]->warp;
  for (int tries = 0; tries < 8; ++tries) {
    std::swap(ready.front(), ready[any()]);
    if (ready.front()->warp != held) return;
  }
}

Fiber* next() {
  for (;;) {
    if (launch.seed && !transfers.empty() && random_below(4) == 0) end_transfer();
    if (!ready.empty()) {
      if (launch.seed) shuffle();
      Fiber* chosen = ready.front();
      ready.pop_front();
      return chosen;
    }
    if (!transfers.empty()) {
      end_transfer();
    } else if (!pollers.empty() && progress_of_poll != progress) {
      progress_of_poll = progress;
      ready.insert(ready.end(), pollers.begin(), pollers.end());
      pollers.clear();
    } else {
      return nullptr;
    }
  }
}

void start_block(u32 index);

__attribute__((noinline)) void jump(Fiber* to) {
  current = to;
  if (to->fresh) {
    to->fresh = false;
    setcontext(&to->start);
  }
  _longjmp(to->context, 1);
}

__attribute__((noinline)) void give_way() {
  Fiber* from = &self();
  if (*reinterpret_cast<u64*>(from->stack) != CANARY) fail("a thread's stack of %llu bytes overflowed", STACK_BYTES);
  Fiber* to = next();
  if (to == from) return;
  if (to == nullptr) {
    error = "no thread can run; they wait" + who_waits();
    leave(2);
  }
  if (_setjmp(from->context) == 0) jump(to);
}

void finish(Fiber& fiber) {
  Block& block = *fiber.owner;
  fiber.done = true;
  ++progress;
  --live_fibers;
  if (--block.live == 0) {
    if (launch.overlap && !block.grid_waited)
      fail("block %u has ended without griddepcontrol.wait, which its launch relies on", block.index);
    if (block.transfers != 0) fail("block %u has ended before %u copies to its shared memory", block.index, block.transfers);
    if (block.tensor.columns != 0) fail("block %u has ended and has not freed its tensor memory", block.index);
    munmap(block.memory, SHARED_BYTES);
    block.memory = nullptr;
    if (started_blocks < launch.blocks) start_block(started_blocks++);  // not on this stack
  } else if (block.barriers[0].arrived == block.live && block.barriers[0].arrived) {  // those who have left count no more
    block.barriers[0].arrived = 0;
    wake(block.barriers[0].waiting);
  }
  free_fibers.push_back(&fiber);
  if (Fiber* to = next()) jump(to);
  if (live_fibers == 0) leave(1);
  error = "no thread can run; they wait" + who_waits();
  leave(2);
}

void body() {
  launch.run(launch.argument);
  finish(self());
}

void start_block(u32 index) {
  blocks.push_back(std::make_unique<Block>());
  Block& block = *blocks.back();
  block.index = index, block.live = launch.threads;
  block.dynamic_bytes = block.used = launch.dynamic_bytes;
  block.memory = static_cast<u8*>(mmap(nullptr, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (block.memory == MAP_FAILED) abort();
  memset(block.memory, POISON, SHARED_BYTES);
  block.writers.assign(SHARED_BYTES, 0);
  block.warps.resize((launch.threads + 31) / 32);
  block.groups.resize((launch.threads + 127) / 128);
  for (u32 t = 0; t < launch.threads; ++t) {
    if (free_fibers.empty()) free_fibers.push_back(new_fiber());
    Fiber* slot = free_fibers.back();
    free_fibers.pop_back();
    u8* stack = slot->stack;
    *slot = Fiber{};
    slot->stack = stack;
    *reinterpret_cast<u64*>(stack) = CANARY;
    slot->thread = {t, 0, 0}, slot->block = {index, 0, 0}, slot->lane = t % 32;
    slot->owner = &block, slot->warp = &block.warps[t / 32], slot->group = &block.groups[t / 128], slot->index = t;
    slot->registers = launch.registers;
    slot->why = "its turn";
    slot->warp->present |= 1u << slot->lane;
    getcontext(&slot->start);
    slot->start.uc_stack.ss_sp = stack, slot->start.uc_stack.ss_size = STACK_BYTES;
    slot->start.uc_link = nullptr;
    makecontext(&slot->start, body, 0);
    ready.push_back(slot);
    ++live_fibers;
  }
}

void on_signal(int, siginfo_t* info, void*) {
  Fiber& fiber = self();
  char text[200];
  snprintf(text, sizeof text, "block %u, thread %u: an access to %p, which is no memory", fiber.owner->index, fiber.index,
           info->si_addr);
  error = text;
  leave(2);
}

}  // namespace

void fail(const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Fiber& fiber = self();
  error = "block " + std::to_string(fiber.owner->index) + ", thread " + std::to_string(fiber.index) + ": " + text + " at " +
          place(fiber.caller);
  leave(2);
}

u32 random_below(u32 limit) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<u32>((random_state >> 33) % limit);
}

void wait(const char* why, u64 value) {
  Fiber& fiber = self();
  fiber.why = why, fiber.why_value = value;
  ++progress;
  give_way();
}

void wake(Fibers& waiting) {
  ++progress;
  ready.insert(ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

void pause() {
  ready.push_back(&self());
  self().why = "its turn";
  give_way();
}

void maybe_pause() {
  if (launch.seed && random_below(4) == 0) pause();
}

u64 poll(const void* address, u64 value) {
  Fiber& fiber = self();
  EMU_CALLER;
  if (fiber.polled != address || fiber.polled_value != value) {
    fiber.polled = address, fiber.polled_value = value;
    ++progress;
    maybe_pause();
    return value;
  }
  fiber.why = "a value in memory to change from", fiber.why_value = value;
  pollers.push_back(&fiber);
  give_way();
  return value;
}

void start_transfer(bool ordered, std::function<void()> end) {
  Fiber& fiber = self();
  ++progress;
  ++fiber.owner->transfers;
  transfers.push_back({fiber.owner, ordered ? &fiber : nullptr, std::move(end)});
}

void grid_waited() { self().owner->grid_waited = true; }

extern "C" {

// Runs a launch to its end; null, or what went wrong. `resident` blocks run at a time, `seed` 0 is the quick order.
const char* emu_launch(const Kernel* kernel, const void* argument, u32 blocks_, u32 threads, u32 dynamic_bytes, u32 resident,
                       u32 registers, u32 overlap, u64 seed) {
  alignas(128) static u8 copy[8192];
  memcpy(copy, argument, kernel->argument_bytes);
  launch = {blocks_, threads, dynamic_bytes, resident, overlap, registers, seed, kernel->run, copy};
  grid_size = {blocks_, 1, 1}, block_size = {threads, 1, 1};
  random_state = seed * 0x9E3779B97F4A7C15ull + 1;
  ready.clear(), transfers.clear(), pollers.clear(), blocks.clear(), free_fibers.clear();
  for (auto& fiber : pool) fiber->owner = nullptr, free_fibers.push_back(fiber.get());
  held = nullptr, live_fibers = 0, progress = 1, progress_of_poll = 0, error.clear();

  static u8 signal_stack[64 * 1024];
  stack_t alternative{}, before_stack;
  alternative.ss_sp = signal_stack, alternative.ss_size = sizeof signal_stack;
  sigaltstack(&alternative, &before_stack);
  struct sigaction action {}, before_segv, before_bus;
  action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before_segv), sigaction(SIGBUS, &action, &before_bus);

  started_blocks = 0;
  if (_setjmp(main_context) == 0) {
    while (started_blocks < blocks_ && started_blocks < resident) start_block(started_blocks++);
    jump(next());
  }
  sigaction(SIGSEGV, &before_segv, nullptr), sigaction(SIGBUS, &before_bus, nullptr);
  sigaltstack(&before_stack, nullptr);
  for (auto& block : blocks)
    if (block->memory) munmap(block->memory, SHARED_BYTES);
  blocks.clear();
  current = nullptr;
  return error.empty() ? nullptr : error.c_str();
}
}

}  // namespace emu
