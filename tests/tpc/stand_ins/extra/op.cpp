// Op of the extra kernel, lazy mode.
#include <torch/library.h>

#include "hpu_custom_op.h"

namespace {

using namespace habana::custom_op;

at::Tensor demo_scale(const at::Tensor& x, double factor) {
  auto descriptor = HabanaCustomOpDescriptor::getCustomOpDescriptor("custom_op::demo_scale");
  return descriptor.execute({x, factor}).at(0);
}

TORCH_LIBRARY_FRAGMENT(custom_op, library) { library.def("demo_scale(Tensor x, float factor) -> Tensor"); }
TORCH_LIBRARY_IMPL(custom_op, HPU, library) { library.impl("demo_scale", demo_scale); }

const bool registered = [] {
  const auto factor = [](const at::Stack& stack, size_t& size) {
    size = sizeof(float);
    return std::make_shared<float>(stack[1].toScalar().to<float>());
  };
  const auto shape = [](const at::Stack& stack) { return stack[0].toTensor().sizes().vec(); };
  HabanaCustomOpDescriptor descriptor{{"demo_scale", "custom_op::demo_scale", factor},
                                      {{input_type::TENSOR, 0}, {input_type::USER_PARAMS, 1}},
                                      {{0, c10::ScalarType::Float, shape}}};
  registerKernel(descriptor);
  return true;
}();

}  // namespace
