"""Values that check themselves: frozen dataclasses whose fields are checked by their types.

Pydantic checks and converts. What it refuses becomes one sentence with the name, the value, and a way out. Rooms that
describe values import what they need of it from here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import numbers
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from pydantic import AfterValidator as AfterValidator
from pydantic import BeforeValidator, PlainSerializer, Strict, create_model
from pydantic import ConfigDict as ConfigDict
from pydantic import Field as Field
from pydantic import PlainValidator as PlainValidator
from pydantic import TypeAdapter as TypeAdapter
from pydantic import ValidationError as ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError, PydanticKnownError

from workbench.base.arguments import LARGEST_INTEGER
from workbench.base.errors import InvalidExperiment, UnknownParameter, WorkbenchError, suggestion
from workbench.base.units import is_count, plain
from workbench.base.user_code import UserFunction, as_user_function

LARGEST_COUNT = 2**31 - 1
"""Largest number of steps, samples or tokens: two of them multiplied still fit into 64 bits."""
WORDS = {
    "int_type": "is not a whole number. Give a whole number.",
    "float_type": "is not a number. Give a number.",
    "finite_number": "is not finite. Give a finite number.",
    "greater_than": "must be greater than {gt}.",
    "greater_than_equal": "must be {ge} or more.",
    "less_than": "must be below {lt}.",
    "less_than_equal": "must be at most {le:,}.",
    "bool_type": "is neither True nor False. Give one of them.",
    "string_type": "is not a text. Give a text.",
    "tuple_type": "is not a list. Give a list.",
    "missing": "has too few values. Give more.",
    "too_short": "has too few values. Give at least {min_length}.",
    "too_long": "has too many values. Give {max_length}.",
    "dataclass_type": "is no {class_name}. Write {name}=wb.{class_name}(…).",
}
"""Ends of the sentence on a refused value, by Pydantic's type of the error."""

T = TypeVar("T")
Whole = Annotated[int, BeforeValidator(plain), Strict()]
FromZero = Annotated[Whole, Field(ge=0, le=LARGEST_COUNT)]
Count = Annotated[Whole, Field(ge=1, le=LARGEST_COUNT)]
Seed = Annotated[Whole, Field(ge=0, le=LARGEST_INTEGER)]
Real = Annotated[float, BeforeValidator(plain), Strict(), Field(allow_inf_nan=False)]
LargeCount = Annotated[Whole, Field(ge=1, le=LARGEST_INTEGER)]
Share = Annotated[Real, Field(ge=0, lt=1)]
Positive = Annotated[Real, Field(gt=0)]
TrueOrFalse = Annotated[bool, Strict()]
_COUNT = TypeAdapter(Count)


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A whole number that changes at steps, such as the samples of a batch."""

    stretches: tuple[tuple[int, int], ...]
    """First step of each stretch, ascending from 0, and the number there."""

    @property
    def largest(self) -> int:
        return max(number for _, number in self.stretches)

    def at(self, step: int) -> int:
        """Return the number at a step, counted from 0."""
        return next(number for first, number in reversed(self.stretches) if first <= step)

    def sum_before(self, step: int) -> int:
        """Return the sum over the first `step` steps."""
        return sum(steps * number for number, steps in self.lengths(step))

    def lengths(self, steps: int) -> list[tuple[int, int]]:
        """Return the number of each stretch within so many steps, and how many steps it has."""
        ends = [first for first, _ in self.stretches[1:]] + [steps]
        pairs = zip(self.stretches, ends, strict=True)
        return [(number, min(end, steps) - first) for (first, number), end in pairs if first < steps]

    def steps_for(self, total: int) -> int:
        """Return the fewest steps whose sum is at least `total`."""
        first, number = next((f, n) for f, n in reversed(self.stretches) if self.sum_before(f) < total or f == 0)
        return first + -((self.sum_before(first) - total) // number)

    def to_json(self) -> dict[str, int]:
        return {str(first): number for first, number in self.stretches}

    def __repr__(self) -> str:
        return repr(dict(self.stretches))


def count_or_ramp(value: Any) -> Any:
    """Return a count, or the `Ramp` of a table of counts by the step from which they hold."""
    if isinstance(value, Ramp):
        return value
    if not isinstance(value, Mapping):
        try:
            return _COUNT.validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]
            raise PydanticKnownError(problem["type"], problem.get("ctx")) from None  # type: ignore[arg-type]
    try:  # JSON has the steps as text
        table = {int(step) if isinstance(step, str) else plain(step): plain(number) for step, number in value.items()}
    except ValueError:
        table = {}
    is_known = all(type(step) is int and is_count(number) and number <= LARGEST_COUNT for step, number in table.items())
    if not table or not is_known or min(table) != 0 or max(table) > LARGEST_COUNT:
        raise refused(
            "is no table of whole numbers by the step from which they hold. Begin with step 0, as in {example}.",
            example="{0: 32, 1000: 64}",
        )
    return Ramp(tuple(sorted(table.items())))


CountOrRamp = Annotated[int | Ramp, PlainValidator(count_or_ramp)]


def refused(sentence: str, **facts: Any) -> PydanticCustomError:
    """Return the error of a check; the sentence goes on after the name and the value."""
    return PydanticCustomError("refused", sentence, facts or None)


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise refused("is not a name. Give a text of one line.")
    return text


Text = Annotated[str, Strict()]
Line = Annotated[Text, AfterValidator(_one_line)]
LineOrNothing = Annotated[Text, AfterValidator(lambda text: text and _one_line(text))]


def known(choices: Collection[str]) -> Callable[[Any], Any]:
    """Return the check of a word that is one of `choices`."""

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise refused("is not one of the choices. {hint}", hint=suggestion(value, choices))
        return value

    return check


def is_factor(value: Any) -> bool:
    """Return True for a finite number of at least 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _factors(least: str, is_fitting: Callable[[Mapping[str, float]], bool]) -> PlainValidator:
    """Return the check of multiples by pattern of a parameter's name."""

    def check(value: Any) -> dict[str, float]:
        is_mapping = isinstance(value, Mapping) and all(isinstance(pattern, str) for pattern in value)
        if not is_mapping or not all(map(is_factor, value.values())) or not is_fitting(value):
            raise refused(
                "does not map patterns of parameter names to {least}. Write, for instance, {example}.",
                least=least,
                example='{"*embed*": 1.0, "*": 0.5}',
            )
        return dict(value)

    return PlainValidator(check)


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern (`fnmatch`) that matches a parameter's name, None if none does."""
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor of the first pattern that matches a parameter's name, or 1."""
    pattern = first_match(name, factors)
    return 1.0 if pattern is None else factors[pattern]


