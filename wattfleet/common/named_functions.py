"""Imports a function that a user specifies by module and name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from wattfleet.core.errors import InvalidInputError


def import_function(what: str, module_name: str, function_name: str) -> Callable[..., Any]:
    """Import a module, and return a function of it.

    Args:
        what: the function's purpose, for the start of messages, such as "workload acme:steps".
        module_name: the module's full name.
        function_name: the function's name in it.

    Raises:
        InvalidInputError: the module or the function does not exist, or a module that it needs is not installed.
    """
    function = getattr(_module(what, module_name), function_name, None)
    if function is None:
        raise InvalidInputError(f"{what}: module {module_name} has no {function_name}")
    if not callable(function):
        raise InvalidInputError(f"{what}: {function_name} is a {type(function).__name__}, not a function")
    named: Callable[..., Any] = function
    return named


def _module(what: str, name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise InvalidInputError(f"{what}: no module {name}; add its folder to PYTHONPATH") from None
        raise InvalidInputError(f"{what}: {missing} is not installed") from None
