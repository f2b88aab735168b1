"""The verbs of the workbench in a shell: `workbench calibrate|plan|run|resume|clone|runs|show|compare|stop|…`,
`workbench new|execute|share|reproduce` for notebooks.

Each verb calls the function of the same name in `workbench.api`, imported when it is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import InvalidExperiment, UnknownParameter, WorkbenchError, suggestion

if TYPE_CHECKING:
    from workbench.cost.cluster import Cluster
    from workbench.experiment import Experiment
    from workbench.planning.plan import Plan
    from workbench.runs import Run

app = typer.Typer(
    name="workbench",
    help="Plan, launch, watch and compare the training of unmodified PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[Path | None, typer.Argument(help="An experiment as JSON (a run's experiment.json); or use flags.")]
ModelName = Annotated[str | None, typer.Option("--model", help="bert, bert-large, gpt2, gpt3-1.3b, opt …")]
Hidden = Annotated[int | None, typer.Option("--hidden-size", help="Width of the model.")]
Layers = Annotated[int | None, typer.Option("--layers", help="Transformer layers.")]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads.")]
Layout = Annotated[str | None, typer.Option("--layout", help="post_ln (as published) or pre_ln; BERT only.")]
Data = Annotated[str | None, typer.Option("--data", help='"demo", a text file, or a folder of text files.')]
Steps = Annotated[int | None, typer.Option("--steps")]
Batch = Annotated[int | None, typer.Option("--global-batch", help="Samples a step, over all devices.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens a sample.")]
Rate = Annotated[float | None, typer.Option("--learning-rate")]
Precision = Annotated[str | None, typer.Option("--precision", help="auto, fp32 or bf16.")]
Seed = Annotated[int | None, typer.Option("--seed")]
Name = Annotated[str | None, typer.Option("--name", help="Of the run; the model's by default.")]
Every = Annotated[int | None, typer.Option("--checkpoint-every", help="Steps between checkpoints.")]
Limit = Annotated[float | None, typer.Option("--memory-limit-gib", help="At most this much on one device.")]
Pipeline = Annotated[int | None, typer.Option("--pipeline", help="Fix the pipeline-parallel degree.")]
DataParallel = Annotated[int | None, typer.Option("--data-parallel", help="Fix the data-parallel degree.")]
Tensor = Annotated[int | None, typer.Option("--tensor", help="Fix the tensor-parallel degree.")]
Zero = Annotated[int | None, typer.Option("--zero", help="Fix the ZeRO stage: 0, 1, 2 or 3.")]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", help="Fix the micro-batch size.")]
Recompute = Annotated[
    str | None, typer.Option("--recompute", help="Fix activation checkpointing: none, selective or full.")
]
Schedule = Annotated[str | None, typer.Option("--schedule", help="Fix it: gpipe, 1f1b, interleaved or zero_bubble.")]
Chunks = Annotated[int | None, typer.Option("--chunks", help="Fix how many stages a pipeline rank has.")]
Offload = Annotated[
    bool | None,
    typer.Option("--offload-optimizer/--no-offload-optimizer", help="Fix whether the host holds optimiser states."),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="Fix whether blocks are recorded once and replayed."),
]
Fields = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Any other field of the experiment; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def main() -> None:
    """Run the command line; an error of ours is one red sentence and exit code 2."""
    try:
        app()
    except WorkbenchError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)


@app.command()
def plan(
    file: File = None,
    model: ModelName = None,
    hidden_size: Hidden = None,
    layers: Layers = None,
    heads: Heads = None,
    layout: Layout = None,
    data: Data = None,
    steps: Steps = None,
    global_batch: Batch = None,
    seq_len: SeqLen = None,
    learning_rate: Rate = None,
    precision: Precision = None,
    parameter: Fields = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Devices to plan for; this machine's by default.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="a100, h200, rtx-4090, l40s … somewhere else.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="That those of --device are in; 8 each if none, 4 of RTX cards.")
    ] = None,
    memory_limit_gib: Limit = None,
    pipeline: Pipeline = None,
    data_parallel: DataParallel = None,
    tensor: Tensor = None,
    zero: Zero = None,
    micro_batch: MicroBatch = None,
    recompute: Recompute = None,
    schedule: Schedule = None,
    chunks: Chunks = None,
    offload_optimizer: Offload = None,
    cuda_graphs: CudaGraphs = None,
    weighed: Annotated[bool, typer.Option("--all", help="Print the table of all plans that were weighed.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say where the step goes, and what binds.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan's JSON here, for `run --plan`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how a step would be divided, how long it would take and what it would hold in memory."""
    from workbench import api

    sizes = {"hidden_size": hidden_size, "num_layers": layers, "num_heads": heads, "layout": layout}
    training: dict[str, Any] = {"steps": steps, "global_batch": global_batch, "seq_len": seq_len}
    training |= {"learning_rate": learning_rate, "precision": precision, **parameters_from(parameter or ())}
    experiment = experiment_from(file, model, sizes, data, training)
    plans = api.search(
        experiment,
        _cluster(device, gpus, nodes),
        memory_limit_gib=memory_limit_gib,
        pipeline=pipeline,
        data=data_parallel,
        tensor=tensor,
        zero=zero,
        micro_batch=micro_batch,
        recompute=recompute,
        schedule=schedule,
        chunks=chunks,
        offload_optimizer=offload_optimizer,
        cuda_graphs=cuda_graphs,
    )
    chosen = plans.best
    if save is not None:
        chosen.save(save)
    if as_json:
        typer.echo(json.dumps(chosen.to_json(), indent=2))
        return
    typer.echo(repr(plans) if weighed else describe_plan(chosen))
    if explain:
        typer.echo(f"\n{chosen.explain()}")


