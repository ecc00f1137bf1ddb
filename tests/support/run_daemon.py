"""One orchestrator process: `python -m tests.support.run_daemon RUN_YAML CLUSTER_FOLDER STEP_SECONDS`. 0: done."""

import sys

from orchestrator import logs
from orchestrator.api import load_run
from orchestrator.clusters.local import LocalCluster
from orchestrator.daemon import resume_until_done

logs.configure()
command = (sys.executable, "-m", "tests.support.committing_trainer", sys.argv[3])
outcome = resume_until_done(load_run(sys.argv[1]), LocalCluster(sys.argv[2], command), poll=0.1)
print(f"{outcome.word}: {outcome.message}", flush=True)
sys.exit({"Completed": 0, "Interrupted": 130}.get(outcome.word, 1))
