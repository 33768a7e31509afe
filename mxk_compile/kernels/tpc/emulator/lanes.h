// Lane movement. 256 bytes = 4 dual groups of 64 bytes = 2 groups of 32 bytes each.
#pragma once
#include "types.h"

enum {
    SW_WR_LOWER_GROUP = 1 << 12, SW_WR_UPPER_GROUP = 1 << 13,
    SW_GROUP0_EN = 1, SW_GROUP1_EN = 2,
    SW_DUAL_GROUP0_EN = 4, SW_DUAL_GROUP1_EN = 8, SW_DUAL_GROUP2_EN = 16, SW_DUAL_GROUP3_EN = 32,
};
#define MkWr(l, u) (((l) ? SW_WR_LOWER_GROUP : 0) | ((u) ? SW_WR_UPPER_GROUP : 0))
#define MkWrA(w0, w1, w2, w3) (((w0) << 16) | ((w1) << 18) | ((w2) << 20) | ((w3) << 22))

namespace tpc_emulator {

template <class V> TPC_INLINE const uint8_t *bytes_of(const V &v) { return reinterpret_cast<const uint8_t *>(&v.d); }
template <class V> TPC_INLINE uint8_t *bytes_of(V &v) { return reinterpret_cast<uint8_t *>(&v.d); }

// Output dual group g takes bytes of input dual group source[g], where its group is enabled and the mask has the byte.
template <class V>
TPC_INLINE V dual_groups_moved(const V &a, uint32_t mask, const int (&source)[4], const int (&enabled)[4], const V &income) {
    for (int g : source) {
        if (g < 0 || g > 3) fail("mov_dual_group: dual group %d", g);
    }
    const bool whole = mask == 0xffffffffu && (enabled[0] & enabled[1] & enabled[2] & enabled[3]) == 3;
    __attribute__((uninitialized)) V r;
    if (whole) {
        r = V::of(a.d);
        for (int g = 0; g < 4; g++) memcpy(bytes_of(r) + 64 * g, bytes_of(a) + 64 * source[g], 64);
        return r;
    }
    written("mov_dual_group income", income);
    r = income;
    for (int g = 0; g < 4; g++) {
        for (int k = 0; k < 64; k++) {
            if ((enabled[g] >> (k / 32) & 1) && (mask >> (k % 32) & 1)) {
                bytes_of(r)[64 * g + k] = bytes_of(a)[64 * source[g] + k];
            }
        }
    }
    return r;
}

template <class V> TPC_INLINE V groups_swapped(const V &a, uint32_t mask, int switches, const V &income) {
    V r = income;
    bool whole = true;
    for (int i = 0; i < 256; i++) {
        const int g = i / 64, group = i % 64 / 32;
        if ((switches >> (2 + g) & 1) && (switches >> group & 1) && (mask >> (i % 32) & 1)) bytes_of(r)[i] = bytes_of(a)[i ^ 32];
        else whole = false;
    }
    if (!whole) written("mov_group income", income);
    r.unset = 0;
    return r;
}

// Control byte of an element: bits 0..4 source element, 5 source group, 7 enable; equal in all bytes of the element.
template <class V> TPC_INLINE V shuffled(const char *name, const V &a, const uchar256 &control, const V &income) {
    constexpr int bytes = sizeof(typename V::raw);
    typedef uint8_t Dual __attribute__((vector_size(64), aligned(1)));
    __attribute__((uninitialized)) V r;
    uint8_t uneven = 0, beyond = 0, disabled = 0;
    for (int g = 0; g < 4; g++) {
        Dual c, source, previous;
        memcpy(&c, bytes_of(control) + 64 * g, 64);
        memcpy(&source, bytes_of(a) + 64 * g, 64);
        memcpy(&previous, bytes_of(income) + 64 * g, 64);
        Dual within{};
        for (int i = 0; i < 64; i++) {
            uneven |= uint8_t(c[i] ^ c[i - i % bytes]);
            beyond |= uint8_t((c[i] & 0x80) && (c[i] & 31) >= 32 / bytes);
            disabled |= uint8_t(~c[i] & 0x80);
            within[i] = uint8_t(i % bytes);
        }
        const Dual index = (c & 32) + (c & 31) * uint8_t(bytes) + within;
        const Dual moved = __builtin_shuffle(source, index & 63);
        const Dual result = (c & 0x80) != 0 ? moved : previous;
        memcpy(bytes_of(r) + 64 * g, &result, 64);
    }
    if (__builtin_expect(uneven, 0)) fail("%s: control bytes of one element differ (0x%02x); set all of them", name, uneven);
    if (__builtin_expect(beyond, 0)) fail("%s: source element beyond the group", name);
    if (disabled) written(name, income);
    r.unset = 0;
    r.macs = 0;
    r.first_mac = 0;
    return r;
}

} // namespace tpc_emulator

