"""What is assumed about JAX and is not in its documentation; each test says what would break."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.mpi


def test_arrays_have_weak_types():
    """Else results take another dtype than the leaf where they are combined with others."""
    weak, strong = jnp.asarray(2.0), jnp.asarray(2.0, "float32")
    assert weak.weak_type and not strong.weak_type
    short = jnp.ones((), "bfloat16")
    assert (weak * short).dtype == "bfloat16" and (strong * short).dtype == "float32"
    assert not getattr(jax.random.key(0), "weak_type", False)


def test_a_device_has_a_number_in_its_machine():
    """Else arrays on the second GPU of a rank are made on the first; the number is that of CUDA, and 0 on one CPU."""
    devices = jax.devices("cpu")
    assert [each.local_hardware_id for each in devices] == [*range(len(devices))]
