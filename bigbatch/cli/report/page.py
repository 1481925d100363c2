"""One page about one or several runs: sentences, figures, plots. It needs no other file and no network."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...core.checkpoint.files import write_whole
from .curves import make_plots
from .run import Run, read_run
from .tables import FACTS, configuration, figures, verifications
from .text import headline, listed, remarks


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Writes the page about these run folders, whole or not at all."""
    places = {folder.resolve(): folder for folder in folders}  # the same folder twice is one run
    page = _render(_names_of(list(places)), [read_run(folder) for folder in places.values()])
    write_whole(path, page.encode(errors="replace"))


def _names_of(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many of its parents as needed to make the names different."""
    depths = range(1, max(len(folder.parts) for folder in folders) + 1)
    named = ([str(Path(*folder.parts[-depth:])) for folder in folders] for depth in depths)
    return next(names for names in named if len(set(names)) == len(folders))


def _render(names: Sequence[str], runs: Sequence[Run]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    plots = list(make_plots(names, runs))
    return environment.get_template("report.html.jinja").render(
        names=names,
        runs=runs,
        title=listed(list(dict.fromkeys(f"{run.summary.task} on {run.summary.framework}" for run in runs))),
        headlines=[headline(run.summary) for run in runs],
        remarks=[remarks(run) for run in runs],
        facts=FACTS,
        figures=figures(names, runs),
        plots=[plot for plot in plots if plot.drawing],
        not_drawn=[plot for plot in plots if not plot.drawing],
        verifications=verifications(names, runs),
        configuration=configuration(names, runs),
    )
