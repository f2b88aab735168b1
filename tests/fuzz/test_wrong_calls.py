"""Wrong calls of the public API: each is answered by a `WorkbenchError` within a second, or accepted for a reason.

The calls are generated: every parameter of every function gets every value of a list of wrong ones, in an otherwise
right call.
"""

from __future__ import annotations

import importlib
import inspect
import math
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.logs import append_event
from tests.patience import PATIENCE_S
from tests.unit.test_runs import make_run
from workbench.base.errors import WorkbenchError
from workbench.execution import worker
from workbench.experiment import GROUPS, PATHS
from workbench.measure import calibration
from workbench.notebooks import sharing
from workbench.record.rundir import write_record
from workbench.runs.launching import launcher, processes
from workbench.strategy import Choices
from workbench.sweeps import queue as sweep_queue
from workbench.sweeps import sweep as sweep_start

LIMIT_S = 20.0  # clock: processor seconds, twenty times what the longest wrong call may have taken on an idle core
"""Processor time after which a wrong call is interrupted."""
WRONG: Mapping[str, Any] = {
    "None": None,
    "object": object(),
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "-0.5": -0.5,
    "1.5": 1.5,
    "10**18": 10**18,
    "2**70": 2**70,
    "10**400": 10**400,
    "True": True,
    "empty text": "",
    "unknown name": "no-such-thing",
    "NUL": "\0",
    "long text": "x" * 5000,
    "bytes": b"bert",
    "[]": [],
    "[None]": [None],
    "{}": {},
    "function": len,
}


