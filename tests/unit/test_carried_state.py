"""What one forward leaves for the next: buffers decide how a batch may be divided, other tensors are refused."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed.harness import CPU, LINK
from tests.unit.coupled_models import WIDTH, samples_for
from workbench.base.errors import CaptureError
from workbench.capture.captured_model import CapturedModel
from workbench.cost.hardware import Cluster
from workbench.experiment import Experiment
from workbench.figures.plan_view import show_plan


class Encoder(nn.Module):
    """An encoder whose loss the subclasses compute, with what they set up."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.set_up()

    def set_up(self) -> None:
        """Set up nothing."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.encoder(x), y)

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Queue(Encoder):
    """Contrast with the keys of earlier batches (MoCo, arXiv:1911.05722)."""

    def set_up(self) -> None:
        self.register_buffer("queue", functional.normalize(torch.randn(24, WIDTH), dim=-1))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        query, key = functional.normalize(found, dim=-1), functional.normalize(y, dim=-1)
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        self.queue.copy_(torch.cat([key, self.queue])[: len(self.queue)])
        return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


class QueueWithAPlace(Queue):
    """The same with a place in the queue, a number that is read: the forward runs as written."""

    def set_up(self) -> None:
        super().set_up()
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = (found @ self.queue.clone().T).log_softmax(-1)
        place = int(self.place)
        self.queue[place : place + len(y)] = y
        self.place.fill_((place + len(y)) % len(self.queue))
        return -scores.mean()


class Centre(Encoder):
    """A target whose running mean is taken off (DINO, arXiv:2104.14294)."""

    def set_up(self) -> None:
        self.register_buffer("centre", torch.zeros(WIDTH))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        target = ((y - self.centre) / 0.1).softmax(-1)
        self.centre.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return -(target * found.log_softmax(-1)).sum(-1).mean()


class Codebook(Encoder):
    """Codes that are running means of what chose them (VQ-VAE, arXiv:1711.00937, appendix A.1)."""

    def set_up(self) -> None:
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(6))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = torch.cdist(found, self.codes).argmin(-1)
        nearest = self.codes[chosen]
        with torch.no_grad():
            of_code = functional.one_hot(chosen, 6).float()
            self.counts.mul_(0.9).add_(of_code.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(of_code.T @ found, alpha=0.1)
            self.codes.copy_(self.sums / self.counts[:, None])
        return functional.mse_loss(found + (nearest - found).detach(), y)


class Assigned(Encoder):
    """A running scale that is assigned instead of written in place."""

    def set_up(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(found, y) / self.scale
        self.scale = 0.9 * self.scale + 0.1 * y.abs().mean()
        return loss


class Warming(Encoder):
    def set_up(self) -> None:
        self.register_buffer("forwards", torch.zeros(()))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return functional.mse_loss(found, y) * (self.forwards / 100).clamp(max=1)


class Spectral(Encoder):
    def set_up(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.encoder[0])

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(found, y)


class Normalised(Spectral):
    def set_up(self) -> None:
        self.encoder[1] = nn.BatchNorm1d(WIDTH)


class BranchingNorm(nn.BatchNorm1d):
    """A BatchNorm that export cannot follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(self.weight.detach().max()) < 1e9 else x


class NormalisedAsWritten(Spectral):
    def set_up(self) -> None:
        self.encoder[1] = BranchingNorm(WIDTH)


class Watched(Spectral):
    """Statistics that are written and never read, and a scratch buffer that is written before each read."""

    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(WIDTH))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(found.detach().mean(0))
        self.scratch.copy_(self.encoder[0].weight.detach().mean(0))
        return functional.mse_loss(found + self.scratch, y)


OF_SAMPLES = {"queue": Queue, "queue ": QueueWithAPlace, "centre": Centre, "codes": Codebook, "scale": Assigned}
OF_FORWARDS = {"forwards": Warming, "encoder.0.parametrizations.weight.0._u": Spectral}
NO_STATE = (Normalised, NormalisedAsWritten, Watched)
CLUSTER = Cluster(CPU, 2, 2, LINK, LINK)


