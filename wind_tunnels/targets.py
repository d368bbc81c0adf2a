"""What a training aims at: exact answers to its targets, the least possible loss, a model's distance to them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from llmgeom.answers import corrupt_predictive, query_logits
from llmgeom.errors import UserError
from llmgeom.stats.information import bits
from llmgeom.task import Task, seeded

FLOOR_SEQUENCES = 2048  # sequences whose mean exact entropy is the floor of the loss
JUDGED_SEQUENCES = 1024  # held-out sequences that choose a learning rate; as many others judge a finished model


def exact_answers(task: Task, inputs: Tensor, corrupt: float = 0.0) -> Tensor:
    """The exact answers at the trained queries, in the form of `Task.log_predictive`; of corrupted targets if asked."""
    exact = task.log_predictive(inputs)[:, : task.trained_queries]
    return corrupt_predictive(exact, corrupt) if corrupt else exact


def answer_sheet(task: Task, seed: int, device: str) -> Tensor:
    """[query outcome] log-probabilities in nats: the exact answers to one sequence, drawn from the seed alone."""
    return exact_answers(task, task.draw_split(1, seeded("sheet", seed, device)).inputs)[0]


def with_loss(task: Task, inputs: Tensor, hold_out: str) -> Bool[Tensor, "sequence query"]:
    """The queries that training has a loss on: those within the horizon, less those in held-out states.

    Raises:
        UserError: States are held out, and the task does not say what they are.
    """
    if hold_out != "states":
        return torch.ones(len(inputs), task.trained_queries, dtype=torch.bool, device=inputs.device)
    return ~task.held_out_states(inputs)[:, : task.trained_queries]


def entropy_floor(task: Task, corrupt: float, seed: int, hold_out: str = "hypotheses") -> float:
    """The mean exact entropy of a query with a loss, in bits: the expected loss of a model that answers exactly.

    It does not hold for the targets of an answer sheet, which have their own entropy.

    Raises:
        UserError: The entropy is not finite.
    """
    sequences = task.draw_split(FLOOR_SEQUENCES, seeded("floor", seed), task.training_split, training=True)
    exact = exact_answers(task, sequences.inputs, corrupt)
    entropy = bits(task.answers.entropy(task.answers.exact(exact)))
    floor = float(entropy[with_loss(task, sequences.inputs, hold_out)].mean())
    if not math.isfinite(floor):
        raise UserError(f"{task.title}: the entropy of its exact answers is {floor}; give it less extreme values")
    return floor


@torch.no_grad()
def kl_to_exact(model: nn.Module, task: Task, corrupt: float, seed: int, purpose: str = "tune") -> float:
    """Mean KL(exact || model) in bits a trained query, on sequences of the task's test split."""
    device = next(model.parameters()).device
    inputs = task.draw_split(JUDGED_SEQUENCES, seeded(purpose, seed, device), task.test_split).inputs
    query = torch.tensor(task.query, device=device)[: task.trained_queries]
    prediction = task.answers.read(query_logits(model, inputs, query))
    exact = task.answers.exact(exact_answers(task, inputs, corrupt))
    return float(bits(task.answers.kl(exact, prediction.double())).mean())
