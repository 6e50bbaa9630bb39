"""What Python runs at its start, with this folder on PYTHONPATH and the checkout's root behind it."""

from tests.gpu import emulated

emulated.start()
