"""Trackio as a tracker: a database on this machine, a Trackio server (`TRACKIO_SERVER_URL`), or a Space of Hugging Face
(`TRACKIO_SPACE_ID`).

Trackio speaks the calls of W&B's client. Three things differ. A run is known by its name, and its newest run of a name
goes on. A row is added each time that something is logged, with the time at which it arrived, and none is replaced: a
run whose rows no longer hold is deleted and written anew. What fails is a warning: `confirm` counts.

Written for Trackio 0.43. `SQLiteStorage.query_project`, `RemoteClient`, `import_inbox_dir` and `canonical_project_name`
are not public; `tests/unit/test_runs_trackio.py` fails when one of them is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from workbench.base.arguments import LARGEST_INTEGER
from workbench.record.rundir import RunDir, read_json, write_json
from workbench.runs.tracking.delivery import sync_limit_s
from workbench.runs.tracking.rows import Row, RowTail
from workbench.runs.tracking.tracker import Opened, lacks

PAGE = 10_000
"""Rows that a query may return (`_QUERY_MAX_ROWS` of Trackio)."""
CONFIRM_LIMIT_S = 15.0
"""Seconds without a further row after which no more are expected."""
POLL_S = 0.5
SAMPLES = "samples"
RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")
"""Names that Trackio does not take for a metric; ours get a `_` behind them."""
_NUMBERS = {math.inf: "Infinity", -math.inf: "-Infinity"}


class TrackioTracker:
    """A run at Trackio, whose rows are known by their values."""

    title = "Trackio"

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._session: Any = None
        self._client: Any = None
        self._logged = 0
        self._project = ""

    def refusal(self) -> str:
        if importlib.util.find_spec("trackio") is None:
            return "Trackio is not installed here. Run `pip install trackio`."
        space, server, token = _server()
        if server and not space and not token:
            return (
                "TRACKIO_SERVER_URL names a server without a write token. Take the address with ?write_token=… that "
                "`trackio show` prints, or set TRACKIO_WRITE_TOKEN."
            )
        return ""

    obstacle = refusal

    def destination(self) -> str:
        space, server, _ = _server()
        return space or server

    def open(self, tail: RowTail, config: Mapping[str, Any], offline: bool) -> Opened:
        """Open the run for the rows of `tail`: it goes on where its rows there are the first of these.

        Otherwise it is deleted and written anew, or, where the server lets nobody delete, goes on as a run of its own
        in the same group.
        """
        if self._session is not None:
            self._session.finish()
        known, to = read_json(self._run.tracker), "" if offline else self.destination()
        self._project = str(known["project"])
        self._connect(to)
        how, held, is_known, agrees = "", 0, False, True
        for name, step, metrics in self._rows(str(known["id"])):
            known["name"], is_known = name, True  # it may have another name by now
            agrees = held < len(tail.backlog) and _is_same(tail.backlog[held], step, metrics)
            if not agrees:
                break
            held += 1
        if not held or not agrees or not self._begin(known, config, resume="must"):
            held = 0
            if is_known:
                why = "its rows there no longer held"
                if self._delete(known):
                    how = f"written anew, because {why}"
                else:
                    known = {**known, "name": f"{self._run.path.name} again"}
                    how = f"a run of its own, because {why} and the server does not delete runs"
            self._begin(known, config, resume="never")
        self._logged = held
        write_json(self._run.tracker, {**known, "id": self._session.id})
        return Opened("; ".join(filter(None, (self._where(to), how))), held)

    def _connect(self, to: str) -> None:
        """Import Trackio for a server, or for the database of this machine; raise if the server does not answer."""
        space, _, token = _server()
        if not (to and to == space):
            os.environ["HF_HUB_OFFLINE"] = "1"  # or each run asks Hugging Face who its user is, whatever it is sent to
        if to:
            if self._client is not None:
                return
            # Trackio buffers what it cannot send, and would send it once more beside what the events hold.
            shutil.rmtree(self._run.tracking / "trackio", ignore_errors=True)
            os.environ["TRACKIO_DIR"] = str(self._run.tracking / "trackio")
            from huggingface_hub import get_token
            from trackio.remote_client import RemoteClient

            is_space = to == space
            self._client = RemoteClient(to, get_token() if is_space else None, None if is_space else token)
        else:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)

    def _begin(self, known: Mapping[str, Any], config: Mapping[str, Any], resume: str) -> bool:
        """Start the client on the run; return False if it goes on as another run of the same name."""
        import trackio

        names = {name: known[name] for name in ("project", "name", "group")}
        # The devices' load stands in the events; Trackio's own samples would be those of the recorder's node.
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._session = trackio.init(**names, config=dict(config), resume=resume, private=True, **quiet)
        if resume == "must" and self._session.id != known["id"]:
            self._session.finish()
            return False
        return True

    def _where(self, to: str) -> str:
        if not to:
            return f"`trackio show --project {shlex.quote(self._project)}`"
        return to if "://" in to else f"https://huggingface.co/spaces/{to}"

    def log(self, row: Row) -> None:
        metrics = _stored(row)
        if row.samples:
            import trackio

            data = list(map(list, row.samples))
            metrics[SAMPLES] = trackio.Table(columns=["step", "prompt", "what the model wrote"], data=data)
        self._session.log(metrics, step=row.step)
        self._logged += 1

    def attach(self, files: Mapping[str, Mapping[str, Path]], facts: Mapping[str, float]) -> None:
        """Attach files as artifacts; the facts, for which Trackio has no place, are the metadata of the plan."""
        import trackio

        for artifact_type, named in files.items():
            described = dict(facts) if artifact_type == "plan" else {}
            artifact = trackio.Artifact(f"{artifact_type}-{self._session.id}", type=artifact_type, metadata=described)
            for name, path in named.items():
                artifact.add_file(str(path), name=name)
            self._session.log_artifact(artifact)

    def confirm(self, tail: RowTail, ended_well: bool) -> None:  # noqa: ARG002 - Trackio keeps no state of a run
        identity = self._session.id
        self._session.finish()
        self._session = None
        has, deadline = -1, 0.0
        while True:
            count = self._count(identity)
            if count == self._logged:
                return
            if count != has:
                has, deadline = count, time.monotonic() + min(CONFIRM_LIMIT_S, sync_limit_s())
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        there = {step for _, step, _ in self._rows(identity)}
        raise lacks(set(tail.times), there, self._logged, has)

    def _delete(self, known: Mapping[str, Any]) -> bool:
        """Delete the run; return False where the server lets nobody do so."""
        import trackio

        with contextlib.suppress(Exception):  # a Space deletes for those alone who have signed in there
            if self._client is not None:
                called = {"project": self._project, "run": known["name"], "run_id": known["id"]}
                return bool(self._client.predict(api_name="/delete_run", **called))
            return any(run.delete() for run in trackio.Api().runs(self._project) if run.id == known["id"])
        return False

    def _count(self, identity: str) -> int:
        [row] = self._ask(f"SELECT COUNT(*) AS n FROM metrics WHERE run_id = {_quoted(identity)}") or [{"n": 0}]
        return int(row["n"])

    def _rows(self, identity: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield the run's name, the step and the metrics of each row that is there, in the order of logging."""
        last, found = -1, list[dict[str, Any]]([{}]) * PAGE
        while len(found) == PAGE:
            after = f"WHERE run_id = {_quoted(identity)} AND id > {last} ORDER BY id LIMIT {PAGE}"
            found = self._ask(f"SELECT id, run_name, step, metrics FROM metrics {after}")
            for row in found:
                last = int(row["id"])
                yield str(row["run_name"]), int(row["step"]), json.loads(row["metrics"])

    def _ask(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query of the project's database; none if there is no such project yet."""
        if self._client is not None:
            from trackio.utils import canonical_project_name  # a project is a file there: "my.model" is "mymodel"

            if canonical_project_name(self._project) not in self._client.predict(api_name="/get_all_projects"):
                return []
            found = self._client.predict(api_name="/query_project", project=self._project, query=query)
            return list(found["rows"])
        from trackio.fragments import import_inbox_dir
        from trackio.sqlite_storage import SQLiteStorage

        import_inbox_dir()  # on a network file system, rows wait in files until a dashboard reads them
        try:
            return list(SQLiteStorage.query_project(self._project, query)["rows"])
        except FileNotFoundError:
            return []


def _server() -> tuple[str, str, str]:
    """Return the Space, the address of the server and its write token that the environment names; each may be empty."""
    url = urlsplit(os.environ.get("TRACKIO_SERVER_URL", ""))
    token = (parse_qs(url.query).get("write_token") or [os.environ.get("TRACKIO_WRITE_TOKEN", "")])[0]
    return os.environ.get("TRACKIO_SPACE_ID", ""), url._replace(query="", fragment="").geturl(), token


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _stored(row: Row) -> dict[str, Any]:
    """Return the metrics of a row as Trackio stores them, which knows integers of 64 bits and JSON's numbers."""

    def number(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_INTEGER:
            return float(value)
        if isinstance(value, float) and not math.isfinite(value):
            return _NUMBERS.get(value, "NaN")
        return value

    return {f"{key}_" if key in RESERVED else key: number(value) for key, value in row.metrics.items()}


def _is_same(row: Row, step: int, metrics: Mapping[str, Any]) -> bool:
    """Return True if Trackio stored those metrics of a row; of texts it is enough that there are some."""
    return row.step == step and {**_stored(row), **({SAMPLES: metrics.get(SAMPLES)} if row.samples else {})} == metrics
