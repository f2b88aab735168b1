"""A Weights & Biases server small enough for a test: it lets the real client upload, resume and read runs.

Also what a warm process does for tests, so that not each of their recorders imports the client anew.
"""

import gzip
import json
import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.patience import PATIENCE_S

USER = {"id": "RW50", "name": "tester", "entity": "tester", "username": "tester", "email": "t@example.invalid"}
USER |= {"admin": False, "flags": "{}", "teams": {"edges": []}}
VERSIONS = {"max_cli_version": "99.0.0", "min_cli_version": "0.10.0"}
SERVER = {"cliVersionInfo": VERSIONS, "latestLocalVersionInfo": None, "features": []}


class FakeWandb:
    """A server that listens on `url` until `close`; `histories` maps a run's id to the rows uploaded for it.

    `refuses` is the HTTP status that answers every upload of steps, `rewinds` says whether it can take a run back to an
    earlier step, and rows of the steps that it `drops` are lost. `asked` counts the questions by their names.
    """

    def __init__(self, refuses: int | None = None, rewinds: bool = True, drops=()) -> None:
        self.refuses, self.rewinds, self.drops = refuses, rewinds, drops
        self.asked = Counter()
        self.histories = defaultdict(list)
        self.buckets = {}
        self.complete = set()
        self.artifacts = {}
        self.files = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.handle_error = lambda *_: None  # a client that leaves is no error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str, variables: dict) -> dict:
        """The `data` of a GraphQL answer; what nobody here asks about is null."""
        name = re.search(r"(?:query|mutation) (\w+)", query)
        self.asked[name and name[1]] += 1
        answerer = getattr(self, f"_{name[1]}", None) if name else None
        if answerer is not None:
            return answerer(variables)
        return {"viewer": USER, "serverInfo": SERVER, "entity": None, "project": None}

    def _UpsertBucket(self, variables: dict) -> dict:  # noqa: N802
        run = variables.get("name") or variables.get("id").removeprefix("B_")
        known = self.buckets.setdefault(run, {})
        known |= {key: value for key, value in variables.items() if value is not None}
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": not self.histories[run]}}

    def _bucket(self, run: str) -> dict:
        known = self.buckets[run]
        project = {"id": "UHJq", "name": known.get("project") or "p", "entity": {"id": "RW50", "name": "tester"}}
        fields = {"displayName": known.get("displayName", run), "sweepName": None, "description": None}
        lines = len(self.histories[run])
        return {"id": f"B_{run}", "name": run, "project": project, "historyLineCount": lines, "config": "{}", **fields}

    def _RewindRun(self, variables: dict) -> dict:  # noqa: N802
        run, step = variables["runName"], variables["metricValue"]
        self.histories[run] = [row for row in self.histories[run] if row["_step"] <= step]
        return {"rewindRun": {"rewoundRun": self._bucket(run)}}

    def _RunResumeStatus(self, variables: dict) -> dict:  # noqa: N802
        model = {"id": "UHJq", "name": "p", "entity": {"id": "RW50", "name": "tester"}, "bucket": None}
        run = variables["name"]
        if self.histories.get(run):
            rows = self.histories[run]
            counts = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
            tails = {"historyTail": json.dumps([json.dumps(rows[-1])]), "eventsTail": "[]", "wandbConfig": '{"t": 1}'}
            described = {"config": self.buckets[run].get("config", "{}"), "tags": [], "notes": None}
            metrics = {"summaryMetrics": json.dumps(rows[-1])}
            model["bucket"] = {**self._bucket(run), **counts, **tails, **described, **metrics}
        return {"model": model}

    def _CreateRunFiles(self, variables: dict) -> dict:  # noqa: N802
        names = variables.get("files", [])
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in names]
        return {"createRunFiles": {"runID": variables.get("run"), "uploadHeaders": [], "files": files}}

    def _CreateArtifact(self, variables: dict) -> dict:  # noqa: N802
        asked = variables["input"]
        name = asked["artifactCollectionName"]
        self.artifacts[name] = {"type": asked["artifactTypeName"], "state": "PENDING"}
        artifact = {"id": f"A_{name}", "state": "PENDING", "artifactSequence": {"id": "S", "latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def _CreateArtifactManifest(self, variables: dict) -> dict:  # noqa: N802
        file = {"id": "F", "uploadUrl": f"{self.url}/upload/manifest/{variables['artifactID']}", "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": variables["artifactID"], "file": file}}}

    def _UpdateArtifactManifest(self, variables: dict) -> dict:  # noqa: N802
        asked = {"artifactID": variables["artifactManifestID"]}
        return {"updateArtifactManifest": self._CreateArtifactManifest(asked)["createArtifactManifest"]}

    def _CreateArtifactFiles(self, variables: dict) -> dict:  # noqa: N802
        def edge(file: dict) -> dict:
            collection = file["artifactID"].removeprefix("A_")
            url = f"{self.url}/upload/{collection}/{file['name']}"
            fields = {"storagePath": file["name"], "uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None}
            return {"node": {**fields, "artifact": {"id": file["artifactID"]}}}

        return {"createArtifactFiles": {"files": {"edges": [edge(f) for f in variables["input"]["artifactFiles"]]}}}

    def _CommitArtifact(self, variables: dict) -> dict:  # noqa: N802
        name = variables["artifactID"].removeprefix("A_")
        self.artifacts[name]["state"] = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "d"}}}

    def _Run(self, variables: dict) -> dict:  # noqa: N802
        run = variables["name"]
        if run not in self.buckets:
            return {"project": {"run": None}}
        known = self.buckets[run]
        state = "finished" if run in self.complete else "running"
        fields = {"state": state, "config": known.get("config", "{}"), "group": known.get("groupName")}
        times = {"createdAt": "2026-11-21T09:00:00Z", "heartbeatAt": "2026-11-21T09:10:00Z"}
        empty = dict.fromkeys(("commit", "description", "notes", "sweepName", "jobType"))
        metrics = {"summaryMetrics": "{}", "systemMetrics": "{}", "historyLineCount": len(self.histories[run])}
        identity = {"id": f"B_{run}", "name": run, "displayName": known.get("displayName", run), "tags": []}
        keys = {"historyKeys": self._keys(run), "projectId": "1", "readOnly": False, "user": USER}
        return {"project": {"run": {**identity, **fields, **times, **empty, **metrics, **keys}}}

    def _RunHistoryKeys(self, variables: dict) -> dict:  # noqa: N802
        return {"project": {"run": {"historyKeys": self._keys(variables["name"])}}}

    def _keys(self, run: str) -> dict:
        rows = self.histories[run]
        return {"lastStep": rows[-1]["_step"] if rows else -1, "sets": [], "keys": {}}

    def _RunParquetHistory(self, variables: dict) -> dict:  # noqa: N802
        live = self.histories[variables["runName"]]
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": live}}}}

    def _HistoryPage(self, variables: dict) -> dict:  # noqa: N802
        first, end = int(variables["minStep"]), int(variables["maxStep"])
        rows = [json.dumps(row) for row in self.histories[variables["run"]] if first <= row["_step"] < end]
        return {"project": {"run": {"history": rows}}}

    def receive(self, run: str, update: dict) -> None:
        for name, content in (update.get("files") or {}).items():
            if name == "wandb-history.jsonl":  # lines from an offset on, which replace those that are there
                rows, first = [json.loads(line) for line in content["content"]], content["offset"]
                self.histories[run][first : first + len(rows)] = [row for row in rows if row["_step"] not in self.drops]
        if update.get("complete"):
            self.complete.add(run)


