"""The attention that a question pays in full prefill: what selectors that look over reused KV can only estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_blend.attention.context import current_context
from vllm_blend.blend.selectors.question_attention import QuestionAttention
from vllm_blend.quality.session import Session
from vllm_blend.worker.hooks import QuestionMassHook


def true_attention(session: Session, token_ids: list[int], num_suffix: int) -> torch.Tensor:
    """Return the attention that the last `num_suffix` tokens of a prompt pay to each of its tokens in full prefill, as
    `QuestionAttention` sums it: [tokens] float32. The prompt is computed once for that, in one step; the session keeps
    what was found.

    Raises RuntimeError if the engine cuts the prompt into several steps, and ValueError if ranks share the model, for
    the attention of this rank's heads is not that of all.
    """
    session.engine.check_one_rank("full prefill's attention")
    key = (num_suffix, *token_ids)
    if key in session.true_attention:
        return session.true_attention[key]
    runner = session.engine.model_executor.driver_worker.model_runner
    look = QuestionAttention().look(len(runner.cache.layers))
    found: list[QuestionMassHook] = []

    def attach(module: nn.Module, args: Any) -> None:
        context = current_context()
        if found:  # a later step decodes
            return
        if context.metadata.seq_lens != [len(token_ids)] or context.metadata.query_start_loc[-1] != len(token_ids):
            raise RuntimeError(
                f"a prompt of {len(token_ids)} tokens is not computed in one step: raise max_num_batched_tokens"
            )
        found.append(QuestionMassHook(context.backend, [num_suffix], [look]))
        context.hooks = [*context.hooks, found[0]]

    handle = runner.model.get_submodule("").register_forward_pre_hook(attach)
    try:
        session.answer([{"prompt_token_ids": token_ids}], max_tokens=1)
    finally:
        handle.remove()
    mass = session.true_attention[key] = found[0].masses()[0].cpu()
    return mass
