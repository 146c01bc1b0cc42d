"""Check a config before anything is loaded or written: its values, and every name in it."""

import os
from dataclasses import replace

from fedncv import accountant
from fedncv.config import OBJECTS, RunConfig, own_object, short_name
from fedncv.data import PARTITIONS, STREAMS, absolute_name, check_name
from fedncv.imports import code_folder, look_in
from fedncv.methods import find_method
from fedncv.methods.base import Method
from fedncv.metrics import find_metrics
from fedncv.models import find_model
from fedncv.objects import code_of
from fedncv.optimizers import Optimizer, check_settings, find_optimizer
from fedncv.secure import fixed_point
from fedncv.spec import expanded, parse, split
from fedncv.tasks import find_task
from fedncv.topology.check import check_graph
from fedncv.topology.network import absolute_text


def check(config: RunConfig, *, custom: tuple[str, ...] = ()) -> None:
    """Raise ValueError with the offending value and the remedy. Fields in ``custom`` are objects, not names."""
    config.check(custom=custom)
    look_in(config.code_dir)
    method = None if "method" in custom else find_method(config.method)
    if "data" not in custom:
        check_name(config.data)
    if "model" not in custom:
        find_model(config.model)
    if "task" not in custom:
        find_task(config.task)
    if "optimizer" in custom:
        check_settings(config.momentum, config.weight_decay)
    else:
        optimizer = find_optimizer(config.optimizer, momentum=config.momentum, weight_decay=config.weight_decay)
        if method is not None:
            check_sgd(config, method, optimizer)
    if method is not None:
        check_room(config, method)
        check_private(config, method)
    find_metrics(text for text in config.metrics if own_object(text) is None)
    parse(config.partition, PARTITIONS, what="partition")
    if config.stream:
        parse(config.stream, STREAMS, what="stream")
    check_graph(config, method)


def anchored(config: RunConfig, *, custom: tuple[str, ...] = ()) -> RunConfig:
    """Check the config, and return it as it works from anywhere: with absolute paths and the folder of own modules.

    It also gets the fingerprints of the user's own code.
    """
    config.check(custom=custom)
    code = code_of(config, custom=custom)  # before the user's functions are called
    check(config, custom=custom)
    texts = []
    for text in (*(getattr(config, name) for name in OBJECTS), *config.metrics):
        given = own_object(text)
        # of a chain, the method before its switches
        texts.append(given.name if given else split(text, r"\+(?!\d)")[0])
    return replace(
        config,
        data_dir=os.path.abspath(expanded(config.data_dir)) if config.data_dir else "",
        data=config.data if "data" in custom else absolute_name(config.data),
        topology=absolute_text(config.topology),
        code_dir=os.path.abspath(config.code_dir) if os.path.isdir(config.code_dir) else code_folder(texts),
        code=code,
    )


def check_room(config: RunConfig, method: Method, largest: int = 0) -> None:
    """Raise ValueError if sums of +fixed_point could overflow, or would need a client's size.

    ``largest`` is the largest number of training samples.
    """
    if method.grid is None:
        return
    if config.sampling == "weighted":
        raise ValueError(
            "sampling=weighted draws clients by their sizes, which sums of +fixed_point hide; use sampling=uniform"
        )
    fixed_point.check_room(method.grid, config.per_round)
    if largest > method.grid.samples:
        raise ValueError(
            f"a client has {largest:,} training samples, and fixed_point has room for samples={method.grid.samples:,}; "
            f"use +fixed_point:samples={largest}"
        )


def check_sgd(config: RunConfig, method: Method, optimizer: Optimizer) -> None:
    """Raise ValueError if the method needs SGD and the optimizer is another one."""
    if method.needs_sgd and optimizer.total_step is None:
        name, given = short_name(config.method), short_name(config.optimizer)
        raise ValueError(f"{name} needs optimizer=sgd, not {given}: {method.needs_sgd}")


def check_private(config: RunConfig, method: Method) -> None:
    """Raise ValueError if the setting cannot give the guarantee of the method's differential privacy."""
    privacy, name = method.privacy, short_name(config.method)
    if privacy is None:
        return
    accountant.library()
    if config.sampling == "weighted":
        raise ValueError(
            f"{name} cannot be used with sampling=weighted: who is drawn depends on the sizes of all clients, so a "
            "client changes more than its own summand; use sampling=poisson or uniform"
        )
    if not privacy.delta < 1 / config.clients:
        raise ValueError(
            f"{name}: delta is {privacy.delta:g}, but must be below 1 / clients = {1 / config.clients:.3g}: a larger "
            "one allows to publish the data of a client drawn at random"
        )
