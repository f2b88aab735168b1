"""The figures of the documentation that were measured on GPUs, or planned for them, are those of the raw files."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from typing import Any

import pytest
from raw_files import BENCHMARKS, HISTORY, README, ROOT, raw, shows, table, words

from workbench.cost import Cluster
from workbench.cost.profile import break_even_sparsity
from workbench.cost.sparse_matrices import STORED_PRODUCTS, none_and_all_stored

RESULTS = ROOT / "benchmarks" / "results"
DEVICES = {name: Cluster.of(name, gpus=1).device for name in ("h100", "h200")}


def error(row: dict[str, Any], unit: str) -> float:
    return float(row[f"predicted_{unit}"] / row[f"measured_{unit}"] - 1)


def measured(*names: str) -> list[dict[str, Any]]:
    return [row for name in names for row in raw(f"prediction_{name}.json")["rows"] if row.get("measured_ms")]


def median_and_largest(rows: list[dict[str, Any]], unit: str) -> tuple[str, str]:
    errors = [abs(error(row, unit)) for row in rows]
    return f"{statistics.median(errors):.1%}".replace("%", " %"), f"{max(errors):.1%}".replace("%", " %")


UNKNOWN = ("2xH200_d81c33b", "2xH200_0982c5b")
UNKNOWN_H100 = ("1xH100_a4d6c56", "1xH100_8e1bb47")
AGAIN = ("1xH200_95a9de1", "1xH200_d2f8c6b", "1xH200_c180cfe")
PREDICTIONS = {
    "28 plans": (["2xH200_a2c680b"], "| case | plan | ms predicted |"),
    "unknown models on an H100": (UNKNOWN_H100, "| model | plan | ms predicted |"),
    "the same models again": (AGAIN, "| model, again | plan | ms predicted |"),
    "block-sparse": (["sparse"], "| weights | plan | ms predicted |"),
}


def same_plan(cells: list[str], row: dict[str, Any]) -> bool:
    shown = zip(cells[2:8], ("ms", "ms", "", "gib", "gib", ""), strict=True)
    values = [row["predicted_ms"], row["measured_ms"], error(row, "ms")]
    values += [row["predicted_gib"], row["measured_gib"], error(row, "gib")]
    return all(shows(text, value) for (text, _), value in zip(shown, values, strict=True))


@pytest.mark.parametrize("series", PREDICTIONS)
def test_each_row_of_predicted_and_measured_plans_is_one_of_its_raw_file(series: str) -> None:
    names, header = PREDICTIONS[series]
    rows = raw("sparse_training_1xH100_a4d6c56.json")["rows"] if names == ["sparse"] else measured(*names)
    shown = [cells for cells in table(BENCHMARKS, header) if "%" in cells[4]]
    assert len(shown) == len(rows)
    for cells in shown:
        assert sum(same_plan(cells, row) for row in rows) == 1, cells


def test_what_was_measured_again_or_lost_is_what_the_raw_files_say() -> None:
    page = words(BENCHMARKS)
    again = sorted(raw("prediction_2xH200_c5e3ea6.json")["rows"], key=lambda row: row["predicted_ms"])
    time, memory = ([f"{100 * error(row, unit):+.1f} %" for row in again] for unit in ("ms", "gib"))
    assert f"has errors of {time[0]} and {time[1]} of the time, and {memory[0]} and {memory[1]} of the memory" in page
    masked, sparse = raw("sparse_training_1xH100_a4d6c56.json")["rows"][3:5]
    assert f"where {sparse['predicted_ms']:.1f} ms had been predicted" in page
    assert f"and lost {100 * sparse['measured_ms'] / masked['measured_ms'] - 100:.0f} %" in page


def test_each_row_of_plans_of_unknown_models_is_one_of_two_raw_files() -> None:
    section = (ROOT / BENCHMARKS).read_text().partition("Older code on 2 × H200")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.count("%") == 2]
    rows = measured(*UNKNOWN)
    assert len(lines) == len(rows) == 12
    for line in lines:
        cells = [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        assert sum(same_plan(cells, row) for row in rows) == 1, cells


def test_medians_and_largest_errors_are_those_of_the_raw_files() -> None:
    """A model that was measured twice counts twice: the second measurement does not hide the first."""
    front, tables = table(README, "| | result | on |"), words(BENCHMARKS)
    assert len(front) <= 8, "the rest stands in the page of benchmarks"
    again = measured(*AGAIN)
    for rows in (measured("2xH200_a2c680b"), measured(*UNKNOWN), measured(*UNKNOWN_H100), again):
        for unit in ("ms", "gib"):
            middle, largest = median_and_largest(rows, unit)
            assert re.search(rf"{middle[:-2]} %\**, \**{largest[:-2]} %", tables), (middle, largest)
    [at] = [at for at, cells in enumerate(front) if cells[0].startswith(f"{len(again)} plans of models")]
    for unit, cells in zip(("ms", "gib"), front[at : at + 2], strict=True):
        middle, largest = median_and_largest(again, unit)
        assert cells[1].startswith(f"median {middle}, largest {largest}")
    first, second = (row for row in again if row["case"] == "qwen3-600m")
    assert (
        f"largest {abs(100 * error(first, 'gib')):.1f} % ({100 * error(second, 'gib'):.1f} % after" in front[at + 1][1]
    )


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
PROFILED = {
    "BERT-Large": (NEWER, "large"),
    "scaled BERT": (NEWER, "scaled"),
    "OPT-350m": (NEWER, "opt-350m-512"),
    "GPT-3 1.3B": (NEWER, "gpt3-1.3b-512"),
    "GPT-3 1.3B with gradients in bf16": (NEWEST, "gpt3-1.3b-512"),
}


def medians(file: str, row: str) -> dict[str, dict[int, float]]:
    """The median step of each round, by contender."""
    found: dict[str, dict[int, float]] = {}
    for entry in raw(f"throughput_{file}.json")["measurements"]:
        if entry["row"] == row and "error" not in entry:
            found.setdefault(entry["contender"], {})[entry["round"]] = statistics.median(entry["step_ms"])
    return found


def test_ratios_over_loops_and_libraries_on_one_gpu_are_those_of_the_raw_files() -> None:
    rows = table(BENCHMARKS, "| one GPU | our plan | ms |")
    assert [cells[0] for cells in rows] == list(ONE_GPU)
    for name, _, *cells, head, ratio in rows:
        file, row, label = ONE_GPU[name]
        found = medians(file, row)
        begins = (label, "ddp+labelled-head,", "deepspeed1", "megatron")
        for cell, start in zip(cells, begins, strict=True):
            [times] = [times for contender, times in found.items() if contender.startswith(start)] or [{}]
            assert not cell or shows(cell.split(" (")[0], statistics.median(times.values()))
        [ours] = [times for contender, times in found.items() if contender.startswith(label)]
        [loop] = [times for contender, times in found.items() if contender.startswith("ddp+")]
        assert shows(ratio, statistics.median(loop[number] / ours[number] for number in ours))
        if head[:1].isdigit():
            [whole] = [times for contender, times in found.items() if contender.startswith("ddp,")]
            assert shows(head, statistics.median(whole.values()) / statistics.median(loop.values()))
    shown = [cells[-1].strip("*") for cells in rows]
    for document in (BENCHMARKS, README):
        page = words(document).replace("*", "")
        assert ", ".join(shown[index] for index in (0, 2, 3, 5)) in page
        assert ", ".join(shown[6:8]) in page


def test_a_step_of_both_loops_goes_where_the_table_says() -> None:
    for label, *cells in table(BENCHMARKS, "| | matrix products | attention |"):
        row, whose = label.split(", ")
        start = "ours:" if whose == "ours" else f"{whose.strip('`')},"
        file, name = PROFILED[row]
        first = [e for e in raw(f"throughput_{file}.json")["measurements"] if e.get("profile") and e["round"] == 0]
        [entry] = [e for e in first if e["row"] == name and e["contender"].startswith(start)]
        parts = ("matrix products", "attention", "optimiser", "the rest", "idle")
        assert all(shows(cell, entry["profile"][0][part]) for cell, part in zip(cells, parts, strict=True))


FOUR_GPUS = {
    "BERT-Large": "large",
    "scaled BERT": "scaled",
    "scaled BERT, pipeline": "scaled-pp4",
}


def test_ratios_and_profiles_on_four_gpus_are_those_of_the_raw_file() -> None:
    content = raw("throughput_4xH200_4234f31.json")
    rows = table(BENCHMARKS, "| four GPUs | our plan | ms |")
    profiles = {cells[0]: cells[1:] for cells in table(BENCHMARKS, "| four GPUs, one step | matrix products |")}
    ratios, errors = [], []
    for (name, row), cells in zip(FOUR_GPUS.items(), rows, strict=True):
        entries = [entry for entry in content["measurements"] if entry["row"] == row]
        ours, *peers = sorted(entries, key=lambda entry: not entry["contender"].startswith("ours"))
        best = min(peers, key=lambda entry: statistics.median(entry["step_ms"]))
        times = [statistics.median(entry["step_ms"]) for entry in (ours, best)]
        predicted = content["predictions"][row]["ours"]
        assert best["contender"].startswith(cells[5].partition(", ")[0].strip("`"))
        assert cells[1].split(", ")[1] in ours["contender"] or cells[1].split(", ")[-1] in ours["contender"]
        ratios.append(times[1] / times[0])
        errors.append(abs(predicted["step_ms"] / times[0] - 1))
        for text, value in zip(
            [*cells[2:4], *cells[6:8]], [times[0], predicted["step_ms"], times[1], ratios[-1]], strict=True
        ):
            assert shows(text, value), (name, text, value)
        for who, entry in (("ours", ours), ("best peer", best)):
            step = entry["profile"][0]
            alone = profiles[f"{name}, {who}"][5].split(", ")
            shown = [*profiles[f"{name}, {who}"][:5], *alone, profiles[f"{name}, {who}"][6]]
            types = (
                "matrix products",
                "attention",
                "optimiser",
                "the rest",
                "copies",
                "communication",
                "communication alone",
                "idle",
            )
            assert all(shows(text, step[which]) for text, which in zip(shown, types, strict=True)), (name, who)
    page = words(BENCHMARKS)
    assert "**{:.3f}**, **{:.3f}**, **{:.3f}**".format(*ratios) in page
    assert f"**{statistics.median(errors):.1%}, {max(errors):.1%}**".replace("%", " %") in page


def compare_rows(contents: list[dict[str, Any]], rows_of: str, steps_of: str) -> None:
    """Compare every contender's times, memory and prediction, and where a profiled step goes, with two tables."""
    rows, steps = iter(table(BENCHMARKS, rows_of)), iter(table(BENCHMARKS, steps_of))
    for content in contents:
        first_ms, (predictions,) = 0.0, content["predictions"].values()
        for entry in content["measurements"]:
            _, contender, *cells = next(rows)
            ms, predicted = statistics.median(entry["step_ms"]), predictions.get(entry["contender"].split(": PP")[0])
            first_ms = first_ms or ms
            values = [ms, entry["in_a_row_ms"], predicted and predicted["step_ms"], entry["peak_gib"], ms / first_ms]
            for text, value in zip(cells, values, strict=True):
                assert shows(text, value) if text else value in (None, 1.0), (contender, text, value)
            for rank in (0, 1) if "ZeRO 1" in contender else (0,):
                name, shown, *spans = next(steps)
                assert name.endswith(contender)
                assert shown == str(rank)
                for phase, text in zip(("forward", "backward", "update"), spans, strict=True):
                    told = [entry["phases"][rank][phase][key] for key in ("in all", "idle", "communication alone")]
                    assert all(map(shows, text.split(", "), told)), (name, phase)
    assert not [*rows, *steps]


