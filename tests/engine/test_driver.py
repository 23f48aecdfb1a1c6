"""Several threads share one engine: each gets the answers that it would get alone, or an error at once."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.engines import assert_empty, engine, greedy, new_llm, run, sampled, tiny_model, tokens_of
from tests.engine.threads import PATIENCE, Job, at_once, wait_until_wanted
from tests.engine.tiny_tokenizers import byte_level
from vllm_blend import LLM, ChunkedLLM, SamplingParams
from vllm_blend.engine.interrupts import interrupts_held_back
from vllm_blend.engine.lock import FairLock

TINY = tiny_model("llama")


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt also in a run that a shell started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def random_case(seed: int) -> tuple[list[Any], list[SamplingParams]]:
    """A batch of prompts, as text, ids and pieces, and settings for each."""
    rng = np.random.default_rng(seed)
    prompts: list[Any] = []
    params = []
    for index in range(rng.integers(1, 4)):
        ids = rng.integers(0, 200, rng.integers(4, 40)).tolist()
        # Passages that threads share are encoded once for all of them.
        chunks = [[int(rng.integers(0, 4)) + 5] * 9 + [passage + 20] * 3 for passage in rng.integers(0, 3, 2)]
        pieces = {"prefix": [3, 4], "chunks": chunks, "suffix": ids[:8], "blend_selector": "none"}
        prompts.append([{"prompt_token_ids": ids}, bytes(ids).decode("latin-1"), pieces][(seed + index) % 3])
        make = greedy if rng.integers(2) else lambda *a, **k: sampled(*a, seed=7, **k)
        params.append(make(int(rng.integers(1, 12)), ignore_eos=True))
    return prompts, params


def answers(outputs: Any) -> Any:
    assert not isinstance(outputs, BaseException), outputs
    return [(output.error, output.outputs[0].finish_reason) for output in outputs], tokens_of(outputs)


@pytest.mark.cpu_only
@pytest.mark.parametrize("num_threads", [3, 8])
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 24, "async_scheduling": True}])
def test_every_thread_gets_its_own_answers(num_threads: int, options: dict[str, Any]) -> None:
    with engine(TINY, enable_blending=True, blend_min_tokens=1, **options) as llm:
        cases = [random_case(seed) for seed in range(3 * num_threads)]
        expected = [answers(run(llm, *case)) for case in cases]
        llm.llm_engine.chunk_store.clear()
        llm.reset_prefix_cache()

        def generate(index: int) -> list[Any]:
            results = []
            for case in cases[index::num_threads]:
                results.append(answers(run(llm, *case)))
                llm.get_metrics()
                llm.reset_prefix_cache()
            return results

        found = at_once(*(lambda index=index: generate(index) for index in range(num_threads)))
        assert found == [expected[index::num_threads] for index in range(num_threads)]


@pytest.mark.cpu_only
def test_chunks_are_encoded_loaded_and_used_by_several_threads_at_once() -> None:
    with engine(TINY, enable_blending=True, blend_min_tokens=1) as llm:
        prefix, chunks = [3, 4], [[index + 9] * 14 for index in range(4)]
        prompt = {"prefix": prefix, "chunks": chunks, "suffix": [7, 8]}
        stored = llm.encode_chunks(prefix, chunks)
        names = llm.llm_engine.identify_chunks(prefix, chunks)[1]
        expected = answers(run(llm, prompt, greedy()))

        def encode(index: int) -> bool:
            for _ in range(6):
                if index == 0:
                    with llm.llm_engine.lock:
                        llm.llm_engine.chunk_store.clear()
                found = llm.encode_chunks(prefix, chunks)
                torch.testing.assert_close([kv.k for kv in found], [kv.k for kv in stored])
                for name, kv in zip(names, found, strict=True):
                    llm.load_chunk(name, kv)
            return True

        jobs: list[Job] = [partial(encode, index) for index in range(3)]
        jobs += [lambda: [answers(run(llm, prompt, greedy())) for _ in range(6)]] * 2
        assert at_once(*jobs) == [True] * 3 + [[expected] * 6] * 2


@pytest.mark.cpu_only
def test_the_chunk_api_in_several_threads() -> None:
    chunked = ChunkedLLM(TINY, num_gpu_blocks_override=200, block_size=8, dtype="float32", blend_min_tokens=1)
    contents = [[index + 5] * 11 + [index] for index in range(6)]
    ask: dict[str, Any] = {"sampling_params": greedy(6, ignore_eos=True), "mode": "reuse"}

    def use(index: int) -> list[Any]:
        own, found = chunked.register_chunk([100 + index] * 8, name=f"own {index}"), []
        for turn in range(5):
            chunk = chunked.register_chunk(contents[(index + turn) % 6])
            arguments: dict[str, Any] = {"context_chunk_ids": [own, chunk], "query": [9, index]}
            stream = chunked.generate_from_chunks(**arguments, **ask, stream=True)
            first = next(stream).outputs[0].token_ids
            whole = chunked.generate_from_chunks(**arguments, **ask)  # while the stream is under way
            batch = chunked.batch_generate_from_chunks([arguments | {"mode": "reuse"}] * 2, ask["sampling_params"])
            last = list(stream)[-1]
            assert len(first) == 1 and first == last.outputs[0].token_ids[:1]
            found += [tokens_of([last, whole, *batch])]
            dropped = chunked.generate_from_chunks(**arguments, **ask, stream=True)
            next(dropped)
            del dropped
            assert {info.chunk.id for info in chunked.list_chunks()} >= {own.id, chunk.id}
        assert not chunked.delete_chunk(own).deferred
        return found

    expected = [use(index) for index in range(4)]
    assert all(len({tuple(tokens) for tokens in turn}) == 1 for found in expected for turn in found)
    assert at_once(*(lambda index=index: use(index) for index in range(4))) == expected
    assert_empty(chunked.llm)


class Broken(Exception):
    pass


@pytest.mark.cpu_only
@pytest.mark.parametrize("where", ["launch", "read", "after"])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_in_the_driver_is_its_own(
    where: str, error: type[BaseException], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every few steps one fails, before or after it was done: the thread that drives gets the error, the others their
    answers."""
    with engine(TINY, async_scheduling=ahead, max_num_seqs=5) as llm:
        inner, calls = llm.llm_engine, iter(range(10_000))
        cases = [
            ([{"prompt_token_ids": [index + 3] * 9}], sampled(10, seed=index, ignore_eos=True)) for index in range(6)
        ]
        expected = [answers(run(llm, *case)) for case in cases]
        llm.reset_prefix_cache()
        owner, name = {
            "launch": (inner.model_executor, "execute_model"),
            "read": (inner.results, "process"),
            "after": (inner.results, "process"),
        }[where]
        call = getattr(owner, name)

        def failing(*args: Any) -> Any:
            number = next(calls)
            fails = number < 100 and number % 7 == 6  # alone at the end, a thread would never come through
            if fails and where != "after":
                raise error
            result = call(*args)
            if fails:
                raise error
            return result

        monkeypatch.setattr(owner, name, failing)
        found = at_once(*(lambda case=case: [run_until_right(llm, case, error) for _ in range(4)] for case in cases))
        monkeypatch.undo()
        assert found == [[own] * 4 for own in expected]


