"""Pages run as they are printed: every Python block of the tutorial, the how-tos and troubleshooting, in order.

What a page takes as given, such as `experiment`, is small here. Each page has a process of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.documents import ROOT, run_script

DOCS = ROOT / "docs"
GIVEN = """
import workbench as wb
sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 512, "max_positions": 32}
experiment = wb.Experiment(
    model=wb.models.gpt2(**sizes), data=wb.data.corpus("demo", vocab_size=512), steps=10, global_batch=512, seq_len=16
)
"""
COMPLETE = ("own-data", "own-model")
"""How-tos that take nothing as given: a reader copies them as they stand."""
FURTHER_GIVEN = {
    "bisect": "experiment = experiment.replace(global_batch=128)",
    "parity": """
from workbench.analysis import parity
every = parity._choices
parity._choices = lambda *sizes: list(every(*sizes))[4:6]  # two replicas, with ZeRO 0 and 1
""",
    "runs": """
from tests.distributed.documents import hold_resumed
experiment = experiment.replace(global_batch=8, callbacks=[hold_resumed])
plan = wb.plan(experiment, wb.measure.local_cluster(1))
""",
}
"""What else a how-to takes as given: a run that goes on until it is stopped, however many steps it takes meanwhile."""
AFTERWARDS = {
    "bisect": "assert found.verdict.startswith('The plans differ by rounding'), found",
    "parity": "assert found.is_equal, found",
    "tutorial": "assert [run.status.state for run in runs] == ['finished'] * 2, runs",
    "runs": "assert [each.status.state for each in (run, other)] == ['stopped', 'finished']",
    "plan-elsewhere": "assert cluster.gpus == 8",
}
"""What is true after a page."""
RAISES = """
try:
    exec({block!r})
except WorkbenchError as error:
    assert re.search({pattern!r}, str(error)), error
else:
    raise AssertionError("no error: " + {title!r})
"""


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_every_block_of_the_tutorial_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of((DOCS / "tutorial.md").read_text())
    assert len(blocks) >= 5
    run_script("\n".join([*blocks, AFTERWARDS["tutorial"]]), tmp_path, monkeypatch)


HOW_TOS = {page.stem: blocks for page in sorted(DOCS.glob("how-to/*.md")) if (blocks := blocks_of(page.read_text()))}


@pytest.mark.parametrize("name", HOW_TOS)
def test_every_block_of_a_how_to_runs_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = "" if name in COMPLETE else GIVEN
    script = [given, FURTHER_GIVEN.get(name, ""), *HOW_TOS[name], AFTERWARDS.get(name, "")]
    run_script("\n".join(script), tmp_path, monkeypatch)


def test_each_message_of_troubleshooting_is_raised_and_its_remedy_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, *entries = re.split(r"^### ", (DOCS / "reference" / "troubleshooting.md").read_text(), flags=re.M)
    script = ["import re", "from workbench.base.errors import WorkbenchError", *blocks_of(given)]
    for entry in entries:
        title, blocks = entry.partition("\n")[0].strip("`"), blocks_of(entry)
        if blocks:
            pattern = ".*".join(map(re.escape, title.split("…")))
            script.append(RAISES.format(block=blocks[0], pattern=pattern, title=title))
            script += blocks[1:]
            assert len(blocks) == 2, title
    assert len(script) > 30
    run_script("\n".join(script), tmp_path, monkeypatch)
