"""Run the rows of one group on one engine: started by benchmarks/side/turns.py, under this or another interpreter.

It must run where only the other engine is installed, so it imports nothing of this project but, on our side, the
package's `LLM` and `SamplingParams`. Every side gets the same token ids, drawn from the same seeds, and the same clock
around `generate`. Events (a line of JSON each) go to the file descriptor that the command names, apart from what
engines print.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

Ids = list[int]


def main() -> None:
    spec, descriptor = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])

    def tell(event: str, **what: Any) -> None:
        os.write(descriptor, (json.dumps({"event": event, **what}) + "\n").encode())

    start = time.perf_counter()
    try:
        engine = ENGINES[spec["side"]](spec["model"], spec["options"])
    except Exception as error:
        tell("refused", error=f"{type(error).__name__}: {error}")
        return
    tell("ready", seconds=time.perf_counter() - start, versions=engine.versions())
    for row in spec["rows"]:
        tell("begin", row=row["name"])
        try:
            engine.salt = f"row {row['name']}"
            work = KINDS[row["kind"]](row, spec)
            for _ in range(row["warm_up"]):
                work.sample(engine)
            samples = []
            for _ in range(row["repeats"]):
                gc.collect()
                samples.append(work.sample(engine))
        except Exception as error:
            tell("failed", row=row["name"], error=f"{type(error).__name__}: {error}")
        else:
            tell("end", row=row["name"], samples=samples, prompts=work.digest())
    tell("done")


class Ours:
    """vllm_blend.LLM, from the checkout or wherever this interpreter finds it."""

    package = "vllm_blend"
    calls = 0  # of `gaps`: requests need names of their own
    salt = ""  # of the row: rows with the same prompts share an engine, and must find nothing of each other's

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        module = __import__(self.package)
        if module.LLM.__module__.partition(".")[0] != self.package:
            raise ImportError(f"the name {self.package} is taken by {module.LLM.__module__}: this would time it twice")
        self.module, self.torch = module, __import__("torch")
        self.llm = module.LLM(model, **options)

    def seconds(self, prompts: list[Any], tokens: list[int], temperature: float = 0.0) -> float:
        """Return the wall time of `LLM.generate` for these prompts and this many tokens out of each."""
        asked = [self._params(count, temperature) for count in tokens]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, asked, use_tqdm=False)
        elapsed = time.perf_counter() - start
        for prompt, output, count in zip(prompts, outputs, tokens, strict=True):
            self.check(prompt, output)
            if (drawn := len(output.outputs[0].token_ids)) != count:
                raise RuntimeError(f"{drawn} tokens were drawn, not {count}")
        return elapsed

    def gaps(self, running: list[Any], tokens: int, arriving: list[Any], between: int) -> list[float]:
        """Return the seconds between two steps that give the `running` prompts tokens, while the `arriving` ones come
        one after another, each `between` such steps after the last has got its first token."""
        inner, left, waited = self.llm.llm_engine, list(arriving), 0
        self.calls += 1
        names = {f"running {self.calls}.{index}": prompt for index, prompt in enumerate(running)}
        for name, prompt in names.items():
            inner.add_request(name, prompt, self._params(tokens, 0.0))
        unheard, gaps, newcomer = set(names), list[float](), ""
        while unheard:
            unheard -= {output.request_id for output in inner.step()}
        last = time.perf_counter()
        while left or newcomer:
            if waited >= between and not newcomer:
                newcomer = f"arriving {self.calls}.{len(left)}"
                prompt = left.pop(0)
                inner.add_request(newcomer, prompt, self._params(1, 0.0))
            outputs = inner.step()
            now = time.perf_counter()
            if any(output.request_id in names for output in outputs):
                gaps.append(now - last)
                last, waited = now, waited + 1
            for output in outputs:
                if output.request_id == newcomer and output.finished:
                    self.check(prompt, output)
                    newcomer, waited = "", 0
                elif output.finished:
                    raise RuntimeError(f"a running request ended after {tokens} tokens: there is nothing to measure")
        inner.abort_request(list(names))
        while inner.has_unfinished_requests():
            inner.step()
        return gaps

    def _params(self, tokens: int, temperature: float) -> Any:
        return self.module.SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def prompt(self, pieces: list[Ids], more: dict[str, Any] | None) -> Any:
        """Return a prompt of a prefix, passages and a question: in pieces where `more` says how to blend."""
        if more is None:
            return {"prompt_token_ids": joined(pieces), "cache_salt": self.salt}
        asked = {"prefix": pieces[0], "chunks": pieces[1:-1], "suffix": pieces[-1], "cache_salt": self.salt}
        return asked | more

    def check(self, prompt: Any, output: Any) -> None:
        if output.error:
            raise RuntimeError(output.error)
        if "chunks" in prompt and output.blend is None:
            raise RuntimeError("the prompt was not blended")

    def versions(self) -> dict[str, str | None]:
        return versions_of(self.package, self.module, self.torch)


class VLLM(Ours):
    """Upstream's vllm.LLM, in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0, which turns.py sets)."""

    package = "vllm"

    def prompt(self, pieces: list[Ids], more: dict[str, Any] | None) -> Any:
        return {"prompt_token_ids": joined(pieces)}

    def check(self, prompt: Any, output: Any) -> None:
        if not output.finished:
            raise RuntimeError("a request did not finish")


