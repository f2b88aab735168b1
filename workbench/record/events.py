"""Types of the records in a run directory: events, process records and the launcher's record.

The values are plain dicts, as `json.loads` returns them; the types say which keys each of them has. Every event has
`type` and `time` (Unix seconds). `workbench.record.rundir` writes and reads them, but for steps, which
`workbench.record.step_table` keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from workbench.record.columns import NORMS

State = Literal["queued", "starting", "running", "stalled", "finished", "stopped", "failed"]

ActionRow = tuple[str, int, int, float, float]
"""Action type, stage, micro-batch, start and end in ms from the origin of the `actions` event."""


class _Timed(TypedDict):
    time: float
    """Unix seconds at which the event was written."""


class StatusEvent(_Timed):
    """The run has entered a state."""

    type: Literal["status"]
    state: State
    message: NotRequired[str]
    rows: NotRequired[int]
    """Number of steps that were logged before it, by all attempts; fewer in the table are lost."""


class StartEvent(_Timed):
    """The ranks are about to train. `devices` is their number or their names."""

    type: Literal["start"]
    devices: NotRequired[int | list[str]]
    world: NotRequired[int]
    parameters: NotRequired[int]
    flops_per_step: NotRequired[float]
    peak_flops: NotRequired[float | None]
    """Sum over the devices in FLOP/s; None where it is unknown."""
    rows: NotRequired[int]
    """Number of steps that were logged before it, by all attempts; 0 by default."""
    tokens_per_step: NotRequired[int]
    samples_per_step: NotRequired[int]
    resumed_from: NotRequired[str | int | None]
    """Path of the checkpoint that training continues from, or its step."""
    held_out: NotRequired[str]
    """Sentences on what training leaves out of its text for evaluations; empty if it reads all."""


class PhaseEvent(_Timed):
    """Rank 0 has finished a phase before the first step: `capture`, `build`, `compile` ..."""

    type: Literal["phase"]
    name: str
    seconds: float


class StepEvent(_Timed):
    """The figures of one logged step; `workbench.record.columns.COLUMNS` describes these and all others it may have."""

    type: Literal["step"]
    step: int
    loss: float | None
    step_ms: NotRequired[float | None]
    scalars: NotRequired[dict[str, float | None]]
    """Scalars that user-defined code has logged (`workbench.log_scalar`)."""


class _EvaluationFields(_Timed):
    """Fields of every evaluation. Counts and `seconds` are those of the training so far."""

    step: int
    """Number of completed steps, from 0."""
    loss: float
    tokens: NotRequired[float]
    samples: NotRequired[float]
    flops: NotRequired[float]
    seconds: NotRequired[float]
    """Training time so far, without evaluations."""
    eval_seconds: NotRequired[float]
    """Time that this evaluation took."""
    evaluated: NotRequired[int]
    """Number of held-out samples."""
    metrics: NotRequired[dict[str, float | None]]
    """The experiment's own metrics; None for one whose count was 0."""


class EvaluationEvent(_EvaluationFields):
    """The loss on the held-out samples after `step` steps."""

    type: Literal["evaluation"]


class DataEvaluationEvent(_EvaluationFields):
    """The loss on data that `run.evaluate` was given."""

    type: Literal["data_evaluation"]
    data: str
    """Name of the data."""


class TextSample(TypedDict):
    """The answer of a model to one prompt: the text that continues it, or what fills its masks."""

    prompt: str
    text: NotRequired[str]
    masks: NotRequired[list[list[tuple[str, float]]]]
    """The most probable tokens with their probabilities, for each mask."""


class SamplesEvent(_Timed):
    """Samples of text after `step` steps."""

    type: Literal["samples"]
    step: int
    """Number of completed steps, from 0."""
    samples: list[TextSample]
    seconds: NotRequired[float]
    """Time that writing the samples took."""


class SparsityEvent(_Timed):
    """The patterns of a sparse training after `step` steps, summed over all sparse weights."""

    type: Literal["sparsity"]
    step: int
    """Number of completed steps, from 0."""
    update: int
    """Number of updates of the pattern so far."""
    prune_ratio: float
    """Share of the present blocks that an update at this step prunes; 0 for a static pattern."""
    blocks: int
    present: int
    explored: int
    """Number of blocks that are or once were present."""
    moved: int
    """Number of blocks that the last update pruned, and of those that regrew."""
    tokens: float
    flops: float
    seconds: float
    """Training time so far."""
    weight: str
    """Name of the weight that `pattern` belongs to."""
    pattern: list[str]
    """Rows of the upper left corner of its pattern: `#` for a block that is present, `.` for an absent one."""


class Exponents(TypedDict):
    """A histogram of the elements of one layer by their binary exponent."""

    layer: str
    of: Literal["weights", "gradients", "updates"]
    zeros: int
    first: int
    """First bin: elements of bin b have a magnitude in [2**(b - 127), 2**(b - 126)), as the exponents of fp32 count."""
    counts: list[int]
    not_finite: int


