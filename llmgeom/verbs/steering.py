"""Steering: a direction added to a layer's input, what it does to answers, and the text that an edited model writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import UserError, brief
from llmgeom.files import sha256
from llmgeom.model.capture import Site
from llmgeom.model.intervention import Intervention, Runner, add
from llmgeom.model.resume import clean_pass
from llmgeom.progress import watched
from llmgeom.stats.resampling import mean_intervals
from llmgeom.verbs.lens import one_prompt, token_of
from llmgeom.verbs.reading import Reading, called

NORM, VARIANCE = "random directions of equal norm", "random directions of equal variance"


def place(direction: Any, layer: int | None) -> tuple[Any, int, str]:
    """The vector, layer and edit point of a direction: of a label probe its own, of numbers the residual stream.

    Raises UserError: numbers without a layer; a probe of several classes, of stored activations or of single heads.
    """
    if not hasattr(direction, "direction"):
        if layer is None:
            raise UserError("a direction of numbers has no layer of its own: give layer=")
        return direction, layer, "residual"
    if direction.direction is None:
        raise UserError(f"a label of {len(direction.classes_)} classes has no one direction: probe two of them")
    if direction.site not in ("residual", "attn_out", "mlp_out"):
        raise UserError(f"a direction at {direction.site} lies in single heads: probe residual, attn_out or mlp_out")
    return direction.direction, direction.layer if layer is None else layer, direction.site


def added(subject: Any, direction: Any, dose: float) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """x -> x + dose direction, and what it does as plain data. Raises UserError for another width or no number."""
    numbers = direction.detach().cpu().float().numpy() if isinstance(direction, Tensor) else direction
    vector = np.asarray(numbers, dtype=np.float64)
    if vector.shape != (subject.facts["d_model"],) or not np.isfinite(vector).all() or not math.isfinite(dose):
        raise UserError(
            f"steer with a direction of shape {vector.shape} and dose {dose}: expected {subject.facts['d_model']} "
            "finite numbers, one for each dimension of the residual stream"
        )
    step = torch.from_numpy(dose * vector)
    return lambda x: x + step.to(x), {"steer": sha256(vector.tobytes()), "dose": float(dose)}


@watched()
def dose_curve(
    subject: Any, prompts: Prompts, answers: Sequence[str | int], direction: Any, layer: int | None = None,
    doses: Sequence[float] = (-2.0, -1.0, 1.0, 2.0), draws: int = 8, seed: int = 0,
) -> Reading:  # fmt: skip
    """Is a direction used? Log odds of two answers under doses of it, as `steer` adds it at every position.

    Beside it are random directions of the same norm, and of the same variance: scaled so that the residual streams
    of these prompts vary along them as much as along the direction (of which most random directions have less).

    Args:
        prompts: Whose next token is read.
        answers: Two tokens, each as its text with its space, or its id.
        direction, layer: As in `steer`.
        doses: How many times the direction; 0 is added.
        draws: Random directions of each kind.
        seed: Of them.

    Returns:
        Over dose: `log odds` in nats, mean over prompts, with its 95 % interval; the range of the means of each
        kind of random directions.

    Raises:
        UserError: An answer is not one token; no such layer; a direction of another width.
    """
    if isinstance(answers, str) or len(answers) != 2:
        raise UserError(f"answers={brief(answers)}: expected two, e.g. (' good', ' bad')")
    first, second = (token_of(subject, answer) for answer in answers)
    batch, doses = Batch.of(prompts), sorted({0.0, *map(float, doses)})
    if len(doses) < 2 or draws < 1:
        raise UserError(f"dose_curve(doses={doses}, draws={draws}): expected a dose other than 0, and 1 draw or more")
    vector, layer, site = place(direction, layer)
    if site != Site.RESIDUAL:
        raise UserError(f"dose_curve reads the residual stream, and this probe {site}: steer with it")
    depth = len(subject.blocks)
    if not -depth <= layer < depth:
        raise UserError(f"dose_curve(layer={layer}): {subject.name} has layers 0 to {depth - 1}")
    layer %= depth
    added(subject, vector, 1.0)  # it refuses a direction of another width
    vector = np.asarray(vector.detach().cpu() if isinstance(vector, Tensor) else vector, dtype=np.float64)
    here = subject.capture(batch, Site.RESIDUAL, layers=layer)[Site.RESIDUAL, layer].double().cpu().numpy()
    rng = np.random.default_rng(seed)
    directions: dict[str, list[np.ndarray]] = {"": [vector], NORM: [], VARIANCE: []}
    for _ in range(draws):
        random = rng.standard_normal(vector.shape)
        random *= np.linalg.norm(vector) / np.linalg.norm(random)
        directions[NORM].append(random)
        if len(here) > 1 and (spread := (here @ random).std()) > 0:
            directions[VARIANCE].append(random * ((here @ vector).std() / spread))
    tokens = subject.tokens(batch)

    def odds(_: Sequence[Tensor], steered: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """[prompt] log-probability of the first answer less that of the second, in nats."""
        log_probs = steered[0].double()
        return {"odds": (log_probs[:, first] - log_probs[:, second]).numpy()}

    everywhere = torch.ones_like(tokens.data, dtype=torch.bool)
    runner = Runner(subject, batch, everywhere, odds, compared=False, clean=clean_pass(subject, batch))
    zero, others = doses.index(0.0), [dose for dose in doses if dose]
    edits = [
        Intervention(name, {("residual", layer): add(torch.from_numpy(one).expand(everywhere.numel(), -1))}, dose=dose)
        for name, several in directions.items()
        for one in several
        for dose in (others if name else doses)
    ]
    found = runner.run(edits, "steering")
    own = found.pop("/odds")  # [dose prompt]
    values = {"log odds": own.mean(1)}
    if len(batch) > 1:
        values["log odds, low"], values["log odds, high"] = mean_intervals(own).T
    for key, of_draws in found.items():
        name, means = key.removesuffix("/odds"), of_draws.reshape(-1, len(others), len(batch)).mean(2)
        means = np.insert(means, zero, own[zero].mean(), axis=1)
        values[f"lowest of {name}"], values[f"highest of {name}"] = means.min(0), means.max(0)
    bands = {"95 % interval over prompts": ("{}, low", "{}, high")}
    bands |= {name: (f"lowest of {name}", f"highest of {name}") for name in (NORM, VARIANCE)}
    right, wrong = (repr(answer) if isinstance(answer, str) else str(answer) for answer in answers)
    return Reading(
        f"{called(subject)}, steered at layer {layer}: log odds of {right} against {wrong}, {len(batch)} prompts",
        {"dose": tuple(doses)},
        values,
        units={"log odds": "nats"},
        bands=bands,
        attrs={"n": len(batch), "draws": draws, "unsteered": float(own[zero].mean())},
    )


class Generated(str):
    """What a model wrote after a prompt: a string, with `tokens`, the ids that it is made of."""

    tokens: tuple[int, ...]


def generate(subject: Any, prompt: Prompts, tokens: int = 20, temperature: float = 0.0, seed: int = 0) -> Generated:
    """What the model writes after a prompt, with its edits.

    Every token reads the whole text again, so that an edit acts at each position as it does in `capture`: of n new
    tokens, n passes. It ends at the tokenizer's end-of-text token.

    Args:
        prompt: A string, or its token ids.
        tokens: The most that are written.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: Of the draws.

    Returns:
        The new text alone; its `tokens` are the ids.
    """
    if tokens < 1 or temperature < 0:
        raise UserError(
            f"generate(tokens={tokens}, temperature={temperature}): expected 1 token or more, and 0 or more"
        )
    ids, _ = one_prompt(subject, prompt)
    limit, start = subject.facts["positions"], len(ids)
    stops = getattr(getattr(subject.model, "generation_config", None), "eos_token_id", None)
    ends = set(stops if isinstance(stops, list) else [stops])
    ends.add(getattr(subject.tokenizer, "eos_token_id", None))
    generator = torch.Generator().manual_seed(seed)
    while len(ids) < start + tokens and (limit is None or len(ids) < limit):
        log_probs = subject.capture([ids], Site.LOG_PROBS).log_probs[0]
        if temperature:
            token = int(torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(log_probs.argmax())
        ids = [*ids, token]
        if token in ends:
            break
    new = ids[start:]
    text = Generated(
        subject.tokenizer.decode(new, skip_special_tokens=True) if subject.tokenizer else " ".join(map(str, new))
    )
    text.tokens = tuple(new)
    return text
