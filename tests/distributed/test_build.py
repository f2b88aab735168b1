"""Ranks build the same model, whatever its constructor draws from; in the host's memory they take turns."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from tests.distributed.harness import launch
from tests.distributed.real_worker import SEQ, VOCAB, Ranks, curve, directory, experiment, plan, trained
from tests.patience import eventually
from workbench.base.errors import CaptureError, CheckpointError
from workbench.execution import build
from workbench.execution.build import FREE_SHARE, LARGE, build_lock, digests
from workbench.execution.checkpoint.model_export import export_step
from workbench.experiment import Experiment
from workbench.models import gpt2
from workbench.record.history import read_tail

MODEL_BYTES = 10 << 30
CPU = torch.device("cpu")


def _turns(rank: int, folder: Path, fitting: float, on_host: bool) -> tuple[int, int]:
    """Return how many ranks were in the lock at once at most, and in how many turns all have been.

    Rank 0 sees memory for three models, the others for `fitting`. A rank stays in the lock until every other is there
    as well, waits for a later turn, or has had its own.
    """
    folder.mkdir(exist_ok=True)
    barrier, turn, ranks = dist.barrier, 0, range(dist.get_world_size())

    def say(words: str) -> None:
        (folder / f"new-{rank}").write_text(words)
        (folder / f"new-{rank}").rename(folder / str(rank))

    def wait_for_turn() -> None:
        nonlocal turn
        turn += 1
        say(f"{turn} waits")
        barrier()

    def are_known() -> list[str]:
        said = [(folder / str(each)).read_text() if (folder / str(each)).exists() else "0 unknown" for each in ranks]
        return said if all(words in (f"{turn} is in", "gone") or int(words[0]) > turn for words in said) else []

    with pytest.MonkeyPatch.context() as patch:
        free = (3.2 if rank == 0 else fitting) * MODEL_BYTES / FREE_SHARE
        patch.setattr(build, "_is_built_on_host", lambda *_: on_host)
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        patch.setattr(dist, "barrier", wait_for_turn)
        with build_lock(MODEL_BYTES, CPU, rank):
            say(f"{turn} is in")
            found = eventually(are_known).count(f"{turn} is in"), turn + 1
        say("gone")
    seen = [(0, 0) for _ in ranks]
    dist.all_gather_object(seen, found)
    most, turns = map(max, zip(*seen, strict=True))
    return most, turns


def _each(rank: int, folder: Path, cases: list[tuple[float, bool]]) -> list[tuple[int, int]]:
    return [_turns(rank, folder / str(index), *case) for index, case in enumerate(cases)]


def test_no_more_ranks_build_at_once_than_the_host_has_room_for(tmp_path: Path) -> None:
    cases = [(2.5, True), (0.4, True), (9.0, True), (0.4, False)]
    assert launch(_each, 4, tmp_path, cases) == [(2, 2), (1, 4), (3, 2), (4, 1)]


GLOBAL_BATCH, ITEMS = 8, 24


class Drawn(nn.Module):
    """A tied weight from Python's generator, a buffer from NumPy's, layers from torch's, and a number in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.tensor([[random.gauss(0, 0.5) for _ in range(8)] for _ in range(5)]))
        self.register_buffer("features", torch.from_numpy(np.random.randn(8, 8)).float())
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.scale = random.uniform(1.0, 2.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.scale * torch.cos(x @ self.features)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(functional.linear(x, self.embedding), y)


class OfTheRank(Drawn):
    """The same with a buffer and a plain attribute that differ between ranks whatever the seed."""

    def __init__(self) -> None:
        super().__init__()
        system = np.random.default_rng(int(os.environ.get("RANK", "0")))
        self.features = torch.from_numpy(system.normal(size=(8, 8))).float()
        self.shift = torch.from_numpy(system.normal(size=8)).float()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift, y)


class NumberOfTheRank(Drawn):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0 + int(os.environ.get("RANK", "0"))


