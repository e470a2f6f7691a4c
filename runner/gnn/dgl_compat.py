"""Import DGL on a torch that it wasn't built for.

DGL 2.1, the newest that pip finds, ships GraphBolt (a data-loading library that nothing here uses) for torch ≤ 2.2 only, and
refuses to import without it. Only where GraphBolt really can't load is an empty module put in its place. A DGL that
imports as it is, such as a CUDA build from DGL's own site, is left untouched.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

_stubbed = False


def _graphbolt_can_load() -> bool:
    """Whether DGL was built for this torch; looks at files only, since a failed ``import dgl`` can't be repeated."""
    spec = importlib.util.find_spec("dgl")
    if spec is None or not spec.submodule_search_locations:
        return True  # no DGL: let its own import error speak
    folder = Path(spec.submodule_search_locations[0]) / "graphbolt"
    if not folder.is_dir():
        return False
    import torch

    version = torch.__version__.split("+")[0]
    built = list(folder.glob(f"*graphbolt_pytorch_{version}.*"))
    return bool(built) and importlib.util.find_spec("torchdata.datapipes") is not None


def import_dgl() -> types.ModuleType:
    """Import and return DGL, with GraphBolt stubbed where it can't load; the PyTorch backend is chosen without asking."""
    global _stubbed
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes a config file into the home folder
    if "dgl" not in sys.modules and not _graphbolt_can_load():
        sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt")
        _stubbed = True
    import dgl

    return dgl


def is_stubbed() -> bool:
    """Whether GraphBolt was replaced by an empty module in this process."""
    return _stubbed


def has_cuda() -> bool:
    """Whether both torch and DGL can use a GPU here."""
    import torch

    if not torch.cuda.is_available():
        return False
    dgl = import_dgl()
    try:
        dgl.graph(([0], [0])).to("cuda")
    except dgl.DGLError:
        return False
    return True
