"""Why a call has no CUDA kernel, in one line; devices are made up."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mxk_compile.errors import KernelError
from mxk_compile.kernels import MoEDesc, project, select, supports
from mxk_compile.kernels.cuda import build, devices
from mxk_compile.settings import Settings
from mxk_compile.testing import random_case

GOOD = MoEDesc(
    device="cuda",
    dtype=torch.bfloat16,
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=128,
    top_k=4,
    group_sizes=(32, 32),
    weight_format="mxfp4",
    pack_dim="input",
    row_order="interleaved",
    activation="swiglu_oai",
    bias=True,
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that can run the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "some device")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(build, "missing", lambda: None)


@pytest.mark.usefixtures("hopper")
def test_a_hopper_device_runs_what_the_kernels_take() -> None:
    assert supports(GOOD) is None
    assert supports(dataclasses.replace(GOOD, weight_format="uint4", group_sizes=(128, 2880))) is None
    assert supports(dataclasses.replace(GOOD, weight_format="int4", pack_dim="output")) is None
    assert str(select(GOOD)) == "cuda/nvrtc/sm_90a"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "hidden_states are torch.float16; allowed: torch.bfloat16"),
        ({"hidden_size": 2896}, "K = 2896, I = 2880; allowed: multiples of 32 above 0"),
        ({"intermediate_size": 0}, "K = 2880, I = 0; allowed: multiples of 32 above 0"),
        ({"num_experts": 1025}, "E = 1025, k = 4; allowed: E up to 1024, k of 1 to 64"),
        ({"top_k": 0}, "E = 128, k = 0; allowed: E up to 1024, k of 1 to 64"),
    ],
)
def test_what_they_do_not_take(changes: dict[str, object], reason: str) -> None:
    assert supports(dataclasses.replace(GOOD, **changes)) == f"CUDA kernels: {reason}"


@pytest.mark.usefixtures("hopper")
def test_devices_that_do_not_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert supports(GOOD) == "CUDA kernels: there is no CUDA device"
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert supports(GOOD) == "CUDA kernels: torch was built for ROCm; allowed: CUDA"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda index=None: (11, 0))
        reason = "some device has compute capability 11.0; allowed: 9.0 (Hopper)"
        assert supports(GOOD) == f"CUDA kernels: {reason}"
        with pytest.raises(KernelError, match=r"compute capability 11\.0"):
            devices.served()
    monkeypatch.setattr(build, "missing", lambda: "the package cuda-bindings is missing")
    assert supports(GOOD) == "CUDA kernels: the package cuda-bindings is missing"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a"), ((12, 1), "sm_121a")],
)
def test_devices_on_which_nothing_ran_are_served_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    given = f"some device has compute capability {capability[0]}.{capability[1]}: compiled for it, never run there"
    reason = f"CUDA kernels: {given}; allowed: 9.0 (Hopper), or MXK_CUDA_UNMEASURED=1"
    assert supports(GOOD) == reason
    with pytest.raises(KernelError, match="never run there"):
        devices.served()
    monkeypatch.setattr(devices, "settings", Settings(cuda_unmeasured=True))
    assert supports(GOOD) is None
    assert str(select(GOOD)) == f"cuda/nvrtc/{architecture}"
    assert str(devices.served()).endswith("not measured, not run")


@pytest.mark.usefixtures("hopper")
def test_the_current_device_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may have become the current one: devices of a machine may differ."""
    monkeypatch.setattr(devices, "settings", Settings(cuda_unmeasured=True))
    for capability, architecture in (((9, 0), "sm_90a"), ((12, 0), "sm_120a"), ((9, 0), "sm_90a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None, now=capability: now)
        assert str(select(GOOD)) == f"cuda/nvrtc/{architecture}"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 9))
    with pytest.raises(KernelError, match=r"compute capability 8\.9"):
        devices.served()


@pytest.mark.usefixtures("hopper")
def test_the_device_of_the_tensors_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current one is: of a Hopper and a device that is not served, and of two kinds that are."""
    kinds = {None: (8, 9), 0: (8, 9), 1: (9, 0), 2: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", kinds.__getitem__)
    monkeypatch.setattr(devices, "settings", Settings(cuda_unmeasured=True))
    reason = "CUDA kernels: some device has compute capability 8.9; allowed: 9.0 (Hopper)"
    case = random_case()
    attributes = {"weight_format": "mxfp4", "top_k": 1}

    def on(index: int, *tensors: Tensor | None) -> list[Tensor | None]:
        like = functools.partial(torch.empty_like, device=f"cuda:{index}")
        return [None if tensor is None else like(tensor) for tensor in tensors]

    with FakeTensorMode(allow_non_fake_inputs=True):
        descs = [
            MoEDesc.from_call(*on(index, *case.routing, *case.weights), **case.attributes)
            for index in range(3)
        ]
        weight = case.w2, case.w2_scale
        rows = torch.empty(4, case.w2.shape[1]), torch.empty(4, 2 * case.w2.shape[2])
        call = *(part.bfloat16() for part in rows), case.topk_ids[:, :1], *weight
        judged = [project._judge("routes", *on(index, *call), **attributes) for index in range(3)]
    assert [supports(desc) for desc in descs] == judged == [reason, None, None]
    assert [str(select(desc)) for desc in descs[1:]] == ["cuda/nvrtc/sm_90a", "cuda/nvrtc/sm_120a"]


def test_without_the_bindings_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert build.missing() == "the package cuda-bindings is missing; install mxk-compile[cuda]"
