"""The decoder that all families share; a family's own file says only where it differs.

A forward pass takes token ids alone. Positions, cache slots and hooks travel in the forward context, and a hook may
narrow the step between two layers: from there on fewer rows are computed, and fewer hidden states come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.attention.context import current_context
from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.distributed.sharding import Share, equal_share, kv_head_copies, kv_share
from vllm_blend.layers.attention import Attention
from vllm_blend.layers.embedding import Embedding, LMHead
from vllm_blend.layers.experts import ExpertsSpec, SparseMLP
from vllm_blend.layers.layernorm import RMSNorm
from vllm_blend.layers.linear import GateUpLinear, QKVLinear, row_parallel
from vllm_blend.layers.quantization import QuantizingRMSNorm
from vllm_blend.layers.query_scale import QueryScale
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.models.rotaries import rotaries_by_layer
from vllm_blend.ops.fp8 import QuantizedRows, UnscaledProduct

LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}
HeadNorms = tuple[RMSNorm, RMSNorm]  # of each head of Q, and of K
Product = torch.Tensor | UnscaledProduct  # the output of a linear layer, for its one reader


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of a decoder and its architecture's switches."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]  # one of LAYER_TYPES for each layer
    sliding_window: int | None  # of the sliding_attention layers, in tokens
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of Q and K before RoPE
    rotates: tuple[bool, ...] | None = None  # for each layer whether it has RoPE; None: all have
    attention_scale: float | None = None  # multiplies Q K^T; None: head_dim ** -0.5
    query_scale: QueryScale | None = None  # by position
    sinks: bool = False  # whether each head has a score that belongs to no key
    embedding_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual stream
    logits_divisor: float = 1.0
    activation: str = "silu"  # of the gate in the MLP: a name in ACTIVATIONS
    is_fused: bool = False  # the checkpoint has Q, K and V as one matrix, gate and up as another
    experts: ExpertsSpec | None = None  # of the layers whose MLP is a mixture of experts
    quantization: str | None = None  # "fp8": of the linear layers of attention and MLP
    ranks: Ranks = ONE_RANK  # which share the layers

    def __post_init__(self) -> None:
        for name, config_name in (
            ("vocab_size", "vocab_size"),
            ("hidden_size", "hidden_size"),
            ("intermediate_size", "intermediate_size"),
            ("num_layers", "num_hidden_layers"),
            ("num_heads", "num_attention_heads"),
            ("num_kv_heads", "num_key_value_heads"),
            ("head_dim", "head_dim"),
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"the model's config gives {config_name} = {getattr(self, name)}: it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"unknown layer_types {unknown} in the model's config; known: {', '.join(LAYER_TYPES)}")
        if self.query_scale is not None and self.qk_norm:
            raise ValueError("queries that are scaled by position cannot be normalised after that (qk_norm)")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("the model's config has sliding_attention layers but no sliding_window")
        if self.sliding_window is not None and self.sliding_window < 0:
            raise ValueError(f"the model's config gives sliding_window = {self.sliding_window}: it must be positive")
        if self.rotates is not None and len(self.rotates) != self.num_layers:
            raise ValueError(
                f"the model's config says of {len(self.rotates)} layers whether they have RoPE, but it "
                f"has {self.num_layers} layers"
            )

    @classmethod
    def from_hf(cls, hf_config: Any, **switches: Any) -> DecoderSpec:
        """Read the fields that all Hugging Face decoder configs share; `switches` sets or replaces fields."""
        activation = getattr(hf_config, "hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not supported: the MLP is gated with silu only")
        heads, layers = hf_config.num_attention_heads, hf_config.num_hidden_layers
        values: dict[str, Any] = {
            "vocab_size": hf_config.vocab_size,
            "hidden_size": hf_config.hidden_size,
            "intermediate_size": hf_config.intermediate_size,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": getattr(hf_config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
            "rms_norm_eps": hf_config.rms_norm_eps,
            "tie_word_embeddings": bool(hf_config.tie_word_embeddings),
            "layer_types": ("full_attention",) * layers,
            "sliding_window": None,
        }
        return cls(**(values | switches))

    @property
    def heads(self) -> Share:
        """Return which query heads this rank has."""
        return equal_share("num_attention_heads", self.num_heads, self.ranks)

    @property
    def kv_heads(self) -> Share:
        """Return which KV heads this rank has."""
        return kv_share(self.num_kv_heads, self.ranks)

    def window(self, layer_idx: int) -> int | None:
        """Return the sliding window of a layer in tokens, None for full attention."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None


