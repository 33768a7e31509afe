// Tensor, global and local memory.
#pragma once
#include "types.h"

enum {
    SW_PACK = 1 << 2, SW_PCK_32_TO_16 = 0 << 4, SW_PCK_16_TO_8 = 1 << 4, SW_PCK_32_TO_8 = 2 << 4,
    SW_UNPACK = 1 << 4, SW_UNPCK_16_TO_32 = 0 << 1, SW_UNPCK_8_TO_16 = 1 << 1, SW_UNPCK_8_TO_32 = 2 << 1,
    SW_L0CS = 1 << 5,
};

namespace tpc_emulator {

[[noreturn]] __attribute__((cold, noinline)) static void fail_at(const char *what, int id, const int5 &at) {
    const Tensor &t = state.tensors[id];
    fail("%s tensor %d at (%d, %d, %d, %d, %d) of size (%lld, %lld, %lld, %lld, %lld)", what, id, at.d[0], at.d[1], at.d[2],
         at.d[3], at.d[4], (long long)t.size[0], (long long)t.size[1], (long long)t.size[2], (long long)t.size[3],
         (long long)t.size[4]);
}

// Element offset of the start of a vector access; checks id, element size and every dimension but the first.
TPC_INLINE int64_t locate(const char *name, int id, const int5 &at, int element_bytes) {
    if (__builtin_expect(id < 0 || id >= state.num_tensors, 0)) fail("%s: tensor %d of %d", name, id, state.num_tensors);
    const Tensor &t = state.tensors[id];
    if (__builtin_expect(t.element_bytes != element_bytes, 0)) {
        fail("%s: elements of %d bytes, tensor %d has elements of %d", name, element_bytes, id, t.element_bytes);
    }
    int64_t offset = at.d[0];
    for (int k = 1; k < 5; k++) {
        if (__builtin_expect(at.d[k] < 0 || at.d[k] >= t.size[k], 0)) fail_at("access outside", id, at);
        offset += at.d[k] * t.stride[k];
    }
    return offset;
}

__attribute__((cold, noinline)) static const uint8_t *with_padding(uint8_t *padded, const uint8_t *from, int64_t bytes,
                                                                   int64_t lanes) {
    memset(padded, 0, 256);
    if (bytes) memcpy(padded, from, bytes);
    state.totals.padded_lanes += lanes;
    return padded;
}

template <class T, int N>
TPC_INLINE Vector<T, N> load(const char *name, const int5 &at, int id, int switches, const Vector<T, N> &income, bool on) {
    no_switches(switches, SW_L0CS | SW_UNPACK, name);
    if ((switches & SW_UNPACK) && sizeof(T) != 2) fail("%s: SW_UNPACK is modelled from 16 to 32 bits only", name);
    count(op_ld_tnsr);
    if (!on) return income;
    const int64_t offset = locate(name, id, at, sizeof(T));
    const Tensor &t = state.tensors[id];
    if (__builtin_expect(t.output(), 0)) fail_at("load without aso from output", id, at);
    if (__builtin_expect(at.d[0] < 0 || at.d[0] >= t.size[0] + 2 * N, 0)) fail_at("load outside", id, at);
    const int64_t inside = std::max<int64_t>(0, std::min<int64_t>(N, t.size[0] - at.d[0]));
    using Raw = typename Vector<T, N>::raw;
    const uint8_t *from = t.base + offset * sizeof(T);
    alignas(64) uint8_t padded[256];
    if (__builtin_expect(inside != N, 0)) from = with_padding(padded, from, inside * sizeof(T), (N - inside));
    state.totals.bytes_loaded += inside * sizeof(T);
    if (switches & SW_UNPACK) { // lane 2i = memory i, lane 2i + 1 = memory N/2 + i
        Vector<T, N> r = T(0);
        for (int i = 0; i < N; i++) memcpy(r.d.memory() + i, from + (i / 2 + (i % 2) * (N / 2)) * sizeof(T), sizeof(T));
        return r;
    }
    return Vector<T, N>::of(load_lanes<Raw>(from));
}

template <class T, int N>
inline void store(const char *name, const int5 &at, int id, const Vector<T, N> &value, int first, int lanes) {
    written(name, value);
    const int64_t offset = locate(name, id, at, sizeof(T));
    const Tensor &t = state.tensors[id];
    if (!t.output()) fail_at("store to input", id, at);
    if (at.d[0] < 0 || at.d[0] >= t.size[0]) fail_at("store outside", id, at);
    if (first < 0 || first + lanes > N) fail("%s: lanes %d..%d of %d", name, first, first + lanes - 1, N);
    const int64_t inside = std::min<int64_t>(lanes, t.size[0] - at.d[0]);
    memcpy(t.base + offset * sizeof(T), value.d.memory() + first, inside * sizeof(T));
    for (int64_t i = 0; i < inside; i++) {
        uint8_t &owner = t.owner[offset + i];
        if (owner != 255 && owner != state.invocation) fail_at("element written by two invocations in", id, at);
        owner = uint8_t(state.invocation);
    }
    state.totals.culled_lanes += lanes - inside;
    state.totals.bytes_stored += inside * sizeof(T);
}

template <class T, int N>
inline void store_full(const char *name, const int5 &at, int id, Vector<T, N> value, int switches, bool on) {
    no_switches(switches, SW_PACK, name);
    if ((switches & SW_PACK) && sizeof(T) != 2) fail("%s: SW_PACK is modelled from 32 to 16 bits only", name);
    count(op_st_tnsr);
    state.last_partial[0] = -1;
    if (!on) return;
    if (switches & SW_PACK) { // memory d < N/2 = lane 2d, N/2 + d = lane 2d + 1
        const auto lanes = value.d;
        for (int i = 0; i < N; i++) value.d.memory()[i] = lanes.memory()[i < N / 2 ? 2 * i : 2 * (i - N / 2) + 1];
    }
    store(name, at, id, value, 0, N);
}

// The device drops the second of two partial stores in a row with equal size and offset: counted, tests want none.
template <class T, int N>
inline void store_partial(const char *name, const int5 &at, int id, const Vector<T, N> &value, int size, int first,
                          int switches, bool on) {
    no_switches(switches, 0, name);
    count(op_st_tnsr_partial);
    if (!on) return;
    int *last = state.last_partial;
    state.totals.repeated_partial_stores += last[0] >= 0 && last[1] == size && last[2] == first;
    last[0] = id, last[1] = size, last[2] = first;
    store(name, at, id, value, first, size + 1);
}

// Size and offset travel in bytes; offset in lanes, size in elements less one.
TPC_INLINE int unsigned_byte(int8_t value) { return uint8_t(value); }

} // namespace tpc_emulator

