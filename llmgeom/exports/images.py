"""Every figure of a record's page as an image, drawn by a browser through kaleido."""

from __future__ import annotations

import tempfile
from pathlib import Path

from llmgeom.errors import UserError, first_line
from llmgeom.files import write_whole
from llmgeom.optional import NO_BROWSER, browser, imported
from llmgeom.record import Record
from llmgeom.reports import figures

WIDTH, SCALE = 720, 2  # pixels of the page's column; a png has twice as many


def write(record: Record, form: str, out: Path) -> list[str]:
    """PROBE.QUANTITY.FORM in the folder `out`. Raises UserError: no kaleido, no browser, or one that fails."""
    kaleido = imported("kaleido")
    if browser() is None:
        raise UserError(f"export {form} draws with a browser: {NO_BROWSER}")
    drawn = {f"{probe}.{name}": one for probe, some in figures(record).items() for name, one in some.items()}
    if not drawn:
        raise UserError(f"{record.title} has no figures; nothing was written")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        opts = {"format": form, "width": WIDTH, "scale": SCALE if form == "png" else 1}
        specs = [
            {
                "fig": figure.to_dict(),
                "path": Path(folder) / f"{name}.{form}",
                "opts": {**opts, "height": figure.layout.template.layout.height or 420},
            }
            for name, figure in drawn.items()
        ]
        try:
            # MathJax would be fetched from the network, and no figure of ours has a formula.
            kaleido.write_fig_from_object_sync(specs, kopts={"mathjax": False})
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"the browser did not draw ({said}); {NO_BROWSER}") from error
        for name in drawn:
            write_whole(out / f"{name}.{form}", (Path(folder) / f"{name}.{form}").read_bytes())
    return [f"{len(drawn)} images"]
