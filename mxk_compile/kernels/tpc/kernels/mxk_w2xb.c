// Down projection with bias, weighted sum per token: gpt-oss. See mxk_w2.h.
#define MXK_BIAS
#include "mxk_w2.h"
