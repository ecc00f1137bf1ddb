"""`python -m trainer …`. Subcommands are imported when they are used; nothing here imports JAX."""

import importlib
import sys
from typing import Any, NoReturn

import click

from trainer.errors import TrainerError

SUBCOMMANDS = {
    "train": ("trainer.commands", "train", "One process of a training start, or a whole run without an orchestrator."),
    "evaluate": (
        "trainer.evaluate_command",
        "evaluate",
        "Held-out losses and downstream tasks of a commit or of weights.",
    ),
    "convert": ("trainer.convert", "convert", "Weights from and to Hugging Face's and OLMo-core's formats."),
    "parity": ("trainer.parity.commands", "parity", "Our model's predictions beside those of Hugging Face's."),
    "preflight": ("trainer.preflight.command", "preflight", "Compile the step for a TPU slice, without one."),
    "metrics": ("trainer.metrics.commands", "metrics", "TensorBoard, tables, a reference beside a run, the alarm."),
    "data": ("trainer.data.commands", "data", "Tokenise, order and audit data."),
}


class LazyGroup(click.Group):
    """Shows its subcommands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module, name, _ = SUBCOMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in SUBCOMMANDS.items()])


@click.command(cls=LazyGroup, name="trainer", context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The trainer of untildone: OLMo 3 in JAX with exact resume."""


def main(began: float, arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; `began` is the process's start on the monotonic clock. A user's error is one line."""
    try:
        result: Any = cli.main(arguments, prog_name="python -m trainer", standalone_mode=False, obj=began)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    sys.exit(result if isinstance(result, int) else 0)