#define TPC_LANE_ID(NAME, V)                                                                                  \
    inline V NAME(V income = tpc_emulator::Unset(), bool predicate = 1, bool polarity = 0) {                  \
        tpc_emulator::count(tpc_emulator::op_lane_id);                                                        \
        if (predicate == polarity) return income;                                                             \
        V r = 0;                                                                                              \
        for (int i = 0; i < V::size; i++) r.d[i] = V::element(i);                                             \
        return r;                                                                                             \
    }
TPC_LANE_ID(read_lane_id_4b_b, uint64) TPC_LANE_ID(read_lane_id_2b_b, ushort128) TPC_LANE_ID(read_lane_id_1b_b, uchar256)
#define V_LANE_ID_32 read_lane_id_4b_b()
#define V_LANE_ID_16 read_lane_id_2b_b()
#define V_LANE_ID_8 read_lane_id_1b_b()

#define TPC_MOVES(P, V)                                                                                       \
    TPC_INLINE V v_##P##_mov_dual_group_all_b(V a, const uint32_t b, const int sdg0, const int sdg1, const int sdg2, \
                                              const int sdg3, int switches, V income, bool predicate = 1,     \
                                              bool polarity = 0) {                                            \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, MkWrA(3, 3, 3, 3), "v_" #P "_mov_dual_group_all_b");                            \
        written("v_" #P "_mov_dual_group_all_b", a);                                                          \
        count(op_mov_dual_group);                                                                             \
        if (predicate == polarity) return income;                                                             \
        return dual_groups_moved(a, b, {sdg0, sdg1, sdg2, sdg3},                                              \
                                 {switches >> 16 & 3, switches >> 18 & 3, switches >> 20 & 3, switches >> 22 & 3}, income); \
    }                                                                                                         \
    TPC_INLINE V v_##P##_mov_dual_group_b(V a, const uint32_t b, const int src_dg, const int dest_dg, int switches, \
                                          V income, bool predicate = 1, bool polarity = 0) {                  \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, MkWr(1, 1), "v_" #P "_mov_dual_group_b");                                       \
        written("v_" #P "_mov_dual_group_b", a);                                                              \
        count(op_mov_dual_group);                                                                             \
        if (predicate == polarity) return income;                                                             \
        const int on = switches >> 12 & 3;                                                                    \
        return dual_groups_moved(a, b, {src_dg, src_dg, src_dg, src_dg},                                      \
                                 {dest_dg == 0 ? on : 0, dest_dg == 1 ? on : 0, dest_dg == 2 ? on : 0,        \
                                  dest_dg == 3 ? on : 0}, income);                                            \
    }                                                                                                         \
    TPC_INLINE V v_##P##_mov_group_b(V a, uint32_t b, int switches, V income, bool predicate = 1, bool polarity = 0) { \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, 63, "v_" #P "_mov_group_b");                                                    \
        written("v_" #P "_mov_group_b", a);                                                                   \
        count(op_mov_group);                                                                                  \
        return predicate == polarity ? income : groups_swapped(a, b, switches, income);                       \
    }                                                                                                         \
    TPC_INLINE V v_##P##_shuffle_b(V a, uchar256 b, int switches, V income, bool predicate = 1, bool polarity = 0) { \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, 0, "v_" #P "_shuffle_b");                                                       \
        written("v_" #P "_shuffle_b", a, b);                                                                  \
        count(op_shuffle);                                                                                    \
        return predicate == polarity ? income : shuffled("v_" #P "_shuffle_b", a, b, income);                 \
    }
TPC_MOVES(f32, float64) TPC_MOVES(i32, int64) TPC_MOVES(u32, uint64) TPC_MOVES(i16, short128)
TPC_MOVES(u16, ushort128) TPC_MOVES(bf16, bfloat128) TPC_MOVES(i8, char256) TPC_MOVES(u8, uchar256)