class NormsEvent(_Timed):
    """Norms of each trained parameter, its gradient before clipping and its update, of step `step`.

    The lists have one item a parameter. A gradient and an update of a parameter that the step does not train are NaN.
    """

    type: Literal["norms"]
    step: int
    """Number of the step, from 1."""
    tokens: float
    parameters: list[str]
    layers: list[str]
    """Layer of each parameter: the block of the model that reads it first."""
    elements: list[int]
    weights: list[float]
    """Norms before the update."""
    gradients: list[float]
    updates: list[float]
    least: list[float]
    """Norm of the update that the optimiser lets expect for gradients that are independent from step to step; NaN where
    no formula says so."""
    most: list[float]
    """Norm that it lets expect for gradients that are all the same."""
    histograms: list[Exponents]
    spent_s: float
    """Seconds that the record took, which count as time of no step."""


class MemoryEvent(_Timed):
    """The peak memory of one rank."""

    type: Literal["memory"]
    rank: int
    stage: int
    device: NotRequired[str]
    peak_bytes: int
    """Bytes of tensors; on a CPU where they are not `counted`, those by which the process has grown."""
    reserved_bytes: NotRequired[int]
    counted: NotRequired[bool]
    """True on a CPU if the tensors of a step were counted, as they always are on a GPU."""
    limit_bytes: NotRequired[int | None]


class DeviceEvent(_Timed):
    """One sample of the devices of one node. A None in a list means that this device did not answer."""

    type: Literal["device"]
    device_type: Literal["cuda", "cpu"]
    names: list[str]
    shares: list[float | None]
    """Utilisation of each device, from 0 to 1."""
    used_bytes: list[int | None]
    """Memory in use by any process on each device; on a CPU the resident memory of the run's processes."""
    node: NotRequired[int]
    """Rank of the node; absent for a run on one node."""


class ActionsEvent(_Timed):
    """The timeline of one step on one pipeline rank; only one step in many is recorded."""

    type: Literal["actions"]
    rank: int
    step: int
    origin_s: float
    """Unix seconds that the times of the actions count from."""
    actions: list[ActionRow]


class CheckpointEvent(_Timed):
    """A checkpoint is complete on disk."""

    type: Literal["checkpoint"]
    step: int
    path: NotRequired[str]
    seconds: NotRequired[float]
    """Seconds that training paused."""
    write_s: NotRequired[float]
    """Seconds until the checkpoint was on disk."""


class PartUseFields(TypedDict):
    """Samples that were read of one source of a mixture."""

    name: str
    samples: int
    tokens: int
    epochs: float | None
    """None for a source that does not say how many samples it has."""
    estimated: NotRequired[bool]
    """True if the samples of an epoch are estimated, as those of a long text that is streamed."""


class DataUseEvent(_Timed):
    """Samples that `step` steps read of each source of a mixture, logged with each checkpoint and at both ends."""

    type: Literal["data_use"]
    step: int
    """Number of completed steps, from 0."""
    parts: list[PartUseFields]


class SpikeEvent(_Timed):
    """The loss or the gradient norm of step `step` leapt, and its update was left out or the run went back."""

    type: Literal["spike"]
    step: int
    """Number of the step, from 1."""
    loss: NotRequired[float]
    grad_norm: NotRequired[float]
    number: NotRequired[int]
    """Number of the spike in the run, from 1."""
    action: NotRequired[Literal["skipped", "rewound"]]
    to: NotRequired[int]
    """Step of the checkpoint from which training went on."""
    skipped_samples: NotRequired[int]
    """Samples between that checkpoint and the end of the spike's step, which are not trained on again."""


class CheckpointProblemEvent(_Timed):
    """A checkpoint could not be written, or a damaged one was skipped."""

    type: Literal["checkpoint_problem"]
    step: int
    path: NotRequired[str]
    message: str


class CodeProblemEvent(_Timed):
    """Something that the user's code reads or draws is another than at the start of the run, and cannot be given."""

    type: Literal["code_problem"]
    message: str


class AlertEvent(_Timed):
    """Something that somebody who waits for the run wants to know at once."""

    type: Literal["alert"]
    alert: str
    """`not finite` or `plateau`."""
    message: str
    step: NotRequired[int]
    """Number of the logged step, from 1, at which it was noticed."""


class EndEvent(_Timed):
    """The ranks have left their training loop in order, after `steps` steps and `seconds` of training."""

    type: Literal["end"]
    steps: int
    seconds: NotRequired[float]
    rows: NotRequired[int]
    """Number of steps that were logged before it, by all attempts."""


class TrackingEvent(_Timed):
    """Progress of the upload to the tracker: `state` is offline, syncing, synced or failed."""

    type: Literal["tracking"]
    state: str
    message: NotRequired[str]
    step: NotRequired[int]
    """The last step that the server has."""
    files: NotRequired[dict[str, float]]
    """Modification time of each attached file, by its name on the server."""
    to: NotRequired[str]
    """Address of the server; absent for the tracker's usual one."""


