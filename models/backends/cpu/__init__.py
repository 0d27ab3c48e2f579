"""Compiled layers, packed weights, attention, GEMM and chain verification in C++."""
