"""What a disk may hold after the power went off: only what was flushed is certain.

What is in a file is certain up to its last fsync, and the names in a folder up to the last fsync of the folder. Later
changes of one file, or of one folder, reach the disk in their order, but nobody knows how many of them do.
"""

import os
from pathlib import Path


class _File:
    def __init__(self):
        self.contents = [b""]  # what is on the disk, and what may be

    def change(self, content):
        self.contents.append(content)

    def flush(self):
        del self.contents[:-1]

    def written_to(self, path, draw):
        path.write_bytes(draw(self.contents))


class _Folder:
    def __init__(self):
        self.names = [{}]

    def change(self, **files):
        """Gives a name to a file or a folder, or takes it away with None."""
        now = {**self.names[-1], **files}
        self.names.append({name: file for name, file in now.items() if file is not None})

    def flush(self):
        del self.names[:-1]

    def written_to(self, path, draw):
        path.mkdir()
        for name, file in draw(self.names).items():
            file.written_to(path / name, draw)


class Disk:
    """A disk that holds one folder, `top`."""

    def __init__(self, top):
        self._top, self._root = Path(os.path.realpath(top)), _Folder()

    def _at(self, path):
        """The folder that this path is in, its name there, and what has the name."""
        path = Path(path)
        if path == self._top:
            return None, "", self._root
        names = path.relative_to(self._top).parts
        folder = self._root
        for name in names[:-1]:
            folder = folder.names[-1][name]
        return folder, names[-1], folder.names[-1].get(names[-1])

    def do(self, operation):
        folder, name, file = self._at(operation.path)
        match operation.name:
            case "open" if file is None:
                folder.change(**{name: _File()})
            case "open" if operation.value & os.O_TRUNC:
                file.change(b"")
            case "write":
                offset, data = operation.value
                content = file.contents[-1].ljust(offset, b"\0")
                file.change(content[:offset] + data + content[offset + len(data) :])
            case "truncate":
                file.change(file.contents[-1][: operation.value].ljust(operation.value, b"\0"))
            case "fsync":
                file.flush()
            case "mkdir" if file is None:
                folder.change(**{name: _Folder()})
            case "rename":
                target, new_name, _ = self._at(operation.value)
                assert target is folder, "only names in one folder change together"
                folder.change(**{name: None, new_name: file})
            case "unlink" | "rmdir" if file is not None:
                folder.change(**{name: None})

    def rebuilt(self, path, draw):
        """Writes the folder as the power failure left it; `draw(versions)` chooses how much of each change is there."""
        self._root.written_to(path, draw)
