// Down projection: the body of the mxk_w2* kernels.
//
//   mxk_w2x   y[token]       = bf16(sum over local routes of rw * (w2[expert] . a[route]))
//   mxk_w2xb  the same with rw * (... + b2[expert])
//   mxk_w2xr  y[token, slot] = bf16(rw * (w2[expert] . a[route])), 0 for routes that are not local
//
// Tensors (torch order; T tokens, k slots, E local experts, IP = I rounded up to 512)
//   a    bf16 [T*k, IP]      chunk order (mxk_dot.h), zero beyond I; rows of routes that are not local are not read
//   ids  i32  [T, k]         global expert ids; a route is local if experts_min <= id < experts_min + E
//   rw   f32  [T, k]         routing weights
//   w2   u8   [E, K, I/2]    s2 u8 [E, K, I/32]   as served
//   b2   f32  [E, K]         (MXK_BIAS)
//   y    bf16 [T, K], or [T, k, K] (MXK_PER_ROUTE)
//
// Work split: a TPC owns a fixed slice of K / 4 passes of four rows, ceil(K / 96) of them, whatever the routing. It walks
// its slice in runs of up to 16 passes (64 rows) and, for each run, all local routes by expert. Row totals of a run
// collect in one vector; scaled by the routing weight (fp32, fused) it is added to the token's fp32 sum in vector local
// memory, and a run's sums are rounded to bf16 once, when the run is done. A token without local route keeps its zero.
// A token's routes are added in order of expert, then slot: a fixed order, though not that of the CPU reference (slot).
//
// Lanes: a run of n passes has rows base .. base + 4n; pass p works on rows p, n + p, 2n + p, 3n + p, so dual group g
// holds rows g n .. (g + 1) n. Lane of pass p: 8 (p & 1) + p / 2, so that a vector and its copy with groups swapped convert
// to bf16 lanes 32 g + p: rows in order, one partial store a dual group.
//
// Limits: K, I multiples of 32, I <= 3072: 8 KB of sums for 32 tokens, 6 KB of activations, of the 16 KB of vector local
// memory that a kernel with LOOKUP gets. T <= 32, T*k <= 128, E <= 128.
#include "mxk_common.h"
#include "mxk_dot.h"
#ifdef MXK_SHARE
#include "mxk_share.h"
#endif

#define MXK_MAX_CHUNKS 6
#if defined(MXK_SHARE) && !defined(MXK_BIAS)
// 16 tokens, as the variants without bias allow, leave room for two chunks of four activation rows.
#define MXK_MAX_TOKENS 16
#define MXK_SHARED_CHUNKS 2
__local__ bfloat128 mxk_x[16 * MXK_SHARED_CHUNKS]; // 8 KB
#else
#define MXK_MAX_TOKENS 32
#define MXK_SHARED_CHUNKS 1
__local__ bfloat128 mxk_x[4 * MXK_MAX_CHUNKS]; // 6 KB
#endif
#ifndef MXK_PER_ROUTE
__local__ float64 mxk_total[MXK_MAX_TOKENS]; // 8 KB, or 4
#endif
#ifdef MXK_SHARE
__local__ float64 mxk_runs[4]; // dual groups 0 and 1 of routes 0 and 1, of routes 2 and 3; dual groups 2 and 3: 1 KB
#endif

#define MXK_PASS(base, n, pass, expert)                                                                       \
    {                                                                                                         \
        const int row = (base) + (pass);                                                                      \
        MXK_NEXT_PASS(row, row + (n), row + 2 * (n), row + 3 * (n), expert)                                   \
    }

// A run's 64 lanes to rows run_row .. run_row + 4 * run_passes of the output row at `at_y`.
#define MXK_STORE_RUN(result)                                                                                 \
    {                                                                                                         \
        float128 both;                                                                                        \
        both.v1 = result;                                                                                     \
        both.v2 = v_f32_mov_group_b(result, MXK_ALL_BYTES, MXK_SWAP_GROUPS, result);                          \
        const bfloat128 values = v_convert_f32_to_bf16_all_b(both, SW_RHNE);                                  \
        at_y[0] = run_row;                                                                                    \
        MXK_PARTIAL_STORE(at_y, y, values, run_passes, 0)                                                     \
        at_y[0] = at_y[0] + run_passes;                                                                       \
        MXK_PARTIAL_STORE(at_y, y, values, run_passes, 32)                                                    \
        at_y[0] = at_y[0] + run_passes;                                                                       \
        MXK_PARTIAL_STORE(at_y, y, values, run_passes, 64)                                                    \
        at_y[0] = at_y[0] + run_passes;                                                                       \
        MXK_PARTIAL_STORE(at_y, y, values, run_passes, 96)                                                    \
    }

