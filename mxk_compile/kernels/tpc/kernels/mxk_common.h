// What every kernel here shares: marks, table names, work split, the sort of routes by expert.
//
// TPC-C only (a C99 subset): variants are stamped out by the preprocessor, helpers with loops are macros, since a loop on
// a constant parameter of an inlined function may be miscompiled, and templates crash the front end (published: "MXFP4
// MoE decode kernels", tpc-clang pitfalls).
#ifndef MXK_COMMON_H
#define MXK_COMMON_H

// Marks for the emulator (emulator/tpc_emulator.h): nothing for the real compiler, where MXK_ST_L is a plain assignment.
#ifndef MXK_REGION
#define MXK_REGION(name)
#define MXK_CHUNK_ROWS(n)
#define MXK_LD_L(variable) (variable)
#define MXK_ST_L(variable, value) (variable) = (value)
#endif

// LOOKUP tables: nibble -> bf16 (16 entries, class 3), byte -> two bf16 (256 entries, class 0). The number of the stock
// cast's own E2M1 table is not public: a device build sets it here, or binds a user table.
#ifndef MXK_FID_E2M1
#define MXK_FID_E2M1 500
#endif
#ifndef MXK_FID_INT4
#define MXK_FID_INT4 501
#endif
#ifndef MXK_FID_E2M1_PAIR
#define MXK_FID_E2M1_PAIR 100
#endif
#ifndef MXK_FID_INT4_PAIR
#define MXK_FID_INT4_PAIR 101
#endif

#define MXK_NUM_TPC 24     // index-space points: one for each TPC of a Gaudi 2
#define MXK_MAX_ROUTES 128 // of one call; sizes the tables in scalar local memory
#define MXK_MAX_EXPERTS 128

// ceil(n / MXK_NUM_TPC) without a division, for 0 <= n <= 49128: 43691 / 2^20 is 1 / 24 plus 1 / (3 * 2^20).
#define MXK_SLICE(n) ((((n) + MXK_NUM_TPC - 1) * 43691) >> 20)

#define MXK_ALL_GROUPS MkWrA(3, 3, 3, 3)
#define MXK_SWAP_GROUPS                                                                                       \
    (SW_GROUP0_EN | SW_GROUP1_EN | SW_DUAL_GROUP0_EN | SW_DUAL_GROUP1_EN | SW_DUAL_GROUP2_EN | SW_DUAL_GROUP3_EN)
#define MXK_ALL_BYTES 0xFFFFFFFF

// A partial store writes lanes [lane, lane + count) to elements [at[0], at[0] + count): the reading of "offset" under
// which the public reduction example (Habana_Custom_Kernel) is right. Define MXK_PARTIAL_ADDS_OFFSET if a device adds the
// offset to the coordinate as well. The device drops the second of two partial stores in a row with the same count and
// lane (published pitfall), so neighbouring stores here always differ in one of them.
#ifdef MXK_PARTIAL_ADDS_OFFSET
#define MXK_PARTIAL_STORE(at, output, value, count, lane)                                                     \
    {                                                                                                         \
        int5 mxk_at = at;                                                                                     \
        mxk_at[0] = mxk_at[0] - (lane);                                                                       \
        v_bf16_st_tnsr_partial(mxk_at, output, value, (count) - 1, lane);                                     \
    }
#else
#define MXK_PARTIAL_STORE(at, output, value, count, lane) v_bf16_st_tnsr_partial(at, output, value, (count) - 1, lane);
#endif

// fp32 lanes that a shuffle reads, as control bytes: 0x80 enables, 0x20 is the upper group, low bits the lane of a group
// of eight. All four bytes of a lane must agree.
#define MXK_CONTROL_32(control, lanes)                                                                        \
    {                                                                                                         \
        uint64 mxk_bits = v_u32_or_b(lanes, 0x80);                                                            \
        mxk_bits = v_u32_or_b(mxk_bits, v_u32_shl_b(mxk_bits, 8));                                            \
        control = (uchar256)v_u32_or_b(mxk_bits, v_u32_shl_b(mxk_bits, 16));                                  \
    }

// Routes in scalar local memory. A route is a (token, slot) pair, numbered token * k + slot.
__local__ int mxk_expert[MXK_MAX_ROUTES];         // local expert of a route, -1: not on this card
__local__ int mxk_token[MXK_MAX_ROUTES];          // token of a route
__local__ int mxk_start[MXK_MAX_EXPERTS];         // counts, then where an expert's next route goes
__local__ int mxk_sorted[MXK_MAX_ROUTES];         // local routes, by expert, then in order of their numbers

// Counting sort of the local routes. Duplicates are routes like any other. Ids are compared without sign after the
// subtraction: no id wraps into the range. `zero` is 0, which the compiler cannot know: a loop that stores a constant zero
// would become a memset that it cannot lower.
#define MXK_SORT_ROUTES(ids, top_k, num_tokens, num_experts, experts_min, num_sorted)                         \
    {                                                                                                         \
        const int zero = (num_experts) >> 8;                                                                  \
        int5 mxk_id = {0, 0, 0, 0, 0};                                                                        \
        int mxk_route = 0;                                                                                    \
        for (int e = 0; e < (num_experts); e += 1) mxk_start[e] = zero;                                       \
        for (int t = 0; t < (num_tokens); t += 1) {                                                           \
            for (int k = 0; k < (top_k); k += 1) {                                                            \
                mxk_id[0] = k;                                                                                \
                mxk_id[1] = t;                                                                                \
                const unsigned e = (unsigned)s_i32_ld_g(gen_addr(mxk_id, ids)) - (unsigned)(experts_min);     \
                mxk_token[mxk_route] = t;                                                                     \
                if (e < (unsigned)(num_experts)) {                                                            \
                    mxk_expert[mxk_route] = (int)e;                                                           \
                    mxk_start[e] += 1;                                                                        \
                } else {                                                                                      \
                    mxk_expert[mxk_route] = -1;                                                               \
                }                                                                                             \
                mxk_route += 1;                                                                               \
            }                                                                                                 \
        }                                                                                                     \
        num_sorted = 0;                                                                                       \
        for (int e = 0; e < (num_experts); e += 1) {                                                          \
            const int count = mxk_start[e];                                                                   \
            mxk_start[e] = num_sorted;                                                                        \
            num_sorted += count;                                                                              \
        }                                                                                                     \
        for (int r = 0; r < mxk_route; r += 1) {                                                              \
            const int e = mxk_expert[r];                                                                      \
            if (e >= 0) {                                                                                     \
                mxk_sorted[mxk_start[e]] = r;                                                                 \
                mxk_start[e] += 1;                                                                            \
            }                                                                                                 \
        }                                                                                                     \
    }

#endif
