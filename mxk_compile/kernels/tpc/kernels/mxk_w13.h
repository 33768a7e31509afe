// Gate and up projection with activation: the body of the mxk_w13* kernels.
//
//   a[route, j] = bf16(activation(gate_j, up_j)),  gate_j, up_j = rows of w13[expert] . x[token] (+ b13), all fp32
//
// Tensors (torch order; T tokens, k slots, E local experts, KP / IP = K / I rounded up to 512)
//   x    bf16 [T, KP]        chunk order (mxk_dot.h), zero beyond K
//   ids  i32  [T, k]         global expert ids; a route is local if experts_min <= id < experts_min + E
//   w13  u8   [E, 2I, K/2]   s13 u8 [E, 2I, K/32]   as served
//   b13  f32  [E, 2I]        row order of w13 (MXK_BIAS)
//   a    bf16 [T*k, IP]      chunk order, zero beyond I. Rows of routes that are not local are not written: w2 skips them.
//
// Switches: MXK_INTERLEAVED (gate rows even, else first I rows), MXK_CLAMP (gate <= limit, |up| <= limit), MXK_OAI (then
// gate * sigmoid(alpha * gate) * (up + 1)), MXK_BIAS, MXK_TAIL (activations beyond 6144 values from memory).
//
// Work split: a TPC owns a fixed slice of I / 4 column quads, ceil(I / 96) of them, whatever the routing, and walks all
// local routes by expert. A pass is gate and up rows of two columns; a run is up to 16 passes, 8 quads, 32 columns.
// Row totals collect in one vector over a run: dual groups hold gate, up of the pass's first column, gate, up of its
// second. Bias, activation and store then work on whole vectors, once a run: about 35 VPU ops, not twice 27 a pass.
//
// Lanes: pass (quad i, half h) writes lane 8 (i & 1) + 4 h + i / 2 of each dual group, so that a vector and its copy with
// groups swapped convert to bf16 lanes 8 h .. 8 h + 7 = quads 0 .. 7 of one plane: four partial stores, one a plane.
//
// Limits: K, I multiples of 32; K <= 6144 (MXK_TAIL: 8192, published), since 12 KB of the 16 KB of vector local memory that
// a kernel with LOOKUP gets hold the activation row; T*k <= 128, E <= 128 (scalar tables).
#include "mxk_common.h"
#include "mxk_dot.h"
#include "mxk_activation.h"
#ifdef MXK_SHARE
#include "mxk_share.h"
#endif

#define MXK_LOCAL_CHUNKS 12
__local__ bfloat128 mxk_x[4 * MXK_LOCAL_CHUNKS]; // 12 KB

#ifdef MXK_SHARE
#define MXK_SHARED_CHUNKS (MXK_LOCAL_CHUNKS / 4)
__local__ float64 mxk_runs[2]; // routes 0 and 1, routes 2 and 3: 512 bytes
#endif

#ifdef MXK_TAIL
#define MXK_X MXK_X_TAIL
#else
#define MXK_X MXK_X_LOCAL
#endif

#ifdef MXK_INTERLEAVED
#define MXK_PASS(pass, expert)                                                                                \
    {                                                                                                         \
        const int row = 8 * first_quad + 4 * (pass);                                                          \
        MXK_NEXT_PASS(row, row + 1, row + 2, row + 3, expert)                                                 \
    }
#else
#define MXK_PASS(pass, expert)                                                                                \
    {                                                                                                         \
        const int row = 4 * first_quad + 2 * (pass);                                                          \
        MXK_NEXT_PASS(row, num_columns + row, row + 1, num_columns + row + 1, expert)                         \
    }
#endif

// Four planes of `count` quads from quad `quad` on; `from` is the first quad's place in the run.
#define MXK_STORE_QUADS(quad, from, count)                                                                    \
    {                                                                                                         \
        at_a[0] = 512 * ((quad) >> 7) + ((quad) & 127);                                                       \
        MXK_PARTIAL_STORE(at_a, a, values, count, from)                                                       \
        at_a[0] = at_a[0] + 256;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, values, count, 8 + (from))                                                 \
        at_a[0] = at_a[0] - 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, values, count, 64 + (from))                                                \
        at_a[0] = at_a[0] + 256;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, values, count, 72 + (from))                                                \
    }

#define MXK_BIAS_GROUP(g, few, control)                                                                       \
    bias = v_f32_sel_eq_u32_b(                                                                                \
        v_u32_and_b(lane, few), g,                                                                            \
        v_f32_shuffle_b(v_f32_mov_dual_group_all_b(loaded, MXK_ALL_BYTES, g, g, g, g, MXK_ALL_GROUPS, loaded), \
                        control, 0, loaded),                                                                  \
        bias);

