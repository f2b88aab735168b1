"""A Weights & Biases server small enough for a test: what the real client asks of it while it uploads one run."""

import gzip
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER = {"id": "RW50", "name": "tester", "entity": "tester", "username": "tester", "email": "t@example.invalid"}
USER |= {"admin": False, "flags": "{}", "teams": {"edges": []}}
VERSIONS = {"max_cli_version": "99.0.0", "min_cli_version": "0.10.0"}
SERVER = {"cliVersionInfo": VERSIONS, "latestLocalVersionInfo": None, "features": []}


class FakeWandb:
    """Listens on `url` until `close`; `histories` maps a run's id to the rows that were uploaded for it."""

    def __init__(self) -> None:
        self.histories = defaultdict(list)
        self.complete = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str, variables: dict) -> dict:
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": self._bucket(variables), "inserted": True}}
        if "createRunFiles" in query:
            names = variables.get("files", [])
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in names]
            return {"createRunFiles": {"runID": variables.get("run"), "uploadHeaders": [], "files": files}}
        if "bucket(" in query:
            return {"model": {"id": "UHJq", "name": "p", "entity": USER, "bucket": None}}
        return {"viewer": USER, "serverInfo": SERVER, "entity": None}

    def _bucket(self, variables: dict) -> dict:
        name = variables.get("name") or variables.get("id")
        project = {"id": "UHJq", "name": variables.get("project") or "p", "entity": {"id": "RW50", "name": "tester"}}
        fields = {"displayName": name, "description": None, "config": "{}", "sweepName": None, "historyLineCount": 0}
        return {"id": f"B_{name}", "name": name, "project": project, **fields}

    def receive(self, run: str, update: dict) -> None:
        for name, content in (update.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                self.histories[run] += [json.loads(line) for line in content["content"]]
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
            self._body()
            self._reply({})

        def do_POST(self):
            body = self._body()
            stream = re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                self._reply({"data": fake.answer(asked["query"], asked.get("variables") or {})})
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

        def _reply(self, value: dict) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
