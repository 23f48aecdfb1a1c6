"""A model and a device that cost the host next to nothing, so that a step's CPU time is what the engine itself takes.

`RandomTokens` computes no layer, its decode steps are "replayed" as CUDA graphs are on a GPU (buffers are filled, then
nothing runs), and the sampler's operator returns tokens from a table. Penalties are prepared as a GPU's kernel reads
them, and nothing runs either. `Settings` are given as `hf_overrides`: so they also come into the engine process of an
`AsyncLLM`, and find the package of whichever checkout that process imports.

What a GPU adds is left out: launches, pinned copies and events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_blend import ops
from vllm_blend.layers import sampler
from vllm_blend.models.llama import LlamaForCausalLM
from vllm_blend.models.registry import MODEL_REGISTRY
from vllm_blend.ops import cuda_sampling
from vllm_blend.worker import cuda_graphs
from vllm_blend.worker.model_runner import ModelRunner
from vllm_blend.worker.worker import Worker

TABLE = 1 << 16  # tokens that are drawn in advance
NAME = "HostTimeStandIn"


class RandomTokens(LlamaForCausalLM):
    """A model whose hidden states and logits are views of one number."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1).expand(len(input_ids), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1).expand(len(hidden), self.config.vocab_size)


class Device:
    """Draws tokens from `token_ids`. A step takes `seconds` from when its model is queued, or from the end of the step
    before if that is later; its draw takes none."""

    def __init__(self, token_ids: list[int], seconds: float, seed: int) -> None:
        choices = torch.tensor(token_ids)
        rng = torch.Generator().manual_seed(seed)
        self._table = choices[torch.randint(len(choices), (TABLE,), generator=rng)]
        self._next, self._seconds, self._ready = 0, seconds, 0.0

    def draw(self, logits: torch.Tensor, settings: Any, uniforms: Any) -> torch.Tensor:
        """Stand in for `ops.sample_tokens`."""
        rows = len(logits)
        if self._next + rows > TABLE:
            self._next = 0
        tokens = self._table[self._next : self._next + rows].clone()
        self._next += rows
        return tokens

    def execute(self, runner: ModelRunner, output: Any) -> Any:
        """Stand in for `ModelRunner.execute`: take note of when the step will be over."""
        self._ready = max(time.perf_counter(), self._ready) + self._seconds
        return _EXECUTE(runner, output)

    def copy(self, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that waits until the last step would be over, and returns these tokens of it."""
        ready = self._ready

        def wait() -> torch.Tensor:
            left = ready - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return tokens

        return wait


class Copy:
    """Stands in for a `HostCopy` of drawn tokens."""

    device: Device

    def __init__(self, tokens: torch.Tensor) -> None:
        self.wait = self.device.copy(tokens)


class Settings:
    """Makes the overrides of one run; pickled into the engine process."""

    def __init__(self, token_ids: list[int], seconds: float, seed: int) -> None:
        self.token_ids, self.seconds, self.seed = token_ids, seconds, seed

    def __call__(self, config: Any) -> Any:
        """Put the stand-ins in place, and return the config of a model that is one of them."""
        MODEL_REGISTRY[NAME] = RandomTokens
        config.architectures, config.num_hidden_layers = [NAME], 1
        config.hidden_size = config.intermediate_size = 64
        config.num_attention_heads = config.num_key_value_heads = 1
        config.head_dim = 16
        config.max_position_embeddings = 8192
        device = Copy.device = Device(self.token_ids, self.seconds, self.seed)
        replaced: list[tuple[Any, str, Any]] = [
            (ops, "sample_tokens", device.draw),
            (ops, "resample_tokens", nothing),
            (cuda_sampling, "accepts", lambda logits: True),
            (cuda_sampling, "penalize", nothing),
            (sampler, "HostCopy", Copy),
            (cuda_graphs, "CUDAGraphs", NoGraphs),
            (Worker, "__init__", _BUILD_WITH_GRAPHS),
            (ModelRunner, "execute", lambda runner, output: device.execute(runner, output)),
        ]
        for owner, name, stand_in in replaced:
            setattr(owner, name, stand_in)
        return config


def nothing(*_: Any) -> None:
    """Stand in for a kernel."""


class NoGraphs:
    """Stands in for `CUDAGraphs`: a replay does nothing."""

    pool = None

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return lambda: None, work()


def _with_graphs(build: Callable[..., None]) -> Callable[..., None]:
    """Return a worker's constructor that gives it the graphs of decode steps which a GPU's worker has."""

    def built(self: Worker, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        block_pass = self.model_runner.block_pass
        seqs = self.config.scheduler.max_num_seqs
        with torch.inference_mode():
            block_pass.decode_graphs = cuda_graphs.DecodeGraphs(block_pass.parts, seqs, self.max_model_len)

    return built


_EXECUTE = ModelRunner.execute
_BUILD_WITH_GRAPHS = _with_graphs(Worker.__init__)
