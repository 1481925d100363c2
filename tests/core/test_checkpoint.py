"""Checkpoints on a bad day: bytes that changed, files that are somebody else's, disks that are full."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import stat
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from bigbatch import BigBatchWarning, MissingExtraError, OptionError, OrderError, StateError
from bigbatch.core.checkpoint.schedule import Every
from bigbatch.core.checkpoint.serialize import MAX_JSON, from_bytes, packed, to_bytes, to_json, to_safetensors
from bigbatch.core.checkpoint.store import ARRAYS, MANIFEST, STATE, Store, _manifest_of, _signed
from tests.crash.confined import obey_permissions
from tests.crash.operations import in_a_fork
from tests.examples import examples

FILES = (MANIFEST, STATE, ARRAYS, "history.jsonl")


def saved(folder: Path, num: int = 2) -> Store:
    store = Store(folder)
    for step in range(1, num + 1):
        state = {"w": np.arange(4.0) + step, "place": [step, (None, True, 0.5)]}
        store.save(step, state, {"history.jsonl": b'{"step": 1}\n' * step}, wait=True)
    return store


def damaged(folder: Path) -> str:
    """Loads, expects that the second is named and the first is used; returns what was said."""
    with pytest.warns(BigBatchWarning) as told:
        found = Store(folder).load()
    assert found is not None
    assert (found.step, found.state["w"].tolist()) == (1, [1.0, 2.0, 3.0, 4.0])
    (message,) = [str(warning.message) for warning in told]
    assert f"{folder / '000002'} is damaged" in message
    assert f"continuing from {folder / '000001'}" in message
    return message


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = saved(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004", "000005", "lock"]
    found = store.load()
    assert found is not None
    assert found.step == 5
    assert found.state["place"] == [5, (None, True, 0.5)]
    assert found.files == {"history.jsonl": b'{"step": 1}\n' * 5}
    assert Store(tmp_path / "nothing").load() is None
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", FILES)
def test_any_byte_that_is_another(name: str, tmp_path: Path) -> None:
    """Every single byte of every file: header, values, manifest, history."""
    saved(tmp_path)
    path = tmp_path / "000002" / name
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        damaged(tmp_path)
    path.write_bytes(content)
    found = Store(tmp_path).load()
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_empty_or_gone(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "000002" / name
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        damaged(tmp_path)
    for more in (b"\0", b"\n", b" ", content):
        path.write_bytes(content + more)
        damaged(tmp_path)
    path.unlink()
    assert f"{name} is missing" in damaged(tmp_path)
    path.mkdir()
    damaged(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    shutil.copy(tmp_path / "000001" / name, tmp_path / "000002" / name)
    damaged(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_elsewhere(name: str, tmp_path: Path) -> None:
    """Even to a file with the same content: what is elsewhere may change."""
    saved(tmp_path / "run")
    path = tmp_path / "run" / "000002" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    damaged(tmp_path / "run")


def test_a_checkpoint_that_is_a_link_to_elsewhere(tmp_path: Path) -> None:
    saved(tmp_path / "run").close()
    second = tmp_path / "run" / "000002"
    second.rename(tmp_path / "elsewhere")
    second.symlink_to(tmp_path / "elsewhere")
    assert "it is a link to elsewhere" in damaged(tmp_path / "run")
    store = Store(tmp_path / "run")
    with pytest.warns(BigBatchWarning):
        store.load()
    for step in (3, 4, 5):
        store.save(step, {}, wait=True)
    assert {path.name for path in (tmp_path / "run").glob("0*")} == {"000002", "000004", "000005"}  # not ours to remove
    assert second.is_symlink()
    assert len(list((tmp_path / "elsewhere").iterdir())) == len(FILES)


def test_a_pipe_that_never_ends(tmp_path: Path) -> None:
    saved(tmp_path)
    for name in FILES:
        path = tmp_path / "000002" / name
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        damaged(tmp_path)
        path.unlink()
        path.write_bytes(kept)


def forged(folder: Path, contents: dict[str, bytes], names: dict[str, str] | None = None, **more: Any) -> None:
    """A checkpoint of a stranger whose checksums are right."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    manifest = json.loads(_manifest_of(2, contents).rpartition(b"}")[0] + b"}")
    for old, new in (names or {}).items():
        manifest["files"][new] = manifest["files"].pop(old)
    (folder / MANIFEST).write_bytes(_signed({**manifest, **more}))


