"""Run queues: sweeps over values of an experiment, and grids of plans, which share the devices of one machine.

The public names stand in `__init__.pyi`; each is imported when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