def experiment_of(model: Callable[[], nn.Module]) -> Experiment:
    samples = [{"x": sample["x"], "y": sample["x"].flip(0)} for sample in samples_for("RMSE")]
    return Experiment.of(model=model, data=samples, steps=2, global_batch=8, seq_len=1)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_batch_that_leaves_something_for_the_next_forward_stays_whole(name: str) -> None:
    plan = wb.plan(experiment_of(OF_SAMPLES[name]), Cluster(CPU, 1, 1, LINK, LINK))
    assert (plan.data, plan.num_microbatches) == (1, 1) or plan.gathers
    assert any(f"the buffer {name.strip()}, written by" in note for note in plan.notes), plan.notes


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_two_micro_batches_of_such_a_model_have_another_loss_than_the_whole(name: str) -> None:
    """What is said of these models is so, in plain PyTorch."""
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    found = []
    for parts in (1, 2):
        torch.manual_seed(1)
        model = OF_SAMPLES[name]()
        for _ in range(2):
            losses = [model(x=part, y=2 * part.flip(1) + 1) for part in x.chunk(parts)]
        found.append(float(sum(losses)) / parts)
    assert abs(found[0] - found[1]) > 1e-4 * abs(found[0])


@pytest.mark.parametrize("name", OF_FORWARDS)
def test_a_plan_with_several_micro_batches_its_picture_and_its_launch_say_what_counts_them(
    name: str, tmp_path: Path
) -> None:
    experiment = experiment_of(OF_FORWARDS[name])
    for choices in ({"data": 1, "micro_batch": 4}, {"data": 2, "micro_batch": 4}):
        plan = wb.plan(experiment, CLUSTER, **choices)
        said = [note for note in plan.notes if f"the buffer {name}, written by" in note]
        assert len(said) == (plan.num_microbatches > 1), plan.notes
        assert tuple(said) == plan.loss_depends
        assert ("see plan.notes" in show_plan(plan).layout.title.subtitle.text) == bool(said)
        with warnings.catch_warnings(record=True) as warned:
            wb.runs.prepare(experiment, plan, directory=tmp_path / str(plan.num_microbatches))
        assert [str(each.message) for each in warned if "written by" in str(each.message)] == said


@pytest.mark.parametrize("model", NO_STATE)
def test_statistics_that_training_never_reads_restrict_no_plan(model: Callable[[], nn.Module]) -> None:
    graph = CapturedModel(experiment_of(model), 2).graph
    assert (graph.coupled, graph.notes_if_accumulated) == ((), ())


class Keeps(Spectral):
    """Adds what the forward before left, in one of several places."""

    def set_up(self) -> None:
        self.kept: Any = None

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = found if self.kept is None else found + self.kept
        self.kept = found.detach().mean(0)
        return functional.mse_loss(found, y)


class KeepsInAList(Spectral):
    def set_up(self) -> None:
        self.kept: list[torch.Tensor] = []

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for each in self.kept[-2:]:
            found = found + each
        self.kept.append(found.detach().mean(0))
        return functional.mse_loss(found, y)


class Memory:
    def __init__(self) -> None:
        self.last: torch.Tensor | None = None


class KeepsInAnObject(Spectral):
    def set_up(self) -> None:
        self.kept = {"memory": Memory()}

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        memory = self.kept["memory"]
        found = found if memory.last is None else found + memory.last
        memory.last = found.detach().mean(0)
        return functional.mse_loss(found, y)


class KeepsInALayer(Spectral):
    """The layer runs as written."""

    class Layer(nn.Linear):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            if float(found.detach().sum()) < 1e9 and self.kept is not None:
                found = found + self.kept
            self.kept = found.detach().mean(0)
            return found

    def set_up(self) -> None:
        self.encoder[0] = self.Layer(WIDTH, WIDTH)


class WritesToNoBuffer(Spectral):
    def set_up(self) -> None:
        self.kept = torch.zeros(WIDTH)

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = found + self.kept
        self.kept.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        return functional.mse_loss(found, y)


