"""Problem: the constant part of a run. State: the changing part. Arrival: what a client starts a round with."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.config import RunConfig, short_name
from fedncv.data import STREAMS, Clients, Dataset, Stream, check_samples, divide, load, split, standardised
from fedncv.data.owners import grouped
from fedncv.data.unseen import num_unseen, order
from fedncv.engine import sampling
from fedncv.engine.arithmetic import check_precision, low_precision
from fedncv.engine.check import check, check_private, check_room, check_sgd
from fedncv.engine.keeping import room
from fedncv.engine.scored import sample
from fedncv.flat import Factory, Model
from fedncv.keys import key_for
from fedncv.methods import find_method, is_own
from fedncv.methods.base import Ask, Batch, BufferRule, Client, Federation, Method, Work, for_all
from fedncv.methods.base import check as check_method
from fedncv.methods.trial import Given, try_method
from fedncv.metrics import Function, Kind, Metric, check_fit, find_metrics
from fedncv.models import find_model
from fedncv.optimizers import Optimizer, find_optimizer, try_optimizer
from fedncv.rows import AnyRows, rows_for
from fedncv.spec import parse
from fedncv.tasks import TASKS, Task, find_task
from fedncv.topology.check import check_graph
from fedncv.topology.network import SERVER, Topology, find_topology
from fedncv.topology.rule import on_graph
from fedncv.tree import num_bytes, row

MESSAGE_BYTES = 1 << 28  # of messages of a model's size to make at a time, if all clients are asked


class Problem(NamedTuple):
    config: RunConfig
    dataset: Dataset
    clients: Clients
    model: Model
    task: Task
    method: Method
    optimizer: Optimizer
    federation: Federation
    rates_N: sampling.Probabilities  # reachability of each client, if sampling needs it
    inclusion_N: sampling.Probabilities  # probability of being drawn for a round
    stream: Stream | None = None  # if clients receive samples during training
    metrics: tuple[Metric, ...] = ()
    plain: Model | None = None  # the model with torch's layers, if ``model`` has compiled ones
    sample: sampling.Ids | None = None  # clients that train and are scored; None: all of them
    guests: sampling.Ids | None = None  # clients that never train and are scored; None: there are none
    fixed_lr: float | None = None  # learning rate of all rounds, in place of the study's
    topology: Topology | None = None  # of a federation without a server

    def at(self, round: int) -> "Problem":
        """Return the problem of a round: with a stream, clients hold the samples that have arrived by then."""
        if self.stream is None:
            return self
        clients = self.clients._replace(train=self.stream.visible(round))
        sizes = clients.sizes[: self.federation.num_clients].astype(np.float64)
        return self._replace(
            clients=clients,
            federation=self.federation._replace(sizes_N=torch.from_numpy(sizes)),
            inclusion_N=_inclusion(self.config, sizes, self.rates_N),
            stream=None,
        )

    def sharing(self, other: "Problem") -> "Problem":
        """Return the problem with the samples and constants of a problem on the same data, to store them once."""
        self.model.share_constants(other.model)
        return self._replace(dataset=self.dataset.in_memory_of(other.dataset))

    @property
    def scored(self) -> sampling.Ids:
        """The clients with test samples, or the sample of them that is scored; then those that never train."""
        own = np.flatnonzero(self.member_test_sizes) if self.sample is None else self.sample
        return own if self.guests is None else np.concatenate([own, self.guests])

    @property
    def member_test_sizes(self) -> NDArray[np.int64]:
        """Test samples of each client that trains: clients 0 to n - 1 (``data.unseen``)."""
        return self.clients.test_sizes[: self.federation.num_clients]

    @property
    def holders(self) -> sampling.Ids:
        """The clients that train and have training samples."""
        return np.flatnonzero(self.clients.sizes[: self.federation.num_clients])

    @property
    def buffer_rule(self) -> str | BufferRule:
        """The method's rule if it requires one; otherwise the study's."""
        rule = self.method.buffers
        if self.method.privacy is not None and not self.model.start_R.numel():
            return "averaged"  # there are none: then all clients use one model
        insists = not rule.shared if isinstance(rule, BufferRule) else rule == "personal"
        return rule if insists or self.config.buffers == "averaged" else self.config.buffers

    @property
    def layers(self) -> str:
        """The layers of ``model``, as timing.jsonl names them."""
        return "torch's" if self.plain is None else "compiled"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.start_P.dtype

    @property
    def in_use(self) -> "Problem":
        """The same problem, with messages for inference, if that model differs from the training one."""
        method = self.method
        return self._replace(method=method._replace(broadcast=method.hand_out)) if method.hand_out else self

    @property
    def tuning(self) -> "Problem":
        """The same problem with the local training that "after" measures, if that is not the training of a round."""
        tuning = self.method.finetune
        if tuning is None:
            return self
        return self._replace(method=self.method._replace(phases=tuning.phases), fixed_lr=tuning.lr)

    def client(self, u: int) -> Client:
        train = torch.from_numpy(self.clients.train[u])
        labels = self.dataset.y[train]
        num_classes = self.dataset.num_classes
        counts_C = self.model.start_P.new_zeros(num_classes)
        if not labels.is_floating_point() and labels.dim() == 1:
            counts_C += torch.bincount(labels, minlength=num_classes)
        num_samples = counts_C.new_tensor(len(train))
        return Client(u, num_samples, num_samples.clamp(max=self.config.batch_size), counts_C)

    def ask(self, u: int, buffers_R: Tensor, round: int, *, received_R: Tensor | None = None, survey: Any = ()) -> Ask:
        """Return what client u may ask outside its steps; ``received_R`` are the statistics that it began with."""
        num_samples, batch_size = len(self.clients.train[u]), self.config.batch_size
        return Ask(
            self.model,
            self.task,
            buffers_R,
            client=self.client(u),
            round=round,
            key=key_for(self.config.seed, "client", round, u).to(buffers_R.device),
            num_batches=-(-num_samples // batch_size),
            batch_size=min(batch_size, num_samples),
            received_R=received_R,
            survey=survey,
        )


class Kept(NamedTuple):
    """A client's state between rounds."""

    own: Any
    buffers_R: Tensor  # empty unless running statistics are personal


