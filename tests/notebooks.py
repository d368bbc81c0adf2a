"""notebooks/*.py to notebooks/*.ipynb, without outputs: `python -m tests.notebooks`, or `make notebooks`."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def converted(source: str) -> nbformat.NotebookNode:
    """`# %%` opens a cell of code, `# %% [markdown]` one of text, in comments. Raises ValueError for anything else."""
    before, *parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    if before.strip():
        raise ValueError(f"text before the first cell: {before.strip()!r}; open it with '# %%'")
    cells = []
    for place, (kind, body) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        # Ids are counted, not drawn: the same source gives the same bytes.
        lines, named = body.strip().splitlines(), {"id": f"cell-{place}"}
        if kind == "":
            cells.append(new_code_cell("\n".join(lines), **named))
        elif kind == " [markdown]" and all(re.match("# |#$", line) for line in lines):
            cells.append(new_markdown_cell("\n".join(line[2:] for line in lines), **named))
        else:
            raise ValueError(f"cell {place}, '# %%{kind}': expected '# %%', or '# %% [markdown]' with comments only")
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})


def written(source: str) -> str:
    """The file, byte for byte."""
    return nbformat.writes(converted(source)) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.py")):
        path.with_suffix(".ipynb").write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
