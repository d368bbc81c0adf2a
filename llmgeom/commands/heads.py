"""`llmgeom heads`: which attention heads do induction, look back, or copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmgeom.commands import config
from llmgeom.commands.output import Output
from llmgeom.commands.pictures import PictureConfig, Shown, run
from llmgeom.flags import LARGEST_SEED, control_flag, measure_flag

if TYPE_CHECKING:
    from llmgeom.model.model import Model

SHOWN = 3  # heads of each kind in the terminal


@dataclass(frozen=True)
class RunConfig(PictureConfig):
    """The options of `llmgeom heads`."""

    VERB: ClassVar[str] = "heads"

    length: int = measure_flag(50, "Random tokens before they repeat.", least=2, most=10**5)
    sequences: int = measure_flag(8, "Sequences of random tokens.", least=2)
    ablate: int = measure_flag(
        3, "Mean-ablate the top induction heads, this many, and see what copying loses.", least=0
    )
    controls: int = control_flag(
        4, "Untrained copies; and twice as many random sets of heads.", least=1, most=100, name="--control-models"
    )
    seed: int = control_flag(0, "Fixes tokens and controls.", least=0, most=LARGEST_SEED)


@config.command(
    RunConfig, Output, examples=["llmgeom heads", "llmgeom heads --model EleutherAI/pythia-410m --ablate 5"]
)
def main(settings: RunConfig, output: Output) -> int:
    """Score every attention head on random tokens that are repeated (Olsson et al. 2022).

    Induction, previous token, duplicate token and first token are mean attention weights; copying is of the weights
    alone (Elhage et al. 2021). Then the top induction heads are mean-ablated, and as many random ones.
    """
    return run(settings, output, lambda subject: look(subject, settings))


def look(subject: Model, settings: RunConfig) -> Shown:
    """Scores with the range of untrained copies, and the loss of copying."""
    heads = subject.heads(settings.length, settings.sequences, settings.controls, settings.seed)
    bands, frame = heads.attrs["untrained copies"], heads.frame()
    lines, kinds = [""], [kind for kind in heads.values if not kind.startswith("error")]
    for kind in kinds:
        top = frame.nlargest(SHOWN, kind)
        each = [f"L{a}H{b} {score:.2f}" for a, b, score in zip(top["layer"], top["head"], top[kind], strict=True)]
        low, high = bands[kind]
        lines.append(f"{kind:<16} {', '.join(each):<42} untrained: {low:.2f} to {high:.2f}")
    pictures, top = [(heads, kind) for kind in kinds], frame.nlargest(max(settings.ablate, 1), "induction")
    above = int((heads["induction"] > bands["induction"][1]).sum())
    layer, head, weight = (top[name].iloc[0] for name in ("layer", "head", "induction"))
    sentences = [
        f"{above} of {heads['induction'].size} heads look at the token after the earlier copy more than any head of "
        f"{settings.controls} untrained cop{'y' if settings.controls == 1 else 'ies'} does; L{layer}H{head} "
        f"with weight {weight:.2f} (spread evenly: {heads.attrs['even attention']:.3f})."
    ]
    if settings.ablate:
        chosen = [*zip(top["layer"].tolist(), top["head"].tolist(), strict=True)]
        lost = subject.copying(chosen, settings.length, settings.sequences, 2 * settings.controls, settings.seed)
        value, low, high = (float(lost[name][1]) for name in ("lost", "lost, low", "lost, high"))
        random = lost["lost"][2:]
        sentences.append(
            f"Without {', '.join(f'L{a}H{b}' for a, b in chosen)} a repeated token loses {value:.2f} [{low:.2f}, "
            f"{high:.2f}] nats of log-probability (of {lost['log-probability'][0]:.2f}; the first time the token had "
            f"{lost.attrs['log-probability, first time']:.2f}); without as many random heads {random.min():.2f} to "
            f"{random.max():.2f}."
        )
        pictures.insert(1, (lost, "lost"))
    return Shown(sentences, pictures, [*lines, ""])
