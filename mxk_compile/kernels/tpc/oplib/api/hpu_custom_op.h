// Stand-in for the header of this name that the Gaudi PyTorch bridge installs (habana_frameworks.torch).
//
// It states, in our own words, the part of the legacy custom-op interface (lazy mode) that op_lazy.cpp uses. The build
// of the serving image uses the real header; this one serves where there is none: syntax checks and tests.
#pragma once
#include <ATen/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace at {
using Stack = torch::jit::Stack;  // torch declares it too, in headers that take long to compile
}

namespace habana {
namespace custom_op {

using output_shape = std::vector<int64_t>;
using compute_output_shape_function = std::function<output_shape(const at::Stack&)>;
using user_param = std::shared_ptr<void>;
using allocate_user_params_func = std::function<user_param(const at::Stack&, size_t& size)>;

struct NodeDesc {
  std::string tpc_guid, schema_name;
  allocate_user_params_func user_param_func = nullptr;
};

enum class input_type { TENSOR, SCALAR, USER_PARAMS };

struct InputDesc {
  input_type type;
  unsigned index;
};

struct OutputDesc {
  unsigned index;
  c10::ScalarType dtype = c10::ScalarType::Float;
  compute_output_shape_function compute_output_shape_func = nullptr;
};

class HabanaCustomOpDescriptor {
 public:
  HabanaCustomOpDescriptor() = default;
  HabanaCustomOpDescriptor(NodeDesc node, const std::vector<InputDesc>& inputs, const std::vector<OutputDesc>& outputs)
      : node_desc_(node), inputs_(inputs), outputs_(outputs) {}
  std::vector<at::Tensor> execute(const std::vector<c10::IValue>& inputs);
  static const HabanaCustomOpDescriptor getCustomOpDescriptor(std::string op);
  const std::string& getSchemaName() const;
  const std::string& getGuid() const;
  const std::vector<InputDesc>& getInputs() const;
  const std::vector<OutputDesc>& getOutputs() const;
  const allocate_user_params_func& getUserParamsAllocFunc() const;

 private:
  NodeDesc node_desc_;
  std::vector<InputDesc> inputs_;
  std::vector<OutputDesc> outputs_;
};

void registerKernel(HabanaCustomOpDescriptor& descriptor);

}  // namespace custom_op
}  // namespace habana
