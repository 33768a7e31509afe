// The C interface of the CPU kernel library: one plain struct of 8-byte fields, filled by __init__.py.
//
// Strides are in bytes, counts in elements. `weight` and its companions are the base of a stacked tensor, or with
// `lists` an array of pointers, one per tensor of the argument's list.
#pragma once
#include <cstdint>

enum MxkFormat : int64_t { MXK_MXFP4 = 0, MXK_UINT4 = 1, MXK_INT4 = 2 };
enum MxkRowOrder : int64_t { MXK_GATE_UP = 0, MXK_UP_GATE = 1, MXK_INTERLEAVED = 2, MXK_SEPARATE = 3 };
enum MxkActivation : int64_t { MXK_SILU = 0, MXK_SWIGLU_CLAMP = 1, MXK_SWIGLU_OAI = 2 };
enum MxkDtype : int64_t {
  MXK_U8 = 0, MXK_I8 = 1, MXK_I16 = 2, MXK_I32 = 3, MXK_I64 = 4, MXK_U16 = 5, MXK_U32 = 6, MXK_U64 = 7,
  MXK_BF16 = 8, MXK_F16 = 9, MXK_F32 = 10, MXK_F64 = 11,
};

// One packed projection. "Line" is what one row of the packed matrix holds: an output row for pack_dim "input", an
// input row for "output"; scales and zero points have lines of their own (one per output row, or one per group).
struct MxkProjection {
  const void* weight;
  const void* scale;
  const void* zero;  // null: none
  const void* bias;  // null: none
  int64_t weight_expert, weight_line;
  int64_t scale_expert, scale_line, scale_dtype;
  int64_t zero_expert, zero_line, zero_dtype;  // MXK_U8 one byte a group, MXK_I32 packed nibbles (pack_dim "output")
  int64_t bias_expert, bias_dtype;
  int64_t group;  // input values that share a scale
};

struct MxkMoe {
  // What differs from call to call of one layer stands first: __init__.py keeps the rest as it is.
  const void* x;        // bf16 [T, K]
  const void* ids;      // [T, k]
  const void* weights;  // [T, k]
  void* out;            // bf16 [T, K], or [T, k, K] with per_route; contiguous
  int64_t threads;
  MxkProjection w13, w2;
  int64_t tokens, x_line;
  int64_t ids_dtype, ids_line, ids_step;
  int64_t weights_dtype, weights_line, weights_step;
  int64_t top_k, hidden, intermediate, experts, experts_min;
  int64_t format, output_packed, row_order, activation, per_route, lists;
  double alpha, limit;  // limit: infinity for no clamp
};

constexpr int64_t kMxkRevision = 1;  // of the functions: __init__.py refuses a library of another

#define MXK_EXPORT extern "C" __attribute__((visibility("default")))
MXK_EXPORT int64_t mxk_cpu_abi();                              // size of MxkMoe << 8 | revision
MXK_EXPORT int mxk_cpu_moe(const MxkMoe* call);                // 0, or 1 when scratch memory could not be had
MXK_EXPORT int mxk_cpu_select(const char* isa);                // 0, or 1 when this machine or build lacks it
MXK_EXPORT const char* mxk_cpu_isa();                          // what runs: "avx512", ...
MXK_EXPORT const char* mxk_cpu_threads();                      // the OpenMP runtime in use, or "none"
// Routes that an expert must have to take the matrix unit, for tests and for measuring the crossover; 0: as measured.
MXK_EXPORT void mxk_cpu_matrix_rows(int64_t rows);
MXK_EXPORT int64_t mxk_cpu_scratch_bytes();                    // the largest scratch of the calling thread so far
