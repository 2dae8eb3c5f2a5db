"""What this machine has, what the shipped topologies need, and what to do about the difference.

Touches no device and imports neither torch nor torch_npu: what can break by being imported is
imported in a process of its own. Imported by the command `asapctl doctor`; imports launch,
topology.
"""
