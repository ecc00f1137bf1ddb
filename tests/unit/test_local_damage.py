"""The local cluster's records: what cannot be read is an unknown answer, never a gang that is gone."""

from pathlib import Path

import pytest

from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.local import LocalCluster


@pytest.mark.parametrize("folder", ["gangs/demo-a1", "ended/demo-a1.some-uid"])
@pytest.mark.parametrize("damage", ["not JSON", "no file", "of another shape"])
def test_a_record_that_cannot_be_read_is_no_absence(tmp_path: Path, folder: str, damage: str) -> None:
    cluster = LocalCluster(tmp_path, ["true"])
    assert cluster.observe("demo").gangs == ()
    record = tmp_path / folder / "request.json"
    record.parent.mkdir()
    if damage == "no file":
        record.mkdir()
    else:
        record.write_text("{" if damage == "not JSON" else '{"uid": 1}')
    with pytest.raises(ClusterUnavailable):
        cluster.observe("demo")
