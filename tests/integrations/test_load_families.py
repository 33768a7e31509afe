"""`load` of Qwen3-MoE, Mixtral and DeepSeek-V3, against transformers' own model in fp32 on the same values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mxk_compile
from mxk_compile.errors import CheckpointError
from mxk_compile.integrations.stock_experts import stock_experts
from mxk_compile.quantize.convert import quantize

transformers = pytest.importorskip("transformers")

HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 4
COMMON = {
    **{"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 256, "max_position_embeddings": 256, "num_experts_per_tok": 2},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "head_dim": 16},
    "Mixtral": {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "tie_word_embeddings": True},
    "DeepseekV3": {
        **{"moe_intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
        **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        **{"v_head_dim": 16, "num_nextn_predict_layers": 0},
    },
}
CASES = [(family, form) for family in FAMILIES for form in ("mxfp4", "int4-g32")]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Each family's small bf16 checkpoint as transformers saves it, in shards, packed by `mxk quantize`."""
    found = {}
    for family, changes in FAMILIES.items():
        torch.manual_seed(5)
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "expert" in name or ".gate." in name:
                    weight.normal_(std=0.3)
                elif weight.dim() > 1:
                    weight.normal_(std=0.12)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.tensor([0.1, -0.2001, 0.30003, 0.0]))
        source = tmp_path_factory.mktemp(family)
        # In fp32 but for the experts' rounding: what load makes of the dense part shows.
        model.save_pretrained(source, max_shard_size="200KB")
        for form in ("mxfp4", "int4-g32"):
            found[family, form] = source.parent / f"{family}-{form}"
            quantize(source, found[family, form], form)
    return found


