"""The features that `features/__init__.py` lists, and which of them exclude each other."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from vllm_blend.engine_args import OPTION_GROUPS, OPTIONS
from vllm_blend.features import EXCLUSIONS, FEATURES, check_exclusions
from vllm_blend.features.cascade.config import CascadeConfig
from vllm_blend.features.kv_compress.config import KVCompressConfig
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.features.offload.config import OffloadConfig
from vllm_blend.features.spec_decode.config import SpeculativeConfig
from vllm_blend.features.structured.config import StructuredOutputsConfig

ON = [
    SpeculativeConfig("ngram"),
    OffloadConfig("exact"),
    KVCompressConfig(True),
    CascadeConfig(True),
    StructuredOutputsConfig(cache_size=1),
    KVEventsConfig(enable_kv_cache_events=True),
]


def test_a_feature_is_off_by_default_and_names_parts_that_exist() -> None:
    for kind in FEATURES:
        assert not kind().is_on
        assert kind.name in OPTIONS
        for named in (kind.extension, kind.worker_extension):
            assert named is None or callable(resolve_name(named))
    assert sum(len(group.options()) for group in OPTION_GROUPS) == len(OPTIONS)  # no name is declared twice
    assert len({group.title for group in OPTION_GROUPS}) == len(OPTION_GROUPS)


def test_features_that_exclude_each_other_are_refused_and_no_others() -> None:
    assert {type(config) for config in ON} == set(FEATURES) and all(config.is_on for config in ON)
    excluded = {frozenset(pair[:2]) for pair in EXCLUSIONS}
    for one in ON:
        for other in ON:
            off = [kind() for kind in FEATURES]
            if {type(one), type(other)} in excluded:
                with pytest.raises(ValueError, match=r"exclude each other, as pages .*: leave one of them out"):
                    check_exclusions([one, other, *off])
            elif one is not other:
                check_exclusions([one, other])
    check_exclusions([kind() for kind in FEATURES])
