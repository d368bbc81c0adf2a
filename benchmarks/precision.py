"""How far each claim's number moves from float32 to bfloat16, in parts of the claim's effect.

    python benchmarks/precision.py MODEL ...

The 75 mixed prompts of a default scan, chosen by the entropies of the model in bfloat16, read by the same weights in
both precisions. Controls do not enter: it is the value that moves. bfloat16 could be the default where every part is
below a tenth.
"""

import os
import sys

import llmgeom
from llmgeom import claims, probes
from llmgeom.cache.shards import captures_folder
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import candidates, stratify
from llmgeom.run import run_probes


def values(model: str, dtype: str, prompts=None):
    """(prompts, {(probe, metric): estimate}) of the model's own pass; the prompts are chosen unless given."""
    subject, store = llmgeom.load(model, dtype=dtype), str(captures_folder())
    if prompts is None:
        pool = Domain("mixed").sample(candidates(None), 0)
        prompts = stratify(pool, subject.entropy(pool, store=store))
    every = {name: probe for name, probe in probes.known(probes.names()).items() if name not in probes.left_out()}
    record = run_probes(subject, prompts, every, controls=0, store=store)
    return prompts, {(probe, h.name): h for probe, m in record.results.items() for h in m.estimates}


def rows(model: str):
    """A row of Markdown for each claim."""
    prompts, low = values(model, "bfloat16")
    _, full = values(model, "float32", prompts)
    claimed = {key for key, entry in claims.entries().items() if entry.claim}
    for key in sorted(full.keys() & low.keys() & claimed):
        a, b = full[key], low[key]
        name = key[1].replace("|", "\\|")
        numbers = (f"{a.value:.3f}", f"{b.value:.3f}", f"{a.effect:g}", f"{abs(a.value - b.value) / a.effect:.2f}")
        yield f"| {' | '.join((os.path.basename(model), name, *numbers))} |"


if __name__ == "__main__":
    print("| model | claim | float32 | bfloat16 | effect | difference, parts of it |\n|---|---|---|---|---|---|")
    for model in sys.argv[1:]:
        for row in rows(model):
            print(row, flush=True)
