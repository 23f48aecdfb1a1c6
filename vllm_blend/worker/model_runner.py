"""One step on the device: split it into passes, run them, sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.core.step import ScheduledRequest, SchedulerOutput
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.layers.sampler import Sampler
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.ops.e4m3 import as_bytes
from vllm_blend.ops.host_copy import to_device
from vllm_blend.request import Request
from vllm_blend.worker.batch import NOTHING_DRAWN, Drawn
from vllm_blend.worker.block_pass import BlockPass
from vllm_blend.worker.passes import Pass
from vllm_blend.worker.runner_output import RunnerOutput


class ModelRunner:
    """Runs steps: a pass over blocks, the `others` over the requests that they accept, and one draw for all.

    Which tokens to run is decided elsewhere. Of several ranks, rank 0 draws for all; the others see the tokens at once
    if it `shares_draws`, as it must where a step is queued before the host has read the last one.
    """

    def __init__(
        self, block_pass: BlockPass, seed: int, others: Sequence[Pass] = (), shares_draws: bool = False
    ) -> None:
        self.block_pass, self.others = block_pass, others
        self.parts, self.model, self.cache = block_pass.parts, block_pass.model, block_pass.cache
        self.sampler = Sampler(seed)
        self._ranks, self._shares_draws = self.parts.heads.ranks, shares_draws
        self._drawn = NOTHING_DRAWN

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute the scheduled tokens. Nothing of a request is read or written but its own pages.

        On a GPU this queues the work and returns: a token that the step before has drawn is read where it lies.
        """
        if output.copies:
            self._copy_blocks(output.copies)
        result = self._execute(output.scheduled)
        if any(item.drafts for item in output.scheduled):
            # Which of the rows count is found out on the host, and the next step waits for that.
            self._drawn = NOTHING_DRAWN
        elif result.sampled:
            tokens = self._drawn_tokens(result)
            if tokens is not None:
                self._drawn = Drawn({request: row for row, request in enumerate(result.sampled)}, tokens)
        return result

    def _drawn_tokens(self, result: RunnerOutput) -> torch.Tensor | None:
        """Return the token of each request that has drawn, [rows] int64; None if this rank does not see them."""
        tokens = None if result.tokens is None else result.tokens.tokens
        if not self._shares_draws:
            return tokens
        own = torch.empty(len(result.sampled), dtype=torch.int64, device=self.parts.device)
        return self._ranks.broadcast(own if tokens is None else tokens)

    def _execute(self, items: Sequence[ScheduledRequest]) -> RunnerOutput:
        """Run the passes of a step one after another; all requests draw together."""
        result = RunnerOutput()
        logits: list[torch.Tensor] = []
        states: list[SamplingState] = []
        for one, accepted in self._split(items):
            output = one.run(accepted, self._drawn, result)
            if output is None:
                continue
            result.sampled += [item.request for item in output.items]
            if self._ranks.leads:
                logits.append(output.logits)
                states += _states(output.items, self._drawn)
        if logits:
            rows = logits[0] if len(logits) == 1 else torch.cat(logits)
            result.tokens = self.sampler.start(rows, states, self._drawn.token_ids)
        return result

    def _split(self, items: Sequence[ScheduledRequest]) -> list[tuple[Pass, Sequence[ScheduledRequest]]]:
        """Return the passes that a step needs, and the items of each."""
        rest, split = items, list[tuple[Pass, Sequence[ScheduledRequest]]]()
        for other in self.others:
            accepted: list[ScheduledRequest] = []
            left: list[ScheduledRequest] = []
            for item in rest:
                (accepted if other.accepts(item) else left).append(item)
            rest = left
            if accepted:
                split.append((other, accepted))
        return [(self.block_pass, rest), *split] if rest else split

    @torch.inference_mode()
    def prefill_chunk(self, request: Request, max_tokens: int) -> ChunkKV:
        """Compute the KV of the prompt of `request` from its `collect_from` on, at most `max_tokens` at a time, and
        sample nothing. Its block table must hold the prompt. Runs beside the scheduler's steps: between two of them, or
        behind one that is queued on a GPU."""
        request.collected.clear()
        while request.num_computed_tokens < request.num_prompt_tokens:
            count = min(max_tokens, request.num_prompt_tokens - request.num_computed_tokens)
            self._execute([ScheduledRequest(request, request.num_computed_tokens, count)])
            request.num_computed_tokens += count
        return ChunkKV.collected(request.collected_kv())

    def forget(self, requests: Sequence[Request]) -> None:
        """Keep nothing of requests that have finished."""
        for request in requests:
            self._drawn.rows.pop(request, None)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of all layers, (from, to) each: everything is read before anything is written."""
        sources, targets = to_device(torch.tensor(copies), self.parts.device).unbind(1)
        for pages in (as_bytes(self.cache.key), as_bytes(self.cache.value)):
            pages[:, targets] = pages[:, sources]


def _states(items: Sequence[ScheduledRequest], drawn: Drawn) -> list[SamplingState]:
    """Return the states of the rows that requests draw from: after the last token of each, and after each draft."""
    states = []
    for item in items:
        state = item.request.sampling
        assert state is not None
        state.unread_row = drawn.rows[item.request] if item.request.num_in_flight else -1
        states.append(state)
        if item.drafts:
            states += [state.after(item.drafts[: count + 1]) for count in range(len(item.drafts))]
    return states
