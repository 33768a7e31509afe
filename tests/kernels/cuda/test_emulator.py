"""The emulator itself: products against torch, and what it says about kernels that are wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from kernels.cuda import emulator
from kernels.cuda.emulator import build
from kernels.cuda.emulator.translate import TranslationError
from torch import Tensor

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")

# A [64, 32 bytes] from registers, B [16, 32 bytes] from shared memory: D = A B^T + C, twice. B comes by a tensor map's
# swizzle or in core matrices.
WGMMA = r"""
#include "ptx.cuh"
struct Arguments { const u32* a; const u8* b; u32* d; };
extern "C" __global__ void __launch_bounds__(128) product(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 to = shared_address(shared), lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, q = lane % 4;
  for (u32 i = threadIdx.x; i < 16 * 8; i += 128) {
    const u32 n = i / 8, word = i % 8;
#if SPAN == 16
    const u32 at = n / 8 * 256 + word / 4 * 128 + n % 8 * 16 + word % 4 * 4;
#else
    u32 at = n * SPAN + word * 4;
    at ^= (at / 128 % (SPAN / 16)) * 16;
#endif
    store_shared_4(to + at, reinterpret_cast<const u32*>(p.b)[i]);
  }
  FENCE
  __syncthreads();
  u32 a[4], d[8];
  for (int i = 0; i < 4; ++i) a[i] = p.a[(row + i % 2 * 8) * 8 + i / 2 * 4 + q];
  for (int i = 0; i < 8; ++i) d[i] = p.d[(row + i / 2 % 2 * 8) * 16 + i / 4 * 8 + 2 * q + i % 2];
  const u64 layout = SPAN == 16 ? 0 : SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3, along_n = SPAN == 16 ? 256 : 8 * SPAN;
  const u64 b = layout << 62 | along_n >> 4 << 32 | static_cast<u64>(128 >> 4) << 16 | to >> 4;
  wgmma_fence();
  for (int i = 0; i < 2; ++i)
    asm volatile("wgmma.mma_async.sync.aligned." KIND " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1"
        SIGNS ";"
        : "+" R(d[0]), "+" R(d[1]), "+" R(d[2]), "+" R(d[3]), "+" R(d[4]), "+" R(d[5]), "+" R(d[6]), "+" R(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 8; ++i) p.d[(row + i / 2 % 2 * 8) * 16 + i / 4 * 8 + 2 * q + i % 2] = d[i];
}
"""
KINDS = {
    "m64n16k16.f32.bf16.bf16": (torch.bfloat16, ", 1, 1, 0"),
    "m64n16k16.f32.f16.f16": (torch.float16, ", 1, 1, 0"),
    "m64n16k32.f32.e4m3.e4m3": (torch.float8_e4m3fn, ", 1, 1"),
    "m64n16k32.s32.s8.s8": (torch.int8, ""),
}
SOURCES = Path(emulator.__file__).parents[4] / "mxk_compile/kernels/cuda"


def source(folder: Path, text: str) -> Path:
    """A source beside the package's header of PTX."""
    for name in ("ptx.cuh",):
        (folder / name).write_text((SOURCES / name).read_text())
    path = folder / "kernel.cu"
    path.write_text(text)
    return path


def product(
    folder: Path, kind: str, span: int, fence: str = 'asm volatile("fence.proxy.async;");'
) -> tuple[Tensor, Tensor]:
    """D as emulated and by torch."""
    dtype, signs = KINDS[kind]
    integer = dtype == torch.int8
    columns = 32 // dtype.itemsize
    a, b = ((torch.randn(n, columns) * (40 if integer else 2)).clamp(-128, 127).to(dtype) for n in (64, 16))
    d = torch.randint(-99, 99, (64, 16), dtype=torch.int32)
    d = d if integer else d.float()
    expected = d + 2 * (a.double() @ b.double().T).to(d.dtype)
    macros = f'#define KIND "{kind}"\n#define SIGNS "{signs}"\n#define SPAN {span}\n#define FENCE {fence}\n'
    macros += (
        f'#define R(x) "{"r" if integer else "f"}"({"x" if integer else "reinterpret_cast<float&>(x)"})\n'
    )
    argument = struct.pack("=3Q", a.data_ptr(), b.data_ptr(), d.data_ptr())
    path = source(folder, macros + WGMMA)
    emulator.launch(path, "product", argument, blocks=1, threads=128, shared_bytes=4096)
    return d, expected


@pytest.mark.parametrize("span", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, span: int, tmp_path: Path) -> None:
    result, expected = product(tmp_path, kind, span)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-3)


def test_operands_that_were_stored_without_a_fence_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where: also from a library below a folder with a space in its name."""
    build.runtime()  # not built anew there
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(build, "folder", lambda: tmp_path / "a b")
    with pytest.raises(
        emulator.EmulatorError, match="which thread 0 wrote without a fence.proxy.async at ptx.cuh:"
    ):
        product(tmp_path, "m64n16k32.s32.s8.s8", 16, fence=";")


def run(folder: Path, body: str, threads: int = 64, seed: int = 0) -> list[int]:
    """Runs a kernel's body, which writes int32 to `out`."""
    text = f"""#include "ptx.cuh"
struct Arguments {{ int* out; }};
extern "C" __global__ void kernel(const __grid_constant__ Arguments p) {{
  int* out = p.out;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ u32 words[64];
  __shared__ u64 barrier;
  {body}
}}
"""
    out = torch.zeros(64, dtype=torch.int32)
    argument = struct.pack("=Q", out.data_ptr())
    emulator.launch(source(folder, text), "kernel", argument, blocks=1, threads=threads, seed=seed)
    return out.tolist()


