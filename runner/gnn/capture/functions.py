"""Message passing with Python functions: run once on an edge batch of recorded gathers, and on a mailbox that records reductions.

DGL runs a reduce function once for each in-degree, on messages [n, degree, …]; here it runs once, on a stand-in for all destinations:
reductions over its dimension 1 become aggregations, everything else an op on all edges. A destination without edges has 0, as in DGL.

Legend: N destinations, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.errors import CaptureError
from runner.gnn.capture.calls import name_of, where
from runner.gnn.dgl_compat import import_dgl
from runner.kernels.opgraph import Target

if TYPE_CHECKING:
    from runner.gnn.capture.recorder import Recorder


class _Gathers(Mapping[str, Tensor]):
    """A frame of nodes, read at each edge."""

    def __init__(self, recorder: Recorder, frame: Mapping[str, Tensor], target: Target) -> None:
        self._recorder, self._frame, self._target = recorder, frame, target
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self._recorder.gather(self._frame[name], self._target)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class RecordedEdges:
    """An edge batch of all edges, as a message function sees it."""

    def __init__(self, graph: Any, recorder: Recorder) -> None:
        self._graph = graph
        self.src = _Gathers(recorder, graph.srcdata, "u")
        self.dst = _Gathers(recorder, graph.dstdata, "v")
        self.data = graph.edata

    def batch_size(self) -> int:
        """E."""
        return int(self._graph.num_edges())

    def __len__(self) -> int:
        return self.batch_size()

    def edges(self) -> Any:
        """(src, dst, edge ids), int64 [E] each."""
        return self._graph.edges(form="all")


class RecordedNodes:
    """A node batch of all destinations, as a reduce function sees it."""

    def __init__(self, graph: Any, recorder: Recorder, messages: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self.data = graph.dstdata
        self.mailbox = {name: Mailbox(recorder, message) for name, message in messages.items()}

    def batch_size(self) -> int:
        """N."""
        return int(self._graph.num_dst_nodes())

    def __len__(self) -> int:
        return self.batch_size()

    def nodes(self) -> Tensor:
        """int64 [N]."""
        found: Tensor = self._graph.dstnodes()
        return found


_REDUCTIONS = {
    name: reduce
    for reduce, names in {"mean": ("mean",), "sum": ("sum",), "max": ("max", "amax"), "min": ("min", "amin")}.items()
    for name in names
}


class Mailbox:
    """Messages [N, degree, …] that never are: an edge value, whose reductions over dimension 1 are aggregations.

    Args:
        recorder: records them.
        message: [E, …].
    """

    def __init__(self, recorder: Recorder, message: Tensor) -> None:
        self._recorder, self.message = recorder, message

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mailbox = next(argument for argument in args if isinstance(argument, Mailbox))
        reduce = _REDUCTIONS.get(name_of(func))
        if reduce is not None and args[0] is mailbox:
            return mailbox._reduced(name_of(func), reduce, *args[1:], **kwargs)
        given = [mailbox._at_edges(argument) for argument in args]
        result = func(*given, **kwargs)
        if not isinstance(result, Tensor) or result.shape[:1] != mailbox.message.shape[:1]:
            raise CaptureError(f"{where()}: {name_of(func)} of a mailbox is neither a reduction nor element by element")
        return Mailbox(mailbox._recorder, result)

    def _at_edges(self, argument: Any) -> Any:
        """An operand beside the mailbox, at each edge: another mailbox, or a value [N, 1, …] of the destinations."""
        if isinstance(argument, Mailbox):
            return argument.message
        if not isinstance(argument, Tensor) or argument.dim() < 2:
            return argument
        if argument.shape[0] != self._recorder.num_dst or argument.shape[1] != 1:
            raise CaptureError(f"{where()}: a value of shape {list(argument.shape)} beside a mailbox can't be captured")
        return self._recorder.gather(argument.squeeze(1), "v")

    def _reduced(self, function: str, reduce: str, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim != 1:
            raise CaptureError(
                f"{where()}: {function} of a mailbox over dimension {dim}; only dimension 1, the messages, can be captured"
            )
        found = self._recorder.reduce(self.message, reduce)
        found = found.unsqueeze(1) if keepdim else found
        return (found, None) if function in ("max", "min") else found

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor [N, degree, …]; the degree stands for that of each destination."""
        shape = (self._recorder.num_dst, Degrees(self._recorder.degrees()), *self.message.shape[1:])
        return shape if dim is None else shape[dim]

    @property
    def shape(self) -> Any:
        return self.size()

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name, None)
        if function is None:
            raise AttributeError(name)
        return lambda *args, **kwargs: Mailbox.__torch_function__(function, (), (self, *args), kwargs)

    def __mul__(self, other: Any) -> Any:
        return Mailbox.__torch_function__(torch.mul, (), (self, other))

    def __sub__(self, other: Any) -> Any:
        return Mailbox.__torch_function__(torch.sub, (), (self, other))

    def __add__(self, other: Any) -> Any:
        return Mailbox.__torch_function__(torch.add, (), (self, other))

    def __truediv__(self, other: Any) -> Any:
        return Mailbox.__torch_function__(torch.div, (), (self, other))

    __rmul__, __radd__ = __mul__, __add__


