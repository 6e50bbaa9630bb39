// Copies chunks of tensors to where they lie in a flat array of another dtype, or back, multiplied by a factor or
// not: one launch for all tensors.
$includes
template <class From, class To> __device__ inline void copy(
    const From* from, To* to, int elements, const $together factor)
{
    for (int i = threadIdx.x; i < elements; i += $batch * blockDim.x) {
        From values[$batch];
        #pragma unroll
        for (int k = 0; k < $batch; k++) {  // all are on their way before the first one is needed
            const int at = i + k * blockDim.x;
            values[k] = from[at < elements ? at : elements - 1];
        }
        #pragma unroll
        for (int k = 0; k < $batch; k++) {
            const int at = i + k * blockDim.x;
            if (at < elements) to[at] = (To)$value;
        }
    }
}

extern "C" __global__ void convert(
    const unsigned long long* tensors, const long long* chunks, $together* flat, int is_back, double factor)
{
    const long long* chunk = chunks + 4 * (long long)blockIdx.x;  // tensor, first element in it, first in flat, elements
    $apart* apart = ($apart*)tensors[chunk[0]] + chunk[1];
    $together* together = flat + chunk[2];
    const int elements = (int)chunk[3];
    if (is_back) copy(together, apart, elements, ($together)factor);
    else copy(apart, together, elements, ($together)factor);
}
