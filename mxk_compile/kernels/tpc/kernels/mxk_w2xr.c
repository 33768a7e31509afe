// Down projection, one weighted row per route: Muse Spark Open. See mxk_w2.h.
#define MXK_PER_ROUTE
#include "mxk_w2.h"
