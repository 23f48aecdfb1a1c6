"""Engine options: each is declared once, as a field of a group, with its type, default, help and check.

    max_model_len: int | None = option(None, "tokens of the longest request", check=positive)

A group is a dataclass that derives from `OptionGroup`: those of the core are in config.py, and each feature's is in its
folder. What users meet follows from the declarations: `EngineArgs`, the keywords of `LLM`, the flags with their
`--help`, and docs/options.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from vllm_blend.checks import check_field_types, type_hints

Check = Callable[[str, Any], None]
_KEY = "option"


@dataclass(frozen=True)
class Option:
    """One engine option, as its field declares it. `OptionGroup.options` gives it with its name and type."""

    name: str  # as in EngineArgs; a flag has dashes for underscores
    type: Any
    default: Any  # MISSING for an option that must be given
    help: str
    none_means_default: bool = False  # as for the options whose default in vLLM is None
    shown: bool = True  # False for values that may hold a password
    check: Check | None = None  # raises ValueError for a value, given the option's name; never called with None

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    def new_default(self) -> Any:
        """Return the default, in a copy that may be changed."""
        return copy(self.default)


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    name: str | None = None,
    check: Check | None = None,
    none_means_default: bool = False,
    shown: bool = True,
) -> Any:
    """Declare a field of a group as an option. Without a `name` users give it by the group's prefix and the field's
    name. A list as default is copied for every group that is made."""
    metadata = {_KEY: Option(name or "", Any, default, help, none_means_default, shown, check)}
    if isinstance(default, list):
        return field(default_factory=default.copy, repr=shown, metadata=metadata)
    return field(default=default, repr=shown, metadata=metadata)


@dataclass(frozen=True)
class OptionGroup:
    """Base of the dataclasses that declare options. Making one checks every value, by its type and by its own check."""

    title: ClassVar[str]  # the heading of the group in --help and in docs/options.md
    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self, f"{type(self).__name__}.")

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the options of the group."""
        hints, found = type_hints(cls), []
        for each in fields(cls):
            declared: Option | None = each.metadata.get(_KEY)
            if declared is not None:
                found.append(replace(declared, name=_flat_name(cls, each.name, declared), type=hints[each.name]))
        return tuple(found)

    @classmethod
    def groups(cls) -> tuple[type[OptionGroup], ...]:
        """Return the group and those that are the types of its fields, in the order of their first options."""
        found: list[type[OptionGroup]] = []
        for each in fields(cls):
            kind = type_hints(cls)[each.name]
            if _is_group(kind):
                found += kind.groups()
            elif _KEY in each.metadata and cls not in found:
                found.append(cls)
        return tuple(found) or (cls,)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Return the group with the values of its options and of the groups in it; `others` are its other fields.

        Raises ValueError naming the option and the fix.
        """
        arguments = dict(others)
        for each in fields(cls):
            declared, kind = each.metadata.get(_KEY), type_hints(cls)[each.name]
            if declared is not None:
                arguments[each.name] = values[_flat_name(cls, each.name, declared)]
            elif _is_group(kind):
                arguments[each.name] = kind.from_values(values)
        return cls(**arguments)


def check_options(group: OptionGroup, label: str = "") -> None:
    """Raise ValueError for the first value of a group that is not of its type, or that its own check refuses. `label`
    stands before the name of a field in messages about types."""
    check_field_types(group, label)
    for each in fields(group):
        declared, value = each.metadata.get(_KEY), getattr(group, each.name)
        if declared is not None and declared.check is not None and value is not None:
            declared.check(_flat_name(type(group), each.name, declared), value)


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, OptionGroup)


def _flat_name(group: type[OptionGroup], field_name: str, declared: Option) -> str:
    return declared.name or group.prefix + field_name
