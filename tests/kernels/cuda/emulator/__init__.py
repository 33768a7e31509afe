"""Runs the CUDA kernels on the CPU: their own sources, launched by their own host code, on CPU tensors.

    from kernels.cuda import emulator          # with tests/ on the path

    with emulator.use():                       # or use(sources=folder, processors=8, seed=1)
        result = emulator.fused(case, "decode:max_routes=64")      # case: mxk_compile.testing.random_case(...)

`launch` runs a kernel that has no host code yet. Emulated means: results and synchronisation. Nothing here says how
long a device takes.

What takes part
    sources   folder of .cu and .cuh files, by default the package's: a changed copy shows what a change does. The host
              code is the package that is imported, so a worktree is tested with it first on the path.
    asm       each PTX instruction is a function of device/ptx.h; one that is not there fails to compile, with its line
    threads   a fibre each. A fibre runs until it must wait; who runs next is fixed with seed 0, random with others.
              Blocks of a cooperative launch run interleaved, of others as many as there are multiprocessors.
    copies    bulk, tensor and cp.async copies poison what they write at once, and bring their data later: with seed 0
              when no thread can run, else at random
    products  WGMMA reads shared memory when the first thread waits for it, and its accumulators hold NaN until a thread
              has waited. Sums are fp32 (int32), in the order of the columns.
    memory    what allocators give and shared memory hold poison, NaN in most formats

What it finds: wrong numbers, waits for ever (who waits where, for what), shared memory out of bounds, WGMMA operands
stored by `st.shared` without fence.proxy.async, fragments without wgmma.fence, more arrivals than a barrier counts,
registers that setmaxnreg cannot have, tensor maps that the driver refuses.
What it cannot find: missing acquire, release and fences between threads (memory is sequentially consistent), overlap of
dependent launches, accesses of device memory outside of a tensor, what tensor cores round, speed.
"""

from __future__ import annotations

from .build import missing
from .host import build_ahead, fused, launch, prepared, use
from .stand_ins import EmulatorError, Machine

__all__ = ["EmulatorError", "Machine", "build_ahead", "fused", "launch", "missing", "prepared", "use"]