NUMBERS = ("1.5", "10**18", "2**70")
TEXTS = ("empty text", "unknown name", "NUL", "long text")
FINITE = {NUMBERS: "finite: a run that diverges ends at its first step"}
OF_EXPERIMENT: Mapping[str, Mapping[tuple[str, ...], str]] = {
    "data": {("bytes", "[]", "[None]"): "a dataset is read when it is planned, and refused then"},
    "learning_rate": FINITE,
    "eps": FINITE,
    "weight_decay": {("0", *NUMBERS): "finite: a run that diverges ends at its first step"},
    "clip_norm": {("None", *NUMBERS): "no limit, or one that is never reached"},
    "spike_factor": FINITE,
    "steps": {("None",): "the default"},
    "keep_checkpoints": {("0",): "no checkpoint is kept"},
    "epochs": {("1.5",): "one pass and a half"},
    "warmup_steps": {("0",): "no warm-up"},
    "seed": {("0", "10**18"): "a seed of 63 bits"},
    "compile": {("True",): "a choice"},
    "deterministic": {("True",): "a choice"},
    "stop_on_non_finite": {("True",): "a choice"},
    "metrics": {("{}",): "no metric"},
    "eval_also": {("{}",): "no further held-out set"},
    "optimizer": {("function",): "a function that builds an optimiser", ("{}",): "the defaults of the group"},
    "lr_schedule": {("function",): "a schedule; it is called once the number of steps is known"},
    "eval_data": {("bytes", "[]", "[None]"): "a dataset is read when it is planned, and refused then"},
    **{group: {("{}",): "the defaults of the group"} for group in GROUPS if group not in ("optimizer", "samples")},
    "sample_seed": {("None", "0", "10**18"): "the most probable token, or a seed"},
    "loss": {("-1", "0", "10**18", "2**70", "10**400", "function", *TEXTS): "forward is looked at when it is planned"},
    "name": {("unknown name", "long text"): "a name; the directory's is cut"},
    "project": {("unknown name", "long text"): "a name", ("empty text",): "switches tracking off"},
    "tags": {("[]",): "no tag"},
    "callbacks": {("[]",): "no callback"},
    "ema_decay": {("0",): "the average is the last weights"},
}
"""Reasons why a wrong value of a field of an experiment is accepted."""
PLANNED = {
    "memory_limit_gib": {("1.5", "10**18"): "a limit"},
    "zero": {("0",): "a ZeRO stage"},
    "offload_optimizer": {("True",): "a choice"},
    "cuda_graphs": {("True",): "a choice"},
    "fresh": {("True",): "a choice"},
}
FILES = ("empty text", "unknown name", "long text")
MODEL_WORDS = {
    "dropout": {("0",): "no dropout"},
    "initializer_range": {("1.5",): "a deviation"},
    "name": {("unknown name", "long text"): "a name"},
}
SAVED = {"scale": {("1.5",): "pixels for each pixel"}}
PREPARED = {"directory": {("unknown name",): "a new directory"}, "progress": {("True",): "a choice"}}
TEXT_NAME = {("unknown name", "long text"): "a name"}
TEXT = {("unknown name", "long text"): "looked for when the experiment is planned"}
ACCEPTED: Mapping[str, Mapping[str, Mapping[tuple[str, ...], str]]] = {
    "data.mixture": {"changes": {("{}",): "weights that never change"}},
    "plan": PLANNED,
    "grid": {
        **PLANNED,
        **{
            name: {("10**18", "2**70", "10**400", "[None]"): "the cell says why it has no plan; None is searched"}
            for name in ("pipeline", "data", "tensor", "chunks", "micro_batch")
        },
        **{
            name: {("0", "True", "[None]"): "a choice; None is searched"}
            for name in ("zero", "schedule", "recompute", "offload_optimizer", "cuda_graphs", "block_sparse")
        },
    },
    "Grid.cell": {"zero": {("0", "True"): "a cell of the grid"}},
    "MeasuredGrid": {"path": {FILES: "a handle, which is read when it is used"}},
    "tokenize": {"progress": {("True",): "a choice"}},
    "pretrained": {
        "revision": {("unknown name", "long text"): "of the hub: a folder has none"},
        "frozen": {("[]",): "nothing is frozen"},
        "dropout": {("0",): "a share"},
        "name": {("unknown name", "long text"): "a name"},
    },
    "log_scalar": {
        "name": {("unknown name", "long text"): "a name"},
        "value": {("nan", "inf", "-inf", "-1", "0", "-0.5", "1.5", "10**18", "2**70", "True"): "a number"},
        "weight": {("0", "1.5", "10**18", "2**70", "True"): "a weight"},
    },
    "scaling": {"depth_rule": {("True",): "a choice"}},
    "left_plateau": {"level": {("1.5", "10**18"): "a loss"}},
    "expected_difference": {"tokens": {("1.5", "10**18"): "a number of tokens"}},
    "stop_on_plateau": {"level": {("1.5", "10**18"): "a loss"}},
    **{
        f"sparsity.{name}": {
            "sparsity": {("0",): "a pattern without absent blocks"},
            "block": {("10**18",): "a block that divides no weight is refused when it is planned"},
            "scope": {("unknown name", "long text"): "looked for when the experiment is planned"},
            "updates": {("10**18",): "compared with the steps of the experiment"},
            "rescaled": {("True",): "a choice"},
        }
        for name in ("Static", "Dynamic")
    },
    "sparsity.learning_rate": {
        "dense": {("1.5", "10**18"): "a rate"},
        "sparsity": {("0",): "the rate of a dense model"},
    },
    "Run.evaluations": {"data": {FILES: "data that the run was never evaluated on have no rows"}},
    "search": PLANNED,
    "prepare": PREPARED,
    "debug": PREPARED,
    "compare": {
        "smoothing": {("0",): "the raw curve alone"},
        "title": {("empty text", "unknown name", "long text"): "a title"},
    },
    "live": {"smoothing": {("0",): "the raw curve alone"}},
    "contrast": {"smoothing": {("0",): "the raw values"}, "scatter": {("1.5", "10**18"): "a standard deviation"}},
    "list_runs": {
        "root": {FILES: "a folder without runs"},
        "tag": {FILES: "a tag that no run has"},
        "text": {FILES: "a text to look for"},
        "archived": {("True",): "a choice"},
    },
    "diverged": {
        "above": {("-1", "0", "-0.5", "1.5", "10**18", "2**70"): "a loss"},
        "after": {("0", "10**18", "2**70", "10**400"): "a step"},
    },
    "doctor": {"data": {("True",): "a choice"}},
    "ladder_points": {"runs": {("[]", "{}"): "no run, no point"}},
    "data.documents": {"progress": {("True",): "a choice"}, "name": TEXT_NAME},
    "save": SAVED,
    "Figure.save": SAVED,
    "save_html": {
        "figures": {("[]", "{}", "[None]"): "a page without figures"},
        "path": {FILES: "a new file"},
        "title": {TEXTS: "a title"},
        "text": {TEXTS: "a text"},
    },
    "calibrate": {"again": {("True",): "a choice"}},
    "Run": {"path": {FILES: "a handle, which is read when it is used"}},
    "Sweep": {"path": {FILES: "a handle, which is read when it is used"}},
    "Plan.save": {"path": {("unknown name",): "a new file"}},
    "Run.slurm": {
        "time": {},
        "partition": {("unknown name", "long text"): "a name that Slurm looks up"},
        "account": {("unknown name", "long text"): "a name that Slurm looks up"},
        "options": {("[]",): "no option"},
    },
    "Run.note": {"text": {TEXTS: "a note"}},
    "Run.archive": {"archived": {("True",): "a choice"}},
    "Run.wait": {"timeout": {("inf", "-inf", "-1", "0", "-0.5", "1.5", "10**18"): "seconds; the run has ended"}},
    "Run.stop": {"wait": {("True",): "a choice"}},
    "Run.kill": {"wait": {("True",): "a choice"}},
    "Run.logs": {
        "rank": {("0", "10**18", "unknown name", "long text"): "a log that was never written is empty"},
        "tail": {("None", "0", "10**18"): "a number of lines"},
    },
    "data.corpus": {"name_or_path": TEXT, "streaming": {("True",): "a choice"}},
    "data.hub": dict.fromkeys(("name", "split", "text_column", "config", "revision"), TEXT),
    **{f"models.{name}": MODEL_WORDS for name in ("bert", "bert_large", "gpt2", "opt", "gpt3")},
}
"""The same for other functions, by function and parameter."""


