// libmxk_tpc.so, the one kernel library: our kernels and, forwarded, everything of the stock library.
//
// The graph compiler finds six entry points by name. For our GUIDs on Gaudi 2 this file answers; for every other GUID,
// device and symbol the stock library does, with the caller's pointers unchanged. The stock library is opened with
// RTLD_DEEPBIND: its own calls of its exported names must not come back here. Its remaining exported functions are jump
// stubs (generated, stubs.S), filled here when the library is loaded.
//
// A call that a kernel does not support is answered with GLUE_UNSUPPORTED_LAYER_CONFIGURATION and the reason on stderr.
// Never GLUE_INCOMPATIBLE_DATA_TYPE: on that the graph compiler inserts casts or changes the type of the output tensor
// and corrupts it (published: "MXFP4 MoE decode kernels", pitfalls). Nothing is written before a call is accepted, and
// the same call gives the same answer any number of times: the graph compiler repeats it when its buffer was too small.
//
// Neither exceptions nor the C++ library are used; see signature.h.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <tpc_kernel_lib_interface.h>

#include "signature.h"

using namespace tpc_lib_api;

struct OwnKernel {
  const char* name;
  const mxk::KernelSpec* spec;  // null for an extra kernel, which has its own function
  GlueCodeReturn (*instantiate)(const HabanaKernelParams&, HabanaKernelInstantiation&);
  const unsigned char *elf, *elf_end;
};

#include "kernel_table.inc"  // generated: kLimits, kKernels, the glue.inc of extra kernels, kOwn, MXK_STOCK_LIBRARY

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
extern const char* const mxk_stub_names[];
extern void* mxk_stub_slots[];
extern const unsigned mxk_stub_count;
}