class Recommended(WritesToNoBuffer):
    """The same with the buffer that the refusal recommends."""

    def set_up(self) -> None:
        self.register_buffer("kept", torch.zeros(WIDTH))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = found + self.kept
        self.kept.copy_(found.detach().mean(0))
        return functional.mse_loss(found, y)


@pytest.mark.parametrize("model", [Keeps, KeepsInAList, KeepsInAnObject, KeepsInALayer, WritesToNoBuffer])
def test_a_tensor_outside_of_buffers_that_the_next_forward_reads_is_refused_with_its_line(model: type[Encoder]) -> None:
    where = "encoder.0.kept" if model is KeepsInALayer else "kept"
    with pytest.raises(CaptureError, match=rf"{where}.* at {__file__}:\d+ .*register_buffer"):
        _ = CapturedModel(experiment_of(model), 2).graph


def test_the_recommended_buffer_is_planned() -> None:
    assert "the buffer kept" in wb.plan(experiment_of(Recommended), CLUSTER).notes[-1]


class Looked(Spectral):
    """Keeps an activation to look at, a running loss for a log, and a table that is made once."""

    def set_up(self) -> None:
        self.last, self.table = None, None
        self.running = torch.zeros(())

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, device=y.device) / WIDTH
        loss = functional.mse_loss(found + self.table, y)
        self.last, self.running = found, 0.9 * self.running + 0.1 * loss.detach()
        return loss


def test_what_is_kept_to_look_at_and_tables_that_are_made_once_are_fine() -> None:
    graph = CapturedModel(experiment_of(Looked), 2).graph
    assert (graph.coupled, graph.notes) == ((), ())


class Twice(Spectral):
    def set_up(self) -> None:
        self.encoder[2].weight = nn.Parameter(self.encoder[0].weight.data)


class Tied(Spectral):
    def set_up(self) -> None:
        self.encoder[2].weight = self.encoder[0].weight
        flat = torch.zeros(2 * WIDTH)  # as cuDNN lays the weights of a recurrent layer
        self.encoder[0].bias, self.encoder[2].bias = nn.Parameter(flat[:WIDTH]), nn.Parameter(flat[WIDTH:])


def test_two_parameters_in_one_memory_are_refused_and_tied_ones_are_not() -> None:
    with pytest.raises(CaptureError, match=r"encoder\.2\.weight and encoder\.0\.weight .* same memory.* Tie them"):
        _ = CapturedModel(experiment_of(Twice), 2).graph
    assert CapturedModel(experiment_of(Tied), 2).graph.ties == {"encoder.0.weight": ("encoder.2.weight",)}


CACHE: dict[str, torch.Tensor] = {}
RECENT: deque[torch.Tensor] = deque(maxlen=3)
LOCAL = threading.local()


