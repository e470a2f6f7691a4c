"""What surrounds a capture: the recording graph, the doors of DGL that would pass by it, and the module's own state."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import CaptureError
from runner.gnn.capture.calls import name_of, tensors_in, where
from runner.gnn.capture.recorder import Recorder
from runner.gnn.dgl_compat import import_dgl
from runner.kernels.reference import typed_linear


def recording_graph(graph: Any, recorder: Recorder) -> Any:
    """Return a twin of the graph with frames of its own, whose computing calls go to the recorder.

    The class is made for each capture, since DGL derives graphs of the same class; a derived graph with another structure than the
    graph's or one of its relations' is not recorded, and refused if it computes on features (:func:`closed_doors`).
    """
    dgl = import_dgl()
    structure, is_one = graph._graph, len(graph.canonical_etypes) == 1
    if is_one:
        recorder.know(structure, 0)

    class RecordingGraph(dgl.DGLGraph):  # type: ignore[name-defined]
        """The graph itself, but for the calls that compute on features."""

        def update_all(
            self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
        ) -> None:
            if etype is not None and self._graph is structure and not is_one:
                self[etype].update_all(message_func, reduce_func, apply_node_func)
                return
            run = functools.partial(super().update_all, message_func, reduce_func, apply_node_func, etype)
            relation = recorder.relation_of(self._graph)
            if relation is None or recorder.is_paused:
                run()
                return
            if apply_node_func is not None:
                raise CaptureError(
                    f"{where()}: update_all with apply_node_func; apply the function to the result instead"
                )
            with recorder.pause(), recorder.on(relation):
                recorder.aggregate(self, run, message_func, reduce_func)

        def multi_update_all(self, etype_dict: Any, cross_reducer: Any, apply_node_func: Any = None) -> None:
            if self._graph is not structure or recorder.is_paused:
                super().multi_update_all(etype_dict, cross_reducer, apply_node_func)
                return
            if apply_node_func is not None or any(len(functions) > 2 for functions in etype_dict.values()):
                raise CaptureError(
                    f"{where()}: multi_update_all with apply_node_func; apply the function to the result instead"
                )
            recorder.require_edges([reduce for _, reduce in etype_dict.values()])
            for name, values in _by_name(self, etype_dict).items():
                self.ndata[name] = _across(cross_reducer, values)

        def __getitem__(self, key: Any) -> Any:
            part = super().__getitem__(key)
            if self._graph is structure and len(part.canonical_etypes) == 1:
                recorder.know(part._graph, self.get_etype_id(key) if not is_one else 0)
            return part

        def apply_edges(self, func: Any, edges: Any = dgl.base.ALL, etype: Any = None) -> None:
            if etype is not None and self._graph is structure and not is_one:
                self[etype].apply_edges(func, edges)
                return
            run = functools.partial(super().apply_edges, func, edges, etype)
            relation = recorder.relation_of(self._graph)
            if relation is None or recorder.is_paused:
                run()
                return
            if not dgl.base.is_all(edges):
                raise CaptureError(f"{where()}: apply_edges on some of the edges")
            with recorder.pause(), recorder.on(relation):
                recorder.apply_edges(self, run, func)

        def in_degrees(self, *args: Any, **kwargs: Any) -> Any:
            return self._note(super().in_degrees(*args, **kwargs))

        def out_degrees(self, *args: Any, **kwargs: Any) -> Any:
            return self._note(super().out_degrees(*args, **kwargs))

        def _note(self, degrees: Any) -> Any:
            is_known = self._graph is structure or recorder.relation_of(self._graph) is not None
            if is_known and isinstance(degrees, Tensor) and degrees.numel() == self.num_nodes():
                recorder.fix(degrees, "node")
            return degrees

    twin = graph.local_var()
    twin.__class__ = RecordingGraph
    return twin


def _by_name(graph: Any, etype_dict: Any) -> dict[str, list[Tensor]]:
    """Pass each relation's messages, in the order of the relations; return what they leave on the nodes, by its name there."""
    results: dict[str, list[Tensor]] = {}
    for etype in sorted(etype_dict, key=graph.get_etype_id):
        message, reduce = etype_dict[etype]
        part = graph[etype]
        with part.local_scope():
            before = {name: part.dstdata[name] for name in part.dstdata}
            part.update_all(message, reduce)
            made = {name: part.dstdata[name] for name in part.dstdata if part.dstdata[name] is not before.get(name)}
        for name, value in made.items():
            results.setdefault(name, []).append(value)
    return results


def _across(reducer: Any, values: list[Tensor]) -> Tensor:
    """Bring the relations' results together, in the order of the relations."""
    if callable(reducer):
        found: Tensor = reducer(values)
        return found
    match reducer:
        case "sum":
            return functools.reduce(torch.add, values)
        case "mean":
            return functools.reduce(torch.add, values) / len(values)
        case "max":
            return functools.reduce(torch.maximum, values)
        case "min":
            return functools.reduce(torch.minimum, values)
        case "stack":
            return torch.stack(values, dim=1)
    raise CaptureError(
        f"{where()}: multi_update_all with the cross reducer '{reducer}'; sum, mean, max, min, stack or a function"
    )


