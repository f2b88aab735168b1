"""The commands behind figures still run: each says what it is for without doing anything, and does its work tiny.

Whether their figures are right, the raw files say; here a change of Workbench that breaks a command is found.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import workbench as wb
from tests.distributed.harness import launch
from tests.exhaustive import exhaustive

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = {path.stem for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
TINY: dict[str, str] = {
    "any_model measure OUT 'early exit'": "rows",
    "cell_time --tiny --out OUT": "commits, medians, runs",
    "bisect_faults --tiny --out OUT": "steps, units",
    "contrast_verdicts --tiny --out OUT": "pairs, means, kinds, families",
    "coordinate_check EXPERIMENT --widths 16 32 --steps 1 --raw OUT --to FOLDER/page.html": "width 16 to 32",
    "data_supply --tiny --text FOLDER --out OUT": "vocabulary, predicted_over_measured, rows",
    "demo --tuning --tiny --out OUT": "seed, runs",
    "frontier --tiny --out OUT": "grid, fastest_for_each_limit",
    "full_preset --tiny --out OUT": "plans, pilots, minutes, minutes_together",
    "gradient_rms TEXT OUT large --steps 1 --tiny": "large",
    "grids --tiny --out OUT": "grid-h200",
    "live measure OUT tracking --tiny": "tracking",
    "model_table measure OUT tied-everywhere": "rows",
    "muon_pilots --tiny --out OUT": "runs",
    "muon_update --tiny --out OUT": "width, tflop, rounds, ratio",
    "noise --tiny --out OUT": "runs, steps, models",
    "offline_site OUT INSTALLED --copy six": "",
    "pictures --tiny --out OUT": "",
    "planning_time --tiny --out OUT": "rows, sliders",
    "prediction predict OUT --cases tiny --gpus 1 --per-case 1 --device h200": "predicted, rows",
    "real_text tiny --corpus TEXT --gpus 1 --steps 6 --runs FOLDER/runs": "",
    "same_plans dump OUT --only '8 a10'": "gpt2 (128 × 256) on 8 a10",
    "small_steps TEXT --tiny --out OUT": "device, here",
    "sparse_gradient_cache --tiny --out OUT": "",
    "sparse_prediction --tiny --out OUT": "dense, masked, masked_over_dense",
    "starts --tiny --out OUT": "starts, launches",
    "tokenizing --tiny --text FOLDER --out OUT": "rows",
    "width_rule --tiny --out OUT": "settings, runs",
    "width_rule --tiny --muon --out OUT": "settings, runs",
}
"""What is run of each command, and what its raw file has."""
LONG = ("bisect_faults", "cell_time", "starts")
"""Commands that launch many runs even so: `make test-exhaustive` runs them."""
OVER_GLOO = {
    "collectives --tiny --out OUT": "group, all_reduce_us, chained_us",
    "cuda_graphs --tiny --only DP --steps 1 --out OUT": "case, launched, recorded, same",
}
"""The same of commands that `torchrun` starts; each row of a raw file has these."""
ELSEWHERE = {
    "contenders": "has no options: `throughput` starts it",
    "on_node": "tests/unit/test_on_node.py",
    "pair_text": "tests/unit/test_pair_text.py",
    "pair_seeds": "below, with what reads the run of it",
    "sparse_family": "below; its trainings in tests/distributed/test_sparse_template.py",
    "sparse_kernels": "below, in Triton's interpreter",
    "throughput": "tests/distributed/test_peers.py",
    "what_if": "tests/browser/test_measuring_commands.py",
}
"""Where other commands are run, or why they are not."""


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let commands import each other as they do where they are called, and leave no setting behind."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))


def call(words: str, **names: object) -> None:
    """Call a command in this process; words in capitals stand for the names."""
    command, *arguments = shlex.split(words)
    for name, value in names.items():
        arguments = [word.replace(name, str(value)) for word in arguments]
    with mock.patch.object(sys, "argv", [command, *arguments]):
        importlib.import_module(command).main()


def test_every_command_is_tried() -> None:
    words = " ".join([*TINY, *OVER_GLOO, *ELSEWHERE]).replace(",", "")
    assert not COMMANDS - set(words.split())


@pytest.mark.parametrize("command", sorted(COMMANDS - {"contenders"}))
def test_help_does_no_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(f"{command} --help")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=exhaustive) if words.startswith(LONG) else words for words in TINY]
)
def test_a_command_runs(words: str, tmp_path: Path) -> None:
    names = inputs(tmp_path)
    before = set(tmp_path.rglob("*"))
    call(words, **names)
    assert set(tmp_path.rglob("*")) - before, "it wrote something"
    if TINY[words]:
        found = json.loads(Path(names["OUT"]).read_text())
        assert set(TINY[words].split(", ")) <= found.keys()


def inputs(folder: Path) -> dict[str, object]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} is a number, and so is {number * number}.\n" for number in range(3000)))
    experiment = wb.Experiment(
        model=wb.models.gpt2(16, 1, 2, vocab_size=300, max_positions=16),
        data=wb.data.corpus(str(text), vocab_size=300), global_batch=2, seq_len=16, steps=4,
    )  # fmt: skip
    (folder / "experiment.json").write_text(json.dumps(experiment.to_json()))
    lock = (BENCHMARKS.parent / "requirements.lock").read_text()
    (folder / "installed").write_text(lock + "\npytest\npytest-timeout\npytest-xdist\nexecnet\npluggy\niniconfig\n")
    files = {"EXPERIMENT": "experiment.json", "INSTALLED": "installed", "TEXT": "text.txt", "OUT": "out.json"}
    return {name: folder / file for name, file in files.items()} | {"FOLDER": folder}


def test_commands_of_several_processes_run(tmp_path: Path) -> None:
    launch(_over_gloo, 2, tmp_path)
    for words, columns in OVER_GLOO.items():
        rows = json.loads((tmp_path / words.split()[0]).read_text())
        assert any(set(columns.split(", ")) <= row.keys() for row in rows), words


def _over_gloo(_rank: int, folder: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    kept = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with kept:
        for words in OVER_GLOO:
            call(words, OUT=folder / words.split()[0])


def test_a_run_of_the_pair_is_read_by_other_commands(tmp_path: Path) -> None:
    names = inputs(tmp_path)
    with pytest.raises(SystemExit) as ended:
        call("pair_seeds TEXT large muon 1 --rehearsal", **names)
    assert not ended.value.code
    call("sparse_family --folder FOLDER/runs", **names)
    [found] = json.loads((tmp_path / "runs" / "losses.json").read_text()).values()
    assert {"start_s", "step_ms", "held_out"} <= found.keys()
    (tmp_path / "runs").rename(tmp_path / "1")
    call("demo 1 --read FOLDER --tiny --out OUT", **names)
    [run] = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["held_out"][-1] == [run["steps"], run["held_out_loss"]]


def test_the_verdict_is_that_of_a_contrast(capsys: pytest.CaptureFixture[str]) -> None:
    large = ("large-20261127-193809", *(f"large-muon-seed{seed}" for seed in (1, 2, 3)))
    recorded = BENCHMARKS.parent / "notebooks" / "recorded"
    folders = [str(recorded / f"bert-{name}") for name in (*large, "scaled-20261127-193814", "scaled-muon-seed1")]
    with mock.patch.object(importlib.import_module("pair_seeds"), "HELD_OUT", ("eval_loss",)):
        call(f"pair_seeds verdict {shlex.join(folders)}")
    told = capsys.readouterr().out.splitlines()
    differences = wb.contrast([wb.load_run(folder) for folder in folders]).differences
    assert [f"({each.value:+.3f} ±" in line for each, line in zip(differences, told, strict=False)] == [True] * 3
    assert told[0] == "at 22.0 M tokens: lower (-0.048 ± 0.028, 2 and 4 seeds)"  # 0.022 if the interval held 90 %
    assert all(": higher (" in line for line in told[1:])
    with pytest.raises(SystemExit, match="both models"):
        call(f"pair_seeds verdict {shlex.join(folders[:3])}")
    with pytest.raises(SystemExit, match="have adamw and muon"):
        call(f"pair_seeds verdict {shlex.join([*folders, str(recorded / 'bert-large-adamw-seed0')])}")


def test_sparse_kernels_are_timed_in_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "sparse_kernels.py", "--rehearse", "--out", tmp_path / "out.json"]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["contender"] for row in found["rows"]} == {"dense", "masked dense", "block-sparse"}
