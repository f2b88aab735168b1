"""Importing this captures the BERT of many tests, once for all worlds that are forked from the process."""

import atexit
import gc

from tests.distributed.test_every_plan import ONE_BERT

ONE_BERT()
gc.freeze()  # otherwise the first collection of a forked process would copy the pages of all that it shares
atexit.register(gc.unfreeze)  # otherwise extension modules would say that these objects leak
