"""Train a byte-level BPE on synthetic worlds: the demo model's tokenizer, with another vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vllm_blend.finetune.worlds import RowShape, draw_episode
from vllm_blend.pipeline.prompts import PROMPT_STYLES, render_passage

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
WORLDS = 3000


def world_texts(seed: int, worlds: int) -> Iterator[str]:
    """Yield the pieces of prompts, each as a text of its own."""
    rng = Random(seed)
    for _ in range(worlds):
        episode = draw_episode(rng, RowShape())
        yield episode.instruction
        for passage in episode.passages:
            yield render_passage(passage.title, passage.text)
        for question in episode.questions:
            yield PROMPT_STYLES["samsum" if question.kind == "sum" else "musique"].suffix(question.text)
            yield f" {question.answer}\n"


def train_tokenizer(vocabulary: int, seed: int, positions: int, worlds: int = WORLDS) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocabulary` tokens that puts BOS before a text. Raises ValueError if the worlds have not
    as many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(world_texts(seed, worlds), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"--vocabulary {vocabulary}: the worlds give {tokenizer.get_vocab_size()} tokens")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
