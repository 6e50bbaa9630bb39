"""GPUs: which one a rank has, and who shares it; copies to and from the host, packing, and NCCL between GPUs.

The only folder that knows CUDA, besides `mpidist.arrays`.
"""