class Degrees:
    """The in-degree that a reduce function reads off its messages' shape, for each destination its own.

    Args:
        values: float64 [N], 1 where there are no edges.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def _applied(self, function: Callable[..., Any], other: Any) -> Degrees:
        return Degrees(function(self._values, other._values if isinstance(other, Degrees) else other))

    def __add__(self, other: Any) -> Degrees:
        return self._applied(torch.add, other)

    def __sub__(self, other: Any) -> Degrees:
        return self._applied(torch.sub, other)

    def __truediv__(self, other: Any) -> Degrees:
        return self._applied(torch.div, other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._beside(other) if isinstance(other, Tensor) else Degrees(other / self._values)

    def __pow__(self, other: Any) -> Degrees:
        return self._applied(torch.pow, other)

    def __mul__(self, other: Any) -> Any:
        """A scale of destinations' rows where the other is a tensor [N, …]."""
        if isinstance(other, Tensor):
            return other * self._beside(other)
        return self._applied(torch.mul, other)

    def _beside(self, other: Tensor) -> Tensor:
        """The values as a scale of a tensor's rows."""
        return self._values.to(other.dtype).reshape(-1, *[1] * (other.dim() - 1))

    __radd__, __rmul__ = __add__, __mul__

    def log(self) -> Degrees:
        """For ``numpy.log``, which asks an object."""
        return Degrees(self._values.log())

    def sqrt(self) -> Degrees:
        """For ``numpy.sqrt``."""
        return Degrees(self._values.sqrt())

    def __float__(self) -> float:
        raise CaptureError(f"{where()}: reads the in-degree as one number; it differs from destination to destination")

    __int__ = __index__ = __bool__ = __float__


def aggregate_by_functions(recorder: Recorder, graph: Any, message: Any, reduce: Any) -> None:
    """Record ``update_all`` whose message or reduce function, or both, are Python's."""
    built_in = is_builtin(message)
    messages = (
        {message.out_field: recorder.built_in_message(graph, message)}
        if built_in
        else messages_of(recorder, graph, message)
    )
    if is_builtin(reduce):
        with recorder.resume():
            graph.dstdata[reduce.out_field] = recorder.reduce(messages[reduce.msg_field], reduce.name)
        return
    has_edges = (recorder.adjacency.in_degrees > 0).unsqueeze(1)
    recorder.fix(has_edges, "node")
    is_full = bool(has_edges.all())
    with recorder.resume():
        for name, value in reduce(RecordedNodes(graph, recorder, messages)).items():
            if not isinstance(value, Tensor):
                raise CaptureError(
                    f"{_place_of(reduce)}: '{name}' is a {type(value).__name__}, not a value for each destination"
                )
            mask = has_edges.to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))
            graph.dstdata[name] = value if is_full else value * mask


def messages_of(recorder: Recorder, graph: Any, message: Any) -> dict[str, Tensor]:
    """Return what a Python message function makes of all edges, recorded."""
    with recorder.resume():
        found = message(RecordedEdges(graph, recorder))
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (recorder.adjacency.num_edges,):
            raise CaptureError(f"{_place_of(message)}: the message '{name}' is no value for each edge")
        recorder.fix(value, "edge")
    return dict(found)


def is_builtin(function: Any) -> bool:
    """Whether a function is one of DGL's own."""
    builtin: bool = isinstance(function, import_dgl().function.base.BuiltinFunction)
    return builtin


def _place_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else where()
