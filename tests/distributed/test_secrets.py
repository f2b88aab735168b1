"""No key of the user's is in any file: not of a run, its logs and W&B files, nor of a notebook or page made of it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from tests.distributed.test_launch import HERE, ROOT
from tests.patience import PATIENCE_S, eventually
from workbench import notebooks
from workbench.runs.tracking import delivery as tracking

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from fake_wandb import FakeWandb

SECRETS = {
    "WANDB_API_KEY": "f00dfeed" * 5,
    "HF_TOKEN": "hf_NobodyMayEverReadThis",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE",
    "DATABASE_PASSWORD": "correct horse battery staple",
}

CELL = f"""
    import os, sys
    sys.path.insert(0, {str(HERE)!r})
    import workbench as wb
    from test_launch import experiment, launch, plan_for
    asked = experiment(5).replace(name="<img src=x onerror=alert(1)>")
    run = launch(asked, plan_for(asked), worker="standin_worker").wait({PATIENCE_S})
    os.environ["WORKBENCH_STANDIN_FAIL_RANK"] = "1"
    os.environ["WORKBENCH_STANDIN_FAIL_MESSAGE"] = "<img src=x onerror=alert(2)>"
    failed = launch(asked, plan_for(asked), worker="standin_worker")
    try:
        failed.wait({PATIENCE_S})
    except Exception as error:
        print(error)
    display(run.plan, failed, wb.list_runs())
"""


@pytest.fixture
def server():
    fake = FakeWandb()
    yield fake
    fake.close()


def test_no_key_is_in_any_file_and_names_are_escaped_in_every_page(tmp_path, monkeypatch, server):
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SECRETS, "WANDB_BASE_URL": server.url, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name, folder in (("HOME", "."), ("WORKBENCH_HOME", "cache"), ("WORKBENCH_RUNS", "runs"), ("TMPDIR", "tmp")):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(CELL))]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "mine.ipynb")
    done = notebooks.execute(tmp_path / "mine.ipynb", tmp_path / "out")
    shared = notebooks.share(done.notebook, tmp_path / "shared")
    finished, failed = done.runs
    eventually(lambda: not any(tracking.pending(run.directory) for run in done.runs))
    kinds = sorted(name.partition("-")[0] for name, one in server.artifacts.items() if one["state"] == "COMMITTED")
    assert kinds == ["notebook", "notebook", "plan", "plan"]
    assert (finished.status.state, failed.status.state) == ("finished", "failed")

    written: dict[Path, bytes] = {}
    for path in tmp_path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # W&B's service removes its files when it ends
            written |= {path: path.read_bytes()} if path.is_file() else {}
    assert len(written) > 40
    for path, content in written.items():
        for name, value in SECRETS.items():
            assert value.encode() not in content, f"{name} is in {path}"
    uploaded = json.dumps(server.buckets) + json.dumps(server.histories) + str(server.files)
    assert not [name for name, value in SECRETS.items() if value in uploaded]

    assert failed.status.message == "rank 1 (stage 1): FloatingPointError: <img src=x onerror=alert(2)>"
    pages = [path.read_text() for path in (done.page, shared.page, finished.directory.plan_page)]
    for page in (*pages, failed._repr_html_()):  # names and failures reach every page, and none as markup
        assert "<img src=x" not in page
        assert "&lt;img src=x onerror=alert(" in page
    for page in pages[:2]:
        assert page.count("&lt;img src=x onerror=alert(2)") >= 2  # printed, and as a run
        assert "&lt;img src=x onerror=alert(1)" in page  # the model in the plan


def test_the_lab_that_make_starts_answers_this_machine_alone_and_asks_for_a_token(tmp_path):
    made = subprocess.run(["make", "--dry-run", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"/jupyter lab (.*)$", made, flags=re.MULTILINE)
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path)}
    environment |= {"HOME": str(tmp_path), "JUPYTER_TOKEN": ""}
    command = [sys.executable, "-m", "jupyterlab", *line.split(), "--no-browser", "--port=0"]
    lab = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        (known,) = eventually(lambda: list(tmp_path.glob("jpserver-*.json")))
        server = eventually(lambda: json.loads(known.read_text() or "{}"))
        assert server["hostname"] == "127.0.0.1"
        assert len(server["token"]) >= 32
        url = f"{server['url']}api/contents"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            _get(url)
        assert _get(f"{url}?token={server['token']}") == 200
    finally:
        lab.terminate()
        lab.wait(PATIENCE_S)


def _get(url: str) -> int:
    def answered() -> int | None:
        try:
            return int(urllib.request.urlopen(url, timeout=PATIENCE_S).status)
        except urllib.error.HTTPError:
            raise
        except OSError:  # it does not listen yet
            return None

    return eventually(answered)
