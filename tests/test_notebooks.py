"""The notebooks run from a fresh kernel (in their short mode), and are committed with outputs and without errors."""

import pytest
from conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_four():
    assert [p.stem[:2] for p in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_with_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = [c for c in book.cells if c.cell_type == "code"]
    assert book.cells[0].cell_type == "markdown" and all(c.execution_count == i for i, c in enumerate(cells, 1))
    outputs = [o for c in cells for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert str(ROOT) not in path.read_text(encoding="utf-8")                          # no path of the machine that ran it


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_a_fresh_kernel(path, monkeypatch):
    monkeypatch.setenv("OAR_NOTEBOOK_SHORT", "1")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
