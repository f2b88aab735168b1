"""Secrets in texts that leave this machine: values of environment variables, and what looks like a key by itself.

Nothing here is certain. A secret that is printed in pieces, or under a name of its own, is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

MASK = "***"
WORDS = (
    *("KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS"),
    *("PWD", "PAT", "CREDENTIAL", "CREDENTIALS", "AUTH", "WEBHOOK", "WEBHOOK_URL", "DSN", "PIN"),
)
SECRET_NAME = re.compile(rf"(?:.*_)?(?:{'|'.join(WORDS)})(?:_.*)?|.*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL).*")
"""Names, in capitals, of variables that hold a secret: `GITHUB_PAT`, `MYSQL_PWD`, `WANDB_API_KEY`."""
SURELY_SECRET = re.compile(
    r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|PAT|WEBHOOK|DSN|PIN"
    r"|(?:API|ACCESS|SECRET|PRIVATE|SIGNING)_?KEY|(?:DATABASE|WEBHOOK)_URL)"
)
"""Names that mean nothing else. Other names (`SORT_KEY`, `MAX_TOKENS`) may have ordinary short values."""
ADDRESS_NAME = re.compile(r"(?:.*_)?(?:URL|URI|DATABASE)(?:_.*)?")
"""Names of variables whose address may hold a password: `DATABASE_URL`."""
NO_SECRETS = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "XAUTHORITY", "KEYBOARD_KEY"})
SECRET_LENGTH = 8
"""Shortest value that is masked wherever it occurs; a shorter one is masked as a whole word only."""
SHORTEST = 4
"""Shortest value that is masked at all: one of three letters is found in every text."""
ORDINARY = frozenset({"true", "false", "none", "null", "auto", "disabled", "enabled", "default", "localhost"})
OPTION = re.compile(
    r"--?(?:[\w-]*[-_])?(?:key|token|secret|password|passwd|pass|pwd|pat|auth|webhook|dsn)", re.IGNORECASE
)
"""Options of a command whose value is a secret: `--api-key`."""
RECOGNISED = re.compile(
    r"""
    gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,}                           # GitHub
    | glpat-[\w-]{16,} | hf_[A-Za-z0-9]{16,} | sk-[\w-]{16,}                   # GitLab, Hugging Face, OpenAI and others
    | xox[abeoprs]-[\w-]{10,} | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{30,}     # Slack, AWS, Google
    | wandb_v1_\w{20,} | pypi-[\w-]{20,} | npm_[A-Za-z0-9]{30,}
    | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}                                   # JSON Web Tokens
    | (?<=hooks\.slack\.com/)[\w/-]{8,} | (?<=discord\.com/api/webhooks/)[\w/-]{8,}
    | (?<=webhook\.office\.com/)[\w/@-]{8,}
    | (?<=://)[^\s/:@'"<>\\]*:[^\s/@'"<>\\]+(?=@)                             # user:password@ of an address
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----
    """,
    re.VERBOSE | re.DOTALL,
)
"""Texts that are secrets wherever they stand."""
ASSIGNED = re.compile(
    r"""(?P<name>\b[A-Z][A-Z0-9_]{2,})(?P<between>["']?\]?\s*[=:,]\s*)(?P<quote>["'])(?P<value>[^"'\n\[<{][^"'\n]*)(?P=quote)"""
)
"""A quoted value that is assigned to a name in capitals, in code or in a printed dict."""
PRINTED = re.compile(r"(?m)^(?P<name>(?:export )?[A-Z][A-Z0-9_]{2,})(?P<between>=)(?P<value>\S+)$")
"""A line of `env`."""


def secrets(least: int = SECRET_LENGTH) -> list[str]:
    """Return the values of environment variables that are named like secrets, the longest first."""
    values = {
        value
        for name, value in os.environ.items()
        if is_secret(name, surely=len(value) < SECRET_LENGTH)
        and value.lower() not in ORDINARY
        and not os.path.exists(value)
    }
    addresses = (value for name, value in os.environ.items() if ADDRESS_NAME.fullmatch(name.upper()))
    values |= {password for value in addresses for password in re.findall(r"://[^/@:]*:([^/@]+)@", value)}
    return sorted((value for value in values if len(value) >= least), key=len, reverse=True)


def is_secret(name: str, surely: bool = False) -> bool:
    """Return True for the name of a variable that holds a secret; `surely` asks for a name that means nothing else."""
    pattern = SURELY_SECRET if surely else SECRET_NAME
    return name.upper() not in NO_SECRETS and bool(pattern.fullmatch(name.upper()))


def masked(text: str) -> str:
    """Return a text without secrets of the environment of at least `SECRET_LENGTH`, and without `RECOGNISED` ones."""
    for value in secrets():
        text = text.replace(value, MASK)
    return RECOGNISED.sub(MASK, text)


def masked_words(text: str) -> str:
    """Return a text for people without secrets: as `masked`, and short ones, and those beside their names."""
    for value in secrets(SHORTEST):
        if len(value) < SECRET_LENGTH:
            text = re.sub(rf"(?<![\w.]){re.escape(value)}(?![\w.])", MASK, text)
    text = ASSIGNED.sub(_without_value, masked(text))
    return PRINTED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name = match["name"].removeprefix("export ")
    if not is_secret(name, surely=True) or os.path.exists(match["value"]) or match["value"].lower() in ORDINARY:
        return match[0]
    quote = match.groupdict().get("quote") or ""
    return f"{match['name']}{match['between']}{quote}{MASK}{quote}"


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets: `--api-key ***`, `--password=***`."""
    shown, is_value = list[str](), False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = OPTION.fullmatch(name) or (equals and is_secret(name))
        shown.append(MASK if is_value else f"{name}={MASK}" if secret and equals else masked(argument))
        is_value = bool(secret and not equals and name.startswith("-"))
    return shown
