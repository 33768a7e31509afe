// Prints the GUID list of a kernel library, "device name hash properties" a line, for every device the interface knows.
// The build compares the stock library's list with ours.
#include <dlfcn.h>
#include <stdio.h>
#include <tpc_kernel_lib_interface.h>

#include <vector>

using namespace tpc_lib_api;

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  auto list = reinterpret_cast<GlueCodeReturn (*)(DeviceId, uint32_t*, GuidInfo*)>(dlsym(library, "GetKernelGuids"));
  if (!list) return fprintf(stderr, "%s has no GetKernelGuids\n", arguments[1]), 1;
  for (int device = 1; device < DEVICE_ID_MAX; ++device) {
    uint32_t count = 0;
    if (list(static_cast<DeviceId>(device), &count, nullptr) != GLUE_SUCCESS) return 1;
    std::vector<GuidInfo> guids(count);
    if (count && list(static_cast<DeviceId>(device), &count, guids.data()) != GLUE_SUCCESS) return 1;
    for (const GuidInfo& guid : guids)
      printf("%d %.*s %llx %x\n", device, static_cast<int>(MAX_NODE_NAME), guid.name,
             static_cast<unsigned long long>(guid.nameHash.hashValue), guid.kernelProperties);
  }
}
