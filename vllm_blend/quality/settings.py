"""What a sweep compares: settings, and the runs that they make. The settings themselves are in `catalogue.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_blend.blend.selectors import make_selector
from vllm_blend.checks import check_ratio
from vllm_blend.engine_args import EngineArgs
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.quality.session import Session

Arrange = Callable[[Sample, ChunkedPrompt], ChunkedPrompt]
# Returns positions of the prompt as the arrangement left it ([n] int64), those first that are to be computed first.
Rank = Callable[[Session, Sample, ChunkedPrompt], torch.Tensor]
# Returns the passages that a prompt keeps, ascending, of the arrangement's and at a ratio.
Keep = Callable[[Session, Sample, ChunkedPrompt, float], Sequence[int]]
RunKey = tuple[str, str, Arrange | None, Rank | None, str, float, Keep | None]


@dataclass(frozen=True)
class Setting:
    """A way to blend. `engine` has arguments of `EngineArgs` beyond the defaults, and `prompt` has keys of a
    `ChunkedPrompt` beside its pieces; `arrange` sets what depends on the sample (an order of chunks, their pages). The
    setting is run at those of the sweep's ratios that are in `ratios` (None: all).

    An oracle has a `rank`, which knows the answer and names the very tokens that are computed, as far as the ratio's
    budget goes, and perhaps `levers` on that choice ("+mean_shift"), and a `damping` of passages of which it computes
    nothing.

    A setting with a `keep` blends nothing: its prompt loses the passages that are not kept, and what is left is
    computed in full."""

    name: str
    prompt: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    arrange: Arrange | None = None
    paper: str = ""
    ratios: tuple[float, ...] | None = None
    rank: Rank | None = None
    levers: str = ""
    damping: float = 1.0
    keep: Keep | None = None


@dataclass(frozen=True)
class Run:
    """A setting at a ratio."""

    setting: Setting
    ratio: float

    @property
    def engine(self) -> dict[str, Any]:
        """Return the engine's arguments. If everything or nothing is recomputed, no layer is checked."""
        chooses = 0 < self.ratio < 1
        return {name: v for name, v in self.setting.engine.items() if chooses or name != "blend_check_layers"}

    @property
    def prompt(self) -> dict[str, Any]:
        """Return the prompt's keys. At ratio 0 every selector is plain reuse, and at 1 every selector recomputes
        everything."""
        keys = dict(self.setting.prompt)
        if self.ratio in (0, 1):
            return keys | {"blend_selector": "none" if self.ratio == 0 else "full"}
        return keys | {"blend_recompute_ratio": self.ratio}

    @property
    def group(self) -> str:
        """Return a string that is equal for runs that one engine can do."""
        return json.dumps(self.engine, sort_keys=True)

    @property
    def key(self) -> RunKey:
        """Return a key that is equal for runs that compute the same: they are measured once."""
        asked = self.group, json.dumps(self.prompt, sort_keys=True), self.setting.arrange
        return *asked, self.rank, self.levers, self.damping, self.keep

    @property
    def rank(self) -> Rank | None:
        """Return the setting's rank, if there is anything to choose."""
        return self.setting.rank if 0 < self.ratio < 1 else None

    @property
    def levers(self) -> str:
        """Return the levers on what `rank` names."""
        return self.setting.levers if self.rank is not None else ""

    @property
    def damping(self) -> float:
        """Return the damping of passages of which `rank` names nothing."""
        return self.setting.damping if self.rank is not None else 1.0

    @property
    def keep(self) -> Keep | None:
        """Return the setting's choice of passages, if there is anything to choose."""
        return self.setting.keep if 0 < self.ratio < 1 else None


PLAIN_REUSE = Setting("plain reuse", paper="every chunk as it was encoded", ratios=(0.0,))
RECOMPUTE_ALL = Setting("recompute all", paper="every token, through the blend's own path", ratios=(1.0,))


def find_settings(names: Sequence[str] | None, settings: Sequence[Setting]) -> list[Setting]:
    """Return those of `settings` with these names (None: all), in their order. Raises ValueError that lists the known
    ones."""
    known = [setting.name for setting in settings]
    for name in known if names is None else names:
        if known.count(name) != 1:
            what = "is unknown" if name not in known else "is the name of several settings"
            raise ValueError(f"the setting {name!r} {what}: there are {', '.join(known)}")
    return [setting for setting in settings if names is None or setting.name in names]


def resolve_settings(names: Sequence[str], settings: Sequence[Setting]) -> list[Setting]:
    """Return a setting for each name, at any ratio: the one of `settings`, or else a `blend_selector` of that text.
    "NAME@RATIO,RATIO" is run at these ratios alone. Raises ValueError that says what is wrong."""
    found: list[Setting] = []
    for text in names:
        name, at, ratios = text.partition("@")
        listed = name in [setting.name for setting in settings]
        if not listed:
            try:
                make_selector(name)
            except ValueError as error:
                known = ", ".join(setting.name for setting in settings)
                raise ValueError(
                    f"the setting {name!r} is unknown: there are {known}; nor is it a rule: {error}"
                ) from error
        setting = find_settings([name], settings)[0] if listed else Setting(name, {"blend_selector": name})
        if name in [other.name for other in found]:
            raise ValueError(f"the setting {name!r} is given twice: give all of its ratios at once, NAME@RATIO,RATIO")
        found.append(replace(setting, ratios=_parse_ratios(text, ratios) if at else None))
    return found


def _parse_ratios(text: str, ratios: str) -> tuple[float, ...]:
    try:
        found = tuple(float(ratio) for ratio in ratios.split(","))
    except ValueError:
        raise ValueError(f"the setting {text!r} must end with shares from 0 to 1, such as @0.08,0.15") from None
    for ratio in found:
        check_ratio(f"the setting {text!r}: a ratio", ratio)
    return found


def make_runs(settings: Sequence[Setting], ratios: Sequence[float]) -> list[Run]:
    """Return every setting at every ratio it is run at, after plain reuse (and `RECOMPUTE_ALL`, if 1 is a ratio), which
    need the default engine. Raises ValueError for invalid settings and ratios, before anything is computed."""
    for ratio in ratios:
        check_ratio("a ratio", ratio)
    if list(ratios) != sorted(set(ratios)):
        raise ValueError(f"the ratios {list(ratios)} must be in rising order, each given once")
    if 0 not in ratios:
        raise ValueError("the ratios must include 0: the report compares with plain reuse")
    runs = []
    for setting in (PLAIN_REUSE, RECOMPUTE_ALL, *settings):
        _check(setting)
        runs += [Run(setting, ratio) for ratio in ratios if setting.ratios is None or ratio in setting.ratios]
    return runs


def _check(setting: Setting) -> None:
    try:
        EngineArgs(model="model", enable_blending=True, **setting.engine).create_engine_config()
        if "blend_selector" in setting.prompt:
            make_selector(setting.prompt["blend_selector"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"the setting {setting.name!r} is invalid: {error}") from error
