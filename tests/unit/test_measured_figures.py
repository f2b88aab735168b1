"""The figures of the documentation that CPUs measured or computed are those of the raw files and executed notebooks."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from raw_files import BENCHMARKS, README, ROOT, raw, shows, table, words

import workbench as wb
from benchmarks.coordinate_check import CHANGE, HIDDEN, STREAM, WIDTHS, coordinate_check, drift
from tests.distributed import zoo
from workbench.figures.figure import PLOTLY_MIME


def test_the_best_rates_of_the_width_rule_are_those_of_the_raw_file() -> None:
    content = raw("width_rule_1core.json")
    proxy = (64, 4)

    def losses(size: tuple[int, int], rule: bool) -> dict[int, float]:
        return {
            run["position"]: run["held_out_loss"]
            for run in content["runs"]
            if (run["width"], run["depth"]) == size and run["rule"] == (rule or size == proxy)
        }

    def best(size: tuple[int, int], rule: bool) -> int:
        return min(losses(size, rule), key=losses(size, rule).__getitem__)

    centre = best(proxy, True)
    for page, header in ((BENCHMARKS, "| width × depth | best rate"), ("docs/scaling.md", "| width × depth | steps")):
        rows = table(page, header)
        assert len(rows) == 6
        for cells in rows:
            width, depth = map(int, re.findall(r"\d+", cells[0])[:2])
            for rule in (True, False):
                position = best((width, depth), rule)
                if page == BENCHMARKS:
                    rate, steps = cells[1:3] if rule else cells[3:5]
                    assert shows(rate, 1e-2 * 2 ** (position / 2))
                else:
                    steps, loss = cells[1::2] if rule else cells[2::2]
                    assert shows(loss, losses((width, depth), rule)[centre]), cells
                assert int(steps) == position - centre, cells
    larger = [(width, depth) for width in (64, 128, 256) for depth in (4, 8) if (width, depth) != proxy]

    def lowest(size: tuple[int, int], rule: bool) -> float:
        return losses(size, rule)[best(size, rule)]

    def cost(rule: bool) -> float:
        return max(losses(size, rule)[centre] - lowest(size, rule) for size in larger)

    page, ends = words("docs/scaling.md"), {rule: [lowest(size, rule) for size in larger] for rule in (True, False)}
    assert f"costs the fifth {cost(True):.2f} nats" in page
    assert f"the proxy's rate costs up to {cost(False):.2f} nats" in page
    assert f"end at {min(ends[False]):.2f} to {max(ends[False]):.2f} without the rule" in page
    assert (
        f"at {min(ends[True]):.2f} to {max(ends[True]):.2f} with it; the proxy ends at {lowest(proxy, True):.2f}"
        in page
    )
    assert f"({len(content['runs'])} runs, " in page


def test_drifts_of_the_coordinate_check_are_those_of_its_example() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    example = (
        page.partition("## Does the model do as the rule says?")[2].partition("```python\n")[2].partition("Path(")[0]
    )
    made: dict[str, Any] = {"wb": wb}
    exec(example, made)
    widths = coordinate_check(made["tried"], "width", WIDTHS)
    depths = coordinate_check(made["tried"], "depth", (2, 6, 18, 54))
    rows = iter(table("docs/scaling.md", "| after four steps of this experiment |"))
    for check, part in ((widths, HIDDEN), (depths, STREAM)):
        for size in (part, CHANGE.format(part)):
            found = [round(drift(sizes, size), 2) for sizes in check]
            assert [float(cell) for cell in next(rows)[1:]] == found, size


def test_what_a_published_law_expects_of_the_pair_is_what_the_pages_say() -> None:
    small, large = 303e6, 2.39e9  # without embeddings
    at = [f"{wb.analysis.KAPLAN.difference(small, large, tokens):.2f}" for tokens in (40e6, 1e9, 10e9)]
    assert (
        f"law expects {at[0]} nats between them after 40 M tokens, {at[1]} after 1 G and {at[2]} after 10 G."
        in words("docs/scaling.md")
    )
    assert f"the larger one {at[2]} nats lower after 10 B tokens" in words(README)
    sizes = {"num_layers": (2, 24, 5, 54), "hidden_size": (32, 1024, 64, 1920), "num_heads": (2, 16, 4, 30)}
    each = [dict(zip(sizes, size, strict=True)) for size in zip(*sizes.values(), strict=True)]
    options = {"layout": "pre_ln", "next_sentence": False, "dropout": 0.0}
    few, large, many, scaled = (
        wb.analysis.parameters_without_embeddings(wb.models.bert(**one, vocab_size=64, **options)) for one in each
    )
    ratios = f"{1.536e6 / many:.0f} and {1.536e6 / few:.0f} tokens a parameter in place of"
    assert f"with {ratios} {66e6 / scaled:.2f} and {66e6 / large:.1f}" in words(README)
    shares = []
    for layers, width in ((4, 128), (54, 1920)):
        model = wb.models.bert(hidden_size=width, num_layers=layers, num_heads=width // 64, **options)
        tables = (30522 + 512 + 2) * width
        shares.append(tables / (tables + wb.analysis.parameters_without_embeddings(model)))
    page = words("docs/scaling.md")
    assert f"the tables are {100 * shares[0]:.0f} % of a model of 4 layers × 128 and {100 * shares[1]:.1f} % of" in page


def test_tried_rates_and_initial_weights_of_the_demo_are_those_of_the_raw_file() -> None:
    runs = raw("demo_tuning_1core.json")["runs"]
    losses = {(run["rate"], run["initializer_range"]): run["held_out_loss"] for run in runs}
    assert min(losses, key=losses.__getitem__) == (7e-3, 0.15)
    low, high = f"{losses[5e-3, 0.15]:.4f} with 5e-3", f"{losses[1e-2, 0.15]:.4f} with 1e-2"
    narrow, wide = losses[7e-3, 0.1], losses[7e-3, 0.2]
    page = words(BENCHMARKS)
    assert f"(7e-3 and 0.15, {losses[7e-3, 0.15]:.4f} nats): {low}, {high}" in page
    assert f"{narrow:.4f} with initial weights of 0.1 and {wide:.4f} with 0.2" in page


def test_rates_and_memory_of_tokenising_are_those_of_the_raw_files() -> None:
    page = words(BENCHMARKS)
    stored, streamed = raw("tokenizing_2cores_busy.json")["rows"]
    assert stored["bare_processes_mb_per_cpu_s"] > stored["bare_threads_mb_per_cpu_s"]
    shares = [f"{row['share_of_bare_mb_per_cpu_s']:.0%}".replace("%", " %") for row in (stored, streamed)]
    assert f"by processor time | 90 % | **{shares[0]}** | 2 CPU cores with other work" in page
    assert f"| the same, streamed | 90 % | **{shares[1]}** |" in page
    of_rounds = [share for row in (stored, streamed) for share in row["share_of_bare_mb_per_s_of_each_round"]]
    assert f"went from {min(of_rounds):.1f} to {max(of_rounds):.1f} there" in page
    rows = {(row["way"], row["megabytes"]): row for row in raw("tokenizing_2cores_idle.json")["rows"]}
    large = [rows[way, 1000] for way in ("stored", "streamed")]
    growth = [row["peak_mb"] / rows[row["way"], 100]["peak_mb"] - 1 for row in large]
    memory = "; ".join(f"{row['peak_mb']:.0f} MB" for row in large)
    assert f"| {memory}; {', '.join(f'{100 * each:.1f} %' for each in growth)} |" in page
    first = "; ".join(f"{row['first_batch_s']:.1f} s" for row in large)
    assert f"| | {first} | the same |" in page


def test_how_many_pairs_a_contrast_tells_apart_is_what_the_raw_file_says() -> None:
    means = raw("contrast_verdicts.json")["means"]
    rows = {cells[0]: cells[1:] for cells in table("docs/analysis.md", "| seeds of each |")}
    for name, known, verdict in (
        ("found with `scatter`", "with", "found"),
        ("found without `scatter`", "without", "found"),
        ("false with `scatter`, of equal pairs", "with", "false"),
        ("false without", "without", "false"),
    ):
        for cell, seeds in zip(rows[name], (1, 2, 3, 5), strict=True):
            assert shows(cell, means[f"{seeds} seeds, {known} scatter"][verdict]), (name, seeds)


def test_times_of_planning_are_those_of_the_raw_file() -> None:
    content = raw("planning_time_1core.json")
    rows = table(BENCHMARKS, "| model | cluster | capture |")
    for (_, cluster, *cells), found in zip(rows, content["rows"], strict=True):
        assert cluster.replace(",", "") == found["cluster"]
        values = [found[part] for part in ("capture_s", "profile_s", "search_s", "all_s")]
        assert all(shows(cell, value) for cell, value in zip(cells, values, strict=True)), cells
    moved = content["sliders"]["picture"]
    said = f"{moved['moves']} moves, median {moved['median_ms']} ms, longest {moved['longest_ms']} ms"
    assert said in words(BENCHMARKS)
    scaled, gpt = (content["rows"][at]["all_s"] for at in (1, 3))
    assert f"| {scaled:.1f} s; {gpt:.1f} s; {moved['longest_ms']} ms |" in words(BENCHMARKS)


def test_the_pairs_figures_are_those_of_the_recorded_runs() -> None:
    names = ("large-20261125-015020", "large-20261125-015021", "large-20261125-160952")
    names += ("scaled-20261125-015026", "scaled-20261125-015030", "scaled-20261125-160959")
    names += ("large-20261125-230852", "scaled-20261125-230858")
    runs = [wb.load_run(ROOT / "notebooks" / "recorded" / f"bert-{name}") for name in names]
    rows = {name: cells for name, *cells in table(BENCHMARKS, "| run | BERT-Large |")}
    ends = []
    for at, run in enumerate(runs):
        experiment, known, history = run.experiment, run.evaluations(), run.history()
        assert rows["seed, eps"][at] == f"{experiment.seed}, {experiment.optimizer.eps:.0e}".replace("e-0", "e-")
        for name in ("held-out loss after 1 M tokens", "after 8 M", "after 16 M", "after 24 M", "after 30 M"):
            tokens = 1e6 * float(name.removesuffix(" tokens").split()[-2])
            nearest = min(range(len(known)), key=lambda each: abs(known.tokens[each] - tokens))
            assert shows(rows[name][at], known.eval_loss[nearest]), (name, at)
        ends.append(float(known.eval_loss[-1]))
        found = wb.runs.summary(run)
        summary = dict(zip(found.columns, found.rows[0], strict=True))
        assert rows["tokens/s"][at] == summary["tokens/s"]
        assert rows["MFU, whole head counted"][at] == summary["MFU"]
        for name, parts in (
            ("step", ("step, measured", "step, predicted")),
            ("peak", ("peak, measured", "peak, predicted")),
        ):
            [cell] = [cells[at] for row, cells in rows.items() if row.startswith(f"{name}, measured (predicted)")]
            assert cell == "{} ({})".format(*(summary[part].split()[0] for part in parts))
        assert shows(rows["device-minutes"][at], 60 * history.gpu_hours[-1])
    pairs = [(0, 3), (1, 4), (2, 5), (6, 7)]
    behind = [ends[scaled] - ends[large] for large, scaled in pairs]
    told = rows["behind BERT-Large of its seed and eps"]
    assert all(shows(told[scaled], each) for (_, scaled), each in zip(pairs, behind, strict=True))
    eps = [abs(float(one.evaluations().eval_loss[-1]) - end) for one, end in ((runs[0], ends[2]), (runs[4], ends[5]))]
    page = words(BENCHMARKS)
    assert f"BERT-Large by {eps[0]:.3f} with the same seed" in page
    assert f"scaled BERT by {eps[1]:.3f} against another" in page
    template = (ROOT / "templates" / "scaling_ladder.ipynb").read_text()
    assert [float(each) for each in re.findall(r"\(30e6 / real_sizes\[1\], -([\d.]+)\)", template)] == [
        round(each, 3) for each in behind
    ]
    width, depth, _, again = (f"{each:.2f}" for each in behind)
    assert depth == again
    page = words("docs/scaling.md")
    assert f"ended {depth} nats behind BERT-Large with the rule in two pairs" in page
    assert f"and {width} behind with `depth_rule=False`" in page
    assert f"two seeds of BERT-Large are {abs(ends[0] - ends[1]):.2f} apart" in page
    assert "from 8 to 11 M tokens, and from 13 M on it changes by less than 0.04" in words("docs/scaling.md")
    for large, scaled in ((runs[first], runs[second]) for first, second in pairs):
        tokens = large.evaluations().tokens / 1e6
        behind = scaled.evaluations().eval_loss - large.evaluations().eval_loss
        assert 7.5 < tokens[behind.argmax()] < 11.5
        assert np.ptp(behind[tokens > 12.5]) < 0.04


def test_the_pair_with_muon_is_as_its_recorded_runs_say() -> None:
    names = ("large-20261127-193809", "scaled-20261127-193814")
    runs = [wb.load_run(ROOT / "notebooks" / "recorded" / f"bert-{name}") for name in names]
    known = [run.evaluations() for run in runs]
    rows = {name: cells for name, *cells in table(BENCHMARKS, "| held-out loss after |")}
    columns = {"": "eval_loss", " with 30 % masked": "masked_30", " on held-out prose": "prose"}
    columns |= {" on held-out manuals": "manuals"}
    for at, tokens in enumerate((8e6, 16e6, 30e6, 48e6, 66e6)):
        large, scaled = (int(abs(each.tokens - tokens).argmin()) for each in known)
        assert shows(rows["BERT-Large"][at], known[0].eval_loss[large])
        assert shows(rows["scaled BERT"][at], known[1].eval_loss[scaled])
        for row, column in columns.items():
            assert shows(rows[f"difference{row}"][at], known[1][column][scaled] - known[0][column][large]), row
    page = words(BENCHMARKS)
    histories = [run.history() for run in runs]
    late = [float(each.loss[(each.tokens > 60e6) & (each.tokens < 66.75e6)].mean()) for each in histories]
    told = f"from 60 to 66.7 M tokens is {late[0]:.3f} and {late[1]:.3f}, so that scaled BERT is"
    assert f"{told} {late[0] - late[1]:.3f}" in page
    rows = {name: cells for name, *cells in table(BENCHMARKS, "| | plan | step, measured (predicted) | tokens/s |")}
    for name, run in zip(("BERT-Large", "scaled BERT"), runs, strict=True):
        found = wb.runs.summary(run)
        summary = dict(zip(found.columns, found.rows[0], strict=True))
        step, peak = (
            [summary[f"{what}, {how}"].split()[0] for how in ("measured", "predicted")] for what in ("step", "peak")
        )
        minutes = f"{60 * run.history().gpu_hours[-1]:.1f}"
        shown = ["{} ({}) ms".format(*step), summary["tokens/s"], summary["MFU"], "{} ({}) GiB".format(*peak), minutes]
        assert rows[name][1:] == shown
    contrast = wb.contrast(runs, scatter=0.03)
    [ahead] = [re.search(r"by ([\d.]+ ± [\d.]+)", each.describe())[1] for each in contrast.differences]
    for shown_in in (BENCHMARKS, "docs/scaling.md"):
        assert ahead in words(shown_in)
    flops = next(each for each in contrast.standings if each.axis == "flops").losses
    ended = f"({flops['bert-large'].value:.2f} nats when it had ended, the scaled one {flops['bert-scaled'].value:.1f})"
    assert ended in words(README)


def test_the_seeds_of_the_pair_are_as_their_recorded_runs_say() -> None:
    def at(name: str, tokens: float, held_out: str = "eval_loss") -> float:
        known = runs[name].evaluations()
        index = int(abs(known.tokens - tokens).argmin())
        assert abs(known.tokens[index] - tokens) < 1e5
        return float(known[held_out][index])

    large = ("large-20261127-193809", *(f"large-muon-seed{seed}" for seed in (1, 2, 3)))
    scaled = ("scaled-20261127-193814", "scaled-muon-seed1")
    adamw = ("large-adamw-seed0", "scaled-adamw-seed0")
    runs = {name: wb.load_run(ROOT / "notebooks" / "recorded" / f"bert-{name}") for name in (*large, *scaled, *adamw)}
    rows = {name: cells for name, *cells in table(BENCHMARKS, "| loss on held-out prose after |")}
    for index, tokens in enumerate((8e6, 16e6, 20e6, 22e6, 28e6, 48e6, 66e6, 76e6)):
        ends = [at(name, tokens) for name in large]
        assert shows(rows["BERT-Large, mean of four seeds"][index], statistics.mean(ends))
        assert shows(rows["their standard deviation"][index], statistics.stdev(ends))
        for row, name, base in (
            ("scaled BERT, seed 0, to that mean", scaled[0], statistics.mean(ends)),
            ("scaled BERT, seed 1, to that mean", scaled[1], statistics.mean(ends)),
            ("BERT-Large, AdamW", adamw[0], 0.0),
            ("scaled BERT, AdamW", adamw[1], 0.0),
            ("difference, AdamW", adamw[1], at(adamw[0], tokens)),
        ):
            if rows[row][index]:
                assert shows(rows[row][index], at(name, tokens) - base), row
            else:
                assert runs[name].row()["tokens"] < tokens
    means = [statistics.mean(at(name, 66e6, held_out) for name in large) for held_out in ("eval_loss", "manuals")]
    prose, manuals = (means[k] - at(scaled[0], 66e6, held_out) for k, held_out in enumerate(("eval_loss", "manuals")))
    scatter = statistics.stdev(at(name, 66e6) for name in large)
    first_page = words(README)
    assert f"{prose:.3f} nats below the mean of four seeds of BERT-Large, which scatter by {scatter:.3f}" in first_page
    assert f"and {manuals:.3f} on held-out manuals" in first_page
    behind = at(adamw[1], 28e6) - at(adamw[0], 28e6)
    assert f"With AdamW it is {behind:.2f} behind after 28 M tokens" in first_page
    assert f"and {prose:.3f} below the mean of four seeds, which scatter by {scatter:.3f}" in words("docs/scaling.md")
    found = wb.contrast([runs[name] for name in (*large, *scaled)])
    assert "bert-scaled is lower than bert-large (-0.048 ± 0.022, 90% interval, 2 and 4 seeds" in repr(found)
    page = words(BENCHMARKS)
    assert "0.048 ± 0.022 at 22 M (two and four seeds)" in page
    end = at(adamw[0], 76e6)
    assert f"ends {end - statistics.mean(at(name, 76e6) for name in large):.2f} nats above its runs with Muon" in page
    known = [runs[name].evaluations() for name in large]
    passed = known[0].tokens[np.mean([each.eval_loss for each in known], axis=0) < end][0]
    assert f"those pass AdamW's last loss after {passed / 1e6:.0f} M tokens" in page
    rows = {name: cells for name, *cells in table(BENCHMARKS, "| | step, measured (predicted) | tokens/s | MFU |")}
    told = (*((f"BERT-Large, Muon, seed {seed}", large[seed]) for seed in (1, 2, 3)), ("BERT-Large, AdamW", adamw[0]))
    for row, name in (*told, ("scaled BERT, Muon", scaled[1]), ("scaled BERT, AdamW", adamw[1])):
        summary = wb.runs.summary(runs[name])
        own = dict(zip(summary.columns, summary.rows[0], strict=True))
        step, peak = (
            [own[f"{what}, {how}"].split()[0] for how in ("measured", "predicted")] for what in ("step", "peak")
        )
        assert rows[row] == ["{} ({}) ms".format(*step), own["tokens/s"], own["MFU"], "{} ({}) GiB".format(*peak)]


def test_losses_of_the_ladder_are_those_of_its_executed_notebook() -> None:
    ladder, page = "\n".join(printed("scaling_ladder_4xH200")), words("docs/scaling.md")
    for size, *cells in table(BENCHMARKS, "| layers × width | 4,000 steps |"):
        if "held out" in size:
            assert f"{cells[-1].partition(' ')[0]} measured over 3 seeds" in ladder
            continue
        sweep = ladder.partition(f"Sweep bert-{size.replace(' × ', 'x')}-sweep")[2].partition("Objective")[0]
        for steps, cell in zip((4000, 6500, 10500), cells, strict=True):
            [(mean, deviation)] = re.findall(rf"^{steps} +([\d.]+) +([\d.]+) +3 finished", sweep, re.MULTILINE)
            assert cell == f"{float(mean):.3f} ({float(deviation):.3f})", (size, steps)
    pairs = re.findall(
        r"- (\S+ × \S+ and \S+ × \S+) after \S+ M tokens .*: the larger ends ([\d.]+) nats lower", ladder
    )
    rows = {pair: cells for pair, *cells in table("docs/scaling.md", "| pair | after 33 M tokens")}
    assert {pair: [cell.removesuffix(" nats") for cell in cells[1::2] if cell] for pair, cells in rows.items()} == {
        pair: [nats for each, nats in pairs if each == pair] for pair, _ in pairs
    }
    for predicted in re.findall(r"- (?:\S+ × \S+: )(\S+) \((\S+ to \S+)\) nats predicted, (\S+) measured", ladder):
        assert "| {} nats ({}) | {} |".format(*predicted) in page
    assert "ends 0.237 nats lower than the smaller; +0.318 (+0.018 to +0.500) was predicted: within" in ladder
    assert "| 0.318 nats (0.018 to 0.500) | 0.237 |" in page
    assert "0.04 nats below BERT-Large (303 M) (90% interval -0.091 to +0.39)" in ladder
    assert "0.04 nats below BERT-Large after 40 M tokens (-0.09 to 0.39)" in page
    assert f"in {papermill('scaling_ladder_4xH200')['duration'] / 60:.0f} minutes) 42 runs of six sizes" in page


NUMBERS = ("no", "one", "two", "three", "four", "five")
DEMO = {"bert-large-mini": "BERT-Large, mini", "bert-scaled-mini": "scaled BERT, mini"}


def ends_of(file: str) -> list[list[float]]:
    """Return the last held-out losses of the demo's two models, over seeds."""
    runs = raw(file)["runs"]
    return [[run["held_out_loss"] for run in runs if run["model"] == name] for name in DEMO]


