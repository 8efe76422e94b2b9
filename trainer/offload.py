"""Frozen weights in host memory: a layer's are copied to the device when it runs, and at most two layers' are there at once.

Idea: under an adapter the base weights are only read. The matrices of the decoder's layers lie in host memory, pinned where there
is a GPU. The first call of a module that holds some makes its layer the one at hand: the parameters' data become copies on
the device, and the copy of the layer that comes next begins on a side stream: the one above in a forward pass, the one below in
a backward pass, which needs W again (dX = dY W). What autograd would keep of a copy is replaced by its place in which
layer's weights, and it is found there when that layer is at hand again. Without a GPU the same code copies within plain memory:
the numbers are the same.

Copies are allocated on the stream that computes and filled on the side stream, which first waits for what was computed so far.
So the memory of a layer that is done is that of the next but one, however far the host runs ahead of the device.

Embeddings, head, norms, biases and adapters stay on the device, and so does what a layer shares with another.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.architectures import unwrap
from longstraw_agents.trainer.pages import side_stream

#: A parameter as its module and its name there: what lies under the name may be put in anew.
Weight = tuple[nn.Module, str]


@dataclass(frozen=True)
class _Kept:
    """What the graph keeps of a copy: which weight of which layer, and the view of it."""

    layer: int
    weight: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Copies:
    """One layer's weights on the device, and their data in host memory; `wait` before they are read or dropped."""

    def __init__(self, layer: int, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.layer, self.parameters = layer, parameters
        self.hosts = [parameter.data for parameter in parameters]
        self.copies = [torch.empty_like(host, device=device) for host in self.hosts]
        self._lent = False  # whether the parameters' data are the copies
        self._ready: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        if device.type == "cuda":
            main, side = torch.cuda.current_stream(device), side_stream(device, "weights")
            side.wait_stream(main)  # the memory's last use is over before it is written
            with torch.cuda.stream(side):
                self._fill()
            self._ready = main, side.record_event()
        elif device.type != "meta":
            self._fill()

    def _fill(self) -> None:
        for copy, host in zip(self.copies, self.hosts, strict=True):
            copy.copy_(host, non_blocking=True)

    def wait(self) -> None:
        """Let the computing stream wait for the copies."""
        if self._ready is not None:
            main, event = self._ready
            main.wait_event(event)

    def lend(self) -> None:
        """Make the copies the parameters' data."""
        if not self._lent:
            self._set(self.copies)

    def give_back(self) -> None:
        """Make the parameters' data the hosts' again."""
        if self._lent:
            self._set(self.hosts)

    def _set(self, data: list[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, data, strict=True):
            parameter.data = tensor
        self._lent = not self._lent


class Offload:
    """The layers' frozen weights of one model. copied: bytes that were copied to the device so far."""

    def __init__(self, base: Any, weights: list[list[Weight]]) -> None:
        """base: the transformers model. weights: of each layer, those that lie in host memory."""
        self.copied = 0
        self._base, self._weights = base, weights
        self._here: Copies | None = None  # the layer at hand
        self._ahead: Copies | None = None  # on its way
        self._storages: dict[int, int] = {}  # the layer at hand's copies by storage -> which weight
        self._running = False
        self._lowest = len(weights)  # layer of which the last run's graph keeps something
        owners = {id(module): (index, module) for index, layer in enumerate(weights) for module, _ in layer}
        self._hooks = [
            module.register_forward_pre_hook(functools.partial(self._called, index)) for index, module in owners.values()
        ]
        decoder = base.get_decoder()
        decoder.forward = _Running(self, decoder.forward)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that lie in host memory."""
        return [parameter for layer in range(len(self._weights)) for parameter in self.of_layer(layer)]

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's."""
        return [sum(parameter.nbytes for parameter in self.of_layer(layer)) for layer in range(len(self._weights))]

    def release(self) -> None:
        """Drop all copies; every parameter is its host's again."""
        for copies in (self._here, self._ahead):
            if copies is not None:
                copies.wait()
        if self._here is not None:
            self._here.give_back()
        self._here = self._ahead = None
        self._storages = {}

    def undo(self) -> None:
        """Leave the model as any other; its weights stay where they are."""
        self.release()
        for hook in self._hooks:
            hook.remove()
        del self._base.get_decoder().forward

    @contextmanager
    def running(self) -> Iterator[None]:
        """A forward pass of the decoder. If a graph comes of it, the last layer's copies stay for the backward pass, but no
        longer as the parameters' data: what is written there (by a merge, say, or `load_state_dict`) would be lost."""
        self.release()
        self._running, self._lowest = True, len(self._weights)
        try:
            with saved_tensors_hooks(self._keep, self._find):
                yield
        except BaseException:
            self._lowest = len(self._weights)
            raise
        finally:
            self._running = False
            if self._lowest == len(self._weights):
                self.release()
            elif self._here is not None:
                self._here.give_back()

    def _called(self, layer: int, module: nn.Module, args: Any) -> None:
        """Before a module of `layer` runs: in a forward pass, in a recomputation, or in a backward pass that reads latents."""
        if self._here is None or self._here.layer != layer:
            self._bring(layer, 1 if self._here is None or layer > self._here.layer else -1)
        assert self._here is not None
        self._here.lend()

    def _keep(self, tensor: Tensor) -> Any:
        weight = self._storages.get(tensor.untyped_storage()._cdata)
        if weight is None or self._here is None or tensor.dtype != self._here.copies[weight].dtype:
            return tensor
        self._lowest = min(self._lowest, self._here.layer)
        return _Kept(self._here.layer, weight, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _find(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept  # type: ignore[no-any-return]
        self._bring(kept.layer, -1)
        assert self._here is not None
        return self._here.copies[kept.weight].as_strided(kept.size, kept.stride, kept.offset)

    def _bring(self, layer: int, step: int) -> None:
        """Make `layer` the one at hand, and let the copy of its neighbour begin."""
        if self._here is None or self._here.layer != layer:
            coming, self._ahead = self._ahead, None
            self.release()
            if coming is None or coming.layer != layer:
                if coming is not None:
                    coming.wait()
                coming = None  # its memory goes first
                coming = self.copy_of(layer)
            coming.wait()
            self._here = coming
            self._storages = {copy.untyped_storage()._cdata: weight for weight, copy in enumerate(coming.copies)}
        following = layer + step
        if self._ahead is None and (self._lowest if step < 0 else 0) <= following < len(self._weights):
            self._ahead = self.copy_of(following)
        if not self._running and torch._C._current_graph_task_id() != -1:
            # When the backward pass is over; torch has no public way to ask for that.
            torch.autograd.Variable._execution_engine.queue_callback(self.release)

    def copy_of(self, layer: int) -> Copies:
        """A copy of a layer's, on its way. Raises ModelError where one of them has come to require grad."""
        parameters = self.of_layer(layer)
        if any(parameter.requires_grad for parameter in parameters):
            raise ModelError(f'a base weight of layer {layer} requires grad, but weights = "host" keeps them frozen; {_INSTEAD}')
        with torch.inference_mode(False), torch.no_grad():
            copies = Copies(layer, parameters, self._base.get_input_embeddings().weight.device)
        self.copied += sum(copy.nbytes for copy in copies.copies)
        return copies

    def of_layer(self, layer: int) -> list[nn.Parameter]:
        """Those of one layer."""
        return [module._parameters[name] for module, name in self._weights[layer]]  # type: ignore[misc]


class _Running:
    """A decoder's forward that its offload is told of. A copy of the model gets copies of both."""

    def __init__(self, offload: Offload, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # with its signature
        self.offload, self._forward = offload, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward."""
        with self.offload.running():
            return self._forward(*args, **kwargs)


_INSTEAD = "load the model without it to train base weights"


def offload(model: nn.Module, device: torch.device | str) -> Offload:
    """Move the frozen matrices of the decoder's layers to host memory and all else to `device`, in place.

    model: a transformers model under a PEFT adapter. Raises ModelError where base weights train, and where an adapter on
    experts would make whole weights of its own, which stay on the device for as long as a graph does.
    """
    device, base = torch.device(device), unwrap(model)
    if offload_of(model) is not None:
        raise ModelError("the model's weights lie in host memory already")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name]
    if trained or not hasattr(model, "peft_config"):
        what = f"{trained[0]} trains" if hasattr(model, "peft_config") else f"{type(model).__name__} has no adapter"
        raise ModelError(f'{what}, but weights = "host" keeps base weights frozen under an adapter; {_INSTEAD}')
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        raise ModelError('an adapter on experts makes whole weights of its own; leave `experts` off, or weights = "host"')
    users = Counter(id(parameter) for module in base.modules() for parameter in module._parameters.values())
    weights = [_frozen(layer, users) for layer in base.get_decoder().layers]  # type: ignore[operator]
    chosen = {id(module._parameters[name]) for layer in weights for module, name in layer}
    model._apply(lambda tensor: _in_host_memory(tensor, device) if id(tensor) in chosen else tensor.to(device))
    return Offload(base, weights)


def offload_of(model: nn.Module) -> Offload | None:
    """The model's offload, if it has one."""
    forward = vars(unwrap(model).get_decoder()).get("forward")  # type: ignore[operator]
    return forward.offload if isinstance(forward, _Running) else None


def _frozen(layer: nn.Module, users: Counter[int]) -> list[Weight]:
    """The matrices of a layer that are no adapter's. users: by how many modules each parameter is held; by one, or it stays."""
    found = []
    for path, module in layer.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.ndim < 2 or "lora_" in path or users[id(parameter)] > 1:
                continue
            if not parameter.is_floating_point():
                raise ModelError(f'{path}.{name} is {parameter.dtype}; weights in few bits stay on the device, not in "host"')
            found.append((module, name))
    return found


def _in_host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """The values in memory that `device` copies from without waiting."""
    if device.type != "cuda":
        return tensor.to(device)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
