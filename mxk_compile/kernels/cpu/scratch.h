// What a call sets up around its work: floating-point state and scratch memory. Included by moe.cpp alone.
#pragma once
#include <cstdint>
#include <cstdlib>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// IEEE arithmetic whatever the caller's flush-to-zero state.
class IeeeMode {
#if defined(__SSE2__)
 public:
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
 public:
  IeeeMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~IeeeMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// One block of memory per calling thread, kept between calls: decode calls would spend their time in mmap otherwise.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  bool reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(base_);
      size_ = 0;
      base_ = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
      if (base_) size_ = bytes;
    }
    used_ = 0;
    return base_ != nullptr;
  }
  template <class T>
  T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes_for<T>(count);
    return result;
  }
  template <class T>
  static size_t bytes_for(int64_t count) { return (size_t(count) * sizeof(T) + 127) / 64 * 64; }
  int64_t size() const { return int64_t(size_); }

 private:
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace
