"""Where a model breaks: the shortest evidence at which it is far from the exact answer (`evidence --fuzz`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from llmgeom.model.subject import Subject
from llmgeom.probes.evidence import answers, questions
from llmgeom.probes.evidence.answers import BREAKING, Breaking
from llmgeom.prompt_table import prompt_table
from llmgeom.prompts.process import Draw, Process
from llmgeom.provenance import provenance
from llmgeom.record import Record
from llmgeom.run import observe
from llmgeom.stats.information import bits, kl


def fuzz(
    subject: Subject,
    process: Process,
    facts: Mapping[str, Any],
    *,
    n: int,
    ks: Sequence[int],
    seed: int,
    bound: float,
    surface: str,
) -> Record:
    """The shortest evidence found at which a model misses the exact answer by more than a bound.

    Args:
        facts: further provenance.
        n: sequences drawn at each length. ks: the longest is the last length; the process's own by default.
        bound: bits of KL(exact || answer). surface: how the evidence is written.

    Raises:
        UserError: the model has no tokenizer, or none with enough single-token labels; the prompts are too long.
    """
    questions.check_tokenizer(subject)
    positions = subject.facts["positions"]

    def written(draws: Sequence[Draw]) -> tuple[Any, Any]:
        batch = process.write(draws, surface, subject.tokenizer, positions)
        return batch, observe(subject, batch, answers.NEEDS)

    def distance(draws: Sequence[Draw]) -> np.ndarray:
        batch, predictions = written(draws)
        return bits(kl(batch.exact.predictive[:, -1].numpy(), predictions.log_p))

    most = max(ks or process.usual)
    hit = search(process, distance, bound, n=n, most=most, seed=seed)
    about = {"bound": bound, "seed": seed, "tried": hit.tried, "longest": most, "surface": surface}
    source = {"kind": "search", "name": process.title, "n": n, "seed": seed, "search": about}
    known = subject.facts_now
    if hit.draw is None:
        why = f"none found in {_searched(about)}, more than {bound:g} bits from the exact answer"
        return Record({}, {BREAKING: why}, {}, known, source, facts)
    batch, predictions = written([hit.draw])
    tokens = subject.tokens(batch)
    result = Breaking(
        exact=batch.exact.predictive[0, -1].exp().numpy(),
        model=np.exp(predictions.log_p[0]),
        distance=hit.bits,
        bound=bound,
        observations=len(hit.draw.seen),
        tried=hit.tried,
        ticks={"answer": tuple(batch.columns["marks"][0].split())},
        notes=(f"the prompt: {batch.text[0]}", _searched(about)),
    )
    return Record(
        {BREAKING: result.lowered()},
        {},
        prompt_table(subject, batch, tokens, predictions.h_vocab),
        known,
        {**batch.source, **source},
        {**provenance(batch, tokens, seed, 0), **facts},
    )


@dataclass(frozen=True)
class Searches:
    """The output of `evidence --fuzz`: a search of each process."""

    records: Sequence[Record]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"searches": [search_facts(record) for record in self.records]}

    def lines(self) -> Iterator[str]:
        """Lines for a terminal."""
        for record in self.records:
            yield from (*search_lines(record), "")


def search_facts(record: Record) -> dict[str, Any]:
    """A search as plain data."""
    about = {"model": record.subject["name"], "process": record.source["name"], **record.source["search"]}
    if not record.results:
        return about | {"prompt": None}
    (measured,) = record.results.values()
    shares = zip(
        measured.ticks["answer"], *(measured.arrays[name].tolist() for name in ("exact", "model")), strict=True
    )
    return about | {
        "prompt": record.prompts["text"][0],
        "observations": int(measured.arrays["observations"]),
        "bits": float(measured.arrays["distance"]),
        "answers": [{"label": label, "exact": p, "model": q} for label, p, q in shares],
    }


def search_lines(record: Record) -> Iterator[str]:
    """A search as text: the prompt on a line of its own, then the exact answer and the model's."""
    search = search_facts(record)
    where = f"{search['model']} on {search['process']}"
    if search["prompt"] is None:
        yield f"{where}: {next(iter(record.unmeasured.values()))}"
        return
    yield f"{where}: {search['bits']:.2f} bits from the exact answer after {search['observations']} observations"
    yield f"({_searched(search)}, bound {search['bound']:g} bits)"
    yield ""
    yield search["prompt"]
    yield ""
    for row in search["answers"]:
        yield f"  {row['label']:8} exact {row['exact']:.3f}   model {row['model']:.3f}"


def _searched(about: dict[str, Any]) -> str:
    return f"{about['tried']} sequences of at most {about['longest']} observations, seed {about['seed']}"


# ---- a search by length, then stepwise simplification ---------------------------------------------------------------


Distance = Callable[[Sequence[Draw]], np.ndarray]  # draws -> distance in bits of their answers from the exact answers


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        draw: the evidence; None if no distance was above the bound.
        bits: its distance.
        tried: number of sequences given to the model.
    """

    draw: Draw | None
    bits: float
    tried: int


def search(process: Process, distance: Distance, bound: float, *, n: int, most: int, seed: int) -> Search:
    """Evidence, as short and simple as possible, at which a distance is above a bound.

    Lengths are tried from 0 on, each with `n` draws of the process. At the first length with a draw above the bound,
    the draw with the largest distance is simplified: an observation is left out, or its outcome replaced by an earlier
    one, as long as the distance stays above the bound. The same seed gives the same evidence.

    Args:
        distance: distance of each draw.
        bound: bits.
        n: draws for each length. most: the largest length. seed: seed of the draws.
    """
    tried = 0
    for k in range(most + 1):
        drawn = (process.draw(k, Random(f"llmgeom/fuzz/{process.title}/{seed}/{k}/{i}")) for i in range(n))
        draws = list({_key(draw): draw for draw in drawn}.values())
        bits = distance(draws)
        tried += len(draws)
        if bits.max() > bound:
            worst = int(bits.argmax())
            return _simplified(process, distance, bound, Search(draws[worst], float(bits[worst]), tried))
    return Search(None, 0.0, tried)


def _simplified(process: Process, distance: Distance, bound: float, hit: Search) -> Search:
    assert hit.draw is not None
    while True:
        steps = [draw for draw in _simpler(hit.draw, process.answers) if process.possible(draw)]
        bits = distance(steps) if steps else np.array([])
        tried = hit.tried + len(steps)
        above = np.flatnonzero(bits > bound)
        if not len(above):
            return replace(hit, tried=tried)
        hit = Search(steps[int(above[0])], float(bits[above[0]]), tried)


def _simpler(draw: Draw, answers: int) -> Iterator[Draw]:
    """Draws one step simpler, the simplest first: one observation fewer, or one with an earlier outcome."""
    for i in range(len(draw.seen)):
        items = (*draw.items[:i], *draw.items[i + 1 :])
        order = {item: number for number, item in enumerate(dict.fromkeys(items))}
        yield replace(draw, seen=(*draw.seen[:i], *draw.seen[i + 1 :]), items=tuple(order[item] for item in items))
    for i, outcome in enumerate(draw.seen):
        for earlier in range(min(outcome, answers)):
            yield replace(draw, seen=(*draw.seen[:i], earlier, *draw.seen[i + 1 :]))


def _key(draw: Draw) -> tuple:
    return draw.seen, draw.items, tuple(sorted(draw.stated.items()))
