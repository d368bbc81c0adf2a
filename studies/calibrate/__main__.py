"""Train and read the bench, print the table, and store it in studies/calibrate/table.json.

python -m studies.calibrate [FOLDER]             about 50 CPU minutes; a stopped run continues
python -m studies.calibrate FOLDER --finished    only the table, from the cells that are finished
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from studies.calibrate import readings
from studies.calibrate.table import calibration, lines

STORED = Path(__file__).with_name("table.json")


def main(words: list[str], stored: Path = STORED) -> None:
    """Make what is missing; print and store the table."""
    parser = argparse.ArgumentParser(prog="python -m studies.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="runs/calibrate", type=Path)
    parser.add_argument("--finished", action="store_true", help="train nothing: the table of the finished cells")
    asked = parser.parse_args(words)
    table = calibration(readings.finished(asked.folder) if asked.finished else readings.readings(asked.folder))
    rows = ",\n  ".join(json.dumps(row) for row in table["rows"])
    stored.write_text(f'{{"bench": {json.dumps(table["bench"])},\n "rows": [\n  {rows}\n ]}}\n', encoding="utf-8")
    print("\n".join(lines(table)))


if __name__ == "__main__":
    main(sys.argv[1:])
