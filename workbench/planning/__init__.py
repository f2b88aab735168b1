"""How a step is divided: schedules as data, stages by dynamic programming, and the search over degrees.

    plan = search(profile, global_batch=256, seq_len=512, precision="bf16", cluster=Cluster.of("h200", gpus=4))

Pure Python and NumPy: a laptop without torch or a GPU plans for 1,024 of them.
"""

from workbench.planning.plan import Candidate, Memory, Plan, Prediction, Stage
from workbench.planning.plans import Plans
from workbench.planning.requests import RUNNABLE, Request, Runnable
from workbench.planning.schedules import Action, TimedAction, Timeline, bubble_fraction, simulate
from workbench.planning.searching import search, weigh, what_if
from workbench.planning.timelines import timeline

__all__ = [
    "RUNNABLE",
    "Action",
    "Candidate",
    "Memory",
    "Plan",
    "Plans",
    "Prediction",
    "Request",
    "Runnable",
    "Stage",
    "TimedAction",
    "Timeline",
    "bubble_fraction",
    "search",
    "simulate",
    "timeline",
    "weigh",
    "what_if",
]
