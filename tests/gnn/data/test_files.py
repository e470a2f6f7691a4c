"""Loaders: every format and what is wrong with a file."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

from runner.errors import DataError
from runner.gnn.data import archive
from runner.gnn.data.files import find, load_file
from runner.gnn.data.graph_data import RawGraph, Split
from runner.gnn.data.load import load
from runner.gnn.data.npz import write_npz
from runner.schema import DatasetConfig


def edges(graph: RawGraph) -> list[tuple[int, int]]:
    return list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    return path


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n",
        "0\t1\n1\t2\n",
        "0,1\n1,2\n",
        "0;1\n1;2\n",
        "src,dst\n0,1\n1,2\n",
        "0, 1\n1, 2",
        "# c\n\n0 1\n# c\n1 2\n\n",
        "% c\r\n0 1\r\n1 2\r\n",
        "0 1 {}\n1 2 {}\n",
        "  0   1\n  1   2\n",
    ],
)
def test_edge_list_layouts(tmp_path: Path, text: str) -> None:
    graph = load_file(write(tmp_path / "g.txt", text))
    assert edges(graph) == [(0, 1), (1, 2)]
    assert graph.edge_weight is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "no line holds data"),
        ("# only\n", "no line holds data"),
        ("src,dst\n", "no line after the header"),
        ("0\n1\n", "line 1: '0' has one column"),
        ("0 1\n1 2 3\n", "line 2: 3 columns"),
        ("# c\n0 1\n\n1 2 3 4\n", "line 4: 4 columns"),
        ("0 1\n1 1.5\n", "line 2: id '1.5' is not a number"),
        ("0 1 2.0\n1 2 nan\n", "line 2: weight 'nan'"),
        ("0 1 2.0\n1 2 x\n", "line 2: weight 'x'"),
        ("0 1\n1 99999999999999999999999\n", "exceeds 64 bits"),
        ("0 1 1\n1 2 1e39\n", "line 2: weight '1e39'"),
        ("0,1,2\n1,2,\n", "line 2: column 3 is empty"),
        (",1\n1,2\n", "line 1: column 1 is empty"),
    ],
)
def test_bad_edge_lists(tmp_path: Path, text: str, place: str) -> None:
    path = write(tmp_path / "g.txt", text)
    with pytest.raises(DataError) as caught:
        load_file(path)
    assert place in str(caught.value)
    assert str(path) in str(caught.value)


def test_matrix_market_is_rows_to_columns_with_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "g.mtx", "%%MatrixMarket matrix coordinate real general\n3 3 2\n1 2 0.5\n3 1 0\n")
    graph = load_file(path)
    assert edges(graph) == [(0, 1), (2, 0)]
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [0.5, 0.0]
    assert graph.num_nodes == 3


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("%%MatrixMarket matrix coordinate real general\n3 2 1\n1 2 1\n", "line 2: 3 rows and 2 columns"),
        ("%%MatrixMarket matrix array real general\n1 1\n1\n", "coordinate"),
        ("%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 1\n", "'complex' can't be a graph"),
        ("%%MatrixMarket matrix coordinate real hermitian\n1 1 1\n1 1 1\n", "'hermitian' can't be a graph"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 2\n1 2 1\n", "2 entries declared, 1 found"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 2 1\n1 2 1\n", "1 entries declared, 2 found"),
        ("%%MatrixMarket matrix coordinate real general\n% c\n3 3 2\n1 2 1\n9 2 1\n", "line 5: '9 2 1' is no entry"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 1\n0 2 1\n", "line 3: '0 2 1' is no entry"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 2\n", "line 3: '1 2' is no entry"),
        ("%%MatrixMarket matrix coordinate pattern general\n3 3 1\n1 2 5\n", "line 3: '1 2 5' is no entry"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 2 nan\n", "line 3: '1 2 nan' is no entry"),
        ("%%MatrixMarket matrix coordinate real general\n3 3\n", "line 2: three sizes"),
        ("%%MatrixMarket matrix coordinate real general\n", "size is missing"),
        ("0 1\n", "line 1: not a Matrix Market file"),
        ("", "line 1: not a Matrix Market file"),
    ],
)
def test_bad_matrix_market(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(DataError) as caught:
        load_file(write(tmp_path / "g.mtx", text))
    assert place in str(caught.value)


def test_matrix_market_symmetries(tmp_path: Path) -> None:
    head = "%%MatrixMarket matrix coordinate real {}\n% c\n\n2 2 2\n1 1 3\n2 1 4\n"
    for kind, weights in (("symmetric", [3, 4, 4]), ("skew-symmetric", [3, 4, -4]), ("general", [3, 4])):
        graph = load_file(write(tmp_path / "g.mtx", head.format(kind)))
        assert graph.edge_weight is not None
        assert graph.edge_weight.tolist() == weights
        assert edges(graph) == [(0, 0), (1, 0), (0, 1)][: len(weights)]


def test_an_empty_matrix_has_nodes_and_no_edges(tmp_path: Path) -> None:
    graph = load_file(write(tmp_path / "g.mtx", "%%MatrixMarket matrix coordinate pattern general\n3 3 0\n"))
    assert (graph.num_nodes, graph.num_edges) == (3, 0)


def full_graph() -> RawGraph:
    features = sparse.csr_array(np.array([[0, 1, 0], [2, 0, 0], [0, 0, 0], [0, 0, 3]], np.float32))
    index = torch.arange(4)
    return RawGraph(
        name="full",
        src=torch.tensor([0, 1, 1, 3]),
        dst=torch.tensor([1, 2, 2, 3]),
        num_nodes=4,
        edge_weight=torch.tensor([0.5, 1.0, -2.0, 3.0]),
        features=features,
        labels=torch.tensor([0, 1, -1, 2]),
        splits=(
            Split(train=index[:1], val=index[1:2], test=index[3:]),
            Split(train=index[3:], val=index[1:2], test=index[:1]),
        ),
        node_ids=np.array(["a", "b", "c", "d"], dtype=object),
    )


def test_own_npz_round_trip(tmp_path: Path) -> None:
    graph = full_graph()
    write_npz(tmp_path / "sub" / "g.npz", graph)
    again = load_file(tmp_path / "sub" / "g.npz")
    assert edges(again) == edges(graph)
    assert torch.equal(again.edge_weight, graph.edge_weight)  # type: ignore[arg-type]
    assert np.array_equal(again.features.toarray(), graph.features.toarray())  # type: ignore[union-attr]
    assert torch.equal(again.labels, graph.labels)  # type: ignore[arg-type]
    assert [split.train.tolist() for split in again.splits] == [[0], [3]]
    assert again.node_ids is not None
    assert again.node_ids.tolist() == ["a", "b", "c", "d"]
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["g.npz"]


def test_own_npz_round_trip_of_a_set(tmp_path: Path) -> None:
    graph = RawGraph(
        name="set",
        src=torch.tensor([0, 2]),
        dst=torch.tensor([1, 3]),
        num_nodes=4,
        features=torch.rand(4, 2),
        graph_offsets=torch.tensor([0, 2, 4]),
        graph_labels=torch.tensor([1, 0]),
        tags=torch.tensor([0, 1, 1, 2]),
    )
    write_npz(tmp_path / "g.npz", graph)
    again = load_file(tmp_path / "g.npz")
    for name in ("features", "graph_offsets", "graph_labels", "tags"):
        assert torch.equal(getattr(again, name), getattr(graph, name)), name


CSR = {"adj_data": [1.0, 1.0], "adj_indices": [1, 0], "adj_indptr": [0, 1, 2], "adj_shape": [2, 2]}


@pytest.mark.parametrize(
    ("arrays", "place"),
    [
        ({"x": [1]}, "no graph in its arrays"),
        ({**CSR, "adj_shape": [2, 3]}, "is square"),
        ({**CSR, "adj_indices": [1, 7]}, "adj_indices row 1: column 7 is out of range"),
        ({**CSR, "adj_indptr": [0, 1]}, "adj_indptr has 2 entries"),
        ({**CSR, "adj_indptr": [0, 1, 5]}, "ends at 5"),
        ({**CSR, "labels": [0]}, "'labels' has 1 entries for 2 nodes"),
        ({**CSR, "labels": [0.5, 1.0]}, "integers expected"),
        ({**CSR, "idx_train": [0], "idx_val": [1], "idx_test": [5]}, "'idx_test' entry 0: 5 is out of range"),
        ({**CSR, "idx_train": [0], "idx_val": [1]}, "array 'idx_test' is missing"),
        ({"adj_data": [1.0], "adj_indices": [0], "adj_indptr": [0, 1]}, "array 'adj_shape' is missing"),
        ({"src": [0], "dst": [1], "num_nodes": -3}, "non-negative integer"),
        ({"src": [0], "dst": [-1]}, "edge 0: node id -1 is out of range"),
        ({"src": [[0]], "dst": [1]}, "'src' has shape (1, 1)"),
        ({"src": ["a"], "dst": [1]}, "integers expected"),
        (
            {"src": [0], "dst": [1], "num_nodes": 2, "node_features": [[1.0], [2.0], [3.0]]},
            "3 rows and 1 columns for 2 nodes",
        ),
        ({"src": [0], "dst": [1], "node_features": [[1.0], [np.inf]]}, "node 1, feature 0 is inf"),
        ({"src": [0], "dst": [1], "edge_weight": [1.0, 2.0]}, "2 edge weights for 1 edges"),
        ({"src": [0], "dst": [1], "edge_weight": [np.nan]}, "edge 0: weight nan"),
        ({"edge_index": [[0, 1]]}, "(2, edges) expected"),
        ({"edges": [[0, 5]], "node_labels": [0, 1]}, "edge 0: node id 5 is out of range"),
        ({**CSR, "adj_data": [1.0, np.nan]}, "adj_data entry 1: weight nan"),
        ({**CSR, "idx_train": [True], "idx_val": [1], "idx_test": [0]}, "'idx_train' is a mask of shape (1,) for 2"),
        ({"src": [True], "dst": [1]}, "integers expected"),
        ({"src": [0], "dst": [1], "num_nodes": np.nan}, "non-negative integer"),
        ({"src": [0], "dst": [1], "num_nodes": 6.5}, "non-negative integer"),
        ({"src": [0], "dst": [1], "num_nodes": 10**15}, "the limit is"),
        ({"src": [0], "dst": [2**62]}, "the limit is"),
        ({"src": [0], "dst": [1], "node_features": 3.0}, "single value"),
        ({"src": [0], "dst": [1], "num_nodes": 2, "node_features": np.zeros((2, 0))}, "2 rows and 0 columns"),
        ({"src": [0], "dst": [1], "node_tags": [1]}, "'node_tags' has 1 entries for 2 nodes"),
        ({"src": [0], "dst": [1], "edge_weight": [1e39]}, "weight inf"),
        (
            {"src": [0], "dst": [1], "train_mask": [1], "val_mask": [0, 1], "test_mask": [0, 0]},
            "train_mask has shape (1,)",
        ),
        (
            {"src": [0], "dst": [1], "train_mask": [0.5, 1], "val_mask": [0, 1], "test_mask": [0, 0]},
            "true and false expected",
        ),
        ({"format": "gearsail-graph-2", "src": [0], "dst": [1]}, "this version reads 'gearsail-graph-1'"),
        (
            {"format": "gearsail-graph-1", "src": [0], "dst": [1], "num_nodes": 2, "node_ids": [1]},
            "'node_ids' has shape (1,)",
        ),
        ({"src": [0], "dst": [1], "graph_sizes": [3]}, "add up to 3"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, object], place: str) -> None:
    path = npz(tmp_path / "g.npz", **arrays)
    with pytest.raises(DataError) as caught:
        load_file(path)
    assert place in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_array_that_declares_more_than_it_holds(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(tmp_path / "g.npz", "w") as stream:
        stream.writestr("src.npy", header.getvalue())
    with pytest.raises(DataError, match="declares 8000000000000 bytes"):
        load_file(tmp_path / "g.npz")


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "g.npz", "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("src.npy", b"0" * 5000)
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress(b"0 1\n" * 1000))
    (tmp_path / "g.txt").write_bytes(b"0 1\n" * 1000)
    for name in ("g.npz", "g.txt.gz", "g.txt"):
        with pytest.raises(DataError, match="limit"):
            load_file(tmp_path / name)


def test_damaged_archives(tmp_path: Path) -> None:
    whole = gzip.compress(b"0 1\n" * 1000)
    (tmp_path / "g.txt.gz").write_bytes(whole[:20])
    with pytest.raises(DataError, match="not a complete gzip"):
        load_file(tmp_path / "g.txt.gz")
    path = npz(tmp_path / "g.npz", src=np.arange(1000), dst=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[200:240] = b"x" * 40
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="can't be read"):
        load_file(path)


def tu(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as stream:
        for name, text in files.items():
            stream.writestr(f"T/T_{name}.txt" if name != "T" else "T/T.txt", text)
    return path


GOOD_TU = {"A": "1, 2\n2, 1\n", "graph_indicator": "1\n1\n2\n", "graph_labels": "5\n7\n"}


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({**GOOD_TU, "A": "1, 9\n"}, "T_A.txt, line 1: edge [1, 9] is out of range"),
        ({**GOOD_TU, "A": "1, x\n"}, "T_A.txt, line 1"),
        ({**GOOD_TU, "graph_indicator": "2\n1\n2\n"}, "line 2: graph numbers must not decrease"),
        ({**GOOD_TU, "graph_indicator": "1\n1\n3\n"}, "there are 2 graph labels"),
        ({**GOOD_TU, "node_labels": "1\n"}, "1 lines for 3 nodes"),
        ({"A": "1, 2\n"}, "are needed beside"),
        ({"T": "1\n2 0\n0 1 1\n"}, "line 4: the file ends too early"),
        ({"T": "1\n2 0\n0 1 5\n0 0\n"}, "line 3: a neighbour in [5] is out of range"),
        ({"T": "1\n2 0\n0 2 1\n0 0\n"}, "line 3: 2 neighbours declared, 1 given"),
        ({"T": "x\n"}, "line 1"),
        ({"other": ""}, "neither"),
        ({**GOOD_TU, "A": "1\n2\n"}, "T_A.txt has 1 columns, 2 expected"),
        ({**GOOD_TU, "A": "1.5, 2\n"}, "not whole"),
        ({**GOOD_TU, "A": "1, 2\n\n2, 1\n"}, "line 2: empty"),
        ({**GOOD_TU, "graph_indicator": ""}, "graph_indicator.txt is empty"),
        ({"T": "1\n1 0\n0 0\n1 0\n0 0\n"}, "more lines than the 1 graphs"),
        ({"T": "1\n-2 0\n"}, "a graph of -2 nodes"),
        ({"T": "1\n1 0\n0 0 nan\n"}, "attributes must be finite"),
    ],
)
def test_bad_tu_archives(tmp_path: Path, files: dict[str, str], place: str) -> None:
    path = tu(tmp_path / "T.zip", **files)
    with pytest.raises(DataError) as caught:
        load_file(path)
    assert place in str(caught.value)


def test_both_tu_layouts_give_the_same_graphs(tmp_path: Path) -> None:
    one = load_file(tu(tmp_path / "T.zip", **GOOD_TU, node_labels="4\n6\n4\n", node_attributes="1.5\n2\n3\n"))
    two = load_file(tu(tmp_path / "T.zip", T="2\n2 5\n4 1 1 1.5\n6 1 0 2\n1 7\n4 0 3\n"))
    assert sorted(edges(one)) == sorted(edges(two)) == [(0, 1), (1, 0)]
    for name in ("graph_offsets", "graph_labels", "tags", "features"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    write(tmp_path / "cora.npz", "")
    with pytest.raises(DataError, match=r"no such file; did you mean 'cora\.npz'"):
        load_file(tmp_path / "core.npz")
    with pytest.raises(DataError, match="unknown kind of file"):
        load_file(write(tmp_path / "g.xlsx", ""))
    with pytest.raises(DataError, match="no such folder"):
        find(tmp_path / "nowhere", ("cora",))


def test_a_file_in_root_comes_before_dgl(tmp_path: Path) -> None:
    write_npz(tmp_path / "cora.npz", full_graph())
    data = load(DatasetConfig(name="cora", root=str(tmp_path), download=False))
    assert data.num_nodes == 4
    write_npz(tmp_path / "amazon_co_buy_photo.npz", full_graph())
    assert load(DatasetConfig(name="photo", root=str(tmp_path), download=False)).num_nodes == 4


def test_unknown_names_get_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'cora'"):
        load(DatasetConfig(name="coro"))
    write(tmp_path / "mine.txt", "0 1\n")
    with pytest.raises(DataError, match="did you mean 'mine'"):
        load(DatasetConfig(name="mien", root=str(tmp_path)))
    with pytest.raises(DataError, match=r"needs dataset\.path"):
        load(DatasetConfig(name="file"))


def test_planetoid_split_of_real_cora(graphs_root: Path) -> None:
    data = load(DatasetConfig(name="cora", root=str(graphs_root), undirected=True))
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (2708, 10556, 1433, 7)
    assert [len(part) for part in (data.split.train, data.split.val, data.split.test)] == [140, 500, 1000]
    assert data.feature_format == "csr"
    assert data.feature_density == pytest.approx(0.0127, abs=1e-4)


def test_unlabelled_nodes_of_real_citeseer(graphs_root: Path) -> None:
    raw = load_file(graphs_root / "citeseer.npz")
    assert raw.labels is not None
    assert int((raw.labels < 0).sum()) == 15


@pytest.mark.parametrize(("name", "num_graphs"), [("MUTAG", 188), ("PROTEINS", 1113)])
def test_real_tu_sets_have_ten_folds(data_root: Path, name: str, num_graphs: int) -> None:
    raw = load_file(data_root / "tu" / f"{name}.zip")
    assert raw.graph_labels is not None
    assert len(raw.graph_labels) == num_graphs
    assert len(raw.splits) == 10
    for split in raw.splits:
        assert sorted(torch.cat([split.train, split.test]).tolist()) == list(range(num_graphs))


@pytest.mark.parametrize(
    "name", ["dd_union.npz", "minesweeper.npz", "soc-epinions.txt", "p2p-Gnutella31.mtx", "amazon_co_buy_photo.npz"]
)
def test_real_graphs_have_the_sizes_that_their_source_states(graphs_root: Path, name: str) -> None:
    sizes = {
        "dd_union.npz": (334925, 1686092),
        "minesweeper.npz": (10000, 78804),
        "soc-epinions.txt": (26588, 100120),
        "p2p-Gnutella31.mtx": (62586, 147892),
        "amazon_co_buy_photo.npz": (7650, 143663),
    }
    graph = load_file(graphs_root / name)
    assert (graph.num_nodes, graph.num_edges) == sizes[name]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["mtx", "txt", "csv", "npz", "zip", "txt.gz"]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.floats(0, 1),
)
def test_a_damaged_file_is_an_error_or_a_graph_but_never_a_crash(
    tmp_path: Path, kind: str, changes: list[tuple[float, int]], cut: float
) -> None:
    path = tmp_path / f"T.{kind}"
    match kind:
        case "mtx":
            path.write_text("%%MatrixMarket matrix coordinate real symmetric\n% c\n3 3 3\n2 1 0.5\n3 1 2\n3 3 1\n")
        case "npz":
            npz(
                path,
                src=np.arange(5),
                dst=np.arange(5)[::-1],
                num_nodes=5,
                node_features=np.eye(5),
                node_labels=np.zeros(5, int),
            )
        case "zip":
            tu(path, **GOOD_TU)
        case "txt.gz":
            path.write_bytes(gzip.compress(b"0 1\n1 2\n"))
        case _:
            path.write_text("src,dst,w\n0,1,0.5\n1,2,1\n" if kind == "csv" else "# c\n0 1\n1 2\n")
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[int(place * (len(content) - 1))] = value
    path.write_bytes(bytes(content[: max(1, int(cut * len(content)))] if cut < 0.5 else content))
    try:
        graph = load_file(path)
    except DataError as refusal:
        message = str(refusal)
    else:
        message = ""
        assert graph.num_edges == 0 or int(torch.cat([graph.src, graph.dst]).max()) < graph.num_nodes
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from here\nhere there\n", ["from", "here", "there"]),
        ("src dst\na b\n", ["a", "b"]),
        ("i,am\nam,here\n", ["i", "am", "here"]),
        ("x7,1\n1,2\n", ["x7", "1", "2"]),
        ("a;b,c\nb,c;a\n", ["a", "b,c"]),
    ],
)
def test_text_ids_keep_their_first_row(tmp_path: Path, text: str, names: list[str]) -> None:
    graph = load_file(write(tmp_path / "g.csv", text))
    assert graph.node_ids is not None
    assert graph.node_ids.tolist() == names


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf# c\n0 1\n1 2\n", b"# c\r0 1\r1 2\r", b"0,1,\n1,2,\n", b"0 1 # hi\n1 2\n", b"1.0 2.0\n2 3.0\n"],
)
def test_text_files_as_other_programs_write_them(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "g.txt").write_bytes(content)
    assert edges(load_file(tmp_path / "g.txt")) == [(0, 1), (1, 2)]


def test_encodings_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_bytes("0 1\n".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16 text"):
        load_file(tmp_path / "g.txt")
    (tmp_path / "g.txt").write_bytes(b"a b\nb \xe9\n")
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        load_file(tmp_path / "g.txt")


def test_what_a_file_has_and_is_not_read_is_said(tmp_path: Path) -> None:
    graph = load_file(npz(tmp_path / "g.npz", src=[0], dst=[1], x=[[1.0], [2.0]], y=[0, 1], train_mask=[1, 0], val_mask=[0, 0],
                          test_mask=[0, 1], positions=[1, 2]))  # fmt: skip
    assert graph.features is not None
    assert graph.labels is not None
    assert graph.splits[0].test.tolist() == [1]
    assert "left out: arrays positions" in graph.notes
    graph = load_file(write(tmp_path / "g.csv", "src,dst,weight,time\n0,1,2,3\n"))
    assert {"the first line is a header", "column 3 is the edge weight", "left out: columns 4 to 4"} <= set(graph.notes)


def test_pairs_stored_both_ways_are_kept_once(tmp_path: Path) -> None:
    graph = load_file(npz(tmp_path / "g.npz", edges=[[0, 1], [1, 0], [1, 2], [2, 2]], node_labels=[0, 1, 0]))
    assert sorted(edges(graph)) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]
    assert "1 pairs were stored both ways, kept once" in graph.notes


def test_edges_between_graphs_of_a_set_are_refused(tmp_path: Path) -> None:
    path = tu(tmp_path / "T.zip", **{**GOOD_TU, "A": "1, 2\n1, 3\n"})
    with pytest.raises(DataError, match=r"edge 1 goes from node 0 of graph 0 to node 2 of graph 1") as caught:
        load(DatasetConfig(name="file", path=str(path), task="graph", features="degree"))
    assert str(path) in str(caught.value)


def test_files_that_can_not_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a folder or device"):
        load_file(tmp_path)
    (tmp_path / "G.TXT").write_text("0 1\n")
    assert load_file(tmp_path / "G.TXT").num_edges == 1


def test_written_files_can_be_read_by_others(tmp_path: Path) -> None:
    write_npz(tmp_path / "g.npz", full_graph())
    assert (tmp_path / "g.npz").stat().st_mode & 0o044 == 0o044