class Transformers:
    """The `generate` of Hugging Face transformers, for prompts of equal length: in the model's dtype where an engine's
    default is the model's, else in float32."""

    salt = ""  # it has no cache between calls

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        import transformers

        self.torch, self.module = torch, transformers
        dtype = options.get("dtype", "auto")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def seconds(self, prompts: list[Any], tokens: list[int], temperature: float = 0.0) -> float:
        if len({len(prompt["prompt_token_ids"]) for prompt in prompts}) != 1 or len(set(tokens)) != 1:
            raise ValueError("transformers runs prompts of one length, with answers of one length, at once")
        ids = self.torch.tensor([prompt["prompt_token_ids"] for prompt in prompts])
        options = {"max_new_tokens": tokens[0], "min_new_tokens": tokens[0], "do_sample": False, "pad_token_id": 0}
        start = time.perf_counter()
        with self.torch.inference_mode():
            self.model.generate(ids, attention_mask=self.torch.ones_like(ids), **options)
        return time.perf_counter() - start

    def prompt(self, pieces: list[Ids], more: dict[str, Any] | None) -> Any:
        return {"prompt_token_ids": joined(pieces)}

    def versions(self) -> dict[str, str | None]:
        return versions_of("transformers", self.module, self.torch)


class LlamaCpp:
    """llama.cpp through its C API, as its server uses it: a sequence for each request, prompts in batches of 2,048
    tokens, then a token of every sequence a step, greedy. A sequence keeps its KV, and the next prompt there reuses it
    as far as the two begin alike."""

    salt = ""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        self.weights = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self.weights:
            raise RuntimeError(f"llama.cpp could not load {model}")
        self.sequences, length = options["max_num_seqs"], options["max_model_len"]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = length * self.sequences, self.sequences, 2048
        threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        params.n_threads = params.n_threads_batch = threads
        self.size = params.n_batch
        self.context = llama_cpp.llama_init_from_model(self.weights, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(self.size, 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.weights))
        self.kept: list[Ids] = [[] for _ in range(self.sequences)]

    def seconds(self, prompts: list[Any], tokens: list[int], temperature: float = 0.0) -> float:
        """Return the wall time of computing these prompts and drawing this many tokens after each."""
        if len(prompts) > self.sequences:
            raise ValueError(f"{len(prompts)} requests at once, but there are {self.sequences} sequences")
        start = time.perf_counter()
        todo: list[tuple[int, int, int, bool]] = []  # token, position, sequence, whether its logits are wanted
        for sequence, ids in enumerate(prompts):
            kept = self.kept[sequence]
            limit = min(len(kept), len(ids) - 1)
            alike = next((at for at in range(limit) if kept[at] != ids[at]), limit)
            self.lib.llama_memory_seq_rm(self.memory, sequence, alike, -1)
            todo += [(ids[at], at, sequence, at == len(ids) - 1) for at in range(alike, len(ids))]
            self.kept[sequence] = list(ids)
        left, drawn = list(tokens), dict[int, int]()
        while todo:
            for at in range(0, len(todo), self.size):
                drawn |= self._decode(todo[at : at + self.size])
            for sequence, token in list(drawn.items()):
                left[sequence] -= 1
                if left[sequence]:
                    self.kept[sequence].append(token)
                else:
                    del drawn[sequence]
            todo = [(token, len(self.kept[sequence]) - 1, sequence, True) for sequence, token in drawn.items()]
        return time.perf_counter() - start

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute rows, and return the likeliest next token of each sequence whose logits are wanted."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        found = {}
        for row, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self.lib.llama_get_logits_ith(self.context, row)
                found[sequence] = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
        return found

    def prompt(self, pieces: list[Ids], more: dict[str, Any] | None) -> Any:
        return joined(pieces)

    def versions(self) -> dict[str, str | None]:
        return {"llama-cpp-python": self.lib.__version__, "Python": ".".join(map(str, sys.version_info[:3]))}


def versions_of(name: str, module: Any, torch: Any) -> dict[str, str | None]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {name: module.__version__, "torch": torch.__version__, "CUDA": torch.version.cuda, "Python": python}


