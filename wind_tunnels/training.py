"""Training of a model in a wind tunnel, with fresh sequences in every step; it can be interrupted and resumed."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from llmgeom import wind_tunnels
from llmgeom.answers import Categorical, corrupt_predictive, corrupt_targets, query_logits
from llmgeom.cache import interrupt
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.model import hub
from llmgeom.model.loading import usable
from llmgeom.progress import tell
from llmgeom.stats.information import bits
from llmgeom.wind_tunnels.checkpoint import (
    FINISHED,
    RESUME,
    TRAINING,
    finished_facts,
    load_state,
    read_facts,
    resume_facts,
    save_model,
    save_state,
    snapshot_steps,
)
from llmgeom.wind_tunnels.exactness import require_exact
from llmgeom.wind_tunnels.training_config import TRIVIAL, Training
from llmgeom.world import World, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SAVE_EVERY = 30.0  # seconds between resume states
CHECK_EVERY = 50  # steps between checks of the losses, since each check waits for the device
FLOOR_SEQUENCES = 2048  # sequences whose mean exact entropy is the floor of the loss
JUDGED_SEQUENCES = 1024  # held-out sequences that choose a learning rate; as many others judge a finished model


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        lr: The highest learning rate.
        floor: The least possible mean loss, bits per query.
        curve: (step, mean loss over the last steps minus the floor, in bits).
        kl: KL(exact || model) in bits per query, on sequences not trained on.
    """

    out: Path
    lr: float
    floor: float
    curve: tuple[tuple[int, float], ...]
    parameters: int
    kl: float

    @classmethod
    def of(cls, out: Path, facts: Mapping[str, Any]) -> Trained:
        """From the facts in training.json."""
        curve = tuple((step, above) for step, above in facts["curve"])
        return cls(out, facts["lr"], facts["floor_bits"], curve, facts["parameters"], facts["kl_bits"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the units in the names."""
        scores = {"floor_bits": self.floor, "kl_bits": self.kl, "curve": [list(point) for point in self.curve]}
        return {"lr": self.lr, "parameters": self.parameters, **scores}

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        step, above = self.curve[-1]
        return [
            f"{self.parameters:,} parameters, {step:,} steps, learning rate {self.lr:g}: loss {above:.4f} bits above "
            f"the floor of {self.floor:.3f}",
            f"KL(exact || model) {self.kl:.4f} bits a query, {JUDGED_SEQUENCES} sequences not trained on",
            f"model: {self.out}",
            f"next: llmgeom grade --model {shlex.quote(str(self.out))}",
        ]


def train(config: Training, out: str | os.PathLike, device: str | None = None) -> Trained:
    """Trains a model and writes to `out` a model folder that loads like any other, with snapshots in
    `out/snapshots/stepN`.

    The same call resumes an interrupted training; in eager float32 on one machine it ends with the same bytes.

    Args:
        config: Everything that determines the weights.
        device: E.g. "cpu" or "cuda:1"; by default a GPU if there is one.

    Raises:
        UserError: The folder contains something else, a loss is not finite, or the disk is full.
    """
    out = Path(out)
    task = wind_tunnels.load_world(config.task)
    _check_options(config, task)
    device = usable(device, float64=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("train runs in one process; start it without torchrun or accelerate, a process for each seed")
    if config.graph and not device.startswith("cuda"):
        raise UserError(f"--cuda-graph: there is no CUDA graph on {device}; leave it out")
    spec = digest(asdict(config) | {"task": task.title} | task.file_code)
    if (facts := finished_facts(out, spec)) is not None:
        return Trained.of(out, facts)
    require_exact(task)
    state = resume_facts(out, spec)
    if config.lr != "auto":
        lr, tried = float(config.lr), {}
    elif state:
        lr, tried = state["lr"], state["tried"]
    else:
        lr, tried = tune(config, device)
    trainer = Trainer(config, task, lr, device)
    began = time.process_time()
    curve = _run_steps(trainer, spec, tried, out)
    with interrupt.deferred():
        _snapshot(trainer, spec, config.steps, out)
        kl = kl_to_exact(trainer.module, task, config.corrupt, config.seed, "train/judged")
        if not math.isfinite(kl):
            raise UserError(f"KL(exact || model) is {kl} after {config.steps} steps: lower --lr or raise --warmup")
        run = {"cpu_seconds_of_the_last_part": round(time.process_time() - began, 1)}
        facts = {"curve": curve, "tried": tried, "kl_bits": kl, "run": run}
        save_model(trainer.module, out, {**trainer.facts(spec, config.steps), **facts})
        (out / RESUME).unlink(missing_ok=True)
    return Trained.of(out, read_facts(out / TRAINING, FINISHED))


def _check_options(config: Training, task: Any) -> None:
    """Raises UserError for options that need discrete outcomes or states, if the task has none."""
    if config.hold_out == "states" and task.sufficient(task.draw_split(1, seeded("states", 0)).inputs) is None:
        raise UserError(
            f"--hold-out states: {task.title} does not say what the states of its evidence are (`World.sufficient`); "
            "leave it out, and hypotheses are held out"
        )
    if config.hold_out == "states" and config.graph:
        raise UserError(
            "--hold-out states --cuda-graph: a CUDA graph cannot change which queries have a loss; leave one out"
        )
    if isinstance(task.answers, Categorical):
        wanted, there = TRIVIAL.get(config.evidence), task.trivial(task.draw_split(1, seeded("trivial", 0)).inputs)
        if wanted and wanted not in there:
            raise UserError(
                f"--evidence {config.evidence}: {task.title} has no predictor called {wanted!r}, but "
                f"{', '.join(map(repr, there)) or 'none'}; choose another kind of evidence"
            )
        return
    for flag, given in (
        (f"--corrupt {config.corrupt}", config.corrupt),
        (f"--evidence {config.evidence}", config.evidence in ("sheet", *TRIVIAL)),
    ):
        if given:
            raise UserError(f"{flag}: {task.title} asks for real numbers, not outcomes")


def _run_steps(trainer: Trainer, spec: str, tried: Mapping[str, Any], out: Path) -> list[tuple[int, float]]:
    """Run all remaining steps, with snapshots and resume states; returns the loss curve."""
    config = trainer.config
    module, optimizer, generator = trainer.module, trainer.optimizer, trainer.generator
    state = load_state(out, spec, module, optimizer, generator) or {"step": 0, "curve": [], "recent": []}
    curve = [tuple(point) for point in state["curve"]]
    recent = [torch.tensor(loss, device=trainer.device, dtype=torch.float64) for loss in state["recent"]]
    saved = time.monotonic()
    snapshots = snapshot_steps(config.steps, config.snapshots)

    def save(step: int, losses: list[float]) -> None:
        facts = {"spec": spec, "step": step, "curve": curve, "recent": losses, "lr": trainer.lr, "tried": tried}
        save_state(out, module, optimizer, generator, facts)

    for step in range(state["step"], config.steps):
        with interrupt.deferred():
            if step in snapshots:
                _finite_losses(recent, step, out)
                _snapshot(trainer, spec, step, out)
            recent.append(trainer.step(step))
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == config.steps:
                losses = _finite_losses(recent, step + 1, out)
                curve.append((step + 1, bits(sum(losses) / len(losses)) - trainer.floor))
                recent = []
                note = f"{curve[-1][1]:.4f} bits above the Bayes floor"
                tell(f"{trainer.task.title}, {config.arch}", step + 1, config.steps, note)
                if time.monotonic() - saved > SAVE_EVERY:
                    save(step + 1, [])
                    saved = time.monotonic()
            if interrupt.requested():
                save(step + 1, _finite_losses(recent, step + 1, out))
    return curve


def _snapshot(trainer: Trainer, spec: str, step: int, out: Path) -> None:
    """Raises UserError if a weight is not finite, which the loss of this step does not yet show."""
    for name, parameter in trainer.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise _diverged(f"{name} is not finite after {step} steps", out)
    save_model(trainer.module, out / "snapshots" / f"step{step}", trainer.facts(spec, step))


def _finite_losses(losses: list[Tensor], step: int, out: Path) -> list[float]:
    """The losses as numbers. Raises UserError if one is not finite."""
    numbers = torch.stack(losses).tolist() if losses else []
    for i, loss in enumerate(numbers):
        if not math.isfinite(loss):
            raise _diverged(f"the loss is {loss} at step {step - len(numbers) + i}", out)
    return numbers


def _diverged(what: str, out: Path) -> UserError:
    state = resume_facts(out)
    last = f"the state of step {state['step']} is in {out}" if state else f"snapshots are in {out}/snapshots"
    return UserError(f"{what}; {last}: lower --lr or raise --warmup")


def tune(
    config: Training, device: str = "cpu", rates: tuple[float, ...] = RATES
) -> tuple[float, dict[str, dict[str, float]]]:
    """Chooses the learning rate by successive halving (Jamieson & Talwalkar 2016).

    Every rate trains for an eighth of the steps, the better half for a quarter, with the schedule of a run of that
    length; KL(exact || model) on the test split decides. Such short runs mislead if the loss stays high for long and
    then falls suddenly.

    Returns:
        The rate, and the KL in bits by rate, by round.

    Raises:
        UserError: No rate gives a finite loss.
    """
    task = wind_tunnels.load_world(config.task)
    candidates, rounds = list(rates), {}
    for number, divisor in enumerate((8, 4), 1):
        steps = max(1, config.steps // divisor)
        short = replace(config, steps=steps, warmup=min(config.warmup, config.steps // divisor))
        kl = {}
        for i, lr in enumerate(candidates):
            trainer = Trainer(short, task, lr, device)
            for step in range(steps):
                with interrupt.deferred():
                    trainer.step(step)
            kl[lr] = kl_to_exact(trainer.module, task, config.corrupt, config.seed)
            tell(f"learning rate, round {number}", i + 1, len(candidates))
        finite = [lr for lr in candidates if math.isfinite(kl[lr])]
        rounds[f"round {number}, steps {steps}"] = {f"{lr:g}": kl[lr] for lr in finite}
        if not finite:
            raise UserError(
                f"no learning rate of {', '.join(map(str, rates))} gives a finite loss; lower --clip or --lr"
            )
        candidates = sorted(finite, key=kl.__getitem__)[: (len(candidates) + 1) // 2]
    return candidates[0], rounds


# ---- one training ---------------------------------------------------------------------------------------------------


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