def plain(tree: Any) -> dict[str, bytes]:
    text, found = packed(tree)
    return {STATE: to_json(text), ARRAYS: to_safetensors({name: array.stored for name, array in found.items()})}


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a/../../secret", "a\\b", "", ".", "lock/../x"])
def test_a_manifest_that_points_outside(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "run")
    (tmp_path / "run" / "secret").write_bytes(b"secret")
    forged(tmp_path / "run" / "000002", {**plain({}), "secret": b"secret"}, {"secret": name})
    assert "is not a valid checkpoint file name" in damaged(tmp_path / "run")


def bomb(mark: Path) -> bytes:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(mark),)

    return pickle.dumps({"model": Bomb()})


def test_a_pickle_bomb_is_not_opened(tmp_path: Path) -> None:
    """In place of any file, with checksums that are right or wrong, or in place of the whole folder."""
    mark = tmp_path / "it went off"
    content = bomb(mark)
    saved(tmp_path / "run")
    second = tmp_path / "run" / "000002"
    kept = {name: (second / name).read_bytes() for name in FILES}
    for name in FILES:
        (second / name).write_bytes(content)
        damaged(tmp_path / "run")
        (second / name).write_bytes(kept[name])
    for name in (STATE, ARRAYS):
        forged(second, {**plain({}), name: content})
        damaged(tmp_path / "run")
    shutil.rmtree(second)
    second.write_bytes(content)
    found = Store(tmp_path / "run").load()
    assert found is not None
    assert found.step == 1
    assert not mark.exists()
    pickle.loads(content)  # it is a real one
    assert mark.exists()


@pytest.mark.parametrize(
    "state",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"dict":' * 20_000 + b"1" + b"}" * 20_000,
        b"",
        b"null null",
        b"\xff\xfe",
        b'{"array": ["nowhere", "float32"]}',
        b'{"array": ["w", "int64"]}',
        b'{"array": ["w", "complex128"]}',
        b'{"array": "w"}',
        b'{"object": "os.system"}',
        b'{"dict": 3}',
        b'{"float": "1e999"}',
        b'{"list": [], "dict": []}',
        b"[1]",
        b'{"dict": [[{"list": []}, 1]]}',
        b"9" * 10_000,
        b"NaN",
    ],
)
def test_a_strangers_state(state: bytes, tmp_path: Path) -> None:
    """The checksums are right, and still nothing is believed; or it is plain values, which do no harm."""
    saved(tmp_path)
    forged(tmp_path / "000002", {**plain({"w": np.zeros(2, np.float32)}), STATE: state})
    if state == b"NaN":  # the one that means something
        found = Store(tmp_path).load()
        assert found is not None
        assert found.state != found.state
    else:
        damaged(tmp_path)


def test_other_formats_and_manifests(tmp_path: Path) -> None:
    saved(tmp_path)
    second = tmp_path / "000002"
    forged(second, plain({}), format=1)
    assert "format 1, and this version reads 2" in damaged(tmp_path)
    for manifest in ({}, {"format": 2}, {"format": 2, "files": [], "step": 1}, {"format": 2, "files": {}, "step": 1}):
        (second / MANIFEST).write_bytes(_signed(manifest))
        damaged(tmp_path)
    (second / MANIFEST).write_bytes(b"{" + b" " * (2 << 20) + b"}")
    assert "1048576 are allowed" in damaged(tmp_path)