class SelfAttention(nn.Module):
    """Projections around `Attention`.

    `hack_kv` is public: [K before RoPE, V] of the last collected forward pass, or None.
    """

    def __init__(self, spec: DecoderSpec, layer_idx: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        heads, kv_heads, head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.qkv_proj = QKVLinear(
            spec.hidden_size, heads, kv_heads, head_dim, spec.qkv_bias, spec.quantization, spec.is_fused
        )
        self.q_norm = RMSNorm(head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        window, scale = spec.window(layer_idx), spec.attention_scale
        if window is not None and window >= rotary.max_position:
            window = None  # no sequence is longer: it never hides anything
        counts = (heads.count, kv_heads.count, head_dim)
        copies = kv_head_copies(spec.num_kv_heads, spec.ranks)
        sink_heads = heads if spec.sinks else None
        self.attn = Attention(*counts, layer_idx, rotary, window, scale, copies, sink_heads)
        self.o_proj = row_parallel(
            heads.times(head_dim), spec.hidden_size, spec.out_bias, spec.quantization, spec.ranks
        )
        self.query_scale = spec.query_scale
        self.hack_kv: list[torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor | QuantizedRows) -> tuple[Product, torch.Tensor | None]:
        """Attend from hidden [T, hidden_size].

        Returns the output [T', hidden_size] and, if a hook kept fewer rows, which ones it kept.
        """
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.sizes, -1)
        q, k, norms = self.normalize(q, k)
        if self.query_scale is not None:
            q = self.query_scale(q, current_context().of_layer(self.attn.layer_idx))
        out, rows = self.attn(q, k, v, norms)
        return self.o_proj.product(out), rows

    def normalize(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, HeadNorms | None]:
        """Return Q [T, heads * head_dim] and K [T, kv_heads * head_dim] as attention takes them, with the norms of
        their heads that it is still to apply. A family overrides this if it normalises them in another way."""
        return q, k, None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


class MLP(nn.Module):
    """A gated MLP (Shazeer, 2020), mostly SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        inner = equal_share("intermediate_size", spec.intermediate_size, spec.ranks)
        self.gate_up_proj = GateUpLinear(spec.hidden_size, inner, spec.mlp_bias, spec.quantization, spec.is_fused)
        quantized = spec.quantization is not None
        self.activation = ops.silu_and_mul_quant if quantized else ACTIVATIONS[spec.activation]
        self.down_proj = row_parallel(inner, spec.hidden_size, spec.mlp_bias, spec.quantization, spec.ranks)

    def forward(self, hidden: torch.Tensor | QuantizedRows) -> Product:
        return self.down_proj.product(self.activation(self.gate_up_proj.product(hidden)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that also adds the previous block's output to the residual stream."""

    def __init__(self, spec: DecoderSpec, layer_idx: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec, layer_idx, rotary)
        self.mlp = self.make_mlp(spec, layer_idx)
        self.residual_scale = spec.residual_scale
        norm: type[Any] = RMSNorm if spec.quantization is None else QuantizingRMSNorm
        self.input_layernorm = norm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = norm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, hidden: Product, residual: torch.Tensor | None) -> tuple[Product, torch.Tensor]:
        """Add the last block's output `hidden` to `residual` (None in the first layer) and run the layer.

        Both are [T, hidden_size].
        """
        if residual is None:
            assert isinstance(hidden, torch.Tensor)
            normed, residual = self.input_layernorm(hidden), hidden
        else:
            normed, residual = self.input_layernorm.add(hidden, residual)
        hidden, rows = self.self_attn(normed)
        if rows is not None:
            residual = residual[rows]
        normed, residual = self.post_attention_layernorm.add(self._scaled(hidden), residual)
        return self._scaled(self.mlp(normed)), residual

    @staticmethod
    def make_mlp(spec: DecoderSpec, layer_idx: int) -> nn.Module:
        """Return the MLP of a layer."""
        return make_mlp(spec, layer_idx)

    def _scaled(self, product: Product) -> Product:
        if self.residual_scale == 1.0:
            return product
        assert isinstance(product, torch.Tensor)  # quantized products are refused with the scale
        return product * self.residual_scale


