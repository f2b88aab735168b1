"""The identity of code covers what a callable computes with and nothing else: each edit, and what is named."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workbench.base.code_identity import (
    Definition,
    changed_between,
    changed_on_disk,
    changed_since,
    compared_with_files,
    fingerprint,
    identities_json,
    identity,
    read_identities,
)
from workbench.base.user_code import pickled, unpickled
from workbench.record.columns import log_scalar

ROOT = Path(__file__).resolve().parents[2]
USED = """
    import dataclasses
    import enum
    import functools
    import math

    import numpy as np
    import torch
    from torch import nn

    import identity_helper as helper
    from identity_helper import imported_rate

    RATE = 0.0066
    WIDTHS = [32, 64]
    CONFIG = {"rate": 0.1, "inner": {"steps": 10}, "names": ("a", "b")}
    TABLE = torch.tensor([1.0, 2.0])
    LARGE = np.arange(10_000)
    LABELS = {"cat", "dog", "bird"}
    MIXED = frozenset({1, "a", 2.5, None})
    ACTIVATION = torch.tanh
    LAYER = nn.ReLU
    CACHE = {}
    COUNT = 0
    STEP = functools.partial(max, 3)
    UNREAD = 1


    @dataclasses.dataclass(frozen=True)
    class Settings:
        rate: float = 0.5
        shape: tuple = (1, 2)


    class Mode(enum.Enum):
        LOW = 1
        HIGH = 2


    SETTINGS = Settings()
    MODE = Mode.LOW


    def scaled(factor):
        def inner(step):
            return factor * step

        return inner


    double = scaled(2.0)


    def plain(step, slope=3.0, *, power=1):
        return slope * step**power


    class Loss:
        weight = 0.25

        def __init__(self):
            self.rate = 2.0

        def __call__(self, step):
            return self.weight * step * self.rate * getattr(self, "bonus", 0) + self.inner()

        def inner(self):
            return helper.nested.DEPTH

        def unused(self):
            return 7


    class Layer(nn.Linear):
        def reset_parameters(self):
            nn.init.constant_(self.weight, 0.5)


    @functools.lru_cache
    def cached(step):
        return step * helper.BASE


    @functools.singledispatch
    def dispatched(step):
        return step + 1


    @dispatched.register
    def _(step: str):
        return step + "!"


    def schedule(step):
        \"\"\"Return a factor.\"\"\"
        # a comment
        global COUNT
        from identity_lazy import late

        COUNT += 1
        CACHE[step] = 1
        shown = "RATE" in globals() and [name for name in ("x", "y")]
        helper.register(step)
        return (
            RATE * imported_rate() * WIDTHS[0] * CONFIG["rate"] * TABLE[0] * LARGE[0] * len(LABELS) * len(MIXED)
            + ACTIVATION(TABLE).sum() + SETTINGS.rate + double(step) + plain(step) + Loss()(step) + cached(step)
            + dispatched(step) + late(step) + STEP(step) + (MODE is Mode.LOW) + helper.BASE + math.pi
            + len(shown) + Layer(2, 2).weight.sum() + LAYER()(TABLE).sum() + (lambda a: a * 5)(step)
        )
"""
HELPER = """
    import threading
    import types

    BASE = 10
    REGISTRY = {}
    LOCK = threading.Lock()
    STREAM = (number for number in range(3))
    LOOP = []
    LOOP.append(LOOP)
    nested = types.SimpleNamespace(DEPTH=4, other=5)
    _RATE = 1.5


    def imported_rate():
        return _RATE


    def register(step):
        with LOCK:
            REGISTRY[step] = step, LOOP, STREAM


    def unrelated():
        return 1
"""
LAZY = """
    LATE = 8


    def late(step):
        return LATE * step
"""
FILES = {"identity_used": USED, "identity_helper": HELPER, "identity_lazy": LAZY}


class Code:
    """The three modules in a folder, each of which can be edited and imported anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))

    def edit(self, old: str, new: str) -> None:
        texts = {path: path.read_text() for path in self.folder.glob("identity_*.py")}
        assert sum(text.count(old) for text in texts.values()) == 1, old
        for path, text in texts.items():
            path.write_text(text.replace(old, new))

    def imported(self) -> types.ModuleType:
        for name in FILES:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("identity_used")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that is edited twice in a second has an old one
    yield Code(tmp_path)
    for name in FILES:
        sys.modules.pop(name, None)


