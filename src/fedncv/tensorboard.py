"""Write TensorBoard event files next to a run's metrics. Needs the extra `tensorboard`.

>>> fedncv.simulate(method="fedavg", on_round=fedncv.tensorboard.writer("events/fedavg"))  # doctest: +SKIP
"""

from collections.abc import Callable
from pathlib import Path

from fedncv.results import scalars
from fedncv.runner import Row, Watch


def writer(folder: str | Path) -> Callable[[Row], None]:
    """Return an ``on_round`` that writes every number of a row under its own name."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError('TensorBoard is not installed; pip install "fedncv[tensorboard]"') from None
    events = SummaryWriter(str(folder))

    def on_round(row: Row) -> None:
        for name, value in scalars(row).items():
            events.add_scalar(name, value, row["round"])
        events.flush()

    return on_round


def beside(watch: Watch) -> Watch:
    """Return ``watch`` extended to write the events of each run into its folder."""
    writers: dict[Path, Callable[[Row], None]] = {}

    def row(folder: Path, values: Row) -> None:
        if folder not in writers:
            writers[folder] = writer(folder / "tensorboard")
        writers[folder](values)
        watch.row(folder, values)

    return watch._replace(row=row)
