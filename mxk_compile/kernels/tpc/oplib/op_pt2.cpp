// libmxk_op_pt2.so: the ops for compiled and eager mode, on the bridge's PT2 custom-op interface.
//
// custom_op::<kernel> for dispatch keys HPU and Meta. Namespace `custom_op` and no overloads are the bridge's rules: ops
// of another namespace fall back to eager and split the graph, and a descriptor is looked up by the name alone. The
// registration with the bridge stands in a static initialiser, not in the op's body: a compiled graph never runs the
// body, and would end in "isn't registered in KernelRegistry".
#include "hpu_custom_op_pt2.h"

#define MXK_LIBRARY "libmxk_op_pt2.so"
#include "ops.h"

namespace {

using habana::custom_op::UserCustomOpDescriptor;

void on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const mxk::KernelSpec& kernel = mxk::kernel_of(op);
  mxk::run(UserCustomOpDescriptor::getUserCustomOpDescriptor(mxk::full_name(kernel)), kernel, stack);
}

void on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const mxk::KernelSpec& kernel = mxk::kernel_of(op);
  const size_t first = stack->size() - kernel.inputs - kernel.scalars;
  mxk::Sizes<c10::SymInt> sizes = mxk::check_call<c10::SymInt>(kernel, *stack, first);
  const mxk::Shape<c10::SymInt> shape = mxk::output_shape(kernel, sizes);
  const at::Tensor& like = (*stack)[first].toTensor();
  at::Tensor output = like.new_empty_symint(c10::SymIntArrayRef(shape.size, shape.rank),
                                            like.options().dtype(mxk::scalar_type(kernel.output().type)));
  stack->resize(first);
  stack->emplace_back(std::move(output));
}

TORCH_LIBRARY_FRAGMENT(custom_op, library) { mxk::define_ops(library); }
TORCH_LIBRARY_IMPL(custom_op, HPU, library) { mxk::implement_ops<on_device>(library); }
TORCH_LIBRARY_IMPL(custom_op, Meta, library) { mxk::implement_ops<on_meta>(library); }

const bool registered = [] {
  if (!mxk::refusal().empty()) return false;
  for (const mxk::KernelSpec& kernel : mxk::kKernels) {
    const auto meta = [&kernel](const at::Stack& stack) {
      return habana::PartialOutputMetaDataVector{
          {mxk::scalar_type(kernel.output().type), mxk::output_sizes(kernel, stack)}};
    };
    habana::custom_op::FillParamsFn fill;
    if (kernel.scalars)
      fill = [&kernel](const at::Stack& stack, size_t& size) { return mxk::pack_scalars(kernel, stack, size); };
    habana::custom_op::registerUserCustomOp(mxk::full_name(kernel), kernel.name, meta, fill);
  }
  return true;
}();

}  // namespace
