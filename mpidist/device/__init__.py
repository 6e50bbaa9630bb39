"""GPUs: which one a rank has, and who shares it.

The only folder that knows CUDA, besides `mpidist.arrays`.
"""