class Work(ABC):
    """The work of one row: `sample` does the next of it. What it draws depends on the row and its number alone."""

    def __init__(self, row: dict[str, Any], spec: dict[str, Any]) -> None:
        self.work, self.more, self.vocabulary = row["work"], row["ours"], spec["vocabulary"]
        self.seed, self.count, self._digest = f"{spec['seed']}/{json.dumps(row['work'])}", 0, hashlib.sha256()

    def rng(self, of: object) -> random.Random:
        return random.Random(f"{self.seed}/{of}")

    def ids(self, rng: random.Random, count: int) -> Ids:
        return [rng.randrange(10, self.vocabulary) for _ in range(count)]

    def asked(self, engine: Any, prompts: list[list[Ids]]) -> list[Any]:
        """Return prompts as the engine takes them, and note their token ids."""
        for pieces in prompts:
            self._digest.update(json.dumps(joined(pieces)).encode())
        return [engine.prompt(pieces, self.more) for pieces in prompts]

    def run(self, engine: Any, prompts: list[list[Ids]], tokens: list[int]) -> float:
        """Return the seconds of a call."""
        asked = self.asked(engine, prompts)
        seconds: float = engine.seconds(asked, tokens, self.work.get("temperature", 0.0))
        return seconds

    def digest(self) -> str:
        """Return a hash of the token ids of all prompts so far: sides that agree ran the same."""
        return self._digest.hexdigest()[:16]

    @abstractmethod
    def sample(self, engine: Any) -> float:
        """Do the work once more, and return the seconds that one unit of it took."""


class Prefill(Work):
    """A prompt that no cache knows, and one token."""

    def sample(self, engine: Any) -> float:
        self.count += 1
        return self.run(engine, [[self.ids(self.rng(self.count), self.work["tokens"])]], [1])


class Decode(Work):
    """A step of a batch: a longer call less a shorter one over the same prompts, by the number of steps between. After
    the first warm-up an engine with a prefix cache computes no prompt in either."""

    FEW = 8

    def sample(self, engine: Any) -> float:
        rng, batch, steps = self.rng(0), self.work["batch"], self.work["steps"]
        prompts = [[self.ids(rng, self.work["context"])] for _ in range(batch)]
        few = self.run(engine, prompts, [self.FEW] * batch)
        many = self.run(engine, prompts, [self.FEW + steps] * batch)
        seconds: float = (many - few) / steps
        return seconds


class Batch(Work):
    """Requests of random lengths, all at once; the unit is a token out."""

    def sample(self, engine: Any) -> float:
        self.count += 1
        rng, work = self.rng(self.count), self.work
        prompts = [[self.ids(rng, rng.randint(*work["tokens_in"]))] for _ in range(work["requests"])]
        tokens = [rng.randint(*work["tokens_out"]) for _ in range(work["requests"])]
        return self.run(engine, prompts, tokens) / sum(tokens)


class Rag(Work):
    """Prompts of one prefix, some passages of a pool in any order, and a question; the unit is a request.

    The first sample is preceded by prompts that hold every passage of the pool, so that what an engine can keep of them
    is kept, unless `cold` asks for a new pool in each sample. Many
    prompts draw the pool's first passages most often.
    """

    def sample(self, engine: Any) -> float:
        prompts = self.draw(engine)
        return self.run(engine, prompts, [self.work["tokens_out"]] * len(prompts)) / len(prompts)

    def draw(self, engine: Any) -> list[list[Ids]]:
        """Return the next prompts, with the pool in store."""
        self.count += 1
        work, rng = self.work, self.rng(self.count)
        prefix, size = self.ids(self.rng("prefix"), work["prefix"]), work["passages"]
        cold = work.get("cold", False)
        source = self.rng(f"pool {self.count}" if cold else "pool")
        pool = [self.ids(source, work["passage"]) for _ in range(work["pool"])]
        if self.count == 1 and not cold:
            for at in range(0, len(pool), size):
                passages = pool[at : at + size]
                asked = [prefix, *passages, self.ids(rng, work["question"])]
                self.run(engine, [asked], [1])
        prompts = []
        for _ in range(work["requests"]):
            passages = zipf(rng, pool, size) if work["requests"] > 1 else rng.sample(pool, size)
            prompts.append([prefix, *passages, self.ids(rng, work["question"])])
        return prompts


class Gap(Rag):
    """The 99th percentile of the time between two tokens of a batch that decodes while such prompts arrive."""

    def sample(self, engine: Any) -> float:
        prompts = self.draw(engine)
        rng, work = self.rng(0), self.work
        running = [{"prompt_token_ids": self.ids(rng, work["context"])} for _ in range(work["batch"])]
        arriving = self.asked(engine, prompts)
        gaps = sorted(engine.gaps(running, work["running_tokens"], arriving, work["between"]))
        worst: float = gaps[math.ceil(0.99 * len(gaps)) - 1]
        return worst


def zipf(rng: random.Random, pool: list[Ids], count: int) -> list[Ids]:
    """Return `count` passages of the pool, in the order drawn: the k-th with a weight of 1/k, none twice."""
    left, chosen = list(range(len(pool))), []
    for _ in range(count):
        at = rng.choices(range(len(left)), [1 / (1 + index) for index in left])[0]
        chosen.append(pool[left.pop(at)])
    return chosen


def joined(pieces: list[Ids]) -> Ids:
    return [token for piece in pieces for token in piece]


ENGINES: dict[str, Any] = {"ours": Ours, "vllm": VLLM, "transformers": Transformers, "llama.cpp": LlamaCpp}
KINDS: dict[str, type[Work]] = {"prefill": Prefill, "decode": Decode, "batch": Batch, "rag": Rag, "gap": Gap}

if __name__ == "__main__":
    # The folder of this file is no place to import from: its names are this benchmark's own.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    main()
