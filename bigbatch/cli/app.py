"""The commands, their options, and how they end."""

import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import __version__
from ..core.errors import BigBatchError, BigBatchWarning, OptionError
from ..core.json_values import json_line
from . import errors
from .config import FLAGS, VERIFY_FLAGS, check_same_data, merged, read_toml
from .errors import TaskRaisedError
from .names import check_name, shown
from .run.ranks import here, launch_of
from .task import load_task

app = typer.Typer(
    help="Train with the batch you want on the memory you have, and get exactly the same gradient.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def run() -> None:
    """Runs the command. Every failure becomes a sentence and an exit code."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    sys.stderr = _Lasting(sys.stderr)
    try:
        is_one_of_several = here().num > 1
    except BigBatchError as error:
        print(f"bigbatch: {error}", file=sys.stderr)
        sys.exit(errors.BAD_INPUT)
    if is_one_of_several:  # DDP would warn that all parameters are used; torch reads this when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app(standalone_mode=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        sys.exit(errors.CLOSED_PIPE)


class _Lasting:
    """An output stream that drops text it cannot write (a closed pipe, a full disk), so that the run continues."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """Shows our own warnings as sentences, without a line of code."""
    if not issubclass(category, BigBatchWarning):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
    elif here().is_first:
        print(f"bigbatch: {shown(str(message))}", file=sys.stderr)


def _ends_with_code(command: Callable[..., int | None]) -> Callable[..., None]:
    """Ends the process with the exit code that the command returns, or with an error message and its exit code."""

    @wraps(command)
    def run_command(*args: Any, **options: Any) -> None:
        try:
            code = command(*args, **options)
        except BigBatchError as error:
            code = _say(str(error), errors.BAD_INPUT)
        except TaskRaisedError as error:
            code = _say(_task_traceback(error.error), errors.TASK_RAISED, prefix="")
        except BrokenPipeError:
            raise
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            remedy = "make sure that the folder is writable and has space, or pass another --out"
            code = _say(f"{error.strerror or error}{where}: nothing was overwritten; {remedy}", errors.NOT_WRITTEN)
        except KeyboardInterrupt:
            code = _say("interrupted", errors.INTERRUPTED) if here().is_first else errors.INTERRUPTED
        except Exception:
            if here().num == 1:
                raise
            code = _say(traceback.format_exc(), errors.TASK_RAISED)
        here().leave(code or 0)
        raise typer.Exit(code or 0)

    return run_command


def _say(text: str, code: int, prefix: str = "bigbatch: ") -> int:
    """Prints an error on the rank that raised it, and returns the exit code."""
    ranks = here()
    if (error := sys.exception()) is not None:
        ranks.record(error)
    text = shown(text)
    print(f"bigbatch (rank {ranks.rank}): {text}" if ranks.num > 1 else f"{prefix}{text}", file=sys.stderr)
    return code


def _task_traceback(error: BaseException) -> str:
    """The traceback without bigbatch's own frames."""
    package = str(Path(__file__).parents[1])
    tasks = os.path.join(package, "tasks")

    def is_of_task(frame: traceback.FrameSummary) -> bool:
        is_ours = frame.filename.startswith(package) and not frame.filename.startswith(tasks)
        return not is_ours and not frame.filename.startswith("<frozen importlib")

    told = traceback.TracebackException.from_exception(error)
    told.stack[:] = [frame for frame in told.stack if is_of_task(frame)] or told.stack
    told.__cause__ = told.__context__ = None
    return "".join(told.format()).rstrip()


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"bigbatch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Gradient accumulation that is exact: train, verify, report."""


def _takes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces the **flags of a command by the flags that `Config` declares under these names."""

    def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
        task, *own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = []
        for name in names:
            about = FLAGS[name].metadata
            kind: Any = Annotated[about["kind"] | None, typer.Option(help=about["help"])]
            flags.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
        command.__signature__ = inspect.Signature([task, *flags, *own])  # type: ignore[attr-defined]
        return command

    return with_flags


_TaskName = Annotated[str, typer.Argument(help="A Python file, or digits, digits-batchnorm or text.")]


@app.command()
@_ends_with_code
@_takes(*FLAGS)
def train(
    task: _TaskName,
    *,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/TASK-TIME by default.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to continue.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with these options; flags win.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    **flags: Any,
) -> int | None:
    """Train a task in micro-batches, compare it with the full batch, and write a run folder."""
    from .run.display import Screen
    from .run.folder import CONFIG, RunFolder
    from .run.train import train as run_training

    if resume is not None and (out is not None or config is not None):
        raise OptionError(
            f"--resume {resume} continues in its own folder with its own options: leave out --out and --config"
        )
    for what, path in (("--out", out), ("--resume", resume), ("--config", config)):
        check_name(what, path or "")
    framework = flags.pop("framework")
    file = read_toml(config) if config is not None else {}
    if resume is not None:
        RunFolder(resume).check_own()
        file = read_toml(resume / CONFIG, "pass --resume the folder of a run")
        check_same_data(flags, file)
    out = out or (Path(file.pop("out")) if "out" in file else None)
    quiet, as_json = quiet or file.pop("quiet", False), as_json or file.pop("json", False)
    loaded = load_task(task, framework or (file.get("framework") if not Path(task).suffix else None))
    chosen = merged(loaded, flags, file)
    folder = resume or out or Path("runs") / f"{loaded.name}-{datetime.now():%Y%m%d-%H%M%S}"
    ranks = launch_of(loaded)
    screen = Screen(is_quiet=quiet or as_json or not ranks.is_first)
    with redirect_stdout(_Lasting(sys.stdout)):  # a task may print
        summary, code = run_training(loaded, chosen, folder, screen, ranks, is_resumed=resume is not None)
    if summary is None:
        return None
    screen.summary(summary, folder)
    if summary.status != "finished":
        screen.note(f"{summary.status}: to continue, bigbatch train {task} --resume {folder}")
    if as_json:
        print(json_line({**asdict(summary), "folder": str(folder)}), end="")
    return code


@app.command()
@_ends_with_code
@_takes(*VERIFY_FLAGS)
def verify(
    task: _TaskName,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    **flags: Any,
) -> int | None:
    """Compare the accumulated gradient of one batch with that of the full batch; exit code 1 if they differ."""
    from .engines.engine import make_engine

    if (num := here().num) > 1:
        raise OptionError(f"torchrun started {num} processes but bigbatch verify needs one: run it without torchrun")
    loaded = load_task(task, flags.pop("framework"))
    chosen = merged(loaded, flags, {})
    batch = next(loaded.epoch(batch_size=chosen.batch_size, epoch=0, seed=chosen.seed), None)
    if batch is None:
        raise OptionError(f"batches() of {loaded.name} gave 0 batches: there is nothing to verify")
    verification = make_engine(loaded, chosen, here()).verify(batch)
    if as_json:
        print(json_line(asdict(verification)), end="")
    else:
        print(shown(f"{loaded.name}: batch of {chosen.batch_size} in micro-batches of {chosen.micro_batch_size}"))
        print(shown(str(verification)))
    return None if verification.is_exact else errors.NOT_EXACT


@app.command()
@_ends_with_code
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one page about one or several run folders."""
    from .report.page import write_report

    for what, path in (*(("the run folder", run) for run in runs), ("--out", out)):
        check_name(what, path)
    write_report(runs, out)
    print(shown(str(out)))


@app.command()
@_ends_with_code
def doctor() -> None:
    """Show what is installed, which devices can be used, and what is missing."""
    from .doctor import examine

    examine(Console())
