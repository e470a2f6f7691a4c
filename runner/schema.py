"""The typed config: plain dataclasses, one for each folder of ``conf/``.

Hydra composes YAML into these types, so an unknown key or a wrong type fails while it composes. What types can't say is
declared with :func:`option` (choices, ranges) and checked by :mod:`runner.validation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runner.errors import ConfigError, suggestion

STRATEGIES = ("baseline", "native", "density_adaptive", "fused", "auto")
MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "monet", "edgeconv", "custom")
RULE_FAMILIES = ("order", "split", "fuse", "attention", "scale", "keep", "sparse", "common", "epilogue")
KERNEL_HEADS = 8  # of the ops with heads in task=kernels
KERNEL_OPS = (
    "spmm_sum",
    "spmm_mean",
    "spmm_weighted",
    "spmm_weighted_by_id",
    "spmm_per_head",
    "spmm_max",
    "spmm_min",
    "sddmm_dot",
    "edge_softmax",
    "attention_gat",
    "attention_gatv2",
    "attention_dot",
    "sparse_linear",
)
TABLE_DATASET_OPTIONS = ("root", "features", "labels", "download")  # of dataset: hold for every graph of the table
TABLE_TASKS = ("adaptgear_table", "algebra")
TABLE_MODELS = {
    "adaptgear_table": ("gcn", "sage", "gin"),
    "algebra": ("gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "monet", "edgeconv"),
}
GRAPH_MODELS = ("gcn", "gin", "custom")
SAMPLED_MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "monet", "edgeconv", "custom")


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
) -> Any:
    """Declare a config field.

    Args:
        default: the value without any config file; a list or dict is copied for each config.
        doc: what it does, in one line, units included.
        choices: the values allowed; for a list, those of its items.
        low, high: the smallest and largest number allowed.
        open_low, open_high: whether ``low`` or ``high`` itself is excluded.
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "high": high, "open_low": open_low, "open_high": open_high}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DatasetConfig:
    """Which graph, and what is done to it before a model sees it."""

    name: str = option("planted", "planted, the stem of a file in root, or one of DGL's named datasets")
    task: str = option("node", "what is classified", choices=("node", "graph"))
    root: str | None = option(
        None, "folder that is looked through for NAME.npz, .mtx, .txt, .csv, .zip before DGL is asked"
    )
    path: str | None = option(None, "one file, whatever its name")
    download: bool = option(True, "let DGL download a named dataset that no file was found for")

    num_nodes: int = option(4000, "planted: nodes", low=2, high=10**8)
    num_classes: int = option(8, "planted: classes", low=2, high=10**4)
    num_features: int = option(64, "planted: features a node", low=1, high=10**6)
    num_communities: int = option(100, "planted: communities, each of one class", low=1, high=10**7)
    mean_degree: float = option(12.0, "planted: mean degree of a node", low=0, high=10**5, open_low=True)
    intra_fraction: float = option(0.8, "planted: share of edges inside communities", low=0, high=1)
    degree_exponent: float = option(
        2.5,
        "planted: exponent of the power law of expected degrees (smaller: more skewed)",
        low=2,
        high=20,
        open_low=True,
    )
    feature_signal: float = option(
        0.15, "planted: distance of class means from 0, in standard deviations of the noise", low=0, high=100
    )
    num_graphs: int = option(
        1, "planted: graphs; above 1, graph classification with num_nodes nodes in all", low=1, high=10**6
    )
    seed: int = option(0, "planted, and random features: seed", low=0, high=2**31 - 1)

    ids: str = option("auto", "edge lists: how node ids are read", choices=("auto", "number", "text"))
    undirected: bool = option(False, "add the reverse of each edge where it is missing")
    merge_duplicates: bool = option(False, "merge edges with the same ends; weights are summed")
    self_loops: str = option(
        "keep", "self loops: as stored, added where missing, or removed", choices=("keep", "add", "remove")
    )
    normalize: str = option(
        "none",
        "features: rows divided by their sum, or columns to mean 0 and deviation 1",
        choices=("none", "row", "standard"),
    )
    features: str = option("given", "given | degree (one-hot in-degree) | tags (one-hot node tags) | random:WIDTH")
    labels: str = option("given", "given | degree:CLASSES (quantiles of the in-degree, for graphs without labels)")
    split: str = option("auto", "public where the file has one, else random", choices=("auto", "public", "random"))
    split_index: int = option(0, "which of a file's public splits", low=0)
    split_seed: int = option(0, "random split: seed", low=0, high=2**31 - 1)
    train_fraction: float = option(0.6, "random split: share of labelled nodes or graphs", low=0, high=1, open_low=True)
    val_fraction: float = option(0.2, "random split: share of labelled nodes or graphs", low=0, high=1)


