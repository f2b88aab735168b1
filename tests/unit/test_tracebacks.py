"""What a notebook shows of an error: the sentence first, the user's own lines, and the rest folded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter

from tests import kernels
from tests.patience import PATIENCE_S
from workbench.notebooks.pages import notebook_to_html

REPOSITORY = Path(__file__).parents[2]
MODEL = """
import torch, workbench as wb
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 9:
            raise RuntimeError("planted")
        return {"x": torch.ones(4)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).square().mean()

class Branching(Net):
    def forward(self, x):
        if self.layer(x).sum() > -1e9:
            x.mul_(2)
        return self.layer(x).square().mean()

secret = "a word of another cell's"
"""


class Kernel:
    """A kernel, and what its last cell showed."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.error: dict[str, Any] = {}
        self.pages: list[str] = []
        self.outputs: list[Any] = []

    def run(self, code: str) -> None:
        self.error, self.pages, self.outputs = {}, [], []
        self.client.execute_interactive(code, output_hook=self._note, timeout=PATIENCE_S)

    def _note(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] in ("error", "display_data", "stream"):
            self.outputs.append(nbformat.v4.output_from_msg(message))
        if message["msg_type"] == "error":
            self.error = content
        elif message["msg_type"] == "display_data" and "<details>" in content["data"].get("text/html", ""):
            assert self.error, "the traceback is folded below the sentence"
            self.pages.append(content["data"]["text/html"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("OMP_NUM_THREADS", "1")
        with kernels.kernel(cwd=str(tmp_path_factory.mktemp("folder"))) as client:
            kernel = Kernel(client)
            kernel.run(MODEL)
            assert not kernel.error
            yield kernel


def test_a_notebook_shows_the_sentence_the_users_line_and_a_folded_traceback(kernel: Kernel) -> None:
    kernel.run("experiment = 1\nwb.Experiment(model=Net, data=Data(), stepz=<script>)".replace("<script>", "'<b>'"))
    first, *others = kernel.error["traceback"]
    assert first.endswith("UnknownParameter\x1b[39m: Experiment has no parameter 'stepz'. Did you mean 'steps'?")
    assert [line for line in others if line] == [
        "\x1b[36mCell In[2], line 2\x1b[39m\n    wb.Experiment(model=Net, data=Data(), stepz='<b>')"
    ]
    assert kernel.error["evalue"] == "Experiment has no parameter 'stepz'. Did you mean 'steps'?"
    [page] = kernel.pages
    assert "workbench/base/validation.py" in page
    assert "&#x27;&lt;b&gt;&#x27;" in page
    assert "<b>" not in page


def test_a_notebook_that_failed_keeps_the_sentence_and_the_folded_traceback_on_its_pages(
    kernel: Kernel, tmp_path: Path
) -> None:
    code = "wb.Experiment(model=Net, data=Data(), stepz=3)"
    kernel.run(code)
    cell = nbformat.v4.new_code_cell(code, outputs=kernel.outputs)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "failed.ipynb")
    converted, _ = HTMLExporter().from_filename(str(tmp_path / "failed.ipynb"))
    shared = notebook_to_html(tmp_path / "failed.ipynb", tmp_path / "failed.html").read_text()
    for page in (converted, shared):
        shown = BeautifulSoup(page, "html.parser")
        [error] = shown.select("[data-mime-type='application/vnd.jupyter.stderr']")
        sentence, *lines = error.get_text().strip().splitlines()
        assert sentence == "UnknownParameter: Experiment has no parameter 'stepz'. Did you mean 'steps'?"
        assert lines[-1].strip() == code
        assert len(lines) <= 3
        [folded] = [part for part in shown.find_all("details") if part.summary.get_text() == "the whole traceback"]
        assert "workbench/base/validation.py" in folded.pre.get_text()
        assert not folded.has_attr("open")


def test_other_errors_and_cells_after_an_error_are_left_alone(kernel: Kernel) -> None:
    kernel.run("1 / 0")
    assert "Traceback" in kernel.error["traceback"][1]
    assert kernel.pages == []
    kernel.run("1")
    assert (kernel.error, kernel.pages) == ({}, [])


def test_a_refused_model_is_quoted_by_its_cell_and_its_text(kernel: Kernel) -> None:
    kernel.run("wb.plan(wb.Experiment(model=Branching, data=Data(), steps=3, global_batch=4))")
    assert kernel.error["ename"] == "CaptureError"
    assert "at Cell In[1], line 23 (`if self.layer(x).sum() > -1e9:`)" in kernel.error["evalue"]
    assert "/ipykernel_" not in "\n".join(kernel.error["traceback"])


def test_a_failed_rank_quotes_the_cell_and_its_text_and_no_other_cell_leaves_the_kernel(kernel: Kernel) -> None:
    kernel.run("other_secret = 'not sent'")
    kernel.run("run = wb.launch(wb.Experiment(model=Net, data=Data(), steps=4, global_batch=16))\nrun.wait()")
    assert kernel.error["ename"] == "RunFailed"
    shown = "\n".join(kernel.error["traceback"])
    assert len(shown.splitlines()) < 12
    assert 'Cell In[1], line 10\x1b[39m, in __getitem__\n    raise RuntimeError("planted")' in shown
    assert len(kernel.pages) == 1
    kernel.run("assert 'not sent' not in (run.path / 'code' / 'cells.json').read_text()")
    assert not kernel.error
