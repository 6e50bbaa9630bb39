// Returns on which of some tensors this block of threads works: the last one that begins at this block or before it.  A
// tensor is a row of the table, of so many words; its first word is its first block.
__device__ inline int tensor_of_block(const long long* table, int words, int count)
{
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table[(long long)middle * words] <= blockIdx.x) low = middle; else high = middle;
    }
    return low;
}