@dataclass
class ModelConfig:
    """A DGL module. Options that a model has no use for are rejected unless they keep their default."""

    name: str = option("gcn", "architecture", choices=MODELS)
    target: str | None = option(None, "custom: my_pkg.nets:MyNet, its package listed in GEARSAIL_MODEL_PACKAGES")
    kwargs: dict[str, Any] = option({}, "custom: further keyword arguments of the class")
    num_layers: int = option(2, "message-passing layers; APPNP: linear layers before the propagation", low=1, high=128)
    hidden: int = option(16, "hidden width (GAT, GATv2: a head's channels)", low=1, high=65536)
    heads: int = option(8, "GAT, GATv2: attention heads of the hidden layers", low=1, high=256)
    out_heads: int = option(1, "GAT, GATv2: attention heads of the last layer, averaged", low=1, high=256)
    aggregator: str = option("mean", "SAGE: aggregator", choices=("mean", "pool"))
    dropout: float = option(0.5, "dropout between layers", low=0, high=1, open_high=True)
    input_dropout: float = option(0.0, "dropout on the input features", low=0, high=1, open_high=True)
    attention_dropout: float = option(0.0, "GAT, GATv2: dropout on attention weights", low=0, high=1, open_high=True)
    activation: str = option("relu", "activation between layers", choices=("relu", "elu", "leaky_relu", "tanh"))
    norm: str = option("none", "normalisation between layers", choices=("none", "batch", "layer"))
    residual: bool = option(False, "add each hidden layer's input to its output where the widths are equal")
    bias: bool = option(True, "bias of the layers")
    num_hops: int = option(2, "SGC, APPNP: propagation steps", low=1, high=1000)
    alpha: float = option(0.1, "APPNP: teleport probability", low=0, high=1)
    num_kernels: int = option(3, "MoNet: Gaussians", low=1, high=1024)
    pseudo_dim: int = option(2, "MoNet: pseudo-coordinates of an edge", low=1, high=64)
    learn_eps: bool = option(False, "GIN: learn the weight of a node's own features")
    mlp_layers: int = option(2, "GIN: linear layers in each MLP", low=1, high=16)
    readout: str = option("sum", "graph classification: readout over a graph's nodes", choices=("sum", "mean", "max"))
    edge_weight: bool = option(
        False,
        "GCN, SAGE-mean, GIN, SGC, APPNP: weight messages by the file's edge weights (GCN: DGL's, degrees unweighted)",
    )


@dataclass
class KernelConfig:
    """How message passing is computed."""

    name: str = option("baseline", "kernel strategy", choices=STRATEGIES)
    fallback: bool = option(False, "go on with baseline, and say so, where a strategy can't take the model")
    explain: bool = option(False, "print the captured op graph and what was chosen, with the times")
    partition: str = option(
        "metis",
        "density_adaptive: how communities are found; an order of the nodes instead is cut every block_size",
        choices=("metis", "label_propagation", "rcm", "degree", "none"),
    )
    block_size: int = option(64, "density_adaptive: nodes a community, on average", low=2, high=4096)
    min_intra_fraction: float = option(
        0.1, "density_adaptive: below this share of edges inside communities, no split", low=0, high=1
    )
    min_gain: float = option(
        0.03,
        "density_adaptive: other than the best single kernel, fused, auto: other than baseline, is adopted at this gain over it",
        low=0,
        high=1,
    )
    selector: str = option(
        "measured",
        "density_adaptive: what the calibrated cost model leaves is timed; the model alone decides; everything is timed",
        choices=("measured", "analytic", "exhaustive"),
    )
    num_trials: int = option(7, "density_adaptive: timed runs of each candidate kernel", low=1, high=1000)
    matrix_units: str = option(
        "fp32",
        "density_adaptive on a GPU: tf32 or bf16 lets matrix units round factors inside communities; checked to that precision",
        choices=("fp32", "tf32", "bf16"),
    )
    atomics: bool = option(
        False,
        "density_adaptive on a GPU: kernels that add atomically may be chosen; equal seeds then differ in the last bits",
    )
    num_plans: int = option(6, "fused: programs that the cost model ranks first and that are timed", low=1, high=1000)
    trial_seconds: float = option(
        2.0, "fused: seconds of timing them, two rounds at least; 0: the cost model decides", low=0, high=1e4
    )
    without: list[str] = option([], "fused: families of rules that are switched off", choices=RULE_FAMILIES)
    picture: bool = option(
        True, "density_adaptive: draw the adjacency before and after, coloured by kernel, into the run folder"
    )
    keep_choices: bool = option(
        True, "density_adaptive, fused: take what an earlier run measured for the same graph, program and machine"
    )


