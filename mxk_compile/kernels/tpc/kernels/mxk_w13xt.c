// mxk_w13x for K above 6144, up to 8192: Kimi-K2.7. See mxk_w13.h.
#define MXK_TAIL
#include "mxk_w13.h"
