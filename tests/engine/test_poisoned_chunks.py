"""Wrong KV under a right key changes the prompts that name its passage and no others, and none at all if the engine
has a key file. What stands beside a passage in one prompt is no part of another prompt's answer (arXiv 2607.19957)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import tolerances
from tests.blend.prompts import plain
from tests.chunks.llms import random_ids
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import assert_empty, engine, hf_model, new_llm, run, threads
from tests.engine.test_persistent_store import PARAMS, SECONDS, TINY, metrics, store_of
from vllm_blend import LLM, RequestOutput
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.store_config import DiskStoreConfig, RemoteStoreConfig

PREFIX, A, B, P, EVIL = (random_ids(count, seed) for seed, count in enumerate((5, 12, 9, 14, 14)))
SUFFIX = random_ids(6, 5)
TIERS = ["disk", "remote"]


def prompt(*chunks: Sequence[int], **options: Any) -> dict[str, Any]:
    """A prompt whose passages are taken as they are stored, unless the options say otherwise."""
    return {"prefix": PREFIX, "chunks": list(chunks), "suffix": SUFFIX, "blend_selector": "none"} | options


NAMING = [prompt(P), prompt(A, P, B), prompt(P, B), prompt(A, P)]
OTHERS = [
    prompt(A, B),
    prompt(B, A),
    prompt(A, P, B, cache_salt="another tenant"),
    prompt(A, P, B, prefix=PREFIX[1:]),
    prompt(A, P[1:]),
    plain(prompt(A, P, B)),
]


def with_evil(naming: dict[str, Any]) -> dict[str, Any]:
    """A prompt with another passage where it names P."""
    return naming | {"chunks": [EVIL if chunk is P else chunk for chunk in naming["chunks"]]}


def fresh(prompts: Sequence[dict[str, Any]]) -> list[RequestOutput]:
    """What engines answer that have served no other prompt."""
    outputs = []
    for asked in prompts:
        with engine(TINY, enable_blending=True) as llm:
            outputs += run(llm, [asked], PARAMS)
    return outputs


def assert_all_same(outputs: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    for output, expected in zip(outputs, wanted, strict=True):
        assert_same_logprobs(output, expected)


def new_shared(tier: str, path: Path, **options: Any) -> LLM:
    """An engine with nothing in its memory, over a store that others write to."""
    where = {"chunk_store_path": str(path)} if tier == "disk" else {"chunk_store_url": f"file://{path}"}
    return new_llm(TINY, enable_blending=True, **where, **options)


def open_store(llm: LLM, tier: str, path: Path, signer: ChunkSigner | None) -> DiskChunkStore | RemoteChunkStore:
    """The store below an engine's memory, as another program opens it."""
    model = llm.llm_engine.fingerprint
    if tier == "disk":
        return DiskChunkStore(DiskStoreConfig(path, 1 << 26, model.digest, fingerprint=model, signer=signer))
    return RemoteChunkStore(RemoteStoreConfig(f"file://{path}", model.digest, timeout=SECONDS, signer=signer))


def key_of(llm: LLM, passage: Sequence[int]) -> str:
    _, [chunk] = llm.llm_engine.identify_chunks(PREFIX, [passage])
    return chunk.key


def poison(llm: LLM, tier: str, path: Path, signer: ChunkSigner | None) -> None:
    """Have the store below an engine's memory give another passage's KV for P. It is real KV of the right shape, and
    its checksums fit."""
    _, [chunk] = llm.llm_engine.identify_chunks(PREFIX, [P])
    with engine(TINY, enable_blending=True) as other:
        [kv] = other.encode_chunks(PREFIX, [EVIL])
    store = open_store(llm, tier, path, signer)
    store.put(chunk.key, kv.with_content(chunk))
    found = store.get(chunk.key)
    assert found is not None
    tolerances.check_kv(found.k, kv.k)
    tolerances.check_kv(found.v, kv.v)
    store.close()


def fill(tier: str, path: Path, **options: Any) -> None:
    """Have an engine store every passage of the prompts."""
    llm = new_shared(tier, path, **options)
    run(llm, NAMING + OTHERS, PARAMS)
    store_of(llm).close(SECONDS)


@pytest.mark.parametrize("tier", TIERS)
def test_without_a_key_file_prompts_that_name_the_passage_change(tier: str, tmp_path: Path) -> None:
    """They are answered as if they named the passage whose KV it is: by transformers, too, where no token of the prompt
    is approximated. All others have nothing of it."""
    with threads(1):
        fill(tier, tmp_path)
        llm = new_shared(tier, tmp_path)
        poison(llm, tier, tmp_path, None)
        naming, others = run(llm, NAMING, PARAMS), run(llm, OTHERS, PARAMS)
        assert_all_same(naming, fresh([with_evil(each) for each in NAMING]))
        evil_ids = plain(prompt(EVIL))["prompt_token_ids"]
        assert_logprobs_match(replace(naming[0], prompt_token_ids=evil_ids), hf_model(TINY))
        for output, right in zip(naming, fresh(NAMING), strict=True):
            assert output.outputs[0].token_ids != right.outputs[0].token_ids
        assert_all_same(others, fresh(OTHERS))
        found = metrics(llm)
        assert found["chunks_encoded"] == found[f"chunk_store_{tier}_faults"] == 0, "all was taken from the store"
        store_of(llm).close(SECONDS)


