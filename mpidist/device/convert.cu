// Copies chunks of tensors to where they lie in a flat array of another dtype, or back: one launch for all tensors.
$includes
extern "C" __global__ void convert(
    const unsigned long long* tensors, const long long* chunks, $together* flat, int is_back)
{
    const long long* chunk = chunks + 4 * (long long)blockIdx.x;  // tensor, first element in it, first in flat, elements
    $apart* apart = ($apart*)tensors[chunk[0]] + chunk[1];
    $together* together = flat + chunk[2];
    if (is_back) {
        #pragma unroll 4
        for (long long i = threadIdx.x; i < chunk[3]; i += blockDim.x) apart[i] = ($apart)plain(together[i]);
    } else {
        #pragma unroll 4
        for (long long i = threadIdx.x; i < chunk[3]; i += blockDim.x) together[i] = ($together)plain(apart[i]);
    }
}
