// What both op libraries share: the table, the check of a call, the one-library rule.
//
// All ops are boxed: one function serves every op and reads the table by the op's name. An op library registers its ops
// when it is loaded, with the dispatcher and with the bridge, so that a compiled graph finds the kernel in the bridge's
// registry although it never calls the op itself.
#pragma once
#include <ATen/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "signature.h"

namespace c10 {
inline int64_t number(const SymInt& size) { return size.guard_int(__FILE__, __LINE__); }
}  // namespace c10

namespace mxk {

#include "op_table.inc"  // generated: kLimits, kKernels

constexpr int kKernelCount = sizeof kKernels / sizeof kKernels[0];

// Empty, or why this library registered nothing. A process holds one op library: with two, an op's kernel would depend
// on which was loaded first, and the bridge of one execution mode would be mixed with that of the other.
inline const std::string& refusal() {
  static const std::string text = [] {
    for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames())
      if (op.name.rfind("custom_op::mxk_", 0) == 0)
        return std::string(MXK_LIBRARY) + ": this process has an op library already, it registered " + op.name +
               "; allowed: one op library a process; load " MXK_LIBRARY " in a new process";
    return std::string();
  }();
  return text;
}

inline void define_ops(torch::Library& library) {
  if (!refusal().empty()) {
    std::fprintf(stderr, "%s\n", refusal().c_str());
    return;
  }
  for (const KernelSpec& kernel : kKernels) library.def(kernel.schema);
}

template <c10::BoxedKernel::BoxedKernelFunction* function>
void implement_ops(torch::Library& library) {
  if (!refusal().empty()) return;
  for (const KernelSpec& kernel : kKernels)
    library.impl(kernel.name, torch::CppFunction::makeFromBoxedFunction<function>());
}

inline at::ScalarType scalar_type(Type type) {
  static const at::ScalarType types[] = {at::kByte, at::kInt, at::kBFloat16, at::kFloat};
  return types[static_cast<int>(type)];
}

inline std::string full_name(const KernelSpec& kernel) { return std::string("custom_op::") + kernel.name; }

inline const KernelSpec& kernel_of(const c10::OperatorHandle& op) {
  return *find(kKernels, kKernelCount, op.schema().name().c_str() + std::strlen("custom_op::"));
}

// The sizes of one call; `stack` holds the op's arguments from `first` on. Throws c10::Error with the reason on one line.
template <typename Int>
Sizes<Int> check_call(const KernelSpec& kernel, const at::Stack& stack, size_t first) {
  Shape<Int> shapes[kMaxTensors];
  for (int i = 0; i < kernel.inputs; ++i) {
    const TensorSpec& spec = kernel.tensors[i];
    const at::Tensor& tensor = stack[first + i].toTensor();
    TORCH_CHECK_VALUE(tensor.scalar_type() == scalar_type(spec.type), kernel.name, ": ", spec.name, " is ",
                      tensor.scalar_type(), "; allowed: ", scalar_type(spec.type), "; convert it before the call");
    TORCH_CHECK_VALUE(tensor.dim() <= kMaxRank, kernel.name, ": ", spec.name, " has ", tensor.dim(),
                      " dimensions; allowed: ", spec.text, "; " MXK_ADVICE);
    shapes[i].rank = static_cast<int>(tensor.dim());
    for (int d = 0; d < shapes[i].rank; ++d) {
      if constexpr (std::is_same_v<Int, c10::SymInt>)
        shapes[i].size[d] = tensor.sym_size(d);
      else
        shapes[i].size[d] = tensor.size(d);
    }
  }
  Sizes<Int> sizes;
  Refusal why;
  TORCH_CHECK_VALUE(resolve(kernel, kLimits, shapes, &sizes, &why), why.text);
  return sizes;
}

inline std::vector<int64_t> output_sizes(const KernelSpec& kernel, const at::Stack& stack) {
  Sizes<int64_t> sizes = check_call<int64_t>(kernel, stack, 0);
  const Shape<int64_t> shape = output_shape(kernel, sizes);
  return {shape.size, shape.size + shape.rank};
}

// The scalars as the kernel reads them: 32 bits each, in schema order.
inline std::shared_ptr<void> pack_scalars(const KernelSpec& kernel, const at::Stack& stack, size_t& size) {
  auto words = std::make_shared<std::array<uint32_t, kMaxScalars>>();
  size = sizeof(uint32_t) * kernel.scalars;
  for (int i = 0; i < kernel.scalars; ++i) {
    const c10::Scalar value = stack[kernel.inputs + i].toScalar();
    if (kernel.scalar[i].is_float) {
      const float number = value.to<float>();
      std::memcpy(&(*words)[i], &number, sizeof number);
    } else {
      const int64_t number = value.to<int64_t>();
      TORCH_CHECK_VALUE(number >= 0 && number <= std::numeric_limits<int32_t>::max(), kernel.name, ": ",
                        kernel.scalar[i].name, " is ", number, "; allowed: 0 to 2**31-1; " MXK_ADVICE);
      (*words)[i] = static_cast<uint32_t>(number);
    }
  }
  return words;
}

// The call on the device: checked, then handed to the bridge's descriptor of this op.
template <typename Descriptor>
void run(Descriptor descriptor, const KernelSpec& kernel, torch::jit::Stack* stack) {
  const size_t count = kernel.inputs + kernel.scalars, first = stack->size() - count;
  check_call<int64_t>(kernel, *stack, first);
  for (int i = 0; i < kernel.inputs; ++i)
    TORCH_CHECK_VALUE((*stack)[first + i].toTensor().is_contiguous(), kernel.name, ": ", kernel.tensors[i].name,
                      " is not contiguous; allowed: dense tensors; call .contiguous() on it");
  std::vector<c10::IValue> inputs(stack->begin() + first, stack->end());
  at::Tensor output = descriptor.execute(inputs).at(0);
  stack->resize(first);
  stack->emplace_back(std::move(output));
}

}  // namespace mxk

// Null, or why nothing was registered; asked by mxk_compile.kernels.tpc.libraries after loading.
extern "C" __attribute__((visibility("default"))) const char* mxk_op_refusal() {
  return mxk::refusal().empty() ? nullptr : mxk::refusal().c_str();
}