def last_in(get: Callable[[Any], Any], put: Callable[[Any, torch.Tensor], None]) -> type[Encoder]:
    """Return a model that adds what the forward before has put somewhere."""

    def loss(self: Any, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last = get(self)
        found = found if last is None else found + last
        put(self, found.detach().mean(0))
        return functional.mse_loss(found, y)

    return type("Keeping", (Spectral,), {"loss": loss})


def remembering() -> type[Encoder]:
    box: dict[str, torch.Tensor] = {}
    return last_in(lambda _: box.get("h"), lambda _, new: box.__setitem__("h", new))


class Slots:
    __slots__ = ("h",)


SLOTS = Slots()
ANYWHERE = {
    "CACHE['h']": last_in(lambda _: CACHE.get("h"), lambda _, new: CACHE.update(h=new)),
    "RECENT[0]": last_in(lambda _: RECENT[-1] if RECENT else None, lambda _, new: RECENT.append(new)),
    "box['h']": remembering(),
    "self.encoder.2.h": last_in(
        lambda s: getattr(s.encoder[2], "h", None), lambda s, new: setattr(s.encoder[2], "h", new)
    ),
    "self.average": last_in(lambda s: s._buffers.get("average"), lambda s, new: s._buffers.update(average=new)),
    "LOCAL.h": last_in(lambda _: getattr(LOCAL, "h", None), lambda _, new: setattr(LOCAL, "h", new)),
    "SLOTS.h": last_in(lambda _: getattr(SLOTS, "h", None), lambda _, new: setattr(SLOTS, "h", new)),
    "self.encoder.2.bias.h": last_in(
        lambda s: getattr(s.encoder[2].bias, "h", None), lambda s, new: setattr(s.encoder[2].bias, "h", new)
    ),
    "Keeping.h": last_in(lambda s: getattr(s, "h", None), lambda s, new: setattr(type(s), "h", new)),
}  # fmt: skip


def counting(change: Callable[[Any, int], float]) -> type[Encoder]:
    """Return a model that computes with what `change` returns, given its samples."""

    def loss(self: Any, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(found, y) * change(self, len(y))

    def set_up(self: Any) -> None:
        self.seen, self.phases, self.numbers = 0, [], itertools.count(1)

    return type("Counting", (Spectral,), {"loss": loss, "set_up": set_up})


def phase(self: Any, _: int) -> float:
    self.phases.append("hot" if self.phases else "warm")
    return 1.0 if self.phases[-1] == "warm" else 0.1


def samples(self: Any, count: int) -> float:
    self.seen += count
    return 1 / self.seen


NUMBERS = {
    "phases": counting(phase),
    "seen": counting(samples),
    "": counting(lambda self, _: float(next(self.numbers))),
}


@pytest.mark.parametrize("place", ANYWHERE)
def test_a_tensor_that_is_kept_and_read_is_refused_wherever_it_is_held_and_nothing_is_left_there(place: str) -> None:
    with pytest.raises(CaptureError, match=rf"keeps a tensor in {re.escape(place)} .* at {__file__}:\d+ "):
        _ = CapturedModel(experiment_of(ANYWHERE[place]), 2).graph
    assert (CACHE, list(RECENT), vars(LOCAL)) == ({}, [], {})
    assert not hasattr(SLOTS, "h")
    assert not hasattr(ANYWHERE[place], "h")


@pytest.mark.parametrize("place", NUMBERS)
def test_what_is_kept_and_is_no_tensor_is_refused_when_the_next_forward_computes_otherwise(place: str) -> None:
    with pytest.raises(CaptureError, match=rf"changes .*{place}.* computes with it at {__file__}:\d+ "):
        _ = CapturedModel(experiment_of(NUMBERS[place]), 2).graph


def test_what_a_forward_leaves_outside_of_the_model_to_look_at_is_fine_and_taken_away() -> None:
    class Watching(Spectral):
        def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            CACHE["last"] = found.detach()
            RECENT.append(y)
            return functional.mse_loss(found + made_once(), y)

    graph = CapturedModel(experiment_of(Watching), 2).graph
    assert (graph.coupled, CACHE, list(RECENT)) == ((), {}, [])
    [note] = graph.notes
    assert note.startswith("The forward changes RECENT, which stays as it was at capture. It made no difference to the")
    assert type(made_once()) is torch.Tensor


@functools.cache
def made_once() -> torch.Tensor:
    return torch.arange(WIDTH) / WIDTH


class Seen(Encoder):
    """Divides by the samples that were seen."""

    def set_up(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += len(y)
        return functional.mse_loss(found, y) * (10 / self.seen)


def test_a_buffer_that_counts_samples_is_one_of_the_batch() -> None:
    """Each of two replicas would count its own: the whole batch has another loss than they."""
    [reason] = CapturedModel(experiment_of(Seen), 2).graph.coupled
    assert reason.startswith("the buffer seen, written by add at")
    x, found = torch.randn(8, WIDTH), []
    for parts in (1, 2):
        torch.manual_seed(1)
        replicas = [Seen() for _ in range(parts)]
        replicas[-1].load_state_dict(replicas[0].state_dict())
        found += [sum(each(x=part, y=part) for each, part in zip(replicas, x.chunk(parts), strict=True)) / parts]
    assert float(found[1]) == pytest.approx(2 * float(found[0]), rel=1e-5)
