// Applies the step of an optimizer to all elements of some tensors in one launch.  What stands behind a dollar sign is
// filled in by kernels.py.
$includes
typedef $real real;

struct Tensor {
    long long block, size;  // the first block of threads that works on it; elements
    const $gradient* gradient;
    double factor, decay, limit;  // as in `Step` of the optimizers; elements of gradients are cut off at the limit
    $number_members
    $parameter* parameter;
    $slot_members
};

// A function, so that names of a formula do not meet those of the kernel.
__device__ inline void apply(real& p, real g$slot_parameters$number_parameters)
{
    $statement
}

// `left_out` and `shrinkages` are parts of the verdict of judge.cu, with a shrinkage for each tensor or one for all; both
// are null where there was none.
extern "C" __global__ void update(const Tensor* tensors, int count, const double* left_out, const double* shrinkages,
                                  int is_each)
{
    if (left_out && *left_out != 0) return;
    const int number = tensor_of_block((const long long*)tensors, sizeof(Tensor) / sizeof(long long), count);
    const Tensor& tensor = tensors[number];
    const long long first = (blockIdx.x - tensor.block) * $chunk;
    const int elements = (int)(tensor.size - first < $chunk ? tensor.size - first : $chunk);
    $parameter* __restrict__ parameter_at = tensor.parameter + first;
    const $gradient* __restrict__ gradient_at = tensor.gradient + first;
    $slots_at
    const real factor = (real)(shrinkages ? tensor.factor * shrinkages[is_each ? number : 0] : tensor.factor);
    const real decay = (real)tensor.decay, limit = (real)tensor.limit;
    $numbers_read
    for (int i = threadIdx.x; i < elements; i += $batch * blockDim.x) {
        real p_of[$batch], g_of[$batch]$slots_of;
        #pragma unroll
        for (int k = 0; k < $batch; k++) {  // all are on their way before the first one is needed
            const int next = i + k * blockDim.x, at = next < elements ? next : elements - 1;
            p_of[k] = (real)plain(parameter_at[at]), g_of[k] = (real)plain(gradient_at[at]);
            $slots_read
        }
        #pragma unroll
        for (int k = 0; k < $batch; k++) {
            const int at = i + k * blockDim.x;
            real p = p_of[k], g = g_of[k] * factor;
            if (g > limit) g = limit;
            if (g < -limit) g = -limit;
            if (decay != 0) p -= p * decay;
            apply(p, g$slots$numbers);
            if (at < elements) {
                parameter_at[at] = ($parameter)p;
                $slots_written
            }
        }
    }
}
