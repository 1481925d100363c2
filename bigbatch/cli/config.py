"""What a run is told: flags before the TOML file, the file before the task's own defaults, those before ours."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import tomli_w

from ..core.checkpoint.schedule import Every
from ..core.errors import OptionError
from ..core.nonfinite import OnNonFinite
from ..core.options import check_choice, positive
from .task import FRAMEWORKS, Task

CHOICES = {
    "framework": FRAMEWORKS,
    "lr_scaling": ("none", "linear", "sqrt"),
    "schedule": ("constant", "cosine", "linear"),
    "precision": ("float32", "bf16", "fp16"),
    "on_nonfinite": get_args(OnNonFinite),
}


@dataclass(frozen=True)
class Config:
    """The options of `bigbatch train`."""

    task: str
    framework: str = "torch"
    batch_size: int = 64
    micro_batch_size: int = 8
    epochs: int | None = None
    steps: int | None = None
    lr: float = 1e-3
    lr_scaling: str = "none"
    base_batch_size: int | None = None
    warmup_steps: int = 0
    schedule: str = "constant"
    clip_norm: float | None = None
    precision: str = "float32"
    on_nonfinite: str = "skip"
    checkpoint_every: str | int | None = "10min"
    seed: int = 0
    device: str | None = None
    compare: bool = True
    tensorboard: bool = False

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
        return tomli_w.dumps({name: value for name, value in asdict(self).items() if value is not None})


NAMES = tuple(field.name for field in fields(Config))
ABOUT_THE_RUN = ("out", "quiet", "json")
"""Options that a file may have but that do not matter for what is computed."""


def read_toml(path: Path, remedy: str = "pass --config a TOML file") -> dict[str, Any]:
    """The options in a file; `-` in a name is the same as `_`."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}: {remedy}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is no TOML file: {error}") from error
    options = {name.replace("-", "_"): value for name, value in found.items()}
    if unknown := sorted(options.keys() - {*NAMES, *ABOUT_THE_RUN}):
        known = ", ".join((*NAMES, *ABOUT_THE_RUN))
        raise OptionError(f"{path} has an option {unknown[0]!r} that train does not know: it knows {known}")
    return options


def merged(task: Task, flags: Mapping[str, Any], file: Mapping[str, Any]) -> Config:
    """The options that are used."""
    if unknown := sorted(task.defaults.keys() - set(NAMES)):
        raise OptionError(
            f"defaults of {task.name} has an option {unknown[0]!r} that train does not know: "
            f"it knows {', '.join(NAMES)}"
        )
    flags = {name: value for name, value in flags.items() if value is not None}
    options: dict[str, Any] = {}
    for layer in (task.defaults, file, flags):
        for one, other in (("epochs", "steps"), ("steps", "epochs")):
            if one in layer and other not in layer:
                options.pop(other, None)  # who says the one has not asked for the other
        options.update(layer)
    return checked(Config(**{**options, "task": task.source, "framework": task.framework}))


def check_same_data(flags: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Refuses options with which the place in the data would be another when a run goes on."""
    for name in ("batch_size", "seed"):
        if flags[name] is not None and flags[name] != file.get(name, flags[name]):
            raise OptionError(
                f"the run has {option(name)} {file[name]}, and with {flags[name]} its batches would be others: "
                "leave it out, or start anew without --resume"
            )


def check_given(task: str, given: Mapping[str, Any]) -> None:
    """What can be seen to be wrong before the task is loaded, which may take long."""
    known = {name: value for name, value in given.items() if value is not None and name not in ("task", "framework")}
    sizes = ("batch_size", "micro_batch_size")
    for one, other in (sizes, sizes[::-1]):
        if isinstance(known.get(one), int):
            known.setdefault(other, known[one])  # the task may have another, which is compared later
    checked(Config(task=task, **known))


def checked(config: Config) -> Config:
    """Refuses values that cannot work."""
    for name in ("batch_size", "micro_batch_size", "epochs", "steps", "base_batch_size"):
        value = getattr(config, name)
        if name == "micro_batch_size" and value == "auto":
            raise OptionError('--micro-batch-size "auto" is not there yet: pass a number, such as 8')
        if value is not None:
            positive(option(name), value)
    for name in ("lr", "clip_norm"):
        value = getattr(config, name)
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise OptionError(f"{option(name)} must be a number above zero, not {value!r}")
    for name in ("warmup_steps", "seed"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise OptionError(f"{option(name)} must be a whole number from 0 on, not {value!r}")
    for name, choices in CHOICES.items():
        check_choice(option(name), getattr(config, name), choices)
    for name in ("compare", "tensorboard"):
        if not isinstance(getattr(config, name), bool):
            raise OptionError(f"{name} must be true or false, not {getattr(config, name)!r}")
    if config.device is not None and not isinstance(config.device, str):
        raise OptionError(f"--device must be a name such as cpu or cuda, not {config.device!r}")
    try:
        Every(config.checkpoint_every)
    except OptionError as error:
        raise OptionError(f"--checkpoint-every {config.checkpoint_every}: {error}") from error
    if config.micro_batch_size > config.batch_size:
        raise OptionError(
            f"--micro-batch-size {config.micro_batch_size} is larger than --batch-size {config.batch_size}: "
            f"pass {config.batch_size} or less"
        )
    if config.epochs is not None and config.steps is not None:
        raise OptionError(f"--epochs {config.epochs} and --steps {config.steps} are both given: pass one of them")
    if config.lr_scaling != "none" and config.base_batch_size is None:
        raise OptionError(
            f"--lr-scaling {config.lr_scaling} needs --base-batch-size: the batch that --lr {config.lr} is meant for"
        )
    return config


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