@dataclass
class ClusterConfig:
    """The machine that runs the job."""

    name: str = option("local", "cluster", choices=("local",))
    num_threads: int | None = option(None, "CPU threads; null: torch's default", low=1, high=4096)


@dataclass
class TrainConfig:
    """Training, shared by every task that trains."""

    epochs: int = option(200, "epochs", low=1, high=10**7)
    optimizer: str = option("adam", "optimizer", choices=("adam", "adamw", "sgd"))
    lr: float = option(0.01, "learning rate", low=0, high=1e3, open_low=True)
    weight_decay: float = option(5e-4, "L2 weight of every parameter (adamw: decoupled)", low=0, high=1e3)
    momentum: float = option(0.9, "sgd: momentum", low=0, high=1, open_high=True)
    schedule: str = option("constant", "learning-rate schedule", choices=("constant", "step", "cosine"))
    schedule_every: int = option(50, "step: epochs between decays", low=1, high=10**7)
    schedule_factor: float = option(0.5, "step: factor of each decay", low=0, high=1, open_low=True)
    patience: int = option(
        0, "stop after this many epochs without a better validation loss or metric; 0: never", low=0, high=10**7
    )
    metric: str = option("accuracy", "validation and test metric", choices=("accuracy", "macro_f1", "roc_auc"))
    select: str = option(
        "metric",
        "epoch whose weights are tested: best validation metric, lowest validation loss, or the last",
        choices=("metric", "loss", "last"),
    )
    seed: int = option(0, "seed of the first repeat; repeat k uses seed + k", low=0, high=2**31 - 1)
    repeats: int = option(1, "runs with different seeds; results as mean ± std", low=1, high=10**4)
    folds: int = option(
        0,
        "graph classification: cross-validation folds, the file's own where it has as many; 0: one split",
        low=0,
        high=1000,
    )
    sampling: str = option(
        "full", "node classification: full graph, or neighbour-sampled batches of nodes", choices=("full", "neighbor")
    )
    fanouts: list[int] = option([10, 10], "neighbor: in-neighbours sampled a layer, input side first; -1: all", low=-1)
    batch_size: int = option(128, "seed nodes (neighbor) or graphs a batch", low=1, high=10**7)
    eval_every: int = option(1, "epochs between evaluations", low=1, high=10**7)
    checkpoint_every: int = option(50, "epochs between checkpoints; 0: none", low=0, high=10**7)
    resume: str | None = option(None, "run folder whose checkpoint is continued")


@dataclass
class LoggerConfig:
    """Where results go besides the run folder."""

    name: str = option("files", "sink", choices=("files", "wandb"))
    mode: str = option("offline", "wandb: mode", choices=("offline", "online", "disabled"))
    project: str = option("gearsail", "wandb: project")
    entity: str | None = option(None, "wandb: entity; null: the login's default")
    group: str | None = option(None, "wandb: group; null: the sweep's or run's name")
    job_type: str | None = option(None, "wandb: job type; null: the task's name")
    tags: list[str] = option([], "wandb: tags")
    timeout_s: float = option(
        20.0, "wandb: longest wait for the server, in s, before the run goes offline", low=1, high=600
    )


