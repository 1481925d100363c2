"""The options of a run, each declared once. Flags win over the TOML file, the file over the task's own defaults."""

import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import tomli_w

from ..core.checkpoint.schedule import Every
from ..core.errors import OptionError
from ..core.nonfinite import OnNonFinite
from ..core.options import check_choice, positive
from .names import check_name
from .task import FRAMEWORKS, Task

_Check = Callable[[str, Any], Any]


def _flag(
    default: Any,
    text: str,
    check: _Check = lambda name, value: value,
    *,
    kind: type = str,
    passed_on: Mapping[str, str] | None = None,
    read_by: tuple[str, ...] = (),
) -> Any:
    """An option of `bigbatch train`.

    Args:
        default: Its value if neither a flag, nor a file, nor the task sets it.
        text: What `--help` says.
        check: Raises OptionError if the value is wrong; it gets the name of the flag and the value.
        kind: What the flag is parsed as.
        passed_on: The name of the option in each framework whose accumulator or optimizer takes it:
            `Config.for_framework` returns it under that name.
        read_by: The frameworks whose engine reads the option itself. A framework that is in neither refuses the
            option; without both, it is for all frameworks.
    """
    passed_on = passed_on or {}
    takers = (*passed_on, *read_by) or FRAMEWORKS
    metadata = {"help": text, "check": check, "kind": kind, "passed_on": passed_on, "takers": takers}
    return field(default=default, metadata=metadata)


def _one_of(*choices: str) -> _Check:
    return lambda name, value: check_choice(name, value, choices)


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, not {value!r}")


def _text(name: str, value: Any) -> None:
    if value is not None:
        if not isinstance(value, str):
            raise OptionError(f"{name} must be text, not {value!r}")
        check_name(name, value)


def _above_zero(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= sys.float_info.max):  # a whole number may be larger
        raise OptionError(f"{name} must be a number above zero and up to 1.8e308, not {_brief(value)}")


def _size(name: str, value: Any) -> None:
    if positive(name, value) > sys.maxsize:
        raise OptionError(f"{name} is {_brief(value)}: pass {sys.maxsize} or less")


def _size_or_none(name: str, value: Any) -> None:
    if value is not None:
        _size(name, value)


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise OptionError(f"{name} must be a whole number, 0 or greater, not {_brief(value)}")


def _interval(name: str, value: Any) -> None:
    try:
        Every(value)
    except OptionError as error:
        raise OptionError(f"{name} {_brief(value)}: {error}") from error


