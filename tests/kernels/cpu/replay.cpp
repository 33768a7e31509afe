// Runs one call of the kernel library from a file, on a machine that has no torch: the struct of abi.h, its addresses
// replaced by offsets into the bytes that follow it (0: null), then those bytes. Writes the result's bytes to stdout.
#include <cstdio>
#include <cstring>
#include <vector>

#include "abi.h"

int main(int argc, char** argv) {
  if (argc != 4 || mxk_cpu_select(argv[1])) return 2;
  std::FILE* file = std::fopen(argv[2], "rb");
  std::vector<char> data;
  char buffer[65536];
  for (size_t got; file && (got = std::fread(buffer, 1, sizeof buffer, file)) > 0;)
    data.insert(data.end(), buffer, buffer + got);
  MxkMoe call;
  std::memcpy(&call, data.data(), sizeof call);
  for (const void** at : {&call.x, &call.ids, &call.weights, &call.w13.weight, &call.w13.scale, &call.w13.zero,
                          &call.w13.bias, &call.w2.weight, &call.w2.scale, &call.w2.zero, &call.w2.bias})
    if (*at) *at = data.data() + reinterpret_cast<size_t>(*at);
  std::vector<uint16_t> out(size_t(call.tokens * call.hidden * (call.per_route ? call.top_k : 1)));
  call.out = out.data();
  if (mxk_cpu_moe(&call)) return 3;
  std::fwrite(out.data(), 2, out.size(), stdout);
  std::fprintf(stderr, "%s\n", mxk_cpu_isa());
}
