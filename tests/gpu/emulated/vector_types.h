// CUDA's short vectors.
#pragma once
struct float2 { float x, y; };
struct double2 { double x, y; };
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
