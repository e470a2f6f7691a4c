"""How our ops become torch's: a schema, a kernel a device, shapes for tracing, a backward.

``torch.library.register_autograd`` costs some 60 µs a call (measured, torch 2.13); an autograd function registered for the Autograd key
does the same in 10, passes ``opcheck`` and is traced by ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from runner.errors import UserError

_LIBRARY = torch.library.Library("gearsail", "DEF")

Gradients = Sequence[Tensor | None]
# in schemas: a :class:`~runner.kernels.adjacency.Csr`, and the transposed graph's, which is given where a backward may follow
GRAPH = "Tensor indptr, Tensor indices, Tensor? entry_ids, Tensor row_blocks"
TURNED = "Tensor? turned_indptr, Tensor? turned_indices, Tensor? turned_ids, Tensor? turned_blocks"
_ORDINARY = (Tensor, torch.nn.Parameter)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Gradients] | None = None,
) -> Callable[..., Any]:
    """Register an op in the namespace ``gearsail`` and return it.

    Args:
        schema: ``name(Tensor x, …) -> Tensor``.
        kernel: computes it on any device, without gradients.
        fake: returns empty outputs of the right shape.
        save: ``(ctx, inputs, output)``: keeps what the backward needs.
        backward: ``(ctx, *output gradients)`` -> gradients of the leading inputs; the others have none. Its result
            can't be differentiated again.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"gearsail::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.gearsail, name).default
    if save is None or backward is None:
        return _direct(op, kernel)

    def below(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    _LIBRARY.impl(name, _differentiable(below, op, save, backward), "Autograd")
    return _direct(op, _differentiable(kernel, op, save, backward))


def _direct(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``run`` where nobody listens to torch's dispatcher: it costs more than a small graph's kernel."""
    tensors = [at for at, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]

    def call(*inputs: Any) -> Any:
        return run(*inputs) if is_direct([inputs[at] for at in tensors if at < len(inputs)]) else op(*inputs)

    return call


def is_direct(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call on these needs nothing of torch's dispatcher: no tracing, mode, transform, tangent; ordinary tensors only."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(tensor is None or (type(tensor) in _ORDINARY and not tensor.is_neg()) for tensor in tensors)


def _differentiable(
    compute: Callable[..., Any], op: Any, save: Callable[..., None], backward: Callable[..., Gradients]
) -> Callable[..., Any]:
    num_inputs = len(op._schema.arguments)
    tensors = [at for at, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = compute(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack():
                raise UserError(
                    f"{op._schema.name}: its gradient can't be differentiated again (create_graph=True); on the CPU, CXX=none in the "
                    "environment runs torch's ops in its place, which can"
                )
            with torch.no_grad():
                found = tuple(backward(ctx, *gradients))
            return found + (None,) * (num_inputs - len(found))

    def run(*inputs: Any) -> Any:
        if torch.is_grad_enabled():
            for at in tensors:
                if inputs[at] is not None and inputs[at].requires_grad:
                    return Function.apply(*inputs)
        return compute(*inputs)

    return run


def launcher(tensor: Tensor) -> ModuleType:
    """Return the module that launches kernels where a tensor is."""
    if tensor.is_cuda:
        from runner.kernels.cuda import launch as cuda_launch  # CuPy is there only where there is a GPU

        return cuda_launch
    from runner.kernels.cpu import launch

    return launch
