// What plain loads reach in the orders in which the AVX-512 kernel reads weights, GB/s: median and best of 15, by one thread
// and by two, no arithmetic between. Tiles are 16 rows of 1440 bytes (gpt-oss: K = 2880), 64 bytes of each row by turns;
// "every other row" are the rows of gate or up alone, where the two lie by turns. Prefetches ask for a line of each row some
// 64-byte steps ahead, 4 rows at a time, into the first cache, or into the second that much earlier and the first 4 ahead.
//
//     c++ -O3 -march=native -fopenmp benchmarks/reads.cpp -o /tmp/reads && /tmp/reads          # pages of 2 MiB
//     /tmp/reads small                                                                          # pages of 4 KiB
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kRows = 16, kSteps = 23, kTiles = 1024;         // 23.6 MB a thread and round
constexpr size_t kRow = 1440, kPart = kTiles * kRows * kRow;  // bytes
constexpr size_t kMemory = size_t(1) << 31, kHuge = size_t(1) << 21;

void load(const char* at) {
  __m512i value;
  asm volatile("vmovdqu64 %1, %0" : "=v"(value) : "m"(*reinterpret_cast<const __m512i_u*>(at)));
}
void first_cache(const char* at) { asm volatile("prefetcht0 %0" ::"m"(*at)); }
void second_cache(const char* at) { asm volatile("prefetcht1 %0" ::"m"(*at)); }

void in_address_order(const char* part) {
  for (size_t i = 0; i < kPart; i += 64) load(part + i);
}

// Tiles of rows `apart` of each other's; First and Second: steps ahead of the prefetches into each cache, 0 for none.
template <int Apart, int First, int Second>
void by_tiles(const char* part) {
  const auto tile = [&](int t) { return part + (Apart == 1 ? t * kRows : t / 2 * 2 * kRows + t % 2) * kRow; };
  for (int t = 0; t < kTiles; ++t) {
    const auto row = [&](int step, int r) {
      const char* from = step < kSteps ? tile(t) : tile(t + 1 < kTiles ? t + 1 : t);
      return from + step % kSteps * 64 + r * Apart * kRow;
    };
    for (int step = 0; step < kSteps; ++step)
      for (int quad = 0; quad < kRows; quad += 4) {
        for (int r = quad; r < quad + 4; ++r) load(row(step, r));
        for (int r = quad; r < quad + 4 && First; ++r) first_cache(row(step + First, r));
        for (int r = quad; r < quad + 4 && Second; ++r) second_cache(row(step + Second, r));
      }
  }
}

void measure(const char* name, const char* memory, int threads, void (*read)(const char*)) {
  double rates[15];
  size_t at = 0;
  for (double& rate : rates) {
    if (at + threads * kPart > kMemory) at = 0;
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
    read(memory + at + omp_get_thread_num() * kPart);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    rate = threads * kPart / seconds.count() / 1e9;
    at += threads * kPart;
  }
  std::sort(rates, rates + 15);
  std::printf("%d  %-48s %6.1f [%.1f]\n", threads, name, rates[7], rates[14]);
}

}  // namespace

int main(int count, char** given) {
  const bool small = count > 1 && std::strcmp(given[1], "small") == 0;
  void* found = mmap(nullptr, kMemory + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return std::puts("reads: 2 GiB of memory could not be had"), 1;
  char* memory = reinterpret_cast<char*>((reinterpret_cast<size_t>(found) + kHuge - 1) / kHuge * kHuge);
  madvise(memory, kMemory, small ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  std::memset(memory, 1, kMemory);
  for (int round = 0; round < 2; ++round)
    for (int threads : {1, 2}) {
      measure("in address order", memory, threads, in_address_order);
      measure("adjacent rows", memory, threads, by_tiles<1, 0, 0>);
      measure("adjacent rows, first cache 6 ahead", memory, threads, by_tiles<1, 6, 0>);
      measure("adjacent rows, second cache 12, first 4 ahead", memory, threads, by_tiles<1, 4, 12>);
      measure("every other row, first cache 6 ahead", memory, threads, by_tiles<2, 6, 0>);
      measure("every other row, second cache 12, first 4 ahead", memory, threads, by_tiles<2, 4, 12>);
    }
  return 0;
}
