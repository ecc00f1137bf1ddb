"""What a run says about the program in its pods: its environment, and what untildone may expect of it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orchestrator.document import Document

# Sizes that no sensible run reaches: the API server bounds what checking a document may cost.
ENV_LIMIT = 64
VALUE_LIMIT = 4096
RESERVED_ENV = "UNTILDONE_"


class SecretKeyRef(Document):
    """One key of a Kubernetes Secret in the namespace of the run."""

    name: str = Field(min_length=1, max_length=253, description="name of the Secret")
    key: str = Field(min_length=1, max_length=253, description="key within it")


class ValueFrom(Document):
    """Where an environment value comes from."""

    secret_key_ref: SecretKeyRef = Field(description="one key of a Secret in the namespace of the run")


class EnvVar(Document):
    """One environment variable of the trainer: exactly one of value and valueFrom."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256, description="name of the variable")
    value: str | None = Field(default=None, max_length=VALUE_LIMIT, description="plain text; never a secret")
    value_from: ValueFrom | None = Field(default=None, description="a reference to a secret")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.value is None) == (self.value_from is None):
            raise ValueError("give exactly one of value and valueFrom")
        return self


class Trainer(Document):
    """The contract between untildone and the program in the image."""

    contract: Literal["untildone", "orbax"] = Field(
        default="untildone", description="orbax, for any program that writes Orbax checkpoints, is not built yet"
    )

    @model_validator(mode="after")
    def _built(self) -> Self:
        if self.contract != "untildone":
            raise ValueError("contract orbax is not built yet; use untildone, with this project's trainer in the image")
        return self


Argument = Annotated[str, Field(max_length=VALUE_LIMIT)]
TRAINER_COMMAND = ("python", "-m", "trainer", "train")
