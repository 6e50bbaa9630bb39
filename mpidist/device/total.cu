// Returns, in thread 0, the sum of a number of each thread of this block, always in the same order.
__device__ inline double total(double own)
{
    __shared__ double sums[$threads];
    __syncthreads();  // what is there may still be read
    sums[threadIdx.x] = own;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];
}
