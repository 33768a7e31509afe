// mxk_w13i4x for K above 6144, up to 8192: Kimi-K2 (INT4). See mxk_w13.h.
#define MXK_INT4
#define MXK_TAIL
#include "mxk_w13.h"
