"""Every template of the domains, its fillings, and the trigrams that texts share."""

from random import Random

import numpy as np
from scipy.sparse import csr_array

from llmgeom.prompts.domains import fill, known, templates

FILES = [name for name in known() if name != "mixed"]
EVERY = [template for name in FILES for template in templates(name)]


def fillings(template, n=8, cut=None):
    return [fill(template, Random(f"test/{seed}"), cut) for seed in range(n)]


def trigrams(text):
    """Words by walking the characters, trigrams as joined strings."""
    spaced = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower())
    words = spaced.split()
    return {" ".join(three) for three in zip(words, words[1:], words[2:], strict=False)} or {" ".join(words)}


def most_alike(texts):
    """The largest share of its trigrams that a text has in common with another, and the two; of all pairs."""
    grams = [trigrams(text) for text in texts]
    place = {gram: i for i, gram in enumerate(set().union(*grams))}
    row, column = np.repeat(np.arange(len(grams)), [*map(len, grams)]), [place[gram] for one in grams for gram in one]
    held = csr_array((np.ones(len(column)), (row, column)))
    common = (held @ held.T).toarray()  # [text text] trigrams that both have
    size = common.diagonal()
    share = np.triu(common / np.minimum.outer(size, size), 1)
    first, second = np.unravel_index(share.argmax(), share.shape)
    return share.max(), texts[first], texts[second]
