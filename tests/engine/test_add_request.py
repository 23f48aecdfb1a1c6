"""What adding a request costs, and when it counts as arrived."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import pytest

from tests.engine.engines import assert_empty, engine, greedy, run, tiny_model
from tests.engine.threads import wait_until_wanted
from vllm_blend import SamplingParams
from vllm_blend.blend.selectors import make_selector, spec
from vllm_blend.engine import llm_engine
from vllm_blend.entrypoints import llm as llm_module
from vllm_blend.kv_store import keys
from vllm_blend.prompt_parser import parse_prompt

TINY = tiny_model("llama")
LONG = tiny_model("llama", max_position_embeddings=4096)
PREFIX = 400


def test_work_grows_with_the_tokens_and_not_with_tokens_times_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the chunks of the same prompt: no more tokens are hashed, and the model is not described again."""
    digest, dumps, hashed, described = keys._ids_digest, json.dumps, [0], [0]

    def counting(token_ids: Any) -> str:
        hashed[0] += len(token_ids)
        return digest(token_ids)

    def describing(*args: Any, **kwargs: Any) -> str:
        described[0] += 1
        return dumps(*args, **kwargs)

    monkeypatch.setattr(keys, "_ids_digest", counting)
    monkeypatch.setattr(json, "dumps", describing)
    with engine(LONG, enable_blending=True, blend_min_tokens=1) as llm:
        inner, counts = llm.llm_engine, []
        for num_chunks in (50, 100):
            chunks = [[index % 200 + 5] * (1000 // num_chunks) for index in range(num_chunks)]
            hashed[0] = described[0] = 0
            inner.add_request("x", {"prefix": [3] * PREFIX, "chunks": chunks, "suffix": [7]}, greedy())
            inner.abort_request("x")
            counts.append(hashed[0])
            assert described[0] <= 2
        assert counts == [2 * PREFIX + 1000] * 2
        assert_empty(llm)


@pytest.mark.parametrize("ids", [[True, 3], [2**70], [-1], [1.5], ["a"], [[1]], [10]])
def test_token_ids_are_checked_one_by_one_where_they_are_not_all_plain(ids: list[Any]) -> None:
    if ids == [True, 3]:
        assert parse_prompt({"prompt_token_ids": ids}, None, 10).token_ids == [1, 3]
        return
    with pytest.raises((ValueError, TypeError), match=r"prompt_token_ids\[0\] is"):
        parse_prompt({"prompt_token_ids": ids}, None, 10)


def test_a_selector_of_absurd_length_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a+" * 16_000 + "a", "(" * 20_000, "none" + " " * 20_000 + "!"):
        with monkeypatch.context() as patch:
            patch.setattr(spec, "_RULE", None)  # nothing is looked for in it
            with pytest.raises(
                ValueError, match=r"blend_selector='.{40}\.\.\.' has 20\d+|32\d+ characters: .* at most 1024"
            ):
                make_selector(text)


class HostileDict(dict[str, Any]):
    """A prompt that cannot be read."""

    def __contains__(self, key: object) -> bool:
        raise RuntimeError

    get = keys = items = __iter__ = __getitem__ = __contains__  # type: ignore[assignment]


class HostileStr(str):
    """A text whose methods fail."""

    def __len__(self) -> int:
        raise KeyError("gone")


class HostileList(list[int]):
    """Token ids that cannot be read."""

    def __iter__(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(("kind", "content"), [(HostileDict, {"prompt": "a"}), (HostileStr, "a"), (HostileList, [5])])
def test_a_prompt_that_raises_costs_no_other(kind: Any, content: Any) -> None:
    with engine(TINY) as llm:
        batch: list[Any] = [[5, 6, 7], kind(content), [8, 9]]
        one, refused, other = run(llm, batch, greedy(3))
        assert re.match(r"the prompt cannot be read: .* raised (RuntimeError|KeyError)", refused.error or "")
        assert [one.outputs[0].token_ids, other.outputs[0].token_ids] == [
            output.outputs[0].token_ids for output in run(llm, [batch[0], batch[2]], greedy(3))
        ]
        assert_empty(llm)


def test_n_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SamplingParams(n=16384).n == 16384
    with pytest.raises(ValueError, match=r"n=16385 .* at most 16384, or raise VLLM_MAX_N_SEQUENCES"):
        SamplingParams(n=16385)
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    with pytest.raises(ValueError, match="at most 3"):
        SamplingParams(n=4)
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "-3")
    with pytest.raises(ValueError, match="must be a positive integer"):
        SamplingParams(n=1)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (0, ValueError, "n=0 is out of range"),
        (2.0, TypeError, "n=2.0 must be an integer"),
        (20_000, ValueError, "n=20000 is more completions than one request may have"),
    ],
)
def test_n_is_looked_at_again_when_a_request_comes(n: Any, error: type[Exception], message: str) -> None:
    """Parameters can be changed after they were checked."""
    params = greedy(1)
    params.n = n
    with engine(TINY) as llm, pytest.raises(error, match=message):
        llm.llm_engine.add_request("a", [5, 6], params)


def test_a_request_that_joins_an_encoding_was_not_scheduled_before_it_came() -> None:
    prompt: Any = {"prefix": [3] * 40, "chunks": [[5] * 20], "suffix": [7]}
    with engine(TINY, enable_blending=True, blend_min_tokens=1, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        inner = llm.llm_engine
        done: dict[str, Any] = {}
        inner.add_request("first", prompt, greedy(2), final_only=True)
        inner.step()  # of the prefix, some
        inner.add_request("second", prompt, greedy(2), final_only=True)
        while inner.has_unfinished_requests():
            done |= {output.request_id: output.metrics for output in inner.step()}
        for metrics in done.values():
            assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
        assert done["second"].first_scheduled_time == done["second"].arrival_time  # as it was being worked on


def test_a_request_arrives_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_at = []

    def parse(*args: Any) -> Any:
        parsed_at.append(time.time())
        return parse_prompt(*args)

    monkeypatch.setattr(llm_engine, "parse_prompt", parse)
    with engine(TINY) as llm:
        for output in run(llm, ["a", "b"], greedy(2)):
            metrics = output.metrics
            assert metrics is not None and metrics.arrival_time <= parsed_at[0]
            assert metrics.first_token_time is not None and metrics.time_in_prefill is not None
            assert metrics.first_token_latency == metrics.first_token_time - metrics.arrival_time
            assert metrics.first_token_latency >= metrics.time_in_prefill > 0


def test_a_conversation_arrives_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered_at: list[float] = []
    chat_prompts = vars(llm_module)["chat_prompts"]

    def render(*args: Any) -> Any:
        rendered_at.append(time.time())
        return chat_prompts(*args)

    monkeypatch.setattr(llm_module, "chat_prompts", render)
    messages: Any = [{"role": "user", "content": "a"}]
    with engine(TINY) as llm:
        [output] = llm.chat(messages, greedy(2), use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert output.metrics is not None and output.metrics.arrival_time <= rendered_at[0]


def test_a_request_arrives_before_it_waits_for_a_step_to_end() -> None:
    with engine(TINY) as llm:
        inner = llm.llm_engine
        thread = threading.Thread(target=inner.add_request, args=("x", [5, 6], greedy(2)), daemon=True)
        with inner.lock:  # as during a step
            thread.start()
            wait_until_wanted(inner.lock)
            end_of_step = time.time()
        thread.join()
        assert inner.requests.by_id["x"].metrics.arrival_time <= end_of_step
        inner.abort_request("x")


@pytest.mark.parametrize("kind", ["text", "pieces", "chat"])
def test_a_text_far_too_long_is_refused_without_reading_it_to_the_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long: Any = "ab c" * 500_000
    if kind == "pieces":
        long = {"prefix": "a", "chunks": [long[:300_000]] * 7, "suffix": "b"}
    with engine(TINY) as llm:
        tokenizer, lengths = llm.get_tokenizer(), []
        encode = tokenizer.encode

        def recorded(text: str, **options: Any) -> list[int]:
            lengths.append(len(text))
            ids: list[int] = encode(text, **options)
            return ids

        monkeypatch.setattr(tokenizer, "encode", recorded)
        if kind == "chat":
            messages: Any = [[{"role": "user", "content": text}] for text in ("a", long)]
            good, bad = llm.chat(messages, greedy(2), use_tqdm=False, chat_template="{{ messages[0].content }}")
        else:
            good, bad = run(llm, ["a", long], greedy(2))
        assert good.error is None
        assert bad.error is not None and "max_model_len=96 tokens, which must hold it" in bad.error
        assert sum(lengths) < 150_000


class _Words:
    """A tokenizer of words, to which white space is nothing."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [5] * len(text.split())


def test_a_text_of_many_characters_may_have_few_tokens() -> None:
    parsed = parse_prompt("a" * 900_000 + " " * 900_000 + "b", _Words(), 10, 4)  # type: ignore[arg-type]
    assert parsed.token_ids == [5, 5]