EDITS = [
    ("RATE = 0.0066", "RATE = 0.0006", "identity_used.RATE", "is 0.0006, and was 0.0066", True),
    ("WIDTHS = [32, 64]", "WIDTHS = [32, 65]", "identity_used.WIDTHS", "is [32, 65], and was [32, 64]", True),
    ('"rate": 0.1', '"rate": 0.2', "identity_used.CONFIG['rate']", "is 0.2, and was 0.1", True),
    ('"steps": 10', '"steps": 11', "identity_used.CONFIG['inner']['steps']", "is 11, and was 10", True),
    ('"inner": {"steps": 10}, ', "", "identity_used.CONFIG ", "names", True),
    ("[1.0, 2.0]", "[1.0, 2.5]", "identity_used.TABLE", "is [1, 2.5], and was [1, 2]", False),
    (
        "np.arange(10_000)",
        "np.arange(10_000) * 2",
        "identity_used.LARGE",
        "has another content",
        False,
    ),
    ('"cat", "dog"', '"cat", "cow"', "identity_used.LABELS", "cow", True),
    ('1, "a", 2.5', '1, "a", 2.25', "identity_used.MIXED", "a frozenset of 4", False),
    ("ACTIVATION = torch.tanh", "ACTIVATION = torch.relu", "identity_used.ACTIVATION", "relu, and was", False),
    ("LAYER = nn.ReLU", "LAYER = nn.GELU", "identity_used.LAYER", "GELU, and was", False),
    ("partial(max, 3)", "partial(max, 4)", "identity_used.STEP", "a partial", False),
    ("rate: float = 0.5", "rate: float = 0.75", "identity_used.Settings.rate", "is 0.75, and was 0.5", True),
    ("MODE = Mode.LOW", "MODE = Mode.HIGH", "identity_used.MODE", "is Mode.HIGH, and was Mode.LOW", False),
    ("scaled(2.0)", "scaled(2.5)", "identity_used.scaled.<locals>.inner.factor", "is 2.5, and was 2.0", False),
    ("slope=3.0", "slope=4.0", "identity_used.plain(slope)", "is 4.0, and was 3.0", True),
    ("power=1", "power=2", "identity_used.plain(power)", "is 2, and was 1", True),
    ("weight = 0.25", "weight = 0.5", "identity_used.Loss.weight", "is 0.5, and was 0.25", True),
    ("weight = 0.25", "weight = 0.25\n    bonus = 1", "identity_used.Loss.__call__", None, False),
    ("self.rate = 2.0", "self.rate = 2.5", "identity_used.Loss.__init__", "has other code now", True),
    ("return helper.nested.DEPTH", "return helper.nested.other", "identity_used.Loss.inner", "has other code", True),
    ("DEPTH=4", "DEPTH=6", "identity_helper.nested", "a SimpleNamespace", False),
    ("self.weight, 0.5)", "self.weight, 0.75)", "identity_used.Layer.reset_parameters", "has other code now", True),
    ("nn.Linear)", "nn.LazyLinear)", "identity_used.Layer", "is a class of torch.nn", False),
    ("step * helper.BASE", "step + helper.BASE", "identity_used.cached", "has other code now", True),
    ("BASE = 10", "BASE = 11", "identity_helper.BASE", "is 11, and was 10", True),
    ("_RATE = 1.5", "_RATE = 1.25", "identity_helper._RATE", "is 1.25, and was 1.5", True),
    ("return step + 1", "return step + 2", "identity_used.dispatched", "has other code now", True),
    ('step + "!"', 'step + "?"', "identity_used._", "has other code now", True),
    ("LATE = 8", "LATE = 9", "identity_lazy.LATE", "is 9, and was 8", True),
    ("return LATE * step", "return LATE + step", "identity_lazy.late", "has other code now", True),
    ("a * 5", "a * 6", "identity_used.schedule", "has other code now", True),
]


@pytest.mark.parametrize(("old", "new", "name", "said", "on_disk"), EDITS, ids=[edit[1] for edit in EDITS])
def test_each_edit_of_what_is_read_is_named(
    code: Code, old: str, new: str, name: str, said: Any, on_disk: bool
) -> None:
    before = compared_with_files(identity(code.imported().schedule), time.time() + 10)
    assert not changed_on_disk(before)
    code.edit(old, new)
    on_disk_now = changed_on_disk(before)
    now = identity(code.imported().schedule)
    if said is None:
        assert [each for each in now if each not in before] == ["identity_used.Loss.bonus"]
        return
    changed, unsteady = changed_since(before, now, before)
    assert not unsteady
    assert any(each.startswith(name) and said in each for each in changed), changed
    assert bool(on_disk_now) is on_disk
    assert not on_disk or any(each.startswith(name) for each in on_disk_now)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another one\n\n"),
        ('"""Return a factor."""', '"""Return what the rate is multiplied by."""'),
        ("UNREAD = 1", "UNREAD = 2"),
        ("return 7", "return 8"),
        ("def unrelated():\n    return 1", ""),
        ("RATE = 0.0066", "\n\nRATE = 66e-4  # as before"),
        ('LABELS = {"cat", "dog", "bird"}', 'LABELS = {"bird", "dog", "cat"}'),
        ("import math\n", "import math\nimport json\n"),
    ],
)
def test_what_does_not_matter_is_not_named(code: Code, old: str, new: str) -> None:
    before = compared_with_files(identity(code.imported().schedule), time.time() + 10)
    code.edit(old, new)
    assert not changed_on_disk(before)
    now = identity(code.imported().schedule)
    assert now == before
    assert changed_since(before, now, before) == ([], [])


