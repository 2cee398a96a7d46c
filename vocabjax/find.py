"""Finds configs, experiments and benches: beside the package in a checkout, inside it in an installed copy.

Either way they import as `vocabjax.configs.NAME`, `vocabjax.experiments.NAME.run` and `vocabjax.experiments.bench.NAME`.
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from vocabjax import config as configuration
from vocabjax.config import Config
from vocabjax.errors import UserError, nearest
from vocabjax.published import MODELS, from_hugging_face, is_hugging_face

_PACKAGE = Path(__file__).parent


def configs() -> dict[str, str]:
    """Name of each config → its one-line summary."""
    paths = (path for path in _home("configs").glob("*.py") if not path.name.startswith("_"))
    return {path.stem: _summary(path) for path in sorted(paths)}


def experiments() -> dict[str, str]:
    """Name of each experiment → its one-line summary."""
    paths = sorted(_home("experiments").glob("*/run.py"))
    return {path.parent.name: _summary(path) for path in paths}


def benches() -> dict[str, str]:
    """Name of each bench → its one-line summary. What they share has no `main`."""
    paths = sorted((_home("experiments") / "bench").glob("*.py"))
    return {
        path.stem: _summary(path)
        for path in paths
        if "\ndef main(" in path.read_text(encoding="utf-8")
    }


def load_config(name: str) -> tuple[str, Config]:
    """A config and the name its run gets: by the config's name, a published model's, or the path of a .py file, of a run's
    config.json or of a Hugging Face one.

    Raises:
      UserError: there is none, or it cannot be imported or read.
    """
    path = Path(name)
    if path.suffix == ".json":
        return path.absolute().parent.name, _of_json(path)
    if path.suffix == ".py":
        if not path.is_file():
            raise UserError(f"no config {name}: there is no such file")
        module = _import(f"vocabjax_config_{path.stem}", path)
    elif name in configs():
        module = _import(f"vocabjax.configs.{name}", _home("configs") / f"{name}.py")
    elif name in MODELS:
        return name, MODELS[name][1]
    else:
        raise UserError(f"no config {name!r}{nearest(name, [*configs(), *MODELS])}")
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise UserError(f"{module.__file__} has no `config` of type vocabjax.config.Config")
    try:
        text = configuration.to_json(config)
    except (UserError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: a setting is of the wrong type: {error}") from error
    return path.stem, configuration.from_json(text, str(path))  # which checks the types


def _of_json(path: Path) -> Config:
    values = configuration.read_values(path)
    read = from_hugging_face if is_hugging_face(values) else configuration.from_values
    return read(values, str(path))


def load_experiment(name: str) -> ModuleType:
    """An experiment's `run` module; its `main(arguments)` runs it. Raises UserError as `load_config`."""
    if name not in experiments():
        raise UserError(f"no experiment {name!r}{nearest(name, experiments())}")
    return _import(f"vocabjax.experiments.{name}.run", _home("experiments") / name / "run.py")


def load_bench(name: str) -> ModuleType:
    """A bench's module; its `main(arguments)` runs it. Raises UserError as `load_config`."""
    if name not in benches():
        raise UserError(f"no bench {name!r}{nearest(name, benches())}")
    path = _home("experiments") / "bench" / f"{name}.py"
    return _import(f"vocabjax.experiments.bench.{name}", path)


def _home(kind: str) -> Path:
    installed = _PACKAGE / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def _import(name: str, path: Path) -> ModuleType:
    for kind in ("configs", "experiments"):
        package = f"vocabjax.{kind}"
        if package not in sys.modules:
            home = _home(kind)
            spec = importlib.util.spec_from_file_location(
                package, home / "__init__.py", submodule_search_locations=[str(home)]
            )
            assert spec is not None
            sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        if name.startswith("vocabjax."):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where the help of a part that it brings along is looked up
        spec.loader.exec_module(module)
        return module
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # whatever a user's file does
        reason = configuration.why_not_imported(error)
        raise UserError(f"cannot import {path}: {reason}") from error


def _summary(path: Path) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError, OSError) as error:
        return f"(cannot be read: {error})"
    return docstring.splitlines()[0] if docstring else "(no docstring)"
