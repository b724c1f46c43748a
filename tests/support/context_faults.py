"""Run by test_torch_context_decode.py and test_torch_context_transport.py in each of two processes: rank 1 ends without taking
part in the call of rank 0, or, with the argument "stuck", goes on without taking part. Prints how long rank 0 waited.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import sys
import time

import libflash.torch
import torch
import torch.distributed as dist

LIMIT = 8  # seconds: the time limit of the process group if a rank is stuck
rank, store, call = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if "shared memory" in sys.argv:
    import shared_memory

    shared_memory.install()
on_gpus = "cuda" in sys.argv
device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
backend = "nccl" if on_gpus else "gloo"
limit = datetime.timedelta(seconds=LIMIT if "stuck" in sys.argv else 10 if on_gpus else 20)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
q, k = torch.zeros(1, 8, 4, 16, device=device), torch.zeros(1, 8, 2, 16, device=device)
# One call of both ranks, so that the processes are connected.
out = libflash.torch.context_parallel_attention(q.clone().requires_grad_(), k, k, scheme="ring")
if on_gpus:
    torch.cuda.synchronize()
if rank == 1:
    while "stuck" in sys.argv and not pathlib.Path(f"{store}.done").exists():
        time.sleep(0.1)
    os._exit(0)
begun = time.monotonic()
try:
    if call == "backward":
        out.sum().backward()
    elif call == "decode":
        lengths = torch.tensor([8], dtype=torch.int32)
        libflash.torch.context_parallel_decode(q[:, :1], k, k, cache_seqlens=lengths, check=False)
    else:
        libflash.torch.context_parallel_attention(q, k, k, scheme=call, check=False)
    if on_gpus:
        torch.cuda.synchronize()
except RuntimeError as error:
    print("raised", f"after {time.monotonic() - begun:.0f} s:", str(error)[:200], flush=True)
else:
    print("no error", flush=True)
pathlib.Path(f"{store}.done").touch()
os._exit(0)  # the group cannot be closed in order