def test_an_identity_is_the_same_in_every_process_and_survives_its_file(code: Code, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import identity_used;"
        "from workbench.base.code_identity import identity;"
        "print(sorted((name, each.digest) for name, each in identity(identity_used.schedule).items()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    module = code.imported()
    here = identity(module.schedule)
    assert found == f"{sorted((name, each.digest) for name, each in here.items())}\n"
    (tmp_path / "kept.json").write_bytes(identities_json({"lr_schedule": here}))
    assert read_identities(tmp_path / "kept.json") == {"lr_schedule": here}


def test_a_process_that_has_run_the_code_agrees_with_one_that_has_not(code: Code) -> None:
    module = code.imported()
    before = identity(module.schedule)
    module.CACHE["a"], module.COUNT, module.SETTINGS = 3, 5, module.Settings()
    for _ in range(100):
        module.helper.register(1)
    assert not changed_between(identity(module.schedule), before)
    module.RATE = 0.5
    [said] = changed_between(identity(module.schedule), before)
    assert said.startswith("identity_used.RATE at")
    assert said.endswith(":14 is 0.0066, and was 0.5")


def test_a_file_that_was_edited_and_imported_again_is_certain_but_for_its_clock(code: Code) -> None:
    code.edit("RATE = 0.0066", "import time\nRATE = 0.0066 * 2")
    code.edit("UNREAD = 1", "UNREAD = time.perf_counter()")  # clock: another value in each process
    code.edit("(lambda a: a * 5)(step)", "UNREAD")
    module = code.imported()
    here = compared_with_files(identity(module.schedule), 0.0)  # modified since this process began, say
    assert not changed_between(here, identity(code.imported().schedule))
    code.edit("0.0066 * 2", "0.0066 * 3")
    [said] = changed_between(here, identity(code.imported().schedule))
    assert said.startswith("identity_used.RATE at")


def test_what_is_another_in_every_process_is_told_apart(code: Code) -> None:
    code.edit("UNREAD = 1", "import os\nUNREAD = os.urandom(8)")
    code.edit("(lambda a: a * 5)(step)", "UNREAD[0]")
    here, then, now = (identity(code.imported().schedule) for _ in range(3))
    changed, unsteady = changed_since(then, now, here)
    assert not changed
    [said] = unsteady
    assert said.startswith("identity_used.UNREAD")


def test_code_that_was_a_text_counts_as_that_of_a_file_does() -> None:
    """`python -c` and `exec` give it no file, and two models of one name are told apart all the same."""

    def made(activation: str) -> Any:
        names = {"torch": torch, "__name__": "__main__"}
        text = f"class Net(torch.nn.Module):\n    def forward(self, x):\n        return torch.{activation}(x).sum()"
        exec(text, names)
        return names["Net"]

    assert identity(made("tanh")) == identity(made("tanh")) != identity(made("relu"))
    one, other = (eval(f"lambda step: step * {factor}", {"__name__": "__main__"}) for factor in (2, 3))
    assert identity(one) != identity(other)


def test_callables_of_any_form_count_with_what_they_hold(code: Code) -> None:
    import functools

    module = code.imported()

    def of(value: Any) -> dict[str, Definition]:
        return identity(value)

    class Schedule:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __call__(self, _: int) -> float:
            return self.rate

        def method(self, _: int) -> float:
            return self.rate

    for one, same, other in (
        (
            functools.partial(module.plain, slope=2),
            functools.partial(module.plain, slope=2),
            functools.partial(module.plain, slope=3),
        ),
        (Schedule(1.0), Schedule(1.0), Schedule(2.0)),
        (Schedule(1.0).method, Schedule(1.0).method, Schedule(2.0).method),
        (module.scaled(1), module.scaled(1), module.scaled(2)),
        ({"m": module.scaled(1)}, {"m": module.scaled(1)}, {"m": module.scaled(2)}),
        ([module.plain, module.schedule], [module.plain, module.schedule], [module.plain]),
    ):
        assert of(one) == of(same) != of(other)
    assert identity(Schedule(1.0), held=False) == identity(Schedule(2.0), held=False)


def test_code_of_a_run_from_before_modules_stood_in_rooms_is_read_and_is_the_same() -> None:
    """`log_scalar` stood in `workbench.columns`: the pickle and the digest are what that version wrote."""
    assert unpickled(b"cworkbench.columns\nlog_scalar\n.") is log_scalar
    assert unpickled(pickled("model", log_scalar)) is log_scalar
    with pytest.raises(ModuleNotFoundError, match=r"workbench\.nowhere"):
        unpickled(b"cworkbench.nowhere\nlog_scalar\n.")

    def loss(x: float) -> None:
        log_scalar("loss", x)

    assert identity(loss)[f"{__name__}.log_scalar"].digest == "bcbc6fc445b97f8c"


def test_a_number_of_hashes_counts_and_the_hash_that_a_library_notes_of_an_object_does_not() -> None:
    one, again, other = (transformers.ReformerConfig(num_hashes=count) for count in (1, 1, 2))
    one._original_object_hash, again._original_object_hash = 2**60, -(2**61)
    assert fingerprint([one]) == fingerprint([again]) is not None
    assert fingerprint([one]) != fingerprint([other])
