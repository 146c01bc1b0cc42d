"""Turn a torch module into pure functions of one flat parameter vector. No other file knows about layers.

P   trainable parameters, those of the head last:  x_P[layout.body], x_P[layout.head]
R   running statistics (BatchNorm's mean and variance): separate from the parameters, with their own rule
B   samples of a batch,  C   outputs,  F   features (the input of the head)

Parameters with requires_grad=False and buffers that do not change are constants: they stay in the module and are in
none of the vectors.
"""

import copy
import pickle
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedncv import group_norm
from fedncv.functional import NoValues, Rewritten, dropout
from fedncv.keys import Key, fold, key_for
from fedncv.layout import Form, Layout, Unpacked, split

Mode = Literal["train", "still", "eval"]
"""train: batch statistics, running ones are updated. still: batch statistics, running ones are not updated.
eval: running statistics, no dropout."""

Factory = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one input, number of outputs) -> a module."""

MULTIPLIES = (nn.modules.conv._ConvNd, nn.Linear)  # layers whose weights autocast converts in every pass


Place = tuple[str, Any, Any]
"""Name of a tensor, the dict or list of a module that holds it, and its key or index there."""


class Output(NamedTuple):
    logits_BC: Tensor
    features_BF: Tensor


class KeyedDropout(nn.Module):
    """nn.Dropout with a mask from the step's key instead of a global generator."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p, self.layer = p, layer
        self.key: Key | None = None
        self.calls = 0  # in this forward pass: a layer used twice draws twice
        self.off = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.off:
            return x
        assert self.key is not None, "a training step must give every dropout layer its key"
        key = fold(fold(self.key, self.layer), self.calls)
        self.calls += 1
        return dropout(x, self.p, key)


class Weighted(nn.Module):
    """A layer that uses several samples of a batch, and gets weights that mark samples and padding."""

    weight_B: Tensor | None = None
    replaces_buffers = False  # by new tensors, and never writes into them


class _Listener:
    """Records the input of the head."""

    def __init__(self, model: "Model") -> None:
        self._model = model

    def __deepcopy__(self, _memo: object) -> "_Listener":
        return self  # a copy of the module must not copy the model too

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self._model._features = args[0] if args else next(iter(kwargs.values()))


