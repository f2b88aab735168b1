"""A cache for the methods of one object, which is freed with the object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def memoised(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Cache the results of a method in its object, by its hashable arguments.

    `functools.cache` would keep the object itself alive: a search prices hundreds of options, whose matrices must be
    freed as soon as it has weighed them.
    """

    name = f"_results_of_{method.__name__}"

    @functools.wraps(method)
    def cached(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        results: dict[Any, Result] = vars(self).setdefault(name, {})
        key = (args, tuple(kwargs.items())) if kwargs else args
        try:
            return results[key]
        except KeyError:
            results[key] = result = method(self, *args, **kwargs)
            return result

    return cached
