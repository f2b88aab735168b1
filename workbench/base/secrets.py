"""Secrets in texts that are stored or leave this machine: by the environment, by their form, and by what stands beside.

A text is read in the views that a reader may have of it: with its escapes decoded, with its markup (HTML, colours of a
terminal) as a gap or as nothing, and with literals and lines joined. The rules work on these plain texts, and what they
find is masked where it stands in the source. The forms are the rules of gitleaks in `secret_rules.toml`, without its
rule for every key, which takes a tokenizer's values for keys; names, headers, addresses and options are looked at here
instead. Nothing of this is certain: a secret under a name that tells nothing is not found.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import functools
import html
import math
import os
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    r"|(?:.*_)?(?:(?:ACCESS|API|AUTH|BEARER|BOT|REFRESH|SECURITY|SESSION|WRITE)_?TOKEN|(?:CLIENT_?)?SECRETS?|PWD)"
    r"|(?:.*_)?(?:CREDENTIALS?|WEBHOOK|DSN|WEBHOOK_URL|AUTHORIZATION|X_(?:AMZ|GOOG)_SIGNATURE|SHARED_?ACCESS_?KEY)"
    r"|(?:.*_)?(?:PASSWORT|CONTRASE\u00d1A|PASSCODE|TOTP|OTP|(?:STORAGE|SERVICE|DEPLOY|HOST|LICENSE|ADMIN|AUTH)_KEY)"
)
"""Names that mean nothing else, written in capitals with `_`: `apiKey` and `api-key` are `API_KEY`."""
SURELY_IN_CAPITALS = re.compile(r"(?:.*_)?(?:TOKEN|PASS|PAT|PIN)")
"""Names that mean nothing else if they were written in capitals; `token` and `pass` are ordinary words."""
PASS_OF = re.compile(r".+_PASS")
"""Names of passwords in any writing: `ssh_pass`."""
PERHAPS_SECRET = re.compile(r".*(?:KEY|TOKEN)|(?:.*_)?(?:AUTH|PASS|PAT|SIG|SIGNATURE|JWT|SAS|COOKIE|SID|CREDENTIAL)")
"""Names of secrets whose value looks drawn at random; `sort_key` and `pad_token` have others."""
ORDINARY_KEY = re.compile(
    r"(?:.*_)?(?:CACHE|CONFIG|PUBLIC|PUB|SORT|PRIMARY|FOREIGN|PARTITION|GROUP|INDEX|HASH|STATE|OBJECT|ROW|ITEM|DEDUP"
    r"|IDEMPOTENCY|SHARD|LOOKUP|COMPILE|GRAPH|KERNEL|RUN|STEP|SAMPLE|PAD|EOS|BOS|UNK|MASK|CLS|SEP|IMAGE|PUBLISHABLE|SITE"
    r"|S3|BUCKET|STORE|MODULE|LAYER|PARAM|WEIGHT|RNG|SEED|PRNG|RANDOM|JAX|DISPATCH|NEXT|PREV|PREVIOUS|CONTINUATION|PAGE"
    r"|CURSOR|COMMIT|BUILD|DICT|FEATURE|LABEL|METRIC)_?(?:KEY|TOKEN)"
)
"""Names of keys that open nothing: digests and places in a table, which look drawn at random."""
QUALIFIER = re.compile(
    r"\d+|V\d+|[A-Z]|PROD|PRODUCTION|DEV|DEVEL|DEVELOPMENT|STAGE|STAGING|TEST|TESTING|LIVE|LOCAL|CI|QA|UAT|SANDBOX|DEMO|MAIN"
    r"|BACKUP|OLD|NEW|PRIMARY|SECONDARY|DEFAULT|EU|US|ASIA|EAST|WEST|PREVIOUS|CURRENT|VALUE|RAW|PLAIN|STR|BASE64|B64|HEX"
)
"""Ends of a name that say which of several secrets it is: `API_KEY_PROD`."""
NOT_ITSELF = re.compile(
    r"DIGEST|HASH|NAME|NAMES|ID|IDS|LENGTH|LEN|SIZE|TYPE|FILE|FILES|PATH|FIELD|FIELDS|COUNT|MIN|MAX|"
    r"REQUIRED|ENABLED|EXPIRY|EXPIRES|TTL|HEADER|PREFIX|SUFFIX|ENV|VAR|COLUMN|INDEX|POLICY|"
    r"PATTERN|PROMPT|DIR|VERSION|ALGORITHM|SOURCE|LABEL|HINT|PARAM|MANAGER|PROVIDER|STORE|"
    r"SERVICE|SCOPE|SCOPES|STATUS|STATE|ERROR|URI|ENDPOINT|HOST|REGEX|FORMAT|LIMIT|BUDGET|"
    r"PER|RATE|LOCATION|AGE|DATE|TIME|SET|STRENGTH|CHECK|VALIDATOR|HASHER|FINGERPRINT|"
    r"ROTATION|SIZES|MASK|TYPES|EMBEDDING|EMBEDDINGS"
)
"""Words after which a name means something else than the secret: `API_KEY_NAME`."""
ADDRESS_NAME = re.compile(r"(?:.*_)?(?:URL|URI|DATABASE)(?:_.*)?")
"""Names of variables whose address may hold a password: `DATABASE_URL`."""
NO_SECRETS = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "XAUTHORITY", "KEYBOARD_KEY"})
NO_SECRET_VALUE = re.compile(r"(?:.*_)?(?:SHA\d*|COMMIT|REVISION|HASH|DIGEST|CHECKSUM|U?U?IDS?|VERSION|TAG|NAME|PATH)")
"""Names of variables whose value is known to others although it looks drawn at random."""
SECRET_LENGTH = 8
"""Shortest value that is masked wherever it occurs; a shorter one is masked as a whole word only."""
SHORTEST = 4
"""Shortest value that is masked at all: one of three letters is found in every text."""
ORDINARY = frozenset(
    {"true", "false", "none", "null", "auto", "disabled", "enabled", "default", "localhost", "required", "optional"}
)
PLACEHOLDER = re.compile(
    r"\$\w+|(?:\w+ )?(?:\$?\{.*\}|<.*>)|(?i:bearer|basic|token|bot)\s*|![a-z]+|\$?\(.*\)|\[.*\]|%.*%|(.)\1*"
    r"|(?:~|\.{0,2})/[\w./-]*|[A-Z_]*|.*(?:\.{3}|\u2026)|(?i:your|insert|replace|enter|paste)[-_ ].*"
    r"|[\w-]*[xX*]{6,}[\w-]*",
    re.DOTALL,
)
"""Values that stand for another one, special tokens, paths, and the words in capitals of a usage: `--api-key KEY`."""
NUMBER = re.compile(r"[\d.,_eE+/:-]+%?")
EXPRESSION = re.compile(r"[A-Za-z_]+|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""An unquoted value that is a word of a text, or a name in code."""
DATA = re.compile(r"(;base64,[A-Za-z0-9+/=\s]{100,}|[A-Za-z0-9+/=]{2000,})")
"""Pictures and columns of numbers in base64, which hold no words."""
KNOWN: tuple[tuple[str, str], ...] = (
    ("gh", r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"),
    ("glpat-", r"glpat-[\w-]{16,}"),
    ("hf_", r"hf_[A-Za-z0-9]{16,}"),
    ("sk-", r"\bsk-(?P<secret>[\w-]{16,})"),
    ("xox", r"xox[abeoprs]-[\w-]{10,}"),
    ("akia", r"AKIA[A-Z0-9]{16}[,;:|/\t ]+[A-Za-z0-9/+]{40}(?![\w/+])|AKIA[A-Z0-9]{16}"),  # with the secret beside it
    ("asia", r"ASIA[A-Z0-9]{16}"),
    ("aiza", r"AIza[\w-]{30,}"),
    ("wandb", r"wandb_v1_\w{20,}|\bwandb login (?:--relogin )?[0-9a-f]{40}\b"),
    ("pypi-", r"pypi-[\w-]{20,}"),
    ("npm_", r"npm_[A-Za-z0-9]{30,}"),
    ("gsk_", r"gsk_[A-Za-z0-9]{40,}"),
    ("r8_", r"r8_[A-Za-z0-9]{30,}"),
    ("xai-", r"xai-[A-Za-z0-9]{40,}"),
    ("dapi", r"dapi[0-9a-f]{32}(?:-\d)?"),
    ("tvly-", r"tvly-(?:dev-)?[A-Za-z0-9]{20,}"),
    ("nvapi-", r"nvapi-[\w-]{40,}"),
    ("ya29.", r"ya29\.[\w-]{20,}"),
    ("gocspx-", r"GOCSPX-[\w-]{20,}"),
    ("sq0", r"sq0(?:atp|csp|idp)-[\w-]{20,}"),
    ("lsv2_", r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}"),
    (":aa", r"\d{8,10}:AA[\w-]{32,}"),  # a bot of Telegram
    ("k_", r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}"),
    ("whsec_", r"whsec_[A-Za-z0-9]{20,}"),
    ("eyj", r"eyJ[\w-]{8,2000}\.eyJ[\w-]{8,4000}\.[\w-]{8,}"),
    (
        "$",
        r"\$(?:2[aby]\$\d\d\$[./A-Za-z0-9]{40,53}|[156]\$(?:rounds=\d+\$)?[./A-Za-z0-9]{1,16}\$[./A-Za-z0-9]{20,86})",
    ),
    ("$", r"\$apr1\$[./A-Za-z0-9]{1,8}\$[./A-Za-z0-9]{20,22}|\$argon2(?:id|i|d)\$[\w=,$]{8,60}\$[A-Za-z0-9+/]{20,}"),
    ("$", r"(?:pbkdf2_sha\d+\$\d+|scrypt:\d+:\d+:\d+)\$[\w.+/=-]{1,64}\$[\w+/=]{20,}"),
    ("/", r"hooks\.slack\.com/(?P<secret>[\w/-]{8,})|discord(?:app)?\.com/api/webhooks/(?P<of_discord>[\w/-]{8,})"),
    ("/", r"webhook\.office\.com/(?P<secret>[\w/@-]{8,})|api\.telegram\.org/bot(?P<of_telegram>[\w:-]{20,})"),
    (
        "://",
        r"""://(?P<secret>[^\s/:@'"<>\\?#\[]{0,200}:(?!\d{1,5}[/?#])[^\s@'"<>\\]{1,200}(?:@[^\s/@'"<>\\?#]{1,100}){0,2})"""
        r"""@(?!sha\d+:)(?=[\w.\[-])""",
    ),
    ("://", r"""://(?P<secret>[A-Za-z0-9_-]{20,})@"""),
    ("@tcp(", r"(?<![^\s\"'=(])\w{1,64}:(?P<secret>[^\s/:@'\"<>\\?#]{3,64})@(?:tcp|unix)\("),
)
"""Keywords and patterns of what is a secret wherever it stands; those of gitleaks ask for the exact length of a key."""
ENDS = r"""(?:[\x60'"\s;]|\\[nr]|$)"""
"""End of most patterns of gitleaks; anything but a letter or a digit ends a key here."""
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
END_OF_PRIVATE_KEY = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|-----BEGIN ")
BLANK_LINE = re.compile(r"\n[ \t]*\n")

TOKEN = re.compile(
    r"""
    (?P<mark>\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9])  # a colour of a terminal
      |\\{1,8}(?:x1b|033|e|u001b)\[[0-9;]*[A-Za-z]|\^\[\[[0-9;]*m                    # one that was written as text
      |</?[A-Za-z!?][^<>]*>(?:\s*\n\s*</?[A-Za-z!?][^<>]*>)*
      |[\u00ad\u200b-\u200f\u2060\ufeff])                                            # letters without width
    |(?P<coded>\\(?:[nrt'"`/\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})
      |&(?:\#\d{1,6}|\#[xX][0-9a-fA-F]{1,5}|[a-zA-Z]{2,8});|%[0-9a-fA-F]{2})
    |(?P<joined>(?<!["'])(?P<quote>["'])[ \t]*(?:[+\\][ \t]*)?(?:\n[ \t]*)?(?:[+][ \t]*)?[rbfu]?(?P=quote)(?=[\w+/=.-]))
    |(?P<line>(?<=[A-Za-z0-9_+/-])\\?\n[ \t]*(?=(?:[A-Za-z_+/-]*\d[A-Za-z0-9_+/=-]*[A-Za-z]|[A-Za-z_+/-]*[A-Za-z]\d)
      [A-Za-z0-9_+/=-]*(?:["'\s]|$)))
    |(?P<item>\n\0)
    """,
    re.VERBOSE,
)
"""Letters that a reader does not see as they are written. A line goes on if the next begins with letters and digits."""
BETWEEN = "\n\0"
"""Text that stands between items which are masked together."""
PNG = b"\x89PNG\r\n\x1a\n"
READABLE = re.compile(rb"[\x20-\x7e\r\n\t\0]{12,}")
"""Bytes of a picture that may be a text of its file."""
ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
GAP, FAR = " \t ", "\n \n"
GOES_ON = re.compile(r"(?=[^\d\n]*\d)(?=[^A-Za-z\n]*[A-Za-z])[^\n]{6,}")
"""Second half of a key, which a word of the next line does not look like."""
AROUND = 300
"""Letters before and behind a token that are read with it."""
INLINE = re.compile(
    r"</?(?:a|abbr|b|bdi|bdo|big|cite|code|del|dfn|em|font|i|ins|kbd|label|mark|q|s|samp|small|span|strike|strong|sub|sup|tt|u"
    r"|var|wbr)(?:[\s/][^<>]*)?>",
    re.IGNORECASE,
)
"""Tags that leave no gap between the letters before and behind them."""
DEPTH = 3
"""Number of times that a text is decoded: a string of JSON in a repr in HTML."""

ANYTHING = re.compile("")
NAME = re.compile(r"[\w-]{0,200}")
TELLING = {
    **dict.fromkeys(
        ("key", "token", "secret", "pwd", "auth", "credential", "webhook", "dsn", "_url", "cookie"), ANYTHING
    ),
    **dict.fromkeys(("signature", "jwt", "contrase\u00f1a"), ANYTHING),
    "pass": re.compile(r"w|phrase|code|[^a-z]|\Z"),
    **dict.fromkeys(("pat", "pin", "sig", "sas", "otp", "sid"), re.compile(r"[^a-z]|\Z")),
}
"""Words without one of which a name tells nothing, and what goes on behind one; `pattern` is another word."""
QUOTED = re.compile(
    r"""(?:["'`]\]?)?\)?(?P<between>\s*(?:[=-]>|[\u2192\u21d2]|[:!=]=|:\s*[\w.\[\]|\ ]{1,40}=|[=:,]))\s*[rbfuRBFU]{0,2}
    (?:\w*(?:[sS]ecret|Password|Credential|[sS]tr|String|bytes|quote|quote_plus|b64decode)\()?(?P<quote>\"{3}|'{3}|["'`])(?P<value>(?!(?P=quote))[^\n]{4,2000}?)(?P=quote)""",
    re.VERBOSE,
)
"""Text after a name, with its value: `name="value"`, `"name": "value"`, `setenv("NAME", "value")`."""
BARE = re.compile(
    r"""["'`]?\]?[ \t]*(?:[=-]>|[\u2192\u21d2]|[:=]=?)[ \t]*(?P<value>[^\s"'`;&,|(){}\[\]<>\\*]{4,}+)(?![(\[{])""",
)
LINE = re.compile(
    r"""[ \t]*[:=][ \t]*(?P<value>[^\s"'`(){}\[\]<>][^\s"'`]{2,}[^\s"'`,;])[,;]?[ \t]*(?:\#.*)?$""", re.MULTILINE
)
"""A line of YAML, INI or `env`, whose value may hold every sign."""
CELL = re.compile(
    r"""["'`]?(?:[ ]{2,}|[ ]*[\t|\u2502\u2503\u2551(]+|[.]{3,})[ \t|\u2502\u2503\u2551]*["'`]?"""
    r"""(?P<value>[^\s"'`|\u2502\u2503\u2551<>()\[\]{}]{4,}+)(?![(\[{])"""
)
"""The next cell of a table."""
ELEMENT = re.compile(r""">(?P<value>[^<>\s]{4,})</""")
FIELD = re.compile(
    r"""["']?[\s,;(]*["']?(?:[Vv]alue|val|default|content)["']?\s*[=:]\s*(?P<quote>["']?)(?P<value>[^\s"'<>,}]{4,})"""
)
"""The value of a record whose name is the text before: `{"name": "API_KEY", "value": "…"}`."""
WORD = re.compile(r"""(?:=|[ ]+)["']?(?P<value>[^\s"'`<>\[\]-][^\s"'`<>\[\]]{3,})""")
BEFORE_WORD = re.compile(r"(?:--|(?<!\S)(?:%env|%set_env|setx|setenv|set -\w+|ENV|ARG|SET|env add|config set)[ ]+)\Z")
"""Ends of the text before a name whose value is the next word: options of a command, `%env` of a notebook."""
BEFORE_LINE = re.compile(r"(?:^|\n)[ \t]*(?:export |set |- |\$ |declare -x |ENV |\+ ?)?[\"']?\Z")
BESIDE = tuple(
    re.compile(pattern, re.VERBOSE | re.IGNORECASE)
    for pattern in (
        r"""\bauthorization["']?\]?\s*[:=,]\s*["']?
        (?:bearer|basic|token|digest|apikey|bot)\s+(?P<value>[\w.~+/=:-]{4,2000})(?![\w.]*[(\[{])""",
        r"""\bauthorization["']?\]?\s*[:=,]\s*["']?(?P<value>(?=[\w.~+/=:-]{0,200}\d)[\w.~+/=:-]{8,2000})""",
        r"""\b(?:bearer|basic)\s+(?P<drawn>[\w.~+/-]{12,2000}=*)""",
        r"""\b(?:set-)?cookie["']?:\s*["']?(?P<value>[^\s"'<>][^"'\n<>=]{0,200}=[^"'\n<>]{8,4000})""",
        r"""\blogin\s+[^\s/]\S{0,200}\s+(?:account\s+\S{1,200}\s+)?password\s+(?P<value>\S+)""",  # a line of .netrc
        r"""[{]\s*"auth"\s*:\s*"(?P<value>[a-z0-9+/]{12,2000}={0,2})\"""",  # Docker's config.json
        r"""\bauthtoken\s+(?P<value>[\w-]{20,})""",  # of ngrok
        r"""\bmachine\s+\S{1,200}\s+password\s+(?P<value>\S+)""",
        r"""\b(?:sshpass|mysql|mysqldump|redis-cli|(?:docker|podman|az)\s+login)\b[^\n|;]{0,200}?\s-(?:p|a)\s?["']?
        (?P<value>[^\s"'-][^\s"']{3,})""",
        r"""\b(?:curl|http|wget)\b[^\n|;]{0,300}?\s(?:-u|-a|--user|--auth)[ =]?["']?
        [^\s:"']{1,100}:(?P<value>[^\s"'$][^\s"']{2,})""",
        r"""\b(?:login|authenticate|set_(?:api_)?(?:key|token))\(\s*
        (?P<quote>["'])(?P<value>(?=[^"']*\d)[\w+/=-]{20,})(?P=quote)""",
        r"""\b(?:auth|credentials|creds|httpbasicauth|httpdigestauth|basicauth|login)\s*[=:]?\s*
        (?:\w*auth)?[(\[]\s*[rbf]?["'][^"'\n]{1,100}["']\s*,\s*[rbf]?(?P<quote>["'])(?P<value>[^"'\n]{4,200})(?P=quote)""",
        r"""\b(?:password|passphrase|secret|api[ _-]?key|token)\s+(?:is|was)\s*(?:now\s*)?:?\s*
        ["'`]?(?P<value>(?=\S{0,200}\d)[^\s"'`<>]{6,})""",
        r"""\bpassword\ for\ [^\n]{1,80}?:\ (?P<value>(?=\S{0,100}\d)\S{4,100})""",  # a prompt, and what was typed
        r"""\b(?:password|passphrase)\s+["'`]?(?P<value>(?=[^\s\d]*\d)(?=[^\sa-z]*[a-z])[^\s"'`<>(){}\[\]=:,]{6,40})(?![^\s"'`.,;])""",
    )
)
"""Values that a header, a program or a phrase goes before; what is `drawn` must look so."""
BESIDE_WORDS = (
    *("auth", "bearer", "basic ", "cookie", "login", "machine ", "sshpass", "mysql", "redis-cli", "docker ", "podman "),
    *(
        "az ",
        "curl ",
        "http ",
        "wget ",
        "creds",
        "credentials",
        "set_key",
        "set_token",
        "set_api_key",
        " is",
        " was",
        "password ",
        "passphrase ",
    ),
)
"""Words without one of which `BESIDE` finds nothing."""
PHRASE = re.compile(r"(?:password|passphrase|secret|key|token)\s\Z")
NEAR = 100
"""Letters before such a word that are looked at, and a quarter of those behind it."""
OPTION = re.compile(
    r"--?(?:[\w-]*[-_])?(?:key|token|secret|password|passwd|pass|pwd|pat|auth|webhook|dsn)", re.IGNORECASE
)
"""Options of a command whose value is a secret: `--api-key`."""
NUMBERS = frozenset({int, float, bool, type(None)})
STRUCTURE = frozenset({"output_type", "cell_type", "id", "name", "mimetype", "version", "nbformat"})
"""Keys of a notebook whose texts do not stand between two outputs for a reader."""


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
        """The pattern in Python, compiled when a text has a keyword: all 216 take half a second.

        A key may stand behind a letter (`b` of `b'…'`, a name and `_`) and before any sign: `spans` looks at both.
        """
        regex = re.sub(r"^(\(\?i\))?\\b", r"\1", self.regex).replace(ENDS, r"(?![A-Za-z0-9])")
        regex = regex.replace(".*", ".{0,300}")  # or a line of a million letters is read from each of them
        return re.compile(python_pattern(re.sub(r"\\b(\)?)$", r"(?![A-Za-z0-9])\1", regex)))

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the secrets of a text begin and end."""
        for match in self.pattern.finditer(text):
            group = self.group or next((number for number, part in enumerate(match.groups(), 1) if part), 0)
            secret, start = match[group], match.start()
            if not secret or _entropy(secret) < self.entropy:
                continue
            if "sk-" in self.keywords or (start and text[start - 1].isalnum() and text[start].isalnum()):
                is_piece = secret.islower() and len(self.keywords[0]) < 4 and start and text[start - 1].isalnum()
                if is_piece or not is_drawn(secret):
                    continue  # `task-20261124`, and the classes of scikit-learn's pages
            if not any(re.search(python_pattern(allow), secret) for allow in self.allowed):
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
        if "path" not in rule and rule["id"] not in ("generic-api-key", "private-key")
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
    """Return the values of the environment that are secrets, by their names or their looks, the longest first."""
    return [value for value in _secrets_in(tuple(os.environ.items())) if len(value) >= least]


@functools.lru_cache(maxsize=1)
def _secrets_in(environment: tuple[tuple[str, str], ...]) -> list[str]:
    def is_told(name: str, value: str) -> bool:
        if is_secret(name, surely=len(value) < SECRET_LENGTH):
            return True
        is_known = NO_SECRET_VALUE.fullmatch(name.upper()) or not re.fullmatch(r"[\w+/=.~-]{20,512}", value)
        return not is_known and (_has_form(value) or (is_drawn(value) and value != value.lower() != value.upper()))

    values = {
        value
        for name, value in environment
        if is_told(name, value) and value.lower() not in ORDINARY and not os.path.exists(value)
    }
    addresses = (value for name, value in environment if ADDRESS_NAME.fullmatch(name.upper()))
    values |= {password for value in addresses for password in re.findall(r"://[^/@:]*:([^/@]+)@", value)}
    return sorted(values, key=len, reverse=True)


def is_secret(name: str, surely: bool = False) -> bool:
    """Return True for the name of a variable that holds a secret; `surely` asks for a name that means nothing else."""
    if name.upper() in NO_SECRETS:
        return False
    return _meaning(name) in ("surely", "in capitals") if surely else bool(SECRET_NAME.fullmatch(name.upper()))


def masked_words(text: str) -> str:
    """Return a text for people without secrets: those of the environment, of a known form, and beside what tells."""
    parts = DATA.split(text)
    for number, part in enumerate(parts):
        if not number % 2:
            parts[number] = _without(part)
        elif part.startswith(";base64,"):
            parts[number] = f";base64,{_masked_picture(part.removeprefix(';base64,'))}"
    return "".join(parts)


def masked_json(value: Any) -> Any:
    """Return a JSON value without secrets in its strings and keys, and without those whose key tells what they are.

    All strings are looked at together, since a key may be printed in two outputs. Columns of numbers (`bdata`) stay as
    they are, and pictures but for texts in them.
    """
    texts: dict[bool, list[str]] = {False: [], True: []}

    def walk(item: Any, key: str, told: str, seen: Callable[[bool, str], str]) -> Any:
        if isinstance(item, str):
            if key.startswith("image/") and key != "image/svg+xml":
                return _masked_picture(item)
            is_told = any(name and _is_secret_value(name, item) for name in (key, told))
            return MASK if is_told else item if key == "bdata" else seen(key in STRUCTURE, item)
        if isinstance(item, Mapping):
            named = next((item[name] for name in ("name", "Name", "key") if isinstance(item.get(name), str)), "")
            kept: dict[Any, Any] = {}
            for name, content in item.items():
                shown = seen(True, name) if isinstance(name, str) else name
                shown = shown if shown not in kept else f"{shown} {len(kept)}"  # two keys of an object that are secrets
                kept[shown] = walk(content, str(name), named if str(name).lower() == "value" else "", seen)
            return type(item)(kept)  # type: ignore[call-arg]  # a notebook's nodes stay nodes
        if isinstance(item, list | tuple):
            if NUMBERS.issuperset(map(type, item)):  # a column of a figure
                return item
            names = [one if isinstance(one, str) and (one.isupper() or OPTION.fullmatch(one)) else "" for one in item]
            named = ["", *(name.lstrip("-") for name in names)]
            return [walk(one, key * (key == "bdata"), name, seen) for one, name in zip(item, named[:-1], strict=True)]
        return item

    def collected(is_structure: bool, text: str) -> str:
        texts[is_structure].append(text)
        return text

    walk(value, "", "", collected)
    masked = {}
    for is_structure, items in texts.items():
        whole = masked_words(BETWEEN.join(items)).split(BETWEEN)
        masked[is_structure] = iter(whole if len(whole) == len(items) else map(masked_words, items))
    return walk(value, "", "", lambda is_structure, _: next(masked[is_structure]))


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


def _masked_picture(encoded: str) -> str:
    """Return a picture in base64 in which the letters of secrets are `*`, such as those in a comment of its file."""
    try:
        content = base64.b64decode(encoded)
    except ValueError:
        return encoded
    if not content.startswith(PNG):
        kept = READABLE.sub(_starred, content)
    else:  # a part of it has a length, a name of four letters and a checksum
        kept, at = PNG, len(PNG)
        while at + 12 <= len(content):
            end = at + 12 + int.from_bytes(content[at : at + 4], "big")
            name, data = content[at + 4 : at + 8], content[at + 8 : end - 4]
            if name in (b"tEXt", b"iTXt", b"zTXt", b"eXIf"):
                with contextlib.suppress(zlib.error):
                    packed = data.find(b"x") if name != b"tEXt" else -1
                    opened = zlib.decompressobj().decompress(data[packed:], 1 << 20) if packed >= 0 else b""
                    data = b"" if READABLE.sub(_starred, opened) != opened else data
                data = READABLE.sub(_starred, data)
                kept += len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")
            else:
                kept += content[at:end]
            at = end
        kept += READABLE.sub(_starred, content[at:])
    return encoded if kept == content else base64.b64encode(kept).decode()


def _starred(readable: re.Match[bytes]) -> bytes:
    text = readable[0].replace(b"\0", b"=").decode("latin-1")
    kept = bytearray(readable[0])
    for first, last, _ in _hidden(text):
        kept[first:last] = b"*" * (last - first)
    return bytes(kept)


class View:
    """A text as a reader may have it, made of pieces of its source: `tokens` begin, end and are written differently."""

    def __init__(self, text: str, tokens: Iterable[tuple[int, int, str, bool]]) -> None:
        self.pieces = list[tuple[int, int, int, bool]]()
        """Pieces: their begins here and in the source, their length there (0 of a gap), and if written so."""
        self.seams = list[int]()
        """Places at which lines or items were joined."""
        parts, size, at = list[str](), 0, 0
        for start, end, written, is_seam in tokens:
            for part, first, is_literal in ((text[at:start], at, True), (written, start, False)):
                if part:
                    length = len(part) if is_literal else 0 if part.isspace() and end - start > 1 else end - start
                    self.pieces.append((size, first, length, is_literal))
                    parts.append(part)
                    size += len(part)
            self.seams += [size] if is_seam else []
            at = end
        self.pieces.append((size, at, len(text) - at, True))
        self.text = "".join([*parts, text[at:]])
        self.starts = [piece[0] for piece in self.pieces]

    def source(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the stretches of the source that letters of this view are made of."""
        for number in range(max(0, bisect.bisect_right(self.starts, first) - 1), len(self.pieces)):
            start, at, length, is_literal = self.pieces[number]
            if start >= last:
                return
            low, high = (max(0, first - start), min(length, last - start)) if is_literal else (0, length)
            if low < high:
                yield at + low, at + high


def _views(text: str) -> Iterator[tuple[View, str]]:
    """Yield what a reader may see near tokens, and the name of those which must lie within what is found there."""
    tokens = [(token.start(), token.end(), str(token.lastgroup), token[0]) for token in TOKEN.finditer(text)]
    far = list[tuple[int, int]]()  # what lies between the surroundings of tokens
    end = 0
    for start, last, _, _ in [*tokens, (len(text) + AROUND, 0, "", "")]:
        far += [(end, start - AROUND)] if start - AROUND > end else []
        end = max(end, last + AROUND)

    def read(kind: str, code: str, joined: str) -> str | None:
        if kind == "mark":
            tag = INLINE.match(code)
            return "" if tag or code[0] != "<" else GAP if "&" not in code else GAP + html.unescape(code) + GAP
        if kind != "coded":
            return "" if kind in ("joined", joined) else None
        if code[0] == "&":
            return html.unescape(code)
        if code[0] == "%" or code[1] in "xu":
            letter = chr(int(code.lstrip("%\\xu"), 16))
            return letter if letter.isprintable() or letter in "\n\t" else " "
        return ESCAPED.get(code[1], code[1])

    found = {kind for _, _, kind, _ in tokens}
    for joined in ("", "line", "item"):
        if joined in found if joined else found & {"mark", "coded", "joined"}:
            written = [(first, last, FAR, False) for first, last in far]
            for start, last, kind, code in tokens:
                if (shown := read(kind, code, joined)) is not None:
                    written.append((start, last, shown, kind == joined))
            yield View(text, sorted(written)), joined


def _found(text: str, depth: int = 0) -> Iterator[list[tuple[int, int]]]:
    """Yield the stretches of the source that each secret of a text is made of."""
    yield from ([(first, last)] for _, first, last, _ in _secrets_of(text))
    for view, joined in _views(text) if depth < DEPTH else ():
        if joined:  # what is not whole before it
            for start, first, last, has_form in _secrets_of(view.text):
                number = bisect.bisect_right(view.seams, first if has_form else start)
                if number == len(view.seams) or view.seams[number] >= (last if has_form else first + 1):
                    continue
                if GOES_ON.match(view.text, view.seams[number], last) if has_form else joined == "item":
                    yield list(view.source(first, last))
        else:
            for ranges in _found(view.text, depth + 1):
                yield [part for first, last in ranges for part in view.source(first, last)]


def _hidden(text: str) -> list[tuple[int, int, bool]]:
    """Return the stretches of a text that are hidden, without overlaps, and whether a secret begins with each."""
    found = sorted((*part, not number) for parts in _found(text) for number, part in enumerate(parts))
    hidden = list[tuple[int, int, bool]]()
    for first, last, begins in found:
        if hidden and first < hidden[-1][1]:
            start, end, had = hidden.pop()
            hidden.append((start, max(end, last), had or begins))
        else:
            hidden.append((first, last, begins))
    return hidden


def _without(text: str) -> str:
    parts, end = list[str](), 0
    for first, last, begins in _hidden(text):
        items = BETWEEN * text.count(BETWEEN, first, last)  # of `masked_json`, which takes them apart again
        parts += [text[end:first], MASK if begins else "", items]
        end = last
    return "".join([*parts, text[end:]])


def _secrets_of(text: str) -> Iterator[tuple[int, int, int, bool]]:
    """Yield of each secret of a plain text: where what tells of it begins, its begin and end, and if it has a form."""
    for value in secrets(SHORTEST):
        if len(value) >= SECRET_LENGTH:
            places = re.finditer(r"(?:\\?\n[ \t\0]*)?".join(map(re.escape, value)), text)
        else:
            places = re.finditer(rf"(?<![\w.]){re.escape(value)}(?![\w.])", text)
        yield from ((place.start(), *place.span(), True) for place in places)
    yield from ((first, first, last, True) for first, last in _forms_in(text))
    lower = text.lower()
    if len(lower) != len(text):  # a few letters of Unicode become two
        lower = "".join(letter if len(letter.lower()) > 1 else letter.lower() for letter in text)
    end = 0
    for told in sorted(at for word, goes_on in TELLING.items() for at in _places(lower, word, goes_on)):
        if told < end:
            continue
        start = end = told
        while start and (text[start - 1].isalnum() or text[start - 1] in "_-") and told - start < NEAR:
            start -= 1
        end = NAME.match(text, told).end()  # type: ignore[union-attr]
        while start < end and not text[start].isalpha():
            start += 1
        if _meaning(text[start:end]):
            yield from ((start, first, last, False) for first, last in _values_after(text, start, end))
    stretches = list[tuple[int, int]]()  # of the text around the words that tell of secrets
    for told in sorted(at for word in BESIDE_WORDS for at in _places(lower, word)):
        if lower[told] == " " and not PHRASE.search(lower, max(0, told - 12), told + 1):
            continue
        first, last = max(0, told - NEAR), told + 4 * NEAR
        if stretches and first <= stretches[-1][1]:
            first = stretches.pop()[0]
        stretches.append((first, last))
    for first, last in stretches:
        for match in (match for pattern in BESIDE for match in pattern.finditer(text, first, last)):
            found = match.groupdict()
            if "drawn" in found and is_drawn(found["drawn"]):
                yield match.start(), *match.span("drawn"), False
            if "value" in found and not PLACEHOLDER.fullmatch(found["value"]):
                yield match.start(), *match.span("value"), False


def _places(lower: str, word: str, goes_on: re.Pattern[str] = ANYTHING) -> Iterator[int]:
    start = lower.find(word)
    while start >= 0:
        if goes_on is ANYTHING or goes_on.match(lower, start + len(word)):
            yield start
        start = lower.find(word, start + len(word))


def _values_after(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the value that stands after a name, which begins and ends at those letters."""
    name, before = text[start:end], text[max(0, start - 40) : start]
    name = "PASS" if name == "pass" and before.endswith(("'", '"')) else name
    if (match := FIELD.match(text, end)) or (match := QUOTED.match(text, end)):
        is_pair = match.groupdict().get("between", ":").strip() == ","  # perhaps a list of names
        if _is_secret_value(name, match["value"], is_told=bool(match["quote"]) and (not is_pair or name.isupper())):
            yield match.span("value")
        return
    begins_line, is_word = BEFORE_LINE.search(before), BEFORE_WORD.search(before)
    if begins_line and (match := LINE.match(text, end)):
        is_code = re.search(r"[\w\])][(\[]|\s", match["value"])
        if not is_code and _is_secret_value(name, match["value"], is_told=name.isupper()):
            yield match.span("value")
            return
    is_told = before.endswith(("?", "&", ";")) or bool(is_word) or (bool(begins_line) and name.isupper())
    for pattern in (BARE, CELL, ELEMENT, *([WORD] if is_word else [])):
        match = pattern.match(text, end)
        if not match or (pattern is CELL and NUMBER.fullmatch(match["value"])):
            continue
        if _is_secret_value(name, match["value"], is_told or pattern is ELEMENT):
            yield match.span("value")
            return


def _forms_in(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the secrets of a known form stand in a text."""
    lower = text.lower()
    for rule in rules():
        if any(keyword in lower for keyword in rule.keywords):
            yield from rule.spans(text)
    at, last = 0, -1
    while head := PRIVATE_KEY.search(text, at):
        if last < head.end():
            tail = END_OF_PRIVATE_KEY.search(text, head.end())
            last = len(text) if tail is None else tail.start() if tail[0].startswith("-----BEGIN") else tail.end()
            if blank := BLANK_LINE.search(text, head.end(), last) if tail is None else None:
                last = blank.start()
        yield head.start(), last
        at = max(head.end(), last)


def _has_form(text: str) -> bool:
    return any(True for _ in _forms_in(text))


@functools.lru_cache(maxsize=10_000)
def _meaning(name: str) -> str:
    """Return what a name says of its value: `surely` a secret, so if written `in capitals`, `perhaps`, or not."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name.strip("_0123456789")).split("_")
    is_capital, parts = name.upper() == name, [part.upper() for part in parts if part]
    while len(parts) > 1 and QUALIFIER.fullmatch(parts[-1]):
        parts.pop()
    words = "_".join(parts)
    if name.upper() in NO_SECRETS or ORDINARY_KEY.fullmatch(words):
        return ""
    if SURELY_SECRET.fullmatch(words):
        return "surely"
    if SURELY_IN_CAPITALS.fullmatch(words) and (is_capital or PASS_OF.fullmatch(words)):
        return "in capitals"
    if PERHAPS_SECRET.fullmatch(words):
        return "perhaps"
    begins = ("_".join(parts[:number]) for number in range(1, len(parts)))
    is_one_of = not any(map(NOT_ITSELF.fullmatch, parts)) and any(
        SURELY_SECRET.fullmatch(begin) or PERHAPS_SECRET.fullmatch(begin) for begin in begins
    )
    return "perhaps" if is_one_of else ""


def _is_secret_value(name: str, value: str, is_told: bool = True) -> bool:
    """Return True if a value is a secret, from its name and its looks; `is_told` if words of a text are no values."""
    ordinary = len(value) < SHORTEST or value.lower() in ORDINARY or PLACEHOLDER.fullmatch(value)
    if ordinary or not (meaning := _meaning(name)) or os.path.exists(value):
        return False
    if "://" in value and not re.search(r"//[^/]*@|//[^/]*/.*\d", value):  # an address that anybody may know
        return False
    is_word = EXPRESSION.fullmatch(value.rstrip(".,:;!?)]}"))
    if meaning == "surely":
        return is_told or not is_word
    if meaning == "in capitals":
        return not NUMBER.fullmatch(value) and not is_word
    return not re.search(r"\s", value) and is_drawn(value)


def is_drawn(text: str) -> bool:
    """Return True for a text that looks drawn at random: letters and digits change often in one piece of it."""
    for piece in re.findall(r"[A-Za-z0-9+/=]{12,}", text):
        changes = len(re.findall(r"[a-z]+|[A-Z]+|[0-9]+|[+/=]+", piece)) - 1
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", piece)
        if all(len(word) > 2 and re.search("[aeiouy]", word) for word in words):  # layer4block2conv1
            continue
        if len(re.findall(r"\d", piece)) > 1 and _entropy(piece) > 2.8 and changes >= (len(piece) - 1) / 5:
            return True
    return False


def _entropy(text: str) -> float:
    """Return Shannon's entropy of a letter of a text, in bits."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