def test_none_that_is_whole(tmp_path: Path) -> None:
    saved(tmp_path)
    for path in tmp_path.glob("0*"):
        (path / STATE).write_bytes(b"")
    with pytest.raises(StateError, match=r"000002 is damaged .*000001 is damaged .*no checkpoint in .* is intact"):
        Store(tmp_path).load()


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    saved(tmp_path).close()
    (tmp_path / "000002" / STATE).write_bytes(b"")
    store = Store(tmp_path)
    with pytest.warns(BigBatchWarning):
        store.load()
    store.save(3, {}, wait=True)
    assert {path.name for path in tmp_path.glob("0*")} == {"000001", "000002", "000003"}
    store.save(4, {}, wait=True)
    assert {path.name for path in tmp_path.glob("0*")} == {"000003", "000004"}


def test_what_a_killed_process_left_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path).close()
    shutil.copytree(tmp_path / "000002", tmp_path / ".000003.0123456789abcdef.part")
    store = Store(tmp_path)
    found = store.load()
    assert found is not None
    assert found.step == 2
    store.save(3, {}, wait=True)
    assert not list(tmp_path.glob(".*"))


def test_names_that_are_in_the_way(tmp_path: Path) -> None:
    saved(tmp_path, 1).close()
    (tmp_path / "000002").write_text("a file")
    (tmp_path / "000003").mkdir()
    store = Store(tmp_path)
    store.load()
    store.save(2, {}, wait=True)
    assert {path.name for path in tmp_path.glob("0*")} == {"000001", "000002", "000003", "000004"}
    store.close()
    found = Store(tmp_path).load()
    assert found is not None
    assert found.step == 2


def test_only_its_own_checkpoints_are_removed(tmp_path: Path) -> None:
    """Folders with names like ours, files that are being written by others, and a checkpoint that is damaged."""
    theirs = {
        "20240101/photo.jpg",
        "1.zip.part",
        "2024-backup.part/a",
        ".000001.part",
        "000000/state.json",
        "log.jsonl",
    }
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    saved(tmp_path, 6)
    assert all((tmp_path / name).read_text() == "mine" for name in theirs)
    assert {path.name for path in tmp_path.glob("0*")} == {"000000", "000005", "000006"}


def test_an_unfinished_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    (tmp_path / ".000001.0123456789abcdef.part").mkdir()
    store = Store(tmp_path)
    for step in (1, 2):
        store.save(step, {}, wait=True)
    found = store.load()
    assert found is not None
    assert found.step == 2


# --- the log ---------------------------------------------------------------------------------------------


def logged(folder: Path, num: int = 4) -> Store:
    store = Store(folder)
    for step in range(1, num + 1):
        store.save(step, {}, new_lines=f"line {step}\n".encode() * step, wait=True)
    return store


def lines(num: int) -> bytes:
    return b"".join(f"line {step}\n".encode() * step for step in range(1, num + 1))


def test_the_log_is_written_once(tmp_path: Path) -> None:
    """A run of a million steps writes its history once, not with every checkpoint."""
    store = Store(tmp_path)
    line = b"x" * 299 + b"\n"
    for step in range(200):
        store.save(step, {}, new_lines=line * 10, wait=True)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 200 * 10 * 300 + 10_000
    found = Store(tmp_path, is_read_only=True).load()
    assert found is not None
    assert found.log == line * 2000


def test_an_earlier_checkpoint_has_its_own_lines(tmp_path: Path) -> None:
    logged(tmp_path).close()
    (tmp_path / "000004" / STATE).write_bytes(b"")
    store = Store(tmp_path)
    with pytest.warns(BigBatchWarning, match="continuing from"):
        found = store.load()
    assert found is not None
    assert found.log == lines(3)
    store.save(5, {}, new_lines=b"another\n", wait=True)
    again = store.load()
    assert again is not None
    assert again.log == lines(3) + b"another\n"


