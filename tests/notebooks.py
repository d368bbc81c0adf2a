"""notebooks/*.py to notebooks/*.ipynb with outputs, each figure as an SVG, too: `make notebooks`, about ten minutes.

`python -m tests.notebooks NAME ...` writes some of them. The figures need Chromium.
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from plotly.graph_objects import Figure

FOLDER = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
PLOTLY, SVG = "application/vnd.plotly.v1+json", "image/svg+xml"
# Stands first in every notebook, and in no script: it is a command to IPython. A hosted notebook lies in no clone.
INSTALL = """\
from importlib.util import find_spec
from pathlib import Path

if find_spec("llmgeom") is None:
    source = ".." if Path("../pyproject.toml").exists() else "llmgeom"
    %pip install --quiet {source}"""


class Here(AsyncKernelManager):
    """The kernel of this very Python, whatever is registered on the machine, or nothing."""

    kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )


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
    cells.insert(1, new_code_cell(INSTALL, id="install"))
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})


def executed(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run a notebook in a folder; its cells then hold their outputs."""
    client = NotebookClient(
        notebook,
        kernel_manager_class=Here,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        timeout=1200,
    )
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")}
    client.execute(env={**os.environ, **quiet})


def code_hash(notebook: nbformat.NotebookNode) -> str:
    """The SHA-256 of all code; a stored notebook names the code that made its outputs."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def drawn(data: Mapping[str, object]) -> dict[str, object]:
    """The bundle of an output without Plotly's script, and with a picture for readers that run none."""
    if PLOTLY not in data:
        return dict(data)
    spec = data[PLOTLY]
    picture = Figure(spec["data"], spec["layout"]).to_image("svg", width=760).decode()
    return {PLOTLY: spec, SVG: picture}


def written(source: str, folder: Path) -> str:
    """The file: the notebook of a script after a run in the folder."""
    notebook = converted(source)
    executed(notebook, folder)
    for cell in notebook.cells:
        # On standard error stand only remarks of packages, e.g. on widgets that are missing here.
        cell.get("outputs", [])[:] = [out for out in cell.get("outputs", []) if out.get("name") != "stderr"]
        for out in cell.get("outputs", []):
            if "data" in out:
                out.data = nbformat.from_dict(drawn(out.data))
    notebook.metadata["code"] = code_hash(notebook)
    return nbformat.writes(notebook).replace(f"{folder}/", "") + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem in (sys.argv[1:] or [path.stem]):
            with tempfile.TemporaryDirectory() as folder:
                text = written(path.read_text(encoding="utf-8"), Path(folder))
            path.with_suffix(".ipynb").write_text(text, encoding="utf-8")
            print(f"{path.stem}: {len(text) / 1000:.0f} kB")