class Totals(NamedTuple):
    """Work since the run began, over all clients."""

    samples: int = 0  # samples that went through local training
    gradients: int = 0  # sample gradients evaluated for it
    forwards: int = 0  # further samples passed forward only
    bytes_down: int = 0
    bytes_up: int = 0


class DivergedError(ArithmeticError):
    """A number is not finite: in a client's update, the server's model or a score."""


class State(NamedTuple):
    round: int  # rounds finished
    server: Any
    buffers: Any  # running statistics at the server: a vector, or the state of the method's rule
    kept: AnyRows  # a Kept for each client that has taken part; the others have the result of `init_own`
    totals: Totals = Totals()


Settled = tuple[State, dict[str, Any]] | DivergedError
"""The result of a round: the state and the row of metrics, or the error."""


def build(
    config: RunConfig,
    *,
    data: Dataset | None = None,
    clients: Clients | None = None,
    model: Factory | None = None,
    method: Method | None = None,
    task: Task | None = None,
    optimizer: Optimizer | None = None,
    metrics: Mapping[str, Function] | None = None,
) -> Problem:
    """Build the problem of ``config``; given objects replace the named ones, and metrics those of the same text."""
    given = {"data": data, "model": model, "method": method, "task": task, "optimizer": optimizer}
    check(config, custom=tuple(name for name, value in given.items() if value is not None))
    device = find_device(config.device)
    check_precision(config, device)
    dataset = data or load(config.data, config.data_dir or None)
    check_samples(dataset)
    if task is None:
        check_targets(config.task, dataset)
    if clients is None:
        parts = divide(dataset, config.partition, num_clients=config.clients, seed=config.seed)
        clients = split(parts, config.test_share, config.seed)
    clients = Clients(grouped(clients.train), grouped(clients.test))
    num_clients = len(clients.train) - num_unseen(config.unseen, len(clients.train))
    members = clients
    if config.unseen:
        clients = clients.only(order(config.seed, config.unseen, len(clients.train)))
        members = clients.only(np.arange(num_clients))
    dataset = standardised(dataset, members)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    dataset = dataset._replace(x=dataset.x.to(device), y=dataset.y.to(device))
    example = dataset.inputs(torch.arange(min(2, len(dataset.x))), dtype)
    low = low_precision(config)
    made = Model(model or find_model(config.model), example, dataset.num_classes, config.seed, dtype, low)
    task = task or find_task(config.task)
    _try_task(short_name(config.task), task, made, dataset, dtype)
    sizes = members.sizes.astype(np.float64)
    federation = Federation(
        num_clients=num_clients,
        per_round=config.per_round,
        rounds=config.rounds,
        sizes_N=torch.from_numpy(sizes),
        num_classes=dataset.num_classes,
        layout=made.layout,
        key=key_for(config.seed, "server start"),
        label_counts=partial(_label_counts, dataset, members),
    )
    rates_N = np.linspace(config.availability, 1.0, num_clients)
    inclusion_N = _inclusion(config, sizes, rates_N)
    federation = federation._replace(
        sampling=config.sampling,
        inclusion_N=torch.from_numpy(inclusion_N) * (1 - config.dropout),
        drops_out=config.dropout > 0,
    )
    stream = None
    method = method or find_method(config.method)
    check_method(method)
    optimizer = optimizer or find_optimizer(
        config.optimizer, momentum=config.momentum, weight_decay=config.weight_decay
    )
    check_sgd(config, method, optimizer)
    check_room(config, method, int(sizes.max()))
    check_private(config, method)
    measured = find_metrics(config.metrics, metrics)
    check_fit(measured, _kind(task, dataset), dataset.num_classes)
    try_optimizer(short_name(config.optimizer), optimizer, made.start_P)
    if config.stream:
        if method.fixed_sizes:
            raise ValueError(
                f"{config.method} needs clients whose number of samples does not change; leave stream empty"
            )
        name, knobs = parse(config.stream, STREAMS, what="stream")
        stream = STREAMS[name](clients.train, dataset.labels.cpu().numpy(), config.seed, **knobs)
    problem = Problem(
        config,
        dataset,
        clients,
        made,
        task,
        method,
        optimizer,
        federation,
        rates_N,
        inclusion_N,
        stream,
        measured,
        sample=sample(config.seed, members.test_sizes, config.eval_clients),
        guests=_guests(config, clients, num_clients) if config.unseen else None,
    )
    if given["method"] is not None or is_own(config.method):
        _try_method(problem)
    problem = _without_server(problem)
    if config.unseen:
        _check_guests(problem)
    if made.layout.body.stop == made.layout.num_parameters:  # nothing to train in the head: can the method start?
        keeps(problem.at(0), start(problem), 0)
    return problem