def run_until_right(llm: LLM, case: Any, error: type[BaseException]) -> Any:
    while True:
        try:
            return answers(run(llm, *case))
        except error:
            continue


@pytest.mark.cpu_only
def test_a_direct_user_of_the_engine_gets_every_output() -> None:
    """`add_request`, `step` and `abort_request` in one thread, `generate` in others, with ids that clash."""
    with engine(TINY) as llm:
        inner = llm.llm_engine
        prompts: list[Any] = [{"prompt_token_ids": [index + 3] * 9} for index in range(8)]
        params = greedy(8, ignore_eos=True)
        expected = [tokens_of(run(llm, prompt, params))[0] for prompt in prompts]

        def add(request_id: str, prompt: Any) -> bool:
            with inner.lock:
                if inner.has_request(request_id):  # of a thread that calls generate
                    return False
                inner.add_request(request_id, prompt, params)
            return True

        def direct() -> Any:
            outputs = {}
            first = next(llm._ids) + 5
            for index, prompt in enumerate(prompts):
                while not add(str(first + index), prompt):
                    time.sleep(0)
            inner.add_request("aborted", prompts[0], params)
            inner.abort_request("aborted")
            while inner.has_unfinished_requests():
                for output in inner.step():
                    if output.finished:
                        outputs[int(output.request_id) - first] = output.outputs[0].token_ids
                if len(outputs) == len(prompts):
                    break
            return [outputs[index] for index in range(len(prompts))]

        def usual() -> Any:
            return [tokens_of(run(llm, prompts, params)) for _ in range(3)]

        assert at_once(direct, usual, usual) == [expected, [expected] * 3, [expected] * 3]


@pytest.mark.cpu_only
def test_a_request_that_another_thread_aborts_ends_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(TINY) as llm:
        inner = llm.llm_engine
        execute, steps = inner.model_executor.execute_model, iter(range(100))

        def aborting(scheduled: Any) -> Any:
            if next(steps) == 4:
                for item in scheduled.scheduled:
                    if item.request.max_num_tokens == 9 + 50:
                        target.append(item.request.request_id)
                wait_until_wanted(inner.lock)  # otherwise the request might end before it is aborted
            return execute(scheduled)

        target: list[str] = []
        monkeypatch.setattr(inner.model_executor, "execute_model", aborting)

        def abort() -> None:
            while not target:
                time.sleep(0)
            inner.abort_request(target)

        long, short = greedy(50, ignore_eos=True), greedy(12, ignore_eos=True)
        found = at_once(lambda: run(llm, [{"prompt_token_ids": [3] * 9}] * 2, [long, short]), abort)
        [aborted, other] = [output.outputs[0] for output in found[0]]
        assert aborted.finish_reason == "abort" and 0 < len(aborted.token_ids) < 50
        assert other.finish_reason == "length" and len(other.token_ids) == 12


