// What the stand-in for cuTensorMapEncodeTiled (stand_ins.py) puts into the 128 bytes of a map.
#pragma once
#include "runtime.h"

namespace emu {

struct TensorMap {
  char magic[8];
  const u8* address;
  u64 size[5], stride[4];  // elements; bytes
  u16 box[5];
  u8 rank, element_bytes;
  u8 swizzle;  // address bits: 0, 1, 2, 3 for none, 32, 64 and 128 bytes
  u8 unused[27];
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace emu