def test_scaled_bert_with_muon_and_pipelines_on_h100_are_those_of_the_raw_files() -> None:
    contents = [raw(f"throughput_pair_scaled_{gpus}xH100_5ae47b19.json") for gpus in (4, 1)]
    compare_rows(contents, "| scaled BERT on H100, one round | contender |", "| one step on H100 | rank |")
    page, (one,) = words(BENCHMARKS), contents[1]["measurements"]
    ours, ddp = (contents[0]["measurements"][at]["step_ms"] for at in (0, -1))
    told = contents[0]["predictions"]["pair-scaled"]["ours"]["step_ms"]
    ratio = statistics.median(ddp) / statistics.median(ours)
    assert f"{ratio:.3f} times; {told:.1f} for {statistics.median(ours):.1f} ms" in words("README.md")
    assert f"trains at {one['gpus'][0]['sm_mhz']['median']:,.0f} MHz" in page
    assert f"of which {one['phases'][0]['update']['matrix products']:.1f} are products" in page
    pipelines = raw("throughput_pp4_4xH100_1df2e1af.json")
    predicted = list(pipelines["predictions"]["scaled-pp4"].values())
    rows = table(BENCHMARKS, "| pipeline on H100 | ms |")
    for row, entry, told in zip(rows, pipelines["measurements"], predicted, strict=False):
        values = [statistics.median(entry["step_ms"]), entry["in_a_row_ms"], told["step_ms"], entry["peak_gib"]]
        assert all(map(shows, row[1:5], values)), row
    muon = [entry for content in contents for entry in content["measurements"] if entry["contender"].startswith("ours")]
    told_ms = [each["step_ms"] for content in contents for each in content["predictions"]["pair-scaled"].values()]
    for entries, predictions in ((muon, told_ms), (pipelines["measurements"], [each["step_ms"] for each in predicted])):
        measured = [statistics.median(entry["step_ms"]) for entry in entries]
        errors = [abs(ms / found - 1) for ms, found in zip(predictions, measured, strict=False)]
        shown = f"{statistics.median(errors):.1%}, {max(errors):.1%}".replace("%", " %")
        assert any(cells[2].startswith(shown) for cells in table(BENCHMARKS, "| goal | target |")), shown


