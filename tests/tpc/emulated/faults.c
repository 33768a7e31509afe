// One thing each that the device does not do; `which` picks it.
__local__ float64 kept[2];
__local__ int order[4];

void main(tensor x, tensor ids, tensor y, int which)
{
    int5 at = {0, 0, 0, 0, 0};
    const int5 box = get_index_space_offset();
    float64 v = v_f32_ld_tnsr_b(at, x);
    const uint64 lane = read_lane_id_4b_b();
    const bfloat128 zero = 0;
    if (which == 1) { at[1] = 4; v = v_f32_ld_tnsr_b(at, x); }
    if (which == 2) { at[0] = -1; v = v_f32_ld_tnsr_b(at, x); }
    if (which == 3) { at[0] = 256; v = v_f32_ld_tnsr_b(at, x); }
    if (which == 4) { v_f32_st_tnsr(at, x, v); }
    if (which == 5) { float64 never; v = v_f32_add_b(v, never); }
    if (which == 6) { v = v_f32_add_b(v, MXK_LD_L(kept[1])); }
    if (which == 7) { v = v_f32_shuffle_b(v, (uchar256)v_u32_or_b(lane, 0x80), 0, v); }
    if (which == 8) { v = v_f32_add_b(v, v, 1 << 7); }
    if (which == 9) { v = v_f32_ld_tnsr_b(at, y); }
    if (which == 10) { v_f32_st_tnsr(at, y, v); }
    if (which == 11) { at[0] = 3; at[1] = 2; s_i32_ld_g(gen_addr(at, ids)); }
    if (which == 12) { s_i32_ld_g((__global int *)gen_addr(at, ids) + 6); }
    if (which == 13) { v_bf16_lookup_1c((ushort128)lane, MXK_FID_E2M1, SW_BV32, zero); }
    if (which == 14) { v_bf16_lookup_1c((ushort128)lane, MXK_FID_E2M1, SW_BV16, zero); }
    if (which == 15) { v_bf16_lookup_1c((ushort128)v_u32_and_b(lane, 1), 77, SW_BV16, zero); }
    if (which == 16) { v_u8_ld_tnsr_b(at, x); }
    if (which == 17) { v_u32_shl_b(lane, 32); }
    if (which == 18) { at[0] = 256; at[1] = box[0] & 3; v_f32_st_tnsr(at, y, v); }
    if (which == 19) { v_f32_shuffle_b(v, (uchar256)(uint64)0x88888888, 0, v); }
    if (which == 21) { at[1] = box[0] & 3; v_f32_st_tnsr_partial(at, y, v, 3, 61); }
    if (which == 20) { order[0] = order[which - 16]; }
    if (which == 23) { order[0] = order[order[1]]; }
    if (which == 24) { order[order[1]] += 1; }
    if (which == 22) { get_dim_size(3, 0); }
}
