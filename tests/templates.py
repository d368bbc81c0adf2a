"""Every template of the domains, its fillings, and trigrams of a text."""

from random import Random

from llmgeom.prompts.domains import fill, known, templates

FILES = [name for name in known() if name != "mixed"]
EVERY = [template for name in FILES for template in templates(name)]


def fillings(template, n=8, cut=None):
    return [fill(template, Random(f"test/{seed}"), cut) for seed in range(n)]


def trigram_counts(text):
    """Another way to the same number: words by walking the characters, trigrams as joined strings."""
    spaced = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower())
    words = spaced.split()
    return {" ".join(three) for three in zip(words, words[1:], words[2:], strict=False)} or {" ".join(words)}
