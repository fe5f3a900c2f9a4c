"""Trials as jobs of a Slurm cluster: submitted through submitit, followed through their files, found again by id."""
