// A kernel library as the graph compiler knows it, in the place of the stock one: two GUIDs on Gaudi 2, one on Gaudi 3,
// and more exported symbols: a C function, a C++ one, one that calls an entry point by name, a datum.
#include <string.h>
#include <tpc_kernel_lib_interface.h>

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace tpc_lib_api;

EXPORT GlueCodeReturn GetKernelGuids(DeviceId device, uint32_t* count, GuidInfo* guids) {
  const uint32_t have = device == DEVICE_ID_GAUDI2 ? 2 : device == DEVICE_ID_GAUDI3 ? 1 : 0;
  if (guids && *count < have) return GLUE_FAILED;
  *count = have;
  if (!guids) return GLUE_SUCCESS;
  memset(guids, 0, have * sizeof *guids);
  if (have) {
    strcpy(guids[0].name, "add_fwd_f32");
    guids[0].nameHash.hashValue = 77;
    guids[0].supportsDynamicShapes = 1;
  }
  if (have > 1) strcpy(guids[1].name, STOCK_SECOND);
  return GLUE_SUCCESS;
}

EXPORT GlueCodeReturn InstantiateTpcKernel(const HabanaKernelParams* node, HabanaKernelInstantiation* instance) {
  instance->indexSpaceRank = 1;
  instance->indexSpaceGeometry[0] = 1000 + node->guid.nameHash.hashValue;
  instance->kernel.elfSize = 0;
  return GLUE_SUCCESS;
}

EXPORT GlueCodeReturn GetSupportedDataLayouts(const HabanaKernelParams*, NodeDataLayouts*, uint32_t* count) {
  *count = 3;
  return GLUE_SUCCESS;
}

EXPORT GlueCodeReturn GetShapeInference(DeviceId, const ShapeInferenceParams*, ShapeInferenceOutput* out) {
  *out->invalidMask = 5;
  return GLUE_SUCCESS;
}

EXPORT GlueCodeReturn GetSuggestedManipulation(const HabanaKernelParams*, void*) { return GLUE_SUCCESS; }
EXPORT uint64_t GetLibVersion() { return 42; }

EXPORT double StockSum(int a, double b, int c, double d) { return a + b + c + d; }
EXPORT uint64_t StockAsksItself() {  // how many kernels it has: ours must not answer
  uint32_t count = 0;
  GetKernelGuids(DEVICE_ID_GAUDI2, &count, nullptr);
  return count;
}
EXPORT __attribute__((weak)) int StockWeak() { return 1; }
namespace stock {
__attribute__((visibility("default"))) int twice(int a) { return 2 * a; }
}  // namespace stock
EXPORT int stock_datum;
int stock_datum = 7;
