"""What comes from somebody else runs nothing, and what leaves this machine holds no secret and no script."""

from __future__ import annotations

import base64
import io
import pickle
import random
import re
import stat
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from bs4 import BeautifulSoup
from nbconvert.filters import markdown2html
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typer.testing import CliRunner

from tests.unit.test_runs_tampering import plan, small, text  # noqa: F401  (fixtures)
from workbench import cli, notebooks
from workbench.base.errors import InvalidArgument, WorkbenchError
from workbench.base.secrets import MASK, masked_json, masked_words, python_pattern, rules
from workbench.execution.blocks.sparse_weights import BlockSparseParameters
from workbench.execution.checkpoint import save_load
from workbench.execution.checkpoint.files import COMPLETE, DamagedCheckpoint, digest_of, digests
from workbench.execution.checkpoint.model_export import GuardedReader
from workbench.notebooks.executing import MAX_POINTS, LossCurve, Record
from workbench.notebooks.sharing import recorded_commit
from workbench.planning.plan import Plan
from workbench.record.rundir import RunDir, this_process, write_json
from workbench.runs.environment import environment
from workbench.runs.launching import device_queue
from workbench.runs.launching.launcher import Attempt, write_attempt
from workbench.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a whole checkpoint of one tensor."""
    path = tmp_path / "step-00000004"
    dcp_save({"model.weight": torch.arange(4.0)}, checkpoint_id=path, no_dist=True)
    complete(path)
    return path


def complete(path: Path) -> None:
    files = digests(file for file in path.iterdir() if file.name != COMPLETE)
    facts = {"step": 4, "seconds": 1.0, "signature": "abc", "files": files}
    write_json(path / COMPLETE, {**facts, "digest": digest_of(facts)})


def resumed(path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the weight that a rank loads when it resumes."""
    weight = torch.zeros(4)
    stages = SimpleNamespace(shardings={}, compact=BlockSparseParameters(), model_parameters=dict)
    graph = SimpleNamespace(parameters={"weight": weight})
    trainer = SimpleNamespace(
        plan=SimpleNamespace(signature="abc"),
        optimizer=None,
        stages=stages,
        graph=graph,
        evaluator=None,
        sparse_weights=None,
        average=None,
    )
    monkeypatch.setattr(save_load, "create_state", lambda _: None)
    monkeypatch.setattr(save_load, "entries", lambda _: [("model.weight", "weight", weight)])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save_load.CheckpointStore(trainer, RunDir(path.parent.parent)).load(path)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    return weight


