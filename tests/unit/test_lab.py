"""The endpoints behind JupyterLab's launcher: who may call them, and what they write where."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tornado.web
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.serverapp import ServerWebApplication

import workbench as wb
from tests.patience import PATIENCE_S, eventually
from workbench.lab.handlers import HANDLERS
from workbench.notebooks.executing import templates

ROOT = Path(__file__).resolve().parents[2]
JUPYTER = ROOT / "workbench" / "lab" / "jupyter"
TOKEN = "a-token-of-the-test"


def unauthenticated(handlers: dict[str, type[tornado.web.RequestHandler]]) -> list[str]:
    """Return the verbs that answer anyone, as Jupyter itself judges them."""
    judge = ServerWebApplication._check_handler_auth
    return [verb for path, handler in handlers.items() for verb in judge(None, path, handler)]  # type: ignore[arg-type]


def test_every_verb_of_every_handler_asks_who_calls() -> None:
    assert HANDLERS
    assert all(issubclass(handler, APIHandler) for handler in HANDLERS.values())
    assert unauthenticated(dict(HANDLERS)) == []


def test_a_verb_that_asks_nobody_is_found() -> None:
    class Open(JupyterHandler):
        def get(self) -> None:
            self.finish("anyone")

    assert "GET of Open" in unauthenticated({"open": Open})[0]


@contextlib.contextmanager
def jupyter_server(root: Path) -> Iterator[tuple[str, Path]]:
    """Start a Jupyter server that finds the extension by its configuration alone; yield its address and its root."""
    (root / "notebooks").mkdir()
    folders = {f"JUPYTER_{name}_DIR": str(root / ".jupyter" / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    paths = {"PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_PATH": str(JUPYTER), "JUPYTER_PATH": str(JUPYTER)}
    arguments = ["--no-browser", "--allow-root", "--ip=127.0.0.1"]
    arguments += [f"--ServerApp.root_dir={root / 'notebooks'}", f"--IdentityProvider.token={TOKEN}"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, **folders, **paths},
            cwd=root,
        )

    def address() -> str | None:
        """Return where the server says that it listens, on a port that nobody else has taken."""
        assert process.poll() is None, (root / "log").read_text()
        said = re.search(r"http://127\.0\.0\.1:[1-9]\d*(?=/)", (root / "log").read_text())
        return said and said[0]

    try:
        url = eventually(address, (root / "log").read_text)
        eventually(lambda: ask(f"{url}/api")[0] == 200, (root / "log").read_text)
        assert "JupyterServerAuthWarning" not in (root / "log").read_text()
        yield url, root / "notebooks"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with jupyter_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def ask(url: str, body: Any = None, token: str | None = TOKEN, verb: str | None = None) -> tuple[int, Any]:
    """Return the status and the JSON of an answer; 0 while nothing listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=verb)
    if token is not None:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else text.decode()
    except urllib.error.URLError:
        return 0, None


