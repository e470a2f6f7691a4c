"""The typed config: plain dataclasses, one for each folder of ``conf/``, and the checks that need nothing but the config.

Hydra composes YAML into these types, so an unknown key or a wrong type fails while it composes. What YAML types can't
say (choices, ranges, combinations that can't work) is said here by :func:`option` and :func:`validate`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runner.errors import ConfigError, suggestion

PLANNED_STRATEGIES = ("density_adaptive",)
STRATEGIES = ("baseline", *PLANNED_STRATEGIES)
MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "custom")
GRAPH_MODELS = ("gcn", "gin", "custom")
SAMPLED_MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "custom")


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
        "metis", "density_adaptive: how communities are found; none keeps the node order", choices=("metis", "none")
    )
    block_size: int = option(64, "density_adaptive: nodes a community, on average", low=2, high=4096)
    min_intra_fraction: float = option(
        0.1, "density_adaptive: below this share of edges inside communities, no split", low=0, high=1
    )
    min_gain: float = option(
        0.03, "density_adaptive: a split is adopted at this gain over the best single kernel", low=0, high=1
    )
    num_trials: int = option(7, "density_adaptive: timed runs of each candidate kernel", low=1, high=1000)


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

    name: str = option("train", "task", choices=("train", "benchmark"))
    compare: list[str] = option(
        ["baseline", "density_adaptive"], "benchmark: strategies; baseline is always the reference", choices=STRATEGIES
    )
    num_warmup: int = option(5, "benchmark: untimed steps of each strategy", low=0, high=10**5)
    num_steps: int = option(40, "benchmark: timed steps of each strategy, interleaved", low=3, high=10**6)


@dataclass
class Config:
    """One experiment."""

    name: str = option("train", "names the folder of its runs, outputs/NAME")
    device: str = option("auto", "auto: a GPU where torch and DGL both can use one", choices=("auto", "cpu", "cuda"))
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)


# Options that only some models read: changing one for another model would do nothing, so it is an error.
_MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "target": ("custom",),
    "kwargs": ("custom",),
    "heads": ("gat", "gatv2"),
    "out_heads": ("gat", "gatv2"),
    "attention_dropout": ("gat", "gatv2"),
    "aggregator": ("sage",),
    "num_hops": ("sgc", "appnp"),
    "alpha": ("appnp",),
    "learn_eps": ("gin",),
    "mlp_layers": ("gin",),
    "readout": GRAPH_MODELS,
    "edge_weight": ("gcn", "sage", "gin", "sgc", "appnp"),
    "num_layers": ("gcn", "sage", "gin", "gat", "gatv2", "appnp"),
    "hidden": ("gcn", "sage", "gin", "gat", "gatv2", "appnp"),
    "dropout": ("gcn", "sage", "gin", "gat", "gatv2", "appnp"),
    "norm": ("gcn", "sage", "gin", "gat", "gatv2", "appnp"),
    "residual": ("gcn", "sage", "gin", "gat", "gatv2"),
    "activation": ("gcn", "sage", "gin", "gat", "gatv2", "appnp"),
    "input_dropout": ("gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp"),
    "bias": ("gcn", "sage", "gat", "gatv2", "sgc", "appnp"),
}


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


def unused(config: Config) -> list[str]:
    """Return the options that were changed and that nothing reads in this combination, as notes for the user.

    They are no errors, since a sweep crosses values that not all of its jobs read. (A model's are: see ``_MODEL_OPTIONS``.)
    """
    default = Config()
    changed = {
        name for (name, _, value), (_, _, normal) in zip(walk(config), walk(default), strict=True) if value != normal
    }
    return [
        f"{name} has no effect with {why}"
        for names, holds, why in _readers(config)
        for name in names
        if not holds and name in changed
    ]


def _readers(config: Config) -> Iterator[tuple[list[str], bool, str]]:
    """Yield (options, whether something reads them here, what does not)."""
    dataset, train, task = config.dataset, config.train, config.task.name
    is_planted, is_file = dataset.name == "planted", dataset.path is not None

    def of(group: str, *names: str) -> list[str]:
        return [f"{group}.{name}" for name in names]

    yield of("dataset", "num_nodes", "num_classes", "num_features", "mean_degree", "degree_exponent", "feature_signal",
             "num_graphs"), is_planted, f"dataset.name={dataset.name}, which is not generated"  # fmt: skip
    yield of("dataset", "num_communities", "intra_fraction"), is_planted and dataset.task == "node", "this dataset"
    yield of("dataset", "seed"), is_planted or dataset.features.startswith("random"), "features that the dataset has"
    yield (
        of("dataset", "root", "download"),
        not (is_planted or is_file),
        "a dataset that is generated, or named by dataset.path",
    )
    yield of("dataset", "ids"), not is_planted, "a generated dataset"
    yield of("dataset", "split_index"), dataset.split != "random" and not is_planted, "a random split"
    yield of("kernel", "partition", "block_size", "min_intra_fraction", "min_gain", "num_trials"), (
        "density_adaptive" in used_strategies(config)
    ), "kernel=baseline"  # fmt: skip
    yield of("kernel", "fallback"), used_strategies(config) != ["baseline"], "kernel=baseline"
    yield of("kernel", "name"), task != "benchmark", "task=benchmark, which runs the strategies of task.compare"
    yield of("train", "momentum"), train.optimizer == "sgd", f"train.optimizer={train.optimizer}"
    yield of("train", "schedule_every", "schedule_factor"), train.schedule == "step", f"train.schedule={train.schedule}"
    yield of("train", "fanouts"), train.sampling == "neighbor", "train.sampling=full"
    yield of("train", "batch_size"), train.sampling == "neighbor" or dataset.task == "graph", "full-graph training"
    yield of("train", "checkpoint_every"), task == "train", f"task={task}"
    yield of("task", "compare", "num_warmup", "num_steps"), task == "benchmark", f"task={task}"
    yield of("logger", "mode", "project", "entity", "group", "job_type", "tags", "timeout_s"), (
        config.logger.name == "wandb"
    ), f"logger={config.logger.name}"  # fmt: skip


def validate(config: Config) -> None:
    """Check choices, ranges and combinations.

    Raises:
        ConfigError: for the first value that is not allowed, or the first combination that can't work.
    """
    for name, item, value in walk(config):
        for entry in value if isinstance(value, list) else [value]:
            _check_value(name, item.metadata, entry)
    for check in (_check_names, _check_dataset, _check_model, _check_train, _check_strategies):
        check(config)


def _check_value(name: str, metadata: Any, value: Any) -> None:
    if value is None or isinstance(value, dict):
        return
    choices, low, high = metadata["choices"], metadata["low"], metadata["high"]
    if choices and value not in choices:
        raise ConfigError(f"{name}={value}: {suggestion(value, choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value}: must be a finite number")
    if low is not None and (value < low or (metadata["open_low"] and value == low)):
        raise ConfigError(
            f"{name}={value} is out of range: must be {'above' if metadata['open_low'] else 'at least'} {low:g}"
        )
    if high is not None and (value > high or (metadata["open_high"] and value == high)):
        raise ConfigError(
            f"{name}={value} is out of range: must be {'below' if metadata['open_high'] else 'at most'} {high:g}"
        )


def _check_names(config: Config) -> None:
    if (
        not config.name
        or any(sign in '/\\:"' or not sign.isprintable() for sign in config.name)
        or config.name.startswith(".")
        or len(config.name) > 80
    ):
        raise ConfigError(f"name={config.name!r}: must be a folder name of at most 80 characters")


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


def _check_dataset(config: Config) -> None:
    dataset = config.dataset
    parse_sized("dataset.features", dataset.features, ("given", "degree", "tags"), "random")
    _, num_classes = parse_sized("dataset.labels", dataset.labels, ("given",), "degree")
    if num_classes == 1:
        raise ConfigError("dataset.labels=degree:1: one class leaves nothing to learn; use at least degree:2")
    if dataset.train_fraction + dataset.val_fraction >= 1:
        raise ConfigError(
            f"dataset.train_fraction={dataset.train_fraction} and dataset.val_fraction={dataset.val_fraction} "
            "leave nothing to test on: their sum must be below 1"
        )
    if dataset.name == "planted" and dataset.path is not None:
        raise ConfigError(
            f"dataset.path={dataset.path} can't work with dataset=planted, which is generated; use dataset=file"
        )
    if dataset.name == "planted":
        if dataset.num_graphs == 1 and dataset.num_communities > dataset.num_nodes:
            raise ConfigError(
                f"dataset.num_communities={dataset.num_communities} exceeds dataset.num_nodes={dataset.num_nodes}"
            )
        if (dataset.num_graphs > 1) != (dataset.task == "graph"):
            raise ConfigError(
                f"dataset.num_graphs={dataset.num_graphs} does not go with dataset.task={dataset.task}: "
                "several graphs are for dataset.task=graph, one graph is for dataset.task=node"
            )
        if dataset.num_graphs * 2 > dataset.num_nodes:
            raise ConfigError(
                f"dataset.num_graphs={dataset.num_graphs} needs at least two nodes a graph, "
                f"dataset.num_nodes={dataset.num_nodes} has fewer"
            )


def _check_model(config: Config) -> None:
    model, default = config.model, ModelConfig()
    for name, readers in _MODEL_OPTIONS.items():
        value = getattr(model, name)
        if model.name not in readers and value != getattr(default, name):
            raise ConfigError(
                f"model.{name}={value} has no effect on model={model.name}: it is for {', '.join(readers)}"
            )
    if model.name == "custom" and not model.target:
        raise ConfigError("model=custom needs model.target=my_pkg.nets:MyNet")
    if model.edge_weight and model.name == "sage" and model.aggregator != "mean":
        raise ConfigError(
            f"model.edge_weight=true can't work with model.aggregator={model.aggregator}: a maximum over neighbours "
            "takes no weights; use model.aggregator=mean"
        )
    if config.dataset.task == "graph" and model.name not in GRAPH_MODELS:
        raise ConfigError(
            f"model={model.name} can't classify graphs (dataset.task=graph): it has no readout; "
            f"use one of {', '.join(GRAPH_MODELS)}"
        )
    if config.dataset.task == "graph" and model.edge_weight:
        raise ConfigError("model.edge_weight=true can't work with dataset.task=graph: TU archives hold no edge weights")


def _check_train(config: Config) -> None:
    train, dataset, model = config.train, config.dataset, config.model
    if train.sampling == "neighbor":
        if dataset.task == "graph":
            raise ConfigError(
                "train.sampling=neighbor is for dataset.task=node; graphs are batched as wholes: use train.sampling=full"
            )
        if model.name not in SAMPLED_MODELS:
            raise ConfigError(
                f"train.sampling=neighbor can't work with model={model.name}: DGL's layer propagates over one whole "
                f"graph, a sampled block has different nodes on its two sides; use one of {', '.join(SAMPLED_MODELS)}"
            )
        if model.name != "custom" and len(train.fanouts) != model.num_layers:
            raise ConfigError(
                f"train.fanouts={train.fanouts} has {len(train.fanouts)} entries for model.num_layers={model.num_layers}: "
                "one fanout a layer is needed"
            )
        if any(fanout == 0 for fanout in train.fanouts):
            raise ConfigError(f"train.fanouts={train.fanouts}: a fanout is at least 1, or -1 for all neighbours")
    batched = train.sampling == "neighbor" or dataset.task == "graph"
    if batched and train.batch_size == 1 and model.norm == "batch":
        raise ConfigError(
            "train.batch_size=1 can't work with model.norm=batch: there is nothing to take a variance over"
        )
    if train.folds == 1:
        raise ConfigError("train.folds=1: cross-validation needs at least 2 folds; 0 uses one split")
    if train.folds and dataset.task != "graph":
        raise ConfigError(f"train.folds={train.folds} is for dataset.task=graph, this is dataset.task={dataset.task}")
    if train.folds and train.eval_every != 1:
        raise ConfigError(
            f"train.folds={train.folds} with train.eval_every={train.eval_every}: the protocol picks one epoch over "
            "all folds, so every epoch must be evaluated: use train.eval_every=1"
        )
    if train.patience and train.patience < train.eval_every:
        raise ConfigError(
            f"train.patience={train.patience} is below train.eval_every={train.eval_every}: training would stop before anything "
            "is evaluated again"
        )
    if train.resume and config.task.name != "train":
        raise ConfigError(f"train.resume is for task=train, this is task={config.task.name}")


def used_strategies(config: Config) -> list[str]:
    """Return the strategies that a task runs: those compared, or the one of ``kernel``."""
    return list(config.task.compare) if config.task.name == "benchmark" else [config.kernel.name]


def _check_strategies(config: Config) -> None:
    used = used_strategies(config)
    if config.task.name == "benchmark" and len(set(used)) != len(used):
        raise ConfigError(f"task.compare={used} names a strategy twice")
    if config.task.name == "benchmark" and not used:
        raise ConfigError("task.compare is empty: name at least one strategy")
    if config.task.name == "benchmark" and (config.train.folds or config.dataset.task == "graph"):
        raise ConfigError(
            "task=benchmark compares strategies on one whole graph: it can't work with dataset.task=graph yet; "
            "use task=train"
        )
    if config.task.name == "benchmark" and config.train.sampling != "full":
        raise ConfigError(
            "task=benchmark times full-graph steps: it can't work with train.sampling=neighbor; use task=train"
        )
    if "density_adaptive" in used and not config.kernel.fallback:
        _check_density_adaptive(config)


def _check_density_adaptive(config: Config) -> None:
    model, reason = config.model, None
    if model.name in ("gat", "gatv2"):
        reason = f"model={model.name} weights every edge anew at each step"
    elif model.name == "sage" and model.aggregator != "mean":
        reason = f"model.aggregator={model.aggregator} takes a maximum"
    elif config.train.sampling != "full":
        reason = "train.sampling=neighbor draws another graph at each step, and its plan is made once for a graph"
    elif config.dataset.task == "graph":
        reason = "dataset.task=graph batches other graphs at each step, and its plan is made once for a graph"
    if reason:
        raise ConfigError(
            f"kernel=density_adaptive can't work here: {reason} (it is for sums and means with fixed scalar weights "
            "over one graph); use kernel=baseline, or kernel.fallback=true"
        )
