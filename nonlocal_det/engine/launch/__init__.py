"""The processes of a run: started here, or by torchrun or Slurm."""
