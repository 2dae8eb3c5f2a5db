"""float32 kernels for CPUs, compiled for the machine that they run on."""