@pytest.mark.parametrize("secret", [None, b"t" * 32], ids=["unsigned", "another secret"])
@pytest.mark.parametrize("tier", TIERS)
def test_with_a_key_file_no_prompt_changes(tier: str, secret: bytes | None, tmp_path: Path) -> None:
    """The passage is computed again, once, and what is stored then is signed with the secret in the file."""
    key_file, path = tmp_path / "key", tmp_path / "store"
    key_file.write_bytes(b"o" * 32)
    options = {"chunk_store_key_file": str(key_file)}
    with threads(1):
        fill(tier, path, **options)
        wanted = fresh(NAMING + OTHERS)
        llm = new_shared(tier, path, **options)
        poison(llm, tier, path, None if secret is None else ChunkSigner(secret))
        for num_faults, num_encoded in ((1, 1), (0, 0)):
            outputs = run(llm, NAMING + OTHERS, PARAMS)
            assert_all_same(outputs, wanted)
            assert_logprobs_match(outputs[0], hf_model(TINY))
            found = metrics(llm)
            assert found[f"chunk_store_{tier}_faults"] == num_faults and found["chunks_encoded"] == num_encoded
            assert_empty(llm)
            store_of(llm).close(SECONDS)
            llm = new_shared(tier, path, **options)  # it asks the store for what has taken the forgery's place
        store_of(llm).close(SECONDS)
        unsigned, signed = (open_store(llm, tier, path, each) for each in (None, ChunkSigner(b"o" * 32)))
        assert signed.get(key_of(llm, P)) is not None and unsigned.get(key_of(llm, P)) is None
        signed.close()
        unsigned.close()


def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"s" * 31)
    for key_file, problem in ((tmp_path / "absent", "No such file"), (short, "has 31 bytes: give at least 32")):
        with pytest.raises(ValueError, match=rf"chunk_store_key_file='{key_file}' cannot be used: .*{problem}"):
            new_shared("disk", tmp_path / "store", chunk_store_key_file=str(key_file))
    with pytest.raises(ValueError, match="give chunk_store_path or"):
        new_llm(TINY, enable_blending=True, chunk_store_key_file=str(short))


FIRST: dict[str, dict[str, Any]] = {
    "as stored": {},
    "by the default selector": {"blend_selector": None},
    "P is computed after its neighbour": {"blend_selector": None, "blend_recompute_ratio": 1.0},
    "P is encoded after its neighbour": {"continues": [None, 0]},
}


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("how", FIRST)
def test_a_neighbour_is_no_part_of_another_prompt(how: str, together: bool) -> None:
    """Under one salt [EVIL, P] comes first, whichever way it has P; then [A, P] and [P] have the KV of P that engines
    compute which have never met EVIL. Another salt finds nothing of all that."""
    first = prompt(EVIL, P, cache_salt="one", **FIRST[how])
    later = [prompt(A, P, cache_salt="one"), prompt(P, cache_salt="one")]
    stranger = first | {"cache_salt": "two"}
    with threads(1):
        wanted = fresh([first, *later, stranger])
        with engine(TINY, enable_blending=True) as llm:
            batches = [[first, *later, stranger]] if together else [[first], later, [stranger]]
            outputs = [output for batch in batches for output in run(llm, batch, PARAMS)]
            assert_all_same(outputs, wanted)
            assert_logprobs_match(outputs[2], hf_model(TINY))  # where P stands behind the prefix, its KV is exact
            assert outputs[3].num_found_tokens == {} and outputs[3].num_cached_tokens == 0
            if "blend_recompute_ratio" in FIRST[how]:  # then P has looked at EVIL, in the first prompt's own pages
                assert_logprobs_match(outputs[0], hf_model(TINY))
            found = outputs[1].blend
            assert found is not None
            # P is there, or on its way, from the first prompt, unless that has it encoded after EVIL: another chunk.
            assert found.num_encoded_tokens == (len(A) + len(P) if "continues" in FIRST[how] else len(A))
            num_encoded = metrics(llm)["chunks_encoded"]
            [kept] = llm.encode_chunks(PREFIX, [P], cache_salt="one")
            assert metrics(llm)["chunks_encoded"] == num_encoded
        with engine(TINY, enable_blending=True) as llm:
            [own] = llm.encode_chunks(PREFIX, [P])
        tolerances.check_kv(kept.k, own.k)
        tolerances.check_kv(kept.v, own.v)
