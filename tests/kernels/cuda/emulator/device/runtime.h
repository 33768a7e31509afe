// What translated kernels call: threads, shared memory, meeting points, asynchronous copies and products.
//
// Each function that may wait notes its caller, so that a deadlock is reported with the lines that wait. No standard header is
// included: kernels have names of their own for everything.
#pragma once

namespace emu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct Dim {
  u32 x, y, z;
};
struct Thread {
  Dim thread, block;
  u32 lane;
};
extern Thread* current;
extern Dim grid_size, block_size;

struct Kernel {
  void (*run)(const void* argument);
  u32 argument_bytes;
  u32 threads, blocks;  // of __launch_bounds__, 0 where it says nothing
};
template <auto FUNCTION>
struct Entry;
template <class T, void (*FUNCTION)(T)>
struct Entry<FUNCTION> {
  static void run(const void* argument) { FUNCTION(*static_cast<const T*>(argument)); }
  static constexpr Kernel kernel(u32 threads = 0, u32 blocks = 1) { return {run, sizeof(T), threads, blocks}; }
};

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- shared memory: addresses are offsets, as on the device
u8* shared(u32 address, u32 bytes, u32 alignment);  // fails outside of the block's memory
void wrote_shared(u32 address, u32 bytes);          // by ordinary stores, which WGMMA sees after a fence.proxy.async
void fence_proxy_async();
u32 shared_address_of(const void* pointer);
void* static_shared(const void* site, u64 bytes, u64 alignment);
void* dynamic_shared();

// ---- meeting points
void syncthreads();
void bar_sync(u32 barrier, u32 threads);
void bar_arrive(u32 barrier, u32 threads);
const u64* exchange(const char* what, u32 mask, u64 value);  // values of all lanes in the mask, of each lane
void set_registers(u32 registers);
void grid_waited();
u64 poll(const void* address, u64 value);  // what a loop reads until it changes
void pause();                              // lets others run

// ---- mbarrier
void mbarrier_init(u32 barrier, u32 count);
void mbarrier_arrive(u32 barrier, u32 count);
void mbarrier_expect(u32 barrier, u32 bytes);
bool mbarrier_wait(u32 barrier, u32 parity);
bool mbarrier_test(u32 barrier, u32 parity);

// ---- copies: poison first, and what they bring at some later moment
void copy_async(u32 target, const void* source, u32 bytes, u32 valid);
void copies_arrive(u32 barrier, bool counted);
void copies_commit();
void copies_wait(u32 pending);
void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier);
void tensor_load(u32 target, const void* map, const i32* at, int rank, u32 barrier);

// ---- WGMMA
enum Kind { BF16, F16, E4M3, S8 };
struct Product {
  Kind kind;
  int n, accumulators;
  void* const* d;  // of this thread
  const u32* a;    // of this thread, or null: a_descriptor
  u64 a_descriptor, b_descriptor;
  bool add;
  int sign_a, sign_b;
};
void wgmma(const Product& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 pending);

// ---- tensor memory: 16 lanes; `wide`: .16x256b, else .16x128b
void tensor_allocate(u32 result, u32 columns);
void tensor_relinquish();
void tensor_free(u32 address, u32 columns);
void tensor_store(u32 address, bool wide, const u32* values, int count);
void tensor_load(u32 address, bool wide, void* const* targets, int count);
void tensor_wait_stored();
void tensor_wait_loaded();
void tensor_fence_before();
void tensor_fence_after();
void tensor_multiply(u32 d, u32 a, u64 b, u32 instruction, bool add);
void tensor_commit(u32 barrier);

// ---- numbers
float from_f16(u16 bits);
float from_e4m3(u8 bits);
u16 to_bf16(double value);  // nearest, ties to even, from any value that a double holds
u16 to_f16(double value);
u8 to_e4m3(float value);  // saturating

}  // namespace emu
