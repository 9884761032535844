"""PyTorch's data parallel over gloo: one thread a process, each with its share of the batch,
synchronised in the last microbatch of a step; clipping and AdamW in each."""

import contextlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import Stage, arguments, batch_of, free_port, loss_of, optimizer_of, report, start_process, timed
from torch.nn.parallel import DistributedDataParallel


def train(rank, port, shape):
    start_process(rank, shape.procs, port)
    model = DistributedDataParallel(Stage(shape))
    if shape.hook == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)
    optimizer = optimizer_of(model)
    tokens, targets = batch_of(shape, shape.sequences // shape.procs, rank)
    parts = list(zip(tokens.split(shape.microbatch), targets.split(shape.microbatch)))

    def step():
        for index, (x, y) in enumerate(parts):
            with contextlib.nullcontext() if index + 1 == len(parts) else model.no_sync():
                (loss_of(model(x), y) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    seconds = timed(step, shape.steps)
    if rank == 0:
        report("ddp", shape, seconds, procs=shape.procs, hook=shape.hook, microbatch=shape.microbatch)
    dist.destroy_process_group()


def main():
    parser = arguments(__doc__)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--microbatch", type=int, default=4, help="sequences a microbatch")
    parser.add_argument("--hook", choices=["none", "bf16"], default="none", help="how gradients travel")
    shape = parser.parse_args()
    if shape.sequences % (shape.procs * shape.microbatch):
        raise SystemExit("peers: --sequences must be a multiple of --procs x --microbatch")
    mp.spawn(train, (free_port(), shape), shape.procs)


if __name__ == "__main__":
    main()
