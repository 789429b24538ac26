"""Sets the current Flower task, for versions of Flower that need one to create a message."""

import importlib
import importlib.util


def be_task(run_id: int, node_id: int) -> None:
    """Become a task of a run; versions up to 1.30 (the last one for Python 3.10) have no tasks and need none."""
    if importlib.util.find_spec("flwr.supercore.task_identity") is None:
        return
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    identity.run_id, identity.node_id, identity.task_id = run_id, node_id, 1
