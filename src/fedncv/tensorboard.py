"""Write TensorBoard event files next to a run's metrics. Needs the extra `tensorboard`.

>>> fedncv.simulate(method="fedavg", on_round=fedncv.tensorboard.writer("events/fedavg"))  # doctest: +SKIP
"""

from pathlib import Path

from fedncv.runner import Row, Watch
from fedncv.simulation import OnRound


def writer(folder: str | Path) -> OnRound:
    """Return an ``on_round`` that writes every number of a row under its own name."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError('TensorBoard is not installed; pip install "fedncv[tensorboard]"') from None
    events = SummaryWriter(str(folder))

    def on_round(row: Row) -> None:
        for name, value in row.items():
            if name != "round" and isinstance(value, int | float):
                events.add_scalar(name, value, row["round"])
        events.flush()

    return on_round


def beside(watch: Watch) -> Watch:
    """Return ``watch`` extended to write the events of each run into its folder."""
    writers: dict[Path, OnRound] = {}

    def row(folder: Path, values: Row) -> None:
        if folder not in writers:
            writers[folder] = writer(folder / "tensorboard")
        writers[folder](values)
        watch.row(folder, values)

    return watch._replace(row=row)
