// TPC-C of Gaudi 2 on the CPU: the language and intrinsics that kernels/tpc/kernels uses, as one C++17 header.
//
// A kernel's .c file compiles unmodified, as C++, with this header included first and `main` renamed; runner.cpp does
// both and runs it, ../emulate.py builds and calls it. Sources of every rule: HabanaAI/tpc_llvm (intrinsics header, lane
// model TPCEliminateRedundantLinearity.cpp, latencies.cpp) and the TPC User Guide. What they leave open is refused.
//
// Conventions between kernel and emulator
//   Tensors    `void main(tensor in0, ..., tensor out0, ..., tensor aux0, ..., scalars)`: inputs, outputs, auxiliary
//              tensors, then 32-bit scalars (int, unsigned, float). At most 16 tensors and 32 scalars. Dim 0 is the
//              fastest: a torch tensor [E, R, C] has sizes {C, R, E}.
//   Index box  One invocation per TPC: get_index_space_offset()[0] = 0..23, get_index_space_size()[0] = 1. The order is
//              shuffled; local memory is poisoned before each invocation, outputs before the call.
//   Marks      All four are macros; the kernel's own header defines them empty where they are undefined:
//                MXK_REGION(name)      what follows is prologue, chunk or epilogue (begins as prologue)
//                MXK_CHUNK_ROWS(n)     n chunk-rows (512 weights of one row times one activation row) were done
//                MXK_LD_L(variable)    a read of a vector of local memory: a LOAD slot
//                MXK_ST_L(variable, x) a write to one, `variable = x`: a STORE slot
//              Scalars in local memory and plain integer C are SPU work that is not counted.
//   Tables     LOOKUP function ids (bits 8..7 size class, 0: 256 entries, 3: 32; bits 6..0 table number) bound here:
//                MXK_FID_E2M1 500, MXK_FID_INT4 501 (code - 8), MXK_FID_SINT4 502 (two's complement): nibble -> bf16
//                MXK_FID_E2M1_PAIR 100, MXK_FID_INT4_PAIR 101, MXK_FID_SINT4_PAIR 102: byte -> low, high nibble, for
//                v_bf16_lookup_2c
//              A kernel names them by these macros, each under #ifndef.
//   Memory     `__local__` variables: vectors are VLM (16 KB if the kernel uses LOOKUP, else 80 KB), the rest SLM (16 KB).
//   Bounds     A load may run past the end of dim 0 by less than two vectors: the lanes outside are 0 (pad value). A
//              store may begin inside dim 0 and run past its end: culled. Every other coordinate outside is an error.
//   Errors     Out-of-tensor access, switches that are not modelled, control bytes of one shuffled element that differ,
//              use of a vector never written, a load from an output (needs `aso`), an output element written by two
//              invocations, lookups without table, an index outside a C array: the run ends with kernel, invocation and coordinate named.
#pragma once
#define TPC_EMULATOR 1
#define __gaudi2__ 1
#define __gaudi2_plus__ 1
#define __gaudi_plus__ 1
#define __greco_plus__ 1
#define MAX_SLM 16384

#include "counters.h"
#include "types.h"
#include "memory.h"
#include "arithmetic.h"
#include "lanes.h"
#include "lookup.h"

#define MXK_REGION(name) tpc_emulator::state.region = tpc_emulator::Region::name
#define MXK_CHUNK_ROWS(n) tpc_emulator::state.totals.chunk_rows += (n)
#define MXK_LD_L(variable) tpc_emulator::load_local(variable)
#define MXK_ST_L(variable, x) tpc_emulator::store_local(variable, x)
