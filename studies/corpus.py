"""Training text: an endless seeded stream of filled templates, with a fixed tenth of the templates never shown."""

from collections.abc import Collection, Iterator
from random import Random

from llmgeom.prompts.domains import Domain, fill, members, sha256, shuffled, templates


def held_out(domain: str) -> frozenset[str]:
    """The template ids of a domain that no corpus contains: one of each ten consecutive numbers.

    Of ids ending in 001-010, 011-020 ... the one with the least sha256. Adding templates never changes which of the
    older ones are held out. Raises UserError for a domain that is not known.
    """
    ids = [t.id for member in members(Domain(domain).name) for t in templates(member)]
    return frozenset(name for name in ids if name == min(_decade(name), key=sha256))


def texts(domains: Collection[str], seed: int, exclude: Collection[str] = frozenset()) -> Iterator[str]:
    """Full texts of the templates of `domains` without end, each template once a round in a new random order.

    Left out: held-out templates and the ids in `exclude`. Raises UserError for a domain that is not known and
    ValueError where nothing is left, both at the call.
    """
    names = sorted({member for domain in domains for member in members(Domain(domain).name)})
    left_out = frozenset(exclude).union(*(held_out(name) for name in names))
    kept = [t for name in names for t in templates(name) if t.id not in left_out]
    if not kept:
        raise ValueError(f"no templates are left of the domains {names}; exclude fewer")
    return _stream(kept, Random(f"llmgeom/corpus/{seed}"))


def _stream(kept: list, rng: Random) -> Iterator[str]:
    while True:
        for template in shuffled(rng, kept):
            yield fill(template, rng)


def _decade(name: str) -> list[str]:
    domain, number = name.rsplit("-", 1)
    first = (int(number) - 1) // 10 * 10 + 1
    return [f"{domain}-{i:03d}" for i in range(first, first + 10)]