Event = (
    StatusEvent
    | StartEvent
    | PhaseEvent
    | StepEvent
    | EvaluationEvent
    | DataEvaluationEvent
    | SamplesEvent
    | SparsityEvent
    | NormsEvent
    | MemoryEvent
    | DeviceEvent
    | ActionsEvent
    | CheckpointEvent
    | CheckpointProblemEvent
    | CodeProblemEvent
    | DataUseEvent
    | SpikeEvent
    | AlertEvent
    | EndEvent
    | TrackingEvent
)


LATEST = 2.0**37
"""Unix seconds of the year 6325: a later time is none."""
MOST = 2**53
"""Largest count of steps, bytes or rows: a float64 holds no larger ones exactly."""
LARGEST = 10**300
"""Largest number of anything else that was written without a decimal point, such as FLOPs: a float64 holds it."""
_RESUMED_FROM = re.compile(r"(.*step-)?\d{1,15}", re.DOTALL | re.ASCII)


def is_event(value: Any) -> bool:
    """Return True for an event that a run may have written, by the types and ranges of its fields.

    A checksum says that a line is whole, not that it is true. Fields and types of events of a later version may be
    unknown.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    event_type, when = value["type"], value.get("time")
    if not isinstance(when, int | float) or not 0 <= when <= LATEST:
        return False
    if event_type not in _tests():
        return True
    if not _tests()[event_type](value):
        return False
    if event_type == "start" and isinstance(source := value.get("resumed_from"), str):
        return _RESUMED_FROM.fullmatch(source) is not None
    if event_type == "norms":
        lists = (value[name] for name in ("parameters", "layers", "elements", *NORMS, "least", "most"))
        return len({len(each) for each in lists}) == 1
    if event_type == "sparsity":
        return value["blocks"] > 0 and len({len(row) for row in value["pattern"]}) <= 1
    return True


@cache
def _tests() -> Mapping[str, Callable[[Any], bool]]:
    """Return the test of each type of event but `device`: there are many, and whoever reads one takes what it finds."""
    events = (event for event in get_args(Event) if event is not DeviceEvent)
    return {get_args(get_type_hints(event)["type"])[0]: _test_of(event) for event in events}


def _test_of(hint: Any) -> Callable[[Any], bool]:
    """Return what tells whether a value of JSON has a type of this module."""
    origin, args = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        fields = {name: _test_of(each) for name, each in hints.items()}
        required = {name for name, each in hints.items() if get_origin(each) is not NotRequired}
        return lambda value: (
            isinstance(value, dict)
            and required <= value.keys()
            and all(name not in value or test(value[name]) for name, test in fields.items())
        )
    tests = [_test_of(each) for each in args] if origin in (NotRequired, list, tuple, dict, Union, UnionType) else []
    if origin is NotRequired:
        return tests[0]
    if origin is list:
        return lambda value: isinstance(value, list) and all(map(tests[0], value))
    if origin is tuple:  # which JSON holds as a list
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(tests)
            and all(test(each) for test, each in zip(tests, value, strict=True))
        )
    if origin is dict:
        return lambda value: isinstance(value, dict) and all(map(tests[1], value.values()))
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in args
    if tests:
        return lambda value: any(test(value) for test in tests)
    return _SIMPLE[hint]


_SIMPLE: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: type(value) is int and 0 <= value <= MOST,
    float: lambda value: type(value) is float or (type(value) is int and abs(value) <= LARGEST),
    str: lambda value: isinstance(value, str),
    NoneType: lambda value: value is None,
}


class ProcessRecord(TypedDict):
    """The identity of a process: a pid alone may be used again, the pid with its start time is not."""

    pid: int
    created: float
    """Start time in Unix seconds."""
    ticks: NotRequired[int | None]
    """Start time since boot, in clock ticks; None where the system does not tell."""
    host: NotRequired[str]


class RankRecord(ProcessRecord):
    """The content of `ranks/<rank>.json`."""

    rank: int
    stage: NotRequired[int | None]
    device: NotRequired[str]


class PlanFacts(TypedDict):
    """The facts of a plan that the launcher needs."""

    world: int
    device_type: str
    precision: str


class LauncherRecord(TypedDict, total=False):
    """The content of `launcher.json`; it grows while the run starts."""

    supervisor: ProcessRecord
    worker: str
    """Module that each rank executes."""
    plan: PlanFacts
    ticket: str
    """Path of the run's ticket in the device queue; absent for a multi-node launch."""
    devices: list[str] | tuple[str, ...]
    """Devices that the run was given, as `CUDA_VISIBLE_DEVICES` names them."""
    nodes: dict[str, Any]
    """Fields of `Nodes`; absent for a run on one node."""
    accelerate: ProcessRecord
    workers: list[ProcessRecord]
    """Ranks and other processes below Accelerate's launcher."""
