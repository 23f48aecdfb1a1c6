"""What the bodies of several endpoints share: strict fields, sampling settings, usage, errors."""

from __future__ import annotations

import difflib
import logging
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from vllm_blend.unsupported import Unsupported

logger = logging.getLogger(__name__)

MAX_STRINGS = 1024  # in `stop` and `bad_words`: each is looked for in every token
MAX_STRING_CHARACTERS = 1 << 14  # of all of them
MAX_UNKNOWN_FIELDS = 128  # of one request, by name: each is compared with the known ones, and logged
MAX_ENTRIES = 1024  # of objects whose entries are settings
_SLICE = 1 << 16
# Fields of other endpoints that are no loss where they are not known: they change no answer, or ask for effort.
_HARMLESS = frozenset(
    ("stream_options", "request_id", "include", "reasoning", "reasoning_effort", "thinking", "include_reasoning")
)
_MISSPELT = 0.88  # the similarity from which on an unknown field is taken for a misspelt one

_bodies: dict[str, type[RequestModel]] = {}  # of requests for answers, by endpoint

# The unknown fields of the request that is being read: (its object's model, its name). None outside of a server.
UNKNOWN_FIELDS: ContextVar[set[tuple[type, str]] | None] = ContextVar("unknown fields", default=None)


def _whole(value: Any) -> Any:
    """Take 16.0 for 16: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few_entries(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"there are {len(value)} entries: give at most {MAX_ENTRIES}")
    return validate(value)


def _short_together(strings: str | list[str]) -> str | list[str]:
    total = sum(map(len, strings))
    if total > MAX_STRING_CHARACTERS:
        raise ValueError(f"there are {total} characters: give at most {MAX_STRING_CHARACTERS}")
    return strings


def _all_numbers(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Take an object of numbers as it is. Of one that has others only the first of these is told."""
    if not isinstance(value, dict):
        return validate(value)
    wrong = next((item for item in value.items() if type(item[1]) not in (int, float)), None)
    return value if wrong is None else validate(dict([wrong]))


