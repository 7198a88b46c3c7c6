"""What travels between a world and its ranks: functions by value, tensors on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

_REMEDY = (
    "Install the extra that pickles functions by value, parallax-torch[testing], or move the "
    "function into a module that the ranks can import."
)
_register = threading.RLock()  # entered once for each module of a call


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call for the ranks, by value where they could not import the function.

    Args:
        fn: The function: of a module, a notebook cell, a test, or a closure.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Bytes for `pickle.loads` in another process.

    Raises:
        pickle.PicklingError: The call cannot be pickled, or the ranks could not import the
        function.

    Example:
        >>> fn, args, kwargs = pickle.loads(pack_call(len, ("abc",), {}))
        >>> fn(*args, **kwargs)
        3
    """
    call = (fn, args, kwargs)
    cloudpickle = _cloudpickle()
    module = _module(fn)
    if cloudpickle is None:
        if module is not None and module.__name__ == "__main__":
            raise pickle.PicklingError(
                f"{_name(fn)} is defined in a script or notebook, which the ranks cannot import."
                f"\n\n{_REMEDY}"
            )
        try:
            return pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise pickle.PicklingError(
                f"{_name(fn)} or its arguments cannot be pickled: {error}.\n\n{_REMEDY}"
            ) from error
    try:
        with ExitStack() as stack:
            for module in _modules(call):
                stack.enter_context(_by_value(cloudpickle, module))
            return _dump(_by_value_pickler(cloudpickle), call)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise pickle.PicklingError(
            f"{_name(fn)}, its arguments, or something it refers to cannot be pickled: {error}."
            "\n\nMake it inside the function, on the rank."
        ) from error


def pack_result(result: Any) -> bytes:
    """Pickle what a rank returns, with every tensor in it moved to the CPU.

    Args:
        result: Any value; tensors may sit anywhere in it.

    Returns:
        Bytes for `pickle.loads` in the process that holds the world.

    Raises:
        pickle.PicklingError: The result cannot be pickled, or holds a DTensor, which means nothing
            outside its mesh.

    Example:
        >>> pickle.loads(pack_result({"loss": torch.tensor(2.0)}))
        {'loss': tensor(2.)}
    """
    failure: Exception | None = None
    for pickler in _picklers():
        try:
            return _dump(pickler, result)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            failure = error
    raise pickle.PicklingError(f"The result of the rank cannot be pickled: {failure}.") from failure


def _dump(pickler: Callable[..., Any], value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce(value: Any, protocol: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return NotImplemented
    if hasattr(value, "full_tensor"):
        raise pickle.PicklingError(
            "a DTensor means nothing outside its mesh; return .full_tensor() or .to_local()"
        )
    if value.device.type in ("cpu", "meta"):
        return NotImplemented
    local = value.detach().cpu()
    if isinstance(value, torch.nn.Parameter):
        local = torch.nn.Parameter(local, value.requires_grad)
    return local.__reduce_ex__(protocol)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduce(value, pickle.HIGHEST_PROTOCOL)


@functools.cache
def _picklers() -> tuple[Callable[..., Any], ...]:
    cloudpickle = _cloudpickle()
    # Plain pickle first: it is faster, and classes that both sides can import stay the same
    # classes.
    return (_Pickler,) if cloudpickle is None else (_Pickler, _by_value_pickler(cloudpickle))


@functools.cache
def _by_value_pickler(cloudpickle: ModuleType) -> Callable[..., Any]:
    class ByValue(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, CodeType):
                # cloudpickle drops the file name, and with it the source lines in tracebacks. Both
                # ends run the same interpreter, so that marshal will do.
                return marshal.loads, (marshal.dumps(value),)
            reduced = _reduce(value, pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValue


@functools.cache
def _cloudpickle() -> ModuleType | None:
    return (
        importlib.import_module("cloudpickle") if importlib.util.find_spec("cloudpickle") else None
    )


def _module(fn: Callable[..., Any]) -> ModuleType | None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return sys.modules.get(getattr(fn, "__module__", None) or "")


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _modules(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> list[ModuleType]:
    """The modules of the function and of the functions that it is given, also as a field."""
    fn, args, kwargs = call
    given = [fn, *args, *kwargs.values()]
    for value in tuple(given):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            given += [getattr(value, field.name) for field in dataclasses.fields(value)]
    found = {id(m): m for value in given if callable(value) and (m := _module(value)) is not None}
    return list(found.values())


@contextmanager
def _by_value(cloudpickle: ModuleType, module: ModuleType | None) -> Iterator[None]:
    """Send the function's module by value where importing it in a rank fails or is unwanted."""
    if module is None or not _only_here(module):
        yield
        return
    with _register:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _only_here(module: ModuleType) -> bool:
    """Whether a module is the user's own: a script, a test, a package that is being written.

    Ranks live for a whole session: they know the sys.path of the day they were started, and would
    keep the first version of a module that is edited and reloaded. Installed packages are imported.
    """
    if module.__name__ == "__main__":
        return False  # cloudpickle sends it by value on its own
    root = module.__name__.partition(".")[0]
    if root == "parallax" or root in sys.stdlib_module_names:
        return False
    path = getattr(module, "__file__", None)
    if path is None:
        return importlib.util.find_spec(module.__name__) is None
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return not any(Path(path).is_relative_to(folder) for folder in installed)
