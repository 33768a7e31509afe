// prefill.cu's products by tcgen05 (sm_100a, sm_103a): A and the sums in tensor memory, B, activations, in shared memory.
//
// A warpgroup's 128 weight rows are one instruction's M: lane 32 w + 16 u + i of tensor memory is row i of warp w's unit u.
// Its transfers of 16 lanes have the fragments of mma.sync (mma.cuh): .16x128b a fragment of A, .16x256b one of D. So
// fragments are made as for WGMMA, a panel of 64 columns at a time, stored, and multiplied by one thread's instructions
// while the next panel's are made in the other of two buffers. The sums come back to registers at a tile's end.
//
// Never run: compiled by NVRTC, and emulated on a CPU from what the PTX ISA says ("TensorCore 5th Generation Family").
#pragma once
#include "prefill.cuh"

constexpr int SUM_COLUMNS = (TOKENS + 63) / 64 * 64, A_COLUMNS = PANEL / 2;   // of tensor memory; of a buffer of A
constexpr int GROUP_COLUMNS = SUM_COLUMNS + 2 * A_COLUMNS <= 128 ? 128 : 256;  // of a warpgroup
static_assert(SUM_COLUMNS + 2 * A_COLUMNS <= GROUP_COLUMNS && 2 * GROUP_COLUMNS * BLOCKS <= 512, "tensor memory");
// fp32 sums of bf16 products, both operands K-major, N = TOKENS, M = 128 (PTX ISA, "Instruction descriptor").
constexpr u32 INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | TOKENS / 8 << 17 | 128 / 16 << 24;

__device__ __forceinline__ void tensor_allocate(u32 result, u32 columns) {  // by a warp
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "r"(columns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
__device__ __forceinline__ void tensor_free(u32 memory, u32 columns) {  // by the same warp
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(memory), "r"(columns) : "memory");
}
__device__ __forceinline__ void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void tensor_wait_stored() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tensor_wait_loaded() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// A fragment of 16 rows and 16 columns of bf16 into 16 lanes and 8 columns.
__device__ __forceinline__ void tensor_store(u32 to, const u32 (&a)[4]) {
  asm volatile("tcgen05.st.sync.aligned.16x128b.x2.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]),
               "r"(a[3])
               : "memory");
}
// Sums of 16 rows and 16 columns. They are there after `tensor_wait_loaded`.
__device__ __forceinline__ void tensor_load(float* d, u32 from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
               : "r"(from)
               : "memory");
}
// d = a . b, or d += a . b, 16 columns; by one thread.
__device__ __forceinline__ void tensor_multiply(u32 d, u32 a, u64 b, bool add) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %4, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, add;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(INSTRUCTION), "r"(static_cast<u32>(add))
      : "memory");
}
// An arrival at a barrier when all products that this thread has begun are done.
__device__ __forceinline__ void tensor_commit(u32 barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}

struct Products {
  static constexpr int ARRIVALS = 1;
  struct Shared {
    u64 done[2][2];  // barriers, of each warpgroup's buffers of A
    u32 memory;
  };
  static __device__ __forceinline__ bool leads(int lane, int warp) { return lane == 0 && warp == 0; }
  bool more;                     // whether there are sums to add to
  u32 group = (threadIdx.x - PRODUCERS) / 128, turn = 0;  // panels so far
  u32 sums, done;

  static constexpr int OPERAND_BYTES = 16;
  static __device__ __forceinline__ u64 operand(u32 address) {  // as WGMMA's, and the version, 1, in bits 46 to 48
    return (static_cast<u64>(1) << 62) | (static_cast<u64>(1) << 46) | (static_cast<u64>(1024 >> 4) << 32) |
           (static_cast<u64>(1) << 16) | ((address & 0x3FFFF) >> 4);
  }
  // Before the block's first barrier.
  static __device__ __forceinline__ void prepare(Shared& shared) {
    if (threadIdx.x == 0)
      for (int i = 0; i < 4; ++i) barrier_init(shared_address(&shared.done[i / 2][i % 2]), 1);
    if (threadIdx.x / 32 == PRODUCERS / 32) tensor_allocate(shared_address(&shared.memory), 2 * GROUP_COLUMNS);
    tensor_fence_before();
  }
  __device__ __forceinline__ explicit Products(Shared& shared) {
    tensor_fence_after();
    sums = shared.memory + group * GROUP_COLUMNS + (threadIdx.x / 32 % 4 << 21);  // 32 lanes a warp, in the upper half
    done = shared_address(&shared.done[group][0]);
  }
  __device__ __forceinline__ u32 fragments() const { return sums + GROUP_COLUMNS - (2 - turn % 2) * A_COLUMNS; }
  __device__ __forceinline__ void begin(Sums&) { more = false; }
  __device__ __forceinline__ void wait(bool, u32) { barrier_wait(done + turn % 2 * 8, turn / 2 % 2 ^ 1); }
  __device__ __forceinline__ void sync() const {
    tensor_fence_before();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
  }
  __device__ __forceinline__ void run(Sums&, const Fragment& steps, u64 tokens, int, bool leader) {
    tensor_fence_after();
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) tensor_store(fragments() + 8 * i + (unit << 20), steps[i][unit]);
    }
    tensor_wait_stored();
    sync();
    // Of these the compiler is to see that a warp has one value: else it loops over lanes for each instruction.
    const u32 d = __shfl_sync(~0u, sums, 0), a = __shfl_sync(~0u, fragments(), 0);
    const u64 b = operand(0) | __shfl_sync(~0u, static_cast<u32>(tokens), 0);
    if (leader) {
      tensor_fence_after();
#pragma unroll
      for (int i = 0; i < GROUP_STEPS; ++i) tensor_multiply(d, a + 8 * i, b + 2 * i, more || i > 0);
      tensor_commit(done + turn % 2 * 8);
    }
    more = true;
    ++turn;
  }
  __device__ __forceinline__ void drain(u32, bool) {}
  __device__ __forceinline__ void leave(u32 barrier, bool leader) {  // a stage, whose packed weights all warps have read
    if (leader) tensor_commit(barrier);
  }
  __device__ __forceinline__ void finish(Sums& sum, u32, bool) {
    barrier_wait(done + (turn - 1) % 2 * 8, (turn - 1) / 2 % 2);
    tensor_fence_after();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int j = 0; j < TOKENS / 16; ++j) tensor_load(sum[unit] + 8 * j, sums + 16 * j + (unit << 20));
    }
    tensor_wait_loaded();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(sum[unit][i]));  // nothing of them is used before
    }
  }
  __device__ __forceinline__ void end() {
    if (threadIdx.x % 128 == 0) {  // the last arrivals at the ring's barriers have been made too
      tensor_commit(done + turn % 2 * 8);
      barrier_wait(done + turn % 2 * 8, turn / 2 % 2);
    }
    tensor_fence_before();
    asm volatile("bar.sync 3, 256;" ::: "memory");  // both warpgroups
    if (threadIdx.x / 32 == PRODUCERS / 32) {
      tensor_fence_after();
      tensor_free(sums, 2 * GROUP_COLUMNS);  // lanes 0 to 31 of the first warpgroup: as it was allocated
    }
  }
};
