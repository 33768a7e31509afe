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

using Bytes = Lanes<uint8_t>;

// Output dual group g takes bytes of input dual group source[g], where its group is enabled and the mask has the byte.
template <class V>
TPC_INLINE V dual_groups_moved(const V &a, uint32_t mask, const int (&source)[4], const int (&enabled)[4], const V &income) {
    using Raw = typename V::raw;
    for (int g : source) {
        if (g < 0 || g > 3) fail("mov_dual_group: dual group %d", g);
    }
    const bool whole = mask == 0xffffffffu && (enabled[0] & enabled[1] & enabled[2] & enabled[3]) == 3;
    if (whole) {
        constexpr int n = 64 / piece_bytes;
        Lanes<Raw> r;
        for (int g = 0; g < 4; g++) {
            for (int i = 0; i < n; i++) r.p[n * g + i] = a.d.p[n * source[g] + i];
        }
        return V::of(r);
    }
    written("mov_dual_group income", income);
    const Bytes from = as<uint8_t>(a.d);
    Bytes r = as<uint8_t>(income.d);
    for (int i = 0; i < 256; i += 32) { // a group
        const int g = i / 64, group = i % 64 / 32;
        if (!(enabled[g] >> group & 1)) continue;
        const uint8_t *moved = from.memory() + 64 * source[g] + i % 64;
        for (int k = 0; k < 32; k++) {
            if (mask >> k & 1) r.memory()[i + k] = moved[k];
        }
    }
    return V::of(as<Raw>(r));
}

// Byte i of a vector & mask.
TPC_INLINE Bytes lane_bytes(int mask) {
    Bytes r;
    for (int i = 0; i < 256; i++) r.memory()[i] = uint8_t(i & mask);
    return r;
}

// Bytes of source picked by index (0..63) inside each dual group.
TPC_INLINE Bytes picked(const Bytes &source, const Bytes &index) {
    if constexpr (piece_bytes == 64) {
        return map<uint8_t>([](auto s, auto i) { return __builtin_shuffle(s, i); }, source, index);
    }
    Bytes r;
    for (int i = 0; i < 256; i++) r.memory()[i] = source.memory()[i / 64 * 64 + index.memory()[i]];
    return r;
}

// The two groups of each dual group swapped, where dual group, group and mask are enabled.
template <class V> TPC_INLINE V groups_swapped(const V &a, uint32_t mask, int switches, const V &income) {
    using Raw = typename V::raw;
    const Bytes from = as<uint8_t>(a.d);
    if (mask == 0xffffffffu && switches == 63) return V::of(as<Raw>(picked(from, lane_bytes(63) ^ uint8_t(32))));
    written("mov_group income", income);
    Bytes r = as<uint8_t>(income.d);
    for (int i = 0; i < 256; i++) {
        const int g = i / 64, group = i % 64 / 32;
        if ((switches >> (2 + g) & 1) && (switches >> group & 1) && (mask >> (i % 32) & 1)) r.memory()[i] = from.memory()[i ^ 32];
    }
    return V::of(as<Raw>(r));
}

// Control byte of an element: bits 0..4 source element, 5 source group, 7 enable; equal in all bytes of the element.
template <class V> TPC_INLINE V shuffled(const char *name, const V &a, const uchar256 &control, const V &income) {
    constexpr int bytes = sizeof(typename V::raw);
    using Raw = typename V::raw;
    using Piece = Bytes::Piece;
    const Bytes &c = control.d;
    if constexpr (bytes > 1) {
        // Every element against its lowest byte, repeated.
        const auto element = as<std::make_unsigned_t<std::conditional_t<bytes == 2, int16_t, int32_t>>>(c);
        using Word = std::decay_t<decltype(element.p[0][0])>;
        const auto even = map<Word>([](auto e) { return (e & Word(0xff)) * Word(0x01010101u); }, element);
        if (__builtin_expect(any_bits(even ^ element), 0)) {
            fail("%s: control bytes of one element differ; index, 0x20 and 0x80 must be set in every byte", name);
        }
    }
    const Bytes enabled = map<uint8_t>([](auto x) { return (Piece)((Lanes<int8_t>::Piece)x >> 7); }, c);
    const uint8_t beyond = uint8_t(31 & ~(32 / bytes - 1));
    if (__builtin_expect(any_bits(c & enabled & beyond), 0)) fail("%s: source element beyond the group", name);
    if (any_bits(enabled ^ uint8_t(0xff))) written(name, income);
    const Bytes within = lane_bytes(bytes - 1);
    const Bytes index = map<uint8_t>([](auto x, auto w) { return (x & 32) + (x & 31) * uint8_t(bytes) + w; }, c, within) & uint8_t(63);
    const Bytes moved = picked(as<uint8_t>(a.d), index);
    return V::of(as<Raw>((moved & enabled) | (as<uint8_t>(income.d) & (enabled ^ uint8_t(0xff)))));
}

} // namespace tpc_emulator

#define TPC_LANE_ID(NAME, V)                                                                                  \
    inline V NAME(V income = tpc_emulator::Unset(), bool predicate = 1, bool polarity = 0) {                  \
        tpc_emulator::count(tpc_emulator::op_lane_id);                                                        \
        if (predicate == polarity) return income;                                                             \
        V r = 0;                                                                                              \
        for (int i = 0; i < V::size; i++) r.d.memory()[i] = V::element(i);                                             \
        return r;                                                                                             \
    }
TPC_LANE_ID(read_lane_id_4b_b, uint64) TPC_LANE_ID(read_lane_id_2b_b, ushort128) TPC_LANE_ID(read_lane_id_1b_b, uchar256)
#define V_LANE_ID_32 read_lane_id_4b_b()
#define V_LANE_ID_16 read_lane_id_2b_b()
#define V_LANE_ID_8 read_lane_id_1b_b()

#define TPC_MOVES(P, V)                                                                                     \
    TPC_OP V v_##P##_mov_dual_group_all_b(V a, const uint32_t b, const int sdg0, const int sdg1, const int sdg2, \
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
    TPC_OP V v_##P##_mov_dual_group_b(V a, const uint32_t b, const int src_dg, const int dest_dg, int switches, \
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
    TPC_OP V v_##P##_mov_group_b(V a, uint32_t b, int switches, V income, bool predicate = 1, bool polarity = 0) { \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, 63, "v_" #P "_mov_group_b");                                                    \
        written("v_" #P "_mov_group_b", a);                                                                   \
        count(op_mov_group);                                                                                  \
        return predicate == polarity ? income : groups_swapped(a, b, switches, income);                       \
    }                                                                                                         \
    TPC_OP V v_##P##_shuffle_b(V a, uchar256 b, int switches, V income, bool predicate = 1, bool polarity = 0) { \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, 0, "v_" #P "_shuffle_b");                                                       \
        written("v_" #P "_shuffle_b", a, b);                                                                  \
        count(op_shuffle);                                                                                    \
        return predicate == polarity ? income : shuffled("v_" #P "_shuffle_b", a, b, income);                 \
    }
TPC_MOVES(f32, float64) TPC_MOVES(i32, int64) TPC_MOVES(u32, uint64) TPC_MOVES(i16, short128)
TPC_MOVES(u16, ushort128) TPC_MOVES(bf16, bfloat128) TPC_MOVES(i8, char256) TPC_MOVES(u8, uchar256)