def _guests(config: RunConfig, clients: Clients, num_members: int) -> sampling.Ids:
    """Return the clients that never train and are scored: those with test samples, or a sample of them."""
    test_sizes = clients.test_sizes[num_members:]
    drawn = sample(config.seed, test_sizes, config.eval_clients, purpose="scored unseen clients")
    return num_members + (np.flatnonzero(test_sizes) if drawn is None else drawn)


def _check_guests(problem: Problem) -> None:
    """Raise ValueError if the method has no message for a client that never trains."""
    federation, method, model = problem.federation, problem.method, problem.model
    server = method.init(model.start_P.cpu(), federation)
    ids_S = torch.tensor([federation.num_clients])
    try:
        for broadcast in filter(None, (method.broadcast, method.hand_out)):
            broadcast(server, ids_S)
    except IndexError as error:
        raise ValueError(
            f"unseen is {problem.config.unseen:g}, but {short_name(problem.config.method)} has no message for a client "
            f"that never trains ({error}): such clients have the numbers {federation.num_clients} and above; let "
            "broadcast give them what a client gets that was never drawn, or use unseen 0"
        ) from None


def _without_server(problem: Problem) -> Problem:
    """Return the problem with all clients' copies of the server's state, if the study has a topology."""
    config, method = problem.config, problem.method
    check_graph(config, method)
    if config.topology == SERVER:
        return problem
    topology = find_topology(config.topology, problem.federation.num_clients, config.seed)
    if problem.buffer_rule == "personal":
        method = method._replace(buffers="personal")
    start_R = problem.model.start_R
    mixed = 0 if method.buffers == "personal" else num_bytes(start_R)
    method = on_graph(method, topology, problem.federation.sizes_N, statistics_bytes=mixed)
    return problem._replace(method=method, topology=topology)


