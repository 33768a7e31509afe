"""`mxk::moe` on a GPU against the fp32 reference, through both kernels: numbers, layouts, ids, streams and graphs."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.testing import MoECase, random_case, rel_l2, variant_case
from mxk_compile.variants import VARIANTS

pytestmark = pytest.mark.gpu

MOST_ERROR = 4e-3  # bf16 rounding of the intermediate and of the result
MXFP4 = [variant for variant in VARIANTS.values() if variant.weight_format == "mxfp4"]
TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024)
SCHEDULES = ("decode:max_routes=256", "prefill:128", "prefill:16/32/64", "prefill:80/96/112/128")
Force = Callable[[str], None]


def check(case: MoECase) -> Tensor:
    """The result, after comparing it with the reference and with a second run."""
    result = case.fused()
    assert rel_l2(result, case.reference()) <= MOST_ERROR
    assert torch.equal(result, case.fused()), "the same call gives the same bits"
    return result


def small(variant: Any, **changes: Any) -> MoECase:
    """A model row with fewer experts and columns, in the row's proportions of ragged blocks."""
    sizes = {"hidden_size": 736, "intermediate_size": 480, "num_experts": 16, "device": "cuda"}
    return variant_case(variant, **{**sizes, **changes})


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("variant", MXFP4, ids=lambda variant: variant.name)
def test_every_model_row_at_every_number_of_tokens(variant: Any, num_tokens: int) -> None:
    check(small(variant, num_tokens=num_tokens, seed=num_tokens))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("variant", MXFP4, ids=lambda variant: variant.name)
