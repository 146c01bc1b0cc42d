"""Write files: complete or not at all, never through symbolic links, and such that damage is recognised.

Only the last part of a path is never followed: a user may link a whole folder, such as runs/, to another disk.

A record is a dictionary that is a JSON file, or a line of one. Its ``seal`` is the CRC-32 of the rest: it recognises
every change within 32 neighbouring bits, and misses one in 2^32 of all others. It is against damage, not attackers.
"""

import errno
import glob
import json
import os
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedncv.portable import sync_folder

SEAL = "seal"
NEW = ".new"  # ends the name of a file that is being written
PIECE = 1 << 22  # bytes to read at a time


def open_here(path: Path, flags: int) -> int:
    """Open the file itself and return its descriptor. Raise ValueError if it is a symbolic link."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link, and fedncv does not write through it; remove it, or link its whole folder"
            ) from None
        raise


def write_atomically(path: Path, data: bytes, *, mark: Callable[[str], None] = lambda _moment: None) -> None:
    """Write the file such that a crash leaves the old one or the new one, never a part. A link is replaced.

    ``mark`` is called at the moments at which a crash would do most harm. Raise ValueError if the path is a device or a
    pipe, which the file would replace, and OSError if it is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file; choose another path")
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{NEW}")
    try:
        with os.fdopen(open_here(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data[: len(data) // 2])
            mark("half written")
            file.write(data[len(data) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        mark("written, not renamed")
        temporary.replace(path)
    except OSError as error:  # a full disk: free the space, and name the file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    mark("renamed")


def sweep(path: Path) -> None:
    """Remove what was being written in place of the file when a process died; only if no other process writes it."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}{NEW}"):
        left.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder for files that fedncv names itself. Raise ValueError if it is a symbolic link."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, and fedncv does not write through it; remove it")
    folder.mkdir(parents=True, exist_ok=True)


def truncate(path: Path, length: int) -> None:
    """Cut the file, and flush it to the disk."""
    descriptor = open_here(path, os.O_RDWR)
    try:
        os.ftruncate(descriptor, length)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Return the content of a text file. Raise ValueError if it cannot be read, or is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None


def checksum(path: Path, length: int | None = None) -> int | None:
    """Return the CRC-32 of the first ``length`` bytes, or of all; None if the file is shorter."""
    check, left = 0, float("inf") if length is None else length
    with path.open("rb") as file:
        while left and (piece := file.read(int(min(PIECE, left)))):
            check = zlib.crc32(piece, check)
            left -= len(piece)
    return None if left and length is not None else check


# ---- records -------------------------------------------------------------------------------------------


def parse(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is damaged, also if it is nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its seal.

    >>> sealed({"round": 3})
    {'round': 3, 'seal': 3955384739}
    >>> is_intact({"round": 4, "seal": 3955384739}), is_intact({"round": 4})
    (False, True)
    """
    return values | {SEAL: zlib.crc32(json.dumps(values, allow_nan=False).encode())}


def is_intact(values: Any) -> bool:
    """Return whether this is a record with the content that was sealed; one of an earlier version has no seal."""
    if not isinstance(values, dict):
        return False
    rest = {name: value for name, value in values.items() if name != SEAL}
    try:
        return SEAL not in values or values[SEAL] == sealed(rest)[SEAL]
    except ValueError:  # not a number, such as NaN
        return False


def records(path: Path) -> list[dict[str, Any]] | None:
    """Return the complete lines of a file of records, without seals; None if one is damaged, [] without the file."""
    found = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            values = parse(line)
        except ValueError:
            return None
        if not is_intact(values):
            return None
        found.append({name: value for name, value in values.items() if name != SEAL})
    return found
