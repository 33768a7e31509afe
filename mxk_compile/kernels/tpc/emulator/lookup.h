// LOOKUP: the tables a kernel may name, and the 16-bit forms. Two LOAD cycles each; SW_X2 would be one, but the compiler
// then invalidates the table cache before every lookup (erratum GAUDI2_0012), so it is refused.
#pragma once
#include "types.h"

enum { SW_BV32 = 0, SW_BV16 = 1, SW_UPPER_HALF = 1 << 2, SW_LUT_PTR = 1 << 3, SW_X2 = 1 << 4 };

#define MXK_FID_E2M1 500
#define MXK_FID_INT4 501
#define MXK_FID_SINT4 502
#define MXK_FID_E2M1_PAIR 100
#define MXK_FID_INT4_PAIR 101
#define MXK_FID_SINT4_PAIR 102

namespace tpc_emulator {

struct Tables {
    static constexpr int formats = 3;
    uint16_t nibble[formats][128];   // 16 entries, repeated over a vector
    uint32_t pair[formats][256];     // low half: low nibble
    Tables() {
        const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}; // E2M1, OCP MX v1.0 section 5.3.3
        for (int i = 0; i < 128; i++) {
            const int code = i % 16;
            nibble[0][i] = uint16_t(bf16(magnitude[code % 8]).bits | (code & 8) << 12);
            nibble[1][i] = bf16(float(code - 8)).bits;
            nibble[2][i] = bf16(float(code < 8 ? code : code - 16)).bits;
        }
        for (int f = 0; f < formats; f++) {
            for (int i = 0; i < 256; i++) pair[f][i] = nibble[f][i % 16] | uint32_t(nibble[f][i / 16]) << 16;
        }
    }
};
static const Tables tables;
static bool table_used[2 * Tables::formats];

// Entries of the tables used so far: the table cache holds 384 16-bit entries.
inline void use_table(int index, int entries) {
    if (__builtin_expect(table_used[index], 1)) return;
    table_used[index] = true;
    state.totals.lut_entries += entries;
}

TPC_INLINE void check_lookup(const char *name, int switches, int index, int formats_from, const ushort128 &a, int entries) {
    no_switches(switches, SW_BV16, name);
    if (!(switches & SW_BV16)) fail("%s: this form needs SW_BV16", name);
    if (index < 0 || index >= Tables::formats) fail("%s: no table of function id %d", name, index + formats_from);
    written(name, a);
    if (__builtin_expect(any_bits(a.d & uint16_t(~(entries - 1))), 0)) fail("%s: index of at least %d in a table of %d", name, entries, entries);
}

} // namespace tpc_emulator

TPC_OP bfloat128 v_bf16_lookup_1c(ushort128 a, int fid, int switches, bfloat128 income, bool predicate = 1, bool polarity = 0) {
    using namespace tpc_emulator;
    check_lookup("v_bf16_lookup_1c", switches, fid - MXK_FID_E2M1, MXK_FID_E2M1, a, 16);
    count(op_lookup_1c);
    if (predicate == polarity) return income;
    use_table(fid - MXK_FID_E2M1, 32);
    const Lanes<uint16_t> table = load_lanes<uint16_t>(tables.nibble[fid - MXK_FID_E2M1]);
    if constexpr (piece_bytes >= 32) { // 16 entries in a register
        return bfloat128::of(map<uint16_t>([&](auto index) { return __builtin_shuffle(table.p[0], index); }, a.d));
    }
    bfloat128 r = 0.0f;
    for (int i = 0; i < 128; i++) r.d.memory()[i] = table.memory()[a.d.memory()[i]];
    return r;
}

TPC_OP bfloat256 v_bf16_lookup_2c(ushort128 a, int fid, int switches, bfloat256 income, bool predicate = 1, bool polarity = 0) {
    using namespace tpc_emulator;
    check_lookup("v_bf16_lookup_2c", switches, fid - MXK_FID_E2M1_PAIR, MXK_FID_E2M1_PAIR, a, 256);
    count(op_lookup_2c);
    if (predicate == polarity) return income;
    use_table(Tables::formats + fid - MXK_FID_E2M1_PAIR, 256);
    const uint32_t *table = tables.pair[fid - MXK_FID_E2M1_PAIR];
    const uint16_t *index = a.d.memory();
    alignas(64) uint16_t low[128], high[128];
    for (int i = 0; i < 128; i++) {
        const uint32_t both = table[index[i]];
        low[i] = uint16_t(both);
        high[i] = uint16_t(both >> 16);
    }
    return {bfloat128::of(load_lanes<uint16_t>(low)), bfloat128::of(load_lanes<uint16_t>(high))};
}
