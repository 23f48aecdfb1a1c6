"""The training loop: what it computes does not depend on how it is split up, in a step or over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.engine.engines import tiny_model
from vllm_blend.finetune import attention, evaluation, losses, masks
from vllm_blend.finetune.evaluation import Development
from vllm_blend.finetune.loop import Surroundings, TrainingProgress, _optimizer, compile_layers, train
from vllm_blend.finetune.losses import Taught, weighted_loss
from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.rows import RowBatch, RowPool, RowPools, Rows, make_row, pad_rows, row_batch
from vllm_blend.finetune.state import TrainingState, load_state, save_state
from vllm_blend.finetune.teacher import FrozenModel

pytestmark = pytest.mark.cpu_only

LENGTH = 24
PLAN = TrainingPlan(batch_size=4, steps=6, learning_rate=0.01, warmup_steps=0, shares=None)


def rows(count: int) -> Rows:
    made = [
        make_row(
            "prefix", ["one " * (1 + i % 2), f"two {i}"], [("q", str(i))], lambda text: list(text.encode()), None, 24
        )
        for i in range(count)
    ]
    return pad_rows([row for row in made if row is not None], LENGTH, 0)


def batch_of(count: int) -> RowBatch:
    given = rows(count)
    return row_batch(*(torch.from_numpy(numbers) for numbers in (given.ids, given.weights, given.chunks)))


def new_model(architecture: str = "llama") -> Any:
    attention.register()
    directory = tiny_model(architecture)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention.NAME)


def trained(
    plan: TrainingPlan,
    model: Any = None,
    save: Callable[[TrainingState], None] = lambda state: None,
    resumed: TrainingState | None = None,
    distilled: bool = False,
) -> tuple[Any, list[TrainingProgress]]:
    """Train on the same four rows in every step."""
    model, lines = model or new_model(), list[TrainingProgress]()
    pools = RowPools([RowPool(4, LENGTH, torch.device("cpu"), 0)], [1.0], plan.batch_size, 0)
    teacher = FrozenModel(new_model()) if distilled else None
    train(model, pools, iter([rows(4)]), plan, Surroundings(lines.append, save), teacher, resumed)
    return model, lines


def assert_same_weights(first: Any, second: Any) -> None:
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


def test_without_shares_a_stock_model_is_trained() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    _, lines = trained(replace(PLAN, steps=10, log_steps=5), model)
    assert [line.step for line in lines] == [1, 5, 10] and lines[-1].loss < lines[0].loss
    assert set(lines[-1].accuracy) == {"full"} and lines[-1].ended == "the limit is reached"
    before, batch = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32), batch_of(4)
    with torch.no_grad():
        each = F.cross_entropy(before(batch.ids).logits[:, :-1].transpose(1, 2), batch.ids[:, 1:], reduction="none")
    weights = batch.weights[:, 1:]
    assert lines[0].loss == pytest.approx((each * weights).sum().item() / weights.sum().item(), rel=1e-4)


def test_the_learning_rate_is_the_plans() -> None:
    assert_same_weights(trained(replace(PLAN, steps=2, warmup_steps=10**9))[0], new_model())


def test_norms_do_not_decay() -> None:
    matrices, norms = _optimizer(
        list(new_model().parameters()), replace(PLAN, weight_decay=0.1), fused=False
    ).param_groups
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2} and {p.dim() for p in norms["params"]} == {1}


def test_the_first_batches_are_the_shortest() -> None:
    asked: list[bool] = []

    class Pools(RowPools):
        def draw(self, shortest: bool = False) -> RowBatch:
            asked.append(shortest)
            return super().draw(shortest)

    pools = Pools([RowPool(4, LENGTH, torch.device("cpu"), 0)], [1.0], 4, 0)
    train(new_model(), pools, iter([rows(4)]), replace(PLAN, steps=4, short_share=0.5), Surroundings(lambda line: None))
    assert asked == [True, True, False, False]


def test_training_ends_when_the_development_rows_are_right_in_full_and_isolated() -> None:
    lines, found = list[TrainingProgress](), iter(({"full": 1.0, "isolated": 0.8}, {"full": 0.9, "isolated": 0.95}))
    pools = RowPools([RowPool(4, LENGTH, torch.device("cpu"), 0)], [1.0], 4, 0)
    plan = replace(PLAN, target=0.9, evaluate_steps=1, log_steps=1)
    train(new_model(), pools, iter([rows(4)]), plan, Surroundings(lines.append, evaluate=lambda: next(found)))
    assert [line.step for line in lines] == [1, 2] and "the target is reached" in lines[-1].ended


def test_development_rows_are_asked_in_full_and_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained(replace(PLAN, steps=8))
    asked, batch = Development([rows(8)], [3], torch.device("cpu")), batch_of(8)  # four of them are new
    with torch.no_grad():
        right = (model(batch.ids).logits[:, :-1].argmax(-1) == batch.ids[:, 1:])[batch.answers[:, 1:]]
    assert 0 < right.float().mean() < 1 and asked.accuracy(model, None) == {"full": right.float().mean().item()}
    made: list[tuple[int, int | None]] = []

    def noted(chunks: torch.Tensor, kinds: torch.Tensor, *args: Any, **options: Any) -> Any:
        made.append((int(kinds[0]), options["sinks"]))
        return masks.make_reuse(chunks, kinds, *args, **options)

    monkeypatch.setattr(evaluation, "make_reuse", noted)
    assert set(asked.accuracy(model, masks.MaskShares(sinks=1))) == {"full", "isolated"}
    assert made == [(masks.FULL, 1)] * 3 + [(masks.ISOLATED, 1)] * 3  # eight rows, three at once


@pytest.mark.parametrize("change", [{"accumulate": 4}, {"checkpoint_activations": True}])
def test_saving_memory_changes_nothing(change: dict[str, Any]) -> None:
    plan = replace(PLAN, shares=TrainingPlan(steps=1).shares, distill=0.5)
    assert_same_weights(trained(plan, distilled=True)[0], trained(replace(plan, **change), distilled=True)[0])


def test_a_run_in_two_processes_is_the_run_in_one(tmp_path: Path) -> None:
    _, lines = trained(
        replace(PLAN, pause_minutes=1e-9, weight_decay=0.1), save=lambda state: save_state(state, tmp_path)
    )
    assert [line.step for line in lines] == [1] and lines[-1].ended == "paused"
    whole = replace(PLAN, weight_decay=0.1)
    state = load_state(tmp_path, whole)
    assert state.step == 1 and state.rows == 4
    second, lines = trained(whole, resumed=state)
    assert lines[-1].step == PLAN.steps
    paused: list[TrainingState] = []
    trained(replace(whole, pause_minutes=1e-9), save=paused.append, resumed=state)
    assert (paused[0].step, paused[0].rows) == (2, 8)  # what comes next are rows that no process has seen
    assert_same_weights(second, trained(whole)[0])
    with pytest.raises(ValueError, match=r"learning_rate was 0\.01 and is 0\.02"):
        load_state(tmp_path, replace(whole, learning_rate=0.02))
    with pytest.raises(ValueError, match="of another shape"):
        trained(whole, model=new_model("qwen3"), resumed=state)


def test_the_loss_is_cross_entropy_and_divergence_however_many_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(3)
    torch.manual_seed(0)
    head, other = torch.nn.Linear(8, 420, bias=False), torch.nn.Linear(8, 420, bias=False)
    hidden, seen = torch.randn(3, LENGTH, 8, requires_grad=True), torch.randn(3, LENGTH, 8)
    logits = head(hidden)[:, :-1]
    student, teacher = logits.log_softmax(-1), other(seen)[:, :-1].log_softmax(-1)
    next_token = -student.gather(2, batch.ids[:, 1:, None])[..., 0]
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    expected = ((next_token + 2.0 * divergence * batch.answers[:, 1:]) * batch.weights[:, 1:]).sum()
    expected.backward()
    wanted, hidden.grad = hidden.grad, None
    for at_once in (420 * 7, 2**27):  # tokens of a part: 7, all
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE", {False: at_once})
        outcome = weighted_loss(hidden, head, batch, Taught(seen, other, 2.0))
        outcome.loss.backward()
        assert wanted is not None and hidden.grad is not None
        assert torch.allclose(outcome.loss, expected) and torch.allclose(hidden.grad, wanted, atol=1e-5)
        assert torch.equal(outcome.right, logits.argmax(-1) == batch.ids[:, 1:])
        hidden.grad = None


def test_only_answers_count_as_right() -> None:
    answers, kinds = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 0]]).bool(), torch.tensor([0, 1, 1])
    right = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]]).bool()
    assert losses.accuracies(right, answers, kinds) == {"full": 0.5, "isolated": 0.5}
    assert losses.accuracies(right, answers, None) == {"full": 0.5}


def test_a_teacher_is_frozen() -> None:
    model = new_model().train()
    teacher = FrozenModel(model)
    assert not teacher.model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_the_teacher_computes_in_full_and_stays_as_it_is() -> None:
    """In full, a student that is its teacher has nothing to learn from it: the divergence adds no loss."""
    plan = replace(PLAN, steps=1, shares=replace(TrainingPlan(steps=1).shares or pytest.fail(), full=1.0, isolated=0.0))
    plain, taught = trained(plan)[1][0].loss, trained(replace(plan, distill=9.0), distilled=True)[1][0].loss
    assert abs(plain - taught) < 1e-4
    isolated = replace(plan, shares=replace(plan.shares or pytest.fail(), full=0.0, isolated=1.0))
    assert trained(replace(isolated, distill=9.0), distilled=True)[1][0].loss > trained(isolated)[1][0].loss + 0.01


def test_layers_share_a_compilation() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = new_model()
    for layer in model.model.layers:
        layer.compile = lambda layer=layer, **options: torch.nn.Module.compile(layer, backend="eager", **options)
    compile_layers(model)
    model.model(input_ids=torch.ones(1, 8, dtype=torch.int64), use_cache=False)
    assert len(model.model.layers) == 3 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_learning_rate_rises_stays_and_falls() -> None:
    plan = TrainingPlan(minutes=10, learning_rate=1.0, warmup_steps=4, decay_share=0.5)
    assert [plan.rate(step, 0.0) for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert [plan.rate(9, done) for done in (0.5, 0.75, 1.0)] == [1.0, 0.5, 0.02]
    assert plan.done(300.0, 7) == 0.5 and TrainingPlan(steps=10).done(1e9, 5) == 0.5
    assert TrainingPlan(steps=10, minutes=1).done(54.0, 5) == 0.9
