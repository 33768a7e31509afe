// Unpacks one expert's matrix to bf16, for prefill: d[n, c] = code * 2^(scale - 127), then the stock bf16 op runs.
//
// Tensors (torch order): w u8 [N, C/2], two E2M1 codes a byte, low nibble first; s u8 [N, C/32] E8M0; d bf16 [N, C].
//
// Every 128 values are written in order. 64 bytes of the row (dual group v of a chunk's load) hold them: replicated in all
// dual groups, a 16-bit shuffle gives lane j of dual group g the word 8g + j / 4, a shift by 4 (j & 3) its nibble. A dual
// group is exactly one scale block, so the scale is a shuffle with one source byte a dual group.
// 10.25 VPU ops for 128 values (41 a chunk-row; 10 LOAD cycles), 1296 bytes of memory traffic a chunk-row, of which a
// TPC's share of HBM bandwidth takes 29 cycles at 2 GHz (modelled).
//
// Bit-identical to an exact unpack for all codes and scales in emulation: the bf16 product is exact, 255 becomes NaN, 0 the
// subnormal 2^-127, 2^128 and above inf. Whether a device's multiply keeps subnormals is not public: scales 0 and 1 rely on it.
//
// Work split: a TPC owns ceil(N / 24) rows. C a multiple of 32: loads beyond a row are zero, stores beyond it are culled.
// One chunk ahead is loaded; VLM is not used.
#include "mxk_common.h"

#define MXK_UNPACK(v)                                                                                         \
    {                                                                                                         \
        ushort128 words = (ushort128)v_u8_mov_dual_group_all_b(packed, MXK_ALL_BYTES, v, v, v, v, MXK_ALL_GROUPS, packed); \
        words = v_u16_shuffle_b(words, word_control, 0, words);                                               \
        words = v_u16_and_b(v_u16_shr_b(words, nibble_shift), 0xF);                                           \
        const bfloat128 codes = v_bf16_lookup_1c(words, MXK_FID_E2M1, SW_BV16, zero_bf16);                    \
        const uchar256 control = v_u8_add_b(scale_control, (uchar256)(ushort128)(4 * (v)));                   \
        const ushort128 byte = (ushort128)v_u8_shuffle_b(scales, control, 0, zero_u8);                        \
        const ushort128 factor = v_u16_sel_eq_u16_b(byte, 0, 0x0040, v_u16_shl_b(byte, 7));                   \
        const ushort128 value = (ushort128)v_bf16_mul_b(codes, (bfloat128)factor);                            \
        at_d[0] = 512 * c + 128 * (v);                                                                        \
        if (at_d[0] < num_values) {                                                                           \
            v_bf16_st_tnsr(at_d, d, (bfloat128)v_u16_sel_eq_u16_b(byte, 255, 0x7FC0, value));                 \
        }                                                                                                     \
    }

void main(tensor w, tensor s, tensor d)
{
    MXK_REGION(prologue);
    const int5 box_start = get_index_space_offset();
    const int5 box_end = get_index_space_size() + box_start;
    const int num_values = get_dim_size(d, 0);
    const int num_rows = get_dim_size(d, 1);
    const int slice = MXK_SLICE(num_rows);
    const int num_chunks = (num_values + 511) >> 9;
    const bfloat128 zero_bf16 = 0;
    const uchar256 zero_u8 = 0;
    const ushort128 lane = read_lane_id_2b_b();
    const short128 nibble_shift = (short128)v_u16_shl_b(v_u16_and_b(lane, 3), 2);
    // Word 8g + j / 4 of a dual group, g = lane / 32, j = lane % 32: element & 15 of group element / 16.
    uchar256 word_control;
    {
        const ushort128 word =
            v_u16_or_b(v_u16_shl_b(v_u16_shr_b(lane, 5), 3), v_u16_shr_b(v_u16_and_b(lane, 31), 2));
        ushort128 bits = v_u16_or_b(v_u16_and_b(word, 15), v_u16_shl_b(v_u16_shr_b(word, 4), 5));
        bits = v_u16_or_b(bits, 0x80);
        word_control = (uchar256)v_u16_or_b(bits, v_u16_shl_b(bits, 8)); // both bytes of a 16-bit element agree
    }
    // Scale byte g (of 4v + g) in the low byte of each element; the high byte is disabled and becomes 0.
    const uchar256 scale_control = (uchar256)v_u16_or_b(v_u16_shr_b(lane, 5), 0x0080);
    int5 at_w = {0, 0, 0, 0, 0};
    int5 at_s = {0, 0, 0, 0, 0};
    int5 at_d = {0, 0, 0, 0, 0};

    for (int point = box_start[0]; point < box_end[0]; point += 1) {
        const int first = point * slice;
        const int end = s_i32_min(first + slice, num_rows);
        if (first < end) {
            at_w[1] = first;
            at_s[1] = first;
            at_w[0] = 0;
            at_s[0] = 0;
            uchar256 next_packed = v_u8_ld_tnsr_b(at_w, w);
            uchar256 next_scales = v_u8_ld_tnsr_b(at_s, s);
            for (int row = first; row < end; row += 1) {
                MXK_REGION(chunk);
                at_d[1] = row;
                for (int c = 0; c < num_chunks; c += 1) {
                    const uchar256 packed = next_packed;
                    const uchar256 scales =
                        v_u8_mov_dual_group_all_b(next_scales, MXK_ALL_BYTES, 0, 0, 0, 0, MXK_ALL_GROUPS, next_scales);
                    if (c + 1 < num_chunks) {
                        at_w[0] += 256;
                        at_s[0] += 16;
                    } else {
                        at_w[0] = 0;
                        at_s[0] = 0;
                        at_w[1] = s_i32_min(row + 1, end - 1);
                        at_s[1] = at_w[1];
                    }
                    next_packed = v_u8_ld_tnsr_b(at_w, w);
                    next_scales = v_u8_ld_tnsr_b(at_s, s);
                    MXK_UNPACK(0)
                    MXK_UNPACK(1)
                    MXK_UNPACK(2)
                    MXK_UNPACK(3)
                    MXK_CHUNK_ROWS(1);
                }
            }
        }
    }
}
