"""The options of `train`."""

import signal
from typing import Any

import click


@click.command()
@click.option("--run-directory", metavar="URI", help="folder or gs:// prefix [UNTILDONE_RUN_DIRECTORY]")
@click.option("--attempt", type=int, help="[UNTILDONE_ATTEMPT]")
@click.option("--nonce", help="[UNTILDONE_NONCE]")
@click.option("--pod-uid", help="[UNTILDONE_POD_UID]")
@click.option("--restart-attempt", type=int, help="[UNTILDONE_RESTART_ATTEMPT]")
@click.option("--process-id", type=int, help="[UNTILDONE_PROCESS_ID]")
@click.option("--process-count", type=int, help="[UNTILDONE_PROCESS_COUNT]")
@click.option("--coordinator", metavar="HOST:PORT", help="of process 0 [UNTILDONE_COORDINATOR]")
@click.option("--recipe", metavar="NAME", help="without an orchestrator: a recipe's name, or a .py file")
@click.option("--data-root", metavar="URI", help="without an orchestrator: where the recipe's token files lie")
@click.option("--device", default="cpu-1", show_default=True, help="without an orchestrator: device type, one process")
@click.option("--target", type=int, metavar="STEP", help="without an orchestrator: train until this step is committed")
@click.option("--commit-every", type=int, metavar="STEPS")
@click.option("--evaluate-every", type=int, metavar="STEPS")
@click.option(
    "--sets",
    multiple=True,
    metavar="NAME|NAME=FILE,…",
    help="held-out sets beside the recipe's own, evaluated as often",
)
@click.option("--same-text", is_flag=True, help="the held-out text was split off the training text at random")
@click.option("--tasks", multiple=True, metavar="NAME", help="downstream tasks or groups of them, e.g. fast")
@click.option("--tasks-every", type=int, metavar="STEPS", help="[--evaluate-every]")
@click.option("--compile-cache", metavar="URI", help="of compiled programs [RUN/cache/compile]")
@click.option(
    "--init-from",
    metavar="URI[@STEP]|hf:FOLDER",
    help="start from another run's commit, or from weights of Hugging Face, instead of the initialiser",
)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="override a recipe field; dotted")
@click.pass_obj
def train(began: float, /, recipe: str | None, **given: Any) -> None:
    """Train.

    With the environment of a gang (UNTILDONE_*), this is one process of one start. With --recipe it is a whole run
    in this process: call it again and it resumes.
    """
    for request in (signal.SIGUSR1, signal.SIGUSR2):  # until trainer.train hears them they must end nothing
        signal.signal(request, signal.SIG_IGN)
    from trainer.environment import gang_environment
    from trainer.train import train as run

    if recipe is not None:
        from trainer.standalone import prepare

        prepared = prepare(recipe, **given)
        if isinstance(prepared, str):
            click.echo(prepared)
            return
        environment = prepared
    else:
        environment = gang_environment({name: None if value is None else str(value) for name, value in given.items()})
    run(environment, began)
