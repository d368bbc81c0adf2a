"""Trains a model in a wind tunnel: fresh sequences every step, and a run that can be interrupted and continued."""

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
from torch import Tensor, nn

from llmgeom import interrupt, wind_tunnels
from llmgeom.answers import Categorical
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.model import hub
from llmgeom.model.loading import usable
from llmgeom.progress import Progress
from llmgeom.stats.information import bits
from llmgeom.task import Split, Task, seeded
from llmgeom.wind_tunnels.checkpoint import (
    FINISHED,
    RESUME,
    TRAINING,
    held,
    load_state,
    save_model,
    save_state,
    snapshot_steps,
    state_facts,
    told,
)
from llmgeom.wind_tunnels.exactness import require_exact
from llmgeom.wind_tunnels.training_config import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
EVERY = 30.0  # seconds between resume states
LOOK = 50  # steps between looks at the losses: each look waits for the device
FLOOR = 2048  # sequences whose exact entropy is the floor of the loss
JUDGED = 1024  # held-out sequences that choose a learning rate, and others that judge a finished model


@dataclass(frozen=True)
class Trained:
    """A finished training: where it is, and what the loss did, mean bits above the Bayes floor over LOOK steps."""

    out: Path
    lr: float
    floor: float
    curve: tuple[tuple[int, float], ...]
    parameters: int
    gap: float

    @classmethod
    def of(cls, out: Path, facts: Mapping[str, Any]) -> Trained:
        """From the facts of a finished training."""
        curve = tuple((step, above) for step, above in facts["curve"])
        return cls(out, facts["lr"], facts["floor_bits"], curve, facts["parameters"], facts["kl_bits"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        named = {"floor_bits": self.floor, "kl_bits": self.gap, "curve": [list(point) for point in self.curve]}
        return {"lr": self.lr, "parameters": self.parameters, **named}

    def lines(self) -> list[str]:
        """What a terminal shows."""
        step, above = self.curve[-1]
        return [
            f"{self.parameters:,} parameters, {step:,} steps, learning rate {self.lr:g}: loss {above:.4f} bits above "
            f"the floor of {self.floor:.3f}",
            f"KL(exact || model) {self.gap:.4f} bits a query, {JUDGED} sequences not trained on",
            f"model: {self.out}",
            f"next: llmgeom grade --model {shlex.quote(str(self.out))}",
        ]


def train(
    asked: Training, out: str | os.PathLike, device: str | None = None, progress: Progress | None = None
) -> Trained:
    """Train, and leave in `out` a folder that loads like any model, its snapshots in `out/snapshots/stepN`.

    The same call continues where an interrupted one was; in eager float32 on one machine it ends with the same bytes.
    Raises UserError: a folder that holds something else, a loss that is not finite, a disk that is full.
    """
    out = Path(out)
    task = wind_tunnels.load_task(asked.task)
    counted = [f"--corrupt {asked.corrupt}"] * bool(asked.corrupt) + ["--evidence sheet"] * (asked.evidence == "sheet")
    if counted and not isinstance(task.answers, Categorical):
        raise UserError(f"{counted[0]}: {task.title} asks for real numbers, not outcomes")
    device = usable(device)
    if asked.graph and not device.startswith("cuda"):
        raise UserError(f"--cuda-graph: there is no CUDA graph on {device}; leave it out")
    spec = digest(asdict(asked) | {"task": task.title})
    if (facts := held(out, spec)) is not None:
        return Trained.of(out, facts)
    require_exact(task)
    state = state_facts(out, spec)
    if asked.lr != "auto":
        lr, tried = float(asked.lr), {}
    elif state:
        lr, tried = state["lr"], state["tried"]
    else:
        lr, tried = tune(asked, device, progress)
    run = _Run(asked, task, lr, device)
    main = run.rank == 0
    state = load_state(out, spec, run.plain, run.optimizer, run.generator) or {"step": 0, "curve": [], "recent": []}
    curve = [tuple(point) for point in state["curve"]]
    recent = [torch.tensor(loss, device=device, dtype=torch.float64) for loss in state["recent"]]
    saved, began = time.monotonic(), time.process_time()
    kept = snapshot_steps(asked.steps, asked.snapshots)

    def save(step: int, losses: list[float]) -> None:
        facts = {"spec": spec, "step": step, "curve": curve, "recent": losses, "lr": lr, "tried": tried}
        save_state(out, run.plain, run.optimizer, run.generator, facts)

    for step in range(state["step"], asked.steps):
        with interrupt.deferred():
            if main and step in kept:
                _check(recent, step, out, 1)
                save_model(_finite(run.plain, step, out), out / "snapshots" / f"step{step}", run.facts(spec, step))
            recent.append(run.step(step))
            if (step + 1) % LOOK == 0 or step + 1 == asked.steps:
                losses = _check(recent, step + 1, out, run.world)
                curve.append((step + 1, bits(sum(losses) / len(losses)) - run.floor))
                recent = []
                if progress:
                    note = f"{curve[-1][1]:.4f} bits above the Bayes floor"
                    progress(f"{task.title}, {asked.arch}", step + 1, asked.steps, note)
                if main and time.monotonic() - saved > EVERY:
                    save(step + 1, [])
                    saved = time.monotonic()
            if main and interrupt.requested():
                save(step + 1, _check(recent, step + 1, out, 1))
    with interrupt.deferred():
        if main:
            facts = run.facts(spec, asked.steps)
            save_model(_finite(run.plain, asked.steps, out), out / "snapshots" / f"step{asked.steps}", facts)
            kl = gap(run.plain, task, asked.corrupt, asked.seed, "train/judged")
            if not math.isfinite(kl):
                raise UserError(f"KL(exact || model) is {kl} after {asked.steps} steps: lower --lr or raise --warmup")
            last = {
                "curve": curve,
                "tried": tried,
                "kl_bits": kl,
                "run": {"cpu_seconds_of_the_last_part": round(time.process_time() - began, 1)},
            }
            save_model(run.plain, out, facts | last)
            (out / RESUME).unlink(missing_ok=True)
    if run.world > 1:
        torch.distributed.barrier()
    return Trained.of(out, told(out / TRAINING, FINISHED))


def _check(losses: list[Tensor], step: int, out: Path, world: int) -> list[float]:
    """The losses as numbers, means over the processes. Raises UserError where one is not finite; what was saved before
    stays."""
    whole = torch.stack(losses) if losses else torch.zeros(0)
    if world > 1:
        torch.distributed.all_reduce(whole)
    found = (whole / world).tolist()
    for i, loss in enumerate(found):
        if not math.isfinite(loss):
            raise _burst(f"the loss is {loss} at step {step - len(found) + i}", out)
    return found


def _finite(model: nn.Module, step: int, out: Path) -> nn.Module:
    """The model as it is. Raises UserError where a weight is not finite: a loss is of the weights before it."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise _burst(f"{name} is not finite after {step} steps", out)
    return model


def _burst(what: str, out: Path) -> UserError:
    state = state_facts(out)
    last = f"the state of step {state['step']} is in {out}" if state else f"snapshots are in {out}/snapshots"
    return UserError(f"{what}; {last}: lower --lr or raise --warmup")


# ---- one run --------------------------------------------------------------------------------------------------------


class _Run:
    """Model, optimiser and data of one training, and how a step is made."""

    def __init__(self, asked: Training, task: Task, lr: float, device: str) -> None:
        self.asked, self.task, self.lr, self.device = asked, task, lr, device
        self.plain = fresh(asked, task).to(device).train()  # type: ignore[arg-type]  # theirs is wrapped without its self
        if asked.precision == "bf16" and device == "cpu":
            # Fused attention on a CPU is slow backwards in bf16: 1.1 s of a step of 2.1 s (d = 192, 6 layers, T = 37).
            self.plain.config.get_text_config()._attn_implementation = "eager"
        self.split: Split = "any" if task.memorisable else "seen"
        self.generator = seeded("train", asked.seed, device)
        self.query = torch.tensor(task.query, device=device)[: task.trained_queries]
        self.tokens = torch.tensor(task.answers.tokens, device=device)
        self.floor = floor(task, asked.corrupt, asked.seed)
        self.sheet = sheet(task, asked.seed, device) if asked.evidence == "sheet" else None
        matrices = [p for p in self.plain.parameters() if p.dim() > 1]
        rest = [p for p in self.plain.parameters() if p.dim() <= 1]
        rate: Any = torch.tensor(lr, device=device) if asked.graph else lr
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": asked.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.98),
            fused=True,
            **({"capturable": True} if asked.graph else {}),
        )
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.model: Callable[..., Any] = self.plain
        if self.world > 1:
            self.model = self._divided()
        if asked.compile:
            self.model = torch.compile(self.model)
        self.replay: Callable[[], Tensor] | None = None

    def _divided(self) -> nn.Module:
        """Each process takes its share of one and the same batch, so that how many there are changes nothing."""
        from accelerate import Accelerator

        if self.asked.batch % self.world:
            raise UserError(
                f"--batch {self.asked.batch}: {self.world} processes cannot share it evenly; give a multiple"
            )
        return Accelerator(cpu=self.device == "cpu").prepare_model(self.plain)

    def step(self, step: int) -> Tensor:
        """One optimiser step; its loss in nats a query, left on the device."""
        rate = self.lr * self.asked.rate(step)
        for group in self.optimizer.param_groups:
            if self.asked.graph:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.asked.graph and step >= 3:  # the first steps allocate what a graph must find in place
            return self._replayed()
        return self._eager()

    def _eager(self) -> Tensor:
        loss = self.loss()
        self.optimizer.zero_grad(set_to_none=not self.asked.graph)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.asked.clip)
        self.optimizer.step()
        return loss.detach()

    def _replayed(self) -> Tensor:
        if self.replay is None:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                loss = self._eager()

            def replay() -> Tensor:
                graph.replay()
                return loss.clone()

            self.replay = replay
        return self.replay()

    def loss(self) -> Tensor:
        """Mean over the sequences of a fresh batch and their trained queries."""
        asked, task = self.asked, self.task
        drawn = task.draw_split(asked.batch, self.generator, self.split, training=True)
        inputs, target = drawn.inputs, drawn.target[:, : task.trained_queries]
        if asked.evidence == "exchanged":
            target = target.roll(1, 0)
        elif asked.evidence == "unbound":
            inputs = inputs.index_copy(1, self.query, inputs[:, self.query].roll(1, 0))
        elif self.sheet is not None:
            lots = torch.rand(*target.shape, self.sheet.shape[-1], generator=self.generator, device=target.device)
            target = (self.sheet - (-lots.log()).log()).argmax(-1)  # Gumbel's: P(k) is the sheet's
        if asked.corrupt:
            target = redrawn(target, asked.corrupt, len(self.tokens), self.generator)
        mine = slice(self.rank, None, self.world)
        inputs, target = inputs[mine], target[mine]
        narrow = asked.precision == "bf16"
        with torch.autocast(torch.device(self.device).type, torch.bfloat16) if narrow else nullcontext():
            logits = outputs(self.model, inputs, self.query)
        if asked.targets == "soft":
            exact = task.log_predictive(inputs)[:, : task.trained_queries]
            exact = corrupted(exact, asked.corrupt) if asked.corrupt else exact
            answers = task.answers
            return answers.cross_entropy(answers.exact(exact).float(), answers.read(logits)).mean()
        if isinstance(task.answers, Categorical):
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), self.tokens[target].flatten())
        return task.answers.loss(task.answers.read(logits), target).mean()

    def facts(self, spec: str, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        import transformers

        return {
            "spec": spec,
            "training": asdict(self.asked),
            "task": self.task.title,
            "trained_queries": self.task.trained_queries,
            "lr": self.lr,
            "step": step,
            "floor_bits": self.floor,
            "sequences": step * self.asked.batch,
            "processes": self.world,
            "parameters": sum(p.numel() for p in self.plain.parameters()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }


def outputs(model: Callable[..., Any], inputs: Tensor, query: Tensor) -> Tensor:
    """A model's logits at the queries, [sequence query output]; inputs are tokens or rows."""
    read = {"rows": inputs} if inputs.is_floating_point() else {"input_ids": inputs}
    return model(**read, use_cache=False, logits_to_keep=query).logits


def fresh(asked: Training, task: Task) -> PreTrainedModel:
    """The model before its first step, float32: the same bits whatever ran before."""
    from llmgeom.wind_tunnels import models

    if asked.start is not None:
        return _loaded(asked.start, task)
    given = {"vocabulary": task.vocabulary, "length": task.length, "features": task.features}
    given |= {"layers": asked.layers, "heads": asked.heads or (4 if asked.arch == "gqa" else 2)}
    size = models.matched(asked.arch, asked.parameters, **given) if asked.parameters else {"width": asked.width}
    return models.build(asked.arch, **given, **size, seed=asked.seed)


def _loaded(start: str, task: Task) -> PreTrainedModel:
    import transformers

    from llmgeom.wind_tunnels.models import architectures  # noqa: F401  (makes ours known to transformers)

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
    known = model.config.get_text_config().vocab_size
    if features != task.features or known < task.vocabulary:
        raise UserError(
            f"--from {start}: it reads {f'rows of {features}' if features else f'{known} tokens'}; {task.title} needs "
            f"{f'rows of {task.features}' if task.features else f'{task.vocabulary} tokens'}"
        )
    return model


# ---- labels drawn again ---------------------------------------------------------------------------------------------


def redrawn(target: Tensor, p: float, outcomes: int, generator: torch.Generator) -> Tensor:
    """Each target with probability p replaced by an outcome drawn evenly. What is shown as input stays as it is."""
    lots = torch.rand(target.shape, generator=generator, device=target.device)
    other = torch.randint(outcomes, target.shape, generator=generator, device=target.device)
    return torch.where(lots < p, other, target)


def sheet(task: Task, seed: int, device: str) -> Tensor:
    """[query outcome] log-probabilities, nats: the exact answers to one sequence, drawn by the seed alone."""
    drawn = task.draw_split(1, seeded("sheet", seed, device), "any")
    return task.log_predictive(drawn.inputs)[0, : task.trained_queries]


def corrupted(log_predictive: Tensor, p: float) -> Tensor:
    """The exact predictive of such targets: (1 - p) P(outcome) + p / K, in nats. Derived here: a target is that of the
    task with probability 1 - p, else even, independently of everything that is shown."""
    even = torch.full_like(log_predictive, math.log(p / log_predictive.shape[-1]) if p else -math.inf)
    return torch.logaddexp(log_predictive + (math.log1p(-p) if p < 1 else -math.inf), even)


def floor(task: Task, corrupt: float, seed: int) -> float:
    """The mean exact entropy of a trained query, bits: no model's loss is lower in the mean, but on a sheet's targets,
    whose entropies are its own."""
    drawn = task.draw_split(FLOOR, seeded("floor", seed), "any" if task.memorisable else "seen", training=True)
    exact = task.log_predictive(drawn.inputs)[:, : task.trained_queries]
    exact = corrupted(exact, corrupt) if corrupt else exact
    found = float(bits(task.answers.entropy(task.answers.exact(exact))).mean())
    if not math.isfinite(found):
        raise UserError(f"{task.title}: the entropy of its exact answers is {found}; give it less extreme values")
    return found


# ---- the learning rate ----------------------------------------------------------------------------------------------


def tune(
    asked: Training, device: str = "cpu", progress: Progress | None = None, rates: tuple[float, ...] = RATES
) -> tuple[float, dict[str, dict[str, float]]]:
    """The learning rate, by successive halving (Jamieson & Talwalkar 2016): every rate trains for an eighth of the
    steps, the better half for a quarter, with the schedule of a run that long; judged by KL(Bayes || model) on held-out
    sequences. Where nothing is learnt for long and then suddenly much, runs so short can mislead.

    Returns it and what was seen, bits by rate by round. Raises UserError where no rate gives a finite loss."""
    task = wind_tunnels.load_task(asked.task)
    left, seen = list(rates), {}
    for part, divisor in enumerate((8, 4)):
        short = replace(asked, steps=max(1, asked.steps // divisor), warmup=min(asked.warmup, asked.steps // divisor))
        found = {}
        for i, lr in enumerate(left):
            run = _Run(short, task, lr, device)
            for step in range(short.steps):
                with interrupt.deferred():
                    run.step(step)
            found[lr] = gap(run.plain, task, asked.corrupt, asked.seed)
            if progress:
                progress(f"learning rate, round {part + 1}", i + 1, len(left))
        finite = [lr for lr in left if math.isfinite(found[lr])]
        seen[f"round {part + 1}, steps {short.steps}"] = {
            f"{lr:g}": value for lr, value in found.items() if math.isfinite(value)
        }
        if not finite:
            raise UserError(
                f"no learning rate of {', '.join(map(str, rates))} gives a finite loss; lower --clip or --lr"
            )
        left = sorted(finite, key=found.__getitem__)[: (len(left) + 1) // 2]
    return left[0], seen


@torch.no_grad()
def gap(model: nn.Module, task: Task, corrupt: float, seed: int, purpose: str = "tune") -> float:
    """KL(exact || model), bits a trained query, on held-out sequences (fresh ones where nothing can be held out)."""
    device = next(model.parameters()).device
    generator = seeded(purpose, seed, device)
    drawn = task.draw_split(JUDGED, generator, "any" if task.memorisable else "held-out")
    exact = task.log_predictive(drawn.inputs)[:, : task.trained_queries]
    exact = task.answers.exact(corrupted(exact, corrupt) if corrupt else exact)
    query = torch.tensor(task.query, device=device)[: task.trained_queries]
    form = task.answers.read(outputs(model, drawn.inputs, query))
    return float(bits(task.answers.kl(exact, form.double())).mean())
