"""Points as Slurm jobs: the script, its submission, what happens inside the job, watching from outside."""
