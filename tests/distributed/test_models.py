"""Models of which each rank has a share: the logits of the whole ones, from the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.distributed.ranks import CPU, on_ranks
from tests.models.tiny import ARCHITECTURES, CONTEXT, FAMILIES, PagedRunner, load_tiny, prompt, save, tiny_hf_model
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.models import stored as stored_tensors
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.models.sharing import check_ranks_fit

pytestmark = pytest.mark.cpu_only
LENGTH = 40


def load(directory: str, ranks: Ranks, **options: Any) -> Any:
    config = load_hf_config(directory)
    return load_model(config, directory, torch.float32, CPU, max_position=CONTEXT, ranks=ranks, **options)


def run(directory: str, **options: Any) -> Callable[[Ranks], torch.Tensor]:
    """The logits of a prompt, computed in two chunks."""
    return lambda ranks: PagedRunner(load(directory, ranks, **options)).run(prompt(LENGTH), [LENGTH - 7, 7])


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FAMILIES])
def test_every_family(architecture: str, tmp_path: Path) -> None:
    """Neither 2 nor 4 divides the vocabulary of 97 tokens, and of 4 ranks two have each of the 2 KV heads."""
    directory = save(tiny_hf_model(architecture, num_attention_heads=8), tmp_path)
    expected = PagedRunner(load_tiny(directory)).run(prompt(LENGTH), [LENGTH])
    for size in (2, 4):
        logits, *others = on_ranks(size, run(directory))
        assert logits.shape == expected.shape and all(other.shape == (LENGTH, 0) for other in others)
        tolerances.check("logits", logits - expected)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3_moe"])
def test_random_weights_are_shares_of_the_same_ones(architecture: str, tmp_path: Path) -> None:
    directory = save(tiny_hf_model(architecture, tie_word_embeddings=architecture == "llama"), tmp_path)
    [expected] = on_ranks(1, run(directory, load_format="dummy"))
    logits, _ = on_ranks(2, run(directory, load_format="dummy"))
    assert logits.std() > 0
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_biases_and_tied_embeddings(tmp_path: Path) -> None:
    hf_model = tiny_hf_model("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    directory = save(hf_model, tmp_path)
    logits, _ = on_ranks(2, run(directory))
    tolerances.check("logits", logits - PagedRunner(load_tiny(directory)).run(prompt(LENGTH), [LENGTH]))


def test_a_rank_reads_its_own_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only norms are read whole."""
    directory = save(tiny_hf_model("llama"), tmp_path)
    stored, read = 0, [0, 0]

    part = stored_tensors.PlainTensor.__getitem__

    def counting(ranks: Ranks) -> None:
        def counted(self: stored_tensors.PlainTensor, index: Any) -> torch.Tensor:
            tensor = part(self, index)
            read[ranks.rank] += tensor.numel()
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stored_tensors.PlainTensor, "__getitem__", counted)
            load(directory, ranks)

    model = load_tiny(directory)
    stored = sum(parameter.numel() for parameter in model.parameters())
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    for rank in range(2):  # one by one, as they are patched alike
        counting(Ranks(rank, 2))
    assert sum(read) == stored + norms
    assert max(read) <= (stored + norms) / 2 + model.lm_head.weight.shape[1] * 2  # 97 tokens are 49 and 48


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        (
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
            4,
            "num_attention_heads is 6, which 4 ranks cannot share equally; give one that fits this model: 1, 2, 6$",
        ),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "3 KV heads, which 4 ranks cannot share; give one that fits this model: 1, 3, 6, 12$",
        ),
        (
            {"intermediate_size": 81},
            2,
            "intermediate_size is 81, which 2 ranks cannot share equally; give one that fits this model: 1$",
        ),
    ],
)
def test_shapes_that_cannot_be_shared(fields: dict[str, int], size: int, message: str, tmp_path: Path) -> None:
    config = load_hf_config(save(tiny_hf_model("llama", **({"intermediate_size": 96} | fields)), tmp_path))
    with pytest.raises(ValueError, match=f"^tensor_parallel_size={size}: the model.*{message}"):
        check_ranks_fit(config, size)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FAMILIES])
def test_the_check_knows_what_each_family_shares(architecture: str, tmp_path: Path) -> None:
    directory = save(tiny_hf_model(architecture, num_attention_heads=6, hidden_size=96), tmp_path)
    config = load_hf_config(directory)
    for size in range(1, 8):
        is_refused = raises(partial(check_ranks_fit, config, size))
        assert is_refused == raises(partial(load, directory, Ranks(0, size), load_format="dummy"))


def raises(work: Callable[[], Any]) -> bool:
    """Return whether `work` raises ValueError."""
    try:
        work()
    except ValueError:
        return True
    return False
