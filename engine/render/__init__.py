"""Files for schedulers that run `asapctl launch` on several nodes: Slurm's, and Kubernetes'."""
