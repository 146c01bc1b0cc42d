"""Find the user's own objects by name: ``package.module:name``, with knobs after a second colon if it is a function.

Modules are searched where the run was made (``look_in``), among the installed ones, and in the current folder.
"""

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedncv import spec


class Own(NamedTuple):
    name: str  # package.module:name
    rest: str  # the text of its knobs


def own(text: str) -> Own | None:
    """Return the parts of ``package.module:name`` or ``package.module:name:knob=value``; None for any other text.

    >>> own("my.module:patients:year=2020")
    Own(name='my.module:patients', rest='year=2020')
    >>> own("fedprox:mu=0.1")
    """
    found = spec.OWN.fullmatch(text)
    return Own(found[1], found[2] or "") if found else None


def own_values(text: Own, *, what: str) -> tuple[Any, dict[str, Any]]:
    """Return the object and the values of its knobs. Raise ValueError if it is not a function and has knobs."""
    found = import_object(text.name, what=what)
    if not callable(found):
        if text.rest:
            raise ValueError(f"{what} {text.name!r} is a {type(found).__name__}, not a function: it has no knobs")
        return found, {}
    signature = inspect.signature(found)
    for p in signature.parameters.values():
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            raise ValueError(
                f"{what} {text.name!r}: {p.name} cannot be given in a text; "
                f"make it a knob with a default: def {found.__name__}(*, {p.name}=...)"
            )
    try:
        for knob, kind in spec.knobs(found).items():
            if spec.part_of(kind) is None and not spec.is_plain(kind):
                raise ValueError(f"{knob} is of type {kind}; a text can set str, int, float, bool, Path or Literal")
    except (ValueError, NameError, TypeError) as error:
        raise ValueError(f"{what} {text.name!r}: {error}") from None
    return found, spec.values_of(found, text.name, text.rest, what=what)


def make_own(text: Own, kind: type, *, what: str) -> Any:
    """Return the user's ``kind``: the object itself, or what the function returns with its knobs."""
    found, values = own_values(text, what=what)
    if not callable(found):
        result, verb = found, "is"
    else:
        try:
            result, verb = found(**values), "returns"
        except Exception as error:
            if isinstance(error, ValueError) and "\n" not in str(error):
                raise ValueError(f"{what} {text.name!r}: {error}") from error
            raise ValueError(f"{what} {text.name!r} failed: {place_of(error)}") from error
    if not isinstance(result, kind):
        raise ValueError(f"{what} {text.name!r} {verb} {type(result).__name__}, not a fedncv.{kind.__name__}")
    return result


_made_in: list[str] = []  # the folder of the run that is being built


def look_in(folder: str) -> None:
    """Search ``folder`` first from now on, for modules of a run that was made there; empty: only the usual places."""
    _made_in[:] = [folder] if folder and os.path.isdir(folder) else []


def code_folder(names: Iterable[str]) -> str:
    """Return the folder of the modules of the user's own objects, the current one if several; empty if installed."""
    tops = [found.name.partition(":")[0].partition(".")[0] for found in map(own, names) if found]
    folders = [_folder_of(sys.modules.get(top)) for top in tops if top != __package__]
    theirs = [folder for folder in folders if folder and not _is_installed(folder)]
    return os.getcwd() if os.getcwd() in theirs else next(iter(theirs), "")


def _is_installed(folder: str) -> bool:
    return folder.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep)) or "site-packages" in Path(folder).parts


def import_object(name: str, *, what: str):  # type: ignore[no-untyped-def]  # whatever the user's module holds
    """Return the object called ``package.module:name``; the module is here, installed, or where its run was made."""
    module, _, attribute = name.partition(":")
    where = f"{what} {name!r}"
    if module.endswith(".py"):
        raise ValueError(f"{where}: name the module without .py; did you mean {module[:-3]}:{attribute}?")
    try:
        with _on_path(module.partition(".")[0], where):
            loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # not ours: one that it imports
            raise ValueError(f"{where} cannot be imported: {place_of(error)}") from error
        raise ValueError(
            f"{where}: there is no module {error.name!r} in {' or '.join(dict.fromkeys([*_made_in, os.getcwd()]))}, "
            "and none is installed; name it as package.module:function"
        ) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and str(error).startswith(where):
            raise
        raise ValueError(f"{where} cannot be imported: {place_of(error)}") from error
    if not hasattr(loaded, attribute):
        public = [each for each, value in vars(loaded).items() if not each.startswith("_") and _is_of(value, loaded)]
        close = difflib.get_close_matches(attribute, public, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f" (it has {', '.join(public) or 'nothing'})"
        raise ValueError(f"{where}: {loaded.__file__ or module} has no {attribute!r}{hint}")
    return getattr(loaded, attribute)


def _is_of(value: Any, module: ModuleType) -> bool:
    """Return whether a module holds the value itself, and has not imported it."""
    if isinstance(value, ModuleType):
        return False
    return not callable(value) or getattr(value, "__module__", None) == module.__name__


@contextlib.contextmanager
def _on_path(top: str, where: str) -> Iterator[None]:
    """Let the folder in which the run was made come first, if it has this module; then the usual order."""
    for folder in (*_made_in, os.getcwd()):  # a console script does not look where its user stands
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()  # the module may be new
    first = next((folder for folder in _made_in if PathFinder.find_spec(top, [folder])), None)
    if first is None:
        yield
        return
    loaded = _folder_of(sys.modules.get(top))
    if loaded not in ("", first):
        raise ValueError(
            f"{where}: the module {top!r} is loaded from {loaded}, but the run was made with the one in {first}; "
            "use a process of its own for each"
        )
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.path.remove(first)


def _folder_of(module: ModuleType | None) -> str:
    """Return the folder that holds a module or package; empty if there is none."""
    if module is None:
        return ""
    if module.__file__ is None:  # a package without __init__.py
        return next((str(Path(place).parent) for place in getattr(module, "__path__", [])), "")
    path = Path(module.__file__)
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)


def place_of(error: BaseException) -> str:
    """Return the error in one line, with the file and line of the user's code in which it happened."""
    said = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in _frames(error) if not _is_of_fedncv(frame.filename)]
    theirs = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {said}{place}" if said else f"{type(error).__name__}{place}"


def is_ours(error: BaseException) -> bool:
    """Return whether fedncv raised the error, and not the user's code or a library."""
    frames = _frames(error)
    return bool(frames) and _is_of_fedncv(frames[-1].filename)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]


def _is_of_fedncv(filename: str) -> bool:
    return filename.startswith(os.path.dirname(os.path.abspath(__file__)) + os.sep)
