"""How long gloo's ranks take to sum their slices of float32, by rank 0's clock.

Usage: torchrun --nproc-per-node 2 allreduce_gloo.py [BYTES ROUNDS]. Needs torch. Results are not verified.
"""
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
n = dist.get_world_size()
asked = [int(word) for word in sys.argv[1:]]
for size in asked[:1] or [4, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]:
    x, times = torch.ones(size // 4), []
    for _ in range(asked[1] if asked else 60 if size <= 1 << 20 else 12):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - start)
        x.fill_(1.0)
    median = sorted(times)[len(times) // 2]
    if dist.get_rank() == 0:
        print(f"{size:>10} B  p50 {median * 1e6:>11.2f} us  algbw {size / median / 1e9:>7.3f} GB/s")
dist.destroy_process_group()
