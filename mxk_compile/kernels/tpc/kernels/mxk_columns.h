// The loop of INT4 weights packed along the output dimension, as the stock graph holds them (WNA16): rows are inputs.
//
//   w int32 [E, K, N/8], nibble i of a word is column 8 word + i; scale bf16 [E, K/32, N]
//   z int32 [K/32, N/8]: zero points packed like w, the same for all experts, as the stock method makes them (codes 8)
//   value (code - zero) * scale
//
// A piece is 128 neighbouring columns: 64 bytes of each row, so four rows fill a vector, one a dual group: word i of a dual
// group holds columns 4i .. 4i + 3 of its row, nibble p is plane p. Every lane keeps its own column: no reduction until the
// end, when the four dual groups are added.
//   Merge four rows 3, split 6, one activation to each dual group 1, sum of activations 1, MACs with code - 8 4. After 32
//   rows (zero - 8) * sum of activations leaves the sums of plane p (fp32), 19 ops for 8 vectors, which are then multiplied
//   by the piece's 128 scales in plane order and added to the totals, 32 ops: 21.4 VPU ops for 512 weights (the other
//   kernels call that a chunk-row). LOAD cycles: 8 lookups, 4 weights, 1 activation, 1.2 more after 32 rows; the vectors
//   loaded are four times as wide as what is used of them.
//
// Registers: totals 8 a matrix (16 with gate and up), sums of a group 8, rows loaded ahead 4, plane controls 4, temporaries.
#ifndef MXK_COLUMNS_H
#define MXK_COLUMNS_H

#define MXK_PIECE 128

#define MXK_COLUMNS_STATE                                                                                     \
    const bfloat128 zero_bf16 = 0;                                                                            \
    const bfloat128 one_bf16 = 1.0f;                                                                          \
    /* Scales of plane p: every eight lanes of a dual group take its elements 4 (lane & 7) + p. */            \
    uchar256 plane_control0, plane_control1, plane_control2, plane_control3;                                  \
    {                                                                                                         \
        const ushort128 lane = read_lane_id_2b_b();                                                           \
        ushort128 bits = v_u16_shl_b(v_u16_and_b(lane, 3), 2);                                                \
        bits = v_u16_or_b(bits, v_u16_shl_b(v_u16_and_b(lane, 4), 3));                                        \
        bits = v_u16_or_b(bits, 0x80);                                                                        \
        plane_control0 = (uchar256)v_u16_or_b(bits, v_u16_shl_b(bits, 8));                                    \
        plane_control1 = v_u8_add_b(plane_control0, 1);                                                       \
        plane_control2 = v_u8_add_b(plane_control0, 2);                                                       \
        plane_control3 = v_u8_add_b(plane_control0, 3);                                                       \
    }                                                                                                         \
    uchar256 row0, row1, row2, row3;                                                                          \
    int5 at_w = {0, 0, 0, 0, 0};                                                                              \
    int5 at_s = {0, 0, 0, 0, 0};                                                                              \
    int5 at_z = {0, 0, 0, 0, 0};

// The next four rows; at_w moves on.
#define MXK_LOAD_ROWS                                                                                         \
    row0 = (uchar256)v_i32_ld_tnsr_b(at_w, mxk_w);                                                            \
    at_w[1] += 1;                                                                                             \
    row1 = (uchar256)v_i32_ld_tnsr_b(at_w, mxk_w);                                                            \
    at_w[1] += 1;                                                                                             \
    row2 = (uchar256)v_i32_ld_tnsr_b(at_w, mxk_w);                                                            \
    at_w[1] += 1;                                                                                             \
    row3 = (uchar256)v_i32_ld_tnsr_b(at_w, mxk_w);                                                            \
    at_w[1] += 1;

// Elements 128 v + 4 m + j of a chunk-ordered row (mxk_dot.h) to lane m of dual group j of local vector v.
#define MXK_FETCH_DUAL_GROUPS(source, num_values)                                                             \
    for (int v = 0; 128 * v < (num_values); v += 1) {                                                         \
        at_x[0] = 512 * (v >> 2) + 32 * (v & 3);                                                              \
        bfloat128 planes = v_bf16_ld_tnsr_b(at_x, source);                                                    \
        MXK_FETCH_PLANE(source, 0, 3, 0, 0)                                                                   \
        MXK_FETCH_PLANE(source, 0, 0, 3, 0)                                                                   \
        MXK_FETCH_PLANE(source, 0, 0, 0, 3)                                                                   \
        MXK_ST_L(mxk_x[v], planes);                                                                           \
    }
