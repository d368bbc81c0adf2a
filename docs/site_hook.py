"""What MkDocs needs to build the site from pages that GitHub shows as they are.

Links that leave docs/ (notebooks, CONTRIBUTING.md, a model's card) get a copy of the file under source/. The script
that draws diagrams is added where `make docs` brought it, so that the site needs no network.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MERMAID = ROOT / "build" / "mermaid.min.js"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def outside(page: Path, target: str) -> Path | None:
    """The linked file's path from the root, where it lies outside docs/."""
    path = Path(os.path.normpath(page.parent / target))
    return path.relative_to(ROOT) if not path.is_relative_to(ROOT / "docs") and path.is_file() else None


def on_files(files, config):
    """Add the outside files that pages link to, and the script of the diagrams."""
    from mkdocs.structure.files import File

    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    linked = {outside(page, target) for page in pages for target, _ in LINK.findall(page.read_text(encoding="utf-8"))}
    for path in filter(None, linked):
        files.append(File.generated(config, f"source/{path.as_posix()}", abs_src_path=str(ROOT / path)))
    if MERMAID.exists():
        files.append(File.generated(config, MERMAID.name, abs_src_path=str(MERMAID)))
        config["extra_javascript"].append(MERMAID.name)
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links that leave docs/ at the copies; in a copy, point links at the site's pages."""
    here = page.file.src_uri
    copied = here.startswith("source/")
    lies = ROOT / here.removeprefix("source/") if copied else ROOT / "docs" / here

    def point(link: re.Match) -> str:
        if copied:
            path = os.path.relpath(lies.parent / link[1], ROOT / "docs")
        elif (found := outside(lies, link[1])) is None:
            return link[0]
        else:
            path = f"source/{found.as_posix()}"
        return f"]({os.path.relpath(path, os.path.dirname(here) or '.')}{link[2] or ''})"

    return LINK.sub(point, markdown)