def test_every_schedule_runs_every_model_row(variant: Any, name: str, force: Force) -> None:
    force(name)
    check(small(variant, num_tokens=21))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"), [(32, 32), (96, 64), (64, 96), (2880, 720 // 32 * 32), (1504, 2880)]
)
def test_ragged_sizes(hidden_size: int, intermediate_size: int, name: str, force: Force) -> None:
    force(name)
    for order, bias in itertools.product(("gate_up", "up_gate", "interleaved"), (False, True)):
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        check(random_case(num_tokens=13, num_experts=5, row_order=order, bias=bias, device="cuda", **sizes))


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (2, 2), (512, 1), (512, 16), (17, 16)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_of_experts_and_slots(num_experts: int, top_k: int, name: str, force: Force) -> None:
    force(name)
    check(random_case(num_tokens=9, num_experts=num_experts, top_k=top_k, device="cuda"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_tokens_on_one_expert(name: str, force: Force) -> None:
    force(name)
    check(random_case(num_tokens=120, top_k=1, hot=True, device="cuda"))
    check(random_case(num_tokens=100, top_k=2, hot=True, device="cuda"))  # duplicates add


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_ids_of_every_integer_type(dtype: torch.dtype, name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=6, experts_min=3, device="cuda")
    expected = case.fused()
    case.topk_ids = case.topk_ids.to(dtype)
    assert torch.equal(case.fused(), expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_ids_that_are_not_here_add_nothing(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=8, top_k=4, experts_min=2, device="cuda")
    strange = torch.tensor([-1, 0, 1, 10, 2**32 + 3, -(2**63), 2**63 - 1, 5], device="cuda")
    case.topk_ids[:, 1] = strange
    case.topk_ids[3] = -1
    result = check(case)
    assert torch.equal(result[3], torch.zeros_like(result[3]))
    assert not torch.signbit(result[3]).any()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_token_knows_nothing_of_other_tokens_and_experts(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=10, num_experts=4, top_k=1, device="cuda")
    case.topk_ids[:, 0] = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, -1], device="cuda")
    clean = case.fused()
    case.hidden_states[3] = torch.nan
    case.w13_scale[1], case.w2_scale[3] = 255, 255
    dirty = case.fused()
    kept = [0, 2, 5, 6, 8, 9]
    assert torch.equal(dirty[kept], clean[kept])
    assert dirty[[1, 3, 4, 7]].isnan().all()
    assert torch.equal(dirty[9], torch.zeros_like(dirty[9]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_scale_byte(name: str, force: Force) -> None:
    force(name)
    # 32 rows of one group each: byte b times a one-hot token is the weight itself.
    case = random_case(
        num_tokens=8, num_experts=8, top_k=1, hidden_size=32, intermediate_size=32, device="cuda"
    )
    case.topk_ids[:, 0] = torch.arange(8, device="cuda")
    case.w2_scale[:] = torch.arange(256, device="cuda", dtype=torch.int64).to(torch.uint8).view(8, 32, 1)
    result, expected = case.fused().float(), case.reference(round_intermediate=True).bfloat16().float()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    finite = expected.isfinite() & (expected.abs() > 1e-36)
    assert ((result - expected)[finite].abs() <= 2**-6 * expected[finite].abs()).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_scales_that_change_in_place_are_seen(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=4, device="cuda")
    check(case)
    case.w13_scale[:] = torch.randint(120, 135, case.w13_scale.shape, dtype=torch.uint8, device="cuda")
    check(case)


@pytest.mark.parametrize("name", SCHEDULES)
def test_lists_and_views_are_read_where_they_lie(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=7, bias=True, hidden_size=96, intermediate_size=64, device="cuda")
    expected = check(case)
    lists = torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes)
    assert torch.equal(lists, expected)

    def with_gap(tensor: Tensor | None, columns: int) -> Tensor | None:
        if tensor is None:
            return None
        shape = (tensor.shape[0], tensor.shape[1] + 3, *(size + columns for size in tensor.shape[2:]))
        wide = torch.full(shape, 7, dtype=tensor.dtype, device="cuda")
        view = wide[:, 1 : 1 + tensor.shape[1]]
        for dim, size in enumerate(tensor.shape[2:], 2):
            view = view.narrow(dim, columns // 2, size)
        return view.copy_(tensor)

    for columns in (0, 32, 6):  # odd gaps are copied
        gapped = [with_gap(weight, columns) for weight in case.weights]
        assert torch.equal(torch.ops.mxk.moe(*case.routing, *gapped, **case.attributes), expected)
    half = case.weights[0].shape[1] // 2
    separate = [
        [*(part[:half] for part in weight), *(part[half:] for part in weight)] for weight in case.lists[:2]
    ]
    bias = [*(part[:half] for part in case.lists[6]), *(part[half:] for part in case.lists[6])]
    attributes = {**case.attributes, "row_order": "separate"}
    weights = (*separate, *case.lists[2:6], bias, case.lists[7])
    assert torch.equal(torch.ops.mxk.moe.lists(*case.routing, *weights, **attributes), expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_strided_inputs_and_their_types(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=9, hidden_size=160, device="cuda")
    expected = check(case)
    wide = torch.full((9, 400), torch.nan, dtype=torch.bfloat16, device="cuda")
    for view in (wide[:, 8:168], wide[:, 3:163], wide[:, :320:2]):
        strided = dataclasses.replace(case, hidden_states=view.copy_(case.hidden_states))
        strided.topk_ids = case.topk_ids.t().contiguous().t()
        strided.topk_weights = case.topk_weights.t().contiguous().t()
        assert torch.equal(strided.fused(), expected)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(
            dataclasses.replace(case, topk_weights=case.topk_weights.to(dtype)).fused(), expected
        )
    case.topk_weights = case.topk_weights.half()
    check(case)


def test_no_tokens() -> None:
    case = random_case(num_tokens=0, device="cuda")
    assert case.fused().shape == (0, 128)
    assert random_case(num_tokens=0, per_route=True, device="cuda").fused().shape == (0, 2, 128)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_graph_replays_with_new_inputs(name: str, force: Force) -> None:
    force(name)
    case, other = (random_case(num_tokens=12, seed=0, device="cuda") for _ in range(2))
    fresh = random_case(num_tokens=12, seed=1, device="cuda")
    case.fused()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = case.fused()
        second = case.fused()
    for source in (fresh, other):
        for target, value in zip(case.routing, source.routing, strict=True):
            target.copy_(value)
        graph.replay()
        expected = dataclasses.replace(case).fused()
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


def test_a_first_call_may_be_captured(force: Force) -> None:
    force("decode:max_routes=64")
    case = random_case(num_tokens=3, num_experts=7, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.fused()
    graph.replay()
    assert rel_l2(result, case.reference()) <= MOST_ERROR


@pytest.mark.parametrize("name", SCHEDULES)
def test_graphs_on_several_streams_do_not_share_counters(name: str, force: Force) -> None:
    force(name)
    cases = [random_case(num_tokens=6, seed=seed, device="cuda") for seed in range(3)]
    expected = [case.fused() for case in cases]
    graphs, results = [], []
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(case.fused())
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, value) for result, value in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_streams_and_threads(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=6, device="cuda")
    expected = case.fused()
    torch.cuda.synchronize()
    wrong = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            results = [case.fused() for _ in range(20)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(result for result in results if not torch.equal(result, expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("num_tokens", [4, 200])
def test_reduce_overhead(num_tokens: int) -> None:
    case = random_case(num_tokens=num_tokens, device="cuda")

    class Layer(torch.nn.Module):
        def forward(self, *routing: Tensor) -> Tensor:
            return torch.ops.mxk.moe(*routing, *case.weights, **case.attributes) * 2

    compiled = torch.compile(Layer(), mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            fresh = random_case(num_tokens=num_tokens, seed=seed, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(*fresh.routing).clone()
            expected = torch.ops.mxk.moe(*fresh.routing, *case.weights, **case.attributes) * 2
            assert torch.equal(result, expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_second_device(name: str, force: Force) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    force(name)
    cases = [random_case(num_tokens=5, device=f"cuda:{index}") for index in (1, 0, 1)]
    results = [case.fused().cpu() for case in cases]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_dequant() -> None:
    from mxk_compile.ops.formats import mxfp4

    packed = torch.randint(0, 256, (5, 77, 48), dtype=torch.uint8)
    scale = torch.randint(0, 256, (5, 77, 3), dtype=torch.uint8)
    expected = mxfp4.unpack(packed, scale).view(torch.int16)
    for weight in (
        packed.cuda(),
        packed.view(torch.int32).cuda(),
        packed.transpose(0, 1).cuda().transpose(0, 1),
    ):
        result = torch.ops.mxk.mxfp4_dequant(weight, scale.cuda())
        nan = result.isnan().cpu()
        assert torch.equal(nan, expected.view(torch.bfloat16).isnan())
        assert torch.equal(result.view(torch.int16).cpu()[~nan], expected[~nan])
    short = torch.ops.mxk.mxfp4_dequant(packed[..., :4].cuda(), scale[..., :1].cuda())
    assert torch.equal(short.cpu().isnan(), mxfp4.unpack(packed[..., :4], scale[..., :1]).isnan())
