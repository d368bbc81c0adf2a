"""Records for pages, hostile strings, and a reader of what a page holds."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from llmgeom.record import Record
from llmgeom.result import Figure, Quantity, Result
from tests.made import made

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "{{7*7}} {% raw %} ${7*7} %{x}",
    '" \' onmouseover="alert(3)" <b>bold</b> &lt;i&gt; &amp;',
    "line\u2028para\u2029over\u202ereversed\u2066nul\x00esc\x1b[31m\ud800 two  spaces\nnew line",
    "<!-- --> ]]> <style>*{display:none}</style>",
)


def estimate(name, verdict="", value=0.412, spread=0.02, **other):
    """A plausible metric."""
    given = dict(
        low=value - spread, high=value + spread, method="jackknife over templates", null_low=0.11, null_high=0.19,
        null="untrained controls", draws_of=20, p=0.0476, n=75, clusters=38, verdict=verdict, centre=0.15,
    )  # fmt: skip
    return made(name, value, **(given | other))


def synthetic(seed=0, layers=6, heads=4, n=75, hostile=(), name="pocket:pythia", source="mixed"):
    """A record like a scan's: two probes with the three kinds of figure, one gap, prompts of three domains."""
    rng = np.random.default_rng(seed)
    entropy = np.sort(rng.gamma(3.0, 1.2, n))
    subjects = ("The capital of France", "Seven plus five", "A glass of water", "My oldest friend")
    text = [f"{subjects[i % 4]} is, as example {i} of {n} shows without much doubt," for i in range(n)]
    text[: len(hostile)] = hostile[:n]
    share = 0.15 + 0.3 * np.arange(layers) / max(layers - 1, 1) + rng.normal(0, 0.01, layers)
    null = 0.15 + np.stack([-0.04 * np.ones(layers), 0.04 + rng.random(layers) * 0.02], 1)
    scores = np.stack([entropy - entropy.mean(), 0.5 * np.sin(entropy) + rng.normal(0, 0.2, n), rng.random(n)], 1)
    every = scores + rng.normal(0, 0.3, (layers, n, 3)) * np.arange(layers)[::-1, None, None]  # the last: as they are
    geometry = Result(
        title="Value manifold",
        meaning="Values at the last position lie near a curve when one number orders them. The number may be entropy.",
        computed="PCA of standardised values over prompts; share of the first component.",
        null="Untrained copies of the model, 20 times.",
        failure_modes="One outlier token can carry the whole first component.",
        estimates=(
            estimate("PC1 share, last layer"),
            estimate("PC1+PC2 share", "open", 0.31, 0.2, why="n >= 120", claim="PC1+PC2 variance: it is large."),
        ),
        quantities={
            "share": Quantity(("layer",), "fraction", "share of variance of PC1", Figure("curve", band="share_null")),
            "share_null": Quantity(("layer", "bound"), "fraction", "95 % of 20 untrained controls"),
            "scores": Quantity(
                ("prompt", "component"),
                "standard units",
                "last layer, principal components",
                Figure("scatter", layers="every"),
            ),
            "every": Quantity(("layer", "prompt", "component"), "standard units", "the same at every layer"),
            "dropped": Quantity((), "count", "constant coordinates that were dropped"),
        },
        arrays={"share": share, "share_null": null, "scores": scores, "every": every, "dropped": np.asarray(3)},
        warnings=("the token 'is' has an outlier norm (9.1 times the median)", *hostile[:1]),
    )
    focus = Result(
        title="Attention focus",
        meaning="Low entropy means that a head looks at few tokens.",
        computed="Entropy of the final query's attention row.",
        null="Uniform attention over the prompt.",
        failure_modes="The first token is a sink.",
        estimates=(
            estimate("mean focus", "", -1.25, 0.1, unit="bits", p=0.001),
            estimate("focus change with depth", "", 0.003, 0.004, unit="bits", p=0.41),
            estimate("focus of the sink", "", 2.0, 0.0, unit="bits", p=1.0, null=""),
        ),
        quantities={
            "entropy": Quantity(("layer", "head"), "bits", "attention entropy", Figure("heatmap")),
            "change": Quantity(("head", "layer"), "bits", "minus uniform", Figure("heatmap")),
        },
        arrays={"entropy": rng.gamma(2.0, 1.0, (layers, heads)), "change": rng.normal(0, 1, (heads, layers))},
    )
    return Record(
        results={"manifold": geometry, "focus": focus},
        unmeasured={"sula": "the model has no tokenizer for digits", **({"odd": hostile[1]} if hostile else {})},
        prompts={
            "text": tuple(text),
            "template": tuple(f"template {i % 38}" for i in range(n)),
            "domain": tuple(("fact", "arithmetic", "story")[i % 3] for i in range(n)),
            "tags": tuple(("short",) if i % 2 else ("long", "rare") for i in range(n)),
            "entropy": tuple(float(v) for v in entropy),
            "tokens": tuple(int(v) for v in rng.integers(5, 30, n)),
            "pieces": tuple(("<s>", *re.findall(" ?[^ ]+| +", each)) for each in text),
            "next tokens": tuple(
                tuple((f" {word}", p / (i + 2)) for word, p in (("a", 0.5), ("the", 0.25), ("<b>", 0.1), ("is", 0.05)))
                for i in range(n)
            ),
        },
        subject={
            "name": name, "revision": "step143000", "weights": "sha256:9f2c41d07be1", "dtype": "float32",
            "attention": "llmgeom_sdpa", "device": "cpu", "family": "gpt_neox", "layers": layers, "heads": heads,
            "self_check": {"rows": 2.4e-7, "logits": 0.0, "layers seen once": True},
        },
        source={"name": source, "seed": 0, "domains": ("fact", "arithmetic", "story")},
        facts={
            "command": f"llmgeom scan --model {name} --domain {source} --seed 0", "claims": "sha256:11aa",
            "versions": {"llmgeom": "0.1.0", "torch": "2.11.0"}, "bos_added": True,
        },
        warnings=("a pocket model checks the instrument; it is no evidence about architectures", *hostile),
        run={"host": "secret-host", "seconds": 12.5},
    )  # fmt: skip


class Tree(HTMLParser):
    """Every element with its attributes, and the text outside scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.scripts, self._inside = [], "", {}, ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside:
            key = dict(self.elements[-1][1]).get("id", self._inside)
            self.scripts[key] = self.scripts.get(key, "") + data
        else:
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment came out of the record: {data!r}")


def shape(html):
    return [(tag, sorted(a), a.get("href"), a.get("src")) for tag, a in Tree(html).elements]


def odd_scatter():
    """A scatter that is not of the record's prompts, has one component, and names that look like markup."""
    quantities = {"odd": Quantity(("<b>token", "<i>"), "<u>", "<img src=x>", Figure("scatter", colour="<b>"))}
    arrays = {"odd": np.arange(10.0)[:, None]}
    record = synthetic()
    return replace(record, results={"a": replace(record.results["focus"], quantities=quantities, arrays=arrays)})