def test_the_pair_with_muon_and_where_its_steps_go_are_those_of_the_raw_files() -> None:
    files = ("pair_scaled_4xH200", "pair_large_4xH200", "pair_scaled_1xH200")
    contents = [raw(f"throughput_{name}_e21906fd.json") for name in files]
    compare_rows(contents, "| the pair, one round | contender |", "| one step, a rank of four | rank |")
    page, (zero_1, zero_0) = words(BENCHMARKS), contents[0]["measurements"][:2]
    gathers = next(told for name, told in zero_1["collectives"].items() if "AllGather" in name)
    longest, shortest = gathers["longest rank ms"], gathers["without waiting ms"]
    assert f"all-gathers: {longest:.0f} ms of them, and {shortest:.0f} on the rank that comes last" in page
    products = sorted(phases["update"]["matrix products"] for phases in zero_1["phases"])
    assert f"whose products take {products[0]:.1f} to {products[-1]:.1f} ms" in page
    clocks = sorted(gpu["sm_mhz"]["median"] for gpu in zero_0["gpus"])
    assert f"ZeRO 0 trained at {clocks[0]:,.0f} to {clocks[-1]:,.0f} MHz" in page
    one = contents[2]["measurements"][0]
    assert f"one GPU at {one['gpus'][0]['sm_mhz']['median']:,.0f} MHz" in page
    alone, (plan,) = one["phases"][0], contents[2]["predictions"]["pair-scaled"]["ours"]["json"]["stages"]
    assert f"took {alone['forward']['in all']:.1f} + {alone['backward']['in all']:.1f} ms" in page
    assert f"predicted with {plan['forward_ms']:.1f} + {plan['backward_ms']:.1f}" in page
    assert f"priced {alone['update']['in all'] - plan['optimizer_ms']:.0f} ms too short" in page
    profile = json.loads(gzip.decompress((RESULTS / "kernels_pair_scaled_1xH200_e21906fd.json.gz").read_bytes()))
    begin = next(at for name, at in profile["phases"] if name == "update")
    copies = [row for row in profile["kernels"] if "DtoH" in profile["names"][row[0]]]
    assert len(copies) == 2, "one for each group of AdamW"
    assert all(row[2] > begin for row in copies)


