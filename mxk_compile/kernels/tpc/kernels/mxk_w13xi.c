// Gate and up projection, interleaved rows, clamped SwiGLU: DeepSeek-V4.1-Flash. See mxk_w13.h.
#define MXK_INTERLEAVED
#define MXK_CLAMP
#include "mxk_w13.h"
