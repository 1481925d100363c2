"""`bigbatch doctor`: what is installed, and what is missing."""

import ast
import platform
import subprocess
import sys
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from .names import shown

_FRAMEWORKS = {
    "torch": "import torch; print(['cpu'] + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])",
    "tensorflow": "import tensorflow as tf; print([d.name.split(':', 1)[1] for d in tf.config.list_logical_devices()])",
    "keras": "import keras; print(['backend ' + keras.backend.backend()])",
    "jax": "import jax; print([str(d) for d in jax.devices()])",
}
_OTHERS = {
    "scikit-learn": "the tasks digits and digits-batchnorm",
    "tensorboard": "train --tensorboard",
}


def examine(console: Console) -> None:
    """Prints the versions and devices of all frameworks."""
    console.print(f"bigbatch {__version__}, Python {platform.python_version()}, {platform.system()}", highlight=False)
    table = Table()
    for name in ("", "version", "can be used"):
        table.add_column(name)
    for name, code in _FRAMEWORKS.items():
        if (version := _version_of(name)) is None:
            table.add_row(name, "–", f'not installed: pip install "bigbatch\\[{name}]"')
        else:
            table.add_row(name, version, escape(shown(_devices(code))))
    for name, use in _OTHERS.items():
        version = _version_of(name)
        table.add_row(name, version or "–", f"for {use}" if version else f"pip install {name}, for {use}")
    console.print(table)


def _version_of(name: str) -> str | None:
    """The version of a package, without importing it."""
    for known in (name, f"{name}-cpu"):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def _devices(code: str) -> str:
    """The devices that a framework sees. It loads in a separate process, because frameworks conflict in one."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    if done.returncode:
        return f"does not load: {(done.stderr.strip().splitlines() or ['without a message'])[-1]}"
    return ", ".join(ast.literal_eval(done.stdout.strip().splitlines()[-1]))