def test_trials_of_communication_are_those_of_the_raw_file() -> None:
    content = raw("trials_4xH200_90f5602.json")
    found = {
        machine: {one["trial"]: one for one in content[machine]}
        for machine in ("four H200", "four H100", "pipelines on four H200")
    }

    def ms(machine: str, trial: str) -> float:
        return statistics.median(found[machine][trial]["step_ms"])

    trials = (
        ("1x64 z1", "2x32 z2"),
        ("1x64 a2a", "z2 a2a"),
        ("1x64 a2a ctas8", ""),
        ("1x64 ce", "z2 ce"),
        ("", "z2 ce+ag"),
    )
    for (on_h200, on_h100), cells in zip(trials, table(HISTORY, "| trial | four H200, 1 × 64, ms |"), strict=True):
        assert shows(cells[1], ms("four H200", on_h200)) if on_h200 else not cells[1]
        assert shows(cells[3], ms("four H100", on_h100)) if on_h100 else not cells[3]
        if cells[2]:
            assert shows(cells[2], found["four H200"][on_h200]["profile"][0]["matrix products"])
    predicted, page = content["predicted on the same H200"], words(HISTORY)
    for text, key, trial in (
        ("{:,.1f} ms (predicted {:,.1f})", "scaled 1,4,1,64", "1x64 z1"),
        ("{:,.1f} (predicted {:,.1f})", "scaled 1,4,2,32", "z2 base"),
    ):
        assert text.format(ms("four H200", trial), predicted[key]["step_ms"]) in page
    assert f"one reduction, 64, {ms('four H200', 'peer64'):,.1f}" in page
    pipelines = "pipelines on four H200"
    captured, launched = (
        predicted[f"scaled-pp4 4,1,0,{text}"]["step_ms"] for text in ("8,cuda_graphs=true", "16,cuda_graphs=false")
    )
    assert f"took {ms(pipelines, 'pp 32x8 graphs'):,.1f} ms (predicted {captured:,.1f}" in page
    assert f"launched {ms(pipelines, 'pp 16x16'):,.1f} ({launched:,.1f})" in page
    assert f"predicted with {predicted['scaled-pp4 4,1,0,4,cuda_graphs=true']['step_ms']:,.1f} there" in page


def test_what_adamws_kernel_and_gradients_in_bf16_gained_is_what_the_raw_files_say() -> None:
    def first(file: str, row: str, label: str) -> dict[str, Any]:
        entries = raw(f"throughput_{file}.json")["measurements"]
        [entry] = [e for e in entries if (e["row"], e["round"]) == (row, 0) and e["contender"].startswith(label)]
        return dict(entry)

    gpt = [first(file, "gpt3-1.3b-512", "ours:") for file in (OLDER, NEWER, NEWEST)]
    before, kernel, kept = (f"{entry['profile'][0]['optimiser']:.1f}" for entry in gpt)
    large = [f"{first(file, 'large', 'ours 1')['profile'][0]['optimiser']:.1f}" for file in (OLDER, NEWER)]
    history, page, changes = words(HISTORY), words(BENCHMARKS), words("CHANGELOG.md")
    assert f"GPT-3 1.3B {before} → {kernel} ms of a step" in history
    assert f"{large[0]} → {large[1]} | yes" in history
    assert f"{kernel} → {kept} ms" in history
    assert f"take {kept} ms in place of {kernel} ({before} with PyTorch's update)" in page
    assert f"{kernel} ms of GPT-3 1.3B's step on an H200 in place of {before}" in changes
    cast, copied = (
        sum(ms for name, _, ms in gpt[1]["longest"] if part in name) for part in ("ListMetadata<2>", "_cat_")
    )
    assert f"cast of gradients ({cast:.1f} ms)" in page
    assert f"one tensor ({copied:.1f} ms)" in page


def test_predicted_times_and_clocks_beside_the_loops_are_those_of_the_raw_files() -> None:
    errors, clocks = [], dict[tuple[str, str], list[float]]()
    for file in (NEWER, NEWEST):
        content = raw(f"throughput_{file}.json")
        for row, plans in content["predictions"].items():
            [ours] = [times for contender, times in medians(file, row).items() if contender.startswith("ours:")]
            errors.append(plans["ours"]["step_ms"] / statistics.median(ours.values()) - 1)
        for entry in content["measurements"]:
            whose = entry["contender"].partition(":")[0].partition(",")[0]
            clocks.setdefault((entry["row"], whose), []).append(entry["gpus"][0]["sm_mhz"]["median"])
    assert len(errors) == 7
    assert (round(-100 * max(errors)), round(-100 * min(errors))) == (2, 4)
    ranges = [
        f"{min(found):,.0f} to {max(found):,.0f}"
        for row in ("gpt3-1.3b-512", "scaled-128")
        for found in (clocks[row, "ours"], clocks[row, "ddp+labelled-head"])
    ]
    page = words(BENCHMARKS)
    assert f"ran at {ranges[0]} MHz in ours and at {ranges[1]} MHz in the loop" in page
    assert f"with 128 tokens at {ranges[2]} and {ranges[3]}." in page