Factors = Annotated[Mapping[str, float], _factors("finite numbers of at least 0", lambda _: True)]
PositiveFactors = Annotated[
    Mapping[str, float], _factors("numbers greater than 0", lambda factors: bool(factors) and all(factors.values()))
]


def function_or(check: Callable[[Any], Any]) -> PlainValidator:
    """Return the check of a function of the user, which becomes a `UserFunction`, or of what `check` allows."""

    def checked(value: Any) -> Any:
        made = as_user_function(value)
        return made if isinstance(made, UserFunction) else check(made)

    return PlainValidator(checked)


WRITTEN = PlainSerializer(lambda value: value.to_json() if hasattr(value, "to_json") else value)
"""Writes a value that has a `to_json` by it."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked_value(
    elsewhere: Callable[[str], str | None] = lambda _: None, error_type: type[WorkbenchError] = InvalidExperiment
) -> Callable[[type[T]], type[T]]:
    """Return the decorator of a frozen dataclass whose fields are checked, and whose errors are sentences.

    `elsewhere` says where a parameter belongs that the class does not have, or returns None for one that nobody has.
    `error_type` is that of the errors of wrong values.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))(cls)
        unchecked = made.__init__

        @functools.wraps(unchecked)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                unchecked(self, *args, **kwargs)
            except ValidationError as error:
                raise refusal(error, made, elsewhere, error_type) from None

        made.__init__ = init  # type: ignore[method-assign]
        if "__repr__" not in vars(cls):
            made.__repr__ = _repr  # type: ignore[method-assign]
        return cast(type[T], made)

    return decorate


@functools.cache
def _model_of(choices: Any) -> Any:
    hints = get_type_hints(choices, include_extras=True)
    optional: dict[str, Any] = {name: (hint, None) for name, hint in hints.items()}
    return create_model(choices.__name__, **optional)


def checked_items(choices: Any, given: Mapping[str, Any], error_type: type[WorkbenchError]) -> dict[str, Any]:
    """Return items that are checked by the types of a `TypedDict`; raise an error that is a sentence for others."""
    try:
        checked: dict[str, Any] = _model_of(choices)(**given).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise refusal(error, None, error_type=error_type) from None
    return checked


def first_problem(error: ValidationError) -> str:
    """Return where the first refused value stands in a JSON document, and why it is refused."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}"


def _repr(value: Any) -> str:
    """Return the class and the fields that differ from their defaults."""
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    shown = [f"{field.name}={given[field.name]!r}" for field in fields(value) if given[field.name] != field.default]
    return f"{type(value).__name__}({', '.join(shown)})"


def refusal(
    error: ValidationError,
    cls: Any,
    elsewhere: Callable[[str], str | None] = lambda _: None,
    error_type: type[WorkbenchError] = InvalidExperiment,
) -> WorkbenchError:
    """Return the first problem as a sentence; a parameter that there is not comes before wrong values.

    `cls` is the dataclass that was to be made, by which the sentence calls its fields; None for values without one.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "unexpected_keyword_argument")
    kind, where, value = problems[0]["type"], problems[0]["loc"], problems[0]["input"]
    facts = problems[0].get("ctx") or {}
    if isinstance(own := facts.get("error"), WorkbenchError):
        return own
    if where and isinstance(where[0], int):  # the position of an argument
        where = (fields(cls)[where[0]].name, *where[1:])
    path = [str(part) for part in where if not isinstance(part, int)]
    name = path[-1] if path else ""
    label = ".".join(path if cls is None else [cls.__name__, *path])
    if kind == "unexpected_keyword_argument":
        for part in path[:-1]:  # to the value that holds the parameter
            kinds = cls.__pydantic_fields__[part].annotation
            cls = next(each for each in (kinds, *get_args(kinds)) if is_dataclass(each))
        hint = elsewhere(name) or suggestion(name, [field.name for field in fields(cls)])
        return UnknownParameter(f"{cls.__name__} has no parameter {name!r}. {hint}")
    if kind == "missing" and not isinstance(where[-1], int):
        return error_type(f"{label} is missing. Give {name}=….", parameter=name)
    said = (
        problems[0]["msg"]
        if kind == "refused"
        else WORDS.get(kind, "").format(**facts, name=name) or f"{problems[0]['msg']}."
    )
    return error_type(f"{label}={value!r} {said}", parameter=name)
