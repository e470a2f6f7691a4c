"""Generated kernels: each function and shape against plain torch in fp64, output and gradients; CUDA's compiled and emulated."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import check
from emulation import emulated
from graphs import WEIRD, adjacency, random_edges
from rewriting import dgl, fn, programs
from torch import Tensor, nn

from runner.gnn.capture import capture
from runner.kernels.adjacency import Adjacency
from runner.kernels.cuda import library
from runner.kernels.generate import on_cpu, on_cuda
from runner.kernels.generate.description import Description
from runner.kernels.generate.expressions import MAPS
from runner.kernels.generate.op import EdgeReduce
from runner.kernels.generate.run import EdgeKernel

GRAPHS = {name: adjacency(edges) for name, edges in WEIRD.items()}
GRAPHS["17 nodes, int64"] = Adjacency.from_edges(*random_edges(17, 80)[:2], 17, 17, torch.int64)
GRAPHS["long rows"] = adjacency((torch.arange(900) % 7, torch.arange(900) % 3, 7))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": lambda x: nn.functional.leaky_relu(x, 0.2),
    "elu": nn.functional.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
    "exp": torch.exp,
    "sqrt": lambda x: torch.sqrt(x * x + 1),
    "square": torch.square,
    "neg": torch.neg,
    "scale": lambda x: x * 0.7,
    "shift": lambda x: x + 0.3,
}


class Wide(nn.Module):
    """``sum of f(a_j + b_i) · c_j``, one value a channel, and an edge value from a layer of its own."""

    def __init__(self, width: int, function: Callable[[Tensor], Tensor], reduce: Any = fn.sum) -> None:
        super().__init__()
        self.a, self.b, self.c, self.e = (
            nn.Linear(4, width),
            nn.Linear(4, width),
            nn.Linear(4, width),
            nn.Linear(3, width),
        )
        self.gate, self.function, self.reduce = nn.Parameter(torch.rand(width)), function, reduce

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        edges = torch.cos(torch.arange(graph.num_edges()).unsqueeze(1) * torch.tensor([0.1, 0.5, 0.9]))
        with graph.local_scope():
            graph.ndata["a"], graph.ndata["b"], graph.ndata["c"] = self.a(x), self.b(x), self.c(x)
            graph.apply_edges(fn.u_add_v("a", "b", "s"))
            graph.edata["w"] = self.function(graph.edata["s"] * self.gate) + self.e(edges).tanh()
            graph.update_all(fn.u_mul_e("c", "w", "m"), self.reduce("m", "o"))
            return graph.ndata["o"]


class Small(nn.Module):
    """``sum over k of w_k(i, j) · h_jk``: weights of each edge from numbers of both ends, of the edge, and a small layer."""

    def __init__(self, channels: int, function: Callable[[Tensor], Tensor], reduce: Any = fn.mean) -> None:
        super().__init__()
        self.h, self.near, self.far = nn.Linear(4, 3 * channels), nn.Linear(4, 2), nn.Linear(4, 2)
        self.mix, self.centre = nn.Linear(2, 3), nn.Parameter(torch.randn(3))
        self.channels, self.function, self.reduce = channels, function, reduce

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.h(x).view(-1, 3, self.channels)
            graph.ndata["n"], graph.ndata["f"] = self.near(x), self.far(x)
            graph.apply_edges(fn.u_sub_v("f", "n", "d"))
            weight = self.function(self.mix(torch.tanh(graph.edata["d"])) - self.centre)
            graph.edata["w"] = (weight / (1.5 + weight * weight)).unsqueeze(2)
            graph.update_all(fn.u_mul_e("h", "w", "m"), self.reduce("m", "o"))
            return graph.ndata["o"].sum(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def chain_of(module: nn.Module, graph: Adjacency) -> tuple[EdgeReduce, list[tuple[int, ...]]]:
    """The generated op of a module on a graph, and the shapes of its operands."""
    src, dst = graph.src_dst
    built = dgl.graph((src, dst), num_nodes=graph.num_dst)
    found = programs(capture(module, built, torch.randn(graph.num_dst, 4), graph), training=True, count=1)[0]
    ops = [op for op in found.draft.ops if isinstance(op, EdgeReduce)]
    assert len(ops) == 1, str(found.draft.finish())
    return ops[0], [found.draft.value(slot.ref).shape for slot in ops[0].description.slots]


def compare(op: EdgeReduce, shapes: list[tuple[int, ...]], graph: Adjacency, run: Callable[..., Tensor]) -> None:
    """Hold kernels to the chain of ops that they take the place of."""
    slots = op.description.slots
    inputs = [torch.randn(shape) for shape in shapes]
    at = [number for number, slot in enumerate(slots) if slot.needs_gradient]
    held = [number for number in range(len(slots)) if number not in at]

    def filled(given: tuple[Tensor, ...]) -> list[Tensor]:
        every = dict(zip(at, given, strict=True)) | {number: inputs[number].to(given[0].dtype) for number in held}
        return [every[number] for number in range(len(slots))]

    def plain(*given: Tensor) -> Tensor:
        by_ref = {slot.ref: tensor for slot, tensor in zip(slots, filled(given), strict=True)}
        return op.plain(graph, lambda _: 0, *(by_ref[ref] for ref in op.reads()))  # type: ignore[arg-type]

    shape = plain(*(inputs[number] for number in at)).shape
    check(
        op.label, lambda *given: run(filled(given)).reshape(shape), plain, [inputs[number] for number in at], scale=8.0
    )


CASES = {
    **{f"wide {name}": lambda f=function: Wide(5, f) for name, function in FUNCTIONS.items()},
    **{f"small {name}": lambda f=function: Small(5, f) for name, function in FUNCTIONS.items()},
    **{f"wide, {width} channels": lambda w=width: Wide(w, torch.sigmoid, fn.mean) for width in (1, 2, 3, 16, 33, 128)},
    **{f"small, {width} channels": lambda w=width: Small(w, torch.exp, fn.sum) for width in (2, 3, 16, 33, 128)},
}


def test_every_function_is_tried() -> None:
    assert set(FUNCTIONS) == set(MAPS)


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_ops_that_they_replace(case: str) -> None:
    graph = GRAPHS["random directed"]
    op, shapes = chain_of(CASES[case](), graph)
    kernel = EdgeKernel(op.description, graph)
    compare(op, shapes, graph, kernel)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "one node, no edge"])
@pytest.mark.parametrize("case", ["wide sigmoid", "small exp", "small, 33 channels"])
def test_weird_graphs(case: str, name: str) -> None:
    graph = GRAPHS[name]
    if not graph.num_edges:
        pytest.skip("DGL's own message functions fail on a graph without edges")
    op, shapes = chain_of(CASES[case](), graph)
    compare(op, shapes, graph, EdgeKernel(op.description, graph))


def test_no_edges_give_zeros() -> None:
    op, shapes = chain_of(CASES["small exp"](), GRAPHS["random directed"])
    graph = GRAPHS["no edges"]
    operands = [torch.randn(5 if slot.target in "uv" else 0 if slot.target == "e" else shape[0], *shape[1:], requires_grad=True)
                for slot, shape in zip(op.description.slots, shapes, strict=True)]  # fmt: skip
    out = EdgeKernel(op.description, graph)(operands)
    assert not out.any()
    gradients = torch.autograd.grad(out.sum(), operands, allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize(
    "case", ["wide elu", "wide softplus", "small tanh", "small, 33 channels", "wide, 1 channels", "wide, 33 channels"]
)
def test_cuda_by_emulation(case: str, side: str, built: Path) -> None:
    for name in ("random directed", "hub", "17 nodes, int64", "isolated nodes"):
        graph = GRAPHS[name]
        op, shapes = chain_of(CASES[case](), graph)
        with emulated(built, guard=side) as guarded:
            kernel = Emulated(op.description, graph, guarded)
            compare(op, shapes, graph, kernel)


class Emulated(EdgeKernel):
    """The CUDA kernels on tensors between guard pages."""

    def __init__(self, description: Description, graph: Adjacency, guarded: Callable[[Tensor], Tensor]) -> None:
        super().__init__(description, graph)
        self._backend, self._source, self._guarded = on_cuda, on_cuda.source(description), guarded

    def __call__(self, operands: Any) -> Tensor:
        return _Emulated.apply(self, *operands)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Emulated, *operands: Tensor) -> Tensor:
        ctx.kernel, ctx.operands = kernel, [kernel._guarded(operand.detach().contiguous()) for operand in operands]
        return kernel.forward(ctx.operands).clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return None, *ctx.kernel.backward(ctx.operands, ctx.kernel._guarded(upstream.contiguous()))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy (extra cuda13) is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_cuda_compiles(architecture: str) -> None:
    for number, case in enumerate(CASES):
        op, _ = chain_of(CASES[case](), GRAPHS["random directed"])
        storage, index = [("float", "int"), ("double", "int64"), ("bf16", "int")][number % 3]
        defines: dict[str, str | int] = {"STORAGE": storage, "INDEX": index, "GROUP": 2 ** (number % 6), "VEC": 1}
        assert library.compile_for("generated", defines, architecture, on_cuda.source(op.description))[:4] == b"\x7fELF"


def test_a_mutation_is_caught() -> None:
    """A kernel with another function in one place: the comparison sees it."""
    graph = GRAPHS["random directed"]
    op, shapes = chain_of(CASES["small exp"](), graph)
    kernel = EdgeKernel(op.description, graph)
    turned = kernel._source.replace("exp_of<", "sigmoid_of<", 1)
    assert turned != kernel._source
    kernel._source = turned
    with pytest.raises(AssertionError, match="is off by"):
        compare(op, shapes, graph, kernel)


def test_sources_are_the_same_from_run_to_run() -> None:
    """The cache of built kernels goes by the text."""
    graph = GRAPHS["random directed"]
    first, second = (on_cpu.source(chain_of(CASES["wide elu"](), graph)[0].description) for _ in range(2))
    assert first == second
