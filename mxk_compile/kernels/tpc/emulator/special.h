// Functions of the compiler's tpc-special.h in fp32, computed by libm: the tables behind the device's are not public, so
// a test compares with a tolerance. The count is the number of VPU ops that header's comments give.
#pragma once
#include "arithmetic.h"

#define TPC_SPECIAL(NAME, OPS, EXPRESSION)                                                                    \
    inline float64 NAME(float64 input) {                                                                      \
        using namespace tpc_emulator;                                                                         \
        written(#NAME, input);                                                                                \
        count(op_special, OPS);                                                                               \
        return mapped(input, [](float value) { const double x = value; return float(EXPRESSION); });          \
    }
TPC_SPECIAL(v_exp_fast_f32, 26, std::exp(x)) TPC_SPECIAL(v_exp_f32, 29, std::exp(x))
TPC_SPECIAL(v_exp_cephes_fast_f32, 15, std::exp(x)) TPC_SPECIAL(v_reciprocal_fast_f32, 12, 1 / x)
TPC_SPECIAL(v_reciprocal_f32, 20, 1 / x) TPC_SPECIAL(v_tanh_f32, 16, std::tanh(x))
TPC_SPECIAL(v_sigmoid_f32, 18, 1 / (1 + std::exp(-x)))