@pytest.mark.parametrize("harm", [lambda log: b"X" + log[1:], lambda log: log[:-1], lambda log: b""])
def test_a_log_that_is_not_as_it_was_written(harm: Any, tmp_path: Path) -> None:
    logged(tmp_path).close()
    (log,) = tmp_path.glob("log-*.jsonl")
    log.write_bytes(harm(log.read_bytes()))
    store = Store(tmp_path)
    if log.read_bytes()[:1] == b"l":  # its beginning is that of the checkpoint before
        with pytest.warns(BigBatchWarning, match="000004 is damaged"):
            store.load()
    else:
        with pytest.raises(StateError, match=r"log-\w+\.jsonl"):
            store.load()


def test_lines_after_the_newest_checkpoint_are_dropped(tmp_path: Path) -> None:
    """A process that was killed between the log and its checkpoint."""
    logged(tmp_path).close()
    (log,) = tmp_path.glob("log-*.jsonl")
    log.write_bytes(log.read_bytes() + b"half a li")
    store = Store(tmp_path)
    found = store.load()
    assert found is not None
    assert found.log == lines(4)
    store.save(5, {}, new_lines=b"line 5\n" * 5, wait=True)
    assert log.read_bytes() == lines(5)


def test_lines_of_a_save_that_failed_are_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = logged(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.warns(BigBatchWarning, match="could not be written"):
        patch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        store.save(2, {}, new_lines=b"line 2\n" * 2)
        store.wait()
    store.save(3, {}, new_lines=b"line 3\n" * 3, wait=True)
    found = store.load()
    assert found is not None
    assert found.log == lines(3)


def test_saves_that_fail_leave_one_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, a new file with each attempt would make matters worse."""
    store = Store(tmp_path)
    with monkeypatch.context() as patch, pytest.warns(BigBatchWarning, match="could not be written"):
        patch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        patch.setattr("bigbatch.core.checkpoint.store.write_through", lambda path, content: path.write_bytes(content))
        for step in (1, 2, 3):
            store.save(step, {}, new_lines=f"line {step}\n".encode() * step)
        store.wait()
    assert len(list(tmp_path.glob("log-*.jsonl"))) == 1
    store.save(4, {}, new_lines=b"line 4\n" * 4, wait=True)
    found = store.load()
    assert found is not None
    assert found.log == lines(4)
    assert len(list(tmp_path.glob("log-*.jsonl"))) == 1


def test_a_run_that_does_not_continue_has_a_log_of_its_own(tmp_path: Path) -> None:
    logged(tmp_path, 2).close()
    store = Store(tmp_path)
    store.save(3, {}, new_lines=b"new\n", wait=True)
    (tmp_path / "000003" / STATE).write_bytes(b"")
    store.close()
    with pytest.warns(BigBatchWarning, match="000003 is damaged"):
        found = Store(tmp_path).load()
    assert found is not None
    assert found.log == lines(2)
    for step in (4, 5, 6):
        store.save(step, {}, new_lines=b"new\n", wait=True)
    assert len(list(tmp_path.glob("log-*.jsonl"))) == 1  # that of checkpoints that are gone went with them


def test_a_backup_with_hard_links_stays_as_it_is(tmp_path: Path) -> None:
    """As `cp -al` and `rsync --link-dest` make it. It goes on from an earlier checkpoint, so lines are replaced."""
    logged(tmp_path / "run").close()
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path / "run", backup, copy_function=os.link)
    (tmp_path / "run" / "000004" / STATE).unlink()
    store = Store(tmp_path / "run")
    with pytest.warns(BigBatchWarning, match="000004 is damaged"):
        store.load()
    store.save(5, {}, new_lines=b"other\n", wait=True)
    found, kept = store.load(), Store(backup, is_read_only=True).load()  # which has the same lock
    assert found is not None
    assert kept is not None
    assert found.log == lines(3) + b"other\n"
    assert kept.log == lines(4)


def test_a_log_of_another_name_is_not_ours(tmp_path: Path) -> None:
    saved(tmp_path).close()
    (tmp_path / "notes.txt").write_text("mine")
    second = tmp_path / "000002"
    digest = hashlib.sha256(b"mine").hexdigest()
    forged(second, plain({}), log={"name": "notes.txt", "bytes": 4, "sha256": digest})
    assert "'notes.txt' is not the name of a log" in damaged(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- links -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", "log-01234567.jsonl"])
def test_no_link_is_followed(name: str, tmp_path: Path) -> None:
    folder, target = tmp_path / "run", tmp_path / "target"
    logged(folder).close()
    if name.startswith("log"):
        (log,) = folder.glob("log-*.jsonl")
        name = log.name
        log.rename(tmp_path / "log")
        target = tmp_path / "log"
    else:
        (folder / name).unlink()
    before = target.read_bytes() if target.exists() else None
    (folder / name).symlink_to(target)
    with pytest.raises(StateError, match=name.replace(".", r"\.")):
        Store(folder).load()
    with pytest.raises((StateError, OSError)):
        Store(folder).save(9, {}, new_lines=b"x\n", wait=True) if name == "lock" else Store(folder).load()
    assert (target.read_bytes() if target.exists() else None) == before


@pytest.mark.parametrize("name", [*FILES, ".", "log"])
def test_unreadable_is_not_damaged(name: str, tmp_path: Path) -> None:
    """A file of the newest checkpoint, its folder, the log: the one before is not used in its place."""
    store = saved(tmp_path, 1)
    store.save(2, {}, {"history.jsonl": b""}, new_lines=b"a line\n", wait=True)
    store.close()
    (next(tmp_path.glob("log*")) if name == "log" else tmp_path / "000002" / name).chmod(0)

    def load() -> None:
        obey_permissions()
        with pytest.raises(StateError, match=r"000002 cannot be read \(Permission denied\).*nothing was changed"):
            Store(tmp_path).load()

    assert in_a_fork(load) == 0


def test_two_stores_in_one_process(tmp_path: Path) -> None:
    one = saved(tmp_path)
    with pytest.raises(OrderError, match="in use by another process, or by another Checkpoints of this one"):
        Store(tmp_path).save(3, {}, wait=True)
    del one  # the lock goes with it
    Store(tmp_path).save(3, {}, wait=True)


def test_the_lock_survives_another_handle_that_is_closed(tmp_path: Path) -> None:
    """A record lock would be gone as soon as anybody in this process closes any handle of the file."""
    store = saved(tmp_path)
    (tmp_path / "lock").read_bytes()
    code = "import sys; from bigbatch.core.checkpoint.store import Store; Store(sys.argv[1]).claim()"
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "is in use by another process" in other.stderr
    store.close()


def test_one_array_is_not_loaded_many_times(tmp_path: Path) -> None:
    saved(tmp_path)
    second = tmp_path / "000002"
    name = {"array": ["w", "float64"]}
    state = to_json({"list": [name] * 20_000})
    forged(second, {STATE: state, ARRAYS: to_safetensors({"w": np.zeros(4)})})
    assert "w" in damaged(tmp_path)


def arrays_with(header: dict[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file with this header, which may say what is not true."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


LARGE = {
    "more than the file has": (ARRAYS, arrays_with({"w": tensor([10**12], 0, 4 * 10**12)}, bytes(4))),
    "the same bytes many times": (
        ARRAYS,
        arrays_with({str(number): tensor([10**6], 0, 4 * 10**6) for number in range(1000)}, bytes(4 * 10**6)),
    ),
    "a shape that overflows": (ARRAYS, arrays_with({"w": tensor([2**62, 4], 0, 0)})),
    "a header that is larger than the file": (ARRAYS, struct.pack("<Q", 10**18) + b"{}"),
    "a deep header": (ARRAYS, struct.pack("<Q", 10**6) + b"[" * 10**6),
    "deep": (STATE, b'{"list":[' * 10**6),
    "many digits": (STATE, b"9" * 10**7),
    "a billion digits": (STATE, b"9"),  # the file gets that long below, without taking up the disk
}
LITTLE_MEMORY = """
    import resource, sys, warnings
    import numpy, safetensors.numpy
    from bigbatch.core.checkpoint.store import Store

    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
    for folder in sys.argv[1:]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            print(Store(folder).load().step, told[0].message)
"""


def test_what_a_stranger_declares_fills_no_memory(tmp_path: Path) -> None:
    """200 MiB are enough to refuse them all; the memory of the process is limited to that."""
    for kind, (name, content) in LARGE.items():
        saved(tmp_path / kind, 1).close()
        second = tmp_path / kind / "000002"
        forged(second, {**plain({}), name: content})
        if kind == "a billion digits":
            os.truncate(second / STATE, 10**9)
            manifest = json.loads((second / MANIFEST).read_bytes().rpartition(b"}")[0] + b"}")
            manifest["files"][STATE]["bytes"] = 10**9
            (second / MANIFEST).write_bytes(_signed(manifest))
    command = [sys.executable, "-c", textwrap.dedent(LITTLE_MEMORY), *(str(tmp_path / kind) for kind in LARGE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kind, line in zip(LARGE, done.stdout.splitlines(), strict=True):
        assert line.startswith("1 "), kind
        assert f"{kind}/000002 is damaged" in line
    assert f"has 1000000000 bytes, {MAX_JSON} are allowed" in line


def test_a_state_that_could_not_be_read_is_not_saved(tmp_path: Path) -> None:
    store = saved(tmp_path)
    with pytest.raises(StateError, match=rf"has \d+ bytes of plain values, and at most {MAX_JSON} are saved"):
        store.save(3, {"text": "x" * MAX_JSON}, wait=True)
    found = store.load()
    assert found is not None
    assert found.step == 2


def test_bytes_of_a_stranger_are_refused() -> None:
    """As a window of several ranks is saved: the same limits hold."""
    whole = to_bytes({"w": np.zeros(2, np.float32)})
    strange = [whole[:-1], b"", whole + b"x", *(content for name, content in LARGE.values() if name == ARRAYS)]
    trees = [LARGE[kind][1] for kind in ("deep", "many digits")]
    trees += [b"", b"{", b'{"array": ["v", "float32"]}', b'{"array": ["w", "int64"]}', b" " * (MAX_JSON + 1)]
    trees += [to_json({"list": [{"array": ["w", "float32"]}] * 2})]
    w = {"/w": np.zeros(2, np.float32)}
    strange += [to_safetensors({**w, "tree": np.frombuffer(tree, np.uint8)}) for tree in trees]
    strange += [to_safetensors(w), to_safetensors({"tree": np.zeros((), np.float64)})]
    for content in strange:
        with pytest.raises(StateError, match=r"is damaged|was changed|bytes of plain values"):
            from_bytes(content)


def test_every_file_and_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not on the disk itself may be gone with the power, and all that lies under it."""
    flushed = []
    flush = os.fsync

    def recorded(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    Store(tmp_path / "runs" / "checkpoints").save(1, {}, wait=True)
    folder = Path("runs/checkpoints")
    (part,) = {path for path in flushed if path.suffix == ".part"}
    wanted = {Path(), folder.parent, folder, part, *(part / name for name in (MANIFEST, STATE, ARRAYS))}
    assert set(flushed) == wanted
    assert flushed[-1] == folder


def test_a_disk_that_fails_when_a_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    flush = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        store.save(1, {}, wait=True)


def test_without_safetensors_it_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that all checkpoints are damaged."""
    saved(tmp_path).close()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match="checkpoints need safetensors"):
        Store(tmp_path)


LIMITED = """
    import resource, signal, sys, warnings
    import numpy as np
    from bigbatch.core.checkpoint import Store

    store = Store(sys.argv[1])
    store.save(1, {"w": np.zeros(10)}, wait=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.save(2, {"w": np.zeros(1_000_000)}, wait=True)
    except OSError as error:
        print("raised", error.strerror)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store.save(3, {"w": np.zeros(1_000_000)})
        store.wait()
    print("told", told[0].message)
    store.save(4, {"w": np.ones(10)}, wait=True)
    print("found", store.load().step)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A limit on the size of files, which the system keeps as it keeps that of a disk."""
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    raised, told, found = done.stdout.splitlines()
    assert raised == "raised File too large"
    assert "could not be written" in told
    assert "earlier ones are untouched" in told
    assert found == "found 4"
    assert {path.name for path in tmp_path.iterdir()} == {"000001", "000002", "lock"}


def test_a_small_disk(tmp_path: Path) -> None:
    """A real file system of one MiB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here; the limit on the size of files is tested above")
    try:
        store = Store(disk / "run")
        store.save(1, {"w": np.zeros(10)}, wait=True)
        with pytest.raises(OSError, match="No space left"):
            store.save(2, {"w": np.zeros(1_000_000)}, wait=True)
        found = store.load()
        assert found is not None
        assert found.step == 1
        assert not list((disk / "run").glob("*.part"))
        store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "run")
    with pytest.raises(OSError, match="Not a directory"):
        store.save(1, {}, wait=True)
    with pytest.raises(OSError, match="Not a directory"):
        store.load()


def test_a_read_only_folder(tmp_path: Path) -> None:
    saved(tmp_path).close()
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)

    def load_and_save() -> None:
        obey_permissions()
        store = Store(tmp_path)
        found = store.load()
        assert found is not None
        assert found.step == 2
        with pytest.raises(PermissionError):
            store.save(3, {}, wait=True)

    assert in_a_fork(load_and_save) == 0


def test_a_read_only_disk(tmp_path: Path) -> None:
    """Which stops root too, where one may be mounted."""
    saved(tmp_path / "run").close()
    mounts = [["mount", "--bind", str(tmp_path / "run"), str(tmp_path / "run")]]
    mounts.append(["mount", "-o", "remount,ro,bind", str(tmp_path / "run")])
    if any(subprocess.run(mount, capture_output=True).returncode for mount in mounts):
        subprocess.run(["umount", str(tmp_path / "run")], capture_output=True)
        pytest.skip("nothing can be mounted here")
    try:
        store = Store(tmp_path / "run")
        found = store.load()
        assert found is not None
        assert found.step == 2
        with pytest.raises(OSError, match="Read-only"):
            store.save(3, {}, wait=True)
    finally:
        subprocess.run(["umount", str(tmp_path / "run")], check=True)


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what was there when save was called, however it changed since."""
    may_write = threading.Event()
    write = Store._write

    def slow(*args: Any) -> None:
        assert may_write.wait(30)
        write(*args)

    monkeypatch.setattr(Store, "_write", slow)
    store, array = Store(tmp_path), np.zeros(3)
    store.save(1, {"w": array})
    assert not list(tmp_path.glob("0*"))
    array += 1
    may_write.set()
    store.close()
    found = Store(tmp_path).load()
    assert found is not None
    assert found.state["w"].tolist() == [0, 0, 0]
    assert not [thread for thread in threading.enumerate() if "bigbatch" in thread.name]


def test_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    by_steps, by_time, never = Every("100"), Every("1.5min"), Every(None)
    assert [by_steps.is_due(step) for step in (99, 100, 101)] == [False, True, True]
    by_steps.saved(150)
    assert [by_steps.is_due(step) for step in (249, 250)] == [False, True]
    now[0] = 89.0
    assert not by_time.is_due(10**6)
    now[0] = 90.0
    assert by_time.is_due(1)
    by_time.saved(1)
    assert not by_time.is_due(10**6)
    assert not never.is_due(10**9)


def test_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="keep is 0"):
        Store(tmp_path, keep=0)


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"]
KEYS = st.text(max_size=5) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=3)) | st.none()
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0, max_dims=3)))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(from_bytes(to_bytes(tree)), tree)