def test_losses_of_the_demo_are_those_of_the_raw_files() -> None:
    content = raw("demo_2cores.json")
    rows = table(BENCHMARKS, "| seed | model |")
    for (seed, model, training, held_out, below), run in zip(rows, content["runs"], strict=True):
        assert (int(seed), model) == (run["seed"], DEMO[run["model"]])
        assert shows(training, run["training_loss"])
        assert shows(held_out, run["held_out_loss"])
        assert shows(below, content["unigram_entropy"] - run["held_out_loss"])
    shown = {}
    for file in ("demo_2cores.json", "demo_adamw_2cores.json"):
        ends = ends_of(file)
        means, spreads = [statistics.mean(end) for end in ends], [statistics.stdev(end) for end in ends]
        both = ", ".join(f"{mean:.3f} ± {spread:.3f}" for mean, spread in zip(means, spreads, strict=True))
        shown[file] = ends, means, spreads, f"{NUMBERS[len(ends[0])]} seeds", both
    ends, means, spreads, seeds, both = shown["demo_2cores.json"]
    assert f"{seeds}, mean ± standard deviation | {both}" in words(README)
    assert f"means are {means[0]:.3f} and {means[1]:.3f}" in words(BENCHMARKS)
    assert f"between seeds {spreads[0]:.3f} and {spreads[1]:.3f}" in words(BENCHMARKS)
    assert f"({max(ends[1]):.3f}) is {min(ends[0]) - max(ends[1]):.3f} below the best" in words(BENCHMARKS)
    assert f"of BERT-Large ({min(ends[0]):.3f})" in words(BENCHMARKS)
    assert f"unigram entropy of the text is {content['unigram_entropy']:.3f} nats" in words(BENCHMARKS)
    _, adamw, spreads, seeds, _ = shown["demo_adamw_2cores.json"]
    assert f"the means of {seeds} are {adamw[0]:.3f} and {adamw[1]:.3f}" in words(BENCHMARKS)
    assert f"deviations of {spreads[0]:.3f} and {spreads[1]:.3f}" in words(BENCHMARKS)
    assert f"ends {adamw[0] - means[0]:.2f} lower, the larger one {adamw[1] - means[1]:.2f}" in words(BENCHMARKS)
    assert f"{means[0] - means[1]:.2f} in place of {adamw[0] - adamw[1]:.2f}" in words(BENCHMARKS)


