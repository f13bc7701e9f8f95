"""Loads handler modules and token strategies from folders, and fills in the resources their functions name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from reactor.errors import Misuse
from reactor.job import Bound, Handler
from reactor.strategy import Strategy

BUILT_IN = next(
    folder
    for folder in (
        Path(__file__).parent / "_handlers",
        Path(__file__).parent.parent / "handlers",
    )  # installed; from a clone
    if folder.is_dir()
)


RESOURCES = ("pool", "embedder", "embedders", "http", "log", "refresher", "settings", "tokens")
"""What a handler may name."""


def load_handlers(folder: Path | None) -> dict[str, Handler]:
    """The built-in handlers and those of `folder`, by job type.

    Raises:
        Misuse: A module does not import, its HANDLERS is wrong, or two claim one type: one clear line.
    """
    handlers: dict[str, Handler] = {}
    homes: dict[str, str] = {}
    folders = [("reactor_builtin_handlers", BUILT_IN)]
    if folder is not None:
        if not folder.is_dir():
            raise Misuse(f"REACTOR_HANDLERS: {folder} is not a folder")
        folders.append(("reactor_own_handlers", folder))
    for package, path in folders:
        for module in _modules(package, path):
            for type_, handler in _table_of(module).items():
                if type_ in handlers:
                    raise Misuse(f"type {type_!r} has a handler in {homes[type_]} and another in {module.__file__}")
                handlers[type_] = handler
                homes[type_] = str(module.__file__)
    return handlers


def load_strategies(folder: Path | None) -> dict[str, Strategy]:
    """The strategies of token_refresh/ beside the built-in handlers and in `folder`, by integration: a file's name.

    Raises:
        Misuse: A module does not import, or has no STRATEGY: one clear line.
    """
    strategies: dict[str, Strategy] = {}
    folders = [("reactor_builtin_strategies", BUILT_IN)]
    if folder is not None:
        folders.append(("reactor_own_strategies", folder))
    for package, path in folders:
        for module in _modules(package, path / "token_refresh"):
            strategy = getattr(module, "STRATEGY", None)
            if not isinstance(strategy, Strategy):
                raise Misuse(f"{module.__file__}: STRATEGY = Strategy(...) is missing")
            strategies[module.__name__.rpartition(".")[2]] = strategy
    return strategies


def _modules(package: str, folder: Path) -> list[ModuleType]:
    """Every module of a folder, under a package name of its own: `from . import x` works, nothing is shadowed."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
    parent = ModuleType(package)
    parent.__path__ = [str(folder.resolve())]
    sys.modules[package] = parent
    modules = []
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(("_", ".")):  # a helper; what an editor or a Mac leaves beside a file
            continue
        try:
            modules.append(importlib.import_module(f"{package}.{path.stem}"))
        except (Exception, SystemExit) as exc:
            first_line = str(exc).partition("\n")[0]
            raise Misuse(f"handler module {path} does not import: {type(exc).__name__}: {first_line}") from exc
    return modules


def _table_of(module: ModuleType) -> dict[str, Handler]:
    table = getattr(module, "HANDLERS", None)
    if not isinstance(table, Mapping):
        raise Misuse(f"{module.__file__}: HANDLERS = {{type: handler}} is missing")
    handlers = {}
    for type_, value in table.items():
        handler = value if isinstance(value, Handler) else Handler(value)
        if not isinstance(type_, str) or not type_ or not inspect.iscoroutinefunction(handler.function):
            raise Misuse(f"{module.__file__}: HANDLERS[{type_!r}] is not an async function or Handler")
        numbers = (handler.batch, handler.concurrency, handler.timeout_s, handler.max_attempts or 1)
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            needs = "batch, concurrency, timeout_s and max_attempts above zero"
            raise Misuse(f"{module.__file__}: HANDLERS[{type_!r}] needs {needs}")
        handlers[type_] = handler
    return handlers


def bind(handlers: Mapping[str, Handler], resources: Mapping[str, Any]) -> dict[str, Bound]:
    """Fill in by keyword what each handler names.

    Raises:
        Misuse: A handler asks for something that does not exist.
    """
    bound = {}
    for type_, handler in handlers.items():
        given = {name: resources[name] for name in wanted_by(type_, handler, resources.keys())}
        bound[type_] = Bound(handler, functools.partial(handler.function, **given))
    return bound


def wanted_by(type_: str, handler: Handler, offered: Collection[str]) -> set[str]:
    """The resources a handler names; one with a default is left alone where it is not offered.

    Raises:
        Misuse: It takes no job, or asks for something that is not offered.
    """
    parameters = list(inspect.signature(handler.function).parameters.values())
    if not parameters:
        raise Misuse(f"the handler of {type_!r} takes no job")
    wanted = {
        parameter.name
        for parameter in parameters[1:]
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and (parameter.name in offered or parameter.default is parameter.empty)
    }
    if unknown := wanted - set(offered):
        raise Misuse(
            f"the handler of {type_!r} asks for {', '.join(sorted(unknown))}; there are {', '.join(sorted(offered))}"
        )
    return wanted
