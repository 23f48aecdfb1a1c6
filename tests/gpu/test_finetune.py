"""FlexAttention in training: the loss and its gradients are those of the dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.engines import DEMO
from vllm_blend.finetune.attention import FLEX, NAME, register, reuse_arguments
from vllm_blend.finetune.loop import compile_layers
from vllm_blend.finetune.masks import FULL, ISOLATED, MIXED, PARTLY, make_reuse

pytestmark = pytest.mark.gpu


def test_flex_attention_has_the_gradients_of_the_dense_mask() -> None:
    register()
    chunks = torch.tensor([[0] * 40 + [1] * 190 + [2] * 170 + [-1] * 112] * 4, dtype=torch.int16, device="cuda")
    ids = torch.randint(3, 2000, chunks.shape, generator=torch.Generator().manual_seed(1)).cuda()
    gradients = []
    for name in (NAME, FLEX):
        model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation=name)
        model.cuda()
        compile_layers(model)
        for step in range(2):  # a second batch has masks of its own, and the same shape
            model.zero_grad()
            again = torch.zeros(chunks.shape, device="cuda")
            again[:, 60 + step : 90 + step] = 1
            kinds = torch.tensor([FULL, ISOLATED, PARTLY, MIXED], device="cuda")
            reuse = make_reuse(chunks, kinds, again, 128, chunks == 2)
            states = model.model(use_cache=False, **reuse_arguments(model, ids, chunks, reuse)).last_hidden_state
            states[:, :512].square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, dense in gradients[0].items():
        if dense is not None:
            torch.testing.assert_close(gradients[1][name], dense, rtol=2e-2, atol=2e-3 * dense.abs().max().item())