@pytest.mark.cpu_only
def test_hooks_are_for_one_thread() -> None:
    with engine(TINY) as llm:
        hooks = llm.llm_engine.decoder.cache_fuse_metadata
        params = greedy(3)
        prompt: Any = {"prompt_token_ids": [5, 6, 7, 8]}
        expected = answers(run(llm, prompt, params))
        hooks["collect"] = True
        [error] = at_once(lambda: run(llm, prompt, params))
        assert isinstance(error, RuntimeError) and "two threads" in str(error)
        run(llm, prompt, params)  # the thread that switched it on
        hooks |= {"collect": False}
        llm.llm_engine.add_request("mine", prompt, params)

        def with_hook() -> Any:
            hooks.update(collect=True)
            try:
                return run(llm, prompt, params)
            finally:
                hooks["collect"] = False

        [error] = at_once(with_hook)
        assert isinstance(error, RuntimeError) and "unfinished requests" in str(error)
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            llm.set_tokenizer(llm.get_tokenizer())
        llm.llm_engine.abort_request("mine")
        assert [answers(one) for one in at_once(lambda: run(llm, prompt, params))] == [expected]


@pytest.mark.cpu_only
def test_the_tokenizer_is_used_by_one_thread_at_a_time() -> None:
    """A stand-in that fails as the fast ones do ("Already borrowed"), by `generate` and by `chat`, which asks for
    offsets."""
    with engine(TINY, enable_blending=True, blend_min_tokens=1) as llm:
        usual, busy = llm.get_tokenizer(), threading.Lock()

        class Borrowed(type(usual)):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                with borrowed():
                    return super().__call__(*args, **kwargs)

            def encode(self, *args: Any, **kwargs: Any) -> Any:
                with borrowed():
                    return super().encode(*args, **kwargs)

        @contextmanager
        def borrowed() -> Iterator[None]:
            if not busy.acquire(blocking=False):
                raise RuntimeError("Already borrowed")
            try:
                time.sleep(0)
                yield
            finally:
                busy.release()

        messages: Any = [{"role": "user", "content": text} for text in ("The quick brown", "fox jumps", "What is it?")]
        template = "{% for m in messages %}{{ m.content }};{% endfor %}"

        def ask() -> Any:
            chatted = llm.chat(messages, greedy(), use_tqdm=False, chat_template=template)
            assert chatted[0].blend is not None
            return answers(run(llm, "What is it?", greedy())), answers(chatted)

        other = copy.deepcopy(byte_level())
        other.__class__ = type("Borrowed", (Borrowed, type(other)), {})
        llm.set_tokenizer(other)
        try:
            expected = ask()
            found = at_once(*[lambda: [ask() for _ in range(5)]] * 4)
        finally:
            llm.set_tokenizer(usual)
        assert found == [[expected] * 5] * 4


