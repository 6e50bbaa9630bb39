"""Environments of real launchers, recorded on a test cluster (Slurm 22.05, Open MPI 5.0.11, MPICH 5.0.2)."""

from __future__ import annotations

#: mpirun of Open MPI, rank 1 of 2 on one machine.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-4051@1",
    "PRTE_LAUNCHED": "1",
}

#: mpiexec of MPICH, rank 1 of 2 on one machine.
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

_JOB = {
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODELIST": "node[1-2]",
}

#: A batch script of 4 tasks on 2 nodes, itself: nothing has been launched.
BATCH_SCRIPT = {
    **_JOB,
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

#: The shell of an allocation (salloc) of 4 tasks.
ALLOCATION_SHELL = {**_JOB, "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}

#: srun --mpi=none, rank 2 of 3 on 2 nodes.
SRUN = {
    **_JOB,
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}

#: The same with --mpi=pmi2 and --mpi=pmix.
SRUN_PMI2 = {
    **SRUN,
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_FD": "13",
    "PMI_JOBID": "1.0",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
}
SRUN_PMIX = {**SRUN, "SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.3.0"}

#: mpirun of Open MPI in a batch script, rank 3 of 4 on the second node: the step is that of mpirun's daemon.
OPEN_MPI_IN_BATCH = {
    **_JOB,
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node1-76@1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node2",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

#: mpiexec of MPICH in a batch script, rank 3 of 4 on the second node: the step is that of mpiexec's proxies.
HYDRA_IN_BATCH = {
    **_JOB,
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "6",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
