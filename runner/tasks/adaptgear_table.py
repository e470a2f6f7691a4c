"""Task ``adaptgear_table``: what density-adaptive kernels give, over graphs × models, step by step of the method.

Rows are kept as they are measured; a run that was stopped is taken up with ``task.resume``. Losses stay in the table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from runner.tasks.context import Context
from runner.tasks.table import Row, measure_rows
from runner.tasks.table_report import show, summarize
from runner.tasks.table_rows import measure_row

_OPTIONS = ("num_warmup", "num_steps", "case_seconds", "step_seconds", "peers")  # of the task, that rows depend on


def run(context: Context) -> dict[str, Any]:
    """Run the task; returns its part of the result record."""
    rows = measure_rows(context, _OPTIONS, lambda *given: [measure_row(*given)], partial(_tell, context))
    summary = summarize(rows)
    show(context, rows, summary)
    return {"rows": rows, "summary": summary}


def _tell(context: Context, row: Row, is_known: bool) -> None:
    context.say(
        f"{row['dataset']}, {row['model']} {row['num_layers']}×{row['hidden']}: aggregation {row['aggregation_speedup_vs_dgl']:.2f}× "
        f"DGL's speed, step {row['step_speedup_vs_dgl']:.2f}×, {row['ratio_to_oracle']:.3f} of the oracle's"
        + (" (measured in the run resumed)" if is_known else "")
    )
    context.sinks.metrics(
        {
            name: row[name]
            for name in (
                "dataset", "model", "hidden", "aggregation_speedup_vs_dgl", "step_speedup_vs_dgl", "ratio_to_oracle",
                "speedup_vs_best_single",
            )
        }
    )  # fmt: skip
