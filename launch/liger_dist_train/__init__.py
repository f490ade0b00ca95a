"""The training program: ``liger-dist train``, or ``torchrun -m liger_dist_train`` on several GPUs."""
