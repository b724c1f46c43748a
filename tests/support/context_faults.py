"""Run by test_torch_context_decode.py and test_torch_context_transport.py in each of two processes: rank 1 ends without taking
part in the call of rank 0.
"""

from __future__ import annotations

import datetime
import os
import sys

import libflash.torch
import torch
import torch.distributed as dist

rank, store, call = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if "shared memory" in sys.argv:
    sys.path.append(os.path.dirname(__file__))
    import shared_memory

    shared_memory.install()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))
q, k = torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, 2, 16)
# Once together, so that the processes are connected.
out = libflash.torch.context_parallel_attention(q.clone().requires_grad_(), k, k, scheme="ring")
if rank == 1:
    os._exit(0)
try:
    if call == "backward":
        out.sum().backward()
    elif call == "decode":
        lengths = torch.tensor([8], dtype=torch.int32)
        libflash.torch.context_parallel_decode(q[:, :1], k, k, cache_seqlens=lengths, check=False)
    else:
        libflash.torch.context_parallel_attention(q, k, k, scheme=call, check=False)
except RuntimeError as error:
    print("raised", str(error)[:200], flush=True)
else:
    print("no error", flush=True)
os._exit(0)  # the group cannot be closed in order
