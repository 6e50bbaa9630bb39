// Copies chunks of tensors to where they lie in a flat array, or back: one launch for all tensors.
extern "C" __global__ void move(
    const unsigned long long* tensors, const long long* chunks, unsigned long long flat, int is_back)
{
    const long long* chunk = chunks + 4 * (long long)blockIdx.x;  // tensor, first byte in it, first byte in flat, bytes
    unsigned long long apart = tensors[chunk[0]] + chunk[1], together = flat + chunk[2];
    const char* source = (const char*)(is_back ? together : apart);
    char* target = (char*)(is_back ? apart : together);
    long long bytes = chunk[3], done = 0;
    if ((((unsigned long long)source | (unsigned long long)target) & 15) == 0) {
        long long words = bytes / 16;
        const uint4* from = (const uint4*)source;
        uint4* to = (uint4*)target;
        #pragma unroll 4
        for (long long i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
        done = 16 * words;
    } else if ((((unsigned long long)source | (unsigned long long)target) & 3) == 0) {
        long long words = bytes / 4;
        const unsigned int* from = (const unsigned int*)source;
        unsigned int* to = (unsigned int*)target;
        #pragma unroll 4
        for (long long i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
        done = 4 * words;
    }
    for (long long i = done + threadIdx.x; i < bytes; i += blockDim.x) target[i] = source[i];
}
