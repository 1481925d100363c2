"""The command line: `bigbatch train | verify | report | doctor`."""

import sys


def main() -> None:
    """Runs the command `bigbatch`."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import tomli_w  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f'bigbatch: the command line needs {error.name}: pip install "bigbatch[cli]"')
    from .app import run

    run()
