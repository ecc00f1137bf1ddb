"""The options of `train` and `evaluate`."""

import json
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
@click.option("--compile-cache", metavar="DIR", help="JAX's persistent compile cache")
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


@click.command()
@click.option("--run-directory", required=True, metavar="URI")
@click.option("--step", type=int, help="a committed step; the newest if not given")
@click.option("--data-root", metavar="URI", help="default: that of the newest attempt")
@click.option("--device", default="cpu-1", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="one JSON object on standard output")
def evaluate(run_directory: str, step: int | None, data_root: str | None, device: str, as_json: bool) -> None:
    """Held-out loss of a committed step. Reads only."""
    from trainer.standalone import evaluate_commit

    body = evaluate_commit(run_directory, step, data_root, device)
    if as_json:
        click.echo(json.dumps(body, sort_keys=True))
    else:
        counted = f"{body['instances']} instances (ids {body['ids']})"
        click.echo(f"step {body['step']}: held-out loss {body['loss']:.6f} over {counted}")
