"""Each figure of the documentation that was measured, predicted or computed is that of its raw file.

`FIGURES` is the table: one entry for each group of figures, which reads raw files, recorded runs or executed notebooks
and yields facts. A fact is a page and a sentence of it, or a page, the header of a table in it, and the table's rows:
a list of all of them, or some by their first cell. A cell is compared with a text, with a number in the decimals that
the cell has, or with several of either; None is not compared.
"""

from __future__ import annotations

import collections
import gzip
import importlib
import json
import re
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import BENCHMARKS, HISTORY, README, RESULTS, ROOT, raw, shows, table, words

import workbench as wb
from benchmarks.coordinate_check import CHANGE, HIDDEN, STREAM, WIDTHS, coordinate_check, drift
from tests.distributed import zoo
from workbench.analysis.contrast import DRAWS_AT_STEP_10
from workbench.cost import Cluster
from workbench.cost.profile import break_even_sparsity
from workbench.cost.sparse_matrices import STORED_PRODUCTS, none_and_all_stored
from workbench.figures.figure import PLOTLY_MIME

SCALING, SPARSITY, GRIDS, KERNELS = (f"docs/{name}.md" for name in ("scaling", "sparsity", "grids", "sparse_kernels"))
GALLERY = "docs/gallery.md"
Fact = tuple[Any, ...]
FIGURES: list[Callable[[], Iterator[Fact]]] = []


def figures(facts: Callable[[], Iterator[Fact]]) -> Callable[[], Iterator[Fact]]:
    FIGURES.append(facts)
    return facts


def is_shown(cell: str, value: Any) -> bool:
    if value is None or isinstance(value, str):
        return value in (None, cell)
    if isinstance(value, tuple):
        parts = cell.split(", ")
        return len(parts) == len(value) and all(map(is_shown, parts, value))
    return shows(cell, value)


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the ratio of the medians of the steps of two trainings."""
    return statistics.median(values) / statistics.median(others)


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def span(values: Sequence[float], form: str = ".1f") -> str:
    """Return the least and the largest of some values, or the one that they share."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


# Computed, or measured on CPUs


@figures
def width_rule() -> Iterator[Fact]:
    runs, proxy = raw("width_rule_1core.json")["runs"], (64, 4)
    sizes = list(product((64, 128, 256), (4, 8)))
    found = {(size, rule): dict[int, float]() for size in sizes for rule in (True, False)}
    for run in runs:
        size = run["width"], run["depth"]
        for rule in (True, False) if size == proxy and run["rule"] else (run["rule"],) if size != proxy else ():
            found[size, rule][run["position"]] = run["held_out_loss"]
    best = {key: min(losses, key=losses.__getitem__) for key, losses in found.items()}
    lowest = {key: losses[best[key]] for key, losses in found.items()}
    centre = best[proxy, True]
    rates = [[(1e-2 * 2 ** (best[size, r] / 2), str(best[size, r] - centre)) for r in (True, False)] for size in sizes]
    yield BENCHMARKS, "| width × depth | best rate", [[None, *one, *other] for one, other in rates]
    losses = [[found[size, rule][centre] for rule in (True, False)] for size in sizes]
    steps = [[None, one[1], other[1], *pair] for (one, other), pair in zip(rates, losses, strict=True)]
    yield SCALING, "| width × depth | steps", steps
    larger = [size for size in sizes if size != proxy]
    costs = [max(found[s, rule][centre] - lowest[s, rule] for s in larger) for rule in (True, False)]
    ends = [span([lowest[size, rule] for size in larger], ".2f") for rule in (True, False)]
    yield SCALING, f"costs the fifth {costs[0]:.2f} nats"
    yield SCALING, f"the proxy's rate costs up to {costs[1]:.2f} nats"
    yield SCALING, f"end at {ends[1]} without the rule"
    yield SCALING, f"at {ends[0]} with it; the proxy ends at {lowest[proxy, True]:.2f}"
    yield SCALING, f"({len(runs)} runs, "


@figures
def coordinate_checks() -> Iterator[Fact]:
    page = (ROOT / SCALING).read_text().partition("## Does the model do as the rule says?")[2]
    made: dict[str, Any] = {"wb": wb}
    exec(page.partition("```python\n")[2].partition("Path(")[0], made)
    widths = coordinate_check(made["tried"], "width", WIDTHS)
    depths = coordinate_check(made["tried"], "depth", (2, 6, 18, 54))
    pairs = ((widths, HIDDEN), (widths, CHANGE.format(HIDDEN)), (depths, STREAM), (depths, CHANGE.format(STREAM)))
    drifts = [[None, *(round(drift(each, size), 2) for each in check)] for check, size in pairs]
    yield SCALING, "| after four steps of this experiment |", drifts
    content = raw("coordinate_check_muon_1core.json")
    with_muon = [[None, *drifts] for of_axis in content.values() for drifts in of_axis.values()]
    yield SCALING, "| after four steps with Muon |", with_muon


