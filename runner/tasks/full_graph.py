"""A model on one whole graph: strategies are prepared for it, verified against its baseline, and given batches of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import UserError, VerificationError
from runner.gnn.batches import FullGraph, to_dgl
from runner.gnn.capture import capture
from runner.gnn.data.graph_data import GraphData, Split
from runner.gnn.dgl_compat import has_cuda
from runner.gnn.library_kernels import csr_dgl
from runner.kernels.adjacency import Adjacency
from runner.kernels.auto import Auto, PreparedAuto
from runner.kernels.density.strategy import DensityAdaptive, PreparedDensity
from runner.kernels.fused.adaptive import FusedAdaptive
from runner.kernels.fused.strategy import Fused
from runner.kernels.lower import Executable
from runner.kernels.native import Native
from runner.kernels.opgraph import OpGraph
from runner.kernels.seeds import seeded_dropouts
from runner.kernels.strategy import Baseline, Prepared, PreparedModule, Program, Strategy
from runner.kernels.verify import (
    Agreement,
    Answer,
    answer,
    answer_in_fp64,
    evaluation,
    first_difference,
    other_weights,
    relative_difference,
    require,
    tolerances,
    worse_of,
)
from runner.progress import Bar
from runner.schema import STRATEGIES, Config, KernelConfig
from runner.tasks.context import Context, fresh_module
from runner.tasks.decomposition_figure import draw

_VERIFY_SEED = 20_231_130  # any: baseline and strategy get the same


def make_strategy(
    name: str,
    kernel: KernelConfig,
    replay: Sequence[dict[str, Any]] = (),
    on_progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Strategy:
    """Return a configured strategy.

    Args:
        name: of the strategy.
        kernel: its options.
        replay: the choices of a run that is resumed.
        on_progress: follows its partition.
        say: told of what takes a while.
    """
    if name == "baseline":
        return Baseline()
    if name == "native":
        return Native()
    if name == "fused":
        return Fused(
            num_plans=kernel.num_plans,
            trial_seconds=kernel.trial_seconds,
            min_gain=kernel.min_gain,
            without=kernel.without,
            keep_choices=kernel.keep_choices,
            replay=replay,
        )
    if name == "auto":
        kept = next((choice["strategy"] for choice in replay if "strategy" in choice), None)
        candidates = {one: make_strategy(one, kernel, replay, on_progress, say) for one in STRATEGIES if one != "auto"}
        fused, density = candidates["fused"], candidates["density_adaptive"]
        assert isinstance(fused, Fused)
        assert isinstance(density, DensityAdaptive)
        both = FusedAdaptive(fused=fused, density=density)
        return Auto(
            candidates=[*candidates.values(), both], num_trials=kernel.num_trials, min_gain=kernel.min_gain, kept=kept
        )
    return DensityAdaptive(
        partition=kernel.partition,
        block_size=kernel.block_size,
        min_intra_fraction=kernel.min_intra_fraction,
        min_gain=kernel.min_gain,
        selector=kernel.selector,
        num_trials=kernel.num_trials,
        keep_choices=kernel.keep_choices,
        matrix_units=kernel.matrix_units,
        atomics=kernel.atomics,
        picture=kernel.picture,
        replay=[choice for choice in replay if "matrix" in choice],
        on_progress=on_progress,
        on_calibration=lambda: say("compiling and measuring kernels for the cost model, once on this machine"),
    )


class FullGraphExperiment:
    """A model on one whole graph: what the strategies are prepared for, verified against and timed on.

    Args:
        config: the experiment.
        data: its graph.
        device: where it runs.
        without_dgl: baseline is the captured op graph, op by op in torch; DGL is used on the CPU only, to capture it. Default: where
            the device is one that DGL can't use.
    """

    def __init__(self, config: Config, data: GraphData, device: torch.device, without_dgl: bool | None = None) -> None:
        self.config, self.data, self.device = config, data, device
        self.without_dgl = device.type != "cpu" and not has_cuda() if without_dgl is None else without_dgl
        self.graph = to_dgl(data, torch.device("cpu") if self.without_dgl else device)
        self._twin = fresh_module(config, data, torch.device("cpu"), config.train.seed) if self.without_dgl else None
        self.module = fresh_module(config, data, device, config.train.seed)
        self.labels = data.labels.to(device)

    def reset(self, seed: int) -> None:
        """Give the module the initial weights of a seed."""
        self.module.load_state_dict(fresh_module(self.config, self.data, self.device, seed).state_dict())

    @cached_property
    def features(self) -> Tensor:
        """float32 [N, F], dense, in the graph's own order."""
        return self.data.dense_features().to(self.device)

    @cached_property
    def adjacency(self) -> Adjacency:
        return self._adjacency_on_cpu.to(self.device)

    @cached_property
    def _adjacency_on_cpu(self) -> Adjacency:
        num_nodes = self.data.num_nodes
        return Adjacency.from_edges(self.data.src, self.data.dst, num_nodes, num_nodes)

    @cached_property
    def program(self) -> Program:
        return Program(
            forward=self._run_op_graph if self.without_dgl else lambda features: self.module(self.graph, features),
            capture=self._capture,
            adjacency=lambda: self.adjacency,
            module=self.module,
            features=lambda: self.features,
            verify=self.verify,
            library_kernels=(csr_dgl,) if self.device.type == "cpu" else (),
        )

    def _run_op_graph(self, features: Tensor) -> Tensor:
        return self._op_by_op[self.module.training](features)

    @cached_property
    def _op_by_op(self) -> dict[bool, Executable]:
        return {training: Executable(self._capture(training)) for training in (True, False)}

    def _capture(self, training: bool) -> OpGraph:
        if self._twin is not None:
            return self._capture_on_cpu(self._twin.train(training))
        before = self.module.training
        self.module.train(training)
        try:
            return capture(self.module, self.graph, self.features, self.adjacency)
        finally:
            self.module.train(before)

    def _capture_on_cpu(self, twin: nn.Module) -> OpGraph:
        """Capture the module's twin there, and bind its op graph to the module where it is."""
        graph = capture(twin, self.graph, self.features.cpu(), self._adjacency_on_cpu)
        return graph.bound_to(dict([*self.module.named_parameters(), *self.module.named_buffers()]), self.adjacency)

    def source_for(self, prepared: Prepared) -> FullGraph:
        """The graph as training batches under a strategy: features, labels and split in its order of nodes."""
        split = self.data.split
        return FullGraph(
            lambda features: prepared(features, self.module.training),
            prepared.place(self.features),
            prepared.place(self.labels),
            Split(train=prepared.locate(split.train), val=prepared.locate(split.val), test=prepared.locate(split.test)),
        )

    def verify(self, prepared: Prepared) -> Agreement:
        """Compare a strategy with baseline: output, loss, every gradient and buffer, dropout on, and the output in evaluation mode;
        on the weights that the module has and on others, that the strategy hasn't seen.

        Raises:
            VerificationError: past tolerance, naming the op.
        """
        agreement = self._verify_step(prepared, _VERIFY_SEED)
        with other_weights(self.module, _VERIFY_SEED):
            agreement = worse_of(agreement, self._verify_step(prepared, _VERIFY_SEED + 1))
            self._verify_evaluation(prepared)
        return agreement

    def _verify_step(self, prepared: Prepared, seed: int) -> Agreement:
        rows = self.data.split.train

        def loss(output: Tensor) -> Tensor:
            return F.cross_entropy(output[rows], self.labels[rows])

        masks = partial(seeded_dropouts, prepared.mask_rows) if prepared.draws_by_seed else nullcontext

        def baseline() -> Tensor:
            with masks():
                return self.program.forward(self.features)

        expected = answer(self.module, baseline, loss, seed)
        placed = prepared.place(self.features)
        found = answer(self.module, lambda: prepared.restore(prepared(placed, True)), loss, seed)
        lowered = prepared.lowered()
        if lowered is None:
            captured = None if isinstance(prepared, PreparedModule) else self._capture(True)

            def exact(draw: int) -> Answer:
                return (
                    expected
                    if captured is None
                    else answer_in_fp64(captured, self.features, loss, seed, expected, draw, masks)
                )

            culprit = (
                "its second call: it keeps state" if captured is None else "a rewritten op (kernel=fused names it)"
            )
            return require(prepared.name, expected, found, exact, lambda: culprit)
        graph, executable = lowered
        return require(
            prepared.name,
            expected,
            found,
            lambda draw: answer_in_fp64(graph, self.features, loss, seed, expected, draw, masks),
            lambda: first_difference(
                graph, executable, self.features, prepared.place, prepared.restore, seed, prepared.rounding, masks
            ),
            prepared.rounding,
        )

    def _verify_evaluation(self, prepared: Prepared) -> None:
        expected = self._evaluated_by_dgl()
        placed = prepared.place(self.features)
        found = evaluation(self.module, lambda: prepared.restore(prepared(placed, False)))
        difference, allowed = relative_difference(expected, found), tolerances(prepared.rounding)[0]
        if difference > allowed:
            raise VerificationError(
                f"{prepared.name} differs from baseline in evaluation mode: output by {difference:.1e} of its largest entry "
                f"(allowed {allowed:.0e})"
            )

    def _evaluated_by_dgl(self) -> Tensor:
        """DGL's own output in evaluation mode, on the CPU where it can't use the device: baseline is held to it there as well."""
        if self._twin is None:
            return evaluation(self.module, lambda: self.module(self.graph, self.features))
        twin = self._twin
        twin.load_state_dict(self.module.state_dict())
        return evaluation(twin, lambda: twin(self.graph, self.features.cpu())).to(self.device)


