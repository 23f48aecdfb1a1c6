"""The engine as LMCache's users know it: configured by LMCACHE_CONFIG_FILE, and given prompts in pieces as strings."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tqdm import tqdm

from vllm_blend.chunks.messages import parse_conversations
from vllm_blend.entrypoints.beam_search import BeamSearchOutput
from vllm_blend.entrypoints.llm import LLM as BlendLLM
from vllm_blend.entrypoints.llm import ChatMessages, as_batch
from vllm_blend.inputs import PromptType
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.lmcache.config import load_config
from vllm_blend.lmcache.prompts import BlendPrompt, split_prompt
from vllm_blend.outputs import RequestOutput
from vllm_blend.prompt_keys import parse_salt
from vllm_blend.sampling_params import SamplingParams

MIN_STORED_CHARACTERS = 64  # shorter pieces are quicker computed than looked after
MAX_REMEMBERED = 1 << 16  # pieces: 16 bytes each

_open: weakref.WeakSet[LLM] = weakref.WeakSet()


class LLM(BlendLLM):
    """`vllm_blend.LLM` with LMCache's configuration and prompts.

    A prompt made by `combine_input_prompt_chunks`, or a plain string with separators, is blended: pieces that are
    stored are reused wherever they stand, the others are computed where they stand, and the last one always is. Every
    stored piece was encoded after BOS alone. `OfflineKVPreCompute` stores pieces; so does the second prompt that holds
    one.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **engine_args: Any) -> None:
        """Raises ValueError where the configuration is wrong, or contradicts the arguments."""
        self.lmcache_config = config = load_config()
        config.warn()
        try:
            super().__init__(model, tokenizer, **config.arguments(engine_args))
        except ValueError as error:
            raise ValueError(config.in_its_words(str(error))) from error
        self._blends = self.llm_engine.config.blend.enable_blending
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # digests of the pieces of earlier prompts
        _open.add(self)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """As in the base class. The `prompt` of an output is the string that was given."""
        batch = as_batch(prompts, prompt_token_ids)
        with self.llm_engine.lock:
            pieces = [self._pieces(prompt) for prompt in batch]
            composed = [
                prompt if each is None else self._compose(prompt, each)
                for prompt, each in zip(batch, pieces, strict=True)
            ]
        outputs = super().generate(composed, sampling_params, use_tqdm, **options)
        with self.llm_engine.lock:
            for prompt, each in zip(batch, pieces, strict=True):
                self._remember(each or (), _salt(prompt))
        for output, prompt, each in zip(outputs, batch, pieces, strict=True):
            text = prompt.get("prompt", "") if isinstance(prompt, dict) else prompt
            output.prompt = output.prompt if each is None else str(text)
        return outputs

    def chat(
        self, messages: ChatMessages | Sequence[ChatMessages], *arguments: Any, **options: Any
    ) -> list[RequestOutput]:
        """As in the base class, for messages without separators: these are for `generate`, while in a chat every text
        part of a message is a piece.

        Raises ValueError where a text has several pieces.
        """
        separator = self.lmcache_config.separator
        texts = [text for each in parse_conversations(messages) for message in each for text in message.texts]
        if self._blends and any(len(split_prompt(text, separator)) > 1 for text in texts):
            raise ValueError(
                "a message is made of several pieces, which chat() cannot blend: give them as the text parts of the "
                "message's content, or write the template's text as the first and the last piece of "
                "combine_input_prompt_chunks, and use generate()"
            )
        return super().chat(messages, *arguments, **options)

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], *arguments: Any, **options: Any
    ) -> list[BeamSearchOutput]:
        """As in the base class, for prompts of one piece. Raises ValueError where a prompt has several."""
        for index, prompt in enumerate(as_batch(prompts, None)):
            if len(self._pieces(prompt) or ()) > 1:
                raise ValueError(
                    f"prompts[{index}] is made of several pieces, and a beam search cannot blend: join their text "
                    "without separators, or use generate()"
                )
        return super().beam_search(prompts, *arguments, **options)

    def shutdown(self) -> None:
        """As in the base class."""
        _open.discard(self)
        super().shutdown()

    def _pieces(self, prompt: PromptType) -> tuple[str, ...] | None:
        """Return the pieces of a prompt that may have some, None where it is left as it is."""
        if isinstance(prompt, dict) and not {"prompt_token_ids", "chunks"} & prompt.keys():
            prompt = prompt.get("prompt", "")  # type: ignore[assignment]
        if not isinstance(prompt, str) or not (self._blends or isinstance(prompt, BlendPrompt)):
            return None
        return split_prompt(prompt, self.lmcache_config.separator)

    def _compose(self, prompt: PromptType, pieces: Sequence[str]) -> Any:
        """Return what the base class takes: the pieces, and the prompt's other keys, which it checks. Where nothing is
        blended the pieces stay apart too: the token ids are the same."""
        others = {key: value for key, value in prompt.items() if key != "prompt"} if isinstance(prompt, dict) else {}
        if len(pieces) < 2:
            return {**others, "prompt": "".join(pieces)}
        first, *rest = pieces
        chunks = [piece for piece in (self._without_bos(first), *rest[:-1]) if piece]
        salt = _salt(prompt)
        fresh = [index for index, chunk in enumerate(chunks) if not self._is_worth_storing(chunk, salt)]
        return {**others, "prefix": "", "chunks": chunks, "suffix": rest[-1], "in_place_chunks": fresh}

    def _without_bos(self, piece: str) -> str:
        """The first piece of a prompt without the BOS that the tokenizer puts there too, and everything is encoded
        after."""
        tokenizer = self.get_tokenizer()
        bos = tokenizer.bos_token
        if bos is None or list(tokenizer.encode(""))[:1] != [tokenizer.bos_token_id]:
            return piece
        return piece.removeprefix(str(bos))

    def _is_worth_storing(self, piece: str, salt: bytes) -> bool:
        return len(piece) >= MIN_STORED_CHARACTERS and _digest(piece, salt) in self._seen

    def _remember(self, pieces: Iterable[str], salt: bytes) -> None:
        """Remember the pieces of a prompt: after a call, so that prompts of one batch are treated alike."""
        for piece in pieces:
            digest = _digest(piece, salt)
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)


def close_lmcache_engine() -> None:
    """Write what is still to be written, and let go of the stores of every `LLM` of this process.

    An `LLM` that is used afterwards computes what it needs.
    """
    for llm in list(_open):
        with llm.llm_engine.lock:
            store = llm.llm_engine.chunk_store
            if isinstance(store, TieredChunkStore):
                store.close()
            store.clear()
    _open.clear()


def _salt(prompt: PromptType) -> bytes:
    """Return what stands for a prompt's `cache_salt`; b"" for a bad one too, which the engine refuses."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return parse_salt(salt) if isinstance(salt, str) and salt else b""


def _digest(piece: str, salt: bytes) -> bytes:
    """Return by what a piece is remembered: a tenant must not learn that another one has sent it, too."""
    return hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16, key=salt).digest()
