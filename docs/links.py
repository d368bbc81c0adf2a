"""Check a built site: `python docs/links.py build/site` exits 1 and names every internal link that leads nowhere."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, and what it links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Read id, name, href and src."""
        named = dict(attrs)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        self.targets += [named[key] for key in ("href", "src") if named.get(key)]


def broken(site: Path) -> list[str]:
    """Every link of every page to a file or an anchor that the site lacks, and every script or image from elsewhere."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            lacks = there in pages and parts.fragment and unquote(parts.fragment) not in pages[there].anchors
            if not there.exists() or (lacks and not parts.fragment.startswith("__")):
                wrong.append(f"{path.relative_to(site.resolve())}: {target}")
    return wrong


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]))
    print("\n".join(found) or "every internal link leads somewhere")
    raise SystemExit(bool(found))