def make_mlp(spec: DecoderSpec, layer_idx: int) -> MLP | SparseMLP:
    """Return the MLP of a layer: dense, or a mixture of experts."""
    if spec.experts is None or layer_idx not in spec.experts.layers:
        return MLP(spec)
    return SparseMLP(spec.hidden_size, spec.experts, spec.ranks)


class DecoderModel(nn.Module):
    """Embedding, layers and the final norm.

    `cache_fuse_metadata` and `old_kvs` are the public blending switches: the engine reads them, the model does not.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        rotaries: Sequence[RotaryEmbedding],
        layer: Callable[..., nn.Module] = DecoderLayer,
        norm: Callable[[int, float], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.ranks)
        self.embedding_scale = spec.embedding_scale
        self.layers = nn.ModuleList(layer(spec, i, rotary) for i, rotary in enumerate(rotaries))
        self.norm: Any = norm(spec.hidden_size, spec.rms_norm_eps)
        self._rotaries = tuple(dict.fromkeys(rotaries))  # already registered, as submodules of the layers
        self.cache_fuse_metadata: dict[str, Any] = {}
        self.old_kvs: list[list[torch.Tensor]] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Run token ids [T] through the layers for which the forward context has a cache.

        Returns normalised hidden states [T', hidden_size] of the rows that are still active after the last one.
        """
        embedded = self.embed_tokens(input_ids)
        hidden: Product = embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale
        residual: torch.Tensor | None = None
        with ExitStack() as stack:
            for rotary in self._rotaries:
                stack.enter_context(rotary.one_step())
            for layer in self.layers[: len(current_context().caches)]:
                hidden, residual = layer(hidden, residual)
        assert residual is not None  # DecoderSpec: at least one layer
        if isinstance(hidden, UnscaledProduct):
            hidden = hidden.scaled().to(residual.dtype)
        normed: torch.Tensor = self.norm.add(hidden, residual)[0]
        return normed


def attention_biases(hf_config: Any) -> dict[str, bool]:
    """Return `qkv_bias` and `out_bias` of a config whose `attention_bias` is of all four projections."""
    bias = bool(getattr(hf_config, "attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias}


def window_everywhere(hf_config: Any, window: int | None) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window` of a model whose layers all see `window`, None for everything."""
    kind = "full_attention" if window is None else "sliding_attention"
    return {"layer_types": (kind,) * hf_config.num_hidden_layers, "sliding_window": window}


class DecoderForCausalLM(nn.Module):
    """A decoder with its language-model head: a `CausalLM`. Subclasses say in `spec` how to read their config."""

    layer: Callable[..., nn.Module] = DecoderLayer  # called as layer(spec, layer_idx, rotary)
    norm: Callable[[int, float], nn.Module] = RMSNorm  # the last one, called as norm(size, eps)
    serves: ClassVar[str] = ""  # which models, for the page of supported ones
    windows: ClassVar[str] = ""  # which layers may see a sliding window, for that page; empty: none
    has_sinks: ClassVar[bool] = False
    takes_quantization = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {}  # part of a parameter's name here -> in checkpoints

    def __init__(
        self, hf_config: Any, max_position: int, quantization: str | None = None, ranks: Ranks = ONE_RANK
    ) -> None:
        super().__init__()
        if quantization is not None and not self.takes_quantization:
            raise ValueError(
                f"quantization={quantization!r} is not supported for {type(self).__name__}: leave quantization out"
            )
        spec = replace(self.spec(hf_config), quantization=quantization, ranks=ranks)
        self.config = hf_config
        family = type(self)
        rotaries = rotaries_by_layer(hf_config, max_position, spec.layer_types, spec.rotates, spec.head_dim)
        self.model = DecoderModel(spec, rotaries, family.layer, family.norm)
        tied = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(spec.vocab_size, spec.hidden_size, tied, ranks)
        self.logits_divisor = spec.logits_divisor

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        """Return the decoder that a Hugging Face config describes."""
        raise NotImplementedError(f"{cls.__name__} must say how to read its config: override spec()")

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T', hidden_size] for token ids [T] int64; runs within a `forward_context`."""
        hidden: torch.Tensor = self.model(input_ids)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] of hidden states: float32, but on a GPU in the weights' dtype. Of several
        ranks, rank 0 has them, and the others [n, 0]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits if self.logits_divisor == 1.0 else logits / self.logits_divisor
