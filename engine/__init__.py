"""The engine: asynchronous, disaggregated prefill for Mixture-of-Experts models.

Nothing here knows the command line. Imports go down only:
launch, offline -> control, kv -> worker -> comm, model, schedule -> device, topology.
"""

__version__ = "0.1.0"
