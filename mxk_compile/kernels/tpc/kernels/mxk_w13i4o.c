// Gate and up projection of INT4 weights packed along the output dimension (the stock WNA16 graph's), SiLU.
//
// Tensors (torch order): x bf16 [T, KP], ids i32 [T, k], a bf16 [T*k, IP] as in mxk_w13.h;
//   w13 i32 [E, K, 2I/8], gate columns first   s13 bf16 [E, K/32, 2I]   z13 i32 [K/32, 2I/8]
// Loop, layout and costs: mxk_columns.h.
//
// Work split: pieces of 128 columns, gate and up together, ceil(I / 128 / 24) to a TPC: one for I up to 3072, so that
// 24 * 128 - I columns' worth of TPCs idle (I = 2048: 8 of 24).
//
// Limits: K a multiple of 32 up to 7168 (14 KB of activations), I a multiple of 32; T*k <= 128, E <= 128.
#include "mxk_common.h"
#include "mxk_dot.h"
#include "mxk_activation.h"
#include "mxk_columns.h"

#define MXK_MAX_VECTORS 56
__local__ bfloat128 mxk_x[MXK_MAX_VECTORS]; // 14 KB

#define MXK_GATE_ROWS(group, piece, expert)                                                                   \
    {                                                                                                         \
        at_w[0] = 16 * (piece);                                                                               \
        at_w[1] = 32 * (group);                                                                               \
        at_w[2] = expert;                                                                                     \
    }
#define MXK_TO_UP                                                                                             \
    {                                                                                                         \
        at_w[0] = (num_columns >> 3) + 16 * piece;                                                            \
        at_w[1] = 32 * g;                                                                                     \
    }
#define MXK_TO_GATE                                                                                           \
    {                                                                                                         \
        if (g + 1 < num_groups) MXK_GATE_ROWS(g + 1, piece, expert) else MXK_GATE_ROWS(0, next_piece, following) \
    }

void main(tensor x, tensor ids, tensor mxk_w, tensor mxk_s, tensor mxk_z, tensor a, int experts_min)
{
    MXK_REGION(prologue);
    const int5 box_start = get_index_space_offset();
    const int5 box_end = get_index_space_size() + box_start;
    const int top_k = get_dim_size(ids, 0);
    const int num_tokens = get_dim_size(ids, 1);
    const int num_experts = get_dim_size(mxk_w, 2);
    const int num_columns = get_dim_size(mxk_w, 0) << 2;
    const int num_values = get_dim_size(mxk_w, 1);
    const int num_groups = num_values >> 5;
    const int num_pieces = (num_columns + MXK_PIECE - 1) >> 7;
    const int num_quads = num_columns >> 2;
    const int padding = 128 - (num_quads & 127);
    const int slice = MXK_SLICE(num_pieces);
    int num_sorted;
    MXK_SORT_ROUTES(ids, top_k, num_tokens, num_experts, experts_min, num_sorted)
    MXK_COLUMNS_STATE
    int5 at_x = {0, 0, 0, 0, 0};
    int5 at_a = {0, 0, 0, 0, 0};

    for (int point = box_start[0]; point < box_end[0]; point += 1) {
        const int first_piece = point * slice;
        const int end_piece = s_i32_min(first_piece + slice, num_pieces);
        if (first_piece < end_piece && num_sorted > 0) {
            MXK_GATE_ROWS(0, first_piece, mxk_expert[mxk_sorted[0]])
            MXK_LOAD_ROWS
            for (int n = 0; n < num_sorted; n += 1) {
                MXK_REGION(prologue);
                const int route = mxk_sorted[n];
                const int expert = mxk_expert[route];
                at_x[1] = mxk_token[route];
                MXK_FETCH_DUAL_GROUPS(x, num_values)
                at_a[1] = route;
                at_s[2] = expert;
                for (int piece = first_piece; piece < end_piece; piece += 1) {
                    const int last = piece + 1 == end_piece;
                    const int next_piece = last ? first_piece : piece + 1;
                    const int following = last ? mxk_expert[mxk_sorted[s_i32_min(n + 1, num_sorted - 1)]] : expert;
                    MXK_REGION(chunk);
                    MXK_COLUMN_TOTALS(gate)
                    MXK_COLUMN_TOTALS(up)
                    for (int g = 0; g < num_groups; g += 1) {
                        at_s[0] = MXK_PIECE * piece;
                        MXK_COLUMN_GROUP(gate, g, MXK_TO_UP)
                        at_s[0] = num_columns + MXK_PIECE * piece;
                        MXK_COLUMN_GROUP(up, g, MXK_TO_GATE)
                    }
                    MXK_REGION(epilogue);
                    MXK_COLUMN_RESULT(gates, gate)
                    MXK_COLUMN_RESULT(ups, up)
                    float128 act;
                    act.v1 = v_f32_mul_b(v_f32_mul_b(gates.v1, mxk_sigmoid(gates.v1)), ups.v1);
                    act.v2 = v_f32_mul_b(v_f32_mul_b(gates.v2, mxk_sigmoid(gates.v2)), ups.v2);
                    const bfloat128 values = v_convert_f32_to_bf16_all_b(act, SW_RHNE);
                    const int count = s_i32_min(32, num_quads - 32 * piece);
                    at_a[0] = 512 * (piece >> 2) + 32 * (piece & 3);
                    MXK_PARTIAL_STORE(at_a, a, values, count, 0)
                    at_a[0] = at_a[0] + 128;
                    MXK_PARTIAL_STORE(at_a, a, values, count, 32)
                    at_a[0] = at_a[0] + 128;
                    MXK_PARTIAL_STORE(at_a, a, values, count, 64)
                    at_a[0] = at_a[0] + 128;
                    MXK_PARTIAL_STORE(at_a, a, values, count, 96)
                }
                if (end_piece == num_pieces && padding < 128) {
                    at_a[0] = 512 * (num_quads >> 7) + (num_quads & 127);
                    MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 0)
                    at_a[0] = at_a[0] + 128;
                    MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 1)
                    at_a[0] = at_a[0] + 128;
                    MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 2)
                    at_a[0] = at_a[0] + 128;
                    MXK_PARTIAL_STORE(at_a, a, zero_bf16, padding, 3)
                }
            }
        }
    }
}