PILOT = {"depth_rule": False, "warmup_share": 0.1, "decay": 0.01, "batch": 64, "seed": 0, "adamw_position": 0}


def pilot(algorithm: str, width: int, position: int, **changes: Any) -> float:
    """Return the held-out loss of a training of `benchmarks/muon_pilots.py`."""
    key = {"algorithm": algorithm, "width": width, "position": position, **PILOT, **changes}
    runs = raw("muon_pilots_1core.json")["runs"]
    [loss] = [run["held_out_loss"] for run in runs if all(run[name] == value for name, value in key.items())]
    return float(loss)


def test_pilots_of_muon_are_those_of_the_raw_file() -> None:
    base = {position: pilot("muon", 32, position) for position in (-2, -1, 0, 1)}
    assert min(base, key=base.__getitem__) == -1
    page = words(BENCHMARKS)
    assert f"no lower than with 1.4e-2 ({base[-1]:.4f}): {base[-2]:.4f} with 1e-2, {base[0]:.4f} with 2e-2" in page
    assert f"and {base[1]:.4f} with 2.8e-2 (`muon_pilots.py`" in page
    page = words("docs/optimizers.md")
    larger = [pilot("muon", 64, position) for position in (-2, -1, 0)]
    assert "{:.3f}, {:.3f} and {:.3f} with 1e-2, 1.4e-2 and 2e-2".format(*larger) in page
    assert f"{base[-1]:.3f} with a warm-up of 10 %, {pilot('muon', 32, -1, warmup_share=0.02):.3f} with 2 %" in page
    assert f"{pilot('muon', 32, -1, decay=0.0):.3f} without decay" in page
    doubled = [pilot("muon", 32, position, batch=128) for position in (-1, 0)]
    assert "{:.3f} at the same rate and {:.3f} at sqrt(2) times".format(*doubled) in page
    assert f"{pilot('muon', 64, -1, depth_rule=True):.3f} with `depth_rule=True`" in words("docs/scaling.md")


