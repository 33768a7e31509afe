// Rows into prefill.cu's panels of 64 permuted columns, tiles of an expert's rows, and a sum over a block's threads.
#pragma once
#include "call.cuh"

constexpr int SORT_THREADS = 1024;
constexpr int MOST_SIZES = 4;
constexpr int ROW_STEP = 16;   // an expert's rows begin at multiples of it: WGMMA's step of N, and 8 for the swizzle
constexpr int GATHER_WARPS = 8;

// Sum of the values of all threads with a lower index.
__device__ __forceinline__ int exclusive_sum(int value, int* of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // of_warps may still be read
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < warp; ++i) before += of_warps[i];
  return before + sum - value;
}

// Divides an expert's `rows`, from `first` on, evenly over as few tiles as the largest size allows, each of the smallest
// size that holds it; a kernel of prefill.cu runs each size's list. (Whole tiles and a small one for the rest were slower.)
__device__ __forceinline__ void make_tiles(int4* tiles, int* lists, const i32 (&sizes)[MOST_SIZES], int most_tiles,
                                           int expert, int first, int rows) {
  int most = sizes[0];
#pragma unroll
  for (int i = 1; i < MOST_SIZES; ++i) most = sizes[i] ? sizes[i] : most;
  const int count = (rows + most - 1) / most;
  const int step = ((rows + count - 1) / count + ROW_STEP - 1) / ROW_STEP * ROW_STEP;
  int size = 0;
  while (sizes[size] < step) ++size;
  const int at = atomicAdd(&lists[size], count);
  for (int i = 0; i < count; ++i) {
    const int here = min(step, rows - i * step);
    tiles[size * most_tiles + at + i] =
        make_int4(expert, first + i * step, (here + ROW_STEP - 1) / ROW_STEP * ROW_STEP, here);
  }
}

// A warp copies SEGMENT columns of a row of x: all loads first, so that few rows are not a chain of latencies. Eight lanes
// hold a panel of 64 columns, 16 bytes each; the permutation is an exchange of 4-byte pairs (column j, column j + 4), through
// shared memory.
constexpr int SEGMENT = 1024;

struct Exchange {
  uint4 words[4 * 10];  // 8 lanes' words and 8 words of padding a panel: no bank twice
};

__device__ __forceinline__ void copy_row(const u16* x, bool aligned, int columns, u8* rows, i64 total_rows, int row,
                                         int segment, Exchange& exchange) {
  const int lane = threadIdx.x % 32;
  const int chunks = (columns + 63) / 64 * 8;
  u32* words = reinterpret_cast<u32*>(exchange.words + lane / 8 * 10);
  const int c = lane % 8, unit = c / 4, pair = c % 4;
  uint4 values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = SEGMENT * segment + 8 * (32 * i + lane);
    values[i] = make_uint4(0, 0, 0, 0);
    if (column >= columns) continue;
    if (aligned) {
      values[i] = *reinterpret_cast<const uint4*>(x + column);
    } else {
      u32 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = x[column + j];
      values[i] = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int chunk = SEGMENT / 8 * segment + 32 * i + lane;
    uint4 v = values[i];
    __syncwarp();
    *reinterpret_cast<uint4*>(words + 4 * c) =
        make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                   __byte_perm(v.y, v.w, 0x7632));  // pairs 0..3 of this lane's eight columns
    __syncwarp();
    // Chunk c of the panel takes pair c % 4 of columns 16q + 8 (c / 4) ..., q = 0..3.
    v = make_uint4(words[4 * unit + pair], words[4 * (2 + unit) + pair], words[4 * (4 + unit) + pair],
                   words[4 * (6 + unit) + pair]);
    if (chunk < chunks) {
      u8* target = rows + (static_cast<i64>(chunk / 8) * total_rows + row) * 128;
      *reinterpret_cast<uint4*>(target + (c ^ (row & 7)) * 16) = v;
    }
  }
}
