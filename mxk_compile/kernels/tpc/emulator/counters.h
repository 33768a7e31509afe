// What is counted and the state of a run: one static object per loaded library.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

// An intrinsic is one call, what it is made of is inlined: inlining everything takes twice the build time and, as one huge
// stack frame, is no faster.
#define TPC_OP __attribute__((noinline)) inline
#define TPC_INLINE __attribute__((always_inline)) inline

// Issue slots: User Guide, TPCSchedule.td. The third column is slot cycles: LOOKUP takes two (TPCHazardRecognizer.cpp).
#define TPC_OPERATIONS(X)                                                                                   \
    X(ld_tnsr, load, 1) X(ld_tnsr_partial, load, 1) X(ld_g, load, 1) X(ld_l, load, 1) X(gen_addr, load, 1)  \
    X(mov_lane, load, 1) X(lookup_1c, load, 2) X(lookup_2c, load, 2) X(get_index, load, 1)                  \
    X(scalar, spu, 1) X(index_add, spu, 1)                                                                  \
    X(add, vpu, 1) X(sub, vpu, 1) X(mul, vpu, 1) X(max, vpu, 1) X(min, vpu, 1)               \
    X(logic, vpu, 1) X(shift, vpu, 1) X(compare, vpu, 1) X(select, vpu, 1)                   \
    X(mac, vpu, 1) X(mac_acc32, vpu, 1) X(mul_acc32, vpu, 1) X(convert, vpu, 1)        \
    X(lane_id, vpu, 1) X(shuffle, vpu, 1) X(mov_dual_group, vpu, 1) X(mov_group, vpu, 1)                    \
    X(st_tnsr, store, 1) X(st_tnsr_partial, store, 1) X(st_l, store, 1)

namespace tpc_emulator {

enum class Slot { load, spu, vpu, store };
enum class Region { prologue, chunk, epilogue };
constexpr int num_slots = 4, num_regions = 3, max_tensors = 16, max_scalars = 32;

enum Operation {
#define X(name, slot, cycles) op_##name,
    TPC_OPERATIONS(X)
#undef X
    num_operations
};
constexpr Slot slot_of[] = {
#define X(name, slot, cycles) Slot::slot,
    TPC_OPERATIONS(X)
#undef X
};
constexpr int cycles_of[] = {
#define X(name, slot, cycles) cycles,
    TPC_OPERATIONS(X)
#undef X
};

// Read by ../emulate.py in this order; every field is an int64.
struct Totals {
    int64_t chunk_rows, bytes_loaded, bytes_stored, padded_lanes, culled_lanes, repeated_partial_stores;
    int64_t mac_pairs, mac_distance; // MACs on the result of another, least VPU ops from one to the next; chunk region
    int64_t vlm_bytes, slm_bytes, lut_entries;
    int64_t ops[num_regions][num_operations];
};

struct Tensor { // dim 0 is the fastest; sizes and strides in elements
    uint8_t *base;
    uint8_t *owner; // outputs: invocation that wrote each element, 255 = none; inputs: null
    int32_t element_bytes, rank;
    int64_t size[5], stride[5];
    bool output() const { return owner != nullptr; }
};

struct State {
    Tensor tensors[max_tensors];
    int num_tensors, invocation, offset[5], size[5];
    const char *kernel;
    Region region;
    int64_t vpu_clock; // VPU ops of the chunk region so far
    int last_partial[3]; // tensor, size, offset of the last tensor store, if partial
    Totals totals;
};
static State state;

struct Fault {
    std::string text;
};

[[noreturn]] __attribute__((cold, noinline, format(printf, 1, 2))) static void fail(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Fault{std::string(state.kernel) + ", invocation " + std::to_string(state.invocation) + ": " + text};
}

TPC_INLINE void count(Operation operation, int64_t n = 1) {
    state.totals.ops[int(state.region)][operation] += n;
    if (slot_of[operation] == Slot::vpu && state.region == Region::chunk) state.vpu_clock += n;
}

TPC_INLINE void no_switches(int switches, int allowed, const char *name) {
    if (__builtin_expect(switches & ~allowed, 0)) fail("%s: switches 0x%x are not modelled", name, unsigned(switches));
}

} // namespace tpc_emulator