def test_drifts_under_muon_are_those_of_the_raw_file() -> None:
    content, page = raw("coordinate_check_muon_1core.json"), table("docs/scaling.md", "| after four steps with Muon |")
    found = [drifts for of_axis in content.values() for drifts in of_axis.values()]
    for cells, drifts in zip(page, found, strict=True):
        assert all(shows(cell, drift) for cell, drift in zip(cells[1:], drifts, strict=True)), cells


def test_rates_that_carry_over_under_muon_are_those_of_the_raw_file() -> None:
    best: dict[int, dict[int, float]] = {}
    for run in raw("width_rule_muon_1core.json")["runs"]:
        if run["rule"] and run["depth"] == 4:
            best.setdefault(run["width"], {})[run["position"]] = run["held_out_loss"]
    rows = table("docs/scaling.md", "| width × 4 with Muon |")
    assert [int(cells[0]) for cells in rows] == sorted(best)
    centre = min(best[64], key=best[64].__getitem__)
    for (_, rate, loss, at_proxys), losses in zip(rows, (best[width] for width in sorted(best)), strict=True):
        lowest = min(losses, key=losses.__getitem__)
        assert {lowest - 1, lowest + 1} <= losses.keys(), "a worse rate on either side"
        assert abs(lowest - centre) <= 1, "within a factor of sqrt(2)"
        assert shows(rate, 1e-2 * 2 ** (lowest / 2))
        assert shows(loss, losses[lowest])
        assert shows(at_proxys, losses[centre])


