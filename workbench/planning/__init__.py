"""Planning of a step: pipeline schedules as data, stages by dynamic programming, and the search over strategies.

Pure Python and NumPy: a laptop without torch or a GPU plans for 1,024 of them. The public names stand in
`__init__.pyi`; each is imported when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
