"""Creates the pictures of command-line.md: `python docs/make_pictures.py` (needs Chromium)."""

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 118


def in_a_terminal(command: list[str]) -> str:
    """Runs a command in a terminal and returns what it shows, with colours."""
    found = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        found.extend(data)
        return data

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ.update(COLUMNS=str(WIDTH), TERM="xterm-256color", PATH=path)
    assert pty.spawn(command, read) == 0
    text = found.decode().replace("\r\n", "\n")
    text = re.sub(r"[^\n]*\r\x1b\[2K", "", text)  # each progress bar overwrites the last
    return re.sub(r"\x1b\[\?\d+[hl]", "", text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        shown = in_a_terminal(["bigbatch", "train", "digits", "--out", "runs/digits"])
        console = Console(record=True, width=WIDTH, file=io.StringIO())
        console.print(Text("$ bigbatch train digits --out runs/digits"))
        console.print(Text.from_ansi(shown))
        console.save_svg(str(PICTURES / "train.svg"), title="bigbatch")
        chromium = shutil.which("chromium") or "chromium"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        flags += [f"--user-data-dir={folder}/browser", "--window-size=1200,1500"]
        page = Path("runs/digits/report.html").resolve().as_uri()
        subprocess.run([chromium, *flags, f"--screenshot={PICTURES / 'report.png'}", page], check=True)


if __name__ == "__main__":
    main()
