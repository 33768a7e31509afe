// Gated activations in fp32 on whole vectors, from VPU arithmetic alone: a function table would share the small table
// cache with the weights' LOOKUP table, and the compiler's tables are not public, so they could not be emulated exactly.
#ifndef MXK_ACTIVATION_H
#define MXK_ACTIVATION_H

// 1 / (1 + exp(-a)), relative error below 2e-7 for |a| < 86 (against fp64), beyond that below 1e-37 or 1e-7 absolute; NaN
// stays NaN. 27 VPU ops.
static inline float64 mxk_sigmoid(float64 a)
{
    // exp of t in +-87: 2^n * e^r, n = round(t / ln 2). Adding 1.5 * 2^23 leaves n in the low bits of the sum.
    const float64 one = 1.0f;
    const float64 two = 2.0f;
    const float64 magic = 12582912.0f;
    const uint64 estimate = 0x7EF311C3;
    float64 t = v_f32_mul_b(a, -1.0f);
    t = v_f32_sel_grt_f32_b(t, 87.0f, 87.0f, t);
    t = v_f32_sel_less_f32_b(t, -87.0f, -87.0f, t);
    const float64 shifted = v_f32_mac_b(t, 1.44269504f, magic);
    const float64 n = v_f32_sub_b(shifted, magic);
    float64 r = v_f32_mac_b(n, 0.693359375f, t, SW_NEG); // ln 2 in two parts, the first exact in products with n
    r = v_f32_mac_b(n, -2.12194440e-4f, r, SW_NEG);
    // Degree 5 minimax polynomial of (e^r - 1 - r) / r^2 on +-ln 2 / 2 (Cephes expf coefficients).
    float64 p = 1.9875691500e-4f;
    p = v_f32_mac_b(p, r, (float64)1.3981999507e-3f);
    p = v_f32_mac_b(p, r, (float64)8.3334519073e-3f);
    p = v_f32_mac_b(p, r, (float64)4.1665795894e-2f);
    p = v_f32_mac_b(p, r, (float64)1.6666665459e-1f);
    p = v_f32_mac_b(p, r, (float64)5.0000001201e-1f);
    p = v_f32_mac_b(p, v_f32_mul_b(r, r), r);
    p = v_f32_add_b(p, one);
    const float64 e = (float64)v_u32_add_b((uint64)p, v_u32_shl_b((uint64)shifted, 23));
    // Reciprocal of d = 1 + e, 1 <= d < 2^126: 12 % from the bits, then Newton, error squared four times.
    const float64 d = v_f32_add_b(e, one);
    float64 y = (float64)v_u32_sub_b(estimate, (uint64)d);
    y = v_f32_mul_b(y, v_f32_mac_b(d, y, two, SW_NEG));
    y = v_f32_mul_b(y, v_f32_mac_b(d, y, two, SW_NEG));
    y = v_f32_mul_b(y, v_f32_mac_b(d, y, two, SW_NEG));
    y = v_f32_mul_b(y, v_f32_mac_b(d, y, two, SW_NEG));
    return y;
}

// Clamps are selections: a NaN fails every comparison and stays, as in torch.
#define MXK_AT_MOST(a, limit) v_f32_sel_grt_f32_b(a, limit, limit, a)
#define MXK_AT_LEAST(a, limit) v_f32_sel_less_f32_b(a, limit, limit, a)

#endif
