// One kernel's signature as data, and the one check of a call against it; used by the glue and by both op libraries.
//
// The table itself is generated from signatures.py (tables.py). `resolve` is a template over the integer type: the glue
// and the bridge's callbacks ask with int64_t, fakes of torch.compile with c10::SymInt. No C++ library is used, so that
// nothing of it is exported by the kernel library, whose other symbols belong to the stock one.
#pragma once
#include <stdint.h>
#include <stdio.h>

namespace mxk {

enum class Type : uint8_t { u8, i32, bf16, f32 };
inline const char* name_of(Type type) {
  static const char* const names[] = {"u8", "i32", "bf16", "f32"};
  return names[static_cast<int>(type)];
}

// The symbols of signatures.py. R, KP and IP follow from others; the rest is read off the shapes.
enum class Symbol : uint8_t { T, k, R, K, I, E, KP, IP, N, C };
constexpr int kSymbols = 10;
constexpr int kMaxRank = 4, kMaxTensors = 8, kMaxScalars = 4;

struct Dimension {
  Symbol symbol;
  int times, divide;  // the size is times * symbol / divide
};

struct TensorSpec {
  const char* name;
  Type type;
  const char* text;  // the shape as signatures.py writes it
  int rank;
  Dimension shape[kMaxRank];  // slowest dimension first, as torch
};

struct ScalarSpec {
  const char* name;
  bool is_float;
};

struct KernelSpec {
  const char* name;    // GUID, and op name in namespace custom_op
  const char* schema;  // of the op
  int inputs;
  TensorSpec tensors[kMaxTensors];  // the inputs, then the output
  int scalars;
  ScalarSpec scalar[kMaxScalars];
  const TensorSpec& output() const { return tensors[inputs]; }
};

struct Limits {
  int hidden_multiple, hidden_max, intermediate_multiple, intermediate_max, max_tokens, max_routes, max_experts;
  int max_rows, max_columns;  // of mxk_deq
};

// Why a call is refused, on one line: "{kernel}: {given}; allowed: {allowed}; {what to do}".
struct Refusal {
  char text[320];
};

template <typename Int>
struct Shape {
  int rank = 0;
  Int size[kMaxRank] = {};
};

template <typename Int>
struct Sizes {
  Int value[kSymbols] = {};
  bool known[kSymbols] = {};
  Int& operator[](Symbol symbol) { return value[static_cast<int>(symbol)]; }
  bool has(Symbol symbol) const { return known[static_cast<int>(symbol)]; }
  void set(Symbol symbol, Int size) {
    (*this)[symbol] = size;
    known[static_cast<int>(symbol)] = true;
  }
};

inline int64_t number(int64_t size) { return size; }  // c10::SymInt has its own, found at instantiation

#define MXK_ADVICE "keep the stock op for this call"

template <typename Int>
bool refuse_shape(const KernelSpec& kernel, const TensorSpec& tensor, const Shape<Int>& shape, Refusal* why) {
  char given[96];
  int at = snprintf(given, sizeof given, "[");
  for (int d = 0; d < shape.rank && d < kMaxRank; ++d)
    at += snprintf(given + at, sizeof given - at, "%s%lld", d ? ", " : "", static_cast<long long>(number(shape.size[d])));
  snprintf(given + at, sizeof given - at, shape.rank > kMaxRank ? ", ...]" : "]");
  snprintf(why->text, sizeof why->text, "%s: %s is %s; allowed: %s in the sizes of the other tensors; " MXK_ADVICE,
           kernel.name, tensor.name, given, tensor.text);
  return false;
}

// Reads the sizes off one tensor, or compares them where they are known already.
template <typename Int>
bool match(const KernelSpec& kernel, const TensorSpec& tensor, const Shape<Int>& shape, Sizes<Int>* sizes, Refusal* why) {
  if (shape.rank != tensor.rank) return refuse_shape(kernel, tensor, shape, why);
  for (int d = 0; d < tensor.rank; ++d) {
    const Dimension& dim = tensor.shape[d];
    Int whole = shape.size[d] * dim.divide;
    if (sizes->has(dim.symbol)) {
      if (whole != (*sizes)[dim.symbol] * dim.times) return refuse_shape(kernel, tensor, shape, why);
    } else {
      if (dim.times != 1 && whole % dim.times != 0) return refuse_shape(kernel, tensor, shape, why);
      sizes->set(dim.symbol, dim.times == 1 ? whole : Int(whole / dim.times));
    }
  }
  return true;
}

template <typename Int>
bool follows(const KernelSpec& kernel, Symbol symbol, const char* text, Int must, Sizes<Int>* sizes, Refusal* why) {
  if (!sizes->has(symbol)) {
    sizes->set(symbol, must);
    return true;
  }
  if ((*sizes)[symbol] == must) return true;
  snprintf(why->text, sizeof why->text, "%s: %s is %lld; allowed: %lld; " MXK_ADVICE, kernel.name, text,
           static_cast<long long>(number((*sizes)[symbol])), static_cast<long long>(number(must)));
  return false;
}

template <typename Int>
bool within(const KernelSpec& kernel, const char* text, Int given, int multiple, int most, Refusal* why) {
  if (given >= 1 && given <= most && (multiple == 1 || given % multiple == 0)) return true;
  snprintf(why->text, sizeof why->text, "%s: %s is %lld; allowed: 1 to %d in steps of %d; " MXK_ADVICE, kernel.name, text,
           static_cast<long long>(number(given)), most, multiple);
  return false;
}

// Checks the input shapes of one call and finds every size; false, with the reason in `why`, if the kernel must not run.
template <typename Int>
bool resolve(const KernelSpec& kernel, const Limits& limits, const Shape<Int>* inputs, Sizes<Int>* sizes, Refusal* why) {
  for (int i = 0; i < kernel.inputs; ++i)
    if (!match(kernel, kernel.tensors[i], inputs[i], sizes, why)) return false;
  const auto chunks = [](const Int& size) { return Int((size + 511) / 512 * 512); };
  Sizes<Int>& s = *sizes;
  if (s.has(Symbol::K) &&
      (!within(kernel, "K", s[Symbol::K], limits.hidden_multiple, limits.hidden_max, why) ||
       !follows(kernel, Symbol::KP, "padded K", chunks(s[Symbol::K]), sizes, why)))
    return false;
  if (s.has(Symbol::I) &&
      (!within(kernel, "I", s[Symbol::I], limits.intermediate_multiple, limits.intermediate_max, why) ||
       !follows(kernel, Symbol::IP, "padded I", chunks(s[Symbol::I]), sizes, why)))
    return false;
  if (s.has(Symbol::E) && !within(kernel, "E", s[Symbol::E], 1, limits.max_experts, why)) return false;
  if (s.has(Symbol::T)) {
    Int routes = s[Symbol::T] * s[Symbol::k];
    if (!within(kernel, "T", s[Symbol::T], 1, limits.max_tokens, why) ||
        !within(kernel, "T*k", routes, 1, limits.max_routes, why) ||
        !follows(kernel, Symbol::R, "rows of a", routes, sizes, why))
      return false;
  }
  if (s.has(Symbol::N) && !within(kernel, "rows", s[Symbol::N], 1, limits.max_rows, why)) return false;
  if (s.has(Symbol::C) && !within(kernel, "columns", s[Symbol::C], 32, limits.max_columns, why)) return false;
  return true;
}

template <typename Int>
Shape<Int> output_shape(const KernelSpec& kernel, Sizes<Int>& sizes) {
  Shape<Int> shape;
  shape.rank = kernel.output().rank;
  for (int d = 0; d < shape.rank; ++d) {
    const Dimension& dim = kernel.output().shape[d];
    shape.size[d] = dim.divide == 1 ? Int(sizes[dim.symbol] * dim.times) : Int(sizes[dim.symbol] * dim.times / dim.divide);
  }
  return shape;
}

inline const KernelSpec* find(const KernelSpec* table, int count, const char* name) {
  for (int i = 0; i < count; ++i) {
    const char *a = table[i].name, *b = name;
    while (*a && *a == *b) ++a, ++b;
    if (*a == *b) return &table[i];
  }
  return nullptr;
}

}  // namespace mxk
