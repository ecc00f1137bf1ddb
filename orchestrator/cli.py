"""The command `untildone`. Knows the names of its subcommands; imports the one that is called, and only then.

Exit codes: 0 done, 1 the run or a check failed, 2 usage or bad input, 3 timeout, 4 not found, 5 truth unknown (the
cluster or the store did not answer: that is not "failed"). A user never sees a bare traceback: every error is one line
on stderr.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from enum import IntEnum

import click


class Exit(IntEnum):
    """Exit codes of the command line, the same for every verb."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    TIMEOUT = 3
    NOT_FOUND = 4
    UNKNOWN = 5
    INTERRUPTED = 130


# name -> (module, what it does); the function has the command's name with `_command` appended.
COMMANDS = {
    "run": ("orchestrator.commands.run", "Keep a run going until its target step is committed."),
    "resume-until-done": (
        "orchestrator.commands.resume_until_done",
        "The same for a run in a Kubernetes cluster, without an operator.",
    ),
    "operator": ("orchestrator.commands.operator", "Look after the TrainingRuns of a Kubernetes cluster."),
    "plan": ("orchestrator.commands.plan", "Show how the recipe is laid out on each rung of the ladder."),
    "status": ("orchestrator.commands.status", "List runs: status, step, plan, attempt, last commit."),
    "explain": ("orchestrator.commands.explain", "Say what a run is doing, why, and what happens next."),
    "profile": ("orchestrator.commands.profile", "Have a run trace some steps, or write its compiled program."),
    "verify": ("orchestrator.commands.verify", "Prove that nothing was read twice, skipped or changed."),
    "report": ("orchestrator.commands.report", "Write a one-page report with pictures and summary.json."),
    "doctor": (
        "orchestrator.commands.doctor",
        "Check an installation in a cluster: kinds, rights, a working operator.",
    ),
    "recover": ("orchestrator.commands.recover", "Write HEAD again when it is lost or unreadable."),
}


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


EPILOG = "Exit codes: 0 done, 1 failed, 2 usage, 3 timeout, 4 not found, 5 truth unknown."


def _version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import importlib.metadata

        try:
            click.echo(f"untildone {importlib.metadata.version('untildone')}")
        except importlib.metadata.PackageNotFoundError:
            click.echo("untildone (from its source folder)")
        ctx.exit(Exit.DONE)


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def untildone() -> None:
    """Keep a pre-training run going, on whatever hardware there is, until it is done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never raises."""
    try:
        result = untildone.main(args=arguments, prog_name="untildone", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else Exit.DONE
    except (KeyboardInterrupt, click.Abort):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) went away: no error. The interpreter's last flush has to go somewhere quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except Exception as error:
        if os.environ.get("UNTILDONE_TRACEBACK"):
            raise
        text, code = describe_error(error)
        print(f"error: {text}", file=sys.stderr)
        return code


def describe_error(error: Exception) -> tuple[str, Exit]:
    """One line for a user, and the exit code, for any exception that reached the top."""
    from orchestrator.clusters.base import ClusterUnavailable
    from orchestrator.registry import RunNotFound
    from trainer.errors import ConfigurationError, StorageUnavailable, TrainerError, TruthUnknown
    from trainer.rundir.store import StoreMissing

    text = " ".join(str(error).split())
    if isinstance(error, (RunNotFound, StoreMissing)):
        return text, Exit.NOT_FOUND
    if isinstance(error, ConfigurationError):
        return text, Exit.USAGE
    if isinstance(error, TruthUnknown):
        return text, Exit.UNKNOWN
    if isinstance(error, (ClusterUnavailable, StorageUnavailable)):
        return f"{text or type(error).__name__}; nothing is known about the run, so nothing was decided", Exit.UNKNOWN
    if isinstance(error, TrainerError):
        return text, Exit.FAILED
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}", Exit.FAILED
    return f"{type(error).__name__}: {text} (set UNTILDONE_TRACEBACK=1 to see where)", Exit.FAILED


def entry() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
