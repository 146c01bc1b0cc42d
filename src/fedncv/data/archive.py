"""Unpack archives safely, and check checksums.

Our own loop writes only plain files and folders. It ignores permissions and owners, and raises an error for links,
devices, names that point outside the folder, and archives that unpack to more than a dataset can need.
"""

import gzip
import hashlib
import io
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fedncv.data.raw import reason

LIMIT = 2 << 30  # bytes that any archive may unpack to
FILES = 2_000_000  # and files
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError)


def check_md5(path: Path, md5: str) -> None:
    """Raise ValueError unless the file has the published checksum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != md5:
        raise ValueError(
            f"{path} has the md5 checksum {found}, published is {md5}; "
            "fetch it again, or pass verify=False to accept it"
        )


@contextmanager
def unpacked(path: Path, scratch: Path, *, limit: int = LIMIT) -> Iterator[Path]:
    """Unpack the archive into a new folder below ``scratch``, and remove the folder afterwards, also after an error."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="unpack-", dir=scratch))
    except OSError as error:
        raise ValueError(f"cannot unpack {path.name} to {scratch}: {error.strerror}") from None
    try:
        unpack(path, folder, limit=limit)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Counted(io.RawIOBase):
    """A stream that raises an error when more than ``left`` bytes were read from it."""

    def __init__(self, source: Any, left: int, error: ValueError) -> None:
        self._source, self._left, self._error = source, left, error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._left -= len(data)
        if self._left < 0:
            raise self._error
        return len(data)


def _too_large(path: Path, words: str) -> ValueError:
    return ValueError(f"{path} would unpack {words}, which no dataset here needs; it is damaged or unsafe, delete it")


def unpack(path: Path, folder: Path, *, limit: int = LIMIT) -> None:
    """Write every plain file of a .zip, .tar or .tar.gz below ``folder``: together at most ``limit`` bytes."""
    too_large = _too_large(path, f"to more than {limit / 1e9:.1f} GB")
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                left = limit
                if len(archive.infolist()) > FILES:
                    raise _too_large(path, f"to {len(archive.infolist()):,} files")
                for entry in archive.infolist():
                    if entry.flag_bits & 1:
                        raise ValueError(
                            f"{path} is encrypted ({entry.filename}); unpack it with its password, and put the files "
                            "into its folder"
                        )
                    target = inside(folder, entry.filename, path)
                    if (entry.external_attr >> 16) & 0o170000 == 0o120000:
                        raise ValueError(f"{path} holds the link {entry.filename!r}, which no dataset needs; delete it")
                    if not entry.is_dir():
                        with archive.open(entry) as source:
                            left -= _write(_Counted(source, left, too_large), target)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
                stream = io.BufferedReader(_Counted(opened, limit, too_large), 1 << 16)
                with tarfile.open(fileobj=stream, mode="r|") as tar:  # one pass, as a stream
                    for number, member in enumerate(tar):
                        if number == FILES:
                            raise _too_large(path, f"to more than {FILES:,} files")
                        _member(tar, member, folder, path)
                while stream.read(1 << 20):  # to the end, where gzip stores its checksum
                    pass
    except (EOFError, *DAMAGE) as error:
        raise ValueError(f"{path} is truncated or damaged ({reason(error)}); fetch it again") from None
    except OSError as error:
        if error.errno is None:  # gzip reports damage this way
            raise ValueError(f"{path} is truncated or damaged ({reason(error)}); fetch it again") from None
        raise ValueError(f"cannot unpack {path} to {folder}: {error.strerror}; free space there") from None


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, path: Path) -> None:
    target = inside(folder, member.name, path)
    source = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if source is not None:
        _write(source, target)
    elif not member.isdir():
        raise ValueError(f"{path} holds {member.name!r}, a link or device, which no dataset needs; delete it")


def inside(folder: Path, name: str, archive: Path) -> Path:
    """Return the path for the archive's file ``name``; raise ValueError if it is not below ``folder``."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not name or name.startswith(("/", "\\")) or ".." in parts or ":" in name:
        raise ValueError(f"{archive} would write {name!r} outside its folder; it is unsafe, delete it")
    return folder.joinpath(*parts)


def _write(source: Any, target: Path) -> int:
    """Return the number of bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        return file.tell()
