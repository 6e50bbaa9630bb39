// Makes of what measure.cu found what update.cu asks: `verdict[0]`, whether the step is left out; from then on, what
// gradients are multiplied by so that their norm is within the limit, if there is one.  Each number is of one block of
// threads, by the elements of `squares` or `faults` in its span.
$includes
struct Span {
    long long first, last;
};

extern "C" __global__ void judge(const Span* spans, const double* squares, const double* faults, double factor,
                                 double limit, int skips, double* verdict)
{
    const Span span = spans[blockIdx.x];
    const bool is_flag = blockIdx.x == 0;
    const double* values = is_flag ? faults : squares;
    double sum = 0;
    for (long long i = span.first + threadIdx.x; i < span.last; i += blockDim.x) sum += values[i];
    sum = total(sum);
    if (threadIdx.x != 0) return;
    const double norm = sqrt(sum) * fabs(factor), rest = norm - norm;  // 0, or NaN where the norm is not finite
    if (is_flag) verdict[0] = skips && sum != 0;
    else if (limit == 0) verdict[blockIdx.x] = 1;
    else verdict[blockIdx.x] = rest == 0 ? limit / (norm > limit ? norm : limit) : rest;
}
