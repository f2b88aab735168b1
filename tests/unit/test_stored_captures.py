"""A stored capture is read in place of an export, computes the same bits, and is never one of something else."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.unit.capture_models import MODELS, batch_for, captured, copies, interpret
from workbench.capture import captured_model, model, stored_captures
from workbench.capture.blocks import graph_json
from workbench.capture.blocks.block_extraction import digest
from workbench.capture.captured_model import CapturedModel

CPU = torch.device("cpu")
READS_CAPTURES = True


@pytest.fixture(autouse=True)
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """A cache of the test's own, and a dict in place of the files of the loaded libraries."""
    found = dict[str, tuple[Any, ...]]()
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stored_captures, "_libraries", lambda: dict(found))
    return found


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that are captured, in order."""
    made, capture = list[Any](), model.capture

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(model)
        return capture(model, *args, **kwargs)

    monkeypatch.setattr(captured_model, "capture", counted)
    return made


SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F
RATE, TABLE, NAME = 2.0, {"a": 1.0}, "tanh"

def act_tanh(x):
    return torch.tanh(x)

class Net(nn.Module):
    power = 2
    def __init__(self, width=4):
        super().__init__()
        self.width, self.kind = width, "plain"
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def mix_plain(self, x):
        return x * 3.0
    def forward(self, x, y):
        for layer in self.layers:
            x = x + helper(layer(x)) * RATE * TABLE["a"]
        x = getattr(self, f"mix_{self.kind}")(x)
        return ((x.sum(-1) - y) ** self.power).mean()

def helper(x, scale=0.5):
    return F.gelu(x) * scale

def build():
    return Net()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes a module of the user, with replacements in its source, and imports it anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"users_{tmp_path.name}".replace("-", "_").replace("[", "_").replace("]", "_")

    def written(replacements: Mapping[str, str] | None = None) -> Any:
        source = SOURCE
        for old, new in (replacements or {}).items():
            assert old in source
            source = source.replace(old, new)
        (tmp_path / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            return importlib.import_module(name)
        finally:
            sys.dont_write_bytecode = before

    yield written
    sys.modules.pop(name, None)


def experiment_of(build: Callable[[], nn.Module], **changes: Any) -> wb.Experiment:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(8)]
    return wb.Experiment(**{"model": build, "data": data, "steps": 2, "global_batch": 4, **changes})


def key_of(experiment: wb.Experiment, samples: int = 2) -> str | None:
    """Return the key of the graph of a step."""
    return CapturedModel(experiment, samples)._key("step", samples)


def _files() -> list[Path]:
    return sorted(stored_captures.folder().glob("*.json.z"))


# What is read is what was captured


@pytest.mark.parametrize("name", ["bert with dropout", "t5", "Constants", "NoGradHalf", "AutocastForward", "ResNet"])
def test_a_graph_that_is_read_computes_the_same_bits_and_is_the_same_value(name: str) -> None:
    model, other = copies(MODELS[name])
    batch = batch_for(name)
    graph = captured(model, batch, name)
    found = graph_json.read(json.loads(json.dumps(graph_json.written(graph, CPU))), CPU, None)
    assert found == graph
    results = []
    for each, weights in ((graph, model), (found, other)):
        torch.manual_seed(0)
        loss = interpret(each, weights, batch)
        loss.backward()
        results.append((loss, [p.grad for p in weights.parameters()], dict(weights.named_buffers())))
    assert torch.equal(results[0][0], results[1][0])
    for one, two in zip(results[0][1], results[1][1], strict=True):
        assert (one is None and two is None) or torch.equal(one, two)
    for key, value in results[0][2].items():
        assert torch.equal(value, results[1][2][key])
    for block in found.blocks:
        returned = [block.sends.index(each) for each in block.returned]
        assert digest(block.code.graph, block.code, returned) == block.block_type


@pytest.mark.parametrize("name", ["LoopsOverExperts"])
def test_sizes_that_depend_on_values_are_not_written(name: str) -> None:
    model, _ = copies(MODELS[name])
    with pytest.raises(graph_json.NotWritten, match="depend on values"):
        graph_json.written(captured(model, batch_for(name), name), CPU)


class Mean:
    """A metric of the user."""

    def __call__(self, outputs: Any, _batch: Any) -> Any:
        return outputs["prediction_logits"].sum(), outputs["prediction_logits"].numel()


def test_a_second_plan_of_a_model_captures_nothing_and_a_fresh_one_does(captures: list[Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"A text of {at} words about [MASK]." for at in range(300)))
    experiment = wb.Experiment(
        model=wb.models.bert(hidden_size=16, num_layers=2, num_heads=2),
        data=wb.data.corpus(str(tmp_path / "text.txt")),
        steps=2,
        global_batch=4,
        seq_len=8,
        evaluation=wb.Evaluation(every=1, samples=4, metrics={"mean": Mean()}),
        samples=wb.Samples(prompts=("A [MASK] of",)),
    )
    cluster = wb.Cluster.of("h200", gpus=2)

    def made() -> tuple[Any, ...]:
        of_launch = CapturedModel(experiment, 2)
        return wb.plan(experiment, cluster), of_launch.evaluation(experiment), of_launch.samples(experiment)

    first = made()
    assert len(captures) == 3
    assert made() == first
    assert len(captures) == 3
    assert wb.plan(experiment, cluster, fresh=True) == first[0]
    assert len(captures) == 4


PLANS = """
import sys
import torch
import workbench as wb
from workbench.capture import captured_model
import planned_here
made, capture = [], captured_model.capture
captured_model.capture = lambda *given, **named: (made.append(given), capture(*given, **named))[1]
cluster = wb.Cluster.of("h200", gpus=2)
data = [{"x": torch.ones(4), "y": torch.ones(())} for _ in range(8)]
gpt2 = wb.models.gpt2(hidden_size=16, num_layers=2, num_heads=2, vocab_size=300)
text = wb.data.corpus("text.txt", vocab_size=300)
wb.plan(wb.Experiment(model=planned_here.build, data=data, steps=2, global_batch=4), cluster)
print(len(made))
wb.plan(wb.Experiment(model=gpt2, data=text, steps=2, global_batch=4, seq_len=8), cluster)
print(len(made))
"""


def test_a_new_process_reads_what_another_has_captured_until_the_code_is_edited(tmp_path: Path) -> None:
    module = tmp_path / "planned_here.py"
    module.write_text(SOURCE)
    (tmp_path / "text.txt").write_text("\n\n".join(f"A text of {at} words." for at in range(300)))
    path = os.pathsep.join([str(tmp_path), str(Path(wb.__file__).parents[1])])

    def captured_in_a_new_process() -> list[str]:
        command = [sys.executable, "-c", PLANS]
        return subprocess.check_output(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, text=True, stderr=subprocess.DEVNULL
        ).split()

    assert captured_in_a_new_process() == ["1", "2"]
    assert captured_in_a_new_process() == ["0", "0"]
    module.write_text(SOURCE.replace("RATE, TABLE, NAME = 2.0", "RATE, TABLE, NAME = 3.0"))
    assert captured_in_a_new_process() == ["1", "1"]


def test_a_rank_reads_the_plans_graph_of_its_micro_batch_and_one_with_constants_has_their_values(
    captures: list[Any],
) -> None:
    plain, with_constants = experiment_of(_Plain), experiment_of(_WithConstant)
    for experiment in (plain, with_constants):
        CapturedModel(experiment, 2).graph  # noqa: B018  # as a plan does
    assert len(captures) == 2
    on_rank = CapturedModel(plain, 2, plain.build()).graph
    assert len(captures) == 2
    assert on_rank.signature == CapturedModel(plain, 2).graph.signature
    [constant] = CapturedModel(with_constants, 2, with_constants.build()).graph.constants.values()
    assert len(captures) == 3
    assert constant.tolist() == [1.5, 2.5, 3.5, 4.5]
    [again] = CapturedModel(with_constants, 2, with_constants.build()).graph.constants.values()
    assert len(captures) == 3
    assert torch.equal(again, constant)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.layer(x)[:, 0] - y) ** 2).mean()


class _WithConstant(_Plain):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.tensor([1.5, 2.5, 3.5, 4.5]), y)


# Each part of what a capture depends on makes it another one

EDITS: dict[str, dict[str, str]] = {
    "a global": {"RATE, TABLE, NAME = 2.0": "RATE, TABLE, NAME = 2.5"},
    "an entry of a dict": {'{"a": 1.0}': '{"a": 1.5}'},
    "a default": {"scale=0.5": "scale=0.25"},
    "a default of the constructor": {"width=4": "width=5"},
    "a member of the class": {"power = 2": "power = 4"},
    "the code of forward": {"x.sum(-1)": "x.mean(-1)"},
    "the code of a function": {"F.gelu(x)": "F.relu(x)"},
    "a method whose name is put together": {"x * 3.0": "x * 2.0"},
    "an attribute": {'"plain"\n': '"plain"\n        self.more = 1\n'},
    "a layer": {"range(3)": "range(4)"},
    "a line above": {"def helper": "# A comment.\ndef helper"},
    "a frozen parameter": {
        "return Net()": "net = Net()\n    net.layers[0].weight.requires_grad_(False)\n    return net"
    },
    "a tied parameter": {
        "return Net()": "net = Net()\n    net.layers[0].weight = net.layers[1].weight\n    return net"
    },
    "a hook": {
        "return Net()": "net = Net()\n    net.layers[0].register_forward_hook(lambda *a: a[2] * 2)\n    return net",
    },
    "a forward of one object": {"return Net()": "net = Net()\n    net.layers[0].forward = act_tanh\n    return net"},
}


def test_an_edit_of_a_global_is_captured(module: Callable[..., Any], captures: list[Any]) -> None:
    for edit, number in (({}, 1), ({}, 1), (EDITS["a global"], 2), (EDITS["a global"], 2), ({}, 2)):
        CapturedModel(experiment_of(module(edit).build), 2).graph  # noqa: B018
        assert len(captures) == number


@pytest.mark.parametrize("edit", EDITS)
def test_each_edit_of_what_a_forward_reads_has_another_key(edit: str, module: Callable[..., Any]) -> None:
    before = key_of(experiment_of(module().build))
    assert before is not None
    assert key_of(experiment_of(module().build)) == before
    edited = key_of(experiment_of(module(EDITS[edit]).build))
    assert edited is not None
    assert edited != before


def test_settings_of_torch_and_the_environment_have_another_key(
    module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiment_of(module().build)
    ones = [{"x": torch.ones(4), "y": torch.ones(())}] * 8
    keys = [key_of(experiment), key_of(experiment, samples=4), key_of(experiment.replace(seed=1))]
    keys += [key_of(experiment.replace(loss=lambda outputs, _: outputs * 2)), key_of(experiment.replace(data=ones))]
    changes: list[tuple[Any, str, Any]] = [
        (torch.nn.functional, "gelu", _other_gelu),
        (torch.nn.functional, "gelu", torch.nn.functional.silu),
        (nn.Linear, "forward", _other_forward),
        (nn.Linear, "forward", nn.Identity.forward),
        (nn.Linear, "factor", 2.0),
        (torch, "__version__", "2.99"),
        (sys, "version", "3.99"),
        (os, "listdir", lambda _: ["another-1.0.dist-info"]),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(*change, raising=False)
            keys.append(key_of(experiment))
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as ranks on GPUs have it
        assert key_of(experiment) == keys[0]
        patch.setenv("TORCH_SOMETHING", "1")
        keys.append(key_of(experiment))
    torch.use_deterministic_algorithms(True)
    keys.append(key_of(experiment))
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    keys.append(key_of(experiment))
    torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu"):
        keys.append(key_of(experiment))
    assert None not in keys
    assert len({*keys}) == len(keys)
    assert key_of(experiment) == keys[0]


def _other_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def _other_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ self.weight.T


def test_a_library_that_was_edited_is_not_read_and_one_edited_meanwhile_is_not_stored(
    module: Callable[..., Any], libraries: dict[str, tuple[Any, ...]], tmp_path: Path, captures: list[Any]
) -> None:
    file = tmp_path / "modeling_of_a_library.py"
    file.write_text("one")
    now = str(file), *stored_captures._facts_of(str(file))
    old = str(file), 3, 10**18, 10**18  # as if it had come with the installation
    experiment = experiment_of(module().build)

    def number() -> int:
        CapturedModel(experiment, 2).graph  # noqa: B018
        return len(captures)

    libraries["library"] = old
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_captures, "_facts_of", lambda _: old[1:])
        assert [number(), number()] == [1, 1]
        libraries["library"] = ("elsewhere.py", *old[1:])  # another file was imported by this name
        assert [number(), number()] == [2, 2]
        libraries["library"] = old
        assert [number(), number()] == [3, 3]
    assert number() == 4  # its file has another time by now
    libraries["library"] = now
    assert [number(), number()] == [5, 6]  # what this process has imported is not known


READS = {
    "the environment": ("import os", 'float(os.environ.get("USERS_RATE", "2"))'),
    "a file by a library": ("import numpy", 'float(numpy.load("FOLDER/array.npy"))'),
    "the rank": ("from torch import distributed", "(distributed.get_rank() if distributed.is_initialized() else 1.0)"),
    "a file": ("from pathlib import Path", "float(len(Path(__file__).read_text()))"),
    "whether a file is there": ("from pathlib import Path", "float(Path(__file__).exists())"),
    "the clock": ("import time", "(1.0 if time.time() > 0 else 2.0)"),  # clock: any time gives the same number
    "a name by text": ("import math", 'globals()["RA" + "TE"]'),
    "code by text": ("import math", 'eval("RA" + "TE")'),
}


@pytest.mark.parametrize("what", READS)
def test_what_a_forward_reads_from_outside_is_read_each_time(
    what: str, module: Callable[..., Any], captures: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imports, read = READS[what]
    read = read.replace("FOLDER", str(tmp_path))
    np.save(tmp_path / "array.npy", 2.0)
    net = module({"import torch\n": f"import torch\n{imports}\n", "* RATE": f"* {read}"})
    CapturedModel(experiment_of(net.build), 2).graph  # noqa: B018
    monkeypatch.setenv("USERS_RATE", "3")
    net.RATE = 3.0
    CapturedModel(experiment_of(net.build), 2).graph  # noqa: B018
    assert len(captures) == 2


# Files that must not be used


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _flipped(file: Path) -> None:
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 2] ^= 1
    file.write_bytes(octets)


def _with(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def changed(file: Path) -> None:
        content = json.loads(stored_captures._unsealed(file.read_bytes()))
        change(content)
        file.write_bytes(stored_captures._sealed(json.dumps(content).encode()))

    return changed


def _calls(target: list[str]) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for code in content["result"]["codes"].values():
            for node in code["nodes"]:
                if node[0] == "call_function":
                    node[2] = target

    return change


def _graph_of_another(content: Any) -> None:
    content["key"] = "another"


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "empty": _emptied,
    "a bit": _flipped,
    "of another key": _with(_graph_of_another),
    "a function of Python": _with(_calls(["function", "eval"])),
    "an operation of another space": _with(_calls(["op", "users", "run", ""])),
    "a path to a function": _with(_calls(["op", "aten", "add.__class__", ""])),
    "a field that is gone": _with(lambda content: content["result"].pop("blocks")),
    "no result": _with(lambda content: content.update(result=None)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_was_damaged_or_forged_is_captured_anew(
    damage: str, module: Callable[..., Any], captures: list[Any]
) -> None:
    experiment = experiment_of(module().build)
    first = CapturedModel(experiment, 2).graph
    [file] = _files()
    DAMAGE[damage](file)
    second = CapturedModel(experiment, 2).graph
    assert len(captures) == 2
    assert second == first
    CapturedModel(experiment, 2).graph  # noqa: B018  # it was written again
    assert len(captures) == 2


def test_a_folder_to_which_others_may_write_is_neither_read_nor_written(
    module: Callable[..., Any], captures: list[Any]
) -> None:
    experiment = experiment_of(module().build)
    CapturedModel(experiment, 2).graph  # noqa: B018
    assert stored_captures.folder().stat().st_mode & 0o777 == 0o700
    stored_captures.folder().chmod(0o777)
    CapturedModel(experiment, 2).graph  # noqa: B018
    CapturedModel(experiment, 4).graph  # noqa: B018
    assert len(captures) == 3
    assert len(_files()) == 1


def test_writers_at_once_leave_a_whole_file() -> None:
    results = list[Any]()

    def write(number: int) -> None:
        for _ in range(20):
            stored_captures._write("a", [number] * 1000, {})
            results.append(stored_captures._read("a")[0])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(result == [result[0]] * 1000 for result in results)
    assert [file.name for file in stored_captures.folder().iterdir()] == ["a.json.z"]


def test_the_files_that_were_used_longest_ago_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    for at, name in enumerate("abc"):
        stored_captures._write(name, "x", {})
        os.utime(stored_captures.folder() / f"{name}.json.z", (at, at))
    stored_captures._read("a")
    size = max(file.stat().st_size for file in _files())
    monkeypatch.setattr(stored_captures, "MOST_BYTES", 3 * size)
    stored_captures._write("d", "x", {})
    assert {file.name[0] for file in _files()} == {"a", "c", "d"}


def test_a_graph_of_a_user_defined_operation_is_captured_each_time(captures: list[Any]) -> None:
    experiment = experiment_of(_WithOperation)
    for _ in range(2):
        CapturedModel(experiment, 2).graph  # noqa: B018
    assert len(captures) == 2


@torch.library.custom_op("users_of_stored_captures::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@_twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_twice.register_autograd(lambda _, grad: 2 * grad)


class _WithOperation(_Plain):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(_twice(x), y)