#define MXK_FETCH_PLANE(source, w0, w1, w2, w3)                                                               \
    at_x[0] += 128;                                                                                           \
    planes = v_bf16_mov_dual_group_all_b(v_bf16_ld_tnsr_b(at_x, source), MXK_ALL_BYTES, 0, 0, 0, 0,           \
                                         MkWrA(w0, w1, w2, w3), planes);

#define MXK_COLUMN_LOOKUP(i) v_bf16_lookup_1c(i, MXK_FID_INT4, SW_BV16, zero_bf16)

// Rows 32 g .. 32 g + 31 into total##p; NEXT points at_w at the rows that follow the group's last four.
#define MXK_COLUMN_ZERO(a)                                                                                    \
    a.v1 = 0;                                                                                                 \
    a.v2 = 0;
#define MXK_COLUMN_SCALE(total, p)                                                                            \
    {                                                                                                         \
        const bfloat128 spread = v_bf16_shuffle_b(scales, plane_control##p, 0, zero_bf16);                    \
        /* Eight lanes each from dual groups 0 .. 3, in all dual groups. */                                   \
        bfloat128 lined = v_bf16_mov_dual_group_all_b(spread, MXK_ALL_BYTES, 0, 0, 0, 0, MXK_ALL_GROUPS, spread); \
        lined = v_bf16_mov_dual_group_all_b(spread, 0xFFFF0000, 1, 1, 1, 1, MkWrA(1, 1, 1, 1), lined);        \
        lined = v_bf16_mov_dual_group_all_b(spread, 0x0000FFFF, 2, 2, 2, 2, MkWrA(2, 2, 2, 2), lined);        \
        lined = v_bf16_mov_dual_group_all_b(spread, 0xFFFF0000, 3, 3, 3, 3, MkWrA(2, 2, 2, 2), lined);        \
        const float128 scale = v_convert_bf16_to_f32_all_b(lined);                                            \
        total##p.v1 = v_f32_mac_b(sum##p.v1, scale.v1, total##p.v1);                                          \
        total##p.v2 = v_f32_mac_b(sum##p.v2, scale.v2, total##p.v2);                                          \
    }
#define MXK_COLUMN_ZERO_POINT(p, nibbles)                                                                     \
    {                                                                                                         \
        const float128 zero = v_convert_bf16_to_f32_all_b(MXK_COLUMN_LOOKUP(nibbles));                        \
        sum##p.v1 = v_f32_mac_b(zero.v1, sum_x.v1, sum##p.v1, SW_NEG);                                        \
        sum##p.v2 = v_f32_mac_b(zero.v2, sum_x.v2, sum##p.v2, SW_NEG);                                        \
    }
#define MXK_COLUMN_GROUP(total, g, NEXT)                                                                      \
    {                                                                                                         \
        float128 sum0, sum1, sum2, sum3, sum_x;                                                               \
        MXK_COLUMN_ZERO(sum_x)                                                                                \
        MXK_COLUMN_ZERO(sum0)                                                                                 \
        MXK_COLUMN_ZERO(sum1)                                                                                 \
        MXK_COLUMN_ZERO(sum2)                                                                                 \
        MXK_COLUMN_ZERO(sum3)                                                                                 \
        at_s[1] = g;                                                                                          \
        at_z[0] = at_s[0] >> 3;                                                                               \
        at_z[1] = g;                                                                                          \
        const uchar256 zeros = (uchar256)v_i32_ld_tnsr_b(at_z, mxk_z);                                        \
        const bfloat128 scales = v_bf16_ld_tnsr_b(at_s, mxk_s);                                               \
        for (int m = 0; m < 8; m += 1) {                                                                      \
            const int element = 8 * ((g) & 3) + m;                                                            \
            const bfloat128 x4 = v_bf16_shuffle_b(                                                            \
                MXK_LD_L(mxk_x[(g) >> 2]), (uchar256)(unsigned char)(0x80 | (element & 15) | ((element & 16) << 1)), 0, \
                zero_bf16);                                                                                   \
            uchar256 rows = v_u8_mov_dual_group_all_b(row1, MXK_ALL_BYTES, 0, 0, 0, 0, MkWrA(0, 3, 0, 0), row0); \
            rows = v_u8_mov_dual_group_all_b(row2, MXK_ALL_BYTES, 0, 0, 0, 0, MkWrA(0, 0, 3, 0), rows);       \
            rows = v_u8_mov_dual_group_all_b(row3, MXK_ALL_BYTES, 0, 0, 0, 0, MkWrA(0, 0, 0, 3), rows);       \
            const ushort128 words = (ushort128)rows;                                                          \
            if (m == 7) NEXT                                                                                  \
            MXK_LOAD_ROWS                                                                                     \
            sum0 = v_bf16_mac_acc32_b(MXK_COLUMN_LOOKUP(v_u16_and_b(words, 0xF)), x4, sum0);                  \
            sum1 = v_bf16_mac_acc32_b(MXK_COLUMN_LOOKUP(v_u16_and_b(v_u16_shr_b(words, 4), 0xF)), x4, sum1);  \
            sum2 = v_bf16_mac_acc32_b(MXK_COLUMN_LOOKUP(v_u16_and_b(v_u16_shr_b(words, 8), 0xF)), x4, sum2);  \
            sum3 = v_bf16_mac_acc32_b(MXK_COLUMN_LOOKUP(v_u16_shr_b(words, 12)), x4, sum3);                   \
            sum_x = v_bf16_mac_acc32_b(one_bf16, x4, sum_x);                                                  \
            MXK_CHUNK_ROWS(1);                                                                                \
        }                                                                                                     \
        const ushort128 zero_words = (ushort128)v_u8_mov_dual_group_all_b(                                    \
            zeros, MXK_ALL_BYTES, 0, 0, 0, 0, MXK_ALL_GROUPS, zeros);                                         \
        MXK_COLUMN_ZERO_POINT(0, v_u16_and_b(zero_words, 0xF))                                                \
        MXK_COLUMN_ZERO_POINT(1, v_u16_and_b(v_u16_shr_b(zero_words, 4), 0xF))                                \
        MXK_COLUMN_ZERO_POINT(2, v_u16_and_b(v_u16_shr_b(zero_words, 8), 0xF))                                \
        MXK_COLUMN_ZERO_POINT(3, v_u16_shr_b(zero_words, 12))                                                 \
        MXK_COLUMN_SCALE(total, 0)                                                                            \
        MXK_COLUMN_SCALE(total, 1)                                                                            \
        MXK_COLUMN_SCALE(total, 2)                                                                            \
        MXK_COLUMN_SCALE(total, 3)                                                                            \
    }

#define MXK_COLUMN_TOTALS(total)                                                                              \
    float128 total##0, total##1, total##2, total##3;                                                          \
    MXK_COLUMN_ZERO(total##0)                                                                                 \
    MXK_COLUMN_ZERO(total##1)                                                                                 \
    MXK_COLUMN_ZERO(total##2)                                                                                 \
    MXK_COLUMN_ZERO(total##3)

// Dual group p of `result`: plane p summed over the four rows' dual groups; v1 the even words, v2 the odd ones.
#define MXK_COLUMN_RESULT(result, total)                                                                      \
    float128 result;                                                                                          \
    MXK_COLUMN_HALF(result, v1, MXK_PLANE_SUM(total, 0), MXK_PLANE_SUM(total, 1), MXK_PLANE_SUM(total, 2),    \
                    MXK_PLANE_SUM(total, 3))                                                                  \
    MXK_COLUMN_HALF(result, v2, MXK_PLANE_SUM(total, 0), MXK_PLANE_SUM(total, 1), MXK_PLANE_SUM(total, 2),    \
                    MXK_PLANE_SUM(total, 3))
#define MXK_PLANE_SUM(total, p) total##p
#define MXK_COLUMN_HALF(result, half, a, b, c, d) MXK_DUAL_GROUPS(result.half, a.half, b.half, c.half, d.half)

#endif
