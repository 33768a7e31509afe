// Down projection of INT4 weights packed along the output dimension (the stock WNA16 graph's), weighted sum per token.
//
// Tensors (torch order): a bf16 [T*k, IP], ids i32 [T, k], rw f32 [T, k], y bf16 [T, K] as in mxk_w2.h;
//   w2 i32 [E, I, K/8]   s2 bf16 [E, I/32, K]   z2 i32 [I/32, K/8]
// Loop, layout and costs: mxk_columns.h.
//
// Work split: pieces of 128 columns, ceil(K / 128 / 24) to a TPC. For a piece all local routes are walked by expert; a
// token's fp32 sums (dual group p: plane p; even and odd words) are in local memory and are rounded and put in order once.
//
// Limits: I a multiple of 32 up to 3072, K a multiple of 32; T <= 16 (8 KB of sums), T*k <= 128, E <= 128.
#include "mxk_common.h"
#include "mxk_dot.h"
#include "mxk_columns.h"

#define MXK_MAX_TOKENS 16
#define MXK_MAX_VECTORS 24
__local__ bfloat128 mxk_x[MXK_MAX_VECTORS];       // 6 KB
__local__ float64 mxk_total[2 * MXK_MAX_TOKENS];  // 8 KB

#define MXK_ROWS_AT(row, piece, expert)                                                                       \
    {                                                                                                         \
        at_w[0] = 16 * (piece);                                                                               \
        at_w[1] = row;                                                                                        \
        at_w[2] = expert;                                                                                     \
    }
#define MXK_TO_NEXT                                                                                           \
    {                                                                                                         \
        if (g + 1 < num_groups) MXK_ROWS_AT(32 * g + 32, piece, expert)                                       \
        else if (!last_route) MXK_ROWS_AT(0, piece, following)                                                \
        else MXK_ROWS_AT(0, s_i32_min(piece + 1, end_piece - 1), following)                                   \
    }
// Lane 4 w + p of dual group d takes lane 8 d + w of dual group p.
#define MXK_ORDER_PLANE(p)                                                                                    \
    ordered = v_bf16_sel_eq_u16_b(                                                                            \
        v_u16_and_b(lane, 3), p,                                                                              \
        v_bf16_shuffle_b(v_bf16_mov_dual_group_all_b(values, MXK_ALL_BYTES, p, p, p, p, MXK_ALL_GROUPS, values), \
                         order_control, 0, values),                                                           \
        ordered);

void main(tensor a, tensor ids, tensor rw, tensor mxk_w, tensor mxk_s, tensor mxk_z, tensor y, int experts_min)
{
    MXK_REGION(prologue);
    const int5 box_start = get_index_space_offset();
    const int5 box_end = get_index_space_size() + box_start;
    const int top_k = get_dim_size(ids, 0);
    const int num_tokens = get_dim_size(ids, 1);
    const int num_experts = get_dim_size(mxk_w, 2);
    const int num_values = get_dim_size(mxk_w, 1);
    const int num_groups = num_values >> 5;
    const int num_pieces = (get_dim_size(y, 0) + MXK_PIECE - 1) >> 7;
    const int slice = MXK_SLICE(num_pieces);
    int num_sorted;
    MXK_SORT_ROUTES(ids, top_k, num_tokens, num_experts, experts_min, num_sorted)
    MXK_COLUMNS_STATE
    const ushort128 lane = read_lane_id_2b_b();
    uchar256 order_control;
    {
        const ushort128 word =
            v_u16_or_b(v_u16_shl_b(v_u16_shr_b(lane, 5), 3), v_u16_shr_b(v_u16_and_b(lane, 31), 2));
        ushort128 bits = v_u16_or_b(v_u16_and_b(word, 15), v_u16_shl_b(v_u16_shr_b(word, 4), 5));
        bits = v_u16_or_b(bits, 0x80);
        order_control = (uchar256)v_u16_or_b(bits, v_u16_shl_b(bits, 8));
    }
    int5 at_x = {0, 0, 0, 0, 0};
    int5 at_y = {0, 0, 0, 0, 0};
    int5 at_rw = {0, 0, 0, 0, 0};

    for (int point = box_start[0]; point < box_end[0]; point += 1) {
        const int first_piece = point * slice;
        const int end_piece = s_i32_min(first_piece + slice, num_pieces);
        if (first_piece < end_piece && num_sorted > 0) {
            MXK_ROWS_AT(0, first_piece, mxk_expert[mxk_sorted[0]])
            MXK_LOAD_ROWS
        }
        for (int piece = first_piece; piece < end_piece; piece += 1) {
            MXK_REGION(prologue);
            for (int t = 0; t < 2 * num_tokens; t += 1) MXK_ST_L(mxk_total[t], (float64)(float)(num_experts >> 8));
            at_s[0] = MXK_PIECE * piece;
            for (int n = 0; n < num_sorted; n += 1) {
                MXK_REGION(prologue);
                const int route = mxk_sorted[n];
                const int expert = mxk_expert[route];
                const int token = mxk_token[route];
                const int last_route = n + 1 == num_sorted;
                const int following = mxk_expert[mxk_sorted[last_route ? 0 : n + 1]];
                at_rw[0] = route - token * top_k;
                at_rw[1] = token;
                const float weight = s_f32_ld_g(gen_addr(at_rw, rw));
                at_x[1] = route;
                MXK_FETCH_DUAL_GROUPS(a, num_values)
                at_s[2] = expert;
                MXK_REGION(chunk);
                MXK_COLUMN_TOTALS(down)
                for (int g = 0; g < num_groups; g += 1) MXK_COLUMN_GROUP(down, g, MXK_TO_NEXT)
                MXK_REGION(epilogue);
                MXK_COLUMN_RESULT(row, down)
                MXK_ST_L(mxk_total[2 * token], v_f32_mac_b(row.v1, weight, MXK_LD_L(mxk_total[2 * token])));
                MXK_ST_L(mxk_total[2 * token + 1], v_f32_mac_b(row.v2, weight, MXK_LD_L(mxk_total[2 * token + 1])));
            }
            MXK_REGION(epilogue);
            at_y[0] = MXK_PIECE * piece;
            for (int t = 0; t < num_tokens; t += 1) {
                float128 sums;
                sums.v1 = MXK_LD_L(mxk_total[2 * t]);
                sums.v2 = MXK_LD_L(mxk_total[2 * t + 1]);
                const bfloat128 values = v_convert_f32_to_bf16_all_b(sums, SW_RHNE);
                bfloat128 ordered = values;
                MXK_ORDER_PLANE(0)
                MXK_ORDER_PLANE(1)
                MXK_ORDER_PLANE(2)
                MXK_ORDER_PLANE(3)
                at_y[1] = t;
                v_bf16_st_tnsr(at_y, y, ordered);
            }
        }
    }
}
