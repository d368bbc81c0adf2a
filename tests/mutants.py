"""Breaks one line at a time and runs the tests that must notice: `python -m tests.mutants [PART OF A PATH...]`.

The lines stand in tests/mutants.toml. A file is restored after each run. Prints a table; exits with 1 where one is
missed.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = (
    "-m",
    "pytest",
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-m",
    "not (slow or browser or gpu or compile or soak)",
)


def mutants() -> list[dict[str, str]]:
    """file, line, broken and tests of each."""
    return tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]


def caught(mutant: dict[str, str]) -> bool:
    """Whether its tests fail with the line broken.

    Raises:
        RuntimeError: pytest ended for another reason than a failed test.
    """
    path = ROOT / mutant["file"]
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(text.replace(mutant["line"], mutant["broken"]), encoding="utf-8")
        ended = subprocess.run([sys.executable, *COMMAND, mutant["tests"]], cwd=ROOT, capture_output=True, text=True)
    finally:
        path.write_text(text, encoding="utf-8")
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{mutant['file']}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}")
    return ended.returncode == 1


def main(parts: list[str]) -> int:
    chosen = [one for one in mutants() if not parts or any(part in one["file"] for part in parts)]
    missed = 0
    for one in chosen:
        found = caught(one)
        missed += not found
        print(f"| {'caught' if found else 'MISSED'} | {one['file']} | `{one['broken']}` | {one['tests']} |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