def test_resuming_reads_a_whole_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resumed(checkpoint, monkeypatch).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["names code", "holds a pickle", "is no pickle"])
def test_resuming_executes_nothing_that_a_checkpoint_names(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    executed, file = checkpoint.parent / "executed", checkpoint / ".metadata"
    if kind == "names code":
        file.write_bytes(pickle.dumps(Bomb(executed)))
    elif kind == "is no pickle":
        file.write_bytes(b"\x80\x04nonsense")
    else:  # a value that torch.distributed.checkpoint would unpickle
        index = GuardedReader(checkpoint).read_metadata()
        index.state_dict_metadata["model.weight"] = BytesStorageMetadata()
        file.write_bytes(pickle.dumps(index))
        content = io.BytesIO()
        torch.save(Bomb(executed), content)
        (checkpoint / "__0_0.distcp").write_bytes(content.getvalue())
    complete(checkpoint)
    with pytest.raises(DamagedCheckpoint, match=r"does not belong there|is no tensor|is no index"):
        resumed(checkpoint, monkeypatch)
    assert not executed.exists()


SECRETS = {
    "GITHUB_PAT": "a-personal-token",
    "DATABASE_URL": "postgresql://me:pa55@db.example/x",
    "MYSQL_PWD": "hun7",
    "SLACK_WEBHOOK_URL": "https://hooks.slack.com/services/T0/B0/fromtheenvironment",
}
FOREIGN = {
    "OPENAI_API_KEY": "sk-abcdefghijklmnopqrstuvwx",
    "STRIPE_SECRET": "tiny",
    "HOOK": "https://hooks.slack.com/services/T1/B1/fromelsewhere",
    "MONGO": "mongodb://root:t0pl3vel@db.example/x",
}
"""Secrets that this process does not know: they stand beside their names, or have a known form."""


def notebook(cells: list[Any], path: Path) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_a_shared_notebook_holds_no_secret_by_value_by_name_or_by_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    printed = "\n".join(f"{name}={value}" for name, value in {**SECRETS, **FOREIGN}.items()) + "\nalone: pa55"
    source = "\n".join(f'os.environ["{name}"] = "{value}"' for name, value in FOREIGN.items())
    keep = 'PAD_TOKEN = "[PAD]"\nMAX_TOKENS = 4096\nSORT_KEY = "loss"\nkey = data["hun7ter"]'
    outputs = [
        nbformat.v4.new_output("stream", text=printed),
        nbformat.v4.new_output("display_data", data={"text/html": f"<pre>{dict(FOREIGN)}</pre>", "text/plain": ""}),
    ]
    cell = nbformat.v4.new_code_cell(f"{source}\n{keep}", outputs=outputs)
    shared = notebooks.share(notebook([cell], tmp_path / "mine.ipynb"), tmp_path / "to")
    written = shared.notebook.read_text() + shared.page.read_text()
    for value in ("a-personal-token", "pa55", "hun7 ", "hun7\\n", "fromtheenvironment", "fromelsewhere", "t0pl3vel"):
        assert value not in written
    assert "sk-abcdef" not in written
    assert "tiny" not in nbformat.read(shared.notebook, 4).cells[0].source
    assert nbformat.read(shared.notebook, 4).cells[0].source.endswith(keep)


HEX, MIXED = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "q7Zr2mKx91LpVt0BwYc4"
IN_TEXTS = {
    f"machine api.wandb.ai\n  login user\n  password {HEX}": HEX,
    "default login me password s3cr3t!": "s3cr3t!",
    f'headers = {{"Authorization": "Bearer {MIXED}"}}': MIXED,
    "curl -H 'Authorization: Basic dXNlcjpodW50ZXIy' https://x.example": "dXNlcjpodW50ZXIy",
    f"authorization: token {HEX}": HEX,
    "curl -u me:hunter2 https://x.example": "hunter2",
    f"X-Api-Key: {MIXED}": MIXED,
    "Cookie: session=abcdef0123456789; theme=dark": "abcdef0123456789",
    "{'password': 'correct horse'}": "correct horse",
    "{&#x27;password&#x27;: &#x27;hunter2&#x27;}": "hunter2",
    '{\\"passwd\\": \\"tr0ub4dor\\"}': "tr0ub4dor",
    "db_password=hunter2": "hunter2",
    "password: hunter2": "hunter2",
    "psycopg2.connect('host=x user=me password=hunter2 dbname=y')": "hunter2",
    "postgresql://me:p@ss5@db.example/x": "p@ss5",
    "redis://:hunter22@localhost:6379/0": "hunter22",
    f"git clone https://{MIXED}@git.example/x.git": MIXED,
    f"http://127.0.0.1:8888/lab?token={HEX}": HEX,
    "https://x.blob.core.windows.net/c/f?sv=2022-11-02&sig=Kq7x9vJ2mZ4pL8wR1tY6uB3nC5dF0gH%3D": "Kq7x9vJ2mZ4pL8wR1tY6",
    "AccountName=x;AccountKey=4F1s8Kq0JmZ2pLx7Qw9vB3nT6yU5rE1cD0aH8gI=;EndpointSuffix=y": "4F1s8Kq0JmZ2pLx7Qw9v",
    "ngrok config add-authtoken 2abcDEFghiJKLmnoPQRst": "2abcDEFghiJKLmnoPQRst",
    "the bot is 123456789:AA" + 4 * "b1c2D3e4-": "AA" + 4 * "b1c2D3e4-",
    "it was gsk_" + 5 * "a1B2c3D4e5": 5 * "a1B2c3D4e5",
    "stripe.api_key = 'sk_live_51H8abcDEFghiJKLmno'": "sk_live_51H8abcDEFghiJKLmno",
    f"wandb.login(key='{HEX}')": HEX,
    f'wandb.login("{HEX}")': HEX,
    f"!wandb login {HEX}": HEX,
    f'{{"username": "me", "key": "{HEX[:32]}"}}': HEX[:32],
    f"OpenAI(api_key='{MIXED}')": MIXED,
    f'accessToken="{MIXED}"': MIXED,
    "AKIAIOSFODNN7ABCDEF2,wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzKEYS12": "wJalrXUtnFEMI",
    "SENDGRID=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": "TwL2iGABf9DHoT",
    "SK0123456789abcdef0123456789abcdef of twilio": "0123456789abcdef0123456789abcdef",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7": "MIIEowIBAAKCAQEA7",
    "sshpass -p hunter2x ssh host": "hunter2x",
    f"train.py --api-key {MIXED} --steps 4": MIXED,
    "def connect(password: str = 'hunter2'): ...": "hunter2",
    "os.environ.setdefault('MY_SECRET', 'swordfish')": "swordfish",
    "root:$6$saltsalt$abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH": "abcdefghijklmnopqrstuvwxyz",
}
"""Texts with a secret that this process does not know, and the secret."""
NO_SECRETS = (
    "PAD_TOKEN = '[PAD]'\neos_token=\"</s>\", mask_token: '[MASK]', sort_key='loss', MAX_TOKENS = 4096",
    "tokens_per_s=123456.789, pad_token_id=0, token_type_ids=token_type_ids, key_padding_mask=None, --tokens 4096",
    "key='model.layers.0.self_attn.q_proj.weight', cache_key='train-20261124', monkey = 'banana'",
    "def login(password: str, token: str = None): connect(password=args.password, secret=secret,\nsecrets=secrets,)",
    "api_key=os.environ['WANDB_API_KEY']; headers = {'Authorization': f'Bearer {token}'}; password = getpass.getpass()",
    f"commit {HEX}, 'commit': '{HEX}', sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "run bert-large-20261124-101500, run_id='3f2a9c1b7d8e4f60', uuid 550e8400-e29b-41d4-a716-446655440000",
    "basic understanding of the bearer; the password is required; ['username', 'password', 'email']; PASS: 1234 tests",
    "see https://example.org/x@y:z and http://user.example/a:b@c and git+https://github.com/x/y.git",
)


@pytest.mark.parametrize("text_", IN_TEXTS)
def test_a_secret_is_found_by_what_stands_beside_it_or_by_its_form(text_: str) -> None:
    shown = masked_words(text_)
    assert IN_TEXTS[text_] not in shown
    assert MASK in shown


@pytest.mark.parametrize("text_", NO_SECRETS)
def test_ordinary_words_digests_and_names_stay(text_: str) -> None:
    assert masked_words(text_) == text_


def test_a_short_password_of_the_environment_is_hidden_as_a_word_and_not_within_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "tulip")
    assert masked_words("It is tulip, not tulips.") == f"It is {MASK}, not tulips."


