"""The base of what users write: camelCase in documents, snake_case in code, and no YAML truth value for a number."""

from pydantic import ConfigDict, ValidationInfo, field_validator
from pydantic.alias_generators import to_camel

from trainer.frozen import Frozen


class Document(Frozen):
    """Part of a TrainingRun: camelCase only."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=False, validate_by_alias=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML's true, yes and on would otherwise count as 1."""
        wanted = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and wanted is not bool:
            raise ValueError("true and false (also yes, no, on, off) are no value for this field")
        return value