def test_reads_of_the_simulated_cache_are_those_of_the_raw_file() -> None:
    found = {(row["block"], row["parts"]): row for row in raw("sparse_gradient_cache.json")}
    two, fifteen = found[16, 2], found[16, 15]
    page = words("docs/sparse_kernels.md")
    lower, upper = sorted(two[f"read_gb_with_{mb}_mb_cache"] for mb in (25, 40))
    assert f"{lower:.1f} to {upper:.1f} GB are read from memory, where {two['both_inputs_gb']:.1f} GB would do" in page
    assert shows("0.3", fifteen["read_gb_with_25_mb_cache"])
    assert f"the fp32 sums of the parts take {fifteen['sums_of_parts_gb']:.1f} GB more" in page


def test_predicted_over_measured_rates_of_streams_are_those_of_the_raw_files() -> None:
    supply = [raw(f"data_supply{name}_2cores.json")["predicted_over_measured"] for name in ("", "_prose")]
    ratios = [each[cores]["by_clock"] for each in supply for cores in ("1", "2")]
    shown = re.search(
        r"\| ([\d.]+), ([\d.]+); prose that nothing was fitted on: ([\d.]+), ([\d.]+) \|", words(BENCHMARKS)
    )
    assert shown
    assert all(shows(text, ratio) for text, ratio in zip(shown.groups(), ratios, strict=True))
    assert f"predictions were 1 to {100 * float(shown[4]) - 100:.0f} % too high on idle cores" in words("docs/data.md")


