"""A worker for tests of launching: keeps the real worker's contract, trains nothing, and misbehaves on request.

It begins a step when its gate is open to that step, and completes the checkpoint of a step when it is open half a step
further. `WORKBENCH_STANDIN_…` variables: `CHECKPOINT_EVERY` so many steps besides the end, `LIFT` is added to every
loss, `FAIL_RANK` raises at step 2 (with `FAIL_MESSAGE`), `KILL_RANK` dies without a word, `HANG_RANK` stays in step 2
and ignores every request to stop, `LINGER_RANK` stays after its error, or after its work until its gate is wide open.
"""

import math
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.logs import append_event
from tests.patience import wait_for_gate
from workbench.record.rundir import RunDir, read_json, this_process, write_json, write_record


def main(run: RunDir) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    log = os.open(run.log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    write_json(run.rank(rank), {**this_process(), "rank": rank, "stage": rank, "device": "cpu"})
    try:
        if world > 1:
            dist.init_process_group("gloo")
        _train(run, rank, world)
    except BaseException as error:
        fields = {"rank": rank, "stage": rank, "type": type(error).__name__, "message": str(error)}
        write_record(run.error(rank), {**fields, "traceback": traceback.format_exc(), "time": time.time()})
        if os.environ.get("WORKBENCH_STANDIN_LINGER_RANK") == str(rank):
            _hang()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(run: RunDir, rank: int, world: int) -> None:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    experiment = read_json(run.experiment)
    first = read_json(run.resume)["step"] if run.resume.exists() else 0
    built = pickle.loads((run.code / "model.pkl").read_bytes())() if (run.code / "model.pkl").exists() else None
    print(f"rank {rank} of {world} built {built} with {os.environ.get('OMP_NUM_THREADS')} threads", flush=True)
    if rank == 0:
        append_event(run.events, "start", devices=world, world=world, tokens_per_step=8, resumed_from=first)
    step, lift = first, float(os.environ.get("WORKBENCH_STANDIN_LIFT", "0"))
    while step < experiment["steps"] and not _agreed_to_stop(run, asked, world, step + 1):
        step += 1
        _misbehave(rank, step)
        if rank == 0:
            speed = {"tokens_per_s": 800.0, "step_ms": 10.0, "seconds": 0.01 * step, "learning_rate": 1e-3}
            totals = {"tokens": 8 * step, "samples": step, "flops": 1e6 * step}
            append_event(
                run.events, "step", step=step, loss=7 / step + lift, grad_norm=1.0, mfu=None, **speed, **totals
            )
            if step % int(os.environ.get("WORKBENCH_STANDIN_CHECKPOINT_EVERY", sys.maxsize)) == 0:
                run.checkpoint(step).mkdir(parents=True, exist_ok=True)
                wait_for_gate(step + 0.5, unless=lambda: asked or run.stop_file.exists())
                _checkpoint(run, step)
    if rank == 0:
        _checkpoint(run, step)
        append_event(run.events, "end", steps=step, seconds=0.01 * step)
    if os.environ.get("WORKBENCH_STANDIN_LINGER_RANK") == str(rank):
        wait_for_gate(math.inf)


def _checkpoint(run: RunDir, step: int) -> None:
    write_json(run.checkpoint(step) / "complete.json", {"step": step})
    append_event(run.events, "checkpoint", step=step, path=str(run.checkpoint(step)), seconds=0.0)


def _agreed_to_stop(run: RunDir, asked: list[bool], world: int, step: int) -> bool:
    """Return True on all ranks if one was asked to stop, or else once the gate of the first is open to the step.

    The others wait for the first rank in a collective.
    """

    def is_asked() -> bool:
        return bool(asked) or run.stop_file.exists()

    if not dist.is_initialized() or dist.get_rank() == 0:
        wait_for_gate(step, unless=is_asked)
    stop = torch.tensor(float(is_asked()))
    if world > 1:
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    return bool(stop)


def _misbehave(rank: int, step: int) -> None:
    if step == 2 and os.environ.get("WORKBENCH_STANDIN_FAIL_RANK") == str(rank):
        raise FloatingPointError(os.environ.get("WORKBENCH_STANDIN_FAIL_MESSAGE") or f"the loss of rank {rank} is NaN")
    if step == 2 and os.environ.get("WORKBENCH_STANDIN_KILL_RANK") == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and os.environ.get("WORKBENCH_STANDIN_HANG_RANK") == str(rank):
        _hang()


def _hang() -> None:
    while True:
        signal.pause()  # also where it was asked to stop


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
