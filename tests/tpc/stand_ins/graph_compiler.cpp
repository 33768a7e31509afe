// What the graph compiler does with a kernel library: list GUIDs, instantiate nodes with growing buffers.
//
//   graph_compiler LIBRARY guids DEVICE           one line a GUID: name hash properties
//   graph_compiler LIBRARY short DEVICE           asks for the list with room for one entry too few: the return code
//   graph_compiler LIBRARY others                 layouts, shapes, manipulation, version and the stock's other functions
//   graph_compiler LIBRARY node                   reads nodes from stdin, one a line:
//       DEVICE GUID WORDS INPUTS OUTPUTS          WORDS: hex scalars "1,3fd9db23" or "-"; a tensor is dtype:AxBxC in
//                                                 torch order; options after it: ":dynamic", ":transposed", ":null"
//     writes a line each: code, tries, rank, points, words, accesses, elf bytes, aux tensors, touched (what a refusal changed)
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tpc_kernel_lib_interface.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

using namespace tpc_lib_api;
using Guids = GlueCodeReturn (*)(DeviceId, uint32_t*, GuidInfo*);
using Instantiate = GlueCodeReturn (*)(const HabanaKernelParams*, HabanaKernelInstantiation*);

static void* library;

template <typename Function>
Function find(const char* name) {
  void* found = dlsym(library, name);
  if (!found) fprintf(stderr, "no %s\n", name), exit(3);
  return reinterpret_cast<Function>(found);
}

static int list(DeviceId device, bool too_short) {
  auto guids = find<Guids>("GetKernelGuids");
  uint32_t count = 0;
  int code = guids(device, &count, nullptr);
  if (code) return printf("%d\n", code), 0;
  std::vector<GuidInfo> list(count + 1);
  memset(list.data(), 0xAB, list.size() * sizeof(GuidInfo));
  if (too_short) {
    count -= 1;
    return printf("%d\n", guids(device, &count, list.data())), 0;
  }
  if ((code = guids(device, &count, list.data()))) return printf("%d\n", code), 0;
  for (uint32_t i = 0; i < count; ++i)
    printf("%s %llu %u\n", list[i].name, static_cast<unsigned long long>(list[i].nameHash.hashValue),
           list[i].kernelProperties);
  return static_cast<unsigned char>(list[count].name[0]) == 0xAB ? 0 : 4;  // nothing beyond the list
}

static Tensor tensor(const std::string& text) {
  Tensor result{};
  std::istringstream parts(text);
  std::string part;
  std::getline(parts, part, ':');
  result.geometry.dataType = part == "u8"     ? DATA_U8
                             : part == "i8"   ? DATA_I8
                             : part == "i32"  ? DATA_I32
                             : part == "i64"  ? DATA_I64
                             : part == "bf16" ? DATA_BF16
                             : part == "f16"  ? DATA_F16
                                              : DATA_F32;
  std::getline(parts, part, ':');
  std::istringstream sizes(part);
  std::vector<uint64_t> torch_order;
  for (std::string size; std::getline(sizes, size, 'x');) torch_order.push_back(std::stoull(size));
  result.geometry.dims = static_cast<uint32_t>(torch_order.size());
  for (size_t d = 0; d < torch_order.size(); ++d) {
    result.geometry.maxSizes[d] = result.geometry.minSizes[d] = torch_order[torch_order.size() - 1 - d];
    result.permutation[d] = static_cast<uint32_t>(d);
  }
  while (std::getline(parts, part, ':')) {
    if (part == "dynamic") result.geometry.minSizes[result.geometry.dims - 1] = 1;
    if (part == "transposed") result.permutation[0] = 1, result.permutation[1] = 0;
    if (part == "null") result.Null = 1;
  }
  return result;
}

static std::vector<Tensor> tensors(const std::string& text) {
  std::vector<Tensor> result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) result.push_back(tensor(part));
  return result;
}