def test_figures_of_grids_are_those_of_the_raw_files() -> None:
    page, content = words("docs/grids.md"), raw("grids_predicted.json")
    v100, h200 = content["grid-v100-200-cells"], content["grid-h200-200-cells"]
    assert f"A grid of {len(v100['cells'])} cells takes {v100['processor_s']:.1f} s of one core's time" in page
    assert f"one of {len(h200['cells'])} cells {h200['processor_s']:.1f} s for the four H200" in page
    steps = [cell["step_ms"] for cell in content["grid-v100"]["cells"] if cell["plan"]]
    assert f"takes {max(steps) / min(steps):.1f} times as long as the best" in page
    frontier = raw("frontier_predicted.json")["fastest_for_each_limit"]
    leanest, fastest = frontier[0], frontier[-1]
    assert f"from {leanest['peak_bytes'] / 2**30:.1f} GiB a device at {leanest['step_ms'] / 1e3:.1f} s a step" in page
    assert f"to {fastest['peak_bytes'] / 2**30:.1f} GiB at {fastest['step_ms'] / 1e3:.1f} s" in page


def test_a_second_launch_takes_half_of_what_it_took_where_each_run_imported_what_it_needs() -> None:
    content = raw("cell_time.json")
    first, second, first_before, before = content["medians"].values()
    assert second["all processes"] < before["all processes"] / 2
    assert first["all processes"] < 1.05 * first_before["all processes"], "the first is not slower"
    page = words("docs/grids.md")
    assert f"takes {second['all processes']:.1f} s of processor time" in page
    assert f"took {before['all processes']:.1f} s where each cell imported it" in page
    rows = table(BENCHMARKS, "| | processor time, all processes |")
    for (name, *cells), found in zip(rows, content["medians"].values(), strict=True):
        order = ("all processes", "launcher", "ranks", "supervisor", *list(found)[-4:])
        assert all(shows(text, found[key]) for text, key in zip(cells, order, strict=True)), name
        assert ("each run imported" in name) == (content["commits"]["beside"] in name)