// Biases of dual group g's rows are 16 values from run_row + g * run_passes on, then in the run's lanes.
#define MXK_BIAS_ROWS(g, w0, w1, w2, w3)                                                                      \
    at_b[0] = run_row + (g) * run_passes;                                                                     \
    bias = v_f32_mov_dual_group_all_b(v_f32_ld_tnsr_b(at_b, b2), MXK_ALL_BYTES, 0, 0, 0, 0, MkWrA(w0, w1, w2, w3), bias);
#define MXK_LOAD_BIAS(expert)                                                                                 \
    at_b[0] = run_row;                                                                                        \
    at_b[1] = expert;                                                                                         \
    float64 bias = v_f32_ld_tnsr_b(at_b, b2);                                                                 \
    MXK_BIAS_ROWS(1, 0, 3, 0, 0)                                                                              \
    MXK_BIAS_ROWS(2, 0, 0, 3, 0)                                                                              \
    MXK_BIAS_ROWS(3, 0, 0, 0, 3)                                                                              \
    bias = v_f32_shuffle_b(bias, bias_control, 0, bias);

// A finished run of a route, times its routing weight.
#ifdef MXK_PER_ROUTE
#define MXK_ADD_WEIGHTED(run, token, slot, weight)                                                            \
    const float64 result = v_f32_mul_b(run, weight);                                                          \
    at_y[1] = slot;                                                                                           \
    at_y[2] = token;                                                                                          \
    MXK_STORE_RUN(result)
#else
#define MXK_ADD_WEIGHTED(run, token, slot, weight)                                                            \
    MXK_ST_L(mxk_total[token], v_f32_mac_b(run, weight, MXK_LD_L(mxk_total[token])));
#endif
#define MXK_ADD_ROUTE(run, route)                                                                             \
    {                                                                                                         \
        const int token = mxk_token[route];                                                                   \
        at_rw[0] = (route) - token * top_k;                                                                   \
        at_rw[1] = token;                                                                                     \
        const float weight = s_f32_ld_g(gen_addr(at_rw, rw));                                                 \
        MXK_ADD_WEIGHTED(run, token, at_rw[0], weight)                                                        \
    }

#ifdef MXK_SHARE
#ifdef MXK_BIAS
#define MXK_ADD_SHARED_BIAS complete = v_f32_add_b(complete, bias);
#else
#define MXK_ADD_SHARED_BIAS
#endif
// Rows of dual groups 0, 1 are in vector `pair`, those of 2, 3 in vector 2 + pair. The even route of a pair has dual groups
// 0, 1 of both, the odd one 2, 3.
#define MXK_ADD_SHARED_EVEN(q, pair)                                                                          \
    {                                                                                                         \
        float64 complete = v_f32_mov_dual_group_all_b(MXK_LD_L(mxk_runs[2 + (pair)]), MXK_ALL_BYTES, 0, 0, 0, 1, \
                                                      MkWrA(0, 0, 3, 3), MXK_LD_L(mxk_runs[pair]));           \
        MXK_ADD_SHARED_BIAS                                                                                   \
        MXK_ADD_ROUTE(complete, mxk_sorted[n + (q)])                                                          \
    }
#define MXK_ADD_SHARED_ODD(q, pair)                                                                           \
    {                                                                                                         \
        float64 complete = v_f32_mov_dual_group_all_b(MXK_LD_L(mxk_runs[pair]), MXK_ALL_BYTES, 2, 3, 0, 0,    \
                                                      MkWrA(3, 3, 0, 0), MXK_LD_L(mxk_runs[2 + (pair)]));     \
        MXK_ADD_SHARED_BIAS                                                                                   \
        MXK_ADD_ROUTE(complete, mxk_sorted[n + (q)])                                                          \
    }
#define MXK_SHARED_PASS(pass, expert)                                                                         \
    {                                                                                                         \
        const int second_half = (pass) >= run_passes;                                                         \
        const int row = run_row + (pass) + (second_half ? run_passes : 0);                                    \
        MXK_NEXT_PASS(row, row + run_passes, row, row + run_passes, expert)                                   \
    }
