"""The cost model: what it predicts, what is left out for it, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import random_edges, symmetric

from runner.kernels.adjacency import Adjacency
from runner.kernels.density import calibration, select
from runner.kernels.density.calibration import Sample, cost_model, fit
from runner.kernels.density.candidates import Candidates, cut
from runner.kernels.density.cost import CostModel, counts_of, key_of, nearest_width
from runner.kernels.density.select import Rule
from runner.kernels.formats import Work

CACHE = 2**19


def work(rows: int, near: int, far: int, cells: int = 0) -> Work:
    return Work(rows=rows, entries=near + far, near=near, cells=cells)


def test_rates_are_found_again() -> None:
    rates = np.array([1e-6, 2e-9, 3e-10, 5e-10, 9e-10, 1e-10])
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(30):
        given = work(*(int(count) for count in rng.integers(1000, 60_000, 4)))
        samples.append(Sample("some", given, 16, float(counts_of(given, 16, CACHE) @ rates)))
    model = CostModel(fit(samples, CACHE), CACHE)
    for sample in samples:
        assert model.seconds("some", sample.work, 16) == pytest.approx(sample.seconds, rel=1e-4)
    assert model.seconds("another", samples[0].work, 16) is None


def test_entries_and_tiles_grow_with_the_width_a_call_does_not() -> None:
    model = CostModel({key_of("csr_native", False, 16): [1.0, 0.0, 2.0, 0.0, 0.0, 0.0]}, CACHE)
    assert model.seconds("csr_native", work(10, 5, 0), 16) == pytest.approx(11)
    assert model.seconds("csr_native", work(10, 5, 0), 20) == pytest.approx(1 + 10 * 20 / 16)
    assert nearest_width(20) == 16
    assert nearest_width(1000) == 128


def test_a_tile_pays_from_the_density_on_at_which_its_cells_cost_what_its_edges_do() -> None:
    rates = {
        key_of("owned_csr", False, 16): [1e-6, 0.0, 4e-9, 0.0, 0.0, 0.0],
        key_of("owned_tiles_0.3", False, 16): [1e-6, 0.0, 4e-9, 0.0, 0.0, 1e-9],
    }
    assert CostModel(rates, CACHE).least_tile_density(16, False) == 0.25
    rates[key_of("owned_tiles_0", False, 16)] = [1e-6, 0.0, 4e-9, 0.0, 0.0, 5e-9]
    assert CostModel(rates, CACHE).least_tile_density(16, False) is None
    assert CostModel(rates, CACHE).least_tile_density(16, True) is None


def candidates() -> Candidates:
    src, dst, num_nodes = symmetric(random_edges(90, 500))
    graph = Adjacency.from_edges(src, dst, num_nodes, num_nodes)
    return cut(graph, graph.values(None), torch.tensor([0, 30, 60, 90]))


def model_of(**times: float) -> CostModel:
    """A model in which a call of a kernel takes so long, whatever it does."""
    rates = {key_of(name, False, 8): [time_s, 0, 0, 0, 0, 0] for name, time_s in times.items()}
    return CostModel(rates, CACHE)


ALL = {"csr_native": 1.0, "csr_torch": 9.0, "csr_binned": 9.0, "coo_torch": 9.0, "dense_blocks": 9.0}


def test_the_analytic_selector_takes_the_fastest_prediction_and_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("timed")

    monkeypatch.setattr(select, "seconds", never)
    quick = model_of(**ALL, owned_local=0.5, owned_csr=0.9)
    choice = select.choose(candidates(), 8, Rule("analytic"), quick)
    assert choice.names == ("owned_local",)
    assert choice.tried == {}
    assert choice.predicted["owned: owned_local"] == 0.5
    close = model_of(**ALL, owned_local=0.98, owned_csr=0.99)
    assert select.choose(candidates(), 8, Rule("analytic"), close).names == ("csr_native",), "2 % is not 3 %"
    parts = model_of(**(ALL | {"csr_native": 8.0, "dense_blocks": 1.0, "coo_torch": 2.0}), owned_csr=7.0)
    assert select.choose(candidates(), 8, Rule("analytic"), parts).names == ("dense_blocks", "coo_torch")


def test_what_is_predicted_to_be_slow_is_not_timed() -> None:
    model = model_of(**ALL, owned_csr=0.9, owned_local=5.0)
    choice = select.choose(candidates(), 8, Rule(num_trials=2), model)
    assert {"single: csr_native", "owned: owned_csr"} <= set(choice.tried)
    assert not {"single: csr_torch", "owned: owned_local"} & set(choice.tried)
    assert not any(name.startswith(("intra", "inter")) for name in choice.tried), (
        "two passes of 1 and 1 are over 1.6 × 0.9"
    )
    assert {"single: csr_torch", "intra: dense_blocks"} <= set(choice.predicted)


def test_where_the_model_is_off_what_it_left_out_is_timed_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All take a second on our clock; the model thinks that one takes a tenth of it, and another half."""
    monkeypatch.setattr(select, "seconds", lambda work, *_: (work(), 1.0)[1])
    model = model_of(**(ALL | {"csr_native": 0.1}), owned_csr=0.5)
    choice = select.choose(candidates(), 8, Rule(num_trials=1), model)
    assert "owned: owned_csr" in choice.tried
    assert "single: csr_torch" not in choice.tried