@pytest.fixture
def copy(folders: dict[tuple[str, str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint to break, its tensors in one file."""

    def make(family: str, form: str) -> Path:
        target = tmp_path / f"{family}-{form}"
        target.mkdir()
        shutil.copyfile(folders[family, form] / "config.json", target / "config.json")
        save_file(tensors(folders[family, form]), target / "model.safetensors")
        return target

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the safetensors package."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Packed rows to fp32 by the formats' definitions: MXFP4 bytes, or INT4 words with 8 for zero."""
    groups = scale.float().numpy()
    if codes.dtype == torch.uint8:
        data = codes.numpy()
        elements = E2M1[np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)]
        groups = np.exp2(scale.numpy().astype(np.float64) - 127)
    else:
        words = codes.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)
        elements = (words & 15).astype(np.float64).reshape(*codes.shape[:-1], -1) - 8
    return torch.from_numpy(elements * np.repeat(groups, 32, axis=-1)).float()


def plain_model(folder: Path, family: str) -> Any:
    """transformers' own model in fp32, by its own loader, from the values of the packed checkpoint."""
    state = tensors(folder)
    names = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name in sorted(state):
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            both, down = (
                values(state.pop(f"{prefix}.{part}"), state.pop(f"{prefix}.{part}_scale"))
                for part in ("gate_up_proj", "down_proj")
            )
            for expert in range(EXPERTS):
                parts = (*both[expert].chunk(2), down[expert])
                for part, value in zip(names, parts, strict=True):
                    state[f"{prefix}.{expert}.{part}.weight"] = value.clone()
        elif name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            state[stem] = values(state.pop(name), state.pop(f"{stem}_scale"))
            del state[f"{stem}_shape"]
    target = folder.with_name(f"{folder.name}-plain")
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: value.float() for name, value in state.items()}, target / "model.safetensors")
    kind = getattr(transformers, f"{family}ForCausalLM")
    model, info = kind.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def rel_l2(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def median_of_tokens(logits: Tensor, expected: Tensor) -> float:
    """rel_l2 of the middle token: one whose routes are a near-tie may take another expert."""
    return sorted(map(rel_l2, logits[0], expected[0]))[len(logits[0]) // 2]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_those_of_the_family_on_the_same_values(
    family: str, form: str, folders: dict[tuple[str, str], Path]
) -> None:
    folder = folders[family, form]
    plain = plain_model(folder, family)
    model = mxk_compile.load(folder, dtype=torch.float32)
    packed = stock_experts(model)
    assert len(packed) == 2 - (family == "DeepseekV3")
    assert {module.weight_format for module in packed.values()} == {form.removesuffix("-g32")}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in state.values())
    assert not model.training
    dense = {name: value for name, value in plain.state_dict().items() if ".mlp.experts." not in name}
    assert all(torch.equal(state.get(name, model.lm_head.weight), value) for name, value in dense.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (family == "Mixtral")
    ids = torch.randint(2, 250, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        # What is left is the bf16 of the experts; another expert, row or nibble gives about 1.
        assert median_of_tokens(model(input_ids=ids).logits, expected) < 0.02
        for module in packed.values():
            module.w13_weight.copy_(module.w13_weight.roll(1, 0))
        assert median_of_tokens(model(input_ids=ids).logits, expected) > 0.1


def test_bf16_leaves_the_bias_that_chooses_experts_in_float32(
    folders: dict[tuple[str, str], Path],
) -> None:
    model = mxk_compile.load(folders["DeepseekV3", "int4-g32"])
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(bias, torch.tensor([0.1, -0.2001, 0.30003, 0.0]))


@pytest.mark.parametrize(("family", "form"), [("Qwen3Moe", "mxfp4"), ("Mixtral", "int4-g32")])
def test_generate_runs_compiled(family: str, form: str, folders: dict[tuple[str, str], Path]) -> None:
    model = mxk_compile.load(folders[family, form])
    ids = torch.randint(2, 250, (1, 7), generator=torch.Generator().manual_seed(2))
    report = mxk_compile.explain(model, input_ids=ids, use_cache=False)
    assert report.num_fused == len(report.nodes) == 2, str(report)
    torch._dynamo.reset()
    model.compile(backend="mxk", options={"inner_backend": "aot_eager"}, fullgraph=True)
    tokens = model.generate(
        ids, do_sample=False, max_new_tokens=6, cache_implementation="static", eos_token_id=-1
    )
    torch._dynamo.reset()
    with torch.no_grad():
        logits = model.forward(input_ids=tokens).logits[0, 6:-1].float()  # not compiled
    # Each was the most probable one for the stock path too, up to rounding.
    behind = logits.max(-1).values - logits.gather(-1, tokens[0, 7:, None])[:, 0]
    assert len(behind) == 6
    assert behind.max() < 0.1 * logits.std()


def test_a_checkpoint_named_as_kimi_is_of_its_architecture(copy: Callable[..., Path]) -> None:
    folder = copy("DeepseekV3", "int4-g32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    # And a layer of multi-token prediction, which transformers leaves aside.
    state = load_file(folder / "model.safetensors")
    save_file({**state, "model.layers.61.eh_proj.weight": torch.ones(2)}, folder / "model.safetensors")
    assert len(stock_experts(mxk_compile.load(folder))) == 1


STACK = "model.layers.1.mlp.experts.down_proj"
SINGLE = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
WHOLE = "exactly the .* tensors that config.json implies"
QWEN, MIXTRAL = ("Qwen3Moe", "mxfp4"), ("Mixtral", "int4-g32")


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        (QWEN, {f"{STACK}_scale": None}, f"missing {STACK}_scale; allowed: {WHOLE}"),
        (QWEN, {f"{STACK}_bias": torch.ones(2)}, f"unexpected {STACK}_bias; allowed: {WHOLE}"),
        (MIXTRAL, {f"{SINGLE}_packed": None}, f"missing tensor {SINGLE}_packed"),
        (MIXTRAL, {f"{SINGLE}_scale": torch.ones(64, 2)}, f"{SINGLE}_scale: "),
        (MIXTRAL, {"model.norm.weight": None}, rf"missing model.norm.weight; allowed: {WHOLE} and those of"),
        (MIXTRAL, {"model.layers.2.norm.weight": torch.ones(2)}, "unexpected model.layers.2.norm.weight"),
        (MIXTRAL, {"model.norm.weight": torch.ones(32)}, r"model.norm.weight: shape \[32\]; allowed: \[64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    case: tuple[str, str], change: dict[str, Tensor | None], said: str, copy: Callable[..., Path]
) -> None:
    folder = copy(*case)
    state = {**load_file(folder / "model.safetensors"), **change}
    save_file(
        {name: value for name, value in state.items() if value is not None}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=said) as raised:
        mxk_compile.load(folder)
    assert "\n" not in str(raised.value)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def scheme(**changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}}
    return {
        "quantization_config": {
            **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "config_groups": groups,
        }
    }


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        (
            QWEN,
            {"architectures": ["LlamaForCausalLM"]},
            "allowed: GptOss.*, Qwen3Moe.*, Mixtral.*, DeepseekV3",
        ),
        (
            QWEN,
            {"quantization_config": {"quant_method": "awq"}},
            "'awq' of Qwen3.*: mxfp4_stacked or compressed-",
        ),
        (QWEN, {"quantization_config": None}, "None of Qwen3MoeForCausalLM; allowed: mxfp4_stacked or"),
        (
            QWEN,
            {"quantization_config": {"quant_method": "mxfp4_stacked", "row_order": "x"}},
            "row_order='x' for scheme 'mxfp4'; allowed: ",
        ),
        (QWEN, {"moe_intermediate_size": 128}, r"mlp\.experts: packed .* 96\); allowed: .* 128\); check"),
        (
            QWEN,
            {"num_local_experts": 8},
            r"model\.layers\.0\.mlp\.gate\.weight: shape \[4, 64\]; allowed: \[8, 64\]",
        ),
        (QWEN, {"num_local_experts": 0}, "num_local_experts 0; allowed: a number of at least 1"),
        (QWEN, {"num_experts_per_tok": 5}, "num_experts_per_tok 5; allowed: at most 4 experts"),
        (QWEN, {"hidden_act": "gelu"}, "hidden_act 'gelu'; allowed: silu"),
        (QWEN, {"head_dim": 15}, "head_dim.*15"),
        (QWEN, {"mlp_only_layers": [0, 1]}, r"missing model\.layers\.0\.mlp\.down_proj"),
        (MIXTRAL, {"sliding_window": -3}, "sliding_window -3; allowed: a number of at least 1"),
        (MIXTRAL, scheme(num_bits=8), "8 bits; allowed: 4 bits"),
        (MIXTRAL, scheme(symmetric=False), "missing tensor .*zero_point"),
        (MIXTRAL, scheme(group_size=64), r"group_size 64 \(config.json\)"),
        (MIXTRAL, scheme(type="float"), "type 'float'"),
    ],
)
def test_configs_that_do_not_fit_are_one_line(
    case: tuple[str, str], change: dict[str, Any], said: str, copy: Callable[..., Path]
) -> None:
    folder = copy(*case)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=said) as raised:
        mxk_compile.load(folder)
    assert str(raised.value).startswith(str(folder))
    assert "\n" not in str(raised.value)


