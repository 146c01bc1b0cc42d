import torch

torch.set_num_threads(1)  # tests run side by side, and engines promise equal bits with one thread