@pytest.mark.parametrize(
    ("command", "shown_in", "file"),
    [
        ("any_model", "docs/models.md", "any_model_2cores.json"),
        ("model_table", "docs/models.md", "model_table_2cores.json"),
        ("live", BENCHMARKS, "live_2cores.json"),
    ],
)
def test_a_table_that_a_command_fills_in_is_that_of_its_raw_file(command: str, shown_in: str, file: str) -> None:
    module = importlib.import_module(f"benchmarks.{command}")
    content = raw(file)
    lines = (ROOT / shown_in).read_text().partition(f"<!-- made by benchmarks/{command}.py -->\n")[2]
    assert lines.startswith("\n".join(module.table(content.get("rows", content))) + "\n")


def test_every_named_model_of_the_zoo_is_as_near_to_plain_pytorch_as_is_said() -> None:
    rows = {row["name"]: row for row in raw("model_table_2cores.json")["rows"]}
    assert list(rows) == list(zoo.MODELS)
    largest = [max(found.values()) for row in rows.values() for found in row["differences"].values()]
    assert len(largest) == 10 * len(rows)
    assert max(largest) < 1e-5


def test_losses_without_context_are_those_of_the_demo_and_of_the_real_pair() -> None:
    options = {"layout": "pre_ln", "next_sentence": False, "dropout": 0.0}
    demo = wb.models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64, max_positions=16, **options)
    text = wb.data.corpus("demo", vocab_size=64, masked_share=0.3)
    level = wb.analysis.context_free(wb.Experiment(model=demo, data=text, steps=1500, global_batch=64, seq_len=16))
    page = words("docs/scaling.md")
    assert f"level.unigram_entropy # {level.unigram_entropy:.2f} nats in the demo" in page
    assert f"level.loss # {level.loss:.2f}: what is reachable" in page
    copying = level.unigram_entropy - level.loss
    figures = (ROOT / "notebooks" / "bert_scaling_1xH100.ipynb").read_text()
    entropy, loss = (
        float(re.search(rf"{name} ([\d.]+) nats", figures)[1])
        for name in ("unigram entropy", "context-free prediction")
    )
    assert f"by {copying:.2f} nats in the demo, and by {entropy - loss:.1f} with 30,522 words" in page


