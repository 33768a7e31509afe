// libmxk_op_lazy.so: the ops for lazy mode, on the bridge's legacy custom-op interface.
//
// The PT2 interface cannot be used there: it fails when an op's input comes from a native op of the same lazy graph. The
// legacy one states the output type, fp32 unless said otherwise, hence BFloat16, and computes shapes in a callback. It
// takes tensors and numbers only, the first argument a tensor. It caches an op by its input signature, so no two ops of
// a variant have the same number of tensors (signatures.py).
#include "hpu_custom_op.h"

#define MXK_LIBRARY "libmxk_op_lazy.so"
#include "ops.h"

namespace {

using namespace habana::custom_op;

void on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const mxk::KernelSpec& kernel = mxk::kernel_of(op);
  mxk::run(HabanaCustomOpDescriptor::getCustomOpDescriptor(mxk::full_name(kernel)), kernel, stack);
}

TORCH_LIBRARY_FRAGMENT(custom_op, library) { mxk::define_ops(library); }
TORCH_LIBRARY_IMPL(custom_op, HPU, library) { mxk::implement_ops<on_device>(library); }

const bool registered = [] {
  if (!mxk::refusal().empty()) return false;
  for (const mxk::KernelSpec& kernel : mxk::kKernels) {
    std::vector<InputDesc> inputs;
    for (int i = 0; i < kernel.inputs + kernel.scalars; ++i)
      inputs.push_back({i < kernel.inputs ? input_type::TENSOR : input_type::USER_PARAMS, static_cast<unsigned>(i)});
    const OutputDesc output{0, mxk::scalar_type(kernel.output().type),
                            [&kernel](const at::Stack& stack) { return mxk::output_sizes(kernel, stack); }};
    NodeDesc node{kernel.name, mxk::full_name(kernel), nullptr};
    if (kernel.scalars)
      node.user_param_func = [&kernel](const at::Stack& stack, size_t& size) {
        return mxk::pack_scalars(kernel, stack, size);
      };
    HabanaCustomOpDescriptor descriptor{node, inputs, {output}};
    registerKernel(descriptor);
  }
  return true;
}();

}  // namespace