@dataclass
class TaskConfig:
    """What is done with the experiment."""

    name: str = option("train", "task", choices=("train", "benchmark", "kernels", *TABLE_TASKS))
    compare: list[str] = option(
        ["baseline", "density_adaptive"], "benchmark: strategies; baseline is always the reference", choices=STRATEGIES
    )
    num_warmup: int = option(
        5, "benchmark, adaptgear_table, algebra: untimed steps of each strategy", low=0, high=10**5
    )
    num_steps: int = option(
        40, "benchmark, adaptgear_table, algebra: timed steps of each strategy, interleaved", low=3, high=10**6
    )
    step_seconds: float = option(
        10.0,
        "adaptgear_table, algebra: no further round of a row's steps after so many s, but three at least",
        low=0,
        high=1e5,
    )
    datasets: dict[str, DatasetConfig] = option(
        {}, "adaptgear_table, algebra: its graphs; +dataset@task.datasets.NAME=CHOICE adds one"
    )
    models: list[str] = option(["gcn:2x16", "gin:5x64"], "adaptgear_table, algebra: models, as NAME:LAYERSxHIDDEN")
    peers: list[str] = option(
        ["pyg", "pyg_compiled"],
        "adaptgear_table, algebra: PyG's own models to compare with",
        choices=("pyg", "pyg_compiled"),
    )
    ablate: bool = option(False, "algebra: also without each family of rules in turn")
    exhaustive: bool = option(False, "algebra: also time every program, and say what the cost model's choice loses")
    resume: str | None = option(None, "adaptgear_table, algebra: run folder whose finished rows are taken over")
    ops: list[str] = option([], "kernels: ops; empty: all", choices=KERNEL_OPS)
    graphs: list[str] = option(
        [],
        "kernels: planted_small, planted_large, stems of files in dataset.root; adaptgear_table, algebra: of its datasets; empty: all",
    )
    num_features: list[int] = option(
        [16, 32, 64, 128, 256], "kernels: widths; a multiple of 8 (heads) for ops with heads", low=1, high=65536
    )
    dtypes: list[str] = option(["float32"], "kernels: dtypes", choices=("float32", "float64", "bfloat16"))
    num_rounds: int = option(11, "kernels: timed calls of each library, in turns", low=3, high=10**5)
    case_seconds: float = option(
        1.0, "kernels, adaptgear_table: no further round of a case after so many s, but three at least", low=0, high=1e5
    )


@dataclass
class Config:
    """One experiment."""

    name: str = option("train", "names the folder of its runs, outputs/NAME")
    device: str = option(
        "auto", "auto: a GPU where torch sees one and the task can use it", choices=("auto", "cpu", "cuda")
    )
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted name, field, value) of every leaf of a config."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, value


def option_names(prefix: str = "") -> list[str]:
    """Return the dotted names of all options below ``prefix`` ("" for all, "train" for one group)."""
    names = [name for name, _, _ in walk(Config())]
    return [name for name in names if name.startswith(f"{prefix}.")] if prefix else names


def parse_sized(name: str, value: str, plain: tuple[str, ...], sized: str) -> tuple[str, int]:
    """Split an option of the form ``word`` or ``word:COUNT``; the count of a plain word is 0.

    Raises:
        ConfigError: for anything else.
    """
    word, colon, count = value.partition(":")
    if value in plain:
        return value, 0
    if word == sized and colon and count.isdecimal() and 1 <= len(count.lstrip("0")) <= 7:
        return word, int(count)
    allowed = (*plain, f"{sized}:COUNT")
    raise ConfigError(f"{name}={value}: {suggestion(word, allowed)}")


def parse_model(value: str, task: str) -> tuple[str, int, int]:
    """Split ``NAME:LAYERSxHIDDEN`` into the model's name, its number of layers and its hidden width; ``task`` says which it can have.

    Raises:
        ConfigError: for anything else.
    """
    name, _, size = value.partition(":")
    layers, _, hidden = size.partition("x")
    if name not in TABLE_MODELS[task]:
        raise ConfigError(
            f"task.models={value}: {suggestion(value, [f'{known}:2x16' for known in TABLE_MODELS[task]])}"
        )
    if not all(part.isdecimal() and 1 <= len(part) <= 5 and int(part) >= 1 for part in (layers, hidden)):
        raise ConfigError(f"task.models={value}: must be NAME:LAYERSxHIDDEN, such as {name}:2x16")
    return name, int(layers), int(hidden)


def used_strategies(config: Config) -> list[str]:
    """Return the strategies that a task runs: those compared, or the one of ``kernel``."""
    if config.task.name == "adaptgear_table":
        return ["baseline", "native", "density_adaptive"]
    if config.task.name == "algebra":
        return ["baseline", "fused", "auto"]
    return list(config.task.compare) if config.task.name == "benchmark" else [config.kernel.name]
