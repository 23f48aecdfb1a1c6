"""RoPE: the tables, the config readers and the parameters' fingerprint."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.layers.rope_frequencies import ROPE_TYPES, RopeSpec, context_lengths, rope_spec
from vllm_blend.layers.rotary import RotaryEmbedding

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 64,
}


def rotary_of(hf_config: Any, max_position: int) -> RotaryEmbedding:
    return RotaryEmbedding(rope_spec(hf_config, max_position), max_position)


def config(**fields: Any) -> SimpleNamespace:
    """A transformers 5 config when rope_parameters is among the fields, otherwise a transformers 4 one."""
    base = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    return SimpleNamespace(**(base | fields))


def rotated_by_definition(x: torch.Tensor, positions: torch.Tensor, theta: float, dim: int) -> torch.Tensor:
    """Pair i of the leading `dim` channels is (i, i + dim / 2), turned as one complex number by position *
    theta^(-2i/dim)."""
    half = dim // 2
    speeds = torch.tensor([theta ** (-2 * i / dim) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None].double() * speeds)
    pairs = torch.complex(x[..., :half].double(), x[..., half:dim].double()) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., dim:].double()], -1).float()


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotates_pairs_as_complex_numbers(partial: float) -> None:
    rotary = rotary_of(config(rope_theta=500.0, partial_rotary_factor=partial), 300)
    positions = torch.tensor([0, 3, 4, 150, 299])
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    rotated_q, rotated_k = rotary(positions, q, k)
    dim = int(16 * partial)
    # Angles up to 299 in float32 are off by up to 299 * 2**-24, which a pair of normal values multiplies.
    torch.testing.assert_close(rotated_q, rotated_by_definition(q, positions, 500.0, dim), atol=1e-4, rtol=0)
    torch.testing.assert_close(rotated_k, rotated_by_definition(k, positions, 500.0, dim), atol=1e-4, rtol=0)


def test_cos_sin_are_the_tables_rows() -> None:
    rotary = rotary_of(config(rope_theta=100.0), 50)
    cos, sin = rotary.cos_sin(torch.tensor([7, 2]))
    angles = torch.tensor([7.0, 2.0])[:, None] * torch.tensor([100.0 ** (-i / 8) for i in range(8)])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_tables_stay_float32_when_the_model_is_cast(cast: str) -> None:
    rotary = rotary_of(config(), 300)
    exact = rotary.cos.clone()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), rotary)
    getattr(model, cast)()
    assert model[0].weight.dtype != torch.float32
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    assert torch.equal(rotary.cos, exact)
    assert not rotary.state_dict(), "tables are derived: they do not belong into checkpoints"
    q, _ = rotary(torch.tensor([5]), torch.randn(1, 4, 16, dtype=torch.bfloat16), torch.randn(1, 1, 16))
    assert q.dtype == torch.bfloat16


def test_tables_follow_the_device() -> None:
    rotary = rotary_of(config(), 8).to("meta")
    assert rotary.cos.is_meta and rotary.sin.is_meta


def test_tables_are_float32_under_another_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = rotary_of(config(rope_parameters=YARN), 64)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(rotary.cos, rotary_of(config(rope_parameters=YARN), 64).cos)


def test_one_step_looks_a_positions_tensor_up_once_and_forgets_it_afterwards() -> None:
    rotary = rotary_of(config(), 32)
    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    lookups: list[torch.Tensor] = []
    look_up = rotary.cos_sin

    def counted(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lookups.append(positions)
        return look_up(positions)

    rotary.cos_sin = counted  # type: ignore[method-assign]
    positions, others = torch.tensor([3, 9]), torch.tensor([4, 5])
    with rotary.one_step():
        first, again, moved = rotary(positions, q, k)[0], rotary(positions, q, k)[0], rotary(others, q, k)[0]
    assert len(lookups) == 2
    assert torch.equal(first, again) and not torch.equal(first, moved)
    positions += 1  # a buffer that is reused for the next step
    with rotary.one_step():
        later = rotary(positions, q, k)[0]
    assert torch.equal(later, rotary(torch.tensor([4, 10]), q, k)[0])


V5_AND_V4 = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}),
    ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
    (LLAMA3, LLAMA3),
    (YARN, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
]


@pytest.mark.parametrize(("v5", "v4"), V5_AND_V4)
def test_both_config_styles_read_the_same(v5: dict[str, Any], v4: dict[str, Any] | None) -> None:
    new = rope_spec(config(rope_parameters={"rope_theta": 5e5} | v5), 256)
    old = rope_spec(config(rope_theta=5e5, rope_scaling=v4), 256)
    assert new == old
    assert new.rope_type == v5["rope_type"]


def test_parameters_by_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope_spec(config(rope_parameters=nested), 64, "full_attention") == RopeSpec("linear", 16, 1e6, factor=8.0)
    assert rope_spec(config(rope_parameters=nested), 64, "sliding_attention") == RopeSpec("default", 16, 1e4)
    with pytest.raises(ValueError, match=r"'full_attention', 'sliding_attention'.*not for 'chunked_attention'"):
        rope_spec(config(rope_parameters=nested), 64, "chunked_attention")


def test_linear_divides_positions() -> None:
    plain, stretched = (
        rotary_of(config(), 64),
        rotary_of(config(rope_scaling={"type": "linear", "factor": 4.0}), 64),
    )
    torch.testing.assert_close(stretched.cos[::4], plain.cos[:16])


def test_dynamic_base_grows_with_max_position_only() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert rope_spec(config(rope_parameters=parameters), 100).theta == 1e4
    assert rope_spec(config(rope_parameters=parameters), 128).theta == 1e4
    assert rope_spec(config(rope_parameters=parameters), 256).theta == pytest.approx(1e4 * 3 ** (16 / 14))


def test_yarn_attention_factor() -> None:
    def scale(**fields: Any) -> float:
        # At position 0 every cosine is 1, so the table shows the factor itself.
        return rotary_of(config(rope_parameters=YARN | fields), 4).cos[0, 0].item()

    assert scale() == pytest.approx(0.1 * math.log(4) + 1)
    assert scale(attention_factor=1.5) == 1.5
    assert scale(mscale=1.0, mscale_all_dim=0.5) == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert scale(factor=None) == pytest.approx(0.1 * math.log(2) + 1)  # 128 positions over 64 original ones


def test_longrope_takes_one_set_of_divisors_by_the_longest_position_and_scales_by_the_growth() -> None:
    plain = rotary_of(config(), 128).spec.inverse_frequencies()
    for given in (LONGROPE, LONGROPE | {"rope_type": "su"}):
        for max_position, used in ((64, "short_factor"), (65, "long_factor")):
            rotary = rotary_of(config(rope_parameters=given), max_position)
            torch.testing.assert_close(rotary.spec.inverse_frequencies(), plain / torch.tensor(LONGROPE[used]))
            assert rotary.cos[0, 0].item() == pytest.approx(math.sqrt(1 + math.log(2) / math.log(64)))
    assert rope_spec(config(rope_parameters=LONGROPE | {"attention_factor": 1.2}), 4).attention_factor == 1.2
    outside = {key: value for key, value in LONGROPE.items() if key != "original_max_position_embeddings"}
    by_attribute = config(rope_parameters=outside, original_max_position_embeddings=64)
    assert rope_spec(by_attribute, 65) == rope_spec(config(rope_parameters=LONGROPE), 65)
    same_length = config(rope_parameters=LONGROPE | {"original_max_position_embeddings": 128})
    assert rotary_of(same_length, 4).cos[0, 0].item() == 1.0


@pytest.mark.parametrize(
    ("fields", "default", "longest"),
    [
        ({}, 128, 128),
        ({"rope_parameters": LLAMA3}, 128, 128),
        ({"rope_parameters": YARN}, 256, 256),
        ({"rope_parameters": YARN | {"factor": None}}, 128, 128),
        ({"rope_parameters": YARN, "max_position_embeddings": 256}, 256, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 2.5}}, 320, 320),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 256, 256),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 128, 256),
        ({"rope_parameters": LONGROPE}, 64, 128),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, 128, 128),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": LONGROPE}}, 64, 128),
    ],
)
def test_context_lengths(fields: dict[str, Any], default: int, longest: int) -> None:
    assert context_lengths(config(**fields)) == (default, longest)


def test_a_config_without_a_length_has_none() -> None:
    assert context_lengths(config(max_position_embeddings=None)) is None


def test_fingerprint_names_what_matters_and_ignores_the_table_length() -> None:
    assert rotary_of(config(), 10).fingerprint() == rotary_of(config(), 20).fingerprint()
    assert rotary_of(config(), 10).fingerprint() == "default(rotary_dim=16,theta=10000.0)"
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    variants = [
        rope_spec(config(), 10),
        rope_spec(config(rope_theta=5e5), 10),
        rope_spec(config(partial_rotary_factor=0.5), 10),
        rope_spec(config(rope_parameters=LLAMA3), 10),
        rope_spec(config(rope_parameters=LLAMA3 | {"low_freq_factor": 2.0}), 10),
        rope_spec(config(rope_parameters=YARN), 10),
        rope_spec(config(rope_parameters=YARN | {"truncate": False}), 10),
        rope_spec(config(rope_parameters=YARN | {"attention_factor": 1.0}), 10),
        rope_spec(config(rope_parameters=dynamic), 10),
        rope_spec(config(rope_parameters=dynamic), 200),
        rope_spec(config(rope_parameters=LONGROPE), 64),
        rope_spec(config(rope_parameters=LONGROPE), 65),
        rope_spec(config(rope_parameters=LONGROPE | {"attention_factor": 1.2}), 65),
    ]
    assert len({spec.fingerprint() for spec in variants}) == len(variants)


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown RoPE type 'mrope'.*dynamic, linear, llama3, longrope, yarn"):
        rotary_of(config(rope_parameters={"rope_type": "mrope"}), 64)
    assert set(ROPE_TYPES) == {"default", "dynamic", "linear", "llama3", "longrope", "yarn"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "needs a positive 'factor'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": "2"}}, "needs a positive 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "needs a positive 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e309}}, "needs a positive 'factor' of at most 1e"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "needs a positive 'low_freq_factor'"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "must be above low_freq_factor"),
        (
            {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 7}},
            "8 numbers as 'short_factor'.*got 7 of them",
        ),
        ({"rope_parameters": LONGROPE | {"long_factor": None}}, "needs 8 numbers as 'long_factor'.*got None"),
        ({"rope_parameters": LONGROPE | {"long_factor": [1.0] * 7 + [0.0]}}, "needs a positive 'long_factor'"),
        ({"rope_parameters": LONGROPE | {"attention_factor": -1}}, "needs a positive 'attention_factor'"),
        ({"rope_theta": -1}, "needs a positive 'rope_theta'"),
        ({"partial_rotary_factor": 0.06}, "even number of channels"),
        ({"partial_rotary_factor": 2.0}, "even number of channels"),
    ],
)
def test_senseless_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_of(config(**fields), 64)


def test_a_table_needs_positions() -> None:
    with pytest.raises(ValueError, match="max_position must be positive, got 0"):
        RotaryEmbedding(RopeSpec("default", 16, 1e4), 0)


def test_positions_beyond_the_table_are_an_error() -> None:
    with pytest.raises(IndexError):
        rotary_of(config(), 8).cos_sin(torch.tensor([8]))
