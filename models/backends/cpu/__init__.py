"""CPU backend: layers compiled by torch.compile with packed weights, attention and GEMM kernels in C++."""
