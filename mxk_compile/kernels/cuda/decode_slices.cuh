// The decode kernel's slices: blocks that share the columns of the same rows, of which the first finishes what the others bring.
#pragma once
#include "decode_ring.cuh"

// Of a warp of the epilogue: the n-th unit that each of these warps has had goes through place n of a ring.
template <class P>
struct Slices {
  u32 *ready, *taken;  // of each other slice; of all
  u8* parts;
  u32 done = 0;

  __device__ Slices(const Decode& p, int warp) {
    const int team = blockIdx.x / P::SLICES * EPILOGUE + warp;
    ready = p.counters + FLAGS_AT + team * P::SLICES, taken = ready + P::SLICES - 1;
    parts = p.parts + static_cast<i64>(team) * (P::SLICES - 1) * (PARTS_IN_FLIGHT * SUM);
  }
  __device__ static void wait(const u32* counter, u32 least) {
    if ((threadIdx.x & 31) == 0) {
      u32 now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
      } while (now < least);
    }
    __syncwarp();
  }
  __device__ static void add(u32* counter) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  }
  __device__ uint2* place(int slice, int n) const {
    const int at = (slice - 1) * PARTS_IN_FLIGHT + done % PARTS_IN_FLIGHT;
    return reinterpret_cast<uint2*>(parts + at * SUM + n * 256) + (threadIdx.x & 31);
  }
  __device__ void before_bringing() const {
    if (done >= PARTS_IN_FLIGHT) wait(taken, done - PARTS_IN_FLIGHT + 1);
  }
  __device__ void before_taking() const {
    for (int slice = 1; slice < P::SLICES; ++slice) wait(ready + slice - 1, done + 1);
  }
  __device__ void after(int slice) {
    add(slice == 0 ? taken : ready + slice - 1);
    ++done;
  }
  __device__ void leave() const {  // all have brought everything; those who wait for `taken` have ended as well
    __syncwarp();
    if ((threadIdx.x & 31) < P::SLICES) ready[threadIdx.x & 31] = 0;
  }
};
