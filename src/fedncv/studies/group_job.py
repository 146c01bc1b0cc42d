"""What a worker of a study's cluster asks of the processes it starts. Imports no torch: the worker only waits."""

from typing import NamedTuple

from fedncv.config import RunConfig
from fedncv.study import Cell

Files = dict[str, bytes]  # of one run: name -> content


class TrainJob(NamedTuple):
    """Train a group: where it lies, or, with ``files``, in copies of its folders below ``root``."""

    folders: list[str]
    again: bool  # another worker of this group was lost
    files: list[Files] | None = None
    root: str = ""
    has_partition: bool = False  # the column of the study has the file, so that the runs need none
    copy_seconds: float = 0.0  # between two copies


class CheckJob(NamedTuple):
    """Find out whether these runs can be trained on this machine."""

    configs: list[RunConfig]


class CostJob(NamedTuple):
    """Calibrate the cost of these runs on this machine."""

    cells: list[Cell]


class Setup(NamedTuple):
    """What all workers of a study share."""

    path: list[str]  # where the driver finds modules
    data: str  # its $FEDNCV_DATA, for workers that have none
    cores: int
    check: CheckJob
    checked: frozenset[str]  # ids of the nodes that were checked before the study began
    token: tuple[str, str] = ("", "")  # a file of the study's folder and its content: who reads it sees the folder
    copy_seconds: float = 60.0
    hung_seconds: float = 600.0


class Started(NamedTuple):
    """First answer of a worker."""

    host: str
    versions: dict[str, str]
    failed: str = ""


class Answer(NamedTuple):
    """What has happened since the last answer."""

    events: list[tuple[object, ...]] = []  # noqa: RUF012  (nobody changes it)
    ended: bool = False
    lost: str = ""  # why the process of the group ended before the group
    needs_files: bool = False  # the worker does not see the study's folder