def test_int4_with_zero_points_is_one_line(copy: Callable[..., Path]) -> None:
    folder = copy(*MIXTRAL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **scheme(symmetric=False)}))
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith("_scale")]:
        rows, groups = state[name].shape
        zero = torch.full((rows // 8, groups), 0x77777777, dtype=torch.int32)
        state[name.removesuffix("scale") + "zero_point"] = zero
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="INT4 with zero points; allowed: .* symmetric INT4; "):
        mxk_compile.load(folder)


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_damaged_shard_is_named(damage: str, folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["Qwen3Moe", "int4-g32"], tmp_path / "copy"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()[:-100]
    shard.unlink()
    if damage == "truncated":
        shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=shard.name) as raised:
        mxk_compile.load(folder)
    assert "\n" not in str(raised.value)


_PEAK = """
import re, sys, mxk_compile
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
mxk_compile.load(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again at the present size
before = status("VmRSS")
model = mxk_compile.load(sys.argv[2])
print(status("VmHWM") - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("form", ["mxfp4", "int4-g32"])
def test_memory_is_bounded_by_the_packed_size(
    form: str, folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Eight layers of 16 experts that would take 402 MB in bf16 and take 113 packed."""
    sizes = {"moe_intermediate_size": 1024, "num_experts": 16, "head_dim": 16, "hidden_size": 512}
    more = {"num_hidden_layers": 8, "layer_types": None}
    config = transformers.Qwen3MoeConfig(**{**COMMON, **sizes, **more})
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    state: dict[str, Tensor] = {}
    for name, empty in model.state_dict().items():
        if "experts." not in name:
            state[name] = torch.zeros(empty.shape, dtype=torch.bfloat16)
        elif form == "mxfp4":
            state[name] = torch.zeros(*empty.shape[:2], empty.shape[2] // 2, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(*empty.shape[:2], empty.shape[2] // 32, dtype=torch.uint8)
        else:
            for expert in range(16):
                parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                for part in parts:
                    rows, columns = empty.shape[1] // len(parts), empty.shape[2]
                    stem = f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
                    state[f"{stem}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
                    state[f"{stem}_scale"] = torch.zeros(rows, columns // 32, dtype=torch.bfloat16)
    save_file(state, tmp_path / "model.safetensors")
    small = folders["Qwen3Moe", form]
    packing = json.loads((small / "config.json").read_text())["quantization_config"]
    content = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "quantization_config": packing}
    (tmp_path / "config.json").write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(small), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, total = map(int, done.stdout.split())
    assert total > 100_000_000
    # The tensors once, a layer twice (INT4 is packed anew), and the codes of an expert at a byte each.
    assert 0.8 * total < grown < 1.3 * total + 20_000_000
