"""PyTorch's pipeline schedules over gloo: two stages of one thread each, gradients clipped to their
norm over both stages, AdamW in each."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import Stage, arguments, batch_of, free_port, loss_of, optimizer_of, report, start_process, timed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

STAGES = 2


def train(rank, port, shape):
    start_process(rank, STAGES, port)
    split = shape.layers // 2 if shape.split is None else shape.split
    model = Stage(shape, 0, split) if rank == 0 else Stage(shape, split, shape.layers)
    stage = PipelineStage(model, rank, STAGES, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[shape.schedule](stage, shape.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of(model)
    tokens, targets = batch_of(shape, shape.sequences)

    def step():
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=[])
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        squared = norm.square()
        dist.all_reduce(squared)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squared.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    seconds = timed(step, shape.steps)
    if rank == 0:
        report("pipe", shape, seconds, schedule=shape.schedule, stages=STAGES, microbatches=shape.microbatches, split=split)
    dist.destroy_process_group()


def main():
    parser = arguments(__doc__)
    parser.add_argument("schedule", choices=["gpipe", "1f1b"])
    parser.add_argument("--microbatches", type=int, default=16, help="a step")
    parser.add_argument("--split", type=int, help="layers of the first stage; half if not given")
    shape = parser.parse_args()
    if shape.sequences % shape.microbatches:
        raise SystemExit("peers: --sequences must be a multiple of --microbatches")
    if shape.tied:
        raise SystemExit("peers: these schedules do not share a tied head between stages: leave out --tied")
    mp.spawn(train, (free_port(), shape), STAGES)


if __name__ == "__main__":
    main()
