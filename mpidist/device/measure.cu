// Writes for each block of update.cu what it would find in its piece of a gradient: the sum of the squares, and how many
// elements are not finite.  What stands behind a dollar sign is filled in by kernels.py.
$includes
struct Tensor {
    long long block, size;  // as in update.cu; what follows there is skipped
    const $gradient* gradient;
};

extern "C" __global__ void measure(const long long* table, int words, int count, double* squares, double* faults)
{
    const Tensor& tensor = *(const Tensor*)(table + (long long)tensor_of_block(table, words, count) * words);
    const long long first = (blockIdx.x - tensor.block) * $chunk;
    const int elements = (int)(tensor.size - first < $chunk ? tensor.size - first : $chunk);
    const $gradient* __restrict__ gradient_at = tensor.gradient + first;
    double square = 0, fault = 0;
    for (int i = threadIdx.x; i < elements; i += $batch * blockDim.x) {
        $gradient g_of[$batch];
        #pragma unroll
        for (int k = 0; k < $batch; k++) {  // all are on their way before the first one is needed
            const int next = i + k * blockDim.x;
            g_of[k] = gradient_at[next < elements ? next : elements - 1];
        }
        #pragma unroll
        for (int k = 0; k < $batch; k++) {
            const double g = (double)plain(g_of[k]);
            if (i + k * (int)blockDim.x >= elements) continue;
            square += g * g;
            fault += g - g == 0 ? 0 : 1;
        }
    }
    square = total(square), fault = total(fault);
    if (threadIdx.x == 0) squares[blockIdx.x] = square, faults[blockIdx.x] = fault;
}
