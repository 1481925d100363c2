"""A Verification on the screen and as JSON."""

from typing import Any

from rich.table import Table

from ..core.verify.result import Verification
from .config import Config


def as_table(found: Verification, name: str, config: Config) -> Table:
    """The largest errors first."""
    verdict = "exact" if found.is_exact else "NOT exact"
    table = Table(
        title=f"{name}: batch of {config.batch_size} in micro-batches of {config.micro_batch_size}",
        caption=f"{verdict}: the largest error is {found.max_error:.1e}, of the whole gradient "
        f"{found.total_error:.1e}, allowed is {found.tolerance:.0e}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("parameter")
    table.add_column("relative error", justify="right")
    for parameter, error in sorted(found.errors.items(), key=lambda item: -item[1]):
        table.add_row(parameter, f"{error:.1e}")
    return table


def as_json(found: Verification) -> dict[str, Any]:
    return {
        "is_exact": found.is_exact,
        "max_error": found.max_error,
        "total_error": found.total_error,
        "tolerance": found.tolerance,
        "errors": dict(found.errors),
        "causes": list(found.causes),
    }
