"""Download datasets from the Hugging Face hub, with the library ``datasets`` (the extra ``hub``).

On machines without a network, FEDNCV_HUB may name a folder that replaces the hub. Its ``<id>/`` was written by
``Dataset.save_to_disk``, or holds the original files if the hub does.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fedncv.data.cache import cache_folder
from fedncv.data.folder import decode
from fedncv.data.raw import PIECE, Raw, reason
from fedncv.data.registry import Entry, Hub
from fedncv.spec import expanded


@contextmanager
def plain_errors(hub: Hub) -> Iterator[None]:
    """Turn any error of the network, the hub or the library into a ValueError of one line."""
    try:
        yield
    except ImportError:
        raise ValueError(f"downloading {hub.id} needs the extra 'hub': pip install 'fedncv[hub]'") from None
    except ValueError:
        raise
    except Exception as error:  # these libraries raise many kinds
        raise ValueError(f"cannot download {hub.id} ({reason(error)})") from None


def download(entry: Entry) -> Iterator[Raw]:
    """Download a dataset by its hub id, in pieces; the libraries show their own progress bars."""
    hub = entry.hub
    assert hub is not None
    with plain_errors(hub):
        if hub.files:
            yield from entry.read(fetch_files(hub, entry.files))
            return
        for split in hub.splits:
            yield from rows(fetch_split(hub, split), entry, hub)


def reach(hub: Hub) -> None:
    """Raise ValueError at once if there is no network: the library would retry for half a minute."""
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return  # only the proxy can tell
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=10).close()
    except OSError as error:
        raise ValueError(f"cannot download {hub.id}, {host.netloc} is not reachable ({error})") from None


def stand_in(hub: Hub) -> Path | None:
    folder = os.environ.get("FEDNCV_HUB")
    return expanded(folder) / hub.id if folder else None


def fetch_files(hub: Hub, files: tuple[str, ...]) -> Path:
    """Return the folder with the original files."""
    if local := stand_in(hub):
        return local
    library = import_module("huggingface_hub")
    reach(hub)
    patterns = list(files)
    return Path(
        library.snapshot_download(
            hub.id, repo_type="dataset", allow_patterns=patterns, cache_dir=cache_folder() / "hub"
        )
    )


def fetch_split(hub: Hub, split: str) -> Any:
    """Return one split as the library's own Dataset."""
    datasets = import_module("datasets")
    if local := stand_in(hub):
        if not local.exists():
            raise ValueError(f"{hub.id} is not in the folder that replaces the hub, {local} (FEDNCV_HUB)")
        return datasets.load_from_disk(str(local))[split]
    reach(hub)
    return datasets.load_dataset(hub.id, hub.config, split=split, cache_dir=str(cache_folder() / "hub"))


def rows(table: Any, entry: Entry, hub: Hub) -> Iterator[Raw]:
    """Yield the table's pictures and labels, PIECE at a time."""
    datasets = import_module("datasets")
    columns = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
    if not columns or hub.label not in table.features:
        raise ValueError(f"{hub.id} has the columns {list(table.features)}, but needs a picture and {hub.label!r}")
    column = columns[0]
    # Decode the encoded bytes ourselves, to get the same pixels as from the original files.
    table = table.select_columns([column, hub.label]).cast_column(column, datasets.Image(decode=False))
    channels, *size = entry.shape
    for start in range(0, len(table), PIECE):
        piece = table[start : start + PIECE]
        images = [
            decode(
                picture["bytes"] or Path(picture["path"]).read_bytes(),
                f"{hub.id} row {start + number}",
                size=(size[0], size[1]),
                channels=channels,
            )
            for number, picture in enumerate(piece[column])
        ]
        yield Raw(np.stack(images), np.array(piece[hub.label], dtype=np.int64))
