"""CUDA kernels on the CPU, threads taking turns in an order that is drawn: what races and indices do, without a GPU.

Sources are preprocessed as they are; inline PTX becomes calls of functions that do what the instruction does. What the
hardware does at its own time (copies of the bulk copy engine, products of tensor cores) is done late and out of order,
so that code which does not wait for it fails, in every run alike.
"""
