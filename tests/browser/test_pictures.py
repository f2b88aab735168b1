"""Pictures for the README: the recorded pair as it looked while it trained, with readable labels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest

from tests.logs import append_event
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir, this_process, write_json

RECORDED = Path(__file__).resolve().parents[2] / "notebooks" / "recorded"
PAIR = ("bert-scaled-20261125-015030", "bert-large-20261125-015021")
REACHED = 0.55
"""Share of the first run's steps at the moment that is shown: the second, which trained before it, has finished."""
CELLS = (
    "import workbench as wb\n\nwb.live(wb.list_runs())",
    'large = wb.Experiment(model=wb.models.bert_large(), data=wb.data.corpus("demo"), steps=400, global_batch=256, '
    'seq_len=128)\nwb.what_if(large, wb.Cluster.of("h200", gpus=4))',
)
UNREADABLE = """() => {
    const found = [];
    for (const graph of document.querySelectorAll('.jupyter-widgets .js-plotly-plot')) {
        const edge = graph.getBoundingClientRect(), ticks = {};
        if (edge.height < 200) found.push(`only ${edge.height} high`);
        const marks = [...graph.querySelectorAll('.scatterlayer .points, [class^="scatterlayer"] .points')];
        if (marks.some(mark => mark.childElementCount && mark.closest('[clip-path]'))) found.push('marks at 0 are cut');
        for (const text of graph.querySelectorAll('.main-svg text')) {
            const box = text.getBoundingClientRect();
            if (!box.width || !text.textContent) continue;
            if (box.left < edge.left - 1 || box.right > edge.right + 1) found.push('cut: ' + text.textContent);
            const axis = [...(text.parentElement.classList ?? [])].find(name => /^[xy][0-9]*tick$/.test(name));
            if (axis) (ticks[axis] ??= []).push([text.textContent, box]);
        }
        for (const [axis, labels] of Object.entries(ticks))
            labels.forEach(([one, a], index) => labels.slice(index + 1).forEach(([other, b]) => {
                const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 2 || b.bottom <= a.top + 2;
                if (!apart) found.push(`${axis}: ${one} on ${other}`);
            }));
    }
    return found;
}"""

BUTTONS_APART = """() => [...document.querySelectorAll('.jupyter-widgets button')]
    .filter(button => /Stop|Resume|Finished/.test(button.textContent))
    .map(button => [button, button.parentElement.querySelector('b[title]')].map(part => {
        const box = part.getBoundingClientRect();
        return (box.top + box.bottom) / 2;
    })).map(([button, name]) => Math.abs(button - name))"""
"""Script that returns by how many pixels the middle of each run's button and of its name are apart in height."""

OUT_OF_SIGHT = """() => {
    window.rehearsals = {drawn: 0, gone: 0};
    const note = (nodes, what) => nodes.forEach(node => {
        if (node.style?.left === '-9999px') window.rehearsals[what]++;
    });
    new MutationObserver(found => found.forEach(change => {
        note(change.addedNodes, 'drawn');
        note(change.removedNodes, 'gone');
    })).observe(document.body, {childList: true});
}"""


@pytest.fixture
def paused(server: lab.Server) -> Iterator[None]:
    """Let the server's folder hold the recorded runs alone, as they were when this process supervised one of them."""
    with lab.own_runs(server) as runs:
        for name in PAIR:
            shutil.copytree(RECORDED / name, runs / name)
            run = RunDir(runs / name)
            events: list[Any] = read_events(run.events)
            if name == PAIR[0]:
                steps = [event for event in events if event["type"] == "step"]
                moment = steps[int(REACHED * len(steps))]["time"]
            run.events.unlink()
            run.steps_tail.unlink()
            for event in events:
                if event["time"] <= moment:
                    append_event(run.events, event.pop("type"), **event)
        write_json(RunDir(runs / PAIR[0]).launcher, {"supervisor": this_process()})
        yield
        append_event(RunDir(runs / PAIR[0]).events, "status", state="stopped", message="")


def show(page: Any, index: int) -> None:
    page.evaluate(
        """(index) => {
            const content = window.jupyterapp.shell.currentWidget.content;
            content.activeCellIndex = index;
            return content.scrollToCell(content.widgets[index], 'start').then(() => 1);
        }""",
        index,
    )


def settled(page: Any, plots: int) -> None:
    """Wait until the plots have drawn themselves, and the sliders have been rehearsed, which is done after that."""
    page.wait_for_function(f"() => document.querySelectorAll('.jupyter-widgets .js-plotly-plot').length >= {plots}")
    page.wait_for_function("() => window.rehearsals.gone")
    lab.wait_until_still(page)


@pytest.mark.usefixtures("paused")
def test_what_the_readme_shows_can_be_read_in_wide_and_narrow_windows(
    lab_page: Any, server: lab.Server, picture: Any
) -> None:
    page = lab_page
    lab.write_notebook(server.root / "recorded.ipynb", CELLS)
    lab.open_notebook(page, server, "recorded.ipynb")
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area').then(() => 1)")
    page.evaluate(OUT_OF_SIGHT)
    lab.run_all(page)
    unreadable = {}
    for width in (1360, 760):
        page.set_viewport_size({"width": width, "height": 1000})
        for index, name in ((0, "lab-live"), (1, "lab-what-if")):
            show(page, index)
            settled(page, plots=3)
            unreadable[f"{name} {width}"] = page.evaluate(UNREADABLE)
            picture(page, name if width == 1360 else f"{name}-narrow")
        apart = page.evaluate(BUTTONS_APART)
        assert len(apart) == len(PAIR)
        assert max(apart) < 12, f"in a window of {width} pixels each run's button is in the line of its name"
    assert not any(unreadable.values()), unreadable
    assert page.evaluate("() => window.rehearsals") == {"drawn": 1, "gone": 1}, "of the sliders, once"
    assert page.refused == []
