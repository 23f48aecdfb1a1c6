"""The engine as LMCache's users know it: LMCACHE_CONFIG_FILE configures it, and prompts in pieces are strings."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_blend.chunks.messages import parse_conversations
from vllm_blend.entrypoints.beam_search import BeamSearchOutput
from vllm_blend.entrypoints.llm import LLM as BlendLLM
from vllm_blend.entrypoints.llm import ChatMessages, as_batch
from vllm_blend.inputs import PromptType
from vllm_blend.lmcache.config import load_config
from vllm_blend.lmcache.prompts import BlendPrompt, split_prompt
from vllm_blend.outputs import RequestOutput
from vllm_blend.prompt_keys import parse_salt
from vllm_blend.prompt_pieces import TrustedText

MIN_STORED_CHARACTERS = 64  # shorter pieces are computed faster than they are stored and found
MAX_REMEMBERED = 1 << 16  # digests of pieces, 16 bytes each

_open: weakref.WeakSet[LLM] = weakref.WeakSet()


class LLM(BlendLLM):
    """The class `vllm_blend.LLM` with LMCache's configuration and prompts.

    A prompt made by `combine_input_prompt_chunks`, or a plain string with separators, is blended: stored pieces are
    reused wherever they stand, the others are computed where they stand, and the last piece is always computed. Control
    tokens are text in all pieces but the first and the last, which may hold a chat template's text. Every
    stored piece was encoded after BOS alone. `OfflineKVPreCompute` stores pieces; so does the second prompt that holds
    one.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **engine_args: Any) -> None:
        """Start the engine. Raises ValueError if the configuration is wrong, or contradicts the arguments."""
        self.lmcache_config = config = load_config()
        config.warn()
        try:
            super().__init__(model, tokenizer, **config.arguments(engine_args))
        except ValueError as error:
            raise ValueError(config.translate_error(str(error))) from error
        self._blends = self.llm_engine.config.blend.enable_blending
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # digests of the pieces of earlier prompts
        _open.add(self)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        *arguments: Any,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt, as the base class does. The `prompt` of an output is the string that was given."""
        batch = as_batch(prompts, prompt_token_ids)
        with self.llm_engine.lock:
            pieces = [self._pieces(prompt) for prompt in batch]
            composed = [
                prompt if each is None else self._compose(prompt, each)
                for prompt, each in zip(batch, pieces, strict=True)
            ]
        outputs = super().generate(composed, *arguments, **options)
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
        """Complete conversations, as the base class does, if their messages hold no separators: those are for
        `generate`, while in a chat every text part of a message is a piece.

        Raises ValueError if a text has several pieces.
        """
        separator = self.lmcache_config.separator
        texts = [text for each in parse_conversations(messages) for message in each for text in message.texts]
        if self._blends and any(len(split_prompt(text, separator)) > 1 for text in texts):
            raise ValueError(
                "a message has several pieces, which chat() cannot blend: give them as the text parts of the "
                "message's content, or write the template's text as the first and the last piece of "
                "combine_input_prompt_chunks, and use generate()"
            )
        return super().chat(messages, *arguments, **options)

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], *arguments: Any, **options: Any
    ) -> list[BeamSearchOutput]:
        """Search as the base class does, for prompts of one piece. Raises ValueError if a prompt has several."""
        for index, prompt in enumerate(as_batch(prompts, None)):
            if len(self._pieces(prompt) or ()) > 1:
                raise ValueError(
                    f"prompts[{index}] has several pieces, and a beam search cannot blend: join their text "
                    "without separators, or use generate()"
                )
        return super().beam_search(prompts, *arguments, **options)

    def expect(self, pieces: Iterable[str], cache_salt: str | None = None) -> None:
        """Store these pieces with the first prompt in which they have other tokens than they have stored, as behind a
        piece that ends in a space: they were stored on purpose, so they will come again."""
        with self.llm_engine.lock:
            self._remember(pieces, parse_salt(cache_salt))

    def shutdown(self) -> None:
        """Shut the engine down, as the base class does."""
        _open.discard(self)
        super().shutdown()

    def _pieces(self, prompt: PromptType) -> tuple[str, ...] | None:
        """Return the pieces of a prompt that may have some, and None for a prompt that is left as it is."""
        text: object = prompt
        if isinstance(prompt, dict) and not {"prompt_token_ids", "chunks"} & prompt.keys():
            text = prompt.get("prompt", "")
        if not isinstance(text, str) or not (self._blends or isinstance(text, BlendPrompt)):
            return None
        return split_prompt(text, self.lmcache_config.separator)

    def _compose(self, prompt: PromptType, pieces: Sequence[str]) -> Any:
        """Return the prompt for the base class: the pieces, and the prompt's other keys, which it checks. The token
        ids are those of the joined pieces, whether or not anything is blended."""
        others: dict[str, Any] = {}
        if isinstance(prompt, dict):
            others = {key: value for key, value in prompt.items() if key != "prompt"}
        if len(pieces) < 2:
            return {**others, "prompt": "".join(pieces)}
        first, *rest = pieces
        chunks = [piece for piece in (TrustedText(self._without_bos(first)), *rest[:-1]) if piece]
        salt = _salt(prompt)
        fresh = [index for index, chunk in enumerate(chunks) if not self._is_worth_storing(chunk, salt)]
        return {**others, "prefix": "", "chunks": chunks, "suffix": rest[-1], "in_place_chunks": fresh}

    def _without_bos(self, piece: str) -> str:
        """Return the first piece of a prompt without a BOS that the tokenizer adds too: everything is encoded after
        that one."""
        tokenizer = self.get_tokenizer()
        bos = tokenizer.bos_token
        if bos is None or list(tokenizer.encode(""))[:1] != [tokenizer.bos_token_id]:
            return piece
        return piece.removeprefix(str(bos))

    def _is_worth_storing(self, piece: str, salt: bytes) -> bool:
        return len(piece) >= MIN_STORED_CHARACTERS and _digest(piece, salt) in self._seen

    def _remember(self, pieces: Iterable[str], salt: bytes) -> None:
        """Remember the pieces of a prompt. This comes after the call, so that all prompts of a batch are treated
        alike."""
        for piece in pieces:
            digest = _digest(piece, salt)
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)


def close_lmcache_engine() -> None:
    """Write what is still to be written, and release the stores of every `LLM` of this process.

    An `LLM` that is used afterwards computes what it needs.
    """
    for llm in list(_open):
        with llm.llm_engine.lock:
            store = llm.llm_engine.chunk_store
            store.close()
            store.clear()
    _open.clear()


def _salt(prompt: PromptType) -> bytes:
    """Return the key that stands for a prompt's `cache_salt`, or b"" for none and for an invalid one, which the engine
    refuses."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return parse_salt(salt) if isinstance(salt, str) and salt else b""


def _digest(piece: str, salt: bytes) -> bytes:
    """Return the key under which a piece is remembered. The salt is part of it: a tenant must not learn what another
    has sent."""
    return hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16, key=salt).digest()
