// The chunk loop: dot products of four packed weight rows with one activation row, 512 values (a chunk) a step.
//
// Computes  sum_k w[row, k] * x[k]  for rows 0..3, fp32, w = code * 2^(scale - 127) with one scale for 32 values.
//
// Operands of a chunk c
//   weight row  256 bytes, two codes a byte, low nibble first. As 128 words of 16 bits, nibble p of word i is element
//               4i + p: four "planes" of 128 lanes come out of one register by shift and mask, no lane moves.
//   x           chunk order: plane p (128 bf16) holds elements 512c + 4i + p, so plane meets plane lane by lane.
//   scale row   16 bytes a chunk; fp32 lane i of a product (both halves: words 2i and 2i + 1) has scale byte i / 4, so
//               one vector of 64 fp32 scales serves the whole chunk-row.
//
// Schedule
//   Four rows in lockstep, plane by plane: four independent accumulators cover the four cycles of MAC latency, one
//   activation load serves four rows, and only one plane of weights is live. Chunks come in pairs, whose weights (8
//   registers) and scales (4; one 32-byte piece of the row serves a pair) were loaded a pair ahead: each register is
//   reloaded for the next pair once its last plane is out. MXK_NEXT_PASS points the loads of a pass's last pair at the
//   first pair of the next pass, perhaps of another expert: one stream of loads over all passes.
//   Registers: weights 8, scales 8, products 8, sums 4, controls and zeros 4, temporaries 4: 36 of 40.
//
// VPU ops a chunk-row (counted by the emulator; tests/tpc/test_kernels.py holds them)
//                               decode  scale  MAC  scaling   sum
//   default                          6    2.5    4        2  14.5   products of unscaled codes in fp32, then one fused
//                                                                   multiply-add with the scale: each partial sum is
//                                                                   rounded, exact scaling, no bf16 under- or overflow
//   -DMXK_SCALE_BF16                 6    2.5    4        4  16.5   scale multiplied into the bf16 weight (published)
//   MXK_INT4                         6    1.5    4        2  13.5   codes - 8, bf16 scale per 32: no shift to fp32
//   -DMXK_PAIR_LOOKUP                2    2.5    4        2  10.5   one lookup decodes both nibbles of a byte. Off: how a
//                                                                   256-entry bf16 pair table lies in memory is not public
// LOAD slot, cycles a chunk-row: 8 lookups (4 with pairs), 1 weight, 0.5 scale, 1 activation.
//
// E8M0 bytes 1..254 are exact. 0 acts as 0 and not as 2^-127, 255 as inf and not as NaN: lazy mode refuses weights with 255 at
// load, and 0 changes a sum by less than 2^-122 of the activation.
//
// Bytes beyond a row's end load as zero: code 0 is 0.0, so a last chunk may be partial.
#ifndef MXK_DOT_H
#define MXK_DOT_H

// Kernel-wide names that the macros below use: x planes through MXK_X_LOCAL or MXK_X_TENSOR, weights `mxk_w`, scales
// `mxk_s` (tensor ids).
#define MXK_DOT_STATE                                                                                         \
    const bfloat128 zero_bf16 = 0;                                                                            \
    const uchar256 zero_u8 = 0;                                                                               \
    const uint64 lane = read_lane_id_4b_b();                                                                  \
    const uint64 lane16 = v_u32_and_b(lane, 15); /* lane of a dual group */                                   \
    MXK_SCALE_CONTROLS                                                                                        \
    uchar256 swap4, swap2, swap1; /* lanes l ^ 4, l ^ 2, l ^ 1 of a group of eight */                         \
    {                                                                                                         \
        const uint64 lane8 = v_u32_and_b(lane, 7);                                                            \
        MXK_CONTROL_32(swap4, v_u32_xor_b(lane8, 4))                                                          \
        MXK_CONTROL_32(swap2, v_u32_xor_b(lane8, 2))                                                          \
        MXK_CONTROL_32(swap1, v_u32_xor_b(lane8, 1))                                                          \
    }                                                                                                         \
    ushort128 wa0, wa1, wa2, wa3, wb0, wb1, wb2, wb3;                                                         \
    uchar256 s0, s1, s2, s3;                                                                                  \
    int5 at_w0 = {0, 0, 0, 0, 0}, at_w1 = {0, 0, 0, 0, 0}, at_w2 = {0, 0, 0, 0, 0}, at_w3 = {0, 0, 0, 0, 0};   \
    int5 at_s0 = {0, 0, 0, 0, 0}, at_s1 = {0, 0, 0, 0, 0}, at_s2 = {0, 0, 0, 0, 0}, at_s3 = {0, 0, 0, 0, 0};

