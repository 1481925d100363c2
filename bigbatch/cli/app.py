"""The commands, their options, and how they end."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from .. import __version__
from ..core.errors import BigBatchError, BigBatchWarning, OptionError
from ..core.text import to_json
from . import errors
from .errors import TaskRaisedError
from .run.ranks import here, ranks_of, refuse_several

app = typer.Typer(
    help="Train with the batch you want on the memory you have, and get exactly the same gradient.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def run() -> None:
    """Runs the command, and makes of everything that goes wrong a sentence and an exit code."""
    warnings.showwarning = show_warning
    if here().num > 1:  # read when torch is imported: DDP warns where all parameters are used, as they mostly are
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app(standalone_mode=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        sys.exit(errors.CLOSED_PIPE)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Ours as sentences, without a line of code."""
    if issubclass(category, BigBatchWarning):
        if here().is_first:
            print(f"bigbatch: {message}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def told(command: Callable[..., int | None]) -> Callable[..., None]:
    """A command whose errors are sentences; what it returns is the exit code."""

    @wraps(command)
    def telling(*args: Any, **options: Any) -> None:
        try:
            code = command(*args, **options)
        except BigBatchError as error:
            code = say(str(error), errors.BAD_INPUT)
        except TaskRaisedError as error:
            code = say(own_traceback(error.error), errors.TASK_RAISED, prefix="")
        except BrokenPipeError:
            raise
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            code = say(f"{error.strerror or error}{where}: nothing was overwritten; see that the folder can be written "
                       "to and has space, or pass another --out", errors.NOT_WRITTEN)  # fmt: skip
        except KeyboardInterrupt:
            code = say("interrupted", errors.INTERRUPTED) if here().is_first else errors.INTERRUPTED
        except Exception:
            if here().num == 1:
                raise
            code = say(traceback.format_exc(), errors.TASK_RAISED)
        here().leave(code or 0)
        raise typer.Exit(code or 0)

    return telling


def say(text: str, code: int, prefix: str = "bigbatch: ") -> int:
    ranks = here()
    error = sys.exception()
    ranks.let_others_speak(error)
    ranks.record(error)
    print(f"bigbatch (rank {ranks.rank}): {text}" if ranks.num > 1 else f"{prefix}{text}", file=sys.stderr)
    return code


def own_traceback(error: BaseException) -> str:
    """The traceback without our frames."""
    ours = str(Path(__file__).parents[1])
    found = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in found.stack if not is_ours(frame.filename, ours)]
    if frames:
        found.stack[:] = frames
    found.__cause__ = found.__context__ = None
    return "".join(found.format()).rstrip()


def is_ours(filename: str, ours: str) -> bool:
    is_task = filename.startswith(os.path.join(ours, "tasks"))
    return (filename.startswith(ours) and not is_task) or filename.startswith("<frozen importlib")


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"bigbatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Gradient accumulation that is exact: train, verify, report."""


