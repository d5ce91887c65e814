"""All parameters of a model in flat buffers: fp32 masters, fp32 gradients, AdamW moments, compute copies.

Promises: masters and moments are fp32 whatever the compute dtype; in fp32 the compute parameters are the
masters; gradients of every backward are added in fp32 and the module keeps none of its own. One pass per
buffer does norm, step and copy for all parameters.

Decayed parameters (matrices) come first, then the others (norms, biases), so that each kind is one slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from turnout.train.native_ops import call, usable
from turnout.train.pieces import Piece
from turnout.train.settings import OptimizerSettings

_ALIGN = 64  # elements: every parameter starts on a cache line in each dtype


class GradientSlot:
    """The fp32 gradient of one parameter. Fresh means that its content is left over from an earlier step."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.fresh = True

    def take(self) -> bool:
        """Whether the caller must overwrite instead of add; the slot is not fresh any more."""
        fresh, self.fresh = self.fresh, False
        return fresh

    def add(self, grad: Tensor) -> None:
        if self.take():
            self.buffer.copy_(grad)
        else:
            self.buffer.add_(grad)

    def ready(self) -> Tensor:
        """The buffer, zeroed where it was fresh, for sparse additions."""
        if self.take():
            self.buffer.zero_()
        return self.buffer


class FlatParameters:
    """Owns the memory of a model's parameters; the module's parameters become views of it. `state` is `resident`,
    or what is kept of it while the memory is given back."""

    def __init__(self, named: Iterable[tuple[str, Parameter]], dtype: torch.dtype) -> None:
        """Takes over parameters whose present values (any float dtype) become the fp32 masters."""
        items = sorted(named, key=lambda item: item[1].dim() < 2)
        self.names = [name for name, _ in items]
        self.shapes = [tuple(p.shape) for _, p in items]
        sizes = [-(-p.numel() // _ALIGN) * _ALIGN for _, p in items]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.decayed = sum(size for size, (_, p) in zip(sizes, items) if p.dim() >= 2)
        device = items[0][1].device
        self.master = torch.zeros(sum(sizes), device=device)
        self.grad = torch.zeros(sum(sizes), device=device)
        self.exp_avg = torch.zeros(sum(sizes), device=device)
        self.exp_avg_sq = torch.zeros(sum(sizes), device=device)
        for view, (_, p) in zip(self.views(self.master), items):
            view.copy_(p.data)
        self.compute = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.state = self.resident
        self.slots = {name: GradientSlot(view) for name, view in zip(self.names, self.views(self.grad))}
        for view, (name, p) in zip(self.views(self.compute), items):
            p.data = view
            p.register_post_accumulate_grad_hook(self._collector(self.slots[name]))

    @property
    def resident(self) -> dict[str, Tensor]:
        """What a step can't make anew: masters and moments, where it needs them."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def away(self) -> bool:
        """Whether the memory is given back, and `state` lies elsewhere (turnout.train.offload)."""
        return self.state["master"] is not self.master

    @property
    def made(self) -> list[Tensor]:
        """What a step makes anew."""
        return [self.grad] if self.compute is self.master else [self.grad, self.compute]

    def between_steps(self) -> bool:
        """Whether no gradient is kept for a step under way."""
        return all(slot.fresh for slot in self.slots.values())

    def leaves(self, kept: Mapping[str, Tensor]) -> None:
        """The memory is given back (turnout.train.offload); the state is in `kept`."""
        self.state = dict(kept)

    def comes(self) -> None:
        self.state = self.resident
        self.grad.zero_()  # also what lies between the parameters
        self.refresh_compute()

    @property
    def weights(self) -> dict[str, Tensor]:
        """By name: compute weights, or while these are away masters, which they are copies of."""
        flat = self.state["master"] if self.away else self.compute
        return dict(zip(self.names, self.views(flat)))

    @staticmethod
    def _collector(slot: GradientSlot) -> Callable[[Tensor], None]:
        def collect(p: Tensor) -> None:
            if p.grad is not None:
                slot.add(p.grad)
                p.grad = None

        return collect

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """One view per parameter, in the order of `names`."""
        for start, shape in zip(self._starts, self.shapes):
            yield flat[start : start + math.prod(shape)].view(shape)

    def pieces(self, prefix: str = "") -> Iterator[Piece]:
        """Every parameter whole, with its state, for a checkpoint; `prefix` comes before the names."""
        columns = zip(*(self.views(buffer) for buffer in self.state.values()))
        for name, shape, views in zip(self.names, self.shapes, columns):
            yield Piece(prefix + name, shape, (0,) * len(shape), shape, dict(zip(self.state, views)))

    def restored(self) -> None:
        """The state was replaced from outside."""
        self.refresh_compute()
        self.discard_gradients()

    def refresh_compute(self) -> None:
        """Copies the masters to the compute parameters, where these are there."""
        if self.compute is not self.master and not self.away:
            self.compute.copy_(self.master)

    def finish_gradients(self) -> None:
        """Zeroes the gradient of every parameter that no backward has touched."""
        for slot in self.slots.values():
            slot.ready()

    def discard_gradients(self) -> None:
        for slot in self.slots.values():
            slot.fresh = True


class AdamW:
    """AdamW (arXiv 1711.05101) over the flat buffers. Where compute copies are bf16 on a CPU one pass of C writes
    them as well; else it is torch's, fused."""

    def __init__(self, flat: FlatParameters, settings: OptimizerSettings) -> None:
        self.flat = flat
        self.settings = settings
        parts = [(slice(0, flat.decayed), settings.weight_decay), (slice(flat.decayed, None), 0.0)]
        groups: list[dict[str, object]] = []
        self._state: list[dict[str, Tensor]] = []
        for part, decay in parts:
            parameter = Parameter(flat.master[part])
            parameter.grad = flat.grad[part]
            groups.append({"params": [parameter], "weight_decay": decay})
            moments = {"exp_avg": flat.exp_avg[part], "exp_avg_sq": flat.exp_avg_sq[part]}
            self._state.append({"step": torch.zeros(()), **moments})
        self._torch = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
        )
        for group, state in zip(self._torch.param_groups, self._state):
            self._torch.state[group["params"][0]] = state

    @property
    def steps(self) -> int:
        return int(self._state[0]["step"])

    @steps.setter
    def steps(self, count: int) -> None:
        for state in self._state:
            state["step"].fill_(count)

    def gradient_norm(self) -> float:
        """Global L2 norm of the collected gradients; NaN or infinite where a gradient is."""
        self.flat.finish_gradients()
        return float(torch.linalg.vector_norm(self.flat.grad))

    def discard(self) -> None:
        """Drops the gradients collected so far."""
        self.flat.discard_gradients()

    def step(self, lr: float, norm: float) -> None:
        """Clips by the global norm, steps, copies masters to compute parameters, discards the gradients."""
        limit = self.settings.clip_grad
        scale = limit / norm if 0 < limit < norm else 1.0
        (self._native_step if usable(self.flat.compute) else self._torch_step)(lr, scale)
        self.flat.discard_gradients()

    def _native_step(self, lr: float, scale: float) -> None:
        flat, settings = self.flat, self.settings
        self.steps += 1
        keep1, keep2 = settings.betas
        rate, root = lr / (1 - keep1**self.steps), math.sqrt(1 - keep2**self.steps)
        buffers = (flat.master, flat.exp_avg, flat.exp_avg_sq, flat.grad, flat.compute)
        for group, part in zip(self._torch.param_groups, (slice(0, flat.decayed), slice(flat.decayed, None))):
            pieces = [buffer[part] for buffer in buffers]
            numbers = (keep1, 1 - keep1, keep2, 1 - keep2, scale, 1 - lr * group["weight_decay"], rate, root)
            call("turnout_adamw", *pieces, len(pieces[0]), *map(float, (*numbers, settings.eps)))

    def _torch_step(self, lr: float, scale: float) -> None:
        if scale != 1.0:
            self.flat.grad.mul_(scale)
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        self.flat.refresh_compute()
