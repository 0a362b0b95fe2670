"""Our own kernels for CPUs. Only engines on x86-64 with AVX2 and a compiler use them; torch serves all others."""
