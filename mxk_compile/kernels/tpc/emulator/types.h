// Vectors, predicates, int5 and bf16. A vector remembers whether it was ever written (0 = yes: C's {0} is zero memory,
// while stack and local memory are poisoned) and, as an accumulator, when its last MAC was.
#pragma once
#include "counters.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float value) : bits(from(value)) {}
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
    static uint16_t from(float value) { // to nearest, ties to even
        uint32_t u;
        memcpy(&u, &value, 4);
        if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
        return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
    }
};
typedef bf16 bfloat;
typedef bf16 _BFloat16;

namespace tpc_emulator {

template <class T> struct storage { using type = T; };
template <> struct storage<bf16> { using type = uint16_t; };
template <class T> using storage_t = typename storage<T>::type;

template <class T> TPC_INLINE storage_t<T> stored(T value) {
    if constexpr (std::is_same_v<T, bf16>) return value.bits;
    else return value;
}

// 256 bytes as pieces of one machine register each: g++ keeps them in registers, where it would put a 256-byte vector type
// on the stack. Everything lane by lane is written over pieces.
#if defined(__AVX512BW__)
constexpr int piece_bytes = 64;
#elif defined(__AVX2__)
constexpr int piece_bytes = 32;
#else
constexpr int piece_bytes = 16;
#endif
constexpr int num_pieces = 256 / piece_bytes;
using PieceNumbers = std::make_index_sequence<num_pieces>;

template <class R> struct alignas(64) Lanes {
    typedef R Piece __attribute__((vector_size(piece_bytes), aligned(piece_bytes)));
    Piece p[num_pieces];
    R *memory() { return reinterpret_cast<R *>(p); }
    const R *memory() const { return reinterpret_cast<const R *>(p); }
};

template <class R, class F, size_t... I, class... L>
TPC_INLINE Lanes<R> map_pieces(std::index_sequence<I...>, F function, const L &...v) {
    const auto one = [&](auto i) __attribute__((always_inline)) { return function(v.p[i.value]...); };
    return {{(typename Lanes<R>::Piece)one(std::integral_constant<size_t, I>())...}};
}
// function(piece, ...) for each piece of v; the results are lanes of type R.
template <class R, class F, class... L> TPC_INLINE Lanes<R> map(F function, const L &...v) {
    return map_pieces<R>(PieceNumbers(), function, v...);
}
template <class R, class S> TPC_INLINE Lanes<R> as(const Lanes<S> &v) { // same bits
    return map<R>([](auto x) { return (typename Lanes<R>::Piece)x; }, v);
}
template <class R> TPC_INLINE Lanes<R> broadcast(R value) { // not 0 + value: that would lose the sign of -0.0
    const typename Lanes<R>::Piece zero{};
    return map<R>([&](auto) { return value - zero; }, Lanes<R>{});
}
template <class R> TPC_INLINE Lanes<R> load_lanes(const void *from) {
    Lanes<R> r;
    memcpy(static_cast<void *>(&r), from, sizeof r);
    return r;
}
template <class R, size_t... I> TPC_INLINE bool any_piece(std::index_sequence<I...>, const Lanes<R> &v) {
    typedef uint64_t Wide __attribute__((vector_size(piece_bytes)));
    const Wide all = ((Wide)v.p[I] | ...);
#if defined(__AVX512BW__)
    return _mm512_test_epi64_mask((__m512i)all, (__m512i)all) != 0;
#else
    uint64_t r = 0;
    for (int i = 0; i < piece_bytes / 8; i++) r |= all[i];
    return r != 0;
#endif
}
// Whether any bit of any lane is set.
template <class R> TPC_INLINE bool any_bits(const Lanes<R> &v) { return any_piece(PieceNumbers(), v); }

#define TPC_LANE_OPERATOR(symbol)                                                                             \
    template <class R> TPC_INLINE Lanes<R> operator symbol(const Lanes<R> &a, const Lanes<R> &b) {            \
        return map<R>([](auto x, auto y) { return x symbol y; }, a, b);                                       \
    }                                                                                                         \
    template <class R> TPC_INLINE Lanes<R> operator symbol(const Lanes<R> &a, R b) {                          \
        return map<R>([=](auto x) { return x symbol b; }, a);                                                 \
    }
TPC_LANE_OPERATOR(+) TPC_LANE_OPERATOR(-) TPC_LANE_OPERATOR(*) TPC_LANE_OPERATOR(&) TPC_LANE_OPERATOR(|)
TPC_LANE_OPERATOR(^) TPC_LANE_OPERATOR(<<) TPC_LANE_OPERATOR(>>)
#undef TPC_LANE_OPERATOR

template <class T> struct LaneReference { // lanes can be written; TPC-C reads none back
    storage_t<T> *lane;
    LaneReference &operator=(T value) {
        count(op_mov_lane);
        *lane = stored<T>(value);
        return *this;
    }
};

template <class T, int N> struct Vector {
    using element = T;
    using raw = storage_t<T>;
    using lanes = Lanes<raw>;
    static constexpr int size = N;

    lanes d;
    uint32_t unset;
    int64_t last_mac; // VPU op of the chunk region, from 1; 0 = none

    Vector() = default;
    template <class S, class = std::enable_if_t<std::is_arithmetic_v<S> || std::is_same_v<S, bf16>>>
    TPC_INLINE Vector(S value) : d(broadcast<raw>(stored<T>(T(value)))), unset(0), last_mac(0) {}
    Vector(std::initializer_list<T> values) : d(lanes{}), unset(0), last_mac(0) {
        int i = 0;
        for (T value : values) d.memory()[i++] = stored<T>(value);
    }
    template <class U, int M> TPC_INLINE explicit Vector(const Vector<U, M> &other) // a C cast: same bits
        : d(as<raw>(other.d)), unset(other.unset), last_mac(0) {}
    static TPC_INLINE Vector of(const lanes &value) {
        __attribute__((uninitialized)) Vector v;
        v.d = value;
        v.unset = 0;
        v.last_mac = 0;
        return v;
    }
    LaneReference<T> operator[](int i) {
        if (i < 0 || i >= N) fail("lane %d of %d", i, N);
        return {d.memory() + i};
    }
};

template <class T, int N> TPC_INLINE Vector<T, N> never_written() {
    __attribute__((uninitialized)) Vector<T, N> v;
    v.unset = 1;
    return v;
}
struct Unset { // the default income: reading it is an error
    template <class T, int N> TPC_INLINE operator Vector<T, N>() const { return never_written<T, N>(); }
};

[[noreturn]] __attribute__((cold, noinline)) static void fail_unset(const char *name) {
    fail("%s: operand was never written", name);
}
template <class... V> TPC_INLINE void written(const char *name, const V &...v) {
    if (__builtin_expect((v.unset | ...), 0)) fail_unset(name);
}

#define TPC_OPERATOR(symbol, operation)                                                                       \
    template <class T, int N> TPC_INLINE Vector<T, N> operator symbol(const Vector<T, N> &a, const Vector<T, N> &b) { \
        static_assert(!std::is_same_v<T, bf16>, "use the intrinsic for bf16");                                \
        written("operator " #symbol, a, b);                                                                   \
        count(operation);                                                                                     \
        return Vector<T, N>::of(a.d symbol b.d);                                                              \
    }                                                                                                         \
    template <class T, int N> TPC_INLINE Vector<T, N> &operator symbol##=(Vector<T, N> &a, const Vector<T, N> &b) { \
        return a = a symbol b;                                                                                \
    }
TPC_OPERATOR(+, op_add) TPC_OPERATOR(-, op_sub) TPC_OPERATOR(*, op_mul)
TPC_OPERATOR(&, op_logic) TPC_OPERATOR(|, op_logic) TPC_OPERATOR(^, op_logic)
#undef TPC_OPERATOR

} // namespace tpc_emulator

typedef tpc_emulator::Vector<float, 64> float64;
typedef tpc_emulator::Vector<int, 64> int64;
typedef tpc_emulator::Vector<unsigned, 64> uint64;
typedef tpc_emulator::Vector<short, 128> short128;
typedef tpc_emulator::Vector<unsigned short, 128> ushort128;
typedef tpc_emulator::Vector<bf16, 128> bfloat128;
typedef tpc_emulator::Vector<signed char, 256> char256;
typedef tpc_emulator::Vector<unsigned char, 256> uchar256;

struct float128 { float64 v1, v2; };
struct bfloat256 { bfloat128 v1, v2; };

struct int5 { // the only vector that is fully indexable
    int d[5];
    int &operator[](int i) { return d[i]; }
    int operator[](int i) const { return d[i]; }
    friend int5 operator+(const int5 &a, const int5 &b) {
        tpc_emulator::count(tpc_emulator::op_index_add);
        int5 r;
        for (int i = 0; i < 5; i++) r.d[i] = a.d[i] + b.d[i];
        return r;
    }
    int5 &operator+=(const int5 &b) { return *this = *this + b; }
};

typedef int tensor;
#define __local__ __attribute__((section("tpc_local")))
#define __local __local__
#define __global__
#define __global
