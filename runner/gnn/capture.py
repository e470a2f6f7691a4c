"""DGL module → op graph: the module's forward runs once, for real, while every torch call and every message passing is recorded.

Values that depend on neither features nor parameters (degrees and what is computed from them) are constants of the op graph,
held in the graph's own order. All else becomes an op. What can't be recorded raises a CaptureError that names it; nothing
is baked in silently: a tensor that depends on the features and was made out of sight still carries its gradient history,
and is refused by that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.errors import CaptureError
from runner.gnn.dgl_compat import import_dgl
from runner.kernels.adjacency import Adjacency
from runner.kernels.lower import is_dropout
from runner.kernels.opgraph import (
    Aggregate,
    Call,
    EdgeApply,
    EdgeSoftmax,
    Op,
    Operand,
    OpGraph,
    Ref,
    Space,
    Target,
    Value,
    inputs_of,
)

_TARGETS: tuple[Target, ...] = ("u", "v", "e")
# Calls that turn a tensor's values into Python values: on features, a branch that an op graph can't hold.
_READS_VALUES = frozenset(
    getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
)
_RANDOM = frozenset(
    (
        torch.rand,
        torch.randn,
        torch.randint,
        torch.rand_like,
        torch.randn_like,
        torch.bernoulli,
        Tensor.bernoulli_,
        Tensor.uniform_,
        Tensor.normal_,
        torch.normal,
        torch.randperm,
        torch.nn.functional.alpha_dropout,
        torch.nn.functional.feature_alpha_dropout,
        torch.nn.functional.dropout1d,
        torch.nn.functional.dropout2d,
    )
)

# Calls that take a tensor only for its shape, dtype or device: all of it, or every argument after the first.
_READS_SHAPE = frozenset(
    (
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.full_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_empty,
        Tensor.new_tensor,
    )
)
_READS_SHAPE_OF_OTHERS = frozenset((Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as))


def capture(module: nn.Module, graph: Any, features: Tensor, adjacency: Adjacency) -> OpGraph:
    """Record ``module(graph, features)`` in the module's present mode (train or eval).

    The module's parameters and buffers and the global random state are left as they were.

    Args:
        module: any module made of torch calls, ``update_all`` / ``apply_edges`` with DGL's built-in functions, and ``edge_softmax``.
        graph: a homogeneous DGLGraph.
        features: float [N, F]; the values matter only to code that fails on some of them.
        adjacency: the same graph, edge ids as in ``graph``.

    Raises:
        CaptureError: for what can't be recorded, with its place in the code.
    """
    if graph.is_block or len(graph.canonical_etypes) != 1:
        raise CaptureError(
            "only a homogeneous graph can be captured, not a sampled block or one with several edge types"
        )
    recorder = _Recorder(module, graph, features, adjacency)
    saved = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), recorder.patched(), recorder:
            output = module(recorder.graph, recorder.features)
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])
    return recorder.finish(output)


class _Recorder(TorchFunctionMode):
    """Knows of each tensor which value it is. Tensors are kept alive, so that an id means one tensor throughout."""

    def __init__(self, module: nn.Module, graph: Any, features: Tensor, adjacency: Adjacency) -> None:
        super().__init__()
        self._paused = False
        self._alive: list[Tensor] = []
        self._live: dict[int, Ref] = {}  # by id(tensor): depends on features, parameters, buffers or a random draw
        self._fixed: dict[int, Space] = {}  # by id(tensor): depends on the graph only
        self._constant_refs: dict[int, Ref] = {}
        # a gradient history on the features is what gives away a tensor that was made from them out of sight
        self.features = features.detach().clone().requires_grad_(True)
        self._ops = OpGraph(adjacency, [], Ref(0), {}, {})
        self._track(self.features, "node", "features")
        for name, leaf in [*module.named_parameters(), *module.named_buffers()]:
            self._ops.leaves[self._track(leaf, "dense", name).index] = leaf
        self.graph = _recording_graph(graph, self)
        frames: tuple[tuple[Any, Space], ...] = ((graph.ndata, "node"), (graph.edata, "edge"))
        for frame, space in frames:
            for key in frame:
                self._fix(frame[key], space)

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _track(self, tensor: Tensor, space: Space, name: str = "") -> Ref:
        ref = Ref(len(self._ops.values))
        self._ops.values.append(Value(space, tuple(tensor.shape), tensor.dtype, name))
        self._live[id(tensor)] = ref
        self._fixed.pop(id(tensor), None)
        self._alive.append(tensor)
        return ref

    def _fix(self, tensor: Tensor, space: Space) -> None:
        if id(tensor) not in self._live:
            self._fixed[id(tensor)] = space
            self._alive.append(tensor)

    def _ref(self, tensor: Tensor) -> Ref:
        """The value that a tensor is; a tensor never seen before is a constant, unless it has a gradient history."""
        known = self._live.get(id(tensor)) or self._constant_refs.get(id(tensor))
        if known is not None:
            return known
        if tensor.grad_fn is not None:
            raise self._out_of_sight(tensor)
        ref = Ref(len(self._ops.values))
        self._ops.values.append(Value(self._fixed.get(id(tensor), "dense"), tuple(tensor.shape), tensor.dtype))
        self._ops.constants[ref.index] = tensor.detach()
        self._constant_refs[id(tensor)] = ref
        self._alive.append(tensor)
        return ref

    def _is_live(self, tensors: list[Tensor]) -> bool:
        return any(id(tensor) in self._live or tensor.grad_fn is not None for tensor in tensors)

    def _out_of_sight(self, tensor: Tensor) -> CaptureError:
        return CaptureError(
            f"{_where()}: uses a tensor of shape {list(tensor.shape)} that was computed from features or weights where it can't be "
            "recorded (message passing on a graph made inside forward, or a custom autograd function)"
        )

    def _space_of(self, tensor: Tensor) -> Space:
        ref = self._live.get(id(tensor))
        return self._ops.values[ref.index].space if ref is not None else self._fixed.get(id(tensor), "dense")

    def _space_after(self, result: Tensor, tensors: list[Tensor]) -> Space:
        """Rows stay rows: a result is in a space if an input was and it still has as many rows."""
        spaces = {self._space_of(tensor) for tensor in tensors}
        rows = result.shape[0] if result.dim() else -1
        if "node" in spaces and rows == self._ops.adjacency.num_dst:
            return "node"
        return "edge" if "edge" in spaces and rows == self._ops.adjacency.num_edges else "dense"

    def _add(self, results: list[Tensor], spaces: list[Space], make: Callable[[tuple[Ref, ...]], Op]) -> None:
        outputs = tuple(self._track(result, space) for result, space in zip(results, spaces, strict=True))
        self._ops.ops.append(make(outputs))

    # --- torch calls -------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        refs = self._refs_before(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        outputs = list(_tensors(result))
        if refs is None:
            for output in outputs:
                self._fix(output, self._space_after(output, tensors))
        elif outputs:
            if not isinstance(result, Tensor) and len(outputs) != len(result):
                raise CaptureError(f"{_where()}: {_name(func)} returns tensors inside other containers")
            where, spaces = _where(), [self._space_after(output, tensors) for output in outputs]
            self._add(outputs, spaces, lambda made: Call(made, func, refs[0], refs[1], where))
        return result

    def _refs_before(
        self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Any, Any] | None:
        """The arguments with Refs in the place of tensors, or None for a call that only touches constants."""
        if func in _RANDOM:
            raise CaptureError(
                f"{_where()}: {_name(func)} draws random numbers; of random calls only dropout can be captured"
            )
        draws = is_dropout(Call((), func, args, kwargs, ""))
        read = [] if func in _READS_SHAPE else tensors[:1] if func in _READS_SHAPE_OF_OTHERS else tensors
        if not draws and not self._is_live(read):
            return None
        if func in _READS_VALUES:
            raise CaptureError(
                f"{_where()}: {_name(func)} reads the values of a tensor that depends on features or weights; "
                "a branch on them can't be captured"
            )
        replaced = _replace((args, kwargs), self._ref)
        return replaced[0], replaced[1]

    # --- message passing ---------------------------------------------------------------------------------------------

    def aggregate(self, graph: Any, run: Callable[[], None], message: Any, reduce: Any) -> None:
        """Record ``update_all``; ``run`` is DGL's own. Like the next two, called with recording paused."""
        if not (_is_builtin(message) and _is_builtin(reduce)):
            self._run_user_function(graph, run, message if not _is_builtin(message) else reduce)
            return
        operation, tensors, targets = _message_parts(graph, message)
        run()
        result = graph.dstdata[reduce.out_field]
        self._record_message(
            tensors,
            targets,
            result,
            "node",
            lambda made, operands, where: Aggregate(made, operation, operands, reduce.name, where),
        )

    def apply_edges(self, graph: Any, run: Callable[[], None], message: Any) -> None:
        """Record ``apply_edges``; ``run`` is DGL's own."""
        if not _is_builtin(message):
            self._run_user_function(graph, run, message)
            return
        operation, tensors, targets = _message_parts(graph, message)
        run()
        result = graph.edata[message.out_field]
        self._record_message(
            tensors, targets, result, "edge", lambda made, operands, where: EdgeApply(made, operation, operands, where)
        )

    def edge_softmax(self, run: Callable[[], Tensor], logits: Tensor, norm_by: str) -> Tensor:
        """Record ``edge_softmax``; ``run`` is DGL's own."""
        result = run()
        if not self._is_live([logits]):
            self._fix(result, "edge")
            return result
        ref, where = self._ref(logits), _where()
        self._add([result], ["edge"], lambda made: EdgeSoftmax(made, ref, norm_by, where))
        return result

    def _record_message(
        self,
        tensors: list[Tensor],
        targets: list[Target],
        result: Tensor,
        space: Space,
        make: Callable[[tuple[Ref, ...], tuple[Operand, ...], str], Op],
    ) -> None:
        for tensor, target in zip(tensors, targets, strict=True):
            if id(tensor) not in self._fixed and tensor.grad_fn is None:
                self._fix(tensor, "edge" if target == "e" else "node")
        if not self._is_live(tensors):
            self._fix(result, space)
            return
        operands = tuple(Operand(self._ref(tensor), target) for tensor, target in zip(tensors, targets, strict=True))
        where = _where()
        self._add([result], [space], lambda made: make(made, operands, where))

    def _run_user_function(self, graph: Any, run: Callable[[], None], function: Any) -> None:
        """A Python function over edges is opaque. On constants (DGL's edge normalisation) it runs as it is; on features it is refused."""
        frames: tuple[tuple[Any, Space], ...] = (
            (graph.srcdata, "node"),
            (graph.dstdata, "node"),
            (graph.edata, "edge"),
        )
        if self._is_live([frame[key] for frame, _ in frames for key in frame]):
            code = getattr(function, "__code__", None)
            place = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else _where()
            raise CaptureError(
                f"{place}: message passing with the Python function '{getattr(function, '__name__', function)}'; "
                "use DGL's built-in functions (dgl.function), or kernel=baseline"
            )
        run()
        for frame, space in frames:
            for key in frame:
                self._fix(frame[key], space)

    def degrees(self, degrees: Tensor) -> Tensor:
        """Note that DGL's answer to a degree query has one row a node."""
        self._fix(degrees, "node")
        return degrees

    # --- begin and end -----------------------------------------------------------------------------------------------

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let DGL's own torch calls pass unrecorded."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Route ``edge_softmax``, which DGL's modules import by name, through the recorder while capturing."""
        import_dgl()
        module = sys.modules["dgl.ops.edge_softmax"]
        original = module.edge_softmax_internal

        def recorded(gidx: Any, logits: Tensor, eids: Any = None, norm_by: str = "dst") -> Tensor:
            extra = {} if eids is None else {"eids": eids}
            with self.pause():
                return self.edge_softmax(lambda: original(gidx, logits, norm_by=norm_by, **extra), logits, norm_by)

        module.edge_softmax_internal = recorded  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.edge_softmax_internal = original  # type: ignore[attr-defined]

    def finish(self, output: Any) -> OpGraph:
        """Close the op graph: ops that the output does not need are dropped, except those that update a buffer."""
        if isinstance(output, Tensor) and id(output) not in self._live and output.grad_fn is not None:
            raise self._out_of_sight(output)
        if not isinstance(output, Tensor) or id(output) not in self._live:
            raise CaptureError(
                "forward must return one tensor that depends on the features or weights, "
                f"it returned {type(output).__name__}"
            )
        graph = self._ops
        needed, kept = {self._live[id(output)].index}, []
        for op in reversed(graph.ops):
            if any(ref.index in needed for ref in op.outputs) or _changes_buffer(op, graph):
                needed.update(ref.index for ref in inputs_of(op))
                kept.append(op)
        return OpGraph(
            graph.adjacency,
            graph.values,
            graph.features,
            {index: leaf for index, leaf in graph.leaves.items() if index in needed},
            {index: tensor for index, tensor in graph.constants.items() if index in needed},
            kept[::-1],
            self._live[id(output)],
        )


def _changes_buffer(op: Op, graph: OpGraph) -> bool:
    """Batch norm and in-place calls on buffers count, whoever reads their result."""
    in_place = isinstance(op, Call) and op.label.endswith("_") and not op.label.endswith("__")
    return in_place and any(ref.index in graph.leaves for ref in inputs_of(op))


def _is_builtin(function: Any) -> bool:
    builtin: bool = isinstance(function, import_dgl().function.base.BuiltinFunction)
    return builtin


def _message_parts(graph: Any, message: Any) -> tuple[str, list[Tensor], list[Target]]:
    """Return a built-in message function's operation, the tensors it reads and where."""
    frames = (graph.srcdata, graph.dstdata, graph.edata)
    if hasattr(message, "binary_op"):
        sides = ((message.lhs, message.lhs_field), (message.rhs, message.rhs_field))
        return (
            message.binary_op,
            [frames[target][name] for target, name in sides],
            [_TARGETS[target] for target, _ in sides],
        )
    return "copy", [frames[message.target][message.in_field]], [_TARGETS[message.target]]


