"""Memory of a device: copies to and from the host, packing, and collectives that the device's own library makes.

The only folder that knows CUDA, besides `mpidist.arrays`.  It is imported when an array in device memory comes up.
"""