def test_pictures_columns_and_the_project_s_own_pages_stay() -> None:
    drawn = base64.b64encode(random.Random(0).randbytes(300_000)).decode()
    cell = {"image/png": drawn, "bdata": drawn[:500], "text/html": f'<img src="data:image/png;base64,{drawn[:4000]}">'}
    assert masked_json(cell) == cell
    for page in (ROOT / "docs").glob("*.md"):
        assert masked_words(page.read_text()) == page.read_text(), page


def test_a_secret_is_found_at_its_key_and_in_many_labels_at_once() -> None:
    labels = [f"run {number}" for number in range(1000)]
    asked = {"parameters": {"password": "open sesame", "steps": 4}, "labels": [*labels, f"wandb.login(key='{HEX}')"]}
    assert masked_json(asked) == {
        "parameters": {"password": MASK, "steps": 4},
        "labels": [*labels, f"wandb.login(key='{MASK}')"],
    }


def test_every_rule_of_gitleaks_is_a_pattern_of_python_and_means_the_same() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patterns = [rule.pattern for rule in rules()]
    assert len(patterns) > 200
    of_go = r"a(?i)b(?:c(?-i:D)|e)[[:alnum:]]|f\z"
    assert [
        word for word in ("aBcDx", "aBCD1", "abE_", "aBex", "F", "A") if re.fullmatch(python_pattern(of_go), word)
    ] == [
        "aBcDx",
        "aBCD1",
        "aBex",
        "F",
    ]