#ifdef MXK_SHARE
// A pass is one column of up to four routes, a run 16 columns. Column (quad i, plane p) is lane 8 (i & 1) + 2 p + i / 2, so
// that bf16 lanes 4 p .. 4 p + 3 of a route's dual group are quads 0 .. 3 of plane p.
#ifdef MXK_INTERLEAVED
#define MXK_SHARED_PASS(pass, expert)                                                                         \
    {                                                                                                         \
        const int row = 8 * first_quad + 2 * (pass);                                                          \
        MXK_NEXT_PASS(row, row + 1, row, row + 1, expert)                                                     \
    }
#else
#define MXK_SHARED_PASS(pass, expert)                                                                         \
    {                                                                                                         \
        const int row = 4 * first_quad + (pass);                                                              \
        MXK_NEXT_PASS(row, num_columns + row, row, num_columns + row, expert)                                 \
    }
#endif
#define MXK_STORE_SHARED_QUADS(quad, from, count, base)                                                       \
    {                                                                                                         \
        at_a[0] = 512 * ((quad) >> 7) + ((quad) & 127);                                                       \
        MXK_PARTIAL_STORE(at_a, a, values, count, (base) + (from))                                            \
        at_a[0] = at_a[0] + 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, values, count, (base) + 4 + (from))                                        \
        at_a[0] = at_a[0] + 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, values, count, (base) + 8 + (from))                                        \
        at_a[0] = at_a[0] + 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, values, count, (base) + 12 + (from))                                       \
    }
#define MXK_STORE_SHARED_ROUTE(q, base)                                                                       \
    if (q < size) {                                                                                           \
        at_a[1] = mxk_sorted[n + q];                                                                          \
        MXK_STORE_SHARED_QUADS(run_quad, 0, before, base)                                                     \
        if (before < count) MXK_STORE_SHARED_QUADS(run_quad + before, before, count - before, base)           \
    }
#define MXK_STORE_SHARED_PAIR(pair)                                                                           \
    {                                                                                                         \
        float64 finished = MXK_LD_L(mxk_runs[pair]);                                                          \
        MXK_ADD_SHARED_BIAS                                                                                   \
        MXK_ACTIVATE(finished)                                                                                \
        MXK_STORE_SHARED_ROUTE(2 * pair, 0)                                                                   \
        MXK_STORE_SHARED_ROUTE(2 * pair + 1, 64)                                                              \
    }
#ifdef MXK_BIAS
#define MXK_ADD_SHARED_BIAS finished = v_f32_add_b(finished, bias);
#else
#define MXK_ADD_SHARED_BIAS
#endif
#endif

#define MXK_STORE_PADDING                                                                                     \
    if (end_quad == num_quads && padding < 128) {                                                             \
        at_a[0] = 512 * (num_quads >> 7) + (num_quads & 127);                                                 \
        MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 0)                                                     \
        at_a[0] = at_a[0] + 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 1)                                                     \
        at_a[0] = at_a[0] + 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 2)                                                     \
        at_a[0] = at_a[0] + 128;                                                                              \
        MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 3)                                                     \
    }

#ifdef MXK_CLAMP
#define MXK_CLAMP_BOTH                                                                                        \
    gate = MXK_AT_MOST(gate, limit);                                                                          \
    up = MXK_AT_LEAST(MXK_AT_MOST(up, limit), -limit);
#else
#define MXK_CLAMP_BOTH
#endif
#ifdef MXK_OAI
#define MXK_GATE_SCALED v_f32_mul_b(gate, alpha)
#define MXK_UP_SHIFTED v_f32_add_b(up, 1.0f)
#else
#define MXK_GATE_SCALED gate
#define MXK_UP_SHIFTED up
#endif
// `values`: activations of a run in bf16. Dual groups of the run: gate, up, gate, up; those of the result: one, unused, two.
#define MXK_ACTIVATE(run)                                                                                     \
    bfloat128 values;                                                                                         \
    {                                                                                                         \
        float64 gate = run;                                                                                   \
        float64 up = v_f32_mov_dual_group_all_b(run, MXK_ALL_BYTES, 1, 1, 3, 3, MXK_ALL_GROUPS, run);         \
        MXK_CLAMP_BOTH                                                                                        \
        float128 both;                                                                                        \
        both.v1 = v_f32_mul_b(v_f32_mul_b(gate, mxk_sigmoid(MXK_GATE_SCALED)), MXK_UP_SHIFTED);               \
        both.v2 = v_f32_mov_group_b(both.v1, MXK_ALL_BYTES, MXK_SWAP_GROUPS, both.v1);                        \
        values = v_convert_f32_to_bf16_all_b(both, SW_RHNE);                                                  \
    }