def printed(notebook: str) -> Iterator[str]:
    """Yield the texts that a notebook's cells put out."""
    for cell in json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]:
        for output in cell.get("outputs", []):
            yield "".join(output.get("text", []))
            for kind in ("text/plain", "text/markdown"):
                yield "".join(output.get("data", {}).get(kind, []))


def papermill(notebook: str) -> dict[str, Any]:
    """Return what papermill wrote about the execution of a notebook."""
    found: dict[str, Any] = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["metadata"]["papermill"]
    return found


def drawn(notebook: str) -> Iterator[dict[str, Any]]:
    """Yield the traces of a notebook's figures."""
    for cell in json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]:
        for output in cell.get("outputs", []):
            yield from output.get("data", {}).get(PLOTLY_MIME, {}).get("data", [])


def test_figures_quoted_from_executed_notebooks_are_in_their_outputs() -> None:
    ladder, page = "\n".join(printed("scaling_ladder_2cores")), words("docs/scaling.md")
    for in_output, in_page in (
        ("1.579 (1.397 to 1.961) nats predicted, 1.779 measured", "1.579 nats (1.397 to 1.961) were predicted for it"),
        ("1.779 measured", "and 1.779 measured"),
        ("ends 0.281 nats lower than the smaller; +0.397 (-0.052 to +0.727)", "0.40 nats (-0.05 to 0.73) were"),
        ("its larger model has 9,410 times the parameters", "9,410 times the parameters"),
        ("0.002 nats below BERT-Large (303 M) (90% interval -0.16 to +0.19)", "(-0.16 to 0.19)"),
        ("0.26 nats below BERT-Large (303 M), by the law of Kaplan", "0.26 after 10 G tokens"),
    ):
        assert in_output in ladder
        assert in_page in page
    errors = re.findall(r"form .*?([\d.]+)% +([\d.]+)% +[+-]", ladder.partition("Scaling law of 24 runs")[2])[:2]
    residuals, left_out = ([round(float(error)) for error in column] for column in zip(*errors, strict=True))
    assert residuals == [5, 5]
    assert f"by 5 % of the loss and left-out sizes by {left_out[0]} to {left_out[1]} %" in page
    minutes = papermill("scaling_ladder_2cores")["duration"] / 60
    assert f"(gallery/scaling_ladder_2cores.ipynb) in {minutes:.0f} minutes on two CPU cores" in page
    differences = {
        pair: re.findall(rf"- {pair} after .*: the larger ends ([\d.]+) nats lower", ladder)
        for pair in ("1 × 32 and 2 × 64", "1 × 16 and 2 × 32")
    }
    for pair, nats in differences.items():
        first, second, third = (f"{float(each):.2f}" for each in nats)
        assert re.search(
            rf"{pair} (differ )?by {first}( nats)?( \(less than seeds move it\))?, {second} and {third}", page
        )
    sparse, page = "\n".join(printed("sparse_pareto_2cores")), words("docs/sparsity.md")
    for loss in ("2.183", "2.348", "2.584", "2.170", "2.148"):
        assert loss in sparse
        assert loss in page
    for interval in ("-0.004 to +0.048", "-0.068 to +0.042"):
        assert f"90 % interval {interval}" in sparse
        assert interval in page
    gpt, page = "\n".join(printed("gpt_sweep_2cores")), words("docs/grids.md")
    [correlation] = re.findall(r"rank correlation of predicted and measured steps: ([\d.]+)", gpt)
    [regret] = re.findall(r"regret of the planner's choice: ([\d.]+)%", gpt)
    [steps] = [trace for trace in drawn("gpt_sweep_2cores") if trace.get("name") == "measured"]
    ratios = [measured / predicted for predicted, measured in zip(steps["x"], steps["y"], strict=True)]
    assert (
        f"a rank correlation of {correlation} over {len(ratios)} cells, a regret of {regret} %, and steps that took"
        in page
    )
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as long as predicted" in page


def test_a_kernel_keeps_of_a_long_run_what_the_raw_file_says() -> None:
    found, page = raw("live_2cores.json")["memory"], words("docs/dashboard.md")
    bytes_per_step = {found["history_mib"][at] * 2**20 / (found["step"] * (at + 1) / 4) for at in range(4)}
    assert f"in {bytes_per_step.pop():.0f} bytes per logged step and run" in page
    assert not bytes_per_step
    assert max(found["objects"]) < 1.02 * min(found["objects"])
    assert "Python objects stays within 2 %" in page