def _label_counts(dataset: Dataset, clients: Clients) -> Tensor:
    """Return how many training samples of each class every client holds; zeros if the targets are not classes."""
    counts_NC = torch.zeros(len(clients.train), dataset.num_classes, dtype=torch.float64)
    labels = dataset.y.cpu()
    if labels.is_floating_point() or labels.dim() > 1:
        return counts_NC
    for u, rows in enumerate(clients.train):
        counts_NC[u] = torch.bincount(labels[torch.from_numpy(rows)], minlength=dataset.num_classes)
    return counts_NC


def _kind(task: Task, dataset: Dataset) -> Kind:
    """Return whether the task is a regression. One of the user's own is, if its targets are not whole numbers."""
    if task in TASKS.values():
        return "regression" if task == TASKS["regression"] else "classification"
    return "regression" if dataset.y.is_floating_point() else "classification"


def check_targets(task: str, dataset: Dataset) -> None:
    """Raise ValueError if a built-in task is for other targets; a task of the user's own may compare anything."""
    numbers = dataset.y.is_floating_point()
    if task == "classification" and numbers:
        raise ValueError(f"{dataset.name}: the targets are numbers, not classes; use task regression, or give integers")
    if task == "classification":
        y = dataset.y.to(torch.int64)
        wrong = ((y < 0) | (y >= dataset.num_classes)).nonzero()
        if len(wrong):
            place = tuple(wrong[0].tolist())
            raise ValueError(
                f"{dataset.name}: the target of sample {place[0]} is {int(y[place])}, and classes are 0 to "
                f"{dataset.num_classes - 1}; number them so, or write a task that leaves out those that do not count"
            )
    if task == "regression" and not numbers and dataset.classes:
        some = ", ".join(dataset.classes[:3]) + ", ..." * (len(dataset.classes) > 3)
        column = ", or read the column with target=number" if _are_numbers(dataset.classes) and dataset.features else ""
        raise ValueError(
            f"{dataset.name}: the targets are classes ({some}), not numbers; use task classification{column}"
        )


def _are_numbers(texts: tuple[str, ...]) -> bool:
    try:
        return bool([float(text) for text in texts])
    except ValueError:
        return False


def _try_task(name: str, task: Task, model: Model, dataset: Dataset, dtype: torch.dtype) -> None:
    """Raise ValueError unless loss and score return one number per sample for these outputs and targets.

    Two batches of different sizes, so that no other axis of the result can have the length of both by chance.
    """
    index = torch.arange(3) % len(dataset.x)
    with torch.no_grad():
        output, _ = model.forward(model.start_P, model.start_R, dataset.inputs(index, dtype), mode="eval")
        if task == TASKS["classification"]:
            _check_outputs(output.logits_BC, dataset)
        for what, function in (("loss", task.loss), ("score", task.score)):
            for size in (2, 3):
                outputs, targets = output.logits_BC[:size], dataset.y[index[:size]]
                try:
                    found = function(outputs, targets)
                except (RuntimeError, IndexError) as error:
                    raise ValueError(
                        f"task {name!r}: {what} cannot compare outputs of shape {tuple(outputs.shape)} with targets of "
                        f"shape {tuple(targets.shape)}, {targets.dtype} ({str(error).splitlines()[0]}); "
                        "choose a task for these data"
                    ) from None
                _check_per_sample(f"task {name!r}: {what}", found, size)


def _check_outputs(outputs: Tensor, dataset: Dataset) -> None:
    """Raise ValueError unless there is an output for each class; further axes, such as time, come after it."""
    wanted = dataset.num_classes
    if outputs.shape[1:2] != (wanted,):
        raise ValueError(
            f"the model returns shape {tuple(outputs.shape)} for {len(outputs)} samples, but {dataset.name} has "
            f"{wanted} classes; return ({len(outputs)}, {wanted}): the model's function gets {wanted} as its second "
            "argument"
        )


def _check_per_sample(what: str, found: object, size: int) -> None:
    if isinstance(found, Tensor) and found.shape == (size,):
        return
    returned = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"{what} of {size} samples returns {returned}; one number per sample is wanted, shape ({size},): "
        "use reduction='none', and the mean over all axes but the first"
    )


