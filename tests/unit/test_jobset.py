"""The JobSet of an attempt: exact in its numbers for every slice, and closed to what would break it."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import NAME_LIMIT as RUN_NAME_LIMIT
from orchestrator.jobset import FINAL_EXIT_CODES, NAME_LIMIT, jobset
from tests.support.kube_objects import NAMESPACE, PROGRAM, request
from trainer.errors import ConfigurationError, ExitCode
from trainer.hardware import DeviceType, Family, device_type, device_types
from trainer.rundir.records import Program

Object = dict[str, Any]
FAMILIES: tuple[Family, ...] = ("tpu7x", "v5p", "v5e", "v6e")
SLICES = [kind for family in FAMILIES for kind in device_types(family)]
TEMPLATE = "spec.podTemplate"


def job_of(manifest: Object) -> Object:
    """Its only replicated Job."""
    (job,) = manifest["spec"]["replicatedJobs"]
    return dict(job)


def pod_of(manifest: Object) -> Object:
    return dict(job_of(manifest)["template"]["spec"]["template"]["spec"])


def with_template(template: Object, device: str = "tpu7x-2x2x2") -> Object:
    return jobset(request(device, program=PROGRAM.model_copy(update={"pod_template": template})), NAMESPACE)


def environment(container: Object) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}


@given(kind=st.sampled_from(SLICES), slices=st.integers(1, 9))
def test_processes_and_chips_are_those_of_the_plan(kind: DeviceType, slices: int) -> None:
    asked = request(kind.name, slices)
    manifest = jobset(asked, NAMESPACE)
    job, pod = job_of(manifest), pod_of(manifest)
    spec = job["template"]["spec"]
    assert job["replicas"] == slices
    assert spec["parallelism"] == spec["completions"] == kind.hosts
    assert slices * spec["completions"] * len(pod["containers"]) == asked.spec.plan.processes
    chips = [int(c["resources"]["limits"]["google.com/tpu"]) for c in pod["containers"]]
    assert slices * spec["completions"] * sum(chips) == slices * kind.chips
    assert len(set(chips)) == 1
    assert all(c["resources"]["limits"] == c["resources"]["requests"] for c in pod["containers"])
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": kind.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": kind.gke_topology,
    }


@given(
    kind=st.sampled_from(SLICES),
    slices=st.integers(1, 9),
    run=st.from_regex(rf"[a-z]([-a-z0-9]{{0,{RUN_NAME_LIMIT - 2}}}[a-z0-9])?", fullmatch=True),
    attempt=st.integers(1, 999_999),
)
def test_names_stay_within_kubernetes_limits(kind: DeviceType, slices: int, run: str, attempt: int) -> None:
    manifest = jobset(request(kind.name, slices, run=run, attempt=attempt), NAMESPACE)
    name, job = manifest["metadata"]["name"], job_of(manifest)["name"]
    assert name == f"{run}-a{attempt}"
    assert len(f"{name}-{job}-{slices - 1}-{kind.hosts - 1}-abcde") <= NAME_LIMIT  # the longest: a pod's
    labels = manifest["metadata"]["labels"] | job_of(manifest)["template"]["spec"]["template"]["metadata"]["labels"]
    assert all(len(value) <= 63 for value in labels.values())
    first = f"{name}-{job}-0-0.{name}"
    for container in pod_of(manifest)["containers"]:
        assert environment(container)["UNTILDONE_COORDINATOR"] == f"{first}:8482"


def test_the_job_is_called_slice_where_there_is_room() -> None:
    assert job_of(jobset(request(), NAMESPACE))["name"] == "slice"
    assert job_of(jobset(request(run="x" * 40, attempt=999_999), NAMESPACE))["name"] == "s"


def test_a_name_that_is_too_long_even_so_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"metadata\.name: .* shorten the run's name by 1$"):
        jobset(request("v5p-16x16x24", 11, run="x" * 40, attempt=999_999), NAMESPACE)


def test_the_same_request_is_the_same_manifest() -> None:
    asked = request("v5p-4x4x4", 2)
    assert jobset(asked, NAMESPACE) == jobset(copy.deepcopy(asked), NAMESPACE)


def test_each_process_knows_its_place() -> None:
    one, other = (environment(c) for c in pod_of(jobset(request(attempt=7), NAMESPACE))["containers"])
    assert one["UNTILDONE_ATTEMPT"] == "7" and one["UNTILDONE_NONCE"] == "nonce-1"
    assert one["UNTILDONE_RUN_DIRECTORY"] == "gs://bucket/demo"
    assert one["UNTILDONE_PROCESS_COUNT"] == "4"
    assert (one["UNTILDONE_HOST_PROCESS"], other["UNTILDONE_HOST_PROCESS"]) == ("0", "1")
    assert one["UNTILDONE_HOSTS"] == one["UNTILDONE_HOST_PROCESSES"] == "2"
    fields = {
        "UNTILDONE_POD_UID": "metadata.uid",
        "UNTILDONE_RESTART_ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        "UNTILDONE_SLICE": "metadata.labels['jobset.sigs.k8s.io/job-index']",
        "UNTILDONE_HOST": "metadata.labels['batch.kubernetes.io/job-completion-index']",
    }
    for name, path in fields.items():
        assert one[name]["fieldRef"]["fieldPath"] == path
    assert "UNTILDONE_PROCESS_ID" not in one


def test_only_several_slices_are_joined_by_megascale() -> None:
    (single,) = pod_of(jobset(request("v5p-4x4x4"), NAMESPACE))["containers"]
    assert not [name for name in environment(single) if name.startswith("MEGASCALE")]
    (several,) = pod_of(jobset(request("v5p-4x4x4", 3), NAMESPACE))["containers"]
    found = environment(several)
    assert found["MEGASCALE_NUM_SLICES"] == "3"
    assert found["MEGASCALE_SLICE_ID"]["fieldRef"]["fieldPath"].endswith("job-index']")
    assert found["MEGASCALE_COORDINATOR_ADDRESS"] == "demo-a1-slice-0-0.demo-a1"


def test_what_restarts_the_gang_and_what_ends_it() -> None:
    manifest = jobset(request(), NAMESPACE)
    spec = job_of(manifest)["template"]["spec"]
    assert spec["backoffLimit"] == 0 and spec["completionMode"] == "Indexed"
    assert pod_of(manifest)["restartPolicy"] == "Never"
    rules = spec["podFailurePolicy"]["rules"]
    assert [r["onExitCodes"]["containerName"] for r in rules] == ["trainer", "trainer-1"]
    assert {r["action"] for r in rules} == {"FailJob"}
    assert rules[0]["onExitCodes"]["values"] == [1, 2, 64, 74, 76, 78, 79, 126, 127]
    again = {ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.WATCHDOG}
    assert set(ExitCode) - set(FINAL_EXIT_CODES) == again
    policy = manifest["spec"]["failurePolicy"]
    assert policy["restartStrategy"] == "BlockingRecreate" and policy["maxRestarts"] == 0
    assert [(r["action"], r["onJobFailureReasons"]) for r in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"]),
        ("RestartJobSetAndIgnoreMaxRestarts", ["BackoffLimitExceeded"]),
    ]


def test_labels_by_which_everybody_finds_it() -> None:
    manifest = jobset(request(priority_class="high", owner_uid="uid-of-the-run"), NAMESPACE)
    metadata, template = manifest["metadata"], job_of(manifest)["template"]["spec"]["template"]["metadata"]
    own = {"untildone.dev/run": "demo", "untildone.dev/attempt": "1", "app.kubernetes.io/managed-by": "untildone"}
    queue = {"kueue.x-k8s.io/queue-name": "tpus", "kueue.x-k8s.io/priority-class": "high"}
    assert metadata["labels"] == own | queue and template["labels"] == own
    assert metadata["annotations"]["untildone.dev/nonce"] == "nonce-1"
    assert metadata["annotations"]["untildone.dev/run-directory"] == "gs://bucket/demo"
    topology = metadata["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert topology == "cloud.google.com/gke-nodepool"
    assert metadata["namespace"] == NAMESPACE and manifest["spec"]["suspend"] is True
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TrainingRun", "demo", "uid-of-the-run")
    assert owner["controller"] and owner["blockOwnerDeletion"]
    plain = jobset(request(), NAMESPACE)["metadata"]
    assert "ownerReferences" not in plain and "kueue.x-k8s.io/priority-class" not in plain["labels"]


def test_restricted_pods_without_a_token_of_the_cluster() -> None:
    pod = pod_of(jobset(request(program=PROGRAM.model_copy(update={"service_account": "trainer"})), NAMESPACE))
    assert pod["automountServiceAccountToken"] is False and pod["serviceAccountName"] == "trainer"
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        assert mounts == {"/dev/shm": "shm", "/tmp": f"tmp-{container['name']}"}
    volumes = {v["name"]: v["emptyDir"] for v in pod["volumes"]}
    assert volumes == {"shm": {"medium": "Memory"}, "tmp-trainer": {}, "tmp-trainer-1": {}}
    assert pod["tolerations"] == [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_the_grace_is_the_one_the_trainer_knows() -> None:
    asked = request()
    settings = asked.spec.settings.model_copy(update={"grace_seconds": 120.0})
    spec = asked.spec.model_copy(update={"settings": settings})
    manifest = jobset(type(asked)(**{**asked.__dict__, "spec": spec}), NAMESPACE)
    assert pod_of(manifest)["terminationGracePeriodSeconds"] == 120


def test_the_programs_environment_comes_with_its_references() -> None:
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    program = Program(image="i", command=("run",), env=(secret, {"name": "A", "value": "1"}))
    for container in pod_of(jobset(request(program=program), NAMESPACE))["containers"]:
        assert container["env"][-2:] == [secret, {"name": "A", "value": "1"}]
        assert container["command"] == ["run"] and container["image"] == "i"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("cpu-8"), "deviceType 'cpu-8': Kubernetes has no nodes of this type"),
        (request(program=None), "spec.image: needed on Kubernetes"),
        (request(queue=None), "spec.queue: needed on Kubernetes"),
    ],
)
def test_what_kubernetes_cannot_run(asked: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        jobset(asked, NAMESPACE)


# -- pod templates


def test_lists_are_merged_by_name_and_the_rest_replaced() -> None:
    manifest = with_template(
        {
            "metadata": {"labels": {"team": "nlp"}, "annotations": {"gke-gcsfuse/volumes": "true"}},
            "spec": {
                "priorityClassName": "high",
                "nodeSelector": {"cloud.google.com/gke-spot": "true"},
                "tolerations": [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}],
                "volumes": [{"name": "data", "emptyDir": {}}],
                "securityContext": {"fsGroup": 1000},
                "containers": [
                    {
                        "name": "trainer",
                        "env": [{"name": "B", "value": "2"}],
                        "resources": {"limits": {"memory": "100Gi"}},
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                        "securityContext": {"capabilities": {"add": ["SYS_RESOURCE"]}},
                    }
                ],
                "initContainers": [{"name": "proxy", "image": "proxy", "restartPolicy": "Always"}],
            },
        }
    )
    template = job_of(manifest)["template"]["spec"]["template"]
    assert (
        template["metadata"]["labels"] | {"team": "nlp", "untildone.dev/run": "demo"} == template["metadata"]["labels"]
    )
    pod = template["spec"]
    assert pod["priorityClassName"] == "high" and len(pod["nodeSelector"]) == 3 and len(pod["tolerations"]) == 2
    assert pod["securityContext"]["fsGroup"] == 1000 and pod["securityContext"]["runAsNonRoot"]
    assert [v["name"] for v in pod["volumes"]] == ["shm", "tmp-trainer", "tmp-trainer-1", "data"]
    assert [c["name"] for c in pod["containers"]] == ["trainer", "trainer-1"]
    for container in pod["containers"]:  # what is said of the trainer holds for all its processes
        assert environment(container)["B"] == "2" and environment(container)["UNTILDONE_ATTEMPT"] == "1"
        assert container["resources"]["limits"] == {"google.com/tpu": "2", "memory": "100Gi"}
        assert {m["mountPath"] for m in container["volumeMounts"]} == {"/dev/shm", "/tmp", "/data"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}
    assert pod["initContainers"][0]["name"] == "proxy"


def test_a_value_replaces_a_reference_and_null_takes_away() -> None:
    secret = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    template = {
        "spec": {
            "containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}]}],
            "enableServiceLinks": None,
        }
    }
    program = PROGRAM.model_copy(update={"env": (secret,), "pod_template": template})
    pod = pod_of(jobset(request(program=program), NAMESPACE))
    assert environment(pod["containers"][0])["A"] == "1" and "enableServiceLinks" not in pod
    assert [v["name"] for v in pod["containers"][0]["env"]].count("A") == 1


def test_no_template_changes_nothing() -> None:
    assert with_template({}) == with_template({"spec": {}, "metadata": {"labels": {}}}) == jobset(request(), NAMESPACE)


def trainer(**fields: Any) -> Object:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"activeDeadlineSeconds": 60}}, "spec.activeDeadlineSeconds"),
        ({"spec": {"hostname": "x"}}, "spec.hostname"),
        ({"spec": {"subdomain": "x"}}, "spec.subdomain"),
        ({"spec": {"automountServiceAccountToken": True}}, "spec.automountServiceAccountToken"),
        ({"spec": {"terminationGracePeriodSeconds": 5}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"serviceAccountName": "x"}}, "spec.serviceAccountName"),
        ({"spec": {"nodeName": "x"}}, "spec.nodeName"),
        ({"spec": {"schedulerName": "x"}}, "spec.schedulerName"),
        ({"spec": {"schedulingGates": []}}, "spec.schedulingGates"),
        ({"spec": {"restartPolicy": None}}, "spec.restartPolicy"),
        (
            {"spec": {"nodeSelector": {"cloud.google.com/gke-tpu-topology": "4x4x4"}}},
            "spec.nodeSelector[cloud.google.com/gke-tpu-topology]",
        ),
        ({"metadata": {"labels": {"untildone.dev/run": "x"}}}, "metadata.labels[untildone.dev/run]"),
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "x"}}}, "metadata.labels[kueue.x-k8s.io/queue-name]"),
        ({"metadata": {"annotations": {"untildone.dev/nonce": "x"}}}, "metadata.annotations[untildone.dev/nonce]"),
        (trainer(command=["sh"]), "spec.containers[0].command"),
        (trainer(args=["x"]), "spec.containers[0].args"),
        (trainer(image="x"), "spec.containers[0].image"),
        (trainer(env=[{"name": "UNTILDONE_NONCE", "value": "x"}]), "spec.containers[0].env[0].name"),
        (trainer(env=[{"name": "MEGASCALE_SLICE_ID", "value": "x"}]), "spec.containers[0].env[0].name"),
        (
            trainer(resources={"limits": {"google.com/tpu": "4"}}),
            "spec.containers[0].resources.limits[google.com/tpu]",
        ),
        (
            trainer(resources={"requests": {"google.com/tpu": "4"}}),
            "spec.containers[0].resources.requests[google.com/tpu]",
        ),
        (trainer(volumeMounts=[{"name": "x", "mountPath": "/tmp"}]), "spec.containers[0].volumeMounts[0].mountPath"),
        ({"spec": {"containers": [{"name": "trainer-1"}]}}, "spec.containers[0].name"),
        ({"spec": {"containers": [{"name": "sidecar", "image": "x"}]}}, "spec.containers[0].name"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0].name"),
        ({"spec": {"initContainers": [{"name": "trainer", "image": "x"}]}}, "spec.initContainers[0].name"),
        ({"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "spec.volumes[0].name"),
        ({"spec": {"volumes": "all"}}, "spec.volumes"),
        ({"spec": {"nodeSelector": ["x"]}}, "spec.nodeSelector"),
        ({"spec": []}, "spec"),
        ({"kind": "Pod"}, "kind"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"metadata": None}, "metadata"),
        ({"spec": None}, "spec"),
        ({"metadata": {"labels": None}}, "metadata.labels"),
        ({"metadata": {"annotations": None}}, "metadata.annotations"),
        ({"spec": {"containers": None}}, "spec.containers"),
        ({"spec": {"volumes": None}}, "spec.volumes"),
        ({"spec": {"tolerations": None}}, "spec.tolerations"),
        ({"spec": {"nodeSelector": None}}, "spec.nodeSelector"),
        (trainer(env=None), "spec.containers[trainer].env"),
        (trainer(volumeMounts=None), "spec.containers[trainer].volumeMounts"),
        (trainer(resources=None), "spec.containers[trainer].resources.requests"),
        (trainer(resources={"limits": None}), "spec.containers[trainer].resources.limits"),
        ({"spec": {"$patch": "replace"}}, "spec.$patch"),
    ],
)
def test_templates_that_would_break_something(template: Object, path: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        with_template(template)
    assert str(caught.value).startswith(f"{TEMPLATE}.{path}: ")


def test_device_types_have_a_whole_number_of_chips_per_process() -> None:
    for kind in SLICES:
        assert device_type(kind.name).chips_per_host % kind.processes_per_host == 0