class NumberOfTheSystem(Drawn):
    def __init__(self) -> None:
        super().__init__()
        self.scale = random.SystemRandom().uniform(1.0, 2.0)


class Averaged(Drawn):
    """Layers with running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))


def _items(spread: float = 0.0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(ITEMS, 8, generator=generator) * (1 + spread * torch.arange(ITEMS)[:, None] % 5)
    return [{"x": x, "y": torch.tensor(index % 5)} for index, x in enumerate(xs)]


def _asked(model: Any, **changes: Any) -> Experiment:
    fields = {"steps": 1, "global_batch": GLOBAL_BATCH, "seq_len": 1, "learning_rate": 1e-9, "project": ""}
    return Experiment.of(**{"model": model, "data": _items(), "seed": 3, **fields, **changes})


def _whole_batch(asked: Experiment) -> dict[str, torch.Tensor]:
    return asked.data.reads(asked).dataset().__getitems__(list(range(GLOBAL_BATCH)))


@pytest.mark.parametrize("division", [{"data": 2, "zero": 0}, {"pipeline": 2}, {"data": 2, "zero": 3}])
def test_the_seed_decides_what_a_constructor_draws_from_any_generator_on_every_rank(
    division: dict[str, int], tmp_path: Path
) -> None:
    asked = _asked(Drawn)
    state = random.getstate()
    run = trained(tmp_path / "run", asked, plan(asked, **division))
    assert random.getstate() == state
    [(loss, _, _)] = curve(run).values()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = Drawn()(**_whole_batch(asked)).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert asked.build()(**_whole_batch(asked)).item() == expected
    assert asked.replace(seed=4).build()(**_whole_batch(asked)).item() != pytest.approx(expected, rel=1e-2)


def test_ranks_take_the_values_of_rank_0_where_no_seed_decides_them(tmp_path: Path) -> None:
    asked = _asked(OfTheRank)
    run = trained(tmp_path / "run", asked, plan(asked, data=2, zero=0))
    assert "Every rank has the values of rank 0 in what differed: features, shift" in run.log(1).read_text()
    [(loss, _, _)] = curve(run).values()
    assert loss == pytest.approx(asked.build()(**_whole_batch(asked)).item(), rel=1e-5)


def test_a_number_that_no_seed_decides_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"NumberOfTheSystem computes something else each time it is built"):
        plan(_asked(NumberOfTheSystem))
    asked = _asked(NumberOfTheRank)
    run = directory(tmp_path / "run", asked, plan(asked, pipeline=2))
    with pytest.raises(AssertionError):
        Ranks(run, 2).wait()
    message = json.loads(run.error(1).read_text())["message"]
    assert "what its block layers.0 computes is another on rank 1 than on rank 0" in message
    assert "default_rng(torch.initial_seed())" in message


def test_the_held_out_loss_of_replicas_is_that_of_the_model_in_the_checkpoint(tmp_path: Path) -> None:
    asked = _asked(Averaged, data=_items(2.0), eval_data=_items(1.0), eval_every=2, steps=4, learning_rate=1e-2)
    run = trained(tmp_path / "run", asked, plan(asked, data=2, zero=0))
    model = asked.build().eval()
    [weights] = [path for path in export_step(run.checkpoints, tmp_path / "model") if path.suffix == ".safetensors"]
    model.load_state_dict(load_file(weights))
    held_out = {name: torch.stack([item[name] for item in _items(1.0)]) for name in ("x", "y")}
    found = read_tail(run.events).evaluations.eval_loss
    assert found[-1] == pytest.approx(model(**held_out).item(), rel=1e-5)


def digest(tensor: torch.Tensor) -> str:
    return digests({"tensor": tensor, "other": torch.ones(3)}, [])["tensor"][-1]


def test_a_digest_depends_on_every_byte_and_its_place() -> None:
    values = torch.randn(1000)
    for tensor in (values, values.bfloat16(), values[:999].bool(), values.to(torch.complex64), torch.tensor(2.5)):
        changed = tensor.clone()
        changed.view(-1)[-1] = 0 if changed.view(-1)[-1] else 1
        assert digest(tensor) == digest(tensor.clone()) != digest(changed)
    assert digest(values[1:].clone()) == digest(values[1:])  # bytes that begin in the middle of a word
    assert digest(values.view(10, 100).T) == digest(values.view(10, 100).T.contiguous()) != digest(values)
    signs = torch.tensor([1.0, -1.0]).repeat(64)
    assert digest(signs) != digest(-signs)
    assert digest(torch.empty(0, 4)) == digest(torch.empty(0))
    large = torch.arange(2 * LARGE + 4001, dtype=torch.float32)
    for at in (0, LARGE, len(large) - 1):
        changed = large.clone()
        changed[at] += 1
        assert digest(changed) != digest(large)
    assert digest(large.view(-1).roll(512)) != digest(large)


def test_tensors_of_every_kind_have_a_digest() -> None:
    matrix = torch.eye(4)
    kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sparse": torch.Tensor.to_sparse,
        "compressed": torch.Tensor.to_sparse_csr,
        "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        "nested": lambda value: torch.nested.nested_tensor([value[:1], value[1:]], layout=torch.jagged),
        "conjugate": lambda value: (value * 1j).conj(),
    }
    for kind, made in kinds.items():
        assert digest(made(matrix)) == digest(made(matrix.clone())) != digest(made(2 * matrix)), kind
    assert digest(matrix.to("meta")) == "no values"
    assert digest(matrix[0, 0].expand(5)) == digest(torch.ones(5))
    with pytest.raises(RuntimeError, match="memory"):  # which is no reason to compare nothing
        digest(matrix[0, 0].expand(1 << 50))


class _Unseeded(nn.Module):
    """A model that holds tensors in every other place than its tables, as a constructor leaves them without a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.view, self.tied = self.inner.weight.data.t(), [self.inner.weight]
        self.table, self.array = torch.rand(3), np.random.default_rng().random(3)
        self.again = self.table
        self.held = {"a": (torch.rand(2), SimpleNamespace(inner=torch.rand(1)))}
        self.expanded, self.large = torch.rand(1).expand(4), torch.rand(20)