def _recording_graph(graph: Any, recorder: _Recorder) -> Any:
    """A twin of the graph with frames of its own. The class is made for each capture, since DGL derives graphs of the same class."""
    dgl = import_dgl()

    class RecordingGraph(dgl.DGLGraph):  # type: ignore[name-defined]
        """The graph itself, but for the calls that compute on features."""

        def update_all(
            self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
        ) -> None:
            if apply_node_func is not None:
                raise CaptureError(
                    f"{_where()}: update_all with apply_node_func; apply the function to the result instead"
                )
            run = functools.partial(super().update_all, message_func, reduce_func, etype=etype)
            with recorder.pause():
                recorder.aggregate(self, run, message_func, reduce_func)

        def apply_edges(self, func: Any, edges: Any = dgl.base.ALL, etype: Any = None) -> None:
            if not dgl.base.is_all(edges):
                raise CaptureError(f"{_where()}: apply_edges on some of the edges")
            run = functools.partial(super().apply_edges, func, etype=etype)
            with recorder.pause():
                recorder.apply_edges(self, run, func)

        def in_degrees(self, *args: Any, **kwargs: Any) -> Any:
            return recorder.degrees(super().in_degrees(*args, **kwargs))

        def out_degrees(self, *args: Any, **kwargs: Any) -> Any:
            return recorder.degrees(super().out_degrees(*args, **kwargs))

    twin = graph.local_var()
    twin.__class__ = RecordingGraph
    return twin


def _tensors(structure: Any) -> Iterator[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, list | tuple):
        for entry in structure:
            yield from _tensors(entry)
    elif isinstance(structure, dict):
        yield from _tensors(list(structure.values()))


def _replace(structure: Any, ref: Callable[[Tensor], Ref]) -> Any:
    if isinstance(structure, Tensor):
        return ref(structure)
    if isinstance(structure, torch.Size):
        return structure
    if isinstance(structure, tuple):
        return tuple(_replace(entry, ref) for entry in structure)
    if isinstance(structure, list):
        return [_replace(entry, ref) for entry in structure]
    if isinstance(structure, dict):
        return {key: _replace(entry, ref) for key, entry in structure.items()}
    return structure


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function))


def _where() -> str:
    """``file.py:line`` of the model's code that is running: the innermost frame outside torch, DGL's core and this module."""
    frame = sys._getframe(1)
    skipped = (str(Path(torch.__file__).parent), __file__, str(Path(import_dgl().__file__ or "").parent))
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(skipped) or f"{skipped[2]}/nn/" in name:
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
