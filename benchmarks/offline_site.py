"""Pack the packages that a GPU node without a network lacks into one archive of about 14 MB.

    python benchmarks/offline_site.py OUT.tar.xz INSTALLED [--python 3.12] [--without NAME ...] [--copy NAME ...]

INSTALLED is a file with the names of the packages that the node has, one a line (`pip list --format=freeze` there, or
names alone). All others of requirements.lock, and pytest, are downloaded as wheels for Linux on x86-64, and unpacked
without their tests. `--without` leaves more out; by default what JupyterLab's server needs and a notebook does not.
PyTorch, transformers, accelerate, NumPy and what they need are taken to be there. `--copy` adds packages as they are
installed here, without what they need and without compiled modules: `--copy deepspeed hjson megatron-core` for the
peers of throughput.py, 2 MB. On the node:

    mkdir site && tar xJf OUT.tar.xz -C site
    export PYTHONPATH=$PWD/site:$PWD JUPYTER_PATH=$PWD/site/share/jupyter
    python -m workbench execute templates/bert_scaling.ipynb --to reports -p preset=full -p corpus=TEXTS
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THERE = "torch transformers accelerate numpy tokenizers safetensors huggingface-hub hf-xet sympy networkx mpmath jinja2"
SERVER = (
    "jupyterlab jupyterlab-server jupyter-server jupyter-events jupyter-lsp jupyter-builder jupyter-server-terminals "
    "notebook-shim widgetsnbextension babel debugpy argon2-cffi argon2-cffi-bindings cffi pycparser terminado lark "
    "rfc3987-syntax async-lru json5 send2trash prometheus-client sqlalchemy alembic mako greenlet wandb protobuf "
    "googleapis-common-protos setuptools httpx2 httpcore2 markupsafe"
)
GLIBC = (39, 36, 35, 34, 33, 32, 31, 28, 27, 26, 24, 17, 12, 5)
"""Minor versions of glibc 2 whose wheels run there; pip matches each by name."""
LEFT_OUT = ("jedi/third_party", "plotly/labextension", "plotly/package_data/widgetbundle.js")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("installed", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--without", nargs="*", default=SERVER.split())
    parser.add_argument("--copy", nargs="*", default=[])
    asked = parser.parse_args()
    lock = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    there = {plain(re.split(r"[=\s]", line)[0]) for line in asked.installed.read_text().splitlines() if line.strip()}
    there |= {*THERE.split(), *map(plain, asked.without)}
    wanted = [f"{name}=={version}" for name, version in lock if plain(name) not in there]
    wanted = [each for each in wanted if not each.startswith("opentelemetry")]
    wanted += [
        name
        for name in ("pytest", "pytest-timeout", "pytest-xdist", "execnet", "pluggy", "iniconfig")
        if name not in there
    ]
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        site.mkdir()
        if wanted:
            download(wanted, wheels, asked.python)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        for name in asked.copy:
            copy_installed(name, site)
        for name in LEFT_OUT:
            remove(site / name)
        for tests in [*site.rglob("tests"), *site.rglob("*.pyi")]:
            remove(tests)
        with tarfile.open(asked.out, "w:xz") as archive:
            archive.add(site, ".")
    print(f"{asked.out}  {asked.out.stat().st_size / 1e6:.1f} MB, {len(wanted)} packages")


def plain(name: str) -> str:
    """Return a package's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(packages: list[str], folder: Path, python: str) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = [option for each in platforms for option in ("--platform", each)]
    options += ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", folder, *options, *packages], check=True)


def unpack(wheel: Path, site: Path) -> None:
    """Lay a wheel's packages, and its files of data, into `site`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for data in site.glob("*.data"):
        for part in ("purelib", "platlib", "data"):
            if (data / part).is_dir():
                shutil.copytree(data / part, site, dirs_exist_ok=True)
        remove(data)


def copy_installed(name: str, site: Path) -> None:
    """Copy what is Python of a package that is installed here: compiled modules are of this machine's Python."""
    for file in metadata.files(name) or ():
        if ".." not in file.parts and file.suffix not in (".pyc", ".so"):
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), site / file)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