def _try_method(problem: Problem) -> None:
    """Raise ValueError if a client function of the user's method fails or returns the wrong thing, on two samples."""
    config, dataset, dtype = problem.config, problem.dataset, problem.dtype
    rows = np.arange(2) % len(dataset.x)
    small = problem._replace(clients=Clients([rows], [rows[:0]]))
    index = torch.from_numpy(rows)
    x = dataset.inputs(index, dtype)
    batch = Batch(x, dataset.y[index.to(dataset.y.device)], x.new_ones(len(x), dtype=dtype), 0)
    total_step = problem.optimizer.total_step
    work = Work(1, len(x), config.lr, math.nan if total_step is None else total_step(1, config.lr))
    given = Given(problem.model, problem.task, problem.federation, small.client(0), batch, config.epochs, work)
    try_method(short_name(config.method), problem.method, given)


def _inclusion(
    config: RunConfig, sizes: sampling.Probabilities, rates_N: sampling.Probabilities
) -> sampling.Probabilities:
    if config.sampling in ("uniform", "poisson"):
        return sampling.uniform_inclusion(len(sizes), config.per_round)
    if config.sampling == "weighted":
        return sampling.weighted_inclusion(sizes, config.per_round)
    return sampling.available_inclusion(rates_N, config.per_round)


def find_device(name: str) -> torch.device:
    """Return the device ``cpu``, ``cuda`` or ``cuda:3``; raise ValueError if there is no such GPU."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"device is {name!r}, but torch sees no GPU; use device cpu, or run on a machine with a GPU")
    if (device.index or 0) >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ValueError(f"device is {name!r}, but torch sees {count} GPU{'s' * (count > 1)} here; use {there}")
    return device


def start(problem: Problem, *, runs: int = 1) -> State:
    """Return the state before the first round; ``runs`` runs share the memory."""
    problem = problem.at(0)
    rule, model = problem.buffer_rule, problem.model
    buffers = rule.init(model.start_R, problem.federation) if isinstance(rule, BufferRule) else model.start_R
    state = State(0, problem.method.init(model.start_P, problem.federation), buffers, {})
    if problem.config.rows == "memory":
        return state
    device, num_clients = model.start_P.device, problem.federation.num_clients
    in_memory = room(device) / runs if problem.config.rows == "auto" else 0.0
    placed: State = rows_for(state, room=in_memory, num_clients=num_clients, device=device)
    return placed


def keeps(problem: Problem, state: State, u: int) -> Kept:
    """Return client u's state, made by `init_own` if it never took part."""
    if u in state.kept:
        kept: Kept = state.kept[u]
        return kept
    personal = problem.buffer_rule == "personal"
    buffers_R = problem.model.start_R if personal else problem.model.start_R[:0]
    ask = problem.ask(u, problem.model.start_R, round=0)
    return Kept(problem.method.init_own(ask, problem.model.start_P), buffers_R)


class Arrival(NamedTuple):
    """The message, running statistics and own state with which client u starts a round."""

    client: int
    down: Any
    buffers_R: Tensor
    kept: Kept


def arrivals(problem: Problem, state: State, ids: sampling.Ids) -> Iterator[Arrival]:
    """Yield the server's message to each of these clients, with the client's own state."""
    at_once = at_a_time(problem)
    for k in range(0, len(ids), at_once):
        some = ids[k : k + at_once]
        down_S, b_SR = messages(problem, state, some)
        for i, u in enumerate(some.tolist()):
            kept = keeps(problem, state, u)
            yield Arrival(u, row(down_S, i), kept.buffers_R if problem.buffer_rule == "personal" else b_SR[i], kept)


def at_a_time(problem: Problem) -> int:
    """Return the number of messages to make at a time. Their last digits may depend on it."""
    return max(1, MESSAGE_BYTES // num_bytes(problem.model.start_P))


def messages(problem: Problem, state: State, ids: sampling.Ids) -> tuple[Any, Tensor]:
    """Return the server's messages to these clients, stacked: the method's message and the running statistics."""
    ids_S = torch.from_numpy(ids).to(problem.model.start_P.device)
    down_S = problem.method.broadcast(state.server, ids_S)
    rule = problem.buffer_rule
    if isinstance(rule, BufferRule):
        return down_S, rule.broadcast(state.buffers, state.server, ids_S)
    return down_S, for_all(state.buffers, ids_S)
