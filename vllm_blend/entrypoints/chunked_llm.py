"""`ChunkedLLM`: prompts are compositions of registered chunks instead of strings.

Half of the file is signatures and docstrings: this is the public face of vllm_blend.chunks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, overload

import torch
from transformers import PreTrainedTokenizerBase

from vllm_blend.checks import a_type
from vllm_blend.chunks.chat_template import TemplateSplit, split_template
from vllm_blend.chunks.chunk import Chunk, ChunkInfo, ChunkType, Deletion, UnknownChunkError
from vllm_blend.chunks.composition import ChunkComposition, Mode, Part, Role
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine.lock import FairLock, exclusive
from vllm_blend.entrypoints.composition_preview import CompositionPreview, preview
from vllm_blend.entrypoints.llm import LLM
from vllm_blend.outputs import RequestOutput
from vllm_blend.prompt_keys import parse_salt
from vllm_blend.prompt_parser import parse_piece
from vllm_blend.prompt_pieces import encode_start, join_pieces, tokenize
from vllm_blend.sampling_params import SamplingParams

Content = str | Sequence[int]
Own = TypeVar("Own", bound="ChunkedLLM")


class ChunkedLLM:
    """A model whose prompts are made of chunks: a system prompt, context in any number and order, and a question.

    Registering a chunk computes its KV once, after the tokenizer's BOS token (or after a registered system prompt).
    Compositions then reuse it at any position. The ids of a composition are those of its whole text. Where a chunk's
    text has other tokens beside its neighbours than alone, as tokenizers join what no line break separates, it is
    computed and stored once more for that place; a token that reaches over its edge is always computed. Parts that are
    given as token ids stand as they are. Control tokens in context are text, unless the engine has `trusted_chunks`.

    Wherever an id is asked for, a name or the `Chunk` that `register_chunk` returned will do.

    Per call, `mode` says how: "blend" (the default) computes a share of the context's tokens again, as the engine's
    `blend_selector` and `blend_recompute_ratio` say; "reuse" computes the question alone; "exact" computes everything,
    token by token what `LLM.generate` gives for the same ids, and the exact prefix cache serves it.

    The pages of a blended context stay in the KV cache until their space is needed, and the next composition of the
    same chunks with the same settings computes its question alone: by default where the rule does not look at the
    question, as what it repairs for one question does little for another. `retain=True` does so with any rule,
    `retain=False` with none.

    With `use_chat_template` the chat template stands around the chunks: the system prompt is the system's message,
    context and question together are the user's.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        use_chat_template: bool = False,
        chat_template: str | None = None,
        **engine_args: Any,
    ) -> None:
        if engine_args.setdefault("enable_blending", True) is not True:
            raise ValueError("enable_blending=False, but chunks are reused by blending: leave it out")
        if "blend_encoding_context" in engine_args:
            raise ValueError(
                f"blend_encoding_context={engine_args['blend_encoding_context']!r} is for chunks that come with a "
                "prompt; registered ones are encoded after BOS, or `after` a system prompt: leave it out"
            )
        self.llm = LLM(model, tokenizer, **engine_args)
        self.use_chat_template, self.chat_template = use_chat_template or chat_template is not None, chat_template
        self._ids = itertools.count()
        self._split = cache(lambda with_system: split_template(self.get_tokenizer(), with_system, self.chat_template))
        if self.use_chat_template:
            self._split(False)  # a template that cannot be split is an error now, not with the first composition

    @property
    def llm_engine(self) -> LLMEngine:
        return self.llm.llm_engine

    @property
    def lock(self) -> FairLock:
        """Return the engine's lock (see `LLMEngine.lock`)."""
        return self.llm_engine.lock

    @property
    def device(self) -> torch.device:
        return self.llm_engine.device

    def shutdown(self) -> None:
        """Shut the engine down, as `LLM.shutdown` does."""
        self.llm.shutdown()

    def __repr__(self) -> str:
        return f"ChunkedLLM({len(self.llm_engine.chunk_registry)} chunks, {self.llm!r})"

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.llm.get_tokenizer()

    def register_chunk(
        self,
        content: Content,
        chunk_type: ChunkType | str = ChunkType.CONTEXT,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        after: str | Chunk | None = None,
        cache_salt: str | None = None,
    ) -> Chunk:
        """Register text or token ids, and compute its KV at once. Equal content is registered and computed once.

        `after`, the id or name of a system prompt, has a context chunk encoded after that one: its KV fits best to
        compositions that begin with it. A query is always computed with its composition and has no KV of its own.

        With a `cache_salt` the chunk is another one than without, or with another: its KV is computed and stored apart,
        and it stands only in compositions with the same `cache_salt`. Names and lists are this object's: they are no
        part of what a salt keeps apart.

        Raises ValueError for a chunk that is empty or too long, and RuntimeError with the numbers when there is no
        memory for it although everything unused has left.
        """
        kind = ChunkType.parse(chunk_type)
        engine, salt = self.llm_engine, parse_salt(cache_salt)
        with self.lock:
            is_literal = kind in (ChunkType.CONTEXT, ChunkType.OUTPUT) and not engine.config.model.trusted_chunks
            vocab_size = engine.hf_config.vocab_size
            ids = tuple(parse_piece(content, engine.tokenizer, "content", vocab_size, is_literal))
            context = self._context(kind, after, salt)
            if kind is ChunkType.SYSTEM_PROMPT and context and ids[: len(context)] == context:
                ids = ids[len(context) :]  # token ids that begin with BOS themselves
                content = ids
            text = content if isinstance(content, str) else None
            chunk = Chunk.from_tokens(engine.fingerprint, kind, ids, context, salt, text)
            return engine.register_chunk(chunk, name, metadata)

    def delete_chunk(self, id_or_name: str | Chunk) -> Deletion:
        """Delete a chunk and free its memory. While requests use it the deletion is deferred, and the result says so;
        the chunk cannot be used by new ones then."""
        return self.llm_engine.delete_chunk(id_or_name)

    def list_chunks(self, chunk_type: ChunkType | str | None = None) -> list[ChunkInfo]:
        """Return the registered chunks, of one type or all, in order of registration."""
        kind = None if chunk_type is None else ChunkType.parse(chunk_type)
        with self.lock:
            infos = self.llm_engine.chunk_registry.infos()
        return [info for info in infos if kind in (None, info.chunk.chunk_type)]

    def get_chunk(self, id_or_name: str | Chunk) -> ChunkInfo:
        with self.lock:
            return self.llm_engine.chunk_registry.info(id_or_name)

    def pin_chunk(self, id_or_name: str | Chunk) -> None:
        """Keep a chunk's KV in memory, even if others need the space, until `unpin_chunk`. One that has been evicted is
        computed again when it is used, and kept from then on."""
        with self.lock:
            self.llm_engine.chunk_registry.pin(id_or_name)

    def unpin_chunk(self, id_or_name: str | Chunk) -> None:
        with self.lock:
            self.llm_engine.chunk_registry.unpin(id_or_name)

    @exclusive
    def compose(
        self,
        system_chunk_id: str | Chunk | None = None,
        context_chunk_ids: Sequence[str | Chunk] = (),
        query_chunk_id: str | Chunk | None = None,
        query: Content | None = None,
        mode: Mode = "blend",
        selector: str | None = None,
        recompute_ratio: float | None = None,
        retain: bool | None = None,
        cache_salt: str | None = None,
    ) -> ChunkComposition:
        """Return the composition of registered chunks, by id or name, and a question: a query chunk, text or token ids.

        Raises ValueError naming a chunk that is unknown, deleted or of the wrong type, or was registered with another
        `cache_salt`.
        """
        if isinstance(context_chunk_ids, str | Chunk) or not isinstance(context_chunk_ids, Sequence):
            raise TypeError(f"context_chunk_ids is {a_type(context_chunk_ids)}: give a list of ids or names")
        if (query is None) == (query_chunk_id is None):
            raise ValueError("give the question either as query or as query_chunk_id")
        if query_chunk_id is not None:
            if isinstance(query_chunk_id, str) and query_chunk_id not in self.llm_engine.chunk_registry:
                raise UnknownChunkError(
                    f"query_chunk_id: no chunk is {query_chunk_id!r}: give a question's text as query"
                )
            question = self._part(query_chunk_id, "query_chunk_id", "query", ChunkType.QUERY)
        else:
            assert query is not None
            engine = self.llm_engine
            ids = parse_piece(query, engine.tokenizer, "query", engine.hf_config.vocab_size)
            question = Part(tuple(ids), "query")
        system = []
        if system_chunk_id is not None:
            system = [self._part(system_chunk_id, "system_chunk_id", "system", ChunkType.SYSTEM_PROMPT)]
        contexts = [
            self._part(chunk_id, f"context_chunk_ids[{index}]", "context", ChunkType.CONTEXT, ChunkType.OUTPUT)
            for index, chunk_id in enumerate(context_chunk_ids)
        ]
        if not question.token_ids:
            raise ValueError("the query is empty: its last token is what the answer follows")
        split = self._split_texts(bool(system))
        given: list[tuple[Part, Content]] = [
            (Part((), "template"), split.head),
            *((part, _content(part)) for part in system),
            (Part((), "template"), split.middle),
            *((part, _content(part)) for part in contexts),
            (question, query if isinstance(query, str) else _content(question)),
            (Part((), "template"), split.tail),
        ]
        return ChunkComposition(
            self._join(given),
            mode,
            selector,
            recompute_ratio,
            retain,
            parse_salt(cache_salt),
        )

    @exclusive
    def preview_composition(self, *args: Any, **kwargs: Any) -> CompositionPreview:
        """Return what `generate_from_chunks` would run with these arguments: ids, positions, what is reused, whether it
        fits. Runs nothing."""
        template = self.chat_template if self.use_chat_template else None
        return preview(self.llm_engine, self.compose(*args, **_of_compose(kwargs)), self.use_chat_template, template)

    @overload
    def generate_from_chunks(
        self,
        system_chunk_id: str | Chunk | None = ...,
        context_chunk_ids: Sequence[str | Chunk] = ...,
        query_chunk_id: str | Chunk | None = ...,
        sampling_params: SamplingParams | None = ...,
        stream: Literal[False] = ...,
        *,
        query: Content | None = ...,
        **options: Any,
    ) -> RequestOutput: ...

    @overload
    def generate_from_chunks(
        self,
        system_chunk_id: str | Chunk | None = ...,
        context_chunk_ids: Sequence[str | Chunk] = ...,
        query_chunk_id: str | Chunk | None = ...,
        sampling_params: SamplingParams | None = ...,
        *,
        stream: Literal[True],
        query: Content | None = ...,
        **options: Any,
    ) -> Iterator[RequestOutput]: ...

    def generate_from_chunks(
        self,
        system_chunk_id: str | Chunk | None = None,
        context_chunk_ids: Sequence[str | Chunk] = (),
        query_chunk_id: str | Chunk | None = None,
        sampling_params: SamplingParams | None = None,
        stream: bool = False,
        *,
        query: Content | None = None,
        **options: Any,
    ) -> RequestOutput | Iterator[RequestOutput]:
        """Answer a composition; the question is `query_chunk_id`, or `query`: text or token ids. The `options` are
        those of `compose`.

        With `stream`, an iterator with one output a token, each with everything so far; closing it early aborts the
        request. Other calls may be made meanwhile.
        """
        arrival_time = time.time()
        with self.lock:  # no other thread deletes a chunk in between
            composition = self.compose(
                system_chunk_id, context_chunk_ids, query_chunk_id, query, **_of_compose(options)
            )
            outputs = self._start(composition, sampling_params, not stream, arrival_time)
        return outputs if stream else _last(outputs)

    def batch_generate_from_chunks(
        self,
        compositions: Sequence[ChunkComposition | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer several compositions in one batch, in their order; each is one of `compose`, or its arguments.

        Raises ValueError for the first bad one before anything runs.
        """
        if isinstance(compositions, ChunkComposition | Mapping):
            raise TypeError(f"compositions is {a_type(compositions)}: give a list of them")
        arrival_time = time.time()
        running: list[Iterator[RequestOutput]] = []
        try:
            with self.lock:  # no other thread deletes a chunk in between
                made = [c if isinstance(c, ChunkComposition) else self.compose(**_of_compose(c)) for c in compositions]
                each = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(made)
                if len(each) != len(made):
                    raise ValueError(
                        f"{len(each)} sampling_params for {len(made)} compositions: give one for all, or one each"
                    )
                for composition, params in zip(made, each, strict=True):
                    running.append(self._start(composition, params, True, arrival_time))
            return [_last(outputs) for outputs in running]
        except BaseException:
            running.clear()  # aborts what was started, even if a caller keeps the error and with it this frame
            raise

    def generate_and_retain_output(
        self,
        system_chunk_id: str | Chunk | None = None,
        context_chunk_ids: Sequence[str | Chunk] = (),
        query_chunk_id: str | Chunk | None = None,
        sampling_params: SamplingParams | None = None,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        query: Content | None = None,
        **options: Any,
    ) -> tuple[RequestOutput, Chunk]:
        """Answer a composition, and register the answer as a chunk of type OUTPUT for later ones. Its KV is computed as
        every chunk's is, from its tokens alone: that of the request saw everything before it. Tokens that end a text
        are left out. Raises RuntimeError if the request fails or is aborted: what there is of the answer is no chunk.
        """
        arrival_time = time.time()
        with self.lock:
            composition = self.compose(
                system_chunk_id, context_chunk_ids, query_chunk_id, query, **_of_compose(options)
            )
            outputs = self._start(composition, sampling_params, True, arrival_time)
        output = _last(outputs)
        if output.outputs[0].finish_reason in ("error", "abort"):
            raise RuntimeError(f"the answer is not retained: {output.error or 'the request was aborted'}")
        ids = [token for token in output.outputs[0].token_ids if token not in self.llm_engine.eos_token_ids]
        if not ids:
            raise ValueError("the answer is empty: there is nothing to retain")
        salt = options.get("cache_salt")
        return output, self.register_chunk(ids, ChunkType.OUTPUT, name, metadata, cache_salt=salt)

    def _start(
        self, composition: ChunkComposition, params: SamplingParams | None, final_only: bool, arrival_time: float
    ) -> Iterator[RequestOutput]:
        params = self.llm.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is {a_type(params)}: give SamplingParams")
        request_id = f"composition-{next(self._ids)}"
        return self.llm_engine.generate_from_chunks(composition, params, request_id, final_only, arrival_time)

    def _part(self, id_or_name: str | Chunk, field: str, role: Role, *types: ChunkType) -> Part:
        chunk = self.llm_engine.chunk_registry.get(id_or_name)
        if chunk.chunk_type not in types:
            wanted = " or ".join(kind.name for kind in types)
            raise ValueError(f"{field}: chunk {id_or_name!r} is of type {chunk.chunk_type.name}, not {wanted}")
        return Part(chunk.token_ids, role, chunk)

    def _context(self, kind: ChunkType, after: str | Chunk | None, salt: bytes) -> tuple[int, ...]:
        """Return what stands before a chunk when its KV is computed."""
        if after is not None:
            system = self._part(after, "after", "system", ChunkType.SYSTEM_PROMPT).chunk
            if kind not in (ChunkType.CONTEXT, ChunkType.OUTPUT):
                raise ValueError(f"after={after!r} is for context, but this chunk is of type {kind.name}")
            assert system is not None
            if system.salt != salt:
                raise ValueError(f"after={after!r} was registered with another cache_salt: register it with this one")
            return system.context_token_ids + system.token_ids
        if kind is ChunkType.QUERY:
            return ()
        if kind is ChunkType.SYSTEM_PROMPT:
            return self._bos_and(self._split_texts(True).head)
        return self._bos_and("")

    def _bos_and(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that begins a prompt. A chat template writes BOS itself."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            return ()
        return tuple(tokenize(tokenizer, text).ids if self.use_chat_template else encode_start(tokenizer, text))

    def _split_texts(self, with_system: bool) -> TemplateSplit:
        """Return what the template puts before the system prompt, after it, and at the end."""
        return self._split(with_system) if self.use_chat_template else TemplateSplit("", "", "")

    def _join(self, given: Sequence[tuple[Part, Content]]) -> tuple[Part, ...]:
        """Return parts with the tokens that their contents have in the whole, and what lies between them."""
        engine = self.llm_engine
        tokenizer, trusts = engine.tokenizer, engine.config.model.trusted_chunks
        literal = [part.role == "context" and not trusts for part, _ in given]
        contents = [content if isinstance(content, str) else list(content) for _, content in given]
        joined = join_pieces(tokenizer, contents, literal, adds_bos=not self.use_chat_template)
        ids, position, parts = joined.token_ids, 0, []
        for (part, _), (start, stop) in zip(given, joined.bounds, strict=True):
            if position < start:  # a token of two parts
                parts.append(Part(tuple(ids[position:start]), part.role))
            own, chunk = tuple(ids[start:stop]), part.chunk
            is_alike = chunk is None or not own or chunk.token_ids == own
            placed = None if is_alike or chunk is None else chunk.with_tokens(engine.fingerprint, own)
            if own:
                parts.append(Part(own, part.role, chunk, placed))
            position = stop
        if position < len(ids):
            parts.append(Part(tuple(ids[position:]), "query"))
        return tuple(parts)


def _content(part: Part) -> Content:
    """Return what a part is made of: the text of its chunk, or token ids."""
    return part.token_ids if part.chunk is None or part.chunk.text is None else part.chunk.text


def _last(outputs: Iterator[RequestOutput]) -> RequestOutput:
    *_, last = outputs
    return last


def _of_compose(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a call. Raises TypeError for those that hold for all calls."""
    for name in ("use_chat_template", "chat_template"):
        if name in options:
            raise TypeError(f"{name} holds for all prompts: give it to the constructor, ChunkedLLM(model, {name}=...)")
    return options
