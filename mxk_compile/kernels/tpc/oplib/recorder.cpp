// Stands in for the bridge's plugin where there is no device: records what an op library registers with the bridge.
//
// The build links an op library's object a second time with this file and loads that copy, so the gate on its ops needs
// neither a device nor a bridge. `execute` runs the callbacks as the bridge does, on whatever tensors it is given, and
// returns zeros. Compiled against the same header as the op library: MXK_LAZY chooses which.
#ifdef MXK_LAZY
#include "hpu_custom_op.h"
#else
#include "hpu_custom_op_pt2.h"
#endif
#include <map>
#include <sstream>

namespace {

std::vector<uint32_t> last_params;

at::Tensor zeros(const std::vector<c10::IValue>& inputs, at::ScalarType dtype, const std::vector<int64_t>& shape) {
  const at::Tensor& like = inputs.at(0).toTensor();
  return like.new_zeros(shape, like.options().dtype(dtype));
}

template <typename Fill>
void keep_params(const Fill& fill, const std::vector<c10::IValue>& inputs) {
  size_t size = 0;
  last_params.clear();
  if (!fill) return;
  const std::shared_ptr<void> words = fill(inputs, size);
  const auto* first = static_cast<const uint32_t*>(words.get());
  last_params.assign(first, first + size / sizeof(uint32_t));
}

}  // namespace

namespace habana::custom_op {

#ifdef MXK_LAZY
using Descriptor = HabanaCustomOpDescriptor;
#else
using Descriptor = UserCustomOpDescriptor;
#endif

static std::map<std::string, Descriptor>& registry() {
  static std::map<std::string, Descriptor> map;
  return map;
}

const std::string& Descriptor::getGuid() const {
#ifdef MXK_LAZY
  return node_desc_.tpc_guid;
#else
  return guid_;
#endif
}

#ifdef MXK_LAZY
const std::string& Descriptor::getSchemaName() const { return node_desc_.schema_name; }

void registerKernel(HabanaCustomOpDescriptor& descriptor) { registry()[descriptor.getSchemaName()] = descriptor; }

const HabanaCustomOpDescriptor HabanaCustomOpDescriptor::getCustomOpDescriptor(std::string op) {
  return registry().at(op);
}

std::vector<at::Tensor> HabanaCustomOpDescriptor::execute(const std::vector<c10::IValue>& inputs) {
  keep_params(node_desc_.user_param_func, inputs);
  std::vector<at::Tensor> results;
  for (const OutputDesc& output : outputs_)
    results.push_back(zeros(inputs, output.dtype, output.compute_output_shape_func(inputs)));
  return results;
}
#else
void registerUserCustomOp(const std::string& schema, const std::string& guid, OutputMetaFn meta, FillParamsFn fill) {
  registry()[schema] = UserCustomOpDescriptor(schema, guid, meta, fill);
}

const UserCustomOpDescriptor& UserCustomOpDescriptor::getUserCustomOpDescriptor(const std::string& op) {
  return registry().at(op);
}

std::vector<at::Tensor> UserCustomOpDescriptor::execute(const std::vector<c10::IValue>& inputs) {
  keep_params(fill_params_fn_, inputs);
  std::vector<at::Tensor> results;
  for (const PartialOutputMetaData& output : output_meta_fn_(inputs))
    results.push_back(zeros(inputs, output.dtype, output.shape));
  return results;
}
#endif

}  // namespace habana::custom_op

#define EXPORT extern "C" __attribute__((visibility("default")))

// "op guid" a line, of everything registered.
EXPORT const char* mxk_recorded() {
  static std::string text;
  std::ostringstream lines;
  for (const auto& [op, descriptor] : habana::custom_op::registry()) lines << op << ' ' << descriptor.getGuid() << '\n';
  text = lines.str();
  return text.c_str();
}

// The user parameters of the last call: their number, and the words at `words`.
EXPORT size_t mxk_last_params(uint32_t* words, size_t room) {
  for (size_t i = 0; i < last_params.size() && i < room; ++i) words[i] = last_params[i];
  return last_params.size();
}
