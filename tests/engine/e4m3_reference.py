"""transformers' models with K and V rounded to e4m3 as an FP8 cache rounds them, in float64."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from tests.engine.engines import BLOCK_SIZE, greedy
from vllm_blend import LLM, RequestOutput

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "block_size": BLOCK_SIZE}
PARAMS = greedy(10, logprobs=3, ignore_eos=True)
NAME = "e4m3_cache"
LARGEST, USUAL = 0.1, 0.005  # differences of log-probabilities


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attention over keys and values that have gone through e4m3, all of them; [1, heads, tokens, head_dim] each."""
    group = query.shape[1] // key.shape[1]
    units = module.e4m3_units
    key, value = (
        (x / unit[:, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * unit[:, None, None]
        for x, unit in zip((key, value), units, strict=True)
    )
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    sinks = getattr(module, "sinks", None)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def differences(output: RequestOutput, model: Any) -> torch.Tensor:
    """Return how far every reported log-probability of a request is from that of a model."""
    [completion] = output.outputs
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    with torch.inference_mode():
        logits = model(torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])).logits[0].double()
    expected = logits.log_softmax(-1)
    entries = [*output.prompt_logprobs, *completion.logprobs]
    found = [
        entry.logprob - expected[position - 1, token].item()
        for position, reported in enumerate(entries)
        if reported is not None
        for token, entry in reported.items()
    ]
    return torch.tensor(found)


def assert_near(left: RequestOutput, right: RequestOutput) -> None:
    """Two outputs are the same but for numbers that fell on two sides of a midpoint of e4m3: these are few, each moves
    a log-probability by little, and two tokens part only where they tie."""
    assert left.error is None and right.error is None
    found: list[float] = []
    for a, b in zip(left.outputs, right.outputs, strict=True):
        assert a.logprobs is not None and b.logprobs is not None and len(a.token_ids) == len(b.token_ids)
        for mine, theirs, x, y in zip(a.logprobs, b.logprobs, a.token_ids, b.token_ids, strict=True):
            found += [mine[token].logprob - theirs[token].logprob for token in mine.keys() & theirs.keys()]
            if x != y:
                assert abs(mine[x].logprob - mine[y].logprob) < LARGEST
                break
    moved = torch.tensor(found)
    assert moved.abs().max() < LARGEST and moved.abs().median() < USUAL, moved.abs().sort().values[-5:]


def rounded_model(llm: LLM, directory: str) -> Any:
    """Return the model of an engine with an FP8 cache, with the units that this has measured."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation=NAME, experts_implementation="eager"
    ).eval()
    layers: Any = llm.llm_engine.decoder.layers
    for theirs, ours in zip(model.model.layers, layers, strict=True):
        scales, heads = ours.self_attn.attn.kv_scales, ours.self_attn.attn.num_kv_heads
        one = torch.ones(heads, dtype=torch.float64)
        theirs.self_attn.e4m3_units = (one, one) if scales is None else (scales.k.double(), scales.v.double())
    return model
