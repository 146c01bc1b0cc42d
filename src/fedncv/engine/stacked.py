"""The engine for a GPU: train all clients of a round, of several runs, together.

There are two ways. "stacked": the client's functions of the method run under ``torch.vmap`` over stacked rows, as one
batch (``stage``). "streams": each client makes ordinary steps on a CUDA stream of its own (``streams``). The server's
half runs per run, in the order of ids, with the code of the sequential engine. Runs may differ in ``choose.OWN``:
seed, learning rate, partition, draw of clients. A run is identified by its place in the stack, not by its seed.

K rows (clients of this round in all runs), J runs, F phases.
"""

import contextlib
import copy
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedncv.engine import orders, sampling
from fedncv.engine.arithmetic import EXACT
from fedncv.engine.asking import Asks, asking
from fedncv.engine.fused import HAVE_KERNELS, fuse, fused_task
from fedncv.engine.keeping import Keeper
from fedncv.engine.local import Trained, lr_of, total_step_of
from fedncv.engine.loops import Loops, with_loops
from fedncv.engine.masked import masked, mixes_in_scoring, mixing_layer, padding_changes
from fedncv.engine.orders import Counts, Ints, Plan
from fedncv.engine.problem import DivergedError, Kept, Problem, Settled, State, messages, start
from fedncv.engine.resident import Resident
from fedncv.engine.round import Draw, Outcome, draw, finite_rows, of_client, settle, wire_bytes
from fedncv.engine.stage import RATIO, Calls, Fixed, Moving, Stage
from fedncv.engine.streams import SLOTS, Models, Streams
from fedncv.methods.base import Work
from fedncv.notes import note
from fedncv.tree import row, stack, tree_map

Way = Literal["stacked", "streams"]
T = TypeVar("T")
GROUP = 4  # with streams: clients in memory for each client in flight


class CannotStackError(ValueError):
    """The model or the method has a part that cannot be run, or recorded, for many clients together."""


class NoMemoryError(ValueError):
    """The device has too little memory for a single client."""


class Arrived(NamedTuple):
    """Messages and state with which K clients begin a round."""

    rows: Ints  # of the resident tables
    down: Any
    buffers_KR: Tensor
    own: Any


class Replied(NamedTuple):
    """Results of local training, for the clients ``who`` of those that arrived."""

    who: Ints
    y_KP: Tensor
    buffers_KR: Tensor
    up: Any
    own: Any
    loss_K: Tensor
    counts: Counts


