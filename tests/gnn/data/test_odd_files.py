"""Every row of the odd files' README: what each must give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runner.errors import DataError
from runner.gnn.data.files import load_file
from runner.gnn.data.load import load
from runner.gnn.data.prepare import prepare
from runner.schema import DatasetConfig


@pytest.fixture(scope="module")
def odd(data_root: Path) -> Path:
    return data_root / "odd"


def edges(graph: object) -> list[tuple[int, int]]:
    return list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))  # type: ignore[attr-defined]


def error(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        load_file(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_snap_style(odd: Path) -> None:
    graph = load_file(odd / "snap_style.txt")
    assert (graph.num_nodes, graph.num_edges) == (5, 6)
    assert graph.node_ids is not None
    assert graph.node_ids.tolist() == [0, 10, 20, 35, 70]
    assert edges(graph) == [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 1)]


def test_weighted_crlf(odd: Path) -> None:
    graph = load_file(odd / "weighted_crlf.csv")
    assert (graph.num_nodes, graph.num_edges) == (4, 4)
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == pytest.approx([0.5, 2, 0.001, 1])
    assert int((graph.src == graph.dst).sum()) == 1


def test_string_ids(odd: Path) -> None:
    graph = load_file(odd / "string_ids.csv")
    assert graph.node_ids is not None
    assert graph.node_ids.tolist() == ["node-01", "node_02", "node 3", "quoted, id"]
    assert edges(graph) == [(0, 1), (1, 2), (2, 0), (3, 0)]


def test_pattern_symmetric(odd: Path) -> None:
    graph = load_file(odd / "pattern_symmetric.mtx")
    assert (graph.num_nodes, graph.num_edges) == (4, 7)
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [1.0] * 7
    assert sorted(edges(graph)) == [(0, 1), (0, 2), (1, 0), (1, 3), (2, 0), (2, 2), (3, 1)]


def test_duplicates_and_loops(odd: Path) -> None:
    raw = load_file(odd / "duplicates_and_loops.txt")
    assert (raw.num_nodes, raw.num_edges) == (3, 6)
    merged = prepare(
        raw,
        DatasetConfig(merge_duplicates=True, features="degree", labels="degree:2", split="random", train_fraction=0.4),
    )
    assert sorted(edges(merged)) == [(0, 1), (1, 0), (1, 2), (2, 2)]
    assert any("2 merged" in line for line in merged.report)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("negative_id.txt", "line 3"),
        ("three_columns_then_two.txt", "line 2"),
        ("not_a_number.csv", "line 3"),
        ("nan_features.npz", "node 3, feature 1"),
        ("id_out_of_range.npz", "edge 3: node id 9 is out of range, the graph has 6 nodes"),
        ("wrong_lengths.npz", "4 sources (src_li) and 3 destinations"),
        ("truncated.npz", "not a complete npz"),
        ("csr_indptr_broken.npz", "indptr decreases at row 2"),
    ],
)
def test_an_error_names_the_file_and_the_place(odd: Path, name: str, place: str) -> None:
    assert place in error(odd / name)


def test_ids_as_text_on_request(odd: Path) -> None:
    graph = load_file(odd / "not_a_number.csv", ids="text")
    assert graph.node_ids is not None
    assert graph.node_ids.tolist() == ["0", "1", "x"]


def test_sparse_ids(odd: Path) -> None:
    graph = load_file(odd / "sparse_ids.txt")
    assert (graph.num_nodes, graph.num_edges) == (3, 3)
    assert edges(graph) == [(0, 2), (2, 1), (1, 0)]


def test_gzip(odd: Path) -> None:
    graph = load_file(odd / "edges.txt.gz")
    assert (graph.num_nodes, edges(graph)) == (4, [(0, 1), (1, 2), (2, 3), (3, 0)])


def test_isolated_and_unlabelled(odd: Path) -> None:
    data = load(DatasetConfig(path=str(odd / "isolated_and_unlabelled.npz"), train_fraction=0.4, val_fraction=0.2))
    assert (data.num_nodes, data.num_edges) == (6, 4)
    degree = torch.bincount(torch.cat([data.src, data.dst]), minlength=6)
    assert degree.tolist()[4:] == [0, 0]
    split = data.split
    everywhere = torch.cat([split.train, split.val, split.test])
    assert sorted(everywhere.tolist()) == [0, 1, 3, 4, 5]
    assert data.num_classes == 2


def test_no_edges(odd: Path) -> None:
    options = {"path": str(odd / "no_edges.npz"), "train_fraction": 0.4}
    with pytest.raises(DataError, match="no edges"):
        load(DatasetConfig(**options))  # type: ignore[arg-type]
    assert load(DatasetConfig(self_loops="add", **options)).num_edges == 6  # type: ignore[arg-type]


def test_no_edges_trains_with_self_loops(odd: Path, run_experiment: object) -> None:
    record = run_experiment(  # type: ignore[operator]
        "dataset=file",
        f"dataset.path={odd / 'no_edges.npz'}",
        "dataset.self_loops=add",
        "dataset.train_fraction=0.4",
        "train.epochs=2",
    )
    assert record["status"] == "finished"


def test_needs_pickle_is_refused_unread(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", never)
    monkeypatch.setattr("pickle.loads", never)
    assert "Python objects" in error(odd / "needs_pickle.npz")


def test_tiny_tu(odd: Path) -> None:
    raw = load_file(odd / "TINY.zip")
    assert raw.graph_offsets is not None
    assert raw.graph_offsets.tolist() == [0, 3, 5]
    assert raw.graph_labels is not None
    assert sorted(raw.graph_labels.tolist()) == [0, 1]
    assert raw.tags is not None
    assert raw.tags.tolist() == [0, 1, 1, 0, 2]
    data = prepare(raw, DatasetConfig(task="graph", train_fraction=0.5, val_fraction=0.0))
    assert data.dense_features().tolist() == np.eye(3)[[0, 1, 1, 0, 2]].tolist()


def test_slip_is_refused_and_writes_nothing(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in odd.parent.rglob("*"))
    assert "outside" in error(odd / "slip.zip")
    assert not list(tmp_path.iterdir())
    assert sorted(path for path in odd.parent.rglob("*")) == before