// Shuffle controls: byte lane b of a chunk takes scale byte b / 16 (first chunk of a pair) or 16 + b / 16 (second) of the
// 32 bytes replicated in every dual group, in the lowest byte of an element; the others are disabled and become 0.
#if defined(MXK_INT4)
// bf16 scales: 16 of a chunk are half a dual group, so the second chunk's are the upper group's; a scale goes to the upper
// half of an fp32 lane, which makes it fp32. Both bytes of a 16-bit element's control agree.
#define MXK_SCALE_CONTROLS                                                                                    \
    uchar256 first_scale;                                                                                     \
    {                                                                                                         \
        uint64 bits = v_u32_or_b(v_u32_shr_b(lane, 2), 0x80);                                                 \
        bits = v_u32_or_b(bits, v_u32_shl_b(bits, 8));                                                        \
        first_scale = (uchar256)v_u32_shl_b(bits, 16);                                                        \
    }                                                                                                         \
    const uchar256 second_scale = v_u8_or_b(first_scale, (uchar256)(uint64)0x20200000);
#elif defined(MXK_SCALE_BF16)
#define MXK_SCALE_CONTROLS                                                                                    \
    uchar256 first_scale = v_u8_or_b(v_u8_shr_b(read_lane_id_1b_b(), 4), 0x80);                               \
    first_scale = (uchar256)v_u16_and_b((ushort128)first_scale, 0x00FF);                                      \
    const uchar256 second_scale = v_u8_or_b(first_scale, (uchar256)(ushort128)0x0010);
#else
#define MXK_SCALE_CONTROLS                                                                                    \
    uchar256 first_scale = v_u8_or_b(v_u8_shr_b(read_lane_id_1b_b(), 4), 0x80);                               \
    first_scale = (uchar256)v_u32_and_b((uint64)first_scale, 0x000000FF);                                     \
    const uchar256 second_scale = v_u8_or_b(first_scale, (uchar256)(uint64)0x0010);
#endif

// Activation planes: from local memory; MXK_X_TAIL takes chunks from MXK_LOCAL_CHUNKS on from the tensor (`at_x` is a
// coordinate of its row), by a predicated load over the local value.
#define MXK_X_LOCAL(plane, c, p) const bfloat128 plane = MXK_LD_L(mxk_x[4 * (c) + (p)]);
#define MXK_X_TAIL(plane, c, p)                                                                               \
    at_x[0] = 512 * (c) + 128 * (p);                                                                          \
    const bfloat128 plane = v_bf16_ld_tnsr_b(                                                                 \
        at_x, x, 0, MXK_LD_L(mxk_x[4 * s_i32_min(c, MXK_LOCAL_CHUNKS - 1) + (p)]), (c) >= MXK_LOCAL_CHUNKS);

#ifdef MXK_INT4
#define MXK_FID MXK_FID_INT4
#define MXK_FID_PAIR MXK_FID_INT4_PAIR
#define MXK_SCALE_LOAD(at) (uchar256)v_bf16_ld_tnsr_b(at, mxk_s)
#define MXK_SCALE_F32(s, control)                                                                             \
    (float64)v_u16_shuffle_b((ushort128)s, control, 0, (ushort128)zero_u8)
