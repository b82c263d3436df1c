"""Settings from `--config run.yaml` and `--set key=value`: typed, and no unknown key passes.

The command line wins over --set, --set over the file, the file over the defaults.
"""

import difflib
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from pipeline.errors import PipelineError


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key twice is an error; PyYAML would let the last one win."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"{key!r} is not a setting's name", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key} is given twice", key_node.start_mark
            )
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_config(path: str, model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The settings of a file, each checked against the model's field of that name.

    Raises PipelineError naming the file, the key and what it should be.
    """
    where = f"--config {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{where}: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise PipelineError(f"{where}{line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise PipelineError(f"{where}: not YAML that can be read ({error})") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise PipelineError(f"{where}: must hold lines of the form `key: value`")
    return _checked(values, model, where)


def read_assignments(words: Iterable[str], model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The settings of `--set key=value`, each value written as in the file.

    Raises PipelineError naming the word.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise PipelineError(f"--set {word}: must be key=value")
        where = f"--set {word}"
        value: Any = text
        if key in model.model_fields and not _takes_text(model, key, text):
            try:
                value = yaml.load(text, _Loader)
            except yaml.YAMLError as error:
                raise PipelineError(f"{where}: the value is not YAML") from error
        found |= _checked({key: value}, model, where)
    return found


def merged(
    *,
    config: str | None,
    assignments: Sequence[str],
    command_line: Mapping[str, Any],
    model: type[pydantic.BaseModel],
) -> dict[str, Any]:
    """All that was given, in their order of precedence. Raises PipelineError."""
    values = read_config(config, model) if config is not None else {}
    values |= read_assignments(assignments, model)
    values |= command_line
    for name, field in model.model_fields.items():
        if field.is_required() and name not in values:
            raise PipelineError(
                f"{option_of(name)} is missing: give it there, or as `{name}:` in --config"
            )
    return values


def option_of(name: str) -> str:
    """The command-line option of a setting."""
    return "--" + name.replace("_", "-")


def _checked(
    values: Mapping[str, Any], model: type[pydantic.BaseModel], where: str
) -> dict[str, Any]:
    """The values if each has its field's type, without conversions: 'yes' is no number.

    A text where a list is wanted is a list of one, as an option given once is.
    """
    for key in values:
        if key not in model.model_fields:
            near = difflib.get_close_matches(key.replace("-", "_"), model.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; --help lists the options"
            raise PipelineError(f"{where}: there is no setting {key}{hint}")
        annotation = model.model_fields[key].annotation
        if typing.get_origin(annotation) is list and isinstance(values[key], str):
            values = {**values, key: [values[key]]}
    try:
        model.model_validate(values, strict=True)
    except pydantic.ValidationError as error:
        for problem in error.errors():
            if problem["type"] == "missing":  # may come from elsewhere
                continue
            key = ".".join(str(part) for part in problem["loc"])
            raise PipelineError(
                f"{where}: {key}: {problem['msg']} (got {problem['input']!r})"
            ) from error
    return dict(values)


def _takes_text(model: type[pydantic.BaseModel], key: str, text: str) -> bool:
    """Whether the value as it stands is what the field wants: `target=3` names a model."""
    annotation: Any = model.model_fields[key].annotation
    try:
        pydantic.TypeAdapter(annotation).validate_python(text, strict=True)
    except pydantic.ValidationError:
        return False
    return text not in ("null", "")


def settings_text(settings: pydantic.BaseModel, *, without: Collection[str] = ()) -> str:
    """The settings as YAML that --config takes."""
    values = settings.model_dump(mode="json", exclude=set(without))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
