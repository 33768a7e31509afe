"""`convert`: experts of transformers' families against the unconverted model in fp32 with the same weight values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mxk_compile
from mxk_compile.checkpoint import PackedExperts
from mxk_compile.errors import CallError
from mxk_compile.integrations.stock_experts import StockExperts, stock_experts
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.testing import random_case, rel_l2

transformers = pytest.importorskip("transformers")

HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 8
COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DEEPSEEK = {
    **{"moe_intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS, "n_shared_experts": 1, **LATENT},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "GptOss": {
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "head_dim": 16,
        "sliding_window": 24,
    },
    "Qwen3Moe": {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "head_dim": 16},
    "Mixtral": {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
}
CASES = [
    (name, form) for name in FAMILIES for form in ("mxfp4", "int4") if (name, form) != ("GptOss", "int4")
]


def random_model(family: str, **changes: Any) -> Any:
    """A small model in fp32 whose routes are no near-ties and whose experts matter."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "expert" in name or ".gate." in name or "router" in name:
                weight.normal_(std=0.3)
            elif weight.dim() > 1:
                weight.normal_(std=0.12)
    return model


def unpacked(experts: StockExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [E, 2I, K] and [E, K, I] of packed experts."""
    values = []
    for weight, scale in (
        (experts.w13_weight, experts.w13_weight_scale),
        (experts.w2_weight, experts.w2_weight_scale),
    ):
        if experts.weight_format == "mxfp4":
            values.append(mxfp4.unpack(weight, scale, torch.float32))
        else:
            values.append(int4.unpack(weight, scale, weight_format="int4", pack_dim="output"))
    return values[0], values[1]


def with_values_of(plain: Any, converted: Any) -> Any:
    """The unconverted model with the converted one's weight values, fp32."""
    for name, experts in stock_experts(converted).items():
        module = plain.get_submodule(name)
        for target, value in zip((module.gate_up_proj, module.down_proj), unpacked(experts), strict=True):
            with torch.no_grad():
                target.copy_(value.transpose(1, 2) if module.is_transposed else value)
    return plain


def median_of_tokens(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """rel_l2 of the middle token: one whose routes are a near-tie may take another expert."""
    return sorted(map(rel_l2, logits[0], expected[0]))[len(logits[0]) // 2]


@pytest.mark.parametrize(("family", "weight_format"), CASES)
def test_logits_are_those_of_the_family_on_the_same_values(family: str, weight_format: str) -> None:
    plain = random_model(family)
    quantised = mxk_compile.convert(copy.deepcopy(plain), weight_format)
    layers = 2 - (family in ("DeepseekV2", "DeepseekV3"))
    assert len(stock_experts(quantised)) == layers
    assert not [
        name for name, _ in quantised.named_parameters() if "experts." in name and "shared" not in name
    ]
    # The rounding itself: 4 bits are off by about a tenth, a swapped row or nibble by about 1.4.
    for name, experts in stock_experts(quantised).items():
        module = plain.get_submodule(name)
        original = module.gate_up_proj.transpose(1, 2) if module.is_transposed else module.gate_up_proj
        assert rel_l2(unpacked(experts)[0], original.detach()) < 0.15
    with_values_of(plain, quantised)
    ids = torch.randint(2, 250, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, experts in stock_experts(quantised).items():
            x, weights = torch.randn(24, HIDDEN), torch.rand(24, 2)
            routes = torch.rand(24, EXPERTS).topk(2).indices
            expected = plain.get_submodule(name)(x, routes, weights)
            assert rel_l2(experts(x, routes, weights), expected) < 0.012
        expected, logits = plain(input_ids=ids).logits, quantised(input_ids=ids).logits
        assert median_of_tokens(logits, expected) < 0.02
        compiled = torch.compile(quantised, backend="mxk", options={"inner_backend": "aot_eager"})
        assert median_of_tokens(compiled(input_ids=ids).logits, expected) < 0.02
        # What was converted matters: other experts give other logits.
        for experts in stock_experts(quantised).values():
            experts.w13_weight.copy_(experts.w13_weight.roll(1, 0))
        assert median_of_tokens(quantised(input_ids=ids).logits, expected) > 0.1


@pytest.mark.parametrize(("family", "weight_format"), [*CASES[:3], *CASES[-2:]])
def test_generate_with_a_static_cache_compiles_decode_at_most_three_times(
    family: str, weight_format: str
) -> None:
    model = mxk_compile.convert(random_model(family), weight_format).bfloat16()
    ids = torch.randint(2, 250, (1, 7), generator=torch.Generator().manual_seed(2))
    report = mxk_compile.explain(model, input_ids=ids, use_cache=False)
    assert report.num_fused == len(report.nodes) == len(stock_experts(model)), str(report)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="mxk", options={"inner_backend": "aot_eager"}, fullgraph=True)
    tokens = model.generate(
        ids, do_sample=False, max_new_tokens=10, cache_implementation="static", eos_token_id=-1
    )
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    # The prompt, and those of decode.
    assert 2 <= counters["stats"]["unique_graphs"] <= 1 + 3
    torch._dynamo.reset()
    with torch.no_grad():
        logits = model.forward(input_ids=tokens).logits[0, 6:-1].float()  # not compiled
    # Each was the most probable one for the stock path too, up to rounding.
    behind = logits.max(-1).values - logits.gather(-1, tokens[0, 7:, None])[:, 0]
    assert len(behind) == 10
    assert behind.max() < 0.1 * logits.std()


@pytest.mark.parametrize("row_order", ["gate_up", "interleaved"])
@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_packed_weights_are_taken(row_order: str, weight_format: str) -> None:
    family = "GptOss" if row_order == "interleaved" else "Mixtral"
    model = random_model(family)
    case = random_case(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        weight_format=weight_format,
        row_order=row_order,
        bias=family == "GptOss",
    )
    names = ("w13", "w13_scale", "w2", "w2_scale", "w13_zero", "w2_zero", "w13_bias", "w2_bias")
    packed = PackedExperts(
        **dict(zip(names, case.weights, strict=True)), weight_format=weight_format, row_order=row_order
    )
    asked = []

    def give(name: str) -> PackedExperts:
        asked.append(name)
        return packed

    if (family, weight_format) == ("GptOss", "uint4"):
        with pytest.raises(CallError, match="weight_format='uint4' with interleaved rows; allowed: "):
            mxk_compile.convert(model, packed=give)
        return
    for layer in model.model.layers:
        layer.mlp.experts.to("meta")
    mxk_compile.convert(model, packed=give)
    experts = stock_experts(model)
    assert asked == list(experts)
    first = experts[asked[0]]
    x, ids, weights = case.routing
    arguments, attributes = first.fused_call()
    expected = torch.ops.mxk.moe(x, ids, weights, *arguments, **attributes).float()
    assert rel_l2(first(x, ids, weights), expected) < 0.02
    gate_up, down = unpacked(first)
    # Same values as the tensors that were given.
    if weight_format == "mxfp4":
        assert torch.equal(gate_up, mxfp4.unpack(case.w13, case.w13_scale, torch.float32))
    else:
        assert torch.equal(gate_up, int4.unpack(case.w13, case.w13_scale))
        assert torch.equal(down, int4.unpack(case.w2, case.w2_scale))


def test_refusals_change_nothing() -> None:
    model = random_model("Mixtral")
    name = "model.layers.1.mlp.experts (MixtralExperts)"

    def refused(text: str, *arguments: Any, **keywords: Any) -> None:
        with pytest.raises(CallError) as caught:
            mxk_compile.convert(model, *arguments, **keywords)
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)
        assert not stock_experts(model)

    refused("mxk_compile.convert: weight_format='nf4'; allowed: mxfp4, int4; ", "nf4")
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.down_proj[3, 2, 1] = torch.inf
    refused(f"mxk_compile.convert: {name}: down_proj with inf or NaN; allowed: experts of gpt-oss")
    with torch.no_grad():
        experts.down_proj[3, 2, 1] = 0
    act_fn, experts.act_fn = experts.act_fn, torch.nn.GELU()
    refused(f"mxk_compile.convert: {name}: a gate that is neither SiLU nor SwiGLU-OAI; allowed: ")
    experts.act_fn = act_fn
    mxk_compile.convert(model)
    assert len(stock_experts(model)) == 2


@pytest.mark.parametrize("shared", ["experts", "mlp"])
def test_layers_that_share_a_module_share_its_replacement(shared: str) -> None:
    model = random_model("Mixtral")
    first, second = model.model.layers
    if shared == "experts":
        second.mlp.experts = first.mlp.experts
    else:
        second.mlp = first.mlp
    ids = torch.randint(2, 250, (1, 24), generator=torch.Generator().manual_seed(1))
    expected = with_values_of(copy.deepcopy(model), mxk_compile.convert(copy.deepcopy(model)))(
        input_ids=ids
    ).logits
    mxk_compile.convert(model)
    assert isinstance(first.mlp.experts, StockExperts)
    assert second.mlp.experts is first.mlp.experts
    assert median_of_tokens(model(input_ids=ids).logits.detach(), expected.detach()) < 0.02


def test_arguments_of_other_types_are_one_line() -> None:
    for arguments, text in (
        (
            (None,),
            "mxk_compile.convert: model is a NoneType; allowed: a torch.nn.Module; give the model itself",
        ),
        (
            (random_model("Mixtral"), "mxfp4", "folder"),
            "mxk_compile.convert: packed is a str; allowed: a function",
        ),
        (
            (random_model("Mixtral"), "mxfp4", lambda name: None),
            "mxk_compile.convert: model.layers.0.mlp.experts: packed gave a NoneType; allowed: PackedExperts; ",
        ),
    ):
        with pytest.raises(CallError) as caught:
            mxk_compile.convert(*arguments)  # type: ignore[arg-type]
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)


def test_other_models_are_refused() -> None:
    with pytest.raises(CallError, match="mxk_compile.convert: Linear without them; allowed: "):
        mxk_compile.convert(torch.nn.Linear(2, 2))
    with pytest.raises(CallError, match=r"biases and SwiGLU-OAI, which no stock op has for int4; "):
        mxk_compile.convert(random_model("GptOss"), "int4")
    odd = random_model("Qwen3Moe", moe_intermediate_size=40)
    with pytest.raises(CallError, match="K and I of 64 and 40, not multiples of 32; "):
        mxk_compile.convert(odd)
    with pytest.raises(CallError, match="MixtralExperts, the experts alone; allowed: a model that holds"):
        mxk_compile.convert(random_model("Mixtral").model.layers[0].mlp.experts)
    with pytest.raises(CallError, match="weights on the meta device, which hold no values; "):
        mxk_compile.convert(random_model("Mixtral").to("meta"))
    with pytest.raises(CallError, match=r"weights of torch.float8_e4m3fn; "):
        mxk_compile.convert(random_model("Mixtral").to(torch.float8_e4m3fn))
    clamped = random_model("Mixtral")
    for layer in clamped.model.layers:
        layer.mlp.experts._apply_gate = lambda joined: joined.chunk(2, dim=-1)[1]
    with pytest.raises(CallError, match="a gate that is neither SiLU nor SwiGLU-OAI"):
        mxk_compile.convert(clamped)