TaskName = Annotated[str, typer.Argument(help="A Python file, or digits, digits-batchnorm or text.")]
Framework = Annotated[str | None, typer.Option(help="torch, tensorflow, keras or jax; for built-in tasks.")]
BatchSize = Annotated[int | None, typer.Option(help="What the optimizer sees.")]
MicroBatchSize = Annotated[str | None, typer.Option(help="What is in memory at one time.")]
Seed = Annotated[int | None, typer.Option(help="For weights, data and dropout.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]


@app.command()
@told
def train(
    task: TaskName,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    epochs: Annotated[int | None, typer.Option(help="How often to go through the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps to make; instead of --epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    lr_scaling: Annotated[
        str | None, typer.Option(help="none, linear or sqrt: how the rate follows --batch-size / --base-batch-size.")
    ] = None,
    base_batch_size: Annotated[int | None, typer.Option(help="The batch that --lr is meant for.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps over which the rate rises to --lr.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine or linear, over the whole run.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="The largest norm of a batch's gradient.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, bf16 or fp16.")] = None,
    on_nonfinite: Annotated[
        str | None, typer.Option(help="skip, raise or stop: what a gradient that is not finite does.")
    ] = None,
    checkpoint_every: Annotated[str | None, typer.Option(help="Steps, such as 100, or a time, such as 10min.")] = None,
    framework: Framework = None,
    seed: Seed = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/TASK-TIME without it.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to go on with.")] = None,
    compare: Annotated[bool | None, typer.Option(help="Train with the full batch too, and compare.")] = None,
    tensorboard: Annotated[bool | None, typer.Option(help="Write TensorBoard's event files too.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with these options; flags win.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int | None:
    """Train a task in micro-batches, compare with the full batch, and leave a run folder."""
    from . import config as configs
    from .run.display import Screen
    from .run.folder import CONFIG
    from .run.train import train as run_training
    from .task import load_task

    if resume is not None and (out is not None or config is not None):
        raise OptionError(
            f"--resume {resume} goes on in its own folder with its own options: leave out --out and --config"
        )
    flags = {
        "batch_size": batch_size, "micro_batch_size": whole(micro_batch_size), "epochs": epochs, "steps": steps,
        "lr": lr, "lr_scaling": lr_scaling, "base_batch_size": base_batch_size, "warmup_steps": warmup_steps,
        "schedule": schedule, "clip_norm": clip_norm, "precision": precision, "on_nonfinite": on_nonfinite,
        "checkpoint_every": checkpoint_every, "seed": seed, "device": device, "compare": compare,
        "tensorboard": tensorboard,
    }  # fmt: skip
    file = configs.read_toml(config) if config is not None else {}
    if resume is not None:
        file = configs.read_toml(resume / CONFIG, "pass --resume the folder of a run")
        configs.check_same_data(flags, file)
    out = out or (Path(file.pop("out")) if "out" in file else None)
    quiet, as_json = quiet or bool(file.pop("quiet", False)), as_json or bool(file.pop("json", False))
    configs.check_given(task, {**file, **{name: value for name, value in flags.items() if value is not None}})
    framework = framework or (file.get("framework") if not Path(task).suffix else None)
    found = load_task(task, framework)
    chosen = configs.merged(found, flags, file)
    folder = resume or out or Path("runs") / f"{found.name}-{datetime.now():%Y%m%d-%H%M%S}"
    ranks = ranks_of(found)
    screen = Screen(is_quiet=quiet or as_json or not ranks.is_first)
    summary, code = run_training(found, chosen, folder, screen, ranks, is_resumed=resume is not None)
    if summary is None:
        return None
    screen.table(summary, str(folder))
    if summary["status"] != "finished":
        screen.note(f"{summary['status']}: to go on, bigbatch train {task} --resume {folder}")
    if as_json:
        print(json.dumps(to_json({**summary, "folder": str(folder)}), allow_nan=False))
    return code


@app.command()
@told
def verify(
    task: TaskName,
    micro_batch_size: MicroBatchSize = None,
    batch_size: BatchSize = None,
    framework: Framework = None,
    seed: Seed = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int | None:
    """Compare the gradient of one batch, accumulated and whole; exit code 1 if they differ."""
    from . import config as configs
    from .engines.engine import make_engine
    from .task import load_task
    from .verification import as_json as verification_as_json
    from .verification import as_table

    refuse_several("verify")
    found = load_task(task, framework)
    flags = {
        "batch_size": batch_size, "micro_batch_size": whole(micro_batch_size), "seed": seed, "device": device,
    }  # fmt: skip
    chosen = configs.merged(found, flags, {})
    batch = next(found.epoch(batch_size=chosen.batch_size, epoch=0, seed=chosen.seed), None)
    if batch is None:
        raise OptionError(f"batches() of {found.name} gave 0 batches: there is nothing to verify")
    verification = make_engine(found, chosen).verify(batch)
    if as_json:
        print(json.dumps(to_json(verification_as_json(verification)), allow_nan=False))
    else:
        console = Console()
        console.print(as_table(verification, found.name, chosen))
        for cause in verification.causes:
            console.print(f"- {cause}", markup=False, highlight=False)
    return None if verification.is_exact else errors.NOT_EXACT


@app.command()
@told
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one page of one or several run folders."""
    from .report.page import write_report

    refuse_several("report")
    write_report(runs, out)
    print(out)


@app.command()
@told
def doctor() -> None:
    """Say what is installed, which devices can be used, and what is missing."""
    from .doctor import examine

    refuse_several("doctor")
    examine(Console())


def whole(text: str | None) -> int | str | None:
    """A number, if it is one: `auto` is checked later, with a sentence of its own."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return text
