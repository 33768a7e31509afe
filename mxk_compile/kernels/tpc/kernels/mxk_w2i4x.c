// mxk_w2x on INT4: codes of 4 bits less 8 ("uint4"), w2 u8 [E, K, I/2], s2 bf16 [E, K, I/32]. See mxk_w2.h.
#define MXK_INT4
#include "mxk_w2.h"