LINKS = {
    "javascript": "[a](javascript:alert(1))",
    "with an entity": "[a](java&#115;cript:alert(1))",
    "with a tab": '<a href="java&#9;script:alert(1)">a</a>',
    "in capitals": "[a](  JAVASCRIPT:alert(1))",
    "by reference": "[a][1]\n\n[1]: javascript:alert(1)",
    "alone": "<javascript:alert(1)>",
    "data": "[a](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "vbscript": "[a](vbscript:msgbox(1))",
    "of a picture": "[![a](javascript:alert(1))](javascript:alert(1))",
    "in a table": "| a |\n|---|\n| [a](javascript:alert(1)) |",
}


@pytest.mark.parametrize("how", LINKS)
def test_no_link_of_a_shared_notebook_runs_a_script(tmp_path: Path, how: str) -> None:
    shown = nbformat.v4.new_output("display_data", data={"text/markdown": LINKS[how], "text/plain": ""})
    html = nbformat.v4.new_output("display_data", data={"text/html": LINKS[how], "text/plain": ""})
    cells = [nbformat.v4.new_markdown_cell(LINKS[how]), nbformat.v4.new_code_cell("x", outputs=[shown, html])]
    shared = notebooks.share(notebook(cells, tmp_path / "mine.ipynb"), tmp_path / "to")
    (markdown, code) = nbformat.read(shared.notebook, 4).cells
    for source in (markdown.source, code.outputs[0]["data"]["text/markdown"], shared.page.read_text()):
        body = source[source.rfind("<body") + 1 :]
        links = BeautifulSoup(markdown2html(body) if source != body else body, "html.parser").find_all(["a", "img"])
        assert [link for link in links if re.match("java|vb|data", link.get("href", link.get("src", "")).strip())] == []


def test_text_that_only_looks_like_a_script_stays_as_it_is(tmp_path: Path) -> None:
    text_ = (
        "Call `once = a < b` as in\n\n```html\n<script>alert(1)</script>\n```\n\n- [ ] to do, [here](https://x.example)"
    )
    shared = notebooks.share(notebook([nbformat.v4.new_markdown_cell(text_)], tmp_path / "a.ipynb"), tmp_path / "to")
    assert nbformat.read(shared.notebook, 4).cells[0].source == text_
    page = BeautifulSoup(shared.page.read_text(), "html.parser")
    assert "<script>alert(1)</script>" in page.body.text
    assert page.body.find("input")["type"] == "checkbox"


def test_a_shared_notebook_runs_nothing_in_a_browser(tmp_path: Path) -> None:
    attack = (
        "<script>alert(1)</script><img src=x onerror=alert(2)><iframe srcdoc='<p>'></iframe><svg onload=alert(3)></svg>"
        "<a href='javascript:alert(4)'>a</a><a href='jav&#x61;script:alert(5)'>b</a>"
    )
    data = {"text/html": f"<b>bold</b>{attack}", "application/javascript": "alert(6)", "image/svg+xml": "<svg/>"}
    cells = [
        nbformat.v4.new_markdown_cell(f"# Title\n\n> quoted, where 1 < 2\n\n{attack}"),
        nbformat.v4.new_code_cell("x", outputs=[nbformat.v4.new_output("display_data", data=data)]),
    ]
    shared = notebooks.share(notebook(cells, tmp_path / "mine.ipynb"), tmp_path / "to")
    title, code = nbformat.read(shared.notebook, 4).cells
    assert title.source.startswith("# Title\n\n> quoted")
    assert code.outputs[0]["data"]["text/html"].startswith("<b>bold</b>")
    for content in (shared.page.read_text(), shared.notebook.read_text()):
        for part in ("<script>alert", "onerror=alert", "<iframe", "onload=alert", "javascript:alert", "alert(6)"):
            assert part not in content, part
    assert any("what a browser would run" in note for note in shared.notes)


def test_a_command_line_is_recorded_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--api-key", "short", "--db-password=x", "GITHUB_PAT=y", "--steps", "4", "hf_" + "a" * 20]
    words += ["-p", f"KEY={HEX}", "-p", "API_KEY", "short", "--parameter=db_password=hunter2", "-p", "tokens=1000"]
    words += ["--header", f"Authorization: Bearer {MIXED}", "-H", f"X-Api-Key: {MIXED}", "--key-dim=64", "a@b:c"]
    monkeypatch.setattr("sys.argv", words)
    expected = ["train.py", "--api-key", "***", "--db-password=***", "GITHUB_PAT=***", "--steps", "4", "***"]
    expected += ["-p", "KEY=***", "-p", "API_KEY", "***", "--parameter=db_password=***", "-p", "tokens=1000"]
    expected += ["--header", "Authorization: Bearer ***", "-H", "X-Api-Key: ***", "--key-dim=64", "a@b:c"]
    assert environment()["command"] == expected


