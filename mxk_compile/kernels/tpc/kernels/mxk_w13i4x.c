// mxk_w13x on INT4: codes of 4 bits less 8 ("uint4"), w13 u8 [E, 2I, K/2], s13 bf16 [E, 2I, K/32]. See mxk_w13.h.
#define MXK_INT4
#include "mxk_w13.h"
