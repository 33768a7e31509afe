// Stand-in for the header of this name that Gaudi software installs in /usr/include/habanalabs.
//
// It states, in our own words, the part of the kernel-library interface that glue.cpp uses: names, order of fields and
// values are facts of the public interface (Gaudi software 1.18 and later), so a library compiled against either header
// has the same binary interface. The build of the serving image uses the real header; this one serves where there is
// none: syntax checks, and tests with a stub stock library and a fake graph compiler.
#pragma once
#include <stdint.h>

namespace tpc_lib_api {

static const uint32_t MAX_SCALAR_PARAMS = 32, MAX_NODE_NAME = 64, MAX_INDEX_SPACE_DIM_SIZE = 5, MAX_TENSOR_DIM = 25;

enum DeviceId {
  DEVICE_ID_GAUDI = 1,
  DEVICE_ID_GRECO = 2,
  DEVICE_ID_GAUDI2 = 3,
  DEVICE_ID_GAUDI3 = 4,
  DEVICE_ID_MAX = 5,
};

enum GlueCodeReturn {
  GLUE_SUCCESS = 0,
  GLUE_NODE_NOT_FOUND = 1,
  GLUE_INCOMPATIBLE_DATA_TYPE = 7,
  GLUE_UNSUPPORTED_LAYER_CONFIGURATION = 8,
  GLUE_INSUFFICIENT_ELF_BUFFER = 18,
  GLUE_UNSUPPORTED_DYNAMIC_SHAPE = 23,
  GLUE_FAILED = 400,
};

enum TensorDataType {
  DATA_I8 = 1 << 2,
  DATA_U8 = 1 << 3,
  DATA_BF16 = 1 << 8,
  DATA_F16 = 1 << 9,
  DATA_I32 = 1 << 10,
  DATA_F32 = 1 << 12,
  DATA_I64 = 1 << 13,
};

struct TensorDataLayout {
  char layout[MAX_TENSOR_DIM];
};

struct NodeDataLayouts {
  TensorDataLayout* inputs;
  uint32_t inputTensorNr;
  TensorDataLayout* outputs;
  uint32_t outputTensorNr;
  TensorDataLayout* shapeTensors;
  uint32_t shapeTensorNr;
};

struct UniqueShapeInferenceHash {
  union {
    struct {
      uint64_t hashValue : 56;
      uint64_t sharedObjectId : 8;
    };
    uint64_t Value;
  };
};

struct GuidInfo {
  char name[MAX_NODE_NAME];
  UniqueShapeInferenceHash nameHash;
  union {
    struct {
      uint32_t supportsDynamicShapes : 1;
      uint32_t supports64bit : 1;
      uint32_t : 30;
    };
    uint32_t kernelProperties;
  };
};

struct UserParams {
  void* nodeParams;
  uint32_t nodeParamsSize;
};

union ElementValue {
  float fValue;
  uint32_t u32Value;
  uint64_t u64Value;
};

struct TensorGeometry {
  uint32_t dims;
  uint64_t maxSizes[MAX_TENSOR_DIM];  // fastest dimension first
  uint64_t minSizes[MAX_TENSOR_DIM];
  TensorDataType dataType;
};

struct TensorQuantizationParam {
  union {
    int8_t zeroPoint;
    uint8_t zeroPointU8;
    int8_t fp8bias;
  };
  double scale;
};

struct Tensor {
  TensorGeometry geometry;
  TensorQuantizationParam quantizationParam;
  TensorDataLayout layout;
  union {
    struct {
      uint32_t Reducible : 1;
      uint32_t Null : 1;
      uint32_t : 30;
    };
    uint32_t flags;
  };
  const void* pData;
  uint32_t permutation[MAX_TENSOR_DIM];
  uint32_t reserved[6];
};

struct AuxTensor {
  TensorGeometry geometry;
  void* pData;
  uint64_t bufferSize;
  union {
    struct {
      uint32_t sramAlloc : 1;
      uint32_t noInit : 1;
      uint32_t : 30;
    };
    uint32_t flags;
  };
  uint32_t reserved[6];
};

struct DimIndexSpaceMapping {
  uint32_t indexSpaceDim;
  float a, start_b, end_b;
  bool allRequired;
};

struct TensorAccessPattern {
  union {
    struct {
      uint32_t allRequired : 1;
      uint32_t memsetBeforeExecution : 1;
      uint32_t inputsReusability : 16;
      uint32_t inputReusabilityBinding : 1;
      uint32_t sparseAccess : 1;
      uint32_t noRmwAccess : 1;
      uint32_t fullyAccessedOnce : 1;
      uint32_t fullyWritten : 1;
      uint32_t : 8;
    };
    uint32_t Value;
  };
  DimIndexSpaceMapping mapping[MAX_TENSOR_DIM];
  ElementValue memsetValue;
  uint32_t reserved[6];
};

struct HabanaKernelParams {
  int apiVersion;
  DeviceId deviceId;
  GuidInfo guid;
  UserParams nodeParams;
  Tensor* inputTensors;
  uint32_t inputTensorNr;
  Tensor* outputTensors;
  uint32_t outputTensorNr;
  uint32_t maxAvailableTpc;
  uint32_t useDeterministic;
  uint64_t uniqueNodeId;
  uint32_t debugFlags;
  uint16_t validInputTensors;
  uint16_t validOutputTensors;
  uint32_t reserved[24];
};

struct DeviceKernel {
  void* kernelElf;   // the caller's buffer
  uint32_t elfSize;  // its size on entry, the needed one on return
  uint32_t scalarParams[MAX_SCALAR_PARAMS];
  uint32_t paramsNr;
};

struct HabanaKernelInstantiation {
  uint32_t indexSpaceRank;
  uint64_t indexSpaceGeometry[MAX_INDEX_SPACE_DIM_SIZE];
  TensorAccessPattern* inputTensorAccessPattern;
  TensorAccessPattern* outputTensorAccessPattern;
  AuxTensor* auxiliaryTensors;
  uint32_t auxiliaryTensorNr;  // on entry how many there is room for, on return how many the kernel has
  DeviceKernel kernel;
  uint32_t preferredSplitDim;
  uint32_t reserved[15];
};

struct TensorShapeInfo {
  TensorGeometry geometry;
  uint32_t* hostAddress;
  uint32_t reserved[8];
};

struct NodeTensorPermutation {
  uint32_t permutation[MAX_TENSOR_DIM];
};

struct ShapeInferenceParams {
  int apiVersion;
  uint64_t uniqueNodeId;
  GuidInfo guid;
  TensorShapeInfo** inputTensors;
  uint32_t inputTensorsNr;
  UserParams nodeParams;
  uint32_t outputTensorsNr;
  NodeTensorPermutation* inputPermutations;
  NodeTensorPermutation* outputPermutations;
  GuidInfo* pGuid;
  uint32_t maxAvailableTpc;
  uint32_t reserved[3];
};

struct ShapeInferenceOutput {
  TensorShapeInfo** outputTensors;
  uint32_t* invalidMask;
  uint32_t reserved[6];
};

}  // namespace tpc_lib_api
