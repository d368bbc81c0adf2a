"""Copy probes/texts/NAME.md into docs/probes/NAME.md, between two marks: `python docs/texts.py`.

The page of a run and the docs say the same; what stands outside the marks is written by hand.
"""

import re
from pathlib import Path

PAGES = Path(__file__).parent / "probes"
TEXTS = Path(__file__).parent.parent / "probes" / "texts"
START, END = "<!-- From probes/texts; change it there and run docs/texts.py. -->\n\n", "\n<!-- End of the copy. -->\n"


def updated(page: str, text: str) -> str:
    """The page with the text between its marks, every heading one level lower."""
    before, rest = page.split(START)
    return before + START + re.sub("^#", "##", text, flags=re.MULTILINE) + END + rest.split(END)[1]


if __name__ == "__main__":
    for path in PAGES.glob("*.md"):
        text = TEXTS / path.name
        if text.exists():
            page = path.read_text(encoding="utf-8")
            path.write_text(updated(page, text.read_text(encoding="utf-8")), encoding="utf-8")
