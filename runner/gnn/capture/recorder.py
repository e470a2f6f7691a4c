"""The recorder: it sees each torch call and each message passing of a forward that really runs, and writes it down as an op.

A tensor is *live* when it depends on features, parameters, buffers or a random draw; *fixed* when it depends on the graph only.
Calls on live tensors become ops; fixed tensors become constants, held in the graph's own order of nodes and edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.errors import CaptureError
from runner.gnn.capture import calls
from runner.gnn.capture.calls import name_of, tensors_in, where
from runner.gnn.capture.functions import Mailbox, aggregate_by_functions, is_builtin, messages_of
from runner.kernels import reference
from runner.kernels.adjacency import Adjacency
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
    replace_leaves,
)
from runner.kernels.seeds import is_dropout

_TARGETS: tuple[Target, ...] = ("u", "v", "e")


class Recorder(TorchFunctionMode):
    """Knows of each tensor which value it is. Tensors are kept alive, so that an id means one tensor throughout."""

    def __init__(self, module: nn.Module, graph: Any, features: Tensor, relations: tuple[Adjacency, ...]) -> None:
        super().__init__()
        self._paused = False
        self._alive: list[Tensor] = []
        self._live: dict[int, Ref] = {}  # by id(tensor)
        self._fixed: dict[int, Space] = {}  # by id(tensor)
        self._constant_refs: dict[int, Ref] = {}
        # a gradient history on the features is what gives away a tensor that was made from them out of sight
        self.features = features.detach().clone().requires_grad_(True)
        self._relations, self._relation = relations, 0
        self._structures: dict[int, tuple[Any, int]] = {}  # by id(structure): it, and its relation
        self._ops = OpGraph(relations[0], [], Ref(0), {}, {}, relations=relations if len(relations) > 1 else ())
        self._track(self.features, "node", "features")
        for name, leaf in [*module.named_parameters(), *module.named_buffers()]:
            self._ops.leaves[self._track(leaf, "dense", name).index] = leaf
        self._leaf_ids = {id(leaf) for leaf in self._ops.leaves.values()}
        spaces: list[tuple[Any, Space]] = [(graph.ndata, "node")]
        spaces += [(graph.edges[etype].data, "edge") for etype in graph.canonical_etypes]
        for frame, space in spaces:
            for key in frame:
                self.fix(frame[key], space)

    # --- relations ---------------------------------------------------------------------------------------------------

    @property
    def adjacency(self) -> Adjacency:
        """The graph that messages are passed on now."""
        return self._relations[self._relation]

    def know(self, structure: Any, relation: int) -> None:
        """Note that one of DGL's structures is a relation's; it is kept, so that its id means it throughout."""
        self._structures[id(structure)] = (structure, relation)

    def relation_of(self, structure: Any) -> int | None:
        """Return the relation that a structure is of, None for another graph's."""
        known = self._structures.get(id(structure))
        return None if known is None else known[1]

    def require_edges(self, reducers: list[Any]) -> None:
        """Refuse what DGL reduces in a way of its own: across relations, a maximum over no edges is infinite until the very end."""
        takes_extremum = any(getattr(reduce, "name", "") in ("max", "min") for reduce in reducers)
        if takes_extremum and any(bool((graph.in_degrees == 0).any()) for graph in self._relations):
            raise CaptureError(
                f"{where()}: multi_update_all with a maximum or minimum where a relation leaves destinations without edges"
            )

    @contextmanager
    def on(self, relation: int) -> Iterator[None]:
        """Pass messages on a relation."""
        self._relation, before = relation, self._relation
        try:
            yield
        finally:
            self._relation = before

    # --- which tensor is what ----------------------------------------------------------------------------------------

    def is_live(self, tensors: list[Tensor]) -> bool:
        """Whether any of the tensors depends on features, weights or a random draw, seen or not."""
        return any(id(tensor) in self._live or tensor.grad_fn is not None for tensor in tensors)

    def is_recorded_live(self, tensor: Tensor) -> bool:
        """Whether the tensor is a live value that was seen being made."""
        return id(tensor) in self._live

    def fix(self, tensor: Tensor, space: Space) -> None:
        """Note that a tensor depends on the graph only, and what its rows are."""
        if id(tensor) not in self._live:
            self._fixed[id(tensor)] = space
            self._alive.append(tensor)

    def _track(self, tensor: Tensor, space: Space, name: str = "") -> Ref:
        ref = Ref(len(self._ops.values))
        self._ops.values.append(Value(space, tuple(tensor.shape), tensor.dtype, name))
        self._live[id(tensor)] = ref
        self._fixed.pop(id(tensor), None)
        self._alive.append(tensor)
        return ref

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

    def _out_of_sight(self, tensor: Tensor) -> CaptureError:
        return CaptureError(
            f"{where()}: uses a tensor of shape {list(tensor.shape)} that was computed from features or weights where it can't be recorded"
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
        return "edge" if "edge" in spaces and rows in self._ops.num_edges else "dense"

    def _add(self, results: list[Tensor], spaces: list[Space], make: Callable[[tuple[Ref, ...]], Op]) -> None:
        outputs = tuple(self._track(result, space) for result, space in zip(results, spaces, strict=True))
        self._ops.ops.append(make(outputs))

    # --- torch calls -------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if any(isinstance(argument, Mailbox) for argument in args):
            with self:  # a mode is off in its own handler, and what a mailbox does is to be recorded
                return Mailbox.__torch_function__(func, types, args, kwargs)
        tensors = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        refs = self._refs_before(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        changed = [tensor for tensor, before in zip(tensors, versions, strict=True) if tensor._version != before]
        for tensor in changed:
            self._check_change(func, tensor, result, is_recorded=refs is not None)
        outputs = tensors_in(result)
        if refs is None:
            for output in outputs:
                self.fix(output, self._space_after(output, tensors))
        elif outputs:
            if not isinstance(result, Tensor) and len(outputs) != len(result):
                raise CaptureError(f"{where()}: {name_of(func)} returns tensors inside other containers")
            place, spaces = where(), [self._space_after(output, tensors) for output in outputs]
            grad = torch.is_grad_enabled()
            self._add(outputs, spaces, lambda made: Call(made, func, refs[0], refs[1], place, grad))
        return result

    def _refs_before(
        self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Any, Any] | None:
        """The arguments with Refs in the place of tensors, or None for a call that only touches constants."""
        if func in calls.RANDOM:
            raise CaptureError(
                f"{where()}: {name_of(func)} draws random numbers; of random calls only dropout can be captured"
            )
        draws = is_dropout(Call((), func, args, kwargs, ""))
        shape_only = func in calls.READS_SHAPE
        read = [] if shape_only else tensors[:1] if func in calls.READS_SHAPE_OF_OTHERS else tensors
        if not draws and not self.is_live(read):
            return None
        if func in calls.READS_VALUES:
            raise CaptureError(
                f"{where()}: {name_of(func)} reads the values of a tensor that depends on features or weights; "
                "a branch on them can't be captured"
            )
        if func in calls.SHAPES_BY_VALUES or (func is Tensor.__getitem__ and self._picks_by_live_mask(args[1])):
            raise CaptureError(
                f"{where()}: the shape of {name_of(func)}'s result depends on the values of features or weights"
            )
        replaced = replace_leaves((args, kwargs), Tensor, self._ref)
        return replaced[0], replaced[1]

    def _picks_by_live_mask(self, index: Any) -> bool:
        return any(tensor.dtype == torch.bool and self.is_live([tensor]) for tensor in tensors_in(index))

    def _check_change(self, func: Callable[..., Any], tensor: Tensor, result: Any, is_recorded: bool) -> None:
        """Refuse an in-place change that the op graph would not see: of a view, of a constant in use, of a tensor with other names."""
        if id(tensor) in self._leaf_ids and is_recorded:
            return  # a buffer: the op changes the module's own tensor again when it runs
        if is_recorded:
            allowed = id(tensor) in self._live and result is tensor and not self._has_alias(tensor)
        else:
            allowed = id(tensor) not in self._constant_refs
        if not allowed:
            raise CaptureError(
                f"{where()}: {name_of(func)} changes a tensor in place that is a view, a constant, or known under another name"
            )

    def _has_alias(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return tensor._base is not None or any(
            other is not tensor and other.layout == torch.strided and other.untyped_storage().data_ptr() == storage
            for other in self._alive
        )

    # --- message passing; called with recording paused, so that DGL's own torch calls pass ----------------------------

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let torch calls pass unrecorded."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Record again inside of a pause: a Python function that DGL would call."""
        self._paused, before = False, self._paused
        try:
            yield
        finally:
            self._paused = before

    @property
    def is_paused(self) -> bool:
        """Whether torch calls pass unrecorded."""
        return self._paused

    def aggregate(self, graph: Any, run: Callable[[], None], message: Any, reduce: Any) -> None:
        """Record ``update_all``; ``run`` is DGL's own."""
        if not (is_builtin(message) and is_builtin(reduce)):
            if self._reads_live(graph):
                aggregate_by_functions(self, graph, message, reduce)
            else:
                self._run_on_constants(graph, run)
            return
        operation, tensors, targets = _message_parts(graph, message)
        run()

        def make(made: tuple[Ref, ...], operands: tuple[Operand, ...], place: str) -> Op:
            return Aggregate(made, operation, operands, reduce.name, place, torch.is_grad_enabled(), self._relation)

        self._record_message(tensors, targets, graph.dstdata[reduce.out_field], "node", make)

    def apply_edges(self, graph: Any, run: Callable[[], None], message: Any) -> None:
        """Record ``apply_edges``; ``run`` is DGL's own."""
        if not is_builtin(message):
            if self._reads_live(graph):
                for name, value in messages_of(self, graph, message).items():
                    graph.edata[name] = value
            else:
                self._run_on_constants(graph, run)
            return
        operation, tensors, targets = _message_parts(graph, message)
        run()

        def make(made: tuple[Ref, ...], operands: tuple[Operand, ...], place: str) -> Op:
            return EdgeApply(made, operation, operands, place, torch.is_grad_enabled(), self._relation)

        self._record_message(tensors, targets, graph.edata[message.out_field], "edge", make)

    def edge_softmax(self, run: Callable[[], Tensor], logits: Tensor, norm_by: str) -> Tensor:
        """Record ``edge_softmax``; ``run`` is DGL's own."""
        result = run()
        if not self.is_live([logits]):
            self.fix(result, "edge")
            return result
        ref, place, grad = self._ref(logits), where(), torch.is_grad_enabled()
        self._add([result], ["edge"], lambda made: EdgeSoftmax(made, ref, norm_by, place, grad, self._relation))
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
                self.fix(tensor, "edge" if target == "e" else "node")
        if not self.is_live(tensors):
            self.fix(result, space)
            return
        operands = tuple(Operand(self._ref(tensor), target) for tensor, target in zip(tensors, targets, strict=True))
        place = where()
        self._add([result], [space], lambda made: make(made, operands, place))

    # --- Python functions over edges and nodes ------------------------------------------------------------------------

    def _reads_live(self, graph: Any) -> bool:
        frames = (graph.srcdata, graph.dstdata, graph.edata)
        return self.is_live([frame[key] for frame in frames for key in frame])

    def _run_on_constants(self, graph: Any, run: Callable[[], None]) -> None:
        """A function on constants only (DGL's edge normalisation) runs as it is."""
        run()
        frames: tuple[tuple[Any, Space], ...] = (
            (graph.srcdata, "node"),
            (graph.dstdata, "node"),
            (graph.edata, "edge"),
        )
        for frame, space in frames:
            for key in frame:
                self.fix(frame[key], space)

    def built_in_message(self, graph: Any, message: Any) -> Tensor:
        """The value of a built-in message function at each edge, recorded."""
        operation, tensors, targets = _message_parts(graph, message)
        sides = [
            reference.gather(self.adjacency, tensor, target) for tensor, target in zip(tensors, targets, strict=True)
        ]
        found = reference.edge_apply(operation, sides[0], sides[1] if len(sides) > 1 else None)

        def make(made: tuple[Ref, ...], operands: tuple[Operand, ...], place: str) -> Op:
            return EdgeApply(made, operation, operands, place, torch.is_grad_enabled(), self._relation)

        self._record_message(tensors, targets, found, "edge", make)
        return found

    @property
    def num_dst(self) -> int:
        """N."""
        return self._ops.adjacency.num_dst

    def degrees(self) -> Tensor:
        """float64 [N], fixed: in-degrees, 1 where there are no edges."""
        with self.pause():
            found = self.adjacency.in_degrees.clamp(min=1).double()
            self.fix(found, "node")
        return found

    def gather(self, value: Tensor, target: Target) -> Tensor:
        """Return a node value at each edge, [E, …], recorded."""

        def make(made: tuple[Ref, ...], operands: tuple[Operand, ...], place: str) -> Op:
            return EdgeApply(made, "copy", operands, place, torch.is_grad_enabled(), self._relation)

        with self.pause():
            found = reference.gather(self.adjacency, value, target)
            self._record_message([value], [target], found, "edge", make)
        return found

    def reduce(self, message: Tensor, reduce: str) -> Tensor:
        """Return an edge value reduced at each destination, [N, …], recorded."""

        def make(made: tuple[Ref, ...], operands: tuple[Operand, ...], place: str) -> Op:
            return Aggregate(made, "copy", operands, reduce, place, torch.is_grad_enabled(), self._relation)

        with self.pause():
            found = reference.aggregate(self.adjacency, message, reduce)
            self._record_message([message], ["e"], found, "node", make)
        return found

    def call(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run a function of tensors as one recorded call."""
        place, grad = where(), torch.is_grad_enabled()
        with self.pause():
            refs, result = replace_leaves(args, Tensor, self._ref), function(*args)
            space = self._space_after(result, tensors_in(args))
            self._add([result], [space], lambda made: Call(made, function, refs, {}, place, grad))
        return result

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, output: Any) -> OpGraph:
        """Close the op graph: ops that the output does not need are dropped, except those that draw numbers or update a buffer."""
        if isinstance(output, Tensor) and id(output) not in self._live and output.grad_fn is not None:
            raise self._out_of_sight(output)
        if not isinstance(output, Tensor) or id(output) not in self._live:
            raise CaptureError(
                f"forward must return one tensor that depends on the features or weights, it returned {type(output).__name__}"
            )
        graph = self._ops
        needed, kept = {self._live[id(output)].index}, []
        for op in reversed(graph.ops):
            if any(ref.index in needed for ref in op.outputs) or is_dropout(op) or self._changes_leaf(op):
                needed.update(ref.index for ref in op.reads())
                kept.append(op)
        return OpGraph(
            graph.adjacency,
            graph.values,
            graph.features,
            {index: leaf for index, leaf in graph.leaves.items() if index in needed},
            {index: tensor for index, tensor in graph.constants.items() if index in needed},
            kept[::-1],
            self._live[id(output)],
            graph.relations,
        )

    def _changes_leaf(self, op: Op) -> bool:
        """In-place calls on buffers count, whoever reads their result (batch norm's result is read anyway)."""
        return isinstance(op, Call) and op.is_in_place and any(ref.index in self._ops.leaves for ref in op.reads())


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
