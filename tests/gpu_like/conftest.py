"""Which tests need the pretended device, and which start them: a process collects either kind."""

import os

from gpu_like import device

collect_ignore = ["test_pretended.py"] if device.VARIABLE in os.environ else device.TESTS