def test_what_fused_kernels_gained_is_what_the_raw_file_says() -> None:
    entries = raw("fused_backward_1xH200.json")["measurements"]

    def of(row: str, label: str) -> list[float]:
        return [statistics.median(e["step_ms"]) for e in entries if (e["row"], e["label"]) == (row, label)]

    both = [statistics.median(of("large", label)) for label in ("old", "new")]
    assert "from {:.0f} to {:.0f} ms".format(*both) in words(BENCHMARKS)
    history = words(HISTORY)
    assert "BERT-Large {:.1f} → {:.1f} ms".format(*both) in history
    assert f"BERT-Large 306.3 → {of('large', 'new autotuned')[0]:.1f} ms" in history
    for row, named in (("scaled", "scaled BERT"), ("opt-350m-512", "OPT-350m"), ("gpt3-1.3b-512", "GPT-3 1.3B")):
        assert f"{named} {of(row, 'old')[0]:,.1f} → {of(row, 'new')[0]:,.1f}" in history
    old, new = (
        next(e["profile"][0] for e in entries if (e["row"], e["label"]) == ("large", k)) for k in ("old", "new")
    )
    assert f"({old['the rest']:.1f} and {new['the rest']:.1f} ms)" in words(BENCHMARKS)
    assert round(new["matrix products"] - old["matrix products"]) == 4


def test_the_planners_choice_is_as_far_behind_the_fastest_plan_as_is_said() -> None:
    def behind(name: str) -> dict[tuple[str, float | None], float]:
        cases: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
        for row in measured(name):
            cases.setdefault((row["case"], row["memory_limit_gib"]), []).append(row)
        chosen = {case: [row for row in rows if row["why"] == "the planner's choice"] for case, rows in cases.items()}
        return {
            case: chosen[case][0]["measured_ms"] / min(row["measured_ms"] for row in rows) - 1
            for case, rows in cases.items()
            if chosen[case]
        }

    two = behind("2xH200_a2c680b")
    assert len(two) == 7
    assert f"{max(two.values()):.1%}" == "0.6%"
    series = ["4xH200", "4xH200_1b4a6d1", "4xH200_4ca9be4", "4xH200_d1c9b14", "4xH200_f2cfb8d"]
    four = sorted(each for name in series for each in behind(name).values())
    assert [f"{each:.1%}" for each in four[-2:]] == ["2.7%", "25.0%"]
    page = words(BENCHMARKS)
    assert (
        "at most 0.6 %; on 4 × H200 at most 2.7 %, and once 25 % (4.8 B BERT: 2,467 ms, and 1,934 ms when run" in page
    )
    [slow] = [r for r in measured("4xH200_4ca9be4") if r["case"] == "4.8b" and r["why"] == "the planner's choice"]
    [again] = [r for r in measured("4xH200_4ca9be4_again") if r["case"] == "4.8b"]
    assert [f"{row['measured_ms']:,.0f}" for row in (slow, again)] == ["2,467", "1,934"]


THROUGHPUT = {
    "BERT-Large, batch 512": ("4xH200_1b4a6d1", "large"),
    "scaled BERT, batch 256": ("4xH200_d1c9b14", "scaled"),
    "scaled BERT, 32 GiB enforced": ("4xH200_4ca9be4", "scaled-32gib"),
    "4.8 B BERT, batch 256": ("4xH200_d1c9b14", "4.8b"),
    "scaled BERT, a pipeline of 4 forced": ("4xH200_258fb7e", "scaled-pp4"),
    "scaled BERT, a pipeline of 2 forced": ("4xH200_258fb7e", "scaled-pp2dp2"),
}


def test_throughput_beside_the_best_peer_is_that_of_the_raw_files() -> None:
    rows = table(HISTORY, "| row | our plan | ms |")
    assert {cells[0] for cells in rows} == set(THROUGHPUT)
    for name, _, step_ms, rate, _, best, ratio in rows:
        file, case = THROUGHPUT[name]
        found = [row for row in raw(f"throughput_{file}.json") if row["row"] == case]
        [ours] = [row for row in found if row["contender"].startswith("ours")]
        peer = max(row["tokens_per_s"] for row in found if row is not ours)
        assert shows(step_ms, ours["step_ms"])
        assert shows(rate, ours["tokens_per_s"])
        assert shows(best, peer)
        assert shows(ratio, ours["tokens_per_s"] / peer)


def test_ratios_of_bert_base_and_of_deterministic_kernels_are_those_of_the_raw_files() -> None:
    found = []
    for name in ("c9b9009", "535a326"):
        times: dict[str, list[float]] = {}
        for row in raw(f"throughput_2xH200_{name}.json"):
            times.setdefault(row["contender"].split(":")[0].split(",")[0], []).append(row["step_ms"])
        found.append([peer / ours for ours, peer in zip(times["ours"], times["ddp+graphs"], strict=True)])
    assert [f"{ratio:.2f}" for ratio in (statistics.mean(found[0]), *found[1])] == ["1.31", "1.23", "1.05"]
    assert "1.31; on a slower host 1.23 and 1.05" in words(BENCHMARKS)
    usual, slow = [r["step_ms"] for r in raw("throughput_2xH200_12a467f.json") if r["row"] == "large"]
    assert f"{slow / usual - 1:.0%}" == "10%"
    assert f"cost BERT-Large 10 % (DP 2 ZeRO 1, {usual:.1f} → {slow:.1f} ms" in words(BENCHMARKS)


def test_times_with_cuda_graphs_are_those_of_the_raw_files() -> None:
    found = raw("cuda_graphs_1xH200_3b1a77c.json") + raw("cuda_graphs_2xH200_3b1a77c.json")[:4]
    found += raw("cuda_graphs_2xH200_6e42a9b.json")
    times = {(row["launched"]["ms"], row["recorded"]["ms"]) for row in found}
    for _, launched, captured, ratio in table(BENCHMARKS, "| case | launched, ms |"):
        [pair] = [each for each in times if shows(launched, each[0]) and shows(captured, each[1])]
        assert shows(ratio, pair[0] / pair[1])


