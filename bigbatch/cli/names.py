"""Text of the user's, such as names and paths: which can be used, and how a terminal shows it."""

from ..core.errors import OptionError


def shown(text: str) -> str:
    """Text with nothing in it that a terminal would obey, such as an escape sequence."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def check_name(what: str, name: object) -> None:
    """Raises OptionError for what config.toml or the system cannot store: text that is not UTF-8, and a NUL byte."""
    text = str(name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{what} {text!a} is not valid UTF-8: use another name") from error
    if "\0" in text:
        raise OptionError(f"{what} {text!a} has a NUL byte, which no file name can have: use another name")
