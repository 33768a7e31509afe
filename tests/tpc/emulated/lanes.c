// One row of `out` for each lane rule; test_emulator.py has the numpy model of each.
#define PUT(value)                                   \
    at[1] = row;                                     \
    v_u8_st_tnsr(at, out, (uchar256)(value));        \
    row = row + 1;
#define PUT_PAIR(value)                              \
    {                                                \
        const float128 pair = value;                 \
        PUT(pair.v1)                                 \
        PUT(pair.v2)                                 \
    }

void main(tensor a, tensor b, tensor c, tensor words, tensor out, tensor packed)
{
    int5 at = {0, 0, 0, 0, 0};
    int row = 0;
    const uchar256 va = v_u8_ld_tnsr_b(at, a);
    const uchar256 vb = v_u8_ld_tnsr_b(at, b);
    const uchar256 control = v_u8_ld_tnsr_b(at, c);
    const bfloat128 x = (bfloat128)va;
    const bfloat128 y = (bfloat128)vb;
    const ushort128 low_bytes = v_u16_and_b((ushort128)control, 0xFF);
    float128 sums;
    sums.v1 = 1.5f;
    sums.v2 = -0.25f;
    PUT_PAIR(v_convert_bf16_to_f32_all_b(x))
    PUT(v_convert_f32_to_bf16_all_b(v_bf16_mul_acc32_b(x, y), SW_RHNE))
    PUT_PAIR(v_bf16_mac_acc32_b(x, y, sums))
    PUT_PAIR(v_bf16_mac_acc32_b(x, y, sums, SW_NEG))
    PUT(v_bf16_mul_b(x, y))
    PUT(v_u8_mov_dual_group_all_b(va, 0xFFFFFFFF, 2, 0, 3, 1, MkWrA(3, 3, 3, 3), vb))
    PUT(v_u8_mov_dual_group_all_b(va, 0x00FFFF0F, 2, 0, 3, 1, MkWrA(1, 2, 0, 3), vb))
    PUT(v_u8_mov_dual_group_b(va, 0xFFFFFFFF, 1, 3, MkWr(1, 0), vb))
    PUT(v_u8_mov_group_b(va, 0xFFFFFFFF, 63, vb))
    PUT(v_u8_mov_group_b(va, 0xF0F0F0F0, SW_GROUP0_EN | SW_DUAL_GROUP1_EN | SW_DUAL_GROUP3_EN, vb))
    PUT(v_u8_shuffle_b(va, control, 0, vb))
    PUT(v_u16_shuffle_b((ushort128)va, (uchar256)v_u16_or_b(v_u16_and_b(low_bytes, 0xAF), v_u16_shl_b(v_u16_and_b(low_bytes, 0xAF), 8)), 0, (ushort128)vb))
    PUT(v_bf16_lookup_1c(v_u16_and_b((ushort128)va, 15), MXK_FID_E2M1, SW_BV16, x))
    PUT(v_bf16_lookup_1c(v_u16_and_b((ushort128)va, 15), MXK_FID_INT4, SW_BV16, x))
    PUT(v_bf16_lookup_1c(v_u16_and_b((ushort128)va, 15), MXK_FID_SINT4, SW_BV16, x))
    const bfloat256 none = {0};
    const bfloat256 both = v_bf16_lookup_2c(v_u16_shr_b((ushort128)va, 8), MXK_FID_E2M1_PAIR, SW_BV16, none);
    PUT(both.v1)
    PUT(both.v2)
    PUT(v_u16_shr_b((ushort128)va, (short128)v_u16_and_b((ushort128)vb, 15)))
    PUT(v_f32_sel_less_f32_b((float64)v_u32_and_b((uint64)va, 0x3FFFFFFF), (float64)v_u32_and_b((uint64)vb, 0x3FFFFFFF), (float64)va, (float64)vb))
    PUT(v_f32_shuffle_b((float64)va, (uchar256)(uint64)0xA5A5A5A5, 0, (float64)vb))
    at[1] = 0;
    const ushort128 unpacked = v_u16_ld_tnsr_b(at, words, SW_UNPACK | SW_UNPCK_16_TO_32);
    PUT(unpacked)
    at[1] = 0;
    v_u16_st_tnsr(at, packed, (ushort128)va, SW_PACK | SW_PCK_32_TO_16);
}