def test_gradients_beside_epsilon_are_those_of_the_raw_file() -> None:
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
                assert shows(rms, found["rms"][kind])
                assert not times or float(times[:-1].replace(",", "")) == pytest.approx(
                    found["rms"][kind] / content[model]["eps"][kind], rel=6e-3
                )


def test_the_plans_of_the_full_preset_are_those_of_the_raw_file() -> None:
    content = raw("full_preset_4xH200_predicted.json")
    rows = table(BENCHMARKS, "| | plan | step |")
    for cells, name in zip(rows[:2], ("bert-large", "bert-scaled"), strict=True):
        plan = content["plans"][name]
        values = [plan["step_ms"], plan["evaluation_s"], plan["peak_gib"], plan["mfu"], content["minutes"][name]]
        assert all(shows(cell, value) for cell, value in zip(cells[2:], values, strict=True)), cells
    assert shows(rows[2][-1], content["minutes"]["the pilots"])
    assert shows(rows[3][-1], content["minutes_together"])
    assert f"predicts {content['minutes_together']:.0f} minutes for it" in words("docs/gallery.md")


def test_figures_of_block_sparse_kernels_are_those_of_the_raw_files() -> None:
    for name, file in (("h100", "sparse_kernels_1xH100_a4d6c56.json"), ("h200", "sparse_kernels_1xH200_4182f403.json")):
        content = raw(file)
        found = {(row["layer"], row["block"]): row for row in content["break_even"]}
        faster = {(row["layer"], row["block"]): row["speed_up"] for row in content["goals"]}
        for layer, *cells in table(BENCHMARKS, f"| layer on one {name.upper()} | blocks of 64: measured, predicted |"):
            row = next(row for row in content["rows"] if row["layer"] == layer)
            for cell, block in zip(cells[:3], (64, 32, 16), strict=True):
                products = none_and_all_stored(block, [(row["rows"], row["cols"])])
                values = found[layer, block]["measured"], break_even_sparsity(products, DEVICES[name])
                assert all(shows(shown, value) for shown, value in zip(cell.split(", "), values, strict=True))
            for cell, block in zip(cells[3:], (64, 32), strict=True):
                assert bool(cell) == ((layer, block) in faster)
                assert not cell or shows(cell, faster[layer, block])
    shapes = ([(7680, 1920)], [(3072, 768)], [(768, 768)])
    for cells in table("docs/sparse_kernels.md", "| block | a, r, w |"):
        block = int(cells[0])
        product, gradient = STORED_PRODUCTS[block]
        assert [float(value) for value in cells[1].split(", ")] == list(product)
        assert [float(value) for value in cells[2].split(", ")] == list(gradient[:2])
        points = [
            [round(break_even_sparsity(none_and_all_stored(block, each), device), 2) for device in DEVICES.values()]
            for each in shapes
        ]
        assert [[float(value) for value in cell.split(", ")] for cell in cells[5:]] == points
    page = words("docs/sparsity.md")
    steps = raw("sparse_training_1xH100_a4d6c56.json")["rows"]
    assert all(f"{row['measured_ms']:.1f} ms" in page for row in (steps[2], steps[4]))
    steps = raw("sparse_training_1xH200_4182f403.json")["rows"]
    shown = table(BENCHMARKS, "| BERT-Base on one H200 |")
    assert len(shown) == len(steps)
    for row, cells in zip(steps, shown, strict=True):
        assert all(shows(cell, row[key]) for cell, key in zip(cells[1:3], ("predicted_ms", "measured_ms"), strict=True))
    dense = steps[0]["measured_ms"]
    faster = {row["case"]: dense / row["measured_ms"] for row in steps if row["plan"]["block_sparse"]}
    launched = next(
        row["measured_ms"] for row in steps if row["plan"]["block_sparse"] and not row["plan"]["cuda_graphs"]
    )
    assert f"{dense / steps[4]['measured_ms']:.2f} times as fast" in page
    assert f"{faster['base-sparse-64']:.2f} times" in page
    assert f"{launched:.1f} ms launched" in page
    cpu = raw("sparse_prediction_2cores.json")
    dense, masked = cpu["dense"], cpu["masked"]
    assert f"predicted with {dense['predicted_ms']:.0f} ms and took {dense['measured_ms']:.0f} ms" in page
    assert f"predicted with {masked['predicted_ms']:.0f} ms and took {masked['measured_ms']:.0f} ms" in page


@pytest.mark.parametrize(
    ("file", "head", "runs"),
    [
        ("sparse_family_unscaled_4xH200_4182f403.json", "| held-out loss | at half the tokens |", 36),
        ("sparse_family_muon_2xH200_3a11e5dc.json", "| held-out loss with Muon, first seed | at half the tokens |", 40),
    ],
)
def test_the_losses_of_sparse_families_are_those_of_the_raw_file(file: str, head: str, runs: int) -> None:
    found = raw(file)
    assert len(found) == runs
    ends: dict[str, tuple[float, float]] = {}
    for name, run in found.items():
        kind = name.split("-seed")[0].rsplit("-", 2)[0].removesuffix("-muon")  # without its rate, such as 3.20e-03
        half = next(loss for tokens, loss in zip(run["tokens"], run["held_out"], strict=True) if tokens > 14e6)
        ends[kind] = min(ends.get(kind, (9.0, 9.0)), (run["held_out"][-1], half))
    for cells in table("benchmarks/README.md", head):
        size = cells[0].split(" ")[0].lower()
        kinds = cells[0].removeprefix("dense ").split(", the best")[0].replace(" × ", "x").lower().split(", ")
        if size in ("medium", "base"):
            kind = cells[0].split(" ")[1]
            kinds = [f"{size}-{kind}{block}" for block in (1, 4, 8, 16)]
        for column, which, digits in ((1, 1, 2), (2, 0, 3)):
            assert cells[column].split(", ") == [f"{ends[kind][which]:.{digits}f}" for kind in kinds]