@figures
def published_law() -> Iterator[Fact]:
    at = [f"{wb.analysis.KAPLAN.difference(303e6, 2.39e9, tokens):.2f}" for tokens in (40e6, 1e9, 10e9)]
    yield SCALING, f"law expects {at[0]} nats between them after 40 M tokens, {at[1]} after 1 G and {at[2]} after 10 G."

    def elements(layers: int, width: int, heads: int = 1, **named: Any) -> int:
        options = {"layout": "pre_ln", "next_sentence": False, "dropout": 0.0, **named}
        return wb.analysis.parameters_without_embeddings(wb.models.bert(width, layers, heads, **options))

    shares = []
    for layers, width in ((4, 128), (54, 1920)):
        tables = (30522 + 512 + 2) * width
        shares.append(100 * tables / (tables + elements(layers, width, width // 64)))
    yield SCALING, f"the tables are {shares[0]:.0f} % of a model of 4 layers × 128 and {shares[1]:.1f} % of"


@figures
def tuning_of_the_demo() -> Iterator[Fact]:
    runs = raw("demo_tuning_1core.json")["runs"]
    losses = {(run["rate"], run["initializer_range"]): run["held_out_loss"] for run in runs}
    assert min(losses, key=losses.__getitem__) == (7e-3, 0.15)
    low, best, high, narrow, wide = (
        f"{losses[at]:.4f}" for at in ((5e-3, 0.15), (7e-3, 0.15), (1e-2, 0.15), (7e-3, 0.1), (7e-3, 0.2))
    )
    yield BENCHMARKS, f"(7e-3 and 0.15, {best} nats): {low} with 5e-3, {high} with 1e-2"
    yield BENCHMARKS, f"{narrow} with initial weights of 0.1 and {wide} with 0.2"


@figures
def tokenising() -> Iterator[Fact]:
    rows = raw("tokenizing_2cores_busy.json")["rows"]
    assert rows[0]["bare_processes_mb_per_cpu_s"] > rows[0]["bare_threads_mb_per_cpu_s"]
    shares = [percent(row["share_of_bare_mb_per_cpu_s"]) for row in rows]
    yield BENCHMARKS, f"by processor time | 90 % | **{shares[0]}** | 2 CPU cores with other work"
    yield BENCHMARKS, f"| the same, streamed | 90 % | **{shares[1]}** |"
    of_rounds = [share for row in rows for share in row["share_of_bare_mb_per_s_of_each_round"]]
    yield BENCHMARKS, f"went from {span(of_rounds)} there"
    found = {(row["way"], row["megabytes"]): row for row in raw("tokenizing_2cores_idle.json")["rows"]}
    large = [found[way, 1000] for way in ("stored", "streamed")]
    growth = ", ".join(percent(row["peak_mb"] / found[row["way"], 100]["peak_mb"] - 1, 1) for row in large)
    yield BENCHMARKS, "| {:.0f} MB; {:.0f} MB; {} |".format(*(row["peak_mb"] for row in large), growth)
    yield BENCHMARKS, "| | {:.1f} s; {:.1f} s | the same |".format(*(row["first_batch_s"] for row in large))


@figures
def contrasts() -> Iterator[Fact]:
    means = raw("contrast_verdicts.json")["means"]
    named = {"found with `scatter`": ("with", "found"), "found without `scatter`": ("without", "found")}
    named |= {"false with `scatter`, of equal pairs": ("with", "false"), "false without": ("without", "false")}
    rows = {
        name: [means[f"{seeds} seeds, {known} scatter"][verdict] for seeds in (1, 2, 3, 5)]
        for name, (known, verdict) in named.items()
    }
    yield "docs/analysis.md", "| seeds of each |", rows
    families = raw("contrast_verdicts.json")["families"]
    shares = {
        name: [
            statistics.mean(kind[share] for kind in kinds.values())
            for share in ("false", "uncorrected", "found", "covered")
        ]
        for name, kinds in families.items()
    }
    yield "docs/analysis.md", "| sweep, compared with the best |", shares
    yield "docs/analysis.md", f"some difference in {percent(shares['8 configurations, 3 seeds'][1])} of sweeps"


@figures
def noise_level() -> Iterator[Fact]:
    models = raw("noise_1core.json")["models"]
    rows = {
        name: [tuple(each["rounding"][1:]), tuple(each["draws"]), tuple(each["seeds"])] for name, each in models.items()
    }
    yield "docs/analysis.md", "| model | rounding at step 10, 100 |", rows
    low, high = (pick(each["draws"][1] for each in models.values()) for pick in (min, max))
    assert (float(f"{low:.1g}"), float(f"{high:.1g}")) == DRAWS_AT_STEP_10


PLANTED = {
    "flipped_start": "begins with the rows of a matrix in the other order",
    "doubled_gradient": "counts the gradient of a matrix twice",
    "lost_reduction": "leaves the other rank out of reductions",
    "other_divisor": "divides the loss by another number of labels",
    "less_dropout": "drops less in one block",
    "earlier_weights": "computes with the weights of the step before",
    "other_norm": "clips by a larger norm",
    "other_rate": "learns faster",
}
"""Faults of `benchmarks/bisect_faults.py`, in the words of the page."""


@figures
def bisections() -> Iterator[Fact]:
    units = raw("bisect_faults_2cores.json")["units"]
    cells = [(unit, row) for unit, rows in units.items() for row in rows]
    table = {}
    for fault, name in PLANTED.items():
        own = [(unit, row) for unit, row in cells if row["fault"] == fault]
        sizes = sorted({row["size"] for _, row in own}, reverse=True)
        found = [
            ", ".join(
                str(sum(r["is_fault"] for unit, r in own if f", {p}, " in unit and r["size"] == s)) for s in sizes
            )
            for p in ("fp32", "bf16")
        ]
        all_found = [row for _, row in own if row["is_fault"]]
        named = sum(row["ranks"] == [1] for row in all_found)
        table[name] = [str(len(own) // len(sizes) // 2), *found, f"{named} of {len(all_found)}"]
    yield "docs/how-to/bisect.md", "| what rank 1 does |", table
    right = [row for _, row in cells if row["fault"] is None]
    called, nearest = sum(row["is_fault"] for row in right), max(row["excess"] for row in right)
    told = f"Of {len(right)} right plans, {called or 'none'} is called faulty"
    yield "docs/how-to/bisect.md", f"{told}; the nearest comes to {nearest:.2g} of its bound."


@figures
def planning_time() -> Iterator[Fact]:
    content = raw("planning_time_1core.json")
    parts = ("capture_s", "profile_s", "search_s", "all_s")
    rows = [[None, None, *(found[part] for part in parts)] for found in content["rows"]]
    yield BENCHMARKS, "| model | cluster | capture |", rows
    shown = table(BENCHMARKS, "| model | cluster | capture |")
    assert [cells[1].replace(",", "") for cells in shown] == [found["cluster"] for found in content["rows"]]
    moved = content["sliders"]["picture"]
    yield BENCHMARKS, f"{moved['moves']} moves, median {moved['median_ms']} ms, longest {moved['longest_ms']} ms"
    scaled, gpt = (content["rows"][at]["all_s"] for at in (1, 3))
    yield BENCHMARKS, f"| {scaled:.1f} s; {gpt:.1f} s; {moved['longest_ms']} ms |"


@cache
def recorded(name: str) -> Any:
    return wb.load_run(ROOT / "notebooks" / "recorded" / f"bert-{name}")


@cache
def summary(name: str) -> dict[str, str]:
    """Return a run's summary, with the measured and predicted step and peak as the tables write them."""
    found = wb.runs.summary(recorded(name))
    own = dict(zip(found.columns, found.rows[0], strict=True))
    for what in ("step", "peak"):
        measured, predicted = (own[f"{what}, {how}"].split()[0] for how in ("measured", "predicted"))
        own[what] = f"{measured} ({predicted})"
    return own


def held_out(name: str, tokens: float, column: str = "eval_loss") -> float:
    """Return the held-out loss of a recorded run that was nearest to so many tokens."""
    known = recorded(name).evaluations()
    return float(known[column][int(abs(known.tokens - tokens).argmin())])


def device_minutes(name: str) -> float:
    return float(60 * recorded(name).history().gpu_hours[-1])


@figures
def pairs() -> Iterator[Fact]:
    names = ["large-20261125-015020", "large-20261125-015021", "large-20261125-160952"]
    names += ["scaled-20261125-015026", "scaled-20261125-015030", "scaled-20261125-160959"]
    names += ["large-20261125-230852", "scaled-20261125-230858"]
    ends = [float(recorded(name).evaluations().eval_loss[-1]) for name in names]
    of = [recorded(name).experiment for name in names]
    pairs = ((0, 3), (1, 4), (2, 5), (6, 7))
    behind = {scaled: ends[scaled] - ends[large] for large, scaled in pairs}
    rows = {
        "seed, eps": [f"{each.seed}, {each.optimizer.eps:.0e}".replace("e-0", "e-") for each in of],
        "held-out loss after 1 M tokens": [held_out(name, 1e6) for name in names],
        **{f"after {at} M": [held_out(name, at * 1e6) for name in names] for at in (8, 16, 24, 30)},
        "tokens/s": [summary(name)["tokens/s"] for name in names],
        "MFU, whole head counted": [summary(name)["MFU"] for name in names],
        "device-minutes": [device_minutes(name) for name in names],
        "behind BERT-Large of its seed and eps": [behind.get(at) for at in range(len(names))],
    }
    titles = [cells[0] for cells in table(BENCHMARKS, "| run | BERT-Large |")]
    for what in ("step", "peak"):
        [title] = [title for title in titles if title.startswith(f"{what}, measured (predicted)")]
        rows[title] = [summary(name)[what] for name in names]
    yield BENCHMARKS, "| run | BERT-Large |", rows
    yield BENCHMARKS, f"BERT-Large by {abs(ends[0] - ends[2]):.3f} with the same seed"
    yield BENCHMARKS, f"scaled BERT by {abs(ends[4] - ends[5]):.3f} against another"
    template = (ROOT / "templates" / "scaling_ladder.ipynb").read_text()
    told = re.findall(r"\(30e6 / real_sizes\[1\], -([\d.]+)\)", template)
    assert list(map(float, told)) == [round(each, 3) for each in behind.values()]
    width, depth, _, again = (f"{each:.2f}" for each in behind.values())
    assert depth == again
    yield SCALING, f"ended {depth} nats behind BERT-Large with the rule in two pairs"
    yield SCALING, f"and {width} behind with `depth_rule=False`"
    yield SCALING, f"two seeds of BERT-Large are {abs(ends[0] - ends[1]):.2f} apart"
    yield SCALING, "from 8 to 11 M tokens, and from 13 M on it changes by less than 0.04"
    for pair in pairs:
        large, scaled = (recorded(names[at]).evaluations() for at in pair)
        apart = scaled.eval_loss - large.eval_loss
        assert 7.5e6 < large.tokens[apart.argmax()] < 11.5e6
        assert np.ptp(apart[large.tokens > 12.5e6]) < 0.04


@figures
def pair_with_muon() -> Iterator[Fact]:
    names = large, scaled = "large-20261127-193809", "scaled-20261127-193814"
    at = (8e6, 16e6, 30e6, 48e6, 66e6)
    columns = {"": "eval_loss", " with 30 % masked": "masked_30", " on held-out prose": "prose"}
    columns |= {" on held-out manuals": "manuals"}
    named = {"BERT-Large": large, "scaled BERT": scaled}
    rows = {row: [held_out(name, each) for each in at] for row, name in named.items()}
    for row, column in columns.items():
        rows[f"difference{row}"] = [held_out(scaled, each, column) - held_out(large, each, column) for each in at]
    yield BENCHMARKS, "| held-out loss after |", rows
    histories = [recorded(name).history() for name in names]
    late = [float(each.loss[(each.tokens > 60e6) & (each.tokens < 66.75e6)].mean()) for each in histories]
    told = f"from 60 to 66.7 M tokens is {late[0]:.3f} and {late[1]:.3f}, so that scaled BERT is"
    yield BENCHMARKS, f"{told} {late[0] - late[1]:.3f}"
    facts = {}
    for row, name in zip(("BERT-Large", "scaled BERT"), names, strict=True):
        own, minutes = summary(name), f"{device_minutes(name):.1f}"
        facts[row] = [None, f"{own['step']} ms", own["tokens/s"], own["MFU"], f"{own['peak']} GiB", minutes]
    yield BENCHMARKS, "| | plan | step, measured (predicted) | tokens/s |", facts
    contrast = wb.contrast([recorded(name) for name in names], scatter=0.03)
    [ahead] = [re.search(r"by ([\d.]+ ± [\d.]+)", each.describe())[1] for each in contrast.differences]  # type: ignore[index]
    yield from ((page, ahead) for page in (BENCHMARKS, SCALING))
    flops = next(each for each in contrast.standings if each.axis == "flops").losses
    assert flops["bert-large"].value < flops["bert-scaled"].value
    yield README, "At equal FLOPs (not drawn) the smaller model is ahead"


@figures
def seeds_of_the_pair() -> Iterator[Fact]:
    large = ("large-20261127-193809", *(f"large-muon-seed{seed}" for seed in (1, 2, 3)))
    scaled = ("scaled-20261127-193814", "scaled-muon-seed1")
    adamw = ("large-adamw-seed0", "scaled-adamw-seed0")
    marks = (8e6, 16e6, 20e6, 22e6, 28e6, 48e6, 66e6, 76e6)
    ends = {tokens: [held_out(name, tokens) for name in large] for tokens in marks}

    def reached(name: str, base: Callable[[float], float]) -> list[Any]:
        last = recorded(name).row()["tokens"]
        return [held_out(name, tokens) - base(tokens) if tokens <= last + 1e5 else "" for tokens in marks]

    def mean(tokens: float) -> float:
        return statistics.mean(ends[tokens])

    yield (
        BENCHMARKS,
        "| loss on held-out prose after |",
        {
            "BERT-Large, mean of four seeds": list(map(mean, marks)),
            "their standard deviation": [statistics.stdev(ends[tokens]) for tokens in marks],
            "scaled BERT, seed 0, to that mean": reached(scaled[0], mean),
            "scaled BERT, seed 1, to that mean": reached(scaled[1], mean),
            "BERT-Large, AdamW": reached(adamw[0], lambda _: 0.0),
            "scaled BERT, AdamW": reached(adamw[1], lambda _: 0.0),
            "difference, AdamW": reached(adamw[1], lambda tokens: held_out(adamw[0], tokens)),
        },
    )
    prose, manuals = (
        statistics.mean(held_out(name, 66e6, column) for name in large) - held_out(scaled[0], 66e6, column)
        for column in ("eval_loss", "manuals")
    )
    scatter = statistics.stdev(ends[66e6])
    yield (
        README,
        f"{prose:.3f} nats below the mean of four seeds of BERT-Large, whose standard deviation is {scatter:.3f}",
    )
    yield BENCHMARKS, f"On held-out manuals it is {manuals:.3f} below the mean at 66 M"
    behind = held_out(adamw[1], 28e6) - held_out(adamw[0], 28e6)
    yield README, f"with AdamW its loss is {behind:.2f} higher after 28 M tokens, one seed each"
    yield SCALING, f"and {prose:.3f} below the mean of four seeds, which scatter by {scatter:.3f}"
    found = repr(wb.contrast([recorded(name) for name in (*large, *scaled)]))
    assert "bert-scaled is lower than bert-large (-0.048 ± 0.022, 90% interval, 2 and 4 seeds" in found
    yield BENCHMARKS, "0.048 ± 0.022 at 22 M (two and four seeds)"
    end = held_out(adamw[0], 76e6)
    yield BENCHMARKS, f"ends {end - mean(76e6):.2f} nats above its runs with Muon"
    known = [recorded(name).evaluations() for name in large]
    passed = known[0].tokens[np.mean([each.eval_loss for each in known], axis=0) < end][0]
    yield BENCHMARKS, f"those pass AdamW's last loss after {passed / 1e6:.0f} M tokens"
    told = {f"BERT-Large, Muon, seed {seed}": large[seed] for seed in (1, 2, 3)} | {"BERT-Large, AdamW": adamw[0]}
    told |= {"scaled BERT, Muon": scaled[1], "scaled BERT, AdamW": adamw[1]}
    own = {row: summary(name) for row, name in told.items()}
    rows = {row: [f"{o['step']} ms", o["tokens/s"], o["MFU"], f"{o['peak']} GiB"] for row, o in own.items()}
    yield BENCHMARKS, "| | step, measured (predicted) | tokens/s | MFU |", rows


@figures
def grid_of_gpt3() -> Iterator[Fact]:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(RESULTS / "gpt_sweep_2xH200_850c99f2.tar.xz") as packed:
        packed.extractall(folder)
        every, limited = (wb.sweeps.load_grid(f"{folder}/{name}-dfe35941") for name in ("cells", "cells-40gib"))
        cells, order, of_limit = every.cells(), every.rank_correlation, limited.rank_correlation
    ways = {"two replicas": (1, 1), "two stages of a pipeline": (1, 2), "two tensor-parallel ranks": (2, 1)}
    step = {tuple(cell.choices[axis] for axis in ("tensor", "pipeline", "micro_batch")): cell for cell in cells}
    rows = [
        [name, *(f"{c.predicted_ms:.0f} / {c.step_ms:.0f}" for size in (1, 2, 4, 8, 16) for c in [step[(*way, size)]])]
        for name, way in ways.items()
    ]
    told = [[cell.replace("*", "") for cell in row] for row in table(GRIDS, "| | micro-batch 1 | 2 | 4 | 8 | 16 |")]
    assert told == rows
    measured = [cell.step_ms for cell in cells]
    errors = [abs(cell.predicted_ms / cell.step_ms - 1) for cell in cells]
    memory = [abs(cell.plan.peak_bytes / cell.peak_bytes - 1) for cell in cells]
    middle, largest = percent(statistics.median(errors), 1), percent(max(errors), 1)
    assert min(cells, key=lambda cell: cell.predicted_ms).step_ms == min(measured)
    yield GRIDS, f"The rank correlation is {order:.2f}, the median error of a step {middle}, of its memory"
    yield GRIDS, f"of its memory {percent(statistics.median(memory), 1)}"
    yield GRIDS, f"takes {max(measured) / min(measured):.2f} times as long as the fastest"
    yield README, f"median {middle}, largest {largest}; the fastest of the {len(cells)}"
    yield README, f"{len(cells)} plans of GPT-3 1.3B, predicted before they ran, were off by {middle} in the median"
    yield GRIDS, f"a rank correlation of {of_limit:.2f}, and the planner's choice"
    entries = raw("throughput_gpt3_2xH200_850c99f2.json")["measurements"]
    ours, *peers = (statistics.median(entry["step_ms"]) for entry in entries)
    yield GRIDS, f"{min(peers):.0f} ms (two replicas, micro-batch 16), {peers[0]:.0f}"
    yield GRIDS, f"took {ours:.0f} ms, {min(peers) / ours:.2f} times as fast"
    yield README, f"GPT-3 1.3B, 2,048 tokens | {min(peers) / ours:.3f} times as fast"
    profiled, again = [], raw("tensor_profile_2xH200_5637413a.json")["measurements"][1:]
    for entry in again:
        reductions = sum(int(told["calls"]) for name, told in entry["collectives"].items() if "bf16" in name)
        profiled.append((statistics.median(entry["step_ms"]), reductions, entry["profile"][0]["idle"]))
    (ms, many, idle), (_, few, shorter) = profiled
    yield GRIDS, f"of a step of {ms:.0f} ms with {many:,} all-reduces, the GPU stands still for {idle:.0f} ms, "
    yield GRIDS, f"{idle / many:.3f} ms around each, and of one with {few}, four samples at a time, for "
    yield GRIDS, f"for {shorter:.0f} ms, {shorter / few:.3f} each"
    added = [step[2, 1, size].predicted_ms + 0.04 * 97 * 32 / size for size in (1, 2, 4, 8, 16)]
    *first, last = (f"{each:.0f}" for each in added)
    yield GRIDS, f"become {', '.join(first)} and {last}"


@figures
def opt_on_two_gpus() -> Iterator[Fact]:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(RESULTS / "opt_zero_2xH200_5637413a.tar.xz") as packed:
        packed.extractall(folder)
        grids = [wb.sweeps.load_grid(f"{folder}/opt/zero-{devices}-None-0d60b1d3") for devices in (1, 2)]
        measured = [cell for grid in grids for cell in grid.cells()]
        rows = []
        for cell in measured:
            memory = f"{cell.plan.peak_bytes / 2**30:.1f} / {cell.peak_bytes / 2**30:.1f} GiB"
            step = f"{cell.predicted_ms:.1f} / {cell.step_ms:.1f} ms"
            rows.append(
                [str(cell.plan.world), str(cell.plan.zero), f"{65536e3 / cell.step_ms:,.0f}", step, memory, None]
            )
        worst = min(cell.predicted_ms / cell.step_ms - 1 for cell in measured)
        stored, streamed = (
            wb.load_run(f"{folder}/opt/opt-125m-{name}") for name in ("stored-6ceb13f8", "streamed-1f51b6fb")
        )
        ends = [run.evaluations().eval_loss[-1] for run in (stored, streamed)]
        rescue = wb.sweeps.load_sweep(f"{folder}/opt/rescue-2ceb9d35")
        last = {}
        for row in rescue.rows():
            loss = row.runs[0].history().loss
            last[tuple(row.values.values())] = float(loss[-max(1, len(loss) // 10) :].mean())
    yield GALLERY, "| devices | ZeRO | tokens/s |", rows
    yield GALLERY, f"ZeRO 3 was predicted {-100 * worst:.1f} % too fast"
    assert f"{ends[0]:.3f}" == f"{ends[1]:.3f}"
    yield GALLERY, f"ended at the same held-out loss, {ends[0]:.3f}"
    yield GALLERY, f"a rate of 1e-2 ended at {last[1e-2, 16]:.2f}, 3e-4 at {last[3e-4, 16]:.2f} with batches of 16"
    yield GALLERY, f"3e-6 with batches of 128 was at {last[3e-6, 128]:.2f}"


@figures
def frontier_on_two_gpus() -> Iterator[Fact]:
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(RESULTS / "gpt_frontier_2xH200_438a0c04.tar.xz") as packed,
    ):
        packed.extractall(folder)
        cells = wb.sweeps.load_grid(f"{folder}/frontier/ways-66c32828").cells()
        profile = Path(folder, "profiles", "zero3_13b_rank0_kernels.json.gz").read_bytes()
    kernels = json.loads(gzip.decompress(profile))
    zero3, tensor, pipeline, zero1_host, zero3_host, zero1, fastest = cells
    refused = [None, "refused: needs 163.0 GiB", ""]
    rows = [
        [
            None,
            f"{cell.predicted_ms:,.0f} / {cell.step_ms:,.0f} ms",
            f"{cell.plan.peak_bytes / 2**30:.1f} / {cell.peak_bytes / 2**30:.1f} GiB",
        ]
        for cell in (zero3, tensor, pipeline, zero1_host, zero3_host, zero1, fastest)
    ]
    yield GALLERY, "| plan | step, predicted / measured |", [*rows[:3], refused, *rows[3:]]
    errors = [abs(cell.predicted_ms / cell.step_ms - 1) for cell in cells]
    memory = max(abs(cell.plan.peak_bytes / cell.peak_bytes - 1) for cell in cells)
    middle, largest = percent(statistics.median(errors), 1), percent(max(errors), 1)
    yield README, f"median {middle}, largest {largest}; largest {percent(memory, 1)}"
    assert max(errors) == zero3.predicted_ms / zero3.step_ms - 1
    yield GALLERY, f"ZeRO 3 was predicted {percent(max(errors), 1)} too slow"
    yield GALLERY, f"slower than the pipeline, by {percent(zero1.step_ms / pipeline.step_ms - 1, 1)}"
    yield GALLERY, f"{percent(tensor.step_ms / zero1.step_ms - 1, 1)} slower than it"
    yield GALLERY, f"{(zero1.peak_bytes - tensor.peak_bytes) / 2**30:.1f} GiB leaner"
    host = zero3_host.step_ms / zero3.step_ms - 1
    saved = (zero3.peak_bytes - zero3_host.peak_bytes) / 2**30
    yield GALLERY, f"costs {percent(host)} under ZeRO 3 and saves {saved:.1f} GiB"
    steps = {
        entry["contender"]: statistics.median(entry["step_ms"])
        for entry in raw("peers_13b_2xH200_438a0c04.json")["measurements"]
        if "error" not in entry
    }
    ours, megatron, deepspeed = steps.values()
    yield GALLERY, f"took {megatron:,.0f} ms, the planner's choice {ours:,.0f}"
    yield GALLERY, f"took {deepspeed:,.0f} ms"
    took = collections.Counter[str]()
    for name, _stream, begun, ended in kernels["kernels"]:
        took[kernels["names"][name]] += (ended - begun) / 1e3
    copies, casts, sums = (
        sum(ms for name, ms in took.items() if any(part in name for part in parts))
        for parts in (("chunk_cat", "split_with_sizes"), ("multi_tensor_apply",), ("CUDAFunctor_add<fl",))
    )
    yield GALLERY, f"the copies, {copies:.0f} ms, wait"
    yield GALLERY, f"casts ({casts:.0f} ms) and sums ({sums:.0f} ms)"
    profiled = next(
        entry for entry in raw("zero_profile_2xH200_438a0c04.json")["measurements"] if "ZeRO 3" in entry["contender"]
    )
    waited, idle = statistics.median(profiled["step_ms"][1:]), max(each["idle"] for each in profiled["profile"])
    yield GALLERY, f"({waited:.1f} ms a step that is waited for, {profiled['in_a_row_ms']:.1f} ms in a row)"
    yield GALLERY, f"idle for {idle:.0f} of {profiled['profile'][0]['in all']:.0f} ms"


DEMO = {"bert-large-mini": "BERT-Large, mini", "bert-scaled-mini": "scaled BERT, mini"}


@figures
def losses_of_the_demo() -> Iterator[Fact]:
    content = raw("demo_2cores.json")
    entropy = content["unigram_entropy"]
    rows = [
        [str(run["seed"]), DEMO[run["model"]], run["training_loss"], loss, entropy - loss]
        for run in content["runs"]
        for loss in [run["held_out_loss"]]
    ]
    yield BENCHMARKS, "| seed | model |", rows
    ends, means, spreads, number = {}, {}, {}, {}
    for file in ("demo", "demo_adamw"):
        runs = raw(f"{file}_2cores.json")["runs"]
        ends[file] = [[run["held_out_loss"] for run in runs if run["model"] == name] for name in DEMO]
        means[file], spreads[file] = ([of(end) for end in ends[file]] for of in (statistics.mean, statistics.stdev))
        number[file] = ("no", "one", "two", "three", "four", "five")[len(ends[file][0])]
    (large, scaled), (of_large, of_scaled) = means["demo"], spreads["demo"]
    shown = f"{large:.3f} ± {of_large:.3f}, {scaled:.3f} ± {of_scaled:.3f}"
    yield README, f"{number['demo']} seeds, mean ± standard deviation | {shown}"
    yield BENCHMARKS, f"means are {large:.3f} and {scaled:.3f}"
    yield BENCHMARKS, f"between seeds {of_large:.3f} and {of_scaled:.3f}"
    best, worst = min(ends["demo"][0]), max(ends["demo"][1])
    yield BENCHMARKS, f"({worst:.3f}) is {best - worst:.3f} below the best"
    yield BENCHMARKS, f"of BERT-Large ({best:.3f})"
    yield BENCHMARKS, f"unigram entropy of the text is {entropy:.3f} nats"
    one, other = means["demo_adamw"]
    yield BENCHMARKS, f"the means of {number['demo_adamw']} seeds are {one:.3f} and {other:.3f}"
    yield BENCHMARKS, "deviations of {:.3f} and {:.3f}".format(*spreads["demo_adamw"])
    yield BENCHMARKS, f"ends {one - large:.2f} lower, the larger one {other - scaled:.2f}"
    yield BENCHMARKS, f"{large - scaled:.2f} in place of {one - other:.2f}"


@figures
def pilots_of_muon() -> Iterator[Fact]:
    runs = raw("muon_pilots_1core.json")["runs"]
    usual = {"algorithm": "muon", "depth_rule": False, "warmup_share": 0.1, "decay": 0.01, "batch": 64, "seed": 0}
    usual |= {"adamw_position": 0}

    def pilot(width: int, position: int, **changes: Any) -> float:
        key = {**usual, "width": width, "position": position, **changes}
        [loss] = [run["held_out_loss"] for run in runs if all(run[name] == value for name, value in key.items())]
        return float(loss)

    base = {position: pilot(32, position) for position in (-2, -1, 0, 1)}
    assert min(base, key=base.__getitem__) == -1
    yield (
        BENCHMARKS,
        (
            f"no lower than with 1.4e-2 ({base[-1]:.4f}): {base[-2]:.4f} with 1e-2, {base[0]:.4f} with 2e-2 "
            f"and {base[1]:.4f} with 2.8e-2 (`muon_pilots.py`"
        ),
    )
    page, larger = "docs/optimizers.md", [pilot(64, position) for position in (-2, -1, 0)]
    yield page, "{:.3f}, {:.3f} and {:.3f} with 1e-2, 1.4e-2 and 2e-2".format(*larger)
    short, without = pilot(32, -1, warmup_share=0.02), pilot(32, -1, decay=0.0)
    yield page, f"{base[-1]:.3f} with a warm-up of 10 %, {short:.3f} with 2 %"
    yield page, f"{without:.3f} without decay"
    doubled = [pilot(32, position, batch=128) for position in (-1, 0)]
    yield page, "{:.3f} at the same rate and {:.3f} at sqrt(2) times".format(*doubled)
    yield SCALING, f"{pilot(64, -1, depth_rule=True):.3f} with `depth_rule=True`"
    best: dict[int, dict[int, float]] = {}
    for run in raw("width_rule_muon_1core.json")["runs"]:
        if run["rule"] and run["depth"] == 4:
            best.setdefault(run["width"], {})[run["position"]] = run["held_out_loss"]
    at = {width: min(losses, key=losses.__getitem__) for width, losses in best.items()}
    for width, losses in best.items():
        assert {at[width] - 1, at[width] + 1} <= losses.keys(), "a worse rate on either side"
        assert abs(at[width] - at[64]) <= 1, "within a factor of sqrt(2)"
    yield (
        SCALING,
        "| width × 4 with Muon |",
        [[str(w), 1e-2 * 2 ** (at[w] / 2), best[w][at[w]], best[w][at[64]]] for w in sorted(best)],
    )


@figures
def simulated_cache_and_streams() -> Iterator[Fact]:
    found = {(row["block"], row["parts"]): row for row in raw("sparse_gradient_cache.json")}
    two, fifteen = found[16, 2], found[16, 15]
    reads = span([two[f"read_gb_with_{mb}_mb_cache"] for mb in (25, 40)])
    yield KERNELS, f"{reads} GB are read from memory, where {two['both_inputs_gb']:.1f} GB would do"
    assert shows("0.3", fifteen["read_gb_with_25_mb_cache"])
    yield KERNELS, f"the fp32 sums of the parts take {fifteen['sums_of_parts_gb']:.1f} GB more"
    supply = [raw(f"data_supply{name}_2cores.json")["predicted_over_measured"] for name in ("", "_prose")]
    pattern = r"\| ([\d.]+), ([\d.]+); prose that nothing was fitted on: ([\d.]+), ([\d.]+) \|"
    shown = re.search(pattern, words(BENCHMARKS)).groups()  # type: ignore[union-attr]
    assert all(map(shows, shown, (each[cores]["by_clock"] for each in supply for cores in ("1", "2"))))
    yield "docs/data.md", f"predictions were 1 to {100 * float(shown[3]) - 100:.0f} % too high on idle cores"


@figures
def grids() -> Iterator[Fact]:
    content = raw("grids_predicted.json")
    v100, h200 = content["grid-v100-200-cells"], content["grid-h200-200-cells"]
    yield GRIDS, f"A grid of {len(v100['cells'])} cells takes {v100['processor_s']:.1f} s of one core's time"
    yield GRIDS, f"one of {len(h200['cells'])} cells {h200['processor_s']:.1f} s for the four H200"
    steps = [cell["step_ms"] for cell in content["grid-v100"]["cells"] if cell["plan"]]
    yield GRIDS, f"takes {max(steps) / min(steps):.1f} times as long as the best"
    frontier = raw("frontier_predicted.json")["fastest_for_each_limit"]
    (gib, s), (more, less) = ((at["peak_bytes"] / 2**30, at["step_ms"] / 1e3) for at in (frontier[0], frontier[-1]))
    yield GRIDS, f"from {gib:.1f} GiB a device at {s:.1f} s a step"
    yield GRIDS, f"to {more:.1f} GiB at {less:.1f} s"
    content = raw("cell_time.json")
    first, second, first_before, before = (found["all processes"] for found in content["medians"].values())
    assert second < before / 2
    assert first < 1.05 * first_before, "the first is not slower"
    stored = raw("cell_time_stored_captures.json")
    now = stored["medians"]["ours, second launch"]
    assert now["all processes"] < second / 2
    clock_s = now["to the first step, by the clock"]
    yield (
        GRIDS,
        f"takes {now['all processes']:.1f} s of processor time, its steps included, and {clock_s:.1f} s by the clock",
    )
    yield GRIDS, f"took {second:.1f} s where each cell captured, and {before:.1f} s where each imported as well"
    taken = f"takes {now['all processes']:.1f} s of processor time, of which the ranks take {now['ranks']:.1f} s"
    yield BENCHMARKS, f"{taken} with their steps, and {clock_s:.1f} s by the clock to its first step"
    yield BENCHMARKS, f"(`{stored['commits']['ours']}`, medians of two kernels at a load of {stored['load']:.0f}"
    header, rows = "| | processor time, all processes |", []
    for (name, *_), found in zip(table(BENCHMARKS, header), content["medians"].values(), strict=True):
        order = ("all processes", "launcher", "ranks", "supervisor", *list(found)[-4:])
        rows.append([name, *(found[key] for key in order)])
        assert ("each run imported" in name) == (content["commits"]["beside"] in name)
    yield BENCHMARKS, header, rows


@figures
def tables_that_commands_fill_in() -> Iterator[Fact]:
    pages = {"any_model": "docs/models.md", "model_table": "docs/models.md", "live": BENCHMARKS}
    for command, page in pages.items():
        content = raw(f"{command}_2cores.json")
        made = "\n".join(importlib.import_module(f"benchmarks.{command}").table(content.get("rows", content)))
        text = (ROOT / page).read_text().partition(f"<!-- made by benchmarks/{command}.py -->\n")[2]
        assert text.startswith(f"{made}\n"), command
    rows = {row["name"]: row for row in raw("model_table_2cores.json")["rows"]}
    assert list(rows) == list(zoo.MODELS)
    largest = [max(found.values()) for row in rows.values() for found in row["differences"].values()]
    assert len(largest) == 10 * len(rows)
    assert max(largest) < 1e-5
    found = raw("live_2cores.json")["memory"]
    [each] = {found["history_mib"][at] * 2**20 / (found["step"] * (at + 1) / 4) for at in range(4)}
    yield "docs/dashboard.md", f"in {each:.0f} bytes per logged step and run"
    assert max(found["objects"]) < 1.02 * min(found["objects"])
    yield "docs/dashboard.md", "Python objects stays within 2 %"


# Executed notebooks


@cache
def notebook(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    return found


def outputs(name: str) -> Iterator[dict[str, Any]]:
    return (output for cell in notebook(name)["cells"] for output in cell.get("outputs", []))


@cache
def printed(name: str) -> str:
    """Return the texts that a notebook's cells put out."""
    kinds = ("text/plain", "text/markdown")
    texts = ((each.get("text", []), *(each.get("data", {}).get(k, []) for k in kinds)) for each in outputs(name))
    return "\n".join("".join(text) for each in texts for text in each)


def minutes(name: str) -> str:
    return f"{notebook(name)['metadata']['papermill']['duration'] / 60:.0f} minutes"


@figures
def losses_without_context() -> Iterator[Fact]:
    options = {"layout": "pre_ln", "next_sentence": False, "dropout": 0.0}
    demo = wb.models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64, max_positions=16, **options)
    text = wb.data.corpus("demo", vocab_size=64, masked_share=0.3)
    level = wb.analysis.context_free(wb.Experiment(model=demo, data=text, steps=1500, global_batch=64, seq_len=16))
    yield SCALING, f"level.unigram_entropy # {level.unigram_entropy:.2f} nats in the demo"
    yield SCALING, f"level.loss # {level.loss:.2f}: what is reachable"
    shown = (ROOT / "notebooks" / "bert_scaling_1xH100.ipynb").read_text()
    names = ("unigram entropy", "context-free prediction")
    entropy, loss = (float(re.search(rf"{name} ([\d.]+) nats", shown)[1]) for name in names)  # type: ignore[index]
    copying = level.unigram_entropy - level.loss
    yield SCALING, f"by {copying:.2f} nats in the demo, and by {entropy - loss:.1f} with 30,522 words"


@figures
def ladder_on_gpus() -> Iterator[Fact]:
    ladder, rows = printed("scaling_ladder_4xH200"), []
    for size, *cells in table(BENCHMARKS, "| layers × width | 4,000 steps |"):
        if "held out" in size:
            assert f"{cells[-1].partition(' ')[0]} measured over 3 seeds" in ladder
            rows.append([size, *cells])
            continue
        sweep = ladder.partition(f"Sweep bert-{size.replace(' × ', 'x')}-sweep")[2].partition("Objective")[0]
        of_steps = (rf"^{steps} +([\d.]+) +([\d.]+) +3 finished" for steps in (4000, 6500, 10500))
        found = [float(each) for line in of_steps for each in re.findall(line, sweep, re.MULTILINE)[0]]
        rows.append([size, *(f"{m:.3f} ({d:.3f})" for m, d in zip(found[::2], found[1::2], strict=True))])
    yield BENCHMARKS, "| layers × width | 4,000 steps |", rows
    line = r"- (\S+ × \S+ and \S+ × \S+) after \S+ M tokens .*: the larger ends ([\d.]+) nats lower"
    found_pairs = dict[str, list[str]]()
    for pair, nats in re.findall(line, ladder):
        found_pairs.setdefault(pair, []).append(nats)
    shown = {pair: cells for pair, *cells in table(SCALING, "| pair | after 33 M tokens")}
    assert {pair: [c.removesuffix(" nats") for c in cells[1::2] if c] for pair, cells in shown.items()} == found_pairs
    for predicted in re.findall(r"- (?:\S+ × \S+: )(\S+) \((\S+ to \S+)\) nats predicted, (\S+) measured", ladder):
        yield SCALING, "| {} nats ({}) | {} |".format(*predicted)
    assert "ends 0.237 nats lower than the smaller; +0.318 (+0.018 to +0.500) was predicted: within" in ladder
    yield SCALING, "| 0.318 nats (0.018 to 0.500) | 0.237 |"
    assert "0.04 nats below BERT-Large (303 M) (90% interval -0.091 to +0.39)" in ladder
    yield SCALING, "0.04 nats below BERT-Large after 40 M tokens (-0.09 to 0.39)"
    yield SCALING, f"in {minutes('scaling_ladder_4xH200')}) 42 runs of six sizes"


@figures
def notebooks_on_two_cores() -> Iterator[Fact]:
    ladder = printed("scaling_ladder_2cores")
    for in_output, in_page in (
        ("1.579 (1.397 to 1.961) nats predicted, 1.779 measured", "1.579 nats (1.397 to 1.961) were predicted for it"),
        ("1.779 measured", "and 1.779 measured"),
        ("ends 0.281 nats lower than the smaller; +0.397 (-0.052 to +0.727)", "0.40 nats (-0.05 to 0.73) were"),
        ("its larger model has 9,410 times the parameters", "9,410 times the parameters"),
        ("0.002 nats below BERT-Large (303 M) (90% interval -0.16 to +0.19)", "(-0.16 to 0.19)"),
        ("0.26 nats below BERT-Large (303 M), by the law of Kaplan", "0.26 after 10 G tokens"),
    ):
        assert in_output in ladder
        yield SCALING, in_page
    errors = re.findall(r"form .*?([\d.]+)% +([\d.]+)% +[+-]", ladder.partition("Scaling law of 24 runs")[2])[:2]
    residuals, left_out = ([round(float(error)) for error in column] for column in zip(*errors, strict=True))
    assert residuals == [5, 5]
    yield SCALING, f"by 5 % of the loss and left-out sizes by {left_out[0]} to {left_out[1]} %"
    yield SCALING, f"(gallery/scaling_ladder_2cores.ipynb) in {minutes('scaling_ladder_2cores')} on two CPU cores"
    for pair in ("1 × 32 and 2 × 64", "1 × 16 and 2 × 32"):
        nats = re.findall(rf"- {pair} after .*: the larger ends ([\d.]+) nats lower", ladder)
        first, second, third = (f"{float(each):.2f}" for each in nats)
        told = rf"{pair} (differ )?by {first}( nats)?( \(less than seeds move it\))?, {second} and {third}"
        assert re.search(told, words(SCALING)), told
    sparse = printed("sparse_pareto_2cores")
    for loss in ("2.183", "2.348", "2.584", "2.170", "2.148"):
        assert loss in sparse
        yield SPARSITY, loss
    for interval in ("-0.004 to +0.048", "-0.068 to +0.042"):
        assert f"90 % interval {interval}" in sparse
        yield SPARSITY, interval
    gpt = printed("gpt_sweep_2cores")
    [correlation] = re.findall(r"rank correlation of predicted and measured steps: ([\d.]+)", gpt)
    [regret] = re.findall(r"regret of the planner's choice: ([\d.]+)%", gpt)
    drawn = (each.get("data", {}).get(PLOTLY_MIME, {}) for each in outputs("gpt_sweep_2cores"))
    [steps] = [trace for each in drawn for trace in each.get("data", []) if trace.get("name") == "measured"]
    ratios = [measured / predicted for predicted, measured in zip(steps["x"], steps["y"], strict=True)]
    told = f"a rank correlation of {correlation} over {len(ratios)} cells, a regret of {regret} %"
    yield GRIDS, f"{told}, and steps that took {span(ratios, '.2f')} times as long as predicted"


# Predicted and measured on GPUs


def error(row: dict[str, Any], unit: str) -> float:
    return float(row[f"predicted_{unit}"] / row[f"measured_{unit}"] - 1)


def measured(*names: str) -> list[dict[str, Any]]:
    return [row for name in names for row in raw(f"prediction_{name}.json")["rows"] if row.get("measured_ms")]


def throughput(file: str, row: str | None = None) -> list[dict[str, Any]]:
    """Return the measurements of a file of throughputs, or those of one of its rows."""
    content = raw(f"throughput_{file}.json")
    found = content["measurements"] if isinstance(content, dict) else content
    return [entry for entry in found if row in (None, entry["row"]) and "error" not in entry]


UNKNOWN = ("2xH200_d81c33b", "2xH200_0982c5b")
UNKNOWN_H100 = ("1xH100_a4d6c56", "1xH100_8e1bb47")
AGAIN = ("1xH200_95a9de1", "1xH200_d2f8c6b", "1xH200_c180cfe")
PREDICTIONS = {
    "| case | plan | ms predicted |": ("2xH200_a2c680b",),
    "| model | plan | ms predicted |": UNKNOWN_H100,
    "| model, again | plan | ms predicted |": AGAIN,
    "| weights | plan | ms predicted |": (),
}


def is_row_of(cells: list[str], row: dict[str, Any]) -> bool:
    pairs = ((row[f"predicted_{unit}"], row[f"measured_{unit}"], error(row, unit)) for unit in ("ms", "gib"))
    return all(map(shows, cells[2:8], (value for each in pairs for value in each)))


@figures
def clicks_beside_busy_loops() -> Iterator[Fact]:
    [found] = raw("live_click_2cores.json")["eight busy loops beside"].values()
    new, again = (
        f"after {each['curve_s']:.1f} s{where} (load {each['load_at_click']:.1f}"
        for each, where in ((found["new_home"], " on a new home"), (found["used_home"], ""))
    )
    yield BENCHMARKS, f"it came {new}) and once more {again}; goal 25)"


@figures
def unseen_models_starts_and_bert_large() -> Iterator[Fact]:
    rows = measured("2xH200_124e0760")
    shown = table(BENCHMARKS, "| unseen model | plan | ms predicted |")
    assert [cells[0] for cells in shown] == [row["case"] for row in rows]
    assert all(map(is_row_of, shown, rows))
    errors = {unit: [abs(error(row, unit)) for row in rows] for unit in ("ms", "gib")}
    inside = {
        unit: sum(row[f"interval_{unit}"][0] <= row[f"measured_{unit}"] <= row[f"interval_{unit}"][1] for row in rows)
        for unit in errors
    }
    assert inside == {"ms": 8, "gib": 8}
    for unit in errors:
        low, high = (side / rows[0][f"predicted_{unit}"] for side in rows[0][f"interval_{unit}"])
        yield BENCHMARKS, f"{low:.3f} to {high:.3f} of the"
        middle, largest = (percent(kind(errors[unit]), 1) for kind in (statistics.median, max))
        yield BENCHMARKS, f"| **{middle}, {largest}, {percent(inside[unit] / len(rows))}** |"
    launches = raw("starts_2xH200_c330ca98.json")["launches"]
    again: dict[str, list[float]] = {"forked": [], "new processes": []}
    for cells, launch in zip(table(BENCHMARKS, "| model | ranks | round, launch |"), launches, strict=True):
        ranks = "new processes" if launch["variant"] else "forked"
        assert cells[:3] == [launch["row"], ranks, f"{launch['round']}, {launch['launch']}"]
        phases = [launch["phases"][name]["at_s"] for name in ("start", "build", "stage")]
        ends = launch["asked_s"] + launch["first_step_s"], launch["finished_s"] - launch["last_step_s"]
        assert all(map(shows, cells[3:], (launch["planned_s"], *phases, *ends, launch["whole_s"])))
        again[ranks] += [ends[0]] if launch["launch"] else []
    forked, new = ([f"{kind(again[ranks]):.1f}" for kind in (min, max)] for ranks in again)
    yield (
        BENCHMARKS,
        f"step after {' to '.join(forked)} s (goal 12), where ranks that are new processes need {' to '.join(new)} s",
    )
    yield (
        "docs/execution.md",
        f"first step after {' to '.join(forked)} s, and with new processes after {' to '.join(new)} s",
    )
    steps: dict[str, list[float]] = {}
    for entry in throughput("large_1xH200_124e0760"):
        steps.setdefault(entry["contender"].partition(":")[0].partition(",")[0], []).append(
            statistics.median(entry["step_ms"])
        )
    ours = statistics.mean(steps["ours"])
    for cells in table(BENCHMARKS, "| BERT-Large, one GPU |"):
        found = steps[cells[0].strip("`").partition(",")[0]]
        assert all(map(shows, cells[1:3], found))
        assert not cells[3] or shows(cells[3], statistics.mean(found) / ours)


@figures
def fastest_loops_unseen_models_and_probes_on_one_gpu() -> Iterator[Fact]:
    fastest: dict[str, float] = {}

    def steps(file: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for entry in throughput(file):
            found.setdefault(entry["contender"].partition(":")[0], []).append(statistics.median(entry["step_ms"]))
        return found

    cells = iter(table(BENCHMARKS, "| fastest loops, one GPU |"))
    for name in ("large_1xH200_124e0760", "scaled_1xH200_75a3efad", "gpt_1xH200_75a3efad", "opt_1xH200_75a3efad"):
        found = steps(name)
        ours = statistics.mean(found.pop("ours"))
        fastest[name] = min(map(statistics.mean, found.values())) / ours
    for name in ("gpt", "opt", "scaled"):
        found = steps(f"{name}_1xH200_75a3efad")
        ours = found["ours"]
        for contender, times in found.items():
            shown = next(cells)
            assert shown[1].replace("`", "").startswith(contender)
            rounds = [shows(cell, time) for cell, time in zip(shown[2:4], times, strict=False)]
            assert all(rounds)
            assert not shown[4] or shows(shown[4], statistics.mean(times) / statistics.mean(ours))
    yield BENCHMARKS, ", ".join(f"**{each:.3f}**" for each in fastest.values()) + " | 1 × H200"
    yield README, ", ".join(f"{each:.3f}" for each in fastest.values()) + "; 1.069, 1.091 times as fast"

    rows = measured("unseen_one_1xH200_75a3efad", "beit_1xH200_75a3efad")
    shown_rows = table(BENCHMARKS, "| unseen model, one GPU |")
    assert [cells[0] for cells in shown_rows] == [row["case"] for row in rows]
    assert all(map(is_row_of, shown_rows, rows))
    for unit, inside in (("ms", 3), ("gib", 5)):
        errors = [abs(error(row, unit)) for row in rows]
        middle, largest = (percent(kind(errors), 1) for kind in (statistics.median, max))
        low, high, value = (f"interval_{unit}", f"interval_{unit}", f"measured_{unit}")
        assert sum(row[low][0] <= row[value] <= row[high][1] for row in rows) == inside
        assert f"{middle}, {largest}, {percent(inside / len(rows))}" in words(BENCHMARKS).replace("*", "")

    ends: dict[bool, list[float]] = {}
    for each in raw("probes_1xH200_75a3efad.json"):
        last = max(probe["measured"] for probe in each["seconds"])
        ends.setdefault(each["model"] == "convnext_large", []).append(last)
    least, most = (f"{kind(ends[False]):.1f}" for kind in (min, max))
    yield BENCHMARKS, f"{least} to {most} s in {len(ends[False])} measurements of nine transformers"
    yield BENCHMARKS, "and {:.1f} and {:.1f} s for ConvNeXt".format(*ends[True])
    launches = raw("starts_1xH200_75a3efad.json")["launches"]
    for cells_of, launch in zip(table(BENCHMARKS, "| start, one GPU |"), launches, strict=True):
        phases = launch["phases"]
        times = [launch["planned_s"], phases["start"]["at_s"], phases["build"]["at_s"], phases["compare"]["took_s"]]
        times += [phases["stage"]["at_s"], launch["asked_s"] + launch["first_step_s"]]
        times += [launch["finished_s"] - launch["last_step_s"], launch["whole_s"]]
        assert cells_of[:2] == [launch["row"], f"{launch['round']}, {launch['launch']}"]
        assert all(map(shows, cells_of[2:], times))


@figures
def plans_and_their_errors() -> Iterator[Fact]:
    """A model that was measured twice counts twice: the second measurement does not hide the first."""
    sparse = raw("sparse_training_1xH100_a4d6c56.json")["rows"]
    shown = [
        ([cells for cells in table(BENCHMARKS, header) if "%" in cells[4]], measured(*names) if names else sparse)
        for header, names in PREDICTIONS.items()
    ]
    older = (ROOT / BENCHMARKS).read_text().partition("Older code on 2 × H200")[2].partition("\n## ")[0].splitlines()
    lines = [line.replace("*", "").strip("|").split("|") for line in older if line.count("%") == 2]
    assert len(lines) == 12
    shown.append(([[cell.strip() for cell in line] for line in lines], measured(*UNKNOWN)))
    for of_page, rows in shown:
        assert len(of_page) == len(rows)
        assert [sum(is_row_of(cells, row) for row in rows) for cells in of_page] == [1] * len(rows)
    again = sorted(raw("prediction_2xH200_c5e3ea6.json")["rows"], key=lambda row: row["predicted_ms"])
    time, memory = ([f"{100 * error(row, unit):+.1f} %" for row in again] for unit in ("ms", "gib"))
    yield BENCHMARKS, "has errors of {} and {} of the time, and {} and {} of the memory".format(*time, *memory)
    masked, stored = sparse[3:5]
    yield BENCHMARKS, f"where {stored['predicted_ms']:.1f} ms had been predicted"
    yield BENCHMARKS, f"and lost {100 * stored['measured_ms'] / masked['measured_ms'] - 100:.0f} %"
    front = table(README, "| | result | on |")
    assert len(front) <= 8, "the rest stands in the page of benchmarks"
    second = measured(*AGAIN)
    [at] = [at for at, cells in enumerate(front) if cells[0].startswith(f"{len(second)} plans of 12 models")]
    for rows in (measured("2xH200_a2c680b"), measured(*UNKNOWN), measured(*UNKNOWN_H100), second):
        for cells, unit in zip(front[at : at + 2], ("ms", "gib"), strict=True):
            errors = [abs(error(row, unit)) for row in rows]
            middle, largest = percent(statistics.median(errors), 1), percent(max(errors), 1)
            assert re.search(rf"{middle}\**, \**{largest}", words(BENCHMARKS)), (middle, largest)
            assert rows is not second or cells[1].startswith(f"median {middle}, largest {largest}")
    one, two = (abs(100 * error(row, "gib")) for row in second if row["case"] == "qwen3-600m")
    assert f"largest {one:.1f} % ({two:.1f} % after" in front[at + 1][1]


H100, OLDER, NEWER, NEWEST = "1xH100_9284844", "1xH200_70b58d3", "1xH200_b4b0645", "1xH200_e73eb14"
ONE_GPU = {
    "H200, BERT-Large, 128 samples": (NEWER, "large", "ours:"),
    "the same, plan forced": (NEWER, "large", "ours 1"),
    "H200, scaled BERT, 64 samples": (NEWER, "scaled", "ours:"),
    "H200, OPT-350m, 64 samples": (NEWER, "opt-350m-512", "ours:"),
    "H200, GPT-3 1.3B, 64 samples": (NEWER, "gpt3-1.3b-512", "ours:"),
    "the same, gradients in bf16": (NEWEST, "gpt3-1.3b-512", "ours:"),
    "H200, BERT-Large, 512 samples of 128 tokens, gradients in bf16": (NEWEST, "large-128", "ours:"),
    "H200, scaled BERT, 256 samples of 128 tokens, gradients in bf16": (NEWEST, "scaled-128", "ours:"),
    "H100, BERT-Large, older code": (H100, "large", "ours:"),
    "H100, OPT-350m, older code": (H100, "opt-350m-512", "ours:"),
    "H100, GPT-3 1.3B, older code": (H100, "gpt3-1.3b-512", "ours:"),
    "H200, BERT-Large, older code": (OLDER, "large", "ours:"),
    "the same with a plan forced": (OLDER, "large", "ours 1"),
    "H200, GPT-3 1.3B, older code": (OLDER, "gpt3-1.3b-512", "ours:"),
}
PROFILED = {name: (NEWER, row) for name, row in (("BERT-Large", "large"), ("scaled BERT", "scaled"))}
PROFILED |= {"OPT-350m": (NEWER, "opt-350m-512"), "GPT-3 1.3B": (NEWER, "gpt3-1.3b-512")}
PROFILED |= {"GPT-3 1.3B with gradients in bf16": (NEWEST, "gpt3-1.3b-512")}
PARTS = ("matrix products", "attention", "optimiser", "the rest", "idle")


def medians(file: str, row: str, start: str) -> dict[int, float]:
    """Return the median step of each round of the contender whose name starts so; none if there is no such one."""
    entries = [entry for entry in throughput(file, row) if entry["contender"].startswith(start)]
    assert len({entry["contender"] for entry in entries}) <= 1
    return {entry["round"]: statistics.median(entry["step_ms"]) for entry in entries}


@figures
def one_gpu() -> Iterator[Fact]:
    header, rows = "| one GPU | our plan | ms |", []
    for cells in table(BENCHMARKS, header):
        file, row, label = ONE_GPU[cells[0]]
        of = [medians(file, row, each) for each in (label, "ddp+labelled-head,", "deepspeed1", "megatron", "ddp+")]
        ours, *_, loop = of
        times = [
            statistics.median(each.values()) if cell else "" for cell, each in zip(cells[2:6], of[:4], strict=True)
        ]
        whole = medians(file, row, "ddp,")
        head = ratio([*whole.values()], [*loop.values()]) if cells[6][:1].isdigit() else cells[6]
        rows.append([*cells[:2], *times, head, statistics.median(loop[number] / ours[number] for number in ours)])
    assert [row[0] for row in rows] == list(ONE_GPU)
    yield BENCHMARKS, header, rows
    last = [cells[-1] for cells in table(BENCHMARKS, header)]
    for page, firsts in ((BENCHMARKS, (0, 2, 3, 5)), (README, ())):
        plain = words(page).replace("*", "")
        assert ", ".join(last[index] for index in firsts) in plain
        assert ", ".join(last[6:8]) in plain
    header, rows = "| | matrix products | attention |", []
    for label, *_ in table(BENCHMARKS, header):
        row, whose = label.split(", ")
        start = "ours:" if whose == "ours" else f"{whose.strip('`')},"
        first = (e for e in throughput(*PROFILED[row]) if e.get("profile") and e["round"] == 0)
        [entry] = [entry for entry in first if entry["contender"].startswith(start)]
        rows.append([label, *(entry["profile"][0][part] for part in PARTS)])
    yield BENCHMARKS, header, rows


@figures
def four_gpus() -> Iterator[Fact]:
    content = raw("throughput_4xH200_4234f31.json")
    header, rows, steps, ratios, errors = "| four GPUs | our plan | ms |", [], {}, [], []
    named = {"BERT-Large": "large", "scaled BERT": "scaled", "scaled BERT, pipeline": "scaled-pp4"}
    for (name, row), cells in zip(named.items(), table(BENCHMARKS, header), strict=True):
        entries = throughput("4xH200_4234f31", row)
        ours, *peers = sorted(entries, key=lambda entry: not entry["contender"].startswith("ours"))
        best = min(peers, key=lambda entry: statistics.median(entry["step_ms"]))
        predicted = content["predictions"][row]["ours"]["step_ms"]
        ms, of_best = (statistics.median(entry["step_ms"]) for entry in (ours, best))
        assert best["contender"].startswith(cells[5].partition(", ")[0].strip("`"))
        assert cells[1].split(", ")[1] in ours["contender"] or cells[1].split(", ")[-1] in ours["contender"]
        ratios.append(of_best / ms)
        errors.append(abs(predicted / ms - 1))
        rows.append([*cells[:2], ms, predicted, *cells[4:6], of_best, ratios[-1]])
        for who, entry in (("ours", ours), ("best peer", best)):
            step = entry["profile"][0]
            between = (step["copies"], (step["communication"], step["communication alone"]))
            steps[f"{name}, {who}"] = [*(step[part] for part in PARTS[:4]), *between, step["idle"]]
    yield BENCHMARKS, header, rows
    yield BENCHMARKS, "| four GPUs, one step | matrix products |", steps
    yield BENCHMARKS, "**{:.3f}**, **{:.3f}**, **{:.3f}**".format(*ratios)
    yield BENCHMARKS, f"**{percent(statistics.median(errors), 1)}, {percent(max(errors), 1)}**"


def contenders(contents: list[dict[str, Any]], rows_of: str, steps_of: str) -> Iterator[Fact]:
    """Yield every contender's times, memory and prediction, and where a profiled step goes, for two tables."""
    rows, steps = [], []
    for content in contents:
        first_ms, (predictions,) = 0.0, content["predictions"].values()
        for entry in content["measurements"]:
            name, ms = entry["contender"], statistics.median(entry["step_ms"])
            predicted = predictions.get(name.split(": PP")[0], {}).get("step_ms", "")
            rows.append([ms, entry["in_a_row_ms"], predicted, entry["peak_gib"], ms / first_ms if first_ms else ""])
            first_ms = first_ms or ms
            steps.append((name, [entry["phases"][rank] for rank in (0, 1)[: len(entry["phases"])]]))
    shown = table(BENCHMARKS, rows_of)
    yield BENCHMARKS, rows_of, [[*cells[:2], *row] for cells, row in zip(shown, rows, strict=True)]
    left = iter(table(BENCHMARKS, steps_of))
    of_steps = []
    for (*_, contender), (_, ranks) in zip((cells[:2] for cells in shown), steps, strict=True):
        for rank in (0, 1) if "ZeRO 1" in contender else (0,):
            name = next(left)[0]
            assert name.endswith(contender)
            told = ("in all", "idle", "communication alone")
            spans = (tuple(ranks[rank][phase][key] for key in told) for phase in ("forward", "backward", "update"))
            of_steps.append([name, str(rank), *spans])
    yield BENCHMARKS, steps_of, of_steps


@figures
def scaled_bert_on_h100() -> Iterator[Fact]:
    contents = [raw(f"throughput_pair_scaled_{gpus}xH100_5ae47b19.json") for gpus in (4, 1)]
    yield from contenders(contents, "| scaled BERT on H100, one round | contender |", "| one step on H100 | rank |")
    (one,) = contents[1]["measurements"]
    yield BENCHMARKS, f"trains at {one['gpus'][0]['sm_mhz']['median']:,.0f} MHz"
    yield BENCHMARKS, f"of which {one['phases'][0]['update']['matrix products']:.1f} are products"
    pipelines = raw("throughput_pp4_4xH100_1df2e1af.json")
    predicted = [each["step_ms"] for each in pipelines["predictions"]["scaled-pp4"].values()]
    entries = pipelines["measurements"]
    for cells, entry, ms in zip(table(BENCHMARKS, "| pipeline on H100 | ms |"), entries, predicted, strict=False):
        values = (statistics.median(entry["step_ms"]), entry["in_a_row_ms"], ms, entry["peak_gib"])
        assert all(map(shows, cells[1:5], values)), cells
    muon = [entry for content in contents for entry in content["measurements"] if entry["contender"].startswith("ours")]
    of_muon = [each["step_ms"] for content in contents for each in content["predictions"]["pair-scaled"].values()]
    for found, predictions in ((muon, of_muon), (entries, predicted)):
        times = (statistics.median(entry["step_ms"]) for entry in found)
        errors = [abs(ms / time - 1) for ms, time in zip(predictions, times, strict=False)]
        shown = f"{percent(statistics.median(errors), 1)}, {percent(max(errors), 1)}"
        assert any(cells[2].startswith(shown) for cells in table(BENCHMARKS, "| goal | target |")), shown


@figures
def pair_on_h200() -> Iterator[Fact]:
    files = ("pair_scaled_4xH200", "pair_large_4xH200", "pair_scaled_1xH200")
    contents = [raw(f"throughput_{name}_e21906fd.json") for name in files]
    yield from contenders(contents, "| the pair, one round | contender |", "| one step, a rank of four | rank |")
    zero_1, zero_0 = contents[0]["measurements"][:2]
    gathers = next(told for name, told in zero_1["collectives"].items() if "AllGather" in name)
    longest, shortest = gathers["longest rank ms"], gathers["without waiting ms"]
    yield BENCHMARKS, f"all-gathers: {longest:.0f} ms of them, and {shortest:.0f} on the rank that comes last"
    products = span([phases["update"]["matrix products"] for phases in zero_1["phases"]])
    yield BENCHMARKS, f"whose products take {products} ms"
    yield BENCHMARKS, f"ZeRO 0 trained at {span([gpu['sm_mhz']['median'] for gpu in zero_0['gpus']], ',.0f')} MHz"
    one = contents[2]["measurements"][0]
    yield BENCHMARKS, f"one GPU at {one['gpus'][0]['sm_mhz']['median']:,.0f} MHz"
    alone, (plan,) = one["phases"][0], contents[2]["predictions"]["pair-scaled"]["ours"]["json"]["stages"]
    yield BENCHMARKS, f"took {alone['forward']['in all']:.1f} + {alone['backward']['in all']:.1f} ms"
    yield BENCHMARKS, f"predicted with {plan['forward_ms']:.1f} + {plan['backward_ms']:.1f}"
    yield BENCHMARKS, f"priced {alone['update']['in all'] - plan['optimizer_ms']:.0f} ms too short"
    file = ROOT / "benchmarks" / "results" / "kernels_pair_scaled_1xH200_e21906fd.json.gz"
    profile = json.loads(gzip.decompress(file.read_bytes()))
    begin = next(at for name, at in profile["phases"] if name == "update")
    copies = [row for row in profile["kernels"] if "DtoH" in profile["names"][row[0]]]
    assert len(copies) == 2, "one for each group of AdamW"
    assert all(row[2] > begin for row in copies)


@figures
def trials_of_communication() -> Iterator[Fact]:
    content = raw("trials_4xH200_90f5602.json")
    h200, h100, pipelines = (
        {one["trial"]: one for one in content[machine]}
        for machine in ("four H200", "four H100", "pipelines on four H200")
    )

    def ms(of: dict[str, Any], trial: str) -> float:
        return statistics.median(of[trial]["step_ms"])

    trials = (("1x64 z1", "2x32 z2"), ("1x64 a2a", "z2 a2a"), ("1x64 a2a ctas8", ""), ("1x64 ce", "z2 ce"))
    header, rows = "| trial | four H200, 1 × 64, ms |", []
    for cells, (one, other) in zip(table(HISTORY, header), (*trials, ("", "z2 ce+ag")), strict=True):
        products = h200[one]["profile"][0]["matrix products"] if cells[2] else ""
        rows.append([cells[0], ms(h200, one) if one else "", products, ms(h100, other) if other else "", *cells[4:]])
    yield HISTORY, header, rows
    predicted = {name: each["step_ms"] for name, each in content["predicted on the same H200"].items()}
    yield HISTORY, f"{ms(h200, '1x64 z1'):,.1f} ms (predicted {predicted['scaled 1,4,1,64']:,.1f})"
    yield HISTORY, f"{ms(h200, 'z2 base'):,.1f} (predicted {predicted['scaled 1,4,2,32']:,.1f})"
    yield HISTORY, f"one reduction, 64, {ms(h200, 'peer64'):,.1f}"
    captured, launched, fewer = (
        predicted[f"scaled-pp4 4,1,0,{each}"]
        for each in ("8,cuda_graphs=true", "16,cuda_graphs=false", "4,cuda_graphs=true")
    )
    yield HISTORY, f"took {ms(pipelines, 'pp 32x8 graphs'):,.1f} ms (predicted {captured:,.1f}"
    yield HISTORY, f"launched {ms(pipelines, 'pp 16x16'):,.1f} ({launched:,.1f})"
    yield HISTORY, f"predicted with {fewer:,.1f} there"


@figures
def kernels_of_updates() -> Iterator[Fact]:
    def first(file: str, row: str, label: str) -> dict[str, Any]:
        [entry] = [e for e in throughput(file, row) if e["round"] == 0 and e["contender"].startswith(label)]
        return entry

    gpt = [first(file, "gpt3-1.3b-512", "ours:") for file in (OLDER, NEWER, NEWEST)]
    before, kernel, kept = (f"{entry['profile'][0]['optimiser']:.1f}" for entry in gpt)
    large = [f"{first(file, 'large', 'ours 1')['profile'][0]['optimiser']:.1f}" for file in (OLDER, NEWER)]
    yield HISTORY, f"GPT-3 1.3B {before} → {kernel} ms of a step"
    yield HISTORY, f"{large[0]} → {large[1]} | yes"
    yield HISTORY, f"{kernel} → {kept} ms"
    yield BENCHMARKS, f"take {kept} ms in place of {kernel} ({before} with PyTorch's update)"
    longest = gpt[1]["longest"]
    cast, copied = (sum(ms for name, _, ms in longest if part in name) for part in ("ListMetadata<2>", "_cat_"))
    yield BENCHMARKS, f"cast of gradients ({cast:.1f} ms)"
    yield BENCHMARKS, f"one tensor ({copied:.1f} ms)"
    errors, clocks = [], dict[tuple[str, str], list[float]]()
    for file in (NEWER, NEWEST):
        for row, plans in raw(f"throughput_{file}.json")["predictions"].items():
            ours = medians(file, row, "ours:").values()
            errors.append(plans["ours"]["step_ms"] / statistics.median(ours) - 1)
        for entry in raw(f"throughput_{file}.json")["measurements"]:
            whose = entry["contender"].partition(":")[0].partition(",")[0]
            clocks.setdefault((entry["row"], whose), []).append(entry["gpus"][0]["sm_mhz"]["median"])
    assert len(errors) == 7
    assert (round(-100 * max(errors)), round(-100 * min(errors))) == (2, 4)
    ours, loop, short, short_loop = (
        f"{min(found):,.0f} to {max(found):,.0f}"
        for found in (clocks[each] for each in product(("gpt3-1.3b-512", "scaled-128"), ("ours", "ddp+labelled-head")))
    )
    yield BENCHMARKS, f"ran at {ours} MHz in ours and at {loop} MHz in the loop"
    yield BENCHMARKS, f"with 128 tokens at {short} and {short_loop}."


@figures
def fused_kernels() -> Iterator[Fact]:
    entries = raw("fused_backward_1xH200.json")["measurements"]

    def of(row: str, label: str) -> list[float]:
        return [statistics.median(e["step_ms"]) for e in entries if (e["row"], e["label"]) == (row, label)]

    old, new = (statistics.median(of("large", label)) for label in ("old", "new"))
    yield BENCHMARKS, f"from {old:.0f} to {new:.0f} ms"
    yield HISTORY, f"BERT-Large {old:.1f} → {new:.1f} ms"
    yield HISTORY, f"BERT-Large 306.3 → {of('large', 'new autotuned')[0]:.1f} ms"
    for row, named in (("scaled", "scaled BERT"), ("opt-350m-512", "OPT-350m"), ("gpt3-1.3b-512", "GPT-3 1.3B")):
        yield HISTORY, f"{named} {of(row, 'old')[0]:,.1f} → {of(row, 'new')[0]:,.1f}"
    both = [next(e["profile"][0] for e in entries if (e["row"], e["label"]) == ("large", k)) for k in ("old", "new")]
    yield BENCHMARKS, f"({both[0]['the rest']:.1f} and {both[1]['the rest']:.1f} ms)"
    assert round(both[1]["matrix products"] - both[0]["matrix products"]) == 4


@figures
def choices_of_the_planner() -> Iterator[Fact]:
    def behind(*names: str) -> list[float]:
        """How far the planner's choice is behind the fastest plan, for each case of each file."""
        found = []
        for rows in map(measured, names):
            cases = dict.fromkeys((row["case"], row["memory_limit_gib"]) for row in rows)
            for case in cases:
                own = [row for row in rows if (row["case"], row["memory_limit_gib"]) == case]
                chosen = [row["measured_ms"] for row in own if row["why"] == "the planner's choice"]
                found += [chosen[0] / min(row["measured_ms"] for row in own) - 1] if chosen else []
        return sorted(found)

    two = behind("2xH200_a2c680b")
    four = behind("4xH200", *(f"4xH200_{commit}" for commit in ("1b4a6d1", "4ca9be4", "d1c9b14", "f2cfb8d")))
    assert (len(two), f"{four[-1]:.1%}") == (7, "25.0%")
    [slow] = [r for r in measured("4xH200_4ca9be4") if r["case"] == "4.8b" and r["why"] == "the planner's choice"]
    [again] = [r for r in measured("4xH200_4ca9be4_again") if r["case"] == "4.8b"]
    yield (
        BENCHMARKS,
        (
            f"at most {percent(two[-1], 1)}; on 4 × H200 at most {percent(four[-2], 1)}, and once {percent(four[-1])} "
            f"(4.8 B BERT: {slow['measured_ms']:,.0f} ms, and {again['measured_ms']:,.0f} ms when run"
        ),
    )


@figures
def fastest_peers_on_two_gpus() -> Iterator[Fact]:
    """Two rounds of each contender, and the ratio of the means of their medians to ours."""
    shown = table(BENCHMARKS, "| fastest peers, two GPUs |")
    fastest: dict[str, float] = {}
    predicted: list[str] = []
    cells = iter(shown)
    for file, row in (("scaled", "scaled"), ("pair", "pair-scaled"), ("pair", "pair-large")):
        name = f"{file}_2xH200_a9460647"
        times: dict[str, list[float]] = {}
        for entry in throughput(name, row):
            times.setdefault(entry["contender"].partition(":")[0], []).append(statistics.median(entry["step_ms"]))
        ours = statistics.mean(times["ours"])
        for _ in times:
            cell = next(cells)
            contender = cell[1].replace("`", "")
            rounds = times["ours" if contender.startswith("ours") else contender]
            assert all(shows(each, time) for each, time in zip(cell[2:4], rounds, strict=True)), contender
            assert not cell[4] or shows(cell[4], statistics.mean(rounds) / ours)
        fastest[row] = min(statistics.mean(each) for by, each in times.items() if by != "ours") / ours
        predicted.append(f"{raw(f'throughput_{name}.json')['predictions'][row]['ours']['step_ms']:,.1f}")
    assert next(cells, None) is None
    yield BENCHMARKS, "Predicted were {}, {} and {} ms".format(*predicted)
    one, two, three = (f"{each:.3f}" for each in fastest.values())
    yield BENCHMARKS, f"**{one}**; {two}, {three} | 2 × H200"
    yield README, f"{one}; {two}, {three} times as fast"
    large = [
        ms for e in throughput("pair_2xH200_a9460647", "pair-large") if "ddp" in e["contender"] for ms in e["step_ms"]
    ]
    yield BENCHMARKS, f"their steps take {min(large):.0f} to {max(large):.0f} ms"
    failed = raw("prediction_falcon_2xH200_a9460647.json")["rows"]
    assert all("out of memory" in each["error"] for each in failed)
    yield BENCHMARKS, "said to need {:.1f} and {:.1f} GiB".format(*(each["predicted_gib"] for each in failed))
    mended = raw("prediction_falcon_2xH200_b39464d9.json")["rows"]
    for shown, row in zip(table(BENCHMARKS, "| Falcon, mended |"), mended, strict=True):
        for at, name in ((1, "ms"), (4, "gib")):
            predicted, measured = row[f"predicted_{name}"], row[f"measured_{name}"]
            cells = zip(shown[at : at + 3], (predicted, measured, predicted / measured - 1), strict=True)
            assert all(shows(cell, value) for cell, value in cells), shown
    before = raw("prediction_2xH200_124e0760.json")["rows"]
    [chosen] = [each for each in before if each["case"] == "falcon-1b" and each["why"] == "the planner's choice"]
    yield BENCHMARKS, f"had needed {chosen['measured_ms']:.1f} ms and {chosen['measured_gib']:.1f} GiB at 124e0760"
    ended = re.search(r"(\d+) passed, (\d+) skipped, .* in ([\d.]+)s", words(RESULTS / "tests_2xH200_b39464d9.txt"))
    assert ended
    passed, skipped, (minutes, seconds) = ended[1], ended[2], divmod(float(ended[3]), 60)
    yield (
        BENCHMARKS,
        f"**{minutes:.0f} minutes {seconds:.0f} s** (goal 5 minutes), {passed} passed, {skipped} were skipped",
    )


@figures
def pilots_of_the_pair() -> Iterator[Fact]:
    """Each row is a pilot, and each optimiser trains with the rate whose pilot ended lowest."""
    pilots = {
        (pilot["algorithm"], pilot["learning_rate"], commit): pilot
        for commit in ("a9460647", "b39464d9")
        for pilot in raw(f"pair_pilots_2xH200_{commit}.json")
    }
    ends: dict[tuple[str, float], float] = {}
    for shown in table(BENCHMARKS, "| pilot | rate |"):
        algorithm, rate = shown[0].lower().partition(",")[0], float(shown[1])
        pilot = pilots.pop((algorithm, rate, shown[2]))
        both = [(prose + manuals) / 2 for prose, manuals in zip(pilot["prose"], pilot["manuals"], strict=True)]
        at = [int(np.abs(np.array(pilot["tokens"]) - 1e6 * tokens).argmin()) for tokens in (4.1, 9.0, 10.0)]
        assert all(shows(cell, both[index]) for cell, index in zip(shown[3:6], at, strict=True))
        assert shows(shown[6], pilot["step_ms"])
        assert shows(shown[7], pilot["predicted_ms"])
        if "margin" not in shown[0]:
            ends[algorithm, rate] = both[-1]
    assert not pilots, "each pilot has a row"
    lowest = {
        optimiser: min((rate for by, rate in ends if by == optimiser), key=lambda rate: ends[optimiser, rate])
        for optimiser in ("muon", "adamw")
    }
    assert lowest == {"muon": 2.4e-2, "adamw": 4e-4}
    yield BENCHMARKS, "**Muon trains with 2.4e-2 and AdamW with 4e-4.**"


@figures
def runs_of_the_pair() -> Iterator[Fact]:
    told = {f"Muon, seed {seed}": f"large-muon-60m-seed{seed}" for seed in range(3)}
    told["AdamW, seed 0"] = "large-adamw-60m-seed0"
    sets, both, rows = ("prose", "manuals"), {}, {}
    for row, name in told.items():
        known, step = recorded(name).evaluations(), summary(name)["step"]
        both[row] = np.mean([known[each] for each in sets], axis=0)
        assert known.tokens[-1] == 3662 * 128 * 128
        ends = [known[each][-1] for each in sets] + [both[row][at] for at in (-1, abs(known.tokens - 30e6).argmin())]
        rows[row] = [*ends, f"{step} ms", device_minutes(name)]
    yield BENCHMARKS, "| BERT-Large | prose | manuals | both |", rows
    *muon, adamw = both.values()
    ends = [float(losses[-1]) for losses in muon]
    passed = known.tokens[np.mean(muon, axis=0) < adamw[-1]][0]
    ahead = f"by {statistics.stdev(ends):.3f}, and end {adamw[-1] - statistics.mean(ends):.2f} nats below AdamW's one"
    yield BENCHMARKS, f"{ahead}; they pass its last loss after {passed / 1e6:.0f} M tokens"
    histories = [recorded(name).history() for name in told.values()]
    rise = max(float(np.diff(history.loss).max()) for history in histories)
    yield BENCHMARKS, f"No step raised a training loss by more than {rise:.2f} nats"
    steps = [summary(name)["step"].strip(")").split(" (") for name in told.values()]
    longer = [float(measured) / float(predicted) - 1 for measured, predicted in steps]
    yield BENCHMARKS, f"Steps took {100 * min(longer):.0f} to {percent(max(longer))} longer than predicted"


@figures
def throughput_beside_peers() -> Iterator[Fact]:
    named = {
        "BERT-Large, batch 512": ("4xH200_1b4a6d1", "large"),
        "scaled BERT, batch 256": ("4xH200_d1c9b14", "scaled"),
        "scaled BERT, 32 GiB enforced": ("4xH200_4ca9be4", "scaled-32gib"),
        "4.8 B BERT, batch 256": ("4xH200_d1c9b14", "4.8b"),
        "scaled BERT, a pipeline of 4 forced": ("4xH200_258fb7e", "scaled-pp4"),
        "scaled BERT, a pipeline of 2 forced": ("4xH200_258fb7e", "scaled-pp2dp2"),
    }
    rows = {}
    for name, case in named.items():
        found = throughput(*case)
        [ours] = [row for row in found if row["contender"].startswith("ours")]
        rate, peer = ours["tokens_per_s"], max(row["tokens_per_s"] for row in found if row is not ours)
        rows[name] = [None, ours["step_ms"], rate, None, peer, rate / peer]
    assert len(table(HISTORY, "| row | our plan | ms |")) == len(rows)
    yield HISTORY, "| row | our plan | ms |", rows
    ratios = []
    for name in ("c9b9009", "535a326"):
        times: dict[str, list[float]] = {}
        for row in throughput(f"2xH200_{name}"):
            times.setdefault(row["contender"].split(":")[0].split(",")[0], []).append(row["step_ms"])
        ratios.append([peer / ours for ours, peer in zip(times["ours"], times["ddp+graphs"], strict=True)])
    usual, (host, other) = statistics.mean(ratios[0]), ratios[1]
    yield BENCHMARKS, f"{usual:.2f}; on a slower host {host:.2f} and {other:.2f}"
    usual, slow = (row["step_ms"] for row in throughput("2xH200_12a467f", "large"))
    yield BENCHMARKS, f"cost BERT-Large {percent(slow / usual - 1)} (DP 2 ZeRO 1, {usual:.1f} → {slow:.1f} ms"
    found = raw("cuda_graphs_1xH200_3b1a77c.json") + raw("cuda_graphs_2xH200_3b1a77c.json")[:4]
    found += raw("cuda_graphs_2xH200_6e42a9b.json")
    pairs = {(row["launched"]["ms"], row["recorded"]["ms"]) for row in found}
    for cells in table(BENCHMARKS, "| case | launched, ms |"):
        [_] = [each for each in pairs if all(map(shows, cells[1:], (*each, each[0] / each[1])))]


@figures
def gradients_beside_epsilon() -> Iterator[Fact]:
    content = raw("gradient_rms_1xH100_d5b7d91.json") | raw("gradient_rms_1xH100_6fdbedc.json")
    rows = table(BENCHMARKS, "| kind of parameter, step |")
    assert len(rows) == 21
    for name, *cells in rows:
        kind, _, step = name.rpartition(", ")
        for cell, model in zip(cells, ("large", "width", "depth"), strict=True):
            found = content[model]["steps"].get(step)
            assert (found is None) == (cell == "not reached"), name
            if found is not None:
                rms, _, times = cell.partition(" (")
                in_eps = found["rms"][kind] / content[model]["eps"][kind]
                assert shows(rms, found["rms"][kind])
                assert not times or float(times[:-1].replace(",", "")) == pytest.approx(in_eps, rel=6e-3)
    content = raw("full_preset_4xH200_predicted.json")
    minutes, keys = content["minutes"], ("step_ms", "evaluation_s", "peak_gib", "mfu")
    rows = table(BENCHMARKS, "| | plan | step |")
    for cells, name in zip(rows[:2], ("bert-large", "bert-scaled"), strict=True):
        values = [*(content["plans"][name][key] for key in keys), minutes[name]]
        assert all(map(shows, cells[2:], values)), cells
    assert shows(rows[2][-1], minutes["the pilots"])
    assert shows(rows[3][-1], content["minutes_together"])
    yield "docs/gallery.md", f"predicts {content['minutes_together']:.0f} minutes for it"


# Sparse models


@figures
def block_sparse_kernels() -> Iterator[Fact]:
    devices = {name: Cluster.of(name, gpus=1).device for name in ("h100", "h200")}
    for name, commit in (("h100", "a4d6c56"), ("h200", "4182f403")):
        content = raw(f"sparse_kernels_1x{name.upper()}_{commit}.json")
        found = {(row["layer"], row["block"]): row["measured"] for row in content["break_even"]}
        faster = {(row["layer"], row["block"]): row["speed_up"] for row in content["goals"]}
        shapes = {row["layer"]: (row["rows"], row["cols"]) for row in content["rows"]}
        header = f"| layer on one {name.upper()} | blocks of 64: measured, predicted |"
        rows = []
        for layer, *_ in table(BENCHMARKS, header):
            at = [
                (found[layer, block], break_even_sparsity(none_and_all_stored(block, [shapes[layer]]), devices[name]))
                for block in (64, 32, 16)
            ]
            rows.append([layer, *at, *(faster.get((layer, block), "") for block in (64, 32))])
        yield BENCHMARKS, header, rows
    rows = []
    for block, *_ in table(KERNELS, "| block | a, r, w |"):
        factors, gradient = STORED_PRODUCTS[int(block)]
        points = (
            tuple(break_even_sparsity(none_and_all_stored(int(block), [shape]), each) for each in devices.values())
            for shape in ((7680, 1920), (3072, 768), (768, 768))
        )
        rows.append([block, tuple(factors), tuple(gradient[:2]), None, None, *points])
    yield KERNELS, "| block | a, r, w |", rows
    for row in (raw("sparse_training_1xH100_a4d6c56.json")["rows"][at] for at in (2, 4)):
        yield SPARSITY, f"{row['measured_ms']:.1f} ms"
    steps = raw("sparse_training_1xH200_4182f403.json")["rows"]
    shown = table(BENCHMARKS, "| BERT-Base on one H200 |")
    rows = [[c[0], s["predicted_ms"], s["measured_ms"], *c[3:]] for c, s in zip(shown, steps, strict=True)]
    yield BENCHMARKS, "| BERT-Base on one H200 |", rows
    dense, stored = steps[0]["measured_ms"], [row for row in steps if row["plan"]["block_sparse"]]
    of_64 = next(row["measured_ms"] for row in stored if row["case"] == "base-sparse-64")
    launched = next(row["measured_ms"] for row in stored if not row["plan"]["cuda_graphs"])
    yield SPARSITY, f"{dense / steps[4]['measured_ms']:.2f} times as fast"
    yield SPARSITY, f"{dense / of_64:.2f} times"
    yield SPARSITY, f"{launched:.1f} ms launched"
    cpu = raw("sparse_prediction_2cores.json")
    for row in (cpu["dense"], cpu["masked"]):
        yield SPARSITY, f"predicted with {row['predicted_ms']:.0f} ms and took {row['measured_ms']:.0f} ms"


FAMILY, LATER = "sparse_family_muon_2xH200_3a11e5dc.json", "sparse_family_1xH200_118dc256.json"
UNSCALED = "sparse_family_unscaled_4xH200_4182f403.json"
SMALL = {"medium": ("2x400", "4x304", "8x224", "12x176"), "base": ("2x672", "4x496", "8x352", "12x288")}
BLOCKS = (1, 4, 8, 16)


def best_of(runs: dict[str, Any], kind_of: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Return the run of each kind that ended lowest, over its rates and seeds."""
    best: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        kind = kind_of(name)
        best[kind] = min(best.get(kind, run), run, key=lambda each: each["held_out"][-1])
    return best


@figures
def sparse_families() -> Iterator[Fact]:
    heads = {UNSCALED: "| held-out loss | at half the tokens |"}
    heads |= {FAMILY: "| held-out loss with Muon, first seed | at half the tokens |"}
    for file, runs in ((UNSCALED, 36), (FAMILY, 40)):
        found = raw(file)
        assert len(found) == runs
        ends: dict[str, tuple[float, float]] = {}
        for name, run in found.items():
            kind = name.split("-seed")[0].rsplit("-", 2)[0].removesuffix("-muon")  # without its rate, such as 3.20e-03
            half = next(loss for tokens, loss in zip(run["tokens"], run["held_out"], strict=True) if tokens > 14e6)
            ends[kind] = min(ends.get(kind, (9.0, 9.0)), (run["held_out"][-1], half))
        rows = []
        for cells in table(BENCHMARKS, heads[file]):
            size = cells[0].split(" ")[0].lower()
            kinds = cells[0].removeprefix("dense ").split(", the best")[0].replace(" × ", "x").lower().split(", ")
            if size in SMALL:
                kinds = [f"{size}-{cells[0].split(' ')[1]}{block}" for block in BLOCKS]
            shown = (", ".join(f"{ends[kind][at]:.{d}f}" for kind in kinds) for at, d in ((1, 2), (0, 3)))
            rows.append([cells[0], *shown, *cells[3:]])
        yield BENCHMARKS, heads[file], rows


@figures
def small_steps() -> Iterator[Fact]:
    found, rows, ratios = raw("small_steps_1xH200_d97429d6.json"), [], []
    header = "| | before, `118dc256` | `d97429d6` | ratio | predicted |"
    for label, *_ in table(BENCHMARKS, header):
        name = label.lower().replace(",", "")
        before, now = ([each[name]["median_ms"] for each in found[tree]] for tree in ("beside", "here"))
        ratios.append(f"{statistics.mean(now) / statistics.mean(before):.2f}")
        times = (", ".join(f"{ms:.2f}" for ms in each) for each in (before, now))
        rows.append([label, *times, ratios[-1], f"{found['here'][0][name]['predicted_ms']:.2f}"])
    yield BENCHMARKS, header, rows
    tiny = raw("small_steps_1core.json")
    (adamw, adamw_now), (muon, muon_now) = (
        [statistics.mean(each[name]["median_ms"] for each in tiny[tree]) for tree in ("beside", "here")]
        for name in ("mini adamw", "medium muon")
    )
    told = f"took {adamw:.1f} ms with AdamW and takes {adamw_now:.1f}, a ratio of {adamw_now / adamw:.2f}"
    yield BENCHMARKS, f"{told}, and {muon:.1f} and {muon_now:.1f} with Muon, {muon_now / muon:.2f}"


@figures
def what_differs_between_sparse_berts() -> Iterator[Fact]:
    found, later = raw(FAMILY), raw(LATER)
    starts = [each["mini-2.00e-03-seed0"]["held_out"][0] for each in (raw(UNSCALED), later)]
    yield BENCHMARKS, "loss of {:.3f} here and of {:.3f} there".format(*starts)
    best = best_of(found, lambda name: name.split("-muon")[0])
    ends = {kind: run["held_out"][-1] for kind, run in best.items()}
    second = {name.split("-muon")[0]: run["held_out"][-1] for name, run in later.items() if "-muon" in name}
    header = "| held-out loss at the end, Medium | first seed |"
    kinds = [cells[0] for cells in table(BENCHMARKS, header)]
    of = [f"medium-{kind.replace(' ', '')}" for kind in kinds]
    rows = [[kind, f"{ends[name]:.3f}", f"{second[name]:.3f}"] for kind, name in zip(kinds, of, strict=True)]
    yield BENCHMARKS, header, rows
    apart = sorted(abs(second[kind] - ends[kind]) for kind in second if "dynamic" in kind)
    yield BENCHMARKS, "ended {:.3f}, {:.3f} and {:.3f} apart".format(*apart)
    ends |= {kind: (ends[kind] + loss) / 2 for kind, loss in second.items()}
    of_size = {size: {k: [ends[f"{size}-{k}{b}"] for b in BLOCKS] for k in ("dynamic", "static")} for size in SMALL}
    columns, times = [], []
    for size, dense in SMALL.items():
        moving, fixed = of_size[size].values()
        best_dense = ends[dense[0]]
        assert best_dense == min(ends[shape] for shape in dense)
        who = "they" if size == "base" else "the moving ones"
        above = [each - best_dense for each in (*moving, *fixed)]
        columns.append(
            (
                f"{fixed[0] - moving[0]:.3f} below",
                f"{who} are {fixed[3] - moving[3]:.3f} below",
                f"{moving[0] - moving[3]:.3f} below",
                f"it has, and is {min(above):.3f} to {max(above):.3f} below",
            )
        )
        for block, number in zip(BLOCKS, (160, 160, 160, 80), strict=True):
            moved, still = (best[f"{size}-{kind}{block}"] for kind in ("dynamic", "static"))
            ms = (moved["trained_s"] - still["trained_s"]) / number * 1e3
            times.append((ms, moved["trained_s"] / still["trained_s"] - 1, ms / moved["step_ms"]))
    seen = table(BENCHMARKS, "| written down before | seen of Medium, by means |")[1:]
    for cells, *said in zip(seen, *columns, strict=True):
        assert [each in cell for cell, each in zip(cells[1:], said, strict=True)] == [True, True], (cells, said)
    below = {s: [f - m for m, f in zip(*of_size[s].values(), strict=True)] for s in SMALL}
    medium, base = (of_size[size]["dynamic"] for size in SMALL)
    yield BENCHMARKS, f"of 4 even {medium[0] - medium[1]:.3f}"
    yield BENCHMARKS, f"in Base by {span(below['base'], '.3f')} and in Medium by {span(below['medium'], '.3f')}"
    for page in (BENCHMARKS, SPARSITY):
        yield page, f"blocks of 8 and 16 ends {base[0] - base[3]:.2f} below"
    yield BENCHMARKS, f"ends {ends['2x672'] - ends['base']:.3f} above dense Base"
    move_ms, longer, in_steps = zip(*times, strict=True)
    yield BENCHMARKS, f"took {span(move_ms, '.0f')} ms"
    yield BENCHMARKS, f"training by {span([100 * each for each in longer], '.0f')} %"
    yield SPARSITY, f"in BERT-Base by {span(below['base'], '.2f')} and in BERT-Medium by"
    yield SPARSITY, f"in BERT-Medium by {span(below['medium'], '.2f')}"
    yield SPARSITY, f"end up to {apart[-1]:.2f} apart"
    for size, dense, shape in (("medium", "2x400", "2 × 400 is"), ("base", "2x672", "2 × 672")):
        least = min(end for of_kind in of_size[size].values() for end in of_kind) - ends[dense]
        yield SPARSITY, f"{shape} at least {least:.2f} below every sparse {size.capitalize()}"
    assert (round(min(in_steps)), round(max(in_steps))) == (4, 5)
    yield SPARSITY, "a move still took as long as four or five steps"


@figures
def sparse_berts_with_adamw() -> Iterator[Fact]:
    found, later = raw(FAMILY), raw(LATER)
    adamw = best_of({n: r for n, r in later.items() if n.endswith("seed0")}, lambda name: name.rsplit("-", 3)[0])
    of_adamw = {kind: run["held_out"][-1] for kind, run in adamw.items()}
    with_muon = {kind: run["held_out"][-1] for kind, run in best_of(found, lambda name: name.split("-muon")[0]).items()}
    names = {"dense 2 × 400": "2x400", "dense Mini": "mini", "Medium static 1": "medium-static1"}
    names["Medium dynamic 1"] = "medium-dynamic1"
    rows = {model: [f"{of_adamw[kind]:.3f}", f"{with_muon[kind]:.3f}"] for model, kind in names.items()}
    header = "| held-out loss at the end, first seed | AdamW | Muon |"
    assert len(table(BENCHMARKS, header)) == len(rows)
    yield BENCHMARKS, header, rows
    difference = of_adamw["medium-dynamic1"] - of_adamw["medium-static1"]
    yield BENCHMARKS, f"moving pattern ends {difference:.3f} above the fixed one"
    small = adamw["2x400"]
    yield BENCHMARKS, f"{small['step_ms']:.1f} ms for 2 × 400 with AdamW ({small['predicted_ms']:.1f} predicted)"
    moves = [("medium-dynamic8-muon-3.20e-03-seed1", "medium-static8-muon-1.60e-03-seed1")]
    moves += [(f"medium-dynamic1-{rate}-seed0", f"medium-static1-{rate}-seed0") for rate in ("3.20e-03", "6.40e-03")]
    times = [(later[one]["trained_s"], later[other]["trained_s"], later[one]["step_ms"]) for one, other in moves]
    ms = [(moved_s - fixed_s) / 160 * 1e3 for moved_s, fixed_s, _ in times]
    longer = span([100 * (moved_s / fixed_s - 1) for moved_s, fixed_s, _ in times], ".0f")
    yield BENCHMARKS, f"**{span(ms, '.0f')} ms** for Medium on one H200"
    yield SPARSITY, f"one of BERT-Medium's patterns took {span(ms, '.0f')} ms"
    yield BENCHMARKS, f"or {longer} % of the training"
    yield SPARSITY, f"In Medium, moves lengthened 1,832 steps by {longer} %"
    in_steps = [move / step for move, (_, _, step) in zip(ms, times, strict=True)]
    assert (round(min(in_steps)), round(max(in_steps))) == (1, 2)

    def of(column: str, size: str) -> str:
        return span([run[column] for name, run in found.items() if name.startswith(size)])

    predicted = {size: of("predicted_ms", size) for size in ("mini", "medium", "base")}
    yield BENCHMARKS, f"with Muon {of('step_ms', 'mini')} ms for Mini ({predicted['mini']} predicted)"
    yield BENCHMARKS, f"{of('step_ms', 'medium')} ms for Medium ({predicted['medium']})"
    yield BENCHMARKS, f"Base took {of('step_ms', 'base')} ms ({predicted['base']})"
    yield BENCHMARKS, f"A run needed {span([run['start_s'] for run in found.values()], '.0f')} s"


@pytest.mark.parametrize("facts", FIGURES, ids=lambda facts: facts.__name__)
def test_each_figure_is_that_of_its_raw_file(facts: Callable[[], Iterator[Fact]]) -> None:
    for page, what, *rows in facts():
        if not rows:
            assert what in words(page), page
            continue
        shown = table(page, what)
        if isinstance(rows[0], Mapping):
            found = {cells[0]: cells[1:] for cells in shown}
            pairs = [(found[name], values) for name, values in rows[0].items()]
        else:
            assert len(shown) == len(rows[0]), what
            pairs = list(zip(shown, rows[0], strict=True))
        for cells, values in pairs:
            assert len(cells) == len(values), (what, cells)
            for cell, value in zip(cells, values, strict=True):
                assert is_shown(cell, value), (what, cells, cell, value)
