"""`load(path)`: a checkpoint with packed experts as the transformers model, its experts calling the stock op.

The model is built without memory and filled tensor by tensor, its experts a layer at a time by `convert`: nothing but
the packed bytes, the dense rest, and one tensor or, where INT4 is packed anew, one layer ever exists. Inference only:
no parameter asks for a gradient.

    model = load(path)
    model.compile(backend="mxk")            # or torch.compile(model, backend="mxk")
    model.generate(ids, cache_implementation="static")

`Session` and `greedy` are a decoding loop that compiles once.
"""

from __future__ import annotations

import importlib
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxk_compile.checkpoint import Checkpoint
from mxk_compile.errors import CallError, CheckpointError, MxkError
from mxk_compile.integrations.convert import convert, routed_experts
from mxk_compile.ops.formats.int4 import FLOAT_DTYPES

# What quantization_config may name; no quantization_config stands for gpt-oss's own.
_PACKED = ("mxfp4_stacked", "compressed-tensors")
ARCHITECTURES = {
    "GptOssForCausalLM": ("mxfp4",),
    "Qwen3MoeForCausalLM": _PACKED,
    "MixtralForCausalLM": _PACKED,
    "DeepseekV2ForCausalLM": _PACKED,
    "DeepseekV3ForCausalLM": _PACKED,  # Kimi-K2 names it, too
}
_DTYPES = (torch.bfloat16, torch.float32)
# Tensors of a layer's experts; those of compressed-tensors are looked up one by one as they are read.
_EXPERT_PARTS = {
    method: tuple(f"{projection}{part}" for projection in ("gate_up_proj", "down_proj") for part in parts)
    for method, parts in (("mxfp4", ("_blocks", "_scales", "_bias")), ("mxfp4_stacked", ("", "_scale")))
}
_ATTENTION = (None, "eager", "flex_attention")  # others need a package, or fetch and run code
_LAYER_TYPES = ("sliding_attention", "full_attention")
_COUNTS = (
    *("num_hidden_layers", "num_experts_per_tok", "hidden_size", "intermediate_size"),
    *("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
# The gain of the published gpt-oss code; checkpoints do not state it.
_ALPHA = 1.702
_LIMIT = 7.0
# Cache lengths are rounded up to this: requests of similar length then share one compiled graph.
_CACHE_STEP = 256


def load(path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> Any:
    """The transformers model of a checkpoint directory, in eval mode, ready for `torch.compile(backend="mxk")`.

    gpt-oss as published (MXFP4); Qwen3-MoE, Mixtral, DeepSeek-V2 and -V3 (Kimi-K2 is of that class) with experts in
    plain MXFP4 as `mxk quantize` writes them, or in symmetric INT4 of compressed-tensors, the rest not quantised.

    Args:
        path: a directory with config.json and safetensors (one file, or shards and an index).
        dtype: of everything but the experts, bfloat16 or float32; the experts stay packed and compute in bfloat16.
        device: where the model goes.

    Raises:
        CheckpointError: not such a directory, another architecture or quantisation, a tensor that is missing,
            unexpected or misshapen.
        CallError: another dtype.
    """
    if dtype not in _DTYPES:
        raise CallError(
            "mxk_compile.load", f"dtype={dtype}", ", ".join(map(str, _DTYPES)), "choose one of them"
        )
    config = read_config(path)
    with Checkpoint(path) as checkpoint:
        with _reading(checkpoint.directory / "config.json"):
            model = _build(config)
        _check_names(checkpoint, model)
        _fill(model, checkpoint, dtype, torch.device(device))
    _load_generation_config(model, Path(path))
    return model.eval()


def read_config(path: str | Path) -> Any:
    """The transformers configuration of a checkpoint directory; raises CheckpointError as `load` does."""
    path = Path(path)
    file = path / "config.json"
    with _reading(path):
        if not path.is_dir():
            given = (
                "a file, not a directory" if path.exists() else "no such directory (nothing is downloaded)"
            )
            raise CheckpointError(str(path), given, "a checkpoint directory", "check the path")
        if not file.is_file():
            raise CheckpointError(str(path), "no config.json", "a checkpoint directory", "check the path")
    checkpoint = Checkpoint(path)
    values, num_tensors = checkpoint.config, len(checkpoint.names())
    found = values.get("architectures") or []
    if not isinstance(found, list) or not any(name in tuple(ARCHITECTURES) for name in found):
        shown = ", ".join(map(str, found)) if isinstance(found, list) else str(found)
        given, allowed = f"architecture {shown or values.get('model_type')!r}", ", ".join(ARCHITECTURES)
        raise CheckpointError(
            str(file), given, f"{allowed}, in a list", "give one, or use mxk_compile.convert"
        )
    architecture = next(name for name in found if name in tuple(ARCHITECTURES))
    methods = ARCHITECTURES[architecture]
    method = checkpoint.quantization().get("quant_method")
    if method not in methods and (checkpoint.quantization() or "mxfp4" not in methods):
        given, advice = f"quant_method {method!r} of {architecture}", "mxk quantize writes them"
        raise CheckpointError(str(file), given, " or ".join(methods), advice)
    num_layers = values.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > num_tensors:  # before anything is built for each layer
        given = f"num_hidden_layers {num_layers} for {num_tensors} tensors"
        raise CheckpointError(str(file), given, "a layer for every number", "repair it")
    with _reading(file):
        kind = getattr(_transformers(), f"{architecture.removesuffix('ForCausalLM')}Config")
        config = kind.from_pretrained(path, local_files_only=True)
        for name, is_right, allowed in _rules(config):
            if not is_right:
                given = f"{name} {getattr(config, name, None)!r}"
                raise CheckpointError(str(file), given, allowed, "give another checkpoint or repair it")
    return config


def _rules(config: Any) -> Iterator[tuple[str, bool, str]]:
    """Name, whether the value is right, what is allowed: of what transformers reads and does not check."""
    for name in _COUNTS:
        yield name, type(getattr(config, name)) is int and getattr(config, name) > 0, "a number of at least 1"
    is_gpt_oss, key = _family(config) == "GptOss", "num_local_experts"
    num_experts, num_heads = getattr(config, key, None) or config.num_experts, config.num_attention_heads
    yield key, type(num_experts) is int and num_experts > 0, "a number of at least 1"
    yield "num_experts_per_tok", config.num_experts_per_tok <= num_experts, f"at most {num_experts} experts"
    rest = num_heads % config.num_key_value_heads
    yield "num_key_value_heads", rest == 0, f"a divisor of {num_heads} heads"
    size = getattr(config, "head_dim", None)
    is_right = not is_gpt_oss if size is None else type(size) is int and size > 0 and size % 2 == 0
    yield "head_dim", is_right, "an even number of at least 2"
    window = getattr(config, "sliding_window", None)
    yield "sliding_window", window is None or window > 0, "a number of at least 1"
    yield "hidden_act", config.hidden_act == "silu", "silu"
    yield "_attn_implementation", config._attn_implementation in _ATTENTION, "eager or flex_attention"
    if is_gpt_oss:
        types = config.layer_types
        is_right = len(types) == config.num_hidden_layers and all(kind in _LAYER_TYPES for kind in types)
        yield "layer_types", is_right, f"{' or '.join(_LAYER_TYPES)} for each layer"
        is_right = window is not None or _LAYER_TYPES[0] not in types
        yield "sliding_window", is_right, "a number of at least 1"
        alpha, limit = _gate(config)
        yield "swiglu_limit", limit > 0, "a number above 0, or null for no limit"
        yield "swiglu_alpha", math.isfinite(alpha), "a finite number"


def _family(config: Any) -> str:
    """Before the "Config" and "ForCausalLM" of its classes; a model_type may be another, as Kimi's is."""
    return type(config).__name__.removesuffix("Config")


def _gate(config: Any) -> tuple[float, float]:
    """alpha and limit of SwiGLU-OAI; inf for none."""
    alpha, limit = getattr(config, "swiglu_alpha", _ALPHA), getattr(config, "swiglu_limit", _LIMIT)
    return float(alpha), math.inf if limit is None else float(limit)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint directory; raises CheckpointError where there is none. Nothing is downloaded."""
    with _reading(path, "tokenizer.json and tokenizer_config.json that transformers reads"):
        load_it = _transformers().AutoTokenizer.from_pretrained
        return load_it(path, local_files_only=True, trust_remote_code=False)


class Session:
    """One sequence: a loaded model, what runs its decode steps, and a static key/value cache.

    Every layer, sliding ones too, gets a cache of full length and leaves the window to the attention mask: the
    window's own cache counts tokens in a Python integer, which would be compiled in and cost recompilations. So all
    decode steps, of any number of sequences after `reset`, run one graph.

    Args:
        model: from `load`.
        length: tokens that must fit, prompt included.
        forward: runs decode steps in place of the model, e.g. `torch.compile(model, backend="mxk")`. The first
            tokens always run on the model itself, which calls the stock op: a graph for each prompt length would be
            compiled for a single use.
    """

    def __init__(self, model: Any, length: int, forward: Callable[..., Any] | None = None) -> None:
        cache_utils = importlib.import_module("transformers.cache_utils")
        length = -(-length // _CACHE_STEP) * _CACHE_STEP
        self.model, self.length = model, length
        self.forward = model if forward is None else forward
        self._cache = cache_utils.Cache(layers=[cache_utils.StaticLayer(length) for _ in model.model.layers])
        # transformers 5.24 renamed the argument and warns about the old name.
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._num_tokens = 0

    def reset(self) -> None:
        """Forget the sequence and keep the memory."""
        if self._num_tokens:
            self._cache.reset()
        self._num_tokens = 0

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Appends tokens and returns the logits [vocabulary] after the last; raises CallError when they do not fit."""
        if not tokens or self._num_tokens + len(tokens) > self.length:
            given = f"{len(tokens)} tokens after {self._num_tokens}"
            raise CallError(
                "Session.feed", given, f"1 to {self.length} in all", "make a session of that length"
            )
        if not 0 <= min(tokens) <= max(tokens) < self.model.config.vocab_size:
            given, allowed = (
                f"tokens {min(tokens)} to {max(tokens)}",
                f"0 to {self.model.config.vocab_size - 1}",
            )
            raise CallError("Session.feed", given, allowed, "use the tokenizer of the checkpoint")
        run = self.forward if self._num_tokens and len(tokens) == 1 else self.model
        ids = torch.tensor([list(tokens)], device=self.model.device)
        cache = {self._cache_argument: self._cache}
        logits: Tensor = run(input_ids=ids, use_cache=True, logits_to_keep=1, **cache).logits
        self._num_tokens += len(tokens)
        return logits[0, -1]


def greedy(
    session: Session, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int] = ()
) -> Iterator[tuple[int, Tensor]]:
    """Yields (token, its logits [vocabulary]) one by one, most probable token first of equals, as they are computed.

    Args:
        session: reset before use.
        prompt: token ids, at least one.
        max_new_tokens: upper limit; the last token is not fed.
        stop: ids that end the sequence, not yielded.
    """
    session.reset()
    logits = session.feed(prompt)
    for index in range(max_new_tokens):
        token = int(logits.argmax())
        if token in stop:
            return
        yield token, logits
        if index + 1 < max_new_tokens:
            logits = session.feed([token])


def stop_tokens(model: Any) -> tuple[int, ...]:
    """The end-of-sequence ids of a loaded model's generation configuration."""
    ids = model.generation_config.eos_token_id
    return () if ids is None else tuple(map(operator.index, ids if isinstance(ids, (list, tuple)) else [ids]))


@contextmanager
def _reading(file: str | Path, allowed: str = "what transformers reads") -> Iterator[None]:
    """Turn whatever comes out of transformers over a file of a checkpoint into CheckpointError, on one line."""
    try:
        yield
    except MxkError:
        raise
    except Exception as error:
        given = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(str(file), given, allowed, "repair it") from error


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        advice = "pip install 'mxk-compile[transformers]'"
        raise MxkError(
            "loading a checkpoint", f"no transformers ({error})", "transformers 5.10 to 5.x", advice
        ) from error


def _build(config: Any) -> Any:
    """The model on the meta device, experts included."""
    with torch.device("meta"):
        model = getattr(_transformers(), f"{_family(config)}ForCausalLM")(config)
    if _family(config) == "GptOss":
        for layer in model.model.layers:
            layer.mlp.experts.alpha, layer.mlp.experts.limit = _gate(config)
    return model


def _in_file(model: Any, name: str) -> str:
    """What checkpoints call a tensor or module of the model: transformers renamed a block of Mixtral."""
    return name.replace(".mlp.", ".block_sparse_moe.") if _family(model.config) == "Mixtral" else name


def _is_tied(model: Any, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)


def _dense(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers of the model that a checkpoint holds, but those of routed experts."""
    inside = tuple(f"{name}." for name, _ in routed_experts(model))
    state = model.state_dict(keep_vars=True).items()
    return {name: empty for name, empty in state if not name.startswith(inside) and not _is_tied(model, name)}


def _check_names(checkpoint: Checkpoint, model: Any) -> None:
    """Every tensor of the model is in the checkpoint and the other way round, or CheckpointError names them."""
    prefixes = [_in_file(model, name) for name, _ in routed_experts(model)]
    parts = _EXPERT_PARTS.get(checkpoint.quantization().get("quant_method", "mxfp4"))
    wanted = {_in_file(model, name) for name in _dense(model)}
    wanted |= {f"{prefix}.{part}" for prefix in prefixes for part in parts or ()}
    others = () if parts else tuple(f"{prefix}." for prefix in prefixes)
    # Layers of multi-token prediction, which transformers leaves aside as well.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    missing = sorted(wanted - set(checkpoint.names()))
    unexpected = sorted(
        name
        for name in set(checkpoint.names()) - wanted
        if not (_is_tied(model, name) or name.startswith(others))
        and not any(re.search(pattern, name) for pattern in ignored)
    )
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            given = f"{kind} {', '.join(names[:5])}{more}"
            allowed = f"exactly the {len(wanted)} tensors that config.json implies"
            if others:
                allowed += " and those of the experts"
            raise CheckpointError(
                str(checkpoint.path), given, allowed, "check that files and config.json belong together"
            )


def _fill(model: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Puts every parameter and buffer of a meta model on the device, one tensor at a time."""
    for name, empty in _dense(model).items():
        checkpoint.expect(_in_file(model, name), FLOAT_DTYPES, tuple(empty.shape))
        value = checkpoint.tensor(_in_file(model, name))
        is_weight = isinstance(empty, nn.Parameter)
        # A buffer keeps the dtype that the model gives it: the bias by which DeepSeek-V3 chooses experts is float32.
        value = value.to(device, dtype if is_weight else empty.dtype)
        owner, _, attribute = name.rpartition(".")
        weight = nn.Parameter(value, requires_grad=False) if is_weight else value
        setattr(model.get_submodule(owner), attribute, weight)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight

    scheme = "gpt_oss" if _family(model.config) == "GptOss" else None
    try:
        convert(model, packed=lambda name: checkpoint.experts(_in_file(model, name), scheme=scheme))
    except CallError as error:
        what = f"{checkpoint.path}: {error.what}"
        raise CheckpointError(what, error.given, error.allowed, error.advice) from error

    # Not in the checkpoint: computed from the configuration, so made anew off the meta device.
    with _reading(checkpoint.directory / "config.json"):
        rotary = type(model.model.rotary_emb)(config=model.config)
    model.model.rotary_emb = rotary.to(device)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        given = f"no values for {', '.join(left)}"
        raise CheckpointError(str(checkpoint.path), given, "a model filled by its checkpoint", "report this")


def _load_generation_config(model: Any, path: Path) -> None:
    file = path / "generation_config.json"
    with _reading(file if file.is_file() else path / "config.json"):
        if file.is_file():
            load_it = _transformers().GenerationConfig.from_pretrained
            model.generation_config = load_it(path, local_files_only=True)
        stop_tokens(model)
