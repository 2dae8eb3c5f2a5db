"""From a topology to running processes: the plan, its memory budget, the zygote that ranks fork
from, and the supervisor that starts, watches and ends them. Only the command line imports this.
"""
