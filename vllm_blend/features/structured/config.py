"""The options of structured outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from vllm_blend.checks import at_least, check_field_types, check_keys, positive
from vllm_blend.config import FeatureConfig
from vllm_blend.options import Option


@dataclass(frozen=True)
class StructuredOutputsConfig(FeatureConfig):
    """Answers of a given form. Requests ask for them (`SamplingParams.structured_outputs`), without any option here.

    The `disable_` settings are those of requests that have them off. `cache_size` compiled forms are kept. A form that
    is not compiled and tried within `compile_seconds` is refused. `backend` and `disable_fallback` are vLLM's: there is
    one library.

    Raises ValueError naming the option and the fix.
    """

    title: ClassVar[str] = "Structured outputs"
    works_across_ranks: ClassVar[bool] = True
    name: ClassVar[str] = "structured_outputs_config"
    extension: ClassVar[str | None] = "vllm_blend.features.structured.extension:make_structured_outputs"

    backend: Literal["auto", "guidance"] = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    cache_size: int = 64
    compile_seconds: float = 10.0

    def __post_init__(self) -> None:
        label = f"{self.name}: "
        check_field_types(self, label)
        at_least(1)(f"{label}cache_size", self.cache_size)
        positive(f"{label}compile_seconds", self.compile_seconds)

    @property
    def is_on(self) -> bool:
        """Return whether any setting was given. Requests may ask for a form in any case."""
        return self != type(self)()

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the one option, which has all of the fields, as in vLLM."""
        keys = ", ".join(each.name for each in fields(cls))
        text = f'settings of structured outputs, as JSON: {{"disable_any_whitespace": true}}; it may have {keys}'
        return (Option(name=cls.name, type=dict[str, Any] | None, default=None, help=text),)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], **others: Any) -> Self:
        given = values[cls.name] or {}
        check_keys(cls.name, given, [each.name for each in fields(cls)])
        return cls(**given)