def test_unregistered_tensors_are_given_back_and_others_are_compared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(build, "MOST_KEPT", 79)  # bytes, and the large one has 80
    first, second = _Unseeded(), _Unseeded()
    file, kept = tmp_path / "start.pt", ["array", "held['a'][0]", "held['a'][1].inner", "table"]
    assert build.Start.read(file) is None
    build.Start.of(first, build.digests(build.held_tensors(first, []), []), CPU).write(file)
    start = build.Start.read(file)
    assert start is not None
    assert sorted(start.values) == kept
    start.give_back(second)
    for one, other in ((first.table, second.again), (first.held["a"][0], second.held["a"][0])):
        assert torch.equal(one, other)
    assert np.array_equal(first.array, second.array)
    unlike = start.unlike(build.digests(build.held_tensors(second, []), []), CPU)
    assert unlike == ["inner.weight", "inner.bias", "expanded", "large"]
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"start.pt, .* is damaged. Remove it"):
        build.Start.read(file)


def test_compiled_ranks_on_cpus_train_a_model_that_makes_its_positions_in_forward(tmp_path: Path) -> None:
    gpt = gpt2(hidden_size=32, num_layers=2, num_heads=2, vocab_size=VOCAB, max_positions=SEQ, dropout=0.0)
    asked = experiment(model=gpt, steps=2, warmup_steps=1)
    both = plan(asked, data=2)
    compiled = trained(tmp_path / "compiled", asked.replace(numerics={"compile": True}), both)
    plain = trained(tmp_path / "plain", asked, both)
    assert [loss for loss, _, _ in curve(compiled).values()] == pytest.approx(
        [loss for loss, _, _ in curve(plain).values()], rel=1e-5
    )
