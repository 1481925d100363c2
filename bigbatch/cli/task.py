"""A task: a Python file, or a built-in one, that says what is to be trained."""

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

from ..core.errors import BigBatchError, MissingExtraError
from .errors import TaskError, TaskRaisedError

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
OF_JAX = ("flax", "optax", "equinox")
"""Who imports one of these trains with JAX."""
BUILT_IN = ("digits", "digits-batchnorm", "text")
MINIMAL = """
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
    """What it was loaded by: the name of a built-in task, or a path."""
    framework: str
    model: Callable[..., Any]
    batches: Callable[..., Iterable[Any]]
    loss: Any
    optimizer: Callable[..., Any] | None = None
    weight: Callable[[Any], Any] | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def epoch(self, *, batch_size: int, epoch: int, seed: int) -> Iterator[Any]:
        """The batches of one epoch."""
        given = {"batch_size": batch_size, "epoch": epoch, "seed": seed}
        with their_own_errors():
            found = call_with(self.batches, given)
            if not isinstance(found, Iterable):
                raise TaskError(
                    f"batches() of {self.name} returned a {type(found).__name__}: "
                    "return or yield the batches of an epoch"
                )
            yield from found

    def num_batches(self, batch_size: int, seed: int) -> int | None:
        """How many batches an epoch has, if that can be told without going through them."""
        with their_own_errors():
            found = call_with(self.batches, {"batch_size": batch_size, "epoch": 0, "seed": seed})
            return len(found) if hasattr(found, "__len__") else None


@contextmanager
def their_own_errors() -> Iterator[None]:
    """Marks what the task's own code raises, so that it is shown as such."""
    try:
        yield
    except (BigBatchError, TaskRaisedError):
        raise
    except Exception as error:
        raise TaskRaisedError(error) from error


def call_with(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Calls with those of the arguments that the function takes by name; a first one of another name gets the first."""
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
    """The task of this name or path, checked before anything is made."""
    if name in BUILT_IN:
        framework = framework or "torch"
        if framework not in FRAMEWORKS:
            raise TaskError(f"there is no {name} for {framework}: pass --framework {' or '.join(FRAMEWORKS)}")
        module = f"bigbatch.tasks.{framework}.{name.replace('-', '_')}"
        try:
            return checked(importlib.import_module(module), name, name, framework)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in (*FRAMEWORKS, "optax"):
                raise
            raise MissingExtraError(
                f'{name} for {framework} needs {error.name}: pip install "bigbatch[{framework}]"'
            ) from error
    path = Path(name)
    if not path.is_file():
        raise TaskError(f"there is no task {name}: pass the path of a Python file, or one of {', '.join(BUILT_IN)}")
    if path.suffix != ".py":
        raise TaskError(f"{name} is no Python file: pass a path that ends in .py, or one of {', '.join(BUILT_IN)}")
    found = framework_of(path)
    if framework is not None and framework != found:
        raise TaskError(
            f"{name} imports {found} but --framework is {framework}: leave --framework out, a task file is of the "
            "framework that it imports"
        )
    return checked(load_file(path), path.stem, str(path.resolve()), found)


def framework_of(path: Path) -> str:
    """The framework that a file imports: read, not run."""
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
    if not names.isdisjoint(OF_JAX):
        names.add("jax")
    for name in FRAMEWORKS:  # Keras comes along with TensorFlow, JAX with Keras: each is meant only if it is alone
        if name in names:
            return name
    raise TaskError(
        f"{path} imports none of {', '.join(FRAMEWORKS)}, so nobody can tell what it trains with: a task looks like\n"
        f"{MINIMAL}"
    )


def load_file(path: Path) -> ModuleType:
    """Runs a task file; what lies beside it can be imported."""
    spec = importlib.util.spec_from_file_location(f"bigbatch_task_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    with their_own_errors():
        spec.loader.exec_module(module)
    return module


def checked(module: ModuleType, name: str, source: str, framework: str) -> Task:
    """The task in a module, if it has all that a task needs."""
    for needed in ("model", "batches", "loss"):
        if not hasattr(module, needed):
            raise TaskError(f"{name} defines no {needed}(): a task looks like\n{MINIMAL}")
    functions = ["model", "batches", "optimizer", "weight", "evaluate", *(["loss"] if framework != "keras" else [])]
    for function in functions:
        value = getattr(module, function, None)
        if value is not None and not callable(value):
            raise TaskError(
                f"{function} of {name} is a {type(value).__name__} and no function: a task looks like\n{MINIMAL}"
            )
    defaults = getattr(module, "defaults", {})
    if not isinstance(defaults, Mapping):
        raise TaskError(f"defaults of {name} is a {type(defaults).__name__}: make it a dict of options")
    return Task(
        name,
        source,
        framework,
        module.model,
        module.batches,
        module.loss,
        getattr(module, "optimizer", None),
        getattr(module, "weight", None),
        getattr(module, "evaluate", None),
        defaults,
    )