def _brief(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class Config:
    """The options of `bigbatch train`.

    To add one: declare it here; use it in `run`, in every engine, or in those that `passed_on` and `read_by` name; and
    add it to docs/command-line.md and tests/cli/test_config.py. Add it to `VERIFY_FLAGS` if `verify` needs it too.
    """

    task: str
    batch_size: int = _flag(64, "The batch that the optimizer sees.", _size, kind=int)
    micro_batch_size: int = _flag(
        8, "How many samples are in memory at once; must not exceed --batch-size.", _size, kind=int
    )
    epochs: int | None = _flag(None, "How many times to go through the data.", _size_or_none, kind=int)
    steps: int | None = _flag(None, "How many steps to make, instead of --epochs.", _size_or_none, kind=int)
    lr: float = _flag(1e-3, "The learning rate.", _above_zero, kind=float)
    lr_scaling: str = _flag(
        "none",
        "none, linear or sqrt: how the rate follows --batch-size / --base-batch-size.",
        _one_of("none", "linear", "sqrt"),
    )
    base_batch_size: int | None = _flag(None, "The batch that --lr is meant for.", _size_or_none, kind=int)
    warmup_steps: int = _flag(0, "Steps over which the rate rises to --lr.", _whole, kind=int)
    schedule: str = _flag(
        "constant", "constant, cosine or linear, over the whole run.", _one_of("constant", "cosine", "linear")
    )
    clip_norm: float | None = _flag(
        None,
        "Clip the gradient of the whole batch to this norm.",
        _above_zero,
        kind=float,
        passed_on={"torch": "clip_norm", "tensorflow": "clip_norm", "keras": "global_clipnorm"},
        read_by=("jax",),
    )
    precision: str = _flag(
        "float32",
        "float32, bf16 or fp16.",
        _one_of("float32", "bf16", "fp16"),
        passed_on={"torch": "precision"},
        read_by=("tensorflow", "keras", "jax"),
    )
    on_nonfinite: str = _flag(
        "skip",
        "skip, raise or stop: what to do about a gradient that is not finite.",
        _one_of(*get_args(OnNonFinite)),
        passed_on={"torch": "on_nonfinite", "tensorflow": "on_nonfinite"},
        read_by=("keras", "jax"),
    )
    batch_norm: str = _flag(
        "batch",
        "batch, micro_batch or frozen: what BatchNorm layers do with their running statistics.",
        _one_of("batch", "micro_batch", "frozen"),
        passed_on={"torch": "batch_norm", "tensorflow": "batch_norm"},
        read_by=("keras",),
    )
    checkpoint_every: str | int | None = _flag(
        "10min", "How often to save a checkpoint: steps (100) or a time (10min).", _interval
    )
    framework: str = _flag("torch", "torch, tensorflow, keras or jax, for built-in tasks.", _one_of(*FRAMEWORKS))
    seed: int = _flag(0, "The seed of weights, data and dropout.", _whole, kind=int)
    device: str | None = _flag(None, "cpu, cuda, cuda:1 …", _text)
    compare: bool = _flag(True, "Train with the full batch too, and compare.", _switch, kind=bool)
    tensorboard: bool = _flag(False, "Write TensorBoard event files too.", _switch, kind=bool)

    def for_framework(self) -> dict[str, Any]:
        """The options to pass on to the framework, under its own names, without those at their default."""
        return {
            each.metadata["passed_on"][self.framework]: getattr(self, each.name)
            for each in FLAGS.values()
            if self.framework in each.metadata["passed_on"] and getattr(self, each.name) != each.default
        }

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this batch, if `lr` is that for the base batch."""
        ratio = self.batch_size / (self.base_batch_size or self.batch_size)
        return self.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    def lr_at(self, step: int, num_steps: int | None) -> float:
        """The learning rate of a step, counted from zero: a linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return self.scaled_lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or num_steps is None:
            return self.scaled_lr
        done = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.scaled_lr * left

    def as_toml(self) -> str:
        """The file that `--config` and `--resume` read."""
        return tomli_w.dumps({name: value for name, value in asdict(self).items() if value is not None})


FLAGS = {each.name: each for each in fields(Config) if each.metadata}
"""The flags by name. Their `metadata` has the arguments of `_flag`."""
VERIFY_FLAGS = ("batch_size", "micro_batch_size", "batch_norm", "framework", "seed", "device")
"""The flags of `bigbatch verify`."""
_NAMES = ("task", *FLAGS)
_OUTPUT_OPTIONS: Mapping[str, _Check] = {"out": _text, "quiet": _switch, "json": _switch}
"""Options that a file may set too, but that do not change what is computed."""
_MAX_FILE = 1 << 20


def read_toml(path: Path, remedy: str = "pass --config a TOML file") -> dict[str, Any]:
    """Reads the options in a file; `-` in a name is the same as `_`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}: {remedy}") from error
    if len(content) > _MAX_FILE:
        raise OptionError(f"{path} has more than {_MAX_FILE} bytes, which is no list of options: {remedy}")
    try:
        found = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # also a number of more than 4300 digits
        raise OptionError(f"{path} is not a TOML file: {error}") from error
    options = {name.replace("-", "_"): value for name, value in found.items()}
    _check_known(options, (*_NAMES, *_OUTPUT_OPTIONS), path)
    for name, check in {**_OUTPUT_OPTIONS, "task": _text, "framework": _text}.items():
        if name in options:
            check(option(name), options[name])
    return options


def merged(task: Task, flags: Mapping[str, Any], file: Mapping[str, Any]) -> Config:
    """The options of a run, from the task's defaults, the file and the flags."""
    _check_known(task.defaults, _NAMES, f"defaults of {task.name}")
    options: dict[str, Any] = {}
    for layer in (task.defaults, file, {name: value for name, value in flags.items() if value is not None}):
        for one, other in (("epochs", "steps"), ("steps", "epochs")):
            if one in layer and other not in layer:
                options.pop(other, None)  # --steps replaces the task's epochs, and the other way round
        options.update(layer)
    return _checked(Config(**{**options, "task": task.source, "framework": task.framework}))


def check_same_data(flags: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Raises OptionError if a resumed run would have other batches than before."""
    for name in ("batch_size", "seed"):
        if flags[name] is not None and flags[name] != file.get(name, flags[name]):
            raise OptionError(
                f"the run has {option(name)} {file[name]}, and with {flags[name]} its batches would be different: "
                "leave the flag out, or start a new run without --resume"
            )


def _check_known(options: Mapping[str, Any], names: tuple[str, ...], where: Any) -> None:
    if unknown := sorted(options.keys() - set(names), key=str):
        raise OptionError(f"{where} has the unknown option {unknown[0]!r}: the options are {', '.join(names)}")


def _checked(config: Config) -> Config:
    """Returns the options; raises OptionError if they cannot work, alone or together."""
    for name, each in FLAGS.items():
        value, about = getattr(config, name), each.metadata
        about["check"](option(name), value)
        if config.framework not in about["takers"] and value != each.default:
            raise OptionError(
                f"{option(name)} {value} is for {', '.join(about['takers'])}, but {Path(config.task).stem} is a "
                f"task for {config.framework}: leave it out"
            )
    if config.micro_batch_size > config.batch_size:
        raise OptionError(
            f"--micro-batch-size {config.micro_batch_size} is larger than --batch-size {config.batch_size}: "
            f"pass {config.batch_size} or less"
        )
    if not 0 < config.scaled_lr < math.inf:
        raise OptionError(
            f"--lr {config.lr} for --base-batch-size {config.base_batch_size} is {config.scaled_lr} for --batch-size "
            f"{config.batch_size}: pass another --lr"
        )
    if config.epochs is not None and config.steps is not None:
        raise OptionError(f"--epochs {config.epochs} and --steps {config.steps} are both given: pass one of them")
    if config.lr_scaling != "none" and config.base_batch_size is None:
        raise OptionError(
            f"--lr-scaling {config.lr_scaling} needs --base-batch-size: the batch that --lr {config.lr} is meant for"
        )
    return config


def option(name: str) -> str:
    """The flag of an option: --batch-size of batch_size."""
    return "--" + name.replace("_", "-")