static void node(const std::string& line) {
  std::istringstream fields(line);
  int device;
  std::string guid, words_text, inputs_text, outputs_text;
  fields >> device >> guid >> words_text >> inputs_text >> outputs_text;
  std::vector<uint32_t> words;
  std::istringstream parts(words_text);
  if (words_text != "-")
    for (std::string part; std::getline(parts, part, ',');) words.push_back(std::stoul(part, nullptr, 16));
  std::vector<Tensor> inputs = tensors(inputs_text), outputs = tensors(outputs_text);

  HabanaKernelParams params{};
  params.deviceId = static_cast<DeviceId>(device);
  strncpy(params.guid.name, guid.c_str(), MAX_NODE_NAME - 1);
  params.guid.nameHash.hashValue = guid == "add_fwd_f32" ? 77 : 0;
  params.nodeParams = {words.data(), static_cast<uint32_t>(4 * words.size())};
  params.inputTensors = inputs.data();
  params.inputTensorNr = static_cast<uint32_t>(inputs.size());
  params.outputTensors = outputs.data();
  params.outputTensorNr = static_cast<uint32_t>(outputs.size());
  params.maxAvailableTpc = 24;

  auto instantiate = find<Instantiate>("InstantiateTpcKernel");
  std::vector<TensorAccessPattern> reads(16), writes(16);
  std::vector<AuxTensor> aux(16);
  std::vector<unsigned char> elf;
  HabanaKernelInstantiation out;
  int code = 0, tries = 0;
  do {  // the graph compiler gives the room that was asked for, clears the rest and asks again
    const uint32_t room = tries ? out.kernel.elfSize : 16;
    elf.assign(room, 0);
    memset(&out, 0, sizeof out);
    out.inputTensorAccessPattern = reads.data();
    out.outputTensorAccessPattern = writes.data();
    out.auxiliaryTensors = aux.data();
    out.auxiliaryTensorNr = 16;
    out.kernel.kernelElf = elf.data();
    out.kernel.elfSize = room;
    code = instantiate(&params, &out);
  } while (code == GLUE_INSUFFICIENT_ELF_BUFFER && ++tries < 5);
  if (code == GLUE_SUCCESS && tries) {  // once more with no buffer, then with more room than needed: the same answer
    HabanaKernelInstantiation none = out;
    none.kernel.kernelElf = nullptr;
    if (instantiate(&params, &none) != GLUE_INSUFFICIENT_ELF_BUFFER || none.kernel.elfSize != elf.size()) code = -2;
    std::vector<unsigned char> again(elf.size() + 64, 0xEE);
    HabanaKernelInstantiation second;
    memset(&second, 0, sizeof second);
    second.inputTensorAccessPattern = reads.data();
    second.outputTensorAccessPattern = writes.data();
    second.auxiliaryTensors = aux.data();
    second.auxiliaryTensorNr = 16;
    second.kernel.kernelElf = again.data();
    second.kernel.elfSize = static_cast<uint32_t>(again.size());
    const bool same = instantiate(&params, &second) == GLUE_SUCCESS && second.kernel.elfSize == elf.size() &&
                      !memcmp(again.data(), elf.data(), elf.size()) && again[elf.size()] == 0xEE &&
                      !memcmp(second.kernel.scalarParams, out.kernel.scalarParams, sizeof out.kernel.scalarParams);
    if (!same) code = -1;
  }
  std::ostringstream scalars, accesses;
  for (uint32_t i = 0; i < out.kernel.paramsNr; ++i) scalars << std::hex << (i ? "," : "") << out.kernel.scalarParams[i];
  for (size_t i = 0; i < inputs.size(); ++i) accesses << reads[i].allRequired;
  accesses << '/' << writes[0].allRequired;
  const bool touched = out.indexSpaceRank || out.kernel.paramsNr || out.auxiliaryTensorNr != 16;
  printf("%d %d %u %llu %s %s %zu %u %d\n", code, tries, out.indexSpaceRank,
         static_cast<unsigned long long>(out.indexSpaceGeometry[0]), scalars.str().empty() ? "-" : scalars.str().c_str(),
         accesses.str().c_str(), elf.size(), out.auxiliaryTensorNr, touched);
}

static void others() {
  HabanaKernelParams own{}, stock{};
  own.deviceId = stock.deviceId = DEVICE_ID_GAUDI2;
  strcpy(own.guid.name, "mxk_w2x");
  strcpy(stock.guid.name, "add_fwd_f32");
  uint32_t count = 9, mask = 0;
  auto layouts = find<GlueCodeReturn (*)(const HabanaKernelParams*, NodeDataLayouts*, uint32_t*)>("GetSupportedDataLayouts");
  const int code_own = layouts(&own, nullptr, &count);
  printf("layouts %d %u", code_own, count);
  std::vector<Tensor> operands = tensors("bf16:4x512,u8:2x512x16,bf16:4x512");
  std::vector<TensorDataLayout> answers(3);
  own.inputTensors = operands.data();
  own.inputTensorNr = 2;
  own.outputTensors = operands.data() + 2;
  own.outputTensorNr = 1;
  NodeDataLayouts asked{answers.data(), 2, answers.data() + 2, 1, nullptr, 0};
  layouts(&own, &asked, &count);
  for (const TensorDataLayout& answer : answers) printf(" %.4s", answer.layout);
  const int code_stock = layouts(&stock, nullptr, &count);
  printf(" %d %u\n", code_stock, count);
  ShapeInferenceParams shape{};
  ShapeInferenceOutput out{};
  out.invalidMask = &mask;
  auto shapes = find<GlueCodeReturn (*)(DeviceId, const ShapeInferenceParams*, ShapeInferenceOutput*)>("GetShapeInference");
  shape.pGuid = &own.guid;
  printf("shapes %d", shapes(DEVICE_ID_GAUDI2, &shape, &out));
  shape.pGuid = nullptr;
  shape.guid = stock.guid;
  const int code = shapes(DEVICE_ID_GAUDI2, &shape, &out);
  printf(" %d %u\n", code, mask);
  auto manipulation = find<GlueCodeReturn (*)(const HabanaKernelParams*, void*)>("GetSuggestedManipulation");
  printf("manipulation %d %d\n", manipulation(&own, nullptr), manipulation(&stock, nullptr));
  printf("version %llu\n", static_cast<unsigned long long>(find<uint64_t (*)()>("GetLibVersion")()));
  printf("sum %g\n", find<double (*)(int, double, int, double)>("StockSum")(1, .5, 2, .25));
  printf("itself %llu\n", static_cast<unsigned long long>(find<uint64_t (*)()>("StockAsksItself")()));
  printf("twice %d\n", find<int (*)(int)>("_ZN5stock5twiceEi")(21));
}

int main(int count, char** arguments) {
  library = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);  // its names come before the stock library's
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 3;
  const std::string command = arguments[2];
  if (count > 3) return list(static_cast<DeviceId>(atoi(arguments[3])), command == "short");
  if (command == "others") others();
  for (std::string line; command == "node" && std::getline(std::cin, line);) node(line);
}