class StackedEngine:
    """Hold data and graphs for runs of one method, model, dataset and shape."""

    name: Way
    why = ""

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        way: Way = "stacked",
        capacity: int | None = None,
        ratio: float = RATIO,
        fused: bool | None = None,
    ) -> None:
        first = problems[0]
        if first.stream is not None:
            raise CannotStackError("samples that arrive during training change the clients' sizes")
        if not all(problem.model.share_constants(first.model) for problem in problems[1:]):
            raise CannotStackError(
                "the model draws frozen weights or buffers from its seed, and these runs have several seeds"
            )
        self._fused = fusible(first) if fused is None else fused
        self.problems = list(problems)
        loops = Loops(first.model)
        self._servers = [with_loops(problem, loops) for problem in problems]
        self.resident = Resident(problems)
        self.config, self.method = first.config, first.method
        self.device = first.model.start_P.device
        self.ratio = ratio
        self.used = 0  # samples that clients trained on, of those computed
        self.computed = 0
        self._start_JP = torch.stack([problem.model.start_P for problem in problems])
        self._seeds = [problem.config.seed for problem in problems]
        self._stage: Stage | Streams | None = None
        self._planned: tuple[list[Draw], Plan] | None = None  # of the next round
        self._keeper = Keeper(len(problems) * first.federation.num_clients, self.device)
        sizes = self.resident.train.sizes
        self.batch = int(min(self.config.batch_size, sizes.max()))
        self.num_batches = int(-(-sizes.max() // self.config.batch_size))
        self._calls: dict[int, Calls] = {}
        self._others: dict[str, Self] = {}
        self._smallest: int | None = None  # batch, if not what training needs
        example = first.dataset.inputs(torch.arange(min(2, len(first.dataset.x))), first.dtype)
        self.scores_alone = mixes_in_scoring(first.model, example)
        """Whether a client's test samples must not be in one batch with others."""
        self._take(way, capacity)

    def _take(self, way: Way, capacity: int | None = None) -> None:
        """Train in this way. Raise CannotStackError if the model or the method cannot."""
        first = self.problems[0]
        self.name = way
        self.task = first.task
        if way == "stacked":
            self.model = masked(first.model, first=fuse if self._fused else None)
            if self._fused:
                self.task = fused_task(first.task)
        else:
            self.model = first.model.for_streams()
        self.release(capacity)
        self.scoring_model = first.model.for_streams()
        self._models = Models(self.model, masked(self.model))
        self._try()

    def release(self, capacity: int | None = None) -> None:
        """Free the memory for clients in training, and begin again with as many at a time as there are."""
        first = self.problems[0]
        self._others = {}
        clients = len(self.problems) * min(first.config.per_round, first.federation.num_clients)
        self._stage = None
        self.capacity = capacity or (clients if self.name == "stacked" else min(SLOTS, clients))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def group(self) -> int:
        """Clients in memory at a time."""
        return self.capacity if self.name == "stacked" else GROUP * self.capacity

    def turned(self, way: Way) -> Self:
        """Return an engine for the same runs that trains in the other way, with the samples in the same memory."""
        other = copy.copy(self)
        other._planned = None
        other._take(way)
        return other

    @property
    def layers(self) -> list[str]:
        return [self.name + self.model.words] * len(self.problems)

    def only(self, runs: Sequence[int]) -> Self:
        """Return an engine for some of the runs, with all recorded graphs."""
        other = copy.copy(self)
        other.problems = [self.problems[j] for j in runs]
        other.resident = self.resident.only(runs)
        other._servers = [self._servers[j] for j in runs]
        other._start_JP = self._start_JP[list(runs)]
        other._seeds = [self._seeds[j] for j in runs]
        other._planned = None
        other._others = {}
        return other

    def scoring(self, ids: Ints) -> Self:
        """Return an engine that scores these clients of every run."""
        other = copy.copy(self)
        other.problems = [problem._replace(sample=ids, guests=None) for problem in self.problems]
        other._others = {}
        return other

    def with_problems(self, name: str, problems: Sequence[Problem], *, smallest: int | None = None) -> Self:
        """Return an engine that measures by other local training of the same clients, kept under ``name``.

        It has recorded steps of its own, the same samples in the same memory, and its work counts for nothing.
        """
        if name not in self._others:
            other = copy.copy(self)
            other.method, other._stage, other._planned, other._smallest = problems[0].method, None, None, smallest
            other._others, other._calls = {}, {}
            self._others[name] = other
        other = self._others[name]
        other.problems, other.capacity = list(problems), min(other.capacity, self.capacity)
        return other

    # ---- rounds ----------------------------------------------------------------------------------------

    def run_rounds(self, states: Sequence[State], drawn: Sequence[Draw] | None = None) -> list[Settled]:
        """Run one round of every run; return the error of a run that diverged, and continue the others."""
        return self._until_it_fits(lambda: self._run_rounds(states, drawn))

    def _run_rounds(self, states: Sequence[State], drawn: Sequence[Draw] | None) -> list[Settled]:
        drawn = drawn or self._drawn(states[0].round)
        outcomes = self._outcomes_of(states, drawn, ahead=True)
        settled: list[Settled] = []
        for j, (problem, state) in enumerate(zip(self._servers, states, strict=True)):
            try:
                settled.append(settle(problem, state, drawn[j], outcomes[j]))
            except DivergedError as error:
                settled.append(error)
        return settled

    def outcomes(self, states: Sequence[State], drawn: Sequence[Draw]) -> list[list[Outcome]]:
        """Train the clients drawn in each run, and return their results."""
        return self._until_it_fits(lambda: self._outcomes_of(states, drawn, ahead=False))

    def _until_it_fits(self, work: Callable[[], T]) -> T:
        while True:
            try:
                return work()
            except torch.cuda.OutOfMemoryError as error:  # outside of training, which handles this by itself
                reason = str(error)
            self._halve(reason)  # a smaller stack frees memory; states are values: repeat the work

    def _outcomes_of(self, states: Sequence[State], drawn: Sequence[Draw], *, ahead: bool) -> list[list[Outcome]]:
        t = states[0].round
        assert all(state.round == t for state in states), "stacked runs go round by round together"
        arrived = self.arrive(states, [each.ids for each in drawn])
        plan = self._plan_of(arrived.rows, _shares(drawn), t)
        replied = self.train(arrived, plan)
        finite_K = finite_rows((replied.y_KP, replied.buffers_KR, replied.up, replied.own))
        if ahead:  # while the device is busy
            self._plan_ahead(t + 1)
        losses = replied.loss_K.cpu()
        outcomes = self._outcomes(arrived, replied, losses, finite_K.cpu().tolist())
        ends = np.cumsum([len(each.ids) for each in drawn]).tolist()
        return [outcomes[end - len(each.ids) : end] for each, end in zip(drawn, ends, strict=True)]

    def arrive(self, states: Sequence[State], ids: Sequence[sampling.Ids], *, in_use: bool = False) -> Arrived:
        """Return the servers' messages to these clients of each run, and the state that the clients have kept."""
        present = [j for j, each in enumerate(ids) if len(each)]
        problems = [problem.in_use if in_use else problem for problem in self.problems]
        sent = [messages(problems[j], states[j], ids[j]) for j in present]
        rows = np.concatenate([np.asarray(each) + j * self.resident.num_clients for j, each in enumerate(ids)])
        if not present:
            return Arrived(rows.astype(np.int64), (), self.model.start_R[None][:0], ())
        kept = [states[j].kept.get(int(u)) for j in present for u in ids[j]]
        own, buffers_KR = self._kept(rows, kept)
        if self.problems[0].buffer_rule != "personal":
            buffers_KR = torch.cat([b_SR for _, b_SR in sent])
        down = tree_map(lambda *parts: torch.cat(parts), *(down for down, _ in sent))
        return Arrived(rows, down, buffers_KR, own)

    def _kept(self, rows: Ints, kept: list[Kept | None]) -> tuple[Any, Tensor]:
        """Return ``own`` and personal statistics, stacked; create them for clients that never took part."""
        new = np.flatnonzero([each is None for each in kept])
        fresh: Any = None
        start_R = self.model.start_R
        if len(new):
            ask = self.asks(rows[new], round=0)

            def init(ask_of, start_P):  # type: ignore[no-untyped-def]
                return self.method.init_own(ask_of(start_R), start_P)

            fresh = asking(init, ask, self._start_JP[self._run_of(rows[new])])
        if len(new) == len(kept):
            own = fresh
        else:
            place = {int(i): at for at, i in enumerate(new)}
            own = stack([row(fresh, place[i]) if k is None else self._keeper.here(k.own) for i, k in enumerate(kept)])
        buffers = [start_R if k is None or not k.buffers_R.numel() else self._keeper.here(k.buffers_R) for k in kept]
        return own, torch.stack(buffers)

    def train(self, arrived: Arrived, plan: Plan) -> Replied:
        """Train all clients that have a step to make, as many at a time as fit in memory."""
        groups = [plan.who]
        if len(plan.who) > self.group:  # similar numbers of steps together: the fewest idle rows
            order = np.argsort(-plan.counts.steps_KF[plan.who].sum(1), kind="stable")
            groups = [plan.who[order[i : i + self.group]] for i in range(0, len(order), self.group)]
        done: list[Replied] = []
        while groups:
            group = groups.pop(0)
            try:
                done.append(self._train_group(arrived, plan, group))
                continue
            except torch.cuda.OutOfMemoryError as error:
                reason = str(error)
            # after the except block: until then the error keeps the failed tensors alive
            self._halve(reason)
            pieces = [group, *groups]
            groups = [g[i : i + self.group] for g in pieces for i in range(0, len(g), self.group)]
        if len(done) == 1:
            return done[0]
        who = np.sort(np.concatenate([each.who for each in done]))
        places = [torch.from_numpy(np.searchsorted(who, each.who)).to(self.device) for each in done]

        def joined(*parts: Tensor) -> Tensor:  # without a second copy of all of them, as of torch.cat(parts)[order]
            whole = parts[0].new_empty(len(who), *parts[0].shape[1:])
            for place, part in zip(places, parts, strict=True):
                whole.index_copy_(0, place, part)
            return whole

        parts = [(d.y_KP, d.buffers_KR, d.up, d.own, d.loss_K) for d in done]
        y_KP, buffers_KR, up, own, loss_K = tree_map(joined, *parts)
        return Replied(who, y_KP, buffers_KR, up, own, loss_K, plan.counts)

    def _halve(self, reason: str) -> None:
        """Make the stack smaller. Raise NoMemoryError if it has a single client already."""
        if self.capacity == 1:
            raise NoMemoryError(_needed(self.device, reason))
        self.release(-(-self.capacity // 2))
        note(f"{self.name}: out of memory, continuing with {self.capacity} clients at a time")

    def _train_group(self, arrived: Arrived, plan: Plan, who: Ints) -> Replied:
        if not len(who):
            empty = self.model.start_P.new_zeros(0)
            return Replied(who, empty[None][:0], empty[None][:0], (), (), empty, plan.counts)
        assert plan.orders is not None
        stage = self._stage = self._stage or self._new_stage()
        config = self.config
        who_K = torch.from_numpy(who).to(self.device)
        down, own, buffers_KR = tree_map(
            lambda leaf: leaf.index_select(0, who_K), (arrived.down, arrived.own, arrived.buffers_KR)
        )
        ask = self.asks(arrived.rows[who], plan.round)

        def begin(ask_of, down, own, b_R):  # type: ignore[no-untyped-def]
            return self.method.begin(ask_of(b_R), down, own)

        y_KP, scratch = asking(begin, ask, down, own, buffers_KR)
        moving = _own_memory(Moving(y_KP, (), buffers_KR, scratch, y_KP.new_zeros(len(who))))
        fixed = Fixed(down, own, ask.client, y_KP.new_tensor(self._lrs(plan, who)))
        # before training: a copy to a busy device waits for it
        work = self._work(plan, who, fixed.lr)
        trained_KF = plan.counts.trained_KF(self.method, config.epochs)[who]
        num_steps = torch.from_numpy(trained_KF.sum(1)).to(self.device, y_KP.dtype)
        computed = stage.computed
        for phase in range(len(self.method.phases(config.epochs))):
            steps = plan.counts.steps_KF[who, phase]
            order = np.argsort(-steps, kind="stable")
            if not steps.any():
                continue
            place = orders.table(
                self.method, plan.orders, plan.counts, who[order], phase,
                epochs=config.epochs, batch=self.batch, batch_size=config.batch_size, dtype=y_KP.dtype,
            )  # fmt: skip
            index_TBK = self.resident.train.samples(place.index_TBK, arrived.rows[who][order])
            table = place._replace(index_TBK=index_TBK)
            fresh = _own_memory(self._fresh(moving.y_P))
            moving = moving._replace(state=fresh)
            stage.run_phase(phase, order, steps[order], table, moving, fixed, round=plan.round)
        self._calls |= stage.calls
        self.computed += stage.computed - computed
        self.used += int(plan.counts.samples_KF[who].sum())

        def finish(ask_of, b_R, y_P, work, down, own, scratch):  # type: ignore[no-untyped-def]
            return self.method.finish(ask_of(b_R), y_P, work, down, own, scratch)

        up, own = asking(finish, ask, moving.buffers_R, moving.y_P, work, down, own, moving.scratch)
        return Replied(who, moving.y_P, moving.buffers_R, up, own, moving.loss / num_steps, plan.counts)

    def _fresh(self, y_KP: Tensor) -> Any:
        """Return the optimizer's state before the first step of each client."""
        init = self.problems[0].optimizer.init
        return torch.vmap(init)(y_KP) if self.name == "stacked" else stack([init(y_P) for y_P in y_KP])

    def _work(self, plan: Plan, who: Ints, lr_K: Tensor) -> Work:
        """Return the work of these clients in this round."""
        config = self.config
        moved_KF = plan.counts.moved_KF(self.method, config.epochs)[who]
        mass = [
            total_step_of(self.problems[0].optimizer, steps, lr)
            for steps, lr in zip(moved_KF.tolist(), self._lrs(plan, who), strict=True)
        ]
        samples_KF = np.where(moved_KF > 0, plan.counts.samples_KF[who], 0)
        numbers = np.stack([moved_KF.sum(1), samples_KF.sum(1)])
        steps_K, samples_K = torch.from_numpy(numbers).to(self.device)
        return Work(steps_K, samples_K, lr_K, lr_K.new_tensor(mass))

    def _outcomes(self, arrived: Arrived, replied: Replied, losses: Tensor, finite: list[bool]) -> list[Outcome]:
        rule_is_personal = self.problems[0].buffer_rule == "personal"
        received = wire_bytes(self.problems[0], row(arrived.down, 0), self.model.start_R) if len(arrived.rows) else 0
        calls = [self._calls.get(f, Calls()) for f in range(len(self.method.phases(self.config.epochs)))]
        trained: dict[int, tuple[Trained, bool]] = {}
        for i, k in enumerate(replied.who.tolist()):
            samples_F = replied.counts.samples_KF[k].tolist()
            buffers_R = replied.buffers_KR[i]
            own = self._keeper.put(row(replied.own, i))
            kept_R = self._keeper.put(buffers_R) if rule_is_personal else self.model.start_R[:0]
            gradients, forwards = (
                sum(c * n for c, n in zip(each_F, samples_F, strict=True)) for each_F in zip(*calls, strict=True)
            )
            answer = Trained(
                replied.y_KP[i], buffers_R, row(replied.up, i), Kept(own, kept_R),
                sum(samples_F), gradients, forwards, losses[i],
            )  # fmt: skip
            trained[k] = (answer, finite[i])
        num_clients = self.resident.num_clients
        return [
            of_client(self.problems[0], int(r) % num_clients, received, *trained.get(k, (None, True)))
            for k, r in enumerate(arrived.rows)
        ]

    # ---- plans and asks --------------------------------------------------------------------------------

    def plan(self, rows: Ints, shares: list[float], round: int) -> Plan:
        """Draw the batches of these clients, on the device."""
        config, ids = self.config, rows % self.resident.num_clients
        seeds = [self._seeds[j] for j in self._run_of(rows).tolist()]
        n_K = self.resident.train.sizes[rows]
        keys = orders.keys_for(seeds, "batches", round, ids)
        counts = orders.count(
            self.method, n_K, shares, epochs=config.epochs, batch_size=config.batch_size,
            smallest=self._smallest or self.model.smallest_batch, keys=keys,
        )  # fmt: skip
        who = np.flatnonzero(counts.trained_KF(self.method, config.epochs).sum(1))
        drawn = None
        if len(who):
            step_keys = orders.keys_for(seeds, "step", round, ids).to(self.device)
            drawn = orders.draw(
                self.method, counts, n_K, epochs=config.epochs, keys=keys.to(self.device), step_keys=step_keys
            )
        return Plan(rows, shares, round, counts, drawn, who)

    def _plan_of(self, rows: Ints, shares: list[float], round: int) -> Plan:
        if self._planned:
            ahead = self._planned[1]
            if ahead.round == round and np.array_equal(ahead.rows, rows) and ahead.shares == shares:
                return ahead
        return self.plan(rows, shares, round)

    def _drawn(self, round: int) -> list[Draw]:
        if self._planned and self._planned[1].round == round:
            return self._planned[0]
        return [draw(problem, round) for problem in self.problems]

    def _plan_ahead(self, round: int) -> None:
        self._planned = None
        if round < self.config.rounds:
            drawn = self._drawn(round)
            rows = np.concatenate([d.ids + j * self.resident.num_clients for j, d in enumerate(drawn)])
            self._planned = drawn, self.plan(rows, _shares(drawn), round)

    def asks(self, rows: Ints, round: int) -> Asks:
        """Return the asks of these clients outside their steps."""
        seeds = [self._seeds[j] for j in self._run_of(rows).tolist()]
        keys = orders.keys_for(seeds, "client", round, rows % self.resident.num_clients)
        clients = self.resident.clients(rows)
        vmapped = self.name == "stacked"
        sizes = self.num_batches, self.batch
        return Asks(self.model, self.task, *sizes, round, clients, keys.to(self.device), vmapped)

    def _run_of(self, rows: Ints) -> Ints:
        return rows // self.resident.num_clients

    def _lrs(self, plan: Plan, who: Ints) -> list[float]:
        """Return the learning rate of each of these clients: that of its run in this round."""
        lr_J = [lr_of(problem, plan.round) for problem in self.problems]
        return [lr_J[j] for j in self._run_of(plan.rows[who]).tolist()]

    def _new_stage(self) -> Stage | Streams:
        phases = self.method.phases(self.config.epochs)
        most_steps = self.num_batches * np.array([phase.epochs for phase in phases])
        problem = self.problems[0]._replace(task=self.task)
        if self.name == "streams":
            return Streams(
                problem, self._models, self.resident,
                capacity=self.capacity, num_batches=self.num_batches, most_steps=most_steps,
            )  # fmt: skip
        return Stage(
            problem, self.model, self.resident,
            capacity=self.capacity, num_batches=self.num_batches, most_steps=most_steps, ratio=self.ratio,
        )  # fmt: skip

    @property
    def waste(self) -> float:
        """Share of the computed samples that were padding or rows of finished clients."""
        return 1 - self.used / self.computed if self.computed else 0.0

    def _try(self) -> None:
        """Find what cannot be run or recorded here and not in the middle of a study."""
        guarded = [each.guarded() for each in {self.model, self.scoring_model, *filter(None, self._models)}]
        with self.model.tracing() as running, contextlib.ExitStack() as stack:
            try:
                if self.name == "streams":  # vmap refuses such code by itself
                    for each in guarded:
                        stack.enter_context(each)
                self._trial()
            except (torch.cuda.OutOfMemoryError, NoMemoryError):
                raise
            except Exception as error:  # of any layer, task or method
                reason = textwrap.shorten((str(error).strip() or type(error).__name__).splitlines()[0], 160)
                where = f"layer {running[-1]}: " if running else ""
                raise CannotStackError(where + reason) from error
        self.used = self.computed = 0

    def _trial(self) -> None:
        """Train one step of two clients."""
        problem = self.problems[0]
        example = problem.dataset.inputs(torch.arange(min(2, len(problem.dataset.x))), problem.dtype)
        padded = self._models.padded or masked(self.model)
        if padding_changes(problem.model, self.model if self.name == "stacked" else padded, example):
            if self.name == "stacked":
                raise CannotStackError(mixing_layer(problem.model, self.model, example))
            self._models = self._models._replace(padded=None)
        ids = np.argsort(-problem.clients.sizes[: problem.federation.num_clients], kind="stable")[:2]
        arrived = self.arrive([start(each) for each in self.problems], self._of_the_first_run(ids))
        self.train(arrived, self.trial_plan(arrived.rows, 1))

    def trial_plan(self, rows: Ints, steps: int) -> Plan:
        """Return the first ``steps`` steps of each phase of these clients, in the first round."""
        plan = self.plan(rows, [1.0] * len(rows), 0)
        steps_KF = np.minimum(plan.counts.steps_KF, steps)
        samples_KF = steps_KF * np.minimum(self.resident.train.sizes[rows], self.config.batch_size)[:, None]
        return plan._replace(counts=plan.counts._replace(steps_KF=steps_KF, samples_KF=samples_KF))

    def _of_the_first_run(self, ids: Ints) -> list[Ints]:
        return [np.sort(ids), *[ids[:0]] * (len(self.problems) - 1)]


def fusible(problem: Problem) -> bool:
    """Return whether fused layers can run: they are for GPUs, where they are faster, and for exact float32."""
    exact = problem.dtype == torch.float32 and problem.config.precision in EXACT
    return HAVE_KERNELS and exact and problem.model.start_P.is_cuda


def _needed(device: torch.device, reason: str) -> str:
    """Return one line: what a single client needed and what there is."""
    used, whole = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    free = torch.cuda.mem_get_info(device)[0]
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", reason)
    more = f" and asked for {asked.group(1)} more" if asked else ""
    return (
        f"not enough memory for one client: it needs more than the {used / 2**30:.1f} GiB that were in use{more}, and "
        f"{device} has {whole / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of them free; use a smaller batch_size or model"
    )


def _own_memory(tree: Any) -> Any:
    """Return copies that can be written to."""
    return tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def _shares(drawn: Sequence[Draw]) -> list[float]:
    """Return the share of its steps that each client finishes; 0 if it never replies."""
    return [share if answer else 0.0 for d in drawn for share, answer in zip(d.shares, d.answers, strict=True)]