@app.command()
def run(
    file: File = None,
    model: ModelName = None,
    hidden_size: Hidden = None,
    layers: Layers = None,
    heads: Heads = None,
    layout: Layout = None,
    data: Data = None,
    steps: Steps = None,
    global_batch: Batch = None,
    seq_len: SeqLen = None,
    learning_rate: Rate = None,
    precision: Precision = None,
    seed: Seed = None,
    name: Name = None,
    checkpoint_every: Every = None,
    parameter: Fields = None,
    memory_limit_gib: Limit = None,
    pipeline: Pipeline = None,
    data_parallel: DataParallel = None,
    tensor: Tensor = None,
    zero: Zero = None,
    micro_batch: MicroBatch = None,
    recompute: Recompute = None,
    schedule: Schedule = None,
    chunks: Chunks = None,
    offload_optimizer: Offload = None,
    cuda_graphs: CudaGraphs = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan saved by `workbench plan --save`.")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Of the run; runs/<name>-<time> by default.")] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Write the run directory, and start nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended; Ctrl-C leaves it running.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a training and return; it goes on without this shell."""
    from workbench import api

    sizes = {"hidden_size": hidden_size, "num_layers": layers, "num_heads": heads, "layout": layout}
    training: dict[str, Any] = {
        "steps": steps,
        "global_batch": global_batch,
        "seq_len": seq_len,
        "seed": seed,
        "name": name,
    }
    training |= {"learning_rate": learning_rate, "precision": precision, "checkpoint_every": checkpoint_every}
    experiment = experiment_from(file, model, sizes, data, training | parameters_from(parameter or ()))
    if plan_file is not None:
        chosen = api.load_plan(plan_file)
    else:
        chosen = api.plan(
            experiment,
            memory_limit_gib=memory_limit_gib,
            pipeline=pipeline,
            data=data_parallel,
            tensor=tensor,
            zero=zero,
            micro_batch=micro_batch,
            recompute=recompute,
            schedule=schedule,
            chunks=chunks,
            offload_optimizer=offload_optimizer,
            cuda_graphs=cuda_graphs,
        )
    begin = api.prepare if prepare else api.launch
    _announce(begin(experiment, chosen, directory=directory), wait and not prepare, as_json)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    steps: Annotated[int | None, typer.Option("--steps", help="Train to this step instead.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Go on under this plan; any may follow any.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended; Ctrl-C leaves it running.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its last checkpoint, in its own directory."""
    from workbench import api

    chosen = None if plan_file is None else api.load_plan(plan_file)
    _announce(api.resume(run, chosen, steps=steps), wait, as_json)