#define TPC_TENSOR_ACCESS(P, V)                                                                               \
    TPC_OP V v_##P##_ld_tnsr_b(int5 ndx, const int8_t tensor, int switches = 0, V income = tpc_emulator::Unset(), \
                                   bool predicate = 1, bool polarity = 0) {                                   \
        return tpc_emulator::load("v_" #P "_ld_tnsr_b", ndx, tensor, switches, income, predicate != polarity); \
    }                                                                                                         \
    inline void v_##P##_st_tnsr(int5 ndx, const int8_t tensor, V value, int switches = 0, bool predicate = 1, \
                                bool polarity = 0) {                                                          \
        tpc_emulator::store_full("v_" #P "_st_tnsr", ndx, tensor, value, switches, predicate != polarity);    \
    }                                                                                                         \
    inline void v_##P##_st_tnsr_partial(int5 ndx, int8_t tensor, V value, int8_t size, int8_t offset,         \
                                        int switches = 0, bool predicate = 1, bool polarity = 0) {            \
        tpc_emulator::store_partial("v_" #P "_st_tnsr_partial", ndx, tensor, value,                           \
                                    tpc_emulator::unsigned_byte(size), tpc_emulator::unsigned_byte(offset),   \
                                    switches, predicate != polarity);                                         \
    }
TPC_TENSOR_ACCESS(f32, float64) TPC_TENSOR_ACCESS(bf16, bfloat128) TPC_TENSOR_ACCESS(i32, int64)
TPC_TENSOR_ACCESS(u32, uint64) TPC_TENSOR_ACCESS(i16, short128) TPC_TENSOR_ACCESS(u16, ushort128)
TPC_TENSOR_ACCESS(i8, char256) TPC_TENSOR_ACCESS(u8, uchar256)

