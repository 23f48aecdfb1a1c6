"""What generation_config.json says holds for folders and hub ids alike, as in vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoTokenizer

from tests.engine.engines import DEMO, engine, greedy, new_llm, run, tiny_model
from vllm_blend import ChunkedLLM, SamplingParams
from vllm_blend.config import ModelConfig
from vllm_blend.engine.generation_config import default_sampling_settings, load_generation_config

TINY = tiny_model("llama")
RECOMMENDED: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
}
SETTINGS = RECOMMENDED | {"max_tokens": 3}
REPOSITORY, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def model_with(folder: Path, **content: Any) -> str:
    shutil.copytree(TINY, folder)
    return str(write(folder, content))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of revision "v2" of a repository in the cache of the Hub, which cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(TINY, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(COMMIT)
    return snapshot


def test_a_hub_id_and_a_folder_end_and_sample_alike(hub: Path, tmp_path: Path) -> None:
    """A token that the generation config alone names ends the text; its settings are those of `generate`, `chat` and
    chunks without sampling_params."""
    with engine(TINY) as plain:
        tokens = run(plain, "The quick", greedy(8, ignore_eos=True))[0].outputs[0].token_ids
    ends = next(token for token in tokens if token > 2)
    content = RECOMMENDED | {"max_new_tokens": 3, "eos_token_id": [1, ends], "bos_token_id": 0, "do_sample": True}
    write(hub, content)
    folder = model_with(tmp_path / "model", **content)
    for model, arguments in ((folder, {}), (REPOSITORY, {"revision": "v2"})):
        llm = new_llm(model, **arguments)
        assert llm.llm_engine.eos_token_ids >= {1, ends}
        completion = run(llm, "The quick", greedy(8))[0].outputs[0]
        assert (completion.token_ids, completion.finish_reason) == (tokens[: tokens.index(ends) + 1], "stop")
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(**SETTINGS)
        params.max_tokens = 5  # the caller's own
        assert llm.get_default_sampling_params().max_tokens == 3
        template = "{{ messages[0]['content'] }}"
        conversation = [{"role": "user", "content": "over the lazy"}]
        [chatted] = llm.chat(conversation, use_tqdm=False, chat_template=template)
        [generated] = llm.generate("over the lazy", use_tqdm=False)
        assert 1 <= len(chatted.outputs[0].token_ids) <= 3 and 1 <= len(generated.outputs[0].token_ids) <= 3


def test_chunked_prompts_take_the_defaults(tmp_path: Path) -> None:
    chunked = ChunkedLLM(model_with(tmp_path / "model", max_new_tokens=2))
    output = chunked.generate_from_chunks(query="The quick brown fox")
    assert 1 <= len(output.outputs[0].token_ids) <= 2


@pytest.mark.parametrize(
    ("arguments", "settings", "eos"),
    [
        ({}, SETTINGS, 7),
        ({"generation_config": "vllm"}, {}, 7),
        (
            {"override_generation_config": {"top_k": 5, "max_new_tokens": 9}},
            SETTINGS | {"top_k": 5, "max_tokens": 9},
            7,
        ),
        ({"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}}, {"top_p": 0.5}, 7),
        ({"generation_config": "other"}, {"temperature": 0.1}, 8),
    ],
)
def test_where_settings_come_from(arguments: dict[str, Any], settings: Any, eos: int, tmp_path: Path) -> None:
    """End tokens are the model's with "vllm" too, and those of another folder where one is named."""
    model = model_with(tmp_path / "model", **RECOMMENDED, max_new_tokens=3, eos_token_id=7, temperature_note=None)
    write(tmp_path / "other", {"temperature": 0.1, "eos_token_id": 8})
    if arguments.get("generation_config") == "other":
        arguments = {"generation_config": str(tmp_path / "other")}
    config = ModelConfig(model, **arguments)
    generation = load_generation_config(config, AutoConfig.from_pretrained(model))
    assert generation["eos_token_id"] == eos
    assert default_sampling_settings(config, generation) == settings


def test_models_without_recommendations_keep_vllms_defaults(hub: Path) -> None:
    """A repository without the file, and the demo models, whose files name tokens alone: the one that is to be served
    ends its answers at a newline."""
    (hub / "generation_config.json").unlink(missing_ok=True)
    reuse = f"{DEMO}-reuse"
    for model, revision, eos in ((REPOSITORY, "v2", None), (DEMO, None, 1), (reuse, None, [1, 201])):
        config = ModelConfig(model, revision=revision)
        hf_config = AutoConfig.from_pretrained(model, revision=revision)
        generation = load_generation_config(config, hf_config)
        assert default_sampling_settings(config, generation) == {}
        assert generation.get("eos_token_id") == eos
    assert AutoTokenizer.from_pretrained(reuse).decode([201]) == "\n"


@pytest.mark.parametrize("known", [True, False])
def test_a_repository_that_cannot_be_asked_for_the_file(
    known: bool, hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Offline, only a cache that has noted the file's absence is believed; any other gives a warning, or an error."""
    (hub / "generation_config.json").unlink(missing_ok=True)
    if known:
        (hub.parents[1] / ".no_exist" / COMMIT).mkdir(parents=True)
        (hub.parents[1] / ".no_exist" / COMMIT / "generation_config.json").touch()
    hf_config = AutoConfig.from_pretrained(REPOSITORY, revision="v2")
    load_generation_config(ModelConfig(REPOSITORY, revision="v2"), hf_config)
    assert ("the Hub cannot be reached, and its cache has no generation_config.json" in caplog.text) is not known
    with pytest.raises(ValueError, match="generation_config='else/where': the Hub cannot be reached"):
        load_generation_config(ModelConfig(TINY, generation_config="else/where"), hf_config)


def test_an_error_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise HFValidationError("no access")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ValueError, match=r"the Hub does not give its generation_config.json \(no access\)"):
        load_generation_config(ModelConfig(TINY, generation_config="else/where"), AutoConfig.from_pretrained(TINY))


def test_only_recommendations_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for content, logged in (({"temperature": 0.6}, True), ({"eos_token_id": 1}, False)):
        caplog.clear()
        default_sampling_settings(ModelConfig(TINY), content)
        assert ("temperature" in caplog.text) is logged


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ('{"temperature": 0.6', {}, r"generation_config.json is not valid JSON"),
        ("[" * 100_000, {}, r"generation_config.json is not valid JSON"),
        ("[1]", {}, "must hold a JSON object, got list"),
        ({"temperature": "hot"}, {}, "does not fit sampling: temperature='hot' .* generation_config='vllm'"),
        ({"eos_token_id": "</s>"}, {}, "eos_token_id='</s>' of the model must be a token id"),
        ({}, {"generation_config": "/no/such/folder"}, "generation_config='/no/such/folder': .* does not exist"),
        ({}, {"generation_config": ""}, "generation_config is empty: use 'auto', 'vllm', or a folder"),
        ({}, {"override_generation_config": {"eos_token_id": 3}}, "override_generation_config=.*give a dict of repet"),
        ({}, {"override_generation_config": {"top_p": 7}}, "does not fit sampling: top_p=7"),
    ],
)
def test_bad_generation_configs(content: Any, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """An error before any weights are loaded."""
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    model = str(write(tmp_path / "model", content))
    with pytest.raises(ValueError, match=message):
        new_llm(model, **arguments)


def test_a_named_folder_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no generation_config\.json: name a folder"):
        new_llm(TINY, generation_config=str(tmp_path))
