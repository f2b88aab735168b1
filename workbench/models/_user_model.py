"""`UserModel`: a callable of the user that returns an `nn.Module`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.base.errors import InvalidExperiment, in_words
from workbench.base.user_code import name_of, required_arguments, source_of
from workbench.models._named import Model
from workbench.models._pretrained import Pretrained

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class UserModel:
    """A callable (function, class, partial or lambda) with which every rank builds the model."""

    factory: Callable[[], Any] | None = field(repr=False)
    """The callable; `None` if the model was only read from the description of a run."""
    name: str = ""
    """Name for tables and messages; defaults to the name of the callable."""
    source: str | None = field(default=None, repr=False, compare=False)
    """Source code of the callable, if Python can find it."""
    objective: ClassVar[None] = None
    """Training objective, unknown here: give the corpus an `objective`, or give a user-defined dataset."""
    vocab_size: ClassVar[None] = None
    max_positions: ClassVar[None] = None
    pretrained: ClassVar[None] = None
    is_user_defined: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.factory is None:
            return
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.factory))
        if self.source is None:
            object.__setattr__(self, "source", source_of(self.factory))

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of the callable is here."""
        return self.factory is not None

    def build(self) -> nn.Module:
        """Call the factory and return its module in train mode, on the ambient device.

        Raises `InvalidExperiment` if the factory raises (and names the line) or returns anything else.
        """
        if self.factory is None:
            raise InvalidExperiment(
                f"Only the description of {self.name} is here, not the callable that builds it. "
                "Pass it: Experiment.from_json(…, model=build_my_net)."
            )
        from torch import nn

        try:
            module = self.factory()
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "site-packages" not in f.filename]
            where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}, line {frames[-1].lineno})" if frames else ""
            raise InvalidExperiment(
                f"{self.name}() raised {in_words(error)}{where}. Call it by itself until it returns the model."
            ) from error
        if not isinstance(module, nn.Module):
            raise InvalidExperiment(
                f"{self.name}() returned {_described(module)} instead of an nn.Module. Return the model itself."
            )
        return module.train()

    def to_json(self) -> dict[str, Any]:
        return {"type": "user_defined", "name": self.name, "source": self.source}


def as_model(value: Any) -> Model | Pretrained | UserModel:
    """Return `value` if it is one of `wb.models.…`, else wrap the user's callable in a `UserModel`.

    Raises `InvalidExperiment` if the value cannot build a model on another rank.
    """
    if isinstance(value, Model | Pretrained | UserModel):
        return value
    torch = sys.modules.get("torch")  # A module cannot exist before torch was imported.
    if torch is not None and isinstance(value, torch.nn.Module):
        raise InvalidExperiment(
            f"The model is an instance of {type(value).__name__}, but every rank must build its own. "
            f"Pass a callable that builds it: model=lambda: {type(value).__name__}(…)."
        )
    if not callable(value):
        raise InvalidExperiment(
            f"The model is {_described(value)}. Pass one of wb.models.…, or a callable that builds it "
            "and returns an nn.Module, so that every rank can."
        )
    required = required_arguments(value)
    if required:
        name = _name_of(value)
        raise InvalidExperiment(
            f"{name} needs {', '.join(required)}, but a model is built without arguments. "
            f"Bind them: functools.partial({name}, {required[0]}=…)."
        )
    return UserModel(value)


def _name_of(factory: Callable[..., Any]) -> str:
    name = name_of(factory)
    return "model" if name == "<lambda>" else name


def _described(value: Any) -> str:
    return f"the string {value!r}" if isinstance(value, str) else f"a {type(value).__name__}"
