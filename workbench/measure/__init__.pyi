"""The public names of the room, listed once."""

from .calibration import Calibration as Calibration
from .calibration import calibrate as calibrate
from .calibration import local_cluster as local_cluster
