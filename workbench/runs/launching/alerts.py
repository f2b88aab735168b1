"""Alerts of a run: its loss is not finite, has stopped to fall, the run has failed or has ended.

The supervisor notes them while it reads the run's log. Nothing leaves this machine unless `$WORKBENCH_WEBHOOK` holds
the address that asks for it: a process of its own then posts one JSON object an alert, and whatever becomes of it
disturbs no run. The address is a secret, and is stored nowhere.
"""

from __future__ import annotations

import json
import math
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.base.secrets import masked_words
from workbench.record.rundir import FINAL_STATES, RunDir, log_event, read_object
from workbench.runs.launching import processes

WEBHOOK = "WORKBENCH_WEBHOOK"
"""Environment variable with the address to which alerts are posted."""
POSTED = "WORKBENCH_ALERT"
"""Environment variable with the JSON that the process which posts an alert sends."""
ANSWER_S = 10.0
"""Longest wait in s for the answer of a webhook."""
LEAST_ROWS, MOST_ROWS, SHARE, BLOCKS = 50, 10_000, 0.1, 5
"""A plateau is judged over two stretches of a tenth of the run's steps, of 50 to 10,000 logged ones. The mean of each
has the standard error of its five parts."""
MARGIN, AGAIN = 2.0, 4.0
"""Standard errors by which a loss must fall from one stretch to the next so that there is no plateau, and by which it
must have fallen before another one is told."""


class AlertWatch:
    """Notes what of a run's log is an alert, each once; of plateaus the next one after the loss has fallen again."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        asked = read_object(run.experiment)
        tracking = asked.get("tracking")
        every = tracking.get("log_every") if isinstance(tracking, Mapping) else None
        steps = asked.get("steps")
        rows = SHARE * steps / (every or 1) if isinstance(steps, int) else 0
        self._stretch = BLOCKS * math.ceil(min(MOST_ROWS, max(LEAST_ROWS, rows)) / BLOCKS)
        self._losses = deque[float](maxlen=2 * self._stretch)
        self._since, self._is_flat, self._was_finite = 0, False, True

    def note_step(self, step: int, loss: float | None) -> None:
        """Look at a logged step."""
        if loss is None or not math.isfinite(loss):
            if self._was_finite:
                self._was_finite = False
                self.tell("not finite", f"The loss of step {step:,} is {math.nan if loss is None else loss}.", step)
            return
        self._was_finite = True
        self._losses.append(loss)
        self._since += 1
        if len(self._losses) < 2 * self._stretch or self._since < self._stretch // BLOCKS:
            return
        self._since = 0
        fell, error = fall(np.array(self._losses))
        if not self._is_flat and fell < MARGIN * error:
            self._is_flat = True
            change = f"{-fell:+.3g} ± {error:.2g}"
            self.tell("plateau", f"Up to step {step:,} the training loss has changed by {change} only.", step)
        elif fell > AGAIN * error:
            self._is_flat = False

    def note_state(self, state: str, message: str) -> None:
        """Look at a state that the run enters."""
        if state in FINAL_STATES:
            self._post("failed" if state == "failed" else "ended", f"The run has {_ENDS[state]}. {message}")

    def tell(self, alert: str, message: str, step: int) -> None:
        """Log an alert, and post it if a webhook is asked for."""
        log_event(self._run.events, "alert", alert=alert, message=message, step=step)
        self._post(alert, message)

    def _post(self, alert: str, message: str) -> None:
        if not os.environ.get(WEBHOOK):
            return
        name = self._run.path.name
        text = masked_words(f"{name}: {message}")
        # Slack, Mattermost and Teams read `text`, and Discord `content`.
        posted = json.dumps({"text": text, "content": text, "alert": alert, "run": masked_words(name)})
        environment = {**os.environ, POSTED: posted}
        try:
            processes.start_detached(__name__, log=self._run.log("alerts"), environment=environment)
        except Exception as error:  # a machine without processes, memory or disk: the run goes on
            print(f"An alert could not be posted: {masked_words(str(error))}", file=sys.stderr, flush=True)


_ENDS = {"finished": "finished", "stopped": "been stopped", "failed": "failed"}


def fall(losses: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Return by how much the mean of the second half of losses lies below that of the first, and its standard error.

    The error is that of the means of the parts of each half, so that neighbours which go together count as one.
    """
    parts = losses.reshape(2, BLOCKS, -1).mean(2)
    before, after = parts.mean(1)
    return float(before - after), float(np.sqrt((parts.var(1, ddof=1) / BLOCKS).sum()))


def post(address: str, posted: str) -> str:
    """Post a JSON text; return why that failed, without the address, or an empty text."""
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
        return f"${WEBHOOK} is no address that begins with https:// or http://."
    headers = {"Content-Type": "application/json", "User-Agent": "workbench"}
    request = urllib.request.Request(address, posted.encode(), headers, method="POST")
    try:
        urllib.request.urlopen(request, timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code} {error.reason}"
    except Exception as error:  # of sockets, certificates, proxies or a wrong address
        reason = getattr(error, "reason", error)
        return f"the webhook was not reached: {str(reason).replace(address, '***')}"
    return ""


def main() -> int:
    """Post the alert of the environment; what is printed is the run's log of alerts."""
    try:
        why = post(os.environ[WEBHOOK], os.environ[POSTED])
    except ValueError as error:  # an address that cannot be taken apart
        why = f"${WEBHOOK} is no address: {str(error).replace(os.environ[WEBHOOK], '***')}"
    print(masked_words(f"not posted: {why}") if why else "posted", flush=True)
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