class Started(Exception):
    """Raised in place of starting a process: the call was accepted."""


@dataclass(frozen=True)
class Target:
    """One function of the API with arguments that are right, and the parameters that are given wrong values."""

    name: str
    call: Callable[..., Any]
    right: Mapping[str, Any]
    parameters: tuple[str, ...]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield an experiment, its plan and a finished run, in folders of their own, where no process can start."""
    folder = tmp_path_factory.mktemp("world")
    import nbformat  # noqa: F401  (a first import may take seconds)

    import workbench.notebooks
    import workbench.widgets  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(folder / "home"))
        patch.setenv("WORKBENCH_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for module, name in (
            (launcher, "_start_supervisor"),
            (worker, "train_here"),
            (processes, "start_detached"),
            (sweep_queue, "start_supervisor"),
            (sweep_start, "new_queue"),
            (sharing, "execute"),
            (calibration, "_measured"),
        ):
            patch.setattr(module, name, _start)
        text = folder / "text.txt"
        text.write_text("\n\n".join(f"The {i} quick brown foxes jump over {i * i} lazy dogs." for i in range(300)))
        sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 128, "max_positions": 16}
        right = {"steps": 4, "global_batch": 8, "seq_len": 16, "precision": "fp32"}
        data = wb.data.corpus(text, vocab_size=128)
        experiment = wb.Experiment.of(model=wb.models.bert(**sizes), data=data, name="small", **right)
        cluster = wb.Cluster.of("h200", gpus=2)
        costs = wb.planning.profile(experiment, cluster)  # once, because a second call would take as long again
        names = ("planning.planner", "widgets.what_if", "sweeps.grid")
        for module in (importlib.import_module(f"workbench.{name}") for name in names):
            patch.setattr(module, "profile_and_cluster", lambda _, given, *_fixed: (costs, given or cluster))
        captured = wb.planning.graph(experiment)
        patch.setattr(importlib.import_module("workbench.analysis.pareto"), "graph", lambda _: captured)
        plan = wb.plan(experiment, cluster)
        experiment.model.build().save_pretrained(folder / "model")
        shared = {"cluster": cluster, "plan": plan, "run": _run(folder, experiment, plan), "model": folder / "model"}
        yield {"experiment": experiment, "tokenizer": experiment.data.reads(experiment).tokenizer_folder(), **shared}


LIMITS = (
    (signal.ITIMER_PROF, signal.SIGPROF, LIMIT_S),  # one that computes
    (signal.ITIMER_REAL, signal.SIGALRM, PATIENCE_S),  # and one that waits
)


def _interrupt(*_: Any) -> None:
    raise TimeoutError("the call did not answer")


def _start(*_args: Any, **_keywords: Any) -> Any:
    raise Started


def _run(folder: Path, experiment: wb.Experiment, plan: wb.Plan) -> wb.Run:
    run = make_run(folder / "runs", steps=4)
    write_record(run.experiment, experiment.to_json())
    plan.save(run.plan)
    for step in range(1, 5):
        append_event(run.events, "step", step=step, loss=7.0 / step, seconds=0.5 * step, tokens=128 * step)
    append_event(run.events, "end", steps=4, seconds=2.0)
    append_event(run.events, "status", state="finished", message="4 steps.")
    return wb.Run(run.path)


def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _targets(world: Mapping[str, Any]) -> list[Target]:
    """Return every function of the API that takes arguments."""
    experiment, cluster, plan, run = world["experiment"], world["cluster"], world["plan"], world["run"]
    of_experiment = {field.name: getattr(experiment, field.name) for field in fields(experiment)}
    planned = {"experiment": experiment, "cluster": cluster}
    of_plan = ("experiment", "cluster", "memory_limit_gib", "fresh", *Choices.__annotations__)
    shared = {"notebook": "missing.ipynb"}
    grid, queue = wb.grid(experiment, cluster, zero=[0, 1]), wb.sweeps.Sweep("no-such-sweep")
    functions: list[tuple[str, Callable[..., Any], dict[str, Any], tuple[str, ...]]] = [
        ("Experiment", wb.Experiment, of_experiment, tuple(of_experiment)),
        ("Experiment.replace", experiment.replace, {}, tuple(PATHS)),
        ("Experiment.of", wb.Experiment.of, of_experiment, tuple(PATHS)),
        ("Experiment.from_json", wb.Experiment.from_json, {"value": experiment.to_json()}, ("value",)),
        *((kind.__name__, kind, {}, _names_of(kind)) for kind in GROUPS.values() if kind is not wb.Samples),
        ("Cluster.of", wb.Cluster.of, {"name": "h200"}, ("name", "gpus", "nodes")),
        ("Cluster.resized", cluster.resized, {"gpus": 2}, ("gpus",)),
        ("local_cluster", wb.measure.local_cluster, {}, ("processes",)),
        ("graph", wb.planning.graph, {"experiment": experiment}, ("experiment", "micro_batch")),
        ("profile", wb.planning.profile, planned, ("experiment", "cluster")),
        ("plan", wb.plan, planned, of_plan),
        (
            "search",
            wb.search,
            planned,
            ("experiment", "cluster", "memory_limit_gib", "fresh", *Choices.__annotations__),
        ),
        ("explain", wb.planning.explain, {"plan": plan}, ("plan", "profile")),
        ("launch", wb.launch, {"experiment": experiment, "plan": plan}, ()),
        ("prepare", wb.runs.prepare, {"experiment": experiment, "plan": plan}, ()),
        ("debug", wb.runs.debug, {"experiment": experiment, "plan": plan}, ()),
        ("bisect", wb.bisect, {"experiment": experiment, "plan_a": plan, "plan_b": plan}, ()),
        ("parity", wb.parity, {"experiment": experiment, "plans": [plan]}, ()),
        ("parity_figure", wb.figures.parity_figure, {}, ("found",)),
        ("partition", wb.figures.partition, {"experiment": experiment, "plan": plan}, ()),
        ("what_if", wb.what_if, planned, ()),
        ("timeline", wb.figures.timeline, {"run": run}, ()),
        ("show", wb.show, {"run": run}, ()),
        ("summary", wb.runs.summary, {"runs": [run]}, ()),
        ("live", wb.live, {"runs": [run]}, ()),
        ("compare", wb.compare, {"runs": [run, run]}, ()),
        ("contrast", wb.contrast, {"runs": [run, run]}, ()),
        ("share", wb.share, shared, ()),
        ("reproduce", wb.reproduce, shared, ()),
        ("list_runs", wb.list_runs, {}, ()),
        ("load_run", wb.load_run, {}, ()),
        ("load_sweep", wb.sweeps.load_sweep, {}, ()),
        ("heat_map", wb.figures.heat_map, {}, ("sweep",)),
        ("seed_bands", wb.figures.seed_bands, {}, ("runs",)),
        ("scaling_efficiency", wb.figures.scaling_efficiency, {}, ("points",)),
        ("diverged", wb.sweeps.diverged, {"above": 6.5}, ()),
        ("calibrate", wb.measure.calibrate, {}, ()),
        ("Run", wb.Run, {}, ("path",)),
        ("Sweep", wb.sweeps.Sweep, {}, ("path",)),
        ("Plan.load", wb.Plan.load, {}, ()),
        ("Plan.save", plan.save, {}, ()),
        ("Plan.from_json", wb.Plan.from_json, {}, ("value",)),
        ("Run.clone", run.clone, {}, ("plan", *PATHS)),
        ("Run.resume", run.resume, {}, ()),
        ("Run.export", run.export, {"to": "exported"}, ()),
        ("Run.slurm", run.slurm, {}, ()),
        ("Run.wait", run.wait, {}, ()),
        ("Run.stop", run.stop, {}, ()),
        ("Run.kill", run.kill, {}, ()),
        ("Run.logs", run.logs, {}, ()),
        ("Run.note", run.note, {}, ()),
        ("Run.archive", run.archive, {}, ()),
        ("log_scalar", wb.log_scalar, {"name": "accuracy", "value": 0.5}, ()),
        ("data.corpus", wb.data.corpus, {}, ()),
        ("data.hub", wb.data.hub, {"name": "some/text"}, ()),
        ("models.gpt3", wb.models.gpt3, {}, ()),
        (
            "pretrained",
            wb.models.pretrained,
            {"folder_or_name": world["model"]},
            ("folder_or_name", "task", "labels", "revision", "frozen", "dropout", "name"),
        ),
        (
            "classification",
            wb.data.classification,
            {"source": [{"text": f"a fox {i}", "label": i % 2} for i in range(4)], "tokenizer": world["tokenizer"]},
            ("source", "tokenizer", "length", "text", "pair", "label", "labels"),
        ),
        *((f"models.{kind}", getattr(wb.models, kind), {}, MODEL) for kind in ("bert", "bert_large", "gpt2", "opt")),
        ("data.held_out", wb.data.held_out, {"request": experiment}, ()),
        ("data.mixture", wb.data.mixture, {"parts": [(wb.data.corpus(), 1), (wb.data.hub("a/b"), 1)]}, ()),
        ("data.documents", wb.data.documents, {"texts": ["one text"]}, ()),
        ("doctor", wb.runs.doctor, {}, ()),
        ("Plans.frontier", wb.search(**planned).frontier, {}, ()),
        ("Queue.stop", queue.stop, {}, ()),
        ("Queue.wait", queue.wait, {}, ()),
        ("Sweep.best", queue.best, {}, ()),
        ("save", wb.figures.save, {"figure": wb.figures.Figure(), "path": "figure.csv"}, ()),
        ("Figure.save", wb.figures.Figure().save, {"path": "figure.csv"}, ()),
        ("save_html", wb.figures.save_html, {"figures": wb.figures.Figure(), "path": "page.html"}, ()),
        ("sweep", wb.sweep, {"experiment": experiment, "steps": [2, 4]}, (*SWEEP, "learning_rate", "no_such_axis")),
        (
            "grid",
            wb.grid,
            {**planned, "zero": [0, 1]},
            ("experiment", "cluster", "memory_limit_gib", *Choices.__annotations__),
        ),
        ("Grid.cell", grid.cell, {"zero": 0}, ("zero", "no_such_axis")),
        ("Grid.measure", grid.measure, {}, ()),
        ("load_grid", wb.sweeps.load_grid, {}, ()),
        ("MeasuredGrid", wb.sweeps.MeasuredGrid, {}, ("path",)),
        ("predictions", wb.figures.predictions, {}, ()),
        ("norms", wb.figures.norms, {"run": run}, ("run", "of", "layer")),
        ("magnitudes", wb.figures.magnitudes, {"run": run, "layer": "bert"}, ("run", "layer", "of")),
        ("frontier", wb.figures.frontier, {"plans": grid}, ()),
        ("parallel_coordinates", wb.figures.parallel_coordinates, {}, ()),
        ("best_so_far", wb.figures.best_so_far, {}, ("sweep",)),
        ("tokenize", wb.runs.tokenize, {"experiment": experiment}, ()),
        ("data_supply", wb.planning.data_supply, {"experiment": experiment, "plan": plan}, ()),
        ("context_free", wb.analysis.context_free, {"experiment": experiment}, ()),
        ("scaling", wb.models.scaling, {"base": experiment.model, "target": experiment.model}, ()),
        ("left_plateau", wb.analysis.left_plateau, {"run": run, "level": 6.0}, ()),
        ("stop_on_plateau", wb.analysis.stop_on_plateau, {"runs": [run], "level": 6.0}, ()),
        ("scaling_law", wb.analysis.scaling_law, {"runs": [run]}, ("runs",)),
        (
            "expected_difference",
            wb.analysis.expected_difference,
            {"small": experiment.model, "large": experiment.model, "tokens": 1e6},
            ("small", "large", "tokens", "law"),
        ),
        ("parameters_without_embeddings", wb.analysis.parameters_without_embeddings, {"model": experiment.model}, ()),
        ("ladder_points", wb.analysis.ladder_points, {"runs": [run]}, ("runs",)),
        ("pareto", wb.figures.pareto, {"runs": [run]}, ()),
        ("pattern", wb.figures.pattern, {"run": run}, ()),
        ("exploration", wb.figures.exploration, {"runs": [run]}, ()),
        ("sample_flops", wb.analysis.sample_flops, {"experiment": experiment}, ()),
        ("Samples", wb.Samples, {"prompts": ["Hello"]}, _names_of(wb.Samples)),
        ("sparsity.Static", wb.sparsity.Static, {}, ("sparsity", "block", "scope", "rescaled")),
        (
            "sparsity.Dynamic",
            wb.sparsity.Dynamic,
            {},
            ("sparsity", "block", "scope", "rescaled", "updates", "prune_ratio", "regrow"),
        ),
        ("sparsity.learning_rate", wb.sparsity.learning_rate, {"dense": 1e-3, "sparsity": 0.9}, ()),
        ("Run.evaluate", run.evaluate, {}, ("data", "step")),
        ("Run.evaluations", run.evaluations, {}, ("data",)),
    ]
    return [
        Target(name, call, right, parameters or tuple(inspect.signature(call).parameters))
        for name, call, right, parameters in functions
    ]


MODEL = (
    *("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "max_positions", "dropout"),
    *("initializer_range", "name"),
)
SWEEP = ("experiment", "seeds", "sampler", "trials", "stop", "runs_per_gpu", "directory")

DEFAULT = "None is the default"


def _reason(target: Target, parameter: str, label: str) -> str:
    """Return why a call may be accepted, or an empty text."""
    of_experiment = target.name.startswith("Experiment") or target.name == "Run.clone"
    group = next((field for field, kind in GROUPS.items() if kind.__name__ == target.name), None)
    if group is not None:  # whose values are known by their short names
        parameter = next(name for name, path in PATHS.items() if path == (group, parameter))
    known = (
        OF_EXPERIMENT.get(parameter, {})
        if of_experiment or group is not None
        else ACCEPTED.get(target.name, {}).get(parameter, {})
    )
    signature = inspect.signature(target.call).parameters
    default = signature[parameter].default if parameter in signature else None
    if label == "None" and default is None:
        return DEFAULT
    return next((reason for labels, reason in known.items() if label in labels), "")


def _remove(path: Path) -> None:
    """Remove what an accepted call wrote under an unknown name."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _outcome(target: Target, parameter: str, value: Any) -> tuple[str, str]:
    """Return `refused`, `accepted` or `raised`, and what was said."""
    for limit, number, seconds in LIMITS:
        signal.signal(number, _interrupt)
        signal.setitimer(limit, seconds)
    try:
        answer = target.call(**{**target.right, parameter: value})
        outcome, said = "accepted", type(answer).__name__
        if hasattr(answer, "close"):
            answer.close()
    except Started:
        outcome, said = "accepted", "it would start"
    except WorkbenchError as error:
        outcome, said = "refused", str(error)
    except Exception as error:
        outcome, said = "raised", f"{type(error).__name__}: {error}"
    finally:
        for limit, *_ in LIMITS:
            signal.setitimer(limit, 0)
        _remove(Path("no-such-thing"))
    return outcome, said


