"""What is learned is what is served: all chains at once agree with one draft after the other."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.export.checkpoints.source import Source
from outrider.tests.drafts import parallel_draft
from outrider.tests.runtime.references import HeadReference, ParallelReference, Reference
from outrider.tests.support import PAIR
from outrider.training.answers import Example
from outrider.training.eagle3 import Eagle3Objective, open_head
from outrider.training.objective import Objective, TrainingBatch, measure
from outrider.training.pard import PardObjective

K = 4
TEXT = "Customer: I am looking for a hotel in San Jose.\nAgent: How many rooms do you need?\nCustomer: I need 2 rooms."


@pytest.fixture(scope="module", params=["eagle3", "pard"])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Objective, Reference]:
    """The shipped head and a parallel draft, as they are trained and as eager transformers run them."""
    if request.param == "eagle3":
        target = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).requires_grad_(False).eval()
        return open_head(target, Source.parse(str(PAIR / "head")), torch.arange(0), K), HeadReference(PAIR / "head")
    folder = parallel_draft(tmp_path_factory.mktemp("pard") / "draft")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PardObjective(model, AutoTokenizer.from_pretrained(folder), K), ParallelReference(folder)


@torch.no_grad()
def test_agreement_is_that_of_drafts_one_by_one(learned: tuple[Objective, Reference]) -> None:
    objective, reference = learned
    ids = AutoTokenizer.from_pretrained(PAIR / "target")(TEXT).input_ids
    agrees = objective.agreement(TrainingBatch.of([Example(ids, [True] * len(ids))]))[0]
    accepted = 0
    for last in range(1, len(ids) - K - 1):
        proposed, follows = reference.proposes(tuple(ids[: last + 1]), K), ids[last + 1 : last + 1 + K]
        right = next((at for at, (a, b) in enumerate(zip(proposed, follows, strict=True)) if a != b), K)
        assert int(agrees[last].int().cumprod(0).sum()) == right
        accepted += right
    assert accepted > 5


def test_a_measurement_walks_through_the_answer(learned: tuple[Objective, Reference]) -> None:
    objective, _ = learned
    ids = AutoTokenizer.from_pretrained(PAIR / "target")(TEXT).input_ids
    stats = measure(objective, [Example(ids, [False] * 10 + [True] * (len(ids) - 10))], K)
    assert stats.emitted == len(ids) - 10
    assert stats.accepted > 0
    assert stats.unexamined >= 0
    assert 0 < stats.rejected <= stats.drafting_rounds


def test_the_loss_falls_and_only_the_draft_learns(learned: tuple[Objective, Reference]) -> None:
    objective, _ = learned
    ids = AutoTokenizer.from_pretrained(PAIR / "target")(TEXT).input_ids
    batch = TrainingBatch.of(
        [Example(ids, [False] * 10 + [True] * (len(ids) - 10)), Example(ids[:30], [False] * 5 + [True] * 25)]
    )
    trained = [each for each in objective.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in trained]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for _ in range(8):
        loss = objective(**batch._asdict())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        for each, old in zip(trained, before, strict=True):
            each.copy_(old)


def test_a_head_learns_the_targets_distribution_of_the_token_that_it_proposes() -> None:
    """In its first step, the chain at a row has read the next token, and proposes the one behind that."""
    target = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).requires_grad_(False).eval()
    objective = open_head(target, Source.parse(str(PAIR / "head")), torch.arange(0), 1)
    assert isinstance(objective, Eagle3Objective)
    ids = AutoTokenizer.from_pretrained(PAIR / "target")(TEXT).input_ids
    batch = TrainingBatch.of(
        [Example(ids, [False] * 10 + [True] * (len(ids) - 10)), Example(ids[:30], [False] * 5 + [True] * 25)]
    )
    with torch.no_grad():
        goal = target(input_ids=batch.ids).logits[:, 1:-1, objective.kept].softmax(-1)
        features, _ = objective.read(batch.ids)
        (normed,) = objective.unrolled(features, batch.ids)
        losses = torch.nn.functional.cross_entropy(objective.output(normed)[:, :-1].mT, goal.mT, reduction="none")
        want = losses[batch.drafted[:, 2:]].mean()
        torch.testing.assert_close(objective(**batch._asdict())["loss"], want)
