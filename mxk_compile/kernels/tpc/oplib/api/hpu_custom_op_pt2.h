// Stand-in for the header of this name that the Gaudi PyTorch bridge installs (habana_frameworks.torch).
//
// It states, in our own words, the part of the PT2 custom-op interface that op_pt2.cpp uses. The build of the serving
// image uses the real header; this one serves where there is none: syntax checks and tests.
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

struct PartialOutputMetaData {
  at::ScalarType dtype{at::ScalarType::Undefined};
  std::vector<int64_t> shape;
};
using PartialOutputMetaDataVector = std::vector<PartialOutputMetaData>;

namespace custom_op {

using OutputMetaFn = std::function<PartialOutputMetaDataVector(const at::Stack&)>;
using FillParamsFn = std::function<std::shared_ptr<void>(const at::Stack&, size_t&)>;

class UserCustomOpDescriptor {
 public:
  UserCustomOpDescriptor() = default;
  UserCustomOpDescriptor(const std::string& schema, const std::string& guid, OutputMetaFn meta, FillParamsFn fill)
      : schema_(schema), guid_(guid), output_meta_fn_(meta), fill_params_fn_(fill) {}
  std::vector<at::Tensor> execute(const std::vector<c10::IValue>& inputs);
  static const UserCustomOpDescriptor& getUserCustomOpDescriptor(const std::string& op);
  const std::string& getSchemaName() const;
  const std::string& getGuid() const;
  const OutputMetaFn& getOutputMetaFn() const;
  const FillParamsFn& getFillParamsFn() const;

 private:
  std::string schema_, guid_;
  OutputMetaFn output_meta_fn_;
  FillParamsFn fill_params_fn_;
};

// `schema` is namespace::name without an overload; `guid` is handed to the graph compiler as it is.
void registerUserCustomOp(const std::string& schema, const std::string& guid, OutputMetaFn, FillParamsFn);

}  // namespace custom_op
}  // namespace habana