NOT_CALLED_BY_USERS: Mapping[str, str] = {
    "Cluster.group_link Cluster.hop_link Cluster.peers_link": "asked by the cost model, for groups that it made",
    "Plan.device_bytes Plan.keeps_weight_copies Plan.stages_of Plan.pipeline_rank_of Plan.shares_matrices_of": (
        "asked by ranks and figures, for ranks of the plan"
    ),
    "Calibration.applied_to Calibration.cluster Calibration.load Calibration.save": "of a measurement: tested with it",
    "Dynamic.covers Dynamic.kept Dynamic.ratio Dynamic.update_steps": "asked by the planner and the ranks",
    "Static.covers Static.kept Static.update_steps": "asked by the planner and the ranks",
    "ChinchillaLaw.difference ChinchillaLaw.loss KaplanLaw.difference KaplanLaw.loss": "arithmetic on arrays",
    "ScalingLaw.difference ScalingLaw.differences ScalingLaw.losses ScalingLaw.predict": "arithmetic on arrays",
    "ladder pair_difference": "take a law that was fitted to runs",
    "Cluster.from_json": "given what `to_json` of a plan wrote, which `Plan.from_json` checks",
    "Run.tag Run.untag": "take any number of words, and are tested with wrong ones beside the labels of runs",
    "Sweep.cells Grid.in_words Figure.laid_out Figure.with_legend_below Figure.without_values": (
        "make tables and pictures of what is shown"
    ),
    "Experiment.samples_before": "asked by data and ranks, for steps of the training",
    "Experiment.factory attending_within_documents": "asked by ranks and captures, which build the model",
    "verdict": "asked by templates, for cells that they have measured",
    "Parity.bisect": "looks for a fault that ranks have found",
    "History.last History.settled": "asked by the dashboard, for rows of the run that it shows",
    "as_data as_model data_fingerprint held_out_fingerprint data.from_json models.from_json sparsity.from_json": (
        "called with what an experiment has checked, or with what it wrote"
    ),
}
"""Names of the public surface that are no verbs for users, and why."""


