"""`TPUClusterResolver`: the ranks under the name that guides use for TPUs."""

from __future__ import annotations

import pytest

import mpidist
from mpidist.cluster.resolvers.mpi import TPUClusterResolver


@pytest.mark.parametrize("tpu", ["", "local", None])
def test_it_stands_for_the_ranks(tpu):
    resolver = TPUClusterResolver(tpu=tpu)
    mpidist.config.experimental_connect_to_cluster(resolver)
    mpidist.config.experimental_connect_to_host(resolver.master())
    topology = mpidist.tpu.experimental.initialize_tpu_system(resolver)
    assert topology.mesh_shape == (1, 1, 1, 1)
    strategy = mpidist.experimental.TPUStrategy(resolver)
    assert strategy.cluster_resolver is resolver and strategy.num_replicas_in_sync == 1
    assert strategy.run(lambda: 3, options=mpidist.RunOptions()) == 3
    mpidist.tpu.experimental.shutdown_tpu_system(resolver)


def test_there_are_no_others():
    with pytest.raises(ValueError, match="no TPU 'grpc://10.0.0.2' behind MPI"):
        TPUClusterResolver.connect("grpc://10.0.0.2")
