"""Secrets in texts that are stored or leave this machine: by the environment, by their form, and by what stands beside.

The forms are the rules of gitleaks in `secret_rules.toml`, without its rule for every key, which takes a tokenizer's
values for keys; names, headers, addresses and options are looked at here instead. Nothing of this is certain: a secret
that is printed in pieces, or under a name that tells nothing, is not found.
"""

from __future__ import annotations

import functools
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MASK = "***"
RULES = Path(__file__).with_name("secret_rules.toml")
WORDS = (
    *("KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS"),
    *("PWD", "PAT", "CREDENTIAL", "CREDENTIALS", "AUTH", "WEBHOOK", "WEBHOOK_URL", "DSN", "PIN"),
)
SECRET_NAME = re.compile(rf"(?:.*_)?(?:{'|'.join(WORDS)})(?:_.*)?|.*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL).*")
"""Names, in capitals, of environment variables that hold a secret: `GITHUB_PAT`, `MYSQL_PWD`, `WANDB_API_KEY`."""
SURELY_SECRET = re.compile(
    r".*(?:PASSWORD|PASSWD|PASSPHRASE|(?:API|ACCESS|ACCOUNT|ENCRYPTION|MASTER|PRIVATE|SECRET|SIGNING|SUBSCRIPTION)_?KEY)"
    r"|(?:.*_)?(?:(?:ACCESS|API|AUTH|BEARER|BOT|REFRESH|SECURITY|SESSION)_?TOKEN|(?:CLIENT_?)?SECRETS?|CREDENTIALS?|PWD)"
    r"|(?:.*_)?(?:WEBHOOK|DSN|(?:DATABASE|WEBHOOK)_URL|AUTHORIZATION|X_(?:AMZ|GOOG)_SIGNATURE|SHARED_?ACCESS_?KEY)"
)
"""Names that mean nothing else, written in capitals with `_`: `apiKey` and `api-key` are `API_KEY`."""
SURELY_IN_CAPITALS = re.compile(r"(?:.*_)?(?:TOKEN|PASS|PAT|PIN)")
"""Names that mean nothing else if they were written in capitals; `token` and `pass` are ordinary words."""
PERHAPS_SECRET = re.compile(r"(?:.*_)?(?:KEY|TOKEN|AUTH|PASS|PAT|SIG|JWT|SAS)")
"""Names of secrets whose value looks drawn at random; `sort_key` and `pad_token` have others."""
ADDRESS_NAME = re.compile(r"(?:.*_)?(?:URL|URI|DATABASE)(?:_.*)?")
"""Names of variables whose address may hold a password: `DATABASE_URL`."""
NO_SECRETS = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "XAUTHORITY", "KEYBOARD_KEY"})
SECRET_LENGTH = 8
"""Shortest value that is masked wherever it occurs; a shorter one is masked as a whole word only."""
SHORTEST = 4
"""Shortest value that is masked at all: one of three letters is found in every text."""
ORDINARY = frozenset(
    {"true", "false", "none", "null", "auto", "disabled", "enabled", "default", "localhost", "required", "optional"}
)
PLACEHOLDER = re.compile(
    r"\$\w+|(?:\w+ )?\$?\{.*\}|\$?\(.*\)|<.*>|\[.*\]|%.*%|(.)\1*|(?:~|\.{0,2})/[\w./-]*|[A-Z_]*", re.DOTALL
)
"""Values that stand for another one, special tokens, paths, and the words in capitals of a usage: `--api-key KEY`."""
NUMBER = re.compile(r"[\d.,_eE+-]+%?")
EXPRESSION = re.compile(r"[A-Za-z_]+|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""An unquoted value that is a word of a text, or a name in code."""
DATA = re.compile(r"(;base64,[A-Za-z0-9+/=\s]{100,}|[A-Za-z0-9+/=]{2000,})")
"""Pictures and columns of numbers in base64, which hold no words."""
KNOWN: tuple[tuple[str, str], ...] = (
    ("gh", r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}"),
    ("glpat-", r"\bglpat-[\w-]{16,}"),
    ("hf_", r"\bhf_[A-Za-z0-9]{16,}"),
    ("sk-", r"\bsk-[\w-]{16,}"),
    ("xox", r"\bxox[abeoprs]-[\w-]{10,}"),
    ("akia", r"\bAKIA[A-Z0-9]{16}[,;:\t ]+[A-Za-z0-9/+]{40}\b|\bAKIA[A-Z0-9]{16}\b"),  # with the secret beside it
    ("asia", r"\bASIA[A-Z0-9]{16}\b"),
    ("aiza", r"\bAIza[\w-]{30,}"),
    ("wandb", r"\bwandb_v1_\w{20,}|\bwandb login (?:--relogin )?[0-9a-f]{40}\b"),
    ("pypi-", r"\bpypi-[\w-]{20,}"),
    ("npm_", r"\bnpm_[A-Za-z0-9]{30,}"),
    ("gsk_", r"\bgsk_[A-Za-z0-9]{40,}"),
    ("r8_", r"\br8_[A-Za-z0-9]{30,}"),
    ("xai-", r"\bxai-[A-Za-z0-9]{40,}"),
    (":aa", r"\b\d{8,10}:AA[\w-]{32,}"),  # a bot of Telegram
    ("k_", r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{10,}"),
    ("whsec_", r"\bwhsec_[A-Za-z0-9]{20,}"),
    ("eyj", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"),
    ("$", r"\$(?:2[aby]|5|6|apr1)\$[./A-Za-z0-9$]{20,}"),  # the hash of a password
    ("/", r"hooks\.slack\.com/(?P<secret>[\w/-]{8,})|discord\.com/api/webhooks/(?P<of_discord>[\w/-]{8,})"),
    ("/", r"webhook\.office\.com/(?P<secret>[\w/@-]{8,})|api\.telegram\.org/bot(?P<of_telegram>[\w:-]{20,})"),
    ("://", r"""://(?P<secret>[^\s/:@'"<>\\?#]*:[^\s/'"<>\\?#]+)@|://(?P<alone>[A-Za-z0-9_-]{20,})@"""),
    (
        "private key",
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*?(?=\n[ \t]*\n|\Z))",
    ),
)
"""Keywords and patterns of what is a secret wherever it stands; those of gitleaks ask for the exact length of a key."""
QUOTE = r"""\\?["']|&quot;|&\#x27;|&\#39;|&\#34;"""
NAMED = tuple(
    re.compile(pattern, re.VERBOSE | re.MULTILINE)
    for pattern in (
        rf"""(?<![\w-])(?P<name>[A-Za-z_][\w-]*)        # name="value", "name": "value", name: str = "value"
        (?=(?P<between> (?:{QUOTE})\]?\s*(?:=>|[!=]=|[=:,]) | \s*(?:=>|[:!=]=|:\s*[\w.\[\]|\ ]{{1,40}}=|[:=]) )
        \s*[rbfuRBFU]{{0,2}}(?P<quote>{QUOTE})(?P<value>[^"'\n&\\]{{4,}})(?P=quote))""",
        r"""(?<![\w-])(?P<name>[A-Za-z_][\w-]*)=(?P<value>[^\s"'`;&,|(){}\[\]<>\\]{4,})(?![(\[{"'])""",
        r"""^[ \t]*(?:export[ ]|set[ ]|-[ ])?(?P<name>[A-Za-z_][\w-]*)[ \t]*[:=][ \t]*
        (?P<value>[^\s"'`(){}\[\]<>]{3,}[^\s"'`(){}\[\]<>,;])[,;]?[ \t]*(?:\#.*)?$""",  # a line of YAML, INI or `env`
        r"""(?P<name>\b[A-Za-z]+-[A-Za-z-]+):[ ]*(?P<value>[^\s"'`<>{}\\&]{4,})""",  # a header: X-Api-Key: value
        r"""(?<![\w-])--(?P<name>[A-Za-z][\w-]+)(?:=|[ ]+)["']?(?P<value>[^\s"'`<>\[\]-][^\s"'`<>\[\]]{3,})""",
    )
)
"""Values beside the name that tells what they are."""
BESIDE = tuple(
    re.compile(pattern, re.VERBOSE | re.IGNORECASE)
    for pattern in (
        rf"""\bauthorization(?:{QUOTE})?\]?\s*[:=,]\s*(?:{QUOTE})?
        (?:bearer|basic|token|digest|apikey|bot)\s+(?P<value>[\w.~+/=:-]{{4,}})(?![\w.]*[(\[{{])""",
        rf"""\bauthorization(?:{QUOTE})?\]?\s*[:=,]\s*(?:{QUOTE})?(?P<value>(?=[\w.~+/=:-]*\d)[\w.~+/=:-]{{8,}})""",
        r"""\b(?:bearer|basic)\s+(?P<value>(?=[\w.~+/-]*\d)[\w.~+/-]{12,}=*)""",
        r"""\b(?:set-)?cookie:\s*(?P<value>[^\s"'<>][^"'\n<>]*=[^"'\n<>]{8,})""",
        r"""\blogin\s+[^\s/]\S*\s+(?:account\s+\S+\s+)?password\s+(?P<value>\S+)""",  # a line of .netrc
        r"""[{]\s*"auth"\s*:\s*"(?P<value>[a-z0-9+/]{12,}={0,2})\"""",  # Docker's config.json
        r"""\bauthtoken\s+(?P<value>[\w-]{20,})""",  # of ngrok
        r"""\bmachine\s+\S+\s+password\s+(?P<value>\S+)""",
        r"""\b(?:sshpass|mysql|mysqldump|redis-cli|(?:docker|podman|az)\s+login)\b[^\n|;]*?\s-(?:p|a)\s?(?P<value>[^\s"'-]\S{3,})""",
        r"""\bcurl\b[^\n|;]*?\s(?:-u|--user)[ =]?["']?[^\s:"']+:(?P<value>[^\s"'$]{3,})""",
        r"""\b(?:login|authenticate|set_(?:api_)?(?:key|token))\(\s*
        (?P<quote>["'])(?P<value>(?=[^"']*\d)[\w+/=-]{20,})(?P=quote)""",
        r"""\b(?:password|passphrase|secret|api[ _-]?key)\s+(?:is|was)\s*:?\s*
        ["'`]?(?P<value>(?=\S*\d)[^\s"'`<>]{6,})""",
    )
)
"""Values that a header, a program or a phrase goes before."""
TELLING = (
    *("key", "token", "secret", "pass", "pwd", "auth", "credential", "webhook", "dsn", "_url", "bearer", "basic "),
    *("cookie", "signature", "login", "curl", "mysql", "redis-cli", "pat", "pin", "sig", "jwt", "sas"),
)
"""Words without one of which neither `NAMED` nor `BESIDE` finds anything."""
NO_NAME = re.compile(r"token(?:s\b|s_|_type|iz)|(?:pat|pin|sig|sas)[a-z]|pass(?:e[sd]|ing|ion)")
"""Beginnings of ordinary words that hold one of `TELLING`: `tokens_per_s` is in every line of a run's events."""
NEAR = 100
"""Letters before such a word that are looked at, and a quarter of those behind it."""
BETWEEN = "\n\0"
"""Text that stands between items which are masked together."""
OPTION = re.compile(
    r"--?(?:[\w-]*[-_])?(?:key|token|secret|password|passwd|pass|pwd|pat|auth|webhook|dsn)", re.IGNORECASE
)
"""Options of a command whose value is a secret: `--api-key`."""


@dataclass(frozen=True)
class SecretRule:
    """A rule of gitleaks: a pattern that is tried where one of `keywords` occurs, and what its secret must be like."""

    regex: str
    keywords: tuple[str, ...]
    entropy: float
    """Least entropy of a letter of the secret, in bits."""
    group: int
    """Number of the group that holds the secret; 0 for the first one that matched."""
    allowed: tuple[str, ...]
    """Patterns of what is no secret."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern in Python, compiled when a text has a keyword: all 216 take half a second."""
        return re.compile(python_pattern(self.regex))

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the secrets of a text begin and end."""
        for match in self.pattern.finditer(text):
            group = self.group or next((number for number, part in enumerate(match.groups(), 1) if part), 0)
            secret = match[group]
            is_allowed = any(re.search(python_pattern(allow), secret) for allow in self.allowed)
            if secret and _entropy(secret) >= self.entropy and not is_allowed:
                yield match.span(group)


@functools.cache
def rules() -> tuple[SecretRule, ...]:
    """Return the rules of gitleaks that look at texts: not those for certain files, and not the one for every key."""
    described = tomllib.loads(RULES.read_text())
    everywhere = described["allowlist"]["regexes"]
    return tuple(
        SecretRule(
            rule["regex"],
            tuple(rule["keywords"]),
            rule.get("entropy", 0.0),
            rule.get("secretGroup", 0),
            (*everywhere, *(regex for allows in rule.get("allowlists", ()) for regex in allows.get("regexes", ()))),
        )
        for rule in described["rules"]
        if "path" not in rule and rule["id"] != "generic-api-key"
    ) + tuple(SecretRule(regex, (keyword,), 0.0, 0, ()) for keyword, regex in KNOWN)


def python_pattern(pattern: str) -> str:
    """Return a pattern of Go for Python, which knows no flag that begins within a group, and neither `\\z` nor POSIX.

    The letters before a name that a rule's pattern begins with are left out: they are no part of the secret, and
    Python would look for them at every letter of the text.
    """
    pattern = pattern.replace(r"[\w.-]{0,50}?", "", 1).replace("[:alnum:]", "A-Za-z0-9").replace(r"\z", r"\Z")
    written, open_flags, index = "", [0], 0
    while index < len(pattern):
        if flag := re.match(r"\(\?i\)", pattern[index:]):
            written, index = f"{written}(?i:", index + flag.end()
            open_flags[-1] += 1
        elif part := re.match(
            r"\\.|(\[\^?)(\]?(?:\\.|[^\]\\])*\])", pattern[index:], re.DOTALL
        ):  # an escape, or a class
            in_class = re.sub(r"(?<!\\)\[", r"\[", part[2] or "")  # where Python warns of a bracket
            written, index = written + (f"{part[1]}{in_class}" if part[1] else part[0]), index + part.end()
        else:
            letter = pattern[index]
            if letter == "(":
                open_flags.append(0)
            elif letter == ")":
                letter = ")" * (1 + open_flags.pop())
            elif letter == "|" and open_flags[-1]:
                letter = ")" * open_flags[-1] + "|" + "(?i:" * open_flags[-1]
            written, index = written + letter, index + 1
    return written + ")" * open_flags[0]


def secrets(least: int = SECRET_LENGTH) -> list[str]:
    """Return the values of environment variables that are named like secrets, the longest first."""
    return [value for value in _secrets_in(tuple(os.environ.items())) if len(value) >= least]


@functools.lru_cache(maxsize=1)
def _secrets_in(environment: tuple[tuple[str, str], ...]) -> list[str]:
    values = {
        value
        for name, value in environment
        if is_secret(name, surely=len(value) < SECRET_LENGTH)
        and value.lower() not in ORDINARY
        and not os.path.exists(value)
    }
    addresses = (value for name, value in environment if ADDRESS_NAME.fullmatch(name.upper()))
    values |= {password for value in addresses for password in re.findall(r"://[^/@:]*:([^/@]+)@", value)}
    return sorted(values, key=len, reverse=True)


def is_secret(name: str, surely: bool = False) -> bool:
    """Return True for the name of a variable that holds a secret; `surely` asks for a name that means nothing else."""
    if name.upper() in NO_SECRETS:
        return False
    if not surely:
        return bool(SECRET_NAME.fullmatch(name.upper()))
    words = _words(name)
    return bool(SURELY_SECRET.fullmatch(words.upper()) or SURELY_IN_CAPITALS.fullmatch(words))


def masked(text: str) -> str:
    """Return a text without secrets of the environment of at least `SECRET_LENGTH`, and those of a known form."""
    for value in secrets():
        text = text.replace(value, MASK)

    def without_forms(part: str) -> str:
        lower = part.lower()
        found = [rule for rule in rules() if any(keyword in lower for keyword in rule.keywords)]
        return _without(part, [span for rule in found for span in rule.spans(part)])

    return _outside_data(text, without_forms)


def masked_words(text: str) -> str:
    """Return a text for people without secrets: as `masked`, and short ones, and those beside what tells of them."""
    for value in secrets(SHORTEST):
        if len(value) < SECRET_LENGTH:
            text = re.sub(rf"(?<![\w.]){re.escape(value)}(?![\w.])", MASK, text)
    return _outside_data(masked(text), _without_values)


def masked_json(value: Any) -> Any:
    """Return a JSON value with `masked_words` applied to its strings, and without those whose key tells that they are
    secrets.

    Pictures and columns of numbers, at keys such as `image/png` and `bdata`, stay as they are.
    """
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = {}
        for key, item in value.items():
            if str(key).startswith("image/") or key == "bdata":
                kept[key] = item
            else:
                is_secret_value = isinstance(item, str) and _is_secret_value(str(key), item)
                kept[key] = MASK if is_secret_value else masked_json(item)
        return type(value)(kept)  # type: ignore[call-arg]  # a notebook's nodes stay nodes
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        whole = masked_words(BETWEEN.join(value)).split(BETWEEN)  # thousands of labels of a figure, at once
        return whole if len(whole) == len(value) else [masked_words(item) for item in value]
    if isinstance(value, list | tuple):
        return [masked_json(item) for item in value]
    return masked_words(value) if isinstance(value, str) else value


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets: `--api-key ***`, `--password=***`, `--header "Authorization: ***"`."""
    shown, is_value, is_named = list[str](), False, False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_option = argument.startswith("-")
        secret = OPTION.fullmatch(name) or is_secret(name, surely=True) or (value and _is_secret_value(name, value))
        shown.append(MASK if is_value else f"{name}={MASK}" if secret and equals else masked_words(argument))
        is_value = bool(secret and not equals and (is_option or is_named))
        is_named = is_option and not equals  # `-p API_KEY value`, as papermill has it
    return shown


def _outside_data(text: str, mask: Callable[[str], str]) -> str:
    """Apply `mask` to what stands between pictures and columns of numbers."""
    parts = DATA.split(text)
    return "".join(part if number % 2 else mask(part) for number, part in enumerate(parts))


def _without_values(text: str) -> str:
    lower = text.lower()
    if len(lower) != len(text):  # a few letters of Unicode become two
        lower = "".join(letter if len(small := letter.lower()) > 1 else small for letter in text)
    at = sorted(start for word in TELLING for start in _places(lower, word) if not NO_NAME.match(lower, start))
    stretches = list[tuple[int, int]]()  # of the text around the words that tell of secrets
    for start in at:
        first, last = max(0, start - NEAR), min(len(text), start + 4 * NEAR)
        if stretches and first <= stretches[-1][1]:
            first = stretches.pop()[0]
        stretches.append((first, last))
    spans = list[tuple[int, int]]()
    for first, last in stretches:
        spans += [match.span("value") for pattern in BESIDE for match in pattern.finditer(text, first, last)]
        for match in (match for pattern in NAMED for match in pattern.finditer(text, first, last)):
            name, value = match["name"], match["value"]
            if _is_secret_value(name, value):
                is_told = name.isupper() and not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
                if "quote" in match.groupdict():
                    is_told = match["between"].strip()[-1:] != "," or name.isupper()  # no list of names
                spans += [match.span("value")] if is_told or not EXPRESSION.fullmatch(value) else []
    return _without(text, spans)


def _places(text: str, word: str) -> Iterator[int]:
    start = text.find(word)
    while start >= 0:
        yield start
        start = text.find(word, start + len(word))


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """Return a text with `MASK` in place of what lies between those letters; spans may overlap."""
    parts, end = list[str](), 0
    for first, last in sorted(spans):
        if last > end:
            parts += [text[end:first], MASK] if first >= end else []
            end = last
    return "".join([*parts, text[end:]])


def _is_secret_value(name: str, value: str) -> bool:
    """Return True if a value is a secret, from its name and its looks."""
    ordinary = len(value) < SHORTEST or value.lower() in ORDINARY or PLACEHOLDER.fullmatch(value)
    if ordinary or os.path.exists(value):
        return False
    words = _words(name)
    if SURELY_SECRET.fullmatch(words.upper()):
        return name.upper() not in NO_SECRETS
    if SURELY_IN_CAPITALS.fullmatch(words):
        return not NUMBER.fullmatch(value) and not EXPRESSION.fullmatch(value)
    if not PERHAPS_SECRET.fullmatch(words.upper()) or re.search(r"\s", value):
        return False
    # Such a value is a secret if it looks drawn at random: letters and digits mixed in one piece of it.
    pieces = re.findall(r"[A-Za-z0-9+/=]{12,}", value)
    return any(len(re.findall(r"\d", piece)) > 1 and _entropy(piece) > 2.8 for piece in pieces)


def _words(name: str) -> str:
    """Return `api_Key` for `apiKey`, `api-Key` and `apiKey2`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name.rstrip("_0123456789"))


def _entropy(text: str) -> float:
    """Return Shannon's entropy of a letter of a text, in bits."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
