"""What the commands of one verb have in common: a sentence, a picture page and a table of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.commands import config, folders
from llmgeom.commands.output import Output, print_json
from llmgeom.errors import UserError
from llmgeom.files import make_folder, write_whole
from llmgeom.flags import output_flag
from llmgeom.progress import bar, first_word

if TYPE_CHECKING:
    from llmgeom.model.model import Model
    from llmgeom.verbs.reading import Reading


@dataclass(frozen=True)
class Shown:
    """What a command shows: sentences, pictures (a reading, and which of its arrays), lines for the terminal, and a
    figure that stands before the pictures."""

    sentences: Sequence[str]
    pictures: Sequence[tuple[Reading, str]]
    lines: Sequence[str] = ()
    figure: Any = None


@dataclass(frozen=True)
class PictureConfig(config.ChatConfig):
    """The options of a command that draws."""

    out: str | None = output_flag(None, "Folder of report.html and numbers.csv. [default: runs/MODEL-VERB-HASH]")


def run(settings: Any, output: Output, look: Callable[[Model], Shown]) -> int:
    """Load the model, look, print the sentences and lines, write the page and the numbers; the exit code.

    `settings` are of a command that reads one model, with `out`.
    """
    located = settings.locate()
    spec = settings.spec(located)
    folder = Path(settings.out or folders.run_folder(settings.model, located, settings.VERB, spec))
    if (folder / "record.json").exists():
        raise UserError(f"{folder} holds a run of another command; choose another --out")
    first_word(f"{settings.VERB} of {settings.model}: loading", output.silent)
    with bar(output.silent):
        seen = look(settings.subject(located))
    make_folder(folder)
    write_whole(folder / "report.html", page(seen).encode())
    frames = {id(reading): reading.frame() for reading, _ in seen.pictures}
    for i, frame in enumerate(frames.values()):
        name = "numbers.csv" if not i else f"numbers-{i + 1}.csv"
        write_whole(folder / name, frame.to_csv(index=False).encode())
    if output.json:
        tables = [frame.to_dict("records") for frame in frames.values()]
        print_json({"sentences": list(seen.sentences), "numbers": tables, "run_dir": str(folder)})
    else:
        click.echo("\n".join([*seen.sentences, *seen.lines, f"page: {folder / 'report.html'}"]))
    return 0


def page(seen: Shown) -> str:
    """One file that opens from disk: title, sentences, pictures, and every number in a table under them."""
    from markupsafe import Markup

    from llmgeom.reports.drawing import svg
    from llmgeom.reports.packing import environment, file_text

    readings = {id(reading): reading for reading, _ in seen.pictures}
    title = next(iter(readings.values())).title
    figures = [("", seen.figure)] if seen.figure is not None else []
    for reading, name in seen.pictures:
        figures.append((name if reading.title == title else f"{reading.title}: {name}", reading.plot(name)))
    pictures: list[tuple[str, Any, Any]] = []
    for named, figure in figures:
        figure.update_layout(title_text="", margin_t=10)
        html = figure.to_html(
            include_plotlyjs=not pictures, full_html=False, config={"displaylogo": False, "responsive": True}
        )
        spec = {"data": [each.to_plotly_json() for each in figure.data], "layout": figure.layout.to_plotly_json()}
        pictures.append((named, Markup(html), svg(spec, named or title)))
    tables = [
        reading.frame().to_html(index=False, border=0, float_format="{:.4g}".format) for reading in readings.values()
    ]
    page_of, css = environment().get_template("verb.html"), Markup(file_text("page.css"))
    shown = list(map(Markup, tables))
    return page_of.render(title=title, sentences=seen.sentences, pictures=pictures, tables=shown, css=css)
