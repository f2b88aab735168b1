"""From a slider of `wb.what_if` to its picture, in a real JupyterLab in headless Chromium.

    python benchmarks/what_if.py

Scaled BERT on H200s: each of the four sliders is moved by arrow keys, forth and back. Prints for every slider, and for
all of them, the median and the longest time from the key to the last change of the page (the heading and the figure, or
the sentence that says why nothing fits), and what the kernel took of it. Goal, on two idle cores: 300 ms.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import options
from live import in_kernel, laboratory

CELL = """
import workbench as wb
scaled = wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30)
experiment = wb.Experiment(model=scaled, data=wb.data.corpus("demo"), global_batch=256, seq_len=512)
panel = wb.what_if(experiment, wb.Cluster.of("h200", gpus=4))
panel
"""
MOVES = {
    "GPUs": ["ArrowRight"] * 3 + ["ArrowLeft"] * 4,
    "GiB each": ["PageDown"] * 5 + ["PageUp"] * 5,
    "global batch": ["ArrowRight"] * 3 + ["ArrowLeft"] * 3,
    "micro-batch": ["ArrowRight"] * 5 + ["ArrowLeft"] * 5,
}
SETTLED_MS = 1200
"""The page has changed for the last time when nothing has for so long."""
WATCH = """() => {
    window.moved = window.changed = 0;
    const panel = document.querySelector('.workbench-live');
    document.addEventListener('keydown', () => { window.moved = performance.now(); }, true);
    new MutationObserver(found => {
        const slider = '.widget-slider, .widget-readout, .widget-inline-hbox';
        if (found.some(f => !(f.target.closest ? f.target : f.target.parentElement)?.closest(slider)))
            window.changed = performance.now();
    }).observe(panel, {subtree: true, childList: true, attributes: true, characterData: true});
}"""


def main() -> None:
    asked = options.parsed(options.parser(__doc__))
    import lab

    moves = {name: keys[:1] for name, keys in MOVES.items()} if asked.tiny else MOVES
    with tempfile.TemporaryDirectory() as folder, laboratory(Path(folder)) as (server, page):
        lab.write_notebook(server.root / "what_if.ipynb", [CELL])
        lab.open_notebook(page, server, "what_if.ipynb")
        lab.run_all(page)
        page.wait_for_selector(".workbench-live .js-plotly-plot .main-svg")
        page.wait_for_timeout(2 * SETTLED_MS)  # the page draws a second time, unasked
        page.evaluate(WATCH)
        times = {name: [move(page, name, key) for key in keys] for name, keys in moves.items()}
    if asked.out:
        asked.out.write_text(json.dumps(times, indent=1) + "\n")
    for name, moves in [*times.items(), ("all", list(itertools.chain(*times.values())))]:
        whole, kernel = ([pair[part] for pair in moves] for part in (0, 1))
        print(
            f"{name}: {len(moves)} moves, slider to picture: median {statistics.median(whole):.0f} ms, longest "
            f"{max(whole):.0f} ms; of that in the kernel: median {statistics.median(kernel):.0f} ms, longest "
            f"{max(kernel):.0f} ms"
        )


def move(page: Any, slider: str, key: str) -> tuple[float, float]:
    """(from the key to the last change of the page, the kernel's share of it), in ms."""
    handle = page.locator(".workbench-live .widget-slider", has_text=slider).locator(".noUi-handle").first
    handle.focus()
    page.evaluate("() => { window.changed = 0; }")
    handle.press(key)
    page.wait_for_function(f"() => window.changed && performance.now() - window.changed > {SETTLED_MS}")
    took_ms = json.loads(page.evaluate("() => JSON.stringify(window.changed - window.moved)"))
    return float(took_ms), 1e3 * float(in_kernel(page, "panel.answered_s"))


if __name__ == "__main__":
    main()