namespace {

constexpr int kOwnCount = sizeof kOwn / sizeof kOwn[0];

struct Stock {
  void* handle;
  GlueCodeReturn (*guids)(DeviceId, uint32_t*, GuidInfo*);
  GlueCodeReturn (*instantiate)(const HabanaKernelParams*, HabanaKernelInstantiation*);
  GlueCodeReturn (*layouts)(const HabanaKernelParams*, NodeDataLayouts*, uint32_t*);
  GlueCodeReturn (*shapes)(DeviceId, const ShapeInferenceParams*, ShapeInferenceOutput*);
  GlueCodeReturn (*manipulation)(const HabanaKernelParams*, void*);
  uint64_t (*version)();
} stock;

void missing_function() {
  fprintf(stderr, "libmxk_tpc.so: a function of the stock kernel library was called that %s does not have; "
                  "build libmxk_tpc.so again in this image\n", MXK_STOCK_LIBRARY);
  abort();
}

template <typename Function>
void look_up(Function& function, const char* name) {
  function = reinterpret_cast<Function>(stock.handle ? dlsym(stock.handle, name) : nullptr);
}

__attribute__((constructor)) void open_stock() {
  stock.handle = dlopen(MXK_STOCK_LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  const char* error = stock.handle ? nullptr : dlerror();
  look_up(stock.guids, "GetKernelGuids");
  look_up(stock.instantiate, "InstantiateTpcKernel");
  look_up(stock.layouts, "GetSupportedDataLayouts");
  look_up(stock.shapes, "GetShapeInference");
  look_up(stock.manipulation, "GetSuggestedManipulation");
  look_up(stock.version, "GetLibVersion");
  for (unsigned i = 0; i < mxk_stub_count; ++i) {
    void* function = stock.handle ? dlsym(stock.handle, mxk_stub_names[i]) : nullptr;
    mxk_stub_slots[i] = function ? function : reinterpret_cast<void*>(&missing_function);
  }
  if (!stock.guids || !stock.instantiate || !stock.shapes)
    fprintf(stderr, "libmxk_tpc.so: the stock kernel library cannot be used: %s; allowed: the library of this image at "
                    "%s; restore it, or build libmxk_tpc.so again\n",
            error ? error : "an entry point is missing", MXK_STOCK_LIBRARY);
}

bool usable() { return stock.guids && stock.instantiate && stock.shapes; }

const OwnKernel* own(DeviceId device, const GuidInfo& guid) {
  if (device != DEVICE_ID_GAUDI2) return nullptr;
  for (const OwnKernel& kernel : kOwn)
    if (!strncmp(kernel.name, guid.name, MAX_NODE_NAME)) return &kernel;
  return nullptr;
}

TensorDataType data_type(mxk::Type type) {
  static const TensorDataType types[] = {DATA_U8, DATA_I32, DATA_BF16, DATA_F32};
  return types[static_cast<int>(type)];
}

bool refuse(const mxk::KernelSpec& kernel, mxk::Refusal* why, const char* what, const char* given, const char* allowed) {
  snprintf(why->text, sizeof why->text, "%s: %s is %s; allowed: %s; " MXK_ADVICE, kernel.name, what, given, allowed);
  return false;
}

bool read_tensor(const mxk::KernelSpec& kernel, const mxk::TensorSpec& spec, const Tensor& tensor,
                 mxk::Shape<int64_t>* shape, mxk::Refusal* why) {
  const TensorGeometry& geometry = tensor.geometry;
  if (tensor.Null) return refuse(kernel, why, spec.name, "absent", "a tensor");
  if (geometry.dataType != data_type(spec.type)) {
    char given[40];
    snprintf(given, sizeof given, "of data type 0x%x", static_cast<unsigned>(geometry.dataType));
    return refuse(kernel, why, spec.name, given, mxk::name_of(spec.type));
  }
  if (geometry.dims > mxk::kMaxRank) return refuse(kernel, why, spec.name, "of more than 4 dimensions", spec.text);
  shape->rank = static_cast<int>(geometry.dims);
  bool identity = true, unset = true;
  for (uint32_t d = 0; d < geometry.dims; ++d) {
    if (geometry.minSizes[d] != geometry.maxSizes[d])
      return refuse(kernel, why, spec.name, "of dynamic shape", "a static shape (force_static_compile)");
    if (geometry.maxSizes[d] > INT32_MAX)  // of a kernel's coordinates; the products of the check stay in 64 bits
      return refuse(kernel, why, spec.name, "of 2**31 or more elements in a dimension", spec.text);
    shape->size[geometry.dims - 1 - d] = static_cast<int64_t>(geometry.maxSizes[d]);
    identity = identity && tensor.permutation[d] == d;
    unset = unset && tensor.permutation[d] == 0;
  }
  if (!identity && !unset) return refuse(kernel, why, spec.name, "transposed", "a dense tensor");
  return true;
}

bool check(const mxk::KernelSpec& kernel, const HabanaKernelParams& node, mxk::Refusal* why) {
  if (node.inputTensorNr != static_cast<uint32_t>(kernel.inputs) || node.outputTensorNr != 1) {
    char given[48], allowed[48];
    snprintf(given, sizeof given, "%u in, %u out", node.inputTensorNr, node.outputTensorNr);
    snprintf(allowed, sizeof allowed, "%d in, 1 out", kernel.inputs);
    return refuse(kernel, why, "number of tensors", given, allowed);
  }
  const uint32_t bytes = 4 * kernel.scalars;
  if (node.nodeParams.nodeParamsSize != bytes || (bytes && !node.nodeParams.nodeParams)) {
    char given[32], allowed[32];
    snprintf(given, sizeof given, "%u bytes", node.nodeParams.nodeParamsSize);
    snprintf(allowed, sizeof allowed, "%u bytes", bytes);
    return refuse(kernel, why, "user parameters", given, allowed);
  }
  mxk::Shape<int64_t> inputs[mxk::kMaxTensors], output;
  for (int i = 0; i < kernel.inputs; ++i)
    if (!read_tensor(kernel, kernel.tensors[i], node.inputTensors[i], &inputs[i], why)) return false;
  if (!read_tensor(kernel, kernel.output(), node.outputTensors[0], &output, why)) return false;
  mxk::Sizes<int64_t> sizes;
  return mxk::resolve(kernel, mxk::kLimits, inputs, &sizes, why) &&
         mxk::match(kernel, kernel.output(), output, &sizes, why);
}

GlueCodeReturn instantiate(const OwnKernel& kernel, const HabanaKernelParams& node, HabanaKernelInstantiation& out) {
  if (kernel.spec) {
    mxk::Refusal why;
    if (!check(*kernel.spec, node, &why)) {
      fprintf(stderr, "%s\n", why.text);
      return GLUE_UNSUPPORTED_LAYER_CONFIGURATION;
    }
    out.indexSpaceRank = 1;  // one point per TPC; each owns a fixed slice of the output
    out.indexSpaceGeometry[0] = MXK_NUM_TPC;
    for (uint32_t i = 0; i < node.inputTensorNr; ++i) {
      out.inputTensorAccessPattern[i].Value = 0;
      out.inputTensorAccessPattern[i].allRequired = 1;
    }
    out.outputTensorAccessPattern[0].Value = 0;
    out.outputTensorAccessPattern[0].allRequired = 1;
    out.auxiliaryTensorNr = 0;
    out.kernel.paramsNr = kernel.spec->scalars;
    if (kernel.spec->scalars) memcpy(out.kernel.scalarParams, node.nodeParams.nodeParams, 4 * kernel.spec->scalars);
  } else {
    GlueCodeReturn result = kernel.instantiate(node, out);
    if (result != GLUE_SUCCESS) return result;
  }
  const uint32_t room = out.kernel.elfSize, size = static_cast<uint32_t>(kernel.elf_end - kernel.elf);
  out.kernel.elfSize = size;
  if (!out.kernel.kernelElf || room < size) return GLUE_INSUFFICIENT_ELF_BUFFER;
  memcpy(out.kernel.kernelElf, kernel.elf, size);
  return GLUE_SUCCESS;
}

void restrict_layouts(TensorDataLayout* layouts, const Tensor* tensors, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t rank = tensors[i].geometry.dims;
    memset(layouts[i].layout, '*', MAX_TENSOR_DIM);
    memset(layouts[i].layout, '#', rank < MAX_TENSOR_DIM ? rank : MAX_TENSOR_DIM);
  }
}

}  // namespace