@app.command()
def slurm(
    run: Annotated[str, typer.Argument(help="The name or directory of a run: `workbench run … --prepare` made it.")],
    time: Annotated[str, typer.Option("--time", help="Limit of the job; a checkpoint is written before.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option("--partition")] = None,
    account: Annotated[str | None, typer.Option("--account")] = None,
    cpus_per_node: Annotated[int | None, typer.Option("--cpus-per-node")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="A further #SBATCH option, such as --constraint=h200; repeatable."),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="The file to write; printed otherwise.")] = None,
) -> None:
    """Write a job file for `sbatch` that trains a run on the nodes of its plan."""
    from workbench import api

    text = api.slurm(
        run,
        time=time,
        partition=partition,
        account=account,
        cpus_per_node=cpus_per_node,
        options=option or (),
    )
    if to is None:
        typer.echo(text, nl=False)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
        typer.echo(to.absolute())


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    to: Annotated[Path, typer.Argument(help="The folder to write.")],
    step: Annotated[int | None, typer.Option("--step", help="Of which checkpoint; the last by default.")] = None,
) -> None:
    """Write a run's model as safetensors that `from_pretrained` loads; prints the files."""
    from workbench import api

    for file in api.export(run, to, step=step):
        typer.echo(file)


@app.command()
def runs(
    root: Annotated[
        Path | None, typer.Argument(help="Where the runs are; $WORKBENCH_RUNS or ./runs by default.")
    ] = None,
    as_json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print the progress of those that live.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between lines of --follow.")] = 5.0,
) -> None:
    """List runs, newest first."""
    from workbench import api

    table = api.runs(root)
    if follow:
        _follow([run for run in table if not run.status.final], every)
        return
    typer.echo(json.dumps(table.rows(), indent=2) if as_json else repr(table))


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="A run's name or directory, or wandb:entity/project/id.")],
    as_json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print its progress until it ends.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between lines of --follow.")] = 5.0,
    to: Annotated[Path | None, typer.Option("--to", help="Write its plan's pictures into this HTML file.")] = None,
) -> None:
    """Say where a run stands, how it was planned, and what it died of if it failed."""
    from workbench import api

    found = api.load_run(run)
    if to is not None:
        typer.echo(plan_page(found, to))
        return
    if as_json:
        typer.echo(json.dumps(found.summary(), indent=2))
        return
    if follow:
        _follow([found], every)
    else:
        planned = describe_plan(found.plan) if found.directory.plan.exists() else ""
        typer.echo(f"{found!r}\n{found.path}\n{planned}".rstrip())
    error = found.error()
    if error is not None:
        typer.secho(str(error), fg=typer.colors.RED)
        if follow:
            raise typer.Exit(1)


@app.command()
def clone(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Changes a field of the experiment; repeatable."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended; Ctrl-C leaves it running.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run's experiment again, with changes: `workbench clone bert-1 -p learning_rate=1e-4`."""
    from workbench import api

    _announce(api.clone(run, **parameters_from(change or ())), wait, as_json)


@app.command()
def sync(
    runs: Annotated[list[str] | None, typer.Argument(help="Names or directories; by default all that need it.")] = None,
) -> None:
    """Upload to Weights & Biases what it does not have of runs that were recorded offline; exit code 1 on failure."""
    from workbench import api

    deliveries = api.sync(list(runs) if runs else None)
    for told in deliveries:
        typer.echo(str(told))
    if not deliveries:
        typer.echo("Nothing to upload.")
    if any(told.state != "synced" for told in deliveries):
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Names or directories of runs.")],
    x: Annotated[str, typer.Option("--x", help="step, tokens, samples, time, flops or gpu_hours.")] = "tokens",
    to: Annotated[Path, typer.Option("--to", help="The HTML file to write.")] = Path("comparison.html"),
) -> None:
    """Write the loss curves of several runs into one interactive HTML file, and print its path."""
    from workbench import api
    from workbench.figures.pages import save_html

    written = save_html(api.compare(list(runs), x=x), to, title="Runs compared")
    typer.echo(Path(written).absolute())


