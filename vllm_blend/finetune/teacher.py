"""A frozen teacher: the model as it was, which computes every prompt in full while the student reuses passages.

Distilling a model into itself over reused passages is block distillation (Li et al., arXiv:2605.15913): where the right
answer is one token, the teacher's distribution also says how sure the model was, and what else it considered.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vllm_blend.finetune.lora import Adapter
from vllm_blend.finetune.losses import head_input
from vllm_blend.finetune.rows import RowBatch


class Teacher(Protocol):
    """What a training step asks of a teacher."""

    head: Any

    def hidden(self, batch: RowBatch) -> torch.Tensor:
        """Return the last hidden states [rows, length, hidden size] of the prompts in full, without gradients."""
        ...


class FrozenModel:
    """Another model as the teacher, in the dtype that it was loaded in. It must have the student's vocabulary."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = model.get_output_embeddings()

    @torch.no_grad()
    def hidden(self, batch: RowBatch) -> torch.Tensor:
        states: torch.Tensor = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        return head_input(self.model, states)


class WithoutAdapter:
    """The student's own weights without its adapter: they do not change, so no second model is needed."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        self.model, self.adapter = model, adapter
        self.head = model.get_output_embeddings()

    @torch.no_grad()
    def hidden(self, batch: RowBatch) -> torch.Tensor:
        with self.adapter.disabled():
            states: torch.Tensor = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        return head_input(self.model, states)


def check_vocabulary(student: Any, teacher: Any, where: str) -> None:
    """Raise ValueError if the two configurations have vocabularies of different sizes."""
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"--teacher {where} has {teacher.vocab_size} tokens and the model {student.vocab_size}: use a teacher with "
            "the same tokenizer"
        )
