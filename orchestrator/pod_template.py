"""A user's pod template merged into ours, as Kubernetes merges: lists of named things by their names. Pure.

What would break something untildone relies on is refused, with the field and the reason; everything else is the user's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.errors import ConfigurationError

Object = dict[str, Any]

FIELD = "spec.podTemplate"

# Lists that are merged by a key (as the patchMergeKey of Kubernetes' own types); every other list is replaced.
_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "tolerations": ("key", "operator", "effect", "value"),
    "ports": ("containerPort", "protocol"),
    "schedulingGates": ("name",),
    "resourceClaims": ("name",),
}

# Fields of the pod that are ours, and why.
_POD_FIELDS = {
    "restartPolicy": "JobSet restarts the gang as a whole; a container that came back alone would find no peers",
    "activeDeadlineSeconds": "the run ends when its target is committed, not by a clock; a limit belongs on the queue",
    "hostname": "its processes find each other by the names that JobSet gives",
    "subdomain": "its processes find each other by the names that JobSet gives",
    "setHostnameAsFQDN": "its processes find each other by the names that JobSet gives",
    "automountServiceAccountToken": "a trainer needs no access to the cluster's API",
    "terminationGracePeriodSeconds": "give spec.gracePeriod, which the trainer knows as well",
    "serviceAccountName": "give spec.serviceAccount",
    "serviceAccount": "give spec.serviceAccount",
    "nodeName": "the scheduler and Kueue place it",
    "schedulerName": "Kueue's quota and the placement of a slice rely on the default scheduler",
    "schedulingGates": "Kueue opens and closes the gates",
    "ephemeralContainers": "they are added to running pods only, by kubectl debug",
}
# Fields of a trainer's container.
_TRAINER_FIELDS = {
    "image": "give spec.image",
    "command": "give spec.command",
    "args": "give spec.command, with its arguments",
    "restartPolicy": "JobSet restarts the gang as a whole",
    "stdin": "nobody can type",
    "tty": "nobody can type",
}
_LABEL_DOMAINS = ("untildone.dev/", "jobset.sigs.k8s.io/", "kueue.x-k8s.io/", "batch.kubernetes.io/")
_OWN_ANNOTATIONS = ("untildone.dev/", "jobset.sigs.k8s.io/", "alpha.jobset.sigs.k8s.io/", "batch.kubernetes.io/")
_OWN_LABELS = ("app.kubernetes.io/managed-by", "job-name", "controller-uid")
_OWN_ENV = ("UNTILDONE_", "MEGASCALE_")
_TPU = "google.com/tpu"
_SELECTORS = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")
_OWN_VOLUMES = ("/tmp", "/dev/shm")


def merged(template: Object, wanted: Mapping[str, Any], trainers: tuple[str, ...]) -> Object:
    """`template` with `wanted` merged in. `trainers` are the names of the trainer's containers: a container `trainer`
    in `wanted` means all of them. Raises ConfigurationError naming spec.podTemplate.<path>.
    """
    _check(wanted, trainers)
    spec = dict(wanted.get("spec") or {})
    if spec.get("containers"):
        spec["containers"] = [copy for c in spec["containers"] for copy in _for_all(c, trainers)]
    result = _merge(template, {**wanted, "spec": spec} if spec else wanted, FIELD)
    assert isinstance(result, dict)
    _check_kept(template, result, trainers)
    return result


def _for_all(container: Object, trainers: tuple[str, ...]) -> Iterator[Object]:
    if container["name"] != trainers[0]:
        yield container
        return
    for name in trainers:
        yield {**container, "name": name}


def _merge(ours: Any, theirs: Any, path: str) -> Any:
    """Mappings by key, named lists by name, everything else replaced; null takes a field away."""
    if isinstance(ours, dict) and isinstance(theirs, Mapping):
        result = dict(ours)
        for key, value in theirs.items():
            if key.startswith("$"):
                raise ConfigurationError(f"{path}.{key}: patch directives are not known here; null takes a field away")
            if value is None:
                result.pop(key, None)
            elif key in _MERGE_KEYS and isinstance(value, list):
                result[key] = _merge_lists(result.get(key) or [], value, _MERGE_KEYS[key], f"{path}.{key}")
            else:
                result[key] = _merge(result.get(key), value, f"{path}.{key}")
        return result
    if isinstance(theirs, Mapping):
        return _merge({}, theirs, path)
    return theirs


def _merge_lists(ours: list[Any], theirs: list[Any], keys: tuple[str, ...], path: str) -> list[Any]:
    result = list(ours)
    for index, item in enumerate(theirs):
        if not isinstance(item, Mapping):
            raise ConfigurationError(f"{path}[{index}]: must be a mapping")
        identity = _identity(item, keys)
        place = next((i for i, known in enumerate(result) if _identity(known, keys) == identity), None)
        whole = _merge(result[place] if place is not None else {}, item, f"{path}[{index}]")
        if "env" in path.rpartition(".")[2] and place is not None:
            whole = dict(item)  # a value replaces a valueFrom, and the other way round
        if place is None:
            result.append(whole)
        else:
            result[place] = whole
    return result


def _identity(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(item.get(key) for key in keys)


# -- what is refused


def _check(wanted: Mapping[str, Any], trainers: tuple[str, ...]) -> None:
    _only(wanted, ("metadata", "spec"), FIELD)
    metadata = _mapping(wanted.get("metadata"), f"{FIELD}.metadata")
    _only(metadata, ("labels", "annotations"), f"{FIELD}.metadata")
    for kind, domains, names in (
        ("labels", _LABEL_DOMAINS, _OWN_LABELS),
        ("annotations", _OWN_ANNOTATIONS, ()),
    ):
        for key in _mapping(metadata.get(kind), f"{FIELD}.metadata.{kind}"):
            if key.startswith(domains) or key in names:
                _refuse(f"metadata.{kind}[{key}]", "untildone, JobSet and Kueue find their pods by it")
    spec = _mapping(wanted.get("spec"), f"{FIELD}.spec")
    for field, why in _POD_FIELDS.items():
        if field in spec:
            _refuse(f"spec.{field}", why)
    for key in _SELECTORS:
        if key in _mapping(spec.get("nodeSelector"), f"{FIELD}.spec.nodeSelector"):
            _refuse(f"spec.nodeSelector[{key}]", "the ladder's deviceType says it")
    for index, volume in enumerate(_list(spec.get("volumes"), "spec.volumes")):
        if volume.get("name") in ("shm", *(f"tmp-{name}" for name in trainers)):
            _refuse(f"spec.volumes[{index}].name", f"{volume['name']} is a volume of untildone's; choose another name")
    for field in ("containers", "initContainers"):
        for index, container in enumerate(_list(spec.get(field), f"spec.{field}")):
            _check_container(container, f"spec.{field}[{index}]", trainers, main=field == "containers")


def _check_container(container: Mapping[str, Any], path: str, trainers: tuple[str, ...], *, main: bool) -> None:
    name = container.get("name")
    if not isinstance(name, str) or not name:
        _refuse(f"{path}.name", "a container is merged by its name; the trainer's is called trainer")
    assert isinstance(name, str)
    if main and name in trainers[1:]:
        _refuse(
            f"{path}.name", f"{name} is the second process of a host; what is said of {trainers[0]} holds for it too"
        )
    trainer = main and name == trainers[0]
    if not main and name in trainers:
        _refuse(f"{path}.name", "it is the name of the trainer's container; choose another")
    if main and not trainer and name.startswith(f"{trainers[0]}-"):
        _refuse(f"{path}.name", f"names that begin with {trainers[0]}- are the trainer's; choose another")
    if main and not trainer:
        _refuse(
            f"{path}.name",
            f"{name}: a container beside the trainer would keep the pod alive when the trainer has ended; make it a "
            "sidecar: spec.initContainers with restartPolicy: Always",
        )
    if trainer:
        for field, why in _TRAINER_FIELDS.items():
            if field in container:
                _refuse(f"{path}.{field}", why)
        for index, variable in enumerate(_list(container.get("env"), f"{path}.env")):
            if str(variable.get("name", "")).startswith(_OWN_ENV):
                _refuse(f"{path}.env[{index}].name", f"{variable['name']} is set by untildone")
        for index, mount in enumerate(_list(container.get("volumeMounts"), f"{path}.volumeMounts")):
            if mount.get("mountPath") in _OWN_VOLUMES:
                _refuse(f"{path}.volumeMounts[{index}].mountPath", f"untildone mounts {mount['mountPath']}")
    resources = _mapping(container.get("resources"), f"{FIELD}.{path}.resources")
    for kind in ("limits", "requests"):
        if _TPU in _mapping(resources.get(kind), f"{FIELD}.{path}.resources.{kind}"):
            _refuse(f"{path}.resources.{kind}[{_TPU}]", "the chips of a host are divided among its trainer processes")


def _check_kept(ours: Object, result: Object, trainers: tuple[str, ...]) -> None:
    """Nothing that untildone put there was taken away by a null, at whatever level."""
    for part, fields in (
        ("metadata", ("labels", "annotations")),
        ("spec", ("containers", "nodeSelector", "tolerations", "volumes")),
    ):
        _check_contained(part, {}, result.get(part))
        for field in fields:
            before = ours[part][field] if field != "containers" else []
            _check_contained(f"{part}.{field}", before, result[part].get(field))
    for name in trainers:
        path = f"spec.containers[{name}]"
        before, after = (next(c for c in pod["spec"]["containers"] if c["name"] == name) for pod in (ours, result))
        own = [variable for variable in before["env"] if variable["name"].startswith(_OWN_ENV)]
        _check_contained(f"{path}.env", own, after.get("env"))
        _check_contained(f"{path}.volumeMounts", before["volumeMounts"], after.get("volumeMounts"))
        for kind in ("requests", "limits"):
            found = (after.get("resources") or {}).get(kind)
            _check_contained(f"{path}.resources.{kind}", before["resources"][kind], found)


def _check_contained(path: str, ours: Object | list[Object], found: Any) -> None:
    """`found` is of the same kind, and has every key with its value, or every item, of `ours`."""
    if isinstance(ours, dict):
        whole = isinstance(found, dict) and all(found.get(key) == value for key, value in ours.items())
    else:
        whole = isinstance(found, list) and all(item in found for item in ours)
    if not whole:
        _refuse(path, "untildone needs what it puts there; add to it, and take nothing away")


def _refuse(path: str, why: str) -> None:
    raise ConfigurationError(f"{FIELD}.{path}: may not be set: {why}")


def _only(given: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigurationError(f"{path}.{key}: may not be set; known here: {', '.join(known)}")


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{path}: must be a mapping, not {type(value).__name__}")
    return value


def _list(value: Any, path: str) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ConfigurationError(f"{FIELD}.{path}: must be a list of mappings")
    return value