def _handler_of(fake: FakeWandb) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Say nothing."""

        def do_GET(self):
            self._reply({})

        def do_PUT(self):
            fake.files[self.path.removeprefix("/upload/")] = self._body()
            self._reply({})

        def do_POST(self):
            body = self._body()
            stream = re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                if "mutation RewindRun" in asked["query"] and not fake.rewinds:
                    self._reply({"errors": [{"message": 'Cannot query field "rewindRun" on type "Mutation".'}]}, 400)
                else:
                    self._reply({"data": fake.answer(asked["query"], asked.get("variables") or {})})
            elif stream and fake.refuses:
                self._reply({"error": "refused"}, fake.refuses)
            elif stream:
                fake.receive(stream[1], json.loads(body))
                self._reply({"exitcode": None, "limits": {}})
            else:
                self._reply({})

        def _body(self) -> bytes:
            if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _reply(self, value: dict, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def record(directory: str, upload: bool, environment: Mapping[str, str], limits: Mapping[str, float]) -> int:
    """Record a run in this process as the recorder does in one of its own, and end W&B's service as its exit does.

    `limits` are constants of the recorder; its exit code is returned.
    """
    import wandb

    from workbench.runs.tracking import recorder, wandb_tracker

    replace_environment(environment)
    for name, value in limits.items():
        setattr(recorder if hasattr(recorder, name) else wandb_tracker, name, value)
    try:
        return recorder.main(directory, upload)
    finally:
        wandb.teardown()


def download(address: str, environment: Mapping[str, str]) -> Path:
    """Copy a run from the server in this process, which has imported the client."""
    import wandb

    from workbench.runs.tracking import wandb_tracker

    replace_environment(environment)
    wandb_tracker.ANSWER_LIMIT_S = PATIENCE_S
    try:
        return wandb_tracker.download_run(address)
    finally:
        wandb.teardown()


def replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