NOT_VARIED = {f"{name}({axis})" for name in ("heat_map", "seed_bands") for axis in "xy"} | {
    "best_so_far(x)",
    "Experiment.from_json(code)",
}
"""Parameters that only mean something beside a sweep of runs, or the code of a run."""


def _surface() -> dict[str, Callable[..., Any]]:
    """Return the public functions and the methods of public classes that take arguments, by name.

    Constructors are left out: those of results are for no user, and the others check each field by its type.
    """
    rooms = [wb, *(value for value in (getattr(wb, name) for name in dir(wb)) if inspect.ismodule(value))]
    found = {}
    for room in rooms:
        for name in {*dir(room), *(n for n, value in vars(room).items() if _is_at_home(value, room))}:
            value = getattr(room, name)
            if inspect.isclass(value):
                members = ((f"{name}.{key}", getattr(value, key)) for key in dir(value) if not key.startswith("_"))
                found |= {key: inner for key, inner in members if inspect.isroutine(inner) and _takes_arguments(inner)}
            elif inspect.isroutine(value) and not name.startswith("_") and _takes_arguments(value):
                found[f"{room.__name__.split('.')[-1]}.{name}" if name == "from_json" else name] = value
    return found


def _is_at_home(value: Any, room: Any) -> bool:
    """Return True for a function that a room offers without listing it."""
    return inspect.isfunction(value) and value.__module__.startswith(room.__name__) and room is not wb


