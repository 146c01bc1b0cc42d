"""Check a config before anything is loaded or written: its values, and every name in it."""

from fedncv.config import RunConfig
from fedncv.data import PARTITIONS, STREAMS, check_name
from fedncv.methods import find_method
from fedncv.models import find_model
from fedncv.spec import parse
from fedncv.tasks import find_task


def check(config: RunConfig, *, custom: tuple[str, ...] = ()) -> None:
    """Raise ValueError with the offending value and the remedy. Fields in ``custom`` are objects, not names."""
    config.check(custom=custom)
    if "method" not in custom:
        find_method(config.method)
    if "data" not in custom:
        check_name(config.data)
    if "model" not in custom:
        find_model(config.model)
    if "task" not in custom:
        find_task(config.task)
    parse(config.partition, PARTITIONS, what="partition")
    if config.stream:
        parse(config.stream, STREAMS, what="stream")