EXPORT GlueCodeReturn GetKernelGuids(DeviceId device, uint32_t* count, GuidInfo* guids) {
  if (!usable()) return GLUE_FAILED;
  uint32_t stock_count = 0;
  GlueCodeReturn result = stock.guids(device, &stock_count, nullptr);
  if (result != GLUE_SUCCESS) return result;
  const uint32_t room = *count, needed = stock_count + (device == DEVICE_ID_GAUDI2 ? kOwnCount : 0);
  *count = needed;
  if (!guids || room == 0) return GLUE_SUCCESS;  // asked for the number alone
  if (room < needed) return GLUE_FAILED;
  if ((result = stock.guids(device, &stock_count, guids)) != GLUE_SUCCESS) return result;
  for (uint32_t i = stock_count; i < needed; ++i) {
    memset(&guids[i], 0, sizeof guids[i]);  // static shapes only, no hash: we are called by name
    strncpy(guids[i].name, kOwn[i - stock_count].name, MAX_NODE_NAME - 1);
  }
  return GLUE_SUCCESS;
}

EXPORT GlueCodeReturn InstantiateTpcKernel(const HabanaKernelParams* node, HabanaKernelInstantiation* instance) {
  if (const OwnKernel* kernel = own(node->deviceId, node->guid)) return instantiate(*kernel, *node, *instance);
  return usable() ? stock.instantiate(node, instance) : GLUE_FAILED;
}

EXPORT GlueCodeReturn GetSupportedDataLayouts(const HabanaKernelParams* node, NodeDataLayouts* layouts, uint32_t* count) {
  if (own(node->deviceId, node->guid)) {
    // One answer, asked for first without room for it; no answer would fail the node. "#" a dimension is a layout that
    // the graph compiler must keep: with don't-care it may move a transposition past the node, onto our tensors.
    *count = 1;
    if (layouts) {
      restrict_layouts(layouts->inputs, node->inputTensors, node->inputTensorNr);
      restrict_layouts(layouts->outputs, node->outputTensors, node->outputTensorNr);
    }
    return GLUE_SUCCESS;
  }
  return stock.layouts ? stock.layouts(node, layouts, count) : GLUE_FAILED;
}

EXPORT GlueCodeReturn GetShapeInference(DeviceId device, const ShapeInferenceParams* node, ShapeInferenceOutput* out) {
  if (own(device, node->pGuid ? *node->pGuid : node->guid)) return GLUE_UNSUPPORTED_DYNAMIC_SHAPE;
  return usable() ? stock.shapes(device, node, out) : GLUE_FAILED;
}

EXPORT GlueCodeReturn GetSuggestedManipulation(const HabanaKernelParams* node, void* suggestion) {
  if (own(node->deviceId, node->guid)) return GLUE_FAILED;  // "no suggestion"
  return stock.manipulation ? stock.manipulation(node, suggestion) : GLUE_FAILED;
}

EXPORT uint64_t GetLibVersion() { return stock.version ? stock.version() : 0; }
