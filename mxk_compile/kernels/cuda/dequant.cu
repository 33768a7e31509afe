// mxk::mxfp4_dequant: packed MXFP4 to bf16, in order: out[8w + i] = E2M1(nibble i of word w) * 2^(scale[w / 4] - 127).
//
// Rows are dense and a multiple of 32 values, so words, scales and values are three flat arrays. Four fifths of the
// bytes are the stores, so those are made whole: a thread turns one word into 16 bytes, and neighbours write neighbours.
// Eight words a thread keep loads in flight. Limits: fewer than 2^63 values; 16-byte aligned output, 4-byte aligned words.
#include "mxfp4.cuh"

constexpr int THREADS = 256;
constexpr int WORDS = 8;  // of a thread

struct Dequant {
  const u32* words;
  const u8* scales;
  uint4* out;
  i64 count;  // of words
};

extern "C" __global__ void __launch_bounds__(THREADS) mxfp4_dequant(const __grid_constant__ Dequant p) {
  const i64 first = static_cast<i64>(blockIdx.x) * (THREADS * WORDS) + threadIdx.x;
  u32 word[WORDS], byte[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const i64 at = first + i * THREADS;
    const bool valid = at < p.count;
    word[i] = valid ? __ldcs(p.words + at) : 0;
    byte[i] = valid ? __ldg(p.scales + at / 4) : 0;
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const i64 at = first + i * THREADS;
    if (at >= p.count) return;
    const u32 scale = scale_pair(byte[i]);
    // Pairs (0, 4), (1, 5), (2, 6), (3, 7) into order.
    const u32 a = weights<0>(word[i], scale), b = weights<1>(word[i], scale);
    const u32 c = weights<2>(word[i], scale), d = weights<3>(word[i], scale);
    __stcs(p.out + at, make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410), __byte_perm(a, b, 0x7632),
                                  __byte_perm(c, d, 0x7632)));
  }
}
