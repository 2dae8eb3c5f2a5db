"""What knows an accelerator: streams, memory, process groups, fast operators.

`base` says what a device is, `cpu`, `cuda` and `npu` are the devices, `fused` is the table of
operators that a device does better than plain torch. Imported by model, comm and worker; imports
torch and nothing of ours but errors. What could not be run on hardware says so.
"""