def prepare_strategy(
    context: Context, experiment: FullGraphExperiment, name: str, replay: Sequence[dict[str, Any]] = ()
) -> Prepared:
    """Prepare a strategy; with ``kernel.fallback`` baseline takes the place of one that can't take the model.

    Raises:
        UserError: where the strategy can't take the model and no fallback was asked for.
    """
    kernel = context.config.kernel
    try:
        with _partition_bar(context) as on_progress:
            prepared = make_strategy(name, kernel, replay, on_progress, context.say).prepare(experiment.program)
    except UserError as error:
        if not kernel.fallback:
            raise
        context.say(f"{name}: {error}; kernel.fallback=true, so baseline runs in its place")
        prepared = Baseline().prepare(experiment.program)
    if kernel.explain:
        context.say(f"--- {prepared.name} ---\n{prepared.explain()}")
    elif isinstance(prepared, PreparedAuto):
        context.say(prepared.verdict())
    _say_what_has_no_effect(context, experiment.device, name)
    _picture(context, prepared)
    return prepared


def _say_what_has_no_effect(context: Context, device: torch.device, name: str) -> None:
    kernel = context.config.kernel
    given = [f"kernel.matrix_units={kernel.matrix_units}"] if kernel.matrix_units != "fp32" else []
    given += ["kernel.atomics=true"] if kernel.atomics else []
    if given and device.type != "cuda" and name in ("density_adaptive", "auto"):
        context.say(f"note: {' and '.join(given)} has no effect on the CPU")


def _picture(context: Context, prepared: Prepared) -> None:
    """Draw the decomposition where there is one."""
    found = prepared.winner if isinstance(prepared, PreparedAuto) else prepared
    if isinstance(found, PreparedDensity) and found.portrait is not None:
        title = f"{context.config.dataset.name}, {context.config.model.name}: communities by {context.config.kernel.partition}"
        context.sinks.image("decomposition", draw(found.portrait, title, context.path))


@contextmanager
def _partition_bar(context: Context) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears once there is progress to show."""
    with ExitStack() as stack:
        bars: list[Bar] = []

        def on_progress(_done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(Bar(context.console, "partition", total)))
            bars[0].step()

        yield on_progress