#else
#define MXK_FID MXK_FID_E2M1
#define MXK_FID_PAIR MXK_FID_E2M1_PAIR
#define MXK_SCALE_LOAD(at) v_u8_ld_tnsr_b(at, mxk_s)
#define MXK_SCALE_F32(s, control) (float64)v_u32_shl_b((uint64)v_u8_shuffle_b(s, control, 0, zero_u8), 23)
#endif

#define MXK_SPREAD_SCALES(s) s = v_u8_mov_dual_group_all_b(s, MXK_ALL_BYTES, 0, 0, 0, 0, MXK_ALL_GROUPS, zero_u8);

#define MXK_LOOKUP(i) v_bf16_lookup_1c(i, MXK_FID, SW_BV16, zero_bf16)
#define MXK_NIBBLE_0(w) v_u16_and_b(w, 0xF)
#define MXK_NIBBLE_1(w) v_u16_and_b(v_u16_shr_b(w, 4), 0xF)
#define MXK_NIBBLE_2(w) v_u16_and_b(v_u16_shr_b(w, 8), 0xF)
#define MXK_NIBBLE_3(w) v_u16_shr_b(w, 12)

#ifdef MXK_SCALE_BF16
#define MXK_SUM float128
#define MXK_SUM_ZERO(a) a.v1 = 0; a.v2 = 0;
#define MXK_FOLD(a) v_f32_add_b(a.v1, a.v2)
#define MXK_CHUNK_BEGIN(r, control)                                                                           \
    const bfloat128 scale##r = (bfloat128)v_u16_shl_b((ushort128)v_u8_shuffle_b(s##r, control, 0, zero_u8), 7);
#define MXK_FIRST_PLANE(r, weights, plane)                                                                    \
    sum##r = v_bf16_mac_acc32_b(v_bf16_mul_b(weights, scale##r), plane, sum##r);
#define MXK_PLANE(r, weights, plane)                                                                          \
    sum##r = v_bf16_mac_acc32_b(v_bf16_mul_b(weights, scale##r), plane, sum##r);
#define MXK_CHUNK_END(r, control)
#else
#define MXK_SUM float64
#define MXK_SUM_ZERO(a) a = 0;
#define MXK_FOLD(a) (a)
#define MXK_CHUNK_BEGIN(r, control) float128 products##r;
#define MXK_FIRST_PLANE(r, weights, plane) products##r = v_bf16_mul_acc32_b(weights, plane);
#define MXK_PLANE(r, weights, plane) products##r = v_bf16_mac_acc32_b(weights, plane, products##r);
#define MXK_CHUNK_END(r, control)                                                                             \
    sum##r = v_f32_mac_b(v_f32_add_b(products##r.v1, products##r.v2), MXK_SCALE_F32(s##r, control), sum##r);
#endif

#define MXK_FOUR(MACRO, ...) MACRO(0, __VA_ARGS__) MACRO(1, __VA_ARGS__) MACRO(2, __VA_ARGS__) MACRO(3, __VA_ARGS__)

