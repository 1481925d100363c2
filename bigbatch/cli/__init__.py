"""The command line: `bigbatch train | verify | report | doctor`."""

import sys
from importlib import import_module


def main() -> None:
    """Runs the command `bigbatch`."""
    try:
        for name in ("jinja2", "matplotlib", "rich", "safetensors", "tomli_w", "typer"):
            import_module(name)
    except ImportError as error:
        sys.exit(f'bigbatch: the command line needs {error.name}: pip install "bigbatch[cli]"')
    from .app import run

    run()
