"""What stages 2 and 3 read: chunk names, the order of the retrieval, and mistakes in its output."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, get_args

import pytest

from vllm_blend.pipeline.ask import BY_NAME
from vllm_blend.pipeline.config import RetrievalConfig, add_dataset_flags, dataset_settings
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.prompts import PROMPT_STYLES, reworded
from vllm_blend.pipeline.retrieval import run_retrieval
from vllm_blend.pipeline.stage_inputs import page_predecessors, read_stage_input


def sample(*texts: str, **extra: Any) -> dict[str, Any]:
    ctxs = [{"title": "", "text": text} for text in texts]
    return {"ctxs": ctxs, "question": "Where do owls live?", "answers": ["woods"], **extra}


def config(folder: Path, **changes: Any) -> RetrievalConfig:
    base: dict[str, Any] = {"dataset_path": str(folder / "musique_x.json"), "output_dir": str(folder / "out")}
    return RetrievalConfig(**(base | {"dataset_name": "musique_x", "top_k": 2} | changes))


def test_the_order_is_the_retrievals(tmp_path: Path) -> None:
    write_json(tmp_path / "musique_x.json", [sample("mice eat", "owls live in woods", "owls"), sample("a", "b")])
    run_retrieval(config(tmp_path))
    stage = read_stage_input(config(tmp_path), "", 0)
    first, second = stage.samples
    assert stage.source == tmp_path / "out/musique_x_rag_both_k2.json" and stage.asking.style.name == "musique"
    assert [chunk.chunk_id for chunk in first.chunks] == [f"musique_x-sample0_chunk{i}" for i in range(3)]
    assert [chunk.position for chunk in first.best(9)] == [(0, 1), (0, 2)]
    assert first.chunks[1].text == "owls live in woods\n\n"
    assert len(second.best(1)) == 1
    assert len(read_stage_input(config(tmp_path), "", 1).samples) == 1


def test_without_a_retrieval_the_data_sets_order_counts_and_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json(tmp_path / "musique_x.json", [sample("a", "b", "c", id="musique_x-7")])
    with caplog.at_level(logging.WARNING):
        stage = read_stage_input(config(tmp_path), "", 0)
    assert "run the retrieval stage first" in caplog.text
    assert stage.samples[0].retrieved is None
    # An id that begins with the data set's name needs no more of it.
    assert [chunk.chunk_id for chunk in stage.samples[0].best(2)] == ["musique_x-7_chunk0", "musique_x-7_chunk1"]


def test_a_search_of_all_passages_refers_to_the_chunks_of_other_samples(tmp_path: Path) -> None:
    write_json(tmp_path / "musique_x.json", [sample("mice eat", "salt"), sample("owls live in woods", "salt")])
    run_retrieval(config(tmp_path, scope="corpus", top_k=1))
    stage = read_stage_input(config(tmp_path, scope="corpus", top_k=1), "", 0)
    assert [chunk.chunk_id for chunk in stage.samples[0].best(1)] == ["musique_x-sample1_chunk0"]


def test_a_passage_that_both_have_is_the_samples_own(tmp_path: Path) -> None:
    hit = {"title": "", "text": "salt"}
    write_json(tmp_path / "r.json", [sample("salt", retrieved=[hit]), sample("mice", "salt", retrieved=[hit, hit])])
    samples = read_stage_input(config(tmp_path), str(tmp_path / "r.json"), 0).samples
    assert [chunk.position for s in samples for chunk in s.best(5)] == [(0, 0), (1, 1)]


def test_scores_travel_with_the_retrieved_passages(tmp_path: Path) -> None:
    """A passage that was found twice has its first score, one that was not found has none."""
    hits = [{"title": "", "text": text, "score": score} for text, score in (("owls", 2), ("mice", -0.5), ("owls", 1))]
    bare = [{"title": "", "text": "owls"}]
    write_json(
        tmp_path / "r.json",
        [sample("mice", "salt", "owls", retrieved=hits), sample("owls", retrieved=bare), sample("salt", retrieved=[])],
    )
    found, without, nothing = read_stage_input(config(tmp_path), str(tmp_path / "r.json"), 0).samples
    assert found.relevance(found.chunks) == [-0.5, None, 2.0]
    assert found.relevance(found.best(9)) == [2.0, -0.5]
    assert found.relevance(found.chunks[1:2]) is None
    assert without.relevance(without.chunks) is None and nothing.relevance(nothing.chunks) is None


def test_a_passage_knows_what_precedes_it_on_its_page(tmp_path: Path) -> None:
    texts = {"one": "a", "two": "b", "three": "a", "four": None, "five": "a", "six": None}
    ctxs = [{"title": "", "text": text} | ({} if page is None else {"page_id": page}) for text, page in texts.items()]
    write_json(tmp_path / "musique_x.json", [sample() | {"ctxs": ctxs}])
    [chunks] = [each.chunks for each in read_stage_input(config(tmp_path), "", 0).samples]
    assert [chunk.text_before for chunk in chunks] == ["", "", "one\n\n", "", "one\n\nthree\n\n", ""]
    assert page_predecessors(chunks) == [None, None, 0, None, 2, None]
    assert page_predecessors([chunks[index] for index in (3, 0, 4, 2)]) == [None, None, 1, 1]


@pytest.mark.parametrize(
    ("retrieved", "message"),
    [
        (
            [{"title": "", "text": "salt", "score": "high"}],
            "sample 1: retrieved has the score 'high', which is no fini",
        ),
        ([{"title": "", "text": "salt", "score": float("nan")}], "sample 1: retrieved has the score nan"),
        ("salt", "sample 1: retrieved must be a list"),
        ([{"text": "salt"}], r"sample 1: retrieved\[0\] must have a title and a text"),
        ([3], r"sample 1: retrieved\[0\] must have a title and a text"),
        ([{"title": "", "text": "pepper"}], r"sample 1: retrieved\[0\] is not a passage of these samples"),
    ],
)
def test_mistakes_name_the_sample_and_the_field(
    tmp_path: Path, retrieved: str | list[dict[str, Any]] | list[int], message: str
) -> None:
    write_json(tmp_path / "r.json", [sample("salt"), sample("salt", retrieved=retrieved)])
    with pytest.raises(ValueError, match=message):
        read_stage_input(config(tmp_path), str(tmp_path / "r.json"), 0)


def test_a_file_that_was_named_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        read_stage_input(config(tmp_path), str(tmp_path / "nowhere.json"), 0)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", "a\0b"])
def test_a_name_in_a_retrievals_output_leads_to_no_other_folder(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "r.json", {"config": {"dataset_name": name}, "results": [sample("salt")]})
    with pytest.raises(ValueError, match=r"r\.json: config.dataset_name .* becomes a part of file names"):
        read_stage_input(config(tmp_path), str(tmp_path / "r.json"), 0)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "[1,", "\ud800"])
def test_a_file_that_no_parser_takes_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"r\.json is not valid JSON"):
        read_stage_input(config(tmp_path), str(tmp_path / "r.json"), 0)


def test_a_data_set_brings_its_name_and_flags_its_wording() -> None:
    parser = ArgumentParser()
    add_dataset_flags(parser)
    args = parser.parse_args(["--dataset", "inputs/wikimqa_s.json", "--instruction", "Read."])
    assert dataset_settings({"top_k": 3, "template": "{question}"}, args) == {
        "top_k": 3,
        "template": "{question}",
        "dataset_path": "inputs/wikimqa_s.json",
        "dataset_name": "wikimqa_s",
        "instruction": "Read.",
    }
    assert dataset_settings({"dataset_name": "x"}, parser.parse_args([])) == {"dataset_name": "x"}


OWN = {"dataset_style": "musique", "instruction": "Read this.", "template": "\\nQ: {question} {x}\\nA:"}


def test_a_data_set_of_any_name_is_asked_in_words_of_its_own(tmp_path: Path) -> None:
    own = {"dataset_name": "mine", "dataset_path": str(write_json(tmp_path / "mine.json", [sample("a")]))}
    with pytest.raises(ValueError, match=r"cannot tell how to ask data set 'mine'.*--dataset-style or DATASET_STYLE"):
        read_stage_input(config(tmp_path, **own), "", 0)
    style = read_stage_input(config(tmp_path, **own, **OWN), "", 0).asking.style
    assert style.instruction == "Read this.\n" and style.suffix(" Why? ") == "\nQ: Why? {x}\nA:"
    assert style.metric == "f1" and style.max_tokens == 24
    plain = read_stage_input(config(tmp_path, **own, dataset_style="samsum"), "", 0).asking.style
    assert plain == PROMPT_STYLES["samsum"]
    lines = read_stage_input(
        config(tmp_path, **own, dataset_style="samsum", instruction="One.\\n\\n"), "", 0
    ).asking.style
    assert lines.instruction == "One.\n\n"


def test_later_stages_ask_as_the_first_was_told_unless_told_otherwise(tmp_path: Path) -> None:
    own = {"dataset_name": "mine", "dataset_path": str(write_json(tmp_path / "mine.json", [sample("a")]))}
    run_retrieval(config(tmp_path, **own, **OWN))
    style = read_stage_input(config(tmp_path, **own), "", 0).asking.style
    assert style == reworded(PROMPT_STYLES["musique"], OWN["instruction"], OWN["template"])
    other = read_stage_input(config(tmp_path, **own, dataset_style="wikimqa", instruction="Look."), "", 0).asking.style
    assert (other.name, other.instruction) == ("wikimqa", "Look.\n") and other.template == style.template


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dataset_style": "squad"}, "dataset_style='squad' is unknown: use one of"),
        ({"template": "Answer:"}, r"template='Answer:' must hold {question} once.*holds it 0 times"),
        ({"template": "{question}{question}"}, "holds it 2 times"),
        ({"instruction": 3}, "instruction=3 must be "),
    ],
)
def test_a_wrong_wording_is_named_in_flags_and_in_the_retrievals_output(
    tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **setting)
    output = {"config": {"dataset_name": "musique_x", **setting}, "results": [sample("a")]}
    path = write_json(tmp_path / "r.json", output)
    with pytest.raises(ValueError, match=rf"r\.json: config\..*{message}.*run the retrieval stage again"):
        read_stage_input(config(tmp_path), str(path), 0)


def test_the_styles_that_flags_know_are_those_that_exist() -> None:
    [option] = [option for option in RetrievalConfig.options() if option.name == "dataset_style"]
    assert set(get_args(option.type)) == {"", BY_NAME, *PROMPT_STYLES}
