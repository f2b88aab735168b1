"""The command line: `workbench plan|run|show|stop|...` for trainings, `new|execute|share|reproduce` for notebooks.

Each command calls the function or method of the same name in Python, which is imported when the command runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.core

import workbench as wb
from workbench import notebooks
from workbench.base.errors import InvalidExperiment, UnknownParameter, WorkbenchError, suggestion

if TYPE_CHECKING:
    from workbench.strategy import Choices

OTHER_WORDS = {
    "list": "runs",
    "ls": "runs",
    "ps": "runs",
    "status": "show",
    "logs": "show",
    "train": "run",
    "launch": "run",
}
OTHER_WORDS |= {"kill": "stop", "cancel": "stop", "continue": "resume", "eval": "evaluate", "rerun": "clone"}
"""Commands of other tools, whose letters are near to none of ours, or to one that does something else."""


class Commands(typer.core.TyperGroup):
    """The commands, which answer a word of another tool with the one that is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in OTHER_WORDS and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {OTHER_WORDS[args[0]]!r}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="workbench",
    cls=Commands,
    help="Plan, launch, watch and compare the training of unmodified PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT",
        help="A model, such as bert-large or bert:hidden_size=1920,num_layers=54,num_heads=30; or the JSON file of an "
        "experiment, such as experiment.json in a run directory.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a field of the experiment, such as steps=400, learning_rate=1e-4, data=corpus.txt or "
        "data=corpus.txt:vocab_size=8000; repeatable.",
    ),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Fix a choice of the plan, such as pipeline=2, zero=1 or recompute=full; repeatable."
    ),
]
MemoryLimit = Annotated[float | None, typer.Option(help="Memory that a device may use, in GiB.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Use a plan that `workbench plan --save` wrote.")]
Directory = Annotated[Path | None, typer.Option("--dir", help="Run directory; runs/<name>-<time> by default.")]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Set a parameter of the notebook; repeatable."),
]
Kernel = Annotated[str | None, typer.Option(help="Name of the kernel; the notebook's own by default.")]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help="Name or directory of a run.")]
SeveralRuns = Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or directories of runs.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print progress until the end.")]
Every = Annotated[float, typer.Option(help="Seconds between two lines of --follow.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when the training has ended; Ctrl-C leaves it running.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; an error that the user can mend is printed in red without a traceback, with exit code 2."""
    # Python's rule, a collection every 700 new objects and a last one at the end, takes a fifth of a command's time. A
    # library that torch imports would say of what is not freed that it leaks.
    gc.set_threshold(100_000)
    atexit.register(lambda: None if "torch" in sys.modules else gc.freeze())
    try:
        app()
        return
    except WorkbenchError as error:
        said = f"{type(error).__name__}: {error}"
    except OSError as error:
        if error.filename is None:
            raise
        said = f"{error.filename} cannot be read or written: {error.strerror}. Give another path."
    typer.secho(said, fg=typer.colors.RED, err=True)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"workbench {wb.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, launch, watch and compare the training of unmodified PyTorch models."""


class PlanView(StrEnum):
    """A view of a search for plans, as `workbench plan --show` prints it."""

    PLAN = "plan"
    TABLE = "table"
    EXPLANATION = "explanation"


@app.command()
def plan(
    source: Source,
    settings: Settings = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE:gpus=N",
            help="Plan for other hardware, such as h200:gpus=256 or a100:gpus=16,nodes=4; gpus=2 alone plans for two "
            "devices of this machine, which is the default.",
        ),
    ] = None,
    memory_limit_gib: MemoryLimit = None,
    fix: Fix = None,
    show: Annotated[
        list[PlanView] | None,
        typer.Option(
            help="Print the best plan (the default), the table of all plans that were considered, or the explanation "
            "of where the step time goes and what limits it; repeatable."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan as JSON, for `run --plan`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to divide a training step over devices, and predict its time and memory."""
    experiment, choices = experiment_from(source, settings or ()), choices_from(fix or ())
    plans = wb.search(experiment, cluster_from(cluster), memory_limit_gib=memory_limit_gib, **choices)
    best = plans.best
    if save is not None:
        best.save(save)
    if as_json:
        typer.echo(json.dumps(best.to_json(), indent=2))
        return
    for view in show or [PlanView.PLAN]:
        if view == PlanView.TABLE:
            typer.echo(repr(plans))
        else:
            typer.echo(describe_plan(best) if view == PlanView.PLAN else str(wb.planning.explain(best)))


@app.command()
def run(
    source: Source,
    settings: Settings = None,
    fix: Fix = None,
    memory_limit_gib: MemoryLimit = None,
    plan_file: PlanFile = None,
    directory: Directory = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Start a training and return; it goes on when this shell is closed."""
    experiment = experiment_from(source, settings or ())
    chosen = _choose_plan(experiment, plan_file, memory_limit_gib, fix or ())
    _print_started(wb.launch(experiment, chosen, directory=directory), wait, as_json)


@app.command()
def prepare(
    source: Source,
    settings: Settings = None,
    fix: Fix = None,
    memory_limit_gib: MemoryLimit = None,
    plan_file: PlanFile = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Write a run directory and start nothing; `workbench slurm` makes a job file for it."""
    experiment = experiment_from(source, settings or ())
    chosen = _choose_plan(experiment, plan_file, memory_limit_gib, fix or ())
    _print_started(wb.runs.prepare(experiment, chosen, directory=directory), False, as_json)


def _choose_plan(
    experiment: wb.Experiment, plan_file: Path | None, memory_limit_gib: float | None, fix: Sequence[str]
) -> wb.Plan:
    if plan_file is None:
        return wb.plan(experiment, memory_limit_gib=memory_limit_gib, **choices_from(fix))
    if fix or memory_limit_gib is not None:
        raise WorkbenchError(
            f"The plan in {plan_file} is complete. Remove --fix and --memory-limit-gib, or give them to "
            "`workbench plan --save`."
        )
    return wb.Plan.load(plan_file)


@app.command()
def tokenize(
    source: Source,
    settings: Settings = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes; one per core by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise the text of an experiment before it is run; an attempt that was killed goes on where it stopped."""
    prepared = wb.runs.tokenize(experiment_from(source, settings or ()), workers=workers)
    typer.echo(json.dumps(asdict(prepared), indent=2, default=str) if as_json else repr(prepared))


@app.command()
def resume(
    run: OneRun,
    steps: Annotated[int | None, typer.Option(help="New number of steps to train to.")] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Continue under another plan, which `workbench plan --save` wrote.")
    ] = None,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="Go on although the text has changed since the start.")
    ] = False,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its last checkpoint, in its own directory."""
    chosen = None if plan_file is None else wb.Plan.load(plan_file)
    _print_started(wb.load_run(run).resume(chosen, steps=steps, accept_changed_data=accept_changed_data), wait, as_json)


@app.command()
def clone(run: OneRun, settings: Settings = None, wait: Wait = False, as_json: AsJson = False) -> None:
    """Start a run's experiment again, with changes: `workbench clone bert-1 --set learning_rate=1e-4`."""
    _print_started(wb.load_run(run).clone(**fields_from(settings or ())), wait, as_json)


@app.command()
def evaluate(
    run: OneRun,
    step: Annotated[int | None, typer.Option(help="Checkpoint to evaluate; the last one by default.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder, instead of the samples that the run held out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the held-out loss of a checkpoint of a run that has ended."""
    result = wb.load_run(run).evaluate(None if data is None else wb.data.corpus(data), step)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
        return
    metrics = "".join(f", {name} {value}" for name, value in result.metrics.items())
    typer.echo(f"loss {result.loss:.6g}{metrics} on {result.count:,} samples after {result.step:,} steps")


@app.command()
def bisect(
    source: Source,
    plan_a: Annotated[Path, typer.Argument(help="A plan that `workbench plan --save` wrote, or a run directory.")],
    plan_b: Annotated[Path, typer.Argument(help="Another plan for the same experiment.")],
    settings: Settings = None,
    steps: Annotated[int, typer.Option(help="Number of steps that both plans train.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Say whether two plans differ by rounding or by a fault, and where it begins; exit code 1 for a fault."""
    found = wb.bisect(experiment_from(source, settings or ()), wb.Plan.load(plan_a), wb.Plan.load(plan_b), steps=steps)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else repr(found))
    if found.is_fault:
        raise typer.Exit(1)


def _print_started(started: wb.Run, wait: bool, as_json: bool) -> None:
    if wait:
        started.wait()
    typer.echo(json.dumps(started.row(), indent=2) if as_json else f"{started!r}\n{started.path}")


@app.command()
def slurm(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or directory of a run that `workbench prepare` wrote.")
    ],
    time: Annotated[str, typer.Option(help="Time limit of the job; a checkpoint is written before it.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Partition of the job.")] = None,
    account: Annotated[str | None, typer.Option(help="Account of the job.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(help="CPU cores on each node.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Add an #SBATCH option, such as --constraint=h200; repeatable.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="File to write; printed by default.")] = None,
) -> None:
    """Write a job file for `sbatch` that trains a run on the nodes of its plan."""
    text = wb.load_run(run).slurm(
        time=time, partition=partition, account=account, cpus_per_node=cpus_per_node, options=option or ()
    )
    if to is None:
        typer.echo(text, nl=False)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
        typer.echo(to.absolute())


@app.command()
def sweep(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A YAML file with the keys experiment, set, axes, seeds, stop, ..."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with what is missing of a sweep.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Print progress until the end.")] = True,
    every: Every = 5.0,
) -> None:
    """Train an experiment over values and seeds, or go on with a sweep; exit code 1 if a run failed.

    The sweep goes on when this shell is closed. docs/sweeps.md describes the file.
    """
    from workbench.sweeps.sweep import Axes, read_sweep_file
    from workbench.sweeps.sweep import follow as progress

    if (file is None) == (resume is None):
        raise WorkbenchError("Give either a YAML file, which starts a sweep, or --resume DIR, which goes on with one.")
    if file is None:
        started = wb.sweeps.load_sweep(resume or "").resume()
    else:
        asked = read_sweep_file(file)
        experiment = experiment_from(asked.pop("experiment"), described(asked.pop("set", {})))
        axes: dict[str, Any] = {
            name: [described({name: value})[name] for value in values] if isinstance(values, list) else values
            for name, values in asked.pop("axes").items()
        }
        Axes(experiment, axes)  # an axis must not be taken for an argument of `wb.sweep`
        options: dict[str, Any] = {**asked, **axes}
        started = wb.sweep(experiment, **options)
    typer.echo(f"{started.path}\n{started.why}")
    if not follow:
        return
    try:
        for line in progress(started, every):
            print(line, flush=True)
    except KeyboardInterrupt:
        typer.echo(f"The sweep goes on; wb.sweeps.load_sweep({str(started.path)!r}).stop() ends it.")
        return
    typer.echo(repr(started))
    if any(result.state == "failed" for _, result in started.results()) or not started.complete:
        raise typer.Exit(1)


@app.command()
def export(
    run: OneRun,
    to: Annotated[Path, typer.Argument(help="Folder to write.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the last by default.")] = None,
) -> None:
    """Write a run's model as safetensors that `from_pretrained` loads, and print the files."""
    for file in wb.load_run(run).export(to, step=step):
        typer.echo(file)


@app.command()
def export_events(run: OneRun) -> None:
    """Print each event and each logged step of a run as a line of JSON; numbers that JSON lacks become null."""
    for event in wb.load_run(run).events():
        typer.echo(json.dumps(json.loads(json.dumps(event), parse_constant=lambda _: None)))


@app.command()
def runs(
    root: Annotated[Path | None, typer.Argument(help="Folder of runs; $WORKBENCH_RUNS or ./runs by default.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    state: Annotated[str | None, typer.Option(help="Only runs in this state, such as running.")] = None,
    text: Annotated[str | None, typer.Option(help="Only runs with this text in their name, tags or note.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="Figure to sort by, smallest first, such as loss; -loss begins with the largest.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="List archived runs too.")] = False,
    as_json: AsJson = False,
    follow: Follow = False,
) -> None:
    """List the runs in a folder, newest first."""
    table = wb.list_runs(root, tag=tag, state=state, text=text, sort=sort, archived=archived)
    if follow:
        _follow([run for run in table if not run.status.final])
        return
    typer.echo(json.dumps(table.rows(), indent=2) if as_json else repr(table))


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or directory of a run, or wandb:entity/project/id.")],
    as_json: AsJson = False,
    follow: Follow = False,
    every: Every = 5.0,
    to: Annotated[Path | None, typer.Option(help="Write figures of the run's plan to this HTML file.")] = None,
    static: Annotated[bool, typer.Option("--static", help="With --to: a small page without a script.")] = False,
) -> None:
    """Print the state and the plan of a run, and the error of a failed one."""
    shown = wb.load_run(run)
    if to is not None:
        typer.echo(plan_page(shown, to, static))
        return
    if as_json:
        typer.echo(json.dumps(shown.row(), indent=2))
        return
    if follow:
        _follow([shown], every)
    else:
        planned = describe_plan(shown.plan) if shown.directory.plan.exists() else ""
        typer.echo(f"{shown!r}\n{shown.path}\n{planned}".rstrip())
    error = shown.error()
    if error is not None:
        typer.secho(str(error), fg=typer.colors.RED)
        if follow:
            raise typer.Exit(1)


def _follow(runs: Sequence[wb.Run], every_s: float = 5.0) -> None:
    from workbench.runs.registry import follow

    try:
        for line in follow(runs, every_s):
            print(line, flush=True)
    except KeyboardInterrupt:
        typer.echo("The training goes on; `workbench stop` ends it.")


@app.command()
def stop(
    runs: SeveralRuns,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the runs have ended.")] = True,
    now: Annotated[bool, typer.Option("--now", help="End the runs at once, without a checkpoint.")] = False,
) -> None:
    """Ask runs to write a checkpoint and end."""
    handles = [wb.load_run(run) for run in runs]
    ending = [run for run in handles if not run.status.final]
    for run in handles:
        _ = run.kill(wait=False) if now else run.stop()
    if now or wait:
        for run in ending:
            run.wait()
    for run in handles:
        typer.echo(repr(run))


@app.command()
def sync(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs; by default all that have something to upload.")
    ] = None,
) -> None:
    """Upload to their trackers (W&B, Trackio) what these lack of runs; exit code 1 if an upload fails."""
    deliveries = [wb.load_run(run).sync() for run in runs] if runs else wb.list_runs().sync()
    for delivery in deliveries:
        typer.echo(str(delivery))
    if not deliveries:
        typer.echo("Nothing to upload.")
    if any(delivery.state != "synced" for delivery in deliveries):
        raise typer.Exit(1)


@app.command()
def compare(
    runs: SeveralRuns,
    x: Annotated[str, typer.Option(help="step, tokens, samples, time, flops or gpu_hours.")] = "tokens",
    to: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("comparison.html"),
) -> None:
    """Write the loss curves of several runs to one interactive HTML file, and print its path."""
    from workbench.figures.figure import save_html

    typer.echo(Path(save_html(wb.compare(list(runs), x=x), to, title="Runs compared")).absolute())


@app.command()
def calibrate(
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON for another machine.")] = None,
) -> None:
    """Measure the speed of this machine once (matrix products, attention, memory, links); plans then use it."""
    measured = wb.measure.calibrate(again=again)
    if save is not None:
        measured.save(save)
    typer.echo(repr(measured))


@app.command()
def doctor(
    data: Annotated[bool, typer.Option("--data", help="Read and compare every tokenised text of the cache.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check what this machine has for training and what is missing; exit code 1 if something is missing."""
    report = wb.runs.doctor(data=data)
    typer.echo(json.dumps(list(map(vars, report)), indent=2) if as_json else repr(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def new(
    template: Annotated[str, typer.Argument(help="Name of a template.")],
    path: Annotated[Path | None, typer.Argument(help="File or folder to write; the current folder by default.")] = None,
) -> None:
    """Copy a template notebook, and print the path of the copy."""
    typer.echo(notebooks.new(template, path))


@app.command()
def execute(
    template: Annotated[str, typer.Argument(metavar="NOTEBOOK", help="A notebook, or the name of a template.")],
    to: Annotated[Path, typer.Option(help="Folder for the executed notebook and its HTML page.")],
    parameter: Parameters = None,
    kernel: Kernel = None,
) -> None:
    """Execute a notebook with parameters and export it as one HTML page; prints both paths.

    Progress of the notebook's runs goes to standard error.
    """
    from workbench.notebooks.executing import values_of

    notebook = notebooks.template_path(template)
    _report(f"Executing {notebook.name} …")
    with _without_grammars():
        values = values_of(notebook, dict(pairs_from(parameter or (), "-p")))
        done = notebooks.execute(notebook, to, values, kernel=kernel, report=_report)
    typer.echo(f"{done.notebook}\n{done.page}")


@app.command()
def share(
    notebook: Annotated[Path, typer.Argument(help="An executed notebook.")],
    to: Annotated[Path, typer.Option(help="Folder for the two files.")] = Path("shared"),
    run: Annotated[list[str] | None, typer.Option(help="A run of a notebook that has no record; repeatable.")] = None,
) -> None:
    """Make an HTML page that is interactive offline, and a notebook under 5 MB that shows without a kernel."""
    _report(f"Sharing {notebook.name} …")
    with _without_grammars():
        typer.echo(str(wb.share(notebook, to, runs=list(run) if run else None)))


@app.command()
def reproduce(
    notebook: Annotated[Path, typer.Argument(help="A notebook made by `workbench execute` or `workbench share`.")],
    to: Annotated[Path, typer.Option(help="Folder for the notebook as executed again.")] = Path("reproduced"),
    kernel: Kernel = None,
    at_commit: Annotated[
        bool, typer.Option("--at-commit", help="Run the code of the recorded git commit, checked out temporarily.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Execute the cells without showing them and asking.")] = False,
) -> None:
    """Execute a notebook again and compare its curves with the recorded ones; exit code 1 if a run is different."""
    with _without_grammars():
        if not yes:
            _report(f"Reading {notebook.name} …")
            typer.echo(notebooks.what_runs(notebook, at_commit))
            typer.confirm("Execute it?", abort=True)
        _report(f"Reproducing {notebook.name} …")
        result = notebooks.reproduce(notebook, to, kernel=kernel, at_commit=at_commit, report=_report, trust=True)
    typer.echo(repr(result))
    if not result.same:
        raise typer.Exit(1)


@contextlib.contextmanager
def _without_grammars() -> Iterator[None]:
    """Let nbformat be imported without the grammars of international addresses, of which it checks none.

    jsonschema compiles them when it is imported, in a second of CPU time. Nothing else in the process of a command uses
    them: the code of a notebook runs in another one.
    """
    grammars = "rfc3987_syntax"
    if grammars not in sys.modules:
        sys.modules[grammars] = None  # type: ignore[assignment]  # an import raises ImportError, which jsonschema expects
    try:
        yield
    finally:
        if sys.modules[grammars] is None:
            del sys.modules[grammars]


def _report(line: str) -> None:
    cleared = "\r\x1b[2K" if sys.stderr.isatty() else ""  # of the words of the call, which stand in the same line
    print(f"{cleared}{line}", file=sys.stderr, flush=True)


def experiment_from(source: str, settings: Sequence[str] | Mapping[str, Any] = ()) -> wb.Experiment:
    """Return the experiment of a JSON file or of a model's description, with the values that `settings` set.

    `settings` holds pairs such as `steps=40`, or values of the experiment by their short names.
    """
    fields = dict(settings) if isinstance(settings, Mapping) else fields_from(settings)
    file = Path(source)
    if file.suffix != ".json" and not file.is_file():
        fields = {"model": model_from(source), **fields}
        fields.setdefault("data", wb.data.corpus())
        return wb.Experiment.of(**fields)
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise InvalidExperiment(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InvalidExperiment(f"{file} is not JSON: {error}.") from None
    return wb.Experiment.from_json(value).replace(**fields)


def choices_from(pairs: Sequence[str]) -> Choices:
    """Return choices of a plan from pairs such as `pipeline=2`; raises `UnknownParameter` for what is no choice."""
    from workbench.strategy import Choices

    choices: Any = values_from(pairs, "--fix", "pipeline=2")
    for name in choices:
        if name not in Choices.__annotations__:
            known = suggestion(name, Choices.__annotations__)
            raise UnknownParameter(f"--fix {name}: there is no choice {name!r}. {known}")
    return cast("Choices", choices)


def fields_from(settings: Sequence[str]) -> dict[str, Any]:
    """Return values of an experiment from pairs such as `steps=40`."""
    return described(values_from(settings, "--set"))


def described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of an experiment in which `model` and `data` are what their descriptions stand for."""
    made = dict(fields)
    if "model" in fields:
        made["model"] = model_from(str(fields["model"]))
    if "data" in fields:
        made["data"] = corpus_from(str(fields["data"]))
    return made


def corpus_from(text: str) -> Any:
    """Return the text that `corpus.txt` or `corpus.txt:vocab_size=8000,objective=clm` describes."""
    path, _, pairs = text.rpartition(":")
    if not path or "=" not in pairs or Path(text).exists():
        return wb.data.corpus(text)
    return wb.data.corpus(path, **values_from(pairs.split(","), "--set data"))


def model_from(text: str) -> Any:
    """Return the named model that a text such as `bert-large` or `bert:hidden_size=64,num_layers=4` describes."""
    name, options = _name_and_options(text)
    builders: dict[str, Callable[..., Any]] = {
        "bert": wb.models.bert,
        "bert-large": wb.models.bert_large,
        "gpt2": wb.models.gpt2,
        "opt": wb.models.opt,
        "pretrained": wb.models.pretrained,
    }
    gpt3_sizes = {f"gpt3-{size.lower()}": size for size in wb.models.GPT3_SIZES}
    key = name.lower().replace("_", "-")
    if key in gpt3_sizes:
        return wb.models.gpt3(gpt3_sizes[key], **options)
    if key not in builders:
        near = suggestion(key, [*builders, *gpt3_sizes])
        raise InvalidExperiment(f"There is no model {name!r}, and no file of this name. {near}")
    return builders[key](**options)


def cluster_from(text: str | None) -> wb.Cluster | None:
    """Return the cluster that a text such as `h200:gpus=256` describes, or devices of this machine for `gpus=2`."""
    from workbench.measure.calibration import local_cluster

    if text is None:
        return None
    device, options = _name_and_options(text)
    if device:
        return wb.Cluster.of(device, **options)
    if options.keys() != {"gpus"}:
        raise InvalidExperiment(
            f"--cluster {text} names no device, and only gpus can be chosen of this machine. Write --cluster "
            f"DEVICE:{text}, for example h200:{text}."
        )
    return local_cluster(options["gpus"])


def _name_and_options(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the parts of `name:option=value,option=value`; either part may be missing."""
    name, _, pairs = text.partition(":") if ":" in text or "=" not in text else ("", "", text)
    return name, values_from([pair for pair in pairs.split(",") if pair], name)


def values_from(pairs: Sequence[str], option: str, example: str = "steps=40") -> dict[str, Any]:
    """Return `{"steps": 40, "name": "trial"}` for `["steps=40", "name=trial"]`: JSON where it parses, else text.

    Raises `UnknownParameter` with the name of the command-line `option` for a pair without a value.
    """
    words = {"True": True, "False": False, "None": None}
    values: dict[str, Any] = {}
    for name, text in pairs_from(pairs, option, example):
        values[name] = words.get(text, text)
        with contextlib.suppress(ValueError):
            values[name] = json.loads(text)
    return values


def pairs_from(pairs: Sequence[str], option: str, example: str = "steps=40") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each `NAME=VALUE`; raise `UnknownParameter` for one without a value."""
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            written = f"{pair}=VALUE" if name.strip() and not equals else f"NAME=VALUE, such as {option} {example}"
            raise UnknownParameter(f"{option} was given {pair!r}. Write {written}.")
        yield name, text


def describe_plan(plan: wb.Plan) -> str:
    """Return a plan as text: its description, and a line for each stage."""
    from workbench.base.units import count, gib

    lines = [f"{plan.model} on {plan.cluster.describe()}: {plan.describe()}"]
    for stage in plan.stages:
        blocks = plan.block_names[stage.first_block : stage.end_block]
        span = blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"
        lines.append(
            f"  stage {stage.index}: {span} ({len(blocks)} blocks, {count(stage.parameters)} parameters), "
            f"{gib(stage.memory.total)}"
        )
    lines.append(f"  {count(plan.prediction.tokens_per_s)} tokens/s predicted. {plan.prediction.basis}".rstrip())
    return "\n".join(lines)


def plan_page(run: wb.Run, to: Path, static: bool) -> Path:
    """Write the figures of a run's plan as one HTML page, with 4.5 MB of plotly unless `static`; return its path."""
    from workbench.figures.figure import picture, save_html
    from workbench.figures.plan_view import show_plan

    figure = show_plan(run.plan)
    shown = [f"<svg{picture(figure, 'svg').decode().partition('<svg')[2]}"] if static else [figure]
    return save_html(shown, to, title=f"{run.name}: its plan", text=describe_plan(run.plan)).absolute()


if __name__ == "__main__":
    main()
