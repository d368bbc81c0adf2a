"""The source as data: every module of the package, the lines it has, and which of ours it imports."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("llmgeom", "probes", "prompts", "wind_tunnels", "reports")


def dotted(path: Path) -> str:
    """The name under which a file is imported, e.g. probes/shared/rows.py as llmgeom.probes.shared.rows."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "llmgeom" else ("llmgeom", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: str) -> set[str]:
    """The modules of ours that a module imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(tree(MODULES[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}: relative import; imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in inner}
    return (names & set(MODULES)) - {module}


def wing(module: str) -> str:
    """The folder or file of llmgeom in which a module stands: `model` for llmgeom.model.capture."""
    return module.split(".")[1] if "." in module else "llmgeom"


def packages(module: str) -> set[str]:
    """The packages that a module imports, ours and others."""
    nodes = list(ast.walk(tree(MODULES[module])))
    names = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names}
