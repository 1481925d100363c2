"""A task: a Python file, or a built-in one, that says what to train."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.errors import BigBatchError, LossError, MissingExtraError
from .errors import TaskError, TaskRaisedError
from .names import check_name

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
_BUILT_IN = ("digits", "digits-batchnorm", "text")
_NO_FUNCTIONS = ("defaults", "has_aux", "aux")
_EXAMPLE = """
    import torch

    def model():
        return torch.nn.Linear(8, 1)

    def batches(batch_size):
        for _ in range(10):
            yield torch.randn(batch_size, 8)

    def loss(model, batch):
        return model(batch).square().mean()
"""


@dataclass(frozen=True)
class Task:
    """What a task file defines."""

    name: str
    source: str
    """How to load it again: the name of a built-in task, or a path."""
    framework: str
    model: Callable[..., Any]
    batches: Callable[..., Iterable[Any]]
    loss: Any
    optimizer: Callable[..., Any] | None = None
    weight: Callable[[Any], Any] | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_aux: bool = False
    aux: Any = "auto"

    def aux_options(self) -> dict[str, Any]:
        """The options of an accumulator for a loss that returns aux."""
        return {"has_aux": True, "aux": self.aux} if self.has_aux else {}

    def epoch(self, *, batch_size: int, epoch: int, seed: int) -> Iterator[Any]:
        """The batches of one epoch."""
        with task_errors():
            batches = self._call_batches(batch_size, epoch, seed)
            if not isinstance(batches, Iterable):
                raise TaskError(
                    f"batches() of {self.name} returned a {type(batches).__name__}: "
                    "return or yield the batches of an epoch"
                )
            yield from batches

    def num_batches(self, batch_size: int, seed: int) -> int | None:
        """How many batches an epoch has; None if that is not known without going through them."""
        with task_errors():
            batches: Any = self._call_batches(batch_size, 0, seed)
            return len(batches) if hasattr(batches, "__len__") else None

    def _call_batches(self, batch_size: int, epoch: int, seed: int) -> Any:
        return call_with(self.batches, {"batch_size": batch_size, "epoch": epoch, "seed": seed})


@contextmanager
def task_errors() -> Iterator[None]:
    """Marks errors that the code of the task raises, so that they are shown with the task's traceback."""
    try:
        yield
    except LossError as error:
        if "pass has_aux=True" not in str(error):
            raise
        raise LossError(f"{error} (in a task, write has_aux = True in the file)") from error
    except (BigBatchError, TaskRaisedError):
        raise
    except Exception as error:
        raise TaskRaisedError(error) from error


@contextmanager
def missing_extras(task: str, framework: str) -> Iterator[None]:
    """Says what to install if the framework of a task cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in (*FRAMEWORKS, "optax"):
            raise
        remedy = f'pip install "bigbatch[{framework}]"'
        raise MissingExtraError(f"{task} for {framework} needs {error.name}: {remedy}") from error


def call_with(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Calls a function with those of the arguments that it has parameters for.

    If its first parameter is required and has another name, it gets the first argument.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**given)
    taken = {p.name: given[p.name] for p in parameters if p.name in given}
    first = next((p for p in parameters if p.kind is not p.KEYWORD_ONLY), None)
    if first is not None and first.name not in given and first.default is first.empty:
        name = next(iter(given))
        taken.pop(name, None)
        return function(given[name], **taken)
    return function(**taken)


def load_task(name: str, framework: str | None) -> Task:
    """Loads and checks the task with this name or path; `framework` is for built-in tasks."""
    if name in _BUILT_IN:
        framework = framework or "torch"
        if framework not in FRAMEWORKS:
            raise TaskError(f"there is no {name} for {framework}: pass --framework {' or '.join(FRAMEWORKS)}")
        with missing_extras(name, framework):
            module = importlib.import_module(f"bigbatch.tasks.{framework}.{name.replace('-', '_')}")
        return _task_in(module, name, name, framework)
    check_name("the task", Path(name).absolute())
    path = Path(name)
    if not path.is_file():
        raise TaskError(f"there is no task {name}: pass the path of a Python file, or one of {', '.join(_BUILT_IN)}")
    if path.suffix != ".py":
        raise TaskError(f"{name} is not a Python file: pass a path that ends in .py, or one of {', '.join(_BUILT_IN)}")
    imported = _framework_of(path)
    if framework is not None and framework != imported:
        raise TaskError(
            f"{name} imports {imported} but --framework is {framework}: leave --framework out, because a task file "
            "trains with the framework that it imports"
        )
    return _task_in(_load_file(path), path.stem, str(path.resolve()), imported)


def _framework_of(path: Path) -> str:
    """Returns the framework that a file imports, without running the file."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise TaskRaisedError(error) from error
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
            if node.module == "bigbatch" or node.module.startswith("bigbatch."):
                names |= {*node.module.split(".")[1:2], *(alias.name for alias in node.names)}
    if not names.isdisjoint(("flax", "optax", "equinox")):
        names.add("jax")
    for name in FRAMEWORKS:  # a TensorFlow task may import keras too, and a Keras task jax: the first one counts
        if name in names:
            return name
    raise TaskError(
        f"{path} imports none of {', '.join(FRAMEWORKS)}, so its framework is not known: a task looks like\n{_EXAMPLE}"
    )


def _load_file(path: Path) -> ModuleType:
    """Runs a task file, which can import the files beside it."""
    spec = importlib.util.spec_from_file_location(f"bigbatch_task_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    with task_errors():
        spec.loader.exec_module(module)
    return module


def _task_in(module: ModuleType, name: str, source: str, framework: str) -> Task:
    """Returns the task in a module; raises TaskError if something is missing or of the wrong type."""
    needed, optional = ("model", "batches", "loss"), ("optimizer", "weight", "evaluate", *_NO_FUNCTIONS)
    parts = {part: getattr(module, part) for part in (*needed, *optional) if hasattr(module, part)}
    if missing := [part for part in needed if part not in parts]:
        raise TaskError(f"{name} defines no {missing[0]}(): a task looks like\n{_EXAMPLE}")
    for part, value in parts.items():
        is_keras_loss = part == "loss" and framework == "keras"  # its name, or an object
        if part == "defaults" and not isinstance(value, Mapping):
            raise TaskError(f"defaults of {name} is a {type(value).__name__}: make it a dict of options")
        if part == "has_aux" and not isinstance(value, bool):
            raise TaskError(f"has_aux of {name} is {value!r}: make it True if the loss returns (loss, aux)")
        if part == "has_aux" and value and framework == "keras":
            raise TaskError(f"{name} has has_aux, but a Keras loss returns one number: compute scores in evaluate()")
        if part in _NO_FUNCTIONS:
            continue
        if value is not None and not is_keras_loss and not callable(value):
            raise TaskError(
                f"{part} of {name} is a {type(value).__name__}, not a function: a task looks like\n{_EXAMPLE}"
            )
    return Task(name, source, framework, **parts)
