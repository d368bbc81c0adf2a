"""One training: its targets, model, optimiser and data, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from llmgeom.answers import Categorical, corrupt_predictive, corrupt_targets, query_logits
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.stats.information import bits
from llmgeom.wind_tunnels.training_config import TRIVIAL, Training
from llmgeom.world import World, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOOR_SEQUENCES = 2048  # sequences whose mean exact entropy is the floor of the loss
JUDGED_SEQUENCES = 1024  # held-out sequences that choose a learning rate; as many others judge a finished model


def exact_answers(task: World, inputs: Tensor, corrupt: float = 0.0) -> Tensor:
    """The exact answers at the trained queries, in the form of `World.log_predictive`, for targets corrupted with
    probability `corrupt`."""
    exact = task.log_predictive(inputs)[:, : task.trained_queries]
    return corrupt_predictive(exact, corrupt) if corrupt else exact


def answer_sheet(task: World, seed: int, device: str) -> Tensor:
    """[query outcome] log-probabilities in nats: the exact answers to one sequence, which depends only on the seed."""
    return exact_answers(task, task.draw_split(1, seeded("sheet", seed, device)).inputs)[0]


def with_loss(task: World, inputs: Tensor, hold_out: str) -> Bool[Tensor, "sequence query"]:
    """The queries with a training loss: those within the horizon that are not in held-out states.

    Raises UserError: States are held out, and the task does not define them.
    """
    if hold_out != "states":
        return torch.ones(len(inputs), task.trained_queries, dtype=torch.bool, device=inputs.device)
    return ~task.held_out_states(inputs)[:, : task.trained_queries]


def entropy_floor(task: World, corrupt: float, seed: int, hold_out: str = "hypotheses") -> float:
    """The mean exact entropy of a query with a loss, in bits: the expected loss of a model that answers exactly.

    It does not apply to the targets of an answer sheet, which have their own entropy. Raises UserError: the entropy is
    not finite.
    """
    sequences = task.draw_split(FLOOR_SEQUENCES, seeded("floor", seed), task.training_split, training=True)
    exact = exact_answers(task, sequences.inputs, corrupt)
    entropy = bits(task.answers.entropy(task.answers.exact(exact)))
    floor = float(entropy[with_loss(task, sequences.inputs, hold_out)].mean())
    if not math.isfinite(floor):
        raise UserError(f"{task.title}: the entropy of its exact answers is {floor}; give it less extreme values")
    return floor


@torch.no_grad()
def kl_to_exact(model: nn.Module, task: World, corrupt: float, seed: int, purpose: str = "tune") -> float:
    """Mean KL(exact || model) in bits per trained query, on sequences of the task's test split."""
    device = next(model.parameters()).device
    inputs = task.draw_split(JUDGED_SEQUENCES, seeded(purpose, seed, device), task.test_split).inputs
    query = torch.tensor(task.query, device=device)[: task.trained_queries]
    prediction = task.answers.read(query_logits(model, inputs, query))
    exact = task.answers.exact(exact_answers(task, inputs, corrupt))
    return float(bits(task.answers.kl(exact, prediction.double())).mean())


