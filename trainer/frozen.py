"""The base of every document we write or read: immutable, typed strictly, unknown fields refused with a suggestion."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.errors import ConfigurationError


class Frozen(BaseModel):
    """Immutable model; equal content means equal canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    unknown_fields: ClassVar[Literal["forbid", "ignore"]] = "forbid"  # of what is read, nested parts included

    def canonical(self) -> bytes:
        """The one byte form of this document: sorted keys, no spaces, UTF-8."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with fields replaced. ConfigurationError for one that does not exist, which pydantic would leave out."""
        fields = type(self).model_fields
        for name in update or ():
            if name not in fields:
                raise ConfigurationError(f"{type(self).__name__} has no field {name!r}; {_nearest(name, fields)}")
        return super().model_copy(update=update, deep=deep)

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Validate `data` (a mapping, or JSON bytes) read from `source`.

        Raises ConfigurationError naming `source`, the field and the nearest known field.
        """
        try:
            if isinstance(data, (bytes, str)):
                return cls.model_validate_json(data, extra=cls.unknown_fields)
            return cls.model_validate(data, extra=cls.unknown_fields)
        except ValidationError as error:
            raise ConfigurationError(f"{source}: {explain_validation(error, cls)}") from None


def explain_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """One line per problem: dotted field, what is wrong, and for an unknown field the nearest known one."""
    lines = []
    problems = sorted(error.errors(), key=lambda problem: problem["type"] == "missing")  # a misspelt field explains it
    for problem in problems:
        path = ".".join(str(part) for part in problem["loc"]) or "document"
        if problem["type"] == "extra_forbidden":
            known = _fields_at(model, problem["loc"][:-1])
            lines.append(f"{path}: unknown field; {_nearest(str(problem['loc'][-1]), known)}")
        elif problem["type"] == "missing":
            lines.append(f"{path}: required, but not there")
        else:
            lines.append(f"{path}: {_said(problem['msg'])}{_got(problem['input'])}")
    return "; ".join(lines)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(sorted(known))}"


def _said(message: str) -> str:
    """pydantic's words, in those of a document: what is a tuple here is a list there."""
    return message.removeprefix("Value error, ").replace("Tuple", "List").replace("tuple", "list")


def _got(value: Any, limit: int = 60) -> str:
    """The refused value, where it helps: a whole mapping or list does not, nor the end of a long text."""
    if isinstance(value, (dict, list, tuple)) and value:
        return ""
    shown = repr(value)
    return f" (got {shown if len(shown) <= limit else shown[: limit - 1] + '…'})"


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names (aliases first) of the fields of the model that `path` leads to."""
    current: Any = model
    in_mapping = False
    for part in path:
        if isinstance(part, int) or in_mapping:  # an index of a list, a key of a mapping
            in_mapping = False
            continue
        fields = getattr(current, "model_fields", {})
        match = next((f for n, f in fields.items() if part in (n, f.alias)), None)
        if match is None:
            return []
        current = _model_in(match.annotation)
        in_mapping = get_origin(match.annotation) is dict
    return [f.alias or n for n, f in getattr(current, "model_fields", {}).items()]


def _model_in(annotation: Any) -> Any:
    """The pydantic model inside Optional, tuple, list or union annotations; None when there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