def test_steps_of_small_models_are_those_of_the_raw_files() -> None:
    found = raw("small_steps_1xH200_d97429d6.json")
    page = words("benchmarks/README.md")
    ratios = []
    for label, *cells in table("benchmarks/README.md", "| | before, `118dc256` | `d97429d6` | ratio | predicted |"):
        name = label.lower().replace(",", "")
        before, now = ([each[name]["median_ms"] for each in found[tree]] for tree in ("beside", "here"))
        ratios.append(f"{statistics.mean(now) / statistics.mean(before):.2f}")
        predicted = f"{found['here'][0][name]['predicted_ms']:.2f}"
        assert cells == [", ".join(f"{ms:.2f}" for ms in times) for times in (before, now)] + [ratios[-1], predicted]
    mini, medium, with_muon = ratios
    assert f"takes {medium} times as long on an H200, Mini's {mini}, Medium's with Muon {with_muon}" in words(
        "CHANGELOG.md"
    )
    tiny = raw("small_steps_1core.json")
    of_name = {
        name: [statistics.mean(each[name]["median_ms"] for each in tiny[tree]) for tree in ("beside", "here")]
        for name in ("mini adamw", "medium muon")
    }
    (adamw, adamw_now), (muon, muon_now) = of_name.values()
    assert f"took {adamw:.1f} ms with AdamW and takes {adamw_now:.1f}, a ratio of {adamw_now / adamw:.2f}" in page
    assert f"and {muon:.1f} and {muon_now:.1f} with Muon, {muon_now / muon:.2f}" in page


def test_what_differs_between_sparse_berts_is_what_the_raw_file_says() -> None:
    page = words("benchmarks/README.md")
    found, later = raw("sparse_family_muon_2xH200_3a11e5dc.json"), raw("sparse_family_1xH200_118dc256.json")
    starts = [raw("sparse_family_unscaled_4xH200_4182f403.json")["mini-2.00e-03-seed0"], later["mini-2.00e-03-seed0"]]
    assert "loss of {:.3f} here and of {:.3f} there".format(*(run["held_out"][0] for run in starts)) in page
    best_of: dict[str, dict[str, Any]] = {}
    for name, run in found.items():
        kind = name.split("-muon")[0]
        best_of[kind] = min(best_of.get(kind, run), run, key=lambda each: each["held_out"][-1])
    ends = {kind: run["held_out"][-1] for kind, run in best_of.items()}
    second = {name.split("-muon")[0]: run["held_out"][-1] for name, run in later.items() if "-muon" in name}
    for kind, *cells in table("benchmarks/README.md", "| held-out loss at the end, Medium | first seed |"):
        name = f"medium-{kind.replace(' ', '')}"
        assert cells == [f"{ends[name]:.3f}", f"{second[name]:.3f}"]
    apart = sorted(abs(second[kind] - ends[kind]) for kind in second if "dynamic" in kind)
    assert "ended {:.3f}, {:.3f} and {:.3f} apart".format(*apart) in page
    ends |= {kind: (ends[kind] + loss) / 2 for kind, loss in second.items()}
    blocks, moves = (1, 4, 8, 16), (160, 160, 160, 80)
    shapes = {"medium": ("2x400", "4x304", "8x224", "12x176"), "base": ("2x672", "4x496", "8x352", "12x288")}
    columns, move_ms, longer, steps = [], [], [], []
    for size, dense in shapes.items():
        moving, fixed = ([f"{size}-{kind}{block}" for block in blocks] for kind in ("dynamic", "static"))
        of_16 = ends[moving[3]] - ends[fixed[3]]
        sparse, best = [ends[kind] for kind in (*moving, *fixed)], ends[dense[0]]
        assert best == min(ends[shape] for shape in dense)
        columns.append(
            (
                f"{ends[fixed[0]] - ends[moving[0]]:.3f} below",
                f"they are {-of_16:.3f} below" if size == "base" else f"the moving ones are {-of_16:.3f} below",
                f"{ends[moving[0]] - ends[moving[3]]:.3f} below",
                f"it has, and is {min(sparse) - best:.3f} to {max(sparse) - best:.3f} below",
            )
        )
        for one, other, number in zip(moving, fixed, moves, strict=True):
            moved_s, fixed_s = best_of[one]["trained_s"], best_of[other]["trained_s"]
            move_ms.append((moved_s - fixed_s) / number * 1e3)
            longer.append(moved_s / fixed_s - 1)
            steps.append(move_ms[-1] / best_of[one]["step_ms"])
    for cells, *said in zip(
        table("benchmarks/README.md", "| written down before | seen of Medium, by means |")[1:],
        *columns,
        strict=True,
    ):
        assert [words_of in cell for cell, words_of in zip(cells[1:], said, strict=True)] == [True, True], (cells, said)
    medium, base = ([ends[f"{size}-dynamic{b}"] - ends[f"{size}-static{b}"] for b in blocks] for size in shapes)
    assert f"of 4 even {ends['medium-dynamic1'] - ends['medium-dynamic4']:.3f}" in page
    below = [f"{-max(differences):.3f} to {-min(differences):.3f}" for differences in (base, medium)]
    assert "in Base by {} and in Medium by {}".format(*below) in page
    behind = [ends[f"base-dynamic{block}"] - ends["2x672"] for block in blocks]
    lower = ", ".join(f"{-difference:.3f}" for difference in base)
    assert f"{lower}; **{min(behind):.2f} to {max(behind):.2f}**" in words("README.md")
    assert f"blocks of 8 and 16 ends {ends['base-dynamic1'] - ends['base-dynamic16']:.2f} below" in page
    assert f"ends {ends['2x672'] - ends['base']:.3f} above dense Base" in page
    assert f"took {min(move_ms):.0f} to {max(move_ms):.0f} ms" in page
    moves_cost = f"{100 * min(longer):.0f} to {100 * max(longer):.0f} %"
    assert f"training by {moves_cost}" in page
    guide = words("docs/sparsity.md")
    assert f"in BERT-Base by {-max(base):.2f} to {-min(base):.2f} and in BERT-Medium by" in guide
    assert f"in BERT-Medium by {-max(medium):.2f} to {-min(medium):.2f}" in guide
    assert f"end up to {apart[-1]:.2f} apart" in guide
    assert f"(those of Medium end up to {apart[-1]:.2f} apart)" in words("README.md")
    assert f"blocks of 8 and 16 ends {ends['base-dynamic1'] - ends['base-dynamic16']:.2f} below" in guide
    for size, dense, shape in (("medium", "2x400", "2 × 400 is"), ("base", "2x672", "2 × 672")):
        least = min(ends[f"{size}-{kind}{block}"] for kind in ("dynamic", "static") for block in blocks) - ends[dense]
        assert f"{shape} at least {least:.2f} below every sparse {size.capitalize()}" in guide
    assert (round(min(steps)), round(max(steps))) == (4, 5)
    assert "a move still took as long as four or five steps" in guide


