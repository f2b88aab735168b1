"""Planning of a step: pipeline schedules as data, stages by dynamic programming, and the search over strategies.

    plan = search(profile, global_batch=256, seq_len=512, precision="bf16", cluster=Cluster.of("h200", gpus=4))

Pure Python and NumPy: a laptop without torch or a GPU plans for 1,024 of them.
"""

from workbench.planning.explanation import explain
from workbench.planning.plan import Candidate, Memory, Plan, Prediction, Stage
from workbench.planning.predicted_timeline import timeline
from workbench.planning.request import Request
from workbench.planning.search import search, what_if
from workbench.planning.simulation import TimedAction, Timeline, bubble_fraction, simulate
from workbench.planning.table import Plans, weigh

__all__ = [
    "Action",
    "Candidate",
    "Memory",
    "Plan",
    "Plans",
    "Prediction",
    "Request",
    "Stage",
    "TimedAction",
    "Timeline",
    "bubble_fraction",
    "explain",
    "search",
    "simulate",
    "timeline",
    "weigh",
    "what_if",
]
