// Gate and up projection, [gate; up] rows, SiLU: GLM-5.x, Muse Spark Open, MiMo-V2.6-Pro. See mxk_w13.h.
#include "mxk_w13.h"