def test_what_is_not_predicted_is_timed_and_hides_nothing() -> None:
    choice = select.choose(candidates(), 8, Rule(num_trials=1), model_of(csr_native=1.0, csr_torch=1.1))
    assert {"single: csr_torch", "single: csr_binned", "owned: owned_csr"} <= set(choice.tried)


def test_rates_belong_to_a_machine_and_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.kernels.cache.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibration, "measure", lambda *_: [Sample("csr_native", work(9, 9, 9), 16, 1.0)])

    def count() -> int:
        calibration._known.clear()
        cost_model(())
        return len(list(tmp_path.glob("calibration/*.json")))

    assert [count(), count()] == [1, 1]
    monkeypatch.setattr(calibration, "has_kernels", lambda _: False)
    assert count() == 2
    monkeypatch.setattr(calibration, "processor", lambda: "another")
    assert count() == 3
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(calibration, "processor", lambda: "a third, busy")
    assert count() == 3, "what a crowded machine measured isn't kept"
    calibration._known.clear()


def test_the_exhaustive_selector_times_every_pair() -> None:
    choice = select.choose(candidates(), 8, Rule("exhaustive", num_trials=2), model_of(**ALL, owned_csr=0.1))
    pairs = [name for name in choice.tried if name.startswith("final: ") and " + " in name]
    assert len(pairs) == 3 * 4
    assert {"single: csr_torch", "owned: owned_local"} <= set(choice.tried)


def test_the_rates_are_kept_and_measured_again_where_the_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.kernels.cache.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibration, "_GRAPHS", ((200, 6, 0.9, 20), (300, 12, 0.2, 20)))
    calibration._known.clear()
    told: list[str] = []
    first = cost_model((), on_measuring=lambda: told.append("measuring"))
    assert told == ["measuring"]
    assert {"csr_native/plain/16", "owned_tiles/weighted/64", "add/plain/128"} <= set(first.rates)
    (file,) = tmp_path.glob("calibration/*.json")
    written = file.read_text()
    monkeypatch.setattr(calibration, "measure", lambda *_: pytest.fail("measured again"))
    calibration._known.clear()
    assert cost_model((), on_measuring=lambda: told.append("again")).rates == first.rates
    assert told == ["measuring"]
    monkeypatch.setattr(calibration, "measure", lambda *_: [Sample("csr_native", work(9, 9, 9), 16, 1.0)])
    for damage in ("", "[]", '{"csr_native/plain/16": [1]}', written[:50]):
        file.write_text(damage)
        calibration._known.clear()
        assert set(cost_model(()).rates) == {"csr_native/plain/16"}
    calibration._known.clear()