@pytest.mark.cpu_only
def test_ctrl_c_waits_for_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real signal, in the middle of a step: the main thread is interrupted, the other gets its answer."""
    with engine(TINY) as llm:
        prompt, params = {"prompt_token_ids": [5, 6, 7, 8]}, greedy(10, ignore_eos=True)
        expected = answers(run(llm, prompt, params))
        inner, calls = llm.llm_engine, iter(range(1000))
        found: list[Any] = []
        struck: list[bool] = []
        completed: list[bool] = []
        process, distribute = inner.results.process, inner.driver.distribute

        def interrupted(*args: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            if main and next(calls) == 3:
                struck.append(True)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)  # the interpreter would raise KeyboardInterrupt here
            return process(*args)

        def distributed(outputs: Any) -> None:
            distribute(outputs)
            if struck and threading.current_thread() is threading.main_thread():
                completed.append(True)

        monkeypatch.setattr(inner.results, "process", interrupted)
        monkeypatch.setattr(inner.driver, "distribute", distributed)
        ready = threading.Event()

        def other() -> None:
            ready.set()
            found.extend(answers(run(llm, prompt, params)) for _ in range(20))

        thread = threading.Thread(target=other, daemon=True)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            ready.wait(PATIENCE)
            while True:
                run(llm, prompt, params)
        thread.join(PATIENCE)
        assert completed == [True]  # the step of the signal, and no other
        assert found == [expected] * 20 and answers(run(llm, prompt, params)) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("not reached")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_comes_back_queues_behind_those_that_wait() -> None:
    lock, order = FairLock(lambda: None), []

    def once() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=once)
    with lock, lock:
        thread.start()
        wait_until_wanted(lock)
    for _ in range(3):
        with lock:
            order.append("again")
    thread.join()
    assert order.index("other") <= 1


@pytest.mark.cpu_only
def test_a_stream_has_one_reader_and_may_end_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = ChunkedLLM(TINY, num_gpu_blocks_override=60, block_size=8, dtype="float32")
    params = greedy(5, ignore_eos=True)
    stream = chunked.generate_from_chunks(query=[5, 6, 7], sampling_params=params, stream=True)
    streams, step = [stream], chunked.llm_engine.step
    inside: list[Any] = []

    def reading() -> Any:
        if not inside:
            inside.append(at_once(lambda: next(streams[0])))
        return step()

    monkeypatch.setattr(chunked.llm_engine, "step", reading)
    assert len(next(stream).outputs[0].token_ids) == 1
    monkeypatch.undo()
    [[error]] = inside
    assert isinstance(error, ValueError) and "another thread is reading" in str(error)
    # A stream that the collector finds in the middle of a step is aborted after it.
    execute = chunked.llm_engine.model_executor.execute_model
    del stream

    def collecting(scheduled: Any) -> Any:
        streams.clear()
        return execute(scheduled)

    monkeypatch.setattr(chunked.llm_engine.model_executor, "execute_model", collecting)
    [other] = run(chunked.llm, {"prompt_token_ids": [5, 6, 7]}, params)
    assert len(other.outputs[0].token_ids) == 5
    assert_empty(chunked.llm)


@pytest.mark.cpu_only
def test_shutdown_frees_and_closes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"enable_blending": True, "chunk_store_path": str(tmp_path)}
    before = {thread.name for thread in threading.enumerate()}
    with new_llm(TINY, **arguments) as llm:
        chunks = llm.encode_chunks([3], [[5] * 20])
        cache = weakref.ref(llm.llm_engine.model_executor.driver_worker.model_runner.cache.key)
        model = llm.apply_model(weakref.ref)[0]
        inner = llm.llm_engine
        store: Any = inner.chunk_store
        [disk] = [tier.storage for tier in store.below]
        running = hold_steps(llm, monkeypatch)
        waiting = run_in_thread(lambda: run(llm, {"prompt_token_ids": [5] * 4}, greedy(80, ignore_eos=True)))
        # The request must not end before the shutdown, whichever thread is slow.
        assert running.wait(PATIENCE)
    monkeypatch.undo()
    assert store.below == () and disk._pool is None and len(store) == 0
    [result] = waiting()
    assert isinstance(result, RuntimeError) and "has been shut down" in str(result)
    assert repr(inner) == "<LLMEngine, shut down>"
    llm.shutdown()  # once more
    gc.collect()
    assert model() is None and cache() is None
    for call in (
        lambda: run(llm, "x", greedy()),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.encode_chunks([3], [[5]]),
        llm.get_metrics,
        llm.get_tokenizer,
        llm.reset_prefix_cache,
        lambda: inner.add_request("x", "x", greedy()),
        inner.step,
        lambda: inner.abort_request("x"),
        lambda: inner.blocks,
    ):
        with pytest.raises(RuntimeError, match="shut down: make another"):
            call()
    assert not {t.name for t in threading.enumerate() if t.name.startswith("chunk-write")} - before
    with new_llm(TINY, **arguments) as again:  # all was written
        found = again.encode_chunks([3], [[5] * 20])
        assert again.llm_engine.composer.num_encoded == 0
        torch.testing.assert_close(found[0].k, chunks[0].k)
    with ChunkedLLM(TINY, num_gpu_blocks_override=60, block_size=8) as chunked:
        stream = chunked.generate_from_chunks(query=[5], stream=True)
        next(stream)
    calls: list[Job] = [lambda: next(stream), lambda: chunked.register_chunk([5]), chunked.list_chunks]
    for call in calls:
        with pytest.raises(RuntimeError, match="shut down"):
            call()


def hold_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have each step wait until another thread wants the engine. The event is set once a step runs."""
    inner, running = llm.llm_engine, threading.Event()
    execute = inner.model_executor.execute_model

    def held(scheduled: Any) -> Any:
        running.set()
        wait_until_wanted(inner.lock)
        return execute(scheduled)

    monkeypatch.setattr(inner.model_executor, "execute_model", held)
    return running


def run_in_thread(job: Job) -> Callable[[], list[Any]]:
    """Begin a job; the function that is returned waits for its result or its error."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(at_once(job)), daemon=True)
    thread.start()

    def result() -> list[Any]:
        thread.join(PATIENCE)
        return results

    return result
