"""One step on the device: split it into passes and run them, then draw tokens for all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_blend.core.step import ScheduledRequest, SchedulerOutput
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.layers.sampler import Sampler
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.ops.e4m3 import as_bytes
from vllm_blend.ops.host_copy import to_device
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.batch import NOTHING_DRAWN, Drawn
from vllm_blend.worker.block_pass import BlockPass
from vllm_blend.worker.passes import Pass
from vllm_blend.worker.runner_output import RunnerOutput

ENDED = SamplingState(SamplingParams(temperature=0), (), [])  # of requests whose tokens count no more


class ModelRunner:
    """Runs steps: a pass over blocks, the `others` over the requests that they accept, and one draw for all.

    Which tokens to run is decided elsewhere. Of several ranks, rank 0 draws for all.
    """

    def __init__(self, block_pass: BlockPass, seed: int, others: Sequence[Pass] = ()) -> None:
        self.block_pass, self.others = block_pass, others
        self.parts, self.model, self.cache = block_pass.parts, block_pass.model, block_pass.cache
        self.sampler = Sampler(seed)
        self._ranks = self.parts.heads.ranks
        self._drawn = NOTHING_DRAWN

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute the scheduled tokens, and the logits for `draw`. Nothing of a request is read or written but its own
        pages.

        On a GPU this queues the work and returns: a token that the step before has drawn is read where it lies.
        """
        if output.copies:
            self._copy_blocks(output.copies)
        self._share_drawn(output.scheduled)
        result = self._execute(output.scheduled)
        if any(item.drafts for item in output.scheduled):
            # Which of the rows count is found out on the host, and the next step waits for that.
            self._drawn = NOTHING_DRAWN
        elif result.drawing:
            to_come = torch.empty(len(result.drawing), dtype=torch.int64, device=self.parts.device)
            self._drawn = Drawn({request: row for row, request in enumerate(result.sampled)}, to_come)
        return result

    @torch.inference_mode()
    def draw(self, result: RunnerOutput) -> None:
        """Begin to choose a token from each row of logits of the last step, which are let go. Do nothing if there are
        none, as on other ranks than 0, or no more.

        Settings that follow an answer look at the tokens that the host knows now. For a request that has ended since
        the step was queued, its functions and forms are not asked any more.
        """
        if result.logits is None:
            return
        result.tokens = self.sampler.start(result.logits, _states(result.drawing))
        result.logits = None
        if self._drawn is not NOTHING_DRAWN:
            self._drawn = replace(self._drawn, token_ids=result.tokens.tokens)

    def _share_drawn(self, items: Sequence[ScheduledRequest]) -> None:
        """Give the other ranks the tokens that the last step drew, if this one goes on from some that no rank's host
        has read."""
        if self._ranks.size > 1 and any(item.request.num_in_flight for item in items):
            self._drawn = replace(self._drawn, token_ids=self._ranks.broadcast(self._drawn.token_ids))

    def _execute(self, items: Sequence[ScheduledRequest]) -> RunnerOutput:
        """Run the passes of a step one after another."""
        result = RunnerOutput()
        logits: list[torch.Tensor] = []
        for one, accepted in self._split(items):
            output = one.run(accepted, self._drawn, result)
            if output is not None:
                result.drawing += output.items
                logits.append(output.logits)
        if logits and self._ranks.leads:
            result.logits = logits[0] if len(logits) == 1 else torch.cat(logits)
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


def _states(items: Sequence[ScheduledRequest]) -> list[SamplingState]:
    """Return the states of the rows that requests draw from: after the last token of each, and after each draft."""
    states = []
    for item in items:
        state = ENDED if item.request.finished else item.request.sampling
        assert state is not None
        states.append(state)
        if item.drafts:
            states += [state.after(item.drafts[: count + 1]) for count in range(len(item.drafts))]
    return states
