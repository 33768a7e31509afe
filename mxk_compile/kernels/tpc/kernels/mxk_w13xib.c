// Gate and up projection, interleaved rows, bias, SwiGLU-OAI: gpt-oss. See mxk_w13.h.
#define MXK_INTERLEAVED
#define MXK_BIAS
#define MXK_CLAMP
#define MXK_OAI
#include "mxk_w13.h"
