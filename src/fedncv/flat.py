"""Turn a torch module into pure functions of one flat parameter vector. No other file knows about layers.

P   parameters, those of the head last:  x_P[layout.body], x_P[layout.head]
R   running statistics (BatchNorm's mean and variance): separate from the parameters, with their own rule
B   samples of a batch,  C   outputs,  F   features (the input of the head)
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedncv.keys import Key, fold, key_for, uniform

Mode = Literal["train", "still", "eval"]
"""train: batch statistics, running ones are updated. still: batch statistics, running ones are not updated.
eval: running statistics, no dropout."""

Factory = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one input, number of outputs) -> a module."""


Place = tuple[str, dict[str, Tensor | None], str]
"""Name of a tensor, the dict of a module that holds it, and its key there."""


class Layout(NamedTuple):
    """Position of each named tensor in the flat vectors."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    body: slice
    head: slice
    buffer_names: tuple[str, ...]
    buffer_shapes: tuple[torch.Size, ...]
    features: torch.Size  # shape of the head's input for one sample

    @property
    def num_parameters(self) -> int:
        return int(self.head.stop)

    def slice(self, name: str) -> slice:
        return {"body": self.body, "head": self.head}[name]

    def unflatten(self, x_P: Tensor, b_R: Tensor) -> dict[str, Tensor]:
        """Return name -> tensor, as in the module's state_dict (without BatchNorm's batch counters)."""
        parameters = zip(self.names, _split(x_P, self.shapes), strict=True)
        buffers = zip(self.buffer_names, _split(b_R, self.buffer_shapes), strict=True)
        return dict([*parameters, *buffers])


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

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        assert self.key is not None, "a training step must give every dropout layer its key"
        key = fold(fold(self.key, self.layer), self.calls)
        self.calls += 1
        keep = uniform(key, x.numel(), dtype=torch.float32) >= self.p
        return x * keep.reshape(x.shape) / (1 - self.p)


class Weighted(nn.Module):
    """A layer that uses several samples of a batch, and gets weights that mark samples and padding."""

    weight_B: Tensor | None = None


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
    head. Raise ValueError if the module draws its own random numbers.
    """

    def __init__(self, factory: Factory, example: Tensor, num_outputs: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            k0, k1 = key_for(seed, "model").tolist()
            torch.default_generator.manual_seed(k0 | k1 << 32 & 0x7FFF_FFFF_0000_0000)
            module = _make(factory, tuple(example.shape[1:]), num_outputs)
        dropouts = _replace_dropout(module)
        for part in module.modules():  # BatchNorm needs its batch counter only with momentum=None
            if getattr(part, "num_batches_tracked", None) is not None:
                if part.momentum is None:
                    raise ValueError("BatchNorm with momentum=None has a counter that cannot be averaged; set momentum")
                part.register_buffer("num_batches_tracked", None)
        module.to(device=example.device)
        if example.is_floating_point():
            module.to(dtype=example.dtype)
        self._features = example.new_zeros(0)
        self._take(module)
        moving = _moving(module, example, dropouts)
        inside = {id(p) for p in self._head.parameters()}
        named = sorted(module.named_parameters(), key=lambda item: id(item[1]) in inside)  # stable: head last
        if not named:
            raise ValueError("the model has no parameters, so there is nothing to train")
        size_body = sum(p.numel() for _, p in named if id(p) not in inside)
        self.layout = Layout(
            names=tuple(name for name, _ in named),
            shapes=tuple(p.shape for _, p in named),
            body=slice(0, size_body),
            head=slice(size_body, sum(p.numel() for _, p in named)),
            buffer_names=tuple(moving),
            buffer_shapes=tuple(b.shape for b in moving.values()),
            features=self._features.shape[1:],
        )
        self.start_P = _flatten([p for _, p in named], like=named[0][1])
        self.start_R = _flatten(list(moving.values()), like=named[0][1])
        self.smallest_batch = self._find_smallest_batch(example)
        logits = self.forward(self.start_P, self.start_R, example, mode="eval")[0].logits_BC
        if logits.shape[:1] != example.shape[:1]:
            raise ValueError(f"the model maps {tuple(example.shape)} to {tuple(logits.shape)}; it needs one row each")

    def _take(self, module: nn.Module) -> None:
        self._module = module
        self._dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        self._weighted = [part for part in module.modules() if isinstance(part, Weighted)]
        self._head_name, self._head = _find_head(module)
        for number, hook in list(self._head._forward_pre_hooks.items()):  # hooks of a copied module
            if isinstance(hook, _Listener):
                del self._head._forward_pre_hooks[number]
        self._head.register_forward_pre_hook(_Listener(self), with_kwargs=True)
        self._mode_set: bool | None = None
        self._places: list[Place] = []

    @contextmanager
    def _holding(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Put these tensors into the module, like torch's functional_call, which searches their places every time."""
        places = self._places
        if not places:
            places += _places(self._module, self.layout)
        own = [held[key] for _, held, key in places]
        try:
            for name, held, key in places:
                held[key] = tensors[name]
            yield
        finally:
            for (_, held, key), tensor in zip(places, own, strict=True):
                held[key] = tensor

    def changed(self, change: Callable[[nn.Module], None]) -> "Model":
        """Return a copy whose module was changed by ``change``: the same names and shapes, other arithmetic."""
        for dropout in self._dropouts:
            dropout.key = None
        other = copy.copy(self)
        module = copy.deepcopy(self._module)
        change(module)
        other._take(module)
        return other

    def same_buffers(self, other: "Model") -> bool:
        """Return whether both have the same buffers; a module may draw some from its seed."""
        pairs = zip(self._module.buffers(), other._module.buffers(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

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
        for dropout in self._dropouts:
            dropout.key, dropout.calls = key, 0
        for part in self._weighted:
            part.weight_B = weight_B
        tensors = self.layout.unflatten(x_P, b_R)
        statistics = self.layout.buffer_names
        if training:  # BatchNorm writes into its buffers
            tensors |= {name: tensors[name].clone() for name in statistics}
        with self._holding(tensors):
            logits = self._module(inputs)
        if mode == "train" and statistics:
            b_R = torch.cat([tensors[name].reshape(-1) for name in statistics])
        return Output(logits, self._features), b_R

    def head(self, x_P: Tensor, features_BF: Tensor) -> Tensor:
        """Return the logits of given features with the head of ``x_P``."""
        prefix = f"{self._head_name}." if self._head_name else ""
        named = self.layout.unflatten(x_P, x_P.new_zeros(int(self.start_R.numel())))
        mine = {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
        logits = functional_call(self._head, mine, (features_BF,))
        assert isinstance(logits, Tensor)
        return logits

    def state_dict(self, x_P: Tensor, b_R: Tensor, offset_C: Tensor | None = None) -> dict[str, Tensor]:
        """Return an ordinary state_dict for a new module of the same factory; an offset is added to the head's bias."""
        constant = {name: b.detach().cpu().contiguous() for name, b in self._module.state_dict().items()}
        moved = {name: t.detach().cpu().contiguous() for name, t in self.layout.unflatten(x_P, b_R).items()}
        tensors = constant | moved
        for name in self.layout.buffer_names:
            if name.endswith("running_mean"):
                tensors[name.replace("running_mean", "num_batches_tracked")] = torch.tensor(0)
        if offset_C is not None:
            biases = [n for n in self.layout.names if n.startswith(self._head_name) and n.endswith("bias")]
            if not biases or tensors[biases[-1]].shape != offset_C.shape:
                raise ValueError("this client predicts with an offset on its logits, but the head has no bias")
            tensors[biases[-1]] = tensors[biases[-1]] + offset_C.cpu()
        return tensors

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


def _places(module: nn.Module, layout: Layout) -> list[Place]:
    """Return the places of each tensor of the layout in the module; a tied tensor has several places."""
    found = []
    for name, kind in [(n, "_parameters") for n in layout.names] + [(n, "_buffers") for n in layout.buffer_names]:
        path, _, key = name.rpartition(".")
        tensor = getattr(module.get_submodule(path), kind)[key]
        for part in module.modules():
            held = getattr(part, kind)
            found += [(name, held, key) for key in held if held[key] is tensor]
    return found


def _split(vector: Tensor, shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    # one split, not many slices: its backward pass is one concatenation
    parts = torch.split(vector, [s.numel() for s in shapes])
    return [t.view(s) for t, s in zip(parts, shapes, strict=True)]


def _flatten(tensors: list[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([like.new_zeros(0), *(t.detach().reshape(-1) for t in tensors)])


def _find_head(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the submodule called ``head`` if there is one, otherwise the last one with its own parameters."""
    if isinstance(getattr(module, "head", None), nn.Module):
        return "head", module.get_submodule("head")
    owners = [name for name, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None]
    name = re.sub(r"\.?parametrizations\b.*", "", owners[-1]) if owners else ""  # the layer, not its weight
    return name, module.get_submodule(name)


def _replace_dropout(module: nn.Module) -> list[KeyedDropout]:
    found = [(n, part) for n, part in module.named_modules(remove_duplicate=False) if type(part) is nn.Dropout]
    keyed: dict[int, KeyedDropout] = {}  # one layer may have several names
    for name, part in found:
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, keyed.setdefault(id(part), KeyedDropout(part.p, len(keyed))))
    return list(keyed.values())


def _make(factory: Factory, shape: tuple[int, ...], num_outputs: int) -> nn.Module:
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


def _moving(module: nn.Module, example: Tensor, dropouts: list[KeyedDropout]) -> dict[str, Tensor]:
    """Return the float buffers that a training pass changes, with their values before it."""
    before = {name: b.clone() for name, b in module.named_buffers()}
    for dropout in dropouts:
        dropout.key = key_for(0, "trial").to(example.device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        state = torch.random.get_rng_state()
        try:
            module.train()(example)
        except Exception as error:  # any user error
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"the model rejects an input of shape {tuple(example.shape[1:])}: {reason}") from None
        if not torch.equal(state, torch.random.get_rng_state()):
            raise ValueError(
                "the model draws its own random numbers in training (functional dropout, RReLU, ...), "
                "so runs would not be repeatable; use nn.Dropout, which gets keyed random numbers"
            )
    moved = {name: b for name, b in before.items() if not torch.equal(b, module.get_buffer(name))}
    for name, buffer in moved.items():
        module.get_buffer(name).copy_(buffer)
        if not buffer.is_floating_point():
            raise ValueError(
                f"the model's buffer {name!r} ({buffer.dtype}) changes in training, but only floats can be averaged"
            )
    return moved