@contextmanager
def closed_doors(recorder: Recorder) -> Iterator[None]:
    """While capturing: ``edge_softmax`` on the graph goes to the recorder; DGL's other kernels, called directly or through a graph
    made inside forward, and custom autograd functions, are refused on live tensors instead of being baked in."""
    dgl = import_dgl()
    softmax = sys.modules["dgl.ops.edge_softmax"]
    original = softmax.edge_softmax_internal

    def edge_softmax(gidx: Any, logits: Tensor, eids: Any = dgl.base.ALL, norm_by: str = "dst") -> Tensor:
        relation = recorder.relation_of(gidx)
        if relation is None or not dgl.base.is_all(eids):
            if not recorder.is_paused and recorder.is_live([logits]):
                raise CaptureError(f"{where()}: edge_softmax on another graph, or on some of the edges")
            return original(gidx, logits, eids=eids, norm_by=norm_by)
        with recorder.pause(), recorder.on(relation):
            return recorder.edge_softmax(lambda: original(gidx, logits, norm_by=norm_by), logits, norm_by)

    def refuse(work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not recorder.is_paused and recorder.is_live(tensors_in((args, kwargs))):
                raise CaptureError(
                    f"{where()}: DGL's {name_of(work)} on features, outside update_all, apply_edges and edge_softmax of the model's graph"
                )
            with recorder.pause():
                return work(*args, **kwargs)

        return guarded

    def typed(x: Tensor, weight: Tensor, types: Tensor) -> Tensor:
        if recorder.is_paused or not recorder.is_live([x, weight]):
            with recorder.pause():
                return typed_linear(x, weight, types)
        return recorder.call(typed_linear, x, weight, types)

    def by_segment(x: Tensor, weight: Tensor, seglen_a: Tensor) -> Tensor:
        with recorder.pause():
            types = torch.repeat_interleave(torch.arange(seglen_a.numel(), device=x.device), seglen_a.to(x.device))
        recorder.fix(types, "edge")
        return typed(x, weight, types)

    apply = torch.autograd.Function.__dict__["apply"]

    def refuse_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_paused and recorder.is_live(tensors_in((args, kwargs))):
            raise CaptureError(
                f"{where()}: the autograd function '{cls.__name__}' has a backward that can't be recorded"
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        (softmax, "edge_softmax_internal", edge_softmax),
        (torch.autograd.Function, "apply", classmethod(refuse_apply)),
        (sys.modules["dgl.nn.pytorch.linear"], "gather_mm", lambda x, weight, *, idx_b: typed(x, weight, idx_b)),
        (
            sys.modules["dgl.nn.pytorch.linear"],
            "segment_mm",
            lambda x, weight, seglen_a: by_segment(x, weight, seglen_a),
        ),
        *[(sys.modules[module], name, refuse(getattr(sys.modules[module], name))) for module, name in _DOORS],
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        yield


# Every other way into DGL's kernels for features of a homogeneous graph.
_DOORS = (
    ("dgl.ops.spmm", "gspmm_internal"),
    ("dgl.ops.sddmm", "gsddmm_internal"),
    ("dgl.backend", "segment_reduce"),
    ("dgl.backend", "segment_mm"),
    ("dgl.backend", "gather_mm"),
)


@contextmanager
def untouched(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Put the module's buffers and attributes back as they were.

    Raises:
        CaptureError: where forward left a live tensor in an attribute: state between calls, which an op graph has not.
    """
    attributes = [(name, part, dict(part.__dict__)) for name, part in module.named_modules()]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    kept: list[str] = []
    try:
        yield
        kept = _live_state(attributes, buffers, recorder)
    finally:
        for _, part, before in attributes:
            part.__dict__.clear()
            part.__dict__.update(before)
        for part, held in buffers:
            part._buffers.clear()
            part._buffers.update(held)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
    if kept:
        raise CaptureError(
            f"forward keeps state between calls in '{kept[0]}', which can't be captured; a buffer that is changed in place can"
        )


def _live_state(
    attributes: list[tuple[str, nn.Module, dict[str, Any]]],
    buffers: list[tuple[nn.Module, dict[str, Tensor | None]]],
    recorder: Recorder,
) -> list[str]:
    """Names of the attributes that forward set to tensors that depend on features or weights."""
    names = [
        f"{name}.{key}" if name else key
        for name, part, before in attributes
        for key, value in part.__dict__.items()
        if value is not before.get(key) and recorder.is_live(tensors_in(value))
    ]
    return names + [
        key
        for part, held in buffers
        for key, value in part._buffers.items()
        if value is not held.get(key) and value is not None and recorder.is_live([value])
    ]
