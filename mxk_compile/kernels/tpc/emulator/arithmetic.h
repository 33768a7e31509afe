// VPU arithmetic. Products of bf16 are exact in fp32; MACs are fused (one rounding); converts round to nearest even.
#pragma once
#include "types.h"

enum { SW_NEG = 2, SW_RHNE = 0 << 16 };

namespace tpc_emulator {

using Floats = Lanes<float>;
using Words = Lanes<uint32_t>;

template <class V> TPC_INLINE V chosen(const V &result, const V &income, bool on) { return on ? result : income; }

// Lanes 2i and 2i + 1 of 128 bf16 as 64 fp32: the order of every 16 -> 32 bit operation (getSwizzleSourceIx).
TPC_INLINE Floats even(const bfloat128 &v) { return as<float>(as<uint32_t>(v.d) << 16u); }
TPC_INLINE Floats odd(const bfloat128 &v) { return as<float>(as<uint32_t>(v.d) & 0xffff0000u); }

// bf16 bits of 64 fp32 in the upper halves; the lower halves are 0.
TPC_INLINE Words rounded(const Floats &v) {
    return map<uint32_t>(
        [](auto u) {
            const Words::Piece nearest = u + 0x7fffu + ((u >> 16) & 1u), quiet_nan = u | 0x400000u;
            return ((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : nearest) & 0xffff0000u;
        },
        as<uint32_t>(v));
}
TPC_INLINE bfloat128 joined(const Words &even, const Words &odd) {
    return bfloat128::of(as<uint16_t>(even >> 16u | odd));
}

TPC_INLINE Floats fused(const Floats &a, const Floats &b, const Floats &c) {
    return map<float>(
        [](auto x, auto y, auto z) {
#if defined(__AVX512F__)
            return (Floats::Piece)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
            for (int i = 0; i < piece_bytes / 4; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
            return z;
#endif
        },
        a, b, c);
}
TPC_INLINE Floats negative(const Floats &v) {
    return map<float>([](auto x) { return -x; }, v);
}

// Where an operand is NaN: the second.
template <class R> TPC_INLINE Lanes<R> larger(const Lanes<R> &a, const Lanes<R> &b) {
    return map<R>([](auto x, auto y) { return x > y ? x : y; }, a, b);
}
template <class R> TPC_INLINE Lanes<R> smaller(const Lanes<R> &a, const Lanes<R> &b) {
    return map<R>([](auto x, auto y) { return x < y ? x : y; }, a, b);
}

// The accumulator after a MAC. In the order of the source, a MAC on the result of another must come at least its latency
// of 4 cycles later (latencies.cpp).
TPC_INLINE float64 accumulated(const Floats &value, int64_t last_mac) {
    float64 r = float64::of(value);
    if (state.region != Region::chunk) return r;
    r.last_mac = state.vpu_clock;
    if (last_mac != 0) {
        const int64_t distance = r.last_mac - last_mac;
        if (!state.totals.mac_pairs++ || distance < state.totals.mac_distance) state.totals.mac_distance = distance;
    }
    return r;
}

template <class V> TPC_INLINE void shift_counts(const V &b, const char *name) {
    constexpr int bits = 8 * sizeof(typename V::raw);
    if (__builtin_expect(any_bits(b.d & typename V::raw(~(bits - 1))), 0)) fail("%s: shift count outside 0..%d", name, bits - 1);
}

} // namespace tpc_emulator

#define TPC_BINARY(P, V, B, NAME, OPERATION, EXPRESSION)                                                      \
    TPC_OP V v_##P##_##NAME##_b(V a, B b, int switches = 0, V income = tpc_emulator::Unset(), bool predicate = 1, \
                                    bool polarity = 0) {                                                      \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, 0, "v_" #P "_" #NAME "_b");                                                     \
        written("v_" #P "_" #NAME "_b", a, b);                                                                \
        count(op_##OPERATION);                                                                                \
        return chosen(V(EXPRESSION), income, predicate != polarity);                                          \
    }
#define TPC_LANES(V, EXPRESSION) V::of(tpc_emulator::as<V::raw>(EXPRESSION))
#define TPC_SHIFT(P, V, B, NAME, SYMBOL)                                                                      \
    TPC_BINARY(P, V, B, NAME, shift,                                                                          \
               (shift_counts(b, "v_" #P "_" #NAME "_b"), TPC_LANES(V, a.d SYMBOL as<V::raw>(b.d))))
#define TPC_INTEGER(P, V, B)                                                                                  \
    TPC_BINARY(P, V, V, and, logic, TPC_LANES(V, a.d & b.d)) TPC_BINARY(P, V, V, or, logic, TPC_LANES(V, a.d | b.d)) \
    TPC_BINARY(P, V, V, xor, logic, TPC_LANES(V, a.d ^ b.d)) TPC_BINARY(P, V, V, add, add, TPC_LANES(V, a.d + b.d)) \
    TPC_BINARY(P, V, V, sub, sub, TPC_LANES(V, a.d - b.d)) TPC_BINARY(P, V, V, max, max, TPC_LANES(V, larger(a.d, b.d))) \
    TPC_BINARY(P, V, V, min, min, TPC_LANES(V, smaller(a.d, b.d)))                                        \
    TPC_SHIFT(P, V, B, shl, <<) TPC_SHIFT(P, V, B, shr, >>)
TPC_INTEGER(u32, uint64, int64) TPC_INTEGER(i32, int64, int64) TPC_INTEGER(u16, ushort128, short128)
TPC_INTEGER(i16, short128, short128) TPC_INTEGER(u8, uchar256, char256) TPC_INTEGER(i8, char256, char256)

#define TPC_BITS(P, V)                                                                                 \
    TPC_BINARY(P, V, V, and, logic, TPC_LANES(V, as<uint32_t>(a.d) & as<uint32_t>(b.d)))                                    \
    TPC_BINARY(P, V, V, or, logic, TPC_LANES(V, as<uint32_t>(a.d) | as<uint32_t>(b.d)))                                     \
    TPC_BINARY(P, V, V, xor, logic, TPC_LANES(V, as<uint32_t>(a.d) ^ as<uint32_t>(b.d)))
TPC_BITS(f32, float64) TPC_BITS(bf16, bfloat128)

TPC_BINARY(f32, float64, float64, add, add, TPC_LANES(float64, a.d + b.d))
TPC_BINARY(f32, float64, float64, sub, sub, TPC_LANES(float64, a.d - b.d))
TPC_BINARY(f32, float64, float64, mul, mul, TPC_LANES(float64, a.d * b.d))
TPC_BINARY(f32, float64, float64, max, max, TPC_LANES(float64, larger(a.d, b.d)))
TPC_BINARY(f32, float64, float64, min, min, TPC_LANES(float64, smaller(a.d, b.d)))
TPC_BINARY(bf16, bfloat128, bfloat128, add, add, joined(rounded(even(a) + even(b)), rounded(odd(a) + odd(b))))
TPC_BINARY(bf16, bfloat128, bfloat128, sub, sub, joined(rounded(even(a) - even(b)), rounded(odd(a) - odd(b))))
TPC_BINARY(bf16, bfloat128, bfloat128, mul, mul, joined(rounded(even(a) * even(b)), rounded(odd(a) * odd(b))))

// ---- a op b ? c : d ------------------------------------------------------------------------------------------------
#define TPC_SELECT(NAME, SYMBOL, P, V, Q, C)                                                                  \
    TPC_OP V v_##P##_sel_##NAME##_##Q##_b(C a, C b, V c, V d, int switches = 0, V income = tpc_emulator::Unset(), \
                                              bool predicate = 1, bool polarity = 0) {                        \
        using namespace tpc_emulator;                                                                         \
        no_switches(switches, 0, "v_" #P "_sel_" #NAME "_" #Q "_b");                                          \
        written("v_" #P "_sel_" #NAME "_" #Q "_b", a, b, c, d);                                               \
        count(op_select);                                                                                     \
        return chosen(V::of(map<V::raw>(                                                               \
                          [](auto x, auto y, auto p, auto q) { return x SYMBOL y ? p : q; }, a.d, b.d, c.d, d.d)), income, predicate != polarity);                      \
    }
#define TPC_SELECTS(P, V, Q, C)                                                                               \
    TPC_SELECT(eq, ==, P, V, Q, C) TPC_SELECT(neq, !=, P, V, Q, C) TPC_SELECT(less, <, P, V, Q, C)            \
    TPC_SELECT(leq, <=, P, V, Q, C) TPC_SELECT(grt, >, P, V, Q, C) TPC_SELECT(geq, >=, P, V, Q, C)
TPC_SELECTS(f32, float64, f32, float64) TPC_SELECTS(f32, float64, u32, uint64) TPC_SELECTS(f32, float64, i32, int64)
TPC_SELECTS(u32, uint64, u32, uint64) TPC_SELECTS(i32, int64, i32, int64) TPC_SELECTS(u32, uint64, f32, float64)
TPC_SELECTS(i32, int64, f32, float64) TPC_SELECTS(u16, ushort128, u16, ushort128) TPC_SELECTS(bf16, bfloat128, u16, ushort128)
TPC_SELECTS(u8, uchar256, u8, uchar256)

// ---- multiply-accumulate; 16 -> 32 bits: v1 = even lanes, v2 = odd lanes ----------------------------------------------
TPC_OP float64 v_f32_mac_b(float64 a, float64 b, float64 accumulator, int switches = 0, bool predicate = 1, bool polarity = 0) {
    using namespace tpc_emulator;
    no_switches(switches, SW_NEG, "v_f32_mac_b");
    written("v_f32_mac_b", a, b, accumulator);
    count(op_mac);
    if (predicate == polarity) return accumulator;
    return accumulated(fused(switches & SW_NEG ? negative(a.d) : a.d, b.d, accumulator.d), accumulator.last_mac);
}
TPC_OP float128 v_bf16_mac_acc32_b(bfloat128 a, bfloat128 b, float128 accumulator, int switches = 0, bool predicate = 1,
                                       bool polarity = 0) {
    using namespace tpc_emulator;
    no_switches(switches, SW_NEG, "v_bf16_mac_acc32_b");
    written("v_bf16_mac_acc32_b", a, b, accumulator.v1, accumulator.v2);
    count(op_mac_acc32);
    if (predicate == polarity) return accumulator;
    const bool negated = switches & SW_NEG;
    return {accumulated(fused(negated ? negative(even(a)) : even(a), even(b), accumulator.v1.d), accumulator.v1.last_mac),
            float64::of(fused(negated ? negative(odd(a)) : odd(a), odd(b), accumulator.v2.d))};
}
TPC_OP float128 v_bf16_mul_acc32_b(bfloat128 a, bfloat128 b, int switches = 0,
                                       float128 income = {tpc_emulator::Unset(), tpc_emulator::Unset()}, bool predicate = 1,
                                       bool polarity = 0) {
    using namespace tpc_emulator;
    no_switches(switches, 0, "v_bf16_mul_acc32_b");
    written("v_bf16_mul_acc32_b", a, b);
    count(op_mul_acc32);
    if (predicate == polarity) return income;
    return {accumulated(even(a) * even(b), 0), float64::of(odd(a) * odd(b))};
}
TPC_OP bfloat128 v_convert_f32_to_bf16_all_b(float128 src, int switches = 0, bfloat128 income = tpc_emulator::Unset(),
                                                 bool predicate = 1, bool polarity = 0) {
    using namespace tpc_emulator;
    no_switches(switches, 0, "v_convert_f32_to_bf16_all_b");
    written("v_convert_f32_to_bf16_all_b", src.v1, src.v2);
    count(op_convert);
    return chosen(joined(rounded(src.v1.d), rounded(src.v2.d)), income, predicate != polarity);
}
TPC_OP float128 v_convert_bf16_to_f32_all_b(bfloat128 src, int switches = 0,
                                                float128 income = {tpc_emulator::Unset(), tpc_emulator::Unset()},
                                                bool predicate = 1, bool polarity = 0) {
    using namespace tpc_emulator;
    no_switches(switches, 0, "v_convert_bf16_to_f32_all_b");
    written("v_convert_bf16_to_f32_all_b", src);
    count(op_convert);
    if (predicate == polarity) return income;
    return {float64::of(even(src)), float64::of(odd(src))};
}

// ---- scalars -------------------------------------------------------------------------------------------------------
#define TPC_SCALAR(P, S, NAME, EXPRESSION)                                                                    \
    inline S s_##P##_##NAME(S a, S b, int switches = 0, S income = {}, bool predicate = 1, bool polarity = 0) { \
        tpc_emulator::no_switches(switches, 0, "s_" #P "_" #NAME);                                            \
        tpc_emulator::count(tpc_emulator::op_scalar);                                                         \
        return predicate != polarity ? S(EXPRESSION) : income;                                                \
    }
TPC_SCALAR(i32, int32_t, max, a > b ? a : b) TPC_SCALAR(i32, int32_t, min, a < b ? a : b)
TPC_SCALAR(u32, uint32_t, max, a > b ? a : b) TPC_SCALAR(u32, uint32_t, min, a < b ? a : b)
TPC_SCALAR(f32, float, add, a + b) TPC_SCALAR(f32, float, mul, a *b) TPC_SCALAR(f32, float, sub, a - b)
TPC_SCALAR(f32, float, max, a > b ? a : b) TPC_SCALAR(f32, float, min, a < b ? a : b)