def test_a_run_directory_is_its_owners(text: Path, plan: Plan) -> None:  # noqa: F811
    run = write_attempt(Attempt(small(text), plan))
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    for file in (run.experiment, run.plan, run.environment, run.started, run.events):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    chosen = write_attempt(Attempt(small(text), plan, directory=run.path.parent / "own"))
    assert stat.S_IMODE(chosen.path.stat().st_mode) == 0o700


def test_a_job_file_takes_no_value_that_begins_a_line_or_an_option(text: Path, plan: Plan) -> None:  # noqa: F811
    run = Run(write_attempt(Attempt(small(text), plan)).path)
    for value in ("gpu\ntouch x #", "gpu;touch x", "--uid=0", "gpu $(id)", ""):
        for name in ("time", "partition", "account"):
            with pytest.raises(InvalidArgument, match=name):
                run.slurm(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="option"):
        run.slurm(options=["--comment=a\ntouch x"])
    made = run.slurm(partition="gpu-long,a_b", time="1-12:00:00", options=["--constraint=h200"])
    assert "#SBATCH --partition=gpu-long,a_b\n" in made


def test_reproducing_shows_what_would_run_and_runs_nothing_unasked(tmp_path: Path) -> None:
    curve = LossCurve.from_json({"step": packed(b""), "loss": packed(b""), "steps": 0, "digest": ""})
    run = {"name": "a", "experiment": {}, "plan": {}, "data_fingerprint": None, "state": "", "curve": curve.to_json()}
    record = {"format": 1, "time": 0.0, "environment": {"git": {"commit": "--upload-pack=touch x"}}, "runs": [run]}
    marker = tmp_path / "executed"
    cell = nbformat.v4.new_code_cell(f"open({str(marker)!r}, 'w')\x1b[2K")
    value = nbformat.v4.new_notebook(cells=[cell], metadata={"workbench": record})
    path = tmp_path / "theirs.ipynb"
    nbformat.write(value, path)
    with pytest.raises(WorkbenchError, match="which is none"):
        notebooks.reproduce(path, tmp_path / "again", at_commit=True, trust=True)
    record["environment"] = {}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata={"workbench": record}), path)
    with pytest.raises(WorkbenchError, match="nothing was executed yet") as shown:
        notebooks.reproduce(path, tmp_path / "again")
    assert f"open({str(marker)!r}, 'w')" in str(shown.value)
    assert "\x1b" not in str(shown.value)
    assert not marker.exists()
    assert not (tmp_path / "again").exists()
    answer = CliRunner().invoke(cli.app, ["reproduce", str(path), "--to", str(tmp_path / "again")], input="n\n")
    assert "Execute it?" in answer.stdout
    assert (answer.exit_code, marker.exists()) == (1, False)


@pytest.mark.parametrize("commit", ["--upload-pack=x", "-f", "HEAD", "", "abcdefg;x", 5])
def test_a_recorded_commit_that_is_none_is_refused(commit: Any) -> None:
    with pytest.raises(WorkbenchError, match="which is none"):
        recorded_commit(Record(0.0, {"git": {"commit": commit}}, ()))


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def test_a_record_expands_to_no_more_than_a_curve_can_have() -> None:
    bomb = packed(bytes(8 * (MAX_POINTS + 2)))
    assert len(bomb) < 1000
    for text_ in (bomb, packed(b"\0" * 7), "?", "AAAA", 5):
        with pytest.raises(WorkbenchError, match="damaged"):
            LossCurve.from_json({"step": text_, "loss": text_, "steps": 1, "digest": ""})


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "5", '{"run": 5}', '{"run": "/x", "pool": ["cpu"], "count": 1, "devices": null, "supervisor": {}}'],
)
def test_a_ticket_of_nonsense_does_not_break_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    (device_queue.queue_folder() / "000001.json").write_text(content)
    ticket = device_queue.take_ticket(RunDir(tmp_path / "run"), pool=["cpu"], count=1, supervisor=this_process())
    assert ticket.ahead() == []
    assert ticket.try_start() == ("cpu",)