def _takes_arguments(function: Callable[..., Any]) -> bool:
    is_ours = str(getattr(function, "__module__", "")).startswith("workbench")
    return is_ours and any(name != "self" for name in inspect.signature(function).parameters)


def _plain(function: Callable[..., Any]) -> Any:
    return inspect.unwrap(getattr(function, "__func__", function))


def test_every_function_of_the_public_surface_and_each_of_its_parameters_is_called(world: dict[str, Any]) -> None:
    targets = {_plain(target.call): target for target in _targets(world)}
    surface, exempt = _surface(), {name for names in NOT_CALLED_BY_USERS for name in names.split()}
    missing = {name for name, function in surface.items() if _plain(function) not in targets}
    assert not missing - exempt, "Give them right arguments in _targets, or a reason in NOT_CALLED_BY_USERS."
    assert not exempt - missing, "They are called, or gone."
    unnamed = {
        f"{target.name}({name})"
        for target in targets.values()
        for name, parameter in inspect.signature(target.call).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and name not in target.parameters
    }
    assert unnamed == NOT_VARIED


def test_every_wrong_call_is_answered(world: dict[str, Any]) -> None:
    calls = [(t, parameter, label) for t in _targets(world) for parameter in t.parameters for label in WRONG]
    counts: Counter[str] = Counter()
    problems = []
    for target, parameter, label in calls:
        reason = _reason(target, parameter, label)
        if reason == DEFAULT:  # a right call, which may take its time
            continue
        outcome, said = _outcome(target, parameter, WRONG[label])
        if outcome == "accepted" and reason:
            counts["accepted for a reason"] += 1
            continue
        counts[outcome] += 1
        if outcome != "refused":
            problems.append(f"{target.name}({parameter}={label}) {outcome}: {said[:150]}")
    print(f"\n{len(calls)} wrong calls: {dict(counts)}")
    assert not problems, "\n".join(problems)