@app.command()
def stop(
    runs: Annotated[list[str], typer.Argument(help="Names or directories of runs.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Stay until they have left.")] = True,
    now: Annotated[bool, typer.Option("--now", help="Kill them: no checkpoint is written.")] = False,
) -> None:
    """Ask runs to write a checkpoint and leave."""
    from workbench import api

    for stopped in api.kill(list(runs)) if now else api.stop(list(runs), wait=wait):
        typer.echo(repr(stopped))


@app.command()
def calibrate(
    again: Annotated[bool, typer.Option("--again", help="Measure anew what was measured before.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write it as JSON, to plan for this machine.")] = None,
) -> None:
    """Measure this machine once: matrix products, attention, memory, the links between devices; kept for planning."""
    from workbench import api

    found = api.calibrate(again=again)
    if save is not None:
        found.save(save)
    typer.echo(repr(found))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has for training and what is missing; exit code 1 if something is."""
    from workbench import api
    from workbench.runs.doctor import as_json as report_json

    report = api.doctor()
    typer.echo(json.dumps(report_json(report), indent=2) if as_json else repr(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def execute(
    template: Annotated[str, typer.Argument(help="A notebook, or the name of an installed template.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for the executed notebook and its HTML page.")],
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Sets a parameter of the notebook; repeatable."),
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Kernel to run it with; the notebook's own.")] = None,
) -> None:
    """Execute a notebook with parameters, and export it as one self-contained HTML page; prints both paths.

    Where its runs stand is printed meanwhile, to standard error.
    """
    from workbench import notebooks

    parameters = parameters_from(parameter or ())
    done = notebooks.execute(notebooks.template_path(template), to, parameters, kernel=kernel, report=_report)
    typer.echo(f"{done.notebook}\n{done.page}")


@app.command()
def new(
    template: Annotated[str, typer.Argument(help="The name of a template.")],
    path: Annotated[Path | None, typer.Argument(help="File or folder to copy it to; the current folder.")] = None,
) -> None:
    """Start from a template: copy a notebook, and print where it is."""
    from workbench import notebooks

    typer.echo(notebooks.new(template, path))


@app.command()
def share(
    notebook: Annotated[Path, typer.Argument(help="An executed notebook.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for the two files.")] = Path("shared"),
    run: Annotated[
        list[str] | None, typer.Option("--run", help="A run that the notebook shows, if it does not say so itself.")
    ] = None,
) -> None:
    """Make an HTML page that is interactive offline, and a notebook under 5 MB that shows pictures without a kernel."""
    from workbench import api

    typer.echo(str(api.share(notebook, to, runs=list(run) if run else None)))


@app.command()
def reproduce(
    notebook: Annotated[Path, typer.Argument(help="A notebook made by `workbench execute` or `workbench share`.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for the notebook as executed again.")] = Path("reproduced"),
    kernel: Annotated[str | None, typer.Option("--kernel", help="Kernel to run it with; the notebook's own.")] = None,
    at_commit: Annotated[
        bool, typer.Option("--at-commit", help="Run the code of the recorded git commit, checked out aside.")
    ] = False,
) -> None:
    """Execute a notebook again and say, curve against curve, whether it came out the same; else exit code 1."""
    from workbench import notebooks

    found = notebooks.reproduce(notebook, to, kernel=kernel, at_commit=at_commit, report=_report)
    typer.echo(repr(found))
    if not found.same:
        raise typer.Exit(1)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def experiment_from(
    file: Path | None,
    model: str | None,
    sizes: Mapping[str, Any],
    data: str | None,
    training: Mapping[str, Any],
) -> Experiment:
    """The experiment in `file`, or of the flags; flags that are given win over the file."""
    from workbench import data as corpora
    from workbench.experiment import Experiment

    changes = _given(**training)
    if model is not None:
        changes["model"] = named_model(model, _given(**sizes))
    elif _given(**sizes):
        raise InvalidExperiment("--hidden-size, --layers, --heads and --layout describe a --model; name it too.")
    if data is not None:
        changes["data"] = corpora.corpus(data)
    if file is not None:
        return _read_experiment(file).replace(**changes)
    if model is None:
        raise InvalidExperiment("Name a model (--model bert-large) or give an experiment's JSON file.")
    changes.setdefault("data", corpora.corpus())
    return Experiment(**changes)


def _read_experiment(file: Path) -> Experiment:
    from workbench.experiment import Experiment

    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise InvalidExperiment(f"{file} cannot be read: {error.strerror}.", file=str(file)) from None
    except ValueError as error:
        raise InvalidExperiment(f"{file} is not JSON: {error}.", file=str(file)) from None
    return Experiment.from_json(value)


def named_model(name: str, sizes: Mapping[str, Any]) -> Any:
    """`bert-large`, `gpt2`, `gpt3-1.3b`: the function of `wb.models`, called with the sizes that were given."""
    from workbench import models

    builders: dict[str, Callable[..., Any]] = {
        "bert": models.bert,
        "bert-large": models.bert_large,
        "gpt2": models.gpt2,
        "opt": models.opt,
    }
    gpt3 = {f"gpt3-{size.lower()}": size for size in models.GPT3_SIZES}
    key = name.lower().replace("_", "-")
    if key in gpt3:
        builder: Callable[..., Any] = models.gpt3
        sizes = {"size": gpt3[key], **sizes}
    elif key in builders:
        builder = builders[key]
    else:
        raise InvalidExperiment(f"There is no model {name!r}. {suggestion(key, [*builders, *gpt3])}", model=name)
    return builder(**sizes)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _cluster(device: str | None, gpus: int | None, nodes: int | None) -> Cluster | None:
    from workbench.cost.cluster import Cluster
    from workbench.measure.local_cluster import local_cluster

    if device is not None:
        return Cluster.of(device, **_given(gpus=gpus, nodes=nodes))
    if nodes is not None:
        raise InvalidExperiment("--nodes says how those of another machine are connected; name it by --device too.")
    return None if gpus is None else local_cluster(gpus)


def describe_plan(plan: Plan) -> str:
    """A plan for a terminal: its sentence, and a line for each stage."""
    from workbench.units import count, gib

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


def _follow(runs: Sequence[Run], every_s: float) -> None:
    from workbench.runs.records.follow import follow

    try:
        for line in follow(runs, every_s):
            print(line, flush=True)
    except KeyboardInterrupt:
        typer.echo("The training goes on; `workbench stop` ends it.")


def plan_page(run: Run, to: Path) -> Path:
    """Write the pictures of a run's plan as one page that opens offline."""
    from workbench.figures import save_html, show_plan

    return save_html(show_plan(run.plan), to, title=f"{run.name}: its plan", text=describe_plan(run.plan)).absolute()


def _announce(started: Run, wait: bool, as_json: bool) -> None:
    if wait:
        started.wait()
    if as_json:
        typer.echo(json.dumps(started.summary(), indent=2))
    else:
        typer.echo(f"{started!r}\n{started.path}")


def parameters_from(pairs: Sequence[str]) -> dict[str, Any]:
    """`["steps=40", "name=trial"]` as `{"steps": 40, "name": "trial"}`: JSON where it parses, else text."""
    words = {"True": True, "False": False, "None": None}
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UnknownParameter(f"-p {pair} gives no value. Write -p {pair}=VALUE.", parameter=pair)
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = words.get(text, text)
    return parameters


if __name__ == "__main__":
    main()
