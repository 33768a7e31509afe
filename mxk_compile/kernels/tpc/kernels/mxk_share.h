// Shared unpack (-DMXK_SHARE): two weight rows against the activation rows of up to four routes of one expert.
//
// A weight plane is decoded and scaled once, then multiplied into four accumulators: for each weight row and chunk 6 ops
// of decode, 2.5 + 4 of scale (in bf16: exact for E2M1 unless below 2^-126 or above 2^127) and 16 MACs, 28.5 VPU ops, or
// 7.125 a route (2.125 less with -DMXK_PAIR_LOOKUP's decode, which is not combined here). Two or three routes are padded
// with a repeated one: 14.25 or 9.5 a route, still no more than the 14.5 of one by one.
// Eight accumulators of two registers each leave 24 for two rows' weights of a pair (4), scales (4), planes of four routes
// (4) and temporaries.
//
// LOAD slot, cycles a weight row and chunk: 8 lookups, 1.5 for weight and scale, 8 to 16 for planes. Local memory holds
// MXK_SHARED_CHUNKS chunks of each of the four activation rows; later chunks come by predicated loads from the tensor,
// which the modelled four cycles a global load make the limit there (about 38 cycles, 9.5 a route).
//
// Off by default: not needed for the shapes of one stream, where experts have one route.
#ifndef MXK_SHARE_H
#define MXK_SHARE_H

#ifdef MXK_INT4
#error "MXK_SHARE scales in bf16, which would round INT4 products"
#endif
#ifdef MXK_PAIR_LOOKUP
#error "MXK_SHARE has no pair lookup"
#endif

// Like the controls of mxk_dot.h, for 16-bit elements.
#define MXK_SHARE_STATE                                                                                       \
    uchar256 first_pair_scale = v_u8_or_b(v_u8_shr_b(read_lane_id_1b_b(), 4), 0x80);                          \
    first_pair_scale = (uchar256)v_u16_and_b((ushort128)first_pair_scale, 0x00FF);                            \
    const uchar256 second_pair_scale = v_u8_or_b(first_pair_scale, (uchar256)(ushort128)0x0010);              \
    int5 at_x0 = {0, 0, 0, 0, 0}, at_x1 = {0, 0, 0, 0, 0}, at_x2 = {0, 0, 0, 0, 0}, at_x3 = {0, 0, 0, 0, 0};

// Routes of this expert among the next four sorted ones.
#define MXK_COUNT_SHARED(size, n, expert)                                                                     \
    size = 1;                                                                                                 \
    while (size < 4 && (n) + size < num_sorted && mxk_expert[mxk_sorted[(n) + size]] == (expert)) size += 1;

#define MXK_SHARED_PLANE(q, x, c, p)                                                                          \
    at_x##q[0] = 512 * (c) + 128 * (p);                                                                       \
    const bfloat128 plane##q = v_bf16_ld_tnsr_b(                                                              \
        at_x##q, x, 0, MXK_LD_L(mxk_x[4 * MXK_SHARED_CHUNKS * q + 4 * s_i32_min(c, MXK_SHARED_CHUNKS - 1) + (p)]), \
        (c) >= MXK_SHARED_CHUNKS);
