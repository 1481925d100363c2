"""`bigbatch doctor`: what is installed, and what is missing."""

import ast
import platform
import subprocess
import sys
from importlib import metadata

from rich.console import Console
from rich.table import Table

from .. import __version__

FRAMEWORKS = {
    "torch": "import torch; print(['cpu'] + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])",
    "tensorflow": "import tensorflow as tf; print([d.name.split(':', 1)[1] for d in tf.config.list_logical_devices()])",
    "keras": "import keras; print(['backend ' + keras.backend.backend()])",
    "jax": "import jax; print([str(d) for d in jax.devices()])",
}
OTHERS = {
    "scikit-learn": "the tasks digits and digits-batchnorm",
    "tensorboard": "train --tensorboard",
}


def examine(console: Console) -> None:
    console.print(f"bigbatch {__version__}, Python {platform.python_version()}, {platform.system()}", highlight=False)
    table = Table()
    for name in ("", "version", "can be used"):
        table.add_column(name)
    for name, code in FRAMEWORKS.items():
        if (version := installed(name)) is None:
            table.add_row(name, "–", f'not installed: pip install "bigbatch\\[{name}]"')
        else:
            table.add_row(name, version, devices(code))
    for name, use in OTHERS.items():
        version = installed(name)
        table.add_row(name, version or "–", f"for {use}" if version else f"pip install {name}, for {use}")
    console.print(table)


def installed(name: str) -> str | None:
    """The version of a package, without importing it."""
    for known in (name, f"{name}-cpu"):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def devices(code: str) -> str:
    """What a framework sees, asked in a process of its own: frameworks fight, and one may not even load."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return f"does not load: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
    return ", ".join(ast.literal_eval(done.stdout.strip().splitlines()[-1]))
