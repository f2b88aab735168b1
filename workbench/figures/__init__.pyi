"""The public names of the room, listed once."""

from .figure import Figure as Figure
from .figure import save as save
from .figure import save_html as save_html
from .norms_view import magnitudes as magnitudes
from .norms_view import norms as norms
from .run_views import Report as Report
from .run_views import exploration as exploration
from .run_views import ladder as ladder
from .run_views import pair_difference as pair_difference
from .run_views import pareto as pareto
from .run_views import parity_figure as parity_figure
from .run_views import partition as partition
from .run_views import pattern as pattern
from .run_views import timeline as timeline
from .sweep_view import best_so_far as best_so_far
from .sweep_view import frontier as frontier
from .sweep_view import heat_map as heat_map
from .sweep_view import parallel_coordinates as parallel_coordinates
from .sweep_view import predictions as predictions
from .sweep_view import scaling_efficiency as scaling_efficiency
from .sweep_view import seed_bands as seed_bands