void main(tensor x, tensor ids, tensor mxk_w, tensor mxk_s,
#ifdef MXK_BIAS
          tensor b13,
#endif
          tensor a, int experts_min
#ifdef MXK_OAI
          , float alpha
#endif
#ifdef MXK_CLAMP
          , float limit
#endif
)
{
    MXK_REGION(prologue);
    const int5 box_start = get_index_space_offset();
    const int5 box_end = get_index_space_size() + box_start;
    const int top_k = get_dim_size(ids, 0);
    const int num_tokens = get_dim_size(ids, 1);
    const int num_experts = get_dim_size(mxk_w, 2);
    const int num_columns = get_dim_size(mxk_w, 1) >> 1;
    const int num_chunks = get_dim_size(x, 0) >> 9;
    const int num_quads = num_columns >> 2;
    const int padding = 128 - (num_quads & 127); // quads of the last chunk beyond I; 128: none
    const int slice = MXK_SLICE(num_quads);
    int num_sorted;
    MXK_SORT_ROUTES(ids, top_k, num_tokens, num_experts, experts_min, num_sorted)
    MXK_DOT_STATE
#ifdef MXK_BIAS
    // Lane l of a run takes element 4 * (l & 4 ? 1 : 0) + dual group of the group l >> 3, see below.
    uchar256 bias_control;
    {
        const uint64 element = v_u32_add_b(v_u32_and_b(lane, 4), v_u32_shr_b(lane, 4));
        MXK_CONTROL_32(bias_control, v_u32_or_b(element, v_u32_shl_b(v_u32_and_b(lane, 8), 2)))
    }
    int5 at_b = {0, 0, 0, 0, 0};
#endif
#ifdef MXK_SHARE
    MXK_SHARE_STATE
#ifdef MXK_BIAS
    // 32 biases of 16 columns: element 8 i + 2 p + u of quad i, plane p, gate or up: dual group i / 2, group i & 1.
    uchar256 shared_bias_control;
    {
        const uint64 element = v_u32_add_b(v_u32_and_b(lane, 6), v_u32_and_b(v_u32_shr_b(lane, 4), 1));
        MXK_CONTROL_32(shared_bias_control, v_u32_or_b(element, v_u32_shl_b(v_u32_and_b(lane, 8), 2)))
    }
#endif
#endif
    int5 at_x = {0, 0, 0, 0, 0};
    int5 at_a = {0, 0, 0, 0, 0};

    for (int point = box_start[0]; point < box_end[0]; point += 1) {
        const int first_quad = point * slice;
        const int end_quad = s_i32_min(first_quad + slice, num_quads);
        const int num_passes = 2 * (end_quad - first_quad);
        if (num_passes > 0 && num_sorted > 0) {
            MXK_PASS(0, mxk_expert[mxk_sorted[0]])
            MXK_FIRST_LOADS
            for (int n = 0; n < num_sorted; n += 1) {
                MXK_REGION(prologue);
                const int route = mxk_sorted[n];
                const int expert = mxk_expert[route];
#ifdef MXK_SHARE
                int size;
                MXK_COUNT_SHARED(size, n, expert)
                if (size > 1) {
                    const int after = mxk_expert[mxk_sorted[s_i32_min(n + size, num_sorted - 1)]];
                    MXK_SHARED_FETCH(0, x, mxk_token[route])
                    MXK_SHARED_FETCH(1, x, mxk_token[mxk_sorted[n + 1]])
                    MXK_SHARED_FETCH(2, x, mxk_token[mxk_sorted[n + s_i32_min(2, size - 1)]])
                    MXK_SHARED_FETCH(3, x, mxk_token[mxk_sorted[n + size - 1]])
                    MXK_ST_L(mxk_runs[0], (float64)(float)(num_experts >> 8));
                    MXK_ST_L(mxk_runs[1], (float64)(float)(num_experts >> 8));
                    for (int pass = 0; pass < 2 * num_passes; pass += 1) {
                        MXK_REGION(chunk);
                        MXK_FOUR(MXK_SHARED_SUMS, 0)
                        for (int c = 0; c < num_chunks; c += 2) {
                            if (c + 2 >= num_chunks) {
                                if (pass + 1 < 2 * num_passes) MXK_SHARED_PASS(pass + 1, expert) else MXK_PASS(0, after)
                            }
                            MXK_SHARED_PAIR(x, c, num_chunks, size)
                        }
                        MXK_REGION(epilogue);
                        const int place = pass & 15;
                        const int target = 8 * ((place >> 2) & 1) + 2 * (place & 3) + (place >> 3);
                        float64 total01, total23;
                        MXK_SHARED_TOTAL(total01, 0, 1)
                        MXK_SHARED_TOTAL(total23, 2, 3)
                        MXK_ST_L(mxk_runs[0], v_f32_sel_eq_u32_b(lane16, target, total01, MXK_LD_L(mxk_runs[0])));
                        MXK_ST_L(mxk_runs[1], v_f32_sel_eq_u32_b(lane16, target, total23, MXK_LD_L(mxk_runs[1])));
                        if (place == 15 || pass == 2 * num_passes - 1) {
                            const int run_quad = first_quad + ((pass - place) >> 2);
                            const int count = (place + 1) >> 2;
                            const int before = s_i32_min(count, 128 - (run_quad & 127));
#ifdef MXK_BIAS
                            at_b[0] = 8 * run_quad;
                            at_b[1] = expert;
                            const float64 loaded = v_f32_ld_tnsr_b(at_b, b13);
                            float64 bias = 0;
                            MXK_BIAS_GROUP(0, 1, shared_bias_control)
                            MXK_BIAS_GROUP(1, 1, shared_bias_control)
#endif
                            MXK_STORE_SHARED_PAIR(0)
                            if (size > 2) MXK_STORE_SHARED_PAIR(1)
                        }
                    }
                    MXK_SHARED_END
                    for (int q = 0; q < size; q += 1) {
                        at_a[1] = mxk_sorted[n + q];
                        MXK_STORE_PADDING
                    }
                    n += size - 1;
                    continue;
                }
#endif
                const int following = mxk_expert[mxk_sorted[s_i32_min(n + 1, num_sorted - 1)]];
                const int local_chunks = s_i32_min(num_chunks, MXK_LOCAL_CHUNKS);
                at_x[1] = mxk_token[route];
                at_x[0] = 0;
                for (int j = 0; j < 4 * local_chunks; j += 1) {
                    MXK_ST_L(mxk_x[j], v_bf16_ld_tnsr_b(at_x, x));
                    at_x[0] += 128;
                }
                at_a[1] = route;
                float64 run = 0;
                for (int pass = 0; pass < num_passes; pass += 1) {
                    MXK_REGION(chunk);
                    MXK_SUM sum0, sum1, sum2, sum3;
                    MXK_SUM_ZERO(sum0)
                    MXK_SUM_ZERO(sum1)
                    MXK_SUM_ZERO(sum2)
                    MXK_SUM_ZERO(sum3)
                    for (int c = 0; c < num_chunks; c += 2) {
                        if (c + 2 >= num_chunks) {
                            if (pass + 1 < num_passes) MXK_PASS(pass + 1, expert) else MXK_PASS(0, following)
                        }
                        MXK_PAIR(c, num_chunks, MXK_X)
                    }
                    MXK_REGION(epilogue);
                    float64 total;
                    MXK_PASS_TOTAL(total)
                    const int place = pass & 15; // in the run: quad place / 2, half place & 1
                    const int target = 8 * ((place >> 1) & 1) + 4 * (place & 1) + (place >> 2);
                    run = v_f32_sel_eq_u32_b(lane16, target, total, run);
                    if (place == 15 || pass == num_passes - 1) {
                        const int run_quad = first_quad + ((pass - place) >> 1);
                        const int count = (place + 1) >> 1;
#ifdef MXK_BIAS
                        // 64 biases of the run's rows: element 8 i + 4 h + 2 b + u is quad i, half h, column b of the
                        // pass, gate or up: dual group i / 2, group i & 1, element 4 h + (target dual group 2 b + u).
                        at_b[0] = 8 * run_quad;
                        at_b[1] = expert;
                        const float64 loaded = v_f32_ld_tnsr_b(at_b, b13);
                        float64 bias = 0;
                        MXK_BIAS_GROUP(0, 3, bias_control)
                        MXK_BIAS_GROUP(1, 3, bias_control)
                        MXK_BIAS_GROUP(2, 3, bias_control)
                        MXK_BIAS_GROUP(3, 3, bias_control)
                        run = v_f32_add_b(run, bias);
#endif
                        MXK_ACTIVATE(run)
                        const int before = s_i32_min(count, 128 - (run_quad & 127)); // quads in the run's first chunk
                        MXK_STORE_QUADS(run_quad, 0, before)
                        if (before < count) MXK_STORE_QUADS(run_quad + before, before, count - before)
                        run = 0;
                    }
                }
                MXK_STORE_PADDING
            }
        }
    }
}
