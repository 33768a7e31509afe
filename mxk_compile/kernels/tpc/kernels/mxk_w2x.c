// Down projection, weighted sum per token. See mxk_w2.h.
#include "mxk_w2.h"
