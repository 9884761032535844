"""Plain PyTorch with one thread: forward, backward, clipping, AdamW, the gradient accumulated over
the microbatches of a step. Without --microbatch the fastest size is found first. With --copies
several train independently at the same time: the ceiling of a machine with so many cores."""

import torch
import torch.multiprocessing as mp
from gpt import Stage, arguments, batch_of, divisors, loss_of, optimizer_of, report, timed


def stepper(shape, model, optimizer, microbatch):
    tokens, targets = batch_of(shape, shape.sequences)
    parts = shape.sequences // microbatch

    def step():
        for x, y in zip(tokens.split(microbatch), targets.split(microbatch)):
            (loss_of(model(x), y) / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepare(shape):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Stage(shape)
    return model, optimizer_of(model)


def fastest(shape):
    model, optimizer = prepare(shape)
    sizes = divisors(shape.sequences)
    return min(sizes, key=lambda size: timed(stepper(shape, model, optimizer, size), 2, 1))


def train(rank, shape, microbatch, barrier, results):
    model, optimizer = prepare(shape)
    step = stepper(shape, model, optimizer, microbatch)
    step()
    barrier.wait()
    results.put(timed(step, shape.steps, 1))
    # Nobody measures the end of its run on a machine that others have left.
    barrier.wait()


def main():
    parser = arguments(__doc__)
    parser.add_argument("--microbatch", type=int, help="sequences a microbatch; the fastest if not given")
    parser.add_argument("--copies", type=int, default=1)
    shape = parser.parse_args()
    microbatch = shape.microbatch or fastest(shape)
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(shape.copies), context.SimpleQueue()
    copies = mp.spawn(train, (shape, microbatch, barrier, results), shape.copies, join=False)
    while not copies.join():
        pass
    rates = [1 / results.get() for _ in range(shape.copies)]
    report("single", shape, 1 / sum(rates), copies=shape.copies, microbatch=microbatch)


if __name__ == "__main__":
    main()
