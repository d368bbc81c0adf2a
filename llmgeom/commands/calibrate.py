"""The whole of `llmgeom calibrate`: which numbers tell models that infer from models trained as long?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmgeom.commands.config import Config, check_folder, command, keep
from llmgeom.commands.output import Output, show_rows
from llmgeom.files import digest, write_whole
from llmgeom.flags import flag, output_flag

if TYPE_CHECKING:
    from llmgeom.bench.report import Printed


@dataclass(frozen=True)
class RunConfig(Config):
    """The options of `llmgeom calibrate`."""

    VERB: ClassVar[str] = "calibrate"

    finished: bool = flag(False, "Train nothing: make the table from the finished cells, and name them.")
    out: str | None = output_flag(None, "Run folder; a stopped run continues in it. [default: runs/calibrate-HASH]")


@command(RunConfig, Output, examples=["llmgeom calibrate"])
def main(settings: RunConfig, output: Output) -> int:
    """Measure which numbers separate models at the exact posterior from others.

    Every probe reads small models: trained to the posterior, and of seven kinds that are not. It takes about
    50 CPU minutes. Its table ships with the code.
    """
    return show_rows(perform, settings, output)


def perform(settings: RunConfig) -> tuple[Path, Printed]:
    """The whole of `llmgeom calibrate`: train and read what is missing, make the table and its page; (folder, table).

    `calibration.json` in the folder is the table that ships as llmgeom/calibrated.json.
    """
    from llmgeom.bench.cells import recipes
    from llmgeom.bench.readings import finished, readings
    from llmgeom.bench.report import Printed, record
    from llmgeom.bench.table import calibration

    started = time.time()
    spec = digest({name: asdict(run) for name, run in recipes().items()})
    out = Path(settings.out) if settings.out else Path("runs") / f"calibrate-{spec[:8]}"
    check_folder(out, spec)
    printed = Printed(calibration(finished(out) if settings.finished else readings(out)))
    text = json.dumps(printed.to_dict(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_whole(out / "calibration.json", text.encode())
    keep(record(printed, started, spec), out)
    return out, printed