class Model:
    """``factory``'s module, initialised from ``seed``, as functions of flat vectors.

    ``example`` is a batch of at least two inputs. A trial pass finds the buffers that change and the input of the
    head. Parameters and float buffers get ``dtype``, or that of a float example. With ``low`` a pass multiplies in this
    lower precision (torch.autocast); parameters, statistics, outputs and gradients keep ``dtype``. Raise ValueError if
    the module draws random numbers that cannot be keyed.
    """

    def __init__(
        self,
        factory: Factory,
        example: Tensor,
        num_outputs: int,
        seed: int,
        dtype: torch.dtype | None = None,
        low: torch.dtype | None = None,
    ) -> None:
        with _seeded(key_for(seed, "model")):
            module = _make(factory, tuple(example.shape[1:]), num_outputs)
        _replace_dropout(module)
        for part in module.modules():  # BatchNorm needs its batch counter only with momentum=None
            if getattr(part, "num_batches_tracked", None) is not None:
                if part.momentum is None:
                    raise ValueError("BatchNorm with momentum=None has a counter that cannot be averaged; set momentum")
                part.register_buffer("num_batches_tracked", None)
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False  # a layout of its gradient that a flat vector does not have; the numbers are equal
        module.to(device=example.device)
        module.to(dtype=dtype or (example.dtype if example.is_floating_point() else None))
        self._features = example.new_zeros(0)
        self._rewritten: Rewritten | None = Rewritten()
        last = low is not None and _has_normal_convolutions(module)
        self._low, self._channels_last, self._guarded = low, last and _better_channels_last(module), False
        self._take(module)
        moving = self._try(example)
        if not self._rewritten.heard:
            self._rewritten = None
        inside = {id(p) for p in self._head.parameters()}
        everything = list(module.named_parameters())
        if not everything:
            raise ValueError("the model has no parameters, so there is nothing to train")
        trained = [(name, p) for name, p in everything if p.requires_grad]
        if not trained:
            raise ValueError(
                f"all {len(everything)} parameters of the model have requires_grad=False, so there is nothing to train"
            )
        named = sorted(trained, key=lambda item: id(item[1]) in inside)  # stable: head last
        size_body = sum(p.numel() for _, p in named if id(p) not in inside)
        self.num_weights = sum(p.numel() for _, p in everything)  # frozen ones included
        self.layout = Layout(
            names=tuple(name for name, _ in named),
            shapes=tuple(p.shape for _, p in named),
            body=slice(0, size_body),
            num_parameters=sum(p.numel() for _, p in named),
            buffer_names=tuple(moving),
            buffer_shapes=tuple(b.shape for b in moving.values()),
            features=self._features.shape[1:],
            channels_last=last,
        )
        in_order = [p.permute(0, 2, 3, 1) if last and p.dim() == 4 else p for _, p in named]
        self.start_P = _flatten(in_order, like=named[0][1])
        self.start_R = _flatten(list(moving.values()), like=named[0][1])
        self.smallest_batch = self._find_smallest_batch(example)
        logits = self.forward(self.start_P, self.start_R, example, mode="eval")[0].logits_BC
        _check_tensor(logits)  # a module may return another thing than in training
        if logits.shape[:1] != example.shape[:1]:
            raise ValueError(f"the model maps {tuple(example.shape)} to {tuple(logits.shape)}; it needs one row each")

    def _take(self, module: nn.Module) -> None:
        self._module = module
        self._dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        self._weighted = [part for part in module.modules() if isinstance(part, Weighted)]
        for part in module.modules():
            if isinstance(part, nn.RNNBase):  # its list of weights is a place that we fill
                part._update_flat_weights = _nothing  # type: ignore[method-assign]
        self._head_name, self._head = _find_head(module)
        for number, hook in list(self._head._forward_pre_hooks.items()):  # hooks of a copied module
            if isinstance(hook, _Listener):
                del self._head._forward_pre_hooks[number]
        self._head.register_forward_pre_hook(_Listener(self), with_kwargs=True)
        self._mode_set: bool | None = None
        self._places: list[Place] = []
        self._forms: list[Form] = []
        named = [(name, part) for name, part in module.named_modules() if getattr(part, "replaces_buffers", False)]
        self._replaced = {f"{name}.{buffer}" if name else buffer for name, part in named for buffer in part._buffers}

    @contextmanager
    def _holding(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Put these tensors into the module, like torch's functional_call, which searches their places every time."""
        places = self._places
        if not places:
            places += _places(self._module, self.layout.names, self.layout.buffer_names)
        own = [held[key] for _, held, key in places]
        try:
            for name, held, key in places:
                held[key] = tensors[name]
            yield
        finally:
            for (_, held, key), tensor in zip(places, own, strict=True):
                held[key] = tensor

    def changed(self, change: Callable[[nn.Module], None]) -> "Model":
        """Return a copy whose module was changed by ``change``: the same names and shapes, other arithmetic.

        Both use the same tensors, so that a large frozen model is in memory once.
        """
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return self._copied(change, {id(tensor): tensor for tensor in tensors})

    def for_streams(self) -> "Model":
        """Return a copy for steps of one client at a time on a GPU."""
        fast = group_norm.usable(self.start_P.device)
        other = self.changed(group_norm.use_kernels if fast else lambda _module: None)
        other._channels_last = _better_channels_last(other._module)
        return other

    @property
    def words(self) -> str:
        """For the record of a run: the order in memory decides the last digits of its numbers."""
        return ", channels last" if self._channels_last else ""

    @property
    def uses_weights(self) -> bool:
        """Whether a layer reads the weights that mark padding."""
        return bool(self._weighted)

    def in_double_on_cpu(self) -> "Model":
        """Return a copy in float64 on the CPU."""

        def converted(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype)

        memo: dict[int, Any] = {id(b): converted(b) for b in self._module.buffers()}
        memo |= {id(p): nn.Parameter(converted(p), p.requires_grad) for p in self._module.parameters()}
        other = self._copied(lambda _module: None, memo)
        other.start_P, other.start_R = converted(self.start_P), converted(self.start_R)
        other._low = None
        return other

    def _copied(self, change: Callable[[nn.Module], None], tensors: dict[int, Any]) -> "Model":
        """Return a copy in which ``tensors``, id of a tensor -> tensor, stand for those of this module."""
        for part in self._dropouts:
            part.key = None
        other = copy.copy(self)
        other._features = self.start_P[:0]  # the latest features may belong to a step under vmap
        other._rewritten = self._rewritten and Rewritten()
        module = copy.deepcopy(self._module, tensors)
        change(module)
        other._take(module)
        return other

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse, meanwhile, code and shapes that depend on values (``NoValues``)."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False

    @contextmanager
    def tracing(self) -> Iterator[list[str]]:
        """Yield the names of the layers that are running, the innermost last; an error leaves those it stopped."""
        running: list[str] = []
        hooks = []
        for name, part in self._module.named_modules():
            words = f"{name} ({type(part).__name__})" if name else type(part).__name__
            hooks += [
                part.register_forward_pre_hook(lambda *_, words=words: running.append(words)),
                part.register_forward_hook(lambda *_: running.pop() and None),
            ]
        try:
            yield running
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def listening(self) -> Iterator[list[tuple[str, Any, Any]]]:
        """Yield name, first input and output of each layer that has no layers inside, in the order they run."""
        heard: list[tuple[str, Any, Any]] = []
        hooks = [
            part.register_forward_hook(
                lambda _part, given, output, words=f"{name} ({type(part).__name__})": heard.append(
                    (words, given[0] if given else None, output)
                )
            )
            for name, part in self._module.named_modules()
            if name and next(part.children(), None) is None
        ]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def constants(self) -> dict[str, Tensor]:
        """Name -> tensor of what training never changes: frozen parameters and constant buffers."""
        moving = {*self.layout.names, *self.layout.buffer_names}
        both = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name: tensor for name, tensor in both if name not in moving}

    @cached_property
    def constants_mark(self) -> float:
        """A number by which two machines see that they hold other constants; 0 without any.

        A weighted sum and not a checksum: it is the same up to rounding where an initialisation is.
        """
        mark = 0.0
        for i, (_, tensor) in enumerate(sorted(self.constants.items())):
            values = tensor.detach().reshape(-1).to("cpu", torch.float64).nan_to_num(0, 1, -1).clamp(-1e3, 1e3)
            places = torch.arange(1, len(values) + 1, dtype=torch.float64)
            mark += (i + 1) * float((values * places.cos()).sum())
        return mark

    def share_constants(self, other: "Model") -> bool:
        """Use the constants of ``other`` if they are equal, to have them in memory once; return whether they are."""
        mine, theirs = self.constants, other.constants
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in mine):
            return False
        parameters = {name for name, _ in self._module.named_parameters()}
        of_kind = [name for name in mine if name in parameters], [name for name in mine if name not in parameters]
        for name, held, key in _places(self._module, *of_kind):
            held[key] = theirs[name]
        return True

    def forward(
        self,
        x_P: Tensor,
        b_R: Tensor,
        inputs: Tensor,
        *,
        mode: Mode,
        key: Key | None = None,
        weight_B: Tensor | None = None,
    ) -> tuple[Output, Tensor]:
        """Return logits and features at ``x_P``, and the running statistics afterwards."""
        training = mode != "eval"
        if self._mode_set != training:
            self._module.train(training)
            self._mode_set = training
        for part in self._dropouts:
            part.key, part.calls = key, 0
        for layer in self._weighted:
            layer.weight_B = weight_B
        statistics = self.layout.buffer_names
        tensors, moved_R = self._tensors(x_P, b_R), b_R
        if training and _vmapped():  # BatchNorm writes into its buffers
            tensors |= {name: tensors[name].clone() for name in statistics if name not in self._replaced}
        elif training:  # one copy for all; .data, because autograd would take a change of one for a change of all
            moved_R = b_R.clone()
            parts = zip(statistics, split(moved_R, self.layout.buffer_shapes), strict=True)
            tensors |= {name: part.data for name, part in parts}
        if self._channels_last and inputs.dim() == 4 and not _vmapped():
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        guard = NoValues(x_P.device) if self._guarded else nullcontext()
        with self._holding(tensors), self._rewriting(key if training else None), self._lower(x_P), guard:
            logits = self._module(inputs)
            if mode == "train" and statistics:
                after = {name: held[key] for name, held, key in self._places}
                written = not _vmapped() and all(after[name] is tensors[name] for name in statistics)
                b_R = moved_R if written else torch.cat([after[name].reshape(-1) for name in statistics])
        if self._low is None:
            return Output(logits, self._features), b_R
        return Output(logits.to(x_P.dtype), self._features.to(x_P.dtype)), b_R

    def _tensors(self, x_P: Tensor, b_R: Tensor) -> dict[str, Tensor]:
        """Return ``layout.unflatten``; on a GPU with each parameter as its layer wants it."""
        if not x_P.is_cuda or _vmapped():
            return self.layout.unflatten(x_P, b_R)
        if not self._forms:
            self._forms += self._find_forms(x_P.dtype)
        layout = self.layout
        unpacked: tuple[Tensor, ...] = Unpacked.apply(x_P, layout, self._forms)  # type: ignore[no-untyped-call]
        buffers = zip(layout.buffer_names, split(b_R, layout.buffer_shapes), strict=True)
        return dict([*zip(layout.names, unpacked, strict=True), *buffers])

    def _find_forms(self, dtype: torch.dtype) -> list[Form]:
        """Return the form of each parameter. Weights of layers that multiply are converted once for all their uses."""
        forms = []
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            path, _, key = name.rpartition(".")
            owner = self._module.get_submodule(path)
            once = len(_places(self._module, [name], [])) == 1
            lower = self._low is not None and once and isinstance(owner, MULTIPLIES) and key == "weight"
            last = self._channels_last and isinstance(owner, nn.Conv2d) and len(shape) == 4
            forms.append(Form(self._low if lower and self._low else dtype, last))
        return forms

    def _lower(self, x_P: Tensor) -> AbstractContextManager[Any]:
        if self._low is None:
            return nullcontext()
        return torch.autocast(x_P.device.type, self._low, cache_enabled=False)

    def _rewriting(self, key: Key | None) -> AbstractContextManager[Any]:
        if self._rewritten is None:
            return nullcontext()
        self._rewritten.key, self._rewritten.calls = key, 0
        return self._rewritten

    def head(self, x_P: Tensor, features_BF: Tensor) -> Tensor:
        """Return the logits of given features with the head of ``x_P``, without dropout: no step draws for them."""
        prefix = f"{self._head_name}." if self._head_name else ""
        named = self.layout.unflatten(x_P, x_P.new_zeros(int(self.start_R.numel())))
        mine = {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
        rewriting = self._rewriting(None)
        parts: list[KeyedDropout | Rewritten] = [*self._dropouts, *([self._rewritten] if self._rewritten else [])]
        for part in parts:
            part.off = True
        try:
            with rewriting, self._lower(x_P):
                logits = functional_call(self._head, mine, (features_BF,))
        finally:
            for part in parts:
                part.off = False
        assert isinstance(logits, Tensor)
        return logits.to(x_P.dtype)

    def state_dict(self, x_P: Tensor, b_R: Tensor, offset_C: Tensor | None = None) -> dict[str, Tensor]:
        """Return an ordinary state_dict for a new module of the same factory; an offset is added to the head's bias."""
        with self._holding(self.layout.unflatten(x_P, b_R)):  # a tied tensor has several names
            tensors = {name: t.detach().cpu().contiguous() for name, t in self._module.state_dict().items()}
        for name in [name for name in tensors if name.endswith("running_mean")]:
            tensors[name.replace("running_mean", "num_batches_tracked")] = torch.tensor(0)
        if offset_C is not None:
            biases = [n for n in tensors if n.startswith(self._head_name) and n.endswith("bias")]
            if not biases or tensors[biases[-1]].shape != offset_C.shape:
                raise ValueError("this client predicts with an offset on its logits, but the head has no bias")
            tensors[biases[-1]] = tensors[biases[-1]] + offset_C.cpu()
        return tensors

    def _try(self, example: Tensor) -> dict[str, Tensor]:
        """Make a training pass; return the float buffers that it changes, with their values before it.

        Raise ValueError if the module rejects the example, draws without a key, or changes its own weights.
        """
        module, key = self._module, key_for(0, "trial").to(example.device)
        before = {name: b.clone() for name, b in module.named_buffers()}
        versions = {name: p._version for name, p in module.named_parameters()}
        for part in self._dropouts:
            part.key = key
        devices = [example.device] if example.is_cuda else []
        assert self._rewritten is not None
        self._rewritten.key = key
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self._rewritten:
            state = _generators(devices)
            try:
                found = module.train()(example)
            except Exception as error:  # any user error
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ValueError(f"the model rejects an input of shape {tuple(example.shape[1:])}: {reason}") from None
            _check_tensor(found)
            if state != _generators(devices):
                raise ValueError(
                    "the model draws its own random numbers in training (RReLU, torch.rand, random, numpy), so runs "
                    "would not be repeatable; dropout layers and functions are fine, because they get keyed draws"
                )
        for name, parameter in module.named_parameters():
            if parameter._version != versions[name]:
                raise ValueError(
                    f"the model changes its weight {name!r} in a forward pass (an embedding with max_norm does), "
                    "so clients would change the server's model; leave max_norm out"
                )
        moved = {name: b for name, b in before.items() if not torch.equal(b, module.get_buffer(name))}
        for name, buffer in moved.items():
            module.get_buffer(name).copy_(buffer)
            if not buffer.is_floating_point():
                raise ValueError(
                    f"the model's buffer {name!r} ({buffer.dtype}) changes in training, but only floats can be averaged"
                )
        return moved

    def _find_smallest_batch(self, example: Tensor) -> int:
        try:
            self.forward(
                self.start_P, self.start_R, example[:1], mode="still", key=key_for(0, "trial").to(example.device)
            )
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return 2
        return 1


def _places(module: nn.Module, parameters: Iterable[str], buffers: Iterable[str]) -> list[Place]:
    """Return the places of each of these tensors in the module; a tied tensor has several places."""
    found: list[Place] = []
    for name, kind in [*((n, "_parameters") for n in parameters), *((n, "_buffers") for n in buffers)]:
        path, _, key = name.rpartition(".")
        tensor = getattr(module.get_submodule(path), kind)[key]
        for part in module.modules():
            held = getattr(part, kind)
            found += [(name, held, key) for key in held if held[key] is tensor]
            if isinstance(part, nn.RNNBase):
                weights = part._flat_weights
                found += [(name, weights, i) for i, weight in enumerate(weights) if weight is tensor]
    return found


@contextmanager
def _seeded(key: Key) -> Iterator[None]:
    """Seed the global generators of torch on the CPU, of Python and of numpy, and put them back afterwards."""
    k0, k1 = key.tolist()
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(k0 | k1 << 32 & 0x7FFF_FFFF_0000_0000)
        random.seed(k0 | k1 << 32)
        np.random.seed([k0, k1])
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _generators(devices: list[torch.device]) -> list[object]:
    """Return the states of the global random generators that a module could draw from."""
    of_torch = [torch.random.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return [
        *(state.numpy().tobytes() for state in of_torch),
        random.getstate(),
        pickle.dumps(np.random.get_state(legacy=False)),
    ]


def _has_normal_convolutions(module: nn.Module) -> bool:
    """Convolutions between norms are faster with channels last in memory, if the norms can read that.

    The model alone decides: in lower precision this is the order of the flat vector, which must not depend on the
    machine.
    """
    kinds = {type(part) for part in module.modules()}
    return nn.Conv2d in kinds and bool(kinds & {nn.BatchNorm2d, nn.GroupNorm, group_norm.GroupNorm})


def _better_channels_last(module: nn.Module) -> bool:
    """Return whether they can: torch's own GroupNorm would change the order back on a GPU."""
    return _has_normal_convolutions(module) and all(type(part) is not nn.GroupNorm for part in module.modules())


def _vmapped() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _nothing() -> None:
    pass


def _flatten(tensors: list[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([like.new_zeros(0), *(t.detach().reshape(-1) for t in tensors)])


def _find_head(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the submodule called ``head`` if there is one, otherwise the last one with its own parameters."""
    if isinstance(getattr(module, "head", None), nn.Module):
        return "head", module.get_submodule("head")
    owners = [name for name, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None]
    name = re.sub(r"\.?parametrizations\b.*", "", owners[-1]) if owners else ""  # the layer, not its weight
    return name, module.get_submodule(name)


def _replace_dropout(module: nn.Module) -> None:
    found = [(n, part) for n, part in module.named_modules(remove_duplicate=False) if type(part) is nn.Dropout]
    keyed: dict[int, KeyedDropout] = {}  # one layer may have several names
    for name, part in found:
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, keyed.setdefault(id(part), KeyedDropout(part.p, len(keyed))))


def _check_tensor(found: object) -> None:
    if not isinstance(found, Tensor):
        remedy = "wrap it with fedncv.models.Logits" if hasattr(found, "logits") else "return the outputs alone"
        raise ValueError(f"the model returns {type(found).__name__}, not a tensor; {remedy}")


def _make(factory: Factory, shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    if isinstance(factory, nn.Module):
        raise ValueError(
            f"the model is a module ({type(factory).__name__}); give a function that builds one, so that every run "
            f"starts from its own seed: lambda shape, outputs: {type(factory).__name__}(...)"
        )
    try:
        module = factory(shape, num_outputs)
    except ValueError:
        raise
    except Exception as error:  # any error of the user's function
        raise ValueError(
            f"the model's function failed ({type(error).__name__}: {error}); "
            "it must accept (shape of one input, number of outputs)"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model's function returned {type(module).__name__}, not a torch.nn.Module")
    return module