// ---- index space, tensor descriptors -------------------------------------------------------------------------------
inline int5 get_index_space_offset() {
    tpc_emulator::count(tpc_emulator::op_get_index);
    int5 r;
    memcpy(r.d, tpc_emulator::state.offset, sizeof r.d);
    return r;
}
inline int5 get_index_space_size() {
    tpc_emulator::count(tpc_emulator::op_get_index);
    int5 r;
    memcpy(r.d, tpc_emulator::state.size, sizeof r.d);
    return r;
}
inline uint32_t get_dim_size(int32_t a, uint32_t dim) {
    if (a < 0 || a >= tpc_emulator::state.num_tensors || dim > 4) tpc_emulator::fail("get_dim_size(%d, %u)", a, dim);
    tpc_emulator::count(tpc_emulator::op_scalar);
    return uint32_t(tpc_emulator::state.tensors[a].size[dim]);
}

// ---- global memory by address --------------------------------------------------------------------------------------
inline void *gen_addr(int5 inx, int8_t tensor, int switches = 0, void *income = {}, bool predicate = 1, bool polarity = 0) {
    using namespace tpc_emulator;
    no_switches(switches, 0, "gen_addr");
    count(op_gen_addr);
    if (predicate == polarity) return income;
    if (tensor < 0 || tensor >= state.num_tensors) fail("gen_addr: tensor %d of %d", tensor, state.num_tensors);
    const Tensor &t = state.tensors[tensor];
    int64_t offset = 0;
    for (int k = 0; k < 5; k++) {
        if (inx.d[k] < 0 || inx.d[k] >= t.size[k]) fail_at("gen_addr outside", tensor, inx);
        offset += inx.d[k] * t.stride[k];
    }
    return t.base + offset * t.element_bytes;
}

namespace tpc_emulator {
template <class S> inline S load_address(const char *name, const void *address, int switches) {
    no_switches(switches, 0, name);
    const uint8_t *at = static_cast<const uint8_t *>(address);
    for (int id = 0; id < state.num_tensors; id++) {
        const Tensor &t = state.tensors[id];
        const int64_t bytes = (t.rank ? t.stride[t.rank - 1] * t.size[t.rank - 1] : 1) * t.element_bytes;
        if (at < t.base || at + sizeof(S) > t.base + bytes) continue;
        if (t.output()) fail("%s: load without aso from output tensor %d", name, id);
        state.totals.bytes_loaded += sizeof(S);
        S value;
        memcpy(static_cast<void *>(&value), at, sizeof value);
        return value;
    }
    fail("%s: address outside every tensor", name);
}
} // namespace tpc_emulator

#define TPC_ADDRESS_ACCESS(P, S, V)                                                                           \
    inline S s_##P##_ld_g(void *addr, int switches = 0, S income = {}, bool predicate = 1, bool polarity = 0) { \
        tpc_emulator::count(tpc_emulator::op_ld_g);                                                           \
        return predicate == polarity ? income : tpc_emulator::load_address<S>("s_" #P "_ld_g", addr, switches); \
    }                                                                                                         \
    inline V v_##P##_ld_g(void *addr, int switches = 0, V income = tpc_emulator::Unset(), bool predicate = 1, \
                          bool polarity = 0) {                                                                \
        tpc_emulator::count(tpc_emulator::op_ld_g);                                                           \
        return predicate == polarity ? income : V(tpc_emulator::load_address<S>("v_" #P "_ld_g", addr, switches)); \
    }
TPC_ADDRESS_ACCESS(f32, float, float64) TPC_ADDRESS_ACCESS(bf16, bf16, bfloat128)
TPC_ADDRESS_ACCESS(i32, int32_t, int64) TPC_ADDRESS_ACCESS(u32, uint32_t, uint64)
TPC_ADDRESS_ACCESS(i16, int16_t, short128) TPC_ADDRESS_ACCESS(u16, uint16_t, ushort128)
TPC_ADDRESS_ACCESS(i8, int8_t, char256) TPC_ADDRESS_ACCESS(u8, uint8_t, uchar256)

// ---- local memory --------------------------------------------------------------------------------------------------
namespace tpc_emulator {
template <class T, int N> TPC_INLINE const Vector<T, N> &load_local(const Vector<T, N> &variable) {
    written("local memory", variable);
    count(op_ld_l);
    return variable;
}
template <class T, int N> TPC_INLINE void store_local(Vector<T, N> &variable, const Vector<T, N> &value) {
    written("local memory", value);
    count(op_st_l);
    variable = value;
}
} // namespace tpc_emulator
