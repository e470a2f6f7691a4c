"""What is done to a graph, and what is said about it; the generated graph; DGL's named sets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import sparse

from runner.errors import DataError
from runner.gnn.data import named, planted
from runner.gnn.data.graph_data import GraphData, RawGraph, Split
from runner.gnn.data.load import load
from runner.gnn.data.prepare import prepare, random_split
from runner.schema import DatasetConfig

BASE = DatasetConfig(train_fraction=0.4, val_fraction=0.2)


def raw(**changes: object) -> RawGraph:
    graph = RawGraph(
        name="g",
        src=torch.tensor([0, 0, 1, 2, 2]),
        dst=torch.tensor([1, 1, 0, 2, 3]),
        num_nodes=5,
        features=torch.eye(5) * 4,
        labels=torch.tensor([0, 1, 0, 1, 0]),
    )
    return dataclasses.replace(graph, **changes)  # type: ignore[arg-type]


def prepared(graph: RawGraph | None = None, **options: object) -> GraphData:
    return prepare(graph or raw(), dataclasses.replace(BASE, **options))  # type: ignore[arg-type]


def edges(data: GraphData) -> list[tuple[int, int]]:
    return sorted(zip(data.src.tolist(), data.dst.tolist(), strict=True))


def said(data: GraphData, words: str) -> bool:
    return any(words in line for line in data.report)


def test_nothing_changes_unless_asked() -> None:
    assert edges(prepared()) == [(0, 1), (0, 1), (1, 0), (2, 2), (2, 3)]


def test_merge_sums_weights_and_counts() -> None:
    data = prepared(raw(edge_weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])), merge_duplicates=True)
    assert edges(data) == [(0, 1), (1, 0), (2, 2), (2, 3)]
    assert data.edge_weight is not None
    assert (
        dict(zip(zip(data.src.tolist(), data.dst.tolist(), strict=True), data.edge_weight.tolist(), strict=True))[0, 1]
        == 3.0
    )
    assert said(data, "1 merged")


def test_undirected_adds_only_what_is_missing() -> None:
    once = prepared(undirected=True)
    assert edges(once) == [(0, 1), (0, 1), (1, 0), (2, 2), (2, 3), (3, 2)]
    assert said(once, "1 added: reverse edges")
    twice = prepared(raw(src=once.src, dst=once.dst), undirected=True)
    assert edges(twice) == edges(once)
    assert not said(twice, "reverse edges")


def test_self_loops() -> None:
    assert [pair for pair in edges(prepared(self_loops="add")) if pair[0] == pair[1]] == [(k, k) for k in range(5)]
    assert said(prepared(self_loops="add"), "4 added: self loops")
    assert (2, 2) not in edges(prepared(self_loops="remove"))
    assert said(prepared(self_loops="remove"), "1 dropped: self loops")


@pytest.mark.parametrize("make", [lambda x: x, lambda x: sparse.csr_array(x.numpy())], ids=["dense", "csr"])
def test_row_normalisation(make: object) -> None:
    features = torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 0.0], [0.0, 5.0], [1.0, 1.0]])
    data = prepared(raw(features=make(features)), normalize="row")  # type: ignore[operator]
    assert data.dense_features().tolist() == [[0.25, 0.75], [0, 0], [1, 0], [0, 1], [0.5, 0.5]]


def test_standard_normalisation_survives_a_constant_column() -> None:
    data = prepared(
        raw(features=torch.tensor([[1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [4.0, 7.0], [5.0, 7.0]])), normalize="standard"
    )
    dense = data.dense_features()
    assert dense.mean(0).abs().max() < 1e-6
    assert dense[:, 0].std(correction=0) == pytest.approx(1)
    assert dense[:, 1].tolist() == [0] * 5


def test_sparse_features_stay_sparse() -> None:
    wide = torch.zeros(5, 100)
    wide[:, 3] = 1
    data = prepared(raw(features=wide))
    assert data.feature_format == "csr"
    assert torch.equal(data.dense_features(), wide)
    assert torch.equal(data.dense_features(torch.tensor([4, 0])), wide[[4, 0]])
    assert prepared().feature_format == "dense"


def test_made_features_and_labels() -> None:
    degree = prepared(raw(features=None, labels=None), features="degree", labels="degree:2")
    assert degree.dense_features().argmax(1).tolist() == [1, 2, 1, 1, 0]
    assert degree.num_classes == 2
    random = prepared(features="random:7")
    assert torch.equal(random.dense_features(), prepared(features="random:7").dense_features())
    assert random.num_features == 7
    tags = prepared(raw(tags=torch.tensor([0, 2, 1, 1, 0])), features="tags")
    assert tags.dense_features().argmax(1).tolist() == [0, 2, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"features": None}, {}, "no features are stored"),
        ({"labels": None}, {}, "no node labels are stored"),
        ({}, {"features": "tags"}, "no node tags"),
        ({"labels": torch.tensor([0, 1, 9, 1, 0])}, {}, "node 2 has label 9, out of range"),
        ({"labels": torch.tensor([0, -4, 1, 1, 0])}, {}, "node 1 has label -4, out of range"),
        ({"labels": torch.full((5,), -1)}, {}, "no node is labelled"),
        ({"src": torch.empty(0, dtype=torch.int64), "dst": torch.empty(0, dtype=torch.int64)}, {}, "no edges"),
        ({}, {"split": "public"}, "no public split"),
        ({}, {"train_fraction": 0.01}, "the train split is empty"),
        ({}, {"train_fraction": 0.79, "val_fraction": 0.2}, "the test split is empty"),
        (
            {"splits": (Split(train=torch.tensor([0, 1]), val=torch.tensor([1]), test=torch.tensor([2])),)},
            {},
            "both in training and in",
        ),
        (
            {"splits": (Split(train=torch.tensor([0]), val=torch.tensor([1]), test=torch.tensor([2])),)},
            {"split_index": 3},
            "has 1 splits",
        ),
        ({}, {"task": "graph"}, "not a labelled set of graphs"),
    ],
)
def test_what_can_not_be_used_is_said(changes: dict[str, object], options: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match="g: ") as caught:
        prepared(raw(**changes), **options)
    assert words in str(caught.value)


def test_unlabelled_nodes_leave_a_public_split() -> None:
    split = Split(train=torch.tensor([0, 1]), val=torch.tensor([2]), test=torch.tensor([3, 4]))
    data = prepared(raw(labels=torch.tensor([0, -1, 1, 1, 0]), splits=(split,)))
    assert data.split.train.tolist() == [0]
    assert said(data, "1 dropped: unlabelled")


def test_random_splits_repeat_and_do_not_overlap() -> None:
    labels = torch.arange(100) % 4
    one, same, other = (random_split(labels, 0.5, 0.2, seed) for seed in (1, 1, 2))
    assert torch.equal(one.train, same.train)
    assert not torch.equal(one.train, other.train)
    assert sorted(torch.cat([one.train, one.val, one.test]).tolist()) == list(range(100))
    assert [len(part) for part in (one.train, one.val, one.test)] == [50, 20, 30]


def test_planted_repeats_itself_and_is_as_described() -> None:
    config = DatasetConfig(num_nodes=2000, mean_degree=10, num_communities=40, intra_fraction=0.7)
    one, same = planted.generate(config), planted.generate(config)
    assert torch.equal(one.src, same.src)
    assert torch.equal(one.features, same.features)  # type: ignore[arg-type]
    assert not torch.equal(planted.generate(dataclasses.replace(config, seed=1)).features, one.features)  # type: ignore[arg-type]
    assert one.num_edges == 20_000
    pairs = set(zip(one.src.tolist(), one.dst.tolist(), strict=True))
    assert len(pairs) == one.num_edges, "no duplicates"
    assert all((v, u) in pairs and u != v for u, v in pairs)
    degree = np.bincount(one.dst.numpy())
    assert degree.max() > 8 * degree.mean(), "a skewed degree"
    assert one.labels is not None
    same_class = (one.labels[one.src] == one.labels[one.dst]).float().mean()
    assert same_class > 0.6


@pytest.mark.parametrize("size", [2, 3, 17])
def test_planted_at_its_smallest(size: int) -> None:
    graph = planted.generate(DatasetConfig(num_nodes=size, num_communities=1, mean_degree=50))
    assert graph.num_edges == size * (size - 1), "no more edges than there are pairs"


def test_planted_sets_of_graphs_have_no_edge_between_graphs() -> None:
    graph = planted.generate(DatasetConfig(num_nodes=300, num_graphs=20, num_classes=2, mean_degree=4))
    assert graph.graph_offsets is not None
    owner = torch.searchsorted(graph.graph_offsets, torch.arange(300), right=True) - 1
    assert torch.equal(owner[graph.src], owner[graph.dst])
    assert int(graph.graph_offsets.diff().min()) >= 2


def test_a_refused_download_says_what_to_do(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path))
    for name in ("reddit", "ENZYMES"):
        with pytest.raises(DataError, match=r"download=false; put .* into a folder and name it: dataset.root=DIR"):
            load(DatasetConfig(name=name, task="graph" if name.isupper() else "node", download=False))


def test_a_failed_download_is_one_line(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, **_: object) -> None:
            raise RuntimeError("Failed downloading url\nhttps://somewhere")

    monkeypatch.setattr(named, "import_dgl", lambda: SimpleNamespace(data=SimpleNamespace(CoraGraphDataset=Broken)))
    with pytest.raises(DataError, match="could not download or read it") as caught:
        load(DatasetConfig(name="cora"))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # DGL leaves its files open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_dgl_reads_cora_from_its_own_folder(
    data_root: object, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DGL's files in DGL's layout give the same graph as the npz."""
    import shutil
    from pathlib import Path

    folder = Path(str(tmp_path)) / "cora_v2_d697a464"
    folder.mkdir()
    for path in (Path(str(data_root)) / "planetoid_cora").iterdir():
        shutil.copyfile(path, folder / path.name.replace("ind.cora.", "ind.cora_v2."))
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path))
    ours = load(DatasetConfig(name="cora", root=str(Path(str(data_root)) / "graphs")))
    theirs = load(DatasetConfig(name="cora", download=False))
    assert edges(ours) == edges(theirs)
    assert torch.equal(ours.labels, theirs.labels)
    assert ours.split.train.tolist() == theirs.split.train.tolist()
    assert ours.split.test.tolist() == theirs.split.test.tolist()