def test_sparse_berts_with_adamw_and_their_moves_are_what_the_raw_file_says() -> None:
    page, guide = words("benchmarks/README.md"), words("docs/sparsity.md")
    found, later = raw("sparse_family_muon_2xH200_3a11e5dc.json"), raw("sparse_family_1xH200_118dc256.json")
    adamw: dict[str, dict[str, Any]] = {}
    for name, run in later.items():
        if name.endswith("seed0"):
            kind = name.rsplit("-", 3)[0]
            adamw[kind] = min(adamw.get(kind, run), run, key=lambda each: each["held_out"][-1])
    of_adamw = {kind: run["held_out"][-1] for kind, run in adamw.items()}
    with_muon = dict.fromkeys(adamw, math.inf)
    for name, run in found.items():
        if (kind := name.split("-muon")[0]) in with_muon:
            with_muon[kind] = min(with_muon[kind], run["held_out"][-1])
    names = {"dense 2 × 400": "2x400", "dense Mini": "mini", "Medium static 1": "medium-static1"}
    names["Medium dynamic 1"] = "medium-dynamic1"
    for model, *cells in table("benchmarks/README.md", "| held-out loss at the end, first seed | AdamW | Muon |"):
        assert cells == [f"{of_adamw[names[model]]:.3f}", f"{with_muon[names[model]]:.3f}"]
    difference = of_adamw["medium-dynamic1"] - of_adamw["medium-static1"]
    assert f"moving pattern ends {difference:.3f} above the fixed one" in page
    small = adamw["2x400"]
    assert f"{small['step_ms']:.1f} ms for 2 × 400 with AdamW ({small['predicted_ms']:.1f} predicted)" in page
    pairs = [("medium-dynamic8-muon-3.20e-03-seed1", "medium-static8-muon-1.60e-03-seed1")]
    pairs += [(f"medium-dynamic1-{rate}-seed0", f"medium-static1-{rate}-seed0") for rate in ("3.20e-03", "6.40e-03")]
    times = [(later[one]["trained_s"], later[other]["trained_s"], later[one]["step_ms"]) for one, other in pairs]
    now_ms = [(moved_s - fixed_s) / 160 * 1e3 for moved_s, fixed_s, _ in times]
    now_longer = [100 * (moved_s / fixed_s - 1) for moved_s, fixed_s, _ in times]
    assert f"**{min(now_ms):.0f} to {max(now_ms):.0f} ms** for Medium on one H200" in page
    assert f"one of BERT-Medium's patterns took {min(now_ms):.0f} to {max(now_ms):.0f} ms" in guide
    said = f"{min(now_longer):.0f} to {max(now_longer):.0f} %"
    assert f"or {said} of the training" in page
    assert f"In Medium, moves lengthened 1,832 steps by {said}" in guide
    in_steps = [move / step for move, (_, _, step) in zip(now_ms, times, strict=True)]
    assert (round(min(in_steps)), round(max(in_steps))) == (1, 2)

    def spread(column: str, size: str) -> str:
        values = [run[column] for name, run in found.items() if name.startswith(size)]
        low, high = f"{min(values):.1f}", f"{max(values):.1f}"
        return low if low == high else f"{low} to {high}"

    assert f"with Muon {spread('step_ms', 'mini')} ms for Mini ({spread('predicted_ms', 'mini')} predicted)" in page
    assert f"{spread('step_ms', 'medium')} ms for Medium ({spread('predicted_ms', 'medium')})" in page
    assert f"Base took {spread('step_ms', 'base')} ms ({spread('predicted_ms', 'base')})" in page
    starts = [run["start_s"] for run in found.values()]
    assert f"A run needed {min(starts):.0f} to {max(starts):.0f} s" in page
