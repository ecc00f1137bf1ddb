"""The base of what users write: camelCase in documents, snake_case in code, and no YAML truth value for a number."""

from pydantic import BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic.alias_generators import to_camel

from trainer.frozen import Frozen


class Document(Frozen):
    """Part of a TrainingRun: camelCase only."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=False, validate_by_alias=True)

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_own_kind(cls, value: object, info: ValidationInfo) -> object:
        """YAML's true, yes and on would otherwise count as 1, and "5" as 5, which the API server refuses."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("true and false (also yes, no, on, off) are no value for this field")
        parsed = any(isinstance(part, BeforeValidator) for part in field.metadata)
        if isinstance(value, str) and field.annotation in (bool, int, int | None) and not parsed:
            wanted = "true or false" if field.annotation is bool else "a number"
            raise ValueError(f"a text is no value for this field; write {wanted}, without quotes")
        return value