@pytest.mark.parametrize("path", HANDLERS)
@pytest.mark.parametrize("verb", ["GET", "POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_caller_without_the_token_gets_403(server: tuple[str, Path], path: str, verb: str, token: str | None) -> None:
    status, _ = ask(f"{server[0]}/workbench/{path}", None if verb == "GET" else {}, token, verb)
    implemented = getattr(HANDLERS[path], verb.lower()) != tornado.web.RequestHandler._unimplemented_method
    assert status == 403 if implemented else status in (403, 405)
    assert not list(server[1].iterdir())


def test_the_launcher_gets_a_card_for_each_template(server: tuple[str, Path]) -> None:
    status, answer = ask(f"{server[0]}/workbench/templates")
    assert status == 200
    assert {card["name"] for card in answer["templates"]} == set(templates())
    assert all(card["title"] and card["description"].endswith(".") for card in answer["templates"])


def test_a_copy_stands_beside_the_users_notebooks_under_a_name_of_its_own(server: tuple[str, Path]) -> None:
    folder = server[1] / "mine <b>bold"
    folder.mkdir()
    for name in ("bert_scaling", "bert_scaling-2", "bert_scaling-3"):
        status, answer = ask(f"{server[0]}/workbench/notebooks", {"template": "bert_scaling", "folder": folder.name})
        assert (status, answer) == (201, {"path": f"{folder.name}/{name}.ipynb"})
    copied, template = (
        json.loads(path.read_text()) for path in (folder / f"{name}.ipynb", templates()["bert_scaling"])
    )
    assert [cell["source"] for cell in copied["cells"]] == [cell["source"] for cell in template["cells"]]


def test_the_form_of_a_template_shows_names_defaults_comments_and_choices(server: tuple[str, Path]) -> None:
    status, answer = ask(f"{server[0]}/workbench/parameters?template=bert_scaling")
    fields = {field["name"]: field for field in answer["parameters"]}
    assert status == 200
    assert fields["preset"]["choices"] == ["demo", "full", "rehearsal"]
    assert fields["limited_steps"] == {"name": "limited_steps", "default": "100", "help": "", "choices": []}
    assert "presidential addresses" in fields["corpus"]["help"]


def test_a_copy_holds_the_values_of_the_form_and_keeps_the_comments(server: tuple[str, Path]) -> None:
    given = {
        "preset": "full",
        "steps": "40",
        "corpus": "<img src=x onerror=alert(1)> 'é\".txt",
        "pilot_rates": "[1e-3]",
    }
    status, answer = ask(f"{server[0]}/workbench/notebooks", {"template": "bert_scaling", "parameters": given})
    assert status == 201
    cells = json.loads((server[1] / answer["path"]).read_text())["cells"]
    source = "".join(next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))["source"])
    names: dict[str, Any] = {}
    exec(source, names)
    assert (names["preset"], names["steps"], names["pilot_rates"]) == ("full", 40, [1e-3])
    assert names["corpus"] == given["corpus"]
    assert "# None: as many as the tokens ask for" in source


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("steps", "-5", "Experiment.steps=-5 must be 1 or more."),
        ("steps", "abc", "Experiment.steps='abc' is not a whole number. Give a whole number."),
        ("seed", "1.5", "bert_scaling cannot use seed=1.5. Give a whole number."),
        ("seed", "__import__('os').abort()", "bert_scaling cannot use seed=\"__import__('os').abort()\". Give a whole"),
        ("preset", "100 %d", "bert_scaling cannot use preset='100 %d'. Give one of demo, full, rehearsal."),
        ("scatter", "1e999", "scatter=inf is not finite. Give a finite number."),
        ("stepps", "5", "bert_scaling.ipynb has no parameter 'stepps'. Did you mean 'steps'?"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence_and_nothing_is_written(
    server: tuple[str, Path], name: str, text: str, sentence: str
) -> None:
    before = sorted(server[1].rglob("*.ipynb"))
    status, answer = ask(f"{server[0]}/workbench/notebooks", {"template": "bert_scaling", "parameters": {name: text}})
    assert (status, answer["message"][: len(sentence)]) == (400, sentence)
    assert sorted(server[1].rglob("*.ipynb")) == before


@pytest.mark.parametrize("template", templates())
def test_each_template_says_which_cell_shows_its_curve(template: str) -> None:
    cells = json.loads(templates()[template].read_text())["cells"]
    assert [cell["cell_type"] for cell in cells if "curve" in cell["metadata"].get("tags", [])] == ["code"]


@pytest.mark.parametrize("folder", ["..", "../elsewhere", "/../..", "a/../../b"])
def test_a_folder_outside_the_servers_root_is_refused(server: tuple[str, Path], folder: str) -> None:
    before = sorted(server[1].parent.rglob("*.ipynb"))
    (server[1].parent / "elsewhere").mkdir(exist_ok=True)
    assert ask(f"{server[0]}/workbench/notebooks", {"template": "sweep", "folder": folder})[0] in (400, 404)
    assert sorted(server[1].parent.rglob("*.ipynb")) == before


@pytest.mark.parametrize("name", ["sweeep", "../../etc/passwd", "/etc/passwd", None])
def test_a_template_that_there_is_not_is_refused_with_the_known_names(server: tuple[str, Path], name: Any) -> None:
    status, answer = ask(f"{server[0]}/workbench/notebooks", {"template": name, "folder": ""})
    assert status == 404
    assert "bert_scaling" in answer["message"] or "'sweep'" in answer["message"]


ODD = (None, True, -1, 10**40, 0.5, "", "x" * 5000, "a\0b", "../../etc", "%s%d{}", [], [["a"]], {}, {"a": {"a": 1}})
ODD_BODIES = (
    *(b"", b"[]", b"5", b'"x"', b"null", b"true", b"\xff\xfe{}", b'{"a":', b"\x00", b"{}{}", b'{"path": "\\ud800"}'),
    *(b"9" * 6000, b'{"value": ' + b"9" * 6000 + b"}", b"[" * 100_000, b'{"a":' * 100_000, b'{"paths": NaN}'),
)
FIELDS = {
    "run": {"action": "tag", "path": "/nowhere", "value": "a"},
    "curves": {"paths": ["/nowhere"], "seen": [1]},
    "notebooks": {"template": "opt_zero", "folder": "", "parameters": {}},
    "session": {"path": "absent.ipynb"},
}


def raw(url: str, body: bytes | None) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Authorization": f"token {TOKEN}"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["message"]


def test_every_endpoint_answers_odd_requests_with_a_sentence(server: tuple[str, Path]) -> None:
    asked = {f"{path} {body[:30]!r}": (path, body) for path in FIELDS for body in ODD_BODIES}
    for path, fields in FIELDS.items():
        for name, odd in ((name, odd) for name in fields for odd in ODD):
            asked[f"{path} {name}={odd!r:.30}"] = (path, json.dumps({**fields, name: odd}).encode())
    for name, odd in (("steps", odd) for odd in (*ODD, "0x" + "f" * 6000, "9" * 6000, "[" * 3000, "nan")):
        body = {**FIELDS["notebooks"], "parameters": {name: odd}}
        asked[f"notebooks {name}={odd!r:.30}"] = ("notebooks", json.dumps(body).encode())
    for query in ("since=" + "9" * 6000, "since=-1", "since=%FF", "index=%00", "index=1&since=5&since=x"):
        asked[f"runs {query[:20]}"] = (f"runs?{query}", None)
    for query in ("template=", "template=" + "x" * 3000, "template=%00", "template=%FF", "template=..%2F..%2Fx"):
        asked[f"parameters {query[:20]}"] = (f"parameters?{query}", None)
    answers = {what: raw(f"{server[0]}/workbench/{path}", body) for what, (path, body) in asked.items()}
    assert {what: answer for what, answer in answers.items() if answer[0] >= 500} == {}
    posted = [(what, answers[what]) for what, (_, body) in asked.items() if body is not None]
    assert {what for what, (status, said) in posted if status == 400 and not said.endswith(".")} == set()
    assert answers["curves b'5'"] == (400, "The request is a JSON int. Send an object.")
    assert answers[f"run {b'[' * 30!r}"] == (400, "The request is no JSON that can be read: it is nested too deeply.")
    for made in server[1].rglob("*.ipynb"):
        made.unlink()


def test_the_extension_has_the_version_of_the_package_and_fetches_nothing_from_elsewhere() -> None:
    folder = JUPYTER / "labextensions" / "workbench"
    assert json.loads((folder / "package.json").read_text())["version"] == wb.__version__
    modules = {path.name: path.read_text() for path in (folder / "static").glob("*.js")}
    imported = {name for text in modules.values() for name in re.findall(r"from '(?:\./)?([^']+)'", text)}
    assert imported <= modules.keys()
    assert not [name for name, text in modules.items() if re.search(r"https?://(?!www\.w3\.org)|innerHTML", text)]