#define MXK_SHARED_ROW(r, nibbles)                                                                            \
    {                                                                                                         \
        const bfloat128 weights = v_bf16_mul_b(MXK_LOOKUP(nibbles), scale##r);                                \
        sum##r##0 = v_bf16_mac_acc32_b(weights, plane0, sum##r##0);                                           \
        sum##r##1 = v_bf16_mac_acc32_b(weights, plane1, sum##r##1);                                           \
        sum##r##2 = v_bf16_mac_acc32_b(weights, plane2, sum##r##2);                                           \
        sum##r##3 = v_bf16_mac_acc32_b(weights, plane3, sum##r##3);                                           \
    }
#define MXK_SHARED_NIBBLE(x, w, c, p)                                                                         \
    {                                                                                                         \
        MXK_FOUR(MXK_SHARED_PLANE, x, c, p)                                                                   \
        MXK_SHARED_ROW(0, MXK_NIBBLE_##p(w##0))                                                               \
        MXK_SHARED_ROW(1, MXK_NIBBLE_##p(w##1))                                                               \
    }
#define MXK_SHARED_SCALE(r, control)                                                                          \
    const bfloat128 scale##r = (bfloat128)v_u16_shl_b((ushort128)v_u8_shuffle_b(s##r, control, 0, zero_u8), 7);
#define MXK_SHARED_CHUNK(x, w, c, control)                                                                    \
    MXK_SHARED_SCALE(0, control)                                                                              \
    MXK_SHARED_SCALE(1, control)                                                                              \
    MXK_SHARED_NIBBLE(x, w, c, 0)                                                                             \
    MXK_SHARED_NIBBLE(x, w, c, 1)                                                                             \
    MXK_SHARED_NIBBLE(x, w, c, 2)                                                                             \
    MXK_SHARED_NIBBLE(x, w, c, 3)

// A pair of chunks of two rows; loads ahead as in MXK_PAIR. `size` routes count.
#define MXK_SHARED_PAIR(x, c, num_chunks, size)                                                               \
    {                                                                                                         \
        MXK_SPREAD_SCALES(s0)                                                                                 \
        MXK_SPREAD_SCALES(s1)                                                                                 \
        MXK_SHARED_CHUNK(x, wa, c, first_pair_scale)                                                          \
        MXK_LOAD_FIRST(0, 0)                                                                                  \
        MXK_LOAD_FIRST(1, 0)                                                                                  \
        MXK_CHUNK_ROWS(2 * (size));                                                                           \
    }                                                                                                         \
    if ((c) + 1 < (num_chunks)) {                                                                             \
        MXK_SHARED_CHUNK(x, wb, (c) + 1, second_pair_scale)                                                   \
        MXK_CHUNK_ROWS(2 * (size));                                                                           \
    }                                                                                                         \
    MXK_LOAD_SECOND(0, 0)                                                                                     \
    MXK_LOAD_SECOND(1, 0)

// After the last pass of a group: the rows that a pass of four rows has besides the two loaded ahead.
#define MXK_SHARED_END                                                                                        \
    MXK_LOAD_FIRST(2, 0)                                                                                      \
    MXK_LOAD_FIRST(3, 0)                                                                                      \
    MXK_LOAD_SECOND(2, 0)                                                                                     \
    MXK_LOAD_SECOND(3, 0)

#define MXK_SHARED_SUMS(q, unused)                                                                            \
    float128 sum0##q, sum1##q;                                                                                \
    sum0##q.v1 = 0;                                                                                           \
    sum0##q.v2 = 0;                                                                                           \
    sum1##q.v1 = 0;                                                                                           \
    sum1##q.v2 = 0;

// Totals of two routes: dual groups hold rows 0, 1 of route `a`, rows 0, 1 of route `b`.
#define MXK_SHARED_TOTAL(total, a, b)                                                                         \
    MXK_REDUCE(total, v_f32_add_b(sum0##a.v1, sum0##a.v2), v_f32_add_b(sum1##a.v1, sum1##a.v2),               \
               v_f32_add_b(sum0##b.v1, sum0##b.v2), v_f32_add_b(sum1##b.v1, sum1##b.v2))

// Copies the first chunks of route q's activation row to local memory; the row is at `row` of tensor x.
#define MXK_SHARED_FETCH(q, x, row)                                                                           \
    at_x##q[1] = row;                                                                                         \
    at_x##q[0] = 0;                                                                                           \
    for (int j = 0; j < 4 * s_i32_min(num_chunks, MXK_SHARED_CHUNKS); j += 1) {                               \
        MXK_ST_L(mxk_x[4 * MXK_SHARED_CHUNKS * q + j], v_bf16_ld_tnsr_b(at_x##q, x));                         \
        at_x##q[0] += 128;                                                                                    \
    }

#endif
