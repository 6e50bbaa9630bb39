"""GPUs under real MPI, with a pretended CuPy: ranks agree on whether any may have one, and all learn of all cards."""

from __future__ import annotations

import pytest

from tests.helpers.launch import run_job

#: CuPy shows two GPUs to the ranks of which the first argument tells; the second tells whose GPU is busy.
PRETENDED = """
import logging, os, sys, types
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))

# like ``--gpu-bind=closest`` with two GPUs a socket: ranks of odd numbers see others, which they call 0 and 1, too.
shift = rank % 2 * 2 if sys.argv[3:] else 0

class Device:
    def __init__(self, index):
        self.pci_bus_id = f"0000:0{index + shift}:00.0"
    def use(self):
        if str(rank) in sys.argv[2]:
            raise RuntimeError("cudaErrorDevicesUnavailable")

runtime = types.SimpleNamespace(
    getDeviceCount=lambda: 2, getDeviceProperties=lambda index: {"name": b"H100", "totalGlobalMem": 1}
)
cupy = types.ModuleType("cupy")
cupy.ndarray, cupy.cuda = type("ndarray", (), {}), types.SimpleNamespace(Device=Device, runtime=runtime)
sys.modules["cupy"] = cupy if str(rank) in sys.argv[1] else None

import mpidist
from mpidist.cluster import devices
from mpidist.world import world_communicator
devices._DRIVER_FILES = (__file__,)
"""

SCRIPT = (
    PRETENDED
    + """
try:
    extended = mpidist.MultiWorkerMirroredStrategy().extended
    cards = ",".join(card.bus_id if card else "none" for card in extended.cards) or "not asked"
    told = f"{cards} {extended.device_name.rpartition('device:')[2]} {extended.card_text}"
except mpidist.errors.DeviceError as error:
    told = f"DeviceError: {error}".partition(".")[0]
calls = world_communicator().control.call
mpidist.barrier()
print(f"rank {rank}: {told.strip()}, {calls} calls", flush=True)
"""
)


@pytest.mark.parametrize(
    ("seeing", "busy", "expected"),
    [
        ("-", "-", ["not asked CPU:0, 0 calls"] * 3),
        (
            "012",
            "-",
            [
                "0000:00:00.0,0000:01:00.0,0000:00:00.0 GPU:0 H100 0000:00:00.0, shared with rank 2, 2 calls",
                "0000:00:00.0,0000:01:00.0,0000:00:00.0 GPU:1 H100 0000:01:00.0, 2 calls",
                "0000:00:00.0,0000:01:00.0,0000:00:00.0 GPU:0 H100 0000:00:00.0, shared with rank 0, 2 calls",
            ],
        ),
        (
            "1",
            "-",
            [
                "none,0000:00:00.0,none CPU:0, 2 calls",
                "none,0000:00:00.0,none GPU:0 H100 0000:00:00.0, 2 calls",
                "none,0000:00:00.0,none CPU:0, 2 calls",
            ],
        ),
    ],
)
def test_ranks_know_who_has_which_card(seeing, busy, expected):
    result = run_job(3, SCRIPT, [seeing, busy])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: {told}" for rank, told in enumerate(expected)]


def test_a_gpu_that_cannot_be_used_is_an_error_on_all_ranks():
    result = run_job(3, SCRIPT, ["02", "2"])
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line.partition(" (")[0] for line in lines] == [f"rank {rank}: DeviceError: rank 2" for rank in range(3)]
    assert all("GPU 1 cannot be used: cudaErrorDevicesUnavailable" in line for line in lines)


def test_ranks_to_which_the_launcher_shows_other_gpus_take_one_each():
    result = run_job(4, SCRIPT, ["0123", "-", "other sets"])
    assert result.returncode == 0, result.stderr
    cards = ",".join(f"0000:0{number}:00.0" for number in (0, 2, 1, 3))
    expected = [f"{cards} GPU:{rank // 2} H100 0000:0{card}:00.0, 2 calls" for rank, card in enumerate((0, 2, 1, 3))]
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: {told}" for rank, told in enumerate(expected)]


SERVERS = (
    PRETENDED
    + """
logging.basicConfig(level="INFO")
extended = mpidist.ParameterServerStrategy().extended
print(f"rank {rank}: {extended.device_name.rpartition('device:')[2]} {extended.card_text}", flush=True)
"""
)


def test_the_table_of_cards_says_where_servers_have_their_variables():
    result = run_job(4, SERVERS, ["0123", "-"])
    assert result.returncode == 0, result.stderr
    text = result.stderr
    table = text[text.index("GPUs of the ranks:") :].splitlines()[1:5]
    assert [line.split(maxsplit=3)[3] for line in table] == [  # behind rank and host
        "GPU:0   H100  0000:00:00.0  shared with rank 2",
        "GPU:1   H100  0000:01:00.0",
        "GPU:0   H100  0000:00:00.0  shared with rank 0",
        "no GPU                      a server: variables in host memory",
    ]
    assert sorted(result.stdout.splitlines())[-3:] == [
        "rank 0: GPU:0 H100 0000:00:00.0, shared with rank 2",
        "rank 1: GPU:1 H100 0000:01:00.0",
        "rank 2: GPU:0 H100 0000:00:00.0, shared with rank 0",
    ]
