"""The real NCCL where there is no GPU: it loads, makes ids, and says why it cannot start."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import asdict
from importlib import metadata

import pytest

import mpidist
from mpidist.collectives.persistent import Once
from mpidist.commands.main import main
from mpidist.device import nccl
from mpidist.device.cards import Card, dotted_nccl
from mpidist.errors import MissingDependencyError, TransportError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator
from tests.gpu import library

cupy = pytest.importorskip("cupy")
binding = pytest.importorskip("cupy.cuda.nccl")
if not library.missing():
    pytest.skip("there is a GPU; CUDA_VISIBLE_DEVICES= hides it", allow_module_level=True)

#: CUDA's words without a driver, and without a device.
_NO_GPU = "CUDA driver version is insufficient|no CUDA-capable device"


def test_a_failed_start_quotes_nccl_and_its_warning(monkeypatch):
    """All but the GPU is real: CuPy's choice of a device is left out, for it would fail before NCCL is asked.

    It comes first: NCCL looks once in a process where its warnings are to go.  One rank, for they are a process's.
    """
    card = asdict(Card("node", "0000:01:00.0", 0, "none"))
    facts = {"why": "", "version": binding.get_version(), "card": card, "problem": "", "seen": []}
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(nccl, "_facts", lambda: facts)
    monkeypatch.setattr(cupy.cuda, "Device", nullcontext)

    def start():
        communicator = world_communicator()
        call = communicator.call("all_reduce(sum)")
        with pytest.raises(TransportError) as caught:
            Once(communicator, call, lambda watch: nccl.connect(communicator.transport, watch))(None)
        return str(caught.value)

    (told,) = run_ranks(1, start)
    quoted = rf"rank 0 of 1: NCCL could not start: rank 0: .*unhandled cuda error .*Cuda failure '({_NO_GPU}).*=staged"
    assert re.search(quoted, told), told


def test_the_binding_tells_the_version_of_the_wheel_and_makes_ids():
    assert dotted_nccl(binding.get_version()) == metadata.version("nvidia-nccl-cu13")
    first, second = binding.get_unique_id(), binding.get_unique_id()
    assert len(first) == len(second) == 128 and first != second


def test_info_names_nccl_and_the_lack_of_a_gpu(capsys):
    main(["info"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("NCCL ")] == [metadata.version("nvidia-nccl-cu13")]
    assert any(line.startswith("GPUs") and "CUDA shows none" in line for line in lines)


def test_who_asks_for_nccl_is_told_why_there_is_none_and_what_works():
    options = mpidist.CommunicationOptions(implementation=mpidist.CommunicationImplementation.NCCL)
    needs = rf"NcclAllReduce needs an NVIDIA GPU.*({_NO_GPU})(?!.*pip install).*nvidia-smi.*RingAllReduce"
    with pytest.raises(MissingDependencyError, match=needs):
        mpidist.MultiWorkerMirroredStrategy(communication_options=options)
    with pytest.raises(MissingDependencyError, match=needs):
        mpidist.MirroredStrategy(cross_device_ops=mpidist.NcclAllReduce())
