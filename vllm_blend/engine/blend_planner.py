"""The plan of a blended prompt, from the prompt's options, the engine's settings and the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_blend.blend.controller import LoadingController
from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.relevance.passages import PromptPassages
from vllm_blend.blend.relevance.words import PassageWords, WordIndex
from vllm_blend.blend.selectors import Selector, make_selector
from vllm_blend.checks import check_ratio
from vllm_blend.config import BlendConfig
from vllm_blend.inputs import ParsedPrompt, reorder_chunks
from vllm_blend.kv_store.keys import ChunkId, context_id
from vllm_blend.kv_store.tiers import DISK, MEMORY


def check_settings(config: BlendConfig, num_layers: int) -> None:
    """Raise ValueError for a rule that does not exist and, where prompts are blended, for settings that exclude each
    other or name layers that the model does not have."""
    selector = make_selector(config.selector)
    if config.enable_blending:
        ratios = (config.recompute_ratio, config.check_layers, config.recompute_ratios)
        make_plan((), (0,), 0, selector, *ratios, num_layers)


@dataclass(frozen=True)
class BlendPlanner:
    """Plans blends, by settings that `check_settings` has let pass. `rounds`: whether stored KV may come back with
    fewer bits than it was computed with."""

    config: BlendConfig
    num_layers: int
    bytes_per_token: int
    controller: LoadingController | None = None
    rounds: bool = False
    words: WordIndex = field(default_factory=lambda: WordIndex(None))

    def blends(self, parsed: ParsedPrompt) -> bool:
        """Return whether a prompt is blended. Without chunks, or with a context below `min_tokens`, it is not."""
        bounds = parsed.chunk_bounds
        return self.config.enable_blending and bool(bounds) and bounds[-1][1] >= self.config.min_tokens

    def arrange(self, parsed: ParsedPrompt) -> ParsedPrompt:
        """Return a prompt with its pages in the order of their relevance, if it allows that, is blended, and anything
        tells them apart.

        What stands first after the prefix is what it was encoded as, and so exact; what comes next can be made exact by
        computing it from its beginning on. Raises ValueError if the tokenizer cannot read its words.
        """
        if parsed.order != "free" or not self.blends(parsed):
            return parsed
        passages = self._passages(parsed, {})
        try:
            ranked = passages.ranked_pages()
        except Exception as error:  # a user's own tokenizer may raise anything
            raise ValueError(f"the prompt's passages cannot be ranked: the tokenizer raised {error!r}") from error
        if ranked is None:
            return parsed
        numbers = _passage_numbers(parsed)
        chosen = iter([numbers[index] for page in ranked for index in passages.pages[page]])
        order = [next(chosen) if index in numbers else index for index in range(len(parsed.chunk_bounds))]
        return replace(reorder_chunks(parsed, order), is_ranked=True)

    def plan_stored(
        self, parsed: ParsedPrompt, segments: Sequence[Segment], keys: Mapping[int, str], is_retained: bool = False
    ) -> BlendPlan:
        """Return the plan of a prompt whose stored pieces are `segments`. `keys` has the keys of its pieces by where
        they begin. `is_retained`: the pages of its context are kept for other questions."""
        plan = self._with_controlled_ratio(self.plan(parsed, segments), parsed)
        if plan.selector.chooses_passages:
            plan = plan.choose_passages(self._passages(parsed, keys), serves_others=is_retained)
        if self.rounds and plan.ratio >= 1:  # a prefix that stands where it was encoded is exact but for its bits
            plan = replace(plan, segments=tuple(replace(segment, exact=False) for segment in plan.segments))
        return plan

    def plan_after(self, segments: Sequence[Segment], token_ids: Sequence[int]) -> BlendPlan:
        """Return the plan that computes all of `token_ids` but exact segments at their beginning: how a chunk is
        encoded after its prefix and its company."""
        stop = segments[-1].start + segments[-1].kv.num_tokens
        selector = make_selector("none")
        return make_plan(segments, token_ids, stop, selector, None, self.config.check_layers, None, self.num_layers)

    def plan(self, parsed: ParsedPrompt, segments: Sequence[Segment] = ()) -> BlendPlan:
        """Return the plan that a prompt asks for, which reuses `segments`. Raises ValueError if that cannot be."""
        check_ratio("blend_recompute_ratio", parsed.blend_recompute_ratio)
        selector = self._selector(parsed)
        ratio, ratios = parsed.blend_recompute_ratio, None
        if ratio is None and parsed.blend_selector is None:  # the engine's ratios are meant for its own selector
            ratio, ratios = self.config.recompute_ratio, self.config.recompute_ratios
        return make_plan(
            segments,
            parsed.token_ids,
            parsed.chunk_bounds[-1][1],
            selector,
            ratio,
            self.config.check_layers,
            ratios,
            self.num_layers,
        )

    def read_ahead(self, chunks: Iterable[ChunkId], parsed: ParsedPrompt | None = None) -> None:
        """Read the words of chunks, so that prompts need not wait for that, if the rule of `parsed` (None: the
        engine's own) ranks passages by them. A prompt in a free order has been ranked already."""
        if (parsed is not None and parsed.order == "free") or not self._selector(parsed).chooses_passages:
            return
        try:
            for chunk in chunks:
                self.words.learn(chunk.key, chunk.token_ids)
        except Exception:  # of a user's own tokenizer: it raises again when a prompt is ranked, and fails only that
            return

    def _selector(self, parsed: ParsedPrompt | None) -> Selector:
        given = None if parsed is None else parsed.blend_selector
        return make_selector(self.config.selector if given is None else given)

    def _passages(self, parsed: ParsedPrompt, keys: Mapping[int, str]) -> PromptPassages:
        """Return the passages of a prompt. Their words are kept under the `keys` of its pieces by where they begin, and
        those of others by their content: both keep apart what salts do."""
        numbers = _passage_numbers(parsed)
        bounds = tuple(parsed.chunk_bounds[index] for index in numbers)
        index_of = {number: index for index, number in enumerate(numbers)}
        continues = [parsed.continues[number] for number in numbers] if parsed.continues else []

        def read_words() -> tuple[list[PassageWords], list[str]]:
            ids = parsed.token_ids
            question = parsed.question or (parsed.chunk_bounds[-1][1], len(ids))
            names = [keys.get(start) or context_id(ids[start:stop], parsed.salt) for start, stop in bounds]
            return self.words.prompt(ids, bounds, question, names)

        return PromptPassages(
            bounds,
            tuple(None if number is None else index_of.get(number) for number in continues),
            tuple(tuple(signal[number] for number in numbers) for signal in parsed.relevance),
            read_words,
            parsed.is_ranked,
        )

    def _with_controlled_ratio(self, plan: BlendPlan, parsed: ParsedPrompt) -> BlendPlan:
        """Return the plan with the ratio that the controller chooses, if the one it has is a floor."""
        fixed = plan.selector.fixed_ratio is not None or self.config.recompute_ratios is not None
        if self.controller is None or fixed or parsed.blend_recompute_ratio is not None:
            return plan
        loads = {MEMORY: 0, DISK: 0}
        for segment in plan.segments:
            arriving = segment.kv.arriving
            if arriving is not None:
                loads[DISK] += arriving.bytes_left
            else:
                loads[MEMORY] += segment.kv.num_tokens * self.bytes_per_token
        choice = self.controller.choose_ratio(plan.ratio, loads, plan.suffix_start)
        shares = plan.selector.shares(choice.ratio, self.config.check_layers)
        return replace(plan, ratio=choice.ratio, shares=tuple(shares)) if choice.ratio > plan.ratio else plan


def _passage_numbers(parsed: ParsedPrompt) -> Sequence[int]:
    """Return the numbers of the chunks of a prompt that are passages."""
    return range(len(parsed.chunk_bounds)) if parsed.passages is None else parsed.passages