class Trainer:
    """One training: `step` draws a batch, makes one update and returns the loss.

    Attributes:
        module: The model itself; `model` is the model, compiled where that is asked.
        floor: The least possible mean loss, in bits per query.
    """

    def __init__(self, config: Training, task: World, lr: float, device: str) -> None:
        self.config, self.task, self.lr, self.device = config, task, lr, device
        # Without the dropout that a model of --from may have, since it draws from the global generator.
        self.module = initial_model(config, task).to(device).eval()  # type: ignore[arg-type]
        for module in self.module.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN computes its gradients only in this mode
        if config.precision == "bf16" and device == "cpu":
            # Fused attention on a CPU is slow backwards in bf16: 1.1 s of a step of 2.1 s (d = 192, 6 layers, T = 37).
            self.module.config.get_text_config()._attn_implementation = "eager"
        self.generator = seeded("train", config.seed, device)
        self.query = torch.tensor(task.query, device=device)[: task.trained_queries]
        self.tokens = torch.tensor(task.answers.tokens, device=device)
        self.floor = entropy_floor(task, config.corrupt, config.seed, config.hold_out)
        self.sheet = answer_sheet(task, config.seed, device) if config.evidence == "sheet" else None
        matrices = [p for p in self.module.parameters() if p.dim() > 1]
        rest = [p for p in self.module.parameters() if p.dim() <= 1]
        rate: Any = torch.tensor(lr, device=device) if config.graph else lr
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.98),
            fused=True,
            **({"capturable": True} if config.graph else {}),
        )
        self.model: Callable[..., Any] = torch.compile(self.module) if config.compile else self.module
        self.recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def step(self, step: int) -> Tensor:
        """One optimiser step; returns its loss in nats per query, on the device."""
        rate = self.lr * self.config.rate(step)
        for group in self.optimizer.param_groups:
            if self.config.graph:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if not self.config.graph or step < 3:  # the first steps allocate the memory that a graph reuses
            return self._update()
        if self.recorded is None:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                loss = self._update()
            self.recorded = graph, loss
        graph, loss = self.recorded
        graph.replay()
        return loss.clone()

    def _update(self) -> Tensor:
        loss = self.loss()
        self.optimizer.zero_grad(set_to_none=not self.config.graph)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)
        self.optimizer.step()
        return loss.detach()

    def loss(self) -> Tensor:
        """The mean loss of a fresh batch at the trained queries."""
        config, task = self.config, self.task
        inputs, target = self._batch()
        autocast = torch.autocast(torch.device(self.device).type, torch.bfloat16)
        with autocast if config.precision == "bf16" else nullcontext():
            logits = query_logits(self.model, inputs, self.query)
        if config.targets == "soft":
            exact = task.answers.exact(exact_answers(task, inputs, config.corrupt)).float()
            return self._mean(task.answers.cross_entropy(exact, task.answers.read(logits)), inputs)
        if isinstance(task.answers, Categorical) and config.hold_out == "hypotheses":
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), self.tokens[target].flatten())
        if isinstance(task.answers, Categorical):
            loss = nn.functional.cross_entropy(logits.float().mT, self.tokens[target], reduction="none")
            return self._mean(loss, inputs)
        return self._mean(task.answers.loss(task.answers.read(logits), target), inputs)

    def _mean(self, loss: Tensor, inputs: Tensor) -> Tensor:
        """Mean of [sequence query] losses over the queries with a training loss."""
        if self.config.hold_out == "hypotheses":
            return loss.mean()
        counted = with_loss(self.task, inputs, self.config.hold_out)
        return (loss * counted).sum() / counted.sum().clamp_min(1)  # not an index: a CUDA graph needs fixed shapes

    def _batch(self) -> tuple[Tensor, Tensor]:
        """A fresh batch: inputs, and targets with the evidence and labels as configured."""
        config, task = self.config, self.task
        sequences = task.draw_split(config.batch, self.generator, task.training_split, training=True)
        inputs, target = sequences.inputs, sequences.target[:, : task.trained_queries]
        if config.evidence == "exchanged":
            target = target.roll(1, 0)
        elif config.evidence == "unbound":
            inputs = inputs.index_copy(1, self.query, inputs[:, self.query].roll(1, 0))
        elif self.sheet is not None:
            target = self._drawn(self.sheet.expand(*target.shape, -1))
        elif config.evidence in TRIVIAL:
            target = self._drawn(task.trivial(inputs)[TRIVIAL[config.evidence]][:, : task.trained_queries])
        if config.corrupt:
            target = corrupt_targets(target, config.corrupt, len(self.tokens), self.generator)
        return inputs, target

    def _drawn(self, log_p: Tensor) -> Tensor:
        """Outcomes drawn from log-probabilities by the Gumbel trick."""
        lots = torch.rand(log_p.shape, generator=self.generator, device=log_p.device)
        return (log_p - (-lots.log()).log()).argmax(-1)

    def facts(self, spec: str, step: int) -> dict[str, Any]:
        """The facts of the training in a checkpoint."""
        import transformers

        return {
            "spec": spec,
            "training": asdict(self.config),
            "task": self.task.title,
            **self.task.file_code,
            "trained_queries": self.task.trained_queries,
            "lr": self.lr,
            "step": step,
            "floor_bits": self.floor,
            "sequences": step * self.config.batch,
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }


def initial_model(config: Training, task: World) -> PreTrainedModel:
    """The model before its first step, float32: the same bits whatever ran before."""
    from llmgeom.wind_tunnels.models import architectures

    if config.start is not None:
        return _loaded(config.start, task)
    shape = {"vocabulary": task.vocabulary, "length": task.length, "features": task.features}
    shape |= {"layers": config.layers, "heads": config.heads or (4 if config.arch == "gqa" else 2)}
    if config.parameters:
        shape |= architectures.matched(config.arch, config.parameters, **shape)
    else:
        shape["width"] = config.width
    return architectures.build(config.arch, **shape, seed=config.seed)


def _loaded(start: str, task: World) -> PreTrainedModel:
    """The model to fine-tune. Raises UserError if it cannot read the task."""
    import transformers

    from llmgeom.wind_tunnels.models import architectures  # noqa: F401  (registers our models with transformers)

    located = hub.locate(start)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            located.path,
            revision=located.revision,
            local_files_only=located.local_only,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise hub.explain(error, located) from error
    features = getattr(model.config, "features", 0)
    tokens = model.config.get_text_config().vocab_size
    if features != task.features or tokens < task.vocabulary:
        raise UserError(
            f"--from {start}: it reads {f'rows of {features}' if features else f'{tokens} tokens'}; {task.title} needs "
            f"{f'rows of {task.features}' if task.features else f'{task.vocabulary} tokens'}"
        )
    return model
