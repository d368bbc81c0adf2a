"""`llmgeom lens`: what each layer predicts, of one prompt or of many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmgeom.commands import config
from llmgeom.commands.output import Output
from llmgeom.commands.pictures import PictureConfig, Shown, run
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, argument, control_flag, measure_flag, prompt_flag

if TYPE_CHECKING:
    from llmgeom.model.model import Model


@dataclass(frozen=True)
class RunConfig(PictureConfig):
    """The options of `llmgeom lens`."""

    VERB: ClassVar[str] = "lens"

    prompt: str = argument("", metavar="[PROMPT]", kw_only=True)
    prompts: str | None = prompt_flag(None, "Prompts of a file, one a line; each is read at its last token.")
    controls: int = control_flag(
        4, "With --prompts: untrained copies, and shuffles of the prompts.", least=0, most=100, name="--control-models"
    )
    transport: str | None = measure_flag(
        None, "Beside it a Jacobian lens: a file of one matrix a layer (.pt as published, .safetensors, .npz)."
    )
    seed: int = control_flag(0, "Fixes the controls.", least=0, most=LARGEST_SEED)


@config.command(
    RunConfig,
    Output,
    examples=[
        'llmgeom lens "The capital of France is"',
        "llmgeom lens --model EleutherAI/pythia-410m --prompts mine.txt --transport pythia-410m_jacobian_lens.pt",
    ],
)
def main(settings: RunConfig, output: Output) -> int:
    """The logit lens: what the residual stream predicts after each layer (nostalgebraist 2020).

    Of one PROMPT the top token at each layer and position; of the prompts of a file entropy, divergence from the final
    distribution and the layer from which the answer is on top, beside untrained copies and shuffled prompts. With
    --transport the same by a Jacobian lens (Gurnee et al. 2026); `fit_lens` in Python fits one.
    """
    if bool(settings.prompt) == bool(settings.prompts):
        raise UserError('lens: give one prompt, e.g. llmgeom lens "The capital of France is", or --prompts FILE')
    return run(
        settings, output, lambda subject: many(subject, settings) if settings.prompts else one(subject, settings)
    )


def one(subject: Model, settings: RunConfig) -> Shown:
    """The grid of one prompt; in the terminal its last token."""
    lens = subject.lens(settings.prompt, transport=settings.transport)
    layers, answer = lens.coords["layer"], lens.attrs["answers"][-1]
    rank, token = lens["rank"][:, -1], lens["token"][:, -1]
    first = next(i for i in range(len(rank)) if (rank[i:] == 1).all())
    head = f"{'layer':>5}  {'top token':<16}{'probability':>11}  {'rank of the answer':>18}  {'entropy':>7}  {'KL':>6}"
    lines = [
        f"{layer:>5}  {str(token[i])!r:<16}{lens['probability'][i, -1]:>11.3f}  {rank[i]:>18,}  "
        f"{lens['entropy'][i, -1]:>7.2f}  {lens['KL'][i, -1]:>6.2f}"
        for i, layer in enumerate(layers)
    ]
    before = f"; layer {layers[first - 1]} says {str(token[first - 1])!r}" if first else ""
    sentences = [
        f"The model's answer is {answer!r} (probability {lens['probability'][-1, -1]:.2f}). It is on top from layer "
        f"{layers[first]} of {layers[-1]} on{before}. Layer {layers[-1]} is the output of the last one."
    ]
    pictures = [(lens, "probability"), (lens, "KL")]
    if settings.transport:
        carried = lens["Jacobian rank"][:, -1]
        ten = [next((layer for layer, at in zip(layers, ranks, strict=True) if at <= 10)) for ranks in (rank, carried)]
        sentences.append(
            f"Among the ten top tokens it is first in layer {ten[1]} by the Jacobian lens, in layer {ten[0]} by the "
            "logit lens."
        )
        head += f"  {'Jacobian: top token':<20}{'rank':>7}  {'KL':>6}"
        top = lens["Jacobian token"][:, -1]
        lines = [
            f"{line}  {str(top[i])!r:<20}{carried[i]:>7,}  {lens['Jacobian KL'][i, -1]:>6.2f}"
            for i, line in enumerate(lines)
        ]
        pictures[1:1] = [(lens, "Jacobian probability")]
    return Shown(sentences, pictures, ["", head, *lines, ""])


def many(subject: Model, settings: RunConfig) -> Shown:
    """Curves over layers of the prompts of a file."""
    from llmgeom.prompts import files

    batch = files.read(str(settings.prompts))
    if len(batch) < 2:
        raise UserError(f"{settings.prompts} holds one prompt: give it as it is, llmgeom lens PROMPT, or give more")
    lens = subject.lens(batch, settings.controls, settings.seed, settings.transport)
    (low, high), n = lens.attrs["first layer interval"], lens.attrs["n"]
    layers, half = lens.coords["layer"], len(lens.coords["layer"]) // 2
    median = next(layer for layer, share in zip(layers, lens["decided"], strict=True) if share >= 0.5)
    sentences = [
        f"In {n} prompts the answer is on top from layer {lens.attrs['first layer']:.1f} [{low:.1f}, {high:.1f}] of "
        f"{layers[-1]} on, on average; in half of them from layer {median} on.",
        f"Entropy is {lens['entropy'][0]:.1f} bits {f'in layer {layers[0]}' if layers[0] else 'at the embedding'}, "
        f"{lens['entropy'][half]:.1f} in layer {layers[half]} and {lens['entropy'][-1]:.1f} at the end; layer "
        f"{layers[half]} is {lens['KL'][half]:.1f} bits from the final answer.",
    ]
    if settings.transport:
        ends = [
            f"{lens[name][half]:.1f} [{lens[f'{name}, low'][half]:.1f}, {lens[f'{name}, high'][half]:.1f}]"
            for name in ("Jacobian KL", "KL")
        ]
        sentences.append(
            f"The Jacobian lens is {ends[0]} bits from the final answer in layer {layers[half]}, the logit lens "
            f"{ends[1]}; by it the answer is on top from layer {lens.attrs['Jacobian first layer']:.1f} on."
        )
    if settings.controls:
        ends = [
            f"{band} {lens[f'entropy, lowest of {band}'][-1]:.1f} to {lens[f'entropy, highest of {band}'][-1]:.1f}"
            for band in ("untrained copies", "shuffled prompts")
        ]
        sentences.append(f"Entropy of the answer in controls: {'; '.join(ends)} ({settings.controls} draws of each).")
    return Shown(sentences, [(lens, "KL"), (lens, "entropy"), (lens, "decided")])