#endif

void main(tensor a, tensor ids, tensor rw, tensor mxk_w, tensor mxk_s,
#ifdef MXK_BIAS
          tensor b2,
#endif
          tensor y, int experts_min)
{
    MXK_REGION(prologue);
    const int5 box_start = get_index_space_offset();
    const int5 box_end = get_index_space_size() + box_start;
    const int top_k = get_dim_size(ids, 0);
    const int num_tokens = get_dim_size(ids, 1);
    const int num_experts = get_dim_size(mxk_w, 2);
    const int num_passes = get_dim_size(mxk_w, 1) >> 2;
    const int num_chunks = get_dim_size(a, 0) >> 9;
    const int slice = MXK_SLICE(num_passes);
    int num_sorted;
    MXK_SORT_ROUTES(ids, top_k, num_tokens, num_experts, experts_min, num_sorted)
    MXK_DOT_STATE
#ifdef MXK_BIAS
    // Lane l of a dual group is pass 2 (l & 7) + l / 8: element (pass & 7) of group pass / 8.
    uchar256 bias_control;
    {
        const uint64 element = v_u32_add_b(v_u32_shl_b(v_u32_and_b(lane, 3), 1), v_u32_shr_b(lane16, 3));
        MXK_CONTROL_32(bias_control, v_u32_or_b(element, v_u32_shl_b(v_u32_and_b(lane, 4), 3)))
    }
    int5 at_b = {0, 0, 0, 0, 0};
#endif
#ifdef MXK_SHARE
    MXK_SHARE_STATE
#endif
    int5 at_x = {0, 0, 0, 0, 0};
    int5 at_y = {0, 0, 0, 0, 0};
    int5 at_rw = {0, 0, 0, 0, 0};

    for (int point = box_start[0]; point < box_end[0]; point += 1) {
        const int first_pass = point * slice;
        const int end_pass = s_i32_min(first_pass + slice, num_passes);
#ifdef MXK_PER_ROUTE
        // Zero rows, 100 values a store; neighbouring stores differ in their lane.
        int zero_lane = 0;
        for (int r = 0; r < top_k * num_tokens; r += 1) {
            if (mxk_expert[r] < 0) {
                at_y[1] = r - mxk_token[r] * top_k;
                at_y[2] = mxk_token[r];
                for (int row = 4 * first_pass; row < 4 * end_pass; row += 100) {
                    const int count = s_i32_min(100, 4 * end_pass - row);
                    at_y[0] = row;
                    MXK_PARTIAL_STORE(at_y, y, zero_bf16, count, zero_lane)
                    zero_lane = 1 - zero_lane;
                }
            }
        }
#endif
        if (first_pass < end_pass && num_sorted > 0) {
            MXK_PASS(4 * first_pass, s_i32_min(16, end_pass - first_pass), 0, mxk_expert[mxk_sorted[0]])
            MXK_FIRST_LOADS
        }
        for (int run_pass = first_pass; run_pass < end_pass; run_pass += 16) {
            const int run_row = 4 * run_pass;
            const int run_passes = s_i32_min(16, end_pass - run_pass);
            // The run after this one, or this one again: loads ahead stay inside the tensor.
            const int next_run_pass = run_pass + 16 < end_pass ? run_pass + 16 : run_pass;
            const int next_run_passes = s_i32_min(16, end_pass - next_run_pass);
            MXK_REGION(prologue);
#ifndef MXK_PER_ROUTE
            for (int t = 0; t < num_tokens; t += 1) MXK_ST_L(mxk_total[t], (float64)(float)(num_experts >> 8));
#endif
            for (int n = 0; n < num_sorted; n += 1) {
                MXK_REGION(prologue);
                const int route = mxk_sorted[n];
                const int expert = mxk_expert[route];
#ifdef MXK_SHARE
                // Passes of two rows: those of dual groups 0 and 1 first, then those of 2 and 3.
                int size;
                MXK_COUNT_SHARED(size, n, expert)
                if (size > 1) {
                    const int ends_run = n + size == num_sorted;
                    const int after = mxk_expert[mxk_sorted[ends_run ? 0 : n + size]];
                    MXK_SHARED_FETCH(0, a, route)
                    MXK_SHARED_FETCH(1, a, mxk_sorted[n + 1])
                    MXK_SHARED_FETCH(2, a, mxk_sorted[n + s_i32_min(2, size - 1)])
                    MXK_SHARED_FETCH(3, a, mxk_sorted[n + size - 1])
                    for (int j = 0; j < 4; j += 1) MXK_ST_L(mxk_runs[j], (float64)(float)(num_experts >> 8));
                    for (int pass = 0; pass < 2 * run_passes; pass += 1) {
                        MXK_REGION(chunk);
                        MXK_FOUR(MXK_SHARED_SUMS, 0)
                        for (int c = 0; c < num_chunks; c += 2) {
                            if (c + 2 >= num_chunks) {
                                if (pass + 1 < 2 * run_passes) MXK_SHARED_PASS(pass + 1, expert)
                                else if (!ends_run) MXK_PASS(run_row, run_passes, 0, after)
                                else MXK_PASS(4 * next_run_pass, next_run_passes, 0, after)
                            }
                            MXK_SHARED_PAIR(a, c, num_chunks, size)
                        }
                        MXK_REGION(epilogue);
                        const int half = pass >= run_passes ? 2 : 0;
                        const int place = pass >= run_passes ? pass - run_passes : pass;
                        const int target = 8 * (place & 1) + (place >> 1);
                        float64 total01, total23;
                        MXK_SHARED_TOTAL(total01, 0, 1)
                        MXK_SHARED_TOTAL(total23, 2, 3)
                        MXK_ST_L(mxk_runs[half], v_f32_sel_eq_u32_b(lane16, target, total01, MXK_LD_L(mxk_runs[half])));
                        MXK_ST_L(mxk_runs[half + 1],
                                 v_f32_sel_eq_u32_b(lane16, target, total23, MXK_LD_L(mxk_runs[half + 1])));
                    }
                    MXK_SHARED_END
#ifdef MXK_BIAS
                    MXK_LOAD_BIAS(expert)
#endif
                    MXK_ADD_SHARED_EVEN(0, 0)
                    MXK_ADD_SHARED_ODD(1, 0)
                    if (size > 2) MXK_ADD_SHARED_EVEN(2, 1)
                    if (size > 3) MXK_ADD_SHARED_ODD(3, 1)
                    n += size - 1;
                    continue;
                }
#endif
                const int last_route = n + 1 == num_sorted;
                const int following = mxk_expert[mxk_sorted[last_route ? 0 : n + 1]];
                at_x[1] = route;
                at_x[0] = 0;
                for (int j = 0; j < 4 * num_chunks; j += 1) {
                    MXK_ST_L(mxk_x[j], v_bf16_ld_tnsr_b(at_x, a));
                    at_x[0] += 128;
                }
                float64 run = 0;
                for (int pass = 0; pass < run_passes; pass += 1) {
                    MXK_REGION(chunk);
                    MXK_SUM sum0, sum1, sum2, sum3;
                    MXK_SUM_ZERO(sum0)
                    MXK_SUM_ZERO(sum1)
                    MXK_SUM_ZERO(sum2)
                    MXK_SUM_ZERO(sum3)
                    for (int c = 0; c < num_chunks; c += 2) {
                        if (c + 2 >= num_chunks) {
                            if (pass + 1 < run_passes) MXK_PASS(run_row, run_passes, pass + 1, expert)
                            else if (!last_route) MXK_PASS(run_row, run_passes, 0, following)
                            else MXK_PASS(4 * next_run_pass, next_run_passes, 0, following)
                        }
                        MXK_PAIR(c, num_chunks, MXK_X_LOCAL)
                    }
                    MXK_REGION(epilogue);
                    float64 total;
                    MXK_PASS_TOTAL(total)
                    run = v_f32_sel_eq_u32_b(lane16, 8 * (pass & 1) + (pass >> 1), total, run);
                }
#ifdef MXK_BIAS
                MXK_LOAD_BIAS(expert)
                run = v_f32_add_b(run, bias);
#endif
                MXK_ADD_ROUTE(run, route)
            }
            MXK_REGION(epilogue);
#ifndef MXK_PER_ROUTE
            for (int t = 0; t < num_tokens; t += 1) {
                const float64 result = MXK_LD_L(mxk_total[t]);
                at_y[1] = t;
                MXK_STORE_RUN(result)
            }
#endif
        }
    }
}
