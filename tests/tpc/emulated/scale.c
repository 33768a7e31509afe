// y = factor * x, f32 [R, C]: row r belongs to invocation r % 24.
#ifndef MXK_REGION
#define MXK_REGION(name)
#define MXK_LD_L(variable) (variable)
#define MXK_ST_L(variable, x) (variable) = (x)
#endif
#define LANES 64
__local__ float64 kept[2];
__local__ int rows_done[1];

void main(tensor x, tensor y, float factor, int rows, int columns)
{
    const int5 box = get_index_space_offset();
    int5 at = {0, 0, 0, 0, 0};
    rows_done[0] = 0;
    for (int r = box[0]; r < rows; r += 24) {
        at[1] = r;
        MXK_REGION(chunk);
        for (int c = 0; c < columns; c += LANES) {
            at[0] = c;
            MXK_ST_L(kept[0], v_f32_mul_b(v_f32_ld_tnsr_b(at, x), factor));
            v_f32_st_tnsr(at, y, MXK_LD_L(kept[0]));
        }
        MXK_REGION(epilogue);
        rows_done[0] = rows_done[0] + 1;
    }
}