def test_lanes_exchange(tmp_path: Path) -> None:
    body = """
  const u32 other = __shfl_xor_sync(~0u, threadIdx.x, 1), before = __shfl_up_sync(~0u, threadIdx.x, 3);
  const u32 same = __match_any_sync(~0u, lane / 8), votes = __ballot_sync(~0u, lane % 3 == 0);
  u32 half = 0;
  if (lane < 16) half = __reduce_max_sync(0xFFFFu, threadIdx.x);
  out[threadIdx.x] = other + before + __popc(same) + __popc(votes) + half;
"""
    expected = [
        (t ^ 1) + (t if t % 32 < 3 else t - 3) + 8 + 11 + (t // 32 * 32 + 15 if t % 32 < 16 else 0)
        for t in range(64)
    ]
    assert run(tmp_path, body) == expected
    assert run(tmp_path, body, seed=5) == expected


def test_a_transposed_fragment(tmp_path: Path) -> None:
    pair = "((2 * (lane % 4)) | (2 * (lane % 4) + 1) << 16) + (lane / 4) * 0x00080008u"  # 8 * row + column
    result = run(tmp_path, f"out[threadIdx.x] = transpose_8x8({pair});", threads=32)
    expected = [8 * (2 * (t % 4)) + t // 4 | (8 * (2 * (t % 4) + 1) + t // 4) << 16 for t in range(32)]
    assert result[:32] == expected


def test_a_forgotten_wait_reads_poison(tmp_path: Path) -> None:
    body = """
  const u32 at = shared_address(words), full = shared_address(&barrier);
  if (threadIdx.x == 0) barrier_init(full, 1), barrier_init_fence();
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive_expect(full, 256), bulk_copy(at, out + 0, 256, full);
  WAIT
  out[threadIdx.x] = load_shared_4(at + 4 * threadIdx.x) + 1;
  barrier_wait(full, 0);
"""
    assert run(tmp_path, body.replace("WAIT", "barrier_wait(full, 0);")) == [1] * 64
    assert run(tmp_path, body.replace("WAIT", "")) == [0] * 64


WRONG = {
    "other barriers": (
        'if (warp == 0) __syncthreads(); else asm volatile("bar.sync 1, 64;");',
        "for bar.sync 1 at kernel.cu:8: block 0 warp 1",
    ),
    "no arrival": (
        "if (threadIdx.x == 0) barrier_init(shared_address(&barrier), 2);\n__syncthreads();\n"
        "if (warp == 1) barrier_wait(shared_address(&barrier), 0);",
        r"parity 0 .in phase 0, 2 of 2 arrivals and 0 bytes missing. at ptx.cuh:\d+ < kernel.cu:10: block 0 warp 1",
    ),
    "a lane is missing": (
        "if (lane < 31) __syncwarp();",
        "for __syncwarp 4294967295 at kernel.cu:8: block 0 warp 0 lanes 7fffffff warp 1 lanes 7fffffff",
    ),
    "lanes apart": (
        "if (lane == 3) __shfl_sync(~0u, 1, 0); else __syncwarp();",
        "__shfl_sync, while other lanes of the warp are at __syncwarp",
    ),
    "out of bounds": (
        "out[0] = load_shared_4(shared_address(words) + (1 << 16));",
        r"shared memory at \d+, 4 bytes; the block has 1024 to \d+ at ptx.cuh:\d+ < kernel.cu:8",
    ),
    "no barrier": ("barrier_arrive(shared_address(&barrier));", r"there is no mbarrier at \d+ at ptx.cuh"),
    "registers": ("take_registers<256>();", "for setmaxnreg 256 at ptx.cuh"),
    "device memory": ("out[1ull << 40] = 1;", "which is no memory"),
    "copies at the end": (
        "const u32 full = shared_address(&barrier);\nif (threadIdx.x == 0) barrier_init(full, 1), "
        "bulk_copy(shared_address(words), out, 256, full);",
        "has ended before 1 copies to its shared memory",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_said_of_wrong_kernels(name: str, tmp_path: Path) -> None:
    body, said = WRONG[name]
    with pytest.raises(emulator.EmulatorError, match=said):
        run(tmp_path, body)


@pytest.mark.parametrize("shape", ["m64n40k32.s32.s8.s8", "m64n16k16.s32.s8.s8", "m64n8k32.f32.e4m3.e4m3"])
def test_shapes_that_there_are_not(shape: str, tmp_path: Path) -> None:
    numbers = ", ".join(f"%{i}" for i in range(8))
    with pytest.raises(
        TranslationError, match="^kernel.cu:8: 'wgmma.* with 8 accumulators; there is no such shape"
    ):
        run(tmp_path, f'asm("wgmma.mma_async.sync.aligned.{shape} {{{numbers}}}, %8, %9, 1;" :: );')


def test_an_instruction_that_is_not_emulated_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TranslationError, match="^kernel.cu:9: PTX instruction 'sin.approx.f32' is not emulated"
    ):
        run(tmp_path, '\n  asm("sin.approx.f32 %0, %1;" : "=f"(x) : "f"(y));')