def _all_integers(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Take a list of integers as it is, without a look at each."""
    if type(value) is list and all(
        set(map(type, value[start : start + _SLICE])) == {int} for start in range(0, len(value), _SLICE)
    ):
        return value
    return validate(value)


Item = TypeVar("Item")
Whole = Annotated[int, BeforeValidator(_whole)]
ListOf = Annotated[list[Item], Field(fail_fast=True)]  # errors of all items would be longer than the body
FewStrings = Annotated[ListOf[str], Field(max_length=MAX_STRINGS), AfterValidator(_short_together)]
Strings = Annotated[str, AfterValidator(_short_together)] | FewStrings
WholeList = Annotated[ListOf[Whole], WrapValidator(_all_integers)]
Settings = Annotated[dict[str, Any], WrapValidator(_few_entries)]
Metadata = Annotated[dict[str, str], WrapValidator(_few_entries)]
Biases = Annotated[dict[str, float], WrapValidator(_all_numbers)]


class RequestModel(BaseModel):
    """A request's body, or an object in it. Types are those of JSON: no "5" for 5.

    As in vLLM, unknown fields are ignored with a warning; but one that is nearly the name of a known field is an error
    that says which, and so is one of another endpoint that asks for something there: the answer would be without it.
    `refused` has fields that other servers have and this one does not.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    endpoint: ClassVar[str | None] = None  # of a request for an answer
    refused: ClassVar[dict[str, Unsupported]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()  # known, and without any effect here

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "endpoint" in vars(cls) and cls.endpoint is not None:
            _bodies[cls.endpoint] = cls

    @model_validator(mode="after")
    def _check_other_fields(self) -> Self:
        extra = self.model_extra or {}
        if len(extra) > MAX_UNKNOWN_FIELDS:
            raise ValueError(f"there are {len(extra)} fields that are unknown: leave them out")
        known = UNKNOWN_FIELDS.get()
        seen = set[tuple[type, str]]() if known is None else known
        for name, value in extra.items():
            if name in self.refused:
                self.refused[name].check(name, value)
            elif name not in self.ignored and (type(self), name) not in seen:
                seen.add((type(self), name))
                if len(seen) > MAX_UNKNOWN_FIELDS:
                    raise ValueError(f"there are more than {MAX_UNKNOWN_FIELDS} unknown fields: leave them out")
                if self.endpoint is not None:
                    _refuse_misplaced(name, value, self.endpoint)
                _refuse_misspelt(name, type(self))
                logger.warning("the field %.100r of a request is unknown and ignored", name)
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _validate_once(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Take a body that has been validated already (see `strict_json`)."""
        return value if isinstance(value, cls) else validate(value)


def _refuse_misplaced(name: str, value: Any, endpoint: str) -> None:
    """Raise ValueError for a field of another endpoint, unless its value asks for nothing: null, 0, false, empty, or
    what 1 asks for in `n` and in a penalty."""
    if name in _HARMLESS or not value or (value == 1 and name in ("n", "repetition_penalty")):
        return
    homes = [path for path, model in _bodies.items() if name in model.model_fields]
    if homes:
        raise ValueError(
            f"{name} is a field of {' and '.join(homes)}, and {endpoint} does not have it: leave it out, or send the "
            "request there"
        )


def _refuse_misspelt(name: str, model: type[RequestModel]) -> None:
    known = {*model.model_fields, *model.refused, *model.ignored}
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_MISSPELT) if len(name) < 100 else []
    if close:
        raise ValueError(f"unknown field {name!r}: did you mean {plain[close[0]]!r}?")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


class StreamOptions(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset(("include_obfuscation",))

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(RequestModel):
    """`{"type": "text"}`, `{"type": "json_object"}`, `{"type": "json_schema", "json_schema": {"schema": ...}}`, or
    `{"type": "structural_tag", "structures": [...], "triggers": [...]}`."""

    type: str
    json_schema: dict[str, Any] | None = None
    structures: ListOf[dict[str, Any]] | None = None
    triggers: ListOf[str] | None = None


_NO_BEAMS = "use LLM.beam_search, offline"
_NO_TRUNCATION = "shorten the prompt before you send it"
REFUSED_ANYWHERE: dict[str, Unsupported] = {
    "best_of": Unsupported(None, "give n, and choose among the answers yourself", (1,)),
    "use_beam_search": Unsupported(False, _NO_BEAMS),
    "length_penalty": Unsupported(1.0, _NO_BEAMS),
    "truncate_prompt_tokens": Unsupported(None, _NO_TRUNCATION),
    "truncation_side": Unsupported(None, _NO_TRUNCATION, ("left", "right")),
    "kv_transfer_params": Unsupported(None, "KV is shared through the chunk store: see --chunk-store-url"),
    "mm_processor_kwargs": Unsupported(None, "the supported models take text only", ({},)),
    "prompt_embeds": Unsupported(None, "prompts are text or token ids"),
    "repetition_detection": Unsupported(None, "give repetition_penalty, or max_tokens"),
    "thinking_token_budget": Unsupported(None, "give max_tokens"),
    "logits_processors": Unsupported(None, "functions cannot be sent: use them offline, in SamplingParams", ([],)),
    "guided_json": Unsupported(None, "give structured_outputs={'json': ...}, as in vLLM from 0.12 on"),
    "guided_regex": Unsupported(None, "give structured_outputs={'regex': ...}, as in vLLM from 0.12 on"),
    "guided_choice": Unsupported(None, "give structured_outputs={'choice': ...}, as in vLLM from 0.12 on"),
    "guided_grammar": Unsupported(None, "give structured_outputs={'grammar': ...}, as in vLLM from 0.12 on"),
}
IGNORED_ANYWHERE = frozenset(
    (
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prompt_cache_breakpoint",
        "allowed_openai_params",
    )
)


class SamplingFields(RequestModel):
    """Sampling settings, with vLLM's names; None for the model's default. `SamplingParams` explains and checks them."""

    model: str | None = Field(None, description="name of the model; may be left out, as there is one")
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: Strings | None = None
    stop_token_ids: WholeList | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: WholeList | None = None
    bad_words: FewStrings | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Whole | None = None
    target_compression_rate: float | None = None
    max_cache_tokens: Whole | None = None
    structured_outputs: Settings | None = Field(None, description="json, regex, choice, grammar, ...")
    response_format: ResponseFormat | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Whole | None = None
    request_id: str | None = Field(None, max_length=128, pattern="^[A-Za-z0-9_.:/+=@-]+$")  # it is logged
    cache_salt: str | None = None
    vllm_xargs: Settings | None = Field(None, description='settings of this engine, e.g. {"blend": {...}}')
    blend: Settings | None = Field(None, description="mode, ratio, selector, relevance, continues, order")

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: give stream=true too, or leave it out")
        return self

    @property
    def reports_usage(self) -> bool:
        """Return whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def reports_usage_always(self) -> bool:
        """Return whether every chunk of a stream has the usage so far."""
        return self.reports_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ResponseModel(BaseModel):
    """A response's body, or an object in it. Fields that are not set are left out."""

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(ResponseModel):
    """Where the KV of a prompt's tokens came from (see `passages.usage`). Counts are numbers, never null."""

    cached_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    stored_tokens: int
    tiers: dict[str, int]


class UsageInfo(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ErrorInfo(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorInfo
