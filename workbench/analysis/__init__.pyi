"""The public names of the room, listed once."""

from .bisection import Bisection as Bisection
from .contrast import Contrast as Contrast
from .deviation import Deviation as Deviation
from .ladder import KAPLAN as KAPLAN
from .ladder import ChinchillaLaw as ChinchillaLaw
from .ladder import KaplanLaw as KaplanLaw
from .ladder import LadderPoint as LadderPoint
from .ladder import PairExpectation as PairExpectation
from .ladder import ScalingLaw as ScalingLaw
from .ladder import expected_difference as expected_difference
from .ladder import ladder_points as ladder_points
from .ladder import parameters_without_embeddings as parameters_without_embeddings
from .ladder import scaling_law as scaling_law
from .pareto import SampleFlops as SampleFlops
from .pareto import sample_flops as sample_flops
from .parity import DivisionParity as DivisionParity
from .parity import Parity as Parity
from .plateau import ContextFree as ContextFree
from .plateau import Departure as Departure
from .plateau import context_free as context_free
from .plateau import left_plateau as left_plateau
from .plateau import stop_on_plateau as stop_on_plateau
from .seed_contrast import SeedContrast as SeedContrast