#ifdef MXK_PAIR_LOOKUP
#define MXK_LOW_BYTE(r, w)                                                                                    \
    const bfloat256 low##r = v_bf16_lookup_2c(v_u16_and_b(w##r, 0xFF), MXK_FID_PAIR, SW_BV16, zero_pair);     \
    MXK_FIRST_PLANE(r, low##r.v1, plane0)
#define MXK_LOW_REST(r, w) MXK_PLANE(r, low##r.v2, plane1)
#define MXK_HIGH_BYTE(r, w)                                                                                   \
    const bfloat256 high##r = v_bf16_lookup_2c(v_u16_shr_b(w##r, 8), MXK_FID_PAIR, SW_BV16, zero_pair);       \
    MXK_PLANE(r, high##r.v1, plane2)
#define MXK_HIGH_REST(r, w) MXK_PLANE(r, high##r.v2, plane3)
#define MXK_PLANES(w, c, X)                                                                                   \
    const bfloat256 zero_pair = {0};                                                                          \
    X(plane0, c, 0)                                                                                           \
    MXK_FOUR(MXK_LOW_BYTE, w)                                                                                 \
    X(plane1, c, 1)                                                                                           \
    MXK_FOUR(MXK_LOW_REST, w)                                                                                 \
    X(plane2, c, 2)                                                                                           \
    MXK_FOUR(MXK_HIGH_BYTE, w)                                                                                \
    X(plane3, c, 3)                                                                                           \
    MXK_FOUR(MXK_HIGH_REST, w)
#else
#define MXK_PLANE_0(r, w) MXK_FIRST_PLANE(r, MXK_LOOKUP(MXK_NIBBLE_0(w##r)), plane0)
#define MXK_PLANE_1(r, w) MXK_PLANE(r, MXK_LOOKUP(MXK_NIBBLE_1(w##r)), plane1)
#define MXK_PLANE_2(r, w) MXK_PLANE(r, MXK_LOOKUP(MXK_NIBBLE_2(w##r)), plane2)
#define MXK_PLANE_3(r, w) MXK_PLANE(r, MXK_LOOKUP(MXK_NIBBLE_3(w##r)), plane3)
#define MXK_PLANES(w, c, X)                                                                                   \
    X(plane0, c, 0)                                                                                           \
    MXK_FOUR(MXK_PLANE_0, w)                                                                                  \
    X(plane1, c, 1)                                                                                           \
    MXK_FOUR(MXK_PLANE_1, w)                                                                                  \
    X(plane2, c, 2)                                                                                           \
    MXK_FOUR(MXK_PLANE_2, w)                                                                                  \
    X(plane3, c, 3)                                                                                           \
    MXK_FOUR(MXK_PLANE_3, w)
#endif

#define MXK_LOAD_FIRST(r, unused)                                                                             \
    wa##r = (ushort128)v_u8_ld_tnsr_b(at_w##r, mxk_w);                                                        \
    at_w##r[0] += 256;
#define MXK_LOAD_SECOND(r, unused)                                                                            \
    wb##r = (ushort128)v_u8_ld_tnsr_b(at_w##r, mxk_w);                                                        \
    at_w##r[0] += 256;                                                                                        \
    s##r = MXK_SCALE_LOAD(at_s##r);                                                                           \
    at_s##r[0] += 32;

// First chunk of a pair, then the loads of the next pair's first chunk.
#define MXK_SPREAD(r, unused) MXK_SPREAD_SCALES(s##r)
#define MXK_FIRST_CHUNK(c, X)                                                                                 \
    {                                                                                                         \
        MXK_FOUR(MXK_SPREAD, 0)                                                                               \
        MXK_FOUR(MXK_CHUNK_BEGIN, first_scale)                                                                \
        MXK_PLANES(wa, c, X)                                                                                  \
        MXK_FOUR(MXK_CHUNK_END, first_scale)                                                                  \
        MXK_FOUR(MXK_LOAD_FIRST, 0)                                                                           \
        MXK_CHUNK_ROWS(4);                                                                                    \
    }

// Second chunk of a pair, then the rest of the next pair's loads.
#define MXK_SECOND_CHUNK(c, X)                                                                                \
    {                                                                                                         \
        MXK_FOUR(MXK_CHUNK_BEGIN, second_scale)                                                               \
        MXK_PLANES(wb, c, X)                                                                                  \
        MXK_FOUR(MXK_CHUNK_END, second_scale)                                                                 \
        MXK_FOUR(MXK_LOAD_SECOND, 0)                                                                          \
        MXK_CHUNK_ROWS(4);                                                                                    \
    }

// Points the loads at the start of four rows of one expert.
#define MXK_ROW_AT(r, row, expert)                                                                            \
    at_w##r[0] = 0;                                                                                           \
    at_w##r[1] = row;                                                                                         \
    at_w##r[2] = expert;                                                                                      \
    at_s##r[0] = 0;                                                                                           \
    at_s##r[1] = row;                                                                                         \
    at_s##r[2] = expert;
#define MXK_NEXT_PASS(row0, row1, row2, row3, expert)                                                         \
    MXK_ROW_AT(0, row0, expert)                                                                               \
    MXK_ROW_AT(1, row1, expert)                                                                               \
    MXK_ROW_AT(2, row2, expert)                                                                               \
    MXK_ROW_AT(3, row3, expert)

// Fills the pipeline, after the first MXK_NEXT_PASS.
#define MXK_FIRST_LOADS MXK_FOUR(MXK_LOAD_FIRST, 0) MXK_FOUR(MXK_LOAD_SECOND, 0)

// A pair; a row of an odd number of chunks ends half way. In a pass's last pair the loads point at the next pass already.
#define MXK_PAIR(c, num_chunks, X)                                                                            \
    MXK_FIRST_CHUNK(c, X)                                                                                     \
    if ((c) + 1 < (num_chunks)) {                                                                             \
        MXK_SECOND_CHUNK((c) + 1, X)                                                                          \
    } else {                                                                                                  \
        MXK_FOUR(MXK_LOAD_SECOND, 0)                                                                          \
    }

// Four sums of 64 lanes to one vector: every lane of dual group g holds the total of row g. 20 VPU ops instead of 48.
// Rows 0 and 1 (2 and 3) are interleaved by dual group while adding halves; then the pairs are; then all four reduce
// together inside their dual groups.
#define MXK_INTERLEAVE(result, even, odd)                                                                     \
    float64 result;                                                                                           \
    {                                                                                                         \
        const float64 here = v_f32_mov_dual_group_all_b(odd, MXK_ALL_BYTES, 0, 1, 2, 3, MkWrA(0, 3, 0, 3), even); \
        float64 there = v_f32_mov_dual_group_all_b(even, MXK_ALL_BYTES, 1, 0, 3, 2, MkWrA(3, 0, 3, 0), odd);  \
        there = v_f32_mov_dual_group_all_b(odd, MXK_ALL_BYTES, 1, 0, 3, 2, MkWrA(0, 3, 0, 3), there);         \
        result = v_f32_add_b(here, there);                                                                    \
    }
#define MXK_DUAL_GROUPS(total, a0, a1, a2, a3)                                                                \
    {                                                                                                         \
        const float64 t0 = a0, t1 = a1, t2 = a2, t3 = a3;                                                     \
        MXK_INTERLEAVE(rows01, t0, t1)                                                                        \
        MXK_INTERLEAVE(rows23, t2, t3)                                                                        \
        const float64 here =                                                                                  \
            v_f32_mov_dual_group_all_b(rows23, MXK_ALL_BYTES, 0, 1, 2, 3, MkWrA(0, 0, 3, 3), rows01);         \
        float64 there = v_f32_mov_dual_group_all_b(rows01, MXK_ALL_BYTES, 2, 3, 0, 1, MkWrA(3, 3, 0, 0), rows23); \
        there = v_f32_mov_dual_group_all_b(rows23, MXK_ALL_BYTES, 2, 3, 0, 1, MkWrA(0, 0, 3, 3), there);      \
        total = v_f32_add_b(here, there);                                                                     \
    }
#define MXK_REDUCE(total, a0, a1, a2, a3)                                                                     \
    {                                                                                                         \
        MXK_DUAL_GROUPS(total, a0, a1, a2, a3)                                                                \
        total = v_f32_add_b(total, v_f32_mov_group_b(total, MXK_ALL_BYTES, MXK_SWAP_GROUPS, total));          \
        total = v_f32_add_b(total, v_f32_shuffle_b(total, swap4, 0, total));                                  \
        total = v_f32_add_b(total, v_f32_shuffle_b(total, swap2, 0, total));                                  \
        total = v_f32_add_b(total, v_f32_shuffle_b(total, swap1, 0, total));                                  \
    }

#define MXK_PASS_TOTAL(total) MXK_REDUCE(total, MXK_FOLD(sum0), MXK_FOLD(sum1), MXK_FOLD(sum2), MXK_FOLD(sum3))

#endif
